"""What the installed libibverbs and its providers call of libibverbs goes on to it
(crates/api/preload/src/real.rs): they find our definitions first."""

import re
import subprocess
from pathlib import Path

import pytest

from lib.paths import BUILD, ROOT
from lib.process import Skip

pytestmark = pytest.mark.smoke

VERB = re.compile(r"\b(_?ibv_\w+|mult_to_ibv_rate|mbps_to_ibv_rate)")
# They take numbers alone and give the same answers.
OF_NUMBERS = re.compile(r"_str$|_rate|_to_mult|_to_mbps")


def tool(*words) -> str:
    """What a tool of binutils says."""
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def names(text: str) -> set:
    return {name.split("@")[0] for name in VERB.findall(text)}


def installed() -> list:
    """libibverbs and its providers."""
    libraries = sorted(Path("/usr/lib").glob("*/libibverbs.so.1"))
    providers = sorted(Path("/usr/lib").glob("*/libibverbs/*.so"))
    if not libraries or not providers:
        raise Skip("libibverbs1 and ibverbs-providers are not installed")
    return libraries + providers


def test_what_libibverbs_calls_goes_on_to_it():
    ours = names(tool("nm", "-D", "--defined-only", BUILD / "libunbroken.so"))
    # Undefined symbols, and those of its own that it reaches through the dynamic linker.
    called = set().union(
        *(
            names(tool("nm", "-D", "--undefined-only", library))
            | names(tool("objdump", "-R", library))
            for library in installed()
        )
    )
    sources = "".join(file.read_text() for file in (ROOT / "crates/api/preload/src").glob("*.rs"))
    passed = set(re.findall(r"pass!\((\w+)\(", sources))
    # Two macros of unsupported.rs begin each of their functions so.
    lists = re.findall(r"absent_(?:verbs|objects)! \{(.*?)\n\}", sources, re.S)
    passed |= {name for text in lists for name in re.findall(r"^\s+(\w+)\(", text, re.M)}
    left = {name for name in called & ours - passed if not OF_NUMBERS.search(name)}
    assert called & ours, (
        "libibverbs calls none of its functions: the test looks in the wrong place"
    )
    assert not left, f"they do not begin with pass!: {sorted(left)}"
