"""What a figure is to show, as `unbroken-bench figures` draws it (crates/base/chart)."""

import os
import platform
import statistics
import time

# Points of a line; a picture shows no more.
MOST_POINTS = 300


def axis(label: str, low: float, high: float, unit: str = "plain", log=False) -> dict:
    """`unit` is what the figures are in: bytes, ns, us, ms, s, gbps, percent, probability.
    The picture writes them in units that suit their size."""
    return {"label": label, "low": low, "high": high, "log": log, "unit": unit}


def line(name: str, colour: int, points: list, look="solid") -> dict:
    every = max(1, len(points) // MOST_POINTS)
    # The end is what percentiles are about: it is kept whole.
    kept = [point for n, point in enumerate(points) if n % every == 0 or n >= len(points) - 20]
    return {
        "name": name,
        "colour": colour,
        "look": look,
        "points": [[round(x, 6), round(y, 6)] for x, y in kept],
    }


def lines(title: str, x: dict, y: dict, drawn: list, markers=()) -> dict:
    return {
        "kind": "lines",
        "title": title,
        "x": x,
        "y": y,
        "lines": drawn,
        "markers": [{"x": x, "words": words} for x, words in markers],
    }


def bars(title: str, x: dict, rows: list, series: list) -> dict:
    """A series is its name, its colour, and a figure for each row, in the unit of `x`."""
    named = [{"name": name, "colour": colour, "values": values} for name, colour, values in series]
    return {"kind": "bars", "title": title, "x": x, "rows": rows, "series": named}


def figure(title: str, panels: list, columns: int, notes: list) -> dict:
    return {"title": title, "panels": panels, "columns": columns, "notes": notes}


def row(of: str, what: str, published: str, here: str) -> dict:
    return {"of": of, "what": what, "published": published, "here": here}


def cdf(values: list) -> list:
    """The share of values that are no larger, at each."""
    ordered = sorted(values)
    return [(value, (n + 1) / len(ordered)) for n, value in enumerate(ordered)]


def percentile(values: list, share: float) -> float:
    """The smallest value that this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def median(values: list):
    """The middle, or none of none."""
    return statistics.median(values) if values else None


def setting() -> str:
    """What machine this is, and how busy it is."""
    load = os.getloadavg()[0]
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"{os.cpu_count()} cores, load {load:.1f}, Linux {platform.release()}, {when}"
