"""Attention-SH and BN+SH: poolings, scales, padding in windows, the layers.

`test_contract` tests what all mechanisms have in common.
"""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from helpers import (
    DTYPES,
    B,
    D,
    Largest,
    N,
    assert_agree,
    assert_all_close,
    assert_learns,
    assert_named,
    output_and_gradients,
    qkv,
    tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from derived_attention import (
    linear_attention_reference,
    normalized_attention_reference,
    normalized_scaled_heads_attention_reference,
    scaled_heads_attention_reference,
    softmax_attention_reference,
)
from derived_attention.batch_norm.layer import NormalizedAttention
from derived_attention.common.masks import causal_mask
from derived_attention.common.pooling import (
    POOLINGS,
    ConvolutionPooling,
    average_pooling,
    kmeans_pooling,
    max_pooling,
)
from derived_attention.layer import ALL, MultiheadAttention
from derived_attention.linear.core import linear_attention
from derived_attention.scaled_heads.core import (
    normalized_scaled_heads_attention,
    scaled_heads_attention,
)
from derived_attention.scaled_heads.layer import (
    NormalizedScaledHeadsAttention,
    ScaledHeadsAttention,
)
from derived_attention.softmax.core import softmax_attention

H, M = 4, 11
SCALES = [1, 2, 2, 4]
PADDING = torch.tensor([[1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 0], [1] * M]).bool()[:, None, None]
FORMS = {
    "SH": (scaled_heads_attention, scaled_heads_attention_reference),
    "BN+SH": (normalized_scaled_heads_attention, normalized_scaled_heads_attention_reference),
}
ALL_POOLINGS = [*POOLINGS, "convolution"]
heads_of = functools.partial(qkv, (B, H), m=M, dv=3)


def pooling_of(name, scales=SCALES, dtype=torch.float64):
    return ConvolutionPooling(scales, dtype=dtype) if name == "convolution" else name


def assert_forms_agree(kind, what, inputs=None, forms=None, **options):
    inputs = heads_of() if inputs is None else inputs
    if kind == "BN+SH":
        heads = inputs[0].shape[-3]
        options |= {"beta": torch.linspace(-0.4, 1.3, heads).double().requires_grad_()}
    assert_agree(forms or FORMS[kind], inputs, what, **options)


# --- the formula -------------------------------------------------------------------------------


def test_reference_is_the_formula_window_by_window():
    """Eq. 25, for one head with scale 4 and 11 keys: windows of 4, 4 and 3."""
    q, k, v = (x.detach() for x in qkv((1,), m=M))
    out = scaled_heads_attention_reference(q, k, v, scales=[4])
    windows = [slice(0, 4), slice(4, 8), slice(8, 11)]
    for i in range(N):
        e = [math.exp(float(q[0, i] @ k[0, w].mean(0)) / math.sqrt(D)) for w in windows]
        expected = sum(e[j] / sum(e) * v[0, w].mean(0) for j, w in enumerate(windows))
        torch.testing.assert_close(out[0, i], expected)


@pytest.mark.parametrize("kind", FORMS)
def test_fast_equals_reference_for_all_scales(kind):
    # The first scales group the heads as 0 3 1 2, a permutation that is not its own inverse.
    for scales in ([2, 1, 4, 2], [3, 1, 3, 20], [1] * H, [11, 5, 11, 5]):
        assert_forms_agree(kind, f"{scales}", scales=scales)
    for mask in (PADDING, torch.zeros(M).bool()):
        options = {"attn_mask": mask, "class_token": True}
        assert_forms_agree(kind, f"class token, {mask}", scales=SCALES, **options)
    if kind == "BN+SH":
        assert_forms_agree(kind, "full", scales=SCALES, eps=0.1)
        assert_forms_agree(kind, "full, padded", scales=SCALES, eps=0.1, attn_mask=PADDING)


@pytest.mark.parametrize("kind", FORMS)
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 5),
    st.integers(0, 9), st.booleans(), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_fast_equals_reference_for_any_shape(kind, b, scales, n, m, class_token, masked, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = {"attn_mask": torch.rand(b, 1, 1, m, generator=generator) > 0.5} if masked else {}
    inputs = qkv((b, len(scales)), n=n, m=m, d=3, dv=2, seed=seed)
    assert_forms_agree(kind, "", inputs, scales=scales, class_token=class_token, **mask)


def test_scales_of_one_are_plain_attention_with_any_mask():
    q, k, v = heads_of()
    ones = [1] * H
    for options in ({}, {"is_causal": True}, {"attn_mask": causal_mask(N, M)}):
        out = scaled_heads_attention(q, k, v, scales=ones, **options)
        torch.testing.assert_close(out, softmax_attention_reference(q, k, v, **options))
        out = normalized_scaled_heads_attention(q, k, v, scales=ones, eps=0.1, **options)
        expected = normalized_attention_reference(q, k, v, eps=0.1, **options)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("pooling", ["average", "max", "k-means", "convolution"])
def test_a_scale_far_above_the_length_costs_nothing(pooling):
    """All steps form one window, and nothing is padded to the scale."""
    far, pool = 10**5, pooling
    q, k, v = (x.detach() for x in qkv((1, 2), n=7, m=7, d=4, dv=4))
    how = functools.partial(torch.amax if pooling == "max" else torch.mean, dim=-2, keepdim=True)
    exact = how(k), how(v)
    if pooling == "convolution":
        pool, exact = pooling_of(pooling, [far]), [7 / far * x for x in exact]
    with Largest() as largest:
        out = scaled_heads_attention(q, k, v, scales=[far, far], pooling=pool)
    assert largest.numel < 1000 or (pooling == "convolution" and largest.numel <= far)
    torch.testing.assert_close(out, softmax_attention(q, *exact))


def test_pooling_keeps_the_mean_and_loses_variance():
    """Eqs. 47 and 50 for μ and σ², if the scale divides the length."""
    k = qkv(m=12)[1]
    pooled, odd = (average_pooling(x, 4, None)[0](x) for x in (k, k[..., :11, :]))
    torch.testing.assert_close(pooled.mean(-2), k.mean(-2))
    assert not torch.allclose(odd.mean(-2), k[..., :11, :].mean(-2), atol=1e-3)
    inside = k.unflatten(-2, (3, 4)).var(-2, correction=0).mean(-2)
    total = pooled.var(-2, correction=0) + inside
    torch.testing.assert_close(total, k.var(-2, correction=0))


# --- padding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["max", "convolution"])
def test_padding_at_the_end_is_as_if_it_were_not_there(pooling):
    """The contents of padding change no bit of the result; the contract tests averages."""
    q, k, v = (x.detach() for x in heads_of())
    function = functools.partial(scaled_heads_attention, scales=SCALES, pooling=pooling_of(pooling))
    for length in (1, 4, 6, M):
        keep = torch.arange(M) < length
        k2, v2 = (x.masked_fill(~keep[:, None], -1e4) for x in (k, v))
        out = function(q, k, v, attn_mask=keep)
        assert torch.equal(out, function(q, k2, v2, attn_mask=keep))
        short = function(q, k[..., :length, :], v[..., :length, :])
        torch.testing.assert_close(out, short, rtol=1e-12, atol=1e-12)


def test_pooled_key_is_masked_where_all_its_steps_are():
    x = torch.arange(6.0)[:, None]
    present = torch.tensor([1, 0, 0, 0, 1, 1]).bool()
    for pooling, expected in ((average_pooling, [0.0, 0, 4.5]), (max_pooling, [0.0, 0, 5])):
        pool, here = pooling(x, 2, present)
        assert pool(x)[:, 0].tolist() == expected and here.tolist() == [True, False, True]


def test_a_mean_over_an_odd_rest_is_over_what_is_there():
    x = torch.arange(5.0)[:, None]
    assert average_pooling(x, 2, None)[0](x)[:, 0].tolist() == [0.5, 2.5, 4.0]
    assert max_pooling(x - 9, 2, None)[0](x - 9)[:, 0].tolist() == [-8, -6, -5]


# --- poolings ----------------------------------------------------------------------------------

KERNEL = [0.5, -1.0, 2.0, 0.3]


def convolution_by(kernel):
    convolution = ConvolutionPooling([4], dtype=torch.float64)
    with torch.no_grad():
        convolution.kernels["4"].copy_(torch.tensor(kernel))
    return convolution


@pytest.mark.parametrize("name", ALL_POOLINGS)
def test_pooling_commutes_with_an_affine_projection(name):
    """Averages commute even with a bias, a convolution without one, and a maximum never."""
    torch.manual_seed(0)
    x = tensors((B, M, 6))[0]
    linear, affine = (nn.Linear(6, 5, bias=bias, dtype=torch.float64) for bias in (False, True))
    pooling = convolution_by(KERNEL) if name == "convolution" else POOLINGS[name]
    for present in (None, PADDING[:, 0, 0]):
        pool, here = pooling(x, 4, present)
        there = torch.tensor(True) if here is None else here[..., None]
        gaps = [
            float(((f(pool(x)) - pool(f(x))) * there).detach().abs().max())
            for f in (linear, affine)
        ]
        assert gaps[0] < 1e-12 if name != "max" else gaps[0] > 1e-2
        assert gaps[1] < 1e-12 if name in ("average", "k-means") else gaps[1] > 1e-2


def test_convolution_commutes_with_a_bias_where_it_sums_to_one():
    x = tensors((B, 12, 6))[0]
    affine = nn.Linear(6, 5, dtype=torch.float64)
    pool, _ = convolution_by([0.5, -1.0, 2.0, -0.5])(x, 4, None)
    torch.testing.assert_close(affine(pool(x)), pool(affine(x)), rtol=1e-12, atol=1e-12)


def test_convolution_is_pytorchs_and_starts_as_the_average():
    convolution = convolution_by(KERNEL)
    for length in (8, 11):
        x = tensors((B, length, 6))[0]
        padded = nn.functional.pad(x.mT, (0, -length % 4))
        weight = convolution.kernels["4"].expand(6, 1, 4)
        expected = nn.functional.conv1d(padded, weight, stride=4, groups=6).mT
        pooled = convolution(x, 4, None)[0](x)
        torch.testing.assert_close(pooled, expected, rtol=1e-12, atol=1e-12)
    x = tensors((B, 12, 6))[0]
    pool, _ = ConvolutionPooling([1, 4, 4], dtype=torch.float64)(x, 4, None)
    torch.testing.assert_close(pool(x), average_pooling(x, 4, None)[0](x))


def lloyd(x, K, scale, steps):
    """Return the centres of textbook k-means on one sequence, and which of them have members."""
    centres = [x[j * scale : (j + 1) * scale].mean(0) for j in range(K)]
    for _ in range(steps + 1):
        labels = [min(range(K), key=lambda c: float((y - centres[c]).square().sum())) for y in x]
        groups = [[y for y, label in zip(x, labels, strict=True) if label == c] for c in range(K)]
        centres = [torch.stack(g).mean(0) if g else centres[c] for c, g in enumerate(groups)]
    return torch.stack(centres), [len(g) > 0 for g in groups]


def test_kmeans_is_lloyds_algorithm():
    for seed in range(3):
        x = tensors((B, 23, 3), seed=seed)[0].detach()
        pool, here = kmeans_pooling(x, 4, None)
        for b in range(B):
            centres, some = lloyd(x[b], 6, 4, 10)
            assert here[b].tolist() == some
            torch.testing.assert_close(pool(x)[b][here[b]], centres[here[b]])


def test_values_follow_the_clusters_of_the_keys():
    q, k, v = heads_of()
    keep = PADDING[:, 0, 0, None].expand(B, H, M)
    pool, here = kmeans_pooling(k, 4, keep)
    expected = softmax_attention_reference(q, pool(k), pool(v), attn_mask=here[..., None, :])
    options = {"scales": [4] * H, "pooling": "k-means", "attn_mask": PADDING}
    out = scaled_heads_attention(q, k, v, **options)
    torch.testing.assert_close(out, expected)
    garbage = k.masked_fill(~PADDING.mT, 77.0)
    assert torch.equal(out, scaled_heads_attention(q, garbage, v, **options))


def test_every_pooling_has_gradients():
    for pooling in ALL_POOLINGS:
        how = pooling_of(pooling)
        for options in ({}, {"attn_mask": PADDING}, {"attn_mask": PADDING, "class_token": True}):
            options = {"scales": SCALES, "pooling": how, **options}
            results = output_and_gradients(scaled_heads_attention, heads_of(), **options)
            assert all(bool(x.isfinite().all() and (x != 0).any()) for x in results), pooling
        if pooling == "convolution":
            scaled_heads_attention(*heads_of(), **options).sum().backward()
            assert all(bool((w.grad != 0).any()) for w in how.parameters())


def test_every_pooling_in_every_dtype():
    for pooling, dtype in itertools.product(ALL_POOLINGS, DTYPES):
        options = {"scales": SCALES, "pooling": pooling_of(pooling, dtype=dtype)}
        for mask, length in itertools.product((None, PADDING), (0, 1, M)):
            q, k, v = heads_of(m=length, dtype=dtype)
            part = mask if mask is None else mask[..., :length]
            out = scaled_heads_attention(q, k, v, attn_mask=part, **options)
            assert out.dtype == dtype and out.shape == (B, H, N, 3)
            assert bool(out.isfinite().all()), f"{pooling}, {dtype}, {length}"
            if length == 1 and pooling != "convolution":
                torch.testing.assert_close(out, v.expand_as(out), msg=pooling)


def test_clusters_of_tokens_with_an_offset():
    """The labels equal those in float64, also under autocast."""
    x = torch.randn(2, 60, 8, generator=torch.Generator().manual_seed(0))
    present = torch.arange(60) < torch.tensor([[60], [50]])
    for here in (None, present):
        for offset in (0, 30, 1000):
            moved = x + offset
            exact = kmeans_pooling(moved.double(), 4, here)[0](x.double())
            plain = kmeans_pooling(moved, 4, here)[0](x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                cast = kmeans_pooling(moved, 4, here)[0](x)
            for found in (plain, cast):
                torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_poolings_under_autocast():
    for pooling in ALL_POOLINGS:
        inputs = [x.detach() for x in heads_of(dtype=torch.float32)]
        how = pooling_of(pooling, dtype=torch.float32)
        options = {"scales": SCALES, "pooling": how, "attn_mask": PADDING}
        exact = normalized_scaled_heads_attention(*inputs, **options)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = normalized_scaled_heads_attention(*inputs, **options)
        assert out.dtype == torch.bfloat16, pooling
        if pooling != "k-means":  # whose clusters may differ
            assert bool((out - exact).norm() < 0.03 * exact.norm()), pooling


def test_no_pooling_stores_a_matrix():
    for pooling in ALL_POOLINGS:
        how = pooling_of(pooling, [64], torch.float32)
        sizes = []
        for length in (2048, 4096):
            inputs = qkv((1, H), n=8, m=length, d=2, dv=2, dtype=torch.float32)
            with Largest() as largest, torch.no_grad():
                scaled_heads_attention(*inputs, scales=[64] * H, pooling=how)
            sizes.append(largest.numel)
        assert sizes[1] <= 2.1 * sizes[0], pooling


# --- other mechanisms --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMS)
def test_linear_attention_on_pooled_keys(kind):
    pair = linear_attention, linear_attention_reference
    forms = [functools.partial(f, attention=a) for f, a in zip(FORMS[kind], pair, strict=True)]
    for options in ({}, {"attn_mask": PADDING}, *[{"eps": 0.1}] * (kind == "BN+SH")):
        assert_forms_agree(kind, f"linear, {options}", forms=forms, scales=SCALES, **options)


# --- the layers --------------------------------------------------------------------------------

E, HEADS, T = 16, 4, 11


def layer_inputs(dtype=torch.float64):
    x = tensors((B, T, E), dtype=dtype, seed=4)[0]
    return x, torch.arange(T) >= torch.tensor([T, 6])[:, None]


def projected(layer, *inputs):
    return [layer.project(part, x, ALL) for part, x in enumerate(inputs)]


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("kind", FORMS)
def test_layer_pools_x_which_is_pooling_keys_and_values(kind, class_token):
    """Also if heads of different scales share keys and values."""
    options, own = {"scales": [2, 1, 4, 2], "class_token": class_token}, {}
    make = ScaledHeadsAttention
    if kind == "BN+SH":
        make, own = NormalizedScaledHeadsAttention, {"beta": [0.1, 0.5, 1.0, 2.0], "eps": 0.1}
    for sizes in ({}, {"head_dim": 3, "kv_heads": 2}, {"kv_heads": 1}):
        layer = make(E, HEADS, dtype=torch.float64, **options, **own, **sizes)
        nn.init.normal_(layer.in_proj_bias)
        x, padding = layer_inputs()
        memory = tensors((B, T, E), seed=5)[0].detach()
        q, k, v = projected(layer, x, memory, memory)
        given = own and own | {"beta": torch.tensor(own["beta"], dtype=torch.float64)}
        for how, mask in ((None, None), (padding, ~padding[:, None, None])):
            h = FORMS[kind][1](q, k, v, attn_mask=mask, **options, **given)
            expected = layer.out_proj(h.transpose(1, 2).flatten(-2))
            out, A = layer(x, memory, memory, key_padding_mask=how, average_attn_weights=False)
            fast = layer(x, memory, memory, key_padding_mask=how, need_weights=False)[0]
            # A contains the weights of single steps.
            assert_all_close([out, fast, A @ v], [expected, expected, h], 1e-10, f"{sizes}, {mask}")


@pytest.mark.parametrize("scaled", [ScaledHeadsAttention, NormalizedScaledHeadsAttention])
def test_layer_with_scales_of_one_is_the_plain_layer(scaled):
    x, padding = layer_inputs()
    plain = NormalizedAttention if issubclass(scaled, NormalizedAttention) else MultiheadAttention
    left = plain(E, HEADS, dtype=torch.float64)
    right = scaled(E, HEADS, scales=[1] * HEADS, dtype=torch.float64)
    right.load_state_dict(left.state_dict())
    for options in (
        {"key_padding_mask": padding, "is_causal": True},
        {"attn_mask": ~causal_mask(T, T)},
    ):
        outs = [f(x, x, x, **options)[0] for f in (left, right)]
        torch.testing.assert_close(*outs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("pooling", [*ALL_POOLINGS, average_pooling])
def test_layer_with_every_pooling(pooling):
    layer = ScaledHeadsAttention(E, HEADS, scales=SCALES, pooling=pooling, dtype=torch.float64)
    x, padding = layer_inputs()
    out, _ = layer(x, x, x, key_padding_mask=padding, need_weights=False)
    noise = x + 50 * padding[..., None]
    other, _ = layer(x, noise, noise, key_padding_mask=padding, need_weights=False)
    assert torch.equal(out, other)
    if pooling != "max":
        weighted, A = layer(x, x, x, key_padding_mask=padding)
        torch.testing.assert_close(weighted, out)
        assert A.shape == (B, T, T)
    out.square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_max_is_taken_before_the_projection():
    """Only with this pooling do the layer and the function differ."""
    layer = ScaledHeadsAttention(E, HEADS, scales=[4] * HEADS, pooling="max", dtype=torch.float64)
    x, _ = layer_inputs()
    out, _ = layer(x, x, x, need_weights=False)
    after = scaled_heads_attention(*projected(layer, x, x, x), scales=[4] * HEADS, pooling="max")
    assert not torch.allclose(out, layer.out_proj(after.transpose(1, 2).flatten(-2)), atol=1e-3)
    pooled = max_pooling(x, 4, None)[0](x)
    before = softmax_attention_reference(*projected(layer, x, pooled, pooled))
    expected = layer.out_proj(before.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


def test_layer_stores_no_matrix():
    layer = NormalizedScaledHeadsAttention(E, HEADS, scales=SCALES, kv_heads=2)
    x = torch.randn(1, 512, E)
    with Largest() as largest, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        layer(x, x, x, need_weights=False)[0].sum().backward()
    assert largest.numel < 512**2 / 4


def test_learned_beta_and_kernels_are_saved():
    make = functools.partial(NormalizedScaledHeadsAttention, E, HEADS, scales=SCALES)
    layer = make(pooling="convolution", beta=0.6, learn_beta=True)
    names = set(layer.state_dict())
    fixed = make(beta=[0.1, 0.2, 0.3, 0.4])
    assert names - set(fixed.state_dict()) == {"beta", "pooling.kernels.2", "pooling.kernels.4"}
    assert "scales=(1, 2, 2, 4)" in repr(layer) and "learned" in repr(layer)


LAYERS = {
    "BN+SH": functools.partial(NormalizedScaledHeadsAttention, learn_beta=True),
    "full BN+SH": functools.partial(NormalizedScaledHeadsAttention, eps=1e-3),
    "linear BN+SH": functools.partial(NormalizedScaledHeadsAttention, attention=linear_attention),
    "convolution": functools.partial(ScaledHeadsAttention, pooling="convolution"),
    "k-means": functools.partial(ScaledHeadsAttention, pooling="k-means"),
}


def test_every_parameter_learns():
    x, padding = layer_inputs(torch.float32)
    for name, make in LAYERS.items():
        torch.manual_seed(0)
        layer = make(E, HEADS, scales=SCALES)
        assert_learns(layer, x, name, key_padding_mask=padding)
        A = layer(x, x, x, key_padding_mask=padding)[1]
        assert A.shape == (B, T, T) and bool((A[padding[:, None].expand_as(A)] == 0).all()), name


# --- errors ------------------------------------------------------------------------------------

X = torch.zeros(B, H, N, D)
BAD = [
    (TypeError, "scales is 2; expected a sequence", {"scales": 2}),
    (TypeError, "scales is '1224'; expected a sequence", {"scales": "1224"}),
    (ValueError, r"scales is \[1, 2\]; expected one number per head, 4", {"scales": [1, 2]}),
    (ValueError, r"scales\[1\] is 0; expected", {"scales": [1, 0, 1, 1]}),
    (TypeError, r"scales\[0\] is of type float", {"scales": [1.5, 1, 1, 1]}),
    (ValueError, r"q has shape \(5, 8\); expected .* with its heads",
     {"q": X[0, 0], "k": X[0, 0], "v": X[0, 0]}),
    (ValueError, "attn_mask has numbers other than 0 and -inf",
     {"attn_mask": torch.full((N,), 0.5)}),
    (ValueError, r"pooling is 'mean'; expected one of \['average', 'max', 'k-means'\]",
     {"pooling": "mean"}),
    (TypeError, "pooling is 2; expected a name or a function", {"pooling": 2}),
    (TypeError, "attention is 'linear'; expected a function", {"attention": "linear"}),
    (ValueError, r"scale is 2; expected one of \['4'\]", {"pooling": ConvolutionPooling([4])}),
]  # fmt: skip
NORMALIZED = [
    (ValueError, r"beta has shape \(2,\)", {"beta": torch.zeros(2)}),
    (ValueError, "eps is 0", {"eps": 0}),
]
BAD_LAYERS = [
    (ValueError, r"scales is \[1, 2\]; expected one number per head", {"scales": [1, 2]}),
    (TypeError, "scales", {}),
    (ValueError, "pooling is 'mean'", {"scales": SCALES, "pooling": "mean"}),
    (ValueError, "beta is inf", {"scales": SCALES, "beta": math.inf}),
    (ValueError, r"beta is \[0.1\]; expected one", {"scales": SCALES, "beta": [0.1]}),
]
BAD_CALLS = [
    (ValueError, "attn_mask is .*; expected None: .* scales", {"attn_mask": torch.zeros(T, T)}),
    (ValueError, "key_padding_mask has numbers other", {"key_padding_mask": torch.ones(B, T)}),
]


def test_bad_arguments_are_named():
    inputs = torch.zeros(3, B, T, E)
    layer = functools.partial(ScaledHeadsAttention(E, HEADS, scales=SCALES), *inputs)
    given = {"q": X, "k": X, "v": X, "scales": SCALES}
    assert_named(BAD, scaled_heads_attention, **given)
    assert_named(BAD + NORMALIZED, normalized_scaled_heads_attention, **given)
    assert_named(BAD_LAYERS, NormalizedScaledHeadsAttention, embed_dim=E, num_heads=HEADS)
    assert_named(BAD_CALLS, layer)
    with pytest.raises(ValueError, match="need_weights is .* max"):
        ScaledHeadsAttention(E, HEADS, scales=SCALES, pooling="max")(*inputs)
