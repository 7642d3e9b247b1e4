#!/usr/bin/env python3
"""One rank of a training with FSDP that writes checkpoints and goes on from the last, as torchrun
starts it: `checkpointed.py STEPS EVERY FOLDER [--at-switch] [--leave]`.

It writes a checkpoint each EVERY steps, and with --at-switch also when a queue pair of any rank has
been forced to another NIC; with --leave it ends after the first of these. An operation that stands
still for 10 s ends it with an error; ranks wait longer for each other at the beginning. Rank 0
prints `loss STEP VALUE` with all digits of the value, and `checkpoint STEP WHY`.
"""

import argparse
import importlib
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from unbroken import events

WIDTH, BATCH, LAYERS = 256, 24, 4
START, TIMEOUT = timedelta(seconds=120), timedelta(seconds=10)


def model() -> nn.Module:
    """Each of the larger layers is sharded by itself, then the rest."""
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    net = nn.Sequential(*[part for layer in layers for part in (layer, nn.GELU())])
    net.append(nn.Linear(WIDTH, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def say(line: str):
    """Prints a line at once and whole."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Checkpoints:
    """A folder for each in one folder; a file there names the last that is whole."""

    def __init__(self, folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer):
        self.folder, self.net, self.optimizer = folder, net, optimizer
        self.last = folder / "last"

    def _state(self) -> dict:
        net, optimizer = get_state_dict(self.net, self.optimizer)
        return {"net": net, "optimizer": optimizer}

    def load(self) -> int:
        """Takes the last one; gives how many steps it has."""
        if not self.last.exists():
            return 0
        steps, state = int(self.last.read_text()), self._state()
        dcp.load(state, checkpoint_id=self.folder / str(steps))
        set_state_dict(
            self.net,
            self.optimizer,
            model_state_dict=state["net"],
            optim_state_dict=state["optimizer"],
        )
        return steps

    def save(self, steps: int, why: str):
        """Writes one."""
        dcp.save(self._state(), checkpoint_id=self.folder / str(steps))
        if dist.get_rank() == 0:
            self.last.write_text(str(steps))
            say(f"checkpoint {steps} {why}")


def train(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """A step. Gives the loss of all ranks."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    loss = nn.functional.mse_loss(net(inputs), inputs[:, :8].sum(1, keepdim=True).sin())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item()


def moved(switches: list) -> bool:
    """Whether one of them led to another NIC: a queue pair may also begin anew where it is."""
    return any(switch["from"] != switch["to"] for switch in switches)


def any_rank(here: bool) -> bool:
    """Whether it holds at one of the ranks: all of them get the same answer."""
    there = torch.tensor([float(here)])
    dist.all_reduce(there, dist.ReduceOp.MAX)
    return bool(there.item())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("every", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--at-switch", action="store_true")
    parser.add_argument("--leave", action="store_true")
    args = parser.parse_args()
    importlib.import_module("unbroken.torch")
    torch.set_num_threads(1)
    dist.init_process_group("unbroken", timeout=START)
    dist.distributed_c10d._set_pg_timeout(TIMEOUT)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9)
    checkpoints = Checkpoints(args.folder, net, optimizer)
    forced = events.Watch(event="switch", kind="passive")
    for step in range(checkpoints.load(), args.steps):
        loss = train(net, optimizer, step)
        if dist.get_rank() == 0:
            say(f"loss {step} {loss.hex()} {loss:.6f}")
        if args.at_switch and any_rank(moved(forced.poll())):
            checkpoints.save(step + 1, "switch")
            if args.leave:
                break
        elif (step + 1) % args.every == 0:
            checkpoints.save(step + 1, "due")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
