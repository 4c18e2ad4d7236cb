"""Comparatives in what pages say about experiments are found and guarded by assertions."""

import re
from itertools import pairwise

import comparatives

GUARD = re.compile(r"^ *assert\b|\bmeasured\(", re.M)
INTERVAL = re.compile(r"\b(decided|difference|measured)\(")
ORDER = {"better", "worse", "ahead", "behind", "beat", "beats", "wins", "outperforms"}

PAGE = """# A page

Theory is better than practice.

## A proof

Ridge is ahead.

```{code-cell} ipython3
print("softmax is better")
```

## The experiment

Two arms are trained. Softmax is *ahead* of linear attention by
more than a point. Nothing else was varied.

```{code-cell} ipython3
---
tags: [hide-input]
---
results_table("small_model", "answers", predicted={"softmax": "better"})
## a comment, which is no heading
```

:::{admonition} Note
:class: better
A window cannot see it.
:::

$$
\\text{better}
$$
"""


def unguarded(page):
    """Return the lines of the sentences with comparatives that no folded result asserts.

    The last such cell before a sentence has to contain an assertion, and one on an interval if the
    sentence states an order. Before the first result of a section, any of its cells may assert.
    """
    blank = comparatives._blank(comparatives.CELL, page)
    heads = [match.start() for match in re.finditer("^## ", blank, re.M)]
    lines, found = [page.count("\n", 0, at) + 1 for at in (0, *heads, len(page))], []
    cells = {page.count("\n", 0, m.start()) + 1: m[0] for m in comparatives.CELL.finditer(page)}
    for line, _, words in comparatives.comparatives(page):
        start, end = max(pair for pair in pairwise(lines) if pair[0] <= line)
        shown = [n for n, x in cells.items() if start <= n < end and "[hide-input]" in x]
        shown = [n for n in shown if comparatives.RESULTS.search(cells[n])]
        before = [n for n in shown if n < line][-1:]
        code = "".join(cells[n] for n in before or shown)
        order = before and any(word.lower() in ORDER for word in words)
        if shown and not (GUARD.search(code) and (INTERVAL.search(code) or not order)):
            found.append(line)
    return found


def test_sentences_with_comparatives_in_sections_with_results_are_found():
    assert list(comparatives.comparatives(PAGE)) == [
        (
            15,
            "Softmax is *ahead* of linear attention by more than a point.",
            ["ahead", "more than"],
        ),
        (28, "A window cannot see it.", ["cannot"]),
    ]


def test_a_comparative_needs_an_assertion_and_an_order_needs_an_interval():
    guarded = PAGE.replace("## a comment", "assert few < many\n## a comment")
    assert (unguarded(PAGE), unguarded(guarded)) == ([15, 28], [])
    order = guarded.replace("A window cannot", "It is better, as you")
    assert (unguarded(order), unguarded(order.replace("few", "difference(a, b)"))) == ([29], [])


def test_assertions_guard_what_pages_say_of_their_results():
    pages = {path.name: path.read_text("utf8") for path in comparatives.BOOK.glob("*.md")}
    assert {name: lines for name, page in pages.items() if (lines := unguarded(page))} == {}
    without = [name for name, page in pages.items() if unguarded(GUARD.sub("(", page))]
    assert len(without) > 20
