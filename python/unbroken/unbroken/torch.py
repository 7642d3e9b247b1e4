"""A backend of torch.distributed that outlives NICs, for CPU tensors.

    import torch.distributed as dist
    import unbroken.torch
    dist.init_process_group("unbroken")

A ProcessGroup in Python over the C API. Operations are queued and go on by themselves; `Work.wait` does their work meanwhile, and futures are completed
by threads that sleep. With and without failures results are the same, bit for bit. The group's timeout is how long an operation may stand still.

Environment: UNBROKEN_HOST is the host of the emulated network that this process is on (`unbroken run` sets it); UNBROKEN_HOSTS, `a,b,c` say, names one for
each rank of the job instead. UNBROKEN_COLL_ADDRESS is where others reach this process [default: the address that leads to MASTER_ADDR]."""

import atexit
import os
import socket
import threading
import weakref
from collections import deque
from ctypes import c_size_t
from queue import SimpleQueue

import torch
import torch.distributed as dist

from . import coll
from .coll import Op, Type

NAME = "unbroken"
# Operations that may be under way; who asks for more waits for the oldest.
QUEUE = 1024
_LOOK_MS = 1000
# For a callback of a future that does not end; what the program does not wait for does not hold its end up for ever.
_JOIN_S = 10

_TYPES = {
    torch.int8: Type.INT8,
    torch.uint8: Type.UINT8,
    torch.int32: Type.INT32,
    torch.int64: Type.INT64,
    torch.float16: Type.FLOAT16,
    torch.bfloat16: Type.BFLOAT16,
    torch.float32: Type.FLOAT32,
    torch.float64: Type.FLOAT64,
}
_R = dist.ReduceOp.RedOpType
_OPS = {_R.SUM: Op.SUM, _R.PRODUCT: Op.PROD, _R.MAX: Op.MAX, _R.MIN: Op.MIN, _R.AVG: Op.AVG}
# Of bool, which is a byte of 0 or 1.
_BOOL_OPS = {_R.SUM: Op.MAX, _R.MAX: Op.MAX, _R.BOR: Op.MAX, _R.PRODUCT: Op.MIN, _R.MIN: Op.MIN, _R.BAND: Op.MIN}


def _reduction(tensor: torch.Tensor, op) -> tuple:
    """Type and operator of a reduction, as the library counts them."""
    kind = op.op if hasattr(op, "op") else op
    types, ops = ({torch.bool: Type.UINT8}, _BOOL_OPS) if tensor.dtype is torch.bool else (_TYPES, _OPS)
    if tensor.dtype not in types:
        raise TypeError(f"{tensor.dtype} is not reduced by '{NAME}'; these are: {', '.join(map(str, _TYPES))}, torch.bool")
    if kind not in ops:
        raise ValueError(f"{kind} of {tensor.dtype} is not done by '{NAME}'; SUM, PRODUCT, MAX, MIN and AVG are, and of bool BAND and BOR")
    return types[tensor.dtype], ops[kind]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _check(*tensors: torch.Tensor):
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.is_sparse:
            raise TypeError(f"a tensor on {tensor.device}, {tensor.layout}; '{NAME}' takes dense tensors on the CPU")


def _equal(tensors: list, of: torch.Tensor, count: int, what: str):
    if len(tensors) != count or any(t.numel() != of.numel() or t.dtype != of.dtype for t in tensors):
        raise ValueError(f"{what}: {count} tensors of {of.numel()} {of.dtype} are right")


class Work(dist._Work):
    """Requests, the tensors that they need, and what is copied when they are over."""

    def __init__(self, group: "ProcessGroup", requests: list, keeps: list, results: list, copies: list, lane, source=-1):
        super().__init__()
        self._group, self._requests, self._keeps = group, deque(requests), keeps
        self._results, self._copies, self._lane, self._source = results, copies, lane, source
        self._lock, self._over = threading.Lock(), threading.Event()
        self._error = self._future = None

    def _finish(self, look) -> bool:
        """Looks at the requests until one is not over; copies what is to be copied once all are."""
        with self._lock:
            try:
                while self._requests:
                    if look(self._requests[0]) is False:
                        return False
                    self._requests.popleft()
                if not self._over.is_set():
                    for to, tensor in self._copies:
                        to.copy_(tensor)
            except coll.Error as error:
                self._error = dist.DistBackendError(str(error))
                self._requests.clear()
            if not self._over.is_set():
                self._keeps = self._copies = ()
                self._over.set()
                if self._future is not None:
                    self._complete()
            return True

    def _complete(self):
        if self._error is None:
            self._future.set_result(self._results)
        else:
            self._future.set_exception(self._error)

    def wait(self, timeout=None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0
        if self._future is not None:
            # A thread waits for it already.
            if not self._over.wait(seconds or None):
                raise TimeoutError(f"the operation is under way after {seconds} s")
        elif seconds > 0:
            if not self._finish(lambda request: request.sleep(int(seconds * 1000))):
                raise TimeoutError(f"the operation is under way after {seconds} s")
        else:
            self._finish(lambda request: request.wait())
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._over.is_set() or (self._future is None and self._finish(lambda request: request.test()))

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self):
        return self._error

    def synchronize(self):
        self.wait()

    def result(self) -> list:
        return self._results

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self):
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._over.is_set():
                    self._complete()
                else:
                    self._group._completer(self._lane).put(self)
            return self._future

    # As C++ has it.
    getFuture = get_future


def _complete_all(works: SimpleQueue):
    """Completes the futures of operations that are over in the order in which they were begun."""
    while (work := works.get()) is not None:
        while not work._finish(lambda request: request.sleep(_LOOK_MS)):
            pass


class ProcessGroup(dist.ProcessGroup):
    """What `init_process_group("unbroken")` makes."""

    def __init__(self, store, rank: int, size: int, timeout, global_rank: int):
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._open, self._completers = deque(), {}
        self._name = self._description = ""
        address = os.environ.setdefault("UNBROKEN_COLL_ADDRESS", _own_address())
        if rank == 0:
            store.set("id", coll.unique_id())
        hosts = os.environ.get("UNBROKEN_HOSTS", "").split(",")
        self._comm = coll.Communicator(
            size,
            rank,
            store.get("id").decode(),
            host=hosts[global_rank % len(hosts)] or None,
            address=address,
            timeout_ms=min(int(timeout.total_seconds() * 1000), 2**32 - 1),
            queue=QUEUE,
        )
        _groups.add(self)

    def getBackendName(self):
        return NAME

    def __repr__(self):
        return f"ProcessGroup({NAME}, rank {self._rank} of {self._size})"

    def getRank(self):
        return self._rank

    def getSize(self):
        return self._size

    # The base class keeps these in backends, which this one has none of.

    def _set_group_name(self, name):
        self._name = name

    setGroupName = _set_group_name

    def getGroupName(self):
        return self._name

    group_name = property(getGroupName)

    def _set_group_desc(self, description):
        self._description = description

    setGroupDesc = _set_group_desc

    def getGroupDesc(self):
        return self._description

    group_desc = property(getGroupDesc)

    def _get_backend(self, device):
        # batch_isend_irecv asks it whether it coalesces.
        return self

    def counters(self) -> dict:
        """Operations that were done, paths that failed, streams that moved, frames that were sent again."""
        values = self._comm.counters()
        return {name: getattr(values, name) for name, _ in values._fields_}

    # Beginning and ending

    def _completer(self, lane) -> SimpleQueue:
        if lane not in self._completers:
            works = SimpleQueue()
            thread = threading.Thread(target=_complete_all, args=(works,), name=f"unbroken-{lane}", daemon=True)
            self._completers[lane] = works, thread
            thread.start()
        return self._completers[lane][0]

    def _end_completers(self):
        """Ends the threads once they have completed what they wait for. An interpreter that ends while one of them is in PyTorch's code aborts."""
        threads = []
        for works, thread in self._completers.values():
            works.put(None)
            threads.append(thread)
        self._completers = {}
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _begin(self, name: str, *arguments) -> coll.Request:
        while True:
            try:
                return self._comm.begin(name, *arguments)
            except coll.Error as error:
                if error.code != coll.QUEUE_FULL or not self._open:
                    raise dist.DistBackendError(str(error)) from error
                # Its error is its own.
                self._open.popleft()._finish(lambda request: request.wait())

    def _work(self, requests, keeps, results, copies=(), lane="all", source=-1) -> Work:
        work = Work(self, requests, keeps, results, list(copies), lane, source)
        # Memory that operations need stays until they are over, whoever drops the Work.
        while self._open and (self._open[0]._over.is_set() or self._open[0]._finish(lambda request: request.sleep(0))):
            self._open.popleft()
        self._open.append(work)
        return work

    def shutdown(self):
        """Waits for what is under way and leaves."""
        _groups.discard(self)
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.destroy()
            while self._open:
                self._open.popleft()._finish(lambda request: request.wait())
            self._end_completers()

    def abort(self):
        """Ends what is under way with an error, at all ranks."""
        _groups.discard(self)
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()
            self._end_completers()

    # Reductions

    def allreduce(self, tensors, opts=None):
        _check(*tensors)
        op = opts.reduceOp if opts is not None else _R.SUM
        requests, keeps, copies = [], [], []
        for tensor in tensors:
            kind, by = _reduction(tensor, op)
            flat = tensor.contiguous()
            requests.append(self._begin("AllReduce", flat.data_ptr(), flat.data_ptr(), flat.numel(), kind, by))
            keeps.append(flat)
            copies += [(tensor, flat)] if flat.data_ptr() != tensor.data_ptr() else []
        return self._work(requests, keeps, tensors, copies)

    allreduce_coalesced = allreduce

    def reduce(self, tensors, opts):
        (tensor,) = tensors
        _check(tensor)
        kind, by = _reduction(tensor, opts.reduceOp)
        flat, root = tensor.contiguous(), opts.rootRank
        to = flat.data_ptr() if self._rank == root else None
        request = self._begin("Reduce", flat.data_ptr(), to, flat.numel(), kind, by, root)
        copies = [(tensor, flat)] if to and flat.data_ptr() != tensor.data_ptr() else []
        return self._work([request], [flat], tensors, copies)

    def reduce_scatter_single(self, output, tensor, opts=None):
        _check(output, tensor)
        if tensor.numel() != output.numel() * self._size or tensor.dtype != output.dtype:
            raise ValueError(f"reduce_scatter: an input of {output.numel() * self._size} {output.dtype} is right, not of {tensor.numel()} {tensor.dtype}")
        kind, by = _reduction(output, opts.reduceOp if opts is not None else _R.SUM)
        flat, into = tensor.contiguous(), _fresh(output)
        begins, step = flat.data_ptr(), _bytes(output)
        if begins < into.data_ptr() + step and into.data_ptr() < begins + _bytes(flat) and into.data_ptr() != begins + self._rank * step:
            flat = flat.clone()
        request = self._begin("ReduceScatter", flat.data_ptr(), into.data_ptr(), into.numel(), kind, by)
        return self._work([request], [flat, into], [output], [(output, into)] if into is not output else [])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs, inputs, opts=None):
        (output,), (tensors,) = outputs, inputs
        _equal(tensors, output, self._size, "reduce_scatter")
        return self.reduce_scatter_single(output, torch.cat([t.reshape(-1) for t in tensors]), opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        return self._together([self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # What moves data alone takes it for bytes.

    def broadcast(self, tensors, opts):
        (tensor,) = tensors
        _check(tensor)
        flat = tensor.contiguous()
        request = self._begin("Broadcast", flat.data_ptr(), flat.data_ptr(), _bytes(flat), Type.UINT8, opts.rootRank)
        return self._work([request], [flat], tensors, [(tensor, flat)] if flat.data_ptr() != tensor.data_ptr() else [])

    def all_gather_single(self, output, tensor, opts=None):
        _check(output, tensor)
        if output.numel() != tensor.numel() * self._size or output.dtype != tensor.dtype:
            raise ValueError(f"all_gather: an output of {tensor.numel() * self._size} {tensor.dtype} is right, not of {output.numel()} {output.dtype}")
        flat, into = tensor.contiguous(), _fresh(output)
        begins, step = into.data_ptr(), _bytes(flat)
        if begins < flat.data_ptr() + step and flat.data_ptr() < begins + _bytes(into) and flat.data_ptr() != begins + self._rank * step:
            flat = flat.clone()
        request = self._begin("AllGather", flat.data_ptr(), into.data_ptr(), step, Type.UINT8)
        return self._work([request], [flat, into], [output], [(output, into)] if into is not output else [])

    _allgather_base = all_gather_single

    def allgather(self, outputs, inputs, opts=None):
        (tensors,), (tensor,) = outputs, inputs
        _check(tensor, *tensors)
        _equal(tensors, tensor, self._size, "all_gather")
        flat = tensor.contiguous()
        into = flat.new_empty((self._size, flat.numel()))
        request = self._begin("AllGather", flat.data_ptr(), into.data_ptr(), _bytes(flat), Type.UINT8)
        return self._work([request], [flat, into], outputs, [(t, into[k].view(t.shape)) for k, t in enumerate(tensors)])

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        return self._together([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts=None):
        _check(output, tensor)
        counts = []
        for given, of in ((input_splits, tensor), (output_splits, output)):
            if not given and of.shape[0] % self._size:
                raise ValueError(f"all_to_all: {of.shape[0]} rows are not divided by {self._size} ranks; name split sizes")
            given = given or [of.shape[0] // self._size] * self._size
            if len(given) != self._size or sum(given) != of.shape[0]:
                raise ValueError(f"all_to_all: split sizes {list(given)} do not make {of.shape[0]} rows among {self._size} ranks")
            row = _bytes(of) // of.shape[0] if of.shape[0] else 0
            counts.append((c_size_t * self._size)(*[rows * row for rows in given]))
        flat, into = tensor.contiguous(), _fresh(output)
        request = self._begin("AllToAllv", flat.data_ptr(), counts[0], into.data_ptr(), counts[1], Type.UINT8)
        return self._work([request], [flat, into], [output], [(output, into)] if into is not output else [])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs, inputs, opts=None):
        _check(*outputs, *inputs)
        counts = [(c_size_t * self._size)(*map(_bytes, tensors)) for tensors in (inputs, outputs)]
        flat = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in inputs])
        into = torch.empty(sum(counts[1]), dtype=torch.uint8)
        request = self._begin("AllToAllv", flat.data_ptr(), counts[0], into.data_ptr(), counts[1], Type.UINT8)
        parts = into.split(list(counts[1]))
        return self._work([request], [flat, into], outputs, [(t, p.view(t.dtype).view(t.shape)) for t, p in zip(outputs, parts)])

    def barrier(self, opts=None):
        return self._work([self._begin("Barrier")], [], [])

    def _together(self, works: list) -> Work:
        """One Work for several, whose requests and error are the last ones'. Some may be over already, and out of the queue."""
        requests = [request for work in works for request in work._requests]
        results = [result for work in works for result in work._results]
        copies = [copy for work in works for copy in work._copies]
        keeps = [work._keeps for work in works]
        for work in works:
            if work in self._open:
                self._open.remove(work)
        together = self._work(requests, keeps, results, copies)
        together._error = next((work._error for work in works if work._error), together._error)
        return together

    # Between two ranks

    def send(self, tensors, to: int, tag: int = 0):
        (tensor,) = tensors
        _check(tensor)
        flat = tensor.contiguous()
        request = self._begin("Send", flat.data_ptr(), _bytes(flat), Type.UINT8, to)
        return self._work([request], [flat], tensors, lane=("to", to))

    def recv(self, tensors, source: int, tag: int = 0):
        (tensor,) = tensors
        _check(tensor)
        into = _fresh(tensor)
        request = self._begin("Recv", into.data_ptr(), _bytes(into), Type.UINT8, source)
        return self._work([request], [into], tensors, [(tensor, into)] if into is not tensor else [], ("from", source), source)

    def recv_anysource(self, tensors, tag: int = 0):
        raise NotImplementedError(f"'{NAME}' receives from a rank that is named; give recv its src")

    def gather(self, outputs, inputs, opts):
        (tensor,), root = inputs, opts.rootRank
        if self._rank != root:
            return self.send([tensor], root)
        (tensors,) = outputs
        _equal(tensors, tensor, self._size, "gather")
        tensors[root].copy_(tensor)
        return self._together([self.recv([t], rank) for rank, t in enumerate(tensors) if rank != root])

    def scatter(self, outputs, inputs, opts):
        (tensor,), root = outputs, opts.rootRank
        if self._rank != root:
            return self.recv([tensor], root)
        (tensors,) = inputs
        _equal(tensors, tensor, self._size, "scatter")
        tensor.copy_(tensors[root])
        return self._together([self.send([t], rank) for rank, t in enumerate(tensors) if rank != root])


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """Where a result is written: the tensor, or what is copied to it then."""
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _own_address() -> str:
    """The address of this machine that leads to the job's master."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, kind, _, _, where = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing
        return probe.getsockname()[0]


# Those whose programs end without destroying them leave all the same: others would take the end of the process for its death. What is under way then
# nobody will wait for.
_groups = weakref.WeakSet()


@atexit.register
def _leave():
    for group in list(_groups):
        try:
            idle = all(work._over.is_set() or work._finish(lambda request: request.sleep(0)) for work in group._open)
            group.shutdown() if idle else group.abort()
        except coll.Error:
            pass  # it is broken, and whoever waited has heard


def _create(options, _backend_options=None) -> ProcessGroup:
    rank, members = options.group_rank, options.global_ranks_in_group
    return ProcessGroup(options.store, rank, options.group_size, options.timeout, members[rank] if members else rank)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
