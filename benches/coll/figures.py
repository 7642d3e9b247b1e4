#!/usr/bin/env python3
"""Measures collectives for R²CCL's Figures 15 and 16: `figures.py 15|16 --out FILE.json`; see
docs/papers/r2ccl.md.

Two hosts of the emulated network with eight NICs each, whose rates together are a part of what the
machine carries, so that NICs are what limits. Each operation is repeated without a failure, and
with a NIC that dies: once with the plan as it was (the paper's HotRepair: one other NIC carries
what it carried) and once planned anew (Balance). AllReduce is also done in the paper's form of it,
from 8 bytes on. What counts is the second half of each run, long after the failure. Results are
checked; bandwidths are told.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests"), str(HERE.parent)]

from lib.fabric import UNBROKEN, Fabric
from lib.process import Failure
from picture import axis, bars, figure, line, lines, row, setting

# Slow enough that NICs are what limits: a machine with two cores carries the packets of 16 NICs at
# 40 Mbit/s, those of 24 and 32 at a quarter of that.
NICS, RATE_MBPS = 8, {2: 40, 3: 10, 4: 10}
# A send ends when the last of it is in a slot, of which there are 8 MiB: shorter ones say nothing
# of NICs.
OPS = {
    "15": {"all-reduce": ["256K", "1M", "4M", "16M", "64M", "256M"]},
    "16": {
        "all-gather": ["1M", "16M", "128M"],
        "reduce-scatter": ["1M", "16M", "128M"],
        "send-recv": ["32M", "128M"],
    },
}
MODES = [
    ("no failure", 5, []),
    ("HotRepair", 2, ["--no-balance"]),
    ("Balance", 1, []),
    ("R²CCL-AllReduce", 0, ["--shape", "r2ccl", "--any-order"]),
]
BALANCE, PAPER = 2, 3
# Further sizes of the comparison of the paper's form with Balance.
SMALL = ["8", "1K", "32K"]
# From where on the paper's form takes this part of Balance's bandwidth at least, the two are equal.
EQUAL = 0.98
# Of so many hosts the share that is kept by Balance, beside what is possible (T* of
# docs/internals/collectives.md).
HOSTS = {2: 7 / 8, 3: 0.958, 4: 0.969}
DIES_MS = 2000
# At the rate of two hosts.
SECONDS = {"256M": 42, "128M": 24, "64M": 16}
LEAST_SECONDS = 7
LIMIT_S = 180


def settled_us(times: list) -> float:
    """The median time of the operations in the second half of the run."""
    half, passed, late = sum(times) / 2, 0, []
    for time_us in times:
        passed += time_us
        if passed >= half:
            late.append(time_us)
    return statistics.median(late)


def bandwidth(logs, op: str, size: str, mode: int, hosts=2) -> float:
    """Bus bandwidth in Gbit/s, once all is settled."""
    names = "abcd"[:hosts]
    with Fabric(logs, "--nics", NICS) as fabric:
        for nic in (f"{host}/{n}" for host in names for n in range(NICS)):
            fabric.fault(f"rate {nic} {RATE_MBPS[hosts]}Mbit")
        seconds = SECONDS.get(size, LEAST_SECONDS) * RATE_MBPS[2] / RATE_MBPS[hosts]
        words = [
            "coll",
            "bench",
            "--hosts",
            ",".join(names),
            "--op",
            op,
            "--min",
            size,
            "--max",
            size,
            "--for",
            f"{seconds:.3f}s",
        ]
        bench = fabric.start(
            "bench",
            [
                UNBROKEN,
                *words,
                "--nic-mbps",
                RATE_MBPS[hosts],
                "--warmup",
                1,
                "--json",
                "--each",
                *MODES[mode][2],
            ],
        )
        if mode:
            fabric.fault("nic a/0 dead", "--at", f"{DIES_MS}ms")
        bench.expect_success(LIMIT_S)
        said = json.loads(bench.output().splitlines()[0])
        if said["wrong"] or (said["failures"] > 0) != (mode > 0):
            raise Failure(
                f"{op} of {size}, {MODES[mode][0]}: {said['wrong']} wrong bytes, "
                f"{said['failures']} failures"
            )
    found = (
        said["bytes"]
        * 8e-3
        / settled_us(said["times_us"])
        * said["busbw_gbps"]
        / said["algbw_gbps"]
    )
    print(f"  {op}, {size}, {hosts} hosts, {MODES[mode][0]}: {found:.3f} Gbit/s", flush=True)
    return found


def size_bytes(size: str) -> int:
    return int(size) if size.isdigit() else int(size[:-1]) << {"K": 10, "M": 20}[size[-1]]


def shapes(logs) -> dict:
    """The paper's form of AllReduce beside Balance, with one NIC lost, from 8 bytes on."""
    sizes = SMALL + OPS["15"]["all-reduce"]
    by_mode = {
        mode: [bandwidth(logs, "all-reduce", size, mode) for size in sizes]
        for mode in (BALANCE, PAPER)
    }
    parts = [paper / other for paper, other in zip(by_mode[PAPER], by_mode[BALANCE])]
    points = [[size_bytes(size), 100 * part] for size, part in zip(sizes, parts)]
    # The smallest size from which on all are equal.
    below = [n for n, part in enumerate(parts) if part < EQUAL]
    first = below[-1] + 1 if below else 0
    crossing = sizes[first] if first < len(sizes) else None
    drawn = [line(MODES[PAPER][0], MODES[PAPER][1], points)]
    drawn.append(line("Balance", 1, [[point[0], 100] for point in points], look="dashed"))
    across = axis("size", size_bytes(sizes[0]), size_bytes(sizes[-1]), "bytes", log=True)
    panel = lines(
        "all-reduce, 2 hosts, one of 8 NICs lost",
        across,
        axis("of Balance's bandwidth", 0, 125, "percent"),
        drawn,
        [(size_bytes(crossing), "equal from here")] if crossing else [],
    )
    told = ", ".join(f"{size} {part:.0%}" for size, part in zip(sizes, parts))
    rows = [
        row(
            "Figure 15",
            "R²CCL-AllReduce, of Balance's bandwidth",
            "72 % below 32 MB, equal to 256 MB, 112 % from 512 MB on",
            told,
        ),
        row(
            "Figure 15",
            "R²CCL-AllReduce equals Balance from",
            "32 MB",
            f"{crossing}iB" if crossing else "no size that was measured",
        ),
    ]
    return {"panel": panel, "rows": rows}


def add_shapes(logs, path: Path) -> dict:
    """A figure that was measured before, with the comparison of shapes measured anew."""
    measured = json.loads(path.read_text())
    added = shapes(logs)
    drawn = measured["figures"][0][1]
    drawn["panels"] = [
        panel for panel in drawn["panels"] if panel["title"] != added["panel"]["title"]
    ] + [added["panel"]]
    drawn["columns"] = len(drawn["panels"])
    ours = {one["what"] for one in added["rows"]}
    measured["rows"] = [one for one in measured["rows"] if one["what"] not in ours] + added["rows"]
    measured["shapes_setting"] = setting()
    return measured


def measure(logs, of: str) -> dict:
    panels, rows, most = [], [], NICS * RATE_MBPS[2] / 1000
    for op, sizes in OPS[of].items():
        found = {mode: [bandwidth(logs, op, size, mode) for size in sizes] for mode in range(PAPER)}
        drawn = [
            line(name, colour, [[size_bytes(s), g] for s, g in zip(sizes, found[mode])])
            for mode, (name, colour, _) in enumerate(MODES[:PAPER])
        ]
        across = axis("size", size_bytes(sizes[0]), size_bytes(sizes[-1]), "bytes", log=True)
        panels.append(
            lines(f"{op}, 2 hosts", across, axis("bus bandwidth", 0, 1.1 * most, "gbps"), drawn)
        )
        whole, repaired, balanced = (found[mode][-1] for mode in range(len(MODES)))
        published = {"15": ("about 54 %", ""), "16": ("about 50 %", "85 to 89 %")}[of]
        here = [
            f"{share:.1%} ({rate:.2f} of {whole:.2f} Gbit/s)"
            for share, rate in ((repaired / whole, repaired), (balanced / whole, balanced))
        ]
        rows.append(
            row(f"Figure {of}", f"{op}, {sizes[-1]}iB: kept by HotRepair", published[0], here[0])
        )
        rows.append(
            row(
                f"Figure {of}",
                f"{op}, {sizes[-1]}iB: kept by Balance (87.5 % are possible)",
                published[1],
                here[1],
            )
        )
    if of == "15":
        kept = {2: 100 * balanced / whole}
        for hosts in (3, 4):
            whole, balanced = (bandwidth(logs, "all-reduce", "64M", mode, hosts) for mode in (0, 2))
            kept[hosts], carried = 100 * balanced / whole, NICS * RATE_MBPS[hosts] / 1000
            here = (
                f"{kept[hosts]:.1f} %; without a failure {whole / carried:.1%} of what the NICs "
                "carry"
            )
            rows.append(
                row(
                    "Figure 15",
                    f"all-reduce, 64MiB, {hosts} hosts: kept by Balance ({HOSTS[hosts]:.1%} are "
                    "possible)",
                    "",
                    here,
                )
            )
        series = [
            ["kept", 1, list(kept.values())],
            ["possible", 5, [100 * share for share in HOSTS.values()]],
        ]
        panels.append(
            bars(
                "kept of the bandwidth with one of 8 NICs lost",
                axis("kept", 0, 125, "percent"),
                [f"{n} hosts" for n in HOSTS],
                series,
            )
        )
        added = shapes(logs)
        panels.append(added["panel"])
        rows += added["rows"]
    notes = [
        f"Two hosts with {NICS} NICs of {RATE_MBPS[2]} Mbit/s each (more hosts: {RATE_MBPS[3]} "
        f"Mbit/s), unbroken coll bench, every last result checked; nic a/0 dies {DIES_MS / 1000:g} "
        "s after the beginning, and the second half of a run counts. "
        "The paper's are two hosts with eight NICs of 400 Gbit/s. Emulated network, not RNICs. "
        f"{setting()}."
    ]
    titles = {
        "15": "R²CCL, Figure 15: AllReduce with one of eight NICs lost",
        "16": "R²CCL, Figure 16: other operations with one of eight NICs lost",
    }
    return {"figures": [[of, figure(titles[of], panels, len(panels), notes)]], "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=OPS)
    parser.add_argument("--out", type=Path, required=True, help="where it is written")
    parser.add_argument("--python", help="not needed here")
    parser.add_argument(
        "--shapes-only",
        action="store_true",
        help="of 15: measure only the paper's form beside Balance, and put it into the file",
    )
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            if args.shapes_only:
                measured = add_shapes(Path(folder), args.out)
            else:
                measured = {"setting": setting(), **measure(Path(folder), args.name)}
    except Failure as failure:
        print(f"figures.py {args.name}: {failure}", file=sys.stderr)
        return 1
    args.out.write_text(json.dumps(measured, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
