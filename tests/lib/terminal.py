"""A program on a terminal of its own (a pty), and what is on its screen (pyte, from Debian)."""

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time

from .process import Failure, Skip

try:
    import pyte
except ImportError:
    pyte = None


class Terminal:
    """A context: a program on a terminal of so many columns and rows."""

    def __init__(self, args: list, env: dict, columns=80, rows=24):
        if pyte is None:
            raise Skip("pyte is missing (Debian: python3-pyte)")
        self.screen = pyte.Screen(columns, rows)
        self.stream = pyte.ByteStream(self.screen)
        self.written, self.status = b"", None
        args = [str(arg) for arg in args]
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.execvpe(args[0], args, {**env, "TERM": "xterm-256color"})
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.kill(self.pid, signal.SIGWINCH)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        if self.master is not None:
            os.close(self.master)

    def ended(self) -> bool:
        """Whether the program has ended; `status` then is its exit status."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def read(self, seconds=0.05):
        """Takes in what the program writes."""
        if select.select([self.master], [], [], seconds)[0]:
            try:
                data = os.read(self.master, 65536)
            except OSError:
                return
            self.written += data
            self.stream.feed(data)

    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def type(self, keys: str):
        """Presses keys."""
        os.write(self.master, keys.encode())

    def close(self):
        """The terminal goes away, as when its window is closed or its connection breaks."""
        os.close(self.master)
        self.master = None

    def wait_for(self, condition, seconds: float, what: str):
        """Reads until `condition(text)` is true, and gives the text."""
        deadline = time.monotonic() + seconds
        while not condition(self.text()):
            if time.monotonic() > deadline or self.ended():
                raise Failure(f"{what}: not within {seconds:g} s; on the screen:\n{self.text()}")
            self.read()
        return self.text()

    def wait_end(self, seconds: float) -> int:
        """The exit status of the program."""
        deadline = time.monotonic() + seconds
        while not self.ended():
            if time.monotonic() > deadline:
                raise Failure(f"it has not ended after {seconds:g} s:\n{self.text()}")
            self.read()
        # What it has written last.
        while select.select([self.master], [], [], 0)[0]:
            before = len(self.written)
            self.read()
            if len(self.written) == before:
                break
        return self.status
