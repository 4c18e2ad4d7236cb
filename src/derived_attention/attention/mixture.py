"""Mixtures of keys: each token has R keys, and attention is a posterior (chapters 9 and 10).

The equation of this module, eq. 7 of [Nguyen2022], for keys k_jr with r = 1..R at token j, is ::

    h_i = Σ_j a_ij v_j,    a_ij = Σ_r exp(s_ijr) / Σ_j' Σ_r exp(s_ij'r)
    s_ijr = log π_r − ‖q_i − k_jr‖² / 2σ_r²

a_ij is the probability that token j explains query i, if all tokens are as probable beforehand. The
hard form has max_r where this has Σ_r. The linear form replaces exp(s_ijr) by π_r φ(q_i)ᵀφ(k_jr).

Write −‖q − k‖²/2σ² as q·k/σ² − ‖k‖²/2σ² − ‖q‖²/2σ². Only the middle term is new to softmax
attention: it is one more feature of the key, and 1 is that of the query. The last one cancels where
all σ are equal, and else is one feature more. So the mixture is softmax attention on R M keys, with
each value R times. Where tokens may only see their past, each component is one causal attention,
and log-sum-exp puts the R results together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from derived_attention.attention.checks import (
    FLOATING,
    check_attention,
    check_count,
    check_floating,
    check_mask_kind,
    check_positive,
    check_shape,
)
from derived_attention.attention.linear import (
    FeatureMap,
    _check_callable,
    _divide,
    _features,
    _mask_factor,
    elu_feature_map,
    full_precision,
    linear_attention,
)
from derived_attention.attention.softmax import (
    MultiheadAttention,
    _merge_masks,
    _open_dead_rows,
    _widen,
    sdpa,
)

CHUNK = 64  # queries whose scores are in memory at a time, in the forms that store some


class _Components(NamedTuple):
    """What components have of their own: s = log_weights + scale · precisions · (−‖q − k‖²/2).

    Tensors are (R, 1, 1) or (H, R, 1, 1), float32 at least. A variance that is a Python number is
    in `scale`, by which kernels multiply without rounding the keys.
    """

    log_weights: Tensor
    precisions: Tensor
    scale: float
    equal: bool
    distance: bool
    dtype: torch.dtype  # what SDPA would compute in


# --- the formula ---------------------------------------------------------------------------------


def mixture_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    hard: bool = False,
    **mixture: Any,
) -> Tensor:
    """Eq. 7 as it is written, with all differences q_i − k_jr in memory: O(R N M D).

    Arguments, result and errors are those of `mixture_attention`.
    """
    _check_keys(q, k, v, attn_mask, is_causal, scale)
    parts = _components(q, k, scale, hard, **mixture)
    with full_precision(q.device):
        queries, keys = q.to(parts.precisions), k.to(parts.precisions)
        if parts.distance:
            difference = queries[..., None, :, None, :] - keys[..., None, :, :]
            products = -difference.square().sum(-1) / 2  # (..., H, R, N, M)
        else:
            products = queries.unsqueeze(-3) @ keys.mT
        scores = parts.log_weights + parts.scale * parts.precisions * products
        scores = scores.max(-3).values if hard else scores.logsumexp(-3)
        if is_causal:
            attn_mask = _past(slice(0, q.shape[-2]), k.shape[-2], q.device)
        A = _masked_softmax(scores, attn_mask)
        return (A @ v.to(A.dtype)).to(q.dtype)


def _masked_softmax(scores: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Softmax over the last dimension, with rows of zeros where all is masked."""
    if attn_mask is None:
        return scores.softmax(-1)
    attn_mask, alive = _open_dead_rows(torch.atleast_1d(attn_mask), scores.dtype)
    return _add_mask(scores, attn_mask).softmax(-1).masked_fill(~alive, 0)


def _add_mask(scores: Tensor, attn_mask: Tensor) -> Tensor:
    if attn_mask.dtype == torch.bool:
        return scores.masked_fill(~attn_mask, -math.inf)
    return scores + attn_mask


def _past(rows: slice, m: int, device: torch.device) -> Tensor:
    """Those rows of the causal mask, and m columns."""
    i = torch.arange(rows.start, rows.stop, device=device)
    return torch.arange(m, device=device) <= i[:, None]


# --- the fast forms ------------------------------------------------------------------------------


def mixture_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    priors: Tensor | None = None,
    variances: float | Tensor | None = None,
    distance: bool = True,
    normalised: bool = False,
    hard: bool = False,
) -> Tensor:
    """Attention with a mixture of R Gaussian keys at each token, without an (N, M) matrix.

    One softmax attention on R M keys; R of them on M keys, merged, in the causal form on a CPU. The
    causal form on other devices, and the hard form, compute `CHUNK` rows of scores at a time, and
    again in the backward pass.

    Parameters
    ----------
    q : Tensor
        Queries ``(..., H, N, D)``, as in `softmax_attention`.
    k : Tensor
        Keys ``(..., H, R, M, D)``: R ≥ 1 components for each of M tokens.
    v : Tensor
        Values ``(..., H, M, Dv)``: one for each token.
    attn_mask : Tensor, optional
        As in `softmax_attention`, broadcastable to ``(..., H, N, M)``: a token is masked with all
        its components.
    is_causal : bool
        Query i attends tokens j ≤ i, counted from the top left also where N ≠ M. Excludes
        `attn_mask`.
    scale : float, optional
        1/σ² of all components, 1/√D where left out. Excludes `variances`.
    priors : Tensor, optional
        π, ``(R,)`` or ``(H, R)``, not negative; all equal where left out. A factor common to all
        divides out. Values are not looked at. A component whose prior is 0 is not there.
    variances : float or Tensor, optional
        σ², positive: a number for all components, or a tensor ``(R,)`` or ``(H, R)``, whose values
        are not looked at.
    distance : bool
        True: the Gaussian kernel of eq. 7. False: s_ijr = log π_r + q_i·k_jr/σ_r², eq. 6.
    normalised : bool
        False: eq. 7 as printed, a sum of π_r exp(−‖q − k_r‖²/2σ_r²). True: eq. 5, of densities
        π_r 𝒩(q | k_r, σ_r² I), which have a factor σ_r⁻ᴰ more. The two differ where variances do,
        and each is the other with π_r σ_r⁻ᴰ in place of π_r, or π_r σ_rᴰ.
    hard : bool
        True: max_r in place of Σ_r, the hard E-step of [Nguyen2022] with the priors left in; where
        they are equal they drop out. Where two components tie, the first one gets the gradient.

    Returns
    -------
    Tensor
        ``(..., H, N, Dv)``, in the dtype of `q`. Zeros for a query that may attend nothing.

    Raises
    ------
    TypeError, ValueError
        As in `softmax_attention`; for keys without a dimension of components, priors or variances
        of another shape, `scale` with `variances`, `normalised` without `distance`.
    """
    _check_keys(q, k, v, attn_mask, is_causal, scale)
    parts = _components(q, k, scale, hard, priors, variances, distance, normalised)
    with full_precision(q.device):
        if hard:
            return _chunked(q, k, v, parts, attn_mask, is_causal, hard).to(q.dtype)
        if is_causal and q.numel() and v.numel():
            form = _merged if q.device.type == "cpu" else _chunked
            return form(q, k, v, parts).to(q.dtype)
        return _joined(q, k, v, parts, attn_mask).to(q.dtype)


def hard_mixture_attention_reference(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """`mixture_attention_reference` with ``hard=True``, and the other arguments of that."""
    return mixture_attention_reference(q, k, v, hard=True, **options)


def hard_mixture_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """`mixture_attention` with ``hard=True``, and the other arguments of that."""
    return mixture_attention(q, k, v, hard=True, **options)


def _joined(
    q: Tensor, k: Tensor, v: Tensor, parts: _Components, attn_mask: Tensor | None
) -> Tensor:
    """Attend to R M keys at once."""
    R, M, Dv = k.shape[-3], k.shape[-2], v.shape[-1]
    q, k, v = _augment(q, k, v, parts, parts.dtype)
    v = v.unsqueeze(-3).expand(*k.shape[:-1], -1)  # (..., H, R, M, ·)
    if attn_mask is not None:
        attn_mask = torch.atleast_1d(attn_mask)
        sizes = (*attn_mask.shape[:-1], R, M)
        attn_mask = attn_mask.unsqueeze(-2).expand(sizes).flatten(-2)  # (..., N, R M)
    keys, values = k.flatten(-3, -2), v.flatten(-3, -2)
    return sdpa(q, keys, values, attn_mask=attn_mask, scale=parts.scale)[..., :Dv]


def _merged(q: Tensor, k: Tensor, v: Tensor, parts: _Components) -> Tensor:
    """Attend to each component causally, and merge."""
    *batch, N, Dv = *q.shape[:-1], v.shape[-1]
    heads = (math.prod(batch[:-1]), batch[-1] if batch else 1)  # the kernel wants (B, H, ·, ·)
    wide = _augment(q, k, v, parts, parts.dtype)
    q, k, v = (x.reshape(*heads, *x.shape[len(batch) :]) for x in wide)
    return _Merged.apply(q, k, v, parts.scale)[..., :Dv].reshape(*batch, N, Dv)


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: _Components,
    attn_mask: Tensor | None = None,
    is_causal: bool = True,
    hard: bool = False,
) -> Tensor:
    """Compute the scores of some queries at a time, in float32 at least."""
    dtype = parts.precisions.dtype
    q, k, _ = _augment(q, k, v[..., :0], parts, dtype)
    alive = None
    if attn_mask is not None:
        attn_mask, alive = _open_dead_rows(torch.atleast_2d(attn_mask), dtype)
    out = _Chunked.apply(parts.scale * q, k, v.to(dtype), attn_mask, is_causal, hard)
    return out if alive is None else out.masked_fill(~alive, 0)


def _augment(
    q: Tensor, k: Tensor, v: Tensor, parts: _Components, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Append the features with which scale · q_i·k_jr is s_ijr, up to a term of i alone.

    They are computed in float32 at least, and cast to `dtype` together with v. On a CPU, whose
    kernel wants one width, zeros make all three as wide as the widest.
    """
    q, k = q.to(parts.precisions), k.to(parts.precisions)
    bias = parts.log_weights / parts.scale  # (..., R, 1, 1)
    if parts.distance:
        bias = bias - parts.precisions * k.square().sum(-1, keepdim=True) / 2
    bias = bias.clamp(min=torch.finfo(dtype).min / 2)  # −∞ − −∞ would be NaN
    pairs = [(torch.ones_like(q[..., :1]), x) for x in _split(bias, dtype)]
    if parts.distance and not parts.equal:  # ‖q‖² does not cancel: what is beyond component 1
        beyond = (parts.precisions[..., :1, :, :] - parts.precisions) * q.shape[-1] / 2
        lengths, beyonds = (_split(x, dtype) for x in (q.square().mean(-1, keepdim=True), beyond))
        pairs += [(x, y) for n, x in enumerate(lengths) for y in beyonds[: len(beyonds) - n]]
    ours, theirs = zip(*pairs, strict=True)
    sizes = (*k.shape[:-1], 1)
    q = torch.cat([q.to(dtype), *(x.to(dtype) for x in ours)], -1)
    k = torch.cat([(parts.precisions * k).to(dtype), *(x.expand(sizes) for x in theirs)], -1)
    v = v.to(dtype)
    if q.device.type != "cpu":
        return q, k, v
    width = max(q.shape[-1], v.shape[-1])
    return _widen(q, width), _widen(k, width), _widen(v, width)


def _split(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return x, or in half precision two numbers that add up to it: x rounded, and the rest.

    Without the rest, the rounding of a large ‖k‖²/2σ² would be an error of the score. The gradient
    of x is that of the first: the rest takes as much from it as it gives.
    """
    if torch.finfo(dtype).bits >= 32:
        return [x.to(dtype)]
    rounded = x.to(dtype)
    return [rounded, (x - rounded.to(x.dtype)).to(dtype)]


class _Merged(torch.autograd.Function):
    """Causal attention to R sets of keys with the same values, merged by log-sum-exp.

    With the lse of all scores, P_r = exp(S_r − lse), out = Σ_r P_r V, and the gradient of S_r is
    P_r ∘ (dO Vᵀ − rowsum(dO ∘ out)): the kernel's own backward pass, if it is given both of them.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Take (B, H, N, E), (B, H, R, M, E), (B, H, M, E) of one dtype on the CPU."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        first, *others = k.unbind(-3)
        out, lse = flash(q, first, v, 0.0, True, scale=scale)
        for key in others:
            out_r, lse_r = flash(q, key, v, 0.0, True, scale=scale)
            lse = torch.logaddexp(lse, lse_r)  # (B, H, N), float32 at least
            share = (lse_r - lse).exp().unsqueeze(-1)
            out = torch.lerp(out.to(share.dtype), out_r.to(share.dtype), share)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to q, k and v."""
        q, k, v, out, lse = ctx.saved_tensors
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, dv = (torch.zeros_like(x, dtype=wide) for x in (q, v))
        dk = torch.empty_like(k)
        for key, dkey in zip(k.unbind(-3), dk.unbind(-3), strict=True):
            found = flash(grads[0], q, key, v, out, lse, 0.0, True, scale=ctx.scale)
            dq += found[0]
            dkey.copy_(found[1])
            dv += found[2]
        return dq.to(q.dtype), dk, dv.to(v.dtype), None


class _Chunked(torch.autograd.Function):
    """Softmax over j of log Σ_r exp(q_i·k_jr), or of max_r q_i·k_jr, `CHUNK` queries at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        hard: bool,
    ) -> Tensor:
        """Take (..., N, E), (..., R, M, E), (..., M, Dv), and a mask with no row all masked."""
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, attn_mask, out)
        ctx.is_causal, ctx.hard = is_causal, hard
        values, flat = _flat(v), _flat(out)
        space = q.new_empty(2, len(flat) * CHUNK * v.shape[-2])
        for rows, m in _chunks(q, v, is_causal):
            A, _ = _chunk_weights(q, k, attn_mask, is_causal, hard, rows, m, space)
            flat[:, rows] = A @ values[:, :m]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to q, k, v and the mask."""
        q, k, v, attn_mask, out = ctx.saved_tensors
        dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
        dmask = torch.zeros_like(attn_mask) if ctx.needs_input_grad[3] else None
        queries, values, grad, out, dqs, dvs = map(_flat, (q, v, grads[0], out, dq, dv))
        keys, dks = _flat(k, 3), _flat(dk, 3)
        with full_precision(q.device):  # autocast may be on again
            for rows, m in _chunks(q, v, ctx.is_causal):
                A, shares = _chunk_weights(q, k, attn_mask, ctx.is_causal, ctx.hard, rows, m)
                g = grad[:, rows]
                dvs[:, :m].baddbmm_(A.mT, g)
                dS = g @ values[:, :m].mT  # (b, C, m)
                dS.sub_((g * out[:, rows]).sum(-1, keepdim=True)).mul_(A)
                if dmask is not None:
                    part = _cut(dmask, rows, m)
                    part += dS.view(*q.shape[:-2], *dS.shape[1:]).sum_to_size(part.shape)
                for r in reversed(range(k.shape[-3])):
                    own = dS * shares[r - 1] if r else dS
                    dqs[:, rows].baddbmm_(own, keys[:, r, :m])
                    dks[:, r, :m].baddbmm_(own.mT, queries[:, rows])
                    dS = dS - own if r else dS  # what is left for components 1..r
        return dq, dk, dv, dmask, None, None


def _chunk_weights(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    hard: bool,
    rows: slice,
    m: int,
    space: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return those rows of A (b, C, m), and for r > 1 the share of r in components 1..r.

    With `space`, two vectors for the results, shares are left out: to allocate costs time.
    """
    queries, keys = _flat(q)[:, rows], _flat(k, 3)
    sizes = (*queries.shape[:-1], m)
    room = [None, None] if space is None else [x[: math.prod(sizes)].view(sizes) for x in space]
    total = torch.bmm(queries, keys[:, 0, :m].mT, out=room[0])
    shares = []
    for r in range(1, keys.shape[1]):
        scores = torch.bmm(queries, keys[:, r, :m].mT, out=room[1])
        before = total
        total = (torch.maximum if hard else torch.logaddexp)(total, scores, out=room[0])
        if space is None:
            shares.append(scores > before if hard else (scores - total).exp())
    if is_causal:
        total.masked_fill_(~_past(rows, m, q.device), -math.inf)
    if attn_mask is not None:
        split = total.view(*q.shape[:-2], *sizes[1:])
        total = _add_mask(split, _cut(attn_mask, rows, m)).view(sizes)
    return torch.softmax(total, -1, out=room[0]), shares


def _chunks(q: Tensor, v: Tensor, is_causal: bool) -> list[tuple[slice, int]]:
    """Cut the queries into rows, and say how many keys each cut may see."""
    N, M = q.shape[-2], v.shape[-2]
    cuts = [slice(a, min(a + CHUNK, N)) for a in range(0, N, CHUNK)]
    return [(rows, min(rows.stop, M) if is_causal else M) for rows in cuts]


def _flat(x: Tensor, last: int = 2) -> Tensor:
    """View all dimensions but the last ones as one."""
    return x.reshape(math.prod(x.shape[:-last]), *x.shape[-last:])


def _cut(attn_mask: Tensor, rows: slice, m: int) -> Tensor:
    """View those rows and columns of a mask, where it has more than one of them."""
    picked = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., rows, :]
    return picked if attn_mask.shape[-1] == 1 else picked[..., :m]


# --- shifted keys, linear kernel -----------------------------------------------------------------


def shifted_keys(k: Tensor, shifts: Tensor) -> Tensor:
    """Make k_jr = k_j + b_r, option B of [Nguyen2022]: R components from one projection.

    Parameters
    ----------
    k : Tensor
        Keys ``(..., H, M, D)``.
    shifts : Tensor
        b, ``(R, D)`` or ``(H, R, D)``.

    Returns
    -------
    Tensor
        ``(..., H, R, M, D)``.

    Raises
    ------
    TypeError, ValueError
        For arguments that are no floating tensors of one dtype, for other shapes.
    """
    check_floating({"k": k, "shifts": shifts})
    if k.dim() < 2:
        raise ValueError(f"k has shape {tuple(k.shape)}; expected (..., M, D)")
    R = shifts.shape[-2] if shifts.dim() > 1 and shifts.shape[-2] else "R"
    heads = k.shape[-3:-2] if shifts.dim() > 2 else ()
    check_shape("shifts", shifts, (*heads, R, k.shape[-1]), "(R, D) or (H, R, D), with R ≥ 1")
    return k.unsqueeze(-3) + shifts.unsqueeze(-2)


def shifted_mixture_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, shifts: Tensor, **options: Any
) -> Tensor:
    """`mixture_attention_reference` of `shifted_keys`.

    Arguments, result and errors are those of `shifted_mixture_attention`.
    """
    return mixture_attention_reference(q, shifted_keys(k, shifts), v, **options)


def shifted_mixture_attention(
    q: Tensor, k: Tensor, v: Tensor, *, shifts: Tensor, **options: Any
) -> Tensor:
    """Attention with the keys k_jr = k_j + b_r: `mixture_attention` of `shifted_keys`.

    Where variances are equal, one product Q Kᵀ would do, since −‖q − k − b‖²/2 is
    q·k + q·b − ‖k + b‖²/2 − ‖q‖²/2. But there is no fused kernel for a log-sum-exp in the score.

    Parameters
    ----------
    q, v, options
        As in `mixture_attention`.
    k, shifts : Tensor
        As in `shifted_keys`.

    Returns
    -------
    Tensor
        ``(..., H, N, Dv)``, in the dtype of `q`.

    Raises
    ------
    TypeError, ValueError
        As in `mixture_attention` and `shifted_keys`.
    """
    return mixture_attention(q, shifted_keys(k, shifts), v, **options)


def linear_mixture_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    priors: Tensor | None = None,
    feature_map: FeatureMap = elu_feature_map,
) -> Tensor:
    """Mixture of linear keys with all R matrices π_r φ(q_i)ᵀφ(k_jr) in memory.

    Arguments, result and errors are those of `linear_mixture_attention`, but for the mask, which
    may be any that broadcasts to ``(..., H, N, M)``.
    """
    pi, phi_q, phi_k = _linear(q, k, v, attn_mask, is_causal, scale, priors, feature_map)
    if is_causal:
        attn_mask = _past(slice(0, q.shape[-2]), k.shape[-2], q.device)
    with full_precision(q.device):
        kernel = (pi * (phi_q.unsqueeze(-3) @ phi_k.mT)).sum(-3)  # (..., H, N, M)
        if attn_mask is not None:
            kernel = kernel * _mask_factor(torch.atleast_2d(attn_mask), kernel.dtype)
        A = _divide(kernel, kernel.sum(-1, keepdim=True))
        return (A @ v.to(A.dtype)).to(q.dtype)


def linear_mixture_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    priors: Tensor | None = None,
    feature_map: FeatureMap = elu_feature_map,
) -> Tensor:
    """Mixture of linear keys: `linear_attention` with the key features Σ_r π_r φ(k_jr).

    Parameters
    ----------
    q, k, v, priors
        As in `mixture_attention`: ``(..., H, N, D)``, ``(..., H, R, M, D)``, ``(..., H, M, Dv)``.
    attn_mask, is_causal, scale, feature_map
        As in `linear_attention`: the mask is one over keys.

    Returns
    -------
    Tensor
        ``(..., H, N, Dv)``, in the dtype of `q`.

    Raises
    ------
    TypeError, ValueError
        As in `linear_attention` and `mixture_attention`.
    """
    pi, phi_q, phi_k = _linear(q, k, v, attn_mask, is_causal, scale, priors, feature_map)
    masks: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal}
    with full_precision(q.device):
        mixed, wide_v = (pi * phi_k).sum(-3), v.to(phi_q.dtype)
        out = linear_attention(phi_q, mixed, wide_v, feature_map=_identity, **masks)
        return out.to(q.dtype)


def _linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    priors: Tensor | None,
    feature_map: FeatureMap,
) -> tuple[Tensor, Tensor, Tensor]:
    """Check all arguments, and return π, φ(q) (..., N, F) and φ(k) (..., R, M, F)."""
    _check_keys(q, k, v, attn_mask, is_causal, scale)
    _check_callable(feature_map)
    wide = torch.promote_types(q.dtype, torch.float32)
    pi = _per_component("priors", priors, q, k).to(wide)
    phi_q = _features(feature_map, q if scale is None else scale * q, wide)
    return pi, phi_q, _features(feature_map, k, wide)


def _identity(x: Tensor) -> Tensor:
    return x


# --- expectation and maximisation ----------------------------------------------------------------


def responsibilities(q: Tensor, k: Tensor, *, scale: float | None = None, **mixture: Any) -> Tensor:
    """γ_ijr = exp(s_ijr) / Σ_r' exp(s_ijr'): how probable component r is, if token j explains i.

    Eq. 8 of [Nguyen2022], with the index j that γ lacks there, and j for j' in its denominator.
    Queries do not depend on each other: for a long sequence, call it on some of them at a time.

    Parameters
    ----------
    q, k, scale, mixture
        As in `mixture_attention`; `mixture` is any of `priors`, `variances`, `distance`,
        `normalised`.

    Returns
    -------
    Tensor
        ``(..., H, R, N, M)``, float32 at least, which sums to 1 over R.

    Raises
    ------
    TypeError, ValueError
        As in `mixture_attention`.
    """
    _check_keys(q, k, None, None, False, scale)
    parts = _components(q, k, scale, False, **mixture)
    with full_precision(q.device):
        return _component_scores(q, k, parts).softmax(-3)


def _component_scores(q: Tensor, k: Tensor, parts: _Components) -> Tensor:
    """Return s_ijr (..., H, R, N, M), up to a term of i alone."""
    q, k, _ = _augment(q, k, q[..., :0], parts, parts.precisions.dtype)
    return parts.scale * (q.unsqueeze(-3) @ k.mT)


@torch.no_grad()
def em_priors(
    q: Tensor,
    k: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    weighted: bool = True,
    query_mask: Tensor | None = None,
    **mixture: Any,
) -> Tensor:
    """One step of EM for the priors of each head: π_r ← Σ_ij a_ij γ_ijr / Σ_ij a_ij.

    The queries are the data. The likelihood of query i, given the M tokens that it may attend, is
    Σ_j Σ_r exp(s_ijr) / M: a mixture of R M components, and a_ij γ_ijr is the responsibility of one
    of them. π_r is shared by all tokens, so that it maximises the expected log-likelihood, the
    shares of component r are summed over i and j. The sum of log Σ_jr exp(s_ijr) over the queries
    never falls, whatever the kernel is: `normalised` or not.

    The update printed in [Nguyen2022], π_jr = Σ_i γ_ijr / N, has no a_ij. It is the step for one
    token j that had to explain all queries, those too that attend elsewhere. By it the likelihood
    above can fall.

    Parameters
    ----------
    q, k, attn_mask, is_causal, scale, mixture
        As in `mixture_attention`; `mixture` is any of `priors`, `variances`, `distance`,
        `normalised`.
    weighted : bool
        False: the printed update, averaged over the tokens j that each query may attend.
    query_mask : Tensor, optional
        Boolean ``(..., H, N)``: False where a query is padding and does not count.

    Returns
    -------
    Tensor
        π, ``(H, R)``, or ``(R,)`` where `q` is ``(N, D)``, float32 at least, without gradient. It
        sums to 1 over R, and is uniform where no query counts.

    Raises
    ------
    TypeError, ValueError
        As in `mixture_attention`; for a `query_mask` of another shape.
    """
    _check_keys(q, k, None, attn_mask, is_causal, scale)
    parts = _components(q, k, scale, False, **mixture)
    if query_mask is not None:
        check_mask_kind("query_mask", query_mask, q.device)
        check_shape("query_mask", query_mask, tuple(q.shape[:-1]), "one for each query")
    counts = parts.precisions.new_zeros(*q.shape[-3:-2], k.shape[-3])
    mask = None if attn_mask is None else torch.atleast_2d(attn_mask)
    for rows, m in _chunks(q, k, is_causal) if k.shape[-2] else []:
        here = _past(rows, m, q.device) if is_causal else None
        here = here if mask is None else _cut(mask, rows, m)
        with full_precision(q.device):
            scores = _component_scores(q[..., rows, :], k[..., :m, :], parts)
            if weighted:
                A = _masked_softmax(scores.logsumexp(-3), here)
            else:
                allowed = here if here is None or here.dtype == torch.bool else here != -math.inf
                A = _masked_softmax(torch.zeros_like(scores[..., 0, :, :]), allowed)
            found = (A.unsqueeze(-3) * scores.softmax(-3)).sum(-1)  # (..., H, R, C)
        if query_mask is not None:
            found = found.masked_fill(~query_mask[..., None, rows], 0)
        counts += found.sum(-1).sum_to_size(counts.shape)
    total = counts.sum(-1, keepdim=True)
    return torch.where(total > 0, counts / total, 1 / k.shape[-3])


# --- checks --------------------------------------------------------------------------------------


def _check_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> None:
    """Check what mixtures share with other attention, and that keys have components."""
    check_floating({"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v})
    if q.dim() < 2 or q.shape[-1] == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}; expected (..., N, D) with D at least 1")
    R, M = ("R", "M") if k.dim() < 3 else (k.shape[-3] or "R", k.shape[-2])
    expected = (*q.shape[:-2], R, M, q.shape[-1])
    check_shape("k", k, expected, "R ≥ 1 keys for each of M tokens, and the rest as in q")
    first = k[..., 0, :, :]
    check_attention(q, first, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)


def _components(
    q: Tensor,
    k: Tensor,
    scale: float | None,
    hard: bool,
    priors: Tensor | None = None,
    variances: float | Tensor | None = None,
    distance: bool = True,
    normalised: bool = False,
) -> _Components:
    """Check what mixtures have of their own, and put it together."""
    flags = {"hard": hard, "distance": distance, "normalised": normalised}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} is {flag!r}; expected True or False")
    if normalised and not distance:
        raise ValueError("normalised is True and distance False; expected a Gaussian to normalise")
    if scale is not None and variances is not None:
        raise ValueError("scale and variances were both given; expected one of them: scale is 1/σ²")
    D, wide = q.shape[-1], torch.promote_types(q.dtype, torch.float32)
    pi = _per_component("priors", priors, q, k).to(wide)
    there = pi > 0  # the logarithm of the others is −∞, and its gradient would be NaN
    log_weights = pi.where(there, 1).log().masked_fill(~there, -math.inf)
    if isinstance(variances, Tensor):
        precisions, scale = 1 / _per_component("variances", variances, q, k).to(wide), 1.0
    else:
        variance = math.sqrt(D) if variances is None else check_positive("variances", variances)
        precisions, scale = pi.new_ones(k.shape[-3], 1, 1), scale or 1 / variance
    if normalised:
        log_weights = log_weights + D / 2 * precisions.log()
    equal = k.shape[-3] == 1 or not isinstance(variances, Tensor)
    kind, dtype = q.device.type, q.dtype
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = dtype if dtype == torch.float64 else torch.get_autocast_dtype(kind)
    return _Components(log_weights, precisions, float(scale), equal, distance, dtype)


def _per_component(name: str, value: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """Check for a number for each component; return (R, 1, 1) or (H, R, 1, 1), ones for None."""
    R, heads = k.shape[-3], q.shape[-3:-2]
    if value is None:
        return torch.ones(R, 1, 1, device=q.device)
    if not isinstance(value, Tensor) or value.dtype not in FLOATING:
        kind = f"dtype {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} is of {kind}; expected a floating Tensor")
    if value.device != q.device:
        raise ValueError(f"{name} is on device {value.device}; expected {q.device}, that of q")
    if tuple(value.shape) not in ((R,), (*heads, R)):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; expected ({R},), one number for each "
            f"component, or {(*heads, R)}, for each head too"
        )
    return value[..., None, None]


# --- layers --------------------------------------------------------------------------------------


class MixtureAttention(MultiheadAttention):
    """Transformer-MGK's attention in H heads, with the interface of ``nn.MultiheadAttention``.

    The parameters are those of `MultiheadAttention`, whose projection makes the keys of the first
    component; ``key_weight`` (R − 1, embed_dim, kdim) and ``key_bias`` (R − 1, embed_dim) make the
    others. None depends on a length.

    Parameters
    ----------
    embed_dim, num_heads, args
        As in `MultiheadAttention`.
    components : int
        R, at least 1.
    shifted : bool
        False: R projections, option A of [Nguyen2022]. True: one projection, and a shift for each
        component, the parameter ``shifts`` (H, R, D), which starts as standard normal numbers.
    hard, linear : bool
        Whether to attend by `hard_mixture_attention` or `linear_mixture_attention`.
    priors : {"fixed", "learned", "em"}
        π is 1/R; or the softmax of the parameter ``prior_logits`` (H, R); or the buffer
        ``priors`` (H, R), and each forward pass in training mode ends with a step of `em_priors`
        on its queries. Padded ones do not count where `query` and `key` are one tensor. All start
        at 1/R.
    variances : float or sequence of float, optional
        σ², one for all components or one for each; √D where left out.
    learn_variances : bool
        Whether log σ² is a parameter, ``log_variances`` (H, R), that starts there.
    mixture : dict, optional
        Other keywords of the function: `distance`, `normalised`, `feature_map`.
    options
        The other arguments of `MultiheadAttention`, but for `attention`.

    Raises
    ------
    TypeError, ValueError
        As in `MultiheadAttention`; for a size, a variance or a name that is not as above; for
        `hard`, variances or "em" with `linear`, which has no Gaussians.

    Examples
    --------
    >>> layer = MixtureAttention(16, 2, components=3, priors="learned")
    >>> x = torch.zeros(2, 5, 16)
    >>> layer(x, x, x, need_weights=False)[0].shape
    torch.Size([2, 5, 16])
    """

    priors: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *args: Any,
        components: int = 2,
        shifted: bool = False,
        hard: bool = False,
        linear: bool = False,
        priors: str = "fixed",
        variances: float | Sequence[float] | None = None,
        learn_variances: bool = False,
        mixture: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        R = check_count("components", components, 1)
        if priors not in ("fixed", "learned", "em"):
            raise ValueError(f"priors is {priors!r}; expected 'fixed', 'learned' or 'em'")
        if linear and (hard or variances is not None or learn_variances or priors == "em"):
            raise ValueError(
                f"linear is True with hard={hard}, variances={variances}, priors={priors!r}; "
                "expected neither hard, nor variances, nor 'em': a linear kernel has no Gaussians"
            )
        super().__init__(embed_dim, num_heads, *args, attention=self._mix, **options)
        D, like = embed_dim // num_heads, self.out_proj.weight
        sigma2 = _variances(math.sqrt(D) if variances is None else variances, R)
        self.components, self.hard, self.linear = R, hard, linear
        self.mixture = {} if mixture is None else dict(mixture)
        self.fixed_variances = sigma2
        start = like.new_ones(num_heads, R) * like.new_tensor(sigma2)
        self.log_variances = nn.Parameter(start.log()) if learn_variances else None
        even = like.new_full((num_heads, R), 1 / R)
        self.prior_logits = nn.Parameter(torch.zeros_like(even)) if priors == "learned" else None
        self.register_buffer("priors", even if priors == "em" else None)
        kind: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        self.shifts = nn.Parameter(torch.randn(num_heads, R, D, **kind)) if shifted else None
        self.key_weight: nn.Parameter | None = None
        self.key_bias: nn.Parameter | None = None
        if R > 1 and not shifted:
            weights = [
                nn.init.xavier_uniform_(like.new_empty(embed_dim, self.kdim)) for _ in range(R - 1)
            ]
            self.key_weight = nn.Parameter(torch.stack(weights))
            bias = self.in_proj_bias is not None
            self.key_bias = nn.Parameter(like.new_zeros(R - 1, embed_dim)) if bias else None

    def keywords(self) -> dict[str, Any]:
        """Return what the function gets beside q, k, v and masks: priors, variances, `mixture`."""
        own = dict(self.mixture)
        if self.prior_logits is not None:
            own["priors"] = self.prior_logits.softmax(-1)
        elif self.priors is not None:
            own["priors"] = self.priors
        if self.log_variances is not None:
            own["variances"] = self.log_variances.exp()
        elif not self.linear:
            same = len(set(self.fixed_variances)) == 1  # a number spares a feature, see _augment
            many = self.out_proj.weight.new_tensor(self.fixed_variances)
            own["variances"] = self.fixed_variances[0] if same else many
        return own

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, **masks: Any) -> Tensor:
        if self.linear:
            return linear_mixture_attention(q, k, v, **masks, **self.keywords())
        return mixture_attention(q, k, v, hard=self.hard, **masks, **self.keywords())

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `MultiheadAttention.forward` does, and let EM take a step in training mode."""
        options = (need_weights, attn_mask, average_attn_weights, is_causal)
        results = super().forward(query, key, value, key_padding_mask, *options)
        if self.training and self.priors is not None:
            with torch.no_grad():
                q, k, _ = self._heads(query, key, value)
                M = key.shape[-2]
                masks: dict[str, Any] = {"is_causal": is_causal}
                if attn_mask is not None or key_padding_mask is not None:
                    merged = _merge_masks(attn_mask, key_padding_mask, is_causal, q, M)
                    masks = {"attn_mask": merged}
                if query is key and key_padding_mask is not None:
                    here = _merge_masks(None, key_padding_mask, False, q, M)  # (B, 1, 1, M)
                    here = here if here.dtype == torch.bool else here != -math.inf
                    masks["query_mask"] = here[..., 0, :].expand(q.shape[:-1])
                self.priors.copy_(em_priors(q, k, **masks, **self.keywords()))
        return results

    def _heads(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Project, and give the keys their dimension of components: (B, H, R, M, D)."""
        q, k, v = super()._heads(*inputs)
        if self.shifts is not None:
            return q, shifted_keys(k, self.shifts.to(k.dtype)), v
        keys = [k]
        if self.key_weight is not None:
            biases = [None] * len(self.key_weight) if self.key_bias is None else self.key_bias
            for weight, bias in zip(self.key_weight, biases, strict=True):
                own = F.linear(inputs[1], weight, bias)
                keys.append(own.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2))
        return q, torch.stack(keys, -3), v

    def _weights(self, q: Tensor, k: Tensor, **masks: Any) -> Tensor:
        identity = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)  # (M, M)
        return self._mix(q, k, identity.expand(*k.shape[:-3], -1, -1), **masks)

    def extra_repr(self) -> str:
        """Show what the parameters do not."""
        kind = "linear" if self.linear else "hard" if self.hard else "soft"
        return f"{kind}, components={self.components}"


def _variances(variances: float | Sequence[float], components: int) -> list[float]:
    """Check the variances of a layer, and return one for each component."""
    many = list(variances) if isinstance(variances, Sequence) else [variances] * components
    if len(many) != components:
        raise ValueError(f"variances is {variances}; expected one number, or {components} of them")
    return [check_positive("variances", x) for x in many]
