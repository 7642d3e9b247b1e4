"""A Redis server of a test's own, and a proxy in front of it that delays or holds what goes
through."""

import shutil
import subprocess
import sys
from pathlib import Path

from .ports import free_port
from .process import Failure, Process, Skip, wait_until

USER, PASSWORD, PREFIX = "unbroken", "right", "lab"
# What docs/guide/failover.md says that the user needs.
RIGHTS = "~%s:* +@read +@write +@connection +time"
PORT = 6379
PROXY_PORT = 6380
PROXY = Path(__file__).parents[1] / "e2e" / "helpers" / "proxy.py"


def tools():
    """Skips where Redis is not there."""
    for tool in ("redis-server", "redis-cli"):
        if shutil.which(tool) is None:
            raise Skip(f"'{tool}' is missing (Debian package redis-server)")


def rights(prefix: str, password: str = PASSWORD) -> list:
    """Options of a server whose user `USER` may do what is needed."""
    users = f"--user default on nopass ~* &* +@all --user {USER} on >{password} {RIGHTS % prefix}"
    return users.split()


class Redis:
    """A context: a server at m of a `Cluster`, or on this machine's loopback, with nothing on a
    disk; ended at the end."""

    def __init__(self, net, logs: Path):
        tools()
        self.net, self.logs, self.process, self.starts = net, logs, None, 0
        self.within = [str(word) for word in net.within("m")] if net else []
        self.port, self.addr = (PORT, "0.0.0.0") if net else (free_port(), "127.0.0.1")
        self.proxy, self.proxy_port = None, PROXY_PORT if net else free_port()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        if self.proxy:
            self.proxy.kill()
            self.proxy.wait()

    def start(self, password=PASSWORD):
        """Starts an empty server, and waits until it answers."""
        self.starts += 1
        line = [*self.within, "redis-server", "--port", self.port, "--bind", self.addr]
        line += ["--save", "", "--appendonly", "no", "--protected-mode", "no"]
        line += [*rights(PREFIX, password), "--dir", self.logs]
        log, env = self.logs / f"redis{self.starts}.log", {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        self.process = Process("redis", line, log, env)
        answers = lambda: self.process.ended() or self.ask("ping") == "PONG"
        wait_until(answers, 20, "Redis answers")
        if self.process.ended():
            raise Failure(f"redis-server ended: {self.process.output()[-500:]}")

    def kill(self):
        """Kills the server."""
        if self.process:
            self.process.kill()

    def ask(self, *command) -> str:
        """What it answers to the administrator."""
        line = [str(word) for word in [*self.within, "redis-cli", "-p", self.port, *command]]
        done = subprocess.run(line, capture_output=True, text=True, timeout=20)
        return done.stdout.strip()

    def keys(self, kind: str) -> list:
        """The names of the entries of a kind."""
        return [key for key in self.ask("keys", f"{PREFIX}:*:{kind}:*").split("\n") if key]

    def users(self) -> int:
        """How many clients are there with their password."""
        return sum(f" user={USER} " in client for client in self.ask("client", "list").split("\n"))

    def disconnect_all(self):
        """Ends all connections of clients."""
        self.ask("client", "kill", "type", "normal", "skipme", "yes")

    # The proxy

    def start_proxy(self):
        """Starts the proxy, which lets everything through."""
        line = [*self.within, sys.executable, str(PROXY), str(self.proxy_port), str(self.port)]
        self.proxy = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._said("listening")

    def pass_on(self):
        """Lets everything through at once, also what it held."""
        self._tell("pass")

    def delay(self, ms: int):
        """Delays what goes through, each way."""
        self._tell(f"delay {ms}")

    def hold(self):
        """Lets nothing through, and tells nobody."""
        self._tell("hold")

    def _tell(self, word: str):
        self.proxy.stdin.write(word + "\n")
        self.proxy.stdin.flush()
        self._said(word)

    def _said(self, word: str):
        line = self.proxy.stdout.readline().strip()
        if line != word:
            raise Failure(f"the proxy said '{line}' where '{word}' was due")

    def url(self, host: str | None = None, **settings) -> str:
        """Where a host finds it."""
        addr = self.net.server(host) if host else self.addr
        port = self.proxy_port if self.proxy else self.port
        more = "".join(f"&{name}={value}" for name, value in settings.items())
        return f"redis://{USER}@{addr}:{port}/0?prefix={PREFIX}{more}"

    def env(self, password=PASSWORD, **settings) -> dict:
        """What a program's environment needs to use it."""
        return {"UNBROKEN_DIRECTORY": self.url(**settings), "UNBROKEN_DIRECTORY_PASSWORD": password}
