#!/usr/bin/env python3
"""An ordinary user, without root: run, fault, status and events, a stream that outlives its NIC; and what other users have.

As root the suite takes the part of two users who have nothing (`setpriv`), with folders of their own that are removed at the
end and a copy of the build that they may read. As an ordinary user, or where there are no others, it is that user, and leaves out what takes two.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from lib import fabric as lab
from lib.fabric import Fabric
from lib.process import Failure, Skip, wait_until
from lib.suite import BUILD, Suite
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
        who = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "--no-new-privs", "--pdeathsig=KILL"]
        return [*who, *args]

    def command(self, *args, **env) -> subprocess.CompletedProcess:
        """Runs a command of `unbroken`; without further settings in the user's default folder."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("UNBROKEN_", "LD_PRELOAD"))}
        line = [str(a) for a in self.line([lab.UNBROKEN, *args])]
        return subprocess.run(line, env={**clean, **self.env, **env}, cwd=self.home, capture_output=True, text=True, timeout=30)


class Users:
    """A context: the users of this suite, and a build that they may read."""

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
        os.chown(self.path, user.uid, -1)
        self.env.update(user.env)

    def program_line(self, args):
        return self.user.line(args)

    command_line = program_line


def commands(logs):
    """run, fault, status, events, in the user's default folder."""
    with Users() as all_users:
        user = all_users.users[0]

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
        strangers = [p for p in (user.run / "unbroken").rglob("*") if p.lstat().st_uid != user.uid]
        open_to_others = [p for p in (user.run / "unbroken").iterdir() if p.is_file() and p.stat().st_mode & 0o077]
        if strangers or open_to_others:
            raise Failure(f"files of others {strangers}, files that others may read {open_to_others}")
        return f"as user {user.uid}"


def dead_nic(logs, tool):
    """A stream of an ordinary user outlives its NIC."""
    with Users() as all_users, Owned(logs, all_users.users[0]) as fabric:
        return survive(fabric, tool, STREAM, 3, "nic a/0 dead", False).note


def own_networks(logs):
    """Two users who both use their default folder have networks of their own; and root has another."""
    with Users() as all_users:
        if not all_users.root:
            raise Skip("only root can take the part of two users")
        octets = {}
        for user in all_users.users:
            shown = user.command("fabric", "show", "--json")
            if shown.returncode != 0:
                raise Failure(f"user {user.uid}: {shown.stderr}")
            octets[user.uid] = json.loads(shown.stdout)["octet"]
        if len(set(octets.values())) != len(octets):
            raise Failure(f"users share an octet: {octets}")
        # A device that is dead in one network lives in the other.
        one, two = all_users.users
        one.command("fault", "set", "nic a/0 down")
        if "PORT_ACTIVE" not in two.command("run", "--", "ibv_devinfo", "-d", "unb0").stdout:
            raise Failure("the fault of one user reached another")
        return f"octets {octets}"


def for_others(folder: Path, within=False) -> list:
    """What of a runtime folder others than its user may use."""
    paths = [*folder.rglob("*"), *([] if within else [folder])]
    modes = [(path, path.lstat().st_mode) for path in paths]
    return [f"{path} {stat.filemode(mode)}" for path, mode in modes if mode & 0o077 and not stat.S_ISLNK(mode)]


@contextmanager
def modes_left_open():
    """Whoever makes a file and sets no mode makes it for all."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def modes(logs):
    """Under a umask of 0, with a runtime folder that others may look into: nothing that is made in it is for others, and another user drains nothing."""
    with Users() as all_users, modes_left_open():
        user = all_users.users[0]
        for args in (["fabric", "show"], ["nic", "drain", "a/0"], ["run", "--", "ibv_devinfo", "-d", "unb0"]):
            done = user.command(*args)
            if done.returncode != 0:
                raise Failure(f"unbroken {' '.join(args)}: {done.stderr}")
        made = for_others(user.run / "unbroken")
        if made:
            raise Failure("for others: " + ", ".join(made))
        with Owned(logs, user) as fabric:
            fabric.path.chmod(0o755)
            server, client = fabric.pair("ib_write_bw", ["-F", "-s", 65536, "-D", 6])
            bench = fabric.start("bench", fabric.command_line([lab.UNBROKEN, "coll", "bench", "--hosts", "a,b", "--min", "1M", "--max", "1M", "--seconds", 3]))
            wait_until(lambda: client.ended() or any((fabric.path / "proc").iterdir()), 20, "status sockets")
            fabric.fault("nic b/0 down")
            fabric.clear()
            fabric.command("nic", "drain", "a/0")
            wait_until(lambda: bench.ended() or any((fabric.path / "coll").glob("*.sock")), 20, "status sockets of ranks")
            fabric.status()
            made = for_others(fabric.path, within=True)
            if made:
                raise Failure("for others: " + ", ".join(made))
            if all_users.root:
                # The name of a file is all that it takes to drain a NIC.
                touch = ["touch", str(fabric.path / "drained/b+0")]
                if subprocess.run(all_users.users[1].line(touch), capture_output=True).returncode == 0:
                    raise Failure("another user has drained a NIC")
            fabric.command("nic", "undrain", "a/0")
            for process in (bench, client, server):
                process.expect_success(60)
            kept = sum(1 for _ in fabric.path.rglob("*"))
            made = for_others(fabric.path, within=True)
            if made:
                raise Failure("for others: " + ", ".join(made))
        return f"{kept} files and folders"


def refusal(done, *words):
    """Fails unless a command ended by itself with an error that has these words."""
    if done.returncode <= 0 or any(word not in done.stderr for word in words):
        raise Failure(f"status {done.returncode}: {done.stderr}")


def folder_of_another(logs):
    """The runtime folder of another user: refused, in both directions, and nothing in it is touched."""
    with Users() as all_users:
        user = all_users.users[0]
        # /usr is root's, which has another number in a container.
        theirs = [("/usr", os.stat("/usr").st_uid)]
        if all_users.root:
            theirs.append((all_users.users[1].run, USERS[1]))
        for folder, owner in theirs:
            for command in (["status"], ["run", "--", "ibv_devinfo"], ["fault", "set", "nic a/0 dead"]):
                refused = user.command(*command, UNBROKEN_RUNTIME=str(folder))
                refusal(refused, f"belongs to user {owner}", f"runs as user {user.uid}", "UNBROKEN_RUNTIME")
        if all_users.root:
            as_root = {**os.environ, "UNBROKEN_RUNTIME": str(user.run)}
            done = subprocess.run([lab.UNBROKEN, "status"], env=as_root, capture_output=True, text=True, timeout=20)
            refusal(done, f"belongs to user {user.uid}", "runs as user 0")
            if list(user.run.iterdir()):
                raise Failure("root left files in the folder of another user")
        return ""


def in_the_way(logs):
    """Somebody else was first with the name of the default folder, or put a FIFO or a link into one's own: an error at once."""
    with Users() as all_users:
        if not all_users.root:
            raise Skip("only root can take the part of two users")
        user, other = all_users.users
        default = user.run / "unbroken"
        default.mkdir(mode=0o700)
        os.chown(default, other.uid, -1)
        refusal(user.command("status"), f"belongs to user {other.uid}")
        default.rmdir()
        # A link to a folder of his own: he would fill a folder that he never named.
        default.symlink_to(user.home)
        refusal(user.command("status"), "is not a folder")
        default.unlink()
        user.command("fabric", "show")
        for name, make in (("fifo", os.mkfifo), ("link", lambda path: os.symlink("/etc/passwd", path))):
            for file in ("events.jsonl", "fabric.toml", "alive.lock", "shm/fabric.page"):
                path = default / file
                path.unlink(missing_ok=True)
                make(path)
                os.chown(path, user.uid, -1, follow_symlinks=False)
                done = user.command("fault", "set", "nic a/0 down") if file != "alive.lock" else user.command("status")
                refusal(done, "regular file" if name == "fifo" else "symbolic link")
                path.unlink()
        return ""


def main() -> int:
    """Runs all of it."""
    suite = Suite("user")
    suite.case("run, fault, status, events", commands)
    for tool in ("ib_write_bw", "ib_send_bw"):
        suite.case(f"{tool}, nic dead", dead_nic, tool)
    suite.case("a umask of 0", modes)
    suite.case("two users, two networks", own_networks)
    suite.case("the folder of another user", folder_of_another)
    suite.case("what others put in the way", in_the_way)
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
