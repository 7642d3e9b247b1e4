"""One rank: DDP with its communication hooks (none, bf16, PowerSGD) over ours and over gloo in the
same processes; the losses are equal.

On two ranks a sum of two is the same in either order, so the losses are the same bits; with more
they are close. PowerSGD's callbacks begin operations: with several buckets their order among ranks
depends on timing, over whatever backend completes on the CPU, so there is one bucket."""

import torch.distributed as dist
import unbroken.torch  # noqa: F401
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from train import BATCH, WIDTH, model, say

import torch

STEPS = 12


def plain(ddp, group):
    pass


def bf16(ddp, group):
    ddp.register_comm_hook(group, default_hooks.bf16_compress_hook)


def power_sgd(ddp, group):
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def train(group, hook) -> list:
    buckets_mb = 100 if "power" in hook.__name__ else 0.5
    ddp = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=buckets_mb)
    hook(ddp, group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.002)
    torch.manual_seed(100 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        loss = (ddp(x) - x.sum(1, keepdim=True) / 10).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


def main():
    dist.init_process_group("unbroken")
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    for hook in (plain, bf16, power_sgd):
        left, right = train(ours, hook), train(gloo, hook)
        far = max(abs(a - b) / abs(b) for a, b in zip(left, right, strict=True))
        # PowerSGD orthogonalizes: differences in the last place grow.
        assert far == 0 if dist.get_world_size() == 2 else far < 1e-2, (
            f"{hook.__name__}: {left} instead of {right}"
        )
        assert left[-1] < left[0], f"{hook.__name__} does not learn: {left}"
        if dist.get_rank() == 0:
            say(f"{hook.__name__} within {far:.1e}")
    say("ok hooks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
