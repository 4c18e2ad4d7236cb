"""What every mechanism promises, one function per promise, and `check_mechanism`, which tries them.

A promise tries a mechanism on the random inputs of `cases`. Its docstring says what is right; it
returns what it tried and found, and raises an `Outcome` where the mechanism does something else.
The tests hold the registry to the same functions.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from derived_attention.common.checks import Mechanism, check_callable, check_flags
from derived_attention.common.convention import unwrap, weights_of
from derived_attention.common.masks import causal_mask
from derived_attention.registry import Entry, Options, get_attention, plain_keys
from derived_attention.testing.cases import (
    COMMON,
    DTYPES,
    B,
    Called,
    Case,
    D,
    H,
    Held,
    Largest,
    M,
    N,
    Operations,
    Run,
    Subject,
    added,
    boolean,
    keys_of,
    on_copies,
    parameters_of,
    relative_errors,
    tensors,
    variants,
    written_as_numbers,
)

__all__ = ["PROMISES", "Report", "Result", "check_mechanism"]

F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
# Largest error allowed between two ways of computing the same thing in one dtype.
TOLERANCE = {F32: 1e-5, F64: 1e-12, BF16: 5e-2, F16: 5e-3}
PARTS = ["the output", *(f"the gradient of {key}" for key in COMMON[:3])]
PARTS += ["the gradient of an option or mask"] * 9


class Outcome(Exception):
    """Ends a promise with a verdict other than kept, and the reason."""

    def __init__(self, verdict: str, text: str) -> None:
        super().__init__(text)
        self.verdict = verdict


Broken = functools.partial(Outcome, "BROKEN")
Untried = functools.partial(Outcome, "untried")


def must(condition: Any, text: str) -> None:
    """Raise `Broken` unless a condition holds."""
    if not condition:
        raise Broken(text)


class Promise(NamedTuple):
    """A promise: the function that tries it, and what it rests on."""

    check: Callable[[Subject], str]
    argument: str  # that the mechanism has to take
    needs: tuple[str, ...]  # other promises, or "formula"


PROMISES: dict[str, Promise] = {}


def promise(name: str, *needs: str, argument: str = "") -> Callable[[Any], Any]:
    """Enter a function as the promise of that name."""

    def enter(check: Callable[[Subject], str]) -> Callable[[Subject], str]:
        PROMISES[name] = Promise(check, argument, needs)
        return check

    return enter


@dataclass(frozen=True)
class Result:
    """How one promise came out: kept, BROKEN, refused, not taken or untried; and why."""

    promise: str
    verdict: str
    text: str

    def __str__(self) -> str:
        doc = f"\n{'':11}right: {PROMISES[self.promise].check.__doc__}"
        return f"{self.verdict:9}  {self.promise}: {self.text}{doc * (self.verdict == 'BROKEN')}"


@dataclass(frozen=True)
class Report:
    """What `check_mechanism` found: one result per promise."""

    name: str
    results: list[Result]

    @property
    def failed(self) -> list[str]:
        """The promises that are broken."""
        return [x.promise for x in self.results if x.verdict == "BROKEN"]

    @property
    def passed(self) -> bool:
        """Whether no promise is broken."""
        return not self.failed

    def __str__(self) -> str:
        return "\n".join(map(str, [*self.results, repr(self)]))

    def __repr__(self) -> str:
        verdicts = [x.verdict for x in self.results]
        counts = ", ".join(f"{verdicts.count(x)} {x}" for x in dict.fromkeys(verdicts))
        return f"{self.name}: {counts}"


class Worst:
    """The largest error of several comparisons, and where it was."""

    def __init__(self) -> None:
        self.count, self.error, self.where = 0, 0.0, ""

    @torch.no_grad()
    def compare(self, found: Sequence, expected: Sequence, tol: float, where: str) -> None:
        """Compare outputs and gradients: shapes, dtypes, values."""
        for part, a, b in zip(PARTS[: len(expected)], found, expected, strict=True):
            kinds = [f"{x.dtype} {tuple(x.shape)}" for x in (a, b)]
            must(kinds[0] == kinds[1], f"{where}: {part} is {kinds[0]}; expected {kinds[1]}")
            size = float((a - b).abs().max()) if a.numel() else 0
            close = torch.isclose(a, b, rtol=tol, atol=tol).all()
            must(close, f"{where}: {part} is wrong by {size:.2g}; expected at most {tol:g}")
            self.see(size, where)

    def formula(self, case: Case, where: str) -> None:
        """Compare the output and the gradients with those of the formula."""
        self.compare(case.results(), case.results(case.entry.exact), 1e-10, where)

    def see(self, error: float, where: str) -> None:
        """Take one error into account."""
        self.count += 1
        if error >= self.error:
            self.error, self.where = error, where

    def __str__(self) -> str:
        return f"largest error of {self.count} tensors {self.error:.1e} ({self.where})"


def expect_error(subject: Subject, run: Run, name: str, match: str, kind: Any = ValueError) -> str:
    """Return the message of the error that a call has to raise.

    For a mechanism of the registry its kind and words count, for others only that it is a TypeError
    or ValueError that names the argument.
    """
    names = f"{name}|{dict(q='query', k='key', v='value').get(name, name)}"
    match, kind = (
        (match, kind) if subject.registered else (rf"\b({names})\b", (TypeError, ValueError))
    )
    try:
        run()
    except Exception as error:
        must(isinstance(error, kind) and re.search(match, str(error)), f"raises {said(error)}")
        return textwrap.shorten(f"{type(error).__name__}: {error}", 130)
    raise Broken("raises no error")


def said(error: Exception) -> str:
    """Return an error in one line, with the place where it was raised."""
    line = next(iter(str(error).strip().splitlines()), "")
    place = traceback.extract_tb(error.__traceback__)[-1]
    file = place.filename.rpartition("/")[2]
    return f"{type(error).__name__}: {line[:200]} ({file}, line {place.lineno})"


def said_of(options: Iterable[str]) -> str:
    """Return the names of the arguments that are varied."""
    return ", ".join(options) or "no mask"


def need_finite(results: Iterable[Tensor], what: str) -> None:
    """Raise `Broken` where an output or a gradient holds NaN or infinity."""
    for part, x in zip(PARTS, results, strict=False):
        must(x.isfinite().all(), f"{what}: {part} holds NaN or infinity")


# --- the calling convention -----------------------------------------------------------------------


@promise("calling convention")
@torch.no_grad()
def calling_convention(subject: Subject) -> str:
    """Take PyTorch's arguments, the first six also by position, and reject unknown ones."""
    Case(subject).run()
    lacking = [name for name in COMMON[3:] if name not in subject.takes]
    must(not lacking, f"there is no argument {', '.join(lacking)}")
    names = list(parameters_of(subject.fast).values())
    if subject.registered:
        must([p.name for p in names[: len(COMMON)]] == COMMON, f"the arguments are {names}")
        later = all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in names[6:])
        must(later, f"an option after the sixth can be given by position: {names}")
    case, again = (Case(subject, attn_mask=boolean(1, keys_of(subject))) for _ in range(2))
    first = [case.tensors[key] for key in COMMON[:4]]
    same = torch.equal(subject.fast(*first, 0.0, False, **case.further), again.run())
    must(same, "six arguments by position give another output than by name")
    try:
        case.run(no_such_option=1)
    except TypeError:
        return "called by position, by name, and with an option that it does not have"
    raise Broken("no_such_option=1 raises no TypeError")


VIEWS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "length before heads": ("qkv", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "columns first": ("qkv", lambda x: x.mT.contiguous().mT),
    "expanded": ("kv", lambda x: x[:1].expand(x.shape)),
}


@promise("inputs")
def inputs(subject: Subject) -> str:
    """Leave the inputs unchanged, and treat a view as its contiguous copy."""
    worst, keep = Worst(), boolean(B, 1, 1, keys_of(subject))
    masked: list[dict[str, Any]] = [{"attn_mask": added(subject, keep)}] * subject.masked
    for how, (keys, change) in VIEWS.items():
        for options in [{}, *masked]:
            case = Case(subject, **options).with_changed([*keys, "attn_mask"], change)
            copied = case.with_tensors(
                lambda key, x: x.clone(memory_format=torch.contiguous_format)
            )
            with torch.no_grad():  # nothing hinders writing
                case.with_tensors(lambda key, x: x).run()
            unchanged = [torch.equal(case.tensors[key], x) for key, x in copied.tensors.items()]
            results = case.results() if all(unchanged) else ()
            for key, x in copied.tensors.items():
                must(torch.equal(case.tensors[key], x), f"{key} is written to ({how})")
            worst.compare(results, copied.results(), 1e-10, how)
    return f"{worst}; no input written to"


@promise("batch")
@torch.no_grad()
def batch(subject: Subject) -> str:
    """Give each sequence of a batch the result that it has alone."""
    case, worst = Case(subject), Worst()
    for b in range(B):
        alone: dict[str, Any] = {key: case.tensors[key][b : b + 1] for key in COMMON[:3]}
        worst.compare([case.run(**alone)], [case.run()[b : b + 1]], 1e-10, f"sequence {b} alone")
    return str(worst)


# --- the formula ----------------------------------------------------------------------------------

LENGTHS = [(1, 1), (2, 1), (1, M), (M, N), (64, 64), (150, 150), (150, 5), (5, 150), (70, 200)]


def cases(subject: Subject) -> Iterator[tuple[str, Case]]:
    """Yield cases of all shapes, one thing varied at a time."""
    case = functools.partial(Case, subject)
    alike = str(subject.options(N, 4, D)) == str(subject.options(N, 8, D))  # for any heads
    yield "as usual", case()
    for n, m in LENGTHS:
        yield f"{n} queries, {m} keys", case(n=n, m=m, leading=(H,), d=3, dv=2)
    for leading in [(H,), (1,), (1, 16), (B, 1, H), *[()] * alike]:
        yield f"leading dimensions {leading}", case(leading=leading)
    yield from ((f"Dv = {dv}", case(dv=dv)) for dv in (1, D, D + 3))
    yield from ((f"D = {d}", case(d=d)) for d in (1, 7, 128))


@promise("values", "formula")
def values(subject: Subject) -> str:
    """Equal the formula for any shape, in float64 up to 1e-10."""
    worst = Worst()
    with torch.no_grad():
        for what, case in cases(subject):
            worst.compare([case.run()], [case.run("reference")], 1e-10, what)
    return str(worst)


@promise("gradients", "formula")
def gradients(subject: Subject) -> str:
    """Have the formula's gradients of q, k, v and parameters for any shape."""
    worst = Worst()
    for what, case in cases(subject):
        worst.formula(case, what)
    return str(worst)


@promise("scale", "formula", argument="scale")
def scale(subject: Subject) -> str:
    """Use `scale` where the formula does, instead of 1/√D."""
    worst = Worst()
    for number in (0.3, 2, 1e-9):
        worst.formula(Case(subject, scale=number), f"scale {number}")
    return str(worst)


# --- dtypes ---------------------------------------------------------------------------------------


@promise("dtypes")
def dtypes(subject: Subject) -> str:
    """Return the dtype of q, accurate to 4 roundings; gradients and long sequences to 16."""
    worst = Worst()
    # A formula may invert a matrix of as many rows as there are tokens: only fast forms are long.
    lengths = (64,) if subject.fast is subject.reference else (64, 200)
    for dtype, n in itertools.product(DTYPES, lengths):
        case = Case(subject, n=n, m=n, d=16, dtype=dtype)
        results, exact = case.results(), case.double().results(subject.exact)
        pairs = zip(PARTS, results, relative_errors(results, exact), strict=False)
        for i, (part, x, error) in enumerate(pairs):
            must(x.dtype == dtype, f"{part} is {x.dtype} where q is {dtype}")
            error, what = error / torch.finfo(dtype).eps, f"{part} of {n} tokens in {dtype}"
            must(error < (16 if i or n > 64 else 4), f"{what} is wrong by {error:.1f} roundings")
            worst.see(error, what)
    return f"{len(DTYPES)} dtypes, at most {worst.error:.1f} roundings ({worst.where})"


# --- masks ----------------------------------------------------------------------------------------


@promise("masks over keys", argument="attn_mask")
def masks_over_keys(subject: Subject) -> str:
    """Give a masked key no influence, and add the numbers of a floating mask to the scores."""
    m, worst = keys_of(subject), Worst()
    for mask in (boolean(m), added(subject, boolean(m))):
        case = Case(subject, attn_mask=mask)
        moved = case.with_changed("kv", (5.0 * ~boolean(m)[:, None]).add)
        worst.compare([moved.run()], [case.run()], 1e-10, f"{mask.dtype}, other masked keys")
    shapes = [(m,), (1, m), (H, 1, m), (B, 1, 1, m), (B, H, 1, m)]
    masks = [boolean(*shape) for shape in shapes] + [torch.tensor(True), torch.ones(H, 1, 1).bool()]
    for mask in masks + [added(subject, keep) for keep in masks]:
        worst.formula(Case(subject, attn_mask=mask), f"{mask.dtype} {tuple(mask.shape)}")
    for dtype in DTYPES:
        mask = added(subject, boolean(m), dtype)
        results = Case(subject, attn_mask=mask).results()
        exact = Case(subject, attn_mask=mask.detach().double()).results()
        worst.compare(results[:4], exact[:4], 1e-10, f"a mask in {dtype}")
        if mask.requires_grad and subject.differentiable:
            must(results[-1].dtype == dtype, f"a gradient in {results[-1].dtype} for {dtype}")
    return str(worst)


@promise("masks per query", "masks over keys", argument="attn_mask")
def masks_per_query(subject: Subject) -> str:
    """Take masks that differ between queries as the formula does, or refuse attn_mask by name."""
    m, worst = keys_of(subject), Worst()
    keeps = [boolean(N, m), boolean(B, 1, N, m), boolean(B, H, N, m), boolean(1, 1, N, 1)]
    keeps.append(boolean(m, N).mT | (torch.arange(m) == 0))  # as strided as masks come
    for mask in keeps + [added(subject, keep) for keep in keeps]:
        case = Case(subject, attn_mask=mask)
        if subject.any_mask:
            worst.formula(case, f"{mask.dtype} {tuple(mask.shape)}")
        else:
            words = r"attn_mask has shape .*size 1 in place of N"
            error = expect_error(subject, case.run, "attn_mask", words)
    if not subject.any_mask:
        raise Outcome("refused", error)
    case = Case(subject, attn_mask=keeps[0])
    for j in range(1, m, 5):  # without a formula, too
        hidden = (..., ~keeps[0][:, j], slice(None))
        moved = case.with_changed("v", (5.0 * (torch.arange(m) == j)[:, None]).add)
        worst.compare([moved.run()[hidden]], [case.run()[hidden]], 1e-10, f"key {j} masked")
    return str(worst)


@promise("dead rows", "masks over keys", argument="attn_mask")
def dead_rows(subject: Subject) -> str:
    """Return zeros for a query that may attend nothing, with zero gradients and no NaN."""
    m, keep = keys_of(subject), boolean(B, 1, 1, keys_of(subject))
    keep[1] = False
    masks = [keep]
    dead: tuple[Any, ...] = (1,)
    if subject.any_mask:
        keep = boolean(N, m)
        keep[2] = False
        masks, dead = [keep, keep.expand(B, H, N, m)], (..., 2, slice(None))
    masks += [added(subject, mask) for mask in masks]
    in_full = [
        dtype
        for dtype in subject.dtypes
        if not (subject.fast is subject.reference and dtype == F16)
    ]
    for dtype in in_full:  # formulas overflow in float16
        for mask in masks:
            what = f"{dtype}, mask {mask.dtype} {tuple(mask.shape)}"
            results = Case(subject, dtype=dtype, attn_mask=mask).results()
            need_finite(results, what)
            for part, x in zip(PARTS, results[:2], strict=False):
                must(not x[dead].any(), f"{what}: {part} is not 0 in dead rows")
                must(x.any(), f"{what}: {part} is 0 in all rows")
            if mask.requires_grad and subject.differentiable:
                still = not results[-1][mask == -math.inf].any()
                must(still, f"{what}: the gradient of the mask is not 0 where it is -inf")
    nothing = [torch.tensor(False), torch.full((m,), -math.inf), torch.zeros(B, 1, 1, m).bool()]
    for mask in nothing:
        alive = any(bool(x.any()) for x in Case(subject, attn_mask=mask).results())
        must(not alive, f"mask {mask.dtype} {tuple(mask.shape)} of nothing: not all is 0")
    return f"{len(in_full) * len(masks)} masks with dead rows, 3 of nothing else: zeros"


@promise("large negative numbers", "masks over keys", argument="attn_mask")
def large_negative_numbers(subject: Subject) -> str:
    """Treat -1e4 and below in a floating mask as -inf, in every dtype."""
    m, worst, keep = keys_of(subject), Worst(), boolean(B, 1, 1, keys_of(subject))
    keep[1] &= "dead rows" in subject.broken
    for mask in [keep, *[boolean(N, m)] * subject.any_mask]:
        exact = Case(subject, attn_mask=mask).results()
        for numbers in written_as_numbers(mask):
            what = f"{numbers.min():.2g} in {numbers.dtype}"
            worst.compare(Case(subject, attn_mask=numbers).results(), exact, 1e-10, what)
    return str(worst)


@promise("order of keys")
@torch.no_grad()
def order_of_keys(subject: Subject) -> str:
    """Give the same result for keys in any order, unless it is registered as `ordered`."""
    m, worst = keys_of(subject), Worst()
    order = torch.arange(m).roll(m // 2).flip(0)
    for mask in [None, *[boolean(m)] * subject.masked]:
        given: dict[str, Any] = {} if mask is None else {"attn_mask": mask}
        moved: dict[str, Any] = {} if mask is None else {"attn_mask": mask[order]}
        case = Case(subject, **given)
        k, v = (case.tensors[key].detach()[..., order, :] for key in "kv")
        found, expected = case.run(k=k, v=v, **moved), case.run()
        differs = not torch.allclose(found, expected, rtol=1e-9, atol=1e-9)
        if subject.ordered:
            must(differs, "the result is the same, although it is registered as ordered")
        elif differs and not subject.registered:
            raise Untried("the result changes with the order, as that of a window or a recurrence")
        else:
            worst.compare([found], [expected], 1e-10, "keys in another order")
    return "the order matters, as is registered" if subject.ordered else str(worst)


@promise("causality", argument="is_causal")
def causality(subject: Subject) -> str:
    """Let no bit of query i depend on later positions, or refuse is_causal by name."""
    if not subject.causal:
        run = Case(subject, is_causal=True).run
        raise Outcome("refused", expect_error(subject, run, "is_causal", "is_causal is True"))
    case, worst = functools.partial(Case, subject, is_causal=True), Worst()
    for n, m in [(6, 6), (4, 9), (9, 4), (150, 150)]:
        see_no_future(case(n=n, m=m, leading=(1, H), dtype=F32))
    if BF16 in subject.dtypes:
        see_no_future(case(leading=(1, H), dtype=BF16, m=N))
    for n, m in [(N, M), *LENGTHS, (300, 300)]:
        worst.formula(case(n=n, m=m, leading=(H,), d=3, dv=2), f"{n} queries, {m} keys")
    for leading in [(B, H), (B, 1, H)]:
        worst.formula(case(leading=leading), f"leading dimensions {leading}")
    for n, m in [(N, M), (M, N)] * subject.any_mask:
        masked = Case(subject, n=n, m=m, attn_mask=causal_mask(n, m)).results()
        worst.compare(case(n=n, m=m).results(), masked, 1e-10, f"mask of {n} queries, {m} keys")
    return f"5 problems, to the last bit; {worst}"


def see_no_future(case: Case) -> None:
    """Raise `Broken` where the past depends on the future, or the future on nothing."""
    n, m = (case.tensors[key].shape[-2] for key in ("q", "v"))
    out, last = case.run(), min(n, m) - 1
    leaves = [case.tensors[key] for key in COMMON[:3]]
    for t in range(last) if last < 10 else {0, 15, min(64, last - 1), min(127, last - 1)}:
        what = f"{n} queries, {m} keys: what comes after position {t}"
        past, future = (..., slice(t + 1), slice(None)), (..., slice(t + 1, None), slice(None))
        for size in (5, 1e4, 1e7):  # a huge future moves no bit either
            changed = case.with_other_future(t, size).run()
            must(torch.equal(out[past], changed[past]), f"{what} changes the output before")
            must(
                not torch.equal(out[future], changed[future]),
                f"{what} does not change the output there",
            )
        if case.entry.differentiable:
            slopes = torch.autograd.grad(out[past].square().sum(), leaves, retain_graph=True)
            still = not any(bool(x[future].any()) for x in slopes)
            must(still, f"{what} has a gradient from before")


# --- rounding -------------------------------------------------------------------------------------

SPREADS = [(dtype, std) for dtype in (F32, BF16, F16) for std in (1, 4, 12)] + [(F32, 30)]


@promise("spread", "dtypes")
def spread(subject: Subject) -> str:
    """Keep the error near that of rounding q, k and v once, and keep every row."""
    worst = Worst()
    for dtype, std in SPREADS:
        eps = torch.finfo(dtype).eps
        for options in variants(subject, {}):
            generator = torch.Generator().manual_seed(0)  # the same draw, whatever came before
            case = Case(subject, n=64, m=64, leading=(1, H), d=32, dv=32, dtype=dtype, **options)
            case = case.with_changed("qk", functools.partial(operator.mul, std))
            near = case.double().with_tensors(
                functools.partial(rounded, eps=eps, generator=generator)
            )
            exact, results = case.double().results(subject.exact), case.results()
            what = f"{dtype}, q and k of spread {std}{', causal' * bool(options)}"
            need_finite(results, what)
            held = exact[0].abs().amax(-1) >= torch.finfo(dtype).tiny  # smaller ones may round to 0
            must(results[0].any(-1)[held].all(), f"{what}: a row is lost")
            must(not results[0][~exact[0].any(-1)].any(), f"{what}: a row should be 0")
            moved = relative_errors(near.results(subject.exact), exact)
            # In float32 rounding errors of sums are not much less than those of the arguments, and
            # weights near 0 and 1, of which gradients are made, lose most.
            most = [32, 4000, 4000, 4000] if dtype == F32 else [1, 2, 2, 2]
            errors = zip(relative_errors(results, exact), moved, strict=True)
            for part, (error, bound), limit in zip(PARTS, errors, most, strict=False):
                share = error / (eps + bound)
                must(
                    share < limit, f"{what}: {part} has {share:.3g} times the error of one rounding"
                )
                worst.see(share, f"{what}, {part}")
    return f"at most {worst.error:.3g} times the error of one rounding ({worst.where})"


def rounded(key: str, x: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    """Return a tensor as another rounding would have left it."""
    return x * (1 + eps * (torch.rand(x.shape, generator=generator) - 0.5))


@promise("large scores")
def large_scores(subject: Subject) -> str:
    """Give the formula's finite numbers for scores of any size."""
    case = Case(subject, dtype=F32).with_changed("qk", functools.partial(operator.mul, 300))
    need_finite(case.results(), "q and k times 300, float32")
    exact, worst = case.double(), Worst()
    worst.compare([exact.run()], [exact.run(subject.exact)], 1e-8, "q and k times 300")
    return f"finite, and in float64 wrong by at most {worst.error:.1e}"


@promise("autocast", "dtypes")
def autocast(subject: Subject) -> str:
    """Return the dtype of q or bfloat16 under autocast, right to 3 %."""
    worst, mask = Worst(), added(subject, boolean(keys_of(subject)), F32)
    masked: list[dict[str, Any]] = [{"attn_mask": mask}] * subject.masked
    for options in [{}, *masked]:
        case = Case(subject, dtype=F32, **options)
        exact = case.run()
        with torch.autocast("cpu", dtype=BF16):
            for q in (case.tensors["q"], case.tensors["q"].bfloat16()):
                out, what = case.run(q=q), f"q in {q.dtype}{', masked' * bool(options)}"
                must(out.dtype in (q.dtype, BF16), f"{what}: the output is {out.dtype}")
                error = relative_errors([out], [exact])[0]
                must(error < 3e-2, f"{what}: the output is wrong by {error:.1%}")
                slope = torch.autograd.grad(out.sum(), case.tensors["v"])[0]
                must(slope.any(), f"{what}: the gradient of v is 0")
                worst.see(error, what)
    return str(worst)


# --- derivatives and transforms -------------------------------------------------------------------

# What PyTorch says where there is no derivative, and what authors of an autograd.Function say.
LACKING = "not implemented|does not support|must implement the jvp"
LACKING_ELSEWHERE = f"{LACKING}|once_differentiable|setup_context"


@promise("finite differences", "gradients")
def finite_differences(subject: Subject) -> str:
    """Have gradients that agree with finite differences, also for masks."""
    keep = boolean(4 if subject.square else 5)
    keep[1] = False
    options = variants(subject, {"attn_mask": added(subject, keep)}) or [{}]
    for common in options:
        case = Case(subject, n=4, m=len(keep), leading=(H,), d=2, dv=2, **common)
        run = functools.partial(run_with, case, list(case.tensors))
        torch.autograd.gradcheck(run, list(case.tensors.values()), nondet_tol=1e-12)
    case = Case(subject, n=200 if subject.square else 70, m=200, leading=(H,), d=3, dv=2)
    for key, x in case.tensors.items():
        loss, step = loss_of(case, "fast", key), tensors(x.shape, seed=9)[0].detach()
        along = float((torch.autograd.grad(loss(x), x)[0] * step).sum())
        with torch.no_grad():
            rise = float(loss(x + 1e-6 * step) - loss(x - 1e-6 * step)) / 2e-6
        error = abs(along - rise) / max(abs(rise), 1e-4)
        must(error < 1e-3, f"200 keys: the gradient of {key} is wrong by {error:.1%}")
    return f"torch.autograd.gradcheck of {' and '.join(map(said_of, options))}; 200 keys"


def run_with(case: Case, which: Sequence[str], *given: Tensor) -> Tensor:
    """Call a mechanism with other tensors for some arguments."""
    changed: dict[str, Any] = dict(zip(which, given, strict=True))
    return case.run(**changed)


def loss_of(case: Case, form: str, key: str) -> Callable[[Tensor], Tensor]:
    """Return a function of one tensor of a case, not linear in its output."""
    weights = torch.linspace(-1, 1, case.tensors["v"].shape[-1], dtype=F64)
    return lambda x: (weights * case.run(form, **{key: x})).sum(-1).square().sum()


def refused(found: Run, expected: Tensor, worst: Worst, what: str, lacking: str) -> bool:
    """Compare a derivative with the formula's; return whether an error says there is none."""
    try:
        result = found()
    except (RuntimeError, NotImplementedError) as error:
        if not re.search(lacking, str(error)):
            raise
        return True
    worst.compare([result], [expected], 1e-9, what)
    return False


@promise("further derivatives", "formula", "gradients")
def further_derivatives(subject: Subject) -> str:
    """Have the formula's second and forward-mode derivatives, or raise PyTorch's error."""
    worst, count, lacking = Worst(), 0, LACKING if subject.registered else LACKING_ELSEWHERE
    for options in variants(subject, {}, {"attn_mask": boolean(keys_of(subject))}):
        case = Case(subject, leading=(1, H), **options)
        with Called() as kernels:
            case.run()
        for key in [key for key in case.tensors if key != "attn_mask"]:
            for way, (found, expected) in derivatives_of(case, key).items():
                what = f"{way}, {key}, {said_of(options)}"
                none = refused(found, expected, worst, what, lacking)
                count += none
                # What is ours is right; only PyTorch's own kernel may refuse.
                allowed = kernels.fused and way != "grad" or "jvp" in way or not subject.registered
                must(not none or allowed, f"{what}: refused, and not by a kernel of PyTorch's")
    return f"{worst}; {count} refused"


def derivatives_of(case: Case, key: str) -> dict[str, tuple[Run, Tensor]]:
    """Return ways to derivatives of the mechanism, each with that of the formula."""
    x = case.tensors[key].detach()
    step = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    fast, formula = (loss_of(case, form, key) for form in ("fast", "reference"))
    second = torch.autograd.functional.hvp(formula, x, step)[1]
    slope = torch.func.grad(fast)

    def push(form: str = "fast") -> Tensor:
        return torch.func.jvp(lambda t: case.run(form, **{key: t}), (x,), (step,))[1]

    return {
        "grad": (lambda: slope(x), torch.autograd.functional.vjp(formula, x)[1]),
        "hvp": (lambda: torch.autograd.functional.hvp(fast, x, step)[1], second),
        "grad of grad": (lambda: torch.func.grad(lambda t: (slope(t) * step).sum())(x), second),
        "jvp of grad": (lambda: torch.func.jvp(slope, (x,), (step,))[1], second),
        "jvp": (push, push("reference")),
    }


@promise("vmap")
def vmap(subject: Subject) -> str:
    """Give the result of a loop under torch.func.vmap, also for per-sample gradients."""
    worst, m = Worst(), keys_of(subject)
    masks = [boolean(m), added(subject, boolean(m)).detach()]
    for options in variants(subject, {}, *({"attn_mask": mask} for mask in masks)):
        first, other = (Case(subject, leading=(H,), seed=s, **options) for s in (0, 1))
        if mask := "attn_mask" in options:
            keep = boolean(m, seed=5)
            numbers = options["attn_mask"].is_floating_point()
            other.tensors["attn_mask"] = added(subject, keep) if numbers else keep
        for which in [["q"], ["k"], ["v"], COMMON[:3], *[["attn_mask"]] * mask]:
            run = functools.partial(run_with, first, which)
            pairs = [[c.tensors[key].detach() for key in which] for c in (first, other)]
            loop = torch.stack([run(*pair) for pair in pairs])
            mapped = torch.func.vmap(run)(*map(torch.stack, zip(*pairs, strict=True)))
            worst.compare([mapped], [loop], 1e-12, f"over {', '.join(which)}, {said_of(options)}")
    if subject.differentiable:
        one = torch.func.grad(loss_of(first, "fast", "q"))
        queries = torch.stack([first.tensors["q"], other.tensors["q"]]).detach()
        loop = torch.stack([one(q) for q in queries])
        worst.compare([torch.func.vmap(one)(queries)], [loop], 1e-10, "gradients for each sample")
    return str(worst)


@promise("compile")
def compiles(subject: Subject) -> str:
    """Give the same numbers under torch.compile(fullgraph=True), with and without gradients."""
    worst, mask = Worst(), added(subject, boolean(B, 1, 1, keys_of(subject)))
    options = variants(subject, {"attn_mask": mask}) or [{}]
    for backend, common in zip(("aot_eager", "eager"), options, strict=False):
        torch._dynamo.reset()
        compiled = torch.compile(subject.fast, fullgraph=True, backend=backend)
        case, what = Case(subject, **common), f"{backend}, {said_of(common)}"
        worst.compare(case.results(compiled), case.results(), 1e-10, what)
        with torch.no_grad():  # compilers trace another way where nothing asks for a gradient
            worst.compare([case.run(compiled)], [case.run()], 1e-10, f"{what}, no gradients")
    return str(worst)


# --- small and long inputs ------------------------------------------------------------------------


@promise("empty inputs")
def empty_inputs(subject: Subject) -> str:
    """Accept sizes of 0, and return an empty tensor or zeros."""
    count, sizes = 0, [((0, H), N, M), ((B, H), 0, M), ((B, H), N, 0), ((0, H), 0, 0)]
    for leading, n, m in [*sizes, *[((B, 0), N, M)] * subject.biased]:
        m = n if subject.square else m
        masks = {"attn_mask": torch.ones(m).bool()}, {"attn_mask": torch.zeros(1, m).double()}
        for options in variants(subject, {}, *masks):
            case = Case(subject, leading=leading, n=n, m=m, **options)
            results, shape = case.results(), (*leading, n, case.tensors["v"].shape[-1])
            what, count = f"{leading}, {n} queries, {m} keys, {said_of(options)}", count + 1
            must(results[0].shape == shape, f"{what}: {tuple(results[0].shape)}; expected {shape}")
            empty = 0 in (*leading, n, m)  # a square grid has keys where it has queries
            still = not (empty and any(bool(x.any()) for x in results))
            must(still, f"{what}: the output or a gradient is not 0")
    return f"{count} inputs without a batch, heads, queries or keys"


@promise("one key")
def one_key(subject: Subject) -> str:
    """Give the value of a single key to every query, where weights sum to 1."""
    case = Case(subject, n=1, m=1)
    ones = torch.ones_like(case.tensors["v"])
    if not (subject.weights and torch.allclose(case.run(subject.exact, v=ones), ones)):
        raise Untried("it is not A V with weights that sum to 1")
    worst = Worst()
    for options in variants(subject, {}, {"attn_mask": torch.ones(1).bool()}):
        for dtype in subject.dtypes:
            case = Case(subject, n=1, m=1, dtype=dtype, **options)
            what = f"{dtype}, {said_of(options)}"
            worst.compare([case.run()], [case.tensors["v"]], TOLERANCE[dtype], what)
    return str(worst)


@promise("memory")
def memory(subject: Subject) -> str:
    """Store no tensor of N × M numbers, forward or backward."""
    n, largest = 1024, 0
    for options in variants(subject, {}, {"attn_mask": boolean(n)}):
        case = Case(subject, n=n, m=n, leading=(1, H), d=2, dv=3, **options)
        with Largest() as recorder:
            case.results()
        largest = max(largest, recorder.numel)
        must(
            largest <= n * n / 2,
            f"{said_of(options)}: a tensor of {largest:,} numbers, N = M = {n}, H = {H}",
        )
    return f"at most {largest:,} numbers in a tensor, {largest / n**2:.2g} N M, at N = M = {n}"


SIZES = [(2, 8), (5, 16)]  # sequences in a batch, and heads


@promise("operations")
def operations(subject: Subject) -> str:
    """Run the same number of operations for any batch and any number of heads, except on a CPU."""
    numbers = []
    for options in variants(subject, {}):
        counts = []
        for leading in SIZES:
            case = Case(subject, n=64, m=64, leading=leading, d=16, dv=16, **options)
            case = case.with_tensors(
                lambda key, x: x.to("meta")
            )  # the way of a GPU, without numbers
            with Operations() as recorder:
                try:
                    case.results()
                except Exception as error:
                    if subject.registered:
                        raise
                    raise Untried(f"without numbers it raises {said(error)}") from error
            counts.append(recorder.count)
        pairs = zip(counts, SIZES, strict=True)
        text = " and ".join(f"{count} for {b} sequences of {h} heads" for count, (b, h) in pairs)
        must(len({*counts}) == 1, f"{said_of(options)}: {text}; expected the same number")
        numbers.append(f"{counts[0]} with {said_of(options)}")
    return f"operations forward and backward: {', '.join(numbers)}"


# --- further arguments ----------------------------------------------------------------------------


@promise("shared heads", argument="enable_gqa")
def shared_heads(subject: Subject) -> str:
    """Share heads of k and v between neighbouring heads of q with enable_gqa=True."""
    m, worst = keys_of(subject), Worst()
    masks = [{"attn_mask": boolean(*shape)} for shape in ((m,), (B, 1, 1, m), (B, 4, 1, m))]
    for options in variants(subject, {}, *masks):
        case = Case(subject, leading=(B, 4), **options)
        fewer = fewer_heads(case, 2)
        case.tensors |= {key: x.detach().requires_grad_() for key, x in fewer.items()}
        found = case.results(functools.partial(subject.fast, enable_gqa=True))
        expected = case.results(functools.partial(_of_repeated_heads, subject))
        worst.compare(found, expected, 1e-10, f"2 heads of k and v for 4 of q, {said_of(options)}")
    return f"2 heads of k and v for 4 of q, as the same heads repeated; {worst}"


def _of_repeated_heads(subject: Subject, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    k = k.repeat_interleave(2, q.dim() - k.dim() - 3)  # keys may have a dimension more
    return subject.fast(q, k, v.repeat_interleave(2, -3), **options)


@promise("memory of shared heads", "shared heads", argument="enable_gqa")
@torch.no_grad()
def memory_of_shared_heads(subject: Subject) -> str:
    """Hold no more memory for shared heads of k and v than for copies of them passed as inputs."""
    if not getattr(unwrap(subject.fast)[0], "shared", False):
        raise Outcome("refused", "it repeats the heads of k and v that are shared")
    n, worst = 2048, 0.0
    for options in variants(subject, {}, {"attn_mask": boolean(n)}):
        case = Case(subject, n=n, m=n, leading=(1, 8), d=16, dv=16, **options)
        few, repeated = fewer_heads(case, 2), fewer_heads(case, 2, repeats=4)
        with Held() as shared:
            case.run(**few, enable_gqa=True)
        with Held() as full:
            case.run(**repeated)
        more = (shared.peak - full.peak) / case.tensors["v"].nbytes
        must(
            more < 0.25,
            f"{said_of(options)}: 2 heads of k and v for 8 of q take {more:.2f} copies of v more "
            "than 8 of each, which are not counted",
        )
        worst = max(worst, more)
    return f"2 heads of k and v for 8 of q: at most {worst:.2f} copies of v more than for 8 of each"


def fewer_heads(case: Case, heads: int, repeats: int = 1) -> dict[str, Any]:
    """Return the first heads of keys and values, each so many times."""
    k, v = case.tensors["k"], case.tensors["v"]
    at = case.tensors["q"].dim() - k.dim() - 3  # keys may have a dimension more
    k = k.narrow(at, 0, heads).repeat_interleave(repeats, at)
    return {"k": k, "v": v[:, :heads].repeat_interleave(repeats, -3)}


@promise("dropout", argument="dropout_p")
def dropout(subject: Subject) -> str:
    """Drop each weight of A with probability p, and divide the others by 1 - p."""
    if not subject.weights:
        raise Untried("it is not of the form A V")
    case, p = Case(subject, n=40, m=40), 0.3
    eye = torch.eye(40, dtype=F64).expand(B, H, 40, 40)
    A, twice = case.run(v=eye), case.run(v=torch.cat([eye, eye], -1), dropout_p=p)
    dropped, again = twice.split(40, -1)
    must(torch.allclose(dropped, again), f"p = {p}: equal columns of v come out unequal")
    left = (A / (1 - p)).masked_fill(dropped == 0, 0)
    must(torch.allclose(dropped, left, atol=1e-9), f"p = {p}: what is left is not A / {1 - p:.1f}")
    share = float((dropped == 0)[A.abs() > 1e-12].double().mean())
    must(abs(share - p) < 0.05, f"p = {p}: {share:.0%} of the weights are dropped")
    must(not case.run(dropout_p=1.0).any(), "p = 1: the output is not 0")
    if subject.registered:  # the weights that PyTorch drops with the same seed
        A = weights_of(subject.fast, case.tensors["q"], case.tensors["k"], **case.further)
        Worst().compare([A @ case.tensors["v"]], [case.run()], 1e-7, "A V")
        torch.default_generator.manual_seed(5)  # not those of GPUs, which nobody restores
        expected = F.dropout(A, p) @ case.tensors["v"]
        torch.default_generator.manual_seed(5)
        must(torch.equal(case.run(dropout_p=p), expected), "other weights than F.dropout drops")
    return f"p = {p}: {share:.1%} of the weights are 0, the others A / {1 - p:.1f}"


NAN, INF = torch.full((N,), math.nan), torch.full((N,), math.inf)
BAD: list[tuple[str, Callable[[Any], Any], Any, str]] = [  # changed, to what, and the error
    ("q", lambda q: q.tolist(), TypeError, "q is of type list; expected a Tensor"),
    ("q", lambda q: None, TypeError, "q is of type NoneType; expected a Tensor"),
    ("k", lambda k: None, TypeError, "k is of type NoneType; expected a Tensor"),
    ("v", lambda v: None, TypeError, "v is of type NoneType; expected a Tensor"),
    ("q", lambda q: q.long(), TypeError, "q has dtype torch.int64; expected one of torch.float32"),
    ("q", lambda q: q[0, 0, 0], ValueError, r"q has shape \(6,\); expected \(..., N, D\)"),
    ("q", lambda q: q[..., :0], ValueError, r"q has shape \(2, 3, 21, 0\).* at least 1"),
    ("k", lambda k: k.double(), TypeError, "k has dtype torch.float64; expected torch.float32"),
    ("k", lambda k: k.to("meta"), ValueError, "k is on device meta; expected cpu"),
    ("k", lambda k: k[..., :5], ValueError, r"k has shape .* 5\); expected \(2, 3, .*6\)"),
    ("k", lambda k: k[:, :1], ValueError, r"k has shape \(2, 1, .*; expected \(2, 3, "),
    ("k", lambda k: k[0], ValueError, r"k has shape \(3, .*; expected \(2, 3, "),
    ("k", lambda k: k.flatten()[:6], ValueError, r"k has shape \(6,\); expected \(2, 3, .*M, 6\)"),
    ("v", lambda v: v.tolist(), TypeError, "v is of type list; expected a Tensor"),
    ("v", lambda v: v.half(), TypeError, "v has dtype torch.float16; expected torch.float32"),
    ("v", lambda v: v[:, :, :4], ValueError, r"v has shape \(2, 3, 4, .\); expected \(2, 3, 21, "),
    ("v", lambda v: v[:, :2], ValueError, r"v has shape \(2, 2, 21, .\); expected \(2, 3, 21, "),
    ("v", lambda v: v.sum(), ValueError, r"v has shape \(\); expected \(2, 3, 21, Dv\)"),
    ("attn_mask", lambda _: [[True]], TypeError, "attn_mask is of type list; expected a boolean"),
    ("attn_mask", lambda _: torch.ones(N).long(), TypeError, "attn_mask has dtype torch.int64"),
    ("attn_mask", lambda _: NAN.to("meta"), ValueError, "attn_mask is on device meta; expected c"),
    ("attn_mask", lambda _: torch.ones(N, 4), ValueError, r"attn_mask has shape \(21, 4\)"),
    ("attn_mask", lambda _: torch.ones(4, 1, 1, N), ValueError, r"attn_mask has shape \(4, 1, 1"),
    ("attn_mask", lambda _: torch.ones(1, B, H, 1, N), ValueError, r"attn_mask has shape \(1, 2"),
    ("attn_mask", lambda _: NAN, ValueError, "attn_mask contains NaN; expected finite numbers"),
    ("attn_mask", lambda _: INF, ValueError, r"attn_mask contains \+inf"),
    ("is_causal", lambda _: 1, TypeError, "is_causal is 1; expected True or False"),
    ("enable_gqa", lambda _: "yes", TypeError, "enable_gqa is 'yes'; expected True or False"),
    ("dropout_p", lambda _: True, TypeError, "dropout_p is of type bool; expected a probability"),
    ("dropout_p", lambda _: "1", TypeError, "dropout_p is of type str; expected a probability"),
    ("dropout_p", lambda _: 1.5, ValueError, "dropout_p is 1.5; expected a probability"),
    ("dropout_p", lambda _: math.nan, ValueError, "dropout_p is nan; expected a probability"),
    ("scale", lambda _: math.nan, ValueError, "scale is nan; expected a finite positive number"),
    ("scale", lambda _: math.inf, ValueError, "scale is inf; expected a finite positive number"),
    ("scale", lambda _: 0, ValueError, "scale is 0; expected a finite positive number"),
    ("scale", lambda _: -1.0, ValueError, "scale is -1.0; expected a finite positive number"),
    ("scale", lambda _: "1", TypeError, "scale is of type str"),
    ("scale", lambda _: NAN[0], TypeError, "scale is of type Tensor"),
]
# Of an argument that does not work, wrong values say nothing.
WORKS = {"masks over keys": "attn_mask", "causality": "is_causal", "scale": "scale"}
WORKS |= {"dropout": "dropout_p", "shared heads": "enable_gqa"}


def wrong_arguments(subject: Subject) -> Iterator[tuple[str, dict[str, Any], str, Any, Case]]:
    """Yield the names and values of wrong arguments, and the words and kinds of their errors."""
    working = subject.takes - {WORKS.get(name) for name in subject.broken}
    case = Case(subject, n=N, m=N, dtype=F32)
    for name, change, kind, match in BAD:
        if name in COMMON[:3] or name in working:
            yield name, {name: change(case.tensors.get(name))}, match, kind, case
    if {"attn_mask", "is_causal"} <= working:
        both = {"attn_mask": torch.ones(N), "is_causal": True}
        match = "attn_mask and is_causal=True were both given"
        yield "attn_mask|is_causal", both, match, ValueError, case
    if subject.square:
        few = {key: case.tensors[key][..., :4, :] for key in ("k", "v")}
        yield "k", few, "k has shape", ValueError, case
    if "enable_gqa" in working:
        case = Case(subject, leading=(B, 4))
        yield "k", fewer_heads(case, 2), "k has shape", ValueError, case
        for key, x in fewer_heads(case, 3).items():
            match = f"{key} has 3 heads; expected a divisor of 4"
            yield key, {key: x, "enable_gqa": True}, match, ValueError, case
        match = "k is of type list; expected a Tensor"
        yield "k", {"k": [0.0], "enable_gqa": True}, match, TypeError, case


@promise("bad arguments")
def bad_arguments(subject: Subject) -> str:
    """Raise TypeError or ValueError for a wrong argument, and name it."""
    unnamed, count = [], 0
    for name, wrong, match, kind, case in wrong_arguments(subject):
        count += 1
        try:
            expect_error(subject, functools.partial(case.run, **wrong), name, match, kind)
        except Outcome as end:
            shown = textwrap.shorten(repr(wrong), 60)
            unnamed.append(f"{shown} {end}")
    must(not unnamed, f"{len(unnamed)} of {count} are not named, such as {[*unnamed, ''][0]}")
    return f"{count} wrong arguments, each named by its error"


# --- the checker ----------------------------------------------------------------------------------

FLAGS = ("causal", "any_mask", "square", "biased", "weights")


def check_mechanism(
    mechanism: str | Entry | Mechanism,
    formula: Mechanism | None = None,
    *,
    options: dict[str, Any] | Options | None = None,
    keys: Callable[[Tensor], Tensor] = plain_keys,
    promises: Iterable[str] | None = None,
    verbose: bool = True,
    **flags: bool,
) -> Report:
    """Try what every mechanism promises, and report promise by promise.

    A promise is *kept*; *BROKEN*, with the result found and the right one; *refused*, by an error
    that names the argument, where that is allowed; *not taken*, if there is no such argument; or
    *untried*, if it needs a formula that was not given, or another promise that is broken. Later
    promises avoid what is already broken, so that each mistake is reported once.

    Parameters
    ----------
    mechanism : str, Entry or callable
        A name or entry of the registry, or any function ``f(q, k, v, attn_mask=None, ...)`` with
        the arguments of PyTorch's ``scaled_dot_product_attention``, or some of them.
    formula : callable, optional
        A function with the same arguments and the right results; not for a name or an entry.
    options : dict or callable, optional
        Further arguments of a function, or ``options(N, H, D)`` that returns them for N tokens, H
        heads and D features; floating tensors among them are parameters.
    keys : callable
        Turns keys ``(..., M, D)`` into the function's keys, if these have another shape.
    promises : iterable of str, optional
        Those of `PROMISES` to try; left out: all.
    verbose : bool
        Whether to print each result as soon as it is known.
    **flags : bool
        Properties that are otherwise found by trying: whether it takes is_causal=True (`causal`),
        masks that differ between queries (`any_mask`), floating masks with numbers (`biased`), or
        only as many keys as queries (`square`), and whether it is linear in v (`weights`).

    Returns
    -------
    Report
        `passed`, `failed` and `results`. Printed, it has a line for each promise, a second one for
        each that is broken, and a last line that counts the verdicts.

    Raises
    ------
    TypeError, ValueError
        For a mechanism, promise or flag that does not exist; errors of a mechanism are results.

    Examples
    --------
    >>> def attention(q, k, v):
    ...     return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
    >>> check_mechanism(attention, promises=["calling convention"], verbose=False).failed
    ['calling convention']
    """
    chosen = list(PROMISES if promises is None else promises)
    if isinstance(promises, str):
        raise TypeError(f"promises is {promises!r}; expected a list of names")
    for name, known in [*((x, [*PROMISES]) for x in chosen), *((x, FLAGS) for x in flags)]:
        if name not in known:
            raise ValueError(f"{name!r} is unknown; expected one of {', '.join(known)}")
    check_flags(verbose=verbose, **flags)
    with torch.random.fork_rng(devices=[]):
        subject = subject_for(mechanism, formula, options, keys)
    for flag, value in flags.items():
        setattr(subject, flag, value)
    report = Report(subject.name, [])
    for name in chosen:
        report.results.append(result := try_promise(name, subject))
        if result.verdict == "BROKEN":
            leave_out(name, subject)
        if verbose:
            print(result, flush=True)
    if verbose:
        print(repr(report))
    return report


def subject_for(mechanism: Any, formula: Any, options: Any, keys: Any) -> Subject:
    """Return what is tried: an entry of the registry, or a function."""
    if isinstance(mechanism, (str, Entry)):
        if isinstance(mechanism, str):
            get_attention(mechanism)  # raises for another name
        if formula is not None or options is not None or keys is not plain_keys:
            raise ValueError("formula, options or keys are given; expected none for the registry")
        return Subject.of(mechanism)
    check_callable("mechanism", mechanism, "a name, an Entry or a function of (q, k, v)")
    if formula is not None:
        check_callable("formula", formula)
    sample = options if callable(options) else lambda N, H, D: dict(options or {})
    return Subject.of_function(mechanism, formula and count_as_untried(formula), keys, sample)


def count_as_untried(formula: Mechanism) -> Mechanism:
    """Let errors of a formula count as untried: they are none of the mechanism's."""

    def run(*args: Any, **options: Any) -> Tensor:
        try:
            return formula(*args, **options)
        except Exception as error:
            raise Untried(f"the formula raises {said(error)}") from error

    return run


def try_promise(name: str, subject: Subject) -> Result:
    """Try one promise; whatever the mechanism raises is a result."""
    check, argument, needs = PROMISES[name]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        try:
            if argument and argument not in subject.takes:
                raise Outcome("not taken", f"there is no argument {argument}")
            if broken := [x for x in ("a plain call", *needs) if x in subject.broken]:
                raise Untried(f"it rests on {broken[0]!r}, which is broken")
            if subject.reference is None and "formula" in needs:
                raise Untried("there is no formula that it equals")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
                return Result(name, "kept", check(subject))
        except Outcome as end:
            return Result(name, end.verdict, str(end))
        except Exception as error:
            return Result(name, "BROKEN", f"raises {said(error)}")


def leave_out(name: str, subject: Subject) -> None:
    """Leave what is broken out of later promises."""
    subject.broken.add(name)
    if name == "inputs":
        subject.fast = on_copies(subject.fast)
    elif name == "values":
        subject.reference = None
    elif name in ("gradients", "finite differences"):
        subject.differentiable = False
    elif name == "dtypes":
        subject.dtypes = [F64]
    elif name == "causality":
        subject.causal = False
    elif "masks" in name:
        subject.any_mask, subject.masked = False, name == "masks per query"
    elif name == "calling convention":
        try:
            Case(subject).with_changed("qkv", Tensor.clone).run()
        except Exception:
            subject.broken.add("a plain call")
