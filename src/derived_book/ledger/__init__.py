"""A Sphinx extension that builds ledger and errata from the claims in the output of pages.

``extensions = ["myst_nb", "derived_book.ledger"]`` adds to any book whose pages MyST-NB
executes, such as a Jupyter Book,

- ``{ledger}``: counts, filters, and a section for each paper with all its items; ``{ledger} NAME``
  is a ledger apart, of the papers whose ``group`` is that name, without filters;
- ``{errata}``: the same sections, with the items that are wrong as printed;
- ``{tally}`errors```: one number of `derived_book.claims.count`, linked to its rows;
- ``ledger.json`` beside the ledger's page, for programs.

Settings, all optional: ``claims_inventory``, the file of `claims.use_inventory`;
``claims_papers``, which maps a paper to ``{"title": …, "source": …, "group": …}``; and
``claims_page_name``, a function that returns the text of a link to a page, by default its title.
The source is a line of markup that names the version that was read. A paper with a group is in that
group's ledger alone, and neither counted nor listed among the others.

Sections are created when a page is read, so that the table of contents lists them. Verdicts are
filled in when a page is written, so that they describe this build, including cached pages.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import unescape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

from derived_book import claims
from derived_book.claims import GRADES, VERDICTS, inventory
from derived_book.ledger.plain_maths import typeset

STATIC = Path(__file__).parent / "static"
REPORTS = "reports_claims"  # key of a page's metadata: "ledger", "group", "errata" or "tally"
KINDS = {
    "identity": "identity",
    "equal": "equality",
    "inequality": "inequality",
    "certificate": "certificate",
    "refuted": "counterexample",
    "definition": "definition",
}
TALLIES = {  # the argument of {tally} -> the rows of the ledger that it links to
    **{verdict: {"verdict": verdict} for verdict in VERDICTS},
    **{
        f"{of}{plural}": {"grade": grade}
        for of in ("", "unnumbered ")
        for grade, plural in zip(GRADES, ("errors", "slips", "copies"), strict=True)
    },
    **dict.fromkeys(("all", "numbered", "unnumbered", "testable"), {}),
}
DATA = re.compile(rf' {claims.DATA}="([^"]*)"')  # in the HTML of a claim
Checks = Sequence[tuple[str, dict[str, Any]]]  # pairs of page and claim
log = logging.getLogger(__name__)


# --- claims of the executed pages ----------------------------------------------------------------


def claims_of(app: Sphinx) -> list[tuple[str, dict]]:
    """Return all claims of all executed pages as (page, claim)."""
    pages = _pages(app.env)
    return [(page, claim) for page in sorted(pages) for claim in pages[page]]


def _pages(env: Any) -> dict[str, list[dict]]:
    if not hasattr(env, "claims_found"):
        env.claims_found = {}
    return env.claims_found


def _collect(app: Sphinx, doctree: nodes.document) -> None:
    """Store the claims of a page that has been read."""
    matches = [DATA.search(node.astext()) for node in doctree.findall(nodes.raw)]
    _pages(app.env)[app.env.docname] = [json.loads(unescape(m[1])) for m in matches if m]


def _forget(app: Sphinx, env: BuildEnvironment, doc: str) -> None:
    _pages(env).pop(doc, None)


def _merge(
    app: Sphinx, env: BuildEnvironment, docs: Iterable[str], other: BuildEnvironment
) -> None:
    _pages(env).update({doc: _pages(other)[doc] for doc in docs if doc in _pages(other)})


def ledger(app: Sphinx) -> dict[str, dict[str, Any]]:
    """Return the verdicts of this build."""
    try:
        return claims.ledger(claims_of(app))
    except ValueError as error:
        raise ExtensionError(str(error)) from error


def papers(app: Sphinx, group: str = "") -> dict[str, str]:
    """Return the title of each paper of a group of the inventory, in its order."""
    names = dict.fromkeys(item.partition(".")[0] for item in inventory())
    return {
        name: _setting(app, name, "title") or name
        for name in names
        if _setting(app, name, "group") == group
    }


def of_group(app: Sphinx, group: str = "") -> dict[str, dict[str, Any]]:
    """Return the verdicts of this build on the papers of a group."""
    names = papers(app, group)
    return {item: row for item, row in ledger(app).items() if item.partition(".")[0] in names}


def _setting(app: Sphinx, paper: str, name: str) -> str:
    return app.config.claims_papers.get(paper, {}).get(name, "")


def items_of(paper: str) -> list[str]:
    """Return a paper's items, in its order."""
    return [item for item in inventory() if item.startswith(f"{paper}.")]


def slug(text: str) -> str:
    """Return `text` as a name of a CSS class or a part of an address."""
    return text.replace(" ", "-")


# --- when pages are read -------------------------------------------------------------------------


class Later(nodes.General, nodes.Element):
    """A placeholder for a part of a page that is filled in when the page is written."""


class LaterInline(nodes.Inline, nodes.TextElement):
    """A placeholder within a line of text."""


class Ledger(SphinxDirective):
    """``{ledger}``: counts, filters, and a section for each paper with all its items."""

    optional_arguments = 1  # the group whose ledger this is

    def run(self) -> list[nodes.Node]:
        """Return the form, and placeholders for the tables."""
        if self.group:
            self.env.metadata[self.env.docname].setdefault(REPORTS, "group")
            return self.sections(ledger_part)
        self.env.metadata[self.env.docname][REPORTS] = "ledger"
        form = nodes.raw("", filters(papers(self.env.app)), format="html")
        return [Later(make=summary), form, *self.sections(ledger_part)]

    @property
    def group(self) -> str:
        """The group of papers that the directive names."""
        return self.arguments[0] if self.arguments else ""

    def sections(self, make: Callable[..., list[nodes.Node]]) -> list[nodes.Node]:
        """Return a section for each paper: its title, its source, and a placeholder."""
        sections: list[nodes.Node] = []
        for paper, title in papers(self.env.app, self.group).items():
            section = nodes.section("", nodes.title("", title), ids=[f"paper-{paper}"])
            source = f"{_setting(self.env.app, paper, 'source')} Its items: `{paper}.…`".strip()
            self.state.nested_parse(StringList([source], self.env.docname), 0, section)
            section += Later(make=make, paper=paper)
            sections.append(section)
        return sections


class Errata(Ledger):
    """``{errata}``: the same sections, with the items that are wrong as printed."""

    def run(self) -> list[nodes.Node]:
        """Return the sections of the papers."""
        self.env.metadata[self.env.docname].setdefault(REPORTS, "errata")
        return self.sections(errata_part)


class Tally(SphinxRole):
    """``{tally}`errors```: one number of `claims.count`, linked to its rows of the ledger."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return a placeholder."""
        if self.text not in TALLIES:
            expected = ", ".join(TALLIES)
            problem = f"tally is {self.text!r}; expected one of {expected}"
            return [], [self.inliner.reporter.error(problem)]
        self.env.metadata[self.env.docname].setdefault(REPORTS, "tally")
        return [LaterInline(tally=self.text)], []


def filters(titles: dict[str, str]) -> str:
    """Return the form that selects rows; without scripts it is hidden, and all rows are shown."""
    named = {paper: f"{paper}: {title}" for paper, title in titles.items()}
    return (
        '<form class="da-filter" role="search" aria-label="Items of the ledger">'
        f"{_boxes('verdict', 'Verdict', VERDICTS)}{_boxes('grade', 'Grade', GRADES)}"
        f"{_select('paper', 'Paper', named)}{_select('kind', 'Kind of check', KINDS)}"
        '<label>Words <input type="search" name="words" autocomplete="off"></label>'
        '<button type="reset">Show all</button><output aria-live="polite"></output></form>'
    )


def _boxes(name: str, label: str, values: tuple[str, ...]) -> str:
    boxes = "".join(
        f'<label><input type="checkbox" name="{name}" value="{slug(value)}"> {value}</label>'
        for value in values
    )
    return f"<fieldset><legend>{label}</legend>{boxes}</fieldset>"


def _select(name: str, label: str, options: dict[str, str]) -> str:
    choices = "".join(f'<option value="{value}">{text}' for value, text in options.items())
    return f'<label>{label} <select name="{name}"><option value="">all{choices}</select></label>'


# --- when pages are written ----------------------------------------------------------------------


def _fill_in(app: Sphinx, doctree: nodes.document, doc: str) -> None:
    for node in list(doctree.findall(Later)):
        make = node["make"]
        node.replace_self(make(app, doc, node["paper"]) if "paper" in node else make(app, doc))
    for node in list(doctree.findall(LaterInline)):
        number = str(claims.count(of_group(app))[node["tally"]])
        node.replace_self(link_to_rows(app, doc, number, **TALLIES[node["tally"]]))
    for node in doctree.findall(nodes.raw):  # the written page does not need the data
        if DATA.search(node.astext()):
            node.children = [nodes.Text(DATA.sub("", node.astext()))]


def ledger_page(app: Sphinx) -> str | None:
    """Return the page that contains the ledger."""
    pages = app.env.metadata.items()
    return next((doc for doc, meta in pages if meta.get(REPORTS) == "ledger"), None)


def link_to_rows(app: Sphinx, doc: str, text: str, **choice: str) -> nodes.Node:
    """Link to a selection of the ledger's rows, in the format that static/ledger.js reads."""
    words = "&".join(f"{name}={slug(value)}" for name, value in choice.items())
    page = ledger_page(app)
    return link(app, doc, page, words, text) if page else nodes.Text(text)


def summary(app: Sphinx, doc: str) -> nodes.table:
    """Return a table of the numbers of items by paper, verdict and grade."""
    rows, titles = of_group(app), papers(app)
    mistakes = claims.mistakes(rows)
    columns = [{"grade": grade} for grade in GRADES] + [{"verdict": v} for v in VERDICTS[1:]]

    def numbers(items: list[str], **choice: str) -> list:
        cells: list = []
        for column in columns:
            ((field, value),) = column.items()
            number = sum(rows[item][field] == value for item in items)
            cell = link_to_rows(app, doc, str(number), **choice, **column)
            cells.append([cell] if number else "–")
        roots = Counter(grade for root, (grade, _) in mistakes.items() if root in items)
        return [*cells, str(len(items)), str(roots["error"])]

    lines = []
    for paper, title in titles.items():
        checked = [item for item in items_of(paper) if item in rows]
        name = link(app, doc, doc, f"paper-{paper}", title)
        lines.append([[name], *numbers(checked, paper=paper)])
    lines.append([[nodes.strong("", "all papers")], *numbers(list(rows))])
    header = ["paper", *GRADES, *VERDICTS[1:], "items", "distinct errors"]
    return table(header, lines, ["da-counts"])


def ledger_part(app: Sphinx, doc: str, paper: str) -> list[nodes.Node]:
    """Return a table of a paper's items; warn if no page checks one of them."""
    rows = ledger(app)
    checked = [item for item in items_of(paper) if item in rows]
    if missing := [item for item in items_of(paper) if item not in rows]:
        log.warning("no page gives a verdict on %s", ", ".join(missing), location=doc)
    header = ["item", "verdict", "what the machine did"]
    return [item_table(app, doc, checked, item_verdict, header)] if checked else []


def errata_part(app: Sphinx, doc: str, paper: str) -> list[nodes.Node]:
    """Return a table of a paper's items that are wrong as printed, with the corrections."""
    rows = ledger(app)
    checked = [item for item in items_of(paper) if item in rows]
    wrong = [item for item in checked if rows[item]["grade"]]
    if not wrong:
        result = "of which none is wrong as printed" if checked else "so far"
        return [paragraph(f"{len(checked)} of {len(items_of(paper))} items checked, {result}.")]
    header = ["item", "what holds instead", "what the machine did"]
    return [item_table(app, doc, wrong, erratum, header)]


def item_table(
    app: Sphinx,
    doc: str,
    items: list[str],
    describe: Callable[[str, dict], list[nodes.Node]],
    header: list[str],
) -> nodes.table:
    """Return a table with a row for each item, whose id is the row's anchor."""
    rows, pairs = ledger(app), claims_of(app)
    checks = {item: [(p, claim) for p, claim in pairs if claim["item"] == item] for item in items}
    lines = [
        [item_name(item), describe(item, rows[item]), _checks(app, doc, checks[item])]
        for item in items
    ]
    result = table(header, lines, ["da-ledger"])
    for item, line in zip(items, list(result.findall(nodes.row))[1:], strict=True):
        line["ids"] = [item]
        grade = rows[item]["grade"]
        kinds = dict.fromkeys(f"kind-{claim['kind']}" for _, claim in checks[item])
        verdict = f"verdict-{slug(rows[item]['verdict'])}"
        line["classes"] = [verdict, *([f"grade-{grade}"] if grade else []), *kinds]
    return result


def item_name(item: str) -> list[nodes.Node]:
    """Return an item's id, linked to itself so that it can be cited, and its topic."""
    return [_item_link(item), nodes.Text(" "), *typeset(inventory()[item]["topic"])]


def _item_link(item: str) -> nodes.reference:
    return nodes.reference("", "", nodes.literal("", item), internal=True, refuri=f"#{item}")


def item_verdict(item: str, row: dict) -> list[nodes.Node]:
    """Return an item's verdict, and the condition, the correction or the checked statement."""
    verdict = row["verdict"]
    cell: list[nodes.Node] = [nodes.strong("", verdict, classes=[f"da-{slug(verdict)}"])]
    if row["grade"]:
        cell += [nodes.Text(" ("), *_grade(row), nodes.Text(")")]
    if row["statement"] != inventory()[item]["topic"]:
        cell += [nodes.Text(" " if verdict == "holds if" else ": "), *typeset(row["statement"])]
    return cell


def erratum(item: str, row: dict) -> list[nodes.Node]:
    """Return the grade of a mistake, and its correction."""
    grade, *more = _grade(row)
    strong = nodes.strong("", grade.astext(), classes=["da-wrong-as-printed"])
    return [strong, *more, nodes.Text(": "), *typeset(row["statement"])]


def _grade(row: dict) -> list[nodes.Node]:
    """Return a grade, whether it may be the copy's fault, and the item with the same mistake."""
    cell: list[nodes.Node] = [nodes.Text(row["grade"])]
    if row["grade"] == "copy":
        cell.append(nodes.Text(", perhaps not in print"))
    if row["same_as"]:
        cell += [nodes.Text(", the same mistake as "), _item_link(row["same_as"])]
    return cell


def _checks(app: Sphinx, doc: str, checks: Checks) -> list[nodes.Node]:
    """Return a line for each check, linked to its place in the book."""
    parts: list[nodes.Node] = []
    name = app.config.claims_page_name or (lambda page: app.env.titles[page].astext())
    for page, claim in checks:
        check = claim["anchor"].rpartition("-")[2]
        source = link(app, doc, page, claim["anchor"], f"{name(page)}, check {check}")
        parts.append(nodes.inline("", f"{check_text(claim)} ", source, classes=["da-check"]))
    return parts


def check_text(claim: dict) -> str:
    """Describe the margins of a claim and of its mutant in words."""
    kind, margin, mutant = claim["kind"], claim["margin"], claim["mutant_margin"]
    unit = f" {claim['unit']}" if claim.get("unit") else ""
    if kind == "definition":
        return "Definition: the shapes are right."
    if kind == "identity":
        return f"Identity: zero, exactly; the mutant leaves {number(mutant)}."
    if kind == "equal":
        error = f"error {number(margin)}" if margin else "no error"
        return f"Equality: {error}; the mutant’s {number(mutant)}."
    if kind == "certificate":
        return f"Certificate: gap {number(margin)}; the mutant’s {number(mutant)}."
    if kind == "inequality":  # a negative slack is rounding
        slack = f"slack {number(margin)}" if margin > 0 else "tight, up to rounding"
        return f"Inequality: {slack}; the mutant is violated by {number(mutant)}."
    result = f"has {number(-mutant)}{unit} to spare" if mutant < 0 else "is exact"
    result = f"has error {number(mutant)}{unit}" if mutant > 0 else result
    return f"Counterexample: the print fails by {number(margin)}{unit}; the correction {result}."


def number(value: float) -> str:
    """Return a number with two digits, and a power of ten if it is small or large."""
    if value == 0 or 1e-3 <= value < 1e4:
        return f"{value:.2g}" if value < 99.5 else f"{value:.0f}"
    digits, power = f"{value:.0e}".split("e")
    exponent = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{digits}·10{exponent}"


# --- nodes ---------------------------------------------------------------------------------------


def table(header: list[str], rows: list[list], classes: list[str]) -> nodes.table:
    """Build a docutils table; a cell is text or a list of inline nodes."""
    group = nodes.tgroup(cols=len(header))
    group += [nodes.colspec(colwidth=1) for _ in header]
    for part, content in ((nodes.thead(), [header]), (nodes.tbody(), rows)):
        for row in content:
            part += nodes.row("", *(nodes.entry("", paragraph(cell)) for cell in row))
        group += part
    return nodes.table("", group, classes=classes)


def paragraph(cell: str | Sequence[nodes.Node]) -> nodes.paragraph:
    """Return text, or a list of inline nodes, as a paragraph."""
    return nodes.paragraph("", "", *([nodes.Text(cell)] if isinstance(cell, str) else cell))


def link(app: Sphinx, source: str, target: str, anchor: str, text: str) -> nodes.reference:
    """Return a link from one page to an anchor on another."""
    uri = app.builder.get_relative_uri(source, target) + f"#{anchor}"
    return nodes.reference("", text, internal=True, refuri=uri)


# --- events --------------------------------------------------------------------------------------


def _begin(app: Sphinx) -> None:
    if app.config.claims_inventory:
        claims.use_inventory(Path(app.srcdir) / app.config.claims_inventory)
    app.config.html_static_path.append(str(STATIC))


def _find_outdated(
    app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """Return the pages that report on claims, which are written again in every build."""
    return [doc for doc, meta in env.metadata.items() if REPORTS in meta and doc not in removed]


def _add_script(
    app: Sphinx, pagename: str, templatename: str, context: dict, doctree: nodes.document | None
) -> None:
    if pagename == ledger_page(app):
        app.add_js_file("ledger.js", loading_method="defer")


def _write_json(app: Sphinx, error: Exception | None) -> None:
    """Write ``ledger.json`` beside the ledger's page."""
    if error is None and app.builder.format == "html" and (page := ledger_page(app)):
        rows = ledger(app)
        folder = (Path(app.outdir) / page).parent
        temporary = folder / "ledger.tmp"
        temporary.write_text(claims.to_json(rows), "utf8")
        os.replace(temporary, folder / "ledger.json")
        print(f"ledger: {len(rows)} of {len(inventory())} items have a verdict")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.add_config_value("claims_inventory", None, "env", [str])
    app.add_config_value("claims_papers", {}, "env", [dict])
    app.add_config_value("claims_page_name", None, "")  # a function: page -> the text of links
    app.add_node(Later)
    app.add_node(LaterInline)
    app.add_directive("ledger", Ledger)
    app.add_directive("errata", Errata)
    app.add_role("tally", Tally())
    app.add_css_file("claims.css")
    app.connect("builder-inited", _begin)
    app.connect("doctree-read", _collect)
    app.connect("env-purge-doc", _forget)
    app.connect("env-merge-info", _merge)
    app.connect("env-get-outdated", _find_outdated)
    app.connect("doctree-resolved", _fill_in)
    app.connect("html-page-context", _add_script)
    app.connect("build-finished", _write_json)
    return {"env_version": 2, "parallel_read_safe": True, "parallel_write_safe": True}
