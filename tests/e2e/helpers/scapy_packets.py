"""Builds packets by scapy, and compares their ICRCs with ours.

usage: scapy_packets.py SEED PCAP < PACKETS, with lines of the example `emit_random`. Writes the
packets to a capture file, and a line of JSON: for each packet its kind, its opcode, and whether the
ICRC that scapy computes is ours. Needs scapy.
"""

import json
import random
import sys

from scapy.contrib.roce import BTH
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Raw
from scapy.utils import wrpcap


def ip_header(rng, src, dst, ip_id):
    """An IP header. What the ICRC must not depend on is set at random."""
    if ":" in src:
        label, hops = rng.randrange(1 << 20), rng.randrange(1, 256)
        return IPv6(src=src, dst=dst, tc=rng.randrange(256), fl=label, hlim=hops)
    tos, ttl = rng.randrange(256), rng.randrange(1, 256)
    return IP(src=src, dst=dst, id=ip_id, flags="DF", tos=tos, ttl=ttl)


def main():
    """Reads packets, writes results."""
    seed, pcap = int(sys.argv[1]), sys.argv[2]
    rng, packets, results = random.Random(seed), [], []
    for line in sys.stdin:
        kind, src, dst, sport, dport, ip_id, payload = line.split()
        payload = bytes.fromhex(payload)
        ip = ip_header(rng, src, dst, int(ip_id))
        head, body, icrc = payload[:12], payload[12:-4], payload[-4:]
        bth = BTH(head + icrc)  # scapy's BTH holds the ICRC behind its own fields
        bth.remove_payload()
        udp = UDP(sport=int(sport), dport=int(dport))
        whole = ip / udp / bth / Raw(body)
        equal = whole[BTH].compute_icrc(b"") == icrc
        results.append({"kind": kind, "opcode": payload[0], "equal": equal})
        ethernet = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
        packets.append(ethernet / ip / udp / Raw(payload))
    wrpcap(pcap, packets)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
