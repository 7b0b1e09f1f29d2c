"""A small byte-level language model with mixture-of-experts layers, trained on the same bytes with each kind of experts.

    python examples/language_model.py --device cuda --out runs/experts

========  ==================================================================================================
bf16      torch: one BF16 product after another, expert by expert
nvfp4     moe4: ``MoELayer`` as it is
emulated  NVFP4 from moe4's quantizers and torch's products, each tensor quantized and turned back: nothing fused
========  ==================================================================================================

Writes ``losses.csv`` (kind, step, loss, seconds) and ``losses.svg``.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moe4

TEXT = pathlib.Path(__file__).parents[3] / "crates/moe4-lm/data/pride_and_prejudice.txt"
COLORS = {"bf16": "#555555", "nvfp4": "#1b7837", "emulated": "#c2752a"}


class Nvfp4Linear(torch.autograd.Function):
    """``x [T,K] w [N,K]`` to ``[T,N]``, with the operands of moe4: see ``docs/numerics.md``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        row, column = moe4.group_quantize(x, columnwise=True)
        weight = moe4.quantize(w.bfloat16(), tile="16x16").dequantize(torch.bfloat16)
        ctx.save_for_backward(weight, column.dequantize(torch.bfloat16))
        return row.dequantize(torch.bfloat16) @ weight.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        weight, x = ctx.saved_tensors
        row, column = moe4.group_quantize(dy.contiguous(), columnwise=True, rounding="stochastic")
        dx = row.dequantize(torch.bfloat16) @ weight
        return dx, (column.dequantize(torch.bfloat16) @ x.T).float()


class Unfused(nn.Module):
    """Experts with the parameters of others, SwiGLU written in torch."""

    def __init__(self, experts: moe4.GroupedMLP, emulated: bool) -> None:
        super().__init__()
        self.w1, self.w2, self.emulated = experts.w1, experts.w2, emulated

    def forward(self, x: Tensor, splits: Tensor, prob: Tensor, **_: Any) -> Tensor:
        linear = Nvfp4Linear.apply if self.emulated else lambda x, w: x @ w.bfloat16().T
        out, start = [], 0
        for e, rows in enumerate(splits.tolist()):
            x_e, prob_e = x[start : start + rows].bfloat16(), prob[start : start + rows, None]
            start += rows
            if rows == 0:
                continue
            gate, up = linear(x_e, self.w1[e]).float().chunk(2, -1)
            out.append(linear((F.silu(gate) * up * prob_e).bfloat16(), self.w2[e]))
        return torch.cat(out)


class Block(nn.Module):
    def __init__(self, hidden: int, ffn: int, experts: int, kind: str) -> None:
        super().__init__()
        self.heads = max(1, hidden // 32)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.moe = moe4.MoELayer(experts, hidden, ffn, top_k=2, dtype=torch.float32, recompute=True)
        if kind != "nvfp4":
            self.moe.experts = Unfused(self.moe.experts, kind == "emulated")

    def forward(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y, balance = self.moe(self.norms[1](x).bfloat16(), weight_version=step)
        return x + y, balance


class Model(nn.Module):
    def __init__(self, o: argparse.Namespace, kind: str) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(256, o.hidden), nn.Embedding(o.context, o.hidden)
        self.blocks = nn.ModuleList(Block(o.hidden, o.ffn, o.experts, kind) for _ in range(o.layers))
        self.norm, self.head = nn.LayerNorm(o.hidden), nn.Linear(o.hidden, 256, bias=False)

    def forward(self, bytes_in: Tensor, step: int) -> tuple[Tensor, Tensor]:
        x = self.embed(bytes_in) + self.places(torch.arange(bytes_in.shape[1]))
        balances = []
        for block in self.blocks:
            x, balance = block(x, step)
            balances.append(balance)
        return self.head(self.norm(x)).float(), torch.stack(balances).mean()


def train(o: argparse.Namespace, kind: str, text: Tensor) -> list[tuple[str, int, float, float]]:
    """``(kind, step, loss, seconds)`` of each step; the same seed, data and initial weights for each kind."""
    torch.manual_seed(o.seed)
    model = Model(o, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr, betas=(0.9, 0.95))
    order = torch.Generator("cpu").manual_seed(o.seed)
    losses, start = [], time.perf_counter()
    for step in range(o.steps):
        first = torch.randint(0, len(text) - o.context - 1, (o.batch, 1), generator=order, device="cpu")
        batch = text[first + torch.arange(o.context + 1, device="cpu")].to(o.device)
        with torch.autocast(torch.device(o.device).type, dtype=torch.bfloat16):
            logits, balance = model(batch[:, :-1], step)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        (loss + 0.01 * balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((step, loss.detach(), time.perf_counter() - start))
        if step % 50 == 0 or step == o.steps - 1:
            print(f"{kind:<9} step {step:5}  loss {loss.item():.4f}  {time.perf_counter() - start:7.1f} s", flush=True)
    moe4.synchronize()
    return [(kind, step, loss.item(), seconds) for step, loss, seconds in losses]


def plot(rows: list[tuple[str, int, float, float]], file: pathlib.Path) -> None:
    """Losses over steps, each the mean of up to 20."""
    width, height, edge = 720, 400, 50
    low, high = min(r[2] for r in rows), max(r[2] for r in rows)
    last = max(1, max(r[1] for r in rows))
    shapes = []
    for at, kind in enumerate(dict.fromkeys(r[0] for r in rows)):
        losses = [r[2] for r in rows if r[0] == kind]
        means = [sum(losses[max(0, i - 19) : i + 1]) / min(i + 1, 20) for i in range(len(losses))]
        points = " ".join(
            f"{edge + i / last * (width - 2 * edge):.1f},{height - edge - (m - low) / (high - low) * (height - 2 * edge):.1f}"
            for i, m in enumerate(means)
        )
        shapes.append(f'<polyline fill="none" stroke="{COLORS[kind]}" stroke-width="1.5" points="{points}"/>')
        shapes.append(f'<text x="{width - 120}" y="{edge + 18 * at}" fill="{COLORS[kind]}">{kind} {means[-1]:.3f}</text>')
    axes = f'<path d="M{edge} {edge}V{height - edge}H{width - edge}" fill="none" stroke="black"/>'
    labels = f'<text x="5" y="{edge}">{high:.2f}</text><text x="5" y="{height - edge}">{low:.2f}</text>'
    labels += f'<text x="{width - 120}" y="{height - edge + 25}">{last} steps</text>'
    style = 'font-family="sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>'
    file.write_text(head + axes + labels + "".join(shapes) + "</svg>\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kinds", default="bf16,nvfp4,emulated", help="comma-separated")
    parser.add_argument("--text", type=pathlib.Path, default=TEXT)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    for name, value in {"steps": 500, "batch": 16, "context": 256, "hidden": 256, "ffn": 256, "experts": 8, "layers": 4,
                        "seed": 1}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-3)
    o = parser.parse_args()
    torch.set_default_device(o.device)
    text = torch.frombuffer(bytearray(o.text.read_bytes()), dtype=torch.uint8).long().cpu()
    rows = [row for kind in o.kinds.split(",") for row in train(o, kind, text)]
    o.out.mkdir(parents=True, exist_ok=True)
    with open(o.out / "losses.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["kind", "step", "loss", "seconds"])
        writer.writerows(rows)
    plot(rows, o.out / "losses.svg")


if __name__ == "__main__":
    main()
