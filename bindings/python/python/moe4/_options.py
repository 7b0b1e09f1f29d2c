"""The operator's options: checked once, then a line of text that custom operators can carry."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Optional

from . import _moe4

Activation = str
"""``swiglu``, ``srelu``, ``tanh_srelu:s=16``, ``situ_glu:beta1=4,beta2=25`` or
``clamped_qgeglu:limit=7,alpha=1.702,offset=1``; parameters left out take these values, ``s`` has none."""

GluLayout = Literal["halves", "interleaved32", "elementwise"]
Precision = Literal["nvfp4", "bf16"]
GradientRounding = Literal["nearest", "stochastic"]
DcAmax = Literal["exact", "bound", "separate"]

UNGATED = ("srelu", "tanh_srelu")


@dataclass(frozen=True)
class Options:
    """Shape and options of a grouped MLP."""

    experts: int
    hidden: int
    ffn: int
    activation: Activation = "swiglu"
    glu_layout: GluLayout = "halves"
    bias: bool = False
    precision: Precision = "nvfp4"
    recompute: bool = False
    fc1_rht: Optional[int] = 0xD7E8
    fc2_rht: Optional[int] = 0xD7E8
    gradient_rounding: GradientRounding = "stochastic"
    dc_amax: DcAmax = "exact"

    @property
    def gated(self) -> bool:
        """Whether FC1 has gate and up outputs."""
        return self.activation.split(":")[0] not in UNGATED

    @property
    def fc1_rows(self) -> int:
        """``N1``."""
        return 2 * self.ffn if self.gated else self.ffn

    def text(self) -> str:
        """All options in one line; raises ``ValueError`` for the first that is out of range."""
        items = {
            "experts": self.experts,
            "hidden": self.hidden,
            "ffn": self.ffn,
            "activation": self.activation,
            "glu_layout": self.glu_layout,
            "bias": str(self.bias).lower(),
            "precision": self.precision,
            "recompute": str(self.recompute).lower(),
            "fc1_rht": _mask("fc1_rht", self.fc1_rht),
            "fc2_rht": _mask("fc2_rht", self.fc2_rht),
            "gradient_rounding": self.gradient_rounding,
            "dc_amax": self.dc_amax,
        }
        for key, value in items.items():
            if " " in str(value) or not str(value):
                raise ValueError(f"{key}: expected text without spaces, got {value!r}")
        text = " ".join(f"{key}={value}" for key, value in items.items())
        _check(text)
        return text


def expect_mask(name: str, mask: int) -> int:
    """A sign mask of the Hadamard transform."""
    if isinstance(mask, bool) or not isinstance(mask, int):
        raise TypeError(f"{name}: expected a 16-bit sign mask, got {mask!r}")
    if not 0 <= mask < 1 << 16:
        raise ValueError(f"{name}: expected a 16-bit sign mask, 0 to 0xFFFF, got {mask}")
    return mask


def _mask(name: str, mask: Optional[int]) -> str:
    return "off" if mask is None else f"0x{expect_mask(name, mask):04X}"


@lru_cache(maxsize=4096)
def _check(text: str) -> None:
    _moe4.check_options(text)
