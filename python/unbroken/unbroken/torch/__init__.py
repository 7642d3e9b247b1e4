"""A backend of torch.distributed that outlives NICs, for CPU tensors.

    import torch.distributed as dist
    import unbroken.torch
    dist.init_process_group("unbroken")

Operations are queued and go on by themselves; with and without failures their results are the same,
bit for bit. The group's timeout is how long ranks wait for each other at the beginning, and how
long an operation may stand still.

Environment: UNBROKEN_HOST is the host of the emulated network that this process is on (`unbroken
run` sets it); UNBROKEN_HOSTS, `a,b,c` say, names one for each rank of the job instead.
UNBROKEN_COLL_ADDRESS is where others reach this process [default: the address that leads to
MASTER_ADDR].

Modules: `tensors` says what the library reads and writes of a tensor, `work` how an operation ends,
`backend` has the operations, `group` the process group.
"""

try:
    import torch.distributed as dist
except ModuleNotFoundError as error:
    # Of PyTorch itself: what it lacks in turn is its own to say.
    if error.name not in ("torch", "torch.distributed"):
        raise
    raise ModuleNotFoundError(
        "unbroken.torch needs PyTorch, which is not installed: `pip install torch`, "
        "or install the wheel as `FILE.whl[torch]`",
        name=error.name,
    ) from None
if not dist.is_available():
    raise ImportError(
        "unbroken.torch needs a PyTorch with torch.distributed, which this one was built without: "
        "those on PyPI for Linux have it"
    )

from .backend import NAME, Backend
from .group import ProcessGroup
from .work import TimeoutError, Work

__all__ = ["NAME", "Backend", "ProcessGroup", "TimeoutError", "Work"]


def _create(options, _backend_options=None) -> ProcessGroup:
    members = options.global_ranks_in_group
    global_rank = members[options.group_rank] if members else options.group_rank
    return ProcessGroup(
        options.store, options.group_rank, options.group_size, options.timeout, global_rank
    )


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
