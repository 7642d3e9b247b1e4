#!/usr/bin/env python3
"""Compares the simulator of collectives with SimGrid, which knows nothing of it.

Of each case `unbroken plan --messages` says every message of a plan, what it waits for and the
links that it uses. SimGrid follows these messages (simgrid.cc); what it says is compared with what
the simulator says of the same plan by its volumes. SimGrid's model is CM02, with nothing of what
TCP does. Nothing is measured: every machine gives the same.

Needs Debian's libsimgrid-dev and g++; the exit status is 77 where they are missing."""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests"), str(HERE)]

from computed import said
from lib.paths import TARGET
from lib.process import SKIPPED

HEADER = Path("/usr/include/simgrid/s4u.hpp")
LIMIT_S = 600
# What is claimed, in docs/internals/collectives.md.
BAR_PERCENT = 2.0


def of(hosts, nics, *more, gpus=1, op="all-reduce", shape=None, fail=()):
    """Options of `unbroken plan`, but for the size."""
    words = ["--hosts", hosts, "--nics", nics, "--gpus", gpus, "--messages", op]
    words += ["--shape", shape] if shape else []
    words += [word for nic in fail for word in ("--fail", nic)]
    return [*words, *([] if fail else ["--lost", 0]), *more]


def lost(*nics):
    """Names of lost NICs: host, NIC."""
    return [f"host{host}/nic{nic}" for host, nic in nics]


PODS = ["--pod-hosts", 2, "--oversubscription", 2]
CASES = {
    "direct, 2 hosts": of(2, 8, shape="direct"),
    "direct, 2 hosts, one lost": of(2, 8, shape="direct", fail=lost((0, 0))),
    "direct, 4 hosts": of(4, 4, shape="direct"),
    "direct, 16 hosts of 2 NICs, leaves 4:1": of(
        16, 2, "--pod-hosts", 4, "--oversubscription", 4, shape="direct"
    ),
    "stars, 4 hosts, one lost": of(4, 8, shape="stars", fail=lost((0, 0))),
    "stars, 3 hosts, a slow NIC": of(3, 4, shape="stars", fail=["host0/nic0=25%"]),
    "stars, 8 hosts, two lost at one, one at another": of(
        8, 4, shape="stars", fail=lost((0, 0), (0, 1), (3, 2))
    ),
    "stars, 8 hosts, leaves 2:1, one lost": of(8, 4, *PODS, shape="stars", fail=lost((0, 0))),
    "stars, 4 hosts, dual plane, a port lost": of(
        4, 8, "--planes", 2, shape="stars", fail=["host0/nic0/port0"]
    ),
    "ring, 4 hosts": of(4, 8, shape="ring"),
    "ring, 8 hosts, one lost": of(8, 4, shape="ring", fail=lost((0, 0))),
    "ring, 16 hosts of 2 NICs": of(16, 2, shape="ring"),
    "ring, 8 hosts, leaves 2:1, core 2:1": of(
        8, 4, *PODS, "--tiers", 3, "--core-oversubscription", 2, shape="ring"
    ),
    "flat ring, 4 hosts of 8 GPUs": of(4, 8, gpus=8, shape="flat-ring"),
    "bridged ring, rails apart, different ones lost": of(
        6, 2, "--rails-apart", shape="bridged-ring", fail=lost((0, 0), (1, 1), (3, 0))
    ),
    "leaves, 4 hosts, four of 8 lost": of(
        4, 8, shape="leaves", fail=lost((0, 0), (0, 1), (0, 2), (0, 3))
    ),
    "leaves, 8 hosts of 2 NICs, one lost": of(8, 2, shape="leaves", fail=lost((2, 0))),
    "r2ccl, 4 hosts, three of 8 lost": of(
        4, 8, shape="r2ccl", fail=lost((0, 0), (0, 1), (0, 2))
    ),
    "tree, 8 hosts": of(8, 4, shape="tree"),
    "rooted tree, 4 hosts": of(4, 4, shape="rooted-tree"),
    "as planned, 4 hosts of 8 GPUs, one lost": of(4, 8, gpus=8, fail=lost((0, 0))),
    "all-gather, 4 hosts, one lost": of(4, 8, op="all-gather", fail=lost((0, 0))),
    "reduce-scatter, 4 hosts, a slow NIC": of(
        4, 4, op="reduce-scatter", fail=["host0/nic0=50%"]
    ),
    "all-to-all, 4 hosts of 4 GPUs, one lost": of(
        4, 4, gpus=4, op="all-to-all", fail=lost((0, 0))
    ),
    "broadcast, 8 hosts": of(8, 4, op="broadcast"),
    "send-recv, leaves 4:1": of(
        2, 4, "--pod-hosts", 1, "--oversubscription", 4, op="send-recv"
    ),
}


class Missing(Exception):
    """What is needed is not there."""


def program() -> Path:
    """The program that has SimGrid follow messages, compiled if it is older than its source."""
    source, made = HERE / "simgrid.cc", TARGET / "tests-c" / "simgrid"
    if not HEADER.exists():
        raise Missing(f"{HEADER} is missing: install Debian's libsimgrid-dev")
    if made.exists() and made.stat().st_mtime >= source.stat().st_mtime:
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    strict = ["-std=c++17", "-O2", "-Wall", "-Wextra"]
    command = ["g++", *strict, "-o", str(made), str(source), "-lsimgrid"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except FileNotFoundError:
        raise Missing("g++ is missing: install Debian's g++") from None
    if done.returncode:
        raise SystemExit(f"{source.name} does not compile: {done.stderr[:2000]}")
    return made


def flat(traffic: dict, by_message: bool) -> str:
    """What simgrid.cc reads."""
    links, lanes = traffic["links"], traffic["lanes"]
    lines = [f"{int(by_message)} {traffic['room']} {len(links)}"]
    lines += [repr(link["mbps"] / 8) for link in links]
    lines.append(f"{len(lanes)}")
    for lane in lanes:
        numbers = [lane["alpha_us"], len(lane["links"]), *lane["links"]]
        lines.append(" ".join(map(str, numbers)))
    # What a message costs beside its bytes, in bytes of its slowest link.
    own = [
        lane["message_us"] * min(links[link]["mbps"] / 8 for link in lane["links"])
        for lane in lanes
    ]
    lines.append(f"{len(traffic['messages'])}")
    for lane, size, sends, receives in traffic["messages"]:
        lines.append(f"{lane} {round(size + own[lane])} {sends} {receives}")
    lines.append(f"{len(traffic['steps'])}")
    lines += [" ".join(map(str, [len(before), *before])) for before in traffic["steps"]]
    return "\n".join(lines) + "\n"


def followed_us(traffic: dict, by_message: bool) -> float:
    """How long the messages take, by SimGrid."""
    command = [str(program()), "--log=root.thres:error"]
    text = flat(traffic, by_message)
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"{command[0]}: {done.stderr.strip()}")
    return float(done.stdout)


def compare(name: str, size: str, by_message: bool) -> dict:
    """A case, both ways."""
    traffic, began = said("plan", "--size", size, *CASES[name]), time.monotonic()
    followed = followed_us(traffic, by_message)
    return {
        "case": name,
        "shape": traffic["shape"],
        "bytes": traffic["bytes"],
        "chunks": traffic["chunks"],
        "messages": len(traffic["messages"]),
        "simgrid_us": followed,
        "simulator_us": traffic["us"],
        "busiest_us": traffic["busiest_us"],
        "percent": 100 * (traffic["us"] / followed - 1),
        "took_s": time.monotonic() - began,
    }


def shown(rows: list) -> str:
    width = max(len(row["case"]) for row in rows)
    lines = [f"{'case':{width}}  {'shape':12} messages  SimGrid us  ours us   off %"]
    for row in rows:
        lines.append(
            f"{row['case']:{width}}  {row['shape']:12} {row['messages']:8}  "
            f"{row['simgrid_us']:10.1f} {row['simulator_us']:8.1f} {row['percent']:+7.2f}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="WORD", default="", help="cases with this in their name")
    parser.add_argument("--size", default="1G", help="bytes of each collective [1G]")
    parser.add_argument(
        "--by-byte",
        action="store_true",
        help="all messages of a link have the same rate, instead of one by their length",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    names = [name for name in CASES if args.only in name]
    if not names:
        parser.error(f"--only {args.only}: no case has that; there are {', '.join(CASES)}")
    try:
        program()
    except Missing as missing:
        print(f"simgrid.py: {missing}", file=sys.stderr)
        return SKIPPED
    rows = [compare(name, args.size, not args.by_byte) for name in names]
    off = [abs(row["percent"]) for row in rows]
    found = {
        "cases": rows,
        "median_percent": statistics.median(off),
        "worst_percent": max(off),
        "within_bar": sum(percent <= BAR_PERCENT for percent in off),
    }
    if args.json:
        print(json.dumps(found))
    else:
        print(shown(rows))
        print(
            f"median {found['median_percent']:.2f} %, worst {found['worst_percent']:.2f} %; "
            f"{found['within_bar']} of {len(rows)} within {BAR_PERCENT:g} %"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
