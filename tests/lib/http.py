"""Commands of `unbroken` that serve something over HTTP."""

import socket
import urllib.error
import urllib.request

from .fabric import UNBROKEN
from .ports import free_port
from .process import wait_until


class Endpoint:
    """`unbroken metrics --listen` or `unbroken web`, asked over HTTP."""

    def __init__(self, fabric, *args, name="endpoint"):
        self.port = free_port()
        line = [UNBROKEN, *args, "--listen", f"127.0.0.1:{self.port}"]
        self.process = fabric.start(name, line)
        wait_until(lambda: self.process.ended() or self.answers(), 20, "the endpoint answers")

    def answers(self) -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def get(self, path: str, body=None, **headers):
        """Status, headers and text of an answer."""
        url = f"http://127.0.0.1:{self.port}{path}"
        names = {name.replace("_", "-"): text for name, text in headers.items()}
        request = urllib.request.Request(url, data=body, headers=names)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.headers, e.read().decode()
