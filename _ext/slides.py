"""Make a deck of slides for each part from the built pages.

The slides of a chapter show its promise, its goals, its figures and sliders, boxed statements with
the formulas that they cite, predictions and takeaways, in the order of the page. Everything is
copied from the HTML, formulas and figures included, so that slides and pages agree. reveal.js shows
the slides and loads nothing from other sites. A deck whose address ends in `?print-pdf` is ready
for printing.
"""

from __future__ import annotations

import html
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Template

import yaml
from bs4 import BeautifulSoup
from bs4.element import Script, Tag

ROOT = Path(__file__).resolve().parents[1]
HTML = ROOT / "_build" / "html"
SLIDES = ROOT / "_build" / "slides"
REVEAL = ROOT / "node_modules" / "reveal.js" / "dist"
# Slides show figures, sliders, and boxes of these kinds or with one of these titles.
KINDS = ".theorem, .proposition, .definition, .lemma, .corollary, .algorithm"
TITLES = ':has(> .admonition-title:-soup-contains("Predict", "Takeaways"))'
SHOWN = f"figure, .da-slider, div.admonition:is({KINDS}, {TITLES})"
HIDDEN = ["solution", "exercise"]
GONE = "a.headerlink, .toggle-button, details, script[src], .copybtn"
PAGE = Template(Path(__file__).with_name("slides.html").read_text("utf8"))
SLIDE = '<section><div class="da-content">{}</div></section>'


def parts() -> Iterator[tuple[str, list[str]]]:
    """Yield the headings of the numbered parts and the names of their chapters."""
    for part in yaml.safe_load((ROOT / "_toc.yml").read_text("utf8"))["parts"]:
        if part["caption"].startswith("Part "):
            pages = [chapter["file"] for chapter in part["chapters"]]
            yield part["caption"], [x for x in pages if not x.startswith("book/audit_")]


def clean(element: Tag) -> str:
    """Return an element's HTML for a slide, without links, which would lead out of the deck."""
    for gone in element.select(GONE):
        gone.decompose()
    for link in element.find_all("a"):
        link.unwrap()
    for section in element.find_all("section"):  # reveal.js would treat it as a slide
        section.name = "div"
    for image in element.find_all("img"):
        image["src"] = f"images/{Path(image['src']).name}"
    for script in element.select("script[data-src]"):  # a page loads it, a deck contains it
        file = HTML / "_static" / "sliders" / Path(script["data-src"]).name
        script.attrs = {}
        script.append(Script(file.read_text("utf8")))
    return str(element)


def find_slides(article: Tag) -> Iterator[tuple[str, list[Tag]]]:
    """Yield the heading above and the elements of each slide; no element is yielded twice."""
    heading, taken = "", set()
    for element in article.select(f"h2, {SHOWN}"):
        # An element in a folded box, an exercise or a shown element gets no slide of its own.
        hidden = element.find_parent("details") or element.find_parent(class_=HIDDEN)
        if element.name == "h2":
            heading = element.get_text().strip().rstrip("#")
        elif not hidden and not any(id(parent) in taken for parent in element.parents):
            taken.add(id(element))
            # Each takeaway has a slide of its own.
            if (title := element.find(class_="admonition-title")) and title.text == "Takeaways":
                for part in element.find_all("li"):
                    part.name = "div"
                    yield "Takeaways", [part]
            else:
                yield heading, [*take_cited(article, element), element, *text_above(element)]


def take_cited(article: Tag, element: Tag) -> Iterator[Tag]:
    """Yield the formulas that an element is the first to cite, and remove them from the text."""
    for link in element.select('a[href^="#equation-"]'):
        formula = article.find(id=link["href"].removeprefix("#"))
        if formula and not formula.find_parent(class_="admonition"):
            yield formula.extract()


def text_above(element: Tag) -> list[Tag]:
    """Return the paragraph above a slider that has no caption."""
    cell = element.find_parent(class_="cell") if element.name != "figure" else None
    above = cell and cell.find_previous_sibling()
    return [above] if above and above.name == "p" else []


def chapter_slides(name: str) -> list[str]:
    """Return the slides of a chapter, each an HTML section."""
    page = BeautifulSoup((HTML / f"{name}.html").read_text("utf8"), "html.parser")
    article = page.find("article")
    title = article.find("h1")
    heading, promise = clean_inner(title), clean_inner(title.find_next("p"))
    slides = [f'<h1>{heading}</h1><p class="da-promise">{promise}</p>']
    slides += [f"<h2>{heading}</h2>{clean(x)}" for x in article.select(".sd-card-body")[:1]]
    for above, elements in list(find_slides(article)):
        slides.append(f"<h2>{html.escape(above) or heading}</h2>{''.join(map(clean, elements))}")
    return [SLIDE.format(slide) for slide in slides]


def clean_inner(element: Tag) -> str:
    """Return the inner HTML of an element, cleaned."""
    clean(element)
    return element.decode_contents()


def deck(caption: str, pages: list[str]) -> str:
    """Return the HTML of a part's deck: a column for each chapter."""
    chapters, title = [chapter_slides(name) for name in pages], html.escape(caption)
    names = "".join(f"<li>{re.search('<h1>(.*?)</h1>', x[0], re.S)[1]}</li>" for x in chapters)
    columns = [[SLIDE.format(f"<h1>{title}</h1><ul>{names}</ul>")], *chapters]
    slides = "".join("<section>\n{}\n</section>\n".format("\n".join(x)) for x in columns)
    return PAGE.substitute(title=title, slides=slides)


def file_name(caption: str) -> str:
    """Return the file name of a part's deck, such as ``part-2-support-vectors.html``."""
    numeral, _, name = caption.removeprefix("Part ").partition(": ")
    roman = ["I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X"]
    return f"part-{roman.index(numeral) + 1}-{name.lower().replace(' ', '-')}.html"


def copy_assets(decks: dict[str, str]) -> None:
    """Copy the files that decks load: reveal.js, KaTeX's style and fonts, and images."""
    (SLIDES / "reveal").mkdir(parents=True)
    for file in ("reset.css", "reveal.css", "reveal.js"):
        shutil.copy(REVEAL / file, SLIDES / "reveal")
    shutil.copytree(HTML / "_static" / "katex", SLIDES / "katex")
    shutil.copy(Path(__file__).with_name("slides.css"), SLIDES)
    for source in set(re.findall(r'src="images/([^"]+)"', "".join(decks.values()))):
        (SLIDES / "images").mkdir(exist_ok=True)
        shutil.copy(HTML / "_images" / source, SLIDES / "images")


def main() -> int:
    """Delete all decks and make them again."""
    if not (REVEAL / "reveal.js").exists():
        sys.exit("reveal.js is missing; run `make install` to download it")
    decks = {file_name(caption): deck(caption, pages) for caption, pages in parts()}
    shutil.rmtree(SLIDES, ignore_errors=True)
    copy_assets(decks)
    for name, text in decks.items():
        (SLIDES / name).write_text(text, "utf8")
        print(f"{(SLIDES / name).relative_to(ROOT)}: {text.count('<section><div')} slides")
    return 0


if __name__ == "__main__":
    sys.exit(main())
