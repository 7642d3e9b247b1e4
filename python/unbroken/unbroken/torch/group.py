"""The process group: a thin front of the backend.

PyTorch's own ProcessGroup hands operations to a backend, but wraps each Work so that a program can
wait for it and ask for its future, and not whether it is completed or from which rank it came. So
this one overrides the operations, and gives Python the Work itself. All else (names, splitting,
coalescing, timeouts) is PyTorch's, over the backend that is registered.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .backend import NAME, Backend
from .work import Work

_KINDS = dist.ProcessGroup.BackendType
# What operations take: as options want it, or one tensor, or one list of tensors, by itself.
_Tensors = torch.Tensor | list[torch.Tensor]
_Lists = list[torch.Tensor] | list[list[torch.Tensor]]


def _options(kind, timeout: timedelta | None = None, **fields):
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    if timeout is not None:
        made.timeout = timeout
    return made


class ProcessGroup(dist.ProcessGroup):
    """What `init_process_group("unbroken")` makes. Operations take options, or the same arguments
    by themselves, as PyTorch's own group does."""

    def __init__(
        self,
        store,
        rank: int,
        size: int,
        timeout: timedelta,
        global_rank: int,
        backend: Backend | None = None,
    ):
        super().__init__(store, rank, size)
        self._store = store
        self._backend = backend or Backend(store, rank, size, timeout, global_rank)
        self._register_backend(torch.device("cpu"), _KINDS.CUSTOM, self._backend)
        self._set_default_backend(_KINDS.CUSTOM)

    def getBackendName(self) -> str:
        return NAME

    def __repr__(self):
        return f"ProcessGroup({NAME}, rank {self.rank()} of {self.size()})"

    def counters(self) -> dict:
        """Operations that were done, paths that failed, streams that moved, frames that were sent
        again."""
        return self._backend.counters()

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> "ProcessGroup | None":
        """A group of some of the ranks, in that order. All ranks of this one call it; None for one
        that is not among them."""
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"{self.group_name}:split:{','.join(map(str, new_ranks))}"
        store = dist.PrefixStore(f"{name}/", self._store)
        options = opts or self._backend.options
        if timeout is not None:
            options._timeout = timeout
        backend = self._backend.split(store, list(new_ranks), options)
        group = ProcessGroup(
            store, new_ranks.index(self.rank()), len(new_ranks), options._timeout, 0, backend
        )
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group

    # Operations

    def allreduce(
        self,
        tensors: _Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if not isinstance(opts, dist.AllreduceOptions):
            opts = _options(
                dist.AllreduceOptions,
                timeout,
                **({} if opts is None else {"reduceOp": _reduce_op(opts)}),
            )
        return self._backend.allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return self._backend.allreduce_coalesced(tensors, opts)

    def broadcast(
        self,
        tensors: _Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if not isinstance(opts, dist.BroadcastOptions):
            opts = _options(dist.BroadcastOptions, timeout, rootRank=opts or 0)
        return self._backend.broadcast(tensors, opts)

    def reduce(
        self,
        tensors: _Tensors,
        opts: Any = None,
        op: Any = dist.ReduceOp.SUM,
        timeout: timedelta | None = None,
    ) -> Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if not isinstance(opts, dist.ReduceOptions):
            opts = _options(
                dist.ReduceOptions, timeout, rootRank=opts or 0, reduceOp=_reduce_op(op)
            )
        return self._backend.reduce(tensors, opts)

    def allgather(
        self,
        outputs: _Lists,
        inputs: _Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs, opts = (
                [outputs],
                [inputs],
                _options(dist.AllgatherOptions, opts or timeout),
            )
        return self._backend.allgather(outputs, inputs, opts)

    def allgather_coalesced(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any = None,
    ) -> Work:
        return self._backend.allgather_coalesced(outputs, inputs, opts)

    def all_gather_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        opts: Any = None,
    ) -> Work:
        return self._backend.all_gather_single(output, tensor, opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any = None,
    ) -> Work:
        return self._backend.all_gather_single_coalesced(outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self,
        outputs: _Lists,
        inputs: _Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        if not isinstance(opts, dist.GatherOptions):
            opts = _options(dist.GatherOptions, timeout, rootRank=opts or 0)
        return self._backend.gather(outputs, inputs, opts)

    def gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        return self._backend.gather_single(output, tensor, opts or dist.GatherOptions())

    gather_into_tensor = gather_single

    def scatter(
        self,
        outputs: _Tensors,
        inputs: _Lists,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        if not isinstance(opts, dist.ScatterOptions):
            opts = _options(dist.ScatterOptions, timeout, rootRank=opts or 0)
        return self._backend.scatter(outputs, inputs, opts)

    def reduce_scatter(
        self,
        outputs: _Tensors,
        inputs: _Lists,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        if not isinstance(opts, dist.ReduceScatterOptions):
            opts = _options(
                dist.ReduceScatterOptions,
                timeout,
                **({} if opts is None else {"reduceOp": _reduce_op(opts)}),
            )
        return self._backend.reduce_scatter(outputs, inputs, opts)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        opts: Any = None,
    ) -> Work:
        return self._backend.reduce_scatter_single(output, tensor, opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any = None,
    ) -> Work:
        return self._backend.reduce_scatter_single_coalesced(outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        opts = (
            _options(dist.AllToAllOptions, opts or timeout)
            if opts is None or isinstance(opts, timedelta)
            else opts
        )
        return self._backend.all_to_all_single(
            output, tensor, list(output_splits), list(input_splits), opts
        )

    alltoall_base = all_to_all_single

    def alltoall(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        opts = (
            _options(dist.AllToAllOptions, opts or timeout)
            if opts is None or isinstance(opts, timedelta)
            else opts
        )
        return self._backend.alltoall(outputs, inputs, opts)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        opts = (
            _options(dist.BarrierOptions, opts or timeout)
            if opts is None or isinstance(opts, timedelta)
            else opts
        )
        return self._backend.barrier(opts)

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int = 0) -> Work:
        return self._backend.send(tensors, dst_rank, tag)

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int = 0) -> Work:
        return self._backend.recv(tensors, src_rank, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Work:
        return self._backend.recv_anysource(tensors, tag)


def _reduce_op(op):
    """An operator as options take it."""
    return dist.ReduceOp(op) if isinstance(op, dist.ReduceOp.RedOpType) else op
