"""Reading times: open content counts, at the rates that the status page states."""

from docutils import nodes
from docutils.utils import new_document
from places import ROOT
from sphinx_exercise.nodes import exercise_node
from sphinx_proof.nodes import proof_node

import status_page


def page(*parts):
    document = new_document("page")
    document.extend(parts)
    return document


def words(n):
    return nodes.paragraph("", " ".join(["word"] * n))


def code(lines, last="", **attributes):
    text = "x = 1\n\n" * lines + last
    cell = nodes.container("", nodes.literal_block("", text), **attributes)
    cell["classes"].append("cell_input")
    return cell


def stop():
    return nodes.admonition("", words(0), classes=["sitting"])


def closed(*parts):
    return nodes.container("", *parts, design_component="dropdown")


def test_each_kind_of_content_has_its_time():
    for parts, minutes in (
        ([words(390)], 3),
        ([nodes.math_block() for _ in range(4)], 4),
        ([code(20)], 3),
        ([code(20, "check_properties(f, is_short)"), words(390)], 3),  # no time for an exercise
        ([nodes.figure("", nodes.image(), nodes.caption("", "word " * 65)) for _ in range(4)], 5),
        ([nodes.paragraph("", *[nodes.math("", "a + b") for _ in range(30)])], 3),
        ([words(10)], 1),  # the minimum
    ):
        assert status_page.reading_time(page(*parts)).minutes == minutes, parts


def test_closed_boxes_count_only_as_proofs():
    figure = nodes.figure("", nodes.image(), nodes.caption("", "word " * 33))
    hidden = nodes.container("", code(60), figure, hide_mode="input")  # only the code is folded
    task = nodes.admonition("", words(400), classes=["exercise"])
    proof = proof_node("", words(260))
    found = status_page.reading_time(page(hidden, task, closed(words(500)), closed(proof)))
    assert found == ([1], 2)
    assert str(found) == "1 min, 3 min with the proofs and a pencil"
    assert status_page.reading_time(page(proof_node("", words(260)))) == ([2], 0)  # an open proof
    html = [nodes.raw("", text, format="html") for text in ("<details><p>", "</details>")]
    boxed = page(words(130), html[0], words(900), html[1], words(260))
    assert status_page.reading_time(boxed) == ([3], 0)


def test_sittings_are_cut_at_their_boxes():
    found = status_page.reading_time(page(words(1300), stop(), words(2600), stop(), words(1950)))
    assert str(found) == "45 min in three sittings (10 + 20 + 15)"


def test_minutes_of_open_exercises_are_not_counted():
    texts = (
        "⌨ Write it. (10 minutes)",
        "✍ Show it. (5 min)",
        "🔬 Find out. (30 minutes)",
        "✍ Prove it.",
    )
    boxes = [exercise_node("", nodes.paragraph("", text)) for text in texts]
    assert status_page.exercise_minutes(page(*boxes)) == 15


def test_the_status_page_states_the_rates():
    text = " ".join((ROOT / "book" / "status.md").read_text("utf8").split())
    for rate in (
        f"{status_page.WORDS_PER_MINUTE} words a minute",
        f"{status_page.SECONDS_PER_SYMBOL} seconds for each inline formula",
        f"{status_page.SECONDS_PER_FORMULA} seconds for each displayed formula",
        f"{status_page.SECONDS_PER_LINE} seconds for each line of visible code",
        f"{status_page.SECONDS_PER_FIGURE} seconds for each figure",
    ):
        assert rate in text
