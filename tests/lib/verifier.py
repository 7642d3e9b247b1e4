"""The verifier (tests/c/verifier.c) between hosts a and b: numbered and checksummed messages both
ways. It is an ordinary verbs program; faults come while it runs."""

import json
import random
import time

from . import device
from .cc import compile_c
from .fabric import Fabric
from .ports import free_port, listens
from .process import Failure, wait_until

KINDS = ["nic dead", "nic down", "cable cut", "switch down"]
QPS = 2
# Messages verified on a new path before the next fault: enough that every kind has been sent.
PROGRESS = 300
STEP_SECONDS = 15
ROUND_SECONDS = 20
RUN_SECONDS = 120


def start(fabric, logs, program, *options, hosts="ba", failover=True):
    """A listener on host b, the other end on host a."""
    port = free_port()
    programs = {}
    for host in hosts:
        meet = ["--listen", port] if host == "b" else ["--connect", f"127.0.0.1:{port}"]
        files = ["--status-file", logs / f"{host}.status", "--stop-file", logs / "stop"]
        status = [*files, *device.verifier_options()] if "verifier" in program.name else []
        programs[host] = fabric.run(
            host, [program, *meet, *options, *status], f"{host}-{program.name}", failover
        )
        if host == "b":
            server = programs[host]
            wait_until(
                lambda: server.ended() or listens(server.pid, port), 20, f"{program.name} listens"
            )
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


class Faults:
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
                raise Failure(
                    f"{program.name} ended with {program.popen.returncode} "
                    f"after {self.faults} faults"
                )

    def paths(self):
        """The NICs that each QP uses (as host and rail), or None while some QP switches or is
        unprotected."""
        self.check_alive()
        pids = {p.pid for p in self.programs.values()}
        qps = [qp for qp in self.fabric.status()["qps"] if qp["pid"] in pids]
        settled = len(qps) == 2 * QPS and all(
            qp["state"] == "rts" and qp["protected"] for qp in qps
        )
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
            wait_until(
                done,
                STEP_SECONDS,
                f"traffic away from {sorted(failed)} after fault {self.faults} ({self.last})",
            )
        except Failure as failure:
            self.check_alive()
            counts = {host: verified(self.logs, host) for host in self.programs}
            raise Failure(
                f"{failure}; messages before {before}, now {counts}; "
                f"QPs: {self.fabric.status()['qps']}"
            ) from None

    def healed(self, failed):
        """Waits until the ends have the NICs that failed again."""
        pids = {host: p.pid for host, p in self.programs.items()}

        def usable():
            self.check_alive()
            nics = self.fabric.nics()
            return all(
                nics[nic]["state"] == "active" and pids[nic[0]] in nics[nic]["pids"]
                for nic in failed
            )

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


def run_through_faults(logs, faults, seed, *options, background=(), env=None, first=None):
    """Many faults in one run, with the faults of `background` all the time. `env`: more of the
    programs' environment. `first` is called while messages come, before the first fault."""
    program = compile_c("verifier", "-libverbs")
    limit_s = 60 + 2 * faults
    with Fabric(logs) as fabric:
        fabric.env.update(env or {})
        for fault in background:
            fabric.fault(fault)
        programs = start(
            fabric, logs, program, "--qps", QPS, "--seed", seed, "--seconds", limit_s, *options
        )
        run = Faults(fabric, logs, programs, seed)
        wait_until(
            lambda: run.check_alive() or verified(logs, "a") > PROGRESS, 20, "the first messages"
        )
        if first:
            first(run.check_alive)
        started = time.monotonic()
        while run.faults < faults and time.monotonic() - started < limit_s - 2 * STEP_SECONDS:
            run.strike()
        (logs / "stop").touch()
        for process in programs.values():
            process.expect_success(limit_s + 30)
        switches = fabric.events("switch")
        results = {host: report(p) for host, p in programs.items()}
        if any(r["errors"] for r in results.values()):
            raise Failure(f"errors: {results}")
        if run.faults < faults:
            raise Failure(f"only {run.faults} of {faults} faults in {limit_s} s")
        sent_again = sum(nic["retransmits"] for nic in fabric.nics().values())
        if background and sent_again < 100:
            raise Failure(f"only {sent_again} packets were sent again under {background}")
        if len(switches) < run.faults:
            raise Failure(f"{len(switches)} switches for {run.faults} faults")
        messages = sum(r["verified_messages"] for r in results.values())
        size = sum(r["verified_bytes"] for r in results.values())
        return (
            f"seed {seed}: {run.faults} faults, {len(switches)} switches, "
            f"{messages} messages and {size / 1e9:.2f} GB verified"
        )


class Verifier:
    """A running verifier on two hosts."""

    def __init__(self, fabric, logs, *options):
        self.fabric, self.logs = fabric, logs
        program = compile_c("verifier", "-libverbs")
        self.programs = start(
            fabric, logs, program, "--qps", QPS, "--seconds", RUN_SECONDS, *options
        )
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
            raise Failure(
                f"{failure}: {before}, then {now}; {self.fabric.status()['qps']}"
            ) from None

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
            return all(
                qp["state"] == "rts" and not ended & set(qp["path"].split("-")) for qp in qps
            )

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
