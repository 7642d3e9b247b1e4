"""`libunbroken_simulations.so` over ctypes: questions that are opened, answered and closed.

Calls release the interpreter's lock. The library is loaded by the first question; OSError says
where it was looked for."""

import ctypes
import functools
import json
import os
import re
import threading
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_uint64, c_void_p
from pathlib import Path
from typing import Any

NAME = "libunbroken_simulations.so"
VARIABLE = "UNBROKEN_SIMULATIONS_LIBRARY"
# How often somebody is told how far an answer is.
_LOOK_S = 0.1
# Options whose names are words of Python's.
_KEYWORDS = {"for": "duration"}
_ARGUMENTS = {
    "open": [c_char_p, POINTER(c_void_p)],
    "answer": [c_void_p],
    "missing": [c_void_p],
    "add": [c_void_p, c_char_p],
    "far": [c_void_p, POINTER(c_uint64), POINTER(c_uint64)],
    "stop": [c_void_p],
    "close": [c_void_p],
    "free": [c_void_p],
}

# Told how many parts of an answer are done, and how many there are.
Look = Callable[[int, int], None]


class Error(ValueError):
    """A question that makes no sense. The text says what would be right; `argument` is the keyword
    that is wrong, if it is one."""

    def __init__(self, argument: str | None, text: str) -> None:
        super().__init__(text if argument is None else f"{argument}: {text}")
        self.argument = argument


def keyword(option: str) -> str:
    """What an option of the command is called here: `nic-rate` is `nic_rate`."""
    return _KEYWORDS.get(option, option.replace("-", "_"))


def option(name: str) -> str:
    """What a keyword is called on the command line."""
    back = {ours: theirs for theirs, ours in _KEYWORDS.items()}
    return "--" + back.get(name, name.replace("_", "-"))


def path() -> str:
    """The file that is loaded: the one that the variable names, else that of the wheel."""
    return os.environ.get(VARIABLE) or str(Path(__file__).parent.with_name(NAME))


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(path())
    except OSError as error:
        hint = f"a wheel has it; `make all` builds it, and {VARIABLE} names it"
        raise OSError(f"{path()} cannot be loaded ({error}): {hint}") from error
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, f"unbroken_simulations_{name}")
        function.argtypes = arguments
        function.restype = None if name in ("far", "stop", "close", "free") else c_void_p
    return library


def _function(name: str) -> Any:
    return getattr(_library(), f"unbroken_simulations_{name}")


def _call(name: str, *arguments: Any) -> Any:
    """What a function tells; its error is raised."""
    text = _function(name)(*arguments)
    try:
        told = json.loads(ctypes.string_at(text))
    finally:
        _function("free")(text)
    if "error" in told:
        raise error_of(told["error"])
    return told["ok"]


def error_of(told: dict[str, Any]) -> Exception:
    """An error of the library as one of Python's."""
    argument = told["argument"] and keyword(told["argument"])
    # As people have given it: without dashes, and what stands for a value.
    text = re.sub(r"--([a-z][a-z-]*)( <[^>]*>(\.\.\.)?)?", lambda m: keyword(m[1]), told["text"])
    match told["kind"]:
        case "value":
            return Error(argument, text)
        case "system":
            return OSError(text if argument is None else f"{argument}: {text}")
        case "stopped":
            return KeyboardInterrupt()
        case _:
            return RuntimeError(text)


class _Handle:
    """An open question. Once it is closed, and no call has it any longer, it is gone."""

    def __init__(self, text: dict[str, Any]) -> None:
        self.pointer = c_void_p()
        self._lock, self._calls, self._wanted = threading.Lock(), 0, True
        _call("open", json.dumps(text).encode(), byref(self.pointer))

    def __enter__(self) -> c_void_p:
        with self._lock:
            self._calls += 1
        return self.pointer

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._calls -= 1
        self._free()

    def close(self) -> None:
        """Nobody asks any more."""
        self._wanted = False
        self._free()

    def _free(self) -> None:
        with self._lock:
            if not self._wanted and not self._calls and self.pointer:
                _function("close")(self.pointer)
                self.pointer = c_void_p()


class Asked:
    """A question: `{"words": […]}`, or `{"work": …}` for a part of a sweep. It is of one thread,
    and of a `with`: what an error leaves in a traceback would keep its files open."""

    def __init__(self, text: dict[str, Any]) -> None:
        self._handle = _Handle(text)

    def __enter__(self) -> "Asked":
        return self

    def __exit__(self, *_: Any) -> None:
        self._handle.close()

    def answer(self, look: Look | None = None) -> Any:
        """The answer. Whatever is raised meanwhile, as by Ctrl-C, ends its computing."""
        handle, told, done = self._handle, [], threading.Event()

        def ask() -> None:
            try:
                with handle as pointer:
                    told.append((_call("answer", pointer), None))
            except BaseException as error:  # it is raised by who waits
                told.append((None, error))
            finally:
                done.set()

        # While the main thread is inside C it sees no signal.
        threading.Thread(target=ask, name="unbroken.simulate", daemon=True).start()
        try:
            # Not join(): where that is interrupted, Python may take the thread for ended.
            while not done.wait(_LOOK_S):
                if look:
                    look(*self.far())
            if look:
                look(*self.far())
        except BaseException:
            _function("stop")(handle.pointer)
            # Once more Ctrl-C, and it ends by itself.
            done.wait()
            raise
        answer, error = told[0]
        if error is not None:
            raise error
        return answer

    def far(self) -> tuple[int, int]:
        """How many parts of the answer are done, and how many there are."""
        done, count = c_uint64(), c_uint64()
        _function("far")(self._handle.pointer, byref(done), byref(count))
        return done.value, count.value

    def missing(self) -> dict[str, Any]:
        """What of a sweep is left to do."""
        return _call("missing", self._handle.pointer)

    def add(self, lines: list[dict[str, Any]]) -> None:
        """Adds results to a sweep."""
        _call("add", self._handle.pointer, json.dumps(lines).encode())
