"""Masks: which keys a query may attend, with causality and padding.

A mask is boolean, True where query i may attend key j, or floating and added to the scores. A query
that may attend nothing, a dead row, gets zeros: the softmax of a row of -∞ would be 0/0, for which
kernels return different results.

Libraries also write a large negative number for an absent key: ``torch.finfo(dtype).min``, -1e30,
-1e4. Here a number of `ABSENT` or below counts as -inf in every mechanism: it is no bias, and its
key enters no statistic, pool or filter.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from derived_attention.common.checks import (
    check_mask_kind,
    check_mask_values,
    check_shape,
    has_concrete_values,
)

ABSENT = -(2.0**13)  # every dtype can represent -8192, and its exponential is 0 in all of them


def causal_mask(N: int, M: int, device: torch.device | str | None = None) -> Tensor:
    """Return the (N, M) mask by which query i attends keys j ≤ i, counted from the top left."""
    return torch.ones(N, M, dtype=torch.bool, device=device).tril()


def masked_softmax(scores: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Return the softmax over the last dimension, with zeros for a row that is all masked."""
    if attn_mask is None:
        return scores.softmax(-1)
    attn_mask, alive = open_dead_rows(attn_mask, scores.dtype)
    if attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    else:
        scores = scores + attn_mask
    return scores.softmax(-1).masked_fill(~alive, 0)


def open_dead_rows(attn_mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Let a row that may attend nothing attend everything; the caller sets its output to zero.

    So no kernel sees a dead row, and setting the output to zero stops its gradient too. Returns the
    mask, and (..., N, 1), which rows are alive.
    """
    if attn_mask.dtype == torch.bool:
        alive = attn_mask.any(-1, keepdim=True)
        return attn_mask | ~alive, alive
    attn_mask = cast_mask(attn_mask, dtype)  # first, as it may turn a number into -inf
    alive = (attn_mask != -math.inf).any(-1, keepdim=True)
    return attn_mask.masked_fill(~alive, 0), alive


def cast_mask(attn_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a floating mask; of finite numbers, only negative ones may become infinite."""
    limit = torch.finfo(dtype).max
    wider = torch.finfo(attn_mask.dtype).max > limit
    return attn_mask.clamp(max=limit).to(dtype) if wider else attn_mask.to(dtype)


def attended_keys(attn_mask: Tensor) -> Tensor:
    """Turn a mask into True where a key may be attended."""
    return attn_mask if attn_mask.dtype == torch.bool else attn_mask > ABSENT


def exclude_absent(attn_mask: Tensor) -> Tensor:
    """Return a mask with -inf for every number of `ABSENT` or below; itself if there is none.

    On a GPU it waits for the device, as the check of a floating mask does.
    """
    if attn_mask.dtype == torch.bool:
        return attn_mask
    absent = attn_mask <= ABSENT
    if has_concrete_values(attn_mask) and not bool((absent & (attn_mask != -math.inf)).any()):
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
    """Which keys the queries of a call may attend: by `attn_mask`, by `is_causal`, or all of them.

    A layer's mask may have causality merged into `given`, and knows which tokens are padding.
    """

    def __init__(self, attn_mask: Tensor | None = None, is_causal: bool = False) -> None:
        self.given = None if attn_mask is None else torch.atleast_2d(attn_mask)  # (..., N, M)
        self.is_causal = is_causal  # causal, and `given` is None
        self.causal = is_causal  # causal, also where the triangle is merged into `given`
        self.keys: Tensor | None = None  # (B, 1, M), which are present, if a layer was told
        self.queries: Tensor | None = None  # (B, 1, N), likewise
        self.complete = False  # whether each query is known to attend some key
        self.cross = False  # whether queries and keys belong to different sequences

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
        padded queries too, if `query_padding_mask` is None.
        """
        *batch, N, M = *query.shape[:-1], key.shape[-2]
        closed = []
        if attn_mask is not None:
            shared = isinstance(attn_mask, Tensor) and attn_mask.dim() == 2
            shape = (N, M) if shared else (math.prod(batch) * num_heads, N, M)
            attn_mask = _checked("attn_mask", attn_mask, query, shape)
            closed.append(attn_mask if shared else attn_mask.reshape(*batch, num_heads, N, M))
        if key_padding_mask is not None:
            key_padding_mask = _checked("key_padding_mask", key_padding_mask, query, (*batch, M))
            closed.append(key_padding_mask[..., None, None, :])  # (B, 1, 1, M)
        if query_padding_mask is not None:
            sizes = (*batch, N)
            query_padding_mask = _checked("query_padding_mask", query_padding_mask, query, sizes)
        if is_causal and closed:
            closed.append(~causal_mask(N, M, query.device))
        result = cls(_open(closed) if closed else None, is_causal and not closed)
        result.causal, result.cross = is_causal, cross
        if key_padding_mask is not None:
            result.keys = _present(key_padding_mask)
        if query_padding_mask is not None:
            result.queries = _present(query_padding_mask)
        elif not cross and N == M:
            result.queries = result.keys
        return result

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments that give another mechanism the same mask."""
        return {"attn_mask": self.given, "is_causal": self.is_causal}

    def dense(self, N: int, M: int, device: torch.device) -> Tensor | None:
        """Return the mask (..., N or 1, M or 1), with causality merged; None where all is open."""
        return causal_mask(N, M, device) if self.is_causal else self.given

    def for_scores(self, scores: Tensor) -> Tensor | None:
        """Return the `dense` mask of scores (..., N, M)."""
        return self.dense(scores.shape[-2], scores.shape[-1], scores.device)

    def part(self, rows: slice, m: int, device: torch.device) -> Tensor | None:
        """Return the `dense` mask of those queries and the first m keys."""
        if self.is_causal:  # only these rows of the triangle, which has N M entries
            full = torch.ones(rows.stop - rows.start, m, dtype=torch.bool, device=device)
            return full.tril(rows.start)
        return None if self.given is None else cut(self.given, rows, m)

    def rows(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return which keys a query may attend (..., N, M), and a mask for each (..., N, 1, M)."""
        shape, dense = (*q.shape[:-1], k.shape[-2]), self.dense(q.shape[-2], k.shape[-2], q.device)
        if dense is None:
            return torch.ones(shape, dtype=torch.bool, device=q.device), None
        return attended_keys(dense).expand(shape), dense.expand(shape).unsqueeze(-2)

    def softmax(self, scores: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return weights (..., N, M) that sum to 1 over the keys allowed, or to 0 if none is.

        `keep`, boolean, restricts them to the keys of a pattern.
        """
        mask = self.for_scores(scores)
        return masked_softmax(scores, mask if keep is None else within(keep, mask))

    def normalize(self, kernel: Tensor) -> Tensor:
        """Divide a kernel (..., N, M) by its sums over the keys allowed."""
        factor = Mask(self.for_scores(kernel)).factor(kernel.dtype, False)
        kernel = kernel if factor is None else kernel * factor
        return divide(kernel, kernel.sum(-1, keepdim=True))

    def of_head(self, h: int, q: Tensor) -> Mask:
        """Return the mask of one head of q (..., H, N, D)."""
        if self.given is None:
            return self
        return Mask(self.given.expand(*q.shape[:-2], *self.given.shape[-2:])[..., h, :, :])

    def presence(self, k: Tensor) -> Tensor:
        """Return (..., M), True where a key of k (..., M, D) is present and False at padding."""
        every, present = torch.ones_like(k[..., 0], dtype=torch.bool), self.present(k.shape[-2])
        return every if present is None else every & present

    def share(self, k: Tensor) -> Tensor:
        """Return how often each key counts, (..., M): from 0 where it is masked to 1.

        With a floating mask that is its exponential, divided by the largest one.
        """
        mask = self.per_key()
        if mask is None or mask.dtype == torch.bool or mask.numel() == 0:
            return self.presence(k).to(k.dtype)
        mask = cast_mask(mask, k.dtype)
        top = mask.amax(-1, keepdim=True)  # with its gradient: it may not divide out
        share = (mask - top.masked_fill(top == -math.inf, 0)).exp().squeeze(-2)
        return share.expand(*share.shape[:-1], k.shape[-2])

    def open_dead_rows(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return `given` without dead rows, and (..., N, 1) which rows are alive."""
        return (None, None) if self.given is None else open_dead_rows(self.given, dtype)

    def per_key(self) -> Tensor | None:
        """Return the mask over keys (..., 1, M or 1), or None; ValueError if queries differ."""
        if self.given is None or self.given.shape[-2] == 1:
            return self.given
        raise ValueError(
            f"attn_mask has shape {tuple(self.given.shape)}; expected the size 1 in place of N, as "
            "in (B, 1, 1, M): this mechanism takes a mask over keys, the same for every query; in "
            "a layer pass key_padding_mask (B, M) instead; for causality pass is_causal=True, if "
            "the mechanism has it, and no mask"
        )

    def present(self, M: int) -> Tensor | None:
        """Return which of M keys are present, (..., M), or None for all of them."""
        if self.keys is not None:
            return self.keys
        mask = self.per_key()
        if mask is None:
            return None
        present = attended_keys(mask).squeeze(-2)
        return present.expand(*present.shape[:-1], M)

    def factor(self, dtype: torch.dtype, per_key: bool = True) -> Tensor | None:
        """Return the factor by which a mask multiplies a kernel, up to one per row."""
        mask = self.per_key() if per_key else self.given
        if mask is None or mask.dtype == torch.bool or mask.numel() == 0:
            return None if mask is None else mask.to(dtype)
        mask = cast_mask(mask, dtype)
        top = mask.detach().amax(-1, keepdim=True)  # so that the exponential does not overflow
        return (mask - top.masked_fill(top == -math.inf, 0)).exp()


def divide(x: Tensor, total: Tensor) -> Tensor:
    """Return x / total, and 0 with gradient 0 where the total is 0 or subnormal."""
    lost = total.detach().abs() < torch.finfo(total.dtype).tiny
    return x / total.masked_fill(lost, math.inf)


def anchor(keep: Tensor) -> Tensor:
    """Return which keys (..., M) a common centre may be taken from, for a mask (..., N or 1, M).

    These are the keys that every query may attend, except for queries that may attend none; if
    there are no such keys, the first one that any query may attend. So the centre depends neither
    on padding nor on keys in the future of a query.
    """
    common = (keep | ~keep.any(-1, keepdim=True)).all(-2)
    attended = keep.any(-2)
    first = attended & (attended.cumsum(-1) == 1)
    return torch.where(common.any(-1, keepdim=True), common, first)


def nearer_zero(a: Tensor, b: Tensor) -> Tensor:
    """Return the number nearer 0 of each pair of entries, not NaN, or 0 if their signs differ."""
    return torch.fmin(a, b).clamp(min=0) + torch.fmax(a, b).clamp(max=0)


def shared_offset(k: Tensor, mask: Mask) -> Tensor:
    """Return an offset (..., 1, D), without gradient, to subtract from all keys (..., M, D).

    It is the mean over the keys of `anchor`; if causal, entry by entry the number nearer 0 of the
    first two keys, as one alone may be far from all that follow. (The first query gives its only
    key the weight 1, with any offset.)
    """
    k = k.detach()
    if mask.is_causal:
        return nearer_zero(k[..., :1, :], k[..., 1:2, :]) if k.shape[-2] > 1 else k[..., :1, :]
    if mask.given is None:
        return k.mean(-2, keepdim=True)
    chosen = anchor(attended_keys(mask.given).expand(*mask.given.shape[:-1], k.shape[-2]))
    share = chosen / chosen.sum(-1, keepdim=True).clamp(min=1)  # (..., M)
    return share.unsqueeze(-2).to(k.dtype) @ k


def _checked(name: str, mask: Tensor, query: Tensor, shape: tuple[int, ...]) -> Tensor:
    check_mask_kind(name, mask, query.device)
    check_shape(name, mask, shape, "(N, M) or (B·H, N, M) for attn_mask, (B, length) for padding")
    check_mask_values(name, mask)
    return exclude_absent(mask)


def _present(padding: Tensor) -> Tensor:
    """Return (B, 1, M), True where a token is present, for a padding mask (B, M)."""
    present = ~padding if padding.dtype == torch.bool else attended_keys(padding)
    return present.unsqueeze(-2)


def _open(closed: list[Tensor]) -> Tensor:
    """Merge masks, which are True where one may not attend, into one that is True where one may."""
    if all(mask.dtype == torch.bool for mask in closed):
        return ~functools.reduce(torch.logical_or, closed)
    added = (torch.where(x, -math.inf, 0.0) if x.dtype == torch.bool else x for x in closed)
    return functools.reduce(torch.add, added)


def cut(attn_mask: Tensor, rows: slice, m: int) -> Tensor:
    """Slice those rows and the first m columns of a mask; a dimension of size 1 stays as it is."""
    picked = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., rows, :]
    return picked if attn_mask.shape[-1] == 1 else picked[..., :m]


def flat_heads(x: Tensor, leading: int) -> Tensor:
    """View the first `leading` dimensions as one."""
    return x.reshape(math.prod(x.shape[:leading]), *x.shape[leading:])


def take(x: Tensor, index: Tensor) -> Tensor:
    """Return x (heads, n, ...) at an index (heads, ...) of its second dimension.

    Of blocks (heads, n, b, D) each may be taken often. On a GPU the gradients of its copies are
    summed as those of an embedding are: in float32, in a fixed order.
    """
    first = torch.arange(len(x), device=x.device) * x.shape[1]
    index, rows = index + first.view(-1, *[1] * (index.dim() - 1)), x.flatten(0, 1).flatten(1)
    often = x.dim() == 4 and x.device.type != "cpu"
    picked = F.embedding(index, rows) if often else rows.index_select(0, index.flatten())
    return picked.view(*index.shape, *x.shape[2:])


def all_flat(leading: int, *tensors: Tensor) -> list[Tensor]:
    """View the first `leading` dimensions of each tensor as one."""
    return [x.reshape(math.prod(x.shape[:leading]), *x.shape[leading:]) for x in tensors]


class BlockMask:
    """A mask without dead rows, applied to blocks of heads (viewed as one dimension) and rows."""

    def __init__(self, attn_mask: Tensor | None, is_causal: bool, v: Tensor) -> None:
        self.is_causal, self.mask = is_causal, attn_mask
        if attn_mask is not None:
            self.mask = flat_heads(attn_mask, attn_mask.dim() - 2)  # (b', N or 1, M or 1)
            index = torch.arange(len(self.mask), device=v.device).view(attn_mask.shape[:-2])
            self.index = index.expand(v.shape[:-2]).reshape(-1)  # for each head, one of b' masks

    def softmax(self, scores: Tensor, heads: slice, rows: slice, m: int) -> Tensor:
        """Mask scores (b, C, m) in place, and take their softmax over j."""
        return self.close(scores, heads, rows, m).softmax(-1)

    def close(self, scores: Tensor, heads: slice, rows: slice, m: int) -> Tensor:
        """Mask scores (b, C, m) in place, and return them."""
        if self.is_causal:  # all rows see the keys before rows.start
            square = scores[..., rows.start :]
            past = causal_mask(square.shape[-2], square.shape[-1], square.device)
            square.masked_fill_(~past, -math.inf)
        if self.mask is not None:
            mask = cut(self.mask, rows, m)
            if mask.dtype == torch.bool:  # to add is faster than to fill
                mask = scores.new_zeros(mask.shape).masked_fill_(~mask, -math.inf)
            scores.add_(mask[self.index[heads]])
        return scores

    def add_gradient(self, dmask: Tensor, dS: Tensor, heads: slice, rows: slice, m: int) -> None:
        """Add the gradient dS of these scores to the gradient of the mask."""
        part = cut(flat_heads(dmask, dmask.dim() - 2), rows, m)
        part.index_add_(0, self.index[heads], dS.sum_to_size(len(dS), *part.shape[1:]))
