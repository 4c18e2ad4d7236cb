"""How tall a section of a page will be, said before a browser lays it out.

Sections out of sight wait for their layout (see ``book.css``). Until then a browser takes them for
as tall as their style says, and with that it draws the scroll bar and finds where a link leads. The
estimates count what takes room, on a wide screen and on a phone. They are somewhat too tall for
most sections, since what is in a section that is taller than it says lies over the next one.
"""

from __future__ import annotations

import re

SECTION = re.compile(r"<(/?)section\b([^>]*)>")
DETAILS = re.compile(r"<(/?)details\b[^>]*>")
UNSEEN = re.compile(
    r'<span class="katex-mathml">.*?</span>|<(script|style|template)\b.*?</\1>', re.S
)
CODE = re.compile(r"<pre>(.*?)</pre>", re.S)
DRAWN = re.compile(r"<svg\b.*?</svg>", re.S)
TAG, SPACE = re.compile(r"<[^>]*>"), re.compile(r"\s+")
# Pixels for each character, line of code, displayed formula, figure, row of a table and folded box,
# and for a heading: fitted to what Chromium draws of this book, and 15 % more.
PIXELS = {
    "wide": (0.48, 20, 145, 130, 30, 150, 40),
    "narrow": (0.75, 19, 190, 370, 50, 190, 45),
}


def say_heights(body: str) -> str:
    """Return a page's HTML whose sections of the second level say how tall they will be."""
    parts, depth, done, start = [], 0, 0, None
    for tag in SECTION.finditer(body):
        depth += -1 if tag[1] else 1
        if not tag[1] and depth == 2:
            start = tag
        elif tag[1] and depth == 1 and start is not None:
            style = ";".join(f"--{x}:{y}px" for x, y in heights(body[start.end() : tag.start()]))
            parts += body[done : start.start()], f'<section{start[2]} style="{style}">'
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
    counts = (len(text), lines, formulas, figures, rows, folded, 1)
    return [
        (name, round(sum(x * y for x, y in zip(counts, pixels, strict=True))))
        for name, pixels in PIXELS.items()
    ]


def _fold(section: str) -> tuple[str, int]:
    """Return a section without what is in its folded boxes, and how many of these it has."""
    parts, depth, done, count = [], 0, 0, 0
    for tag in DETAILS.finditer(section):
        if not tag[1] and depth == 0:
            parts.append(section[done : tag.start()])
            count += 1
        depth += -1 if tag[1] else 1
        if depth == 0:
            done = tag.end()
    return "".join(parts) + section[done:], count
