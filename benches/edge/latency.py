"""Figure 12: `ib_send_lat` with messages of 8 MiB, with a fault in mid-run and without.

Both take turns, in runs of a few thousand messages (without, with, with, without, ...): the times
of a shared machine drift by more within an hour than the fault could change. So there is a fault in
each of several runs where the paper has one."""

from lib.edge import Lab, latencies_us, other_uplink, perftest, used
from lib.process import Failure, wait_until
from picture import axis, cdf, figure, line, lines, percentile, row

BYTES = 1 << 23
# Many thousands with a fault and as many without, so that what the faults delay lies beyond the
# 99.9th percentile.
RUNS = 6
MESSAGES = 5000
LIMIT_S = 300
SHARES = (0.5, 0.9, 0.99, 0.999)


def run(lab, name: str, faulty: bool) -> list:
    """Times in ms, one of each message (half a round trip)."""
    server, client = perftest(
        lab, "ib_send_lat", 1, 2, name, "-s", BYTES, "-n", MESSAGES, "-U", "-u", 16
    )
    uplink = used(lab, "h1", 0)
    # In mid-run: half of all that is to be sent has left. Each look starts a program, which delays
    # messages: few looks, and the same without a fault.
    before = lab.bytes("h1", uplink)[0]
    half = lambda: client.ended() or lab.bytes("h1", uplink)[0] - before > MESSAGES * BYTES / 2
    wait_until(half, LIMIT_S, "half of the messages", longest_pause_s=0.5)
    if faulty:
        lab.silence("t" + uplink[1], "h1")
        carried = lab.bytes("h1", other_uplink(uplink))[0]
    for process in (client, server):
        process.expect_success(LIMIT_S)
    if faulty:
        moved = lab.bytes("h1", other_uplink(uplink))[0] - carried
        lab.heal("t" + uplink[1], "h1")
        if moved < 100 * BYTES:
            raise Failure(f"{moved} bytes went over the other uplink: the fault was not in mid-run")
    times = [us / 1e3 for us in latencies_us(client.output())]
    if len(times) != MESSAGES - 1:
        raise Failure(f"{len(times)} times of {MESSAGES} messages")
    return times


def in_turns(lab) -> tuple:
    """The times of all runs without a fault and of all with one."""
    times = {False: [], True: []}
    for turn in range(RUNS):
        for faulty in (False, True) if turn % 2 == 0 else (True, False):
            wait_until(lab.both_ways_back, 60, "both ways are there")
            wait_until(lab.sessions_up, 60, "all BFD sessions are up")
            of_run = run(lab, f"{turn}-{'with' if faulty else 'without'}", faulty)
            times[faulty] += of_run
            print(
                f"  run {turn + 1} of {RUNS} {'with' if faulty else 'without'} a fault: "
                f"{told(of_run)}",
                flush=True,
            )
    return times[False], times[True]


def told(times: list) -> str:
    return ", ".join(f"{percentile(times, s):.2f}" for s in SHARES) + f"; {max(times):.1f}"


def measure(logs, _python, bfd_ms: int) -> dict:
    with Lab(logs, 2, "--bfd-ms", bfd_ms, "--fast-failover") as lab:
        without, with_fault = in_turns(lab)
    highest = max(without + with_fault)
    low = min(without + with_fault)
    x = lambda: axis("half a round trip", 0.9 * low, 1.2 * highest, "ms", log=True)
    drawn = [
        line("without a fault", 5, cdf(without)),
        line("an uplink falls silent in mid-run", 2, cdf(with_fault), "dashed"),
    ]
    panels = [
        lines("all messages", x(), axis("share of messages", 0, 1.02), drawn),
        lines("the last hundredth", x(), axis("share of messages", 0.99, 1.0002), drawn),
    ]
    limit = percentile(without, 0.999)
    late = lambda times: sum(1 for t in times if t > limit)
    rows = [
        row(
            "Figure 12",
            "8 MiB without a fault, ms: 50th, 90th, 99th, 99.9th percentile; longest",
            "",
            told(without),
        ),
        row(
            "Figure 12",
            f"the same with a fault in the middle of each of {RUNS} runs",
            "differs beyond the 99.9th percentile only",
            told(with_fault),
        ),
        row(
            "Figure 12",
            f"messages of {RUNS * MESSAGES} that took longer than the 99.9th percentile without a "
            "fault",
            "",
            f"{late(without)} without, {late(with_fault)} with",
        ),
    ]
    notes = [
        f"{RUNS * MESSAGES} messages of 8 MiB each way between two hosts, with and without a fault "
        f"in turns of {MESSAGES}; BFD {bfd_ms} ms × 3, fast_failover; the link from switch to host "
        "drops everything from the middle of each faulty run on. No error, and the other uplink "
        "carried the rest."
    ]
    title = "THORN-ML, Figure 12: latency of ib_send_lat, 8 MiB, with a fault and without"
    return {"figures": [["12", figure(title, panels, 2, notes)]], "rows": rows}
