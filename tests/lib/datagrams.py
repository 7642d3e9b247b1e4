"""UD queue pairs whose NICs fail: a ping-pong between two hosts (tests/c/datagram.c) goes on
over other NICs, nothing is flushed, and both ends see the addresses that they know."""

from .cc import compile_c
from .fabric import Fabric
from .ports import free_port
from .process import Failure, wait_until

SECONDS = 60
# In this order, while datagrams go back and forth; each host's QP has left its NIC by the next.
FAULTS = ["nic a/0 dead", "nic b/0 dead", "nic a/1 down"]


def client(fabric: Fabric, program, host: str, port: int, seconds: int):
    """Starts a client at a host."""
    return fabric.run(host, [program, "client", f"127.0.0.1:{port}", seconds], f"{host}-datagram")


def moves(fabric: Fabric, host: str) -> list:
    """The switches of a host's QPs: from and to."""
    return [(e["from"], e["to"]) for e in fabric.events("switch") if e["host"] == host]


def wait_for_datagrams(fabric: Fabric):
    """Waits until datagrams go back and forth."""
    flowing = lambda: fabric.nics().get("b/0", {}).get("tx_packets", 0) > 500
    wait_until(flowing, 20, "datagrams go back and forth")


def outlives(logs, settings, env=None):
    """The sender's NIC dies, then the receiver's, then the port that the sender is at. A client
    that comes later finds the server, too. Gives what the first client prints.

    `settings` are those of the fabric, `env` is more of the programs' environment.
    """
    program = compile_c("datagram", "-libverbs")
    with Fabric(logs, *settings) as fabric:
        fabric.env.update(env or {})
        port = free_port()
        server = fabric.run("b", [program, "server", port, 2], "b-datagram")
        first = client(fabric, program, "a", port, 4)
        wait_for_datagrams(fabric)
        status = fabric.status()["qps"]
        if len(status) != 2 or not all(qp["protected"] for qp in status):
            raise Failure(f"not protected: {status}")
        for n, fault in enumerate(FAULTS):
            fabric.fault(fault)
            wait_until(
                lambda: len(fabric.events("switch")) == n + 1, 10, f"a QP moves after {fault}"
            )
            where = moves(fabric, fault[4])[-1][1]
            before = fabric.nics()[where]["rx_payload_bytes"]
            came = lambda: fabric.nics()[where]["rx_payload_bytes"] > before + 100_000
            wait_until(came, 10, f"datagrams over {where}")
        first.expect_success(SECONDS)
        late = client(fabric, program, "c", port, 1)
        late.expect_success(SECONDS)
        server.expect_success(SECONDS)
        found = (moves(fabric, "a"), moves(fabric, "b"))
        if found != ([("a/0", "a/1"), ("a/1", "a/2")], [("b/0", "b/1")]):
            raise Failure(f"the QPs went elsewhere: {found}")
        if fabric.events("give-up"):
            raise Failure("a QP was given up")
        return first.output().strip()
