"""Quantization as functions: tensors to NVFP4 and back."""

from __future__ import annotations

import math
from typing import Literal, Optional

import torch
from torch import Tensor

from . import _moe4
from ._convert import ArrayLike, Splits, as_splits, as_tensor, expect_known_device
from ._options import expect_mask

DEFAULT_RHT = 0xD7E8
"""The sign mask of the published NVFP4 recipe."""

Axis = Literal["rowwise", "columnwise"]
Tile = Literal["1x16", "16x16"]
Rounding = Literal["nearest", "stochastic"]
ScaleLayout = Literal["plain", "swizzled"]


class QuantizedTensor:
    """A tensor in NVFP4: 4-bit codes, a scale for each block of 16, an amax for each expert.

    Attributes:
        codes: uint8 ``[..., rows, k/2]``, E2M1, the even element in the low nibble.
        scales: float8_e4m3fn ``[..., rows, k/16]``, or padded to ``[rows / 128, k/16 / 4]`` tiles if swizzled.
        amax: float32 ``[E]``, the largest finite magnitude of each expert, from which its global scale follows.
        shape: of the tensor that was quantized.
        axis: along which dimension the blocks lie. ``columnwise`` codes are of the transposed tensor, with each
            expert's tokens padded to a multiple of 16.
        tile: what one block scale covers.
        splits: int64 ``[E]``, rows of each expert; ``None`` for one group of all rows.
        rht: sign mask of the Hadamard transform that was applied along tokens before, or ``None``.
        layout: how ``scales`` lie in memory.
    """

    __slots__ = ("amax", "axis", "codes", "layout", "rht", "scales", "shape", "splits", "tile")

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        amax: Tensor,
        shape: torch.Size,
        *,
        axis: Axis = "rowwise",
        tile: Tile = "1x16",
        splits: Optional[Tensor] = None,
        rht: Optional[int] = None,
        layout: ScaleLayout = "plain",
    ) -> None:
        self.codes, self.scales, self.amax, self.shape = codes, scales, amax, torch.Size(shape)
        self.axis, self.tile, self.splits, self.rht, self.layout = axis, tile, splits, rht, layout

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values that the codes stand for; see :func:`moe4.dequantize`."""
        return dequantize(self, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and amaxes."""
        return self.codes.nbytes + self.scales.nbytes + self.amax.nbytes

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle, which on its own does not know float8 tensors."""
        return _unpickle, (
            self.codes, self.scales.view(torch.uint8), self.amax, tuple(self.shape),
            self.axis, self.tile, self.splits, self.rht, self.layout,
        )  # fmt: skip

    def __repr__(self) -> str:
        more = f", rht=0x{self.rht:04X}" if self.rht is not None else ""
        more += f", experts={len(self.splits)}" if self.splits is not None else ""
        more += ", layout='swizzled'" if self.layout == "swizzled" else ""
        return (
            f"QuantizedTensor(shape={list(self.shape)}, axis='{self.axis}', tile='{self.tile}'{more}, "
            f"bytes={self.nbytes})"
        )


def _unpickle(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    shape: tuple[int, ...],
    axis: Axis,
    tile: Tile,
    splits: Optional[Tensor],
    rht: Optional[int],
    layout: ScaleLayout,
) -> QuantizedTensor:
    scales, size = scales.view(torch.float8_e4m3fn), torch.Size(shape)
    return QuantizedTensor(codes, scales, amax, size, axis=axis, tile=tile, splits=splits, rht=rht, layout=layout)


def hadamard_amax(
    x: ArrayLike, splits: Optional[Splits] = None, *, sign_mask: int = DEFAULT_RHT
) -> tuple[Tensor, Tensor]:
    """Largest finite magnitudes before and after the Hadamard transform along tokens, in one read.

    Args:
        x: bfloat16 ``[T, cols]``, rows sorted by expert.
        splits: rows of each expert; one group of all rows if ``None``.
        sign_mask: 16 bits, bit ``i`` negates token ``i`` of each 16.

    Returns:
        ``(amax, amax_rht)``, float32 ``[E]`` each; 0 for an empty expert.
    """
    x = as_tensor("x", x)
    expect_known_device("x", x)
    return _moe4.hadamard_amax(x, _splits(splits, x), expect_mask("sign_mask", sign_mask))


def group_quantize(
    x: ArrayLike,
    splits: Optional[Splits] = None,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    rht: Optional[int] = DEFAULT_RHT,
    rounding: Rounding = "nearest",
    seed: Optional[int] = None,
    stream: int = 0,
    layout: ScaleLayout = "plain",
    amax: Optional[Tensor] = None,
    amax_rht: Optional[Tensor] = None,
) -> tuple[Optional[QuantizedTensor], Optional[QuantizedTensor]]:
    """Quantizes each expert's rows alone: rowwise, columnwise, or both in one read.

    Args:
        x: bfloat16 ``[T, cols]``, ``cols`` a multiple of 16, rows sorted by expert.
        splits: rows of each expert; their sum is at most ``T``. One group of all rows if ``None``.
        rowwise: whether to make the copy with blocks along the row.
        columnwise: whether to make the copy with blocks along tokens.
        rht: sign mask of the Hadamard transform of the columnwise copy; ``None`` for no transform.
        rounding: of the elements; block scales are always rounded to nearest.
        seed: of stochastic rounding; drawn from torch's generator if ``None``.
        stream: which sequence of random numbers under the seed; calls that must not share numbers need different ones.
        layout: of the block scales; ``swizzled`` is the 128x4 layout of tensor cores.
        amax: float32 ``[E]``, known amaxes of ``x``; measured if ``None``.
        amax_rht: float32 ``[E]``, known amaxes after the transform; measured if ``None``.

    Returns:
        ``(rowwise, columnwise)``, ``None`` for a copy that was not asked for. With ``splits`` on a GPU, which are not
        read by the host, the columnwise copy has token positions for any splits, ``(T + 15 * E) // 16 * 16`` of them;
        zeros follow those that are needed.
    """
    x = as_tensor("x", x)
    expect_known_device("x", x)
    rows = _splits(splits, x)
    swizzled = _choice("layout", layout, ("plain", "swizzled")) == "swizzled"
    row, column = _moe4.group_quantize(
        x,
        rows,
        rowwise=rowwise,
        columnwise=columnwise,
        rht=None if rht is None else expect_mask("rht", rht),
        seed=_seed(rounding, seed),
        stream=stream,
        swizzled=swizzled,
        amax=amax,
        amax_rht=amax_rht,
    )
    shape = x.shape
    return (
        row and _wrap(row, shape, "rowwise", rows, None, layout),
        column and _wrap(column, shape, "columnwise", rows, rht, layout),
    )


def quantize(
    x: ArrayLike,
    *,
    axis: Axis = "rowwise",
    tile: Tile = "1x16",
    rht: Optional[int] = None,
    rounding: Rounding = "nearest",
    seed: Optional[int] = None,
    layout: ScaleLayout = "plain",
) -> QuantizedTensor:
    """Quantizes one tensor, or the weights of several experts.

    Args:
        x: bfloat16 ``[rows, cols]``; with ``tile="16x16"`` also ``[E, n, k]``, each expert with its own amax.
        axis: of the blocks.
        tile: ``1x16`` for activations and gradients, ``16x16`` for weights, whose transpose has the same codes.
        rht: sign mask of the Hadamard transform along tokens, for ``axis="columnwise"`` only.
        rounding: of the elements; weights are rounded to nearest.
        seed: of stochastic rounding; drawn from torch's generator if ``None``.
        layout: of the block scales.
    """
    _choice("tile", tile, ("1x16", "16x16"))
    _choice("axis", axis, ("rowwise", "columnwise"))
    if rht is not None and (axis == "rowwise" or tile == "16x16"):
        raise ValueError("rht: expected None unless axis='columnwise' and tile='1x16': it transforms along tokens")
    if tile == "1x16":
        row, column = group_quantize(
            x,
            rowwise=axis == "rowwise",
            columnwise=axis == "columnwise",
            rht=rht,
            rounding=rounding,
            seed=seed,
            layout=layout,
        )
        quantized = row or column
        assert quantized is not None
        return quantized
    if axis != "rowwise" or rounding != "nearest" or layout != "plain":
        raise ValueError("tile: 16x16 goes with axis='rowwise', rounding='nearest' and layout='plain'")
    x = as_tensor("x", x)
    expect_known_device("x", x)
    if x.dim() not in (2, 3):
        raise ValueError(f"x: expected [n, k] or [E, n, k], got shape {list(x.shape)}")
    codes, scales, amax, _ = _moe4.quantize_weights([x], False)
    if x.dim() == 2:
        codes, scales = codes[0], scales[0]
    return QuantizedTensor(codes, scales.view(torch.float8_e4m3fn), amax, x.shape, tile=tile)


def dequantize(quantized: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values that codes and scales stand for, computed in float32.

    Returns:
        A tensor of the original shape; for a columnwise copy the transposed tensor ``[cols, Tp]`` with each expert's
        tokens padded to a multiple of 16, still transformed if there was an RHT.
    """
    q = quantized
    if not isinstance(q, QuantizedTensor):
        raise TypeError(f"quantized: expected a QuantizedTensor, got {type(q).__name__}")
    splits = q.splits
    if q.tile == "16x16":
        experts = q.shape[0] if len(q.shape) == 3 else 1
        splits = torch.full((experts,), q.shape[-2], dtype=torch.int64, device="cpu")
    rows = math.prod(q.shape[:-1])
    values = _moe4.dequantize(
        q.codes.contiguous(),
        q.scales.contiguous(),
        q.amax.contiguous(),
        splits,
        rows=rows,
        cols=q.shape[-1],
        columnwise=q.axis == "columnwise",
        swizzled=q.layout == "swizzled",
    )
    if q.axis == "rowwise":
        values = values.view(q.shape)
    return values.to(dtype)


def _wrap(
    parts: tuple[Tensor, Tensor, Tensor],
    shape: torch.Size,
    axis: Axis,
    splits: Optional[Tensor],
    rht: Optional[int],
    layout: ScaleLayout,
) -> QuantizedTensor:
    codes, scales, amax = parts
    scales = scales.view(torch.float8_e4m3fn)
    return QuantizedTensor(codes, scales, amax, shape, axis=axis, splits=splits, rht=rht, layout=layout)


def _splits(splits: Optional[Splits], x: Tensor) -> Optional[Tensor]:
    return None if splits is None else as_splits(splits, x.device)


def _seed(rounding: str, seed: Optional[int]) -> Optional[int]:
    if _choice("rounding", rounding, ("nearest", "stochastic")) == "nearest":
        if seed is not None:
            raise ValueError("seed: expected None with rounding='nearest', which takes no random numbers")
        return None
    return int(torch.randint(0, 2**62, (), device="cpu").item()) if seed is None else seed & (2**64 - 1)


def _choice(what: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"{what}: expected {' or '.join(known)}, got {value!r}")
    return value
