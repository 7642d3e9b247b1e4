"""What a program pays for its directory: nothing. A Redis server is behind a proxy that delays each
way, or it is not there when the programs start.

The programs run on the emulated network. That they connect as fast as with the embedded directory
is shown by pairs of runs that take turns. That all queue pairs are protected in the end is what
`unbroken status` says, and a NIC that dies then is survived.
"""

import statistics
import time

import pytest

from lib.fabric import Fabric
from lib.process import Failure, wait_until
from lib.redis import Redis

QPS = 64
ROUNDS = 3
# 100 ms and 1.6 s from the question to the answer.
DELAYS_MS = (50, 800)
# A connection to the server needs some round trips, and so do entries and answers.
PATIENCE_SECONDS = 60
AWAY_SECONDS = 5
# When one that waits for a silent server no longer does.
GIVES_UP_SECONDS = 5


class Programs:
    """A context: a fabric, and a perftest from host a to host b over it."""

    def __init__(self, logs, name, env):
        self.fabric, self.name = Fabric(logs), name
        self.fabric.env |= env

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.fabric.__exit__(*error)

    def start(self, *args):
        """Starts it."""
        args = ["-F", "-q", QPS, "-s", 4096, *args]
        self.programs = self.fabric.pair("ib_send_bw", args)

    def qps(self) -> list:
        """What `unbroken status` says of the connected QPs."""
        for program in self.programs:
            if program.ended():
                raise Failure(f"{program.name} has ended: {program.output()[-300:]}")
        return [qp for qp in self.fabric.status()["qps"] if qp["state"] in ("rtr", "rts")]

    def wait_protected(self):
        """Waits until all QPs of both ends are."""
        protected = lambda: sum(qp["protected"] for qp in self.qps()) == 2 * QPS
        wait_until(protected, PATIENCE_SECONDS, "all QPs are protected")

    def wait_traffic(self, nic):
        """Waits until payload leaves by that NIC."""
        sent = lambda: self.fabric.nics()[nic]["tx_payload_bytes"]
        before = sent()
        wait_until(lambda: self.qps() and sent() > before, PATIENCE_SECONDS, f"traffic by {nic}")

    def outlives_its_nic(self):
        """The NIC that carries everything dies."""
        self.fabric.fault("nic a/0 dead")
        moved = lambda: sum(qp["epoch"] > 0 for qp in self.qps()) == 2 * QPS
        wait_until(moved, PATIENCE_SECONDS, "all QPs are on another path")

    def finish(self):
        """Waits until both ends have ended with success."""
        for program in self.programs:
            program.expect_success(60)


def seconds_to_connect(logs, name, env) -> float:
    """How long it takes from the start of the client until its payload leaves the NIC."""
    (logs / name).mkdir()
    with Programs(logs / name, name, env) as run:
        run.start("-n", 5)
        began = time.monotonic()
        sent = lambda: run.fabric.nics()["a/0"]["tx_payload_bytes"] > 0
        wait_until(sent, PATIENCE_SECONDS, "traffic by a/0", 0.002)
        took = time.monotonic() - began
        run.finish()
        return took


@pytest.mark.timing
def test_a_distant_server_costs_no_time(logs, note):
    """64 QPs connect with a server 100 ms away as fast as with the embedded directory. Whoever
    waits for the server waits for a round trip."""
    with Redis(None, logs) as redis:
        redis.start()
        redis.start_proxy()
        redis.delay(DELAYS_MS[0])
        envs, took = {"lmdb": {}, "redis": redis.env()}, {"lmdb": [], "redis": []}
        for n in range(ROUNDS):
            for kind in sorted(envs, reverse=n % 2 == 1):
                took[kind].append(seconds_to_connect(logs, f"{kind}{n}", envs[kind]))
    lmdb, far = (statistics.median(took[kind]) for kind in ("lmdb", "redis"))
    note(f"{QPS} QPs: {lmdb:.2f} s by LMDB, {far:.2f} s by Redis")
    if far > max(1.5 * lmdb, lmdb + DELAYS_MS[0] / 1000):
        raise Failure(f"64 QPs took {far:.2f} s, by LMDB {lmdb:.2f} s: {took}")


@pytest.mark.smoke
def test_a_silent_server_delays_no_program(logs):
    """`unbroken run` does not ask the server: one that is silent is given up after seconds."""
    with Redis(None, logs) as redis:
        redis.start()
        redis.start_proxy()
        redis.hold()
        with Fabric(logs) as fabric:
            fabric.env |= redis.env()
            began = time.monotonic()
            fabric.run("a", ["true"], "true").expect_success(60)
            took = time.monotonic() - began
    if took > GIVES_UP_SECONDS / 2:
        raise Failure(f"it took {took:.1f} s")


@pytest.mark.smoke
@pytest.mark.parametrize("delay_ms", DELAYS_MS)
def test_a_distant_server_protects_all(logs, note, delay_ms):
    """They are protected as soon as the answers are there, which takes few round trips, and a NIC
    that dies then is survived."""
    with Redis(None, logs) as redis:
        redis.start()
        redis.start_proxy()
        redis.delay(delay_ms)
        with Programs(logs, "far", redis.env()) as run:
            run.start("-D", 12 if delay_ms < 500 else 30)
            run.wait_traffic("a/0")
            began = time.monotonic()
            run.wait_protected()
            took = time.monotonic() - began
            run.outlives_its_nic()
            run.finish()
        round_trips = took / (2 * delay_ms / 1000)
        note(f"protected {took:.2f} s after the first bytes, {round_trips:.0f} round trips")


@pytest.mark.parametrize("end", ["gone", "restarts empty"])
def test_a_server_that_comes_later(logs, end):
    """The server is not there when the programs start, and comes 5 s later; or it is killed and
    comes back empty. The same connections are protected then."""
    with Redis(None, logs) as redis:
        if end == "restarts empty":
            redis.start()
        with Programs(logs, "later", redis.env()) as run:
            run.start("-D", 25)
            run.wait_traffic("a/0")
            if end == "gone":
                seen = lambda: [qp for qp in run.qps() if "directory" in qp["why"]]
                wait_until(lambda: len(seen()) == 2 * QPS, PATIENCE_SECONDS, "all QPs are pending")
                if not all(qp["pending"] for qp in seen()):
                    raise Failure(f"not pending: {seen()[0]}")
                time.sleep(AWAY_SECONDS)
            else:
                run.wait_protected()
                redis.kill()
                lost = lambda: len({e["pid"] for e in run.fabric.events("directory-lost")}) == 2
                wait_until(lost, PATIENCE_SECONDS, "the loss is noticed")
            redis.start()
            run.wait_protected()
            entered = lambda: len(redis.keys("qp")) == 2 * QPS
            wait_until(entered, PATIENCE_SECONDS, "all QPs are on the server")
            run.outlives_its_nic()
            run.finish()
        if redis.keys("qp"):
            raise Failure(f"left behind: {redis.keys('qp')[:3]}")
