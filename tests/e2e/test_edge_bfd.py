"""The last uplink of a host is not given up for BFD alone, which may fail where all else works."""

import json
import os
import signal
from contextlib import contextmanager, nullcontext

import pytest

from lib import options
from lib.edge import Lab, Probe, lab_folder, most_lost, other_uplink, settled
from lib.fabric import now_us
from lib.ports import free_port
from lib.process import Failure, wait_until
from lib.schemas import check_schema

pytestmark = [
    pytest.mark.edge,
    pytest.mark.root,
    pytest.mark.serial,
    pytest.mark.skipif(options.VM, reason="it is routing alone, and tested without a VM"),
]

BFD_MS = 50
# While BFD fails wrongly: how long probes run, and how many of their datagrams in a row may be
# lost, one a millisecond.
WRONG_S = 5
WRONG_LOST = 100


@pytest.fixture(
    scope="module", params=[(), ("--fast-failover",)], ids=["frr-alone", "fast-failover"]
)
def two_hosts(request):
    with Lab(lab_folder("edge_bfd"), 2, "--bfd-ms", BFD_MS, *request.param) as lab:
        yield lab


@pytest.fixture
def lab(two_hosts, logs):
    """The lab, with the logs of a test."""
    two_hosts.logs = logs
    return two_hosts


@contextmanager
def bfdd_stopped(lab, name, sessions):
    """A node's bfdd gets no core until its neighbours have given it up: the node and the peer's
    address of their sessions."""
    pid = lab.daemon(name, "bfdd")
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(
            lambda: all(lab.bfd_down(*session) for session in sessions),
            20,
            f"the neighbours of {name} give it up",
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    yield


@contextmanager
def bfd_muted(lab, name, *uplinks):
    """BFD's packets, and only they, are lost."""
    lab.mute_bfd(name, *uplinks)
    try:
        yield
    finally:
        lab.unmute_bfd(name, *uplinks)


def lost_while_bfd_fails(lab, fault, uplinks, lasting) -> list:
    """The most datagrams in a row that were lost in each direction between hosts 1 and 2."""
    probes = [Probe(lab, 1, 2, WRONG_S, free_port()), Probe(lab, 2, 1, WRONG_S, free_port())]
    wait_until(lambda: lab.bytes("h1", "vf0")[1] > 0, 10, "probes")
    since_us = now_us()
    peers = {f"10.{uplink[1]}.1.0" for uplink in uplinks}

    def noticed():
        events = [e for e in lab.events("h1") if e["event"] == "bfd" and e["state"] == "down"]
        return peers <= {e["peer"] for e in events if e["time_us"] >= since_us}

    def last_way_is_shown():
        status = json.loads(lab.edge("h1", "status", "--json"))
        check_schema("edge-status", status)
        return "10.255.0.2" in status["last_ways"]

    with fault:
        wait_until(noticed, 20, "BFD fails")
        if lasting:
            wait_until(last_way_is_shown, 20, "status shows the last way")
        return [most_lost(probe.rows()) for probe in probes]


def wrongly_dead(lab, fault, uplinks, broken=None, lasting=False):
    """BFD takes uplinks of host 1 for dead that carry everything, while none or `broken`, which is
    dead indeed, is left: what there is carries on. `fault` is a context in which BFD fails;
    `lasting`: until it ends, so that `edge status` can be asked."""
    silent = lab.silenced("t" + broken[1], "h1") if broken else nullcontext()
    with silent:
        left = {other_uplink(broken)} if broken else {"p1", "p2"}
        wait_until(
            lambda: (
                lab.routes_over("h1", "10.255.0.2") == lab.routes_over("h2", "10.255.0.1") == left
            ),
            30,
            f"routes lead over {left}",
        )
        lost = lost_while_bfd_fails(lab, fault, uplinks, lasting)
    settled(lab)
    if max(lost) > WRONG_LOST:
        raise Failure(
            f"{lost} datagrams in a row were lost in the two directions, one a millisecond"
        )
    return f"at most {lost} datagrams in a row lost in the two directions, one a millisecond"


@pytest.mark.parametrize(
    "uplinks, broken", [(["p2"], "p1"), (["p1", "p2"], None)], ids=["last-uplink", "both-uplinks"]
)
def test_packets_of_bfd_are_lost(lab, note, uplinks, broken):
    note(wrongly_dead(lab, bfd_muted(lab, "h1", *uplinks), uplinks, broken, lasting=True))


@pytest.mark.parametrize(
    "node, sessions, uplinks, broken",
    [
        ("h1", [("t1", "10.1.1.1"), ("t2", "10.2.1.1")], ["p1", "p2"], None),
        ("t2", [("h1", "10.2.1.0"), ("h2", "10.2.2.0")], ["p2"], "p1"),
    ],
    ids=["host", "last-switch"],
)
def test_daemon_stands_still(lab, note, node, sessions, uplinks, broken):
    note(wrongly_dead(lab, bfdd_stopped(lab, node, sessions), uplinks, broken))
