#!/usr/bin/env python3
"""Every command of README.md works as it stands there.

The indented blocks are run from top to bottom by a shell, with the built command in PATH and a runtime folder of their own; what a line
leaves running is waited for, and must end well, too. Commands in the text (in backticks) are run alone. Only what NOT_RUN names is
left out, with its reason; a command that the README gains is run unless it is added there.
"""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from lib.fabric import Fabric
from lib.namespaces import Namespaces
from lib.process import Failure, Skip
from lib.suite import BUILD, ROOT, Suite

README = ROOT / "README.md"
BLOCK_SECONDS = 240
# Words of a line, or of a command in the text, and why it is not run here.
NOT_RUN = {
    "make test ": "runs this",
    "make bench": "takes ten minutes; its programs are checked by their own tests",
    "make test-mpi": "takes some minutes; CI runs it",
    "make test-torch": "needs 12 GB for PyTorch",
    "tests/torch/gpt.py": "needs PyTorch; make test-torch runs it",
    "events --follow": "goes on until it is interrupted",
    "unbroken edge demo": "needs root and FRR",
    "redis.lab": "needs a Redis server; tests/e2e/test_redis.py has its own",
}
# Mentioned in the text without the program that they run.
INCOMPLETE = {"unbroken run", "unbroken run --directory", "unbroken run --no-failover", "unbroken edge", "unbroken"}
# A block that needs two machines is run in two network namespaces, which have the addresses that it names.
REAL_INTERFACES = "--nics"
ON_ONE, ON_OTHER = "# on one machine", "# on the other"
WAIT_FOR_ALL = "for job in $(jobs -p); do wait $job; done"


def blocks(text: str) -> list:
    """The indented blocks, as lists of lines. Where a block shows a session, its commands (behind `$ `)."""
    found, lines = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("    "):
            lines.append(line[4:])
        elif lines:
            typed = [entry[2:] for entry in lines if entry.startswith("$ ")]
            found.append(typed or lines)
            lines = []
    return found


def inline(text: str) -> list:
    """The commands in the text."""
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    return [c for c in dict.fromkeys(re.findall(r"`((?:unbroken|make)\b[^`]*)`", prose)) if c not in INCOMPLETE]


def left_out(command: str) -> str | None:
    """Why a command is not run."""
    return next((why for words, why in NOT_RUN.items() if words in command + " "), None)


class Reader:
    """Somebody who reads from top to bottom, and types."""

    def __init__(self, fabric: Fabric, folder: Path):
        self.fabric, self.folder, self.typed = fabric, folder, []
        self.env = {"PATH": f"{BUILD}:{os.environ['PATH']}"}
        if os.geteuid() == 0:
            # As the README says where it speaks of Open MPI.
            self.env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    def type(self, name: str, lines: list):
        """Runs lines in one shell."""
        self.typed += lines
        # `make` is for the folder of the project, what else there is makes files of its own.
        folder = ROOT if any(line.startswith("make ") for line in lines) else self.folder
        script = "\n".join(["set -e", f"cd '{folder}'", *lines, WAIT_FOR_ALL])
        self.fabric.start(name, ["bash", "-c", script], self.env).expect_success(BLOCK_SECONDS)

    def payload(self) -> int:
        """Payload that the NICs have carried."""
        return sum(nic["rx_payload_bytes"] for nic in self.fabric.nics().values())

    def block(self, name: str, lines: list):
        """A block without what is left out; programs on hosts must have sent something."""
        run = [line for line in lines if left_out(line) is None]
        sends = any("--host a" in line for line in run)
        if "fabric up" in "\n".join(run):
            # "end what runs, then `unbroken fabric down`, if there is one already"
            self.type(f"{name}-before", ["unbroken fabric down"])
        before = 0 if "fabric up" in "\n".join(run) else self.payload()
        self.type(name, run)
        if sends and self.payload() <= before:
            raise Failure("the NICs carried nothing")

    def interfaces(self, name: str, lines: list):
        """The block for two machines, each in a namespace with the addresses that it names; the listening one begins."""
        with Namespaces(octet=0) as net:
            ends = [(host, next(line for line in lines if mark in line)) for host, mark in (("a", ON_ONE), ("b", ON_OTHER))]
            if len(lines) != len(ends):
                raise Failure(f"a block with '{REAL_INTERFACES}' has a line for each of two machines, not {lines}")
            within = {host: " ".join(net.within(host)) for host, _ in ends}
            script = [f"{within[ends[0][0]]} {ends[0][1].split('#')[0].strip()} &", "sleep 1", f"{within[ends[1][0]]} {ends[1][1]}"]
            self.type(name, script)


def readme(suite: Suite):
    """All of it, in order."""
    text = README.read_text()
    logs = suite.logs / "all"
    logs.mkdir()
    with Fabric(logs) as fabric:
        reader = Reader(fabric, Path(tempfile.mkdtemp(prefix="unbroken-readme-")))
        try:
            everything = [*blocks(text)]
            for lines in everything:
                run = [line for line in lines if left_out(line) is None and not line.lstrip().startswith("export ")]
                if not run:
                    continue
                name = re.sub(r"\s+", " ", run[0].split("#")[0]).strip()[:60]
                what = reader.interfaces if REAL_INTERFACES in lines[0] else reader.block
                suite.case(name, lambda _, what=what, lines=lines, name=name: what(re.sub(r"\W+", "-", name), lines))
            for command in inline(text):
                if left_out(command) is None and not command.startswith("make demo"):
                    suite.case(f"in the text: {command}", lambda _, c=command: reader.type(re.sub(r"\W+", "-", c), [c]))
            suite.case("what is left out is there", stale, "\n".join("\n".join(b) for b in everything) + "\n".join(inline(text)))
        finally:
            shutil.rmtree(reader.folder, ignore_errors=True)
    for line in [line for lines in everything for line in lines] + inline(text):
        if left_out(line):
            print(f"not run: {line.strip()} ({left_out(line)})")


def stale(_logs, commands: str):
    """NOT_RUN names nothing that the README has not."""
    gone = [words for words in NOT_RUN if words.strip() not in commands]
    if gone:
        raise Failure(f"NOT_RUN names what the README does not have: {gone}")


def main() -> int:
    """Reads it."""
    if shutil.which("make") is None:
        raise Skip("make is missing")
    suite = Suite("readme")
    readme(suite)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
