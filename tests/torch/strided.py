"""One rank of the strided suite: every operation, on tensors of every layout and type, beside gloo
in the same processes.

What is right is computed from what all ranks give. Ours must be right in every case, and must
refuse what cannot hold a result without beginning anything; where gloo is right, too, the two are
equal. What gloo refuses, or gets wrong, is counted and printed.
"""

import sys

import torch.distributed as dist
import unbroken.torch  # noqa: F401

import torch

SHAPE = (2, 3, 4, 2)
INTEGERS = [
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
R = dist.ReduceOp
REDUCTIONS = {"SUM": R.SUM, "PRODUCT": R.PRODUCT, "MAX": R.MAX, "MIN": R.MIN, "AVG": R.AVG}
BITWISE = {"BAND": R.BAND, "BOR": R.BOR, "BXOR": R.BXOR}


def _base(values: torch.Tensor, shape) -> torch.Tensor:
    """Room around and between, which no operation may touch."""
    return torch.full(shape, 99, dtype=torch.float64).to(values.dtype)


def contiguous(values):
    return values.clone()


def transposed(values):
    return values.transpose(0, -1).contiguous().transpose(0, -1)


def channels_last(values):
    return values.to(memory_format=torch.channels_last)


def every_second(values):
    into = _base(values, (*values.shape[:-1], 2 * values.shape[-1]))[..., ::2]
    into.copy_(values)
    return into


def inner(values):
    into = _base(values, tuple(n + 2 for n in values.shape))[
        tuple(slice(1, -1) for _ in values.shape)
    ]
    into.copy_(values)
    return into


def leaf(values):
    return torch.nn.Parameter(channels_last(values), requires_grad=values.is_floating_point())


def inference(values):
    with torch.inference_mode():
        return transposed(values)


LAYOUTS = [contiguous, transposed, channels_last, every_second, inner, leaf, inference]


def conjugated(values):
    return values.conj().resolve_conj().conj()


def negated(values):
    return torch._neg_view((-values).contiguous())


def numbers(rank: int, dtype: torch.dtype, shape=SHAPE, step: int = 0) -> torch.Tensor:
    """Small numbers that differ between ranks, places and steps; sums and products are exact in
    every type."""
    count = torch.Size(shape).numel()
    values = (torch.arange(count) * 7 + rank * 3 + step) % 4 + (1 if dtype is not torch.bool else 0)
    if dtype is torch.bool:
        return (values % 2 == 0).view(shape)
    if dtype.is_complex:
        return torch.complex(values.double(), values.double() - 2).to(dtype).view(shape)
    return values.to(dtype).view(shape)


def reduced(name: str, all_values: list) -> torch.Tensor:
    """The reduction of what all ranks give, by arithmetic in a wide type."""
    dtype = all_values[0].dtype
    if dtype is torch.bool:
        wide = torch.stack([v.long() for v in all_values])
    else:
        wide = torch.stack(
            [v.double() if dtype.is_floating_point else v.long() for v in all_values]
        )
    if name == "SUM":
        result = wide.sum(0)
        return result.bool() if dtype is torch.bool else result.to(dtype)
    if name == "AVG":
        result = wide.sum(0)
        result = (
            result / len(all_values)
            if dtype.is_floating_point
            else torch.div(result, len(all_values), rounding_mode="trunc")
        )
        return result.to(dtype)
    if name == "PRODUCT":
        return wide.prod(0).to(dtype)
    if name in ("MAX", "MIN"):
        return (wide.amax(0) if name == "MAX" else wide.amin(0)).to(dtype)
    result = wide[0]
    for values in wide[1:]:
        result = {"BAND": result & values, "BOR": result | values, "BXOR": result ^ values}[name]
    return result.to(dtype)


class Suite:
    """Runs each case over ours and over gloo, and compares."""

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.gloo = dist.new_group(backend="gloo")
        self.cases, self.wrong, self.gloo_right, self.gloo_refused, self.gloo_wrong = 0, [], 0, 0, 0

    def case(self, what: str, outputs, run, right, gloo: bool = True):
        """`outputs()` makes what is written, `run(group, outputs)` does it; `right`: a list of what
        is right, one for each output."""
        self.cases += 1
        ours = outputs()
        try:
            run(None, ours)
        except Exception as error:
            self.wrong.append(f"{what}: {type(error).__name__}: {error}")
            return
        if not self._equal(ours, right):
            self.wrong.append(
                f"{what}: {ours[0].flatten()[:6].tolist()} instead of "
                f"{right[0].flatten()[:6].tolist()}"
            )
        if not gloo:
            return
        theirs = outputs()
        try:
            run(self.gloo, theirs)
            good = self._equal(theirs, right)
        except Exception:
            self.gloo_refused += 1
            return
        self.gloo_wrong += not good
        self.gloo_right += good

    def _equal(self, got: list, right: list) -> bool:
        return all(
            g.shape == r.shape and torch.equal(g.detach().resolve_conj().resolve_neg(), r)
            for g, r in zip(got, right, strict=True)
        )

    def all(self, dtype, shape=SHAPE, step=0) -> list:
        return [numbers(rank, dtype, shape, step) for rank in range(self.size)]


def reductions(suite: Suite, layout, dtype):
    rank, size = suite.rank, suite.size
    names = dict(REDUCTIONS)
    if not dtype.is_floating_point:
        names.update(BITWISE)
    if dtype is torch.bool:
        del names["AVG"]
    values = suite.all(dtype)
    where = f"{layout.__name__} {dtype}"
    for name, op in names.items():
        right = reduced(name, values)
        # gloo's own sums of unsigned types wider than a byte are not there.
        suite.case(
            f"all_reduce {name} {where}",
            lambda: [layout(values[rank])],
            lambda group, out, op=op: dist.all_reduce(out[0], op, group=group),
            [right],
        )
        root = size - 1
        suite.case(
            f"reduce {name} {where}",
            lambda: [layout(values[rank])],
            lambda group, out, op=op: dist.reduce(out[0], root, op, group=group),
            [right if rank == root else values[rank]],
        )
        rows = suite.all(dtype, (size, *SHAPE))
        part = reduced(name, rows)[rank]
        suite.case(
            f"reduce_scatter {name} {where}",
            lambda: [layout(torch.zeros(SHAPE).to(dtype))],
            lambda group, out, op=op: dist.reduce_scatter(
                out[0], [layout(t) for t in rows[rank]], op, group=group
            ),
            [part],
        )
        suite.case(
            f"reduce_scatter_tensor {name} {where}",
            lambda: [layout(torch.zeros(SHAPE).to(dtype))],
            lambda group, out, op=op: dist.reduce_scatter_tensor(
                out[0], every_second(rows[rank]), op, group=group
            ),
            [part],
            gloo=False,
        )
    if dtype.is_floating_point:
        suite.case(
            f"all_reduce PREMUL_SUM {where}",
            lambda: [layout(values[rank])],
            lambda group, out: dist.all_reduce(
                out[0], dist._make_nccl_premul_sum(2.0), group=group
            ),
            [reduced("SUM", [2 * v for v in values])],
            gloo=False,
        )


def movements(suite: Suite, layout, dtype):
    rank, size = suite.rank, suite.size
    values = suite.all(dtype)
    where = f"{layout.__name__} {dtype}"
    zeros = lambda: layout(torch.zeros(SHAPE).to(dtype))  # noqa: E731
    root = size - 1
    suite.case(
        f"broadcast {where}",
        lambda: [layout(values[rank])],
        lambda group, out: dist.broadcast(out[0], root, group=group),
        [values[root]],
    )
    suite.case(
        f"all_gather {where}",
        lambda: [zeros() for _ in values],
        lambda group, out: dist.all_gather(out, layout(values[rank]), group=group),
        values,
    )
    suite.case(
        f"all_gather_into_tensor {where}",
        lambda: [layout(torch.zeros((size * SHAPE[0], *SHAPE[1:])).to(dtype))],
        lambda group, out: dist.all_gather_into_tensor(out[0], layout(values[rank]), group=group),
        [torch.cat(values)],
    )
    gathered = values if rank == root else [torch.zeros(SHAPE).to(dtype)] * size
    suite.case(
        f"gather {where}",
        lambda: [zeros() for _ in values],
        lambda group, out: dist.gather(
            layout(values[rank]), out if rank == root else None, root, group=group
        ),
        gathered,
    )
    given = [numbers(root, dtype, SHAPE, 5 + k) for k in range(size)]
    suite.case(
        f"scatter {where}",
        lambda: [zeros()],
        lambda group, out: dist.scatter(
            out[0], [layout(t) for t in given] if rank == root else None, root, group=group
        ),
        [given[rank]],
    )
    to_all = [[numbers(r, dtype, SHAPE, k) for k in range(size)] for r in range(size)]
    suite.case(
        f"all_to_all {where}",
        lambda: [zeros() for _ in values],
        lambda group, out: dist.all_to_all(out, [layout(t) for t in to_all[rank]], group=group),
        [to_all[r][rank] for r in range(size)],
        gloo=False,
    )
    suite.case(
        f"all_to_all_single {where}",
        lambda: [layout(torch.zeros((size * SHAPE[0], *SHAPE[1:])).to(dtype))],
        lambda group, out: dist.all_to_all_single(
            out[0], layout(torch.cat(to_all[rank])), group=group
        ),
        [torch.cat([to_all[r][rank] for r in range(size)])],
    )
    after, before = (rank + 1) % size, (rank - 1) % size

    def ring(group, out):
        sent = dist.isend(layout(values[rank]), after, group=group)
        dist.recv(out[0], before, group=group)
        sent.wait()

    suite.case(f"send and recv {where}", lambda: [zeros()], ring, [values[before]])


def odd(suite: Suite):
    """Lazily conjugated and negated, expanded, empty, of no dimension."""
    rank, size = suite.rank, suite.size
    complexes = suite.all(torch.complex64)
    world = dist.group.WORLD

    def broadcast(tensor):
        # torch.distributed itself refuses a conjugated tensor here; C++ and functional collectives
        # do not.
        opts = dist.BroadcastOptions()
        opts.rootRank = 0
        world.broadcast([tensor], opts).wait()

    for layout in (conjugated, negated):
        dtype = torch.complex64 if layout is conjugated else torch.float32
        values = suite.all(dtype)
        suite.case(
            f"broadcast into {layout.__name__}",
            lambda: [layout(values[rank])],
            lambda group, out: broadcast(out[0]),
            [values[0]],
            gloo=False,
        )
        suite.case(
            f"all_gather of {layout.__name__}",
            lambda: [torch.zeros(SHAPE, dtype=dtype) for _ in range(size)],
            lambda group, out: world.allgather([out], [layout(values[rank])]).wait(),
            values,
            gloo=False,
        )
    suite.case(
        "all_reduce of negated",
        lambda: [negated(numbers(rank, torch.float32))],
        lambda group, out: dist.all_reduce(out[0], group=group),
        [reduced("SUM", suite.all(torch.float32))],
        gloo=False,
    )
    suite.case(
        "all_reduce of complex",
        lambda: [complexes[rank].clone()],
        lambda group, out: dist.all_reduce(out[0], group=group),
        [sum(complexes[1:], complexes[0].clone())],
    )
    row = [numbers(r, torch.float32, (1, 4)) for r in range(size)]
    suite.case(
        "all_gather of expanded",
        lambda: [torch.zeros(3, 4) for _ in range(size)],
        lambda group, out: dist.all_gather(out, row[rank].expand(3, 4), group=group),
        [r.expand(3, 4) for r in row],
    )
    for shape in ((), (0,), (3, 0, 2)):
        values = suite.all(torch.float32, shape)
        suite.case(
            f"all_reduce of {shape}",
            lambda shape=shape: [numbers(rank, torch.float32, shape)],
            lambda group, out: dist.all_reduce(out[0], group=group),
            [reduced("SUM", values)],
            gloo=False,
        )


def refused(suite: Suite):
    """What cannot be written is refused, with what would be right."""
    rank, size = suite.rank, suite.size

    def broadcast(tensor):
        if size == 1:
            return dist.all_reduce(tensor)
        return dist.broadcast(tensor, size - 1 if rank == 0 else 0)

    operations = [
        ("all_reduce", lambda t: dist.all_reduce(t)),
        ("broadcast", broadcast),
        ("all_gather", lambda t: dist.all_gather([t for _ in range(size)], torch.ones(4))),
        ("reduce_scatter", lambda t: dist.reduce_scatter(t, [torch.ones(4)] * size)),
        ("recv", lambda t: dist.recv(t, (rank + 1) % size)),
    ]
    for name, run in operations:
        if name == "broadcast" and rank not in (0, size - 1):
            continue
        try:
            run(torch.ones(1).expand(4))
            suite.wrong.append(f"{name} into an expanded tensor was not refused")
        except ValueError as error:
            suite.cases += 1
            if "clone()" not in str(error):
                suite.wrong.append(f"{name} into an expanded tensor: {error}")
    freed = torch.ones(10)
    freed.untyped_storage().resize_(0)
    try:
        dist.all_reduce(freed)
        suite.wrong.append("a tensor without storage was not refused")
    except ValueError:
        suite.cases += 1


def main():
    dist.init_process_group("unbroken")
    suite = Suite()
    everything = "--all" in sys.argv
    for layout in LAYOUTS:
        # Every type where elements lie one after the other, and one of each size where they do not.
        types = (
            [*INTEGERS, *FLOATS, torch.bool]
            if everything or layout is contiguous
            else [torch.int16, torch.float32, torch.int64, torch.bool]
        )
        for dtype in types:
            if layout is leaf and not dtype.is_floating_point:
                continue
            reductions(suite, layout, dtype)
            movements(suite, layout, dtype)
        for dtype in (torch.complex64, torch.complex128) if layout is not leaf else ():
            movements(suite, layout, dtype)
    odd(suite)
    refused(suite)
    for text in suite.wrong[:20]:
        print(f"rank {suite.rank}: {text}", flush=True)
    dist.barrier()
    gloo = f"gloo right in {suite.gloo_right}, wrong in {suite.gloo_wrong}"
    print(
        f"cases {suite.cases}: {len(suite.wrong)} wrong; {gloo}, refused {suite.gloo_refused}",
        flush=True,
    )
    dist.destroy_process_group()
    sys.exit(bool(suite.wrong))


if __name__ == "__main__":
    main()
