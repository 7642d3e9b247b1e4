#!/usr/bin/env python3
"""SDR for users: the C API and its examples, reliable writes between processes over a network that loses and dies, what they take on a long link beside
the model, and the probe. `--all`: more schemes and losses on the long link (10 minutes).
"""

import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

from lib.cc import FLAGS, compile_c
from lib.fabric import Fabric
from lib.lossy import LossyWay
from lib.ports import free_port
from lib.process import Failure, Skip, wait_until
from lib.suite import BUILD, ROOT, TARGET, Suite

SDK = ["-I", ROOT / "include", "-L", BUILD, "-lunbroken_sdr", f"-Wl,-rpath,{BUILD}"]
SECONDS = 90


def compile_example(name):
    """An example in C, compiled as its users do, and as strictly as our own programs."""
    source, program = ROOT / "crates/sdr/library/examples" / f"{name}.c", TARGET / "tests-c" / f"example-{name}"
    program.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([str(a) for a in ["cc", *FLAGS, "-o", program, source, *SDK]], capture_output=True, text=True)
    if done.returncode != 0:
        raise Failure(f"{source.name} does not compile: {done.stderr[:2000]}")
    return program


def run(fabric, *command):
    """Runs a program to its end in the fabric's folder, without anything preloaded."""
    environment = {"UNBROKEN_RUNTIME": str(fabric.path), "PATH": "/usr/bin:/bin"}
    words = [str(c) for c in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, env=environment)
    if done.returncode != 0:
        raise Failure(f"{words[0]} failed ({done.returncode}): {done.stderr[-2000:]}")
    return done.stdout


PLAIN = ["--device", "plain"]


def c_api(logs, faults, messages, settings=(), length=()):
    """Every function of the header, what it refuses, and messages with their bitmaps, byte by byte; all of one length, if one is given."""
    program = compile_c("sdr", *SDK)
    with Fabric(logs, *settings) as fabric:
        for fault in faults:
            fabric.fault(fault)
        said = run(fabric, program, messages, *length)
    for words in (f"sent {messages} messages", f"received {messages} messages"):
        if words not in said:
            raise Failure(f"'{words}' is not said: {said}")
    return "; ".join(said.splitlines())


def c_reliable(logs, faults, messages, settings=()):
    """Reliable writes by the C API: every scheme, what is refused, deadlines, each byte checked."""
    program = compile_c("sdr_reliable", *SDK)
    with Fabric(logs, *settings) as fabric:
        for fault in faults:
            fabric.fault(fault)
        said = run(fabric, program, messages)
    for scheme in range(5):
        for words in (f"wrote by scheme {scheme}: {messages} messages", f"read by scheme {scheme}: {messages} messages"):
            if words not in said:
                raise Failure(f"'{words}' is not said: {said}")
    again, recovered = (sum(map(int, re.findall(rf"(\d+) {what}", said))) for what in ("chunks again", "recovered"))
    if faults and not (again and recovered):
        raise Failure(f"nothing was sent again, or recovered: {said}")
    return f"{again} chunks again, {recovered} recovered"


def headers(logs):
    """The headers are C++, too."""
    source = logs / "header.cc"
    source.write_text("#include <unbroken/sdr_ext.h>\nint main() { return sdr_last_error()[0]; }\n")
    command = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-o", logs / "header", source, *SDK]
    done = subprocess.run([str(a) for a in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise Failure(done.stderr[:2000])
    subprocess.run([str(logs / "header")], check=True, timeout=SECONDS)


def examples(logs):
    """The example in C and the one in Rust do what they say, and are short."""
    long = [f"{e.name}: {n}" for e in (ROOT / "crates/sdr/library/examples").iterdir()
            if (n := len(e.read_text().splitlines())) > 100]
    if long:
        raise Failure(f"examples are 100 lines at most: {long}")
    with Fabric(logs) as fabric:
        said = run(fabric, compile_example("partial"))
        if "1048576 bytes are in their place" not in said:
            raise Failure(f"the example in C does not end well: {said}")
    rust = subprocess.run(["cargo", "run", "-q", "--release", "--example", "reliable"],
                          capture_output=True, text=True, cwd=ROOT, timeout=600)
    if rust.returncode != 0 or "16 messages of 1 MiB" not in rust.stdout:
        raise Failure(f"the example in Rust does not end well: {rust.stdout} {rust.stderr[-1000:]}")
    return rust.stdout.strip()


def bench(fabric, *options, fails=False):
    """`unbroken sdr bench` between hosts a and b; its object."""
    command = [BUILD / "unbroken", "sdr", "bench", "--runtime", fabric.path, "--json", *options]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=SECONDS)
    if fails:
        if done.returncode == 0:
            raise Failure(f"it ends well: {done.stdout}")
        return done.stderr
    if done.returncode != 0:
        raise Failure(f"{done.stderr[-2000:]}")
    return json.loads(done.stdout)


KEYS = {"scheme", "message_bytes", "chunk_bytes", "mtu_bytes", "channels", "in_flight", "messages", "seconds", "gbit_per_s",
        "messages_per_s", "packets_per_s", "mean_us", "p99_us", "chunks_sent", "chunks_repeated", "chunks_recovered", "packets_late",
        "packets_duplicate", "under_runs", "rtt_us", "verified"}


def writes(logs, scheme, faults, messages, settings=()):
    """Reliable writes between two processes, each byte checked."""
    with Fabric(logs, *settings) as fabric:
        for fault in faults:
            fabric.fault(fault)
        got = bench(fabric, "--scheme", scheme, "--size", "256K", "--chunk", "16K", "--messages", messages, "--in-flight", 4, "--rate",
                    "400M", "--verify")
    if set(got) != KEYS:
        raise Failure(f"the keys of the object differ: {set(got) ^ KEYS}")
    if got["scheme"] != scheme:
        raise Failure(f"the scheme is told as {got['scheme']}, and was asked for as {scheme}")
    if got["messages"] != messages or not got["verified"]:
        raise Failure(f"not all was written: {got}")
    return (f"{got['gbit_per_s']:.2f} Gbit/s, mean {got['mean_us']:.0f} us, {got['chunks_repeated']} again, "
            f"{got['chunks_recovered']} recovered")


# The paper's regime, scaled: a round trip of 19,000 chunks, 8 MiB for its 128 MiB.
LONG = ["--bandwidth", "4G", "--rtt", "156ms", "--mtu", "4K", "--chunk", "4K", "--size", "8M"]
# How far the mean may be from the model's.
NEAR = 0.15
# More of them, for `--all`.
ALL_LONG = [(scheme, loss, 100) for scheme in ("sr-rto", "sr-nack", "mds:32,8", "xor:32,8") for loss in (0, 1e-4, 1e-3, 1e-2)]


def long_link(logs, scheme, loss, messages):
    """Writes of 8 MiB at 4 Gbit/s over 156 ms, one at a time, take what the model says."""
    ask = [BUILD / "unbroken", "model", "predict", scheme, *LONG, "--loss", loss, "--json", "--no-picture"]
    said = subprocess.run([str(w) for w in ask], capture_output=True, text=True, timeout=SECONDS, check=True, cwd=logs)
    model_us = 1e6 * json.loads(said.stdout)["write"]["mean_s"]
    with Fabric(logs) as fabric:
        fabric.fault("delay a/0 78ms")
        if loss:
            fabric.fault(f"loss a/0 {loss * 100:g}% tx")
        got = bench(fabric, "--scheme", scheme, "--size", "8M", "--chunk", "4K", "--mtu", "4K", "--rate", "4G", "--messages", messages, "--in-flight", 1)
    if loss and not got["chunks_repeated"] + got["chunks_recovered"]:
        raise Failure(f"nothing was lost: {got}")
    note = (f"mean of {messages}: {got['mean_us'] / 1e3:.0f} ms, by the model {model_us / 1e3:.0f} ms: {got['mean_us'] / model_us:.2f}; "
            f"{got['chunks_repeated']} again, {got['chunks_recovered']} recovered")
    # The model has a code send all of a submessage again that it could not recover; ours sends what is lost of it.
    may_be_less = scheme.partition(":")[1] and got["chunks_repeated"]
    if got["mean_us"] > (1 + NEAR) * model_us or not may_be_less and got["mean_us"] < (1 - NEAR) * model_us:
        raise Failure(note)
    return note


def link_dies(logs, scheme):
    """The only link dies in mid-message: a clear error by the deadline."""
    with Fabric(logs) as fabric:
        command = [BUILD / "unbroken", "sdr", "bench", "--runtime", fabric.path, "--scheme", scheme, "--size", "1M", "--rate", "50M",
                   "--messages", 1000, "--deadline", "2s"]
        process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            wait_for_traffic(fabric)
            fabric.fault("cable a/0 cut")
            cut = time.monotonic()
            _, error = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
        took = time.monotonic() - cut
    if process.returncode == 0 or "deadline has passed" not in error:
        raise Failure(f"no error says that the deadline has passed: {error}")
    if took > 10:
        raise Failure(f"it took {took:.1f} s")
    return f"error after {took:.1f} s"


def wait_for_traffic(fabric):
    """Until data flows."""
    wait_until(lambda: fabric.nics().get("b/0", {}).get("rx_payload_bytes", 0) > 1e5, 20, "traffic")


def two_nics(logs, scheme):
    """Two channels over two NICs; one dies in mid-message, and every byte comes over the other."""
    with Fabric(logs) as fabric:
        command = [BUILD / "unbroken", "sdr", "bench", "--runtime", fabric.path, "--json", "--scheme", scheme, "--size", "256K", "--chunk",
                   "16K", "--rate", "100M", "--messages", 100, "--in-flight", 2, "--channels", 2, "--nics", "0,1", "--verify"]
        process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            wait_for_traffic(fabric)
            fabric.fault("nic a/0 dead")
            said, error = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    if process.returncode != 0:
        raise Failure(error[-2000:])
    got = json.loads(said)
    if got["messages"] != 100 or not got["verified"]:
        raise Failure(f"not all was written: {got}")
    return f"{got['chunks_repeated']} chunks again"


def wrong_words(logs):
    """What a person gets wrong is answered by what would be right."""
    with Fabric(logs) as fabric:
        for options, words in [
            (["--chunk", "5000B"], "power of two"),
            (["--scheme", "raid"], "sr-rto"),
            (["--size", "0B"], "1B to"),
            (["--rate", "50GB/s"], "bits a second"),
            (["--nics", "9"], "no device unb9"),
        ]:
            error = bench(fabric, *options, fails=True)
            if words not in error:
                raise Failure(f"{options}: '{words}' is not in: {error}")


def probe(*options, fails=False):
    """`unbroken sdr probe`: what it says, and how long it took; with `fails`, its error."""
    began = time.monotonic()
    done = subprocess.run([str(w) for w in [BUILD / "unbroken", "sdr", "probe", *options]], capture_output=True, text=True,
                          timeout=SECONDS)
    if (done.returncode != 0) != fails:
        raise Failure(f"exit status {done.returncode}: {done.stdout[-500:]} {done.stderr[-1000:]}")
    return done.stderr if fails else done.stdout, time.monotonic() - began


@contextlib.contextmanager
def far_end():
    """The far end of a probe: its port of the loopback."""
    with far_process() as (port, _):
        yield port


@contextlib.contextmanager
def far_process():
    """The same, and its process."""
    port = free_port()
    words = [BUILD / "unbroken", "sdr", "probe", "--listen", f"127.0.0.1:{port}", "--for", "60s"]
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


# Of a probe: bits a second, seconds of a trial, trials, and payloads.
RATE, TRIAL, TRIALS, PAYLOADS = 8_000_000, 0.5, 2, (1024, 4096)


def probe_measures(logs, loss):
    """What the probe says is lost is what the way has lost, at no more than its rate, in no more than its time."""
    options = ["--rate", f"{RATE // 1_000_000}M", "--trial", f"{TRIAL}s", "--trials", TRIALS, "--payloads", ",".join(map(str, PAYLOADS))]
    with far_end() as port, LossyWay(port, loss) as way:
        said, took = probe("--to", f"127.0.0.1:{way.port}", "--json", *options)
        came, lost, more = dict(way.came), dict(way.lost), overflowed(port, way.port)
        if took > TRIAL * TRIALS * len(PAYLOADS) + 15:
            raise Failure(f"it took {took:.1f} s")
        text, _ = probe("--to", f"127.0.0.1:{way.port}", *options)
    trials = [json.loads(line) for line in said.splitlines()]
    if [(t["trial"], t["payload_bytes"]) for t in trials] != [(t, p) for t in range(TRIALS) for p in PAYLOADS]:
        raise Failure(f"not these trials: {said}")
    for payload in PAYLOADS:
        of = [t for t in trials if t["payload_bytes"] == payload]
        sent, missed = sum(t["sent"] for t in of), sum(t["lost"] for t in of)
        if any(8 * payload * (t["sent"] - 1) > 2 * RATE * TRIAL for t in of) or sent < 20:
            raise Failure(f"not at its rate: {of}")
        if any(abs(t["loss"] - t["lost"] / t["sent"]) > 1e-9 for t in of):
            raise Failure(f"loss is not lost over sent: {of}")
        # On a busy machine sockets lose some, too.
        if sent < came.get(payload, 0) or not 0 <= missed - lost.get(payload, 0) <= more:
            raise Failure(f"{missed} of {sent} lost, it says; the way lost {lost.get(payload, 0)} of {came.get(payload, 0)}, sockets {more}")
    sent, missed = sum(t["sent"] for t in trials), sum(t["lost"] for t in trials)
    if abs(missed / sent - loss) > 0.03 + more / sent:
        raise Failure(f"{missed} of {sent} lost, of a way that loses {loss:.0%}")
    # What it says to a person leads to `unbroken model`.
    advice = re.search(r"next: unbroken model --bandwidth (\S+) --rtt … --loss (\S+) ", text)
    if not advice:
        raise Failure(f"no advice: {text}")
    model = ["model", "--bandwidth", advice[1], "--rtt", "25ms", "--loss", advice[2], "--size", "1M", "--json"]
    done = subprocess.run([str(w) for w in [BUILD / "unbroken", *model]], capture_output=True, text=True, timeout=SECONDS, cwd=logs)
    if done.returncode != 0:
        raise Failure(f"the advice is not taken: {done.stderr}")
    return f"{missed} of {sent} lost, {sum(lost.values())} by the way, {more} by sockets; advice: {advice[2]}"


def probe_ends(logs):
    """A slow probe ends in its time, too; and where nobody answers, that is said."""
    slow = ["--rate", "1K", "--payloads", "4096", "--trial", "300ms", "--trials", "1"]
    said, took = probe("--json", *slow)
    if json.loads(said)["sent"] != 1 or took > 10:
        raise Failure(f"{said} after {took:.1f} s: a datagram of 4096 bytes takes 33 s at that rate, the trial 0.3 s")
    said, took = probe("--to", f"127.0.0.1:{free_port()}", *slow, fails=True)
    if "sdr probe --listen" not in said or took > 10:
        raise Failure(f"after {took:.1f} s: {said}")


def probe_forged(logs):
    """A datagram that seems to come from the far end itself makes it talk to itself no more than once, and nothing that it says is longer than what it was
    asked; a stranger does not spoil a count."""
    with far_process() as (port, process):
        before = ticks(process.pid)
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
            for kind in range(4):
                for pad in (0, 8, 100):
                    raw.sendto(udp(port, port, b"ubp2" + bytes(12) + bytes([kind]) + bytes(pad)), ("127.0.0.1", 0))
                    raw.sendto(udp(port, port, b"ubpr" + bytes(12) + bytes([kind]) + bytes(pad)), ("127.0.0.1", 0))
        time.sleep(2)
        spent = ticks(process.pid) - before
        # One that answers itself takes all of a core that it can get.
        if spent > 10:
            raise Failure(f"it has worked for {spent} ticks, in 2 s, on 24 forged datagrams")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.connect(("127.0.0.1", port))
            stranger.settimeout(0.2)
            for magic in (b"ubp2", b"ubpr"):
                for pad in range(12):
                    asked = magic + bytes(12) + b"\1" + bytes(pad)
                    stranger.send(asked)
                    with contextlib.suppress(TimeoutError):
                        if len(answer := stranger.recv(4096)) > len(asked):
                            raise Failure(f"{len(answer)} bytes for {len(asked)}")
    return f"{spent} ticks in 2 s"


def udp(source, to, content):
    """A UDP packet of the loopback, from whoever it is said to come from."""
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 28 + len(content), 0, 0, 64, 17, 0, bytes([127, 0, 0, 1]), bytes([127, 0, 0, 1]))
    return head + struct.pack("!HHHH", source, to, 8 + len(content), 0) + content


def ticks(pid):
    """The processor's time that a process has had."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))


def forged_if_root(logs):
    """As root, who alone can forge."""
    if os.geteuid() != 0:
        raise Skip("only root forges addresses")
    return probe_forged(logs)


def probe_refuses(logs):
    """Bad input is answered by what would be right."""
    for options, words in [
        (["--rate", "2G"], "at most 1G"),
        (["--rate", "50MB/s"], "bits a second"),
        (["--rate", "0"], "0"),
        (["--payloads", "63"], "64..=65000"),
        (["--payloads", "1024,65001"], "64..=65000"),
        (["--trials", "0"], "1..=10000"),
        (["--trial", "2h"], "2h"),
        (["--trial", "20m"], "an hour at most"),
        (["--for", "61m"], "an hour at most"),
        (["--to", "nowhere"], "socket address"),
        (["--to", "127.0.0.1:1", "--listen", "127.0.0.1:1"], "cannot be used with"),
        (["--listen", "192.0.2.1:7600"], "cannot listen there"),
    ]:
        said, _ = probe(*options, fails=True)
        if words not in said:
            raise Failure(f"{options}: '{words}' is not in: {said}")


def main():
    words = [word for word in sys.argv[1:] if word != "--all"]
    suite = Suite("sdr", words)
    suite.case("C API, quiet", c_api, [], 100)
    suite.case("C API, 5 % lost", c_api, ["loss a/0 5% tx", "loss b/0 5% tx"], 50)
    suite.case("C API, plain devices, 5 % lost", c_api, ["loss a/0 5% tx", "loss b/0 5% tx"], 50, PLAIN)
    # Fewer packets than the immediate has fragments: the others come without data.
    suite.case("C API, plain devices, short messages, 5 % lost", c_api, ["loss a/0 5% tx", "loss b/0 5% tx"], 100, PLAIN, [4156])
    suite.case("C API, reliable writes, quiet", c_reliable, [], 20)
    suite.case("C API, reliable writes, 5 % lost", c_reliable, ["loss a/0 5% tx", "loss b/0 5% tx"], 40)
    suite.case("C API, reliable writes, plain devices, 5 % lost", c_reliable, ["loss a/0 5% tx", "loss b/0 5% tx"], 40, PLAIN)
    suite.case("headers in C++", headers)
    suite.case("examples", examples)
    for scheme in ("sr-rto", "sr-nack", "mds:16,8", "xor:16,8", "adaptive"):
        suite.case(f"{scheme}, quiet", writes, scheme, [], 200)
        suite.case(f"{scheme}, 1 % lost", writes, scheme, ["loss a/0 1% tx", "loss b/0 1% tx"], 100)
        suite.case(f"{scheme}, bursts, reordered, twice", writes, scheme,
                   ["burst-loss a/0 2% burst=6 tx", "reorder a/0 2% by=1ms tx", "duplicate a/0 2% tx"], 100)
        suite.case(f"{scheme}, 20 ms, 1 % lost", writes, scheme, ["delay a/0 20ms tx", "loss a/0 1% tx"], 40)
        if "--all" in sys.argv:
            suite.case(f"{scheme}, 100 ms, 10 % lost", writes, scheme, ["delay a/0 50ms", "loss a/0 10%"], 60)
    for scheme in ("sr-nack", "mds:16,8"):
        suite.case(f"{scheme}, the link dies", link_dies, scheme)
        suite.case(f"{scheme}, one of two NICs dies", two_nics, scheme)
        suite.case(f"{scheme}, plain devices, 1 % lost", writes, scheme, ["loss a/0 1% tx", "loss b/0 1% tx"], 100, PLAIN)
    for scheme, loss, messages in [("sr-nack", 1e-3, 40), ("mds:32,8", 1e-3, 40)] + ALL_LONG * ("--all" in sys.argv[1:]):
        suite.case(f"{scheme}, long link, {loss:g} lost", long_link, scheme, loss, messages)
    for loss in (0.0, 0.02, 0.1):
        suite.case(f"probe, {loss:.0%} lost", probe_measures, loss)
    suite.case("probe, slow, and alone", probe_ends)
    suite.case("probe, wrong words", probe_refuses)
    suite.case("probe, forged datagrams", forged_if_root)
    suite.case("wrong words", wrong_words)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
