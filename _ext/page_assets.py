"""Reduce what a page loads to one style sheet and the small scripts that it uses.

The theme and Jupyter Book's extensions add frameworks, icon fonts and runtimes. ``layout.html``
leaves out those of the theme. This module removes the others, and deletes the files that no page
loads any more.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from functools import lru_cache
from pathlib import Path

import content_visibility
import stylesheet
from derived_book.ledger import STATIC

ROOT = Path(__file__).parents[1]
STYLES = "book.min.css"
THEME = ("styles/theme.css", "styles/pydata-sphinx-theme.css", "katex/katex.min.css")
# Scripts and styles to leave out; the last two serve Sphinx's own search.
NEVER = ("sphinx-thebe", "sphinx-book-theme.js", "design-tabs", "doctools", "sphinx_highlight")
INLINE = ("THEBE_JS_URL", "DOCUMENTATION_OPTIONS.")  # for scripts that are not loaded
UNPUBLISHED = (
    "vendor",
    "**/*.map",
    "scripts",
    "styles",
    "sphinx-thebe.*",
    "design-tabs.js",
    "doctools.js",
    "sphinx_highlight.js",
    "searchtools.js",
    "language_data.js",
    "*webpack-macros.html",
    "images/logo_*",
    "locales",
)
# How to work an exercise. The marks are drawn, as some machines lack a font with these characters.
MARKS = {"✍": ("da-by-hand", "by hand"), "⌨": ("da-code", "code"), "🔬": ("da-open", "open")}
MARK = re.compile(f"([{''.join(MARKS)}])\N{VARIATION SELECTOR-16}?")
# Names, punctuation and spaces in code have the colour of other text. Their elements were up to a
# quarter of those of a page.
PLAIN = re.compile(r'<span class="(?:n|p|w)">([^<]*)</span>')
# In signatures each word has two elements, and neither is needed.
SIGNATURE = re.compile(r'<dt class="sig .*?</dt>', re.S)
WORD = re.compile(r'<span class="pre">([^<]*)</span>')
# The steps of a slider, in a script that no other element needs and that can be half of a page.
STEPS = re.compile(r"<script>([^<]{8000,})</script></div>")
SLIDERS = "sliders"  # a folder of _static
# In the contents beside the API: methods and fields, listed under their class, and nested tags.
METHODS = re.compile(
    r'<ul class="[^"]*">\s*(?:<li class="toc-h4[^"]*"><a [^>]*href="#derived_attention\.[^>]*>'
    r"(?:(?!</li>).)*</li>\s*)+</ul>",
    re.S,
)
WRAPPED = re.compile(r'<code class="[^"]*"><span class="pre">([^<]*)</span></code>')


def draw_marks(body: str) -> str:
    """Return a page's HTML with drawings instead of the characters that mark exercises."""

    def drawn(found: re.Match) -> str:
        shape, name = MARKS[found[1]]
        return f'<span class="da-mark {shape}" role="img" aria-label="{name}"></span>'

    return MARK.sub(drawn, body)


def put_aside(body: str, static: Path, place: str) -> str:
    """Move the steps of large sliders into files; return the HTML, which loads the files last.

    Parameters
    ----------
    body : str
        A page's HTML.
    static : Path
        The folder of the book's own files.
    place : str
        The address of that folder, relative to the page.
    """

    def moved(found: re.Match) -> str:
        content = found[1].encode()
        name = f"{SLIDERS}/{hashlib.sha256(content).hexdigest()[:12]}.js"
        (static / SLIDERS).mkdir(parents=True, exist_ok=True)
        (static / name).write_bytes(content)
        return f'<script type="text/plain" data-src="{place}/{name}"></script></div>'

    return STEPS.sub(moved, body)


def shorten(contents: str) -> str:
    """Return a page's contents without methods and fields, and with fewer elements."""
    return WRAPPED.sub(r"<code>\1</code>", METHODS.sub("", contents))


def _is_needed(script) -> bool:
    name, body = str(script.filename), str(script.attributes.get("body"))
    return not any(part in name for part in NEVER) and not any(part in body for part in INLINE)


def _lighten(app, pagename, templatename, context, doctree):
    seen = app.__dict__.setdefault("da_styles", dict.fromkeys(THEME))
    for sheet in context.get("css_files", []):
        if not any(part in str(sheet.filename) for part in NEVER):
            seen.setdefault(str(sheet.filename).removeprefix("_static/"))
    scripts = context.get("script_files", [])
    scripts[:] = {str((s.filename, s.attributes)): s for s in scripts if _is_needed(s)}.values()
    for script in scripts:
        if script.filename:
            script.attributes["defer"] = "defer"
    context["da_styles"] = f"{STYLES}?v={_version()}"
    body = SIGNATURE.sub(lambda name: WORD.sub(r"\1", name[0]), context.get("body", ""))
    body = PLAIN.sub(r"\1", draw_marks(body))
    context["body"] = content_visibility.say_heights(body)
    if make := context.get("generate_toc_html"):  # the theme's
        context["generate_toc_html"] = lambda kind="html": (
            shorten(str(make(kind))) if kind == "html" else make(kind)
        )


def _put_aside(app, pagename, templatename, context, doctree):
    static = Path(app.outdir) / "_static"
    context["body"] = put_aside(context.get("body", ""), static, context["pathto"]("_static", 1))


@lru_cache
def _version() -> str:
    """Return a hash of the style sheet's sources; when it changes, browsers reload the sheet."""
    files = sorted([*(ROOT / "assets").glob("*.css"), *STATIC.glob("*.css")])
    content = [f.read_bytes() for f in (*files, ROOT / "constraints.txt", Path(__file__))]
    return hashlib.sha256(b"".join(content)).hexdigest()[:8]


def _finish(app, error):
    names = app.__dict__.get("da_styles")
    if error is not None or app.builder.format != "html" or not names:
        return  # if no page was written, the style sheet is unchanged
    static = Path(app.outdir) / "_static"
    pages = [
        p.read_text("utf8") for p in Path(app.outdir).rglob("*.html") if static not in p.parents
    ]
    scripts = [p.read_text("utf8") for p in static.glob("*.js")]
    css = stylesheet.gather([static / name for name in names], static)
    words = stylesheet.words_of(pages, scripts)
    (static / STYLES).write_text(stylesheet.prune(css, words), "utf8")
    for path in (static / SLIDERS).glob("*.js"):
        if not any(path.name in page for page in pages):  # it belongs to an earlier build
            path.unlink()
    for pattern in UNPUBLISHED:
        for path in static.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def setup(app):
    """Register the handlers that trim pages, to run after all that add to pages."""
    app.connect("html-page-context", _lighten, priority=950)
    app.connect("html-page-context", _put_aside, priority=951)
    app.connect("build-finished", _finish, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
