#!/usr/bin/env python3
"""Measures automatic path migration for its paper's Figures 5 to 12 and computation test:
`figures.py 5-6|7|8|computation|9|10|11|12 --out FILE.json`; see docs/papers/apm.md.

Two processes with softnics of two ports, and the library of include/unbroken/apm.h in both:
tests/c/apm_library.c takes the times of transitions, tests/c/apm_cost.c what they cost a ping-pong,
or a computation, that goes on meanwhile. Facts are checked (answers, paths, migrations, ports that
carried traffic), times are only told. 9 to 12 are of MPI programs: mpi_kernels.py."""

import argparse
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests"), str(HERE.parent)]

import mpi_kernels
from lib import apm
from lib.fabric import Fabric
from lib.process import Failure, Skip, wait_until
from picture import axis, figure, line, lines, row, setting

PORT_BYTES_S = 10
# The exit status where it cannot be measured here.
CANNOT = 77
# What is requested or befalls, as the program tells it: name in the pictures, colour.
KINDS = {
    "migrated": ("ARMED→MIGRATED, requested", 2),
    "armed": ("MIGRATED→ARMED, requested", 3),
    "fault": ("the port in use goes down", 0),
}
BYTES, QPS_OF_SIZES = 128, 512


class Extent:
    """How much is measured."""

    qps = apm.TIMES_QPS
    times_rounds = apm.TIMES_ROUNDS
    sizes = tuple(1 << n for n in range(11))
    qps_of_sizes = QPS_OF_SIZES
    # Requests, and faults, of each run of the ping-pong.
    rounds, faults = 15, 7
    computation_qps = (1, 4, 16, 64, 256, 1024)
    computation_rounds, computation_ms = 11, 200


def hurry():
    """Everything once and short: shows that it works, and no more."""
    Extent.qps, Extent.times_rounds, Extent.sizes, Extent.qps_of_sizes = (1, 16), 3, (1, 1024), 16
    Extent.rounds, Extent.faults = 2, 2
    Extent.computation_qps, Extent.computation_rounds, Extent.computation_ms = (1, 16), 2, 20
    mpi_kernels.hurry()


def told(ends: apm.Library) -> list:
    """The lines of JSON that the client has printed."""
    return [json.loads(text) for text in ends.succeed().splitlines() if text.startswith("{")]


# Figures 5 and 6


def transitions(logs) -> dict:
    found = {}
    for by, qps in ((by, qps) for by in ("event", "query") for qps in Extent.qps):
        found[by, qps] = f = apm.measured(logs, qps, by, Extent.times_rounds)
        print(
            f"  {qps} QPs, by {by}: armed within {f['armed_us']} us, migrated within "
            f"{f['migrated_us']} us",
            flush=True,
        )
    us = lambda what, by, qps: max(1, found[by, qps][f"{what}_us"])
    most = max(us(what, *of) for of in found for what in ("armed", "migrated"))
    panels = []
    for by in ("event", "query"):
        drawn = [
            line(
                KINDS[what][0].split(",")[0],
                KINDS[what][1],
                [[qps, us(what, by, qps)] for qps in Extent.qps],
            )
            for what in ("migrated", "armed")
        ]
        panels.append(
            lines(
                f"noticed by {by}",
                axis("queue pairs", 1, Extent.qps[-1], log=True),
                axis("time", 10, 1.5 * most, "us", log=True),
                drawn,
            )
        )
    few, many = Extent.qps[min(2, len(Extent.qps) - 1)], Extent.qps[-1]
    more = lambda qps: (
        f"{us('migrated', 'event', qps) / us('armed', 'event', qps) - 1:+.0%} with {qps}"
    )
    eighth = max(qps for qps in Extent.qps if qps <= max(1, many // 8))
    grown = lambda what: f"{us(what, 'event', many) / us(what, 'event', eighth):.1f}"
    query = lambda what: f"{us(what, 'query', many) / us(what, 'event', many):.2f}"
    of, both = "Figures 5 and 6", "MIGRATED→ARMED; ARMED→MIGRATED"
    rows = [
        row(
            of,
            "ARMED→MIGRATED takes longer than MIGRATED→ARMED, few queue pairs",
            "around 30 %",
            more(few),
        ),
        row(of, "the same, many", "around 16 %", more(many)),
        row(
            of,
            f"time of {many} queue pairs as a multiple of that of {eighth}: {both}",
            "linear",
            f"{grown('armed')}; {grown('migrated')}",
        ),
        row(
            of,
            f"by query as a multiple of that by event, {many} queue pairs: {both}",
            "more (§3.1.2)",
            f"{query('armed')}; {query('migrated')}",
        ),
    ]
    notes = [
        "All queue pairs at once: both ends load, the client asks to migrate; until its library "
        "has noticed the last of them. "
        f"Medians of {Extent.times_rounds}. ARMED has no event in libibverbs: by event the "
        "library's thread asks for it, and wakes the program."
    ]
    return {
        "figures": [
            [
                "05-06",
                figure(
                    "APM, Figures 5 and 6: time of transitions over the number of queue pairs",
                    panels,
                    2,
                    notes,
                ),
            ]
        ],
        "rows": rows,
    }


# Figures 7 and 8


def ping_pong(logs, qps: int, size: int, rounds: int, faults: int) -> dict:
    """By what befell: the mean latency (half a round trip) and the number of the iterations that
    each transition touched."""
    with Fabric(logs, "--ports", "2") as fabric:
        ends = apm.Library(fabric, "latency", qps, size, rounds, faults, name="apm_cost")
        for n in range(faults):
            port, other = ("/1", "a/0/2") if n % 2 == 0 else ("/2", "a/0")
            ends.reach(f"armed {n}")
            carried = apm.sent(fabric, other)
            fabric.fault(f"nic a/0{port} down")
            ends.reach(f"migrated {n}")
            wait_until(
                lambda: apm.sent(fabric, other) > carried, PORT_BYTES_S, f"{other} carries messages"
            )
            fabric.clear()
        windows = told(ends)
        fault_us = [event["time_us"] for event in fabric.events("fault")]
    for window in windows:
        if window["window"] == "fault":
            window["began_us"] = fault_us.pop(0)
    found = {}
    for window in windows:
        began, ended = window["began_us"], window["ended_us"]
        touched = [
            us / 2 for start, us in window["iterations"] if start <= ended and start + us >= began
        ]
        if not touched or window["iterations"][0][0] > began:
            raise Failure(
                f"{window['window']}: the iterations that the program kept begin too late"
            )
        found.setdefault(window["window"], []).append((statistics.fmean(touched), len(touched)))
    right = {
        name: count
        for name, count in (
            ("quiet", 1),
            ("fault", faults),
            ("armed", rounds),
            ("migrated", rounds),
        )
        if count
    }
    if {name: len(of) for name, of in found.items()} != right:
        raise Failure(f"{ {name: len(of) for name, of in found.items()} } where {right} are right")
    print(
        f"  {qps} QPs, {size} bytes: "
        + ", ".join(
            f"{name} {mean(of):.1f} us in {touched_by(of):g} iterations"
            for name, of in found.items()
        ),
        flush=True,
    )
    return found


def mean(of: list) -> float:
    """The average latency in µs, the median of all rounds."""
    return statistics.median(us for us, _ in of)


def touched_by(of: list) -> float:
    """How many iterations, the median of all rounds."""
    return statistics.median(count for _, count in of)


def added_each(of: dict, kind: str, qps: int) -> float:
    """What a transition adds to the round trips of all iterations that it touches, for each queue
    pair, in µs."""
    return 2 * statistics.median((us - mean(of["quiet"])) * count for us, count in of[kind]) / qps


def latency_panel(title: str, x: dict, found: dict, original: list) -> dict:
    drawn = [
        line(name, colour, [[at, mean(of[kind])] for at, of in found.items()])
        for kind, (name, colour) in KINDS.items()
    ]
    drawn.append(
        line(
            "the same queue pairs, nothing requested",
            5,
            [[at, mean(of["quiet"])] for at, of in found.items()],
            "dotted",
        )
    )
    drawn.append(line("original: one queue pair, nothing requested", 5, original, "dashed"))
    values = [y for each in drawn for _, y in each["points"]]
    return lines(title, x, axis("latency", min(values) / 2, 2 * max(values), "us", log=True), drawn)


def ping_pong_notes(what: str) -> list:
    return [
        f"Ping-pong by SEND over all queue pairs in turn, {what}, half of each round trip. "
        "Another thread of both ends asks for the transition of all queue pairs at once, or port 1 "
        "or 2 of the client's NIC goes down. "
        "Averages over the iterations between that and the event of the last queue pair, the first "
        "and last included; "
        f"medians of {Extent.rounds} requests and {Extent.faults} faults. Every answer is checked."
    ]


def over_queue_pairs(logs) -> dict:
    found = {qps: ping_pong(logs, qps, BYTES, Extent.rounds, Extent.faults) for qps in Extent.qps}
    last = Extent.qps[-1]
    original = mean(found[1]["quiet"])
    x = lambda: axis("queue pairs", 1, last, log=True)
    counts = [
        line(name, colour, [[qps, touched_by(of[kind])] for qps, of in found.items()])
        for kind, (name, colour) in KINDS.items()
    ]
    counts.append(
        line("as many as queue pairs (the paper)", 5, [[qps, qps] for qps in Extent.qps], "dotted")
    )
    most = max(y for each in counts for _, y in each["points"])
    panels = [
        latency_panel(
            f"messages of {BYTES} bytes", x(), found, [[qps, original] for qps in Extent.qps]
        ),
        lines(
            "iterations that a transition touches",
            x(),
            axis("iterations", 0.8, 2 * most, log=True),
            counts,
        ),
    ]
    added = [
        line(name, colour, [[qps, added_each(of, kind, qps)] for qps, of in found.items()])
        for kind, (name, colour) in KINDS.items()
    ]
    above = [y for each in added for _, y in each["points"] if y > 0] or [1]
    panels.append(
        lines(
            "added to all iterations together, each queue pair",
            x(),
            axis("time", min(above) / 2, 2 * max(above), "us", log=True),
            added,
        )
    )
    rows = []
    for kind, (name, _) in KINDS.items():
        us = [mean(of[kind]) for of in found.values()]
        most_of = found[last]
        rows += [
            row(
                "Figure 7",
                f"{name}: average, with 1 to {last} queue pairs, µs",
                "almost flat; its axis ends at 400",
                f"{min(us):.1f} to {max(us):.1f}",
            ),
            row(
                "Figure 7",
                f"{name}: iterations touched, {last} queue pairs",
                "nearly as many as queue pairs",
                f"{touched_by(most_of[kind]):g}",
            ),
            row(
                "Figure 7",
                f"{name}: added to all iterations together, each of {last} queue pairs, µs",
                "",
                f"{added_each(most_of, kind, last):.1f}",
            ),
        ]
    rows.append(
        row(
            "Figure 7",
            f"original: one queue pair, µs; {last}, nothing requested",
            "",
            f"{original:.1f}; {mean(found[last]['quiet']):.1f}",
        )
    )
    title = f"APM, Figure 7: latency of a ping-pong of {BYTES} bytes during transitions and a fault"
    return {
        "figures": [["07", figure(title, panels, 2, ping_pong_notes(f"{BYTES} bytes"))]],
        "rows": rows,
    }


def over_sizes(logs) -> dict:
    qps = Extent.qps_of_sizes
    found = {
        size: ping_pong(logs, qps, size, Extent.rounds, Extent.faults) for size in Extent.sizes
    }
    original = [[size, mean(ping_pong(logs, 1, size, 0, 0)["quiet"])] for size in Extent.sizes]
    panels = [
        latency_panel(
            f"{qps} queue pairs",
            axis("size", Extent.sizes[0], Extent.sizes[-1], "bytes", log=True),
            found,
            original,
        )
    ]
    rows = []
    for kind, (name, _) in KINDS.items():
        over = [mean(of[kind]) - us for of, (_, us) in zip(found.values(), original)]
        what = (
            f"{name}: added to the original latency, {Extent.sizes[0]} to {Extent.sizes[-1]} "
            "bytes, µs"
        )
        rows.append(
            row(
                "Figure 8",
                what,
                "almost the same for all sizes",
                f"{min(over):.1f} to {max(over):.1f}",
            )
        )
    title = (
        f"APM, Figure 8: latency of a ping-pong over {qps} queue pairs during transitions and a "
        "fault"
    )
    return {
        "figures": [["08", figure(title, panels, 1, ping_pong_notes(f"{qps} of them"))]],
        "rows": rows,
    }


# The computation test


def computed(logs, qps: int) -> dict:
    """By what was asked for: medians in µs."""
    with Fabric(logs, "--ports", "2") as fabric:
        each = told(
            apm.Library(
                fabric,
                "computation",
                qps,
                Extent.computation_rounds,
                Extent.computation_ms,
                name="apm_cost",
            )
        )
    found = {}
    for name in ("none", "armed", "migrated"):
        of = [t for t in each if t["window"] == name]
        if len(of) != Extent.computation_rounds:
            raise Failure(f"{len(of)} rounds of '{name}'")
        found[name] = {
            key: statistics.median(t[key] for t in of) for key in of[0] if key != "window"
        }
    each = (
        f"{name} {of['computed_us'] / 1000:.2f} ms, {of['thread_us']:.0f} us by the thread"
        for name, of in found.items()
    )
    print(f"  {qps} QPs: " + ", ".join(each), flush=True)
    return found


def computation(logs) -> dict:
    found = {qps: computed(logs, qps) for qps in Extent.computation_qps}
    x = lambda: axis("queue pairs", 1, Extent.computation_qps[-1], log=True)
    names = {
        "migrated": ("ARMED→MIGRATED", 2),
        "armed": ("MIGRATED→ARMED", 3),
        "none": ("no transition", 5),
    }
    looks = {"none": "dotted"}
    over = lambda value: {
        kind: [[qps, value(of[kind], qps)] for qps, of in found.items()] for kind in names
    }
    drawn = lambda points, kinds: [
        line(*names[kind], points[kind], looks.get(kind, "solid")) for kind in kinds
    ]
    took = drawn(over(lambda of, _: of["computed_us"] / 1000), names)
    thread = drawn(over(lambda of, qps: of["thread_us"] / qps), ("migrated", "armed"))
    most = lambda drawn: 1.1 * max(y for each in drawn for _, y in each["points"])
    least = min(y for each in took for _, y in each["points"])
    panels = [
        lines("the same computation", x(), axis("time", 0.98 * least, most(took), "ms"), took),
        lines(
            "CPU time of the library's thread, each queue pair",
            x(),
            axis("time", 0, most(thread), "us"),
            thread,
        ),
    ]
    rows = []
    for qps in dict.fromkeys(
        (
            Extent.computation_qps[0],
            Extent.computation_qps[len(found) // 2],
            Extent.computation_qps[-1],
        )
    ):
        without = found[qps]["none"]["computed_us"]
        for kind in ("armed", "migrated"):
            of, what = found[qps][kind], f"{names[kind][0]} of {qps}"
            more = of["computed_us"] - without
            ms = lambda key: f"{of[key] / 1000:.2f}"
            rows.append(
                row(
                    "§4, computation",
                    f"{what}: the computation takes longer by, ms",
                    "no figure",
                    f"{more / 1000:+.2f} ({more / without:+.1%})",
                )
            )
            rows.append(
                row(
                    "§4, computation",
                    f"{what}: CPU time of the library's thread; request before the computation; "
                    "all over after, ms",
                    "no figure",
                    "; ".join(map(ms, ("thread_us", "asked_us", "lasted_us"))),
                )
            )
    notes = [
        f"A computation of about {Extent.computation_ms} ms in one thread, begun when the "
        "transition of all queue pairs has been requested; "
        "the library's thread hears of the events meanwhile. Medians of "
        f"{Extent.computation_rounds}. "
        "The peer, and the NICs of both, which are software, share the machine's cores with it: "
        "what they take is in the difference, too."
    ]
    return {
        "figures": [
            [
                "computation",
                figure("APM, section 4: a computation during transitions", panels, 2, notes),
            ]
        ],
        "rows": rows,
    }


MEASURE = {"5-6": transitions, "7": over_queue_pairs, "8": over_sizes, "computation": computation}
MEASURE |= {number: partial(mpi_kernels.measure, number=number) for number in mpi_kernels.PROGRAMS}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=MEASURE)
    parser.add_argument("--out", type=Path, required=True, help="where it is written")
    parser.add_argument("--python", help="not needed here")
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    args = parser.parse_args()
    if args.quick:
        hurry()
    began = setting()
    try:
        with tempfile.TemporaryDirectory() as folder:
            measured = MEASURE[args.name](Path(folder))
    except Skip as skip:
        print(f"APM's figure {args.name} is left out: {skip}", file=sys.stderr)
        return CANNOT
    except Failure as failure:
        print(f"figures.py {args.name}: {failure}", file=sys.stderr)
        return 1
    measured["setting"] = f"began: {began}; ended: {setting()}"
    for _, drawn in measured["figures"]:
        drawn["notes"].append(
            f"softnic, both ends on one machine, not RNICs. {measured['setting']}."
        )
    args.out.write_text(json.dumps(measured, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
