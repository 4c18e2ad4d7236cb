"""Wrong answers to the exercises of chapter 18."""

ALL, ROOT, STEPS = (
    "over all keys, including negative",
    "positive weights sum to 1",
    "is computed from the keys",
)
SUM, LEVEL = "are not negative and sum to 1", "is equal for all keys with a > 0"
WITHIN, NEAREST = "lie between 0 and c, and sum", "is τ where 0 < a < c"
MICHELOT = """
def michelot(s):
    inside, path = torch.ones_like(s, dtype=torch.bool), []
    while True:
        tau = {tau}
        path.append(float(tau))
        kept = {kept}
        if {end}:
            return path
        inside = kept
"""
RIGHT = dict(
    tau="(s[inside].sum() - 1) / inside.sum()",
    kept="inside & (s > tau)",
    end="kept.sum() == inside.sum()",
)
BISECTION = """
def {name}:
    low, high = {low}, s.max()
    for _ in range(100):
        mid = (low + high) / 2
        over = {weight}.sum() > 1
        low, high = (mid, high) if over else (low, mid)
    mid = low
    return {weight}
"""
ENTMAX = dict(name="entmax15(s)", low="s.min() - 2", weight="((s - mid).clamp(min=0) / 2).square()")
CAPPED = dict(name="capped(s, c)", low="s.min() - c", weight="(s - mid).clamp(0, c)")

WRONG = {
    "ex-18-michelot": [
        # the weights sum to 0
        (MICHELOT.format(**RIGHT | {"tau": "s[inside].mean()"}), ALL),
        # Newton's method with the start of the chapter, max − 1
        (
            "def michelot(s):\n"
            "    path = [float(s.max() - 1)]\n"
            "    for _ in range(50):\n"
            "        a = s[s > path[-1]]\n"
            "        path.append(float((a.sum() - 1) / len(a)))\n"
            "    return path",
            ALL,
        ),
        # one step only
        (MICHELOT.format(**RIGHT | {"end": "True"}), ROOT),
        # drops negative scores, as if τ were 0
        (MICHELOT.format(**RIGHT | {"kept": "inside & (s > 0)"}), ROOT),
        # the result of sorting, after a correct start
        (
            "def michelot(s):\n"
            "    z = s.sort(descending=True).values\n"
            "    t = (z.cumsum(0) - 1) / torch.arange(1, len(s) + 1)\n"
            "    return [float((s.sum() - 1) / len(s)), float(t[(z > t).sum() - 1])]",
            STEPS,
        ),
    ],
    "ex-18-entmax": [
        # the weights of doubled scores
        (BISECTION.format(**ENTMAX | {"weight": "(s - mid).clamp(min=0).square()"}), LEVEL),
        # sparsemax
        (BISECTION.format(**ENTMAX | {"weight": "(s - mid).clamp(min=0)"}), LEVEL),
        # softmax
        ("def entmax15(s):\n    return s.softmax(0)", LEVEL),
        # squares the excess over max − 1, and divides by the sum
        (
            "def entmax15(s):\n"
            "    a = (s - s.max() + 1).clamp(min=0).square()\n"
            "    return a / a.sum()",
            LEVEL,
        ),
        # a fixed threshold, max − 2
        ("def entmax15(s):\n    return ((s - s.max() + 2).clamp(min=0) / 2).square()", SUM),
    ],
    "ex-18-capped": [
        # clips sparsemax at the cap, and loses the excess
        (
            BISECTION.format(**CAPPED | {"weight": "(s - mid).clamp(min=0)"}).rstrip()
            + ".clamp(max=c)",
            WITHIN,
        ),
        # clips sparsemax, and divides by the sum
        (
            BISECTION.format(**CAPPED | {"weight": "(s - mid).clamp(min=0)"}).replace(
                "    return", "    a ="
            )
            + "    a = a.clamp(max=c)\n    return a / a.sum()",
            f"{WITHIN}|{NEAREST}",
        ),
        # ignores the cap
        (BISECTION.format(**CAPPED | {"weight": "(s - mid).clamp(min=0)"}), WITHIN),
        # fills the best keys up to the cap, one after another
        (
            "def capped(s, c):\n"
            "    order, a, left = s.argsort(descending=True), torch.zeros_like(s), 1.0\n"
            "    for j in order.tolist():\n"
            "        a[j] = min(c, left)\n"
            "        left = max(0.0, left - c)\n"
            "    return a",
            NEAREST,
        ),
    ],
}
