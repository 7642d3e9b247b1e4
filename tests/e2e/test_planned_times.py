"""What `unbroken plan` says a collective takes, beside collectives that run on softnic with NICs so
slow that they are the limit (benches/coll/softnic.py).

Other work on the machine delays packets now and then. So the shortest operation counts, in the
clock of a plain transfer over the same NICs right before and after: where that takes 1.2 times as
long as planned, the collective may, too."""

import json
import subprocess
import sys

import pytest

from lib.paths import ROOT

SECONDS = 900
LEAST, MOST = 0.8, 1.25


@pytest.mark.timing
@pytest.mark.serial
@pytest.mark.parametrize("hosts", [2, 3])
def test_measured_beside_planned(hosts, note):
    """Healthy, one NIC at half of its rate, and two hosts that have lost different rails."""
    words = ["--hosts", hosts, "--op", "all-reduce", "--state", "healthy,half,apart", "--json"]
    command = [sys.executable, ROOT / "benches/coll/softnic.py", *map(str, words), "--rounds", "1"]
    command.append("--busy")
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["state"] for row in rows] == ["healthy", "half", "apart"]
    for row in rows:
        ratio = row["ran_us"] / row["simulated_us"] / row["machine"]
        what = f"{hosts} hosts, {row['state']}: {row['shape']}"
        note(f"{what}, measured / planned {ratio:.2f}, a plain transfer {row['machine']:.2f}")
        assert LEAST <= ratio <= MOST, row
