"""softnic beside the kernel's rxe, in one run and on equal wires: bandwidth and latency by turns,
so that what the machine does meanwhile strikes both. In a VM (tests/vm/devices.sh), emulated in
software: only the ratios mean something."""

import statistics

import pytest

from lib import options
from lib.host_devices import GID, sh
from lib.paths import BUILD
from lib.ports import free_port
from lib.process import Process, wait_until

pytestmark = [
    pytest.mark.vm,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timing,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not options.VM,
        reason='needs rxe: `tests/vm/run.sh "bash tests/vm/devices.sh -m timing"` runs it',
    ),
]

ROUNDS = 7
# Addresses on the wire C0 - D0, which is made as A0 - B0 is, between two namespaces.
SOFT = {"C": "10.0.12.1", "D": "10.0.12.2"}
# Tool, options, and the column of its result.
MEASURES = {
    "bandwidth": (["ib_write_bw", "-s", 65536, "-n", 200], 3),
    # With events: the guest has one CPU, which two that poll would take from each other.
    "latency": (["ib_send_lat", "-s", 64, "-n", 300, "-e"], 4),
}


@pytest.fixture(name="wire", scope="module")
def _wire():
    for end in SOFT:
        sh(f"ip netns add soft{end}")
    sh("ip link add C0 mtu 4200 netns softC type veth peer name D0 mtu 4200 netns softD")
    for end, address in SOFT.items():
        sh(f"ip -n soft{end} addr add {address}/24 dev {end}0")
        sh(f"ip -n soft{end} link set {end}0 up")
    for end in SOFT:
        up = lambda end=end: "state UP" in sh(f"ip -n soft{end} link show {end}0")
        wait_until(up, 20, f"{end}0 is up")
    yield
    for end in SOFT:
        sh(f"ip netns del soft{end}")


def softnic(end: str, runtime) -> tuple:
    """What starts a program on the softnic of an end, and its device."""
    unbroken = [BUILD / "unbroken", "--runtime", runtime, "run", "--nics", SOFT[end], "--"]
    return ["ip", "netns", "exec", f"soft{end}", *unbroken], ["-d", "unb0"]


def rxe(end: str, _runtime) -> tuple:
    """The same on the rxe of A or B."""
    return [], ["-d", f"rxe{'AB'['CD'.index(end)]}0", "-x", GID]


def measured(kind, logs, words: list, column: int) -> float:
    """Runs a tool between C and D, or A and B, and gives its figure."""
    port = free_port()
    common = [*words[1:], "-m", 4096, "-F", "-p", port]
    environment = {"PATH": "/usr/bin:/bin:/sbin"}
    ends = []
    try:
        for end in "DC":
            before, device = kind(end, logs / "runtime")
            inside = " ".join(before[:4]) if before else ""
            peer = [SOFT["D"] if before else "127.0.0.1"] if end == "C" else []
            line = [*before, words[0], *device, *common, *peer]
            ends.append(Process(end, line, logs / f"{kind.__name__}-{end}.log", environment))
            if end == "D":
                listens = lambda: f":{port} " in sh(f"{inside} ss -Hltn")
                wait_until(lambda: ends[0].ended() or listens(), 40, "it listens")
        for process in reversed(ends):
            process.expect_success(120)
        lines = [line.split() for line in ends[1].output().splitlines()]
        return float(next(line for line in lines if line and line[0] == str(words[2]))[column])
    finally:
        for process in ends:
            process.kill()


@pytest.mark.parametrize("what", MEASURES)
def test_softnic_beside_rxe(logs, note, wire, what):
    """The ratio of softnic to rxe, with the interval of its median (all but the outermost two of
    seven rounds: 87 %)."""
    words, column = MEASURES[what]
    one_round = lambda: [measured(kind, logs, words, column) for kind in (softnic, rxe)]
    rounds = [one_round() for _ in range(ROUNDS)]
    ratios = sorted(soft / kernel for soft, kernel in rounds)
    figures = [statistics.median(of) for of in zip(*rounds)]
    unit = "MB/s" if what == "bandwidth" else "µs"
    note(
        f"{what}: {statistics.median(ratios):.2f} times rxe's ({ratios[1]:.2f} to "
        f"{ratios[-2]:.2f}; "
        f"{figures[0]:.1f} and {figures[1]:.1f} {unit})"
    )
    # A factor of two of room about what was measured.
    limit = {"bandwidth": ratios[ROUNDS // 2] > 0.8, "latency": ratios[ROUNDS // 2] < 8}
    assert limit[what], ratios
