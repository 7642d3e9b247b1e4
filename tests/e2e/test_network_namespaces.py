"""A fault between two network namespaces joined by two veth pairs, over real interfaces and without
any fabric.

The NICs are the interfaces' addresses (`unbroken run --nics`). The fault is `ip link set down`, or
an nft rule that drops every packet of the interface, at one end. The assertions are those of
test_survival.py, from the counters of the interfaces.

Needs root, iproute2 and nftables.
"""

import time

import pytest

from lib.fabric import UNBROKEN, Fabric, now_us
from lib.namespaces import Namespaces
from lib.ports import free_port, listens
from lib.process import Died, Failure, describe_exit, wait_until
from lib.traffic import BASELINE_SECONDS, SETTLE_US, SHARE, STEP_SECONDS, TAIL_US

pytestmark = pytest.mark.root

SECONDS = 3
# Longer than it takes to replace a path that is lost, and than a connection may take that nobody
# waits for.
SILENCE_SECONDS = 4
# Set-up exchanges a few KiB over TCP; this much on an interface is a stream.
STREAM_BYTES = 2_000_000


class Interfaces:
    """The bytes that went from a to b on each rail: the least of what a's interface sent and b's
    received. And b's gaps."""

    def __init__(self, net: Namespaces, fabric: Fabric, receiver_pid: int):
        self.net, self.fabric, self.pid = net, fabric, receiver_pid
        self.samples, self.gaps = [], {}

    def sample(self):
        """Takes a sample: the time in µs and the bytes of each rail."""
        self.gaps.update(self.fabric.gaps(self.pid))
        before = now_us()
        ends = [
            (self.net.bytes("a", rail), self.net.bytes("b", rail)) for rail in range(self.net.rails)
        ]
        rails = [min(a[0], b[1]) for a, b in ends]
        self.samples.append(((before + now_us()) // 2, rails))
        return self.samples[-1]


def rate(first, last, rail) -> float:
    """Bytes a second on a rail between two samples."""
    return (last[1][rail] - first[1][rail]) * 1e6 / max(1, last[0] - first[0])


def start(fabric, net, tool, failover):
    """A server in one namespace, a client in the other. Their TCP connection goes over rail 1,
    which no fault here touches."""
    port = free_port()
    programs = []
    for host in "ba":
        nics = ",".join(str(net.addr(host, rail)) for rail in range(net.rails))
        options = ["--nics", nics, *([] if failover else ["--no-failover"])]
        command = [*net.within(host), UNBROKEN, "run", *options, "--"]
        command += [tool, "-d", "unb0", "-F", "-p", port, "-s", 65536, "-q", 2, "-D", SECONDS]
        command += [net.addr("b", 1)] if host == "a" else []
        program = fabric.start(f"{host}-{tool}", command)
        programs.append(program)
        if host == "b":
            listening = lambda p=program: p.ended() or listens(p.pid, port)
            wait_until(listening, 20, f"{tool} server listens")
    return programs


def survive(logs, tool, fault, failover=True) -> str:
    """One stream through one fault. Gives the interruption and the rates."""
    with Namespaces() as net, Fabric(logs) as fabric:
        server, client = start(fabric, net, tool, failover)
        meter = Interfaces(net, fabric, server.pid)

        def flowing():
            if client.ended() or server.ended():
                raise Failure("the programs ended before any traffic flowed")
            return meter.sample()[1][0] > STREAM_BYTES

        wait_until(flowing, 20, "traffic on rail 0")
        first = meter.samples[-1]
        time.sleep(BASELINE_SECONDS)
        before = meter.sample()
        if before[1][1] > STREAM_BYTES:
            raise Failure(f"rail 1 carried {before[1][1]} bytes before the fault")
        fault(net)
        fault_us = now_us()
        last_us = first[0] + SECONDS * 1e6 - TAIL_US
        if fault_us + 2 * SETTLE_US > last_us:
            after_s = (fault_us - first[0]) / 1e6
            raise Failure(f"the fault came {after_s:.1f} s after the traffic had begun: too late")
        time.sleep(SETTLE_US / 1e6)
        settled = meter.sample()
        end = to_the_end(meter, (server, client), first, last_us) or settled
        if failover and not fabric.events("switch"):
            raise Failure("no switch event")
        if (fabric.path / "shm" / "fabric.page").exists():
            raise Failure("a page of faults was made where there is no fabric")
        rates = rate(first, before, 0), rate(settled, end, 1)
        figures = f"{rates[0] * 8e-9:.1f} -> {rates[1] * 8e-9:.1f} Gbit/s"
        # Before the gap: traffic that never comes back leaves none, and perftest may end with
        # success all the same.
        if rates[1] < SHARE * rates[0]:
            raise Died(f"the backup carries less than {SHARE:.0%} of the rate before: {figures}")
        return f"gap {longest_gap_ms(meter, fault_us):.1f} ms, {figures}"


def to_the_end(meter, programs, first, last_us):
    """Waits for the end of the programs, which must be a good one. Gives the last sample before
    `last_us`."""
    last = None
    while not all(program.ended() for program in programs):
        if now_us() > first[0] + (SECONDS + 20) * 1e6:
            raise Died("the programs still run 20 s after their time")
        time.sleep(STEP_SECONDS)
        sample = meter.sample()
        if sample[0] <= last_us:
            last = sample
    for program in programs:
        if program.popen.returncode != 0:
            raise Died(f"{program.name} {describe_exit(program.popen.returncode)}")
    return last


def longest_gap_ms(meter, fault_us) -> float:
    """The longest interval without data around the fault, whose time is known to some ms only."""
    around = [
        length
        for at, length in meter.gaps.items()
        if at <= fault_us + SETTLE_US and at + length >= fault_us - 50_000
    ]
    if not around:
        raise Failure("no gap around the fault was recorded, though traffic crossed it")
    return max(around) / 1000


FAULTS = {
    "ip link set down": lambda net: net.link("a", 0, "down"),
    "nft drop": lambda net: net.drop("b", 0),
}


@pytest.mark.parametrize(
    "tool, fault",
    [
        pytest.param("ib_write_bw", "ip link set down", marks=pytest.mark.smoke),
        ("ib_write_bw", "nft drop"),
        ("ib_send_bw", "ip link set down"),
        ("ib_send_bw", "nft drop"),
    ],
)
def test_survives(logs, note, tool, fault):
    note(survive(logs, tool, FAULTS[fault]))


def test_must_not_survive_without_failover(logs, note):
    """The mutant: without failover the same assertions must fail."""
    with pytest.raises(Died) as death:
        survive(logs, "ib_write_bw", FAULTS["ip link set down"], failover=False)
    note(death.value)


def test_ranks_that_cannot_be_reached_at_first(logs, note):
    """Rank 0 was never connected to rank 1 and cannot reach it when they begin: they wait, and go
    on.

    Their data goes over rail 1, which works.
    """
    with Namespaces() as net, Fabric(logs) as fabric:
        id_file = logs / "id"
        # Rank 1 meets rank 0 over rail 1, and is to be reached over rail 0.
        net.drop("b", 0)

        def begin(rank, host, rail):
            args = ["--rank", rank, "--ranks", 2, "--address", net.addr(host, rail)]
            args += ["--id-file", id_file]
            args += ["--op", "all-reduce", "--min", "8M", "--max", "8M", "--iterations", 3]
            env = {"UNBROKEN_NICS": str(net.addr(host, 1))}
            line = [*net.within(host), UNBROKEN, "coll", "bench", *args]
            return fabric.start(f"rank-{rank}", line, env)

        ranks = [begin(0, "a", 1)]
        wait_until(lambda: id_file.exists() or ranks[0].ended(), 20, "rank 0 waits for rank 1")
        ranks.append(begin(1, "b", 0))
        wait_until(lambda: not id_file.exists(), 20, "the ranks have met")
        before = now_us()
        while now_us() < before + SILENCE_SECONDS * 1e6:
            for process in ranks:
                if process.ended():
                    ended = f"{process.name} {describe_exit(process.popen.returncode)}"
                    raise Died(f"{ended} in the silence: {process.output().strip()}")
            time.sleep(STEP_SECONDS)
        carried = net.bytes("a", 1)[0]
        if carried > STREAM_BYTES:
            raise Failure(f"{carried} bytes went over rail 1 though rank 0 cannot reach rank 1")
        net.undrop("b", 0)
        for process in ranks:
            process.expect_success(30)
        carried = net.bytes("a", 1)[0]
        if carried < 3 * 8 << 20:
            raise Failure(f"rail 1 carried {carried} bytes, less than three operations have")
        note(f"{SILENCE_SECONDS} s of silence, then {carried >> 20} MiB")
