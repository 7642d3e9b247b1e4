#!/usr/bin/env python3
"""AllReduce over gloo between two processes on the loopback: `gloo.py --bytes N --iterations K` says what one takes, in microseconds.

Needs a Python with torch; as `unbroken coll bench`, it sums 32-bit floats, checks a result, and tells the mean."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

WARM_UP = 3
LIMIT_S = 60


def rank(args) -> int:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    # As many threads as the other, which has one core for each process here.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{args.meet}", rank=args.rank, world_size=2, timeout=timedelta(seconds=LIMIT_S))
    tensor = torch.zeros(args.bytes // 4)
    for turn in range(WARM_UP + args.iterations):
        if turn == WARM_UP:
            dist.barrier()
            began = time.perf_counter()
        dist.all_reduce(tensor)
    took_s = time.perf_counter() - began
    tensor.fill_(args.rank + 1)
    dist.all_reduce(tensor)
    if not bool((tensor == 3).all()):
        print("a wrong sum", file=sys.stderr)
        return 1
    if args.rank == 0:
        print(f"{1e6 * took_s / args.iterations:.3f}")
    dist.destroy_process_group()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, required=True, help="bytes of the buffer, a multiple of 4")
    parser.add_argument("--iterations", type=int, required=True, help="how many")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bytes < 4 or args.bytes % 4:
        parser.error("--bytes: a multiple of 4 is right")
    if args.rank is not None:
        return rank(args)
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, __file__, *sys.argv[1:], "--meet", f"{folder}/meet", "--rank"]
        other = subprocess.Popen([*line, "1"])
        try:
            status = subprocess.run([*line, "0"], timeout=LIMIT_S).returncode
            return status or other.wait(LIMIT_S)
        finally:
            other.kill()
            other.wait()


if __name__ == "__main__":
    sys.exit(main())
