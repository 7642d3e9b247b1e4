"""What all end-to-end tests share: logs of a test, kinds of devices, what is shown of a failure.

tests/README.md says how to run one test, and what the marks mean.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

from lib.device import PLAIN_GID_INDEX
from lib.fabric import Fabric
from lib.machine import MachineFabric
from lib.paths import BUILD, LOGS
from lib.podman import Podman
from lib.process import Skip
from lib.pytorch import interpreter

TAIL_LINES = 12
# Lines that say what a program died of.
CAUSE = re.compile(r"^terminate called|what\(\):|panicked at|^\w*(?:Error|Exception|Failure)\b")


@pytest.fixture(scope="session", autouse=True)
def built():
    """Ends the run where nothing was built."""
    if not (BUILD / "unbroken").exists():
        pytest.exit(f"{BUILD / 'unbroken'} is missing; 'make all' builds it", returncode=2)


@pytest.fixture
def logs(request) -> Path:
    """A folder of its own for the logs of a test: target/test-logs/<file>/<test>."""
    name = re.sub(r"[^A-Za-z0-9_.+-]+", "_", request.node.name).strip("_")[:150]
    folder = LOGS / request.node.path.stem.removeprefix("test_") / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def note(request):
    """A function that keeps what was measured: it is shown beside the result of the test."""
    return lambda text: request.node.user_properties.append(("note", str(text)))


@pytest.fixture(scope="session")
def podman(tmp_path_factory):
    """podman, whose storage goes with it."""
    if os.geteuid() != 0:
        raise Skip("mount namespaces for podman need root")
    folder = tmp_path_factory.mktemp("podman")
    yield Podman(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["full", "plain"])
def device(request, monkeypatch) -> str:
    """The kind of all NICs, each test with both: `full`, or `plain`, with plain verbs only. Tests
    that ask for it also get `machine`: plain ones as devices of the machine."""
    if request.param == "machine":
        monkeypatch.setattr(Fabric, "stand_in", MachineFabric)
    if request.param == "plain":
        monkeypatch.setattr(Fabric, "device", ("--device", "plain"))
        monkeypatch.setattr(Fabric, "gid_index", PLAIN_GID_INDEX)
    return request.param


@pytest.fixture
def flush(request, monkeypatch) -> str:
    """Plain NICs that flush so (one of `FLUSHES`)."""
    monkeypatch.setattr(Fabric, "device", ("--device", "plain"))
    monkeypatch.setattr(Fabric, "gid_index", PLAIN_GID_INDEX)
    return request.param


@pytest.fixture(scope="session")
def torch_python() -> Path:
    """An interpreter that has PyTorch."""
    return interpreter()


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    outcome = yield
    skip_instead(outcome)


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef, request):
    outcome = yield
    skip_instead(outcome)


def skip_instead(outcome):
    """The helpers in lib know nothing of pytest: their Skip becomes pytest's."""
    if outcome.excinfo and issubclass(outcome.excinfo[0], Skip):
        try:
            pytest.skip(str(outcome.excinfo[1]))
        except pytest.skip.Exception as skipped:
            # pluggy before 1.1 has no `force_exception`.
            outcome._excinfo = (type(skipped), skipped, skipped.__traceback__)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Beside a failure: the end of each log of the test."""
    outcome = yield
    report = outcome.get_result()
    folder = getattr(item, "funcargs", {}).get("logs")
    if report.failed and isinstance(folder, Path):
        for log in sorted(folder.rglob("*.log")):
            report.sections.append((str(log), end_of(log)))


def end_of(log: Path) -> str:
    """The first and the last lines of a log, and those between that say what a program died of."""
    lines = log.read_text(errors="replace").splitlines()
    # What a process died of may stand far above what those who started it say of its end.
    causes = [line for line in lines[1:-TAIL_LINES] if CAUSE.search(line)][:TAIL_LINES]
    shown = lines[:1] * (len(lines) > TAIL_LINES) + causes + lines[-TAIL_LINES:]
    return "\n".join(line[:200] for line in shown)
