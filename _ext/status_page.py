"""Compute the times that pages state: to read, to solve the exercises, and to run here."""

from __future__ import annotations

import re
from typing import NamedTuple

from docutils import nodes

# Rates of slow reading.
WORDS_PER_MINUTE = 130
SECONDS_PER_SYMBOL = 6  # an inline formula
SECONDS_PER_FORMULA = 60
SECONDS_PER_LINE = 9  # of visible code
SECONDS_PER_FIGURE = 45
SITTING = "sitting"  # the class of the box that marks the end of a sitting
KINDS = ("read", "minutes", "sittings", "exercises", "cpu")
EXERCISE = re.compile(r"\((\d+) min(?:utes)?\)")  # the time that an exercise states


def run_seconds(app, doc: str) -> float | None:
    """Return the seconds that the page took to run, or None if it did not run."""
    data = getattr(app.env, "nb_metadata", {}).get(doc, {}).get("exec_data")
    return data["runtime"] if data else None


class Reading(NamedTuple):
    """Minutes to read a page slowly."""

    sittings: list[int]  # the unfolded text, up to each box of the class `SITTING`
    proofs: int  # the folded proofs

    @property
    def minutes(self) -> int:
        """Return the minutes of all sittings together."""
        return sum(self.sittings)

    def __str__(self) -> str:
        text = f"{self.minutes} min"
        if len(self.sittings) > 1:
            number = {2: "two", 3: "three", 4: "four"}[len(self.sittings)]
            text += f" in {number} sittings ({' + '.join(map(str, self.sittings))})"
        pencil = f", {self.minutes + self.proofs} min with the proofs and a pencil"
        return text + (pencil if self.proofs else "")


def reading_time(doctree) -> Reading:
    """Estimate the time to read a page, by the rates above."""
    sittings, proofs = [0.0], 0.0
    boxes = 0  # number of closed HTML boxes around the node, such as a table of learning rates
    for node in doctree.findall():
        if isinstance(node, nodes.raw):
            boxes += node.astext().count("<details") - node.astext().count("</details>")
        if isinstance(node, nodes.Element) and SITTING in node.get("classes", []):
            sittings.append(0.0)
        seconds = _seconds(node)
        if not seconds or boxes or (folded := _folded(node)) == "away":
            continue
        if folded:
            proofs += seconds
        else:
            sittings[-1] += seconds
    whole = [round(x / 60) for x in sittings if x > 30] or [1]
    return Reading(whole, round(proofs / 60))


def _seconds(node) -> float:
    if isinstance(node, nodes.paragraph | nodes.caption):
        formulas = list(node.findall(nodes.math))
        words = len(node.astext().split()) - sum(len(x.astext().split()) for x in formulas)
        return 60 * words / WORDS_PER_MINUTE + SECONDS_PER_SYMBOL * len(formulas)
    if isinstance(node, nodes.math_block):
        return SECONDS_PER_FORMULA
    if isinstance(node, nodes.figure):
        return SECONDS_PER_FIGURE
    if isinstance(node, nodes.container) and "cell_input" in node["classes"]:
        if "check_properties(" in node.astext():  # the cell of an exercise
            return 0
        return SECONDS_PER_LINE * sum(bool(line.strip()) for line in node.astext().splitlines())
    return 0


def exercise_minutes(doctree) -> int:
    """Add up the minutes that a page's exercises state, without the open ones."""
    boxes = (n.astext() for n in doctree.findall(nodes.Element) if n.tagname.startswith("exercise"))
    return sum(int(x) for text in boxes if "🔬" not in text for x in EXERCISE.findall(text))


def _folded(node) -> str | None:
    """Return ``"proof"`` in a closed proof, ``"away"`` in another closed box or an exercise."""
    proof = closed = False
    while node is not None:
        if isinstance(node, nodes.Element):
            classes = node.get("classes", [])
            hidden = node.get("hide_mode") == "all" or "cell_input" in classes and _is_hidden(node)
            if hidden or {"solution", "exercise"} & set(classes):
                return "away"
            proof |= node.tagname == "proof_node"
            closed |= node.get("design_component") == "dropdown"
        node = node.parent
    return ("proof" if proof else "away") if closed else None


def _is_hidden(cell_input) -> bool:
    """Return whether the code of a cell is folded; its output stays on the page."""
    return cell_input.parent is not None and cell_input.parent.get("hide_mode") == "input"


def time_text(app, doc: str, kind: str) -> str:
    """Return one of a page's times as text; minutes, sittings and exercises without their unit."""
    if kind == "exercises":
        return str(exercise_minutes(app.env.get_doctree(doc)))
    if kind != "cpu":
        time = reading_time(app.env.get_doctree(doc))
        each = " + ".join(map(str, time.sittings))
        return {"read": str(time), "minutes": str(time.minutes), "sittings": each}[kind]
    seconds = run_seconds(app, doc)
    return "not executed" if seconds is None else f"{seconds:.0f} s on the CPU that built the book"


def status_rows(app, pages: list[str], link, claims) -> tuple[list[str], list[list]]:
    """Return header and rows: each page's times, and how many claims and figures it has.

    `link` makes a link to a page; `claims` lists all claims of this build as (page, claim).
    """
    rows = []
    for page in pages:
        doctree, seconds = app.env.get_doctree(page), run_seconds(app, page)
        rows.append(
            [
                [link(page)],
                f"{reading_time(doctree).minutes}\N{NO-BREAK SPACE}min",
                "not executed" if seconds is None else f"{seconds:.0f} s",
                str(sum(p == page for p, _ in claims)),
                str(len(list(doctree.findall(nodes.figure)))),
            ]
        )
    return ["chapter", "to read", "quick, here", "claims", "figures"], rows
