"""A suite: cases with a line of result each, logs under target/test-logs/<suite>/<case>/, and a summary."""

import re
import shutil
import sys
import time
import traceback
from pathlib import Path

from .paths import BUILD, LOGS, ROOT, TARGET  # noqa: F401
from .process import SKIPPED, Failure, Skip

TAIL_LINES = 12
CAUSE = re.compile(r"^terminate called|what\(\):|panicked at|^\w*(?:Error|Exception|Failure)\b")


class Suite:
    """Runs cases, goes on after a failure, and gives the exit status: 0, 1 after a failure, SKIPPED where all cases were skipped."""

    def __init__(self, name: str, only: list | None = None):
        """With `only`, cases whose names lack one of these words are not run. What looks like an option is none: how to call it is said, and that is all."""
        self.name, self.only = name, only or []
        options = [word for word in self.only if word.startswith("-")]
        if options:
            script = Path(sys.argv[0]).name
            print(f"usage: {script} [WORD...]\n\n  WORD  only cases whose names have all these words\n{sys.modules['__main__'].__doc__ or ''}")
            sys.exit(0 if set(options) <= {"-h", "--help"} else f"{script}: no option {options[0]}")
        self.logs = LOGS / name
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        self.ok, self.failed, self.skipped = [], [], []
        self.started = time.monotonic()

    def case(self, name: str, run, *args):
        """Runs `run(logs, *args)`; what it returns is printed behind the name. Returns it, or None if the case failed."""
        if any(word not in name for word in self.only):
            return None
        logs = self.logs / re.sub(r"[^A-Za-z0-9_.+-]+", "_", name)
        logs.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        try:
            value = run(logs, *args)
        except Skip as skip:
            self.skipped.append(name)
            print(f"skip  {name}: {skip}", flush=True)
            return None
        except (Failure, OSError, ValueError, KeyError) as error:
            self.failed.append(name)
            print(f"FAIL  {name}: {error}", flush=True)
            if not isinstance(error, Failure):
                traceback.print_exc()
            show_logs(logs)
            return None
        self.ok.append(name)
        note = value if isinstance(value, str) else getattr(value, "note", "")
        print(f"ok    {name}  {note}  [{time.monotonic() - started:.1f} s]", flush=True)
        return value

    def finish(self) -> int:
        """Prints the summary and gives the exit status."""
        took = time.monotonic() - self.started
        counts = f"{len(self.ok)} ok, {len(self.failed)} failed, {len(self.skipped)} skipped"
        print(f"{self.name}: {counts}, {took:.0f} s", flush=True)
        if self.failed:
            print(f"logs: {self.logs}; failed: " + "; ".join(self.failed), flush=True)
        if self.skipped and not (self.ok or self.failed):
            print(f"{self.name}: nothing was tested", flush=True)
            return SKIPPED
        return 1 if self.failed or not self.ok else 0


def show_logs(logs: Path):
    """Prints the end of every log of a case."""
    for log in sorted(logs.rglob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        print(f"  -- {log.name}, last lines:")
        # What a process died of may stand far above what those who started it say of its end.
        causes = [line for line in lines[1:-TAIL_LINES] if CAUSE.search(line)]
        for line in lines[:1] * (len(lines) > TAIL_LINES) + causes[:TAIL_LINES] + lines[-TAIL_LINES:]:
            print(f"     {line[:200]}")
