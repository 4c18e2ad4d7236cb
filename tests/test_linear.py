"""Linear attention: the formula, causal by chunks, feature maps; the rest is in `test_contract`."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import B, D, H, M, N, assert_all_close, boolean, output_and_gradients, qkv
from torch import nn

from derived_attention import linear_attention_reference, softmax_attention_reference
from derived_attention.common.masks import causal_mask
from derived_attention.linear.core import (
    CHUNK,
    elu_feature_map,
    linear_attention,
    linear_attention_weights,
)

pytestmark = pytest.mark.usefixtures("no_short_forms")
FORMS = [linear_attention, linear_attention_reference]


# --- the formula -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"attn_mask": boolean(H, 1, M)},
        {"attn_mask": torch.linspace(-3, 3, M)},
        {"scale": 0.3},
    ],
    ids=["plain", "causal", "boolean", "floating", "scale"],
)
def test_weights_are_the_formula_entry_by_entry(options):
    q, k, v = (x.detach() for x in qkv((H,)))
    A = linear_attention_weights(q, k, **options)
    mask, scale = options.get("attn_mask"), options.get("scale", 1)
    if options.get("is_causal"):
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
    for form in FORMS:
        torch.testing.assert_close(form(q, k, v, **options), A @ v)


def test_the_formula_takes_masks_that_differ_between_queries():
    bias = torch.linspace(-3, 3, N * M).view(N, M).masked_fill(~boolean(N, M), -math.inf)
    for mask in (boolean(N, M), boolean(B, H, N, M), boolean(N, 1), bias):
        A = linear_attention_weights(*qkv()[:2], attn_mask=mask)
        keep = (mask if mask.dtype == torch.bool else mask != -math.inf).expand_as(A)
        assert torch.equal(A > 0, keep)
        torch.testing.assert_close(A.sum(-1), keep.any(-1).double())
        torch.testing.assert_close(linear_attention_reference(*qkv(), attn_mask=mask), A @ qkv()[2])


# Lengths near the chunk size, with as many keys as queries, fewer and more.
LENGTHS = [(1, 1), (2, 1), (CHUNK - 1, CHUNK - 1), (CHUNK, CHUNK), (CHUNK + 1, CHUNK + 1)]
LENGTHS += [(3 * CHUNK + 5, CHUNK + 2), (CHUNK + 2, 3 * CHUNK + 5), (2 * CHUNK, 5)]


def test_causal_by_chunks_equals_the_triangle():
    for n, m in LENGTHS:
        inputs = qkv((2,), n=n, m=m, d=4, dv=3)
        fast = output_and_gradients(linear_attention, inputs, is_causal=True)
        for options in ({"is_causal": True}, {"attn_mask": causal_mask(n, m)}):
            reference = output_and_gradients(linear_attention_reference, inputs, **options)
            assert_all_close(fast, reference, 1e-11, f"{n}, {m}")


# --- feature maps ------------------------------------------------------------------------------


def test_elu_feature_map_keeps_small_values_and_its_slope():
    x = torch.tensor([-80.0, -20.0, -1.0, -1e-9, 0.0, 1e-9, 1.0, 50.0], requires_grad=True)
    phi = elu_feature_map(x)
    exact = torch.where(x > 0, x.double() + 1, x.double().exp())
    torch.testing.assert_close(phi.double(), exact, rtol=1e-5, atol=0)
    assert float((nn.functional.elu(x.detach()) + 1)[1]) == 0, (
        "elu(-20) + 1 is not 0; expected float32 to round it to 0"
    )
    slope = torch.autograd.grad(phi.sum(), x)[0]
    torch.testing.assert_close(slope.double(), torch.where(x > 0, 1.0, exact), rtol=1e-5, atol=0)


MAPS = {
    "relu": torch.relu,
    "square, twice as wide": lambda x: torch.cat([x, -x], -1).relu().square(),
    "one feature": lambda x: x[..., :1].exp(),
    "softmax of the features": lambda x: x.softmax(-1),
}


@pytest.mark.parametrize("name", MAPS)
def test_any_feature_map(name):
    for causal in (False, True):
        options = {"feature_map": MAPS[name], "is_causal": causal}
        fast, reference = (output_and_gradients(f, qkv(n=70, m=70), **options) for f in FORMS)
        assert_all_close(fast, reference, 1e-11, f"causal {causal}")


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
    """With random exponential features, linear attention approximates softmax attention."""
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
def test_a_query_without_features_gets_zeros(form):
    q, k, v = (x.detach().abs().requires_grad_() for x in qkv())
    with torch.no_grad():
        q[:, :, 2] = 0
    for causal in (False, True):
        out, dq, dk, dv = output_and_gradients(
            form, [q, k, v], feature_map=lambda x: 2 * x, is_causal=causal
        )
        assert not out[:, :, 2].any() and not dq[:, :, 2].any()
        assert all(bool(x.isfinite().all()) for x in (out, dq, dk, dv)) and bool((dk != 0).any())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_features_near_underflow(form, causal):
    """If e^(q_low + k_low) is below float32's normal numbers, a row may be 0, but not NaN."""
    q, k, v = (x.detach().float() for x in qkv())
    for q_low, k_low in ((-38, -38), (-46, -46), (-60, -60), (-95, 0), (0, -80), (-120, 0)):
        inputs = [(x + low).requires_grad_() for x, low in ((q, q_low), (k, k_low), (v, 0))]
        results = output_and_gradients(form, inputs, is_causal=causal)
        assert all(bool(x.isfinite().all()) for x in results), f"{q_low}, {k_low}"
        wide = [x.detach().double() for x in inputs]
        exact = linear_attention_reference(*wide, is_causal=causal)
        zero = (results[0] == 0).all(-1, keepdim=True)
        assert bool(zero.any()) == (q_low + k_low < -85)
        expected = exact.masked_fill(zero, 0)
        torch.testing.assert_close(results[0].double(), expected, rtol=1e-4, atol=1e-4)


# --- masks, sums -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_constant_added_to_a_floating_mask_divides_out(form):
    mask = torch.linspace(-3, 3, M)
    plain = form(*qkv(), attn_mask=mask)
    for constant in (-8e3, 1e4):  # e to this power is 0 or infinite
        shifted = form(*qkv(), attn_mask=mask.double() + constant)
        torch.testing.assert_close(shifted, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_sums_do_not_drift_or_overflow(causal, dtype):
    q, k, v = (x.detach() for x in qkv((), n=2000, m=2000, d=32, dv=4, dtype=dtype))
    q, k, v = q.abs() * 8, k.abs() * 8, v + 1  # Σ φ(q)ᵀφ(k) exceeds 65504, float16's largest
    out = linear_attention(q, k, v, is_causal=causal)
    exact = linear_attention_reference(q.double(), k.double(), v.double(), is_causal=causal)
    assert (out.double() - exact).norm() / exact.norm() < torch.finfo(dtype).eps


@pytest.mark.parametrize("form", FORMS)
def test_autocast_leaves_sums_in_float32(form):
    inputs = qkv(dtype=torch.float32)
    for options in ({}, {"is_causal": True}, {"attn_mask": boolean(M)}):
        exact = form(*inputs, **options)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = form(*inputs, **options)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_compiled_sums_stay_in_float32_where_autocast_comes_later(form):
    torch._dynamo.reset()
    compiled = torch.compile(form, fullgraph=True, backend="eager")
    inputs = qkv(dtype=torch.float32)
    exact = compiled(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(*inputs)
    torch.testing.assert_close(out, exact, rtol=1e-6, atol=1e-6)


# --- errors of feature maps ----------------------------------------------------------------------

BAD = [
    ("elu", TypeError, "feature_map is 'elu'; expected a function"),
    (lambda x: (x,), TypeError, "feature_map returned type tuple"),
    (lambda x: x.long(), TypeError, "feature_map returned dtype torch.int64"),
    (lambda x: x.sum(-2), ValueError, r"result of feature_map has shape \(2, 3, 8\); expected"),
    (lambda x: x[..., :0], ValueError, r"shape \(2, 3, 5, 0\); expected \(2, 3, 5, F\)"),
]


def test_bad_feature_maps_are_named():
    q, k, v = qkv(m=N)
    for feature_map, error, match in BAD:
        for form in (*FORMS, lambda q, k, v, **own: linear_attention_weights(q, k, **own)):
            with pytest.raises(error, match=match):
                form(q, k, v, feature_map=feature_map)
