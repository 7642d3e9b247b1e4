"""A NIC that dies while a program starts: at its very start, while it opens devices, while its ends
find each other, in mid-stream.

Open MPI over openib and over UCX, and UCX alone, all with their connection managers on UD. Each
must end right, and what is sent after the fault must have gone through the other NICs. `--long`
goes through every program, transport and instant; without it, a few that stand for them.
"""

import time
from itertools import product

import pytest

from lib import options
from lib.fabric import Fabric
from lib.hpcc import TRANSPORTS, hpcc_running
from lib.ports import free_port, listens
from lib.process import Failure, needs, wait_until

pytestmark = [pytest.mark.mpi, pytest.mark.serial]

# The longest take 75 s on a busy machine, and 10 s on an idle one.
SECONDS = 240
FAULT = "nic a/0 dead"
INSTANTS_MS = [0, 10, 30, 100, 300, 1000, 3000]
RAILS = {"one-rail": "unb0:1", "two-rails": "unb0:1,unb1:1"}
HPCC_TRANSPORTS = ["openib", "ucx rc", "ucx ud"]
UCX_TLS = ["rc_v", "ud_v"]
# How many messages of 64 KiB each test sends before a fault that comes early; far more for a later
# one. (A get over UD is slow.)
UCX_TESTS = {
    "tag_bw": 100_000,
    "ucp_put_bw": 100_000,
    "ucp_get": 60_000,
    "ucp_am_bw": 60_000,
    "stream_bw": 60_000,
}
UCX_SLOW = {("ucp_get", "ud_v"): 3_000}
# Payload beyond what connecting takes.
LEAST_BYTES = 1_000_000


def others(fabric: Fabric) -> int:
    """Payload that the NICs of host a but the first have moved."""
    nics = fabric.nics()
    return sum(
        nics[f"a/{rail}"][f"{direction}_payload_bytes"]
        for rail in (1, 2, 3)
        if f"a/{rail}" in nics
        for direction in ("tx", "rx")
    )


def check(fabric: Fabric):
    """Nothing was given up, and the other NICs have carried the rest; gives how much."""
    given_up = fabric.events("give-up")
    if given_up:
        raise Failure(f"given up: {given_up[0]}")
    carried = others(fabric)
    if carried < LEAST_BYTES:
        raise Failure(f"the other NICs carried {carried} bytes")
    return f"{carried / 1e6:.0f} MB on other NICs, {len(fabric.events('switch'))} switches"


@pytest.mark.parametrize("instant_ms", INSTANTS_MS if options.LONG else [300])
@pytest.mark.parametrize("transport", HPCC_TRANSPORTS, ids=lambda name: name.replace(" ", "-"))
def test_hpcc(logs, note, transport, instant_ms):
    n = 512 if instant_ms < 1000 else 1024 if instant_ms < 3000 else 2048
    settings = TRANSPORTS[transport][1] or ["--hosts", "a,b"]
    with Fabric(logs, *settings) as fabric:
        with hpcc_running(fabric, transport, n) as mpirun:
            time.sleep(instant_ms / 1000)
            fabric.fault(FAULT)
            mpirun.expect_success(SECONDS)
        note(check(fabric))


def ucx_cases():
    """Programs, transports, rails and instants."""
    if options.LONG:
        return list(product(UCX_TESTS, UCX_TLS, RAILS, INSTANTS_MS))
    few = [("tag_bw", "rc_v", "one-rail", 300), ("ucp_get", "ud_v", "one-rail", 1000)]
    return [*few, ("stream_bw", "rc_v", "two-rails", 300)]


@pytest.mark.parametrize("test, transport, rails, instant_ms", ucx_cases())
def test_ucx(logs, note, test, transport, rails, instant_ms):
    needs("ucx_perftest", "ucx-utils")
    with Fabric(logs, "--hosts", "a,b") as fabric:
        port = free_port()
        env = {"UCX_NET_DEVICES": RAILS[rails], "UCX_TLS": transport}
        count = UCX_SLOW.get((test, transport), UCX_TESTS[test]) * (1 + instant_ms // 500)
        program = ["ucx_perftest", "-p", port, "-t", test, "-w", "10", "-s", "65536", "-n", count]
        server = fabric.run("b", program, "b-ucx_perftest", env=env)
        wait_until(
            lambda: server.ended() or listens(server.pid, port),
            20,
            f"the server listens at port {port}",
        )
        client = fabric.run("a", [*program, "127.0.0.1"], "a-ucx_perftest", env=env)
        time.sleep(instant_ms / 1000)
        if client.ended():
            raise Failure("it was over before the fault")
        fabric.fault(FAULT)
        client.expect_success(SECONDS)
        server.expect_success(SECONDS)
        if "Final:" not in client.output():
            raise Failure("no result")
        note(check(fabric))
