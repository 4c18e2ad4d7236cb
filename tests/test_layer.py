"""Tests of MultiheadAttention: parity with nn.MultiheadAttention, and other mechanisms.

`test_contract_layers` tests what the layers of all mechanisms have in common.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from helpers import DTYPES, Largest, assert_named, cuda, disturbed
from helpers import boolean as kept
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import derived_attention
from derived_attention.common.masks import causal_mask
from derived_attention.layer import ALL, KEY, QUERY, MultiheadAttention
from derived_attention.softmax.core import attention_weights, softmax_attention

B, N, M, E, H = 2, 5, 7, 12, 3
D = E // H


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def boolean(*shape, seed=1):
    """Return a random mask, True at forbidden keys, that allows the first key."""
    return ~kept(*shape, seed=seed)


def pair(dtype=torch.float32, heads=H, **options):
    """Return our layer and PyTorch's, with the same weights and nonzero biases."""
    torch.manual_seed(0)
    theirs = disturbed(nn.MultiheadAttention(E, heads, batch_first=True, dtype=dtype, **options))
    ours = MultiheadAttention(E, heads, dtype=dtype, **options)
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    return ours, theirs


def run(layer, inputs, **options):
    """Return output, weights, and gradients of inputs and parameters."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output, weights = layer(*leaves, **options)
    slope = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device)
    loss = (output * slope.view_as(output)).sum()
    if weights is not None:
        loss = loss + (weights**2).sum()
    names, parameters = zip(*sorted(layer.named_parameters()), strict=True)
    gradients = torch.autograd.grad(loss, [*leaves, *parameters])
    return {
        "output": output,
        "weights": weights,
        **dict(zip(["query", "key", "value", *names], gradients, strict=True)),
    }


def assert_same(ours, theirs, tol):
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        y = theirs[name]
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.shape == y.shape and x.dtype == y.dtype, name
            torch.testing.assert_close(x, y, rtol=tol, atol=tol, msg=lambda m, n=name: f"{n}: {m}")


CAUSAL = ~causal_mask(N, M)
PADDING = {"key_padding_mask": boolean(B, M)}
MASKS = {
    "none": {},
    "boolean 2-D": {"attn_mask": boolean(N, M)},
    "boolean 3-D": {"attn_mask": boolean(B * H, N, M)},
    "float 2-D": {"attn_mask": random(N, M, seed=5)},
    "float 3-D": {"attn_mask": random(B * H, N, M, seed=5)},
    "float with -inf": {"attn_mask": torch.zeros(N, M).masked_fill(CAUSAL, -math.inf)},
    "padding": PADDING,
    "float padding": {"key_padding_mask": random(B, M, seed=6)},
    "boolean both": {"attn_mask": CAUSAL, **PADDING},
    "boolean both, 3-D": {"attn_mask": boolean(B * H, N, M, seed=7), **PADDING},
    "float both": {"attn_mask": random(N, M, seed=5), "key_padding_mask": random(B, M, seed=6)},
    "causal hint": {"attn_mask": CAUSAL, "is_causal": True},
    "causal hint and padding": {"attn_mask": CAUSAL, "is_causal": True, **PADDING},
}


def masks_in(name, dtype):
    return {
        key: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for key, x in MASKS[name].items()
    }


# --- parity ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kdim": 4, "vdim": 9}, {"vdim": 5}], ids=str
)
def test_same_seed_gives_the_same_initial_weights(options):
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(E, H, batch_first=True, **options)
    torch.manual_seed(3)
    ours = MultiheadAttention(E, H, **options)
    assert [name for name, _ in ours.named_parameters()] == [
        name for name, _ in theirs.named_parameters()
    ]
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name
    theirs.load_state_dict(ours.state_dict())  # the other direction


def three(dtype=torch.float64, sizes=((N, E), (M, E), (M, E))):
    """Return a query, a key and a value."""
    return [random(B, *size, dtype=dtype, seed=i) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("name", MASKS)
def test_parity(name):
    ours, theirs = pair(torch.float64)
    for how in ({"need_weights": False}, {}, {"average_attn_weights": False}):
        options = {**masks_in(name, torch.float64), **how}
        assert_same(run(ours, three(), **options), run(theirs, three(), **options), 1e-12)


@pytest.mark.parametrize("options", [{"kdim": 4, "vdim": 9}, {"kdim": 5}, {"bias": False}], ids=str)
def test_parity_of_other_sizes(options):
    ours, theirs = pair(torch.float64, **options)
    inputs = three(sizes=[(N, E), (M, ours.kdim), (M, ours.vdim)])
    for need_weights in (False, True):
        masks = {"need_weights": need_weights, **PADDING}
        assert_same(run(ours, inputs, **masks), run(theirs, inputs, **masks), 1e-12)


def test_parity_of_self_attention_in_evaluation():
    """Compare with PyTorch's fused inference kernel, which runs here."""
    ours, theirs = (layer.eval() for layer in pair())
    x = random(B, N, E)
    for name in ("none", "padding", "boolean 2-D", "boolean both"):
        masks = {k: mask[..., :N] for k, mask in MASKS[name].items()}
        for need_weights in (False, True):
            with torch.no_grad():
                left, right = (
                    f(x, x, x, need_weights=need_weights, **masks) for f in (ours, theirs)
                )
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_parity_without_a_batch():
    ours, theirs = pair(torch.float64)
    inputs = [x[0] for x in three()]
    masks = [masks_in(name, torch.float64) for name in ("none", "boolean 2-D", "float 2-D")]
    masks += [{"key_padding_mask": boolean(M)}, {"attn_mask": boolean(H, N, M)}]
    masks.append({"key_padding_mask": boolean(M), "attn_mask": CAUSAL})
    for options in masks:
        for need_weights in (False, True):
            how = {**options, "need_weights": need_weights}
            assert_same(run(ours, inputs, **how), run(theirs, inputs, **how), 1e-12)


def test_parity_of_one_head_and_of_one_token():
    for heads, n, m in [(1, N, M), (E, N, M), (H, 1, 1), (H, 1, M), (H, N, 1)]:
        ours, theirs = pair(torch.float64, heads)
        inputs = three(sizes=[(n, E), (m, E), (m, E)])
        options = {"attn_mask": boolean(n, m), "key_padding_mask": boolean(B, m)}
        assert_same(run(ours, inputs, **options), run(theirs, inputs, **options), 1e-12)


def test_dropout_in_training_is_pytorchs():
    ours, theirs = pair(dropout=0.4)
    for need_weights in (False, True):
        results = []
        for layer in (ours, theirs):
            torch.manual_seed(11)
            inputs = three(torch.float32)
            results.append(run(layer.train(), inputs, need_weights=need_weights))
        assert_same(*results, 1e-5)


# --- the differences from PyTorch that the docstring lists ---------------------------------------


def test_a_fully_masked_row_gives_the_bias_where_pytorch_gives_nan():
    padding = torch.zeros(B, M, dtype=torch.bool)
    padding[1] = True
    for dtype in DTYPES:
        ours, theirs = pair(dtype)
        for need_weights in (False, True):
            options = {"key_padding_mask": padding, "need_weights": need_weights}
            result = run(ours, three(dtype), **options)
            torch.testing.assert_close(result["output"][1], ours.out_proj.bias.expand(N, E))
            if need_weights:
                assert bool((result["weights"][1] == 0).all())
                assert bool(theirs(*three(dtype), **options)[0][1].isnan().all())
            assert all(bool(x.isfinite().all()) for x in result.values() if x is not None)
            assert not result["query"][1].any() and not result["value"][1].any()


def test_nan_at_padding_stays_there_where_pytorch_spreads_it():
    gone, (q, k, v) = boolean(B, M), three()
    ours, theirs = pair(torch.float64)
    for options in ({}, {"attn_mask": CAUSAL}, {"is_causal": True, "attn_mask": CAUSAL}):
        options |= {"key_padding_mask": gone}
        hidden = [x.masked_fill(gone[..., None], math.nan) for x in (k, v)]
        assert_same(run(ours, (q, *hidden), **options), run(ours, (q, k, v), **options), 1e-12)
        assert bool(theirs(q, *hidden, **options)[0].isnan().all())
    one = ours(q[0], *(x[0] for x in hidden), gone[0])[0]
    torch.testing.assert_close(one, ours(q, k, v, gone)[0][0])


def test_is_causal_needs_no_mask_and_where_there_is_one_both_hold():
    ours, theirs = pair(torch.float64)
    other = boolean(N, M)
    for need_weights in (False, True):
        how = {"need_weights": need_weights}
        for also in (how, how | PADDING):
            expected = run(theirs, three(), attn_mask=CAUSAL, **also)
            assert_same(run(ours, three(), is_causal=True, **also), expected, 1e-12)
        both = run(ours, three(), is_causal=True, attn_mask=other, **how)
        assert_same(both, run(theirs, three(), attn_mask=CAUSAL | other, **how), 1e-12)
    with pytest.raises(RuntimeError, match="attn_mask"):
        theirs(*three(), is_causal=True)


def test_boolean_and_float_masks_may_be_mixed():
    ours, theirs = pair(torch.float64)
    padding, bias = boolean(B, M), random(N, M, dtype=torch.float64)
    added = torch.zeros(B, M, dtype=torch.float64).masked_fill(padding, -math.inf)
    mixed = run(ours, three(), attn_mask=bias, key_padding_mask=padding)
    assert_same(mixed, run(theirs, three(), attn_mask=bias, key_padding_mask=added), 1e-12)


# --- shapes, memory, compilers -----------------------------------------------------------------


def test_small_and_empty_inputs():
    ours, _ = pair()
    for b, n, m in [(0, N, M), (B, 0, M), (B, N, 0), (0, 0, 0), (1, 1, 1)]:
        inputs = [random(b, length, E) for length in (n, m, m)]
        masks = {"key_padding_mask": torch.zeros(b, m, dtype=torch.bool)}
        for options in ({}, masks, {**masks, "is_causal": True}):
            for need_weights in (False, True):
                result = run(ours, inputs, need_weights=need_weights, **options)
                assert result["output"].shape == (b, n, E)
                assert not need_weights or result["weights"].shape == (b, n, m)
                assert all(bool(x.isfinite().all()) for x in result.values() if x is not None)
                if m == 0:
                    assert torch.equal(result["output"], ours.out_proj.bias.expand(b, n, E))


def test_no_matrix_is_stored():
    length = 256
    ours, _ = pair()
    inputs = [random(B, length, E)] * 3
    for options in ({"key_padding_mask": boolean(B, length)}, {"is_causal": True}):
        sizes = []
        for need_weights in (False, True):
            with Largest() as largest:
                run(ours, inputs, need_weights=need_weights, **options)
            sizes.append(largest.numel)
        assert sizes[1] >= B * H * length**2, "`Largest` must record the matrix of weights"
        assert sizes[0] < length**2 / 2
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises if no fused kernel is possible
            run(ours, inputs, need_weights=False, **options)


def test_compiles_without_a_break():
    ours, _ = pair()
    for name in ("boolean both", "causal hint"):
        torch._dynamo.reset()
        compiled = torch.compile(ours, fullgraph=True, backend="eager")
        for need_weights in (False, True):
            options, inputs = {**MASKS[name], "need_weights": need_weights}, three(torch.float32)
            torch.testing.assert_close(compiled(*inputs, **options), ours(*inputs, **options))


# --- other mechanisms --------------------------------------------------------------------------


class Tempered(nn.Module):
    """Softmax attention with one learned temperature."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, q, k, v, **options):
        return softmax_attention(q / self.temperature, k, v, **options)


def test_weights_of_softmax_do_not_depend_on_how_they_are_asked_for():
    ours, _ = pair(torch.float64)
    wrapped, _ = pair(torch.float64)
    wrapped.attention = lambda *qkv, **options: softmax_attention(*qkv, **options)
    inputs = three()
    options = {"key_padding_mask": boolean(B, M), "average_attn_weights": False}
    assert_same(run(ours, inputs, **options), run(wrapped, inputs, **options), 1e-12)
    q, k = (ours.project(part, inputs[part], ALL) for part in (QUERY, KEY))
    A = attention_weights(q, k, attn_mask=~options["key_padding_mask"][:, None, None])
    torch.testing.assert_close(ours(*inputs, **options)[1], A, rtol=0, atol=0)


def test_a_mechanism_with_parameters_learns_and_saves_them():
    layer = MultiheadAttention(E, H, attention=Tempered())
    x = random(B, N, E)
    layer(x, x, x, need_weights=False)[0].square().sum().backward()
    assert float(layer.attention.temperature.grad) != 0
    assert "attention.temperature" in layer.state_dict()


# --- heads of another width, heads that share keys and values ------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_shared_keys_are_repeated_keys(groups):
    # `whole` has keys and values for every head, with equal weights within each group.
    heads, width, dtype = 4, 3, torch.float64
    shared = MultiheadAttention(12, heads, kv_heads=groups, dtype=dtype)
    whole = MultiheadAttention(12, heads, dtype=dtype)
    torch.nn.init.normal_(shared.in_proj_bias)

    def repeat(x):
        return x.unflatten(0, (groups, width)).repeat_interleave(heads // groups, 0).flatten(0, 1)

    sizes = (heads * width, groups * width, groups * width)
    with torch.no_grad():
        for own, full in (
            (shared.in_proj_weight, whole.in_proj_weight),
            (shared.in_proj_bias, whole.in_proj_bias),
        ):
            q, k, v = own.split(sizes)
            full.copy_(torch.cat([q, repeat(k), repeat(v)]))
        whole.out_proj.load_state_dict(shared.out_proj.state_dict())
    inputs = random(B, N, 12, dtype=dtype), *(random(B, M, 12, dtype=dtype, seed=s) for s in (2, 3))
    for mask in ("none", "boolean both", "causal hint"):
        for need_weights in (False, True):
            how = {"need_weights": need_weights, **masks_in(mask, dtype)}
            ours, theirs = (layer(*inputs, **how) for layer in (shared, whole))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    grads = run(shared, inputs, need_weights=False)
    assert grads["in_proj_weight"].shape == (sum(sizes), 12)
    assert all(grads[name].abs().max() > 0 for name in ("query", "key", "value"))


def test_shared_keys_are_no_copies_where_the_mechanism_needs_none():
    seen = []

    @functools.wraps(softmax_attention)
    def counted(q, k, v, **options):
        seen.append((k.shape[-3], v.shape[-3]))
        return softmax_attention(q, k, v, **options)

    x, layer = random(B, N, 12), MultiheadAttention(12, 4, kv_heads=2, attention=counted)
    outputs = [layer(x, x, x, need_weights=False)[0]]
    counted.shared = False  # as of a function that cannot share keys
    outputs.append(layer(x, x, x, need_weights=False)[0])
    assert seen == [(2, 2), (4, 4)]
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("width", [1, 5, 8])
def test_the_width_of_a_head_is_free(width):
    layer = MultiheadAttention(E, 2, head_dim=width, dtype=torch.float64)
    assert layer.in_proj_weight.shape == (3 * 2 * width, E)
    assert layer.out_proj.weight.shape == (E, 2 * width)
    x = random(B, N, E, dtype=torch.float64)
    q, k, v = (x @ w.mT for w in layer.in_proj_weight.chunk(3))
    parts = [
        torch.softmax(q[..., cut] @ k[..., cut].mT / math.sqrt(width), -1) @ v[..., cut]
        for cut in (slice(0, width), slice(width, None))
    ]
    expected = torch.cat(parts, -1) @ layer.out_proj.weight.mT
    torch.testing.assert_close(layer(x, x, x)[0], expected, rtol=0, atol=1e-12)


def test_multi_query_layers_with_their_own_feature_sizes():
    layer = MultiheadAttention(E, H, kdim=5, vdim=6, kv_heads=1, head_dim=2)
    assert layer.k_proj_weight.shape == (2, 5) and layer.v_proj_weight.shape == (2, 6)
    out, weights = layer(random(B, N, E), random(B, M, 5), random(B, M, 6))
    assert out.shape == (B, N, E) and weights.shape == (B, N, M)


def two(kind, option, one, other, **rest):
    """Return makers of two layers that differ in an option."""
    make = functools.partial(getattr(derived_attention, kind), 8, 2, **rest)
    return [functools.partial(make, **{option: x}) for x in (one, other)]


linear, window = derived_attention.linear_attention, derived_attention.window_attention
windows = [functools.partial(window, window=w) for w in (2, 3)]
maps = derived_attention.elu_feature_map, derived_attention.flipped_elu_feature_map
cosine = derived_attention.cosine_feature_map
ALIKE = {  # layers with parameters of the same shapes that compute different functions
    "a mechanism": two("MultiheadAttention", "attention", softmax_attention, window),
    "its options": two("MultiheadAttention", "attention", *windows),
    "dropout": two("MultiheadAttention", "dropout", 0.0, 0.3),
    "recentring": two("NormalizedAttention", "center_keys", True, False),
    "a base": two(
        "MultiresolutionAttention", "attention", softmax_attention, linear, scales=[1, 2]
    ),
    "causality": two("Conv1DAttention", "causal", True, False),
    "a grid": two("Conv2DAttention", "grid", (3, 4), (4, 3)),
    "a grid of CvT": two("CvTAttention", "grid", (3, 4), (4, 3)),
    "a class token": two("Conv2DAttention", "class_token", True, False, grid=(3, 4)),
    "a feature map": two("FMMAttention", "feature_maps", *((f,) for f in maps), window=2),
    "variances": two("MixtureAttention", "variances", 2.5, (1.0, 3.0)),
    "options of a mixture": two("MixtureAttention", "mixture", {}, {"normalized": False}),
    "primal features": two(
        "PrimalAttention", "feature_map", torch.tanh, cosine, directions=2, landmarks=4
    ),
}


@pytest.mark.parametrize("what", ALIKE)
def test_layers_that_differ_have_other_texts(what):
    """Check that `repr` distinguishes layers whose parameters have the same names and shapes."""
    one, two, again = (make() for make in (*ALIKE[what], ALIKE[what][0]))
    assert {k: x.shape for k, x in one.state_dict().items()} == {
        k: x.shape for k, x in two.state_dict().items()
    }
    assert repr(one) != repr(two) and repr(one) == repr(again) and " at 0x" not in repr(one)


# --- errors, besides those of `test_contract_layers` ---------------------------------------------

X = torch.zeros(B, N, E)
BAD_LAYERS = [
    (ValueError, "num_heads is 0", {"num_heads": 0}),
    (ValueError, "kdim is 0", {"kdim": 0}),
    (ValueError, "embed_dim is 0", {"embed_dim": 0}),
    (ValueError, "dropout is nan; expected a probability", {"dropout": math.nan}),
    (TypeError, "attention is 'softmax'; expected a function", {"attention": "softmax"}),
    (ValueError, "kv_heads is 0", {"kv_heads": 0}),
    (TypeError, "kv_heads is of type float", {"kv_heads": 1.5}),
    (TypeError, "head_dim is of type str", {"head_dim": "4"}),
    (TypeError, "add_zero_attn", {"add_zero_attn": True}),
]
BAD_MASKS = [
    (TypeError, "attn_mask is of type list", {"attn_mask": [[True]]}),
    (TypeError, "attn_mask has dtype torch.int64", {"attn_mask": torch.ones(N, N).long()}),
    (ValueError, r"attn_mask has shape \(5, 7\); expected", {"attn_mask": torch.ones(N, 7)}),
    (ValueError, r"shape \(2, 5, 5\); expected \(6, 5, 5\)", {"attn_mask": boolean(B, N, N)}),
    (ValueError, "attn_mask is on device meta; expected cpu", {"attn_mask": X[0].to("meta")}),
    (ValueError, "attn_mask contains NaN", {"attn_mask": X[0, :, :N] / 0}),
    (ValueError, r"attn_mask contains \+inf", {"attn_mask": 1 / X[0, :, :N]}),
    (ValueError, r"key_padding_mask contains \+inf", {"key_padding_mask": 1 / X[..., 0]}),
    (ValueError, r"shape \(7,\); expected \(2, 5\)", {"key_padding_mask": boolean(M)}),
]


def test_bad_arguments_are_named():
    assert_named(BAD_LAYERS, MultiheadAttention, embed_dim=E, num_heads=H)
    assert_named(BAD_MASKS, MultiheadAttention(E, H), query=X, key=X, value=X)
    layer = MultiheadAttention(E, H, kdim=4, vdim=9)
    with pytest.raises(ValueError, match=r"value has shape \(2, 5, 12\); expected \(2, 5, 9\)"):
        layer(X, X[..., :4], X)


# --- on a GPU ----------------------------------------------------------------------------------


@cuda
def test_cuda_parity():
    layers, inputs = [layer.cuda() for layer in pair()], [x.cuda() for x in three(torch.float32)]
    for masks in MASKS.values():
        options = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in masks.items()}
        for need_weights in (False, True):
            how = {**options, "need_weights": need_weights}
            assert_same(*(run(layer, inputs, **how) for layer in layers), 1e-4)
