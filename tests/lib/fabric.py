"""A fabric of its own for a test: runtime folder, programs on its hosts, faults, counters, events,
gaps."""

import json
import os
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path

from .ports import free_port, listens
from .process import Failure, Process, wait_until
from .paths import BUILD
from .streams import Stream, runs_until_stopped

UNBROKEN = BUILD / "unbroken"
_COMMAND_SECONDS = 20
# Pages of a folder on a disk would be written back in mid-stream; see
# crates/base/runtime/src/runtime.rs.
RUNTIME_ROOT = (
    "/dev/shm" if os.path.ismount("/dev/shm") and os.access("/dev/shm", os.W_OK) else None
)


class Fabric:
    """A context: on leaving it, its programs are ended and its runtime folder is removed (logs
    stay).

    `settings` are options of `unbroken fabric up`; without any, the fabric is the default one, made
    by whoever comes first. A subclass may have its runtime folder, its programs and its commands
    elsewhere."""

    root = RUNTIME_ROOT

    # The kind of the NICs, and the GID index that programs take there: see lib/device.py.
    device: tuple = ()
    gid_index = 0

    # The kind of fabric that tests get that ask for this one (the fixture `device`).
    stand_in: type | None = None

    def __new__(cls, *_args, **_more):
        return object.__new__(cls.stand_in if cls is Fabric and cls.stand_in else cls)

    def __init__(self, logs: Path, *settings: str):
        if not UNBROKEN.exists():
            raise Failure(f"{UNBROKEN} is missing; 'make all' builds it")
        self.logs = logs
        self.path = self._make_folder()
        # What a test has its programs read or wait for. Not in the runtime folder: before a program
        # has made that one whole, nothing but Unbroken's own may be in it.
        self.files = self._make_folder()
        self.processes = []
        self.env = {
            k: v for k, v in os.environ.items() if not k.startswith(("UNBROKEN_", "LD_PRELOAD"))
        }
        self.env["UNBROKEN_RUNTIME"] = str(self.path)
        settings = [*self.device, *settings]
        if "infiniband" in settings:
            self.gid_index = 0
        self.env["TEST_GID_INDEX"] = str(self.gid_index)
        if settings:
            self._succeed("fabric", "up", *settings)

    def _make_folder(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="unbroken-test-", dir=self.root))

    def __enter__(self):
        return self

    def __exit__(self, kind, _error, _trace):
        for process in self.processes:
            process.kill()
        if kind is not None:
            self._keep("events.jsonl", "events.log")
            (self.logs / "status.log").write_text(self.command("status").stdout)
        for folder in self.path, self.files:
            shutil.rmtree(folder, ignore_errors=True)

    def _keep(self, name: str, log: str):
        if (self.path / name).exists():
            shutil.copy(self.path / name, self.logs / log)

    # Where it lives

    def program_line(self, args: list) -> list:
        """The command line that runs a program of this fabric."""
        return args

    def command_line(self, args: list) -> list:
        """The command line that runs a command of `unbroken` about this fabric."""
        return args

    # Programs

    def start(self, name: str, args: list, env: dict | None = None) -> Process:
        """Starts a program of ours, or anything else, in this fabric."""
        kind = Stream if runs_until_stopped(args) else Process
        process = kind(name, args, self.logs / f"{name}.log", {**self.env, **(env or {})})
        self.processes.append(process)
        return process

    def run(
        self, host: str, args: list, name: str | None = None, failover=True, env: dict | None = None
    ) -> Process:
        """Starts `unbroken run --host HOST -- ARGS…`."""
        options = ["--host", host] + ([] if failover else ["--no-failover"])
        line = self.program_line([UNBROKEN, "run", *options, "--", *args])
        return self.start(name or f"{host}-{Path(args[0]).name}", line, env)

    def pair(self, tool: str, args: list, failover=True, server_args: list | None = None):
        """Starts `tool ARGS` as a server on host b and, when it listens, as a client on host a.
        Gives both."""
        port = free_port()
        program = [
            tool,
            "-d",
            "unb0",
            "-p",
            port,
            *(["-x", self.gid_index] if self.gid_index else []),
            *args,
        ]
        server = self.run("b", program + (server_args or []), f"b-{tool}", failover)
        wait_until(
            lambda: server.ended() or listens(server.pid, port),
            20,
            f"{tool} server listens at port {port}",
        )
        client = self.run("a", program + ["127.0.0.1"], f"a-{tool}", failover)
        if isinstance(client, Stream):
            client.peer, server.peer = server, client
        return server, client

    def command(self, *args) -> subprocess.CompletedProcess:
        """Runs the `unbroken` command and gives what came of it."""
        args = [str(arg) for arg in self.command_line([UNBROKEN, *args])]
        return subprocess.run(
            args, env=self.env, capture_output=True, text=True, timeout=_COMMAND_SECONDS
        )

    def _succeed(self, *args) -> str:
        done = self.command(*args)
        if done.returncode != 0:
            raise Failure(
                f"unbroken {' '.join(map(str, args))}: status {done.returncode}: "
                f"{done.stderr.strip()}"
            )
        return done.stdout

    # Faults

    def fault(self, text: str, *schedule: str):
        """Sets a fault, at once and until it is cleared if there is no schedule (`--at`, `--for`,
        `--every`)."""
        self._succeed("fault", "set", text, *schedule)

    def random_faults(self, seed: int, seconds: float, *hosts: str):
        """Sets the random faults of a seed on some hosts."""
        self._succeed(
            "fault",
            "random",
            "--seed",
            seed,
            "--for",
            f"{round(seconds * 1000)}ms",
            "--hosts",
            ",".join(hosts),
        )

    def clear(self, *what: str):
        """Clears faults: those named, or all."""
        self._succeed("fault", "clear", *what)

    # What can be seen

    def status(self) -> dict:
        """`unbroken status --json`."""
        return json.loads(self._succeed("status", "--json"))

    def events(self, kind: str | None = None) -> list:
        """`unbroken events --json`, all or those of one kind."""
        events = [json.loads(line) for line in self._succeed("events", "--json").splitlines()]
        return [e for e in events if kind in (None, e["event"])]

    def faults(self) -> list:
        """`unbroken fault list --json`."""
        return [json.loads(line) for line in self._succeed("fault", "list", "--json").splitlines()]

    def nics(self) -> dict:
        """The NICs with their counters, by name."""
        return {n["nic"]: n for n in self.status()["nics"]}

    def elsewhere(self, nic: str, counter: str) -> int:
        """What the other NICs of that one's host have counted: its queue pairs take turns over
        them."""
        host = nic.split("/")[0]
        return sum(
            n[counter]
            for name, n in self.nics().items()
            if name.split("/")[0] == host and name != nic
        )

    def gaps(self, pid: int) -> dict:
        """The gaps that the page of a process has now: start to length, in µs; see `GapRecorder` in
        crates/nic/fabric/src/gap.rs."""
        try:
            page = next((self.path / "shm" / "proc").glob(f"{pid}-*.page")).read_bytes()
        except (OSError, StopIteration):
            return {}
        if page[:8] != b"UNBGAPPG" or struct.unpack_from("<I", page, 8) != (2,):
            raise Failure("the page of gaps has another layout than this test knows")
        return {start: length for start, length in struct.iter_unpack("<QQ", page[128:]) if length}


def now_us() -> int:
    """The clock of the events: CLOCK_MONOTONIC in µs."""
    return time.monotonic_ns() // 1000
