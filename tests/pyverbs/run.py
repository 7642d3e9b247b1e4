#!/usr/bin/env python3
"""rdma-core's own test suite (pyverbs, as Debian ships it), unmodified, on the software NIC.

Each test runs with failover off and with failover on, and on plain devices. The suite runs in one process per module; a test that hangs or crashes ends
its process, counts as one failure, and the rest of its module goes on in a fresh process.

Every test is either in must_pass.txt, and passes, or in the table of docs/reference/conformance.md with the reason why it skips (pyverbs skips what
a device does not have), and skips. Anything else is a failure: also one that passes and is not in must_pass.txt, or is listed as
a skip. Only a skip that depends on the machine, as its reason then says, may be a pass as well.
"""

import argparse
import collections
import fnmatch
import gzip
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib.fabric import UNBROKEN, Fabric  # noqa: E402
from lib.process import Failure, Skip, describe_exit  # noqa: E402
from lib.suite import ROOT, Suite  # noqa: E402

HERE = Path(__file__).resolve().parent
SHIPPED = Path("/usr/share/doc/rdma-core/tests")
PYTHON = "/usr/bin/python3"
MUST_PASS = HERE / "must_pass.txt"
CONFORMANCE = ROOT / "docs" / "reference" / "conformance.md"
# How the reason of a skip begins that another machine need not have.
MACHINE = "depends on the machine"
TEST_SECONDS = 40
END_SECONDS = 20
DEVICE = "unb0"

Result = collections.namedtuple("Result", "how why")
# Whether failover is on, how the fabric is made, and the GID that leads to peers.
Mode = collections.namedtuple("Mode", "failover settings gid_index")
MODES = {
    "no-failover": Mode(False, [], "0"),
    "failover": Mode(True, [], "0"),
    "plain": Mode(False, ["--device", "plain"], "3"),
}


def unpack(to: Path) -> Path:
    """The suite as plain files."""
    if not SHIPPED.is_dir():
        raise Skip(f"{SHIPPED} is missing: install Debian's python3-pyverbs")
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    for path in SHIPPED.iterdir():
        if path.suffix == ".gz":
            (to / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        else:
            shutil.copy(path, to / path.name)
    return to


def excuses() -> dict:
    """The skips that docs/reference/conformance.md lists: rows `| `id` | reason |` below the heading "Skipped tests of pyverbs"."""
    rows, inside = {}, False
    for line in CONFORMANCE.read_text().splitlines():
        if line.startswith("#"):
            inside = line.endswith("Skipped tests of pyverbs")
        row = re.fullmatch(r"\| `([^`]+)` \| (.+) \|", line)
        if inside and row:
            rows[row[1]] = row[2]
    if not rows:
        raise Failure(f"{CONFORMANCE} has no table of skipped tests of pyverbs")
    return rows


class Steps:
    """A process of the suite and what it tells."""

    def __init__(self, fabric: Fabric, folder: Path, mode: Mode, log: Path, *args: str):
        ours, theirs = os.pipe()
        options = [] if mode.failover else ["--no-failover"]
        command = [str(UNBROKEN), "run", *options, "--host", "a", "--", PYTHON, str(HERE / "one_process.py")]
        with open(log, "ab") as out:
            self.popen = subprocess.Popen(
                ["/bin/sh", "-c", f'fd=$1; shift; exec "$@" 3>&"$fd"', "sh", str(theirs), *command, str(folder), DEVICE, mode.gid_index, *args],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=fabric.env, pass_fds=[theirs], start_new_session=True,
            )
        os.close(theirs)
        self.pipe, self.rest = ours, b""

    def next(self, seconds: float):
        """The next step; None where the process has ended, TimeoutError where it tells nothing in time."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.rest:
            if not select.select([self.pipe], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            more = os.read(self.pipe, 65536)
            if not more:
                return None
            self.rest += more
        line, self.rest = self.rest.split(b"\n", 1)
        return json.loads(line)

    def end(self, seconds: float) -> int:
        """Waits for the end, or brings it about."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.popen.pid, 9)
            return self.popen.wait()
        finally:
            os.close(self.pipe)


def all_ids(fabric: Fabric, folder: Path, log: Path) -> list:
    """The ids of all tests of the suite."""
    steps, ids = Steps(fabric, folder, MODES["no-failover"], log, "list"), []
    while step := steps.next(TEST_SECONDS):
        ids.append(step["id"])
    if steps.end(END_SECONDS) != 0 or not ids:
        raise Failure("the suite's tests cannot be listed; is Debian's python3-pyverbs installed and whole?")
    return ids


def run_ids(fabric: Fabric, folder: Path, mode: Mode, log: Path, ids: list) -> dict:
    """Runs tests, in as few processes as their hangs and crashes allow."""
    results, left = {}, list(ids)
    while left:
        steps, at, hung = Steps(fabric, folder, mode, log, "run", *left), None, False
        try:
            while step := steps.next(TEST_SECONDS):
                if "start" in step:
                    at = step["start"]
                else:
                    results[step["end"]], at = Result(step["how"], step["why"]), None
        except TimeoutError:
            hung = True
        # Where all were told, the end of the process itself (threads, destructors) is a part of the last.
        code = steps.end(0 if hung else END_SECONDS)
        missing = [i for i in left if i not in results]
        at = at or (missing or left[-1:])[0]
        if hung:
            results[at] = Result("fail", f"hangs: nothing within {TEST_SECONDS} s")
        elif missing or code != 0:
            results[at] = Result("fail", f"the process {describe_exit(code)}")
        left = [i for i in left if i not in results]
    return results


def last_line(why: str) -> str:
    lines = [line for line in why.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else ""


def verdict(how: str, must_pass: bool, reason: str | None) -> str:
    """What to say of a test that ended so: in capitals where it is wrong. `reason`: why it is listed as a skip, if it is."""
    if how == "fail" or must_pass and how != "pass":
        return "FAIL"
    if how == "skip" and reason is None:
        return "SKIP-UNLISTED"
    if how == "pass" and not must_pass and not (reason or "").startswith(MACHINE):
        return "PASS-LISTED-AS-SKIP" if reason else "PASS-UNLISTED"
    return how


def judge(mode: str, results: dict, must_pass: set, table: dict) -> list:
    """Prints a line for each test; gives what is wrong."""
    wrong = []
    for name, result in sorted(results.items()):
        said = verdict(result.how, name in must_pass, table.get(name))
        if said.isupper():
            wrong.append(f"{name} ({said}, {mode})")
        print(f"{said:5} {mode:11} {name}  {last_line(result.why)}", flush=True)
    return wrong


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--mode", choices=list(MODES), help="only this one")
    options.add_argument("--only", default="*", metavar="PATTERN", help="tests whose id matches, as with a shell's *")
    options.add_argument("--write-must-pass", action="store_true", help="add what passes in all modes to must_pass.txt")
    args = options.parse_args()
    suite = Suite("pyverbs")
    must_pass = set(MUST_PASS.read_text().split())
    passed = collections.Counter()
    modes = [args.mode] if args.mode else list(MODES)

    def one_mode(logs: Path, mode: str):
        table = excuses()
        folder = unpack(logs / "suite")
        with Fabric(logs, *MODES[mode].settings) as fabric:
            ids = all_ids(fabric, folder, logs / "list.log")
            gone = (must_pass | set(table)) - set(ids)
            if gone:
                raise Failure(f"{MUST_PASS.name} or {CONFORMANCE.name} names tests that the installed suite does not have: {sorted(gone)}")
            both = must_pass & set(table)
            if both:
                raise Failure(f"tests that must pass are listed as skips: {sorted(both)}")
            results = {}
            by_module = collections.defaultdict(list)
            for name in fnmatch.filter(ids, args.only):
                by_module[name.split(".")[1]].append(name)
            for module, names in by_module.items():
                results |= run_ids(fabric, folder, MODES[mode], logs / f"{module}.log", names)
        (logs / "results.json").write_text(json.dumps({k: v._asdict() for k, v in results.items()}, indent=1))
        wrong = judge(mode, results, must_pass, table)
        counts = collections.Counter(r.how for r in results.values())
        passed.update(n for n, r in results.items() if r.how == "pass")
        told = ", ".join(f"{n} {how}" for how, n in sorted(counts.items()))
        if wrong:
            raise Failure(f"{told}; not as they must be: " + ", ".join(wrong))
        return told

    for mode in modes:
        suite.case(mode, one_mode, mode)
    if args.write_must_pass:
        both = {n for n, count in passed.items() if count == len(modes)}
        MUST_PASS.write_text("".join(f"{n}\n" for n in sorted(both | must_pass)))
    sys.exit(suite.finish())


if __name__ == "__main__":
    main()
