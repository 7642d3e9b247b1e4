"""Containers that get NICs by the Container Device Interface: podman runs programs of a clean
Debian, unmodified and with nothing of ours in the image, by what `unbroken cdi generate` writes.
"""

import json
from pathlib import Path

import pytest

from lib.fabric import Fabric
from lib.podman import Podman
from lib.ports import free_port
from lib.process import Failure, wait_until

STREAM_BYTES = 20_000_000


def generate(fabric: Fabric, podman: Podman):
    """Writes the devices of a fabric to where podman looks for them."""
    done = fabric.command("cdi", "generate", "--output", podman.spec)
    if done.returncode != 0:
        raise Failure(done.stderr)


@pytest.mark.root
@pytest.mark.serial
def test_devices_in_containers(podman, logs):
    """All hosts are devices; a container sees the NICs of its own one, and what there is not is
    refused."""
    with Fabric(logs, "--hosts", "left,right", "--nics", "2") as fabric:
        generate(fabric, podman)
        shown = podman.run("ibv_devinfo", device="all", env=("UNBROKEN_HOST=right",))
        assert shown.stdout.count("PORT_ACTIVE") == 2, shown.stdout + shown.stderr
        both = [podman.run("ibv_devinfo", "-v", device=host).stdout for host in ("left", "right")]
        assert both[0] != both[1] and all("unb1" in text for text in both), both
        assert "PORT_ACTIVE" not in podman.run("ibv_devinfo").stdout, "without a device"
        fabric.fault("nic left/1 down")
        assert "PORT_DOWN" in podman.run("ibv_devinfo", "-d", "unb1", device="left").stdout
        # What a static program finds, which the library is not in front of.
        state = "/run/unbroken/sysfs/left/sys/class/infiniband/unb1/ports/1/state"
        outside = podman.run("env", "-u", "LD_PRELOAD", "cat", state, device="left")
        assert outside.stdout == "1: DOWN\n", outside.stdout + outside.stderr
        # Neither has it device nodes, which docs/guide/lab.md says.
        nodes = podman.run("env", "-u", "LD_PRELOAD", "ls", "/dev", device="left").stdout
        assert "null" in nodes and "infiniband" not in nodes, nodes
        refused = podman.run("true", device="middle")
        assert refused.returncode != 0 and "unbroken.dev/nic=middle" in refused.stderr


@pytest.mark.root
@pytest.mark.serial
def test_perftest_between_two_containers_outlives_a_nic(podman, logs, note):
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        generate(fabric, podman)
        program = ["ib_write_bw", "-d", "unb0", "-D", "8", "-F", "-p", free_port()]
        server = fabric.start("server", podman.container(*program, device="b"))
        listens = f":{program[-1]:04X} 00000000:0000 0A"
        ready = lambda: server.ended() or listens in Path("/proc/net/tcp").read_text()
        wait_until(ready, 30, "the server listens")
        client = fabric.start("client", podman.container(*program, "127.0.0.1", device="a"))
        flows = lambda: client.ended() or fabric.nics()["b/0"]["rx_payload_bytes"] > STREAM_BYTES
        wait_until(flows, 30, "traffic on rail 0")
        fabric.fault("nic a/0 dead")
        for end in (client, server):
            end.expect_success(60)
        moved = fabric.nics()["b/1"]["rx_payload_bytes"]
        assert moved > STREAM_BYTES, f"{moved} bytes by the other NIC"
        hosts = {(event["host"], event["from"][-1]) for event in fabric.events("switch")}
        assert {host for host, _ in hosts} == {"a", "b"}, hosts
        note(f"{moved / 1e9:.2f} GB by the other NIC after the fault")


@pytest.mark.smoke
def test_the_specification(logs):
    """What is written is what the format says, and its files are there."""
    with Fabric(logs, "--hosts", "a,b") as fabric:
        spec = json.loads(fabric.command("cdi", "generate").stdout)
        assert spec["cdiVersion"] == "0.5.0" and spec["kind"] == "unbroken.dev/nic"
        assert [device["name"] for device in spec["devices"]] == ["all", "a", "b"]
        mounts = spec["containerEdits"]["mounts"]
        assert all(Path(mount["hostPath"]).exists() for mount in mounts)
        assert Path(mounts[2]["hostPath"]).samefile(fabric.path)
        refused = fabric.command("cdi", "generate", "--lib", "/no/such.so")
        assert refused.returncode == 1 and "/no/such.so" in refused.stderr
