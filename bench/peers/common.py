"""Shapes, inputs, times and output of the peers.

`moe4 bench --peers PYTHON` runs the scripts of this folder; each can be run alone as well:

    python quantize.py --shape cpu-small
    python grouped_mlp.py --shape mixtral --device cuda

They read the same bench/shapes.toml as moe4 and print a JSON object a line, with `peer`, `name` (the row of
`moe4 bench` that does the same work), `shape`, and `median_ms` or `error`. This file alone prints facts about PyTorch.
"""

import argparse
import json
import pathlib
import platform
import statistics
import time
import tomllib
from dataclasses import dataclass

import torch

WARM_UP = 3
SEED = 1


@dataclass
class Shape:
    """One layer: sizes, and the rows of each expert."""

    name: str
    experts: int
    top_k: int
    rows: int
    hidden: int
    ffn: int
    activation: str
    splits: list[int]

    @property
    def fc1_rows(self):
        return self.ffn if self.activation == "srelu" else 2 * self.ffn

    def cols(self, tensor):
        """Columns of x, h, dc, or of one expert's weight."""
        return {"x": self.hidden, "h": self.ffn, "dc": self.fc1_rows, "w1": self.hidden, "w2": self.ffn}[tensor]


# Small enough to check on: ragged, one expert without rows.
SMALL = Shape("small", 4, 2, 120, 96, 64, "swiglu", [37, 0, 17, 66])


@dataclass
class Arguments:
    device: str
    runs: int
    rows: list[str]
    shapes: list[Shape]

    def wants(self, name):
        return not self.rows or name in self.rows


def arguments():
    """The command line, the same for every script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    default = pathlib.Path(__file__).resolve().parent.parent / "shapes.toml"
    parser.add_argument("--shapes", type=pathlib.Path, default=default, metavar="FILE")
    parser.add_argument("--shape", action="append", default=[], metavar="NAME", help="default: those of the device")
    parser.add_argument("--row", action="append", default=[], metavar="NAME", help="default: all")
    parser.add_argument("--runs", type=int, default=15)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no CUDA device")
    return Arguments(given.device, given.runs, given.row, read_shapes(given.shapes, given.shape, given.device))


def read_shapes(path, names, device):
    """Those named, or else those of the device."""
    with path.open("rb") as file:
        listed = tomllib.load(file)["shape"]
    chosen = [s for s in listed if s["name"] in names or (not names and s.get("backend") == device)]
    return [Shape(**{key: value for key, value in s.items() if key != "backend"}) for s in chosen]


def facts(device):
    """What the peers run on."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "threads": torch.get_num_threads()}
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        found |= {"matmul_tflop_s": round(matmul_rate())}
    return found


def matmul_rate():
    """TFLOP/s of a large square product in BF16: beside it stands what moe4's own products reach."""
    n = 8192
    a, b = (normal(n, n, device="cuda") for _ in range(2))
    return 2 * n**3 / median_ms(lambda: a @ b, 9, "cuda") / 1e9


class Layout:
    """Where each row and each tile of 16 tokens belongs. Made of the splits before any time is taken."""

    def __init__(self, shape, device):
        splits = torch.tensor(shape.splits)
        padded = (splits + 15) // 16 * 16
        experts = torch.arange(shape.experts)
        expert_of_row = torch.repeat_interleave(experts, splits)
        shift = (padded.cumsum(0) - padded) - (splits.cumsum(0) - splits)
        self.splits, self.padded_splits = shape.splits, padded.tolist()
        self.padded_rows = int(padded.sum())
        self.expert_of_row = expert_of_row.to(device)
        self.expert_of_tile = torch.repeat_interleave(experts, padded // 16).to(device)
        self.padded_row = (torch.arange(len(expert_of_row)) + shift[expert_of_row]).to(device)
        self.offsets = splits.cumsum(0).to(torch.int32).to(device)
        self.padded_offsets = padded.cumsum(0).to(torch.int32).to(device)

    def pad(self, x):
        """Each expert's rows, filled up with zero rows to a multiple of 16."""
        return x.new_zeros(self.padded_rows, x.shape[1]).index_copy_(0, self.padded_row, x)


def normal(*size, device, scale=1.0):
    """Random BF16 values; never zeros, which hardware computes at a higher clock."""
    return (torch.randn(*size, device=device) * scale).bfloat16()


def median_ms(work, runs, device):
    """Median time of a call."""
    return statistics.median(times_ms(work, runs, device))


def times_ms(work, runs, device):
    """Time of each call; by events on a GPU."""
    for _ in range(WARM_UP):
        work()
    if device == "cuda":
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        torch.cuda.synchronize()
        for start, end in pairs:
            start.record()
            work()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def compiled(function):
    """`function` under torch.compile, for one shape."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def in_a_line(error):
    """The start of an exception's message."""
    message = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {message[0][:200]}"


def why_not_compiled(device):
    """None, or why torch.compile does not work here; it needs a C++ compiler."""
    try:
        compiled(lambda x: x + 1)(torch.ones(8, device=device))
    except Exception as error:
        return f"torch.compile does not work here: {in_a_line(error)}"
    return None


def tell(peer, names, shape, result):
    """A line for each row that a peer is compared with."""
    for name in names:
        print(json.dumps({"peer": peer, "name": name, "shape": shape.name} | result), flush=True)


def measure(peer, names, shape, work, given):
    """Times `work` and tells; what cannot run says so."""
    try:
        tell(peer, names, shape, {"median_ms": median_ms(work, given.runs, given.device)})
    except Exception as error:  # out of memory, or an operation that this device lacks
        tell(peer, names, shape, {"error": in_a_line(error)})


def check(holds, what):
    """A wrong answer ends the script before anything is timed, unless `why_wrong` looks at it."""
    if not holds:
        raise SystemExit(f"self-check: {what}")


def why_wrong(checks):
    """None, or which of the checks of one peer fails; the other peers are measured all the same."""
    try:
        checks()
    except SystemExit as failed:
        return str(failed)
    except Exception as error:  # it does not even run
        return f"self-check: {in_a_line(error)}"
    return None


def relative(ours, expected):
    """Distance in the Euclidean norm, relative to the expected."""
    ours, expected = ours.double(), expected.double()
    return float((ours - expected).norm() / expected.norm())


if __name__ == "__main__":
    print(json.dumps(facts(arguments().device)))
