"""perftest on every transport, with its options: what is run, and the payload that must have gone
through the NICs."""

import re

from .fabric import Fabric
from .process import Failure

SECONDS = 40
# Tool, arguments, and the payload bytes that must have left host a and come to host b; for READ the
# other way, for -b and ping-pongs both ways. Datagrams are counted, too: in the emulated network
# none is lost for want of room.
PERFTESTS = [
    # UC
    ("ib_send_bw", ["-c", "UC", "-n", "5000"], 5000 * 65536),
    ("ib_send_bw", ["-c", "UC", "-n", "1000", "-m", "256", "-s", "10000"], 1000 * 10000),
    ("ib_send_bw", ["-c", "UC", "-n", "2000", "-b"], 2000 * 65536),
    ("ib_send_bw", ["-c", "UC", "-n", "2000", "-q", "8"], 8 * 2000 * 65536),
    ("ib_send_bw", ["-c", "UC", "-n", "2000", "-q", "4", "-t", "16", "-b"], 4 * 2000 * 65536),
    ("ib_send_bw", ["-c", "UC", "-n", "2000", "-e"], 2000 * 65536),
    ("ib_send_bw", ["-c", "UC", "-n", "50", "-a"], 50 * (2**24 - 2)),
    ("ib_send_bw", ["-c", "UC", "-n", "20000", "-s", "32", "-I", "64", "-l", "16"], 20000 * 32),
    ("ib_send_bw", ["-c", "UC", "-D", "1"], 1 << 20),
    ("ib_send_lat", ["-c", "UC", "-n", "1000"], 1000 * 2),
    ("ib_send_lat", ["-c", "UC", "-n", "1000", "-s", "20000", "-e"], 1000 * 20000),
    ("ib_write_bw", ["-c", "UC", "-n", "5000"], 5000 * 65536),
    ("ib_write_bw", ["-c", "UC", "-n", "1000", "-q", "4", "-b"], 4 * 1000 * 65536),
    ("ib_write_bw", ["-c", "UC", "-n", "20000", "-s", "16", "-I", "16", "-l", "8"], 20000 * 16),
    ("ib_write_lat", ["-c", "UC", "-n", "1000"], 1000 * 2),
    ("ib_write_lat", ["-c", "UC", "-n", "500", "-s", "100000"], 500 * 100000),
    # UD
    ("ib_send_bw", ["-c", "UD", "-n", "20000"], 20000 * 4096),
    ("ib_send_bw", ["-c", "UD", "-n", "20000", "-b"], 20000 * 4096),
    ("ib_send_bw", ["-c", "UD", "-n", "5000", "-q", "8"], 8 * 5000 * 4096),
    ("ib_send_bw", ["-c", "UD", "-n", "5000", "-e"], 5000 * 4096),
    ("ib_send_bw", ["-c", "UD", "-n", "500", "-a"], 500 * (2**13 - 2)),
    ("ib_send_bw", ["-c", "UD", "-n", "20000", "-s", "32", "-I", "64", "-l", "16"], 20000 * 32),
    ("ib_send_lat", ["-c", "UD", "-n", "1000"], 1000 * 2),
    ("ib_send_lat", ["-c", "UD", "-n", "1000", "-s", "1024", "-e"], 1000 * 1024),
    # RC
    ("ib_read_bw", ["-n", "2000"], 2000 * 65536),
    ("ib_read_bw", ["-n", "1000", "-q", "4", "-b", "-o", "4"], 4 * 1000 * 65536),
    ("ib_read_lat", ["-n", "1000"], 1000 * 2),
    ("ib_atomic_bw", ["-A", "FETCH_AND_ADD", "-n", "5000"], 0),
    ("ib_atomic_bw", ["-A", "CMP_AND_SWAP", "-n", "5000", "-q", "4"], 0),
    ("ib_atomic_lat", ["-A", "FETCH_AND_ADD", "-n", "1000"], 0),
    ("ib_atomic_lat", ["-A", "CMP_AND_SWAP", "-n", "1000"], 0),
    # SRQ
    ("ib_send_bw", ["--use-srq", "-q", "4"], 4 * 1000 * 65536),
    ("ib_send_bw", ["--use-srq", "-q", "4", "-b"], 4 * 1000 * 65536),
    ("ib_send_bw", ["--use-srq", "-e"], 1000 * 65536),
    ("ib_send_bw", ["--use-srq", "-q", "4", "-c", "UD"], 4 * 1000 * 4096),
    ("ib_send_lat", ["--use-srq"], 1000 * 2),
]
# With link layer InfiniBand, addressed by LID.
BY_LID = [
    ("ib_write_bw", ["-s", "65536", "-n", "1000"], 1000 * 65536),
    ("ib_read_lat", ["-n", "500"], 500 * 2),
    ("ib_send_lat", ["-c", "UC", "-n", "500"], 500 * 2),
    ("ib_send_bw", ["-c", "UD", "-s", "1024", "-n", "500"], 500 * 1024),
    ("ib_send_bw", ["-c", "UD", "-s", "1024", "-n", "500", "-x", "0"], 500 * 1024),
]


def check_figures(tool: str, output: str):
    """The client's last line of figures: bytes, iterations, and then of bandwidths the average, of
    latencies the typical one.

    On a machine whose cores are all taken perftest may fail to find out how fast its clock is, says
    so, and prints zeros; and its deviation of latencies is no number where one of them is ten
    thousand times the others. What has been carried is counted at the NICs."""
    rows = [
        line.split()
        for line in output.splitlines()
        if re.fullmatch(r"\s*\d+\s+\d+(\s+([\d.]+|-?nan))+\s*", line)
    ]
    place = 3 if tool.endswith("_bw") else 4
    clock = "Correlation coefficient" not in output
    if not rows or len(rows[-1]) <= place or clock and not float(rows[-1][place]) > 0:
        raise Failure(f"the client printed no figures: {output[-500:]}")


def run(logs, tool: str, args: list, payload: int, settings=(), failover=True):
    """Runs a perftest on rail 0; `payload` bytes at least must have left one end and come to the
    other."""
    with Fabric(logs, *settings) as fabric:
        server, client = fabric.pair(tool, ["-F", *args], failover)
        client.expect_success(SECONDS)
        server.expect_success(SECONDS)
        check_figures(tool, client.output())
        nics = fabric.nics()
        flows = [("b", "a")] if "_read_" in tool else [("a", "b")]
        if "-b" in args or "_lat" in tool and "_read_" not in tool:
            flows += [flow[::-1] for flow in flows]
        for sender, receiver in flows:
            left, came = (
                nics[f"{sender}/0"]["tx_payload_bytes"],
                nics[f"{receiver}/0"]["rx_payload_bytes"],
            )
            packets = nics[f"{receiver}/0"]["rx_packets"]
            if min(left, came) < payload or packets == 0:
                raise Failure(
                    f"{left} bytes left {sender}, {came} came to {receiver} in {packets} packets; "
                    f"{payload} are right"
                )
