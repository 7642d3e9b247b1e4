#!/usr/bin/env python3
"""What happens at once: several faults, faults on lossy networks, other settings of the fabric; under the verifier (tests/c/verifier.c).

Each case gives rounds of faults; after each round both ends must verify messages again while the faults last (or are over, where they
leave no path), and in the end nothing was lost, doubled or damaged.
"""

import random
import sys
import time

from lib import device
from lib.cc import compile_c
from lib.fabric import Fabric
from lib.process import Failure, wait_until
from lib.suite import Suite
from verify import PROGRESS, QPS, report, start, verified

ROUND_SECONDS = 20
RUN_SECONDS = 120


class Run:
    """A running verifier on two hosts."""

    def __init__(self, fabric, logs, *options):
        self.fabric, self.logs = fabric, logs
        program = compile_c("verifier", "-libverbs")
        self.programs = start(fabric, logs, program, "--qps", QPS, "--seconds", RUN_SECONDS, *options)
        self.progress("the first messages")

    def check_alive(self):
        """Fails if an end has ended."""
        for program in self.programs.values():
            if program.ended():
                raise Failure(f"{program.name} ended with {program.popen.returncode}")

    def progress(self, when, messages=PROGRESS):
        """Waits until both ends have verified some more."""
        before = {host: verified(self.logs, host) for host in self.programs}

        def more():
            self.check_alive()
            return all(verified(self.logs, host) >= before[host] + messages for host in before)

        try:
            wait_until(more, ROUND_SECONDS, f"messages {when}")
        except Failure as failure:
            now = {host: verified(self.logs, host) for host in self.programs}
            raise Failure(f"{failure}: {before}, then {now}; {self.fabric.status()['qps']}") from None

    def settled(self):
        """Waits until all QPs are protected again."""

        def all_protected():
            self.check_alive()
            qps = self.fabric.status()["qps"]
            return len(qps) == 2 * QPS and all(qp["protected"] for qp in qps)

        wait_until(all_protected, ROUND_SECONDS, "protected QPs")

    def moved_on(self, faults):
        """Waits until no QP is on a path that one of the faults ended. (wqe-error ends none.)"""
        ended = {fault.split()[1] for fault in faults if fault.split()[0] in ("nic", "cable")}

        def moved():
            self.check_alive()
            qps = self.fabric.status()["qps"]
            return all(qp["state"] == "rts" and not ended & set(qp["path"].split("-")) for qp in qps)

        wait_until(moved, ROUND_SECONDS, f"QPs on paths without {sorted(ended)}")

    def rail(self):
        """The rail that carries the first QP."""
        return self.fabric.status()["qps"][0]["path"].split("-")[0].split("/")[1]

    def finish(self):
        """Ends both and gives what they verified."""
        (self.logs / "stop").touch()
        for process in self.programs.values():
            process.expect_success(40)
        results = [report(p) for p in self.programs.values()]
        if any(r["errors"] for r in results):
            raise Failure(f"errors: {results}")
        messages = sum(r["verified_messages"] for r in results)
        return f"{len(self.fabric.events('switch'))} switches, {messages} messages verified"


def rounds(logs, count, faults_of, *options, settings=(), weather=()):
    """`count` rounds of the faults that `faults_of(rail, random)` names, all set as fast as commands can be."""
    with Fabric(logs, *settings) as fabric:
        for fault in weather:
            fabric.fault(fault)
        run = Run(fabric, logs, *options)
        rng = random.Random(1)
        for i in range(count):
            run.settled()
            time.sleep(rng.uniform(0, 0.02))
            faults = faults_of(run.rail(), rng)
            for fault in faults:
                fabric.fault(fault)
            run.moved_on(faults)
            run.progress(f"in round {i} under {faults}")
            for fault in faults:
                fabric.clear(fault)
        if len(fabric.events("switch")) < count:
            raise Failure(f"{len(fabric.events('switch'))} switches in {count} rounds")
        return run.finish()


def both_ends(rail, _rng):
    """The NICs of both ends of a path die."""
    return [f"nic a/{rail} dead", f"nic b/{rail} dead"]


def two_rails(rail, _rng):
    """The path in use and the one that would be next fail within a moment, at different ends and in different ways."""
    return [f"cable a/{rail} cut", f"nic b/{(int(rail) + 1) % 4} dead"]


def three_rails(rail, rng):
    """Three of four rails at once."""
    kinds = ["nic {}/{} dead", "nic {}/{} down", "cable {}/{} cut"]
    return [rng.choice(kinds).format(rng.choice("ab"), (int(rail) + i) % 4) for i in range(3)]


def one(kind):
    """One fault of the path in use."""
    return lambda rail, rng: [kind.format(host=rng.choice("ab"), rail=rail)]


def flapping(logs, fault, *options):
    """A flap that is faster than silence is noticed: whatever is chosen, traffic goes on."""
    with Fabric(logs) as fabric:
        run = Run(fabric, logs, *options)
        run.settled()
        fabric.fault(fault)
        for i in range(4):
            time.sleep(0.3)
            run.progress(f"under '{fault}', part {i}")
        fabric.clear()
        run.progress("after the flap")
        return run.finish()


def long_messages(logs, tool):
    """Messages of 4,096 packets, which no end completes between a cut and its notice."""
    with Fabric(logs, "--mtu", "256") as fabric:
        server, client = fabric.pair(tool, ["-F", "-s", 1 << 20, "-q", 2, "-D", 3])
        data = "a" if tool == "ib_read_bw" else "b"
        wait_until(lambda: client.ended() or fabric.nics()[f"{data}/0"]["rx_payload_bytes"] > 1e7, 20, "traffic")
        fabric.fault("cable a/0 cut")
        for process in (client, server):
            process.expect_success(40)
        carried = fabric.elsewhere(f"{data}/0", "rx_payload_bytes")
        if carried < 1e7:
            raise Failure(f"only {carried} bytes on other rails")
        return f"{carried / 1e6:.0f} MB on other rails"


def beside_windows(logs, fault):
    """A QP with a memory window, a protected one, UC and UD on a NIC that fails: the first ends with its error at both ends."""
    device.need_windows()
    program = compile_c("windows", "-libverbs")
    with Fabric(logs) as fabric:
        programs = start(fabric, logs, program)
        running = lambda: all("running" in p.output() or p.ended() for p in programs.values())
        wait_until(running, 20, "traffic on all four QPs")
        # The path of a UD QP, which is protected, too, is a NIC; a UC QP has none.
        rc = [qp for qp in fabric.status()["qps"] if "-" in qp["path"]]
        if len(rc) != 4 or {qp["own"] for qp in rc} != {qp["peer"] for qp in rc}:
            raise Failure(f"two RC QPs with two ends each are right, not {rc}")
        if sum("memory windows" in qp["why"] for qp in rc) != 2:
            raise Failure(f"both ends of the QP with a window should say so: {rc}")
        fabric.fault(fault)
        struck = time.monotonic()
        for process in programs.values():
            process.expect_success(60)
        ends = [round(p.ended_at - struck, 1) for p in programs.values()]
        if {e["host"] for e in fabric.events("give-up")} != {"a", "b"}:
            raise Failure("a give-up event is missing")
        results = [report(p) for p in programs.values()]
        dead = fault.split()[1][0]
        if "dead" in fault and not report(programs[dead])["uc_failed"]:
            raise Failure("the UC QP of the dead NIC goes on")
        return f"ended after {ends} s: {results}"


def main() -> int:
    """Runs all of it."""
    parser = device.parser(__doc__)
    parser.add_argument("words", nargs="*", help="only cases whose names have all these words")
    options = parser.parse_args()
    suite = Suite(device.use("combined", options.device), options.words)
    rough = [f"{what} rail{rail} 1%" for what in ("loss", "reorder", "duplicate") for rail in range(4)]
    suite.case("NICs of both ends die, shared receives, loss and reordering", lambda l: rounds(l, 5, both_ends, "--srq", weather=rough))
    suite.case("two rails at once", rounds, 5, two_rails)
    suite.case("three rails at once, loss and reordering", lambda l: rounds(l, 5, three_rails, weather=rough))
    suite.case("wqe-error, shared receives", rounds, 5, one("wqe-error {host}/{rail}"), "--srq")
    infiniband = ["--link-layer", "infiniband"]
    suite.case("link layer InfiniBand, NICs die", lambda l: rounds(l, 5, one("nic {host}/{rail} dead"), settings=infiniband))
    suite.case("link layer InfiniBand, cables are cut", lambda l: rounds(l, 3, one("cable {host}/{rail} cut"), settings=infiniband))
    small = ["--mtu", "256"]
    suite.case("MTU 256, cables are cut", lambda l: rounds(l, 3, one("cable {host}/{rail} cut"), settings=small))
    suite.case("MTU 256, loss, NICs die", lambda l: rounds(l, 3, one("nic {host}/{rail} dead"), settings=small, weather=rough[:4]))
    for tool in ("ib_send_bw", "ib_read_bw"):
        suite.case(f"{tool} of 1 MiB at MTU 256, a cable is cut", long_messages, tool)
    suite.case("two ports, NICs die", lambda l: rounds(l, 3, one("nic {host}/{rail} dead"), settings=["--ports", "2"]))
    for fault in ("nic a/0 dead", "nic b/0 down", "cable a/0 cut"):
        suite.case(f"a QP with a window beside others, {fault}", beside_windows, fault)
    for fault in ("flap a/0 down=3ms up=3ms", "flap cable a/0 down=20ms up=20ms", "flap cable b/0 down=60ms up=100ms", "flap rail0 down=5ms up=200ms"):
        suite.case(fault, flapping, fault)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
