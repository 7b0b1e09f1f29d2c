"""A small language model, trained with each kind of experts from the same weights on the same bytes, and compared.

    python examples/language_model.py                  # on a GPU if there is one, else a tiny model on the CPU
    python examples/language_model.py --device cpu --variants bf16 nvfp4-moe4 --steps 200

===============  ====================================================================================================
bf16             PyTorch's own operations in BF16, not fused
bf16-moe4        ``moe4.GroupedMLP(precision="bf16")``
nvfp4-moe4       ``moe4.GroupedMLP``
nvfp4-emulated   operands rounded to NVFP4 by PyTorch's own operations, multiplied in BF16
===============  ====================================================================================================

Everything else is the same: bytes as tokens, causal attention, ``moe4.MoELayer`` with its router and load-balance
loss; parameters and AdamW's state in FP32, products under autocast in BF16. All numbers but times and memory follow
from the seed.

How far apart two runs end by chance, bf16 and bf16-moe4 tell: these differ in the last bits only, and were up to 0.5 %
apart after the 60 steps of the small size (seeds 1 to 3).

It writes ``metrics.csv``, a row for each step, and ``curves.svg`` to the folder ``--out``, and prints a table. Losses
are nats a byte. Ctrl-C ends it after the step that is running, and what was measured is written; a second one ends it
at once. ``--compile`` compiles the experts that are not fused. Needs PyTorch 2.10 for ``grouped_mm``.
"""

from __future__ import annotations

import argparse
import csv
import gc
import math
import os
import pathlib
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, Optional

import torch
from torch import Tensor, nn

import curves
import emulation
import moe4

VARIANTS = ("bf16", "bf16-moe4", "nvfp4-moe4", "nvfp4-emulated")
PRODUCTS = {"bf16": emulation.bf16_product, "nvfp4-emulated": emulation.emulated_product}
IN_BF16 = {"nvfp4-moe4": "bf16-moe4", "nvfp4-emulated": "bf16"}  # for the last blocks
TEXT = pathlib.Path(__file__).resolve().parents[3] / "crates/moe4-lm/data/pride_and_prejudice.txt"
VALIDATION_PART, VALIDATION_BATCHES = 10, 4  # the last tenth of the text, or windows spread over it
BALANCE = 0.01


@dataclass(frozen=True)
class Size:
    """The model, and how it is trained."""

    layers: int
    hidden: int
    heads: int
    experts: int
    top_k: int
    ffn: int
    context: int
    batch: int
    steps: int
    learning_rate: float


SIZES = {
    "small": Size(2, 128, 4, 4, 2, 128, context=128, batch=8, steps=60, learning_rate=3e-3),
    "large": Size(8, 1024, 16, 16, 2, 1024, context=512, batch=32, steps=250, learning_rate=6e-4),
}


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, heads, context, d]
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, size: Size, variant: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self.attention = Attention(size)
        precision = "nvfp4" if variant == "nvfp4-moe4" else "bf16"
        self.moe = moe4.MoELayer(
            size.experts, size.hidden, size.ffn, size.top_k, precision=precision, dtype=torch.float32
        )
        if product := PRODUCTS.get(variant):
            self.moe.experts = emulation.UnfusedExperts(self.moe.experts, product)  # type: ignore[assignment]

    def forward(self, x: Tensor, version: int) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        y, balance = self.moe(self.norm2(x).bfloat16(), weight_version=version)
        return x + y, balance


class LanguageModel(nn.Module):
    """Bytes to logits of the next byte. The experts of the last ``bf16_last`` blocks are in BF16."""

    def __init__(self, size: Size, variant: str, bf16_last: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, size.hidden), nn.Embedding(size.context, size.hidden)
        kinds = [variant] * (size.layers - bf16_last) + [IN_BF16.get(variant, variant)] * bf16_last
        self.blocks = nn.ModuleList(Block(size, kind) for kind in kinds)
        self.norm, self.head = nn.RMSNorm(size.hidden), nn.Linear(size.hidden, 256, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, windows: Tensor, version: int) -> tuple[Tensor, Tensor]:
        """Of windows ``[B, context + 1]``: the mean cross entropy of each next byte, and the load-balance loss.

        ``version`` counts updates of the weights, so that moe4 rounds them once for each.
        """
        windows = windows.long()
        x, balance = self.token(windows[:, :-1]) + self.position.weight, torch.zeros((), device=windows.device)
        for block in self.blocks:
            x, more = block(x, version)
            balance = balance + more
        logits = self.head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()), balance


class Text:
    """A text on the device, and the windows of it that every variant sees in the same order."""

    def __init__(self, paths: Sequence[pathlib.Path], size: Size, seed: int, device: torch.device) -> None:
        content = b"".join(path.read_bytes() for path in paths)
        if len(content) // VALIDATION_PART <= size.context:
            raise SystemExit(
                f"--text: expected more than {VALIDATION_PART * (size.context + 1)} bytes, so that a window of "
                f"{size.context} fits into the last tenth, got {len(content)}"
            )
        text, span = torch.frombuffer(bytearray(content), dtype=torch.uint8), size.context + 1
        cut, generator = len(text) - len(text) // VALIDATION_PART, torch.Generator().manual_seed(seed)
        starts = torch.randint(cut - size.context, (size.steps * size.batch,), generator=generator)
        held = torch.linspace(cut, len(text) - span, VALIDATION_BATCHES * size.batch, dtype=torch.float64).long()
        self.text, self.span = text.to(device), torch.arange(span, device=device)
        self.training, self.validation = starts.view(-1, size.batch).to(device), held.view(-1, size.batch).to(device)

    def windows(self, starts: Tensor) -> Tensor:
        """uint8 ``[B, context + 1]``."""
        return self.text[starts.unsqueeze(1) + self.span]


@dataclass(frozen=True)
class Row:
    """One step. Times are means over the steps between two validations; memory is the most so far, on a GPU."""

    step: int
    variant: str
    train_loss: float
    validation_loss: Optional[float]
    ms_per_step: float
    peak_memory_gib: Optional[float]


class Metrics:
    """Rows, in memory and at once in a file."""

    def __init__(self, path: pathlib.Path) -> None:
        self.rows: list[Row] = []
        self._file = path.open("w", newline="", encoding="utf-8")
        self._csv = csv.writer(self._file)
        self._csv.writerow(field.name for field in fields(Row))

    def add(self, rows: Sequence[Row]) -> None:
        self.rows += rows
        self._csv.writerows([f"{v:.6g}" if isinstance(v, float) else v for v in astuple(row)] for row in rows)
        self._file.flush()

    def of(self, variant: str) -> list[Row]:
        return [row for row in self.rows if row.variant == variant]


class Interrupt:
    """Ctrl-C asks to stop; it never comes between a measurement and its row. A second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGINT, self._ask)

    def _ask(self, *_: Any) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def learning_rate(step: int, size: Size) -> float:
    """Of a step counted from 1: linear warm-up over a tenth of the steps, then a cosine down to a tenth of the peak."""
    warm_up = max(size.steps // 10, 1)
    if step <= warm_up:
        return size.learning_rate * step / warm_up
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(size.steps - warm_up, 1)))
    return size.learning_rate * (0.1 + 0.9 * cosine)


def train(
    variant: str, size: Size, text: Text, given: argparse.Namespace, metrics: Metrics, interrupt: Interrupt
) -> None:
    """Trains one variant. A GPU is waited for only where losses are read: every ``given.every`` steps."""
    device, cuda = torch.device(given.device), given.device == "cuda"
    gc.collect()  # the variant before may still be held by cycles
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(given.seed)
    with device:
        model = LanguageModel(size, variant, given.bf16_last)
    if given.compile:
        for module in model.modules():
            if isinstance(module, emulation.UnfusedExperts):
                module.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16)

    def validate(version: int) -> float:
        with torch.no_grad(), autocast:
            losses = [model(text.windows(starts), version)[0] for starts in text.validation]
        return torch.stack(losses).mean().item()

    losses: list[Tensor] = []
    started = time.perf_counter()
    for step in range(1, size.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, size)
        with autocast:
            loss, balance = model(text.windows(text.training[step - 1]), step - 1)
        (loss + BALANCE * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % given.every and step != size.steps and not interrupt.asked:
            continue
        trained = torch.stack(losses).tolist()  # waits for the device
        ms, held = (time.perf_counter() - started) * 1e3 / len(losses), validate(step)
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
        first = step + 1 - len(losses)
        rows = [Row(at, variant, loss, None, ms, peak) for at, loss in enumerate(trained, first)]
        metrics.add([*rows[:-1], replace(rows[-1], validation_loss=held)])
        progress = f"step {step:4}/{size.steps}  loss {trained[-1]:.4f}  validation {held:.4f}"
        print(f"{variant:<15} {progress}  {tokens_per_second(ms, size):9,.0f} tokens/s", flush=True)
        if interrupt.asked:
            return
        losses, started = [], time.perf_counter()


def tokens_per_second(ms: float, size: Size) -> float:
    return size.batch * size.context / ms * 1e3


def table(metrics: Metrics, size: Size, variants: Sequence[str]) -> str:
    """The last validation of each variant, beside that of ``bf16`` where both have one."""
    lines = [f"{'':<15} {'step':>5} {'validation':>10} {'to bf16':>8} {'tokens/s':>10} {'peak memory':>11}"]
    baseline: dict[int, float] = {}
    for variant in variants:
        rows = [row for row in metrics.of(variant) if row.validation_loss is not None]
        if not rows:
            continue
        last, losses = rows[-1], {row.step: row.validation_loss or 0.0 for row in rows}
        if variant == VARIANTS[0]:
            baseline = losses
        gap = f"{100 * (losses[last.step] / baseline[last.step] - 1):+.2f} %" if last.step in baseline else "-"
        # The first steps compile kernels; the median ignores them, and what else disturbed a few.
        speed = tokens_per_second(statistics.median(row.ms_per_step for row in rows[1:] or rows), size)
        memory = "-" if last.peak_memory_gib is None else f"{last.peak_memory_gib:.2f} GiB"
        lines.append(
            f"{variant:<15} {last.step:5} {losses[last.step]:10.4f} {gap:>8} {speed:10,.0f} {memory:>11}"
        )
    return "\n".join(lines)


def draw(path: pathlib.Path, metrics: Metrics, variants: Sequence[str]) -> None:
    """Training losses pale, validation losses on top of them; from the first of these on, where losses differ less."""

    def pair(variant: str) -> tuple[curves.Curve, curves.Curve]:
        rows = metrics.of(variant)
        held = [(row.step, row.validation_loss) for row in rows if row.validation_loss is not None]
        return [(row.step, row.train_loss) for row in rows if held and row.step >= held[0][0]], held

    curves.draw(path, {variant: pair(variant) for variant in variants}, "step", "nats a byte")


def arguments() -> tuple[argparse.Namespace, Size]:
    """The command line, and the size that follows from it."""
    parser = argparse.ArgumentParser(description="Trains a small language model with each kind of experts.")
    device, names = "cuda" if torch.cuda.is_available() else "cpu", ", ".join(VARIANTS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device, help=f"default here: {device}")
    parser.add_argument("--size", choices=SIZES, help="default: large on a GPU, small on a CPU")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="NAME", help=names)
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps; default: that of the size")
    parser.add_argument("--every", type=int, metavar="N", help="steps between validations; default: a tenth of all")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of weights, batches and rounding; default: 1")
    parser.add_argument("--bf16-last", type=int, default=0, metavar="N", help="last blocks with experts in BF16")
    parser.add_argument("--compile", action="store_true", help="compile experts that are not moe4's")
    book, out = f"default: {TEXT.name}, 685 KB", pathlib.Path("runs/language_model")
    parser.add_argument("--text", type=pathlib.Path, nargs="+", default=[TEXT], metavar="FILE", help=book)
    parser.add_argument("--out", type=pathlib.Path, default=out, metavar="FOLDER", help=f"default: {out}")
    given = parser.parse_args()
    size = SIZES[given.size or ("large" if given.device == "cuda" else "small")]
    size = replace(size, steps=size.steps if given.steps is None else given.steps)
    given.every = max(size.steps // 10, 1) if given.every is None else given.every
    for name, steps in (("--steps", size.steps), ("--every", given.every)):
        if steps < 1:
            parser.error(f"{name}: expected at least 1, got {steps}")
    if not 0 <= given.bf16_last <= size.layers:
        parser.error(f"--bf16-last: expected 0 to {size.layers} (the blocks), got {given.bf16_last}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: PyTorch finds no CUDA device; use --device cpu")
    if not hasattr(nn.functional, "grouped_mm"):
        parser.error(f"expected PyTorch 2.10 or later, which has grouped_mm, got {torch.__version__}")
    return given, size


def main() -> int:
    given, size = arguments()
    # Attention's backward and cuBLAS have faster ways that sum in any order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # It would cost time, and nothing here reads memory before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    text = Text(given.text, size, given.seed, torch.device(given.device))
    given.out.mkdir(parents=True, exist_ok=True)
    metrics = Metrics(given.out / "metrics.csv")
    variants = [name for name in VARIANTS if name in given.variants]  # bf16 first: the others are compared with it
    print(f"{size}, seed {given.seed}, {given.device}, PyTorch {torch.__version__}, moe4 {moe4.__version__}")
    interrupt = Interrupt()
    try:
        for variant in variants:
            if not interrupt.asked:
                train(variant, size, text, given, metrics, interrupt)
    finally:  # also of what came before an error
        draw(given.out / "curves.svg", metrics, variants)
        print(table(metrics, size, variants), flush=True)
    return 130 if interrupt.asked else 0


if __name__ == "__main__":
    raise SystemExit(main())
