"""The pytest plugin, which pytest finds when the wheel is installed.

The fixture `fabric` is an emulated network of the test's own: hosts a and b with four NICs each.
A mark changes it, with the arguments of `unbroken.lab.Fabric`:

    @pytest.mark.fabric(hosts=["left", "right"], nics=2, device="plain")
    def test_it(fabric): ...

Beside a failed test pytest shows what its programs wrote and what happened in the network.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .fabric import Fabric

_KEY = pytest.StashKey[Fabric]()
_SHOWN_LINES = 40


def pytest_configure(config: pytest.Config) -> None:
    """Makes the mark known."""
    what = "fabric(hosts=2, nics=4, device='full', options=()): what the fixture `fabric` has"
    config.addinivalue_line("markers", what)


@pytest.fixture
def fabric(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fabric]:
    """An RDMA network for this test: hosts with NICs, faults by call, and what each NIC carried."""
    mark = request.node.get_closest_marker("fabric")
    given = {"logs": tmp_path / "unbroken", **(mark.kwargs if mark else {})}
    with Fabric(*(mark.args if mark else ()), **given) as made:
        request.node.stash[_KEY] = made
        yield made


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """Shows beside a failure what the programs and the network did."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    made = item.stash.get(_KEY, None)
    if made is None or call.when != "call" or not report.failed:
        return
    for program in made.programs:
        end = "\n".join(program.log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
        report.sections.append((f"unbroken: {program!r}", end))
    for what in ("events", "status"):
        try:
            report.sections.append((f"unbroken {what}", made.command(what)))
        except Exception as error:  # The test's own failure counts.
            report.sections.append((f"unbroken {what}", str(error)))
