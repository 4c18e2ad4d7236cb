"""Tests of Linformer, Performer, FMM and Luna: comparison with other code, special properties."""

from __future__ import annotations

import contextlib
import functools
import io
import math

import pytest
import torch
from cases import assert_forms_agree
from helpers import (
    B,
    D,
    H,
    M,
    N,
    assert_all_close,
    assert_learns,
    boolean,
    output_and_gradients,
    qkv,
    relative_errors,
    tensors,
)
from torch import nn

from derived_attention import performer_attention_reference
from derived_attention.common.convention import weights_of
from derived_attention.common.masks import causal_mask
from derived_attention.layer import ALL, KEY, QUERY, VALUE
from derived_attention.linear.core import elu_feature_map, linear_attention_weights
from derived_attention.linear_time import core
from derived_attention.linear_time.core import (
    flipped_elu_feature_map,
    fmm_attention,
    linformer_attention,
    luna_attention,
    orthogonal_features,
    performer_attention,
)
from derived_attention.linear_time.layer import (
    FMMAttention,
    LinformerAttention,
    LunaAttention,
    PerformerAttention,
)
from derived_attention.registry import MECHANISMS
from derived_attention.softmax.core import attention_weights, softmax_attention
from derived_attention.sparse.core import window_mask

E, LENGTH = 12, 21
x_of = functools.partial(torch.randn, dtype=torch.float64)
draw = functools.partial(orthogonal_features, dtype=torch.float64)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make_layer(name, heads=H, **own):
    torch.manual_seed(0)
    return MECHANISMS[name].make_layer(E, heads, LENGTH, dtype=torch.float64, **own)


# --- other people's code -------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_linformer_is_that_of_its_package(shared):
    from linformer import LinformerSelfAttention

    theirs = LinformerSelfAttention(E, LENGTH, k=5, heads=H, share_kv=shared).double()
    ours = LinformerAttention(
        E, H, bias=False, length=LENGTH, kept=5, shared=shared, dtype=torch.float64
    )
    with torch.no_grad():
        values = theirs.to_k if shared else theirs.to_v
        weights = [theirs.to_q.weight, theirs.to_k.weight, values.weight]
        ours.in_proj_weight.copy_(torch.cat(weights))
        ours.out_proj.weight.copy_(theirs.to_out.weight)
        theirs.to_out.bias.zero_()
        ours.key_projection.copy_(theirs.proj_k.mT)
        if not shared:
            ours.value_projection.copy_(theirs.proj_v.mT)
    for n in (LENGTH, 8):  # the shorter one uses the first columns of E and F
        x = x_of(B, n, E, generator=seeded())
        out = ours(x, x, x, need_weights=False)[0]
        torch.testing.assert_close(out, theirs(x))


@pytest.mark.parametrize("causal", [False, True])
def test_performer_is_that_of_its_package(causal):
    """Compare with eps = 0, because the formula adds no eps to features and sums."""
    with contextlib.redirect_stdout(io.StringIO()):  # its import prints that there is no CUDA
        from performer_pytorch import performer_pytorch as package
    q, k, v = (x.detach() for x in qkv(n=150, m=150))
    W = draw(D, 3 * D, seeded())
    kernel = functools.partial(package.softmax_kernel, projection_matrix=W, eps=0)
    phi_q, phi_k = kernel(q, is_query=True), kernel(k, is_query=False)
    causal_form = functools.partial(package.causal_linear_attention_noncuda, eps=0)
    theirs = (causal_form if causal else package.linear_attention)(phi_q, phi_k, v)
    ours = performer_attention(q, k, v, projection=W, is_causal=causal)
    torch.testing.assert_close(ours, theirs)


# --- Linformer -----------------------------------------------------------------------------------


def test_linformer_that_keeps_all_keys_is_softmax_attention():
    q, k, v = qkv()
    order = torch.randperm(M, generator=seeded())
    swap = torch.eye(M, dtype=torch.float64)[order]
    out = linformer_attention(q, k, v, key_projection=swap)
    torch.testing.assert_close(out, softmax_attention(q, k, v))
    other = linformer_attention(q, k, v, key_projection=swap, value_projection=swap.flip(0))
    assert not torch.allclose(out, other)


def test_linformer_shares_out_a_floating_mask():
    """Check also that a constant added to all of the mask changes nothing and cannot overflow."""
    q, k, v = qkv()
    own = {"key_projection": x_of(3, M, generator=seeded())}
    bias = torch.linspace(-3, 0, M, dtype=torch.float64)
    scaled = (x * bias.exp()[:, None] for x in (k, v))
    out = linformer_attention(q, k, v, attn_mask=bias, **own)
    torch.testing.assert_close(out, linformer_attention(q, *scaled, **own))
    torch.testing.assert_close(linformer_attention(q, k, v, attn_mask=bias + 1e4, **own), out)


# --- Performer -----------------------------------------------------------------------------------

BLOCKS = 20_000


def test_orthogonal_features_are_orthogonal_and_each_is_standard_normal():
    W = draw(D, BLOCKS * D, seeded()).view(BLOCKS, D, D)
    gram = W @ W.mT
    assert_all_close([gram], [torch.diag_embed(gram.diagonal(dim1=1, dim2=2))], 1e-10)
    cut = draw(D, 2 * D + 3, seeded())
    assert cut.shape == (2 * D + 3, D) and bool((cut[2 * D :] @ cut[2 * D :].mT)[0, 1].abs() < 1e-9)
    noise = 5 / math.sqrt(BLOCKS)  # five standard errors
    assert W.mean(0).abs().max() < noise, "the mean is not 0: LAPACK's rotations have fixed signs"
    assert (W.square().mean(0) - 1).abs().max() < noise * math.sqrt(2)
    lengths = W.square().sum(-1)  # χ² with D degrees of freedom
    assert abs(lengths.mean() - D) < noise and abs(lengths.var() - 2 * D) < 0.1 * D
    assert torch.equal(draw(D, 5, seeded(3)), draw(D, 5, seeded(3)))


def positive_features(x, W):
    """φ(x)_r = exp(w_r·x − ‖x‖²/2)/√R, as in [Choromanski2021]."""
    return (x @ W.mT - x.square().sum(-1, keepdim=True) / 2).exp() / len(W) ** 0.5


def test_features_estimate_the_exponential_better_if_orthogonal():
    q, k = 0.15 * x_of(2, D, generator=seeded())
    exact, variances = math.exp(q @ k), []
    for W in (draw(D, BLOCKS * D, seeded(1)), x_of(BLOCKS * D, D, generator=seeded(1))):
        products = positive_features(q, W) * positive_features(k, W) * BLOCKS
        estimates = products.view(BLOCKS, D).sum(-1)  # each from D features
        error = float(estimates.std()) / math.sqrt(BLOCKS)
        assert abs(float(estimates.mean()) - exact) < 4 * error < 0.1 * exact
        variances.append(float(estimates.var()))
    assert variances[0] < 0.9 * variances[1]


@pytest.mark.parametrize("causal", [False, True])
def test_performer_is_the_average_by_those_features(causal):
    q, k, v = qkv()
    W, scale = draw(D, 20, seeded()), 0.7 if causal else None
    root = math.sqrt(scale or 1 / math.sqrt(D))
    kernel = positive_features(root * q, W) @ positive_features(root * k, W).mT
    kernel = kernel * causal_mask(N, M) if causal else kernel
    expected = kernel / kernel.sum(-1, keepdim=True) @ v
    for form in (performer_attention, performer_attention_reference):
        out = form(q, k, v, projection=W, scale=scale, is_causal=causal)
        torch.testing.assert_close(out, expected)


def test_performer_nears_softmax_attention_as_features_grow_in_number():
    q, k, v = (x.detach() for x in qkv(n=40, m=40))
    q, k = q / 4, k / 4
    exact, errors = softmax_attention(q, k, v), []
    for count in (D, 16 * D, 256 * D):
        out = performer_attention(q, k, v, projection=draw(D, count, seeded()))
        errors.append(float((out - exact).norm() / exact.norm()))
    assert errors[0] > 2 * errors[1] > 4 * errors[2] and errors[2] < 0.01


def test_performer_by_segments_scales_its_sums(monkeypatch):
    """Test the largest key first, last or masked, and segments that are masked."""
    monkeypatch.setattr(core, "SEGMENT", 4)
    m = 23
    ends = torch.arange(m) > 9
    for mask in (None, ends, ~ends, boolean(m), torch.linspace(-9, 9, m), torch.tensor(True)):
        assert_forms_agree("performer", f"mask {mask}", attn_mask=mask)
    for sizes in (torch.linspace(0.1, 9, m), torch.linspace(9, 0.1, m)):
        q, k, v = qkv(n=9, m=m)
        inputs = [q, (k.detach() * sizes[:, None]).requires_grad_(), v]
        forms = performer_attention, performer_attention_reference
        results = [output_and_gradients(f, inputs, projection=draw(D, 9, seeded())) for f in forms]
        assert_all_close(*results, 1e-10, "sizes")


def test_performer_never_loses_a_row_to_underflow():
    """Test features of queries and keys whose products are as small as e⁻¹⁰⁰⁰."""
    q, k, v = (x.detach().float() for x in qkv(n=40, m=40))
    W = draw(D, 4 * D, seeded()).float()
    A = weights_of(performer_attention, 300 * q, 300 * k, projection=W)
    torch.testing.assert_close(A.sum(-1), torch.ones(B, H, 40))
    exact = weights_of(
        performer_attention_reference, 300 * q.double(), 300 * k.double(), projection=W.double()
    )
    torch.testing.assert_close(A.double(), exact, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("compiled", [False, True])
def test_causal_performer_takes_keys_of_any_length(compiled):
    """Test features that grow by e⁴⁴ and more, within chunks and between them."""
    form = performer_attention
    if compiled:  # compiled code cannot branch on values
        torch._dynamo.reset()
        form = torch.compile(form, backend="aot_eager", dynamic=False)
    n = 70 if compiled else 300
    for d in (16,) if compiled else (16, 512):
        q, k, v = (x.detach() for x in qkv((H,), n=n, m=n, d=d))
        W, size = draw(d, 32, seeded()), torch.linspace(0.1, 12, n, dtype=torch.float64)
        slow = d**0.25 * size[:, None] * nn.functional.normalize(k, dim=-1)
        toward = d**0.25 * W.repeat(10, 1)[:n].expand(H, -1, -1)
        for keys in (slow, slow.flip(-2), toward, 8 * k, 30 * k):
            own = {"is_causal": True, "projection": W}
            given = [x.clone().requires_grad_() for x in (q, keys, v)]
            exact = output_and_gradients(performer_attention_reference, given, **own)
            given = [x.float().requires_grad_() for x in (q, keys, v)]
            ours = output_and_gradients(form, given, **own | {"projection": W.float()})
            for x, y in zip(ours, exact, strict=True):  # if one key has all weight, dq is 0
                assert (x.double() - y).norm() < 2e-3 * y.norm() + 1e-3, (
                    d,
                    relative_errors(ours, exact),
                )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_sums_of_performer_do_not_drift(causal, dtype):
    q, k, v = (x.detach() for x in qkv((), n=2000, m=2000, d=16, dv=4, dtype=dtype))
    W = draw(16, 64, seeded()).to(dtype)
    out = performer_attention(q, k, v + 1, projection=W, is_causal=causal).double()
    wide = (x.double() for x in (q, k, v + 1))
    exact = performer_attention(*wide, projection=W.double(), is_causal=causal)
    assert (out - exact).norm() / exact.norm() < torch.finfo(dtype).eps


def test_performer_has_its_features_in_its_state():
    x = x_of(B, LENGTH, E, generator=seeded())
    layer, other = make_layer("performer"), make_layer("performer")
    state = layer.state_dict()
    other.load_state_dict(state | {"projection": draw(E // H, layer.features, seeded(7))})
    assert not torch.allclose(layer(x, x, x)[0], other(x, x, x)[0])
    assert PerformerAttention(128, 2).features == round(64 * math.log(64))
    assert PerformerAttention(3, 3).features == 1


# --- FMM -----------------------------------------------------------------------------------------


def test_fmm_is_a_band_and_matrices_of_low_rank():
    q, k, v = qkv((B, H), n=19, m=19)
    near, far = (x.detach() for x in tensors((H,), (H,)))
    maps = elu_feature_map, flipped_elu_feature_map, torch.exp
    for causal in (False, True):
        band = attention_weights(q, k, attn_mask=window_mask(19, 19, 3, is_causal=causal))
        mask = causal_mask(19, 19) if causal else None
        low = [linear_attention_weights(q, k, mask, feature_map=m) for m in maps]
        A = near[:, None, None] * band + far[:, None, None] * sum(low)
        own = {"window": 3, "near": near, "far": far, "feature_maps": maps, "is_causal": causal}
        torch.testing.assert_close(fmm_attention(q, k, v, **own), A @ v)
        torch.testing.assert_close(weights_of(fmm_attention, q, k, **own), A)


def test_fmm_layer_learns_its_blend_and_its_maps():
    phi = nn.Sequential(nn.Linear(E // H, 5), nn.Softplus())
    layer = FMMAttention(E, H, window=2, feature_maps=(elu_feature_map, phi)).double()
    x = x_of(B, LENGTH, E, generator=seeded())
    A = layer(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(A.sum(-1), torch.full((B, H, LENGTH), 1.5, dtype=A.dtype))
    with torch.no_grad():
        layer.near.copy_(torch.tensor([-50.0, 0.0, 50.0]))
        layer.far.fill_(-50.0)
    A = layer(x, x, x, average_attn_weights=False)[1]
    expected = torch.tensor([0.0, 0.5, 1.0], dtype=A.dtype)[:, None].expand(B, H, LENGTH)
    torch.testing.assert_close(A.sum(-1), expected)
    layer = FMMAttention(E, H, window=2, feature_maps=(m for m in (elu_feature_map, phi))).double()
    assert_learns(layer, x, "fmm")
    before = layer(x, x, x)[0]
    layer.learned_maps[0] = nn.Sequential(nn.Linear(E // H, 5), nn.Softplus()).double()
    assert not torch.allclose(layer(x, x, x)[0], before)  # the layer runs the new map


# --- Luna ----------------------------------------------------------------------------------------


def test_luna_is_two_softmax_attentions():
    q, k, v = qkv()
    for P in (x_of(4, D, generator=seeded()), x_of(H, 4, D, generator=seeded())):
        for mask in (None, boolean(B, 1, 1, M), torch.linspace(-3, 3, M)):
            rows = P.expand(B, H, 4, D)
            K, V = (softmax_attention(rows, k, x, attn_mask=mask) for x in (k, v))
            out = luna_attention(q, k, v, packed=P, attn_mask=mask)
            torch.testing.assert_close(out, softmax_attention(q, K, V))


def test_luna_packs_keys_or_tokens():
    """Compare with the paper, which projects packed tokens: rows of A' sum to 1, so both agree."""
    layer = make_layer("luna")
    with torch.no_grad():
        layer.in_proj_bias.normal_(generator=seeded())
    x = x_of(B, LENGTH, E, generator=seeded())
    P = layer.project(QUERY, layer.packed, ALL).expand(B, -1, -1, -1)
    k = layer.project(KEY, x, ALL)
    tokens = x[:, None].expand(B, H, LENGTH, E)
    Y = softmax_attention(P, k, tokens)  # (B, H, l, embed_dim)
    own = [layer.project(part, Y[:, h], [h]) for part in (KEY, VALUE) for h in range(H)]
    K, V = torch.cat(own[:H], 1), torch.cat(own[H:], 1)
    heads = softmax_attention(layer.project(QUERY, x, ALL), K, V)
    expected = layer.out_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], expected)


# --- errors ---------------------------------------------------------------------------------------

W, P, ROWS = (torch.zeros(4, n) for n in (D, D, M))
ONE = torch.tensor(0.5)
NEAR = {"window": 2, "near": ONE, "far": ONE}
BAD = [
    (linformer_attention, {"key_projection": ROWS[:, :-1]}, r"\(4, 6\); expected \(kept, n\) .* 7"),
    (linformer_attention, {"key_projection": ROWS[0]}, r"key_projection has shape \(7,\)"),
    (linformer_attention, {"key_projection": ROWS[:0]}, r"key_projection has shape \(0, 7\)"),
    (linformer_attention, {"key_projection": ROWS, "value_projection": ROWS[:2]},
     r"value_projection has shape \(2, 7\)"),
    (performer_attention, {"projection": W[:, :-1]}, r"projection has shape \(4, 7\)"),
    (fmm_attention, NEAR | {"window": -1}, "window is -1"),
    (fmm_attention, NEAR | {"feature_maps": ()}, "feature_maps is empty"),
    (fmm_attention, NEAR | {"far": torch.zeros(2)}, r"far has shape \(2,\)"),
    (luna_attention, {"packed": P[:, :-1]}, r"packed has shape \(4, 7\)"),
    (luna_attention, {"packed": P[:0]}, r"packed has shape \(0, 8\)"),
    (luna_attention, {"packed": P.expand(2, 4, D)}, r"packed has shape \(2, 4, 8\)"),
]  # fmt: skip
WRONG = [
    (linformer_attention, {"key_projection": None}, "key_projection is of type NoneType"),
    (performer_attention, {"projection": W.long()}, "projection is of dtype torch.int64"),
    (fmm_attention, NEAR | {"near": 0.5}, "near is of type float"),
    (fmm_attention, NEAR | {"feature_maps": ("elu",)}, r"feature_maps\[0\] is 'elu'"),
    (fmm_attention, NEAR | {"feature_maps": "elu"}, "feature_maps is 'elu'; expected a sequence"),
    (luna_attention, {"packed": [0.0]}, "packed is of type list"),
]


def test_bad_parameters_are_named():
    q, k, v = qkv(dtype=torch.float32)
    for bad, error in ((BAD, ValueError), (WRONG, TypeError)):
        for form, own, match in bad:
            with pytest.raises(error, match=match):
                form(q, k, v, **own)
    for make, match in {
        lambda: LinformerAttention(E, H, length=0, kept=2): "length is 0",
        lambda: LinformerAttention(E, H, length=9, kept=0): "kept is 0",
        lambda: PerformerAttention(E, H, features=0): "features is 0",
        lambda: FMMAttention(E, H, window=-1): "window is -1",
        lambda: LunaAttention(E, H, length=0): "length is 0",
        lambda: orthogonal_features(0, 4): "D is 0",
        lambda: orthogonal_features(4, 0): "count is 0",
    }.items():
        with pytest.raises(ValueError, match=match):
            make()
    x = torch.zeros(1, 10, E)
    with pytest.raises(ValueError, match=r"expected \(kept, n\) with n at least 10"):
        LinformerAttention(E, H, length=9, kept=2)(x, x, x)
