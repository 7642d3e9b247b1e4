"""podman with an image of a clean Debian.

podman and crun run in a mount namespace of their own with a file system of cgroups that crun takes
(it refuses those of two versions side by side), an empty /run, and storage of their own.
"""

import shutil
import subprocess
from pathlib import Path

from .clean_debian import made
from .process import Skip

IMAGE = "localhost/clean-debian"
# Crun can set no others where this user may not raise limits.
LIMITS = ["--ulimit", "nofile=1024:4096", "--ulimit", "nproc=1000:1000"]
OWN = (
    "mount --make-rprivate / && umount -R /sys/fs/cgroup && "
    "mount -t cgroup2 none /sys/fs/cgroup && mount -t tmpfs none /run && mkdir /run/cdi && "
    'cp "$0" /run/cdi/unbroken.json && exec "$@"'
)
SECONDS = 120


class Podman:
    """podman with an image of a clean Debian, and the devices of a specification."""

    def __init__(self, folder: Path):
        if shutil.which("podman") is None or shutil.which("crun") is None:
            raise Skip("'podman' or 'crun' is missing (Debian packages podman, crun)")
        self.folder, self.spec = folder, folder / "unbroken.json"
        self.spec.write_text("{}")
        tree = subprocess.Popen(["tar", "-C", made(), "-c", "."], stdout=subprocess.PIPE)
        line = self.line(["import", "-q", "-", IMAGE])
        done = subprocess.run(line, stdin=tree.stdout, capture_output=True, text=True)
        tree.stdout.close()
        if tree.wait() != 0 or done.returncode != 0:
            raise Skip(f"podman imports no image here: {done.stderr.strip()[-300:]}")
        probe = self.run("true")
        if probe.returncode != 0:
            raise Skip(f"podman runs no container here: {probe.stderr.strip()[-300:]}")

    def line(self, args: list) -> list:
        """The command line of podman with these arguments."""
        own = ["unshare", "--mount", "sh", "-c", OWN, self.spec]
        places = ["--root", self.folder / "storage", "--runroot", self.folder / "run"]
        return [str(w) for w in [*own, "podman", "--cgroup-manager=cgroupfs", *places, *args]]

    def container(
        self, *args, device: str | None = None, env: tuple = (), network="host", options: tuple = ()
    ) -> list:
        """The command line of a container that runs a program with a device."""
        devices = ["--device", f"unbroken.dev/nic={device}"] if device else []
        settings = [word for setting in env for word in ("--env", setting)]
        own = ["--rm", "--network", network, "--cgroups=disabled", *LIMITS, *options]
        return self.line(["run", *own, *devices, *settings, IMAGE, *args])

    def run(self, *args, **more) -> subprocess.CompletedProcess:
        """Runs a container to its end."""
        line = self.container(*args, **more)
        return subprocess.run(line, capture_output=True, text=True, timeout=SECONDS)
