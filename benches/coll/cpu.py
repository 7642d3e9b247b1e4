#!/usr/bin/env python3
"""The CPU time of one AllReduce between two emulated hosts, all processes together, beside gloo's
over the loopback.

Ours is run twice, with few and with many operations: the difference is what the further ones take,
so that starting and ending cost nothing. gloo needs `--python`, a Python with torch.
docs/internals/collectives.md says where the time goes."""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests")]

from lib.fabric import UNBROKEN, Fabric

FEW, MANY = 10, 60
LIMIT_S = 120
BAR = 1.2


def children_s() -> tuple:
    """User and system time of all processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime, used.ru_stime


def spent_s(command: list, env: dict) -> tuple:
    """User and system time of a command and all that it starts."""
    before = children_s()
    subprocess.run([*map(str, command)], env=env, check=True, capture_output=True, timeout=LIMIT_S)
    return tuple(now - then for now, then in zip(children_s(), before))


def ours(fabric: Fabric, size: str) -> dict:
    """User and system time of an operation: what further ones take."""
    words = [UNBROKEN, "coll", "bench", "--hosts", "a,b", "--op", "all-reduce", "--warmup", 1]
    words += ["--min", size, "--max", size, "--iterations"]
    few, many = (spent_s([*words, operations], fabric.env) for operations in (FEW, MANY))
    user, system = (1e3 * (b - a) / (MANY - FEW) for a, b in zip(few, many))
    return {"user_ms": user, "system_ms": system, "ms": user + system}


def gloo(python: str, size: str):
    """The same of gloo, which says what one of its two ranks took."""
    size_bytes = int(size.removesuffix("M")) << 20
    command = [python, HERE / "gloo.py", "--cpu", "--bytes", size_bytes, "--iterations", MANY]
    done = subprocess.run([*map(str, command)], check=True, capture_output=True, timeout=LIMIT_S)
    user, system = (2e-3 * float(word) for word in done.stdout.split())
    return {"user_ms": user, "system_ms": system, "ms": user + system}


def shown(row: dict) -> str:
    return f"{row['ms']:6.1f} ms ({row['user_ms']:.1f} user, {row['system_ms']:.1f} system)"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="64M", help="MiB and M, as 64M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nics", type=int, default=4, help="NICs of each host")
    parser.add_argument("--python", help="a Python with torch: gloo, too")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    if not args.size.removesuffix("M").isdigit() or args.size.isdigit():
        parser.error(f"--size {args.size}: a number and M, as 64M")
    rounds = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as logs:
            with Fabric(Path(logs), "--nics", args.nics) as fabric:
                row = {"ours": ours(fabric, args.size)}
        if args.python:
            row["gloo"] = gloo(args.python, args.size)
            row["ratio"] = row["ours"]["ms"] / row["gloo"]["ms"]
        rounds.append(row)
        if not args.json:
            beside = f"; gloo {shown(row['gloo'])}; {row['ratio']:.2f}" if args.python else ""
            print(f"AllReduce of {args.size}: {shown(row['ours'])}{beside}", flush=True)
    found = {"size": args.size, "rounds": rounds, "bar": BAR}
    if args.python:
        found["ratio"] = statistics.median(row["ratio"] for row in rounds)
    if args.json:
        print(json.dumps(found))
    elif args.python:
        print(f"{found['ratio']:.2f} times gloo's CPU time (median; wanted: {BAR})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
