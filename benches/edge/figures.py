#!/usr/bin/env python3
"""Measures the host edge for its figures: `figures.py outage|latency|collectives|training --out
FILE.json`; see docs/guide/edge.md.

Hosts and switches are network namespaces, links are veth, the NICs are softnics, the routing is
real FRR. What is to be drawn and what is published go to FILE. Facts are checked (no error, the
faults were on links that carried traffic), times are only told. Ends with 77 and a reason where
it cannot run; every wait has a limit, and namespaces are taken down whatever happens.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests"), str(HERE.parent), str(HERE)]

import collectives
import latency
import outage
import training
from lib.edge import need_root_and_tools
from lib.process import SKIPPED, Failure, Skip
from picture import setting

MEASURE = {
    "outage": outage.measure,
    "latency": latency.measure,
    "collectives": collectives.measure,
    "training": training.measure,
}


def hurry():
    """Everything once and short: shows that it works, and no more."""
    outage.PROBES = outage.STREAMS = 1
    latency.RUNS, latency.MESSAGES = 2, 300
    collectives.SECONDS, collectives.OPS, collectives.SIZES = (
        {False: 4, True: 30},
        ("all-reduce", "broadcast"),
        ("250M",),
    )
    training.SECONDS, training.CYCLE_S = 30, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=MEASURE)
    parser.add_argument("--out", type=Path, required=True, help="where it is written")
    parser.add_argument("--python", help="a Python that has torch")
    # 10 ms need cores that are free: where others keep them busy, sessions are lost without a
    # fault.
    parser.add_argument(
        "--bfd-ms",
        type=int,
        default=int(os.environ.get("UNBROKEN_EDGE_BFD_MS", 10)),
        help="milliseconds between two BFD packets",
    )
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    parser.add_argument("--logs", type=Path, help="where logs of programs go, and stay")
    args = parser.parse_args()
    # Whoever ends it leaves no namespaces behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if args.quick:
        hurry()
    try:
        need_root_and_tools()
        began = setting()
        with tempfile.TemporaryDirectory() as folder:
            logs = args.logs or Path(folder)
            logs.mkdir(parents=True, exist_ok=True)
            measured = MEASURE[args.name](logs, args.python, args.bfd_ms)
    except Skip as skip:
        print(f"THORN-ML's figures of '{args.name}' are left out: {skip}")
        return SKIPPED
    except Failure as failure:
        print(f"figures.py {args.name}: {failure}", file=sys.stderr)
        return 1
    measured["setting"] = f"began: {began}; ended: {setting()}"
    for _, figure in measured["figures"]:
        figure["notes"].append(
            f"Network namespaces, veth, softnic, real FRR, not RNICs. {measured['setting']}."
        )
    args.out.write_text(json.dumps(measured, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
