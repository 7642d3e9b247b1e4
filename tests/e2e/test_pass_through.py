"""What the installed libibverbs and its providers call of libibverbs goes on to it
(crates/api/preload/src/real.rs): they find our definitions first. And devices that cannot be
protected are left to the program as they are."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from lib.fabric import UNBROKEN
from lib.machine import MachineFabric
from lib.paths import BUILD, ROOT
from lib.process import Skip, needs

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


# Runs its arguments where the kernel shows devices of a node type that has no name, as EFA's.
UNNAMED = """
mount -t tmpfs tmpfs /sys/class
for nic in unb0 unb1 unb2; do
    mkdir -p /sys/class/infiniband/$nic
    echo "7: <unknown>" >/sys/class/infiniband/$nic/node_type
done
exec "$@"
"""


@pytest.mark.root
@pytest.mark.parametrize("options", [[], ["--devices", "all"], ["--devices", "unb1,unb0"]])
def test_devices_of_an_unnamed_kind_are_the_programs_own(logs, options):
    """With a line that says so, and also where `run` has chosen the devices by itself."""
    needs("ibv_devinfo", "ibverbs-utils")
    if os.geteuid() != 0:
        raise Skip("mounts need root")
    with MachineFabric(logs, "--nics", "3") as fabric:
        env = {"TEST_PROVIDER_HOST": "a"}

        def devinfo(name, *run):
            inside = ["unshare", "-m", "bash", "-ec", UNNAMED, "-"]
            words = [*inside, UNBROKEN, "run", *run, "--", "ibv_devinfo"]
            program = fabric.start(name, words, env)
            program.expect_success(30)
            told, _, devices = program.output().partition("hca_id:")
            assert devices, told
            return devices, [line for line in told.splitlines() if line.startswith("unbroken: ")]

        without, _ = devinfo("without", "--devices", "all", "--no-failover")
        shown, told = devinfo("shown", *options)
        assert any("unb0 (a device of its own kind)" in line for line in told), told
        assert any("the program has the devices as they are" in line for line in told), told
        assert shown == without
        assert not fabric.status()["qps"] and not fabric.events()
