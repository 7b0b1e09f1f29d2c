"""``GroupedMLP``: the experts of a mixture-of-experts layer as a module."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor, nn

from . import _moe4, _operator
from ._autograd import DelayedGradients
from ._convert import Splits
from ._options import Activation, DcAmax, GluLayout, GradientRounding, Options, Precision


class _Held(NamedTuple):
    """Quantized weights of one version."""

    version: int
    tensors: list[Tensor]
    stream: Optional[torch.cuda.Stream]
    """On a GPU: where they were made, whose memory they are."""
    made: Optional[torch.cuda.Event]
    """On a GPU: other streams wait for it before they read."""


class GroupedMLP(nn.Module):
    """FC1, activation scaled by the routing probability, FC2, for tokens sorted by expert.

    Parameters (``N1 = 2 * ffn_size`` for gated activations, else ``ffn_size``):

    - ``w1 [E, N1, H]`` and ``w2 [E, H, F]``, or with ``per_expert`` lists of ``[N1, H]`` and ``[H, F]``;
    - ``b1 [E, N1]`` and ``b2 [E, H]`` with ``bias``.

    Args:
        num_experts: ``E``.
        hidden_size: ``H``, a multiple of 16.
        ffn_size: ``F``, a multiple of 16 (of 32 with ``glu_layout="interleaved32"``).
        activation: ``swiglu``, ``srelu``, ``tanh_srelu:s=16``, ``situ_glu:beta1=4,beta2=25`` or
            ``clamped_qgeglu:limit=7,alpha=1.702,offset=1``.
        bias: whether FC1 and FC2 have biases.
        glu_layout: order of gate and up rows in ``w1``: ``halves`` (gate first), ``interleaved32`` (blocks of 32, gate
            first) or ``elementwise`` (gate even, up odd).
        recompute: rebuild the activation in the backward instead of saving it; results are bitwise the same.
        precision: ``nvfp4`` or, as a baseline, ``bf16``.
        device: of the parameters.
        dtype: of the parameters, bfloat16 or float32; their gradients have the same.
        per_expert: one parameter an expert instead of one for all.
        fuse_wgrad_accumulation: add weight gradients to the ``main_grad`` of each weight, which the trainer provides
            (float32 or bfloat16, of the weight's shape), instead of returning them to autograd. A weight with an
            attribute ``grad_added_to_main_grad`` has it set and receives a placeholder gradient.
        delay_wgrad_compute: leave the gradients of ``w1`` and ``w2`` out of the backward, for :meth:`backward_dw`. The
            weights get an attribute ``skip_backward_post_hook`` that tells trainers not to wait for them in autograd.
        fc1_rht, fc2_rht: sign masks of the Hadamard transform along tokens for the weights' gradients, or ``None``.
        gradient_rounding: of gradients to 4 bits.
        dc_amax: ``exact``, ``bound`` (cheaper, a slightly noisier gradient of ``w1``) or ``separate``.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        activation: Activation = "swiglu",
        bias: bool = False,
        glu_layout: GluLayout = "halves",
        recompute: bool = False,
        precision: Precision = "nvfp4",
        device: Union[torch.device, str, None] = None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        per_expert: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        fc1_rht: Optional[int] = 0xD7E8,
        fc2_rht: Optional[int] = 0xD7E8,
        gradient_rounding: GradientRounding = "stochastic",
        dc_amax: DcAmax = "exact",
    ) -> None:
        super().__init__()
        self.options = Options(
            experts=num_experts,
            hidden=hidden_size,
            ffn=ffn_size,
            activation=activation,
            glu_layout=glu_layout,
            bias=bias,
            precision=precision,
            recompute=recompute,
            fc1_rht=fc1_rht,
            fc2_rht=fc2_rht,
            gradient_rounding=gradient_rounding,
            dc_amax=dc_amax,
        )
        self._text = self.options.text()
        if dtype not in (torch.bfloat16, torch.float32):
            raise TypeError(f"dtype: expected torch.bfloat16 or torch.float32, got {dtype}")
        self.per_expert, self.fuse_wgrad_accumulation = per_expert, fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        n1 = self.options.fc1_rows

        def weights(n: int, k: int) -> Union[nn.Parameter, nn.ParameterList]:
            if not per_expert:
                return nn.Parameter(torch.empty(num_experts, n, k, device=device, dtype=dtype))
            each = [nn.Parameter(torch.empty(n, k, device=device, dtype=dtype)) for _ in range(num_experts)]
            return nn.ParameterList(each)

        self.w1, self.w2 = weights(n1, hidden_size), weights(hidden_size, ffn_size)
        if bias:
            self.b1: Optional[nn.Parameter] = nn.Parameter(torch.empty(num_experts, n1, device=device, dtype=dtype))
            self.b2: Optional[nn.Parameter] = nn.Parameter(
                torch.empty(num_experts, hidden_size, device=device, dtype=dtype)
            )
        else:
            self.register_parameter("b1", None)
            self.register_parameter("b2", None)
        if delay_wgrad_compute:
            for weight in (*_listed(self.w1), *_listed(self.w2)):
                setattr(weight, "skip_backward_post_hook", True)  # noqa: B010
        self._held: Optional[_Held] = None
        self._delayed: deque[DelayedGradients] = deque()
        self._hooks: list[Callable[[], object]] = []
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform weights within the inverse root of their inputs, as ``nn.Linear`` has them; biases 0."""
        for weights in (self.w1, self.w2):
            for weight in _listed(weights):
                bound = 1 / math.sqrt(weight.shape[-1])
                weight.uniform_(-bound, bound)
        for bias in (self.b1, self.b2):
            if bias is not None:
                bias.zero_()
        self._held = None

    def forward(self, x: Tensor, splits: Splits, prob: Tensor, *, weight_version: Optional[int] = None) -> Tensor:
        """Runs the experts.

        Args:
            x: bfloat16 ``[T, H]`` (any floating dtype under autocast), rows sorted by expert.
            splits: rows of each expert, integers ``[E]``, their sum at most ``T``. Rows past it give 0.
            prob: ``[T]``, routing probability of each row.
            weight_version: any number that changes with the weights, such as the count of optimizer steps. Calls of
                one version quantize the weights once; without it every call does. On a GPU they may be on any streams,
                which wait for the one that quantized. While a CUDA graph is captured it has no effect: the graph
                quantizes the weights in each replay, as they are then. ``torch.compile`` breaks its graph there.

        Returns:
            bfloat16 ``[T, H]``.
        """
        return _operator.apply(
            x,
            splits,
            prob,
            _listed(self.w1),
            _listed(self.w2),
            self.b1,
            self.b2,
            self.options,
            self._text,
            quantized=self._quantized(weight_version),
            fused=self.fuse_wgrad_accumulation,
            later=self._delayed if self.delay_wgrad_compute else None,
        )

    def backward_dw(self) -> None:
        """With ``delay_wgrad_compute``: the gradients of the weights of the earliest backward that has not got them.

        To be called once for each backward, when there is time: in a bubble of a pipeline, or while gradients of the
        tokens are on their way to other processes. Results are bitwise those of a backward that does not delay: added
        to ``grad``, or to ``main_grad`` with ``fuse_wgrad_accumulation``. Gradients of the biases are there since the
        backward. Hooks of the weights do not run, only those of
        :meth:`register_wgrad_accumulation_and_reduce_hooks`.

        Until then are kept: the gradients of ``y`` and of FC1's output (4-bit copies, or the tensors with
        ``precision="bf16"``), and the saved ``x`` and ``h``.

        Without ``delay_wgrad_compute``, and for weights that need no gradient, nothing happens.

        A call that raises may be repeated when its cause is gone, such as too little memory: gradients still wait. Only
        if ``main_grad`` had been added to in part are they lost.

        Raises:
            ValueError: ``main_grad`` is absent, of another shape, on another device or shares memory with what is read.
            RuntimeError: there was no backward before; or, with ``precision="bf16"``, ``x`` or the gradient of ``y`` was
                modified in place since.
        """
        if not self.delay_wgrad_compute:
            return
        if not self._delayed:
            if any(weight.requires_grad for weight in (*_listed(self.w1), *_listed(self.w2))):
                raise RuntimeError("backward_dw: expected a backward before, one for each call, got none")
            return
        earliest = self._delayed[0]
        try:
            earliest.run(earliest.targets())
        finally:
            if earliest.over:
                self._delayed.popleft()
        for hook in self._hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], object]) -> None:
        """``hook()`` runs at the end of each :meth:`backward_dw`, as trainers in the manner of Megatron want it."""
        self._hooks.append(hook)

    def plan(self, *, input_grad: bool = True, weight_grad: bool = True) -> str:
        """What a forward and its backward will do: copies, passes, saved tensors."""
        return _moe4.plan(self._text, input_grad, weight_grad)

    def extra_repr(self) -> str:
        o = self.options
        more = ", bias=True" if o.bias else ""
        more += ", recompute=True" if o.recompute else ""
        return (
            f"num_experts={o.experts}, hidden_size={o.hidden}, ffn_size={o.ffn}, activation='{o.activation}', "
            f"glu_layout='{o.glu_layout}', precision='{o.precision}'{more}"
        )

    def _quantized(self, version: Optional[int]) -> Optional[list[Tensor]]:
        if version is None or self.options.precision != "nvfp4":
            self._held = None
            return None
        on_gpu = _listed(self.w1)[0].is_cuda
        return self._of_version_in_order(version) if on_gpu else self._of_version(version, None)

    # The stream, and whether it is captured, are those of the moment in which the call runs.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _of_version_in_order(self, version: int) -> Optional[list[Tensor]]:
        """As torch's current stream may read them; none in a capture.

        A graph quantizes by itself: what is held would not follow the weights in its replays, and may be freed before
        them; what it makes is not there before the first one.
        """
        with torch.cuda.device(_listed(self.w1)[0].device):
            if torch.cuda.is_current_stream_capturing():
                return None
            return self._of_version(version, torch.cuda.current_stream())

    def _of_version(self, version: int, stream: Optional[torch.cuda.Stream]) -> list[Tensor]:
        w1, w2 = _listed(self.w1), _listed(self.w2)
        held = self._held
        if held is None or held.version != version or held.tensors[0].device != w1[0].device:
            self._held = None  # free the old ones before there are new ones
            tensors = [*_operator.quantize_weights(w1), *_operator.quantize_weights(w2)]
            self._held = _Held(version, tensors, stream, None if stream is None else stream.record_event())
            return tensors
        if stream is not None and stream != held.stream and held.made is not None:
            stream.wait_event(held.made)
            for tensor in held.tensors:
                tensor.record_stream(stream)
        return held.tensors

    # What replaces the weights, or what they hold, ends what is held of them; an optimizer's steps are the version's to tell.

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("w1", "w2"):
            self._held = None
        super().__setattr__(name, value)

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        self._held = None
        return super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        self._held = None
        super()._load_from_state_dict(*arguments, **options)

    def __getstate__(self) -> dict[str, Any]:
        """Without quantized weights, which follow from the others, and without gradients that are still to come."""
        return {**self.__dict__, "_held": None, "_delayed": deque(), "_hooks": []}


def _listed(weights: Union[Tensor, nn.Module]) -> list[Tensor]:
    return [weights] if isinstance(weights, Tensor) else list(weights.parameters())
