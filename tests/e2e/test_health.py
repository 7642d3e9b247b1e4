"""The verdict: what `unbroken health` says is what `status`, `events` and the metrics show, it
follows a NIC that dies and comes back, and the examples for schedulers ask for it."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from lib.fabric import UNBROKEN, Fabric
from lib.machine import MachineFabric
from lib.metrics import MONITORING, scrape, value, verdict
from lib.process import Failure, wait_until
from lib.storms import many, storm


@pytest.mark.smoke
def test_a_nic_dies_and_comes_back(logs, note):
    """Verdict and metrics through a fault: healthy, degraded with capacity and since when, healthy
    again once all queue pairs are back; counts are those of the event log."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        listener, other = storm(fabric, 8, 60)
        protected = lambda: all(qp["protected"] for qp in fabric.status()["qps"])
        wait_until(protected, 20, "all QPs are protected")
        before = wait_until(lambda: verdict(fabric), 20, "a verdict")
        if before["verdict"] != "healthy" or before["capacity"] != 1:
            raise Failure(f"nothing has failed yet: {before}")
        first = scrape(fabric)
        set_at = time.time()
        fabric.fault("nic a/0 dead")
        moved = lambda: verdict(fabric)["hosts"][0]["qps"]["displaced"] > 0
        wait_until(moved, 20, "queue pairs have moved")
        sick = verdict(fabric)
        host = sick["hosts"][0]
        if sick["verdict"] != "degraded, survived" or (host["host"], host["capacity"]) != (
            "a",
            0.5,
        ):
            raise Failure(f"one of two NICs is dead: {sick}")
        [impaired] = host["impaired"]
        late = abs(impaired["since_unix_s"] - set_at)
        if (
            impaired["nic"] != "a/0"
            or impaired["state"] != "dead"
            or late > 2
            or host["qps"]["failed"]
        ):
            raise Failure(f"another NIC, another time: {impaired}, set at {set_at}")
        if verdict(fabric, "--host", "b")["capacity"] != 1:
            raise Failure("host b lost nothing")
        text = fabric.command("health").stdout
        if (
            not text.startswith("degraded, survived\nhost a: ")
            or "50 % of capacity left" not in text
        ):
            raise Failure(text)
        during = scrape(fabric)
        passive = [e for e in fabric.events("switch") if e["kind"] == "passive"]
        counted = value(during, "unbroken_switches_total", kind="passive")
        timed = value(during, "unbroken_outage_seconds_count")
        if not 0 < counted <= len(passive) or timed != counted:
            raise Failure(f"{counted} switches counted, {timed} timed, {len(passive)} in the log")
        if value(during, "unbroken_nic_state", nic="a/0", state="dead") != 1:
            raise Failure("the metrics say that a/0 lives")
        if value(during, "unbroken_health", host="a") != 1:
            raise Failure("the metrics know another verdict")
        fabric.clear()
        back = lambda: verdict(fabric)["verdict"] == "healthy"
        wait_until(back, 40, "all queue pairs are back, and the verdict is healthy")
        last = scrape(fabric)
        shrunk = [
            name
            for name in first
            if name[0].endswith(("_total", "_count")) and last[name] < first[name]
        ]
        if shrunk:
            raise Failure(f"counters went back: {shrunk}")
        nics = {n["nic"]: n for n in fabric.status()["nics"]}
        sent = value(
            last, "node_infiniband_port_data_transmitted_bytes_total", device="a/1", port="1"
        )
        if not 0 < sent <= nics["a/1"]["tx_bytes"]:
            raise Failure(
                f"a/1 sent {sent} by its metrics, {nics['a/1']['tx_bytes']} by its status"
            )
        note(
            f"{counted:.0f} passive switches; verdict 0, 1, 0; since exact to {late * 1000:.0f} ms"
        )


def test_devices_of_the_machine(logs, note):
    """Where no fault is known to anybody: a port of a device goes down under programs that go on.
    The verdict names the device and since when, by the log alone, and is healthy afterwards."""
    with MachineFabric(logs, "--nics", "2") as fabric:
        server, client = fabric.pair("ib_write_bw", ["-F", "-D", 40])
        protected = lambda: (qps := fabric.status()["qps"]) and all(q["protected"] for q in qps)
        wait_until(protected, 30, "they are protected")
        well = verdict(fabric)
        if well["verdict"] != "healthy" or [h["nics"] for h in well["hosts"]] != [2]:
            raise Failure(f"two devices, and nothing has failed: {well}")
        began = time.time()
        fabric.fault("nic a/0 down")
        # The state of a port is seen a moment before its event is in the log, which knows since
        # when.
        sick = lambda: (now := verdict(fabric))["since_unix_s"] and now
        now = wait_until(sick, 30, "the verdict follows")
        [impaired] = now["hosts"][0]["impaired"]
        late = abs(impaired["since_unix_s"] - began)
        if now["verdict"] != "degraded, survived" or now["capacity"] != 0.5 or late > 5:
            raise Failure(f"{now}, set at {began}")
        name = impaired["nic"]
        found = scrape(fabric)
        if value(found, "unbroken_nic_state", nic=name, state="down") != 1:
            raise Failure(f"the metrics do not say that {name} is down")
        if any(n.startswith("node_infiniband") for n, _ in found):
            raise Failure("node_exporter has these of devices of the machine")
        fabric.clear()
        wait_until(lambda: verdict(fabric)["verdict"] == "healthy", 40, "all is well again")
        if client.ended() or server.ended():
            raise Failure("the programs have ended")
        note(f"{name}: {impaired['state']}, {impaired['why']}, since exact to {late * 1000:.0f} ms")


def test_a_program_that_meets_its_failure_is_failed(logs):
    """Where all NICs of a host die the verdict is `failed`, and nothing is left of its capacity."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        fabric.fault("nic a/0 dead")
        if verdict(fabric)["verdict"] != "degraded, survived":
            raise Failure("one of two is degraded")
        fabric.fault("nic a/1 dead")
        health = verdict(fabric)
        if (health["verdict"], health["capacity"]) != ("failed", 0):
            raise Failure(f"no NIC is left: {health}")


@pytest.mark.parametrize("how", ["failover off", "UC"])
def test_a_program_that_dies_of_a_nic_is_failed(logs, how):
    """Queue pairs that nothing protects end with their NIC: their program has the error and ends,
    and the verdict is `failed` until the NIC is well, whether the program is there or not."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        args = ["-D", 60, *(["-c", "UC"] if how == "UC" else [])]
        _, client = fabric.pair("ib_write_bw", args, failover=how == "UC")
        busy = lambda: fabric.nics()["a/0"]["tx_bytes"] > 1 << 20
        wait_until(lambda: client.ended() or busy(), 20, "traffic")
        if verdict(fabric)["verdict"] != "healthy":
            raise Failure("nothing has failed yet")
        fabric.fault("nic a/0 dead")
        client.expect_error(40)
        sick = verdict(fabric)
        words = sick["hosts"][0]["why"]
        if sick["verdict"] != "failed" or not any("queue pairs failed" in w for w in words):
            raise Failure(f"{sick}")
        [gave_up] = [e for e in fabric.events("give-up") if e["host"] == "a"]
        if "a/0 has died; not protected: " not in gave_up["why"]:
            raise Failure(f"{gave_up}")
        fabric.clear()
        if (well := verdict(fabric, "--host", "a"))["verdict"] != "healthy":
            raise Failure(f"the NIC is well, and the program has ended: {well}")


def test_what_is_not_seen_is_unknown(logs):
    """A process that does not answer, a log that cannot be read, lines that are no events: what
    would be healthy is unknown, and says why. What is no NIC's page changes no verdict."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        process = many(fabric, 2)
        if (well := verdict(fabric))["verdict"] != "healthy" or well["left_out"]:
            raise Failure(f"{well}")
        pages = fabric.path / "shm" / "nics"
        (pages / "10.9.9.9.page").write_text("no page")
        (pages / "10.9.9.8.page").mkdir()
        (pages / "no\x1bthing").write_text("")
        stray = verdict(fabric)
        if stray["verdict"] != "healthy" or len(stray["left_out"]) != 3:
            raise Failure(f"three entries are no pages: {stray}")
        text = fabric.command("health").stdout
        if text.count("left out: ") != 3 or "\x1b" in text:
            raise Failure(text)
        if fabric.command("status").stderr.count("no NIC's page") != 1:
            raise Failure("`status` does not say what it has left out")
        process.popen.send_signal(signal.SIGSTOP)
        try:
            silent = verdict(fabric)
            if silent["exit_status"] != 3 or f"pid {process.pid} " not in silent["problems"][0]:
                raise Failure(f"a process is stopped: {silent}")
            found = scrape(fabric)
            if [value(found, "unbroken_health", host=h) for h in "ab"] != [3, 3]:
                raise Failure("the metrics know more than the verdict")
            fabric.fault("nic a/0 dead")
            if verdict(fabric)["verdict"] != "degraded, survived":
                raise Failure("a NIC that is dead is seen without anybody's answer")
            found = scrape(fabric)
            if [value(found, "unbroken_health", host=h) for h in "ab"] != [1, 3]:
                raise Failure("the metrics do not tell what is known from what is not")
            fabric.clear()
        finally:
            process.popen.send_signal(signal.SIGCONT)
        wait_until(lambda: verdict(fabric)["verdict"] == "healthy", 20, "it answers again")
        with (fabric.path / "events.jsonl").open("a") as log:
            log.write("no event\n")
        torn = verdict(fabric)
        if torn["exit_status"] != 3 or "1 lines are no events" not in torn["problems"][0]:
            raise Failure(f"{torn}")
        fabric.command("events", "--clear")
        os.mkfifo(fabric.path / "fifo")
        (fabric.path / "fifo").rename(fabric.path / "events.jsonl")
        unread = verdict(fabric)
        if unread["exit_status"] != 3 or "not a regular file" not in unread["problems"][0]:
            raise Failure(f"{unread}")
        (fabric.path / "events.jsonl").unlink()


def test_exit_statuses_without_a_verdict(logs):
    """What is no verdict has another exit status than any verdict, and says what would be right."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        for args, said in [
            (["health", "--host", "zz"], "there are: a, b"),
            (["health", "--nonsense"], "--nonsense"),
            (["--runtime", "/nowhere/at/all", "health"], "is not there"),
        ]:
            done = fabric.command(*args)
            if done.returncode != 3 or said not in done.stderr:
                raise Failure(f"{args}: status {done.returncode}: {done.stderr}")
            health = json.loads(fabric.command(*args, "--json").stdout)
            if (health["verdict"], health["exit_status"]) != ("unknown", 3):
                raise Failure(f"{args} --json: {health}")
            if not health["problems"] or health["hosts"]:
                raise Failure(f"{args} --json: {health}")
        if fabric.command("health", "--help").returncode != 0:
            raise Failure("--help is no mistake")


class Node:
    """The examples for schedulers, run as these run them, with a `scontrol` that writes down."""

    def __init__(self, fabric, logs):
        self.told, scontrol = logs / "scontrol.log", logs / "scontrol"
        scontrol.write_text(
            f'#!/bin/sh\necho "$@" >> {self.told}\necho "Reason=unbroken: degraded"\n'
        )
        scontrol.chmod(0o755)
        more = {"UNBROKEN": UNBROKEN, "SCONTROL": scontrol, "SLURMD_NODENAME": "n1"}
        self.env = {**fabric.env, **{k: str(v) for k, v in more.items()}}

    def run(self, *line, **more):
        """What came of a command line."""
        env = {**self.env, **more}
        line = [str(word) for word in line]
        return subprocess.run(line, env=env, capture_output=True, text=True, timeout=30)

    def nhc(self, mode="") -> bool:
        """Whether NHC would take the node away."""
        own = "die() { echo DIED; }; log() { echo LOG; }"
        check = f"{own}; . {MONITORING}/unbroken.nhc; check_unbroken {mode}"
        return "DIED" in self.run("bash", "-c", check).stdout

    def nhc_without_command(self) -> str:
        """What NHC's check says where there is no command: no reason to take a node away."""
        own = "die() { echo DIED; }; log() { echo LOG; }"
        check = f"{own}; . {MONITORING}/unbroken.nhc; check_unbroken && echo passed"
        return self.run("bash", "-c", check, UNBROKEN="/no/such").stdout

    def answers(self) -> tuple:
        """Node Problem Detector's two scripts, NHC's check in its two ways, GPUd's plugin."""
        scripts = [self.run(MONITORING / f"npd-{name}.sh") for name in ("degraded", "failed")]
        return (*(done.returncode for done in scripts), self.nhc(), self.nhc("degraded"))

    def drained(self, jobs, **more) -> list:
        """What Slurm was told by its health check."""
        self.told.unlink(missing_ok=True)
        done = self.run(MONITORING / "slurm-health-check.sh", jobs, **more)
        if done.returncode != 0:
            raise Failure(f"the health check ended with {done.returncode}: {done.stderr}")
        return self.told.read_text().splitlines() if self.told.exists() else []


def test_scripts_for_schedulers(logs):
    """The examples for Slurm, NHC and Node Problem Detector say what `health` says, and the one
    that root runs trusts no folder that another user could have made."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        node, jobs = Node(fabric, logs), Path(tempfile.mkdtemp(dir=fabric.root))
        assert node.nhc_without_command() == "LOG\npassed\n"
        job = jobs / f"unbroken-{os.getuid()}-job-7"
        # A link, and the folder of another user by its name, are passed over.
        (jobs / f"unbroken-{os.getuid()}-job-8").symlink_to("/")
        (jobs / f"unbroken-{os.getuid() + 1}-job-9").mkdir()
        node.env["UNBROKEN_RUNTIME"] = str(job)
        try:
            node.run(UNBROKEN, "fabric", "up", "--hosts", "a,b", "--nics", 2)
            for fault, expected, told in [
                (None, (0, 0, False, False), "State=RESUME"),
                ("nic a/0 dead", (1, 0, False, True), "State=DRAIN Reason=unbroken: degraded"),
                ("nic a/1 dead", (0, 1, True, True), "State=DRAIN Reason=unbroken: failed: host a"),
            ]:
                if fault:
                    node.run(UNBROKEN, "fault", "set", fault)
                if node.answers() != expected:
                    raise Failure(f"{fault}: {node.answers()} where {expected} was due")
                lines = node.drained(jobs)
                if told not in lines[-1] or "NodeName=n1" not in lines[-1]:
                    raise Failure(f"{fault}: Slurm was told {lines}")
            # Where only failures drain, one NIC is left.
            node.run(UNBROKEN, "fault", "clear", "nic a/1 dead")
            if any("State=" in line for line in node.drained(jobs, DRAIN_WHEN="failed")):
                raise Failure("what was survived has drained the node")
            # Its owner has taken the log away: no verdict, which gives no node back.
            node.told.unlink()
            node.run(UNBROKEN, "fault", "clear")
            os.mkfifo(job / "fifo")
            (job / "fifo").rename(job / "events.jsonl")
            if lines := node.drained(jobs):
                raise Failure(f"without a verdict Slurm was told {lines}")
            if node.answers() != (2, 2, False, False):
                raise Failure(f"without a verdict: {node.answers()}")
            # The job has ended, and its folder with it: then the doctor judges, whom slurmd's
            # health check finds without a PATH.
            shutil.rmtree(job)
            doctor = logs / "doctor"
            lines = ["#!/bin/sh", f"env >{logs}/doctor.env", f"exit $(cat {logs}/doctor.says)"]
            doctor.write_text("\n".join([*lines, ""]))
            doctor.chmod(0o755)
            for says, given_back in ((1, False), (0, True)):
                (logs / "doctor.says").write_text(f"{says}\n")
                lines = node.drained(jobs, UNBROKEN=str(doctor), PATH="")
                if any("State=RESUME" in line for line in lines) != given_back:
                    raise Failure(f"the doctor ends with {says}, and Slurm was told {lines}")
            if "PATH=/usr/local/sbin:/usr/local/bin:" not in (logs / "doctor.env").read_text():
                raise Failure("what the health check starts has no PATH")
        finally:
            shutil.rmtree(jobs)
        unknown = node.run(MONITORING / "npd-failed.sh", UNBROKEN_RUNTIME="/nowhere")
        if unknown.returncode != 2:
            raise Failure("what is not known is not known")
