"""Who is not root beside a running edge: any user of the machine, and frr, as whom FRR's daemons
run.

Each attack is tried in a process of that user. None may change anything of root's, nor stop a link.
"""

import json
import os
import pwd
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lib import options
from lib.edge import Lab, lab_folder, run
from lib.fabric import UNBROKEN
from lib.process import Failure, Skip, wait_until
from lib.users import USERS, can_be_others

DAEMONS = ("zebra", "bfdd", "bgpd")
SOCKETS = ("bfdd.sock", "bfdd.vty", "bgpd.vty", "zebra.vty", "zserv.api")
# As FRR's bfdd takes it over its control socket: a request to add, in the first version.
BFD_REQUEST_ADD, BFD_VERSION = 2, 1
# Where FRR itself puts what it buffers of its logs.
FRR_BUFFERS = Path("/var/tmp/frr")
BFD_MS = 50
DECOY = "import socket, sys, time; time.sleep(600)"


pytestmark = [
    pytest.mark.edge,
    pytest.mark.root,
    pytest.mark.serial,
    pytest.mark.skipif(options.VM, reason="it needs no kernel of its own"),
]


@pytest.fixture(scope="module")
def two_hosts():
    """A lab for a umask of 0."""
    folder = lab_folder("edge_other_users")
    with modes_left_open(), Lab(folder, 2, "--bfd-ms", BFD_MS, "--fast-failover") as lab:
        wait_until(lab.both_ways_back, 60, "both ways are there")
        yield lab


@pytest.fixture
def lab(two_hosts, logs):
    """The lab, with the logs of a test."""
    two_hosts.logs = logs
    return two_hosts


def as_user(user: int, group: int, attack):
    """Runs `attack()` in a process of that user, with no other group, and gives what it returns (as
    JSON)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(group, group, group)
            os.setresuid(user, user, user)
            os.write(writer, json.dumps(attack()).encode())
        except BaseException as error:  # the parent is told, and nothing of the parent's runs here
            os.write(writer, json.dumps({"error": repr(error)}).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        answered = json.load(answer)
    os.waitpid(pid, 0)
    if isinstance(answered, dict) and "error" in answered:
        raise Failure(f"the attack itself failed: {answered['error']}")
    return answered


def tried(attempt) -> bool:
    """Whether an attempt got through."""
    try:
        attempt()
    except OSError:
        return False
    return True


def connects(path):
    """Whether somebody answers at a socket."""

    def attempt():
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(5)
            s.connect(str(path))

    return tried(attempt)


class Victims:
    """Root's: a file, a folder and a socket that nobody else may touch, a process, and how all of
    them were."""

    def __init__(self, folder: Path, decoy_of: Path):
        self.folder = folder
        folder.mkdir(mode=0o755)
        self.file = folder / "file"
        self.file.write_text("root's own\n")
        self.file.chmod(0o600)
        self.inner = folder / "inner"
        self.inner.mkdir(mode=0o700)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o600)
        self.listener.listen()
        self.listener.setblocking(False)
        # Its command line has what one of FRR's daemons has.
        self.decoy = subprocess.Popen(
            [sys.executable, "-c", DECOY, str(decoy_of), "daemon", *DAEMONS]
        )
        self.before = self.shown()

    def shown(self) -> dict:
        """What must stay as it is."""
        shown = {}
        for path in (self.file, self.inner, self.folder / "socket"):
            s = path.lstat()
            shown[path.name] = (s.st_ino, s.st_uid, s.st_gid, oct(s.st_mode))
        return {
            **shown,
            "text": self.file.read_text(),
            "within": sorted(p.name for p in self.inner.iterdir()),
        }

    def check(self, what: str):
        """Fails if something has changed."""
        after = self.shown()
        for key, value in self.before.items():
            if after[key] != value:
                raise Failure(f"{what}: root's {key} was {value} and is {after[key]}")
        if self.decoy.poll() is not None:
            raise Failure(f"{what}: a process of root's that is none of FRR's was ended")
        with suppress(BlockingIOError):
            self.listener.accept()
            raise Failure(f"{what}: root connected to a socket that it was led to")

    def close(self):
        """Ends what runs."""
        self.decoy.kill()
        self.decoy.wait()
        self.listener.close()


@contextmanager
def victims(decoy_of: Path):
    """Victims in a folder that all may pass through, so that nothing but their own modes holds
    others off."""
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o755)
        all_of_them = Victims(Path(home) / "root", decoy_of)
        try:
            yield all_of_them
        finally:
            all_of_them.close()


@contextmanager
def modes_left_open():
    """What is made here and sets no mode may be used by all."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def need_others():
    """Skips where there are no other users."""
    if not can_be_others():
        raise Skip("root of a container of one user cannot take another's part")


def linked(folder: str, names, target: Path) -> str:
    """A folder of this user's with links of these names to a file of root's, itself linked to by a
    name of /tmp that can be foreseen."""
    home = tempfile.mkdtemp()
    os.chmod(home, 0o777)
    for name in names:
        os.symlink(target, Path(home) / name)
    Path(folder).unlink(missing_ok=True)
    os.symlink(home, folder)
    return home


def unlinked(user: int, *paths):
    """Takes such links and folders away, as who made them."""

    def remove():
        for path in map(Path, paths):
            with suppress(OSError):
                path.unlink() if path.is_symlink() else [
                    [p.unlink() for p in path.iterdir()],
                    path.rmdir(),
                ]
        return True

    as_user(user, user, remove)


def in_the_way(lab) -> list:
    """Entries of all edges' folders that others may use: FRR's group may only pass through, and
    read FRR's configuration."""
    group = pwd.getpwnam("frr").pw_gid
    wrong = []
    for node in lab.nodes():
        for folder, _, files in os.walk(lab.state(node)):
            for path in [Path(folder), *(Path(folder) / f for f in files)]:
                s = path.lstat()
                mode = stat.S_IMODE(s.st_mode)
                of_group = (
                    0o010 if stat.S_ISDIR(s.st_mode) else 0o040 if path.suffix == ".conf" else 0
                )
                allowed = 0o700 | (of_group if s.st_gid == group and s.st_uid == 0 else 0)
                if mode & ~allowed:
                    wrong.append(f"{path} {oct(mode)}")
    return wrong


def test_another_user(lab, note):
    """Another user shuts no BFD session, talks to no daemon, and reads and writes nothing."""
    need_others()
    wrong = in_the_way(lab)
    if wrong:
        raise Failure("others may use " + ", ".join(wrong))
    state = lab.state(lab.node("h1"))
    known = [Path(folder) / file for folder, _, files in os.walk(state) for file in files]
    frr = [state / "frr", state / "frr/run"]
    sessions = [
        {
            "peer-address": f"10.{n}.1.0",
            "local-address": f"10.{n}.1.1",
            "local-interface": f"p{n}",
            "vrf-name": "default",
            "shutdown": True,
        }
        for n in (1, 2)
    ]

    def attack():
        done = []
        for path in [folder / name for folder in frr for name in SOCKETS]:
            if connects(path):
                done.append(f"connected to {path}")
        for folder in frr:
            with suppress(OSError), socket.socket(socket.AF_UNIX) as bfdd:
                bfdd.settimeout(5)
                bfdd.connect(str(folder / "bfdd.sock"))
                text = json.dumps({"ipv4": sessions}).encode()
                bfdd.sendall(
                    struct.pack(">IHBB", len(text), 1, BFD_REQUEST_ADD, BFD_VERSION) + text
                )
                done.append(f"bfdd says {bfdd.recv(4096)!r}")
        for path in known:
            done += [f"opened {path}"] * tried(lambda: path.open("rb").close())
        for folder in (state.parent, state, *frr):
            done += [f"listed {folder}"] * tried(lambda: os.listdir(folder))
            done += [f"made a file in {folder}"] * tried(lambda: (folder / "lock").touch())
        return done

    done = as_user(USERS[0], USERS[0], attack)
    if done:
        raise Failure("; ".join(done))
    if not lab.sessions_up() or not lab.both_ways_back():
        raise Failure("a session or a route is gone")
    user = [f"--reuid={USERS[0]}", f"--regid={USERS[0]}", "--clear-groups"]
    status = [*lab.within("h1"), "setpriv", *user, UNBROKEN, "edge", "status"]
    asked = subprocess.run(status, capture_output=True, text=True)
    if asked.returncode == 0 or "run this as root" not in asked.stderr:
        raise Failure(f"status for another user: {asked.stderr}")
    note(f"{len(known)} files and sockets, all closed")


def replaced_by_links(state: Path, target: Path, inner: Path, decoy: int) -> int:
    """As frr: makes links to root's of all that frr may replace, and writes into what frr may
    write; gives how many links there are."""
    links = 0
    for folder in (state / "frr", state / "frr/run", FRR_BUFFERS):
        with suppress(OSError):
            folder.chmod(0o755)
        for name in [
            "lock",
            *(f"{d}.{kind}" for d in DAEMONS for kind in ("conf", "conf.next", "pid", "log")),
            *SOCKETS,
        ]:
            path = folder / name
            if path.suffix == ".pid":
                with suppress(OSError):
                    path.write_text(str(decoy))
                    continue
            with suppress(OSError):
                path.unlink(missing_ok=True)
                path.symlink_to(target)
                links += 1
    for folder, name in (
        (state, "frr"),
        (state / "frr", "run"),
        (FRR_BUFFERS.parent, FRR_BUFFERS.name),
    ):
        with suppress(OSError):
            (folder / name).rename(folder / f"{name}.old")
            (folder / name).symlink_to(inner)
            links += 1
    return links


def put_back():
    """As frr: /var/tmp/frr as it was."""
    with suppress(OSError):
        FRR_BUFFERS.unlink()
        FRR_BUFFERS.with_name("frr.old").rename(FRR_BUFFERS)
    return True


def test_user_frr(lab, note):
    """frr makes links of all that it can, lies in its pid files and kills its daemons; root starts,
    configures, asks and ends them meanwhile."""
    need_others()
    user = pwd.getpwnam("frr")
    state, config = lab.state(lab.node("h1")), lab.configuration("h1")
    good = config.read_text()
    with victims(state / "frr") as root:
        target = lambda: replaced_by_links(state, root.file, root.inner, root.decoy.pid)
        to_socket = lambda: replaced_by_links(
            state, root.folder / "socket", root.inner, root.decoy.pid
        )
        as_frr = lambda attack: as_user(user.pw_uid, user.pw_gid, attack)
        try:
            old = {name: lab.daemon("h1", name) for name in DAEMONS}
            links = as_frr(target)
            as_frr(lambda: [os.kill(pid, signal.SIGKILL) for pid in old.values()])
            started = lambda: {
                name
                for e in lab.events("h1")
                if e["event"] == "frr"
                for name in e.get("started", [])
            }
            wait_until(lambda: set(DAEMONS) <= started(), 30, "the daemon starts FRR again")
            root.check("FRR started again")
            wait_until(lab.sessions_up, 60, "all BFD sessions are up again")
            for name in DAEMONS:
                blocked = re.search(
                    r"SigBlk:\s*(\w+)", Path(f"/proc/{lab.daemon('h1', name)}/status").read_text()
                )
                if int(blocked.group(1), 16) & 1 << (signal.SIGTERM - 1):
                    raise Failure(f"{name}, started by the daemon, cannot be told to end")
            as_frr(target)
            config.write_text(good.replace("interval_ms = ", "interval_ms = 1"))
            lab.edge("h1", "up", "--config", config)
            root.check("up with another configuration")
            wait_until(lab.sessions_up, 60, "all BFD sessions are up again")
            # Links to a socket of root's, where root would ask or listen.
            status = state / "status.json"
            os.kill(int((state / "edged.pid").read_text()), signal.SIGKILL)
            as_frr(to_socket)
            written = status.stat().st_mtime_ns
            lab.edge("h1", "up", "--config", config)
            wait_until(
                lambda: status.stat().st_mtime_ns != written,
                20,
                "the new daemon has looked for bfdd",
            )
            lab.edge("h1", "status")
            root.check("a new daemon, and status")
            as_frr(target)
            lab.edge("h1", "down")
            root.check("down")
        finally:
            as_frr(put_back)
            config.write_text(good)
            lab.edge("h1", "up", "--config", config)
    wait_until(lab.sessions_up, 60, "all BFD sessions are up again")
    note(f"{links} links led nowhere")


def test_number_of_another_daemon(lab, note):
    """The number that a dead daemon has left is that of another edge's daemon now: that one is
    neither taken for ours nor ended."""
    own, other = (lab.state(lab.node(n)) / "edged.pid" for n in ("h1", "h2"))
    living = int(other.read_text())
    handle = os.pidfd_open(int(own.read_text()))
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        wait_until(lambda: not _lives(handle), 10, "the daemon has ended")
    finally:
        os.close(handle)
    own.write_text(str(living))
    status = json.loads(lab.edge("h1", "status", "--json"))
    if status["daemon"] is not None:
        raise Failure(f"the daemon of h2 ({living}) is shown as that of h1")
    lab.edge("h1", "down")
    os.kill(living, 0)
    if json.loads(lab.edge("h2", "status", "--json"))["daemon"] != living:
        raise Failure("down at h1 has ended the daemon of h2")
    lab.edge("h1", "up", "--config", lab.configuration("h1"))
    wait_until(lab.sessions_up, 60, "all BFD sessions are up again")
    note("the other daemon runs on")


def _lives(handle: int) -> bool:
    try:
        signal.pidfd_send_signal(handle, 0)
    except ProcessLookupError:
        return False
    return True


def test_two_at_once(lab, note):
    """A second daemon is refused, and building a lab that is there leaves it alone."""
    second = subprocess.run(
        [*lab.within("h1"), str(UNBROKEN), "edge", "daemon"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    if second.returncode == 0 or "a daemon runs here already" not in second.stderr:
        raise Failure(f"a second daemon: {second.stderr}")
    again = subprocess.run(
        [str(UNBROKEN), "edge", "lab", "up", *map(str, lab.options)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if again.returncode == 0 or "already" not in again.stderr:
        raise Failure(f"a lab was built twice: {again.stderr}")
    run("ip", "-n", lab.node("h1"), "link", "show", "p1")
    if not lab.sessions_up():
        raise Failure("the lab that was there is gone")
    note("both refused")


def test_names_in_tmp(logs, note):
    """Another user is first with the names that a lab and a demo had in /tmp: nothing is written
    through his links."""
    need_others()
    user, prefix = USERS[0], f"ut{os.getpid()}n"
    nodes = [f"{prefix}{n}.toml" for n in ("h1", "h2", "t1", "t2")]
    with victims(logs) as root:
        folder = f"/tmp/unbroken-{prefix}lab"
        home = as_user(user, user, lambda: linked(folder, nodes, root.file))
        try:
            with Lab(logs, 2, prefix=prefix):
                root.check("lab up")
            root.check("lab down")
        finally:
            unlinked(user, folder, home)
        # The demo is a process whose number is known before it begins.
        wait = f"read go; exec {UNBROKEN} edge demo --json"
        demo = subprocess.Popen(
            ["sh", "-c", wait],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        nodes = [f"demo{demo.pid}{n}.toml" for n in ("h1", "h2", "t1", "t2")] + [
            "cut.nft",
            "runtime",
        ]
        folder = f"/tmp/unbroken-edge-demo-{demo.pid}"
        home = as_user(user, user, lambda: linked(folder, nodes, root.file))
        try:
            out, error = demo.communicate("go\n", timeout=180)
        finally:
            demo.kill()
            unlinked(user, folder, home)
        root.check("demo")
        if demo.returncode != 0 or "outage_us" not in out:
            raise Failure(f"the demo failed: {error}")
    note("links in /tmp were of no use")
