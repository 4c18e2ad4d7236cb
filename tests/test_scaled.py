"""Attention-SH and BN+SH: poolings, scales, masks, the layers."""

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
    NormalizedAttention,
    normalized_attention,
    normalized_attention_reference,
)
from derived_attention.attention.pooling import (
    POOLINGS,
    ConvolutionPooling,
    average_pooling,
    kmeans_pooling,
    max_pooling,
)
from derived_attention.attention.scaled import (
    ScaledAttention,
    ScaledNormalizedAttention,
    head_groups,
    scaled_attention,
    scaled_attention_reference,
    scaled_normalized_attention,
    scaled_normalized_attention_reference,
)
from derived_attention.attention.softmax import (
    MultiheadAttention,
    causal_mask,
    softmax_attention,
    softmax_attention_reference,
)
from derived_attention.attention.sparse import window_attention, window_mask
from derived_attention.models import SeriesClassifier

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
B, H, N, M, D, DV = 2, 4, 5, 11, 4, 3
SCALES = [1, 2, 2, 4]
PADDING = torch.tensor([[1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 0], [1] * M]).bool()[:, None, None]

cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NOT TESTED: this machine has no CUDA device"
)


def tensors(*shapes, dtype=torch.float64, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    return [x.to(device, dtype).requires_grad_() for x in made]


def qkv(leading=(B, H), n=N, m=M, d=D, dv=DV, **options):
    return tensors((*leading, n, d), (*leading, m, d), (*leading, m, dv), **options)


def output_and_gradients(function, inputs, **options):
    """The output, and the gradients of a fixed linear functional of it."""
    leaves = [x for x in inputs if x.requires_grad]
    out = function(*inputs, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    loss = (out * weights.view_as(out)).sum()
    return out, *torch.autograd.grad(loss, leaves, materialize_grads=True)


def assert_all_close(left, right, tol):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def additive(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)


def forms(normalized, eps=None, **options):
    """Fast form and reference, of Attention-SH or of Attention-BN+SH with β as an argument."""
    if not normalized:
        return [
            functools.partial(f, **options) for f in (scaled_attention, scaled_attention_reference)
        ]
    return [
        lambda q, k, v, beta, f=f: f(q, k, v, beta=beta, eps=eps, **options)
        for f in (scaled_normalized_attention, scaled_normalized_attention_reference)
    ]


def inputs_for(normalized, *args, **options):
    beta = torch.linspace(-0.4, 1.3, H, dtype=torch.float64).requires_grad_()
    return [*qkv(*args, **options), *([beta] if normalized else [])]


MASKS = {
    "none": {},
    "padding": {"attn_mask": PADDING},
    "padding, additive": {"attn_mask": additive(PADDING)},
    "keys": {"attn_mask": PADDING[0, 0, 0]},
    "per head": {
        "attn_mask": torch.rand(H, 1, M, generator=torch.Generator().manual_seed(0)) > 0.5
    },
    "nothing": {"attn_mask": torch.zeros(M).bool()},
    "all or nothing": {"attn_mask": torch.tensor(True)},
    "scale": {"scale": 0.7},
}


# --- the formula -------------------------------------------------------------------------------


def test_reference_is_the_formula_window_by_window():
    """Eq. 25, for one head with scale 4 and 11 keys: windows of 4, 4 and 3."""
    q, k, v = (x.detach() for x in qkv((1,)))
    out = scaled_attention_reference(q, k, v, scales=[4])
    windows = [slice(0, 4), slice(4, 8), slice(8, 11)]
    for i in range(N):
        e = [math.exp(float(q[0, i] @ k[0, w].mean(0)) / math.sqrt(D)) for w in windows]
        expected = sum(e[j] / sum(e) * v[0, w].mean(0) for j, w in enumerate(windows))
        torch.testing.assert_close(out[0, i], expected)


@pytest.mark.parametrize("kind", ["SH", "BN+SH", "full BN+SH"])
@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("scales", [SCALES, [3, 1, 3, 20], [1] * H, [11, 5, 11, 5]], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_fast_equals_reference(name, scales, class_token, kind):
    normalized = kind != "SH"
    options = {"scales": scales, "class_token": class_token, **MASKS[name]}
    pair = forms(normalized, eps=0.1 if kind == "full BN+SH" else None, **options)
    results = [output_and_gradients(f, inputs_for(normalized)) for f in pair]
    assert all(bool(x.isfinite().all()) for x in results[0])
    assert_all_close(*results, 1e-11)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 5),
    st.integers(0, 9), st.booleans(), st.booleans(), st.sampled_from(["SH", "BN", "full"]),
    st.integers(0, 99),
)  # fmt: skip
def test_fast_equals_reference_for_any_shape(b, scales, n, m, class_token, masked, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = {"attn_mask": torch.rand(b, 1, 1, m, generator=generator) > 0.5} if masked else {}
    options = {"scales": scales, "class_token": class_token, **mask}
    pair = forms(kind != "SH", eps=0.1 if kind == "full" else None, **options)
    inputs = qkv((b, len(scales)), n=n, m=m, d=3, dv=2, seed=seed)
    if kind != "SH":
        inputs.append(torch.tensor(0.6).double().requires_grad_())
    results = [output_and_gradients(f, inputs) for f in pair]
    assert all(bool(x.isfinite().all()) for x in results[0])
    assert_all_close(*results, 1e-9)


@pytest.mark.parametrize("leading", [(H,), (B, H), (2, B, H)], ids=str)
def test_any_number_of_leading_dimensions(leading):
    for normalized in (False, True):
        pair = forms(normalized, scales=SCALES)
        results = [output_and_gradients(f, inputs_for(normalized, leading)) for f in pair]
        assert_all_close(*results, 1e-11)


def test_gradcheck():
    inputs = [*qkv((2,), n=2, m=5, d=2, dv=2), torch.tensor([0.3, 0.8]).double().requires_grad_()]
    for mask in (None, torch.tensor([1, 1, 0, 0, 1]).bool()):
        function = forms(True, eps=0.2, scales=[1, 2], attn_mask=mask)[0]
        assert torch.autograd.gradcheck(function, inputs)


def test_heads_are_grouped_and_put_back():
    scales = [2, 1, 4, 2]  # the order of the groups, 0 3 1 2, is not its own inverse
    assert head_groups(scales) == {2: [0, 3], 1: [1], 4: [2]}
    q, k, v = qkv()
    whole = scaled_attention(q, k, v, scales=scales)
    for h, s in enumerate(scales):
        one = scaled_attention(*(x[:, h : h + 1] for x in (q, k, v)), scales=[s])
        torch.testing.assert_close(whole[:, h : h + 1], one)


def test_scales_of_one_are_plain_attention_with_any_mask():
    q, k, v = qkv()
    ones = [1] * H
    for options in ({}, {"is_causal": True}, {"attn_mask": causal_mask(N, M)}):
        out = scaled_attention(q, k, v, scales=ones, **options)
        torch.testing.assert_close(out, softmax_attention_reference(q, k, v, **options))
        out = scaled_normalized_attention(q, k, v, scales=ones, eps=0.1, **options)
        expected = normalized_attention_reference(q, k, v, eps=0.1, **options)
        torch.testing.assert_close(out, expected)


def test_one_scale_as_long_as_the_keys_is_the_mean_of_the_values():
    q, k, v = qkv()
    for s in (M, M + 5):
        out = scaled_attention(q, k, v, scales=[s] * H)
        torch.testing.assert_close(out, v.mean(-2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("eps", [None, 0.1])
def test_recentring_is_plain_where_beta_is_zero(eps):
    q, k, v = qkv()
    out = scaled_normalized_attention(q, k, v, scales=SCALES, beta=0.0)
    torch.testing.assert_close(out, scaled_attention(q, k, v, scales=SCALES))


def test_pooling_keeps_the_mean_and_loses_variance():
    """What eqs. 47 and 50 make of μ and σ², where the scale divides the length."""
    k = qkv(m=12)[1]
    pooled = average_pooling(k, 4, None)[0](k)
    torch.testing.assert_close(pooled.mean(-2), k.mean(-2))
    inside = k.unflatten(-2, (3, 4)).var(-2, correction=0).mean(-2)
    total = pooled.var(-2, correction=0) + inside
    torch.testing.assert_close(total, k.var(-2, correction=0))
    odd = average_pooling(k[..., :11, :], 4, None)[0](k[..., :11, :])
    assert not torch.allclose(odd.mean(-2), k[..., :11, :].mean(-2), atol=1e-3)


# --- masks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["average", "max", "convolution"])
@pytest.mark.parametrize("normalized", [False, True])
def test_padding_at_the_end_is_as_if_it_were_not_there(normalized, pooling):
    """Whatever stands in it, bit for bit; and with all poolings of windows."""
    pooling = (
        ConvolutionPooling(SCALES, dtype=torch.float64) if pooling == "convolution" else pooling
    )
    function = scaled_normalized_attention if normalized else scaled_attention
    q, k, v = (x.detach() for x in qkv())
    options = {"scales": SCALES, "pooling": pooling}
    for length in (1, 4, 6, M):
        keep = torch.arange(M) < length
        k2, v2 = (x.masked_fill(~keep[:, None], -1e4) for x in (k, v))
        for mask in (keep, additive(keep)):
            out = function(q, k, v, attn_mask=mask, **options)
            assert torch.equal(out, function(q, k2, v2, attn_mask=mask, **options))
            short = function(q, k[..., :length, :], v[..., :length, :], **options)
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


def test_a_class_token_is_left_alone():
    q, k, v = qkv()
    out = scaled_attention(q, k, v, scales=[4] * H, class_token=True)
    keys, values = (
        torch.stack([x[..., w, :].mean(-2) for w in (slice(0, 1), slice(1, 5), slice(5, 9),
                                                     slice(9, 11))], -2)
        for x in (k, v)
    )  # fmt: skip
    torch.testing.assert_close(out, softmax_attention_reference(q, keys, values))


# --- poolings ----------------------------------------------------------------------------------

LINEAR = {"average": average_pooling, "k-means": kmeans_pooling}


@pytest.mark.parametrize("present", [None, PADDING[:, 0, 0]], ids=["all", "some"])
@pytest.mark.parametrize("name", ["average", "convolution", "max", "k-means"])
def test_pooling_commutes_with_an_affine_projection(name, present):
    """Averages do, with the bias; a convolution without it, or if it sums to 1; a maximum not."""
    torch.manual_seed(0)
    x = tensors((B, M, 6))[0]
    convolution = ConvolutionPooling([4], dtype=torch.float64)
    with torch.no_grad():
        convolution.kernels["4"].copy_(torch.tensor([0.5, -1.0, 2.0, 0.3]))
    pooling = convolution if name == "convolution" else POOLINGS[name]
    pool, here = pooling(x, 4, present)
    linear, affine = (nn.Linear(6, 5, bias=bias, dtype=torch.float64) for bias in (False, True))
    there = torch.tensor(True) if here is None else here[..., None]
    with torch.no_grad():
        gaps = [float(((f(pool(x)) - pool(f(x))) * there).abs().max()) for f in (linear, affine)]
    assert gaps[0] < 1e-12 if name != "max" else gaps[0] > 1e-2
    assert gaps[1] < 1e-12 if name in LINEAR else gaps[1] > 1e-2


def test_convolution_commutes_with_a_bias_where_it_sums_to_one():
    x = tensors((B, 12, 6))[0]
    convolution = ConvolutionPooling([4], dtype=torch.float64)
    with torch.no_grad():
        convolution.kernels["4"].copy_(torch.tensor([0.5, -1.0, 2.0, -0.5]))
    affine = nn.Linear(6, 5, dtype=torch.float64)
    pool, _ = convolution(x, 4, None)
    torch.testing.assert_close(affine(pool(x)), pool(affine(x)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [8, 11])
def test_convolution_is_pytorchs(length):
    x = tensors((B, length, 6))[0]
    convolution = ConvolutionPooling([4], dtype=torch.float64)
    with torch.no_grad():
        convolution.kernels["4"].copy_(torch.tensor([0.5, -1.0, 2.0, 0.3]))
    padded = nn.functional.pad(x.mT, (0, -length % 4))
    weight = convolution.kernels["4"].expand(6, 1, 4)
    expected = nn.functional.conv1d(padded, weight, stride=4, groups=6).mT
    torch.testing.assert_close(convolution(x, 4, None)[0](x), expected, rtol=1e-12, atol=1e-12)


def test_convolution_starts_as_the_average():
    x = tensors((B, 12, 6))[0]
    pool, _ = ConvolutionPooling([1, 4, 4], dtype=torch.float64)(x, 4, None)
    torch.testing.assert_close(pool(x), average_pooling(x, 4, None)[0](x))


def lloyd(x, K, scale, steps):
    """k-means on one sequence, as in a textbook."""
    centres = [x[j * scale : (j + 1) * scale].mean(0) for j in range(K)]
    for _ in range(steps + 1):
        labels = [min(range(K), key=lambda c: float((y - centres[c]).square().sum())) for y in x]
        groups = [[y for y, label in zip(x, labels, strict=True) if label == c] for c in range(K)]
        centres = [torch.stack(g).mean(0) if g else centres[c] for c, g in enumerate(groups)]
    return torch.stack(centres), [len(g) > 0 for g in groups]


@pytest.mark.parametrize("seed", range(3))
def test_kmeans_is_lloyds_algorithm(seed):
    x = tensors((B, 23, 3), seed=seed)[0].detach()
    pool, here = kmeans_pooling(x, 4, None)
    for b in range(B):
        centres, some = lloyd(x[b], 6, 4, 10)
        assert here[b].tolist() == some
        torch.testing.assert_close(pool(x)[b][here[b]], centres[here[b]])


def test_kmeans_finds_what_windows_miss():
    """Two kinds of step that take turns: windows average them, clusters do not."""
    x = torch.tensor([1.0, -1.0] * 6).double()[:, None]
    x[0] += 0.1  # a start with all centres equal would be stuck
    pooled = kmeans_pooling(x, 6, None)[0](x)
    assert sorted(round(float(c)) for c in pooled) == [-1, 1]
    assert float(average_pooling(x, 6, None)[0](x).abs().max()) < 0.1


def test_values_follow_the_clusters_of_the_keys():
    q, k, v = qkv()
    keep = PADDING[:, 0, 0, None].expand(B, H, M)
    pool, here = kmeans_pooling(k, 4, keep)
    expected = softmax_attention_reference(q, pool(k), pool(v), attn_mask=here[..., None, :])
    out = scaled_attention(q, k, v, scales=[4] * H, pooling="k-means", attn_mask=PADDING)
    torch.testing.assert_close(out, expected)
    garbage = k.masked_fill(~PADDING.mT, 77.0)
    same = scaled_attention(q, garbage, v, scales=[4] * H, pooling="k-means", attn_mask=PADDING)
    assert torch.equal(out, same)


@pytest.mark.parametrize("pooling", [*POOLINGS, "convolution"])
@pytest.mark.parametrize("masked", [False, True])
def test_every_pooling_has_gradients(pooling, masked):
    convolution = ConvolutionPooling(SCALES, dtype=torch.float64)
    how = convolution if pooling == "convolution" else pooling
    mask = PADDING if masked else None
    for class_token in (False, True):
        options = {"scales": SCALES, "pooling": how, "attn_mask": mask, "class_token": class_token}
        results = output_and_gradients(scaled_attention, qkv(), **options)
        assert all(bool(x.isfinite().all()) and bool((x != 0).any()) for x in results)
    if pooling == "convolution":
        scaled_attention(*qkv(), **options).sum().backward()
        assert all(bool((w.grad != 0).any()) for w in convolution.parameters())


# --- other kernels -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["SH", "BN+SH", "full BN+SH"])
@pytest.mark.parametrize("name", ["none", "padding", "per head"])
def test_linear_kernel(name, kind):
    normalized, eps = kind != "SH", 0.1 if kind == "full BN+SH" else None
    fast, _ = forms(normalized, eps, scales=SCALES, kernel=linear_attention, **MASKS[name])
    _, slow = forms(
        normalized, eps, scales=SCALES, kernel=linear_attention_reference, **MASKS[name]
    )
    results = [output_and_gradients(f, inputs_for(normalized)) for f in (fast, slow)]
    assert_all_close(*results, 1e-10)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", ["none", "padding", "keys"])
def test_sparse_kernel_works_at_the_place_of_the_window(name, normalized):
    """Query i of a head with scale s sees the windows |⌊i/s⌋ − j| ≤ 1."""
    q, k, v = (x.detach() for x in qkv(n=M))
    options = {"kernel": functools.partial(window_attention, window=1), "positional": True}
    masks = MASKS[name]
    function = scaled_normalized_attention if normalized else scaled_attention
    out = function(q, k, v, scales=SCALES, **options, **masks)
    for h, s in enumerate(SCALES):
        keep = None if not masks else masks["attn_mask"].expand(B, 1, 1, M)[:, 0, 0]
        pool, here = average_pooling(k[:, h], s, keep)
        keys, values = pool(k[:, h]), pool(v[:, h])
        near = window_mask(-(-M // s), -(-M // s), 1).repeat_interleave(s, 0)[:M]
        queries = q[:, h]
        if normalized:
            weight = torch.ones(B, keys.shape[1]).double() if here is None else here.double()
            queries = (
                queries - (keys * weight[..., None]).sum(1, True) / weight.sum(1)[:, None, None]
            )
        near = near if here is None else near & here[:, None]
        expected = softmax_attention_reference(queries, keys, values, attn_mask=near)
        torch.testing.assert_close(out[:, h], expected, rtol=1e-11, atol=1e-11)


# --- precision, memory, compilers --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", [None, torch.arange(61) < 50], ids=["all", "some"])
def test_half_precision_error_is_a_few_roundings(dtype, mask):
    inputs = qkv(n=61, m=61, d=32, dv=32, dtype=dtype)
    exact = [x.detach().double() for x in inputs]
    options = {"scales": SCALES, "attn_mask": mask}
    for eps in (None, 1e-3):
        out = scaled_normalized_attention(*inputs, eps=eps, **options)
        expected = scaled_normalized_attention_reference(*exact, eps=eps, **options)
        assert out.dtype == dtype
        assert (out.double() - expected).norm() < 4 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_pooling_in_every_dtype(dtype, pooling):
    for mask in (None, PADDING):
        for length in (0, 1, M):
            part = mask if mask is None else mask[..., :length]
            inputs = qkv(m=length, dtype=dtype)
            out = scaled_attention(*inputs, scales=SCALES, pooling=pooling, attn_mask=part)
            assert out.dtype == dtype and out.shape == (B, H, N, DV) and bool(out.isfinite().all())
            if length == 1:
                torch.testing.assert_close(out, inputs[2].expand_as(out))


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_no_matrix_is_stored(masked, normalized):
    length = 160
    inputs = inputs_for(normalized, n=length, m=length, d=8, dv=8)
    mask = torch.arange(length) < 150 if masked else None
    pair = forms(normalized, eps=0.1, scales=SCALES, attn_mask=mask)
    with Largest() as largest, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output_and_gradients(pair[0], inputs)  # raises where no fused kernel will do
    assert largest.numel <= B * H * length * 8
    with Largest() as largest:
        scaled_attention_reference(*inputs[:3], scales=SCALES)
    assert largest.numel >= B * length**2, "the recorder must see the reference's matrix"


@pytest.mark.parametrize("pooling", [*POOLINGS, "convolution"])
def test_no_pooling_stores_a_matrix(pooling):
    how = ConvolutionPooling([64]) if pooling == "convolution" else pooling
    sizes = []
    for length in (2048, 4096):
        inputs = [x.detach() for x in qkv((1, H), n=8, m=length, d=2, dv=2, dtype=torch.float32)]
        with Largest() as largest, torch.no_grad():
            scaled_attention(*inputs, scales=[64] * H, pooling=how)
        sizes.append(largest.numel)
    assert sizes[1] <= 2.1 * sizes[0]


def test_compiles_without_a_break():
    torch._dynamo.reset()
    function = functools.partial(
        scaled_normalized_attention, scales=SCALES, attn_mask=additive(PADDING)
    )
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = [output_and_gradients(f, qkv()) for f in (compiled, function)]
    assert_all_close(*results, 1e-12)


@pytest.mark.parametrize("pooling", [*POOLINGS, "convolution"])
def test_autocast(pooling):
    how = ConvolutionPooling(SCALES) if pooling == "convolution" else pooling
    inputs = [x.detach() for x in qkv(dtype=torch.float32)]
    options = {"scales": SCALES, "pooling": how, "attn_mask": PADDING}
    exact = scaled_normalized_attention(*inputs, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = scaled_normalized_attention(*inputs, **options)
    assert out.dtype == torch.bfloat16
    assert pooling == "k-means" or bool((out - exact).norm() < 0.03 * exact.norm())


# --- the layers --------------------------------------------------------------------------------

E, HEADS, T = 16, 4, 11


def layer_inputs(dtype=torch.float64):
    x = tensors((B, T, E), dtype=dtype, seed=4)[0]
    return x, torch.arange(T) >= torch.tensor([T, 6])[:, None]


def projected(layer, query, key, value):
    """Queries, keys and values of PyTorch's layer: (B, H, ·, D) each."""
    weights, biases = layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3)
    return [
        nn.functional.linear(x, w, b).unflatten(-1, (HEADS, -1)).transpose(-3, -2)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    ]


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("padded", ["none", "boolean", "additive"])
@pytest.mark.parametrize("normalized", [False, True])
def test_layer_pools_x_which_is_pooling_keys_and_values(normalized, padded, class_token):
    theirs = nn.MultiheadAttention(E, HEADS, batch_first=True, dtype=torch.float64)
    nn.init.normal_(theirs.in_proj_bias)
    options = {"scales": SCALES, "class_token": class_token}
    if normalized:
        ours = ScaledNormalizedAttention(
            E, HEADS, beta=0.6, eps=0.1, dtype=torch.float64, **options
        )
        function = functools.partial(scaled_normalized_attention_reference, beta=0.6, eps=0.1)
    else:
        ours = ScaledAttention(E, HEADS, dtype=torch.float64, **options)
        function = scaled_attention_reference
    ours.load_state_dict(theirs.state_dict())
    x, padding = layer_inputs()
    q, k, v = projected(theirs, x, x, x)
    mask = None if padded == "none" else ~padding[:, None, None]
    h = function(q, k, v, attn_mask=mask, **options)
    expected = theirs.out_proj(h.transpose(1, 2).flatten(-2))
    given_mask = {"none": None, "boolean": padding, "additive": additive(~padding)}[padded]
    out, none = ours(x, x, x, key_padding_mask=given_mask, need_weights=False)
    assert none is None
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    out, A = ours(x, x, x, key_padding_mask=given_mask, average_attn_weights=False)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(A @ v, h, rtol=1e-10, atol=1e-10)  # weights of the steps
    torch.testing.assert_close(A.sum(-1), torch.ones(B, HEADS, T, dtype=torch.float64))
    if mask is not None:
        assert bool((A * padding[:, None, None] == 0).all())


def test_layer_with_scales_of_one_is_the_plain_layer():
    x, padding = layer_inputs()
    pairs = [
        (MultiheadAttention, ScaledAttention),
        (NormalizedAttention, ScaledNormalizedAttention),
    ]
    masks = [{}, {"is_causal": True}, {"key_padding_mask": padding, "is_causal": True}]
    masks += [{"attn_mask": ~causal_mask(T, T)}]
    for plain, scaled in pairs:
        left = plain(E, HEADS, dtype=torch.float64)
        right = scaled(E, HEADS, scales=[1] * HEADS, dtype=torch.float64)
        right.load_state_dict(left.state_dict())
        for options in masks:
            for need_weights in (False, True):
                outs = [f(x, x, x, need_weights=need_weights, **options) for f in (left, right)]
                torch.testing.assert_close(*outs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("batch", [(), (B,)], ids=str)
def test_cross_attention_of_other_widths(batch):
    layer = ScaledAttention(E, HEADS, bias=False, kdim=6, vdim=9, scales=[1, 3, 3, 2])
    theirs = nn.MultiheadAttention(E, HEADS, bias=False, kdim=6, vdim=9, batch_first=True)
    layer.load_state_dict(theirs.state_dict())
    inputs = [x.float() for x in tensors((*batch, 5, E), (*batch, T, 6), (*batch, T, 9))]
    padding = (torch.arange(T) > 6).expand(*batch, T)
    out, A = layer(*inputs, key_padding_mask=padding)
    assert out.shape == (*batch, 5, E) and A.shape == (*batch, 5, T)
    same, _ = layer(*inputs, key_padding_mask=padding, need_weights=False)
    torch.testing.assert_close(out, same)
    q, k, v = (
        nn.functional.linear(x, w).unflatten(-1, (HEADS, -1)).transpose(-3, -2)
        for x, w in zip(
            inputs, (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight), strict=True
        )
    )
    mask = ~padding[..., None, None, :]
    h = scaled_attention_reference(q, k, v, scales=[1, 3, 3, 2], attn_mask=mask)
    torch.testing.assert_close(out, theirs.out_proj(h.transpose(-3, -2).flatten(-2)))


@pytest.mark.parametrize("pooling", [*POOLINGS, "convolution", average_pooling])
def test_layer_with_every_pooling(pooling):
    layer = ScaledAttention(E, HEADS, scales=SCALES, pooling=pooling, dtype=torch.float64)
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
    """The one pooling for which the layer and the function differ."""
    layer = ScaledAttention(E, HEADS, scales=[4] * HEADS, pooling="max", dtype=torch.float64)
    x, _ = layer_inputs()
    out, _ = layer(x, x, x, need_weights=False)
    q, k, v = projected(layer, x, x, x)
    after = scaled_attention(q, k, v, scales=[4] * HEADS, pooling="max")
    assert not torch.allclose(out, layer.out_proj(after.transpose(1, 2).flatten(-2)), atol=1e-3)
    pool, _ = max_pooling(x, 4, None)
    q, k, v = projected(layer, x, pool(x), pool(x))
    before = softmax_attention_reference(q, k, v)
    expected = layer.out_proj(before.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


def test_fully_padded_sequence_gives_the_bias():
    layer = ScaledNormalizedAttention(E, HEADS, scales=SCALES, eps=0.1)
    x, padding = layer_inputs(torch.float32)
    padding[1] = True
    for need_weights in (False, True):
        out, _ = layer(x, x, x, key_padding_mask=padding, need_weights=need_weights)
        torch.testing.assert_close(out[1], layer.out_proj.bias.expand(T, E))
        (slope,) = torch.autograd.grad(out.sum(), x)
        assert bool(slope.isfinite().all())


def test_learned_beta_and_kernels_are_saved():
    layer = ScaledNormalizedAttention(
        E, HEADS, scales=SCALES, pooling="convolution", beta=0.6, learn_beta=True
    )
    names = set(layer.state_dict())
    assert {"beta", "pooling.kernels.2", "pooling.kernels.4"} <= names
    fixed = ScaledNormalizedAttention(E, HEADS, scales=SCALES, beta=[0.1, 0.2, 0.3, 0.4])
    assert names - set(fixed.state_dict()) == {"beta", "pooling.kernels.2", "pooling.kernels.4"}
    assert "scales=(1, 2, 2, 4)" in repr(layer) and "beta=learned" in repr(layer)
    x, _ = layer_inputs(torch.float32)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(x, x, x)[0], layer(x, x, x)[0])


def test_dropout_in_training():
    layer = ScaledAttention(E, HEADS, 0.5, scales=SCALES)
    x, _ = layer_inputs(torch.float32)
    first, second = (layer.train()(x, x, x, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(first, second)
    first, second = (layer.eval()(x, x, x, need_weights=False)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_layer_stores_no_matrix():
    layer = ScaledNormalizedAttention(E, HEADS, scales=SCALES)
    x = torch.randn(1, 512, E)
    with Largest() as largest, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        layer(x, x, x, need_weights=False)[0].sum().backward()
    assert largest.numel < 512**2 / 4


TRAINED = {
    "SH": functools.partial(ScaledAttention, scales=SCALES),
    "BN+SH": functools.partial(ScaledNormalizedAttention, scales=SCALES, learn_beta=True),
    "full BN+SH": functools.partial(ScaledNormalizedAttention, scales=SCALES, eps=1e-3),
    "linear BN+SH": functools.partial(
        ScaledNormalizedAttention, scales=SCALES, kernel=linear_attention
    ),
    "convolution": functools.partial(ScaledAttention, scales=SCALES, pooling="convolution"),
    "k-means": functools.partial(ScaledAttention, scales=SCALES, pooling="k-means"),
    "sparse": functools.partial(
        ScaledAttention,
        scales=SCALES,
        kernel=functools.partial(window_attention, window=1),
        positional=True,
    ),
}


@pytest.mark.parametrize("attention", TRAINED.values(), ids=TRAINED)
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
    assert all(A.shape == (12, 4, 7, 7) for A in model.attention_maps(x, padding))


# --- errors ------------------------------------------------------------------------------------

X = torch.zeros(B, H, N, D)
BAD = {
    "scales: number": (TypeError, "scales is 2; expected a sequence", {"scales": 2}),
    "scales: text": (TypeError, "scales is '1224'; expected a sequence", {"scales": "1224"}),
    "scales: heads": (ValueError, r"scales is \[1, 2\]; expected one number per head, .* 4",
                      {"scales": [1, 2]}),
    "scales: zero": (ValueError, r"scales\[1\] is 0; expected", {"scales": [1, 0, 1, 1]}),
    "scales: negative": (ValueError, r"scales\[3\] is -2", {"scales": [1, 1, 1, -2]}),
    "scales: fraction": (TypeError, r"scales\[0\] is of type float", {"scales": [1.5, 1, 1, 1]}),
    "scales: boolean": (TypeError, r"scales\[0\] is of type bool", {"scales": [True, 1, 1, 1]}),
    "causal": (ValueError, r"is_causal is True with scales \[1, 2, 2, 4\]", {"is_causal": True}),
    "per query": (ValueError, r"attn_mask has shape \(5, 5\); expected the size 1",
                  {"attn_mask": torch.ones(N, N).bool()}),
    "no heads": (ValueError, r"q has shape \(5, 4\); expected .* with its heads",
                 {"q": X[0, 0], "k": X[0, 0], "v": X[0, 0]}),
    "mask": (ValueError, "attn_mask has shape", {"attn_mask": torch.ones(3, 1, 1, N)}),
    "k": (ValueError, "k has shape", {"k": X[0]}),
    "scale": (ValueError, "scale is 0; expected", {"scale": 0}),
}  # fmt: skip
FAST = {
    "bias": (ValueError, "attn_mask has numbers other than 0 and -inf",
             {"attn_mask": torch.full((N,), 0.5)}),
    "pooling": (ValueError, r"pooling is 'mean'; expected one of \['average', 'max', 'k-means'\]",
                {"pooling": "mean"}),
    "pooling: number": (TypeError, "pooling is 2; expected a name or a function", {"pooling": 2}),
    "class_token": (TypeError, "class_token is 1; expected True or False", {"class_token": 1}),
    "kernel": (TypeError, "kernel is 'linear'; expected a function", {"kernel": "linear"}),
    "positional": (TypeError, "positional is 1", {"positional": 1}),
    "positional: token": (ValueError, "positional is True with class_token=True",
                          {"positional": True, "class_token": True}),
    "positional: k-means": (ValueError, "positional is True with k-means",
                            {"positional": True, "pooling": "k-means"}),
    "positional: lengths": (ValueError, "expected as many keys as queries",
                            {"positional": True, "q": X[:, :, :3]}),
    "convolution": (ValueError, r"scale is 2; expected one of \['4'\]",
                    {"pooling": ConvolutionPooling([4])}),
}  # fmt: skip
NORMALISED = {
    "beta": (ValueError, "beta is nan", {"beta": math.nan}),
    "beta: heads": (ValueError, r"beta has shape \(2,\)", {"beta": torch.zeros(2)}),
    "eps": (ValueError, "eps is 0", {"eps": 0}),
}


@pytest.mark.parametrize("bad", (BAD | NORMALISED | FAST).values(), ids=BAD | NORMALISED | FAST)
def test_bad_argument_is_named(bad):
    error, match, changed = bad
    functions = [scaled_normalized_attention]
    if not {"beta", "eps"} & set(changed):
        functions.append(scaled_attention)
        if bad in BAD.values():
            functions.append(scaled_attention_reference)
    if bad not in FAST.values():
        functions.append(scaled_normalized_attention_reference)
    for function in functions:
        with pytest.raises(error, match=match):
            function(**{"q": X, "k": X, "v": X, "scales": SCALES, **changed})


CONSTRUCTION = {
    "scales": (ValueError, r"scales is \[1, 2\]; expected one number per head", {"scales": [1, 2]}),
    "scale": (ValueError, r"scales\[0\] is 0", {"scales": [0, 1, 1, 1]}),
    "no scales": (TypeError, "scales", {}),
    "pooling": (ValueError, "pooling is 'mean'", {"scales": SCALES, "pooling": "mean"}),
    "beta": (ValueError, "beta is inf", {"scales": SCALES, "beta": math.inf}),
    "betas": (ValueError, r"beta is \[0.1\]; expected one", {"scales": SCALES, "beta": [0.1]}),
}


@pytest.mark.parametrize("bad", CONSTRUCTION.values(), ids=CONSTRUCTION)
def test_bad_construction_is_named(bad):
    error, match, options = bad
    with pytest.raises(error, match=match):
        ScaledNormalizedAttention(E, HEADS, **options)


CALLS = {
    "causal": ("is_causal is True with scales", {"is_causal": True}),
    "mask": ("attn_mask is given with scales", {"attn_mask": torch.zeros(T, T).bool()}),
    "bias": ("key_padding_mask has numbers other", {"key_padding_mask": torch.ones(B, T)}),
    "padding": (r"key_padding_mask has shape \(2, 3\)", {"key_padding_mask": torch.ones(B, 3) > 0}),
}


@pytest.mark.parametrize("bad", CALLS.values(), ids=CALLS)
def test_bad_call_of_a_layer_is_named(bad):
    match, options = bad
    x, _ = layer_inputs(torch.float32)
    with pytest.raises(ValueError, match=match):
        ScaledAttention(E, HEADS, scales=SCALES)(x, x, x, **options)


def test_weights_of_a_maximum_are_refused():
    x, _ = layer_inputs(torch.float32)
    with pytest.raises(ValueError, match="need_weights is True with max pooling"):
        ScaledAttention(E, HEADS, scales=SCALES, pooling="max")(x, x, x)


# --- on a GPU ----------------------------------------------------------------------------------


@cuda
@pytest.mark.parametrize("name", ["none", "padding", "padding, additive"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_equals_float64_on_cpu(dtype, name):
    masks = MASKS[name]
    exact = scaled_normalized_attention_reference(
        *(x.detach().double() for x in qkv(dtype=dtype)), scales=SCALES, **masks
    )
    on_gpu = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in masks.items()}
    out = scaled_normalized_attention(*qkv(dtype=dtype, device="cuda"), scales=SCALES, **on_gpu)
    assert (out.cpu().double() - exact).norm() < 10 * torch.finfo(dtype).eps * exact.norm()


def test_kernels_that_are_softmax_agree():
    """The default, and a kernel that BN cannot know to be a softmax."""
    q, k, v = qkv()
    other = lambda *args, **options: softmax_attention(*args, **options)  # noqa: E731
    for eps in (None, 0.1):
        outs = [
            scaled_normalized_attention(q, k, v, scales=SCALES, eps=eps, kernel=kernel)
            for kernel in (softmax_attention, other)
        ]
        torch.testing.assert_close(*outs, rtol=1e-11, atol=1e-11)
        plain = scaled_normalized_attention(q, k, v, scales=[1] * H, eps=eps)
        torch.testing.assert_close(plain, normalized_attention(q, k, v, eps=eps))
