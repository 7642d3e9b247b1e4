"""MPI programs with a fault at sixteen instants, for Figures 9 to 12 of the paper on automatic path migration: called by figures.py; see docs/apm.md.

Open MPI, its BTL openib, two processes on each of four hosts with NICs of two ports; the kernels of tests/c/mpi_kernels.c, whose results are verified.
Facts are checked (results, migrations, the ports that carried), times are only told."""

import statistics

from lib.fabric import Fabric, now_us
from lib.mpi import Kernel, OWN_APM, PORT_1, TWO_PORTS
from lib.process import Failure, wait_until
from picture import axis, bars, figure, line, lines, row

# By the figure's number: the paper's program; our kernel and its size; what the paper's text says.
PROGRAMS = {
    "9": ("IS, class A", "is", "W", "very significant"),
    "10": ("IS, class B", "is", "A", "less than with class A"),
    "11": ("FT, class B", "ft", "W", "5 to 7 %"),
    "12": ("LU, class B", "lu", "A", "5 to 7 %"),
}
# Who migrates; name in the pictures, options of mpirun, whether failover is on, colour.
MANNERS = {
    "own": ("openib's own path migration", OWN_APM, False, 2),
    "unbroken": ("unmodified, Unbroken migrates", PORT_1, True, 0),
}
HOST, PORT_BACK = "a", "300ms"
# Sizes of receive buffers, by the queue pairs to each peer; openib wants one for its largest eager messages and one for its largest fragments at the least.
BUFFERS = {1: (65536,), 2: (12288, 65536), 4: (128, 2048, 12288, 65536), 8: (128, 512, 2048, 4096, 12288, 16384, 32768, 65536)}
MOST_SECONDS = 120


class Extent:
    """How much is measured."""

    instants = 16
    quiet_runs = 5
    # Queue pairs to each peer.
    each_peer = (1, 8)
    seconds = 1.5
    trial = 4


def hurry():
    """Everything once and short: shows that it works, and no more."""
    Extent.instants, Extent.quiet_runs, Extent.each_peer, Extent.seconds, Extent.trial = 2, 1, (1, 2), 0.3, 2


def queue_pairs(each_peer: int) -> list:
    """Options of mpirun: so many queue pairs to each peer. openib has one for each size of receive buffers, and sends a message over that of the next larger size."""
    return ["--mca", "btl_openib_receive_queues", ":".join(f"S,{size},256,192,64" for size in BUFFERS[each_peer])]


def ran(logs, of: dict, at: float | None) -> dict:
    """One run; with `at`, port 1 of a host goes down so many seconds after the iterations began, and comes back."""
    _, options, failover, _ = MANNERS[of["manner"]]
    with Fabric(logs, *TWO_PORTS) as fabric:
        run = Kernel(fabric, [*options, *queue_pairs(of["each_peer"])], of["kernel"], of["size"], of["iterations"], failover=failover)
        run.began()
        began_us = now_us()
        qps = [qp for qp in fabric.status()["qps"] if qp["migration"]]
        if at is not None:
            fabric.fault(f"nic {HOST}/0/1 down", "--at", f"{max(1, round(at * 1e6 - (now_us() - began_us)))}us", "--for", PORT_BACK)
        seconds = run.done(MOST_SECONDS)
        faults, migrations = fabric.events("fault"), len(fabric.events("path-migrated"))
        second = fabric.nics()[f"{HOST}/0/2"]["tx_payload_bytes"]
        passive = [switch for switch in fabric.events("switch") if switch["kind"] != "planned"]
        states = {qp["migration"] for qp in qps}
    if passive or states != {"armed"} or (at is None and (migrations or second)):
        raise Failure(f"{of}, fault at {at}: {len(passive)} switches, {migrations} migrations, queue pairs {states}, {second} bytes on port 2")
    return {"seconds": seconds, "migrations": migrations, "second_bytes": second, "qps": len(qps), "struck": bool(faults and migrations and second)}
