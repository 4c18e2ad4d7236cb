""" "Mrs" + base: heads at several scales that run an attention other than softmax (chapter 8)."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers import B, H, assert_all_close, assert_learns, boolean, qkv, with_gradients
from test_contract_layers import assert_weights_give
from torch import Tensor

from derived_attention.layer import ALL, KEY, QUERY, VALUE
from derived_attention.multiresolution.core import multiresolution_attention
from derived_attention.multiresolution.layer import multiresolution_layer
from derived_attention.registry import MECHANISMS

N, D, E = 21, 4, 12
SCALES = [1, 2, 3]
OWN = {"softmax": {}, "linear": {}, "mra": {"block": 2, "kept": 2}}  # others: the registry's sample
every_base = pytest.mark.parametrize("name", [*OWN, "linformer", "performer", "fmm", "luna"])


def options_of(name):
    """Its options, tensors as float64 leaves."""
    own = OWN[name] if name in OWN else MECHANISMS[name].options(N, 1, D)
    learned = {k: x.double().requires_grad_() for k, x in own.items() if isinstance(x, Tensor)}
    return {**own, **learned}


def pooled(x, there, s, start):
    """The means of windows of s steps, over those that are there, after the first `start` steps."""
    spans = [slice(i, i + 1) for i in range(start)]
    spans += [slice(a, a + s) for a in range(start, x.shape[-2], s)]
    parts = [(x[..., w, :], there[..., w, None]) for w in spans]
    means = [(y * t).sum(-2) / t.sum(-2).clamp(min=1) for y, t in parts]
    return torch.stack(means, -2), torch.stack([t.any((-1, -2)) for _, t in parts], -1)


def repeated(x, s, n, start):
    """Each of these steps s times, but for the first `start`."""
    return torch.cat([x[..., :start, :], x[..., start:, :].repeat_interleave(s, -2)], -2)[
        ..., :n, :
    ]


def head(run, q, k, v, there, s, start=0):
    """One head (B, 1, N, D) at a scale, as it is said: pool, attend, repeat."""
    asked = torch.ones(q.shape[-2], dtype=torch.bool)
    q_s = pooled(q, asked, s, start)[0]
    (k_s, here), (v_s, _) = (pooled(x, there, s, start) for x in (k, v))
    return repeated(run(q_s, k_s, v_s, attn_mask=here[..., None, :]), s, q.shape[-2], start)


@every_base
@pytest.mark.parametrize("class_token", [False, True])
def test_function_is_pool_base_repeat(name, class_token):
    own, entry = options_of(name), MECHANISMS[name]
    padding = boolean(B, 1, 1, N)
    padding[0, ..., 6:12] = False  # whole windows are padding
    for mask in (torch.ones(N, dtype=torch.bool).expand(B, 1, 1, N), padding):

        def naive(q, k, v, mask=mask, **own):
            run, there = functools.partial(entry.reference, **own), mask[:, :, 0]
            heads = [
                head(run, *(x[:, h : h + 1] for x in (q, k, v)), there, s, int(class_token))
                for h, s in enumerate(SCALES)
            ]
            return torch.cat(heads, 1)

        def ours(q, k, v, mask=mask, **own):
            base = functools.partial(entry.fast, **own)
            kind = {"scales": SCALES, "class_token": class_token, "attn_mask": mask}
            return multiresolution_attention(q, k, v, attention=base, **kind)

        inputs = qkv((B, H), n=N, m=N, d=D, dv=3)
        results = [with_gradients(form, inputs, **own) for form in (ours, naive)]
        assert_all_close(*results, 1e-10, f"{name}, {mask.all()}")


def make(name, **own):
    """The layer of "Mrs" + base, with parameters that are not those it starts with."""
    torch.manual_seed(0)
    entry = MECHANISMS[name]
    own |= OWN[name] if name in OWN else entry.layer_options(N, H, D)
    own |= {"attention": entry.fast}
    kind = type(entry.make_layer(E, H, N))
    layer = multiresolution_layer(kind)(E, H, scales=SCALES, dtype=torch.float64, **own)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return layer


@every_base
@pytest.mark.parametrize("class_token", [False, True])
def test_layer_runs_its_heads_so(name, class_token):
    layer = make(name, class_token=class_token)
    x = torch.randn(B, N, E, dtype=torch.float64)
    q, k, v = (layer.project(part, x, ALL) for part in (QUERY, KEY, VALUE))
    there = torch.ones(N, dtype=torch.bool)
    heads = []
    for h, s in enumerate(SCALES):
        run = layer.mechanism(layer.attention, [h])
        parts = (y[:, h : h + 1] for y in (q, k, v))
        heads.append(head(run, *parts, there, s, int(class_token)))
    expected = layer.out_proj(torch.cat(heads, 1).transpose(1, 2).flatten(2))
    out, A = layer(x, x, x, average_attn_weights=False)
    assert_all_close([out], [expected], 1e-10, name)
    assert_weights_give(out, A, layer, x)


@every_base
@pytest.mark.parametrize("class_token", [False, True])
def test_layer_takes_padding_as_absence_and_learns(name, class_token):
    layer = make(name, class_token=class_token)
    x = torch.randn(B, N, E, dtype=torch.float64)
    gone = torch.arange(N) >= torch.tensor([13, N])[:, None]
    out = layer(x, x, x, gone, need_weights=False)[0]
    y = x + 5 * gone[..., None]
    changed = layer(y, y, y, gone, need_weights=False)[0]
    alone = layer(x[:1, :13], x[:1, :13], x[:1, :13], need_weights=False)[0]
    assert_all_close([changed[~gone]], [out[~gone]], 1e-10, name)
    assert_all_close([out[:1, :13]], [alone], 1e-10, name)
    assert_learns(layer.train(), x, name, key_padding_mask=gone)
