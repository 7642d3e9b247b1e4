"""What of PyTorch waits for operations of a group, each as a function that makes a step to be
called again and again: in all of them an error must come through (faulty.py)."""

import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Ddp

WIDTH, BATCH = 32, 4


def model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    )


def backward(module) -> Callable:
    return lambda: module(torch.ones(BATCH, WIDTH)).sum().backward()


def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def plain() -> Callable:
    """Operations one after the other, by `Work` and by its future."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def step():
        x = torch.ones(100)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()).wait()
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, (rank + 1) % size),
                dist.P2POp(dist.irecv, torch.zeros(100), (rank - 1) % size),
            ]
        )
        for work in works:
            work.wait()

    return step


def ddp() -> Callable:
    return backward(Ddp(model(), bucket_cap_mb=0.005))


def ddp_python_hook() -> Callable:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    module = Ddp(model(), bucket_cap_mb=0.005)
    module.register_comm_hook(dist.group.WORLD, default_hooks.bf16_compress_hook)
    return backward(module)


def ddp_power_sgd() -> Callable:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    module = Ddp(model())
    state = powerSGD_hook.PowerSGDState(
        dist.group.WORLD, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return backward(module)


def ddp_builtin_hook() -> Callable:
    module = Ddp(model())
    module._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return backward(module)


def ddp_static_graph() -> Callable:
    return backward(Ddp(model(), static_graph=True))


def ddp_no_sync() -> Callable:
    module = Ddp(model())
    again = backward(module)

    def step():
        with module.no_sync():
            again()
        again()

    return step


def ddp_join() -> Callable:
    from torch.distributed.algorithms.join import Join

    module = Ddp(model())
    again = backward(module)

    def step():
        with Join([module]):
            for _ in range(1 + dist.get_rank()):
                again()

    return step


def zero() -> Callable:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = Ddp(model())
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.001)
    again = backward(module)

    def step():
        optimizer.zero_grad()
        again()
        optimizer.step()

    return step


def fsdp1() -> Callable:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return backward(FullyShardedDataParallel(model(), device_id=torch.device("cpu")))


def fsdp2() -> Callable:
    from torch.distributed.fsdp import fully_shard

    module = model()
    fully_shard(module, mesh=mesh())
    return backward(module)


def tensor_parallel() -> Callable:
    from torch.distributed.tensor import parallel

    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    # Rows that all ranks divide.
    wide = WIDTH * dist.get_world_size()
    module = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, wide), torch.nn.ReLU(), torch.nn.Linear(wide, WIDTH)
    )
    return backward(parallel.parallelize_module(module, mesh(), plan))


def pipelining() -> Callable:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(model(), rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)

    def step():
        x = torch.ones(BATCH, WIDTH)
        args, target = ([x] if rank == 0 else []), (x if rank == size - 1 else None)
        schedule.step(*args, target=target)

    return step


def dtensor() -> Callable:
    from torch.distributed.tensor import Shard, distribute_tensor

    over = mesh()

    def step():
        distribute_tensor(torch.ones(8, 8), over, [Shard(0)]).full_tensor()

    return step


def checkpoint() -> Callable:
    from torch.distributed import checkpoint as dcp

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)

    def step():
        dcp.save({"x": torch.ones(8)}, checkpoint_id=os.path.join(folder[0], "saved"))

    return step


def functional() -> Callable:
    from torch.distributed import _functional_collectives as collectives

    def step():
        x = torch.ones(64, requires_grad=True)
        collectives.all_reduce(x.detach(), "sum", dist.group.WORLD).sum().item()
        gathered = collectives.all_gather_single_autograd if hasattr(
            collectives, "all_gather_single_autograd"
        ) else collectives.all_gather_tensor_autograd
        gathered(x, 0, dist.group.WORLD).sum().backward()

    return step


def compiled(backend: str = "aot_eager") -> Callable:
    from torch.distributed import _functional_collectives as collectives

    group = dist.group.WORLD

    @torch.compile(backend=backend)
    def f(x):
        return collectives.all_reduce(x, "sum", group) * 2

    return lambda: f(torch.ones(64)).sum().item()


def compiled_by_inductor() -> Callable:
    return compiled("inductor")


ALL = {
    f.__name__: f
    for f in (
        plain,
        ddp,
        ddp_python_hook,
        ddp_power_sgd,
        ddp_builtin_hook,
        ddp_static_graph,
        ddp_no_sync,
        ddp_join,
        zero,
        fsdp1,
        fsdp2,
        tensor_parallel,
        pipelining,
        dtensor,
        checkpoint,
        functional,
        compiled,
        compiled_by_inductor,
    )
}
