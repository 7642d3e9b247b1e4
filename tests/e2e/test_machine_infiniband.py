"""InfiniBand's devices of the machine: queue pairs that programs connect by LID, with a global
header and without. The provider of the tests (tests/c/provider_infiniband.c) sends by LID alone."""

import pytest

from lib.machine import MachineFabric
from lib.streams import UNTIL_STOPPED
from test_machine_devices import FAULTS, STREAMS, WAIT_SECONDS, flows_elsewhere, pair

# perftest's option for a global header, and what the subnet is like.
ADDRESSING = {
    "by-lid": ([], {}),
    "global": (["-x", 0], {}),
    "four-lids": ([], {"TEST_PROVIDER_LMC": "2"}),
    "four-lids-global": (["-x", 0], {"TEST_PROVIDER_LMC": "2"}),
    "two-subnets": ([], {"TEST_PROVIDER_SUBNETS": "1"}),
    "two-subnets-global": (["-x", 0], {"TEST_PROVIDER_SUBNETS": "1", "TEST_PROVIDER_LMC": "2"}),
}
INFINIBAND = ("--nics", "2", "--link-layer", "infiniband")
SMOKE = [("by-lid", "write", "nic a/0 dead"), ("two-subnets-global", "send", "nic b/0 down")]


@pytest.mark.parametrize(
    "addressing, stream, fault",
    [
        pytest.param(*case, marks=pytest.mark.smoke if case in SMOKE else ())
        for case in [(a, s, f) for a in ADDRESSING for s in STREAMS for f in FAULTS]
    ],
)
def test_survives(logs, monkeypatch, addressing, stream, fault):
    """The stream goes on over the other devices."""
    tool, arguments = STREAMS[stream]
    more, subnet = ADDRESSING[addressing]
    for name, value in subnet.items():
        monkeypatch.setenv(name, value)
    with MachineFabric(logs, *INFINIBAND) as fabric:
        server, client = pair(fabric, tool, ["-D", UNTIL_STOPPED, *arguments, *more])
        fabric.fault(fault)
        flows_elsewhere(fabric, [client, server], "a/0")
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        switches = fabric.events("switch")
        assert any(event["kind"] == "passive" for event in switches), fabric.events()
