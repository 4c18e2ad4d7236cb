"""Machine checks of the papers' numbered items, each with a mutant that must fail.

A page calls these functions where it derives a claim. Each of them

1. checks the claim, and raises `ClaimError` if it does not hold,
2. checks a *mutant*, a plausible wrong version of it, and raises if that is **not** rejected,
3. refuses a check that shows nothing: one expression or one array on both sides, typed numbers on
   both sides or as the mutant, and a check that another item of the same source already has,
4. displays one line with both margins, and stores the claim as data in the cell's output, from
   which the book's ledger is built.

`item` is an id of the sources' inventory, such as ``"000.eq24"``, or None for a fact of the page.
The inventory is this book's unless `use_inventory` names another.
"""

from __future__ import annotations

import csv
import hashlib
import html
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import sympy
import torch

from derived_book.claim_lint import CallSite
from derived_book.intervals import decided, difference

DATA = "data-claim"  # the HTML attribute of a cell's output that contains a claim's data
VERDICTS = ("wrong as printed", "holds if", "holds", "definition")
GRADES = ("error", "slip", "copy")  # of mistakes in print, the gravest first
OUTCOMES = ("as predicted", "against the prediction", "open")  # of measured claims
MAX_SLACK = 10  # a bound's slack may be this many times the violation of the wrong bound
LARGEST_TOL = 1e-5  # of a check of a source's item
UNNUMBERED = ("text", "table")  # kinds of items that have no number in their source


class ClaimError(AssertionError):
    """A claim that does not hold, a mutant that was not rejected, or a vacuous check."""


@dataclass(frozen=True)
class Claim:
    """The result of one executed check."""

    item: str | None  # id in the inventory; None for a fact of the page
    kind: str  # the name of the function that made the claim
    verdict: str  # one of `VERDICTS`; of a measured claim, one of `OUTCOMES`
    statement: str  # the assumption, the correction, or the checked statement, in one line
    margin: float  # the error of the claim, or its slack if it is an inequality
    mutant_margin: float | None  # of the rejected mutant; None for a definition
    anchor: str  # id of the line on its page, for links from the ledger
    digest: str = ""  # of the check's sides, as items of a paper must not share a check
    grade: str | None = None  # one of `GRADES`, if the item is wrong as printed
    same_as: str | None = None  # the item whose mistake this one repeats or inherits
    unit: str = ""  # of the margins; empty for dimensionless numbers
    seeds: int | None = None  # of a measured claim: the number of runs of an arm
    interval: tuple[float, float] | None = None  # of a measured claim: of the difference

    def __str__(self) -> str:
        return f"{self._label}: {self.statement} ({self._details})"

    @property
    def _label(self) -> str:
        """Return what is checked, with its verdict unless that is obvious."""
        if self.kind == "measured":
            return f"Measured here, {self.verdict}"
        if self.item is None and self.verdict == "holds":
            return "Checked here"
        grade = f" ({self.grade})" if self.grade else ""
        return f"{self.item or 'Checked here'} {self.verdict}{grade}"

    @property
    def _details(self) -> str:
        kind = "" if self.kind == "measured" else f"{self.kind}, "
        return " · ".join(part for part in (kind + self._margin, self._mutant) if part)

    @property
    def _margin(self) -> str:
        # A negative slack is rounding: a larger violation has raised an error.
        slack = f"slack {self.margin:.2g}" if self.margin > 0 else "tight, up to rounding"
        words = {
            "identity": "zero exactly",
            "equal": f"error {self.margin:.1e}",
            "inequality": slack,
            "certificate": f"gap and KKT residuals {self.margin:.1e}",
            "refuted": f"violated by {self.margin:.3g}{self._unit}",
            "definition": "shapes checked",
        }
        if self.interval is not None:
            low, high = self.interval
            words["measured"] = (
                f"{self.margin:+.3g}{self._unit}, 95 % interval {low:+.3g} to {high:+.3g}, "
                f"{self.seeds} seeds"
            )
        return words[self.kind]

    @property
    def _unit(self) -> str:
        return f" {self.unit}" if self.unit else ""

    @property
    def _mutant(self) -> str:
        if self.mutant_margin is None:
            return ""
        if self.kind == "refuted":
            slack_or_error = "to spare" if self.mutant_margin < 0 else "off"  # of bound or value
            size = f"{abs(self.mutant_margin):.2g}{self._unit}"
            return f"correction survives, {size} {slack_or_error}"
        return f"mutant rejected at {self.mutant_margin:.2g}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return text for a terminal, and HTML for a page, with the data for the ledger."""
        look = "measured" if self.kind == "measured" else self.verdict.replace(" ", "-")
        look += " da-open" if self.verdict == "open" else ""
        data = html.escape(json.dumps(asdict(self)))
        mark = {"wrong as printed": "✗", "definition": "="}.get(self.verdict, "✓")
        mark = "" if self.kind == "measured" else mark + " "
        line = f"{mark}<strong>{self._label}:</strong> {html.escape(self.statement)}"
        own = f'class="da-claim da-{look}" id="{self.anchor}" {DATA}="{data}"'
        page = (
            f"<div {own}>{line}: {html.escape(self._details)}</div>"
            if self.kind == "measured"
            else f"<details {own}><summary>{line}</summary>{html.escape(self._details)}</details>"
        )
        return {"text/plain": str(self), "text/html": page}


_anchors: dict[str, int] = {}


def _next_anchor(item: str | None) -> str:
    """Return the id of a new line; an item may be checked several times."""
    stem = f"claim-{item or 'book'}"
    _anchors[stem] = _anchors.get(stem, 0) + 1
    return f"{stem}-{_anchors[stem]}"


_inventory_path = Path(str(resources.files("derived_book"))) / "inventory.csv"


def use_inventory(path: str | Path) -> None:
    """Use the inventory in another file, whose format `inventory` describes.

    Raises
    ------
    ValueError
        If the file lacks one of the columns "id", "kind" and "topic", or an id is not unique.
    """
    global _inventory_path
    _load.cache_clear()  # the file may have changed
    _load(Path(path).resolve())
    _inventory_path = Path(path).resolve()


def inventory() -> dict[str, dict[str, str]]:
    """Return the sources' items: id -> {"kind", "topic", "role"}, in the file's order.

    These are the columns of the file. An id consists of the name of its source, a dot, and the
    item's name; the kinds "text" and "table" are for items without a number; the role is
    "definition" if only shapes can be checked, otherwise empty.
    """
    return _load(_inventory_path)


@lru_cache
def _load(path: Path) -> dict[str, dict[str, str]]:
    rows = list(csv.DictReader(path.read_text("utf-8-sig").splitlines()))
    fields = ("kind", "topic", "role")
    items = {row.get("id", ""): {f: row.get(f) or "" for f in fields} for row in rows}
    complete = all(i and r["kind"] and r["topic"] for i, r in items.items())
    if not rows or len(items) != len(rows) or not complete:
        raise ValueError(f"{path} must have columns id, kind and topic, and unique ids")
    return items


def is_numbered(item: str) -> bool:
    """Return whether an item has a number in its source; text and tables have none."""
    return inventory()[item]["kind"] not in UNNUMBERED


def identity(
    item: str | None,
    residual: Any,
    *,
    mutant: Any,
    holds_if: str | None = None,
    statement: str = "",
) -> Claim:
    """Claim that symbolic expressions are exactly zero.

    Parameters
    ----------
    item
        Id in the inventory, or None.
    residual
        sympy expression, matrix, or a list of them: left side minus right side.
    mutant
        The same for a plausible wrong version; at least one entry must not be zero.
    holds_if
        An assumption that the paper omits; the verdict is then "holds if".
    statement
        The checked statement, in one line.

    Raises
    ------
    ClaimError
        If an entry of `residual` does not simplify to zero, or all entries of the mutant do.
    """
    _check_call(item, identity, ("residual",), wrong="mutant")
    for expression in _entries(residual, "residual"):
        if not _is_zero(expression):
            raise ClaimError(f"{_name(item)}: residual {expression} is not zero")
    size = max(_magnitude(expression) for expression in _entries(mutant, "mutant"))
    if size == 0:
        raise ClaimError(f"{_name(item)}: the mutant is zero too, so this check cannot fail")
    sides = (residual, mutant)
    return _record(item, "identity", holds_if, statement, 0.0, size, sides=sides)


def equal(
    item: str | None,
    left: Any,
    right: Any,
    *,
    tol: float = 1e-12,
    mutant: Any,
    relative: bool = False,
    holds_if: str | None = None,
    statement: str = "",
) -> Claim:
    r"""Claim that arrays agree: :math:`\max |l - r| / \max(1, \max|r|) \le` `tol`.

    Parameters
    ----------
    item, holds_if, statement
        As in `identity`.
    left, right
        Arrays, tensors or numbers of one shape; compared in float64 or complex128.
    tol
        Largest error allowed; for an item of a paper at most 1e-5.
    mutant
        Wrong version of `right`; its error must exceed ten times `tol`.
    relative
        Whether the error of each entry is relative to that entry, :math:`|l_i - r_i| / |r_i|`, for
        entries of different magnitudes.

    Raises
    ------
    ClaimError
        If the error exceeds `tol` or is not a number, or the mutant's does not exceed ``10 * tol``.
    """
    _check_call(item, equal, ("left", "right"), wrong="mutant")
    _check_distinct(item, left=left, right=right)
    _check_tol(item, tol)
    error = _error(left, right, "right", relative)
    if item is not None and not relative:
        _check_magnitude(item, right, tol)
    wrong = _error(left, mutant, "mutant", relative)
    if not error <= tol:
        raise ClaimError(f"{_name(item)}: error {error:.3e} exceeds tol={tol:.0e}")
    if not wrong > 10 * tol:
        raise ClaimError(f"{_name(item)}: mutant not rejected, its error is only {wrong:.3e}")
    more: dict[str, Any] = {"sides": (left, right), "mutant": None if relative else mutant}
    return _record(item, "equal", holds_if, statement, error, wrong, **more)


def inequality(
    item: str | None,
    smaller: Any,
    larger: Any,
    *,
    mutant: Any,
    holds_if: str | None = None,
    statement: str = "",
) -> Claim:
    """Claim that every entry of `smaller` is at most the matching entry of `larger`.

    Rounding errors of up to 1e-12 of an entry's magnitude, or of 1, are allowed.

    Parameters
    ----------
    item, holds_if, statement
        As in `identity`.
    smaller, larger
        Arrays that broadcast against each other, in float64.
    mutant
        Sharper version of `larger` that is wrong: some entry of `smaller` must exceed it. The
        slack of `larger` must be at most ten times that violation, or nearly every bound would
        pass.

    Raises
    ------
    ClaimError
        If an entry exceeds its bound, if none exceeds the mutant's, or if the slack is too large.
    """
    _check_call(item, inequality, ("smaller", "larger"), wrong="mutant")
    _check_distinct(item, smaller=smaller, larger=larger)
    slack, wrong = _slack(smaller=smaller, larger=larger), _slack(smaller=smaller, mutant=mutant)
    if not _holds(smaller=smaller, larger=larger):
        raise ClaimError(f"{_name(item)}: the bound is violated by {-slack:.3e}")
    if _holds(smaller=smaller, mutant=mutant):
        raise ClaimError(f"{_name(item)}: mutant not rejected, its bound has slack {wrong:.3e}")
    if not slack <= MAX_SLACK * -wrong:
        raise ClaimError(
            f"{_name(item)}: the bound has slack {slack:.3g}, and the mutant is violated by "
            f"{-wrong:.3g}; choose an instance on which the bound is tighter"
        )
    more: dict[str, Any] = {"sides": (smaller, larger), "mutant": mutant}
    return _record(item, "inequality", holds_if, statement, slack, -wrong, **more)


def certificate(
    item: str | None,
    *,
    primal: float,
    dual: float,
    tol: float = 1e-7,
    kkt: Mapping[str, float] | None = None,
    mutant: float,
    holds_if: str | None = None,
    statement: str = "",
) -> Claim:
    """Claim optimality in a convex problem, by equal primal and dual values.

    Parameters
    ----------
    item, holds_if, statement
        As in `identity`.
    primal, dual
        Objective values of a feasible primal and a feasible dual point (minimisation).
    tol
        Largest gap, relative to ``1 + |primal|``, and largest KKT residual allowed.
    kkt
        Named residuals, such as ``{"stationarity": 3e-9}``, each in [0, `tol`].
    mutant
        Dual value of a plausible wrong dual; its gap must exceed ten times `tol`.

    Raises
    ------
    ClaimError
        If the gap or a residual exceeds `tol`, or the mutant's gap does not exceed ``10 * tol``.
    """
    _check_call(item, certificate, ("primal", "dual"), wrong="mutant")
    _check_tol(item, tol)
    residuals = {"duality gap": abs(primal - dual) / (1 + abs(primal)), **(kkt or {})}
    for name, value in residuals.items():
        if not 0 <= value <= tol:
            raise ClaimError(f"{_name(item)}: {name} {value:.3e} is not within tol={tol:.0e}")
    wrong = abs(primal - mutant) / (1 + abs(primal))
    if not wrong > 10 * tol:
        raise ClaimError(f"{_name(item)}: mutant not rejected, its gap is only {wrong:.3e}")
    worst = float(max(residuals.values()))
    more: dict[str, Any] = {"sides": (primal, dual), "mutant": mutant}
    return _record(item, "certificate", holds_if, statement, worst, float(wrong), **more)


def refuted(
    item: str,
    *,
    grade: str,
    printed: Any,
    actual: Any,
    corrected: Any,
    correction: str,
    same_as: str | None = None,
    relation: str = "<=",
    unit: str = "",
    tol: float = 1e-9,
) -> Claim:
    """Refute a printed claim by a counterexample, on which a corrected statement holds.

    Parameters
    ----------
    item
        Id in the inventory; a sentence without a number needs one, too.
    grade
        "error" for a false statement or proof; "slip" for an index, a sign or a symbol whose
        correct reading is obvious; "copy" for a mistake that may be only in the copy that was read,
        as `correction` must then mention.
    same_as
        The item whose mistake this one repeats or inherits; both count as one mistake.
    printed
        The value or bound of the paper's statement on the counterexample.
    actual
        The true value, computed independently of both statements.
    corrected
        The value or bound of the corrected statement on the same counterexample; it must not be
        refuted. The slack of a bound must be at most ten times the violation, or nearly every
        bound would pass. Entries of an array are instances: one must show the violation, another
        may show that the correction is sharp.
    correction
        The corrected statement, in one line.
    relation
        "<=" if the paper claims ``actual <= printed``, "==" if it claims equality.
    unit
        The unit of the violation, such as "nats" or "bytes"; empty for dimensionless numbers.
    tol
        Largest error of the corrected statement. The violation must exceed ten times that.

    Raises
    ------
    ClaimError
        If the printed statement is not refuted, or the corrected one is, or its slack is too large.
    ValueError
        If `item`, `relation` or `grade` is unknown, or `correction` is empty.
    """
    if grade not in GRADES:
        raise ValueError(f"grade is {grade!r}; expected one of {', '.join(GRADES)}")
    if item is None:
        raise ValueError("item is None; expected an id of the inventory")
    if same_as is not None:
        _check_item(same_as)
    if relation not in ("<=", "=="):
        raise ValueError(f"relation is {relation!r}; expected '<=' or '=='")
    if not correction.strip():
        raise ValueError("correction is empty; expected the corrected statement")
    _check_call(item, refuted, ("actual", "corrected"))
    _check_tol(item, tol)
    _check_distinct(item, actual=actual, corrected=corrected)
    measure = _difference if relation == "==" else lambda **sides: -_slack(**sides)
    violation = measure(actual=actual, printed=printed)
    remaining = measure(actual=actual, corrected=corrected)
    if not violation > 10 * tol:
        raise ClaimError(
            f"{_name(item)}: not refuted, violation {violation:.3e} <= 10 tol, tol={tol:.0e}"
        )
    if not remaining <= tol:
        raise ClaimError(f"{_name(item)}: the correction fails too, by {remaining:.3e}")
    if not -remaining <= MAX_SLACK * violation:
        raise ClaimError(
            f"{_name(item)}: the correction has slack {-remaining:.3g}, and the printed bound is "
            f"violated by {violation:.3g}; choose an instance on which it is tighter"
        )
    more: dict[str, Any] = {"sides": (printed, actual, corrected)}
    more |= {"grade": grade, "same_as": same_as, "unit": unit}
    return _record(item, "refuted", None, correction, violation, remaining, **more)


def definition(item: str | None, statement: str, **shapes: tuple[Any, tuple[int, ...]]) -> Claim:
    """Record a definition, of which only shapes can be checked.

    Parameters
    ----------
    item
        As in `identity`.
    statement
        What is defined, in one line.
    **shapes
        ``name=(array, expected_shape)``; at least one.

    Raises
    ------
    ClaimError
        If an array has another shape, or the item's role is not "definition".
    ValueError
        If there is no shape.
    """
    if item is not None and inventory().get(item, {}).get("role") not in (None, "definition"):
        raise ClaimError(f"{item} states more than shapes: its role is not 'definition'")
    if not shapes:
        raise ValueError("shapes is empty; expected at least one name=(array, shape)")
    for name in shapes:
        _check_call(item, definition, (name,))
    for name, (array, shape) in shapes.items():
        if tuple(np.shape(array)) != tuple(shape):
            raise ClaimError(
                f"{_name(item)}: {name} has shape {np.shape(array)}; expected {tuple(shape)}"
            )
    sides = tuple(array for array, _ in shapes.values())
    return _record(item, "definition", None, statement, 0.0, None, sides=sides)


def measured(
    statement: str,
    arm: Any,
    beside: Any,
    *,
    predicted: str,
    unit: str,
    paired: bool = False,
    comparisons: int = 1,
    outcome: str | None = None,
) -> Claim:
    """Compare a prediction with training runs: evidence, not a proof, and displayed as such.

    The 95 % interval is that of `derived_book.intervals.difference`. The outcome is "as predicted"
    if it lies on the predicted side of zero, "against the prediction" if on the other, and "open"
    if it contains zero.

    Parameters
    ----------
    statement
        The prediction, in one line.
    arm, beside
        A metric of the runs of two arms, one number for each seed.
    predicted
        ">" if `arm` was predicted above `beside`, "<" if below.
    unit
        Of the metric, such as "points" or "bits per byte".
    paired
        Whether the runs of both arms share seeds, in the same order.
    comparisons
        Number of comparisons in the same table, for which the interval is corrected.
    outcome
        The outcome that the page's text states, one of ``OUTCOMES``.

    Raises
    ------
    ClaimError
        If the outcome of the runs is not `outcome`.
    ValueError
        If an arm has fewer than two runs, paired arms differ in length, a value is not finite,
        `predicted` or `outcome` is unknown, or `unit` is empty.
    """
    if predicted not in ("<", ">"):
        raise ValueError(f"predicted is {predicted!r}; expected '<' or '>'")
    if not unit.strip():
        raise ValueError("unit is empty; expected the unit of the metric")
    if outcome is not None and outcome not in OUTCOMES:
        raise ValueError(f"outcome is {outcome!r}; expected one of {', '.join(OUTCOMES)}")
    arms = _float(arm, "arm").ravel(), _float(beside, "beside").ravel()
    mean, half = difference(*arms, comparisons=comparisons, paired=paired, names=("arm", "beside"))
    word = decided(*arms, comparisons=comparisons, paired=paired)
    foreseen = "ahead" if predicted == ">" else "behind"
    result = OUTCOMES[2 if word == "open" else 0 if word == foreseen else 1]
    low, high = mean - half, mean + half
    if outcome not in (None, result):
        raise ClaimError(
            f"the page says {outcome!r}, the runs {result!r}: {mean:+.3g} {unit}, "
            f"interval {low:+.3g} to {high:+.3g}"
        )
    more: dict[str, Any] = {"unit": unit, "interval": (low, high)}
    more["seeds"] = min(map(len, arms))
    return _record(None, "measured", result, statement, mean, None, **more)


def ledger(claims: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Merge executed checks into one verdict per item of the inventory.

    Parameters
    ----------
    claims
        Pairs ``(page, claim)``; a claim is the data that `Claim` stores in a cell's output.

    Returns
    -------
    dict
        id -> ``{"verdict", "grade", "same_as", "statement", "checks": [{"kind", "margin",
        "mutant_margin", "unit", "page"}]}``, in the inventory's order, for the checked items.

    Raises
    ------
    ValueError
        If an id is not in the inventory, a verdict is unknown, a verdict other than "definition"
        has no executed check with a mutant, two items of a source share a check, or an item
        repeats the mistake of an item that has none.
    """
    checks: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    digests: dict[tuple[str, str], tuple[str, str]] = {}
    for page, claim in claims:
        item = claim["item"]
        if item is None:
            continue
        _check_item(item)
        checks.setdefault(item, []).append((page, claim))
        for digest in claim.get("digest", "").split():
            first = digests.setdefault((item.partition(".")[0], digest), (item, page))
            if first[0] != item:
                raise ValueError(
                    f"one check for two items: {first[0]} on {first[1]}, {item} on {page}"
                )
    rows = {item: _merge(item, checks[item]) for item in inventory() if item in checks}
    for item, row in rows.items():
        _root(item, rows)
        if row["same_as"] and rows[row["same_as"]]["verdict"] != "wrong as printed":
            raise ValueError(f"{item} repeats {row['same_as']}, which is not wrong as printed")
    return rows


def _merge(item: str, rows: list[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    for _, claim in rows:
        if claim["verdict"] not in VERDICTS:
            raise ValueError(f"{item}: unknown verdict {claim['verdict']!r}")
        if claim["verdict"] != "definition" and claim["mutant_margin"] is None:
            raise ValueError(f"{item}: verdict {claim['verdict']!r} without an executed check")
        if claim["verdict"] == "wrong as printed" and claim.get("grade") not in GRADES:
            raise ValueError(f"{item}: wrong as printed without a grade")
    verdict = min((claim["verdict"] for _, claim in rows), key=VERDICTS.index)
    wrong = [claim for _, claim in rows if claim["verdict"] == "wrong as printed"]
    roots = {claim.get("same_as") for claim in wrong}
    statements = [c["statement"] for _, c in rows if c["verdict"] == verdict and c["statement"]]
    fields = ("kind", "margin", "mutant_margin", "unit")
    return {
        "verdict": verdict,
        "grade": min((claim["grade"] for claim in wrong), key=GRADES.index, default=None),
        "same_as": roots.pop() if len(roots) == 1 else None,
        "statement": "; ".join(dict.fromkeys(statements)) or inventory()[item]["topic"],
        "checks": [{**{f: claim.get(f) for f in fields}, "page": page} for page, claim in rows],
    }


def _root(item: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Follow `same_as` to the item that has the mistake first; an item without it is its own."""
    seen = [item]
    while other := rows[seen[-1]]["same_as"]:
        if other in seen:
            raise ValueError(f"same_as is circular: {' repeats '.join([*seen, other])}")
        if other not in rows:
            raise ValueError(f"{seen[-1]} repeats {other}, on which no page gives a verdict")
        seen.append(other)
    return seen[-1]


def mistakes(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, list[str]]]:
    """Return the distinct mistakes of a ledger: first item -> (gravest grade, all items)."""
    repeats: dict[str, list[str]] = {}
    for item, row in rows.items():
        if row["grade"]:
            repeats.setdefault(_root(item, rows), []).append(item)
    return {
        root: (min((rows[i]["grade"] for i in items), key=GRADES.index), items)
        for root, items in repeats.items()
    }


def count(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Count the items and the distinct mistakes of a ledger.

    Returns
    -------
    dict
        Items: "all", "numbered", "unnumbered", those of each of ``VERDICTS``, and "testable", the
        numbered ones except definitions. Distinct mistakes: "errors", "slips" and "copies"
        of at least one numbered item, and "unnumbered errors" and so on of the others.
    """
    numbered = [item for item in rows if is_numbered(item)]
    counts = {verdict: sum(r["verdict"] == verdict for r in rows.values()) for verdict in VERDICTS}
    counts |= {"all": len(rows), "numbered": len(numbered), "unnumbered": len(rows) - len(numbered)}
    counts["testable"] = sum(rows[item]["verdict"] != "definition" for item in numbered)
    for grade, plural in zip(GRADES, ("errors", "slips", "copies"), strict=True):
        graded = [items for gravest, items in mistakes(rows).values() if gravest == grade]
        counts[plural] = sum(any(map(is_numbered, items)) for items in graded)
        counts[f"unnumbered {plural}"] = len(graded) - counts[plural]
    return counts


def _record(
    item: str | None,
    kind: str,
    condition: str | None,
    statement: str,
    margin: float,
    mutant_margin: float | None,
    *,
    sides: tuple[Any, ...] = (),
    mutant: Any = None,
    **more: Any,
) -> Claim:
    """Display and return a claim; the `condition` of a measured claim is its outcome.

    Nothing of a claim that is refused here is kept.
    """
    if item is not None:
        _check_item(item)
    if not np.isfinite([margin, mutant_margin or 0.0]).all():
        margins = f"{margin:.2g} and {mutant_margin:.2g}"
        raise ClaimError(f"{_name(item)}: the margins are {margins}; expected finite numbers")
    measured = kind == "measured"
    if condition is not None and not measured:
        if not re.search(r"\w.*[\s<>=≤≥≠|].*\w", condition) or _is_tautology(condition):
            raise ValueError(f"holds_if is {condition!r}; expected a condition")
    special = {"refuted": "wrong as printed", "definition": "definition", "measured": condition}
    verdict = special.get(kind) or ("holds if" if condition else "holds")
    text = " ".join((statement if measured else condition or statement).split())
    more["digest"] = _register(item, kind, sides, mutant)
    claim = Claim(item, kind, verdict, text, margin, mutant_margin, _next_anchor(item), **more)
    if _shell() is None:
        print(claim)
    else:
        from IPython.display import display

        display(claim)
    return claim


def _is_tautology(condition: str) -> bool:
    """Return whether a part of a condition compares an expression with itself, or two numbers."""
    for part in re.split(r"[,;]|\b(?:and|or|if)\b", condition.casefold()):
        sides = ["".join(side.split()) for side in re.split(r"[<>=≤≥]+", part)]
        for one, other in pairwise(sides):
            if one == other or all(re.fullmatch(r"[-+.\de]+", side) for side in (one, other)):
                return True
    return False


def _check_call(
    item: str | None,
    check: Callable,
    sides: tuple[str, ...],
    wrong: str | None = None,
) -> None:
    """Raise ClaimError if the source of the call shows that the check is vacuous."""
    frame, name = sys._getframe(2), _name(item)
    if item is not None and not _in_a_cell(frame):
        raise ClaimError(f"{name}: the check must be called in a cell of the page")
    site = CallSite(check, frame)
    if item is not None and not site.is_plain:
        raise ClaimError(f"{name}: call the check by its name, with its arguments written out")
    if all(site.literal(side) for side in sides):
        raise ClaimError(f"{name}: {' and '.join(sides)} are literals; expected computations")
    if len(sides) == 2 and site.same(*sides):
        raise ClaimError(f"{name}: {sides[0]} and {sides[1]} are the same expression")
    if wrong is not None and site.literal(wrong):
        raise ClaimError(
            f"{name}: the {wrong} is a literal; expected the result of a plausible mistake"
        )


def _in_a_cell(frame: FrameType) -> bool:
    """Return whether a notebook's cell runs `frame`; True outside notebooks."""
    shell = _shell()
    return shell is None or frame.f_globals is shell.user_ns


def _shell() -> Any:
    """Return the notebook's shell, or None outside of notebooks."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return get_ipython()


def _check_distinct(item: str | None, **sides: Any) -> None:
    """Raise ClaimError if both sides are the same array, or equal views of it."""
    (one, a), (other, b) = sides.items()
    if np.shape(a) != np.shape(b) or not np.array_equal(_float(a, one), _float(b, other)):
        return
    arrays = [x for x in map(_numpy, (a, b)) if isinstance(x, np.ndarray)]
    if len(arrays) == 2 and np.may_share_memory(arrays[0], arrays[1]):
        raise ClaimError(f"{_name(item)}: {one} and {other} are the same array")


def _check_magnitude(item: str | None, right: Any, tol: float) -> None:
    """Raise ClaimError if entries are so small, beside 1 or the largest, that any would pass."""
    sizes = np.abs(_float(right, "right"))
    sizes = sizes[sizes > 0]
    if not sizes.size or not np.isfinite(sizes).all():
        return
    largest, typical = float(sizes.max()), float(np.median(sizes))
    passes = tol * max(1.0, largest)
    if passes > 1e-3 * (largest if largest <= 1 else typical):
        raise ClaimError(
            f"{_name(item)}: for entries of size {typical:.0e}, errors of {passes:.0e} would "
            "pass; pass relative=True"
        )


_checked: dict[tuple[str, ...], str] = {}  # a paper and the digest of a check -> the item


def _check_tol(item: str | None, tol: float) -> None:
    if item is not None and not tol <= LARGEST_TOL:
        raise ClaimError(f"{item}: tol is {tol:.0e}; expected at most {LARGEST_TOL:.0e}")


def _register(item: str | None, kind: str, sides: tuple[Any, ...], mutant: Any) -> str:
    """Return the digests of a check; raise ClaimError if another item of the paper has one.

    One is of the sides, to the last bit; the other of sides and mutant, without the last digits.
    There, sides that are tiny beside the mutant count as zero.
    """
    if item is None:
        return ""
    if kind == "identity":
        parts: list[list] = [[str(side) for side in sides]]
    else:
        exact = [_float(side, "") for side in sides]
        arrays = exact if mutant is None else [*exact, _float(mutant, "mutant")]
        parts = [[x.tobytes().hex() for x in exact], _round_arrays(arrays)]
    digests = [hashlib.sha256(repr((kind, p)).encode()).hexdigest()[:16] for p in parts]
    keys = [(item.partition(".")[0], digest) for digest in digests]
    for key in keys:
        if (other := _checked.get(key, item)) != item:
            raise ClaimError(f"{item}: this is the check of {other}; expected one for each item")
    _checked.update(dict.fromkeys(keys, item))
    return " ".join(digests)


def _round_arrays(arrays: list[np.ndarray]) -> list:
    """Return the largest entry, and the shape and a mean of each array, to nine digits."""
    arrays = [np.where(np.isfinite(x), x, 0) for x in arrays]
    largest = max(float(np.abs(x).max()) for x in arrays) or 1.0
    means = [(x.ravel() / largest * np.cos(np.arange(x.size))).mean() for x in arrays]
    shapes = [x.shape for x in arrays]
    return [f"{largest:.9g}", shapes, [complex(np.round(mean, 9) + 0) for mean in means]]


def _check_item(item: str) -> None:
    if item not in inventory():
        raise ValueError(f"item {item!r} is not an id of the inventory; see use_inventory")


def _name(item: str | None) -> str:
    return item or "claim"


def _entries(value: Any, name: str) -> list[sympy.Expr]:
    if isinstance(value, (sympy.MatrixBase, list, tuple)):
        entries = [e for part in value for e in _entries(part, name)]
    else:
        entries = [sympy.sympify(value)]
    if not entries:
        raise ValueError(f"{name} is empty; expected at least one expression")
    return entries


def _is_zero(expression: sympy.Expr) -> bool:
    """Return whether an expression is exactly zero; cheap methods are tried first."""
    for simplify in (lambda e: e, sympy.expand, sympy.simplify):
        if simplify(expression.doit() if hasattr(expression, "doit") else expression) == 0:
            return True
    return False


def _magnitude(expression: sympy.Expr) -> float:
    """Return |expression| at a random value of its free symbols, 0 for an exact zero."""
    if _is_zero(expression):
        return 0.0
    draw = random.Random(0)
    for _ in range(8):
        point = {
            symbol: sympy.Rational(draw.randint(1, 97), draw.randint(101, 197))
            for symbol in sorted(expression.free_symbols, key=str)
        }
        value = abs(sympy.N(expression.doit().subs(point)))
        if value.is_number and value.is_finite and value > 1e-12:
            return float(value)
    raise ClaimError(f"the mutant {expression} is zero at 8 random points")


def _numpy(value: Any) -> Any:
    """Return a tensor as an array that shares its memory where it can; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu().resolve_conj().resolve_neg()
    return (value.double() if value.dtype == torch.bfloat16 else value).numpy()


def _float(value: Any, name: str) -> np.ndarray:
    array = np.asarray(_numpy(value))
    if array.dtype == bool and array.ndim == 0:
        raise ValueError(f"{name} is {array}; expected the numbers that were compared")
    array = array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    if array.size == 0:
        raise ValueError(f"{name} is empty; expected at least one number")
    return array


def _error(left: Any, right: Any, name: str, relative: bool) -> float:
    a, b = _float(left, "left"), _float(right, name)
    if a.shape != b.shape:
        raise ValueError(f"{name} has shape {b.shape}; expected that of left, {a.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("nan")  # no comparison is true: claims and mutants are both refused
    if relative:
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.max(np.where(a == b, 0.0, np.abs(a - b) / np.abs(b))))
    return float(np.max(np.abs(a - b)) / max(1.0, float(np.max(np.abs(b)))))


def _pair(**sides: Any) -> list[np.ndarray]:
    """Return two arguments as arrays that broadcast against each other."""
    (first, second), (a, b) = sides, (_float(side, name) for name, side in sides.items())
    try:
        return list(np.broadcast_arrays(a, b))
    except ValueError as error:
        expected = f"one that broadcasts against {first}, {a.shape}"
        raise ValueError(f"{second} has shape {b.shape}; expected {expected}") from error


def _difference(**sides: Any) -> float:
    a, b = _pair(**sides)
    return float(np.max(np.abs(a - b)))


def _slack(**sides: Any) -> float:
    """Return the least difference by which the first argument stays below the second."""
    a, b = _pair(**sides)
    for name, side in zip(sides, (a, b), strict=True):
        if np.iscomplexobj(side):
            raise ValueError(f"{name} is complex; expected real numbers, which have an order")
    return float(np.min(b - a))


def _holds(**sides: Any) -> bool:
    """Return whether the first argument stays below the second, up to each entry's rounding."""
    a, b = _pair(**sides)
    return bool(((a <= b) | np.isclose(a, b, rtol=1e-12, atol=1e-12)).all())


def to_json(rows: Mapping[str, Any]) -> str:
    """Serialise a ledger, one item a line, without NaN or infinity.

    Raises
    ------
    ValueError
        If a margin is NaN or infinite.
    """
    lines = (f"  {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in rows.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"
