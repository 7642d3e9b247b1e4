"""`make install`: what it installs can be linked against, run, read and removed."""

import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "/usr/local"
# The library, the prefix of its functions, its headers.
LIBRARIES = [
    ("sdr", "sdr_", ["sdr.h", "sdr_ext.h"]),
    ("coll", "ubcoll", ["coll.h"]),
    ("apm", "unbapm_", ["apm.h"]),
]
VERSION = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M).group(1)


def run(*args, env=None, timeout_s=60, cwd=ROOT) -> subprocess.CompletedProcess:
    """Runs a command to its end; gives what it printed, or fails with it."""
    done = subprocess.run(
        [str(a) for a in args], env=env, cwd=cwd, timeout=timeout_s, capture_output=True, text=True
    )
    text = f"{' '.join(map(str, args))}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0, f"status {done.returncode} of {text}"
    return done


def make(target: str, dest: Path, *variables: str):
    """Runs make with a DESTDIR; GNU make's own variables of an outer make are left out."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return run("make", "-s", target, f"DESTDIR={dest}", f"PREFIX={PREFIX}", *variables, env=env)


def files(dest: Path) -> list[str]:
    """All that is not a folder, as its path without DESTDIR."""
    found = (p for p in dest.rglob("*") if p.is_symlink() or not p.is_dir())
    return sorted("/" + str(p.relative_to(dest)) for p in found)


class Tree:
    """An installed tree."""

    def __init__(self, dest: Path):
        self.dest, self.usr = dest, dest / PREFIX.lstrip("/")
        self.lib = self.usr / "lib"

    def environment(self, runtime: Path) -> dict:
        """Of a user who has installed it elsewhere than where the loader looks."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("UNBROKEN_", "LD_"))}
        return {**clean, "LD_LIBRARY_PATH": str(self.lib), "UNBROKEN_RUNTIME": str(runtime)}

    def flags(self, package: str) -> list[str]:
        """What pkg-config says of a package."""
        env = {
            **os.environ,
            "PKG_CONFIG_PATH": str(self.lib / "pkgconfig"),
            "PKG_CONFIG_SYSROOT_DIR": str(self.dest),
        }
        return run("pkg-config", "--cflags", "--libs", package, env=env).stdout.split()

    def compile(self, source: Path, program: Path, *packages: str) -> Path:
        """Compiles a program with what pkg-config says, and nothing else."""
        flags = [flag for package in packages for flag in self.flags(package)]
        run("cc", "-Wall", "-Werror", "-o", program, source, *flags)
        return program


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Tree:
    """What `make install` makes of the build."""
    dest = tmp_path_factory.mktemp("install")
    make("install", dest)
    return Tree(dest)


def end_all(processes: list[subprocess.Popen]):
    """Ends what a failed test has left running."""
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=10)


def outputs(processes: list[subprocess.Popen], timeout_s: float) -> list[str]:
    """What they have printed, once all have ended well."""
    try:
        texts = [p.communicate(timeout=timeout_s)[0] for p in processes]
    finally:
        end_all(processes)
    assert [p.returncode for p in processes] == [0] * len(processes), "\n".join(texts)
    return texts


def start(*args, env: dict) -> subprocess.Popen:
    """Starts a program whose output is read later."""
    line = [str(a) for a in args]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def wait_for_listener(port: int, process: subprocess.Popen, timeout_s: float = 30):
    """Waits until somebody listens at a TCP port of this machine."""
    entry, ends = f":{port:04X} 00000000:0000 0A", time.monotonic() + timeout_s
    while entry not in Path("/proc/net/tcp").read_text():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < ends, f"nobody listens at port {port} after {timeout_s} s"
        time.sleep(0.02)


@pytest.mark.parametrize("name, prefix, headers", LIBRARIES)
def test_library_has_its_soname_and_the_functions_of_its_headers(tree, name, prefix, headers):
    library = f"libunbroken_{name}.so"
    major = VERSION.split(".")[0]
    assert os.readlink(tree.lib / library) == f"{library}.{major}"
    assert os.readlink(tree.lib / f"{library}.{major}") == f"{library}.{VERSION}"
    dynamic = run("readelf", "-d", tree.lib / library).stdout
    assert re.search(r"SONAME.*\[(.*)\]", dynamic).group(1) == f"{library}.{major}"
    symbols = run("nm", "-D", "--defined-only", tree.lib / library).stdout
    exported = {line.split()[2] for line in symbols.splitlines()}
    texts = [(tree.usr / "include/unbroken" / header).read_text() for header in headers]
    code = re.sub(r"/\*.*?\*/", "", "".join(texts), flags=re.S)
    assert exported == set(re.findall(rf"\b({prefix}\w+)\(", code))


def test_a_linked_program_asks_for_the_soname(tree, tmp_path):
    source = tmp_path / "version.c"
    source.write_text(
        "#include <stdio.h>\n#include <unbroken/unbroken.h>\n"
        "int main(void)\n{\n\tint linked = 0;\n\tubcollGetVersion(&linked);\n"
        '\treturn printf("%d.%d.%d %d\\n", UNBROKEN_VERSION_MAJOR, UNBROKEN_VERSION_MINOR,\n'
        "\t\t      UNBROKEN_VERSION_PATCH, linked - UNBROKEN_VERSION) < 0;\n}\n"
    )
    packages = [f"unbroken-{name}" for name, *_ in LIBRARIES]
    program = tree.compile(source, tmp_path / "version", *packages)
    assert run(program, env=tree.environment(tmp_path)).stdout == f"{VERSION} 0\n"
    needed = re.findall(r"NEEDED.*\[(libunbroken.*)\]", run("readelf", "-d", program).stdout)
    assert "libunbroken_coll.so.0" in needed
    assert all(name.endswith(".so.0") for name in needed), needed


def test_sdr_example(tree, tmp_path):
    source = ROOT / "crates/sdr/library/examples/partial.c"
    program = tree.compile(source, tmp_path / "partial", "unbroken-sdr")
    printed = run(program, env=tree.environment(tmp_path)).stdout
    assert "1048576 bytes are in their place" in printed


def test_lab_header(tree, tmp_path):
    """A test in C needs the installed header and the installed command, and nothing else."""
    program = tmp_path / "lab"
    source = ROOT / "tests/c/lab.c"
    run("cc", "-std=gnu11", "-Wall", "-Werror", f"-I{tree.usr}/include", "-o", program, source)
    path = f"{tree.usr}/bin:{os.environ['PATH']}"
    printed = run(program, env={**tree.environment(tmp_path), "PATH": path}).stdout
    assert re.search(r"^\d{8,} bytes by the other NIC", printed), printed


def test_coll_example(tree, tmp_path):
    source = ROOT / "crates/collective/library/examples/ring.c"
    program = tree.compile(source, tmp_path / "ring", "unbroken-coll")
    env = tree.environment(tmp_path)
    found_in = tmp_path / "ring.id"
    ranks = [start(program, rank, 3, "abc", 1, found_in, env=env) for rank in range(3)]
    for rank, text in enumerate(outputs(ranks, timeout_s=60)):
        assert re.search(rf"rank {rank}: [1-9]\d* sums are right", text), text


def test_apm_example(tree, tmp_path):
    source = ROOT / "crates/apm/examples/migrate.c"
    program = tree.compile(source, tmp_path / "migrate", "unbroken-apm")
    env, unbroken = tree.environment(tmp_path), tree.usr / "bin/unbroken"
    run(unbroken, "fabric", "up", "--ports", 2, env=env)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [unbroken, "run", "--no-failover", "--host"]
    ends = [start(*line, "b", "--", program, port, env=env)]
    try:
        wait_for_listener(port, ends[0])
        ends.append(start(*line, "a", "--", program, port, "127.0.0.1", 1, env=env))
    except BaseException:
        end_all(ends)
        raise
    for text in outputs(ends, timeout_s=60):
        assert "all is well" in text
        assert "port 2" in text, "nothing has migrated"


def test_what_is_installed_is_stripped(tree, tmp_path):
    """Nothing that only debuggers need, unless it was asked for."""
    installed = [tree.usr / "bin/unbroken", *tree.lib.glob("*.so"), tree.lib / "unbroken-verifier"]
    assert len(installed) == 6
    for path in installed:
        assert ".debug_info" not in run("readelf", "-S", "-W", path).stdout, path.name
    make("install", tmp_path, "STRIP=no")
    whole = tmp_path / PREFIX.lstrip("/") / "bin/unbroken"
    assert ".debug_info" in run("readelf", "-S", "-W", whole).stdout


def test_a_configuration_of_the_edge_to_begin_with(tree, tmp_path):
    """What `edge init` writes is read by `edge up`, which misses its devices; it writes once."""
    unbroken, env = tree.usr / "bin/unbroken", tree.environment(tmp_path)
    config = tmp_path / "etc/edge.toml"
    run(unbroken, "edge", "init", "--config", config, env=env)
    refusals = []
    for words in (["up", "--dry-run"], ["init"]):
        line = [str(unbroken), "edge", *words, "--config", str(config)]
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=20)
        assert done.returncode == 1, done.stdout
        refusals.append(done.stderr)
    assert "there is no device 'p0'" in refusals[0] and "stays as it is" in refusals[1], refusals


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_are_printed_as_they_are_installed(tree, tmp_path, shell):
    places = {
        "bash": "bash-completion/completions/unbroken",
        "zsh": "zsh/site-functions/_unbroken",
        "fish": "fish/vendor_completions.d/unbroken.fish",
    }
    printed = run(tree.usr / "bin/unbroken", "completions", shell, env=tree.environment(tmp_path))
    assert printed.stdout == (tree.usr / "share" / places[shell]).read_text()


@pytest.mark.parametrize("libdir", ["lib", "lib64", f"lib/{os.uname().machine}-linux-gnu"])
def test_the_command_finds_its_library(tmp_path, libdir):
    dest = tmp_path / "root"
    make("install", dest, f"LIBDIR={PREFIX}/{libdir}")
    tree = Tree(dest)
    assert (tree.usr / libdir / "libunbroken.so").is_file()
    unbroken, env = tree.usr / "bin/unbroken", tree.environment(tmp_path)
    assert run(unbroken, "--version", env=env).stdout == f"unbroken {VERSION}\n"
    assert "unb0" in run(unbroken, "run", "--", "ibv_devices", env=env).stdout


def test_manual_pages_of_all_subcommands(tree, tmp_path):
    pages = tree.usr / "share/man/man1"
    env = {**tree.environment(tmp_path), "LC_ALL": "C.UTF-8", "MANWIDTH": "80"}
    found = {page.stem for page in pages.iterdir()}
    commands = run(tree.usr / "bin/unbroken", "--help", env=env).stdout
    names = re.findall(r"^  (\w+)  ", commands.split("Usage:")[1].split("Options:")[0], re.M)
    assert {"unbroken", *(f"unbroken-{name}" for name in names if name != "help")} <= found
    for page in sorted(pages.iterdir()):
        shown = run("man", "--warnings", "-E", "UTF-8", "-l", page, env=env)
        assert shown.stderr == "", f"{page.name}: {shown.stderr}"
        assert "SYNOPSIS" in shown.stdout, page.name


def test_units_start_the_installed_command(tmp_path):
    dest = tmp_path / "root"
    make("install", dest, "BINDIR=/opt/unbroken/bin")
    units = list((dest / "usr/local/lib/systemd/system").iterdir())
    assert len(units) == len(list((ROOT / "docs/guide/edge").glob("*.service")))
    for unit in units:
        commands = re.findall(r"^Exec\w+=(\S+)", unit.read_text(), re.M)
        assert commands and set(commands) == {"/opt/unbroken/bin/unbroken"}, unit.name


def test_completions_parse(tree):
    run("bash", "-n", tree.usr / "share/bash-completion/completions/unbroken")


def test_uninstall_leaves_nothing(tmp_path):
    make("install", tmp_path)
    installed = files(tmp_path)
    assert f"{PREFIX}/bin/unbroken" in installed
    make("install", tmp_path)
    assert files(tmp_path) == installed, "a second installation differs"
    foreign = tmp_path / PREFIX.lstrip("/") / "lib/libother.so"
    foreign.touch()
    make("uninstall", tmp_path)
    assert files(tmp_path) == [f"{PREFIX}/lib/libother.so"]
    assert not (tmp_path / PREFIX.lstrip("/") / "include/unbroken").exists()


def test_a_missing_build_is_named(tmp_path):
    copy = tmp_path / "sources"
    shutil.copytree(ROOT / "packaging", copy / "packaging")
    script = ["packaging/install.sh", "install", "target/release", VERSION]
    env = {**os.environ, "DESTDIR": str(tmp_path / "root")}
    done = subprocess.run(script, cwd=copy, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "there is no target/release/unbroken; `make all` builds it" in done.stderr
    assert files(tmp_path / "root") == []
