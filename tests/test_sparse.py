"""Sparse attention: the patterns, and their forms by blocks; the rest is in `test_contract`."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers import B, H, assert_all_close, boolean, output_and_gradients
from helpers import qkv as any_qkv
from torch.nn.attention import SDPBackend, sdpa_kernel

from derived_attention.attention.frame.layer import MultiheadAttention
from derived_attention.attention.frame.masks import causal_mask
from derived_attention.attention.references import (
    fixed_attention_reference,
    softmax_attention_reference,
    strided_attention_reference,
    window_attention_reference,
)
from derived_attention.attention.softmax.fast import softmax_attention
from derived_attention.attention.sparse.fast import (
    fixed_attention,
    fixed_mask,
    strided_attention,
    strided_mask,
    window_attention,
    window_mask,
)
from derived_attention.training import measure

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


def test_patterns_of_a_picture_that_a_reader_can_check():
    strided = strided_mask(6, 6, 3, is_causal=True).int().tolist()
    assert strided == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [0, 1, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 1],
    ]
    fixed = fixed_mask(6, 6, 2, is_causal=True).int().tolist()
    assert fixed == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 1, 0, 1, 1, 0],
        [0, 1, 0, 1, 1, 1],
    ]


def test_two_causal_layers_reach_every_earlier_key():
    for mask in (strided_mask, fixed_mask):
        for stride in (1, 4, 6):
            reach = mask(25, 25, stride, is_causal=True).double()
            assert torch.equal(reach @ reach > 0, causal_mask(25, 25)), f"{mask.__name__}, {stride}"


def test_patterns_that_are_everything_are_softmax_attention():
    everything = [(WINDOW, {"window": 23}), (STRIDED, {"stride": 1}), (STRIDED, {"stride": 24})]
    everything += [(FIXED, {"stride": 23}), (FIXED, {"stride": 4, "summary": 4})]
    for (fast, _, mask), options in everything:
        assert bool(mask(N, M, **options).all())
        expected = softmax_attention(*qkv())
        torch.testing.assert_close(fast(*qkv(), **options), expected, rtol=1e-12, atol=1e-12)


# --- by blocks = by the mask -------------------------------------------------------------------


@pytest.mark.parametrize("family", ["window", "stride", "fixed"])
def test_forms_by_blocks_are_softmax_under_the_mask(family):
    for pattern, ((fast, reference, make), own) in PATTERNS.items():
        if not pattern.startswith(family):
            continue
        for n, m, causal in [(*lengths, c) for lengths in LENGTHS for c in (False, True)]:
            inputs = qkv((2,), n=n, m=m, d=3, dv=4)
            ours = output_and_gradients(fast, inputs, is_causal=causal, **own)
            allowed = make(n, m, **own, is_causal=causal)
            theirs = output_and_gradients(softmax_attention_reference, inputs, attn_mask=allowed)
            assert_all_close(ours, theirs, 1e-12, f"{pattern}, {n}, {m}, causal {causal}")
            assert bool((ours[0][:, ~allowed.any(-1)] == 0).all())
        for mask in (boolean(H, 1, M), torch.linspace(-3, 3, M, dtype=torch.float64)):
            results = [
                output_and_gradients(form, qkv(), attn_mask=mask, **own)
                for form in (fast, reference)
            ]
            assert_all_close(*results, 1e-12, f"{pattern}, {mask.dtype}")


@pytest.mark.parametrize("pattern", ONE_EACH)
def test_the_formula_takes_masks_that_differ_between_queries(pattern):
    (_, reference, make), own = PATTERNS[pattern]
    allowed, bias = make(N, M, **own), torch.linspace(-3, 3, N * M).view(N, M).double()
    closed = bias.masked_fill(~allowed, -torch.inf)
    for mask, together in ((boolean(N, M), allowed & boolean(N, M)), (bias, closed)):
        expected = softmax_attention_reference(*qkv(), attn_mask=together)
        assert_all_close([reference(*qkv(), attn_mask=mask, **own)], [expected], 1e-12)


@pytest.mark.parametrize("pattern", ["stride 3", "fixed 4 2"])
def test_autocast_leaves_sums_in_float32(pattern):
    (fast, reference, _), own = PATTERNS[pattern]
    inputs = qkv(dtype=torch.float32)
    exact = reference(*(x.double() for x in inputs), **own)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fast(*inputs, **own)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


# --- no matrix in memory ------------------------------------------------------------

LONG = {"window": (WINDOW, {"window": 16}), "strided": (STRIDED, {"stride": 24})}
LONG |= {"fixed": (FIXED, {"stride": 24, "summary": 2})}


def test_window_keeps_the_fused_kernel():
    for leading in [(), (H,), (B, H)]:
        inputs = qkv(leading, n=70, m=70)
        for options in ({}, {"is_causal": True}, {"attn_mask": boolean(70)}):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises where no fused kernel will do
                fast = output_and_gradients(window_attention, inputs, **options, window=5)
            slow = output_and_gradients(window_attention_reference, inputs, **options, window=5)
            assert_all_close(fast, slow, 1e-12, f"{leading}, {options}")


@pytest.mark.parametrize("name", LONG)
def test_memory_grows_with_the_length_and_not_its_square(name):
    (fast, reference, _), own = LONG[name]

    def peak(form, n):
        # A stride near √N, as its docstring says: 24 at 512, 34 at 1024.
        options = own if "window" in own else {**own, "stride": round((n * 1.1) ** 0.5)}
        inputs = qkv((2,), n=n, m=n, d=16, dv=16, dtype=torch.float32)
        options = {**options, "is_causal": True}
        return measure.peak_bytes(
            lambda: output_and_gradients(form, inputs, **options), device="cpu"
        )

    # N √N grows by 2.83, N² by 4.
    assert peak(fast, 1024) / peak(fast, 512) < (2.5 if name == "window" else 3.1)
    assert peak(reference, 1024) / peak(reference, 512) > 3.5


# --- in a layer, errors --------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ONE_EACH)
def test_weights_of_a_layer_show_the_pattern(pattern):
    (fast, _, make), own = PATTERNS[pattern]
    layer = MultiheadAttention(12, 3, attention=functools.partial(fast, **own))
    x, padding = torch.randn(2, 9, 12), torch.arange(9) >= torch.tensor([[6], [9]])
    _, A = layer(x, x, x, padding, average_attn_weights=False)
    expected = (make(9, 9, **own) & ~padding[:, None])[:, None].expand(2, 3, 9, 9)
    assert torch.equal(A > 0, expected)


OWN_BAD = [
    (WINDOW, {"window": -1}, ValueError, "window is -1; expected a whole number, at least 0"),
    (WINDOW, {"window": 2.0}, TypeError, "window is of type float; expected a whole number"),
    (STRIDED, {"stride": 0}, ValueError, "stride is 0; expected a whole number, at least 1"),
    (STRIDED, {"stride": None}, TypeError, "stride is of type NoneType"),
    (FIXED, {"stride": 0}, ValueError, "stride is 0; expected a whole number, at least 1"),
    (FIXED, {"stride": True}, TypeError, "stride is of type bool"),
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
