"""Devices of the machine in several networks: which addresses they are reached by, which of them
reach each other, and what becomes of them. The devices are those of lib/machine.py
(tests/c/provider_knobs.c).
"""

import pytest

from lib.machine import GID_INDEX
from lib.ports import free_port, listens
from lib.process import Failure, wait_until
from lib.streams import UNTIL_STOPPED
from test_machine_limits import FLOWS, RC, WAIT_SECONDS, Devices, end

# A table of 84 GIDs. (perftest takes an index of 64 at most, so another program has it.)
MANY = 80
PINGPONGS = 10_000_000


def survives(fabric, arguments=(), to="a/1"):
    """A stream that goes on when its NIC dies."""
    arguments = ["-D", UNTIL_STOPPED, *arguments]
    server, client = fabric.protected_pair("ib_write_bw", arguments)
    fabric.fault("nic a/0 dead")
    fabric.goes_to(to, client, server)
    end(client, server)
    return client


@pytest.mark.parametrize(
    "others, chosen",
    [
        pytest.param(2, None, marks=pytest.mark.smoke, id="as-the-program"),
        pytest.param(2, str(GID_INDEX + 2), id="index"),
        pytest.param(2, "fd00::/8,127.0.0.0/8", id="network"),
    ],
)
def test_peers_are_reached_in_the_programs_network(logs, others, chosen):
    """The first GIDs of each port are of a network where nobody answers: a VLAN, say."""
    with Devices(logs, "--nics", "2", FOREIGN_GIDS=str(others)) as fabric:
        fabric.gid_index = GID_INDEX + others
        if chosen:
            fabric.env["UNBROKEN_GID"] = chosen
        survives(fabric)


def test_a_gid_may_be_far_down_the_table(logs):
    with Devices(logs, "--nics", "2", FOREIGN_GIDS=str(MANY)) as fabric:
        fabric.gid_index = 0
        arguments = ["-g", GID_INDEX + MANY, "-s", 4096, "-n", PINGPONGS]
        server, client = fabric.pair("ibv_rc_pingpong", arguments)
        ready = lambda: (qps := fabric.status()["qps"]) and all(qp["protected"] for qp in qps)
        wait_until(lambda: client.ended() or ready(), WAIT_SECONDS, "they are protected")
        fabric.fault("nic a/0 dead")
        fabric.goes_to("a/1", client, server, amount=FLOWS // 20)
        assert not client.ended() and not server.ended()


@pytest.mark.parametrize(
    "value, words",
    [
        ("eth0", "UNBROKEN_GID='eth0': an index of the GID table"),
        ("10.5.0.0/16", "has no GID that UNBROKEN_GID allows; it has 0: "),
        ("200", "has no GID that UNBROKEN_GID allows"),
    ],
)
def test_a_wrong_choice_is_told(logs, value, words):
    with Devices(logs) as fabric:
        fabric.env["UNBROKEN_GID"] = value
        program = fabric.run("a", ["ibv_devinfo"])
        program.wait(WAIT_SECONDS)
        assert words in program.output(), program.output()


def test_probes_go_by_the_class_of_the_data(logs):
    """Service level and traffic class are the program's: the network may treat others otherwise."""
    with Devices(logs, "--nics", "2") as fabric:
        survives(fabric, ["-S", 3, "--tclass", 104])
        for device in "unb0", "unb1":
            assert fabric.asked("ah", device, "sl=3", "class=104"), fabric.asked("ah")


def test_a_network_that_does_not_lead_to_the_peer_has_no_backups(logs):
    """Of `--devices all` one is for storage, say: it is not made ready, and not gone to."""
    with Devices(logs, "--nics", "3", ALONE="unb1") as fabric:
        survives(fabric, to="a/2")
        moved = {e["to"] for e in fabric.events("switch")}
        assert moved and not any("unb1" in path for path in moved), moved
        assert not fabric.asked("qp", "unb1", RC), fabric.asked("qp", "unb1")


def test_another_device_of_the_same_name_is_not_taken(logs):
    """A NIC that has died comes back as another one; then as itself."""
    guids = logs / "other-guids"
    with Devices(logs, "--nics", "2", GUID_FILE=str(guids)) as fabric:
        server, client = fabric.protected_pair("ib_write_bw", ["-D", UNTIL_STOPPED])
        guids.touch()
        fabric.fault("nic a/0 dead")
        fabric.goes_to("a/1", client, server)
        fabric.clear()
        told = lambda: client.ended() or "unb0 is another device now" in client.output()
        wait_until(told, WAIT_SECONDS, "it is told")
        planned = lambda: [e for e in fabric.events("switch") if e["kind"] == "planned"]
        assert not planned(), planned()
        guids.unlink()
        wait_until(lambda: client.ended() or planned(), WAIT_SECONDS, "it comes home")
        end(client, server)
        assert planned() and client.output().count("is another device now") == 1, client.output()


def pair_with_one_nic(fabric, tool, arguments, client_devices="all"):
    """A server whose host has one NIC, and a client."""
    port = free_port()
    command = [tool, "-d", "unb0", "-x", GID_INDEX, "-F", "-p", port, *arguments]
    server = fabric.run("b", command, devices="unb0")
    wait_until(lambda: server.ended() or listens(server.pid, port), 20, "it listens")
    return server, fabric.run("a", [*command, "127.0.0.1"], devices=client_devices)


@pytest.mark.smoke
def test_a_peer_with_one_nic_is_enough(logs):
    """The end that has two goes to its other one."""
    with Devices(logs, "--nics", "2") as fabric:
        server, client = pair_with_one_nic(fabric, "ib_write_bw", ["-D", UNTIL_STOPPED])
        ready = lambda: (qps := fabric.status()["qps"]) and all(qp["protected"] for qp in qps)
        wait_until(lambda: client.ended() or ready(), WAIT_SECONDS, "both are protected")
        fabric.fault("nic a/0 dead")
        fabric.goes_to("a/1", client, server)
        end(client, server)


def test_one_nic_at_both_ends_protects_nothing(logs):
    """That is told, and the error is the program's, as soon as without us."""
    with Devices(logs, "--nics", "2") as fabric:
        server, client = pair_with_one_nic(fabric, "ib_write_bw", ["-n", 2_000_000], "unb0")
        why = lambda: [qp["why"] for qp in fabric.status()["qps"]]
        reason = "this host and the peer's have one NIC each"
        wait_until(lambda: client.ended() or why() == [reason] * 2, WAIT_SECONDS, "it is told")
        fabric.fault("nic a/0 dead")
        with pytest.raises(Failure):
            client.expect_success(10)
