"""Probes for tracers (USDT): the notes of libunbroken.so name them, each is a nop, and gdb stops at
them in a live program."""

import re
import shutil
import subprocess

import pytest

from lib.fabric import Fabric
from lib.paths import BUILD
from lib.process import Failure, Skip, wait_until
from lib.storms import storm

LIBRARY = BUILD / "libunbroken.so"
ARGUMENTS = {"switch": 7, "migration": 3, "retransmit": 3}
PROBE = re.compile(
    r"Provider: unbroken\s+Name: (\w+)\s+Location: (0x[0-9a-f]+).*?\n\s+Arguments: (.*)"
)


def notes() -> list:
    """(name, address, arguments) of the probes of the library."""
    line = ["readelf", "--notes", "--wide", str(LIBRARY)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
    return [(name, int(at, 16), args.split()) for name, at, args in PROBE.findall(done.stdout)]


@pytest.mark.smoke
def test_the_library_has_them_and_each_is_a_nop(logs, note):
    """Names and numbers of arguments are those of the guide. What stands there is a nop, as long as
    nobody has set a probe."""
    found = notes()
    if {name for name, *_ in found} != set(ARGUMENTS):
        raise Failure(f"{found}")
    for name, at, args in found:
        if len(args) != ARGUMENTS[name]:
            raise Failure(f"{name} has {args}")
        line = ["objdump", "-d", f"--start-address={at}", f"--stop-address={at + 1}", LIBRARY]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=True)
        if not re.search(rf"^\s*{at:x}:\s+90\s+nop", done.stdout, re.M):
            raise Failure(f"{name}: {done.stdout}")
    note(", ".join(f"{name}: {len(args)} arguments" for name, _, args in found))


def stopped_at(fabric, pid: int, probe: str, then):
    """The process is stopped by gdb at a probe, after `then()`; gives what gdb said of the first
    three arguments."""
    words = ["set pagination off", f"break -probe-stap unbroken:{probe}", "echo SET\\n", "continue"]
    words += ["print $_probe_argc", "print $_probe_arg0", "print $_probe_arg1", "detach"]
    line = ["gdb", "-nx", "-batch", "-p", pid, *(w for word in words for w in ("-ex", word))]
    debugger = fabric.start(f"gdb-{probe}", line)
    wait_until(lambda: debugger.ended() or "SET" in debugger.output(), 120, "gdb has set it")
    then()
    debugger.expect_success(120)
    return [int(n) for n in re.findall(r"^\$\d+ = (-?\d+)$", debugger.output(), re.M)]


def test_gdb_stops_at_a_switch_and_at_what_is_sent_again(logs, note):
    """A NIC of a live program dies, then a cable loses packets."""
    if not shutil.which("gdb"):
        raise Skip("gdb is missing (Debian: gdb)")
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        _, process = storm(fabric, 4, 300)
        wait_until(lambda: all(q["protected"] for q in fabric.status()["qps"]), 20, "protection")
        qps = {q["qp"] for q in fabric.status()["qps"] if q["host"] == "a"}
        switch = stopped_at(fabric, process.pid, "switch", lambda: fabric.fault("nic a/0 dead"))
        if switch[0] != ARGUMENTS["switch"] or switch[1] not in qps or switch[2] != 0:
            raise Failure(f"argc, QP, NIC before: {switch}; the QPs are {qps}")
        lossy = lambda: fabric.fault("loss a/1 5%")
        again = stopped_at(fabric, process.pid, "retransmit", lossy)
        if again[0] != ARGUMENTS["retransmit"] or again[2] != 1:
            raise Failure(f"argc, QP, NIC: {again}")
        note(f"switch of QP {switch[1]:#x} from NIC {switch[2]}; QP {again[1]:#x} sends again")


def test_gdb_stops_at_a_migration(logs, note):
    """A port of a NIC with two goes down under a live program."""
    if not shutil.which("gdb"):
        raise Skip("gdb is missing (Debian: gdb)")
    with Fabric(logs, "--hosts", "a,b", "--nics", "1", "--ports", "2") as fabric:
        _, process = storm(fabric, 4, 300)
        armed = lambda: all(q["protected"] for q in fabric.status()["qps"])
        wait_until(armed, 30, "all can migrate")
        then = lambda: fabric.fault("nic a/0/1 down")
        found = stopped_at(fabric, process.pid, "migration", then)
        if found[0] != ARGUMENTS["migration"] or found[2] != 0:
            raise Failure(f"argc, QP, NIC: {found}")
        note(f"QP {found[1]:#x} has migrated")
