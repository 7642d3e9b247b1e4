"""What tests that run on both kinds of NICs (fixture `device`) ask of the kind."""

from .fabric import Fabric
from .process import Skip

# The only GID of a plain RoCE port that leads to peers.
PLAIN_GID_INDEX = 3


def verifier_options() -> list:
    """What tests/c/verifier.c is told of these NICs."""
    return ["--writes-repeat"] if Fabric.device or Fabric.stand_in else []


def need_windows():
    """Skips a case where NICs have no memory windows."""
    if Fabric.device or Fabric.stand_in:
        raise Skip("plain devices have no memory windows")

# Ways in which plain devices may flush (`UNBROKEN_DEVICE_FLUSH`), none as it should be; the first
# two are part of `make test`.
FLUSHES = ["lossy", "no-recv-marker", "no-srq-flush", "slow-poll", "at-destroy", "nothing"]
