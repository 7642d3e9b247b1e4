"""Variables that would do nothing: the library tells a program of them, and goes on without
them."""

import pytest

from lib.fabric import Fabric
from lib.paths import BUILD
from lib.process import Failure

WRONG = {
    "UNBROKEN_FAILBAK": ("0", "UNBROKEN_FAILBACK is right"),
    "UNBROKEN_FAILOVER": ("nope", "right is 1/0, yes/no, on/off, true/false"),
    "UNBROKEN_SHOW_EVENTS": ("2", "right is 1/0, yes/no, on/off, true/false"),
}


@pytest.mark.smoke
def test_wrong_variables(logs):
    """A line on stderr for each, once for a process; what is right is not mentioned."""
    right = {"UNBROKEN_HOST": "b", "UNBROKEN_FAILBACK": "off", "UNBROKEN_SHOW_EVENTS": "Yes"}
    preloaded = {"LD_PRELOAD": str(BUILD / "libunbroken.so")}
    with Fabric(logs) as fabric:
        fine = fabric.start("fine", ["ibv_devinfo"], {**preloaded, **right})
        fine.expect_success(20)
        wrong = {name: value for name, (value, _) in WRONG.items()}
        told = fabric.start("wrong", ["ibv_devinfo"], {**preloaded, **wrong})
        told.expect_success(20)
    if "unbroken:" in fine.output():
        raise Failure("what is right is told to be wrong")
    lines = [line for line in told.output().splitlines() if line.startswith("unbroken:")]
    for name, (_, hint) in WRONG.items():
        if len([line for line in lines if name in line and hint in line]) != 1:
            raise Failure(f"{name} is not told, or more than once: {lines}")
    if len(lines) != len(WRONG) or told.output().count("hca_id:") != 4:
        raise Failure(f"there is more than the variables, or less than the devices: {lines}")
