"""`unbroken report`: a fault that a stream survived is told once, with what it cost, in a page that
a browser shows without anything from elsewhere; logs of many hosts are put together."""

import json
import re
import resource

import pytest

from lib.browser import Browser
from lib.fabric import Fabric
from lib.process import Failure, wait_until
from lib.schemas import check_schema
from lib.storms import storm

# A log of so many events, and the CPU time that it may take: several times what it does.
EVENTS, LONG_SECONDS = 100_000, 6


def survived(fabric):
    """A NIC dies under eight queue pairs and comes back."""
    storm(fabric, 8, 60)
    wait_until(lambda: all(q["protected"] for q in fabric.status()["qps"]), 20, "protection")
    fabric.fault("nic a/0 dead")
    moved = lambda: len([s for s in fabric.events("switch") if s["kind"] == "passive"]) >= 8
    wait_until(moved, 20, "the queue pairs have moved")
    fabric.clear()
    back = lambda: [s for s in fabric.events("switch") if s["kind"] == "planned"]
    wait_until(back, 40, "they come back")


def reported(fabric, *args) -> dict:
    """`unbroken report --json`."""
    done = fabric.command("report", "--json", *args)
    if done.returncode != 0:
        raise Failure(done.stderr)
    report = json.loads(done.stdout)
    check_schema("report", report)
    return report


@pytest.mark.smoke
def test_a_fault_is_told_once_with_its_cost(logs, note):
    """The fault of the emulated network, all switches that answered it, when it was over."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        if (empty := fabric.command("report", "-o", logs / "r.html")).returncode != 1:
            raise Failure(f"there is nothing to tell: {empty.stdout}")
        survived(fabric)
        switches = [s for s in fabric.events("switch") if s["kind"] == "passive"]
        report = reported(fabric)
        [incident] = report["incidents"]
        [job] = report["jobs"]
        counted = sum(incident["outages"]["buckets"])
        longest = max((s["detect_us"] or 0) + s["switch_us"] for s in switches)
        if incident["what"] != "nic a/0 dead" or incident["nics"] != ["a/0"]:
            raise Failure(f"{incident}")
        if not len(switches) <= counted or incident["outages"]["max_us"] < longest:
            raise Failure(f"{len(switches)} switches, {longest} us: {incident}")
        if incident["over_us"] <= incident["began_us"] or not incident["back"]:
            raise Failure(f"it was over, and queue pairs went back: {incident}")
        if job["failed"] or job["passive"] != counted or job["processes"] != 2:
            raise Failure(f"{job}")
        page = logs / "report.html"
        done = fabric.command("report", "--output", page)
        if done.returncode != 0 or "1 failure, 1 job, 0 queue pairs" not in done.stdout:
            raise Failure(done.stdout + done.stderr)
        text = page.read_text()
        if "1 failure was survived" not in text or text.count("<svg") != 2:
            raise Failure("the page has no verdict, or not its two pictures")
        check_schema("health", json.loads(fabric.command("health", "--json").stdout))
        note(f"{counted} switches told as one failure; longest outage {longest} us")


def test_logs_of_many_hosts(logs):
    """Two hosts' logs of one job, one of another, counters, and what is no log."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        survived(fabric)
        lines = fabric.command("events", "--json").stdout.splitlines()
        folder = logs / "many"
        folder.mkdir()
        of = lambda host: [l for l in lines if json.loads(l).get("host", "a") == host]
        for host in "ab":
            (folder / f"unbroken-41-{host}.jsonl").write_text("\n".join(of(host)) + "\n")
        (folder / "unbroken-42-c.jsonl").write_text("no event\n")
        (folder / "a.json").write_text(fabric.command("status", "--json").stdout)
        report = reported(fabric, folder)
        jobs = {job["job"]: job for job in report["jobs"]}
        if not {"job 41", "job 42"} <= set(jobs) or len(jobs["job 41"]["logs"]) != 2:
            raise Failure(f"{jobs}")
        [incident] = report["incidents"]
        if (
            incident["jobs"] != ["job 41"]
            or sum(incident["outages"]["buckets"]) != jobs["job 41"]["passive"]
        ):
            raise Failure(f"what both hosts tell is one failure: {report['incidents']}")
        if not any("1 lines that are no events" in n for n in report["notes"]):
            raise Failure(f"{report['notes']}")
        if {n["nic"] for n in report["nics"]} != {"a/0", "a/1", "b/0", "b/1"}:
            raise Failure(f"{report['nics']}")
        wrong = fabric.command("report", logs / "nowhere")
        if wrong.returncode != 1 or "nowhere" not in wrong.stderr:
            raise Failure(wrong.stderr)


def test_a_hundred_thousand_events(logs, note):
    """The time is about linear in the events, and failures beyond the first 10,000 are counted."""
    folder = logs / "long"
    folder.mkdir()
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        path, lines = folder / "unbroken-1-a.jsonl", []
        for n in range(EVENTS // 4):
            at = 1_000_000 + n * 60_000_000
            of = {"pid": 7, "time_us": at, "wall_us": 1_700_000_000_000_000 + at}
            switch = {
                **{"event": "switch", "kind": "passive", "host": "a", "qp": n % 64, "epoch": 1},
                **{"from": f"a/{n % 4}-b/{n % 4}", "to": "a/9-b/9", "reason": "device-fatal"},
                **{"detected_at_us": at + 1, "detect_us": None, "switch_us": 300, "replayed": 1},
            }
            nic = f"a/{n % 4}"
            lines += [{"event": "fault", "fault": f"nic {nic} dead", **of}]
            lines += [{**switch, **of}, {"event": "port-active", "nic": nic, **of}]
            lines += [{"event": "fault-clear", "fault": f"nic {nic} dead", **of}]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        report = reported(fabric, path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if len(report["incidents"]) != 10_000 or report["jobs"][0]["passive"] != EVENTS // 4:
            raise Failure(f"{len(report['incidents'])} incidents, {report['jobs']}")
        left_out = f"{EVENTS // 4 - 10_000} failures beyond the first 10000 were left out"
        if not any(left_out in n for n in report["notes"]):
            raise Failure(f"{report['notes']}")
        if seconds > LONG_SECONDS:
            raise Failure(f"{seconds:.1f} s of a core for {EVENTS} events")
        note(f"{seconds:.2f} s of a core for {EVENTS} events")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_in_a_browser(logs, theme):
    """It shows without a complaint of the browser, and no text is cut off or too faint."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        survived(fabric)
        page = logs / "report.html"
        if fabric.command("report", "-o", page).returncode != 0:
            raise Failure("no report")
        with Browser(logs, theme) as browser:
            browser.open(page.as_uri())
            if "survived" not in browser.text(".big"):
                raise Failure(browser.text("body"))
            browser.picture(logs / f"report-{theme}.png")
            if complaints := browser.complaints():
                raise Failure(f"{complaints}")


def test_events_have_the_wall_clock_and_can_be_cleared(logs):
    """Each line begins with a date; a log that is cleared is empty, and goes on."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        fabric.fault("nic a/0 dead")
        text = fabric.command("events").stdout
        if not re.match(
            r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}  fault           nic a/0 dead\n", text
        ):
            raise Failure(text)
        if fabric.command("events", "--clear").returncode != 0 or fabric.events():
            raise Failure("the log is not empty")
        fabric.clear()
        if [e["event"] for e in fabric.events()] != ["fault-clear"]:
            raise Failure("what comes after is not there")
        if fabric.command("events", "--clear", "--json").returncode != 2:
            raise Failure("both together mean nothing")
