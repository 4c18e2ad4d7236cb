"""Wrong answers to the exercises of the page on a language model."""

LOOP = """\
def recalled(text, known, n):
    seen, found = set(), []
    for t in range(n, len(text)):
        last = tuple(text[t - n : t])
        if last in seen and last not in known:
            found.append(t)
        seen.add(last)
    return found
"""
WRONG = {
    "ex-lm-recalled": [
        (LOOP.replace(" and last not in known", ""), "k=7 is known"),
        (LOOP.replace("range(n,", "range(n + 1,"), "follow a sequence that has occurred"),
        (  # the sequence ends with the byte that is predicted
            LOOP.replace("range(n,", "range(n - 1,").replace("t - n : t", "t - n + 1 : t + 1"),
            "follow a sequence that has occurred",
        ),
        (  # earlier means without an overlap
            LOOP.replace("in seen", "in [tuple(text[i : i + n]) for i in range(t - 2 * n + 1)]"),
            "An earlier occurrence may overlap",
        ),
    ],
}
