"""Programs that keep the NIC busy, without a fault, on a machine that computes beside them: nothing
is suspected.

A NIC is software here and waits for a core like everybody else. A failover that takes such a wait
for a failure does harm where nothing is wrong. So beside endless loops, two for each core, no
switch and no other event of a failure may be in the event log, the programs must end well, and
their bytes must have gone through the NICs. The same holds for many busy QPs on an idle machine
(tests/c/storm.c).

`--long` has 2,000 QPs that are busy for a minute, more programs, idle machine and busy.
`test_bandwidth_with_failover` (`make bench`) compares the bandwidth with failover and without.
"""

import json
import os
import statistics
import subprocess

import pytest

from lib import options
from lib.cc import compile_c
from lib.fabric import Fabric
from lib.ports import free_port, listens
from lib.process import Failure, describe_exit, wait_until
from lib.qperf import LATENCIES, POLLING, RATES, qperf

# Takes all cores.
pytestmark = pytest.mark.serial

LOOPS = 2 * (os.cpu_count() or 2)
SECONDS = 5
MINUTE_SECONDS = 60
END_SECONDS = 60
# A thousand QPs with the queues that perftest takes by default would have a million entries.
SHALLOW = ("-t", 16, "-r", 16)
# A false suspicion ends atomics for good, whatever it is that they wait for, so they are asked more
# often.
ATOMIC_RUNS = 3
# What a run without faults has in its event log; everything else is a suspicion, or what came of
# one.
HARMLESS = {"port-active"}
# perftest -D ends with its last READs under way, and the end that is done first closes. Were it not
# true, the other end would fail.
PEER_ENDED = "the peer closed its QP, its process has ended"
# Far less than any of the programs carries in its time, and far more than setting up takes.
LEAST_BYTES = 1_000_000
# qperf's ends may spin on memory, and are given a core in turns with the loops: a round can take a
# second.
LEAST_PACKETS = 2
# Of four runs each, with, without, without, with; the median of the ratios.
TURNS = 3
# About 1 where nothing else runs; other work on the machine moves single runs by more than a tenth.
# `make bench` has the figure.
LEAST_RATIO = 0.5


class Loops:
    """A context: endless loops beside the programs under test."""

    def __init__(self, count: int):
        self.count, self.running = count, []

    def __enter__(self):
        self.running = [
            subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(self.count)
        ]
        return self

    def __exit__(self, *_):
        if any(loop.poll() is not None for loop in self.running):
            raise Failure("a loop ended by itself: there was no load")
        for loop in self.running:
            loop.kill()
            loop.wait()


def check_calm(fabric: Fabric) -> None:
    """Fails where a path was suspected, or a QP moved or gave up."""
    events = [e for e in fabric.events() if e["event"] not in HARMLESS]
    events = [e for e in events if not e.get("why", "").startswith(PEER_ENDED)]
    if events:
        switches = [e for e in events if e["event"] == "switch"]
        reasons = sorted({e["reason"] for e in switches})
        first = [{k: v for k, v in e.items() if v is not None} for e in events[:2]]
        counts = f"{len(switches)} switches {reasons}, {len(events)} events without a fault"
        raise Failure(f"{counts}, the first of them {first}")


def carried(fabric: Fabric) -> str:
    """The bytes that came over rail 0, headers included (atomics carry no payload); fails if
    they are too few."""
    nics = fabric.nics()
    came = sum(nics[f"{host}/0"]["rx_bytes"] for host in "ab")
    if came < LEAST_BYTES:
        raise Failure(f"{came} bytes came over rail 0, {LEAST_BYTES} at least are right")
    again = sum(nics[f"{host}/0"]["retransmits"] for host in "ab")
    return f"{came / 1e6:.0f} MB, {again} packets sent again"


def judge(fabric: Fabric, *processes, seconds: int = SECONDS) -> str:
    """Waits for the programs. What the event log says of an early end is the better reason, so
    it comes before their statuses."""
    statuses = [(p.name, p.wait(seconds + END_SECONDS)) for p in processes]
    check_calm(fabric)
    for name, status in statuses:
        if status != 0:
            raise Failure(f"{name} {describe_exit(status)}")
    return carried(fabric)


def perftest(logs, loops: int, tool: str, *args) -> str:
    """One perftest for some seconds."""
    with Fabric(logs) as fabric, Loops(loops):
        server, client = fabric.pair(tool, ["-F", "-D", SECONDS, *args])
        return judge(fabric, client, server)


def busy_qps(logs, loops: int, qps: int, *args, seconds: int = SECONDS) -> str:
    """tests/c/storm.c: many QPs, all busy."""
    program = compile_c("storm", "-libverbs")
    with Fabric(logs) as fabric, Loops(loops):
        port = free_port()
        line = ["-q", qps, "-m", 8, "-s", 512, "-t", seconds, *args]
        server = fabric.run("b", [program, "--listen", port, *line], "b-storm")
        wait_until(lambda: server.ended() or listens(server.pid, port), 20, "storm listens")
        client = fabric.run("a", [program, "--connect", f"127.0.0.1:{port}", *line], "a-storm")
        figures = judge(fabric, client, server, seconds=seconds)
        result = json.loads(client.output().splitlines()[-1])
        return f"{figures}, no work request took longer than {result['worst_ms']:.0f} ms"


def bandwidth(fabric: Fabric, failover: bool, tool: str, *args) -> float:
    """What perftest says it carried, in MiB/s."""
    server, client = fabric.pair(tool, ["-F", "-D", SECONDS, *args], failover)
    judge(fabric, client, server)
    # The figures stand in one line: bytes, iterations, peak, average, messages.
    lines = map(str.split, client.output().splitlines())
    figures = [words for words in lines if len(words) == 5 and words[0].isdigit()]
    return float(figures[-1][3])


LARGE = [
    ("ib_read_bw", "-q", 500, "-o", 1),
    ("ib_send_bw", "-q", 500, *SHALLOW, "-s", 8192),
    ("ib_send_bw", "-q", 1000, *SHALLOW),
]


def named(programs):
    """Programs with their arguments as parameters, named by tool and number of QPs."""
    for tool, *args in programs:
        yield pytest.param(tool, args, id=f"{tool} {args[1]} QPs")


@pytest.mark.timing
@pytest.mark.parametrize("tool, args", named(LARGE))
def test_bandwidth_with_failover(logs, note, tool, args):
    """With and without failover in turns: what it takes of the bandwidth."""
    ratios = []
    for turn in range(TURNS):
        order = (True, False, False, True) if turn % 2 == 0 else (False, True, True, False)
        rates = {True: [], False: []}
        for failover in order:
            with Fabric(logs) as fabric:
                rates[failover].append(bandwidth(fabric, failover, tool, *args))
        ratios.append(sum(rates[True]) / sum(rates[False]))
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    median = statistics.median(ratios)
    note(f"with failover {median:.2f} of the bandwidth without: {shown}")
    if median < LEAST_RATIO:
        raise Failure(f"less than {LEAST_RATIO} of the bandwidth without failover: {shown}")


@pytest.mark.parametrize("qps", [500, 1000])
def test_busy_qps_on_an_idle_machine(logs, note, qps):
    note(busy_qps(logs, 0, qps))


@pytest.mark.parametrize(
    "args",
    [
        pytest.param([], id="SENDs"),
        pytest.param(["-w", "-b"], id="WRITEs both ways"),
    ],
)
def test_busy_qps_on_a_busy_machine(logs, note, args):
    note(busy_qps(logs, LOOPS, 500, *args))


ON_BUSY_MACHINE = [
    ("ib_send_bw", "-q", 64),
    *[("ib_atomic_bw", "-q", 16)] * ATOMIC_RUNS,
    ("ib_read_bw", "-q", 64, "-o", 1),
]


@pytest.mark.parametrize("tool, args", named(ON_BUSY_MACHINE))
def test_perftest_on_a_busy_machine(logs, note, tool, args):
    note(perftest(logs, LOOPS, tool, *args))


# What takes long: the largest, with nothing beside it and beside loops.
MACHINES = {"idle": 0, "busy": LOOPS}

if options.LONG:

    @pytest.mark.slow
    @pytest.mark.parametrize("machine", MACHINES)
    def test_2000_busy_qps_for_a_minute(logs, note, machine):
        note(busy_qps(logs, MACHINES[machine], 2000, seconds=MINUTE_SECONDS))

    @pytest.mark.parametrize("machine", MACHINES)
    @pytest.mark.parametrize("tool, args", named([*LARGE, ("ib_atomic_bw", "-q", 64)]))
    def test_large_perftest(logs, note, tool, args, machine):
        note(perftest(logs, MACHINES[machine], tool, *args))

    @pytest.mark.parametrize("machine", MACHINES)
    @pytest.mark.parametrize("poll", POLLING)
    @pytest.mark.parametrize("test", [*LATENCIES, *RATES])
    def test_qperf(logs, note, test, poll, machine):
        with Loops(MACHINES[machine]):
            note(qperf(logs, test, POLLING[poll], SECONDS, LEAST_PACKETS))
