"""``GroupedMLP`` as a part of torch: compilation, checkpointing, autocast, state, threads, processes."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import resource
import shutil
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize
import torch.utils.checkpoint
from torch import Tensor

import moe4
from moe4 import _operator

SPLITS = torch.tensor([10, 0, 21, 7])


def layer(**options: Any) -> moe4.GroupedMLP:
    return moe4.GroupedMLP(4, 64, 32, **options)


def inputs(rows: int = 40) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 64).bfloat16(), torch.rand(rows)


def step(function: Any, m: moe4.GroupedMLP, x: Tensor, prob: Tensor, seed: int = 3) -> list[Tensor]:
    torch.manual_seed(seed)
    x, prob = x.clone().requires_grad_(), prob.clone().requires_grad_()
    m.zero_grad()
    y = function(x, SPLITS, prob)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, prob.grad, *(p.grad.clone() for p in m.parameters())]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b))


@pytest.mark.parametrize("options", [{}, {"bias": True, "recompute": True}, {"precision": "bf16"}, {"per_expert": True}])
def test_compiled_gives_the_same(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    # Nearest: the compiler draws its seeds from a generator of its own.
    m = layer(gradient_rounding="nearest", **options)
    x, prob = inputs()
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    assert same(step(m, m, x, prob), step(compiled, m, x, prob))
    x, prob = inputs(56)
    assert same(step(m, m, x, prob), step(compiled, m, x, prob)), "another number of rows"


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++")
def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    m = layer(gradient_rounding="nearest")
    x, prob = inputs()

    def around(x: Tensor, splits: Tensor, prob: Tensor) -> Tensor:
        return m(x.T.contiguous().T * 2, splits, prob.sqrt()) + 1

    results = step(around, m, x, prob), step(torch.compile(around, fullgraph=True, dynamic=True), m, x, prob)
    assert torch.equal(results[0][0], results[1][0])
    for a, b in zip(*results):
        assert torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-2 * float(a.float().abs().max()))


def test_fused_gradients_leave_the_graph() -> None:
    torch._dynamo.reset()
    m = layer(gradient_rounding="nearest", fuse_wgrad_accumulation=True)
    x, prob = inputs()
    sums = []
    for function in (m, torch.compile(m, backend="aot_eager")):
        for w in (m.w1, m.w2):
            w.main_grad = torch.zeros(w.shape)
        function(x * 2, SPLITS, prob).sum().backward()
        sums.append([m.w1.main_grad, m.w2.main_grad])
    assert same(*sums) and sums[0][0].abs().sum() > 0 and m.w1.grad is None


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"recompute": True, "bias": True}, {"per_expert": True}, {"precision": "bf16"}, {"dtype": torch.float32},
                {"precision": "bf16", "recompute": True, "dtype": torch.float32}]
)  # fmt: skip
def test_delayed_weight_gradients_are_the_same(options: dict[str, Any], fused: bool) -> None:
    batches = [(*inputs(), torch.randn(40, 64).bfloat16()) for _ in range(3)]
    state = layer(**options).state_dict()

    def train(delay: bool) -> list[Tensor]:
        torch.manual_seed(5)
        m = layer(fuse_wgrad_accumulation=fused, delay_wgrad_compute=delay, **options)
        m.load_state_dict(state)
        weights = [p for name, p in m.named_parameters() if name.startswith("w")]
        for w in weights:
            assert getattr(w, "skip_backward_post_hook", False) == delay
            if fused:
                w.main_grad, w.grad_added_to_main_grad = torch.full(w.shape, 0.5), False
        results, ran = [], []
        m.register_wgrad_accumulation_and_reduce_hooks(lambda: ran.append(1))
        for at, (x, prob, dy) in enumerate(batches):
            x, prob = x.clone().requires_grad_(), prob.clone().requires_grad_()
            m(x, SPLITS, prob).backward(dy)
            results += [x.grad, prob.grad, *(p.grad.clone() for name, p in m.named_parameters() if name[0] == "b")]
            if delay and at == 0:
                assert all(w.grad is None for w in weights) and not ran
                assert not fused or all((w.main_grad == 0.5).all() and not w.grad_added_to_main_grad for w in weights)
            if delay and at == 1:  # two are waiting: the first comes first
                m.backward_dw()
                assert all(w.grad is not None for w in weights)
        for _ in range(2):
            m.backward_dw()  # of the others; nothing if not delayed
        assert ran == [1] * (3 if delay else 0)
        if delay:
            with pytest.raises(RuntimeError, match="expected a backward before"):
                m.backward_dw()
        if fused:
            assert all(w.grad_added_to_main_grad and w.grad.abs().sum() == 0 for w in weights)
        return [*results, *((w.main_grad if fused else w.grad) for w in weights)]

    expected, got = train(False), train(True)
    assert same(expected, got) and all(t.abs().sum() > 0 for t in got[-2:])


@pytest.mark.parametrize("over", [False, True])
def test_delayed_weight_gradients_that_fail_wait_unless_a_part_was_added(over: bool) -> None:
    class Fails:
        def run(self, *_: object) -> None:
            raise torch.OutOfMemoryError

        def over(self) -> bool:
            return over

    m = layer(delay_wgrad_compute=True)
    x, prob = inputs()
    for _ in range(2):
        m(x, SPLITS, prob).sum().backward()
    handle, m._delayed[0]._handle = m._delayed[0]._handle, Fails()  # type: ignore[assignment]
    with pytest.raises(torch.OutOfMemoryError):
        m.backward_dw()
    assert len(m._delayed) == (1 if over else 2) and m.w1.grad is None
    m._delayed[0]._handle = handle
    m.backward_dw()
    assert m.w1.grad.abs().sum() > 0 and handle.over()


def test_delayed_weight_gradients_with_the_rest_of_torch() -> None:
    torch._dynamo.reset()
    m = layer(gradient_rounding="nearest", delay_wgrad_compute=True)
    x, prob = inputs()
    m.w1.grad = m.w2.grad = None

    def grads() -> list[Tensor]:
        m.backward_dw()
        found = [m.w1.grad, m.w2.grad]
        m.w1.grad = m.w2.grad = None
        return found

    m(x, SPLITS, prob).sum().backward()
    expected = grads()
    torch.compile(m, backend="aot_eager")(x, SPLITS, prob).sum().backward()
    assert same(expected, grads()), "compiled"
    torch.utils.checkpoint.checkpoint(m, x, SPLITS, prob, use_reentrant=False).sum().backward()
    assert same(expected, grads()), "checkpointed"
    m(x, SPLITS, prob).sum().backward()
    twin = copy.deepcopy(m)
    assert len(m._delayed) == 1 and not twin._delayed, "a copy has no backward behind it"
    m.w2.requires_grad_(False)
    m.backward_dw()
    assert torch.equal(m.w1.grad, expected[0]) and m.w2.grad is None, "frozen meanwhile"
    m.w1.requires_grad_(False)
    m(x.clone().requires_grad_(), SPLITS, prob).sum().backward()
    m.backward_dw()


def test_misuse_of_delayed_weight_gradients() -> None:
    x, prob = inputs()
    m = layer(precision="bf16", delay_wgrad_compute=True)
    m(x, SPLITS, prob).sum().backward()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="x was modified in place after the backward"):
        m.backward_dw()
    m = layer(delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    m(x, SPLITS, prob).sum().backward()
    with pytest.raises(ValueError, match="expected a main_grad, got none"):
        m.backward_dw()
    m.w1.main_grad = torch.zeros(m.w1.shape)
    m.w2.main_grad = torch.zeros(m.w2.shape)
    pending = m._delayed[0]
    m.backward_dw()
    assert m.w1.main_grad.abs().sum() > 0, "nothing was lost"
    with pytest.raises(RuntimeError, match="expected one run, got another"):
        pending.run(pending.targets())

    shared = torch.zeros(m.w1.shape)
    for buffers, message in (
        ([torch.zeros(m.w1.shape, device="meta"), torch.zeros(m.w2.shape)], "expected a tensor on cpu or cuda"),
        ([torch.zeros(m.w1.shape), torch.zeros(4, 32, 64)], r"dw2\[0\]: expected shape \[4, 64, 32\], got \[4, 32, 64\]"),
        ([torch.zeros(m.w1.shape), torch.zeros(m.w2.shape, dtype=torch.float64)], "expected dtype"),
        ([shared, shared.flatten()[: m.w2.numel()].view(m.w2.shape)], "share memory"),
    ):
        m.w1.main_grad, m.w2.main_grad = torch.zeros(m.w1.shape), torch.zeros(m.w2.shape)
        torch.manual_seed(3)
        m(x, SPLITS, prob).sum().backward()
        m.backward_dw()
        expected = m.w1.main_grad, m.w2.main_grad
        torch.manual_seed(3)
        m(x, SPLITS, prob).sum().backward()
        m.w1.main_grad, m.w2.main_grad = buffers
        with pytest.raises((TypeError, ValueError), match=message):
            m.backward_dw()
        assert buffers[0].is_meta or not buffers[0].any(), "nothing is written in part"
        m.w1.main_grad, m.w2.main_grad = torch.zeros(m.w1.shape), torch.zeros(m.w2.shape)
        m.backward_dw()
        assert same(list(expected), [m.w1.main_grad, m.w2.main_grad]) and not m._delayed, "the gradient was still there"

    class Twice(torch.nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    torch.nn.utils.parametrize.register_parametrization(m, "w1", Twice())
    with pytest.raises(ValueError, match="expected weights that are parameters"):
        m(x, SPLITS, prob)


def test_weight_versions_compile() -> None:
    torch._dynamo.reset()
    m = layer(gradient_rounding="nearest")
    x, prob = inputs()
    compiled = torch.compile(m, backend="aot_eager")
    for version in (0, 1, 2):
        with torch.no_grad():
            m.w1.mul_(1.5)
        assert torch.equal(compiled(x, SPLITS, prob, weight_version=version), m(x, SPLITS, prob))


def test_stochastic_rounding_compiles() -> None:
    torch._dynamo.reset()
    m = layer()
    x, prob = inputs()
    eager, compiled = step(m, m, x, prob), step(torch.compile(m, fullgraph=True, backend="aot_eager"), m, x, prob)
    assert torch.equal(eager[0], compiled[0]) and (eager[3] - compiled[3]).norm() < 0.3 * eager[3].norm()


def test_exported() -> None:
    m = layer(bias=True)
    x, prob = inputs()
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(m, (x, SPLITS, prob), dynamic_shapes=({0: rows}, None, {0: rows}))
    x, prob = inputs(72)
    with torch.no_grad():
        assert torch.equal(program.module()(x, SPLITS, prob), m(x, SPLITS, prob))
    assert any("grouped_mlp_forward" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("precision", ["nvfp4", "bf16"])
def test_operators_keep_their_promises(precision: str) -> None:
    m = layer(precision=precision, bias=True)
    x, prob = inputs()
    w1, w2 = [m.w1.detach()], [m.w2.detach()]
    torch.library.opcheck(torch.ops.moe4.quantize_weights, (w1,))
    if precision == "nvfp4":
        w1, w2 = list(_operator.quantize_weights(w1)), list(_operator.quantize_weights(w2))
    biases = m.b1.detach().float(), m.b2.detach().float()
    for recompute in (False, True):
        text = layer(precision=precision, bias=True, recompute=recompute).options.text()
        for needs in ((False, False), (True, False), (False, True), (True, True)):
            args = (x, prob, SPLITS, w1, w2, *biases, text, *needs)
            torch.library.opcheck(torch.ops.moe4.grouped_mlp_forward, args)
            if not any(needs):
                continue
            y, *saved = torch.ops.moe4.grouped_mlp_forward(*args)
            back = (y, x, prob, SPLITS, w1, w2, *biases, saved, torch.tensor([5]), text, *needs, 3, torch.bfloat16)
            torch.library.opcheck(torch.ops.moe4.grouped_mlp_backward, back)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    m = layer(bias=True)
    x, prob = inputs()

    def checkpointed(*args: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(m, *args, use_reentrant=reentrant)

    assert same(step(m, m, x, prob), step(checkpointed, m, x, prob))


def test_saved_tensors_are_seen_by_torch() -> None:
    x, prob = inputs()
    x.requires_grad_()
    sizes = {}
    for recompute in (False, True):
        packed: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            layer(recompute=recompute)(x, SPLITS, prob)
        sizes[recompute] = sum(t.nbytes for t in packed)
    bound = (40 + 15 * 4) // 16 * 16
    assert sizes[False] - sizes[True] == 32 * bound // 2 + 32 * bound // 16, "h is saved as codes and scales, or not at all"


def test_autocast() -> None:
    m = layer(dtype=torch.float32)
    x, prob = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m(x.float(), SPLITS, prob)
    assert y.dtype == torch.bfloat16 and torch.equal(y, m(x, SPLITS, prob))
    y.sum().backward()
    assert m.w1.grad is not None and m.w1.grad.dtype == torch.float32


def test_quantized_weights_are_kept_for_a_version() -> None:
    m = layer()
    x, prob = inputs()
    first = m(x, SPLITS, prob, weight_version=0)
    with torch.no_grad():
        m.w1.mul_(2)
    assert torch.equal(first, m(x, SPLITS, prob, weight_version=0)), "of version 0"
    assert not torch.equal(first, m(x, SPLITS, prob, weight_version=1))
    assert torch.equal(m(x, SPLITS, prob), m(x, SPLITS, prob, weight_version=1))


def test_other_weights_are_no_version_of_the_old_ones() -> None:
    m, other = layer(), layer()
    x, prob = inputs()

    def agree() -> bool:
        return torch.equal(m(x, SPLITS, prob, weight_version=0), m(x, SPLITS, prob))

    for change in (
        lambda: m.load_state_dict({key: 2 * value for key, value in other.state_dict().items()}),
        lambda: setattr(m, "w2", torch.nn.Parameter(m.w2.detach() * 3)),
        lambda: m.float(),
    ):
        m(x, SPLITS, prob, weight_version=0)
        change()
        assert agree()


def test_streams_share_quantized_weights_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def record_event(self) -> str:
            done.append((self.name, "records"))
            return "made"

        def wait_event(self, event: str) -> None:
            assert event == "made"
            done.append((self.name, "waits"))

    def record_stream(_: Tensor, stream: Stream) -> None:
        done.append((stream.name, "keeps"))

    monkeypatch.setattr(Tensor, "record_stream", record_stream)
    m, a, b = layer(), Stream("a"), Stream("b")

    def call(stream: Any, version: int) -> list[Tensor]:
        done.clear()
        return m._of_version(version, stream)

    first = call(a, 0)
    assert done == [("a", "records")]
    assert call(a, 0) is first and not done
    assert call(b, 0) is first and done == [("b", "waits"), *[("b", "keeps")] * 8]
    assert call(b, 1) is not first and done == [("b", "records")]
    assert call(a, 1) is not first and done[0] == ("a", "waits")


@pytest.mark.parametrize("per_expert", [False, True])
def test_state_pickle_copy(per_expert: bool) -> None:
    m, other = layer(bias=True, per_expert=per_expert), layer(bias=True, per_expert=per_expert)
    x, prob = inputs()
    expected = m(x, SPLITS, prob, weight_version=7)
    assert not torch.equal(expected, other(x, SPLITS, prob))
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    for twin in (other, copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(expected, twin(x, SPLITS, prob)) and twin._held is None
    q = moe4.quantize(x)
    assert torch.equal(pickle.loads(pickle.dumps(q)).dequantize(), q.dequantize())


def test_the_cpu_has_nothing_to_wait_for() -> None:
    moe4.synchronize("cpu")
    moe4.compile_kernels(device=torch.device("cpu"))
    with pytest.raises(ValueError, match="activation"):
        moe4.compile_kernels("nonsense", device="cpu")  # type: ignore[arg-type]


def test_threads_agree() -> None:
    m = layer()
    x, prob = inputs()
    expected = m(x, SPLITS, prob).detach()
    results: list[Tensor] = []

    def work() -> None:
        for _ in range(20):
            results.append(m(x, SPLITS, prob).detach())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 80 and all(torch.equal(expected, r) for r in results)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(expected, m(x, SPLITS, prob)), "one thread"
    finally:
        torch.set_num_threads(before)


def test_a_forked_child_works() -> None:
    m = layer()
    x, prob = inputs()
    with torch.no_grad():
        expected = m(x, SPLITS, prob)
        child = os.fork()
        if child == 0:
            torch.set_num_threads(2)
            os._exit(0 if torch.equal(expected, m(x, SPLITS, prob)) else 1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


def test_ctrl_c_ends_a_long_call() -> None:
    big = moe4.GroupedMLP(4, 1024, 1024)
    x, prob = torch.randn(8192, 1024).bfloat16(), torch.rand(8192)
    splits = [2048] * 4
    handled: list[float] = []

    def timed() -> float:
        """The end of a call with a signal on the way."""
        timer = threading.Timer(0.05, lambda: signal.raise_signal(signal.SIGINT))
        timer.start()
        try:
            big(x, splits, prob)
        finally:
            timer.join()
        return time.perf_counter()

    before = signal.signal(signal.SIGINT, lambda *_: handled.append(time.perf_counter()))
    try:
        with torch.no_grad():
            end = timed()
        # Hundreds of milliseconds; after the call it would be none.
        assert len(handled) == 1 and end - handled[0] > 0.01, "handlers run while the call does"
        # Python's own, also where the process was started to ignore the signal.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            timed()
    finally:
        signal.signal(signal.SIGINT, before)
    assert big(x, splits, prob).isfinite().all(), "and the next call works"


def test_the_interpreter_is_free_meanwhile() -> None:
    big = moe4.GroupedMLP(4, 1024, 1024)
    x, prob = torch.randn(4096, 1024).bfloat16(), torch.rand(4096)
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    with torch.no_grad():
        start = time.perf_counter()
        for _ in range(3):
            big(x, [1024] * 4, prob)
        elapsed = time.perf_counter() - start
    done.set()
    thread.join()
    assert ticks[0] > elapsed / 0.02, f"{ticks[0]} ticks in {elapsed:.2f} s"


def test_memory_and_references_stay_flat() -> None:
    m = moe4.GroupedMLP(2, 32, 32, bias=True)
    x, prob = torch.randn(8, 32).bfloat16().requires_grad_(), torch.rand(8)
    splits = torch.tensor([5, 3])

    def call() -> None:
        m(x, splits, prob).sum().backward()

    for _ in range(500):
        call()
    gc.collect()
    counts = [sys.getrefcount(o) for o in (x, prob, splits, m.w1, torch.bfloat16, torch.Tensor)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10_000):
        call()
    gc.collect()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert [sys.getrefcount(o) for o in (x, prob, splits, m.w1, torch.bfloat16, torch.Tensor)] == counts
    # A leak of one small tensor a call would be more than this; KiB.
    assert grown < 2000, f"{grown} KiB in 10,000 calls"


def test_memory_of_failures_stays_flat() -> None:
    x = torch.randn(64, 512).bfloat16()
    before = 0
    for at in range(3000):
        if at == 1000:
            gc.collect()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ValueError):
            moe4.group_quantize(x, [65])
        moe4.quantize(x)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4000
