"""SDR for users: the C API and its examples, reliable writes between processes over a network that
loses and dies, and what they take on a long link beside the model. (The probe:
test_sdr_probe.py.)"""

import json
import re
import subprocess
import time

import pytest

from lib import options
from lib.cc import EXAMPLE_LINES, check_header_in_cpp, compile_c, compile_example
from lib.fabric import UNBROKEN, Fabric
from lib.namespaces import Namespaces
from lib.paths import BUILD, ROOT
from lib.ports import listens
from lib.process import Failure, wait_until

EXAMPLES = ROOT / "crates/sdr/library/examples"
SDK = ["-I", ROOT / "include", "-L", BUILD, "-lunbroken_sdr", f"-Wl,-rpath,{BUILD}"]
SECONDS = 90


def run(fabric, *command):
    """Runs a program to its end in the fabric's folder, without anything preloaded."""
    environment = {"UNBROKEN_RUNTIME": str(fabric.path), "PATH": "/usr/bin:/bin"}
    words = [str(c) for c in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, env=environment)
    if done.returncode != 0:
        raise Failure(f"{words[0]} failed ({done.returncode}): {done.stderr[-2000:]}")
    return done.stdout


PLAIN = ["--device", "plain"]
LOSSY = ["loss a/0 5% tx", "loss b/0 5% tx"]
LITTLE_LOSS = ["loss a/0 1% tx", "loss b/0 1% tx"]


@pytest.mark.parametrize(
    "faults, messages, settings, length",
    [
        pytest.param([], 100, [], [], id="no-fault", marks=pytest.mark.smoke),
        pytest.param(LOSSY, 50, [], [], id="loss"),
        pytest.param(LOSSY, 50, PLAIN, [], id="plain-loss"),
        # Fewer packets than the immediate has fragments: the others come without data.
        pytest.param(LOSSY, 100, PLAIN, [4156], id="plain-short-messages-loss"),
    ],
)
def test_c_api(logs, note, faults, messages, settings, length):
    """Every function of the header, what it refuses, and messages with their bitmaps, byte by byte;
    all of one length, if one is given."""
    program = compile_c("sdr", *SDK)
    with Fabric(logs, *settings) as fabric:
        for fault in faults:
            fabric.fault(fault)
        output = run(fabric, program, messages, *length)
    for words in (f"sent {messages} messages", f"received {messages} messages"):
        if words not in output:
            raise Failure(f"'{words}' is not printed: {output}")
    note("; ".join(output.splitlines()))


@pytest.mark.parametrize(
    "faults, messages, settings",
    [
        pytest.param([], 20, [], id="no-fault"),
        pytest.param(LOSSY, 40, [], id="loss", marks=pytest.mark.smoke),
        pytest.param(LOSSY, 40, PLAIN, id="plain-loss"),
    ],
)
def test_c_api_reliable_writes(logs, note, faults, messages, settings):
    """Reliable writes by the C API: every scheme, what is refused, deadlines, each byte checked."""
    program = compile_c("sdr_reliable", *SDK)
    with Fabric(logs, *settings) as fabric:
        for fault in faults:
            fabric.fault(fault)
        output = run(fabric, program, messages)
    for scheme in range(5):
        for words in (
            f"wrote by scheme {scheme}: {messages} messages",
            f"read by scheme {scheme}: {messages} messages",
        ):
            if words not in output:
                raise Failure(f"'{words}' is not printed: {output}")
    again, recovered = (
        sum(map(int, re.findall(rf"(\d+) {what}", output)))
        for what in ("chunks again", "recovered")
    )
    if faults and not (again and recovered):
        raise Failure(f"nothing was sent again, or recovered: {output}")
    note(f"{again} chunks again, {recovered} recovered")


def test_headers_in_cpp(logs):
    check_header_in_cpp(logs, "unbroken/sdr_ext.h", "sdr_last_error()", *SDK)


def test_examples_are_short():
    lines = {e.name: len(e.read_text().splitlines()) for e in EXAMPLES.iterdir()}
    long = {name: count for name, count in lines.items() if count > EXAMPLE_LINES}
    if long:
        raise Failure(f"examples are {EXAMPLE_LINES} lines at most: {long}")


def test_c_example(logs):
    with Fabric(logs) as fabric:
        output = run(fabric, compile_example(EXAMPLES / "partial.c", *SDK))
        if "1048576 bytes are in their place" not in output:
            raise Failure(f"the example in C does not end well: {output}")


def test_rust_example(note):
    rust = subprocess.run(
        ["cargo", "run", "-q", "--release", "--example", "reliable"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
    )
    if rust.returncode != 0 or "16 messages of 1 MiB" not in rust.stdout:
        raise Failure(f"the example in Rust does not end well: {rust.stdout} {rust.stderr[-1000:]}")
    note(rust.stdout.strip())


def bench(fabric, *arguments, fails=False):
    """`unbroken sdr bench` between hosts a and b; its object."""
    command = [UNBROKEN, "sdr", "bench", "--runtime", fabric.path, "--json", *arguments]
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, timeout=SECONDS
    )
    if fails:
        if done.returncode == 0:
            raise Failure(f"it ends well: {done.stdout}")
        return done.stderr
    if done.returncode != 0:
        raise Failure(f"{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def start_bench(fabric, *arguments) -> subprocess.Popen:
    """Starts `unbroken sdr bench`."""
    command = [UNBROKEN, "sdr", "bench", "--runtime", str(fabric.path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# Of the object that `unbroken sdr bench --json` prints.
KEYS = set(
    "scheme message_bytes chunk_bytes mtu_bytes channels in_flight messages seconds gbit_per_s "
    "messages_per_s packets_per_s mean_us p99_us chunks_sent chunks_repeated chunks_recovered "
    "packets_late packets_duplicate under_runs rtt_us segments_coded injection_gbit_per_s "
    "verified".split()
)


def writes(logs, scheme, faults, messages, settings=()) -> str:
    """Reliable writes between two processes, each byte checked."""
    with Fabric(logs, *settings) as fabric:
        for fault in faults:
            fabric.fault(fault)
        stream = f"--scheme {scheme} --size 256K --chunk 16K --messages {messages} --in-flight 4"
        got = bench(fabric, *stream.split(), "--rate", "400M", "--verify")
    if set(got) != KEYS:
        raise Failure(f"the keys of the object differ: {set(got) ^ KEYS}")
    if got["scheme"] != scheme:
        raise Failure(f"the scheme is reported as {got['scheme']}, and was asked for as {scheme}")
    if got["messages"] != messages or not got["verified"]:
        raise Failure(f"not all was written: {got}")
    return (
        f"{got['gbit_per_s']:.2f} Gbit/s, mean {got['mean_us']:.0f} us, "
        f"{got['chunks_repeated']} again, {got['chunks_recovered']} recovered"
    )


BURSTS = ["burst-loss a/0 2% burst=6 tx", "reorder a/0 2% by=1ms tx", "duplicate a/0 2% tx"]
SCHEMES = ["sr-rto", "sr-nack", "mds:16,8", "xor:16,8", "adaptive"]
# Faults, and how many messages.
NETWORKS = {
    "no-fault": ([], 200),
    "loss": (LITTLE_LOSS, 100),
    "bursts-reordered-duplicated": (BURSTS, 100),
    "20ms-loss": (["delay a/0 20ms tx", "loss a/0 1% tx"], 40),
}
if options.LONG:
    NETWORKS["100ms-loss-10%"] = (["delay a/0 50ms", "loss a/0 10%"], 60)


def word(scheme: str) -> str:
    """The id of a scheme."""
    return scheme.replace(":", "-").replace(",", "-")


@pytest.mark.parametrize(
    "scheme, network",
    [
        pytest.param(
            scheme,
            network,
            id=f"{word(scheme)}-{network}",
            marks=pytest.mark.smoke if network == "loss" else (),
        )
        for scheme in SCHEMES
        for network in NETWORKS
    ],
)
def test_writes(logs, note, scheme, network):
    note(writes(logs, scheme, *NETWORKS[network]))


@pytest.mark.parametrize("scheme", ["sr-nack", "mds:16,8"], ids=word)
def test_writes_plain_devices(logs, note, scheme):
    note(writes(logs, scheme, LITTLE_LOSS, 100, PLAIN))


# The paper's regime, scaled: a round trip of 19,000 chunks, 8 MiB for its 128 MiB.
LONG_LINK = ["--bandwidth", "4G", "--rtt", "156ms", "--mtu", "4K", "--chunk", "4K", "--size", "8M"]
# How far the mean may be from the model's.
NEAR = 0.15
# A scheme, how much is lost, and how many messages.
LONG_LINK_CASES = [("sr-nack", 1e-3, 40), ("mds:32,8", 1e-3, 40)]
if options.LONG:
    SCHEMES_OF_PAPER, LOSSES = ("sr-rto", "sr-nack", "mds:32,8", "xor:32,8"), (0, 1e-4, 1e-3, 1e-2)
    LONG_LINK_CASES += [(scheme, loss, 100) for scheme in SCHEMES_OF_PAPER for loss in LOSSES]


@pytest.mark.timing
@pytest.mark.parametrize(
    "scheme, loss, messages",
    [pytest.param(*case, id=f"{word(case[0])}-{case[1]:g}-{case[2]}") for case in LONG_LINK_CASES],
)
def test_long_link(logs, note, scheme, loss, messages):
    """Writes of 8 MiB at 4 Gbit/s over 156 ms, one at a time, take as long as the model
    predicts."""
    model = [UNBROKEN, "model", "predict", scheme, *LONG_LINK, "--loss", loss, "--json"]
    output = subprocess.run(
        [*map(str, model), "--no-picture"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
        cwd=logs,
    )
    model_us = 1e6 * json.loads(output.stdout)["write"]["mean_s"]
    with Fabric(logs) as fabric:
        fabric.fault("delay a/0 78ms")
        if loss:
            fabric.fault(f"loss a/0 {loss * 100:g}% tx")
        stream = f"--scheme {scheme} --size 8M --chunk 4K --mtu 4K --messages {messages}"
        got = bench(fabric, *stream.split(), "--rate", "4G", "--in-flight", 1)
    if loss and not got["chunks_repeated"] + got["chunks_recovered"]:
        raise Failure(f"nothing was lost: {got}")
    shown = (
        f"mean of {messages}: {got['mean_us'] / 1e3:.0f} ms, by the model {model_us / 1e3:.0f} "
        f"ms: {got['mean_us'] / model_us:.2f}; "
        f"{got['chunks_repeated']} again, {got['chunks_recovered']} recovered"
    )
    # The model has a code send all of a submessage again that it could not recover; ours sends what
    # is lost of it.
    may_be_less = scheme.partition(":")[1] and got["chunks_repeated"]
    if (
        got["mean_us"] > (1 + NEAR) * model_us
        or not may_be_less
        and got["mean_us"] < (1 - NEAR) * model_us
    ):
        raise Failure(shown)
    note(shown)


@pytest.mark.parametrize("scheme", ["sr-nack", "mds:16,8"], ids=word)
def test_link_dies(logs, note, scheme):
    """The only link dies in mid-message: a clear error by the deadline."""
    with Fabric(logs) as fabric:
        stream = f"--scheme {scheme} --size 1M --rate 50M --messages 1000 --deadline 2s"
        process = start_bench(fabric, *stream.split())
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
    note(f"error after {took:.1f} s")


def wait_for_traffic(fabric):
    """Until data flows."""
    wait_until(lambda: fabric.nics().get("b/0", {}).get("rx_payload_bytes", 0) > 1e5, 20, "traffic")


@pytest.mark.parametrize("scheme", ["sr-nack", "mds:16,8"], ids=word)
def test_one_of_two_nics_dies(logs, note, scheme):
    """Two channels over two NICs; one dies in mid-message, and every byte comes over the other."""
    with Fabric(logs) as fabric:
        stream = f"--scheme {scheme} --size 256K --chunk 16K --rate 100M --messages 100"
        over_two = "--in-flight 2 --channels 2 --nics 0,1 --json --verify"
        process = start_bench(fabric, *stream.split(), *over_two.split())
        try:
            wait_for_traffic(fabric)
            fabric.fault("nic a/0 dead")
            output, error = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    if process.returncode != 0:
        raise Failure(error[-2000:])
    got = json.loads(output)
    if got["messages"] != 100 or not got["verified"]:
        raise Failure(f"not all was written: {got}")
    note(f"{got['chunks_repeated']} chunks again")


BETWEEN_PORT = 7601


@pytest.mark.root
@pytest.mark.parametrize(
    "rails, settings",
    [
        pytest.param(1, [], id="one-interface"),
        pytest.param(2, ["--channels", 2], id="two-interfaces"),
    ],
)
def test_between_interfaces(logs, note, rails, settings):
    """Two machines of one command each, `--listen` and `--connect`, over real interfaces: each byte
    checked, and the interfaces have carried them. Nothing but the runtime folder is theirs in
    common, and of that no more than its name."""
    messages, size = 60, 256 << 10
    words = f"--scheme mds:16,8 --size {size}B --chunk 16K --mtu 1K --in-flight 4 --rate 200M"
    with Namespaces(rails) as net:
        ends = {}
        try:
            for host, place in (("b", "--listen"), ("a", "--connect")):
                runtime = logs / f"runtime-{host}"
                command = [*net.within(host), UNBROKEN, "sdr", "bench", "--runtime", runtime]
                command += [place, f"{net.addr('b', 0)}:{BETWEEN_PORT}", "--address"]
                command += [",".join(str(net.addr(host, rail)) for rail in range(rails))]
                if host == "a":
                    command += [*words.split(), *settings]
                    command += ["--messages", messages, "--verify", "--json"]
                pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
                ends[host] = subprocess.Popen([str(word) for word in command], **pipes)
                if host == "b":
                    server = ends["b"]
                    there = lambda: server.poll() is not None or listens(server.pid, BETWEEN_PORT)
                    wait_until(there, 20, "the far end listens")
            said = {host: end.communicate(timeout=SECONDS) for host, end in ends.items()}
        finally:
            for end in ends.values():
                end.kill()
        carried = [net.bytes("b", rail)[1] for rail in range(rails)]
    for host, end in ends.items():
        if end.returncode != 0:
            raise Failure(f"{host}: {said[host][1][-2000:]}")
    got = json.loads(said["a"][0])
    if got["messages"] != messages or not got["verified"]:
        raise Failure(f"not all was written: {got}")
    for rail, count in enumerate(carried):
        # Channels take turns over the interfaces.
        if count < messages * size / rails:
            raise Failure(f"interface {rail} has carried {count} bytes: {carried}")
    note(f"{got['gbit_per_s']:.2f} Gbit/s, {carried} bytes carried")


@pytest.mark.smoke
def test_wrong_words(logs):
    """What a person gets wrong is answered by what would be right."""
    with Fabric(logs) as fabric:
        for arguments, words in [
            (["--chunk", "5000B"], "power of two"),
            (["--scheme", "raid"], "sr-rto"),
            (["--size", "0B"], "1B to"),
            (["--rate", "50GB/s"], "bits a second"),
            (["--nics", "9"], "no device unb9"),
            (["--address", "127.0.0.1"], "with --listen ADDRESS:PORT"),
            (["--connect", "127.0.0.1:1"], "unbroken sdr bench --listen 127.0.0.1:1"),
        ]:
            error = bench(fabric, *arguments, fails=True)
            if words not in error:
                raise Failure(f"{arguments}: '{words}' is not in: {error}")
