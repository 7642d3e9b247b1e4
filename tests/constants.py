#!/usr/bin/env python3
"""Changes the numbers of pure crates, one at a time, to 0 and to four times as much, and runs the
crate's tests each time: a rule whose number can be any other is tested by nothing. Part of `make
mutants`, since cargo-mutants changes no constants. Works on a copy in target/constants.

tests/constants.py [CRATE[:FILE]…]     e.g. failover/protocol:health.rs; all of CRATES without any
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "target" / "constants"
CRATES = ["failover/protocol", "failover/journal", "collective/protocol", "collective/schedule"]
CONSTANT = re.compile(r"^( *(?:pub(?:\(\w+\))? )?const (\w+): [ui]\w+ = )([^;]+);", re.M)
SECONDS = 300
# What may be any other number, and why.
ALIVE = {
    "a number of the wire, which both ends have from the same constant": [
        "VERSION", "HEADER_LEN", "HELLO_LEN", "PROBE_LEN", "REFUSE_LEN", "PLANNED_LEN", "KEY_LEN",
        "MAX_LEN", "KEY_BYTES", "SEAL_BYTES",
    ],
}  # fmt: skip


def variants(text: str):
    """The name of each constant with what it is changed to, and the text with the change."""
    for found in CONSTANT.finditer(text.split("#[cfg(test)]")[0]):
        head, name, value = found.groups()
        for changed in ("0", f"4 * ({value})"):
            before, behind = text[: found.start()], text[found.end() :]
            yield name, changed, f"{before}{head}{changed};{behind}"


def test(crate: str) -> bool:
    """Whether the crate's tests pass; one that does not compile has not passed."""
    manifest = (COPY / "crates" / crate / "Cargo.toml").read_text()
    [package, *_] = re.findall(r'^name = "(.*)"', manifest, re.M)
    line = ["cargo", "test", "-q", "--lib", "-p", package, "--target-dir", "target/build"]
    settings = {"OPT_LEVEL": "1", "DEBUG": "false", "INCREMENTAL": "true", "CODEGEN_UNITS": "16"}
    env = os.environ | {f"CARGO_PROFILE_DEV_{name}": value for name, value in settings.items()}
    told = {"cwd": COPY, "env": env, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # However long it takes to compile, a test that never ends has noticed.
    if subprocess.run([*line, "--no-run"], **told).returncode != 0:
        return False
    try:
        return subprocess.run(line, timeout=SECONDS, **told).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main() -> int:
    asked = [word.partition(":")[::2] for word in sys.argv[1:]] or [(c, "") for c in CRATES]
    files = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
    for name in files.splitlines():
        to = COPY / name
        to.parent.mkdir(parents=True, exist_ok=True)
        if not to.exists() or to.read_bytes() != (ROOT / name).read_bytes():
            shutil.copy(ROOT / name, to)
    allowed = {name for names in ALIVE.values() for name in names}
    missed = 0
    for crate, only in asked:
        if not test(crate):
            raise SystemExit(f"{crate}: its tests fail without a change")
        for path in sorted((COPY / "crates" / crate / "src").rglob("*.rs")):
            if only and path.name != only or "tests" in path.stem:
                continue
            text = path.read_text()
            for name, changed, mutant in variants(text):
                if name in allowed:
                    continue
                path.write_text(mutant)
                if test(crate):
                    missed += 1
                    print(f"{path.relative_to(COPY)}: {name} = {changed}: not noticed", flush=True)
            path.write_text(text)
    print(f"{missed} changes were not noticed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
