"""MRA-2 and MRA-2-s: a few blocks of scores exactly, the others by their pooled score (chapter 8).

The equation of this module, with queries and keys in blocks I and J of b steps, is ::

    s_ij = q_i·k_j/√D          where J is among the `kept` blocks of the query's block I,
           q̄_I·k̄_J/√D          elsewhere (MRA-2), or −∞ (MRA-2-s)
    h_i  = Σ_j exp(s_ij) v_j / Σ_j exp(s_ij)

where q̄_I and k̄_J are the means of their blocks: the scores have two resolutions, 1 and b. Kept are
the blocks with the largest Σ_{j ∈ J} exp(q̄_I·k̄_J/√D): their pooled score decides, and how many keys
they have. Zeng et al. (2022) choose over the whole matrix, so that padded queries, or one row's
large scores, may take blocks from the others. Here each block of queries has its own `kept` blocks:
what other rows hold moves no choice, and all rows are equal work.

`mra_attention_reference` fills the (N, M) matrix of scores. `mra_attention` computes the kept
blocks, and lets all others of a row of blocks be one more key: they have the same weights for each
query of the block.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from derived_attention.attention.checks import (
    Mechanism,
    broadcasts,
    check_count,
    check_flag,
)
from derived_attention.attention.convention import full_precision, mechanism, prepare
from derived_attention.attention.layer import Heads, MultiheadAttention
from derived_attention.attention.linear import wide
from derived_attention.attention.masks import (
    Mask,
    flat_heads,
    masked_softmax,
    narrowed,
    open_dead_rows,
    within,
)
from derived_attention.attention.pooling import windows
from derived_attention.attention.softmax import sdpa

SCORES = 2**19  # about as many of them at a time on a CPU, for its cache
LATER = (
    "the pooled query of a block holds its later queries, which would move its coarse scores and "
    "the choice of its blocks"
)


class Coarse(NamedTuple):
    """The matrix of scores at the resolution of blocks."""

    scores: Tensor  # (..., N/b, M/b): q̄_I·k̄_J/√D
    mass: Tensor  # (..., N/b, M/b): the logarithm of what block J weighs by its pooled score
    picks: Tensor  # (..., N/b, kept): the blocks of largest mass
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
    sparse: bool = False,
    query_mask: Tensor | None = None,
) -> Tensor:
    """Attention matrix A (..., H, N, M) of MRA-2: softmax of scores at two resolutions.

    Arguments and errors are those of `mra_attention`.
    """
    mask, scale = prepare(q, k, None, attn_mask, is_causal, scale)
    _check(mask, q, block, kept, sparse, query_mask)
    with full_precision(q.device):
        Q, K = _scaled(q, scale), k.to(wide(q))
        coarse = _coarse(Q, K, mask, query_mask, block, kept)
        exact = torch.zeros_like(coarse.scores, dtype=torch.bool).scatter(-1, coarse.picks, True)
        exact, elsewhere = (_spread(x, Q, K, block) for x in (exact, coarse.scores))  # (..., N, M)
        scores = torch.where(exact, Q @ K.mT, elsewhere)
        given = within(exact, mask.given) if sparse else mask.given
        return masked_softmax(scores, given).to(q.dtype)


@mechanism(weights=mra_attention_weights)
def mra_attention_reference(
    q, k, v, mask, scale, *, block=32, kept=4, sparse=False, query_mask=None
) -> Tensor:
    """H = A V with the whole matrix A of `mra_attention_weights` in memory."""
    own: dict[str, Any] = dict(block=block, kept=kept, sparse=sparse, query_mask=query_mask)
    A = mra_attention_weights(q.to(wide(q)), k.to(wide(k)), **mask.keywords, scale=scale, **own)
    with full_precision(q.device):
        return (A.to(wide(q)) @ v.to(wide(q))).to(q.dtype)


def _spread(x: Tensor, Q: Tensor, K: Tensor, block: int) -> Tensor:
    """Repeat what is known of blocks (..., N/b, M/b) for all their pairs (..., N, M)."""
    rows, columns = (torch.arange(y.shape[-2], device=y.device) // block for y in (Q, K))
    return x[..., rows[:, None], columns]


# --- the same by blocks --------------------------------------------------------------------------


@mechanism(weights=mra_attention_weights, per_key=True)
def mra_attention(
    q, k, v, mask, scale, *, block=32, kept=4, sparse=False, query_mask=None
) -> Tensor:
    """MRA-2 [Zeng2022]: O(N kept b) exact scores, and the (N/b, M/b) pooled ones.

    Every block of queries attends its `kept` blocks of keys exactly. All others are one more key to
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
        Blocks of keys that each block of queries attends exactly, at least 1. A masked key is left
        out of its pooled key, and a block weighs as much as its keys that are there; with a
        floating mask m, key j counts exp(m_j) times.
    sparse : bool
        Whether to leave out all other blocks.
    query_mask : Tensor, optional
        Boolean, broadcastable to ``(..., H, N)``: False where a query is padding, which then is
        left out of the pooled query of its block.
    """
    _check(mask, q, block, kept, sparse, query_mask)
    M = k.shape[-2]
    if q.numel() == 0 or kept * block >= M:
        return sdpa(q, k, v, mask, scale)
    with full_precision(q.device):
        Q, K, V = _scaled(q, scale), k.to(wide(q)), v.to(wide(q))
        coarse = _coarse(Q, K, mask, query_mask, block, kept)
        far, u = _far(coarse, _pooled(V, coarse.logs, block), sparse)
        parts = [*(windows(x, block) for x in (Q, K, V)), coarse.picks, far, u]
        if coarse.logs is not None:
            parts.append(coarse.logs.expand(*parts[1].shape[:-1]).unsqueeze(-1))
        heads = _heads_at_a_time(q, kept * block)
        cuts = zip(*(flat_heads(x, q.dim() - 2).split(heads) for x in parts), strict=True)
        H = torch.cat([_attend(*cut) for cut in cuts])  # (..., N/b, b, Dv)
    H = H.flatten(-3, -2)[..., : q.shape[-2], :]
    return H.reshape(*q.shape[:-1], v.shape[-1]).to(q.dtype)


def _attend(
    Q: Tensor, K: Tensor, V: Tensor, picks: Tensor, far: Tensor, u: Tensor,
    logs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend from blocks of queries to the blocks picked, and to the key that the others make.

    One softmax over both: with the largest of all exponents for t, ``h_i = (Σ_j exp(s_ij − t) v_j +
    exp(far − t) u) / (Σ_j exp(s_ij − t) + exp(far − t))``, or 0 where nothing may be attended.
    """
    scores = Q @ _take(K, picks).mT  # (heads, N/b, b, kept b)
    scores = scores if logs is None else scores + _take(logs, picks).mT
    top = scores.detach().amax(-1, keepdim=True).maximum(far.detach())
    top = top.masked_fill(top == -math.inf, 0)
    near, rest = (scores - top).exp_(), (far - top).exp()
    total = near.sum(-1, keepdim=True) + rest
    return (near @ _take(V, picks) + rest * u) / total.masked_fill(total == 0, 1)


def _take(x: Tensor, picks: Tensor) -> Tensor:
    """Return the blocks (heads, n, kept b, D) of (heads, M/b, b, D) that are picked."""
    heads, blocks, b, D = x.shape
    rows = picks + torch.arange(heads, device=x.device)[:, None, None] * blocks
    found = x.reshape(heads * blocks, b * D).index_select(0, rows.flatten())
    return found.view(heads, picks.shape[1], picks.shape[2] * b, D)


def _far(coarse: Coarse, values: Tensor, sparse: bool) -> tuple[Tensor, Tensor]:
    """Make one key of all other blocks: its score (..., N/b, 1, 1), its value (..., N/b, 1, Dv)."""
    others = coarse.mass.scatter(-1, coarse.picks, -math.inf)
    others = torch.full_like(others, -math.inf) if sparse else others
    return _log_sum(others)[..., None, None], (_shares(others) @ values).unsqueeze(-2)


def _heads_at_a_time(q: Tensor, keys: int) -> int:
    """Count the heads whose exact scores stay in the cache of a CPU; elsewhere all of them."""
    return max(1, SCORES // (q.shape[-2] * keys)) if q.device.type == "cpu" else q.numel()


# --- what they share: the resolution of blocks ---------------------------------------------------


def _coarse(
    Q: Tensor, K: Tensor, mask: Mask, query_mask: Tensor | None, block: int, kept: int
) -> Coarse:
    """Score pooled queries against pooled keys, and pick the `kept` best of each row."""
    logs = _logs(mask, K, block)
    queries = Mask(None if query_mask is None else query_mask.unsqueeze(-2))
    scores = _pooled(Q, _logs(queries, Q, block), block) @ _pooled(K, logs, block).mT
    mass = scores + (math.log(block) if logs is None else _log_sum(logs).unsqueeze(-2))
    picks = mass.detach().topk(min(kept, mass.shape[-1])).indices
    return Coarse(scores, mass, picks, logs)


def _logs(mask: Mask, x: Tensor, block: int) -> Tensor | None:
    """Logarithms (..., L/b, b) of how often each step counts; None where all count once."""
    L, given = x.shape[-2], mask.per_key()
    if given is None:
        if L % block == 0:
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


def _check(
    mask: Mask, q: Tensor, block: int, kept: int, sparse: bool, query_mask: Tensor | None
) -> None:
    check_count("block", block, 1)
    check_count("kept", kept, 1)
    check_flag("sparse", sparse)
    if mask.is_causal:
        raise ValueError(f"is_causal is True; expected False: {LATER}")
    mask.per_key()
    if query_mask is not None:
        _check_queries(query_mask, q)


def _check_queries(query_mask: Tensor, q: Tensor) -> None:
    if not isinstance(query_mask, Tensor) or query_mask.dtype != torch.bool:
        kind = type(query_mask).__name__
        kind = f"has dtype {query_mask.dtype}" if kind == "Tensor" else f"is of type {kind}"
        raise TypeError(f"query_mask {kind}; expected a torch.bool Tensor")
    sizes, queries = tuple(query_mask.shape), tuple(q.shape[:-1])
    if not broadcasts(sizes, queries):
        raise ValueError(
            f"query_mask has shape {sizes}; expected one that broadcasts to {queries}, the queries'"
        )


# --- the layer -----------------------------------------------------------------------------------


class MRAAttention(MultiheadAttention):
    """MRA-2 in H heads, with the interface and the parameters of `MultiheadAttention`.

    Padded keys are left out of pooled keys, and padded queries of pooled queries where `query` and
    `key` are one tensor. The forward pass takes neither `attn_mask` nor `is_causal`; padding goes
    into `key_padding_mask`.

    Parameters
    ----------
    block, kept, sparse
        As in `mra_attention`.
    """

    shown = ("block", "kept", "sparse")
    refused = ("attn_mask", "is_causal")
    because = LATER

    def __init__(
        self,
        *args: Any,
        block: int = 32,
        kept: int = 4,
        sparse: bool = False,
        attention: Mechanism = mra_attention,
        **options: Any,
    ) -> None:
        super().__init__(*args, attention=attention, **options)
        self.block, self.kept = check_count("block", block, 1), check_count("kept", kept, 1)
        check_flag("sparse", sparse)
        self.sparse = sparse

    def mechanism(self, base: Mechanism, heads: Heads) -> Mechanism:
        """Say how long blocks are, and how many are kept."""
        return functools.partial(base, block=self.block, kept=self.kept, sparse=self.sparse)

    def attend(self, run: Mechanism, q: Tensor, k: Tensor, v: Tensor | None, mask: Mask) -> Tensor:
        """Say which queries are padding."""
        run = functools.partial(run, query_mask=mask.queries)
        return super().attend(run, q, k, v, mask)
