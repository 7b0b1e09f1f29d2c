"""How gradients go through the operators: at once, into a trainer's buffers, or later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from . import _moe4, _ops


def _main_grads(weights: Sequence[Tensor]) -> list[Tensor]:
    """The trainer's buffers, which backwards add to."""
    for at, weight in enumerate(weights):
        if getattr(weight, "main_grad", None) is None:
            raise ValueError(
                f"weight {at}: expected a main_grad, got none; the trainer sets it when fuse_wgrad_accumulation is on"
            )
    return [getattr(weight, "main_grad") for weight in weights]  # noqa: B009


_placeholders: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}


def _placeholder(weight: Tensor) -> Optional[Tensor]:
    """What a weight gets as its gradient when the real one is in main_grad already.

    A trainer that sets ``grad_added_to_main_grad`` waits for the hook that runs when a gradient arrives; others get
    none.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    key = (weight.shape, weight.dtype, weight.device)
    if key not in _placeholders:
        _placeholders[key] = torch.zeros_like(weight, requires_grad=False)
    placeholder: Tensor = _placeholders[key].detach()
    return placeholder


class DelayedGradients:
    """The weights' gradients of one backward, not computed yet; what they read is kept until :meth:`run` has succeeded."""

    __slots__ = ("_first", "_fused", "_handle", "_watched", "_weights")

    def __init__(
        self,
        handle: _moe4.DelayedWeightGrads,
        w1: Sequence[Tensor],
        w2: Sequence[Tensor],
        fused: bool,
        watched: dict[str, Tensor],
    ) -> None:
        self._handle, self._weights, self._first, self._fused = handle, [*w1, *w2], len(w1), fused
        self._watched = [(name, tensor, tensor._version) for name, tensor in watched.items()]

    def targets(self) -> list[Tensor]:
        """Where the gradients go: the trainer's buffers, or new ones. Raises before anything is lost."""
        for name, tensor, version in self._watched:
            if tensor._version != version:
                raise RuntimeError(
                    f"backward_dw: {name} was modified in place after the backward, but the gradients of the weights "
                    "read it; call backward_dw before, or modify a copy"
                )
        if self._fused:
            return _main_grads(self._weights)
        return [torch.empty_like(weight, memory_format=torch.contiguous_format) for weight in self._weights]

    @property
    def over(self) -> bool:
        """Whether another :meth:`run` cannot help: one succeeded, or failed when it had added a part to ``main_grad``."""
        return self._handle.over()

    @torch.no_grad()
    def run(self, into: list[Tensor]) -> None:
        """Both products, once. What autograd does with a gradient that arrives, hooks aside, is done here.

        Everything is checked before anything is written; a call that raises then may be repeated.
        """
        self._handle.run(into[: self._first], into[self._first :], self._fused)
        for weight, grad in zip(self._weights, into):
            found = _placeholder(weight) if self._fused else grad
            if found is None or not weight.requires_grad:
                continue
            if weight.grad is None:
                weight.grad = found.detach()
            elif not self._fused:
                weight.grad.add_(found)


class _GroupedMLP(torch.autograd.Function):
    """``tensors`` are ``n1`` weights W1, ``n2`` weights W2, and what the products read of both (see ``_read``)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        prob: Tensor,
        b1: Optional[Tensor],
        b2: Optional[Tensor],
        splits: Tensor,
        seed: Tensor,
        options: str,
        input: bool,
        weights: bool,
        nvfp4: bool,
        fused: bool,
        later: Optional[deque[DelayedGradients]],
        n1: int,
        n2: int,
        *tensors: Tensor,
    ) -> Tensor:
        originals, separate = tensors[: n1 + n2], tensors[n1 + n2 :]
        read = list(separate or originals)
        half = _ops.QUANTIZED if nvfp4 else n1
        r1, r2 = read[:half], read[half:]
        outputs: list[Tensor] = torch.ops.moe4.grouped_mlp_forward.default(
            x, prob, splits, r1, r2, b1, b2, options, input, weights
        )
        y, *saved = outputs
        ctx.save_for_backward(
            x if weights and not nvfp4 else x.new_empty(0), prob, splits, seed, b1, b2, *saved, *read
        )
        ctx.originals = originals if fused or later is not None else ()
        ctx.options, ctx.input, ctx.weights, ctx.fused, ctx.later = options, input, weights, fused, later
        ctx.n1, ctx.n2, ctx.half, ctx.separate, ctx.saved = n1, n2, half, len(separate), len(saved)
        ctx.packed = (originals[0].dim() == 3) + 2 * (originals[n1].dim() == 3)
        ctx.dtype = originals[0].dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, prob, splits, seed, b1, b2, *rest = ctx.saved_tensors
        saved, read = rest[: ctx.saved], rest[ctx.saved :]
        dy = dy.contiguous()
        weights = [read[: ctx.half], read[ctx.half :]]
        if (ctx.fused or ctx.later is not None) and torch.is_grad_enabled():
            raise RuntimeError(_ops.TWICE)
        dw: list[Optional[Tensor]] = [None] * (ctx.n1 + ctx.n2)
        if ctx.later is not None:
            found, handle = _moe4.backward_delayed(
                ctx.options, dy, x, prob, splits, weights[0], weights[1], b1, b2, saved, seed, ctx.input
            )
            grads = _ops.present(found)
            watched = {"x": x, "the gradient of y": dy} if x.numel() else {}
            w1, w2 = ctx.originals[: ctx.n1], ctx.originals[ctx.n1 :]
            ctx.later.append(DelayedGradients(handle, w1, w2, ctx.fused, watched))
        elif ctx.fused:
            into = _main_grads(ctx.originals)
            grads = torch.ops.moe4.grouped_mlp_backward_into.default(
                dy, x, prob, splits, *weights, b1, b2, saved, seed,
                into[: ctx.n1], into[ctx.n1 :], ctx.options, ctx.input,
            )  # fmt: skip
            dw = [_placeholder(weight) for weight in ctx.originals]
        else:
            grads = torch.ops.moe4.grouped_mlp_backward.default(
                dy, x, prob, splits, *weights, b1, b2, saved, seed,
                ctx.options, ctx.input, ctx.weights, ctx.packed, ctx.dtype,
            )  # fmt: skip
            dw = grads[-len(dw) :] if ctx.weights else dw
        biases = ctx.weights and b1 is not None
        at = 1 if ctx.input else 0
        return (
            grads[0] if ctx.input else None,
            grads[at],
            grads[at + 1] if biases else None,
            grads[at + 2] if biases else None,
            *[None] * 10,
            *dw,
            *[None] * ctx.separate,
        )


def run(*arguments: Any) -> Tensor:
    y: Tensor = _GroupedMLP.apply(*arguments)  # type: ignore[no-untyped-call]
    return y


# Compilers do not follow gradients that go to buffers on the side, or come later: here they leave off, and go on behind.
run_aside: Callable[..., Tensor] = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
