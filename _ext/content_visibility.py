"""Estimate the height of each section, so that a browser knows it before it lays the section out.

A browser does not lay out sections that are off the screen (see ``book.css``). Until then it uses
the height in their style to draw the scroll bar and to find the target of a link. The estimates
count the elements that take up space, on a wide screen and on a phone. They are somewhat too large
for most sections, because a section that is taller than its estimate overlaps the next one.
"""

from __future__ import annotations

import re

SECTION = re.compile(r"<(/?)section\b([^>]*)>")
ENTRY = re.compile(r"<(/?)dl\b([^>]*)>")  # of the API, or a list within one
DETAILS = re.compile(r"<(/?)details\b[^>]*>")
UNSEEN = re.compile(
    r'<span class="katex-mathml">.*?</span>|<(script|style|template)\b.*?</\1>', re.S
)
CODE = re.compile(r"<pre>(.*?)</pre>", re.S)
DRAWN = re.compile(r"<svg\b.*?</svg>", re.S)
TAG, SPACE = re.compile(r"<[^>]*>"), re.compile(r"\s+")
# Pixels for each character, line of code, displayed formula, figure, row of a table and folded box,
# and for a heading: fitted to the pages of this book in Chromium, plus 15 %.
PIXELS = {
    "wide": (0.48, 20, 145, 130, 30, 150, 40),
    "narrow": (0.75, 19, 190, 370, 50, 190, 45),
}

# The same for descriptions of the API: for each character, line of code, name and paragraph, and
# for the gap below each entry of a section.
API = {"wide": (0.35, 27, 50, 35, 48), "narrow": (0.82, 28, 44, 31, 48)}
SAID = "--wide:"  # in the style of an entry that has an estimate


def say_heights(body: str) -> str:
    """Return a page's HTML with the estimated heights of its sections of the second level.

    The entries of the API in them are laid out separately and have estimates of their own. These
    are written first, since the estimate of a section counts them.
    """
    return _say(_say(body, ENTRY, 1, 'class="py '), SECTION, 2, "")


def _say(body: str, box: re.Pattern, level: int, has: str) -> str:
    """Write the estimated heights of the boxes at `level` whose tags contain `has`."""
    parts, depth, done, start = [], 0, 0, None
    for tag in box.finditer(body):
        depth += -1 if tag[1] else 1
        if not tag[1] and depth == level and has in tag[2]:
            start = tag
        elif tag[1] and depth == level - 1 and start is not None:
            style = ";".join(f"--{x}:{y}px" for x, y in heights(body[start.end() : tag.start()]))
            parts += body[done : start.end() - 1], f' style="{style}">'
            done, start = start.end(), None
    return "".join(parts) + body[done:]


def heights(section: str) -> list[tuple[str, int]]:
    """Estimate the height of a section's HTML in pixels, for each of `PIXELS`."""
    section, folded = _fold(section)
    section = UNSEEN.sub("", section)
    figures = section.count("da-svg") + section.count("<img ")
    lines = sum(code.count("\n") + 1 for code in CODE.findall(section))
    text = SPACE.sub(" ", TAG.sub("", DRAWN.sub("", CODE.sub("", section))))
    formulas, rows = section.count("katex-display"), section.count("<tr")
    counts: tuple[int, ...] = (len(text), lines, formulas, figures, rows, folded, 1)
    if api := '<dt class="sig' in section:
        names, paragraphs, entries = map(section.count, ("<dt", "<p", SAID))
        counts = (len(text), lines, names, paragraphs, entries)
    return [
        (name, round(sum(x * y for x, y in zip(counts, pixels, strict=True))))
        for name, pixels in (API if api else PIXELS).items()
    ]


def _fold(section: str) -> tuple[str, int]:
    """Return a section without its outermost folded boxes, and the number of these boxes."""
    parts, depth, done, count = [], 0, 0, 0
    for tag in DETAILS.finditer(section):
        if not tag[1] and depth == 0:
            parts.append(section[done : tag.start()])
            count += 1
        depth += -1 if tag[1] else 1
        if depth == 0:
            done = tag.end()
    return "".join(parts) + section[done:], count
