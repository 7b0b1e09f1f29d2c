"""Waiting for a GPU, and what it found wrong meanwhile."""

from __future__ import annotations

from typing import Union

import torch

from . import _moe4


def synchronize(device: Union[torch.device, str, int, None] = None) -> None:
    """Waits for all work on a GPU, then raises what its kernels found wrong.

    Splits on a GPU are read by kernels alone. Ones that do not fit (negative, or more rows than there are) count as none
    there: outputs are zero, and the error waits for this function, or for a later call that can see it without waiting.

    Args:
        device: the GPU, the current one if ``None``. For the CPU, and on machines without a GPU, nothing happens.

    Raises:
        ValueError: the first fault since the last call; it is then forgotten.
    """
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    torch.cuda.synchronize(device)
    _moe4.raise_faults(torch.cuda.current_device() if device.index is None else device.index)
