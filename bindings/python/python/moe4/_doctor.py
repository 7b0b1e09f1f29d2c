"""What the package was built with and what runs here."""

from __future__ import annotations

import platform

import torch

from . import _moe4


def doctor() -> str:
    """A few lines on versions, kernels and threads, for reading and for reports of faults."""
    facts = _moe4.doctor()
    facts += [("torch", torch.__version__), ("python", platform.python_version())]
    return "\n".join(f"{name:<12} {value}" for name, value in facts)
