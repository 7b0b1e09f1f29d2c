"""Kernels ahead of their use, in processes whose cache folder is empty."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

RECORDS = """
import logging, os, signal, threading, torch, moe4

told = []

class Handler(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())
        hook()

def hook():
    pass

log = logging.getLogger("moe4")
log.setLevel(logging.INFO)
log.addHandler(Handler())
"""

STEPS = """
moe4.compile_kernels("swiglu")
torch.cuda.synchronize()
ahead = len(told)
assert ahead > 50, ahead

def step(rows, needs=(True, True), **options):
    m = moe4.GroupedMLP(4, 64, 32, device="cuda", **options)
    if options.get("per_expert"):
        for weights in (m.w1, m.w2):
            weights[1].data = weights[1].data.clone()  # no longer at equal distances
    m.requires_grad_(needs[1])
    x = torch.randn(rows, 64, device="cuda").bfloat16().requires_grad_(needs[0])
    splits, prob = torch.tensor([rows // 4, 0, rows // 2, 0], device="cuda"), torch.rand(rows, device="cuda")
    y = m(x, splits, prob)
    if any(needs):
        y.sum().backward()
    assert told[ahead:] == [], (rows, needs, options)

for rows in (8, 40, 120, 400):
    for precision in ("nvfp4", "bf16"):
        for needs in ((True, True), (True, False), (False, True), (False, False)):
            step(rows, needs, precision=precision)
        step(rows, precision=precision, per_expert=True)
        step(rows, precision=precision, bias=True, recompute=True, dtype=torch.float32)
    for rht in (None, 0, 5):
        step(rows, fc1_rht=rht, fc2_rht=rht, gradient_rounding="nearest", recompute=True)
    for amax in ("bound", "separate"):
        step(rows, dc_amax=amax)
moe4.MoELayer(8, 64, 32, 2, device="cuda")(torch.randn(20, 64, device="cuda").bfloat16())[0].sum().backward()
moe4.synchronize()
assert told[ahead:] == []
"""

REFUSED = """
def hook():
    if len(told) == 3:
        raise RuntimeError("the disk is full")

try:
    moe4.compile_kernels("swiglu")
except RuntimeError as error:
    assert str(error) == "the disk is full", error
else:
    raise AssertionError("expected what the handler raised")
assert len(told) == 3, told
"""

INTERRUPTED = """
def hook():
    if len(told) == 1:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

try:
    moe4.compile_kernels("swiglu")
except KeyboardInterrupt:
    pass
else:
    raise AssertionError("expected an interrupt")
begun = len(told)
moe4.compile_kernels("swiglu")
assert len(told) > begun, "not all were compiled before the interrupt"
"""


@pytest.mark.parametrize("script", [STEPS, REFUSED, INTERRUPTED], ids=["steps", "refused", "interrupted"])
def test_with_an_empty_cache(script: str, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", RECORDS + script], env=environment, capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert list(tmp_path.glob("moe4/*.cubin"))
