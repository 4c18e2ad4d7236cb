"""Attention-BN: the formula, claims of the paper, statistics, causality, β and ε, the layer.

`test_contract` tests what all mechanisms have in common.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from helpers import (
    DTYPES,
    B,
    D,
    H,
    Largest,
    M,
    N,
    additive,
    assert_agree,
    assert_all_close,
    assert_named,
    boolean,
    output_and_gradients,
    qkv,
    tensors,
    with_gradients,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from derived_attention import (
    linear_attention_reference,
    normalized_attention_reference,
    softmax_attention_reference,
)
from derived_attention.batch_norm.core import FIRST, key_statistics, normalized_attention
from derived_attention.batch_norm.layer import NormalizedAttention
from derived_attention.common.masks import Mask, causal_mask
from derived_attention.layer import ALL
from derived_attention.linear.core import linear_attention
from derived_attention.softmax.core import softmax_attention
from derived_attention.sparse.core import window_attention, window_mask

FORMS = [normalized_attention, normalized_attention_reference]


def per_head(h=H):
    return torch.linspace(-0.4, 1.3, h, dtype=torch.float64).requires_grad_()


def with_dead_row(mask, row=2):
    mask = mask.clone()
    mask[..., row, :] = False
    return mask


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "padding": {"attn_mask": boolean(B, 1, 1, M)},
    "bias on keys": {"attn_mask": additive(boolean(M), torch.randn(M))},
    "per head": {"attn_mask": boolean(H, 1, M)},
    "per query": {"attn_mask": with_dead_row(boolean(N, M))},
    "per query, additive": {"attn_mask": additive(with_dead_row(boolean(N, M)), 0.3)},
    "per query and head": {"attn_mask": boolean(H, N, M)},
    "whole rows": {"attn_mask": boolean(N, 1)},
}


# --- the formula -------------------------------------------------------------------------------


def test_reference_is_the_full_form_number_by_number():
    """Eq. 22, in plain Python."""
    q, k, v = (x.detach() for x in qkv((), n=2, m=3, d=2, dv=1))
    out = normalized_attention_reference(q, k, v, eps=0.1)
    q, k, v = (x.tolist() for x in (q, k, v))
    mu = [sum(k[j][d] for j in range(3)) / 3 for d in range(2)]
    var = [sum((k[j][d] - mu[d]) ** 2 for j in range(3)) / 3 for d in range(2)]

    def score(i, j):
        terms = ((q[i][d] - mu[d]) * (k[j][d] - mu[d]) / (var[d] + 0.1) for d in range(2))
        return sum(terms) / math.sqrt(2)

    for i in range(2):
        e = [math.exp(score(i, j)) for j in range(3)]
        expected = sum(e[j] * v[j][0] for j in range(3)) / sum(e)
        assert out[i, 0].item() == pytest.approx(expected, rel=1e-12)


def test_both_forms_are_the_recentred_form():
    """Eq. 26: softmax attention with β μ subtracted from queries and keys."""
    q, k, v = qkv()
    for beta in (0.0, 0.6, 1.0, -2.0):
        shift = beta * k.mean(-2, keepdim=True)
        expected = softmax_attention_reference(q - shift, k - shift, v)
        for form in FORMS:
            torch.testing.assert_close(form(q, k, v, beta=beta), expected)


@pytest.mark.parametrize("eps", [None, 0.05])
def test_every_head_s_beta_has_its_gradient_under_every_mask(eps):
    for name, masks in MASKS.items():
        own = {"beta": per_head(), "eps": eps, **masks}
        assert bool((with_gradients(FORMS[0], qkv(), **own)[-1] != 0).all()), name
        assert_agree(FORMS, qkv(), name, **own)
    one = torch.tensor(0.7).double().requires_grad_()
    assert_agree(FORMS, qkv(), tol=1e-11, beta=one, eps=eps)


# --- claims of the paper -----------------------------------------------------------------------


def test_full_form_is_recentred_where_all_variances_are_one():
    q, k, v = qkv()
    mean, variance, _ = key_statistics(k, Mask())
    white = (k - mean) / variance.sqrt()
    full = normalized_attention(q, white, v, eps=1e-3, scale=1.001 / math.sqrt(D))
    torch.testing.assert_close(full, normalized_attention(q, white, v), rtol=1e-12, atol=1e-12)


def test_penalty_is_on_length_along_the_mean_not_on_closeness():
    """Five keys are equal and one is far from them; the far key loses weight."""
    k = torch.tensor([1.0, 1, 1, 1, 1, 10]).double()[:, None]
    q = torch.zeros(1, 1).double()
    weights = [normalized_attention(q, k, torch.eye(6).double(), beta=b)[0] for b in (0.0, 0.2)]
    assert weights[1][5] < weights[0][5] and bool((weights[1][:5] > weights[0][:5]).all())


def test_invariances_of_the_full_form():
    """A common shift or, as ε → 0, a common scale of queries and keys changes nothing."""
    q, k, v = qkv()
    c, a = torch.linspace(-3, 3, D).double(), torch.linspace(0.5, 2, D).double()
    for form in FORMS:
        for eps in (None, 0.1):
            torch.testing.assert_close(form(q + c, k + c, v, eps=eps), form(q, k, v, eps=eps))
        same = torch.allclose(form(a * q, a * k, v, eps=1e-12), form(q, k, v, eps=1e-12), atol=1e-8)
        assert same and not torch.allclose(form(a * q, a * k, v), form(q, k, v), atol=1e-3)


# --- statistics --------------------------------------------------------------------------------


def test_statistics_are_those_of_the_keys_that_a_query_may_attend():
    k = qkv()[1].detach() + 1e3
    for name, masks in MASKS.items():
        statistics = key_statistics(k, Mask(**masks))
        mean, variance, count = (x.expand(B, H, -1, -1) for x in statistics)
        rows = mean.shape[-2]
        here = causal_mask(M, M) if name == "causal" else masks.get("attn_mask", torch.tensor(True))
        here = (here if here.dtype == torch.bool else here > -math.inf).expand(B, H, rows, M)
        tol = 1e-8 if name.startswith("per query") else 1e-11
        for b, h, i in torch.cartesian_prod(*map(torch.arange, (B, H, rows))).tolist():
            keys = k[b, h][here[b, h, i]]
            assert float(count[b, h, i]) == len(keys), name
            if len(keys):
                expected = keys.mean(0), keys.var(0, correction=0)
                assert_all_close((mean[b, h, i], variance[b, h, i]), expected, tol, name)


def test_variance_in_a_window_does_not_cancel():
    """No key is in all windows, and the mean is large or drifts."""
    for drift in (0, 100):
        k = qkv(m=200, dtype=torch.float32)[1].detach() + 1e4 + drift * torch.arange(200.0)[:, None]
        band = (torch.arange(200)[:, None] - torch.arange(200)).abs() <= 3
        for mask in (band, band & causal_mask(200, 200)):
            _, variance, _ = key_statistics(k, Mask(mask))
            exact = [k[..., row, :].double().var(-2, correction=0) for row in mask]
            exact = torch.stack(exact, -2)
            assert float(((variance - exact).abs() / exact.clamp(min=1e-2)).max()) < 1e-3


@pytest.mark.parametrize("constant", [0.3, 10.0])
def test_a_constant_feature_of_the_keys_costs_no_precision(constant):
    """For this feature, 1/(σ² + ε) = 1/ε multiplies a number that all keys share."""
    for options in ({}, {"is_causal": True}, {"attn_mask": boolean(64)}):
        q, k, v = (x.detach() for x in qkv(n=64, m=64, d=16, dtype=torch.float32))
        k[..., 0] = constant
        exact = FORMS[1](q.double(), k.double(), v.double(), eps=1e-5, **options)
        out = FORMS[0](q, k, v, eps=1e-5, **options)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_running_variance_does_not_cancel():
    """In float32, E k² − μ² has no correct digit here."""
    k = qkv(m=200, dtype=torch.float32)[1].detach() + 1e4
    _, variance, _ = key_statistics(k, Mask(is_causal=True))
    exact = torch.stack([k[..., : t + 1, :].double().var(-2, correction=0) for t in range(200)], -2)
    assert float(((variance - exact).abs() / exact.clamp(min=1e-2)).max()) < 1e-2
    naive = (k**2).cumsum(-2) / 200 - (k.cumsum(-2) / 200) ** 2
    assert float((naive[..., -1, :] - exact[..., -1, :]).abs().max()) > 1


def test_a_mask_for_all_heads_is_copied_for_none():
    length = 96
    inputs = qkv((2, 4), n=length, m=length, d=4, dv=4)
    own = {"beta": per_head(4), "eps": 0.1, "attn_mask": boolean(length, length)}
    with Largest() as largest, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with_gradients(normalized_attention, inputs, **own)  # raises if no fused kernel applies
    assert largest.numel <= length**2


# --- causality ---------------------------------------------------------------------------------


def test_a_causal_mask_sees_no_future_either():
    """The layer passes such a mask if there is padding too."""
    q, k, v = (x.detach() for x in qkv(n=M))
    keep = causal_mask(M, M) & (torch.arange(M) != 1)
    later = (torch.arange(M) > 3)[:, None]
    for eps in (None, 1e-2):
        outs = [normalized_attention(q, k + a * later, v, attn_mask=keep, eps=eps) for a in (0, 7)]
        assert torch.equal(outs[0][..., :4, :], outs[1][..., :4, :])
        assert not torch.allclose(outs[0][..., 4:, :], outs[1][..., 4:, :])


# --- other mechanisms --------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [None, 0.1])
def test_linear_attention_needs_its_keys_centred(eps):
    pairs = zip(FORMS, (linear_attention, linear_attention_reference), strict=True)
    fast, reference = (functools.partial(form, attention=f) for form, f in pairs)
    for name in ("none", "padding", "per head"):
        own = {"beta": per_head(), "eps": eps, **MASKS[name]}
        out = assert_agree([fast, reference], qkv(), name, **own)
        assert not torch.allclose(fast(*qkv(), center_keys=False, **own), out, atol=1e-3), name


@pytest.mark.parametrize("eps", [None, 0.1])
def test_causal_linear_attention_centres_a_key_by_its_own_past(eps):
    q, k, v = qkv(n=M)
    options = {"attention": linear_attention, "center_keys": True, "is_causal": True, "eps": eps}
    out = normalized_attention(q, k, v, beta=0.6, **options)
    mean, variance, count = key_statistics(k, Mask(is_causal=True))
    s = torch.tensor(1.0) if eps is None else (variance + eps).rsqrt()
    # A query with one key gives it the weight 1. But later queries use this key too.
    alone = count == 1 if eps is not None else torch.tensor(False)
    queries, keys = ((q - 0.6 * mean) * s).masked_fill(alone, 0), (k - 0.6 * mean) * s
    expected = linear_attention_reference(queries, keys, v, is_causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


def test_sparse_attention_is_a_softmax():
    q, k, v = qkv(n=M)
    running = k.cumsum(-2) / torch.arange(1, M + 1)[:, None]
    window = functools.partial(window_attention, window=2)
    for is_causal, mean in ((False, k.mean(-2, keepdim=True)), (True, running)):
        mask = window_mask(M, M, 2, is_causal=is_causal)
        expected = softmax_attention_reference(q - 0.6 * mean, k, v, attn_mask=mask)
        for center in (False,) if is_causal else (None, False, True):
            how = {"beta": 0.6, "attention": window, "center_keys": center, "is_causal": is_causal}
            out = normalized_attention(q, k, v, **how)
            torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


# --- keys without variance ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_keys_give_the_mean_of_the_values(dtype):
    """If σ² = 0, the scores are a constant of up to 1/ε, which overflows in float16."""
    q, _, v = qkv(dtype=dtype)
    k = torch.full((B, H, M, D), 1.7, dtype=dtype).requires_grad_()
    tol = {torch.float64: 1e-9, torch.float32: 2e-3}.get(dtype, 6e-2)
    for options in ({}, {"is_causal": True}, {"attn_mask": boolean(N, M)}):
        out, *grads = output_and_gradients(normalized_attention, [q, k, v], eps=1e-5, **options)
        expected = softmax_attention_reference(torch.zeros_like(q), k, v, **options)
        torch.testing.assert_close(out, expected, rtol=tol, atol=tol)
        if dtype != torch.float16:  # in which the gradient, of size 1/ε, overflows too
            assert all(bool(x.isfinite().all()) for x in grads)


@pytest.mark.parametrize("spread", [1.0, 1e-2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_causal_half_precision_is_as_exact_as_its_inputs(dtype, spread):
    """After the first `FIRST` queries, centred queries are passed on in half precision."""
    generator = torch.Generator().manual_seed(0)
    unit = torch.finfo(dtype).eps / 2
    q, k, v = (torch.randn(1, H, 2 * FIRST + 3, D, generator=generator) for _ in "qkv")
    halves = [x.to(dtype) for x in (q, spread * k + 2, v)]
    doubles = [x.double() for x in halves]
    rounded = [x * (1 + unit * (2 * torch.rand(x.shape, generator=generator) - 1)) for x in doubles]
    exact, moved, found = (
        output_and_gradients(
            normalized_attention, [x.requires_grad_() for x in x], eps=1e-3, is_causal=True
        )
        for x in (doubles, rounded, halves)
    )
    for name, e, m, f in zip(("out", *"qkv"), exact, moved, found, strict=True):
        allowed = 2 * (m - e).norm() + 4 * unit * e.norm()
        assert (f.double() - e).norm() <= allowed, name


def test_causal_half_precision_sees_no_future_bit_for_bit():
    q, k, v = (x.detach().bfloat16() for x in qkv(n=2 * FIRST, m=2 * FIRST))
    late = 300 * (torch.arange(2 * FIRST) > FIRST + 5)[:, None]
    outs = [
        normalized_attention(q, k + x, v + x, eps=1e-3, is_causal=True)[..., : FIRST + 6, :]
        for x in (0, late.bfloat16())
    ]
    assert torch.equal(*outs)


# --- the layer ---------------------------------------------------------------------------------

E, HEADS = 16, 4
BETAS = [0.1, 0.5, 1.0, 2.0]


def layer_inputs(dtype=torch.float64):
    x = tensors((B, M, E), dtype=dtype, seed=4)[0]
    return x, torch.arange(M) >= torch.tensor([M, 4])[:, None]


def test_layer_is_the_function_between_its_projections():
    """Also with two heads of keys for four of queries, each of which has its own β."""
    x, padding = layer_inputs()
    mask = ~padding[:, None, None]
    for sizes, eps, pair in (
        ({}, 0.1, (softmax_attention, softmax_attention_reference)),
        ({"head_dim": 3, "kv_heads": 2}, 0.1, (softmax_attention, softmax_attention_reference)),
        ({}, None, (linear_attention, linear_attention_reference)),
    ):
        own = {"beta": BETAS, "eps": eps, "attention": pair[0]}
        layer = NormalizedAttention(E, HEADS, dtype=torch.float64, **own, **sizes)
        q, k, v = (layer.project(part, x, ALL) for part in range(3))
        own = {"beta": torch.tensor(BETAS, dtype=torch.float64), "eps": eps, "attention": pair[1]}
        h = normalized_attention_reference(q, k, v, attn_mask=mask, **own)
        expected = layer.out_proj(h.transpose(1, 2).flatten(-2))
        for need_weights in (False, True):
            out = layer(x, x, x, key_padding_mask=padding, need_weights=need_weights)[0]
            torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


def test_compiles_for_lengths_that_change():
    torch._dynamo.reset()
    layer = NormalizedAttention(E, HEADS, beta=0.6, eps=0.1, dtype=torch.float64)
    run = lambda x: layer(x, x, x, need_weights=False)[0]  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="eager")
    for length in (5, 9, 14):
        x = torch.randn(2, length, E, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), run(x))


def test_learned_beta_is_one_parameter_per_head():
    layer = NormalizedAttention(E, HEADS, beta=0.6, learn_beta=True)
    assert layer.state_dict()["beta"].tolist() == pytest.approx([0.6] * HEADS)
    assert "learned" in repr(layer)
    x, padding = layer_inputs(torch.float32)
    layer(x, x, x, key_padding_mask=padding, need_weights=False)[0].square().sum().backward()
    assert bool((layer.beta.grad != 0).all())


def test_fixed_beta_is_shown_and_no_part_of_the_state():
    for beta in (0.5, [0.5, 0.5, 0.25, 0.0]):
        layer = NormalizedAttention(E, HEADS, beta=beta).double()
        betas = beta if isinstance(beta, list) else [beta] * HEADS
        assert str(tuple(betas)) in repr(layer) and layer.beta is None
        assert not any("beta" in name for name in layer.state_dict())
        learned = NormalizedAttention(E, HEADS, beta=beta, learn_beta=True).double()
        learned.load_state_dict(layer.state_dict() | {"beta": torch.tensor(betas)})
        x, _ = layer_inputs()
        torch.testing.assert_close(layer(x, x, x)[0], learned(x, x, x)[0])


# --- errors ------------------------------------------------------------------------------------

X = torch.zeros(B, H, N, D)
BAD = [
    (ValueError, "beta is nan; expected a finite number", {"beta": math.nan}),
    (TypeError, "beta is of type bool", {"beta": True}),
    (TypeError, "beta is of type list", {"beta": [0.1] * H}),
    (ValueError, r"beta has shape \(2,\); expected .* \(3,\)", {"beta": torch.zeros(2)}),
    (TypeError, "beta is of dtype torch.int64", {"beta": torch.tensor(1)}),
    (ValueError, "beta is on device meta", {"beta": torch.zeros(H, device="meta")}),
    (ValueError, "eps is 0; expected a finite positive number", {"eps": 0}),
    (TypeError, "eps is of type str", {"eps": "1"}),
    (TypeError, "attention is 'linear'; expected a function", {"attention": "linear"}),
    (TypeError, "center_keys is 1; expected True or False", {"center_keys": 1}),
    (ValueError, "center_keys is None with is_causal=True",
     {"attention": linear_attention, "is_causal": True}),
    (ValueError, r"attn_mask has shape \(5, 5\), one row per query",
     {"attention": linear_attention, "attn_mask": torch.ones(N, N).bool()}),
]  # fmt: skip
BAD_LAYERS = [
    (ValueError, r"beta is \[0.1, 0.2\]; expected one number, or one for", {"beta": [0.1, 0.2]}),
    (ValueError, "beta is nan", {"beta": math.nan}),
    (TypeError, "beta is of type Tensor; expected one finite", {"beta": torch.ones(HEADS)}),
    (ValueError, "eps is 0", {"eps": 0}),
]


def test_bad_arguments_are_named():
    assert_named(BAD, normalized_attention, q=X, k=X, v=X)
    assert_named(BAD_LAYERS, NormalizedAttention, embed_dim=E, num_heads=HEADS)


def test_a_softmax_that_it_cannot_know_gives_the_same():
    def other(*arguments, **options):
        return softmax_attention(*arguments, **options)

    for eps in (None, 0.1):
        outs = [
            normalized_attention(*qkv(), eps=eps, attention=f) for f in (softmax_attention, other)
        ]
        torch.testing.assert_close(*outs, rtol=1e-11, atol=1e-11)
