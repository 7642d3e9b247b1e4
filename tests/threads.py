#!/usr/bin/env python3
"""All verbs from many threads at once, on the same objects (tests/c/threads.c): undisturbed, and while the NIC under them fails."""

import json
import sys

from lib import device
from lib.cc import compile_c
from lib.fabric import Fabric
from lib.process import Failure, wait_until
from lib.suite import Suite

SECONDS = 2
# The program itself gives up when something does not complete within 40 s.
END_SECONDS = 60


def threads(logs, fault, failover):
    """One run; its program checks everything."""
    program = compile_c("threads", "-libverbs", "-lpthread")
    with Fabric(logs) as fabric:
        args = ["--seconds", SECONDS + bool(fault)] + ["--faults"] * bool(fault)
        process = fabric.run("a", [program, *args], "a-threads", failover)
        if fault:
            wait_until(lambda: process.ended() or "running" in process.output(), 20, "traffic")
            fabric.fault(fault)
        process.expect_success(END_SECONDS)
        result = json.loads(process.output().splitlines()[-1])
        if fault and len(fabric.events("switch")) < 4:
            raise Failure(f"{len(fabric.events('switch'))} QPs moved, four are right")
        if min(result["messages"], result["events"], result["churned"]) < 100:
            raise Failure(f"too little was done: {result}")
        return f"{result['sends']} sends, {result['messages']} messages, {result['events']} events, {result['churned']} other verbs"


def main() -> int:
    """Runs all of it."""
    suite = Suite(device.use("threads", device.parser(__doc__).parse_args().device))
    suite.case("many threads, no failover", threads, None, False)
    suite.case("many threads, failover", threads, None, True)
    for fault in ("nic a/0 dead", "cable a/0 cut"):
        suite.case(f"many threads, {fault}", threads, fault, True)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
