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
and log-sum-exp puts the R results together. Keys that are shifts of one key have a form of their
own, in `shifted_mixture`, which shares `_Chunked`; `mixture_layer` has the layer.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from derived_attention.attention.blocks import (
    Block,
    Mask,
    Tensors,
    add_mask,
    attend,
    chunks,
    combine,
    cut,
    split_shares,
    spread_product,
)
from derived_attention.attention.checks import (
    FLOATING,
    check_attention,
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
    _open_dead_rows,
    _widen,
    causal_mask,
    sdpa,
)


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
            attn_mask = causal_mask(q.shape[-2], k.shape[-2], q.device)
        A = _masked_softmax(scores, attn_mask)
        return (A @ v.to(A.dtype)).to(q.dtype)


def _masked_softmax(scores: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Softmax over the last dimension, with rows of zeros where all is masked."""
    if attn_mask is None:
        return scores.softmax(-1)
    attn_mask, alive = _open_dead_rows(torch.atleast_1d(attn_mask), scores.dtype)
    return add_mask(scores, attn_mask).softmax(-1).masked_fill(~alive, 0)


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
        if hard and k.shape[-3] > 1:
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
    q, k, _ = _augment(q, k, v[..., :0], parts, parts.precisions.dtype)
    return attend(_Logarithms(hard), v, attn_mask, is_causal, parts.scale * q, k)


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


class _Logarithms(NamedTuple):
    """Weights exp(s_ij), where s_ij = log Σ_r exp(q_i·k_jr), or max_r q_i·k_jr if hard."""

    hard: bool

    def weights(self, ours: Tensors, mask: Mask, block: Block, keep: bool) -> tuple[Tensor, Any]:
        """Take q (b, N, E), k (b, R, M, E); return rows of A (b, C, m), and shares if `keep`."""
        q, k = ours[0][:, block.rows], ours[1][:, :, : block.m]
        total, shares = combine((q @ key.mT for key in k.unbind(1)), self.hard, keep)
        return mask.softmax(total, block), shares

    def spread(self, dS: Tensor, shares: Any, ours: Tensors, grads: Tensors, block: Block) -> None:
        """Add to `grads` what those rows of scores, with the gradient dS, give to our tensors."""
        (q, k), (dq, dk) = ours, grads
        for r, own in split_shares(dS, shares):
            spread_product(own, [q, k[:, r]], [dq, dk[:, r]], block)


# --- the linear kernel ---------------------------------------------------------------------------


def linear_mixture_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Mixture of linear keys with all R matrices π_r φ(q_i)ᵀφ(k_jr) in memory.

    Arguments, result and errors are those of `linear_mixture_attention`, but for the mask, which
    may be any that broadcasts to ``(..., H, N, M)``.
    """
    pi, phi_q, phi_k = _linear(q, k, v, attn_mask, is_causal, **options)
    if is_causal:
        attn_mask = causal_mask(q.shape[-2], k.shape[-2], q.device)
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
    scale: float | None = None,
    priors: Tensor | None = None,
    feature_map: FeatureMap = elu_feature_map,
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
    for rows, m in chunks(q, k, is_causal) if k.shape[-2] else []:
        here = None if mask is None else cut(mask, rows, m)
        if is_causal:
            here = parts.precisions.new_ones(rows.stop - rows.start, m).tril(rows.start) > 0
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
