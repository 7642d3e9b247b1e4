"""Lists of sends in one `ibv_post_send`, which go to the NIC together: what is right is posted up
to the first that is not, on each kind of device."""

import pytest

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.machine import MachineFabric

SECONDS = 60


def post_lists(kind, logs, note, **env):
    program = compile_c("lists", "-libverbs")
    with kind(logs) as fabric:
        fabric.env |= env
        process = fabric.run("a", [program], "lists")
        process.expect_success(SECONDS)
        note("; ".join(process.output().splitlines()))
        if fabric.events("switch"):
            raise AssertionError("a mistake of the program made a QP switch")


@pytest.mark.smoke
def test_lists_of_sends(logs, note, device):
    post_lists(Fabric, logs, note)


def test_lists_of_sends_on_devices_of_the_machine(logs, note):
    vectors = logs / "vectors"
    post_lists(MachineFabric, logs, note, TEST_PROVIDER_VECTORS=str(vectors))
    # The program's CQ names the last of eight completion vectors, those of failover the first.
    assert set(vectors.read_text().split()) == {"0", "7"}
