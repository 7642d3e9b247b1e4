#!/usr/bin/env python3
"""A NIC that dies while a program begins: at its very start, while it opens devices, while its ends find each other, in mid-stream. Open MPI
over openib and over UCX, and UCX alone, all with their connection managers on UD: each must end right, and what is sent after the
fault must have gone through the other NICs.

`--all` goes through every program, transport and instant; without it, a few that stand for them.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import mpi
from lib.fabric import Fabric, UNBROKEN
from lib.ports import free_port, listens
from lib.process import Failure, Skip, wait_until
from lib.suite import Suite

# The longest take 75 s where the machine has its slow days, and 10 where not.
SECONDS = 240
FAULT = "nic a/0 dead"
INSTANTS_MS = [0, 10, 30, 100, 300, 1000, 3000]
RAILS = {"one rail": "unb0:1", "two rails": "unb0:1,unb1:1"}
UCX_TLS = ["rc_v", "ud_v"]
# How many messages of 64 KiB each test sends before a fault that comes early; far more for a later one. (A get over UD is slow.)
UCX_TESTS = {"tag_bw": 100_000, "ucp_put_bw": 100_000, "ucp_get": 60_000, "ucp_am_bw": 60_000, "stream_bw": 60_000}
UCX_SLOW = {("ucp_get", "ud_v"): 3_000}
# Payload beyond what connecting takes.
LEAST_BYTES = 1_000_000


def others(fabric: Fabric) -> int:
    """Payload that the NICs of host a but the first have moved."""
    nics = fabric.nics()
    return sum(nics[f"a/{rail}"][f"{way}_payload_bytes"] for rail in (1, 2, 3) if f"a/{rail}" in nics for way in ("tx", "rx"))


def check(fabric: Fabric):
    """Nothing was given up, and the other NICs have carried the rest; gives how much."""
    given_up = fabric.events("give-up")
    if given_up:
        raise Failure(f"given up: {given_up[0]}")
    carried = others(fabric)
    if carried < LEAST_BYTES:
        raise Failure(f"the other NICs carried {carried} bytes")
    return f"{carried / 1e6:.0f} MB on other NICs, {len(fabric.events('switch'))} switches"


def hpcc(logs, transport: str, instant_ms: int):
    for tool, package in (("mpirun", "openmpi-bin"), ("hpcc", "hpcc")):
        if shutil.which(tool) is None:
            raise Skip(f"{tool} is missing: install Debian's {package}")
    options, settings = mpi.TRANSPORTS[transport]
    folder = Path(tempfile.mkdtemp(prefix="unbroken-hpcc-"))
    try:
        (folder / "hpccinf.txt").write_text(mpi.INPUT.format(n=512 if instant_ms < 1000 else 1024 if instant_ms < 3000 else 2048))
        ranks = [["-np", "1", "-wdir", folder, UNBROKEN, "run", "--host", host, "--", "hpcc"] for host in "ab"]
        with Fabric(logs, *(settings or ["--hosts", "a,b"])) as fabric:
            mpirun = fabric.start("mpirun", ["mpirun", *mpi.COMMON, *options, *ranks[0], ":", *ranks[1]])
            time.sleep(instant_ms / 1000)
            fabric.fault(FAULT)
            mpirun.expect_success(SECONDS)
            mpi.check_result(folder / "hpccoutf.txt")
            return check(fabric)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ucx(logs, transport: str, rails: str, test: str, instant_ms: int):
    if shutil.which("ucx_perftest") is None:
        raise Skip("ucx_perftest is missing: install Debian's ucx-utils")
    with Fabric(logs, "--hosts", "a,b") as fabric:
        port = free_port()
        env = {"UCX_NET_DEVICES": RAILS[rails], "UCX_TLS": transport}
        count = UCX_SLOW.get((test, transport), UCX_TESTS[test]) * (1 + instant_ms // 500)
        program = ["ucx_perftest", "-p", port, "-t", test, "-w", "10", "-s", "65536", "-n", count]
        server = fabric.run("b", program, "b-ucx_perftest", env=env)
        wait_until(lambda: server.ended() or listens(server.pid, port), 20, f"the server listens at port {port}")
        client = fabric.run("a", [*program, "127.0.0.1"], "a-ucx_perftest", env=env)
        time.sleep(instant_ms / 1000)
        if client.ended():
            raise Failure("it was over before the fault")
        fabric.fault(FAULT)
        client.expect_success(SECONDS)
        server.expect_success(SECONDS)
        if "Final:" not in client.output():
            raise Failure("no result")
        return check(fabric)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every program, transport and instant")
    parser.add_argument("--only", metavar="WORDS", help="cases whose names have all these words, as in --only 'hpcc openib'")
    options = parser.parse_args()
    os.chdir(Path(__file__).parent)
    suite = Suite("early", only=(options.only or "").split())
    if options.all:
        cases = [("hpcc", transport, ms) for transport in ("openib", "ucx rc", "ucx ud") for ms in INSTANTS_MS]
        cases += [(test, transport, rails, ms) for test in UCX_TESTS for transport in UCX_TLS for rails in RAILS for ms in INSTANTS_MS]
    else:
        cases = [("hpcc", transport, 300) for transport in ("openib", "ucx rc", "ucx ud")]
        cases += [("tag_bw", "rc_v", "one rail", 300), ("ucp_get", "ud_v", "one rail", 1000), ("stream_bw", "rc_v", "two rails", 300)]
    for kind, *rest in cases:
        name = ", ".join([kind, *map(str, rest)]) + " ms"
        if kind == "hpcc":
            suite.case(name, hpcc, *rest)
        else:
            transport, rails, instant_ms = rest
            suite.case(name, ucx, transport, rails, kind, instant_ms)
    sys.exit(suite.finish())


if __name__ == "__main__":
    main()
