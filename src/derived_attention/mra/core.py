"""MRA-2 and MRA-2-s: a few blocks of exact scores, and pooled scores for the others (appendix D).

The equation of this module, with queries and keys in blocks I and J of b steps, is ::

    s_ij = q_i·k_j/√D          where J is among the `kept` blocks of the query's block I,
           q̄_I·k̄_J/√D          elsewhere (MRA-2), or −∞ (MRA-2-s)
    h_i  = Σ_j exp(s_ij) v_j / Σ_j exp(s_ij)

where q̄_I and k̄_J are the means of their blocks: the scores have two resolutions, 1 and b. The
kept blocks have the largest Σ_{j ∈ J} exp(q̄_I·k̄_J/√D), by pooled score and number of keys.

There are two ways to keep `kept` blocks for each of the n = ⌈N/b⌉ blocks of queries. By default,
``over="rows"``, each row of blocks keeps its own `kept` best. The choice does not depend on other
rows, and all rows are equal work. With ``over="map"``, as in the code of Zeng et al. (2022), the
n `kept` best of the whole map are kept, by the pooled score minus the largest one of its row. Each
row then keeps its best block, and rows with many blocks of similar weight keep more of them.

The formula fills the (N, M) matrix of scores. `mra_attention` computes the kept blocks, and
replaces all others of a row of blocks by one more key, as they have the same weights for each query
of the block.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from derived_attention import formulas
from derived_attention.common.blocks import by_heads
from derived_attention.common.checks import (
    accumulation_dtype,
    check_count,
    check_flag,
    check_query_mask,
    product_dtype,
)
from derived_attention.common.convention import (
    full_precision,
    in_full,
    is_short,
    mechanism,
    prepare,
    reference_of,
    scaled,
)
from derived_attention.common.masks import (
    Mask,
    masked_softmax,
    open_dead_rows,
    take,
    within,
)
from derived_attention.common.pooling import block_logs, windows
from derived_attention.softmax.core import sdpa

DENSE = 64  # queries and keys up to which the matrix of all scores is faster
OVER = ("rows", "map")  # what the best blocks are chosen over
LATER = (
    "the pooled query of a block depends on its later queries, and so do its coarse scores and the "
    "choice of its blocks"
)


class Coarse(NamedTuple):
    """The matrix of scores at the resolution of blocks."""

    scores: Tensor  # (..., N/b, M/b): q̄_I·k̄_J/√D
    mass: Tensor  # (..., N/b, M/b): the logarithm of the weight of block J by its pooled score
    # (..., n, kept) or (..., n kept): the blocks kept, as indices of the flattened map; an index
    # past its end stands for no block.
    picks: Tensor
    logs: Tensor | None  # (..., M/b, b): log of how often each key counts; None if all count once


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
    sizes: dict[str, Any] = dict(block=block, kept=kept, over=over, sparse=sparse)
    own = check_blocks(q, k, None, mask, scale, **sizes, query_mask=query_mask)
    identity = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)
    identity = identity.expand(*q.shape[:-2], -1, -1)
    return in_full(formulas.mra)(q, k, identity, mask, scale, **own)


def check_blocks(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Mask, scale: float | None, *, block: int = 32,
    kept: int = 4, over: str = "rows", sparse: bool = False, query_mask: Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Check the options of MRA, and the mask; return the options."""
    check_sizes(block, kept, over, sparse)
    if mask.is_causal:
        raise ValueError(f"is_causal is True; expected False: {LATER}")
    if mask.given is not None:
        mask.per_key()
    if query_mask is not None:
        check_query_mask(query_mask, q)
    return dict(block=block, kept=kept, over=over, sparse=sparse, query_mask=query_mask)


@mechanism(
    formula=formulas.mra, checks=check_blocks, weights=mra_attention_weights, per_key=True,
    alone=False,
)  # fmt: skip
def mra_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    block: int = 32,
    kept: int = 4,
    over: Any = "rows",
    sparse: bool = False,
    query_mask: Any = None,
) -> Tensor:
    """MRA-2 attention [Zeng2022]: exact scores in some blocks, and scores of block means elsewhere.

    It computes O(N kept b) exact scores, and (N/b) (M/b) pooled ones.
    Every block of queries attends some blocks of keys exactly. All other blocks act as one more
    key, with the sum of their weights and the mean of their values; MRA-2-s, ``sparse=True``,
    leaves them out. If `kept` is the number of blocks or more, this is `softmax_attention`. The
    choice of blocks is a constant to the gradient. Sums are in float32 at least, under autocast
    too.

    Parameters
    ----------
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean:
        True where a key may be attended. Floating: added to the scores, finite or -inf; -8192 and
        below count as -inf. Key j counts exp(m_j) times in its pooled key and in the weight of its
        block, and a masked key in neither.
    is_causal : bool
        Has to be False: the pooled query of a block depends on its later queries.
    block : int
        b, the length of a block, at least 1. The last block may be shorter.
    kept : int
        Blocks of keys that each block of queries attends exactly, at least 1; the mean number of
        them with ``over="map"``.
    over : str
        ``"rows"``: each block of queries has its own `kept` best blocks. ``"map"``, as in the code
        of [Zeng2022]: for n blocks of queries, the n `kept` pairs of blocks whose pooled score is
        nearest to the largest of its row, at least one in each row. It computes as many exact
        scores.
    sparse : bool
        Whether to leave out all other blocks.
    query_mask : Tensor, optional
        Boolean, broadcastable to ``(..., H, N)``: False where a query is padding, which is left
        out of the pooled query of its block.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> mra_attention(q, k, v, block=2, kept=2).shape
    torch.Size([2, 4, 10, 8])
    """
    M = k.shape[-2]
    if q.numel() == 0 or kept * block >= M:
        return sdpa(q, k, v, mask, scale)
    with full_precision(q.device):
        dtype = product_dtype(q) if over == "rows" else accumulation_dtype(q)
        Q, K, V = scaled(q, scale, dtype), k.to(dtype), v.to(dtype)
        coarse = _coarse(Q, K, mask, query_mask, block, kept, over)
        if is_short(q, k, DENSE):
            return _attend_densely(Q, K, V, coarse, block, sparse).to(q.dtype)
        far, u = _far(coarse, _block_means(V, coarse.logs, block), sparse)
        parts = [*(windows(x, block) for x in (Q, K, V)), coarse.picks, far, u]
        if coarse.logs is not None:
            parts.append(coarse.logs.expand(*parts[1].shape[:-1]).unsqueeze(-1))
        attend = _attend if over == "rows" else _attend_pairs
        H = by_heads(attend, q, kept * block, parts)  # (..., N/b, b, Dv)
    H = H.flatten(-3, -2)[..., : q.shape[-2], :]
    return H.reshape(*q.shape[:-1], v.shape[-1]).to(q.dtype)


mra_attention_reference = reference_of(mra_attention)


def _attend_densely(
    Q: Tensor, K: Tensor, V: Tensor, coarse: Coarse, block: int, sparse: bool
) -> Tensor:
    """Attend by the matrix of all scores, which outside of the picked blocks are pooled ones."""
    N, (n, m), picks, pooled = Q.shape[-2], coarse.mass.shape[-2:], coarse.picks, coarse.scores
    index = picks.flatten(-2) if picks.dim() == pooled.dim() else picks
    near = coarse.mass.new_zeros(*index.shape[:-1], n * m + 1).scatter(-1, index, 1.0)
    near = near[..., :-1].unflatten(-1, (n, m))  # 1 for the picked blocks
    Q, K, V = (windows(x, block).flatten(-3, -2).to(pooled.dtype) for x in (Q, K, V))  # padded
    for dim in (-1, -2):
        near, pooled = (x.repeat_interleave(block, dim) for x in (near, pooled))
    near, pooled = (x[..., : Q.shape[-2], :] for x in (near, pooled))  # of less than a block
    S = torch.lerp(pooled, Q @ K.mT, near)
    mask = None if coarse.logs is None else coarse.logs.flatten(-2).unsqueeze(-2)
    A = masked_softmax(S, within(near > 0, mask) if sparse else mask)
    return (A @ V)[..., :N, :]


def _attend(
    Q: Tensor, K: Tensor, V: Tensor, picks: Tensor, far: Tensor, u: Tensor,
    logs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend from blocks of queries to the picked blocks, and to one key for all others.

    One softmax over both: with t the largest of all exponents, ``h_i = (Σ_j exp(s_ij − t) v_j +
    exp(far − t) u) / (Σ_j exp(s_ij − t) + exp(far − t))``, or 0 if nothing may be attended.
    """
    picks = picks % K.shape[1]
    scores = Q @ take(K, picks).flatten(-3, -2).mT  # (heads, N/b, b, kept b)
    if logs is not None:
        scores = scores + take(logs, picks).flatten(-3, -2).mT.to(scores.dtype)
    top = scores.detach().amax(-1, keepdim=True).maximum(far.detach()).to(scores.dtype)
    top = top.masked_fill(top == -math.inf, 0)
    near, rest = (scores - top).exp_(), (far - top).exp()
    total = near.sum(-1, keepdim=True, dtype=rest.dtype) + rest
    mixed, total = near @ take(V, picks).flatten(-3, -2), total.masked_fill(total == 0, 1)
    rest, total, u = (x.to(mixed.dtype) for x in (rest, total, u))
    return torch.addcmul(mixed, rest, u) / total


def _attend_pairs(
    Q: Tensor, K: Tensor, V: Tensor, picks: Tensor, far: Tensor, u: Tensor,
    logs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend as `_attend` for pairs of blocks (heads, n kept), any number of them in a row."""
    (heads, n, b, _), m = Q.shape, K.shape[1]
    none, picks = (picks == n * m)[..., None, None], picks.clamp(max=n * m - 1)
    row, column = picks // m, picks % m
    scores = (take(Q, row) @ take(K, column).mT).masked_fill(none, -math.inf)
    scores = scores if logs is None else scores + take(logs, column).mT  # (heads, n kept, b, b)
    most = scores.detach().amax(-1)  # (heads, n kept, b)
    top = far.detach().squeeze(-1).expand(heads, n, b)
    top = top.scatter_reduce(1, row.unsqueeze(-1).expand_as(most), most, "amax")
    top = top.masked_fill(top == -math.inf, 0).unsqueeze(-1)  # (heads, n, b, 1)
    near, rest = (scores - take(top, row)).exp_(), (far - top).exp()
    parts = near @ F.pad(take(V, column), (0, 1), value=1.0)  # (heads, n kept, b, Dv + 1)
    index = (row + torch.arange(heads, device=Q.device)[:, None] * n).flatten()
    others = F.pad(u, (0, 1), value=1.0) * rest  # (heads, n, b, Dv + 1)
    sums = others.flatten(0, 1).index_add(0, index, parts.flatten(0, 1)).view_as(others)
    mixed, total = sums.split([u.shape[-1], 1], -1)
    return mixed / total.masked_fill(total == 0, 1)


def _far(coarse: Coarse, values: Tensor, sparse: bool) -> tuple[Tensor, Tensor]:
    """Return the key of all other blocks: score (..., N/b, 1, 1) and value (..., N/b, 1, Dv)."""
    mass, picks = coarse.mass, coarse.picks
    index = picks.flatten(-2) if picks.dim() == mass.dim() else picks
    row = torch.cat([mass.flatten(-2), mass.flatten(-2)[..., :1]], -1)  # one entry past the end
    others = row.scatter(-1, index, -math.inf)[..., :-1].unflatten(-1, mass.shape[-2:])
    others = torch.full_like(others, -math.inf) if sparse else others
    return _log_sum(others)[..., None, None], (_shares(others) @ values).unsqueeze(-2)


# --- the resolution of blocks --------------------------------------------------------------------


def _coarse(
    Q: Tensor, K: Tensor, mask: Mask, query_mask: Tensor | None, block: int, kept: int, over: str
) -> Coarse:
    """Score pooled queries against pooled keys, and pick the best of each row, or of the map."""
    logs = block_logs(mask.given, K, block)
    query_logs = block_logs(
        query_mask if query_mask is None else query_mask.unsqueeze(-2), Q, block
    )
    scores = _block_means(Q, query_logs, block) @ _block_means(K, logs, block).mT
    mass = scores + (math.log(block) if logs is None else _log_sum(logs).unsqueeze(-2))
    weight, (n, m) = mass.detach(), mass.shape[-2:]
    each = min(kept, m)
    if over == "rows":
        first = m * torch.arange(n, device=Q.device)[:, None]
        return Coarse(scores, mass, weight.topk(each).indices + first, logs)
    top = weight.amax(-1, keepdim=True)
    weight = weight - top.masked_fill(top == -math.inf, 0)
    count = each * n
    if query_logs is None:
        return Coarse(scores, mass, weight.flatten(-2).topk(count).indices, logs)
    present = (_log_sum(query_logs) > -math.inf).expand(mass.shape[:-1])
    weight = weight.masked_fill(~present.unsqueeze(-1), -math.inf)  # rows without queries keep none
    picks = weight.flatten(-2).topk(count).indices
    rank = torch.arange(count, device=Q.device)
    beyond = rank >= each * present.sum(-1, keepdim=True)
    return Coarse(scores, mass, picks.masked_fill(beyond, n * m), logs)


def _block_means(x: Tensor, logs: Tensor | None, block: int) -> Tensor:
    """Return means (..., L/b, D) of blocks, with steps as often as they count; 0 if none does."""
    x = windows(x, block)
    if logs is None:
        return x.mean(-2, dtype=torch.promote_types(x.dtype, torch.float32))
    return (_shares(logs).unsqueeze(-2) @ x.to(logs.dtype)).squeeze(-2)


def _shares(logs: Tensor) -> Tensor:
    """Return the softmax over the last dimension, and 0 if all is -inf."""
    return masked_softmax(torch.zeros_like(logs), logs)


def _log_sum(logs: Tensor) -> Tensor:
    """Return the log of the sum of exponentials over the last dimension; -inf if all are."""
    opened, alive = open_dead_rows(logs, logs.dtype)
    return opened.logsumexp(-1).masked_fill(~alive[..., 0], -math.inf)


def check_sizes(block: int, kept: int, over: str, sparse: bool) -> None:
    """Check the options that a layer has."""
    for name, value in (("block", block), ("kept", kept)):
        if value.__class__ is not int or value < 1:
            check_count(name, value, 1)
    if over not in OVER:
        raise ValueError(f"over is {over!r}; expected 'rows' or 'map'")
    if sparse.__class__ is not bool:
        check_flag("sparse", sparse)
