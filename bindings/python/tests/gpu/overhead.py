"""What a call costs on the host: ``python overhead.py [cpu|cuda]``.

The shapes are tiny, so that time is spent on the way and not at the destination. On a GPU calls are enqueued without
waiting, and the queue is emptied outside of the measurement.

=============  =====================================================
compiled part  ``_moe4.forward`` alone: checks, enqueuing, results
operator       through torch's dispatcher
module         ``GroupedMLP`` without gradients, weights kept
training       forward and backward, weights kept
=============  =====================================================
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

import moe4
from moe4 import _moe4, _operator


def microseconds(call: Callable[[], object], device: torch.device, calls: int = 200, rounds: int = 15) -> float:
    """The median over rounds of the mean of a call."""
    means = []
    for at in range(rounds + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if at >= 2:
            means.append((time.perf_counter() - start) / calls * 1e6)
    return sorted(means)[rounds // 2]


def main(device: torch.device) -> None:
    torch.manual_seed(1)
    m = moe4.GroupedMLP(4, 64, 32, device=device)
    x = torch.randn(16, 64, device=device).bfloat16()
    splits, prob = torch.tensor([4, 4, 4, 4], device=device), torch.rand(16, device=device)
    dy = torch.randn(16, 64, device=device).bfloat16()
    w1, w2 = (list(_operator.quantize_weights([w])) for w in (m.w1, m.w2))
    text = m.options.text()

    def training() -> None:
        m(x, splits, prob, weight_version=1).backward(dy)

    rows = {
        "compiled part": lambda: _moe4.forward(text, x, prob, splits, w1, w2, None, None, False, False),
        "operator": lambda: torch.ops.moe4.grouped_mlp_forward.default(
            x, prob, splits, w1, w2, None, None, text, False, False
        ),
        "module": lambda: m(x, splits, prob, weight_version=1),
    }
    with torch.no_grad():
        for name, call in rows.items():
            print(f"{name:<14} {microseconds(call, device):8.1f} us")
    print(f"{'training':<14} {microseconds(training, device):8.1f} us")
    moe4.synchronize()


if __name__ == "__main__":
    main(torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu"))
