"""Masks: dead rows, causality, padding, factors of a kernel, and blocks."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Largest, boolean

from derived_attention.common.masks import (
    BlockMask,
    Mask,
    attended_keys,
    causal_mask,
    cut,
    exclude_absent,
    flat_heads,
    masked_softmax,
    open_dead_rows,
    within,
)

NO = -math.inf
T, F = True, False


def test_causal_mask_is_the_top_left_triangle():
    assert causal_mask(2, 3).tolist() == [[T, F, F], [T, T, F]]
    assert causal_mask(3, 2).tolist() == [[T, F], [T, T], [T, T]]
    assert causal_mask(0, 2).shape == (0, 2)


def test_a_part_of_the_triangle_is_all_that_is_made():
    with Largest() as largest:
        part = Mask(None, True).part(slice(96, 100), 100, torch.device("cpu"))
    assert torch.equal(part, causal_mask(100, 100)[96:])
    assert largest.numel == 4 * 100


def test_softmax_gives_zeros_where_nothing_may_be_attended():
    scores = torch.tensor([[0.0, math.log(3)], [5.0, 5.0]], requires_grad=True)
    assert torch.equal(masked_softmax(scores, None), scores.softmax(-1))
    for mask in (torch.tensor([[T, T], [F, F]]), torch.tensor([[0.0, 0.0], [NO, NO]])):
        A = masked_softmax(scores, mask)
        torch.testing.assert_close(A, torch.tensor([[0.25, 0.75], [0.0, 0.0]]))
        (slope,) = torch.autograd.grad(A.square().sum(), scores)
        assert bool(slope.isfinite().all()) and not slope[1].any()
    assert masked_softmax(scores, torch.tensor([T, F])).tolist() == [[1, 0], [1, 0]]


def test_no_kernel_meets_a_row_of_nothing():
    """Kernels of other devices return NaN for a dead row, so their mask has none."""
    keep = torch.tensor([[T, F], [F, F]])
    opened, alive = open_dead_rows(keep, torch.float32)
    assert opened.tolist() == [[T, F], [T, T]] and alive.tolist() == [[T], [F]]
    opened, alive = open_dead_rows(torch.tensor([[1.0, NO], [NO, NO]]), torch.float32)
    assert opened.tolist() == [[1, NO], [0, 0]] and alive.tolist() == [[T], [F]]
    finite = torch.tensor([[0.0, -1e300], [-1e300, -1e300]], dtype=torch.float64)
    opened, alive = open_dead_rows(finite, torch.float32)  # -1e300 is -inf in float32
    assert opened.tolist() == [[0, NO], [0, 0]] and alive.tolist() == [[T], [F]]
    large = torch.tensor([[1e5, 0.0]])  # beyond float16: not +inf, which would become NaN
    assert open_dead_rows(large, torch.float16)[0].tolist() == [[65504, 0]]


def test_numbers_far_below_zero_say_that_nobody_is_there():
    bias = torch.tensor([[0.0, -8191.0, -8192.0], [3.0, -1e30, NO]], requires_grad=True)
    assert exclude_absent(bias).tolist() == [[0, -8191, NO], [3, NO, NO]]
    assert attended_keys(bias).tolist() == [[T, T, F], [T, F, F]]
    for same in (torch.tensor([T, F]), torch.tensor([1.0, -8191, NO]), bias[:, :0]):
        assert exclude_absent(same) is same, "a mask without such numbers is copied"
    wide = torch.zeros(1, 4).expand(3, 4)
    assert exclude_absent(wide) is wide
    (slope,) = torch.autograd.grad(exclude_absent(bias).exp().sum(), bias)
    assert slope[0].tolist() == [1, 0, 0] and bool(slope.isfinite().all())
    x = torch.zeros(1, 2, 4)
    mask = Mask.of_layer(None, torch.tensor([[0.0, -1e30]]), False, x, x, 1)
    assert mask.given.tolist() == [[[[0, NO]]]] and mask.keys.tolist() == [[[T, F]]]


def test_masks_are_restricted_to_a_pattern():
    keep, bias = torch.tensor([T, T, F]), torch.tensor([1.0, NO, 2.0])
    assert attended_keys(bias).tolist() == [T, F, T] and attended_keys(keep) is keep
    assert within(keep, None) is keep
    assert within(keep, torch.tensor([T, F, T])).tolist() == [T, F, F]
    assert within(keep, bias).tolist() == [1, NO, NO]


def test_a_mask_in_its_forms():
    keep, cpu = torch.tensor([[T, F, T], [F, F, F]]), torch.device("cpu")
    nothing, causal, padded = Mask(), Mask(is_causal=True), Mask(torch.tensor([T, F, T]))
    assert nothing.dense(2, 3, cpu) is None and nothing.per_key() is None
    assert (
        nothing.open_dead_rows(torch.float32) == (None, None)
        and nothing.factor(torch.float32) is None
    )
    assert nothing.present(3) is None and nothing.part(slice(0, 2), 3, cpu) is None
    assert causal.dense(2, 3, cpu).tolist() == [[T, F, F], [T, T, F]]
    assert causal.part(slice(1, 3), 3, cpu).tolist() == [[T, T, F], [T, T, T]]
    assert Mask(keep).part(slice(0, 1), 2, cpu).tolist() == [[T, F]]
    assert padded.given.shape == (1, 3) and padded.present(3).tolist() == [T, F, T]
    assert padded.part(slice(5, 9), 2, cpu).tolist() == [[T, F]]
    assert Mask(torch.tensor(F)).present(3).tolist() == [F, F, F]
    assert Mask(keep).softmax(torch.zeros(2, 3)).tolist() == [[0.5, 0, 0.5], [0, 0, 0]]
    assert causal.softmax(torch.zeros(2, 3)).tolist() == [[1, 0, 0], [0.5, 0.5, 0]]
    assert Mask(keep).keywords == {"attn_mask": keep, "is_causal": False}
    q, k = torch.zeros(2, 1, 2, 4), torch.zeros(2, 1, 3, 4)
    inside, given = Mask(keep).rows(q, k)
    assert torch.equal(inside, keep.expand(2, 1, 2, 3)) and given.shape == (2, 1, 2, 1, 3)
    assert Mask().rows(q, k)[0].all() and Mask().rows(q, k)[1] is None
    with pytest.raises(ValueError, match=r"attn_mask has shape \(2, 3\); expected the size 1"):
        Mask(keep).per_key()


def test_factors_of_a_kernel_never_overflow():
    big = Mask(torch.tensor([[1e4, 1e4 - math.log(2), NO]], dtype=torch.float64))
    torch.testing.assert_close(big.factor(torch.float64).tolist(), [[1.0, 0.5, 0.0]])
    assert Mask(torch.full((1, 2), NO)).factor(torch.float32).tolist() == [[0, 0]]
    assert Mask(torch.tensor([T, F])).factor(torch.float32).tolist() == [[1, 0]]
    assert Mask(torch.zeros(1, 0)).factor(torch.float32).shape == (1, 0)
    each = Mask(torch.tensor([[0.0, NO], [NO, 3.0]]))
    assert each.factor(torch.float32, per_key=False).tolist() == [[1, 0], [0, 1]]


def of_layer(attn_mask=None, padding=None, is_causal=False, batch=(2,), **own):
    x = torch.zeros(*batch, 3, 4)
    return Mask.of_layer(attn_mask, padding, is_causal, x, x, 2, **own)


def test_masks_of_a_layer_are_turned_around_and_merged():
    closed, padding = torch.tensor([[F, T, T], [F, F, T], [F, F, F]]), torch.tensor([[F, F, T]] * 2)
    assert of_layer().given is None and of_layer(is_causal=True).is_causal
    assert torch.equal(of_layer(closed).given, ~closed)
    both = of_layer(closed, padding)
    assert both.given.shape == (2, 1, 3, 3)
    assert both.given[0, 0].tolist() == [[T, F, F], [T, T, F], [T, T, F]]
    causal = of_layer(None, padding, is_causal=True)
    assert torch.equal(causal.given, both.given) and not causal.is_causal
    per_head = torch.arange(2 * 2 * 3 * 3).view(4, 3, 3) % 5 == 0
    assert torch.equal(of_layer(per_head).given, ~per_head.view(2, 2, 3, 3))
    mixed = of_layer(torch.ones(3, 3), padding).given
    assert mixed[1, 0].tolist() == [[1, 1, NO]] * 3
    alone = of_layer(per_head[:2], padding[0], batch=())
    assert alone.given.shape == (2, 3, 3)
    with pytest.raises(ValueError, match="for causality pass is_causal=True"):
        causal.per_key()


def test_a_layer_knows_who_is_there():
    padding = torch.tensor([[F, F, T], [F, F, F]])
    for mask in (padding, torch.zeros(2, 3).masked_fill(padding, NO)):
        assert torch.equal(of_layer(padding=mask).keys, ~padding[:, None])
        assert torch.equal(of_layer(padding=mask).queries, ~padding[:, None])
        assert of_layer(padding=mask, cross=True).queries is None
        for cross in (False, True):
            both = of_layer(padding=mask, query_padding_mask=mask.flip(1), cross=cross)
            assert torch.equal(both.queries, ~padding.flip(1)[:, None])
            assert torch.equal(both.keys, ~padding[:, None])
        assert torch.equal(of_layer(padding=mask).present(3), ~padding[:, None])
    assert of_layer().keys is None


def test_blocks_of_a_mask_are_parts_of_the_whole():
    x = torch.zeros(2, 2, 5, 1)  # values of two sequences and two heads, five keys
    scores = torch.randn(4, 5, 5, dtype=torch.float64)
    bias = torch.randn(2, 1, 5, 5, dtype=torch.float64).masked_fill(~boolean(5, 5), NO)
    for mask in (Mask(), Mask(boolean(2, 1, 1, 5)), Mask(boolean(2, 1, 5, 5)), Mask(bias)):
        blocks, whole = BlockMask(mask.given, False, x), mask.softmax(scores.view(2, 2, 5, 5))
        for heads, rows in [(slice(0, 4), slice(0, 5)), (slice(1, 3), slice(2, 4))]:
            part = blocks.softmax(scores[heads, rows].clone(), heads, rows, 5)
            torch.testing.assert_close(part, flat_heads(whole, 2)[heads, rows])
    whole = Mask(is_causal=True).softmax(scores)
    part = BlockMask(None, True, x).softmax(scores[:, 2:4, :4].clone(), slice(0, 4), slice(2, 4), 4)
    torch.testing.assert_close(part, whole[:, 2:4, :4])


def test_gradients_of_a_mask_are_summed_over_what_it_covers():
    x, dS = torch.zeros(2, 2, 5, 1), torch.randn(2, 3, 4)
    for shape in [(1, 1, 5, 5), (2, 1, 1, 5), (2, 2, 5, 1), (2, 1, 1, 1)]:
        mask, dmask = torch.zeros(shape), torch.zeros(shape)
        heads, rows = slice(1, 3), slice(1, 4)
        BlockMask(mask, False, x).add_gradient(dmask, dS, heads, rows, 4)
        full = torch.zeros(4, 5, 5)
        full[heads, rows, :4] = dS
        expected = full.view(2, 2, 5, 5).sum_to_size(shape)
        torch.testing.assert_close(dmask, expected)


def test_rows_and_columns_of_a_mask_are_views():
    mask = torch.zeros(2, 1, 5)
    assert cut(mask, slice(3, 4), 2).shape == (2, 1, 2)
    assert cut(mask.mT, slice(3, 4), 2).shape == (2, 1, 1)
    assert cut(mask, slice(3, 4), 2).data_ptr() == mask.data_ptr()
