"""A small layer on the GPU, inputs, and a step: what the tests of this folder share."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

import moe4

E, T, H, F = 4, 40, 64, 32
SPLITS = [10, 0, 21, 7]
# NVFP4 products of few rows an expert read packed weights; those of more run on wgmma where there is one.
FEW_AND_MANY = (T, 10 * T)


def splits_of(rows: int) -> list[int]:
    """``SPLITS`` for a multiple of ``T`` rows."""
    return [split * rows // T for split in SPLITS]


def layer(**options: Any) -> moe4.GroupedMLP:
    torch.manual_seed(2)
    return moe4.GroupedMLP(E, H, F, device="cuda", **options)


def inputs(rows: int = T, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``x``, ``splits`` on the GPU, ``prob``, ``dy``."""
    torch.manual_seed(seed)
    x, prob, dy = torch.randn(rows, H).bfloat16(), torch.rand(rows) + 0.1, torch.randn(rows, H).bfloat16()
    return x.cuda(), torch.tensor(splits_of(rows)).cuda(), prob.cuda(), dy.cuda()


def step(m: Any, x: Tensor, splits: Any, prob: Tensor, dy: Tensor, seed: Optional[int] = 3) -> list[Tensor]:
    """A forward and a backward: ``y, dx, dprob`` and the gradients of the parameters. In a capture, without a seed."""
    if seed is not None:
        torch.manual_seed(seed)
    x, prob = x.detach().requires_grad_(), prob.detach().requires_grad_()
    y = m(x, splits, prob)
    grads = torch.autograd.grad(y, [x, prob, *m.parameters()], dy)
    return [y.detach(), *grads]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b))
