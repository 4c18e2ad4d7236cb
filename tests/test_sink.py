"""Tests of softmax with a sink: derivations, Transformers' code and limits, beyond the contract."""

from __future__ import annotations

import functools
import math
import types

import pytest
import torch
from helpers import (
    B,
    D,
    H,
    M,
    N,
    assert_all_close,
    assert_learns,
    boolean,
    qkv,
    with_gradients,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from derived_attention import plugs, sink_attention_reference
from derived_attention.common.masks import Mask, causal_mask
from derived_attention.mixture.core import mixture_attention
from derived_attention.softmax.core import softmax_attention
from derived_attention.softmax.sink import SinkAttention, sink_attention, sink_attention_weights

pytestmark = pytest.mark.usefixtures("no_short_forms")
FORMS = [sink_attention, sink_attention_reference]
both_forms = pytest.mark.parametrize("form", FORMS)
BIAS = torch.tensor([-1.5, 0.0, 2.0], dtype=torch.float64)
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "keys": {"attn_mask": boolean(M)},
    "any": {"attn_mask": boolean(B, H, N, M)},
    "numbers": {"attn_mask": torch.linspace(-2, 2, N * M, dtype=torch.float64).view(N, M)},
}
every_mask = pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)


def scores_of(q, k, options):
    """Return the masked scores."""
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if options.get("is_causal"):
        return s.masked_fill(~causal_mask(*s.shape[-2:]), -math.inf)
    mask = options.get("attn_mask")
    if mask is None:
        return s
    return s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask


# --- one formula, several derivations -------------------------------------------------------------


def gate(q, k, v, bias, **options):
    """Return σ(lse(s) − b) softmax(s) V."""
    s = scores_of(q, k, options)
    share = (s.logsumexp(-1, keepdim=True) - bias.view(-1, 1, 1)).sigmoid()
    return share * softmax_attention(q, k, v, **options)


def normaliser(q, k, v, bias, **options):
    """Return chapter 3's expansion Σ_j κ_j v_j / h(q), with h(q) = e^b + Σ_j κ_j."""
    kappa = scores_of(q, k, options).exp()
    return kappa @ v / (bias.exp().view(-1, 1, 1) + kappa.sum(-1, keepdim=True))


def posterior(q, k, v, bias, **options):
    """Return the posterior mean over keys and one more Gaussian at the origin, of weight e^b."""
    s = scores_of(q, k, options)
    background = bias.view(-1, 1, 1).expand(*s.shape[:-1], 1)
    posterior = torch.cat([background, s], -1).softmax(-1)
    return posterior @ torch.cat([torch.zeros_like(v[..., :1, :]), v], -2)


def ridge_on_the_constant(q, k, v, bias, **options):
    """Return the h that minimises Σ_j κ_j ‖v_j − h‖² + e^b ‖h‖², by normal equations."""
    kappa = scores_of(q, k, options).exp().unsqueeze(-1)  # (..., N, M, 1)
    # One row √κ_j for each key, and √e^b for the penalty; targets √κ_j v_j and 0.
    penalty = (bias / 2).exp().view(-1, 1, 1, 1).expand(*kappa.shape[:-2], 1, 1)
    rows = torch.cat([kappa.sqrt(), penalty], -2)
    targets = kappa.sqrt() * v.unsqueeze(-3)
    targets = torch.cat([targets, torch.zeros_like(targets[..., :1, :])], -2)
    return torch.linalg.solve(rows.mT @ rows, rows.mT @ targets).squeeze(-2)


@both_forms
@every_mask
@pytest.mark.parametrize("derived", [gate, normaliser, posterior, ridge_on_the_constant])
def test_derivations_are_one_formula(derived, options, form):
    inputs, bias = qkv(), BIAS.clone().requires_grad_()
    found = with_gradients(form, inputs, bias=bias, **options)
    assert_all_close(found, with_gradients(derived, inputs, bias=bias, **options), 1e-12)
    moved = derived(*inputs, BIAS + 0.1, **options)
    assert not torch.allclose(moved, found[0], atol=1e-4), "a changed bias gives the same output"


def test_a_minimum_is_lower_than_its_neighbours():
    q, k, v = (x.detach() for x in qkv())
    h = sink_attention(q, k, v, bias=BIAS)
    kappa = (q @ k.mT / math.sqrt(D)).exp()

    def loss(h):
        errors = (v.unsqueeze(-3) - h.unsqueeze(-2)).square().sum(-1)
        return (kappa * errors).sum(-1) + BIAS.exp()[:, None] * h.square().sum(-1)

    for seed in range(10):
        step = torch.randn(h.shape, generator=torch.Generator().manual_seed(seed)).double()
        assert bool((loss(h + 1e-3 * step) > loss(h)).all())
    plain = softmax_attention(q, k, v)
    assert bool((loss(plain) > loss(h)).all()), "softmax is the minimum only without the penalty"


def test_a_sink_is_a_mixture_with_a_key_far_away():
    """Use a far key of value 0, whose weight is nearly the same for every query."""
    q, k, v = (0.1 * x.detach() for x in qkv((1, 1)))
    k = k / k.norm(dim=-1, keepdim=True)  # keys of one length, so distances give scores
    far, value = 1e4, torch.zeros_like(v[..., :1, :])
    direction = torch.zeros(D, dtype=q.dtype)
    direction[0] = far
    q = q - q * (torch.arange(D) == 0)  # queries are orthogonal to `direction`
    keys = torch.cat([k, direction.expand(1, 1, 1, D)], -2).unsqueeze(-3)
    b = 0.3  # the mask makes up for the distance of the far key
    bias = (far**2 - 1) / 2 / math.sqrt(D) + b
    mask = torch.zeros(M + 1, dtype=q.dtype)
    mask[-1] = bias
    mixed = mixture_attention(q, keys, torch.cat([v, value], -2), attn_mask=mask)
    assert_all_close([mixed], [sink_attention(q, k, v, bias=b)], 1e-7)


# --- other code -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gpt_oss_of_transformers(dtype):
    plugs.mend_torchvision()
    module = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    q, k, v = qkv((B, 4), n=9, m=9, d=8, dv=8, dtype=dtype)
    k, v = (x[:, :2].detach().requires_grad_() for x in (k, v))
    sinks = torch.linspace(-2, 2, 4, dtype=dtype).requires_grad_()
    mask = torch.zeros(9, 9, dtype=dtype).masked_fill(~causal_mask(9, 9), torch.finfo(dtype).min)

    def theirs(q, k, v, bias):
        layer = types.SimpleNamespace(num_key_value_groups=2, sinks=bias, training=False)
        out, _ = module.eager_attention_forward(layer, q, k, v, mask, scaling=0.3)
        return out.transpose(1, 2)

    ours = functools.partial(sink_attention, is_causal=True, enable_gqa=True, scale=0.3)
    tol = 1e-5 if dtype == torch.float32 else 1e-12
    expected = with_gradients(theirs, (q, k, v), bias=sinks)
    assert_all_close(with_gradients(ours, (q, k, v), bias=sinks), expected, tol)
    off_by_one = ours(q, k, v, bias=0.0)  # the mistake: score 0 for every sink
    assert float((off_by_one - expected[0]).detach().abs().max()) > 1e-2


# --- limits ---------------------------------------------------------------------------------------


@both_forms
@every_mask
def test_a_low_sink_is_softmax(form, options):
    found = with_gradients(form, qkv(), bias=-1000.0, **options)
    assert_all_close(found, with_gradients(softmax_attention, qkv(), **options), 1e-12)
    lower = [
        float((form(*qkv(), bias=b, **options) - found[0]).detach().abs().max())
        for b in (0, -5, -10)
    ]
    assert lower[0] > lower[1] > lower[2] > 0


@both_forms
def test_a_high_sink_takes_everything(form):
    assert float(form(*qkv(), bias=1000.0).detach().abs().max()) == 0
    q, k, v = qkv(dtype=torch.float16)
    assert float(form(q, k, v, bias=60.0).detach().abs().max()) < 1e-6


@settings(max_examples=50, deadline=None)
@given(st.floats(-8, 8), st.floats(0.05, 4), st.integers(0, 10**6), st.booleans())
def test_weights_are_what_the_sink_leaves(b, scale, seed, is_causal):
    q, k, v = (x.detach() for x in qkv(seed=seed))
    options = {"bias": b, "scale": scale, "is_causal": is_causal}
    A = sink_attention_weights(q, k, **options)
    left = A.sum(-1)
    assert bool((left <= 1 + 1e-12).all())
    assert_all_close([A @ v], [sink_attention(q, k, v, **options)], 1e-10)
    s = Mask(None, is_causal).for_scores(A)
    s = (scale * q @ k.mT).masked_fill(~s, -math.inf) if is_causal else scale * q @ k.mT
    assert_all_close([left], [(s.logsumexp(-1) - b).sigmoid()], 1e-10)


def test_a_number_is_one_sink_for_all_heads():
    for form in FORMS:
        one, each = form(*qkv(), bias=0.7), form(*qkv(), bias=BIAS.new_full((H,), 0.7))
        assert_all_close([one, form(*qkv(), bias=BIAS.new_tensor(0.7))], [each, each], 1e-14)
    q, k, v = qkv(())
    assert_all_close([sink_attention(q, k, v, bias=BIAS[2])],
                     [sink_attention_reference(q, k, v, bias=2.0)], 1e-12)  # fmt: skip


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 30.0])
def test_small_dtypes_hold_the_sink_at_any_scale(scale):
    for dtype, tol in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        q, k, v = (x.detach().to(dtype) for x in qkv())
        found = sink_attention(q, k, v, bias=1.0, scale=scale)
        expected = sink_attention(q.double(), k.double(), v.double(), bias=1.0, scale=scale)
        assert_all_close([found.double()], [expected], tol)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_no_sink_is_too_large_under_a_mask(dtype):
    q, k, v = (x.detach().to(dtype) for x in qkv())
    plain = softmax_attention(q, k, v, boolean(N, M))
    for large in (1e5, 1e9, torch.finfo(torch.float32).max):
        assert not sink_attention(q, k, v, boolean(N, M), bias=large).any()
        low = sink_attention(q, k, v, boolean(N, M), bias=-large)
        assert_all_close([low], [plain], 2e-2)


# --- wrong inputs, and the layer ------------------------------------------------------------------

WRONG = [
    (True, TypeError, "bias is of type bool; expected a finite number or a floating Tensor"),
    ("0", TypeError, "bias is of type str; expected a finite number or a floating Tensor"),
    (None, TypeError, "bias is of type NoneType; expected a finite number"),
    (math.inf, ValueError, "bias is inf; expected a finite number"),
    (-math.inf, ValueError, "bias is -inf; expected a finite number"),
    (math.nan, ValueError, "bias is nan; expected a finite number"),
    (torch.zeros(H).long(), TypeError, "bias is of dtype torch.int64; expected a floating Tensor"),
    (torch.zeros(H + 1), ValueError, r"bias has shape \(4,\); expected one of .*for each head"),
    (torch.zeros(H, 1), ValueError, r"bias has shape \(3, 1\); expected one of"),
    (torch.zeros(H, device="meta"), ValueError, "bias is on device meta; expected cpu"),
]


@pytest.mark.parametrize(("bias", "kind", "words"), WRONG)
def test_wrong_biases_are_named(bias, kind, words):
    for form in FORMS:
        with pytest.raises(kind, match=words):
            form(*qkv(), bias=bias)
    with pytest.raises(kind, match=words):
        sink_attention_weights(*qkv()[:2], bias=bias)


def test_the_bias_is_asked_for():
    with pytest.raises(TypeError, match="bias"):
        sink_attention(*qkv())


def test_a_layer_starts_off_by_one_and_learns():
    torch.manual_seed(0)
    layer = SinkAttention(12, 3).double()
    assert isinstance(layer.sinks, torch.nn.Parameter) and layer.sinks.shape == (3,)
    assert not layer.sinks.any() and "bias" not in dict(layer.named_parameters())
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    _, A = layer(x, x, x, average_attn_weights=False)
    assert bool((A.sum(-1) < 1).all())
    with torch.no_grad():
        layer.sinks.copy_(torch.tensor([-50.0, 0.0, 50.0]))
    left = layer(x, x, x, average_attn_weights=False)[1].sum(-1).detach()
    assert_all_close([left[:, 0], left[:, 2]], [1 + 0 * left[:, 0], 0 * left[:, 2]], 1e-12)
    assert_learns(SinkAttention(12, 3).double(), x, "a layer with a sink")


def test_a_layer_without_projection_biases_has_its_sinks():
    layer = SinkAttention(12, 3, bias=False)
    assert layer.in_proj_bias is None and layer.sinks.shape == (3,)
