"""Comparatives in what pages say about experiments are found and guarded by assertions."""

import re
from collections.abc import Iterator
from itertools import pairwise

from places import ROOT

CELL = re.compile(r"^(`{3,}|~{3,})\{code-cell\}.*?^\1$", re.DOTALL | re.M)
RESULTS = re.compile(r"\b(results_table|curves|load_experiment|measured|decided)\(|scores\(\"")
SKIPPED = re.compile(  # code, displayed formulas, and the options of a directive
    r"^(`{3,}|~{3,})\{code-cell\}.*?^\1$|^```\w*$.*?^```$|^\$\$.*?^\$\$|^:[\w-]+:.*?$"
    r"|^[:`~]{3,}.*?$|^\(.*\)=$",
    re.DOTALL | re.M,
)
SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z*$`\"(])")
WORDS = re.compile(
    r"\b(better|best|worse|worst|ahead|behind|above|below|beats?|wins?|won|loses?|lost|outperforms?"
    r"|(?:more|less|fewer|higher|lower|larger|smaller|faster|slower|earlier|later|longer) than"
    r"|at least as|as (?:well|good|much|many) as|cannot|can ?not|never|always|fails?|failed"
    r"|(?:does|do|did) not (?:learn|find|help|recall|matter|change|reach)|learns?|learned|helps?"
    r"|costs? (?:nothing|little)|nothing is lost|no difference|refute[sd]?)\b",
    re.IGNORECASE,
)
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


def comparatives(page: str) -> Iterator[tuple[int, str, list[str]]]:
    """Yield each sentence with comparatives in sections with results: line, sentence, words.

    A sentence and the assertion that guards it may still compare different arms.
    """
    starts = [m.start() for m in re.finditer(r"^## ", _blank(CELL, page), re.M)]
    for start, end in zip([0, *starts], [*starts, len(page)], strict=True):
        cells = (match[0] for match in CELL.finditer(page, start, end))
        if not any(map(RESULTS.search, cells)):
            continue
        text = _blank(SKIPPED, page[start:end])
        for block in re.finditer(r"(?:^\S.*\n?|^ +\S.*\n?)+", text, re.M):
            if block[0].startswith("#"):
                continue
            for sentence in SENTENCE.split(block[0]):
                if words := [match[0] for match in WORDS.finditer(sentence)]:
                    offset = start + block.start() + block[0].index(sentence)
                    yield page.count("\n", 0, offset) + 1, " ".join(sentence.split()), words


def _blank(pattern: re.Pattern[str], text: str) -> str:
    """Return the text with spaces for all matches, so that lines and offsets are unchanged."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def unguarded(page):
    """Return the lines of the sentences with comparatives that no folded result asserts.

    The last such cell before a sentence has to contain an assertion, and one on an interval if the
    sentence states an order. Before the first result of a section, any of its cells may assert.
    """
    blank = _blank(CELL, page)
    heads = [match.start() for match in re.finditer("^## ", blank, re.M)]
    lines, found = [page.count("\n", 0, at) + 1 for at in (0, *heads, len(page))], []
    cells = {page.count("\n", 0, m.start()) + 1: m[0] for m in CELL.finditer(page)}
    for line, _, words in comparatives(page):
        start, end = max(pair for pair in pairwise(lines) if pair[0] <= line)
        shown = [n for n, x in cells.items() if start <= n < end and "[hide-input]" in x]
        shown = [n for n in shown if RESULTS.search(cells[n])]
        before = [n for n in shown if n < line][-1:]
        code = "".join(cells[n] for n in before or shown)
        order = before and any(word.lower() in ORDER for word in words)
        if shown and not (GUARD.search(code) and (INTERVAL.search(code) or not order)):
            found.append(line)
    return found


def test_sentences_with_comparatives_in_sections_with_results_are_found():
    first = "Softmax is *ahead* of linear attention by more than a point."
    assert list(comparatives(PAGE)) == [
        (15, first, ["ahead", "more than"]),
        (28, "A window cannot see it.", ["cannot"]),
    ]


def test_a_comparative_needs_an_assertion_and_an_order_needs_an_interval():
    guarded = PAGE.replace("## a comment", "assert few < many\n## a comment")
    assert (unguarded(PAGE), unguarded(guarded)) == ([15, 28], [])
    order = guarded.replace("A window cannot", "It is better, as you")
    assert (unguarded(order), unguarded(order.replace("few", "difference(a, b)"))) == ([29], [])


def test_assertions_guard_what_pages_say_of_their_results():
    pages = {path.name: path.read_text("utf8") for path in ROOT.glob("book/*.md")}
    assert {name: lines for name, page in pages.items() if (lines := unguarded(page))} == {}
    without = [name for name, page in pages.items() if unguarded(GUARD.sub("(", page))]
    assert len(without) > 20
