"""The backend `unbroken` of torch.distributed over devices of the machine (lib/machine.py):
trainings whose losses are the same bits while NICs die, lose their ports and come back."""

import pytest

from lib.fabric import Fabric
from lib.machine import MachineFabric
from lib.process import Failure
from lib.pytorch import counters, flap, same_bits
from test_torch_backend import TRAINING_SECONDS, by_gloo, start, trained

pytestmark = [
    pytest.mark.torch,
    pytest.mark.serial,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
]


def moved(fabric) -> dict:
    """Bytes that each NIC has sent."""
    return {name: nic["tx_payload_bytes"] for name, nic in fabric.nics().items()}


@pytest.mark.parametrize(
    "mode, ranks, steps", [("ddp", 2, 60), ("ddp", 3, 60), ("fsdp1", 2, 60), ("fsdp", 2, 100)]
)
def test_training_while_nics_flap(logs, note, torch_python, mode, ranks, steps):
    """Beside gloo's losses, which have the same bits where two ranks add."""
    with Fabric(logs) as fabric:
        backend = "unbroken" if ranks > 2 else "gloo"
        process = start(fabric, torch_python, backend, mode, ranks, steps)
        right = trained(process, ranks, steps) if ranks > 2 else by_gloo(process, steps)[0]
    with MachineFabric(logs, "--nics", "4") as fabric:
        process = start(fabric, torch_python, "unbroken", mode, ranks, steps)
        flaps = flap(fabric, process, ranks, TRAINING_SECONDS)
        got = trained(process, ranks, steps)
        same_bits(got, right)
        lost = [c["paths_failed"] for c in counters(process.output())]
        hosts = "abc"[:ranks]
        idle = [name for name, sent in moved(fabric).items() if name[0] in hosts and not sent]
        if flaps < 5 or not any(lost) or idle:
            raise Failure(f"{flaps} faults, paths failed: {lost}, NICs that sent nothing: {idle}")
        note(f"losses equal over {steps} steps; {flaps} faults, paths failed: {lost}")
