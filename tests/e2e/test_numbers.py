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


# Colours and dashes of the theme: a legend of more entries has two that look alike.
MOST_KEYS = 8


def figures_within(found):
    """The figures that are kept in a JSON file, wherever they are in it."""
    if isinstance(found, dict):
        if "panels" in found:
            yield found
        found = list(found.values())
    for one in found if isinstance(found, list) else []:
        yield from figures_within(one)


def test_legends_are_short():
    """A figure names as many lines and bars as its readers can tell apart."""
    seen = 0
    for path in sorted((ROOT / "docs/figures").glob("*.json")):
        for figure in figures_within(json.loads(path.read_text())):
            parts = [part for p in figure["panels"] for part in p.get("lines", p.get("series", []))]
            names = {part["name"] for part in parts} - {""}
            assert len(names) <= MOST_KEYS, f"{path.name}: {sorted(names)}"
            seen += 1
    assert seen >= 20
