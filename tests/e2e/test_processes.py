"""Many processes on the same NICs, many devices in a process, and what is left of processes that
are gone (tests/c/mesh.c)."""

import json
import signal
import socket

import pytest

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.process import Failure, wait_until

FIRST_PORT = 4791
SLOTS = 256
RANKS = 20
NICS = 4
MESH_SECONDS = 3


def qps_on(nic, hosts):
    """How many QPs of a mesh have an end on a NIC, counting both ends: mesh.c connects ranks over
    device (from + to) modulo NICS."""
    host, rail = nic.split("/")
    ends = [(i, k) for i in range(RANKS) for k in range(RANKS) if (i + k) % NICS == int(rail)]
    return sum(host in (hosts[i % len(hosts)], hosts[k % len(hosts)]) for i, k in ends)


@pytest.mark.parametrize(
    "hosts, fault",
    [("a", None), ("abcd", "nic b/0 dead"), ("a", "cable a/1 cut")],
    ids=["one-host", "four-hosts-nic-dead", "one-host-cable-cut"],
)
def test_mesh(logs, note, hosts, fault):
    """RANKS processes on some hosts, each connected to each."""
    program = compile_c("mesh", "-libverbs")
    with Fabric(logs) as fabric:
        folder = fabric.files / "mesh"
        folder.mkdir()
        args = [program, "--folder", folder, "--ranks", RANKS, "--seconds", MESH_SECONDS, "--rank"]
        ranks = [fabric.run(hosts[i % len(hosts)], [*args, i], f"rank-{i}") for i in range(RANKS)]
        if fault:
            def connected():
                return len(list(folder.glob("ready-*[0-9]"))) == RANKS

            wait_until(lambda: connected() or any(r.ended() for r in ranks), 60, "all connected")
            fabric.fault(fault)
        for process in ranks:
            process.expect_success(120)
        received = [json.loads(p.output().splitlines()[-1])["messages"] for p in ranks]
        if min(received) < RANKS:
            raise Failure(f"messages at each rank: {received}")
        switches = fabric.events("switch")
        failed = fault.split()[1] if fault else None
        stray = [s for s in switches if failed not in s["from"].split("-")]
        if stray:
            raise Failure(f"{len(stray)} switches away from NICs that work, as {stray[0]}")
        moved, due = {(s["pid"], s["qp"]) for s in switches}, qps_on(failed, hosts) if fault else 0
        if len(moved) < due:
            raise Failure(f"{len(moved)} QPs have moved, {due} were on the NIC that failed")
        note(
            f"{sum(received)} messages, {len(switches)} switches of {len(moved)} QPs, "
            f"{due} were due"
        )


@pytest.mark.smoke
@pytest.mark.parametrize("option", ["--one", "--wrap"], ids=["four-devices", "all-qp-numbers"])
def test_one_process(logs, note, option):
    """Four devices in one process, one opened twice; more QPs than a NIC has numbers for."""
    program = compile_c("mesh", "-libverbs")
    with Fabric(logs) as fabric:
        process = fabric.run("a", [program, option], "mesh")
        process.expect_success(60)
        note(process.output().splitlines()[-1])


def test_no_slot_left(logs, note):
    """The 257th process of a NIC is refused, and told why; once one has gone, there is room."""
    with Fabric(logs) as fabric:
        fabric.run("a", ["ibv_devinfo"], "first").expect_success(20)
        addr = fabric.nics()["a/0"]["addr"]
        held = []
        for slot in range(SLOTS):
            s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            s.bind((addr, FIRST_PORT + slot))
            held.append(s)
        program = ["ibv_devinfo", "-d", "unb0"]
        refused = fabric.run("a", program, "refused", env={"UNBROKEN_LOG": "1"})
        refused.expect_error(20)
        for word in ("a/0", str(SLOTS)):
            if word not in refused.output():
                raise Failure(f"the refusal lacks '{word}': {refused.output().strip()[:300]}")
        held.pop(77).close()
        fabric.run("a", program, "accepted").expect_success(20)
        for s in held:
            s.close()
        note(next(line for line in refused.output().splitlines() if str(SLOTS) in line).strip())


def test_slot_of_a_killed_process(logs, note):
    """A killed process's slot is taken by the next one, which has none of its QPNs."""
    program = compile_c("mesh", "-libverbs")
    with Fabric(logs) as fabric:
        seen = set()
        for turn in range(8):
            process = fabric.run("a", [program, "--hold"], f"hold-{turn}")
            wait_until(lambda: process.ended() or process.output().strip(), 20, "a QP")
            qpn = int(process.output().split()[0])
            if qpn >> 16 != 0:
                raise Failure(f"process {turn} has slot {qpn >> 16}, slot 0 is free")
            if qpn in seen:
                raise Failure(f"QPN {qpn:#x} is given out a second time")
            seen.add(qpn)
            process.kill(signal.SIGKILL)
        note(f"{len(seen)} processes in slot 0, QPNs {', '.join(f'{q:#x}' for q in sorted(seen))}")
