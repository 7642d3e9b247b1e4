"""One rank of a training that torchrun restarts: in its first two lives the last rank ends by
SIGKILL, and the others by the error that says so; in the third all steps are taken. Prints `life N
error: TEXT` and `trained N`."""

import os
import signal

import torch.distributed as dist
import unbroken.torch  # noqa: F401
from train import BATCH, WIDTH, model, say

import torch

STEPS, LIVES = 6, 3


def main():
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("unbroken")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    net = torch.nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.5)
    for step in range(STEPS):
        if (rank, step) == (last, STEPS // 2) and life < LIVES - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            net(torch.ones(BATCH, WIDTH)).sum().backward()
        except RuntimeError as error:
            say(f"life {life} error: {str(error).splitlines()[0]}")
            raise
    say(f"trained {life}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
