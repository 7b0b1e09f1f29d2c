"""Quantized weights that are kept: over streams and captures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import moe4
from steps import inputs, layer, same

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]


def grads(m: moe4.GroupedMLP, x: Tensor, splits: Tensor, prob: Tensor, dy: Tensor, version: int | None) -> list[Tensor]:
    """A forward and a backward: ``y``, ``dx`` and the gradients of the weights."""
    x = x.detach().requires_grad_()
    y = m(x, splits, prob, weight_version=version)
    return [y.detach(), *torch.autograd.grad(y, [x, *m.parameters()], dy)]


def test_a_graph_follows_the_weights_whatever_their_version() -> None:
    m = layer(gradient_rounding="nearest")
    static = inputs()
    grads(m, *static, version=1)
    held = m._held
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = grads(m, *static, version=1)
    assert m._held is held, "what is held is as it was"
    graph.replay()
    assert same(outputs, grads(m, *static, version=None))
    with torch.no_grad():
        m.w1.mul_(2)  # an optimizer's step
    grads(m, *static, version=2)  # frees what version 1 was quantized to
    filled = [torch.full((1 << 16,), 0x5A, dtype=torch.uint8, device="cuda") for _ in range(64)]
    graph.replay()
    assert same(outputs, grads(m, *static, version=None)), "after a step"
    assert all((t == 0x5A).all() for t in filled)


def test_a_capture_keeps_nothing_for_calls_outside() -> None:
    m = layer(gradient_rounding="nearest")
    static = inputs()
    grads(m, *static, version=None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads(m, *static, version=1)
    assert m._held is None
    # The graph was never replayed: its memory holds nothing.
    assert same(grads(m, *static, version=1), grads(m, *static, version=None))


def test_another_stream_waits_for_quantized_weights() -> None:
    m = layer(gradient_rounding="nearest")
    static = inputs()
    expected = grads(m, *static, version=None)
    with torch.no_grad():
        last = [w.clone() for w in m.parameters()]
        for w in m.parameters():
            w.zero_()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:
        with torch.cuda.stream(stream):  # from now on its pool has the memory, and what is there is not the codes
            grads(m, *static, version=None)
            grads(m, *static, version=0)
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(500_000_000)
        with torch.no_grad():
            for w, value in zip(m.parameters(), last):
                w.copy_(value)
        m(*static[:3], weight_version=1)
    with torch.cuda.stream(streams[1]):
        got = grads(m, *static, version=1)
    m._held = None  # freed while the second stream reads it: not to be given away before
    with torch.cuda.stream(streams[0]):
        filled = [torch.full((1 << 16,), 0x5A, dtype=torch.uint8, device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    assert same(expected, got)
    del filled


def test_weights_that_move_are_quantized_there() -> None:
    m = layer(gradient_rounding="nearest").cpu()
    x, splits, prob, _ = inputs()
    m(x.cpu(), splits.cpu(), prob.cpu(), weight_version=1)
    m.cuda()
    assert torch.equal(m(x, splits, prob, weight_version=1), m(x, splits, prob))
