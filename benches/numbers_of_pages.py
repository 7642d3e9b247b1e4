#!/usr/bin/env python3
"""Fills the numbers of documents from the JSON files of docs/figures, so that a page says what its
pictures show. `make figures` calls it after it has measured; `--check` changes nothing and fails
where a page says something else (tests/e2e/test_numbers.py).

In a page a part between `<!-- numbers: NAME -->` and `<!-- /numbers -->` is what the function NAME
here returns: one line within a sentence, several lines between two blank lines of a table.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
PART = re.compile(r"(<!-- numbers: ([\w-]+) -->)(.*?)(<!-- /numbers -->)", re.S)
MADE = {}


def part(function):
    """Registers what a part of a page is made by; its name has hyphens there."""
    MADE[function.__name__.replace("_", "-")] = function
    return function


def rows(name: str) -> list:
    """The rows of a file."""
    found = json.loads((FIGURES / f"{name}.json").read_text())
    return found["rows"] if isinstance(found, dict) else found


def here(name: str, what: str, key: str = "here") -> str:
    """What the one row says whose text begins so."""
    (found,) = (row for row in rows(name) if row["what"].startswith(what))
    return found[key]


def table(heading: list, lines: list) -> str:
    """A table of Markdown."""
    all_lines = [heading, ["---"] * len(heading), *lines]
    return "\n".join("| " + " | ".join(line).replace("|  |", "| |") + " |" for line in all_lines)


def cells_of(row: dict) -> list:
    """Figure, what, published, here."""
    return [row["of"].removeprefix("Figure "), row["what"], row["published"], row["here"]]


def figures_of(text: str) -> list:
    """The numbers of a text."""
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text)]


def span(values: list, unit: str) -> str:
    """From the least to the most."""
    low, high = min(values), max(values)
    return f"{low:g} {unit}" if low == high else f"{low:g} to {high:g} {unit}"


# --- the host edge


def edge_outage_row(fault: str, way: str) -> dict:
    word, routes, probe, bandwidth = here("edge-outage", f"{fault}, {way}:").split("; ")
    return {"word": word, "routes": routes, "probe": probe, "bandwidth": bandwidth}


EDGE_FAULTS = ["carrier loss", "silent loss", "ToR death", "ToR BGP daemon killed"]
EDGE_WAYS = ["FRR alone", "fast_failover"]


@part
def edge_outages() -> str:
    heading = ["fault"]
    heading += [f"probe, {way}" for way in ("FRR alone", "`fast_failover`")]
    heading += [f"`ib_write_bw` gap, {way}" for way in ("FRR alone", "`fast_failover`")]
    lines = []
    for fault in EDGE_FAULTS:
        found = [edge_outage_row(fault, way) for way in EDGE_WAYS]
        cells = [one["probe"] for one in found] + [one["bandwidth"] for one in found]
        lines.append([fault, *cells])
    return table(heading, lines)


@part
def edge_routes() -> str:
    """How long after BFD routes change."""
    later = {}
    for way in EDGE_WAYS:
        found = [edge_outage_row(fault, way) for fault in EDGE_FAULTS]
        later[way] = [float(one["routes"]) - float(one["word"]) for one in found]
    fast, alone = later["fast_failover"], later["FRR alone"]
    return (
        f"With `fast_failover` routes change {min(fast):.1f} to {max(fast):.1f} ms after BFD "
        f"reports, by netlink;\nwith FRR alone {min(alone):.0f} to {max(alone):.0f} ms after it, "
        "which is BGP."
    )


@part
def edge_date() -> str:
    setting = json.loads((FIGURES / "edge-outage.json").read_text())["setting"]
    return re.search(r"\d{4}-\d\d-\d\d", setting).group()


@part
def edge_latency() -> str:
    split = [re.split(r"[,;] ", here("edge-latency", what)) for what in ("8 MiB", "the same")]
    published = ["no difference"] * 3 + ["differs only beyond it", ""]
    names = ["50", "90", "99", "99.9", "longest"]
    lines = [
        [name, f"{without} ms", f"{with_} ms", told]
        for name, without, with_, told in zip(names, *split, published)
    ]
    return table(["percentile", "without faults", "with faults", "published"], lines)


# --- SHIFT


def shift_gaps(fault: str) -> str:
    found = [row["here"] for row in rows("shift-07") if f"{fault}: first error" in row["what"]]
    return span([figures_of(text)[1] for text in found], "ms")


@part
def shift_figure_7() -> str:
    lines = [
        ["a NIC of the active end dies: write, send, read", "nic a/0 dead"],
        ["a NIC of the passive end dies", "nic b/0 dead"],
        ["a cable is cut", "cable a/0 cut"],
        ["sends fail again and again (a third injection of the paper's)", "wqe-error a/0"],
    ]
    published = "continues, and returns"
    cells = [
        ["7", what, published, f"continues, {shift_gaps(fault)} without data; returns"]
        for what, fault in lines
    ]
    without = here("shift-07", "ib_write_bw, nic a/0 dead, without")
    cells.append(["7", "without failover", "terminates", without])
    return table(["figure", "what", "published", "here"], cells)


def shift_8b(fault: str) -> list:
    return figures_of(here("shift-08", f"{fault}: from the fault"))


@part
def gap_nic_dead() -> str:
    return f"{shift_8b('nic a/0 dead')[2]:.1f} ms"


@part
def gap_cable_cut() -> str:
    return f"{shift_8b('cable a/0 cut')[2]:.0f} ms"


@part
def failover_gaps() -> str:
    lines = []
    for fault, shown in [
        ("nic a/0 dead", "NIC dead"),
        ("nic a/0 down", "port down"),
        ("nic b/0 dead", "the peer's NIC dead"),
        ("cable a/0 cut", "cable cut"),
        ("switch rail0 down", "switch down"),
    ]:
        detect, switch, gap = shift_8b(fault)
        lines.append([shown, f"{detect:g} ms", f"{switch:g} ms", f"{gap:g} ms"])
    heading = ["fault", "time to detect", "first error to first good completion"]
    return table([*heading, "longest interval without data"], lines)


@part
def shift_figure_8() -> str:
    soon = [shift_8b(fault)[1] for fault in ("nic a/0 dead", "nic a/0 down", "nic b/0 dead")]
    late = [shift_8b(fault) for fault in ("cable a/0 cut", "switch rail0 down")]
    none = "no figure in the text"
    ms = lambda values: ", ".join(f"{value:g}" for value in values) + " ms"
    lines = [
        ["8b", "NIC dead, port down, peer's NIC dead: first error to first good completion", none],
        ["8b", "cable cut, switch down: time to detect", none],
        ["8b", "the same: first error to first good completion", none],
    ]
    values = [ms(soon), ms([one[0] for one in late]), ms([one[1] for one in late])]
    cells = [[*line, value] for line, value in zip(lines, values)]
    return table(["figure", "what", "published", "here"], cells)


@part
def shift_figure_9() -> str:
    lines = []
    for row in rows("shift-09"):
        what = row["what"].split(", added")[0]
        name = what if what.startswith("ibv_") else f"ibv_{what}"
        words = name.split(" ")
        shown = " ".join([f"`{words[0]}`", *words[1:]])
        lines.append(["9", shown, row["published"], row["here"].replace("-", "−")])
    return table(["figure", "what", "published", "here"], lines)


@part
def shift_figure_10() -> str:
    lines = [["10", row["what"], row["published"], row["here"]] for row in rows("shift-10")]
    return table(["figure", "what", "published", "here"], lines)


@part
def shift_table_2() -> str:
    lines = [cells_of(row) for row in rows("shift-table2")]
    return table(["figure", "what", "published", "here"], lines)


# --- R²CCL


@part
def r2ccl_training() -> str:
    lines = []
    for number in ("08", "10", "07", "09"):
        for row in rows(f"coll-{number}"):
            lines.append(cells_of(row))
    return table(["figure", "what", "published", "here"], lines)


@part
def r2ccl_serving() -> str:
    lines = []
    for number in ("11", "12", "13", "14"):
        for row in rows(f"coll-{number}"):
            lines.append(cells_of(row))
    return table(["figure", "what", "published", "here"], lines)


@part
def r2ccl_kept() -> str:
    lines = []
    found = [row for number in ("15", "16") for row in rows(f"coll-{number}")]
    for row in found:
        if "kept by" in row["what"]:
            lines.append(cells_of(row))
    return table(["figure", "what", "published", "here"], lines)


# --- SDR


@part
def sdr_model() -> str:
    lines = [
        [str(row["figure"]), row["what"], row["published"], row["per_packet"], row["per_chunk"]]
        for row in rows("sdr")
        if row["figure"] <= 13
    ]
    return table(["figure", "what", "published", "loss of packets", "loss of chunks"], lines)


@part
def sdr_measured() -> str:
    lines = [
        [str(row["figure"]), row["what"], row["published"], row["per_packet"]]
        for row in rows("sdr")
        if row["figure"] > 13
    ]
    return table(["figure", "what", "published", "here"], lines)


def filled(text: str) -> str:
    """A page with what its parts are to be."""

    def one(match) -> str:
        begin, name, old, end = match.groups()
        new = MADE[name]()
        alone = old.startswith("\n") or new.startswith("|")
        return begin + (f"\n\n{new}\n\n" if alone else new) + end

    return PART.sub(one, text)


def pages() -> list:
    """Pages with such parts."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    return [page for page in found if PART.search(page.read_text())]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; fail if one differs")
    args = parser.parse_args()
    wrong = 0
    for page in pages():
        text = page.read_text()
        right = filled(text)
        if text == right:
            continue
        name = page.relative_to(ROOT)
        if args.check:
            wrong += 1
            now, then = text.splitlines(), right.splitlines()
            pairs = enumerate(zip(now, then), 1)
            lines = [f"  {n}: {a}\n  is: {b}" for n, (a, b) in pairs if a != b]
            what = f"{name} is not what docs/figures says:\n"
            print(what + "\n".join(lines[:4]), file=sys.stderr)
        else:
            page.write_text(right)
            print(name)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
