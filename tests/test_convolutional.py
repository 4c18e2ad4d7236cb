"""Attention-Conv1D and -Conv2D: mixing matrices, filters, padding, the layers, CvT.

`test_contract` tests what they have in common with all mechanisms.
"""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    B,
    H,
    N,
    assert_agree,
    assert_all_close,
    assert_learns,
    assert_named,
    disturbed,
    tensors,
)
from helpers import qkv as heads_of

from derived_attention import (
    conv1d_attention_reference,
    conv2d_attention_reference,
    linear_attention_reference,
    normalized_attention_reference,
    softmax_attention_reference,
)
from derived_attention.batch_norm.core import normalized_attention
from derived_attention.convolutional.core import (
    conv1d_attention,
    conv2d_attention,
    mixing_matrix_1d,
)
from derived_attention.convolutional.layer import Conv1DAttention, Conv2DAttention, CvTAttention
from derived_attention.formulas import mixing_matrix
from derived_attention.layer import ALL, MultiheadAttention
from derived_attention.linear.core import linear_attention

M, D, DV = 9, 4, 3
pytestmark = pytest.mark.usefixtures("no_short_forms")
GRID = (3, 4)
SIZES = [1, 2, 3, 4, 5, 8, 30]
FORMS_1D = [conv1d_attention, conv1d_attention_reference]
FORMS_2D = [conv2d_attention, conv2d_attention_reference]
qkv = functools.partial(heads_of, m=M, d=D, dv=DV)
no_warning = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def on_grid(leading=(B, H), grid=GRID, class_token=False, **options):
    n = math.prod(grid) + class_token
    return qkv(leading, **{"n": n, "m": n, **options})


def filters(*shape, seed=7, **options):
    return tensors(shape, seed=seed, **options)[0]


# --- the mixing matrix -------------------------------------------------------------------------


def torch_conv(x, weight, grid):
    """PyTorch's depthwise convolution of (H, N, D), one filter for the channels of a head."""
    groups, conv = x.shape[-1], (F.conv1d, F.conv2d)[len(grid) - 1]
    images = x.unflatten(-2, grid).movedim(-1, 1)  # (H, D, N) or (H, D, N_H, N_W)
    out = [
        conv(image, w.expand(groups, 1, *w.shape), padding="same", groups=groups)
        for image, w in zip(images, weight, strict=True)
    ]
    return torch.stack(out).movedim(1, -1).flatten(1, -2)


@no_warning
def test_mixing_matrix_is_pytorchs_convolution():
    for s in SIZES:
        x, weight = tensors((H, N, D), (H, s))
        found, expected = mixing_matrix_1d(weight, N) @ x, torch_conv(x, weight, (N,))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for grid in ((3, 4), (1, 5), (5, 1)):
        for sizes in ((1, 1), (2, 2), (3, 3), (3, 2), (1, 4), (9, 9)):
            x, weight = tensors((H, math.prod(grid), D), (H, *sizes))
            found, expected = mixing_matrix(weight, grid) @ x, torch_conv(x, weight, grid)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_mixing_matrices_by_hand():
    w = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert mixing_matrix_1d(w, 3).tolist() == [[2, 3, 4], [1, 2, 3], [0, 1, 2]]
    assert mixing_matrix_1d(w, 3, causal=True).tolist() == [[4, 0, 0], [3, 4, 0], [2, 3, 4]]
    corner = mixing_matrix(w.view(2, 2), (2, 2))
    assert corner.tolist() == [[1, 2, 3, 4], [0, 1, 0, 3], [0, 0, 1, 2], [0, 0, 0, 1]]


# --- the formula -------------------------------------------------------------------------------


def test_reference_is_the_formula_number_by_number():
    """Eq. 45 for one head, with a filter of 3, in plain Python."""
    q, k, v = (x.detach() for x in qkv((1,)))
    w = [0.5, -1.0, 2.0]

    def at(x, i):
        inside = [(t, i + t - 1) for t in range(3) if 0 <= i + t - 1 < x.shape[1]]
        return [sum(w[t] * float(x[0, j, d]) for t, j in inside) for d in range(D)]

    out = conv1d_attention_reference(q, k, v, weight=torch.tensor(w).double())
    for i in range(N):
        e = [
            math.exp(sum(a * b for a, b in zip(at(q, i), at(k, j), strict=True)) / math.sqrt(D))
            for j in range(M)
        ]
        expected = sum(e[j] / sum(e) * v[0, j] for j in range(M))
        torch.testing.assert_close(out[0, i], expected)


@pytest.mark.parametrize("kind", ["full", "causal", "padding"])
def test_fast_equals_reference_for_all_filters(kind):
    padding = torch.arange(M) < torch.tensor([5, 0]).view(B, 1, 1, 1)  # one is all padding
    options = {"causal": {"is_causal": True}, "padding": {"attn_mask": padding}}.get(kind, {})
    for s in SIZES:
        for shape in ((s,), (H, s)):
            assert_agree(FORMS_1D, qkv(), f"{shape}", weight=filters(*shape), **options)
    own = {"weight": filters(H, 3), "key_weight": filters(4, seed=8)}
    assert_agree(FORMS_1D, qkv(), "keys have their own filter", **own, **options)


@pytest.mark.parametrize("class_token", [False, True])
def test_fast_equals_reference_for_all_filters_on_a_grid(class_token):
    options = {"grid": GRID, "class_token": class_token}
    inputs, n = on_grid(class_token=class_token), 12 + class_token
    for sizes in ((1, 1), (2, 2), (3, 3), (3, 2), (1, 4), (9, 8)):
        assert_agree(FORMS_2D, inputs, f"{sizes}", weight=filters(H, *sizes), **options)
    options |= {"weight": filters(2, 3)}
    assert_agree(FORMS_2D, inputs, "shared", **options)
    options |= {"key_weight": filters(H, 3, 1, seed=8)}
    assert_agree(FORMS_2D, inputs, "keys have their own filter", **options)
    assert_agree(FORMS_2D, inputs, "masked", **options, attn_mask=torch.arange(n) % 3 > 0)


def test_masked_places_reach_no_neighbour():
    """The last row of the grid is masked: as if the grid had one row less."""
    q, k, v = (x.detach() for x in on_grid())
    here = torch.arange(12) < 8
    options = {"weight": filters(H, 2, 3), "grid": GRID, "key_weight": filters(H, 3, 3)}
    C = mixing_matrix(options["weight"], GRID)
    C_k = mixing_matrix(options["key_weight"], (2, 4))
    expected = softmax_attention_reference(C @ q, C_k @ k[..., :8, :], v[..., :8, :])
    garbage = k.masked_fill(~here[:, None], math.nan)
    for form in FORMS_2D:
        out = form(q, k, v, attn_mask=here, **options)
        assert torch.equal(out, form(q, garbage, v, attn_mask=here, **options))
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


# --- other mechanisms, precision ---------------------------------------------------------------


def test_other_mechanisms_get_convolved_queries_and_keys():
    normalized = normalized_attention, normalized_attention_reference
    for pair in (
        (linear_attention, linear_attention_reference),
        tuple(functools.partial(form, eps=0.1) for form in normalized),
    ):
        line, grid = (
            [functools.partial(form, attention=f) for form, f in zip(forms, pair, strict=True)]
            for forms in (FORMS_1D, FORMS_2D)
        )
        for options in ({}, {"is_causal": True}, {"attn_mask": torch.arange(M) % 3 > 0}):
            options |= {"weight": filters(H, 4)}
            out = assert_agree(line, qkv(), f"{options}", **options)
            assert not torch.allclose(out, conv1d_attention(*qkv(), **options), atol=1e-3)
        own = {"weight": filters(H, 2, 2), "grid": GRID, "class_token": True}
        assert_agree(grid, on_grid(class_token=True), "grid", **own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"], ids=str)
def test_sums_are_wide_in_half_precision(dtype):
    """Two large numbers of a filter cancel; summed in half precision, they leave nothing."""
    autocast = dtype == "autocast"
    wide = torch.float32 if autocast else dtype
    _, k, v = (x.detach() for x in qkv(n=M, dtype=wide))
    q = qkv(n=1, dtype=wide)[0].detach().expand(B, H, M, D)
    large = 2049 if autocast else 2048  # bfloat16 rounds it to 2048
    weight = torch.tensor([large, 0.5, -2048], dtype=wide)
    exact = softmax_attention_reference((large - 2047.5) * q.double(), k.double(), v.double())
    for form in FORMS_1D:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = form(q, k, v, weight=weight, key_weight=torch.ones(1, dtype=wide))
        inner = (out - exact)[..., 1:-1, :]  # at the ends, one of the large terms is missing
        assert inner.norm() < 0.02 * exact.norm()


def test_a_class_token_alone():
    for grid in ((0, 4), (3, 0), (0, 0)):
        for form in FORMS_2D:
            q, k, v = on_grid(grid=grid, class_token=True)
            out = form(q, k, v, weight=filters(3, 3), grid=grid, class_token=True)
            torch.testing.assert_close(out, v)


# --- the layers --------------------------------------------------------------------------------

E, HEADS, T = 16, 4, 12
LAYERS = {
    "1D": functools.partial(Conv1DAttention, kernel_size=5),
    "1D, two filters": functools.partial(Conv1DAttention, kernel_size=2, shared=False),
    "2D": functools.partial(Conv2DAttention, grid=GRID),
    "2D, two filters": functools.partial(Conv2DAttention, grid=GRID, kernel_size=2, shared=False),
    "2D, class token": functools.partial(Conv2DAttention, grid=(1, 11), class_token=True),
}
CVT = {
    "CvT": functools.partial(CvTAttention, grid=GRID),
    "CvT, stride": functools.partial(CvTAttention, grid=GRID, kv_stride=2),
    "CvT, class token": functools.partial(CvTAttention, grid=(1, 11), class_token=True),
}
ALL_LAYERS = {**LAYERS, **CVT}
DOUBLE = {"dtype": torch.float64}


def layer_inputs(dtype=torch.float64):
    x = tensors((B, T, E), dtype=dtype, seed=4)[0]
    return x, torch.arange(T) >= torch.tensor([T, 7])[:, None]


def randomised(layer):
    """Change all parameters, so that no filter is the identity and no bias 0."""
    torch.manual_seed(3)
    return disturbed(layer, 0.5)


def projected(layer, query, key, value):
    """Queries, keys and values (B, H, ·, D) of a layer, before any convolution."""
    project = functools.partial(MultiheadAttention.project, layer)
    return [project(part, x, ALL) for part, x in enumerate((query, key, value))]


def test_layer_starts_as_softmax_attention():
    theirs = MultiheadAttention(E, HEADS, **DOUBLE)
    x, padding = layer_inputs()
    causal = [functools.partial(Conv1DAttention, kernel_size=s, causal=True) for s in (1, 2, 5)]
    for make in (*LAYERS.values(), *causal):
        ours = make(E, HEADS, **DOUBLE)
        missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
        assert set(missing) == ({"weight"} if ours.key_weight is None else {"weight", "key_weight"})
        assert not unexpected
        how = {"key_padding_mask": padding, "is_causal": ours.causal}
        outs = [f(x, x, x, **how)[0][~padding] for f in (ours, theirs)]
        assert_all_close(outs[:1], outs[1:], 1e-11, repr(ours))


@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_the_function_between_the_projections(name):
    """Also with heads of another width that share keys and values, and another mechanism."""
    x, padding = layer_inputs()
    for own in ({}, {"attention": linear_attention}, {"head_dim": 3, "kv_heads": 2}):
        layer = randomised(LAYERS[name](E, HEADS, **own, **DOUBLE))
        options = {"weight": layer.weight, "key_weight": layer.key_weight}
        options["attention"] = layer.attention
        function = conv1d_attention
        if name.startswith("2D"):
            function = conv2d_attention
            options |= {"grid": layer.grid, "class_token": layer.class_token}
        for padded, mask in ((None, None), (padding, ~padding[:, None, None])):
            q, k, v = projected(layer, x, x, x)
            q = q if mask is None else q * mask.mT
            h = function(q, k, v, attn_mask=mask, **options)
            expected = layer.out_proj(h.transpose(1, 2).flatten(-2))
            out = layer(x, x, x, key_padding_mask=padded, need_weights=False)[0]
            torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


def test_queries_may_have_a_padding_of_their_own():
    layer = randomised(Conv1DAttention(E, HEADS, **DOUBLE))
    x, padding = layer_inputs()
    query, gone = x.flip(1), padding.flip(1)
    q, k, v = projected(layer, query, x, x)
    own = {"attn_mask": ~padding[:, None, None], "weight": layer.weight}
    for known, blank in (({}, padding), ({"query_padding_mask": gone}, gone)):
        out = layer(query, x, x, key_padding_mask=padding, need_weights=False, **known)[0]
        h = conv1d_attention(q.masked_fill(blank[:, None, :, None], 0), k, v, **own)
        expected = layer.out_proj(h.transpose(1, 2).flatten(-2))
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", CVT)
def test_cvt_is_a_drop_in_too(name):
    """Without a batch, with an empty one, with dropout, as a copy, under autocast."""
    layer = randomised(CVT[name](E, HEADS, dropout=0.5, **DOUBLE)).eval()
    x, _ = layer_inputs()
    out, A = layer(x, x, x)
    assert_all_close(layer(x[0], x[0], x[0]), (out[0], A[0]), 1e-7)
    assert layer(x[:0], x[:0], x[:0])[0].shape == (0, T, E)
    assert torch.equal(copy.deepcopy(layer)(x, x, x)[0], out)
    first, second = (layer.train()(x, x, x, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(first, second)
    layer, x = randomised(CVT[name](E, HEADS)).eval(), x.float()
    exact, _ = layer(x, x, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = layer(x, x, x, need_weights=False)
    assert bool((out - exact).norm() < 0.1 * exact.norm())
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_every_parameter_learns():
    x, _ = layer_inputs(torch.float32)
    for name, make in ALL_LAYERS.items():
        torch.manual_seed(0)
        assert_learns(make(E, HEADS), x, name)


# --- CvT ---------------------------------------------------------------------------------------


def by_hand(layer, x, grid, class_token, steps):
    """BatchNorm(Conv(X)) of each of the three, from PyTorch's functions."""
    for convolution, step in zip(layer.convolutions, steps, strict=True):
        weight, norm = convolution[1].weight, convolution[2]
        assert weight.shape[:2] == (E, 1) and convolution[1].bias is None
        image = x[:, int(class_token) :].mT.unflatten(-1, grid)
        # padded as for step 1, of which every step-th row and column is kept
        mixed = F.conv2d(image, weight, padding="same", groups=E)[..., ::step, ::step]
        assert mixed.shape[-2:] == tuple(-(-n // step) for n in grid)
        shape = (1, E, 1, 1)
        scale = (norm.running_var + norm.eps).rsqrt() * norm.weight
        mixed = (mixed - norm.running_mean.view(shape)) * scale.view(shape) + norm.bias.view(shape)
        yield torch.cat([x[:, : int(class_token)], mixed.flatten(-2).mT], 1)


@no_warning
@pytest.mark.parametrize("class_token", [False, True])
def test_cvt_is_convolution_norm_projection(class_token):
    """Built again from PyTorch's functions, with running statistics that are not 0 and 1."""
    base = {"grid": (3, 4), "kernel_size": 3, "kv_stride": 1}
    variants = [{}, {"grid": (5, 3), "kv_stride": 2}, {"grid": (1, 1), "kv_stride": 3}]
    variants += [{"kernel_size": s} for s in (1, 2, 4)]
    variants += [{"kv_stride": 2}, {"kv_stride": 3}, {"kv_stride": 2, "kernel_size": 2}]
    variants += [{"kv_stride": 2, "head_dim": 3, "kv_heads": 2}]
    for changed in variants:
        own = {**base, **changed}
        layer = CvTAttention(E, HEADS, class_token=class_token, **own, **DOUBLE)
        layer = randomised(layer).eval()
        for convolution in layer.convolutions:
            convolution[2].running_mean.normal_()
            convolution[2].running_var.uniform_(0.5, 2)
        x = tensors((B, math.prod(own["grid"]) + class_token, E))[0].detach()
        steps = (1, own["kv_stride"], own["kv_stride"])
        q, k, v = projected(layer, *by_hand(layer, x, own["grid"], class_token, steps))
        h = softmax_attention_reference(q, k, v)
        expected = layer.out_proj(h.transpose(1, 2).flatten(-2))
        out, A = layer(x, x, x)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        assert A.shape == (B, x.shape[1], k.shape[-2]), changed
        torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], expected)


def test_cvt_norm_is_of_the_batch_in_training():
    layer = CvTAttention(E, HEADS, grid=GRID, **DOUBLE).train()
    x, _ = layer_inputs()
    before = layer(x, x, x)[0]
    layer(5 + 3 * x, x, x)
    assert torch.equal(before, layer(x, x, x)[0])
    assert not torch.allclose(before, layer.eval()(x, x, x)[0], atol=1e-3)


def test_cvt_of_other_widths():
    layer = CvTAttention(E, HEADS, grid=(2, 3), kdim=6, vdim=9, kv_stride=2, kv_heads=1)
    out, A = layer(torch.randn(B, 6, E), torch.randn(B, 6, 6), torch.randn(B, 6, 9))
    assert out.shape == (B, 6, E) and A.shape == (B, 6, 2)


# --- errors ------------------------------------------------------------------------------------

X = torch.zeros(B, H, 12, D)
W1, W2 = torch.zeros(H, 3), torch.zeros(H, 3, 3)


def test_bad_filter_is_named():
    for W, own, form in ((W1, {}, FORMS_1D[0]), (W2, {"grid": GRID}, FORMS_2D[0])):
        bad = [
            (TypeError, "weight is of type list", {"weight": [1.0]}),
            (TypeError, "weight has dtype torch.float64; expected torch", {"weight": W.double()}),
            (ValueError, "weight is on device meta", {"weight": W.to("meta")}),
            (ValueError, "weight has shape .* at least one", {"weight": W[..., :0]}),
            (ValueError, "weight has shape .* a filter for each", {"weight": W.repeat(2, 1, 1)}),
            (ValueError, "key_weight has shape", {"key_weight": W[:2]}),
            (TypeError, "attention is 'softmax'; expected a function", {"attention": "softmax"}),
        ]
        assert_named(bad, form, q=X, k=X, v=X, weight=W, **own)


def test_bad_grid_is_named():
    bad = [
        (TypeError, "grid is 12", {"grid": 12}),
        (TypeError, "grid is '34'", {"grid": "34"}),
        (ValueError, r"grid is \(1, 3, 4\)", {"grid": (1, 3, 4)}),
        (TypeError, r"grid\[0\] is of type float", {"grid": (3.0, 4)}),
        (ValueError, r"grid\[1\] is -4", {"grid": (3, -4)}),
        (ValueError, "q has shape .* 9 tokens, for the grid 3 x 3 without", {"grid": (3, 3)}),
        (ValueError, "q has shape .* 13 tokens, .* with a class", {"class_token": True}),
        (ValueError, "k has shape .* expected 12 tokens", {"k": X[..., :9, :], "v": X[..., :9, :]}),
    ]
    assert_named(bad, conv2d_attention, q=X, k=X, v=X, weight=W2, grid=GRID)


def test_bad_mixing_matrix_is_named():
    bad = [
        (TypeError, "weight is of type list", {"weight": [1.0]}),
        (ValueError, r"weight has shape \(0,\)", {"weight": torch.zeros(0)}),
        (TypeError, "causal is 1", {"causal": 1}),
        (ValueError, "N is -1", {"N": -1}),
    ]
    assert_named(bad, mixing_matrix_1d, weight=W1, N=3)


def test_bad_construction_is_named():
    image, cvt = (functools.partial(x, grid=GRID) for x in (Conv2DAttention, CvTAttention))
    for error, match, make, options in (
        (ValueError, "kernel_size is 0", Conv1DAttention, {"kernel_size": 0}),
        (TypeError, "kernel_size is of type tuple", image, {"kernel_size": (3, 3)}),
        (TypeError, "causal", image, {"causal": True}),
        (TypeError, "grid is 12", Conv2DAttention, {"grid": 12}),
        (ValueError, "kernel_size is -1", cvt, {"kernel_size": -1}),
        (ValueError, "kv_stride is 0", cvt, {"kv_stride": 0}),
        (ValueError, r"grid\[0\] is 0", CvTAttention, {"grid": (0, 4)}),
    ):
        with pytest.raises(error, match=match):
            make(E, HEADS, **options)


def test_bad_forward_is_named():
    x = torch.zeros(B, T, E)
    because = "expected None: a convolved key depends on its neighbours"
    for name, make in ALL_LAYERS.items():
        bad = [
            (ValueError, f"attn_mask is .*; {because}", {"attn_mask": torch.ones(T, T)}),
            (ValueError, "is_causal is .*; expected False", {"is_causal": True}),
        ]
        if name in CVT:
            masked = {"key_padding_mask": torch.zeros(B, T).bool()}
            bad.append((ValueError, f"key_padding_mask is .*; {because}", masked))
        assert_named(bad, functools.partial(make(E, HEADS), x, x, x))
    short = x[:, 1:]
    with pytest.raises(ValueError, match="query has shape .* tokens, for the grid"):
        CVT["CvT"](E, HEADS)(short, short, short)
    with pytest.raises(ValueError, match="is_causal is False; expected True"):
        Conv1DAttention(E, HEADS, causal=True)(x, x, x)
