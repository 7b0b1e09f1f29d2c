"""``MoELayer``: router, permutation, experts, and the way between processes that each hold some of the experts.

::

    x [T,H] --router--> top-k --sort by expert--> rows [S,H] --all-to-all--> experts --all-to-all--> sums [T,H]

Rows that a process receives are sorted by expert, then by process, then by token: the order of one process that holds
all tokens, process after process. An expert therefore sees the same rows in the same order however the experts are
spread, and gives the same bytes.

On a GPU the host waits for nothing as long as one process holds all experts. With a ``process_group`` it waits once a
forward, for the numbers of rows to send and to receive.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ._collectives import Exchange, Group, all_reduce, all_to_all_equal
from ._convert import expect_known_device
from ._experts import GroupedMLP
from ._routing import by_expert, inverse


class MoELayer(nn.Module):
    """A mixture-of-experts layer: each token goes to ``top_k`` experts.

    Args:
        num_experts: in all; with a ``process_group`` each of its processes holds an equal part of them.
        hidden_size: ``H``.
        ffn_size: ``F``, of one expert.
        top_k: experts of each token; among equally likely ones those of the lower index.
        normalize: scale a token's probabilities to a sum of 1 over its experts.
        process_group: the processes that share the experts (expert parallelism); ``None`` for this one alone.
        shared: a module that every token goes through besides, such as a shared expert, the same on all processes.
            With a ``process_group`` it runs, forward and backward, while rows are on their way to the experts and their
            gradients on the way back.
        **experts: options of :class:`GroupedMLP`.

    Parameters: ``router [E, H]`` float32, the same on all processes, ``experts``, this process's part, and those of
    ``shared``.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        top_k: int,
        *,
        normalize: bool = True,
        process_group: Optional[dist.ProcessGroup] = None,
        shared: Optional[nn.Module] = None,
        **experts: Any,
    ) -> None:
        super().__init__()
        if not isinstance(top_k, int) or not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k: expected 1 to {num_experts} (num_experts), got {top_k}")
        self.world = 1 if process_group is None else dist.get_world_size(process_group)
        if num_experts % self.world != 0:
            raise ValueError(f"num_experts: expected a multiple of the {self.world} processes, got {num_experts}")
        self.num_experts, self.top_k, self.normalize = num_experts, top_k, normalize
        self._group = None if process_group is None else Group(process_group)
        self.router = nn.Parameter(
            torch.empty(num_experts, hidden_size, dtype=torch.float32, device=experts.get("device"))
        )
        nn.init.normal_(self.router, std=hidden_size**-0.5)
        self.experts = GroupedMLP(num_experts // self.world, hidden_size, ffn_size, **experts)
        self.shared = shared

    @property
    def process_group(self) -> Optional[dist.ProcessGroup]:
        """The processes that share the experts. Not kept alive by the layer."""
        return None if self._group is None else self._group()

    def forward(self, x: Tensor, *, weight_version: Optional[int] = None) -> tuple[Tensor, Tensor]:
        """Routes and runs.

        Args:
            x: bfloat16 ``[..., H]``.
            weight_version: see :meth:`GroupedMLP.forward`.

        Returns:
            ``(y, aux_loss)``: bfloat16 of the shape of ``x``, and the load-balance loss, a scalar (1 when balanced);
            add it to the training loss with a small factor. Its mean over the processes is that of one process. With
            ``shared``, ``y`` is the BF16 sum of the routed experts' ``y`` and of ``shared(x)``.

        Raises:
            torch.distributed.DistBackendError: a collective failed, or did not end within the timeout of the
                ``process_group``; the message names it and the transport's error is the cause. A backward raises the
                same. NCCL ends the process instead, from its watchdog.
            ValueError: ``shared`` returned another shape than that of ``x``.
        """
        expect_known_device("x", x)
        if x.dim() == 0 or x.shape[-1] != self.router.shape[1]:
            raise ValueError(f"x: expected [..., {self.router.shape[1]}], got shape {list(x.shape)}")
        shape, tokens = x.shape, x.reshape(-1, x.shape[-1])
        prob, chosen, softmax = self._route(tokens)
        order, counts = by_expert(chosen.flatten(), self.num_experts)
        rows, weights = tokens[order // self.top_k], prob.flatten()[order]
        if self._group is None:
            out = self.experts(rows, counts, weights, weight_version=weight_version)
            extra = self._shared(x)
        else:
            out, extra = self._exchange(x, rows, counts, weights, weight_version)
        y = out[inverse(order)].view(-1, self.top_k, out.shape[-1]).float().sum(1).to(out.dtype).view(shape)
        return (y if extra is None else y + extra), self._balance(counts, softmax)

    def backward_dw(self) -> None:
        """See :meth:`GroupedMLP.backward_dw`; the router's gradient is there since the backward."""
        self.experts.backward_dw()

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(tokens.device.type, enabled=False):
            softmax = F.linear(tokens.float(), self.router.float()).softmax(-1)
        prob, chosen = softmax.sort(dim=-1, descending=True, stable=True)
        prob, chosen = prob[:, : self.top_k], chosen[:, : self.top_k]
        if self.normalize:
            prob = prob / prob.sum(-1, keepdim=True)
        return prob, chosen, softmax

    def _shared(self, x: Tensor) -> Optional[Tensor]:
        if self.shared is None:
            return None
        extra: Tensor = self.shared(x)
        if extra.shape != x.shape:
            raise ValueError(f"shared: expected an output of the shape {list(x.shape)} of x, got {list(extra.shape)}")
        return extra.to(torch.bfloat16)

    def _balance(self, counts: Tensor, softmax: Tensor) -> Tensor:
        """``E * sum(f * P)``: Fedus, Zoph, Shazeer, "Switch Transformers", 2021, equation 4, ``f`` constant."""
        counts = counts.clone()
        if self.process_group is not None:
            all_reduce(counts, "the numbers of rows (forward, load balance)", self.process_group)
        share = counts.float() / counts.sum().clamp(min=1)
        mean = softmax.sum(0) / max(softmax.shape[0], 1)
        return self.num_experts * (share * mean).sum()

    # Compilers do not follow work that goes on beside other work.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _exchange(
        self, x: Tensor, rows: Tensor, counts: Tensor, weights: Tensor, weight_version: Optional[int]
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Of rows sorted by expert the experts' outputs, and of ``x`` what ``shared`` gives."""
        group, world = self.process_group, self.world
        assert group is not None
        by_rank = all_to_all_equal(counts, "the numbers of rows (forward)", group).view(world, -1)
        # The one wait for a GPU: who sends memory has to know how much.
        sent, arriving = torch.stack([counts.view(world, -1).sum(1), by_rank.sum(1)]).tolist()
        to = "to the experts", "from the experts"
        way = Exchange(f"the rows {to[0]}", f"the rows' gradients {to[1]}", sent, arriving, group)
        beside = Exchange(
            f"the probabilities {to[0]}", f"the probabilities' gradients {to[1]}", sent, arriving, group, beside=way
        )
        home = Exchange(f"the outputs {to[1]}", f"the outputs' gradients {to[0]}", arriving, sent, group)
        rows, weights = way.begin(rows), beside.begin(weights)
        try:
            extra = self._shared(x)
        except BaseException:
            way.abandon()
            beside.abandon()
            raise
        rows, weights = way.end(rows), beside.end(weights)
        # From process after process to expert after expert.
        experts = torch.arange(by_rank.shape[1], device=rows.device).repeat(world)
        experts = experts.repeat_interleave(by_rank.flatten(), output_size=sum(arriving))
        order = torch.argsort(experts, stable=True)
        out = self.experts(rows[order], by_rank.sum(0), weights[order], weight_version=weight_version)
        return home(out[inverse(order)]), extra
