"""Experts of ordinary PyTorch operations, not fused: in BF16, and in emulated NVFP4.

    c = x @ W1[e].T,  h = bf16(silu(c_gate) * c_up * prob),  y = h @ W2[e].T        rows of expert e

The emulation is what one writes to study 4-bit training without 4-bit hardware: each operand is rounded to NVFP4,
turned back to BF16, and multiplied in BF16; gradients pass the rounding as if it were not there. Of one product:

    y  = row(x) @ tile(W).T             row: blocks of 16 along a row, to nearest
    dx = row*(dy) @ tile(W)             row*: stochastic rounding
    dW = column*(dy).T @ column(x)      column: RHT over 16 tokens, then blocks of 16 tokens
    tile: blocks of 16x16

Formats and formulas are those of docs/numerics.md, and what is rounded to nearest has the values of moe4's own copies.
The RHT is a product with a matrix, which may move a few of its values by a last bit of BF16. Random numbers are
PyTorch's.

Splits stay on their device: all shapes follow from the number of rows, so that a GPU never waits for the host.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor, nn

import moe4

SIGN_MASK = 0xD7E8


class Groups(NamedTuple):
    """Where rows and tiles of 16 rows belong. In tiles each expert's rows are filled up with zero rows."""

    offsets: Tensor
    """int32 ``[E]``: the end of each expert's rows."""
    expert: Tensor
    """``[T]``: the expert of each row."""
    padded_offsets: Tensor
    """int32 ``[E]``: the end of each expert's padded rows."""
    padded: Tensor
    """``[T]``: where each row is among the padded ones."""
    expert_of_tile: Tensor
    """``[T/16 + E]``, more than there are: the rest are zeros behind the last expert's end."""

    @classmethod
    def of(cls, splits: Tensor, rows: int) -> Groups:
        """Of ``splits [E]`` with the sum ``rows``."""
        ends, padded_splits = splits.cumsum(0), (splits + 15) // 16 * 16
        padded_ends = padded_splits.cumsum(0)
        index = torch.arange(rows, device=splits.device)
        expert = torch.searchsorted(ends, index, right=True)
        shift = (padded_ends - padded_splits) - (ends - splits)
        tiles = torch.arange(rows // 16 + len(splits), device=splits.device)
        expert_of_tile = torch.searchsorted(padded_ends, 16 * tiles, right=True).clamp(max=len(splits) - 1)
        return cls(ends.int(), expert, padded_ends.int(), index + shift[expert], expert_of_tile)

    def amax(self, maxima: Tensor, expert: Tensor) -> Tensor:
        """The largest of each expert's ``maxima``, given to every one of them: FP32, shaped ``[-1, 1, 1]``."""
        amax = torch.zeros(len(self.offsets), device=maxima.device)
        return amax.scatter_reduce(0, expert, maxima.float(), "amax")[expert].view(-1, 1, 1)


def nvfp4(blocks: Tensor, axes: tuple[int, ...], amax: Tensor, stochastic: bool = False) -> Tensor:
    """Rounds to NVFP4, in BF16 of the same shape.

    A block is what ``axes`` span; ``amax`` is the largest magnitude of the tensor that it belongs to, FP32.
    """
    # 2688 = 448 * 6, the largest scale times the largest code. A tensor: a number would be multiplied by 1 / amax.
    s_enc = torch.where(amax > 0, torch.full_like(amax, 2688) / amax, 1.0)
    scale = (blocks.abs().amax(axes, keepdim=True) * (s_enc * (1 / 6))).clamp(max=448)
    scale = scale.to(torch.float8_e4m3fn).float()
    v = blocks * (1 / (scale * (1 / s_enc))).clamp(max=torch.finfo(torch.float32).max)
    magnitude = v.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))  # between E2M1's neighbours
    steps = v / step
    # To nearest, ties go to an even number of steps, which is an even code.
    steps = (steps + torch.rand_like(steps)).floor() if stochastic else steps.round()
    return ((steps * step).clamp(-6, 6) * (scale * amax * (1 / 2688))).bfloat16()


def row(x: Tensor, groups: Groups, stochastic: bool = False) -> Tensor:
    """BF16 ``[T, cols]`` in blocks of 16 along a row, each expert with its own amax."""
    amax = groups.amax(x.abs().amax(1), groups.expert)
    return nvfp4(x.view(len(x), -1, 16), (2,), amax, stochastic).flatten(1)


def column(x: Tensor, groups: Groups, stochastic: bool = False) -> Tensor:
    """BF16 ``[T, cols]`` after the RHT in blocks of 16 tokens, ``[padded, cols]``.

    In the product of two of them the transforms cancel.
    """
    tokens = x.new_zeros(16 * len(groups.expert_of_tile), x.shape[1]).index_copy(0, groups.padded, x)
    tiles = hadamard(x.device) @ tokens.view(-1, 16, x.shape[1])
    amax = groups.amax(tiles.abs().amax((1, 2)), groups.expert_of_tile)
    return nvfp4(tiles, (1,), amax, stochastic).flatten(0, 1)


def tile(w: Tensor) -> Tensor:
    """BF16 ``[E, n, k]`` in blocks of 16x16, each expert with its own amax."""
    amax = w.abs().amax((1, 2)).float().view(-1, 1, 1, 1, 1)
    experts, n, k = w.shape
    return nvfp4(w.view(experts, n // 16, 16, k // 16, 16), (2, 4), amax).view_as(w)


def hadamard(device: torch.device) -> Tensor:
    """The RHT of 16 tokens as a matrix, BF16: ``H[i, j] = sign[j] * (-1)^popcount(i & j) / 4``."""
    index = torch.arange(16, device=device)
    common = index.unsqueeze(1) & index
    odd = (common ^ common >> 1 ^ common >> 2 ^ common >> 3 ^ SIGN_MASK >> index) & 1
    return (0.25 - 0.5 * odd).bfloat16()


Product = Callable[[Tensor, Tensor, Groups], Tensor]
"""``x [T, k]`` times each expert's ``w [E, n, k]`` transposed: BF16 ``[T, n]``."""


def bf16_product(x: Tensor, w: Tensor, groups: Groups) -> Tensor:
    """PyTorch's own, with its own gradients."""
    return nn.functional.grouped_mm(x, w.transpose(1, 2), offs=groups.offsets)


class _EmulatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, *parts: Tensor) -> Tensor:
        groups, w = Groups(*parts), tile(w)
        ctx.save_for_backward(x, w, *parts)
        return bf16_product(row(x, groups), w, groups)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w, *parts = ctx.saved_tensors
        groups = Groups(*parts)
        dx = nn.functional.grouped_mm(row(dy, groups, stochastic=True), w, offs=groups.offsets)
        left, right = column(dy, groups, stochastic=True), column(x, groups)
        dw = nn.functional.grouped_mm(left.t(), right, offs=groups.padded_offsets)
        return dx, dw, *[None] * len(parts)


def emulated_product(x: Tensor, w: Tensor, groups: Groups) -> Tensor:
    """Of operands in NVFP4, and so are its gradients'."""
    y: Tensor = _EmulatedProduct.apply(x, w, *groups)  # type: ignore[no-untyped-call]
    return y


class UnfusedExperts(nn.Module):
    """Takes the place, and the weights, of a :class:`moe4.GroupedMLP` with SwiGLU and one tensor for all experts."""

    def __init__(self, experts: moe4.GroupedMLP, product: Product) -> None:
        super().__init__()
        assert isinstance(experts.w1, nn.Parameter) and isinstance(experts.w2, nn.Parameter)
        self.w1, self.w2, self.product = experts.w1, experts.w2, product

    def forward(self, x: Tensor, splits: Tensor, prob: Tensor, *, weight_version: Optional[int] = None) -> Tensor:
        """As :meth:`moe4.GroupedMLP.forward`; weights are rounded in every call."""
        groups = Groups.of(splits, x.shape[0])
        gate, up = self.product(x, self.w1.bfloat16(), groups).float().chunk(2, 1)
        h = (nn.functional.silu(gate) * up * prob.unsqueeze(1)).bfloat16()
        return self.product(h, self.w2.bfloat16(), groups)
