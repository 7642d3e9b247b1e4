"""The schemas of what commands print with `--json`."""

import json

from .paths import ROOT
from .process import Skip

SCHEMAS = ROOT / "docs" / "reference" / "schemas"


def schema_of(name: str) -> dict:
    """The schema of a command, by its words: `coll-bench`."""
    return json.loads((SCHEMAS / f"{name}.schema.json").read_text())


def validator():
    """The validator of JSON Schema 2020-12."""
    try:
        from jsonschema import Draft202012Validator
    except ImportError:
        raise Skip("jsonschema is missing (Debian: python3-jsonschema)") from None
    return Draft202012Validator


def check_schema(name: str, value):
    """What `--json` printed is what the reference says."""
    validator()(schema_of(name)).validate(value)
