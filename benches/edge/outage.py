"""Where the time of an outage goes, as the application sees it: detection, routing, and the rest,
for each kind of fault."""

import json
import time

from lib.edge import Lab, Monitor, Probe, faults, first, outage, parts_us, perftest, run, used
from lib.fabric import Fabric, now_us
from lib.ports import free_port
from lib.process import Failure, wait_until
from picture import axis, bars, figure, median, row

KINDS = ("carrier loss", "silent loss", "ToR death", "ToR BGP daemon killed")
# Runs with the probe, and with `ib_write_bw`, of each kind.
PROBES, STREAMS = 3, 2
PROBE_S = 3.0
WITHIN_US = 2_500_000
# The probe's datagrams are small, BFD's and BGP's are fewer.
LOOK_S = 0.4


def busiest(lab, host: str) -> str:
    """The uplink that most packets leave by."""
    count = lambda d: json.loads(
        run("ip", "-n", lab.node(host), "-s", "-j", "link", "show", "dev", d)
    )[0]["stats64"]["tx"]["packets"]
    before = {d: count(d) for d in ("p1", "p2")}
    time.sleep(LOOK_S)
    return max(before, key=lambda d: count(d) - before[d])


def recover(lab, undo, uplink):
    undo(uplink)
    wait_until(lab.both_ways_back, 90, "both ways are back")
    wait_until(lab.sessions_up, 60, "all BFD sessions are up again")


def with_probe(lab, make, undo) -> dict:
    """One fault under the probe. What has to change is at the sender: data goes one way."""
    with Monitor(lab, "h1") as monitor:
        probe = Probe(lab, 1, 2, PROBE_S, free_port())
        uplink = busiest(lab, "h1")
        fault_us = now_us()
        make(uplink)
        rows = probe.rows()
        detected, routed_us = first(lab, "h1", "bfd", fault_us), monitor.changed(
            "10.255.0.2", fault_us
        )
    recover(lab, undo, uplink)
    gap_us, ended_us = outage(rows, fault_us, WITHIN_US)
    routed = routed_us and routed_us - fault_us
    parts = parts_us(ended_us - gap_us, ended_us, detected and fault_us + detected, routed_us)
    return {
        "outage": gap_us / 1e3,
        "detection": detected and detected / 1e3,
        "routed": routed and routed / 1e3,
        "parts": [part / 1e3 for part in parts],
        "lost": rows[-1][0] - len(rows),
    }


def with_stream(lab, name, make, undo) -> float:
    """One fault under `ib_write_bw`: the longest interval without data at the receiver, in ms."""
    server, client = perftest(lab, "ib_write_bw", 1, 2, name, "-s", 65536, "-D", 4, "-u", 16)
    uplink = used(lab, "h1", 0)
    page, seen = Pages(lab.logs / "runtime"), {}
    fault_us = now_us()
    make(uplink)
    while not client.ended():
        seen.update(page.gaps(server.pid))
        if now_us() > fault_us + 60_000_000:
            raise Failure("ib_write_bw does not end")
        time.sleep(0.05)
    for process in (client, server):
        process.expect_success(60)
    recover(lab, undo, uplink)
    near = [
        length
        for start, length in seen.items()
        if start + length >= fault_us and start <= fault_us + WITHIN_US
    ]
    return max(near, default=0) / 1e3


class Pages:
    """The pages of gaps in a runtime folder, read as `Fabric` reads them."""

    gaps = Fabric.gaps

    def __init__(self, path):
        self.path = path


def measured(lab, kind: str, tag: str) -> dict:
    make, undo = faults(lab)[kind]
    probes = [with_probe(lab, make, undo) for _ in range(PROBES)]
    name = kind.replace(" ", "-") + tag
    streams = [with_stream(lab, f"{name}-{n}", make, undo) for n in range(STREAMS)]
    print(f"  {kind}, {tag}: {probes} streams {streams}", flush=True)
    middle = lambda key: median([p[key] for p in probes if p[key] is not None])
    # Medians of parts would not sum to the median of the whole: these are of one outage, the
    # median.
    shown = sorted(probes, key=lambda p: p["outage"])[len(probes) // 2]
    detection, routing, rest = shown["parts"]
    return {
        "outages": [p["outage"] for p in probes],
        "outage": shown["outage"],
        "detection": detection,
        "routing": routing,
        "rest": rest,
        "bfd": middle("detection"),
        "routed": middle("routed"),
        "streams": streams,
    }


def spread(values: list) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


def measure(logs, _python, bfd_ms: int) -> dict:
    found = {}
    for fast in (False, True):
        tag = "fast_failover" if fast else "FRR alone"
        with Lab(logs, 2, "--bfd-ms", bfd_ms, *(["--fast-failover"] if fast else [])) as lab:
            wait_until(lab.both_ways_back, 60, "both ways are there")
            for kind in KINDS:
                found[kind, tag] = measured(lab, kind, tag.replace(" ", "-"))
    panels, rows = [], []
    highest = max(max(f["outage"], *f["streams"]) for f in found.values())
    for tag in ("FRR alone", "fast_failover"):
        of = [found[kind, tag] for kind in KINDS]
        series = [
            ["outage of a datagram each millisecond", 2, [f["outage"] for f in of]],
            ["detection: until BFD's word", 1, [f["detection"] for f in of]],
            ["routing: until the route to the receiver has changed", 3, [f["routing"] for f in of]],
            ["rest: until a datagram arrives", 5, [f["rest"] for f in of]],
            ["ib_write_bw: longest interval without data", 4, [median(f["streams"]) for f in of]],
        ]
        panels.append(
            bars(
                f"{tag}, median",
                axis("time", 0, 1.2 * max(1.0, highest), "ms"),
                list(KINDS),
                series,
            )
        )
        ms = lambda value: "–" if value is None else f"{value:.1f}"
        for kind, f in zip(KINDS, of):
            here = (
                f"{ms(f['bfd'])}; {ms(f['routed'])}; {spread(f['outages'])}; {spread(f['streams'])}"
            )
            rows.append(
                row(
                    "outage",
                    f"{kind}, {tag}: BFD's word after; routes changed after; outage of the probe; "
                    "of ib_write_bw, ms",
                    "milliseconds (no figure)",
                    here,
                )
            )
    notes = [
        f"BFD {bfd_ms} ms × 3. {PROBES} faults under a probe of one datagram a millisecond, "
        f"{STREAMS} under ib_write_bw (64 KiB, all it can), whose transport waits before it "
        "sends again and loads the cores that BFD needs. Reconciliation: none, since no rule "
        "depends on an uplink. Detection, routing and the rest are those of the median outage "
        "and sum to it; when the route changed is what the kernel told a monitor. A carrier's "
        "loss is not detected by BFD; the kernel leaves the link out at once. The paper's "
        "text has no such figures.",
    ]
    title = "The host edge: where the time of an outage goes"
    return {"figures": [["outage", figure(title, panels, 1, notes)]], "rows": rows}
