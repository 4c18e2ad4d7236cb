"""What the code of a cell is, in a few words: for pages and notebooks that fold it away."""

from __future__ import annotations

from docutils import nodes


def code_label(app, doc: str, cell: nodes.Element) -> str:
    """Return what a cell's code is, such as ``figure 5.1``."""
    figures = app.env.toc_fignumbers.get(doc, {}).get("figure", {})
    for figure in cell.findall(nodes.figure):
        for number in filter(None, map(figures.get, figure["ids"])):
            return f"figure {'.'.join(map(str, number))}"
    return "code"
