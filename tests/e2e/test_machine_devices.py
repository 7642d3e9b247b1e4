"""Devices of the machine, protected, on any machine: a libibverbs of the tests whose devices are
softnic's plain ones (lib/machine.py). What the kernel's rxe is like: test_devices.py, in a VM.
"""

import pytest

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.machine import GID_INDEX, MachineFabric
from lib.process import Failure, wait_until
from lib.streams import UNTIL_STOPPED
from lib.verifier import KINDS, report, start, verified

WAIT_SECONDS = 30
# A GID that a port has beside the one by which the directory has it.
LINK_LOCAL_INDEX = 1
# Bytes that say that a NIC carries a stream.
FLOWS = 4_000_000
STREAMS = {
    "write": ("ib_write_bw", []),
    "send": ("ib_send_bw", []),
    "read": ("ib_read_bw", []),
    "write-64-qps": ("ib_write_bw", ["-s", 4096, "-q", 64]),
}
FAULTS = ["nic a/0 down", "nic b/0 down", "nic a/0 dead", "nic b/0 dead", "cable a/0 cut"]
SMOKE = [("write", "nic a/0 down"), ("send", "nic b/0 dead")]


def carried(fabric, host: str) -> dict:
    """Bytes of the application that each NIC of a host has sent or got."""
    return {
        name: nic["tx_payload_bytes"] + nic["rx_payload_bytes"]
        for name, nic in fabric.nics().items()
        if name.startswith(f"{host}/")
    }


def flows_elsewhere(fabric, processes, left: str):
    """Waits until the NICs of host a but this one have carried a stream since now."""
    others = lambda: sum(n for name, n in carried(fabric, "a").items() if name != left)
    first = others()
    there = lambda: any(p.ended() for p in processes) or others() - first > FLOWS
    wait_until(there, WAIT_SECONDS, f"bytes on other NICs than {left}")
    if others() - first <= FLOWS:
        raise Failure("a program has ended before its bytes came over other NICs")


def pair(fabric, tool, arguments):
    """A client on a and a server on b, whose queue pairs are all protected."""
    server, client = fabric.pair(tool, ["-F", *arguments])
    protected = lambda: (qps := fabric.status()["qps"]) and all(qp["protected"] for qp in qps)
    wait_until(lambda: client.ended() or protected(), WAIT_SECONDS, "they are protected")
    return server, client


@pytest.mark.parametrize(
    "stream, fault",
    [
        pytest.param(stream, fault, marks=pytest.mark.smoke if (stream, fault) in SMOKE else ())
        for stream in STREAMS
        for fault in FAULTS
    ],
)
def test_survives(logs, stream, fault):
    """The stream goes on over the other devices."""
    tool, arguments = STREAMS[stream]
    with MachineFabric(logs, "--nics", "2") as fabric:
        server, client = pair(fabric, tool, ["-D", UNTIL_STOPPED, *arguments])
        fabric.fault(fault)
        flows_elsewhere(fabric, [client, server], "a/0")
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        if not any(e["kind"] == "passive" for e in fabric.events("switch")):
            raise Failure(f"no passive switch: {fabric.events()}")


@pytest.mark.parametrize(
    "fault", ["nic a/0 dead", pytest.param("nic b/0 down", marks=pytest.mark.smoke)]
)
def test_survives_by_another_gid(logs, fault):
    """Ports have several GIDs, and peers name a QP by the one that its program chose: here not the
    one by which the directory has the port."""
    with MachineFabric(logs, "--nics", "2") as fabric:
        arguments = ["-D", UNTIL_STOPPED, "-x", LINK_LOCAL_INDEX]
        server, client = pair(fabric, "ib_write_bw", arguments)
        fabric.fault(fault)
        flows_elsewhere(fabric, [client, server], "a/0")
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)


@pytest.mark.parametrize("fault", ["nic a/0 down", "nic b/0 down", "cable a/0 cut"])
def test_addresses_that_nobody_answers_hold_nothing_up(logs, monkeypatch, fault):
    """Each NIC has a network of its own. To ask for an address that is not there takes the kernel
    seconds (here six), and a switch does not wait for that."""
    monkeypatch.setenv("TEST_PROVIDER_RAILS_MS", "6000")
    with MachineFabric(logs, "--nics", "2") as fabric:
        server, client = pair(fabric, "ib_write_bw", ["-D", UNTIL_STOPPED])
        fabric.fault(fault)
        flows_elsewhere(fabric, [client, server], "a/0")
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        assert [e for e in fabric.events("switch") if e["kind"] == "passive"], fabric.events()


@pytest.mark.parametrize("fault", ["down", "dead"])
def test_comes_home(logs, fault):
    """A link that is back is used again, by planned switches; so is a device that was reset."""
    with MachineFabric(logs, "--nics", "2") as fabric:
        server, client = pair(fabric, "ib_write_bw", ["-D", UNTIL_STOPPED])
        fabric.fault(f"nic a/0 {fault}", "--for", "1s")
        planned = lambda: [e for e in fabric.events("switch") if e["kind"] == "planned"]
        wait_until(lambda: client.ended() or planned(), WAIT_SECONDS, "it comes home")
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        if any(e["replayed"] for e in planned()) or not planned():
            raise Failure(f"{fabric.events('switch')}")


def test_survives_while_programs_sleep(logs):
    """Both ends wait for events of completion channels."""
    with MachineFabric(logs, "--nics", "2") as fabric:
        server, client = pair(fabric, "ib_send_bw", ["-n", 30_000, "-e"])
        fabric.fault("nic b/0 down")
        flows_elsewhere(fabric, [client, server], "a/0")
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)


def test_without_failover_it_ends(logs):
    """What these tests are worth. (The same devices, one by one, as the program's own.)"""
    with Fabric(logs, "--device", "plain", "--nics", "2") as fabric:
        args = ["-F", "-n", 2_000_000, "-x", GID_INDEX]
        server, client = fabric.pair("ib_write_bw", args, failover=False)
        busy = lambda: client.ended() or fabric.nics()["a/0"]["tx_payload_bytes"] > FLOWS
        wait_until(busy, WAIT_SECONDS, "it flows")
        fabric.fault("nic a/0 dead")
        with pytest.raises(Failure):
            client.expect_success(WAIT_SECONDS)


@pytest.mark.smoke
def test_every_byte_is_right(logs, note, monkeypatch):
    """A program that verifies all that it gets, through one fault of each kind."""
    monkeypatch.setattr(Fabric, "stand_in", MachineFabric)
    with MachineFabric(logs, "--nics", "4") as fabric:
        program = compile_c("verifier", "-libverbs")
        args = ["--device", "unb0", "--gid-index", GID_INDEX, "--qps", 2]
        ends = start(fabric, logs, program, *args)

        def more(count=200):
            goals = {host: verified(logs, host) + count for host in "ab"}
            enough = lambda: any(end.ended() for end in ends.values()) or all(
                verified(logs, host) >= goal for host, goal in goals.items()
            )
            wait_until(enough, WAIT_SECONDS, f"{count} messages more at both ends")

        more()
        for kind in KINDS:
            what, state = kind.split()
            fabric.fault(f"{what} {'rail0' if what == 'switch' else 'a/0'} {state}")
            more()
            fabric.clear()
            more()
        (logs / "stop").touch()
        for end in ends.values():
            end.expect_success(WAIT_SECONDS)
        total = sum(report(end)["verified_messages"] for end in ends.values())
        note(f"{total} messages, {len(fabric.events('switch'))} switches")


@pytest.mark.smoke
def test_a_switch_waits_for_no_address(logs, note):
    """What a device has to ask the network for, so that peers can be told of a switch, was asked
    for while everything worked. (Each answer takes 0.4 s here.)"""
    with MachineFabric(logs, "--nics", "2") as fabric:
        made = logs / "address-handles"
        fabric.env |= {"TEST_PROVIDER_AH_MS": "400", "TEST_PROVIDER_AH_FILE": str(made)}
        server, client = pair(fabric, "ib_write_bw", ["-D", UNTIL_STOPPED])
        # Each end asks for the peer's two NICs from each of its own two.
        ready = lambda: made.exists() and made.stat().st_size >= 8
        wait_until(lambda: client.ended() or ready(), WAIT_SECONDS, "eight addresses are known")
        fabric.fault("nic a/0 dead")
        flows_elsewhere(fabric, [client, server], "a/0")
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        slowest_us = max(e["switch_us"] for e in fabric.events("switch"))
        note(f"{slowest_us / 1000:.0f} ms")
        if slowest_us > 300_000:
            raise Failure(f"a switch took {slowest_us / 1000:.0f} ms")


@pytest.mark.parametrize("transport", ["UD", "UC"])
def test_other_transports_pass_through(logs, transport):
    with MachineFabric(logs) as fabric:
        server, client = fabric.pair("ib_send_bw", ["-c", transport, "-n", 5000, "-s", 2048])
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        if carried(fabric, "a")["a/0"] < 5000 * 2048:
            raise Failure(f"{carried(fabric, 'a')}")


def test_devices_are_shown_as_they_are(logs):
    """What `ibv_devinfo -v` says is what the provider says, but for what Unbroken keeps back."""
    with Fabric(logs, "--device", "plain") as plain, MachineFabric(logs) as machine:
        said = []
        for fabric in plain, machine:
            process = fabric.run("a", ["ibv_devinfo", "-v"], f"{type(fabric).__name__}")
            process.expect_success(WAIT_SECONDS)
            # Each fabric has addresses of its own; memory windows and device memory are not
            # offered (docs/guide/hardware.md). The board's name is read from /sys, where Unbroken
            # shows the machine's devices as the kernel does: these are not the kernel's.
            hidden = ("run --", "guid", "GID[", "max_mw", "device_cap_flags", "MEM_")
            hidden += ("device memory", "board_id")
            lines = process.output().splitlines()
            said.append([line for line in lines if line and not any(h in line for h in hidden)])
        if said[0] != said[1]:
            different = [pair for pair in zip(*said, strict=False) if pair[0] != pair[1]]
            raise Failure(f"{different[:5]}")


@pytest.mark.smoke
def test_a_device_that_is_not_there_is_named(logs):
    with MachineFabric(logs) as fabric:
        process = fabric.run("a", ["true"], devices="mlx5_9")
        with pytest.raises(Failure):
            process.expect_success(WAIT_SECONDS)
        if "no RDMA device 'mlx5_9'" not in process.output():
            raise Failure(process.output())
