"""Ten seconds of random faults of every kind, each time with another program: none may lose its
connections.

All kinds of faults, a new one every 0.6 s, several at once, on four rails, of which one is never
broken: so there is always a path, and a QP that gives up is a defect. The seed of a run decides its
faults and its program: the verifier (tests/c/verifier.c) with 1 to 64 QPs, receives of their own or
shared, polling or asleep on a completion channel; or tests/c/threads.c, where many threads use the
same objects.
"""

import json
import random
import time

import pytest

from lib import options
from lib.cc import compile_c
from lib.fabric import Fabric
from lib.process import Failure, wait_until
from lib.verifier import report, start, verified

# Runs on each kind of device.
RUNS = 250 if options.LONG else 5
# The first seeds differ on devices of the two kinds.
PLAIN_SEED = 1000

FAULT_SECONDS = 10
EVERY_SECONDS = 0.6
# How long a fault lasts.
LASTS_SECONDS = (0.05, 1.5)
# Behind the last fault: a path that was given up for dead is found again, and what was held back
# leaves.
END_SECONDS = 60
LIMIT_SECONDS = 120
RAILS = 4
QPS = (1, 2, 4, 4, 16, 64)
# Messages that both ends have verified after each fault, in the mean.
LEAST_MESSAGES = 20
THREADS_EVERY = 5
CLOSED = "the peer closed its QP"

# What takes a path away; of a NIC and its rail. The same, but for the last two, as often at one end
# as at the other.
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


def set_faults(fabric, rng, going) -> list:
    """Faults for ten seconds, as long as `going()`. Gives them with their time."""
    # Not the first, to which QPs fail back.
    spared, faults = rng.randrange(1, RAILS), []
    began = time.monotonic()
    while time.monotonic() < began + FAULT_SECONDS and going():
        breaks = rng.random() < 0.7
        rail = rng.choice([r for r in range(RAILS) if r != spared or not breaks])
        kind = rng.choice(BREAKDOWNS if breaks else IMPAIRMENTS).format(
            nic=f"{rng.choice('ab')}/{rail}", rail=rail
        )
        lasts_ms = round(1000 * rng.uniform(*LASTS_SECONDS))
        fabric.fault(kind, "--for", f"{lasts_ms}ms")
        faults.append(f"{time.monotonic() - began:.2f} s: {kind} for {lasts_ms} ms")
        due = began + len(faults) * EVERY_SECONDS
        time.sleep(max(0, due - time.monotonic()))
    return faults


def check(fabric, faults, closed=False):
    """Fails where a QP gave up. `closed`: the program closes QPs whose peers are open, which may be
    all that they hear."""
    lost = [e for e in fabric.events("give-up") if not (closed and e["why"].startswith(CLOSED))]
    if lost:
        raise Failure(f"{len(lost)} QPs gave up, the first: {lost[0]}; faults: {faults}")


def verifier(logs, seed, rng):
    """A run of the verifier."""
    qps = rng.choice(QPS)
    arguments = ["--qps", qps, "--seed", seed, *(["--max-bytes", 8192] if qps > 4 else [])]
    arguments += [option for option in ("--srq", "--events") if rng.random() < 0.5]
    with Fabric(logs) as fabric:
        programs = start(
            fabric, logs, compile_c("verifier", "-libverbs"), *arguments, "--seconds", LIMIT_SECONDS
        )
        both = list(programs.values())
        wait_until(
            lambda: any(p.ended() for p in both) or verified(logs, "a"), 20, "the first messages"
        )
        faults = set_faults(fabric, rng, lambda: not any(p.ended() for p in both))
        (logs / "stop").touch()
        statuses = [(p.name, p.wait(END_SECONDS)) for p in both]
        check(fabric, faults)
        if any(status != 0 for _, status in statuses):
            raise Failure(f"{statuses}; {' '.join(map(str, arguments))}; faults: {faults}")
        results = [report(p) for p in both]
        messages = min(r["verified_messages"] for r in results)
        if messages < LEAST_MESSAGES * len(faults) or any(r["errors"] for r in results):
            raise Failure(f"{results} after {faults}")
        switches = fabric.events("switch")
        rails = {event["to"].split("-")[0].split("/")[1] for event in switches}
        return (
            f"{' '.join(map(str, arguments))}: {len(faults)} faults, {len(switches)} switches to "
            f"{len(rails)} rails, {messages} messages"
        )


def threads(logs, _seed, rng):
    """A run of many threads. Its program checks everything; its QPs are connected to each other."""
    program = compile_c("threads", "-libverbs", "-lpthread")
    with Fabric(logs) as fabric:
        process = fabric.run("a", [program, "--seconds", FAULT_SECONDS, "--faults"], "a-threads")
        wait_until(lambda: process.ended() or "running" in process.output(), 20, "traffic")
        faults = set_faults(fabric, rng, lambda: not process.ended())
        status = process.wait(END_SECONDS)
        check(fabric, faults, closed=True)
        if status != 0:
            raise Failure(f"threads ended with {status}; faults: {faults}")
        result = json.loads(process.output().splitlines()[-1])
        return (
            f"threads: {len(faults)} faults, {len(fabric.events('switch'))} switches, "
            f"{result['messages']} messages"
        )


@pytest.mark.parametrize("seed", range(options.SEED, options.SEED + RUNS))
def test_random_faults(logs, note, device, seed):
    seed += PLAIN_SEED if device == "plain" else 0
    run = threads if seed % THREADS_EVERY == 0 else verifier
    note(run(logs, seed, random.Random(seed)))
