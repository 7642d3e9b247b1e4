"""The simulator from Python: answers and errors are the command's, and what takes long can be
ended. The package is that of the sources, with the library of this build."""

import json
import signal
import subprocess
import time

import pytest

from lib.fabric import UNBROKEN
from lib.paths import BUILD, ROOT
from lib.process import wait_until
from lib.wheel import clean

ENV = clean(
    PYTHONPATH=str(ROOT / "python/unbroken"),
    UNBROKEN_SIMULATIONS_LIBRARY=str(BUILD / "libunbroken_simulations.so"),
)
PYTHON = "/usr/bin/python3"
SECONDS = 120
# How long something that was interrupted may go on, on a busy machine.
END_SECONDS = 30

# A call, and the command that asks the same.
PAIRS = {
    "plan": (
        "plan(Cluster(hosts=8, nic_rate=400e9), Job(share=0.04), fail=['host3/nic2'], size=2**28)",
        "plan --hosts 8 --nic-rate 400G --share 0.04 --fail host3/nic2 --size 256M",
    ),
    "shape": (
        "plan(Cluster(hosts=4), fail='host0/nic0=25%', shape='ring')",
        "plan --hosts 4 --fail host0/nic0=25% --shape ring",
    ),
    "file": ("plan(Cluster(hosts=4), file=FILE, lost=2)", "plan --hosts 4 --file FILE --lost 2"),
    "run": (
        "run(Cluster(hosts=8), Job(fsdp=True), Recovery(switch='5ms', restart=3600.0),"
        " fail=[('host3/nic2', 7200, 1800.5), 'host4/nic0@3h'], duration='1d')",
        "simulate run --hosts 8 --fsdp --switch 5ms --restart 1h --for 1d"
        " --fail host3/nic2@7200s+1800.5s --fail host4/nic0@3h",
    ),
    "sweep": (
        "sweep(Cluster(hosts=4, rails_apart=True), lost=(1, 3), patterns=10, seed=7, cores=2)",
        "simulate sweep --hosts 4 --rails-apart --lost 1-3 --patterns 10 --seed 7",
    ),
    "month": (
        "month(Cluster(hosts=4), mtbf='5000h', duration=86400 * 20, runs=3, seed=2)",
        "simulate month --hosts 4 --mtbf 5000h --for 20d --runs 3 --seed 2",
    ),
    "serve": (
        "serve(Serving(disaggregated=True), rate=[0.5, 2], strategy=['restart', 'ours'],"
        " duration=70, at=30.5, arrivals='fixed')",
        "simulate serve --disaggregated --rate 0.5,2 --strategy restart,ours --for 70s --at 30.5s"
        " --arrivals fixed",
    ),
}


def python(program: str, **options) -> subprocess.CompletedProcess:
    """Runs a program that has the package's names."""
    text = "from unbroken.simulate import *\nfrom unbroken.simulate import Error\n" + program
    return subprocess.run(
        [PYTHON, "-c", text], env=ENV, capture_output=True, text=True, timeout=SECONDS, **options
    )


def said(program: str) -> str:
    done = python(program)
    assert done.returncode == 0, done.stderr
    return done.stdout


def command(line: str) -> str:
    words = [UNBROKEN, *line.split(), "--json"]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=SECONDS).stdout


@pytest.mark.smoke
@pytest.mark.parametrize("name", PAIRS)
def test_answers_are_those_of_the_command(name, tmp_path):
    call, line = PAIRS[name]
    file = tmp_path / "cluster.toml"
    tables = {"cluster": "nic_mbps = 400000", "job": "tensor = 8", "recovery": "switch_s = 0.005"}
    file.write_text("".join(f"[{name}]\n{line}\n" for name, line in tables.items()))
    call, line = call.replace("FILE", repr(str(file))), line.replace("FILE", str(file))
    answer = json.loads(said(f"import json; print(json.dumps({call}))"))
    assert answer == json.loads(command(line))


@pytest.mark.parametrize("name", [name for name in PAIRS if name not in ("file", "shape")])
def test_answers_have_their_types(name):
    """All keys of all dictionaries, and no others."""
    program = f"""
import types, typing
from unbroken.simulate import results
def check(value, kind, where):
    if value is not None and typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next((k for k in typing.get_args(kind) if typing.is_typeddict(k)), kind)
    if typing.is_typeddict(kind):
        hints = typing.get_type_hints(kind)
        assert set(value) == set(hints), (where, set(value) ^ set(hints))
        for key, of in hints.items():
            check(value[key], of, where + [key])
    elif typing.get_origin(kind) is list:
        for one in value:
            check(one, *typing.get_args(kind), where + ["[]"])
    elif typing.get_origin(kind) is typing.Literal:
        assert value in typing.get_args(kind), (where, value)
    elif kind in (int, str, bool, float):
        assert isinstance(value, (int, float) if kind is float else kind), (where, value)
check({PAIRS[name][0]}, typing.get_type_hints({name})["return"], [])
"""
    said(program)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "call, argument, part",
    [
        ("plan(Cluster(nic_rate='5Q'))", "nic_rate", "400G (400 Gbit/s)"),
        ("plan(Cluster(hosts=0))", "hosts", "1 to 8192 are right"),
        ("plan(Cluster(hosts=[]))", "hosts", "neither a text nor a number"),
        ("plan(Cluster(hosts=1.5))", "hosts", "a whole number such as 8 is right"),
        ("plan(job=Job(tensor=3))", "tensor", "a divisor of 8 (GPUs of a host) is right"),
        ("plan(job=Job(model='8b'))", "model", "2.7b, 6.7b"),
        ("plan(job=Job(share=0.99))", "share", "GPUs at their peak give"),
        ("plan(job=Job(share=0.5, efficiency=1))", "efficiency", "cannot be used with 'share'"),
        ("plan(Cluster(hosts=1))", "hosts", "hosts 2 is right"),
        ("plan(fail='nic2')", "fail", "tor3, rail2, pod1"),
        ("plan(shape='circle')", "shape", "bridged-ring"),
        ("plan(Cluster(hosts=4), fail='host4/nic0')", "fail", "host0 to host3"),
        ("run(fail=[], duration=5)", "fail", "required"),
        ("run(fail=[5], duration=5)", "fail", "('host3/nic2', 120, 3600) are right"),
        ("run(fail='host0/nic0@2h', duration=3600)", "duration", "a longer duration is right"),
        ("sweep(lost=(5, 2))", "lost", "3 and 1-10 are right"),
        ("sweep(Cluster(hosts=2), lost=17)", "lost", "up to 16 are right"),
        ("sweep(patterns=10**9)", "patterns", "from 1 to 10000000 is right"),
        ("sweep(cores=2, ray='auto')", "cores", "without it"),
        ("month(mtbf=1e-6)", "mtbf", "fewer than 500000 are right"),
        ("serve(rate=0)", "rate", "0.5-4:0.5 are right"),
        ("serve(strategy='adapcc')", "strategy", "restart, reroute, dejavu"),
        ("serve(at_token=257)", "at_token", "1 to 256"),
        ("serve(at=100)", "at", "a longer duration or an earlier at is right"),
    ],
)
def test_errors_name_the_keyword(call, argument, part):
    text = said(f"try: {call}\nexcept Error as e: print(e.argument, e, isinstance(e, ValueError))")
    assert text.startswith(f"{argument} {argument}: "), text
    assert part in text and text.endswith(" True\n") and "--" not in text, text


def test_files_that_cannot_be_read_are_errors_of_the_system():
    text = said("try: plan(file='/no/where.toml')\nexcept OSError as e: print(e)")
    assert text == "file: cannot read /no/where.toml: No such file or directory (os error 2)\n"


def test_a_library_that_is_not_there_is_named(tmp_path):
    env = {**ENV, "UNBROKEN_SIMULATIONS_LIBRARY": "/no/such.so"}
    program = "from unbroken import simulate\ntry: simulate.plan()\nexcept OSError as e: print(e)"
    words = [PYTHON, "-c", program]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert "/no/such.so cannot be loaded" in done.stdout, done.stderr
    assert "UNBROKEN_SIMULATIONS_LIBRARY" in done.stdout


# Questions that would take minutes, and a plan of hosts that all differ.
LONG = {
    "plan": "plan(Cluster(hosts=256), fail=[f'host{h}/nic{h % 8}={1 + h % 90}%' "
    "for h in range(256)], progress=look)",
    "run": "run(Cluster(hosts=128), Job(pipeline=8), duration='1d', progress=look,"
    " fail=[(f'host{n % 128}/nic{n // 128 % 8}', 1 + n) for n in range(1000)])",
    "sweep": "sweep(Cluster(hosts=256), patterns=1000, resume=FILE, progress=look)",
    "month": "month(Cluster(hosts=256), mtbf='100h', runs=1000, progress=look)",
    "serve": "serve(Serving(), rate=4, duration=120000, progress=look)",
}


def test_a_sweep_goes_on_in_the_program_that_was_interrupted(tmp_path):
    """The traceback is kept, as an interactive interpreter does: the file is free all the same."""
    said(f"""
def look(done, count):
    if done > 5:
        raise KeyboardInterrupt
call = dict(patterns=20, resume={str(tmp_path / "sweep.jsonl")!r})
try:
    sweep(Cluster(hosts=16), progress=look, **call)
except KeyboardInterrupt as error:
    kept = error
assert sweep(Cluster(hosts=16), **call) == sweep(Cluster(hosts=16), patterns=20)
""")


@pytest.mark.parametrize("name", LONG)
def test_ctrl_c_ends_what_takes_long(name, note, tmp_path):
    """Another thread runs all the while, so the interpreter's lock is free."""
    call = LONG[name].replace("FILE", repr(str(tmp_path / "sweep.jsonl")))
    program = f"""
import sys, threading, time
counted, looked = [0], []
def count():
    while True:
        counted[0] += 1
        time.sleep(0.001)
threading.Thread(target=count, daemon=True).start()
def look(done, all):
    looked.append((done, all))
    if len(looked) == 10:
        print("asked", counted[0], flush=True)
from unbroken.simulate import *
try:
    {call}
except KeyboardInterrupt:
    print("interrupted", *looked[-1], flush=True)
"""
    process = subprocess.Popen(
        [PYTHON, "-c", program], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        asked = process.stdout.readline().split()
        assert asked[:1] == ["asked"], process.stderr.read()
        # A second's worth of milliseconds, of which a busy machine may take most.
        assert int(asked[1]) > 100
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
        took_s = time.monotonic() - began
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0 and out.startswith("interrupted"), err
    done, count = map(int, out.split()[1:])
    # Nothing is known of how much there is while the cluster is looked at.
    assert done < count or count == 0
    assert took_s < END_SECONDS
    note(f"ended after {took_s * 1000:.0f} ms")


def test_a_sweep_goes_on_where_ctrl_c_has_ended_it(tmp_path):
    file = tmp_path / "sweep.jsonl"
    call = f"sweep(Cluster(hosts=16), Job(share=0.15), patterns=40, resume={str(file)!r}"
    call += ", progress=look)"
    process = subprocess.Popen(
        [PYTHON, "-c", f"from unbroken.simulate import *\nlook = lambda *far: None\n{call}"],
        env=ENV,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: file.exists() and file.read_text().count("\n") > 20, SECONDS, "results")
    process.send_signal(signal.SIGINT)
    assert process.wait(SECONDS) != 0
    known = file.read_text().count("\n") - 1
    program = f"""
import json
far = []
look = lambda *now: far.append(now)
answer = {call}
assert far[0][0] >= {known} and far[-1] == (400, 400), far
print(json.dumps(answer))
"""
    whole = command("simulate sweep --hosts 16 --share 0.15 --patterns 40")
    assert json.loads(said(program)) == json.loads(whole)


def test_a_forked_child_has_answers_of_its_own():
    program = """
import os, signal
first = plan(Cluster(hosts=4))
child = os.fork()
if child == 0:
    signal.alarm(30)  # it does not hang for ever
    os._exit(0 if plan(Cluster(hosts=4)) == first else 1)
assert os.waitpid(child, 0)[1] == 0
print("same")
"""
    assert said(program) == "same\n"


@pytest.mark.smoke
def test_parts_for_a_cluster_are_all_patterns_once():
    """Whatever they take, also where some take no time at all; and the last ones are short."""
    said("""
import random
from unbroken.simulate.on_ray import _Left
for seed in range(200):
    draw = random.Random(seed)
    ends = [(draw.randrange(50), 50 + draw.randrange(400)) for n in range(4)]
    parts = [{"lost": n, "first": first, "end": end} for n, (first, end) in enumerate(ends)]
    left, cores, seen, sizes = _Left(parts), draw.randrange(1, 20), [], []
    while left.count:
        part = left.take(cores)
        sizes.append(part["end"] - part["first"])
        seen += [(part["lost"], number) for number in range(part["first"], part["end"])]
        left.learn(sizes[-1], draw.choice([0.0, 0.001, 0.1, 2.0, 60.0]))
    assert seen == [(p["lost"], n) for p in parts for n in range(p["first"], p["end"])], seed
    assert min(sizes) >= 1 and max(sizes) <= 1000 and sizes[-1] == 1, (seed, sizes)
""")
