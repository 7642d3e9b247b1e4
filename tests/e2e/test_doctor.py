"""`unbroken doctor` on devices of rxe, each fault made for it, in a VM (tests/vm/devices.sh). Where
there is no device, crates/api/cli/tests/doctor.rs has it.
"""

import json
import os
import subprocess

import pytest

from lib.host_devices import IN_THE_GUEST, Fault, connect, sh
from lib.paths import BUILD
from lib.process import Failure, wait_until

pytestmark = [pytest.mark.timeout(200), *IN_THE_GUEST]

# A user that has no rights beyond its own.
USER = "setpriv --reuid 1000 --regid 1000 --clear-groups --inh-caps=-all".split()


class Report:
    """What the doctor says."""

    def __init__(self, logs, devices: str, *before, **env):
        words = [*before, BUILD / "unbroken", "doctor", "--devices", devices, "--json"]
        # Made by the first program: the doctor makes none.
        env = {"UNBROKEN_RUNTIME": f"/dev/shm/doctor-{logs.name}", **env}
        done = subprocess.run(
            [str(word) for word in words],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=120,
        )
        (logs / "doctor.log").write_text(done.stdout + done.stderr)
        if done.stderr:
            raise Failure(f"stderr: {done.stderr}")
        self.status, self.report = done.returncode, json.loads(done.stdout)

    def lines(self, check: str) -> list:
        """What a check found."""
        return [line for line in self.report["lines"] if line["check"] == check]

    def problems(self) -> list:
        """The checks and the subjects of all problems; each says what to do."""
        found = [line for line in self.report["lines"] if line["level"] == "problem"]
        assert all(line["do"] for line in found), found
        assert self.status == (1 if found else 0), self.report
        return [(line["check"], line.get("subject", "")) for line in found]

    def problem(self, check: str) -> dict:
        """The first problem of a check."""
        return next(line for line in self.lines(check) if line["level"] == "problem")


def test_two_devices_that_reach_each_other_are_well(logs):
    report = Report(logs, "rxeA0,rxeB0")
    assert report.problems() == []
    assert [line["subject"] for line in report.lines("path")[:2]] == ["rxeA0-rxeB0", "rxeB0-rxeA0"]
    assert all("arrived in" in line["text"] for line in report.lines("path")[:2])
    assert "--devices rxeA0,rxeB0 -- ib_write_bw -d rxeA0 -x 1" in report.report["command"]


def test_little_locked_memory_is_named(logs):
    limits = ["prlimit", "--memlock=65536:65536", *USER]
    report = Report(logs, "rxeA0,rxeB0", *limits)
    assert report.problems() == [("memlock", "")]
    problem = report.problem("memlock")
    assert "soft 64 KiB" in problem["text"] and "limits.conf" in problem["do"]


def test_a_directory_that_does_not_answer_is_named(logs):
    report = Report(logs, "rxeA0,rxeB0", UNBROKEN_DIRECTORY="redis://127.0.0.1:1")
    assert report.problems() == [("directory", "")]
    assert "redis-cli" in report.problem("directory")["do"]


def test_a_nic_that_is_down_is_named(logs):
    with Fault("down", "B1") as fault:
        fault.make()
        wait_until(lambda: "LOWER_UP" not in sh("ip link show A1"), 20, "A1 has no carrier")
        report = Report(logs, "rxeA0,rxeB1")
        assert report.problems() == [("port", "rxeB1")]
        assert "ip link set B1 up" in report.problem("port")["do"]
        # The byte is not sent where one device alone is left.
        assert "not tried" in report.lines("path")[0]["text"]


def test_an_address_of_another_kind_is_named(logs):
    """rxe has no GIDs of RoCE v1, so those are unit tests' alone."""
    sh("ip addr del 10.0.0.2/24 dev B0")
    try:
        report = Report(logs, "rxeA0,rxeB0")
        assert ("backups", "rxeA0-rxeB0") in report.problems()
        gid = next(line for line in report.lines("gid") if line["subject"] == "rxeB0")
        assert "link-local" in gid["text"] and "ip addr add" in gid["do"]
    finally:
        sh("ip addr add 10.0.0.2/24 dev B0")
        connect("B0")


@pytest.mark.parametrize("kind", ["loss", "rails"])
def test_a_backup_that_is_not_reached_is_named(logs, kind):
    """A cable that loses all; devices of different networks."""
    with Fault("loss", "A0") as fault:
        if kind == "loss":
            fault.make()
        pair = "rxeA0,rxeB0" if kind == "loss" else "rxeA0,rxeA1"
        report = Report(logs, pair)
        name = pair.replace(",", "-")
        assert ("path", name) in report.problems()
        problem = report.problem("path")
        assert "did not arrive" in problem["text"] and "arping" in problem["do"]


def test_a_device_that_this_user_may_not_open_is_named(logs):
    sh("chmod 600 /dev/infiniband/uverbs*")
    try:
        report = Report(logs, "rxeA0,rxeB0", *USER)
    finally:
        sh("chmod 666 /dev/infiniband/uverbs*")
    assert report.problems() == [("open", "rxeA0"), ("open", "rxeB0")]
    assert "Permission denied" in report.problem("open")["text"]
    assert report.report["command"] is None
