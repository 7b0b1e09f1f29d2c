"""A training loop: a small classifier with a mixture-of-experts layer, in BF16 and in NVFP4.

    python examples/train.py [--device cuda]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import moe4


class Model(nn.Module):
    def __init__(self, precision: str) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 64, dtype=torch.bfloat16)
        self.moe = moe4.MoELayer(8, 64, 128, top_k=2, precision=precision, recompute=True)
        self.head = nn.Linear(64, 10, dtype=torch.bfloat16)

    def forward(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        hidden = self.embed(x)
        y, balance = self.moe(hidden, weight_version=step)  # weights are quantized once a step
        return self.head(hidden + y).float(), balance


def train(precision: str, steps: int) -> float:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))
    model = Model(precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.tensor(0.0)
    for step in range(steps):
        x = torch.randn(256, 32)
        with torch.no_grad():
            label = teacher(x).argmax(-1)
        logits, balance = model(x.bfloat16(), step)
        loss = nn.functional.cross_entropy(logits, label)
        (loss + 0.01 * balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"{precision:<6} step {step:4}  loss {loss.item():.4f}  balance {balance.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_default_device(options.device)
    losses = {precision: train(precision, options.steps) for precision in ("bf16", "nvfp4")}
    print(f"nvfp4 ends {100 * (losses['nvfp4'] / losses['bf16'] - 1):+.1f} % from bf16")
