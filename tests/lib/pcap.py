"""Packets as others see them: captures of the loopback interface by dumpcap, ICRCs computed
anew, dissection by tshark."""

import ctypes
import os
import shutil
import signal
import socket
import struct
import subprocess
import zlib
from pathlib import Path

from .process import Failure, Process, Skip, wait_until

# Random or numbered payloads; tshark would guess at what they carry. (A message that begins with
# the number 8 is not IP.)
GUESSERS = ["rpcordma", "infiniband.eoib", "fcoib", "infiniband_sdp", "ipoib"]
PLAIN = [word for name in GUESSERS for word in ("--disable-protocol", name)]
PLAIN += ["--disable-heuristic", "eth_over_ib"]
# tshark's own way to say that something does not fit; the exact ICRC field is shown but not
# computed by it.
MALFORMED = "_ws.malformed || _ws.expert.severity >= 8388608"
PORTS = "udp dst portrange 4791-5046"
# A datagram to this port (discard) is the last of a capture: what the kernel still holds back comes
# before it.
END_PORT = 9
END = b"end of capture"
_CLONE_NEWNET = 0x40000000
TOOLS = ["dumpcap", "tshark", "nft", "ib_send_bw", "ip"]


class OwnLoopback:
    """A context: this thread, and what it starts, are in a network namespace of their own. Its
    loopback interface takes no GSO packets, so that the kernel cuts runs as it does for a real
    NIC."""

    def __init__(self):
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            raise Skip(f"{', '.join(missing)} missing: install what `make apt-test` names")
        if os.geteuid() != 0:
            raise Skip("capturing packets needs root")
        self.libc = ctypes.CDLL(None, use_errno=True)

    def __enter__(self):
        self.before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        if self.libc.unshare(_CLONE_NEWNET) != 0:
            os.close(self.before)
            why = os.strerror(ctypes.get_errno())
            raise Skip(f"network namespaces cannot be made here: {why}")
        try:
            for change in (["up"], ["gso_max_segs", "1"]):
                line = ["ip", "link", "set", "dev", "lo", *change]
                subprocess.run(line, check=True, timeout=20)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        back = self.libc.setns(self.before, _CLONE_NEWNET)
        os.close(self.before)
        if back != 0:
            raise OSError(ctypes.get_errno(), "this thread cannot leave its network namespace")


class Capture:
    """A context in which what NICs send is written to a file. On leaving it, all of it has been."""

    def __init__(self, logs: Path):
        self.file = logs / "wire.pcap"
        args = ["dumpcap", "-q", "-P", "-i", "lo", "-B", "64", "-w", self.file]
        args += ["-f", f"{PORTS} or udp dst port {END_PORT}"]
        self.process = Process("dumpcap", args, logs / "dumpcap.log", dict(os.environ))

    def __enter__(self):
        begun = lambda: "File:" in self.process.output() or self.process.ended()
        wait_until(begun, 20, "dumpcap captures")
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


def dissected(file: Path, display_filter: str, fields: tuple = ("infiniband.bth.opcode",)) -> list:
    """The fields of the packets that pass the filter, as tshark prints them, a tuple for each
    packet."""
    command = ["tshark", *PLAIN, "-r", file, "-Y", display_filter, "-T", "fields"]
    for field in fields:
        command += ["-e", field]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return [tuple(line.split("\t")) for line in done.stdout.splitlines()]


def look(file: Path, expected: set) -> str:
    """Checks a capture; gives what was in it."""
    captured = list(packets(file))
    wrong = sum(icrc(ip) != ip[-4:] for ip in captured)
    if wrong:
        raise Failure(f"{wrong} of {len(captured)} ICRCs are wrong")
    opcodes = dissected(file, "infiniband.bth")
    bad = dissected(file, MALFORMED)
    if bad or len(opcodes) != len(captured):
        raise Failure(
            f"tshark knows {len(opcodes)} of {len(captured)} packets, and finds fault with "
            f"{len(bad)}: opcodes {set(bad)}"
        )
    missing = expected - {int(opcode) for opcode, in opcodes}
    if missing:
        raise Failure(f"no packet has the opcodes {sorted(map(hex, missing))}")
    longest = max(map(len, captured))
    return f"{len(captured)} packets of {len(set(opcodes))} opcodes, {longest} bytes at most"
