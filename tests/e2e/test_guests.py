"""Two machines, each with a kernel of its own: unmodified programs from VM to VM over rxe, which
find each other by Redis on a third network. Links and whole machines fail. The VMs are emulated in
software, so nothing here asserts a time."""

import pytest

from lib import options
from lib.guests import LINK_LOCAL, Guests
from lib.hpcc import check_result
from lib.paths import LOGS
from lib.process import Skip, needs

pytestmark = [
    pytest.mark.vm,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.serial,
    pytest.mark.timeout(500),
]

# Tool and options. Messages are of one packet: rxe of Linux 6.1 itself ends longer ones with status
# 9 where acknowledgements come late (docs/reference/conformance.md). SENDs are counted: the clocks
# of two machines differ, and with -D the server may end before the client.
STREAMS = {
    "write": ("ib_write_bw", "-s 4096 -D 20"),
    "write-4-qps": ("ib_write_bw", "-s 4096 -q 4 -D 20"),
    "write-link-local": ("ib_write_bw", f"-s 4096 -D 20 -x {LINK_LOCAL}"),
    "send": ("ib_send_bw", "-s 4096 -n 25000"),
}
STOPPED_SECONDS = 4
# A link goes down for 0.4 s, so many times; bytes a second by both links before, and in each of the
# three seconds after. The guest's clock counts its instructions: rates within one are comparable.
FLAPS = 5
RATES = f"""
all() {{ echo $(($(cat /sys/class/net/nic0/statistics/tx_bytes) \\
    + $(cat /sys/class/net/nic1/statistics/tx_bytes))); }}
now() {{ read up rest </proc/uptime; echo ${{up/./}}; }}
rate() {{ x=$(all); t=$(now); sleep 1; echo $((($(all) - x) * 100 / ($(now) - t))); }}
for i in $(seq {FLAPS}); do
    before=$(rate)
    ip link set nic0 down; sleep 0.4; ip link set nic0 up
    echo $before $(rate) $(rate) $(rate)
done
"""


@pytest.fixture(scope="module")
def guests():
    logs = LOGS / "guests"
    logs.mkdir(parents=True, exist_ok=True)
    with Guests(logs, 1100) as both:
        yield both


def through_link_down(guests, logs, note, host: str, seconds: float):
    """The programs that run go on by the other link while the first of a host is down, fail back,
    and end well in time."""
    try:
        guests.flows(0)
        guests[host].sh("ip link set nic0 down")
        guests.flows(1)
        guests[host].sh("ip link set nic0 up")
        guests.succeed(seconds)
    finally:
        guests[host].sh("ip link set nic0 up")
        guests.keep(logs)
    switches = [line for line in guests.events().splitlines() if " switched " in line]
    note(f"{len(switches)} switches")
    assert switches


@pytest.mark.parametrize(
    "stream, host",
    [
        ("write", "a"),
        ("write", "b"),
        ("write-4-qps", "b"),
        ("write-link-local", "b"),
        ("send", "a"),
    ],
)
def test_link_down(guests, logs, note, stream, host):
    """The interface of one machine goes down in mid-stream. The other sees silence only."""
    guests.perftest(*STREAMS[stream])
    through_link_down(guests, logs, note, host, 150)


def test_the_rate_comes_back_after_each_flap(guests, logs, note):
    """The link is away for 0.4 s, again and again. Messages flow as before soon: they do not wait
    for timers of a path that has been back for long."""
    guests.perftest("ib_write_bw", "-s 4096 -D 40")
    try:
        guests.flows(0)
        lines = guests["a"].sh(f"bash -c '{RATES}'", 400).splitlines()
        guests.succeed(150)
    finally:
        guests["a"].sh("ip link set nic0 up")
        guests.keep(logs)
    shares = []
    for line in lines:
        before, *after = map(int, line.split())
        shares.append(round(max(after) / before, 2))
    note(f"shares of the rate before {shares}")
    assert len(shares) == FLAPS
    # It was a seventeenth for five seconds.
    assert min(shares) >= 0.25, lines
    assert "healthy" in guests.unbroken("a", "health")


@pytest.mark.parametrize("host", ["a", "b"])
def test_ucx(guests, logs, note, host):
    """The same under UCX, which makes its RC connections by datagrams."""
    needs("ucx_perftest", "ucx-utils")
    guests.ucx("-t tag_bw -s 2048 -n 20000 -w 10")
    through_link_down(guests, logs, note, host, 150)


@pytest.mark.timeout(1100)
def test_hpcc(logs, note):
    """The same under hpcc on Open MPI and UCX, a rank on each machine; its result is checked. Most
    of ten minutes are hpcc's own, of messages of 2 MB between emulated machines."""
    needs("mpirun", "openmpi-bin")
    needs("hpcc", "hpcc")
    if not options.LONG:
        raise Skip("it takes ten minutes: --long runs it")
    with Guests(logs, 1000) as guests:
        guests.hpcc(100)
        through_link_down(guests, logs, note, "b", 900)
        check_result(guests.hpcc_result(logs))


@pytest.mark.parametrize("stream, host", [("write", "b"), ("send", "a")])
def test_machine_stopped(guests, logs, stream, host):
    """A whole machine, with Redis if it is b, stands still for some seconds: no path answers, so
    none is given up, and the stream goes on where it was."""
    guests.perftest(*STREAMS[stream])
    try:
        guests.flows(0)
        guests.stop(host, STOPPED_SECONDS)
        guests.flows(0)
        guests.succeed(150)
    finally:
        guests.keep(logs)
    assert "switch" not in guests.events()
