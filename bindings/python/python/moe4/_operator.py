"""The operator as torch sees it: custom operators with shapes, autograd, and the function on top.

Three operators are registered, so that ``torch.compile`` and ``torch.export`` trace through:

==============================  ===============================================================================
``moe4::quantize_weights``      BF16 weights to codes, scales, amax, and on a GPU the BF16 values of the codes, which
                                its products read
``moe4::grouped_mlp_forward``   ``y`` and those of ``c, h, x_codes, x_scales, x_amax, h_codes, h_scales, h_amax``
                                that the plan saves
``moe4::grouped_mlp_backward``  ``[dx, dprob, db1, db2, *dw1, *dw2]``; what is not wanted is an empty tensor
==============================  ===============================================================================

A fourth, ``moe4::grouped_mlp_backward_into``, leaves the weights' gradients in buffers that it is given. Gradients of
the weights that are computed later (:class:`DelayedGradients`) go past these operators.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Optional, TypeVar, Union

import torch
from torch import Tensor

from . import _moe4
from ._convert import Splits, as_splits, expect_known_device, misplaced
from ._options import Activation, DcAmax, GluLayout, GradientRounding, Options, Precision

Weights = Union[Tensor, Sequence[Tensor]]
"""One tensor ``[E, n, k]``, or one ``[n, k]`` for each expert."""

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
_QUANTIZED = 4
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


def _or_empty(tensors: Sequence[Optional[Tensor]], like: Tensor) -> list[Tensor]:
    """Operators return tensors, so that what is not there is an empty one."""
    return [like.new_empty(0) if tensor is None else tensor for tensor in tensors]


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
def _forward_fake(
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
    return [*_or_empty(grads, dy), *dw1, *dw2]


@_fake("grouped_mlp_backward")
def _backward_fake(
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
    return _or_empty(tensors, dy)


_TWICE = (
    "moe4: the grouped MLP cannot be differentiated twice; leave out create_graph=True, or use precision='bf16' "
    "experts written in torch where second derivatives are needed"
)


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(_TWICE)


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
    return _or_empty(grads, dy)


@_fake("grouped_mlp_backward_into")
def _backward_into_fake(
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
    return _gradient_shapes(dy, options, input, True)


# --- autograd


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
    """The weights' gradients of one backward, not computed yet; what they read is kept until :meth:`run`."""

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

    @torch.no_grad()
    def run(self, into: list[Tensor]) -> None:
        """Both products, once. What autograd does with a gradient that arrives, hooks aside, is done here."""
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
        half = _QUANTIZED if nvfp4 else n1
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
            raise RuntimeError(_TWICE)
        dw: list[Optional[Tensor]] = [None] * (ctx.n1 + ctx.n2)
        if ctx.later is not None:
            found, handle = _moe4.backward_delayed(
                ctx.options, dy, x, prob, splits, weights[0], weights[1], b1, b2, saved, seed, ctx.input
            )
            grads = _or_empty(found, dy)
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
            dw = list(grads[4:]) if ctx.weights else dw
        dx, dprob, db1, db2 = grads[:4]
        biases = ctx.weights and b1 is not None
        return (
            dx if ctx.input else None,
            dprob,
            db1 if biases else None,
            db2 if biases else None,
            *[None] * 10,
            *dw,
            *[None] * ctx.separate,
        )


def _run(*arguments: Any) -> Tensor:
    y: Tensor = _GroupedMLP.apply(*arguments)  # type: ignore[no-untyped-call]
    return y


# Compilers do not follow gradients that go to buffers on the side, or come later: here they leave off, and go on behind.
_run_aside: Callable[..., Tensor] = torch.compiler.disable(_run)  # type: ignore[no-untyped-call]


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

    Gradients flow to ``x``, ``prob``, weights and biases. Seeds of stochastic rounding are drawn from torch's generator
    in the forward, so that ``torch.manual_seed`` makes runs repeat.
    """
    first, second = _listed(w1), _listed(w2)
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
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.bfloat16)
    _check(x, prob, w1, w2, options)
    x, prob = x.contiguous(), prob.to(torch.float32).contiguous()
    b1 = None if b1 is None else b1.to(torch.float32).contiguous()
    b2 = None if b2 is None else b2.to(torch.float32).contiguous()
    counted = as_splits(splits, x.device)
    nvfp4 = options.precision == "nvfp4"

    recording = torch.is_grad_enabled()
    params = [*w1, *w2] + ([b1, b2] if b1 is not None and b2 is not None else [])
    weights = recording and any(p.requires_grad for p in params)
    input = recording and (x.requires_grad or (prob.requires_grad and not weights))

    if quantized is None:
        quantized = [*quantize_weights(w1), *quantize_weights(w2)] if nvfp4 else _read(w1, w2)
    if not (input or weights):
        half = _QUANTIZED if nvfp4 else len(w1)
        read = list(quantized) or [*w1, *w2]
        outputs: list[Tensor] = torch.ops.moe4.grouped_mlp_forward.default(
            x, prob, counted, read[:half], read[half:], b1, b2, text, False, False
        )
        return outputs[0]
    if nvfp4 and options.gradient_rounding == "stochastic":
        seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device="cpu")
    else:
        seed = torch.empty(0, dtype=torch.int64, device="cpu")
    fused, later = fused and weights, later if weights else None
    if later is not None and not all(w.is_leaf for w in (*w1, *w2)):
        raise ValueError(
            "delay_wgrad_compute: expected weights that are parameters, got one computed from others, which backward_dw "
            "cannot reach; leave the option out"
        )
    run = _run_aside if fused or later is not None else _run
    return run(
        x, prob, b1, b2, counted, seed, text, input, weights,
        nvfp4, fused, later, len(w1), len(w2), *w1, *w2, *quantized,
    )  # fmt: skip


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
