"""Machine checks of the papers' numbered items, each of which proves that it can fail.

A page makes a claim where it derives it. Every function here

1. checks the claim and raises `ClaimError` when it does not hold,
2. checks a *mutant*, a plausible wrong version of it, and raises when that is **not** rejected,
3. refuses a check that shows nothing: with one computation on both sides, made of typed numbers
   alone, with a mutant that was typed or drawn or is a side a little changed, or recorded for
   another item of the same source before,
4. displays one line with both margins, and leaves the result in the cell's output as data, from
   which the book's ledger is made.

`item` is an id of the sources' inventory, such as ``"000.eq24"``, or None for a fact of your own.
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
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import sympy
import torch
from scipy import stats

from derived_attention.page.call_site import CallSite

DATA = "data-claim"  # the attribute that has a claim's data, in the HTML that a cell puts out
VERDICTS = ("wrong as printed", "holds if", "holds", "definition")
GRADES = ("error", "slip", "copy")  # of what is wrong as printed, the gravest first
OUTCOMES = ("as predicted", "against the prediction", "open")  # of what is measured
GENEROUS = 10  # how many times what the wrong bound lacks the right one may have to spare
LARGEST_TOL = 1e-5  # that a check of a source's item may allow
UNNUMBERED = ("text", "table")  # kinds of items that have no number in their source


class ClaimError(AssertionError):
    """A claim that does not hold, a mutant that was not rejected, or a check that shows nothing."""


@dataclass(frozen=True)
class Claim:
    """One executed check: what was claimed, what the machine says, and by how much.

    Attributes
    ----------
    item
        Id in the inventory; None for a fact of this book's own, or a printed one without an id.
    kind
        identity, equal, inequality, certificate, refuted, definition or measured.
    verdict
        One of ``VERDICTS``; of what is measured, one of ``OUTCOMES``.
    statement
        The assumption, the correction, or what was checked, in one line of plain text.
    margin
        Size of the error (or, for an inequality, of the slack) of the claim.
    mutant_margin
        The same quantity for the rejected mutant; None for a definition.
    anchor
        Name of the line on its page, for links from the ledger.
    digest
        Of the check's two sides: two items of a paper cannot have one check.
    grade
        One of ``GRADES``, of what is wrong as printed.
    same_as
        The item whose mistake this one repeats or inherits: both count as one.
    unit
        Of the margins; empty for pure numbers.
    seeds, interval
        Of what is measured: how many runs an arm, and the interval of the difference.
    """

    item: str | None
    kind: str
    verdict: str
    statement: str
    margin: float
    mutant_margin: float | None
    anchor: str
    digest: str = ""
    grade: str | None = None
    same_as: str | None = None
    unit: str = ""
    seeds: int | None = None
    interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        verdict = f"{self.verdict} ({self.grade})" if self.grade else self.verdict
        parts = [verdict, f"{self.kind}, {self._margin}", self._mutant, self.statement]
        return f"{self.item or 'this book'}: " + " · ".join(part for part in parts if part)

    @property
    def _margin(self) -> str:
        # Less than nothing to spare is rounding: what lacks more has raised an error.
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
            how = "to spare" if self.mutant_margin < 0 else "off"  # a bound, or a value
            return f"correction survives, {abs(self.mutant_margin):.2g}{self._unit} {how}"
        return f"mutant rejected at {self.mutant_margin:.2g}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Text for a terminal; HTML for a page, with the data for the ledger."""
        name, _, rest = str(self).partition(": ")
        rest = rest.removeprefix(self.verdict)
        look = "measured" if self.kind == "measured" else self.verdict.replace(" ", "-")
        look += " da-open" if self.verdict == "open" else ""
        data = html.escape(json.dumps(asdict(self)))
        page = (
            f'<div class="da-claim da-{look}" id="{self.anchor}" {DATA}="{data}">'
            f"<code>{name}</code> <strong>{self.verdict}</strong>{html.escape(rest)}</div>"
        )
        return {"text/plain": str(self), "text/html": page}


_anchors: dict[str, int] = {}


def _next_anchor(item: str | None) -> str:
    """Name one line: an item may be checked several times."""
    stem = f"claim-{item or 'book'}"
    _anchors[stem] = _anchors.get(stem, 0) + 1
    return f"{stem}-{_anchors[stem]}"


_inventory_path = Path(str(resources.files("derived_attention"))) / "page" / "inventory.csv"


def use_inventory(path: str | Path) -> None:
    """Take the items from a file of your own: see `inventory`.

    Raises
    ------
    ValueError
        If the file has no columns "id", "kind" and "topic", or an id twice.
    """
    global _inventory_path
    _load(Path(path).resolve())
    _inventory_path = Path(path).resolve()


def inventory() -> dict[str, dict[str, str]]:
    """Return the sources' items: id -> {"kind", "topic", "role"}, in the file's order.

    The file has these as columns. An id is the name of its source, a dot, and the item's own name;
    the kinds "text" and "table" are for items without a number; the role is "definition" where
    there is nothing to check but shapes, and else empty.
    """
    return _load(_inventory_path)


@lru_cache
def _load(path: Path) -> dict[str, dict[str, str]]:
    rows = list(csv.DictReader(path.read_text("utf8").splitlines()))
    fields = ("kind", "topic", "role")
    found = {row.get("id", ""): {f: row.get(f) or "" for f in fields} for row in rows}
    if not rows or len(found) != len(rows) or not all(i and r["topic"] for i, r in found.items()):
        raise ValueError(f"{path} must have columns id, kind and topic, and no id twice")
    return found


def is_numbered(item: str) -> bool:
    """Say whether an item has a number in its source, or stands in its text or a table."""
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
        Assumption the paper leaves out; turns the verdict into "holds if".
    statement
        What was checked, in one line.

    Raises
    ------
    ClaimError
        If an entry of `residual` does not simplify to zero, or the mutant's entries all do.
    """
    _read(item, identity, ("residual",), wrong="mutant")
    for expression in _entries(residual, "residual"):
        if not _is_zero(expression):
            raise ClaimError(f"{_name(item)}: residual {expression} is not zero")
    size = max(_magnitude(expression) for expression in _entries(mutant, "mutant"))
    if size == 0:
        raise ClaimError(f"{_name(item)}: the mutant is zero too, so this check cannot fail")
    digest = _digest(item, "identity", residual, mutant)
    return _record(item, "identity", holds_if, statement, 0.0, size, digest=digest)


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
        Whether each entry's error is relative to that entry, :math:`|l_i - r_i| / |r_i|`: where
        sizes differ, a large entry must not hide an error in a small one.

    Raises
    ------
    ClaimError
        If the error exceeds `tol` or is not a number, or the mutant's does not exceed ``10 * tol``.
    """
    _read(item, equal, ("left", "right"), wrong="mutant")
    _refuse_one_array(item, left=left, right=right)
    _check_tol(item, tol)
    error = _error(left, right, "right", relative)
    if item is not None and not relative:
        _refuse_hidden(item, right, tol)
    wrong = _error(left, mutant, "mutant", relative)
    if not error <= tol:
        raise ClaimError(f"{_name(item)}: error {error:.3e} exceeds tol={tol:.0e}")
    if not wrong > 10 * tol:
        raise ClaimError(f"{_name(item)}: mutant not rejected, its error is only {wrong:.3e}")
    digest = _digest(item, "equal", left, right)
    return _record(item, "equal", holds_if, statement, error, wrong, digest=digest)


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

    Rounding is forgiven up to 1e-12 of the entries' size.

    Parameters
    ----------
    item, holds_if, statement
        As in `identity`.
    smaller, larger
        Arrays that broadcast against each other, in float64.
    mutant
        Sharper version of `larger` that is wrong: some entry of `smaller` must exceed it. No bound
        may have more than ten times as much to spare as the mutant lacks: nearly everything would
        pass so.

    Raises
    ------
    ClaimError
        If an entry exceeds its bound, or none exceeds the mutant's, or the bound has far too much
        to spare.
    """
    _read(item, inequality, ("smaller", "larger"), wrong="mutant")
    _refuse_one_array(item, smaller=smaller, larger=larger)
    slack, wrong = _slack(smaller, larger, "larger"), _slack(smaller, mutant, "mutant")
    if not slack >= -_rounding(smaller, larger):
        raise ClaimError(f"{_name(item)}: the bound is violated by {-slack:.3e}")
    if not wrong < -_rounding(smaller, mutant):
        raise ClaimError(f"{_name(item)}: mutant not rejected, its bound has slack {wrong:.3e}")
    if not slack <= GENEROUS * -wrong:
        raise ClaimError(
            f"{_name(item)}: the bound has {slack:.3g} to spare where the mutant lacks "
            f"{-wrong:.3g}; take an instance on which the bound bites"
        )
    digest = _digest(item, "inequality", smaller, larger)
    return _record(item, "inequality", holds_if, statement, slack, -wrong, digest=digest)


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
    """Claim optimality of a convex problem by a primal and a dual value that meet.

    Parameters
    ----------
    item, holds_if, statement
        As in `identity`.
    primal, dual
        Objective values of a feasible primal and a feasible dual point (minimisation).
    tol
        Largest gap, relative to ``1 + |primal|``, and largest KKT residual allowed.
    kkt
        Named residuals, such as ``{"stationarity": 3e-9}``: all at least zero, all at most `tol`.
    mutant
        Dual value of a plausible wrong dual; its gap must exceed ten times `tol`.

    Raises
    ------
    ClaimError
        If the gap or a residual exceeds `tol`, or the mutant's gap does not exceed ``10 * tol``.
    """
    site = _read(item, certificate, ("primal", "dual"), wrong="mutant")
    if site.typed_entries("kkt"):
        raise ClaimError(f"{_name(item)}: a residual in kkt is a typed number: nothing ran")
    _check_tol(item, tol)
    residuals = {"duality gap": abs(primal - dual) / (1 + abs(primal)), **(kkt or {})}
    for name, value in residuals.items():
        if not 0 <= value <= tol:
            raise ClaimError(f"{_name(item)}: {name} {value:.3e} is not within tol={tol:.0e}")
    wrong = abs(primal - mutant) / (1 + abs(primal))
    if not wrong > 10 * tol:
        raise ClaimError(f"{_name(item)}: mutant not rejected, its gap is only {wrong:.3e}")
    digest = _digest(item, "certificate", primal, dual)
    worst = float(max(residuals.values()))
    return _record(item, "certificate", holds_if, statement, worst, float(wrong), digest=digest)


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
        Id in the inventory. A refuted sentence that has no number gets an id of its own there.
    grade
        "error" when a statement or a proof is false; "slip" for an index, a sign or a symbol whose
        right reading is plain; "copy" for what may be the fault of the copy that was read, which
        `correction` then says.
    same_as
        The item whose mistake this one repeats, or inherits. Both are then counted as one.
    printed
        What the paper's statement gives on the counterexample: a bound or a value.
    actual
        What is true there, computed in a way that knows neither statement.
    corrected
        What the corrected statement gives on the same counterexample. It plays the mutant's part:
        refuting *it* in the same way must fail. A bound may not have ten times as much to spare as
        the printed one lacks: nearly everything would survive so. Entries of an array are
        instances; one has to show the violation, another may show that the correction is sharp.
    correction
        The corrected statement, in one line.
    relation
        "<=" when the paper claims ``actual <= printed``, "==" when it claims equality.
    unit
        What the violation is measured in, such as "nats" or "bytes"; empty for pure numbers.
    tol
        Largest error of the corrected statement. The violation must exceed ten times that.

    Raises
    ------
    ClaimError
        If the printed statement survives, or the corrected one does not or by far too much.
    ValueError
        If `relation` or `grade` is none of those named, or `correction` is empty.
    """
    if grade not in GRADES:
        raise ValueError(f"grade must be one of {', '.join(GRADES)}, got {grade!r}")
    if item is None:
        raise ValueError("item must be an id of the inventory: give what is refuted one, got None")
    if same_as is not None:
        _check_item(same_as)
    if relation not in ("<=", "=="):
        raise ValueError(f"relation must be '<=' or '==', got {relation!r}")
    if not correction.strip():
        raise ValueError("correction must state what holds instead, got an empty string")
    _read(item, refuted, ("actual", "corrected"), wrong="printed", typed=True)
    _check_tol(item, tol)
    _refuse_one_array(item, actual=actual, corrected=corrected)
    measure = (lambda a, b: -_slack(a, b, "printed")) if relation == "<=" else _difference
    violation, survivor = measure(actual, printed), measure(actual, corrected)
    if not violation > 10 * tol:
        raise ClaimError(
            f"{_name(item)}: not refuted, violation {violation:.3e} <= 10 tol, tol={tol:.0e}"
        )
    if not survivor <= tol:
        raise ClaimError(f"{_name(item)}: the correction fails too, by {survivor:.3e}")
    if not -survivor <= GENEROUS * violation:
        raise ClaimError(
            f"{_name(item)}: the correction has {-survivor:.3g} to spare where the printed bound "
            f"lacks {violation:.3g}; take an instance on which it bites"
        )
    digest = _digest(item, "refuted", printed, actual, corrected)
    more = {"digest": digest, "grade": grade, "same_as": same_as, "unit": unit}
    return _record(item, "refuted", None, correction, violation, survivor, **more)


def definition(item: str | None, statement: str, **shapes: tuple[Any, tuple[int, ...]]) -> Claim:
    """Record a definition; all there is to check are shapes.

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
        If an array has another shape.
    ValueError
        If no shape is given.
    """
    if item is not None and inventory().get(item, {}).get("role") not in (None, "definition"):
        raise ClaimError(f"{item} states more than shapes: its role in the inventory is none")
    if not shapes:
        raise ValueError("definition needs at least one name=(array, shape) to check")
    for name in shapes:
        _read(item, definition, (name,))
    for name, (array, shape) in shapes.items():
        if tuple(np.shape(array)) != tuple(shape):
            raise ClaimError(f"{_name(item)}: {name} has shape {np.shape(array)}, not {shape}")
    digest = _digest(item, "definition", *(array for array, _ in shapes.values()))
    return _record(item, "definition", None, statement, 0.0, None, digest=digest)


def measured(
    statement: str,
    arm: Any,
    beside: Any,
    *,
    predicted: str,
    unit: str,
    paired: bool = False,
    outcome: str | None = None,
) -> Claim:
    """Show what training runs say of a prediction: never a proof, and never green.

    The interval is Student's of the differences by seed when `paired`, Welch's otherwise. It
    decides: wholly on the predicted side is "as predicted", wholly on the other "against the
    prediction", and with zero inside "open".

    Parameters
    ----------
    statement
        What was predicted, in one line.
    arm, beside
        A metric of the runs of one arm and of that beside it, one number a seed.
    predicted
        ">" when `arm` was predicted above `beside`, "<" when below.
    unit
        Of the metric, such as "points" or "bits per byte".
    paired
        Whether the runs of both arms share seeds, in the same order.
    outcome
        What the sentences of the page say, one of ``OUTCOMES``.

    Raises
    ------
    ClaimError
        If the runs say something else than `outcome`.
    ValueError
        If an arm has fewer than two runs, paired arms differ in length, a value is not finite, or
        `predicted`, `unit` or `outcome` is none of those named.
    """
    if predicted not in ("<", ">"):
        raise ValueError(f"predicted must be '<' or '>', got {predicted!r}")
    if not unit.strip():
        raise ValueError("unit must name what the metric is measured in, got an empty string")
    if outcome is not None and outcome not in OUTCOMES:
        raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}, got {outcome!r}")
    a, b = _float(arm, "arm").ravel(), _float(beside, "beside").ravel()
    if min(len(a), len(b)) < 2 or not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError(f"arm and beside need two finite values or more each, got {a} and {b}")
    if paired and len(a) != len(b):
        raise ValueError(f"paired arms need one length, got {len(a)} and {len(b)} runs")
    difference = float(a.mean() - b.mean())
    if paired:
        parts, degrees = np.array([(a - b).var(ddof=1) / len(a)]), len(a) - 1.0
    else:  # Welch and Satterthwaite
        parts = np.array([a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)])
        dividers = parts**2 / [len(a) - 1, len(b) - 1]
        degrees = parts.sum() ** 2 / dividers.sum() if dividers.sum() else 1.0
    half = float(stats.t.ppf(0.975, degrees) * np.sqrt(parts.sum()))
    low, high = difference - half, difference + half
    side = 1 if predicted == ">" else -1
    says = OUTCOMES[2] if low <= 0 <= high else OUTCOMES[0 if side * low > 0 else 1]
    if outcome not in (None, says):
        raise ClaimError(
            f"the page says {outcome!r}, the runs {says!r}: {difference:+.3g} {unit}, "
            f"interval {low:+.3g} to {high:+.3g}"
        )
    more = {"unit": unit, "seeds": min(len(a), len(b)), "interval": (low, high)}
    return _record(None, "measured", says, statement, difference, None, **more)


def ledger(claims: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Merge executed checks into one verdict per item of the inventory.

    Parameters
    ----------
    claims
        Pairs ``(page, claim)``, the claim as the data that `Claim` leaves in a cell's output.

    Returns
    -------
    dict
        id -> ``{"verdict", "grade", "same_as", "statement", "checks": [{"kind", "margin",
        "mutant_margin", "unit", "page"}]}``, in the inventory's order; only items that have been
        reached. An item with `same_as` repeats another's mistake: see `count`.

    Raises
    ------
    ValueError
        For an id that is not in the inventory, an unknown verdict, a verdict other than
        "definition" that no executed check with a mutant supports, one check for two items of a
        source, or an item that repeats the mistake of one that has none.
    """
    found: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    digests: dict[tuple[str, str], tuple[str, str]] = {}
    for page, claim in claims:
        item = claim["item"]
        if item is None:
            continue
        _check_item(item)
        found.setdefault(item, []).append((page, claim))
        if digest := claim.get("digest"):
            first = digests.setdefault((item.partition(".")[0], digest), (item, page))
            if first[0] != item:
                raise ValueError(
                    f"one check for two items: {first[0]} on {first[1]}, {item} on {page}"
                )
    rows = {item: _merge(item, found[item]) for item in inventory() if item in found}
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
    telling = [c["statement"] for _, c in rows if c["verdict"] == verdict and c["statement"]]
    fields = ("kind", "margin", "mutant_margin", "unit")
    return {
        "verdict": verdict,
        "grade": min((claim["grade"] for claim in wrong), key=GRADES.index, default=None),
        "same_as": roots.pop() if len(roots) == 1 else None,
        "statement": "; ".join(dict.fromkeys(telling)) or inventory()[item]["topic"],
        "checks": [{**{f: claim.get(f) for f in fields}, "page": page} for page, claim in rows],
    }


def _root(item: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the item whose mistake this one has in the end: itself, if it is nobody else's."""
    seen = [item]
    while other := rows[seen[-1]]["same_as"]:
        if other in seen:
            raise ValueError(f"{' repeats '.join([*seen, other])}: whose mistake is it?")
        if other not in rows:
            raise ValueError(f"{seen[-1]} repeats {other}, on which no page gives a verdict")
        seen.append(other)
    return seen[-1]


def mistakes(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, list[str]]]:
    """Return each distinct mistake of a ledger: the item that has it first -> its grade, items.

    The grade is the gravest of the items that repeat it.
    """
    found: dict[str, list[str]] = {}
    for item, row in rows.items():
        if row["grade"]:
            found.setdefault(_root(item, rows), []).append(item)
    gravest = lambda items: min((rows[i]["grade"] for i in items), key=GRADES.index)  # noqa: E731
    return {root: (gravest(items), items) for root, items in found.items()}


def count(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Count what a ledger says.

    Returns
    -------
    dict
        Items: "all", "numbered", "unnumbered", those of each of ``VERDICTS``, and "testable", the
        numbered ones that are no definitions. Distinct mistakes, each once however many items
        repeat it: "errors", "slips" and "copies" are those of at least one numbered item,
        "unnumbered errors" and so on the others.
    """
    numbered = [item for item in rows if is_numbered(item)]
    found = {verdict: sum(r["verdict"] == verdict for r in rows.values()) for verdict in VERDICTS}
    found |= {"all": len(rows), "numbered": len(numbered), "unnumbered": len(rows) - len(numbered)}
    found["testable"] = sum(rows[item]["verdict"] != "definition" for item in numbered)
    for grade, plural in zip(GRADES, ("errors", "slips", "copies"), strict=True):
        items = [items for of, items in mistakes(rows).values() if of == grade]
        found[plural] = sum(any(map(is_numbered, those)) for those in items)
        found[f"unnumbered {plural}"] = len(items) - found[plural]
    return found


def _record(
    item: str | None,
    kind: str,
    told: str | None,
    statement: str,
    margin: float,
    mutant_margin: float | None,
    **more: Any,
) -> Claim:
    """Show and return a claim; `told` is a condition, or of what is measured the outcome."""
    if item is not None:
        _check_item(item)
    if told is not None and kind != "measured" and not re.search(r"\w.*[\s<>=≤≥≠|].*\w", told):
        raise ValueError(f"holds_if must state a condition, got {told!r}")
    special = {"refuted": "wrong as printed", "definition": "definition", "measured": told}
    verdict = special.get(kind) or ("holds if" if told else "holds")
    text = " ".join((statement if kind == "measured" else told or statement).split())
    claim = Claim(item, kind, verdict, text, margin, mutant_margin, _next_anchor(item), **more)
    _display(claim)
    return claim


def _read(
    item: str | None,
    check: Callable,
    sides: tuple[str, ...],
    wrong: str | None = None,
    typed: bool = False,
) -> CallSite:
    """Refuse what the text of the call of a check shows; `typed`, whether `wrong` may be so."""
    frame, name = sys._getframe(2), _name(item)
    if item is not None and not _in_a_cell(frame):
        raise ClaimError(f"{name}: call this in a cell of the page, which shows what is checked")
    site = CallSite(check, frame)
    if item is not None and not site.is_plain:
        raise ClaimError(f"{name}: call the check by its name, and write its arguments out")
    if site.arguments and all(site.literal(side) for side in sides):
        raise ClaimError(f"{name}: {' and '.join(sides)} made of typed numbers: nothing ran")
    for side in sides:
        if site.cancels(side):
            raise ClaimError(f"{name}: {side} has an expression minus itself, or over itself")
    if "smaller" in sides and site.exceeds("larger", "smaller"):
        raise ClaimError(f"{name}: larger exceeds smaller whatever that is")
    if len(sides) == 2:
        if site.same(*sides):
            raise ClaimError(f"{name}: {sides[0]} and {sides[1]} are one expression")
        if site.nudged(sides[1], sides[0], whole=False) or site.nudged(*sides, whole=False):
            raise ClaimError(f"{name}: {sides[1]} is {sides[0]} a little changed")
    if wrong is None:
        return site
    if site.by_chance(wrong, *sides):
        raise ClaimError(f"{name}: the {wrong} is a random number; say what mistake gives it")
    if not typed:
        if site.literal(wrong):
            raise ClaimError(f"{name}: the {wrong} is a typed number; say what mistake gives it")
        for side in sides:
            if site.nudged(wrong, side, whole=side != "smaller"):
                raise ClaimError(f"{name}: the {wrong} is {side} a little changed: no mistake")
    return site


def _in_a_cell(frame: FrameType) -> bool:
    """Say whether a notebook's cell runs this; outside of notebooks nothing gets into a ledger."""
    shell = _shell()
    return shell is None or frame.f_globals is shell.user_ns


def _shell() -> Any:
    """Return the notebook's shell, or None outside of notebooks."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return get_ipython()


def _refuse_one_array(item: str | None, **sides: Any) -> None:
    """Refuse one array, or views of one, on both sides."""
    (one, a), (other, b) = sides.items()
    numbers: list[Any] = [
        x.detach().cpu().resolve_conj().resolve_neg().numpy() if isinstance(x, torch.Tensor) else x
        for x in (a, b)
    ]
    arrays = all(isinstance(x, np.ndarray) for x in numbers)
    if arrays and np.may_share_memory(*numbers) and np.array_equal(*numbers):
        raise ClaimError(f"{_name(item)}: {one} and {other} are one array")


def _refuse_hidden(item: str | None, right: Any, tol: float) -> None:
    """Refuse entries so small, beside 1 or the largest of them, that any value would pass."""
    sizes = np.abs(_float(right, "right"))
    sizes = sizes[sizes > 0]
    if not sizes.size or not np.isfinite(sizes).all():
        return
    largest, typical = float(sizes.max()), float(np.median(sizes))
    passes = tol * max(1.0, largest)
    if passes > 1e-3 * (largest if largest <= 1 else typical):
        raise ClaimError(
            f"{_name(item)}: entries of size {typical:.0e}, where an error of {passes:.0e} would "
            "pass: say relative=True"
        )


_checked: dict[tuple[str, ...], str] = {}  # a paper and the digest of a check -> the item


def _check_tol(item: str | None, tol: float) -> None:
    if item is not None and not tol <= LARGEST_TOL:
        raise ClaimError(f"{item}: tol is {tol:.0e}; an item's is at most {LARGEST_TOL:.0e}")


def _digest(item: str | None, kind: str, *sides: Any) -> str:
    """Return a check's digest; refuse one that another item of the paper has already."""
    if item is None:
        return ""
    texts = [str(x) if kind == "identity" else _float(x, "").tobytes().hex() for x in sides]
    digest = hashlib.sha256(repr((kind, texts)).encode()).hexdigest()[:16]
    other = _checked.setdefault((item.partition(".")[0], digest), item)
    if other != item:
        raise ClaimError(f"{item}: this is the check that {other} has; each item needs its own")
    return digest


def _display(claim: Claim) -> None:
    """Print in a terminal; in a notebook, show the line and leave the data in the output."""
    if _shell() is None:
        print(claim)
    else:
        from IPython.display import display

        display(claim)


def _check_item(item: str) -> None:
    if item not in inventory():
        raise ValueError(f"item {item!r} is not an id of the inventory: see use_inventory")


def _name(item: str | None) -> str:
    return item or "claim"


def _entries(value: Any, name: str) -> list[sympy.Expr]:
    if isinstance(value, (sympy.MatrixBase, list, tuple)):
        entries = [e for part in value for e in _entries(part, name)]
    else:
        entries = [sympy.sympify(value)]
    if not entries:
        raise ValueError(f"{name} must hold at least one expression, got none")
    return entries


def _is_zero(expression: sympy.Expr) -> bool:
    """Decide exact zero symbolically, cheapest method first."""
    for simplify in (lambda e: e, sympy.expand, sympy.simplify):
        if simplify(expression.doit() if hasattr(expression, "doit") else expression) == 0:
            return True
    return False


def _magnitude(expression: sympy.Expr) -> float:
    """Return |expression| at a random point of its free symbols, 0 for an exact zero."""
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
    raise ClaimError(f"the mutant {expression} vanishes wherever it was evaluated")


def _float(value: Any, name: str) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().resolve_conj().resolve_neg()
        value = (value.to(torch.complex128) if value.is_complex() else value.double()).numpy()
    array = np.asarray(value)
    if array.dtype == bool and array.ndim == 0:
        raise ValueError(f"{name} is a yes or no: give the numbers that were compared")
    array = array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    if array.size == 0:
        raise ValueError(f"{name} must not be empty: nothing would be checked")
    return array


def _error(left: Any, right: Any, name: str, relative: bool) -> float:
    a, b = _float(left, "left"), _float(right, name)
    if a.shape != b.shape:
        raise ValueError(f"{name} has shape {b.shape}, expected that of left, {a.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("nan")  # neither a claim nor a mutant: both are refused
    if relative:
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.max(np.where(a == b, 0.0, np.abs(a - b) / np.abs(b))))
    return float(np.max(np.abs(a - b)) / max(1.0, float(np.max(np.abs(b)))))


def _difference(actual: Any, claimed: Any) -> float:
    a, b = np.broadcast_arrays(_float(actual, "actual"), _float(claimed, "printed"))
    return float(np.max(np.abs(a - b)))


def _slack(smaller: Any, larger: Any, name: str) -> float:
    a, b = _float(smaller, "smaller"), _float(larger, name)
    if np.iscomplexobj(a) or np.iscomplexobj(b):
        raise ValueError(f"smaller and {name} must be real to be compared, got complex numbers")
    return float(np.min(b - a))


def _rounding(smaller: Any, larger: Any) -> float:
    size = np.max(np.abs(_float(larger, "larger"))) + np.max(np.abs(_float(smaller, "smaller")))
    return float(1e-12 * max(1.0, size))


def to_json(rows: Mapping[str, Any]) -> str:
    """Serialise a ledger, one item a line, without NaN or infinity.

    Raises
    ------
    ValueError
        If a margin is NaN or infinite.
    """
    lines = (f"  {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in rows.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"
