"""Sweeps on a Ray cluster of two nodes have the results of the same sweep on one machine."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from lib.fabric import UNBROKEN
from lib.paths import LOGS
from lib.process import wait_until
from lib.ray import NODES, Cluster, interpreter
from lib.wheel import build, clean

pytestmark = [pytest.mark.ray, pytest.mark.serial, pytest.mark.slow]
SECONDS = 180
# Some seconds of one core: what is done to a sweep comes while it runs.
PATTERNS = 40
OPTIONS = f"--hosts 32 --share 0.27 --lost 1-4 --patterns {PATTERNS} --seed 5"
KEYWORDS = f"Cluster(hosts=32), Job(share=0.27), lost=(1, 4), patterns={PATTERNS}, seed=5"
RESULTS = 4 * PATTERNS
LONG_PATTERNS = 120
# More than is computed while any node's worker starts.
ENDLESS_PATTERNS = 100_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this build."""
    return build(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def cluster(wheel):
    """Two nodes that have the wheel."""
    logs = LOGS / "ray" / "cluster"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    with Cluster(logs, interpreter(), wheel) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def local() -> str:
    """The result on this machine."""
    return sweep()


def line(*more) -> list:
    words = [UNBROKEN, "simulate", "sweep", *OPTIONS.split(), "--json", *more]
    return [str(word) for word in words]


def sweep(*more, env=None) -> str:
    done = subprocess.run(line(*more), env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def on(cluster, *more) -> list:
    return ["--ray", cluster.address, "--python", cluster.python, *more]


def refused(env, *more) -> str:
    done = subprocess.run(line(*more), env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1 and done.stdout == "", done
    return done.stderr


def results(file: Path) -> int:
    """Whole lines of results."""
    return file.read_text().count("\n") - 1 if file.exists() else 0


def test_a_sweep_is_the_local_one(cluster, local, tmp_path):
    assert sweep(*on(cluster), env=cluster.env) == local
    # Half of it is there, and a line is cut off.
    file = tmp_path / "sweep.jsonl"
    assert sweep("--resume", file) == local
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[: RESULTS // 2]) + lines[-1][:20])
    assert sweep("--resume", file, *on(cluster), env=cluster.env) == local
    assert sorted(file.read_text().splitlines()) == sorted("".join(lines).splitlines())
    # Nothing is left to do: no cluster is needed.
    assert sweep("--resume", file, "--ray", "127.0.0.1:1", "--python", "/none") == local


def test_all_nodes_compute(cluster):
    words = line(*on(cluster))
    words[words.index("--patterns") + 1] = str(ENDLESS_PATTERNS)
    process = subprocess.Popen(words, env=cluster.env, stdout=subprocess.PIPE, text=True)
    ended = lambda: process.poll() is not None
    try:
        wait_until(lambda: cluster.computing() == set(NODES) or ended(), SECONDS, "both nodes")
        assert not ended(), "one node has computed all"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)


def test_a_sweep_that_is_interrupted_goes_on(cluster, local, tmp_path):
    file = tmp_path / "sweep.jsonl"
    words = line("--resume", file, *on(cluster))
    options = {"env": cluster.env, "stdout": subprocess.PIPE}
    process = subprocess.Popen(words, start_new_session=True, **options)
    try:
        wait_until(lambda: results(file) > 0 or process.poll() is not None, SECONDS, "results")
    finally:
        # As Ctrl-C in a terminal: to the command and to what it has started.
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=SECONDS)
    known = results(file)
    assert 0 < known < RESULTS, "it was interrupted on the way"
    assert sweep("--resume", file, *on(cluster), env=cluster.env) == local
    assert results(file) == RESULTS


def test_from_python_with_progress(cluster, local):
    program = f"""
import json
from unbroken.simulate import Cluster, Job, sweep
far = []
answer = sweep({KEYWORDS}, ray={cluster.address!r}, progress=lambda *now: far.append(now))
assert far == sorted(far) and far[-1] == ({RESULTS}, {RESULTS}), far
assert len({{done for done, count in far}}) > 2, far
print(json.dumps(answer))
"""
    words = [cluster.python, "-c", program]
    done = subprocess.run(words, env=cluster.env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(local)


def test_the_command_shows_how_far_it_is(cluster):
    ours, theirs = pty.openpty()
    seen = []

    def read():
        try:
            while text := os.read(ours, 4096):
                seen.append(text)
        except OSError:
            pass  # the other end is closed

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    # What takes less than two seconds has no bar.
    words = line(*on(cluster))
    words[words.index("--patterns") + 1] = str(LONG_PATTERNS)
    env = {**cluster.env, "TERM": "xterm"}
    try:
        done = subprocess.run(
            words, env=env, stdout=subprocess.PIPE, stderr=theirs, timeout=SECONDS
        )
    finally:
        os.close(theirs)
        reader.join(SECONDS)
        os.close(ours)
    text = b"".join(seen).decode()
    assert done.returncode == 0, text
    assert re.search(rf"\d+ of {4 * LONG_PATTERNS} patterns", text), text


def test_what_is_wrong_with_a_cluster_is_told(cluster, wheel, tmp_path):
    text = refused(cluster.env, "--ray", "127.0.0.1:1", "--python", cluster.python)
    assert "no cluster answers at 127.0.0.1:1" in text and "ray start --head" in text, text
    # Python without the wheel, and none at all.
    text = refused(clean(), *on(cluster))
    assert "make wheel" in text and "--python names another" in text, text
    text = refused(clean(), "--ray", "auto", "--python", "/none/python3")
    assert "cannot start /none/python3" in text and "make wheel" in text, text
    # The wheel without Ray.
    text = refused(cluster.env, "--ray", "auto", "--python", "/usr/bin/python3")
    assert "Ray cannot be imported" in text and "[ray]" in text, text
    # Another build here than on the nodes.
    other = tmp_path / "libunbroken_simulations.so"
    other.write_bytes((cluster.site / "unbroken" / other.name).read_bytes() + b"\0")
    text = refused({**cluster.env, "UNBROKEN_SIMULATIONS_LIBRARY": str(other)}, *on(cluster))
    assert "is another build" in text, text


def test_a_node_that_dies_changes_nothing(cluster, local, tmp_path, note):
    file = tmp_path / "sweep.jsonl"
    words = line("--resume", file, *on(cluster))
    process = subprocess.Popen(words, env=cluster.env, stdout=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: results(file) > 0 or process.poll() is not None, SECONDS, "results")
        cluster.kill("second")
        known = results(file)
        out, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert known < RESULTS, "it died on the way"
    assert out == local
    note(f"{known} of {RESULTS} results before")
