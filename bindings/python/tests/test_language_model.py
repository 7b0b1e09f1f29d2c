"""``examples/language_model.py``: every variant learns, and NVFP4 emulated by PyTorch is that of the package."""

from __future__ import annotations

import csv
import importlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import moe4

FOLDER = pathlib.Path(__file__).parent.parent / "examples"
VARIANTS = ["bf16", "bf16-moe4", "nvfp4-moe4", "nvfp4-emulated"]
EXPERTS, H, F, SPLITS = 4, 96, 64, [37, 0, 17, 66]


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """One thread, here and below: with several a busy machine takes ten times as long for so little work."""
    monkeypatch.syspath_prepend(str(FOLDER))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module("emulation")
    torch.set_num_threads(threads)


def start(out: pathlib.Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(FOLDER / "language_model.py"), "--device", "cpu", "--out", str(out), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def rows(out: pathlib.Path) -> dict[str, list[dict[str, str]]]:
    with (out / "metrics.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    return {variant: [row for row in found if row["variant"] == variant] for variant in VARIANTS}


def test_every_variant_learns_the_same_text(tmp_path: pathlib.Path) -> None:
    out, again = tmp_path / "all", tmp_path / "again"
    both = start(out, "--steps", "6", "--every", "3"), start(again, "--steps", "6", "--variants", "nvfp4-moe4")
    texts = []
    for process in both:
        stdout, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
        texts.append(stdout)

    found, losses, held = rows(out), {}, {}
    for variant in VARIANTS:
        assert [row["step"] for row in found[variant]] == [str(step) for step in range(1, 7)], variant
        assert [row["step"] for row in found[variant] if row["validation_loss"]] == ["3", "6"], variant
        assert all(float(row["ms_per_step"]) > 0 and not row["peak_memory_gib"] for row in found[variant])
        losses[variant] = [float(row["train_loss"]) for row in found[variant]]
        held[variant] = float(found[variant][-1]["validation_loss"])
        assert losses[variant][-1] < 0.8 * losses[variant][0], losses[variant]
        assert f"{variant:<15}     6 {held[variant]:10.4f}" in texts[0]
    # The same weights see the same bytes: before the first update only rounding differs.
    first = [losses[variant][0] for variant in VARIANTS]
    assert max(first) - min(first) < 0.002 and losses["nvfp4-moe4"] != losses["bf16-moe4"]
    assert abs(held["bf16-moe4"] - held["bf16"]) < 0.01
    assert abs(held["nvfp4-moe4"] - held["nvfp4-emulated"]) < 0.05
    # And neither the other variants nor when one looks at the losses changes them.
    assert [row["train_loss"] for row in rows(again)["nvfp4-moe4"]] == [f"{x:.6g}" for x in losses["nvfp4-moe4"]]
    drawing = (out / "curves.svg").read_text()
    assert drawing.count("<polyline") == 8 and drawing.count("<circle") == 8


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_what_was_measured_before_an_interrupt_is_written(tmp_path: pathlib.Path) -> None:
    process = start(tmp_path, "--steps", "100000", "--every", "2", "--variants", "bf16-moe4", "nvfp4-moe4")
    assert process.stdout is not None
    process.stdout.readline()  # the sizes
    assert "step    2/100000" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    found = rows(tmp_path)["bf16-moe4"]
    assert len(found) >= 2 and [int(row["step"]) for row in found] == list(range(1, len(found) + 1))
    assert found[-1]["validation_loss"] and f"{len(found):5} " in stdout.splitlines()[-1]
    assert (tmp_path / "curves.svg").exists()


def test_copies_of_the_emulation_have_the_values_of_the_package(emulation: Any) -> None:
    splits, x = torch.tensor(SPLITS), torch.randn(sum(SPLITS), H).bfloat16()
    groups = emulation.Groups.of(splits, len(x))
    by_row, by_column = moe4.group_quantize(x, splits, rowwise=True, columnwise=True)
    assert torch.equal(emulation.row(x, groups), moe4.dequantize(by_row, torch.bfloat16))
    tokens = moe4.dequantize(by_column, torch.bfloat16).t()
    column = emulation.column(x, groups)
    assert not column[len(tokens) :].any()
    # The matrix product of the RHT may round to the other neighbour.
    assert (column[: len(tokens)] != tokens).float().mean() < 0.01
    w = torch.randn(EXPERTS, F, H).bfloat16()
    assert torch.equal(emulation.tile(w), moe4.dequantize(moe4.quantize(w, tile="16x16"), torch.bfloat16))


def test_stochastic_rounding_of_the_emulation_is_right_on_average(emulation: Any) -> None:
    x = torch.linspace(-6, 6, 16).repeat(4096, 1).view(1, 1, -1, 16)
    rounded = emulation.nvfp4(x, (3,), torch.full((1, 1, 1, 1), 6.0), stochastic=True)
    assert set(rounded.abs().unique().tolist()) <= {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}
    # Of 4096 samples, each at most 1 from its mean: 5 standard deviations.
    assert (rounded.float().mean(2) - x[0, 0, 0]).abs().max() < 5 / 64


def test_results_of_the_emulation_are_as_far_from_bf16_as_those_of_the_package(emulation: Any) -> None:
    fused = moe4.GroupedMLP(EXPERTS, H, F, dtype=torch.float32)
    splits, prob = torch.tensor(SPLITS), torch.rand(sum(SPLITS))
    x, dy = torch.randn(sum(SPLITS), H).bfloat16().requires_grad_(), torch.randn(sum(SPLITS), H).bfloat16()

    def results(experts: Callable[..., Tensor]) -> list[Tensor]:
        leaves = (x, fused.w1, fused.w2)
        y = experts(x, splits, prob)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    def distance(a: Tensor, b: Tensor) -> float:
        return float((a.float() - b.float()).norm() / b.float().norm())

    def mean(experts: Callable[..., Tensor]) -> list[Tensor]:
        """Of many draws: what is left are errors of rounding to nearest, which both have alike."""
        return [torch.stack(draws).float().mean(0) for draws in zip(*(results(experts) for _ in range(16)))]

    bf16 = results(emulation.UnfusedExperts(fused, emulation.bf16_product))
    emulated, ours = emulation.UnfusedExperts(fused, emulation.emulated_product), fused
    for name, plain, one, other in zip(["y", "dx", "dw1", "dw2"], bf16, results(emulated), results(ours)):
        assert 0.8 < distance(other, plain) / distance(one, plain) < 1.25, name
    for name, plain, one, other in zip(["y", "dx", "dw1", "dw2"], bf16, mean(emulated), mean(ours)):
        assert distance(one, other) < 0.5 * distance(one, plain), name
