"""MixtureAttention: heads of another width, heads that share their mixtures."""

from __future__ import annotations

import pytest
import torch

from derived_attention.attention.mixture import mixture_attention, responsibilities
from derived_attention.attention.mixture_layer import MixtureAttention

B, T, E, HEADS, D = 2, 6, 12, 4, 3
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
    shared = noisy(MixtureAttention(E, HEADS, kv_heads=groups, dtype=torch.float64, **KINDS[kind]))
    whole = MixtureAttention(E, HEADS, dtype=torch.float64, **KINDS[kind]).eval()
    copies = HEADS // groups

    def repeat(x, rows):
        return (
            x.unflatten(rows, (groups, D)).repeat_interleave(copies, rows).flatten(rows, rows + 1)
        )

    sizes = (HEADS * D, groups * D, groups * D)
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
    x, memory = random(B, T, E), random(B, T + 2, E, seed=1)
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
    layer = noisy(MixtureAttention(E, 2, head_dim=D, dtype=torch.float64, **KINDS[kind]))
    assert layer.out_proj.weight.shape == (E, 2 * D)
    x = random(B, T, E).requires_grad_()
    out = layer(x, x, x, need_weights=False)[0]
    assert out.shape == (B, T, E)
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
    assert MixtureAttention(E, 2, head_dim=16).keywords()["variances"] == 4.0


def test_parameters_are_those_of_the_paper():
    # App. B of [Nguyen2022]: H/2 heads of D features with two keys, without biases, and priors.
    H, width = 8, 4
    dim = H * width
    layer = MixtureAttention(dim, H // 2, head_dim=width, bias=False, priors="learned")
    count = sum(p.numel() for p in layer.parameters())
    assert count == 2 * H * width * dim + (H * width) ** 2 // 2 + H


def test_a_shared_mixture_has_one_set_of_shifts():
    layer = MixtureAttention(E, HEADS, kv_heads=1, shifted=True, components=3)
    assert layer.shifts.shape == (1, 3, D)
    assert "kv_heads=1" in repr(layer) and "components=3" in repr(layer)


def test_em_of_a_shared_mixture_gives_each_head_its_priors():
    layer = MixtureAttention(E, HEADS, kv_heads=1, priors="em", dtype=torch.float64)
    x = random(B, T, E)
    layer.train()(x, x, x, need_weights=False)
    assert layer.priors.shape == (HEADS, 2)
    torch.testing.assert_close(layer.priors.sum(-1), torch.ones(HEADS).double())
    assert len(layer.priors[:, 0].unique()) == HEADS


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="kv_heads is 3; expected a divisor of num_heads 4"):
        MixtureAttention(E, HEADS, kv_heads=3)
    with pytest.raises(ValueError, match="query"):
        layer = MixtureAttention(E, HEADS)
        layer.heads(torch.zeros(B, T, E + 1), torch.zeros(B, T, E), torch.zeros(B, T, E))
