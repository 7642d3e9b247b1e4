"""Devices of the machine, on a machine that has none: tests/c/provider.c is the libibverbs below
them, whose devices are softnic's plain ones. All that Unbroken does with devices of the machine is
between, as with any provider's."""

import json
import os
import shutil
import subprocess
from pathlib import Path

from .cc import FLAGS
from .fabric import UNBROKEN, Fabric
from .paths import ROOT, TARGET
from .process import Failure

# The GID of these devices that leads to peers.
GID_INDEX = 3


def provider() -> Path:
    """The library, compiled anew if one of its sources is newer."""
    names = ("provider.c", "provider_infiniband.c", "provider_knobs.c", "provider_null.c")
    sources = [ROOT / "tests" / "c" / name for name in names]
    made = TARGET / "tests-c" / "provider.so"
    newest = max(source.stat().st_mtime for source in sources)
    if made.exists() and made.stat().st_mtime >= newest:
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    fresh = made.with_name(f"provider-{os.getpid()}.so")
    command = ["cc", *FLAGS, "-shared", "-fPIC", "-o", fresh, *sources, "-ldl", "-lpthread"]
    done = subprocess.run([str(a) for a in command], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise Failure(f"provider.c does not compile: {done.stderr[:2000]}")
    fresh.replace(made)
    return made


class MachineFabric(Fabric):
    """Programs on devices of the machine. Faults, and bytes of NICs, are those of the fabric below
    (`a/0` is unb0 of host a); queue pairs and events are those of Unbroken above."""

    gid_index = GID_INDEX
    # The hosts whose programs take faults of their devices (`set_device_fault`).
    faults = ""

    def __init__(self, logs: Path, *settings: str):
        self.below = None
        super().__init__(logs)
        if "infiniband" in settings:
            self.gid_index = 0
            self.env["TEST_GID_INDEX"] = "0"
        self.below = self._make_folder()
        # Another file, so that the loader takes it for another library.
        copy = self.below / "below.so"
        shutil.copy(UNBROKEN.with_name("libunbroken.so"), copy)
        self.env |= {
            "UNBROKEN_LIBIBVERBS": str(provider()),
            "TEST_PROVIDER_LIBRARY": str(copy),
            "TEST_PROVIDER_RUNTIME": str(self.below / "runtime"),
        }
        self._below("fabric", "up", "--device", "plain", *settings)

    def __exit__(self, kind, error, trace):
        super().__exit__(kind, error, trace)
        if kind is not None:
            (self.logs / "below.log").write_text(self._below("status").stdout)
        shutil.rmtree(self.below, ignore_errors=True)

    def _below(self, *args) -> subprocess.CompletedProcess:
        """Runs a command about the fabric below."""
        env = {**self.env, "UNBROKEN_RUNTIME": str(self.below / "runtime")}
        line = [str(UNBROKEN), *(str(arg) for arg in args)]
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=30)
        if done.returncode != 0:
            raise Failure(f"{' '.join(line)}: {done.stderr.strip()}")
        return done

    def run(self, host: str, args: list, name=None, failover=True, env=None, devices="all"):
        """Starts a program on a host, over its devices."""
        options = ["--devices", devices] + ([] if failover else ["--no-failover"])
        options += ["--faults"] if host in self.faults else []
        line = [UNBROKEN, "run", *options, "--", *args]
        env = {**(env or {}), "TEST_PROVIDER_HOST": host}
        return self.start(name or f"{host}-{Path(args[0]).name}", line, env)

    def fault(self, text: str, *schedule: str):
        self._below("fault", "set", text, *schedule)

    def clear(self, *what: str):
        self._below("fault", "clear", *what)

    def set_device_fault(self, text: str, *schedule: str):
        """Sets a fault on devices as the programs above know them (`unb0`)."""
        self._succeed("fault", "set", text, *schedule)

    def clear_device_faults(self, *what: str):
        self._succeed("fault", "clear", *what)

    def nics(self) -> dict:
        """What each NIC below has done."""
        status = json.loads(self._below("status", "--json").stdout)
        return {nic["nic"]: nic for nic in status["nics"]}
