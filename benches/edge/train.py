#!/usr/bin/env python3
"""One rank of a data-parallel training (DDP over the backend `unbroken`) for Figures 9 and 10;
RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT say which.

A small network learns ten classes that a fixed random network has drawn; all is seeded, so that
losses are the same bits whenever sums are. Ends after `--steps`, or as soon as a rank finds
`--seconds` over. Rank 0 writes `step NUMBER TIME_S STEP_MS LOSS` (all digits of the loss),
`accuracy STEP TIME_S SHARE` of held-out samples, and at the end what a checkpoint and the start
took."""

import argparse
import io
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import unbroken.torch  # the backend registers itself
from torch import nn

WIDTH, CLASSES, BATCH, HELD_OUT = 32, 10, 64, 2000
ACCURACY_EVERY = 20
CHECKPOINTS = 5


def network(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


def samples(teacher: nn.Module, seed: int, count: int) -> tuple:
    """Inputs, and the classes that the teacher gives them."""
    inputs = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return inputs, teacher(inputs).argmax(1)


def say(line: str):
    """Prints a line whole and at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def checkpoint_ms(net: nn.Module, optimizer) -> float:
    """How long it takes to write model and optimizer to the disk."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as file:
        memory = io.BytesIO()
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, memory)
        file.write(memory.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    return (time.monotonic() - began) * 1e3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--seconds", type=float, default=1e6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(unbroken.torch.NAME)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    teacher = network(24, 7)
    held_out, right = samples(teacher, 1, HELD_OUT)
    net = nn.parallel.DistributedDataParallel(network(320, 1), bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    began = None
    for step in range(args.steps):
        step_began = time.monotonic()
        inputs, classes = samples(teacher, 1000 + step * ranks + rank, BATCH)
        loss = nn.functional.cross_entropy(net(inputs), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # The losses, and whether a rank finds the time over.
        told = torch.stack(
            [
                loss.detach(),
                torch.tensor(float(began is not None and step_began - began > args.seconds)),
            ]
        )
        dist.all_reduce(told)
        now = time.monotonic()
        if began is None:
            began = now
            if rank == 0:
                say(f"start {time.clock_gettime(time.CLOCK_BOOTTIME) - started_s():.3f}")
        if rank == 0:
            say(
                f"step {step} {now - began:.6f} {(now - step_began) * 1e3:.3f} "
                f"{told[0].item().hex()}"
            )
            if step % ACCURACY_EVERY == 0:
                with torch.no_grad():
                    share = (net.module(held_out).argmax(1) == right).float().mean().item()
                say(f"accuracy {step} {now - began:.6f} {share:.4f}")
        if told[1] > 0:
            break
    if rank == 0:
        for _ in range(CHECKPOINTS):
            say(f"checkpoint {checkpoint_ms(net.module, optimizer):.3f}")
    say(f"counters {rank} {dist.group.WORLD.counters()}")
    dist.destroy_process_group()


def started_s() -> float:
    """When this process began, by the clock of the boot."""
    with open("/proc/self/stat", encoding="ascii") as stat:
        ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
