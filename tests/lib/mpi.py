"""Debian's Open MPI over verbs, unmodified, on hosts of an emulated network; and the kernels of
tests/c/mpi_kernels.c on it."""

import collections
import json
import subprocess
from pathlib import Path

from .cc import compile_c
from .fabric import UNBROKEN, Fabric
from .process import Failure, Process, Skip, needs, wait_until

# Two ranks may share a core, and wait for each other: they give it up when idle. All is on this
# machine: no ssh is needed.
COMMON = [
    "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
    "--mca", "plm", "isolated",
    "--mca", "mpi_yield_when_idle", "1",
    "--mca", "btl_openib_warn_no_device_params_found", "0",
    "--mca", "btl_openib_warn_default_gid_prefix", "0",
]  # fmt: skip
# The openib BTL takes no other port than InfiniBand's.
INFINIBAND = ["--link-layer", "infiniband"]
TWO_PORTS = [*INFINIBAND, "--ports", "2"]
OPENIB = "--mca pml ob1 --mca btl openib,self --mca btl_openib_allow_ib 1".split()
OPENIB += ["--mca", "btl_openib_if_include"]
# Of a NIC with two ports, openib's own path migration needs both, and would else use both.
PORT_1 = [*OPENIB, "unb0:1"]
# Silence is noticed after 27 timeouts: of 17 ms each, where openib's own choice is 4 s.
OWN_APM = [*OPENIB, "unb0", "--mca", "btl_openib_enable_apm_over_ports", "1"]
OWN_APM += ["--mca", "btl_openib_ib_timeout", "12"]
HOSTS = "abcd"
_BEGIN_SECONDS, _ARMED_SECONDS = 60, 20


def kernels() -> Path:
    """The program, compiled."""
    needs("mpirun", "openmpi-bin")
    needs("mpicc", "libopenmpi-dev")
    flags = subprocess.run(
        ["mpicc", "--showme:incdirs"], capture_output=True, text=True, timeout=20
    ).stdout.split()
    if not any((Path(folder) / "mpi.h").exists() for folder in flags):
        raise Skip("mpi.h is missing: install Debian's libopenmpi-dev")
    return compile_c("mpi_kernels", "-lm", compiler="mpicc")


class Kernel:
    """A kernel on some processes of each host, from `begin` to `done`."""

    def __init__(
        self,
        fabric: Fabric,
        options: list,
        kernel: str,
        size: str,
        iterations: int,
        hosts=HOSTS,
        each=2,
        failover=True,
    ):
        program = kernels()
        self.fabric, self.processes = fabric, len(hosts) * each
        self.go, self.qps = fabric.files / "mpi-kernels-go", []
        run = [UNBROKEN, "run", *([] if failover else ["--no-failover"]), "--host"]
        command = ["mpirun", *COMMON, *options]
        for n, host in enumerate(hosts):
            command += [*([":"] if n else []), "-np", each, *run, host]
            command += ["--", program, kernel, size, iterations, self.go]
        self.process: Process = fabric.start("mpirun", command)

    def _reported(self) -> list:
        lines = [
            line
            for line in self.process.output().splitlines()
            if line.startswith("{") and line.endswith("}")
        ]
        return [json.loads(line) for line in lines]

    def _report(self, key: str):
        """Waits until the program reports this, and gives it."""
        found = lambda: [line[key] for line in self._reported() if key in line]
        wait_until(
            lambda: found() or self.process.ended(), _BEGIN_SECONDS, f"the kernel reports '{key}'"
        )
        if not found():
            raise Failure(f"mpirun ended before the kernel reported '{key}'")
        return found()[0]

    def begin(self) -> int:
        """Waits until the queue pairs to all processes can migrate, has the iterations begin, and
        gives when they did (`now_us`)."""
        self._report("connected")

        def all_armed():
            self.qps = self.fabric.status()["qps"]
            states = [qp["migration"] for qp in self.qps if qp["migration"]]
            # Each process has one to every process, itself included, or a multiple of that.
            return states and set(states) == {"armed"} and len(states) % self.processes**2 == 0

        try:
            wait_until(all_armed, _ARMED_SECONDS, "all queue pairs are ARMED")
        except Failure as failure:
            raise Failure(
                f"{failure}, but "
                f"{dict(collections.Counter(qp['migration'] or 'UD' for qp in self.qps))}"
            ) from None
        self.go.touch()
        return self._report("began_us")

    def connections(self) -> list:
        """The queue pairs that can migrate; openib's others, by which it connects, are UD."""
        return [qp for qp in self.qps if qp["migration"]]

    def done(self, seconds: float) -> float:
        """Waits until it has ended, and checks what it says; gives the seconds that its iterations
        took."""
        self.process.expect_success(seconds)
        last = self._reported()[-1]
        if last.get("verified") is not True or last["processes"] != self.processes:
            raise Failure(f"the kernel says {last}")
        return last["seconds"]
