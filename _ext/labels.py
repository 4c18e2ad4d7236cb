"""Label each folded code cell with its purpose, so that a reader knows what it hides."""

from __future__ import annotations

import ast
import re

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

CLAIM = re.compile(r'id="claim-(.+?)-\d+"')
MOST = 3  # names in one label


def code_label(app, doc: str, cell: nodes.container) -> str:
    """Return a cell's label: its figures and checks, else its table, definitions or result.

    Parameters
    ----------
    app
        The Sphinx application, once figures are numbered.
    doc
        The page, such as ``book/05_normalise_and_scale``.
    cell
        The container of the cell, with its input and its outputs.

    Returns
    -------
    str
        Such as ``figure 5.1`` or ``checks of 000.eq3, 000.eq4``; empty if there is nothing to name.
    """
    code, page = _source(cell), _html(cell)
    parts = [*_figures(app, doc, cell, page), *_checks(page)]
    if parts:
        return " and ".join(parts)
    if _has_table(cell, page):
        return "the table below"
    defined, assigned, imports = _names(code)
    if imports and not defined:
        return "set-up"
    if defined:
        return _some(defined)
    if any(cell.findall(_is_output)):
        return "the result below"
    return _some(assigned)


def _source(cell) -> str:
    return next((block.astext() for block in cell.findall(nodes.literal_block)), "")


def _is_output(node) -> bool:
    return isinstance(node, nodes.Element) and node.get("nb_element") == "cell_code_output"


def _html(cell) -> str:
    return "".join(raw.astext() for raw in cell.findall(nodes.raw))


def _figures(app, doc, cell, page) -> list[str]:
    numbers = app.env.toc_fignumbers.get(doc, {}).get("figure", {})
    figures = [figure["ids"][0] for figure in cell.findall(nodes.figure) if figure["ids"]]
    found = [".".join(map(str, numbers[name])) for name in figures if name in numbers]
    kind = "interactive figure" if "da-slider" in page else "figure"
    if not found:
        return ["the interactive figure"] if "da-slider" in page else []
    return [f"{kind}{'s' * (len(found) > 1)} {', '.join(found)}"]


def _checks(page: str) -> list[str]:
    claims = CLAIM.findall(page)
    items = list(dict.fromkeys(item for item in claims if item != "book"))
    if items:
        return [f"check{'s' * (len(claims) > 1)} of {_some(items)}"]
    return [f"{len(claims)} checks" if len(claims) > 1 else "a check"] if claims else []


def _has_table(cell, page: str) -> bool:
    return any(cell.findall(nodes.table)) or "<table" in page


def _names(code: str) -> tuple[list[str], list[str], bool]:
    """Return the names that code defines and assigns, and whether it starts with an import."""
    try:
        body = ast.parse(code).body
    except SyntaxError:  # a magic command of IPython
        return [], [], False
    defined = [s.name for s in body if isinstance(s, (ast.FunctionDef, ast.ClassDef))]
    targets = [t for s in body if isinstance(s, ast.Assign) for t in s.targets]
    assigned = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    imports = bool(body) and isinstance(body[0], (ast.Import, ast.ImportFrom))
    return defined, list(dict.fromkeys(assigned)), imports


def _some(names: list[str]) -> str:
    rest = len(names) - MOST
    # The last name is no longer than the words "and 1 more".
    return ", ".join(names) if rest < 2 else f"{', '.join(names[:MOST])} and {rest} more"


class LabelFoldedCells(SphinxPostTransform):
    """Add to the prompts of every folded cell a label with its purpose."""

    default_priority = 198  # before myst-nb folds them
    formats = ("html",)

    def run(self, **kwargs):
        """Add the labels to the prompts."""
        for cell in self.document.findall(nodes.container):
            if cell.get("hide_mode") != "input":
                continue
            if label := code_label(self.app, self.env.docname, cell):
                cell["prompt_show"] += f": {label}"
                cell["prompt_hide"] += f": {label}"


def setup(app):
    """Register the labels."""
    app.add_post_transform(LabelFoldedCells)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
