"""Several faults at once, faults on lossy networks, and other settings of the fabric, under the
verifier (tests/c/verifier.c).

Each test sets faults in rounds. After each round both ends must verify messages again while the
faults last (or are over, where they leave no path), and in the end nothing was lost, doubled or
damaged.
"""

import random
import time

import pytest

from lib.cc import compile_c
from lib.device import need_windows
from lib.fabric import Fabric
from lib.process import Failure, wait_until
from lib.verifier import Verifier, report, start

pytestmark = pytest.mark.usefixtures("device")


def rounds(logs, count, faults_of, options=(), settings=(), background=()):
    """`count` rounds of the faults that `faults_of(rail, random)` names, all set as fast as
    commands can be."""
    with Fabric(logs, *settings) as fabric:
        for fault in background:
            fabric.fault(fault)
        run = Verifier(fabric, logs, *options)
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
    """The path in use and the one that would be next fail within a moment, at different ends and in
    different ways."""
    return [f"cable a/{rail} cut", f"nic b/{(int(rail) + 1) % 4} dead"]


def three_rails(rail, rng):
    """Three of four rails at once."""
    kinds = ["nic {}/{} dead", "nic {}/{} down", "cable {}/{} cut"]
    return [rng.choice(kinds).format(rng.choice("ab"), (int(rail) + i) % 4) for i in range(3)]


def one(kind):
    """One fault of the path in use."""
    return lambda rail, rng: [kind.format(host=rng.choice("ab"), rail=rail)]


ROUGH = [f"{what} rail{rail} 1%" for what in ("loss", "reorder", "duplicate") for rail in range(4)]
DEAD, CUT = one("nic {host}/{rail} dead"), one("cable {host}/{rail} cut")
INFINIBAND = ["--link-layer", "infiniband"]
SMALL = ["--mtu", "256"]


@pytest.mark.smoke
def test_nics_of_both_ends_die(logs, note):
    """With shared receives, on a network that loses, reorders and duplicates."""
    note(rounds(logs, 5, both_ends, ["--srq"], background=ROUGH))


def test_two_rails_at_once(logs, note):
    note(rounds(logs, 5, two_rails))


def test_three_rails_at_once(logs, note):
    """On a network that loses, reorders and duplicates."""
    note(rounds(logs, 5, three_rails, background=ROUGH))


def test_work_requests_fail(logs, note):
    """With shared receives."""
    note(rounds(logs, 5, one("wqe-error {host}/{rail}"), ["--srq"]))


@pytest.mark.parametrize("count, fault", [(5, DEAD), (3, CUT)], ids=["nic-dead", "cable-cut"])
def test_infiniband(logs, note, count, fault):
    note(rounds(logs, count, fault, settings=INFINIBAND))


def test_small_mtu_cables_are_cut(logs, note):
    note(rounds(logs, 3, CUT, settings=SMALL))


def test_small_mtu_loss_nics_die(logs, note):
    note(rounds(logs, 3, DEAD, settings=SMALL, background=ROUGH[:4]))


def test_two_ports_nics_die(logs, note):
    note(rounds(logs, 3, DEAD, settings=["--ports", "2"]))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("flap a/0 down=3ms up=3ms", id="port-3ms"),
        pytest.param("flap cable a/0 down=20ms up=20ms", id="cable-20ms"),
        pytest.param("flap cable b/0 down=60ms up=100ms", id="cable-60ms"),
        pytest.param("flap rail0 down=5ms up=200ms", id="switch-5ms"),
    ],
)
def test_faults_that_flap(logs, note, fault):
    """A flap that is faster than silence is noticed: whatever is chosen, traffic goes on."""
    with Fabric(logs) as fabric:
        run = Verifier(fabric, logs)
        run.settled()
        fabric.fault(fault)
        for i in range(4):
            time.sleep(0.3)
            run.progress(f"under '{fault}', part {i}")
        fabric.clear()
        run.progress("after the flap")
        note(run.finish())


@pytest.mark.parametrize("tool", ["ib_send_bw", "ib_read_bw"])
def test_long_messages(logs, note, tool):
    """Messages of 4,096 packets, which no end completes between a cut and its notice."""
    with Fabric(logs, "--mtu", "256") as fabric:
        server, client = fabric.pair(tool, ["-F", "-s", 1 << 20, "-q", 2, "-D", 3])
        data = "a" if tool == "ib_read_bw" else "b"
        wait_until(
            lambda: client.ended() or fabric.nics()[f"{data}/0"]["rx_payload_bytes"] > 1e7,
            20,
            "traffic",
        )
        fabric.fault("cable a/0 cut")
        for process in (client, server):
            process.expect_success(40)
        carried = fabric.elsewhere(f"{data}/0", "rx_payload_bytes")
        if carried < 1e7:
            raise Failure(f"only {carried} bytes on other rails")
        note(f"{carried / 1e6:.0f} MB on other rails")


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("nic a/0 dead", id="nic-dead", marks=pytest.mark.smoke),
        pytest.param("nic b/0 down", id="nic-down"),
        pytest.param("cable a/0 cut", id="cable-cut"),
    ],
)
def test_qp_with_window(logs, note, fault):
    """A QP with a memory window, a protected one, UC and UD on a NIC that fails: the first ends
    with its error at both ends."""
    need_windows()
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
        note(f"ended after {ends} s: {results}")
