"""The ledger and the errata: pages made from the claims that the executed pages have left.

Sections and their titles are known when a page is read, so that they stand in the contents. The
verdicts are filled in when it is written: they report this very build, cached pages included.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from pybtex.database import parse_file
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective, SphinxRole

from book import ROOT, claims_of, link, paragraph, short_name, table
from derived_attention.claims import VERDICTS, inventory, ledger, to_json
from plain_maths import typeset

PAPERS = {  # prefix of the items -> key in the bibliography
    "000": "Nguyen2023",
    "001": "MrsFormer",
    "002": "Chen2023",
    "003": "OptimizingAttention",
    "004": "Nguyen2022",
}
KINDS = {
    "identity": "identity",
    "equal": "equality",
    "inequality": "inequality",
    "certificate": "certificate",
    "refuted": "counterexample",
    "definition": "definition",
}


@lru_cache
def paper_title(paper: str) -> str:
    """Return a paper's title from the bibliography."""
    entry = parse_file(ROOT / "book" / "references.bib").entries[PAPERS[paper]]
    return re.sub("[{}]", "", entry.fields["title"])


def items_of(paper: str) -> list[str]:
    """Return a paper's items, in its order."""
    return [item for item in inventory() if item.startswith(f"{paper}.")]


def slug(text: str) -> str:
    """Return a name for classes and addresses."""
    return text.replace(" ", "-")


# --- when pages are read -------------------------------------------------------------------------


class Later(nodes.General, nodes.Element):
    """Stands for a part of a page that is known only when it is written."""


class LaterInline(nodes.Inline, nodes.TextElement):
    """The same, within a line of text."""


class Ledger(SphinxDirective):
    """``{ledger}``: counts, filters, and a section for each paper with all its items."""

    def run(self):
        """Return what is known, and placeholders."""
        self.env.metadata[self.env.docname]["always_write"] = True
        form = nodes.raw("", filters(), format="html")
        return [Later(make=summary), form, *(self.section(p, ledger_part) for p in PAPERS)]

    def section(self, paper: str, make) -> nodes.section:
        """Return a section on one paper: its title, who wrote it, and a placeholder."""
        title = paper_title(paper)
        section = nodes.section("", nodes.title("", title), ids=[f"paper-{paper}"])
        source = f"{{cite:t}}`{PAPERS[paper]}`. The names of its items start with `{paper}`."
        self.state.nested_parse(StringList([source], self.env.docname), 0, section)
        section += Later(make=make, paper=paper)
        return section


class Errata(Ledger):
    """``{errata}``: the same sections, with what is wrong as printed."""

    def run(self):
        """Return the sections of the papers that have been checked."""
        self.env.metadata[self.env.docname]["always_write"] = True
        return [self.section(paper, errata_part) for paper in PAPERS]


class Tally(SphinxRole):
    """``{tally}`holds```: how many items have a verdict, linked; ``all``, how many have any."""

    def run(self):
        """Leave a placeholder."""
        if self.text not in (*VERDICTS, "all"):
            message = self.inliner.reporter.error(f"tally: unknown verdict {self.text!r}")
            return [], [message]
        self.env.metadata[self.env.docname]["always_write"] = True
        return [LaterInline(verdict=self.text)], []


def filters() -> str:
    """Return the form that chooses rows; without scripts it is hidden, and all rows show."""
    boxes = "".join(
        f'<label><input type="checkbox" name="verdict" value="{slug(verdict)}"> {verdict}</label>'
        for verdict in VERDICTS
    )
    papers = {paper: f"{paper}: {paper_title(paper)}" for paper in PAPERS}
    return (
        '<form class="da-filter" role="search" aria-label="Items of the ledger">'
        f"<fieldset><legend>Verdict</legend>{boxes}</fieldset>"
        f"{_select('paper', 'Paper', papers)}{_select('kind', 'Kind of check', KINDS)}"
        '<label>Words <input type="search" name="words" autocomplete="off"></label>'
        '<button type="reset">Show all</button><output aria-live="polite"></output></form>'
    )


def _select(name: str, label: str, options: dict[str, str]) -> str:
    choices = "".join(f'<option value="{value}">{text}' for value, text in options.items())
    return f'<label>{label} <select name="{name}"><option value="">all{choices}</select></label>'


# --- when pages are written ----------------------------------------------------------------------


def _fill_in(app, doctree, doc):
    for node in list(doctree.findall(Later)):
        make = node["make"]
        node.replace_self(make(app, doc, node["paper"]) if "paper" in node else make(app, doc))
    for node in list(doctree.findall(LaterInline)):
        node.replace_self(tally(app, doc, node["verdict"]))


def filtered(app, doc: str, text: str, **choice: str) -> nodes.reference:
    """Link to the ledger with some of its rows chosen, as assets/ledger.js reads it."""
    words = "&".join(f"{name}={slug(value)}" for name, value in choice.items())
    return link(app, doc, "book/ledger", words, text)


def tally(app, doc: str, verdict: str) -> nodes.reference:
    """Return a number of items, linked to them."""
    verdicts = Counter(row["verdict"] for row in ledger(claims_of(app)).values())
    if verdict == "all":
        return link(app, doc, "book/ledger", "", str(verdicts.total()))
    return filtered(app, doc, str(verdicts[verdict]), verdict=verdict)


def summary(app, doc: str) -> nodes.table:
    """Return how many items of each paper have which verdict."""
    verdicts = {item: row["verdict"] for item, row in ledger(claims_of(app)).items()}
    lines = []
    for paper in PAPERS:
        counts = Counter(verdicts[item] for item in items_of(paper))
        numbers = [_count(app, doc, paper, v, counts[v]) for v in VERDICTS]
        title = link(app, doc, doc, f"paper-{paper}", paper_title(paper))
        lines.append([[title], *numbers, str(counts.total())])
    total = Counter(verdicts.values())
    sums = [[filtered(app, doc, str(total[v]), verdict=v)] for v in VERDICTS]
    lines.append([[nodes.strong("", "all papers")], *sums, str(len(verdicts))])
    return table(["paper", *VERDICTS, "items"], lines, ["da-counts"])


def _count(app, doc, paper, verdict, number):
    if not number:
        return "–"
    return [filtered(app, doc, str(number), paper=paper, verdict=verdict)]


def ledger_part(app, doc: str, paper: str) -> list[nodes.Node]:
    """Return a table of a paper's items, and an error if a page has lost one of them."""
    claims = claims_of(app)
    rows = ledger(claims)
    if missing := [item for item in items_of(paper) if item not in rows]:
        raise ExtensionError(f"no page gives a verdict on {', '.join(missing)}")
    header = ["item", "verdict", "what the machine did"]
    says = {item: item_says(item, rows[item]) for item in items_of(paper)}
    return [item_table(app, doc, says, claims, header)]


def errata_part(app, doc: str, paper: str) -> list[nodes.Node]:
    """Return a paper's items that are wrong as printed, with what holds instead."""
    claims = claims_of(app)
    rows = ledger(claims)
    checked = [item for item in items_of(paper) if item in rows]
    wrong = [item for item in checked if rows[item]["verdict"] == "wrong as printed"]
    if not wrong:
        found = "of which none is wrong as printed" if checked else "so far"
        return [paragraph(f"{len(checked)} of {len(items_of(paper))} items checked, {found}.")]
    header = ["item", "what holds instead", "what the machine did"]
    says = {item: typeset(rows[item]["statement"]) for item in wrong}
    return [item_table(app, doc, says, claims, header)]


def item_table(app, doc: str, says: dict[str, list], claims, header: list[str]) -> nodes.table:
    """Return a table with a row for each item, whose name is the row's anchor."""
    checks = {item: [(p, claim) for p, claim in claims if claim["item"] == item] for item in says}
    lines = [[item_name(item), says[item], _checks(app, doc, checks[item])] for item in says]
    result, rows = table(header, lines, ["da-ledger"]), ledger(claims)
    for item, row in zip(says, list(result.findall(nodes.row))[1:], strict=True):
        row["ids"] = [item]
        kinds = dict.fromkeys(f"kind-{claim['kind']}" for _, claim in checks[item])
        row["classes"] = [f"verdict-{slug(rows[item]['verdict'])}", *kinds]
    return result


def item_name(item: str) -> list[nodes.Node]:
    """Return an item's id, linked to itself so that it can be cited, and its topic."""
    name = nodes.reference("", "", nodes.literal("", item), internal=True, refuri=f"#{item}")
    return [name, nodes.Text(" "), *typeset(inventory()[item]["topic"])]


def item_says(item: str, row: dict) -> list[nodes.Node]:
    """Return an item's verdict, and the condition, the correction or what was checked."""
    verdict = row["verdict"]
    says: list[nodes.Node] = [nodes.strong("", verdict, classes=[f"da-{slug(verdict)}"])]
    if row["statement"] != inventory()[item]["topic"]:
        says += [nodes.Text(" " if verdict == "holds if" else ": "), *typeset(row["statement"])]
    return says


def _checks(app, doc: str, claims) -> list[nodes.Node]:
    """Return a line on each check, linked to where it was executed."""
    parts: list[nodes.Node] = []
    for page, claim in claims:
        check = claim["anchor"].rpartition("-")[2]
        place = link(app, doc, page, claim["anchor"], f"{short_name(page)}, check {check}")
        line = nodes.inline("", f"{check_text(claim)} ", place, classes=["da-check"])
        parts.append(line)
    return parts


def check_text(claim: dict) -> str:
    """Say what a check found, and how it tells the mutant, in words for its numbers."""
    kind, margin, mutant = claim["kind"], claim["margin"], claim["mutant_margin"]
    if kind == "definition":
        return "Definition: the shapes are right."
    if kind == "identity":
        return f"Identity: zero, exactly; the mutant leaves {number(mutant)}."
    if kind == "equal":
        error = f"error {number(margin)}" if margin else "no error"
        return f"Equality: {error}; the mutant’s {number(mutant)}."
    if kind == "certificate":
        return f"Certificate: gap {number(margin)}; the mutant’s {number(mutant)}."
    if kind == "inequality":  # a claim may lack no more than rounding
        slack = f"slack {number(margin)}" if margin > 0 else "tight, up to rounding"
        return f"Inequality: {slack}; the mutant is violated by {number(mutant)}."
    left = f"has {number(-mutant)} to spare" if mutant < 0 else f"has error {number(mutant)}"
    left = left if mutant else "is exact"
    return f"Counterexample: the print fails by {number(margin)}; the correction {left}."


def number(value: float) -> str:
    """Return a size in two digits, with a power of ten where it is small or large."""
    if 1e-3 <= value < 1e4:
        return f"{value:.2g}" if value < 100 else f"{value:.0f}"
    digits, power = f"{value:.0e}".split("e")
    raised = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{digits}·10{raised}"


def _add_script(app, pagename, templatename, context, doctree):
    if pagename == "book/ledger":
        app.add_js_file("ledger.js", loading_method="defer")


def _write_json(app, error):
    """Write the ledger for programs: beside the page, so that it travels with it."""
    if error is None and app.builder.format == "html":
        rows = ledger(claims_of(app))
        for path in (Path(app.outdir).parent, Path(app.outdir) / "book"):
            temporary = path / "ledger.tmp"
            temporary.write_text(to_json(rows), "utf8")
            os.replace(temporary, path / "ledger.json")
        print(f"ledger: {len(rows)} of {len(inventory())} items have a verdict")


def setup(app):
    """Register everything above."""
    app.add_node(Later)
    app.add_node(LaterInline)
    app.add_directive("ledger", Ledger)
    app.add_directive("errata", Errata)
    app.add_role("tally", Tally())
    app.connect("doctree-resolved", _fill_in)
    app.connect("html-page-context", _add_script)
    app.connect("build-finished", _write_json)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
