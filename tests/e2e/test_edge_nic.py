"""A NIC with an embedded switch, as far as it can be played: `devlink` and sysfs are stood in for,
in a mount and a network namespace of the test's own.

What the stand-in does as drivers do: with the mode the uplink's device goes and comes back without
its address, and representors appear a moment later.
"""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from lib import options
from lib.edge import need_root_and_tools
from lib.fabric import UNBROKEN
from lib.process import Failure

pytestmark = [pytest.mark.edge, pytest.mark.root]

PCI = "0000:03:00.0"
FUNCTIONS = Path("/sys/bus/pci/devices") / PCI
DEVLINK = f"""#!/bin/sh
case "$*" in
"-j dev eswitch show pci/{PCI}") echo '{{"dev":{{"pci/{PCI}":{{"mode":"'$(cat mode)'"}}}}}}' ;;
"dev eswitch set pci/{PCI} mode switchdev")
    echo switchdev >mode; ip link del p0
    (sleep 0.3; ip link add p0 type veth peer name tor0
     sleep 0.2; ip link add pf0vf0 type veth peer name vf0) >/dev/null 2>&1 & ;;
"dev eswitch set pci/{PCI} mode legacy") echo legacy >mode; ip link del pf0vf0 ;;
*) echo "devlink: $*" >&2; exit 1 ;;
esac
"""
CONFIG = f"""name = "nic"
loopback = "10.255.0.17"
asn = 65017
frr = false
[[nic]]
pci = "{PCI}"
virtual_functions = 2
[[uplink]]
device = "p0"
address = "10.1.17.1/31"
peer = "10.1.17.0"
peer_asn = 65101
peer_loopback = "10.255.1.1"
[[tenant]]
vni = 100
[[tenant.port]]
representor = "pf0vf0"
device = "vf0"
mac = "02:00:00:00:09:11"
address = "192.168.9.17/24"
"""
# What the machine shows of it: mode, functions, addresses of p0, the bridge of the representor,
# addresses of the function.
SHOWN = f"""cat mode {FUNCTIONS}/sriov_numvfs
ip -br addr show p0 2>/dev/null | grep -o '10.1.17.1/31'
ip -d link show pf0vf0 2>/dev/null | grep -o 'master unb100'
ip -br link show vf0 2>/dev/null | grep -o '02:00:00:00:09:11'
ip -br addr show vf0 2>/dev/null | grep -o '192.168.9.17/24'; true"""
# What makes the stand-in.
MAKE = f"""mount -t tmpfs none {FUNCTIONS.parent}; mkdir {FUNCTIONS}
echo 0 >{FUNCTIONS}/sriov_numvfs; echo 8 >{FUNCTIONS}/sriov_totalvfs
ip link set lo up; ip link add p0 type veth peer name tor0"""
ADDRESSES = ["02:00:00:00:09:11", "192.168.9.17/24"]
BEFORE, AFTER = ["legacy", "0"], ["switchdev", "2", "10.1.17.1/31", "master unb100", *ADDRESSES]


class Machine:
    """A context: a shell in namespaces of its own, with the stand-in."""

    def __init__(self, folder: Path):
        (folder / "bin").mkdir(parents=True)
        (folder / "mode").write_text("legacy\n")
        devlink = folder / "bin/devlink"
        devlink.write_text(DEVLINK)
        devlink.chmod(devlink.stat().st_mode | stat.S_IXUSR)
        (folder / "edge.toml").write_text(CONFIG)
        (folder / "late.toml").write_text(CONFIG.replace("pf0vf0", "pf0vf9"))
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.shell = subprocess.Popen(
            ["unshare", "--net", "--mount", "bash"],
            cwd=folder,
            env={**os.environ, "PATH": path, "UNBROKEN_EDGE": str(folder / "edge")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self):
        if self.run(MAKE)[1]:
            raise Failure("the stand-in could not be made")
        return self

    def __exit__(self, *_):
        self.shell.stdin.close()
        self.shell.wait(30)

    def run(self, command: str) -> tuple[list[str], int]:
        """What a command wrote, and its status."""
        self.shell.stdin.write(f"{{ {command}\n}} 2>&1; status=$?; echo; echo done $status\n")
        self.shell.stdin.flush()
        lines = []
        for line in self.shell.stdout:
            if line.startswith("done "):
                return [line for line in lines if line], int(line.split()[1])
            lines.append(line.strip())
        raise Failure(f"the shell ended: {lines}")

    def edge(self, what: str, works=True) -> str:
        """Runs `unbroken edge ...`, which must work or fail; gives what it wrote."""
        lines, status = self.run(f"timeout 30 {UNBROKEN} edge {what}")
        if (status == 0) != works:
            raise Failure(f"edge {what}: {lines}")
        return "\n".join(lines)

    def expect(self, wanted: list, when: str):
        """Fails unless the machine shows this."""
        if (shown := self.run(SHOWN)[0]) != wanted:
            raise Failure(f"{when}: {shown}, not {wanted}")


@pytest.mark.skipif(options.VM, reason="it needs no kernel of its own")
def test_mode_and_virtual_functions(logs):
    """`up` sets the mode and makes the functions, waits for what the driver makes, and goes on with
    it; `down` takes all of it away."""
    need_root_and_tools()
    with Machine(logs / "nic") as machine:
        dry = machine.edge("up --dry-run --config edge.toml").splitlines()
        if len(dry) != 3 or "and then" not in dry[2]:
            raise Failure(f"--dry-run: {dry}")
        machine.expect(BEFORE, "after --dry-run")
        machine.edge("up --no-daemon --config edge.toml")
        machine.expect(AFTER, "after 'up'")
        if again := machine.edge("up --no-daemon --config edge.toml"):
            raise Failure(f"a second 'up' made: {again}")
        machine.edge("down")
        machine.expect(BEFORE, "after 'down'")
        error = machine.edge("up --no-daemon --config late.toml", works=False)
        if "there is no representor 'pf0vf9'" not in error:
            raise Failure(error)
        machine.expect(BEFORE, "after a representor that never came")
        machine.run(f"echo 1 >{FUNCTIONS}/sriov_numvfs")
        error = machine.edge("up --no-daemon --config edge.toml", works=False)
        if "has 1 virtual functions already in mode legacy" not in error:
            raise Failure(error)
        machine.expect(["legacy", "1"], "with a function that may be in use")
