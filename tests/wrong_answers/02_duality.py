"""Wrong answers to the exercises of chapter 2; `tests/test_wrong_answers.py` runs them."""

INTERCEPT = """
def intercept(K, y, c, C, eps):
    free = {free}
    return np.mean(({offset})[free])
"""
FREE = "(abs(c) > 1e-6 * C) & (abs(c) < (1 - 1e-6) * C)"
OFFSET = "y - K @ c - eps * np.sign(c)"

WRONG = {
    "ex-02-intercept": [
        # The half-width of the tube forgotten.
        (
            INTERCEPT.format(free=FREE, offset="y - K @ c"),
            r"returns the intercept of the solution \(8 points, free points above",
        ),
        # Its sign reversed.
        (
            INTERCEPT.format(free=FREE, offset="y - K @ c + eps * np.sign(c)"),
            r"the intercept of the solution \(8 points, .*off by 0\.6",
        ),
        # The edge above for all free points, even for those below the tube.
        (
            INTERCEPT.format(free=FREE, offset="y - K @ c - eps"),
            r"the intercept of the solution \(8 points, free points below it",
        ),
        # All support vectors, even those at the bound.
        (
            INTERCEPT.format(free="abs(c) > 1e-6 * C", offset=OFFSET),
            r"The function returns the intercept of the solution \(8 points",
        ),
        # No absolute value: a multiplier of -C counts as free.
        (
            INTERCEPT.format(free="(c != 0) & (c < (1 - 1e-6) * C)", offset=OFFSET),
            r"The function returns the intercept of the solution \(8 points",
        ),
        # Right in exact arithmetic only.
        (
            INTERCEPT.format(free="(c != 0) & (abs(c) < C)", offset=OFFSET),
            r"Rounded multipliers, .* count as 0 or as the bound \(8 points",
        ),
        # The mean residual of all points, as in least squares.
        (
            "def intercept(K, y, c, C, eps):\n    return np.mean(y - K @ c)",
            r"The function returns the intercept of the solution \(8 points",
        ),
    ],
    "ex-02-safe": [
        # The formula as it stands, which overflows.
        (
            "def safe_value(s, tau):\n    return tau * np.log(np.sum(np.exp(s / tau)))",
            r"If a number is added to all scores, it is added to the value",
        ),
        # The scores are shifted, and the shift is not added again.
        (
            "def safe_value(s, tau):\n    return tau * np.log(np.sum(np.exp((s - s.max()) / tau)))",
            r"If a number is added to all scores, it is added to the value \(6 scores",
        ),
        # The logarithm is not brought back to units of score.
        (
            "def safe_value(s, tau):\n"
            "    return s.max() + np.log(np.sum(np.exp((s - s.max()) / tau)))",
            r"The value of n equal scores s is s \+ tau log n \(n = 4",
        ),
        # A mean instead of the sum.
        (
            "def safe_value(s, tau):\n"
            "    return s.max() + tau * np.log(np.exp((s - s.max()) / tau).mean())",
            r"The value of n equal scores s is s \+ tau log n \(n = 4",
        ),
        # The largest score only: right up to tau log n.
        (
            "def safe_value(s, tau):\n    return s.max()",
            r"The value of n equal scores s is s \+ tau log n \(n = 4",
        ),
        # The first score subtracted, which may be that of a masked key.
        (
            "def safe_value(s, tau):\n"
            "    return s[0] + tau * np.log(np.sum(np.exp((s - s[0]) / tau)))",
            r"A masked key, whose score is minus infinity, does not change the value",
        ),
        # The mean of the finite scores subtracted, which is far below the largest one.
        (
            "def safe_value(s, tau):\n"
            "    m = s[np.isfinite(s)].mean()\n"
            "    return m + tau * np.log(np.sum(np.exp((s - m) / tau)))",
            r"A score of -1000 does not change the value beside one of 1000",
        ),
        # The mean score subtracted, which a masked key makes infinite.
        (
            "def safe_value(s, tau):\n"
            "    return s.mean() + tau * np.log(np.sum(np.exp((s - s.mean()) / tau)))",
            r"A masked key, whose score is minus infinity, does not change the value",
        ),
    ],
    "ex-02-sparsemax": [
        # The softmax.
        (
            "def sparsemax(s):\n    return np.exp(s - s.max()) / np.exp(s - s.max()).sum()",
            r"The difference s - p is one number ν wherever p > 0.*5 scores",
        ),
        # The scores shifted to a minimum of 1, and divided by their sum.
        (
            "def sparsemax(s):\n    p = np.maximum(0, s - s.min() + 1)\n    return p / p.sum()",
            r"The difference s - p is one number ν wherever p > 0.*5 scores",
        ),
        # The threshold of all scores, although some weights are cut off.
        (
            "def sparsemax(s):\n    return np.maximum(0, s - (s.sum() - 1) / len(s))",
            r"The weights are not negative and sum to one \(8 scores",
        ),
        # The same, not cut off.
        (
            "def sparsemax(s):\n    return s - (s.sum() - 1) / len(s)",
            r"The weights are not negative and sum to one \(8 scores",
        ),
        # The support counted from 0: one score too few.
        (
            "def sparsemax(s):\n"
            "    ordered = np.sort(s)[::-1]\n"
            "    nu = (np.cumsum(ordered) - 1) / np.arange(1, len(s) + 1)\n"
            "    return np.maximum(0, s - nu[np.sum(ordered > nu) - 2])",
            r"The weights are not negative and sum to one \(5 scores",
        ),
        # Sorted in ascending order.
        (
            "def sparsemax(s):\n"
            "    ordered = np.sort(s)\n"
            "    nu = (np.cumsum(ordered) - 1) / np.arange(1, len(s) + 1)\n"
            "    return np.maximum(0, s - nu[np.sum(ordered > nu) - 1])",
            r"The weights are not negative and sum to one \(",
        ),
    ],
}
