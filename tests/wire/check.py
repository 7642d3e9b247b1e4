#!/usr/bin/env python3
"""Our packets before others' eyes: scapy computes their ICRCs, tshark dissects them.

    tests/wire/check.py [PACKETS] [SEED]

Sets up what it needs (a virtual environment with scapy under target/).
Exit status 0: all ICRCs equal, no packet malformed.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
VENV = TARGET / "wire-venv"
SCAPY = "scapy==2.6.1"
# Random or numbered payloads; tshark would guess at what they carry. (A message that begins with the number 8 is not IP.)
GUESSERS = ["rpcordma", "infiniband.eoib", "fcoib", "infiniband_sdp", "ipoib"]
PLAIN = [word for name in GUESSERS for word in ("--disable-protocol", name)] + ["--disable-heuristic", "eth_over_ib"]
# tshark's own way to say that something does not fit; the exact ICRC field is shown but not computed by it.
MALFORMED = "_ws.malformed || _ws.expert.severity >= 8388608"


def in_venv():
    """Runs this script again inside the virtual environment, which is made if it is not there."""
    python = VENV / "bin/python"
    if not (VENV / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", SCAPY], check=True)
        (VENV / "ready").touch()
    os.execv(python, [python, *sys.argv])


def emitted(count, seed):
    """The lines of the example `emit_random`."""
    command = ["cargo", "run", "-q", "--release", "--example", "emit_random", "--"]
    command += [str(seed), str(count)]
    out = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    for line in out.splitlines():
        kind, src, dst, sport, dport, ip_id, payload = line.split()
        yield kind, src, dst, int(sport), int(dport), int(ip_id), bytes.fromhex(payload)


def main():
    from scapy.contrib.roce import BTH
    from scapy.layers.inet import IP, UDP
    from scapy.layers.inet6 import IPv6
    from scapy.layers.l2 import Ether
    from scapy.packet import Raw
    from scapy.utils import wrpcap

    count = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    rng = random.Random(seed)
    packets, kinds, wrong = [], {}, []
    for kind, src, dst, sport, dport, ip_id, payload in emitted(count, seed):
        # What the ICRC must not depend on is set at random.
        if ":" in src:
            ip = IPv6(src=src, dst=dst, tc=rng.randrange(256), fl=rng.randrange(1 << 20), hlim=rng.randrange(1, 256))
        else:
            ip = IP(src=src, dst=dst, id=ip_id, flags="DF", tos=rng.randrange(256), ttl=rng.randrange(1, 256))
        head, body, icrc = payload[:12], payload[12:-4], payload[-4:]
        bth = BTH(head + icrc)  # scapy's BTH holds the ICRC behind its own fields
        bth.remove_payload()
        udp = UDP(sport=sport, dport=dport)
        whole = ip / udp / bth / Raw(body)
        if whole[BTH].compute_icrc(b"") != icrc:
            wrong.append(kind)
        kinds[kind] = kinds.get(kind, 0) + 1
        packets.append(Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02") / ip / udp / Raw(payload))
    print(f"ICRC: {count - len(wrong)} of {count} packets of {len(kinds)} kinds equal to scapy's")

    pcap = TARGET / "test-logs/wire.pcap"
    pcap.parent.mkdir(parents=True, exist_ok=True)
    wrpcap(str(pcap), packets)

    def tshark(display_filter):
        command = ["tshark", *PLAIN, "-r", pcap, "-Y", display_filter]
        command += ["-T", "fields", "-e", "frame.number", "-e", "infiniband.bth.opcode"]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
        return [line.split("\t") for line in out.splitlines()]

    seen = tshark("infiniband.bth")
    bad = tshark(MALFORMED)
    opcodes = {int(opcode) for _, opcode in seen}
    expected = [p[Raw].load[0] for p in packets]
    right = [int(opcode) for _, opcode in seen] == expected
    print(f"tshark: {len(seen)} of {count} dissected, {len(opcodes)} opcodes, {len(bad)} malformed; {pcap}")
    for number, opcode in bad[:10]:
        print(f"  packet {number}: opcode {opcode}")
    ok = not wrong and not bad and right and len(kinds) == len(set(expected)) == len(opcodes)
    print("wire: " + ("ok" if ok else f"FAILED {sorted(set(wrong))}"))
    return 0 if ok else 1


if __name__ == "__main__":
    if Path(sys.prefix).resolve() != VENV.resolve():
        in_venv()
    sys.exit(main())
