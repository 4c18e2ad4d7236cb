"""Draw which chapter needs which, from the cards at the top of the chapters.

``{prerequisites}`` is a figure: the row of a chapter is the length of the longest chain of chapters
that it needs, an arrow leads from a chapter to one that needs it, and an arrow that others imply is
left out. The figure uses the colours of the page.
"""

from __future__ import annotations

import html
import itertools
import re
import textwrap
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

CARD = re.compile(r"Before you start\n(.*?)\n\n", re.DOTALL)
SENTENCE = re.compile(r"(?<=\.)\s+(?=[A-Z{])")
LINK = re.compile(r"\{(?:doc|chapter)\}`(?:[^`<]*<)?/?([^`>]+)>?`")
WIDE, HIGH, THIN = 104, 58, 6  # size of a box, and width of an arrow that passes it
GAP, RISE, LINE = 14, 46, 14  # between boxes, rows and lines of text


def needs(pages: dict[str, str]) -> dict[str, list[str]]:
    """Return which of the others each page needs: those that its card links to with "need".

    `pages` maps names to sources. A page whose card has no sentence with "need" needs none.
    """
    found = {}
    for name, source in pages.items():
        card = CARD.search(source)
        said = SENTENCE.split(card[1]) if card else []
        links = [x for text in said if "need" in text.lower() for x in LINK.findall(text)]
        found[name] = [x for x in dict.fromkeys(links) if x in pages and x != name]
    return found


def before(graph: dict[str, list[str]], name: str) -> set[str]:
    """Return all pages that a page needs, directly or through others."""
    return {name for x in graph[name] for name in (x, *before(graph, x))}


def arrows(graph: dict[str, list[str]]) -> list[tuple[str, str]]:
    """Return the pairs (needed, needing) that do not follow from others."""
    return [
        (x, name)
        for name, direct in graph.items()
        for x in direct
        if not any(x in before(graph, other) for other in direct)
    ]


def rows(graph: dict[str, list[str]]) -> tuple[list[list], list[list]]:
    """Return pages by row (their longest path from the start), and the path of each arrow.

    An arrow that passes a row has its own place there, a tuple, so that it crosses no box.
    """
    depth: dict[str, int] = {}

    def measure(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max(map(measure, graph[name]), default=-1)
        return depth[name]

    table: list[list] = [[] for _ in range(1 + max(map(measure, graph)))]
    for name in graph:
        table[depth[name]].append(name)
    ways = []
    for one, other in arrows(graph):
        between = [(one, other, i) for i in range(depth[one] + 1, depth[other])]
        for place in between:
            table[place[2]].append(place)
        ways.append([one, *between, other])
    steps = [step for way in ways for step in itertools.pairwise(way)]
    middle = centres(table)
    for _ in range(4):  # move each place near those it is linked to, down and up again
        for row in (*table, *table[::-1]):
            near = {x: [middle[b if a == x else a] for a, b in steps if x in (a, b)] for x in row}
            row.sort(key=lambda x: sum(near[x]) / max(1, len(near[x])))
            middle = centres(table)
    return table, ways


def centres(table: list[list]) -> dict:
    """Return the centre of each place, as its distance to the right of its row's middle."""
    found = {}
    for row in table:
        widths = [WIDE + GAP if isinstance(x, str) else THIN + GAP for x in row]
        x = -sum(widths) / 2
        for name, width in zip(row, widths, strict=True):
            found[name] = x + width / 2
            x += width
    return found


def label(name: str) -> list[str]:
    """Return the lines of a box: a chapter's number, and the words in its file's name."""
    number, _, words = name.partition("_") if name[0].isdigit() else ("", "", name)
    return [*filter(None, [number]), *textwrap.wrap(words.replace("_", " "), 15)]


def sentence(graph: dict[str, list[str]]) -> str:
    """Return the graph in words, for the `aria-label` of the picture."""
    lines = [f"{x} needs {', '.join(direct)}" for x, direct in graph.items() if direct]
    return f"Prerequisites of the chapters: {'; '.join(lines)}."


def draw(graph: dict[str, list[str]]) -> str:
    """Return the picture as SVG."""
    table, ways = rows(graph)
    middle = centres(table)
    half = max(abs(x) for x in middle.values()) + WIDE / 2 + 1
    top = {name: 1 + i * (HIGH + RISE) for i, row in enumerate(table) for name in row}
    parts = []
    for way in ways:
        x, y = middle[way[0]] + half, top[way[0]] + HIGH
        path = f"M{x:.0f},{y:.0f}"
        for name in way[1:]:
            u, v, bend = middle[name] + half, top[name], RISE / 2
            path += f"C{x:.0f},{y + bend:.0f} {u:.0f},{v - bend:.0f} {u:.0f},{v:.0f}"
            path += f"V{v + HIGH:.0f}" if name != way[-1] else ""
            x, y = u, v + HIGH
        parts.append(f'<path class="link" data-link="{way[0]} {way[-1]}" d="{path}"/>')
        parts.append(f'<path class="head" d="M{u - 4:.0f},{v - 8:.0f}l8,0l-4,8z"/>')
    for name in graph:
        x, y = middle[name] + half, top[name]
        box = f'x="{x - WIDE / 2:.0f}" y="{y:.0f}" width="{WIDE}" height="{HIGH}"'
        parts.append(f'<rect {box} rx="6"/>')
        lines = label(name)
        first = y + HIGH / 2 - LINE * (len(lines) - 1) / 2 + 4
        for k, text in enumerate(lines):
            place = f'x="{x:.0f}" y="{first + LINE * k:.0f}"'
            parts.append(f"<text {place}>{html.escape(text)}</text>")
    high = len(table) * (HIGH + RISE) - RISE + 2
    return (
        f'<svg class="da-needs" viewBox="0 0 {2 * half:.0f} {high}" role="img" '
        f'aria-label="{html.escape(sentence(graph))}">{"".join(parts)}</svg>'
    )


class Prerequisites(SphinxDirective):
    """``{prerequisites}`` with a caption: a graph of the chapters of the numbered parts."""

    has_content = True

    def run(self):
        """Return the figure; the page is read again whenever a chapter changes."""
        import book  # here: `book` imports much that this module does not need

        folder = Path(self.env.srcdir)
        docs = [x for x in book.parts() if not x.startswith("book/audit_")]
        for doc in docs:
            self.env.note_dependency(str(folder / f"{doc}.md"))
        pages = {x.removeprefix("book/"): (folder / f"{x}.md").read_text("utf8") for x in docs}
        figure = nodes.figure("", nodes.raw("", draw(needs(pages)), format="html"))
        text, messages = self.state.inline_text(" ".join(self.content), self.lineno)
        figure += nodes.caption("", "", *text)
        return [figure, *messages]


def setup(app):
    """Register the directive."""
    app.add_directive("prerequisites", Prerequisites)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
