"""Packages in a clean Debian, which has no compiler and nothing of ours: Debian's, the wheel."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lib.clean_debian import CleanDebian
from lib.paths import BUILD, ROOT
from lib.process import Skip
from lib.wheel import build, clean, examples, run

VERSION = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M).group(1)
NAMES = {"unbroken", "libunbroken-dev"} | {f"libunbroken-{n}0" for n in ("coll", "sdr", "apm")}
# RHEL 9 has 2.34, Ubuntu 22.04 has 2.35: what is built on Debian 12 must not ask for more.
NEWEST_GLIBC = 34
SIZE_LIMIT_BYTES = 20 << 20
RELEASE = ROOT / "packaging/release.sh"
CHECKED = "grep -q '\"verdict\":\"survived\"' result"


@pytest.fixture(scope="module")
def debs(tmp_path_factory) -> list:
    """The packages of this build, as a release has them."""
    for tool, package in (("dpkg-shlibdeps", "dpkg-dev"), ("fakeroot", "fakeroot")):
        if shutil.which(tool) is None:
            raise Skip(f"'{tool}' is missing (Debian package {package})")
    folder = tmp_path_factory.mktemp("release") / "files"
    run(RELEASE, BUILD, VERSION, folder, "--draft", env=clean(), cwd=ROOT)
    return sorted(folder.glob("*.deb"))


def test_a_release_has_all_and_their_checksums(debs):
    folder = debs[0].parent
    sums = (folder / "SHA256SUMS").read_text()
    files = {path.name for path in folder.iterdir()} - {"SHA256SUMS"}
    assert {line.split()[1] for line in sums.splitlines()} == files
    kinds = sorted(Path(name).suffix for name in files)
    assert kinds == [*[".deb"] * 5, ".gz", ".whl"], files
    run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=folder)


def test_versions_that_differ_are_named(tmp_path):
    line = [RELEASE, BUILD, "9.8.7", tmp_path / "no", "--draft"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and not (tmp_path / "no").exists()
    for where in ("Cargo.toml", "__init__.py", "python/model/pyproject.toml", "unbroken.h"):
        assert re.search(rf"{where} has the version '{VERSION}', not 9.8.7", done.stderr), where


def test_lintian_has_no_complaint(debs):
    if shutil.which("lintian") is None:
        raise Skip("'lintian' is missing (Debian package lintian)")
    line = ["lintian", "--allow-root", "--fail-on", "error,warning", *debs]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "", done.stdout + done.stderr


def test_sizes_and_glibc(debs, tmp_path, note):
    """Five packages, stripped, that ask for a glibc which the oldest supported systems have."""
    assert {deb.name.split("_")[0] for deb in debs} == NAMES
    sizes = {deb.name.split("_")[0]: deb.stat().st_size for deb in debs}
    assert sum(sizes.values()) < SIZE_LIMIT_BYTES, sizes
    for deb in debs:
        run("dpkg-deb", "-x", deb, tmp_path / deb.name)
    files = [f for f in tmp_path.rglob("*") if f.is_file() and not f.is_symlink()]
    binaries = [f for f in files if f.read_bytes()[:4] == b"\x7fELF"]
    assert len(binaries) == 6
    floors = {}
    for path in binaries:
        assert ".symtab" not in run("readelf", "-S", "-W", path), f"{path} is not stripped"
        wanted = re.findall(r"GLIBC_2\.(\d+)", run("objdump", "-T", path))
        floors[path.name] = max(map(int, wanted))
    assert max(floors.values()) <= NEWEST_GLIBC, floors
    shown = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items())
    note(f"{shown}; glibc 2.{max(floors.values())}")


@pytest.mark.root
def test_debs_are_installed_run_and_purged(debs, note):
    with CleanDebian() as debian:
        before = debian.files()
        folder = debian.put(*debs)
        assert debian.run("! command -v cc gcc clang") == ""
        debian.run(f"dpkg -i {folder}/*.deb")
        demo = f"cd /root; unbroken demo --json > result; {CHECKED}; cat result"
        assert '"command":"unbroken run --host a -- ib_write_bw' in debian.run(demo)
        shown = debian.run("MANWIDTH=80 man unbroken-fault-set | cat")
        assert "SYNOPSIS" in shown and "nic a/0 dead" in shown
        assert "unb0" in debian.run("unbroken run -- ibv_devices; unbroken reset")
        complete = "/usr/share/bash-completion/completions/unbroken"
        assert "unbroken" in debian.run(f"bash -c '. {complete}; complete -p unbroken'")
        debian.run(f"dpkg --purge {' '.join(NAMES)}")
        left = debian.files() - before
        assert not left, f"left behind: {sorted(left)}"
        note(f"{len(before)} files before and after")


@pytest.mark.root
def test_the_wheel_in_a_container_of_nobody(tmp_path, note):
    """Without root, compiler, perftest or anything of ours but the wheel: the command, the demo,
    the models, and the guide's test of a program of rdma-core by the plugin."""
    wheel = build(tmp_path / "wheels")
    [program] = examples(ROOT / "docs/guide/lab.md", "pytest")
    (tmp_path / "test_theirs.py").write_text(program)
    lab = ROOT / "packaging/action/lab.sh"
    with CleanDebian() as debian:
        folder = debian.put(wheel, tmp_path / "test_theirs.py", lab)
        install = "python3 -m venv --system-site-packages v; v/bin/pip install -q --no-index"
        shown = debian.run(
            f"""
            cd /home; {install} {folder}/*.whl
            ! command -v cc gcc clang
            ! touch /usr/mine 2>/dev/null
            v/bin/unbroken run --host b -- ibv_devinfo -d unb1
            v/bin/unbroken demo --json > result
            {CHECKED}
            v/bin/python -c 'import unbroken_model, unbroken.lab, unbroken.coll'
            v/bin/python -m pytest -q -p no:cacheprovider {folder}/test_theirs.py
            LAB_RUN='unbroken run -- ibv_devinfo -l' PIP_NO_INDEX=1 \
                LAB_FOLDER=/home/l LAB_PACKAGE=$(ls {folder}/*.whl) {folder}/lab.sh
            """,
            root=False,
        )
        assert "PORT_ACTIVE" in shown and "2 passed" in shown and "4 HCAs found" in shown, shown
        note(f"{wheel.stat().st_size / 1e6:.1f} MB")
