"""A clean Debian: a tree of debootstrap with few packages, and programs that run in it.

The tree is made once, in $XDG_CACHE_HOME/unbroken, by default ~/.cache/unbroken; each test gets a
copy. Programs run in it with mount and PID namespaces of their own, as root or, in a user
namespace, as somebody who is nobody here.
"""

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from .process import Failure, Skip
from .users import USERS, can_be_others

SUITE = "bookworm"
# For man pages, the programs under test, and the wheel. No compiler.
PACKAGES = (
    "man-db perftest ibverbs-utils libibverbs-dev python3-venv python3-pytest python3-numpy"
).split()
DEFAULT_MIRROR = "http://deb.debian.org/debian"
MAKE_SECONDS = 900
RUN_SECONDS = 180
FREE_BYTES = 3 << 30
# What a program sees of the machine: nothing but its processes.
_ENTER = (
    "mount -t proc proc $0/proc && mount -t tmpfs none $0/dev/shm && "
    'mount -t tmpfs none $0/home && exec chroot "$0" "$@"'
)
_OWN = ["--mount", "--pid", "--fork", "--kill-child"]


def mirror() -> str:
    """Where this machine has its packages from."""
    lists = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    texts = [path.read_text() for path in lists if path.is_file()]
    found = re.search(r"^(?:deb\s.*?|URIs:\s*)(https?://\S*debian/?)\s", "\n".join(texts), re.M)
    return found.group(1) if found else DEFAULT_MIRROR


def made() -> Path:
    """The tree, made where there is none. Skips where that cannot be."""
    if not can_be_others():
        raise Skip("a clean Debian needs root (debootstrap)")
    tool = shutil.which("debootstrap") or "/usr/sbin/debootstrap"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unbroken"
    cache.mkdir(parents=True, exist_ok=True)
    words = "\n".join([SUITE, *PACKAGES])
    number = subprocess.run(["cksum"], input=words.encode(), capture_output=True, check=True)
    tree = cache / f"debian-{number.stdout.split()[0].decode()}"
    # Another run of the tests may make it now.
    with open(cache / "debian.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (tree / "complete").exists():
            return tree
        if not os.path.exists(tool):
            raise Skip("'debootstrap' is missing (Debian package debootstrap)")
        if shutil.disk_usage(cache).free < FREE_BYTES:
            raise Skip(f"{cache} has less than {FREE_BYTES >> 30} GiB free")
        shutil.rmtree(tree, ignore_errors=True)
        include = f"--include={','.join(PACKAGES)}"
        line = [tool, "--variant=minbase", include, SUITE, tree, mirror()]
        done = subprocess.run(line, capture_output=True, text=True, timeout=MAKE_SECONDS)
        if done.returncode != 0:
            raise Skip(f"debootstrap: {(done.stdout + done.stderr).strip()[-300:]}")
        (tree / "complete").touch()
    return tree


class CleanDebian:
    """A context: a copy of the tree, which is taken away at the end."""

    def __enter__(self) -> "CleanDebian":
        source = made()
        # Others must get to it, which they do not in pytest's folders.
        self.folder = Path(tempfile.mkdtemp(prefix="unbroken-clean-"))
        self.folder.chmod(0o755)
        self.tree = self.folder / "tree"
        subprocess.run(["cp", "-a", "--reflink=auto", source, self.tree], check=True)
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.folder)

    def put(self, *files: Path) -> str:
        """Copies files into it; gives their folder as programs in it see it."""
        (self.tree / "root").chmod(0o755)
        for file in files:
            shutil.copy(file, self.tree / "root")
        return "/root"

    def files(self) -> set:
        """All paths in it, but for caches, logs and dpkg's own files."""
        kept = ("proc", "sys", "dev", "root", "var/cache", "var/log", "var/lib/dpkg", "var/lib/apt")
        found = set()
        for folder, folders, names in os.walk(self.tree):
            inside = os.path.relpath(folder, self.tree)
            folders[:] = [f for f in folders if os.path.normpath(f"{inside}/{f}") not in kept]
            found.update(os.path.normpath(f"{inside}/{name}") for name in [*names, *folders])
        return found

    def run(self, script: str, root=True) -> str:
        """Runs a shell script in it; gives what it printed. Whoever is not root there has a home in
        memory and may write nowhere else."""
        line = ["unshare", *_OWN, "sh", "-ec", _ENTER, self.tree, "sh", "-ec", script]
        if not root:
            ids = [f"--reuid={USERS[0]}", f"--regid={USERS[0]}", "--clear-groups"]
            # Root of a user namespace, which is nobody outside.
            line = ["setpriv", *ids, "unshare", "--user", "--map-root-user", *line[1:]]
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root" if root else "/home"}
        env |= {"LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
        told = {"capture_output": True, "text": True, "timeout": RUN_SECONDS}
        done = subprocess.run([str(word) for word in line], env=env, cwd="/", **told)
        if done.returncode != 0:
            raise Failure(f"{script}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout
