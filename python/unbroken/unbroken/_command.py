"""The command `unbroken`, which a wheel holds with its library."""

import os
import sys
from pathlib import Path
from typing import NoReturn

_NAME = "unbroken"
# What a wheel has beside this file; a package that is used from the sources has none.
_INSTALLED = Path(__file__).resolve().parent / "bin" / _NAME


def path() -> str:
    """The command: the one of this package, else the one that a shell would find.

    Raises FileNotFoundError, with what helps, if there is none.
    """
    if _INSTALLED.is_file():
        return str(_INSTALLED)
    for folder in os.get_exec_path():
        candidate = os.path.join(folder, _NAME)
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
    raise FileNotFoundError(
        f"there is no {_INSTALLED}, and no {_NAME} in PATH; `pip install` a wheel of "
        "`make wheel`, or put the command of a build into PATH"
    )


def main() -> NoReturn:
    """Becomes the command: signals and the exit status are its own."""
    if not _INSTALLED.is_file():
        # Not the one in PATH: that may be this very script.
        sys.exit(f"unbroken: there is no {_INSTALLED}; install a wheel of `make wheel`")
    os.execv(_INSTALLED, [_NAME, *sys.argv[1:]])
