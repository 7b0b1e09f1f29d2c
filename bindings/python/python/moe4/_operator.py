"""The operator as a function: arguments made ready, and the one place that decides what a call is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Optional, Union

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _moe4, _ops
from ._autograd import DelayedGradients, run, run_aside
from ._convert import Splits, as_splits, expect_known_device, misplaced
from ._options import Activation, DcAmax, GluLayout, GradientRounding, Options, Precision

Weights = Union[Tensor, Sequence[Tensor]]
"""One tensor ``[E, n, k]``, or one ``[n, k]`` for each expert."""


def grouped_mlp(
    x: Tensor,
    splits: Splits,
    prob: Tensor,
    w1: Weights,
    w2: Weights,
    b1: Optional[Tensor] = None,
    b2: Optional[Tensor] = None,
    *,
    activation: Activation = "swiglu",
    glu_layout: GluLayout = "halves",
    precision: Precision = "nvfp4",
    recompute: bool = False,
    fc1_rht: Optional[int] = 0xD7E8,
    fc2_rht: Optional[int] = 0xD7E8,
    gradient_rounding: GradientRounding = "stochastic",
    dc_amax: DcAmax = "exact",
) -> Tensor:
    """FC1, activation scaled by the routing probability, FC2, for tokens sorted by expert.

    Args:
        x: bfloat16 ``[T, H]`` (any floating dtype under autocast), rows sorted by expert.
        splits: rows of each expert, integers ``[E]``; any size, 0 included. Their sum is at most ``T``; ``y`` and
            gradients of rows past it are 0. On the device of ``x``, where a GPU's splits are not waited for (see
            :func:`synchronize`), or on the CPU.
        prob: ``[T]``, routing probability of each row.
        w1: ``[E, N1, H]`` or E tensors ``[N1, H]``, bfloat16 or float32.
        w2: ``[E, H, F]`` or E tensors ``[H, F]``, of the dtype of ``w1``.
        b1: ``[E, N1]``; with ``b2`` or not at all.
        b2: ``[E, H]``, scaled by ``prob``.
        activation: with its parameters, such as ``"situ_glu:beta1=4,beta2=25"``.
        glu_layout: order of gate and up rows in ``w1``.
        precision: of the operands of all products.
        recompute: rebuild the activation in the backward instead of saving it. Results are bitwise the same.
        fc1_rht: sign mask of the Hadamard transform along tokens for the gradient of ``w1``; ``None`` for none.
        fc2_rht: the same for ``w2``.
        gradient_rounding: of gradients to 4 bits.
        dc_amax: where the amaxes of FC1's output gradient come from.

    Returns:
        bfloat16 ``[T, H]``.

    Gradients flow to ``x``, ``prob``, weights and biases. Seeds of stochastic rounding are drawn in the forward from
    torch's generator for the device of ``x``, so that ``torch.manual_seed`` makes runs repeat, and a CUDA graph rounds
    otherwise in each replay.
    """
    first, second = _listed(w1), _listed(w2)
    for name, tensor in [("x", x), *(("w1", w) for w in first), *(("w2", w) for w in second)]:
        expect_known_device(name, tensor)
    if x.dim() != 2 or not first or not second:
        raise ValueError(f"x: expected [T, H] and weights of at least one expert, got shape {list(x.shape)}")
    options = Options(
        experts=first[0].shape[0] if first[0].dim() == 3 else len(first),
        hidden=first[0].shape[-1],
        ffn=second[0].shape[-1],
        activation=activation,
        glu_layout=glu_layout,
        bias=b1 is not None or b2 is not None,
        precision=precision,
        recompute=recompute,
        fc1_rht=fc1_rht,
        fc2_rht=fc2_rht,
        gradient_rounding=gradient_rounding,
        dc_amax=dc_amax,
    )
    return apply(x, splits, prob, first, second, b1, b2, options, options.text())


def apply(
    x: Tensor,
    splits: Splits,
    prob: Tensor,
    w1: Sequence[Tensor],
    w2: Sequence[Tensor],
    b1: Optional[Tensor],
    b2: Optional[Tensor],
    options: Options,
    text: str,
    *,
    quantized: Optional[Sequence[Tensor]] = None,
    fused: bool = False,
    later: Optional[deque[DelayedGradients]] = None,
) -> Tensor:
    """:func:`grouped_mlp` with options and the same as text; ``quantized`` weights are taken as they are.

    With ``later`` each backward appends the weights' gradients to it instead of computing them.
    """
    expect_known_device("x", x)
    expect_known_device("prob", prob)
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.bfloat16)
    _check(x, prob, w1, w2, options)
    x, prob = x.contiguous(), prob.to(torch.float32).contiguous()
    b1 = None if b1 is None else b1.to(torch.float32).contiguous()
    b2 = None if b2 is None else b2.to(torch.float32).contiguous()
    counted = as_splits(splits, x.device)
    nvfp4 = options.precision == "nvfp4"

    recording = torch.is_grad_enabled()
    params = [*w1, *w2] + ([b1, b2] if b1 is not None and b2 is not None else [])
    _refuse_tangents([x, prob, *params])
    weights = recording and any(p.requires_grad for p in params)
    input = recording and (x.requires_grad or (prob.requires_grad and not weights))

    if quantized is None:
        quantized = [*quantize_weights(w1), *quantize_weights(w2)] if nvfp4 else _read(w1, w2)
    if not (input or weights):
        half = _ops.QUANTIZED if nvfp4 else len(w1)
        read = list(quantized) or [*w1, *w2]
        outputs: list[Tensor] = torch.ops.moe4.grouped_mlp_forward.default(
            x, prob, counted, read[:half], read[half:], b1, b2, text, False, False
        )
        return outputs[0]
    if nvfp4 and options.gradient_rounding == "stochastic":
        # On the device of `x`: there kernels read it, nothing waits, and a graph draws another one in each replay.
        seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=x.device)
    else:
        seed = torch.empty(0, dtype=torch.int64, device=x.device)
    fused, later = fused and weights, later if weights else None
    if later is not None and not all(w.is_leaf for w in (*w1, *w2)):
        raise ValueError(
            "delay_wgrad_compute: expected weights that are parameters, got one computed from others, which backward_dw "
            "cannot reach; leave the option out"
        )
    call = run_aside if fused or later is not None else run
    return call(
        x, prob, b1, b2, counted, seed, text, input, weights,
        nvfp4, fused, later, len(w1), len(w2), *w1, *w2, *quantized,
    )  # fmt: skip


def _refuse_tangents(tensors: Sequence[Tensor]) -> None:
    """The operator has no derivative in forward mode; without this, tangents would end here in silence."""
    if forward_ad._current_level < 0:
        return
    tangents = (forward_ad.unpack_dual(tensor).tangent for tensor in tensors)  # type: ignore[no-untyped-call]
    if any(tangent is not None for tangent in tangents):
        raise NotImplementedError(
            "moe4: the grouped MLP has no forward-mode derivative (jvp, jacfwd, dual tensors); use reverse mode, "
            "or precision='bf16' experts written in torch where it is needed"
        )


def quantize_weights(weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, amax and values of one projection, without gradient."""
    with torch.no_grad():
        parts: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.moe4.quantize_weights.default(
            [weight.detach().to(torch.bfloat16).contiguous() for weight in weights]
        )
    return parts


def _read(w1: Sequence[Tensor], w2: Sequence[Tensor]) -> list[Tensor]:
    """What BF16 products read, if it is not the weights themselves."""
    both = [*w1, *w2]
    if all(w.dtype == torch.bfloat16 and w.is_contiguous() for w in both):
        return []
    with torch.no_grad():
        return [w.detach().to(torch.bfloat16).contiguous() for w in both]


def _listed(weights: Weights) -> Sequence[Tensor]:
    return [weights] if isinstance(weights, Tensor) else list(weights)


def _check(x: Tensor, prob: Tensor, w1: Sequence[Tensor], w2: Sequence[Tensor], options: Options) -> None:
    """What torch's dispatcher would tell less clearly; shapes of the rest are the compiled part's to check."""
    shapes = (options.fc1_rows, options.hidden), (options.hidden, options.ffn)
    dtype = w1[0].dtype
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"w1: expected torch.bfloat16 or torch.float32, got {dtype}")
    for name, tensors, (n, k) in (("w1", w1, shapes[0]), ("w2", w2, shapes[1])):
        shape = (options.experts, n, k) if len(tensors) == 1 and tensors[0].dim() == 3 else (n, k)
        if len(shape) == 2 and len(tensors) != options.experts:
            raise ValueError(f"{name}: expected one tensor for each of {options.experts} experts, got {len(tensors)}")
        for at, tensor in enumerate(tensors):
            if tensor.shape != shape:
                raise ValueError(f"{name}[{at}]: expected shape {list(shape)}, got {list(tensor.shape)}")
            if tensor.dtype != dtype:
                raise TypeError(f"{name}[{at}]: expected {dtype}, as the first weight is, got {tensor.dtype}")
            if tensor.device != x.device:
                raise ValueError(misplaced(f"{name}[{at}]", tensor, x.device))
    if prob.device != x.device:
        raise ValueError(misplaced("prob", prob, x.device))
    if not prob.is_floating_point():
        raise TypeError(f"prob: expected a floating dtype, got {prob.dtype}")


def plan(
    experts: int,
    hidden: int,
    ffn: int,
    *,
    activation: Activation = "swiglu",
    glu_layout: GluLayout = "halves",
    bias: bool = False,
    precision: Precision = "nvfp4",
    recompute: bool = False,
    fc1_rht: Optional[int] = 0xD7E8,
    fc2_rht: Optional[int] = 0xD7E8,
    gradient_rounding: GradientRounding = "stochastic",
    dc_amax: DcAmax = "exact",
    input_grad: bool = True,
    weight_grad: bool = True,
) -> str:
    """What a forward and its backward will do: copies, passes, saved tensors. Nothing runs."""
    options = Options(
        experts, hidden, ffn, activation, glu_layout, bias, precision, recompute,
        fc1_rht, fc2_rht, gradient_rounding, dc_amax,
    )  # fmt: skip
    return _moe4.plan(options.text(), input_grad, weight_grad)
