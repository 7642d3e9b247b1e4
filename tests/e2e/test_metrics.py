"""Metrics and traces: Prometheus' own tools take what `unbroken metrics` says, its endpoint refuses
what it should, and switches reach a collector."""

import http.server
import json
import os
import re
import socket
import statistics
import subprocess
import threading
import time
import urllib.error
from pathlib import Path

import pytest

from lib.fabric import UNBROKEN, Fabric
from lib.http import Endpoint
from lib.metrics import MONITORING, promtool, samples, scrape, value
from lib.paths import ROOT
from lib.process import Failure, wait_until
from lib.storms import many, storm

METRIC = re.compile(r"\b((?:unbroken|node_infiniband)_\w+)")
SCRAPE_QPS, SCRAPES, SCRAPE_BAR_MS = 1000, 12, 50


def known_metrics() -> dict:
    """The metrics that there may be, with their types."""
    done = subprocess.run(
        [UNBROKEN, "metrics", "--list"], capture_output=True, text=True, timeout=20
    )
    return dict(line.split("\t")[:2] for line in done.stdout.splitlines())


def test_a_textfile_is_replaced_in_one_step(logs):
    """node_exporter never reads half a file; a link in its place is replaced, not followed."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        path, elsewhere = logs / "unbroken.prom", logs / "elsewhere"
        elsewhere.write_text("precious")
        path.symlink_to(elsewhere)
        # As a service of systemd with UMask=0077 has it: node_exporter is another user.
        before = os.umask(0o077)
        try:
            done = fabric.command("metrics", "--textfile", path)
        finally:
            os.umask(before)
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


@pytest.mark.smoke
def test_the_endpoint_makes_no_folder(logs):
    """It is started before anything runs: it makes nothing, says that there is nothing, and shows
    what comes later. A folder that is named and not there is a mistake."""
    with Fabric(logs) as fabric:
        named = fabric.command(
            "--runtime", fabric.files / "typo", "metrics", "--listen", "127.0.0.1:0"
        )
        if named.returncode != 1 or "is not there" not in named.stderr:
            raise Failure(f"a folder that is not there: {named.returncode}: {named.stderr}")
        fabric.env |= {"UNBROKEN_RUNTIME": "", "XDG_RUNTIME_DIR": str(fabric.files)}
        endpoint = Endpoint(fabric, "metrics")
        status, _, page = endpoint.get("/metrics")
        found = samples(page)
        if status != 200 or ("unbroken_observation_problems", ()) not in found:
            raise Failure(f"{status}: {page}")
        if left := list(fabric.files.iterdir()):
            raise Failure(f"to look has made {left}")
        fabric.command("fabric", "up", "--hosts", "a,b", "--nics", "2")
        capacity = lambda: value(
            samples(endpoint.get("/metrics")[2]), "unbroken_capacity_ratio", host="b"
        )
        wait_until(lambda: capacity() == 1, 20, "the endpoint shows what has come")


@pytest.mark.parametrize("command", ["events", "traces"])
def test_who_follows_makes_no_folder(logs, command):
    """`events --follow` and `traces` wait for a folder that is not there yet. It cannot be made at
    first: who tries has an error and ends."""
    with Fabric(logs) as fabric, Collector() as collector:
        home = fabric.files / "later"
        (fabric.files / "link").symlink_to(home)
        fabric.env |= {"UNBROKEN_RUNTIME": "", "XDG_RUNTIME_DIR": str(fabric.files / "link")}
        url = f"http://127.0.0.1:{collector.server_port}"
        options = {"events": ["--follow"], "traces": ["--otlp", url]}[command]
        process = fabric.start(command, [UNBROKEN, command, *options])
        wait_until(lambda: process.ended() or _pauses(process.pid) >= 20, 20, "it waits")
        if process.ended() or home.exists():
            raise Failure(f"it does not wait: {process.output()}")
        home.mkdir()
        fabric.command("fabric", "up", "--hosts", "a,b", "--nics", "2")
        storm(fabric, 1, 20)
        wait_until(lambda: all(q["protected"] for q in fabric.status()["qps"]), 20, "protection")
        fabric.fault("nic a/0 dead")
        seen = lambda: "switched" in process.output() or collector.spans()
        wait_until(lambda: process.ended() or seen(), 20, "a switch is seen")
        if process.ended():
            raise Failure(process.output())


def _pauses(pid: int) -> int:
    """How often a process has gone to sleep."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.M)[1])


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
    # Machines have NICs and hosts of the same names: what adds up must not add machines up.
    for expression in expressions:
        for labels in re.findall(r"\b(?:sum|min|max|avg|count)\b(?: by \(([^)]*)\))?", expression):
            if "instance" not in labels.split(", ") and labels != "le":
                raise Failure(f"this merges machines: {expression}")
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

        now = lambda: samples(endpoint.get("/metrics")[2])
        age = lambda: value(now(), "unbroken_observation_age_seconds")
        for _ in range(SCRAPES):
            # A page that is kept has the age that it had.
            wait_until(lambda: age() > 0, 10, "a page of what was said before")
            wait_until(asked, 30, "a scrape that asks the process")
        page = pages[-1]
        if value(samples(page), "unbroken_queue_pairs", host="a") != SCRAPE_QPS:
            raise Failure("it does not show all queue pairs")
        median, worst = statistics.median(took_ms), max(took_ms)
        note(f"{SCRAPE_QPS} QPs: median {median:.1f} ms, worst {worst:.1f} ms")
        if median > SCRAPE_BAR_MS:
            raise Failure(f"a scrape takes {median:.1f} ms, {SCRAPE_BAR_MS} are allowed")
