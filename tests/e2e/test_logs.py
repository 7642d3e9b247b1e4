"""`UNBROKEN_LOG`: a line on stderr for each switch, failback and unprotected queue pair, where a
filter asks for it, and none elsewhere."""

import re

import pytest

from lib.fabric import Fabric
from lib.process import Failure, wait_until
from lib.storms import storm

LINE = re.compile(r"^unbroken: ([A-Z]+) ([a-z]+): (.*)$", re.M)
QPS = 8


def lines(process) -> list:
    """(level, part, text) of all lines that a program has told."""
    return LINE.findall(process.output())


def told(process, *words) -> list:
    """The texts of the lines that have all these words."""
    return [text for *_, text in lines(process) if all(word in text for word in words)]


def through_a_death(fabric, asked: str | None):
    """A storm from b to a whose NIC dies and comes back. Gives the end on host a, and all passive
    and planned switches of its."""
    env = {} if asked is None else {"UNBROKEN_LOG": asked}
    fabric.env |= env
    _, process = storm(fabric, QPS, 120)
    wait_until(lambda: all(q["protected"] for q in fabric.status()["qps"]), 20, "protection")
    fabric.fault("nic a/0 dead")
    of = lambda kind: [
        s for s in fabric.events("switch") if s["kind"] == kind and s["pid"] == process.pid
    ]
    wait_until(lambda: len(of("passive")) >= QPS, 20, "the queue pairs have moved")
    fabric.clear()
    home = lambda: all(q["path"] == "a/0-b/0" for q in fabric.status()["qps"] if q["host"] == "a")
    wait_until(home, 60, "they are back")
    back = lambda: len({s["qp"] for s in of("planned") if s["reason"] == "failback"}) >= QPS
    wait_until(back, 20, "and the log has it")
    return process, of("passive"), of("planned")


@pytest.mark.smoke
def test_a_line_for_each_switch(logs, note):
    """With `failover=info`: a line for each switch of the event log, and no other part's."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        process, passive, planned = through_a_death(fabric, "failover=info")
        for switch in passive + planned:
            paths = f"{switch['to']} from {switch['from']} "
            words = (f"QP {switch['qp']:#x} of host a", paths, f"epoch {switch['epoch']},")
            if len(told(process, *words)) != 1:
                raise Failure(f"{switch}: told {told(process, *words)}")
        moved = [text for *_, text in lines(process) if " sent again)" in text]
        if len(moved) != len(passive) + len(planned):
            raise Failure(f"{len(passive)} and {len(planned)} switches, told {moved}")
        if len(told(process, "is back on", "failback")) < QPS:
            raise Failure(f"no line for a failback: {moved}")
        if others := [line for line in lines(process) if line[1] != "failover"]:
            raise Failure(f"nobody asked for {others}")
        note(f"{len(passive)} switches and {len(planned)} planned ones, a line each")


@pytest.mark.parametrize("asked", [None, "0", "edge=trace"])
def test_no_line_where_none_is_asked_for(logs, asked):
    """The same without the variable, or with what asks for nothing that happens here."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        process, passive, _ = through_a_death(fabric, asked)
        if not passive or "unbroken:" in process.output():
            raise Failure(f"{len(passive)} switches; told {lines(process)}")


def test_a_part_of_its_own(logs):
    """`nic=info` tells of NICs and of no queue pair; a peer without Unbroken's failover is told to
    be unprotected at `failover=info`, once for each queue pair."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        process, _, _ = through_a_death(fabric, "nic=info")
        found = lines(process)
        due = [("WARN", "nic", "a/0 has died"), ("INFO", "nic", "a/0 works")]
        if not set(due) <= set(found):
            raise Failure(f"{found}")
        if others := [line for line in found if line[1] != "nic"]:
            raise Failure(f"nobody asked for {others}")
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        fabric.env["UNBROKEN_LOG"] = "failover=info"
        server, client = fabric.pair("ib_write_bw", ["-D", 8, "--report_gbits"], failover=False)
        server.kill()
        client.wait(40)
        server, client = fabric.pair("ib_write_bw", ["-D", 4])
        client.expect_success(40)
        if told(client, "is not protected"):
            raise Failure(f"it was: {lines(client)}")


@pytest.mark.smoke
def test_a_wrong_filter_is_named(logs):
    """The command refuses it; a program is told once, and goes on without."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        for text, said in [
            ("failver=info", "'failver' is no part"),
            ("failover=infos", "'infos' is no level"),
        ]:
            fabric.env["UNBROKEN_LOG"] = text
            done = fabric.command("status")
            if done.returncode != 1 or said not in done.stderr or text not in done.stderr:
                raise Failure(f"{text}: {done.returncode}: {done.stderr}")


def test_lines_do_not_go_into_a_file_of_the_program(logs):
    """A program closes descriptor 2 and opens a file, which gets its number. What the library has
    to say is not written there; a log that it redirects stderr to gets it."""
    program = """
import ctypes, os, sys
os.close(2)
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | (os.O_APPEND if sys.argv[2] == "log" else 0))
assert fd == 2, fd
os.write(2, b"precious")
verbs = ctypes.CDLL("libibverbs.so.1")
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
verbs.ibv_open_device.restype = ctypes.c_void_p
devices = verbs.ibv_get_device_list(None)
context = ctypes.c_void_p(verbs.ibv_open_device(ctypes.c_void_p(devices[0])))
verbs.ibv_query_port(context, 99, ctypes.create_string_buffer(256))
os.close(2)
"""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        for kind in ("data", "log"):
            path = logs / f"{kind}.bin"
            line = ["/usr/bin/python3", "-c", program, path, kind]
            fabric.run("a", line, name=kind, env={"UNBROKEN_LOG": "debug"}).expect_success(30)
            written = path.read_bytes()
            if (written == b"precious") != (kind == "data"):
                raise Failure(f"{kind}: {written!r}")
