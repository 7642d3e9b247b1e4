"""Regions are registered anew and completion queues change their size (tests/c/remap.c):
undisturbed, and while the NIC that carries the traffic fails again and again, at either end."""

import json

import pytest

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.ports import free_port, listens
from lib.process import Failure, wait_until

SECONDS = 5
# The programs themselves give up when something does not complete within 40 s.
END_SECONDS = 60
LEAST_ROUNDS = 100
LEAST_SWITCHES = 8
# More than control messages send in the meantime.
DATA_BYTES = 64 << 10


def busiest(fabric, host, programs):
    """The NIC of a host that carries the traffic: the first to send more than control messages do.
    None: the programs have ended."""
    before = fabric.nics()

    def carrier():
        sent = {
            nic: now["tx_payload_bytes"] - before[nic]["tx_payload_bytes"]
            for nic, now in fabric.nics().items()
            if nic.startswith(host)
        }
        nic = max(sent, key=sent.get)
        return nic if sent[nic] >= DATA_BYTES else None

    wait_until(lambda: carrier() or any(p.ended() for p in programs), 20, f"traffic of host {host}")
    return carrier()


def faults(fabric, programs, kind):
    """Until the programs end: what carries the traffic fails, at one end and then at the other,
    until the QP has switched."""
    count = 0
    while not any(p.ended() for p in programs):
        nic = busiest(fabric, "ab"[count % 2], programs)
        if nic is None:
            break
        place = kind.format(nic)
        switches = len(fabric.events("switch"))
        fabric.fault(place)
        wait_until(
            lambda: any(p.ended() for p in programs) or len(fabric.events("switch")) > switches,
            20,
            f"a switch after {place}",
        )
        fabric.clear(place.rsplit(" ", 1)[0])
        count += 1


@pytest.mark.parametrize("device", ["full", "plain", "machine"], indirect=True)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(None, id="no-fault", marks=pytest.mark.smoke),
        pytest.param("nic {} dead", id="nic-dead"),
        pytest.param("nic {} down", id="nic-down"),
        pytest.param("cable {} cut", id="cable-cut"),
    ],
)
def test_regions_and_queues_change(logs, note, device, kind):
    """One run; its programs check everything."""
    program = compile_c("remap", "-libverbs")
    with Fabric(logs) as fabric:
        port = free_port()
        server = fabric.run("b", [program, "listen", port, SECONDS if kind else 2], "b-remap")
        wait_until(lambda: server.ended() or listens(server.pid, port), 20, "the server listens")
        client = fabric.run("a", [program, "connect", f"127.0.0.1:{port}"], "a-remap")
        both = [server, client]
        wait_until(
            lambda: any(p.ended() for p in both) or all("running" in p.output() for p in both),
            20,
            "traffic",
        )
        if kind:
            faults(fabric, both, kind)
        for process in both:
            process.expect_success(END_SECONDS)
        done = json.loads(client.output().splitlines()[-1])
        switches = len(fabric.events("switch"))
        if done["rounds"] < LEAST_ROUNDS or kind and switches < LEAST_SWITCHES:
            raise Failure(f"too little was done: {done}, {switches} switches")
        note(
            f"{done['rounds']} rounds, {done['reregs']} changed regions, {done['resizes']} "
            f"changed queues, {switches} switches"
        )
