"""A process of the machine that knows everything but the key forges control messages while traffic
flows: nothing happens.

helpers/unknown_source.py sends them, as another user where the test runs as root. In the
emulated network the NICs take no datagram from a port that is none of a NIC's: what is sent
there is counted as `strangers`. On interfaces (`--nics`) it reaches the control endpoint, whose
seal alone keeps it out: it is counted as `forged`. That the same messages do harm under the
right seal is shown in crates/failover/shift/src/tests.rs.
"""

import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lib.cc import compile_c
from lib.fabric import UNBROKEN, Fabric
from lib.paths import ROOT
from lib.ports import free_port, listens
from lib.process import Failure, wait_until
from lib.roce import FIRST_PORT, UD_SEND_ONLY
from lib.users import USERS, can_be_others

SECONDS = 4
# Of thousands of datagrams, what must be counted: some find no room in a socket or a receive ring
# that is full.
LEAST = 1000
NOBODY = USERS[0]
QPS = 2
# The first byte of the directory's values, and what each further port of a NIC takes there.
VERSION, PORT_BYTES = b"\x07", 22
# An IPv4 address as a GID.
V4_PREFIX = bytes(10) + b"\xff\xff"
ETH_P_IP = 0x0800
# Messages to record, and how long the peer is stopped for it at most: it must not count as dead.
ENOUGH = 4
STOPPED_SECONDS = 2


class Directory:
    """What the directory of a runtime folder holds, read from the bytes of its file: a key lies
    there before its value."""

    def __init__(self, fabric):
        self.bytes = (fabric.path / "directory" / "data.mdb").read_bytes()

    def end(self, name: str) -> dict:
        """The end of a logical QP with the address `IP:QPN`."""
        gid, qpn = name.rsplit(":", 1)
        gid, qpn = V4_PREFIX + ipaddress.IPv4Address(gid).packed, int(qpn)
        key = re.escape(gid + struct.pack(">I", qpn))
        found = re.search(key + VERSION + rb"\0{7}.{8}(.{12})\0{4}", self.bytes, re.DOTALL)
        if not found:
            raise Failure(f"{name} is not in the directory")
        incarnation, connection = struct.unpack("<QI", found[1])
        return {"gid": gid.hex(), "qpn": qpn, "incarnation": incarnation, "connection": connection}

    def nics(self, incarnation: int) -> list:
        """Where the NICs of a process take control messages: address, port, QPN."""
        best = []
        key = re.escape(struct.pack(">Q", incarnation))
        for found in re.finditer(key + VERSION + rb"(.)\0\0.{12}", self.bytes, re.DOTALL):
            nics, at = [], found.end()
            for number in range(found[1][0]):
                index, gid, _address, qpn, _key_set, _lid, length = struct.unpack_from(
                    "<I16s16sIHHB", self.bytes, at
                )
                at += 45 + length
                at += 1 + PORT_BYTES * self.bytes[at]
                if index != number or gid[:12] != V4_PREFIX:
                    nics = []  # the remains of an older version
                    break
                if qpn:
                    nics.append(
                        (str(ipaddress.IPv4Address(gid[12:])), FIRST_PORT + (qpn >> 16), qpn)
                    )
            best = max(best, nics, key=len)
        if not best:
            raise Failure(f"process {incarnation:#x} is not in the directory")
        return best


class Recorder:
    """The control datagrams that cross the loopback interface, where this user may see them."""

    def __init__(self, victims):
        self.qpns = {qpn for victim in victims for _, _, qpn in victim["nics"]}
        try:
            self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_IP))
            self.socket.bind(("lo", ETH_P_IP))
            self.socket.settimeout(0.2)
        except OSError:
            self.socket = None

    def record(self, seconds: float) -> list:
        """The messages until a few are there, or of so many seconds, as hexadecimal text."""
        messages, end = set(), time.monotonic() + seconds
        while self.socket and len(messages) < ENOUGH and time.monotonic() < end:
            try:
                packet = self.socket.recv(65536)
            except OSError:
                continue
            bth = packet[(packet[0] & 15) * 4 + 8 :]
            datagram = packet[9] == 17 and bth and bth[0] == UD_SEND_ONLY
            if datagram and int.from_bytes(bth[5:8], "big") in self.qpns:
                pad = bth[1] >> 4 & 3
                messages.add(bth[20 : len(bth) - 4 - pad].hex())
        return sorted(messages)


def start(fabric, logs, nics: dict):
    """A verifier at each end: host b listens. With `nics`, on those addresses, else on the hosts
    of the emulated network."""
    program, port, programs = compile_c("verifier", "-libverbs"), free_port(), {}
    for host in "ba":
        meet = ["--listen", port] if host == "b" else ["--connect", f"127.0.0.1:{port}"]
        files = ["--status-file", logs / f"{host}.status", "--stop-file", logs / "stop"]
        line = [program, *meet, "--qps", QPS, "--seconds", 120, *files]
        if nics:
            line = [UNBROKEN, "run", "--nics", ",".join(nics[host]), "--", *line]
            programs[host] = fabric.start(f"{host}-verifier", line)
        else:
            programs[host] = fabric.run(host, line, f"{host}-verifier")
        if host == "b":
            server = programs[host]
            listening = lambda: server.ended() or listens(server.pid, port)
            wait_until(listening, 20, "the verifier listens")
    return programs


def verified(logs) -> list:
    """Messages that the ends have verified so far."""
    try:
        return [
            json.loads((logs / f"{host}.status").read_text())["verified_messages"] for host in "ab"
        ]
    except (OSError, ValueError):
        return [0, 0]


def ready(fabric, programs) -> list:
    """The QPs, once all of them are protected."""
    if any(program.ended() for program in programs.values()):
        raise Failure("a verifier ended early")
    qps = fabric.status()["qps"]
    return qps if len(qps) == 2 * QPS and all(qp["protected"] for qp in qps) else None


def attack(fabric, logs, plan) -> dict:
    """Runs the unknown source; gives what it sent, and what answers it got."""
    with tempfile.TemporaryDirectory(prefix="unbroken-test-source-") as folder:
        home = Path(folder)
        home.chmod(0o755)
        (home / "lib").mkdir(mode=0o755)
        for file in ("e2e/helpers/unknown_source.py", "lib/__init__.py", "lib/roce.py"):
            shutil.copy(ROOT / "tests" / file, home / file.removeprefix("e2e/helpers/"))
        (home / "plan.json").write_text(json.dumps(plan))
        (home / "result.json").touch()
        for path in home.rglob("*.*"):
            path.chmod(0o644)
        line = [
            sys.executable,
            home / "unknown_source.py",
            home / "plan.json",
            home / "result.json",
        ]
        if can_be_others() and shutil.which("setpriv"):
            os.chown(home / "result.json", NOBODY, -1)
            line = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *line]
        source = fabric.start("unknown-source", line)
        source.expect_success(SECONDS + 30)
        return json.loads((home / "result.json").read_text())


def addresses(on_interfaces: bool) -> tuple:
    """An address that is nobody's, and with `on_interfaces` those of the NICs of each host."""
    third = f"127.{180 + os.getpid() % 50}.{1 + os.getpid() // 50 % 250}"
    nics = {"a": [f"{third}.1", f"{third}.2"], "b": [f"{third}.3", f"{third}.4"]}
    return f"{third}.9", nics if on_interfaces else {}


def find_victims(fabric, qps) -> list:
    """Both ends of each QP, and where they take control messages."""
    directory, victims = Directory(fabric), []
    for qp in qps:
        own, peer = directory.end(qp["own"]), directory.end(qp["peer"])
        victims.append({"own": own, "peer": peer, "nics": directory.nics(own["incarnation"])})
    return victims


def record_messages(programs, victims) -> list:
    """Control messages on the wire: a peer that is stopped for a while is asked whether it
    lives, by an end that just then has something on its way to it."""
    for stopped in "baba":
        os.kill(programs[stopped].pid, signal.SIGSTOP)
        recorded = Recorder(victims).record(STOPPED_SECONDS)
        os.kill(programs[stopped].pid, signal.SIGCONT)
        if recorded:
            return recorded
    return []


@pytest.mark.parametrize(
    "on_interfaces",
    [
        pytest.param(False, id="emulated network"),
        pytest.param(True, id="interfaces", marks=pytest.mark.smoke),
    ],
)
def test_forged_control_messages(logs, note, on_interfaces):
    nobodys, nics = addresses(on_interfaces)
    with Fabric(logs) as fabric:
        programs = start(fabric, logs, nics)
        qps = wait_until(lambda: ready(fabric, programs), 20, "all QPs protected")
        victims = find_victims(fabric, qps)
        recorded = record_messages(programs, victims)
        wait_until(lambda: ready(fabric, programs), 20, "all QPs protected")
        # From an address that is nobody's, and from the peer's.
        sources = [nobodys, qps[0]["own"].rsplit(":", 1)[0]]
        plan = {
            "victims": victims,
            "recorded": recorded,
            "sources": sources,
            "seconds": SECONDS,
            "seed": 7,
        }
        before = verified(logs)
        result = attack(fabric, logs, plan)
        status, after = fabric.status(), verified(logs)
        qps = ready(fabric, programs)
        (logs / "stop").touch()
        for program in programs.values():
            program.expect_success(60)
        if any(now <= then for now, then in zip(after, before)):
            raise Failure(f"no traffic meanwhile: {before} messages before, {after} after")
        events = [e for e in fabric.events() if e["event"] in ("switch", "give-up", "unprotected")]
        if events or not qps or any(qp["epoch"] for qp in qps):
            raise Failure(f"a forged message was obeyed: {events}, {qps}")
        note(check_counts(result, status, on_interfaces))
        if os.geteuid() == 0 and not recorded:
            raise Failure("no control message was recorded")


def check_counts(result, status, on_interfaces) -> str:
    """Fails unless the datagrams were counted, and none was answered."""
    count = {
        "forged": sum(process["forged"] for process in status["processes"]),
        "strangers": sum(nic["strangers"] for nic in status["nics"]),
    }
    sent, answers = sum(result["sent"].values()), result["answers"]
    figures = f"{sent} datagrams {result['sent']}, counted {count}"
    if answers:
        raise Failure(f"the source got {len(answers)} answers, first {answers[0]}; {figures}")
    counted, other = ("forged", "strangers") if on_interfaces else ("strangers", "forged")
    if count[counted] < max(LEAST, sent / 4) or count[other]:
        raise Failure(f"they are not counted as {counted}: {figures}")
    return figures
