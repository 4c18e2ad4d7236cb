"""What this book adds to Sphinx: its ledger, its status page, measured times and launch buttons.

Pages leave their claims and their times in the executed notebooks; the tables made from them are
filled in when pages are written, so that they report this very build, cached pages included.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import tomllib
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

from docutils import nodes
from docutils.statemachine import StringList
from jupyter_cache import get_cache
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective, SphinxRole
from sphinx_external_toc.collectors import TocTreeCollectorWithStyles

from derived_attention import recorded
from derived_attention.attention import mechanisms
from derived_attention.claims import OUTPUT_KEY, VERDICTS, inventory, ledger, to_json
from execute import CACHE, RECORD, read_page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import table as benchmarks  # noqa: E402

WORDS_PER_MINUTE = 200
SECONDS_PER_FORMULA = 15
SECONDS_PER_CELL = 20

# Names of other libraries in docstrings, and where their documentation is.
TORCH = "https://docs.pytorch.org/docs/stable/"
EXTERNAL = {
    "torch.Tensor": TORCH + "tensors.html",
    "Tensor": TORCH + "tensors.html",
    "torch.nn.Module": TORCH + "generated/torch.nn.Module.html",
    "nn.Module": TORCH + "generated/torch.nn.Module.html",
    "torch.nn.modules.module.Module": TORCH + "generated/torch.nn.Module.html",
    "torch.device": TORCH + "tensor_attributes.html#torch.device",
    "torch.nn.MultiheadAttention": TORCH + "generated/torch.nn.MultiheadAttention.html",
    "nn.MultiheadAttention": TORCH + "generated/torch.nn.MultiheadAttention.html",
}
WORDS = {"callable", "optional"}  # what descriptions of types say and is no class


# --- what the executed pages say -----------------------------------------------------------------


def chapters(app) -> list[str]:
    """Return the numbered chapters, in the book's order."""
    return sorted(doc for doc in app.env.found_docs if re.match(r"book/\d\d_", doc))


@lru_cache
def executed(path: Path) -> dict:
    """Return a page as a notebook with the outputs of its execution."""
    notebook = read_page(path)
    if notebook is None:  # a page without code
        return {"cells": []}
    cache = get_cache(CACHE)
    record = cache.match_cache_notebook(notebook)
    return cache.get_cache_bundle(record.pk).nb


def claims_of(app) -> list[tuple[str, dict]]:
    """Return all claims of all executed pages as (page, claim)."""
    return [
        (doc, output["metadata"][OUTPUT_KEY])
        for doc in chapters(app)
        for cell in executed(Path(app.env.doc2path(doc)))["cells"]
        for output in cell.get("outputs", [])
        if OUTPUT_KEY in output.get("metadata", {})
    ]


def run_seconds(app, doc: str) -> float | None:
    """Return how long the page took to execute."""
    data = getattr(app.env, "nb_metadata", {}).get(doc, {}).get("exec_data")
    return data["runtime"] if data else None


def read_minutes(doctree) -> int:
    """Estimate the time to read a page: what is open to the eye, not what is folded away."""
    words = formulas = cells = 0
    for node in doctree.findall():
        if isinstance(node, (nodes.paragraph, nodes.math_block)) or _is_cell(node):
            if _folded(node):
                continue
            words += len(node.astext().split()) if isinstance(node, nodes.paragraph) else 0
            formulas += isinstance(node, nodes.math_block)
            cells += _is_cell(node)
    seconds = SECONDS_PER_FORMULA * formulas + SECONDS_PER_CELL * cells
    return max(1, round(words / WORDS_PER_MINUTE + seconds / 60))


def _is_cell(node) -> bool:
    return isinstance(node, nodes.container) and "cell_input" in node["classes"]


def _folded(node) -> bool:
    """Say whether a node is in a solution, a closed box, or the hidden input of a cell."""
    while node is not None:
        classes = node.attributes.get("classes", []) if isinstance(node, nodes.Element) else []
        if "solution" in classes or node.attributes.get("design_component") == "dropdown":
            return True
        if node.attributes.get("hide_mode") in ("input", "all"):
            return True
        node = node.parent
    return False


# --- directives and roles ------------------------------------------------------------------------


class Pending(nodes.General, nodes.Element):
    """Stands for something that is known only when pages are written."""


class PendingInline(nodes.Inline, nodes.TextElement):
    """The same, within a line of text."""


class Table(SphinxDirective):
    """``{ledger}``, ``{errata}``, ``{status}``, ``{coverage}``: made from the executed pages."""

    def run(self):
        """Leave a placeholder."""
        self.env.metadata[self.env.docname]["always_write"] = True
        return [Pending(kind=self.name)]


class Benchmarks(SphinxDirective):
    """``{benchmarks} case case …``: what ``python -m benchmarks`` measured, as it is committed."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        """Return the tables of these cases, and a line on each machine before them."""
        names = self.arguments[0].split()
        files = _result_files(names)
        for path in files:
            self.env.note_dependency(path)
        seen = self.env.metadata[self.env.docname].setdefault("benchmarks", {})
        seen[self.arguments[0]] = files
        try:
            results = benchmarks.load(names)
            times = benchmarks.time_table(results, names)
        except ValueError as error:
            raise self.error(str(error)) from error
        captions = [_paragraph(benchmarks.caption(found)) for found in results.values()]
        memory = map(benchmarks.memory_table, benchmarks.of_each_kind(results))
        first, *others = (table(*rows, ["da-benchmarks"]) for rows in (times, *memory))
        return [*captions, first, _paragraph(benchmarks.NOTE), *others]


def _result_files(names) -> list[str]:
    return [str(p) for n in names for p in sorted(benchmarks.RESULTS.glob(f"*/{n}.json"))]


class Experiments(SphinxDirective):
    """``{experiments} name``: the scores that a script of benchmarks/ has found, as committed."""

    required_arguments = 1

    def run(self):
        """Return for each device a line on what was run, and its table."""
        name = self.arguments[0]
        for path in recorded.FOLDER.glob(f"{name}_*.json"):
            self.env.note_dependency(str(path))
        try:
            results = recorded.load_experiment(name)
        except ValueError as error:
            raise self.error(str(error)) from error
        parts = []
        for data in results:
            parts.append(_paragraph(benchmarks.experiment_caption(data)))
            parts.append(table(*benchmarks.experiment_table(data), ["da-benchmarks"]))
        return parts


class Mechanisms(SphinxDirective):
    """``{mechanisms}``: a table of the registry, and the modules of ``attention/``.

    Of a module that has public names, only these: the rest serves other modules.
    """

    def run(self):
        """Return what is documented, in the order of the chapters."""
        self.env.note_dependency(mechanisms.__file__)
        lines = [*mechanisms_table(self.env.found_docs), "", "```{eval-rst}"]
        for module in attention_modules():
            name = f"{mechanisms.PACKAGE}.{module}"
            public = ", ".join(n for n, where in mechanisms.PUBLIC.items() if where == name)
            lines += [f".. automodule:: {name}", f"   :members: {public}".rstrip(), ""]
        part = nodes.container()
        self.state.nested_parse(StringList([*lines, "```"], mechanisms.__file__), 0, part)
        return part.children


def mechanisms_table(docs) -> list[str]:
    """Return the registry as lines of a Markdown table; `docs` are the pages to link to."""
    pages = {int(match[1]): doc for doc in docs if (match := re.match(r"book/(\d\d)_", doc))}
    lines = [
        "| name | label | chapter | function | layer | masks | causal | linear in $N$ |",
        "|" + " --- |" * 8,
    ]
    for name, entry in mechanisms.MECHANISMS.items():
        function, layer = (f"~{mechanisms.PACKAGE}.{x}" for x in (entry.function, entry.layer))
        page = pages.get(entry.chapter)
        cells = [
            f'`"{name}"`',
            entry.label,
            f"{{doc}}`{entry.chapter} </{page}>`" if page else str(entry.chapter),
            f"{{py:func}}`{function}`",
            f"{{py:class}}`{layer}`",
            "any" if entry.any_mask else "over keys",
            "yes" if entry.causal else "no",
            "yes" if entry.linear else "no",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def attention_modules() -> list[str]:
    """Return the modules of ``attention/``: those of the registry first, in its order."""
    families = [
        where.partition(".")[0]
        for entry in mechanisms.MECHANISMS.values()
        for where in (entry.function, entry.layer)
    ]
    found = sorted(path.stem for path in Path(mechanisms.__file__).parent.glob("[!_]*.py"))
    return list(dict.fromkeys([*families, *found]))


class Measured(SphinxRole):
    """``{measured}`read```, ``cpu`` and ``gpu``: this page's own times."""

    def run(self):
        """Leave a placeholder."""
        if self.text not in ("read", "cpu", "gpu"):
            message = self.inliner.reporter.error(f"measured: unknown quantity {self.text!r}")
            return [], [message]
        return [PendingInline(kind=self.text)], []


def _fill_in(app, doctree, doc):
    makers = {
        "ledger": ledger_table,
        "errata": errata_list,
        "status": status_table,
        "coverage": coverage,
    }
    for node in list(doctree.findall(Pending)):
        node.replace_self(makers[node["kind"]](app, doc))
    for node in list(doctree.findall(PendingInline)):
        text = measured(app, doc, node["kind"])
        node.replace_self(nodes.inline("", text, classes=["da-measured"]))


def measured(app, doc: str, kind: str) -> str:
    """Return one of a page's times as text."""
    if kind == "read":
        return f"{read_minutes(app.env.get_doctree(doc))} min to read"
    if kind == "cpu":
        seconds = run_seconds(app, doc)
        return "not executed" if seconds is None else f"{seconds:.0f} s on this build's CPU"
    results = ROOT / "benchmarks" / "results" / f"pages_{doc.rpartition('/')[2]}.json"
    if not results.exists():
        return "not measured on a GPU yet"
    data = json.loads(results.read_text("utf8"))
    return f"{data['seconds']:.0f} s on {data['device']}"


# --- tables --------------------------------------------------------------------------------------


def table(header: list[str], rows: list[list], classes: list[str]) -> nodes.table:
    """Build a docutils table; a cell is text or a list of inline nodes."""
    group = nodes.tgroup(cols=len(header))
    group += [nodes.colspec(colwidth=1) for _ in header]
    for part, content in ((nodes.thead(), [header]), (nodes.tbody(), rows)):
        for row in content:
            part += nodes.row("", *(nodes.entry("", _paragraph(cell)) for cell in row))
        group += part
    return nodes.table("", group, classes=classes)


def _paragraph(cell) -> nodes.paragraph:
    return nodes.paragraph("", "", *([nodes.Text(cell)] if isinstance(cell, str) else cell))


def link(app, source: str, target: str, anchor: str, text: str) -> nodes.reference:
    """Link from one page to a place on another."""
    uri = app.builder.get_relative_uri(source, target) + f"#{anchor}"
    return nodes.reference("", text, internal=True, refuri=uri)


def page_title(app, doc: str) -> str:
    """Return a page's title."""
    return app.env.titles[doc].astext()


def places(app, doc: str, item: str, claims) -> list:
    """Return links to all checks of one item."""
    nodes_ = []
    for page, claim in claims:
        if claim["item"] == item:
            chapter, number = int(page[5:7]), claim["anchor"].rpartition("-")[2]
            nodes_ += [nodes.Text(", ")] if nodes_ else []
            nodes_.append(link(app, doc, page, claim["anchor"], f"ch. {chapter}, check {number}"))
    return nodes_


def coverage(app, doc: str):
    """Return one line: how many items have a verdict, and which."""
    verdicts = [row["verdict"] for row in ledger(claims_of(app)).values()]
    counts = ", ".join(f"{verdicts.count(v)} {v}" for v in VERDICTS if v in verdicts)
    return _paragraph(f"{len(verdicts)} of {len(inventory())} items have a verdict: {counts}.")


def ledger_table(app, doc: str):
    """Return the whole ledger: one table a paper, a line on coverage before it."""
    claims = claims_of(app)
    rows = ledger(claims)
    parts = [coverage(app, doc)]
    for paper in sorted({item[:3] for item in inventory()}):
        items = [item for item in inventory() if item.startswith(paper)]
        done = sum(item in rows for item in items)
        title = f"Paper {paper}: {done} of {len(items)} items"
        section = nodes.section("", nodes.title("", title), ids=[f"paper-{paper}"])
        section += table(
            ["item", "what the machine says", "check, margin / mutant", "place"],
            [_ledger_row(app, doc, item, rows, claims) for item in items],
            ["da-ledger"],
        )
        parts.append(section)
    return parts


def _ledger_row(app, doc, item, rows, claims) -> list:
    topic = inventory()[item]["topic"]
    name = [nodes.literal("", item), nodes.Text(f" {topic}")]
    if item not in rows:
        return [name, "not reached yet", "", ""]
    verdict, statement = rows[item]["verdict"], rows[item]["statement"]
    says = [nodes.strong("", verdict, classes=[f"da-{verdict.replace(' ', '-')}"])]
    if statement != topic:
        says.append(nodes.Text(f": {statement}"))
    checks = [_check_text(check) for check in rows[item]["checks"]]
    return [name, says, "; ".join(checks), places(app, doc, item, claims)]


def _check_text(check: dict) -> str:
    if check["kind"] == "definition":
        return "shapes"
    margin = "exact" if check["kind"] == "identity" else f"{check['margin']:.1e}"
    return f"{check['kind']} {margin} / {check['mutant_margin']:.1e}"


def errata_list(app, doc: str):
    """Return every item that is wrong as printed, with its correction and a link."""
    claims = claims_of(app)
    rows = [
        [
            [nodes.literal("", item), nodes.Text(f" {inventory()[item]['topic']}")],
            row["statement"],
            places(app, doc, item, claims),
        ]
        for item, row in ledger(claims).items()
        if row["verdict"] == "wrong as printed"
    ]
    return table(["item", "correction", "place"], rows, ["da-ledger"])


def status_table(app, doc: str):
    """Return measured times, claims and figures of each chapter of this build."""
    claims = claims_of(app)
    rows = []
    for page in chapters(app):
        doctree = app.env.get_doctree(page)
        seconds = run_seconds(app, page)
        rows.append(
            [
                [link(app, doc, page, "", page_title(app, page))],
                f"{read_minutes(doctree)} min",
                "not executed" if seconds is None else f"{seconds:.1f} s",
                measured(app, page, "gpu"),
                str(sum(p == page for p, _ in claims)),
                str(len(list(doctree.findall(nodes.figure)))),
            ]
        )
    return table(
        ["chapter", "to read", "to run, CPU", "to run, GPU", "claims", "figures"],
        rows,
        ["da-status"],
    )


def _write_ledger(app, error):
    if error is None and app.builder.format == "html":
        path = Path(app.outdir).parent / "ledger.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(to_json(ledger(claims_of(app))), "utf8")
        os.replace(temporary, path)
        done = len(json.loads(path.read_text("utf8")))
        print(f"ledger: {done} of {len(inventory())} items have a verdict")


# --- what must be read or written again ----------------------------------------------------------


def _record() -> dict:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def _outdated(app, env, added, changed, removed):
    """Name pages whose outputs changed while their text did not, and the reporting pages."""
    record, seen = _record(), getattr(env, "da_executed", {})
    stale = [d for d in env.found_docs if record.get(d[5:]) != seen.get(d)]
    env.da_executed = {d: record.get(d[5:]) for d in env.found_docs}
    always = [d for d in env.found_docs if env.metadata.get(d, {}).get("always_write")]
    measured = [  # on machines, or of cases, that had no file when the page was read
        d
        for d in env.found_docs
        for names, files in env.metadata.get(d, {}).get("benchmarks", {}).items()
        if _result_files(names.split()) != files
    ]
    return [d for d in {*stale, *always, *measured} if d not in added]


def _merge_environment(app, env, docnames, other):
    env.da_executed = {**getattr(env, "da_executed", {}), **getattr(other, "da_executed", {})}


# --- numbers of chapters -------------------------------------------------------------------------


def _number_by_file():
    """Give a chapter the number in its file's name: parts may be written in any order."""
    assign = TocTreeCollectorWithStyles.assign_section_numbers

    def assign_section_numbers(self, env):
        before = env.toc_secnumbers
        assign(self, env)
        for doc, numbers in env.toc_secnumbers.items():
            if match := re.match(r"book/(\d\d)_", doc):
                chapter = int(match[1])
                for anchor, number in numbers.items():
                    numbers[anchor] = tuple(_with_chapter(chapter, number))
                for title in [*env.tocs[doc].findall(nodes.reference), env.titles[doc]]:
                    title["secnumber"] = _with_chapter(chapter, title.get("secnumber") or ())
        return [doc for doc, new in env.toc_secnumbers.items() if new != before.get(doc)]

    TocTreeCollectorWithStyles.assign_section_numbers = assign_section_numbers


def _with_chapter(chapter: int, number):
    return [chapter, *number[1:]] if number else []


# --- page furniture ------------------------------------------------------------------------------


def repository(committed: bool = False) -> tuple[str, str]:
    """Return the repository's URL and branch, empty when none is set.

    The environment's BOOK_REPOSITORY_URL goes before pyproject.toml's, unless only what is
    committed counts.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    url = project.get("urls", {}).get("Repository", "")
    if not committed:
        url = os.environ.get("BOOK_REPOSITORY_URL", url)
    return url.rstrip("/").removesuffix(".git"), os.environ.get("BOOK_REPOSITORY_BRANCH", "main")


def launch_links(url: str, branch: str, name: str) -> dict[str, str]:
    """Return the links that open a chapter's notebook on a runtime."""
    notebook = f"notebooks/{name}.ipynb"
    links = {}
    if match := re.fullmatch(r"https://github\.com/([^/]+/[^/]+)", url):
        slug = match[1]
        colab = "https://colab.research.google.com/github"
        links["Colab"] = f"{colab}/{slug}/blob/{branch}/{notebook}"
        links["Binder"] = (
            f"https://mybinder.org/v2/gh/{slug}/{branch}"
            f"?urlpath={quote('lab/tree/' + notebook, '')}"
        )
    if hub := os.environ.get("BOOK_JUPYTERHUB_URL", "").rstrip("/"):
        path = quote(f"lab/tree/{url.rpartition('/')[2]}/{notebook}", "")
        links["JupyterHub"] = (
            f"{hub}/hub/user-redirect/git-pull?repo={quote(url, '')}&branch={branch}&urlpath={path}"
        )
    return links


def _furnish(app, pagename, templatename, context, doctree):
    buttons = context.setdefault("header_buttons", [])
    if pagename in chapters(app):
        notebook = {
            "type": "link",
            "text": "notebook (.ipynb)",
            "tooltip": "Download this chapter as a notebook",
            "icon": "fas fa-code",
            "url": context["pathto"](f"notebooks/{pagename.rpartition('/')[2]}.ipynb", 1),
        }
        for group in buttons:
            if group.get("label") == "download-buttons":
                group["buttons"].insert(0, notebook)
    url, branch = repository()
    if not url:
        return
    if pagename in chapters(app):
        links = launch_links(url, branch, pagename.rpartition("/")[2])
        launch = [
            {
                "type": "link",
                "text": name,
                "tooltip": f"Run this chapter on {name}",
                "icon": "fas fa-rocket",
                "url": link,
            }
            for name, link in links.items()
        ]
        buttons.append(
            {
                "type": "group",
                "tooltip": "Run this chapter",
                "label": "launch-buttons",
                "icon": "fas fa-rocket",
                "buttons": launch,
            }
        )
    buttons.append(
        {
            "type": "link",
            "text": "",
            "tooltip": "Source repository",
            "icon": "fab fa-github",
            "url": url,
            "label": "repository-button",
        }
    )


def _no_default_repository(app, config):
    """Jupyter Book links to its own repository unless told otherwise."""
    options = config.html_theme_options
    options.update(
        repository_url="",
        use_repository_button=False,
        use_issues_button=False,
        use_edit_page_button=False,
        launch_buttons={},
    )


def _external(app, env, node, content):
    target = EXTERNAL.get(node.get("reftarget", ""))
    if node.get("reftarget") in WORDS:
        return content
    if target is None:
        return None
    return nodes.reference("", "", content, refuri=target, internal=False)


def _skip(app, what, name, obj, skip, options):
    """Leave out the fields of named tuples, and functions that are values of a class's fields."""
    value = what == "class" and inspect.isfunction(obj) and obj.__name__ != name
    return True if value or type(obj).__name__ == "_tuplegetter" else None


def _check_inventory(app):
    if not inventory():
        raise ExtensionError("the inventory is empty")
    _number_by_file()  # after the extensions that change the numbering themselves


def setup(app):
    """Register everything above."""
    app.add_node(Pending)
    app.add_node(PendingInline)
    for name in ("ledger", "errata", "status", "coverage"):
        app.add_directive(name, Table)
    app.add_directive("benchmarks", Benchmarks)
    app.add_directive("mechanisms", Mechanisms)
    app.add_directive("experiments", Experiments)
    app.add_role("measured", Measured())
    app.connect("config-inited", _no_default_repository, priority=900)
    app.connect("builder-inited", _check_inventory)
    app.connect("env-get-outdated", _outdated)
    app.connect("env-merge-info", _merge_environment)
    app.connect("missing-reference", _external)
    app.connect("autodoc-skip-member", _skip)
    app.connect("doctree-resolved", _fill_in)
    app.connect("html-page-context", _furnish, priority=900)
    app.connect("build-finished", _write_ledger)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
