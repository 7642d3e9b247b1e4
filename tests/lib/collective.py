"""Jobs of `unbroken coll bench`, what their NICs carry, and what their ranks report."""

import json
import time

from .cc import compile_c
from .fabric import UNBROKEN, Fabric
from .paths import BUILD, ROOT
from .process import Failure, wait_until

SECONDS = 60
# Until all ranks run, and until what was set has had its effect on a loaded machine.
STARTS = 30
# Longer than what is waited for takes on a loaded machine.
LONG = ["--for", f"{4 * STARTS}s", "--check-all"]
# More than an operation of 4 MiB sends over one of four NICs, twice.
ENOUGH = 4 << 20
# How a program is linked with the library of collectives.
LIBRARY = ["-I", ROOT / "include", "-L", BUILD, "-lunbroken_coll", f"-Wl,-rpath,{BUILD}"]


class Job:
    """Ranks of `unbroken coll bench`, one process each."""

    def __init__(self, fabric: Fabric, hosts: list, *options):
        self.id_file, self.while_file = fabric.files / "bench.id", fabric.files / "goes"
        self.while_file.touch()
        self.ranks = []
        for rank, host in enumerate(hosts):
            self.ranks.append(self.start(fabric, rank, host, len(hosts), f"rank{rank}", *options))

    def start(self, fabric, rank, host, ranks, name, *options, id_file=None):
        """Starts a rank of so many."""
        line = [UNBROKEN, "coll", "bench", "--rank", rank, "--ranks", ranks, "--host", host]
        line += ["--id-file", id_file or self.id_file]
        running = ["--while", self.while_file] if "--for" in options else []
        return fabric.start(name, [*line, "--json", *options, *running])

    def end(self) -> list:
        """Ends a job that runs `LONG` before its time, and gives what `succeed` gives."""
        self.while_file.unlink()
        return self.succeed()

    def succeed(self) -> list:
        """The lines of rank 0, when all have ended well."""
        for process in self.ranks:
            process.expect_success(SECONDS)
        # Beside its lines it may have said something to people.
        said = self.ranks[0].output().splitlines()
        lines = [json.loads(line) for line in said if line.startswith("{")]
        wrong = [line for line in lines if line["wrong"]]
        if wrong or not lines:
            raise Failure(f"wrong results: {wrong or 'none at all'}")
        return lines


def sent(fabric, host) -> list:
    """Payload that each NIC of a host has sent."""
    nics = fabric.nics()
    return [
        nics[f"{host}/{rail}"]["tx_payload_bytes"] if f"{host}/{rail}" in nics else 0
        for rail in range(4)
    ]


def since(fabric, host, before) -> list:
    """Payload that each NIC of a host has sent since `before`, which `sent` gave."""
    return [now - then for now, then in zip(sent(fabric, host), before)]


def runs(fabric, job, host="a"):
    """Waits until the NICs carry something."""
    before = sent(fabric, host)
    wait_until(
        lambda: any(p.ended() for p in job.ranks) or sum(since(fabric, host, before)) > 1 << 20,
        STARTS,
        "traffic",
    )


def carries(fabric, job, rails, host="a"):
    """Waits until exactly these NICs of a host carry payload: the others nothing at all, while
    these carry more than operations need that were under way."""

    def so():
        if any(p.ended() for p in job.ranks):
            raise Failure(
                f"a rank has ended: {[p.output()[-300:] for p in job.ranks if p.ended()]}"
            )
        before = sent(fabric, host)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = since(fabric, host, before)
            if all(now[rail] > ENOUGH for rail in rails):
                return all(now[rail] == 0 for rail in range(4) if rail not in rails)
        return False

    wait_until(so, STARTS, f"traffic on the NICs {rails} of host {host} alone")


def communicators(fabric) -> list:
    """`unbroken coll status --json`."""
    done = fabric.command("coll", "status", "--json")
    if done.returncode != 0:
        raise Failure(f"coll status: {done.stderr}")
    return json.loads(done.stdout)


def done(communicator: dict) -> int:
    """Operations that a rank has done, by what `communicators` gives."""
    return sum(communicator["shapes"].values())


def found(fabric, job, verdict, down):
    """Waits until all ranks know where the failure is, and plan without those NICs."""

    def so():
        if any(p.ended() for p in job.ranks):
            raise Failure(
                f"a rank has ended: {[p.output()[-300:] for p in job.ranks if p.ended()]}"
            )
        shown = communicators(fabric)
        know = [
            s
            for s in shown
            if any(verdict in h["what"] for h in s["happened"]) and s["down"] == down
        ]
        return len(know) == len(job.ranks)

    try:
        wait_until(so, STARTS, "")
    except Failure as error:
        happened = {
            s["rank"]: [h["what"] for h in s["happened"]] + s["down"] for s in communicators(fabric)
        }
        raise Failure(
            f"not all find '{verdict}' and plan without {down}: {happened} {error}"
        ) from error


def portion(fabric, host) -> list:
    """What each NIC of a host carries of the next so many bytes: each of those that carry, more
    than `ENOUGH`."""
    before = sent(fabric, host)
    wait_until(
        lambda: sum(since(fabric, host, before)) > 8 * ENOUGH, STARTS, f"traffic of host {host}"
    )
    return since(fabric, host, before)


def shares(fabric, job, rails, host="a"):
    """Waits until these NICs of a host carry alike."""

    def so():
        now = portion(fabric, host)
        carried = [now[rail] for rail in rails]
        return min(carried) > ENOUGH and max(carried) < 2 * min(carried)

    wait_until(so, STARTS, f"equal shares of the NICs {rails} of host {host}")


def splitting(fabric, hosts, timeout_ms) -> list:
    """Ranks that split their communicator again and again, until a file is gone."""
    program = compile_c("split", *LIBRARY)
    (fabric.files / "goes").touch()
    line = [fabric.files / "split.id", fabric.files / "goes", timeout_ms]
    return [
        fabric.start(f"split{rank}", [program, rank, hosts, *line]) for rank in range(len(hosts))
    ]


def rounds(ranks, count):
    """Waits until all have done so many."""
    wait_until(
        lambda: (
            any(p.ended() for p in ranks) or all(p.output().count("round ") >= count for p in ranks)
        ),
        SECONDS,
        f"{count} rounds",
    )
