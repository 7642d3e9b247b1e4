"""Collectives that plan with what their NICs are seen to carry, although nobody has said it.

NICs have a rate, so that what they carry limits operations, and not the machine's cores. What
operations take is compared with what the rates allow, and `unbroken coll status` says how they are
done and why.
"""

import statistics

import pytest

from lib.collective import STARTS, Job, communicators, since, sent
from lib.fabric import Fabric
from lib.process import Failure, wait_until

MBPS, SLOW_MBPS, NICS = 100, 25, 4
MIB = 1 << 20


def limited(fabric, hosts: list, mbps: int):
    """Gives every NIC a rate."""
    for host in hosts:
        for nic in range(NICS):
            fabric.fault(f"rate {host}/{nic} {mbps}Mbit")


def median_ms(fabric, hosts: list, size: int, *options) -> float:
    """Of AllReduces of so many bytes, once the first half has been measured."""
    few = ["--min", size, "--max", size, "--iterations", 30, "--each"]
    lines = Job(fabric, hosts, *few, *options).succeed()
    each_us = lines[0]["times_us"]
    return statistics.median(each_us[len(each_us) // 2 :]) / 1000


@pytest.mark.serial
def test_a_slow_nic_carries_its_part(logs, note):
    """One of four NICs of a host carries a quarter. It would hold up all, did it have a full share:
    an operation would take four times as long. It is found out, and has its part."""
    hosts, size = ["a", "b"], 4 * MIB
    with Fabric(logs) as fabric:
        limited(fabric, hosts, MBPS)
        well_ms = median_ms(fabric, hosts, size)
        fabric.fault(f"rate a/0 {SLOW_MBPS}Mbit")
        blind_ms = median_ms(fabric, hosts, size, "--no-measure")
        before = sent(fabric, "a")
        seen_ms = median_ms(fabric, hosts, size)
        carried = since(fabric, "a", before)
    allowed_ms = well_ms * NICS * MBPS / ((NICS - 1) * MBPS + SLOW_MBPS)
    note(
        f"{well_ms:.0f} ms well, {blind_ms:.0f} ms with full shares, {seen_ms:.0f} ms measured, "
        f"{allowed_ms:.0f} ms are possible; carried {[round(n / 1e6) for n in carried]} MB"
    )
    if blind_ms < 2.5 * well_ms:
        raise Failure("the slow NIC is none")
    if seen_ms > 1.15 * allowed_ms:
        raise Failure(f"{seen_ms:.0f} ms, where {allowed_ms:.0f} ms are possible")
    if carried[0] > 0.6 * min(carried[1:]):
        raise Failure(f"the slow NIC carries as much as others: {carried}")


@pytest.mark.smoke
def test_the_status_says_how_operations_are_done(logs, note):
    """Rates and slow NICs that all have agreed on, the plan of an operation, what it should take
    and what it takes."""
    hosts, size = ["a", "b"], 2 * MIB
    with Fabric(logs) as fabric:
        limited(fabric, hosts, MBPS)
        fabric.fault(f"rate b/2 {SLOW_MBPS}Mbit")
        running = ["--min", size, "--max", size, "--for", f"{4 * STARTS}s"]
        job = Job(fabric, hosts, *running)

        def agreed():
            shown = communicators(fabric)
            slow = lambda s: any(nic == "1/2" for nic, _ in s["measured"]["slow"])
            return len(shown) == 2 and all(slow(s) for s in shown)

        wait_until(agreed, STARTS, "both plan with a slow NIC")
        (ours, theirs) = (s["measured"] for s in communicators(fabric))
        if ours != theirs:
            raise Failure(f"they plan with different pictures: {ours}, {theirs}")
        # Of two hosts alone nobody can tell which end is slow.
        if sorted(nic for nic, _ in ours["slow"]) != ["0/2", "1/2"]:
            raise Failure(f"others are slow, too: {ours}")
        if not 0.7 * MBPS < ours["nic_mbps"] < 1.3 * MBPS:
            raise Failure(f"NICs of {MBPS} Mbit/s are taken for {ours['nic_mbps']}")

        def as_estimated():
            done = [d for s in communicators(fabric) for d in s["done"] if d["bytes"] == size]
            return done and all(d["took_us"] < 1.3 * d["estimate_us"] for d in done)

        wait_until(as_estimated, STARTS, "operations take what they should")
        note(fabric.command("coll", "status").stdout)
        job.end()


@pytest.mark.parametrize(
    "size, shape",
    [(64, ("one-shot",)), (256 << 10, ("direct", "stars"))],
    ids=["short", "long"],
)
def test_the_shape_follows_what_was_measured(logs, note, size, shape):
    """NICs of 20 Mbit/s, which are said to have 100 Gbit/s: all is sent to everybody only where
    that is the shortest."""
    hosts = ["a", "b", "c", "d"]
    with Fabric(logs) as fabric:
        limited(fabric, hosts, 20)
        running = ["--min", 256 << 10, "--max", 256 << 10, "--for", f"{4 * STARTS}s"]
        if size < 256 << 10:
            running = ["--min", size, "--max", 256 << 10, "--factor", (256 << 10) // size]
            running += ["--iterations", 40]
        job = Job(fabric, hosts, *running)
        plans = set()

        def taken():
            for shown in communicators(fabric):
                if shown["measured"]["nic_mbps"]:
                    plans.update((d["bytes"], d["plan"]) for d in shown["done"])
            return any(of == size and plan.startswith(shape) for of, plan in plans)

        wait_until(taken, STARTS, f"{shape} for {size} bytes")
        note(sorted(plans))
        if running[-2] == "--for":
            job.end()
        else:
            job.succeed()


def test_a_transfer_uses_the_rails_of_its_two_hosts(logs, note):
    """Hosts that take no part in a SendRecv have lost other rails than those that do: what goes
    from the first to the last is divided among the three rails that both have."""
    hosts, size = ["a", "b", "c", "d"], MIB
    with Fabric(logs) as fabric:
        limited(fabric, hosts, MBPS)
        for nic in ("d/2", "b/3", "c/3"):
            fabric.fault(f"nic {nic} dead")
        running = ["--op", "send-recv", "--min", size, "--max", size, "--for", f"{4 * STARTS}s"]
        job = Job(fabric, hosts, *running)

        def shares():
            before = sent(fabric, "a")
            wait_until(lambda: sum(since(fabric, "a", before)) > 16 * size, STARTS, "16 transfers")
            carried = since(fabric, "a", before)
            return [round(100 * of / sum(carried)) for of in carried]

        seen = []

        def divided():
            seen.append(shares())
            return all(28 <= seen[-1][nic] <= 39 for nic in (0, 1, 3)) and seen[-1][2] <= 3

        wait_until(divided, 2 * STARTS, "each of three NICs has a third")
        note(f"shares of a's NICs, in percent: {seen[-1]}")
        job.end()
