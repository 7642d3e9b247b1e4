#!/usr/bin/env python3
"""Unmodified programs of Debian that read more of a device than perftest does: ibverbs-utils with their options, and UCX."""

import re
import shutil
import sys

from lib.fabric import Fabric
from lib.ports import free_port, listens
from lib.process import Failure, Skip, wait_until
from lib.suite import Suite

SECONDS = 40
PINGPONGS = [
    ("ibv_rc_pingpong", []),
    ("ibv_rc_pingpong", ["-e"]),
    ("ibv_rc_pingpong", ["-t"]),
    ("ibv_rc_pingpong", ["-c"]),
    ("ibv_rc_pingpong", ["-N"]),
    ("ibv_rc_pingpong", ["-N", "-t"]),
    ("ibv_rc_pingpong", ["-j", "-N"]),
    ("ibv_rc_pingpong", ["-m", "256", "-s", "100000", "-n", "100", "-r", "50"]),
    ("ibv_ud_pingpong", []),
    ("ibv_ud_pingpong", ["-e"]),
]
UCX = [("tag_bw", ["-s", "4096", "-n", "10000"]), ("tag_lat", ["-s", "8", "-n", "10000"])]


def needs(tool: str, package: str):
    if shutil.which(tool) is None:
        raise Skip(f"{tool} is missing: install Debian's {package}")


def both_ends(fabric: Fabric, tool: str, args: list, env: dict | None = None):
    """A server on host b and a client on host a; both must end with 0. Gives the client."""
    port = free_port()
    program = [tool, "-p", port, *args]
    server = fabric.run("b", program, f"b-{tool}", env=env)
    wait_until(lambda: server.ended() or listens(server.pid, port), 20, f"{tool} server listens at port {port}")
    client = fabric.run("a", [*program, "127.0.0.1"], f"a-{tool}", env=env)
    client.expect_success(SECONDS)
    server.expect_success(SECONDS)
    return client


def moved(fabric: Fabric) -> int:
    """Payload that the NICs of host a have sent: a program may fall back to TCP and still end well."""
    return sum(n["tx_payload_bytes"] for name, n in fabric.nics().items() if name.startswith("a/"))


def pingpong(logs, tool: str, args: list):
    needs(tool, "ibverbs-utils")
    with Fabric(logs) as fabric:
        client = both_ends(fabric, tool, ["-d", "unb0", "-g", "0", *args])
        if not re.search(r"\d+ iters in", client.output()):
            raise Failure("the client printed no result")
        if moved(fabric) == 0:
            raise Failure("the NICs carried nothing")


def devinfo(logs):
    needs("ibv_devinfo", "ibverbs-utils")
    with Fabric(logs) as fabric:
        program = fabric.run("a", ["ibv_devinfo", "-v"])
        program.expect_success(SECONDS)
        for text in ["unb0", "PORT_ACTIVE", "Ethernet", "RoCE v2"]:
            if text not in program.output():
                raise Failure(f"ibv_devinfo does not say {text!r}")


def paths(logs):
    with Fabric(logs) as fabric:
        files = ["/sys/class/infiniband/unb0/ports/1/state", "/sys/class/infiniband/unb0/ports/1/gid_attrs/types/0"]
        program = fabric.run("a", ["cat", *files])
        program.expect_success(SECONDS)
        if program.output().split("\n")[:2] != ["4: ACTIVE", "RoCE v2"]:
            raise Failure(f"the files say {program.output()!r}")
        fabric.fault("nic a/0 down")
        down = fabric.run("a", ["cat", files[0]], "a-cat-down")
        down.expect_success(SECONDS)
        if down.output().strip() != "1: DOWN":
            raise Failure(f"the state of a port without a link is {down.output()!r}")


def ucx(logs, test: str, args: list):
    needs("ucx_perftest", "ucx-utils")
    with Fabric(logs) as fabric:
        env = {"UCX_NET_DEVICES": "unb0:1", "UCX_TLS": "ud_verbs"}
        both_ends(fabric, "ucx_perftest", ["-t", test, *args], env)
        if moved(fabric) == 0:
            raise Failure("the NICs carried nothing")


def main():
    suite = Suite("programs")
    suite.case("ibv_devinfo -v", devinfo)
    suite.case("paths", paths)
    for tool, args in PINGPONGS:
        suite.case(" ".join([tool, *args]), pingpong, tool, args)
    for test, args in UCX:
        suite.case(f"ucx_perftest {test} ud_verbs", ucx, test, args)
    sys.exit(suite.finish())


if __name__ == "__main__":
    main()
