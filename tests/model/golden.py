#!/usr/bin/env python3
"""The golden figures of the two models: what `unbroken_model` (Python) gives for some links,
messages and schemes.

usage: golden.py          writes golden.json beside this file

`tests/e2e/test_model.py` checks that Python still gives these figures, and
`crates/sdr/model/tests/golden.rs` that Rust gives the same.
"""

import itertools
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILE = HERE / "golden.json"
sys.path.insert(0, str(HERE.parents[1] / "python" / "model"))

from unbroken_model import Link, Scheme  # noqa: E402

LINKS = [
    {"bandwidth_bps": 400e9, "rtt_s": 25e-3},
    {"bandwidth_bps": 4e9, "rtt_s": 156e-3, "chunk_bytes": 4096},
]
LOSSES = [("packet_loss", p) for p in (0.0, 1e-7, 1e-5, 1e-3, 3e-3, 2e-2)]
LOSSES += [("chunk_loss", p) for p in (1e-6, 1e-4, 1e-2, 0.2)]
# Whole submessages, shorter last ones, less than a chunk, longer than the timeout.
SIZES = [1000, 128 << 10, (5 << 20) + 1, 128 << 20, (3 << 30) + (77 << 16)]
SCHEMES = [("sr_rto",), ("sr_nack",), ("mds", 32, 8), ("xor", 32, 8), ("mds", 10, 3)]
SHARES = [0.5, 0.99, 0.999]


def scheme_of(name: list) -> Scheme:
    """The scheme that a row names."""
    return getattr(Scheme, name[0])() if len(name) == 1 else Scheme.ec(*name)


def row(link: dict, loss: tuple, size: int, name: tuple) -> dict:
    """One message over one link with one scheme."""
    settings = {**link, loss[0]: loss[1]}
    model = Link(**settings)
    channel, chunks, scheme = model.channel(), model.chunks(size), scheme_of(name)
    write = scheme.message(channel, chunks)
    figures = {
        "chunk_loss": channel.loss,
        "chunks": chunks,
        "mean_s": write.mean_s(),
        "undisturbed": write.undisturbed(),
        "quantiles_s": [write.quantile_s(share) for share in SHARES],
    }
    if scheme.code:
        coding = scheme.coding(channel)
        figures |= {
            "parity": coding.parity(chunks),
            "fallback": coding.fallback(chunks),
            "paper_mean_s": coding.paper_mean_s(chunks),
        }
    return {"link": settings, "bytes": size, "scheme": list(name), **figures}


def rows(step: int = 1) -> list:
    """All rows, or one of `step`."""
    inputs = list(itertools.product(LINKS, LOSSES, SIZES, SCHEMES))
    return [row(*values) for values in inputs[::step]]


def main():
    """Writes the file."""
    lines = [json.dumps(row) for row in rows()]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"{len(lines)} rows in {FILE}")


if __name__ == "__main__":
    main()
