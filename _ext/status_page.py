"""What pages say of their own times: to read, to run here, in another profile or on a GPU."""

from __future__ import annotations

import json
import re
from functools import lru_cache

from docutils import nodes

from derived_attention.training.grids import duration
from plan import RESULT

WORDS_PER_MINUTE = 200
SECONDS_PER_FORMULA = 15
SECONDS_PER_CELL = 20
KINDS = ("read", "exercises", "cpu", "gpu", "full")
EXERCISE = re.compile(r"\((\d+) min(?:utes)?\)")  # as an exercise says how long it takes


def run_seconds(app, doc: str) -> float | None:
    """Return how long the page took to execute."""
    data = getattr(app.env, "nb_metadata", {}).get(doc, {}).get("exec_data")
    return data["runtime"] if data else None


def read_minutes(doctree) -> int:
    """Estimate the time to read a page: what is open to the eye, not what is folded away."""
    words = formulas = cells = 0
    for node in doctree.findall():
        if isinstance(node, (nodes.paragraph, nodes.math_block)) or _is_cell(node):
            if _folded(node):
                continue
            words += len(node.astext().split()) if isinstance(node, nodes.paragraph) else 0
            formulas += isinstance(node, nodes.math_block)
            cells += _is_cell(node)
    seconds = SECONDS_PER_FORMULA * formulas + SECONDS_PER_CELL * cells
    return max(1, round(words / WORDS_PER_MINUTE + seconds / 60))


def exercise_minutes(doctree) -> int:
    """Add up what the exercises of a page say that they take."""
    boxes = [n for n in doctree.findall(nodes.Element) if n.tagname.startswith("exercise")]
    return sum(int(m) for box in boxes for m in EXERCISE.findall(box.astext()))


def _is_cell(node) -> bool:
    return isinstance(node, nodes.container) and "cell_input" in node["classes"]


def _folded(node) -> bool:
    """Say whether a node is in a solution, a closed box, or the hidden input of a cell."""
    while node is not None:
        classes = node.attributes.get("classes", []) if isinstance(node, nodes.Element) else []
        if "solution" in classes or node.attributes.get("design_component") == "dropdown":
            return True
        if node.attributes.get("hide_mode") in ("input", "all"):
            return True
        node = node.parent
    return False


@lru_cache
def _plans() -> dict:
    return json.loads(RESULT.read_text("utf8"))


def planned(doc: str, profile: str) -> dict | None:
    """Return what a page's plan says: see plan.py. A new page may have none yet."""
    return _plans().get(profile, {}).get(doc.rpartition("/")[2])


def words(seconds: float) -> str:
    """Return a time in words that are not torn apart: also days, which no run of ours has taken."""
    days = seconds / 86400
    text = f"{days:.0f} days" if days > 3 else duration(seconds)
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def measured(app, doc: str, kind: str) -> str:
    """Return one of a page's times as text."""
    if kind == "read":
        return f"{read_minutes(app.env.get_doctree(doc))} min to read"
    if kind == "exercises":
        return f"{exercise_minutes(app.env.get_doctree(doc))} min of exercises"
    if kind == "cpu":
        seconds = run_seconds(app, doc)
        return "not executed" if seconds is None else f"{seconds:.0f} s on this build's CPU"
    plan = planned(doc, "medium" if kind == "gpu" else "full")
    if plan is None:
        return f"not planned {'on a GPU' if kind == 'gpu' else 'in full'} yet"
    gpu = f"{words(plan['gpu_seconds'])} on a GPU"
    if kind == "gpu":
        return f"some {gpu} (computed)"
    return (
        f"{plan['runs']:,} runs, {plan['steps']:,} steps, "
        f"some {words(plan['cpu_seconds'])} on one core and {gpu} (computed)"
    )


def status_rows(app, pages: list[str], link, claims) -> tuple[list[str], list[list]]:
    """Return header and rows: each page's times, planned and measured, its claims and figures.

    `link` makes a link to a page, `claims` are all of this build as (page, claim).
    """
    rows = []
    for page in pages:
        doctree, seconds = app.env.get_doctree(page), run_seconds(app, page)
        plans = [planned(page, profile) for profile in ("medium", "full")]
        times = [
            words(plan[f"{where}_seconds"]) if plan else "–"
            for plan, where in zip((*plans, plans[1]), ("gpu", "gpu", "cpu"), strict=True)
        ]
        rows.append(
            [
                [link(page)],
                f"{read_minutes(doctree)}\N{NO-BREAK SPACE}min",
                "not executed" if seconds is None else f"{seconds:.0f} s",
                *times,
                str(sum(p == page for p, _ in claims)),
                str(len(list(doctree.findall(nodes.figure)))),
            ]
        )
    header = ["chapter", "to read", "quick, here", "medium, GPU", "full, GPU", "full, one core"]
    return [*header, "claims", "figures"], rows
