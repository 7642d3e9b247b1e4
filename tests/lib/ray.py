"""A Ray cluster of two nodes on loopback, with Ray as it comes from PyPI."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from . import venvs
from .paths import ROOT
from .ports import free_port
from .process import Failure, Process, wait_until
from .wheel import clean, run

REQUIREMENTS = ROOT / "tests" / "ray" / "requirements.txt"
FREE_BYTES = 3_000_000_000
START_SECONDS = 90
END_SECONDS = 30
# The least that Ray takes.
STORE_BYTES = 80_000_000
NODES = ("head", "second")
# Says which node a process is of, to whoever reads its environment.
MARK = "RAY_NODE_OF_THE_TESTS"


def interpreter() -> Path:
    """The interpreter of a virtual environment that has Ray (250 MB, made once)."""
    return venvs.interpreter("ray", "Ray", REQUIREMENTS, FREE_BYTES)


class Cluster:
    """Two nodes with a core each. All that they start has ended when it is left."""

    def __init__(self, logs: Path, python: Path, wheel: Path):
        self.logs, self.python = logs, python
        # Paths of sockets are short.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.site = self.folder / "site"
        pip = [python, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
        run(*pip, "--target", self.site, wheel, env=clean())
        self.env = clean(
            PYTHONPATH=str(self.site), RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_IMPORT_WARNING="1"
        )
        self.address = f"127.0.0.1:{free_port()}"
        self.nodes = {}

    def __enter__(self) -> "Cluster":
        try:
            self._start("head", "--head", f"--port={self.address.rpartition(':')[2]}")
            wait_until(self._answers, START_SECONDS, "the head of the Ray cluster", 0.3)
            self.add_second()
        except BaseException:
            self.leave()
            raise
        return self

    def __exit__(self, *_):
        self.leave()

    def add_second(self):
        """Starts the other node, and waits for its core."""
        self._start("second", f"--address={self.address}")
        wait_until(lambda: self.cores() == 2, START_SECONDS, "both nodes of the Ray cluster", 0.3)

    def _start(self, name: str, *options: str):
        ports = ["dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port"]
        ports += ["node-manager-port", "object-manager-port", "runtime-env-agent-port"]
        if name == "head":
            options += ("--include-dashboard=false",)
            options += (f"--temp-dir={self.folder}",)
        line = [self.python.with_name("ray"), "start", "--block", *options]
        line += ["--node-ip-address=127.0.0.1", "--num-cpus=1", "--num-gpus=0"]
        line += [f"--object-store-memory={STORE_BYTES}", "--min-worker-port=0"]
        line += ["--max-worker-port=0", *(f"--{port}={free_port()}" for port in ports)]
        env = {**self.env, MARK: f"{self.folder}/{name}"}
        self.nodes[name] = Process(name, line, self.logs / f"{name}.log", env)

    def _answers(self) -> bool:
        if self.nodes["head"].ended():
            raise Failure("the head of the Ray cluster has ended")
        return self.cores() is not None

    def cores(self) -> int | None:
        """How many the cluster has; None if none answers."""
        program = f"""
import ray
ray.init({self.address!r}, log_to_driver=False, logging_level="error")
print(int(ray.cluster_resources().get("CPU", 0)))
"""
        line = [self.python, "-c", program]
        try:
            done = subprocess.run(line, env=self.env, capture_output=True, text=True, timeout=40)
        except subprocess.TimeoutExpired:
            return None
        return int(done.stdout.split()[-1]) if done.returncode == 0 else None

    def processes(self, name: str | None = None) -> list:
        """The processes of a node, or of both, that run."""
        mark = f"{MARK}={self.folder}/{name or ''}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if mark in (entry / "environ").read_bytes() and running(entry):
                        found.append(int(entry.name))
                except OSError:
                    pass  # it has ended, or is another user's
        return found

    def computing(self) -> set:
        """The nodes of which a process has the library of the simulator."""
        return {name for name in NODES if any(map(has_library, self.processes(name)))}

    def kill(self, name: str):
        """Kills a node, as a machine that loses its power."""
        for pid in self.processes(name):
            end(pid, signal.SIGKILL)
        self.nodes.pop(name).kill()

    def leave(self):
        """Ends all."""
        for node in reversed(list(self.nodes.values())):
            node.kill(signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in self.processes():
            end(pid, signal.SIGKILL)
        for log in self.folder.glob("session_latest/logs/*"):
            if log.suffix in (".out", ".err", ".log") and log.stat().st_size:
                shutil.copy(log, self.logs / f"{log.stem}{log.suffix}.txt")
        shutil.rmtree(self.folder, ignore_errors=True)
        wait_until(lambda: not self.processes(), END_SECONDS, "the end of all that Ray has started")


def has_library(pid: int) -> bool:
    """Whether a process computes parts of sweeps."""
    try:
        return "libunbroken_simulations.so" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def running(entry: Path) -> bool:
    """Whether a process has not ended."""
    return (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def end(pid: int, sig: int):
    """Sends a signal to a process that may have ended."""
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        pass
