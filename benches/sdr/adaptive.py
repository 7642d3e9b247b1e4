#!/usr/bin/env python3
"""The adaptive choice without a rate beside the fixed schemes:
`adaptive.py [--rounds N] [--loss P,…] [--json]`.

Reliable writes between two processes over the emulated network, at several losses of packets. The
schemes take turns, round by round, so that what else the machine does meets all of them. Told are
the medians of the rounds, and the adaptive choice's as a share of the best fixed scheme's: of the
rate, of chunks sent, and of the processor time of both ends, which says the same where others use
the machine, too. It ends with status 1 where the share of the rate is below 0.9."""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests")]

from lib.fabric import UNBROKEN, Fabric

FIXED = ["sr-nack", "sr-rto", "mds:32,4", "mds:16,8", "xor:32,8"]
SHARE = 0.9
LIMIT_S = 180


def once(fabric, scheme: str, messages: int, more: list) -> dict:
    """One run; its object."""
    words = [UNBROKEN, "sdr", "bench", "--scheme", scheme, "--messages", messages, "--json", *more]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [str(w) for w in words], env=fabric.env, capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode != 0:
        sys.exit(f"{scheme}: {done.stderr.strip()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**json.loads(done.stdout), "cpu_s": cpu_s}


def at(loss: float, a, more: list) -> dict:
    """The medians at one loss, in percent."""
    with tempfile.TemporaryDirectory() as logs, Fabric(Path(logs)) as fabric:
        if loss:
            fabric.fault(f"loss a/0 {loss:g}% tx")
        rounds = [
            {scheme: once(fabric, scheme, a.messages, more) for scheme in ["adaptive", *FIXED]}
            for _ in range(a.rounds)
        ]
    median = lambda scheme, key: statistics.median(r[scheme][key] for r in rounds)
    rates = {scheme: round(median(scheme, "gbit_per_s"), 2) for scheme in rounds[0]}
    best = max(FIXED, key=rates.get)
    # Within a round the machine is the same, more or less.
    share = lambda key: round(
        statistics.median(r["adaptive"][key] / r[best][key] for r in rounds), 2
    )
    return {
        "loss_percent": loss,
        "gbit_per_s": rates,
        "best": best,
        "share": share("gbit_per_s"),
        "chunks": share("chunks_sent"),
        "cpu": share("cpu_s"),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--messages", type=int, default=1000)
    parser.add_argument("--loss", default="0,0.1,1,5", help="of packets, in percent")
    parser.add_argument("--json", action="store_true")
    a, more = parser.parse_known_args()
    results = []
    for loss in a.loss.split(","):
        results.append(at(float(loss), a, more))
        r = results[-1]
        if not a.json:
            rates = ", ".join(f"{scheme} {rate:.2f}" for scheme, rate in r["gbit_per_s"].items())
            print(
                f"loss {r['loss_percent']:g} %: {rates} Gbit/s; of {r['best']}, adaptive has "
                f"{r['share']:.2f} of the rate, {r['chunks']:.2f} of the chunks, "
                f"{r['cpu']:.2f} of the processor time",
                flush=True,
            )
    if a.json:
        print(json.dumps(results))
    sys.exit(any(r["share"] < SHARE for r in results))


if __name__ == "__main__":
    main()
