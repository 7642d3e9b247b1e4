"""What needs a kernel of its own: tests that run in a VM with Debian's kernel, under QEMU
(tests/vm/run.sh).

The VM is emulated in software, so these take minutes. The first run makes what the VM needs, in
~/.cache/unbroken/vm.
"""

import os
import re
import subprocess

import pytest

from lib.paths import BUILD, ROOT
from lib.process import Failure, Process, Skip

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.slow]

VM = ROOT / "tests" / "vm"
# The exit status of run.sh where there can be no VM.
NO_VM = 77
# That of setup.sh and siw_module.sh where something cannot be had.
NOT_MADE = 3


def in_vm(logs, command: str, seconds: int) -> str:
    """Runs a command in the VM, for so long at the most, and gives what it wrote."""
    env = {**os.environ, "UNBROKEN_VM_SECONDS": str(seconds)}
    process = Process("vm", [VM / "run.sh", command], logs / "vm.log", env)
    try:
        # Making what the VM needs comes before.
        status = process.wait(seconds + 600)
    finally:
        process.kill()
    output = process.output()
    if status == NO_VM:
        raise Skip(output.strip().splitlines()[-1])
    if status != 0:
        failed = [line for line in output.splitlines() if line.startswith(("FAIL", "E  "))]
        raise Failure(f"status {status}: {failed or output[-500:]}")
    return output


@pytest.mark.timeout(1300)
def test_rules(logs, note):
    """Flower rules for forwarding entries as EVPN makes them, without FRR (tests/vm/rules.sh)."""
    output = in_vm(logs, f"bash {VM / 'rules.sh'} {BUILD / 'unbroken'}", 600)
    note(f"{output.count(chr(10) + 'ok ')} checks")


@pytest.mark.timeout(4300)
def test_edge(logs, note):
    """The host edge's tests with real FRR, its rules as flower rules, with softnic and rxe."""
    output = in_vm(logs, f"bash {VM / 'edge.sh'}", 3600)
    note(output.strip().splitlines()[-1].strip("= "))


@pytest.mark.timeout(4300)
def test_devices(logs, note):
    """Devices of the machine, over rxe: test_devices.py, test_doctor.py,
    test_softnic_and_rxe.py."""
    output = in_vm(logs, f"bash {VM / 'devices.sh'} -m 'not timing'", 3600)
    note(output.strip().splitlines()[-1].strip("= "))


@pytest.mark.timeout(1900)
def test_siw(logs, note):
    """iWARP devices are passed through as they are (tests/vm/siw.sh)."""
    folder = os.environ.get("UNBROKEN_VM", f"{os.environ.get('HOME')}/.cache/unbroken/vm")
    for script in ("setup.sh", "siw_module.sh"):
        made = subprocess.run([VM / script, folder], capture_output=True, text=True)
        if made.returncode == NOT_MADE:
            raise Skip(made.stdout.strip().splitlines()[-1])
        if made.returncode != 0:
            raise Failure(f"{script}: {made.stdout[-500:]}{made.stderr[-500:]}")
    command = f"bash {VM / 'siw.sh'} {BUILD / 'unbroken'} {folder}/siw/siw.ko"
    output = in_vm(logs, command, 600)
    note(f"{output.count(chr(10) + 'ok ')} checks")


@pytest.mark.timing
@pytest.mark.timeout(1900)
def test_softnic_beside_rxe(logs, note):
    """How fast softnic is beside rxe: test_softnic_beside_rxe.py."""
    output = in_vm(logs, f"bash {VM / 'devices.sh'} -m timing", 1200)
    note("; ".join(re.findall(r"PASSED \((.*)\)", output)))
