"""Attention-Conv1D and -Conv2D: mixing matrices, shifted sums, masks, causality, the layers."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from derived_attention.attention.convolutional import (
    Conv1DAttention,
    Conv2DAttention,
    CvTAttention,
    conv1d_attention,
    conv1d_attention_reference,
    conv2d_attention,
    conv2d_attention_reference,
    mixing_matrix_1d,
    mixing_matrix_2d,
)
from derived_attention.attention.linear import linear_attention, linear_attention_reference
from derived_attention.attention.normalized import (
    normalized_attention,
    normalized_attention_reference,
)
from derived_attention.attention.softmax import (
    MultiheadAttention,
    causal_mask,
    softmax_attention,
    softmax_attention_reference,
)
from derived_attention.models import SeriesClassifier, make_attention

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
B, H, N, M, D, DV = 2, 3, 6, 9, 4, 3
GRID = (3, 4)
SIZES = [1, 2, 3, 4, 5, 8, 30]
FORMS_1D = [conv1d_attention, conv1d_attention_reference]
FORMS_2D = [conv2d_attention, conv2d_attention_reference]

cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NOT TESTED: this machine has no CUDA device"
)


def tensors(*shapes, dtype=torch.float64, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    return [x.to(device, dtype).requires_grad_() for x in made]


def qkv(leading=(B, H), n=N, m=M, d=D, dv=DV, **options):
    return tensors((*leading, n, d), (*leading, m, d), (*leading, m, dv), **options)


def on_grid(leading=(B, H), grid=GRID, class_token=False, **options):
    n = math.prod(grid) + class_token
    return qkv(leading, n=n, m=n, **options)


def filters(*shape, seed=7, **options):
    return tensors(shape, seed=seed, **options)[0]


def output_and_gradients(function, inputs, **options):
    """The output, and the gradients of a fixed linear functional of it."""
    leaves = [x for x in inputs if x.requires_grad]
    out = function(*inputs, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    loss = (out * weights.view_as(out)).sum()
    return out, *torch.autograd.grad(loss, leaves, materialize_grads=True)


def with_filters(form, **options):
    """Take the filters as arguments four and five, so that they get gradients."""

    def function(q, k, v, weight, key_weight=None):
        return form(q, k, v, weight=weight, key_weight=key_weight, **options)

    return function


def assert_all_close(left, right, tol):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def additive(mask, bias=0.0):
    return torch.zeros(mask.shape, dtype=torch.float64).add(bias).masked_fill(~mask, -math.inf)


def keep(*shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4


def masks(m, heads=H, batch=B):
    some = keep(batch, 1, 1, m)
    some[0] = False  # this sequence is all padding
    return {
        "none": {},
        "padding": {"attn_mask": some},
        "padding, additive": {"attn_mask": additive(some)},
        "keys": {"attn_mask": keep(m)},
        "bias on keys": {"attn_mask": additive(keep(m), torch.linspace(-1, 1, m))},
        "per head": {"attn_mask": keep(heads, 1, m)},
        "nothing": {"attn_mask": torch.zeros(1, m).bool()},
        "all or nothing": {"attn_mask": torch.tensor(True)},
        "scale": {"scale": 0.7},
    }


# --- the mixing matrix -------------------------------------------------------------------------


def torch_conv1d(x, weight):
    """PyTorch's depthwise convolution of (H, N, D), one filter for the channels of a head."""
    return torch.stack([
        F.conv1d(x[h].T, w.expand(x.shape[-1], 1, -1), padding="same", groups=x.shape[-1]).T
        for h, w in enumerate(weight)
    ])  # fmt: skip


def torch_conv2d(x, weight, grid):
    images = x.unflatten(-2, grid).movedim(-1, -3)  # (H, D, N_H, N_W)
    groups = x.shape[-1]
    out = [
        F.conv2d(image, w.expand(groups, 1, -1, -1), padding="same", groups=groups)
        for image, w in zip(images, weight, strict=True)
    ]
    return torch.stack(out).movedim(-3, -1).flatten(-3, -2)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("s", SIZES)
def test_mixing_matrix_is_pytorchs_convolution(s):
    x, weight = tensors((H, N, D), (H, s))
    C = mixing_matrix_1d(weight, N)
    torch.testing.assert_close(C @ x, torch_conv1d(x, weight), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (3, 3), (3, 2), (1, 4), (9, 9)], ids=str)
@pytest.mark.parametrize("grid", [(3, 4), (1, 5), (5, 1)], ids=str)
def test_mixing_matrix_on_a_grid_is_pytorchs_convolution(grid, sizes):
    x, weight = tensors((H, math.prod(grid), D), (H, *sizes))
    C = mixing_matrix_2d(weight, grid)
    torch.testing.assert_close(C @ x, torch_conv2d(x, weight, grid), rtol=1e-12, atol=1e-12)


def test_mixing_matrices_by_hand():
    w = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert mixing_matrix_1d(w, 3).tolist() == [[2, 3, 4], [1, 2, 3], [0, 1, 2]]
    assert mixing_matrix_1d(w, 3, causal=True).tolist() == [[4, 0, 0], [3, 4, 0], [2, 3, 4]]
    corner = mixing_matrix_2d(w.view(2, 2), (2, 2))
    assert corner.tolist() == [[1, 2, 3, 4], [0, 1, 0, 3], [0, 0, 1, 2], [0, 0, 0, 1]]
    row = mixing_matrix_2d(w[:3].view(1, 3), (1, 2), class_token=True)
    assert row.tolist() == [[1, 0, 0], [0, 2, 3], [0, 1, 2]]


def test_mixing_matrix_on_one_row_or_column_is_that_of_a_sequence():
    w = filters(H, 5)
    expected = mixing_matrix_1d(w, 7)
    assert torch.equal(mixing_matrix_2d(w.unsqueeze(-2), (1, 7)), expected)
    assert torch.equal(mixing_matrix_2d(w.unsqueeze(-1), (7, 1)), expected)


def test_identical_channels_commute_with_a_projection_and_others_do_not():
    x, W, w, each = tensors((N, D), (D, 5), (3,), (D, 3))
    C = mixing_matrix_1d(w, N)
    torch.testing.assert_close((C @ x) @ W, C @ (x @ W))

    def depthwise(x):
        shared = [each[d % D] for d in range(x.shape[-1])]
        return torch.stack([mixing_matrix_1d(w, N) @ x[:, d] for d, w in enumerate(shared)], -1)

    assert not torch.allclose(depthwise(x) @ W, depthwise(x @ W), atol=1e-2)


def test_scores_are_convolved_on_both_sides():
    q, k, v = (x.detach() for x in qkv((), n=N, m=N))
    C = mixing_matrix_1d(filters(3), N)
    A = (C @ (q @ k.T) @ C.T / math.sqrt(D)).softmax(-1)
    torch.testing.assert_close(conv1d_attention(q, k, v, weight=filters(3)), A @ v)


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


@pytest.mark.parametrize("own_keys", [False, True])
@pytest.mark.parametrize("leading", [(), (H,)], ids=["shared", "per head"])
@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize("name", [*masks(M), "causal"])
def test_fast_equals_reference(name, s, leading, own_keys):
    options = {"is_causal": True} if name == "causal" else masks(M)[name]
    inputs = [*qkv(), filters(*leading, s), *([filters(H, 4, seed=8)] if own_keys else [])]
    results = [output_and_gradients(with_filters(f, **options), inputs) for f in FORMS_1D]
    assert all(bool(x.isfinite().all()) for x in results[0])
    assert_all_close(*results, 1e-10)


@pytest.mark.parametrize("own_keys", [False, True])
@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (3, 3), (3, 2), (1, 4), (9, 8)], ids=str)
@pytest.mark.parametrize("name", masks(12))
def test_fast_equals_reference_on_a_grid(name, sizes, class_token, own_keys):
    options = {"grid": GRID, "class_token": class_token, **masks(12 + class_token)[name]}
    own = [filters(2, 3, seed=8)] if own_keys else []
    inputs = [*on_grid(class_token=class_token), filters(H, *sizes), *own]
    results = [output_and_gradients(with_filters(f, **options), inputs) for f in FORMS_2D]
    assert all(bool(x.isfinite().all()) for x in results[0])
    assert_all_close(*results, 1e-10)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2), st.integers(0, 3), st.integers(0, 7), st.integers(0, 7), st.integers(1, 9),
    st.sampled_from(["none", "causal", "keys"]), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_fast_equals_reference_for_any_shape(b, h, n, m, s, kind, shared, seed):
    mask = {"attn_mask": keep(b, 1, 1, m, seed=seed)} if kind == "keys" else {}
    options = {"is_causal": kind == "causal", **mask}
    weight = filters(s, seed=seed) if shared else filters(h, s, seed=seed)
    inputs = [*qkv((b, h), n=n, m=m, d=3, dv=2, seed=seed), weight]
    results = [output_and_gradients(with_filters(f, **options), inputs) for f in FORMS_1D]
    assert all(bool(x.isfinite().all()) for x in results[0])
    assert_all_close(*results, 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2), st.tuples(st.integers(0, 4), st.integers(0, 4)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_fast_equals_reference_on_any_grid(b, grid, sizes, class_token, seed):
    inputs = [*on_grid((b, 2), grid, class_token, seed=seed), filters(2, *sizes, seed=seed)]
    options = {"grid": grid, "class_token": class_token}
    results = [output_and_gradients(with_filters(f, **options), inputs) for f in FORMS_2D]
    assert_all_close(*results, 1e-9)


@pytest.mark.parametrize("leading", [(), (H,), (B, H), (2, B, H)], ids=str)
def test_any_number_of_leading_dimensions(leading):
    heads = leading[-1:] or (1,)
    for options in ({}, {"is_causal": True}, {"attn_mask": keep(M)}):
        inputs = [*qkv(leading), filters(*heads, 4), filters(3)]
        results = [output_and_gradients(with_filters(f, **options), inputs) for f in FORMS_1D]
        assert_all_close(*results, 1e-11)
    inputs = [*on_grid(leading), filters(*heads, 2, 3), filters(3, 1)]
    results = [output_and_gradients(with_filters(f, grid=GRID), inputs) for f in FORMS_2D]
    assert_all_close(*results, 1e-11)


def test_gradcheck():
    inputs = [*qkv((1, 2), n=3, m=4, d=2, dv=2), filters(2, 3), filters(2)]
    for options in ({}, {"is_causal": True}, {"attn_mask": torch.tensor([1, 0, 1, 1]).bool()}):
        assert torch.autograd.gradcheck(with_filters(conv1d_attention, **options), inputs)
    inputs = [*on_grid((1, 2), (2, 2), True, d=2, dv=2), filters(2, 2, 2), filters(3, 1)]
    options = {"grid": (2, 2), "class_token": True}
    assert torch.autograd.gradcheck(with_filters(conv2d_attention, **options), inputs)


def test_gradients_of_gradients():
    """The shifted sum's own backward can be differentiated: a softmax kernel that can, shows it."""
    inputs = [*qkv((1, 2), n=3, m=3, d=2, dv=2), filters(2, 3)]
    function = with_filters(conv1d_attention, kernel=softmax_attention_reference)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_gradients_only_where_asked():
    for wanted in range(4):
        inputs = [x.detach().requires_grad_(i == wanted) for i, x in
                  enumerate([*qkv(), filters(H, 3)])]  # fmt: skip
        out, gradient = output_and_gradients(with_filters(conv1d_attention), inputs)
        assert out.requires_grad and bool((gradient != 0).any())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s", SIZES)
def test_identity_filter_is_softmax_attention(s, causal):
    weight = torch.zeros(s).double()
    weight[s - 1 if causal else (s - 1) // 2] = 1
    out = conv1d_attention(*qkv(), weight=weight, is_causal=causal)
    torch.testing.assert_close(out, softmax_attention_reference(*qkv(), is_causal=causal))
    image = torch.zeros(H, s, s).double()
    image[:, (s - 1) // 2, (s - 1) // 2] = 1
    out = conv2d_attention(*on_grid(class_token=True), weight=image, grid=GRID, class_token=True)
    torch.testing.assert_close(out, softmax_attention_reference(*on_grid(class_token=True)))


def test_key_weight_is_for_the_keys():
    q, k, v = qkv(n=M)
    one = torch.ones(1).double()
    C = mixing_matrix_1d(filters(H, 3), M)
    out = conv1d_attention(q, k, v, weight=filters(H, 3), key_weight=one)
    torch.testing.assert_close(out, softmax_attention_reference(C @ q, k, v))
    out = conv1d_attention(q, k, v, weight=one, key_weight=filters(H, 3))
    torch.testing.assert_close(out, softmax_attention_reference(q, C @ k, v))


def test_each_head_has_its_own_filter():
    q, k, v = qkv()
    weight = filters(H, 3)
    whole = conv1d_attention(q, k, v, weight=weight)
    for h in range(H):
        one = conv1d_attention(*(x[:, h] for x in (q, k, v)), weight=weight[h])
        torch.testing.assert_close(whole[:, h], one)


def test_rows_and_columns_of_a_grid():
    """A filter (1, 3) mixes neighbours in a row, and (3, 1) in a column: not the other way."""
    x = on_grid((), (2, 3))[0].detach()
    flat = torch.eye(6).double()
    rows = conv2d_attention(x, x, flat, weight=filters(1, 3), grid=(2, 3))
    two = [mixing_matrix_1d(filters(3), 3) @ x[a : a + 3] for a in (0, 3)]
    mixed = torch.cat(two)
    torch.testing.assert_close(rows, softmax_attention_reference(mixed, mixed, flat))
    columns = conv2d_attention(x, x, flat, weight=filters(3, 1), grid=(2, 3))
    mixed = (mixing_matrix_1d(filters(3), 2) @ x.view(2, -1)).view(6, D)
    torch.testing.assert_close(columns, softmax_attention_reference(mixed, mixed, flat))


# --- masks, causality --------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS_1D)
def test_masked_keys_reach_no_neighbour(form):
    """Bit for bit, whatever stands in them, and the same as the sequence without its padding."""
    q, k, v = (x.detach() for x in qkv())
    here = torch.arange(M) < 5
    weight = filters(H, 5)
    for bad in (-1e4, math.nan):
        garbage = k.masked_fill(~here[:, None], bad)
        for mask in (here, additive(here), here.expand(B, 1, 1, M)):
            out = form(q, k, v, attn_mask=mask, weight=weight)
            assert torch.equal(out, form(q, garbage, v, attn_mask=mask, weight=weight))
            short = form(q, k[..., :5, :], v[..., :5, :], weight=weight)
            torch.testing.assert_close(out, short, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS_2D)
def test_masked_places_reach_no_neighbour(form):
    """The last row of the grid is masked: as if the grid had one row less."""
    q, k, v = (x.detach() for x in on_grid())
    here = torch.arange(12) < 8
    options = {"weight": filters(H, 2, 3), "grid": GRID, "key_weight": filters(H, 3, 3)}
    out = form(q, k, v, attn_mask=here, **options)
    garbage = k.masked_fill(~here[:, None], math.nan)
    assert torch.equal(out, form(q, garbage, v, attn_mask=here, **options))
    C = mixing_matrix_2d(options["weight"], GRID)
    C_k = mixing_matrix_2d(options["key_weight"], (2, 4))
    expected = softmax_attention_reference(C @ q, C_k @ k[..., :8, :], v[..., :8, :])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", [*FORMS_1D, *(functools.partial(f, grid=(3, 3))
                                               for f in FORMS_2D)])  # fmt: skip
def test_no_key_gives_zeros(form):
    weight = filters(3) if form in FORMS_1D else filters(2, 2)
    mask = torch.ones(B, 1, 1, M).bool()
    mask[1] = False
    for m in (mask, additive(mask)):
        inputs = [*qkv(n=M), weight]
        out, *gradients = output_and_gradients(with_filters(form, attn_mask=m), inputs)
        assert bool((out[1] == 0).all()) and bool((out[0] != 0).any())
        assert all(bool(g.isfinite().all()) for g in gradients)
        assert all(bool((g[1] == 0).all()) for g in gradients[:3])


@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize("form", FORMS_1D)
def test_causal_sees_nothing_of_the_future(form, s):
    q, k, v = (x.detach() for x in qkv(n=M))
    weight = filters(H, s)
    out = form(q, k, v, weight=weight, is_causal=True)
    for t in range(M - 1):
        later = (x.clone() for x in (q, k, v))
        q2, k2, v2 = (torch.cat([x[..., : t + 1, :], -9 * x[..., t + 1 :, :]], -2) for x in later)
        other = form(q2, k2, v2, weight=weight, is_causal=True)
        assert torch.equal(out[..., : t + 1, :], other[..., : t + 1, :])
        assert not torch.allclose(out[..., t + 1 :, :], other[..., t + 1 :, :], atol=1e-3)


def test_same_padding_would_show_the_future():
    """Why `is_causal` is more than a causal mask on eq. 45 as printed."""
    q, k, v = (x.detach() for x in qkv(n=M))
    C = mixing_matrix_1d(filters(H, 3), M)
    printed = softmax_attention(C @ q, C @ k, v, is_causal=True)
    q2, k2 = (torch.cat([x[..., :-1, :], -9 * x[..., -1:, :]], -2) for x in (q, k))
    other = softmax_attention(C @ q2, C @ k2, v, is_causal=True)
    assert torch.equal(printed[..., : M - 2, :], other[..., : M - 2, :])
    assert not torch.allclose(printed[..., M - 2, :], other[..., M - 2, :], atol=1e-3)


# --- other kernels -----------------------------------------------------------------------------

KERNELS = {
    "linear": (linear_attention, linear_attention_reference),
    "normalized": (
        functools.partial(normalized_attention, eps=0.1),
        functools.partial(normalized_attention_reference, eps=0.1),
    ),
}


@pytest.mark.parametrize("name", ["none", "causal", "padding", "per head"])
@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
def test_other_kernels(kernels, name):
    options = {"is_causal": True} if name == "causal" else masks(M)[name]
    inputs = [*qkv(), filters(H, 4)]
    results = [
        output_and_gradients(with_filters(f, kernel=kernel, **options), inputs)
        for f, kernel in zip(FORMS_1D, kernels, strict=True)
    ]
    assert_all_close(*results, 1e-10)
    plain = conv1d_attention(*inputs[:3], weight=inputs[3], **options)
    assert not torch.allclose(results[0][0], plain, atol=1e-3)


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
def test_other_kernels_on_a_grid(kernels):
    inputs = [*on_grid(class_token=True), filters(H, 2, 2)]
    results = [
        output_and_gradients(with_filters(f, kernel=x, grid=GRID, class_token=True), inputs)
        for f, x in zip(FORMS_2D, kernels, strict=True)
    ]
    assert_all_close(*results, 1e-10)


# --- precision, memory, compilers --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_error_is_a_few_roundings(dtype):
    inputs = [*qkv(n=48, m=48, d=32, dv=32, dtype=dtype), filters(H, 5, dtype=dtype)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    with torch.no_grad():
        for x in (*inputs, *wide):
            x.mul_(0.4)
    for options in ({}, {"is_causal": True}, {"attn_mask": torch.arange(48) < 40}):
        ours = output_and_gradients(with_filters(conv1d_attention, **options), inputs)
        exact = output_and_gradients(with_filters(conv1d_attention_reference, **options), wide)
        for x, y in zip(ours, exact, strict=True):
            assert x.dtype == dtype
            assert (x.double() - y).norm() < 8 * torch.finfo(dtype).eps * y.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"], ids=str)
@pytest.mark.parametrize("form", FORMS_1D)
def test_sums_are_wide_in_half_precision(form, dtype):
    """Two large numbers of a filter cancel; summed in half precision, they leave nothing."""
    autocast = dtype == "autocast"
    wide = torch.float32 if autocast else dtype
    _, k, v = (x.detach() for x in qkv(n=M, dtype=wide))
    q = qkv(n=1, dtype=wide)[0].detach().expand(B, H, M, D)
    large = 2049 if autocast else 2048  # bfloat16 makes 2048 of it
    weight = torch.tensor([large, 0.5, -2048], dtype=wide)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = form(q, k, v, weight=weight, key_weight=torch.ones(1, dtype=wide))
    exact = softmax_attention_reference((large - 2047.5) * q.double(), k.double(), v.double())
    inner = (out - exact)[..., 1:-1, :]  # at the ends only one of the two is there
    assert inner.norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("s", [1, 2, 5])
def test_one_token(dtype, s):
    """Its weight is 1, whatever the filter."""
    for form in (*FORMS_1D, *(functools.partial(f, is_causal=True) for f in FORMS_1D)):
        inputs = [*qkv(n=1, m=1, dtype=dtype), filters(H, s, dtype=dtype)]
        torch.testing.assert_close(form(*inputs[:3], weight=inputs[3]), inputs[2])
    for form in FORMS_2D:
        out = form(*inputs[:3], weight=filters(s, s, dtype=dtype), grid=(1, 1))
        torch.testing.assert_close(out, inputs[2])


EMPTY = {"no batch": ((0, H), N, M), "no head": ((B, 0), N, M)}
EMPTY |= {"no query": ((B, H), 0, M), "no key": ((B, H), N, 0), "nothing": ((0, 0), 0, 0)}


@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("kind", ["none", "causal", "padding"])
@pytest.mark.parametrize("form", FORMS_1D)
def test_empty_inputs(form, kind, shape):
    leading, n, m = shape
    options = {"is_causal": kind == "causal"}
    options |= {"attn_mask": torch.ones(1, m).bool()} if kind == "padding" else {}
    for weight in (filters(3), filters(leading[-1], 3)):
        inputs = [*qkv(leading, n=n, m=m), weight]
        results = output_and_gradients(with_filters(form, **options), inputs)
        assert results[0].shape == (*leading, n, DV)
        assert all(bool((x == 0).all()) for x in results)


@pytest.mark.parametrize("grid", [(0, 4), (3, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("form", FORMS_2D)
def test_empty_grid(form, grid):
    out = form(*on_grid(grid=grid), weight=filters(3, 3), grid=grid)
    assert out.shape == (B, H, 0, DV)
    q, k, v = on_grid(grid=grid, class_token=True)
    out = form(q, k, v, weight=filters(3, 3), grid=grid, class_token=True)
    torch.testing.assert_close(out, v)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("kind", ["none", "causal", "padding", "grid", "class token"])
@pytest.mark.parametrize("transposed", [False, True])
def test_no_matrix_is_stored(kind, transposed):
    """Nor when queries and keys come, as in the layer, from a transposed projection."""
    side, d = 12, 8
    first = kind == "class token"
    length = side**2 + first
    inputs = qkv((2, H), n=length, m=length, d=d, dv=d)
    if transposed:
        inputs = [
            x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs
        ]
    options = {"causal": {"is_causal": True}, "padding": {"attn_mask": keep(length)}}.get(kind, {})
    forms, weight = FORMS_1D, filters(H, 5)
    if kind in ("grid", "class token"):
        options = {"grid": (side, side), "class_token": first}
        forms, weight = FORMS_2D, filters(H, 3, 3)
    with Largest() as largest, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        # raises where no fused kernel will do
        output_and_gradients(with_filters(forms[0], **options), [*inputs, weight])
    assert largest.numel <= 2 * H * length * d
    with Largest() as largest:
        output_and_gradients(with_filters(forms[1], **options), [*inputs, weight])
    assert largest.numel >= 2 * H * length**2, "the recorder must see the reference's matrix"


def test_memory_grows_linearly():
    sizes = []
    for length in (200, 400):
        with Largest() as largest:
            inputs = [*qkv(n=length, m=length), filters(H, 5)]
            output_and_gradients(with_filters(conv1d_attention), inputs)
        sizes.append(largest.numel)
    assert sizes[1] <= 2.1 * sizes[0]


@pytest.mark.parametrize("name", ["causal", "padding", "grid"])
def test_compiles_without_a_break(name):
    torch._dynamo.reset()
    if name == "grid":
        function = with_filters(conv2d_attention, grid=GRID, class_token=True)
        inputs = [*on_grid(class_token=True), filters(H, 2, 3)]
    else:
        options = {"is_causal": True} if name == "causal" else masks(M)[name]
        function, inputs = with_filters(conv1d_attention, **options), [*qkv(), filters(5)]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = [output_and_gradients(f, inputs) for f in (compiled, function)]
    assert_all_close(*results, 1e-12)


@pytest.mark.parametrize("form", FORMS_1D)
@pytest.mark.parametrize("name", [*masks(M), "causal"])
def test_autocast(name, form):
    options = {"is_causal": True} if name == "causal" else masks(M)[name]
    inputs = [x.detach() for x in (*qkv(dtype=torch.float32), 0.3 * filters(H, 5).float())]
    exact = with_filters(conv1d_attention, **options)(*(x.double() for x in inputs))
    function = with_filters(form, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = function(*inputs)
        mixed = function(inputs[0].bfloat16(), *inputs[1:])
        leaves = [x.clone().requires_grad_() for x in inputs]
        _, *gradients = output_and_gradients(function, leaves)
    assert mixed.dtype == torch.bfloat16
    for x in (out, mixed):
        assert bool((x.double() - exact).norm() <= 0.05 * exact.norm())
    assert [g.dtype for g in gradients] == [torch.float32] * 4


def test_shapes_alone():
    x, w = torch.zeros(B, H, 12, D, device="meta"), torch.zeros(H, 3, device="meta")
    assert conv1d_attention(x, x, x, weight=w).shape == x.shape
    w = torch.zeros(H, 3, 3, device="meta")
    assert conv2d_attention(x, x, x, weight=w, grid=GRID).shape == x.shape


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


def layer_inputs(dtype=torch.float64):
    x = tensors((B, T, E), dtype=dtype, seed=4)[0]
    return x, torch.arange(T) >= torch.tensor([T, 7])[:, None]


def randomised(layer):
    """Draw all parameters anew, so that no filter is the identity and no bias 0."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator))
    return layer


def projected(layer, query, key, value):
    """Queries, keys and values of PyTorch's layer: (B, H, ·, D) each."""
    weights, biases = layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3)
    return [
        F.linear(x, w, b).unflatten(-1, (HEADS, -1)).transpose(-3, -2)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    ]


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_layer_starts_as_softmax_attention(make):
    theirs = nn.MultiheadAttention(E, HEADS, batch_first=True, dtype=torch.float64)
    ours = make(E, HEADS, dtype=torch.float64)
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert set(missing) == ({"weight"} if ours.key_weight is None else {"weight", "key_weight"})
    assert not unexpected
    x, padding = layer_inputs()
    for mask in (None, padding):
        for need_weights in (False, True):
            options = {"key_padding_mask": mask, "need_weights": need_weights}
            outs = [f(x, x, x, **options) for f in (ours, theirs)]
            valid = slice(None) if mask is None else ~mask  # padded queries become 0 in ours
            torch.testing.assert_close(outs[0][0][valid], outs[1][0][valid], rtol=1e-11, atol=1e-11)
            if need_weights:
                torch.testing.assert_close(outs[0][1][valid], outs[1][1][valid])


def test_causal_layer_starts_as_softmax_attention():
    plain = MultiheadAttention(E, HEADS, dtype=torch.float64)
    for s in (1, 2, 5):
        ours = Conv1DAttention(E, HEADS, kernel_size=s, causal=True, dtype=torch.float64)
        ours.load_state_dict(plain.state_dict(), strict=False)
        x, padding = layer_inputs()
        for options in ({}, {"key_padding_mask": padding}):
            outs = [f(x, x, x, is_causal=True, **options)[0] for f in (ours, plain)]
            valid = ~options.get("key_padding_mask", torch.zeros(B, T).bool())
            torch.testing.assert_close(outs[0][valid], outs[1][valid], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kernel", [softmax_attention, linear_attention])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_the_function_between_the_projections(name, kernel):
    layer = randomised(LAYERS[name](E, HEADS, dtype=torch.float64, kernel=kernel))
    x, padding = layer_inputs()
    options = {"weight": layer.weight, "key_weight": layer.key_weight, "kernel": kernel}
    function = conv1d_attention
    if name.startswith("2D"):
        function = conv2d_attention
        options |= {"grid": layer.grid, "class_token": layer.class_token}
    for padded in (None, padding, torch.where(padding, -math.inf, 0.0).double()):
        q, k, v = projected(layer, x, x, x)
        mask = None if padded is None else ~padding[:, None, None]
        q = q if mask is None else q * mask.mT
        h = function(q, k, v, attn_mask=mask, **options)
        expected = layer.out_proj(h.transpose(1, 2).flatten(-2))
        out, none = layer(x, x, x, key_padding_mask=padded, need_weights=False)
        assert none is None
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
        out, A = layer(x, x, x, key_padding_mask=padded, average_attn_weights=False)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(A @ v, h, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(layer(x, x, x, key_padding_mask=padded)[1], A.mean(1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("floating", [False, True])
def test_padding_reaches_no_valid_step(floating, causal):
    """Neither keys nor queries: a padded batch gives what each sequence gives alone."""
    layer = randomised(Conv1DAttention(E, HEADS, causal=causal, dtype=torch.float64))
    x, padding = layer_inputs()
    mask = torch.where(padding, -math.inf, 0.0).double() if floating else padding
    for need_weights in (False, True):
        options = {"need_weights": need_weights, "is_causal": causal}
        out, _ = layer(x, x, x, key_padding_mask=mask, **options)
        noise = torch.where(padding[..., None], 77.0, x)
        other, _ = layer(noise, noise, noise, key_padding_mask=mask, **options)
        assert torch.equal(out[~padding], other[~padding])
        for b, length in enumerate((T, 7)):
            one = x[b : b + 1, :length]
            alone, _ = layer(one, one, one, **options)
            torch.testing.assert_close(out[b, :length], alone[0], rtol=1e-11, atol=1e-11)


def test_padding_first_and_causal():
    layer = randomised(Conv1DAttention(E, HEADS, causal=True, dtype=torch.float64))
    x, _ = layer_inputs()
    padding = (torch.arange(T) < 4).expand(B, T)
    out, _ = layer(x, x, x, key_padding_mask=padding, is_causal=True, need_weights=False)
    rest = x[:, 4:]
    alone, _ = layer(rest, rest, rest, is_causal=True, need_weights=False)
    torch.testing.assert_close(out[:, 4:], alone, rtol=1e-11, atol=1e-11)


def test_cross_attention_leaves_the_queries_alone():
    """The padding is that of the keys; queries of the same length have their own."""
    layer = randomised(Conv1DAttention(E, HEADS, dtype=torch.float64))
    x, padding = layer_inputs()
    query = x.flip(1)
    out, _ = layer(query, x, x, key_padding_mask=padding, need_weights=False)
    q, k, v = projected(layer, query, x, x)
    h = conv1d_attention(q, k, v, attn_mask=~padding[:, None, None], weight=layer.weight)
    expected = layer.out_proj(h.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


def test_causal_layer_sees_no_future():
    layer = randomised(Conv1DAttention(E, HEADS, causal=True, dtype=torch.float64))
    x, padding = layer_inputs()
    out, _ = layer(x, x, x, key_padding_mask=padding, is_causal=True, need_weights=False)
    for t in range(T - 1):
        (slope,) = torch.autograd.grad(out[:, : t + 1].sum(), x, retain_graph=True)
        assert bool((slope[:, t + 1 :] == 0).all()) and bool((slope[:, : t + 1] != 0).any())


@pytest.mark.parametrize("batch", [(), (B,)], ids=str)
def test_cross_attention_of_other_widths(batch):
    layer = randomised(Conv1DAttention(E, HEADS, bias=False, kdim=6, vdim=9))
    inputs = [x.float() for x in tensors((*batch, 5, E), (*batch, T, 6), (*batch, T, 9))]
    padding = (torch.arange(T) > 6).expand(*batch, T)
    out, A = layer(*inputs, key_padding_mask=padding)
    assert out.shape == (*batch, 5, E) and A.shape == (*batch, 5, T)
    same, _ = layer(*inputs, key_padding_mask=padding, need_weights=False)
    torch.testing.assert_close(out, same)
    short = [inputs[0], *(x[..., :7, :] for x in inputs[1:])]
    torch.testing.assert_close(layer(*short)[0], out)


@pytest.mark.parametrize("make", [*LAYERS.values(), *CVT.values()], ids=[*LAYERS, *CVT])
def test_layer_without_a_batch_and_with_an_empty_one(make):
    layer = randomised(make(E, HEADS, dtype=torch.float64)).eval()
    x, _ = layer_inputs()
    out, A = layer(x, x, x)
    one, A1 = layer(x[0], x[0], x[0])
    torch.testing.assert_close(one, out[0])
    torch.testing.assert_close(A1, A[0])
    assert layer(x[:0], x[:0], x[:0])[0].shape == (0, T, E)


def test_autocast_in_the_layers():
    x, padding = layer_inputs(torch.float32)
    for name, make in {**LAYERS, **CVT}.items():
        layer = randomised(make(E, HEADS)).eval()
        mask = padding if name.startswith("1D") else None
        exact, _ = layer(x, x, x, key_padding_mask=mask)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, _ = layer(x, x, x, key_padding_mask=mask, need_weights=False)
        assert bool((out - exact).norm() < 0.1 * exact.norm())
        out.float().square().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_copies_and_representation():
    layer = randomised(Conv1DAttention(E, HEADS, kernel_size=3, shared=False))
    x, _ = layer_inputs(torch.float32)
    assert torch.equal(copy.deepcopy(layer)(x, x, x)[0], layer(x, x, x)[0])
    assert "filters=(4, 3), shared=False" in repr(layer)
    assert "grid=(3, 4), class_token=False" in repr(LAYERS["2D"](E, HEADS))
    assert "grid=(3, 4), class_token=False" in repr(CVT["CvT"](E, HEADS))


@pytest.mark.parametrize("make", [*LAYERS.values(), *CVT.values()], ids=[*LAYERS, *CVT])
def test_dropout_in_training(make):
    layer = make(E, HEADS, dropout=0.5)
    x, _ = layer_inputs(torch.float32)
    first, second = (layer.train()(x, x, x, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(first, second)
    first, second = (layer.eval()(x, x, x, need_weights=False)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "attention",
    [
        Conv1DAttention,
        functools.partial(Conv1DAttention, shared=False, kernel_size=4),
        functools.partial(Conv1DAttention, kernel=linear_attention),
        functools.partial(conv1d_attention, weight=torch.tensor([0.2, 0.5, 0.1])),
    ],
    ids=["class", "two filters", "linear", "function"],
)
def test_trains_inside_the_classifier(attention):
    torch.manual_seed(0)
    model = SeriesClassifier(3, 4, 7, dim=16, heads=4, hidden=32, dropout=0.0, attention=attention)
    x = torch.randn(12, 7, 3)
    padding = torch.arange(7) >= torch.tensor([7, 4, 1])[:, None].repeat(4, 1)
    y = torch.arange(12) % 4
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = F.cross_entropy(model(x, padding), y)
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    for A in model.attention_maps(x, padding):
        assert A.shape == (12, 4, 7, 7)
        torch.testing.assert_close(A.sum(-1), torch.ones(12, 4, 7))


@pytest.mark.parametrize("name", [*LAYERS, *CVT])
def test_every_parameter_learns(name):
    layer = make_attention({**LAYERS, **CVT}[name], E, HEADS)
    x, _ = layer_inputs(torch.float32)
    optimiser = torch.optim.Adam(layer.parameters(), lr=1e-2)
    before = [p.detach().clone() for p in layer.parameters()]
    losses = []
    for _ in range(10):
        loss = (layer(x, x, x, need_weights=False)[0] - x.detach()).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(bool((p != b).any()) for p, b in zip(layer.parameters(), before, strict=True))


# --- CvT ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("grid", [(3, 4), (5, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("s", [1, 2, 3, 4])
def test_cvt_is_convolution_norm_projection(s, stride, grid, class_token):
    """Built again from PyTorch's functions, with running statistics that are not 0 and 1."""
    layer = randomised(CvTAttention(E, HEADS, grid=grid, class_token=class_token, kernel_size=s,
                                    kv_stride=stride, dtype=torch.float64)).eval()  # fmt: skip
    x = tensors((B, math.prod(grid) + class_token, E))[0].detach()
    inputs = []
    for convolution, step in zip(layer.convolutions, (1, stride, stride), strict=True):
        weight, norm = convolution[1].weight, convolution[2]
        assert weight.shape == (E, 1, s, s) and convolution[1].bias is None
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        image = x[:, int(class_token) :].mT.unflatten(-1, grid)
        # the same padding of a step 1, and every step-th of its rows and columns
        mixed = F.conv2d(image, weight, padding="same", groups=E)[..., ::step, ::step]
        assert mixed.shape[-2:] == tuple(-(-n // step) for n in grid)
        shape = (1, E, 1, 1)
        scale = (norm.running_var + norm.eps).rsqrt() * norm.weight
        mixed = (mixed - norm.running_mean.view(shape)) * scale.view(shape) + norm.bias.view(shape)
        tokens = mixed.flatten(-2).mT
        inputs.append(torch.cat([x[:, : int(class_token)], tokens], 1))
    q, k, v = projected(layer, *inputs)
    expected = layer.out_proj(softmax_attention_reference(q, k, v).transpose(1, 2).flatten(-2))
    out, A = layer(x, x, x)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    assert A.shape == (B, x.shape[1], k.shape[-2])
    torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], expected)


def test_cvt_norm_is_of_the_batch_in_training():
    layer = CvTAttention(E, HEADS, grid=GRID, dtype=torch.float64).train()
    x, _ = layer_inputs()
    before = layer(x, x, x)[0]
    layer(5 + 3 * x, x, x)
    assert torch.equal(before, layer(x, x, x)[0])
    assert not torch.allclose(before, layer.eval()(x, x, x)[0], atol=1e-3)


def test_cvt_of_other_widths():
    layer = CvTAttention(E, HEADS, grid=(2, 3), kdim=6, vdim=9, kv_stride=2)
    out, A = layer(torch.randn(B, 6, E), torch.randn(B, 6, 6), torch.randn(B, 6, 9))
    assert out.shape == (B, 6, E) and A.shape == (B, 6, 2)


def test_cvt_draws_pytorchs_projections():
    torch.manual_seed(5)
    theirs = nn.MultiheadAttention(E, HEADS, batch_first=True)
    torch.manual_seed(5)
    ours = CvTAttention(E, HEADS, grid=GRID)
    assert torch.equal(theirs.in_proj_weight, ours.in_proj_weight)


# --- errors ------------------------------------------------------------------------------------

X = torch.zeros(B, H, 12, D)
W1, W2 = torch.zeros(H, 3), torch.zeros(H, 3, 3)
BAD = {
    "weight: list": (TypeError, "weight is of type list", {"weight": [1.0]}),
    "weight: integers": (TypeError, "weight has dtype torch.int64", {"weight": W1.long()}),
    "weight: dtype": (TypeError, "weight has dtype torch.float64; expected torch.float32",
                      {"weight": W1.double()}),
    "weight: device": (ValueError, "weight is on device meta", {"weight": W1.to("meta")}),
    "weight: number": (ValueError, r"weight has shape \(\)", {"weight": torch.tensor(1.0)}),
    "weight: empty": (ValueError, r"weight has shape .* at least one", {"weight": W1[..., :0]}),
    "weight: heads": (ValueError, r"weight has shape .* a filter for each head",
                      {"weight": torch.zeros(H + 1, *W1.shape[1:])}),
    "weight: many": (ValueError, "weight has shape", {"weight": torch.zeros(1, H, 1, 3, 3)}),
    "key_weight: empty": (ValueError, "key_weight has shape", {"key_weight": W1[..., :0]}),
    "key_weight: heads": (ValueError, "key_weight has shape", {"key_weight": W1[:2]}),
    "key_weight: list": (TypeError, "key_weight is of type list", {"key_weight": [1.0]}),
    "kernel": (TypeError, "kernel is 'softmax'; expected a function", {"kernel": "softmax"}),
    "scale": (ValueError, "scale is -1.0", {"scale": -1.0}),
    "mask: per query": (ValueError, r"attn_mask has shape \(12, 12\); expected the size 1",
                        {"attn_mask": causal_mask(12, 12)}),
    "mask: shape": (ValueError, "attn_mask has shape", {"attn_mask": torch.ones(4, 1, 1, 12)}),
    "mask: NaN": (ValueError, "attn_mask contains NaN", {"attn_mask": torch.full((12,), math.nan)}),
    "is_causal": (TypeError, "is_causal is None", {"is_causal": None}),
    "k": (ValueError, "k has shape", {"k": X[0]}),
    "q": (TypeError, "q is of type list", {"q": [1.0]}),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("form", [*FORMS_1D, *FORMS_2D])
def test_bad_argument_is_named(form, bad):
    error, match, changed = bad
    rest = {"weight": W1}
    if form in FORMS_2D:
        rest = {"weight": W2, "grid": GRID}
        changed = {
            name: torch.stack([x] * 3, -1) if name.endswith("weight") and x is not None
            and isinstance(x, torch.Tensor) and x.dim() == 2 and len(x) else x
            for name, x in changed.items()
        }  # fmt: skip
    with pytest.raises(error, match=match):
        form(**{"q": X, "k": X, "v": X, **rest, **changed})


GRIDS = {
    "number": (TypeError, "grid is 12", {"grid": 12}),
    "text": (TypeError, "grid is '34'", {"grid": "34"}),
    "three": (ValueError, r"grid is \(1, 3, 4\)", {"grid": (1, 3, 4)}),
    "fraction": (TypeError, r"grid\[0\] is of type float", {"grid": (3.0, 4)}),
    "negative": (ValueError, r"grid\[1\] is -4", {"grid": (3, -4)}),
    "places": (ValueError, r"q has shape .* expected 9 tokens, for the grid 3 x 3 without",
               {"grid": (3, 3)}),
    "class token": (ValueError, "q has shape .* expected 13 tokens, .* with a class",
                    {"class_token": True}),
    "class token: 1": (TypeError, "class_token is 1", {"class_token": 1}),
    "keys": (ValueError, "k has shape .* expected 12 tokens", {"k": X[..., :9, :],
                                                              "v": X[..., :9, :]}),
    "causal": (ValueError, "is_causal is True; expected False", {"is_causal": True}),
}  # fmt: skip


@pytest.mark.parametrize("bad", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("form", FORMS_2D)
def test_bad_grid_is_named(form, bad):
    error, match, changed = bad
    with pytest.raises(error, match=match):
        form(**{"q": X, "k": X, "v": X, "weight": W2, "grid": GRID, **changed})


@pytest.mark.parametrize(
    ("error", "match", "function"),
    [
        (TypeError, "weight is of type list", lambda: mixing_matrix_1d([1.0], 3)),
        (ValueError, r"weight has shape \(0,\)", lambda: mixing_matrix_1d(torch.zeros(0), 3)),
        (TypeError, "causal is 1", lambda: mixing_matrix_1d(W1, 3, 1)),
        (ValueError, "N is -1", lambda: mixing_matrix_1d(W1, -1)),
        (TypeError, "N is of type float", lambda: mixing_matrix_1d(W1, 3.0)),
        (ValueError, r"weight has shape \(3,\)", lambda: mixing_matrix_2d(W1[0], GRID)),
        (TypeError, "weight has dtype", lambda: mixing_matrix_2d(W2.long(), GRID)),
        (TypeError, "grid is 12", lambda: mixing_matrix_2d(W2, 12)),
        (TypeError, "class_token is 1", lambda: mixing_matrix_2d(W2, GRID, 1)),
    ],
)
def test_bad_mixing_matrix_is_named(error, match, function):
    with pytest.raises(error, match=match):
        function()


@pytest.mark.parametrize(
    ("error", "match", "make"),
    [
        (ValueError, "kernel_size is 0", lambda: Conv1DAttention(E, HEADS, kernel_size=0)),
        (TypeError, "kernel_size is of type tuple",
         lambda: Conv2DAttention(E, HEADS, grid=GRID, kernel_size=(3, 3))),
        (TypeError, "shared is 1", lambda: Conv1DAttention(E, HEADS, shared=1)),
        (TypeError, "causal is 1", lambda: Conv1DAttention(E, HEADS, causal=1)),
        (TypeError, "attention is 'softmax'", lambda: Conv1DAttention(E, HEADS, kernel="softmax")),
        (TypeError, "attention", lambda: Conv1DAttention(E, HEADS, attention=linear_attention)),
        (TypeError, "causal", lambda: Conv2DAttention(E, HEADS, grid=GRID, causal=True)),
        (TypeError, "grid is 12", lambda: Conv2DAttention(E, HEADS, grid=12)),
        (TypeError, "class_token is 1", lambda: Conv2DAttention(E, HEADS, grid=GRID,
                                                                class_token=1)),
        (ValueError, "embed_dim is 16 and num_heads 5", lambda: Conv1DAttention(E, 5)),
        (ValueError, "kernel_size is -1", lambda: CvTAttention(E, HEADS, grid=GRID,
                                                               kernel_size=-1)),
        (ValueError, "kv_stride is 0", lambda: CvTAttention(E, HEADS, grid=GRID, kv_stride=0)),
        (ValueError, r"grid\[0\] is 0", lambda: CvTAttention(E, HEADS, grid=(0, 4))),
        (TypeError, "class_token is 1", lambda: CvTAttention(E, HEADS, grid=GRID, class_token=1)),
    ],
)  # fmt: skip
def test_bad_construction_is_named(error, match, make):
    with pytest.raises(error, match=match):
        make()


FORWARD = {
    "attn_mask": (ValueError, "attn_mask is given; expected None", {"attn_mask": torch.ones(T, T)}),
    "attn_mask: shape": (ValueError, "attn_mask", {"attn_mask": torch.ones(T, 2)}),
    "is_causal": (ValueError, "is_causal is True; expected False", {"is_causal": True}),
    "query": (ValueError, "query has shape", {"query": torch.zeros(B, T, E + 1)}),
    "value": (ValueError, "value has shape", {"value": torch.zeros(B, T + 1, E)}),
}


@pytest.mark.parametrize("bad", FORWARD.values(), ids=FORWARD)
@pytest.mark.parametrize("make", [*LAYERS.values(), *CVT.values()], ids=[*LAYERS, *CVT])
def test_bad_forward_is_named(make, bad):
    error, match, changed = bad
    x = torch.zeros(B, T, E)
    with pytest.raises(error, match=match):
        make(E, HEADS)(**{"query": x, "key": x, "value": x, **changed})


def test_bad_padding_and_length_are_named():
    x = torch.zeros(B, T, E)
    with pytest.raises(ValueError, match="key_padding_mask has shape"):
        Conv1DAttention(E, HEADS)(x, x, x, key_padding_mask=torch.ones(B, 2).bool())
    with pytest.raises(ValueError, match="key_padding_mask is given; expected None"):
        CVT["CvT"](E, HEADS)(x, x, x, key_padding_mask=torch.zeros(B, T).bool())
    with pytest.raises(ValueError, match="is_causal is False; expected True"):
        Conv1DAttention(E, HEADS, causal=True)(x, x, x)
    for make in (*CVT.values(), LAYERS["2D"]):
        with pytest.raises(ValueError, match="query has shape .* tokens, for the grid"):
            make(E, HEADS)(x[:, 1:], x[:, 1:], x[:, 1:])
        with pytest.raises(ValueError, match="key has shape .* tokens, for the grid"):
            make(E, HEADS)(x, x[:, 1:], x[:, 1:])


# --- on a GPU ----------------------------------------------------------------------------------


@cuda
@pytest.mark.parametrize("name", ["none", "padding", "causal", "grid"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_equals_float64_on_cpu(dtype, name):
    forms, inputs, weight = FORMS_1D, qkv(dtype=dtype), filters(H, 5, dtype=dtype)
    options = {"is_causal": True} if name == "causal" else masks(M).get(name, {})
    if name == "grid":
        forms, inputs, weight = FORMS_2D, on_grid(dtype=dtype), filters(H, 3, 3, dtype=dtype)
        options = {"grid": GRID}
    wide = [x.detach().double() for x in (*inputs, weight)]
    with torch.no_grad():
        exact = with_filters(forms[1], **options)(*wide)
        on_gpu = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in options.items()}
        out = with_filters(forms[0], **on_gpu)(*(x.detach().cuda() for x in (*inputs, weight)))
    assert (out.cpu().double() - exact).norm() < 30 * torch.finfo(dtype).eps * exact.norm()
