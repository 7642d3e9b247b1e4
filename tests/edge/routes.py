#!/usr/bin/env python3
"""Writes down each change of an IPv4 route of this network namespace, as the kernel tells it.

usage: routes.py FILE

A line for each: when it was heard (µs of CLOCK_MONOTONIC), the table, the number of the protocol,
and the destination. It says `listening` when it does."""

import socket
import struct
import sys
import time

# From linux/rtnetlink.h
RTMGRP_IPV4_ROUTE = 0x40
RTM_NEWROUTE, RTM_DELROUTE = 24, 25
RTA_DST, RTA_TABLE = 1, 15
HEADER, ROUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBBBBBI")


def attributes(data: bytes):
    """The kinds and values of a message's attributes."""
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            return
        yield kind, data[4:length]
        data = data[(length + 3) & ~3 :]


def change(message: bytes) -> str | None:
    """Table, protocol and destination of a change."""
    _, kind, *_ = HEADER.unpack_from(message)
    if kind not in (RTM_NEWROUTE, RTM_DELROUTE):
        return None
    _, bits, _, _, table, protocol, *_ = ROUTE.unpack_from(message, HEADER.size)
    found = dict(attributes(message[HEADER.size + ROUTE.size :]))
    if RTA_TABLE in found:
        (table,) = struct.unpack("=I", found[RTA_TABLE])
    to = socket.inet_ntoa(found[RTA_DST]) if RTA_DST in found else "0.0.0.0"
    return f"{table} {protocol} {to}/{bits}"


def main(path: str):
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    sock.bind((0, RTMGRP_IPV4_ROUTE))
    with open(path, "w", encoding="ascii", buffering=1) as out:
        print("listening", flush=True)
        while True:
            message = sock.recv(1 << 16)
            heard_us = time.monotonic_ns() // 1000
            if what := change(message):
                out.write(f"{heard_us} {what}\n")


if __name__ == "__main__":
    main(sys.argv[1])
