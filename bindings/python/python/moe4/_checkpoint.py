"""Expert weights in and out of safetensors files, in the names and formats of other programs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, NamedTuple, Optional, Union

import torch
from torch import Tensor

from . import _moe4
from ._experts import GroupedMLP, _listed
from ._options import GluLayout

Path = Union[str, "os.PathLike[str]"]


class ExpertWeights(NamedTuple):
    """The weights of one layer's experts, bfloat16.

    Attributes:
        w1: ``[E, N1, H]``.
        w2: ``[E, H, F]``.
        b1: ``[E, N1]``, or ``None``.
        b2: ``[E, H]``, or ``None``.
        glu_layout: order of gate and up rows in ``w1``.
    """

    w1: Tensor
    w2: Tensor
    b1: Optional[Tensor] = None
    b2: Optional[Tensor] = None
    glu_layout: GluLayout = "halves"


def load_experts(
    path: Path, *, prefix: Optional[str] = None, num_experts: Optional[int] = None, glu_layout: GluLayout = "halves"
) -> dict[str, ExpertWeights]:
    """Reads the experts of a model, whatever its format: BF16, ModelOpt NVFP4 or compressed-tensors NVFP4.

    Args:
        path: a safetensors file, or a folder with ``model.safetensors`` or ``model.safetensors.index.json``.
        prefix: what stands before ``.experts`` in the names of one layer; all layers if ``None``.
        num_experts: how many each layer must have.
        glu_layout: the order in which gate and up rows are put into ``w1``.

    Returns:
        The weights of each layer by its prefix. Values of NVFP4 files are rounded to bfloat16 once.

    Raises:
        ValueError: names the tensor that is missing, too many, damaged, or of another dtype or shape than expected.
    """
    file = os.fspath(path)
    prefixes = [found[0] for found in _moe4.find_experts(file)] if prefix is None else [prefix]
    if not prefixes:
        raise ValueError(f"{file}: expected experts (tensors named '….experts.…'), found none")
    return {name: ExpertWeights(*_moe4.read_experts(file, name, num_experts, glu_layout), glu_layout) for name in prefixes}


def save_experts(
    path: Path,
    layers: Mapping[str, Union[GroupedMLP, ExpertWeights]],
    *,
    format: Literal["bf16", "modelopt", "compressed-tensors"] = "bf16",
    names: Literal["projections", "mixtral"] = "projections",
    tile: Literal["16x16", "1x16"] = "16x16",
) -> None:
    """Writes experts to one safetensors file, a tensor an expert and projection.

    Args:
        path: the file; it is replaced only when all of the new one is written.
        layers: modules or weights by what is to stand before ``.experts``, such as ``model.layers.0.mlp``.
        format: of the weights; ``moe4 convert`` takes files from one to another.
        names: ``gate_proj``, ``up_proj``, ``down_proj``, or ``w1``, ``w3``, ``w2``.
        tile: what a block scale covers: ``16x16`` as in training, ``1x16`` for smaller errors.
    """
    if names not in ("projections", "mixtral") or tile not in ("16x16", "1x16"):
        raise ValueError(f"expected names projections or mixtral and tile 16x16 or 1x16, got {names!r} and {tile!r}")
    rows = []
    for prefix, layer in layers.items():
        weights = _weights(prefix, layer)
        if weights.b1 is not None or weights.b2 is not None:
            raise ValueError(f"{prefix}: expected experts without biases, for which these formats have no names")
        w1, w2 = (t.detach().to("cpu", torch.bfloat16).contiguous() for t in (weights.w1, weights.w2))
        rows.append((prefix, w1, w2, weights.glu_layout))
    _moe4.write_experts(os.fspath(path), rows, format, names == "mixtral", tile == "16x16")


def _weights(prefix: str, layer: Union[GroupedMLP, ExpertWeights]) -> ExpertWeights:
    if isinstance(layer, ExpertWeights):
        return layer
    if not isinstance(layer, GroupedMLP):
        raise TypeError(f"{prefix}: expected a GroupedMLP or ExpertWeights, got {type(layer).__name__}")
    both = (_listed(layer.w1), _listed(layer.w2))
    w1, w2 = (torch.stack(w) if layer.per_expert else w[0] for w in both)
    return ExpertWeights(w1, w2, layer.b1, layer.b2, layer.options.glu_layout)
