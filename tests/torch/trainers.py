#!/usr/bin/env python3
"""One rank of a training by a library above torch.distributed: `trainers.py BACKEND LIBRARY STEPS`,
where LIBRARY is `accelerate`, `accelerate-fsdp`, `deepspeed-1`, `-2` or `-3` (the stage of ZeRO).

The only lines that know of Unbroken are the import and the backend's name. Prints as train.py."""

import importlib
import os
import sys

import torch.distributed as dist
from train import BATCH, WIDTH, model, say

import torch
from torch import nn

RATE = 0.005


def accelerated(net: nn.Module, backend: str, sharded: bool = False):
    """The model, and a function that takes a step, by Accelerate. `Accelerator(cpu=True)` asks for
    gloo unless there is a group."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    dist.init_process_group(backend)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=RATE))

    def step(loss):
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    # Also what it gathers and reduces by itself.
    ranks = accelerator.num_processes
    gathered = accelerator.gather(torch.full((2,), float(accelerator.process_index)))
    if gathered.tolist() != [float(rank) for rank in range(ranks) for _ in range(2)]:
        raise SystemExit(f"Accelerate has gathered {gathered}")
    return net, step


def by_deepspeed(net: nn.Module, backend: str, stage: int):
    """The same by DeepSpeed, whose optimizer is divided among ranks; from stage 2 on gradients, and
    in 3 parameters, too."""
    import deepspeed

    deepspeed.init_distributed(backend)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)

    def step(loss):
        engine.backward(loss)
        engine.step()

    return engine, step


LIBRARIES = {
    "accelerate": accelerated,
    "accelerate-fsdp": lambda net, backend: accelerated(net, backend, sharded=True),
    **{
        f"deepspeed-{stage}": lambda net, backend, stage=stage: by_deepspeed(net, backend, stage)
        for stage in (1, 2, 3)
    },
}


def main():
    backend, library, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if backend == "unbroken":
        importlib.import_module("unbroken.torch")
    torch.set_num_threads(1)
    net, step = LIBRARIES[library](model(), backend)
    if dist.get_backend() != backend:
        raise SystemExit(f"{library} communicates by {dist.get_backend()}")
    rank = dist.get_rank()
    for number in range(steps):
        generator = torch.Generator().manual_seed(1000 * number + rank)
        inputs = torch.randn(BATCH, WIDTH, generator=generator)
        loss = nn.functional.mse_loss(net(inputs), inputs[:, :8].sum(1, keepdim=True).sin())
        step(loss)
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            say(f"loss {number} {total.item().hex()} {total.item():.6f}")
    if backend == "unbroken":
        # DeepSpeed's groups are its own.
        groups = [group.counters() for group in dist.distributed_c10d._world.pg_map]
        say(f"counters {rank} { {name: sum(g[name] for g in groups) for name in groups[0]} }")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
