"""The unknown source of test_unknown_sources.py: it sends forged control datagrams, as a process
that has nothing but UDP sockets and a plan.

usage: unknown_source.py PLAN.json RESULT.json. It knows more than such a process could: the
control QPNs of its victims, both ends of their queue pairs with their secret numbers, and
datagrams that were recorded on the wire. What it lacks is the key.
"""

import json
import random
import socket
import struct
import sys
import time

from lib.roce import FIRST_PORT, datagram, sending_socket

QKEY = 0x554E4252
VERSION = 4
HELLO, PROBE, PROBE_ACK, REFUSE, BYE = 1, 2, 3, 4, 5
SEAL_BYTES = 16
# The slot of the NIC that it says to have: answers would go to that port of its address.
SLOT = 9
SRC_QPN = SLOT << 16 | 0x77
BURST, PAUSE_SECONDS = 25, 0.004


def endpoint(end, qpn=None) -> bytes:
    """An end of a logical QP, or its process."""
    qpn, connection = (end["qpn"], end["connection"]) if qpn is None else (qpn, 0)
    return bytes.fromhex(end["gid"]) + struct.pack(">IQI", qpn, end["incarnation"], connection)


def message(kind, sender, receiver, body=b"") -> bytes:
    """A control message; see crates/failover/protocol/src/message.rs."""
    return (
        struct.pack(">2sBBHH", b"UB", VERSION, kind, 72 + len(body), 0) + sender + receiver + body
    )


class Forger:
    """Makes forged datagrams of every kind for the victims of a plan."""

    def __init__(self, plan, rng):
        self.victims, self.rng = plan["victims"], rng
        self.recorded = [bytes.fromhex(r) for r in plan["recorded"]]
        self.kinds = [self.hello, self.refuse, self.bye, self.probe, self.garbage, self.truncated]
        if self.recorded:
            self.kinds += [self.replayed] * 2

    def hello(self, victim):
        """The peer would be in an epoch, on any of the paths that there may be."""
        epoch = self.rng.choice([1, 2, 3, 64])
        flags, path = self.rng.randrange(8), (self.rng.randrange(4), self.rng.randrange(4))
        numbers = (self.rng.randrange(3), 0x12345, self.rng.getrandbits(24))
        body = struct.pack(">Q5BxHII4Q", epoch, epoch % 64, flags, 3, *path, *numbers, 0, 0, 0, 0)
        return message(HELLO, endpoint(victim["peer"]), endpoint(victim["own"]), body)

    def refuse(self, victim):
        """The peer would not go on, for every reason and two that are none."""
        reason, epoch = self.rng.randrange(9), self.rng.randrange(3)
        body = struct.pack(">B7xQQ", reason, epoch, victim["peer"]["incarnation"])
        return message(REFUSE, endpoint(victim["peer"]), endpoint(victim["own"]), body)

    def bye(self, victim):
        """The peer would be gone."""
        return message(BYE, endpoint(victim["peer"]), endpoint(victim["own"]))

    def probe(self, victim):
        """A question that would be answered, or an answer that was not asked for."""
        kind, body = self.rng.choice([PROBE, PROBE_ACK]), struct.pack(
            ">IQ", self.rng.randrange(100), 5
        )
        return message(kind, endpoint(victim["peer"], 0), endpoint(victim["own"], 0), body)

    def garbage(self, _victim):
        """Anything."""
        return self.rng.randbytes(self.rng.randrange(1000))

    def truncated(self, victim):
        """The beginning of a message."""
        whole = self.hello(victim)
        return whole[: self.rng.randrange(len(whole))]

    def replayed(self, _victim):
        """A recorded message, under its seal, with one bit changed."""
        changed = bytearray(self.rng.choice(self.recorded))
        bit = self.rng.randrange(8 * len(changed))
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    def next(self):
        """A victim's NIC (address, port, control QPN) and what is sent there."""
        victim = self.rng.choice(self.victims)
        kind = self.rng.choice(self.kinds)
        content = kind(victim)
        if kind != self.replayed:
            content += self.rng.choice([b"", bytes(SEAL_BYTES), self.rng.randbytes(SEAL_BYTES)])
        return kind.__name__, self.rng.choice(victim["nics"]), content


def main() -> int:
    """Sends for as long as the plan says, and counts what comes back."""
    with open(sys.argv[1], encoding="utf-8") as file:
        plan = json.load(file)
    rng = random.Random(plan["seed"])
    forger = Forger(plan, rng)
    senders = [sending_socket(address) for address in plan["sources"]]
    # Answers would go to the NIC that a datagram says it is from.
    listeners = [sending_socket(address, FIRST_PORT + SLOT) for address in plan["sources"]]
    sent, answers = {}, []

    def listen():
        for heard in (*senders, *listeners):
            heard.setblocking(False)
            try:
                while len(answers) < 100:
                    answers.append(heard.recv(2048).hex())
            except OSError:
                # Nothing there; or a port that was closed (ECONNREFUSED): the kernel's answer, not
                # the victim's.
                pass

    end = time.monotonic() + plan["seconds"]
    while time.monotonic() < end:
        for _ in range(BURST):
            kind, (address, port, qpn), content = forger.next()
            sender = rng.choice(senders)
            packet = datagram(qpn, SRC_QPN, QKEY, content, sender.getsockname(), (address, port))
            try:
                sender.sendto(packet, (address, port))
                sent[kind] = sent.get(kind, 0) + 1
            except (BlockingIOError, ConnectionRefusedError, socket.timeout):
                pass
        listen()
        time.sleep(PAUSE_SECONDS)
    time.sleep(0.2)
    listen()
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump({"sent": sent, "answers": answers}, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
