"""Bad input of every kind: a clear error or a dropped packet, never a crash, never a write
outside; and what runs goes on."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time

import pytest

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.paths import ROOT
from lib.ports import free_port, listens
from lib.process import Failure, wait_until
from lib.roce import FIRST_PORT, roce_packet, sending_socket

STREAM_SECONDS = 4
ANY_CALLS_SECONDS = 3
# tests/c/bad_access.c waits for at most this long for one completion.
BAD_ACCESS_SECONDS = 90


def expect(done, status_ok, *words):
    """The command ended with an error (no signal) and its message has all the words."""
    text = done.stderr + done.stdout
    if done.returncode <= 0 and not status_ok:
        raise Failure(f"{' '.join(done.args[1:])}: status {done.returncode} where an error was due")
    missing = [w for w in words if w not in text]
    if missing:
        raise Failure(
            f"{' '.join(done.args[1:])}: its message lacks {missing}: {text.strip()[:300]}"
        )


def test_pytorch_that_is_not_there():
    """`import unbroken.torch` says what to install."""
    hidden = "import sys; sys.modules['torch'] = None; import unbroken.torch"
    done = subprocess.run(
        [sys.executable, "-c", hidden],
        env={"PYTHONPATH": str(ROOT / "python" / "unbroken")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    expect(done, False, "ModuleNotFoundError", "pip install torch", "FILE.whl[torch]")


def wait_for_traffic(fabric, client, least_bytes):
    """Waits until so many bytes have come to host b."""
    came = lambda: fabric.nics()["b/0"]["rx_payload_bytes"]
    wait_until(lambda: client.ended() or came() > least_bytes, 20, "traffic")


@pytest.mark.smoke
def test_wrong_keys_bounds_and_rights(logs, note):
    program = compile_c("bad_access", "-libverbs")
    with Fabric(logs) as fabric:
        port = free_port()
        owner = fabric.run("b", [program, "--listen", port], "b-owner")
        wait_until(lambda: owner.ended() or listens(owner.pid, port), 20, "the owner listens")
        requester = fabric.run("a", [program, "--connect", f"127.0.0.1:{port}"], "a-requester")
        requester.expect_success(BAD_ACCESS_SECONDS)
        owner.expect_success(10)
        if fabric.events("switch"):
            raise Failure("a mistake of the application made a QP switch")
        note(requester.output().splitlines()[-1])


MISTAKES = ["psn-ahead", "psn-behind", "psn-heard", "psn-once", "qpn", "qpn-other"]
MISTAKES += ["reads", "gid", "length"]


@pytest.mark.parametrize("what", MISTAKES)
def test_mistake_of_the_program(logs, note, device, what):
    """The program gets an error for its mistake, in the time of its transport, and no QP
    switches."""
    program = compile_c("mistakes", "-libverbs")
    with Fabric(logs) as fabric:
        process = fabric.run("a", [program, what], "a-mistakes")
        process.expect_success(60)
        switches = fabric.events("switch")
        if switches:
            raise Failure(f"a mistake of the application made a QP switch: {switches[0]}")
        note(process.output().splitlines()[-2 if what[:3] in ("psn", "qpn") else -1])


class Garbage:
    """Packets that nobody asked for, sent to the NICs of a fabric from another of its hosts."""

    def __init__(self, targets, qpns, source, seed):
        self.random = random.Random(seed)
        self.targets = targets
        self.qpns = qpns
        self.socket = sending_socket(source)
        self.sent = 0

    def packet(self, target):
        """Random bytes, a truncated packet, a damaged one, or one that is right up to the ICRC
        but makes no sense."""
        rng = self.random
        kind = rng.randrange(4)
        if kind == 0:
            sizes = [0, 1, 4, 11, 12, 16, 28, 60, 1024, 4096, 9000, rng.randrange(65000)]
            return rng.randbytes(rng.choice(sizes))
        # Those of QPs, and those beside them, which control endpoints have.
        qpn = (target[1] - FIRST_PORT) << 16 | rng.choice(self.qpns) + rng.randrange(-8, 9) & 0xFFFF
        payload = rng.randbytes(rng.choice([0, 4, 8, 16, 28, 64, rng.randrange(4200)]))
        valid = [0, 4, 6, 10, 12, 16, 17, 100]
        opcode = rng.randrange(256) if rng.random() < 0.5 else rng.choice(valid)
        flags, psn_word = rng.choice([0x40, 0xC0, 0x70]), rng.getrandbits(32) & 0x80FFFFFF
        whole = roce_packet(
            opcode, flags, qpn, psn_word, payload, self.socket.getsockname(), target
        )
        if kind == 1:
            return whole[: rng.randrange(len(whole))]
        if kind == 2:
            at = rng.randrange(len(whole))
            return whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :]
        return whole

    def burst(self, count):
        """Sends some."""
        for _ in range(count):
            target = self.random.choice(self.targets)
            try:
                self.socket.sendto(self.packet(target), target)
                self.sent += 1
            except OSError:
                # Too long for the interface, or nobody listens there any more (ECONNREFUSED).
                pass


def test_garbage_packets(logs, note):
    """Garbage at the UDP ports of both ends while ib_send_bw runs."""
    with Fabric(logs) as fabric:
        server, client = fabric.pair(
            "ib_send_bw", ["-F", "-s", 65536, "-q", 2, "-b", "-D", STREAM_SECONDS]
        )
        wait_for_traffic(fabric, client, 0)
        nics = fabric.nics()
        addresses = [nics[f"{host}/{number}"]["addr"] for host in "ab" for number in (0, 1)]
        targets = [(address, FIRST_PORT + slot) for address in addresses for slot in (0, 1)]

        def count(*counters):
            return sum(nic[name] for nic in fabric.nics().values() for name in counters)

        counters = ["drops", "icrc_errors", "strangers"]
        before = count(*counters)
        qpns = [qp["qp"] for qp in fabric.status()["qps"]]
        # From a NIC that nobody has to do with, and from the peer's address.
        senders = [
            Garbage(targets, qpns, nics[nic]["addr"], seed)
            for nic, seed in (("c/0", 7), ("a/0", 8))
        ]
        while not (client.ended() and server.ended()):
            for sender in senders:
                sender.burst(20)
            time.sleep(0.005)
        client.expect_success(20)
        server.expect_success(5)
        sent = sum(s.sent for s in senders)
        dropped, strangers = count(*counters) - before, count("strangers")
        figures = (
            f"{sent} packets of garbage, {dropped} counted as dropped, {strangers} as strangers"
        )
        if dropped < sent / 10 or strangers == 0:
            raise Failure(f"too few are counted: {figures}")
        if fabric.events("switch"):
            raise Failure("garbage from an unknown source made a QP switch")
        note(figures)


def test_damaged_directory(logs, note):
    """A directory file full of something else, from the start: it is made anew, so that QPs are
    protected, or it is named."""
    with Fabric(logs) as fabric:
        folder = fabric.path / "directory"
        folder.mkdir(mode=0o700)
        (folder / "data.mdb").write_bytes(random.Random(1).randbytes(65536))
        server, client = fabric.pair("ib_write_bw", ["-F", "-s", 65536, "-D", 2])
        wait_for_traffic(fabric, client, 1e6)
        protected = [qp["protected"] for qp in fabric.status()["qps"]]
        codes = client.wait(30), server.wait(30)
        if min(codes) < 0:
            raise Failure(f"killed by a signal: {codes}")
        told = "directory" in client.output() + server.output() + str(fabric.events())
        if not told and not (protected and all(protected)):
            raise Failure(f"statuses {codes}, nothing names the directory, protected: {protected}")
        note(f"statuses {codes}, protected: {protected}")


def test_truncated_directory(logs, note):
    """A directory that is cut short after its use."""
    with Fabric(logs) as fabric:
        for turn in range(2):
            server, client = fabric.pair("ib_write_bw", ["-F", "-s", 65536, "-n", 1000])
            codes = client.wait(30), server.wait(30)
            if min(codes) < 0:
                raise Failure(f"killed by a signal: {codes}")
            data = next((fabric.path / "directory").rglob("data.mdb"), None)
            if data is None:
                raise Failure("no data.mdb in the directory")
            if turn == 0:
                os.truncate(data, 5000)
        note(f"statuses {codes}")


@pytest.mark.parametrize("size", [0, 5000])
def test_directory_truncated_in_use(logs, note, size):
    """A directory that is cut short while programs have it open: those go on, through a fault
    too, and whoever comes then is told."""
    with Fabric(logs) as fabric:
        server, client = fabric.pair(
            "ib_write_bw", ["-F", "-s", 65536, "-q", 2, "-D", STREAM_SECONDS]
        )
        wait_for_traffic(fabric, client, 1e6)
        os.truncate(fabric.path / "directory" / "data.mdb", size)
        # One that comes now must read it, with QPs of its own.
        late = fabric.pair("ib_send_bw", ["-F", "-s", 65536, "-n", 1000])
        late_codes = [p.wait(30) for p in late]
        fabric.fault("nic a/0 dead")
        codes = client.wait(30), server.wait(30)
        if min(*codes, *late_codes) < 0:
            raise Failure(f"killed by a signal: {codes}, those that came later {late_codes}")
        if any(codes):
            raise Failure(f"those that ran ended with {codes}")
        if fabric.elsewhere("b/0", "rx_payload_bytes") < 1e6:
            raise Failure("no traffic over another NIC after the fault")
        late_pids = [p.pid for p in late]
        events = [e for e in fabric.events() if e["pid"] in late_pids]
        later = f"those that came later ended with {late_codes}"
        if "director" not in "".join(p.output() for p in late) + json.dumps(events):
            raise Failure(f"nothing says that the directory is damaged; {later}")
        note(f"{codes}; {later}")


@pytest.mark.smoke
def test_wrong_fabric_file(logs):
    """A wrong line in fabric.toml: file, line and what would be right; no program crashes."""
    with Fabric(logs) as fabric:
        fabric.status()
        expect(fabric.command("fabric", "up"), True)
        file = fabric.path / "fabric.toml"
        right = file.read_text()
        for wrong, words in (
            (right.replace("nics = 4", "nics = 400", 1), ["400", "64"]),
            (right.replace("number = 2", "number = 1", 1), ["number 1"]),
            (right.replace("octet =", "oktet =", 1), ["oktet"]),
            (right + "\n[[host\n", []),
            ("\x00\xff" * 50, []),
        ):
            file.write_text(wrong, encoding="latin-1")
            # What needs the fabric fails and names file and line.
            done = fabric.command("fault", "list")
            if done.returncode == 0:
                raise Failure(f"'fault list' is content with {file.read_bytes()[:400]}")
            expect(done, False, *words)
            # What is not text has no lines.
            if not re.search(r"fabric\.toml:\d+: ", done.stderr) and "UTF-8" not in done.stderr:
                raise Failure(f"file and line are not named: {done.stderr.strip()}")
            program = fabric.run("a", ["ibv_devinfo"], "devinfo")
            program.expect_error(20)
            if "fabric.toml" not in program.output():
                raise Failure(
                    f"ibv_devinfo does not say that fabric.toml is wrong: {program.output()[:300]}"
                )
        file.write_text(right)
        fabric.run("a", ["ibv_devinfo"], "devinfo").expect_success(20)


@pytest.mark.smoke
def test_wrong_names(logs):
    """Unknown hosts, NICs, faults and devices are named, with what would be right."""
    with Fabric(logs) as fabric:
        expect(fabric.command("fault", "set", "nic z/0 dead"), False, "z", "a")
        expect(fabric.command("fault", "set", "nic a/9 dead"), False, "a/9")
        expect(fabric.command("fault", "set", "switch rail99 down"), False, "rail99")
        expect(fabric.command("fault", "set", "nic a/0 asleep"), False, "asleep", "dead", "down")
        expect(fabric.command("fault", "set", "loss a/0 101%"), False, "101%")
        expect(fabric.command("fault", "set", "--at", "soon", "nic a/0 dead"), False, "soon")
        expect(fabric.command("fault", "clear", "nic z/0"), False, "z")
        expect(fabric.command("run", "--host", "z", "--", "true"), False, "'z'", "a")
        expect(fabric.command("run", "--", "/no/such/program"), False, "/no/such/program")
        expect(fabric.command("run", "--lib", "/no/such.so", "--", "true"), False, "/no/such.so")
        expect(fabric.command("frobnicate"), False, "frobnicate")
        if fabric.events("fault"):
            raise Failure("a wrong command made a fault")
        program = fabric.run("a", ["ib_write_bw", "-d", "unb9"], "unknown-device")
        program.expect_error(20)
        expect(fabric.command("run", "--nics", "10.0.0.1,eth0", "--", "ibv_devinfo"), False, "eth0")
        foreign = fabric.command("run", "--nics", "192.0.2.1", "--", "ibv_devinfo")
        expect(foreign, False, "192.0.2.1")
        fabric.env |= {"UNBROKEN_LOG": "1", "UNBROKEN_MAP": "0:1,9"}
        expect(
            fabric.command("run", "--", "ibv_devinfo"),
            False,
            "UNBROKEN_MAP",
            "'9' is none of the 4 NICs",
        )


@pytest.mark.parametrize(
    "failover, faults",
    [
        (False, False),
        pytest.param(True, False, marks=pytest.mark.smoke),
        (True, True),
    ],
    ids=["no failover", "failover", "NICs die"],
)
def test_random_calls(logs, note, failover, faults):
    """Random values in every attribute of every verb, also while NICs die and are healed."""
    program = compile_c("any_calls", "-libverbs")
    with Fabric(logs) as fabric:
        process = fabric.run(
            "a", [program, "--seconds", ANY_CALLS_SECONDS], "a-any-calls", failover
        )
        nic = 0
        while faults and not process.ended():
            nic = 1 - nic
            fabric.fault(f"nic a/{nic} dead")
            time.sleep(0.2)
            fabric.clear()
            time.sleep(0.1)
        process.expect_success(ANY_CALLS_SECONDS + 90)
        result = json.loads(process.output().splitlines()[-1])
        if result["successes"] < 100:
            raise Failure(f"too little works to go wrong: {result}")
        note(
            ", ".join(f"{result[name]} {name}" for name in ("calls", "good", "successes", "rounds"))
        )


def test_names_of_programs_are_shown_and_not_obeyed(logs):
    """A program's name is its user's: whatever is in it, no command tells a terminal what to do."""
    name = logs / 'x\x1b]0;pwned\x07\u202e<b>"y'
    shutil.copy(shutil.which("ibv_rc_pingpong"), name)
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        port = str(free_port())
        fabric.run("b", [name, "-d", "unb0", "-g", "0", "-p", port], name="server")
        known = lambda: [p for p in fabric.status()["processes"] if "pwned" in p["program"]]
        wait_until(known, 20, "the program is in the status")
        fabric.fault("nic b/0 dead")
        commands = [["status"], ["events"], ["health"], ["metrics"], ["fault", "list"]]
        commands += [["status", "--json"], ["health", "--json"], ["events", "--json"]]
        for command in commands:
            printed = (done := fabric.command(*command)).stdout + done.stderr
            if bad := [c for c in printed if ord(c) < 32 and c not in "\n\t" or c in "\x7f\u202e"]:
                raise Failure(f"{command}: {bad} in {printed}")
        if "x\ufffd]0;pwned\ufffd\ufffd<b>" not in fabric.command("status").stdout:
            raise Failure("its name is not shown")
        status = json.loads(fabric.command("status", "--json").stdout)
        if [p["program"] for p in status["processes"]] != [name.name]:
            raise Failure(f"JSON has another name: {status['processes']}")
