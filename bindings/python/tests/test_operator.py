"""The operator against an autograd reference, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import moe4
import reference

SPLITS = [10, 0, 21, 7]
T, H, F = 40, 64, 32


def problem(activation: str = "swiglu", bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    n1 = F if "srelu" in activation else 2 * F
    new = lambda *shape: torch.randn(*shape).to(dtype)  # noqa: E731
    return {
        "x": torch.randn(T, H).bfloat16(),
        "prob": torch.rand(T) + 0.1,
        "w1": new(4, n1, H) * 0.2,
        "w2": new(4, H, F) * 0.2,
        "b1": torch.randn(4, n1) * 0.3 if bias else None,
        "b2": torch.randn(4, H) * 0.3 if bias else None,
    }


def leaves(p: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    copy = lambda t: t.detach().clone().to(dtype or t.dtype).requires_grad_()  # noqa: E731
    return {key: None if t is None else copy(t) for key, t in p.items()}


def run(p: dict[str, Any], dy: Tensor, **options: Any) -> dict[str, Tensor]:
    leaf = leaves(p)
    y = moe4.grouped_mlp(leaf["x"], SPLITS, leaf["prob"], leaf["w1"], leaf["w2"], leaf["b1"], leaf["b2"], **options)
    y.backward(dy)
    return {"y": y.detach()} | {key: t.grad for key, t in leaf.items() if t is not None}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", reference.LAYOUTS)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_bf16_follows_the_reference(activation: str, layout: str, bias: bool) -> None:
    p, dy = problem(activation, bias, torch.float32), torch.randn(T, H).bfloat16()
    p["w1"], p["w2"] = p["w1"].bfloat16().float(), p["w2"].bfloat16().float()
    ours = run(p, dy, activation=activation, glu_layout=layout, precision="bf16")
    leaf = leaves(p, torch.float64)
    y = reference.grouped_mlp(
        leaf["x"], SPLITS, leaf["prob"], leaf["w1"], leaf["w2"], leaf["b1"], leaf["b2"], activation, layout
    )
    y.backward(dy.double())
    assert reference.error(ours["y"], y) < 2**-8  # one BF16 rounding may fall on the other side
    for key in leaf:
        if leaf[key] is not None:
            # dc is rounded to BF16 after slightly different sums: half an ulp, 2^-9, on some elements.
            assert reference.error(ours[key], leaf[key].grad) < 2**-7, key
            assert ours[key].dtype == p[key].dtype
    assert ours["y"][38:].abs().max() == 0 and ours["x"][38:].abs().max() == 0 and ours["prob"][38:].abs().max() == 0
    assert ours["w1"][1].abs().max() == 0 and ours["w2"][1].abs().max() == 0


@pytest.mark.parametrize("rht", [0xD7E8, 0, None])
@pytest.mark.parametrize("activation, layout", [(a, "halves") for a in reference.ACTIVATIONS] + [("swiglu", "elementwise")])
def test_nvfp4_follows_the_reference(activation: str, layout: str, rht: int | None) -> None:
    p, dy = problem(activation), torch.randn(T, H).bfloat16()
    options = {"activation": activation, "glu_layout": layout, "gradient_rounding": "nearest"}
    ours = run(p, dy, fc1_rht=rht, fc2_rht=rht, **options)
    expected = reference.nvfp4_step(
        p["x"], torch.tensor(SPLITS), p["prob"], p["w1"], p["w2"], dy, activation, layout, rht
    )
    names = {"y": "y", "x": "dx", "prob": "dprob", "w1": "dw1", "w2": "dw2"}
    for key, name in names.items():
        # An h or dc on the other side of a BF16 boundary flips a 4-bit code, half a step of up to a third.
        got, want = ours[key].double(), expected[name]
        assert (got - want).norm() < 0.02 * want.norm(), name
    # And 4 bits are noticed at all: BF16 operands give something else.
    plain = run(p, dy, precision="bf16", **options)
    assert (plain["y"].double() - expected["y"]).norm() > 0.03 * expected["y"].norm()


@pytest.mark.parametrize("precision", ["nvfp4", "bf16"])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_recompute_changes_no_bit(activation: str, precision: str) -> None:
    p, dy = problem(activation, bias=True), torch.randn(T, H).bfloat16()
    results = []
    for recompute in (False, True):
        torch.manual_seed(3)
        results.append(run(p, dy, activation=activation, precision=precision, recompute=recompute))
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


@pytest.mark.usefixtures("device")
def test_one_weight_tensor_or_one_an_expert() -> None:
    p, dy = problem(), torch.randn(T, H).bfloat16()
    for precision in ("nvfp4", "bf16"):
        torch.manual_seed(3)
        packed = run(p, dy, precision=precision)
        torch.manual_seed(3)
        w1, w2 = ([t.clone().requires_grad_() for t in p[key]] for key in ("w1", "w2"))
        y = moe4.grouped_mlp(p["x"], SPLITS, p["prob"], w1, w2, precision=precision)
        y.backward(dy)
        assert torch.equal(y, packed["y"])
        assert torch.equal(torch.stack([w.grad for w in w1]), packed["w1"])
        assert torch.equal(torch.stack([w.grad for w in w2]), packed["w2"])


@pytest.mark.usefixtures("device")
def test_float32_weights_get_float32_gradients() -> None:
    p, dy = problem(), torch.randn(T, H).bfloat16()
    torch.manual_seed(3)
    low = run(p, dy)
    torch.manual_seed(3)
    high = run({**p, "w1": p["w1"].float(), "w2": p["w2"].float()}, dy)
    assert high["w1"].dtype == torch.float32 and torch.equal(high["w1"].bfloat16(), low["w1"])
    assert not torch.equal(high["w1"], low["w1"].float()), "rounded once more than needed"


@pytest.mark.usefixtures("device")
def test_seeds_come_from_torch() -> None:
    p, dy = problem(), torch.randn(T, H).bfloat16()
    grads = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        grads.append(run(p, dy)["w1"])
    assert torch.equal(grads[0], grads[1]) and not torch.equal(grads[0], grads[2])
    # Successive calls under one seed share no random numbers.
    torch.manual_seed(3)
    assert not torch.equal(run(p, dy)["w1"], run(p, dy)["w1"])


@pytest.mark.usefixtures("device")
def test_only_what_needs_gradients_is_computed() -> None:
    p, dy = problem(bias=True), torch.randn(T, H).bfloat16()
    torch.manual_seed(3)
    full = run(p, dy)
    for needed in (["x"], ["w1", "w2"], ["prob"], ["b1"], ["x", "prob", "b2"]):
        torch.manual_seed(3)
        leaf = {key: t.detach().clone().requires_grad_(key in needed) for key, t in p.items()}
        y = moe4.grouped_mlp(leaf["x"], SPLITS, leaf["prob"], leaf["w1"], leaf["w2"], leaf["b1"], leaf["b2"])
        y.backward(dy)
        for key, t in leaf.items():
            assert (t.grad is not None) == (key in needed), (needed, key)
            assert t.grad is None or torch.equal(t.grad, full[key]), (needed, key)
    with torch.no_grad():
        y = moe4.grouped_mlp(leaf["x"], SPLITS, leaf["prob"], leaf["w1"], leaf["w2"], leaf["b1"], leaf["b2"])
    assert not y.requires_grad and torch.equal(y, full["y"])


@pytest.mark.usefixtures("device")
def test_strided_transposed_and_other_dtypes_of_prob() -> None:
    p = problem()
    y = moe4.grouped_mlp(p["x"], SPLITS, p["prob"], p["w1"], p["w2"])
    wide = torch.randn(T, 2 * H).bfloat16()
    wide[:, ::2] = p["x"]
    assert torch.equal(moe4.grouped_mlp(wide[:, ::2], SPLITS, p["prob"], p["w1"], p["w2"]), y)
    turned = p["x"].T.contiguous().T
    assert not turned.is_contiguous()
    w1 = p["w1"].transpose(1, 2).contiguous().transpose(1, 2)
    for precision in ("nvfp4", "bf16"):
        plain = moe4.grouped_mlp(p["x"], SPLITS, p["prob"], p["w1"], p["w2"], precision=precision)
        assert torch.equal(moe4.grouped_mlp(turned, SPLITS, p["prob"], w1, p["w2"], precision=precision), plain)
    half = p["prob"].bfloat16().requires_grad_()
    moe4.grouped_mlp(p["x"], SPLITS, half, p["w1"], p["w2"]).sum().backward()
    assert half.grad is not None and half.grad.dtype == torch.bfloat16
    # A gradient that is a transposed or expanded view.
    leaf = leaves(p)
    moe4.grouped_mlp(leaf["x"], SPLITS, leaf["prob"], leaf["w1"], leaf["w2"]).sum().backward()
    assert leaf["x"].grad.abs().max() > 0


@pytest.mark.parametrize("precision", ["nvfp4", "bf16"])
@pytest.mark.usefixtures("device")
def test_no_tokens(precision: str) -> None:
    p = problem()
    for rows, splits in ((0, [0, 0, 0, 0]), (5, [0, 0, 0, 0])):
        leaf = leaves({**p, "x": p["x"][:rows], "prob": p["prob"][:rows]})
        y = moe4.grouped_mlp(leaf["x"], splits, leaf["prob"], leaf["w1"], leaf["w2"], precision=precision)
        assert y.shape == (rows, H) and y.abs().sum() == 0
        y.sum().backward()
        assert all(leaf[key].grad.abs().sum() == 0 for key in ("x", "prob", "w1", "w2"))


@pytest.mark.usefixtures("device")
def test_main_grad_is_added_to() -> None:
    p, dy = problem(), torch.randn(T, H).bfloat16()
    torch.manual_seed(3)
    plain = run({**p, "w1": p["w1"].float(), "w2": p["w2"].float()}, dy)
    m = moe4.GroupedMLP(4, H, F, fuse_wgrad_accumulation=True)
    with torch.no_grad():
        m.w1.copy_(p["w1"])
        m.w2.copy_(p["w2"])
    with pytest.raises(ValueError, match="expected a main_grad, got none"):
        m(p["x"], SPLITS, p["prob"]).backward(dy)
    for w in (m.w1, m.w2):
        w.main_grad = torch.ones(w.shape, dtype=torch.float32)
        w.grad_added_to_main_grad = False
    hooked = []
    m.w1.register_post_accumulate_grad_hook(hooked.append)
    torch.manual_seed(3)
    m(p["x"], SPLITS, p["prob"]).backward(dy)
    for w, key in ((m.w1, "w1"), (m.w2, "w2")):
        assert w.grad_added_to_main_grad and w.grad.abs().sum() == 0
        # 1 + dW rounds once, to the spacing of floats near the larger.
        assert torch.allclose(w.main_grad - 1, plain[key], rtol=0, atol=1e-6 * float(plain[key].abs().max() + 1))
    assert len(hooked) == 1
    w1 = m.w1.main_grad
    m.w2.main_grad = m.w1.main_grad.view(-1)[: m.w2.numel()].view(m.w2.shape)
    with pytest.raises(ValueError, match="share memory"):
        m(p["x"], SPLITS, p["prob"]).backward(dy)
    assert w1 is m.w1.main_grad


@pytest.mark.usefixtures("device")
def test_twice_is_refused() -> None:
    leaf = leaves(problem())
    y = moe4.grouped_mlp(leaf["x"], SPLITS, leaf["prob"], leaf["w1"], leaf["w2"])
    (dx,) = torch.autograd.grad(y.float().square().sum(), leaf["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        dx.float().square().sum().backward()


@pytest.mark.usefixtures("device")
def test_backward_again_gives_the_same() -> None:
    leaf, dy = leaves(problem()), torch.randn(T, H).bfloat16()
    y = moe4.grouped_mlp(leaf["x"], SPLITS, leaf["prob"], leaf["w1"], leaf["w2"])
    first = torch.autograd.grad(y, leaf["w1"], dy, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, leaf["w1"], dy)[0])


@pytest.mark.usefixtures("device")
def test_weights_changed_in_between() -> None:
    p, dy = problem(), torch.randn(T, H).bfloat16()
    for precision in ("nvfp4", "bf16"):
        torch.manual_seed(3)
        expected = run(p, dy, precision=precision)["x"]
        torch.manual_seed(3)
        leaf = leaves(p)
        y = moe4.grouped_mlp(leaf["x"], SPLITS, leaf["prob"], leaf["w1"], leaf["w2"], precision=precision)
        with torch.no_grad():
            leaf["w1"].zero_()
        if precision == "nvfp4":  # the quantized weights are kept
            y.backward(dy)
            assert torch.equal(leaf["x"].grad, expected)
        else:  # the weights themselves are, and torch notices
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward(dy)


@pytest.mark.parametrize("precision", ["nvfp4", "bf16"])
@pytest.mark.parametrize("name", ["x", "prob", "w1", "w2"])
def test_forward_mode_is_refused(name: str, precision: str) -> None:
    p = problem()

    def call(tensor: Tensor) -> Tensor:
        q = {**p, name: tensor}
        return moe4.grouped_mlp(q["x"], SPLITS, q["prob"], q["w1"], q["w2"], precision=precision)

    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(call, (p[name],), (torch.ones_like(p[name]),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(p[name], torch.ones_like(p[name]))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            call(dual)
        assert torch.equal(call(p[name]), call(p[name].clone())), "others go on"


def test_shapes_without_data() -> None:
    p = {key: tensor.to("meta") for key, tensor in problem().items() if tensor is not None}
    y = moe4.grouped_mlp(p["x"], SPLITS, p["prob"], p["w1"], p["w2"])
    assert y.is_meta and y.shape == p["x"].shape


REFUSED = [
    ({"x": lambda t: t.float()}, TypeError, "x: expected dtype torch.bfloat16, got torch.float32; convert it with"),
    ({"x": lambda t: t[:, :32]}, ValueError, r"x: expected shape \[40, 64\], got \[40, 32\]"),
    ({"x": lambda t: t[None]}, ValueError, r"x: expected \[T, H\]"),
    ({"x": lambda t: t.tolist()}, TypeError, "x: expected a torch tensor, got list"),
    ({"prob": lambda t: None}, TypeError, "prob: expected a torch tensor, got NoneType"),
    ({"w2": lambda t: t.tolist()}, TypeError, "w2: expected a torch tensor, got list"),
    ({"prob": lambda t: t[:3]}, ValueError, r"prob: expected shape \[40\], got \[3\]"),
    ({"prob": lambda t: t.long()}, TypeError, "prob: expected a floating dtype, got torch.int64"),
    ({"w1": lambda t: t.half()}, TypeError, "w1: expected torch.bfloat16 or torch.float32, got torch.float16"),
    ({"w1": lambda t: t.float()}, TypeError, r"w2\[0\]: expected torch.float32, as the first weight is"),
    ({"w1": lambda t: t[:, :32]}, ValueError, r"w1\[0\]: expected shape \[4, 64, 64\], got \[4, 32, 64\]"),
    ({"w2": lambda t: list(t[1:])}, ValueError, "w2: expected one tensor for each of 4 experts, got 3"),
    ({"w1": lambda t: t.to("meta")}, ValueError, r"w1\[0\]: expected a tensor on cpu, as x is, got one on meta"),
    ({"b1": lambda t: torch.zeros(4, 64)}, ValueError, "biases: expected both b1 and b2"),
]


@pytest.mark.parametrize("precision", ["nvfp4", "bf16"])
@pytest.mark.parametrize("change, kind, message", REFUSED)
def test_wrong_tensors_are_named(change: dict[str, Any], kind: type[Exception], message: str, precision: str) -> None:
    p = problem()
    p = {key: change.get(key, lambda t: t)(t) for key, t in p.items()}
    with pytest.raises(kind, match=message):
        moe4.grouped_mlp(p["x"], SPLITS, p["prob"], p["w1"], p["w2"], p["b1"], p["b2"], precision=precision)


@pytest.mark.parametrize(
    "splits, kind, message",
    [
        ([50, 0, 0, 0], ValueError, "expected a sum of at most 40"),
        ([-1, 0, 0, 0], ValueError, r"splits\[0\]: expected a row count of 0 or more, got -1"),
        ([1, 2, 3], ValueError, "expected 4 experts, got 3"),
        (torch.ones(4), TypeError, "splits: expected an integer dtype, got torch.float32"),
        (torch.ones(4).double().numpy(), TypeError, "splits: expected an integer dtype, got torch.float64"),
        ([25.9, 0.9, 13.9, 0], TypeError, r"splits\[0\]: expected an integer, got 25.9"),
        ([1, True, 0, 0], TypeError, r"splits\[1\]: expected an integer, got True"),
        ({15, 25, 0, 1}, TypeError, "splits: expected an integer tensor or a sequence of integers, got set"),
        (40, TypeError, "splits: expected an integer tensor or a sequence of integers, got int"),
        ([1 << 70, 0, 0, 0], ValueError, r"splits\[0\]: expected a number of rows, got 1180591620717411303424"),
        (torch.ones(4, dtype=torch.int64, device="meta"), ValueError, "splits: expected a tensor on cpu"),
    ],
)
def test_wrong_splits_are_named(splits: Any, kind: type[Exception], message: str) -> None:
    p = problem()
    with pytest.raises(kind, match=message):
        moe4.grouped_mlp(p["x"], splits, p["prob"], p["w1"], p["w2"])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"activation": "gelu"}, "unknown activation 'gelu'"),
        ({"activation": "tanh_srelu"}, "needs parameter s"),
        ({"activation": "situ_glu: beta1=4"}, "expected text without spaces"),
        ({"glu_layout": "thirds"}, "expected halves, interleaved32 or elementwise, got 'thirds'"),
        ({"precision": "fp8"}, "precision: expected nvfp4 or bf16, got 'fp8'"),
        ({"hidden_size": 24}, "hidden: expected a positive multiple of 16, got 24"),
        ({"ffn_size": 0}, "ffn: expected a positive multiple of 16, got 0"),
        ({"num_experts": 0}, "experts: expected at least 1, got 0"),
        ({"dc_amax": "half"}, "dc_amax: expected exact, bound or separate"),
        ({"fc1_rht": 1 << 16}, "fc1_rht: expected a 16-bit sign mask"),
        ({"fc2_rht": -1}, "fc2_rht: expected a 16-bit sign mask, 0 to 0xFFFF, got -1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe4.GroupedMLP(**{"num_experts": 4, "hidden_size": H, "ffn_size": F, **options})
