"""Metrics and the verdict: what `unbroken metrics` and `unbroken health` say is what `status` and
`events` show, Prometheus' own tools take it, and it follows a NIC that dies and comes back."""

import http.server
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.error
from pathlib import Path

import pytest

from lib.fabric import UNBROKEN, Fabric
from lib.http import Endpoint
from lib.machine import MachineFabric
from lib.paths import ROOT
from lib.process import Failure, Skip, wait_until
from lib.storms import many, storm

MONITORING = ROOT / "packaging" / "monitoring"
PROMTOOL = shutil.which("promtool")
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
METRIC = re.compile(r"\b((?:unbroken|node_infiniband)_\w+)")
SCRAPE_QPS, SCRAPES, SCRAPE_BAR_MS = 1000, 12, 50


def promtool(*args, stdin=None):
    """Runs promtool, which must find nothing wrong."""
    if not PROMTOOL:
        raise Skip("promtool is missing (Debian: prometheus)")
    done = subprocess.run(
        [PROMTOOL, *map(str, args)], input=stdin, capture_output=True, text=True, timeout=60
    )
    if done.returncode != 0 or done.stderr.strip():
        raise Failure(f"promtool {args[0]} {args[1]}: {done.stdout}{done.stderr}")


def samples(page: str) -> dict:
    """Values by name and labels."""
    found = {}
    for line in page.splitlines():
        if line.startswith("#"):
            continue
        match = SAMPLE.match(line)
        if not match:
            raise Failure(f"no sample: {line!r}")
        name, labels, value = match.groups()
        found[name, tuple(sorted(LABEL.findall(labels or "")))] = float(value)
    return found


def value(found: dict, name: str, **labels) -> float:
    """The sum of the samples with these labels; 0 where there are none."""
    wanted = set(labels.items())
    return sum(v for (n, of), v in found.items() if n == name and wanted <= set(of))


def scrape(fabric) -> dict:
    """`unbroken metrics`, checked by promtool where that is."""
    page = fabric.command("metrics")
    if page.returncode != 0:
        raise Failure(page.stderr)
    if PROMTOOL:
        promtool("check", "metrics", stdin=page.stdout)
    return samples(page.stdout)


def verdict(fabric, *args) -> dict:
    """`unbroken health --json`, whose exit status must say the same."""
    done = fabric.command("health", "--json", *args)
    health = json.loads(done.stdout)
    names = ["healthy", "degraded, survived", "failed", "unknown"]
    if health["exit_status"] != done.returncode or health["verdict"] != names[done.returncode]:
        raise Failure(f"exit status {done.returncode}, and {health}")
    return health


def known_metrics() -> dict:
    """The metrics that there may be, with their types."""
    done = subprocess.run(
        [UNBROKEN, "metrics", "--list"], capture_output=True, text=True, timeout=20
    )
    return dict(line.split("\t")[:2] for line in done.stdout.splitlines())


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
            fabric.fault("nic a/0 dead")
            if verdict(fabric)["verdict"] != "degraded, survived":
                raise Failure("a NIC that is dead is seen without anybody's answer")
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


def test_a_textfile_is_replaced_in_one_step(logs):
    """node_exporter never reads half a file; a link in its place is replaced, not followed."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        path, elsewhere = logs / "unbroken.prom", logs / "elsewhere"
        elsewhere.write_text("precious")
        path.symlink_to(elsewhere)
        done = fabric.command("metrics", "--textfile", path)
        if done.returncode != 0 or elsewhere.read_text() != "precious" or path.is_symlink():
            raise Failure(f"the link was followed: {done.stderr}")
        page = path.read_text()
        if 'unbroken_nic_state{nic="a/0",state="active"} 1' not in page or not page.endswith("\n"):
            raise Failure(page)
        if path.stat().st_mode & 0o777 != 0o644 or len(list(logs.glob(".unbroken-*"))) != 0:
            raise Failure("node_exporter cannot read it, or something is left over")
        wrong = fabric.command("metrics", "--textfile", logs / "unbroken.txt")
        if wrong.returncode != 1 or ".prom" not in wrong.stderr:
            raise Failure(f"node_exporter does not read this: {wrong.stderr}")


@pytest.mark.smoke
def test_the_endpoint_serves_metrics_and_refuses_others(logs):
    """A page elsewhere that gets a browser to ask us (DNS rebinding) is refused, and so is what is
    no GET of /metrics; an address for others needs a token."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        endpoint = Endpoint(fabric, "metrics")
        status, headers, page = endpoint.get("/metrics")
        if status != 200 or not headers["content-type"].startswith("text/plain; version=0.0.4"):
            raise Failure(f"{status} {headers}")
        promtool("check", "metrics", stdin=page)
        if value(samples(page), "unbroken_capacity_ratio", host="b") != 1:
            raise Failure(page)
        for expected, path, more in [
            (403, "/metrics", {"Host": f"evil.example:{endpoint.port}"}),
            (403, "/metrics", {"Host": "127.0.0.1:1"}),
            (403, "/metrics", {"Origin": "http://evil.example"}),
            (404, "/etc/passwd", {}),
            (405, "/metrics", {"body": b"x"}),
        ]:
            status, _, text = endpoint.get(path, **more)
            if status != expected:
                raise Failure(f"{path} {more}: {status} where {expected} was due: {text}")
        open_to_all = fabric.command("metrics", "--listen", "0.0.0.0:0")
        if open_to_all.returncode != 1 or "--token-file" not in open_to_all.stderr:
            raise Failure(open_to_all.stderr)
        token = logs / "token"
        token.write_text("0123456789abcdef0123\n")
        open_to_others = fabric.command("metrics", "--listen", "127.0.0.1:0", "--token-file", token)
        if open_to_others.returncode != 1 or "chmod 600" not in open_to_others.stderr:
            raise Failure(open_to_others.stderr)
        token.chmod(0o600)
        guarded = Endpoint(fabric, "metrics", "--token-file", token, name="guarded")
        if guarded.get("/metrics")[0] != 401:
            raise Failure("it was served without a token")
        if guarded.get("/metrics", Authorization="Bearer 0123456789abcdef0123")[0] != 200:
            raise Failure("the token was refused")


def test_clients_that_do_not_end_are_ended(logs):
    """Clients that send half a request, or none, cost others a wait and no more."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        endpoint = Endpoint(fabric, "metrics")
        slow = []
        for n in range(150):
            s = socket.create_connection(("127.0.0.1", endpoint.port), timeout=5)
            s.sendall(b"GET /metrics HTT" if n % 2 else b"")
            slow.append(s)
        # Those that were let in have ten seconds each; what waits behind them gets its turn.
        wait_until(lambda: _is_served(endpoint), 90, "a good client is served")
        for s in slow:
            s.close()
        long = b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=20) as s:
            s.sendall(long)
            answer = s.recv(100)
        if b"431" not in answer and answer:
            raise Failure(f"a head without end: {answer}")
        if endpoint.process.ended():
            raise Failure("the endpoint has ended")


def _is_served(endpoint) -> bool:
    try:
        return endpoint.get("/metrics")[0] == 200
    except (TimeoutError, urllib.error.URLError, ConnectionError):
        return False


@pytest.mark.smoke
def test_rules_and_dashboard_name_what_exists():
    """promtool takes the alert rules and their tests; each metric that they and the dashboard name
    exists; the dashboard is one that Grafana can load."""
    kinds = known_metrics()
    promtool("check", "rules", MONITORING / "unbroken.rules.yml")
    promtool("test", "rules", MONITORING / "unbroken.rules.test.yml")
    rules = (MONITORING / "unbroken.rules.yml").read_text()
    expressions = re.findall(r"expr: (.*(?:\n {10}.*)*)", rules)
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    panels = dashboard["panels"]
    expressions += [t["expr"] for p in panels for t in p["targets"]]
    expressions += [a["expr"] for a in dashboard["annotations"]["list"] if "expr" in a]
    if len(expressions) < 30:
        raise Failure(f"only {len(expressions)} expressions were found")
    for expression in expressions:
        for name in METRIC.findall(expression):
            base = re.sub(r"_(bucket|count|sum)$", "", name)
            if name not in kinds and kinds.get(base) != "histogram":
                raise Failure(f"there is no metric {name}: {expression}")
    _check_dashboard(dashboard)


def test_the_page_of_metrics_lists_them_all():
    """docs/reference/metrics.md has each metric with its type and meaning, and no other."""
    done = subprocess.run(
        [UNBROKEN, "metrics", "--list"], capture_output=True, text=True, timeout=20
    )
    rows = {
        f"| `{n}` | {k} | {h} |" for n, k, h in (l.split("\t") for l in done.stdout.splitlines())
    }
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text().splitlines()
    listed = {line for line in page if line.startswith("| `")}
    if listed != rows or len(rows) < 40:
        raise Failure(f"differences: {sorted(listed ^ rows)}")


def _check_dashboard(dashboard: dict):
    """What Grafana's schema asks of a dashboard, as far as ours uses it."""
    if dashboard["schemaVersion"] < 36 or not dashboard["title"] or not dashboard["uid"]:
        raise Failure("it has no title, no uid, or an old schema")
    panels = dashboard["panels"]
    kinds = {"stat", "timeseries", "state-timeline", "heatmap", "table"}
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        if panel["type"] not in kinds or place["x"] + place["w"] > 24 or taken & cells:
            raise Failure(f"panel {panel['title']}: its type or place is wrong")
        taken |= cells
        refs = [target["refId"] for target in panel["targets"]]
        if not panel["title"] or not refs or len(set(refs)) != len(refs):
            raise Failure(f"panel {panel['id']}: no title, or targets of one name")
    if len({p["id"] for p in panels}) != len(panels):
        raise Failure("two panels have one id")
    variables = {v["name"] for v in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(panels))) - {"__rate_interval"}
    if not used <= variables:
        raise Failure(f"variables that are not defined: {used - variables}")


def test_promtool_checks_the_queries_of_the_dashboard(logs):
    """Prometheus parses each expression of the dashboard."""
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    expressions = [t["expr"] for p in dashboard["panels"] for t in p["targets"]]
    rules = [
        {"record": f"test:{n}", "expr": e.replace("$__rate_interval", "1m").replace("$host", ".*")}
        for n, e in enumerate(expressions)
    ]
    path = logs / "queries.yml"
    # JSON is YAML.
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", path)


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

    def drained(self, jobs) -> list:
        """What Slurm was told by its health check."""
        self.told.unlink(missing_ok=True)
        done = self.run(MONITORING / "slurm-health-check.sh", jobs)
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
            # Its owner has taken the log away: no verdict, which gives no node back.
            node.told.unlink()
            node.run(UNBROKEN, "fault", "clear")
            os.mkfifo(job / "fifo")
            (job / "fifo").rename(job / "events.jsonl")
            if lines := node.drained(jobs):
                raise Failure(f"without a verdict Slurm was told {lines}")
            if node.answers() != (2, 2, False, False):
                raise Failure(f"without a verdict: {node.answers()}")
        finally:
            shutil.rmtree(jobs)
        unknown = node.run(MONITORING / "npd-failed.sh", UNBROKEN_RUNTIME="/nowhere")
        if unknown.returncode != 2:
            raise Failure("what is not known is not known")


class Collector(http.server.ThreadingHTTPServer):
    """A context: what takes traces over HTTP, and refuses the first `refuses` posts."""

    def __init__(self, refuses=0):
        self.posts, self.refuses = [], refuses
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def spans(self) -> list:
        """All spans that were taken."""
        scopes = [s for p in self.posts for r in p["resourceSpans"] for s in r["scopeSpans"]]
        return [span for scope in scopes for span in scope["spans"]]


class Handler(http.server.BaseHTTPRequestHandler):
    """What a collector answers."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        is_refused = self.server.refuses > 0
        self.server.refuses -= is_refused
        if not is_refused and self.path == "/v1/traces":
            self.server.posts.append(json.loads(body))
        self.send_response(503 if is_refused else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def test_switches_are_traces(logs, note):
    """Each switch of the log is a span with its parts, once, also where the collector refuses at
    first; `--once` fails where none answers."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric, Collector(refuses=1) as collector:
        url = f"http://127.0.0.1:{collector.server_port}"
        fabric.start("traces", [UNBROKEN, "traces", "--otlp", url])
        storm(fabric, 4, 60)
        wait_until(lambda: all(q["protected"] for q in fabric.status()["qps"]), 20, "protection")
        fabric.fault("nic a/0 dead")
        passive = lambda: [s for s in fabric.events("switch") if s["kind"] == "passive"]
        wait_until(lambda: len(passive()) >= 4, 20, "the queue pairs have moved")
        named = lambda name: [s for s in collector.spans() if s["name"] == name]
        wait_until(lambda: len(named("switch")) >= len(passive()), 30, "a span for each switch")
        by_qp = {s["qp"]: s for s in passive()}
        for span in named("switch"):
            of = {a["key"]: a["value"]["stringValue"] for a in span["attributes"]}
            switch = by_qp.get(int(of["qp"], 16))
            took_us = (int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / 1000
            if switch and (
                took_us != (switch["detect_us"] or 0) + switch["switch_us"]
                or of["from"] != switch["from"]
            ):
                raise Failure(f"{span} is not {switch}")
        ids = [s["spanId"] for s in collector.spans()]
        if len(ids) != len(set(ids)) or collector.refuses:
            raise Failure("a span came twice, or nothing was refused")
        parents = {s["spanId"] for s in named("switch")}
        if not all(s["parentSpanId"] in parents for s in named("move") + named("detect")):
            raise Failure("a part belongs to no switch")
        note(f"{len(ids)} spans of {len(parents)} switches")
        nobody = fabric.command("traces", "--once", "--otlp", "http://127.0.0.1:1")
        if nobody.returncode != 1 or "127.0.0.1:1" not in nobody.stderr:
            raise Failure(nobody.stderr)


def test_sdr_and_collectives_are_counted(logs):
    """What SDR and collectives count in their processes is in the metrics while these run."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        sdr = [UNBROKEN, "sdr", "bench", "--size", "4M", "--messages", 100_000]
        fabric.start("sdr", sdr)
        sent = lambda: value(scrape(fabric), "unbroken_sdr_sent_packets_total", host="a")
        first = wait_until(sent, 30, "packets of SDR")
        wait_until(lambda: sent() > first, 30, "more of them")
        if value(scrape(fabric), "unbroken_sdr_received_packets_total", host="b") == 0:
            raise Failure("none has come")
        coll = [UNBROKEN, "coll", "bench", "--hosts", "a,b", "--for", "20s"]
        fabric.start("coll", coll)
        done = lambda: value(scrape(fabric), "unbroken_collective_operations_total", rank="1")
        wait_until(done, 60, "operations of rank 1")
        if value(scrape(fabric), "unbroken_collective_sent_bytes_total", rank="0", rail="0") == 0:
            raise Failure("rank 0 has sent nothing over rail 0")


@pytest.mark.timing
def test_a_scrape_of_1000_qps(logs, note):
    """A scrape takes no more than 50 ms where a process has 1,000 queue pairs and is asked for all
    of them each time."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        many(fabric, SCRAPE_QPS)
        endpoint = Endpoint(fabric, "metrics")
        took_ms, pages = [], []

        def asked() -> bool:
            """A scrape that asks the process anew. Within a second it has what was said before."""
            began = time.monotonic()
            page = endpoint.get("/metrics")[2]
            took = (time.monotonic() - began) * 1000
            if value(samples(page), "unbroken_observation_age_seconds") != 0:
                return False
            pages.append(page)
            took_ms.append(took)
            return True

        for _ in range(SCRAPES):
            wait_until(asked, 10, "a scrape that asks the process")
        page = pages[-1]
        if value(samples(page), "unbroken_queue_pairs", host="a") != SCRAPE_QPS:
            raise Failure("it does not show all queue pairs")
        median, worst = statistics.median(took_ms), max(took_ms)
        note(f"{SCRAPE_QPS} QPs: median {median:.1f} ms, worst {worst:.1f} ms")
        if median > SCRAPE_BAR_MS:
            raise Failure(f"a scrape takes {median:.1f} ms, {SCRAPE_BAR_MS} are allowed")
