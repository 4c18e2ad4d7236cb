"""Build the index of the book's search, by section, for the script of the search page.

Sphinx's own index lists pages, not sections, and its script fetches whole pages to quote lines from
them, which a browser refuses for files on a disk. This index contains the text of each section of
the built pages, so that a hit is quoted without its page, and its link leads to the words found.
Menus, folded code and printed numbers are left out, and so are two of the three forms in which
KaTeX writes each formula.
"""

from __future__ import annotations

import json
import re
import shutil
import unicodedata
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from sphinx.search.en import SearchEnglish

FOLDER = "search"  # in _static
PACKAGE = "book/api"  # the names of its pages begin with this
SUMMARY = 300  # characters that are kept of a description on its pages
LIBRARY = Path(__file__).parents[1] / "node_modules" / "minisearch"
VOID = set("area base br col embed hr img input link meta source track wbr".split())
SKIPPED_TAGS = {"annotation", "button", "nav", "select", "template"}
SKIPPED = {
    "headerlink",
    "viewcode-link",
    "hide",  # folded code
    "solution",  # a quotation would give it away
    "eqno",
    "stream",  # what a cell printed
    "da-part",
    "da-report",
    "section-number",
    "fn-bracket",
}
BLOCKS = set("p li dt dd div td th tr pre figcaption caption h1 h2 h3 h4 h5 h6 summary".split())
# The signs before the second and the third part of a MathML element: q_i^⊤, a/b.
JOINTS = {"msub": "_", "msup": "^", "msubsup": "_^", "munder": "_", "mover": "", "mfrac": "/"}
JOINTS["munderover"] = "_^"
LONGEST_FORMULA = 48  # characters
LETTER = re.compile("[\U0001d400-\U0001d7ff\u2100-\u214f]")  # bold, script, double-struck
INVISIBLE = re.compile("[\u200b-\u200f\u2060-\u206f]")
BOXES = {"citation", "exercise", "theorem", "proposition", "lemma", "corollary", "definition"}
BOXES |= {"example", "remark", "algorithm"}
HEADING = re.compile("h[1-6]")
IMPORT = re.compile(r"^(?:from \S+ )?import (?:[^(\n]*|\([^)]*\))$", re.MULTILINE)
NAME = re.compile(r"[^\W\d]\w{2,}")  # names in code that are worth finding
# A full stop that katex_prerender has moved into the formula before it.
END = re.compile(r'<span class="da-end">([^<]*)</span>((?:</span>){4})')
DRAWN = re.compile(r"<(svg|script|style)\b.*?</\1>", re.DOTALL)  # most of a page
BOXED = re.compile('<span class="katex-html"')
SPAN = re.compile("<span|</span>")
NUMBER = re.compile(r'<h1><span class="section-number">([^<]*)</span>')
SPACE = re.compile(r"\s+")
AROUND_LINES = re.compile(r"\s*\n\s*")


@dataclass
class Section:
    """A part of a page that a link can lead to: its titles, its prose and its visible code."""

    anchor: str
    kind: str = "section"
    titles: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)

    def entry(self) -> dict:
        """Return the section for the search page; each line of its text is a paragraph."""
        titles = [t.partition("(")[0] if self.kind == "api" else t for t in self.titles]
        lines = AROUND_LINES.split("".join(self.text))
        entry = {
            "anchor": self.anchor,
            "kind": self.kind,
            "titles": [_line(title) for title in titles],
            "text": "\n".join(filter(None, map(_line, lines))),
            "code": " ".join(dict.fromkeys(NAME.findall(IMPORT.sub("", "".join(self.code))))),
        }
        return {name: value for name, value in entry.items() if value}


def _line(text: str) -> str:
    return SPACE.sub(" ", text).strip()


class Reader(HTMLParser):
    """Read the sections of one page of the built book."""

    def __init__(self):
        super().__init__()
        self.sections: list[Section] = []
        self.open: list[list] = []  # tag, the section that it contains, the list for its text
        self.skipping: list[str] = []
        self.formula: list[str] | None = None
        self.parts: list[list] = []  # of the formula's open elements: tag, parts so far

    # --- the current section --------------------------------------------------------------------

    def _section(self) -> Section | None:
        return next((section for _, section, _ in reversed(self.open) if section), None)

    def _target(self) -> list[str] | None:
        if self.formula is not None:
            return self.formula
        return next((target for _, _, target in reversed(self.open) if target is not None), None)

    def _write(self, text: str) -> None:
        if (target := self._target()) is not None:
            target.append(text)

    # --- the parser's callbacks -----------------------------------------------------------------

    def handle_starttag(self, tag, attrs):
        """Enter an element."""
        if self.skipping:
            if tag == self.skipping[0]:
                self.skipping.append(tag)
            return
        if tag in VOID:
            if tag == "br":
                self._write(" ")
            return
        attributes = dict(attrs)
        classes = set((attributes.get("class") or "").split())
        if self.open or (tag == "article" and "bd-article" in classes):
            if tag in SKIPPED_TAGS or classes & SKIPPED:
                self.skipping.append(tag)
            elif self.formula is not None or tag == "math":
                self._enter_formula(tag)
            else:
                self._enter(tag, attributes, classes)

    def handle_endtag(self, tag):
        """Leave an element, and those in it that were not closed."""
        if self.skipping:
            if tag == self.skipping[0]:
                self.skipping.pop()
        elif self.formula is not None:
            self._leave_formula(tag)
        elif any(tag == name for name, _, _ in self.open):
            self._part(tag)
            while self.open.pop()[0] != tag:
                pass

    def handle_data(self, data):
        """Add text; replace its line breaks by spaces, except in code."""
        if not self.skipping and self.open:
            in_code = "\n" in data and any(tag == "pre" for tag, _, _ in self.open)
            self._write(data if in_code else data.replace("\n", " "))

    # --- sections -------------------------------------------------------------------------------

    def _enter(self, tag, attributes, classes):
        section, target = None, None
        anchor = attributes.get("id") or ""
        is_box = tag == "div" and classes & BOXES
        if anchor and (is_box or (tag == "section" and not anchor.endswith("-content"))):
            kind = "reference" if "citation" in classes else "box" if is_box else "section"
            section = self._begin(anchor, kind)
            target = section.text
        elif tag == "dt" and anchor and self.open[-1][0] == "dl":
            target = self._name_entry(anchor)
        elif (
            (here := self._section())
            and not here.titles
            and (HEADING.fullmatch(tag) or classes & {"admonition-title", "label"})
        ):
            here.titles.append("")
            target = _Title(here)
        elif tag == "pre" and here:
            target = here.code
        if target is None:
            self._part(tag)
        self.open.append([tag, section, target])

    def _part(self, tag: str) -> None:
        in_row = tag != "tr" and any(name == "tr" for name, _, _ in self.open)
        if tag in BLOCKS:
            self._write(" " if in_row else "\n")

    def _begin(self, anchor: str, kind: str) -> Section:
        section = Section(anchor, kind)
        self.sections.append(section)
        return section

    def _name_entry(self, anchor: str):
        """Begin an entry of a glossary or of the package's reference, or add a name to it."""
        around = self.open[-1]
        entry = around[1]
        if entry is None or any(part.strip() for part in entry.text):
            entry = self._begin(anchor, "term" if anchor.startswith("term-") else "api")
            around[1:] = entry, entry.text
        entry.titles.append("")
        return _Title(entry)

    # --- formulas -------------------------------------------------------------------------------

    def _enter_formula(self, tag):
        if self.formula is None:
            self.formula = []
        if self.parts:
            around, done = self.parts[-1]
            if 0 < done <= len(joints := JOINTS.get(around, "")):
                self.formula.append(joints[done - 1])
            self.parts[-1][1] += 1
        if tag == "msqrt":
            self.formula.append("√")
        self.parts.append([tag, 0])

    def _leave_formula(self, tag):
        while self.parts and self.parts.pop()[0] != tag:
            pass
        if not self.parts:
            text = INVISIBLE.sub("", LETTER.sub(_plain, "".join(self.formula)))
            self.formula = None
            self._write(_line(text) if len(text) <= LONGEST_FORMULA else "…")


def _plain(letter: re.Match) -> str:
    return unicodedata.normalize("NFKC", letter[0])


class _Title(list):
    """A list that appends text to the last title of a section."""

    def __init__(self, section: Section):
        super().__init__()
        self.section = section

    def append(self, text: str) -> None:
        self.section.titles[-1] += text


def read(page: str) -> list[dict]:
    """Return the sections of a page's HTML that have a title and an anchor."""
    reader = Reader()
    reader.feed(_without_boxes(END.sub(r"\2\1", DRAWN.sub("", page))))
    entries = [section.entry() for section in reader.sections]
    return [entry for entry in entries if entry.get("titles") and entry.get("anchor")]


def _without_boxes(page: str) -> str:
    """Leave out the boxes of KaTeX's formulas, which are half of a page and slow to parse."""
    kept, at = [], 0
    for start in BOXED.finditer(page):
        kept.append(page[at : start.start()])
        depth = 0
        for tag in SPAN.finditer(page, start.start()):
            depth += -1 if tag[0] == "</span>" else 1
            if not depth:
                at = tag.end()
                break
    return "".join([*kept, page[at:]])


def index(folder: Path, docs: list[str]) -> dict:
    """Return the index of the built pages in a folder."""
    pages, sections = [], []
    for doc in docs:
        page = (folder / f"{doc}.html").read_text("utf8")
        found = read(page)
        if doc.startswith(PACKAGE):  # readers search for names or first sentences
            found = [{**e, "kind": "api", "text": e.get("text", "")[:SUMMARY]} for e in found]
        sections += [{"page": len(pages), **entry} for entry in found]
        number = NUMBER.search(page)
        title = f"{number[1] if number else ''}{found[0]['titles'][0]}"
        pages.append({"url": f"{doc}.html", "title": title})
    return {"pages": pages, "sections": sections, "stopwords": sorted(language().stopwords)}


def language() -> SearchEnglish:
    """Return Sphinx's English stop words and stemmer, which it also has in JavaScript."""
    return SearchEnglish({})


def write(target: Path, content: dict) -> None:
    """Write the scripts that the search page loads."""
    target.mkdir(parents=True, exist_ok=True)
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    script = f"{language().js_stemmer_code}\nconst bookIndex = {data};\n"
    (target / "sections.js").write_text(script, "utf8")
    shutil.copyfile(LIBRARY / "dist" / "umd" / "index.js", target / "minisearch.js")


def _begin(app):
    if app.builder.format == "html":
        app.builder.search = False  # neither build nor publish Sphinx's own index


def _search_page(app):
    yield "search", {}, "search.html"


def _finish(app, error):
    if error is None and app.builder.format == "html":
        out = Path(app.outdir)
        write(out / "_static" / FOLDER, index(out, sorted(app.env.found_docs)))
        (out / "searchindex.js").unlink(missing_ok=True)  # from an older build


def setup(app):
    """Replace Sphinx's search by the book's own."""
    app.connect("builder-inited", _begin)
    app.connect("html-collect-pages", _search_page)
    app.connect("build-finished", _finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
