"""Figure 12: `ib_send_lat` with messages of 8 MiB, with a fault in mid-run and without."""

from lib.edge import Lab, latencies_us, other_uplink, perftest, used
from lib.process import Failure, wait_until
from picture import axis, cdf, figure, line, lines, percentile, row

BYTES = 1 << 23
# Many thousands, so that what one fault delays lies beyond the 99.9th percentile.
MESSAGES = 30000
LIMIT_S = 900
SHARES = (0.5, 0.9, 0.99, 0.999)


def run(lab, name: str, faulty: bool) -> list:
    """Times in ms, one of each message (half a round trip)."""
    server, client = perftest(lab, "ib_send_lat", 1, 2, name, "-s", BYTES, "-n", MESSAGES, "-U", "-u", 16)
    uplink = used(lab, "h1", 0)
    if faulty:
        before = lab.bytes("h1", uplink)[0]
        # In mid-run: half of all that is to be sent has left.
        half = lambda: client.ended() or lab.bytes("h1", uplink)[0] - before > MESSAGES * BYTES / 2
        wait_until(half, LIMIT_S, "half of the messages")
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


def measure(logs, _python, bfd_ms: int) -> dict:
    with Lab(logs, 2, "--bfd-ms", bfd_ms, "--fast-failover") as lab:
        wait_until(lab.both_ways_back, 60, "both ways are there")
        without = run(lab, "without", False)
        with_fault = run(lab, "with", True)
    highest = max(without + with_fault)
    low = min(without + with_fault)
    x = lambda: axis("half a round trip (ms)", 0.9 * low, 1.2 * highest, log=True)
    drawn = [line("without a fault", 5, cdf(without)), line("an uplink falls silent in mid-run", 2, cdf(with_fault), "dashed")]
    panels = [
        lines("all messages", x(), axis("share of messages", 0, 1.02), drawn),
        lines("the last hundredth", x(), axis("share of messages", 0.99, 1.0002), drawn),
    ]
    limit = percentile(without, 0.999)
    late = lambda times: sum(1 for t in times if t > limit)
    told = lambda times: ", ".join(f"{percentile(times, s):.2f}" for s in SHARES) + f"; {max(times):.1f}"
    rows = [
        row("Figure 12", "8 MiB without a fault, ms: 50th, 90th, 99th, 99.9th percentile; longest", "", told(without)),
        row("Figure 12", "the same with a fault in mid-run", "differs beyond the 99.9th percentile only", told(with_fault)),
        row("Figure 12", f"messages of {MESSAGES} that took longer than the 99.9th percentile without a fault", "", f"{late(without)} without, {late(with_fault)} with"),
    ]
    notes = [f"{MESSAGES} messages of 8 MiB each way between two hosts; BFD {bfd_ms} ms × 3, fast_failover; the link from switch to host drops everything from the middle on. No error, and the other uplink carried the rest."]
    title = "THORN-ML, Figure 12: latency of ib_send_lat, 8 MiB, with a fault and without"
    return {"figures": [["12", figure(title, panels, 2, notes)]], "rows": rows}
