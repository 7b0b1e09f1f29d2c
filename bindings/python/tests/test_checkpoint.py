"""Experts in files of other programs, and in models of other libraries."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import moe4

E, H, F = 3, 64, 96


def weights(prefix: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> dict[str, Tensor]:
    shapes = ((F, H), (F, H), (H, F))
    return {
        f"{prefix}.experts.{e}.{name}.weight": torch.randn(*shape).bfloat16()
        for e in range(E)
        for name, shape in zip(names, shapes)
    }


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_per_expert_names(names: tuple[str, str, str], tmp_path: pathlib.Path) -> None:
    t = weights("model.layers.0.mlp", names) | {"model.norm.weight": torch.ones(H)}
    safetensors.torch.save_file(t, tmp_path / "m.safetensors")
    (layer,) = moe4.load_experts(tmp_path / "m.safetensors", num_experts=E).values()
    for e in range(E):
        gate, up, down = (t[f"model.layers.0.mlp.experts.{e}.{name}.weight"] for name in names)
        assert torch.equal(layer.w1[e], torch.cat([gate, up])) and torch.equal(layer.w2[e], down)


def test_shards(tmp_path: pathlib.Path) -> None:
    t = weights("a") | weights("b")
    halves = dict(list(t.items())[:7]), dict(list(t.items())[7:])
    for at, half in enumerate(halves):
        safetensors.torch.save_file(half, tmp_path / f"{at}.safetensors")
    index = {"weight_map": {name: f"{at}.safetensors" for at, half in enumerate(halves) for name in half}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    layers = moe4.load_experts(tmp_path)
    assert list(layers) == ["a", "b"] and torch.equal(layers["b"].w2[1], t["b.experts.1.down_proj.weight"])
    assert list(moe4.load_experts(tmp_path, prefix="b")) == ["b"]
    with pytest.raises(ValueError, match="prefix: expected one of 'a', 'b', got 'c'"):
        moe4.load_experts(tmp_path, prefix="c")


@pytest.mark.parametrize("format", ["bf16", "modelopt", "compressed-tensors"])
@pytest.mark.parametrize("layout", ["halves", "interleaved32", "elementwise"])
def test_saving_and_loading_is_the_identity(layout: Any, format: Any, tmp_path: pathlib.Path) -> None:
    m = moe4.GroupedMLP(E, H, F, glu_layout=layout)
    path = tmp_path / "m.safetensors"
    moe4.save_experts(path, {"layers.0.mlp": m}, format=format, names="mixtral")
    back = moe4.load_experts(path, glu_layout=layout)["layers.0.mlp"]
    other = {"halves": "elementwise"}.get(layout, "halves")
    turned = moe4.load_experts(path, glu_layout=other)["layers.0.mlp"]
    assert not torch.equal(back.w1, turned.w1) and torch.equal(back.w2, turned.w2)
    if format == "bf16":
        assert torch.equal(back.w1, m.w1) and torch.equal(back.w2, m.w2)
    else:
        assert (back.w1 - m.w1).norm() < 0.15 * m.w1.norm()
        # Quantized again, the values that codes stand for are the same: nothing is lost twice, whatever the layout.
        moe4.save_experts(tmp_path / "n.safetensors", {"layers.0.mlp": back}, format="bf16")
        again = moe4.load_experts(tmp_path / "n.safetensors", glu_layout=layout)["layers.0.mlp"]
        assert torch.equal(back.w1, again.w1) and torch.equal(back.w2, again.w2)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_quantized_files_hold_the_weights_of_training(tmp_path: pathlib.Path) -> None:
    m = moe4.GroupedMLP(E, H, F)
    moe4.save_experts(tmp_path / "m.safetensors", {"mlp": m}, format="modelopt")
    t = safetensors.torch.load_file(tmp_path / "m.safetensors")
    q = moe4.quantize(m.w1, tile="16x16")
    name = "mlp.experts.1.up_proj"
    assert torch.equal(t[f"{name}.weight"], q.codes[1, F:])
    assert torch.equal(t[f"{name}.weight_scale"].view(torch.uint8), q.scales[1, F:].view(torch.uint8))
    assert t[f"{name}.weight_scale_2"] == q.amax[1] / 2688


def test_faults_are_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.safetensors"
    moe4.save_experts(path, {"mlp": moe4.GroupedMLP(E, H, F)}, format="modelopt")
    good = safetensors.torch.load_file(path)
    name = "mlp.experts.2.up_proj.weight_scale"

    def refused(match: str, change: dict[str, Any]) -> None:
        t = {key: change.get(key, value) for key, value in good.items()}
        safetensors.torch.save_file({key: value for key, value in t.items() if value is not None}, path)
        with pytest.raises(ValueError, match=match):
            moe4.load_experts(path)

    refused(f"'{name}'.*the tensor is missing", {name: None})
    refused(f"'{name}'.*expected dtype F8_E4M3, got F8_E5M2", {name: torch.ones(F, H // 16).to(torch.float8_e5m2)})
    refused(f"'{name}'.*expected shape.*swizzled", {name: good[name].flatten()})
    nan = good[name].view(torch.uint8).clone()
    nan[1, 2] = 0x7F
    refused(rf"'{name}'.*scale \[1, 2\] is NaN", {name: nan.view(torch.float8_e4m3fn)})
    safetensors.torch.save_file(good, path)
    with pytest.raises(ValueError, match=r"'mlp.experts.3.down_proj.weight'.*expert 3 is missing: expected 4"):
        moe4.load_experts(path, num_experts=4)
    with pytest.raises(OSError, match="none"):
        moe4.load_experts(tmp_path / "none")
    with pytest.raises(ValueError, match="mlp: expected experts without biases"):
        moe4.save_experts(path, {"mlp": moe4.GroupedMLP(E, H, F, bias=True)})


def configured(kind: str) -> Any:
    """A small model with random weights."""
    transformers = pytest.importorskip("transformers")
    common = {
        "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2,
    }  # fmt: skip
    if kind == "mixtral":
        config = transformers.MixtralConfig(**common, intermediate_size=96, num_local_experts=4)
    elif kind == "qwen3":
        config = transformers.Qwen3MoeConfig(
            **common, intermediate_size=96, moe_intermediate_size=48, num_experts=4, norm_topk_prob=True
        )
    else:
        config = transformers.GptOssConfig(
            **common, intermediate_size=48, num_local_experts=4, layer_types=["full_attention"] * 2
        )
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, parameter in model.named_parameters():  # biases and small initial weights would hide mistakes
        if "experts" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("kind", ["mixtral", "qwen3", "gpt_oss"])
def test_experts_of_a_model(kind: str) -> None:
    model = configured(kind)
    tokens = torch.randint(0, 128, (2, 24))
    before = [m for m in model.modules() if hasattr(m, "gate_up_proj")]
    x, index = torch.randn(40, 64).bfloat16(), torch.rand(40, 4).argsort(-1)[:, :2]
    prob = torch.rand(40, 2).bfloat16()
    with torch.no_grad():
        logits, alone = model(tokens).logits, [m(x, index, prob) for m in before]
        assert moe4.replace_experts(model, precision="bf16") == 2
        after = [m for m in model.modules() if type(m).__name__ == "_Experts"]
        for old, new in zip(alone, (m(x, index, prob) for m in after)):
            # transformers rounds every intermediate result to BF16.
            assert (old - new).float().norm() < 0.01 * old.float().norm()
        assert (model(tokens).logits - logits).float().norm() < 0.03 * logits.float().norm()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert all(m.experts.w1.grad.abs().sum() > 0 for m in after)
    with pytest.raises(ValueError, match="found none"):
        moe4.replace_experts(model)


def test_a_model_in_nvfp4_and_what_is_refused() -> None:
    model = configured("mixtral")
    for m in model.modules():
        if hasattr(m, "gate_up_proj"):
            m.act_fn = torch.nn.GELU()
    with pytest.raises(ValueError, match=r"model.layers.0.*expected experts with SiLU.*got GELU"):
        moe4.replace_experts(model)
    model = configured("mixtral")
    assert moe4.replace_experts(model, recompute=True) == 2
    tokens = torch.randint(0, 128, (2, 24))
    model(tokens, labels=tokens).loss.backward()
    assert "precision='nvfp4'" in repr(model)
