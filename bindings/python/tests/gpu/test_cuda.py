"""The package on a GPU: results of the CPU, torch's streams, memory, captures and errors.

Kernels are compiled at first use, so that all tests share a few activations and options.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from typing import Any, Optional

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import moe4
import reference
from steps import FEW_AND_MANY, SPLITS, E, F, H, T, inputs, layer, same, splits_of, step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]


# --- results


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("seed", [None, 7])
def test_quantizers_give_the_bytes_of_the_cpu(seed: Optional[int], where: str) -> None:
    x, splits = torch.randn(T, 96).bfloat16(), torch.tensor(SPLITS)
    options: dict[str, Any] = {"columnwise": True, "rounding": "nearest" if seed is None else "stochastic", "seed": seed}
    expected = moe4.group_quantize(x, splits, **options)
    got = moe4.group_quantize(x.cuda(), splits.to(where), **options)
    for e, g in zip(expected, got):
        assert e is not None and g is not None and g.codes.is_cuda
        positions = e.codes.shape[-1]
        codes, scales = g.codes.cpu(), g.scales.view(torch.uint8).cpu()
        assert where == "cuda" or codes.shape == e.codes.shape
        assert torch.equal(codes[:, :positions], e.codes) and not codes[:, positions:].any()
        assert torch.equal(scales[:, : positions // 8], e.scales.view(torch.uint8)) and not scales[:, positions // 8 :].any()
        assert torch.equal(g.amax.cpu(), e.amax)
        assert torch.equal(g.dequantize().cpu()[:, : 2 * positions], e.dequantize())
    w = torch.randn(3, 32, 48).bfloat16()
    e, g = (moe4.quantize(t, tile="16x16") for t in (w, w.cuda()))
    assert torch.equal(e.codes, g.codes.cpu()) and torch.equal(e.dequantize(), g.dequantize().cpu())


@pytest.mark.parametrize("rows", FEW_AND_MANY)
@pytest.mark.parametrize("precision", ["nvfp4", "bf16"])
@pytest.mark.parametrize(
    "options", [{}, {"activation": "srelu", "bias": True, "recompute": True}, {"per_expert": True, "dtype": torch.float32}]
)
def test_a_step_follows_the_cpu(options: dict[str, Any], precision: str, rows: int) -> None:
    m = layer(precision=precision, gradient_rounding="nearest", **options)
    twin = moe4.GroupedMLP(E, H, F, precision=precision, gradient_rounding="nearest", **options)  # type: ignore[arg-type]
    twin.load_state_dict(m.state_dict())
    x, splits, prob, dy = inputs(rows)
    got = step(m, x, splits, prob, dy)
    expected = step(twin, x.cpu(), splits.cpu(), prob.cpu(), dy.cpu())
    for g, e in zip(got, expected):
        # Sums differ in their last bits. Each side may be as far from the exact result as the CPU's tests allow; an h or dc
        # on the other side of a BF16 boundary flips a 4-bit code.
        if precision == "bf16":
            assert reference.error(g.cpu(), e) < 2 * 2**-7
        else:
            assert (g.cpu().double() - e.double()).norm() <= 0.02 * e.double().norm()
        assert g.dtype == e.dtype and g.any() == e.any()
    assert all(g.any() for g in got[:3])


@pytest.mark.parametrize("rows", FEW_AND_MANY)
def test_splits_on_either_device_and_runs_repeat(rows: int) -> None:
    m = layer()
    x, splits, prob, dy = inputs(rows)
    first = step(m, x, splits, prob, dy)
    assert same(first, step(m, x, splits, prob, dy)), "two runs"
    assert same(first, step(m, x, splits.cpu(), prob, dy)), "splits on the cpu"
    assert same(first, step(m, x, splits_of(rows), prob, dy)), "splits as numbers"
    assert same(first, step(m, x, splits.int(), prob, dy)), "int32"


@pytest.mark.parametrize("rows", FEW_AND_MANY)
@pytest.mark.parametrize("fused", [False, True])
def test_delayed_weight_gradients(fused: bool, rows: int) -> None:
    x, splits, prob, dy = inputs(rows)
    found = []
    for delay in (False, True):
        m = layer(delay_wgrad_compute=delay, fuse_wgrad_accumulation=fused)
        for w in (m.w1, m.w2):
            w.main_grad = torch.ones(w.shape, device="cuda")
        torch.manual_seed(3)
        m(x, splits, prob).backward(dy)
        side = torch.cuda.Stream()
        if delay:
            with torch.cuda.stream(side):  # and what it frees is not used again too early
                m.backward_dw()
            torch.cuda.current_stream().wait_stream(side)
        found.append([m.w1.main_grad, m.w2.main_grad] if fused else [m.w1.grad, m.w2.grad])
    assert same(*found)


def test_the_layer_with_its_router() -> None:
    torch.manual_seed(2)
    layer = moe4.MoELayer(8, H, F, 2, precision="bf16", device="cuda")
    twin = moe4.MoELayer(8, H, F, 2, precision="bf16")
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(3, 7, H).bfloat16()
    (y, aux), (expected, loss) = layer(x.cuda()), twin(x)
    assert reference.error(y.cpu(), expected) < 2**-6 and torch.allclose(aux.cpu(), loss, rtol=1e-5)
    (y.float().square().sum() + aux).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in layer.parameters())


# --- streams


def test_work_goes_to_the_current_stream() -> None:
    m = layer()
    x, splits, prob, dy = inputs()
    expected = step(m, x, splits, prob, dy)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(m, x, splits, prob, dy)  # from now on its pool has the memory
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second on the default stream, which nothing here waits for
    busy = torch.cuda.Event()
    busy.record()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late = torch.empty_like(x)
        late.copy_(x)  # behind the sleep: a kernel on another stream would read too early
        got = step(m, late, splits, prob, dy)
        done = torch.cuda.Event()
        done.record()
    done.synchronize()
    assert not busy.query(), "work waited for the default stream"
    torch.cuda.synchronize()
    assert same(expected, got)


def test_results_know_their_streams() -> None:
    m = layer()
    x, splits, prob, _ = inputs()
    y = m(x, splits, prob)
    y.record_stream(torch.cuda.Stream())  # only torch's own memory can
    with torch.no_grad():
        y = m(x, splits, prob)
    assert not y._is_view()
    assert torch.equal(y.clone().add_(1), y.add_(1))


def test_no_call_waits() -> None:
    m, moe = layer(bias=True), moe4.MoELayer(8, H, F, 2, device="cuda")
    x, splits, prob, dy = inputs()

    def once() -> None:
        m(x.detach().requires_grad_(), splits, prob).backward(dy)
        m(x, SPLITS, prob)
        y, aux = moe(x)
        (y.float().sum() + aux).backward()

    once()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        once()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert not busy.query(), "the host waited for the GPU"


def test_a_backward_on_another_thread() -> None:
    m = layer()
    x, splits, prob, dy = inputs()
    expected = step(m, x, splits, prob, dy)
    got: list[list[Tensor]] = []
    thread = threading.Thread(target=lambda: got.append(step(m, x, splits, prob, dy)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert len(got) == 1 and same(expected, got[0])


# --- captures


@pytest.mark.parametrize("rows", FEW_AND_MANY)
@pytest.mark.parametrize("precision", ["nvfp4", "bf16"])
def test_a_graph_takes_other_splits_and_inputs(precision: str, rows: int) -> None:
    m = layer(precision=precision, bias=True, gradient_rounding="nearest")
    static = [t.clone() for t in inputs(rows)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(m, *static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(m, *static, seed=None)
    for seed, other in ((1, splits_of(rows)), (8, [0, 1, 0, rows - 1]), (9, [rows, 0, 0, 0]), (10, [1, 2, 3, 4])):
        x, _, prob, dy = inputs(rows, seed)
        fresh = [x, torch.tensor(other).cuda(), prob, dy]
        for buffer, new in zip(static, fresh):
            buffer.copy_(new)
        graph.replay()
        assert same(outputs, step(m, *fresh)), other


def test_kernels_are_not_loaded_in_a_capture() -> None:
    m = layer(activation="situ_glu", glu_layout="elementwise")  # which no test before has used
    x, splits, prob, _ = inputs()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="expected a kernel that is loaded before the graph, got [a-z_]*gemm_act"):
        with torch.no_grad(), torch.cuda.graph(graph):
            m(x, splits, prob)
    with torch.no_grad():
        expected = m(x, splits, prob)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            y = m(x, splits, prob)
        graph.replay()
        assert torch.equal(expected, y)


def test_a_graph_draws_other_random_numbers_in_each_replay() -> None:
    m = layer()
    static = inputs()
    eager = step(m, *static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(m, *static, seed=None)
    replays = []
    for _ in range(3):
        graph.replay()
        replays.append([t.clone() for t in outputs])
    for name, *values in zip(("y", "dx", "dprob"), eager, *replays):
        apart = [not torch.equal(a, b) for at, a in enumerate(values) for b in values[:at]]
        # `dprob` takes no product of a rounded gradient but that of `dy`.
        assert not any(apart) if name == "y" else all(apart), name
    mean = sum(r[1].double() for r in replays) / len(replays)
    assert (mean - eager[1].double()).norm() < 0.3 * mean.norm(), "they are roundings of the same gradient"


@pytest.mark.parametrize("rows", FEW_AND_MANY)
def test_graphed_callables(rows: int) -> None:
    m, plain = layer(gradient_rounding="nearest"), layer(gradient_rounding="nearest")
    x, splits, prob, dy = inputs(rows)
    sample = (x.clone().requires_grad_(), splits.clone(), prob.clone().requires_grad_())
    graphed = torch.cuda.make_graphed_callables(m, sample)
    for seed in (4, 5):
        x, _, prob, dy = inputs(rows, seed)
        assert same(step(graphed, x, splits, prob, dy), step(plain, x, splits, prob, dy))


# --- memory


def test_memory_stays_flat() -> None:
    m = layer(bias=True)
    x, splits, prob, dy = inputs()
    x.requires_grad_()

    def call() -> None:
        m.zero_grad()
        x.grad = None
        m(x, splits, prob).backward(dy)

    def used() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    for _ in range(100):
        call()
    before = used()
    for _ in range(10_000):
        call()
    assert used() == before


def test_results_count_in_torchs_statistics() -> None:
    m = layer()
    x, splits, prob, _ = inputs(4000)
    with torch.no_grad():
        m(x, splits, prob)
        before = torch.cuda.memory_allocated()
        y = m(x, splits, prob)
    assert 0 <= torch.cuda.memory_allocated() - before - y.nbytes < 1 << 20


def test_too_little_memory_is_torchs_error() -> None:
    m = layer()
    x, splits, prob, _ = inputs(1 << 18)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            m(x, splits, prob)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert m(x, splits, prob).shape == x.shape, "and the next call works"


# --- errors


def test_splits_that_do_not_fit_are_told_later() -> None:
    m = layer()
    x, _, prob, _ = inputs()
    wrong = torch.tensor([50, 0, 0, 0]).cuda()
    with torch.no_grad():
        assert not m(x, wrong, prob).any()
    with pytest.raises(ValueError, match=r"splits\[0\]: expected 0 to the rows"):
        moe4.synchronize()
    moe4.synchronize()  # told once
    with torch.no_grad():
        m(x, wrong, prob)
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match="an earlier call"):
            m(x, SPLITS, prob)
        m(x, SPLITS, prob)
    with pytest.raises(ValueError, match="expected a sum of at most 40"):
        m(x, [50, 0, 0, 0], prob)


def test_tensors_on_another_device_are_named() -> None:
    m = layer()
    x, splits, prob, _ = inputs()
    with pytest.raises(ValueError, match=r"w1\[0\]: expected a tensor on cpu, as x is, got one on cuda:0; move it with"):
        m(x.cpu(), splits.cpu(), prob.cpu())
    with pytest.raises(ValueError, match="prob: expected a tensor on cuda:0, as x is, got one on cpu; move it with"):
        m(x, splits, prob.cpu())
    with pytest.raises(ValueError, match="splits: expected a tensor on cpu, as x is, got one on cuda:0"):
        moe4.group_quantize(x.cpu(), splits)
    with pytest.raises(ValueError, match="amax: expected a tensor on cuda:0, as x is, got one on cpu"):
        moe4.group_quantize(x, splits, amax=torch.ones(E))


def test_a_forked_child_is_told() -> None:
    m = layer()
    x, splits, prob, _ = inputs()
    with torch.no_grad():
        m(x, splits, prob)
        torch.cuda.synchronize()
        child = os.fork()
        if child == 0:
            try:
                m(x, splits, prob)
                os._exit(1)
            except RuntimeError as error:
                os._exit(0 if "spawn" in str(error) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_kernels_ahead_of_their_use(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "moe4"):
        moe4.compile_kernels("swiglu", device=0)  # again: nothing to do
        for rows in FEW_AND_MANY:  # see test_kernels.py, with nothing in the cache
            step(layer(), *inputs(rows))
    assert not caplog.records
    with pytest.raises(ValueError, match="unknown activation 'gelu'"):
        moe4.compile_kernels("gelu")
    with pytest.raises(ValueError, match="expected halves, interleaved32 or elementwise, got 'thirds'"):
        moe4.compile_kernels(glu_layout="thirds")  # type: ignore[arg-type]


def test_doctor_tells_of_the_gpu() -> None:
    text = moe4.doctor()
    assert "cuda:0" in text and torch.cuda.get_device_name(0) in text and "NVRTC" in text, text


# --- the rest of torch


def test_compiled_checkpointed_autocast() -> None:
    torch._dynamo.reset()
    m = layer(gradient_rounding="nearest")
    x, splits, prob, dy = inputs()
    expected = step(m, x, splits, prob, dy)

    class Called(torch.nn.Module):
        def __init__(self, call: Any) -> None:
            super().__init__()
            self.call = call

        def parameters(self, recurse: bool = True) -> Any:
            return m.parameters()

        def forward(self, *args: Any) -> Any:
            return self.call(*args)

    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    assert same(expected, step(Called(compiled), x, splits, prob, dy))
    checkpointed = Called(lambda *a: torch.utils.checkpoint.checkpoint(m, *a, use_reentrant=False))
    assert same(expected, step(checkpointed, x, splits, prob, dy))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(m(x.float(), splits, prob), expected[0])


def test_weights_are_quantized_once_for_a_version() -> None:
    m = layer()
    x, splits, prob, _ = inputs()
    first = m(x, splits, prob, weight_version=0)
    with torch.no_grad():
        m.w1.mul_(2)
    assert torch.equal(first, m(x, splits, prob, weight_version=0))
    assert torch.equal(m(x, splits, prob), m(x, splits, prob, weight_version=1))
    moved = moe4.GroupedMLP(E, H, F).to("cuda")
    moved.load_state_dict(m.state_dict())
    assert torch.equal(m(x, splits, prob), moved(x, splits, prob))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu() -> None:
    m = layer()
    x, splits, prob, dy = inputs()
    expected = step(m, x, splits, prob, dy)
    other = moe4.GroupedMLP(E, H, F, device="cuda:1")
    other.load_state_dict(m.state_dict())
    got = step(other, *(t.to("cuda:1") for t in (x, splits, prob, dy)))
    assert torch.cuda.current_device() == 0 and all(t.device.index == 1 for t in got)
    assert same(expected, [t.to("cuda:0") for t in got])
    with pytest.raises(ValueError, match="expected a tensor on cuda:1, as x is, got one on cuda:0"):
        m(x.to("cuda:1"), splits, prob)
