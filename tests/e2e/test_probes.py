"""Probes for tracers (USDT): the notes of libunbroken.so name them, each is a nop, gdb stops at
them in a live program, and bpftrace tells of them."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from lib.fabric import Fabric
from lib.paths import BUILD, ROOT
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


def traced_by_bpftrace(pid: int) -> list:
    """The command line of the guide, for that process and this library."""
    page = (ROOT / "docs" / "guide" / "monitoring.md").read_text()
    program = re.search(r"^bpftrace -p \$PID -e '(.*?)'", page, re.M | re.S)[1]
    program = program.replace("/usr/local/lib/libunbroken.so", str(LIBRARY))
    return ["bpftrace", "-p", str(pid), "-e", program]


def need_bpftrace():
    """Skips where there is no bpftrace, or a kernel without what it needs."""
    if os.geteuid() != 0:
        raise Skip("bpftrace needs root")
    if not shutil.which("bpftrace"):
        raise Skip("bpftrace is missing (Debian: bpftrace)")
    if not Path("/sys/bus/event_source/devices/uprobe").exists():
        raise Skip("the kernel has no uprobes for perf (CONFIG_UPROBE_EVENTS)")
    line = ["bpftrace", "-e", "interval:ms:1 { exit(); }"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise Skip(f"bpftrace cannot trace here: {done.stderr.strip()}")


def are_set(pid: int, places: list) -> bool:
    """Whether breakpoints of the kernel (0xcc) stand in place of the nops there."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    base = min(int(line.split("-")[0], 16) for line in maps if line.endswith(str(LIBRARY)))
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        return all(os.pread(memory.fileno(), 1, base + at) == b"\xcc" for at in places)


@pytest.mark.root
def test_bpftrace_tells_of_each_switch(logs, note):
    """The guide's line: QP, NICs and time of each switch are those of the event log."""
    need_bpftrace()
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        _, process = storm(fabric, 4, 300)
        wait_until(lambda: all(q["protected"] for q in fabric.status()["qps"]), 20, "protection")
        tracer = fabric.start("bpftrace", traced_by_bpftrace(process.pid))
        places = [at for name, at, _ in notes() if name == "switch"]
        wait_until(lambda: tracer.ended() or are_set(process.pid, places), 120, "it traces")
        fabric.fault("nic a/0 dead")
        line = r"QP (\d+): NIC (\d) to NIC (\d) in (\d+) us"
        told = lambda: {tuple(map(int, of)) for of in re.findall(line, tracer.output())}
        all_told = lambda: len({qp for qp, *_ in told()}) == 4
        wait_until(lambda: tracer.ended() or all_told(), 30, "bpftrace tells of four queue pairs")
        nics = lambda e: (int(e["from"].split("-")[0][2:]), int(e["to"].split("-")[0][2:]))
        logged = lambda: {(e["qp"], *nics(e), e["switch_us"]) for e in fabric.events("switch")}
        wait_until(lambda: tracer.ended() or told() <= logged(), 20, "the log says the same")
        if tracer.ended():
            raise Failure(tracer.output())
        tracer.kill(signal.SIGINT)
        if process.ended():
            raise Failure(process.output())
        note(f"{len(told())} switches")
