"""A covering set: few cases in which every value of every dimension meets every value of every
other."""

from itertools import combinations, product


def covering(dimensions: list) -> list:
    """Cases (tuples, a value of each dimension) that cover all pairs. The same input gives the same
    cases."""

    def pairs(case):
        return {((i, case[i]), (j, case[j])) for i, j in combinations(range(len(case)), 2)}

    everything = [(case, pairs(case)) for case in product(*dimensions)]
    left = set().union(*(p for _, p in everything))
    chosen = []
    while left:
        case, covered = max(everything, key=lambda entry: len(entry[1] & left))
        chosen.append(case)
        left -= covered
    return chosen
