"""A path for UDP over the loopback device that loses as much as is set, and counts it: what a
program measures can be compared with what was."""

import random
import selectors
import socket
import threading

BUFFER_BYTES = 8 << 20


class LossyPath:
    """A context: datagrams to `port` go on to 127.0.0.1:`far`, but for a share of them, and answers
    come back whole. One near end."""

    def __init__(self, far: int, loss: float, seed: int = 1):
        self.far, self.loss, self.random = ("127.0.0.1", far), loss, random.Random(seed)
        # Datagrams that came from the near end, and that were lost of them, by their bytes.
        self.came, self.lost = {}, {}
        self.near_socket, self.far_socket = (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in "nf"
        )
        for s in (self.near_socket, self.far_socket):
            # Above net.core.rmem_max, where we may: else the path would lose more than that.
            force = getattr(socket, "SO_RCVBUFFORCE", 33)
            try:
                s.setsockopt(socket.SOL_SOCKET, force, BUFFER_BYTES)
            except PermissionError:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            s.bind(("127.0.0.1", 0))
        self.port = self.near_socket.getsockname()[1]
        self.ends, self.end = socket.socketpair()
        self.thread = threading.Thread(target=self._forward, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.end.close()
        self.thread.join()
        for s in (self.near_socket, self.far_socket, self.ends):
            s.close()

    def _forward(self):
        near = None
        with selectors.DefaultSelector() as ready:
            for s in (self.near_socket, self.far_socket, self.ends):
                ready.register(s, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is self.ends:
                        return
                    datagram, sender = key.fileobj.recvfrom(1 << 16)
                    if key.fileobj is self.far_socket:
                        self.near_socket.sendto(datagram, near)
                        continue
                    near, size = sender, len(datagram)
                    self.came[size] = self.came.get(size, 0) + 1
                    if self.random.random() < self.loss:
                        self.lost[size] = self.lost.get(size, 0) + 1
                    else:
                        self.far_socket.sendto(datagram, self.far)
