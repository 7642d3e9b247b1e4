#!/usr/bin/env python3
"""One fault at a random moment of a random operation, again and again, each time another: every result is right, and what broke is found.

The seed of a run says its operation, type, size, ranks on two to four hosts, its fault and when. Where three hosts are there all ranks must come to the
same verdict, and how many verdicts are right is printed: at least 99 % are to be. With two, a cut cable and a dead switch look alike.
`--runs 300` is the long form; `--seed` says with which seed it begins, so that what failed can be run again alone.
"""

import argparse
import random
import sys

from coll import LONG, STARTS, Job, communicators, sent, since
from lib.fabric import Fabric
from lib.process import Failure, wait_until
from lib.suite import Suite

RAILS = 4
RUNS = 10
RIGHT = 0.99
OPERATIONS = ["all-reduce", "all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "all-to-all", "send-recv"]
TYPES = ["f32", "f64", "bf16", "i32"]
BYTES = [1 << 20, 2 << 20, 4 << 20]
# Ranks by their hosts.
PLACES = ["ab", "abc", "abc", "abcd", "abcd", "aabbcc"]
# A fault, and what is said of it; a work request that fails by itself is nothing to find.
FAULTS = [
    ("nic {host}/{rail} dead", "host {number} NIC {rail} is dead or its port is down"),
    ("nic {host}/{rail} down", "host {number} NIC {rail} is dead or its port is down"),
    ("cable {host}/{rail} cut", "the cable of host {number} NIC {rail} is cut"),
    ("switch rail{rail} down", "the switch of rail {rail} is down"),
    ("wqe-error {host}/{rail}", None),
]
# What the NICs of a host have carried when the fault comes: from the middle of the first operations to that of the hundredth or so.
CARRIED_BYTES = (1 << 20, 128 << 20)


def verdicts(fabric) -> dict:
    """What each rank has heard of where something broke; whoever found it, and several may."""
    return {s["rank"]: [h["what"].split(" finds: ")[-1] for h in s["happened"]] for s in communicators(fabric)}


def storm(logs, seed, tally):
    """A run."""
    draw = random.Random(seed)
    places, op, kind, size = draw.choice(PLACES), draw.choice(OPERATIONS), draw.choice(TYPES), draw.choice(BYTES)
    hosts = sorted(set(places))
    # Of send-recv, the first and the last rank carry something.
    takes_part = [0, len(hosts) - 1] if op == "send-recv" else range(len(hosts))
    number, rail = draw.choice(takes_part), draw.randrange(RAILS)
    pattern, told = draw.choice(FAULTS)
    names = {"host": hosts[number], "number": number, "rail": rail}
    fault = pattern.format(**names)
    with Fabric(logs) as fabric:
        job = Job(fabric, list(places), "--op", op, "--type", kind, "--min", size, "--max", size, *LONG)
        host = hosts[1] if op == "reduce" else "a"
        before, enough = sent(fabric, host), draw.randint(*CARRIED_BYTES)
        wait_until(lambda: any(p.ended() for p in job.ranks) or sum(since(fabric, host, before)) > enough, STARTS, f"{enough} bytes of host {host}")
        fabric.fault(fault, *(["--at", "0s"] if told is None else []))

        def heard():
            if any(p.ended() for p in job.ranks):
                raise Failure(f"a rank has ended: {[p.output()[-300:] for p in job.ranks if p.ended()]}")
            said = verdicts(fabric)
            return len(said) == len(job.ranks) and all(said.values())

        wait_until(heard, STARTS, f"all ranks have heard of '{fault}'")
        first = {rank: said[0] for rank, said in verdicts(fabric).items()}
        if len(set(first.values())) > 1:
            raise Failure(f"'{fault}': ranks have heard different things: {first}")
        fabric.clear()
        line = job.end()[-1]
    said = first[0]
    if told is not None and len(hosts) > 2:
        tally.append(told.format(**names) in said)
        if not tally[-1]:
            print(f"      '{fault}' was taken for '{said}'", flush=True)
    return f"{op} of {size >> 20} MiB {kind} on {places}, {fault}: {said}; {line['iterations']} operations"


def main() -> int:
    """Runs all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="that of the first")
    args = parser.parse_args()
    suite, tally = Suite("coll_storms"), []
    for seed in range(args.seed, args.seed + args.runs):
        suite.case(f"seed {seed}", storm, seed, tally)

    def rightly(_logs):
        share = f"{sum(tally)} of {len(tally)} verdicts are right"
        if sum(tally) < RIGHT * len(tally):
            raise Failure(share)
        return share

    suite.case("what broke is found", rightly)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
