"""Slide decks: made from the built pages, complete, readable offline, printable."""

import re

import pytest
from bs4 import BeautifulSoup
from places import ROOT

import slides

PART = "Part VII: Today"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make the deck of one part from the built book, and return its folder."""
    assert (slides.HTML / "book" / "15_delta_rule.html").exists(), "run make book"
    folder = tmp_path_factory.mktemp("slides") / "slides"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slides, "SLIDES", folder)
        patch.setattr(slides, "ROOT", folder.parent)
        patch.setattr(slides, "parts", lambda: [x for x in CHOSEN if x[0] == PART])
        assert slides.main() == 0
    return folder


CHOSEN = list(slides.parts())


@pytest.fixture(scope="module")
def path(folder):
    (path,) = folder.glob("*.html")
    assert path.name == "part-7-today.html"
    return path


@pytest.fixture(scope="module")
def tree(path):
    return BeautifulSoup(path.read_text("utf8"), "html.parser")


def sheets(tree):
    return tree.select(".slides > section > section")


def test_every_part_has_a_deck_of_its_chapters():
    names = [slides.file_name(caption) for caption, _ in CHOSEN]
    assert names[0] == "part-1-ground.html" and len(set(names)) == len(names) >= 8
    chapters = [page for _, pages in CHOSEN for page in pages]
    assert "book/positions" in chapters and not [x for x in chapters if "audit" in x]


def test_a_chapter_s_statements_predictions_figures_and_takeaways_are_there(tree):
    text = " ".join(tree.get_text().split()).replace("’", "'")
    page = (ROOT / "book" / "15_delta_rule.md").read_text("utf8")
    box = r"^:::\{prf:(?:theorem|proposition|definition)\} (.+)$"
    for title in re.findall(box, page, flags=re.M):
        if "$" not in title and "*" not in title:
            assert title in text, title
    for name in re.findall(r"^    name: (fig-\S+)$|^name: (fig-\S+)$", page, flags=re.M):
        assert tree.find(id="".join(name)) is not None, name
    for title in ("Predict", "Takeaways", "You will be able to"):
        assert text.count(title) >= 2, title
    assert tree.select(".katex") and "math-error" not in str(tree)
    assert tree.select(".da-slider input[type=range]") and tree.select(".da-slider + p")
    assert tree.select("#equation-eq-keep-sink + .admonition")  # a formula that a box cites
    assert all(script.string for script in tree.select(".da-slider script"))
    assert "Proof" not in [x.get_text(strip=True) for x in tree.select("summary")]


def test_the_number_of_slides_is_plausible(tree):
    pages = dict(CHOSEN)[PART]
    assert 12 * len(pages) <= len(sheets(tree)) <= 40 * len(pages)
    assert all(sheet.get_text(strip=True) for sheet in sheets(tree))
    assert len(tree.select(".slides > section")) == 1 + len(pages)
    assert len(tree.select("h1 + ul li")) == len(pages)


def test_a_deck_loads_nothing_from_outside_and_all_that_it_loads_is_there(folder, tree):
    loaded = [x.get("src") or x.get("href") for x in tree.select("[src], link[href]")]
    assert len(loaded) >= 5
    for name in loaded:
        if not name.startswith("data:"):
            assert ":" not in name and (folder / name).is_file(), name
    assert not tree.find_all("a"), "the deck contains links"
    for style in folder.rglob("*.css"):
        for name in re.findall(r"url\(['\"]?([^)'\"]+)", style.read_text("utf8")):
            # KaTeX's style sheet names three formats of each font; browsers take the first, woff2.
            if not name.startswith("data:") and not name.endswith((".woff", ".ttf")):
                assert (style.parent / name).is_file(), name


def test_clips_and_ids_of_several_pages_do_not_meet(tree):
    ids = [x["id"] for x in tree.select("[id]")]
    twice = {x for x in ids if ids.count(x) > 1}
    used = set(re.findall(r"url\(#([^)]+)\)", str(tree)))
    for name in twice & used:
        assert len({str(x) for x in tree.find_all(id=name)}) == 1, name


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('<h2>A<a class="headerlink">#</a></h2><figure><img src="../_images/x.png"></figure>', 1),
        ('<div class="admonition"><p class="admonition-title">Note</p></div>', 0),
        ('<div class="admonition"><p class="admonition-title">Predict</p><svg></svg></div>', 1),
        ('<div class="theorem admonition"><p class="admonition-title">Theorem 1</p></div>', 1),
        ('<details><figure></figure></details><div class="solution"><figure></figure></div>', 0),
        ('<div class="exercise"><div class="theorem admonition"></div></div>', 0),
        ('<figure><div class="da-slider"></div></figure><div class="da-slider"></div>', 2),
    ],
)
def test_what_makes_a_slide(source, expected):
    article = BeautifulSoup(f"<article>{source}</article>", "html.parser").article
    assert len(list(slides.find_slides(article))) == expected


def test_a_slide_has_no_links_and_finds_its_images():
    source = '<p>See <a href="x.html">there<span>!</span></a><img src="../_images/y.png"></p>'
    cleaned = slides.clean(BeautifulSoup(source, "html.parser").p)
    assert cleaned == '<p>See there<span>!</span><img src="images/y.png"/></p>'


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture
def shown(browser, path):
    """Yield the deck, opened from disk; `asked` collects its requests, `said` its script errors."""
    with browser.new_context(viewport={"width": 1280, "height": 720}) as context:
        page = context.new_page()
        page.asked, page.said = [], []
        page.on("request", lambda x: page.asked.append(x.url))
        page.on("pageerror", lambda x: page.said.append(str(x)))
        page.goto(path.as_uri())
        page.wait_for_function("window.Reveal && Reveal.isReady()")
        yield page


def test_a_deck_runs_from_the_disk(shown):
    assert not [x for x in shown.asked if not x.startswith(("file:", "data:"))]
    assert shown.said == []
    before = shown.evaluate("Reveal.getIndices()")
    shown.keyboard.press("Space")
    assert shown.evaluate("Reveal.getIndices()") != before


def test_no_slide_is_cut_off(shown):
    too_high = shown.evaluate(
        """() => Reveal.getSlides().map((slide, i) => { Reveal.slide(...Object.values(
        Reveal.getIndices(slide)).slice(0, 2)); return [i, slide.scrollHeight, slide.scrollWidth,
        slide.clientWidth] }).filter(([, high, wide, room]) => high > 730 || wide > room + 2)"""
    )
    assert too_high == []


def test_a_deck_is_printed_a_page_a_slide(browser, path, tree):
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(path.as_uri() + "?print-pdf")
        page.wait_for_selector(".pdf-page", state="attached")
        page.wait_for_timeout(500)
        pdf = page.pdf(prefer_css_page_size=True, print_background=True)
        assert page.locator(".pdf-page").count() == len(sheets(tree))
    counts = [int(x) for x in re.findall(rb"/Count (\d+)", pdf)]
    assert max(counts) == len(sheets(tree))
