"""Suites that run on both kinds of device: as `suite.py`, and as `suite.py --device plain`, where NICs have plain verbs only."""

import argparse

from .fabric import Fabric
from .process import Skip

# The only GID of a plain RoCE port that leads to peers.
PLAIN_GID_INDEX = 3


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser that knows the option."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=["full", "plain"], default="full", help="the kind of all NICs (default: full)")
    return made


def verifier_options() -> list:
    """What tests/c/verifier.c is told of these NICs."""
    return ["--writes-repeat"] if Fabric.device else []


def need_windows():
    """Skips a case where NICs have no memory windows."""
    if Fabric.device:
        raise Skip("plain devices have no memory windows")


def use(name: str, kind: str) -> str:
    """From now on every fabric has NICs of this kind. Gives the name of the suite on them."""
    if kind == "full":
        return name
    Fabric.device = ("--device", kind)
    Fabric.gid_index = PLAIN_GID_INDEX
    return f"{name}-{kind}"
