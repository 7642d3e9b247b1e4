"""An ordinary user, without root: run, fault, status and events, a stream that outlives its NIC;
and what other users may do.

As root the tests run as two users who have nothing (`setpriv`), with folders of their own that
are removed at the end and a copy of the build that they may read. As an ordinary user, or where
there are no others, they run as that user, and what takes two is skipped.
"""

import json
import os
import shutil
import stat
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from lib import fabric as lab
from lib.fabric import Fabric
from lib.paths import BUILD
from lib.process import Failure, Skip, wait_until
from lib.traffic import survive
from lib.users import USERS, can_be_others

STREAM = ["-F", "-s", 65536, "-q", 2]


class User:
    """Somebody: how he runs programs, and his folders."""

    def __init__(self, base: Path, uid: int):
        self.uid, self.env = uid, {}
        self.home, self.run = base / f"home-{uid}", base / f"run-{uid}"
        for name, folder in (("HOME", self.home), ("XDG_RUNTIME_DIR", self.run)):
            folder.mkdir(mode=0o700)
            os.chown(folder, uid, -1)
            self.env[name] = str(folder)

    def line(self, args: list) -> list:
        """The command line that runs something as this user."""
        if self.uid == os.geteuid():
            return args
        who = [f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "--no-new-privs"]
        return ["setpriv", *who, "--pdeathsig=KILL", *args]

    def command(self, *args, **env) -> subprocess.CompletedProcess:
        """Runs a command of `unbroken`; without further settings in the user's default folder."""
        ours = ("UNBROKEN_", "LD_PRELOAD")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        line = [str(a) for a in self.line([lab.UNBROKEN, *args])]
        options = {"cwd": self.home, "capture_output": True, "text": True, "timeout": 30}
        return subprocess.run(line, env={**clean, **self.env, **env}, **options)


class Users:
    """A context: the users of these tests, and a build that they may read."""

    def __enter__(self):
        self.base = Path(tempfile.mkdtemp(prefix="unbroken-test-user-"))
        self.base.chmod(0o755)
        self.root = can_be_others()
        if self.root and shutil.which("setpriv") is None:
            self.__exit__()
            raise Skip("'setpriv' is missing (Debian package util-linux)")
        build = self.base / "build"
        build.mkdir(mode=0o755)
        for name in ("unbroken", "libunbroken.so"):
            shutil.copy(BUILD / name, build / name)
            (build / name).chmod(0o755)
        self.before, lab.UNBROKEN = lab.UNBROKEN, build / "unbroken"
        self.users = [User(self.base, uid) for uid in (USERS if self.root else [os.geteuid()])]
        return self

    def __exit__(self, *_):
        lab.UNBROKEN = getattr(self, "before", lab.UNBROKEN)
        for user in getattr(self, "users", []):
            # Its octet goes back.
            user.command("fabric", "down", "--force")
        shutil.rmtree(self.base, ignore_errors=True)


class Owned(Fabric):
    """A fabric in which everything is one user's."""

    def __init__(self, logs, user: User):
        self.user = user
        super().__init__(logs)
        for folder in self.path, self.files:
            os.chown(folder, user.uid, -1)
        self.env.update(user.env)

    def program_line(self, args):
        return self.user.line(args)

    command_line = program_line


@pytest.fixture
def users():
    """The users: two of them where this process may become others, else itself."""
    with Users() as all_users:
        yield all_users


def need_two(users):
    """Skips where there are no two users."""
    if not users.root:
        raise Skip("only root can run programs as two users")


@pytest.mark.smoke
def test_commands(users, note):
    """run, fault, status, events, in the user's default folder."""
    user = users.users[0]

    def good(*args):
        done = user.command(*args)
        if done.returncode != 0:
            raise Failure(f"unbroken {' '.join(args)}: status {done.returncode}: {done.stderr}")
        return done.stdout

    if "PORT_ACTIVE" not in good("run", "--", "ibv_devinfo", "-d", "unb0"):
        raise Failure("ibv_devinfo does not show an active port")
    good("fault", "set", "nic a/0 down")
    if "PORT_DOWN" not in good("run", "--", "ibv_devinfo", "-d", "unb0"):
        raise Failure("ibv_devinfo does not show a port that is down")
    status = json.loads(good("status", "--json"))
    if Path(status["runtime"]) != user.run / "unbroken":
        raise Failure(f"the runtime folder is {status['runtime']}")
    if {n["nic"]: n["state"] for n in status["nics"]}["a/0"] != "down":
        raise Failure("the status does not show the fault")
    good("fault", "clear")
    kinds = [json.loads(line)["event"] for line in good("events", "--json").splitlines()]
    if "fault" not in kinds or kinds[-1] != "fault-clear":
        raise Failure(f"events {kinds}")
    folder = user.run / "unbroken"
    of_others = [p for p in folder.rglob("*") if p.lstat().st_uid != user.uid]
    readable = [p for p in folder.iterdir() if p.is_file() and p.stat().st_mode & 0o077]
    if of_others or readable:
        raise Failure(f"files of others {of_others}, files that others may read {readable}")
    note(f"as user {user.uid}")


@pytest.mark.parametrize("tool", ["ib_write_bw", "ib_send_bw"])
def test_nic_dead(users, logs, note, tool):
    """A stream of an ordinary user outlives its NIC."""
    with Owned(logs, users.users[0]) as fabric:
        note(survive(fabric, tool, STREAM, 3, "nic a/0 dead", False).note)


def test_two_users_two_networks(users, note):
    """Two users who both use their default folder have networks of their own; and root has
    another."""
    need_two(users)
    octets = {}
    for user in users.users:
        user.command("fabric", "up")
        shown = user.command("fabric", "show", "--json")
        if shown.returncode != 0:
            raise Failure(f"user {user.uid}: {shown.stderr}")
        octets[user.uid] = json.loads(shown.stdout)["octet"]
    if len(set(octets.values())) != len(octets):
        raise Failure(f"users share an octet: {octets}")
    # A device that is dead in one network lives in the other.
    one, two = users.users
    one.command("fault", "set", "nic a/0 down")
    shown = two.command("run", "--", "ibv_devinfo", "-d", "unb0")
    if "PORT_ACTIVE" not in shown.stdout:
        raise Failure("the fault of one user reached another")
    note(f"octets {octets}")


def for_others(folder: Path, within=False) -> list:
    """What of a runtime folder others than its user may use."""
    paths = [*folder.rglob("*"), *([] if within else [folder])]
    modes = [(path, path.lstat().st_mode) for path in paths]
    return [
        f"{path} {stat.filemode(mode)}"
        for path, mode in modes
        if mode & 0o077 and not stat.S_ISLNK(mode)
    ]


@contextmanager
def modes_left_open():
    """Whoever makes a file and sets no mode makes it for all."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def test_umask_of_0(users, logs, note):
    """Under a umask of 0, with a runtime folder that others may look into: nothing that is made
    in it is for others, and another user drains nothing."""
    with modes_left_open():
        user = users.users[0]
        for args in (
            ["fabric", "up"],
            ["nic", "drain", "a/0"],
            ["run", "--", "ibv_devinfo", "-d", "unb0"],
        ):
            done = user.command(*args)
            if done.returncode != 0:
                raise Failure(f"unbroken {' '.join(args)}: {done.stderr}")
        expect_nothing(for_others(user.run / "unbroken"))
        with Owned(logs, user) as fabric:
            fabric.path.chmod(0o755)
            processes = start_programs(fabric)
            fabric.status()
            expect_nothing(for_others(fabric.path, within=True))
            if users.root:
                # The name of a file is all that it takes to drain a NIC.
                touch = ["touch", str(fabric.path / "drained/b+0")]
                done = subprocess.run(users.users[1].line(touch), capture_output=True)
                if done.returncode == 0:
                    raise Failure("another user has drained a NIC")
            fabric.command("nic", "undrain", "a/0")
            for process in processes:
                process.expect_success(60)
            kept = sum(1 for _ in fabric.path.rglob("*"))
            expect_nothing(for_others(fabric.path, within=True))
        note(f"{kept} files and folders")


def expect_nothing(made_for_others: list):
    """Fails where something is for others."""
    if made_for_others:
        raise Failure("for others: " + ", ".join(made_for_others))


def start_programs(fabric) -> list:
    """Starts programs and commands that make every kind of file in a runtime folder."""
    server, client = fabric.pair("ib_write_bw", ["-F", "-s", 65536, "-D", 6])
    line = "coll bench --hosts a,b --min 1M --max 1M --for 3s".split()
    bench = fabric.start("bench", fabric.command_line([lab.UNBROKEN, *line]))
    there = lambda: client.ended() or any((fabric.path / "proc").iterdir())
    wait_until(there, 20, "status sockets")
    fabric.fault("nic b/0 down")
    fabric.clear()
    fabric.command("nic", "drain", "a/0")
    there = lambda: bench.ended() or any((fabric.path / "coll").glob("*.sock"))
    wait_until(there, 20, "status sockets of ranks")
    return [bench, client, server]


def refusal(done, *words):
    """Fails unless a command ended by itself with an error that has these words."""
    if done.returncode <= 0 or any(word not in done.stderr for word in words):
        raise Failure(f"status {done.returncode}: {done.stderr}")


@pytest.mark.smoke
def test_folder_of_another_user(users):
    """The runtime folder of another user: refused, in both directions, and nothing in it is
    touched."""
    user = users.users[0]
    # /usr is root's, which has another number in a container.
    theirs = [("/usr", os.stat("/usr").st_uid)]
    if users.root:
        theirs.append((users.users[1].run, USERS[1]))
    commands = [["status"], ["run", "--", "ibv_devinfo"], ["fault", "set", "nic a/0 dead"]]
    for folder, owner in theirs:
        words = [f"belongs to user {owner}", f"runs as user {user.uid}", "UNBROKEN_RUNTIME"]
        for command in commands:
            refused = user.command(*command, UNBROKEN_RUNTIME=str(folder))
            refusal(refused, *words)
    if users.root:
        as_root = {**os.environ, "UNBROKEN_RUNTIME": str(user.run)}
        options = {"env": as_root, "capture_output": True, "text": True, "timeout": 20}
        done = subprocess.run([lab.UNBROKEN, "status"], **options)
        refusal(done, f"belongs to user {user.uid}", "runs as user 0")
        if list(user.run.iterdir()):
            raise Failure("root left files in the folder of another user")


def test_host_edge_is_for_root(users):
    """Whoever is not root is told so in one line, and not that the kernel lacks modules."""
    user = next((user for user in users.users if user.uid != 0), None)
    if user is None:
        pytest.skip("there is no other user than root here")
    for args in ("demo", "lab up", "up", "down", "drain p1"):
        done = user.command("edge", *args.split())
        if done.returncode != 1 or "run it as root" not in done.stderr:
            raise Failure(f"edge {args}: {done.stderr}")
        if len(done.stderr.splitlines()) != 1:
            raise Failure(f"edge {args} says more than one line: {done.stderr}")
    checked = user.command("edge", "check").stdout
    if "MISSING  root" not in checked or "were not tried" not in checked:
        raise Failure(f"edge check does not say what it could not try: {checked}")
    if "kernel module" in checked:
        raise Failure(f"edge check takes a lack of rights for a lack of modules: {checked}")


def test_files_of_others_in_the_way(users):
    """Somebody else was first with the name of the default folder, or put a FIFO or a link into
    one's own: an error at once."""
    need_two(users)
    user, other = users.users
    default = user.run / "unbroken"
    default.mkdir(mode=0o700)
    os.chown(default, other.uid, -1)
    refusal(user.command("status"), f"belongs to user {other.uid}")
    default.rmdir()
    # A link to a folder of his own: he would fill a folder that he never named.
    default.symlink_to(user.home)
    refusal(user.command("status"), "is not a folder")
    default.unlink()
    user.command("fabric", "up")
    link = lambda path: os.symlink("/etc/passwd", path)
    for name, make in (("regular file", os.mkfifo), ("symbolic link", link)):
        for file in ("events.jsonl", "fabric.toml", "alive.lock", "shm/fabric.page"):
            path = default / file
            path.unlink(missing_ok=True)
            make(path)
            os.chown(path, user.uid, -1, follow_symlinks=False)
            line = ["status"] if file == "alive.lock" else ["fault", "set", "nic a/0 down"]
            refusal(user.command(*line), name)
            path.unlink()
