"""Sparse attention: softmax over a few keys, in patterns that blocks can cover (chapter 4).

The equation of this module, with a set S(i) of keys for each query i, is ::

    h_i = Σ_{j ∈ S(i)} a_ij v_j,    a_ij = exp(q_i·k_j/√D) / Σ_{l ∈ S(i)} exp(q_i·k_l/√D)

and its patterns are ::

    window    S(i) = {j : |i − j| ≤ window}
    strided   S(i) = {j : |i − j| < stride, or i − j is a multiple of stride}
    fixed     S(i) = {j : ⌊j/stride⌋ = ⌊i/stride⌋, or j mod stride ≥ stride − summary}

without the j > i if `is_causal`. The last two are those of Child et al. (2019), both of their sets
in one head. A ``<pattern>_mask`` is S as a matrix, a ``<pattern>_attention_reference`` is softmax
attention under it, and a ``<pattern>_attention`` gives the same H and forms no (N, M) matrix. All
three can also run PyTorch's FlexAttention on a GPU: see `derived_attention.sparse.flex`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from derived_attention import formulas
from derived_attention.common.blocks import stands_for_many, to_front
from derived_attention.common.checks import check_count, check_flag, is_symbolic, wide
from derived_attention.common.convention import (
    depends_on_position,
    extend,
    full_precision,
    in_full,
    in_groups,
    mechanism,
    scaled,
)
from derived_attention.common.masks import Mask, flat_heads, key_heads, masked_softmax, within
from derived_attention.softmax.core import sdpa
from derived_attention.sparse import flex

BLOCK = 32  # fewest queries in a block of a window: smaller blocks are slower
SCORES = 2**18  # of two groups, in memory at a time: they fit in the cache of a processor
SCORES_ELSEWHERE = 2**27  # half a gigabyte, so that a GPU takes all heads at once
Device = torch.device | str | None

# --- the patterns as matrices -------------------------------------------------------------------


def window_mask(
    N: int, M: int, window: int, *, is_causal: bool = False, device: Device = None
) -> Tensor:
    """Boolean (N, M) mask of a local window: query i attends the keys with ``|i − j| ≤ window``.

    With `is_causal` only keys j ≤ i. TypeError for numbers that are not whole, ValueError for
    N, M or `window` below 0.
    """
    check_count("window", window, 0)
    i, j = _pairs(N, M, device)
    return _past(i, j, flex.in_window(i, j, window), is_causal)


def strided_mask(
    N: int, M: int, stride: int, *, is_causal: bool = False, device: Device = None
) -> Tensor:
    """Boolean (N, M) mask: query i attends its neighbours, and every `stride`-th key from itself.

    ``|i − j| < stride``, or i − j a multiple of `stride`: Child et al.'s strided pattern, for
    data with a period, such as the rows of an image. With `is_causal` any key reaches any later
    query in two layers. With a `stride` of 1 every key is attended. Otherwise as `window_mask`.
    """
    check_count("stride", stride, 1)
    i, j = _pairs(N, M, device)
    return _past(i, j, flex.in_strided(i, j, stride), is_causal)


def fixed_mask(
    N: int, M: int, stride: int, summary: int = 1, *, is_causal: bool = False, device: Device = None
) -> Tensor:
    """Boolean (N, M) mask: query i attends its block, and the last `summary` keys of every block.

    Child et al.'s fixed pattern, for data without a period, such as text. Blocks of `stride`
    positions start at 0, stride, 2 stride, ...; a shorter last block has fewer summaries or none.
    `summary` is from 1 to `stride`. Otherwise as `window_mask`.
    """
    check_fixed(stride, summary)
    i, j = _pairs(N, M, device)
    return _past(i, j, flex.in_fixed(i, j, stride, summary), is_causal)


def _past(i: Tensor, j: Tensor, keep: Tensor, is_causal: bool) -> Tensor:
    check_flag("is_causal", is_causal)
    return keep & (j <= i) if is_causal else keep


def _pairs(N: int, M: int, device: Device) -> tuple[Tensor, Tensor]:
    check_count("N", N, 0)
    check_count("M", M, 0)
    return torch.arange(N, device=device)[:, None], torch.arange(M, device=device)  # (N, 1), (M,)


# --- attention by blocks ------------------------------------------------------------------------


@mechanism(per_key=True)
@depends_on_position
@in_groups
def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    window: int,
    fused: Any = None,
) -> Tensor:
    """Softmax attention of query i to the keys ``|i − j| ≤ window``, in O(N window) time.

    Memory is O(N window), too. Queries are cut into blocks; each block attends the stretch of keys
    that its windows cover. All blocks are one fused call, under a banded mask.

    Parameters
    ----------
    window : int
        Keys on each side, at least 0.
    fused : bool, optional
        True: run FlexAttention, or raise a ValueError where it cannot run, as for a mask of numbers
        or more than 256 features. False: the form above. Left out: FlexAttention on a GPU where it
        can run, has been tried and agrees; it has one derivative.
    """
    check_count("window", window, 0)
    if flex.runs(fused, "window", q, k, v, mask, by_default=True):
        return flex.attend("window", (window,), q, k, v, mask, scale)
    if is_symbolic(q.shape[-2], k.shape[-2]) or mask.by_query:
        return in_full(formulas.window)(q, k, v, mask, scale, window=window)
    column = _key_column(mask, k.shape[-2])
    if q.numel() == 0 or k.numel() == 0:
        return sdpa(q, k, v, Mask(), scale)
    N, M, is_causal = q.shape[-2], k.shape[-2], mask.is_causal
    window = min(window, max(N, M) - 1)
    C = min(max(window, BLOCK), N)  # queries in a block
    W = window + C + (0 if is_causal else window)  # keys in its stretch
    rows = -(-N // C)

    def stretches(x: Tensor) -> Tensor:  # (..., rows, W, D): every C-th from -window, 0 outside x
        after = (rows - 1) * C + W - window - x.shape[-2]
        return extend(x, after, before=window).unfold(-2, W, C).mT  # a view: overlaps stored once

    start = torch.arange(rows, device=q.device)[:, None, None] * C - window
    i, j = torch.arange(C, device=q.device)[:, None], start + torch.arange(W, device=q.device)
    band = _past(i, j[:1], (i - j[:1]).abs() <= window, is_causal)  # (1, C, W): one for all blocks
    keep = band & (0 <= j) & (j < M)  # (rows, C, W)
    blocks = extend(q, rows * C - N) if rows * C > N else q
    blocks = blocks.unflatten(-2, (rows, C))  # (..., H, rows, C, D)
    near = Mask(within(keep, None if column is None else stretches(column).mT))
    keys, values = stretches(k), stretches(v)  # (..., H, rows, W, D), or (..., G, 1, rows, W, D)
    if blocks.shape[:-3] == keys.shape[:-3]:
        H = sdpa(blocks, keys, values, near, scale)
    else:  # a call for each head of the groups: one for all would copy keys, or repeat the mask
        keys, values = keys.squeeze(-4), values.squeeze(-4)
        given = near.on(blocks)  # (rows, C, W), or (..., 1, 1, rows, C, W)
        near = near if given is None or given.dim() < 4 else Mask(given.squeeze(-4))
        H = torch.stack([sdpa(x, keys, values, near, scale) for x in blocks.unbind(-4)], -4)
    return H.flatten(-3, -2)[..., :N, :]


@mechanism(per_key=True)
@depends_on_position
@in_groups
def strided_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    stride: int,
    fused: Any = None,
) -> Tensor:
    """Softmax attention under `strided_mask`, in O(N (3 stride + M/stride)) time, O(N + M) memory.

    In a table with `stride` columns, filled row by row, a query attends two groups of keys: its
    neighbours, by blocks, and its column. A stride near √M is the cheapest. One softmax runs over
    both groups, and a key in both is left out of the second. Scores are computed for some queries
    at a time, and again in the backward pass. Sums are in float32 at least, under autocast too. For
    a stride near M, where nearly all keys are attended, `softmax_attention` is cheaper.

    Parameters
    ----------
    stride : int
        At least 1.
    fused : bool, optional
        True: run FlexAttention, or raise a ValueError where it cannot run, as for a mask of numbers
        or more than 256 features; it has one derivative. False, or left out: the form above.
        FlexAttention computes whole blocks of 128 queries and keys: N M scores for a stride up to
        128, and at a stride of √M ≥ 256 some 64 times as many as the form above.
    """
    check_count("stride", stride, 1)
    if flex.runs(fused, "strided", q, k, v, mask, by_default=False):
        return flex.attend("strided", (stride,), q, k, v, mask, scale)
    if mask.by_query:
        return in_full(formulas.strided)(q, k, v, mask, scale, stride=stride)
    return _two_groups(q, k, v, mask, scale, stride, 0)


@mechanism(per_key=True)
@depends_on_position
@in_groups
def fixed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    stride: int,
    summary: int = 1,
    fused: Any = None,
) -> Tensor:
    """Softmax attention under `fixed_mask`: O(N (stride + summary M/stride)) time, O(N + M) memory.

    A query attends two groups of keys: its own block, and the summaries of all blocks, which are
    the same keys for all queries. One softmax runs over both, and the summaries of a query's own
    block are left out of the second. Otherwise as `strided_attention`.

    Parameters
    ----------
    stride : int
        Length of a block, at least 1.
    summary : int
        Keys at the end of each block that every query attends, from 1 to `stride`.
    fused : bool, optional
        As in `strided_attention`.
    """
    check_fixed(stride, summary)
    if flex.runs(fused, "fixed", q, k, v, mask, by_default=False):
        return flex.attend("fixed", (stride, summary), q, k, v, mask, scale)
    if mask.by_query:
        return in_full(formulas.fixed)(q, k, v, mask, scale, stride=stride, summary=summary)
    return _two_groups(q, k, v, mask, scale, stride, summary)


def _two_groups(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, stride: int, summary: int
) -> Tensor:
    """Attend near keys and far ones: the summaries of blocks, or a column if `summary` is 0."""
    column, lengths = _key_column(mask, k.shape[-2]), (q.shape[-2], k.shape[-2])
    if q.numel() == 0 or k.numel() == 0:
        return sdpa(q, k, v, Mask(), scale)
    size = stride if is_symbolic(*lengths) else min(stride, max(lengths))
    groups = _Groups(size, min(summary, size), mask.is_causal, column is not None)
    Q, K, V = scaled(q, scale), k.to(wide(q)), v.to(wide(q))
    if column is not None:  # the mask is one more feature of the key, and the query's is 1
        lowest = torch.finfo(K.dtype).min / 4
        if column.dtype == torch.bool:
            column = torch.zeros_like(column, dtype=K.dtype).masked_fill(~column, lowest)
        column = column.to(K.dtype).clamp(min=lowest).expand(*K.shape[:-1], 1)
        Q, K = torch.cat([Q, torch.ones_like(Q[..., :1])], -1), torch.cat([K, column], -1)
    K, V = (x.expand(*Q.shape[:-2], -1, -1) for x in (K, V))  # heads that share keep sharing
    with full_precision(q.device):
        if torch.compiler.is_compiling() or is_symbolic(q.shape[-2], k.shape[-2]):
            return groups.whole(Q, K, V).to(q.dtype)
        return _InGroups.apply(groups, Q, K, V).to(q.dtype)


class _Groups(NamedTuple):
    """Which keys a block of `size` queries attends, and products with both groups of them.

    Near keys are the blocks of keys around its own; far keys are the query's column of the table
    or, with a `summary`, the last keys of each block. Keys and values of b heads are padded blocks
    (b, ·, size, D): one before the first, and as many after the last as the queries need.
    """

    size: int
    summary: int
    is_causal: bool
    masked: bool  # whether a mask gives some keys the lowest score

    @property
    def around(self) -> tuple[int, int]:
        """How many near blocks of keys precede a query's own, and how many there are in all."""
        if self.summary:
            return 0, 1
        return 1, 2 if self.is_causal else 3

    def whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the result with all scores in memory, which has derivatives of any order."""
        N, M = q.shape[-2], k.shape[-2]
        sizes = (self.size, self.summary) if self.summary else (self.size,)
        pattern = fixed_mask if self.summary else strided_mask
        keep = pattern(N, M, *sizes, is_causal=self.is_causal, device=q.device)
        scores = q @ k.mT
        return masked_softmax(scores, keep & (scores > _closed(scores))) @ v

    def blocks(self, x: Tensor, rows: int, before: int = 0) -> Tensor:
        """Cut x (b, n, D) into `rows` blocks, padded with zeros, after `before` blocks of zeros."""
        x = extend(x, rows * self.size - x.shape[1], before=before * self.size)
        return x.unflatten(1, (before + rows, self.size))

    def near(self, x: Tensor, start: int, rows: int) -> Tensor:
        """Return the near keys (b · rows, W, D) of `rows` blocks of queries from `start` on."""
        before, width = self.around
        flat = x[:, start + 1 - before :].flatten(1, 2)
        return flat.unfold(1, width * self.size, self.size).mT[:, :rows].flatten(0, 1)

    def far(self, x: Tensor, seen: int) -> Tensor:
        """Return the far keys in the first `seen` blocks, for a product with `across` queries."""
        x = x[:, 1 : 1 + seen]
        return x[:, :, self.size - self.summary :].flatten(1, 2) if self.summary else _across(x)

    def across(self, x: Tensor) -> Tensor:
        """Return x (b, rows, size, ·) in the batches that meet one set of far keys."""
        return x.flatten(1, 2) if self.summary else _across(x)

    def products(self, S: Tensor, x: Tensor, y: Tensor, start: int, seen: int) -> None:
        """Fill S (b, rows, size, W + ·) with products of blocks x and both groups of y."""
        W, rows = self.around[1] * self.size, x.shape[1]
        S.flatten(0, 1)[..., :W].baddbmm_(x.flatten(0, 1), self.near(y, start, rows).mT, beta=0)
        pair = self.across(x), self.far(y, seen).mT
        if self.summary:
            S.flatten(1, 2)[..., W:].baddbmm_(*pair, beta=0)
        elif len(S) == 1:  # without a copy
            S[0, ..., W:].transpose(0, 1).baddbmm_(*pair, beta=0)
        else:
            S[..., W:] = _along(torch.bmm(*pair), len(S))

    def gather(self, out: Tensor, P: Tensor, y: Tensor, start: int, seen: int) -> None:
        """Add the sums of both groups of y, weighted by P, to blocks `out`."""
        W, rows = self.around[1] * self.size, out.shape[1]
        out.flatten(0, 1).baddbmm_(P.flatten(0, 1)[..., :W], self.near(y, start, rows))
        pair = self.across(P[..., W:]), self.far(y, seen)
        if self.summary:
            out.flatten(1, 2).baddbmm_(*pair)
        else:
            out += _along(torch.bmm(*pair), len(out))

    def spread(self, dy: Tensor, P: Tensor, x: Tensor, start: int, seen: int) -> None:
        """Add blocks x, weighted by P, to both groups of `dy`: the adjoint of `gather`."""
        before, width = self.around
        C, W, rows = self.size, width * self.size, x.shape[1]
        for part in range(width):
            at = start + 1 - before + part
            dy[:, at : at + rows] += P[..., part * C : (part + 1) * C].mT @ x
        pair, far = (self.across(P[..., W:]).mT, self.across(x)), dy[:, 1 : 1 + seen]
        if self.summary:
            far[:, :, C - self.summary :] += torch.bmm(*pair).unflatten(1, (seen, self.summary))
        elif len(dy) == 1:  # all far keys, for a few queries: without a copy
            far[0].transpose(0, 1).baddbmm_(*pair)
        else:
            far += _along(torch.bmm(*pair), len(dy))

    def close(self, S: Tensor, band: Tensor | None, start: int, seen: int, M: int) -> None:
        """Set scores to -∞ of keys that are padding, not in the pattern, or in both groups."""
        (before, width), C, rows = self.around, self.size, S.shape[1]
        last = -(-M // C) - 1  # the last block of keys, which has `in_last` of them
        in_last, W = M - last * C, width * C
        if band is not None:
            S[..., :W] += band
        for part in range(width):
            first, at = start - before + part, slice(part * C, (part + 1) * C)
            if first < 0:
                S[:, 0, :, at] = -math.inf
            if (a := max(last - first, -1)) < rows:
                if a >= 0:
                    S[:, a, :, part * C + in_last : at.stop] = -math.inf
                S[:, a + 1 :, :, at] = -math.inf
        each = self.summary or 1
        if (count := min(seen - start, rows)) > 0:  # far keys in these queries' own blocks
            near = torch.ones(rows, count, dtype=torch.bool, device=S.device)
            near = near.triu() if self.is_causal else near.tril().triu()
            near = near.unsqueeze(-1).expand(rows, count, each).flatten(1)[:, None]
            S[..., W + start * each : W + (start + count) * each].masked_fill_(near, -math.inf)
        if seen > last:
            if self.summary:
                S[..., W + last * each + max(0, in_last - C + each) :] = -math.inf
            else:
                S[:, :, in_last:, -1] = -math.inf

    def band(self, like: Tensor) -> Tensor | None:
        """Return (size, W), -∞ for near keys that are not in the pattern and 0 for the others."""
        (before, width), C = self.around, self.size
        i = torch.arange(C, device=like.device)[:, None]
        j = torch.arange(-before * C, (width - before) * C, device=like.device)
        keep = torch.ones_like(i == j) if self.summary else (i - j).abs() < C
        keep = _past(i, j, keep, self.is_causal)
        return like.new_zeros(keep.shape).masked_fill_(~keep, -math.inf)

    def weights(
        self, q: Tensor, k: Tensor, band: Tensor | None, start: int, seen: int, M: int, empty: bool
    ) -> Tensor:
        """Return the weights (rows, size, W + ·) of blocks q of queries, the first one `start`."""
        far = seen * (self.summary or 1)
        S = q.new_empty(*q.shape[:-1], self.around[1] * self.size + far)
        self.products(S, q, k, start, seen)
        self.close(S, band, start, seen, M)
        dead = S.amax(-1, keepdim=True) <= _closed(S) if empty else None
        A = torch.softmax(S, -1, out=S)
        return A if dead is None else A.masked_fill_(dead, 0)

    def row(self, M: int) -> int:
        """Return how many scores a block of queries has."""
        far = -(-M // self.size) * (self.summary or 1)
        return self.size * (self.around[1] * self.size + far)

    def by_heads(self, *flat: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Iterate over q, k and others (heads, ·, ·): as many heads at a time as memory is for."""
        q, k = flat[:2]
        step = max(1, _limit(q) // max(1, -(-q.shape[1] // self.size) * self.row(k.shape[1])))
        return zip(*(x.split(step) for x in flat), strict=True)

    def steps(self, q: Tensor, M: int) -> list[tuple[slice, int]]:
        """Cut blocks of queries (b, rows, ·, D), each cut with how many blocks have far keys.

        Blocks of several heads are not cut.
        """
        rows, keys = q.shape[1], -(-M // self.size)
        step = rows if len(q) > 1 else max(1, _limit(q) // self.row(M))
        cuts = [slice(a, min(a + step, rows)) for a in range(0, rows, step)]
        return [(cut, min(cut.stop, keys) if self.is_causal else keys) for cut in cuts]


def _limit(x: Tensor) -> int:
    return SCORES if x.device.type == "cpu" else SCORES_ELSEWHERE


def _across(x: Tensor) -> Tensor:
    """Turn (b, rows, size, ·) into (b · size, rows, ·): a view if b is 1."""
    return x.transpose(1, 2).flatten(0, 1)


def _along(x: Tensor, b: int) -> Tensor:
    """Undo `_across`."""
    return x.unflatten(0, (b, -1)).transpose(1, 2)


def _closed(x: Tensor) -> float:
    """Return the score below which a key counts as masked: half of the lowest one a mask gives."""
    return torch.finfo(x.dtype).min / 8


class _InGroups(torch.autograd.Function):
    """Attention to two groups of keys, for some heads or some blocks of queries at a time."""

    @staticmethod
    def forward(groups: _Groups, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return H for queries that are scaled."""
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        for q_h, k_h, v_h, out_h in groups.by_heads(*_flat(q, k, v, out)):
            (N, M), (Q, K, V, band, empty) = _lengths(q_h, k_h), _prepared(groups, q_h, k_h, v_h)
            sums = v.new_zeros(*Q.shape[:-1], v.shape[-1])
            for rows, seen in groups.steps(Q, M):
                A = groups.weights(Q[:, rows], K, band, rows.start, seen, M, empty)
                groups.gather(sums[:, rows], A, V, rows.start, seen)
            out_h.copy_(sums.flatten(1, 2)[:, :N])
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the tensors of the backward pass."""
        ctx.groups, *tensors = inputs
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        (grad,), (q, k, v, out), groups = grads, ctx.saved_tensors, ctx.groups
        again = torch.is_grad_enabled() and any(x.requires_grad for x in (grad, q, k, v))
        with full_precision(q.device):  # autocast may be on again
            if again or any(map(stands_for_many, (grad, q, k, v))):
                pull: Any = torch.func.vjp(groups.whole, q, k, v)[1]
                return None, *pull(grad)
            grads = tuple(x.new_empty(x.shape) for x in (q, k, v))
            for heads in groups.by_heads(*_flat(q, k, v, out, grad, *grads)):
                _backward_of_heads(groups, *heads)
        return None, *grads

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], groups: _Groups, *tensors: Tensor) -> Any:
        """Make the mapped dimension one more leading dimension."""
        pairs = zip(tensors, in_dims[1:], strict=True)
        return _InGroups.apply(groups, *(to_front(info, x, dim) for x, dim in pairs)), 0


def _flat(*tensors: Tensor) -> list[Any]:
    """View all leading dimensions of q, k, v and others as one."""
    q, k, v, *others = tensors
    keys = (key_heads(x, x.dim() - 2) for x in (k, v))
    return [flat_heads(q, q.dim() - 2), *keys, *(flat_heads(x, x.dim() - 2) for x in others)]


def _lengths(q: Tensor, k: Tensor) -> tuple[int, int]:
    return q.shape[-2], k.shape[-2]


def _prepared(groups: _Groups, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Cut q, k and v of some heads into blocks; return the band, and if a query may lack keys."""
    N, M = _lengths(q, k)
    rows, keys = -(-N // groups.size), -(-M // groups.size)
    padded = max(rows, keys) + 1
    K, V = (groups.blocks(x, padded, 1) for x in (k, v))
    return groups.blocks(q, rows), K, V, groups.band(k), groups.masked or N > M


def _backward_of_heads(
    groups: _Groups, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, dq: Tensor,
    dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Write the gradients of some heads."""
    N, M = _lengths(q, k)
    Q, K, V, band, empty = _prepared(groups, q, k, v)
    G = groups.blocks(grad, Q.shape[1])
    shares = groups.blocks((grad * out).sum(-1, keepdim=True), Q.shape[1])
    dQ, dK, dV = (torch.zeros_like(x) for x in (Q, K, V))
    for rows, seen in groups.steps(Q, M):
        at = rows.start, seen
        A = groups.weights(Q[:, rows], K, band, *at, M, empty)
        groups.spread(dV, A, G[:, rows], *at)
        dS = torch.empty_like(A)
        groups.products(dS, G[:, rows], V, *at)
        dS.sub_(shares[:, rows]).mul_(A)
        groups.gather(dQ[:, rows], dS, K, *at)
        groups.spread(dK, dS, Q[:, rows], *at)
    dq.copy_(dQ.flatten(1, 2)[:, :N])
    for d, D in ((dk, dK), (dv, dV)):
        d.copy_(D[:, 1:].flatten(1, 2)[:, :M])


def _key_column(mask: Mask, M: int) -> Tensor | None:
    """Return the mask over keys as a column (..., M, 1), which is cut as keys are."""
    rows = mask.per_key()
    return None if rows is None else rows.expand(*rows.shape[:-1], M).mT


def check_fixed(stride: int, summary: int) -> None:
    """Check the sizes of the fixed pattern."""
    check_count("stride", stride, 1)
    check_count("summary", summary, 1)
    if summary > stride:
        raise ValueError(f"summary is {summary}; expected at most the stride, {stride}")
