"""The lab for C: a program of rdma-core outlives its NIC, and the other NIC has the bytes.

It is one header, which `make install` installs (test_install.py). The same for Rust is a test of
the crate: crates/api/lab/tests/pingpong.rs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lib.cc import compile_c
from lib.fabric import UNBROKEN
from lib.paths import ROOT
from lib.process import Skip, wait_until

HEADER = [f"-I{ROOT}/include"]
SECONDS = 180
ENOUGH = 10_000_000


def needs_pingpong():
    if shutil.which("ibv_rc_pingpong") is None:
        raise Skip("ibv_rc_pingpong is missing (Debian package ibverbs-utils)")


def ran(*args) -> subprocess.CompletedProcess:
    """A program of a test, to its end."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("UNBROKEN_")}
    told = {"capture_output": True, "text": True, "timeout": SECONDS}
    return subprocess.run([str(arg) for arg in args], env=env, **told)


@pytest.mark.smoke
def test_c(note):
    """A NIC dies under a program with and without failover; mistakes are told."""
    needs_pingpong()
    done = ran(compile_c("lab", options=HEADER), UNBROKEN)
    assert done.returncode == 0, done.stdout + done.stderr
    moved = int(re.match(r"(\d+) bytes by the other NIC\n", done.stdout).group(1))
    assert moved > ENOUGH
    note(f"{moved / 1e9:.2f} GB by the other NIC")


def test_c_with_sanitizers():
    needs_pingpong()
    options = [*HEADER, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    done = ran(compile_c("lab", options=options), UNBROKEN)
    assert done.returncode == 0, done.stdout + done.stderr


def test_c_leaves_nothing_behind():
    """A test that aborts takes its programs and its folder along."""
    done = ran(compile_c("lab", options=HEADER), UNBROKEN, "abort")
    assert done.returncode == -6, done.stderr
    folder, pid = done.stdout.split()
    gone = lambda: not Path(folder).exists() and not Path(f"/proc/{pid}").exists()
    wait_until(gone, 20, f"{folder} and process {pid} are gone")


@pytest.mark.parametrize("standard", ["c11", "c17", "gnu11"])
def test_headers_and_examples_by_the_c_standard(standard):
    """Each compiles without a warning, or says what it needs."""
    strict = [f"-std={standard}", "-Wall", "-Wextra", "-Werror", "-pedantic", *HEADER]
    compiled = [*strict, "-fsyntax-only", "-x", "c"]
    sources = sorted(ROOT.glob("crates/**/examples/*.c"))
    headers = sorted((ROOT / "include/unbroken").glob("*.h"))
    assert len(sources) >= 3 and len(headers) >= 5
    for source in sources + headers:
        done = ran("cc", *compiled, source)
        if source.name == "lab.h" and not standard.startswith("gnu"):
            assert "compile with -std=gnu11, or define _GNU_SOURCE" in done.stderr, done.stderr
            done = ran("cc", "-D_GNU_SOURCE", *compiled, source)
        assert done.returncode == 0, f"{source.name}: {done.stderr}"


def test_c_header_in_cpp(tmp_path):
    source = tmp_path / "header.cc"
    source.write_text(
        "#include <unbroken/lab.h>\n#include <cstdio>\n"
        "int main(int, char **argv)\n{\n\tstruct unblab lab;\n"
        '\tif (unblab_open(&lab, argv[1], "a", 1))\n\t\treturn puts(lab.error), 1;\n'
        "\tunblab_close(&lab);\n}\n"
    )
    strict = ["-std=c++17", "-Wall", "-Wextra", "-Werror", *HEADER]
    program = tmp_path / "header"
    assert (done := ran("c++", *strict, "-o", program, source)).returncode == 0, done.stderr
    assert (done := ran(program, UNBROKEN)).returncode == 0, done.stdout


def free(port: int) -> bool:
    """Whether nobody listens at a TCP port of this machine."""
    entry = f":{port:04X} 00000000:0000 0A"
    return all(entry not in Path(f"/proc/net/{table}").read_text() for table in ("tcp", "tcp6"))


@pytest.mark.serial
def test_the_examples_of_the_guide(tmp_path):
    """That in C runs as it stands; that in Rust is the crate's own, which cargo compiles."""
    page = (ROOT / "docs/guide/lab.md").read_text()
    if shutil.which("ib_write_bw") is None:
        raise Skip("ib_write_bw is missing (Debian package perftest)")
    wait_until(lambda: free(18515), 60, "TCP port 18515 is free")
    source, program = tmp_path / "example.c", tmp_path / "example"
    source.write_text(page.split("```c\n")[1].split("```")[0])
    strict = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", *HEADER]
    assert (done := ran("cc", *strict, "-o", program, source)).returncode == 0, done.stderr
    path = f"{UNBROKEN.parent}:{os.environ['PATH']}"
    assert (done := ran("env", f"PATH={path}", program)).returncode == 0, done.stderr
    rust = page.split("```rust\n")[1].split("```")[0].splitlines()
    lines = (ROOT / "crates/api/lab/src/lib.rs").read_text().splitlines()
    theirs = [line.removeprefix("//! ").removeprefix("//!") for line in lines]
    first = theirs.index(rust[0])
    assert theirs[first : first + len(rust)] == rust
