"""What goes wrong in a lab."""

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05


class LabError(AssertionError):
    """Something did not happen that a test has asked for; pytest shows it as a failed assertion."""


def wait_until(condition: Callable[[], _T], timeout_s: float, what: str) -> _T:
    """Asks until `condition()` is true, and gives its value.

    Raises LabError, with `what` did not come, after `timeout_s` seconds.
    """
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise LabError(f"{what}: not within {timeout_s:g} s")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
