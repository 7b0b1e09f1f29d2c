"""Experts over several processes: a shared expert beside the exchange of rows, failures, and the benchmark.

That the results are those of one process is in test_layer.py.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import moe4
from moe4._collectives import Exchange

EXPERTS, H, F, TOP_K = 4, 32, 32, 2
BENCH = pathlib.Path(__file__).parents[3] / "bench"
TIMEOUT = 4.0
"""Seconds that a collective waits in the tests of failures."""


def connect(rank: int, folder: str, timeout: float = 60) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=timeout),
    )


def build(group: Optional[dist.ProcessGroup], shared: Optional[nn.Module] = None) -> moe4.MoELayer:
    torch.manual_seed(3)
    return moe4.MoELayer(EXPERTS, H, F, TOP_K, process_group=group, shared=shared)


class Shared(nn.Module):
    """An expert for every token, which writes down when it runs."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.linear, self.events = nn.Linear(H, H, dtype=torch.bfloat16), events

    def forward(self, x: Tensor) -> Tensor:
        self.events.append("shared")
        out: Tensor = self.linear(x)
        if out.requires_grad:
            out.register_hook(lambda _: self.events.append("shared"))
        return out


def step(layer: moe4.MoELayer, apart: Optional[nn.Module], x: Tensor, dy: Tensor, events: list[str]) -> list[Tensor]:
    """Outputs and all gradients; the gradients of the shared expert last, whether it is the layer's or apart."""
    torch.manual_seed(11)
    x = x.clone().requires_grad_()
    y, aux = layer(x)
    if apart is not None:
        y = y + apart(x)
    events.append("backward")
    leaves = [x, *layer.parameters(), *(apart.parameters() if apart is not None else ())]
    return [y, aux, *torch.autograd.grad([y, aux], leaves, [dy, torch.ones(())])]


def shared_inside_is_shared_apart(group: Optional[dist.ProcessGroup], tokens: int, events: list[str]) -> None:
    """Leaves in ``events`` those of the layer that has the shared expert inside."""
    torch.manual_seed(7)
    shared = Shared(events)
    x, dy = (torch.randn(3, tokens, H).bfloat16() for _ in range(2))
    apart = step(build(group), shared, x, dy, events)
    events.clear()
    inside = step(build(group, shared), None, x, dy, events)
    assert len(inside) == len(apart) == 8
    for i, (a, b) in enumerate(zip(inside, apart)):
        assert torch.equal(a, b) and a.abs().sum() > 0, i


def test_a_shared_expert_is_added() -> None:
    events: list[str] = []
    shared_inside_is_shared_apart(None, 7, events)
    assert events == ["shared", "backward", "shared"]


def test_a_shared_expert_of_another_shape_is_refused() -> None:
    layer = build(None, nn.Linear(H, 2 * H, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"shared: expected an output of the shape \[5, 32\] of x, got \[5, 64\]"):
        layer(torch.randn(5, H).bfloat16())


def one_of_two(rank: int, folder: str) -> None:
    connect(rank, folder)
    events: list[str] = []
    start, wait = Exchange.start, Exchange.wait

    def start_and_tell(self: Exchange, x: Tensor, *, backward: bool) -> None:
        events.append("start")
        start(self, x, backward=backward)

    def wait_and_tell(self: Exchange) -> Tensor:
        events.append("wait")
        return wait(self)

    Exchange.start, Exchange.wait = start_and_tell, wait_and_tell  # type: ignore[method-assign]
    shared_inside_is_shared_apart(dist.group.WORLD, 7 + rank, events)
    (pathlib.Path(folder) / f"{rank}.json").write_text(json.dumps(events))
    dist.destroy_process_group()


def test_a_shared_expert_runs_while_rows_are_on_their_way(tmp_path: pathlib.Path) -> None:
    mp.spawn(one_of_two, args=(os.fspath(tmp_path),), nprocs=2)
    there, home = ["start", "start", "shared", "wait", "wait"], ["start", "wait"]
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [*there, *home, "backward", *home, *there]


def survive_or_fail(rank: int, folder: str, how: str, backward: bool) -> None:
    """Process 1 fails where the rows, or the gradients of the outputs, are to be sent; process 0 tells its error."""
    connect(rank, folder, TIMEOUT)
    layer, start = build(dist.group.WORLD), Exchange.start

    def start_or_fail(self: Exchange, x: Tensor, *, backward: bool) -> None:
        if backward == fail_in_backward:
            if how == "hangs":
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL)
        start(self, x, backward=backward)

    fail_in_backward = backward
    if rank == 1:
        Exchange.start = start_or_fail  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        y, aux = layer(torch.randn(9, H).bfloat16().requires_grad_())
        (y.float().square().sum() + aux).backward()
    except dist.DistBackendError as error:
        found = {"message": str(error), "cause": str(error.__cause__), "seconds": time.monotonic() - began}
        (pathlib.Path(folder) / "error.json").write_text(json.dumps(found))
        raise SystemExit(3) from error


@pytest.mark.parametrize(("how", "backward"), [("is killed", False), ("is killed", True), ("hangs", True)])
def test_a_process_that_fails_ends_the_other(how: str, backward: bool, tmp_path: pathlib.Path) -> None:
    context = mp.get_context("spawn")
    both: list[Any] = [
        context.Process(target=survive_or_fail, args=(rank, os.fspath(tmp_path), how, backward)) for rank in range(2)
    ]
    for process in both:
        process.start()
    try:
        both[0].join(120)
        # Now and then a thread of gloo aborts an interpreter that ends right after a failure; the error is out by then.
        assert both[0].exitcode in (3, -signal.SIGABRT), "the other process ends by itself, with an error"
    finally:
        for process in both:
            process.kill()
    found = json.loads((tmp_path / "error.json").read_text())
    what = "the outputs' gradients to the experts (backward)" if backward else "the rows to the experts (forward)"
    expected = f"MoELayer: all-to-all of {what}: expected all 2 processes of group 'default_pg' (gloo) to take part, got "
    assert found["message"].startswith(f"{expected}on rank 0: {found['cause']}. Look for the process that"), found
    assert found["seconds"] < TIMEOUT + 10, found
    assert how == "is killed" or found["seconds"] > TIMEOUT / 2, "it hangs, so the wait has to end"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the benchmark reads TOML with the standard library")
def test_the_benchmark_runs(tmp_path: pathlib.Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--device", "cpu", "--shape", "cpu-small", "--scale", "8", "--runs", "2", "--machine", "here"]
    command = [sys.executable, *launch, os.fspath(BENCH / "expert_parallel.py"), *options, "--record", os.fspath(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("here/*-expert-parallel.json")
    record = json.loads(path.read_text())
    assert record["processes"] == 2 and record["machine"]["backend"] == "gloo" and record["moe4"] == moe4.__version__
    (shape,) = record["shapes"]
    assert sum(shape["rows_received"]) == shape["rows"] == 2048 // 8 and shape["hidden"] == 512 // 8
    assert 0 <= shape["checks"]["router_distance"] <= shape["checks"]["router_tolerance"]
    steps = ["step moe4", "step torch bf16", "step moe4, local", "step with shared, after", "step with shared, beside"]
    times = {row["name"]: row["median_ms"] for row in shape["times"]}
    assert set(times) == {*steps, "experts", "collectives", "dispatch", "shared"} and min(times.values()) > 0
    assert set(times) <= {line[2:28].strip() for line in done.stdout.splitlines()}, "the table has them all"
    derived = {"communication_share", "communication_share_by_difference", "bytes_sent", "collectives_gb_s", "hidden_ms"}
    assert set(shape["derived"]) == derived | {"hidden_share", "torch_bf16_over_moe4"}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the benchmark reads TOML with the standard library")
def test_the_benchmark_finds_wrong_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        import expert_parallel_layers as layers

        shape = layers.common.Shape("tiny", EXPERTS, TOP_K, 80, H, F, "swiglu", [])
        problem = layers.Problem(shape, "cpu")

        def wrong() -> set[str]:
            return {line.split(":")[0].split(" of expert")[0] for line in layers.check_answers(problem)[0]}

        assert wrong() == set() and layers.check_torch(problem) == []
        problem.x = problem.all_x.clone()
        problem.x[3, 0] += 0.5  # a token that this process alone sees otherwise
        assert wrong() >= {"rows, nearest, rowwise codes", "y", "dx", "dw1", "gradient of the router"}
        problem.x, problem.dy = problem.all_x, -problem.all_dy
        found = wrong()
        assert found >= {"dy, stochastic, columnwise codes", "dx", "dw2"}
        assert not found & {"y", "rows, nearest, rowwise codes", "codes of w1"}
    finally:
        dist.destroy_process_group()
