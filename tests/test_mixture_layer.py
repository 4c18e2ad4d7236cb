"""MixtureAttention: the function between projections, EM, shared mixtures, half the heads.

The properties of every layer are tested in `test_contract_layers`.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import assert_learns, assert_named, disturbed
from torch.utils.checkpoint import checkpoint

from derived_attention import (
    hard_mixture_attention_reference,
    linear_mixture_attention_reference,
    mixture_attention_reference,
)
from derived_attention.mixture.core import em_priors, mixture_attention
from derived_attention.mixture.layer import MixtureAttention

B, E, HEADS, T = 2, 16, 2, 7
LAYERS = {
    "plain": {},
    "one": {"components": 1},
    "three": {"components": 3, "priors": "learned"},
    "shifted": {"shifted": True, "priors": "em"},
    "hard": {"hard": True, "variances": [2.0, 3.0]},
    "variances": {"variances": 2.0, "mixture": {"normalized": False}},
    "linear": {"linear": True, "priors": "learned"},
    "linear, shifted": {"linear": True, "shifted": True},
    "no bias": {"bias": False},
}


def inputs_for_layer(seed=0):
    x = torch.randn(B, T, E, generator=torch.Generator().manual_seed(seed))
    padding = torch.zeros(B, T).bool()
    padding[1, 5:] = True
    return x, padding


def split(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def biases_of(layer):
    zeros = torch.zeros(3 * E), torch.zeros(layer.components - 1, E)
    return zeros if layer.in_proj_bias is None else (layer.in_proj_bias, layer.key_bias)


def the_keys(layer, x):
    """Return the layer's keys (B, H, R, T, D), projection by projection."""
    bias, others = biases_of(layer)
    first = split(x @ layer.in_proj_weight[E : 2 * E].T + bias[E : 2 * E])
    if layer.shifts is not None:
        return torch.stack([first + layer.shifts[:, r, None] for r in range(layer.components)], 2)
    more = range(layer.components - 1)
    return torch.stack([first, *(split(x @ layer.key_weight[r].T + others[r]) for r in more)], 2)


def noisy(layer, amount=0.3):
    torch.manual_seed(1)
    return disturbed(layer, amount).eval()


@pytest.mark.parametrize("kind", LAYERS)
def test_layer_is_the_function_between_projections(kind):
    layer = noisy(MixtureAttention(E, HEADS, **LAYERS[kind]), 0.1)
    x, padding = inputs_for_layer()
    bias, _ = biases_of(layer)
    q, _, v = map(split, torch.nn.functional.linear(x, layer.in_proj_weight, bias).chunk(3, -1))
    form = mixture_attention_reference
    if layer.linear or layer.hard:
        hard = hard_mixture_attention_reference
        form = linear_mixture_attention_reference if layer.linear else hard
    mask = {"attn_mask": ~padding[:, None, None]}
    h = form(q, the_keys(layer, x), v, **layer.keywords(), **mask)
    expected = layer.out_proj(h.transpose(1, 2).flatten(-2))
    for need_weights in (False, True):
        out = layer(x, x, x, padding, need_weights)[0]
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_every_parameter_learns():
    x, padding = inputs_for_layer()
    for kind in ("three", "shifted", "hard", "variances", "linear"):
        torch.manual_seed(0)
        assert_learns(MixtureAttention(E, HEADS, **LAYERS[kind]), x, kind, key_padding_mask=padding)


def test_em_in_the_layer_takes_a_step_in_training_only():
    torch.manual_seed(0)
    layer = MixtureAttention(E, HEADS, components=3, priors="em")
    x, padding = inputs_for_layer()
    layer.eval()
    layer(x, x, x)
    assert bool((layer.priors == 1 / 3).all()) and "priors" in layer.state_dict()
    layer.train()
    q, k, _ = layer.heads(x, x, x)
    torch.testing.assert_close(k, the_keys(layer, x))
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


@pytest.mark.parametrize("reentrant", [False, True])
def test_em_refuses_activation_checkpointing(reentrant):
    """Each forward pass updates the priors, so the repeated one would use other priors."""
    layer = MixtureAttention(E, HEADS, priors="em")
    x = inputs_for_layer()[0].requires_grad_()
    out = checkpoint(lambda x: layer(x, x, x)[0], x, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="priors is 'em' under activation checkpointing; expect"):
        out.sum().backward()
    layer.eval()  # evaluation leaves the priors unchanged
    checkpoint(lambda x: layer(x, x, x)[0], x, use_reentrant=reentrant).sum().backward()


def test_em_of_cross_attention_counts_all_queries_that_are_not_padding():
    """Neither padded keys nor causality excludes a query from the EM step."""
    x, padding = inputs_for_layer()
    memory = inputs_for_layer(1)[0]
    keys, some = {"attn_mask": ~padding[:, None, None]}, padding.flip(1)
    asked = {"query_mask": ~some[:, None].expand(B, HEADS, T)}
    for given, mask in (
        ({"key_padding_mask": padding}, keys),
        ({"key_padding_mask": padding, "query_padding_mask": some}, keys | asked),
        ({"is_causal": True}, {"is_causal": True}),
    ):
        layer = MixtureAttention(E, HEADS, priors="em", shifted=True, cross=True)
        q, k, _ = layer.heads(x, memory, memory)
        expected = em_priors(q, k, **mask)
        layer(x, memory, memory, **given)
        torch.testing.assert_close(layer.priors, expected)


# --- shared mixtures, heads of another width ---------------------------------------------------

SHARED, WIDTH, D = 4, 12, 3  # heads, features of a token and of a head
KINDS = {
    "plain": {},
    "shifted": {"shifted": True},
    "hard, shifted": {"hard": True, "shifted": True},
    "linear, shifted": {"linear": True, "shifted": True},
    "three, learned": {"components": 3, "priors": "learned"},
    "em": {"priors": "em", "shifted": True},
    "variances": {"hard": True, "variances": [1.0, 2.0]},
}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def repeat(x, rows, groups):
    """Repeat the D rows of each group for the heads that share them."""
    wide = x.unflatten(rows, (groups, D)).repeat_interleave(SHARED // groups, rows)
    return wide.flatten(rows, rows + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_mixtures_are_repeated_mixtures(kind):
    for groups in (1, 2):
        made = {"dtype": torch.float64, **KINDS[kind], "cross": True}
        shared = noisy(MixtureAttention(WIDTH, SHARED, kv_heads=groups, **made))
        whole = MixtureAttention(WIDTH, SHARED, **made).eval()
        theirs = {}
        for name, x in shared.state_dict().items():
            if name.startswith("in_proj"):
                q, k, v = x.split((SHARED * D, groups * D, groups * D))
                x = torch.cat([q, repeat(k, 0, groups), repeat(v, 0, groups)])
            elif name in ("key_weight", "key_bias"):
                x = repeat(x, 1, groups)
            elif name == "shifts":
                x = x.repeat_interleave(SHARED // groups, 0)
            theirs[name] = x
        whole.load_state_dict(theirs)
        x, memory = random(B, T, WIDTH), random(B, T + 2, WIDTH, seed=1)
        padding = torch.zeros(B, T + 2).bool()
        padding[1, 5:] = True
        ours, expected = (
            layer(x, memory, memory, key_padding_mask=padding) for layer in (shared, whole)
        )
        for left, right in zip(ours, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=1e-10)
        fast = shared(x, memory, memory, key_padding_mask=padding, need_weights=False)[0]
        torch.testing.assert_close(fast, expected[0], rtol=0, atol=1e-10)
        causal = (
            layer(x, x, x, need_weights=False, is_causal=True)[0] for layer in (shared, whole)
        )
        torch.testing.assert_close(*causal, rtol=0, atol=1e-10)


def test_the_variance_is_the_root_of_the_width_of_a_head():
    assert MixtureAttention(WIDTH, 2, head_dim=16).keywords()["variances"] == 4.0


def test_parameters_are_those_of_the_paper():
    # App. B of [Nguyen2022]: H/2 heads of D features, two keys each, with priors and no biases.
    H, width = 8, 4
    dim = H * width
    layer = MixtureAttention(dim, H // 2, head_dim=width, bias=False, priors="learned")
    count = sum(p.numel() for p in layer.parameters())
    assert count == 2 * H * width * dim + (H * width) ** 2 // 2 + H


def test_em_of_a_shared_mixture_gives_each_head_its_priors():
    layer = MixtureAttention(WIDTH, SHARED, kv_heads=1, priors="em", dtype=torch.float64)
    x = random(B, T, WIDTH)
    layer.train()(x, x, x, need_weights=False)
    assert layer.priors.shape == (SHARED, 2)
    torch.testing.assert_close(layer.priors.sum(-1), torch.ones(SHARED).double())
    assert len(layer.priors[:, 0].unique()) == SHARED


# --- errors ------------------------------------------------------------------------------------


def test_bad_construction_is_named():
    bad = [
        (ValueError, "components is 0", {"components": 0}),
        (TypeError, "components is of type float", {"components": 2.0}),
        (ValueError, "priors is 'uniform'", {"priors": "uniform"}),
        (ValueError, "linear is True with hard=True", {"linear": True, "hard": True}),
        (ValueError, "linear is True", {"linear": True, "priors": "em"}),
        (ValueError, "linear is True", {"linear": True, "variances": 1.0}),
        (ValueError, "variances is", {"variances": [1.0, 2.0, 3.0]}),
        (ValueError, "variances is -1", {"variances": -1.0}),
        (ValueError, "mixture is {'hard': True}; expected", {"mixture": {"hard": True}}),
        (TypeError, "attention", {"attention": mixture_attention}),
    ]
    assert_named(bad, MixtureAttention, embed_dim=E, num_heads=HEADS)


def test_heads_refuse_what_forward_refuses():
    layer = MixtureAttention(WIDTH, SHARED)
    with pytest.raises(ValueError, match="query"):
        layer.heads(*(torch.zeros(B, T, WIDTH + extra) for extra in (1, 0, 0)))
