"""Sparse attention: the patterns, and their forms by blocks; the rest is in `test_contract`."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers import B, H, assert_all_close, boolean, needs_interpreter, output_and_gradients
from helpers import qkv as any_qkv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask

from derived_attention import (
    fixed_attention_reference,
    softmax_attention_reference,
    strided_attention_reference,
    window_attention_reference,
)
from derived_attention.common import kernel_selftest, kernels
from derived_attention.common.masks import causal_mask
from derived_attention.sparse import core, flex
from derived_attention.sparse.core import (
    fixed_attention,
    fixed_mask,
    strided_attention,
    strided_mask,
    window_attention,
    window_mask,
)

# The form by blocks, its reference and its mask.
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


# --- by blocks = by the mask -------------------------------------------------------------------


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
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises where no fused kernel will do
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


@needs_interpreter
@pytest.mark.parametrize(
    ("n", "m", "window"), [(7, 5, 3), (300, 300, 40), (130, 259, 3), (259, 130, 40)]
)
def test_flexattention_is_the_form_by_blocks(n, m, window):
    masks = [{}, {"is_causal": True}, {"attn_mask": boolean(m)}]
    keep = boolean(B, H, 1, m)
    keep[1, 0] = False  # a head with nothing to attend
    masks += [{"attn_mask": keep}, {"attn_mask": boolean(B, 1, 1, m), "scale": 0.3}]
    for dtype, tol in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        inputs = any_qkv(n=n, m=m, dtype=dtype)
        for mask in masks:
            run = functools.partial(window_attention, window=window, **mask)
            ways = [functools.partial(run, fused=fused) for fused in (True, False)]
            assert_all_close(*[output_and_gradients(way, inputs) for way in ways], tol)


@needs_interpreter
def test_flexattention_takes_any_leading_dimensions_and_shared_heads():
    form, options = window_attention, {"window": 3}
    for leading in [(), (3,), (2, 1, 4)]:
        tensors = any_qkv(n=9, m=9, leading=leading)
        out = form(*tensors, fused=True, **options)
        assert_all_close([out], [form(*tensors, fused=False, **options)], 1e-12)
    q, k, v = any_qkv(n=30, m=30, leading=(B, 4))
    for mask in ({}, {"attn_mask": boolean(B, 1, 1, 30)}):
        k, v = (x.detach()[:, :2].requires_grad_() for x in (k, v))
        run = functools.partial(form, enable_gqa=True, **options, **mask)
        ways = [
            output_and_gradients(functools.partial(run, fused=fused), [q, k, v])
            for fused in (True, False)
        ]
        assert_all_close(*ways, 1e-12)
    empty = q[:, :, :0]
    assert form(empty, k, v, enable_gqa=True, fused=True, **options).shape == (B, 4, 0, v.shape[-1])


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_blocks_of_a_window_are_those_of_pytorch(is_causal, monkeypatch):
    """Without an (N, M) matrix, and as many of its rows at a time as are set here."""
    monkeypatch.setattr(flex, "ENTRIES", 2 * 128 * 700)
    cpu = torch.device("cpu")
    flex._blocks.cache_clear()
    for n, m in [(700, 700), (513, 640), (640, 130), (1, 1)]:
        for masked in (False, True):
            ours = flex._blocks(150, n, m, is_causal, masked, cpu)
            pair = flex._pair(flex._window_tensor(cpu, 150), is_causal)
            apart = {"separate_full_blocks": not masked}
            theirs = create_block_mask(pair, 1, 1, n, m, device="cpu", **apart)
            assert ours.shape == theirs.shape and torch.equal(ours.to_dense(), theirs.to_dense())
            of_theirs = theirs.full_kv_num_blocks
            full = torch.zeros_like(ours.kv_num_blocks) if of_theirs is None else of_theirs
            assert torch.equal(ours.full_kv_num_blocks, full)
    again = flex._blocks(150, 1, 1, is_causal, True, cpu)
    assert again is ours, "made once for a window, its lengths and a device"


@needs_interpreter
def test_flexattention_says_where_it_cannot_run():
    q, k, v = any_qkv(n=5, m=5)
    run = functools.partial(window_attention, window=1, fused=True)
    with pytest.raises(ValueError, match="fused is True, and attn_mask has dtype torch.float64"):
        run(q, k, v, torch.zeros(5, dtype=torch.float64))
    with pytest.raises(ValueError, match="fused is True, and dropout_p is above 0"):
        run(q, k, v, dropout_p=0.5)
    with pytest.raises(ValueError, match="q or v has 257 features; expected at most 256"):
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
def test_a_window_is_tried_before_it_runs_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("DERIVED_ATTENTION_KERNELS", str(tmp_path))
    monkeypatch.setattr(kernel_selftest, "_verdicts", {})
    monkeypatch.setattr(kernels, "_may_try", lambda tensors: True)  # as if this were a GPU
    monkeypatch.setattr(kernels, "TRIED", 20)
    seen, formula = [], flex._formula

    def counted(q, *rest):
        seen.append(q.shape[-2])
        return formula(q, *rest)

    monkeypatch.setattr(flex, "_formula", counted)
    tensors = any_qkv(n=9, m=9, dtype=torch.float32)
    out = window_attention(*tensors, window=2)
    tried = seen.count(20)
    assert tried and seen[-1] == 9
    torch.testing.assert_close(out, window_attention(*tensors, window=2, fused=False))
    window_attention(*tensors, window=2)
    assert seen.count(20) == tried and seen[-1] == 9
    window_attention(*tensors, torch.zeros(9), window=2)  # numbers: nothing to try
    assert len(seen) == tried + 2
    monkeypatch.setattr(kernel_selftest, "_verdicts", {})
    kernel_selftest.file_of("trusted", torch.device("cpu")).unlink()
    monkeypatch.setattr(flex, "_formula", lambda *given: formula(*given) * 1.01)
    with pytest.warns(RuntimeWarning, match="kernel for window fp32 .*is not exact enough"):
        out = window_attention(*tensors, window=2)
    assert torch.equal(out, window_attention(*tensors, window=2, fused=False))
