"""Experts of Hugging Face models replaced by moe4's.

Models of transformers 5 keep the experts of a layer in one module with weights of all of them:

==================  =======================================  ==============================================
models              weights                                  become
==================  =======================================  ==============================================
Mixtral, Qwen3-MoE  ``gate_up_proj [E, 2F, H]``,             SwiGLU, ``halves``, the same tensors
                    ``down_proj [E, H, F]``
GPT-OSS             ``gate_up_proj [E, H, 2F]``,             clamped QGeGLU, ``elementwise``, biases;
                    ``down_proj [E, F, H]``, biases          transposed
==================  =======================================  ==============================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ._experts import GroupedMLP
from ._routing import by_expert, inverse


class _Experts(nn.Module):
    """:class:`GroupedMLP` behind the arguments that such a module has."""

    def __init__(self, experts: GroupedMLP) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[T, H]`` from tokens ``[T, H]``, choices ``[T, k]`` (``E`` for none) and their weights ``[T, k]``."""
        count, (tokens, top_k) = self.experts.options.experts, top_k_index.shape
        chosen = top_k_index.reshape(-1)
        order, splits = by_expert(chosen, count)
        rows = hidden_states.reshape(tokens, -1)[order // top_k].to(torch.bfloat16)
        out = self.experts(rows, splits, top_k_weights.reshape(-1)[order])
        sums: Tensor = out[inverse(order)].view(tokens, top_k, -1).float().sum(1)
        return sums.to(hidden_states.dtype)


def replace_experts(model: nn.Module, **options: Any) -> int:
    """Swaps the experts of a Hugging Face mixture-of-experts model for moe4's, with the same weights.

    Args:
        model: Mixtral, Qwen3-MoE, GPT-OSS or another of their form, from transformers 5; it is changed.
        **options: of :class:`GroupedMLP`, such as ``precision`` or ``recompute``. Activation, layout, biases and dtype
            follow from the model.

    Returns:
        The number of layers whose experts were replaced.

    Raises:
        ValueError: if there are none, or if they have an activation that moe4 does not.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a module, got {type(model).__name__}")
    found = [(name, module) for name, module in model.named_modules() if _is_experts(module)]
    if not found:
        raise ValueError(
            "model: expected modules with weights gate_up_proj and down_proj of all experts, as Mixtral, Qwen3-MoE and "
            "GPT-OSS have them in transformers 5, found none"
        )
    built = [(name, _Experts(_convert(name, module, options))) for name, module in found]
    for name, experts in built:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, experts)
    return len(built)


def _is_experts(module: nn.Module) -> bool:
    weights = (getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None))
    return all(isinstance(w, nn.Parameter) and w.dim() == 3 for w in weights)


@torch.no_grad()
def _convert(name: str, module: Any, options: dict[str, Any]) -> GroupedMLP:
    w1, w2 = module.gate_up_proj, module.down_proj
    biases = getattr(module, "gate_up_proj_bias", None), getattr(module, "down_proj_bias", None)
    if hasattr(module, "alpha") and hasattr(module, "limit"):
        activation, layout = f"clamped_qgeglu:limit={module.limit},alpha={module.alpha},offset=1", "elementwise"
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    else:
        act = type(getattr(module, "act_fn", None)).__name__
        if act not in ("SiLU", "SiLUActivation"):
            raise ValueError(f"{name}: expected experts with SiLU (SwiGLU) or GPT-OSS's clamped activation, got {act}")
        activation, layout = "swiglu", "halves"
    (count, n1, hidden), (_, out, ffn) = w1.shape, w2.shape
    if (n1, out) != (2 * ffn, hidden):
        raise ValueError(f"{name}: expected weights [E, 2F, H] and [E, H, F], got {list(w1.shape)} and {list(w2.shape)}")
    experts = GroupedMLP(
        count, hidden, ffn, activation, biases[0] is not None, layout,  # type: ignore[arg-type]
        device=w1.device, dtype=w1.dtype, **options,
    )  # fmt: skip
    for parameter, value in ((experts.w1, w1), (experts.w2, w2), (experts.b1, biases[0]), (experts.b2, biases[1])):
        if value is not None:
            assert isinstance(parameter, nn.Parameter)
            parameter.copy_(value)
            parameter.requires_grad_(value.requires_grad)
    return experts.train(module.training)
