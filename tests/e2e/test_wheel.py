"""The Python package: a wheel that holds its C library, loaded when it is first needed."""

import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "libunbroken_coll.so"
VERSION = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M).group(1)


def run(*args, env=None, cwd=None) -> str:
    """Runs a command to its end; gives what it printed, or fails with it."""
    done = subprocess.run(
        [str(a) for a in args], env=env, cwd=cwd, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{args}: status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def clean(**more: str) -> dict:
    """An environment in which nothing says where the library is."""
    others = ("UNBROKEN_", "LD_", "PYTHON", "MAKE", "MFLAGS", "VIRTUAL_ENV")
    return {**{k: v for k, v in os.environ.items() if not k.startswith(others)}, **more}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this build."""
    folder = tmp_path_factory.mktemp("wheels")
    run(ROOT / "packaging/wheel.sh", "target/release", folder, env=clean(), cwd=ROOT)
    [found] = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """Python in a fresh virtual environment with the wheel, and nothing else."""
    folder = tmp_path_factory.mktemp("venv")
    run("/usr/bin/python3", "-m", "venv", folder)
    pip = [folder / "bin/python", "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    run(*pip, wheel, env=clean())
    return folder / "bin/python"


def test_the_wheel_holds_library_and_types(wheel):
    assert re.fullmatch(rf"unbroken-{re.escape(VERSION)}-py3-none-linux_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"unbroken/{LIBRARY}", "unbroken/py.typed", "unbroken/coll.py"} <= set(names)


def test_the_library_is_loaded_when_it_is_first_needed(python, tmp_path):
    program = f"""
import unbroken, unbroken.coll
mapped = lambda: {{l.split()[-1] for l in open("/proc/self/maps") if "{LIBRARY}" in l}}
assert not mapped(), "it is loaded by the import"
assert unbroken.__version__ == "{VERSION}"
print(unbroken.coll.unique_id())
[path] = mapped()
assert path == unbroken.__file__.replace("__init__.py", "{LIBRARY}"), path
"""
    first, second = (run(python, "-c", program, env=clean(), cwd=tmp_path) for _ in range(2))
    assert len(first) > 20 and first != second, "an id is a secret of its own"


def test_one_rank_adds_by_itself(python, tmp_path):
    program = """
import array
from unbroken.coll import Communicator, Op, Type, unique_id
data = array.array("f", range(1000))
alone = Communicator(1, 0, unique_id())
address = data.buffer_info()[0]
alone.begin("AllReduce", address, address, len(data), Type.FLOAT32, Op.SUM).end()
assert list(data) == list(range(1000)), "the sum of one is itself"
assert alone.counters().operations == 1
alone.destroy()
"""
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    run(python, "-c", program, env=clean(XDG_RUNTIME_DIR=str(runtime)), cwd=tmp_path)


def test_a_library_that_is_not_there_is_named(tmp_path):
    program = """
from unbroken import coll
try:
    coll.unique_id()
except OSError as error:
    print(error)
"""
    env = clean(PYTHONPATH=str(ROOT / "python/unbroken"), UNBROKEN_COLLECTIVE_LIBRARY="/no/such.so")
    said = run("/usr/bin/python3", "-c", program, env=env, cwd=tmp_path)
    assert "/no/such.so cannot be loaded" in said and "UNBROKEN_COLLECTIVE_LIBRARY" in said
