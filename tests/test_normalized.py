"""Attention-BN: the formula, the query that holds it all, masks, causality, the layer."""

from __future__ import annotations

import copy
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

from derived_attention.attention.linear import linear_attention, linear_attention_reference
from derived_attention.attention.normalized import (
    Normalized,
    NormalizedAttention,
    key_statistics,
    normalized_attention,
    normalized_attention_reference,
)
from derived_attention.attention.softmax import (
    MultiheadAttention,
    attention_weights,
    causal_mask,
    softmax_attention,
    softmax_attention_reference,
)
from derived_attention.attention.sparse import window_attention, window_mask
from derived_attention.models import SeriesClassifier

FORMS = [normalized_attention, normalized_attention_reference]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
B, H, N, M, D, DV = 2, 3, 5, 7, 8, 6

cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NOT TESTED: this machine has no CUDA device"
)


def tensors(*shapes, dtype=torch.float64, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    return [x.to(device, dtype).requires_grad_() for x in made]


def qkv(leading=(B, H), n=N, m=M, d=D, dv=DV, **options):
    return tensors((*leading, n, d), (*leading, m, d), (*leading, m, dv), **options)


def per_head(h=H):
    return torch.linspace(-0.4, 1.3, h, dtype=torch.float64).requires_grad_()


def output_and_gradients(function, inputs, **options):
    """The output, and the gradients of a fixed linear functional of it."""
    leaves = [x for x in inputs if x.requires_grad]
    out = function(*inputs, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    loss = (out * weights.view_as(out)).sum()
    return out, *torch.autograd.grad(loss, leaves, materialize_grads=True)


def with_beta(form, **options):
    return lambda q, k, v, beta: form(q, k, v, beta=beta, **options)


def assert_all_close(left, right, tol):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def boolean(*shape, seed=1):
    """A random boolean mask whose rows all keep at least one key."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    return mask | (torch.arange(shape[-1]) == 0)


def additive(mask, bias=0.0):
    """The floating mask of a boolean one, as nn.TransformerEncoderLayer makes it."""
    return torch.zeros(mask.shape, dtype=torch.float64).add(bias).masked_fill(~mask, -math.inf)


def with_dead_row(mask, row=2):
    mask = mask.clone()
    mask[..., row, :] = False
    return mask


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "padding": {"attn_mask": boolean(B, 1, 1, M)},
    "padding, additive": {"attn_mask": additive(boolean(B, 1, 1, M))},
    "keys": {"attn_mask": boolean(M)},
    "bias on keys": {"attn_mask": additive(boolean(M), torch.randn(M))},
    "per head": {"attn_mask": boolean(H, 1, M)},
    "per query": {"attn_mask": with_dead_row(boolean(N, M))},
    "per query, additive": {"attn_mask": additive(with_dead_row(boolean(N, M)), 0.3)},
    "per query and batch": {"attn_mask": boolean(B, 1, N, M)},
    "per query and head": {"attn_mask": boolean(H, N, M)},
    "full": {"attn_mask": boolean(B, H, N, M)},
    "whole rows": {"attn_mask": boolean(N, 1)},
    "all or nothing": {"attn_mask": torch.tensor(True)},
    "scale": {"scale": 0.7},
}
EPS = {"recentred": None, "full": 0.05, "full, small eps": 1e-5}


# --- the formula -------------------------------------------------------------------------------


def test_reference_is_the_full_form_number_by_number():
    """Eq. 22, in plain Python."""
    q, k, v = (x.detach() for x in qkv((), n=2, m=3, d=2, dv=1))
    out = normalized_attention_reference(q, k, v, eps=0.1)
    mu = [sum(float(k[j, d]) for j in range(3)) / 3 for d in range(2)]
    var = [sum((float(k[j, d]) - mu[d]) ** 2 for j in range(3)) / 3 for d in range(2)]
    for i in range(2):
        scores = [
            sum(
                (float(q[i, d]) - mu[d]) * (float(k[j, d]) - mu[d]) / (var[d] + 0.1)
                for d in range(2)
            )
            / math.sqrt(2)
            for j in range(3)
        ]
        e = [math.exp(s) for s in scores]
        expected = sum(e[j] * float(v[j, 0]) for j in range(3)) / sum(e)
        assert out[i, 0].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.6, 1.0, -2.0])
def test_reference_is_the_recentred_form(beta):
    """Eq. 26: softmax attention with β μ taken from queries and keys."""
    q, k, v = qkv()
    shift = beta * k.mean(-2, keepdim=True)
    expected = softmax_attention_reference(q - shift, k - shift, v)
    torch.testing.assert_close(normalized_attention_reference(q, k, v, beta=beta), expected)


@pytest.mark.parametrize("eps", EPS.values(), ids=EPS)
@pytest.mark.parametrize("name", MASKS)
def test_fast_equals_reference(name, eps):
    results = [
        output_and_gradients(with_beta(f, eps=eps, **MASKS[name]), [*qkv(), per_head()])
        for f in FORMS
    ]
    assert all(bool(x.isfinite().all()) for x in results[0])
    assert bool((results[0][-1] != 0).all()), "every head's β must have a gradient"
    assert_all_close(*results, 1e-10)


@pytest.mark.parametrize("leading", [(), (H,), (B, H), (2, B, H)], ids=str)
@pytest.mark.parametrize("lengths", [(5, 5), (3, 8), (8, 3), (1, 1), (4, 1), (1, 4)], ids=str)
def test_fast_equals_reference_in_every_shape(leading, lengths):
    n, m = lengths
    for masks in ({}, {"is_causal": True}, {"attn_mask": boolean(n, m)}):
        for eps in (None, 0.1):
            inputs = [*qkv(leading, n=n, m=m), torch.tensor(0.7).double().requires_grad_()]
            results = [output_and_gradients(with_beta(f, eps=eps, **masks), inputs) for f in FORMS]
            assert_all_close(*results, 1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form):
    inputs = [*qkv((1, 2), n=3, m=4, d=3, dv=2), per_head(2)]
    masks = [{}, {"is_causal": True}, {"attn_mask": with_dead_row(boolean(3, 4), 1)}]
    for options in masks:
        for eps in (None, 0.2):
            assert torch.autograd.gradcheck(with_beta(form, eps=eps, **options), inputs)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2), st.integers(1, 3), st.integers(0, 6), st.integers(0, 6), st.integers(1, 4),
    st.sampled_from(["none", "causal", "keys", "queries"]), st.sampled_from([None, 0.1]),
    st.integers(0, 99),
)  # fmt: skip
def test_fast_equals_reference_for_any_shape(b, h, n, m, d, kind, eps, seed):
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(1 if kind == "keys" else n, m, generator=generator) > 0.5
    masks = {"attn_mask": keep} if kind in ("keys", "queries") else {"is_causal": kind == "causal"}
    inputs = [*qkv((b, h), n=n, m=m, d=d, dv=2, seed=seed), per_head(h)]
    results = [output_and_gradients(with_beta(f, eps=eps, **masks), inputs) for f in FORMS]
    assert all(bool(x.isfinite().all()) for x in results[0])
    assert_all_close(*results, 1e-8)


# --- what the paper says of it -----------------------------------------------------------------


def test_centring_the_keys_changes_no_softmax():
    """Nor does scaling both sides instead of the query twice."""
    q, k, v = qkv()
    mean, variance, _ = key_statistics(k)
    s = (variance + 0.1).rsqrt()
    only_query = softmax_attention_reference((q - mean) * s * s, k, v)
    both = softmax_attention_reference((q - mean) * s, (k - mean) * s, v)
    torch.testing.assert_close(only_query, both, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(softmax_attention_reference(q, k - mean, v), both, atol=1e-3)
    torch.testing.assert_close(
        softmax_attention_reference(q, k - mean, v), softmax_attention_reference(q, k, v)
    )


def test_full_form_is_recentred_only_in_a_limit():
    """With ε and the scale growing together, s becomes a constant; at no ε is it one before."""
    q, k, v = (x.detach() for x in qkv())
    recentred = normalized_attention(q, k, v, beta=1.0)
    errors = [
        float(
            (normalized_attention(q, k, v, eps=e, scale=e / math.sqrt(D)) - recentred).abs().max()
        )
        for e in (1e2, 1e4, 1e6)
    ]
    assert errors[0] > 50 * errors[1] > 50**2 * errors[2] > 0


def test_full_form_is_recentred_where_all_variances_are_one():
    q, k, v = qkv()
    mean, variance, _ = key_statistics(k)
    white = (k - mean) / variance.sqrt()
    full = normalized_attention(q, white, v, eps=1e-3, scale=1.001 / math.sqrt(D))
    torch.testing.assert_close(full, normalized_attention(q, white, v), rtol=1e-12, atol=1e-12)


def test_penalty_is_on_length_along_the_mean_not_on_closeness():
    """Five keys agree and one is far from them all: the far one loses."""
    k = torch.tensor([1.0, 1, 1, 1, 1, 10]).double()[:, None]
    q = torch.zeros(1, 1).double()
    weights = [normalized_attention(q, k, torch.eye(6).double(), beta=b)[0] for b in (0.0, 0.2)]
    assert weights[1][5] < weights[0][5] and bool((weights[1][:5] > weights[0][:5]).all())


@pytest.mark.parametrize("form", FORMS)
def test_no_centring_is_plain_attention(form):
    for options in ({}, {"is_causal": True}, {"attn_mask": boolean(N, M)}):
        expected = softmax_attention_reference(*qkv(), **options)
        torch.testing.assert_close(form(*qkv(), beta=0.0, **options), expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eps", [None, 0.1])
def test_invariances_of_the_full_form(form, eps):
    """A shift of queries and keys, and with s their scale, changes nothing."""
    q, k, v = qkv()
    c = torch.linspace(-3, 3, D).double()
    torch.testing.assert_close(form(q + c, k + c, v, eps=eps), form(q, k, v, eps=eps))
    a = torch.linspace(0.5, 2, D).double()
    same = torch.allclose(form(a * q, a * k, v, eps=1e-12), form(q, k, v, eps=1e-12), atol=1e-8)
    assert same and not torch.allclose(form(a * q, a * k, v), form(q, k, v), atol=1e-3)


def test_weights_are_softmax_weights_of_the_shifted_query():
    q, k, _ = qkv()
    A = normalized_attention(q, k, torch.eye(M).double().expand(B, H, M, M), beta=0.6)
    expected = attention_weights(q - 0.6 * k.mean(-2, keepdim=True), k)
    torch.testing.assert_close(A, expected, rtol=1e-12, atol=1e-12)
    assert normalized_attention(q, k, k, kernel=softmax_attention).shape == q.shape


# --- statistics --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_statistics_are_those_of_the_keys_that_a_query_may_attend(name, offset):
    masks = {x: y for x, y in MASKS[name].items() if x != "scale"}
    k = qkv()[1].detach() + offset
    mean, variance, count = (x.expand(B, H, -1, -1) for x in key_statistics(k, **masks))
    rows = mean.shape[-2]
    allowed = causal_mask(M, M) if name == "causal" else masks.get("attn_mask", torch.tensor(True))
    allowed = allowed if allowed.dtype == torch.bool else allowed > -math.inf
    assert rows in (1, N, M)
    allowed = allowed.expand(B, H, rows, M)
    for b in range(B):
        for h in range(H):
            for i in range(rows):
                keys = k[b, h][allowed[b, h, i]]
                assert float(count[b, h, i]) == len(keys)
                if len(keys):
                    expected = keys.mean(0), keys.var(0, correction=0)
                    got = mean[b, h, i], variance[b, h, i]
                    assert_all_close(got, expected, 1e-8 if name.startswith("per query") else 1e-11)


def test_running_variance_does_not_cancel():
    """E k² − μ² in float32 has no digit left here."""
    k = qkv(m=200, dtype=torch.float32)[1].detach() + 1e4
    _, variance, _ = key_statistics(k, is_causal=True)
    exact = torch.stack([k[..., : t + 1, :].double().var(-2, correction=0) for t in range(200)], -2)
    assert float(((variance - exact).abs() / exact.clamp(min=1e-2)).max()) < 1e-2
    naive = (k**2).cumsum(-2) / 200 - (k.cumsum(-2) / 200) ** 2
    assert float((naive[..., -1, :] - exact[..., -1, :]).abs().max()) > 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eps", [None, 0.1])
def test_padded_keys_count_nowhere(form, eps):
    """A padded sequence gives bit for bit what other numbers in the padding give, and the short one
    the same result."""
    q, k, v = (x.detach() for x in qkv())
    keep = torch.arange(M) < 4
    garbage = k.masked_fill(~keep[:, None], -1e4)
    for mask in (keep, additive(keep), keep.expand(N, M), keep.expand(B, 1, 1, M)):
        out = form(q, k, v, attn_mask=mask, eps=eps)
        assert torch.equal(out, form(q, garbage, v, attn_mask=mask, eps=eps))
        short = form(q, k[..., :4, :], v[..., :4, :], eps=eps)
        torch.testing.assert_close(out, short, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_fully_masked_row_gives_zeros(form):
    mask = with_dead_row(boolean(N, M))
    for m in (mask, additive(mask), torch.zeros(M).bool()):
        for eps in (None, 1e-5):
            out, *gradients = output_and_gradients(form, qkv(), attn_mask=m, eps=eps)
            assert bool((out[:, :, 2] == 0).all()) and bool((gradients[0][:, :, 2] == 0).all())
            assert all(bool(x.isfinite().all()) for x in gradients)


# --- causality ---------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [None, 1e-2])
@pytest.mark.parametrize("lengths", [(6, 6), (4, 9), (9, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_causal_form_sees_no_future(form, dtype, lengths, eps):
    n, m = lengths
    q, k, v = qkv(n=n, m=m, dtype=dtype)
    out = form(q, k, v, is_causal=True, eps=eps)
    for t in range(min(n, m) - 1):
        noise = torch.zeros(m, 1, dtype=dtype)
        noise[t + 1 :] = 5
        changed = form(q, k + noise, v - 3 * noise, is_causal=True, eps=eps)
        assert torch.equal(out[..., : t + 1, :], changed[..., : t + 1, :])
        assert not torch.equal(out[..., t + 1 :, :], changed[..., t + 1 :, :])
        dk, dv = torch.autograd.grad(out[..., : t + 1, :].sum(), [k, v], retain_graph=True)
        assert bool((dk[..., t + 1 :, :] == 0).all()) and bool((dv[..., t + 1 :, :] == 0).all())


def test_printed_form_leaks_the_future():
    """μ over all keys under a causal mask: the last key moves all outputs, through μ alone."""
    q, k, v = (x.detach() for x in qkv(n=M))
    changed = k.clone()
    changed[..., -1, :] += 3

    def printed(k):
        mean = k.mean(-2, keepdim=True)
        return softmax_attention_reference(q - mean, k - mean, v, is_causal=True)

    moved = (printed(k) - printed(changed)).abs().amax((0, 1, 3))
    assert moved[0] < 1e-12, "one key to attend: no score can matter"
    assert bool((moved[1:] > 1e-3).all())
    ours = [normalized_attention(q, x, v, is_causal=True) for x in (k, changed)]
    assert torch.equal(ours[0][..., :-1, :], ours[1][..., :-1, :])


@pytest.mark.parametrize("eps", [None, 1e-2])
def test_causal_is_the_causal_mask(eps):
    for n, m in [(N, M), (M, N), (N, N)]:
        causal = normalized_attention(*qkv(n=n, m=m), is_causal=True, eps=eps)
        masked = normalized_attention(*qkv(n=n, m=m), attn_mask=causal_mask(n, m), eps=eps)
        torch.testing.assert_close(causal, masked, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("eps", [None, 1e-2])
def test_a_causal_mask_sees_no_future_either(eps):
    """As the layer hands it over, when there is padding as well."""
    q, k, v = (x.detach() for x in qkv(n=M))
    keep = causal_mask(M, M) & (torch.arange(M) != 1)
    later = (torch.arange(M) > 3)[:, None]
    outs = [normalized_attention(q, k + a * later, v, attn_mask=keep, eps=eps) for a in (0, 7.0)]
    assert torch.equal(outs[0][..., :4, :], outs[1][..., :4, :])
    assert not torch.allclose(outs[0][..., 4:, :], outs[1][..., 4:, :])


# --- other kernels -----------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [None, 0.1])
@pytest.mark.parametrize("name", ["none", "padding", "keys", "per head"])
def test_linear_kernel_needs_its_keys_centred(name, eps):
    inputs = [*qkv(), per_head()]
    masks = MASKS[name]
    fast = output_and_gradients(
        with_beta(normalized_attention, eps=eps, kernel=linear_attention, **masks), inputs
    )
    reference = output_and_gradients(
        with_beta(
            normalized_attention_reference, eps=eps, kernel=linear_attention_reference, **masks
        ),
        inputs,
    )
    assert_all_close(fast, reference, 1e-10)
    wrong = with_beta(
        normalized_attention, eps=eps, kernel=linear_attention, centre_keys=False, **masks
    )(*inputs)
    assert not torch.allclose(wrong, fast[0], atol=1e-3)


@pytest.mark.parametrize("eps", [None, 0.1])
def test_causal_linear_kernel_centres_a_key_by_its_own_past(eps):
    q, k, v = qkv(n=M)
    options = {"kernel": linear_attention, "centre_keys": True, "is_causal": True, "eps": eps}
    out = normalized_attention(q, k, v, beta=0.6, **options)
    mean, variance, count = key_statistics(k, is_causal=True)
    s = 1 if eps is None else (variance + eps).rsqrt().masked_fill(count == 1, 0)
    queries, keys = (q - 0.6 * mean) * s, (k - 0.6 * mean) * s
    expected = linear_attention_reference(queries, keys, v, is_causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    later = (torch.arange(M) > 3)[:, None]
    changed = normalized_attention(q, k + 7.0 * later, v, beta=0.6, **options)
    assert torch.equal(out[..., :4, :], changed[..., :4, :])


@pytest.mark.parametrize("centre_keys", [None, False, True])
def test_sparse_kernel_is_a_softmax(centre_keys):
    q, k, v = qkv(n=M)
    kernel = functools.partial(window_attention, window=1)
    out = normalized_attention(q, k, v, beta=0.6, kernel=kernel, centre_keys=centre_keys)
    shift = 0.6 * k.mean(-2, keepdim=True)
    mask = window_mask(M, M, 1)
    expected = softmax_attention_reference(q - shift, k - shift, v, attn_mask=mask)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


def test_causal_sparse_kernel():
    q, k, v = qkv(n=M)
    kernel = functools.partial(window_attention, window=2)
    out = normalized_attention(q, k, v, is_causal=True, kernel=kernel, centre_keys=False)
    running = k.cumsum(-2) / torch.arange(1, M + 1)[:, None]
    mask = window_mask(M, M, 2, is_causal=True)
    expected = softmax_attention_reference(q - running, k, v, attn_mask=mask)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


# --- precision, small inputs -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": boolean(64)}], ids=str)
@pytest.mark.parametrize("eps", [None, 1e-5])
def test_half_precision_error_is_a_few_roundings(dtype, options, eps):
    inputs = qkv(n=64, m=64, d=32, dv=32, dtype=dtype)
    exact = normalized_attention_reference(
        *(x.detach().double() for x in inputs), eps=eps, **options
    )
    out = normalized_attention(*inputs, eps=eps, **options)
    error = (out.double() - exact).norm() / exact.norm()
    assert out.dtype == dtype and error < 3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"attn_mask": boolean(N, M)}], ids=str
)
def test_equal_keys_give_the_mean_of_the_values(dtype, options):
    """σ² = 0: the scores are a constant of up to 1/ε, more than float16 holds."""
    q, _, v = qkv(dtype=dtype)
    k = torch.full((B, H, M, D), 1.7, dtype=dtype).requires_grad_()
    out, *gradients = output_and_gradients(normalized_attention, [q, k, v], eps=1e-5, **options)
    expected = softmax_attention_reference(torch.zeros_like(q), k, v, **options)
    tol = {torch.float64: 1e-9, torch.float32: 2e-3}.get(dtype, 6e-2)
    torch.testing.assert_close(out, expected, rtol=tol, atol=tol)
    if dtype != torch.float16:  # whose range does not hold the gradient either, which is 1/ε large
        assert all(bool(x.isfinite().all()) for x in gradients)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_one_key_gives_its_value(form, dtype):
    for n in (1, N):
        for options in ({}, {"is_causal": True}, {"attn_mask": torch.ones(1, 1).bool()}):
            q, k, v = qkv(n=n, m=1, dtype=dtype)
            out, dq, dk, _ = output_and_gradients(form, [q, k, v], eps=1e-2, **options)
            torch.testing.assert_close(out, v.expand_as(out), rtol=1e-2, atol=1e-2)
            assert bool((dq == 0).all()) and bool((dk == 0).all())


EMPTY = {"no batch": ((0, H), N, M), "no head": ((B, 0), N, M)}
EMPTY |= {"no query": ((B, H), 0, M), "no key": ((B, H), N, 0), "nothing": ((0, 0), 0, 0)}


@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "float"])
@pytest.mark.parametrize("form", FORMS)
def test_empty_inputs(form, kind, shape):
    leading, n, m = shape
    options = {"boolean": torch.ones(n, m).bool(), "float": torch.zeros(n, m)}
    options = {"attn_mask": options[kind]} if kind in options else {"is_causal": kind == "causal"}
    for eps in (None, 0.1):
        results = output_and_gradients(form, qkv(leading, n=n, m=m), eps=eps, **options)
        assert results[0].shape == (*leading, n, DV)
        assert all(bool((x == 0).all()) for x in results)


# --- no matrix in memory -----------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("eps", [None, 0.1])
@pytest.mark.parametrize("masked", ["none", "causal", "padding", "per query"])
def test_no_matrix_is_stored(masked, eps):
    length = 96
    inputs = [*qkv((2, 4), n=length, m=length, d=4, dv=4), per_head(4)]
    options = {"none": {}, "causal": {"is_causal": True}, "padding": {"attn_mask": boolean(length)}}
    options |= {"per query": {"attn_mask": boolean(length, length)}}
    sizes = []
    for form in FORMS:
        with Largest() as largest, sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            output_and_gradients(with_beta(form, eps=eps, **options[masked]), inputs)
        sizes.append(largest.numel)
    assert sizes[1] >= 8 * length**2, "the recorder must see the reference's matrix"
    # a mask (N, M) is there already; there must be none for each head
    assert sizes[0] < length**2 / 2 if masked != "per query" else sizes[0] <= length**2
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises where no fused kernel will do
        output_and_gradients(with_beta(normalized_attention, eps=eps, **options[masked]), inputs)


def test_memory_grows_linearly():
    sizes = []
    for length in (200, 400):
        with Largest() as largest:
            output_and_gradients(normalized_attention, qkv(n=length, m=length), is_causal=True)
        sizes.append(largest.numel)
    assert sizes[1] <= 2.1 * sizes[0]


# --- compilers, autocast -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "eps"), [("causal", 0.1), ("per query, additive", 0.1)])
def test_compiles_without_a_break(name, eps):
    torch._dynamo.reset()
    function = with_beta(normalized_attention, eps=eps, **MASKS[name])
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    inputs = [*qkv(), per_head()]
    ours = output_and_gradients(compiled, inputs)
    assert_all_close(ours, output_and_gradients(function, inputs), 1e-12)


@pytest.mark.parametrize("eps", [None, 0.1])
@pytest.mark.parametrize("name", MASKS)
def test_autocast(name, eps):
    inputs = qkv(dtype=torch.float32)
    exact = normalized_attention(*(x.detach().double() for x in inputs), eps=eps, **MASKS[name])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = normalized_attention(*inputs, eps=eps, **MASKS[name])
        mixed = normalized_attention(inputs[0].bfloat16(), *inputs[1:], eps=eps, **MASKS[name])
    assert out.dtype == mixed.dtype == torch.bfloat16
    for x in (out, mixed):
        assert bool((x.double() - exact).norm() < 0.05 * exact.norm())


def test_shapes_alone():
    x = torch.zeros(B, H, N, D, device="meta")
    mask = torch.ones(N, N, dtype=torch.bool, device="meta")
    assert normalized_attention(x, x, x, attn_mask=mask, eps=0.1).shape == x.shape


# --- the layer ---------------------------------------------------------------------------------

E, HEADS = 16, 4


def layer_inputs(dtype=torch.float64):
    x = tensors((B, M, E), dtype=dtype, seed=4)[0]
    padding = torch.arange(M) >= torch.tensor([M, 4])[:, None]
    return x, padding


def test_layer_is_the_function_between_pytorchs_projections():
    theirs = nn.MultiheadAttention(E, HEADS, batch_first=True, dtype=torch.float64)
    ours = NormalizedAttention(E, HEADS, beta=[0.1, 0.5, 1.0, 2.0], eps=0.1, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())  # strict: a fixed β is no weight
    x, padding = layer_inputs()
    q, k, v = (
        y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for y in nn.functional.linear(x, theirs.in_proj_weight, theirs.in_proj_bias).chunk(3, -1)
    )
    beta = torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=torch.float64)
    mask = ~padding[:, None, None]
    h = normalized_attention_reference(q, k, v, beta=beta, eps=0.1, attn_mask=mask)
    expected = theirs.out_proj(h.transpose(1, 2).flatten(-2))
    for given_mask in (padding, torch.where(padding, -math.inf, 0.0).double()):
        out, none = ours(x, x, x, key_padding_mask=given_mask, need_weights=False)
        assert none is None
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    out, A = ours(x, x, x, key_padding_mask=padding, average_attn_weights=False)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close((A @ v), h, rtol=1e-11, atol=1e-11)


def test_layer_without_centring_is_the_softmax_layer():
    plain = MultiheadAttention(E, HEADS, dtype=torch.float64)
    ours = NormalizedAttention(E, HEADS, beta=0.0, dtype=torch.float64)
    ours.load_state_dict(plain.state_dict())
    x, padding = layer_inputs()
    for options in ({"is_causal": True}, {"key_padding_mask": padding}):
        left, right = (f(x, x, x, need_weights=False, **options)[0] for f in (ours, plain))
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11)


def test_layer_with_padding_and_causal_sees_no_future():
    layer = NormalizedAttention(E, HEADS, dtype=torch.float64)
    x, padding = layer_inputs()
    out, _ = layer(x, x, x, key_padding_mask=padding, is_causal=True, need_weights=False)
    for t in range(M - 1):
        (slope,) = torch.autograd.grad(out[:, : t + 1].sum(), x, retain_graph=True)
        assert bool((slope[:, t + 1 :] == 0).all()) and bool((slope[:, : t + 1] != 0).any())


def test_learned_beta_is_one_parameter_per_head():
    layer = NormalizedAttention(E, HEADS, beta=0.6, learn_beta=True)
    assert layer.state_dict()["attention.beta"].tolist() == pytest.approx([0.6] * HEADS)
    assert "beta=learned" in repr(layer)
    x, padding = layer_inputs(torch.float32)
    layer(x, x, x, key_padding_mask=padding, need_weights=False)[0].square().sum().backward()
    assert bool((layer.attention.beta.grad != 0).all())
    again = copy.deepcopy(layer)
    assert torch.equal(again(x, x, x)[0], layer(x, x, x)[0])


def test_fixed_beta_is_shown_and_follows_the_layer():
    layer = NormalizedAttention(E, HEADS, beta=0.5).double()
    assert (
        "beta=[0.5, 0.5, 0.5, 0.5]" in repr(layer) and layer.attention.beta.dtype.is_floating_point
    )
    assert not any("beta" in name for name in layer.state_dict())
    x, _ = layer_inputs()
    assert layer(x, x, x)[0].dtype == torch.float64


BEST = {
    "hyperparameter": functools.partial(NormalizedAttention, beta=0.6),
    "learned": functools.partial(NormalizedAttention, learn_beta=True),
    "full": functools.partial(NormalizedAttention, eps=1e-5),
    "linear": functools.partial(NormalizedAttention, kernel=linear_attention),
    "class": NormalizedAttention,
}


@pytest.mark.parametrize("attention", BEST.values(), ids=BEST)
def test_trains_inside_the_classifier(attention):
    torch.manual_seed(0)
    model = SeriesClassifier(3, 4, 7, dim=16, heads=4, hidden=32, dropout=0.0, attention=attention)
    x = torch.randn(12, 7, 3)
    padding = torch.arange(7) >= torch.tensor([7, 4, 1])[:, None].repeat(4, 1)
    y = torch.arange(12) % 4
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = nn.functional.cross_entropy(model(x, padding), y)
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    for A in model.attention_maps(x, padding):
        assert A.shape == (12, 4, 7, 7)
        torch.testing.assert_close(A.sum(-1), torch.ones(12, 4, 7))


def test_dropout_in_training():
    layer = NormalizedAttention(E, HEADS, dropout=0.5)
    x, _ = layer_inputs(torch.float32)
    first, second = (layer.train()(x, x, x, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(first, second)
    first, second = (layer.eval()(x, x, x, need_weights=False)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_mechanism_alone_works_in_any_layer():
    layer = MultiheadAttention(E, HEADS, attention=Normalized(HEADS, beta=0.6))
    other = NormalizedAttention(E, HEADS, beta=0.6)
    other.load_state_dict(layer.state_dict())
    x, _ = layer_inputs(torch.float32)
    assert torch.equal(layer(x, x, x)[0], other(x, x, x)[0])


# --- errors ------------------------------------------------------------------------------------

X = torch.zeros(B, H, N, D)
BAD = {
    "beta: NaN": (ValueError, "beta is nan; expected a finite number", {"beta": math.nan}),
    "beta: inf": (ValueError, "beta is inf", {"beta": math.inf}),
    "beta: text": (TypeError, "beta is of type str", {"beta": "0.6"}),
    "beta: boolean": (TypeError, "beta is of type bool", {"beta": True}),
    "beta: list": (TypeError, "beta is of type list", {"beta": [0.1] * H}),
    "beta: heads": (ValueError, r"beta has shape \(2,\); expected .* \(3,\)",
                    {"beta": torch.zeros(2)}),
    "beta: matrix": (ValueError, r"beta has shape \(3, 1\)", {"beta": torch.zeros(H, 1)}),
    "beta: integers": (TypeError, "beta has dtype torch.int64", {"beta": torch.tensor(1)}),
    "beta: device": (ValueError, "beta is on device meta", {"beta": torch.zeros(H, device="meta")}),
    "eps: zero": (ValueError, "eps is 0; expected a finite positive number", {"eps": 0}),
    "eps: negative": (ValueError, "eps is -1e-05", {"eps": -1e-5}),
    "eps: NaN": (ValueError, "eps is nan", {"eps": math.nan}),
    "eps: text": (TypeError, "eps is of type str", {"eps": "1"}),
    "scale": (ValueError, "scale is -1.0", {"scale": -1.0}),
    "mask": (ValueError, "attn_mask has shape", {"attn_mask": torch.ones(4, 1, N, N)}),
    "mask: NaN": (ValueError, "attn_mask contains NaN", {"attn_mask": torch.full((N,), math.nan)}),
    "both": (ValueError, "attn_mask and is_causal", {"attn_mask": X[0, 0, :, :5],
                                                     "is_causal": True}),
    "k": (ValueError, "k has shape", {"k": X[0]}),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("form", FORMS)
def test_bad_argument_is_named(form, bad):
    error, match, changed = bad
    with pytest.raises(error, match=match):
        form(**{"q": X, "k": X, "v": X, **changed})


KERNELS = {
    "kernel": (TypeError, "kernel is 'linear'; expected a function", {"kernel": "linear"}),
    "centre_keys": (TypeError, "centre_keys is 1; expected True, False or None",
                    {"centre_keys": 1}),
    "causal": (ValueError, "centre_keys is None with is_causal=True",
               {"kernel": linear_attention, "is_causal": True}),
    "per query": (ValueError, r"attn_mask has shape \(5, 5\), one row per query",
                  {"kernel": linear_attention, "attn_mask": torch.ones(N, N).bool()}),
}  # fmt: skip


@pytest.mark.parametrize("bad", KERNELS.values(), ids=KERNELS)
def test_bad_kernel_is_named(bad):
    error, match, changed = bad
    with pytest.raises(error, match=match):
        normalized_attention(X, X, X, **changed)


@pytest.mark.parametrize(
    ("match", "changed"),
    [
        (r"beta is \[0.1, 0.2\]; expected one number, or one for each of 4", {"beta": [0.1, 0.2]}),
        ("beta is nan", {"beta": math.nan}),
        ("eps is 0", {"eps": 0}),
        ("embed_dim is 16 and num_heads 5", {"num_heads": 5}),
    ],
)
def test_bad_construction_is_named(match, changed):
    with pytest.raises(ValueError, match=match):
        NormalizedAttention(**{"embed_dim": E, "num_heads": HEADS, **changed})


# --- on a GPU ----------------------------------------------------------------------------------


@cuda
@pytest.mark.parametrize("eps", [None, 1e-2])
@pytest.mark.parametrize("name", ["none", "causal", "padding", "per query"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_equals_float64_on_cpu(dtype, name, eps):
    masks = MASKS[name]
    exact = normalized_attention_reference(
        *(x.detach().double() for x in qkv(dtype=dtype)), eps=eps, **masks
    )
    on_gpu = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in masks.items()}
    out = normalized_attention(*qkv(dtype=dtype, device="cuda"), eps=eps, **on_gpu)
    error = (out.cpu().double() - exact).norm() / exact.norm()
    assert error < 10 * torch.finfo(dtype).eps
