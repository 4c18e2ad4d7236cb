"""Attention to a query's own block of keys, and to the few blocks that it selects (chapter 16).

The equation of this module, with keys in blocks J of b consecutive tokens, is ::

    h_i = Σ_{j ∈ S(i)} a_ij v_j,    a_ij = exp(q_i·k_j/√D) / Σ_{l ∈ S(i)} exp(q_i·k_l/√D)
    S(i) = I ∪ J_1 ∪ ... ∪ J_kept

where I is the block at the place of the query, and the others are those with the largest pooled
scores q_i·k̄_J, k̄_J the mean of their keys. Causal: I up to the query itself, and only blocks before
I, which lie in the past as wholes.

By Jensen's inequality ``b exp(q_i·k̄_J/√D)`` is a lower bound on what block J weighs. With w, the
range of its scores, ``b exp(q_i·k̄_J/√D + w²/8)`` is an upper one, by Hoeffding's lemma. So the
choice is wrong only where scores differ much within a block.

The formula masks the (N, M) matrix. `selected_attention` brings together the queries that read the
same block, `TILE` of them at a time, and computes nothing else.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from derived_attention import formulas
from derived_attention.common.checks import check_count
from derived_attention.common.convention import (
    depends_on_position,
    extend,
    full_precision,
    in_full,
    is_short,
    mechanism,
    reference_of,
    scaled,
)
from derived_attention.common.masks import Mask, cast_mask, flat_heads, masked_softmax
from derived_attention.common.pooling import windows
from derived_attention.softmax.core import sdpa

TILE = 32  # queries that share a copy of a block; a multiple of 16, so that rows stay aligned
SCORES = 2**19  # in memory at a time on a CPU: they fit in its cache


def _checked_sizes(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, block: int, kept: int
) -> dict[str, Any]:
    for name, value in (("block", block), ("kept", kept)):
        if value.__class__ is not int or value < 1:
            check_count(name, value, 1)
    return {"block": block, "kept": kept}


@mechanism(formula=formulas.selected, checks=_checked_sizes, per_key=True)
@depends_on_position
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, block: int, kept: int
) -> Tensor:
    """Softmax over a query's own block of keys and the `kept` blocks of largest pooled score.

    It takes O(N (kept + 1) block) exact scores, and (N, M / block) pooled ones. Each query selects
    for itself. The choice of blocks is a constant to the gradient: nothing is learned from it. If
    `kept` is at least the number of other blocks, this is `softmax_attention`. Sums are in float32
    at least, under autocast too.

    Parameters
    ----------
    block : int
        Length of a block of keys, at least 1; the last one may be shorter.
    kept : int
        Blocks that a query reads beside its own, at least 1. Query i is in block ``i // block``; if
        there are fewer keys than queries, late queries have no block of their own. A masked key is
        left out of the mean of its block, and a block without keys is not selected; the numbers of
        a floating mask are added to scores, and have no influence on which blocks are selected.
    """
    N, M = q.shape[-2], k.shape[-2]
    blocks, rows = -(-M // block), -(-N // block)
    if q.numel() == 0 or k.numel() == 0 or kept >= blocks - (rows <= blocks):
        return sdpa(q, k, v, mask, scale)
    if mask.by_query or is_short(q, k, 96):
        return in_full(formulas.selected)(q, k, v, mask, scale, block=block, kept=kept)
    with full_precision(q.device):
        Q = scaled(q, scale)
        K, V = k.to(Q.dtype), v.to(Q.dtype)
        parts = [Q, windows(K, block), windows(V, block), _picks(Q, K, mask, block, kept)]
        if mask.is_causal or mask.given is not None or M % block or rows > blocks:
            parts.append(_block_mask(mask, K, block).expand(*parts[1].shape[:-1]))
        heads = _heads_at_a_time(q, (min(kept, blocks) + 1) * block)
        parts = [x.expand(*q.shape[:-2], *x.shape[q.dim() - 2 :]) for x in parts]
        cuts = zip(*(flat_heads(x, q.dim() - 2).split(heads) for x in parts), strict=True)
        H = torch.cat([_attend(mask.is_causal, *cut) for cut in cuts])  # (heads, N, Dv)
    return H.reshape(*q.shape[:-1], v.shape[-1]).to(q.dtype)


selected_attention_reference = reference_of(selected_attention)


def _picks(q: Tensor, k: Tensor, mask: Mask, block: int, kept: int) -> Tensor:
    """Return the blocks (..., N, kept) that queries select; M / block stands for none."""
    q, k = q.detach(), k.detach()
    M, present = k.shape[-2], mask.present(k.shape[-2])
    if present is None:
        present = torch.ones(M, dtype=torch.bool, device=k.device)
    else:
        k = k.masked_fill(~present.unsqueeze(-1), 0)
    count = windows(present.to(k.dtype).unsqueeze(-1), block).sum(-2)  # (..., M/b, 1)
    mean = windows(k, block).sum(-2) / count.clamp(min=1)
    pooled = q @ mean.mT  # (..., N, M/b)
    m = pooled.shape[-1]
    own = torch.arange(q.shape[-2], device=q.device)[:, None] // block
    other = torch.arange(m, device=q.device)
    closed = (other >= own) if mask.is_causal else (other == own)
    if mask.given is not None:
        closed = closed | (count == 0).mT
    best = pooled.masked_fill(closed, -math.inf).topk(min(kept, m))
    return best.indices.masked_fill(best.values == -math.inf, m)


def _block_mask(mask: Mask, k: Tensor, block: int) -> Tensor:
    """Return what a mask adds to scores, in blocks (..., M/b, b): -inf past the last key."""
    M, row = k.shape[-2], mask.per_key()
    row = torch.ones(1, M, dtype=torch.bool, device=k.device) if row is None else row
    if row.dtype == torch.bool:
        row = torch.where(row, 0.0, -math.inf)
    column = cast_mask(row, k.dtype).expand(*row.shape[:-1], M).mT
    return windows(column, block, -math.inf).squeeze(-1)


def _heads_at_a_time(q: Tensor, keys: int) -> int:
    """Return how many heads' scores fit in the cache of a CPU; elsewhere all of them."""
    if q.device.type != "cpu":
        return math.prod(q.shape[:-2]) or 1
    return max(1, SCORES // (q.shape[-2] * keys))


def _attend(
    is_causal: bool, q: Tensor, K: Tensor, V: Tensor, picks: Tensor, added: Tensor | None = None
) -> Tensor:
    """Attend from queries (heads, N, D) to blocks (heads, M/b, b, D): their own, and the picks."""
    (heads, m, b, _), (N, kept) = K.shape, picks.shape[-2:]
    tiles = _tiles(picks, m)
    Q = windows(q, b)  # (heads, N/b, b, D)
    own_K, own_V = (_first(x, Q.shape[1]) for x in (K, V))
    near = (Q @ own_K.mT).flatten(1, 2)[:, :N]  # (heads, N, b)
    shared = _take(q, tiles.pairs // kept).unflatten(1, (-1, TILE))
    far = (shared @ _take(K, tiles.blocks).mT).flatten(1, 2)  # (heads, rows, b)
    S = torch.cat([near, _take(far, tiles.places).reshape(heads, N, kept * b)], -1)
    A = masked_softmax(S, None if added is None else _mask(is_causal, added, picks))
    near, far = A[..., :b], A[..., b:].reshape(heads, N * kept, b)
    H = (windows(near, b) @ own_V).flatten(1, 2)[:, :N]
    shared = _take(far, tiles.pairs).unflatten(1, (-1, TILE))
    parts = _take((shared @ _take(V, tiles.blocks)).flatten(1, 2), tiles.places)
    parts = parts.unflatten(1, (N, kept)).masked_fill((picks == m).unsqueeze(-1), 0)
    return H + parts.sum(-2)


def _mask(is_causal: bool, added: Tensor, picks: Tensor) -> Tensor:
    """Return what is added to the scores (heads, N, b + kept b) of the own block and the picks."""
    heads, m, b = added.shape
    N, rows = picks.shape[1], -(-picks.shape[1] // b)
    near = _first(added, rows, -math.inf).unsqueeze(-2).expand(-1, -1, b, -1)
    if is_causal:
        future = torch.ones(b, b, dtype=torch.bool, device=added.device).triu(1)
        near = near.masked_fill(future, -math.inf)
    none = (picks == m).unsqueeze(-1)
    far = _take(added, picks.clamp(max=m - 1).flatten(1)).view(*picks.shape, b)
    far = far.masked_fill(none, -math.inf).flatten(-2)
    return torch.cat([near.flatten(1, 2)[:, :N], far], -1)


class _Tiles(NamedTuple):
    """Rows, `TILE` for each tile, in which queries that read the same block stand together."""

    pairs: Tensor  # (heads, rows): which pair of a query and a pick; any for an empty row
    blocks: Tensor  # (heads, tiles): the block of a tile
    places: Tensor  # (heads, N kept): the row of each pair; any if it picks no block


def _tiles(picks: Tensor, m: int) -> _Tiles:
    """Give a row to each pair of a query and one of m blocks that it picks, by counting.

    Queries of a block stand in their order. So where a query stands in its tile depends on no later
    query, and with it the last bit of its result.
    """
    heads, N, kept = picks.shape
    count = N * kept // TILE + m  # tiles, if the last one of each block is not full
    none, index = picks == m, picks.clamp(max=m - 1).flatten(1)
    chosen = torch.zeros(heads, m + 1, N, dtype=torch.int32, device=picks.device)
    ranks = chosen.scatter(1, picks.mT, 1)[:, :m].cumsum(-1, dtype=torch.int32)  # (heads, m, N)
    each = (ranks[..., -1].long() + TILE - 1) // TILE  # tiles of a block
    ends = each.cumsum(-1)
    rank = ranks.gather(1, index.view_as(picks).mT).mT.flatten(1) - 1
    places = TILE * (ends - each).gather(-1, index) + rank
    last = places.masked_fill(none.flatten(1), count * TILE)
    pair = torch.arange(N * kept, device=picks.device).expand(heads, -1)
    rows = torch.zeros(heads, count * TILE + 1, dtype=torch.long, device=picks.device)
    tile = torch.arange(count, device=picks.device)[:, None]
    blocks = (ends.unsqueeze(-2) <= tile).sum(-1).clamp(max=m - 1)
    places = places.masked_fill(none.flatten(1), 0)
    return _Tiles(rows.scatter(-1, last, pair)[:, :-1], blocks, places)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Return x (heads, n, ...) at an index (heads, n') of its second dimension."""
    first = torch.arange(len(x), device=x.device)[:, None] * x.shape[1]
    picked = x.flatten(0, 1).index_select(0, (index + first).flatten())
    return picked.view(*index.shape, *x.shape[2:])


def _first(x: Tensor, count: int, value: float = 0.0) -> Tensor:
    """Return the first slices of x (heads, n, ...), with more of a constant if it has fewer."""
    return extend(x, count - x.shape[1], 1, value)
