"""Several Redis servers on this machine's loopback: a master with a replica and sentinels, or a
cluster. Nothing on a disk but their configurations; ended at the end."""

import subprocess
from pathlib import Path

from .ports import free_port
from .process import Failure, Process, wait_until
from .redis import PASSWORD, PREFIX, USER, rights, tools

ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
# However the machine is loaded.
PATIENCE_SECONDS = 40
MASTER = "lab"


class Servers:
    """A context."""

    def __init__(self, logs: Path):
        tools()
        self.logs, self.processes = logs, {}

    def __enter__(self):
        try:
            self.begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()

    def start(self, port: int, *options, conf: Path | None = None):
        """Starts a server and waits until it answers."""
        line = ["redis-server", *([str(conf)] if conf else []), "--port", str(port)]
        line += ["--bind", "127.0.0.1", "--protected-mode", "no", "--dir", str(self.logs)]
        process = Process(f"redis {port}", [*line, *options], self.logs / f"redis{port}.log", ENV)
        self.processes[port] = process
        wait_until(
            lambda: process.ended() or self.ask(port, "ping") == "PONG", 20, "Redis answers"
        )
        if process.ended():
            raise Failure(f"redis-server ended: {process.output()[-500:]}")

    def data(self, prefix: str) -> list:
        """Options of one that has entries under that prefix."""
        return ["--save", "", "--appendonly", "no", *rights(prefix)]

    def ask(self, port: int, *command) -> str:
        """What one answers to the administrator."""
        line = ["redis-cli", "-p", str(port), *map(str, command)]
        done = subprocess.run(line, capture_output=True, timeout=40)
        return done.stdout.decode(errors="replace").strip()

    def entries(self, port: int) -> list:
        """The names of the entries that one has of processes that have not ended."""
        keys = [key for key in self.ask(port, "keys", "*:process:*").split("\n") if key]
        return [key for key in keys if self.ask(port, "get", key) != "ended"]

    def users(self, port: int) -> int:
        """How many programs are there with their password."""
        clients = self.ask(port, "client", "list").split("\n")
        return sum(f" user={USER} " in client for client in clients)

    def env(self) -> dict:
        return {"UNBROKEN_DIRECTORY": self.url(), "UNBROKEN_DIRECTORY_PASSWORD": PASSWORD}


class Sentinels(Servers):
    """A master, a replica of it, and three sentinels."""

    def begin(self):
        self.master, self.replica = free_port(), free_port()
        self.sentinels = [free_port() for _ in range(3)]
        self.start(self.master, *self.data(PREFIX), "--repl-diskless-sync-delay", "0")
        self.start(self.replica, *self.data(PREFIX), "--replicaof", f"127.0.0.1 {self.master}")
        linked = lambda: "master_link_status:up" in self.ask(self.replica, "info", "replication")
        wait_until(linked, PATIENCE_SECONDS, "a replica that has what the master has")
        for port in self.sentinels:
            conf = self.logs / f"sentinel{port}.conf"
            conf.write_text(
                f"sentinel monitor {MASTER} 127.0.0.1 {self.master} 2\n"
                f"sentinel down-after-milliseconds {MASTER} 1000\n"
                f"sentinel failover-timeout {MASTER} 5000\n"
            )
            self.start(port, "--sentinel", conf=conf)
        known = lambda: all(
            f"slaves=1,sentinels={len(self.sentinels)}" in self.ask(port, "info", "sentinel")
            for port in self.sentinels
        )
        wait_until(known, PATIENCE_SECONDS, "sentinels that know each other and the replica")

    def url(self) -> str:
        # The first one is not there.
        named = ",".join(f"127.0.0.1:{port}" for port in (free_port(), *self.sentinels))
        return f"redis+sentinel://{USER}@{named}/{MASTER}/0?prefix={PREFIX}"

    def master_dies(self):
        """Kills the master, and waits until the replica is one."""
        self.processes[self.master].kill()
        promoted = lambda: self.ask(self.replica, "role").startswith("master")
        wait_until(promoted, PATIENCE_SECONDS, "a master in its place")


class Nodes(Servers):
    """A cluster of three masters."""

    def begin(self):
        self.nodes = [free_port() for _ in range(3)]
        for port in self.nodes:
            self.start(
                port,
                *self.data(f"{{{PREFIX}}}"),
                *["--cluster-enabled", "yes", "--cluster-config-file", f"nodes{port}.conf"],
                *["--cluster-port", str(free_port())],
            )
        named = [f"127.0.0.1:{port}" for port in self.nodes]
        made = self.ask(self.nodes[0], "--cluster", "create", *named, "--cluster-yes")
        if "All 16384 slots covered" not in made:
            raise Failure(f"no cluster was made: {made[-500:]}")
        whole = lambda: all("state:ok" in self.ask(p, "cluster", "info") for p in self.nodes)
        wait_until(whole, PATIENCE_SECONDS, "a cluster that is whole")
        self.slot = int(self.ask(self.nodes[0], "cluster", "keyslot", f"{{{PREFIX}}}"))

    def url(self) -> str:
        named = ",".join(f"127.0.0.1:{port}" for port in self.nodes)
        return f"redis+cluster://{USER}@{named}?prefix={PREFIX}"

    def owner(self) -> int:
        """The node that has the entries."""
        for line in self.ask(self.nodes[0], "cluster", "nodes").split("\n"):
            words = line.split()
            for part in words[8:]:
                low, _, high = part.partition("-")
                if not part.startswith("[") and int(low) <= self.slot <= int(high or low):
                    return int(words[1].split("@")[0].rsplit(":", 1)[1])
        raise Failure("nobody has the slot of the entries")

    def move(self) -> int:
        """Another node has the entries from now on: which."""
        old = self.owner()
        new = next(port for port in self.nodes if port != old)
        ids = {port: self.ask(port, "cluster", "myid") for port in (old, new)}
        self.ask(new, "cluster", "setslot", self.slot, "importing", ids[old])
        self.ask(old, "cluster", "setslot", self.slot, "migrating", ids[new])
        while keys := self.ask(old, "cluster", "getkeysinslot", self.slot, 100):
            self.ask(old, "migrate", "127.0.0.1", new, "", 0, 5000, "keys", *keys.split("\n"))
        for port in (new, old, *self.nodes):
            self.ask(port, "cluster", "setslot", self.slot, "node", ids[new])
        wait_until(lambda: self.owner() == new, PATIENCE_SECONDS, "the slot on another node")
        return new
