"""The lab for tests of other people's programs: `unbroken.lab`, its pytest plugin, the Action's
script and GitLab's job, on a program of rdma-core, with nothing of ours but the wheel."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lib.paths import ROOT
from lib.process import Failure, Skip
from lib.users import USERS, can_be_others
from lib.wheel import build, clean, examples, run

PAGE = ROOT / "docs/guide/lab.md"
LAB = ROOT / "packaging/action/lab.sh"
PROGRAM = "ibv_rc_pingpong"
SECONDS = 120


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this build."""
    if shutil.which(PROGRAM) is None:
        raise Skip(f"{PROGRAM} is missing (Debian package ibverbs-utils)")
    return build(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """Python with the wheel and the system's pytest."""
    folder = tmp_path_factory.mktemp("venv")
    run("/usr/bin/python3", "-m", "venv", "--system-site-packages", folder)
    pip = [folder / "bin/python", "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    run(*pip, wheel, env=clean())
    return folder / "bin/python"


def run_pytest(python: Path, folder: Path, program: str) -> subprocess.CompletedProcess:
    """Runs tests of somebody else in a folder of theirs."""
    (folder / "test_theirs.py").write_text(program)
    line = [python, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q"]
    told = {"capture_output": True, "text": True, "timeout": SECONDS}
    basetemp = f"--basetemp={folder}/base"
    return subprocess.run([*line, basetemp, "test_theirs.py"], cwd=folder, env=clean(), **told)


def test_the_example_of_the_guide(python, tmp_path):
    [program] = examples(PAGE, "pytest")
    done = run_pytest(python, tmp_path, program)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


def test_a_failed_test_shows_programs_and_events(python, tmp_path):
    """Assertions fail where they must, say what is so, and pytest shows what led there."""
    program = """
import pytest

def test_carried(fabric):
    fabric.host("a").run(["ibv_devinfo", "-d", "unb1"])
    fabric.nic("b/2").port_down()
    fabric.assert_carried("a/0", at_least=1)

def test_status(fabric):
    fabric.host("a").start(["sh", "-c", "echo nonsense; exit 3"]).succeed()

def test_names(fabric):
    fabric.nic("c/0")

def test_listener(fabric):
    fabric.host("a").start(["true"]).wait_for_listener(1)

@pytest.mark.fabric(hosts="ab")
def test_hosts(fabric): ...
"""
    done = run_pytest(python, tmp_path, program)
    assert done.returncode == 1 and "4 failed, 1 error" in done.stdout, done.stdout + done.stderr
    for part in [
        "NIC a/0 carried 0 bytes, not at least 1; all: a/0 0, a/1 0",
        "nic b/2 down",
        "ended with status 3; the end of its output",
        "nonsense",
        "there is no NIC c/0; there are a/0, ",
        "ended with status 0 before it listened on TCP port 1",
        "hosts='ab' is one name",
    ]:
        assert part in done.stdout, f"{part}: {done.stdout}"


@pytest.mark.smoke
def test_nothing_is_left(python, tmp_path):
    """Programs that still run are ended, and the runtime folder goes, also after an error."""
    program = """
from pathlib import Path
from unbroken.lab import Fabric
with Fabric(hosts=3, nics=1) as fabric:
    assert [h.name for h in fabric.hosts] == ["a", "b", "c"]
    program = fabric.host("c").start(["sleep", "600"])
    folder = fabric.runtime
    assert folder.exists()
    fabric.fault("cable a/0 cut", lasts="5s")
    assert [e["fault"] for e in fabric.events("fault")] == ["cable a/0 cut"]
    fabric.nic("a/0").heal()
    fabric.nic("a/0").heal()
assert program.status == -9, program.status
assert not folder.parent.exists()
try:
    Fabric(nics=1000)
except AssertionError as error:
    print(error)
"""
    said = run(python, "-c", program, env=clean(), cwd=tmp_path)
    assert "--nics" in said or "1000" in said, said


def own_network() -> list:
    """What goes before a command so that no other test has its TCP ports."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    line = ["unshare", *user, "--net", "sh", "-ec", 'ip link set lo up; exec "$@"', "sh"]
    probe = subprocess.run([*line, "true"], capture_output=True, text=True, timeout=20)
    if probe.returncode != 0:
        raise Skip(f"a network namespace cannot be made here: {probe.stderr.strip()}")
    return line


def lab(wheel: Path, folder: Path, commands: str, **more: str):
    """Runs the Action's script as a runner does."""
    env = clean(LAB_PACKAGE=str(wheel), RUNNER_TEMP=str(folder), LAB_RUN=commands, **more)
    env |= {"PIP_NO_INDEX": "1", "HOME": str(folder)}
    for name in ("GITHUB_ENV", "GITHUB_PATH", "GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"):
        env[name] = str(folder / name)
    told = {"capture_output": True, "text": True, "timeout": SECONDS}
    return subprocess.run([*own_network(), LAB], env=env, cwd=folder, **told)


def example_of_the_action() -> str:
    """The commands of the guide's workflow."""
    text = PAGE.read_text().split("run: |\n")[1].split("```")[0]
    return "\n".join(line.strip() for line in text.splitlines())


def test_the_action_runs_the_guides_commands(wheel, tmp_path):
    done = lab(wheel, tmp_path, example_of_the_action())
    assert done.returncode == 0, done.stdout + done.stderr
    summary = (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
    assert re.search(r"switched +host a qp \S+ a/0-b/0 to a/[1-3]", summary), summary
    runtime = (tmp_path / "GITHUB_OUTPUT").read_text().removeprefix("runtime=").strip()
    assert (tmp_path / "GITHUB_ENV").read_text() == f"UNBROKEN_RUNTIME={runtime}\n"
    shutil.rmtree(Path(runtime).parent)


@pytest.mark.parametrize("package", ["", "unbroken", "unbroken==0.1.0"])
def test_no_name_is_installed_from_pypi(package, tmp_path):
    """The name is not ours there: neither is it a default nor is it taken."""
    folder = tmp_path / "runner"
    env = {**clean(LAB_PACKAGE=package, RUNNER_TEMP=str(folder)), "PIP_NO_INDEX": "1"}
    told = {"capture_output": True, "text": True, "timeout": SECONDS}
    done = subprocess.run([LAB], env=env, cwd=tmp_path, **told)
    assert done.returncode == 2 and "not released" in done.stderr, done.stderr
    assert not folder.exists(), "something was installed"
    text = (ROOT / "packaging/action/gitlab-ci.yml").read_text()
    [check] = re.findall(r"^    - (case .*)$", text, re.M)
    done = subprocess.run(["bash", "-ec", check], env=env, **told)
    assert done.returncode == 2, "GitLab's job takes it"
    for place in [*sorted((ROOT / "packaging").rglob("*")), *sorted((ROOT / "docs").rglob("*.md"))]:
        if place.is_file():
            found = re.search(r"pip install (-\S+ )*unbroken\b", place.read_text(errors="ignore"))
            assert found is None, f"{place} installs a name"


def test_the_action_fails_with_its_commands(wheel, tmp_path):
    done = lab(wheel, tmp_path, "exit 9", LAB_HOSTS="left,right", LAB_NICS="1")
    assert done.returncode == 9 and "hosts left, right with 1 NICs" in done.stdout
    runtime = (tmp_path / "GITHUB_OUTPUT").read_text().removeprefix("runtime=").strip()
    shutil.rmtree(Path(runtime).parent)


def test_the_action_as_another_user(wheel, tmp_path_factory):
    """Without root, with no capability, and a home of its own."""
    if not can_be_others():
        raise Skip("only root can be somebody else")
    folder = Path("/tmp") / f"unbroken-lab-{os.getpid()}"
    folder.mkdir()
    try:
        shutil.copy(wheel, folder)
        os.chown(folder, USERS[0], USERS[0])
        ids = [f"--reuid={USERS[0]}", f"--regid={USERS[0]}", "--clear-groups"]
        commands = "id -u; echo in $UNBROKEN_RUNTIME\n" + example_of_the_action()
        theirs = folder / LAB.name
        shutil.copy(LAB, theirs)
        env = clean(LAB_PACKAGE=str(folder / wheel.name), RUNNER_TEMP=str(folder), HOME=str(folder))
        env |= {"LAB_RUN": commands, "PIP_NO_INDEX": "1"}
        told = {"capture_output": True, "text": True, "timeout": SECONDS, "cwd": folder}
        line = [*own_network(), "setpriv", *ids, "--inh-caps=-all", theirs]
        done = subprocess.run(line, env=env, **told)
        said = done.stdout + done.stderr
        assert f"{USERS[0]}\n" in done.stdout and "iters in" in done.stdout, said
        assert not Path(re.search(r"^in (\S+)$", said, re.M).group(1)).parent.exists()
    finally:
        shutil.rmtree(folder)


def test_gitlabs_job(wheel, tmp_path):
    """Its lines, as GitLab types them; what it installs by apt is there."""
    text = (ROOT / "packaging/action/gitlab-ci.yml").read_text()
    script = text.split("  script:\n")[1].split("  artifacts:")[0]
    lines = re.findall(r"^    - (.*)$", script, re.M)
    [pingpong] = re.findall(r"^    PINGPONG: (.*)$", text, re.M)
    env = clean(LAB_PACKAGE=str(wheel), CI_PROJECT_DIR=str(tmp_path), PINGPONG=pingpong)
    env |= {"PIP_NO_INDEX": "1", "XDG_RUNTIME_DIR": str(tmp_path)}
    told = {"capture_output": True, "text": True, "timeout": SECONDS, "cwd": tmp_path}
    line = [*own_network(), "bash", "-eo", "pipefail", "-c", "\n".join(lines)]
    done = subprocess.run(line, env=env, **told)
    assert done.returncode == 0, done.stdout + done.stderr
    if "a/0-b/0 to a/" not in (tmp_path / "events.txt").read_text():
        raise Failure(done.stdout)
