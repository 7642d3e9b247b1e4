#!/usr/bin/env python3
"""One rank of a training with torch.distributed, as torchrun starts it: `train.py BACKEND MODE
STEPS`, where MODE is `ddp`, `fsdp1` or `fsdp` (2).

Nothing here knows of Unbroken but the import that registers its backend. Everything is seeded and
runs in one thread, so that the losses are the same bits whenever sums are. Rank 0 prints `loss STEP
VALUE` with all digits of the value; all print what was lost."""

import importlib
import sys

import torch.distributed as dist

import torch
from torch import nn

WIDTH, BATCH = 192, 24


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = [
        layer
        for _ in range(4)
        for layer in (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )
    ]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def sharded(module: nn.Module) -> nn.Module:
    """FSDP 2: each of the larger layers by itself, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def wrapped(module: nn.Module) -> nn.Module:
    """FSDP 1: each of the larger layers by itself, then the rest."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu")
    )


def replicated(module: nn.Module) -> nn.Module:
    """DDP, with small buckets: many operations are under way while the backward pass goes on."""
    return nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.5)


PARALLEL = {"ddp": replicated, "fsdp1": wrapped, "fsdp": sharded}


def say(line: str):
    """Prints a line at once and whole: torchrun has all ranks write to one stream, unbuffered,
    where `print` writes the end of a line by itself."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def several(rank: int, ranks: int):
    """Several gathers as one operation: the first may be over before the last begins."""
    for turn in range(20):
        parts = [torch.full((size,), float(turn + size + rank)) for size in (1, 2, 3, 4)]
        gathered = [torch.empty(ranks * len(part)) for part in parts]
        dist.group.WORLD.allgather_into_tensor_coalesced(gathered, parts).wait()
        for part, got in zip(parts, gathered):
            if got.tolist() != [float(turn + len(part) + r) for r in range(ranks) for _ in part]:
                raise SystemExit(f"turn {turn}: {part} was gathered as {got}")


def main():
    backend, mode, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if backend == "unbroken":
        importlib.import_module("unbroken.torch")
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    rank = dist.get_rank()
    net = PARALLEL[mode](model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.005)
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(BATCH, WIDTH, generator=generator)
        loss = nn.functional.mse_loss(net(inputs), inputs[:, :8].sum(1, keepdim=True).sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            say(f"loss {step} {total.item().hex()} {total.item():.6f}")
    # Objects, and what ranks send each other.
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, {"rank": rank})
    if told != [{"rank": r} for r in range(len(told))]:
        raise SystemExit(f"objects are {told}")
    came = torch.empty(3)
    pair = [
        dist.P2POp(dist.isend, torch.full((3,), float(rank)), (rank + 1) % len(told)),
        dist.P2POp(dist.irecv, came, rank - 1 if rank else len(told) - 1),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    if came.tolist() != [float((rank - 1) % len(told))] * 3:
        raise SystemExit(f"the neighbour has sent {came}")
    if backend == "unbroken":
        several(rank, len(told))
        say(f"counters {rank} {dist.group.WORLD.counters()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
