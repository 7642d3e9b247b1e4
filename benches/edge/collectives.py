"""Figure 11: collective operations while links to switches fall silent in turn, 20 s down and 20 s
up, and without that."""

import json
from pathlib import Path

from lib.edge import FaultCycle, Lab
from lib.fabric import UNBROKEN
from lib.process import Failure, wait_until
from picture import axis, bars, cdf, figure, line, lines, percentile, row

RANKS = 4
# Each operation of the smallest size by itself; the larger sizes with the operation that the others
# are made of.
OPS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast")
SIZES = ("250M", "1G")
SIZE_BYTES = {"100M": 100 << 20, "250M": 250 << 20, "1G": 1 << 30}
# One fault of 20 s lies within the time that an operation is repeated, with a moment before it.
FIRST_S = 5
SECONDS = {False: 20, True: 45}
LIMIT_S = 400
# Input, output and what is right, and the slots.
COPIES = 4


def available_bytes() -> int:
    """Memory that programs may still have."""
    rows = dict(row.split(":") for row in Path("/proc/meminfo").read_text().splitlines())
    return int(rows["MemAvailable"].split()[0]) * 1024


def bench(lab, op: str, size: str, seconds: float, name: str) -> dict:
    """What rank 0 says of an operation that all hosts repeat for some time, every result
    checked."""
    id_file = lab.logs / f"{name}.id"
    ranks = []
    for rank in range(RANKS):
        address = lab.address(rank + 1)
        env = {"UNBROKEN_RUNTIME": str(lab.logs / "runtime"), "UNBROKEN_NICS": address}
        args = [
            "--rank",
            rank,
            "--ranks",
            RANKS,
            "--address",
            address,
            "--id-file",
            id_file,
            "--op",
            op,
            "--min",
            size,
            "--max",
            size,
        ]
        args += ["--for", f"{seconds}s", "--warmup", 1, "--timeout", "60s", "--json", "--each"]
        ranks.append(
            lab.start(f"h{rank + 1}", f"{name}-{rank}", [UNBROKEN, "coll", "bench", *args], env)
        )
    for process in ranks:
        process.expect_success(LIMIT_S)
    said = [json.loads(process.output().splitlines()[0]) for process in ranks]
    if any(s["wrong"] for s in said):
        raise Failure(f"{op} of {size}: wrong results")
    # Ranks that wait for others have lost nothing themselves.
    return {**said[0], "failures": sum(s["failures"] for s in said)}


def both(lab, op: str, size: str) -> dict:
    """An operation without faults and under the cycle."""
    without = bench(lab, op, size, SECONDS[False], f"{op}-{size}-without")
    # Host by host and uplink by uplink, from one operation to the next, too.
    links = [(f"t{t}", f"h{h}") for h in range(1, RANKS + 1) for t in (1, 2)]
    turn = (OPS.index(op) + sorted(SIZE_BYTES).index(size)) % len(links)
    with FaultCycle(lab, links[turn:] + links[:turn], first_s=FIRST_S) as cycle:
        under = bench(lab, op, size, SECONDS[True], f"{op}-{size}-under")
    hits = [f for f in cycle.faults if f["carried"] > 1_000_000]
    print(
        f"  {op}, {size}: {rates(without)} | {rates(under)}; {len(cycle.faults)} faults, "
        f"{len(hits)} of links in use",
        flush=True,
    )
    wait_until(lab.both_ways_back, 90, "both ways are back")
    wait_until(lab.sessions_up, 60, "all BFD sessions are up again")
    return {"without": without, "under": under, "faults": len(cycle.faults), "hits": len(hits)}


def gbps(said: dict) -> list:
    """Bus bandwidth of each operation."""
    factor = said["busbw_gbps"] / said["algbw_gbps"]
    return [said["bytes"] * 8e-3 / us * factor for us in said["times_us"]]


def rates(said: dict) -> str:
    all_gbps = gbps(said)
    return (
        f"{percentile(all_gbps, 0.2):.2f}, {percentile(all_gbps, 0.5):.2f}, "
        f"{percentile(all_gbps, 0.8):.2f} ({len(all_gbps)})"
    )


def measure(logs, _python, bfd_ms: int) -> dict:
    left_out = ["2G: the command takes 1 GiB at most"]
    with Lab(logs, RANKS, "--bfd-ms", bfd_ms, "--fast-failover") as lab:
        wait_until(lab.both_ways_back, 60, "both ways are there")
        found = {(op, "100M"): both(lab, op, "100M") for op in OPS}
        for size in SIZES:
            need = COPIES * RANKS * SIZE_BYTES[size]
            if need > available_bytes():
                left_out.append(f"{size}: it needs {need >> 30} GiB of memory")
            else:
                found["all-reduce", size] = both(lab, "all-reduce", size)
    if not any(f["hits"] for f in found.values()):
        raise Failure("no fault was on a link in use")
    panels, rows = [], []
    for op in OPS:
        f = found[op, "100M"]
        pair = [gbps(f["without"]), gbps(f["under"])]
        highest = 1.1 * max(pair[0] + pair[1])
        drawn = [
            line("without a fault", 5, cdf(pair[0])),
            line("links fall silent in turn", 2, cdf(pair[1]), "dashed"),
        ]
        panels.append(
            lines(
                f"{op}, 100 MiB",
                axis("bus bandwidth", 0, highest, "gbps"),
                axis("share of operations", 0, 1.02),
                drawn,
            )
        )
    sized = [size for size in ("100M", *SIZES) if ("all-reduce", size) in found]
    middle = lambda key: [percentile(gbps(found["all-reduce", size][key]), 0.5) for size in sized]
    without, under = middle("without"), middle("under")
    series = [["without a fault", 5, without], ["links fall silent in turn", 2, under]]
    panels.append(
        bars(
            "all-reduce by size, median",
            axis("bus bandwidth", 0, 1.25 * max(without + under), "gbps"),
            sized,
            series,
        )
    )
    for (op, size), f in found.items():
        here = (
            f"{rates(f['without'])} without; {rates(f['under'])} under {f['faults']} faults, "
            f"{f['hits']} of them on links in use; longest {f['without']['longest_us'] / 1e3:.0f} "
            f"and {f['under']['longest_us'] / 1e3:.0f} ms"
        )
        rows.append(
            row(
                "Figure 11",
                f"{op}, {size}iB, Gbit/s: 20th, 50th, 80th percentile (operations)",
                "at the 80th percentile 0.129 Gbit/s apart at most, of up to 48",
                here,
            )
        )
    notes = [
        f"{RANKS} hosts, one rank on each, unbroken coll bench, no result wrong. Faults: "
        f"{FIRST_S} s after each beginning a link falls silent at the switch for 20 s, then all "
        "are well for 20 s, then the next (the paper's Figure 11: one fault that stays). BFD "
        f"{bfd_ms} ms × 3, fast_failover.",
        "Left out: " + "; ".join(left_out) + ".",
    ]
    return {
        "figures": [
            [
                "11",
                figure(
                    "THORN-ML, Figure 11: collective operations with faults and without",
                    panels,
                    2,
                    notes,
                ),
            ]
        ],
        "rows": rows,
    }
