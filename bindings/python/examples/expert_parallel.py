"""Trains a layer whose experts are spread over processes, one NVIDIA GPU each, or over CPUs.

    torchrun --nproc-per-node 2 examples/expert_parallel.py --device cuda
"""

from __future__ import annotations

import argparse
import datetime
import os

import torch
import torch.distributed as dist

import moe4

parser = argparse.ArgumentParser()
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if parser.parse_args().device == "cuda" else None
timeout = datetime.timedelta(minutes=2)  # how long a collective waits for a process that does not come
dist.init_process_group("nccl" if gpu else "gloo", device_id=gpu, timeout=timeout)
if gpu:
    torch.cuda.set_device(gpu)
    torch.set_default_device(gpu)
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same router, and the same seeds of stochastic rounding, on every process
layer = moe4.MoELayer(8, 64, 128, top_k=2, process_group=dist.group.WORLD, dtype=torch.float32)
optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
x = torch.randn(world, 256, 64)[rank].bfloat16()  # each process has its own tokens
errors = []
for _ in range(20):
    y, balance = layer(x)
    error = (y.float() - x.float().roll(1, -1)).square().mean()
    errors.append(error.detach())
    optimizer.zero_grad()
    ((error + 0.01 * balance) / world).backward()  # this process's share of the mean over all tokens
    dist.all_reduce(layer.router.grad)  # every process holds the router; each expert is held once
    optimizer.step()
experts = layer.experts.options.experts
# With its end of line in one piece: the processes write to one place.
print(f"process {rank} of {world}: {experts} experts, error {errors[0]:.3f} to {errors[-1]:.3f}\n", end="")
dist.destroy_process_group()
