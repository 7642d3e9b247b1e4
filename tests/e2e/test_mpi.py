"""Debian's Open MPI over verbs, unmodified, by UCX and by the openib BTL.

hpcc runs on two ranks, one on each of two hosts of the emulated network. It checks its own results
(HPL, PTRANS, RandomAccess, FFT); the counters of the NICs show that the messages went through them.
Then the same through a fault: the ranks use one NIC each, and Unbroken moves them to another. Then
without failover: openib's own path migration, over the second ports of the NICs. At last the
kernels of tests/c/mpi_kernels.c on eight processes, which Unbroken migrates to second ports.
"""

import pytest

from lib.cc import compile_c
from lib.fabric import UNBROKEN, Fabric
from lib.hpcc import APM, TRANSPORTS, hpcc_running
from lib.mpi import COMMON, PORT_1, TWO_PORTS, Kernel
from lib.process import Failure, needs, wait_until

# MPI's ranks poll, and stand still where others compute beside them.
pytestmark = [pytest.mark.mpi, pytest.mark.serial]


SECONDS = 120
# Payload of an undisturbed run that no other path than the NICs' could have carried: far more than
# what connecting takes.
LEAST_BYTES = 50_000_000
# The fault comes after so much.
FAULT_BYTES = 100_000_000
# OpenSHMEM: rounds of 64 kB, and what the NICs must have carried.
SHMEM_ROUNDS, SHMEM_BYTES = 2_000, 10_000_000
# What the last packets before a migration take on the port that is left.
SILENCE_BYTES = 5_000_000
# The kernels of tests/c/mpi_kernels.c: size, iterations; and what a host sends before the fault,
# and on port 2 with it.
KERNELS = {"is": ("W", 60), "ft": ("W", 40), "lu": ("W", 25)}
KERNEL_BYTES = 4_000_000


def word(value):
    """The id of a transport or a fault."""
    return value.replace(",", "").replace("/", "").replace(" ", "-")


def payload(fabric: Fabric, rails) -> int:
    """Payload that the NICs of host a have sent on these rails."""
    nics = fabric.nics()
    return sum(nics[f"a/{rail}"]["tx_payload_bytes"] for rail in rails if f"a/{rail}" in nics)


def hpcc(logs, transport: str, n: int, fault: str | None = None):
    """Runs hpcc; with a fault, sets it in mid-stream."""
    settings = TRANSPORTS[transport][1]
    with Fabric(logs, *settings) as fabric, hpcc_running(fabric, transport, n) as mpirun:
        if fault:
            wait_until(
                lambda: mpirun.ended() or payload(fabric, [0]) > FAULT_BYTES,
                SECONDS,
                "traffic on rail 0",
            )
            early = fabric.events("switch")
            if mpirun.ended() or early:
                raise Failure(
                    f"before the fault hpcc {'was over' if mpirun.ended() else 'ran'}, with "
                    f"{len(early)} switches {early[:1]}"
                )
            fabric.fault(fault)
        mpirun.expect_success(SECONDS)
        first, others = payload(fabric, [0]), payload(fabric, [1, 2, 3])
        if not fault and fabric.events("switch"):
            raise Failure(f"a switch without a fault: {fabric.events('switch')[0]}")
        if first < LEAST_BYTES or (fault and others < LEAST_BYTES):
            raise Failure(f"{first} bytes of payload on rail 0, {others} on the others")
        return f"{first / 1e6:.0f} MB on rail 0, {others / 1e6:.0f} MB on others"


@pytest.mark.parametrize("fault", [None, "nic a/0 dead"], ids=["undisturbed", "nic dead"])
@pytest.mark.parametrize("failover", [True, False], ids=["failover", "none"])
def test_openshmem(logs, note, failover, fault):
    """OpenSHMEM over UCX: the symmetric heap and static variables, WRITEs, READs and atomics. One
    application, whose PEs find their hosts by their ranks: with two (`A : B`) Open MPI 4.1.4 mixes
    up the memory of its PEs, over TCP too."""
    if fault and not failover:
        pytest.skip("it would not survive")
    needs("oshrun", "openmpi-bin")
    program = compile_c("openshmem", compiler="oshcc")
    line = ["oshrun", *COMMON, "--mca", "pml", "ucx", "--mca", "spml", "ucx"]
    line += ["-x", "UCX_NET_DEVICES=unb0:1", "-x", "UCX_TLS=rc_v,self"]
    run = f"{UNBROKEN} run {'' if failover else '--no-failover'} --host"
    host = '$(echo ab | cut -c $((OMPI_COMM_WORLD_RANK + 1)))'
    line += ["-np", 2, "sh", "-c", f"exec {run} {host} -- {program} {SHMEM_ROUNDS}"]
    with Fabric(logs) as fabric:
        oshrun = fabric.start("oshrun", line)
        if fault:
            enough = lambda: payload(fabric, [0]) > SHMEM_BYTES
            wait_until(lambda: oshrun.ended() or enough(), SECONDS, "traffic on rail 0")
            fabric.fault(fault)
        # Its own end, shmem_finalize, is a SIGSEGV over any transport.
        oshrun.wait(SECONDS)
        done = [f"PE {pe} of 2: {SHMEM_ROUNDS} rounds" for pe in range(2)]
        if not all(line in oshrun.output() for line in done):
            raise Failure("not all PEs have done their rounds")
        first, others = payload(fabric, [0]), payload(fabric, [1, 2, 3])
        if first < SHMEM_BYTES or (fault and others < SHMEM_BYTES):
            raise Failure(f"{first} bytes of payload on rail 0, {others} on the others")
        note(f"{first / 1e6:.0f} MB on rail 0, {others / 1e6:.0f} MB on others")


@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != APM], ids=word)
def test_hpcc(logs, note, transport):
    note(hpcc(logs, transport, 512))


# UCX finds its peers over UD, which stays on its NIC where NICs are plain.
@pytest.mark.parametrize(
    "transport, fault",
    [
        ("openib", "nic a/0 dead"),
        ("openib", "cable a/0 cut"),
        ("ucx rc", "nic b/0 down"),
        ("ucx rc", "nic a/0 dead"),
        ("openib, plain devices", "nic a/0 dead"),
        ("openib, plain devices", "cable b/0 cut"),
        ("ucx ud", "nic a/0 dead"),
    ],
    ids=word,
)
def test_hpcc_through_a_fault(logs, note, transport, fault):
    note(hpcc(logs, transport, 1024, fault))


@pytest.mark.parametrize(
    "n, fault",
    [(512, None), (1024, "nic a/0/1 down"), (1024, "cable b/0/1 cut"), (1024, "loss rail0 100%")],
    ids=["no-fault", "port-down", "cable-cut", "switch-loses-all"],
)
def test_hpcc_with_its_own_path_migration(logs, note, n, fault):
    """Runs hpcc with openib's own path migration; with a fault, takes port 1 away from it in
    mid-stream."""
    with (
        Fabric(logs, *TRANSPORTS[APM][1]) as fabric,
        hpcc_running(fabric, APM, n, failover=False) as mpirun,
    ):
        first = 0
        if fault:
            wait_until(
                lambda: mpirun.ended() or payload(fabric, [0]) > FAULT_BYTES,
                SECONDS,
                "traffic on port 1",
            )
            states = [qp["migration"] for qp in fabric.status()["qps"] if qp["migration"]]
            early = payload(fabric, ["0/2"])
            if mpirun.ended() or early or not states or set(states) != {"armed"}:
                raise Failure(
                    f"before the fault: ended {mpirun.ended()}, {early} bytes on port 2, QPs "
                    f"{states}"
                )
            fabric.fault(fault)
            first = payload(fabric, [0])
        mpirun.expect_success(SECONDS)
        one, two = payload(fabric, [0]), payload(fabric, ["0/2"])
        migrations = len(fabric.events("path-migrated"))
        if not fault and (one < LEAST_BYTES or two or migrations):
            raise Failure(
                f"without a fault {one} bytes on port 1, {two} on port 2, {migrations} migrations"
            )
        if fault and (two < LEAST_BYTES or one > first + SILENCE_BYTES or not migrations):
            raise Failure(
                f"{one} bytes on port 1 ({first} before the fault), {two} on port 2, {migrations} "
                "migrations"
            )
        note(f"{one / 1e6:.0f} MB on port 1, {two / 1e6:.0f} MB on port 2, {migrations} migrations")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.smoke if name == "is" else ()) for name in KERNELS],
)
def test_kernel(logs, note, name):
    """A kernel on two processes of each of four hosts; in mid-run port 1 of a host goes down, and
    is back a moment later. Unbroken migrates its queue pairs."""
    size, iterations = KERNELS[name]
    with Fabric(logs, *TWO_PORTS) as fabric:
        run = Kernel(fabric, PORT_1, name, size, iterations)
        run.begin()
        connections = {(qp["pid"], qp["qp"]) for qp in run.connections()}
        begun = payload(fabric, [0])
        wait_until(
            lambda: run.process.ended() or payload(fabric, [0]) > begun + KERNEL_BYTES,
            60,
            "traffic on port 1",
        )
        early = payload(fabric, ["0/2"])
        if run.process.ended() or early or fabric.events("path-migrated"):
            raise Failure(f"before the fault: ended {run.process.ended()}, {early} bytes on port 2")
        fabric.fault("nic a/0/1 down")
        wait_until(
            lambda: run.process.ended() or payload(fabric, ["0/2"]) > KERNEL_BYTES,
            60,
            "traffic on port 2",
        )
        fabric.clear()
        seconds = run.done(SECONDS)
        two, migrations = payload(fabric, ["0/2"]), fabric.events("path-migrated")
        if two < KERNEL_BYTES or not migrations:
            raise Failure(f"{two} bytes on port 2, {len(migrations)} migrations")
        # UD queue pairs, by which openib connects, have no other path, and go to another NIC.
        switches = [
            switch
            for switch in fabric.events("switch")
            if (switch["pid"], switch["qp"]) in connections
        ]
        if any(switch["kind"] != "planned" or switch["replayed"] for switch in switches):
            raise Failure(f"a switch, where a migration is enough: {switches}")
        note(
            f"{seconds:.1f} s, {payload(fabric, [0]) / 1e6:.0f} MB on port 1, {two / 1e6:.0f} MB "
            f"on port 2, {len(migrations)} migrations of {len(connections)} queue pairs"
        )
