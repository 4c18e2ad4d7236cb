"""List the sentences in which pages use comparatives about experiments.

Each such sentence must be guarded by an assertion on an interval, which `derived_book.decided` or
`claims.measured` computes, or be removed. The list covers the sections that show results of
training. It does not show which sentences are guarded. A test requires an assertion in the cell
that shows the result, but cannot check that the assertion and the sentence compare the same arms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

BOOK = Path(__file__).resolve().parents[1] / "book"
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


def comparatives(page: str) -> Iterator[tuple[int, str, list[str]]]:
    """Yield each sentence with comparatives in sections with results: line, sentence, words."""
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
