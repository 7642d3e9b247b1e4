"""softnic against the kernel's rxe, on a wire (tests/vm/devices.sh): both are RoCEv2, so each takes
what the other sends, and checks its ICRC."""

from pathlib import Path

import pytest

from lib import options
from lib.host_devices import FLOWS, GID, sh
from lib.paths import BUILD
from lib.ports import free_port
from lib.process import Failure, Process, wait_until

pytestmark = [
    pytest.mark.vm,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not options.VM, reason="needs rxe on a wire: `make test-vm` runs it"),
]

SOFT, RXE = "10.0.9.1", "10.0.9.2"
# Tool and options. MTU 1024: both ends of perftest must name the same.
CASES = {
    "write": ["ib_write_bw", "-s", 65536, "-n", 200],
    "send": ["ib_send_bw", "-s", 65536, "-n", 200],
    "read": ["ib_read_bw", "-s", 65536, "-n", 200],
    "atomic": ["ib_atomic_bw", "-n", 500],
    "write-lat": ["ib_write_lat", "-s", 64, "-n", 500],
    "send-both-ways": ["ib_send_bw", "-s", 65536, "-n", 100, "-b"],
    "8-qps": ["ib_write_bw", "-s", 65536, "-n", 50, "-q", 8],
    "ud": ["ib_send_lat", "-c", "UD", "-s", 512, "-n", 500],
}


# Where the links of the second NICs have their addresses.
SOFT_NICS, RXE_NICS = f"{SOFT},10.0.10.1", "rxeR0,rxeR1"
# What befalls the softnic's first NIC: its link goes down, or is silent.
FAULTS = {
    "down": ("ip -n soft link set S0 down", "ip -n soft link set S0 up"),
    "loss": (
        "tc -n soft qdisc add dev S0 root netem loss 100%",
        "tc -n soft qdisc del dev S0 root",
    ),
}


class Ends:
    """A context: programs on the softnic (`soft`) and on the rxe (`rxe`). `protected`: both have
    a second NIC, and find each other in one runtime folder."""

    def __init__(self, logs, protected: bool = False):
        self.logs, self.protected, self.programs = logs, protected, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for program in self.programs:
            program.kill()

    @property
    def unbroken(self) -> list:
        """The command, about this run."""
        return [BUILD / "unbroken", "--runtime", self.logs / "runtime"]

    def start(self, end: str, words: list, server: str = None) -> Process:
        """A perftest program at one end; it connects to a server, or is one."""
        if end == "soft":
            nics = SOFT_NICS if self.protected else SOFT
            command = ["ip", "netns", "exec", "soft", *self.unbroken, "run", "--nics", nics, "--"]
            device = ["-d", "unb0"]
        else:
            run = [*self.unbroken, "run", "--devices", RXE_NICS, "--"]
            command, device = run if self.protected else [], ["-d", "rxeR0", "-x", GID]
        words = [*command, words[0], *device, *words[1:], *([server] if server else [])]
        program = Process(end, words, self.logs / f"{end}.log", {"PATH": "/usr/bin:/bin:/sbin"})
        self.programs.append(program)
        return program

    def pair(self, client: str, case: list) -> tuple:
        """Starts a case with the client at that end; gives client and server."""
        port = free_port()
        words = [*case, "-m", 1024, "-F", "-p", port]
        server = self.start("rxe" if client == "soft" else "soft", words)
        inside = "" if client == "soft" else "ip netns exec soft "
        wait_until(
            lambda: server.ended() or f":{port} " in sh(f"{inside}ss -Hltn"), 40, "it listens"
        )
        return self.start(client, words, RXE if client == "soft" else SOFT), server

    def run(self, client: str, case: list, seconds: int):
        """Runs a case; both must end well."""
        program, server = self.pair(client, case)
        program.expect_success(seconds)
        server.expect_success(20)

    def flows(self, link: int, seconds: float = 90):
        """Waits until a stream has passed that link since now; both programs must run."""
        first = passed(link)

        def there():
            ended = [p for p in self.programs if p.ended() and p.popen.returncode != 0]
            if ended:
                raise Failure(f"{ended[0].name} ended: {ended[0].output()[-300:]}")
            return passed(link) - first >= FLOWS

        wait_until(there, seconds, f"{FLOWS} bytes by link {link}", longest_pause_s=0.2)


def passed(link: int) -> int:
    """Bytes that have passed a link, either way, as the rxe's interface has them."""
    folder = Path(f"/sys/class/net/R{link}/statistics")
    return sum(int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes"))


@pytest.mark.parametrize("client", ["soft", "rxe"])
@pytest.mark.parametrize("case", CASES)
def test_both_understand_each_other(logs, case, client):
    with Ends(logs) as ends:
        ends.run(client, CASES[case], 100)


# Programs that connect by address, and what they are told at both ends.
CONNECTED = {
    "rping": ["rping", "-V", "-C", 50],
    "perftest": ["ib_write_bw", "-R", "-F", "-m", 1024, "-s", 65536, "-n", 100],
}


@pytest.mark.parametrize("client", ["soft", "rxe"])
@pytest.mark.parametrize("program", CONNECTED)
def test_they_connect_by_address(logs, program, client):
    """softnic's CM and the kernel's."""
    port, address = free_port(), RXE if client == "soft" else SOFT
    words = [*CONNECTED[program], "-p", port]
    ends = {"client": ["-c", "-a", address], "server": ["-s", "-a", address]}
    if program != "rping":
        ends = {"client": [address], "server": []}
    run = ["ip", "netns", "exec", "soft", BUILD / "unbroken", "--runtime", logs / "runtime"]
    before = {"soft": [*run, "run", "--nics", SOFT, "--"], "rxe": []}
    environment = {"PATH": "/usr/bin:/bin:/sbin"}
    start = lambda end, role: Process(
        end, [*before[end], *words, *ends[role]], logs / f"{end}.log", environment
    )
    other = "rxe" if client == "soft" else "soft"
    passed_before, programs = passed(0), [start(other, "server")]
    try:
        wait_until(lambda: programs[0].ended() or _is_listening(logs, port), 40, "it listens")
        programs.append(start(client, "client"))
        for process in reversed(programs):
            process.expect_success(60)
    finally:
        for process in programs:
            process.kill()
    least = 50 * 64 if program == "rping" else 100 * 65536
    if passed(0) - passed_before < least:
        raise Failure(f"{passed(0) - passed_before} bytes have passed the wire")


def _is_listening(logs, port):
    """Whether somebody listens at a port of rdma_cm, the kernel's or softnic's."""
    files = (logs / "runtime").glob(f"cm/ports/*/tcp-{port}/*@*")
    return f":{port} " in sh("rdma resource show cm_id") or any(
        file.read_text() == "listens\n" for file in files
    )


@pytest.mark.parametrize("client", ["soft", "rxe"])
@pytest.mark.parametrize("case", ["write", "send", "read"])
def test_with_loss(logs, case, client):
    """Two packets in a hundred are lost, either way."""
    sh("tc qdisc add dev R0 root netem loss 2%")
    sh("tc -n soft qdisc add dev S0 root netem loss 2%")
    try:
        with Ends(logs) as ends:
            ends.run(client, CASES[case], 150)
    finally:
        sh("tc qdisc del dev R0 root")
        sh("tc -n soft qdisc del dev S0 root")


@pytest.mark.parametrize(
    "client, tool, fault",
    [
        ("soft", "ib_write_bw", "loss"),
        ("soft", "ib_read_bw", "down"),
        ("rxe", "ib_write_bw", "down"),
        ("rxe", "ib_send_bw", "loss"),
    ],
)
def test_softnic_fails_over(logs, note, client, tool, fault):
    """The softnic's end loses its first NIC while the rxe is protected, too: the stream goes on
    between the second ones, and comes home."""
    breaks, mends = FAULTS[fault]
    with Ends(logs, protected=True) as ends:
        programs = ends.pair(client, [tool, "-s", 65536, "-D", 25])
        ends.flows(0)
        sh(breaks)
        try:
            ends.flows(1)
        finally:
            sh(mends)
        ends.flows(0)
        for program in programs:
            program.expect_success(150)
        events = sh(" ".join(map(str, [*ends.unbroken, "events"])))
        switched = [line for line in events.splitlines() if " switched " in line]
        note(f"{len(switched)} switches")
        assert len(switched) >= 2, events
