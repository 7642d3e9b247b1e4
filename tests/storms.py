#!/usr/bin/env python3
"""Ten seconds of random faults of every kind, again and again, each time with another program: none may lose its connections.

All kinds of faults, a new one every 0.6 s, several at once, on four rails, of which one is never broken: so there is always a path, and a QP
that gives up is a defect. The seed of a run says its faults, its device (full or plain) and its program: the verifier (tests/c/verifier.c)
with 1 to 64 QPs, receives of their own or shared, polling or asleep on a completion channel; or tests/c/threads.c, where many threads use the
same objects. `--runs 500` is the long form; `--seed` says with which seed it begins, so that what failed can be run again alone.
"""

import json
import random
import sys
import time

from lib import device
from lib.cc import compile_c
from lib.fabric import Fabric
from lib.process import Failure, wait_until
from lib.suite import Suite
from verify import report, start, verified

STORM_SECONDS = 10
EVERY_SECONDS = 0.6
# How long a fault lasts.
LASTS_SECONDS = (0.05, 1.5)
# Behind the last fault: a path that was given up for dead is found again, and what was held back leaves.
END_SECONDS = 60
LIMIT_SECONDS = 120
RAILS = 4
QPS = (1, 2, 4, 4, 16, 64)
# Messages that both ends have verified after each fault, in the mean.
LEAST_MESSAGES = 20
THREADS_EVERY = 5
CLOSED = "the peer closed its QP"

# What takes a path away; of a NIC and its rail. The same, but for the last two, as often at one end as at the other.
BREAKDOWNS = [
    "nic {nic} dead",
    "nic {nic} dead",
    "nic {nic} down",
    "nic {nic} down",
    "cable {nic} cut",
    "cable {nic} cut",
    "flap {nic} down=20ms up=60ms",
    "flap cable {nic} down=150ms up=200ms",
    "flap cable {nic} down=5ms up=30ms",
    "switch rail{rail} down",
    "flap rail{rail} down=5ms up=50ms",
]
# What leaves one, also on the rail that is never broken.
IMPAIRMENTS = [
    "loss {nic} 1%",
    "loss cable {nic} tx 2%",
    "burst-loss rail{rail} 1% burst=8",
    "corrupt {nic} 1%",
    "duplicate {nic} 2%",
    "reorder {nic} 1%",
    "rate {nic} 1Gbit",
    "delay rail{rail} 1ms",
    "jitter {nic} rx 1ms",
    "wqe-error {nic}",
]


def storm(fabric, dice, going) -> list:
    """Faults for ten seconds, as long as `going()`. Gives them with their time."""
    # Not the first, where QPs are at home and go back to.
    spared, said = dice.randrange(1, RAILS), []
    began = time.monotonic()
    while time.monotonic() < began + STORM_SECONDS and going():
        breaks = dice.random() < 0.7
        rail = dice.choice([r for r in range(RAILS) if r != spared or not breaks])
        kind = dice.choice(BREAKDOWNS if breaks else IMPAIRMENTS).format(nic=f"{dice.choice('ab')}/{rail}", rail=rail)
        lasts_ms = round(1000 * dice.uniform(*LASTS_SECONDS))
        fabric.fault(kind, "--for", f"{lasts_ms}ms")
        said.append(f"{time.monotonic() - began:.2f} s: {kind} for {lasts_ms} ms")
        due = began + len(said) * EVERY_SECONDS
        time.sleep(max(0, due - time.monotonic()))
    return said


def check(fabric, said, closed=False):
    """Fails where a QP gave up. `closed`: the program closes QPs whose peers are open, which may be all that they hear."""
    lost = [e for e in fabric.events("give-up") if not (closed and e["why"].startswith(CLOSED))]
    if lost:
        raise Failure(f"{len(lost)} QPs gave up, the first: {lost[0]}; faults: {said}")


def verifier(logs, seed, dice):
    """A run of the verifier."""
    qps = dice.choice(QPS)
    options = ["--qps", qps, "--seed", seed, *(["--max-bytes", 8192] if qps > 4 else [])]
    options += [option for option in ("--srq", "--events") if dice.random() < 0.5]
    with Fabric(logs) as fabric:
        programs = start(fabric, logs, compile_c("verifier", "-libverbs"), *options, "--seconds", LIMIT_SECONDS)
        both = list(programs.values())
        wait_until(lambda: any(p.ended() for p in both) or verified(logs, "a"), 20, "the first messages")
        said = storm(fabric, dice, lambda: not any(p.ended() for p in both))
        (logs / "stop").touch()
        statuses = [(p.name, p.wait(END_SECONDS)) for p in both]
        check(fabric, said)
        if any(status != 0 for _, status in statuses):
            raise Failure(f"{statuses}; {' '.join(map(str, options))}; faults: {said}")
        results = [report(p) for p in both]
        messages = min(r["verified_messages"] for r in results)
        if messages < LEAST_MESSAGES * len(said) or any(r["errors"] for r in results):
            raise Failure(f"{results} after {said}")
        switches = fabric.events("switch")
        rails = {event["to"].split("-")[0].split("/")[1] for event in switches}
        return f"{' '.join(map(str, options))}: {len(said)} faults, {len(switches)} switches to {len(rails)} rails, {messages} messages"


def threads(logs, _seed, dice):
    """A run of many threads. Its program checks everything; its QPs are connected to each other."""
    program = compile_c("threads", "-libverbs", "-lpthread")
    with Fabric(logs) as fabric:
        process = fabric.run("a", [program, "--seconds", STORM_SECONDS, "--faults"], "a-threads")
        wait_until(lambda: process.ended() or "running" in process.output(), 20, "traffic")
        said = storm(fabric, dice, lambda: not process.ended())
        status = process.wait(END_SECONDS)
        check(fabric, said, closed=True)
        if status != 0:
            raise Failure(f"threads ended with {status}; faults: {said}")
        result = json.loads(process.output().splitlines()[-1])
        return f"threads: {len(said)} faults, {len(fabric.events('switch'))} switches, {result['messages']} messages"


def main() -> int:
    """Runs all of it."""
    parser = device.parser(__doc__)
    parser.add_argument("--runs", type=int, default=10, help="how many (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="the seed of the first (default: 1)")
    options = parser.parse_args()
    suite = Suite(device.use("storms", options.device) + (f"-{options.seed}" if options.seed != 1 else ""))
    for seed in range(options.seed, options.seed + options.runs):
        run = threads if seed % THREADS_EVERY == 0 else verifier
        suite.case(f"seed {seed}", run, seed, random.Random(seed))
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
