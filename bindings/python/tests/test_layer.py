"""``MoELayer``: routing on one process, and experts spread over several."""

from __future__ import annotations

import os
import pathlib
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import moe4
import reference
from moe4._routing import by_expert, inverse

EXPERTS, H, F, TOP_K = 8, 64, 32, 2


def test_it_is_the_sum_over_the_chosen_experts() -> None:
    layer = moe4.MoELayer(EXPERTS, H, F, TOP_K, precision="bf16")
    x = torch.randn(3, 7, H).bfloat16()
    y, aux = layer(x)
    tokens = x.view(-1, H)
    p = (tokens.float() @ layer.router.T).softmax(-1)
    best = p.topk(TOP_K)
    share = torch.zeros(EXPERTS)
    for t in range(21):
        total = torch.zeros(H)
        chosen = best.values[t] / best.values[t].sum()
        for e, weight in zip(best.indices[t].tolist(), chosen):
            share[e] += 1 / (21 * TOP_K)
            splits = [int(i == e) for i in range(EXPERTS)]
            total += layer.experts(tokens[t : t + 1], splits, weight.view(1))[0].float()
        assert torch.allclose(y.view(-1, H)[t].float(), total, rtol=2**-8, atol=1e-6)
    assert y.shape == x.shape and y.dtype == torch.bfloat16
    assert torch.allclose(aux, EXPERTS * (share * p.mean(0)).sum(), rtol=1e-5)


def test_delayed_weight_gradients() -> None:
    x, found = torch.randn(20, H).bfloat16(), []
    for delay in (False, True):
        torch.manual_seed(2)
        layer = moe4.MoELayer(EXPERTS, H, F, TOP_K, delay_wgrad_compute=delay)
        y, aux = layer(x)
        (y.float().square().sum() + aux).backward()
        assert (layer.experts.w1.grad is None) == delay and layer.router.grad is not None
        layer.backward_dw()
        found.append([p.grad for p in layer.parameters()])
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(*found))


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_follow_the_reference(normalize: bool) -> None:
    layer = moe4.MoELayer(EXPERTS, H, F, TOP_K, normalize=normalize, precision="bf16", dtype=torch.float32)
    with torch.no_grad():
        for w in (layer.experts.w1, layer.experts.w2):
            w.copy_(w.bfloat16())
    x, dy = torch.randn(20, H).bfloat16().requires_grad_(), torch.randn(20, H)
    y, aux = layer(x)
    ((y.float() * dy).sum() + aux).backward()

    leaves = [t.detach().double().requires_grad_() for t in (x, layer.router, layer.experts.w1, layer.experts.w2)]
    xd, router, w1, w2 = leaves
    p = (xd @ router.T).softmax(-1)
    chosen = (x.detach().float() @ layer.router.T).topk(TOP_K).indices
    prob = p.gather(1, chosen)
    prob = prob / prob.sum(-1, keepdim=True) if normalize else prob
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=EXPERTS)
    rows, weights = xd[order // TOP_K], prob.flatten()[order]
    out = reference.grouped_mlp(rows, counts.tolist(), weights, w1, w2, None, None, "swiglu", "halves")
    sums = torch.zeros(20, H, dtype=torch.float64).index_add(0, order // TOP_K, out)
    share = counts / counts.sum()
    ((sums * dy).sum() + EXPERTS * (share * p.mean(0)).sum()).backward()
    assert reference.error(y, sums) < 2**-7
    for ours, theirs in zip((x, layer.router, layer.experts.w1, layer.experts.w2), leaves):
        assert (ours.grad.double() - theirs.grad).norm() < 0.01 * theirs.grad.norm()


@pytest.mark.usefixtures("device")
def test_rows_sorted_by_expert() -> None:
    chosen = torch.randint(0, 6, (50,))
    chosen[chosen == 3] = 5  # an expert without rows, and 5 for none
    order, splits = by_expert(chosen, 5)
    assert torch.equal(order, torch.argsort(chosen, stable=True))
    assert splits.tolist() == [int((chosen == e).sum()) for e in range(5)] and splits[3] == 0
    assert torch.equal(chosen[order][inverse(order)], chosen)
    order, splits = by_expert(chosen[:0], 5)
    assert len(order) == 0 and splits.tolist() == [0] * 5


def test_misuse_is_named() -> None:
    with pytest.raises(ValueError, match=r"top_k: expected 1 to 8 \(num_experts\), got 9"):
        moe4.MoELayer(EXPERTS, H, F, 9)
    with pytest.raises(ValueError, match="top_k: expected 1 to 8"):
        moe4.MoELayer(EXPERTS, H, F, 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"x: expected \[..., {H}\], got shape \[3, 5\]"):
        build()(torch.zeros(3, 5))
    with pytest.raises(TypeError, match="x: expected a torch tensor, got NoneType"):
        build()(None)  # type: ignore[arg-type]


def build(group: Any = None) -> moe4.MoELayer:
    return moe4.MoELayer(EXPERTS, H, F, TOP_K, process_group=group)


def train(layer: moe4.MoELayer, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(11)  # seeds of stochastic rounding, the same on every process
    x = x.clone().requires_grad_()
    y, aux = layer(x)
    (y.float() * dy).sum().backward()
    experts = layer.experts
    return {"y": y, "aux": aux, "dx": x.grad, "router": layer.router.grad, "w1": experts.w1.grad, "w2": experts.w2.grad}


def problem() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    torch.manual_seed(5)
    state = build().state_dict()
    return state, torch.randn(48, H).bfloat16(), torch.randn(48, H)


def one_of_several(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    state, x, dy = problem()
    layer = build(dist.group.WORLD)
    own = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    layer.load_state_dict({k: v[own] if k.startswith("experts.") else v for k, v in state.items()})
    # Processes may have different numbers of tokens, the last one none.
    cut = [0, 29, 48] if world == 2 else [0, 17, 20, 48, 48]
    mine = slice(cut[rank], cut[rank + 1])
    torch.save(train(layer, x[mine], dy[mine]), f"{folder}/{rank}.pt")
    with pytest.raises(ValueError, match="num_experts: expected a multiple of the"):
        moe4.MoELayer(EXPERTS + 1, H, F, TOP_K, process_group=dist.group.WORLD)
    # Neither the layer nor the graph of an output keeps the group, whose threads must not outlive the interpreter.
    output, kept = layer(x), weakref.ref(dist.group.WORLD)
    assert layer.process_group is kept()
    dist.destroy_process_group()
    assert kept() is None and output[0].grad_fn is not None
    with pytest.raises(RuntimeError, match="expected a process group, got one that was destroyed"):
        layer(x)


@pytest.mark.parametrize("world", [2, 4])
def test_several_processes_give_the_result_of_one(world: int, tmp_path: pathlib.Path) -> None:
    state, x, dy = problem()
    layer = build()
    layer.load_state_dict(state)
    one = train(layer, x, dy)
    mp.spawn(one_of_several, args=(world, os.fspath(tmp_path)), nprocs=world)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]
    for key in ("y", "dx", "w1", "w2"):  # an expert sees the same rows in the same order
        assert torch.equal(torch.cat([part[key] for part in parts]), one[key]), key
    # A sum over processes is not taken in the order of a sum over tokens.
    router = torch.stack([part["router"] for part in parts]).sum(0)
    assert torch.allclose(router, one["router"], rtol=1e-4, atol=1e-5 * float(one["router"].abs().max()))
    cut = [29, 19] if world == 2 else [17, 3, 28, 0]
    aux = sum(n * part["aux"] for n, part in zip(cut, parts)) / 48
    assert torch.allclose(aux, one["aux"], rtol=1e-5), "each process's loss is the mean over its own tokens"
