"""An edge that is up is changed: by its file, by somebody else's hand at rules and routes, and by
the death of its own FRR."""

import os
import re
import shlex
import signal
import subprocess

import pytest

from lib import options
from lib.edge import Lab, lab_folder, run, settled
from lib.fabric import UNBROKEN, now_us
from lib.paths import ROOT
from lib.process import Failure, wait_until

pytestmark = [
    pytest.mark.edge,
    pytest.mark.root,
    pytest.mark.serial,
    pytest.mark.skipif(options.VM, reason="it is routing alone, and tested without a VM"),
]

BFD_MS = 50
RESYNC_S = 2
# By a device that is none of the edge's: routes over its uplinks go when it takes their addresses.
FOREIGN_ROUTES = [f"10.99.0.0/16 via 10.98.0.2 table {t}" for t in (4100, 4101, "main")]
FOREIGN_RULE = ["pref", "4100", "lookup", "4100"]


@pytest.fixture(scope="module")
def two_hosts():
    with Lab(lab_folder("edge_changes"), 2, "--bfd-ms", BFD_MS, "--fast-failover") as lab:
        wait_until(lab.both_ways_back, 60, "both ways are there")
        yield lab


@pytest.fixture
def lab(two_hosts, logs):
    """The lab, with the logs of a test."""
    two_hosts.logs = logs
    return two_hosts


def refused(lab, name: str, *args) -> str:
    """What `unbroken edge …` says, which must fail."""
    command = [*lab.within(name), str(UNBROKEN), "edge", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode == 0:
        raise Failure(f"{command} was taken: {done.stdout}")
    return done.stderr


def rules(lab, name: str) -> list:
    """The rules of a node, as `ip` writes them."""
    return run("ip", "-n", lab.node(name), "rule").splitlines()


def has_rule(lab, name: str, priority: int) -> bool:
    return any(line.startswith(f"{priority}:") for line in rules(lab, name))


def routes(lab, name: str, table) -> list:
    return run("ip", "-n", lab.node(name), "route", "show", "table", table).splitlines()


def test_changed_file_is_applied(lab, note):
    """A second `up` with a changed file: the daemon runs with it; what needs devices to be made
    anew is refused, and changes nothing."""
    path = lab.configuration("h1")
    good = path.read_text()
    daemon = lab.state(lab.node("h1")) / "edged.pid"
    pid = daemon.read_text()
    changed = good.replace("fast_failover = true", f"fast_failover = false\nresync_s = {RESYNC_S}")
    try:
        path.write_text(changed)
        shown = lab.edge("h1", "up", "--config", path)
        if shown != "# the daemon has taken the changed configuration\n":
            raise Failure(f"'up' says: {shown}")
        if has_rule(lab, "h1", 4100):
            raise Failure(f"the daemon still has fast failover: {rules(lab, 'h1')}")
        if lab.edge("h1", "up", "--config", path):
            raise Failure("a third 'up' has found something to do")
        for old, new, why in (
            ("mtu = 8950", "mtu = 1400", "line 4: mtu is 1400, and 8950 in the edge that is up"),
            ('address = "10.2.1.1/31"', 'address = "10.2.1.1/30"', "p2 has 10.2.1.1/31 in the"),
        ):
            path.write_text(
                changed.replace(old, new).replace('"10.2.1.0"', '"10.2.1.2"', new[0] == "a")
            )
            said = refused(lab, "h1", "up", "--config", path)
            if why not in said or "`unbroken edge down` first" not in said:
                raise Failure(said)
    finally:
        path.write_text(good)
        lab.edge("h1", "up", "--config", path)
    if not has_rule(lab, "h1", 4100) or daemon.read_text() != pid:
        raise Failure(f"fast failover did not come back: {rules(lab, 'h1')}")
    settled(lab)


def test_changed_routing_is_applied(lab, note):
    """FRR gets another configuration, and runs anew with it."""
    path = lab.configuration("h1")
    good = path.read_text()
    slower = lambda: {p["receive-interval"] for p in lab.vtysh("h1", "show bfd peers")}
    try:
        path.write_text(good.replace(f"interval_ms = {BFD_MS}", "interval_ms = 70"))
        if "FRR is started anew" not in (shown := lab.edge("h1", "up", "--config", path)):
            raise Failure(f"'up' says: {shown}")
        wait_until(lambda: slower() == {70}, 30, "bfdd has the new interval")
    finally:
        path.write_text(good)
        lab.edge("h1", "up", "--config", path)
    settled(lab)


def test_rules_come_back(lab, note):
    """Who removes the rules that lead to our tables (networkd does) finds them back."""
    for name, priority in (("h1", 4100), ("t1", 4099), ("t1", 4100)):
        before = rules(lab, name)
        run("ip", "-n", lab.node(name), "rule", "del", "pref", priority)
        wait_until(lambda: rules(lab, name) == before, 12, f"rule {priority} of {name} is back")


def test_foreign_routes_and_rules_stay(lab, note):
    """`down` and `up` touch no route in our tables that is not ours, nor a rule that looks like
    one."""
    ip = ["ip", "-n", lab.node("h1")]
    run(*ip, "link", "add", "foreign", "up", "type", "veth", "peer", "name", "foreign1")
    run(*ip, "link", "set", "foreign1", "up")
    run(*ip, "addr", "add", "10.98.0.1/24", "dev", "foreign")
    for route in FOREIGN_ROUTES:
        run(*ip, "route", "add", *route.split())
    run(*ip, "rule", "add", *FOREIGN_RULE)
    there = lambda: [
        [r for t in (4100, 4101, "main") for r in routes(lab, "h1", t) if "10.99.0.0/16" in r],
        [r for r in rules(lab, "h1") if r.startswith("4100:")],
    ]
    try:
        for what in (["down"], ["up", "--config", lab.configuration("h1")]):
            lab.edge("h1", *what)
            found, led = there()
            if len(found) != 3:
                raise Failure(f"after {what[0]}: {found}")
            if len(led) != (1 if what[0] == "down" else 2):
                raise Failure(f"after {what[0]}: {led}")
    finally:
        run(*ip, "link", "del", "foreign")
        # Ours has another protocol.
        subprocess.run([*ip, "rule", "del", *FOREIGN_RULE, "protocol", "boot"], capture_output=True)
        lab.edge("h1", "up", "--config", lab.configuration("h1"))
    settled(lab)


def test_second_edge_is_refused(lab, note):
    """Another edge in the same network namespace would take the first one down."""
    path = lab.configuration("h1")
    other = path.with_name("other.toml")
    other.write_text(path.read_text().replace(f'"{lab.node("h1")}"', '"other"'))
    before = rules(lab, "h1")
    for more in ([], ["--dry-run"]):
        said = refused(lab, "h1", "up", "--config", other, *more)
        name = lab.node("h1")
        if f"the edge '{name}' is up in this network namespace" not in said:
            raise Failure(said)
    if rules(lab, "h1") != before or not lab.learned():
        raise Failure("the first one has changed")
    if lab.state("other").exists():
        raise Failure("the second one has left a folder")


def test_own_bgpd_dies(lab, note):
    """The daemon notices at once that its bgpd has ended, and starts another; neighbours and
    tenants are back."""
    before = lab.daemon("h1", "bgpd")
    fault_us = now_us()
    os.kill(before, signal.SIGKILL)

    def told(what: str, value) -> int | None:
        events = [e for e in lab.events("h1") if e["event"] == "frr" and e["time_us"] >= fault_us]
        return next((e["time_us"] - fault_us for e in events if e.get(what) == value), None)

    wait_until(lambda: told("started", ["bgpd"]), 20, "bgpd is started again")
    ended_us, started_us = told("ended", "bgpd"), told("started", ["bgpd"])
    if ended_us is None:
        raise Failure(f"its end was not noticed: {lab.events('h1')[-5:]}")
    if lab.daemon("h1", "bgpd") == before:
        raise Failure("it is the old one")
    settled(lab)
    wait_until(lab.learned, 60, "EVPN is back")
    back_us = now_us() - fault_us
    note(
        f"noticed after {ended_us / 1000:.1f} ms, started after {started_us / 1000:.1f} ms; "
        f"all sessions and addresses are back after {back_us / 1e6:.1f} s at most"
    )


def confined(unit: str, *command) -> list:
    """A command with the rights and the file system of a unit, as far as they can be had without
    systemd: its capabilities, and nothing to write to but what it names."""
    text = (ROOT / "docs/guide/edge" / unit).read_text()
    bounds = re.findall(r"^CapabilityBoundingSet=(.*)$", text, re.M)
    kept = re.findall(r"CAP_(\w+)", " ".join(bounds))
    assert len(kept) > 5 and "NoNewPrivileges=yes" in text and "ProtectSystem=strict" in text
    [folder] = re.findall(r"^RuntimeDirectory=(\S+)$", text, re.M)
    bounds = "-all," + ",".join(f"+{name.lower()}" for name in kept)
    writable = ("/proc", "/sys", "/dev", f"/run/{folder}")
    lines = [
        "mount --make-rslave /",
        *(f"mount --rbind {path} {path}" for path in writable),
        "mount -o remount,bind,ro /",
        *(f"mount -t tmpfs tmpfs {path}" for path in ("/tmp", "/var/tmp", "/home")),
        f"exec setpriv --no-new-privs --bounding-set {bounds} {shlex.join(map(str, command))}",
    ]
    return ["unshare", "--mount", "sh", "-ec", "\n".join(lines)]


def test_units_have_the_rights_that_they_need(lab, note):
    """The edge is set up, watched and taken down with what the units of systemd leave it; a daemon
    of FRR's that dies comes back."""
    config = lab.configuration("h2")
    lab.edge("h2", "down")
    try:
        set_up = "unbroken-edge.service"
        up = confined(set_up, UNBROKEN, "edge", "up", "--no-daemon", "--config", config)
        run(*lab.within("h2"), *up)
        daemon = confined("unbroken-edged.service", UNBROKEN, "edge", "daemon")
        process = lab.start("h2", "edged", daemon)
        wait_until(lambda: lab.learned() or process.ended(), 60, "EVPN has told of all hosts")
        os.kill(lab.daemon("h2", "bgpd"), signal.SIGKILL)
        wait_until(lambda: process.ended() or not lab.learned(), 60, "its death is noticed")
        wait_until(lambda: process.ended() or lab.learned(), 60, "bgpd is there again")
        if process.ended():
            raise Failure(process.output())
        run(*lab.within("h2"), *confined(set_up, UNBROKEN, "edge", "down"))
    finally:
        if not lab.state(lab.node("h2")).exists():
            lab.edge("h2", "up", "--config", config)
    settled(lab)
