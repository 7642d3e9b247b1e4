"""The backend `unbroken` where a failure cannot be survived: whoever waits in PyTorch gets an error
soon, never a signal; groups can be made again, and torchrun restarts the job. And ranks that leave,
or ask for different things."""

import re

import pytest

from lib.fabric import UNBROKEN, Fabric
from lib.paths import BUILD, ROOT
from lib.process import Failure
from lib.pytorch import HOSTS, PROGRAMS, torchrun

pytestmark = [
    pytest.mark.torch,
    pytest.mark.serial,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
]

SECONDS = 1200
# What waits for operations: `tests/torch/consumers.py` says what each is.
CONSUMERS = (
    "plain",
    "ddp",
    "ddp_python_hook",
    "ddp_power_sgd",
    "ddp_builtin_hook",
    "ddp_static_graph",
    "ddp_no_sync",
    "ddp_join",
    "zero",
    "fsdp1",
    "fsdp2",
    "tensor_parallel",
    "pipelining",
    "dtensor",
    "checkpoint",
    "functional",
    "compiled",
)


@pytest.mark.parametrize("ranks", [2, 3], ids=["2-ranks", "3-ranks"])
@pytest.mark.parametrize("cause", ["kill", "nics", "timeout"])
def test_every_consumer_hears(logs, note, torch_python, cause, ranks):
    """A rank is killed, or all NICs of its host die, or it takes no more steps: in whatever the
    others wait, they get an error that says so, soon after its cause. Then they end the group, and
    make another, which works."""
    # What inductor makes is compiled: that takes its time, so once.
    more = ("compiled_by_inductor",) if (cause, ranks) == ("kill", 2) else ()
    consumers = (*CONSUMERS, *more)
    env = {
        "PYTHONPATH": str(ROOT / "python" / "unbroken"),
        "UNBROKEN_COLLECTIVE_LIBRARY": str(BUILD / "libunbroken_coll.so"),
        "UNBROKEN_HOSTS": HOSTS,
        "UNBROKEN": str(UNBROKEN),
        "OMP_NUM_THREADS": "1",
    }
    with Fabric(logs, "--hosts", HOSTS) as fabric:
        line = [torch_python, "-W", "ignore", PROGRAMS / "faulty.py", cause, ranks, *consumers]
        process = fabric.start("faulty", line, env=env)
        process.expect_success(SECONDS)
        took_s = dict(re.findall(r"^ok (\w+) ([\d.]+)$", process.output(), re.MULTILINE))
        wrong = re.findall(r"^wrong .*", process.output(), re.MULTILINE)
        if wrong or set(took_s) != set(consumers):
            raise Failure(f"{wrong or set(consumers) - set(took_s)}")
        slowest = max(took_s, key=lambda name: float(took_s[name]))
        note(f"{len(consumers)} consumers; an error at all ranks {took_s[slowest]} s after its "
             f"cause at most ({slowest})")


@pytest.mark.parametrize("ranks", [2, 3], ids=["2-ranks", "3-ranks"])
def test_torchrun_restarts(logs, note, torch_python, ranks):
    """A rank is killed in two lives of a job: torchrun restarts it twice, and the third trains."""
    with Fabric(logs) as fabric:
        script = ["--max-restarts", 2, PROGRAMS / "restarted.py"]
        process = torchrun(fabric, torch_python, "restarted", ranks, script)
        process.expect_success(SECONDS)
        text = process.output()
        if text.count("trained 2") != ranks or "trained 0" in text or "trained 1" in text:
            raise Failure(f"{text.count('trained 2')} of {ranks} have trained in the third life")
        errors = re.findall(r"life (\d) error: (.*)", text)
        # Torchrun ends those of a job that has lost one, if they do not end first.
        gone = f"the process of rank {ranks - 1} is gone"
        if any(life == "2" or gone not in said for life, said in errors):
            raise Failure(f"errors are {errors}")
        signals = re.findall(r"SIGSEGV|SIGABRT|exitcode\s*:\s*-(?:6|11)\b", text)
        if signals:
            raise Failure(f"a rank ends by {signals}")
        note(f"{len(errors)} errors in two lives")


@pytest.mark.parametrize("ranks", [2, 3], ids=["2-ranks", "3-ranks"])
def test_ranks_go_apart(logs, torch_python, ranks):
    """They leave while others wait, or ask for different things, or send thousands of tensors that
    nobody receives yet."""
    names = (
        "one_that_has_left",
        "the_end_with_an_operation_pending",
        "sizes_are_compared",
        "one_row_with_a_stride",
        "thousands_before_the_first_receive",
    )
    with Fabric(logs) as fabric:
        process = torchrun(fabric, torch_python, "apart", ranks, [PROGRAMS / "apart.py", *names])
        process.expect_success(SECONDS)
        done = [line.split()[1] for line in process.output().splitlines() if line.startswith("ok ")]
        missing = [name for name in names if done.count(name) != ranks]
        if missing:
            raise Failure(f"not done at each rank: {missing}")
