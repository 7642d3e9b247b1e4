"""MPI programs with a fault at sixteen instants, for Figures 9 to 12 of the paper on automatic path
migration: called by figures.py; see docs/papers/apm.md.

Open MPI, its BTL openib, two processes on each of four hosts with NICs of two ports; the kernels of
tests/c/mpi_kernels.c, whose results are verified. Facts are checked (results, migrations, the ports
that carried), times are only told."""

import statistics

from lib.fabric import Fabric, now_us
from lib.mpi import Kernel, OWN_APM, PORT_1, TWO_PORTS
from lib.process import Failure
from picture import axis, bars, figure, line, lines, row

# By the figure's number: the paper's program; our kernel, its size and how often it runs (about a
# second where cores are free); what the paper's text says.
PROGRAMS = {
    "9": ("IS, class A", "is", "W", 50, "very significant"),
    "10": ("IS, class B", "is", "A", 30, "less than with class A"),
    "11": ("FT, class B", "ft", "W", 25, "5 to 7 %"),
    "12": ("LU, class B", "lu", "A", 5, "5 to 7 %"),
}
# Who migrates; name in the pictures, options of mpirun, whether failover is on, colour.
MANNERS = {
    "own": ("openib's own path migration", OWN_APM, False, 2),
    "unbroken": ("unmodified, Unbroken migrates", PORT_1, True, 0),
}
HOST, PORT_BACK = "a", "300ms"
# Sizes of receive buffers, by the queue pairs to each peer; openib wants one for its largest eager
# messages and one for its largest fragments at the least.
BUFFERS = {
    1: (65536,),
    2: (12288, 65536),
    4: (128, 2048, 12288, 65536),
    8: (128, 512, 2048, 4096, 12288, 16384, 32768, 65536),
}
PROCESSES = 8
MOST_SECONDS = 120


class Extent:
    """How much is measured."""

    instants = 16
    quiet_runs = 3
    # Queue pairs to each peer.
    each_peer = (1, 8)
    # Of a kernel's iterations, one in so many is run.
    shorter = 1


def hurry():
    """Everything once and short: shows that it works, and no more."""
    Extent.instants, Extent.quiet_runs, Extent.each_peer, Extent.shorter = 2, 1, (1, 8), 2


def queue_pairs(each_peer: int) -> list:
    """Options of mpirun: so many queue pairs to each peer. openib has one for each size of receive
    buffers, and sends a message over that of the next larger size."""
    return [
        "--mca",
        "btl_openib_receive_queues",
        ":".join(f"S,{size},256,192,64" for size in BUFFERS[each_peer]),
    ]


def ran(logs, of: dict, at: float | None) -> dict:
    """One run; with `at`, port 1 of a host goes down so many seconds after the iterations began,
    and comes back."""
    _, options, failover, _ = MANNERS[of["manner"]]
    with Fabric(logs, *TWO_PORTS) as fabric:
        run = Kernel(
            fabric,
            [*options, *queue_pairs(of["each_peer"])],
            of["kernel"],
            of["size"],
            of["iterations"],
            failover=failover,
        )
        began_us = run.begin()
        if at is not None:
            fabric.fault(
                f"nic {HOST}/0/1 down",
                "--at",
                f"{max(1, round(began_us + at * 1e6 - now_us()))}us",
                "--for",
                PORT_BACK,
            )
        seconds = run.done(MOST_SECONDS)
        migrations = len(fabric.events("path-migrated"))
        second = fabric.nics()[f"{HOST}/0/2"]["tx_payload_bytes"]
        connections = {(qp["pid"], qp["qp"]) for qp in run.connections()}
        passive = [
            s
            for s in fabric.events("switch")
            if (s["pid"], s["qp"]) in connections and s["kind"] != "planned"
        ]
        if passive or (at is None and (migrations or second)):
            raise Failure(
                f"{of}, fault after {at} s: {len(passive)} switches, {migrations} migrations, "
                f"{second} bytes on port 2"
            )
        fault_us = next((fault["time_us"] for fault in fabric.events("fault")), None)
        struck = fault_us is not None and fault_us < began_us + 1e6 * seconds
        if struck and not migrations:
            raise Failure(f"{of}, fault after {at} s: nothing has migrated")
    return {
        "seconds": seconds,
        "after_s": (fault_us - began_us) / 1e6 if struck else None,
        "migrations": migrations,
        "qps": len(connections),
    }


def by_instant(logs, of: dict) -> dict:
    """Runs without a fault, and one with a fault at each instant: shares of the time without one,
    seconds."""
    quiet = [ran(logs, of, None) for _ in range(Extent.quiet_runs)]
    usual = statistics.median(run["seconds"] for run in quiet)
    runs = [ran(logs, of, usual * (n + 1) / (Extent.instants + 1)) for n in range(Extent.instants)]
    struck = [
        (run["after_s"] / usual, run["seconds"]) for run in runs if run["after_s"] is not None
    ]
    if len(struck) < Extent.instants / 2:
        raise Failure(
            f"{of}: only {len(struck)} of {Extent.instants} runs were still going when the port "
            "went down"
        )
    each = quiet[0]["qps"] // PROCESSES
    told = statistics.fmean(seconds for _, seconds in struck)
    print(
        f"  {of['kernel']} {of['size']}, {each} QPs a process, {of['manner']}: {usual:.2f} s, with "
        f"a fault {told:.2f} s "
        f"({told / usual - 1:+.1%}, {len(struck)} of {Extent.instants} instants), "
        f"{statistics.median(run['migrations'] for run in runs):g} migrations",
        flush=True,
    )
    return {
        "usual": usual,
        "struck": struck,
        "mean": told,
        "each": each,
        "quiet": [run["seconds"] for run in quiet],
    }


def panels_of(found: dict) -> list:
    """Time by instant, for each number of queue pairs, and averages, as the paper's picture has
    them."""
    panels = []
    most = 1.1 * max(
        s for of in found.values() for s in [*of["quiet"], *(s for _, s in of["struck"])]
    )
    for each_peer in Extent.each_peer:
        drawn = []
        for manner, (name, _, _, colour) in MANNERS.items():
            of = found[manner, each_peer]
            drawn.append(
                line(name, colour, [[100 * share, seconds] for share, seconds in of["struck"]])
            )
            drawn.append(
                line(f"{name}, no fault", colour, [[0, of["usual"]], [100, of["usual"]]], "dotted")
            )
        title = f"{found['own', each_peer]['each']} queue pairs a process"
        panels.append(
            lines(
                title,
                axis("the port goes down after, of the time without a fault", 0, 100, "percent"),
                axis("execution time", 0, most, "s"),
                drawn,
            )
        )
    rows, times = [], {"no fault": [], "with a fault, mean": []}
    for (manner, _), of in found.items():
        rows.append(f"{of['each']}, {MANNERS[manner][0]}")
        times["no fault"].append(1000 * of["usual"])
        times["with a fault, mean"].append(1000 * of["mean"])
    series = [
        [name, colour, times[name]] for name, colour in (("no fault", 5), ("with a fault, mean", 0))
    ]
    panels.append(
        bars(
            "queue pairs a process, and who migrates",
            axis("execution time", 0, 1000 * most, "ms"),
            rows,
            series,
        )
    )
    return panels


def measure(logs, number: str) -> dict:
    paper, kernel, size, count, published = PROGRAMS[number]
    count = max(1, count // Extent.shorter)
    found = {}
    for each_peer in Extent.each_peer:
        for manner in MANNERS:
            of = {
                "manner": manner,
                "each_peer": each_peer,
                "kernel": kernel,
                "size": size,
                "iterations": count,
            }
            found[manner, each_peer] = by_instant(logs, of)
    ours = f"{kernel}, size {size}, {count} times"
    rows = [
        row(
            f"Figure {number}",
            f"{paper} (ours: {ours}): with a fault longer by, {of['each']} queue pairs a process, "
            f"{MANNERS[manner][0]}",
            published,
            f"{of['mean'] / of['usual'] - 1:+.1%} of {of['usual']:.2f} s",
        )
        for (manner, _), of in found.items()
    ]
    missed = sum(Extent.instants - len(of["struck"]) for of in found.values())
    notes = [
        f"tests/c/mpi_kernels.c, {ours}, by Open MPI's openib on two processes of each of four "
        "hosts, results verified. Port 1 of a host goes down once, "
        f"for {PORT_BACK}, at each of {Extent.instants} instants, one in each run; medians of "
        f"{Extent.quiet_runs} runs without a fault. "
        f"{missed} runs that ended before their instant are left out."
    ]
    title = (
        f"APM, Figure {number}: {ours} over MPI, with a fault at each of {Extent.instants} instants"
    )
    return {"figures": [[number.zfill(2), figure(title, panels_of(found), 2, notes)]], "rows": rows}
