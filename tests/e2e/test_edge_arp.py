"""Whose an IP address is, EVPN tells: a host that asks is answered by its own bridge, and no other
host hears the question."""

import json
import subprocess
import sys

import pytest

from lib.edge import Lab, mac, run
from lib.process import Failure, wait_until

pytestmark = [pytest.mark.edge, pytest.mark.root, pytest.mark.serial]

HOSTS = 3
# Writes down who asks for what on a device, until its input ends; says `listening` first.
LISTEN = """
import os, select, socket, sys
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806))
s.bind((sys.argv[1], 0))
print("listening", flush=True)
while True:
    ready, _, _ = select.select([s, sys.stdin], [], [])
    if s in ready:
        frame = s.recv(2048)
        if frame[20:22] == b"\\0\\1":
            print(socket.inet_ntoa(frame[28:32]), socket.inet_ntoa(frame[38:42]), flush=True)
    elif not sys.stdin.read():
        break
"""


class Listener:
    """A context: the ARP requests that come to a host's virtual function."""

    def __init__(self, lab, host: str):
        command = [*lab.within(host), sys.executable, "-c", LISTEN, "vf0"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self):
        if self.process.stdout.readline() != "listening\n":
            raise Failure("the listener does not listen")
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def heard(self) -> list:
        """Who asked for what, until now."""
        self.process.stdin.close()
        return [tuple(line.split()) for line in self.process.stdout.read().splitlines()]


def knows_all(lab) -> bool:
    """Whether EVPN has told every host of all others' IP addresses."""
    hosts = range(1, HOSTS + 1)
    for h in hosts:
        shown = run("ip", "-n", lab.node(f"h{h}"), "-j", "neigh", "show", "dev", "unb100")
        known = {n["dst"]: n.get("lladdr") for n in json.loads(shown or "[]") if n.get("lladdr")}
        if any(known.get(lab.address(o)) != mac(o) for o in hosts):
            return False
    return True


def test_no_host_hears_who_has(logs, note):
    """Host 1 asks for host 2's address: it is answered, and host 3 hears nothing. An address that
    nobody has told of is asked for everywhere: so the listener hears."""
    with Lab(logs, HOSTS, "--bfd-ms", 300) as lab:
        wait_until(lambda: knows_all(lab), 30, "EVPN tells of IP addresses")
        ping = [*lab.within("h1"), "ping", "-c", "3", "-i", "0.2", "-W", "2"]
        with Listener(lab, "h3") as listener:
            for to in (2, 3):
                run("ip", "-n", lab.node("h1"), "neigh", "flush", "dev", "vf0")
                run(*ping, lab.address(to))
            shown = run("ip", "-n", lab.node("h1"), "-j", "neigh", "show", "dev", "vf0")
            found = {n["dst"]: n.get("lladdr") for n in json.loads(shown)}
            if found.get(lab.address(3)) != mac(3):
                raise Failure(f"host 1 was told {found}")
            # Asked for last: what came before it has been heard when this has.
            subprocess.run([*ping, "192.168.9.77"], capture_output=True, timeout=30)
            heard = listener.heard()
        if ("192.168.9.1", "192.168.9.77") not in heard:
            raise Failure(f"the listener has heard only {heard}")
        if others := [h for h in heard if h[0] == "192.168.9.1" and h[1] != "192.168.9.77"]:
            raise Failure(f"host 3 has heard who-has: {others}")
        note(f"{len(heard)} requests heard, all for an address that nobody has")
