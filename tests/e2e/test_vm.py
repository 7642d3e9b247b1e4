"""What needs a kernel of its own: tests that run in a VM with Debian's kernel, under QEMU
(tests/vm/run.sh).

The VM is emulated in software, so these take minutes. The first run makes what the VM needs, in
~/.cache/unbroken/vm.
"""

import os

import pytest

from lib.paths import BUILD, ROOT
from lib.process import Failure, Process, Skip

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.slow]

VM = ROOT / "tests" / "vm"
# The exit status of run.sh where there can be no VM.
NO_VM = 77


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
