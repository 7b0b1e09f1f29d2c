"""Mixture-of-experts training in NVFP4 for PyTorch: the fused grouped MLP, exact to the byte.

Shapes: ``T`` tokens, ``E`` experts, ``H`` hidden, ``F`` ffn, ``N1`` outputs of FC1 (``2F`` for gated activations).
"""

from ._checkpoint import ExpertWeights, load_experts, save_experts
from ._device import compile_kernels, synchronize
from ._doctor import doctor
from ._experts import GroupedMLP
from ._functions import (
    QuantizedTensor,
    dequantize,
    group_quantize,
    hadamard_amax,
    quantize,
)
from ._huggingface import replace_experts
from ._layer import MoELayer
from ._moe4 import __version__
from ._operator import grouped_mlp, plan

__all__ = [
    "ExpertWeights",
    "GroupedMLP",
    "MoELayer",
    "QuantizedTensor",
    "__version__",
    "compile_kernels",
    "dequantize",
    "doctor",
    "group_quantize",
    "grouped_mlp",
    "hadamard_amax",
    "load_experts",
    "plan",
    "quantize",
    "replace_experts",
    "save_experts",
    "synchronize",
]
