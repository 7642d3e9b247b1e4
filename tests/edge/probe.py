#!/usr/bin/env python3
"""UDP datagrams at a fixed pace from one host to another; the receiver writes down when each came.

usage: probe.py receive ADDRESS PORT FILE | probe.py send ADDRESS TO PORT PERIOD_US SECONDS

The file has a line for each datagram: its number, when it was sent and when it came, in µs of
CLOCK_MONOTONIC. The receiver ends when the sender says so, or half a minute after the last
datagram."""

import socket
import struct
import sys
import time


def now_us() -> int:
    return time.monotonic_ns() // 1000


def receive(address: str, port: str, path: str):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    # A receiver that gets no core for seconds loses nothing by that. 33 is SO_RCVBUFFORCE, which
    # root may set.
    sock.setsockopt(socket.SOL_SOCKET, 33, 16 << 20)
    sock.bind((address, int(port)))
    sock.settimeout(30)
    rows = []
    print("listening", flush=True)
    while True:
        number, sent = struct.unpack("<QQ", sock.recv(64))
        if number == 0:
            break
        rows.append((number, sent, now_us()))
    with open(path, "w", encoding="ascii") as out:
        out.writelines(f"{n} {s} {r}\n" for n, s, r in rows)


def send(address: str, to: str, port: str, period_us: str, seconds: str):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((address, 0))
    period, end, number = int(period_us), now_us() + float(seconds) * 1e6, 0
    due = now_us()
    while due < end:
        time.sleep(max(0, due - now_us()) / 1e6)
        number += 1
        try:
            sock.sendto(struct.pack("<QQ", number, now_us()), (to, int(port)))
        except OSError:
            # The route is gone for a moment: lost as a packet would be.
            pass
        due += period
    for _ in range(20):
        sock.sendto(struct.pack("<QQ", 0, 0), (to, int(port)))
        time.sleep(0.01)


if __name__ == "__main__":
    {"receive": receive, "send": send}[sys.argv[1]](*sys.argv[2:])
