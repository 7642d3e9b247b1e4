"""Ends in containers: each in its own PID, mount and user namespace, with its own /dev/shm, and
nothing shared but the runtime folder.

So both programs have pid 1, neither sees the other in /proc, and neither could use the other's
shared memory if it lay anywhere but in the runtime folder. Also: what a runtime folder does that
has no room left (in a small tmpfs in a mount namespace of its own), and that a container which does
not see a fabric's folder leaves it its addresses.

Needs user namespaces (as root or not) and util-linux; skips where they are not allowed.
"""

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lib.fabric import RUNTIME_ROOT, Fabric
from lib.process import Failure, Process, Skip, wait_until
from lib.traffic import survive

NAMESPACES = ["--user", "--map-root-user", "--pid", "--mount", "--fork"]
QPS = 2
STREAM = ["-F", "-s", 65536, "-q", QPS]
# The registry of octets, which all users and containers of a machine share:
# crates/nic/fabric/src/octet.rs.
OCTETS = Path("/tmp/unbroken-octets")
# A stream, as opposed to what set-up exchanges.
STREAM_BYTES = 2_000_000
STOPPED_SECONDS = 3
# Failover waits for a silent peer for 20 s; of a dead one it must know sooner.
ERROR_SECONDS = 15
TINY = "size=24m,mode=0700"


def check_possible():
    """Skips where such namespaces cannot be made."""
    for tool in ("unshare", "nsenter", "mount"):
        if shutil.which(tool) is None:
            raise Skip(f"'{tool}' is missing (Debian package util-linux or mount)")
    probe = ["unshare", *NAMESPACES, "--mount-proc", "mount", "-t", "tmpfs", "none", "/dev/shm"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise Skip(f"namespaces cannot be made here: {done.stderr.strip()}")


class Containers(Fabric):
    """Each program is process 1 of a container of its own. The commands look from outside."""

    # Not in /dev/shm, of which each container has its own.
    root = None

    def __init__(self, logs, *settings):
        check_possible()
        super().__init__(logs, *settings)

    def program_line(self, args):
        inside = 'mount -t tmpfs none /dev/shm && exec "$@"'
        return [
            "unshare",
            *NAMESPACES,
            "--mount-proc",
            "--kill-child",
            "sh",
            "-c",
            inside,
            "sh",
            *args,
        ]

    @staticmethod
    def inner(process: Process) -> int:
        """The pid, as seen from outside, of the program in a container."""
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if len(children) != 1:
            raise Failure(f"the container of {process.name} has the processes {children}")
        return int(children[0])

    def signal(self, process: Process, sig):
        """Sends a signal to the program in a container."""
        subprocess.run(["kill", f"-{sig.name[3:]}", str(self.inner(process))], check=True)


def stream(fabric, seconds, tool="ib_write_bw"):
    """A stream that flows, with both ends protected."""
    server, client = fabric.pair(tool, [*STREAM, "-D", seconds])
    came = lambda: fabric.nics()["b/0"]["rx_payload_bytes"]
    flows = lambda: client.ended() or server.ended() or came() > STREAM_BYTES
    wait_until(flows, 20, "traffic on rail 0")
    for process in (server, client):
        if process.ended():
            end = process.output()[-300:]
            raise Failure(f"{process.name} ended before any traffic flowed: {end}")
    return server, client


def backup_bytes(fabric) -> int:
    """The payload that reached host b by other NICs than the first."""
    return fabric.elsewhere("b/0", "rx_payload_bytes")


def both_protected(fabric):
    """Fails unless every QP of both ends is protected."""
    status = fabric.status()
    ends = sorted((qp["host"], qp["protected"], qp["why"]) for qp in status["qps"])
    if ends != [(host, True, "") for host in "ab" for _ in range(QPS)]:
        errors = [process["error"] for process in status["processes"]]
        raise Failure(f"not both ends are protected: {ends}; {errors}")
    return status


def test_two_containers(logs):
    """Both ends are process 1 and share neither /proc nor /dev/shm; the status shows both; they
    can find each other."""
    with Containers(logs) as fabric:
        server, client = stream(fabric, 3)
        status = both_protected(fabric)
        if [process["pid"] for process in status["processes"]] != [1, 1]:
            raise Failure(f"processes {status['processes']}")
        if (fabric.path / "shm").is_symlink():
            raise Failure("the pages lie elsewhere")
        refused = fabric.command("fabric", "down")
        if refused.returncode == 0 or "1" not in refused.stderr:
            raise Failure("a fabric that containers use was removed")
        for process in (client, server):
            process.expect_success(30)
        if fabric.events("switch"):
            raise Failure("a switch without a fault")


@pytest.mark.parametrize(
    "tool", [pytest.param("ib_write_bw", marks=pytest.mark.smoke), "ib_send_bw"]
)
def test_nic_dead(logs, note, tool):
    """A NIC dies: the bytes go on by another one."""
    with Containers(logs) as fabric:
        note(survive(fabric, tool, STREAM, 3, "nic a/0 dead", False, gaps=False).note)


def test_peer_stopped_during_a_switch(logs, note):
    """The peer stands still while the QPs switch: it is waited for."""
    with Containers(logs) as fabric:
        server, client = stream(fabric, STOPPED_SECONDS + 4)
        fabric.signal(server, signal.SIGSTOP)
        fabric.fault("nic a/0 dead")
        time.sleep(STOPPED_SECONDS)
        if client.ended() or fabric.events("give-up"):
            raise Failure(f"given up: {fabric.events('give-up')}")
        if backup_bytes(fabric) > STREAM_BYTES:
            raise Failure("a stopped peer took part in a switch")
        fabric.signal(server, signal.SIGCONT)
        for process in (client, server):
            process.expect_success(30)
        carried = backup_bytes(fabric)
        if carried < STREAM_BYTES:
            raise Failure(f"only {carried} bytes after it went on")
        note(f"{carried / 1e9:.2f} GB after {STOPPED_SECONDS} s")


def test_peer_killed(logs, note):
    """The peer is killed: the other end gets its error."""
    with Containers(logs) as fabric:
        server, client = stream(fabric, 60)
        fabric.signal(server, signal.SIGKILL)
        killed = time.monotonic()
        client.expect_error(ERROR_SECONDS)
        if not fabric.events("give-up"):
            raise Failure("no give-up event")
        left = [process["pid"] for process in fabric.status()["processes"]]
        if left:
            raise Failure(f"processes {left} are still shown")
        note(f"error after {client.ended_at - killed:.1f} s")


def test_octet_out_of_sight(logs, note):
    """A fabric is made in a container that does not see another's runtime folder: that one keeps
    its octet."""
    check_possible()
    if RUNTIME_ROOT is None:
        raise Skip("there is no /dev/shm to hide")
    with Fabric(logs, "--nics", "2") as seen, Containers(logs) as fabric:
        files = [(f, f.read_bytes()) for f in OCTETS.iterdir() if f.is_file()]
        entries = [f for f, text in files if text.split(b"\0")[0] == str(seen.path).encode()]
        if len(entries) != 1:
            raise Failure(f"{seen.path} has the entries {entries}")
        made = fabric.run("a", ["ibv_devinfo", "-d", "unb0"])
        made.expect_success(20)
        if not entries[0].exists():
            raise Failure(f"{entries[0]} was taken for stale where its folder is not seen")
        note(f"{entries[0].name} is there")


class Tiny(Fabric):
    """A fabric whose runtime folder is a small tmpfs, in a mount namespace that its programs and
    commands enter."""

    root = None

    def __init__(self, logs):
        check_possible()
        super().__init__(logs)
        hold = f'mount -t tmpfs -o {TINY} none "$0" && echo mounted && exec sleep 600'
        unshare = ["unshare", "--user", "--map-root-user", "--mount"]
        self.holder = self.start("holder", [*unshare, "sh", "-c", hold, self.path])
        mounted = lambda: "mounted" in self.holder.output() or self.holder.ended()
        wait_until(mounted, 20, "a small tmpfs")

    def program_line(self, args):
        enter = ["nsenter", "-t", str(self.holder.pid), "--user", "--preserve-credentials"]
        return [*enter, "--mount", *args]

    command_line = program_line

    def fill(self):
        """Leaves no byte, also in the last page of the log, which then ends in the middle of a
        line."""
        fill = 'cd "$0"; cat /dev/zero > ballast; cat /dev/zero >> events.jsonl; ! echo x > more'
        line = self.program_line(["sh", "-c", fill, self.path])
        subprocess.run(line, check=True, capture_output=True, timeout=60)

    def make_room(self):
        """Takes the ballast out."""
        subprocess.run(self.program_line(["rm", self.path / "ballast"]), check=True, timeout=20)


def test_no_room_left_in_mid_stream(logs, note):
    """The folder fills up in mid-stream, then a NIC dies: no room for an event, and the traffic
    goes on. Later events are written again."""
    with Tiny(logs) as fabric:
        server, client = stream(fabric, 6)
        # Room for this: the fault must be set before the log is full.
        fabric.fault("nic a/0 dead", "--at", "2s")
        fabric.fill()
        unlogged = fabric.command("fault", "set", "nic b/3 down")
        message = unlogged.stderr
        if "No space left" not in message or "set all the same" not in message:
            raise Failure(f"no room for an event: status {unlogged.returncode}: {message}")
        if fabric.nics()["b/3"]["state"] != "down":
            raise Failure("a fault that cannot be logged is not set")
        for process in (client, server):
            process.expect_success(30)
        carried = backup_bytes(fabric)
        if carried < STREAM_BYTES:
            raise Failure(f"only {carried} bytes by other NICs after the NIC died")
        if fabric.events("switch"):
            raise Failure("there was room for an event: the folder was not full")
        fabric.make_room()
        fabric.clear()
        if not fabric.events("fault-clear"):
            raise Failure("no event is written once there is room again")
        note(f"{carried / 1e9:.2f} GB by other NICs, no event")


@pytest.mark.smoke
def test_no_room_from_the_start(logs, note):
    """A folder that is full from the start: a program that wants devices gets an error that says
    so, not a SIGBUS."""
    with Tiny(logs) as fabric:
        fabric.command("status")
        fabric.fill()
        program = fabric.run("a", ["ibv_devinfo", "-d", "unb0"], env={"UNBROKEN_LOG": "1"})
        program.expect_error(20)
        if "No space left" not in program.output() or str(fabric.path) not in program.output():
            raise Failure(f"what is full is not said: {program.output()}")
        done = fabric.command("fault", "set", "nic a/0 dead")
        if done.returncode <= 0 or "No space left" not in done.stderr:
            raise Failure(f"fault set: status {done.returncode}: {done.stderr}")
        fabric.make_room()
        again = fabric.run("a", ["ibv_devinfo", "-d", "unb0"], "again")
        again.expect_success(20)
        note(program.output().splitlines()[0])
