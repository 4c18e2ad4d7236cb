"""Attention block by block, for weights that no fused kernel computes, such as those of mixtures.

A form, such as that of `mixture.core`, computes the weights of a block of queries from its tensors,
and propagates their gradient. This module runs over the blocks, forward and, with the weights
computed again, backward: so no (N, M) matrix is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from derived_attention.common.convention import full_precision
from derived_attention.common.masks import BlockMask, Mask, all_flat

Tensors = list[Tensor]

SPARE = (None,) * 4  # compilers expect the same number of arguments for each form
CHUNK = 128  # queries whose scores are in memory at a time, in the forms that store some
CACHED = 2**19  # scores in memory at a time on a CPU, from heads as wholes
SCORES = 2**17  # in memory at a time on a CPU, from some of the heads: they fit in its cache


def attend(form: Any, v: Tensor, mask: Mask, *tensors: Tensor) -> Tensor:
    """Run `_Chunked` in the dtype of `tensors`, with zeros for a query that may attend nothing."""
    v = v.to(tensors[0].dtype)
    attn_mask, alive = mask.open_dead_rows(v.dtype)
    out = _Chunked.apply(form, mask.is_causal, v, attn_mask, *tensors, *SPARE[len(tensors) :])
    return out if alive is None else out.masked_fill(~alive, 0)


def by_heads(form: Any, q: Tensor, keys: int, parts: Tensors) -> Tensor:
    """Run a form on some heads at a time, of `parts` that are broadcast to the heads of q.

    On a CPU the scores, `keys` for each query, fit in its cache; elsewhere all heads are together.
    """
    leading, heads = q.dim() - 2, max(1, math.prod(q.shape[:-2]))
    heads = heads if q.device.type != "cpu" else max(1, CACHED // (q.shape[-2] * keys))
    parts = [x.expand(*q.shape[:-2], *x.shape[leading:]) for x in parts]
    cuts = zip(*(x.split(heads) for x in all_flat(leading, *parts)), strict=True)
    return torch.cat([form(*cut) for cut in cuts])


class Block(NamedTuple):
    """Some heads, all leading dimensions being viewed as one; some queries; how many keys."""

    heads: slice
    rows: slice
    m: int


class _Chunked(torch.autograd.Function):
    """Attention block by block, with weights computed by `form`.

    The backward pass computes them again. Their logarithms have the gradient
    dS = A ∘ (dO Vᵀ − rowsum(dO ∘ out)); `form` gets both factors and adds the gradients of its
    tensors. If that gradient is to be differentiated again, it is computed by `_whole` instead.
    """

    @staticmethod
    def forward(
        form: Any,
        is_causal: bool,
        v: Tensor,
        attn_mask: Tensor | None,
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        d: Tensor | None,
    ) -> Tensor:
        """Take v, a mask with no row all masked, and the two to four tensors of `form`."""
        tensors = [x for x in (a, b, c, d) if x is not None]
        out = v.new_empty(*tensors[0].shape[:-1], v.shape[-1])
        values, flat, *inputs = all_flat(v.dim() - 2, v, out, *tensors)
        mask = BlockMask(attn_mask, is_causal, v)
        form = form.adapt(inputs) if hasattr(form, "adapt") else form
        for block in _blocks(out, v, is_causal):
            heads, rows, m = block
            A, _ = form.weights([x[heads] for x in inputs], mask, block, False)
            flat[heads, rows] = A @ values[heads, :m]
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the tensors of the backward pass."""
        ctx.form, ctx.is_causal, *tensors = inputs
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to v, the mask and the tensors."""
        (grad,), (v, attn_mask, *saved, out) = grads, ctx.saved_tensors
        tensors = [x for x in saved if x is not None]
        spare = SPARE[len(tensors) :]
        if needs_whole(grad, v, attn_mask, *tensors):
            return None, None, *differentiable(ctx, grad, v, attn_mask, tensors), *spare
        dmask = torch.zeros_like(attn_mask) if ctx.needs_input_grad[3] else None
        sums = [x.new_zeros(x.shape) for x in (v, *tensors)]
        values, outs, dout, dv = all_flat(v.dim() - 2, v, out, grad, sums[0])
        flat = [all_flat(v.dim() - 2, *xs) for xs in (tensors, sums[1:])]
        mask = BlockMask(attn_mask, ctx.is_causal, v)
        form = ctx.form.adapt(flat[0]) if hasattr(ctx.form, "adapt") else ctx.form
        with full_precision(v.device):  # autocast may be on again
            for block in _blocks(out, v, ctx.is_causal):
                heads, rows, m = block
                inputs, gradients = ([x[heads] for x in xs] for xs in flat)
                A, kept = form.weights(inputs, mask, block, True)
                g = dout[heads, rows]
                dv[heads, :m].baddbmm_(A.mT, g)
                beyond = g @ values[heads, :m].mT  # (b, C, m)
                beyond.sub_((g * outs[heads, rows]).sum(-1, keepdim=True))
                if dmask is not None:
                    mask.add_gradient(dmask, A * beyond, *block)
                form.spread(A, beyond, kept, inputs, gradients, block)
        return None, None, sums[0], dmask, *sums[1:], *spare

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], form: Any, is_causal: bool, *rest: Any) -> Any:
        """Make the mapped dimension one more leading dimension."""
        return _Chunked.apply(form, is_causal, *in_front(info, in_dims[2:], *rest)), 0


def in_front(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> list[Any]:
    """Move the mapped dimension of v, a mask and tensors to the front."""
    v, attn_mask, *tensors = arguments
    of_v, of_mask, *of_tensors = in_dims
    leading = v.dim() - 2 - (of_v is not None)
    if attn_mask is not None and of_mask is not None:
        attn_mask = to_front(info, attn_mask, of_mask)
        attn_mask = attn_mask[:, *(None,) * (leading + 3 - attn_mask.dim())]
    pairs = zip([v, *tensors], [of_v, *of_tensors], strict=True)
    v, *tensors = (None if x is None else to_front(info, x, dim) for x, dim in pairs)
    return [v, attn_mask, *tensors]


def to_front(info: Any, x: Tensor, dim: int | None) -> Tensor:
    """Move the dimension mapped by vmap to the front, or add it if x has none."""
    return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)


def stands_for_many(x: Tensor) -> bool:
    """Return whether a transform has stacked several tensors in x, which excludes `out=`."""
    if torch.compiler.is_compiling():
        return False
    try:
        x.untyped_storage()
    except (RuntimeError, NotImplementedError):  # how ``is_grads_batched`` shows
        return True
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def needs_whole(*tensors: Tensor | None) -> bool:
    """Return whether a backward pass has to be differentiable itself, or runs in a transform."""
    present = [x for x in tensors if x is not None]
    again = torch.is_grad_enabled() and any(x.requires_grad for x in present)
    return again or any(map(stands_for_many, present))


def _whole(
    form: Any, is_causal: bool, v: Tensor, attn_mask: Tensor | None, *tensors: Tensor
) -> Tensor:
    """Return the result with all of A in memory, which has derivatives of any order."""
    return Mask(attn_mask, is_causal).softmax(form.scores(*tensors)) @ v


def differentiable(
    ctx: Any, grad: Tensor, v: Tensor, attn_mask: Tensor | None, tensors: Tensors
) -> list[Tensor | None]:
    """Return the gradients of `_whole` with respect to v, the mask and the tensors."""
    learned = ctx.needs_input_grad[3]  # whether the mask has a gradient

    def again(v: Tensor, *rest: Tensor) -> Tensor:
        mask, tensors = (rest[0], rest[1:]) if learned else (attn_mask, rest)
        return _whole(ctx.form, ctx.is_causal, v, mask, *tensors)

    with full_precision(v.device):
        inputs = (v, attn_mask, *tensors) if learned else (v, *tensors)
        pull: Any = torch.func.vjp(again, *inputs)[1]
        dv, *rest = pull(grad)
    return [dv, *rest] if learned else [dv, None, *rest]


def combine(scores: Iterator[Tensor], hard: bool, keep: bool) -> tuple[Tensor, Tensors]:
    """Return log Σ_r exp(s_r), or max_r s_r, and for r > 1 the share of r in components 1..r."""
    total, shares = next(scores), []
    for score in scores:
        before = total
        combine = torch.maximum if hard else torch.logaddexp
        free = not keep and not torch.compiler.is_compiling()  # a traced graph may need gradients
        total = combine(before, score, out=score if free else None)
        if keep:
            shares.append(score.gt_(before) if hard else score.sub_(total).exp_())
    return total, shares


def split_shares(dS: Tensor, shares: Tensors) -> Iterator[tuple[int, Tensor]]:
    """Yield each component and its part of the gradient, the last one first."""
    for r in range(len(shares), 0, -1):
        part = dS * shares[r - 1]
        yield r, part
        dS = dS - part  # the rest is for components 1..r
    yield 0, dS


def spread_product(dS: Tensor, inputs: Tensors, grads: Tensors, block: Block) -> None:
    """Add the gradients of q and k for the gradient dS of that block of Q Kᵀ."""
    (q, k), (dq, dk), (_, rows, m) = inputs, grads, block
    dq[:, rows].baddbmm_(dS, k[:, :m])
    dk[:, :m].baddbmm_(dS.mT, q[:, rows])


def _blocks(out: Tensor, v: Tensor, is_causal: bool) -> list[Block]:
    """Cut heads and queries; on a CPU so that the scores of a block stay in its cache."""
    b, M = math.prod(v.shape[:-2]), v.shape[-2]
    step = max(1, b if v.device.type != "cpu" else SCORES // (CHUNK * max(M, 1)))
    heads = [slice(h, h + step) for h in range(0, b, step)]
    return [Block(h, rows, m) for h in heads for rows, m in chunks(out, v, is_causal)]


def chunks(q: Tensor, v: Tensor, is_causal: bool) -> list[tuple[slice, int]]:
    """Cut the queries into slices, each with the number of keys that it may attend."""
    N, M = q.shape[-2], v.shape[-2]
    cuts = [slice(a, min(a + CHUNK, N)) for a in range(0, N, CHUNK)]
    return [(rows, min(rows.stop, M) if is_causal else M) for rows in cuts]
