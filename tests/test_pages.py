"""Pages: code that fits the column on screen and in print, legends, bounds, links, captions."""

import re
from pathlib import Path

import pytest

from benchmarks import report

BOOK = Path(__file__).parents[1] / "book"
PAGES = sorted(page.stem for page in BOOK.glob("*.md"))
WIDEST = 84  # characters; longer lines are cut off at 1280 pixels
HIDDEN = re.compile(r"\b(hide-input|hide-cell|remove-input|remove-cell)\b")
OPENING = re.compile(r"\s*(`{3,})(\{code-cell\}|\{code-block\}|python|bash|sh)(?!\w)")


@pytest.fixture(params=PAGES)
def page(request):
    return request.param


@pytest.fixture
def text(page):
    return (BOOK / f"{page}.md").read_text("utf8")


def code_blocks(text):
    """Yield the number of the first line and the lines of each block of code that a page shows."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening, number = OPENING.match(lines[number]), number + 1
        if opening:
            length = [line.strip() for line in lines[number:]].index(opening[1])
            block = lines[number : number + length]
            head = block.index("---", 1) + 1 if block[:1] == ["---"] else 0
            if not HIDDEN.search(" ".join(block[:head])):
                yield number + head + 1, block[head:]
            number += length + 1


def too_long(text):
    """Return the number and the length of each line of visible code that does not fit."""
    blocks = (
        (first + i, line) for first, lines in code_blocks(text) for i, line in enumerate(lines)
    )
    return [(number, len(line)) for number, line in blocks if len(line) > WIDEST]


def test_visible_code_fits_the_column(page, text):
    found = too_long(text)
    assert not found, "\n" + "\n".join(
        f"book/{page}.md:{number}: {length} characters, {WIDEST} at most"
        for number, length in found
    )


def test_what_counts_as_visible():
    line = "x" * (WIDEST + 1)
    shown = f"text\n{line}\n\n```{{code-cell}} ipython3\n{line}\n{line[1:]}\n```\n"
    hidden = f"```{{code-cell}} ipython3\n---\ntags: [hide-input]\n---\n{line}\n```\n"
    solution = f":::{{solution-start}} ex\n:::\n\n{shown}"
    assert too_long(shown) == [(5, WIDEST + 1)]
    assert too_long(hidden) == [] and too_long(hidden + solution) == [(14, WIDEST + 1)]
    assert too_long(f"```sh\n{line}\n```") == [(2, WIDEST + 1)]


CELL = re.compile(r"^```\{code-cell\}.*?^```$", re.DOTALL | re.MULTILINE)


def test_curves_over_steps_say_which_is_which(text):
    """`plot_curves` only labels its lines; a legend or panel with the names must identify them."""
    drawn = [cell for cell in CELL.findall(text) if "plot_curves(" in cell]
    assert all("legend(" in cell or "yticklabels" in cell for cell in drawn)


BOUND = re.compile(r"\bat (?:most|least) \{[^{}]*:\.\d[^{}]*\}")


def test_bounds_are_rounded_to_their_side(text):
    """6.25 is not "at most 6.2"; `measure.at_most` and `measure.at_least` round safely."""
    assert BOUND.search('f"at most {100 / 16:.1f} %"')
    assert not BOUND.findall(text)


def test_the_page_on_speed_shows_every_case_and_chapters_show_none():
    """Its table names the cases in the order of the chapters, so one might be forgotten."""
    shown = {page: (BOOK / f"{page}.md").read_text("utf8") for page in PAGES}
    (names,) = re.findall(r"^```\{benchmarks\} (.+)$", shown.pop("speed"), flags=re.M)
    assert sorted(names.split()) == sorted({p.stem for p in report.RESULTS.glob("*/*.json")})
    assert not [page for page, text in shown.items() if "```{benchmarks}" in text]


# --- links and captions ---------------------------------------------------------------------------


def test_a_link_to_a_chapter_prints_its_number(text):
    """A chapter's title garbles a sentence; the role ``{chapter}`` prints its number instead."""
    assert not re.findall(r"\{doc\}`(?:\d\d|[A-E]|audit)_\w+`|\{doc\}`positions`", text)


def test_captions_of_sliders_do_not_say_left_or_right(text):
    """On a phone, the panels of a slider are stacked."""
    sliders = [cell for cell in CELL.findall(text) if "slider(" in cell]
    captions = [re.search(r'caption: "(.*)"', cell) for cell in sliders]
    assert not [x[1] for x in captions if x and re.search(r"\b([Ll]eft|[Rr]ight)\b[,:]", x[1])]
