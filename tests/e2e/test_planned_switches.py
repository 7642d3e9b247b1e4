"""Planned switches: QPs fail back to the NIC that they were connected on when it works again, and
leave a NIC that is drained (`unbroken nic drain`).

Nothing is lost, repeated or failed. QPs do not fail back again and again to a NIC that flaps.
"""

import os
import signal
import statistics

import pytest

from lib import options
from lib.cc import compile_c
from lib.fabric import Fabric, now_us
from lib.hpcc import hpcc_running
from lib.ports import free_port
from lib.process import Failure, wait_until
from lib.streams import UNTIL_STOPPED
from lib.verifier import report, start, verified

WAIT_SECONDS = 15
DRAINS = 10
# Messages verified between two drains.
PROGRESS = 300
# The median pause of a stream at a planned switch under load is this long at most; see `pause_ms`.
PAUSE_MS, PAUSES = 10, 5
BUSY_QPS = 512
# All of them have left a drained NIC, or are back on it, after this time.
BUSY_MS = 1000
# The NIC is down half of the time, ten times a second.
FLAPS = ("--for", "50ms", "--every", "100ms")
# A path that flaps has to prove itself ever longer, so what a flapping NIC costs does not grow with
# the flaps.
FLAP_SWITCHES = 8
FLAP_SECONDS = 60 if options.LONG else 10


def sent(fabric: Fabric, nic: str) -> int:
    """Payload that has left a NIC."""
    return fabric.nics().get(nic, {}).get("tx_payload_bytes", 0)


def flows(fabric: Fabric, nic: str, process) -> None:
    """Waits until payload leaves a NIC."""
    before = sent(fabric, nic)
    wait_until(
        lambda: process.ended() or sent(fabric, nic) > before + 1_000_000,
        WAIT_SECONDS,
        f"payload leaves {nic}",
    )


def planned(fabric: Fabric) -> list:
    """The planned switches so far."""
    return [e for e in fabric.events("switch") if e["kind"] == "planned"]


def new_nic(fabric: Fabric, host: str) -> str:
    """The NIC that the first queue pair of a host has gone to."""
    moves = lambda: [e for e in fabric.events("switch") if e["host"] == host]
    wait_until(moves, WAIT_SECONDS, f"a queue pair of {host} moves")
    return moves()[0]["to"].split("-")[0]


def check_quiet(fabric: Fabric) -> None:
    """Fails where a QP was given up."""
    gave_up = fabric.events("give-up")
    if gave_up:
        raise Failure(f"given up: {gave_up[0]}")


def drain(fabric: Fabric, nic: str, *more: str) -> str:
    """`unbroken nic drain`, which waits until all have left."""
    done = fabric.command("nic", "drain", nic, *more)
    if done.returncode != 0:
        raise Failure(f"drain {nic}: {done.stderr.strip()}")
    return done.stdout.strip()


def undrain(fabric: Fabric, nic: str) -> None:
    """`unbroken nic undrain`."""
    if fabric.command("nic", "undrain", nic).returncode != 0:
        raise Failure(f"undrain {nic} failed")


def pause_ms(fabric: Fabric, pid: int, switches: list) -> float:
    """The longest gap at a receiver while these switches went on, in ms."""
    first = min(e["detected_at_us"] for e in switches)
    last = max(e["time_us"] for e in switches)
    lengths = [us for at, us in fabric.gaps(pid).items() if at <= last and at + us >= first]
    return max(lengths, default=0) / 1000


def fail_back(logs, tool: str, source: str, host: str) -> float:
    """A NIC dies and is healed: the stream fails back by a planned switch, and the other NIC is
    quiet. Gives how long the stream paused for that, in ms."""
    with Fabric(logs) as fabric:
        server, client = fabric.pair(tool, ["-D", UNTIL_STOPPED])
        receiver = client if source == "b" else server
        flows(fabric, f"{source}/0", client)
        fabric.fault(f"nic {host}/0 dead")
        other = new_nic(fabric, source)
        flows(fabric, other, client)
        fabric.clear()
        wait_until(
            lambda: client.ended() or len(planned(fabric)) == 2, WAIT_SECONDS, "both ends go back"
        )
        there = sent(fabric, other)
        flows(fabric, f"{source}/0", client)
        if client.ended():
            raise Failure("the program ended before it was back")
        if sent(fabric, other) > there + 1_000_000:
            raise Failure("the other NIC still carries payload")
        took = pause_ms(fabric, receiver.pid, planned(fabric))
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        check_quiet(fabric)
        switches = fabric.events("switch")
        if len(switches) != 4 or any(e["replayed"] for e in planned(fabric)):
            raise Failure(
                f"{len(switches)} switches, replayed by plan: "
                f"{[e['replayed'] for e in planned(fabric)]}"
            )
        return took


FAILBACKS = pytest.mark.parametrize(
    "tool, source, host",
    [
        pytest.param("ib_write_bw", "a", "a", id="ib_write_bw"),
        pytest.param("ib_send_bw", "a", "a", id="ib_send_bw"),
        pytest.param("ib_read_bw", "b", "a", id="ib_read_bw"),
        pytest.param("ib_write_bw", "a", "b", id="ib_write_bw-server"),
    ],
)


@FAILBACKS
def test_failback(logs, note, tool, source, host):
    note(f"pause {fail_back(logs, tool, source, host):.1f} ms")


@pytest.mark.timing
def test_failback_pause(logs, note):
    pauses_ms = []
    for n in range(PAUSES):
        folder = logs / str(n)
        folder.mkdir()
        pauses_ms.append(fail_back(folder, "ib_write_bw", "a", "a"))
    pause_ms = statistics.median(pauses_ms)
    note(f"median of {PAUSES} pauses {pause_ms:.1f} ms")
    assert pause_ms <= PAUSE_MS, f"pauses of {pauses_ms} ms"


def test_drain_of_a_passive_end(logs, note):
    """perftest's server of WRITEs never sends, and its QPs stay in RTR: they leave a drained NIC of
    theirs all the same."""
    with Fabric(logs) as fabric:
        server, client = fabric.pair("ib_write_bw", ["-D", UNTIL_STOPPED, "-q", 4])
        flows(fabric, "a/0", client)
        shown = drain(fabric, "b/0")
        there = sent(fabric, "a/0")
        flows(fabric, new_nic(fabric, "a"), client)
        if sent(fabric, "a/0") > there + 1_000_000:
            raise Failure("the drained NIC is still sent to")
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        check_quiet(fabric)
        note(shown)


def test_atomics(logs, note):
    """Atomics are never replayed, and need not be: they survive every planned switch."""
    with Fabric(logs) as fabric:
        server, client = fabric.pair("ib_atomic_bw", ["-q", 4, "-D", UNTIL_STOPPED])
        wait_until(
            lambda: (
                len(fabric.status()["qps"]) == 8 and fabric.nics()["a/0"]["tx_packets"] > 10_000
            ),
            WAIT_SECONDS,
            "atomics run",
        )
        for nic in ("a/0", "b/1", "a/0"):
            drain(fabric, nic)
            undrain(fabric, nic)
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        check_quiet(fabric)
        if len(planned(fabric)) < 8:
            raise Failure(f"{len(planned(fabric))} planned switches")
        note(f"{len(planned(fabric))} planned switches")


@pytest.mark.parametrize(
    "shared",
    [
        pytest.param((), id="own-receives", marks=pytest.mark.smoke),
        pytest.param(("--srq",), id="shared-receives"),
    ],
)
def test_drains_under_the_verifier(logs, note, shared):
    """NICs at either end are drained and taken back under the verifier; QPs leave them, and fail
    back."""
    program = compile_c("verifier", "-libverbs", "-lpthread")
    with Fabric(logs) as fabric:
        programs = start(
            fabric, logs, program, "--seconds", 60, "--qps", 2, "--seed", options.SEED, *shared
        )
        stalls, moved = [], 0
        for n in range(DRAINS):
            goal = verified(logs, "a") + PROGRESS
            wait_until(
                lambda: verified(logs, "a") >= goal or any(p.ended() for p in programs.values()),
                WAIT_SECONDS,
                "messages are verified",
            )
            before = len(fabric.events("switch"))
            path = next(qp["path"] for qp in fabric.status()["qps"] if qp["path"].startswith("a"))
            nic = path.split("-")[n % 2]
            moved += "left it" in drain(fabric, nic)
            new = fabric.events("switch")[before:]
            stalls += [e["switch_us"] / 1000 for e in new if e["kind"] == "planned"]
            undrain(fabric, nic)
        (logs / "stop").touch()
        results = {
            host: p.expect_success(WAIT_SECONDS) or report(p) for host, p in programs.items()
        }
        check_quiet(fabric)
        # A QP may fail back by itself just when its NIC is to be drained.
        count = len(planned(fabric))
        if moved < DRAINS // 2 or count < 2 * moved:
            raise Failure(f"{count} planned switches in {moved} of {DRAINS} drains")
        messages = sum(r["verified_messages"] for r in results.values())
        note(
            f"{count} planned switches, median {statistics.median(stalls):.1f} ms, {messages} "
            "messages verified"
        )


def drain_busy(logs) -> tuple:
    """Hundreds of busy QPs leave a NIC together, and fail back together when it is no longer
    drained: each knows that it left by its own wish. Gives the switches away, and those back."""
    program = compile_c("storm", "-libverbs")
    with Fabric(logs) as fabric:
        port = free_port()
        options = ["-q", BUSY_QPS, "-m", 8, "-t", 6]
        server = fabric.run("b", [program, "--listen", port, *options], "b-busy")
        client = fabric.run("a", [program, "--connect", f"127.0.0.1:{port}", *options], "a-busy")
        flows(fabric, "a/0", client)
        drain(fabric, "a/0")
        left = together(fabric, BUSY_QPS, [])
        undrain(fabric, "a/0")
        back = together(fabric, BUSY_QPS, left)
        client.expect_success(60)
        server.expect_success(WAIT_SECONDS)
        check_quiet(fabric)
        if any(e["to"].split("-")[0] != f"{e['host']}/0" for e in back):
            raise Failure(
                "not all failed back: "
                f"{[e for e in back if not e['to'].startswith(e['host'] + '/0')][:2]}"
            )
        return left, back


@pytest.mark.serial
def test_drain_of_busy_qps(logs, note):
    left, back = drain_busy(logs)
    note(f"{len(left)} switches in {duration_ms(left):.0f} ms")
    note(f"{len(back)} back in {duration_ms(back):.0f} ms")


@pytest.mark.timing
def test_drain_of_busy_qps_time(logs, note):
    took_ms = [duration_ms(switches) for switches in drain_busy(logs)]
    note(f"{took_ms[0]:.0f} ms to leave, {took_ms[1]:.0f} ms back")
    assert max(took_ms) <= BUSY_MS


def together(fabric: Fabric, qps: int, before: list) -> list:
    """The switches of all queue pairs, both ends, that come after those."""
    wait_until(
        lambda: len(fabric.events("switch")) >= len(before) + 2 * qps,
        WAIT_SECONDS,
        f"all {qps} queue pairs move",
    )
    return fabric.events("switch")[len(before) :]


def duration_ms(switches: list) -> float:
    """From the first that began to the last that ended."""
    return (max(e["time_us"] for e in switches) - min(e["detected_at_us"] for e in switches)) / 1000


def test_nic_flaps(logs, note):
    """The NIC comes and goes ten times a second."""
    program = compile_c("verifier", "-libverbs", "-lpthread")
    with Fabric(logs) as fabric:
        verifier = ["--seconds", FLAP_SECONDS, "--qps", 2, "--seed", options.SEED]
        programs = start(fabric, logs, program, *verifier)
        wait_until(lambda: verified(logs, "a") > PROGRESS, WAIT_SECONDS, "messages are verified")
        fabric.fault("nic a/0 down", *FLAPS)
        results = [
            p.expect_success(FLAP_SECONDS + WAIT_SECONDS) or report(p) for p in programs.values()
        ]
        check_quiet(fabric)
        switches = fabric.events("switch")
        if not switches or len(switches) > 4 * FLAP_SWITCHES:
            raise Failure(f"{len(switches)} switches of four ends of QPs in {FLAP_SECONDS} s")
        note(
            f"{len(switches)} switches, {sum(r['verified_messages'] for r in results)} messages "
            "verified"
        )


def test_drain_of_a_stopped_program(logs, note):
    """A program that is stopped does not report what it has on a NIC. The NIC does not count as
    left before it does."""
    with Fabric(logs) as fabric:
        server, client = fabric.pair("ib_write_bw", ["-D", UNTIL_STOPPED])
        flows(fabric, "a/0", client)
        os.kill(client.pid, signal.SIGSTOP)
        try:
            done = fabric.command("nic", "drain", "a/0", "--wait", "500ms")
        finally:
            os.kill(client.pid, signal.SIGCONT)
        if done.returncode == 0 or f"pid {client.pid} does not answer" not in done.stderr:
            raise Failure(
                f"while its program is stopped: {done.stdout.strip()} {done.stderr.strip()}"
            )
        shown = drain(fabric, "a/0")
        still = sent(fabric, "a/0")
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        check_quiet(fabric)
        if (
            sent(fabric, "a/0") > still + 100_000
            or fabric.elsewhere("a/0", "tx_payload_bytes") < 10_000_000
        ):
            raise Failure("what left the drained NIC goes on there")
        note(shown)


@pytest.mark.mpi
@pytest.mark.serial
def test_drain_under_hpcc(logs, note):
    """An MPI job goes on while its NIC is drained; afterwards the NIC carries nothing of it."""
    with (
        Fabric(logs, "--link-layer", "infiniband") as fabric,
        hpcc_running(fabric, "openib", 1500) as mpirun,
    ):
        wait_until(
            lambda: mpirun.ended() or sent(fabric, "a/0") > 100_000_000, 120, "traffic on rail 0"
        )
        if mpirun.ended():
            raise Failure("hpcc was over before its NIC was drained")
        shown = drain(fabric, "a/0")
        still = sent(fabric, "a/0")
        mpirun.expect_success(120)
        after = sent(fabric, "a/0")
        check_quiet(fabric)
        others = fabric.elsewhere("a/0", "tx_payload_bytes")
        if after > still + 100_000 or others < 10_000_000:
            raise Failure(f"{after - still} bytes left the drained NIC, {others} the others")
        note(shown)


@pytest.mark.parametrize("fault", [False, True], ids=["drained", "dead"])
def test_load_is_spread(logs, fault: bool):
    """Queue pairs that leave a NIC together take turns over the others, which carry a share
    each."""
    with Fabric(logs) as fabric:
        server, client = fabric.pair("ib_write_bw", ["-D", UNTIL_STOPPED, "-q", 12])
        flows(fabric, "a/0", client)
        if fault:
            fabric.fault("nic a/0 dead")
        else:
            drain(fabric, "a/0")
        wait_until(
            lambda: len(fabric.events("switch")) >= 24, WAIT_SECONDS, "all queue pairs have moved"
        )
        paths = [e["to"] for e in fabric.events("switch") if e["host"] == "a"]
        shares = {path: paths.count(path) for path in sorted(set(paths))}
        if shares != {f"a/{n}-b/{n}": 4 for n in (1, 2, 3)}:
            raise Failure(f"queue pairs went to {shares}")
        for nic in ("a/1", "a/2", "a/3"):
            flows(fabric, nic, client)
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        check_quiet(fabric)


def test_drain_whose_first_paths_the_peer_declines(logs, note):
    """Queue pairs leave a drained NIC although the peer declines the first paths that they are to
    take: its NICs there are down, which they do not know."""
    with Fabric(logs) as fabric:
        server, client = fabric.pair("ib_write_bw", ["-D", UNTIL_STOPPED, "-q", 6])
        flows(fabric, "a/0", client)
        for nic in (1, 2):
            fabric.fault(f"nic b/{nic} down")
        shown = drain(fabric, "a/0")
        if client.ended():
            raise Failure(f"the program ended before its queue pairs had left: {shown}")
        moves = [(e["qp"], e["to"]) for e in fabric.events("switch") if e["host"] == "a"]
        if len(set(moves)) != 6 or {to for _, to in moves} != {"a/3-b/3"}:
            raise Failure(f"queue pairs went to {moves}")
        flows(fabric, "a/3", client)
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        check_quiet(fabric)
        note(shown)


@pytest.mark.parametrize(
    "text, to", [("0:2", "a/2"), ("0:3-2", "a/3")], ids=["rail", "across-rails"]
)
def test_map_of_nics(logs, text: str, to: str):
    """UNBROKEN_MAP says where queue pairs go."""
    with Fabric(logs) as fabric:
        fabric.env["UNBROKEN_MAP"] = text
        server, client = fabric.pair("ib_write_bw", ["-D", UNTIL_STOPPED, "-q", 4])
        flows(fabric, "a/0", client)
        fabric.fault("nic a/0 dead")
        flows(fabric, to, client)
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        check_quiet(fabric)
        away = {e["to"].split("-")[0] for e in fabric.events("switch") if e["host"] == "a"}
        if away != {to}:
            raise Failure(f"queue pairs went to {away}")


@pytest.mark.smoke
def test_wrong_names(logs):
    """A NIC that does not exist, and one that was not drained."""
    with Fabric(logs) as fabric:
        server, client = fabric.pair("ib_send_bw", ["-n", 100])
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        for args, says in (
            (["drain", "a/9"], "there is no NIC a/9"),
            (["undrain", "a/0"], "a/0 is not drained"),
        ):
            done = fabric.command("nic", *args)
            if done.returncode != 1 or says not in done.stderr:
                raise Failure(f"nic {args}: status {done.returncode}: {done.stderr.strip()}")
        began = now_us()
        shown = drain(fabric, "a/0")
        if "no queue pair was on it" not in shown or now_us() - began > 5_000_000:
            raise Failure(shown)
        state = fabric.nics()["a/0"]["state"]
        if state != "active, drained":
            raise Failure(f"status says {state}")
