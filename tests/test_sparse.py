"""Sparse attention: the patterns and their forms by blocks; `test_contract` tests the rest."""

from __future__ import annotations

import functools
import itertools
from unittest import mock

import pytest
import torch
from helpers import (
    B,
    H,
    Largest,
    assert_all_close,
    boolean,
    needs_interpreter,
    output_and_gradients,
)
from helpers import qkv as any_qkv
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask

from derived_attention import (
    fixed_attention_reference,
    softmax_attention_reference,
    strided_attention_reference,
    window_attention_reference,
)
from derived_attention.common import flex, kernel_selftest, kernels
from derived_attention.common.masks import causal_mask
from derived_attention.sparse import core
from derived_attention.sparse.core import (
    fixed_attention,
    fixed_mask,
    strided_attention,
    strided_mask,
    window_attention,
    window_mask,
)

# For each pattern, the form by blocks, its reference and its mask.
WINDOW = window_attention, window_attention_reference, window_mask
STRIDED = strided_attention, strided_attention_reference, strided_mask
FIXED = fixed_attention, fixed_attention_reference, fixed_mask
PATTERNS = {f"window {w}": (WINDOW, {"window": w}) for w in (0, 1, 3, 40, 10**6)}
PATTERNS |= {f"stride {s}": (STRIDED, {"stride": s}) for s in (1, 2, 3, 8, 10**6)}
PATTERNS |= {
    f"fixed {s} {c}": (FIXED, {"stride": s, "summary": c})
    for s, c in [(1, 1), (3, 1), (4, 2), (4, 4), (8, 3), (10**6, 7)]
}
ONE_EACH = {name: PATTERNS[name] for name in ("window 3", "stride 3", "fixed 4 2")}
LENGTHS = [(1, 1), (7, 5), (24, 24), (70, 10), (10, 70), (70, 69)]


both_forms = pytest.mark.parametrize("dense", [0, 256], ids=["by blocks", "under a mask"])
N, M = 21, 23
qkv = functools.partial(any_qkv, n=N, m=M)


# --- the patterns ------------------------------------------------------------------------------

SETS = {
    "window 3": lambda i, j: j in range(i - 3, i + 4),
    "stride 3": lambda i, j: j in range(i - 2, i + 3) or (i - j) % 3 == 0,
    "fixed 4 2": lambda i, j: j // 4 == i // 4 or j % 4 in (2, 3),
}


@pytest.mark.parametrize("name", SETS)
def test_masks_are_the_sets(name):
    (_, _, mask), options = PATTERNS[name]
    for n, m in [(9, 9), (5, 12), (12, 5), (0, 3), (3, 0)]:
        for causal in (False, True):
            expected = [
                [SETS[name](i, j) and (j <= i or not causal) for j in range(m)] for i in range(n)
            ]
            made = mask(n, m, **options, is_causal=causal)
            assert made.dtype == torch.bool and made.shape == (n, m)
            assert made.tolist() == expected, f"{n}, {m}, causal {causal}"


def test_two_causal_layers_reach_every_earlier_key():
    for mask in (strided_mask, fixed_mask):
        for stride in (1, 4, 6):
            reach = mask(25, 25, stride, is_causal=True).double()
            assert torch.equal(reach @ reach > 0, causal_mask(25, 25)), f"{mask.__name__}, {stride}"


# --- the form by blocks equals the form under a mask -------------------------------------------


@both_forms
@pytest.mark.parametrize("pattern", PATTERNS)
def test_both_forms_are_softmax_under_the_mask(pattern, dense, monkeypatch):
    monkeypatch.setattr(core, "DENSE", dense)
    (fast, reference, make), own = PATTERNS[pattern]
    for n, m, causal in [(*lengths, c) for lengths in LENGTHS for c in (False, True)]:
        inputs = qkv((2,), n=n, m=m, d=3, dv=4)
        ours = output_and_gradients(fast, inputs, is_causal=causal, **own)
        allowed = make(n, m, **own, is_causal=causal)
        theirs = output_and_gradients(softmax_attention_reference, inputs, attn_mask=allowed)
        assert_all_close(ours, theirs, 1e-12, f"{n}, {m}, causal {causal}")
        assert bool((ours[0][:, ~allowed.any(-1)] == 0).all())
    for mask in (boolean(H, 1, M), torch.linspace(-3, 3, M, dtype=torch.float64)):
        forms = fast, reference
        results = [output_and_gradients(form, qkv(), attn_mask=mask, **own) for form in forms]
        assert_all_close(*results, 1e-12, f"{mask.dtype}")


@pytest.mark.parametrize("pattern", ONE_EACH)
def test_the_formula_takes_masks_that_differ_between_queries(pattern):
    (_, reference, make), own = PATTERNS[pattern]
    allowed, bias = make(N, M, **own), torch.linspace(-3, 3, N * M).view(N, M).double()
    closed = bias.masked_fill(~allowed, -torch.inf)
    for mask, together in ((boolean(N, M), allowed & boolean(N, M)), (bias, closed)):
        expected = softmax_attention_reference(*qkv(), attn_mask=together)
        assert_all_close([reference(*qkv(), attn_mask=mask, **own)], [expected], 1e-12)


def test_autocast_leaves_sums_of_blocks_in_float32(monkeypatch):
    monkeypatch.setattr(core, "DENSE", 0)
    inputs = qkv(dtype=torch.float32)
    exact = strided_attention_reference(*(x.double() for x in inputs), stride=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = strided_attention(*inputs, stride=3)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@both_forms
def test_window_keeps_the_fused_kernel(dense, monkeypatch):
    monkeypatch.setattr(core, "DENSE", dense)
    for leading in [(), (H,), (B, H)]:
        inputs = qkv(leading, n=70, m=70)
        for options in ({}, {"is_causal": True}, {"attn_mask": boolean(70)}):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises if no fused kernel applies
                output_and_gradients(window_attention, inputs, **options, window=5)


# --- errors --------------------------------------------------------------------------------------


OWN_BAD = [
    (WINDOW, {"window": -1}, ValueError, "window is -1; expected a whole number, at least 0"),
    (WINDOW, {"window": 2.0}, TypeError, "window is of type float; expected a whole number"),
    (STRIDED, {"stride": 0}, ValueError, "stride is 0; expected a whole number, at least 1"),
    (FIXED, {"stride": 0}, ValueError, "stride is 0; expected a whole number, at least 1"),
    (FIXED, {"stride": 3, "summary": 0}, ValueError, "summary is 0; expected a whole number, at"),
    (FIXED, {"stride": 3, "summary": 4}, ValueError, "summary is 4; expected at most the stride"),
]


def test_bad_patterns_are_named():
    q, k, v = qkv()
    for (*forms, mask), own, error, match in OWN_BAD:
        for form in forms:
            with pytest.raises(error, match=match):
                form(q, k, v, **own)
        with pytest.raises(error, match=match):
            mask(5, 5, **own)
    for (_, _, mask), own in ONE_EACH.values():
        with pytest.raises(ValueError, match="N is -1; expected a whole number, at least 0"):
            mask(-1, 3, **own)
        with pytest.raises(TypeError, match="M is of type float"):
            mask(3, 3.0, **own)


# --- FlexAttention: its kernel needs a GPU, and the interpreter runs its formula ------------------

SIZES = {"window": ((40,), (0,)), "strided": ((16,), (1,), (1000,)), "fixed": ((16, 3), (1, 1))}
SIZES["fixed"] += ((1000, 7),)
OPTIONS = {"window": ("window",), "strided": ("stride",), "fixed": ("stride", "summary")}
FUSED = {"window": window_attention, "strided": strided_attention, "fixed": fixed_attention}


def options_of(name):
    """Return the numbers of a pattern for which the forms are compared."""
    return [dict(zip(OPTIONS[name], sizes, strict=True)) for sizes in SIZES[name]]


@needs_interpreter
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(("n", "m"), [(7, 5), (160, 160), (130, 259), (259, 130)])
def test_flexattention_is_the_formula(name, n, m):
    keep = boolean(B, H, 1, m)
    keep[1, 0] = False  # a head without a key
    masks = [{}, {"is_causal": True}, {"attn_mask": boolean(m)}, {"attn_mask": keep}]
    masks += [{"attn_mask": boolean(B, 1, 1, m), "scale": 0.3}]
    form = FUSED[name]
    for own, mask in itertools.product(options_of(name), masks):
        run = functools.partial(form, fused=True, **own, **mask)
        formula = functools.partial(form.reference, **own, **mask)
        inputs = any_qkv(n=n, m=m)
        expected = output_and_gradients(formula, inputs)
        assert_all_close(output_and_gradients(run, inputs), expected, 1e-12, f"{own}, {mask}")
    assert mask["attn_mask"] is not keep and not run(*inputs, attn_mask=keep)[1, 0].any()


@needs_interpreter
@pytest.mark.parametrize("name", FUSED)
def test_flexattention_takes_any_leading_dimensions_and_shared_heads(name):
    form = functools.partial(FUSED[name], **dict.fromkeys(OPTIONS[name], 3))
    for leading in [(), (3,), (2, 1, 4)]:
        tensors = any_qkv(n=9, m=9, leading=leading)
        out = form(*tensors, fused=True)
        assert_all_close([out], [form(*tensors, fused=False)], 1e-12)
        single = [x.detach().float() for x in tensors]
        assert_all_close([form(*single, fused=True)], [out.float()], 1e-4)
    q, k, v = any_qkv(n=30, m=30, leading=(B, 4))
    for mask in ({}, {"attn_mask": boolean(B, 1, 1, 30)}):
        k, v = (x.detach()[:, :2].requires_grad_() for x in (k, v))
        run = functools.partial(form, enable_gqa=True, **mask)
        ways = [
            output_and_gradients(functools.partial(run, fused=fused), [q, k, v])
            for fused in (True, False)
        ]
        assert_all_close(*ways, 1e-12)
    empty = q[:, :, :0]
    assert form(empty, k, v, enable_gqa=True, fused=True).shape == (B, 4, 0, v.shape[-1])


def pairs_of(name, n, m, is_causal, sizes):
    """Return FlexAttention's pattern of a mechanism, its numbers, and the lengths n and m."""
    after = 0 if is_causal else flex.UNLIMITED
    if name == "window":
        return core.in_band, (sizes[0], 0 if is_causal else sizes[0]), n, m
    rows = max(-(-n // sizes[0]), -(-m // sizes[0]))
    if name == "strided":
        return core.in_same_column, (rows, *sizes, m, after), rows * sizes[0], rows * sizes[0]
    return core.in_block_or_summaries, (*sizes, m, after), n, m + -(-m // sizes[0]) * sizes[1]


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(list(FUSED)), st.integers(1, 600), st.integers(1, 600), st.integers(1, 200),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_listed_blocks_are_those_with_a_pair(name, n, m, size, is_causal, masked):
    """The table equals PyTorch's, which is computed from an (N, M) matrix."""
    sizes = (size, max(1, size // 3))[: len(OPTIONS[name])]
    pattern, numbers, n, m = pairs_of(name, n, m, is_causal, sizes)
    with mock.patch.object(flex, "ENTRIES", 2 * 128 * 700):  # few rows at a time
        flex._blocks.cache_clear()
        ours, tensors = flex._blocks(pattern, numbers, n, m, masked, torch.device("cpu"))
    apart = {"separate_full_blocks": not masked}
    theirs = create_block_mask(ours.mask_mod, 1, 1, n, m, device="cpu", **apart)
    assert ours.shape == theirs.shape and torch.equal(ours.to_dense(), theirs.to_dense())
    of_theirs = theirs.full_kv_num_blocks
    full = torch.zeros_like(ours.kv_num_blocks) if of_theirs is None else of_theirs
    assert torch.equal(ours.full_kv_num_blocks, full)
    again = flex._blocks(pattern, numbers, n, m, masked, torch.device("cpu"))
    assert again[0] is ours, "computed again for the same pattern, numbers, lengths and device"


def test_tables_and_calls_have_no_matrix_of_pairs(monkeypatch):
    """Only the code around the compiled kernel is tested; a stand-in replaces the kernel."""
    n = 4096

    def kernel(kind, *tensors):
        return lambda q, k, v, blocks, scale, lse: (q * v.sum() + k.sum(), q.sum(-1))

    monkeypatch.setattr(flex, "uses_interpreter", lambda: False)
    monkeypatch.setattr(flex, "_obstacle", lambda *_: "")
    monkeypatch.setattr(flex, "should_run_kernel", lambda *_, **__: True)
    monkeypatch.setattr(kernels, "GPUS", ("cpu",))
    monkeypatch.setattr(flex, "_formula", lambda *given: kernel(None)(*given))
    monkeypatch.setattr(flex, "ENTRIES", 128 * n)
    flex._blocks.cache_clear()
    for name, form in FUSED.items():
        own = dict.fromkeys(OPTIONS[name], 64) | ({"summary": 1} if name == "fixed" else {})
        inputs = any_qkv((1,), n=n, m=n, d=16, dv=16, dtype=torch.float32)
        for mask in ({}, {"is_causal": True}, {"attn_mask": boolean(n)}):
            with Largest() as largest:
                output_and_gradients(functools.partial(form, **own, **mask), inputs)
            assert largest.numel <= 128 * (n + 128), f"{name}, {mask}: {largest.numel} numbers"


def add_up(q, k, v, blocks, scale, lse):
    """Return a sum, which a CPU compiles faster than a call of FlexAttention."""
    return (q + k.sum() + v.sum()) * scale, None


@pytest.fixture
def compiled_kinds(monkeypatch):
    """Yield a function that calls `add_up`, compiled for the kind of the call."""
    monkeypatch.setattr(flex, "_call", add_up)
    monkeypatch.setattr(flex, "_shapes", {})
    monkeypatch.setattr(flex, "STATIC", 2)
    flex._kernel.cache_clear()
    compile = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile)
    torch._dynamo.reset()
    yield lambda q, k, v: flex._kernel_for((core.in_band,), q, k, v)(q, k, v, None, 0.5, False)[0]
    flex._kernel.cache_clear()
    torch._dynamo.reset()


def test_many_lengths_and_modes_stay_below_the_limit_of_compilations(compiled_kinds):
    with torch._dynamo.config.patch(cache_size_limit=1):
        for n, mode in itertools.product((5, 6, 7, 8, 9, 130, 260), (True, False)):
            inputs = any_qkv((1, 2), n=n, m=n)
            with torch.set_grad_enabled(mode):
                found = compiled_kinds(*inputs)
            torch.testing.assert_close(found, add_up(*inputs, None, 0.5, False)[0])
    assert [len(x) for x in flex._shapes.values()] == [2, 2], "with and without gradients"
    # Per mode: a function for each of two shapes, one for up to 128 tokens, and one for more.
    assert flex._kernel.cache_info().currsize == 2 * (2 + 2)


def test_an_excess_of_compilations_raises_an_error(compiled_kinds):
    """Beyond a limit, PyTorch runs a function eagerly, unless it has to be one graph."""
    run = flex._kernel(False, core.in_band)
    with torch._dynamo.config.patch(cache_size_limit=1):
        silent = torch.compile(add_up, dynamic=False)
        for n in (5, 6, 7):
            silent(*any_qkv((1, 2), n=n, m=n), None, 0.5, False)
        run(*any_qkv((1, 2), n=5, m=5), None, 0.5, False)
        with pytest.raises(Exception, match="fullgraph=True"):
            run(*any_qkv((1, 2), n=6, m=6), None, 0.5, False)


@needs_interpreter
def test_flexattention_says_where_it_cannot_run():
    q, k, v = any_qkv(n=5, m=5)
    run = functools.partial(window_attention, window=1, fused=True)
    with pytest.raises(ValueError, match="fused is True, and attn_mask has dtype torch.float64"):
        run(q, k, v, torch.zeros(5, dtype=torch.float64))
    with pytest.raises(ValueError, match="fused is True, and dropout_p is above 0"):
        run(q, k, v, dropout_p=0.5)
    with pytest.raises(
        ValueError, match=r"q and v have \[6, 257\] features; expected from 1 to 256"
    ):
        run(*any_qkv(n=3, m=3, d=257))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match="autocast is on, and q has dtype torch.float32"),
    ):
        run(*any_qkv(n=3, m=3, dtype=torch.float32))
    with pytest.raises(ValueError, match="a transform of torch.func is at work"):
        torch.func.vmap(run)(q, k, v)
    with pytest.raises(TypeError, match="fused is of type str"):
        window_attention(q, k, v, window=2, fused="yes")


@needs_interpreter
@pytest.mark.parametrize("name", FUSED)
def test_flexattention_is_tried_before_it_runs_by_default(name, monkeypatch, tmp_path):
    monkeypatch.setenv("DERIVED_ATTENTION_KERNELS", str(tmp_path))
    monkeypatch.setattr(kernel_selftest, "_verdicts", {})
    monkeypatch.setattr(kernels, "_may_try", lambda tensors: True)  # as if this were a GPU
    monkeypatch.setattr(kernels, "GPUS", ("cpu",))
    monkeypatch.setattr(kernels, "TRIED", 20)
    seen, formula = [], flex._formula

    def counted(q, *rest):
        seen.append(q.shape[-2])
        return formula(q, *rest)

    monkeypatch.setattr(flex, "_formula", counted)
    tensors = any_qkv(n=9, m=9, dtype=torch.float32)
    run = functools.partial(FUSED[name], *tensors, **dict.fromkeys(OPTIONS[name], 2))
    out, exact = run(), run(fused=False)
    tried = seen.count(20)
    assert tried and seen[-1] in (9, 10)
    torch.testing.assert_close(out, exact)
    run()
    assert seen.count(20) == tried
    before = len(seen)
    run(attn_mask=torch.zeros(9))  # an additive mask, for which there is no kernel
    assert len(seen) == before
    monkeypatch.setattr(kernel_selftest, "_verdicts", {})
    kernel_selftest.file_of("trusted", torch.device("cpu")).unlink()
    monkeypatch.setattr(flex, "_formula", lambda *given: [1.01 * x for x in formula(*given)])
    with pytest.warns(RuntimeWarning, match=f"FlexAttention for {name} fp32 .*is not exact enough"):
        out = run()
    assert torch.equal(out, exact)
