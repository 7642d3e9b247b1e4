#!/usr/bin/env python3
"""What programs put on the wire, before others' eyes: perftest over RC, UC and UD at several MTUs, captured and dissected by tshark.

Every packet must be one that tshark knows as InfiniBand without finding fault with it, every ICRC must be what it is by another
computation (with the IP id that the packet has on the wire), and every operation that the programs use must be there. Where packets
are lost (by nftables, behind the capture) there must also be NAKs, with their maps, and what is sent again; where receives come late,
RNR NAKs. There the programs compare every byte and every value.

Runs in a network namespace of its own whose loopback interface takes no GSO packets, so that the kernel cuts runs as it does for a
real NIC, and the NICs are addresses of that interface. That needs root, and dumpcap, tshark and nft; else it is skipped.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib.cc import compile_c  # noqa: E402
from lib.fabric import UNBROKEN, Fabric  # noqa: E402
from lib.ports import free_port, listens  # noqa: E402
from lib.process import Failure, wait_until  # noqa: E402
from lib.suite import Suite  # noqa: E402
from pcap import Capture, dissected, look  # noqa: E402
from lib.verifier import report  # noqa: E402

INSIDE = "--in-namespace"
SECONDS = 30
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
# Run where one of so many packets is lost, at MTU 1024.
LOST_ONE_OF = 50
LOSSY = [
    ("ib_send_bw", ["-s", "100000", "-n", "50"]),
    ("ib_send_bw", ["-s", "100", "-n", "500"]),
    ("ib_write_bw", ["-s", "100000", "-n", "50"]),
    ("ib_read_bw", ["-s", "100000", "-n", "50"]),
    ("ib_read_lat", ["-s", "77", "-n", "20"]),
    ("ib_atomic_bw", ["-A", "FETCH_AND_ADD", "-n", "500"]),
    ("ib_atomic_bw", ["-A", "CMP_AND_SWAP", "-n", "500"]),
]
ACKNOWLEDGE = 0x11
# What tshark prints for syndromes, and an error code.
RNR_NAK, NAK = "1", "3"
SEQUENCE_ERROR = 0
# UDP header, BTH, AETH, ICRC. What is longer has a map.
PLAIN_NAK_BYTES = 8 + 12 + 4 + 4
# What must be there more than once. (An answer that is asked for again may have another opcode of its kind.)
SENT_AGAIN = {
    "SENDs and WRITEs": range(0x00, 0x0C),
    "READ requests": [0x0C],
    "READ responses": range(0x0D, 0x11),
    "atomics": [0x13, 0x14],
    "atomic answers": [0x12],
}


def both_ends(fabric: Fabric, server: list, client: list, port: int) -> list:
    """Runs a program between two NICs that are addresses of the loopback interface; the server listens at the TCP port."""
    on = [[UNBROKEN, "run", "--nics", f"127.0.0.{n}", "--"] for n in (1, 2)]
    name = Path(server[0]).name
    programs = [fabric.start(f"server-{name}", [*on[0], *server])]
    wait_until(lambda: programs[0].ended() or listens(programs[0].pid, port), 20, f"{name} listens")
    programs.append(fabric.start(f"client-{name}", [*on[1], *client]))
    for program in reversed(programs):
        program.expect_success(SECONDS)
    return programs


def perftest(fabric: Fabric, tool: str, args: list):
    """Runs a perftest."""
    port = free_port()
    program = [tool, "-d", "unb0", "-F", "-p", port, *args]
    both_ends(fabric, program, [*program, "127.0.0.1"], port)


class Loss:
    """A context in which some of what arrives at the NICs is lost, after the capture has seen it."""

    def __enter__(self):
        nft(f"""table ip loss {{
            chain in {{
                type filter hook input priority 0
                udp dport 4791-5046 numgen random mod {LOST_ONE_OF} 0 counter drop
            }}
        }}""")

    def __exit__(self, kind, *_):
        lost = int(re.search(r"packets (\d+)", nft("list table ip loss"))[1])
        nft("delete table ip loss")
        if kind is None and not lost:
            raise Failure("nothing was lost")


def nft(text: str) -> str:
    """Carries out a command of nftables."""
    done = subprocess.run(["nft", "-f", "-"], input=text, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise Failure(f"nft: {done.stderr.strip()}")
    return done.stdout


def case(logs: Path, transport: str, mtu: str) -> str:
    """Captures the programs of a transport at an MTU."""
    programs, expected = TRANSPORTS[transport]
    with Fabric(logs) as fabric, Capture(logs) as capture:
        for tool, args in programs:
            perftest(fabric, tool, ["-m", mtu, *(mtu if arg is MTU else arg for arg in args)])
    return look(capture.file, expected)


class Answers:
    """What a capture shows of losses: NAKs, and what was sent more than once."""

    FIELDS = ["ip.src", "infiniband.bth.destqp", "infiniband.bth.psn", "infiniband.bth.opcode", "udp.length"]
    FIELDS += [f"infiniband.aeth.syndrome.{part}" for part in ("opcode", "error_code")]

    def __init__(self, file: Path):
        kind_of = {opcode: kind for kind, opcodes in SENT_AGAIN.items() for opcode in opcodes}
        sent, self.again = set(), Counter()
        self.naks = self.maps = self.rnr_naks = 0
        for src, qpn, psn, opcode, length, syndrome, error in dissected(file, "infiniband.bth", tuple(self.FIELDS)):
            if int(opcode) == ACKNOWLEDGE:
                nak = syndrome == NAK and int(error) == SEQUENCE_ERROR
                self.naks += nak
                self.maps += nak and int(length) > PLAIN_NAK_BYTES
                self.rnr_naks += syndrome == RNR_NAK
            elif int(opcode) in kind_of:
                packet = src, qpn, psn, kind_of[int(opcode)]
                self.again[packet[-1]] += packet in sent
                sent.add(packet)

    def expect(self, kinds) -> str:
        """Fails unless some packets of each of these kinds were sent again, and NAKs are there. Gives the counts."""
        counts = {kind: self.again[kind] for kind in kinds} | {"NAKs": self.naks, "with maps": self.maps}
        if not all(counts.values()):
            raise Failure(f"the capture has no sign of some loss: {counts}")
        return "sent again: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())


def perftests_under_loss(logs: Path) -> str:
    """perftest over RC where packets are lost."""
    with Fabric(logs) as fabric, Capture(logs) as capture, Loss():
        for tool, args in LOSSY:
            perftest(fabric, tool, ["-m", "1024", *args])
    return f"{look(capture.file, TRANSPORTS['RC'][1])}; {Answers(capture.file).expect(SENT_AGAIN)}"


def verified_under_loss(logs: Path) -> str:
    """The verifier where packets are lost: SENDs, WRITEs and READs both ways, each compared with what it must be."""
    program, port = compile_c("verifier", "-libverbs"), free_port()
    options = ["--messages", 4000, "--max-bytes", 20000]
    with Fabric(logs) as fabric, Capture(logs) as capture, Loss():
        ends = both_ends(fabric, [program, "--listen", port, *options], [program, "--connect", f"127.0.0.1:{port}", *options], port)
        messages = sum(report(end)["verified_messages"] for end in ends)
    again = Answers(capture.file).expect(["SENDs and WRITEs", "READ responses"])
    return f"{messages} messages right; {look(capture.file, {0x04, 0x06, 0x0A, 0x0C, 0x10, 0x11})}; {again}"


def late_receives_and_atomics(logs: Path) -> str:
    """tests/c/late.c where packets are lost: SENDs before their receives, atomics that must run once."""
    program = compile_c("late", "-libverbs")
    with Fabric(logs) as fabric, Capture(logs) as capture, Loss():
        fabric.start("late", [UNBROKEN, "run", "--nics", "127.0.0.1", "--", program, 20]).expect_success(SECONDS)
    seen = look(capture.file, {0x00, 0x01, 0x02, 0x04, 0x06, 0x0C, 0x0D, 0x0E, 0x0F, 0x11, 0x12, 0x13, 0x14})
    answers = Answers(capture.file)
    if not answers.rnr_naks:
        raise Failure("no RNR NAK was seen")
    kinds = ["SENDs and WRITEs", "READ responses", "atomics", "atomic answers"]
    return f"{seen}; {answers.expect(kinds)}, {answers.rnr_naks} RNR NAKs"


def main() -> int:
    missing = [tool for tool in ("dumpcap", "tshark", "nft", "ib_send_bw", "ip", "unshare") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        print(f"capture: skipped: {', '.join(missing) + ' missing' if missing else 'needs root, to capture packets'}")
        return 0
    if INSIDE not in sys.argv:
        os.execvp("unshare", ["unshare", "--net", sys.executable, __file__, INSIDE, *sys.argv[1:]])
    for change in (["up"], ["gso_max_segs", "1"]):
        subprocess.run(["ip", "link", "set", "dev", "lo", *change], check=True)
    suite = Suite("capture", sys.argv[sys.argv.index(INSIDE) + 1 :])
    for transport in TRANSPORTS:
        for mtu in MTUS:
            suite.case(f"{transport}, MTU {mtu}", case, transport, mtu)
    suite.case("perftest over RC, loss", perftests_under_loss)
    suite.case("verified messages, loss", verified_under_loss)
    suite.case("late receives and atomics, loss", late_receives_and_atomics)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
