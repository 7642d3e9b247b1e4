"""One rank of checks of ranks that go apart, as torchrun starts it: `apart.py NAME...`. They leave
while others wait for them, or ask for different things. Each check has a group of its own, and
prints `ok NAME` at each rank, or fails."""

import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
import unbroken.torch  # noqa: F401
from train import say

import torch

# Nothing here waits for it: what happens at once takes less than a quarter.
TIMEOUT, AT_ONCE_S = timedelta(seconds=60), 15.0


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def group():
    return dist.new_group(backend="unbroken", timeout=TIMEOUT)


def error(what: str, work: Callable) -> str:
    """What a call is refused with, at once."""
    began = time.monotonic()
    try:
        work()
    except RuntimeError as refused:
        took_s = time.monotonic() - began
        assert took_s < AT_ONCE_S, f"{what} fails after {took_s:.1f} s: {refused}"
        return str(refused)
    raise AssertionError(f"rank {rank()}: {what} is no error")


def one_that_has_left():
    """A receive from a rank that has left, begun before or after, and a send to it."""
    over = group()
    dist.barrier(over)
    if rank() == 1:
        dist.destroy_process_group(over)
    elif rank() == 0:
        for _ in range(2):
            said = error("a receive", lambda: dist.recv(torch.zeros(4), 1, group=over))
            assert "rank 1 has left" in said, said
        said = error("a send", lambda: dist.send(torch.zeros(4), 1, group=over))
        assert "rank 1 has left" in said, said
    dist.barrier()


def the_end_with_an_operation_pending():
    """Nobody waits for what the others do not do any more."""
    other, x = (rank() + 1) % size(), torch.zeros(1 << 18)
    pending = {
        "a receive": lambda over: rank() == 0 and dist.irecv(x, 1, group=over),
        "a receive at each": lambda over: dist.irecv(x, other, group=over),
        "a send": lambda over: rank() == 0 and dist.isend(x, 1, group=over),
        "a sum": lambda over: rank() == 0 and dist.all_reduce(x, async_op=True, group=over),
    }
    for what, begin in pending.items():
        over = group()
        dist.barrier(over)
        kept = begin(over)
        began = time.monotonic()
        dist.destroy_process_group(over)
        assert time.monotonic() - began < AT_ONCE_S, f"with {what} pending it waits"
        del kept
        dist.barrier()


def disagree(what: str, right: tuple, work: Callable, ranks=None):
    """All ranks, or these, get an error that has these words: in the operation, or at the latest in
    the next."""
    over = group()
    where = range(size()) if ranks is None else ranks
    if rank() in where:
        said = error(what, lambda: work(over))
    else:
        work(over)
        said = error(f"what follows {what}", lambda: dist.barrier(over))
    assert all(words in said for words in right), f"rank {rank()}: {what}: {said}"
    told = [None] * size()
    dist.all_gather_object(told, said)
    assert len(set(told)) == 1, f"{what} is not the same to all: {told}"
    dist.destroy_process_group(over)


def sizes_are_compared():
    """Of all operations, nothing among them; whoever has success in one has what was sent."""
    one = rank() == 1
    odd = 1 if one else 0

    def reduced(over, count):
        dist.all_reduce(torch.ones(count), group=over)

    counts = ("AllReduce of 0 F32", "AllReduce of 1 F32")
    disagree("a sum of 0 and 1", counts, lambda over: reduced(over, odd))
    roots = ("Broadcast of 16 U8, root 0", "Broadcast of 16 U8, root 1")
    disagree("two roots", roots, lambda over: dist.broadcast(torch.ones(4), odd, group=over))
    roots = ("Reduce of 4 F32, Sum, root 0", "Reduce of 4 F32, Sum, root 1")
    disagree("a sum at two roots", roots, lambda over: dist.reduce(torch.ones(4), odd, group=over))

    def exchange(over, sent: int):
        sizes = [1] * size()
        inputs = list(sizes)
        if rank() == 0:
            inputs[1] = sent
        out = torch.zeros(size())
        dist.all_to_all_single(out, torch.ones(sum(inputs)), sizes, inputs, group=over)

    for sent in (0, 3):
        right = (f"rank 0 sends {4 * sent} U8 to rank 1, which awaits 4",)
        disagree("all_to_all", right, lambda over, sent=sent: exchange(over, sent))

    def gathered(over):
        mine = torch.full((1 if rank() == 0 else 0,), 3, dtype=torch.uint8)
        outputs = [torch.zeros(1, dtype=torch.uint8) for _ in range(size())]
        dist.gather(mine, outputs if rank() == 0 else None, 0, group=over)

    disagree("gather", ("rank 1 sends 0 U8 to rank 0, which awaits 1",), gathered)

    def scattered(over):
        outputs = [torch.ones(2)] * size() if rank() == 0 else None
        dist.scatter(torch.zeros(1 if one else 2), outputs, 0, group=over)

    disagree("scatter", ("rank 0 sends 8 U8 to rank 1, which awaits 4",), scattered)

    def moved(over, sent: int, awaited: int):
        if rank() == 0:
            dist.isend(torch.full((sent,), 7, dtype=torch.uint8), 1, group=over)
        elif one:
            dist.recv(torch.full((awaited,), 5, dtype=torch.uint8), 0, group=over)

    for sent, awaited in ((0, 1), (1, 0), (4, 5), (5, 4)):
        right = (f"SendRecv of {sent} U8", f"SendRecv of {awaited} U8")
        disagree(
            f"{sent} bytes for {awaited}",
            right,
            lambda over, sent=sent, awaited=awaited: moved(over, sent, awaited),
            ranks=[1],
        )


def one_row_with_a_stride():
    """Strides of dimensions of size 1 do not matter."""
    n = size()

    def row(value: float, count: int = 1) -> list:
        """One element each: stride 0, 5, and of two dimensions."""
        column = torch.full((1, 5), value)[:, 2]
        return [torch.tensor(value).expand(1), column, torch.tensor(value).expand(1, 1)]

    ranks = [float(r) for r in range(n)]
    for k in range(3):
        mine, shape = row(float(rank()))[k], row(0.0)[k].shape
        outputs = [torch.zeros(shape) for _ in range(n)]
        dist.all_to_all(outputs, [row(float(rank()))[k] for _ in range(n)])
        assert [t.item() for t in outputs] == ranks, outputs
        outputs = [torch.zeros(1, 5)[:, 2].view(shape) for _ in range(n)]
        dist.all_to_all(outputs, [mine.clone() for _ in range(n)])
        assert [t.item() for t in outputs] == ranks, outputs
        single = torch.zeros(n, *shape[1:])
        dist.all_gather_into_tensor(single, mine)
        assert single.flatten().tolist() == ranks, single
        dist.all_gather(outputs, mine)
        assert [t.item() for t in outputs] == ranks, outputs
        got = row(0.0)[k].clone()
        dist.scatter(got, [row(float(r))[k] for r in range(n)] if rank() == 0 else None, 0)
        assert got.item() == rank(), got
        dist.gather(mine, outputs if rank() == 0 else None, 0)
        dist.reduce_scatter(got, [row(1.0)[k] for _ in range(n)])
        assert got.item() == n, got
        column = torch.full((1, 5), 1.0)[:, 2]
        dist.all_reduce(column)
        dist.broadcast(column, 0)
        assert column.item() == n, column
    from torch.distributed.nn.functional import all_to_all

    x = torch.ones(n, requires_grad=True)
    outputs = all_to_all([torch.empty(1) for _ in range(n)], list(x.split(1)))
    sum(t.sum() for t in outputs).backward()
    assert x.grad.tolist() == [1.0] * n, x.grad


def thousands_before_the_first_receive():
    count, other = 9_000, (rank() + 1) % size()
    sends = [dist.isend(torch.full((4,), float(k)), other) for k in range(count)]
    outputs = [torch.zeros(4) for _ in range(count)]
    receives = [dist.irecv(output, (rank() - 1) % size()) for output in outputs]
    for work in sends + receives:
        work.wait()
    assert [output[0].item() for output in outputs] == [float(k) for k in range(count)]


CHECKS = {
    check.__name__: check
    for check in (
        one_that_has_left,
        the_end_with_an_operation_pending,
        sizes_are_compared,
        one_row_with_a_stride,
        thousands_before_the_first_receive,
    )
}


def main():
    dist.init_process_group("unbroken", timeout=TIMEOUT)
    for name in sys.argv[1:] or CHECKS:
        CHECKS[name]()
        say(f"ok {name}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
