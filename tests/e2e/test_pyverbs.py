"""rdma-core's own test suite (pyverbs, as Debian ships it), unmodified, on the software NIC.

Each module of it runs with failover off and with failover on, and on plain devices, in one process.
A test that hangs or crashes ends its process, counts as one failure, and the rest of its module
goes on in a fresh process.

Every test is either in tests/pyverbs/must_pass.txt, and passes, or in the table of
docs/reference/conformance.md with the reason why it skips (pyverbs skips what a device does not
have), and
skips. Anything else is a failure: also one that passes and is not in must_pass.txt, or is listed
as a skip. Only a skip that depends on the machine, as its reason then says, may be a pass as
well.
"""

import collections
import gzip
import json
import os
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from lib.fabric import UNBROKEN, Fabric
from lib.paths import ROOT
from lib.process import Failure, Skip, describe_exit

SHIPPED = Path("/usr/share/doc/rdma-core/tests")
PYTHON = "/usr/bin/python3"
PROCESS = ROOT / "tests" / "e2e" / "helpers" / "pyverbs_process.py"
MUST_PASS = ROOT / "tests" / "pyverbs" / "must_pass.txt"
CONFORMANCE = ROOT / "docs" / "reference" / "conformance.md"
# How the reason of a skip begins that another machine need not have.
MACHINE = "depends on the machine"
SMOKE = ["test_atomic", "test_qp"]
TEST_SECONDS = 40
END_SECONDS = 20
DEVICE = "unb0"

Result = collections.namedtuple("Result", "how why")
# Whether failover is on, how the fabric is made, and the GID that leads to peers.
Mode = collections.namedtuple("Mode", "failover settings gid_index")
HOSTS = ["--hosts", "a,b"]
MODES = {
    "no-failover": Mode(False, HOSTS, "0"),
    "failover": Mode(True, HOSTS, "0"),
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


def must_pass() -> set:
    """The tests that must pass."""
    return set(MUST_PASS.read_text().split())


def listed_skips() -> dict:
    """The skips that docs/reference/conformance.md lists, with their reasons: rows
    `| `id` | reason |`
    below the heading "Skipped tests of pyverbs"."""
    rows, inside = {}, False
    for line in CONFORMANCE.read_text().splitlines():
        if line.startswith("#"):
            inside = line.endswith("Skipped tests of pyverbs")
        row = re.fullmatch(r"\| `([^`]+)` \| (.+) \|", line)
        if inside and row:
            rows[row[1]] = row[2]
    return rows


def module_of(name: str) -> str:
    """The module of a test: tests.MODULE.CLASS.TEST."""
    return name.split(".")[1]


class Steps:
    """A process that runs tests of the suite, and the steps that it reports."""

    def __init__(self, fabric: Fabric, folder: Path, mode: Mode, log: Path, *args: str):
        ours, theirs = os.pipe()
        options = [] if mode.failover else ["--no-failover"]
        command = [str(UNBROKEN), "run", *options, "--host", "a", "--", PYTHON, str(PROCESS)]
        address = fabric.nics()[f"a/{DEVICE[-1]}"]["addr"]
        command += [str(theirs), str(folder), DEVICE, mode.gid_index, address, *args]
        with open(log, "ab") as out:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=fabric.env,
                pass_fds=[theirs],
                start_new_session=True,
            )
        os.close(theirs)
        self.pipe, self.rest = ours, b""

    def next(self, seconds: float):
        """The next step; None where the process has ended, TimeoutError where none comes in
        time."""
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
        text = "is Debian's python3-pyverbs installed and whole?"
        raise Failure(f"the suite's tests cannot be listed; {text}")
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
        # Where all were reported, the end of the process itself (threads, destructors) is a part of
        # the last.
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
    """What to say of a test that ended so: in capitals where it is wrong.

    `reason`: why it is listed as a skip, if it is."""
    if how == "fail" or must_pass and how != "pass":
        return "FAIL"
    if how == "skip" and reason is None:
        return "SKIP-UNLISTED"
    if how == "pass" and not must_pass and not (reason or "").startswith(MACHINE):
        return "PASS-LISTED-AS-SKIP" if reason else "PASS-UNLISTED"
    return how


def judge(results: dict) -> str:
    """Prints a line for each test; fails where one is not as it must be. Gives the counts."""
    passing, skips, wrong = must_pass(), listed_skips(), []
    for name, result in sorted(results.items()):
        judged = verdict(result.how, name in passing, skips.get(name))
        if judged.isupper():
            wrong.append(f"{name} ({judged})")
        print(f"{judged:5} {name}  {last_line(result.why)}")
    counts = collections.Counter(result.how for result in results.values())
    figures = ", ".join(f"{number} {how}" for how, number in sorted(counts.items()))
    if wrong:
        raise Failure(f"{figures}; not as they must be: " + ", ".join(wrong))
    return figures


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> tuple:
    """The folder of the suite, and the ids of its tests."""
    folder, logs = unpack(tmp_path_factory.mktemp("pyverbs") / "suite"), tmp_path_factory.mktemp(
        "list"
    )
    with Fabric(logs, *HOSTS) as fabric:
        return folder, all_ids(fabric, folder, logs / "list.log")


@pytest.mark.smoke
def test_lists_are_complete(suite):
    """Each test of the installed suite is in one of the two lists, and these name no others."""
    ids, passing, skips = set(suite[1]), must_pass(), set(listed_skips())
    if not skips:
        raise Failure(f"{CONFORMANCE} has no table of skipped tests of pyverbs")
    gone, both, unlisted = (passing | skips) - ids, passing & skips, ids - passing - skips
    lists = f"{MUST_PASS.name} or {CONFORMANCE.name}"
    if gone:
        raise Failure(f"{lists} names tests that the installed suite does not have: {sorted(gone)}")
    if both:
        raise Failure(f"tests that must pass are listed as skips: {sorted(both)}")
    if unlisted:
        raise Failure(f"tests that are not in {lists}: {sorted(unlisted)}")


def modules():
    """The modules of the suite as parameters."""
    for module in sorted({module_of(name) for name in must_pass() | set(listed_skips())}):
        yield pytest.param(module, marks=pytest.mark.smoke if module in SMOKE else ())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("module", modules())
def test_module(logs, note, suite, module, mode):
    folder, ids = suite
    with Fabric(logs, *MODES[mode].settings) as fabric:
        names = [name for name in ids if module_of(name) == module]
        results = run_ids(fabric, folder, MODES[mode], logs / f"{module}.log", names)
    text = json.dumps({name: result._asdict() for name, result in results.items()}, indent=1)
    (logs / "results.json").write_text(text)
    note(judge(results))
