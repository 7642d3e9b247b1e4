#!/usr/bin/env python3
"""Every message arrives once, in order and intact, through many faults in one run.

tests/c/verifier.c, an ordinary verbs program, sends numbered and checksummed messages both ways between hosts a and b. The rail
that carries them fails in a random way at a random end; when the programs go on over another rail, the failed one is healed, and
then the next failure comes. `--faults N` says how many (200); they take about a minute. A fifth as many come while all QPs of a
program take their receives from one shared queue, and a fifth while all switches lose and reorder packets.
"""

import json
import random
import sys
import time

from lib import device
from lib.cc import compile_c
from lib.fabric import Fabric
from lib.ports import free_port, listens
from lib.process import Failure, wait_until
from lib.suite import Suite

KINDS = ["nic dead", "nic down", "cable cut", "switch down"]
QPS = 2
# Messages verified on a new path before the next fault: enough that every kind has been sent.
PROGRESS = 300
STEP_SECONDS = 15
# Each finds something unfinished nearly always.
NO_REPLAY_FAULTS = 10
ERROR_SECONDS = 5


def start(fabric, logs, program, *options, hosts="ba", failover=True):
    """A listener on host b, the other end on host a."""
    port = free_port()
    programs = {}
    for host in hosts:
        meet = ["--listen", port] if host == "b" else ["--connect", f"127.0.0.1:{port}"]
        files = ["--status-file", logs / f"{host}.status", "--stop-file", logs / "stop"]
        status = [*files, *device.verifier_options()] if "verifier" in program.name else []
        programs[host] = fabric.run(host, [program, *meet, *options, *status], f"{host}-{program.name}", failover)
        if host == "b":
            server = programs[host]
            wait_until(lambda: server.ended() or listens(server.pid, port), 20, f"{program.name} listens")
    return programs


def verified(logs, host) -> int:
    """Messages that an end has verified so far."""
    try:
        return json.loads((logs / f"{host}.status").read_text())["verified_messages"]
    except (OSError, ValueError):
        return 0


def report(process) -> dict:
    """The last line of a verifier."""
    for line in reversed(process.output().splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise Failure(f"{process.name} printed no result")


class Storm:
    """Faults, one after the other, under a running verifier."""

    def __init__(self, fabric, logs, programs, seed):
        self.fabric, self.logs, self.programs = fabric, logs, programs
        self.random = random.Random(seed)
        self.faults = 0

    def ended(self):
        """Whether a program has ended."""
        return any(program.ended() for program in self.programs.values())

    def strike_or_end(self):
        """One fault, which the programs may take as their end."""
        try:
            self.strike()
        except Failure:
            if not self.ended():
                raise

    def check_alive(self):
        """Fails if a program has ended."""
        for program in self.programs.values():
            if program.ended():
                raise Failure(f"{program.name} ended with {program.popen.returncode} after {self.faults} faults")

    def paths(self):
        """The NICs that each QP uses (as host and rail), or None while some QP switches or is unprotected."""
        self.check_alive()
        pids = {p.pid for p in self.programs.values()}
        qps = [qp for qp in self.fabric.status()["qps"] if qp["pid"] in pids]
        settled = len(qps) == 2 * QPS and all(qp["state"] == "rts" and qp["protected"] for qp in qps)
        return [tuple(sorted(qp["path"].split("-"))) for qp in qps] if settled else None

    def moved_on(self, failed):
        """Waits until no QP uses what has failed and both ends verify messages again."""
        before = {}

        def done():
            paths = self.paths()
            if paths is None or any(failed & set(path) for path in paths):
                return False
            counts = {host: verified(self.logs, host) for host in self.programs}
            before.update({} if before else counts)
            return all(counts[host] >= before[host] + PROGRESS for host in counts)

        try:
            wait_until(done, STEP_SECONDS, f"traffic away from {sorted(failed)} after fault {self.faults} ({self.last})")
        except Failure as failure:
            self.check_alive()
            counts = {host: verified(self.logs, host) for host in self.programs}
            raise Failure(f"{failure}; messages before {before}, now {counts}; QPs: {self.fabric.status()['qps']}") from None

    def healed(self, failed):
        """Waits until the ends have the NICs that failed again."""
        pids = {host: p.pid for host, p in self.programs.items()}

        def usable():
            self.check_alive()
            nics = self.fabric.nics()
            return all(nics[nic]["state"] == "active" and pids[nic[0]] in nics[nic]["pids"] for nic in failed)

        wait_until(usable, STEP_SECONDS, f"{sorted(failed)} healed after '{self.last}'")

    def strike(self):
        """One fault of what carries traffic: set, survived, cleared, healed."""
        paths = wait_until(self.paths, STEP_SECONDS, "all QPs settled and protected")
        nic = self.random.choice(self.random.choice(paths))
        host, rail = nic.split("/")
        place, state = self.random.choice(KINDS).split()
        if place == "switch":
            self.last, failed = f"switch rail{rail} down", {f"a/{rail}", f"b/{rail}"}
        else:
            self.last, failed = f"{place} {host}/{rail} {state}", {nic}
        # At a random instant of the stream, not at that of a status.
        time.sleep(self.random.uniform(0, 0.02))
        self.fabric.fault(self.last)
        self.struck_at = time.monotonic()
        self.faults += 1
        self.moved_on(failed)
        self.fabric.clear(self.last)
        self.healed(failed)


def storm(logs, faults, seed, *options, weather=(), env=None):
    """Many faults in one run, with `weather` all the time. `env`: more of the programs' environment."""
    program = compile_c("verifier", "-libverbs")
    limit_s = 60 + 2 * faults
    with Fabric(logs) as fabric:
        fabric.env.update(env or {})
        for fault in weather:
            fabric.fault(fault)
        programs = start(fabric, logs, program, "--qps", QPS, "--seed", seed, "--seconds", limit_s, *options)
        storm = Storm(fabric, logs, programs, seed)
        wait_until(lambda: storm.check_alive() or verified(logs, "a") > PROGRESS, 20, "the first messages")
        started = time.monotonic()
        while storm.faults < faults and time.monotonic() - started < limit_s - 2 * STEP_SECONDS:
            storm.strike()
        (logs / "stop").touch()
        for process in programs.values():
            process.expect_success(limit_s + 30)
        switches = [s for s in fabric.events("switch")]
        results = {host: report(p) for host, p in programs.items()}
        if any(r["errors"] for r in results.values()):
            raise Failure(f"errors: {results}")
        if storm.faults < faults:
            raise Failure(f"only {storm.faults} of {faults} faults in {limit_s} s")
        sent_again = sum(nic["retransmits"] for nic in fabric.nics().values())
        if weather and sent_again < 100:
            raise Failure(f"only {sent_again} packets were sent again under {weather}")
        if len(switches) < storm.faults:
            raise Failure(f"{len(switches)} switches for {storm.faults} faults")
        messages = sum(r["verified_messages"] for r in results.values())
        size = sum(r["verified_bytes"] for r in results.values())
        return f"seed {seed}: {storm.faults} faults, {len(switches)} switches, {messages} messages and {size / 1e9:.2f} GB verified"


def corrupt(logs):
    """The self-check: a corrupted message must be found."""
    program = compile_c("verifier", "-libverbs")
    with Fabric(logs) as fabric:
        programs = start(fabric, logs, program, "--seconds", 3, "--corrupt")
        codes = [p.wait(60) for p in programs.values()]
        if not any(code > 0 for code in codes):
            raise Failure(f"nobody noticed: statuses {codes}")
        return f"found, statuses {codes}"


def no_replay(logs, *options):
    """WRs marked NO_REPLAY in flight: the original error, at both ends, at once (the programs check the time)."""
    program = compile_c("verifier", "-libverbs")
    with Fabric(logs) as fabric:
        programs = start(fabric, logs, program, "--qps", QPS, "--seconds", 60, "--no-replay", *options)
        storm = Storm(fabric, logs, programs, 1)
        wait_until(lambda: storm.ended() or all(verified(logs, h) > PROGRESS for h in "ab"), 20, "the first messages")
        if storm.ended():
            raise Failure(f"ended before any fault: {fabric.events()[:2]}")
        return no_replay_under_faults(fabric, storm)


def no_replay_under_faults(fabric, storm):
    """Faults until one finds something unfinished; then both ends have their error at once."""
    while not storm.ended():
        if storm.faults == NO_REPLAY_FAULTS:
            raise Failure(f"{storm.faults} faults, and no NO_REPLAY error")
        storm.strike_or_end()
    for process in storm.programs.values():
        process.expect_success(ERROR_SECONDS)
    give_ups = {e["host"] for e in fabric.events("give-up")}
    if give_ups != {"a", "b"}:
        raise Failure(f"give-up events at {sorted(give_ups)}, both ends are right")
    ends_ms = [round((p.ended_at - storm.struck_at) * 1000) for p in storm.programs.values()]
    return f"both ends ended within {max(ends_ms)} ms of fault {storm.faults} ({storm.last})"


def by_dlopen(logs):
    """A program that takes libibverbs by dlopen and dlvsym, under a fault."""
    program = compile_c("dlopen_client", "-ldl")
    with Fabric(logs) as fabric:
        programs = start(fabric, logs, program, "--seconds", 3)

        payload = lambda: fabric.nics()["b/0"]["rx_payload_bytes"]
        wait_until(lambda: programs["a"].ended() or payload() > 1e6, 20, "traffic on rail 0")
        fabric.fault("nic b/0 dead")
        for process in programs.values():
            process.expect_success(30)
        elsewhere = fabric.elsewhere("b/0", "rx_payload_bytes")
        if not fabric.events("switch") or elsewhere < 1e6:
            raise Failure(f"{len(fabric.events('switch'))} switches, {elsewhere} bytes of payload on other rails")
        return f"{payload() / 1e9:.2f} GB on rail 0, {elsewhere / 1e9:.2f} GB on others"


def main() -> int:
    """Runs all of it."""
    parser = device.parser(__doc__)
    parser.add_argument("--faults", type=int, default=200, help="faults in one run (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the faults and of the messages")
    options = parser.parse_args()
    suite = Suite(device.use("verify", options.device))
    suite.case("storm of faults", storm, options.faults, options.seed)
    # A receive lost or used twice at a move would be found at once, or at the end, when all must be back in the queue.
    suite.case("storm of faults, receives shared by the QPs", storm, (options.faults + 4) // 5, options.seed, "--srq")
    # What is lost is sent again alone, and what comes early waits, also while NICs die.
    weather = [f"{what} rail{rail} 1%" for what in ("loss", "reorder") for rail in range(4)]
    suite.case("storm of faults, on switches that lose and reorder", lambda logs: storm(logs, (options.faults + 4) // 5, options.seed, weather=weather))
    suite.case("a corrupted message is found", corrupt)
    suite.case("NO_REPLAY", no_replay)
    suite.case("NO_REPLAY, receives shared by the QPs", no_replay, "--srq")
    suite.case("dlopen and dlvsym", by_dlopen)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
