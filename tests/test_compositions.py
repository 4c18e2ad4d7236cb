""" "Mrs" + base: heads at several scales that run an attention other than softmax (chapter 8)."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from helpers import B, assert_all_close, assert_learns, boolean, qkv, with_gradients
from test_contract_layers import assert_weights_give
from torch import Tensor

from derived_attention.layer import ALL, KEY, QUERY, VALUE
from derived_attention.multiresolution.core import (
    multiresolution_attention,
    multiresolution_attention_reference,
)
from derived_attention.multiresolution.layer import multiresolution_layer
from derived_attention.registry import MECHANISMS

H, N, D, E = 4, 21, 4, 16
SCALES = [2, 1, 3, 2]  # two heads that are not neighbours share a scale
OWN = {"softmax": {}, "linear": {}, "mra": {"block": 2, "kept": 2}}  # others: the registry's sample
BASES = [*OWN, "linformer", "performer", "fmm", "luna"]
every_base = pytest.mark.parametrize(
    ("name", "class_token"), [*itertools.product(BASES, (False, True))]
)


def options_of(name):
    """Its options, tensors as float64 leaves."""
    own = OWN[name] if name in OWN else MECHANISMS[name].options(N, 1, D)
    learned = {k: x.double().requires_grad_() for k, x in own.items() if isinstance(x, Tensor)}
    return {**own, **learned}


@every_base
def test_function_with_any_base_is_the_formula(name, class_token):
    own, entry = options_of(name), MECHANISMS[name]
    padding = boolean(B, 1, 1, N)
    padding[0, ..., 6:12] = False  # whole windows are padding
    inputs = qkv((B, H), n=N, m=N, d=D, dv=3)
    forms = (
        (multiresolution_attention, entry.fast),
        (multiresolution_attention_reference, entry.reference),
    )
    for mask in (None, padding):
        kind = {"scales": SCALES, "class_token": class_token, "attn_mask": mask}
        results = [
            with_gradients(
                lambda q, k, v, form=form, base=base, kind=kind, **own: form(
                    q, k, v, attention=functools.partial(base, **own), **kind
                ),
                inputs,
                **own,
            )
            for form, base in forms
        ]
        assert_all_close(*results, 1e-10, f"{name}, {mask is None}")


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
def test_layer_runs_its_heads_so(name, class_token):
    """Compare with the pooled formula, head by head, causal too where it may be."""
    layer, entry = make(name, class_token=class_token), MECHANISMS[name]
    x = torch.randn(B, N, E, dtype=torch.float64)
    projected = [layer.project(part, x, ALL) for part in (QUERY, KEY, VALUE)]
    for is_causal in (False, True)[: 1 + (entry.causal and not class_token)]:
        how, heads = {"class_token": class_token, "is_causal": is_causal}, []
        for h, s in enumerate(SCALES):
            how["attention"] = layer.mechanism(entry.reference, [h])
            parts = (y[:, h : h + 1] for y in projected)
            heads.append(multiresolution_attention(*parts, scales=[s], **how))
        expected = layer.out_proj(torch.cat(heads, 1).transpose(1, 2).flatten(2))
        out, A = layer(x, x, x, average_attn_weights=False, is_causal=is_causal)
        plain = layer(x, x, x, need_weights=False, is_causal=is_causal)[0]
        assert_all_close([out, plain], [expected] * 2, 1e-10, name)
        assert_weights_give(out, A, layer, x)


@every_base
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
