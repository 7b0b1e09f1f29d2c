"""The custom operators: what torch's compilers and dispatcher see of the compiled part.

Registered with the shapes of their outputs, so that ``torch.compile`` and ``torch.export`` trace through:

==============================  ===============================================================================
``moe4::quantize_weights``      BF16 weights to codes, scales, amax, and on a GPU the BF16 values of the codes, which
                                its products read
``moe4::grouped_mlp_forward``   ``y`` and those of ``c, h, x_codes, x_scales, x_amax, h_codes, h_scales, h_amax``
                                that the plan saves
``moe4::grouped_mlp_backward``  those of ``dx, dprob, db1, db2, *dw1, *dw2`` that are wanted
==============================  ===============================================================================

A fourth, ``moe4::grouped_mlp_backward_into``, leaves the weights' gradients in buffers that it is given. Gradients of
the weights that are computed later (:class:`moe4._autograd.DelayedGradients`) go past these operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Optional, TypeVar

import torch
from torch import Tensor

from . import _moe4
from ._options import Options

_BLOCK = 16
_library = torch.library.Library("moe4", "DEF")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))
_WEIGHTS = "Tensor[] w1, Tensor[] w2, Tensor? b1, Tensor? b2"
_BACKWARD = f"Tensor dy, Tensor x, Tensor prob, Tensor splits, {_WEIGHTS}, Tensor[] saved, Tensor seed"


for _schema in (
    "quantize_weights(Tensor[] w) -> (Tensor, Tensor, Tensor, Tensor)",
    f"grouped_mlp_forward(Tensor x, Tensor prob, Tensor splits, {_WEIGHTS}, str options, bool input, bool weights) "
    "-> Tensor[]",
    f"grouped_mlp_backward({_BACKWARD}, str options, bool input, bool weights, int packed, ScalarType dtype) "
    "-> Tensor[]",
    f"grouped_mlp_backward_into({_BACKWARD}, Tensor(a!)[] dw1, Tensor(b!)[] dw2, str options, bool input) "
    "-> Tensor[]",
):
    _library.define(_schema, tags=_TAGS)  # type: ignore[no-untyped-call]

_Function = TypeVar("_Function", bound=Callable[..., object])
QUANTIZED = 4
"""Tensors of one projection's quantized weights."""


def _kernel(name: str) -> Callable[[_Function], _Function]:
    """The operator itself, on every device: the compiled part goes by that of the tensors."""

    def register(function: _Function) -> _Function:
        for key in ("CPU", "CUDA"):
            _library.impl(name, function, key)  # type: ignore[no-untyped-call]
        return function

    return register


def _fake(name: str) -> Callable[[_Function], _Function]:
    """The shapes of an operator's outputs, for compilers."""
    register: Callable[[_Function], _Function] = torch.library.register_fake(f"moe4::{name}", lib=_library)
    return register


@lru_cache(maxsize=4096)
def _parsed(options: str) -> Options:
    """The shape again, for operators that know only the text."""
    items = dict(item.split("=", 1) for item in options.split(" "))
    return Options(
        experts=int(items["experts"]),
        hidden=int(items["hidden"]),
        ffn=int(items["ffn"]),
        activation=items["activation"],
        bias=items["bias"] == "true",
    )


def present(tensors: Sequence[Optional[Tensor]]) -> list[Tensor]:
    """Those that are there: operators return tensors."""
    return [tensor for tensor in tensors if tensor is not None]


# --- quantize_weights


@_kernel("quantize_weights")
def _quantize_weights(w: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes, scales, amax, values = _moe4.quantize_weights([tensor.detach() for tensor in w], True)
    return codes, scales, amax, w[0].new_empty(0) if values is None else values


@_fake("quantize_weights")
def _quantize_weights_fake(w: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    experts = w[0].shape[0] if w[0].dim() == 3 else len(w)
    n, k = w[0].shape[-2:]
    new = w[0].new_empty
    return (
        new((experts, n, k // 2), dtype=torch.uint8),
        new((experts, n, k // _BLOCK), dtype=torch.uint8),
        new((experts,), dtype=torch.float32),
        new((experts, n, k) if w[0].device.type == "cuda" else 0, dtype=torch.bfloat16),
    )


# --- grouped_mlp_forward


@_kernel("grouped_mlp_forward")
def _forward(
    x: Tensor,
    prob: Tensor,
    splits: Tensor,
    w1: list[Tensor],
    w2: list[Tensor],
    b1: Optional[Tensor],
    b2: Optional[Tensor],
    options: str,
    input: bool,
    weights: bool,
) -> list[Tensor]:
    return _moe4.forward(options, x, prob, splits, w1, w2, b1, b2, input, weights)


@_fake("grouped_mlp_forward")
def _forward_fake(x: Tensor, *others: Any) -> list[Tensor]:
    *_, options, input, weights = others
    shape = _parsed(options)
    c_saved, x_form, h_form = _moe4.saved_forms(options, input, weights)
    rows = x.shape[0]

    tensors = [x.new_empty((rows, shape.hidden))]
    if c_saved:
        tensors.append(x.new_empty((rows, shape.fc1_rows)))
    if h_form == "bf16":
        tensors.append(x.new_empty((rows, shape.ffn)))
    bound = (rows + (_BLOCK - 1) * shape.experts) // _BLOCK * _BLOCK
    for form, cols in ((x_form, shape.hidden), (h_form, shape.ffn)):
        if form == "columnwise":
            tensors.append(x.new_empty(cols * (bound // 2), dtype=torch.uint8))
            tensors.append(x.new_empty(cols * (bound // _BLOCK), dtype=torch.uint8))
        if form in ("columnwise", "amax"):
            tensors.append(x.new_empty(shape.experts, dtype=torch.float32))
    return tensors


# --- grouped_mlp_backward


def _weight_buffers(like: Tensor, options: str, packed: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Where the gradients of both weights go: bit 0 of ``packed`` for W1 in one tensor, bit 1 for W2."""
    shape = _parsed(options)
    both = []
    for bit, (n, k) in enumerate([(shape.fc1_rows, shape.hidden), (shape.hidden, shape.ffn)]):
        if packed >> bit & 1:
            both.append([like.new_empty((shape.experts, n, k), dtype=dtype)])
        else:
            both.append([like.new_empty((n, k), dtype=dtype) for _ in range(shape.experts)])
    return both[0], both[1]


@_kernel("grouped_mlp_backward")
def _backward(
    dy: Tensor,
    x: Tensor,
    prob: Tensor,
    splits: Tensor,
    w1: list[Tensor],
    w2: list[Tensor],
    b1: Optional[Tensor],
    b2: Optional[Tensor],
    saved: list[Tensor],
    seed: Tensor,
    options: str,
    input: bool,
    weights: bool,
    packed: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    dw1, dw2 = _weight_buffers(dy, options, packed, dtype) if weights else ([], [])
    grads = _moe4.backward(
        options, dy, x, prob, splits, w1, w2, b1, b2, saved, seed, dw1, dw2, False, input, weights
    )
    return [*present(grads), *dw1, *dw2]


@_fake("grouped_mlp_backward")
def _backward_fake(dy: Tensor, *others: Any) -> list[Tensor]:
    *_, options, input, weights, packed, dtype = others
    dw1, dw2 = _weight_buffers(dy, options, packed, dtype) if weights else ([], [])
    return [*_gradient_shapes(dy, options, input, weights), *dw1, *dw2]


def _gradient_shapes(dy: Tensor, options: str, input: bool, weights: bool) -> list[Tensor]:
    shape = _parsed(options)
    biases = shape.bias and weights
    f32 = torch.float32
    tensors = [
        torch.empty_like(dy, memory_format=torch.contiguous_format) if input else None,
        dy.new_empty(dy.shape[0], dtype=f32),
        dy.new_empty((shape.experts, shape.fc1_rows), dtype=f32) if biases else None,
        dy.new_empty((shape.experts, shape.hidden), dtype=f32) if biases else None,
    ]
    return present(tensors)


TWICE = (
    "moe4: the grouped MLP cannot be differentiated twice; leave out create_graph=True, or use precision='bf16' "
    "experts written in torch where second derivatives are needed"
)


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(TWICE)


torch.library.register_autograd(
    "moe4::grouped_mlp_backward", _refuse, setup_context=lambda ctx, inputs, output: None, lib=_library
)


@_kernel("grouped_mlp_backward_into")
def _backward_into(
    dy: Tensor,
    x: Tensor,
    prob: Tensor,
    splits: Tensor,
    w1: list[Tensor],
    w2: list[Tensor],
    b1: Optional[Tensor],
    b2: Optional[Tensor],
    saved: list[Tensor],
    seed: Tensor,
    dw1: list[Tensor],
    dw2: list[Tensor],
    options: str,
    input: bool,
) -> list[Tensor]:
    grads = _moe4.backward(options, dy, x, prob, splits, w1, w2, b1, b2, saved, seed, dw1, dw2, True, input, True)
    return present(grads)


@_fake("grouped_mlp_backward_into")
def _backward_into_fake(dy: Tensor, *others: Any) -> list[Tensor]:
    *_, options, input = others
    return _gradient_shapes(dy, options, input, True)
