#!/usr/bin/env python3
"""PyTorch as it comes from PyPI, over verbs: TensorPipe trains a small GPT on two ranks (see gpt.py), and NICs fail meanwhile.

TensorPipe opens libibverbs with dlopen, makes RC QPs with a shared receive queue, and moves everything by WRITE with immediate and
SEND. The losses must be the bits that the same training over TCP gives, and the NICs must have carried the tensors.

The backend of torch.distributed is tried in backend.py (trainings) and behaviour.py (operations, waits, groups).

usage: run.py PYTHON [--all] [WORD...]    where PYTHON is an interpreter that has torch (run.sh makes one); cases with these words alone
  --all   a NIC that dies at each of seven instants while connections are made; the backend under AddressSanitizer
"""

import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from lib.fabric import Fabric  # noqa: E402
from lib.ports import free_port  # noqa: E402
from lib.process import Failure, wait_until  # noqa: E402
from lib.suite import Suite  # noqa: E402

import backend  # noqa: E402
import behaviour  # noqa: E402
import sanitized  # noqa: E402

STEPS = 20
SECONDS = 150
# Activations one way and gradients the other: 16 windows of 64 tokens of 128 floats, each step.
STEP_BYTES = 16 * 64 * 128 * 4
# After the NIC was opened; connections are made, and then there is traffic.
INSTANTS_MS = [0, 10, 30, 100, 300, 1000, 3000]
# TensorPipe takes port 1 and GID index 0, which leads nowhere on a plain RoCE port.
PLAIN = ("--device", "plain", "--link-layer", "infiniband")


def losses(text: str) -> list:
    return [line.split()[2] for line in text.splitlines() if line.startswith("loss ")]


def ranks(fabric: Fabric, python: str, transport: str, steps: int):
    """Both ranks: rank 0 on host a, rank 1 on host b. Over TCP they run without Unbroken."""
    port = free_port()
    started = []
    for rank, host in ((1, "b"), (0, "a")):
        args = [python, "-W", "ignore", HERE / "gpt.py", "--rank", rank, "--port", port, "--transport", transport, "--steps", steps]
        run = fabric.run if transport == "ibv" else lambda host, args, name: fabric.start(name, args)
        started.append(run(host, args, f"rank{rank}-{transport}"))
    return started[1], started[0]


def expect(rank0, rank1, right: list):
    rank0.expect_success(SECONDS)
    rank1.expect_success(SECONDS)
    got = losses(rank0.output())
    if got != right:
        raise Failure(f"the losses differ from those over TCP: {got} instead of {right}")


def carried(fabric: Fabric, nic: str) -> tuple:
    counters = fabric.nics().get(nic, {})
    return counters.get("tx_payload_bytes", 0), counters.get("rx_payload_bytes", 0)


def elsewhere(fabric: Fabric, nic: str) -> tuple:
    """What the other NICs of its host have carried."""
    return fabric.elsewhere(nic, "tx_payload_bytes"), fabric.elsewhere(nic, "rx_payload_bytes")


def over_tcp(logs, python: str, steps: int) -> list:
    with Fabric(logs) as fabric:
        rank0, rank1 = ranks(fabric, python, "uv", steps)
        rank0.expect_success(SECONDS)
        rank1.expect_success(SECONDS)
        got = losses(rank0.output())
        if len(got) != steps or float.fromhex(got[-1]) >= float.fromhex(got[0]):
            raise Failure(f"this training does not learn: {got}")
        return got


def over_verbs(logs, python: str, right: list):
    with Fabric(logs) as fabric:
        rank0, rank1 = ranks(fabric, python, "ibv", len(right))
        expect(rank0, rank1, right)
        sent, received = carried(fabric, "a/0")
        if min(sent, received) < len(right) * STEP_BYTES:
            raise Failure(f"a/0 sent {sent} and received {received} bytes, {len(right) * STEP_BYTES} are due each way")
        return f"losses equal over {len(right)} steps; a/0 sent {sent / 1e6:.1f} MB, received {received / 1e6:.1f} MB"


def nic_dies_early(logs, python: str, right: list, instant_ms: int | None):
    """A NIC dies so long after a program has opened it; None: before the programs begin."""
    with Fabric(logs, "--hosts", "a,b") as fabric:
        if instant_ms is None:
            fabric.fault("nic a/0 dead")
        rank0, rank1 = ranks(fabric, python, "ibv", len(right))
        if instant_ms is not None:
            wait_until(lambda: rank0.ended() or fabric.nics().get("a/0", {}).get("pids"), SECONDS, "a/0 is opened")
            time.sleep(instant_ms / 1000)
            fabric.fault("nic a/0 dead")
        done = len(losses(rank0.output()))
        if done >= len(right) - 2:
            raise Failure(f"the training was over ({done} of {len(right)} steps) when the fault came")
        expect(rank0, rank1, right)
        due = (len(right) - done - 2) * STEP_BYTES
        others = elsewhere(fabric, "a/0")
        if min(others) < due:
            raise Failure(f"the other NICs carried {others}, {due} are due each way")
        if fabric.events("give-up"):
            raise Failure(f"given up: {fabric.events('give-up')[0]}")
        return f"losses equal; fault after {done} steps, {len(fabric.events('switch'))} switches"


def drained(logs, python: str, right: list):
    """A NIC is drained in the middle of the training: nothing is noticed, and from then on it carries nothing."""
    with Fabric(logs) as fabric:
        rank0, rank1 = ranks(fabric, python, "ibv", len(right))
        before = len(right) // 4
        wait_until(lambda: rank0.ended() or len(losses(rank0.output())) >= before, SECONDS, f"{before} steps")
        done = fabric.command("nic", "drain", "a/0")
        if done.returncode != 0:
            raise Failure(f"the drain: {done.stderr}")
        left = carried(fabric, "a/0")
        steps = len(losses(rank0.output()))
        expect(rank0, rank1, right)
        if carried(fabric, "a/0") != left:
            raise Failure(f"a/0 carried {left} bytes when it was drained, and {carried(fabric, 'a/0')} in the end")
        sent, received = elsewhere(fabric, "a/0")
        if min(sent, received) < (len(right) - steps - 2) * STEP_BYTES:
            raise Failure(f"the others sent {sent} and received {received} bytes after step {steps}")
        switches = fabric.events("switch")
        if not switches or any(s["kind"] != "planned" for s in switches):
            raise Failure(f"planned switches alone are right, not {switches}")
        return f"losses equal; {done.stdout.strip().splitlines()[0]}"


def nic_dies(logs, python: str, right: list, fault: str, dead: str, settings: tuple = ()):
    """A NIC fails in the middle of the training."""
    with Fabric(logs, *settings) as fabric:
        rank0, rank1 = ranks(fabric, python, "ibv", len(right))
        before = len(right) // 4
        wait_until(lambda: rank0.ended() or len(losses(rank0.output())) >= before, SECONDS, f"{before} steps")
        fabric.fault(fault)
        done = len(losses(rank0.output()))
        if done >= len(right) - 2:
            raise Failure(f"the training was over ({done} of {len(right)} steps) when the fault came")
        expect(rank0, rank1, right)
        due = (len(right) - done - 2) * STEP_BYTES
        sent, received = elsewhere(fabric, dead)
        if min(sent, received) < due:
            raise Failure(f"the others sent {sent} and received {received} bytes after the fault, {due} are due each way")
        if min(carried(fabric, dead)) < before * STEP_BYTES:
            raise Failure(f"{dead} carried little before the fault")
        return f"losses equal; fault after {done} steps, then the others sent {sent / 1e6:.1f} MB, received {received / 1e6:.1f} MB"


def main():
    python = sys.argv[1]
    suite = Suite("torch", [word for word in sys.argv[2:] if word != "--all"])
    behaviour.cases(suite, python)
    backend.cases(suite, python)
    if "--all" in sys.argv:
        sanitized.cases(suite, python)
    right = suite.case("training over TCP", over_tcp, python, STEPS)
    longer = suite.case("longer training over TCP", over_tcp, python, 6 * STEPS)
    if right:
        suite.case("training over verbs", over_verbs, python, right)
    if longer:
        suite.case("training over verbs, nic a/0 dead", nic_dies, python, longer, "nic a/0 dead", "a/0")
        suite.case("training over verbs, cable b/0 cut", nic_dies, python, longer, "cable b/0 cut", "b/0")
        suite.case("training over verbs, a/0 is drained", drained, python, longer)
        suite.case("training over verbs, plain devices, nic a/0 dead", nic_dies, python, longer, "nic a/0 dead", "a/0", PLAIN)
        for instant_ms in [None, *INSTANTS_MS] if "--all" in sys.argv else [None, 30]:
            when = "dead from the start" if instant_ms is None else f"dead {instant_ms} ms after it was opened"
            suite.case(f"training over verbs, nic a/0 {when}", nic_dies_early, python, longer, instant_ms)
    sys.exit(suite.finish())


if __name__ == "__main__":
    main()
