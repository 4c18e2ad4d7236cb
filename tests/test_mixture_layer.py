"""MixtureAttention: the function between projections, EM, shared mixtures, half the heads."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from derived_attention.attention.mixture import (
    em_priors,
    hard_mixture_attention_reference,
    linear_mixture_attention_reference,
    mixture_attention,
    mixture_attention_reference,
    responsibilities,
)
from derived_attention.attention.mixture_layer import MixtureAttention
from derived_attention.models import SeriesClassifier, make_attention

B, E, HEADS, T = 2, 16, 2, 7
LAYERS = {
    "plain": {},
    "one": {"components": 1},
    "three": {"components": 3, "priors": "learned"},
    "shifted": {"shifted": True, "priors": "em"},
    "hard": {"hard": True, "variances": [2.0, 3.0]},
    "variances": {"variances": 2.0, "learn_variances": True, "mixture": {"normalised": True}},
    "linear": {"linear": True, "priors": "learned"},
    "linear, shifted": {"linear": True, "shifted": True},
}


def inputs_for_layer(seed=0):
    x = torch.randn(B, T, E, generator=torch.Generator().manual_seed(seed))
    padding = torch.zeros(B, T).bool()
    padding[1, 5:] = True
    return x, padding


def the_keys(layer, x):
    """What the layer's keys are, projection by projection."""
    weight, bias = layer.in_proj_weight.chunk(3)[1], layer.in_proj_bias.chunk(3)[1]
    first = x @ weight.T + bias
    if layer.shifts is not None:
        split = first.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return torch.stack([split + layer.shifts[:, r, None] for r in range(layer.components)], 2)
    keys = [first]
    for r in range(layer.components - 1):
        keys.append(x @ layer.key_weight[r].T + layer.key_bias[r])
    return torch.stack([key.unflatten(-1, (HEADS, -1)).transpose(1, 2) for key in keys], 2)


@pytest.mark.parametrize("kind", LAYERS)
def test_layer_is_the_function_between_projections(kind):
    torch.manual_seed(0)
    layer = MixtureAttention(E, HEADS, **LAYERS[kind]).eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    x, padding = inputs_for_layer()
    heads = [
        y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for y in torch.nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(
            3, -1
        )
    ]
    own = layer.keywords()
    own.pop("linear", None)
    form = mixture_attention_reference
    if layer.linear or layer.hard:
        hard = hard_mixture_attention_reference
        form = linear_mixture_attention_reference if layer.linear else hard
    mask = {"attn_mask": ~padding[:, None, None]}
    expected = form(heads[0], the_keys(layer, x), heads[2], **own, **mask)
    expected = layer.out_proj(expected.transpose(1, 2).flatten(-2))
    out, weights = layer(x, x, x, key_padding_mask=padding)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert weights.shape == (B, T, T)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, T))
    assert bool((weights[1, :, 5:] == 0).all())
    fast, nothing = layer(x, x, x, key_padding_mask=padding, need_weights=False)
    assert nothing is None
    torch.testing.assert_close(fast, out, rtol=1e-4, atol=1e-5)
    single = layer(x[0], x[0], x[0], need_weights=False)[0]
    torch.testing.assert_close(single, out[0], rtol=1e-4, atol=1e-5)


def test_layer_parameters():
    """Option B has half the key parameters less; priors are per head, nothing per position."""
    count = {kind: sum(p.numel() for p in MixtureAttention(E, HEADS, **LAYERS[kind]).parameters())
             for kind in LAYERS}  # fmt: skip
    base = 4 * (E * E + E)
    assert count["one"] == base
    assert count["plain"] == base + E * E + E
    assert count["three"] == base + 2 * (E * E + E) + HEADS * 3
    assert count["shifted"] == base + 2 * E
    assert count["variances"] == base + E * E + E + HEADS * 2
    without = MixtureAttention(E, HEADS, bias=False, kdim=5, vdim=6, components=3)
    assert without.key_weight.shape == (2, E, 5) and without.key_bias is None
    x, key, value = torch.randn(B, T, E), torch.randn(B, 4, 5), torch.randn(B, 4, 6)
    assert without(x, key, value)[0].shape == (B, T, E)


@pytest.mark.parametrize("kind", LAYERS)
def test_layer_causal_and_gradients(kind):
    torch.manual_seed(0)
    layer = MixtureAttention(E, HEADS, **LAYERS[kind])
    x, _ = inputs_for_layer()
    out = layer(x, x, x, need_weights=False, is_causal=True)[0]
    out.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())
    layer.eval()
    later = x.clone()
    later[:, 4:] *= -3
    left, right = (layer(y, y, y, need_weights=False, is_causal=True)[0] for y in (x, later))
    torch.testing.assert_close(left[:, :4], right[:, :4])
    assert not torch.allclose(left[:, 4:], right[:, 4:], atol=1e-2)


def test_em_in_the_layer_takes_a_step_in_training_only():
    torch.manual_seed(0)
    layer = MixtureAttention(E, HEADS, components=3, priors="em")
    x, padding = inputs_for_layer()
    layer.eval()
    layer(x, x, x)
    assert bool((layer.priors == 1 / 3).all()) and "priors" in layer.state_dict()
    layer.train()
    q, k, _ = layer._heads(x, x, x)
    here = (~padding)[:, None].expand(B, HEADS, T)
    expected = em_priors(q, k, attn_mask=~padding[:, None, None], query_mask=here)
    layer(x, x, x, key_padding_mask=padding, need_weights=False)
    torch.testing.assert_close(layer.priors, expected)
    assert not torch.allclose(expected, torch.full_like(expected, 1 / 3), atol=1e-4)
    garbage = x.masked_fill(padding[..., None], 50.0)
    other = copy.deepcopy(layer)
    other.priors.fill_(1 / 3)
    other(garbage, garbage, garbage, key_padding_mask=padding)
    torch.testing.assert_close(other.priors, layer.priors)


def test_copies_are_apart_and_state_travels():
    layer = MixtureAttention(E, HEADS, priors="em", shifted=True)
    twin = copy.deepcopy(layer)
    x, _ = inputs_for_layer()
    layer(x, x, x)
    assert not torch.equal(layer.priors, twin.priors)
    twin.load_state_dict(layer.state_dict())
    layer.eval(), twin.eval()
    assert torch.equal(layer(x, x, x)[0], twin(x, x, x)[0])
    with torch.no_grad():
        twin.in_proj_weight.zero_()
    assert not torch.equal(layer(x, x, x)[0], twin(x, x, x)[0])


@pytest.mark.parametrize("kind", ["plain", "shifted", "hard", "linear"])
def test_trains_inside_the_classifier(kind):
    torch.manual_seed(0)
    attention = functools.partial(MixtureAttention, **LAYERS[kind])
    assert isinstance(make_attention(attention, E, HEADS), MixtureAttention)
    model = SeriesClassifier(3, 2, 10, dim=E, heads=HEADS, layers=1, hidden=16, attention=attention)
    x, padding = torch.randn(4, 10, 3), torch.zeros(4, 10).bool()
    padding[0, 7:] = True
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    target, losses = torch.tensor([0, 1, 0, 1]), []
    for _ in range(15):
        loss = nn.functional.cross_entropy(model(x, padding), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    maps = model.attention_maps(x, padding)[0]
    assert maps.shape == (4, HEADS, 10, 10) and bool((maps[0, :, :, 7:] == 0).all())


def test_layer_under_autocast():
    layer = MixtureAttention(E, HEADS, shifted=True, priors="learned")
    x, padding = inputs_for_layer()
    exact = layer(x, x, x, key_padding_mask=padding)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    assert out.dtype == torch.bfloat16
    assert (out - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "components is 0", {"components": 0}),
        (TypeError, "components is of type float", {"components": 2.0}),
        (ValueError, "priors is 'uniform'", {"priors": "uniform"}),
        (ValueError, "linear is True with hard=True", {"linear": True, "hard": True}),
        (ValueError, "linear is True", {"linear": True, "priors": "em"}),
        (ValueError, "variances is", {"variances": [1.0, 2.0, 3.0]}),
        (ValueError, "variances is -1", {"variances": -1.0}),
        (ValueError, "embed_dim is 16 and num_heads 5", {"num_heads": 5}),
    ],
)
def test_bad_construction_is_named(error, match, options):
    with pytest.raises(error, match=match):
        MixtureAttention(**{"embed_dim": E, "num_heads": HEADS, **options})


# --- shared mixtures, heads of another width ---------------------------------------------------

SHARED, WIDTH, D = 4, 12, 3  # heads, features of a token and of a head
KINDS = {
    "plain": {},
    "shifted": {"shifted": True},
    "hard": {"hard": True},
    "hard, shifted": {"hard": True, "shifted": True},
    "linear": {"linear": True},
    "linear, shifted": {"linear": True, "shifted": True},
    "three, learned": {"components": 3, "priors": "learned"},
    "em": {"priors": "em", "shifted": True},
    "variances": {"variances": [1.0, 2.0], "learn_variances": True},
}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def noisy(layer):
    torch.manual_seed(1)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return layer.eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [1, 2])
def test_shared_mixtures_are_repeated_mixtures(kind, groups):
    shared = noisy(
        MixtureAttention(WIDTH, SHARED, kv_heads=groups, dtype=torch.float64, **KINDS[kind])
    )
    whole = MixtureAttention(WIDTH, SHARED, dtype=torch.float64, **KINDS[kind]).eval()
    copies = SHARED // groups

    def repeat(x, rows):
        return (
            x.unflatten(rows, (groups, D)).repeat_interleave(copies, rows).flatten(rows, rows + 1)
        )

    sizes = (SHARED * D, groups * D, groups * D)
    theirs = {}
    for name, x in shared.state_dict().items():
        if name.startswith("in_proj"):
            q, k, v = x.split(sizes)
            x = torch.cat([q, repeat(k, 0), repeat(v, 0)])
        elif name in ("key_weight", "key_bias"):
            x = repeat(x, 1)
        elif name == "shifts":
            x = x.repeat_interleave(copies, 0)
        theirs[name] = x
    whole.load_state_dict(theirs)
    x, memory = random(B, T, WIDTH), random(B, T + 2, WIDTH, seed=1)
    padding = torch.zeros(B, T + 2).bool()
    padding[1, 5:] = True
    for need_weights in (False, True):
        how = {"key_padding_mask": padding, "need_weights": need_weights}
        ours, expected = (layer(x, memory, memory, **how) for layer in (shared, whole))
        torch.testing.assert_close(ours[0], expected[0], rtol=0, atol=1e-10)
        if need_weights:
            torch.testing.assert_close(ours[1], expected[1], rtol=0, atol=1e-10)
    causal = (layer(x, x, x, need_weights=False, is_causal=True)[0] for layer in (shared, whole))
    torch.testing.assert_close(*causal, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_half_the_heads_at_the_same_width(kind):
    layer = noisy(MixtureAttention(WIDTH, 2, head_dim=D, dtype=torch.float64, **KINDS[kind]))
    assert layer.out_proj.weight.shape == (WIDTH, 2 * D)
    x = random(B, T, WIDTH).requires_grad_()
    out = layer(x, x, x, need_weights=False)[0]
    assert out.shape == (B, T, WIDTH)
    out.square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())
    q, k, v = layer.heads(x, x, x)
    R = layer.components
    assert q.shape == v.shape == (B, 2, T, D) and k.shape == (B, 2, R, T, D)
    if not layer.linear:
        h = mixture_attention(q, k, v, hard=layer.hard, **layer.keywords())
        expected = layer.out_proj(h.transpose(1, 2).flatten(-2))
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
        gamma = responsibilities(q, k, **layer.keywords())
        assert gamma.shape == (B, 2, R, T, T)


def test_the_variance_is_the_root_of_the_width_of_a_head():
    assert MixtureAttention(WIDTH, 2, head_dim=16).keywords()["variances"] == 4.0


def test_parameters_are_those_of_the_paper():
    # App. B of [Nguyen2022]: H/2 heads of D features with two keys, without biases, and priors.
    H, width = 8, 4
    dim = H * width
    layer = MixtureAttention(dim, H // 2, head_dim=width, bias=False, priors="learned")
    count = sum(p.numel() for p in layer.parameters())
    assert count == 2 * H * width * dim + (H * width) ** 2 // 2 + H


def test_a_shared_mixture_has_one_set_of_shifts():
    layer = MixtureAttention(WIDTH, SHARED, kv_heads=1, shifted=True, components=3)
    assert layer.shifts.shape == (1, 3, D)
    assert "kv_heads=1" in repr(layer) and "components=3" in repr(layer)


def test_em_of_a_shared_mixture_gives_each_head_its_priors():
    layer = MixtureAttention(WIDTH, SHARED, kv_heads=1, priors="em", dtype=torch.float64)
    x = random(B, T, WIDTH)
    layer.train()(x, x, x, need_weights=False)
    assert layer.priors.shape == (SHARED, 2)
    torch.testing.assert_close(layer.priors.sum(-1), torch.ones(SHARED).double())
    assert len(layer.priors[:, 0].unique()) == SHARED


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="kv_heads is 3; expected a divisor of num_heads 4"):
        MixtureAttention(WIDTH, SHARED, kv_heads=3)
    with pytest.raises(ValueError, match="query"):
        layer = MixtureAttention(WIDTH, SHARED)
        layer.heads(*(torch.zeros(B, T, WIDTH + extra) for extra in (1, 0, 0)))
