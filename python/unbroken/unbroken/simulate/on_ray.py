"""Parts of a sweep, computed on a Ray cluster.

Each part takes about two seconds, so that little is lost when a sweep is interrupted or a node
dies; Ray computes the parts of a dead node once more. A result follows from the sweep and its
number alone, so it does not matter where it is computed. All nodes need the same library, byte by
byte: a part says which one has computed it."""

import functools
import socket
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from ._library import Asked, Error, error_of, path

INSTALL = "the wheel of Unbroken with its extra [ray] is needed here and on all nodes"
# How long a part shall take, and how many patterns it has at most.
_PART_S, _PART_MOST = 2.0, 1000
_LOOK_S = 0.2
_CONNECT_S = 5.0
# So many parts for each core are handed out: one is computed, one waits.
_PARTS_A_CORE = 2


def lines(
    missing: dict[str, Any], address: str, look: Callable[[], None] | None = None
) -> Generator[list[dict[str, Any]], None, None]:
    """Results of a sweep as they come. `missing` is what is left to do, `address` is that of the
    cluster; `look` is called all the while."""
    left = _Left(missing["parts"])
    if not left.count:
        return
    ray = _ray()
    ours = _connect(ray, address)
    running: dict[Any, int] = {}
    try:
        compute, library = ray.remote(num_cpus=1)(work), _checksum()
        cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
        while left.count or running:
            while left.count and len(running) < _PARTS_A_CORE * cores:
                part = left.take(cores)
                reference = compute.remote({"of": missing["of"], "part": part}, library)
                running[reference] = part["end"] - part["first"]
            done, _ = ray.wait(list(running), timeout=_LOOK_S)
            if look:
                look()
            for reference in done:
                told, seconds = _fetch(ray, reference)
                left.learn(running.pop(reference), seconds)
                yield told
    finally:
        if ours:
            # Ends what still runs, too. To cancel that task by task may abort this process, where
            # one is just being completed (`submissible_tasks_`, Ray 2.60), and lose the error.
            ray.shutdown()
        else:
            for reference in running:
                ray.cancel(reference)


def work(text: dict[str, Any], library: int) -> tuple[dict[str, Any], float]:
    """Computes a part, on a node. Errors are told and not raised: they come with what is wrong."""
    began = time.monotonic()
    if _checksum() != library:
        here = f"{path()} of {socket.gethostname()}"
        wrong = f"{here} is another build; the same everywhere is right"
        return {"error": {"kind": "value", "argument": "ray", "text": wrong}}, 0.0
    try:
        with Asked({"work": text}) as asked:
            answer = {"ok": asked.answer()}
    except (Error, OSError, RuntimeError) as error:
        answer = {"error": {"kind": "value", "argument": "ray", "text": str(error)}}
    return answer, time.monotonic() - began


class _Left:
    """What is left to do, and how large a part is best."""

    def __init__(self, parts: list[dict[str, int]]) -> None:
        self._parts = deque(dict(part) for part in parts)
        self._size = 1
        self.count = sum(part["end"] - part["first"] for part in parts)

    def take(self, cores: int) -> dict[str, int]:
        """The next part; towards the end smaller ones, so that all cores have some."""
        part = self._parts[0]
        size = max(1, min(self._size, self.count // (_PARTS_A_CORE * cores)))
        end = min(part["end"], part["first"] + size)
        taken = {**part, "end": end}
        self.count -= end - part["first"]
        part["first"] = end
        if end == part["end"]:
            self._parts.popleft()
        return taken

    def learn(self, patterns: int, seconds: float) -> None:
        """A part of so many patterns took so long."""
        fitting = int(patterns * _PART_S / max(seconds, 1e-6))
        self._size = max(1, min(fitting, _PART_MOST))


@functools.cache
def _checksum() -> int:
    return zlib.crc32(Path(path()).read_bytes())


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        text = f"Ray cannot be imported ({error}): {INSTALL}: pip install 'FILE.whl[ray]'"
        raise Error("ray", text) from error
    return ray


def _connect(ray: Any, address: str) -> bool:
    """Joins a cluster; whether it was not joined before."""
    if ray.is_initialized():
        return False
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        # Ray would look for it for minutes.
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        except (OSError, OverflowError) as error:
            right = "the address that `ray start --head` shows, as 10.0.0.1:6379, is right"
            raise Error("ray", f"no cluster answers at {address} ({error}); {right}") from error
    try:
        ray.init(address, log_to_driver=False, logging_level="error")
    except Exception as error:  # Ray raises many kinds
        right = "host:port of the head, or auto, is right, on a machine that is one of its nodes"
        raise Error("ray", f"cannot join the cluster at {address} ({error}); {right}") from error
    return True


def _fetch(ray: Any, reference: Any) -> tuple[list[dict[str, Any]], float]:
    try:
        told, seconds = ray.get(reference)
    except ray.exceptions.RayError as error:
        last = str(error).strip().splitlines()[-1:]
        raise Error("ray", f"a part cannot be computed ({''.join(last)}); {INSTALL}") from error
    if "error" in told:
        raise error_of(told["error"])
    return told["ok"], seconds
