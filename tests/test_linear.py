"""Linear attention: the formula, the form without a matrix, causal by chunks, feature maps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from derived_attention import measure
from derived_attention.attention import linear
from derived_attention.attention.checks import check_count, check_key_mask
from derived_attention.attention.linear import (
    CHUNK,
    SEGMENT,
    elu_feature_map,
    linear_attention,
    linear_attention_reference,
    linear_attention_weights,
)
from derived_attention.attention.softmax import (
    MultiheadAttention,
    causal_mask,
    softmax_attention_reference,
)

FORMS = [linear_attention, linear_attention_reference]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float64: 1e-12,
    torch.bfloat16: 5e-2,
    torch.float16: 5e-3,
}
B, H, N, M, D, DV = 2, 3, 5, 7, 8, 6


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


# Masks that are the same for every query: what the form without a matrix takes.
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "boolean padding": {"attn_mask": boolean(B, 1, 1, M)},
    "boolean per head": {"attn_mask": boolean(H, 1, M)},
    "boolean (M,)": {"attn_mask": boolean(M)},
    "boolean ()": {"attn_mask": torch.tensor(True)},
    "float padding": {"attn_mask": torch.zeros(B, 1, 1, M).masked_fill(~boolean(M), -math.inf)},
    "float": {"attn_mask": torch.linspace(-3, 3, M)},
    "float full": {"attn_mask": torch.linspace(-3, 3, B * H * M).view(B, H, 1, M)},
    "float of size 1": {"attn_mask": torch.full((H, 1, 1), 0.5)},
    "scale": {"scale": 0.3},
}
# Masks that only the reference takes.
GENERAL = {
    "boolean (N, M)": boolean(N, M),
    "boolean full": boolean(B, H, N, M),
    "boolean per query": boolean(N, 1),
    "float (N, M)": torch.linspace(-3, 3, N * M).view(N, M).masked_fill(~boolean(N, M), -math.inf),
}


# --- the formula -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "causal", "boolean per head", "float", "scale"])
def test_weights_are_the_formula_entry_by_entry(name):
    options = MASKS[name]
    q, k, _ = (x.detach() for x in qkv((H,)))
    A = linear_attention_weights(q, k, **options)
    mask, scale = options.get("attn_mask"), options.get("scale", 1)
    if name == "causal":
        mask = causal_mask(N, M)
    factor = torch.ones(()) if mask is None else mask if mask.dtype == torch.bool else mask.exp()
    factor = factor.expand(H, N, M)

    def phi(x):
        return [math.exp(t) if t <= 0 else t + 1 for t in x.tolist()]

    for h in range(H):
        for i in range(N):
            row = [
                float(factor[h, i, j])
                * sum(a * b for a, b in zip(phi(scale * q[h, i]), phi(k[h, j]), strict=True))
                for j in range(M)
            ]
            for j in range(M):
                assert A[h, i, j].item() == pytest.approx(row[j] / sum(row), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("leading", [(), (H,), (B, H), (2, B, H)], ids=str)
@pytest.mark.parametrize("dv", [DV, D + 3])
def test_fast_equals_reference(name, leading, dv):
    options = MASKS[name]
    if "attn_mask" in options and options["attn_mask"].dim() > len(leading) + 2:
        leading = (B, H)  # what this mask was made for
    fast, reference = (output_and_gradients(f, qkv(leading, dv=dv), **options) for f in FORMS)
    assert_all_close(fast, reference, 1e-12)


@pytest.mark.parametrize("name", GENERAL)
def test_reference_takes_any_mask_and_the_fast_form_says_that_it_does_not(name):
    mask = GENERAL[name]
    A = linear_attention_weights(*qkv()[:2], attn_mask=mask)
    keep = mask if mask.dtype == torch.bool else mask != -math.inf
    assert bool((A[~keep.expand_as(A)] == 0).all()) and bool((A[keep.expand_as(A)] > 0).all())
    alive = keep.expand_as(A).any(-1).double()
    torch.testing.assert_close(A.sum(-1), alive)
    out = linear_attention_reference(*qkv(), attn_mask=mask)
    torch.testing.assert_close(out, A @ qkv()[2])
    with pytest.raises(ValueError, match=r"attn_mask has shape .*size 1 in place of N.*reference"):
        linear_attention(*qkv(), attn_mask=mask)


# Lengths around the chunk and the segment, with as many keys, fewer and more.
LENGTHS = [(1, 1), (2, 1), (CHUNK - 1, CHUNK - 1), (CHUNK, CHUNK), (CHUNK + 1, CHUNK + 1)]
LENGTHS += [(3 * CHUNK + 5, CHUNK + 2), (CHUNK + 2, 3 * CHUNK + 5), (2 * CHUNK, 5)]
LENGTHS += [(SEGMENT, SEGMENT), (SEGMENT + CHUNK + 3, SEGMENT - 7), (SEGMENT + 1, SEGMENT + 9)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_causal_by_chunks_equals_the_triangle(lengths):
    n, m = lengths
    inputs = qkv((2,), n=n, m=m, d=4, dv=3)
    fast = output_and_gradients(linear_attention, inputs, is_causal=True)
    for options in ({"is_causal": True}, {"attn_mask": causal_mask(n, m)}):
        reference = output_and_gradients(linear_attention_reference, inputs, **options)
        assert_all_close(fast, reference, 1e-11)


def test_one_segment_as_off_the_cpu_gives_the_same(monkeypatch):
    inputs = qkv((H,), n=SEGMENT + 70, m=SEGMENT + 70)
    several = output_and_gradients(linear_attention, inputs, is_causal=True)
    monkeypatch.setattr(linear, "SEGMENT", 10**6)
    assert_all_close(several, output_and_gradients(linear_attention, inputs, is_causal=True), 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form):
    keep = torch.tensor([True, False, True, True])
    inputs = qkv((1, 2), n=3, m=4, d=3, dv=2)
    assert torch.autograd.gradcheck(lambda q, k, v: form(q, k, v, attn_mask=keep), inputs)
    assert torch.autograd.gradcheck(lambda q, k, v: form(q, k, v, is_causal=True), inputs)
    bias = tensors((2, 1, 4), seed=2)[0]
    assert torch.autograd.gradcheck(lambda q, k, v, b: form(q, k, v, attn_mask=b), [*inputs, bias])


# --- feature maps ------------------------------------------------------------------------------


def test_elu_feature_map_keeps_small_values_and_its_slope():
    x = torch.tensor([-80.0, -20.0, -1.0, -1e-9, 0.0, 1e-9, 1.0, 50.0], requires_grad=True)
    phi = elu_feature_map(x)
    exact = torch.where(x > 0, x.double() + 1, x.double().exp())
    torch.testing.assert_close(phi.double(), exact, rtol=1e-5, atol=0)
    assert float((nn.functional.elu(x.detach()) + 1)[1]) == 0, (
        "the usual way loses what this test is for"
    )
    slope = torch.autograd.grad(phi.sum(), x)[0]
    torch.testing.assert_close(slope.double(), torch.where(x > 0, 1.0, exact), rtol=1e-5, atol=0)


MAPS = {
    "relu": torch.relu,
    "square, twice as wide": lambda x: torch.cat([x, -x], -1).relu().square(),
    "one feature": lambda x: x[..., :1].exp(),
    "softmax of the features": lambda x: x.softmax(-1),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_any_feature_map(name, causal):
    options = {"feature_map": MAPS[name], "is_causal": causal}
    fast, reference = (output_and_gradients(f, qkv(n=70, m=70), **options) for f in FORMS)
    assert_all_close(fast, reference, 1e-11)


@pytest.mark.parametrize("causal", [False, True])
def test_a_feature_map_with_parameters_learns(causal):
    layer = nn.Sequential(nn.Linear(D, 4), nn.Softplus()).double()
    gradients = []
    for form in FORMS:
        out = form(*qkv(n=70, m=70), feature_map=layer, is_causal=causal)
        gradients.append(torch.autograd.grad(out.square().sum(), list(layer.parameters())))
    assert bool((gradients[0][0] != 0).any())
    assert_all_close(*gradients, 1e-10)


def test_scale_reads_as_softmax_reads_it():
    """With random features of the exponential, linear attention with a scale nears softmax's."""
    q, k, v = (x.detach() / 2 for x in qkv((), d=3))
    w = torch.randn(3, 200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def positive_random(x):
        return (x @ w - x.square().sum(-1, keepdim=True) / 2).exp()

    out = linear_attention(q, k, v, feature_map=positive_random, scale=0.4)
    torch.testing.assert_close(
        out, softmax_attention_reference(q, k, v, scale=0.4), rtol=0, atol=1e-2
    )
    assert not torch.allclose(
        out, softmax_attention_reference(q, k, v, scale=1.0), rtol=0, atol=2e-2
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_query_without_features_gets_zeros(form, causal):
    q, k, v = (x.detach().abs().requires_grad_() for x in qkv())
    with torch.no_grad():
        q[:, :, 2] = 0
    out, dq, dk, dv = output_and_gradients(
        form, [q, k, v], feature_map=lambda x: 2 * x, is_causal=causal
    )
    assert bool((out[:, :, 2] == 0).all()) and bool((dq[:, :, 2] == 0).all())
    assert all(bool(x.isfinite().all()) for x in (out, dq, dk, dv)) and bool((dk != 0).any())


# --- masks, small shapes, dtypes ---------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_zero_and_minus_infinity_are_true_and_false(form):
    keep = boolean(B, 1, 1, M)
    added = torch.zeros(keep.shape).masked_fill(~keep, -math.inf)
    results = [output_and_gradients(form, qkv(), attn_mask=mask) for mask in (keep, added)]
    assert_all_close(*results, 1e-15)


@pytest.mark.parametrize("form", FORMS)
def test_a_constant_in_a_floating_mask_changes_nothing(form):
    mask = torch.linspace(-3, 3, M)
    plain = form(*qkv(), attn_mask=mask)
    for constant in (-1e4, 1e4):  # e to this power is 0, or infinite
        shifted = form(*qkv(), attn_mask=(mask.double() + constant))
        torch.testing.assert_close(shifted, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_padding_is_as_good_as_absence(form):
    q, k, v = qkv()
    keep = torch.arange(M) < 4
    results = output_and_gradients(form, [q, k, v], attn_mask=keep)
    shorter = [q, k[..., :4, :].detach(), v[..., :4, :].detach()]
    expected = output_and_gradients(form, [x.requires_grad_() for x in shorter])
    assert bool((results[2][..., 4:, :] == 0).all()) and bool((results[3][..., 4:, :] == 0).all())
    results = (*results[:2], *(x[..., :4, :] for x in results[2:]))
    assert_all_close(results, expected, 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_may_be_attended_at_all(form):
    for mask in (torch.tensor(False), torch.full((M,), -math.inf), torch.zeros(B, 1, 1, M).bool()):
        for x in output_and_gradients(form, qkv(), attn_mask=mask):
            assert bool((x == 0).all())


EMPTY = {"no batch": ((0, H), N, M), "no head": ((B, 0), N, M)}
EMPTY |= {"no query": ((B, H), 0, M), "no key": ((B, H), N, 0), "nothing": ((0, 0), 0, 0)}


@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "float"])
@pytest.mark.parametrize("form", FORMS)
def test_empty_inputs(form, kind, shape):
    leading, n, m = shape
    options = {"boolean": torch.ones(m).bool(), "float": torch.zeros(1, m)}
    options = {"attn_mask": options[kind]} if kind in options else {"is_causal": kind == "causal"}
    results = output_and_gradients(form, qkv(leading, n=n, m=m), **options)
    assert results[0].shape == (*leading, n, DV)
    assert all(bool((x == 0).all()) for x in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_one_key_gives_its_value(form, dtype):
    for options in ({}, {"is_causal": True}, {"attn_mask": torch.ones(1, 1).bool()}):
        q, k, v = qkv(n=N, m=1, dtype=dtype)
        tol = TOLERANCE[dtype]
        torch.testing.assert_close(
            form(q, k, v, **options), v.expand(B, H, N, DV), rtol=tol, atol=tol
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_dtypes(form, name, dtype):
    inputs = qkv(dtype=dtype)
    results = output_and_gradients(form, inputs, **MASKS[name])
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = output_and_gradients(linear_attention_reference, exact_inputs, **MASKS[name])
    assert all(x.dtype == dtype for x in results)
    assert_all_close([x.double() for x in results], exact, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_sums_do_not_drift_or_overflow(causal, dtype):
    q, k, v = (x.detach() for x in qkv((), n=2000, m=2000, d=32, dv=4, dtype=dtype))
    q, k, v = q.abs() * 8, k.abs() * 8, v + 1  # Σ φ(q)ᵀφ(k) is beyond 65504, float16's largest
    out = linear_attention(q, k, v, is_causal=causal)
    exact = linear_attention_reference(q.double(), k.double(), v.double(), is_causal=causal)
    assert (out.double() - exact).norm() / exact.norm() < torch.finfo(dtype).eps


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MASKS)
def test_autocast_leaves_sums_in_float32(form, name):
    inputs = qkv(dtype=torch.float32)
    exact = form(*inputs, **MASKS[name])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = form(*inputs, **MASKS[name])
        mixed = form(inputs[0].bfloat16(), *inputs[1:], **MASKS[name])
    assert out.dtype == torch.float32 and mixed.dtype == torch.bfloat16
    torch.testing.assert_close(out, exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mixed.float(), exact, rtol=3e-2, atol=3e-2)


def test_arguments_are_left_as_they_were():
    mask = torch.zeros(M).masked_fill(~boolean(M), -math.inf)
    inputs = [x.detach() for x in qkv()]
    before = [x.clone() for x in (*inputs, mask)]
    for form in FORMS:
        form(*inputs, attn_mask=mask)
        form(*inputs, is_causal=True)
    assert all(torch.equal(a, b) for a, b in zip(before, (*inputs, mask), strict=True))


# --- causality, no matrix, compilers -----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [(6, 6), (4, 9), (9, 4), (150, 150), (600, 600)], ids=str)
def test_causal_attention_sees_no_future(lengths, dtype):
    n, m = lengths
    q, k, v = qkv((2,), n=n, m=m, dtype=dtype)
    out = linear_attention(q, k, v, is_causal=True)
    last = min(n, m) - 1
    for t in range(last) if last < 10 else (0, 30, 63, 64, 100, 127, last - 1):
        noise = torch.zeros(m, 1, dtype=dtype)
        noise[t + 1 :] = 5
        changed = linear_attention(q, k + noise, v - 3 * noise, is_causal=True)
        assert torch.equal(out[..., : t + 1, :], changed[..., : t + 1, :])
        assert not torch.equal(out[..., t + 1 :, :], changed[..., t + 1 :, :])
        dk, dv = torch.autograd.grad(out[..., : t + 1, :].sum(), [k, v], retain_graph=True)
        assert bool((dk[..., t + 1 :, :] == 0).all()) and bool((dv[..., t + 1 :, :] == 0).all())


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in made]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.parametrize("masked", ["none", "causal", "padding"])
def test_no_matrix_is_stored(masked):
    n = 700
    inputs = qkv((2,), n=n, m=n, d=8, dv=8)
    options = {"attn_mask": boolean(n)} if masked == "padding" else {}
    options["is_causal"] = masked == "causal"
    sizes = []
    for form in FORMS:
        with Largest() as largest:
            output_and_gradients(form, inputs, **options)
        sizes.append(largest.numel)
    assert sizes[1] >= 2 * n * n, "the recorder must see the reference's matrix"
    # A segment's scores are CHUNK per position: less than a tenth of the matrix.
    assert sizes[0] < 2 * n * n / 10


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_memory_grows_with_the_length_and_not_its_square(causal, backward):
    def peak(form, n):
        inputs = qkv((), n=n, m=n, d=8, dv=8, dtype=torch.float32)
        if not backward:
            inputs = [x.detach() for x in inputs]
            return measure.peak_bytes(lambda: form(*inputs, is_causal=causal), device="cpu")
        return measure.peak_bytes(
            lambda: output_and_gradients(form, inputs, is_causal=causal), device="cpu"
        )

    assert peak(linear_attention, 2048) / peak(linear_attention, 1024) < 2.5
    assert peak(linear_attention_reference, 1024) / peak(linear_attention_reference, 512) > 3


@pytest.mark.parametrize("name", ["none", "causal", "boolean padding", "float"])
def test_compiles_without_a_break(name):
    torch._dynamo.reset()
    compiled = torch.compile(linear_attention, fullgraph=True, backend="aot_eager")
    ours = output_and_gradients(compiled, qkv(), **MASKS[name])
    assert_all_close(ours, output_and_gradients(linear_attention, qkv(), **MASKS[name]), 1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_compiles_for_lengths_that_change(causal):
    torch._dynamo.reset()
    compiled = torch.compile(linear_attention, fullgraph=True, dynamic=True, backend="eager")
    for n in (4, 70, 130, 600):
        inputs = qkv((), n=n, m=n)
        torch.testing.assert_close(
            compiled(*inputs, is_causal=causal), linear_attention(*inputs, is_causal=causal)
        )


def test_compiled_by_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(linear_attention, fullgraph=True)
    inputs = [x.detach() for x in qkv(n=70, m=70, dtype=torch.float32)]
    ours = compiled(*inputs, is_causal=True)
    torch.testing.assert_close(ours, linear_attention(*inputs, is_causal=True))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.tuples(st.integers(0, 150), st.integers(0, 150)),
    st.tuples(st.integers(1, 5), st.integers(0, 4)),
    st.sampled_from(["none", "causal", "boolean", "float"]),
    st.integers(0, 99),
)
def test_fast_equals_reference_for_any_shape(leading, lengths, sizes, kind, seed):
    (n, m), (d, dv) = lengths, sizes
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(1, m, generator=generator) > 0.5
    bias = torch.randn(1, m, generator=generator).masked_fill(~keep, -math.inf)
    masks = {"boolean": {"attn_mask": keep}, "float": {"attn_mask": bias}}
    options = masks.get(kind, {"is_causal": kind == "causal"})
    inputs = qkv(leading, n=n, m=m, d=d, dv=dv, seed=seed)
    fast, reference = (output_and_gradients(form, inputs, **options) for form in FORMS)
    assert fast[0].shape == (*leading, n, dv)
    assert_all_close(fast, reference, 1e-10)


# --- in a layer --------------------------------------------------------------------------------


def test_in_a_layer_with_padding_and_weights():
    torch.manual_seed(0)
    layer = MultiheadAttention(12, 3, attention=linear_attention).eval()
    x, padding = torch.randn(2, 6, 12), torch.arange(6) >= torch.tensor([[4], [6]])
    out, A = layer(x, x, x, key_padding_mask=padding, average_attn_weights=False)
    torch.testing.assert_close(A.sum(-1), torch.ones(2, 3, 6))
    assert bool((A[0, :, :, 4:] == 0).all())
    without, _ = layer(x, x, x, key_padding_mask=padding, need_weights=False)
    torch.testing.assert_close(out, without)
    as_float = torch.zeros(2, 6).masked_fill(padding, -math.inf)
    added, _ = layer(x, x, x, key_padding_mask=as_float, need_weights=False)
    torch.testing.assert_close(added, without)


@pytest.mark.parametrize("training", [True, False])
def test_in_pytorch_s_encoder_layer(training):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True)
    encoder.self_attn = MultiheadAttention(12, 3, attention=linear_attention)
    encoder.train(training)
    x, padding = torch.randn(2, 6, 12), torch.arange(6) >= torch.tensor([[4], [6]])
    out = encoder(x, src_key_padding_mask=padding)
    changed = x.clone()
    changed[0, 4:] += 7
    torch.testing.assert_close(
        encoder(changed, src_key_padding_mask=padding)[0, :4], out[0, :4], rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(encoder(x[:1, :4])[0], out[0, :4], rtol=1e-5, atol=1e-5)


# --- errors ------------------------------------------------------------------------------------

X = torch.zeros(B, H, N, D)
BAD = {
    "q: not a tensor": (TypeError, "q is of type list", {"q": [1.0]}),
    "k: D": (ValueError, r"k has shape .*7\); expected \(2, 3, 5, 8\)", {"k": X[..., :7]}),
    "v: length": (ValueError, r"v has shape .* expected \(2, 3, 5, 8\)", {"v": X[:, :, :4]}),
    "mask: shape": (ValueError, r"attn_mask has shape \(5, 4\)", {"attn_mask": torch.ones(N, 4)}),
    "mask: NaN": (ValueError, "attn_mask contains NaN", {"attn_mask": torch.full((N,), math.nan)}),
    "both": (
        ValueError,
        "attn_mask and is_causal",
        {"attn_mask": torch.ones(N), "is_causal": True},
    ),
    "scale": (ValueError, "scale is -1.0; expected a finite positive", {"scale": -1.0}),
    "map: not callable": (TypeError, "feature_map is 'elu'; expected a", {"feature_map": "elu"}),
    "map: no tensor": (
        TypeError,
        "feature_map returned type tuple",
        {"feature_map": lambda x: (x,)},
    ),
    "map: integers": (
        TypeError,
        "feature_map returned dtype torch.int64",
        {"feature_map": lambda x: x.long()},
    ),
    "map: tokens": (
        ValueError,
        r"result of feature_map has shape \(2, 3, 8\); expected \(2, 3, 5, 8\)",
        {"feature_map": lambda x: x.sum(-2)},
    ),
    "map: no features": (
        ValueError,
        r"result of feature_map has shape \(2, 3, 5, 0\); expected \(2, 3, 5, F\)",
        {"feature_map": lambda x: x[..., :0]},
    ),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("form", FORMS)
def test_bad_argument_is_named(form, bad):
    error, match, changed = bad
    with pytest.raises(error, match=match):
        form(**{"q": X, "k": X, "v": X, **changed})


def test_key_masks_and_counts_are_checked():
    assert check_key_mask(torch.ones(M).bool()).shape == (1, M)
    assert check_key_mask(torch.ones(B, 1, 1, M)).shape == (B, 1, 1, M)
    with pytest.raises(ValueError, match=r"attn_mask has shape \(5, 7\)"):
        check_key_mask(torch.ones(N, M))
    assert check_count("window", 0, 0) == 0
    with pytest.raises(ValueError, match="stride is 0; expected a whole number, at least 1"):
        check_count("stride", 0, 1)
    for value, kind in ((2.0, "float"), (True, "bool"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"stride is of type {kind}; expected a whole number"):
            check_count("stride", value, 1)


def test_on_a_device_without_data():
    out = linear_attention(*(X.to("meta") for _ in range(3)), is_causal=True)
    assert out.shape == X.shape
