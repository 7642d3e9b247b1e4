"""The host edge of two hosts, each test with a lab of its own: an uplink is drained, and tenants
are kept apart."""

import json
import subprocess

import pytest

from lib import options
from lib.edge import Lab, Probe, run
from lib.fabric import UNBROKEN, now_us
from lib.ports import free_port
from lib.process import Failure, wait_until

pytestmark = [pytest.mark.edge, pytest.mark.root, pytest.mark.serial]

RULES = "skip_hw" if options.VM else "none"


@pytest.mark.skipif(options.VM, reason="it is routing alone, and tested without a VM")
def test_uplink_is_drained_and_put_back(logs, note):
    """An uplink is taken out of service, and put back, while a probe runs each way: nothing is
    lost. BFD is slow here, so that a busy machine is not a fault."""
    with Lab(logs, 2, "--bfd-ms", 1000) as lab:
        wait_until(lab.both_ways_back, 60, "both ways are there")
        note(drain_and_back(lab))


def drain_and_back(lab):
    """Drains p1 of host 1 under two probes, then puts it back under two more."""

    def unharmed(probes, what):
        for probe in probes:
            rows = probe.rows()
            if rows[-1][0] != len(rows):
                raise Failure(
                    f"{rows[-1][0] - len(rows)} of {rows[-1][0]} datagrams were lost when {what}"
                )

    both_ways = lambda seconds: [
        Probe(lab, 1, 2, seconds, free_port()),
        Probe(lab, 2, 1, seconds, free_port()),
    ]
    probes = both_ways(5)
    lab.edge("h1", "drain", "p1")
    if lab.routes_over("h1", "10.255.0.2") != {"p2"}:
        raise Failure("routes still lead over the drained uplink")
    refused = subprocess.run(
        [*lab.within("h1"), str(UNBROKEN), "edge", "drain", "p2"], capture_output=True, text=True
    )
    if refused.returncode == 0 or "only uplink" not in refused.stderr:
        raise Failure("the last uplink could be drained")
    unharmed(probes, "p1 was drained")
    # BGP takes some seconds to meet its neighbour again.
    probes = both_ways(12)
    lab.edge("h1", "drain", "--undo", "p1")
    wait_until(lab.both_ways_back, 60, "both ways are back")
    back_us = now_us()
    unharmed(probes, "p1 was put back")
    if back_us > min(probe.began_us + 1_000_000 * probe.seconds for probe in probes):
        raise Failure("the probes ended before p1 was back")
    return "nothing lost in either direction, nor when it is put back"


def received(namespace: str) -> int:
    """Packets that came to a namespace's virtual function."""
    shown = json.loads(run("ip", "-n", namespace, "-s", "-j", "link", "show", "dev", "vf0"))
    return shown[0]["stats64"]["rx"]["packets"]


def learned(lab, host: str, other: str) -> bool:
    """Whether EVPN has told a host of the second tenant's address at another."""
    table = run("bridge", "-n", lab.node(host), "fdb", "show", "dev", "vni200")
    flood, address = f"00:00:00:00:00:00 dst {other} ", f"dst {other} self extern_learn"
    return flood in table and address in table


def ping(namespace: str, to: str, count: int) -> bool:
    """Whether of so many echo requests any is answered."""
    within = ["ip", "netns", "exec", namespace]
    command = ["ping", "-c", str(count), "-i", "0.01", "-W", "2", to]
    return subprocess.run([*within, *command], capture_output=True).returncode == 0


def test_two_tenants_with_equal_addresses(logs, note):
    """Two tenants with equal MAC and IP addresses: each reaches its own, and neither sees a frame
    of the other."""
    with Lab(logs, 2, "--second-tenant", rules=RULES) as lab:
        first, second = lab.node("h1"), lab.node("h1") + "b"
        first_away, second_away = lab.node("h2"), lab.node("h2") + "b"
        # A function with IPv6 asks for routers by itself for some seconds, and its own tenant hears
        # that: no frame of the other's.
        for namespace in (first, first_away, second, second_away):
            no_ipv6 = "sysctl -qw net.ipv6.conf.vf0.disable_ipv6=1"
            run("ip", "netns", "exec", namespace, *no_ipv6.split())
        wait_until(
            lambda: learned(lab, "h1", "10.255.0.2") and learned(lab, "h2", "10.255.0.1"),
            30,
            "EVPN of tenant 200",
        )
        for tenant, of_the_other in ((first, second_away), (second, first_away)):
            before = received(of_the_other)
            if not ping(tenant, "192.168.9.2", 20):
                raise Failure(f"{tenant} does not reach its own tenant")
            if leaked := received(of_the_other) - before:
                raise Failure(f"{of_the_other} saw {leaked} frames of the other tenant")
        # The host is in no tenant's network either, even for one who knows the address of its
        # bridge.
        bridge = json.loads(run("ip", "-n", first, "-j", "link", "show", "dev", "unb200"))
        known = ("lladdr", bridge[0]["address"])
        run("ip", "-n", second, "route", "add", "10.255.0.1", "dev", "vf0")
        run("ip", "-n", second, "neigh", "add", "10.255.0.1", *known, "dev", "vf0")
        if ping(second, "10.255.0.1", 3):
            raise Failure("the host answers a tenant on its bridge")
        if lab.flower:
            carried = [lab.rule_bytes(1, 2), lab.rule_bytes(1, 2, "rep1")]
            if min(carried) == 0:
                raise Failure(f"the rules of the tenants have carried {carried} bytes")
            note("flower rules carry them")
