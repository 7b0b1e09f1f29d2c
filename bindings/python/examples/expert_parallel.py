"""Experts spread over processes.

    torchrun --nproc-per-node 2 examples/expert_parallel.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import moe4

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same router, and the same seeds of stochastic rounding, on every process
layer = moe4.MoELayer(8, 64, 128, top_k=2, process_group=dist.group.WORLD)
generator = torch.Generator().manual_seed(rank)
x = torch.randn(32, 64, generator=generator).bfloat16()
y, balance = layer(x)
(y.float().square().mean() + 0.01 * balance).backward()
dist.all_reduce(layer.router.grad)  # every process holds the router; each expert is held once
layer.router.grad /= world
print(f"process {rank} of {world}: {layer.experts.options.experts} experts, |y| = {y.float().norm():.4f}")
dist.destroy_process_group()
