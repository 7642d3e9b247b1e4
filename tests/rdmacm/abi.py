"""The commands of /dev/infiniband/rdma_cm, as librdmacm writes them (rdma/rdma_user_cm.h)."""

import ctypes
import ipaddress
import os
import select
import struct

DEVICE = "/dev/infiniband/rdma_cm"
TCP, UDP = 0x0106, 0x0111
CREATE, DESTROY, BIND, RESOLVE, ROUTE, QUERY_ROUTE, CONNECT, LISTEN, ACCEPT, REJECT = range(10)
DISCONNECT, INIT_QP_ATTR, GET_EVENT, GET_OPTION, SET_OPTION, NOTIFY = range(10, 16)
MIGRATE = 18
EVENTS = [
    "ADDR_RESOLVED",
    "ADDR_ERROR",
    "ROUTE_RESOLVED",
    "ROUTE_ERROR",
    "CONNECT_REQUEST",
    "CONNECT_RESPONSE",
    "CONNECT_ERROR",
    "UNREACHABLE",
    "REJECTED",
    "ESTABLISHED",
    "DISCONNECTED",
    "DEVICE_REMOVAL",
    "MULTICAST_JOIN",
    "MULTICAST_ERROR",
    "ADDR_CHANGE",
    "TIMEWAIT_EXIT",
]
EVENT_SECONDS = 30


def sockaddr(ip, port):
    """A struct sockaddr_in6 with this address in it."""
    ip = ipaddress.ip_address(ip)
    if ip.version == 4:
        return (struct.pack("=H", 2) + struct.pack(">H", port) + ip.packed).ljust(28, b"\0")
    return struct.pack("=H", 10) + struct.pack(">HI", port, 0) + ip.packed + bytes(4)


class Event:
    """An event."""

    def __init__(self, raw):
        self.uid, self.id, event, self.status = struct.unpack_from("=QIIi", raw)
        self.name = EVENTS[event]
        self.qpn = struct.unpack_from("=I", raw, 20)[0]
        # Of a connection, not of datagrams.
        length = raw[20 + 8 + 256]
        self.private = raw[28 : 28 + length]

    def __repr__(self):
        return f"{self.name}({self.status})"


class Channel:
    """An event channel."""

    def __init__(self, flags=os.O_RDWR | os.O_CLOEXEC):
        self.fd = os.open(DEVICE, flags)
        self.next_uid = 1

    def write(self, command, body=b"", answer=0, at=0):
        """Writes a command whose answer has so many bytes; its pointer is put at `at`."""
        out = ctypes.create_string_buffer(max(answer, 1))
        if answer:
            body = body[:at] + struct.pack("=Q", ctypes.addressof(out)) + body[at + 8 :]
        done = os.write(self.fd, struct.pack("=IHH", command, len(body), answer) + body)
        assert done == len(body) + 8, done
        return out.raw[:answer]

    def readable(self, seconds):
        """Whether an event comes in this time."""
        return bool(select.select([self.fd], [], [], seconds)[0])

    def event(self, *names, seconds=EVENT_SECONDS):
        """The next event, which has one of these names."""
        assert self.readable(seconds), f"no event comes, {names} awaited"
        event = Event(self.write(GET_EVENT, bytes(8), 336))
        assert not names or event.name in names, f"{event}, and not {names}"
        return event

    def create(self, space=TCP):
        """Makes an id."""
        body = struct.pack("=QQH6x", self.next_uid, 0, space)
        self.next_uid += 1
        return Id(self, struct.unpack("=I", self.write(CREATE, body, 4, 8))[0])

    def close(self):
        """Closes it."""
        os.close(self.fd)


class Id:
    """An id of a channel."""

    def __init__(self, channel, number):
        self.channel, self.number = channel, number

    def bind(self, ip, port=0):
        """Binds it."""
        self.channel.write(BIND, bytes(8) + sockaddr(ip, port) + struct.pack("=I", self.number))

    def listen(self, backlog=0):
        """Listens."""
        self.channel.write(LISTEN, struct.pack("=II", self.number, backlog))

    def port(self):
        """The port that it is bound to."""
        raw = self.channel.write(QUERY_ROUTE, struct.pack("=QII", 0, self.number, 0), 208)
        return struct.unpack_from(">H", raw, 136 + 2)[0]

    def source(self):
        """The address that it is bound to, of IPv4."""
        raw = self.channel.write(QUERY_ROUTE, struct.pack("=QII", 0, self.number, 0), 208)
        return str(ipaddress.IPv4Address(raw[140:144]))

    def resolve(self, ip, port):
        """Asks for the way to an address."""
        target = struct.pack("=II", self.number, 1000)
        self.channel.write(RESOLVE, bytes(28) + sockaddr(ip, port) + target)

    def ask(self, ip, port, private=b"", qpn=5):
        """Asks for a connection; the answer is an event."""
        self.resolve(ip, port)
        self.channel.event("ADDR_RESOLVED")
        self.channel.write(ROUTE, struct.pack("=II", self.number, 1000))
        self.channel.event("ROUTE_RESOLVED")
        self.connect(private, qpn)

    def connect(self, private=b"", qpn=5):
        """Sends the request."""
        tail = struct.pack("=IIII", self.number, 0, 0, 0)
        self.channel.write(CONNECT, _param(private, qpn) + tail)

    def accept(self, private=b"", qpn=6, uid=1 << 40):
        """Accepts a request."""
        tail = struct.pack("=IIII", self.number, 0, 0, 0)
        self.channel.write(ACCEPT, struct.pack("=Q", uid) + _param(private, qpn) + tail)

    def establish(self):
        """Answers a reply."""
        body = bytes(8 + 272) + struct.pack("=IIII", self.number, 0, 0, 0)
        self.channel.write(ACCEPT, body)

    def reject(self, private=b"", reason=0):
        """Rejects a request."""
        head = struct.pack("=IBBH", self.number, len(private), reason, 0)
        self.channel.write(REJECT, head + private.ljust(256, b"\0"))

    def disconnect(self):
        """Ends its connection."""
        self.channel.write(DISCONNECT, struct.pack("=I", self.number))

    def attributes(self, state):
        """What its QP is to be changed to: the mask and the bytes."""
        raw = self.channel.write(INIT_QP_ATTR, struct.pack("=QII", 0, self.number, state), 144)
        return struct.unpack_from("=I", raw)[0], raw

    def destroy(self):
        """Ends it; gives how many of its events were read."""
        body = struct.pack("=QII", 0, self.number, 0)
        return struct.unpack("=I", self.channel.write(DESTROY, body, 4))[0]


def _param(private, qpn):
    head = struct.pack("=II", qpn, 0) + private.ljust(256, b"\0")
    return head + bytes([len(private), 0, 1, 1, 0, 7, 7, 1])


def errno_of(call, *args):
    """The error number that a call fails with; 0: it does not fail."""
    try:
        call(*args)
    except OSError as e:
        return e.errno
    return 0
