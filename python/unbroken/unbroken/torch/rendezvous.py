"""How the ranks of a group find each other: by an id in the group's store."""

import hashlib
import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from .. import coll

# Operations that may be under way, of all ranks and with each one; who asks for more gets an error
# that says so.
_QUEUE = 1 << 16
# How often the store is asked again for an id under which nobody is met any more.
_ASK_AGAIN_S = 0.1


def milliseconds(timeout: timedelta) -> int:
    return max(1, min(int(timeout.total_seconds() * 1000), 2**32 - 2))


def wait_for(store, key: str, ends: float) -> bool:
    """Waits for a key until a time; whether it is there."""
    try:
        store.wait([key], timedelta(seconds=max(0.001, ends - time.monotonic())))
    except RuntimeError:
        return False
    return True


def join(store, rank: int, size: int, timeout: timedelta, global_rank: int) -> tuple:
    """Meets the other ranks under the id that rank 0 puts into the store; the communicator, and
    what of the id is no secret. One that is left from an earlier group leads nowhere: the store is
    asked again."""
    address = os.environ.setdefault("UNBROKEN_COLL_ADDRESS", _own_address())
    hosts = os.environ.get("UNBROKEN_HOSTS", "").split(",")
    ends = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        store.set("id", coll.unique_id())
    while True:
        at = store.get("id").decode()
        left_ms = max(1, int(1000 * (ends - time.monotonic())))
        try:
            comm = coll.Communicator(
                size,
                rank,
                at,
                host=hosts[global_rank % len(hosts)] or None,
                address=address,
                timeout_ms=milliseconds(timeout),
                patience_ms=min(left_ms, 2**32 - 2),
                queue=_QUEUE,
            )
            return comm, hashlib.sha256(at.encode()).hexdigest()[:16]
        except coll.Error as error:
            stale = rank != 0 and error.code in (coll.SYSTEM_ERROR, coll.INVALID_USAGE)
            if not stale or time.monotonic() + _ASK_AGAIN_S > ends:
                raise dist.DistBackendError(str(error)) from error
        time.sleep(_ASK_AGAIN_S)


def _own_address() -> str:
    """The address of this machine that leads to the job's master."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, kind, _, _, where = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing
        return probe.getsockname()[0]
