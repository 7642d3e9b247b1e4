"""Failover in bad moments: hundreds of busy QPs at once, ends that are stopped, killed or fork in
the middle of a switch, and a second failure before the first is over.

Programs verify every message (tests/c/storm.c, tests/c/verifier.c); of storm.c each QP must have
switched, and once only.
"""

import json
import os
import random
import signal
import time
from itertools import product

import pytest

from lib.cc import compile_c
from lib.device import FLUSHES
from lib.fabric import Fabric, now_us
from lib.ports import free_port, listens
from lib.process import Failure, wait_until
from lib.verifier import ROUND_SECONDS, Verifier

BUSY_SECONDS = 4
END_SECONDS = 90
# The least that busy QPs carry in all.
LEAST_MESSAGES = 20_000
LEAST_CHILDREN = 100
STOP_SECONDS = (0.5, 3)
# From the first failure to the second.
SECOND_MS = (1, 10, 100)
# Ahead of the first of two failures, so that both are set before either strikes.
AHEAD_MS = 400
KILLS = 4
# The end of a process is seen by the others of its machine, so nobody has to wait until a deadline
# for its silence.
SOON_SECONDS = 5


@pytest.mark.parametrize(
    "qps, fault, arguments",
    [
        pytest.param(500, "nic a/0 dead", [], id="500-nic-dead"),
        pytest.param(500, "nic b/0 down", ["-w", "-b"], id="500-writes-both-ways-nic-down"),
        pytest.param(500, "cable a/0 cut", ["-r"], id="500-reads-cable-cut"),
        pytest.param(32, "nic a/0 dead", ["-b", "-f", 2], id="forks-nic-dead"),
        pytest.param(32, "cable b/0 cut", ["-b", "-f", 2], id="forks-cable-cut"),
    ],
)
def test_busy_qps(logs, note, qps, fault, arguments):
    """All QPs of a program lose their NIC at once; each switches, once, and nothing is lost."""
    note(busy_qps(logs, qps, fault, arguments, {}))


@pytest.mark.parametrize("flush", FLUSHES, indirect=True)
def test_busy_qps_flush(logs, note, flush):
    """The same with plain devices that do not flush as they should."""
    arguments = ["-b"]
    note(busy_qps(logs, 64, "nic b/0 down", arguments, {"UNBROKEN_DEVICE_FLUSH": flush}))


def busy_qps(logs, qps, fault, arguments, env):
    """A storm through a fault; `env`: more of the programs' environment."""
    program = compile_c("storm", "-libverbs")
    with Fabric(logs) as fabric:
        fabric.env.update(env)
        port = free_port()
        args = ["-q", qps, "-m", 8, "-s", 512, "-t", BUSY_SECONDS, *arguments]
        server = fabric.run("b", [program, "--listen", port, *args], "b-busy")
        wait_until(lambda: server.ended() or listens(server.pid, port), 20, "the server listens")
        client = fabric.run("a", [program, "--connect", f"127.0.0.1:{port}", *args], "a-busy")
        both = [client, server]
        busy = lambda: (
            all("running" in p.output() for p in both)
            and all(qp["protected"] for qp in fabric.status()["qps"])
        )
        wait_until(lambda: any(p.ended() for p in both) or busy(), 20, "busy and protected QPs")
        before = fabric.events("switch")
        fabric.fault(fault)
        for process in both:
            process.expect_success(END_SECONDS)
        results = [json.loads(p.output().splitlines()[-1]) for p in both]
        if before:
            raise Failure(f"{len(before)} switches before the fault, the first {before[0]}")
        check_switched_once(fabric.events("switch"), qps, fault.split()[1])
        messages = sum(r["messages"] for r in results)
        if (
            messages < LEAST_MESSAGES
            or "-f" in arguments
            and min(r["children"] for r in results) < LEAST_CHILDREN
        ):
            raise Failure(f"too little was done: {results}")
        worst_ms = max(r["worst_ms"] for r in results)
        forks = f", {sum(r['children'] for r in results)} children" if "-f" in arguments else ""
        return f"{messages} messages, the longest took {worst_ms:.0f} ms{forks}"


def check_switched_once(switches, qps, failed):
    """Every QP at both ends has left the NIC that failed, and none has switched for another
    reason."""
    moves = {}
    for switch in switches:
        moves.setdefault((switch["host"], switch["qp"]), []).append(
            f"{switch['from']} to {switch['to']} ({switch['reason']})"
        )
    if len(moves) != 2 * qps:
        raise Failure(f"{len(moves)} of {2 * qps} ends of QPs have switched")
    wrong = [
        m for m in moves.values() if len(m) != 1 or failed not in m[0].split(" to ")[0].split("-")
    ]
    if wrong:
        raise Failure(
            f"{len(wrong)} of {2 * qps} ends of QPs switched more than once, or without need, as "
            f"{wrong[0]}"
        )


@pytest.mark.parametrize("host", ["a", "b"])
def test_end_is_stopped(logs, note, host):
    """An end is stopped, as by a debugger, for a moment and for long, with and without a failure
    meanwhile; both go on."""
    with Fabric(logs) as fabric:
        run = Verifier(fabric, logs)
        pid = run.programs[host].pid
        for seconds in STOP_SECONDS:
            for kind in (
                None,
                f"nic {host}/{{}} dead",
                f"nic {'ab'[host == 'a']}/{{}} dead",
                "cable a/{} cut",
            ):
                run.settled()
                fault = kind and kind.format(run.rail())
                os.kill(pid, signal.SIGSTOP)
                try:
                    if fault:
                        fabric.fault(fault)
                    time.sleep(seconds)
                finally:
                    os.kill(pid, signal.SIGCONT)
                if fault:
                    run.moved_on([fault])
                run.progress(f"after {seconds} s in which host {host} was stopped, and '{fault}'")
                if fault:
                    fabric.clear()
        note(run.finish())


def set_both(fabric, first, second, apart_ms):
    """Sets two faults that strike so far apart; gives the ms that it became. Both are set ahead, as
    commands take their time."""
    asked_us = now_us()
    # When each begins; the log has that only when it has come.
    begins_us = lambda: {f["fault"]: f["from_us"] for f in fabric.faults()}
    fabric.fault(first, "--at", f"{AHEAD_MS}ms")
    first_us = begins_us()[first]
    command_us = first_us - AHEAD_MS * 1000 - asked_us
    ahead_us = first_us + apart_ms * 1000 - now_us() - command_us
    fabric.fault(second, "--at", f"{max(0, round(ahead_us))}us")
    return (begins_us()[second] - first_us) / 1000


def second_failure(logs, apart_ms, second) -> str:
    """Another NIC fails shortly after the first: the one that the QPs switch to, or the other end
    of the path that they leave."""
    with Fabric(logs) as fabric:
        run = Verifier(fabric, logs)
        became = []
        for turn in range(4):
            run.settled()
            rail = int(run.rail())
            faults = [f"nic {'ab'[turn % 2]}/{rail} dead", second(turn % 2, rail)]
            became.append(set_both(fabric, *faults, apart_ms))
            wait_until(
                lambda: all(fabric.nics()[f.split()[1]]["state"] != "active" for f in faults),
                ROUND_SECONDS,
                f"{faults} strike",
            )
            run.moved_on(faults)
            run.progress(f"after {faults}, {became[-1]:.1f} ms apart")
            for fault in faults:
                fabric.clear(fault)
        return f"{', '.join(f'{ms:.1f}' for ms in became)} ms apart, {run.finish()}"


# What fails second, by the end (0 is a) and the rail of the first.
SECOND = {
    "same-end": lambda end, rail: f"nic {'ab'[end]}/{(rail + 1) % 4} dead",
    "other-end": lambda end, rail: f"nic {'ba'[end]}/{(rail + 1) % 4} dead",
}


@pytest.mark.parametrize(
    "second, apart_ms",
    [
        pytest.param(*case, marks=pytest.mark.smoke if case == ("same-end", 10) else ())
        for case in product(SECOND, SECOND_MS)
    ],
)
def test_second_failure(logs, note, second, apart_ms):
    """The next NIC of an end dies, too."""
    note(second_failure(logs, apart_ms, SECOND[second]))


def test_nics_of_both_ends_die_at_once(logs, note):
    note(second_failure(logs, 0, lambda end, rail: f"nic {'ba'[end]}/{rail} dead"))


@pytest.mark.parametrize("victim", ["client", "server"])
def test_end_is_killed(logs, note, victim):
    """SIGKILL to an end in the middle of a switch: the other has its error soon, and the next run
    works."""
    rng, took = random.Random(2), []
    with Fabric(logs) as fabric:
        for turn in range(KILLS):
            came = fabric.nics().get("b/0", {}).get("rx_payload_bytes", 0)
            server, client = fabric.pair("ib_send_bw", ["-F", "-s", 65536, "-q", 4, "-D", 30, "-b"])
            flows = lambda: (
                fabric.nics()["b/0"]["rx_payload_bytes"] > came + 1e6
                and all(q["protected"] for q in fabric.status()["qps"])
            )
            wait_until(
                lambda: client.ended() or server.ended() or flows(), 20, "traffic of protected QPs"
            )
            fabric.fault(rng.choice(["nic a/0 dead", "cable a/0 cut"]))
            time.sleep(rng.uniform(0, 0.01))
            ends = {"client": (client, server), "server": (server, client)}[victim]
            if ends[1].ended():
                raise Failure(f"{ends[1].name} ended before its peer was killed")
            ends[0].kill(signal.SIGKILL)
            killed_at = time.monotonic()
            ends[1].expect_error(SOON_SECONDS)
            took.append(ends[1].ended_at - killed_at)
            fabric.clear()
            wait_until(lambda: fabric.nics()["a/0"]["state"] == "active", 10, "a/0 works again")
            for process in fabric.pair("ib_write_bw", ["-F", "-s", 65536, "-q", 4, "-n", 500]):
                process.expect_success(30)
        note(f"errors after {', '.join(f'{s * 1000:.0f}' for s in took)} ms")
