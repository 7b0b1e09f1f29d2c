"""The operator in plain torch, in float64: what the package is compared with.

BF16 roundings are where the operator has them (c, h, y, dc, dx), as a straight-through step; NVFP4 operands go through
the package's own quantizers, whose bytes the library's tests compare with golden data.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import Tensor

import moe4

ACTIVATIONS = [
    "swiglu",
    "srelu",
    "tanh_srelu:s=4",
    "situ_glu:beta1=4,beta2=25",
    "clamped_qgeglu:limit=2,alpha=1.702,offset=1",
]
LAYOUTS = ["halves", "interleaved32", "elementwise"]


class Bf16(torch.autograd.Function):
    """Rounds the value on the way in and the gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(torch.bfloat16).to(grad.dtype)


class Bf16Value(torch.autograd.Function):
    """Rounds the value only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def gate_up(c: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The columns of FC1's output that are gates and those that are ups, features in order."""
    if layout == "halves":
        gate, up = c.chunk(2, -1)
    elif layout == "elementwise":
        gate, up = c[..., 0::2], c[..., 1::2]
    else:
        blocks = c.unflatten(-1, (-1, 2, 32))
        gate, up = blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)
    return gate, up


def activate(c: Tensor, activation: str, layout: str) -> Tensor:
    name, _, rest = activation.partition(":")
    p = {key: float(value) for key, value in (item.split("=") for item in rest.split(",") if item)}
    if name == "srelu":
        return torch.relu(c).square()
    if name == "tanh_srelu":
        return (p["s"] * torch.tanh(torch.relu(c) / p["s"])).square()
    g, u = gate_up(c, layout)
    if name == "swiglu":
        return g * torch.sigmoid(g) * u
    if name == "situ_glu":
        return p["beta1"] * torch.tanh(g / p["beta1"]) * torch.sigmoid(g) * p["beta2"] * torch.tanh(u / p["beta2"])
    m = g.clamp(max=p["limit"])
    return (u.clamp(-p["limit"], p["limit"]) + p["offset"]) * m * torch.sigmoid(p["alpha"] * m)


def grouped_mlp(
    x: Tensor,
    splits: list[int],
    prob: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Optional[Tensor],
    b2: Optional[Tensor],
    activation: str,
    layout: str,
) -> Tensor:
    """BF16 operands, float64 sums; all arguments float64 that hold BF16 or float32 values."""
    out, start = [], 0
    for e, rows in enumerate(splits):
        xe, pe = Bf16.apply(x[start : start + rows]), prob[start : start + rows, None]
        c = xe @ w1[e].T
        c = Bf16.apply(c if b1 is None else c + b1[e])
        # The gradient of h stays in FP32.
        h = Bf16Value.apply(activate(c, activation, layout) * pe)
        y = h @ w2[e].T
        out.append(Bf16.apply(y if b2 is None else y + b2[e] * pe))
        start += rows
    out.append(torch.zeros(x.shape[0] - start, w2.shape[1], dtype=x.dtype) + 0 * x[start:].sum())
    return torch.cat(out)


def weights_nvfp4(w: Tensor) -> Tensor:
    return moe4.quantize(w.to(torch.bfloat16), tile="16x16").dequantize().double()


def both_nvfp4(t: Tensor, splits: Tensor, rht: Optional[int]) -> tuple[Tensor, Tensor]:
    """The values of the rowwise copy ``[T, cols]`` and of the columnwise one ``[cols, Tp]``."""
    row, column = moe4.group_quantize(t.to(torch.bfloat16), splits, columnwise=True, rht=rht)
    assert row is not None and column is not None
    return row.dequantize().double(), column.dequantize().double()


def nvfp4_step(
    x: Tensor, splits: Tensor, prob: Tensor, w1: Tensor, w2: Tensor, dy: Tensor, activation: str, layout: str,
    rht: Optional[int],
) -> dict[str, Tensor]:  # fmt: skip
    """Forward and backward with nearest rounding everywhere; outputs by name, float64."""
    q1, q2 = weights_nvfp4(w1), weights_nvfp4(w2)
    xr, xc = both_nvfp4(x, splits, rht)
    dyr, dyc = both_nvfp4(dy, splits, rht)
    rows = torch.zeros(x.shape[0], dtype=torch.int64)
    experts = torch.arange(len(splits)).repeat_interleave(splits)
    rows[: len(experts)] = experts
    live = (torch.arange(x.shape[0]) < len(experts)).double()[:, None]

    def times(a: Tensor, w: Tensor) -> Tensor:
        """Each row with its expert's matrix."""
        return torch.einsum("tk,tnk->tn", a, w[rows]) * live

    bf16 = lambda t: t.to(torch.bfloat16).double()  # noqa: E731
    c = bf16(times(xr, q1)).requires_grad_()
    p = prob.double()[:, None].requires_grad_()
    h = activate(c, activation, layout) * p * live
    hr, hc = both_nvfp4(bf16(h.detach()), splits, rht)
    y = bf16(times(hr, q2))
    dh = times(dyr, q2.transpose(1, 2))
    dc, dp = torch.autograd.grad(h, (c, p), dh)
    dcr, dcc = both_nvfp4(bf16(dc), splits, rht)
    dx = bf16(times(dcr, q1.transpose(1, 2)))
    dw1, dw2, at = torch.zeros_like(q1), torch.zeros_like(q2), 0
    for e, n in enumerate(splits.tolist()):
        end = at + math.ceil(n / 16) * 16
        dw1[e], dw2[e] = dcc[:, at:end] @ xc[:, at:end].T, dyc[:, at:end] @ hc[:, at:end].T
        at = end
    return {"y": y, "dx": dx, "dprob": dp[:, 0], "dw1": dw1, "dw2": dw2}


def error(got: Tensor, expected: Tensor) -> float:
    """The largest relative error norm of a row (the last dimension), floored at a thousandth of the tensor's rms."""
    got, expected = got.detach().double(), expected.detach().double()
    if got.dim() == 1:
        got, expected = got[None], expected[None]
    floor = 1e-3 * expected.square().mean().sqrt() * expected.shape[-1] ** 0.5
    wrong = (got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=floor.clamp(min=1e-30))
    return float(wrong.max()) if wrong.numel() else 0.0
