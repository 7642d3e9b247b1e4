"""`unbroken sdr probe`: what it measures on a path that loses, when it ends, and what it
refuses."""

import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import time
from pathlib import Path

import pytest

from lib.fabric import UNBROKEN
from lib.lossy import LossyPath
from lib.ports import free_port
from lib.process import Failure, Skip, ticks, wait_until

SECONDS = 90
# Of a probe: bits a second, seconds of a trial, trials, and payloads.
RATE, TRIAL, TRIALS, PAYLOADS = 8_000_000, 0.5, 2, (1024, 4096)


def probe(*options, fails=False):
    """`unbroken sdr probe`: its output, and how long it took; with `fails`, its error."""
    began = time.monotonic()
    done = subprocess.run(
        [str(w) for w in [UNBROKEN, "sdr", "probe", *options]],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if (done.returncode != 0) != fails:
        raise Failure(f"exit status {done.returncode}: {done.stdout[-500:]} {done.stderr[-1000:]}")
    return done.stderr if fails else done.stdout, time.monotonic() - began


@contextlib.contextmanager
def far_end():
    """The far end of a probe: its port of the loopback device, and its process."""
    port = free_port()
    words = [UNBROKEN, "sdr", "probe", "--listen", f"127.0.0.1:{port}", "--for", "60s"]
    process = subprocess.Popen([str(w) for w in words])
    bound = f"0100007F:{port:04X} "
    try:
        wait_until(lambda: bound in Path("/proc/net/udp").read_text(), 20, "the far end listens")
        yield port, process
    finally:
        process.kill()
        process.wait()


def overflowed(*ports):
    """Datagrams that the UDP sockets at these ports of the loopback had no room for."""
    lines = [line.split() for line in Path("/proc/net/udp").read_text().splitlines()[1:]]
    return sum(int(line[-1]) for line in lines if int(line[1].rsplit(":", 1)[1], 16) in ports)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(0.0, id="none"),
        pytest.param(0.02, id="2%"),
        pytest.param(0.1, id="10%", marks=pytest.mark.smoke),
    ],
)
def test_measures_loss(logs, note, loss):
    """What the probe reports as lost is what the path has lost, at no more than its rate, in no
    more than its time."""
    payloads = ",".join(map(str, PAYLOADS))
    rate = f"{RATE // 1_000_000}M"
    measure = f"--rate {rate} --trial {TRIAL}s --trials {TRIALS} --payloads {payloads}"
    options = measure.split()
    with far_end() as (port, _), LossyPath(port, loss) as path:
        output, took = probe("--to", f"127.0.0.1:{path.port}", "--json", *options)
        came, lost, more = dict(path.came), dict(path.lost), overflowed(port, path.port)
        if took > TRIAL * TRIALS * len(PAYLOADS) + 15:
            raise Failure(f"it took {took:.1f} s")
        text, _ = probe("--to", f"127.0.0.1:{path.port}", *options)
    trials = [json.loads(line) for line in output.splitlines()]
    if [(t["trial"], t["payload_bytes"]) for t in trials] != [
        (t, p) for t in range(TRIALS) for p in PAYLOADS
    ]:
        raise Failure(f"not these trials: {output}")
    for payload in PAYLOADS:
        of = [t for t in trials if t["payload_bytes"] == payload]
        sent, missed = sum(t["sent"] for t in of), sum(t["lost"] for t in of)
        if any(8 * payload * (t["sent"] - 1) > 2 * RATE * TRIAL for t in of) or sent < 20:
            raise Failure(f"not at its rate: {of}")
        if any(abs(t["loss"] - t["lost"] / t["sent"]) > 1e-9 for t in of):
            raise Failure(f"loss is not lost over sent: {of}")
        # On a busy machine sockets lose some, too.
        if sent < came.get(payload, 0) or not 0 <= missed - lost.get(payload, 0) <= more:
            raise Failure(
                f"{missed} of {sent} lost, it reports; the path lost {lost.get(payload, 0)} of "
                f"{came.get(payload, 0)}, sockets {more}"
            )
    sent, missed = sum(t["sent"] for t in trials), sum(t["lost"] for t in trials)
    if abs(missed / sent - loss) > 0.03 + more / sent:
        raise Failure(f"{missed} of {sent} lost, of a path that loses {loss:.0%}")
    # What it says to a person leads to `unbroken model`.
    advice = re.search(r"next: unbroken model --bandwidth (\S+) --rtt … --loss (\S+) ", text)
    if not advice:
        raise Failure(f"no advice: {text}")
    model = f"model --bandwidth {advice[1]} --rtt 25ms --loss {advice[2]} --size 1M --json"
    done = subprocess.run(
        [UNBROKEN, *model.split()],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=logs,
    )
    if done.returncode != 0:
        raise Failure(f"the advice is not taken: {done.stderr}")
    note(
        f"{missed} of {sent} lost, {sum(lost.values())} by the path, {more} by sockets; advice: "
        f"{advice[2]}"
    )


def test_ends_in_time():
    """A slow probe ends in its time, too; and where nobody answers, it reports that."""
    slow = ["--rate", "1K", "--payloads", "4096", "--trial", "300ms", "--trials", "1"]
    output, took = probe("--json", *slow)
    if json.loads(output)["sent"] != 1 or took > 10:
        raise Failure(
            f"{output} after {took:.1f} s: a datagram of 4096 bytes takes 33 s at that rate, the "
            "trial 0.3 s"
        )
    output, took = probe("--to", f"127.0.0.1:{free_port()}", *slow, fails=True)
    if "sdr probe --listen" not in output or took > 10:
        raise Failure(f"after {took:.1f} s: {output}")


@pytest.mark.root
def test_forged_datagrams(note):
    """A datagram that seems to come from the far end itself makes it talk to itself no more than
    once, and nothing that it says is longer than what it was asked; an unknown source does not
    spoil a count."""
    if os.geteuid() != 0:
        raise Skip("only root forges addresses")
    with far_end() as (port, process):
        before = ticks(process.pid)
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
            for kind in range(4):
                for pad in (0, 8, 100):
                    raw.sendto(
                        udp(port, port, b"ubp2" + bytes(12) + bytes([kind]) + bytes(pad)),
                        ("127.0.0.1", 0),
                    )
                    raw.sendto(
                        udp(port, port, b"ubpr" + bytes(12) + bytes([kind]) + bytes(pad)),
                        ("127.0.0.1", 0),
                    )
        time.sleep(2)
        spent = ticks(process.pid) - before
        # One that answers itself takes all of a core that it can get.
        if spent > 10:
            raise Failure(f"it has worked for {spent} ticks, in 2 s, on 24 forged datagrams")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unknown:
            unknown.connect(("127.0.0.1", port))
            unknown.settimeout(0.2)
            for magic in (b"ubp2", b"ubpr"):
                for pad in range(12):
                    asked = magic + bytes(12) + b"\1" + bytes(pad)
                    unknown.send(asked)
                    with contextlib.suppress(TimeoutError):
                        if len(answer := unknown.recv(4096)) > len(asked):
                            raise Failure(f"{len(answer)} bytes for {len(asked)}")
    note(f"{spent} ticks in 2 s")


def udp(source, to, content):
    """A UDP packet of the loopback, from whoever it is said to come from."""
    here = bytes([127, 0, 0, 1])
    size = 28 + len(content)
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, size, 0, 0, 64, 17, 0, here, here)
    return head + struct.pack("!HHHH", source, to, 8 + len(content), 0) + content


@pytest.mark.smoke
def test_bad_input_is_refused():
    """Bad input is answered by what would be right."""
    for options, words in [
        (["--rate", "2G"], "at most 1G"),
        (["--rate", "50MB/s"], "bits a second"),
        (["--rate", "0"], "0"),
        (["--payloads", "63"], "64 to 65000"),
        (["--payloads", "1024,65001"], "64 to 65000"),
        (["--trials", "0"], "1..=10000"),
        (["--trial", "2w"], "2w"),
        (["--trial", "2h"], "an hour at most"),
        (["--trial", "20m"], "an hour at most"),
        (["--for", "61m"], "an hour at most"),
        (["--to", "nowhere"], "socket address"),
        (["--to", "127.0.0.1:1", "--listen", "127.0.0.1:1"], "cannot be used with"),
        (["--listen", "192.0.2.1:7600"], "cannot listen there"),
    ]:
        output, _ = probe(*options, fails=True)
        if words not in output:
            raise Failure(f"{options}: '{words}' is not in: {output}")
