"""For lecturers: a plan for every chapter, syllabi, and a graph that agrees with the cards."""

import re

import pytest
from places import ROOT

import book
import prerequisites

BOOK = ROOT / "book"

CHAPTERS = [x.removeprefix("book/") for x in book.parts() if not x.startswith("book/audit_")]
LINK = re.compile(r"\{(?:numref|prf:ref|ref|eq|(?:doc|chapter)|py:func)\}`")


def read(name):
    return (BOOK / f"{name}.md").read_text("utf8")


def sections(name):
    """Return the labelled sections of a page."""
    found = re.split(r"^\(([\w-]+)\)=\n## ", read(name), flags=re.M)
    return dict(zip(found[1::2], found[2::2], strict=True))


# --- the graph ------------------------------------------------------------------------------------


def said(name):
    """Return the chapters in the line "You need" of a card, or None, without `prerequisites`."""
    line = re.search(r"^You need (.*?\.)(?:\s|$)", read(name), flags=re.M | re.DOTALL)
    return (line and re.findall(r"\{chapter\}`(\w+)`", line[1])) or None


def reached(links, name):
    found = set()
    while new := {x for x, y in links if y == name or y in found} - found:
        found |= new
    return found


@pytest.fixture(scope="module")
def graph():
    return prerequisites.needs({name: read(name) for name in CHAPTERS})


def test_the_graph_is_what_the_cards_say(graph):
    stated = {name: said(name) for name in CHAPTERS if said(name) is not None}
    assert len(stated) > 10, "too few cards have a line that begins with You need"
    assert {name: set(graph[name]) for name in stated} == {x: set(y) for x, y in stated.items()}
    # The first page needs none, and the second states its need in other words.
    assert graph["01_attention"] == [] and graph["02_duality"] == ["01_attention"]


def test_the_drawing_has_the_chapters_and_what_they_need(graph):
    drawn = prerequisites.draw(graph)
    links = [tuple(x.split()) for x in re.findall(r'data-link="([^"]+)"', drawn)]
    every = [(x, name) for name, direct in graph.items() for x in direct]
    for name in CHAPTERS:
        assert reached(links, name) == reached(every, name), name
        without = [[x for x in links if x != link] for link in links if link[1] == name]
        assert all(reached(x, name) != reached(every, name) for x in without), f"{name}: redundant"
        assert all(f">{line}</text>" in drawn for line in prerequisites.label(name)), name
    (alt,) = re.findall(r'aria-label="([^"]+)"', drawn)
    assert "16_what_to_keep needs 01_attention, 04_three_attentions" in alt
    assert "#" not in drawn, "the drawing sets a colour, so one of the two modes may be unreadable"


def test_boxes_do_not_overlap_and_no_arrow_crosses_one(graph):
    drawn = prerequisites.draw(graph)
    found = re.findall(r'<rect x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)"', drawn)
    boxes = [tuple(map(float, x)) for x in found]
    assert len(boxes) == len(CHAPTERS)
    for i, (x, y, wide, high) in enumerate(boxes):
        others = boxes[:i] + boxes[i + 1 :]
        assert not [b for b in others if b[1] == y and abs(b[0] - x) < wide]
        passing = re.findall(r" (-?\d+),(\d+)V(\d+)", drawn)
        assert not [p for p in passing if float(p[1]) == y and x < float(p[0]) < x + wide]
        assert x >= 0 and high > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Needs {doc}`one`, and {doc}`two` (for {term}`x`). {doc}`three` is related.", "one two"),
        ("You know calculus.\nFrom {doc}`one`\nyou need a formula.", "one"),
        ("Needs {doc}`one` (a, b); {doc}`three` for c.\nIn {doc}`two` it differs.", "one three"),
        ("Needs {doc}`the first <one>`, and {doc}`elsewhere`.", "one"),
        ("Linear algebra. {doc}`one` has the symbols.", ""),
    ],
)
def test_what_a_card_needs(text, expected):
    pages = dict.fromkeys(("one", "two", "three"), "")
    pages["it"] = f":::{{grid-item-card}} Before you start\n{text}\n\n{{measured}}`read`\n"
    assert prerequisites.needs(pages)["it"] == expected.split()


def test_what_others_imply_is_not_drawn():
    graph = {"a": [], "b": ["a"], "c": ["a", "b"], "d": ["c", "a"]}
    assert prerequisites.arrows(graph) == [("a", "b"), ("b", "c"), ("c", "d")]
    table, ways = prerequisites.rows({"a": [], "b": ["a"], "c": ["b"], "e": [], "d": ["c", "e"]})
    assert [[x for x in row if isinstance(x, str)] for row in table][1:] == [["b"], ["c"], ["d"]]
    assert sorted(map(len, ways)) == [2, 2, 2, 4]  # the arrow from e passes two rows


# --- plans, syllabi, misconceptions ---------------------------------------------------------------


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_has_a_plan_of_fifty_minutes(chapter):
    plan = sections("teaching_plans")[f"plan-{chapter[:2] if chapter[0].isdigit() else chapter}"]
    assert f"{{chapter}}`{chapter}`" in plan
    minutes = re.findall(r"^\*\*(\w+), (\d+) min\.\*\*", plan, flags=re.M)
    assert [kind for kind, _ in minutes] == ["Board", "Live", "Ask", "Close"]
    assert sum(int(x) for _, x in minutes) == 50
    (live,) = re.findall(r"^\*\*Live.*", plan, flags=re.M)
    assert "{" in live or "slider" in live, "the part Live names no cell and no slider"
    assert "**Where they stumble.**" in plan


def test_a_belief_comes_with_its_cure():
    entries = re.findall(r'^\*\*"(.+?)"\*\*(.+)$', read("teaching_misconceptions"), flags=re.M)
    assert len(entries) >= 20
    assert not [belief for belief, cure in entries if not LINK.search(cure)]


@pytest.mark.parametrize(("label", "weeks"), [("syllabus-12", 12), ("syllabus-6", 6)])
def test_a_syllabus_has_its_weeks_and_its_minutes_come_from_the_build(label, weeks):
    rows = re.findall(r"^\| (\d+) \|(.+)$", sections("teaching_syllabi")[label], flags=re.M)
    assert [int(week) for week, _ in rows] == list(range(1, weeks + 1))
    for _, row in rows:
        read_before, hand_in, _ = row.split(" | ")
        assert re.search(r"\{chapter\}.*\(\{measured\}`(?:minutes|sittings) ", read_before), row
        assert hand_in.strip(), row
        assert not re.search(r"\d+ (min|hour)", row)


def test_the_long_syllabus_has_every_chapter():
    text = sections("teaching_syllabi")["syllabus-12"]
    assert not [x for x in CHAPTERS if f"{{chapter}}`{x}`" not in text]


def test_the_entry_leads_to_every_page_for_lecturers():
    text = read("teaching")
    pages = {path.stem for path in BOOK.glob("teaching_*.md")}
    assert pages and not [x for x in pages if f"{{doc}}`{x}`" not in text]
    assert not [x for x in CHAPTERS if f"| {{chapter}}`{x}` |" not in text]
