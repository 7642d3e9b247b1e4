"""What a program gets is what it gets of an RNIC, failover or not: refusals, errors, waits, and
memory that is its own."""

import json

import pytest
from lib import options
from lib.cc import compile_c
from lib.fabric import Fabric
from lib.process import Failure, wait_until

LATE_MS = 4000
OWN_ERRORS_SECONDS = 3
OWN_ERRORS_LEAST = 50
SRQ_FAULTS = ["loss a/1 3%", "reorder a/1 20%", "delay a/1 200us"]


def nothing_happened(fabric: Fabric):
    """No QP moved, was revived or was given up."""
    for kind in "switch", "give-up":
        if events := fabric.events(kind):
            raise Failure(f"nothing is wrong with the network: {events[0]}")


@pytest.mark.smoke
def test_the_library_maps_nothing_where_the_program_was(logs, note, device):
    """Registered memory that is unmapped stays a hole: nothing that the library maps lies there,
    and a WRITE fails."""
    program = compile_c("holes", "-libverbs")
    with Fabric(logs) as fabric:
        process = fabric.run("a", [program], "a-holes")
        process.expect_success(60)
        note(process.output().splitlines()[-1])


@pytest.mark.parametrize("behind", ["atomic", "write", "read"])
def test_a_late_receive_is_waited_for(logs, device, behind):
    """A receive that is posted after four seconds: the QP waits, is not begun anew, and what is
    behind the SEND is done once."""
    program = compile_c("late_receive", "-libverbs")
    with Fabric(logs) as fabric:
        process = fabric.run("a", [program, behind, LATE_MS], "a-late")
        process.expect_success(60)
        nothing_happened(fabric)


@pytest.mark.parametrize("failover", [True, False], ids=["failover", "none"])
@pytest.mark.parametrize("how", ["unconnected", "connected"])
def test_a_wrong_work_request_is_refused_in_any_state(logs, device, how, failover):
    """A QP in ERR refuses what a QP in RTS refuses, names it, and flushes the rest in order."""
    program = compile_c("ended", "-libverbs")
    with Fabric(logs) as fabric:
        fabric.run("a", [program, how], "a-ended", failover).expect_success(60)


@pytest.mark.parametrize("failover", [True, False], ids=["failover", "none"])
def test_domains_in_use_stay(logs, failover):
    """EBUSY for a thread domain, a parent domain and a protection domain that are in use."""
    program = compile_c("domains", "-libverbs")
    with Fabric(logs) as fabric:
        fabric.run("a", [program], "a-domains", failover).expect_success(60)


@pytest.mark.parametrize("settings", [(), ("--link-layer", "infiniband")], ids=["ip", "infiniband"])
def test_the_header_of_a_datagram(logs, device, settings):
    """Traffic class and hop limit of an address handle are in the header that the receiver gets."""
    program = compile_c("grh", "-libverbs")
    with Fabric(logs, *settings) as fabric:
        fabric.run("a", [program], "a-grh").expect_success(60)


def test_errors_of_a_program_are_no_failing_nic(logs, note, device):
    """Hundreds of errors that a program makes itself: no NIC is taken for one that fails queue
    pairs, and a good pair beside them stays where it is."""
    program = compile_c("own_errors", "-libverbs")
    with Fabric(logs) as fabric:
        process = fabric.run("a", [program, OWN_ERRORS_SECONDS], "a-errors")
        wait_until(
            lambda: process.ended() or " errors" in process.output(), 60, "the errors are made"
        )
        if process.ended():
            raise Failure(process.output())
        errors = int(process.output().split()[0])
        if errors < OWN_ERRORS_LEAST:
            raise Failure(f"only {errors} errors in {OWN_ERRORS_SECONDS} s")
        nothing_happened(fabric)
        health = json.loads(fabric.command("health", "--json").stdout)
        if health["verdict"] != "healthy":
            raise Failure(f"health: {health}")
        displaced = [qp for qp in fabric.status()["qps"] if qp["epoch"]]
        if displaced:
            raise Failure(f"displaced: {displaced}")
        note(f"{errors} errors")


@pytest.mark.parametrize("turn", range(3))
def test_no_byte_changes_after_a_completion(logs, note, device, turn):
    """Eight QPs on one SRQ, whose NIC dies amid loss, delay and reordering: no byte of a buffer
    changes once its completion could be polled."""
    program = compile_c("srq_settled", "-libverbs")
    seed = options.SEED + turn
    with Fabric(logs) as fabric:
        for fault in SRQ_FAULTS:
            fabric.fault(fault)
        process = fabric.run("a", [program, seed], "a-srq")
        wait_until(lambda: process.ended() or "moving" in process.output(), 60, "messages arrive")
        fabric.fault("nic a/1 dead")
        process.expect_success(60)
        if not fabric.events("switch"):
            raise Failure("no QP switched")
        note(f"seed {seed}: {process.output().splitlines()[-1]}")
