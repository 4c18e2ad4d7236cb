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

import functools
import math
from typing import Any

import torch
from torch import Tensor

from derived_attention import formulas
from derived_attention.common.blocks import by_heads
from derived_attention.common.checks import accumulation_dtype, check_count, product_dtype
from derived_attention.common.convention import (
    extend,
    full_precision,
    in_full,
    is_short,
    mechanism,
    reference_of,
    scaled,
)
from derived_attention.common.masks import Mask, cast_mask, take
from derived_attention.common.pooling import block_logs, windows
from derived_attention.softmax.core import sdpa

TILE = 32  # queries that share a copy of a block; a multiple of 16, so that rows stay aligned
FEW = 8  # picks, for which repeated maxima are cheaper on a GPU than sorting


def _checked_sizes(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, block: int, kept: int
) -> dict[str, Any]:
    for name, value in (("block", block), ("kept", kept)):
        if value.__class__ is not int or value < 1:
            check_count(name, value, 1)
    return {"block": block, "kept": kept}


@mechanism(formula=formulas.selected, checks=_checked_sizes, per_key=True)
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
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean:
        True where a key may be attended. Floating: added to the scores, finite or -inf; -8192 and
        below count as -inf; other numbers have no influence on the selection. A masked key is left
        out of the mean of its block, and a block without keys is not selected.
    block : int
        Length of a block of keys, at least 1; the last one may be shorter.
    kept : int
        Blocks that a query reads beside its own, at least 1. Query i is in block ``i // block``; if
        there are fewer keys than queries, late queries have no block of their own.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> selected_attention(q, k, v, block=2, kept=1, is_causal=True).shape
    torch.Size([2, 4, 10, 8])
    """
    N, M = q.shape[-2], k.shape[-2]
    blocks, rows = -(-M // block), -(-N // block)
    if q.numel() == 0 or k.numel() == 0 or kept >= blocks - (rows <= blocks):
        return sdpa(q, k, v, mask, scale)
    if is_short(q, k, 96):
        return in_full(formulas.selected)(q, k, v, mask, scale, block=block, kept=kept)
    with full_precision(q.device):
        dtype, picks = product_dtype(q), _picks(q, k, mask, block, kept)
        parts = [scaled(q, scale, dtype), *(windows(x.to(dtype), block) for x in (k, v)), picks]
        some = rows > blocks and mask.given is None  # queries have no block of their own
        row = torch.ones(1, M, dtype=torch.bool, device=k.device) if some else mask.given
        if (added := block_logs(row, k, block)) is not None:
            parts.append(cast_mask(added, dtype).expand(*parts[1].shape[:-1]))
        H = by_heads(functools.partial(_attend, mask.is_causal), q, (kept + 1) * block, parts)
    return H.reshape(*q.shape[:-1], v.shape[-1]).to(q.dtype)


selected_attention_reference = reference_of(selected_attention)


def _picks(q: Tensor, k: Tensor, mask: Mask, block: int, kept: int) -> Tensor:
    """Return the blocks (..., N, kept) that queries select; M / block stands for none."""
    q, k = q.detach().to(accumulation_dtype(q)), k.detach()
    if mask.given is None and k.shape[-2] % block == 0:
        count, mean = None, windows(k, block).mean(-2, dtype=q.dtype)
    else:
        present = mask.presence(k).unsqueeze(-1)
        count = windows(present.to(q.dtype), block).sum(-2)  # (..., M/b, 1)
        total = windows(k.masked_fill(~present, 0), block).sum(-2, dtype=q.dtype)
        mean = total / count.clamp(min=1)
    pooled = q @ mean.mT  # (..., N, M/b)
    m = pooled.shape[-1]
    own = torch.arange(q.shape[-2], device=q.device)[:, None] // block
    other = torch.arange(m, device=q.device)
    pooled.masked_fill_((other >= own) if mask.is_causal else (other == own), -math.inf)
    pooled = pooled if count is None else pooled.masked_fill((count == 0).mT, -math.inf)
    return _largest(pooled, min(kept, m), q.device.type != "cpu" and kept <= FEW)


def _largest(pooled: Tensor, count: int, repeat: bool) -> Tensor:
    """Return the blocks (..., N, count) of the largest scores (..., N, m), and m for those of -inf.

    `repeat` takes one maximum after the other, and overwrites it.
    """
    if not repeat:
        best = pooled.topk(count)
        return best.indices.masked_fill(best.values == -math.inf, pooled.shape[-1])
    picks = []
    for _ in range(count):
        value, index = pooled.max(-1, keepdim=True)
        picks.append(index.masked_fill(value == -math.inf, pooled.shape[-1]))
        pooled.scatter_(-1, index, -math.inf)
    return torch.cat(picks, -1)


def _attend(
    is_causal: bool, q: Tensor, K: Tensor, V: Tensor, picks: Tensor, added: Tensor | None = None
) -> Tensor:
    """Attend from queries (heads, N, D) to blocks (heads, M/b, b, D): their own, and the picks.

    Each block has a softmax of its own, whose weights sum to `total` with its largest exponent set
    to 0. What is brought back from tiles to queries is a value, `total` and that exponent, `top`.
    """
    (m, b), (N, kept) = K.shape[1:3], picks.shape[-2:]
    (pairs, blocks, places), Q = _tiles(picks, m), windows(q, b)  # (heads, N/b, b, D)
    near = Q @ _first(K, Q.shape[1]).mT
    shared = take(q, pairs // kept).unflatten(1, (-1, TILE))
    far = shared @ take(K, blocks).mT  # (heads, tiles, TILE, b)
    if added is not None:
        near = near + _first(added, Q.shape[1], -math.inf).unsqueeze(-2)
        far = far + take(added, blocks).unsqueeze(-2)
    if is_causal:
        future = torch.ones(Q.shape[2], b, dtype=torch.bool, device=q.device).triu(1)
        near = near.masked_fill(future, -math.inf)
    own = [x[:, :N] for x in _weigh(near, _first(V, Q.shape[1]), added is None)]
    rows = _weigh(far, take(V, blocks), added is None)
    value, *others = (take(x, places).unflatten(1, (N, kept)) for x in rows)
    totals, tops = (torch.cat([x, y[..., 0]], -1) for x, y in zip(own[1:], others, strict=True))
    if is_causal or added is not None:  # else each query has as many blocks
        tops[..., 1:].masked_fill_(picks == m, -math.inf)
    share = (tops - _finite(tops.amax(-1, keepdim=True), added is None)).exp()
    total = (share * totals).sum(-1, keepdim=True)
    share = (share / (total if added is None else total.masked_fill(total == 0, 1))).to(q.dtype)
    return torch.addcmul((share[..., 1:, None] * value).sum(-2), share[..., :1], own[0])


def _weigh(S: Tensor, V: Tensor, alive: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ_j exp(s_j − top) v_j, Σ_j exp(s_j − top) and top, as rows (heads, rows, ·)."""
    top = S.detach().amax(-1, keepdim=True)
    E = (S - _finite(top, alive)).exp_()
    total = E.sum(-1, keepdim=True, dtype=accumulation_dtype(S))
    return (E @ V).flatten(1, 2), total.flatten(1, 2), top.to(total.dtype).flatten(1, 2)


def _finite(top: Tensor, alive: bool) -> Tensor:
    """Return the largest scores of rows, and 0 if a row has none; all have some if `alive`."""
    return top if alive else top.masked_fill(top == -math.inf, 0)


def _tiles(picks: Tensor, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Give a row to each pair of a query and one of m blocks that it picks, by sorting the blocks.

    There are `TILE` rows for each tile, whose queries read the same block. Returns which pair is in
    a row (heads, rows), any for an empty row; the block of a tile (heads, tiles); and the row of
    each pair (heads, N kept), any if it picks no block.

    Queries of a block are in their order. So the place of a query in its tile depends on no later
    query, nor does the last bit of its result.
    """
    heads, N, kept = picks.shape
    count = N * kept // TILE + m  # tiles, if the last one of each block is not full
    chosen, pairs = picks.flatten(1).sort(stable=True)  # pairs without a block are the last
    sizes = torch.zeros(heads, m + 1, dtype=torch.long, device=picks.device)
    sizes = sizes.scatter_add(1, chosen, torch.ones_like(chosen))
    each = (sizes + TILE - 1) // TILE  # tiles of a block
    ends = each.cumsum(-1)
    shift = TILE * (ends - each) - (sizes.cumsum(-1) - sizes)
    row = torch.arange(N * kept, device=picks.device) + shift.gather(1, chosen)
    row = row.masked_fill(chosen == m, count * TILE)  # one that is dropped
    rows = torch.zeros(heads, count * TILE + 1, dtype=torch.long, device=picks.device)
    tile = torch.arange(count, device=picks.device)[:, None]
    blocks = (ends[:, None, :m] <= tile).sum(-1).clamp(max=m - 1)
    places = torch.zeros_like(pairs).scatter(1, pairs, row % (count * TILE))
    return rows.scatter(1, row, pairs)[:, :-1], blocks, places


def _first(x: Tensor, count: int, value: float = 0.0) -> Tensor:
    """Return the first slices of x (heads, n, ...), with more of a constant if it has fewer."""
    return extend(x, count - x.shape[1], 1, value)
