"""`faulty.py CAUSE RANKS CONSUMER...`: ranks that take steps of a consumer (consumers.py) until one
of them fails; all must get an error soon, end their group, and make another that works.

PyTorch is loaded once: ranks are forks. CAUSE is `kill` (the last rank ends by SIGKILL), `nics`
(all NICs of its host die) or `timeout` (it takes no more steps). Prints `ok CONSUMER SECONDS`, the
longest time from the cause to an error, or what was wrong."""

import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import consumers
import torch
import torch.distributed as dist
import unbroken.torch  # noqa: F401

# Steps before the fault, and how long an operation may stand still where that is the cause; twice
# the time within which an error is to come.
STEPS, STILL_S, LATE_S = 3, 3, 4
# Whatever hangs ends after this.
MOST_S = 120
NICS = 4
SAID = {"kill": "is gone", "nics": ("had no path", "stands still"), "timeout": "stands still"}


class Case:
    """One consumer with one cause."""

    def __init__(self, cause: str, ranks: int, name: str):
        self.cause, self.ranks, self.name = cause, ranks, name
        self.victim = ranks - 1
        self.folder = Path(tempfile.mkdtemp())

    def say(self, what: str, text: object = ""):
        """Writes a file that other processes wait for."""
        unfinished = self.folder / f"{what}.{os.getpid()}"
        unfinished.write_text(str(text))
        unfinished.rename(self.folder / what)

    def heard(self, what: str) -> str | None:
        path = self.folder / what
        return path.read_text() if path.exists() else None

    def wait_for(self, what: str) -> str:
        ends = time.monotonic() + MOST_S
        while (text := self.heard(what)) is None:
            if time.monotonic() > ends:
                raise RuntimeError(f"'{what}' has not come")
            time.sleep(0.01)
        return text

    # A rank

    def join(self, store: str, rank: int, ranks: int):
        dist.init_process_group(
            "unbroken",
            init_method=f"file://{self.folder / store}",
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=MOST_S),
        )

    def fail(self):
        """What the last rank does, or waits for, after some steps."""
        if self.cause == "kill":
            self.say("cause", time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        if self.cause == "timeout":
            self.say("cause", time.monotonic())
            for other in range(self.ranks - 1):
                self.wait_for(f"error{other}")
        self.say("ready")

    def until_error(self, rank: int, step) -> str:
        """Takes steps until there is an error; what it says."""
        ends = time.monotonic() + MOST_S
        for count in range(sys.maxsize):
            if time.monotonic() > ends:
                raise RuntimeError("there was no error")
            if count == STEPS:
                if self.cause != "kill":
                    # Not before: what is compiled, say, may be late.
                    dist.set_timeout(datetime.timedelta(seconds=STILL_S))
                if rank == self.victim:
                    self.fail()
            try:
                step()
            except Exception:
                return traceback.format_exc()

    def run(self, rank: int):
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        self.join("first", rank, self.ranks)
        text = self.until_error(rank, consumers.ALL[self.name]())
        at = time.monotonic()
        right = SAID[self.cause]
        if not any(said in text for said in ([right] if isinstance(right, str) else right)):
            raise RuntimeError(f"it says {text}")
        began = time.monotonic()
        dist.destroy_process_group()
        if time.monotonic() - began > LATE_S:
            raise RuntimeError(f"the end of the group takes {time.monotonic() - began:.1f} s")
        self.say(f"error{rank}", at)
        self.wait_for("healed")
        ranks = self.ranks - (self.cause == "kill")
        self.join("second", rank, ranks)
        x = torch.ones(10)
        dist.all_reduce(x)
        if x.tolist() != [ranks] * 10:
            raise RuntimeError(f"a sum of {ranks} ones is {x}")
        dist.destroy_process_group()

    # Their parent

    def fork(self, rank: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            self.run(rank)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def play(self) -> str | None:
        """What was wrong, or None."""
        pids = {rank: self.fork(rank) for rank in range(self.ranks)}
        open_, wrong = dict(pids), []
        hosts = os.environ["UNBROKEN_HOSTS"].split(",")
        ends = time.monotonic() + 2 * MOST_S
        told = set()
        while open_ and time.monotonic() < ends:
            if self.cause == "nics" and self.heard("ready") is not None and "nics" not in told:
                told.add("nics")
                for nic in range(NICS):
                    fault("set", f"nic {hosts[self.victim]}/{nic} dead")
                self.say("cause", time.monotonic())
            living = [r for r in pids if self.cause != "kill" or r != self.victim]
            if "healed" not in told and all(self.heard(f"error{r}") for r in living):
                told.add("healed")
                if self.cause == "nics":
                    fault("clear")
                self.say("healed")
            for rank, pid in list(open_.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del open_[rank]
                    killed = self.cause == "kill" and rank == self.victim
                    if status != (signal.SIGKILL if killed else 0):
                        wrong.append(f"rank {rank} ends with {os.waitstatus_to_exitcode(status)}")
            if wrong and "healed" not in told:
                break
            time.sleep(0.01)
        for rank, pid in open_.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            wrong.append(f"rank {rank} did not end")
        return "; ".join(wrong) or self.late()

    def late(self) -> str | None:
        cause = float(self.heard("cause"))
        # Who did not take part any more hears last.
        ranks = self.ranks - (self.cause != "nics")
        self.took_s = max(float(self.heard(f"error{rank}")) - cause for rank in range(ranks))
        # A quarter more while others stand still in an earlier operation.
        most_s = LATE_S if self.cause == "kill" else 1.25 * STILL_S + LATE_S
        return None if self.took_s < most_s else f"an error comes after {self.took_s:.1f} s"


def fault(*words: str):
    subprocess.run([os.environ["UNBROKEN"], "fault", *words], check=True, capture_output=True)


def main():
    cause, ranks, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    for name in names:
        case = Case(cause, ranks, name)
        wrong = case.play()
        print(f"wrong {name}: {wrong}" if wrong else f"ok {name} {case.took_s:.2f}", flush=True)


if __name__ == "__main__":
    main()
