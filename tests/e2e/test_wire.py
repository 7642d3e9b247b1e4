"""Our packets before others' eyes: scapy computes their ICRCs, tshark dissects them.

Scapy is in a virtual environment below target/, which is made once.
"""

import json
import subprocess
import sys

import pytest

from lib import options
from lib.paths import ROOT, TARGET
from lib.pcap import MALFORMED, dissected
from lib.process import Failure, needs

PACKETS = 4000
VENV = TARGET / "wire-venv"
SCAPY = "scapy==2.6.1"
COMPARE = ROOT / "tests" / "e2e" / "helpers" / "scapy_packets.py"
BUILD_SECONDS = 500


@pytest.fixture(scope="module")
def scapy_python():
    """The interpreter of a virtual environment with scapy."""
    python = VENV / "bin" / "python"
    if not (VENV / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, SCAPY], check=True, timeout=BUILD_SECONDS)
        (VENV / "ready").touch()
    return python


def emitted(count: int, seed: int) -> str:
    """Random packets of every kind, as the example `emit_random` writes them: a line each."""
    command = ["cargo", "run", "-q", "--release", "-p", "unbroken-wire", "--example", "emit_random"]
    command += ["--", str(seed), str(count)]
    run = {"cwd": ROOT, "check": True, "stdout": subprocess.PIPE, "text": True}
    return subprocess.run(command, timeout=BUILD_SECONDS, **run).stdout


def test_packets(logs, note, scapy_python):
    needs("tshark", "tshark")
    pcap = logs / "wire.pcap"
    command = [scapy_python, COMPARE, str(options.SEED), pcap]
    done = subprocess.run(
        command, input=emitted(PACKETS, options.SEED), check=True, stdout=subprocess.PIPE, text=True
    )
    packets = json.loads(done.stdout)
    wrong = [packet["kind"] for packet in packets if not packet["equal"]]
    if wrong or len(packets) != PACKETS:
        raise Failure(f"{len(wrong)} of {len(packets)} ICRCs are wrong: {sorted(set(wrong))}")

    fields = ("frame.number", "infiniband.bth.opcode")
    opcodes = [int(opcode) for _, opcode in dissected(pcap, "infiniband.bth", fields)]
    malformed = dissected(pcap, MALFORMED, fields)
    if malformed:
        raise Failure(f"tshark finds {len(malformed)} malformed, as {malformed[:10]}; {pcap}")
    if opcodes != [packet["opcode"] for packet in packets]:
        raise Failure(f"tshark dissects {len(opcodes)} of {PACKETS}, or other opcodes; {pcap}")
    kinds = {packet["kind"] for packet in packets}
    if len(kinds) != len(set(opcodes)):
        raise Failure(f"{len(kinds)} kinds of packets, {len(set(opcodes))} opcodes")
    note(f"{PACKETS} packets of {len(kinds)} kinds")
