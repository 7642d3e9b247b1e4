"""The dashboard for Grafana, by Grafana's own schema; its queries are in test_metrics.py."""

import json
import subprocess

import pytest

from lib.paths import ROOT
from lib.process import Failure
from lib.schemas_of_others import interpreter

# Of a panel, of the options of three kinds, of a query.
WRONG = [
    ("gridPos", "gridPose"),
    ("textMode", "textMood"),
    ("mergeValues", "mergeValue"),
    ("showHeader", "showHead"),
    ("legendFormat", "legendForm"),
]
DASHBOARD = ROOT / "packaging" / "monitoring" / "grafana-dashboard.json"
# Reads a dashboard by the types of Grafana's schema, with those of each kind of panel and of data
# source, and writes what they know of it: a field that they do not have, or one that is misspelt,
# is lost.
READ_DASHBOARD = """
import json, sys
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
register_default_plugins()
print(json.dumps(Dashboard.from_json(json.load(sys.stdin)), cls=JSONEncoder))
"""


def _known(dashboard: dict) -> dict:
    """What Grafana's schema knows of a dashboard."""
    line = [interpreter(), "-c", READ_DASHBOARD]
    told = {"capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(line, input=json.dumps(dashboard), **told)
    if done.returncode != 0:
        raise Failure(f"Grafana's schema does not read it: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def _lost(ours, known, at="") -> list:
    """Where what is known differs from what we have."""
    if isinstance(ours, dict) and isinstance(known, dict):
        lost = [f"{at}/{key}" for key in ours if key not in known]
        both = [key for key in ours if key in known]
        return lost + [w for key in both for w in _lost(ours[key], known[key], f"{at}/{key}")]
    if isinstance(ours, list) and isinstance(known, list) and len(ours) == len(known):
        return [w for n, (a, b) in enumerate(zip(ours, known)) for w in _lost(a, b, f"{at}/{n}")]
    return [] if ours == known else [at]


@pytest.mark.slow
def test_grafanas_schema_knows_all_of_the_dashboard(note):
    """Each field is one of Grafana's own types (grafana-foundation-sdk of PyPI)."""
    text = DASHBOARD.read_text()
    dashboard = json.loads(text)
    if lost := _lost(dashboard, _known(dashboard)):
        raise Failure(f"Grafana has no such fields: {lost}")
    for right, wrong in WRONG:
        bad = json.loads(text.replace(f'"{right}"', f'"{wrong}"'))
        if text.count(f'"{right}"') == 0 or not _lost(bad, _known(bad)):
            raise Failure(f"{wrong} instead of {right} is not noticed")
    note(f"{len(dashboard['panels'])} panels")
