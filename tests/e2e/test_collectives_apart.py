"""Hosts that lose different rails until they have none in common. Operations go on over NICs of
different rails, where the network carries that; else out of band, until it does."""

import random
import time

import pytest

from lib import options
from lib.collective import LONG, STARTS, Job, communicators, done, runs, sent, since
from lib.fabric import Fabric
from lib.process import Failure, wait_until

MIB = 1 << 20
RUNS, FLAPS, FLAP_SECONDS = 20, 4, 10
# What is carried by a path that is said to carry.
ENOUGH = 2 * MIB
# Of paths that are tried, 64 bytes each time.
TRIES = 4096
CROSS, OUT_OF_BAND = 62, 61
OPERATIONS = ["all-reduce", "all-gather", "all-to-all", "send-recv", "reduce-scatter", "broadcast"]
HAPPENS = ["nic {nic} dead", "nic {nic} down", "cable {nic} cut"]


def detours(fabric) -> set:
    """What carries streams that are not on their own rail."""
    return {away["over"] for shown in communicators(fabric) for away in shown["away"]}


def all_done(fabric) -> int:
    """Operations that ranks have done, all together."""
    return sum(done(shown) for shown in communicators(fabric))


def goes_on(fabric, job, operations):
    """Waits until ranks have done so many operations more, or one has ended."""
    enough = all_done(fabric) + operations
    over = lambda: any(p.ended() for p in job.ranks) or all_done(fabric) >= enough
    wait_until(over, STARTS, f"{operations} operations more")


def carries(fabric, job, nic, others):
    """Waits until this NIC has sent enough, and sees that those others have sent nothing more."""
    host, rail = nic.split("/")
    before = sent(fabric, host)

    def so():
        if any(p.ended() for p in job.ranks):
            raise Failure(f"a rank has ended: {[p.output()[-300:] for p in job.ranks]}")
        return since(fabric, host, before)[int(rail)] > ENOUGH

    wait_until(so, STARTS, f"traffic of {nic}")
    rest = {n: since(fabric, host, before)[n] for n in others}
    if any(rest.values()):
        raise Failure(f"NICs of {host} that are dead carry {rest}")


@pytest.mark.smoke
def test_hosts_without_a_common_rail_go_on(logs, note):
    """Host a loses NIC 0, host b NIC 1: what is in flight and what comes later goes from a/1 to
    b/0. With the NICs back, all goes where it did."""
    with Fabric(logs, "--nics", "2") as fabric:
        job = Job(fabric, ["a", "b"], "--min", "1M", "--max", "1M", *LONG)
        runs(fabric, job)
        fabric.fault("nic a/0 dead")
        carries(fabric, job, "a/1", [])
        fabric.fault("nic b/1 dead")
        wait_until(lambda: CROSS in detours(fabric), STARTS, "a path over different rails")
        carries(fabric, job, "a/1", [0])
        carries(fabric, job, "b/0", [1])
        fabric.clear()
        wait_until(lambda: not detours(fabric), STARTS, "streams on their own rails")
        for nic in ["a/0", "a/1", "b/0", "b/1"]:
            carries(fabric, job, nic, [])
        note(f"{job.end()[-1]['iterations']} operations")


@pytest.mark.smoke
def test_rails_that_nothing_joins(logs, note):
    """The same where no switch joins the rails: operations go on out of band, slowly, and over NICs
    again as soon as these reach each other."""
    with Fabric(logs, "--nics", "2") as fabric:
        fabric.fault("spine down")
        job = Job(fabric, ["a", "b"], "--min", "1M", "--max", "1M", *LONG)
        runs(fabric, job)
        fabric.fault("nic a/0 dead")
        fabric.fault("nic b/1 dead")
        wait_until(lambda: OUT_OF_BAND in detours(fabric), STARTS, "streams out of band")
        before, nics = all_done(fabric), [sent(fabric, host) for host in "ab"]
        wait_until(lambda: all_done(fabric) > before + 4, STARTS, "operations out of band")
        carried = [sum(since(fabric, host, then)) for host, then in zip("ab", nics)]
        if max(carried) > TRIES:
            raise Failure(f"NICs that do not reach each other carry {carried}")
        said = fabric.command("coll", "status").stdout
        if "no NIC reaches rank 1: what goes there goes out of band, slowly" not in said:
            raise Failure(f"the status does not say so: {said}")
        fabric.clear("spine")
        wait_until(lambda: detours(fabric) == {CROSS}, STARTS, "a path over different rails")
        carries(fabric, job, "a/1", [0])
        fabric.clear()
        wait_until(lambda: not detours(fabric), STARTS, "streams on their own rails")
        note(f"{job.end()[-1]['iterations']} operations")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(RUNS))
def test_random_losses(logs, note, number):
    """Two or three hosts lose NICs in random order, after random numbers of operations, until two
    of them have no rail in common; some come back. Every result is right."""
    dice = random.Random(options.SEED * RUNS + number)
    hosts, nics = "abc"[: dice.choice([2, 3])], dice.choice([2, 3, 4])
    first = dice.randrange(nics)
    kept = {host: (first + at) % nics for at, host in enumerate(hosts)}
    spared = hosts[2:] if dice.random() < 0.5 else ""
    lost = [f"{h}/{r}" for h in hosts for r in range(nics) if h not in spared and r != kept[h]]
    dice.shuffle(lost)
    with Fabric(logs, "--nics", str(nics)) as fabric:
        if dice.random() < 0.25:
            fabric.fault("spine down")
        running = ["--min", "512K", "--max", "512K", "--op", dice.choice(OPERATIONS)]
        job = Job(fabric, list(hosts), *running, *LONG)
        runs(fabric, job)
        for nic in lost:
            goes_on(fabric, job, dice.randrange(20))
            heals = ["--for", f"{dice.randrange(100, 2000)}ms"] if dice.random() < 0.2 else []
            fabric.fault(dice.choice(HAPPENS).format(nic=nic), *heals)
        goes_on(fabric, job, 4 * len(hosts))
        went = detours(fabric)
        note(f"{hosts}, {nics} NICs, lost {lost}: {job.end()[-1]['iterations']} operations, {went}")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FLAPS))
def test_rails_that_come_and_go(logs, note, number):
    """NICs of all hosts fail and come back all the time, and so does what joins the rails, while
    each host keeps one. Every result is right."""
    dice = random.Random(options.SEED * FLAPS + number)
    nics, hosts = dice.choice([2, 3]), dice.choice(["ab", "abc", "aabb", "abcd"])
    running = ["--min", "256K", "--max", "256K", "--op", dice.choice(OPERATIONS)]
    with Fabric(logs, "--nics", str(nics)) as fabric:
        job = Job(fabric, list(hosts), *running, *LONG)
        runs(fabric, job)
        lost, apart, faults = {host: {} for host in hosts}, False, 0
        end = time.monotonic() + FLAP_SECONDS
        while time.monotonic() < end and not any(p.ended() for p in job.ranks):
            goes_on(fabric, job, dice.randrange(60))
            faults += 1
            of_host = lost[dice.choice(hosts)]
            if dice.random() < 0.1:
                fabric.clear("spine") if apart else fabric.fault("spine down")
                apart = not apart
            elif of_host and dice.random() < 0.5:
                fabric.clear(of_host.pop(dice.choice(sorted(of_host))))
            elif len(of_host) < nics - 1:
                host = next(host for host in hosts if lost[host] is of_host)
                rail = dice.choice([rail for rail in range(nics) if rail not in of_host])
                of_host[rail] = dice.choice(HAPPENS).format(nic=f"{host}/{rail}")
                fabric.fault(of_host[rail])
        fabric.clear()
        note(f"{hosts}, {nics} NICs, {faults} changes: {job.end()[-1]['iterations']} operations")
