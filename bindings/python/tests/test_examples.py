"""The examples run as they stand."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "examples"


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training() -> None:
    out = run(str(FOLDER / "train.py"), "--steps", "60")
    losses = [float(line.split("loss")[1].split()[0]) for line in out.splitlines() if line.startswith("nvfp4") and "loss" in line]
    assert losses[-1] < 0.9 * losses[0], out


def test_replacing_experts() -> None:
    pytest.importorskip("transformers")
    out = run(str(FOLDER / "replace_experts.py"))
    assert "2 layers replaced" in out and "saved model.layers.0.mlp, model.layers.1.mlp" in out


def test_expert_parallel() -> None:
    script = str(FOLDER / "expert_parallel.py")
    out = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    for rank in range(2):
        line = next(line for line in out.splitlines() if f"process {rank} of 2: 4 experts" in line)
        first, last = (float(word) for word in line.split("error ")[1].split(" to "))
        assert last < 0.6 * first, out


def test_plan() -> None:
    out = run(str(FOLDER / "plan.py"))
    assert out.count("saved:") == 3 and "amax of h" in out
