"""Python with schemas of other people's formats (tests/manifests/requirements.txt), from PyPI."""

from pathlib import Path

from . import venvs
from .paths import ROOT

REQUIREMENTS = ROOT / "tests" / "manifests" / "requirements.txt"
FREE_BYTES = 500_000_000


def interpreter() -> Path:
    """The interpreter of a virtual environment that has them (150 MB, made once)."""
    return venvs.interpreter("manifests", "schemas of PyPI", REQUIREMENTS, FREE_BYTES)
