"""Programs over RDMA devices of the machine: two "hosts" A and B of a guest, with devices rxeA0,
rxeA1 and rxeB0, rxeB1 (tests/vm/devices.sh). What travels is told by the interfaces behind."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from . import options
from .paths import BUILD
from .ports import free_port, listens
from .process import Failure, Process, wait_until
from .streams import Stream, runs_until_stopped

# The index of the IPv4 address among the GIDs of an rxe; the first is of IPv6.
GID = 1
# The marks of a file whose tests run in the guest. Elsewhere they are skipped, and the reason is
# shown: tests/e2e/test_vm.py boots the guest that runs them.
IN_THE_GUEST = [
    pytest.mark.vm,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not options.VM, reason="rxe changes how the whole machine routes: `make test-vm` runs it"
    ),
]
# Bytes that say that a stream flows, and does not only say hello.
FLOWS = 1_000_000


def sh(command: str):
    """Runs a command of the shell."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise Failure(f"{command}: {done.stderr.strip()}")
    return done.stdout


def sent(link: str) -> int:
    """Bytes that an interface has sent."""
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text())


def connect(link: str):
    """What the kernel forgets of a link that goes down."""
    side, rail = link
    near, far = ("1", "2") if side == "A" else ("2", "1")
    sh(
        f"ip route replace 10.0.{rail}.{far} dev {link} src 10.0.{rail}.{near} "
        f"table 10{near}{rail}"
    )


class Fault:
    """A context: a fault of a link, mended at its end at the latest."""

    def __init__(self, kind: str, link: str):
        self.kind, self.link, self.made = kind, link, False

    def make(self):
        """Breaks the link."""
        self.made = True
        if self.kind == "down":
            sh(f"ip link set {self.link} down")
        else:
            sh(f"tc qdisc add dev {self.link} root netem loss 100%")

    def mend(self):
        """Mends it."""
        if not self.made:
            return
        self.made = False
        if self.kind == "down":
            sh(f"ip link set {self.link} up")
            for link in "A" + self.link[1], "B" + self.link[1]:
                wait_until(
                    lambda link=link: "LOWER_UP" in sh(f"ip link show {link}"), 20, f"{link} is up"
                )
                connect(link)
        else:
            sh(f"tc qdisc del dev {self.link} root")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.mend()


class Pair:
    """Programs on both hosts that share a runtime folder."""

    def __init__(self, logs: Path, protected: bool = True):
        self.logs, self.protected, self.programs = logs, protected, []
        self.runtime = logs / "runtime"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for program in self.programs:
            program.kill()

    def start(self, host: str, command: list, name: str) -> Process:
        """Starts a program on a host."""
        run = [BUILD / "unbroken", "--runtime", self.runtime, "run"]
        run += ["--devices", f"rxe{host}0,rxe{host}1", "--"]
        words = (run if self.protected else []) + command
        env = {"PATH": "/usr/bin:/bin:/sbin", "UNBROKEN_LOG": "1"}
        kind = Stream if runs_until_stopped(words) else Process
        program = kind(name, words, self.logs / f"{name}.log", env)
        self.programs.append(program)
        return program

    def perftest(self, tool: str, *options) -> tuple:
        """A perftest program from A to B, over the first devices; gives client and server."""
        port = free_port()
        common = ["-x", GID, "-F", "-p", port, *options]
        server = self.start("B", [tool, "-d", "rxeB0", *common], f"{tool}-server")
        wait_until(lambda: server.ended() or listens(server.pid, port), 40, f"{tool} listens")
        command = [tool, "-d", "rxeA0", *common, "127.0.0.1"]
        client = self.start("A", command, f"{tool}-client")
        client.peer, server.peer = server, client
        return client, server

    def flowing(self, link: str, seconds: float = 60, amount: int = FLOWS):
        """Waits until that much has left by an interface since now; the programs must run."""
        first = sent(link)

        def there():
            ended = [p for p in self.programs if p.ended() and p.popen.returncode != 0]
            if ended:
                raise Failure(f"{ended[0].name} ended: {ended[0].output()[-300:]}")
            return sent(link) - first >= amount

        wait_until(there, seconds, f"{amount} bytes by {link}", longest_pause_s=0.2)

    def unbroken(self, *words) -> str:
        """What the command says about the runtime folder."""
        command = [BUILD / "unbroken", "--runtime", self.runtime, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout

    def status(self) -> dict:
        """`unbroken status --json`."""
        return json.loads(self.unbroken("status", "--json"))

    def succeed(self, seconds: float, *programs):
        """Both ends end in time, with status 0."""
        deadline = time.monotonic() + seconds
        for program in programs:
            program.expect_success(max(1, deadline - time.monotonic()))
