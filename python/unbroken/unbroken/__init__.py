"""Collective operations that outlive NICs: see `unbroken.coll`, and `unbroken.torch` for
torch.distributed; `unbroken.events` tells programs of switches; `unbroken.simulate` says what lost
NICs cost. Each is imported when it is first named. `unbroken.coll` and `unbroken.simulate` load
their C libraries when these are first needed."""

import importlib
from types import ModuleType

__version__ = "0.1.0"
__all__ = ["coll", "events", "simulate", "torch"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
