"""Wrong answers to the exercises of chapter 1."""

CAUSAL = "Row i is attention over the first i \\+ 1 keys \\(N = "
KEPT = "keeps at most three of the values that it is given \\(100 pairs"

WRONG = {
    "ex-01-entropy": [
        # ln 0 is not handled
        (
            "entropy = lambda A: -(A * A.log()).sum(-1)",
            "one weight 1 and masked keys has entropy 0",
        ),
        # in bits
        ("entropy = lambda A: torch.special.entr(A).sum(-1) / math.log(2)", "entropy ln M.*M = 2"),
        # a small number avoids ln 0, but changes the result
        (
            "entropy = lambda A: -(A * (A + 1e-6).log()).sum(-1)",
            "two steps add up.*rows of 3 weights",
        ),
        # small weights are replaced by a larger number
        (
            "entropy = lambda A: -(A * A.clamp_min(1e-6).log()).sum(-1)",
            "entropies of a choice in two steps add up",
        ),
        # another measure of flatness
        ("entropy = lambda A: 1 - (A**2).sum(-1)", "of a choice in two steps add up"),
        # the mean over the row
        ("entropy = lambda A: torch.special.entr(A).mean(-1)", "of a choice in two steps add up"),
    ],
    "ex-01-causal": [
        # a large number instead of -inf
        (
            "triangle = lambda N, M: torch.full((N, M), -100.0).triu(1)",
            "floating tensor of zeros and −∞",
        ),
        # the other convention: booleans
        (
            "triangle = lambda N, M: torch.ones(N, M).tril().bool()",
            "floating tensor of zeros and −∞",
        ),
        # 0 · inf is NaN
        (
            "triangle = lambda N, M: torch.ones(N, M).triu(1) * -torch.inf",
            "floating tensor of zeros and −∞",
        ),
        # a row excludes its own key
        ("triangle = lambda N, M: torch.full((N, M), -torch.inf).triu(0)", CAUSAL),
        # one step too wide
        ("triangle = lambda N, M: torch.full((N, M), -torch.inf).triu(2)", CAUSAL),
        # counted from the bottom right
        (
            "triangle = lambda N, M: torch.full((N, M), -torch.inf).triu(1 + M - N)",
            CAUSAL + "6, M = 2",
        ),
    ],
    "ex-01-online": [
        # every value is stored
        (
            """
def stream(pairs):
    scores, values = zip(*pairs)
    s = torch.tensor(scores, dtype=torch.float64)
    if s.max() == -torch.inf:
        return torch.zeros(3).double()
    return s.softmax(0) @ torch.stack(values)
""",
            KEPT,
        ),
        # every value is copied into a growing tensor
        (
            """
def stream(pairs):
    s, V = torch.zeros(0).double(), torch.zeros(0, 3).double()
    for score, value in pairs:
        s = torch.cat([s, torch.tensor([score], dtype=torch.float64)])
        V = torch.cat([V, value[None]])
    return s.softmax(0) @ V if (s > -torch.inf).any() else torch.zeros(3).double()
""",
            KEPT + ", as copies in one tensor",
        ),
        # the sums are not rescaled when the maximum grows
        (
            """
def stream(pairs):
    m, total, o = -math.inf, 0.0, torch.zeros(3).double()
    for score, value in pairs:
        if score > -math.inf:
            m = max(m, score)
            total, o = total + math.exp(score - m), o + math.exp(score - m) * value
    return o / total if total > 0 else o
""",
            "attention over the keys that are not masked \\(0 of 9",
        ),
        # without a maximum
        (
            """
def stream(pairs):
    total, o = 0.0, torch.zeros(3).double()
    for score, value in pairs:
        total, o = total + math.exp(score), o + math.exp(score) * value
    return o / total if total > 0 else o
""",
            "could not be checked, after the case 0 of 9 keys masked, scores near 0 and of size 1",
        ),
        # the first score instead of the maximum
        (
            """
def stream(pairs):
    first, total, o = None, 0.0, torch.zeros(3).double()
    for score, value in pairs:
        if score > -math.inf:
            first = score if first is None else first
            total, o = total + math.exp(score - first), o + math.exp(score - first) * value
    return o / total if total > 0 else o
""",
            "scores near 0 and of size 900|could not be checked, after the case 9 of 9",
        ),
        # the difference of two infinities
        (
            """
def stream(pairs):
    m, total, o = -math.inf, 0.0, torch.zeros(3).double()
    for score, value in pairs:
        new = max(m, score)
        old, now = math.exp(m - new), math.exp(score - new)
        m, total, o = new, old * total + now, old * o + now * value
    return o / total
""",
            "5 of 9 keys masked|9 of 9 keys masked",
        ),
    ],
    "ex-01-selection": [
        # a normal approximation
        (
            "gift = lambda p, n, k: (2 * math.log(k) * p * (1 - p) / n) ** 0.5",
            "exact where it can be counted by hand \\(p = 1/2, 2 cases, 2 epochs",
        ),
        # the accuracy itself, not the gain
        (
            """
from math import comb
def gift(p, n, k):
    F = np.cumsum([comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n)])
    return (1 - F**k).sum() / n
""",
            ".one epoch",
        ),
        # P(max < c) instead of P(max <= c)
        (
            """
from math import comb
def gift(p, n, k):
    F = np.cumsum([comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n)])
    return (1 - np.r_[0, F[:-1]] ** k).sum() / n - p
""",
            "exact where it can be counted by hand",
        ),
        # simulated
        (
            """
def gift(p, n, k):
    return np.random.default_rng(1).binomial(n, p, (1000, k)).max(1).mean() / n - p
""",
            "exact where it can be counted by hand",
        ),
    ],
}
