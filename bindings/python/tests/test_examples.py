"""The examples run as they stand."""

from __future__ import annotations

import csv
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
    assert "process 0 of 2: 4 experts" in out and "process 1 of 2: 4 experts" in out


def test_plan() -> None:
    out = run(str(FOLDER / "plan.py"))
    assert out.count("saved:") == 3 and "amax of h" in out


def test_language_model(tmp_path: pathlib.Path) -> None:
    sizes = {"steps": 4, "batch": 2, "context": 32, "hidden": 32, "ffn": 32, "experts": 2, "layers": 1, "out": tmp_path}
    run(str(FOLDER / "language_model.py"), *(word for k, v in sizes.items() for word in (f"--{k}", str(v))))
    with open(tmp_path / "losses.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    first = {row["kind"]: float(row["loss"]) for row in rows if row["step"] == "0"}
    assert len(rows) == 12 and set(first) == {"bf16", "nvfp4", "emulated"}
    # Before any update the kinds differ by their rounding alone.
    assert max(first.values()) - min(first.values()) < 0.01 * first["bf16"]
    assert (tmp_path / "losses.svg").read_text().count("<polyline") == 3
