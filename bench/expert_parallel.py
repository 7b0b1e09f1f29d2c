"""Expert parallelism: a step of ``moe4.MoELayer`` over several processes, its collectives, and their overlap.

    torchrun --nproc-per-node 2 bench/expert_parallel.py
    torchrun --nproc-per-node 2 bench/expert_parallel.py --device cpu --shape cpu-small --scale 4 --record FOLDER

Each process holds its part of the experts and of the tokens of a shape in bench/shapes.toml. Answers are checked first:
quantized operands, outputs and gradients have to be the bytes of one process that holds everything. Then are timed, a
step being forward and backward:

    step moe4                   the layer in NVFP4
    step torch bf16             the same router, permutation and collectives around PyTorch's BF16 experts
    step moe4, local            as many experts, tokens and rows, without the other processes
    experts                     the experts alone, on the rows that were received
    collectives                 those of one step alone, one after the other, with the same sizes
    dispatch                    of these the rows to the experts and their gradients back, which a shared expert can hide
    shared                      a shared expert of the size of one expert, alone
    step with shared, after     the layer, then the shared expert
    step with shared, beside    the shared expert while rows are on their way: ``MoELayer(shared=...)``

From them follow the share of communication in a step, directly and as what the local step lacks, and what a shared expert
hides: `hidden_ms`, and as a share of the shorter of dispatch and shared.

The router has random weights, so that rows are spread nearly evenly; the splits of shapes.toml are not used. A time is
that of the slowest process in each run; runs follow each other without a pause.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import statistics
import sys

# NVLink multicast needs rights that containers often lack; it does nothing for an all-to-all. Before NCCL starts.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import moe4
import torch
import torch.distributed as dist
from moe4._collectives import Exchange, all_reduce, all_to_all_equal

from expert_parallel_layers import BALANCE, Problem, SharedExpert, TorchExperts, Watch, check_answers, check_torch, step

import common  # of bench/peers

HERE = pathlib.Path(__file__).resolve().parent


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", action="append", default=[], help="default: mixtral and qwen3-30b; on a CPU cpu-small")
    parser.add_argument("--scale", type=int, default=1, help="divide hidden, ffn and rows by this")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a collective waits")
    parser.add_argument("--record", type=pathlib.Path, metavar="DIR", help="keep the numbers there; bench/record for ours")
    parser.add_argument("--machine", help="its name in the record; default: made from the device and their number")
    given = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("expected several processes; run it by: torchrun --nproc-per-node 2 bench/expert_parallel.py")
    if given.device == "cuda" and torch.cuda.device_count() <= int(os.environ["LOCAL_RANK"]):
        raise SystemExit(f"expected a GPU for each process, PyTorch finds {torch.cuda.device_count()}")
    names = given.shape or (["mixtral", "qwen3-30b"] if given.device == "cuda" else ["cpu-small"])
    given.shapes = [scaled(s, given.scale) for s in common.read_shapes(HERE / "shapes.toml", names, given.device)]
    missing = set(names) - {s.name for s in given.shapes}
    if missing:
        raise SystemExit(f"--shape: not in bench/shapes.toml: {', '.join(sorted(missing))}")
    return given


def scaled(shape, scale):
    """A smaller layer of the same experts."""
    for name in ("hidden", "ffn"):
        setattr(shape, name, max(getattr(shape, name) // scale // 16 * 16, 16))
    shape.rows = shape.rows // scale
    return shape


def connect(given):
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if given.device == "cuda" else None
    if device is not None:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=given.timeout)
    dist.init_process_group("nccl" if device else "gloo", device_id=device, timeout=timeout)


def say(text):
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def everywhere(mine):
    """Of every process."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def all_lines(wrong):
    """What is wrong on any process: all have to know, so that none waits for another."""
    return [f"process {rank}: {line}" for rank, lines in enumerate(everywhere(wrong)) for line in lines[:20]]


def measure(name, work, given):
    """A row of the table: times of the slowest process in each run."""
    say(f"  {name}")
    dist.barrier()
    times = torch.tensor(common.times_ms(work, given.runs, given.device), device=given.device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    times = times.tolist()
    row = {"name": name, "median_ms": statistics.median(times), "min_ms": min(times), "max_ms": max(times)}
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


class Collectives:
    """Those of a step, in its order, of its sizes."""

    def __init__(self, layer, problem):
        self.group = dist.group.WORLD
        watch = Watch(layer)
        step(layer, problem.x, problem.dy)
        watch.close()
        chosen = layer._route(problem.x)[1].flatten()
        self.counts = chosen.bincount(minlength=layer.num_experts)
        received = all_to_all_equal(self.counts, "the numbers of rows", self.group)
        self.sent, self.received = (c.view(layer.world, -1).sum(1).tolist() for c in (self.counts, received))
        self.arrived, self.arrived_weights, self.arrived_counts = watch.rows, watch.weights, watch.counts
        self.rows = common.normal(sum(self.sent), problem.shape.hidden, device=problem.device)
        self.weights = torch.rand(sum(self.sent), device=problem.device)

    @torch.no_grad()
    def dispatch(self):
        """Rows and probabilities to the experts, and the gradients of both back."""
        self._go(self.rows, self.sent, self.received)
        self._go(self.weights, self.sent, self.received)
        self._go(self.arrived, self.received, self.sent)
        self._go(self.arrived_weights, self.received, self.sent)

    @torch.no_grad()
    def all(self):
        all_to_all_equal(self.counts, "the numbers of rows", self.group)
        self.dispatch()
        self._go(self.arrived, self.received, self.sent)  # outputs
        self._go(self.rows, self.sent, self.received)  # and their gradients
        all_reduce(self.counts.clone(), "the numbers of rows", self.group)

    def _go(self, x, sent, received):
        return Exchange("rows", "gradients", sent, received, self.group)(x)

    def bytes(self):
        """What this process sends to others in a step: rows, outputs, the gradients of both, and probabilities."""
        rank = dist.get_rank()
        there, home = (sum(n for peer, n in enumerate(part) if peer != rank) for part in (self.sent, self.received))
        return (there + home) * (2 * self.rows.shape[1] * self.rows.element_size() + self.weights.element_size())


def experts_alone(layer, collectives):
    """Forward and backward of the experts on the rows that this process received."""
    dy = torch.randn_like(collectives.arrived)

    def work():
        layer.zero_grad()
        leaves = [t.clone().requires_grad_() for t in (collectives.arrived, collectives.arrived_weights)]
        layer.experts(leaves[0], collectives.arrived_counts, leaves[1]).backward(dy)

    return work


def measured(problem, torch_wrong, given):
    """The rows of a shape, and what follows from them; of PyTorch's experts the error if they are wrong."""
    x, dy = problem.x, problem.dy
    layer, local, torch_layer = problem.spread(), problem.alone(), problem.spread()
    torch_layer.experts = TorchExperts(torch_layer.experts, problem.shape)
    shared = SharedExpert(problem.shape, problem.device)
    beside = problem.spread(shared=shared)
    collectives = Collectives(layer, problem)

    def shared_alone():
        shared.zero_grad()
        shared(x.detach().requires_grad_()).backward(dy)

    works = {
        "step moe4": lambda: step(layer, x, dy, balance=BALANCE),
        "step torch bf16": lambda: step(torch_layer, x, dy, balance=BALANCE),
        "step moe4, local": lambda: step(local, x, dy, balance=BALANCE),
        "experts": experts_alone(layer, collectives),
        "collectives": collectives.all,
        "dispatch": collectives.dispatch,
        "shared": shared_alone,
        "step with shared, after": lambda: step(layer, x, dy, apart=shared, balance=BALANCE),
        "step with shared, beside": lambda: step(beside, x, dy, balance=BALANCE),
    }
    if torch_wrong:
        del works["step torch bf16"]
    rows = [measure(name, work, given) for name, work in works.items()]
    ms = {row["name"]: row["median_ms"] for row in rows}
    sent = torch.tensor([collectives.bytes()], dtype=torch.float64, device=problem.device)
    dist.all_reduce(sent, op=dist.ReduceOp.MAX)
    hidden = ms["step with shared, after"] - ms["step with shared, beside"]
    derived = {
        "communication_share": ms["collectives"] / ms["step moe4"],
        "communication_share_by_difference": 1 - ms["step moe4, local"] / ms["step moe4"],
        "bytes_sent": int(sent.item()),
        "collectives_gb_s": sent.item() / ms["collectives"] / 1e6,
        "hidden_ms": hidden,
        "hidden_share": hidden / min(ms["dispatch"], ms["shared"]),
    }
    if torch_wrong:
        rows.append({"name": "step torch bf16", "error": torch_wrong[0]})
    else:
        derived["torch_bf16_over_moe4"] = ms["step torch bf16"] / ms["step moe4"]
    return rows, {key: round(value, 4) for key, value in derived.items()}


def table(shape, rows, derived):
    lines = [f"{shape.name}: {shape.experts} experts, {shape.rows} rows, hidden {shape.hidden}, ffn {shape.ffn}"]
    lines += [f"  {'':26}{'median':>10}{'min':>10}{'max':>10}  ms"]
    for row in rows:
        times = (f"{row[key]:10.3f}" for key in ("median_ms", "min_ms", "max_ms") if key in row)
        lines.append(f"  {row['name']:26}" + "".join(times) + row.get("error", ""))
    lines += [f"  {key:36}{value:>14}" for key, value in derived.items()]
    return "\n".join(lines)


def machine(given):
    """What the processes run on."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    found |= {"system": platform.system(), "threads": torch.get_num_threads(), "backend": dist.get_backend()}
    if given.device == "cuda":
        first = torch.cuda.get_device_properties(0)
        found |= {"gpu": first.name, "gpus": torch.cuda.device_count(), "gpu_memory_gib": round(first.total_memory / 2**30)}
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        found |= {"peer_access": torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1)}
    found["environment"] = {key: value for key, value in os.environ.items() if key.startswith(("NCCL_", "TORCH_NCCL_"))}
    return found


def write(given, shapes):
    device = torch.cuda.get_device_name() if given.device == "cuda" else platform.machine()
    slug = re.sub("[^a-z0-9]+", "-", device.lower().removeprefix("nvidia ")).strip("-")
    name = given.machine or f"{slug}-x{dist.get_world_size()}"
    date = datetime.date.today().isoformat()
    path = given.record / name / f"{date}-expert-parallel.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"date": date, "moe4": moe4.__version__, "processes": dist.get_world_size(), "runs": given.runs}
    record |= {"machine": machine(given), "shapes": shapes}
    path.write_text(json.dumps(record, indent=2) + "\n")
    say(f"recorded in {path}")


def main():
    given = arguments()
    connect(given)
    shapes = []
    for shape in given.shapes:
        say(f"{shape.name}: answers")
        problem = Problem(shape, given.device)
        wrong, facts = check_answers(problem)
        if lines := all_lines(wrong):
            say("\n".join(["self-check:", *lines]))
            raise SystemExit(1)
        received = everywhere(facts.pop("rows_received"))
        rows, derived = measured(problem, all_lines(check_torch(problem)), given)
        sizes = {key: getattr(shape, key) for key in ("experts", "top_k", "rows", "hidden", "ffn", "activation")}
        result = {"name": shape.name, "scale": given.scale, **sizes, "tokens_per_process": problem.tokens}
        shapes.append(result | {"rows_received": received, "checks": facts, "times": rows, "derived": derived})
        if problem.rank == 0:
            print(table(shape, rows, derived), flush=True)
    if dist.get_rank() == 0 and given.record is not None:
        write(given, shapes)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
