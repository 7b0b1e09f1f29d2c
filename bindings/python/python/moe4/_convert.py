"""Arrays of any kind as torch tensors that share their memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral
from typing import Any, Union

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

ArrayLike = Any
"""A torch tensor, a NumPy array (bfloat16 of ml_dtypes included), or anything with ``__dlpack__``."""

Splits = Union[Tensor, Sequence[int]]
"""Rows of each expert: an integer tensor ``[E]``, or numbers."""


def as_tensor(name: str, array: ArrayLike) -> Tensor:
    """``array`` as a contiguous torch tensor without gradient; memory is shared unless rows have to be gathered."""
    if isinstance(array, Tensor):
        return array.detach().contiguous()
    interface = getattr(array, "__array_interface__", None)
    if interface is not None and getattr(getattr(array, "dtype", None), "name", "") == "bfloat16":
        # NumPy itself has no bfloat16: the bits go through an integer type.
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16).contiguous()
    if hasattr(array, "__dlpack__"):
        tensor: Tensor = from_dlpack(array)
        return tensor.contiguous()
    raise TypeError(
        f"{name}: expected a torch tensor, a NumPy array or an object with __dlpack__, got {type(array).__name__}"
    )


def as_splits(splits: Splits, device: torch.device) -> Tensor:
    """Splits as int64 ``[E]``, where they are: with the other tensors on ``device``, or on the CPU. Nothing waits."""
    if not isinstance(splits, Tensor):
        if not hasattr(splits, "__dlpack__"):
            return torch.tensor(_integers(splits), dtype=torch.int64, device="cpu")
        splits = as_tensor("splits", splits)
    if splits.is_floating_point() or splits.is_complex() or splits.dtype == torch.bool:
        raise TypeError(f"splits: expected an integer dtype, got {splits.dtype}; count rows in torch.int64")
    if splits.device != device and splits.device.type != "cpu":
        raise ValueError(misplaced("splits", splits, device))
    return splits.to(torch.int64).contiguous()


def _integers(splits: Iterable[Any]) -> list[int]:
    """Numbers of rows as they are: nothing is rounded, and nothing without an order is put into one."""
    if not isinstance(splits, Iterable) or isinstance(splits, (str, Set, Mapping)):
        raise TypeError(f"splits: expected an integer tensor or a sequence of integers, got {type(splits).__name__}")
    numbers = list(splits)
    for at, number in enumerate(numbers):
        if isinstance(number, bool) or not isinstance(number, (int, Integral, torch.SymInt)):
            raise TypeError(f"splits[{at}]: expected an integer, got {number!r}")
        if isinstance(number, int) and abs(number) >= 1 << 63:
            raise ValueError(f"splits[{at}]: expected a number of rows, got {number}")
    return numbers


def misplaced(name: str, tensor: Tensor, device: torch.device) -> str:
    """What to say of a tensor that is not where ``x`` is."""
    return f"{name}: expected a tensor on {device}, as x is, got one on {tensor.device}; move it with .to('{device}')"


def expect_known_device(name: str, tensor: Tensor) -> None:
    """Tells early that something is no tensor, or on a device that there are no kernels for."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch tensor, got {type(tensor).__name__}")
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(
            f"{name}: there are kernels for cpu and cuda, got a tensor on {tensor.device}; "
            "move model and inputs with .to('cpu')"
        )
