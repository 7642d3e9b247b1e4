"""The emulated network of a test: its own, in a runtime folder that nobody else has."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any, TypeVar

from .. import _command
from .errors import LabError, wait_until
from .program import Program

_COMMAND_TIMEOUT_S = 30
# Counters change with every packet: on a disk they would be written back all the time.
_MEMORY = Path("/dev/shm")
_PORTS = range(20_000, 32_000)
# An event as `unbroken events --json` has it: docs/reference/cli.md names the fields.
Event = dict[str, Any]


@dataclass(frozen=True)
class Traffic:
    """What a NIC has carried since its fabric was made, in bytes of payload."""

    tx_bytes: int
    rx_bytes: int

    @property
    def bytes(self) -> int:
        """Sent and received together."""
        return self.tx_bytes + self.rx_bytes

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        return Traffic(self.tx_bytes - earlier.tx_bytes, self.rx_bytes - earlier.rx_bytes)


class Nic:
    """A NIC of the fabric: what it carries, and its faults."""

    def __init__(self, fabric: "Fabric", name: str):
        self.fabric, self.name = fabric, name

    def __repr__(self) -> str:
        return f"<Nic {self.name}>"

    @property
    def state(self) -> str:
        """`active`, `down` or `dead`; `, drained` behind it while no queue pair may use it."""
        return str(self.fabric.nic_status(self.name)["state"])

    @property
    def traffic(self) -> Traffic:
        """What it has carried so far."""
        counters = self.fabric.nic_status(self.name)
        return Traffic(counters["tx_payload_bytes"], counters["rx_payload_bytes"])

    def kill(self) -> None:
        """The device dies: programs see a device-fatal event."""
        self.fabric.fault(f"nic {self.name} dead")

    def port_down(self) -> None:
        """Its port goes down: programs see a port-down event."""
        self.fabric.fault(f"nic {self.name} down")

    def cut(self) -> None:
        """Its cable is cut: silence, and no event."""
        self.fabric.fault(f"cable {self.name} cut")

    def heal(self) -> None:
        """Takes back what `kill`, `port_down` and `cut` have done."""
        self.fabric.clear(f"nic {self.name}")
        self.fabric.clear(f"cable {self.name}")

    def wait_for_traffic(self, more_bytes: int = 1 << 20, timeout_s: float = 20) -> Traffic:
        """Waits until it has sent and received that many bytes more, in all; gives them.

        Raises LabError after `timeout_s` seconds.
        """
        before = self.traffic

        def moved() -> Traffic | None:
            now = self.traffic - before
            return now if now.bytes >= more_bytes else None

        what = f"{more_bytes} bytes through NIC {self.name}"
        return wait_until(moved, timeout_s, what)  # type: ignore[return-value]


class Host:
    """A host of the fabric. A program on it has its NICs as the devices unb0, unb1, …"""

    def __init__(self, fabric: "Fabric", name: str):
        self.fabric, self.name = fabric, name

    def __repr__(self) -> str:
        return f"<Host {self.name}>"

    @property
    def nics(self) -> list[Nic]:
        """Its NICs, in the order of the devices."""
        return [nic for nic in self.fabric.nics if nic.name.split("/")[0] == self.name]

    @property
    def traffic(self) -> Traffic:
        """What all its NICs have carried."""
        each = [nic.traffic for nic in self.nics]
        return Traffic(sum(t.tx_bytes for t in each), sum(t.rx_bytes for t in each))

    def start(
        self,
        args: Sequence[str | os.PathLike[str]],
        *,
        failover: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Program:
        """Starts a program on this host; without failover it meets each failure itself."""
        options = ["run", "--host", self.name] + ([] if failover else ["--no-failover"])
        return self.fabric.start_program(self.name, options, [os.fspath(a) for a in args], env)

    def run(
        self,
        args: Sequence[str | os.PathLike[str]],
        timeout_s: float = 60,
        *,
        failover: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Runs a program to its end; gives its output. Raises LabError if it fails."""
        __tracebackhide__ = True
        return self.start(args, failover=failover, env=env).succeed(timeout_s)


_Named = TypeVar("_Named", Host, Nic)


def _named(all_of_them: list[_Named], what: str, name: str) -> _Named:
    found = [one for one in all_of_them if one.name == name]
    if not found:
        names = ", ".join(one.name for one in all_of_them)
        raise LabError(f"there is no {what} {name}; there are {names}")
    return found[0]


def _names(hosts: Sequence[str] | int) -> list[str]:
    if isinstance(hosts, str):
        raise LabError(f"hosts={hosts!r} is one name; a list like ['a', 'b'] or a number is right")
    if not isinstance(hosts, int):
        return list(hosts)
    if not 1 <= hosts <= len(ascii_lowercase):
        raise LabError(f"hosts={hosts}: 1 to {len(ascii_lowercase)} is right; name more of them")
    return list(ascii_lowercase[:hosts])


class Fabric:
    """An emulated network, made by the constructor and taken away by `close` or `with`.

    `hosts` are names, or how many (a, b, …); NIC n of all hosts is on rail n. `device` is what the
    NICs can do: `full`, or `plain` for no more than an RNIC can. `options` are further ones of
    `unbroken fabric up`. Logs of programs go to the folder `logs`; without one they are taken away
    with the fabric.
    """

    def __init__(
        self,
        hosts: Sequence[str] | int = 2,
        nics: int = 4,
        *,
        device: str = "full",
        options: Sequence[str] = (),
        logs: Path | None = None,
    ):
        names = _names(hosts)
        root = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        self._folder = Path(tempfile.mkdtemp(prefix="unbroken-lab-", dir=root))
        self.runtime = self._folder / "runtime"
        self._logs = self._folder if logs is None else logs
        self._logs.mkdir(parents=True, exist_ok=True)
        self.programs: list[Program] = []
        self._unbroken = _command.path()
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("UNBROKEN_")}
        self._env["UNBROKEN_RUNTIME"] = str(self.runtime)
        try:
            shape = ["--hosts", ",".join(names), "--nics", str(nics), "--device", device]
            self.command("fabric", "up", *shape, *options)
        except BaseException:
            self.close()
            raise
        self.hosts = [Host(self, name) for name in names]

    def __enter__(self) -> "Fabric":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends its programs and takes it away; what it was told as `logs` stays."""
        for program in self.programs:
            program.kill()
        if self.runtime.exists():
            reset = [self._unbroken, "reset", "--force"]
            subprocess.run(reset, env=self._env, capture_output=True, timeout=_COMMAND_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    # Hosts and NICs

    def host(self, name: str) -> Host:
        """A host by its name. Raises LabError if there is none."""
        return _named(self.hosts, "host", name)

    @property
    def nics(self) -> list[Nic]:
        """All NICs."""
        return [Nic(self, name) for name in self._nic_table()]

    def nic(self, name: str) -> Nic:
        """A NIC by its name, like `a/0`. Raises LabError if there is none."""
        return _named(self.nics, "NIC", name)

    def _nic_table(self) -> dict[str, dict[str, Any]]:
        return {nic["nic"]: nic for nic in self.status()["nics"]}

    def nic_status(self, name: str) -> dict[str, Any]:
        """A NIC as `unbroken status --json` has it."""
        return self._nic_table()[name]

    # Programs

    def start_program(
        self, host: str, options: list[str], args: list[str], env: Mapping[str, str] | None
    ) -> Program:
        """Starts `unbroken OPTIONS -- ARGS`; `Host.start` is what tests call."""
        name = f"{len(self.programs)}-{host}-{Path(args[0]).name}"
        line = [self._unbroken, *options, "--", *args]
        program = Program(name, line, self._logs / f"{name}.log", {**self._env, **(env or {})})
        self.programs.append(program)
        return program

    def free_port(self) -> int:
        """A TCP port on which nobody listens now. Hosts share this machine's network."""
        first = os.getpid() * 101
        for n in range(len(_PORTS)):
            port = _PORTS[(first + n + len(self.programs)) % len(_PORTS)]
            with socket.socket() as probe:
                try:
                    probe.bind(("0.0.0.0", port))
                except OSError:
                    continue
                return port
        raise LabError(f"no TCP port from {_PORTS.start} to {_PORTS.stop} is free")

    # Faults

    def fault(self, text: str, *, at: str | None = None, lasts: str | None = None) -> None:
        """Sets a fault (docs/reference/faults.md), like `loss a/0 1%`: now or so much later, until
        it is cleared or for so long; times like `500ms`."""
        schedule = (["--at", at] if at else []) + (["--for", lasts] if lasts else [])
        self.command("fault", "set", text, *schedule)

    def clear(self, text: str | None = None) -> None:
        """Clears a fault, those that begin so, or all."""
        self.command("fault", "clear", *([text] if text else []))

    # What happened

    def status(self) -> dict[str, Any]:
        """`unbroken status --json`: NICs, queue pairs, processes."""
        status: dict[str, Any] = json.loads(self.command("status", "--json"))
        return status

    def events(self, kind: str | None = None) -> list[Event]:
        """What happened, in order: all of it, or one kind (`switch`, `fault`, `give-up`, …)."""
        events = [json.loads(line) for line in self.command("events", "--json").splitlines()]
        return [event for event in events if kind in (None, event["event"])]

    def switches(self, host: str | None = None) -> list[Event]:
        """The switches of queue pairs to other NICs, at all hosts or one."""
        return [event for event in self.events("switch") if host in (None, event["host"])]

    def wait_for_switch(self, host: str | None = None, timeout_s: float = 20) -> Event:
        """Waits for a switch, and gives the first one. Raises LabError after `timeout_s` s."""
        where = f" at host {host}" if host else ""
        found = lambda: self.switches(host)
        return wait_until(found, timeout_s, f"a switch{where}")[0]

    def assert_carried(self, nic: str, at_least: int = 0, at_most: int | None = None) -> Traffic:
        """Fails unless a NIC has carried so many bytes of payload, sent and received together.

        A NIC that is to be unused is asserted by `at_most`.
        """
        __tracebackhide__ = True
        traffic = self.nic(nic).traffic
        if traffic.bytes < at_least or (at_most is not None and traffic.bytes > at_most):
            limit = f"at least {at_least}" if at_most is None else f"{at_least} to {at_most}"
            each = ", ".join(f"{one.name} {one.traffic.bytes}" for one in self.nics)
            raise LabError(f"NIC {nic} carried {traffic.bytes} bytes, not {limit}; all: {each}")
        return traffic

    def command(self, *args: str) -> str:
        """Runs `unbroken ARGS` about this fabric; gives what it prints. Raises LabError if it
        fails."""
        line = [self._unbroken, *args]
        done = subprocess.run(
            line, env=self._env, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S
        )
        if done.returncode != 0:
            raise LabError(f"unbroken {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout
