"""Programs under test: started with a log, waited for with a deadline, and never left behind."""

import ctypes
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

_prctl = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1
# The exit status of a program that could test or measure nothing here, as Automake has it.
SKIPPED = 77


class Failure(AssertionError):
    """A test failed; the text says why."""


class Died(Failure):
    """A stream did not outlive its fault."""


class Skip(Exception):
    """A test cannot run here; the text says why."""


def needs(tool: str, package: str):
    """Skips the test where a program of Debian's is missing."""
    if shutil.which(tool) is None:
        raise Skip(f"{tool} is missing: install Debian's {package}")


def wait_until(condition, seconds: float, what: str, longest_pause_s=0.03):
    """Polls until `condition()` is true and gives its value; fails after `seconds`, saying what did
    not come. What is measured meanwhile is disturbed less by longer pauses."""
    deadline = time.monotonic() + seconds
    pause = 0.002
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise Failure(f"{what}: not within {seconds:g} s")
        time.sleep(pause)
        pause = min(pause * 1.5, longest_pause_s)


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"


class Process:
    """A program that runs with its output in a log."""

    def __init__(self, name: str, args: list, log: Path, env: dict):
        self.name, self.args, self.log = name, [str(a) for a in args], log
        with open(log, "wb") as out:
            out.write((" ".join(self.args) + "\n").encode())
            out.flush()
            self.popen = subprocess.Popen(
                self.args,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                # It dies with us, so that an interrupted suite leaves nothing behind.
                preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        self.pid = self.popen.pid
        self.ended_at = None

    def ended(self) -> bool:
        """Whether it has ended."""
        if self.popen.poll() is None:
            return False
        self.ended_at = self.ended_at or time.monotonic()
        return True

    def wait(self, seconds: float) -> int:
        """Its exit status; fails if it does not end in time."""
        wait_until(self.ended, seconds, f"the end of {self.name}")
        return self.popen.returncode

    def expect_success(self, seconds: float):
        """Fails if it does not end in time with status 0."""
        code = self.wait(seconds)
        if code != 0:
            said = self.output().strip().splitlines()[-1:]
            raise Failure(": ".join([f"{self.name} {describe_exit(code)}", *said]))

    def expect_error(self, seconds: float):
        """Fails if it does not end in time, by itself, with an error."""
        code = self.wait(seconds)
        if code <= 0:
            raise Failure(f"{self.name} {describe_exit(code)} where an error was due")

    def output(self) -> str:
        """What it has written so far."""
        return self.log.read_text(errors="replace").split("\n", 1)[-1]

    def kill(self, sig=signal.SIGKILL):
        """Ends it if it still runs."""
        if self.popen.poll() is None:
            os.kill(self.pid, sig)
            self.popen.wait()
        self.ended_at = self.ended_at or time.monotonic()


def ticks(pid: int) -> int:
    """The processor time that a process has had, in ticks of the system (SC_CLK_TCK a second)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:13]))
