"""Attention block by block, for weights that no fused kernel makes: what mixtures share.

A form, such as that of `mixture.fast`, says how the weights of a block of
queries follow from its tensors, and passes their gradient on. This module runs over the blocks,
forward and, with the weights made again, backward: so no (N, M) matrix is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from derived_attention.attention.frame.checks import is_symbolic
from derived_attention.attention.frame.convention import full_precision
from derived_attention.attention.frame.masks import BlockMask, Mask, flat_heads

Tensors = list[Tensor]

SPARE = (None,) * 4  # compilers want as many tensors for each form
CHUNK = 128  # queries whose scores are in memory at a time, in the forms that store some
SCORES = 2**17  # about as many of them at a time on a CPU, from some of the heads: for its cache


def attend(form: Any, v: Tensor, mask: Mask, *tensors: Tensor) -> Tensor:
    """Run `_Chunked` in the dtype of `tensors`, with zeros for a query that may attend nothing."""
    v = v.to(tensors[0].dtype)
    attn_mask, alive = mask.opened(v.dtype)
    if is_symbolic(tensors[0].shape[-2], v.shape[-2]):
        out = _whole(form, mask.is_causal, v, attn_mask, *tensors)
    else:
        out = _Chunked.apply(form, mask.is_causal, v, attn_mask, *tensors, *SPARE[len(tensors) :])
    return out if alive is None else out.masked_fill(~alive, 0)


class Block(NamedTuple):
    """Some heads, all leading dimensions being viewed as one; some queries; how many keys."""

    heads: slice
    rows: slice
    m: int


class _Chunked(torch.autograd.Function):
    """Attention block by block, with weights that `form` makes, as `_Most` of mixtures does.

    The backward pass makes them again. Their logarithms have the gradient dS = A ∘ (dO Vᵀ −
    rowsum(dO ∘ out)), whose two factors `form` takes, to pass it on to its tensors. Where that
    gradient is to be differentiated again, it is that of `_whole` instead.
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
        """Take v, a mask with no row all masked, and two or four tensors as `form` wants them."""
        tensors = [x for x in (a, b, c, d) if x is not None]
        out = v.new_empty(*tensors[0].shape[:-1], v.shape[-1])
        values, flat, *ours = (flat_heads(x, v.dim() - 2) for x in (v, out, *tensors))
        mask = BlockMask(attn_mask, is_causal, v)
        form = form.settled(ours)
        for block in _blocks(out, v, is_causal):
            heads, rows, m = block
            A, _ = form.weights([x[heads] for x in ours], mask, block, False)
            flat[heads, rows] = A @ values[heads, :m]
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradients need."""
        ctx.form, ctx.is_causal, *given = inputs
        ctx.save_for_backward(*given, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to v, the mask and the tensors."""
        (grad,), (v, attn_mask, *given, out) = grads, ctx.saved_tensors
        tensors = [x for x in given if x is not None]
        spare = SPARE[len(tensors) :]
        some = [x for x in (grad, v, attn_mask, *tensors) if x is not None]
        again = torch.is_grad_enabled() and any(x.requires_grad for x in some)
        if again or any(map(stands_for_many, some)):
            return None, None, *differentiable(ctx, grad, v, attn_mask, tensors), *spare
        dmask = torch.zeros_like(attn_mask) if ctx.needs_input_grad[3] else None
        found = [x.new_zeros(x.shape) for x in (v, *tensors)]
        values, outs, dout, dv = (flat_heads(x, v.dim() - 2) for x in (v, out, grad, found[0]))
        flat = [[flat_heads(x, v.dim() - 2) for x in xs] for xs in (tensors, found[1:])]
        mask = BlockMask(attn_mask, ctx.is_causal, v)
        form = ctx.form.settled(flat[0])
        with full_precision(v.device):  # autocast may be on again
            for block in _blocks(out, v, ctx.is_causal):
                heads, rows, m = block
                ours, theirs = ([x[heads] for x in xs] for xs in flat)
                A, kept = form.weights(ours, mask, block, True)
                g = dout[heads, rows]
                dv[heads, :m].baddbmm_(A.mT, g)
                beyond = g @ values[heads, :m].mT  # (b, C, m)
                beyond.sub_((g * outs[heads, rows]).sum(-1, keepdim=True))
                if dmask is not None:
                    mask.add_gradient(dmask, A * beyond, *block)
                form.spread(A, beyond, kept, ours, theirs, block)
        return None, None, found[0], dmask, *found[1:], *spare

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], form: Any, is_causal: bool, *given: Any) -> Any:
        """Let the mapped dimension be one more leading dimension."""
        return _Chunked.apply(form, is_causal, *in_front(info, in_dims[2:], *given)), 0


def in_front(info: Any, in_dims: tuple[Any, ...], *given: Any) -> list[Any]:
    """Move the mapped dimension of v, a mask and tensors to the front."""
    v, attn_mask, *tensors = given
    of_v, of_mask, *of_tensors = in_dims
    leading = v.dim() - 2 - (of_v is not None)

    def front(x: Tensor, dim: int | None) -> Tensor:
        return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

    if attn_mask is not None and of_mask is not None:
        attn_mask = front(attn_mask, of_mask)
        attn_mask = attn_mask[:, *(None,) * (leading + 3 - attn_mask.dim())]
    pairs = zip(tensors, of_tensors, strict=True)
    return [front(v, of_v), attn_mask, *(None if x is None else front(x, d) for x, d in pairs)]


def stands_for_many(x: Tensor) -> bool:
    """Say whether a transform has put several tensors into one: no sum of one can take them."""
    if torch.compiler.is_compiling():
        return False
    try:
        x.untyped_storage()
    except (RuntimeError, NotImplementedError):  # how ``is_grads_batched`` shows
        return True
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def _whole(
    form: Any, is_causal: bool, v: Tensor, attn_mask: Tensor | None, *tensors: Tensor
) -> Tensor:
    """Return what `_Chunked` does, with all of A in memory: it can be differentiated at will."""
    return Mask(attn_mask, is_causal).softmax(form.scores(*tensors)) @ v


def differentiable(
    ctx: Any, grad: Tensor, v: Tensor, attn_mask: Tensor | None, tensors: Tensors
) -> list[Tensor | None]:
    """Return the gradients of `_Chunked` with respect to v, the mask and the tensors."""
    learned = ctx.needs_input_grad[3]  # else it is a constant here

    def again(v: Tensor, *rest: Tensor) -> Tensor:
        mask, tensors = (rest[0], rest[1:]) if learned else (attn_mask, rest)
        return _whole(ctx.form, ctx.is_causal, v, mask, *tensors)

    with full_precision(v.device):
        given = (v, attn_mask, *tensors) if learned else (v, *tensors)
        pull: Any = torch.func.vjp(again, *given)[1]
        dv, *found = pull(grad)
    return [dv, *found] if learned else [dv, None, *found]


def combine(scores: Iterator[Tensor], hard: bool, keep: bool) -> tuple[Tensor, Tensors]:
    """Return log Σ_r exp(s_r), or max_r s_r, and for r > 1 the share of r in components 1..r."""
    total, shares = next(scores), []
    for own in scores:
        before = total
        combine = torch.maximum if hard else torch.logaddexp
        free = not keep and not torch.compiler.is_compiling()  # a traced graph may want gradients
        total = combine(before, own, out=own if free else None)
        if keep:
            shares.append(own.gt_(before) if hard else own.sub_(total).exp_())
    return total, shares


def split_shares(dS: Tensor, shares: Tensors) -> Iterator[tuple[int, Tensor]]:
    """Yield each component and its part of the gradient, the last one first."""
    for r in range(len(shares), 0, -1):
        own = dS * shares[r - 1]
        yield r, own
        dS = dS - own  # what is left for components 1..r
    yield 0, dS


def spread_product(dS: Tensor, ours: Tensors, grads: Tensors, block: Block) -> None:
    """Add the gradients of q and k, where that block of Q Kᵀ has the gradient dS."""
    (q, k), (dq, dk), (_, rows, m) = ours, grads, block
    dq[:, rows].baddbmm_(dS, k[:, :m])
    dk[:, :m].baddbmm_(dS.mT, q[:, rows])


def _blocks(out: Tensor, v: Tensor, is_causal: bool) -> list[Block]:
    """Cut heads and queries: on a CPU so that the scores of a block stay in its cache."""
    b, M = math.prod(v.shape[:-2]), v.shape[-2]
    some = max(1, b if v.device.type != "cpu" else SCORES // (CHUNK * max(M, 1)))
    heads = [slice(h, h + some) for h in range(0, b, some)]
    return [Block(h, rows, m) for h in heads for rows, m in chunks(out, v, is_causal)]


def chunks(q: Tensor, v: Tensor, is_causal: bool) -> list[tuple[slice, int]]:
    """Cut the queries into rows, and say how many keys each cut may see."""
    N, M = q.shape[-2], v.shape[-2]
    cuts = [slice(a, min(a + CHUNK, N)) for a in range(0, N, CHUNK)]
    return [(rows, min(rows.stop, M) if is_causal else M) for rows in cuts]
