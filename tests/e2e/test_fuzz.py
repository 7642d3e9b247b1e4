"""Every fuzz target from its seed corpus (fuzz/run.sh): what is found fails."""

import subprocess

import pytest

from lib import options
from lib.paths import ROOT
from lib.process import Failure

FUZZ_SECONDS, LONG_SECONDS = 60, 600
# The targets are built with instrumentation first.
BUILD_SECONDS = 1200


@pytest.mark.slow
@pytest.mark.timeout(BUILD_SECONDS + LONG_SECONDS + 60)
def test_fuzz_targets(logs, note):
    seconds = LONG_SECONDS if options.LONG else FUZZ_SECONDS
    with open(logs / "fuzz.log", "w", encoding="utf-8") as log:
        line = [ROOT / "fuzz" / "run.sh", str(seconds)]
        done = subprocess.run(line, stdout=log, stderr=subprocess.STDOUT)
    results = [
        line
        for line in (logs / "fuzz.log").read_text(errors="replace").splitlines()
        if line.startswith("fuzz ")
    ]
    if done.returncode != 0:
        raise Failure(f"status {done.returncode}: {'; '.join(results) or 'see fuzz.log'}")
    if len(results) != len(list((ROOT / "fuzz" / "fuzz_targets").glob("*.rs"))):
        raise Failure(f"not every target was run: {results}")
    note("; ".join(results))
