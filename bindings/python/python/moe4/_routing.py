"""Rows sorted by expert, on any device, without the host's reading a choice."""

from __future__ import annotations

import torch
from torch import Tensor


def by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The order that sorts choices by expert, and how many each expert has.

    Args:
        chosen: int64 ``[S]``; ``experts`` for none, which come last and are not counted.
        experts: ``E``.

    Returns:
        ``(order [S], splits [E])``, int64. Among choices of one expert the order stays.
    """
    found, order = torch.sort(chosen, stable=True)
    # Not bincount, which on a GPU waits to learn the largest value.
    bounds = torch.searchsorted(found, torch.arange(experts + 1, device=chosen.device))
    return order, bounds.diff()


def inverse(order: Tensor) -> Tensor:
    """Where each row of a sorted tensor goes back to."""
    slots = torch.empty_like(order)
    slots[order] = torch.arange(order.numel(), device=order.device)
    return slots
