"""UD queue pairs whose NICs fail (lib/datagrams.py), on both link layers and without failover."""

import pytest

from lib.cc import compile_c
from lib.datagrams import FAULTS, SECONDS, outlives, wait_for_datagrams
from lib.fabric import Fabric
from lib.ports import free_port


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([], id="RoCE", marks=pytest.mark.smoke),
        pytest.param(["--link-layer", "infiniband"], id="InfiniBand by LID"),
    ],
)
def test_nics_fail(logs, note, settings):
    note(outlives(logs, settings))


def test_without_failover(logs):
    """Without failover it is as on hardware: what is outstanding is flushed."""
    program = compile_c("datagram", "-libverbs")
    with Fabric(logs) as fabric:
        port = free_port()
        server = fabric.run("b", [program, "server", port, 1], "b-datagram", failover=False)
        args = [program, "client", f"127.0.0.1:{port}", 5]
        first = fabric.run("a", args, "a-datagram", failover=False)
        wait_for_datagrams(fabric)
        fabric.fault(FAULTS[0])
        first.expect_error(SECONDS)
        server.kill()
