"""What concerns a GPU as a whole: its kernels, and what they found wrong."""

from __future__ import annotations

from typing import Optional, Union

import torch

from . import _moe4
from ._options import Activation, GluLayout, Options

Device = Union[torch.device, str, int, None]
"""A GPU; the current one if ``None`` or without index."""


def compile_kernels(activation: Activation = "swiglu", glu_layout: GluLayout = "halves", device: Device = None) -> None:
    """Compiles what a grouped MLP may need on a GPU now, on all cores at once.

    That is whatever its other options are, for any number of rows; a layer with a router around it included. Ctrl-C ends it
    when the compilations that have begun are done.

    Without this each kernel is compiled when it is first needed, a second or two each. What was compiled is kept in the
    user's cache folder, so that later processes start fast either way.

    Args:
        activation, glu_layout: those of the grouped MLP.
        device: the GPU. For the CPU, and on machines without a GPU, nothing happens.

    Raises:
        ValueError: an unknown activation or layout.
        RuntimeError: no compiler (NVRTC), or a GPU that there are no kernels for.
    """
    Options(experts=1, hidden=32, ffn=32, activation=activation, glu_layout=glu_layout).text()  # raises, GPU or not
    ordinal = _ordinal(device)
    if ordinal is not None:
        _moe4.compile_kernels(ordinal, activation, glu_layout)


def synchronize(device: Device = None) -> None:
    """Waits for all work on a GPU, then raises what its kernels found wrong.

    Splits on a GPU are read by kernels alone. Ones that do not fit (negative, or more rows than there are) count as none
    there: outputs are zero, and the error waits for this function, or for a later call that can see it without waiting.

    Args:
        device: the GPU. For the CPU, and on machines without a GPU, nothing happens.

    Raises:
        ValueError: the first fault since the last call; it is then forgotten.
    """
    ordinal = _ordinal(device)
    if ordinal is not None:
        torch.cuda.synchronize(ordinal)
        _moe4.raise_faults(ordinal)


def _ordinal(device: Device) -> Optional[int]:
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    if found.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.current_device() if found.index is None else found.index
