"""Types of answers: those that the command writes with `--json`. Names end in their units; a share
is of 1, and what cannot be had is None."""

from typing import Any, Literal, TypedDict

# What is done about a lost NIC: of jobs, and of what serves.
Strategy = Literal["restart", "adapcc", "hotrepair", "balance", "paper", "ours"]
Handling = Literal["none", "restart", "reroute", "dejavu", "hotrepair", "balance", "ours"]


class Cluster(TypedDict):
    """A cluster, as a TOML file has it."""

    hosts: int
    gpus: int
    nics: int
    nic_mbps: int
    nvlink_mbps: int
    planes: int
    spines: bool
    tiers: int
    pod_hosts: int
    oversubscription: float
    core_oversubscription: float


class Job(TypedDict):
    """A job, as a TOML file has it."""

    model: dict[str, Any]
    tensor: int
    context: int
    context_exchange: str
    expert_parallel: int
    pipeline: int
    interleave: int
    zero: int
    fsdp: bool
    batch: int
    micro_batch: int
    recompute: bool
    gradient_bytes: int
    value_bytes: int
    peak_tflops: float
    efficiency: float
    memory_gb: float


class Recovery(TypedDict):
    """What a failure costs once, and which hosts stand ready; None: as many as it takes."""

    restart_s: float
    checkpoint_s: float
    switch_s: float
    spares: int | None
    replace_s: float


class Loss(TypedDict):
    """A NIC that is lost, or one port of it; or it is slow, and `left` is what it carries, in %."""

    host: int
    nic: int
    port: int | None
    left: int | None


class CollectiveTime(TypedDict):
    """What a collective takes; None where it cannot go on."""

    strategy: Strategy
    us: float | None


class Collective(TypedDict):
    """What becomes of a collective; `form` is how the planner does it."""

    collective: str
    form: str | None
    healthy_us: float
    bound_us: float
    strategies: list[CollectiveTime]


class Exchange(TypedDict):
    """An operation that a stage of the job has so many times a step."""

    purpose: str
    kind: str
    ranks: int
    bytes: int
    times: float


class PlannedJob(TypedDict):
    """What becomes of the job: a step, and what the failure costs once."""

    strategy: Strategy
    step_s: float | None
    why_not: str | None
    once_s: float


class Memory(TypedDict):
    """What a GPU has in its memory, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float


class PlanReport(TypedDict):
    """The answer of `plan`. What is left of spines and cores is in parts of what they carry."""

    cluster: Cluster
    job: Job
    fails: list[str]
    lost: list[Loss]
    spines_left: float
    cores_left: float
    bytes: int
    recovery: Recovery
    collectives: list[Collective]
    exchanges: list[Exchange]
    memory: Memory
    step_s: float
    network_share: float
    strategies: list[PlannedJob]


class Change(TypedDict):
    """What is lost from some time on, and a step with each of the report's strategies."""

    at_s: float
    lost: list[Loss]
    step_s: list[float | None]


class Goodput(TypedDict):
    """What of the time a job makes use of."""

    strategy: Strategy
    failures: int
    stopped_s: float
    share: float
    spares: int
    fewer_s: float


class RunReport(TypedDict):
    """The answer of `run`."""

    cluster: Cluster
    job: Job
    horizon_s: float
    recovery: Recovery
    changes: list[Change]
    strategies: list[Goodput]


class SweepRow(TypedDict):
    """How much longer a step takes than on the healthy cluster, in parts of it."""

    lost: int
    strategy: Strategy
    patterns: int
    cannot: int
    mean: float
    p95: float
    most: float


class SweepReport(TypedDict):
    """The answer of `sweep`."""

    cluster: Cluster
    job: Job
    seed: int
    step_s: float
    network_share: float
    rows: list[SweepRow]


class Rates(TypedDict):
    """How often parts fail; None: never."""

    nic_mtbf_s: float | None
    cable_mtbf_s: float | None
    switch_mtbf_s: float | None
    repair_s: float
    horizon_s: float


class MeanGoodput(TypedDict):
    """Means of all runs, and the share of the worst."""

    strategy: Strategy
    failures: float
    stopped_s: float
    share: float
    least: float
    spares: int
    fewer_s: float


class MonthReport(TypedDict):
    """The answer of `month`."""

    cluster: Cluster
    job: Job
    rates: Rates
    recovery: Recovery
    seed: int
    runs: int
    strategies: list[MeanGoodput]


class Quantiles(TypedDict):
    """What half, 95 and 99 of 100 do not exceed; the mean, and the most."""

    p50: float
    p95: float
    p99: float
    mean: float
    most: float


class Outcome(TypedDict):
    """What clients see."""

    requests: int
    finished: int
    lost: int
    failed_at_s: float | None
    ttft_s: Quantiles | None
    tpot_s: Quantiles | None
    latency_s: Quantiles | None


class ServeRow(TypedDict):
    """One rate, with a strategy, or None without a failure."""

    rate: float | None
    strategy: Handling | None
    outcome: Outcome | None
    why_not: str | None


class Times(TypedDict):
    """What a failure costs once."""

    restart_s: float
    switch_s: float


class ServeReport(TypedDict):
    """The answer of `serve`. `when` is `{"second": …}` or `{"token": …}`."""

    serving: dict[str, Any]
    lost: list[Loss]
    when: dict[str, float]
    times: Times
    seed: int
    rows: list[ServeRow]
