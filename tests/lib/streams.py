"""perftest's streams that run until the test has seen what it waits for, however slow the machine
is at the moment: a stream with a time of its own may end before."""

import signal
from pathlib import Path

from .process import Process, wait_until

# What such a stream is given for perftest's `-D`; the test ends it long before.
UNTIL_STOPPED = 240
# perftest's alarms: the measurement begins, it ends, the stream ends.
_ALARMS = 3
_ALARM_SECONDS = 20


def runs_until_stopped(args: list) -> bool:
    """Whether a command line is that of a stream of this kind."""
    words = [str(arg) for arg in args]
    return any(pair == ("-D", str(UNTIL_STOPPED)) for pair in zip(words, words[1:]))


class Stream(Process):
    """A perftest process that ends when the test expects its success."""

    # The other end: neither ends without the other.
    peer = None

    def stop(self):
        """Ends the measurement of both ends as perftest's own alarm does, if they have not ended
        by themselves. (An end that only answers a peer has no such alarm.)"""
        for _ in range(_ALARMS):
            for end in filter(None, (self, self.peer)):
                if end._awaits_alarm("SigCgt"):
                    end.popen.send_signal(signal.SIGALRM)
                    # A second alarm is lost while the first one is pending.
                    taken = lambda end=end: not end._awaits_alarm("ShdPnd")
                    wait_until(taken, _ALARM_SECONDS, f"{end.name} takes its alarm")

    def _awaits_alarm(self, mask: str) -> bool:
        """Whether the alarm is in one of the signal masks of the process, which still runs."""
        if self.ended():
            return False
        status = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        masks = dict(line.split(":", 1) for line in status)
        return bool(int(masks.get(mask, "0"), 16) >> (signal.SIGALRM - 1) & 1)

    def expect_success(self, seconds: float):
        self.stop()
        super().expect_success(seconds)
