"""MRA-2 and MRA-2-s: one matrix at two resolutions; `test_contract` tests the rest."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from helpers import (
    H,
    assert_agree,
    assert_all_close,
    assert_named,
    boolean,
    output_and_gradients,
    relative_errors,
)
from helpers import qkv as any_qkv

from derived_attention import mra_attention_reference
from derived_attention.layer import ALL
from derived_attention.mra import core
from derived_attention.mra.core import mra_attention, mra_attention_weights
from derived_attention.mra.layer import MRAAttention
from derived_attention.registry import MECHANISMS
from derived_attention.softmax.core import softmax_attention
from derived_attention.testing.cases import Subject
from derived_attention.testing.contract import try_promise

N, M, BLOCK = 21, 23, 4
qkv = functools.partial(any_qkv, n=N, m=M)
FORMS = mra_attention, mra_attention_reference
pytestmark = pytest.mark.usefixtures("no_short_forms")


def kept_of(mass, kept, over):
    """Return the best key blocks of each query block, given masses {queries: {keys: mass}}."""
    if over == "rows":
        return {at: sorted(row, key=row.get, reverse=True)[:kept] for at, row in mass.items()}
    top = {at: max(row.values(), default=0) for at, row in mass.items()}
    pairs = [(m - top[at], at, J) for at, row in mass.items() for J, m in row.items()]
    best = sorted(pairs, reverse=True)[: kept * len(mass)]
    return {at: [J for _, i, J in best if i == at] for at in mass}


def pair_by_pair(q, k, v, block, kept, over, sparse, keep, asked, bias=None):
    """Return the output of one head by its equations, in slow loops over queries and keys."""
    q = q / math.sqrt(q.shape[-1])
    bias = torch.zeros(len(k), dtype=q.dtype) if bias is None else bias
    there = torch.arange(len(k))[keep].tolist()
    blocks = sorted({j // block for j in there})
    out, pooled, mass = [], {}, {}
    for at in sorted({i // block for i in range(len(q))}):
        mates = [t for t in range(len(q)) if t // block == at and asked[t]]
        q_bar = sum(q[t] for t in mates) / max(len(mates), 1) if mates else 0 * q[0]
        for J in blocks:
            own = [j for j in there if j // block == J]
            total = sum(bias[j].exp() for j in own)
            k_bar = sum(bias[j].exp() * k[j] for j in own) / total
            pooled[at, J] = q_bar @ k_bar
            if mates:
                mass.setdefault(at, {})[J] = float((pooled[at, J] + total.log()).detach())
    choice = kept_of(mass, kept, over)
    for i in range(len(q)):
        at = i // block
        best = choice.get(at, [])
        rows = [j for j in there if j // block in best or not sparse]
        scores = [
            (q[i] @ k[j] if j // block in best else pooled[at, j // block]) + bias[j] for j in rows
        ]
        weights = torch.stack(scores).softmax(0) if rows else None
        out.append(weights @ v[rows] if rows else 0 * v.sum(0) + 0 * q.sum())
    return torch.stack(out)


@pytest.mark.parametrize("over", ["rows", "map"])
@pytest.mark.parametrize("sparse", [False, True])
def test_both_forms_are_the_equations(sparse, over):
    padded = torch.arange(N) < 14  # the rest is padding: part of a block, and whole blocks
    for block, kept, m in [(4, 2, M), (4, 2, 24), (1, 3, 7), (5, 1, M), (10, 2, 3)]:
        everyone = torch.ones(m, dtype=torch.bool)
        gone = everyone.clone()
        gone[block : 2 * block] = gone[-1] = False  # a whole block of keys, and part of one
        masks = [(everyone, None), (gone, None), (gone, torch.linspace(-3, 3, m).double())]
        for (keep, bias), asked in itertools.product(masks, (padded | True, padded)):
            given = keep if bias is None else bias.masked_fill(~keep, -math.inf)
            own = {"block": block, "kept": kept, "over": over, "sparse": sparse}

            def naive(*qkv, own=own, rest=(keep, asked, bias)):
                heads = zip(*qkv, strict=True)
                return torch.stack([pair_by_pair(*x, *own.values(), *rest) for x in heads])

            inputs, what = qkv((2,), m=m, d=3, dv=4), f"{own}, {keep}, {bias}, {asked}"
            seen = functools.partial(torch.index_select, dim=1, index=asked.nonzero()[:, 0])
            expected = output_and_gradients(lambda *x, f=naive, g=seen: g(f(*x)), inputs)
            for form in FORMS:
                form = functools.partial(form, attn_mask=given, query_mask=asked, **own)
                found = output_and_gradients(lambda *x, f=form, g=seen: g(f(*x)), inputs)
                assert_all_close(found, expected, 1e-10, what)


def test_fewer_queries_than_a_block():
    assert_agree(FORMS, qkv((2,), n=3, m=17, d=3, dv=4), block=4, kept=1)


def test_all_blocks_kept_are_softmax_attention():
    for form in FORMS:
        for options in ({"kept": 6}, {"kept": 10**6}, {"block": 23, "kept": 1}, {"block": 10**6}):
            for mask in (None, boolean(M), torch.linspace(-3, 3, M, dtype=torch.float64)):
                for sparse, over in itertools.product((False, True), ("rows", "map")):
                    own = {"block": BLOCK, "sparse": sparse, "over": over, **options}
                    own["attn_mask"] = mask
                    ours = output_and_gradients(form, qkv(), **own)
                    theirs = output_and_gradients(softmax_attention, qkv(), attn_mask=mask)
                    assert_all_close(ours, theirs, 1e-12, f"{form.__name__}, {own}")


def test_a_block_of_one_step_is_its_own_pooled_score():
    theirs = output_and_gradients(softmax_attention, qkv())
    for form in FORMS:  # both resolutions are the same
        assert_all_close(output_and_gradients(form, qkv(), block=1, kept=3), theirs, 1e-12)


@pytest.mark.parametrize("promise", ["compile", "vmap", "memory", "empty inputs"])
def test_over_the_map_as_all_that_is_promised_of_rows(promise):
    """The contract tests only the options in the registry."""
    own = {"over": "map", "kept": 2, "block": 4}
    entry = dataclasses.replace(MECHANISMS["mra"], options=lambda N, H, D: own.copy())
    for form in ("fast", "reference") if promise == "empty inputs" else ("fast",):
        result = try_promise(promise, Subject.of(entry, form))
        assert result.verdict == "kept", result


def test_a_short_block_counts_for_the_keys_it_has():
    q, k = torch.ones(4, 2), torch.ones(5, 2)
    k[4] *= 1.01  # the best pooled score, but a block of one key
    picked = mra_attention_weights(q, k, block=4, kept=1, sparse=True)[0] > 0
    assert picked.tolist() == [True, True, True, True, False]


def test_far_blocks_of_any_size_do_not_overflow():
    """The key that replaces all other blocks may outweigh the kept blocks, or the reverse."""
    q, k, v = (x.detach().float() for x in qkv((H,), n=32, m=32))
    for a in (1, 1e3, 1e6):
        mask = torch.zeros(32)
        mask[::2] = a
        results = [form(a * q, k, v, attn_mask=mask, block=4, kept=2) for form in FORMS]
        assert all(bool(x.isfinite().all()) for x in results)
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("over", ["rows", "map"])
def test_half_precision_products_as_on_a_gpu(over, monkeypatch):
    monkeypatch.setattr(core, "product_dtype", lambda x: x.dtype)
    for dtype, tol in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        inputs = [x.detach().to(dtype) for x in qkv((2, H), n=70, m=66)]
        exact = [x.double().requires_grad_() for x in inputs]
        for mask, sparse in itertools.product((None, boolean(66)), (False, True)):
            own = {"block": 8, "kept": 3, "over": over, "sparse": sparse, "attn_mask": mask}
            expected = output_and_gradients(mra_attention_reference, exact, **own)
            found = output_and_gradients(mra_attention, [x.requires_grad_() for x in inputs], **own)
            assert all(x.dtype == dtype for x in found)
            assert max(relative_errors([x.double() for x in found], expected)) < tol


# --- the layer, errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
def test_layer_is_the_function_without_padded_queries(sparse):
    torch.manual_seed(0)
    own = {"block": 4, "kept": 2, "over": "map", "sparse": sparse}
    layer = MRAAttention(12, 3, **own, dtype=torch.float64)
    x, there = torch.randn(1, 30, 12, dtype=torch.float64), torch.arange(30)[None] < 18
    heads, mask = [layer.project(part, x, ALL) for part in range(3)], there[:, None]
    out = mra_attention(*heads, query_mask=mask, attn_mask=mask[:, None], **own)
    expected = layer.out_proj(out.transpose(1, 2).flatten(2))[there]
    alone = layer(*[x[:, :18]] * 3)[0][0]
    for need_weights in (False, True):
        out = layer(x, x, x, ~there, need_weights)[0][there]
        assert_all_close([out, out], [expected, alone], 1e-10)


def test_layer_says_what_it_is_and_what_it_refuses():
    layer, x = MRAAttention(12, 3, block=8, kept=2, sparse=True), torch.randn(2, 9, 12)
    assert "block=8, kept=2, over=rows, sparse=True" in repr(layer)
    with pytest.raises(ValueError, match="is_causal is given; expected False: the pooled query"):
        layer(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="attn_mask is given; expected None"):
        layer(x, x, x, attn_mask=torch.zeros(9, 9))


BAD = [
    (ValueError, "block is 0; expected a whole number, at least 1", {"block": 0}),
    (TypeError, "block is of type float", {"block": 2.0}),
    (ValueError, "kept is 0; expected a whole number, at least 1", {"kept": 0}),
    (ValueError, "over is 'columns'; expected 'rows' or 'map'", {"over": "columns"}),
]


def test_bad_options_are_named():
    layer = functools.partial(MRAAttention, 12, 3)
    for run in (layer, *(functools.partial(form, *qkv()) for form in FORMS)):
        assert_named(BAD, run)
    with pytest.raises(TypeError, match="query_mask is of type list"):
        mra_attention(*qkv(), query_mask=[True])
