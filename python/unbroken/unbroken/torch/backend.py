"""The operations of a group.

Each operation is planned first: calls of the library, the memory that they need, and what is copied
when they are over. Planning refuses whatever does not make sense; only then is anything begun.
"""

import atexit
import itertools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from ctypes import c_size_t
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as _Backend

from .. import coll
from ..coll import Type
from .plan import Plan
from .rendezvous import join, milliseconds, wait_for
from .tensors import (
    as_bytes,
    bytes_of,
    changeable,
    check_equal,
    check_readable,
    check_writable,
    empty_bytes,
    flat_of,
    is_plain,
    overlap,
    readable,
    reduction,
    writable,
)
from .work import Operation, Work, end_completers, forget_completers, start_completers

NAME = "unbroken"
# How much longer than the timeout of a monitored barrier ranks wait for rank 0 to say who is
# missing.
_GRACE_S = 2
_SUM = dist.ReduceOp.SUM


def _timeout_of(opts) -> timedelta | None:
    timeout = getattr(opts, "timeout", None)
    return timeout if timeout is not None and timeout > timedelta(0) else None


class Backend(_Backend):
    """The backend of a group, for tensors on the CPU."""

    def __init__(
        self, store, rank: int, size: int, timeout: timedelta, global_rank: int | None = None
    ):
        super().__init__(rank, size)
        self._rank, self._size, self._store, self._timeout = rank, size, store, timeout
        self._global_rank = rank if global_rank is None else global_rank
        # Operations that are not over, in the order in which they were begun.
        self._open: dict[int, Operation] = {}
        self._numbers, self._barriers = 0, itertools.count()
        self._coalescing = threading.local()
        start_completers()
        self._comm, self._id = join(store, rank, size, timeout, self._global_rank)
        _backends.add(self)

    def getBackendName(self) -> str:
        return NAME

    def __repr__(self):
        return f"Backend({NAME}, rank {self._rank} of {self._size})"

    @property
    def options(self) -> Any:
        return _Backend.Options(NAME, self._timeout)

    @property
    def supports_splitting(self) -> bool:
        return True

    @property
    def supports_coalescing(self) -> bool:
        # As gloo: batch_isend_irecv gives a Work for each.
        return False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connections are made with the group."""

    def set_timeout(self, timeout: timedelta) -> None:
        """How long operations may stand still from now on; at this rank."""
        self._timeout = timeout
        self._living().set_timeout(milliseconds(timeout))

    def counters(self) -> dict:
        """Operations that were done, paths that failed, streams that moved, frames that were sent
        again."""
        values = self._living().counters()
        return {name: getattr(values, name) for name, _ in values._fields_}

    def _get_sequence_number_for_group(self) -> int:
        return self._numbers

    # Beginning and ending

    def _living(self) -> coll.Communicator:
        comm = self._comm
        if comm is None:
            raise dist.DistBackendError(
                "the group was destroyed or aborted, or made before this process was forked: "
                "make another"
            )
        return comm

    def hold(self, operation: Operation) -> None:
        """Keeps an operation, and so its memory, until it is over."""
        self._open[id(operation)] = operation

    def release(self, operation: Operation) -> None:
        self._open.pop(id(operation), None)

    def _begin(self, name: str, arguments) -> coll.Request:
        try:
            return self._living().begin(name, *arguments)
        except coll.Error as error:
            raise dist.DistBackendError(str(error)) from error

    def _do(self, plan: Plan, opts=None) -> Work:
        """Begins what was planned. If a call is refused, those before it go on, and their memory
        stays until they are over; nothing is copied."""
        operations = []
        try:
            for name, arguments, keeps, copies in plan.calls:
                operations.append(Operation(self, self._begin(name, arguments), keeps, copies))
        except BaseException:
            for operation in operations:
                operation.forget_results()
                operation.watch()
            raise
        self._numbers += 1
        together = getattr(self._coalescing, "operations", None)
        if together is not None:
            together += operations
        return Work(operations, plan.results, _timeout_of(opts))

    def start_coalescing(self) -> None:
        """What this thread asks for from now on is waited for together."""
        self._coalescing.operations = []

    def end_coalescing(self) -> Work:
        operations, self._coalescing.operations = (
            getattr(self._coalescing, "operations", None),
            None,
        )
        if operations is None:
            raise RuntimeError("nothing is coalesced: start_coalescing comes first")
        return Work(operations, [])

    def shutdown(self) -> None:
        """Gives up receives of which nothing has come, waits for what else is under way and leaves.
        If that is interrupted, the group is aborted."""
        _backends.discard(self)
        comm, self._comm = self._comm, None
        if comm is not None:
            try:
                comm.finalize()
                self._end_all()
            except BaseException:
                comm.abort()
                raise
            comm.destroy()

    def abort(self) -> None:
        """Ends what is under way with an error, at all ranks."""
        _backends.discard(self)
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()
            self._end_all()

    def _end_all(self):
        for operation in self._open.copy().values():
            operation.drive(None)

    def is_idle(self) -> bool:
        """Whether all that was begun is over."""
        return all(operation.drive(0) for operation in self._open.copy().values())

    def split(self, store, ranks, opts) -> "Backend | None":
        """A backend of some of the ranks, in that order; they alone call it. None for a rank that
        is not among them."""
        if self._rank not in ranks:
            return None
        timeout = opts._timeout if opts is not None else self._timeout
        return Backend(store, ranks.index(self._rank), len(ranks), timeout, self._global_rank)

    # Reductions

    def _plan_allreduce(self, tensor: torch.Tensor, op) -> Plan:
        check_writable(tensor)
        kind, by, factor = reduction(tensor, op)
        if factor is None:
            flat, copies = changeable(tensor)
        else:
            flat = readable(tensor) * factor
            copies = [(tensor, flat)]
        at = flat.data_ptr()
        return Plan([tensor]).call(
            "AllReduce", at, at, flat.numel(), kind, by, keeps=[flat], copies=copies
        )

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        op = opts.reduceOp if opts is not None else _SUM
        return self._do(
            Plan(tensors).with_all([self._plan_allreduce(tensor, op) for tensor in tensors]), opts
        )

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        (tensor,), root = tensors, opts.rootRank
        is_root = self._rank == root
        check_writable(tensor) if is_root else check_readable(tensor)
        kind, by, factor = reduction(tensor, opts.reduceOp)
        flat = readable(tensor) if factor is None else readable(tensor) * factor
        into, copies = flat, []
        if is_root and (factor is not None or not is_plain(tensor)):
            copies = [(tensor, flat)]
        to = into.data_ptr() if is_root else None
        plan = Plan(tensors).call(
            "Reduce", flat.data_ptr(), to, flat.numel(), kind, by, root, keeps=[flat], copies=copies
        )
        return self._do(plan, opts)

    def _plan_reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op) -> Plan:
        check_writable(output)
        check_readable(tensor)
        if tensor.numel() != output.numel() * self._size or tensor.dtype != output.dtype:
            right = f"an input of {output.numel() * self._size} {output.dtype} is right"
            raise ValueError(f"reduce_scatter: {right}, not of {tensor.numel()} {tensor.dtype}")
        kind, by, factor = reduction(output, op)
        flat = readable(tensor) if factor is None else readable(tensor) * factor
        into, copies = writable(output)
        # In place is the rank's own part alone.
        if overlap(flat, into) and into.data_ptr() != flat.data_ptr() + self._rank * bytes_of(into):
            flat = flat.clone()
        arguments = flat.data_ptr(), into.data_ptr(), into.numel(), kind, by
        return Plan([output]).call("ReduceScatter", *arguments, keeps=[flat, into], copies=copies)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        opts: Any = None,
    ) -> Work:
        op = opts.reduceOp if opts is not None else _SUM
        return self._do(self._plan_reduce_scatter(output, tensor, op), opts)

    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: Any = None,
    ) -> Work:
        (output,), (tensors,) = outputs, inputs
        check_equal(tensors, output, self._size, "reduce_scatter")
        check_readable(*tensors)
        return self.reduce_scatter_single(output, flat_of(tensors), opts)

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any = None,
    ) -> Work:
        op = opts.reduceOp if opts is not None else _SUM
        plans = [self._plan_reduce_scatter(o, i, op) for o, i in zip(outputs, inputs, strict=True)]
        return self._do(Plan(outputs).with_all(plans), opts)

    # What moves data alone takes it for bytes.

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        plans = [self._plan_broadcast(tensor, opts.rootRank) for tensor in tensors]
        return self._do(Plan(tensors).with_all(plans), opts)

    def _plan_broadcast(self, tensor: torch.Tensor, root: int) -> Plan:
        if self._rank == root:
            check_readable(tensor)
            flat, copies = readable(tensor), []
        else:
            check_writable(tensor)
            flat, copies = writable(tensor)
        at = flat.data_ptr()
        return Plan([tensor]).call(
            "Broadcast", at, at, bytes_of(flat), Type.UINT8, root, keeps=[flat], copies=copies
        )

    def _plan_all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Plan:
        check_writable(output)
        check_readable(tensor)
        if output.numel() != tensor.numel() * self._size or output.dtype != tensor.dtype:
            right = f"an output of {tensor.numel() * self._size} {tensor.dtype} is right"
            raise ValueError(f"all_gather: {right}, not of {output.numel()} {output.dtype}")
        flat = readable(tensor)
        into, copies = writable(output)
        if overlap(flat, into) and flat.data_ptr() != into.data_ptr() + self._rank * bytes_of(flat):
            flat = flat.clone()
        arguments = flat.data_ptr(), into.data_ptr(), bytes_of(flat), Type.UINT8
        return Plan([output]).call("AllGather", *arguments, keeps=[flat, into], copies=copies)

    def all_gather_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        opts: Any = None,
    ) -> Work:
        return self._do(self._plan_all_gather(output, tensor), opts)

    def _plan_all_gather_list(self, tensors: list, tensor: torch.Tensor) -> Plan:
        check_readable(tensor)
        check_writable(*tensors)
        check_equal(tensors, tensor, self._size, "all_gather")
        flat = readable(tensor)
        into = torch.empty((self._size, flat.numel()), dtype=flat.dtype)
        copies = [(t, part.view(t.shape)) for t, part in zip(tensors, into, strict=True)]
        arguments = flat.data_ptr(), into.data_ptr(), bytes_of(flat), Type.UINT8
        return Plan([tensors]).call("AllGather", *arguments, keeps=[flat, into], copies=copies)

    def allgather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any = None,
    ) -> Work:
        (tensors,), (tensor,) = outputs, inputs
        plan = self._plan_all_gather_list(tensors, tensor)
        return self._do(plan, opts)

    def allgather_coalesced(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any = None,
    ) -> Work:
        # outputs[r][k] is what rank r has as inputs[k].
        if len(outputs) != self._size or any(len(of_rank) != len(inputs) for of_rank in outputs):
            raise ValueError(
                f"all_gather_coalesced: {self._size} lists of {len(inputs)} tensors are right"
            )
        by_input = [list(tensors) for tensors in zip(*outputs, strict=True)]
        plans = [self._plan_all_gather_list(o, i) for o, i in zip(by_input, inputs, strict=True)]
        return self._do(Plan(outputs).with_all(plans), opts)

    def all_gather_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any = None,
    ) -> Work:
        plans = [self._plan_all_gather(o, i) for o, i in zip(outputs, inputs, strict=True)]
        return self._do(Plan(outputs).with_all(plans), opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        check_writable(output)
        check_readable(tensor)
        if output.dtype != tensor.dtype:
            raise ValueError(
                f"all_to_all: {tensor.dtype} is sent and {output.dtype} received; one type is right"
            )
        counts = [self._counts(tensor, input_splits), self._counts(output, output_splits)]
        flat = readable(tensor)
        into, copies = writable(output)
        if overlap(flat, into):
            flat = flat.clone()
        arguments = flat.data_ptr(), counts[0], into.data_ptr(), counts[1], Type.UINT8
        return self._do(
            Plan([output]).call("AllToAllv", *arguments, keeps=[flat, into], copies=copies), opts
        )

    def _counts(self, of: torch.Tensor, splits: list):
        """Bytes to or from each rank."""
        rows = of.shape[0] if of.dim() else 0
        if not splits and rows % self._size:
            raise ValueError(
                f"all_to_all: {rows} rows are not divided by {self._size} ranks; name split sizes"
            )
        splits = splits or [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows or min(splits) < 0:
            raise ValueError(
                f"all_to_all: split sizes {list(splits)} do not make {rows} rows among "
                f"{self._size} ranks"
            )
        row = bytes_of(of) // rows if rows else 0
        return (c_size_t * self._size)(*[split * row for split in splits])

    def alltoall(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any = None,
    ) -> Work:
        check_writable(*outputs)
        check_readable(*inputs)
        if len(outputs) != self._size or len(inputs) != self._size:
            raise ValueError(
                f"all_to_all: {self._size} tensors to send and {self._size} to receive are right"
            )
        return self._do(self._plan_exchange(inputs, outputs, outputs), opts)

    def _plan_exchange(self, inputs: list, outputs: list, results: list) -> Plan:
        """What each rank is sent and is awaited from each, as one operation of all ranks, which
        compares sizes at both ends. None: nothing."""
        counts = [
            (c_size_t * self._size)(*(0 if t is None else bytes_of(t) for t in tensors))
            for tensors in (inputs, outputs)
        ]
        flat = torch.cat([empty_bytes(), *(as_bytes(t) for t in inputs if t is not None)])
        into = torch.empty(sum(counts[1]), dtype=torch.uint8)
        parts = into.split(list(counts[1]))
        copies = [
            (t, part.view(t.dtype).view(t.shape))
            for t, part in zip(outputs, parts, strict=True)
            if t is not None
        ]
        arguments = flat.data_ptr(), counts[0], into.data_ptr(), counts[1], Type.UINT8
        return Plan(results).call("AllToAllv", *arguments, keeps=[flat, into], copies=copies)

    def barrier(self, opts: Any = None) -> Work:
        return self._do(Plan([]).call("Barrier"), opts)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Rank 0 waits for the others by the store, and names those that do not come in time; so
        the group is as it was."""
        timeout = _timeout_of(opts) or self._timeout
        ends = time.monotonic() + timeout.total_seconds()
        # By the group's id: the store may have been an earlier group's. What has ended without this
        # rank is not its barrier.
        prefix = f"monitored/{self._id}/{next(self._barriers)}"
        while self._rank != 0 and self._store.check([f"{prefix}/all"]):
            prefix = f"monitored/{self._id}/{next(self._barriers)}"
        if self._rank != 0:
            self._store.set(f"{prefix}/{self._rank}", "here")
            # Rank 0 says who is missing when the time is over.
            if not wait_for(self._store, f"{prefix}/all", ends + _GRACE_S):
                raise dist.DistBackendError(
                    f"monitored_barrier: rank 0 has not let rank {self._rank} go within {timeout}"
                )
            said = self._store.get(f"{prefix}/all").decode()
            if said != "all":
                raise dist.DistBackendError(said)
            return
        missing = []
        for rank in range(1, self._size):
            if not wait_for(self._store, f"{prefix}/{rank}", ends):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        text = f"monitored_barrier: {ranks} did not come within {timeout}"
        self._store.set(f"{prefix}/all", text if missing else "all")
        if missing:
            raise dist.DistBackendError(text)

    # Between two ranks

    def _plan_send(self, tensor: torch.Tensor, to: int, tag: int) -> Plan:
        check_readable(tensor)
        flat = readable(tensor)
        return Plan([tensor]).call(
            "SendTag", flat.data_ptr(), bytes_of(flat), Type.UINT8, to, tag, keeps=[flat]
        )

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        return self._do(self._plan_send(tensor, to, _checked(tag)))

    def _plan_recv(self, tensor: torch.Tensor, source: int, tag: int) -> Plan:
        check_writable(tensor)
        into, copies = writable(tensor)
        arguments = into.data_ptr(), bytes_of(into), Type.UINT8, source, tag
        return Plan([tensor]).call("RecvTag", *arguments, keeps=[into], copies=copies)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        return self._do(self._plan_recv(tensor, source, _checked(tag)))

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Work:
        (tensor,) = tensors
        return self._do(self._plan_recv(tensor, coll.ANY_SOURCE, _checked(tag)))

    def gather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any,
    ) -> Work:
        (tensor,) = inputs
        if self._rank != opts.rootRank:
            return self._do(self._plan_gather(None, tensor, [], opts.rootRank), opts)
        (tensors,) = outputs
        return self._do(self._plan_gather(tensors, tensor, outputs, self._rank), opts)

    def _plan_gather(self, tensors: list | None, tensor: torch.Tensor, results, root: int) -> Plan:
        """Of a tensor of each rank; where they go is known to the root alone."""
        check_readable(tensor)
        if tensors is not None:
            check_writable(*tensors)
            check_equal(tensors, tensor, self._size, "gather")
        to_root = [tensor if rank == root else None for rank in range(self._size)]
        return self._plan_exchange(to_root, tensors or [None] * self._size, results)

    def gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Work:
        if self._rank != opts.rootRank:
            return self._do(self._plan_gather(None, tensor, [], opts.rootRank), opts)
        check_writable(output)
        if output.numel() != tensor.numel() * self._size or output.dtype != tensor.dtype:
            right = f"an output of {tensor.numel() * self._size} {tensor.dtype} is right"
            raise ValueError(f"gather: {right}, not of {output.numel()} {output.dtype}")
        if output.is_contiguous():
            parts = output.view(self._size, -1)
        elif output.dim() and output.shape[0] % self._size == 0:
            parts = output.chunk(self._size)
        else:
            raise ValueError(
                f"gather: an output whose rows are divided by {self._size} ranks, or a contiguous "
                "one, is right"
            )
        return self._do(self._plan_gather(list(parts), tensor, [output], self._rank), opts)

    gather_into_tensor = gather_single

    def scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: Any,
    ) -> Work:
        (tensor,) = outputs
        check_writable(tensor)
        if self._rank == opts.rootRank:
            (tensors,) = inputs
            check_readable(*tensors)
            check_equal(tensors, tensor, self._size, "scatter")
        else:
            tensors = [None] * self._size
        from_root = [tensor if rank == opts.rootRank else None for rank in range(self._size)]
        return self._do(self._plan_exchange(tensors, from_root, outputs), opts)


def _checked(tag: int) -> int:
    if not 0 <= tag < 2**63:
        raise ValueError(f"tag {tag}; 0 to {2**63 - 1} is right")
    return tag


# Those whose programs end without destroying them leave all the same: others would take the end of
# the process for its death. What is under way then nobody will wait for.
_backends = weakref.WeakSet()


def _after_fork():
    """In a forked child groups are its parent's, which goes on with them: nothing is left, ended or
    said."""
    for backend in list(_backends):
        backend._comm, backend._open = None, {}
    _backends.clear()
    forget_completers()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _leave():
    for backend in list(_backends):
        try:
            backend.shutdown() if backend.is_idle() else backend.abort()
        except coll.Error:
            pass  # it is broken, and whoever waited has heard
    end_completers()
