"""Tests of a PDF of three pages of the book: fonts, page numbers, links and contents."""

from __future__ import annotations

import re

import pytest
from places import HTML
from pypdf import PdfReader

import pdf

CHAPTER = "book/05_normalise_and_scale"
PARTS = [("", ["book/index"]), ("A & B", [CHAPTER]), ("Back matter", ["book/references"])]
FACES = {"Main", "Math", "AMS", "Caligraphic", "Size1", "Size2"}  # those of the chapter's formulas


def faces(pages) -> set[str]:
    """Return KaTeX's font families that these pages use."""
    fonts = [font for page in pages for font in page["/Resources"].get("/Font", {}).values()]
    names = [str(font.get_object()["/BaseFont"]) for font in fonts]
    return set(re.findall(r"KaTeX_(\w+)-", " ".join(names)))


@pytest.fixture(scope="module")
def printed(browser, tmp_path_factory):
    """Return a PDF of three pages of the book."""
    folder = tmp_path_factory.mktemp("pdf")
    writer = pdf.make(pdf.find_browser(), HTML, PARTS, folder / "work")
    writer.write(folder / "book.pdf")
    return PdfReader(folder / "book.pdf")


@pytest.fixture(scope="module")
def texts(printed):
    return [page.extract_text() for page in printed.pages]


def outline(items, depth=0):
    """Yield depth, title and destination of each bookmark."""
    for item in items:
        if isinstance(item, list):
            yield from outline(item, depth + 1)
        else:
            yield depth, item.title, item


def page_of(printed, destination) -> int:
    return printed.get_page_number(destination.get_object())


def links(printed, number: int):
    """Yield the target of each link of a page: an external address or a page number."""
    for link in printed.pages[number].get("/Annots", ()):
        link = link.get_object()
        if "/Dest" in link:
            yield page_of(printed, link["/Dest"][0])
        else:
            yield str(link["/A"]["/URI"])


def test_it_begins_with_a_title_and_contents(printed, texts):
    assert "Derived Attention" in texts[0] and pdf.__version__ in texts[0]
    assert "Contents" in texts[1]
    first = next(i for i, text in enumerate(texts) if "You will be able to" in text)
    line = rf"5\. Batch normalisation and scaled heads\s+{printed.page_labels[first]}\n"
    assert re.search(line, texts[1]) and "A & B" in texts[1]


def test_every_page_but_the_title_has_its_number(printed, texts):
    labels = printed.page_labels
    assert labels[1] == "ii" and labels[-1] == str(len(texts) - 2)
    for label, text in list(zip(labels, texts, strict=True))[1:]:
        assert label in text.split(), label


def test_every_letter_of_the_formulas_is_there(printed, texts):
    chapter = [page for page, text in zip(printed.pages, texts, strict=True) if text[:2] == "5."]
    assert len(chapter) > 5 and faces(chapter) == FACES


def test_links_lead_to_pages_of_the_book_and_to_other_sites(printed, texts):
    found = {n: list(links(printed, n)) for n in range(len(texts))}
    sites = {x for targets in found.values() for x in targets if isinstance(x, str)}
    assert any(x.startswith("https://doi.org") or "arxiv.org" in x for x in sites)
    assert not [x for x in sites if "127.0.0.1" in x or x.startswith("file:")]
    (further,) = (n for n, text in enumerate(texts) if "5.12. Further reading\nI" in text)
    cited = {texts[x][:2000] for x in found[further] if isinstance(x, int)}
    assert any("References" in text or "et al." in text for text in cited)
    assert found[1][:1] == [2]  # the contents begin with the front page


def test_bookmarks_are_parts_chapters_and_sections(printed, texts):
    marks = list(outline(printed.outline))
    depths = {title: depth for depth, title, _ in marks}
    assert depths["A & B"] == 0 and depths["5. Batch normalisation and scaled heads"] == 1
    assert depths["5.11. Exercises"] == depths["Solutions"] == 2
    question = "5.1. The question: keys that share a vector"
    for title in (question, "5.11. Exercises", "Solutions", "References"):
        (target,) = (item for _, name, item in marks if name == title)
        assert title in texts[printed.get_destination_page_number(target)]


def test_solutions_come_after_their_chapter(texts):
    whole = "\n".join(texts)
    assert whole.index("Solutions\n") < whole.index("Solution of Exercise 5.1")
    exercise, further = whole.rindex("5.11. Exercises"), whole.rindex("5.12. Further reading")
    assert exercise < further < whole.rindex("Solution of Exercise 5.1")
    assert "Solution" not in whole[exercise:further]


def test_without_a_browser_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(pdf.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="Install one of these: chromium"):
        pdf.main()


def test_a_heading_is_what_is_seen_of_it():
    formula = '<span class="katex"><span class="katex-mathml"><math><mi>x</mi></math></span>'
    formula += '<span class="katex-html"><span class="mord sqrt">x\u200b</span>'
    page = f'<h2>A &amp; {formula}<a class="headerlink" href="#a-x">#</a></h2>'
    assert pdf.headings(page) == [(2, "A & √x", "a-x")]
