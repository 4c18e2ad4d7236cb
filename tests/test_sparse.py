"""Sparse attention: the patterns, and their forms by blocks."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from derived_attention import measure
from derived_attention.attention.softmax import (
    MultiheadAttention,
    causal_mask,
    softmax_attention,
    softmax_attention_reference,
)
from derived_attention.attention.sparse import (
    BLOCK,
    fixed_attention,
    fixed_attention_reference,
    fixed_mask,
    strided_attention,
    strided_attention_reference,
    strided_mask,
    window_attention,
    window_attention_reference,
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

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}
B, H, N, M, D, DV = 2, 3, 21, 23, 8, 6


def tensors(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    return [x.to(dtype).requires_grad_() for x in made]


def qkv(leading=(B, H), n=N, m=M, d=D, dv=DV, **options):
    return tensors((*leading, n, d), (*leading, m, d), (*leading, m, dv), **options)


def output_and_gradients(function, inputs, **options):
    """The output, and the gradients of a fixed linear functional of it."""
    out = function(*inputs, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype)
    return out, *torch.autograd.grad((out * weights.view_as(out)).sum(), inputs)


def assert_all_close(left, right, tol):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def boolean(*shape, seed=1):
    """A random boolean mask whose rows all keep at least one key."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    return mask | (torch.arange(shape[-1]) == 0)


# Masks that are the same for every query: what the forms by blocks take.
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "boolean padding": {"attn_mask": boolean(B, 1, 1, M)},
    "boolean per head": {"attn_mask": boolean(H, 1, M)},
    "boolean (M,)": {"attn_mask": boolean(M)},
    "boolean ()": {"attn_mask": torch.tensor(True)},
    "nothing": {"attn_mask": torch.zeros(B, 1, 1, 1).bool()},
    "float padding": {"attn_mask": torch.zeros(B, 1, 1, M).masked_fill(~boolean(M), -math.inf)},
    "float": {"attn_mask": torch.linspace(-3, 3, M, dtype=torch.float64)},
    "scale": {"scale": 0.7},
}


# --- the patterns ------------------------------------------------------------------------------

SETS = {
    "window 3": lambda i, j: j in range(i - 3, i + 4),
    "stride 3": lambda i, j: j in range(i - 2, i + 3) or (i - j) % 3 == 0,
    "fixed 4 2": lambda i, j: j // 4 == i // 4 or j % 4 in (2, 3),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(9, 9), (5, 12), (12, 5), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("name", SETS)
def test_masks_are_the_sets(name, lengths, causal):
    (_, _, mask), options = PATTERNS[name]
    expected = [
        [SETS[name](i, j) and (j <= i or not causal) for j in range(lengths[1])]
        for i in range(lengths[0])
    ]
    made = mask(*lengths, **options, is_causal=causal)
    assert made.dtype == torch.bool and made.shape == lengths
    assert made.tolist() == expected


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


@pytest.mark.parametrize("stride", [1, 4, 6])
@pytest.mark.parametrize("mask", [strided_mask, fixed_mask])
def test_two_causal_layers_reach_every_earlier_key(mask, stride):
    reach = mask(25, 25, stride, is_causal=True).double()
    assert torch.equal(reach @ reach > 0, causal_mask(25, 25))


def test_patterns_that_are_everything_are_softmax_attention():
    everything = [(WINDOW, {"window": 23}), (STRIDED, {"stride": 1}), (STRIDED, {"stride": 24})]
    everything += [(FIXED, {"stride": 23}), (FIXED, {"stride": 4, "summary": 4})]
    for (fast, _, mask), options in everything:
        assert bool(mask(N, M, **options).all())
        expected = softmax_attention(*qkv())
        torch.testing.assert_close(fast(*qkv(), **options), expected, rtol=1e-12, atol=1e-12)


# --- by blocks = by the mask -------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_fast_equals_reference(pattern, name):
    (fast, reference, _), own = PATTERNS[pattern]
    results = (output_and_gradients(f, qkv(), **MASKS[name], **own) for f in (fast, reference))
    assert_all_close(*results, 1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_lengths(pattern, lengths, causal):
    (fast, _, mask), own = PATTERNS[pattern]
    inputs = qkv((2,), n=lengths[0], m=lengths[1], d=3, dv=4)
    ours = output_and_gradients(fast, inputs, is_causal=causal, **own)
    allowed = mask(*lengths, **own, is_causal=causal)
    theirs = output_and_gradients(softmax_attention_reference, inputs, attn_mask=allowed)
    assert_all_close(ours, theirs, 1e-12)
    assert bool((ours[0][:, ~allowed.any(-1)] == 0).all())


@pytest.mark.parametrize("leading", [(), (H,), (2, B, H)], ids=str)
@pytest.mark.parametrize("name", ["none", "causal", "boolean (M,)", "float"])
@pytest.mark.parametrize("pattern", ONE_EACH)
def test_any_leading_dimensions(pattern, name, leading):
    (fast, reference, _), own = PATTERNS[pattern]
    inputs = qkv(leading, dv=D + 3)
    results = (output_and_gradients(f, inputs, **MASKS[name], **own) for f in (fast, reference))
    assert_all_close(*results, 1e-12)


@pytest.mark.parametrize("lengths", [(5, 5), (2 * BLOCK + 1, 2 * BLOCK - 3)], ids=str)
@pytest.mark.parametrize("pattern", ONE_EACH)
def test_gradient_of_a_float_mask(pattern, lengths):
    (fast, reference, _), own = PATTERNS[pattern]
    inputs = [*qkv(n=lengths[0], m=lengths[1]), *tensors((B, 1, 1, lengths[1]), seed=3)]

    def with_mask(form):
        return lambda q, k, v, mask: form(q, k, v, attn_mask=mask, **own)

    results = [output_and_gradients(with_mask(form), inputs) for form in (fast, reference)]
    assert bool((results[0][-1] != 0).any())
    assert_all_close(*results, 1e-12)


@pytest.mark.parametrize("pattern", ONE_EACH)
def test_gradcheck(pattern):
    (fast, _, _), own = PATTERNS[pattern]
    inputs, keep = qkv((1, 2), n=6, m=7, d=2, dv=2), boolean(7)
    assert torch.autograd.gradcheck(lambda q, k, v: fast(q, k, v, attn_mask=keep, **own), inputs)


@pytest.mark.parametrize("pattern", ONE_EACH)
def test_reference_takes_any_mask_and_the_fast_form_says_that_it_does_not(pattern):
    (fast, reference, make), own = PATTERNS[pattern]
    allowed = make(N, M, **own)
    for mask in (boolean(N, M), torch.linspace(-3, 3, N * M).view(N, M).double()):
        together = (
            allowed & mask if mask.dtype == torch.bool else mask.masked_fill(~allowed, -math.inf)
        )
        expected = softmax_attention_reference(*qkv(), attn_mask=together)
        torch.testing.assert_close(reference(*qkv(), attn_mask=mask, **own), expected)
        with pytest.raises(ValueError, match=r"attn_mask has shape \(21, 23\).*size 1.*reference"):
            fast(*qkv(), attn_mask=mask, **own)


EMPTY = {"no batch": ((0, H), N, M), "no head": ((B, 0), N, M)}
EMPTY |= {"no query": ((B, H), 0, M), "no key": ((B, H), N, 0), "nothing": ((0, 0), 0, 0)}


@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("pattern", ONE_EACH)
def test_empty_inputs(pattern, shape):
    (fast, _, _), own = PATTERNS[pattern]
    leading, n, m = shape
    for options in ({}, {"is_causal": True}, {"attn_mask": torch.ones(m).bool()}):
        results = output_and_gradients(fast, qkv(leading, n=n, m=m), **options, **own)
        assert results[0].shape == (*leading, n, DV)
        assert all(bool((x == 0).all()) for x in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["none", "causal", "boolean padding", "float padding", "nothing"])
@pytest.mark.parametrize("pattern", ONE_EACH)
def test_dtypes(pattern, name, dtype):
    (fast, reference, _), own = PATTERNS[pattern]
    inputs = qkv(dtype=dtype)
    results = output_and_gradients(fast, inputs, **MASKS[name], **own)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    exact = output_and_gradients(reference, exact, **MASKS[name], **own)
    assert all(x.dtype == dtype for x in results)
    assert_all_close([x.double() for x in results], exact, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", ONE_EACH)
def test_half_precision_error_is_one_rounding_or_so(pattern, dtype):
    (fast, reference, _), own = PATTERNS[pattern]
    inputs = qkv(n=90, m=90, d=32, dv=32, dtype=dtype)
    exact = reference(*(x.detach().double() for x in inputs), **own)
    error = (fast(*inputs, **own).double() - exact).norm() / exact.norm()
    assert error < torch.finfo(dtype).eps


@pytest.mark.parametrize("pattern", ONE_EACH)
def test_large_scores_do_not_overflow(pattern):
    (fast, _, _), own = PATTERNS[pattern]
    q, k, v = qkv(dtype=torch.float32)
    results = output_and_gradients(lambda q, k, v: fast(300 * q, 300 * k, v, **own), [q, k, v])
    assert all(bool(x.isfinite().all()) for x in results)


@pytest.mark.parametrize("pattern", ONE_EACH)
def test_autocast(pattern):
    (fast, reference, _), own = PATTERNS[pattern]
    inputs = qkv(dtype=torch.float32)
    exact = reference(*(x.double() for x in inputs), **own)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, mixed = fast(*inputs, **own), fast(inputs[0].bfloat16(), *inputs[1:], **own)
    for x in (out, mixed):
        torch.testing.assert_close(x.double(), exact, rtol=3e-2, atol=3e-2)
    assert mixed.dtype == torch.bfloat16
    if fast is not window_attention:  # which is PyTorch's own, in bfloat16
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [(6, 6), (4, 9), (9, 4), (70, 70)], ids=str)
@pytest.mark.parametrize("pattern", ONE_EACH)
def test_causal_attention_sees_no_future(pattern, lengths):
    (fast, _, _), own = PATTERNS[pattern]
    n, m = lengths
    q, k, v = qkv((2,), n=n, m=m, dtype=torch.float32)
    out = fast(q, k, v, is_causal=True, **own)
    last = min(n, m) - 1
    for t in range(last) if last < 10 else (0, 31, 32, 33, last - 1):
        noise = torch.zeros(m, 1)
        noise[t + 1 :] = 5
        changed = fast(q, k + noise, v - 3 * noise, is_causal=True, **own)
        assert torch.equal(out[..., : t + 1, :], changed[..., : t + 1, :])
        assert not torch.equal(out[..., t + 1 :, :], changed[..., t + 1 :, :])
        dk, dv = torch.autograd.grad(out[..., : t + 1, :].sum(), [k, v], retain_graph=True)
        assert bool((dk[..., t + 1 :, :] == 0).all()) and bool((dv[..., t + 1 :, :] == 0).all())


# --- no matrix in memory, compilers ------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in made]
        self.numel = max([self.numel, *sizes])
        return out


LONG = {"window": (WINDOW, {"window": 16}), "strided": (STRIDED, {"stride": 24})}
LONG |= {"fixed": (FIXED, {"stride": 24, "summary": 2})}


@pytest.mark.parametrize("masked", ["none", "causal", "padding"])
@pytest.mark.parametrize("name", LONG)
def test_no_matrix_is_stored(name, masked):
    (fast, reference, _), own = LONG[name]
    n = 600
    inputs = qkv((2,), n=n, m=n, d=8, dv=8)
    options = {"attn_mask": boolean(n)} if masked == "padding" else {}
    options["is_causal"] = masked == "causal"
    sizes = []
    for form in (fast, reference):
        with Largest() as largest:
            output_and_gradients(form, inputs, **options, **own)
        sizes.append(largest.numel)
    assert sizes[1] >= 2 * n * n, "the recorder must see the reference's matrix"
    # Masks are stored once for all heads; scores are 3 · 24 + 600 / 24 per position, a sixth.
    assert sizes[0] < 2 * n * n / 5


@pytest.mark.parametrize("masked", ["none", "causal", "padding"])
@pytest.mark.parametrize("leading", [(), (H,), (B, H)], ids=str)
def test_window_keeps_the_fused_kernel(leading, masked):
    inputs = qkv(leading, n=70, m=70)
    options = {"attn_mask": boolean(70)} if masked == "padding" else {}
    options |= {"is_causal": masked == "causal", "window": 5}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises where no fused kernel will do
        fast = output_and_gradients(window_attention, inputs, **options)
    assert_all_close(
        fast, output_and_gradients(window_attention_reference, inputs, **options), 1e-12
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LONG)
def test_memory_grows_with_the_length_and_not_its_square(name, causal):
    (fast, reference, _), own = LONG[name]

    def peak(form, n):
        # A stride near √N, as its docstring says: 24 at 512, 34 at 1024.
        options = own if "window" in own else {**own, "stride": round((n * 1.1) ** 0.5)}
        inputs = qkv((2,), n=n, m=n, d=16, dv=16, dtype=torch.float32)
        options = {**options, "is_causal": causal}
        return measure.peak_bytes(
            lambda: output_and_gradients(form, inputs, **options), device="cpu"
        )

    # N √N grows by 2.83, N² by 4.
    assert peak(fast, 1024) / peak(fast, 512) < (2.5 if name == "window" else 3.1)
    assert peak(reference, 1024) / peak(reference, 512) > 3.5


@pytest.mark.parametrize("name", ["causal", "float padding"])
@pytest.mark.parametrize("pattern", ONE_EACH)
def test_compiles_without_a_break(pattern, name):
    torch._dynamo.reset()
    (fast, _, _), own = PATTERNS[pattern]
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    ours = output_and_gradients(compiled, qkv(), **MASKS[name], **own)
    assert_all_close(ours, output_and_gradients(fast, qkv(), **MASKS[name], **own), 1e-12)


@pytest.mark.parametrize("pattern", ONE_EACH)
def test_compiles_for_lengths_that_change(pattern):
    torch._dynamo.reset()
    (fast, _, _), own = PATTERNS[pattern]
    compiled = torch.compile(fast, fullgraph=True, dynamic=True, backend="eager")
    for n in (40, 50):
        inputs = qkv((), n=n, m=n)
        torch.testing.assert_close(compiled(*inputs, **own), fast(*inputs, **own))


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(sorted(PATTERNS)),
    st.lists(st.integers(1, 3), max_size=3).map(tuple),
    st.tuples(st.integers(0, 50), st.integers(0, 50)),
    st.sampled_from(["none", "causal", "boolean", "float"]),
    st.integers(0, 99),
)
def test_fast_equals_reference_for_any_shape(pattern, leading, lengths, kind, seed):
    (fast, reference, _), own = PATTERNS[pattern]
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(1, lengths[1], generator=generator) > 0.5
    bias = torch.randn(keep.shape, generator=generator).masked_fill(~keep, -math.inf)
    masks = {"boolean": {"attn_mask": keep}, "float": {"attn_mask": bias}}
    options = {**own, **masks.get(kind, {"is_causal": kind == "causal"})}
    inputs = qkv(leading, n=lengths[0], m=lengths[1], d=3, dv=2, seed=seed)
    results = [output_and_gradients(form, inputs, **options) for form in (fast, reference)]
    assert all(bool(x.isfinite().all()) for x in results[0])
    assert_all_close(*results, 1e-10)


# --- in a layer --------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ONE_EACH)
def test_in_layers_with_padding_and_weights(pattern):
    torch.manual_seed(0)
    (fast, _, make), own = PATTERNS[pattern]
    attention = functools.partial(fast, **own)
    layer = MultiheadAttention(12, 3, attention=attention)
    x, padding = torch.randn(2, 9, 12), torch.arange(9) >= torch.tensor([[6], [9]])
    out, A = layer(x, x, x, key_padding_mask=padding, average_attn_weights=False)
    expected = (make(9, 9, **own) & ~padding[:, None])[:, None].expand(2, 3, 9, 9)
    assert torch.equal(A > 0, expected)
    without, _ = layer(x, x, x, key_padding_mask=padding, need_weights=False)
    torch.testing.assert_close(out, without)
    encoder = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True).eval()
    encoder.self_attn = MultiheadAttention(12, 3, attention=attention).eval()
    shorter = encoder(x[:1, :6])[0]
    torch.testing.assert_close(
        encoder(x, src_key_padding_mask=padding)[0, :6], shorter, rtol=1e-5, atol=1e-5
    )


# --- errors ------------------------------------------------------------------------------------

X = torch.zeros(B, H, 5, D)
BAD = {
    "q: not a tensor": (TypeError, "q is of type list", {"q": [1.0]}),
    "k: D": (ValueError, r"k has shape .*7\); expected \(2, 3, 5, 8\)", {"k": X[..., :7]}),
    "mask: shape": (ValueError, r"attn_mask has shape \(5, 4\)", {"attn_mask": torch.ones(5, 4)}),
    "mask: NaN": (ValueError, "attn_mask contains NaN", {"attn_mask": torch.full((5,), math.nan)}),
    "both": (ValueError, "attn_mask and is_c", {"attn_mask": torch.ones(5), "is_causal": True}),
    "scale": (ValueError, "scale is 0; expected a finite positive number", {"scale": 0}),
}
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


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("pattern", ONE_EACH)
def test_bad_argument_is_named(pattern, bad):
    (fast, reference, _), own = PATTERNS[pattern]
    error, match, changed = bad
    for form in (fast, reference):
        with pytest.raises(error, match=match):
            form(**{"q": X, "k": X, "v": X, **changed, **own})


@pytest.mark.parametrize("functions, own, error, match", OWN_BAD)
def test_bad_pattern_is_named(functions, own, error, match):
    *forms, mask = functions
    for form in forms:
        with pytest.raises(error, match=match):
            form(X, X, X, **own)
    with pytest.raises(error, match=match):
        mask(5, 5, **own)


@pytest.mark.parametrize("pattern", ONE_EACH)
def test_lengths_of_a_mask_are_checked(pattern):
    (_, _, mask), own = PATTERNS[pattern]
    with pytest.raises(ValueError, match="N is -1; expected a whole number, at least 0"):
        mask(-1, 3, **own)
    with pytest.raises(TypeError, match="M is of type float"):
        mask(3, 3.0, **own)


@pytest.mark.parametrize("pattern", ONE_EACH)
def test_on_a_device_without_data(pattern):
    (fast, _, _), own = PATTERNS[pattern]
    assert fast(*(X.to("meta") for _ in range(3)), **own).shape == X.shape
