"""What a lost NIC costs collectives, training jobs and serving: `unbroken plan` and `unbroken
simulate` for Python.

    from unbroken.simulate import Cluster, Job, sweep
    for row in sweep(Cluster(hosts=64), Job(share=0.35), lost=(1, 4), patterns=20)["rows"]:
        print(row["lost"], row["strategy"], f"{row['mean']:+.2%}")

Keywords are the options of the command, with `_` for `-` (and `duration` for `--for`); what is not
given has the command's default, which its `--help` says. Answers are what the command writes with
`--json`, as dictionaries; their types are in `unbroken.simulate.results`. A quantity is a text with
a unit, as on the command line (`nic_rate="400G"`, `switch="5ms"`), or a number of bit/s, seconds or
bytes. What makes no sense raises `Error`, which is a ValueError, and a file that cannot be read
OSError.

Answers are computed by C code on all cores, without the interpreter's lock. Ctrl-C ends them. With
`progress=True` a line on stderr says how far a long one is; a function is called with how many
parts are done, and how many there are."""

import operator
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeAlias

from ._library import Asked, Error, option
from .results import (
    MonthReport,
    PlanReport,
    RunReport,
    ServeReport,
    SweepReport,
)

__all__ = [
    "Cluster",
    "Error",
    "Job",
    "Recovery",
    "Serving",
    "month",
    "plan",
    "run",
    "serve",
    "sweep",
]

# Texts with a unit, or numbers of bit/s, seconds, bytes; shares of 1, or texts such as "35%".
Rate: TypeAlias = str | float
Time: TypeAlias = str | float
Size: TypeAlias = str | int
Share: TypeAlias = str | float
File: TypeAlias = str | os.PathLike[str]
Progress: TypeAlias = bool | Callable[[int, int], None]
# `host3/nic2@120s`, or (NIC, when, how long its repair takes).
Failure: TypeAlias = str | tuple[str, Time] | tuple[str, Time, Time]


class _Part:
    """Options that belong together."""


@dataclass(frozen=True, kw_only=True)
class Cluster(_Part):
    """Hosts that are alike, and the switches between them."""

    preset: str | None = None
    hosts: int | None = None
    gpus: int | None = None
    nics: int | None = None
    nic_rate: Rate | None = None
    nvlink_rate: Rate | None = None
    planes: int | None = None
    rails_apart: bool = False
    tiers: int | None = None
    pod_hosts: int | None = None
    oversubscription: float | None = None
    core_oversubscription: float | None = None


@dataclass(frozen=True, kw_only=True)
class Job(_Part):
    """A training job. With `share` GPUs compute so fast that communication between hosts is this
    share of a step; else `efficiency` says it."""

    model: str | None = None
    sequence: int | None = None
    experts: int | None = None
    top_k: int | None = None
    tensor: int | None = None
    context: int | None = None
    context_exchange: str | None = None
    expert_parallel: int | None = None
    pipeline: int | None = None
    interleave: int | None = None
    zero: int | None = None
    fsdp: bool = False
    recompute: bool = False
    batch: int | None = None
    micro_batch: int | None = None
    peak: float | None = None
    memory: float | None = None
    efficiency: Share | None = None
    share: Share | None = None


@dataclass(frozen=True, kw_only=True)
class Recovery(_Part):
    """What a failure costs once."""

    restart: Time | None = None
    checkpoint: Time | None = None
    switch: Time | None = None


@dataclass(frozen=True, kw_only=True)
class Serving(_Part):
    """A replica of a language model."""

    model: str | None = None
    disaggregated: bool = False
    tensor: int | None = None
    pipeline: int | None = None
    preset: str | None = None
    gpus: int | None = None
    nics: int | None = None
    nic_rate: Rate | None = None
    nvlink_rate: Rate | None = None
    planes: int | None = None
    rails_apart: bool = False
    tiers: int | None = None
    pod_hosts: int | None = None
    oversubscription: float | None = None
    core_oversubscription: float | None = None
    peak: float | None = None
    efficiency: Share | None = None
    memory: float | None = None
    memory_rate: float | None = None
    memory_efficiency: Share | None = None
    weight_bytes: float | None = None
    budget: int | None = None
    sequences: int | None = None


def plan(
    cluster: Cluster | None = None,
    job: Job | None = None,
    recovery: Recovery | None = None,
    *,
    file: File | None = None,
    lost: int | None = None,
    fail: str | Iterable[str] | None = None,
    size: Size | None = None,
    shape: str | None = None,
    progress: Progress = False,
) -> PlanReport:
    """What is chosen for each collective after a failure, and what that costs.

    `file` is a TOML file with the tables `[cluster]`, `[job]`, `[recovery]` and `[rates]`; what is
    given besides wins over it. So many NICs of host0 are `lost`, or what `fail` names:
    `host3/nic2`, `host3/nic2=25%`, which still carries a quarter, `tor3`, `rail2`, `pod1`, or
    `spine=75%`, which leaves so much of the spines. `size` is that of each collective, `shape`
    that of those that can have it: `ring`, `stars` and the like."""
    words = _words("plan", cluster, job, recovery, file=file, lost=lost, size=size, shape=shape)
    return _answer(words + _each("fail", _names(fail)), progress)


def run(
    cluster: Cluster | None = None,
    job: Job | None = None,
    recovery: Recovery | None = None,
    *,
    fail: Failure | Iterable[Failure] = (),
    trace: File | None = None,
    duration: Time,
    file: File | None = None,
    spares: int | None = None,
    replace: Time | None = None,
    progress: Progress = False,
) -> RunReport:
    """A job that loses NICs at given times: `fail` has texts such as `host3/nic2@120s+1h`, or
    tuples of a NIC, the time, and the time that its repair takes, if there is one. Or failures are
    those of the file `trace`. A restart has so many `spares`, spare hosts that are in place after
    `replace`; without one the job has fewer."""
    several = fail if isinstance(fail, Iterable) and not isinstance(fail, str | tuple) else [fail]
    several = [] if fail == () else several
    given: dict[str, Any] = {"file": file, "trace": trace, "duration": duration}
    words = _words("run", cluster, job, recovery, **given, spares=spares, replace=replace)
    return _answer(words + _each("fail", [_failure(one) for one in several]), progress)


def sweep(
    cluster: Cluster | None = None,
    job: Job | None = None,
    *,
    file: File | None = None,
    lost: int | str | tuple[int, int] | None = None,
    patterns: int | None = None,
    seed: int | None = None,
    resume: File | None = None,
    cores: int | None = None,
    ray: str | None = None,
    progress: Progress = False,
) -> SweepReport:
    """NICs lost at random, many patterns of each number: `lost=3`, or from 1 to 10: `lost=(1, 10)`.

    With `resume` results are kept in a file, and a sweep that was interrupted goes on where it was.
    `ray` is the address of a Ray cluster (`10.0.0.1:6379`, or `auto`) whose nodes compute instead
    of this machine; the answer is the same, bit for bit. A program that has called `ray.init()`
    uses that cluster."""
    if ray is not None and cores is not None:
        raise Error("cores", "is for this machine alone; without it, or without ray, is right")
    if isinstance(lost, tuple):
        lost = "-".join(str(count) for count in lost)
    words = _words("sweep", cluster, job, file=file, lost=lost, patterns=patterns, seed=seed)
    words += _options({"resume": resume, "cores": cores})
    if ray is None:
        return _answer(words, progress)
    from . import on_ray

    with Asked({"words": words}) as asked:
        look = _look(progress)

        def tell() -> None:
            if look:
                look(*asked.far())

        with closing(on_ray.lines(asked.missing(), ray, tell)) as results:
            for lines in results:
                asked.add(lines)
        # Nothing is left to compute.
        return asked.answer(look)


def month(
    cluster: Cluster | None = None,
    job: Job | None = None,
    recovery: Recovery | None = None,
    *,
    file: File | None = None,
    mtbf: Time | None = None,
    nic_mtbf: Time | None = None,
    cable_mtbf: Time | None = None,
    switch_mtbf: Time | None = None,
    repair: Time | None = None,
    duration: Time | None = None,
    runs: int | None = None,
    seed: int | None = None,
    spares: int | None = None,
    replace: Time | None = None,
    progress: Progress = False,
) -> MonthReport:
    """What failures and repairs at random leave of a month, or of another `duration`. A mean
    time between failures may be `never`; `mtbf` is that of NICs with their cables. `spares` and
    `replace` are those of `run`."""
    given: dict[str, Any] = {"mtbf": mtbf, "nic_mtbf": nic_mtbf, "cable_mtbf": cable_mtbf}
    given |= {"switch_mtbf": switch_mtbf, "repair": repair, "duration": duration}
    given |= {"runs": runs, "seed": seed, "spares": spares, "replace": replace}
    return _answer(_words("month", cluster, job, recovery, file=file, **given), progress)


def serve(
    serving: Serving | None = None,
    *,
    file: File | None = None,
    rate: str | float | Iterable[float] | None = None,
    arrivals: str | None = None,
    prompt: int | None = None,
    output: int | None = None,
    duration: Time | None = None,
    trace: File | None = None,
    lost: int | None = None,
    fail: str | Iterable[str] | None = None,
    at: Time | None = None,
    at_token: int | None = None,
    strategy: str | Iterable[str] | None = None,
    restart: Time | None = None,
    switch: Time | None = None,
    seed: int | None = None,
    cores: int | None = None,
    progress: Progress = False,
) -> ServeReport:
    """A language model that answers requests while NICs are lost, at each `rate` (in a second) and
    with each `strategy`. `file` is a TOML file, of which the tables `[cluster]`, `[serving]` and
    `[gpu]` say what serves."""
    rates = rate if isinstance(rate, str) or not isinstance(rate, Iterable) else _joined(rate)
    words = _words("serve", serving, rate=rates, arrivals=arrivals, prompt=prompt, output=output)
    words += _options({"file": file, "duration": duration, "trace": trace, "lost": lost, "at": at})
    words += _options({"at_token": at_token, "restart": restart, "switch": switch})
    words += _options({"seed": seed, "cores": cores})
    if strategy is not None:
        words += _options({"strategy": ",".join(_names(strategy))})
    return _answer(words + _each("fail", _names(fail)), progress)


# What numbers are of.
_UNITS = {
    **dict.fromkeys(("nic_rate", "nvlink_rate"), "bit/s"),
    **dict.fromkeys(("restart", "checkpoint", "switch", "repair", "duration", "at"), "s"),
    **dict.fromkeys(("mtbf", "nic_mtbf", "cable_mtbf", "switch_mtbf"), "s"),
    "size": "B",
}


def _words(question: str, *parts: "_Part | None", **options: Any) -> list[str]:
    """A question as a command line."""
    words = [question]
    for part in parts:
        if not isinstance(part, _Part | None):
            right = "Cluster(…), Job(…), Recovery(…) or Serving(…) is right"
            raise TypeError(f"{question}: {part!r}: {right}")
        words += _options(vars(part) if part else {})
    return words + _options(options)


def _options(given: dict[str, Any]) -> list[str]:
    words = []
    for name, value in given.items():
        if value is True:
            words.append(option(name))
        elif value is not None and value is not False:
            words.append(f"{option(name)}={_text(name, value)}")
    return words


def _each(name: str, texts: Iterable[str]) -> list[str]:
    return [f"{option(name)}={text}" for text in texts]


def _names(given: str | Iterable[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else list(given or [])


def _joined(rates: Iterable[float]) -> str:
    return ",".join(_text("rate", rate) for rate in rates)


def _text(name: str, value: Any) -> str:
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    unit = _UNITS.get(name, "")
    try:
        return f"{operator.index(value)}{unit}"
    except TypeError:
        pass
    try:
        return f"{float(value)!r}{unit}"
    except (TypeError, ValueError):
        raise Error(name, f"{value!r} is neither a text nor a number") from None


def _failure(given: Failure) -> str:
    if isinstance(given, str):
        return given
    try:
        nic, at, *repair = given
    except (TypeError, ValueError):
        right = "'host3/nic2@120s' and ('host3/nic2', 120, 3600) are right"
        raise Error("fail", f"{given!r} is no failure; {right}") from None
    return f"{nic}@{'+'.join(_text('at', _plain(time)) for time in (at, *repair))}"


def _plain(time: Any) -> Any:
    """A plus of an exponent would begin a repair."""
    return f"{time:.9f}s" if isinstance(time, float) else time


def _answer(words: list[str], progress: Progress) -> Any:
    with Asked({"words": words}) as asked:
        return asked.answer(_look(progress))


def _look(progress: Progress) -> Callable[[int, int], None] | None:
    return _Line() if progress is True else progress or None


class _Line:
    """A line on stderr, if somebody looks at it, once something takes long."""

    _SOON_S = 2.0

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, done: int, count: int) -> None:
        took_s = time.monotonic() - self._began
        if took_s < self._SOON_S or not sys.stderr.isatty():
            return
        left = f", {took_s / done * (count - done):.0f} s left" if done else ""
        text = f"{done} of {count}{left}" if done < count else ""
        print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)
