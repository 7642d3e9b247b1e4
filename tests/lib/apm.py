"""Both ends of a program over the library of path migration (include/unbroken/apm.h)."""

import json

from .cc import compile_c
from .fabric import Fabric
from .paths import BUILD, ROOT
from .ports import free_port, listens
from .process import Failure, wait_until

SECONDS = 60
# How a program is linked with the library.
LIBRARY = ["-I", ROOT / "include", "-L", BUILD, f"-Wl,-rpath,{BUILD}"]
LIBRARY += ["-lunbroken_apm", "-libverbs"]
# How many queue pairs, and rounds, times are measured with.
TIMES_QPS, TIMES_ROUNDS = tuple(1 << n for n in range(11)), 30


def sent(fabric: Fabric, port: str) -> int:
    """Payload that has left a port."""
    return fabric.nics()[port]["tx_payload_bytes"]


class Library:
    """Both ends of tests/c/apm_library.c, or of another program of the same kind."""

    def __init__(self, fabric: Fabric, *words, name="apm_library", failover=False):
        program, port = compile_c(name, *LIBRARY), free_port()
        self.server = fabric.run("b", [program, port], "b-library", failover)
        wait_until(
            lambda: self.server.ended() or listens(self.server.pid, port), 20, "the server listens"
        )
        self.client = fabric.run("a", [program, f"127.0.0.1:{port}", *words], "a-library", failover)

    def reach(self, stage: str):
        """Waits until the client says that it is there."""
        there = lambda: f"stage {stage}\n" in self.client.output()
        wait_until(
            lambda: there() or self.client.ended() or self.server.ended(), SECONDS, f"stage {stage}"
        )
        if not there():
            raise Failure(
                f"an end has ended before stage {stage}: {self.client.output()[-300:]} "
                f"{self.server.output()[-300:]}"
            )

    def succeed(self) -> str:
        """What the client has printed, when both ends have ended well."""
        for end in (self.client, self.server):
            end.expect_success(SECONDS)
            if not end.output().endswith("all is well\n"):
                raise Failure(f"{end.name} says {end.output()[-500:]}")
        return self.client.output()


def measured(logs, qps: int, mode: str, rounds: int) -> dict:
    """How long paths take to load and to migrate, as tests/c/apm_library.c tells it."""
    with Fabric(logs, "--ports", "2") as fabric:
        return json.loads(Library(fabric, qps, mode, rounds).succeed().splitlines()[0])
