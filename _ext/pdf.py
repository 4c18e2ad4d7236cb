"""Print the whole book into one PDF, for readers who want it on paper or on a tablet: ``make pdf``.

Headless Chromium prints every built page from a local server, which adds a style for paper. Then
the printed pages are joined: links between pages lead to places in the document, and the contents
and the outline list the headings. Chromium before version 131 prints no page numbers.
"""

from __future__ import annotations

import html
import io
import re
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from string import Template
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import yaml
from pypdf import PdfReader, PdfWriter
from pypdf.constants import PageLabelStyle
from pypdf.generic import ArrayObject, Destination, DictionaryObject, Fit, NameObject

from derived_attention import __version__

ROOT = Path(__file__).resolve().parents[1]
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text("utf8"))
HTML = ROOT / "_build" / "html"
OUT = HTML / "derived-attention.pdf"  # in the folder that `make zip` packs
PARTS = ROOT / "_build" / "pdf"  # not in /tmp: a packaged browser may use its own /tmp
OPTIONS = """--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run
    --disable-background-networking --disable-component-update
    --no-pdf-header-footer --disable-pdf-tagging""".split()
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 300  # seconds for a page
FRONT = "front"  # the name under which title and contents are served
PLACE = "place"  # lines of the contents link to /place/PAGE/HEIGHT

STYLE, SCRIPT, TITLE_PAGE = (
    Path(__file__).with_name(name).read_text("utf8")
    for name in ("pdf.css", "pdf.js", "pdf_front.html")
)
HEADING = re.compile(r'<h([1-4])>(.*?)<a class="headerlink" href="#([^"]+)"', re.S)
HIDDEN = re.compile('<span class="katex-mathml">.*?</math></span>', re.S)
TAG = re.compile("<[^>]*>")
SOLUTION = 'class="solution dropdown '


class Entry(NamedTuple):
    """A line of the outline, and the sheet (from 0) and height in points to which it leads."""

    depth: int
    title: str
    page: int
    top: float


class Served(SimpleHTTPRequestHandler):
    """Serve the files of a folder, or the texts in `made` instead of them."""

    def __init__(self, *arguments, made: dict[str, str], **options):
        self.made = made
        super().__init__(*arguments, **options)

    def log_message(self, format, *args):
        """Print nothing."""

    def send_head(self):
        """Answer with the text in `made` for this address, if there is one, or with the file."""
        text = self.made.get(self.path.lstrip("/"))
        if text is None:
            return super().send_head()
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return io.BytesIO(body)


def toc() -> list[tuple[str, list[str]]]:
    """Return the heading and the pages, such as ``book/01_attention``, of each part."""
    found = yaml.safe_load((ROOT / "_toc.yml").read_text("utf8"))
    parts = [("", [found["root"]])]
    for part in found["parts"]:
        parts.append((part["caption"], [page["file"] for page in part["chapters"]]))
    return parts


def for_paper(page: str, first: int) -> str:
    """Return a built page for printing: numbered from `first`, with its title from sheet two."""
    title = html.unescape(re.search("<title>(.*?)(?: &#8212; |</title>)", page)[1])
    title = title.replace("\\", "").replace('"', r"\"")
    style = Template(STYLE).substitute(heading=title, first=first, numerals="")
    page = page.replace(SOLUTION, SOLUTION.replace("dropdown ", ""))
    page = page.replace("</head>", f"<style>{style}</style></head>", 1)
    return page.replace("</body>", f"<script>{SCRIPT}</script></body>", 1)


def front(lines: str) -> str:
    """Return the title page and the contents, whose entries are `lines`."""
    picture = (ROOT / "assets" / "six_attentions.svg").read_text("utf8")
    style = Template(STYLE).substitute(heading="", first=1, numerals=", lower-roman")
    style = style.replace("@top-left { content: none; }", "@bottom-center { content: none; }")
    return Template(TITLE_PAGE).substitute(
        title=CONFIG["title"],
        author=CONFIG["author"],
        year=CONFIG["copyright"],
        version=__version__,
        description=CONFIG["sphinx"]["config"]["myst_html_meta"]["description"],
        picture=picture,
        contents=lines,
        style=style,
    )


def contents(entries: list[Entry]) -> str:
    """Return the lines of the contents; entries of parts have depth 0."""
    kinds = ("part", "chapter", "section")
    return "\n".join(
        f'<p class="{kinds[depth]}"><a href="/{PLACE}/{page}/{top:.0f}">{html.escape(title)}</a>'
        + (f"<b>{page + 1}</b>" if depth else "")
        + "</p>"
        for depth, title, page, top in entries
        if depth < len(kinds)
    )


def print_page(browser: str, url: str, path: Path) -> PdfReader:
    """Print one address with Chromium; raise `RuntimeError` if it writes no file."""
    path.unlink(missing_ok=True)
    profile = f"--user-data-dir={path.parent / 'profile'}"
    command = [browser, *OPTIONS, profile, f"--print-to-pdf={path}", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    if not path.is_file():
        raise RuntimeError(f"{browser} wrote no PDF of {url}:\n{done.stderr[-2000:]}")
    return PdfReader(path)


def headings(page: str) -> list[tuple[int, str, str]]:
    """Return depth, text and anchor of each heading of a built page; its title has depth 1."""
    found = [(int(depth), plain(title), anchor) for depth, title, anchor in HEADING.findall(page)]
    if SOLUTION in page:
        found.append((2, "Solutions", "solutions"))
    return found


def plain(markup: str) -> str:
    """Return the text of a heading, with the visible characters of its formulas."""
    seen = HIDDEN.sub("", markup).replace('class="mord sqrt">', ">√")  # KaTeX draws the root
    return " ".join(html.unescape(TAG.sub("", seen)).replace("\u200b", "").split())


def places(reader: PdfReader) -> dict[str, tuple[int, float]]:
    """Return the sheet, counted from 0, and the height in points of each anchor."""
    return {
        unquote(name.removeprefix("/")): (reader.get_destination_page_number(x), float(x.top))
        for name, x in reader.named_destinations.items()
    }


class Book:
    """The printed pages, and the sheet (from 0, after the front matter) where each begins."""

    def __init__(self, base: str):
        self.base = base
        self.readers: dict[str, PdfReader] = {}
        self.starts: dict[str, int] = {}
        self.places: dict[str, dict[str, tuple[int, float]]] = {}
        self.entries: list[Entry] = []
        self.pages = 0

    def add(self, name: str, page: str, reader: PdfReader, part: str) -> None:
        """Append a printed page; `part` is the heading of the part that it begins, or empty."""
        self.readers[name], self.starts[name] = reader, self.pages
        self.places[name] = places(reader)
        lines = ([(0, part, "")] if part else []) + headings(page)
        self.entries += [Entry(x, title, *self.place(name, anchor)) for x, title, anchor in lines]
        self.pages += len(reader.pages)

    def place(self, name: str, anchor: str) -> tuple[int, float]:
        """Return the sheet and the height of an anchor, or of the page's top if it is missing."""
        page, top = self.places[name].get(anchor, (0, 842.0))
        return self.starts[name] + page, top

    def target(self, name: str, link: DictionaryObject) -> tuple[int, float] | str | None:
        """Return a link's target: a place, an address outside the book, or None if missing."""
        if "/Dest" in link:
            return self.place(name, unquote(str(link["/Dest"]).removeprefix("/")))
        url = str(link["/A"]["/URI"])
        if not url.startswith(self.base):
            return url
        path, anchor = urlsplit(url).path.lstrip("/"), unquote(urlsplit(url).fragment)
        if path.startswith(f"{PLACE}/"):
            _, page, top = path.split("/")
            return int(page), float(top)
        page = path.removesuffix(".html")
        return self.place(page, anchor) if page in self.readers else None

    def join(self, before: PdfReader) -> PdfWriter:
        """Return the document: `before`, which has Roman numerals, and all pages."""
        writer, shift = PdfWriter(), len(before.pages)
        for name, reader in {FRONT: before, **self.readers}.items():
            for page in reader.pages:
                writer.add_page(page)[NameObject("/Name")] = NameObject(name)
        sheets = list(writer.pages)

        def fit(top: float) -> Fit:
            return Fit.xyz(left=0, top=top)

        for sheet in sheets:
            name, links = sheet.pop("/Name"), ArrayObject()
            for link in sheet.get("/Annots", ()):
                target = self.target(name, link.get_object())
                if isinstance(target, tuple):
                    link.get_object().pop("/A", None)
                    place = Destination(
                        "", sheets[target[0] + shift].indirect_reference, fit(target[1])
                    )
                    link.get_object()[NameObject("/Dest")] = place.dest_array
                if target is not None:
                    links.append(link)
            sheet[NameObject("/Annots")] = links
        above: dict[int, object] = {}
        for depth, title, page, top in self.entries:
            above = {d: x for d, x in above.items() if d < depth}
            parent = above[max(above)] if above else None
            above[depth] = writer.add_outline_item(
                title=title,
                page_number=page + shift,
                parent=parent,
                fit=fit(top),
                is_open=depth == 0,
            )
        writer.set_page_label(0, shift - 1, PageLabelStyle.LOWERCASE_ROMAN)
        writer.set_page_label(shift, len(sheets) - 1, PageLabelStyle.DECIMAL)
        writer.add_metadata({"/Title": CONFIG["title"], "/Author": CONFIG["author"]})
        writer.page_mode = "/UseOutlines"
        return writer


def make(browser: str, folder: Path, parts: list[tuple[str, list[str]]], work: Path) -> PdfWriter:
    """Print these pages of the built book in `folder`, report progress, and join them.

    `work` is a folder for temporary files; it is emptied first and finally deleted.
    """
    print("Printing the pages takes some minutes.", flush=True)
    made: dict[str, str] = {}
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    count, start = sum(len(names) for _, names in parts), time.time()
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Served, directory=folder, made=made)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}/"
        book = Book(base)
        for caption, names in parts:
            for name in names:
                page = (folder / f"{name}.html").read_text("utf8")
                made[f"{name}.html"] = for_paper(page, book.pages + 1)
                reader = print_page(browser, f"{base}{name}.html", work / "page.pdf")
                book.add(name, page, reader, caption if name == names[0] else "")
                done = len(book.readers)
                print(
                    f"  {done} of {count}: {name}, {len(reader.pages)} pages,"
                    f" {time.time() - start:.0f} s",
                    flush=True,
                )
        made[FRONT] = front(contents(book.entries))
        before = print_page(browser, base + FRONT, work / "page.pdf")
        server.shutdown()
    shutil.rmtree(work)
    return book.join(before)


def find_browser() -> str:
    """Return the path of Chromium, or exit with a message if it is missing."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"No browser is on the PATH. Install one of these: {', '.join(BROWSERS)}.")
    return browser


def main() -> int:
    """Print the built book."""
    writer = make(find_browser(), HTML, toc(), PARTS)
    writer.write(OUT)
    size = OUT.stat().st_size / 1e6
    print(f"  The PDF has {len(writer.pages)} pages, {size:.1f} MB: {OUT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
