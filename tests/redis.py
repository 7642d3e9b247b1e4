#!/usr/bin/env python3
"""Failover between machines: two network namespaces that share no runtime folder, and a Redis server in a third.

The NICs are the interfaces of two veth pairs; the Redis server is reached by a network for management, through a proxy. A stream
(perftest), or the verifier, goes through faults of the interfaces that carry it while something happens to the server: it is killed, or
restarted empty, or slow, or holds every answer, or has another password than the programs. Before the programs start, between connecting and the
fault, while a switch is under way, and afterwards. What is asserted is bytes on the other interface after the fault, the events, and what
lies on the server.
Needs root, iproute2, nftables and redis-server; says so and skips where they are missing.
"""

import signal
import sys
import time

from lib.cc import compile_c
from lib.fabric import UNBROKEN, Fabric
from lib.namespaces import Cluster
from lib.ports import free_port, listens
from lib.process import Died, Failure, describe_exit, wait_until
from lib.redis import PASSWORD, USER, Redis
from lib.suite import Suite
from datagrams import outlives
from lib.verifier import PROGRESS, report, run_through_faults, verified

QPS = 2
# Set-up exchanges a few KiB; this much on an interface is a stream.
STREAM_BYTES = 2_000_000
# However the machine is loaded: a switch, or the return of a server.
PATIENCE_SECONDS = 20
# Longer than the lease that goes with it.
STOPPED_SECONDS = 4
# Two to three times as long as the three faults and the ways back take.
STREAM_SECONDS = 10
EMULATED_FAULTS = 40
LEASE_SECONDS = 2


class Machines:
    """A context: the hosts a and b, each with a runtime folder of its own; the server; the programs."""

    def __init__(self, logs, directory=True, password=PASSWORD, options=(), **settings):
        self.logs, self.directory, self.password, self.options, self.settings = logs, directory, password, options, settings
        self.net, self.programs = Cluster(), {}

    def __enter__(self):
        self.net.__enter__()
        try:
            self.redis = Redis(self.net, self.logs)
            self.fabrics = {}
            for host in "ab":
                (self.logs / host).mkdir(exist_ok=True)
                self.fabrics[host] = Fabric(self.logs / host)
            self.redis.start()
            self.redis.start_proxy()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *error):
        for fabric in getattr(self, "fabrics", {}).values():
            fabric.__exit__(*error)
        if hasattr(self, "redis"):
            self.redis.__exit__()
        self.net.__exit__()

    def start(self, args_of):
        """Starts a program at b, and when it listens at a. `args_of(host, port)` gives its line."""
        port = free_port()
        for host in "ba":
            nics = ",".join(str(self.net.addr(host, rail)) for rail in range(self.net.rails))
            line = [*self.net.within(host), UNBROKEN, "run", "--nics", nics, *self.options, "--", *args_of(host, port)]
            # Where traffic is when a fault comes is the case's to say: nothing goes home by itself.
            env = {"UNBROKEN_FAILBACK": "0"}
            if self.directory:
                env |= self.redis.env(self.password, host=host, **self.settings)
            program = self.fabrics[host].start(f"{host}-program", line, env)
            self.programs[host] = program
            if host == "b":
                wait_until(lambda p=program: p.ended() or listens(p.pid, port), PATIENCE_SECONDS, "the server listens")

    def perftest(self, tool, seconds):
        """Starts a stream that flows on rail 0."""

        def line(host, port):
            to = [self.net.manager("b")] if host == "a" else []
            return [tool, "-d", "unb0", "-F", "-p", port, "-s", 65536, "-q", QPS, "-D", seconds, *to]

        self.start(line)
        wait_until(lambda: self.ended() or self.carried(0) > STREAM_BYTES, PATIENCE_SECONDS, "traffic on rail 0")
        self.check_alive()

    def ended(self) -> bool:
        """Whether a program has ended."""
        return any(program.ended() for program in self.programs.values())

    def check_alive(self):
        """Fails if a program has ended."""
        for program in self.programs.values():
            if program.ended():
                raise Died(f"{program.name} {describe_exit(program.popen.returncode)}: {program.output()[-300:]}")

    def carried(self, rail) -> int:
        """The bytes that went from a to b on a rail."""
        return min(self.net.bytes("a", rail)[0], self.net.bytes("b", rail)[1])

    def protected(self) -> bool:
        """Whether all QPs of both ends are, by now."""
        self.check_alive()
        qps = [qp for fabric in self.fabrics.values() for qp in fabric.status()["qps"]]
        return len(qps) == 2 * QPS and all(qp["protected"] and qp["state"] in ("rtr", "rts") for qp in qps)

    def wait_protected(self):
        """Waits until they are."""
        wait_until(self.protected, PATIENCE_SECONDS, "all QPs are protected")

    def events(self, kind) -> dict:
        """The events of a kind, for each host."""
        return {host: fabric.events(kind) for host, fabric in self.fabrics.items()}

    def fault(self, rail, kind="nft drop"):
        """A rail fails."""
        if kind == "nft drop":
            self.net.drop("b", rail)
        else:
            self.net.link("a", rail, "down")

    def survives(self, rail, meanwhile=lambda: None, kind="nft drop", moves=None):
        """A fault on the rail that carries everything: everything goes on over the other one. Then the rail is healed."""
        moves = moves or (lambda: None)
        other = 1 - rail
        began = self.carried(rail)
        wait_until(lambda: self.ended() or self.carried(rail) - began > STREAM_BYTES, PATIENCE_SECONDS, f"traffic on rail {rail} before its fault")
        before = self.carried(other)
        self.fault(rail, kind)
        meanwhile()

        def moved():
            self.check_alive()
            return self.carried(other) - before > STREAM_BYTES

        wait_until(moved, PATIENCE_SECONDS, f"traffic on rail {other} after {kind} of rail {rail}")
        moves()
        if kind == "nft drop":
            self.net.undrop("b", rail)
        else:
            self.net.link("a", rail, "up")

    def finish(self, clean=True):
        """Waits until both programs have ended with success, and looks at what they leave."""
        for program in self.programs.values():
            program.expect_success(60)
        if clean:
            left = self.redis.keys("qp")
            if left:
                raise Failure(f"entries of QPs are left behind: {left}")
            values = {self.redis.ask("get", key) for key in self.redis.keys("process")}
            if values - {"ended"}:
                raise Failure(f"processes did not say that they end: {values}")

    # What happens to the server, and how it ends

    def killed(self):
        """Redis is killed."""
        self.redis.kill()

    def restarted(self):
        """Redis is killed and begins anew, empty."""
        self.redis.kill()
        self.redis.start()

    def slow(self):
        """Every answer of Redis is late."""
        self.redis.delay(100)

    def silent(self):
        """Redis answers nothing, and no connection breaks."""
        self.redis.hold()

    def password_changed(self):
        """Redis has another password."""
        self.redis.ask("acl", "setuser", USER, "resetpass", ">other")
        self.redis.disconnect_all()

    def noticed(self):
        """Waits until both hosts have said that they have no directory."""

        def told():
            self.check_alive()
            last = [[e["event"] for e in fabric.events() if e["event"].startswith("directory")][-1:] for fabric in self.fabrics.values()]
            return last == [["directory-lost"]] * 2

        wait_until(told, PATIENCE_SECONDS, "the loss of the directory is noticed")

    def mend(self):
        """Redis is as it was at first, and has everything again."""
        self.redis.pass_on()
        if self.redis.process.ended():
            self.redis.start()
        self.redis.ask("acl", "setuser", USER, "resetpass", f">{PASSWORD}")

        def published():
            self.check_alive()
            return self.redis.users() == 2 and len(self.redis.keys("qp")) == 2 * QPS and len(self.redis.keys("process")) == 2

        wait_until(published, PATIENCE_SECONDS, "all is published again")


TROUBLES = ["killed", "restarted", "slow", "silent", "password_changed"]
# Those in which nobody gets an answer.
OUTAGES = {"killed", "silent", "password_changed"}


def healthy(logs, tool, kind):
    """A fault and the way back, with a server that is well."""
    with Machines(logs) as machines:
        machines.perftest(tool, 3)
        machines.wait_protected()
        for rail in (0, 1):
            machines.survives(rail, kind=kind)
            machines.wait_protected()
        machines.finish()
        switches = machines.events("switch")
        if any(len(events) < 2 * QPS for events in switches.values()):
            raise Failure(f"switches: {switches}")
        times = sorted(event["switch_us"] / 1000 for events in switches.values() for event in events)
        return f"{len(times)} switches, the slowest {times[-1]:.1f} ms"


def troubled(logs, tool, trouble):
    """The trouble comes between connecting and a fault, then while a switch is under way, then afterwards."""
    with Machines(logs) as machines:
        strike = getattr(machines, trouble)

        def mend():
            if trouble in OUTAGES:
                machines.noticed()
            machines.mend()
            machines.wait_protected()

        machines.perftest(tool, STREAM_SECONDS * (1 + (trouble == "silent")))
        began = time.monotonic()
        machines.wait_protected()
        strike()
        machines.survives(0)
        mend()
        # A silent path is noticed after some 80 ms only.
        machines.survives(1, meanwhile=strike)
        mend()
        machines.survives(0, moves=strike)
        before = machines.carried(1)
        wait_until(lambda: machines.carried(1) - before > STREAM_BYTES or machines.ended(), PATIENCE_SECONDS, "traffic afterwards")
        mend()
        took = time.monotonic() - began
        machines.finish()
        if any(machines.events("unprotected").values()):
            raise Failure(f"a QP was not protected: {machines.events('unprotected')}")
        lost, back = ([len(events) for events in machines.events(f"directory-{kind}").values()] for kind in ("lost", "back"))
        if trouble in OUTAGES and back != [3, 3]:
            raise Failure(f"lost {lost} times, back {back} times, where 3 are right")
        return f"three faults within {took:.1f} s; directory lost {lost} times"


def troubled_before(logs, trouble):
    """The trouble is there when the programs start: they run all the same, and say that they are not protected if they are not."""
    with Machines(logs) as machines:
        getattr(machines, trouble)()
        machines.perftest("ib_write_bw", 3)
        if trouble in OUTAGES:
            why = fails_closed(machines)
        else:
            machines.wait_protected()
            machines.survives(0)
            why = "protected"
        machines.redis.pass_on()
        machines.finish(clean=False)
        return why


def fails_closed(machines) -> str:
    """Both ends say that their QPs are not protected, and why."""
    if machines.protected():
        raise Failure("protected without a directory")
    whys = {event["why"] for events in machines.events("unprotected").values() for event in events}
    if len(machines.events("unprotected")["a"]) != QPS or not all("directory" in why for why in whys):
        raise Failure(f"not said: {machines.events('unprotected')}")
    return "; ".join(sorted(whys))


def comes_later(logs):
    """A program that started without a server is protected as soon as there is one: its next connections are."""
    with Machines(logs) as machines:
        machines.killed()
        machines.start(lambda host, port: verifier_line(machines, host, port, "--seconds", 2))
        unprotected = lambda: machines.ended() or any(machines.events("unprotected").values())
        wait_until(unprotected, PATIENCE_SECONDS, "a QP without protection")
        machines.redis.start()
        wait_until(lambda: machines.ended() or all(machines.events("directory-back").values()), PATIENCE_SECONDS, "it is back")
        machines.finish(clean=False)
        machines.programs.clear()
        machines.perftest("ib_write_bw", 2)
        machines.wait_protected()
        machines.survives(0)
        machines.finish()


def wrong_password(logs):
    """The programs have a wrong password all the time: they run unprotected, `unbroken run` says why, and nobody reads the key."""
    with Machines(logs, password="wrong") as machines:
        machines.perftest("ib_send_bw", 2)
        why = fails_closed(machines)
        machines.finish(clean=False)
        said = machines.programs["a"].output()
        if "refuses user and password" not in said or "not protected" not in said:
            raise Failure(f"not said: {said[:300]}")
        if "wrong" in said or machines.redis.keys("process"):
            raise Failure(f"shown, or let in: {said[:300]}")
        return why


def verifier_line(machines, host, port, *options):
    """The line of the verifier."""
    meet = ["--listen", port] if host == "b" else ["--connect", f"{machines.net.manager('b')}:{port}"]
    files = ["--status-file", machines.logs / f"{host}.status", "--stop-file", machines.logs / "stop"]
    return [compile_c("verifier", "-libverbs"), *meet, *options, *files]


def verifier(logs, seed):
    """Every message is verified through faults in all phases of all troubles."""
    with Machines(logs) as machines:
        machines.start(lambda host, port: verifier_line(machines, host, port, "--qps", QPS, "--seed", seed, "--seconds", 120))

        def progress(what):
            machines.check_alive()
            before = {host: verified(logs, host) for host in "ab"}

            def done():
                machines.check_alive()
                return all(verified(logs, host) >= before[host] + PROGRESS for host in "ab")

            wait_until(done, PATIENCE_SECONDS, f"messages verified {what}")

        progress("at first")
        machines.wait_protected()
        rail = 0
        for trouble in TROUBLES:
            strike = getattr(machines, trouble)
            for during in (False, True):
                kind = "ip link set down" if rail == 1 else "nft drop"
                if not during:
                    strike()
                machines.survives(rail, meanwhile=strike if during else lambda: None, kind=kind)
                progress(f"after {kind} of rail {rail} with '{trouble}'")
                machines.mend()
                machines.wait_protected()
                rail = 1 - rail
        (logs / "stop").touch()
        machines.finish()
        results = [report(program) for program in machines.programs.values()]
        if any(result["errors"] for result in results):
            raise Failure(f"errors: {results}")
        switches = sum(len(events) for events in machines.events("switch").values())
        return f"{2 * len(TROUBLES)} faults, {switches} switches, {sum(r['verified_messages'] for r in results)} messages verified"


def stopped(logs):
    """A process is stopped for longer than its lease: it is not forgotten by its peer, and found again by all when it goes on."""
    with Machines(logs, lease=LEASE_SECONDS) as machines:
        machines.perftest("ib_write_bw", STOPPED_SECONDS + 4)
        machines.wait_protected()
        machines.programs["b"].popen.send_signal(signal.SIGSTOP)
        wait_until(lambda: len(machines.redis.keys("qp")) == QPS, PATIENCE_SECONDS, "its lease ends")
        time.sleep(STOPPED_SECONDS - LEASE_SECONDS)
        if machines.events("give-up")["a"]:
            raise Failure(f"given up: {machines.events('give-up')}")
        machines.programs["b"].popen.send_signal(signal.SIGCONT)
        wait_until(lambda: len(machines.redis.keys("qp")) == 2 * QPS, PATIENCE_SECONDS, "it is found again")
        machines.survives(0)
        machines.finish()


def emulated(logs, run):
    """The emulated network with a Redis directory: NICs die and come back, with new control addresses that the peers must learn."""
    with Redis(None, logs) as redis:
        redis.start()
        note = run(logs, redis.env())
        if not redis.keys("process"):
            raise Failure("the programs did not use the server")
        return note


def must_not_survive(logs, what):
    """The mutants: without a common directory, or without failover, the assertions must fail."""
    options = ["--no-failover"] if what == "failover" else []
    with Machines(logs, directory=what != "directory", options=options) as machines:
        machines.perftest("ib_write_bw", 3)
        try:
            machines.survives(0, kind="ip link set down")
        except (Died, Failure) as death:
            return f"({str(death)[:80]})"
    raise Failure(f"the run without {what} passed")


def main() -> int:
    """Runs all of it."""
    suite = Suite("redis", sys.argv[1:])
    for tool in ("ib_write_bw", "ib_send_bw"):
        for kind in ("ip link set down", "nft drop"):
            suite.case(f"{tool}, {kind}", healthy, tool, kind)
    for number, trouble in enumerate(TROUBLES):
        suite.case(f"{('ib_write_bw', 'ib_send_bw')[number % 2]}, Redis {trouble}", troubled, ("ib_write_bw", "ib_send_bw")[number % 2], trouble)
    for trouble in TROUBLES:
        suite.case(f"Redis {trouble} before the start", troubled_before, trouble)
    suite.case("Redis comes later", comes_later)
    suite.case("wrong password", wrong_password)
    suite.case("verifier", verifier, 1)
    suite.case("stopped for longer than the lease", stopped)
    suite.case("emulated network, verifier", emulated, lambda logs, env: run_through_faults(logs, EMULATED_FAULTS, 1, env=env))
    suite.case("emulated network, UD", emulated, lambda logs, env: outlives(logs, [], env))
    for what in ("directory", "failover"):
        suite.case(f"no {what}, no survival", must_not_survive, what)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
