"""A program on a host of the lab."""

import ctypes
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import LabError, wait_until

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl
# TCP_LISTEN in the kernel's tables.
_LISTEN = "0A"
_SHOWN_LINES = 12


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Program:
    """A program that runs, or ran, with its output in a file.

    `Host.start` makes one. `pid` is the program's own, not that of a wrapper.
    """

    def __init__(self, name: str, line: Sequence[str], log: Path, env: Mapping[str, str]):
        self.name, self.log = name, log
        with open(log, "wb") as out:
            out.write((shlex.join(line) + "\n").encode())
            out.flush()
            # It ends with the tests, so that an interrupted run leaves nothing behind.
            self._process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(env),
                preexec_fn=_die_with_parent,
            )
        self.pid = self._process.pid

    def __repr__(self) -> str:
        return f"<Program {self.name}, pid {self.pid}, {self._state()}>"

    def _state(self) -> str:
        status = self._process.poll()
        if status is None:
            return "runs"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    @property
    def output(self) -> str:
        """What it has written so far, to both streams."""
        return self.log.read_text(errors="replace").split("\n", 1)[-1]

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def _error(self, what: str) -> LabError:
        end = "\n".join(self.output.splitlines()[-_SHOWN_LINES:])
        return LabError(f"{self.name} {what}; the end of its output:\n{end}")

    def wait(self, timeout_s: float = 60) -> int:
        """Waits for its end; gives its exit status. Raises LabError if it does not end in time."""
        __tracebackhide__ = True
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self._error(f"did not end within {timeout_s:g} s") from None

    def succeed(self, timeout_s: float = 60) -> str:
        """Waits for its end with status 0; gives its output. Raises LabError otherwise."""
        __tracebackhide__ = True
        if self.wait(timeout_s) != 0:
            raise self._error(self._state())
        return self.output

    def fail(self, timeout_s: float = 60) -> str:
        """Waits for its end with an error of its own; gives its output.

        Raises LabError if it succeeds, dies by a signal, or does not end in time.
        """
        __tracebackhide__ = True
        if self.wait(timeout_s) <= 0:
            raise self._error(f"{self._state()}, where an error was due")
        return self.output

    def listens(self, port: int) -> bool:
        """Whether a TCP port has a listener in the program's network."""
        return any(self._has_listener(table, port) for table in ("tcp", "tcp6"))

    def _has_listener(self, table: str, port: int) -> bool:
        try:
            lines = Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            return False
        fields = (line.split() for line in lines)
        return any(f[3] == _LISTEN and int(f[1].rsplit(":", 1)[1], 16) == port for f in fields)

    def wait_for_listener(self, port: int, timeout_s: float = 20) -> None:
        """Waits until a TCP port has a listener. Raises LabError if it ends first, or does
        not listen in time."""
        __tracebackhide__ = True

        def ready() -> bool:
            if self.status is not None:
                raise self._error(f"{self._state()} before it listened on TCP port {port}")
            return self.listens(port)

        wait_until(ready, timeout_s, f"{self.name} listens on TCP port {port}")

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal, if it still runs."""
        if self.status is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it, if it still runs."""
        if self.status is None:
            self._process.kill()
            self._process.wait()
