"""A directory of several Redis servers: the master that sentinels know, which dies, and a cluster
in which another node gets the entries. Programs that run go on and enter themselves where the
entries are then; programs that start afterwards find each other. What is asserted is switches with
verified data, and what lies on the servers."""

import pytest

from lib.fabric import Fabric
from lib.process import Failure, wait_until
from lib.redis_many import PATIENCE_SECONDS, Nodes, Sentinels
from lib.verifier import run_through_faults

FAULTS = 10


def through_faults(logs, note, servers, change):
    """Two programs run while `change` gives the server that has the entries from then on, and go
    through faults afterwards; so do two others that start then."""
    logs = {name: logs / name for name in ("running", "later")}
    for folder in logs.values():
        folder.mkdir()
    at = []

    def changed(check_alive):
        at.append(change())
        there = lambda: servers.users(at[0]) >= 2 and len(servers.entries(at[0])) >= 2
        wait_until(lambda: check_alive() or there(), PATIENCE_SECONDS, "both programs there")

    note(run_through_faults(logs["running"], FAULTS, 1, env=servers.env(), first=changed))
    if servers.entries(at[0]):
        raise Failure(f"programs that have ended are entered: {servers.entries(at[0])}")
    found = []

    def entered(_):
        found.extend(servers.entries(at[0]))

    note(run_through_faults(logs["later"], FAULTS, 2, env=servers.env(), first=entered))
    if len(found) != 2:
        raise Failure(f"two programs are right, entered are {found}")


def test_master_dies(logs, note):
    with Sentinels(logs) as servers:

        def change() -> int:
            servers.master_dies()
            return servers.replica

        through_faults(logs, note, servers, change)


def test_another_node_has_the_entries(logs, note):
    with Nodes(logs) as servers:
        through_faults(logs, note, servers, servers.move)


@pytest.mark.parametrize(
    "url, said",
    [
        ("redis+sentinel://127.0.0.1:1", "names no master; redis+sentinel://HOST,HOST/MASTER"),
        ("redis+cluster://127.0.0.1:1/2", "names the database 2; a cluster has 0 alone"),
        ("redis+ring://127.0.0.1", "begins with '+ring'"),
    ],
)
def test_wrong_urls(logs, url, said):
    with Fabric(logs) as fabric:
        wrong_url(fabric, url, said)


def wrong_url(fabric, url, said):
    process = fabric.run("a", ["true"], "true", env={"UNBROKEN_DIRECTORY": url})
    process.expect_error(20)
    if said not in process.output():
        raise Failure(process.output())
