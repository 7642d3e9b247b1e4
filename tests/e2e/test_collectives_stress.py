"""One fault at a random moment of a random operation, each time another.

Every result is right, and the fault is located. The seed of a run decides its operation, type,
size, ranks on two to four hosts, its fault and when. With three hosts or more all ranks must come
to the same verdict, and at least 99 % of the verdicts must be right. With two, a cut cable and a
dead switch look alike.
"""

import random

import pytest

from lib import options
from lib.collective import LONG, STARTS, Job, communicators, sent, since
from lib.fabric import Fabric
from lib.process import Failure, wait_until

RAILS = 4
RUNS, LONG_RUNS = 10, 290
RIGHT = 0.99
OPERATIONS = [
    "all-reduce",
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "broadcast",
    "reduce",
    "all-to-all",
    "send-recv",
]
TYPES = ["f32", "f64", "bf16", "i32"]
BYTES = [1 << 20, 2 << 20, 4 << 20]
# Ranks by their hosts.
PLACES = ["ab", "abc", "abc", "abcd", "abcd", "aabbcc"]
# A fault, and what is reported of it; a work request that fails by itself is nothing to find.
FAULTS = [
    ("nic {host}/{rail} dead", "host {number} NIC {rail} is dead or its port is down"),
    ("nic {host}/{rail} down", "host {number} NIC {rail} is dead or its port is down"),
    ("cable {host}/{rail} cut", "the cable of host {number} NIC {rail} is cut"),
    ("switch rail{rail} down", "the switch of rail {rail} is down"),
    ("wqe-error {host}/{rail}", None),
]
# What the NICs of a host have carried when the fault comes: from the middle of the first operations
# to that of the hundredth or so.
CARRIED_BYTES = (1 << 20, 128 << 20)


def verdicts(fabric) -> dict:
    """What each rank reports of where something broke; whoever located it, and several may."""
    return {
        s["rank"]: [
            h["what"].split(" finds: ")[-1] for h in s["happened"] if " finds: " in h["what"]
        ]
        for s in communicators(fabric)
    }


def run(logs, seed) -> tuple:
    """A run. Gives what it showed in words, and whether the verdict was right: None where there was
    none to be found, or where two hosts cannot tell."""
    draw = random.Random(seed)
    places, op = draw.choice(PLACES), draw.choice(OPERATIONS)
    kind, size = draw.choice(TYPES), draw.choice(BYTES)
    hosts = sorted(set(places))
    # Of send-recv, the first and the last rank carry something.
    takes_part = [0, len(hosts) - 1] if op == "send-recv" else range(len(hosts))
    number, rail = draw.choice(takes_part), draw.randrange(RAILS)
    pattern, expected = draw.choice(FAULTS)
    names = {"host": hosts[number], "number": number, "rail": rail}
    fault = pattern.format(**names)
    with Fabric(logs) as fabric:
        job = Job(
            fabric, list(places), "--op", op, "--type", kind, "--min", size, "--max", size, *LONG
        )
        host = hosts[1] if op == "reduce" else "a"
        before, enough = sent(fabric, host), draw.randint(*CARRIED_BYTES)
        wait_until(
            lambda: any(p.ended() for p in job.ranks) or sum(since(fabric, host, before)) > enough,
            STARTS,
            f"{enough} bytes of host {host}",
        )
        fabric.fault(fault, *(["--at", "0s"] if expected is None else []))

        def all_report():
            if any(p.ended() for p in job.ranks):
                raise Failure(
                    f"a rank has ended: {[p.output()[-300:] for p in job.ranks if p.ended()]}"
                )
            reported = verdicts(fabric)
            return len(reported) == len(job.ranks) and all(reported.values())

        wait_until(all_report, STARTS, f"all ranks report '{fault}'")
        first = {rank: reported[0] for rank, reported in verdicts(fabric).items()}
        if len(set(first.values())) > 1:
            raise Failure(f"'{fault}': ranks report different things: {first}")
        fabric.clear()
        line = job.end()[-1]
    reported = first[0]
    right = (
        expected.format(**names) in reported if expected is not None and len(hosts) > 2 else None
    )
    shown = f"{op} of {size >> 20} MiB {kind} on {places}, {fault}: {reported}"
    return f"{shown}; {line['iterations']} operations", right


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.smoke if seed == 1 else ())
        for seed in range(options.SEED, options.SEED + RUNS)
    ],
)
def test_random_fault(logs, note, seed):
    """Of so few verdicts a wrong one is more than a hundredth."""
    shown, right = run(logs, seed)
    note(shown)
    assert right is not False, shown


@pytest.mark.slow
@pytest.mark.skipif(not options.LONG, reason="it takes half an hour: --long runs it")
@pytest.mark.timeout(7200)
def test_share_of_right_verdicts(logs, note):
    verdicts_right, wrong = [], []
    for seed in range(options.SEED + RUNS, options.SEED + RUNS + LONG_RUNS):
        folder = logs / f"seed-{seed}"
        folder.mkdir()
        shown, right = run(folder, seed)
        verdicts_right += [right] if right is not None else []
        wrong += [f"seed {seed}: {shown}"] if right is False else []
    share = f"{sum(verdicts_right)} of {len(verdicts_right)} verdicts are right"
    note(share)
    if sum(verdicts_right) < RIGHT * len(verdicts_right):
        raise Failure(f"{share}; wrong: {wrong}")
