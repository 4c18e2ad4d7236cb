"""What every mechanism of the registry promises, one promise a test.

A family's own file tests what is special about it, and `test_contract_layers` the layers. To vary
one factor at a time, each test changes one thing of a `Case`: a mechanism with its sample options,
on random tensors.
"""

from __future__ import annotations

import inspect
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from cases import Case, D, M, N, added, assert_forms_agree, causality_of, disturbed, keys_of
from helpers import (
    DTYPES,
    TOLERANCE,
    B,
    H,
    Largest,
    assert_all_close,
    boolean,
    cuda,
    every_causal_mechanism,
    every_mechanism,
    every_mechanism_with_weights,
    relative_errors,
    takes_no_bias,
    written_as_numbers,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import derived_attention
from derived_attention.attention.frame.convention import weights_of
from derived_attention.attention.frame.masks import causal_mask
from derived_attention.attention.registry import MECHANISMS, PUBLIC

FORMS = ["fast", "reference"]
COMMON = ["q", "k", "v", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]


# --- the calling convention ----------------------------------------------------------------------


@every_mechanism
def test_arguments_are_those_of_pytorchs_attention_and_then_its_own(name):
    case = Case(name, attn_mask=boolean(keys_of(name)))
    for form in FORMS:
        function = getattr(case.entry, form)
        parameters = list(inspect.signature(function).parameters.values())
        assert [p.name for p in parameters[: len(COMMON)]] == COMMON
        assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters[6:])
        own = {key: x for key, x in (case.tensors | case.options).items() if key not in COMMON}
        first = [case.tensors[key] for key in COMMON[:4]]
        assert torch.equal(function(*first, 0.0, False, **own), case.run(form))
        with pytest.raises(TypeError):
            case.run(form, no_such_option=1)


@every_mechanism_with_weights
def test_dropout_drops_weights(name):
    case = Case(name, n=40, m=40)
    own = {key: x for key, x in (case.tensors | case.options).items() if key not in COMMON}
    for form in FORMS:
        function = getattr(case.entry, form)
        A = weights_of(function, case.tensors["q"], case.tensors["k"], **own)
        torch.testing.assert_close(A @ case.tensors["v"], case.run(form))
        torch.manual_seed(5)
        dropped = F.dropout(A, 0.3)
        torch.manual_seed(5)
        assert torch.equal(case.run(form, dropout_p=0.3), dropped @ case.tensors["v"])
        assert bool((case.run(form, dropout_p=1.0) == 0).all())


@every_mechanism
def test_keys_and_values_may_be_shared_by_heads(name):
    case = Case(name, leading=(B, 4))
    heads = -4 if case.tensors["k"].dim() == 5 else -3
    for form in FORMS:
        few = {"k": case.tensors["k"].narrow(heads, 0, 2), "v": case.tensors["v"][:, :2]}
        repeated = {
            "k": few["k"].repeat_interleave(2, heads), "v": few["v"].repeat_interleave(2, -3)
        }  # fmt: skip
        assert torch.equal(case.run(form, **few, enable_gqa=True), case.run(form, **repeated))
        with pytest.raises(ValueError, match="k has shape"):
            case.run(form, **few)
        with pytest.raises(ValueError, match="k has 3 heads; expected a divisor of 4"):
            case.run(form, k=case.tensors["k"].narrow(heads, 0, 3), enable_gqa=True)
        with pytest.raises(ValueError, match="v has 3 heads; expected a divisor of 4"):
            case.run(form, v=case.tensors["v"][:, :3], enable_gqa=True)
        with pytest.raises(TypeError, match="k is of type list; expected a Tensor"):
            case.run(form, k=[0.0], enable_gqa=True)


# --- fast = reference ----------------------------------------------------------------------------

LENGTHS = [(1, 1), (2, 1), (1, M), (M, N), (64, 64), (150, 150), (150, 5), (5, 150)]


@every_mechanism
def test_fast_equals_reference(name):
    assert_forms_agree(name, "as usual")
    for n, m in LENGTHS:
        assert_forms_agree(name, f"{n} queries, {m} keys", n=n, m=m, leading=(H,), d=3, dv=2)
    for leading in [(H,), (1,), (B, 1, H)]:
        assert_forms_agree(name, f"leading {leading}", leading=leading)
    if not {"scales", "shifts"} & MECHANISMS[name].options(N, H, D).keys():
        assert_forms_agree(name, "no heads", leading=())
    for dv in (1, D, D + 3):
        assert_forms_agree(name, f"Dv = {dv}", dv=dv)
    for d in (1, 7):
        assert_forms_agree(name, f"D = {d}", d=d)
    for scale in (0.3, 2, 1e-9):
        assert_forms_agree(name, f"scale {scale}", scale=scale)


@every_causal_mechanism
def test_fast_equals_reference_where_causal(name):
    for n, m in [(N, M), *LENGTHS, (300, 300)]:
        what = f"{n} queries, {m} keys"
        assert_forms_agree(name, what, n=n, m=m, leading=(H,), d=3, dv=2, is_causal=True)
    for leading in [(B, H), (B, 1, H)]:
        assert_forms_agree(name, f"leading {leading}", leading=leading, is_causal=True)
    if MECHANISMS[name].any_mask:
        for n, m in [(N, M), (M, N)]:
            causal = Case(name, n=n, m=m, is_causal=True).results()
            masked = Case(name, n=n, m=m, attn_mask=causal_mask(n, m)).results()
            assert_all_close(causal, masked, 1e-10, f"{n} queries, {m} keys")


@every_mechanism
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=2).map(lambda sizes: (*sizes, H)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 6), st.integers(0, 5)),
    st.sampled_from(["none", "causal", "boolean", "float"]),
    st.integers(0, 99),
)
def test_fast_equals_reference_for_any_shape(name, leading, lengths, widths, kind, seed):
    entry, (n, m), (d, dv) = MECHANISMS[name], lengths, widths
    m = n if entry.square else m
    full = (*leading, n if entry.any_mask else 1, m)
    generator = torch.Generator().manual_seed(seed)
    shape = [x if torch.rand((), generator=generator) < 0.7 else 1 for x in full]
    keep = torch.rand(shape, generator=generator) > 0.5
    masks = {"boolean": keep, "float": added(name, keep).detach()}
    options = {"attn_mask": masks[kind]} if kind in masks else {}
    if kind == "causal":
        options = {"is_causal": entry.causal}
    case = Case(name, n=n, m=m, leading=leading, d=d, dv=dv, seed=seed, **options)
    fast = case.results()
    assert fast[0].shape == (*leading, n, case.tensors["v"].shape[-1])
    assert all(bool(x.isfinite().all()) for x in fast)
    assert_all_close(fast, case.results("reference"), 1e-9, name)


@every_mechanism
def test_views_are_as_good_as_copies_and_are_left_as_they_were(name):
    def view(key, x, how):
        if key not in ("q", "k", "v", "attn_mask"):
            return x
        if how == "length before heads":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if how == "columns first":
            return x.mT.contiguous().mT
        return x[:1].expand(x.shape) if key != "q" else x

    keep = boolean(B, 1, 1, keys_of(name))
    for how in ("length before heads", "columns first", "expanded"):
        for options in ({}, {"attn_mask": added(name, keep)}):
            case = Case(name, **options).copied(lambda key, x, how=how: view(key, x, how))
            copied = case.copied(lambda key, x: x.clone(memory_format=torch.contiguous_format))
            assert_all_close(case.results(), copied.results(), 1e-10, f"{name}, {how}")
            unchanged = (torch.equal(case.tensors[key], x) for key, x in copied.tensors.items())
            assert all(unchanged), f"{name}, {how}"


@every_mechanism
def test_large_scores_do_not_overflow(name):
    case = Case(name, dtype=torch.float32)
    case = case.copied(lambda key, x: 300 * x if key in ("q", "k") else x)
    exact = case.copied(lambda key, x: x.double())
    assert all(bool(x.isfinite().all()) for form in FORMS for x in case.results(form))
    torch.testing.assert_close(exact.run("fast"), exact.run("reference"), rtol=1e-8, atol=1e-8)


# --- masks ---------------------------------------------------------------------------------------


@every_mechanism
def test_masks_over_keys(name):
    m = keys_of(name)
    shapes = [(m,), (1, m), (H, 1, m), (B, 1, 1, m), (B, H, 1, m)]
    masks = [boolean(*shape) for shape in shapes] + [torch.tensor(True), torch.ones(H, 1, 1).bool()]
    for mask in masks + [added(name, keep) for keep in masks]:
        assert_forms_agree(name, f"{mask.dtype} {tuple(mask.shape)}", attn_mask=mask)
    for dtype in DTYPES:  # the mask's
        mask = added(name, boolean(m), dtype)
        exact, case = Case(name, attn_mask=mask.detach().double()), Case(name, attn_mask=mask)
        for form in FORMS:
            results = case.results(form)
            assert_all_close(results[:4], exact.results(form)[:4], 1e-10, f"{name}, {dtype}")
            assert results[-1].dtype == (mask.dtype if mask.requires_grad else torch.float64)
    for mask in (boolean(m), added(name, boolean(m))):
        hidden = ~boolean(m)[:, None]
        case = Case(name, attn_mask=mask)
        moved = case.copied(lambda key, x, h=hidden: x + 5 * h if key in ("k", "v") else x)
        assert_all_close([moved.run()], [case.run()], 1e-10, f"{name}, what {mask.dtype} hides")


@every_mechanism
def test_who_is_absent_may_be_written_as_any_large_negative_number(name):
    """As Transformers does, and others: it is in no statistic, filter or pool."""
    m = keys_of(name)
    keep = boolean(B, 1, 1, m)
    keep[1] = False
    for mask in [keep] + [boolean(N, m)] * MECHANISMS[name].any_mask:
        for form in FORMS:
            exact = Case(name, attn_mask=mask).results(form)
            for numbers in written_as_numbers(mask):
                what = f"{name}, {form}, {numbers.dtype}, {numbers.min()}"
                assert_all_close(Case(name, attn_mask=numbers).results(form), exact, 1e-10, what)


@every_mechanism
def test_masks_that_differ_between_queries_are_taken_or_refused(name):
    m = keys_of(name)
    keeps = [boolean(N, m), boolean(B, 1, N, m), boolean(B, H, N, m), boolean(1, 1, N, 1)]
    keeps.append(boolean(m, N).mT | (torch.arange(m) == 0))  # as strided as masks come
    for mask in keeps + [added(name, keep) for keep in keeps]:
        if MECHANISMS[name].any_mask:
            assert_forms_agree(name, f"{mask.dtype} {tuple(mask.shape)}", attn_mask=mask)
        else:
            with pytest.raises(ValueError, match=r"attn_mask has shape .*size 1 in place of N"):
                Case(name, attn_mask=mask).run()


@every_mechanism
def test_a_query_that_may_attend_nothing_gets_zeros(name):
    m = keys_of(name)
    keep = boolean(B, 1, 1, m)
    keep[1] = False
    masks, dead = [keep], (1,)
    if MECHANISMS[name].any_mask:
        keep = boolean(N, m)
        keep[2] = False
        masks, dead = [keep, keep.expand(B, H, N, m)], (..., 2, slice(None))
    masks += [added(name, mask) for mask in masks]
    nothing = [torch.tensor(False), torch.full((m,), -math.inf), torch.zeros(B, 1, 1, m).bool()]
    for form in FORMS:
        for dtype in DTYPES[: 4 if form == "fast" else 3]:  # formulas overflow in float16
            for mask in masks:
                what = f"{name}, {form}, {dtype}, {mask.dtype}"
                results = Case(name, dtype=dtype, attn_mask=mask).results(form)
                assert all(bool(x.isfinite().all()) for x in results), what
                assert not results[0][dead].any() and bool(results[0].any()), what
                assert not results[1][dead].any() and bool(results[1].any()), what
                if mask.requires_grad:
                    assert not results[-1][mask == -math.inf].any(), what
        for mask in nothing:
            results = Case(name, attn_mask=mask).results(form)
            assert not any(bool(x.any()) for x in results), f"{name}, {form}"


@every_causal_mechanism
def test_causal_attention_sees_no_future_bit_for_bit(name):
    f32 = torch.float32
    problems = [(6, 6, f32), (4, 9, f32), (9, 4, f32), (150, 150, f32), (N, N, torch.bfloat16)]
    for n, m, dtype in problems:
        case = Case(name, n=n, m=m, leading=(1, H), dtype=dtype, is_causal=True)
        out, last = case.run(), min(n, m) - 1
        leaves = [case.tensors[key] for key in ("q", "k", "v")]
        for t in range(last) if last < 10 else {0, 15, min(64, last - 1), min(127, last - 1)}:
            what = f"{name}, {n}, {m}, {dtype}, {t}"
            past, future = (..., slice(t + 1), slice(None)), (..., slice(t + 1, None), slice(None))
            for size in (5, 1e4, 1e7):  # a huge future moves no bit either
                changed = disturbed(case, t, size).run()
                assert torch.equal(out[past], changed[past]), what
                assert not torch.equal(out[future], changed[future]), what
            slopes = torch.autograd.grad(out[past].square().sum(), leaves, retain_graph=True)
            assert not any(bool(x[future].any()) for x in slopes), what


@pytest.mark.parametrize("name", [name for name in MECHANISMS if not MECHANISMS[name].causal])
def test_who_has_no_past_refuses_to_be_causal(name):
    for form in FORMS:
        with pytest.raises(ValueError, match="is_causal is True"):
            Case(name, is_causal=True).run(form)


# --- dtypes, small shapes, memory, compilers -----------------------------------------------------


@every_mechanism
def test_every_dtype_is_as_exact_as_it_can_be(name):
    for dtype in DTYPES:
        case = Case(name, n=64, m=64, d=16, dtype=dtype)
        exact = case.copied(lambda key, x: x.double()).results("reference")
        for form in FORMS:
            results = case.results(form)
            assert all(x.dtype == dtype for x in results), f"{name}, {form}, {dtype}"
            errors, eps = relative_errors(results, exact), torch.finfo(dtype).eps
            assert errors[0] < 4 * eps, f"{name}, {form}, {dtype}: {errors[0] / eps} roundings"
            assert max(errors[1:]) < 16 * eps, f"{name}, {form}, {dtype}: {errors}"


SPREADS = [(dtype, std) for dtype in DTYPES if dtype != torch.float64 for std in (1, 4, 12)]
SPREADS.append((torch.float32, 30))


@every_mechanism
@pytest.mark.parametrize(("dtype", "std"), SPREADS, ids=lambda x: str(x).removeprefix("torch."))
def test_queries_and_keys_of_any_spread(name, dtype, std):
    """Errors are what one rounding of the arguments would make, up to a factor; no row is lost."""
    eps = torch.finfo(dtype).eps
    generator = torch.Generator().manual_seed(0)
    for options in causality_of(name, {}):
        case = Case(name, n=64, m=64, leading=(1, H), d=32, dv=32, dtype=dtype, **options)
        case = case.copied(lambda key, x: std * x if key in ("q", "k") else x)
        exact = case.copied(lambda key, x: x.double())
        near = exact.copied(
            lambda key, x: x * (1 + eps * (torch.rand(x.shape, generator=generator) - 0.5))
        )
        exact, results, what = exact.results("reference"), case.results(), f"{name}, {options}"
        assert all(bool(x.isfinite().all()) for x in results), what
        assert torch.equal(results[0].any(-1), exact[0].any(-1)), what
        moved = relative_errors(near.results("reference"), exact)
        errors = [
            e / (eps + m) for e, m in zip(relative_errors(results, exact), moved, strict=True)
        ]
        # In float32 rounding errors of sums are not much less than those of the arguments, and
        # weights near 0 and 1, of which gradients are made, lose most.
        most = (32, 4000) if dtype == torch.float32 else (1, 2)
        assert errors[0] < most[0] and max(errors[1:4]) < most[1], f"{what}: {errors}"


@every_mechanism
def test_autocast(name):
    for options in ({}, {"attn_mask": added(name, boolean(keys_of(name)), torch.float32)}):
        case = Case(name, dtype=torch.float32, **options)
        for form in FORMS:
            exact = case.run(form)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for q in (case.tensors["q"], case.tensors["q"].bfloat16()):
                    out = case.run(form, q=q)
                    assert out.dtype in (q.dtype, torch.bfloat16)
                    assert relative_errors([out], [exact])[0] < 3e-2, f"{name}, {form}"
                    assert bool(torch.autograd.grad(out.sum(), case.tensors["v"])[0].any())


@every_mechanism
def test_empty_inputs_give_zeros(name):
    shapes = [((0, H), N, M), ((B, H), 0, M), ((B, H), N, 0), ((0, H), 0, 0), ((B, 0), N, M)]
    for leading, n, m in shapes[: -1 if takes_no_bias(name) else None]:
        m = n if MECHANISMS[name].square else m
        masks = {"attn_mask": torch.ones(m).bool()}, {"attn_mask": torch.zeros(1, m).double()}
        for options in causality_of(name, {}, *masks):
            for form in FORMS:
                case = Case(name, leading=leading, n=n, m=m, **options)
                results, what = (
                    case.results(form),
                    f"{name}, {form}, {leading}, {n}, {m}, {options}",
                )
                assert results[0].shape == (*leading, n, case.tensors["v"].shape[-1]), what
                empty = 0 in (*leading, n, m)  # a square grid has keys where it has queries
                assert not (empty and any(bool(x.any()) for x in results)), what


CODES = ("ridge", "lasso")  # their weights are what a query is made of, at a price


@pytest.mark.parametrize("name", [x for x, e in MECHANISMS.items() if e.weights and x not in CODES])
def test_one_key_gives_its_value(name):
    for options in causality_of(name, {}, {"attn_mask": torch.ones(1).bool()}):
        for form in FORMS:
            for dtype in DTYPES:
                case = Case(name, n=1, m=1, dtype=dtype, **options)
                out, value = case.run(form), case.tensors["v"]
                assert_all_close([out], [value], TOLERANCE[dtype], f"{name}, {form}, {dtype}")


@every_mechanism
def test_no_matrix_of_queries_and_keys_is_stored(name):
    n = 1024
    for options in causality_of(name, {}, {"attn_mask": boolean(n)}):
        case = Case(name, n=n, m=n, leading=(1, H), d=2, dv=3, **options)
        with Largest() as largest:
            case.results()
        assert largest.numel <= n * n / 2, f"{name}, {list(options)}: {largest.numel}"
    with Largest() as largest, torch.no_grad():
        Case(name, n=256, m=256, d=2, dv=3).run("reference")
    assert largest.numel >= 256 * 256, "the recorder must see the matrix of the formula"


@every_mechanism
def test_compiles_without_a_break(name):
    mask = added(name, boolean(B, 1, 1, keys_of(name)))
    backends = ("aot_eager", "eager")
    for backend, options in zip(backends, causality_of(name, {"attn_mask": mask}), strict=False):
        torch._dynamo.reset()
        compiled = torch.compile(MECHANISMS[name].fast, fullgraph=True, backend=backend)
        case = Case(name, **options)
        assert_all_close(case.results(compiled), case.results(), 1e-10, f"{name}, {list(options)}")
        with torch.no_grad():  # compilers trace another way where nothing asks for a gradient
            assert_all_close([case.run(compiled)], [case.run()], 1e-10, f"{name}, {list(options)}")


@every_mechanism
def test_gradients_are_those_of_finite_differences(name):
    keep = boolean(4 if MECHANISMS[name].square else 5)
    keep[1] = False
    for options in causality_of(name, {"attn_mask": added(name, keep)}):
        case = Case(name, n=4, m=len(keep), leading=(H,), d=2, dv=2, **options)

        def run(*values, case=case):
            return case.run(**dict(zip(case.tensors, values, strict=True)))

        assert torch.autograd.gradcheck(run, list(case.tensors.values()), nondet_tol=1e-12)


# --- bad arguments -------------------------------------------------------------------------------


NAN, INF = torch.full((N,), math.nan), torch.full((N,), math.inf)
BAD = [  # what is changed, to what, and the error
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


@every_mechanism
def test_bad_arguments_are_named(name):
    case = Case(name, n=N, m=N, dtype=torch.float32)
    for form in FORMS:
        for argument, change, error, match in BAD:
            with pytest.raises(error, match=match):
                case.run(form, **{argument: change(case.tensors.get(argument))})
        with pytest.raises(ValueError, match="attn_mask and is_causal=True were both given"):
            case.run(form, attn_mask=torch.ones(N), is_causal=True)
        if case.entry.square:
            with pytest.raises(ValueError, match="k has shape"):
                case.run(form, k=case.tensors["k"][..., :4, :], v=case.tensors["v"][..., :4, :])


def test_values_are_not_looked_at_where_there_are_none():
    for name in MECHANISMS:
        case = Case(name, n=N, m=N, dtype=torch.float32, device="meta")
        out = case.run(attn_mask=torch.ones(N, device="meta"))
        assert out.shape == case.tensors["v"].shape and out.is_meta, name


# --- on a GPU, and the public face ---------------------------------------------------------------


@cuda
def test_cuda_equals_float64_on_the_cpu():
    for name in MECHANISMS:
        keep = boolean(B, 1, 1, keys_of(name))
        keep[1] = False
        for dtype in DTYPES:
            for options in causality_of(name, {}, {"attn_mask": keep}):
                case = Case(name, dtype=dtype, **options)
                exact = case.copied(lambda key, x: x.double()).results()
                there = {key: x.cuda() if key == "attn_mask" else x for key, x in options.items()}
                ours = Case(name, dtype=dtype, device="cuda", **there).results()
                ours, what = [x.cpu().double() for x in ours], f"{name}, {dtype}, {list(options)}"
                assert_all_close(ours, exact, 4 * TOLERANCE[dtype], what)


def test_the_package_imports_nothing_until_it_is_asked():
    code = "import sys, derived_attention; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_can_be_imported():
    for name, module in PUBLIC.items():
        thing = getattr(derived_attention, name)
        assert thing.__name__ == name and thing.__module__ == module, name
        assert inspect.getdoc(thing), name
    listed = dir(derived_attention)
    assert {*PUBLIC, "list_attentions", "get_attention", "__version__"} <= {*listed}
    for name in ("softmax", "_private", "Attention"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(derived_attention, name)


def test_mechanisms_are_known_by_name():
    assert derived_attention.list_attentions() == list(MECHANISMS)
    for name, entry in MECHANISMS.items():
        assert derived_attention.get_attention(name) is entry.fast
        assert entry.reference.__name__ == f"{entry.fast.__name__}_reference"
        assert inspect.getdoc(entry.fast) and inspect.getdoc(entry.reference), name
        assert {entry.fast.__name__, entry.reference.__name__} <= {*PUBLIC}, name
        assert type(entry.make_layer(4 * H, H, N)).__name__ in PUBLIC, name
    with pytest.raises(ValueError, match="name is 'sofmax'; expected one of softmax, linear, "):
        derived_attention.get_attention("sofmax")
