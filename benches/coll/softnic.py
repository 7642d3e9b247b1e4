#!/usr/bin/env python3
"""Compares the simulator of collectives with collectives that run.

Hosts of the emulated network have NICs whose rates together are a part of what the machine
carries, so that NICs are what limits. `unbroken coll bench` repeats an operation with all NICs,
with one that dies (nic a/0 dead), with one that carries a quarter or a half (rate a/0), and with
different rails lost at two hosts (nic a/0 and b/1 dead). The second half of each run counts, long
after ranks plan with what is left. `unbroken plan` simulates the same cluster, operation, size and
shape; it knows no headers, and rates count them.

With `--busy` the shortest operation of the second half counts. Before and after each run every rank
sends to the next one over all NICs; how many times as long as planned that takes is `machine`."""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests"), str(HERE.parent), str(HERE)]

from computed import said
from lib.fabric import UNBROKEN, Fabric
from lib.process import Failure

NICS = 4
# A NIC's rate, Mbit/s, by the number of hosts: a machine with two cores carries twice as much.
RATES_MBPS = {2: 40, 3: 20, 4: 10}
SLOW_PERCENT = {"slow": 25, "half": 50}
OPS = ("all-reduce", "all-gather", "reduce-scatter")
SIZES = ("16M",)
# What was done to host a, and how the simulator is told.
STATES = {
    "healthy": [],
    "dead": ["host0/nic0"],
    "apart": ["host0/nic0", "host1/nic1"],
    **{state: [f"host0/nic0={percent}%"] for state, percent in SLOW_PERCENT.items()},
}
# What dies during a run.
DYING = {"dead": ["a/0"], "apart": ["a/0", "b/1"]}
# The NIC dies; before and after, so many operations run at least.
DIES_S, OPERATIONS, LEAST_S = 2, 6, 8
# Until a slow NIC is found out, operations take several times as long: it has a full share.
OPERATIONS_SLOW = 24
LIMIT_S = 300
# What is claimed, in docs/internals/collectives.md.
BAR_PERCENT = 10.0
# What shows how fast the machine is: nothing waits for anything else.
PLAIN_OP, PLAIN_SIZE = "send-recv", "4M"


def simulated_us(hosts: int, mbps: int, op: str, size: str, shape: str, state: str) -> float:
    """What the simulator says of one operation."""
    words = ["plan", "--hosts", hosts, "--gpus", 1, "--nics", NICS, "--rails-apart"]
    words += ["--nic-rate", f"{mbps}M", "--size", size, "--shape", shape]
    fails = [word for nic in STATES[state] for word in ("--fail", nic)] or ["--lost", 0]
    rows = said(*words, *fails)["collectives"]
    (row,) = (row for row in rows if row["collective"] == op)
    return next(one["us"] for one in row["strategies"] if one["strategy"] == "ours")


def settled_us(times_us: list, is_busy: bool) -> float:
    """The median time of the operations in the second half of a run; the shortest one where the
    machine is busy. NICs with a rate make none too short."""
    half, passed, late = sum(times_us) / 2, 0, []
    for time_us in times_us:
        passed += time_us
        if passed > half:
            late.append(time_us)
    return min(late) if is_busy else statistics.median(late)


def measured(
    logs: Path,
    hosts: int,
    mbps: int,
    op: str,
    size: str,
    state: str,
    expected_us: float,
    is_busy: bool,
):
    """The time of an operation, µs, and its shape."""
    names = "abcd"[:hosts]
    operations = OPERATIONS_SLOW if state in SLOW_PERCENT else OPERATIONS
    seconds = max(LEAST_S, 2 * DIES_S + operations * expected_us / 1e6)
    with Fabric(logs, "--nics", NICS) as fabric:
        for nic in (f"{host}/{n}" for host in names for n in range(NICS)):
            fabric.fault(f"rate {nic} {mbps}Mbit")
        if state in SLOW_PERCENT:
            fabric.fault(f"rate a/0 {mbps * SLOW_PERCENT[state] * 10}Kbit")
        words = ["coll", "bench", "--hosts", ",".join(names), "--op", op, "--warmup", 1]
        words += ["--min", size, "--max", size, "--for", f"{seconds:.1f}s", "--json", "--each"]
        bench = fabric.start("bench", [UNBROKEN, *words, "--nic-mbps", mbps])
        for nic in DYING.get(state, []):
            fabric.fault(f"nic {nic} dead", "--at", f"{DIES_S}s")
        bench.expect_success(LIMIT_S)
        line = json.loads(bench.output().splitlines()[0])
    # A loaded machine may fail a path that is well; the median of rounds does not feel it.
    if line["wrong"] or (state in DYING and not line["failures"]):
        what = f"{line['wrong']} wrong bytes, {line['failures']} failures"
        raise Failure(f"{op} of {size}, {hosts} hosts, {state}: {what}")
    return settled_us(line["times_us"], is_busy), line["shape"]


def delay(logs: Path, hosts: int, mbps: int) -> float:
    """How many times as long as planned each rank takes to send to the next one while all NICs are
    well: what the machine adds, which may have other work."""
    planned_us = simulated_us(hosts, mbps, PLAIN_OP, PLAIN_SIZE, "direct", "healthy")
    took_us, _ = measured(logs, hosts, mbps, PLAIN_OP, PLAIN_SIZE, "healthy", planned_us, True)
    return took_us / planned_us


def compare(
    logs: Path,
    hosts: int,
    mbps: int,
    op: str,
    size: str,
    states: list,
    rounds: int,
    is_busy: bool,
) -> list:
    """An operation in some states, in turns; a row for each."""
    runs, shapes = {state: [] for state in dict.fromkeys(["healthy", *states])}, {}
    guess_us = simulated_us(hosts, mbps, op, size, "direct", "healthy")
    machine, delays = {state: [] for state in runs}, []
    if is_busy:
        delays.append(delay(logs, hosts, mbps))
    for _ in range(rounds):
        for state, times in runs.items():
            took_us, shapes[state] = measured(
                logs, hosts, mbps, op, size, state, guess_us, is_busy
            )
            times.append(took_us)
            if is_busy:
                delays.append(delay(logs, hosts, mbps))
                machine[state].append((delays[-2] + delays[-1]) / 2)
    rows = []
    for state, times in runs.items():
        ours = simulated_us(hosts, mbps, op, size, shapes[state], state)
        ran, healthy = statistics.median(times), statistics.median(runs["healthy"])
        rows.append(
            {
                "hosts": hosts,
                "op": op,
                "size": size,
                "state": state,
                "shape": shapes[state],
                "ran_us": ran,
                "rounds_us": times,
                "simulated_us": ours,
                "percent": 100 * (ours / ran - 1),
                "machine": statistics.median(machine[state]) if is_busy else None,
                "ran_of_healthy": ran / healthy,
                "simulated_of_healthy": ours
                / simulated_us(hosts, mbps, op, size, shapes["healthy"], "healthy"),
            }
        )
    return rows


def shown(row: dict) -> str:
    what = f"{row['op']}, {row['size']}, {row['hosts']} hosts, {row['state']} ({row['shape']})"
    return (
        f"{what:55} ran {row['ran_us'] / 1e3:7.1f} ms, simulated {row['simulated_us'] / 1e3:7.1f} "
        f"ms: {row['percent']:+5.1f} %; of healthy {row['ran_of_healthy']:.3f}, "
        f"{row['simulated_of_healthy']:.3f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several = {"type": lambda text: text.split(",")}
    parser.add_argument("--hosts", metavar="N,…", default=["2", "3", "4"], **several)
    parser.add_argument("--op", metavar="NAME,…", default=OPS, **several)
    parser.add_argument("--size", metavar="SIZE,…", default=SIZES, help="as 4M,16M", **several)
    parser.add_argument("--state", metavar="NAME,…", default=["healthy", "dead", "slow"], **several)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; the median counts")
    parser.add_argument("--mbps", type=int, help="a NIC's rate [by the number of hosts]")
    parser.add_argument("--busy", action="store_true", help="the machine has other work")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    for hosts in args.hosts:
        if hosts not in map(str, RATES_MBPS):
            parser.error(f"--hosts {hosts}: 2, 3 and 4 are right")
    for op in args.op:
        if op not in OPS:
            parser.error(f"--op {op}: there are {', '.join(OPS)}")
    for state in args.state:
        if state not in STATES:
            parser.error(f"--state {state}: there are {', '.join(STATES)}")
    rows = []
    try:
        for hosts in map(int, args.hosts):
            for op in args.op:
                for size in args.size:
                    with tempfile.TemporaryDirectory() as logs:
                        mbps = args.mbps or RATES_MBPS[hosts]
                        found = compare(
                            Path(logs), hosts, mbps, op, size, args.state, args.rounds, args.busy
                        )
                    rows += found
                    if not args.json:
                        print("\n".join(map(shown, found)), flush=True)
    except Failure as failure:
        print(f"softnic.py: {failure}", file=sys.stderr)
        return 1
    off = [abs(row["percent"]) for row in rows]
    found = {
        "rows": rows,
        "median_percent": statistics.median(off),
        "worst_percent": max(off),
        "within_bar": sum(percent <= BAR_PERCENT for percent in off),
    }
    if args.json:
        print(json.dumps(found))
    else:
        print(
            f"median {found['median_percent']:.1f} %, worst {found['worst_percent']:.1f} %; "
            f"{found['within_bar']} of {len(rows)} within {BAR_PERCENT:g} %"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
