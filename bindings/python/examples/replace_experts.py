"""The experts of a Hugging Face model in NVFP4: build it, swap them, take a training step, save them.

    python examples/replace_experts.py
"""

from __future__ import annotations

import pathlib
import tempfile

import torch
import transformers

import moe4

config = transformers.MixtralConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
)  # fmt: skip
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
tokens = torch.randint(0, 256, (2, 32))
with torch.no_grad():
    before = model(tokens, labels=tokens).loss
print(f"{moe4.replace_experts(model, recompute=True)} layers replaced")
loss = model(tokens, labels=tokens).loss
loss.backward()
print(f"loss {before.item():.4f} in bf16, {loss.item():.4f} in nvfp4")

layers = {
    name.removesuffix(".experts.experts"): module
    for name, module in model.named_modules()
    if isinstance(module, moe4.GroupedMLP)
}
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "experts.safetensors"
    moe4.save_experts(path, layers, format="modelopt")
    print(f"saved {', '.join(moe4.load_experts(path))}: {path.stat().st_size} bytes")
