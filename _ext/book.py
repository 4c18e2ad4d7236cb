"""Add to Sphinx what this book needs: a status page, tables, measured times and launch buttons.

The executed notebooks contain the claims and times of their pages. The tables made from them are
filled in when pages are written, so that they describe this build, cached pages included.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import tomllib
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

import yaml
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective, SphinxRole
from sphinx_external_toc.collectors import TocTreeCollectorWithStyles

import status_page
from derived_attention import __version__, registry
from derived_book.ledger import claims_of, link, paragraph, table
from execute import load_record

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # for benchmarks, which no wheel contains

from benchmarks import report  # noqa: E402

WHEEL = f"derived_attention-{__version__}-py3-none-any.whl"  # beside the notebooks

# Names of other libraries in docstrings, and the addresses of their documentation.
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
WORDS = {"callable", "optional"}  # words in descriptions of types that are no classes

# Letters of the pages between chapters. Appendices use A to E, and audits the numbers of parts.
LETTERS = {"book/positions": "P", "book/language_model": "L"}
AUDITS = {
    "book/audit_support_vectors": "II",
    "book/audit_wavelets": "III",
    "book/audit_mixtures": "IV",
    "book/audit_singular_values": "V",
    "book/audit_splitting": "VI",
}
SHORT = {"chapter": "ch.", "appendix": "app."}


# --- pages with code, and their numbers ----------------------------------------------------------


def chapters(app) -> list[str]:
    """Return the pages that have code, in the order of the table of contents."""
    order = re.findall(r"file: (\S+)", (ROOT / "_toc.yml").read_text("utf8"))
    return [doc for doc in order if doc in app.env.found_docs and number(doc)]


def number(doc: str) -> int | str | None:
    """Return the number or letter of a page with code, or None for another page.

    The name of the file contains the number of a chapter and the letter of an appendix. An audit
    has the Roman numeral of its part, and a page between chapters has a letter of `LETTERS`.
    """
    if match := re.match(r"book/(\d\d|[A-Z])_", doc):
        return int(match[1]) if match[1].isdigit() else match[1]
    return LETTERS.get(doc) or AUDITS.get(doc)


@lru_cache
def parts() -> dict[str, str]:
    """Return the heading of its part for each page of a numbered part, and for each audit."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf8"))["parts"]
    headings = {part["caption"].partition(":")[0]: part["caption"] for part in toc}
    chapters = {
        page["file"]: part["caption"]
        for part in toc
        for page in part["chapters"]
        if part["caption"].startswith("Part ")
    }
    return chapters | {page: headings[f"Part {number}"] for page, number in AUDITS.items()}


def short_name(doc: str) -> str:
    """Return the short name of a page with code for links to its places, such as ``ch. 4``."""
    kind = _kind(doc)
    return f"{SHORT.get(kind, kind)} {number(doc)}"


def _kind(doc: str) -> str:
    """Return the kind of a numbered page: chapter, appendix or audit."""
    if doc.startswith("book/audit_"):
        return "audit"
    return "chapter" if doc[5].isdigit() or doc in LETTERS else "appendix"


# --- directives and roles ------------------------------------------------------------------------


class Pending(nodes.General, nodes.Element):
    """A placeholder for content that is known only when pages are written."""


class PendingInline(nodes.Inline, nodes.TextElement):
    """A placeholder within a line of text."""


class Status(SphinxDirective):
    """``{status}``: the status table, made from the executed pages."""

    def run(self):
        """Leave a placeholder."""
        self.env.metadata[self.env.docname]["always_write"] = True
        return [Pending()]


class Benchmarks(SphinxDirective):
    """``{benchmarks} case case …``: the committed results of ``python -m benchmarks``.

    When a file of the benchmarks changes, the page is executed again, and therefore read again.
    """

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        """Return a line on each machine, and then the tables of these cases."""
        names = self.arguments[0].split()
        try:
            results = report.load(names)
            times = report.time_table(results, names)
        except ValueError as error:
            raise self.error(str(error)) from error
        captions = [paragraph(report.caption(found)) for found in results.values()]
        memory = report.memory_table(max(results.values(), key=len))
        first, *others = (table(*rows, ["da-benchmarks"]) for rows in (times, memory))
        return [*captions, first, paragraph(report.NOTE), *others]


class Mechanisms(SphinxDirective):
    """``{mechanisms}``: a table of the registry."""

    def run(self):
        """Return the table, in the order of the chapters."""
        self.env.note_dependency(registry.__file__)
        return _parsed(self, mechanisms_table(self.env.found_docs))


class Modules(SphinxDirective):
    """``{modules} softmax.core layer``: the documentation of these modules of the library.

    If a module has public names, only these are included: the rest serves other modules.
    """

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        """Return the entries, in the order of the arguments."""
        self.env.note_dependency(registry.__file__)
        lines = ["```{eval-rst}"]
        for module in self.arguments[0].split():
            name = f"{registry.PACKAGE}.{module}"
            public = ", ".join(n for n, where in registry.PUBLIC.items() if where == name)
            lines += [f".. automodule:: {name}", f"   :members: {public}".rstrip(), ""]
        return _parsed(self, [*lines, "```"])


def _parsed(directive: SphinxDirective, lines: list[str]) -> list[nodes.Node]:
    part = nodes.container()
    directive.state.nested_parse(StringList(lines, registry.__file__), 0, part)
    return part.children


def mechanisms_table(docs) -> list[str]:
    """Return the registry as lines of a Markdown table; `docs` are the pages to link to."""
    pages = {int(match[1]): doc for doc in docs if (match := re.match(r"book/(\d\d)_", doc))}
    lines = [
        "| name | label | chapter | function | layer | masks | causal | linear in $N$ |",
        "|" + " --- |" * 8,
    ]
    for name, entry in registry.MECHANISMS.items():
        function, layer = (f"~{registry.PACKAGE}.{x}" for x in (entry.function, entry.layer))
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


class ChapterLink(nodes.Inline, nodes.TextElement):
    """A placeholder for a link to a numbered page, until all pages are read."""


class Chapter(SphinxRole):
    """``{chapter}`04_three_attentions```: a link that prints "chapter 4"; its tooltip is the title.

    An appendix prints "appendix A", an audit "audit II", a page between chapters "chapter P". A
    link that begins a sentence has a capital. One that begins a table cell prints the title, for
    a chapter after its number.
    """

    def run(self):
        """Leave a placeholder."""
        doc = f"book/{self.text}"
        if not (ROOT / f"{doc}.md").exists() or number(doc) is None:
            text = f"chapter is {self.text!r}; expected a numbered page, such as 02_duality"
            message = self.inliner.reporter.error(text)
            return [], [message]
        return [ChapterLink(doc=doc)], []


def chapter_name(doc: str) -> str:
    """Return the name of a numbered page in a sentence, such as ``chapter 4``."""
    return f"{_kind(doc)} {number(doc)}"


class ResolveChapters(SphinxPostTransform):
    """Turn the placeholders of the role ``chapter`` into links."""

    default_priority = 9

    def run(self, **kwargs):
        """Write the text of each link, which depends on the text before it."""
        for node in list(self.document.findall(ChapterLink)):
            siblings = node.parent.children
            before = "".join(x.astext() for x in siblings[: siblings.index(node)])
            name, title = chapter_name(node["doc"]), page_title(self.app, node["doc"])
            if not before.strip() and isinstance(node.parent.parent, nodes.entry):
                is_chapter = _kind(node["doc"]) == "chapter"
                name = f"{number(node['doc'])}. {title}" if is_chapter else title
            elif not before.strip() or re.search(r"[.!?][)*\u201d]?\s+$", before):
                name = name[0].upper() + name[1:]
            uri = self.app.builder.get_relative_uri(self.env.docname, node["doc"])
            node.replace_self(nodes.reference("", name, internal=True, refuri=uri, reftitle=title))


class Measured(SphinxRole):
    """``{measured}`read```: a time of this page; ``read 02_duality``: that of another page."""

    def run(self):
        """Leave a placeholder."""
        kind, _, page = self.text.partition(" ")
        doc = f"book/{page}" if page else self.env.docname
        if kind not in status_page.KINDS or not (ROOT / f"{doc}.md").exists():
            kinds = ", ".join(status_page.KINDS)
            text = f"measured is {self.text!r}; expected one of {kinds}, then a page or nothing"
            message = self.inliner.reporter.error(text)
            return [], [message]
        if page:
            self.env.metadata[self.env.docname]["always_write"] = True
        return [PendingInline(kind=kind, doc=doc)], []


def _fill_in(app, doctree, doc):
    for node in list(doctree.findall(Pending)):
        node.replace_self(status_table(app, doc))
    for node in list(doctree.findall(PendingInline)):
        text = status_page.time_text(app, node["doc"], node["kind"])
        # Times that this build measured must not appear in the notebooks.
        classes = ["da-measured"] if node["kind"] != "exercises" else []
        node.replace_self(nodes.inline("", text, classes=classes))


# --- tables --------------------------------------------------------------------------------------


def page_title(app, doc: str) -> str:
    """Return a page's title."""
    return app.env.titles[doc].astext()


def status_table(app, doc: str):
    """Return the table of the times, claims and figures of each page with code."""
    header, rows = status_page.status_rows(
        app,
        chapters(app),
        lambda page: link(app, doc, page, "", page_title(app, page)),
        claims_of(app),
    )
    return table(header, rows, ["da-status"])


# --- pages to read or write again ----------------------------------------------------------------


def _outdated(app, env, added, changed, removed):
    """Return pages whose outputs changed but not their text, and pages that report on others."""
    record, seen = load_record(), getattr(env, "da_executed", {})
    stale = [d for d in env.found_docs if record.get(d[5:]) != seen.get(d)]
    env.da_executed = {d: record.get(d[5:]) for d in env.found_docs}
    always = [d for d in env.found_docs if env.metadata.get(d, {}).get("always_write")]
    return [d for d in {*stale, *always} if d not in added]


# --- numbers of chapters -------------------------------------------------------------------------


def _number_by_file():
    """Take page numbers from `number`, not from the order in the table of contents."""
    assign = TocTreeCollectorWithStyles.assign_section_numbers

    def assign_section_numbers(self, env):
        before = env.toc_secnumbers
        assign(self, env)
        for doc, numbers in env.toc_secnumbers.items():
            if chapter := number(doc):
                for anchor, counted in numbers.items():
                    numbers[anchor] = tuple(_with_chapter(chapter, counted))
                for title in [*env.tocs[doc].findall(nodes.reference), env.titles[doc]]:
                    title["secnumber"] = _with_chapter(chapter, title.get("secnumber") or ())
        return [doc for doc, new in env.toc_secnumbers.items() if new != before.get(doc)]

    TocTreeCollectorWithStyles.assign_section_numbers = assign_section_numbers


def _with_chapter(chapter: int | str, counted):
    return [chapter, *counted[1:]] if counted else []


# --- page furniture ------------------------------------------------------------------------------


def repository(committed: bool = False) -> tuple[str, str]:
    """Return the repository's URL, which is empty if none is set, and its branch.

    The environment variable BOOK_REPOSITORY_URL overrides the URL in pyproject.toml, unless
    `committed` is true.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    url = project.get("urls", {}).get("Repository", "")
    if not committed:
        url = os.environ.get("BOOK_REPOSITORY_URL", url)
    return url.rstrip("/").removesuffix(".git"), os.environ.get("BOOK_REPOSITORY_BRANCH", "main")


def launch_links(url: str, branch: str, name: str) -> dict[str, str]:
    """Return the link that opens a chapter's notebook on each available runtime."""
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


def _name_part(app, pagename, templatename, context, doctree):
    """Put the part's heading above a page's title, as many readers arrive there by a link."""
    if part := parts().get(pagename):
        heading = f'<p class="da-part">{part}</p>\n<h1>'
        context["body"] = context["body"].replace("<h1>", heading, 1)


def _button(text: str, tooltip: str, icon: str, url: str) -> dict:
    return {"type": "link", "text": text, "tooltip": tooltip, "icon": icon, "url": url}


def _furnish(app, pagename, templatename, context, doctree):
    buttons, name = context.setdefault("header_buttons", []), pagename.rpartition("/")[2]
    if pagename in chapters(app):
        files = (
            ("notebook (.ipynb)", "Download this chapter as a notebook", f"{name}.ipynb"),
            ("package (.whl)", "Download the package to put beside the notebook", WHEEL),
        )
        for group in buttons:
            if group.get("label") == "download-buttons":
                group["buttons"][:0] = [
                    _button(text, tooltip, "fas fa-code", context["pathto"](f"notebooks/{file}", 1))
                    for text, tooltip, file in files
                ]
    url, branch = repository()
    if not url:
        return
    if context.get("body") and (page := app.env.titles.get(pagename)):
        title = quote(f"Mistake on the page: {page.astext()}", "")
        context["body"] += (
            f'<p class="da-report"><a href="{url}/issues/new?title={title}">'
            "Report a mistake on this page</a></p>"
        )
    if pagename in chapters(app):
        icon, launch = "fas fa-rocket", launch_links(url, branch, name)
        group = {"type": "group", "label": "launch-buttons", "icon": icon}
        group["buttons"] = [
            _button(runtime, f"Run this chapter on {runtime}", icon, link)
            for runtime, link in launch.items()
        ]
        buttons.append(group | {"tooltip": "Run this chapter"})
    source = _button("", "Source repository", "fab fa-github", url)
    buttons.append(source | {"label": "repository-button"})


def _no_default_repository(app, config):
    """Remove the default links to Jupyter Book's own repository."""
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


def _begin(app):
    app.config.claims_page_name = short_name
    _number_by_file()  # after the extensions that change the numbering themselves


def setup(app):
    """Register the directives, roles and event handlers."""
    app.add_node(Pending)
    app.add_node(PendingInline)
    app.add_node(ChapterLink)
    app.add_directive("status", Status)
    app.add_directive("benchmarks", Benchmarks)
    app.add_directive("mechanisms", Mechanisms)
    app.add_directive("modules", Modules)
    app.add_role("measured", Measured())
    app.add_role("chapter", Chapter())
    app.add_post_transform(ResolveChapters)
    app.connect("config-inited", _no_default_repository, priority=900)
    app.connect("builder-inited", _begin)
    app.connect("env-get-outdated", _outdated)
    app.connect("missing-reference", _external)
    app.connect("autodoc-skip-member", _skip)
    app.connect("doctree-resolved", _fill_in)
    app.connect("html-page-context", _name_part)
    app.connect("html-page-context", _furnish, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
