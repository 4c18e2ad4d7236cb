"""Wrong answers to the exercises of chapter 14."""

AREA = """
def area(confidence, hit, objects):
    order = np.argsort({sign}np.asarray(confidence))
    hit = np.asarray(hit)[order]
    precision = (hit.cumsum() / np.arange(1, len(hit) + 1)){where}
    best = {best}
    return best.sum() / {by}
"""
OURS = dict(
    sign="-",
    where="[hit]",
    best="np.maximum.accumulate(precision[::-1])",
    by="objects",
)
WORKED = r"for four objects: 9/16 \(4 answers"
DIPS = r"for two objects: 5/6 \(3 answers"
TRAPS = "a hundred times the matching"

WRONG = {
    "ex-14-greedy": [
        # random costs
        ("def trap(n):\n    return torch.rand(n, n) + 0.1", TRAPS),
        # the last row is too cheap for a trap
        (
            "def trap(n):\n    cost = torch.full((n, n), 2.0)\n    cost[0, 0] = 1\n"
            "    cost[-1, 1:] = 10\n    return cost",
            TRAPS,
        ),
        # the greedy matching is the best, because the diagonal is the cheapest
        ("def trap(n):\n    return 1000 - 999 * torch.eye(n)", TRAPS),
        # a fixed cost, too small for many rows
        (
            "def trap(n):\n    cost = torch.full((n, n), 2.0)\n    cost[0, 0] = 1\n"
            "    cost[-1, 1:] = 10000\n    return cost",
            TRAPS + r" \(n = 100: ",
        ),
        # costs of zero
        (
            "def trap(n):\n    cost = torch.zeros(n, n)\n    cost[-1, -1] = 1e6\n    return cost",
            "costs are positive",
        ),
    ],
    "ex-14-ap": [
        # sorted the wrong way
        (AREA.format(**OURS | {"sign": ""}), WORKED),
        # divided by the hits that were found
        (AREA.format(**OURS | {"by": "max(1, hit.sum())"}), WORKED),
        # the best precision at this hit or an earlier one
        (AREA.format(**OURS | {"best": "np.maximum.accumulate(precision)"}), WORKED),
        # the precision at each prediction, not only at each hit
        (AREA.format(**OURS | {"where": ""}), WORKED),
        # not sorted at all
        (
            "def area(confidence, hit, objects):\n    hit = np.asarray(hit)\n"
            "    precision = (hit.cumsum() / np.arange(1, len(hit) + 1))[hit]\n"
            "    return np.maximum.accumulate(precision[::-1]).sum() / objects",
            WORKED,
        ),
        # the precision at each hit, without the maximum over later hits
        (AREA.format(**OURS | {"best": "precision"}), WORKED),
        # the largest precision of all, at every hit
        (AREA.format(**OURS | {"best": "0 * precision + precision.max()"}), DIPS),
        # the precision at the last hit, at every hit
        (AREA.format(**OURS | {"best": "0 * precision + precision[-1]"}), DIPS),
    ],
}
