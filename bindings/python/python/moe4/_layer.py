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
        **experts: options of :class:`GroupedMLP`.

    Parameters: ``router [E, H]`` float32, the same on all processes, and ``experts``, this process's part.
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
        **experts: Any,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k: expected 1 to {num_experts} (num_experts), got {top_k}")
        self.world = 1 if process_group is None else dist.get_world_size(process_group)
        if num_experts % self.world != 0:
            raise ValueError(f"num_experts: expected a multiple of the {self.world} processes, got {num_experts}")
        self.num_experts, self.top_k, self.normalize = num_experts, top_k, normalize
        self.process_group = process_group
        self.router = nn.Parameter(
            torch.empty(num_experts, hidden_size, dtype=torch.float32, device=experts.get("device"))
        )
        nn.init.normal_(self.router, std=hidden_size**-0.5)
        self.experts = GroupedMLP(num_experts // self.world, hidden_size, ffn_size, **experts)

    def forward(self, x: Tensor, *, weight_version: Optional[int] = None) -> tuple[Tensor, Tensor]:
        """Routes and runs.

        Args:
            x: bfloat16 ``[..., H]``.
            weight_version: see :meth:`GroupedMLP.forward`.

        Returns:
            ``(y, aux_loss)``: bfloat16 of the shape of ``x``, and the load-balance loss, a scalar (1 when balanced);
            add it to the training loss with a small factor. Its mean over the processes is that of one process.
        """
        shape, tokens = x.shape, x.reshape(-1, x.shape[-1])
        prob, chosen, softmax = self._route(tokens)
        order, counts = by_expert(chosen.flatten(), self.num_experts)
        rows, weights = tokens[order // self.top_k], prob.flatten()[order]
        if self.process_group is None:
            out = self.experts(rows, counts, weights, weight_version=weight_version)
        else:
            out = self._exchange(rows, counts, weights, weight_version)
        y = out[inverse(order)].view(-1, self.top_k, out.shape[-1]).float().sum(1).to(out.dtype)
        return y.view(shape), self._balance(counts, softmax)

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

    def _balance(self, counts: Tensor, softmax: Tensor) -> Tensor:
        """``E * sum(f * P)``: Fedus, Zoph, Shazeer, "Switch Transformers", 2021, equation 4, ``f`` constant."""
        counts = counts.clone()
        if self.process_group is not None:
            dist.all_reduce(counts, group=self.process_group)
        share = counts.float() / counts.sum().clamp(min=1)
        mean = softmax.sum(0) / max(softmax.shape[0], 1)
        return self.num_experts * (share * mean).sum()

    def _exchange(self, rows: Tensor, counts: Tensor, weights: Tensor, weight_version: Optional[int]) -> Tensor:
        group, world = self.process_group, self.world
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        by_rank = received.view(world, -1)
        # The one wait for a GPU: who sends memory has to know how much.
        sent, arriving = torch.stack([counts.view(world, -1).sum(1), by_rank.sum(1)]).tolist()
        rows = _AllToAll.apply(rows, sent, arriving, group)  # type: ignore[no-untyped-call]
        weights = _AllToAll.apply(weights, sent, arriving, group)  # type: ignore[no-untyped-call]
        # From process after process to expert after expert.
        experts = torch.arange(by_rank.shape[1], device=rows.device).repeat(world)
        experts = experts.repeat_interleave(by_rank.flatten(), output_size=sum(arriving))
        order = torch.argsort(experts, stable=True)
        out = self.experts(rows[order], by_rank.sum(0), weights[order], weight_version=weight_version)
        result: Tensor = _AllToAll.apply(out[inverse(order)], arriving, sent, group)  # type: ignore[no-untyped-call]
        return result


class _AllToAll(torch.autograd.Function):
    """Runs of rows to every process; their gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """As bytes: not every transport knows every dtype."""
    x = x.contiguous()
    out = x.new_empty((sum(received), *x.shape[1:]))
    width = x.element_size() * x.shape[1:].numel()
    bytes_in = x.reshape(-1).view(torch.uint8).view(-1, width)
    bytes_out = out.reshape(-1).view(torch.uint8).view(-1, width)
    dist.all_to_all_single(bytes_out, bytes_in, received, sent, group=group)
    return out
