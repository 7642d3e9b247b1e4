#!/usr/bin/env python3
"""What programs put on the wire, before others' eyes: perftest over RC, UC and UD at several MTUs, captured and dissected by tshark.

Every packet must be one that tshark knows as InfiniBand without finding fault with it, every ICRC must be what it is by another
computation (with the IP id that the packet has on the wire), and every operation that the programs use must be there.

Runs in a network namespace of its own whose loopback interface takes no GSO packets, so that the kernel cuts runs as it does for a
real NIC, and the NICs are addresses of that interface. That needs root, and dumpcap and tshark; else it is skipped.
"""

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from check import MALFORMED, PLAIN  # noqa: E402
from lib.fabric import UNBROKEN, Fabric  # noqa: E402
from lib.ports import free_port, listens  # noqa: E402
from lib.process import Failure, Process, wait_until  # noqa: E402
from lib.suite import Suite  # noqa: E402

INSIDE = "--in-namespace"
SECONDS = 30
PORTS = "udp dst portrange 4791-5046"
# A datagram to this port (discard) is the last of a capture: what the kernel still holds back comes before it.
END_PORT = 9
END = b"end of capture"
# Stands for the MTU in arguments.
MTU = object()
# What is run at each MTU (10,000 bytes are at least three packets), and the opcodes that must be seen.
TRANSPORTS = {
    "RC": (
        [
            ("ib_send_bw", ["-s", "10000", "-n", "20"]),
            ("ib_send_bw", ["-s", "100", "-n", "20"]),
            ("ib_write_bw", ["-s", "10000", "-n", "20"]),
            ("ib_read_bw", ["-s", "10000", "-n", "20"]),
            ("ib_read_lat", ["-s", "77", "-n", "20"]),
            ("ib_atomic_bw", ["-A", "FETCH_AND_ADD", "-n", "20"]),
            ("ib_atomic_bw", ["-A", "CMP_AND_SWAP", "-n", "20"]),
        ],
        {0x00, 0x01, 0x02, 0x04, 0x06, 0x07, 0x08, 0x0C, 0x0D, 0x0E, 0x0F, 0x10, 0x11, 0x12, 0x13, 0x14},
    ),
    "UC": (
        [
            ("ib_send_bw", ["-c", "UC", "-s", "10000", "-n", "20"]),
            ("ib_send_lat", ["-c", "UC", "-s", "100", "-n", "20"]),
            ("ib_write_bw", ["-c", "UC", "-s", "10001", "-n", "20"]),
            ("ib_write_lat", ["-c", "UC", "-s", "3", "-n", "20"]),
        ],
        {0x20, 0x21, 0x22, 0x24, 0x26, 0x27, 0x28, 0x2A},
    ),
    "UD": (
        [
            ("ib_send_bw", ["-c", "UD", "-s", MTU, "-n", "50"]),
            ("ib_send_lat", ["-c", "UD", "-s", "5", "-n", "50"]),
        ],
        {0x64},
    ),
}
MTUS = ["256", "1024", "4096"]


class Capture:
    """A context in which what NICs send is written to a file. On leaving it, all of it has been."""

    def __init__(self, logs: Path):
        self.file = logs / "wire.pcap"
        args = ["dumpcap", "-q", "-P", "-i", "lo", "-B", "64", "-f", f"{PORTS} or udp dst port {END_PORT}", "-w", self.file]
        self.process = Process("dumpcap", args, logs / "dumpcap.log", dict(os.environ))

    def __enter__(self):
        wait_until(lambda: "File:" in self.process.output() or self.process.ended(), 20, "dumpcap captures")
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
                end.sendto(END, ("127.0.0.1", END_PORT))
            wait_until(lambda: END in self.file.read_bytes(), 20, "the end of the capture")
        self.process.kill(signal.SIGINT)
        text = self.process.output()
        if "/0 (pcap:0" not in text and "dropped" in text:
            raise Failure(f"dumpcap did not see all: {text[-300:]}")


def packets(file: Path):
    """The IP packets of a classic pcap file with Ethernet frames."""
    data = file.read_bytes()
    if data[:4] != b"\xd4\xc3\xb2\xa1" or struct.unpack_from("<I", data, 20)[0] != 1:
        raise Failure(f"{file.name} is not a little-endian pcap file of Ethernet frames")
    at = 24
    while at + 16 <= len(data):
        length, whole = struct.unpack_from("<II", data, at + 8)
        if length != whole:
            raise Failure("a packet was captured in part")
        packet = data[at + 16 + 14 : at + 16 + length]
        at += 16 + length
        if not packet.endswith(END):
            yield packet


def icrc(ip: bytes) -> bytes:
    """The invariant CRC of an IPv4 RoCEv2 packet: what routers may change counts as ones."""
    masked = bytearray(ip[:-4])
    udp = (ip[0] & 15) * 4
    masked[1] = masked[8] = masked[udp + 12] = 0xFF  # TOS, TTL; the BTH's reserved byte
    masked[10:12] = masked[udp + 6 : udp + 8] = b"\xff\xff"  # checksums
    return struct.pack("<I", zlib.crc32(b"\xff" * 8 + bytes(masked)))


def dissected(file: Path, display_filter: str) -> list:
    """The opcodes of the packets that pass the filter."""
    command = ["tshark", *PLAIN, "-r", file, "-Y", display_filter, "-T", "fields", "-e", "infiniband.bth.opcode"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return done.stdout.split()


def look(file: Path, expected: set) -> str:
    """Checks a capture; gives what was in it."""
    captured = list(packets(file))
    wrong = sum(icrc(ip) != ip[-4:] for ip in captured)
    if wrong:
        raise Failure(f"{wrong} of {len(captured)} ICRCs are wrong")
    opcodes = dissected(file, "infiniband.bth")
    bad = dissected(file, MALFORMED)
    if bad or len(opcodes) != len(captured):
        raise Failure(f"tshark knows {len(opcodes)} of {len(captured)} packets, and finds fault with {len(bad)}: opcodes {set(bad)}")
    missing = expected - {int(opcode) for opcode in opcodes}
    if missing:
        raise Failure(f"no packet has the opcodes {sorted(map(hex, missing))}")
    return f"{len(captured)} packets of {len(set(opcodes))} opcodes, {max(map(len, captured))} bytes at most"


def both_ends(fabric: Fabric, tool: str, args: list):
    """Runs a perftest between two NICs that are addresses of the loopback interface."""
    program = [tool, "-d", "unb0", "-F", "-p", free_port(), *args]
    commands = [[UNBROKEN, "run", "--nics", f"127.0.0.{n}", "--", *program] for n in (1, 2)]
    server = fabric.start(f"server-{tool}", commands[0])
    wait_until(lambda: server.ended() or listens(server.pid, program[5]), 20, f"{tool} listens")
    client = fabric.start(f"client-{tool}", [*commands[1], "127.0.0.1"])
    client.expect_success(SECONDS)
    server.expect_success(SECONDS)


def case(logs: Path, transport: str, mtu: str) -> str:
    """Captures the programs of a transport at an MTU."""
    programs, expected = TRANSPORTS[transport]
    with Fabric(logs) as fabric, Capture(logs) as capture:
        for tool, args in programs:
            both_ends(fabric, tool, ["-m", mtu, *(mtu if arg is MTU else arg for arg in args)])
    return look(capture.file, expected)


def main() -> int:
    missing = [tool for tool in ("dumpcap", "tshark", "ib_send_bw", "ip", "unshare") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        print(f"capture: skipped: {', '.join(missing) + ' missing' if missing else 'needs root, to capture packets'}")
        return 0
    if INSIDE not in sys.argv:
        os.execvp("unshare", ["unshare", "--net", sys.executable, __file__, INSIDE])
    for change in (["up"], ["gso_max_segs", "1"]):
        subprocess.run(["ip", "link", "set", "dev", "lo", *change], check=True)
    suite = Suite("capture")
    for transport in TRANSPORTS:
        for mtu in MTUS:
            suite.case(f"{transport}, MTU {mtu}", case, transport, mtu)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
