"""Memory that a call on one stream frees, of another stream."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from steps import inputs, layer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]


class Canary:
    """An attribute of a tensor, which asks when it dies whether the tensor's stream would give its memory away."""

    armed = False
    idle: list[bool] = []

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def __del__(self) -> None:
        if Canary.armed:
            event = torch.cuda.Event()
            event.record(self.stream)
            time.sleep(0.02)
            Canary.idle.append(event.query())


def test_saved_tensors_live_until_their_stream_waits_for_the_delayed_gradients() -> None:
    m = layer(delay_wgrad_compute=True)
    x, splits, prob, dy = inputs()
    made, side = torch.cuda.current_stream(), torch.cuda.Stream()

    def kept(saved: Any) -> Tensor:
        tensor: Tensor = saved
        tensor.canary = Canary(made)  # type: ignore[attr-defined]
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), kept):
        y = m(x, splits, prob)
    y.backward(dy)
    del y
    torch.cuda.synchronize()
    Canary.idle.clear()
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)  # about a second, before the products
        Canary.armed = True
        try:
            m.backward_dw()
        finally:
            Canary.armed = False
    torch.cuda.synchronize()
    assert Canary.idle, "the saved x and h are freed by the call"
    assert not any(Canary.idle), "freed before their stream waited for their readers"
