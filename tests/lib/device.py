"""What tests that run on both kinds of NICs (fixture `device`) ask of the kind."""

from .fabric import Fabric
from .process import Skip

# The only GID of a plain RoCE port that leads to peers.
PLAIN_GID_INDEX = 3


def verifier_options() -> list:
    """What tests/c/verifier.c is told of these NICs."""
    return ["--writes-repeat"] if Fabric.device else []


def need_windows():
    """Skips a case where NICs have no memory windows."""
    if Fabric.device:
        raise Skip("plain devices have no memory windows")
