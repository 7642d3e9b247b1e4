"""What `unbroken metrics` and `unbroken health` say, checked and read."""

import json
import re
import shutil
import subprocess

from lib.paths import ROOT
from lib.process import Failure, Skip

MONITORING = ROOT / "packaging" / "monitoring"
PROMTOOL = shutil.which("promtool")
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def promtool(*args, stdin=None):
    """Runs promtool, which must find nothing wrong."""
    if not PROMTOOL:
        raise Skip("promtool is missing (Debian: prometheus)")
    done = subprocess.run(
        [PROMTOOL, *map(str, args)], input=stdin, capture_output=True, text=True, timeout=60
    )
    if done.returncode != 0 or done.stderr.strip():
        raise Failure(f"promtool {args[0]} {args[1]}: {done.stdout}{done.stderr}")


def samples(page: str) -> dict:
    """Values by name and labels."""
    found = {}
    for line in page.splitlines():
        if line.startswith("#"):
            continue
        match = SAMPLE.match(line)
        if not match:
            raise Failure(f"no sample: {line!r}")
        name, labels, value = match.groups()
        found[name, tuple(sorted(LABEL.findall(labels or "")))] = float(value)
    return found


def value(found: dict, name: str, **labels) -> float:
    """The sum of the samples with these labels; 0 where there are none."""
    wanted = set(labels.items())
    return sum(v for (n, of), v in found.items() if n == name and wanted <= set(of))


def scrape(fabric) -> dict:
    """`unbroken metrics`, checked by promtool where that is."""
    page = fabric.command("metrics")
    if page.returncode != 0:
        raise Failure(page.stderr)
    if PROMTOOL:
        promtool("check", "metrics", stdin=page.stdout)
    return samples(page.stdout)


def verdict(fabric, *args) -> dict:
    """`unbroken health --json`, whose exit status must say the same."""
    done = fabric.command("health", "--json", *args)
    health = json.loads(done.stdout)
    names = ["healthy", "degraded, survived", "failed", "unknown"]
    if health["exit_status"] != done.returncode or health["verdict"] != names[done.returncode]:
        raise Failure(f"exit status {done.returncode}, and {health}")
    return health
