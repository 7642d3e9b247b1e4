#!/usr/bin/env python3
"""Debian's Open MPI over verbs, unmodified: hpcc on two ranks, one on each of two hosts of the emulated network, by UCX and by the openib
BTL. hpcc checks its own results (HPL, PTRANS, RandomAccess, FFT); the counters of the NICs say that the messages went through
them. Then the same through a fault: the ranks use one NIC each, and Unbroken moves them to another. Then without failover: openib's own path
migration, over the second ports of the NICs. At last the kernels of tests/c/mpi_kernels.c on eight processes, which Unbroken migrates to second ports.

`make test` runs some of it; `--rest` runs the other transports and faults, and no kernels (`make test-mpi`).
"""

import re
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from lib.fabric import Fabric, UNBROKEN
from lib.mpi import COMMON, INFINIBAND, Kernel, OPENIB, OWN_APM, PORT_1, TWO_PORTS
from lib.process import Failure, Skip, wait_until
from lib.suite import Suite

SECONDS = 120
UNB0 = [*OPENIB, "unb0"]
UCX = ["--mca", "pml", "ucx", "-x", "UCX_NET_DEVICES=unb0:1", "-x"]
TRANSPORTS = {
    "openib": (UNB0, INFINIBAND),
    "ucx rc": ([*UCX, "UCX_TLS=rc_v,self"], []),
    "ucx rc, InfiniBand": ([*UCX, "UCX_TLS=rc_v,self"], INFINIBAND),
    "ucx ud": ([*UCX, "UCX_TLS=ud_v,self"], []),
    "openib, plain devices": (UNB0, [*INFINIBAND, "--device", "plain"]),
    "ucx rc, plain devices": ([*UCX, "UCX_TLS=rc_v,self"], ["--device", "plain"]),
    "openib, APM": (OWN_APM, TWO_PORTS),
}
APM = "openib, APM"
# Payload of an undisturbed run that no other path than the NICs' could have carried: far more than what connecting takes.
LEAST_BYTES = 50_000_000
# The fault comes after so much.
FAULT_BYTES = 100_000_000
# What the last packets before a migration take on the port that is left.
SILENCE_BYTES = 5_000_000
# The kernels of tests/c/mpi_kernels.c: size, iterations; and what a host sends before the fault, and on port 2 with it.
KERNELS = {"is": ("W", 60), "ft": ("W", 40), "lu": ("W", 25)}
KERNEL_BYTES = 4_000_000

# What hpcc reads, with comments as it wants them; N and the problem's shape for two ranks.
INPUT = """HPLinpack benchmark input file
Unbroken
HPL.out
8      device out
1      # of problems sizes
{n}    Ns
1      # of NBs
64     NBs
0      PMAP
1      # of process grids
1      Ps
2      Qs
16.0   threshold
1      # of panel fact
2      PFACTs
1      # of recursive stopping criteria
4      NBMINs
1      # of panels in recursion
2      NDIVs
1      # of recursive panel facts
1      RFACTs
1      # of broadcasts
1      BCASTs
1      # of lookahead depths
1      DEPTHs
2      SWAP
64     swapping threshold
0      L1
0      U
1      Equilibration
8      memory alignment
#####
0      additional problem sizes for PTRANS
1200
0      additional block sizes for PTRANS
40
"""


def payload(fabric: Fabric, rails) -> int:
    """Payload that the NICs of host a have sent on these rails."""
    nics = fabric.nics()
    return sum(nics[f"a/{rail}"]["tx_payload_bytes"] for rail in rails if f"a/{rail}" in nics)


@contextmanager
def hpcc_running(fabric: Fabric, transport: str, n: int, failover=True):
    """A context: hpcc with matrices of n by n, on two ranks. On leaving it, its result is checked."""
    for tool, package in (("mpirun", "openmpi-bin"), ("hpcc", "hpcc")):
        if shutil.which(tool) is None:
            raise Skip(f"{tool} is missing: install Debian's {package}")
    folder = Path(tempfile.mkdtemp(prefix="unbroken-hpcc-"))
    try:
        (folder / "hpccinf.txt").write_text(INPUT.format(n=n))
        run = [UNBROKEN, "run", *([] if failover else ["--no-failover"]), "--host"]
        ranks = [["-np", "1", "-wdir", folder, *run, host, "--", "hpcc"] for host in "ab"]
        yield fabric.start("mpirun", ["mpirun", *COMMON, *TRANSPORTS[transport][0], *ranks[0], ":", *ranks[1]])
        check_result(folder / "hpccoutf.txt")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def hpcc(logs, transport: str, n: int, fault: str | None = None):
    """Runs hpcc; with a fault, sets it in mid-stream."""
    settings = TRANSPORTS[transport][1]
    with Fabric(logs, *settings) as fabric, hpcc_running(fabric, transport, n) as mpirun:
        if fault:
            wait_until(lambda: mpirun.ended() or payload(fabric, [0]) > FAULT_BYTES, 60, "traffic on rail 0")
            early = fabric.events("switch")
            if mpirun.ended() or early:
                raise Failure(f"before the fault hpcc {'was over' if mpirun.ended() else 'ran'}, with {len(early)} switches {early[:1]}")
            fabric.fault(fault)
        mpirun.expect_success(SECONDS)
        first, others = payload(fabric, [0]), payload(fabric, [1, 2, 3])
        if not fault and fabric.events("switch"):
            raise Failure(f"a switch without a fault: {fabric.events('switch')[0]}")
        if first < LEAST_BYTES or (fault and others < LEAST_BYTES):
            raise Failure(f"{first} bytes of payload on rail 0, {others} on the others")
        return f"{first / 1e6:.0f} MB on rail 0, {others / 1e6:.0f} MB on others"


def migrated(logs, n: int, fault: str | None = None):
    """Runs hpcc with openib's own path migration; with a fault, takes port 1 away from it in mid-stream."""
    with Fabric(logs, *TRANSPORTS[APM][1]) as fabric, hpcc_running(fabric, APM, n, failover=False) as mpirun:
        first = 0
        if fault:
            wait_until(lambda: mpirun.ended() or payload(fabric, [0]) > FAULT_BYTES, 60, "traffic on port 1")
            states = [qp["migration"] for qp in fabric.status()["qps"] if qp["migration"]]
            early = payload(fabric, ["0/2"])
            if mpirun.ended() or early or not states or set(states) != {"armed"}:
                raise Failure(f"before the fault: ended {mpirun.ended()}, {early} bytes on port 2, QPs {states}")
            fabric.fault(fault)
            first = payload(fabric, [0])
        mpirun.expect_success(SECONDS)
        one, two = payload(fabric, [0]), payload(fabric, ["0/2"])
        migrations = len(fabric.events("path-migrated"))
        if not fault and (one < LEAST_BYTES or two or migrations):
            raise Failure(f"without a fault {one} bytes on port 1, {two} on port 2, {migrations} migrations")
        if fault and (two < LEAST_BYTES or one > first + SILENCE_BYTES or not migrations):
            raise Failure(f"{one} bytes on port 1 ({first} before the fault), {two} on port 2, {migrations} migrations")
        return f"{one / 1e6:.0f} MB on port 1, {two / 1e6:.0f} MB on port 2, {migrations} migrations"


def kernel(logs, name: str, size: str, iterations: int):
    """A kernel on two processes of each of four hosts; in mid-run port 1 of a host goes down, and is back a moment later. Unbroken migrates its queue pairs."""
    with Fabric(logs, *TWO_PORTS) as fabric:
        run = Kernel(fabric, PORT_1, name, size, iterations)
        run.begin()
        connections = {(qp["pid"], qp["qp"]) for qp in run.connections()}
        begun = payload(fabric, [0])
        wait_until(lambda: run.process.ended() or payload(fabric, [0]) > begun + KERNEL_BYTES, 60, "traffic on port 1")
        early = payload(fabric, ["0/2"])
        if run.process.ended() or early or fabric.events("path-migrated"):
            raise Failure(f"before the fault: ended {run.process.ended()}, {early} bytes on port 2")
        fabric.fault("nic a/0/1 down")
        wait_until(lambda: run.process.ended() or payload(fabric, ["0/2"]) > KERNEL_BYTES, 60, "traffic on port 2")
        fabric.clear()
        seconds = run.done(SECONDS)
        two, migrations = payload(fabric, ["0/2"]), fabric.events("path-migrated")
        if two < KERNEL_BYTES or not migrations:
            raise Failure(f"{two} bytes on port 2, {len(migrations)} migrations")
        # UD queue pairs, by which openib connects, have no other path, and go to another NIC.
        switches = [switch for switch in fabric.events("switch") if (switch["pid"], switch["qp"]) in connections]
        if any(switch["kind"] != "planned" or switch["replayed"] for switch in switches):
            raise Failure(f"a switch, where a migration is enough: {switches}")
        return f"{seconds:.1f} s, {payload(fabric, [0]) / 1e6:.0f} MB on port 1, {two / 1e6:.0f} MB on port 2, {len(migrations)} migrations of {len(connections)} queue pairs"


def check_result(file: Path):
    """hpcc says that all is right, and none of its checks failed."""
    if not file.exists():
        raise Failure("hpcc wrote no result")
    text = file.read_text()
    passed = len(re.findall(r"\bPASSED\b", text))
    wrong = [line for line in text.splitlines() if re.search(r"\bFAILED\b|^\w*(?:Failures|Errors)=[^0]", line)]
    if "\nSuccess=1\n" not in text or passed < 3 or wrong:
        raise Failure(f"hpcc: {passed} checks passed, {wrong or 'no Success=1'}")


# What `make test` runs of hpcc: a transport with QPs of each kind, undisturbed and through one fault each. The others are `--rest`, `make test-mpi`.
FIRST = ["hpcc, openib", "hpcc, ucx rc", "hpcc, openib, nic a/0 dead", "hpcc, ucx rc, nic b/0 down", f"hpcc, {APM}, nic a/0/1 down"]


def main():
    rest = "--rest" in sys.argv
    suite = Suite("mpi-rest" if rest else "mpi", [word for word in sys.argv[1:] if word != "--rest"])
    cases = [(f"hpcc, {transport}", hpcc, transport, 512) for transport in TRANSPORTS if transport != APM]
    faults = [("openib", "nic a/0 dead"), ("openib", "cable a/0 cut"), ("ucx rc", "nic b/0 down"), ("ucx rc", "nic a/0 dead")]
    # UCX finds its peers over UD, which stays on its NIC where NICs are plain.
    faults += [("openib, plain devices", "nic a/0 dead"), ("openib, plain devices", "cable b/0 cut")]
    cases += [(f"hpcc, {transport}, {fault}", hpcc, transport, 1024, fault) for transport, fault in [*faults, ("ucx ud", "nic a/0 dead")]]
    cases.append((f"hpcc, {APM}", migrated, 512))
    cases += [(f"hpcc, {APM}, {fault}", migrated, 1024, fault) for fault in ("nic a/0/1 down", "cable b/0/1 cut", "loss rail0 100%")]
    for case in cases:
        if (case[0] in FIRST) != rest:
            suite.case(*case)
    for name, (size, iterations) in KERNELS.items() if not rest else ():
        suite.case(f"{name}, nic a/0/1 down", kernel, name, size, iterations)
    sys.exit(suite.finish())


if __name__ == "__main__":
    main()
