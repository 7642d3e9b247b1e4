"""Failover between machines: two network namespaces that share no runtime folder, and a Redis
server in a third.

The NICs are the interfaces of two veth pairs; the Redis server is reached by a network for
management, through a proxy. A stream (perftest), or the verifier, goes through faults of the
interfaces that carry it, while something happens to the server: it is killed, or restarted empty,
or slow, or holds every answer, or has another password than the programs. That comes before the
programs start, between connecting and the fault, while a switch is under way, and afterwards. What
is asserted is bytes on the other interface after the fault, the events, and what lies on the
server.

Needs root, iproute2, nftables and redis-server.
"""

import signal
import time

import pytest

from lib.cc import compile_c
from lib.datagrams import outlives
from lib.fabric import UNBROKEN, Fabric
from lib.namespaces import Cluster
from lib.ports import free_port, listens
from lib.process import Died, Failure, describe_exit, wait_until
from lib.redis import PASSWORD, USER, Redis
from lib.streams import UNTIL_STOPPED
from lib.verifier import PROGRESS, report, run_through_faults, verified

QPS = 2
# Set-up exchanges a few KiB; this much on an interface is a stream.
STREAM_BYTES = 2_000_000
# However the machine is loaded: a switch, or the return of a server.
PATIENCE_SECONDS = 20
# Longer than the lease that goes with it.
STOPPED_SECONDS = 4
EMULATED_FAULTS = 40
LEASE_SECONDS = 2


class Machines:
    """A context: the hosts a and b, each with a runtime folder of its own; the server; the
    programs."""

    def __init__(self, logs, directory=True, password=PASSWORD, options=(), **settings):
        self.logs, self.directory, self.password = logs, directory, password
        self.options, self.settings = options, settings
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
            line = [*self.net.within(host), UNBROKEN, "run", "--nics", nics, *self.options, "--"]
            line += args_of(host, port)
            # Where traffic is when a fault comes is for the test to say: nothing fails back by
            # itself.
            env = {"UNBROKEN_FAILBACK": "0"}
            if self.directory:
                env |= self.redis.env(self.password, host=host, **self.settings)
            program = self.fabrics[host].start(f"{host}-program", line, env)
            self.programs[host] = program
            if host == "b":
                listening = lambda p=program: p.ended() or listens(p.pid, port)
                wait_until(listening, PATIENCE_SECONDS, "the server listens")

    def perftest(self, tool):
        """Starts a stream that flows on rail 0."""

        def line(host, port):
            to = [self.net.manager("b")] if host == "a" else []
            args = ["-F", "-p", port, "-s", 65536, "-q", QPS, "-D", UNTIL_STOPPED, *to]
            return [tool, "-d", "unb0", *args]

        self.start(line)
        client, server = self.programs["a"], self.programs["b"]
        client.peer, server.peer = server, client
        flows = lambda: self.ended() or self.carried(0) > STREAM_BYTES
        wait_until(flows, PATIENCE_SECONDS, "traffic on rail 0")
        self.check_alive()

    def ended(self) -> bool:
        """Whether a program has ended."""
        return any(program.ended() for program in self.programs.values())

    def check_alive(self):
        """Fails if a program has ended."""
        for program in self.programs.values():
            if program.ended():
                ended = f"{program.name} {describe_exit(program.popen.returncode)}"
                raise Died(f"{ended}: {program.output()[-300:]}")

    def carried(self, rail) -> int:
        """The bytes that went from a to b on a rail."""
        return min(self.net.bytes("a", rail)[0], self.net.bytes("b", rail)[1])

    def protected(self) -> bool:
        """Whether all QPs of both ends are, by now."""
        self.check_alive()
        qps = [qp for fabric in self.fabrics.values() for qp in fabric.status()["qps"]]
        ready = [qp for qp in qps if qp["protected"] and qp["state"] in ("rtr", "rts")]
        return len(qps) == len(ready) == 2 * QPS

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
        """A fault on the rail that carries everything: everything goes on over the other one.
        Then the rail is repaired."""
        moves = moves or (lambda: None)
        other = 1 - rail
        began = self.carried(rail)
        flows = lambda: self.ended() or self.carried(rail) - began > STREAM_BYTES
        wait_until(flows, PATIENCE_SECONDS, f"traffic on rail {rail} before its fault")
        before = self.carried(other)
        self.fault(rail, kind)
        meanwhile()

        def moved():
            self.check_alive()
            return self.carried(other) - before > STREAM_BYTES

        what = f"traffic on rail {other} after {kind} of rail {rail}"
        wait_until(moved, PATIENCE_SECONDS, what)
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
        """Waits until both hosts have an event that they have no directory."""

        def told():
            self.check_alive()
            kinds = [[e["event"] for e in fabric.events()] for fabric in self.fabrics.values()]
            last = [[k for k in of_host if k.startswith("directory")][-1:] for of_host in kinds]
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
            qps, processes = self.redis.keys("qp"), self.redis.keys("process")
            return self.redis.users() == 2 and len(qps) == 2 * QPS and len(processes) == 2

        wait_until(published, PATIENCE_SECONDS, "all is published again")


TROUBLES = ["killed", "restarted", "slow", "silent", "password_changed"]
# Those in which nobody gets an answer.
OUTAGES = {"killed", "silent", "password_changed"}
TOOLS = ["ib_write_bw", "ib_send_bw"]


@pytest.mark.root
@pytest.mark.parametrize(
    "tool, kind",
    [
        ("ib_write_bw", "ip link set down"),
        ("ib_send_bw", "ip link set down"),
        ("ib_write_bw", "nft drop"),
        pytest.param("ib_send_bw", "nft drop", marks=pytest.mark.smoke),
    ],
)
def test_server_works(logs, note, tool, kind):
    """A fault, and one of the other rail, with a server that works."""
    with Machines(logs) as machines:
        machines.perftest(tool)
        machines.wait_protected()
        for rail in (0, 1):
            machines.survives(rail, kind=kind)
            machines.wait_protected()
        machines.finish()
        switches = machines.events("switch")
        if any(len(events) < 2 * QPS for events in switches.values()):
            raise Failure(f"switches: {switches}")
        times = sorted(
            event["switch_us"] / 1000 for events in switches.values() for event in events
        )
        note(f"{len(times)} switches, the slowest {times[-1]:.1f} ms")


@pytest.mark.root
@pytest.mark.parametrize(
    "trouble, tool", [(trouble, TOOLS[n % 2]) for n, trouble in enumerate(TROUBLES)], ids=TROUBLES
)
def test_trouble_between_faults(logs, note, tool, trouble):
    """The trouble comes between connecting and a fault, then while a switch is under way, then
    afterwards."""
    with Machines(logs) as machines:
        strike = getattr(machines, trouble)

        def mend():
            if trouble in OUTAGES:
                machines.noticed()
            machines.mend()
            machines.wait_protected()

        machines.perftest(tool)
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
        flows = lambda: machines.carried(1) - before > STREAM_BYTES or machines.ended()
        wait_until(flows, PATIENCE_SECONDS, "traffic afterwards")
        mend()
        took = time.monotonic() - began
        machines.finish()
        unprotected = machines.events("unprotected")
        if any(unprotected.values()):
            raise Failure(f"a QP was not protected: {unprotected}")
        kinds = [machines.events(f"directory-{kind}") for kind in ("lost", "back")]
        lost, back = ([len(events) for events in of_kind.values()] for of_kind in kinds)
        if trouble in OUTAGES and back != [3, 3]:
            raise Failure(f"lost {lost} times, back {back} times, where 3 are right")
        note(f"three faults within {took:.1f} s; directory lost {lost} times")


@pytest.mark.root
@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_before_the_start(logs, note, trouble):
    """The trouble is there when the programs start: they run all the same, and events say that
    they are not protected if they are not."""
    with Machines(logs) as machines:
        getattr(machines, trouble)()
        machines.perftest("ib_write_bw")
        if trouble in OUTAGES:
            why = fails_closed(machines)
        else:
            machines.wait_protected()
            machines.survives(0)
            why = "protected"
        machines.redis.pass_on()
        machines.finish(clean=False)
        note(why)


def fails_closed(machines) -> str:
    """Both ends have events that their QPs are not protected, and why."""
    if machines.protected():
        raise Failure("protected without a directory")
    told = lambda: machines.ended() or len(machines.events("unprotected")["a"]) == QPS
    wait_until(told, PATIENCE_SECONDS, "events that the QPs are not protected")
    unprotected = machines.events("unprotected")
    whys = {event["why"] for events in unprotected.values() for event in events}
    if len(unprotected["a"]) != QPS or not all("directory" in why for why in whys):
        raise Failure(f"events that do not say it: {unprotected}")
    return "; ".join(sorted(whys))


@pytest.mark.root
def test_server_comes_later(logs):
    """A program that started without a server is protected as soon as there is one, with the
    connections that it has."""
    with Machines(logs) as machines:
        machines.killed()
        machines.perftest("ib_write_bw")
        unprotected = lambda: machines.ended() or all(machines.events("unprotected").values())
        wait_until(unprotected, PATIENCE_SECONDS, "QPs without protection")
        machines.redis.start()
        machines.wait_protected()
        if not all(len(events) == QPS for events in machines.events("peer-found").values()):
            raise Failure(f"not told: {machines.events('peer-found')}")
        machines.survives(0)
        machines.finish()


@pytest.mark.root
@pytest.mark.smoke
def test_wrong_password(logs, note):
    """The programs have a wrong password all the time: they run unprotected, `unbroken run` says
    why, and nobody reads the key."""
    with Machines(logs, password="wrong") as machines:
        machines.perftest("ib_send_bw")
        why = fails_closed(machines)
        machines.finish(clean=False)
        output = machines.programs["a"].output()
        if "refuses user and password" not in output or "not protected" not in output:
            raise Failure(f"the output does not say it: {output[:300]}")
        if "wrong" in output or machines.redis.keys("process"):
            raise Failure(f"shown, or let in: {output[:300]}")
        note(why)


def verifier_line(machines, host, port, *options):
    """The line of the verifier."""
    to = ["--connect", f"{machines.net.manager('b')}:{port}"]
    meet = ["--listen", port] if host == "b" else to
    files = [
        "--status-file",
        machines.logs / f"{host}.status",
        "--stop-file",
        machines.logs / "stop",
    ]
    return [compile_c("verifier", "-libverbs"), *meet, *options, *files]


@pytest.mark.root
def test_verifier(logs, note):
    """Every message is verified through faults in all phases of all troubles."""
    with Machines(logs) as machines:
        args = ["--qps", QPS, "--seed", 1, "--seconds", 120]
        machines.start(lambda host, port: verifier_line(machines, host, port, *args))

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
                meanwhile = strike if during else lambda: None
                machines.survives(rail, meanwhile=meanwhile, kind=kind)
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
        messages = sum(result["verified_messages"] for result in results)
        note(f"{2 * len(TROUBLES)} faults, {switches} switches, {messages} messages verified")


@pytest.mark.root
def test_stopped_for_longer_than_the_lease(logs):
    """A process is stopped for longer than its lease: its peer does not forget it, and all find
    it again when it goes on."""
    with Machines(logs, lease=LEASE_SECONDS) as machines:
        machines.perftest("ib_write_bw")
        machines.wait_protected()
        machines.programs["b"].popen.send_signal(signal.SIGSTOP)
        entries = lambda: len(machines.redis.keys("qp"))
        wait_until(lambda: entries() == QPS, PATIENCE_SECONDS, "its lease ends")
        time.sleep(STOPPED_SECONDS - LEASE_SECONDS)
        if machines.events("give-up")["a"]:
            raise Failure(f"given up: {machines.events('give-up')}")
        machines.programs["b"].popen.send_signal(signal.SIGCONT)
        wait_until(lambda: entries() == 2 * QPS, PATIENCE_SECONDS, "it is found again")
        machines.survives(0)
        machines.finish()


EMULATED = {
    "verifier": lambda logs, env: run_through_faults(logs, EMULATED_FAULTS, 1, env=env),
    "UD": lambda logs, env: outlives(logs, [], env),
}


@pytest.mark.parametrize("run", EMULATED)
def test_emulated_network(logs, note, run):
    """The emulated network with a Redis directory: NICs die and come back, with new control
    addresses that the peers must learn."""
    with Redis(None, logs) as redis:
        redis.start()
        note(EMULATED[run](logs, redis.env()))
        if not redis.keys("process"):
            raise Failure("the programs did not use the server")


@pytest.mark.root
@pytest.mark.parametrize("without", ["directory", "failover"])
def test_must_not_survive_without(logs, note, without):
    """The mutants: without a common directory, or without failover, the assertions must fail."""
    options = ["--no-failover"] if without == "failover" else []
    with Machines(logs, directory=without != "directory", options=options) as machines:
        machines.perftest("ib_write_bw")
        with pytest.raises(Failure) as death:
            machines.survives(0, kind="ip link set down")
        note(death.value)
