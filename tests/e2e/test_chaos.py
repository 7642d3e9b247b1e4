"""Random programs beside random faults, compared with what a full device gives without any.

A seed says what tests/c/churn.c does (`--chaos`): two processes with two threads each, whose queue
pairs come and go, are reset and connected anew, with regions and keys that outlive them; and which
faults strike which NICs of both ends, when, and for how long. One rail stays whole. The outcome of
each queue pair (status, operations, what the memory holds in the end) must be that of the same
programs on full devices without faults and without failover. What may differ is what atomics have
that meet a failure, and rounds that could not begin since their NIC was dead.

    pytest tests/e2e/test_chaos.py -k plain --seed N     runs N again, first of all
"""

import json
import random
import time

import pytest

from lib import options
from lib.cc import compile_c
from lib.device import PLAIN_GID_INDEX
from lib.fabric import Fabric
from lib.machine import MachineFabric
from lib.ports import free_port, listens
from lib.process import Failure, wait_until

SEEDS = {"plain": 1000 if options.LONG else 6, "machine": 100 if options.LONG else 3}
THREADS, ROUNDS = 2, 6
NICS = 3
END_SECONDS = 120
# What there is of faults, of a NIC or of its rail.
FAULTS = [
    "nic {nic} dead",
    "nic {nic} dead",
    "nic {nic} down",
    "cable {nic} cut",
    "switch rail{rail} down",
    "flap {nic} down=20ms up=60ms",
    "flap cable {nic} down=150ms up=200ms",
    "loss {nic} 2%",
    "loss cable {nic} tx 20%",
    "delay rail{rail} 1ms",
    "reorder {nic} 1%",
    "corrupt {nic} 1%",
    "wqe-error {nic}",
]
LASTS_SECONDS = (0.05, 0.8)
PAUSE_SECONDS = (0.0, 0.4)
# What queue pairs with atomics in flight may end with.
ORIGINAL_ERRORS = {
    "transport retry counter exceeded",
    "local QP operation error",
    "fatal error",
    "Work Request Flushed Error",
}
KINDS = {
    "full": lambda logs: Fabric(logs, "--nics", str(NICS)),
    "plain": lambda logs: Plain(logs, "--nics", str(NICS)),
    "machine": lambda logs: MachineFabric(logs, "--nics", str(NICS)),
}


class Plain(Fabric):
    device, gid_index = ("--device", "plain"), PLAIN_GID_INDEX


def lines(process, kind: str) -> list:
    """What a program has told in lines that begin with a word."""
    told = (line.partition(" ") for line in process.output().splitlines())
    return [json.loads(text) for word, _, text in told if word == kind]


class Faults:
    """The faults of a seed: they come and go while programs run. One rail has none."""

    def __init__(self, fabric, seed):
        self.fabric, self.random, self.set, self.next = fabric, random.Random(seed), [], 0
        whole = self.random.randrange(NICS)
        self.rails = [rail for rail in range(NICS) if rail != whole]
        self.seen = []

    def strike(self):
        rail = self.random.choice(self.rails)
        nic = f"{self.random.choice('ab')}/{rail}"
        fault = self.random.choice(FAULTS).format(nic=nic, rail=rail)
        if fault not in self.set:
            self.fabric.fault(fault)
            self.set.append(fault)
            self.seen.append(fault)

    def step(self):
        if time.monotonic() < self.next:
            return
        if self.set and self.random.randrange(3):
            self.fabric.clear()
            self.set = []
            pause = PAUSE_SECONDS
        else:
            self.strike()
            pause = LASTS_SECONDS
        self.next = time.monotonic() + self.random.uniform(*pause)


def outcomes(logs, kind, seed, faults, right=None) -> tuple[dict, list, list]:
    """What became of all queue pairs, what could not begin, and the faults that there were. With
    what is right it is compared."""
    logs.mkdir(exist_ok=True)
    with KINDS[kind](logs) as fabric:
        args = [compile_c("churn", "-libverbs", "-lpthread"), "--chaos"]
        args += ["--faults"] if faults else []
        port = free_port()
        fabric.status()
        striking = Faults(fabric, seed) if faults else None
        if faults and striking.random.randrange(2):
            striking.strike()  # before anybody is there
        server = fabric.run("b", [*args, "--listen", port], "b", failover=faults)
        ready = lambda: server.ended() or listens(server.pid, port)
        wait_until(ready, END_SECONDS, "the server listens")
        where = ["--connect", f"127.0.0.1:{port}", "--threads", THREADS]
        where += ["--rounds", ROUNDS, "--seconds", 600, "--seed", seed]
        client = fabric.run("a", [*args, *where], "a", failover=faults)
        said, until = "", time.monotonic() + END_SECONDS
        while not any(line.startswith("{") for line in said.splitlines()):
            if said != (now := client.output()):  # a busy machine takes its time
                said, until = now, time.monotonic() + END_SECONDS
            for process in (server, client):
                if process.ended():
                    raise Failure(f"{process.name} has ended: {process.output()[-400:]}")
            if time.monotonic() > until:
                raise Failure(f"nothing has ended for {END_SECONDS} s")
            if striking:
                striking.step()
            time.sleep(0.02)
        if faults:
            fabric.clear()
        for process in (client, server):
            process.popen.terminate()
            process.expect_success(END_SECONDS)
        told = {
            (p.name, o["thread"], o["round"], o["life"], o["qp"]): o
            for p in (client, server)
            for o in lines(p, "outcome")
        }
        unbegun = [o for p in (client, server) for o in lines(p, "abandoned")]
        if right and (found := wrong(right, told, unbegun)):
            raise Failure(f"faults {striking.seen}: {'; '.join(found[:4])}")
        return told, unbegun, striking.seen if striking else []


def wrong(right: dict, told: dict, unbegun: list) -> list:
    """Where outcomes are not those of a full device without faults."""
    found = []
    first = {(o["thread"], o["round"]): o["life"] for o in reversed(unbegun)}
    for key, is_right in right.items():
        _, thread, number, life, _ = key
        if is_right["timing"] or told.get(key) == is_right:
            continue
        if key not in told and life >= first.get((thread, number), life + 1):
            continue
        got = told.get(key)
        ended = {got["status"], got["peer"]} - {"success"} if got else set()
        if is_right["atomics"] and ended and ended <= ORIGINAL_ERRORS:
            continue
        found.append(f"{key}: {got}, right is {is_right}")
    return found


def run_seed(logs, kind, seed) -> tuple[int, int, int]:
    """One seed. Gives how many queue pairs there were, how many rounds could not begin, and how
    many faults there were."""
    again = f"pytest tests/e2e/test_chaos.py -k {kind} --seed {seed}"
    try:
        right, _, _ = outcomes(logs / f"{seed}-full", "full", seed, False)
        told, unbegun, faults = outcomes(logs / f"{seed}-{kind}", kind, seed, True, right)
    except Failure as failure:
        raise Failure(f"seed {seed} ({again}): {failure}") from None
    return len(right), len(unbegun), len(faults)


@pytest.mark.timeout(36000 if options.LONG else 900)
@pytest.mark.parametrize("kind", SEEDS)
def test_chaos(logs, note, kind):
    """Some seeds, from `--seed` on."""
    done = [run_seed(logs, kind, options.SEED + n) for n in range(SEEDS[kind])]
    pairs, unbegun, faults = map(sum, zip(*done))
    if not faults:
        raise Failure("there were no faults")
    note(f"{len(done)} seeds, {pairs} ends of queue pairs, {faults} faults, {unbegun} not begun")
