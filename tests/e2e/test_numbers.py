"""Numbers in documents are those of the JSON files beside the pictures (benches/numbers.py)."""

import json
import subprocess
import sys

import pytest

from lib.paths import ROOT

sys.path.insert(0, str(ROOT / "benches"))
import numbers_of_pages as numbers  # noqa: E402


@pytest.mark.smoke
def test_pages_say_what_the_files_of_figures_say():
    """None differs, and the papers' pages are among them."""
    done = subprocess.run(
        [sys.executable, ROOT / "benches/numbers_of_pages.py", "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    names = {page.name for page in numbers.pages()}
    assert {"r2ccl.md", "sdr-rdma.md", "shift.md", "thorn-ml.md", "failover.md"} <= names


def test_a_page_that_says_something_else_is_found():
    """A number that was changed by hand, and a part that nothing fills."""
    page = ROOT / "docs/papers/thorn-ml.md"
    text = page.read_text()
    assert numbers.filled(text) == text
    cell = numbers.edge_outage_row("silent loss", "FRR alone")["probe"]
    assert numbers.filled(text.replace(cell, "1 to 2")) == text
    with pytest.raises(KeyError):
        numbers.filled("<!-- numbers: nothing -->1<!-- /numbers -->")


def test_rows_of_all_figures_are_those_of_each():
    """`shift.json` has the rows of all runs, each figure's file its own."""
    figures = ROOT / "docs/figures"
    read = lambda name: json.loads((figures / f"{name}.json").read_text())
    names = ("07", "08", "09", "10", "table2")
    each = [row for name in names for row in read(f"shift-{name}")["rows"]]
    assert read("shift") == each
