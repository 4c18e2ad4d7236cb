"""Tests of selected blocks: selection, weights and other code, beyond the contract."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from helpers import (
    H,
    additive,
    assert_all_close,
    boolean,
    output_and_gradients,
    qkv,
    relative_errors,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from derived_attention import selected_attention_reference
from derived_attention.common import blocks
from derived_attention.common.masks import causal_mask
from derived_attention.selected import core
from derived_attention.selected.core import selected_attention
from derived_attention.softmax.core import softmax_attention

pytestmark = pytest.mark.usefixtures("no_short_forms")
FORMS = [selected_attention, selected_attention_reference]
both_forms = pytest.mark.parametrize("form", FORMS)
causal_or_not = pytest.mark.parametrize("is_causal", [False, True])
N = M = 41
SIZES = [(4, 2), (5, 1), (1, 3), (3, 11)]


def selection(q, k, block, kept, is_causal, keep=None):
    """Return which keys each query of one head reads, computed block by block."""
    read = torch.zeros(len(q), len(k), dtype=torch.bool)
    there = torch.ones(len(k), dtype=torch.bool) if keep is None else keep
    for i in range(len(q)):
        pooled = {}
        for J in range(-(-len(k) // block)):
            members = [j for j in range(J * block, min((J + 1) * block, len(k))) if there[j]]
            past = (J + 1) * block <= i if is_causal else True
            if members and past and J != i // block:
                pooled[J] = float(q[i].detach() @ k[members].detach().mean(0))
        best = sorted(pooled, key=pooled.get, reverse=True)[:kept]
        for j in range(len(k)):
            own = j // block == i // block and (j <= i or not is_causal)
            read[i, j] = there[j] and (own or j // block in best)
    return read


def selections(q, k, *args):
    return torch.stack([selection(*x, *args) for x in zip(q, k, strict=True)])


# --- selection, and softmax over the blocks -------------------------------------------------------


@causal_or_not
@pytest.mark.parametrize(("block", "kept"), SIZES)
def test_it_is_softmax_under_the_mask_of_the_selection(is_causal, block, kept):
    for n, m in [(N, M), (40, 40), (17, M), (M, 17)]:
        inputs = qkv((H,), n=n, m=m)
        masks = [boolean(m), torch.arange(m) < m - 2 * block]
        for keep in [None] if is_causal else [None, *masks]:
            read = selections(*inputs[:2], block, kept, is_causal, keep)
            expected = output_and_gradients(softmax_attention, inputs, attn_mask=read)
            own = {"block": block, "kept": kept, "is_causal": is_causal, "attn_mask": keep}
            for form in FORMS:
                found = output_and_gradients(form, inputs, **own)
                assert_all_close(found, expected, 1e-11, f"{form.__name__}, {n}, {m}, {keep}")


@both_forms
def test_a_floating_mask_is_added_and_selects_nothing(form):
    inputs = qkv((H,), n=N, m=M)
    bias = torch.linspace(-3, 3, M, dtype=torch.float64).roll(11)
    read = selections(*inputs[:2], 4, 2, False)
    expected = output_and_gradients(
        softmax_attention, inputs, attn_mask=additive(read, bias.expand(H, N, M))
    )
    found = output_and_gradients(form, inputs, attn_mask=bias, block=4, kept=2)
    assert_all_close(found, expected, 1e-11)


@both_forms
@causal_or_not
def test_all_blocks_are_softmax_attention(form, is_causal):
    theirs = output_and_gradients(softmax_attention, qkv((H,), n=N, m=M), is_causal=is_causal)
    for block, kept in [(4, 10), (4, 11), (4, 10**6), (41, 1), (10**6, 1), (14, 2), (1, 40)]:
        own = {"block": block, "kept": kept, "is_causal": is_causal}
        assert_all_close(output_and_gradients(form, qkv((H,), n=N, m=M), **own), theirs, 1e-11)
    short = form(*qkv((H,), n=N, m=M), block=4, kept=9, is_causal=is_causal)
    assert not torch.allclose(short, theirs[0]), "one block fewer must change the output"


def test_what_happens_inside_another_block_changes_the_choice_by_its_mean_only():
    """Hide a needle in its block's mean, so that the best block is another one."""
    D, block = 8, 8
    q = torch.zeros(1, 64, D, dtype=torch.float64)
    q[0, -1, 0] = 10.0
    k = 0.01 * torch.randn(1, 64, D, generator=torch.Generator().manual_seed(0)).double()
    k[0, 8:16, 0] += 0.2  # a block of lukewarm keys
    k[0, 17, 0] = 1.0  # the needle: the mean of its block is lower
    eye = torch.eye(64, dtype=torch.float64)[None]
    for kept, found in ((1, False), (2, True)):
        A = selected_attention(q, k, eye, block=block, kept=kept, is_causal=True)
        assert bool(A[0, -1, 17] > 0) is found
        assert bool(A[0, -1, 8:16].all())
    exact = softmax_attention(q, k, eye, is_causal=True)[0, -1]
    lost = exact - selected_attention(q, k, eye, block=block, kept=1, is_causal=True)[0, -1]
    share = float(exact[[*range(8), *range(16, 56)]].sum())
    # The dropped weight is p, and the rest is divided by 1 - p: half the L1 distance is p.
    assert float(lost.abs().sum()) / 2 == pytest.approx(share, abs=1e-12)


# --- other code -----------------------------------------------------------------------------------


def test_the_selection_branch_of_nsa_in_fla():
    naive = pytest.importorskip("fla.ops.nsa.naive")
    block, kept, n = 8, 3, 48
    q, k, v = (x.detach().float() for x in qkv((2, H), n=n, m=n, d=8, dv=8))
    pooled = q @ k.unflatten(-2, (-1, block)).mean(-2).mT
    i, J = torch.arange(n)[:, None], torch.arange(n // block)
    best = pooled.masked_fill(i // block <= J, -math.inf).topk(kept)
    none = best.values == -math.inf
    own = (torch.arange(n) // block)[:, None].expand(2, H, n, 1)
    index = torch.cat([own, best.indices.masked_fill(none, -1)], -1)  # -1: no block
    across = [x.transpose(1, 2) for x in (q, k, v, index)]
    theirs = naive.naive_nsa_selection(*across, block_size=block).transpose(1, 2)
    ours = selected_attention(q, k, v, block=block, kept=kept, is_causal=True)
    assert_all_close([ours], [theirs], 1e-5)
    fewer = selected_attention(q, k, v, block=block, kept=kept - 1, is_causal=True)
    assert not torch.allclose(fewer, theirs, atol=1e-2)


# --- by tiles -------------------------------------------------------------------------------------


@causal_or_not
def test_one_block_that_all_queries_select(is_causal):
    """Test many tiles for one block, and none for the others."""
    n, block = 300, 4
    q, k, v = (x.detach() for x in qkv((H,), n=n, m=n))
    q[..., 0], k[..., 0] = 5, 0
    k[:, block : 2 * block, 0] = 9
    inputs = [x.requires_grad_() for x in (q, k, v)]
    own = {"block": block, "kept": 1, "is_causal": is_causal}
    expected = output_and_gradients(selected_attention_reference, inputs, **own)
    assert_all_close(output_and_gradients(selected_attention, inputs, **own), expected, 1e-11)
    A = selected_attention(*inputs[:2], torch.eye(n, dtype=q.dtype).expand(H, n, n), **own)
    assert bool((A[:, 2 * block :, block : 2 * block] > 0).all())


@pytest.mark.parametrize("tile", [1, 2, 16, 1000])
def test_tiles_and_heads_at_a_time_change_nothing(tile):
    inputs = qkv((2, H), n=70, m=66)
    for is_causal, scores in itertools.product((False, True), (1, 2**12, 2**30)):
        own = {"block": 4, "kept": 3, "is_causal": is_causal}
        expected = output_and_gradients(selected_attention, inputs, **own)
        with pytest.MonkeyPatch.context() as patch:  # its undoing keeps `no_short_forms`
            patch.setattr(core, "TILE", tile)
            patch.setattr(blocks, "CACHED", scores)
            found = output_and_gradients(selected_attention, inputs, **own)
        assert_all_close(found, expected, 1e-12)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 60), st.integers(1, 60), st.integers(1, 12), st.integers(1, 6),
    st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_both_forms_agree_for_any_sizes(n, m, block, kept, is_causal, seed):
    inputs = qkv((2,), n=n, m=m, d=3, dv=2, seed=seed)
    own = {"block": block, "kept": kept, "is_causal": is_causal}
    expected = output_and_gradients(selected_attention_reference, inputs, **own)
    assert_all_close(output_and_gradients(selected_attention, inputs, **own), expected, 1e-10)


def test_half_precision_selects_in_float32():
    """Check that float32 sums select the same blocks as float64, for the same inputs."""
    inputs = [x.detach().bfloat16() for x in qkv((H,), n=64, m=64)]
    found = selected_attention(*inputs, block=4, kept=3)
    exact = selected_attention(*(x.double() for x in inputs), block=4, kept=3)
    assert max(relative_errors([found], [exact])) < 4e-3


@causal_or_not
def test_half_precision_products_as_on_a_gpu(is_causal, monkeypatch):
    """Test products in half precision, with sums and the choice of blocks in float32."""
    for dtype, tol in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        inputs = [x.detach().to(dtype) for x in qkv((2, H), n=70, m=66)]
        exact = [x.double().requires_grad_() for x in inputs]
        for keep in [None] if is_causal else [None, boolean(66)]:
            own = {"block": 8, "kept": 3, "is_causal": is_causal, "attn_mask": keep}
            expected = output_and_gradients(selected_attention_reference, exact, **own)
            monkeypatch.setattr(core, "product_dtype", lambda x: x.dtype)
            halves = [x.requires_grad_() for x in inputs]
            found = output_and_gradients(selected_attention, halves, **own)
            assert all(x.dtype == dtype for x in found)
            assert max(relative_errors([x.double() for x in found], expected)) < tol


def test_repeated_maxima_are_the_largest():
    scores = torch.randn(3, 40, 12, generator=torch.Generator().manual_seed(0))
    scores[scores < 0] = -math.inf
    ways = [core._largest(scores.clone(), 5, repeat) for repeat in (False, True)]
    assert torch.equal(*(x.masked_fill(x == 12, -1) for x in ways)) and bool((ways[0] == 12).any())


# --- wrong inputs ---------------------------------------------------------------------------------


def test_wrong_sizes_are_named():
    for form in FORMS:
        for wrong, kind, words in (
            ({"block": 0}, ValueError, "block is 0; expected a whole number, at least 1"),
            ({"block": True}, TypeError, "block is of type bool; expected a whole number"),
            ({"kept": 0}, ValueError, "kept is 0; expected a whole number, at least 1"),
            ({"kept": None}, TypeError, "kept is of type NoneType; expected a whole number"),
        ):
            with pytest.raises(kind, match=words):
                form(*qkv((H,), n=N, m=M), **({"block": 4, "kept": 2} | wrong))


def test_the_formula_takes_masks_that_differ_between_queries():
    inputs = qkv((H,), n=N, m=M)
    formula = functools.partial(selected_attention_reference, *inputs, block=4, kept=2)
    assert_all_close([formula(attn_mask=causal_mask(N, M))], [formula(is_causal=True)], 1e-12)
