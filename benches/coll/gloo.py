#!/usr/bin/env python3
"""AllReduce over gloo between two processes: `gloo.py --bytes N --iterations K` says what one
takes, in microseconds.

They are on the loopback, or, with `--mbps R` (root), in two network namespaces whose link carries
so much each way, with the largest packets that a link of RoCE has.

Needs a Python with torch; as `unbroken coll bench`, it sums 32-bit floats, checks a result, and
tells the mean."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta

WARM_UP = 3
LIMIT_S = 120
# What carries 4 KiB of payload with RoCE's headers.
MTU = 4200


def rank(args) -> int:
    os.environ["GLOO_SOCKET_IFNAME"] = "nic" if args.mbps else "lo"
    import torch
    import torch.distributed as dist

    # As many threads as the other, which has one core for each process here.
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{args.meet}",
        rank=args.rank,
        world_size=2,
        timeout=timedelta(seconds=LIMIT_S),
    )
    tensor = torch.zeros(args.bytes // 4)
    for turn in range(WARM_UP + args.iterations):
        if turn == WARM_UP:
            dist.barrier()
            began, before = time.perf_counter(), os.times()
        dist.all_reduce(tensor)
    took_s, after = time.perf_counter() - began, os.times()
    tensor.fill_(args.rank + 1)
    dist.all_reduce(tensor)
    if not bool((tensor == 3).all()):
        print("a wrong sum", file=sys.stderr)
        return 1
    if args.rank == 0:
        shown_s = [after.user - before.user, after.system - before.system] if args.cpu else [took_s]
        print(" ".join(f"{1e6 * one_s / args.iterations:.3f}" for one_s in shown_s))
    dist.destroy_process_group()
    return 0


def run(*words):
    subprocess.run([*map(str, words)], check=True)


@contextmanager
def hosts(mbps: float):
    """The names of two network namespaces, and a link between their devices `nic` that carries
    `mbps` each way."""
    names = [f"gloo-{os.getpid()}-{host}" for host in "ab"]
    with ExitStack() as made:
        for name in names:
            run("ip", "netns", "add", name)
            made.callback(run, "ip", "netns", "del", name)
        run(
            "ip",
            "link",
            "add",
            "nic",
            "mtu",
            MTU,
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "nic",
            "mtu",
            MTU,
            "netns",
            names[1],
        )
        for number, name in enumerate(names, 1):
            # What comes in a millisecond, two packets at least, may leave at once; the queue never
            # overflows.
            burst = max(MTU * 2, int(mbps * 125))
            run("ip", "-n", name, "address", "add", f"10.0.0.{number}/24", "dev", "nic")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "nic", "up")
            run(
                "tc",
                "-n",
                name,
                "qdisc",
                "add",
                "dev",
                "nic",
                "root",
                "tbf",
                "rate",
                f"{mbps}mbit",
                "burst",
                burst,
                "limit",
                64 << 20,
            )
        yield names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--bytes", type=int, required=True, help="bytes of the buffer, a multiple of 4"
    )
    parser.add_argument("--iterations", type=int, required=True, help="how many")
    parser.add_argument("--mbps", type=float, help="what the link between the two carries, Mbit/s")
    parser.add_argument("--cpu", action="store_true", help="user and system time of a rank instead")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bytes < 4 or args.bytes % 4:
        parser.error("--bytes: a multiple of 4 is right")
    if args.rank is not None:
        return rank(args)
    if args.mbps is not None and not args.mbps > 0:
        parser.error("--mbps: more than 0 is right")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as network:
        line = [sys.executable, __file__, *sys.argv[1:], "--meet", f"{folder}/meet", "--rank"]
        names = network.enter_context(hosts(args.mbps)) if args.mbps else None
        lines = [
            [*(["ip", "netns", "exec", names[number]] if names else []), *line, str(number)]
            for number in range(2)
        ]
        other = subprocess.Popen(lines[1])
        try:
            status = subprocess.run(lines[0], timeout=LIMIT_S).returncode
            return status or other.wait(LIMIT_S)
        finally:
            other.kill()
            other.wait()


if __name__ == "__main__":
    sys.exit(main())
