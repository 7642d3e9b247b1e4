"""Each `--json` has a schema in docs/reference/schemas, and what is printed is what it says."""

import json
import re
import subprocess

import pytest

from lib.collective import Job, communicators
from lib.fabric import UNBROKEN, Fabric
from lib.paths import ROOT
from lib.process import Failure, wait_until
from lib.schemas import SCHEMAS, check_schema, schema_of, validator
from lib.storms import storm

LINK = ["--bandwidth", "100G", "--rtt", "12ms"]
SMALL = ["--hosts", "4"]
LOSSY = [*LINK, "--loss", "0.1%", "--size", "1M", "--no-picture"]
# What needs no program that runs: the schema, the arguments, and exit statuses that are right.
CHEAP = [
    ("fabric-show", ["fabric", "show"], {0}),
    ("fault-list", ["fault", "list"], {0}),
    ("events", ["events"], {0}),
    ("status", ["status"], {0}),
    ("health", ["health"], {0, 1, 2}),
    ("doctor", ["doctor"], {0, 1}),
    ("coll-status", ["coll", "status"], {0}),
    ("coll-bench", ["coll", "bench", "--hosts", "a,b", "--max", "64", "--each"], {0}),
    ("model", ["model", *LOSSY], {0}),
    ("model-predict", ["model", "predict", "sr-nack", *LOSSY], {0}),
    ("model-predict", ["model", "predict", "mds:8,2", "--ring", "4", *LOSSY], {0}),
    ("model-heatmap", ["model", "heatmap", *LINK, "--no-picture"], {0}),
    ("sdr-bench", ["sdr", "bench", "--messages", "20", "--size", "64K", "--rate", "1G"], {0}),
    ("sdr-probe", ["sdr", "probe", "--trials", "1", "--trial", "20ms"], {0}),
    ("plan", ["plan", "--hosts", "4"], {0}),
    ("plan", ["plan", "--hosts", "4", "--planes", "2", "--fail", "host1/nic2=25%"], {0}),
    ("plan", ["plan", "--hosts", "4", "--model", "mixtral-8x7b", "--zero", "2"], {0}),
    ("simulate-run", ["simulate", "run", *SMALL, "--fail", "host0/nic1@1h", "--for", "1d"], {0}),
    ("simulate-sweep", ["simulate", "sweep", *SMALL, "--lost", "1", "--patterns", "2"], {0}),
    ("simulate-month", ["simulate", "month", *SMALL, "--runs", "1"], {0}),
    ("simulate-serve", ["simulate", "serve", "--rate", "0.5", "--for", "60s"], {0}),
]
# Checked where they run anyway, since they take long or need root.
ELSEWHERE = {
    "demo": "test_wheel.py",
    "edge-demo": "test_edge.py",
    "edge-status": "test_edge_bfd.py",
    "report": "test_report.py",
}


def commands(*words: str) -> list:
    """All commands with the option `--json`, as `--help` shows them."""
    done = subprocess.run([UNBROKEN, *words, "--help"], capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise Failure(done.stderr)
    found = ["-".join(words)] if re.search(r"^ +--json\b", done.stdout, re.M) else []
    # Under one heading, or in groups.
    listed = re.search(r"^Usage: .*?\n\n(.*?)^Options:", done.stdout, re.M | re.S)
    for name in re.findall(r"^  (\w[\w-]*) ", listed.group(1), re.M) if listed else []:
        if name != "help":
            found += commands(*words, name)
    return found


@pytest.mark.smoke
def test_each_command_with_json_has_a_schema_and_a_check():
    found = set(commands())
    assert {"status", "coll-bench", "simulate-serve"} <= found, found
    # `plan --messages` prints JSON by itself.
    named = {path.name.removesuffix(".schema.json") for path in SCHEMAS.iterdir()}
    assert named == found | {"plan-messages"}, named ^ found
    assert {name for name, *_ in CHEAP} | set(ELSEWHERE) == found
    for name, where in ELSEWHERE.items():
        text = (ROOT / "tests/e2e" / where).read_text()
        assert f'check_schema("{name}"' in text, f"{where} does not check {name}"
    page = (ROOT / "docs/reference/cli.md").read_text()
    missing = [name for name in named if f"schemas/{name}.schema.json" not in page]
    assert not missing, f"docs/reference/cli.md does not link {missing}"


def parts(schema) -> list:
    """All objects of a schema that stand for values."""
    if isinstance(schema, list):
        return [part for value in schema for part in parts(value)]
    if not isinstance(schema, dict):
        return []
    return [schema, *(part for value in schema.values() for part in parts(value))]


@pytest.mark.smoke
def test_schemas_are_schemas_and_say_what_things_are():
    for path in SCHEMAS.iterdir():
        schema = json.loads(path.read_text())
        validator().check_schema(schema)
        assert schema["title"].startswith("unbroken ") and schema["description"], path
        for part in parts(schema):
            fields = part.get("properties")
            if not isinstance(fields, dict) or "type" not in part:
                continue
            assert "additionalProperties" in part, (path, list(fields))
            for name, field in fields.items():
                says = field.get("description") or field.get("const")
                # Fields of a tuple say it where the tuple is described.
                assert says, f"{path.name}: {name} has no description"


def values(printed: str) -> list:
    """One value, or one a line."""
    try:
        return [json.loads(printed)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in printed.splitlines()]


@pytest.mark.smoke
def test_what_commands_print_is_what_schemas_say(logs, note):
    with Fabric(logs, "--hosts", "a,b", "--nics", "2", "--ports", "2") as fabric:
        fabric.fault("nic b/1 down", "--at", "5m", "--for", "1s", "--every", "10s")
        fabric.fault("loss b/1 1%")
        count = 0
        for name, line, right in CHEAP:
            done = fabric.command(*line, "--json")
            assert done.returncode in right, f"{line}: {done.stderr}"
            printed = values(done.stdout)
            assert printed, f"{line} prints nothing"
            for value in printed:
                check_schema(name, value)
            count += len(printed)
        done = fabric.command("plan", "--hosts", "2", "--size", "1M", "--messages", "all-reduce")
        check_schema("plan-messages", json.loads(done.stdout))
        note(f"{count + 1} values of {len(CHEAP) + 1} commands")


def test_queue_pairs_switches_and_communicators(logs):
    """What there is only while programs run and fail over."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        storm(fabric, 4, 60)
        wait_until(lambda: all(q["protected"] for q in fabric.status()["qps"]), 20, "protection")
        fabric.fault("nic a/0 dead")
        wait_until(lambda: len(fabric.events("switch")) >= 4, 20, "the queue pairs have moved")
        status = fabric.status()
        assert len(status["qps"]) >= 8 and len(status["processes"]) == 2
        check_schema("status", status)
        job = Job(fabric, ["a", "b"], "--max", "64K", "--for", "60s")
        wait_until(lambda: len(communicators(fabric)) == 2, 30, "the communicator is there")
        check_schema("coll-status", communicators(fabric))
        for line in job.end():
            check_schema("coll-bench", line)
        kinds = {event["event"] for event in fabric.events()}
        assert {"fault", "device-fatal", "switch"} <= kinds, kinds
        for event in fabric.events():
            check_schema("events", event)


@pytest.mark.smoke
def test_a_wrong_value_is_refused():
    """Schemas refuse what is not so: a field too many, one too few, one of another type."""
    event = {"event": "port-down", "nic": "a/0", "time_us": 1, "wall_us": 2, "pid": 3}
    check_schema("events", event)
    wrong = [{**event, "more": 1}, {**event, "pid": "3"}, {**event, "event": "port-up"}, {}]
    check = validator()(schema_of("events"))
    assert not any(check.is_valid(value) for value in wrong)
