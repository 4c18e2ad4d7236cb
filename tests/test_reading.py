"""Times to read: what is open counts, at the rates that the status page states."""

from pathlib import Path

from docutils import nodes
from docutils.utils import new_document
from sphinx_proof.nodes import proof_node

import status_page

ROOT = Path(__file__).parents[1]


def page(*parts):
    document = new_document("page")
    document.extend(parts)
    return document


def words(n):
    return nodes.paragraph("", " ".join(["word"] * n))


def code(lines, **attributes):
    cell = nodes.container("", nodes.literal_block("", "x = 1\n\n" * lines), **attributes)
    cell["classes"].append("cell_input")
    return cell


def stop():
    return nodes.admonition("", words(0), classes=["sitting"])


def closed(*parts):
    return nodes.container("", *parts, design_component="dropdown")


def test_words_formulas_and_visible_lines_count():
    assert status_page.reading(page(words(300))).minutes == 3
    assert status_page.reading(page(*[nodes.math_block() for _ in range(4)])).minutes == 3
    assert status_page.reading(page(code(30))).minutes == 2
    assert status_page.reading(page(words(10))).minutes == 1  # no page takes none


def test_what_is_closed_does_not_count_but_proofs_are_named():
    hidden = nodes.container("", code(60), hide_mode="input")
    task = nodes.admonition("", words(400), classes=["exercise"])
    proof = proof_node("", words(200))
    found = status_page.reading(page(words(100), hidden, task, closed(words(500)), closed(proof)))
    assert found == ([1], 2)
    assert str(found) == "1 min to read slowly; the proofs, 2 min more"
    assert status_page.reading(page(proof_node("", words(200)))) == ([2], 0)  # an open one


def test_sittings_are_cut_at_their_boxes():
    found = status_page.reading(page(words(1000), stop(), words(2000), stop(), words(1500)))
    assert str(found) == "45 min to read slowly, in three sittings of 10, 20 and 15 min"


def test_the_status_page_states_the_rates():
    text = " ".join((ROOT / "book" / "status.md").read_text("utf8").split())
    for rate in (
        f"{status_page.WORDS_PER_MINUTE} words a minute",
        f"{status_page.SECONDS_PER_FORMULA} seconds a displayed formula",
        f"{status_page.SECONDS_PER_LINE} seconds a line of visible code",
    ):
        assert rate in text


def test_a_long_page_says_where_to_stop():
    for chapter in (ROOT / "book").glob("[0-9]*.md"):
        assert ":class: sitting" in chapter.read_text("utf8"), chapter.name
