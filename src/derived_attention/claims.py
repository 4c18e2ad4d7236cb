"""Machine checks of the papers' numbered items, each of which proves that it can fail.

A page makes a claim where it derives it. Every function here

1. checks the claim and raises `ClaimError` when it does not hold,
2. checks a *mutant*, a plausible wrong version of it, and raises when that is **not** rejected,
3. refuses a check that shows nothing: with one computation on both sides, made of typed numbers
   alone, with a mutant that is a typed number or the right side a little changed, or recorded for
   another item of the same paper before,
4. displays one line with both margins, and leaves the result in the cell's output as data, from
   which the book's ledger is made.

`item` is an id of the papers' inventory, such as ``"000.eq24"``, or None for a fact of our own.
"""

from __future__ import annotations

import csv
import hashlib
import html
import json
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np
import sympy

from derived_attention.call_site import CallSite

OUTPUT_KEY = "derived_attention_claim"  # in the metadata of a notebook output
VERDICTS = ("wrong as printed", "holds if", "holds", "definition")
GENEROUS = 10  # how many times the refutation's margin a correction may have to spare


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
        identity, equal, inequality, certificate, refuted or definition.
    verdict
        One of ``VERDICTS``.
    statement
        The assumption, the correction, or what was checked, in one line of plain text.
    margin
        Size of the error (or, for an inequality, of the slack) of the claim.
    mutant_margin
        The same quantity for the rejected mutant; None for a definition.
    anchor
        Name of the line on its page, for links from the ledger.
    """

    item: str | None
    kind: str
    verdict: str
    statement: str
    margin: float
    mutant_margin: float | None
    anchor: str

    def __str__(self) -> str:
        parts = [self.verdict, f"{self.kind}, {self._margin}", self._mutant, self.statement]
        # What is refuted without an id is a sentence of the paper that has no number.
        name = self.item or ("unnumbered" if self.kind == "refuted" else "this book")
        return f"{name}: " + " · ".join(part for part in parts if part)

    @property
    def _margin(self) -> str:
        # Less than nothing to spare is rounding: what lacks more has raised an error.
        slack = f"slack {self.margin:.2g}" if self.margin > 0 else "tight, up to rounding"
        words = {
            "identity": "zero exactly",
            "equal": f"error {self.margin:.1e}",
            "inequality": slack,
            "certificate": f"gap and KKT residuals {self.margin:.1e}",
            "refuted": f"violated by {self.margin:.3g}",
            "definition": "shapes checked",
        }
        return words[self.kind]

    @property
    def _mutant(self) -> str:
        if self.mutant_margin is None:
            return ""
        if self.kind == "refuted":
            how = "to spare" if self.mutant_margin < 0 else "off"  # a bound, or a value
            return f"correction survives, {abs(self.mutant_margin):.2g} {how}"
        return f"mutant rejected at {self.mutant_margin:.2g}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        """Text for a terminal, HTML for a page and, as metadata, data for the ledger."""
        name, _, rest = str(self).partition(": ")
        rest = rest.removeprefix(self.verdict)
        page = (
            f'<div class="da-claim da-{self.verdict.replace(" ", "-")}" id="{self.anchor}">'
            f"<code>{name}</code> <strong>{self.verdict}</strong>{html.escape(rest)}</div>"
        )
        return {"text/plain": str(self), "text/html": page}, {OUTPUT_KEY: asdict(self)}


_anchors: dict[str, int] = {}


def _next_anchor(item: str | None) -> str:
    """Name one line: an item may be checked several times."""
    stem = f"claim-{item or 'book'}"
    _anchors[stem] = _anchors.get(stem, 0) + 1
    return f"{stem}-{_anchors[stem]}"


@lru_cache
def inventory() -> dict[str, dict[str, str]]:
    """Return the papers' numbered items: id -> {"kind", "topic"}, in the papers' order."""
    text = resources.files("derived_attention").joinpath("inventory.csv").read_text("utf8")
    rows = csv.DictReader(text.splitlines())
    return {row["id"]: {"kind": row["kind"], "topic": row["topic"]} for row in rows}


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
    _read(item, identity, ("residual", "mutant"))
    for expression in _entries(residual, "residual"):
        if not _is_zero(expression):
            raise ClaimError(f"{_name(item)}: residual {expression} is not zero")
    size = max(_magnitude(expression) for expression in _entries(mutant, "mutant"))
    if size == 0:
        raise ClaimError(f"{_name(item)}: the mutant is zero too, so this check cannot fail")
    _remember(item, "identity", residual, mutant)
    return _record(item, "identity", holds_if, statement, 0.0, size)


def equal(
    item: str | None,
    left: Any,
    right: Any,
    *,
    tol: float = 1e-12,
    mutant: Any,
    holds_if: str | None = None,
    statement: str = "",
) -> Claim:
    r"""Claim that arrays agree: :math:`\max |l - r| / \max(1, \max|r|) \le` `tol`.

    Parameters
    ----------
    item, holds_if, statement
        As in `identity`.
    left, right
        Arrays, tensors or numbers of one shape; compared in float64.
    tol
        Largest error allowed.
    mutant
        Wrong version of `right`; its error must exceed ten times `tol`.

    Raises
    ------
    ClaimError
        If the error exceeds `tol` or is not a number, or the mutant's does not exceed ``10 * tol``.
    """
    _read(item, equal, ("left", "right"), wrong="mutant")
    _refuse_one_array(item, left=left, right=right)
    error, wrong = _error(left, right, "right"), _error(left, mutant, "mutant")
    if not error <= tol:
        raise ClaimError(f"{_name(item)}: error {error:.3e} exceeds tol={tol:.0e}")
    if not wrong > 10 * tol:
        raise ClaimError(f"{_name(item)}: mutant not rejected, its error is only {wrong:.3e}")
    _remember(item, "equal", left, right, mutant)
    return _record(item, "equal", holds_if, statement, error, wrong)


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
        Sharper version of `larger` that is wrong: some entry of `smaller` must exceed it.

    Raises
    ------
    ClaimError
        If an entry exceeds its bound, or none exceeds the mutant's.
    """
    _read(item, inequality, ("smaller", "larger"), wrong="mutant")
    _refuse_one_array(item, smaller=smaller, larger=larger)
    slack, wrong = _slack(smaller, larger, "larger"), _slack(smaller, mutant, "mutant")
    if not slack >= -_rounding(smaller, larger):
        raise ClaimError(f"{_name(item)}: the bound is violated by {-slack:.3e}")
    if not wrong < -_rounding(smaller, mutant):
        raise ClaimError(f"{_name(item)}: mutant not rejected, its bound has slack {wrong:.3e}")
    _remember(item, "inequality", smaller, larger, mutant)
    return _record(item, "inequality", holds_if, statement, slack, -wrong)


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
    _read(item, certificate, ("primal", "dual"), wrong="mutant")
    residuals = {"duality gap": abs(primal - dual) / (1 + abs(primal)), **(kkt or {})}
    for name, value in residuals.items():
        if not 0 <= value <= tol:
            raise ClaimError(f"{_name(item)}: {name} {value:.3e} is not within tol={tol:.0e}")
    wrong = abs(primal - mutant) / (1 + abs(primal))
    if not wrong > 10 * tol:
        raise ClaimError(f"{_name(item)}: mutant not rejected, its gap is only {wrong:.3e}")
    _remember(item, "certificate", primal, dual, mutant)
    worst = float(max(residuals.values()))
    return _record(item, "certificate", holds_if, statement, worst, float(wrong))


def refuted(
    item: str | None,
    *,
    printed: Any,
    actual: Any,
    corrected: Any,
    correction: str,
    relation: str = "<=",
    tol: float = 1e-9,
) -> Claim:
    """Refute a printed claim by a counterexample, on which a corrected statement holds.

    Parameters
    ----------
    item
        As in `identity`.
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
    tol
        Largest error of the corrected statement. The violation must exceed ten times that.

    Raises
    ------
    ClaimError
        If the printed statement survives, or the corrected one does not or by far too much.
    ValueError
        If `relation` is not one of the two, or `correction` is empty.
    """
    if relation not in ("<=", "=="):
        raise ValueError(f"relation must be '<=' or '==', got {relation!r}")
    if not correction.strip():
        raise ValueError("correction must state what holds instead, got an empty string")
    _read(item, refuted, ("actual", "corrected"))
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
    _remember(item, "refuted", printed, actual, corrected)
    return _record(item, "refuted", None, correction, violation, survivor)


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
    if not shapes:
        raise ValueError("definition needs at least one name=(array, shape) to check")
    for name in shapes:
        _read(item, definition, (name,))
    for name, (array, shape) in shapes.items():
        if tuple(np.shape(array)) != tuple(shape):
            raise ClaimError(f"{_name(item)}: {name} has shape {np.shape(array)}, not {shape}")
    _remember(item, "definition", *(array for array, _ in shapes.values()))
    return _record(item, "definition", None, statement, 0.0, None)


def ledger(claims: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Merge executed checks into one verdict per item of the inventory.

    Parameters
    ----------
    claims
        Pairs ``(page, claim)``, the claim as the data that `Claim` leaves in a cell's output.

    Returns
    -------
    dict
        id -> ``{"verdict", "statement", "checks": [{"kind", "margin", "mutant_margin", "page"}]}``,
        in the inventory's order; only items that have been reached.

    Raises
    ------
    ValueError
        For an id that is not in the inventory, an unknown verdict, or a verdict other than
        "definition" that no executed check with a mutant supports.
    """
    found: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for page, claim in claims:
        if claim["item"] is not None:
            _check_item(claim["item"])
            found.setdefault(claim["item"], []).append((page, claim))
    return {item: _merge(item, found[item]) for item in inventory() if item in found}


def _merge(item: str, rows: list[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    for _, claim in rows:
        if claim["verdict"] not in VERDICTS:
            raise ValueError(f"{item}: unknown verdict {claim['verdict']!r}")
        if claim["verdict"] != "definition" and claim["mutant_margin"] is None:
            raise ValueError(f"{item}: verdict {claim['verdict']!r} without an executed check")
    verdict = min((claim["verdict"] for _, claim in rows), key=VERDICTS.index)
    telling = [c["statement"] for _, c in rows if c["verdict"] == verdict and c["statement"]]
    fields = ("kind", "margin", "mutant_margin")
    return {
        "verdict": verdict,
        "statement": "; ".join(dict.fromkeys(telling)) or inventory()[item]["topic"],
        "checks": [{**{f: claim[f] for f in fields}, "page": page} for page, claim in rows],
    }


def _record(
    item: str | None,
    kind: str,
    holds_if: str | None,
    statement: str,
    margin: float,
    mutant_margin: float | None,
) -> Claim:
    if item is not None:
        _check_item(item)
    special = {"refuted": "wrong as printed", "definition": "definition"}
    verdict = special.get(kind, "holds if" if holds_if else "holds")
    text = " ".join((holds_if or statement).split())
    claim = Claim(item, kind, verdict, text, margin, mutant_margin, _next_anchor(item))
    _display(claim)
    return claim


def _read(
    item: str | None, check: Callable, sides: tuple[str, ...], wrong: str | None = None
) -> None:
    """Refuse what the text of the call of a check shows: see the head of this module."""
    site = CallSite(check, sys._getframe(2))
    if site.arguments and all(site.literal(name) for name in sides):
        raise ClaimError(f"{_name(item)}: {' and '.join(sides)} are typed numbers: nothing ran")
    if len(sides) == 2 and site.same(*sides):
        raise ClaimError(f"{_name(item)}: {sides[0]} and {sides[1]} are one expression")
    if wrong is not None and site.literal(wrong):
        raise ClaimError(f"{_name(item)}: the {wrong} is a typed number; say what mistake gives it")
    if wrong is not None and site.nudged(wrong, sides[1]):
        raise ClaimError(f"{_name(item)}: the {wrong} is {sides[1]} a little changed: no mistake")


def _refuse_one_array(item: str | None, **sides: Any) -> None:
    """Refuse one array, or views of one, on both sides."""
    (one, a), (other, b) = sides.items()
    numbers = [x.detach().cpu().numpy() if hasattr(x, "detach") else x for x in (a, b)]
    arrays = all(isinstance(x, np.ndarray) for x in numbers)
    if arrays and np.may_share_memory(*numbers) and np.array_equal(*numbers):
        raise ClaimError(f"{_name(item)}: {one} and {other} are one array")


_checked: dict[tuple[str, ...], str] = {}  # a paper and the digest of a check -> the item


def _remember(item: str | None, kind: str, *sides: Any) -> None:
    """Refuse a check that another item of the paper has already: it cannot settle both."""
    if item is None:
        return
    texts = [str(x) if kind == "identity" else _float(x, "").tobytes().hex() for x in sides]
    digest = hashlib.sha256(repr((kind, texts)).encode()).hexdigest()
    other = _checked.setdefault((item.partition(".")[0], digest), item)
    if other != item:
        raise ClaimError(f"{item}: this is the check that {other} has; each item needs its own")


def _display(claim: Claim) -> None:
    """Print in a terminal; in a notebook, show the line and leave the data in the output."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        get_ipython = lambda: None  # noqa: E731
    if get_ipython() is None:
        print(claim)
    else:
        display(claim)


def _check_item(item: str) -> None:
    if item not in inventory():
        raise ValueError(f"item {item!r} is not an id of the inventory")


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
    if hasattr(value, "detach"):
        value = value.detach().cpu().double().numpy()
    array = np.asarray(value, dtype=np.float64)
    if array.size == 0:
        raise ValueError(f"{name} must not be empty: nothing would be checked")
    return array


def _error(left: Any, right: Any, name: str) -> float:
    a, b = _float(left, "left"), _float(right, name)
    if a.shape != b.shape:
        raise ValueError(f"{name} has shape {b.shape}, expected that of left, {a.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("nan")  # neither a claim nor a mutant: both are refused
    return float(np.max(np.abs(a - b)) / max(1.0, float(np.max(np.abs(b)))))


def _difference(actual: Any, claimed: Any) -> float:
    a, b = np.broadcast_arrays(_float(actual, "actual"), _float(claimed, "printed"))
    return float(np.max(np.abs(a - b)))


def _slack(smaller: Any, larger: Any, name: str) -> float:
    return float(np.min(_float(larger, name) - _float(smaller, "smaller")))


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
