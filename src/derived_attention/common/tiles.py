"""Mixtures of keys on a CPU: scores tile by tile, so that they stay in its cache.

The equation of this module, for keys k_jr with r = 1..R at token j, is ::

    h_i = Σ_j Σ_r p_ijr v_j,    p_ijr = exp(q_i·k_jr − l_i),    l_i = log Σ_jr exp(q_i·k_jr)

All R scores of a token meet one value, so the products with values are those of one component. The
exponentials of a row are taken beside the largest score of its first tile, as one more feature of
q; a row for which that is too far from the largest of all is computed again, with all its scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from derived_attention.common.blocks import differentiable, in_front, needs_whole
from derived_attention.common.convention import extend, full_precision
from derived_attention.common.masks import BlockMask, Mask, cut, flat_heads

ROWS, KEYS = 512, 512  # of a tile
CAUSAL = 256  # at most, of a causal tile: on the diagonal half of its scores are for nothing
SCORES = 2**19  # in memory at a time: from some of the heads, where sequences are short
SAFE = 1e18  # a sum of exponentials and its inverse below this have full precision
LOG2 = math.log(2)  # PyTorch computes powers of 2 in less than half the time of those of e
FAR = 1e4  # rounding errors of larger logarithms can make a weight of more than 1


def attend_by_tiles(form: Any, v: Tensor, mask: Mask, q: Tensor, k: Tensor) -> Tensor:
    """Attend keys k (..., R, M, E) in the dtype of q, with zeros for a query without keys.

    Second derivatives are those of ``form.scores``.
    """
    v = v.to(q.dtype)
    attn_mask, alive = mask.opened(v.dtype)
    out, _ = _Tiled.apply(form, mask.is_causal, v, attn_mask, q, k)
    return out if alive is None else out.masked_fill(~alive, 0)


class _Tiled(torch.autograd.Function):
    """Averages h, the logarithms l of their normalisers, and the gradients."""

    @staticmethod
    def forward(
        form: Any, is_causal: bool, v: Tensor, attn_mask: Tensor | None, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return h and l for a mask with no row all masked."""
        out, logs = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(*q.shape[:-1], 1)
        closed = _Closed(attn_mask, is_causal, v)
        for heads, q_h, k_h, v_h, out_h, logs_h in _by_heads(closed.tile, q, k, v, out, logs):
            k_h, v_h = (extend(x, 1, -1, 1.0) for x in (k_h, v_h))
            for rows in _cuts(0, q.shape[-2], closed.tile[0]):
                h, logarithms = _average(q_h[:, rows] / LOG2, k_h, v_h, closed, heads, rows)
                out_h[:, rows], logs_h[:, rows] = h, logarithms
        return out, logs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save the tensors of the backward pass."""
        ctx.form, ctx.is_causal, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to v, the mask, q and k."""
        grad, (v, attn_mask, q, k, out, logs) = grads[0], ctx.saved_tensors
        if needs_whole(grad, v, attn_mask, q, k):
            return None, None, *differentiable(ctx, grad, v, attn_mask, [q, k])
        dmask = torch.zeros_like(attn_mask) if ctx.needs_input_grad[3] else None
        dv, dq, dk = (x.new_zeros(x.shape) for x in (v, q, k))
        closed = _Closed(attn_mask, ctx.is_causal, v, dmask)
        with full_precision(v.device):  # autocast may be on again
            shares = (grad * out).sum(-1, keepdim=True)
            with_logs, grad = torch.cat([q, -logs], -1) / LOG2, torch.cat([grad, -shares], -1)
            far = bool((logs.abs() > FAR).any())
            tensors = q, k, v, with_logs, grad, dq, dk, dv
            for heads, q_h, k_h, v_h, *others in _by_heads(closed.tile, *tensors):
                k_h, v_h = (extend(x, 1, -1, 1.0) for x in (k_h, v_h))
                part = _Head(q_h, k_h, v_h, *others)
                for rows in _cuts(0, q.shape[-2], closed.tile[0]):
                    _spread(part, closed, heads, rows, far)
        return None, None, dv, dmask, dq, dk

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], form: Any, is_causal: bool, *rest: Any) -> Any:
        """Make the mapped dimension one more leading dimension."""
        return _Tiled.apply(form, is_causal, *in_front(info, in_dims[2:], *rest)), (0, 0)


class _Closed(BlockMask):
    """The mask of the scores (b, R, C, T) of a tile, and its gradient."""

    def __init__(
        self, attn_mask: Tensor | None, is_causal: bool, v: Tensor, dmask: Tensor | None = None
    ) -> None:
        super().__init__(attn_mask, is_causal, v)
        self.M = v.shape[-2]
        self.tile = (min(ROWS, CAUSAL), min(KEYS, CAUSAL)) if is_causal else (ROWS, KEYS)
        self.dmask = None if dmask is None else flat_heads(dmask, dmask.dim() - 2)

    def seen(self, rows: slice) -> int:
        """Return how many keys those queries may attend at most."""
        return min(rows.stop, self.M) if self.is_causal else self.M

    def close_tile(self, s: Tensor, heads: slice, rows: slice, keys: slice) -> None:
        """Mask scores of `_scores` in place."""
        if self.is_causal and keys.stop > rows.start + 1:
            i = torch.arange(rows.start, rows.stop, device=s.device)[:, None]
            s.masked_fill_(torch.arange(keys.start, keys.stop, device=s.device) > i, -math.inf)
        if self.mask is not None:
            mask = _part(self.mask, rows, keys)[self.index[heads]].unsqueeze(1)
            if mask.dtype == torch.bool:  # to add is faster than to fill
                mask = s.new_zeros(mask.shape).masked_fill_(~mask, -math.inf)
            s.add_(mask, alpha=1 / LOG2)

    def learn(self, dS: Tensor, heads: slice, rows: slice, keys: slice) -> None:
        """Add the gradient dS (b, C, T) of scores to the gradient of the mask."""
        if self.dmask is not None:
            part = _part(self.dmask, rows, keys)
            part.index_add_(0, self.index[heads], dS.sum_to_size(len(dS), *part.shape[1:]))


def _part(mask: Tensor, rows: slice, keys: slice) -> Tensor:
    """Slice those rows and columns of a mask; a dimension of size 1 stays as it is."""
    part = cut(mask, rows, keys.stop)
    return part if mask.shape[-1] == 1 else part[..., keys.start :]


def _by_heads(
    tile: tuple[int, int], q: Tensor, k: Tensor, *others: Tensor
) -> Iterator[tuple[Any, ...]]:
    """Iterate over leading dimensions, viewed as one: some heads at a time."""
    flat = [flat_heads(x, q.dim() - 2) for x in (q, k, *others)]
    scores = min(q.shape[-2], tile[0]) * min(k.shape[-2], tile[1]) * k.shape[-3]
    for heads in _cuts(0, len(flat[0]), max(1, SCORES // max(scores, 1))):
        yield heads, *(x[heads] for x in flat)


def _cuts(start: int, stop: int, size: int) -> list[slice]:
    return [slice(a, min(a + size, stop)) for a in range(start, stop, size)]


def _average(
    q: Tensor, k: Tensor, v: Tensor, closed: _Closed, heads: slice, rows: slice
) -> tuple[Tensor, Tensor]:
    """Return h (b, C, Dv) and l (b, C, 1) of q / log 2 (b, C, E), where k and v end in ones."""
    top, sums = None, q.new_zeros(*q.shape[:-1], v.shape[-1])
    with_feature = extend(q, 1, -1)
    for keys in _cuts(0, closed.seen(rows), closed.tile[1]):
        s = _scores(with_feature, k, closed, heads, rows, keys)
        if top is None:  # the largest score of the first tile is subtracted from all
            top = s.amax((1, 3)).unsqueeze(-1)  # (b, C, 1)
            top.masked_fill_(top == -math.inf, 0)  # all of the first tile is masked
            s -= top.unsqueeze(1)
            with_feature[..., -1:] = -top
        sums.baddbmm_(_total(s.exp2_()), v[:, keys])
    assert top is not None  # there is at least one key
    total = sums[..., -1:]
    good = (total > 1 / SAFE) & (total < SAFE)
    h, logs = sums[..., :-1] / total, LOG2 * (top + total.log2())
    if not bool(good.all()):
        safe_h, safe_logs = _safe(q, k[..., :-1], v[..., :-1], closed, heads, rows)
        h, logs = torch.where(good, h, safe_h), torch.where(good, logs, safe_logs)
    if closed.is_causal and rows.start == 0:  # exact, so that no later key changes its rounding
        h[:, 0] = v[:, 0, :-1]
    return h, logs


def _scores(
    q: Tensor, k: Tensor, closed: _Closed, heads: slice, rows: slice, keys: slice
) -> Tensor:
    """Return masked scores (b, R, C, T) as logarithms to the base 2, for q / log 2."""
    s = q.unsqueeze(1) @ k[:, :, keys].mT
    closed.close_tile(s, heads, rows, keys)
    return s


def _total(p: Tensor) -> Tensor:
    """Return Σ_r p_r (b, C, T), which overwrites p_1."""
    for r in range(1, p.shape[1]):
        p[:, 0] += p[:, r]
    return p[:, 0]


def _safe(
    q: Tensor, k: Tensor, v: Tensor, closed: _Closed, heads: slice, rows: slice
) -> tuple[Tensor, Tensor]:
    """Return the same as `_average`, from all scores at once."""
    keys = slice(0, closed.seen(rows))
    s = _scores(q, k, closed, heads, rows, keys).mul_(LOG2)
    logs = s.transpose(1, 2).flatten(2).logsumexp(-1, keepdim=True)  # (b, C, 1)
    return _total(s.sub_(logs.unsqueeze(1)).exp_()) @ v[:, keys], logs


class _Head(NamedTuple):
    """Some heads in the backward pass: k and v end in ones, grad ends in −grad·h."""

    q: Tensor
    k: Tensor
    v: Tensor
    with_logs: Tensor  # [q, −l] / log 2
    grad: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def _spread(x: _Head, closed: _Closed, heads: slice, rows: slice, far: bool) -> None:
    """Add the contributions of those queries to the gradients."""
    q, with_logs, grad, dq = (y[:, rows] for y in (x.q, x.with_logs, x.grad, x.dq))
    g = grad[..., :-1]
    for keys in _cuts(0, closed.seen(rows), closed.tile[1]):
        p = _scores(with_logs, x.k, closed, heads, rows, keys)
        p = (p.clamp_(max=0) if far else p).exp2_()
        beyond = grad @ x.v[:, keys].mT  # (b, C, T)
        A = p.sum(1) if p.shape[1] > 2 else p[:, 0] + p[:, -1]
        x.dv[:, keys].baddbmm_(A.mT, g)
        closed.learn(A.mul_(beyond), heads, rows, keys)
        for r in range(p.shape[1]):
            dS = p[:, r].mul_(beyond)
            dq.baddbmm_(dS, x.k[:, r, keys, :-1])
            x.dk[:, r, keys].baddbmm_(dS.mT, q)
