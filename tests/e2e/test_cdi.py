"""Containers that get NICs by the Container Device Interface: podman runs programs of a clean
Debian, unmodified and with nothing of ours in the image, by what `unbroken cdi generate` writes.

podman and crun run in a mount namespace of their own with a file system of cgroups that crun takes
(it refuses those of two versions side by side), an empty /run, and storage of their own.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lib.clean_debian import made
from lib.fabric import Fabric
from lib.ports import free_port
from lib.process import Failure, Skip, wait_until

IMAGE = "localhost/clean-debian"
# Crun can set no others where this user may not raise limits.
LIMITS = ["--ulimit", "nofile=1024:4096", "--ulimit", "nproc=1000:1000"]
OWN = (
    "mount --make-rprivate / && umount -R /sys/fs/cgroup && "
    "mount -t cgroup2 none /sys/fs/cgroup && mount -t tmpfs none /run && mkdir /run/cdi && "
    'cp "$0" /run/cdi/unbroken.json && exec "$@"'
)
SECONDS = 120
STREAM_BYTES = 20_000_000


class Podman:
    """podman with an image of a clean Debian, and the devices of a specification."""

    def __init__(self, folder: Path):
        if shutil.which("podman") is None or shutil.which("crun") is None:
            raise Skip("'podman' or 'crun' is missing (Debian packages podman, crun)")
        self.folder, self.spec = folder, folder / "unbroken.json"
        self.spec.write_text("{}")
        tree = subprocess.Popen(["tar", "-C", made(), "-c", "."], stdout=subprocess.PIPE)
        line = self.line(["import", "-q", "-", IMAGE])
        done = subprocess.run(line, stdin=tree.stdout, capture_output=True, text=True)
        tree.stdout.close()
        if tree.wait() != 0 or done.returncode != 0:
            raise Skip(f"podman imports no image here: {done.stderr.strip()[-300:]}")
        probe = self.run("true")
        if probe.returncode != 0:
            raise Skip(f"podman runs no container here: {probe.stderr.strip()[-300:]}")

    def line(self, args: list) -> list:
        """The command line of podman with these arguments."""
        own = ["unshare", "--mount", "sh", "-c", OWN, self.spec]
        places = ["--root", self.folder / "storage", "--runroot", self.folder / "run"]
        return [str(w) for w in [*own, "podman", "--cgroup-manager=cgroupfs", *places, *args]]

    def container(self, *args, device: str | None = None, env: tuple = ()) -> list:
        """The command line of a container that runs a program with a device."""
        devices = ["--device", f"unbroken.dev/nic={device}"] if device else []
        settings = [word for setting in env for word in ("--env", setting)]
        own = ["--rm", "--network", "host", "--cgroups=disabled", *LIMITS]
        return self.line(["run", *own, *devices, *settings, IMAGE, *args])

    def run(self, *args, **more) -> subprocess.CompletedProcess:
        """Runs a container to its end."""
        line = self.container(*args, **more)
        return subprocess.run(line, capture_output=True, text=True, timeout=SECONDS)


@pytest.fixture(scope="module")
def podman(tmp_path_factory):
    """podman, whose storage goes with it."""
    if os.geteuid() != 0:
        raise Skip("mount namespaces for podman need root")
    folder = tmp_path_factory.mktemp("podman")
    yield Podman(folder)
    shutil.rmtree(folder, ignore_errors=True)


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
