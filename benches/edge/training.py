"""Figures 9 and 10 and Table 1: a data-parallel training while a host's uplinks fall silent in
turn, 20 s down and 20 s up, and without that."""

from pathlib import Path

from checkpoints import restarted
from lib.edge import FaultCycle, Lab
from lib.paths import BUILD, ROOT
from lib.ports import free_port
from lib.process import Failure, Skip, wait_until
from picture import axis, cdf, figure, line, lines, median, percentile, row

RANKS = 2
SECONDS = 100
CYCLE_S = 20
LIMIT_S = 600
# Times of steps are averaged over so many, as the paper's are.
AVERAGED = 10
# The whole training has as many epochs; a checkpoint comes every ten, which is longer than a cycle
# of faults, as in the paper.
EPOCHS = 20
CHECKPOINT_EPOCHS = 10


class Training:
    """What rank 0 of a training has told."""

    def __init__(self, output: str):
        told = [line.split() for line in output.splitlines()]
        of = lambda word: [fields[1:] for fields in told if fields and fields[0] == word]
        self.losses = [fields[3] for fields in of("step")]
        self.steps_ms = [float(fields[2]) for fields in of("step")][1:]
        self.accuracy = [(float(fields[1]), float(fields[2])) for fields in of("accuracy")]
        self.checkpoints_ms = [float(fields[0]) for fields in of("checkpoint")]
        self.start_s = [float(fields[0]) for fields in of("start")]
        self.length_s = float(of("step")[-1][1])

    def averaged_ms(self) -> list:
        """The mean of each ten steps."""
        groups = [
            self.steps_ms[n : n + AVERAGED]
            for n in range(0, len(self.steps_ms) - AVERAGED + 1, AVERAGED)
        ]
        return [sum(group) / len(group) for group in groups]


def train(lab, python: str, name: str, *args) -> Training:
    """Trains, one rank on each host, each with its virtual function as its only NIC."""
    port, ranks = free_port(), []
    for rank in range(RANKS):
        env = {
            "UNBROKEN_RUNTIME": str(lab.logs / "runtime"),
            "UNBROKEN_NICS": lab.address(rank + 1),
            "UNBROKEN_COLLECTIVE_LIBRARY": str(BUILD / "libunbroken_coll.so"),
            "PYTHONPATH": str(ROOT / "python" / "unbroken"),
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": lab.address(1),
            "MASTER_PORT": str(port),
        }
        line_of_command = [python, "-W", "ignore", Path(__file__).with_name("train.py"), *args]
        ranks.append(lab.start(f"h{rank + 1}", f"{name}-{rank}", line_of_command, env))
    for process in ranks:
        process.expect_success(LIMIT_S)
    return Training(ranks[0].output())


def measure(logs, python, bfd_ms: int) -> dict:
    if not python:
        raise Skip("there is no Python with torch; `make test-torch` makes one")
    with Lab(logs, RANKS, "--bfd-ms", bfd_ms, "--fast-failover") as lab:
        wait_until(lab.both_ways_back, 60, "both ways are there")
        without = train(lab, python, "without", "--seconds", SECONDS)
        with FaultCycle(lab, [("t1", "h1"), ("t2", "h1")], CYCLE_S, CYCLE_S) as cycle:
            under = train(lab, python, "under", "--steps", len(without.losses))
    hits = [fault for fault in cycle.faults if fault["carried"] > 100_000]
    if not hits:
        raise Failure(f"none of {len(cycle.faults)} faults was on the uplink in use")
    if under.losses != without.losses:
        raise Failure("the losses differ from those without faults")
    faults = f"{len(cycle.faults)} faults, {len(hits)} of the uplink in use"
    print(f"  {len(without.losses)} steps; {faults}", flush=True)
    figures = [["09", accuracy(without, under)], ["10", steps(without, under)]]
    return {"figures": figures, "rows": table(without, under, len(cycle.faults), len(hits))}


def accuracy(without: Training, under: Training) -> dict:
    """Figure 9: two runs, and two curves of the model of checkpoints."""
    span_s = max(without.length_s, under.length_s)
    every_s = without.length_s / EPOCHS * CHECKPOINT_EPOCHS
    many_s = [CYCLE_S * (1 + 2 * n) for n in range(int(span_s / CYCLE_S) + 1)]
    drawn = [
        line("no fault", 5, without.accuracy),
        line("many faults, the edge", 2, under.accuracy, "dashed"),
        line(
            "single fault, checkpoints (model)",
            1,
            restarted(without.accuracy, [0.9 * every_s], every_s, span_s),
            "dotted",
        ),
        line(
            "many faults, checkpoints (model)",
            0,
            restarted(without.accuracy, many_s, every_s, span_s),
        ),
    ]
    panel = lines(
        f"{len(without.losses)} steps",
        axis("time", 0, span_s, "s"),
        axis("accuracy on held-out samples", 0, 1),
        drawn,
    )
    notes = [
        "Two hosts, PyTorch's DDP over the backend unbroken, a small network on synthetic classes "
        "(the paper: ResNet101 on CIFAR-10, 4 GPUs). Faults: 20 s down, 20 s up, host 1's links in "
        "turn, silent, at the switch. The losses of both runs are the same bits.",
        "Checkpoints are a model computed from the run without faults, in which a restart takes no "
        f"time, with a checkpoint each {every_s:.0f} s ({CHECKPOINT_EPOCHS} epochs of {EPOCHS}).",
    ]
    return figure("THORN-ML, Figure 9: accuracy over time under faults", [panel], 1, notes)


def steps(without: Training, under: Training) -> dict:
    """Figure 10: times of steps, for data parallelism."""
    pair = [without.averaged_ms(), under.averaged_ms()]
    low, high = 0.9 * min(pair[0] + pair[1]), 1.1 * max(pair[0] + pair[1])
    drawn = [
        line("without faults", 5, cdf(pair[0])),
        line("under faults", 2, cdf(pair[1]), "dashed"),
    ]
    panel = lines(
        "data parallel",
        axis("time of a step", low, high, "ms", log=True),
        axis("share of steps", 0, 1.02),
        drawn,
    )
    notes = [
        f"Each point is the mean of {AVERAGED} steps, as in the paper, which has pipeline and "
        "tensor parallelism, too; here it is data parallelism only. The same runs as Figure 9."
    ]
    return figure("THORN-ML, Figure 10: step times in a training", [panel], 1, notes)


def table(without: Training, under: Training, faults: int, hits: int) -> list:
    """What the paper's text gives, and ours."""

    def over(share: float) -> str:
        a, b = percentile(without.averaged_ms(), share), percentile(under.averaged_ms(), share)
        return f"{a:.1f} to {b:.1f} ms ({100 * (b / a - 1):+.1f} %)"

    epoch_s = without.length_s / EPOCHS
    return [
        row(
            "Figure 9",
            "accuracy over time under many faults",
            "no noticeable difference",
            f"the same losses, bit for bit, over {len(under.losses)} steps; {under.length_s:.1f} s "
            f"instead of {without.length_s:.1f} s; {faults} faults, {hits} of the uplink in use",
        ),
        row(
            "Figure 10",
            "a step's time at the 90th percentile, data parallel, without faults and under them",
            "+5.3 ms (+1.1 %)",
            over(0.9),
        ),
        row("Figure 10", "at the 95th percentile", "+7.3 ms (+1.6 %)", over(0.95)),
        row(
            "Figure 10",
            "the longest step (not averaged), without and under",
            "",
            f"{max(without.steps_ms):.0f} and {max(under.steps_ms):.0f} ms",
        ),
        row(
            "Table 1",
            "mean latency of a checkpoint (data parallel: GPT-2; ResNet101), s",
            "0.771; 0.240",
            f"{sum(without.checkpoints_ms) / len(without.checkpoints_ms) / 1e3:.3f}",
        ),
        row("Table 1", "start of the model, s", "22.611; 5.693", f"{median(without.start_s):.3f}"),
        row(
            "Table 1",
            "mean time of an epoch, s",
            "4.4; 80.0",
            f"{epoch_s:.1f} ({len(without.losses) / EPOCHS:.0f} steps)",
        ),
    ]
