"""What a training would do that starts again from its last checkpoint after every fault: a model,
no run."""

import bisect

STEP_S = 0.1


def restarted(baseline: list, faults_s: list, every_s: float, length_s: float) -> list:
    """Accuracy over time (s) of a training that goes like `baseline` (time, accuracy), has a
    checkpoint every `every_s` of work, and loses what came after the last one with each fault. As
    in the paper it is back at once, and is shown at the best it has reached until it is further
    than that."""
    times = [time for time, _ in baseline]
    faults, points = sorted(faults_s), []
    every, done, reached = max(1, round(every_s / STEP_S)), 0, 0
    for step in range(round(length_s / STEP_S) + 1):
        while faults and faults[0] <= step * STEP_S:
            faults.pop(0)
            done = done // every * every
        reached = max(reached, done)
        last = bisect.bisect_right(times, reached * STEP_S) - 1
        points.append((step * STEP_S, baseline[max(0, last)][1]))
        done += 1
    return points
