"""One perftest run through one fault: the rate on the failing path before, the rate on the backup
after, and the interruption."""

import statistics
import time

from .fabric import Fabric, now_us
from .process import Died, Failure, describe_exit, wait_until

# From the fault to the first instant at which the backup must carry its share.
SETTLE_US = 200_000
# perftest stops posting at the end of its -D; the last samples before that are left out.
TAIL_US = 250_000
BASELINE_SECONDS = 0.7
STEP_SECONDS = 0.1
# NICs of a host.
RAILS = 4
# Gaps that overlap this time after the fault are its work; later ones are the machine's.
GAP_WINDOW_US = 300_000
# A stream that lives carries this share of its former rate: the typical one of many, and each
# single one. (What else a machine does can halve the rate of a stream at any time, fault or none.)
TYPICAL_SHARE = 0.5
SHARE = 0.05


class Result:
    """What a run showed; `note` is its line."""

    def __init__(self):
        self.rate_before = self.rate_after = 0.0
        self.gap_ms = self.detect_us = self.switch_us = None
        self.switches = self.replayed = 0

    @property
    def share(self) -> float:
        """What of the rate before the fault the backup carries."""
        return self.rate_after / max(1.0, self.rate_before)

    @property
    def note(self) -> str:
        """The figures in a line."""
        return (
            f"gap {_or(self.gap_ms, '.1f')} ms, detect {_or(self.detect_us, '.0f')} us, switch "
            f"{_or(self.switch_us, '.0f')} us, "
            f"{self.rate_before * 8e-9:.1f} -> {self.rate_after * 8e-9:.1f} Gbit/s "
            f"({self.share:.0%}), {self.switches} switches"
        )


def _or(value, form):
    return "-" if value is None else format(value, form)


def survive(
    fabric: Fabric,
    tool: str,
    args: list,
    seconds: float,
    fault: str,
    both_ways: bool,
    failover=True,
    gaps=True,
) -> Result:
    """Runs `tool` from host a to host b over rail 0 and sets the fault in mid-stream. Fails where
    the stream does not live on. Without `gaps` none are looked for: the pages that they stand in
    are found by the pid that a program has for itself."""
    server, client = fabric.pair(tool, [*args, "-D", seconds], failover)
    if "read" in tool:
        flows = [("b", "a")]
    else:
        flows = [("a", "b")]
    if both_ways:
        flows.append(flows[0][::-1])
    pids = {"a": client.pid, "b": server.pid}
    meter = Meter(fabric, flows, [pids[to] for _, to in flows])

    def flowing():
        if client.ended() or server.ended():
            raise Failure("the programs ended before any traffic flowed")
        return all(n > 0 for n in meter.sample().default)

    wait_until(flowing, 20, "traffic on rail 0")
    start = meter.samples[-1]
    time.sleep(BASELINE_SECONDS)
    before = meter.sample()
    if any(before.backup):
        raise Failure(f"a backup carried payload before the fault: {before.backup}")
    fabric.fault(fault)
    fault_us = fabric.events("fault")[-1]["time_us"]
    last_us = start.time_us + seconds * 1e6 - TAIL_US
    if fault_us > last_us:
        raise Failure(
            f"the fault came {(fault_us - start.time_us) / 1e6:.1f} s after the stream's begin, "
            f"which lasts {seconds:g} s"
        )
    time.sleep(max(0, (fault_us + SETTLE_US - now_us()) / 1e6))
    settled = end = meter.sample()
    while not (client.ended() and server.ended()):
        if meter.samples[-1].time_us > start.time_us + (seconds + 20) * 1e6:
            raise Died(f"the programs still run 20 s after their time; {meter.state(settled)}")
        time.sleep(STEP_SECONDS)
        sample = meter.sample()
        if sample.time_us <= last_us or end is settled:
            end = sample
    for process in (client, server):
        if process.popen.returncode != 0:
            raise Died(
                f"{process.name} {describe_exit(process.popen.returncode)}; {meter.state(settled)}"
            )
    result = Result()
    result.rate_before = least_rate(start, before, lambda sample: sample.default)
    result.rate_after = least_rate(settled, end, lambda sample: sample.backup)
    _read_switches(fabric, result, {"a", "b"} if failover else set())
    result.gap_ms = meter.longest_gap_ms(fault_us)
    if gaps and result.gap_ms is None:
        # Data came before and after the fault, by the counters, so it was interrupted between: the
        # record is what is wrong.
        raise Failure(
            f"no receiver recorded a gap around the fault, though traffic crossed it: {result.note}"
        )
    if result.share < SHARE:
        raise Died(
            f"the backup carries less than {SHARE:.0%} of the rate before the fault: {result.note}"
        )
    return result


def _read_switches(fabric, result, hosts):
    switches = fabric.events("switch")
    missing = hosts - {s["host"] for s in switches}
    if missing:
        raise Failure(f"no switch event at {', '.join(sorted(missing))}")
    moved = set()
    for switch in switches:
        if switch["kind"] != "passive" or "/0" in switch["to"]:
            raise Failure(f"an unexpected switch: {switch}")
        # The first epochs after the one that was connected are those of the other rails, one of
        # which is the queue pair's turn.
        if (switch["host"], switch["qp"]) in moved or switch["epoch"] >= RAILS:
            raise Failure(
                f"a second switch, but there was one fault: a good path was suspected: {switch}"
            )
        moved.add((switch["host"], switch["qp"]))
    result.switches = len(switches)
    result.replayed = sum(s["replayed"] for s in switches)
    detect = [s["detect_us"] for s in switches if s["detect_us"] is not None]
    if switches:
        result.switch_us = statistics.median(s["switch_us"] for s in switches)
    if detect:
        result.detect_us = statistics.median(detect)


class Sample:
    """The counters at an instant: the payload bytes of each flow on rail 0 and on the others
    together, each the least of the sender's and the receiver's count. (Which backup is taken is for
    the program to choose.)"""

    def __init__(self, nics: dict, flows: list, time_us: int):
        self.time_us = time_us

        def carried(rails):
            for sender, receiver in flows:
                tx = sum(
                    nics[f"{sender}/{rail}"]["tx_payload_bytes"]
                    for rail in rails
                    if f"{sender}/{rail}" in nics
                )
                rx = sum(
                    nics[f"{receiver}/{rail}"]["rx_payload_bytes"]
                    for rail in rails
                    if f"{receiver}/{rail}" in nics
                )
                yield min(tx, rx)

        self.default, self.backup = list(carried([0])), list(carried(range(1, RAILS)))


def least_rate(first: Sample, last: Sample, of) -> float:
    """Bytes a second between two samples, of the flow that had least. `of` chooses what a sample
    counts."""
    seconds = max(1, last.time_us - first.time_us) / 1e6
    return min((b - a) / seconds for a, b in zip(of(first), of(last)))


class Meter:
    """Takes samples of the counters, and collects the gaps of the receivers (their ring is
    short)."""

    def __init__(self, fabric: Fabric, flows: list, receiver_pids: list):
        self.fabric, self.flows, self.samples = fabric, flows, []
        self.gaps = {pid: {} for pid in receiver_pids}

    def sample(self) -> Sample:
        """Takes a sample."""
        status = self.fabric.status()
        for pid, gaps in self.gaps.items():
            gaps.update(self.fabric.gaps(pid))
        nics = {n["nic"]: n for n in status["nics"]}
        self.samples.append(Sample(nics, self.flows, status["time_us"]))
        return self.samples[-1]

    def longest_gap_ms(self, fault_us: int):
        """The longest interval without data around the fault, at any receiver."""
        around = [
            length
            for gaps in self.gaps.values()
            for start, length in gaps.items()
            if start <= fault_us + GAP_WINDOW_US and start + length >= fault_us
        ]
        return max(around) / 1000 if around else None

    def state(self, since: Sample) -> str:
        """What the backups carried since a sample, in words."""
        moved = [b - a for a, b in zip(since.backup, self.samples[-1].backup)]
        return f"the backups carried {moved} bytes since then"
