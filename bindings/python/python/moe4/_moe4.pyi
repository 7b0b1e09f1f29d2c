"""The compiled part: tensors in, tensors out, without defaults."""

from collections.abc import Sequence
from typing import Optional

from torch import Tensor

__version__: str

def doctor() -> list[tuple[str, str]]: ...
def compile_kernels(ordinal: int, activation: str, glu_layout: str) -> None: ...
def raise_faults(ordinal: int) -> None: ...
def hadamard_amax(x: Tensor, splits: Optional[Tensor], sign_mask: int) -> tuple[Tensor, Tensor]: ...
def group_quantize(
    x: Tensor,
    splits: Optional[Tensor],
    *,
    rowwise: bool,
    columnwise: bool,
    rht: Optional[int],
    seed: Optional[int],
    stream: int,
    swizzled: bool,
    amax: Optional[Tensor],
    amax_rht: Optional[Tensor],
) -> tuple[Optional[tuple[Tensor, Tensor, Tensor]], Optional[tuple[Tensor, Tensor, Tensor]]]: ...
def quantize_weights(
    weights: Sequence[Tensor], with_values: bool
) -> tuple[Tensor, Tensor, Tensor, Optional[Tensor]]: ...
def dequantize(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    splits: Optional[Tensor],
    *,
    rows: int,
    cols: int,
    columnwise: bool,
    swizzled: bool,
) -> Tensor: ...
def check_options(options: str) -> None: ...
def plan(options: str, input: bool, weights: bool) -> str: ...
def saved_forms(options: str, input: bool, weights: bool) -> tuple[bool, str, str]: ...
def forward(
    options: str,
    x: Tensor,
    prob: Tensor,
    splits: Tensor,
    w1: Sequence[Tensor],
    w2: Sequence[Tensor],
    b1: Optional[Tensor],
    b2: Optional[Tensor],
    input: bool,
    weights: bool,
) -> list[Tensor]: ...
def backward(
    options: str,
    dy: Tensor,
    x: Tensor,
    prob: Tensor,
    splits: Tensor,
    w1: Sequence[Tensor],
    w2: Sequence[Tensor],
    b1: Optional[Tensor],
    b2: Optional[Tensor],
    saved: Sequence[Tensor],
    seed: Tensor,
    dw1: Sequence[Tensor],
    dw2: Sequence[Tensor],
    accumulate: bool,
    input: bool,
    weights: bool,
) -> list[Optional[Tensor]]: ...
def backward_delayed(
    options: str,
    dy: Tensor,
    x: Tensor,
    prob: Tensor,
    splits: Tensor,
    w1: Sequence[Tensor],
    w2: Sequence[Tensor],
    b1: Optional[Tensor],
    b2: Optional[Tensor],
    saved: Sequence[Tensor],
    seed: Tensor,
    input: bool,
) -> tuple[list[Optional[Tensor]], DelayedWeightGrads]: ...

class DelayedWeightGrads:
    def over(self) -> bool: ...
    def run(self, dw1: Sequence[Tensor], dw2: Sequence[Tensor], accumulate: bool) -> None: ...

def find_experts(path: str) -> list[tuple[str, int, int, int, bool, bool, str]]: ...
def read_experts(
    path: str, prefix: str, experts: Optional[int], glu_layout: str
) -> tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]: ...
def write_experts(
    path: str,
    layers: Sequence[tuple[str, Tensor, Tensor, str]],
    format: str,
    mixtral: bool,
    square: bool,
) -> None: ...
