"""Two machines, `a` and `b`: VMs with a kernel of their own (tests/vm/run.sh), joined by two links
for data, with an rxe on each end, and one for management. The test is outside of both: it has them
do things through a folder that it shares with each (tests/vm/serve.sh)."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from .hpcc import INPUT
from .paths import BUILD, ROOT
from .process import Failure, Process, Skip, wait_until

# The links: two for data, and one for management.
DATA, MANAGEMENT = (0, 1), 2
# The index of the IPv4 address among the GIDs of an rxe, and that of the link-local one of IPv6.
GID, LINK_LOCAL = 1, 0
# Bytes that say that a stream flows, and does not only say hello.
FLOWS = 1_000_000
VM = ROOT / "tests" / "vm"
# What mpirun has in place of ssh, and the port where that is served (agent.py).
AGENT, AGENT_PORT = f"/usr/bin/python3 {VM}/agent.py", 18599
# Where hpcc reads and writes, at each host.
HPCC = "/tmp/hpcc"
# UCX over the first rxe. It looks for the GID that a datagram came to where rxe does not write that
# of IPv4, and drops the datagrams that make its connections. Messages are of one packet, for what
# test_guests.py says of longer ones.
UCX = (
    "env UCX_TLS=rc_v,ud_v,self UCX_NET_DEVICES=rxe0:1 "
    f"UCX_IB_GID_INDEX={GID} UCX_UD_VERBS_ETH_DGID_CHECK=n "
    "UCX_RC_VERBS_SEG_SIZE=4096 UCX_RNDV_THRESH=inf UCX_ZCOPY_THRESH=inf"
)
# The exit status of setup.sh where there can be no VM.
NO_VM = 3
_SETUP = """
modprobe -a virtio_net ib_uverbs rdma_ucm rdma_rxe || exit 1
for i in 0 1 2; do
    name=$(basename $(dirname $(grep -l 02:00:00:00:0{number}:0$i /sys/class/net/*/address)))
    ip link set $name name nic$i && ip addr add 10.0.$i.{number}/24 dev nic$i &&
        ip link set nic$i up || exit 1
done
for i in 0 1; do rdma link add rxe$i type rxe netdev nic$i || exit 1; done
"""


def address(host: str, link: int) -> str:
    """The address of a host on a link."""
    return f"10.0.{link}.{1 + 'ab'.index(host)}"


class Guest:
    """One of them: it runs for at most `seconds`."""

    def __init__(self, host: str, folder: Path, log: Path, seconds: int):
        self.host, self.folder, self.share = host, folder, folder / host
        self.count, self.programs = 0, {}
        self.share.mkdir()
        words = ["-qmp", f"unix:{folder}/{host}.qmp,server=on,wait=off"]
        other = "ba"["ab".index(host)]
        for i in (*DATA, MANAGEMENT):
            here, there = f"{folder}/{host}{i}", f"{folder}/{other}{i}"
            words += ["-netdev", f"dgram,id=n{i},local.type=unix,local.path={here},"]
            words[-1] += f"remote.type=unix,remote.path={there}"
            mac = f"02:00:00:00:0{1 + 'ab'.index(host)}:0{i}"
            words += ["-device", f"virtio-net-device,netdev=n{i},mac={mac},host_mtu=4200"]
        env = {
            **os.environ,
            "UNBROKEN_VM_SHARE": str(self.share),
            "UNBROKEN_VM_QEMU": " ".join(words),
            "UNBROKEN_VM_SECONDS": str(seconds),
        }
        line = [VM / "run.sh", f"bash {VM}/serve.sh"]
        self.machine = Process(f"guest {host}", line, log, env)

    def end(self):
        """Ends it."""
        if (self.folder / f"{self.host}.qmp").exists() and not self.machine.ended():
            self.monitor("quit")
            self.machine.wait(20)
        self.machine.kill()

    def monitor(self, command: str):
        """Has QEMU do something: `stop` and `cont` stop and continue the whole machine."""
        with socket.socket(socket.AF_UNIX) as to:
            to.settimeout(20)
            to.connect(f"{self.folder}/{self.host}.qmp")
            with to.makefile("rw") as lines:
                lines.readline()
                for name in ("qmp_capabilities", command):
                    lines.write(json.dumps({"execute": name}) + "\n")
                    lines.flush()
                    while "return" not in (answer := json.loads(lines.readline() or "{}")):
                        if "event" not in answer:
                            raise Failure(f"QEMU of {self.host}: {name}: {answer}")

    def sh(self, command: str, seconds: float = 60) -> str:
        """Runs a command of the shell there, and gives what it said."""
        number, self.count = self.count, self.count + 1
        (self.share / "new").write_text(command + "\n")
        (self.share / "new").rename(self.share / f"{number}.sh")
        status = self.share / f"{number}.rc"
        wait_until(
            lambda: status.exists() or self.machine.ended(), seconds, f"{self.host}: {command}"
        )
        said = (self.share / f"{number}.out").read_text(errors="replace")
        if not status.exists() or status.read_text().strip() != "0":
            raise Failure(f"{self.host}: {command}: {said[-500:]}{self.machine.output()[-500:]}")
        return said

    def start(self, name: str, command: str):
        """Starts a program there; its output is in the shared folder."""
        for end in ("log", "rc"):
            (self.share / f"{name}.{end}").unlink(missing_ok=True)
        program = f"{{ {command} >/share0/{name}.log 2>&1; echo $? >/share0/{name}.rc; }}"
        self.sh(f"{program} </dev/null >/dev/null 2>&1 &")

    def ended(self, name: str) -> str:
        """The exit status of a program, once it has ended."""
        status = self.share / f"{name}.rc"
        return status.read_text().strip() if status.exists() else ""

    def succeeds(self, name: str, seconds: float):
        """A program ends in time, with status 0."""
        wait_until(lambda: self.ended(name), seconds, f"the end of {name} at {self.host}")
        if self.ended(name) != "0":
            raise Failure(f"{name} at {self.host}: status {self.ended(name)}: {self.said(name)}")

    def said(self, name: str) -> str:
        """The end of a program's output."""
        log = self.share / f"{name}.log"
        return log.read_text(errors="replace")[-400:] if log.exists() else ""

    def sent(self, link: int) -> int:
        """Bytes that have left by a link."""
        return int(self.sh(f"cat /sys/class/net/nic{link}/statistics/tx_bytes"))


class Guests:
    """A context: both of them, with Redis at b."""

    def __init__(self, logs: Path, seconds: int):
        for tool in ("redis-server", "ib_write_bw"):
            if shutil.which(tool) is None:
                raise Skip(f"'{tool}' is missing: `make apt-test` names its package")
        self.logs, self.seconds, self.guests, self.run = logs, seconds, {}, 0
        # The programs of this run, by host.
        self.programs = []
        # The names of sockets are short, so this is not in the folder of the logs.
        self.folder = Path(tempfile.mkdtemp(prefix="unbroken-guests-"))

    def __enter__(self):
        try:
            self._make()
            for host in "ab":
                log = self.logs / f"guest-{host}.log"
                self.guests[host] = Guest(host, self.folder, log, self.seconds)
            for number, (host, guest) in enumerate(self.guests.items(), 1):
                guest.sh(_SETUP.replace("{number}", str(number)), 120)
            self["b"].sh(
                "redis-server --bind 0.0.0.0 --protected-mode no --save '' --daemonize yes"
            )
            for link in (*DATA, MANAGEMENT):
                self["a"].sh(f"ping -c 1 -w 20 {address('b', link)}")
        except BaseException:
            self.__exit__()
            raise
        return self

    @staticmethod
    def _make():
        """What a VM needs is made once, and not by both at a time."""
        folder = os.environ.get("UNBROKEN_VM", f"{os.environ.get('HOME')}/.cache/unbroken/vm")
        made = subprocess.run([VM / "setup.sh", folder], capture_output=True, text=True)
        if made.returncode == NO_VM:
            raise Skip(made.stdout.strip().splitlines()[-1])
        if made.returncode != 0:
            raise Failure(f"setup.sh: {made.stdout[-500:]}{made.stderr[-500:]}")

    def __exit__(self, *_):
        for guest in self.guests.values():
            guest.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __getitem__(self, host: str) -> Guest:
        return self.guests[host]

    def unbroken(self, host: str, *words) -> str:
        """What the command says there."""
        return self[host].sh(f"{self._unbroken()} {' '.join(map(str, words))}")

    def events(self) -> str:
        """What happened to the programs of this run, at both ends."""
        return self.unbroken("a", "events") + self.unbroken("b", "events")

    def _unbroken(self) -> str:
        # Each run has a runtime folder of its own.
        return (
            f"UNBROKEN_LOG=1 UNBROKEN_DIRECTORY=redis://{address('b', MANAGEMENT)} "
            f"{BUILD}/unbroken --runtime /tmp/run{self.run}"
        )

    def perftest(self, tool: str, options: str):
        """Starts a perftest program from a to b, as `client` and `server`."""
        line = f"{tool} -d rxe0 -x {GID} -F {options}"
        self._pair(line, line)

    def ucx(self, options: str):
        """Starts ucx_perftest from a to b, as `client` and `server`."""
        line = f"{UCX} ucx_perftest"
        self._pair(line, f"{line} {options}")

    def _pair(self, server: str, client: str):
        """Starts two programs that take a port, and the second the first's address."""
        self.run += 1
        self.programs = [("a", "client"), ("b", "server")]
        port = 18600 + self.run
        self["b"].start("server", f"{self._protected()} {server} -p {port}")
        self._listens(port, "the server")
        there = address("b", MANAGEMENT)
        self["a"].start("client", f"{self._protected()} {client} -p {port} {there}")

    def hpcc(self, n: int):
        """Starts hpcc with matrices of n by n, a rank at each host, by mpirun at a: as `client`."""
        self.run += 1
        self.programs = [("a", "client")]
        for host in "ab":
            # What mpirun tells hosts apart by.
            self[host].sh(f"hostname {host} && rm -rf {HPCC} && mkdir {HPCC}")
            self[host].sh(f"cat >{HPCC}/hpccinf.txt <<'END'\n{INPUT.format(n=n)}END")
        if not self._listening(AGENT_PORT):
            self["b"].start("agent", f"{AGENT} --serve {address('b', MANAGEMENT)}")
            self._listens(AGENT_PORT, "the agent")
        parameters = {
            "plm_rsh_agent": f"'{AGENT}'",
            "oob_tcp_if_include": f"nic{MANAGEMENT}",
            "btl": "self",
            "pml": "ucx",
            "mpi_yield_when_idle": 1,
        }
        line = "mpirun --allow-run-as-root --bind-to none "
        line += " ".join(f"--mca {name} {value}" for name, value in parameters.items())
        rank = f"-wdir {HPCC} env {self._protected()} {UCX} hpcc"
        ranks = [f" -np 1 -host {address(host, MANAGEMENT)} {rank}" for host in "ab"]
        self["a"].start("client", line + " :".join(ranks))

    def hpcc_result(self, folder: Path) -> Path:
        """The file that hpcc has written, copied into a folder."""
        said = self["a"].sh(f"cat {HPCC}/hpccoutf.txt")
        (folder / "hpccoutf.txt").write_text(said)
        return folder / "hpccoutf.txt"

    def _protected(self) -> str:
        """What goes before a program that is to be protected."""
        return f"{self._unbroken()} run --devices rxe0,rxe1 --"

    def _listening(self, port: int) -> bool:
        return f":{port} " in self["b"].sh("ss -Hltn")

    def _listens(self, port: int, who: str):
        wait_until(lambda: self._listening(port), 60, f"{who} listens at b", 0.3)

    def flows(self, link: int, seconds: float = 60, amount: int = FLOWS):
        """Waits until that much has left a by a link since now; no program may have failed."""
        first = self["a"].sent(link)

        def there():
            for host, name in self.programs:
                if self[host].ended(name) not in ("", "0"):
                    raise Failure(f"{name} ended: {self[host].said(name)}")
            return self["a"].sent(link) - first >= amount

        wait_until(there, seconds, f"{amount} bytes from a by nic{link}", longest_pause_s=0.5)

    def stop(self, host: str, seconds: float):
        """Stops a machine for so long; nobody there notices."""
        self[host].monitor("stop")
        time.sleep(seconds)
        self[host].monitor("cont")

    def succeed(self, seconds: float):
        """All programs end in time, with status 0."""
        deadline = time.monotonic() + seconds
        for host, name in self.programs:
            self[host].succeeds(name, max(1, deadline - time.monotonic()))

    def keep(self, logs: Path):
        """Copies what the programs said to the logs of a test."""
        for host, name in self.programs:
            log = self[host].share / f"{name}.log"
            if log.exists():
                shutil.copy(log, logs / f"{host}-{name}.log")
            (logs / f"{host}-events.log").write_text(self.unbroken(host, "events"))
