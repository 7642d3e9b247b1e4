"""Collective operations that outlive NICs: see `unbroken.coll`, and `unbroken.torch` for
torch.distributed. Either is imported when it is first named. `unbroken.coll` loads its C library
when that is first needed."""

import importlib
from types import ModuleType

__version__ = "0.1.0"
__all__ = ["coll", "torch"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
