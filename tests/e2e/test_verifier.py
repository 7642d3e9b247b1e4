"""Every message arrives once, in order and intact, through many faults in one run
(tests/c/verifier.c).

The rail that carries the messages fails in a random way at a random end. When the programs go on
over another rail, the failed one is healed, and then the next failure comes. A fifth as many faults
come while all QPs of a program take their receives from one shared queue, and a fifth while all
switches lose and reorder packets.
"""

from itertools import product

import pytest

from lib import options
from lib.cc import compile_c
from lib.device import FLUSHES
from lib.fabric import Fabric
from lib.process import Failure, wait_until
from lib.verifier import PROGRESS, QPS, Faults, run_through_faults, start, verified

# Each finds something unfinished nearly always.
NO_REPLAY_FAULTS = 10
ERROR_SECONDS = 5


def fault_count(device) -> int:
    """How many faults there are in one run."""
    full, plain = (1000, 200) if options.LONG else (200, 40)
    return plain if device == "plain" else full


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_faults(logs, note, device):
    note(run_through_faults(logs, fault_count(device), options.SEED))


@pytest.mark.timeout(900)
def test_faults_shared_receives(logs, note, device):
    """A receive that a move loses or uses twice is found at once, or at the end, when all receives
    must be back in the queue."""
    faults = (fault_count(device) + 4) // 5
    note(run_through_faults(logs, faults, options.SEED, "--srq"))


@pytest.mark.timeout(900)
def test_faults_loss_and_reordering(logs, note, device):
    """What is lost is sent again alone, and what comes early waits, also while NICs die."""
    background = [f"{what} rail{rail} 1%" for what in ("loss", "reorder") for rail in range(4)]
    faults = (fault_count(device) + 4) // 5
    note(run_through_faults(logs, faults, options.SEED, background=background))


@pytest.mark.smoke
def test_few_faults(logs, note):
    """The first faults of a run, for the covering set."""
    note(run_through_faults(logs, 5, options.SEED))


def flush_cases():
    """Every way to flush, with own and with shared receives."""
    for i, (shared, flush) in enumerate(product([(), ("--srq",)], FLUSHES)):
        name = f"{flush}{' shared-receives' if shared else ''}"
        yield pytest.param(flush, shared, id=name, marks=pytest.mark.smoke if i < 2 else ())


@pytest.mark.parametrize("flush, shared", flush_cases(), indirect=["flush"])
def test_flushes(logs, note, flush, shared):
    """Plain devices whose providers lose flushes, keep them back, or take their time."""
    faults = 40 if options.LONG else 5
    env = {"UNBROKEN_DEVICE_FLUSH": flush}
    note(run_through_faults(logs, faults, options.SEED, *shared, env=env))


@pytest.mark.smoke
def test_corrupted_message_is_found(logs, note, device):
    """The self-check: a corrupted message must be found."""
    program = compile_c("verifier", "-libverbs")
    with Fabric(logs) as fabric:
        programs = start(fabric, logs, program, "--seconds", 3, "--corrupt")
        codes = [p.wait(60) for p in programs.values()]
        if not any(code > 0 for code in codes):
            raise Failure(f"nobody noticed: statuses {codes}")
        note(f"found, statuses {codes}")


@pytest.mark.smoke
@pytest.mark.parametrize("shared", [(), ("--srq",)], ids=["own-receives", "shared-receives"])
def test_no_replay(logs, note, device, shared):
    """WRs marked NO_REPLAY in flight: the original error, at both ends, at once (the programs check
    the time)."""
    program = compile_c("verifier", "-libverbs")
    with Fabric(logs) as fabric:
        programs = start(
            fabric, logs, program, "--qps", QPS, "--seconds", 60, "--no-replay", *shared
        )
        run = Faults(fabric, logs, programs, 1)
        wait_until(
            lambda: run.ended() or all(verified(logs, h) > PROGRESS for h in "ab"),
            20,
            "the first messages",
        )
        if run.ended():
            raise Failure(f"ended before any fault: {fabric.events()[:2]}")
        note(no_replay_under_faults(fabric, run))


def no_replay_under_faults(fabric, run):
    """Faults until one finds something unfinished; then both ends have their error at once."""
    while not run.ended():
        if run.faults == NO_REPLAY_FAULTS:
            raise Failure(f"{run.faults} faults, and no NO_REPLAY error")
        run.strike_or_end()
    for process in run.programs.values():
        process.expect_success(ERROR_SECONDS)
    give_ups = {e["host"] for e in fabric.events("give-up")}
    if give_ups != {"a", "b"}:
        raise Failure(f"give-up events at {sorted(give_ups)}, both ends are right")
    ends_ms = [round((p.ended_at - run.struck_at) * 1000) for p in run.programs.values()]
    return f"both ends ended within {max(ends_ms)} ms of fault {run.faults} ({run.last})"


def test_dlopen_and_dlvsym(logs, note, device):
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
            raise Failure(
                f"{len(fabric.events('switch'))} switches, {elsewhere} bytes of payload on other "
                "rails"
            )
        note(f"{payload() / 1e9:.2f} GB on rail 0, {elsewhere / 1e9:.2f} GB on others")
