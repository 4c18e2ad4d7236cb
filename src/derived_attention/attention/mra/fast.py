"""MRA-2 and MRA-2-s: a few blocks of scores exactly, the others by their pooled score (chapter 8).

The equation of this module, with queries and keys in blocks I and J of b steps, is ::

    s_ij = q_i·k_j/√D          where J is among the `kept` blocks of the query's block I,
           q̄_I·k̄_J/√D          elsewhere (MRA-2), or −∞ (MRA-2-s)
    h_i  = Σ_j exp(s_ij) v_j / Σ_j exp(s_ij)

where q̄_I and k̄_J are the means of their blocks: the scores have two resolutions, 1 and b. Kept are
the blocks with the largest Σ_{j ∈ J} exp(q̄_I·k̄_J/√D): their pooled score decides, and how many keys
they have.

There are two ways to keep `kept` blocks for each of the n = ⌈N/b⌉ blocks of queries. Ours,
``over="rows"``: each has its own `kept` best. What other rows hold moves no choice, and all rows
are equal work. That of the code of Zeng et al. (2022), ``over="map"``: the n `kept` best of the
whole map, by the pooled score less the largest one of its row. So each row keeps its best block,
and the others go to rows that have many almost as good.

The formula fills the (N, M) matrix of scores. `mra_attention` computes the kept
blocks, and lets all others of a row of blocks be one more key: they have the same weights for each
query of the block.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from derived_attention.attention import formulas
from derived_attention.attention.engine.pooling import windows
from derived_attention.attention.frame.checks import (
    check_count,
    check_flag,
    check_query_mask,
    is_symbolic,
)
from derived_attention.attention.frame.convention import full_precision, in_full, mechanism, prepare
from derived_attention.attention.frame.masks import (
    Mask,
    flat_heads,
    masked_softmax,
    narrowed,
    open_dead_rows,
)
from derived_attention.attention.linear.fast import wide
from derived_attention.attention.softmax.fast import sdpa

OVER = ("rows", "map")  # what the best blocks are chosen over
SCORES = 2**19  # about as many of them at a time on a CPU, for its cache
LATER = (
    "the pooled query of a block holds its later queries, which would move its coarse scores and "
    "the choice of its blocks"
)


class Coarse(NamedTuple):
    """The matrix of scores at the resolution of blocks."""

    scores: Tensor  # (..., N/b, M/b): q̄_I·k̄_J/√D
    mass: Tensor  # (..., N/b, M/b): the logarithm of what block J weighs by its pooled score
    # (..., n, kept) or (..., n kept): the blocks kept, as places in a map that is written as one
    # row; what is past its end is none.
    picks: Tensor
    logs: Tensor | None  # (..., M/b, b): of how often each key counts; None where all count once


# --- the formula: a matrix of scores at two resolutions ------------------------------------------


def mra_attention_weights(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    block: int = 32,
    kept: int = 4,
    over: str = "rows",
    sparse: bool = False,
    query_mask: Tensor | None = None,
) -> Tensor:
    """Attention matrix A (..., H, N, M) of MRA-2: softmax of scores at two resolutions.

    Arguments and errors are those of `mra_attention`.
    """
    mask, scale = prepare(q, k, None, attn_mask, is_causal, scale)
    check_blocks(mask, q, block, kept, over, sparse, query_mask)
    every = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device).expand(*q.shape[:-2], -1, -1)
    own: dict[str, Any] = dict(block=block, kept=kept, over=over, sparse=sparse)
    return in_full(formulas.mra)(q, k, every, mask, scale, query_mask=query_mask, **own)


# --- the same by blocks --------------------------------------------------------------------------


@mechanism(weights=mra_attention_weights, per_key=True, alone=False)
def mra_attention(
    q, k, v, mask, scale, *, block=32, kept=4, over="rows", sparse=False, query_mask=None
) -> Tensor:
    """MRA-2 [Zeng2022]: O(N kept b) exact scores, and the (N/b, M/b) pooled ones.

    Every block of queries attends some blocks of keys exactly. All others are one more key to
    it, with the sum of their weights and the mean of their values; MRA-2-s, ``sparse=True``, leaves
    them out. Where `kept` is the number of blocks or more, this is `softmax_attention`. The choice
    of blocks is a constant to the gradient. Sums are in float32 at least, under autocast too.

    Parameters
    ----------
    is_causal : bool
        False: the pooled query of a block holds its later queries.
    block : int
        b, the length of a block, at least 1. The last block may be shorter.
    kept : int
        Blocks of keys that each block of queries attends exactly, at least 1; the mean number of
        them with ``over="map"``. A masked key is left out of its pooled key, and a block weighs as
        much as its keys that are there; with a floating mask m, key j counts exp(m_j) times.
    over : str
        ``"rows"``: each block of queries has its own `kept` best blocks, whatever the others hold.
        ``"map"``, as in the code of [Zeng2022]: of all pairs of blocks those n `kept`, of n blocks
        of queries, whose pooled score is nearest to the largest of its row; so each has one at
        least. As many exact scores, but rows have to be put together: half as much time again.
    sparse : bool
        Whether to leave out all other blocks.
    query_mask : Tensor, optional
        Boolean, broadcastable to ``(..., H, N)``: False where a query is padding, which then is
        left out of the pooled query of its block.
    """
    check_blocks(mask, q, block, kept, over, sparse, query_mask)
    M = k.shape[-2]
    if not is_symbolic(q.shape[-2], M) and (q.numel() == 0 or kept * block >= M):
        return sdpa(q, k, v, mask, scale)
    with full_precision(q.device):
        Q, K, V = _scaled(q, scale), k.to(wide(q)), v.to(wide(q))
        coarse = _coarse(Q, K, mask, query_mask, block, kept, over)
        far, u = _far(coarse, _pooled(V, coarse.logs, block), sparse)
        parts = [*(windows(x, block) for x in (Q, K, V)), coarse.picks, far, u]
        if coarse.logs is not None:
            parts.append(coarse.logs.expand(*parts[1].shape[:-1]).unsqueeze(-1))
        heads = _heads_at_a_time(q, kept * block)
        cuts = zip(*(flat_heads(x, q.dim() - 2).split(heads) for x in parts), strict=True)
        attend = _attend if over == "rows" else _attend_pairs
        H = torch.cat([attend(*cut) for cut in cuts])  # (..., N/b, b, Dv)
    N, H = q.shape[-2], H.flatten(-3, -2)
    H = H.index_select(-2, torch.arange(N, device=H.device)) if is_symbolic(N) else H[..., :N, :]
    return H.reshape(*q.shape[:-1], v.shape[-1]).to(q.dtype)


def _attend(
    Q: Tensor, K: Tensor, V: Tensor, picks: Tensor, far: Tensor, u: Tensor,
    logs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend from blocks of queries to the blocks picked, and to the key that the others make.

    One softmax over both: with the largest of all exponents for t, ``h_i = (Σ_j exp(s_ij − t) v_j +
    exp(far − t) u) / (Σ_j exp(s_ij − t) + exp(far − t))``, or 0 where nothing may be attended.
    """
    picks = picks % K.shape[1]
    scores = Q @ _take(K, picks).flatten(-3, -2).mT  # (heads, N/b, b, kept b)
    scores = scores if logs is None else scores + _take(logs, picks).flatten(-3, -2).mT
    top = scores.detach().amax(-1, keepdim=True).maximum(far.detach())
    top = top.masked_fill(top == -math.inf, 0)
    near, rest = (scores - top).exp_(), (far - top).exp()
    total = near.sum(-1, keepdim=True) + rest
    mixed = near @ _take(V, picks).flatten(-3, -2)
    return (mixed + rest * u) / total.masked_fill(total == 0, 1)


def _attend_pairs(
    Q: Tensor, K: Tensor, V: Tensor, picks: Tensor, far: Tensor, u: Tensor,
    logs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Do what `_attend` does for pairs of blocks (heads, n kept), of which rows have any number."""
    (heads, n, b, _), m = Q.shape, K.shape[1]
    none, picks = (picks == n * m)[..., None, None], picks.clamp(max=n * m - 1)
    ours, theirs = picks // m, picks % m
    scores = (_take(Q, ours) @ _take(K, theirs).mT).masked_fill(none, -math.inf)
    scores = scores if logs is None else scores + _take(logs, theirs).mT  # (heads, n kept, b, b)
    most = scores.detach().amax(-1)  # (heads, n kept, b)
    top = far.detach().squeeze(-1).expand(heads, n, b)
    top = top.scatter_reduce(1, ours.unsqueeze(-1).expand_as(most), most, "amax")
    top = top.masked_fill(top == -math.inf, 0).unsqueeze(-1)  # (heads, n, b, 1)
    near, rest = (scores - _take(top, ours)).exp_(), (far - top).exp()
    parts = near @ F.pad(_take(V, theirs), (0, 1), value=1.0)  # (heads, n kept, b, Dv + 1)
    rows = (ours + torch.arange(heads, device=Q.device)[:, None] * n).flatten()
    found = F.pad(u, (0, 1), value=1.0) * rest  # (heads, n, b, Dv + 1)
    sums = found.flatten(0, 1).index_add(0, rows, parts.flatten(0, 1)).view_as(found)
    mixed, total = sums.split([u.shape[-1], 1], -1)
    return mixed / total.masked_fill(total == 0, 1)


def _take(x: Tensor, picks: Tensor) -> Tensor:
    """Return the blocks (heads, ..., b, D) of (heads, M/b, b, D) that are picked (heads, ...)."""
    heads, blocks, b, D = x.shape
    first = torch.arange(heads, device=x.device) * blocks
    rows = picks + first.view(-1, *[1] * (picks.dim() - 1))
    found = x.reshape(heads * blocks, b * D).index_select(0, rows.flatten())
    return found.view(*picks.shape, b, D)


def _put(x: Tensor, picks: Tensor, value: Any) -> Tensor:
    """Return a map (..., N/b, M/b) with a value in the places that are picked."""
    places = picks.flatten(-2) if picks.dim() == x.dim() else picks
    row = torch.cat([x.flatten(-2), x.flatten(-2)[..., :1]], -1)  # and a place past the end
    return row.scatter(-1, places, value)[..., :-1].unflatten(-1, x.shape[-2:])


def _far(coarse: Coarse, values: Tensor, sparse: bool) -> tuple[Tensor, Tensor]:
    """Make one key of all other blocks: its score (..., N/b, 1, 1), its value (..., N/b, 1, Dv)."""
    others = _put(coarse.mass, coarse.picks, -math.inf)
    others = torch.full_like(others, -math.inf) if sparse else others
    return _log_sum(others)[..., None, None], (_shares(others) @ values).unsqueeze(-2)


def _heads_at_a_time(q: Tensor, keys: int) -> int:
    """Count the heads whose exact scores stay in the cache of a CPU; elsewhere all of them."""
    if q.device.type != "cpu" or is_symbolic(q.shape[-2]):
        return math.prod(q.shape[:-2]) or 1
    return max(1, SCORES // (q.shape[-2] * keys))


# --- what they share: the resolution of blocks ---------------------------------------------------


def _coarse(
    Q: Tensor, K: Tensor, mask: Mask, query_mask: Tensor | None, block: int, kept: int, over: str
) -> Coarse:
    """Score pooled queries against pooled keys, and pick the best: of each row, or of the map."""
    logs = _logs(mask, K, block)
    queries = Mask(None if query_mask is None else query_mask.unsqueeze(-2))
    query_logs = _logs(queries, Q, block)
    scores = _pooled(Q, query_logs, block) @ _pooled(K, logs, block).mT
    mass = scores + (math.log(block) if logs is None else _log_sum(logs).unsqueeze(-2))
    found, (n, m) = mass.detach(), mass.shape[-2:]
    each = kept if is_symbolic(m) else min(kept, m)
    if over == "rows":
        places = m * torch.arange(n, device=Q.device)[:, None]
        return Coarse(scores, mass, found.topk(each).indices + places, logs)
    top = found.amax(-1, keepdim=True)
    found = found - top.masked_fill(top == -math.inf, 0)
    count = each * n
    if query_logs is None:
        return Coarse(scores, mass, found.flatten(-2).topk(count).indices, logs)
    there = (_log_sum(query_logs) > -math.inf).expand(mass.shape[:-1])
    found = found.masked_fill(~there.unsqueeze(-1), -math.inf)  # no queries, nothing to keep
    picks = found.flatten(-2).topk(count).indices
    rank = torch.arange(count, device=Q.device)
    beyond = rank >= each * there.sum(-1, keepdim=True)
    return Coarse(scores, mass, picks.masked_fill(beyond, n * m), logs)


def _logs(mask: Mask, x: Tensor, block: int) -> Tensor | None:
    """Logarithms (..., L/b, b) of how often each step counts; None where all count once."""
    L, given = x.shape[-2], mask.per_key()
    if given is None:
        if not is_symbolic(L) and L % block == 0:
            return None
        given = torch.ones(1, L, dtype=torch.bool, device=x.device)
    if given.dtype == torch.bool:
        given = torch.where(given, 0.0, -math.inf)
    column = narrowed(given, x.dtype).expand(*given.shape[:-1], L).mT
    return windows(column, block, -math.inf).squeeze(-1)


def _pooled(x: Tensor, logs: Tensor | None, block: int) -> Tensor:
    """Means (..., L/b, D) of blocks, over the steps as often as they count; 0 where none does."""
    x = windows(x, block)
    if logs is None:
        return x.mean(-2)
    return (_shares(logs).unsqueeze(-2) @ x).squeeze(-2)


def _shares(logs: Tensor) -> Tensor:
    """Softmax over the last dimension, and 0 where all is -inf."""
    return masked_softmax(torch.zeros_like(logs), logs)


def _log_sum(logs: Tensor) -> Tensor:
    """Logarithm of the sum of exponentials over the last dimension; -inf where all is."""
    opened, some = open_dead_rows(logs, logs.dtype)
    return opened.logsumexp(-1).masked_fill(~some[..., 0], -math.inf)


def _scaled(q: Tensor, scale: float | None) -> Tensor:
    return (scale or 1 / math.sqrt(q.shape[-1])) * q.to(wide(q))


def check_blocks(
    mask: Mask, q: Tensor, block: int, kept: int, over: str, sparse: bool, query_mask: Tensor | None
) -> None:
    """Check what MRA has of its own, and what a mask may be."""
    check_count("block", block, 1)
    check_count("kept", kept, 1)
    _check_over(over)
    check_flag("sparse", sparse)
    if mask.is_causal:
        raise ValueError(f"is_causal is True; expected False: {LATER}")
    mask.per_key()
    check_query_mask(query_mask, q)


def _check_over(over: str) -> None:
    if over not in OVER:
        raise ValueError(f"over is {over!r}; expected 'rows' or 'map'")


# --- the layer -----------------------------------------------------------------------------------
