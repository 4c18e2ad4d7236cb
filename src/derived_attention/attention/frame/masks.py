"""Who may attend whom: the only place that knows dead rows, causality and padding.

A mask is boolean, True where query i may attend key j, or floating and added to the scores. A query
that may attend nothing, a dead row, gets zeros: softmax of a row of -∞ would be 0/0, and kernels
disagree on what that is.

Libraries also write a large negative number where nobody is: ``torch.finfo(dtype).min``, -1e30,
-1e4. Here a number of `ABSENT` or below says that, as -inf does, for every mechanism alike: it is
no bias, and its key is in no statistic, pool or filter.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from derived_attention.attention.frame.checks import (
    check_mask_kind,
    check_mask_values,
    check_shape,
    may_look_at,
)

ABSENT = -(2.0**13)  # -8192 is a number of every dtype, and e to its power is 0 in all of them


def causal_mask(N: int, M: int, device: torch.device | str | None = None) -> Tensor:
    """Boolean (N, M) mask that lets query i attend the keys j ≤ i, counted from the top left."""
    return torch.ones(N, M, dtype=torch.bool, device=device).tril()


def masked_softmax(scores: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Softmax over the last dimension, with rows of zeros where all is masked."""
    if attn_mask is None:
        return scores.softmax(-1)
    attn_mask, alive = open_dead_rows(attn_mask, scores.dtype)
    if attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    else:
        scores = scores + attn_mask
    return scores.softmax(-1).masked_fill(~alive, 0)


def open_dead_rows(attn_mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Let a row that may attend nothing attend everything; its output is set to zero afterwards.

    So no kernel meets one, and the zero written afterwards stops the gradient too. Returns the
    mask, and (..., N, 1) alive.
    """
    if attn_mask.dtype == torch.bool:
        alive = attn_mask.any(-1, keepdim=True)
        return attn_mask | ~alive, alive
    attn_mask = narrowed(attn_mask, dtype)  # a number may become -inf: before the next line
    alive = (attn_mask != -math.inf).any(-1, keepdim=True)
    return attn_mask.masked_fill(~alive, 0), alive


def narrowed(attn_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a floating mask; of finite numbers, only negative ones may become infinite."""
    limit = torch.finfo(dtype).max
    wider = torch.finfo(attn_mask.dtype).max > limit
    return attn_mask.clamp(max=limit).to(dtype) if wider else attn_mask.to(dtype)


def allowed(attn_mask: Tensor) -> Tensor:
    """Turn a mask into True where a key may be attended."""
    return attn_mask if attn_mask.dtype == torch.bool else attn_mask > ABSENT


def settled(attn_mask: Tensor) -> Tensor:
    """Return a mask with -inf for every number of `ABSENT` or below; itself, where none is finite.

    To see that, it waits for a GPU, as the check of a floating mask does.
    """
    if attn_mask.dtype == torch.bool:
        return attn_mask
    absent = attn_mask <= ABSENT
    if may_look_at(attn_mask) and not bool((absent & (attn_mask != -math.inf)).any()):
        return attn_mask
    return attn_mask.masked_fill(absent, -math.inf)


def within(keep: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Restrict a mask, boolean or floating, to the keys of a pattern."""
    if attn_mask is None:
        return keep
    if attn_mask.dtype == torch.bool:
        return keep & attn_mask
    return torch.where(keep, attn_mask, -math.inf)


class Mask:
    """What the queries of a call may attend: `attn_mask`, or `is_causal`, or everything.

    A layer's mask may have causality in what was given, and knows what is padding.
    """

    def __init__(self, attn_mask: Tensor | None = None, is_causal: bool = False) -> None:
        self.given = None if attn_mask is None else torch.atleast_2d(attn_mask)  # (..., N, M)
        self.is_causal = is_causal  # and nothing was given
        self.causal = is_causal  # whether or not something was given
        self.keys: Tensor | None = None  # (B, 1, M): which are there, where a layer was told
        self.queries: Tensor | None = None  # (B, 1, N)
        self.cross = False  # whether queries and keys are of different sequences

    @classmethod
    def of_layer(
        cls,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        query: Tensor,
        key: Tensor,
        num_heads: int,
        *,
        query_padding_mask: Tensor | None = None,
        cross: bool = False,
    ) -> Mask:
        """Check and merge a layer's masks, which are True where one may not attend.

        Their shapes are those of ``nn.MultiheadAttention``: `attn_mask` is ``(N, M)`` or
        ``(B·H, N, M)``, `key_padding_mask` is ``(B, M)`` and `query_padding_mask` ``(B, N)``;
        without a batch ``(H, N, M)``, ``(M,)`` and ``(N,)``. In self-attention padded keys are
        padded queries too, where nothing else is said of these.
        """
        *batch, N, M = *query.shape[:-1], key.shape[-2]
        closed = []
        if attn_mask is not None:
            two = isinstance(attn_mask, Tensor) and attn_mask.dim() == 2
            shape = (N, M) if two else (math.prod(batch) * num_heads, N, M)
            attn_mask = _checked("attn_mask", attn_mask, query, shape)
            closed.append(attn_mask if two else attn_mask.reshape(*batch, num_heads, N, M))
        if key_padding_mask is not None:
            key_padding_mask = _checked("key_padding_mask", key_padding_mask, query, (*batch, M))
            closed.append(key_padding_mask[..., None, None, :])  # (B, 1, 1, M)
        if query_padding_mask is not None:
            sizes = (*batch, N)
            query_padding_mask = _checked("query_padding_mask", query_padding_mask, query, sizes)
        if is_causal and closed:
            closed.append(~causal_mask(N, M, query.device))
        result = cls(_open(closed), is_causal and not closed)
        result.causal, result.cross = is_causal, cross
        result.keys = _there(key_padding_mask)
        paired = not cross and N == M
        result.queries = result.keys if paired else None
        if query_padding_mask is not None:
            result.queries = _there(query_padding_mask)
        return result

    @property
    def keywords(self) -> dict[str, Any]:
        """How to hand it on to another mechanism."""
        return {"attn_mask": self.given, "is_causal": self.is_causal}

    def dense(self, N: int, M: int, device: torch.device) -> Tensor | None:
        """Return (..., N or 1, M or 1), boolean or floating, with causality in it."""
        return causal_mask(N, M, device) if self.is_causal else self.given

    def on(self, scores: Tensor) -> Tensor | None:
        """Return what `dense` does for scores (..., N, M)."""
        return self.dense(scores.shape[-2], scores.shape[-1], scores.device)

    def part(self, rows: slice, m: int, device: torch.device) -> Tensor | None:
        """Return what `dense` has for some queries and the first m keys."""
        if self.is_causal:  # those rows of the triangle alone: all of it has N M entries
            here = torch.ones(rows.stop - rows.start, m, dtype=torch.bool, device=device)
            return here.tril(rows.start)
        return None if self.given is None else cut(self.given, rows, m)

    def rows(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return which keys each query may attend (..., N, M), and its own mask (..., N, 1, M)."""
        shape, dense = (*q.shape[:-1], k.shape[-2]), self.dense(q.shape[-2], k.shape[-2], q.device)
        if dense is None:
            return torch.ones(shape, dtype=torch.bool, device=q.device), None
        return allowed(dense).expand(shape), dense.expand(shape).unsqueeze(-2)

    def softmax(self, scores: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return weights (..., N, M) that sum to 1 over the keys allowed, or to 0 if none is.

        `keep`, boolean, has the keys of a pattern.
        """
        mask = self.on(scores)
        return masked_softmax(scores, mask if keep is None else within(keep, mask))

    def normalize(self, kernel: Tensor) -> Tensor:
        """Divide a kernel (..., N, M) by its sums over the keys allowed."""
        factor = Mask(self.on(kernel)).factor(kernel.dtype, False)
        kernel = kernel if factor is None else kernel * factor
        return divide(kernel, kernel.sum(-1, keepdim=True))

    def of_head(self, h: int, q: Tensor) -> Mask:
        """Return the mask of one head of q (..., H, N, D)."""
        if self.given is None:
            return self
        return Mask(self.given.expand(*q.shape[:-2], *self.given.shape[-2:])[..., h, :, :])

    def there(self, k: Tensor) -> Tensor:
        """Return True where a key is there that is not padding: (..., M)."""
        every, present = torch.ones_like(k[..., 0], dtype=torch.bool), self.present(k.shape[-2])
        return every if present is None else every & present

    def share(self, k: Tensor) -> Tensor:
        """Return how often each key counts, (..., M): at most once, and not at all where masked.

        With a floating mask that is e to its power, over the largest such power.
        """
        given = self.per_key()
        if given is None or given.dtype == torch.bool or given.numel() == 0:
            return self.there(k).to(k.dtype)
        given = narrowed(given, k.dtype)
        top = given.amax(-1, keepdim=True)  # with its gradient: it may not divide out
        share = (given - top.masked_fill(top == -math.inf, 0)).exp().squeeze(-2)
        return share.expand(*share.shape[:-1], k.shape[-2])

    def opened(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return what was given without dead rows, and (..., N, 1) which rows are alive."""
        return (None, None) if self.given is None else open_dead_rows(self.given, dtype)

    def per_key(self) -> Tensor | None:
        """Return (..., 1, M or 1), or ValueError: for forms below N M in time and memory."""
        if self.given is None or self.given.shape[-2] == 1:
            return self.given
        raise ValueError(
            f"attn_mask has shape {tuple(self.given.shape)}; expected the size 1 in place of N, as "
            "in (B, 1, 1, M): this form takes a mask over keys, the same for every query; for "
            "causality alone say is_causal=True, where it is taken, without a mask"
        )

    def present(self, M: int) -> Tensor | None:
        """Return which keys are there, (..., M): for forms that mix keys along the length."""
        if self.keys is not None:
            return self.keys
        mask = self.per_key()
        if mask is None:
            return None
        there = allowed(mask).squeeze(-2)
        return there.expand(*there.shape[:-1], M)

    def factor(self, dtype: torch.dtype, per_key: bool = True) -> Tensor | None:
        """Return what a mask multiplies a kernel by, up to a factor per row, which divides out."""
        mask = self.per_key() if per_key else self.given
        if mask is None or mask.dtype == torch.bool or mask.numel() == 0:
            return None if mask is None else mask.to(dtype)
        mask = narrowed(mask, dtype)
        top = mask.detach().amax(-1, keepdim=True)  # so that e to its power does not overflow
        return (mask - top.masked_fill(top == -math.inf, 0)).exp()


def divide(x: Tensor, total: Tensor) -> Tensor:
    """Quotient x / total, and 0 with gradient 0 where the total is 0 or has lost its digits."""
    lost = total.detach().abs() < torch.finfo(total.dtype).tiny
    return x / total.masked_fill(lost, math.inf)


def anchor(here: Tensor) -> Tensor:
    """Return which keys (..., M) a common centre may be taken from, of boolean (..., N or 1, M).

    Those that every query may attend which has a key at all; where there is none, the first one
    that some query may attend. So a centre shows no query its future, and holds no padding.
    """
    common = (here | ~here.any(-1, keepdim=True)).all(-2)
    some = here.any(-2)
    first = some & (some.cumsum(-1) == 1)
    return torch.where(common.any(-1, keepdim=True), common, first)


def nearer_zero(a: Tensor, b: Tensor) -> Tensor:
    """Return, entry by entry, the one that is nearer 0, and 0 where signs differ."""
    return torch.where(a.abs() < b.abs(), a, b).where(a.sign() == b.sign(), 0)


def shared_offset(k: Tensor, mask: Mask) -> Tensor:
    """Return what keys (..., M, D) share: (..., 1, D), without gradient, to be taken from them all.

    The mean of `anchor`. If causal, the number nearer 0 of the first two keys, as one may be far
    from all that follow; the query that sees only one of them gives it all weight, with any offset.
    """
    k = k.detach()
    if mask.is_causal:
        return nearer_zero(k[..., :1, :], k[..., 1:2, :]) if k.shape[-2] > 1 else k[..., :1, :]
    if mask.given is None:
        return k.mean(-2, keepdim=True)
    some = anchor(allowed(mask.given).expand(*mask.given.shape[:-1], k.shape[-2]))
    share = some / some.sum(-1, keepdim=True).clamp(min=1)  # (..., M)
    return share.unsqueeze(-2).to(k.dtype) @ k


def _checked(name: str, mask: Tensor, query: Tensor, shape: tuple[int, ...]) -> Tensor:
    check_mask_kind(name, mask, query.device)
    check_shape(name, mask, shape, "(N, M) or (B·H, N, M) for attn_mask, (B, length) for padding")
    check_mask_values(name, mask)
    return settled(mask)


def _there(padding: Tensor | None) -> Tensor | None:
    """Return (B, 1, M), True where a token is there, of (B, M), which says what is padding."""
    if padding is None:
        return None
    there = ~padding if padding.dtype == torch.bool else allowed(padding)
    return there.unsqueeze(-2)


def _open(closed: list[Tensor]) -> Tensor | None:
    """Merge masks that are True where one may not attend into one that is True where one may."""
    if not closed:
        return None
    if all(mask.dtype == torch.bool for mask in closed):
        return ~functools.reduce(torch.logical_or, closed)
    added = (torch.where(x, -math.inf, 0.0) if x.dtype == torch.bool else x for x in closed)
    return functools.reduce(torch.add, added)


def cut(attn_mask: Tensor, rows: slice, m: int) -> Tensor:
    """View those rows and columns of a mask, where it has more than one of them."""
    picked = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., rows, :]
    return picked if attn_mask.shape[-1] == 1 else picked[..., :m]


def flat_heads(x: Tensor, leading: int) -> Tensor:
    """View that many dimensions, the first ones, as one."""
    return x.reshape(math.prod(x.shape[:leading]), *x.shape[leading:])


class BlockMask:
    """A mask without dead rows, block by block: some heads, viewed as one dimension; some rows."""

    def __init__(self, attn_mask: Tensor | None, is_causal: bool, v: Tensor) -> None:
        self.is_causal, self.mask = is_causal, attn_mask
        if attn_mask is not None:
            self.mask = flat_heads(attn_mask, attn_mask.dim() - 2)  # (b', N or 1, M or 1)
            which = torch.arange(len(self.mask), device=v.device).view(attn_mask.shape[:-2])
            self.which = which.expand(v.shape[:-2]).reshape(-1)  # of b' masks, for each head

    def softmax(self, scores: Tensor, heads: slice, rows: slice, m: int) -> Tensor:
        """Mask scores (b, C, m) in place, and take their softmax over j."""
        return self.close(scores, heads, rows, m).softmax(-1)

    def close(self, scores: Tensor, heads: slice, rows: slice, m: int) -> Tensor:
        """Mask scores (b, C, m) in place, and return them."""
        if self.is_causal:  # all of them see what is before the first
            here = scores[..., rows.start :]
            past = causal_mask(here.shape[-2], here.shape[-1], here.device)
            here.masked_fill_(~past, -math.inf)
        if self.mask is not None:
            mask = cut(self.mask, rows, m)
            if mask.dtype == torch.bool:  # to add is faster than to fill
                mask = scores.new_zeros(mask.shape).masked_fill_(~mask, -math.inf)
            scores.add_(mask[self.which[heads]])
        return scores

    def add_gradient(self, dmask: Tensor, dS: Tensor, heads: slice, rows: slice, m: int) -> None:
        """Add to the gradient of the mask what those scores, with the gradient dS, give."""
        part = cut(flat_heads(dmask, dmask.dim() - 2), rows, m)
        part.index_add_(0, self.which[heads], dS.sum_to_size(len(dS), *part.shape[1:]))
