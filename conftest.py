"""Options of the end-to-end tests (tests/e2e), and how a result is shown.

They stand here since pytest reads options from the conftest.py of its root folder alone, and the
process that collects results from workers knows no other."""

import re
import signal
import sys
import zlib
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent / "tests")]

from lib import options  # noqa: E402


def pytest_addoption(parser):
    group = parser.getgroup("unbroken")
    group.addoption("--slice", metavar="I/N", help="only the I-th of N equal parts of the tests")
    group.addoption("--long", action="store_true", help="full matrices and long runs")
    group.addoption("--vm", action="store_true", help="this is a VM of the tests' own (edge)")
    group.addoption("--seed", type=int, default=1, metavar="N", help="first seed of random tests")


def pytest_configure(config):
    options.LONG, options.SEED = config.getoption("long"), config.getoption("seed")
    options.VM = config.getoption("vm")
    # A shell has what it starts in the background ignore Ctrl-C, and so would all programs of the
    # tests, also those that a test interrupts.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("slice")
    if not chosen:
        return
    parts = re.fullmatch(r"(\d+)/(\d+)", chosen)
    if not parts or not 1 <= int(parts[1]) <= int(parts[2]):
        raise pytest.UsageError(f"--slice={chosen}: I/N is right, with 1 <= I <= N, as in 2/4")
    index, count = int(parts[1]) - 1, int(parts[2])
    # By name, so that a case stays in its slice whatever is added beside it.
    kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == index]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def pytest_report_teststatus(report, config):
    notes = [text for name, text in getattr(report, "user_properties", ()) if name == "note"]
    if report.when == "call" and report.passed and notes:
        return "passed", ".", f"PASSED ({'; '.join(notes)})"
    return None
