"""Slurm on one node, in a network namespace of its own: munged, slurmctld and slurmd of Debian,
with a folder, a key and a configuration that are theirs alone."""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from .namespaces import Namespaces
from .paths import BUILD, ROOT
from .process import Failure, Process, Skip, wait_until
from .users import USERS, can_be_others

MONITORING = ROOT / "packaging" / "monitoring"
NODE = "n1"
_UID = USERS[0]
_TOOLS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client"}
# Slurm looks for a hierarchy of cgroups also where nothing uses one.
_CGROUP = "CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/cgroup\nCgroupAutomount=no\n"
_CONF = """ClusterName=unbroken
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SlurmdParameters=config_overrides
FirstJobId={first_job}
KillWait=1
HealthCheckProgram={folder}/health-check
HealthCheckInterval=1
HealthCheckNodeState=ANY,CYCLE
TaskProlog={monitoring}/slurm-task-prolog.sh
TaskEpilog={folder}/task-epilog
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=4
PartitionName=all Nodes={node} Default=YES State=UP
"""
# What an administrator writes around ours: slurmd gives a health check nothing but the node's name.
_HEALTH_CHECK = """#!/bin/sh
export SLURM_CONF={folder}/slurm.conf UNBROKEN={folder}/unbroken-or-doctor
export DRAIN_WHEN=$(cat {folder}/drain-when)
{folder}/monitoring/slurm-health-check.sh >>{folder}/health-check.log 2>&1
echo ended >>{folder}/health-checks
"""
_DOCTOR = """#!/bin/sh
[ "$1" = doctor ] || exec {folder}/bin/unbroken "$@"
exit "$(cat {folder}/doctor)"
"""
_EPILOG = """#!/bin/sh
UNBROKEN={folder}/bin/unbroken exec {folder}/monitoring/slurm-task-epilog.sh
"""


class Slurm:
    """A context: a controller and a node, whose jobs are those of another user than root. All of it
    is ended at the end."""

    def __init__(self, logs: Path):
        for tool, package in _TOOLS.items():
            if shutil.which(tool) is None and not Path("/usr/sbin", tool).exists():
                raise Skip(f"'{tool}' is missing (Debian package {package})")
        if not can_be_others():
            raise Skip("slurmd runs jobs of others, which needs root")
        self.logs, self.daemons = logs, []
        self.net = Namespaces(rails=1)
        self.folder = Path(tempfile.mkdtemp(prefix="unbroken-test-slurm-"))
        # The first job's runtime folder, by what the prolog says, which no other test has.
        self.first_job = 1_000_000 + os.getpid()
        self.runtime = Path(f"/dev/shm/unbroken-{_UID}-job-{self.first_job}")
        self.jobs = []
        self.env = {"PATH": os.environ["PATH"], "SLURM_CONF": f"{self.folder}/slurm.conf"}

    def __enter__(self):
        try:
            self.net.__enter__()
            self._write()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for job in self.jobs:
            job.kill()
        if len(self.daemons) == 3:
            self.command("scancel", f"--user={_UID}", "--signal=KILL")
            self.command("scancel", f"--user={_UID}")
            wait_until(lambda: not self.says("squeue", "-h"), 30, "all jobs have ended")
        for daemon in reversed(self.daemons):
            # By SIGTERM slurmctld ends the process that runs its scripts, too.
            daemon.popen.terminate()
            wait_until(daemon.ended, 20, f"the end of {daemon.name}")
        self.net.__exit__()
        shutil.rmtree(self.runtime, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    # Set-up

    def _write(self):
        self.folder.chmod(0o755)
        for name in ("state", "spool", "bin", "monitoring"):
            (self.folder / name).mkdir(mode=0o755)
        self.kept = self.folder / "kept"
        self.kept.mkdir()
        os.chown(self.kept, _UID, -1)
        for name in ("unbroken", "libunbroken.so"):
            shutil.copy(BUILD / name, self.folder / "bin" / name)
            (self.folder / "bin" / name).chmod(0o755)
        for script in MONITORING.glob("slurm-*.sh"):
            shutil.copy(script, self.folder / "monitoring")
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        values = {
            "folder": self.folder,
            "monitoring": self.folder / "monitoring",
            "first_job": self.first_job,
            "node": NODE,
            "host": socket.gethostname().split(".")[0],
        }
        for name, text, mode in [
            ("slurm.conf", _CONF, 0o644),
            ("cgroup.conf", _CGROUP, 0o644),
            ("health-check", _HEALTH_CHECK, 0o755),
            ("unbroken-or-doctor", _DOCTOR, 0o755),
            ("task-epilog", _EPILOG, 0o755),
        ]:
            (self.folder / name).write_text(text.format(**values))
            (self.folder / name).chmod(mode)
        self.set(drain_when="degraded", doctor=1)

    def _start(self):
        files = {f"{n}-file": f"munge.{n}" for n in ("key", "pid", "log", "seed")}
        files["socket"] = "munge.socket"
        options = [f"--{option}={self.folder}/{name}" for option, name in files.items()]
        self._daemon("munged", "--foreground", "--force", *options)
        wait_until((self.folder / "munge.socket").exists, 20, "munged answers")
        self._daemon("slurmctld", "-D")
        self._daemon("slurmd", "-D", "-N", NODE)
        wait_until(lambda: self.state() == "IDLE", 60, "the node is idle")

    def _daemon(self, name: str, *args):
        path = shutil.which(name) or f"/usr/sbin/{name}"
        line = [*self.net.within("a"), path, *args]
        self.daemons.append(Process(name, line, self.logs / f"{name}.log", self.env))

    def set(self, drain_when: str | None = None, doctor: int | None = None):
        """When the health check drains (degraded, failed), and what `unbroken doctor` ends with."""
        for name, value in (("drain-when", drain_when), ("doctor", doctor)):
            if value is not None:
                (self.folder / f"{name}.new").write_text(f"{value}\n")
                (self.folder / f"{name}.new").rename(self.folder / name)

    # What is asked

    def command(self, *args) -> subprocess.CompletedProcess:
        """Runs a command of Slurm as root."""
        line = [*self.net.within("a"), *map(str, args)]
        return subprocess.run(line, env=self.env, capture_output=True, text=True, timeout=60)

    def says(self, *args) -> str:
        """What a command of Slurm prints."""
        done = self.command(*args)
        if done.returncode != 0:
            raise Failure(f"{' '.join(map(str, args))}: {done.stderr}")
        return done.stdout.strip()

    def reason(self) -> str:
        """Why the node is drained; `none` where it is not."""
        return self.says("sinfo", "-h", "-n", NODE, "-o", "%E")

    def state(self) -> str:
        """The node's state, such as ALLOCATED+DRAIN; nothing where there is no answer."""
        done = self.command("scontrol", "-o", "show", "node", NODE)
        return next((w[6:] for w in done.stdout.split() if w.startswith("State=")), "")

    def wait_for_health_checks(self):
        """Waits until one has begun and ended."""
        log = self.folder / "health-checks"
        count = lambda: len(log.read_text().splitlines()) if log.exists() else 0
        first = count()
        # One may be under way already.
        wait_until(lambda: count() >= first + 2, 60, "the health check has run")

    # Jobs

    def srun(self, name: str, *line, **env) -> Process:
        """Starts a job of a user, who asks for Unbroken."""
        who = ["setpriv", f"--reuid={_UID}", f"--regid={_UID}", "--clear-groups"]
        args = [*self.net.within("a"), *who, "srun", "--chdir=/", "-J", name, *line]
        env = {**self.env, "UNBROKEN_DEVICES": "all", "JOB_LOGS": str(self.kept), **env}
        env["PATH"] = f"{self.folder}/bin:{env['PATH']}"
        job = Process(name, args, self.logs / f"{name}.log", env)
        self.jobs.append(job)
        return job

    def unbroken(self, *args) -> str:
        """Runs a command of `unbroken` about the first job, as its user."""
        who = ["setpriv", f"--reuid={_UID}", f"--regid={_UID}", "--clear-groups"]
        line = [*who, self.folder / "bin/unbroken", "--runtime", self.runtime, *args]
        done = subprocess.run(
            [str(word) for word in line], env=self.env, capture_output=True, text=True, timeout=30
        )
        return done.stdout
