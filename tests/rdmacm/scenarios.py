#!/usr/bin/python3
"""What programs see of rdma_cm: `scenarios.py NAME [ARGUMENT…]`. Each scenario is one process, or
two of different hosts; the last line that it prints says what was measured."""

import errno
import os
import signal
import sys
import threading
import time

from abi import (
    CREATE,
    DEVICE,
    DISCONNECT,
    GET_EVENT,
    GET_OPTION,
    LISTEN,
    TCP,
    UDP,
    Channel,
    errno_of,
)


def listening(ip="0.0.0.0", port=0, backlog=0, space=TCP):
    """A channel and an id that listens there."""
    channel = Channel()
    listener = channel.create(space)
    listener.bind(ip, port)
    listener.listen(backlog)
    return channel, listener


def request(channel):
    """The id of the next request, and its event."""
    from abi import Id

    event = channel.event("CONNECT_REQUEST")
    return Id(channel, event.id), event


def connected(ip, channel, port, client=None):
    """Two ends of a connection."""
    client = client or Channel()
    one = client.create()
    one.ask(ip, port)
    other, _ = request(channel)
    other.accept()
    client.event("CONNECT_RESPONSE")
    one.establish()
    channel.event("ESTABLISHED")
    return one, other


def wrong_commands(_ip):
    """What is no command is EINVAL, and changes nothing."""
    channel = Channel()
    assert os.fstat(channel.fd).st_mode & 0o170000 == 0o020000, "a character device"
    unknown = [(25, bytes(64)), (2**32 - 1, bytes(64))]
    for command, body in [*unknown, (DISCONNECT, b""), (CREATE, b"")]:
        assert errno_of(channel.write, command, body) == errno.EINVAL, command
    for raw in [b"", b"\1", bytes(7)]:
        assert errno_of(os.write, channel.fd, raw) == errno.EINVAL, raw
    assert errno_of(channel.write, GET_OPTION, bytes(64)) == errno.ENOSYS
    assert errno_of(channel.write, LISTEN, bytes(8)) == errno.ENOENT, "no such id"
    assert errno_of(channel.create, 0x99) == errno.EINVAL, "no such port space"
    # An id is of the channel that made it.
    other, one = Channel(), channel.create()
    one.channel = other
    assert errno_of(one.listen) == errno.EINVAL
    # A copy of the descriptor is the channel, and a file is none.
    copy, channel.fd = channel.fd, os.dup(channel.fd)
    os.close(copy)
    channel.create()
    with open("/dev/null", "wb", buffering=0) as file:
        assert file.write(bytes([1, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0])) == 12
    channel.close()


def not_blocking(_ip):
    """GET_EVENT is EAGAIN where nothing waits."""
    channel = Channel(os.O_RDWR | os.O_NONBLOCK)
    assert errno_of(channel.write, GET_EVENT, bytes(8), 336) == errno.EAGAIN
    assert not channel.readable(0)
    one = channel.create()
    one.resolve("127.0.0.1", 9)
    assert channel.readable(5)
    channel.event("ADDR_RESOLVED")
    assert not channel.readable(0)
    # A thread that blocks is woken.
    blocking = Channel()
    waiting = blocking.create()
    got = []
    thread = threading.Thread(target=lambda: got.append(blocking.write(GET_EVENT, bytes(8), 336)))
    thread.start()
    waiting.resolve("127.0.0.1", 9)
    thread.join(10)
    assert got


def addresses(ip):
    """Ports are as those of TCP."""
    channel, listener = listening(port=7000)
    bind = lambda ip, port: errno_of(channel.create().bind, ip, port)
    assert bind("0.0.0.0", 7000) == errno.EADDRINUSE
    assert bind(ip, 7000) == errno.EADDRINUSE
    assert bind("192.0.2.1", 7001) == errno.EADDRNOTAVAIL
    assert errno_of(listener.bind, ip, 7002) == errno.EINVAL, "bound already"
    assert errno_of(channel.create(UDP).bind, "0.0.0.0", 7000) == 0, "another kind of port"
    listener.destroy()
    assert bind(ip, 7000) == 0, "given back"
    free = channel.create()
    free.bind(ip)
    assert free.port() >= 32768 and free.source() == ip
    # Nobody is there, or nobody listens.
    one = channel.create()
    one.resolve("192.0.2.1", 7)
    event = channel.event("ADDR_ERROR")
    assert event.status == -errno.ENODEV, event
    two = channel.create()
    two.ask(ip, 7777)
    assert channel.event("REJECTED").status == 8, "no such service"


def nobody_listens(ip):
    """A request is refused at once where nobody listens; where the port is bound, or the programs
    are connected already, it waits for a listener for a moment."""
    client = Channel()
    begin = time.monotonic()
    for _ in range(20):
        client.create().ask(ip, 7777)
        assert client.event("REJECTED").status == 8, "no such service"
        client.create(UDP).ask(ip, 7777)
        assert client.event("UNREACHABLE").status == 1, "no such service"
    # Each would wait for a second.
    assert time.monotonic() - begin < 20
    # Bound, and listening after the request.
    channel = Channel()
    late = channel.create()
    late.bind(ip, 7778)
    client.create().ask(ip, 7778, qpn=8)
    late.listen()
    request(channel)[0].accept()
    client.event("CONNECT_RESPONSE")
    # Connected, and bound and listening after the request.
    connected(ip, channel, 7778, Channel())
    client.create().ask(ip, 7779, qpn=7)
    later = channel.create()
    later.bind(ip, 7779)
    later.listen()
    request(channel)[0].accept()
    client.event("CONNECT_RESPONSE")


def private_data(ip):
    """Private data arrive, and are refused where they do not fit."""
    channel, listener = listening()
    client = Channel()
    one = client.create()
    fill = bytes(range(56))
    one.ask(ip, listener.port(), fill)
    other, event = request(channel)
    assert event.private == fill, event.private
    too_long = errno_of(other.accept, bytes(197))
    assert too_long == errno.EINVAL, too_long
    other.accept(bytes([7] * 196))
    event = client.event("CONNECT_RESPONSE")
    assert event.private == bytes([7] * 196) and event.qpn == 6
    one.establish()
    channel.event("ESTABLISHED")
    long = client.create()
    long.resolve(ip, listener.port())
    client.event("ADDR_RESOLVED")
    client.write(4, long.number.to_bytes(4, "little") + bytes(4))
    client.event("ROUTE_RESOLVED")
    assert errno_of(long.connect, bytes(57)) == errno.EINVAL


def rejections(ip):
    """The reason and the data of a rejection arrive."""
    channel, listener = listening()
    client = Channel()
    for reason, told in [(0, 28), (35, 35)]:
        client.create().ask(ip, listener.port())
        other, _ = request(channel)
        assert errno_of(other.reject, b"", 3) == errno.EINVAL
        other.reject(b"because", reason)
        event = client.event("REJECTED")
        assert (event.status, event.private[:7], len(event.private)) == (told, b"because", 148)
    # An id that is let go of rejects.
    client.create().ask(ip, listener.port())
    other, _ = request(channel)
    other.destroy()
    assert client.event("REJECTED").status == 28
    # So does a listener that ends, of what it has not told.
    client.create().ask(ip, listener.port())
    assert channel.readable(10)
    listener.destroy()
    assert client.event("REJECTED").status == 28


def backlog(ip):
    """A listener has its limit; who finds no room comes again."""
    channel, listener = listening(backlog=2)
    client = Channel()
    # A QP is in one connection: each has its own.
    for qpn in range(10, 14):
        client.create().ask(ip, listener.port(), qpn=qpn)
    # Requests arrive in their order: when this one is there, the four have been.
    other_channel, barrier = listening()
    client.create().ask(ip, barrier.port(), qpn=14)
    request(other_channel)
    for _ in range(4):
        other, _ = request(channel)
        other.accept()
    for _ in range(4):
        client.event("CONNECT_RESPONSE")


def both_disconnect(ip):
    """Each end is told once, whoever was first."""
    channel, listener = listening()
    for _ in range(20):
        client = Channel()
        one, other = connected(ip, channel, listener.port(), client)
        threads = [threading.Thread(target=end.disconnect) for end in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for end in (client, channel):
            assert end.event().name == "DISCONNECTED"
            assert end.event().name == "TIMEWAIT_EXIT"
        assert one.destroy() == 5, "events of this id"
        other.destroy()
        client.close()


def closing_a_channel(ip):
    """What was open in a channel ends when its last copy is closed."""
    channel, listener = listening()
    client = Channel()
    connected(ip, channel, listener.port(), client)
    copy = os.dup(client.fd)
    client.close()
    assert not channel.readable(0.3)
    os.close(copy)
    channel.event("DISCONNECTED")


def forked(ip):
    """A child can do nothing with its parent's channel, and takes nothing away."""
    channel, listener = listening()
    client = Channel()
    one, other = connected(ip, channel, listener.port(), client)
    child = os.fork()
    if child == 0:
        failed = errno_of(client.create)
        own = errno_of(lambda: Channel().create())
        os._exit(0 if (failed, own) == (errno.EIO, 0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    one.disconnect()
    client.event("DISCONNECTED")
    channel.event("DISCONNECTED")
    connected(ip, channel, listener.port(), client)


def attributes(ip):
    """The attributes of both ends' QPs fit together."""
    channel, listener = listening()
    client = Channel()
    one = client.create()
    one.ask(ip, listener.port(), qpn=0x123)
    assert errno_of(one.attributes, 2) == errno.EINVAL, "not connected yet"
    other, _ = request(channel)
    word = lambda raw, at: int.from_bytes(raw[at : at + 4], "little")
    theirs = [other.attributes(state) for state in (1, 2, 3)]
    assert word(theirs[1][1], 32) == 0x123
    other.accept(qpn=0x456)
    client.event("CONNECT_RESPONSE")
    ours = [one.attributes(state) for state in (1, 2, 3)]
    assert word(ours[1][1], 32) == 0x456
    assert [mask for mask, _ in ours] == [0x39, 0x121181 | 1 << 15, 0x12E01]
    assert word(ours[2][1], 28) == word(theirs[1][1], 24), "PSNs"
    assert word(theirs[2][1], 28) == word(ours[1][1], 24), "PSNs"
    assert errno_of(one.attributes, 4) == errno.EINVAL


def many(ip, count="1000"):
    """So many connections are made and ended."""
    channel, listener = listening()
    client = Channel()
    count, port = int(count), listener.port()

    def serve():
        for _ in range(count):
            other, _ = request_of(channel)
            other.accept()

    pending = []

    def request_of(channel):
        from abi import Id

        while True:
            event = channel.event()
            if event.name == "CONNECT_REQUEST":
                return Id(channel, event.id), event
            pending.append(event)

    thread = threading.Thread(target=serve)
    start = time.monotonic()
    thread.start()
    ids = []
    for _ in range(count):
        one = client.create()
        one.ask(ip, port)
        client.event("CONNECT_RESPONSE")
        one.establish()
        one.disconnect()
        event = client.event()
        while event.name != "DISCONNECTED":
            event = client.event()
        one.destroy()
        ids.append(one)
    thread.join()
    print(f"{count / (time.monotonic() - start):.0f} connections a second")


def serve(_ip, port):
    """A process that listens, and says what comes."""
    channel, listener = listening(port=int(port))
    print("listens", flush=True)
    other, _ = request(channel)
    other.accept()
    while True:
        event = channel.event()
        print(event.name, flush=True)
        if event.name == "DISCONNECTED":
            return


def serve_late(_ip, port):
    """Accepts a request when it gets SIGUSR1."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    channel, listener = listening(port=int(port))
    other, _ = request(channel)
    print("asked", flush=True)
    assert signal.sigtimedwait({signal.SIGUSR1}, 30), "no signal comes"
    other.accept()
    print(channel.event("ESTABLISHED").name, flush=True)
    listener.destroy()


def unknown_addresses(ip):
    """An address that is nobody's, in the network and beyond it; IPv6 for an address of IPv4."""
    channel, listener = listening("::")
    for address, error in [
        ("127.255.254.9", errno.EHOSTUNREACH),
        ("192.0.2.1", errno.ENODEV),
        ("2001:db8::1", errno.ENODEV),
    ]:
        one = channel.create()
        one.resolve(address, 7)
        event = channel.event("ADDR_ERROR")
        assert event.status == -error, (address, event)
    # A listener of all IPv6 addresses is reached by those of IPv4, too, as with TCP.
    client = Channel()
    one, other = connected(f"::ffff:{ip}", channel, listener.port(), client)
    one.disconnect()
    client.event("DISCONNECTED")
    other.destroy()


def hold(ip, port):
    """Connects, and stays."""
    client = Channel()
    one = client.create()
    one.ask(ip, int(port))
    client.event("CONNECT_RESPONSE")
    one.establish()
    print("connected", flush=True)
    while True:
        print(client.event(seconds=600).name, flush=True)


def leave(ip, port):
    """Connects, and ends without another word."""
    client = Channel()
    one = client.create()
    one.ask(ip, int(port))
    client.event("CONNECT_RESPONSE")
    one.establish()


def is_taken(_ip, port):
    """Another process of this host listens there."""
    channel = Channel()
    assert errno_of(channel.create().bind, "0.0.0.0", int(port)) == errno.EADDRINUSE


def device_is_there(_ip):
    """As programs look for it."""
    assert os.path.exists(DEVICE) and "rdma_cm" in os.listdir("/dev/infiniband")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    print("right")
