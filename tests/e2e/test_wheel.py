"""The Python package: a wheel that holds its C libraries, each loaded when it is first needed."""

import json
import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from lib.paths import ROOT
from lib.schemas import check_schema
from lib.wheel import build, clean, examples, run

LIBRARY = "libunbroken_coll.so"
SIMULATIONS = "libunbroken_simulations.so"
# What the command is made of.
COMMAND = ("unbroken", "libunbroken.so", "unbroken-verifier")
# Pages with programs that need nothing but the wheel, and their headings.
EXAMPLES = {
    "python/unbroken/README.md": "What does a lost NIC cost?",
    "docs/guide/planning.md": "From Python",
}
VERSION = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M).group(1)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this build."""
    return build(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """Python in a fresh virtual environment with the wheel, and nothing else."""
    folder = tmp_path_factory.mktemp("venv")
    run("/usr/bin/python3", "-m", "venv", folder)
    pip = [folder / "bin/python", "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    run(*pip, wheel, env=clean())
    return folder / "bin/python"


def test_the_wheel_holds_libraries_and_types(wheel):
    platform = rf"manylinux_2_\d+_{os.uname().machine}"
    assert re.fullmatch(rf"unbroken-{re.escape(VERSION)}-py3-none-{platform}\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    files = {LIBRARY, SIMULATIONS, "py.typed", "coll.py", "simulate/__init__.py", "lab/plugin.py"}
    files |= {f"bin/{name}" for name in COMMAND}
    assert {f"unbroken/{name}" for name in files} <= set(names)
    metadata = zipfile.ZipFile(wheel).read(f"unbroken-{VERSION}.dist-info/METADATA").decode()
    assert re.search(r"^Requires-Dist: ray ?; extra == .ray.$", metadata, flags=re.M), metadata


def glibc_of(path: Path) -> int:
    """The second number of the newest glibc 2 whose symbols a file asks for."""
    return max(int(n) for n in re.findall(r"GLIBC_2\.(\d+)", run("objdump", "-T", path)))


def test_the_tag_says_the_glibc_that_is_needed(wheel, tmp_path, note):
    """pip refuses the wheel where it would not run. Nothing that only debuggers need is in it."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    found = [*tmp_path.glob("unbroken/*.so"), *tmp_path.glob("unbroken/bin/*")]
    floor = int(re.search(r"manylinux_2_(\d+)_", wheel.name).group(1))
    assert len(found) == 5 and max(map(glibc_of, found)) == floor
    for path in found:
        sections = run("readelf", "-S", "-W", path)
        assert ".debug_info" not in sections and ".symtab" not in sections, path
    note(f"glibc 2.{floor}, {wheel.stat().st_size / 1e6:.1f} MB")


def test_the_command_is_installed(python, tmp_path):
    """`unbroken run` finds its library, which answers; exit statuses and arguments pass."""
    unbroken = python.parent / "unbroken"
    env = clean(XDG_RUNTIME_DIR=str(tmp_path))
    assert run(unbroken, "--version", env=env, cwd=tmp_path) == f"unbroken {VERSION}\n"
    shown = run(unbroken, "run", "--host", "b", "--", "ibv_devinfo", "-d", "unb3", env=env)
    assert "unb3" in shown and "PORT_ACTIVE" in shown
    ended = subprocess.run([unbroken, "run", "--", "sh", "-c", "exit 7"], env=env, timeout=20)
    assert ended.returncode == 7


def test_the_demo_needs_no_compiler_no_perftest_and_no_sources(python, tmp_path, note):
    """With nothing in PATH but what the demo must not use, it survives all the same."""
    tools = tmp_path / "bin"
    tools.mkdir()
    env = clean(XDG_RUNTIME_DIR=str(tmp_path), PATH=str(tools))
    told = json.loads(run(python.parent / "unbroken", "demo", "--json", env=env, cwd=tmp_path))
    check_schema("demo", told)
    assert told["verdict"] == "survived", told["reasons"]
    assert "unbroken-verifier" in told["command"]
    assert told["verified_messages"] > 1000 and told["from"] != told["to"]
    assert told["without"]["exit_status"] == 1, "without failover it must fail"
    assert (tmp_path / "unbroken-demo/demo.svg").stat().st_size > 1000
    note(f"{told['verified_messages']} messages, switched in {told['switch_us']} us")


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


@pytest.mark.parametrize("page", EXAMPLES)
def test_the_examples_run(python, tmp_path, page):
    programs = examples(ROOT / page, EXAMPLES[page])
    assert programs, f"{page} has no program below '{EXAMPLES[page]}'"
    for program in programs:
        said = run(python, "-c", program, env=clean(), cwd=tmp_path)
        assert "ours" in said, said


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
