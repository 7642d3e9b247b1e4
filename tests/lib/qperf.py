"""qperf between two hosts."""

import re

from .fabric import Fabric
from .ports import free_port, listens
from .process import Failure, needs, wait_until

# Each with completion events and polling. qperf ends a test by a signal, which must end its wait
# for an event.
LATENCIES = [
    "rc_lat",
    "uc_lat",
    "ud_lat",
    "rc_rdma_read_lat",
    "rc_rdma_write_lat",
    "rc_rdma_write_poll_lat",
    "uc_rdma_write_lat",
    "uc_rdma_write_poll_lat",
]
RATES = ["rc_compare_swap_mr", "rc_fetch_add_mr", "ver_rc_compare_swap", "ver_rc_fetch_add"]
# What `-cp` says: whether it polls.
POLLING = {"events": 0, "polling": 1}
END_SECONDS = 40


def qperf(logs, test: str, poll: int, seconds: int = 1, least: int = 10) -> str:
    """Runs a test of qperf, and gives the figure that it prints.

    qperf addresses its peer by LID, so the link layer is InfiniBand. `least`: packets that must
    have come to each end."""
    needs("qperf", "qperf")
    with Fabric(logs, "--link-layer", "infiniband") as fabric:
        port = free_port()
        server = fabric.run("b", ["qperf", "-lp", port], "b-qperf")
        listening = lambda: server.ended() or listens(server.pid, port)
        wait_until(listening, 20, f"qperf listens at port {port}")
        args = ["qperf", "127.0.0.1", "-lp", port, "-i", "unb0:1", "-t", seconds, "-cp", poll, test]
        client = fabric.run("a", args, "a-qperf")
        client.expect_success(END_SECONDS)
        figure = re.search(r"(latency|msg_rate) += +(.+)", client.output())
        if not figure:
            raise Failure(f"no result: {client.output()!r}")
        nics = fabric.nics()
        if min(nics["a/0"]["rx_packets"], nics["b/0"]["rx_packets"]) < least:
            raise Failure(f"the NICs carried less than {least} packets each way")
        server.kill()
        return figure.group(2)
