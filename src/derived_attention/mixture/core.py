"""Mixtures of keys: each token has R keys, and attention is a posterior (chapters 9 and 10).

The equation of this module, for keys k_jr with r = 1..R at token j, is ::

    h_i = Σ_j a_ij v_j,    a_ij = Σ_r exp(s_ijr) / Σ_j' Σ_r exp(s_ij'r)
    s_ijr = log π_r − D log σ_r − ‖q_i − k_jr‖² / 2σ_r²

a_ij is the probability that token j explains query i, if all tokens are equally probable a priori:
the posterior of eq. 5 of [Nguyen2022]. Eq. 7 has no D log σ_r, which only matters where the σ_r
differ: ``normalized=False`` omits it.
The hard form has max_r where this has Σ_r. The linear form replaces
exp(s_ijr) by π_r φ(q_i)ᵀφ(k_jr).

Write −‖q − k‖²/2σ² as q·k/σ² − ‖k‖²/2σ² − ‖q‖²/2σ². Only the middle term is new to softmax
attention: it is one more feature of the key, and 1 is that of the query. The last one cancels where
all σ are equal, and else is one feature more. So the mixture is softmax attention on R M keys, with
each value R times. The hard form makes some rows of scores at a time. `components` makes the
features. Keys that are shifts of one key have a form of their own, in `shifted`; `layer` has the
layer.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from derived_attention import formulas
from derived_attention.common.blocks import (
    Block,
    Tensors,
    attend,
    chunks,
    combine,
    split_shares,
    spread_product,
)
from derived_attention.common.checks import (
    check_query_mask,
    check_shape,
)
from derived_attention.common.convention import (
    full_precision,
    is_short,
    mechanism,
    prepare,
    reference,
)
from derived_attention.common.kernels import should_run_kernel
from derived_attention.common.masks import (
    BlockMask,
    Mask,
    causal_mask,
    masked_softmax,
    open_dead_rows,
)
from derived_attention.linear.core import (
    apply_feature_map,
    causal_problem,
    check_fused,
    elu_feature_map,
    fused_sums,
    weighted_means,
)
from derived_attention.mixture.components import (
    Components,
    centre,
    components_of,
    features,
    per_component,
)
from derived_attention.softmax.core import sdpa, widen
from derived_attention.softmax.joint import backend_of, joint_softmax

DENSE = 64  # queries and keys up to which the matrix of all scores is faster


@mechanism(components=True)
def mixture_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    priors: Any = None,
    variances: Any = None,
    distance: bool = True,
    normalized: Any = None,
    hard: bool = False,
) -> Tensor:
    """Attention with a mixture of R Gaussian keys at each token, without an (N, M) matrix.

    One softmax over R M keys: by one flash attention for each component, with an `attn_mask` by one
    call for all of them, and up to 64 queries and keys of one variance by the matrix of scores. The
    hard form computes some rows of scores at a time, and again in the backward pass.

    Parameters
    ----------
    scale : float, optional
        1/σ² of all components, 1/√D where left out. Excludes `variances`.
    priors : Tensor, optional
        π, ``(R,)`` or ``(H, R)``, not negative and not all 0; all equal where left out. A factor
        common to all divides out. A component whose prior is 0 takes no part.
    variances : float or Tensor, optional
        σ², positive: a number for all components, or a tensor ``(R,)`` or ``(H, R)``. The numbers
        of both tensors are checked on a CPU only.
    distance : bool
        True: the Gaussian kernel of eq. 7. False: s_ijr = log π_r + q_i·k_jr/σ_r², eq. 6.
    normalized : bool, optional
        True: eq. 5, of densities π_r 𝒩(q | k_r, σ_r² I), with their factor σ_r⁻ᴰ. False: eq. 7 as
        printed, a sum of π_r exp(−‖q − k_r‖²/2σ_r²). The two differ where variances do, and each
        is the other with π_r σ_rᴰ in place of π_r, or π_r σ_r⁻ᴰ. If it is left out, it is
        `distance`: dot products are not the exponents of a density.
    hard : bool
        True: max_r in place of Σ_r, the hard E-step of [Nguyen2022] with the priors left in; where
        they are equal they drop out. Where two components tie, the first one gets the gradient.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> keys = torch.stack([k, -k], -3)  # (B, H, R, N, D)
    >>> mixture_attention(q, keys, v, is_causal=True).shape
    torch.Size([2, 4, 10, 8])
    """
    parts = components_of(q, k, scale, hard, priors, variances, distance, normalized)
    if parts.equal and k.shape[-3] > 1 and is_short(q, k, DENSE):
        return attend_densely(q, k, v, mask, parts, hard)
    hard, causal = hard and k.shape[-3] > 1, mask.is_causal
    with full_precision(v.device):
        Q, K = features(q, k, parts, mask, parts.precisions.dtype if hard else parts.dtype)
        if hard:
            return attend(_Most(), v, mask, parts.scale * Q, K).to(q.dtype)
        V = v.to(Q.dtype)
        if mask.given is None and (backend := backend_of(Q, K[..., 0, :, :], V, causal)):
            return joint_softmax(backend, Q, K, V, None, causal, parts.scale).to(q.dtype)
        return _attend_joined_keys(Q, K, V, mask, parts.scale).to(q.dtype)


@mechanism(components=True)
def hard_mixture_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, **mixture: Any
) -> Tensor:
    """Attend by the hard form of `mixture_attention`, where only the best component counts.

    Parameters
    ----------
    scale : float, optional
        As in `mixture_attention`.
    mixture
        The keywords `priors`, `variances`, `distance` and `normalized` of `mixture_attention`.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> keys = torch.stack([k, -k], -3)  # (B, H, R, N, D)
    >>> hard_mixture_attention(q, keys, v).shape
    torch.Size([2, 4, 10, 8])
    """
    return mixture_attention.form(q, k, v, mask, scale, hard=True, **mixture)  # type: ignore


def attend_densely(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, parts: Components, hard: bool
) -> Tensor:
    """Attend to R M keys, whose components have one variance, by the matrix of their scores."""
    (N, D), (R, M), heads = q.shape[-2:], k.shape[-3:-1], math.prod(q.shape[:-2])
    with full_precision(q.device):
        Q, K = centre(q, k, parts, mask)
        bias = parts.log_weights
        if parts.distance:
            bias = torch.sub(bias, K.square().sum(-1, keepdim=True), alpha=parts.scale / 2)
        bias = bias.expand(*K.shape[:-1], 1).flatten(-3).unsqueeze(-2)  # (..., 1, R M)
        attn_mask = alive = None
        if mask.is_causal:
            attn_mask = causal_mask(N, M, q.device)
        elif mask.given is not None:
            attn_mask, alive = open_dead_rows(mask.given, Q.dtype)
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:  # to add is faster than to fill
                attn_mask = bias.new_zeros(attn_mask.shape).masked_fill(~attn_mask, -math.inf)
            attn_mask = attn_mask.expand(*attn_mask.shape[:-1], M)
            bias = bias + torch.cat([attn_mask] * R, -1)
        bias = bias.expand(*q.shape[:-2], -1, -1).reshape(heads, bias.shape[-2], R * M)
        Q, K = Q.reshape(heads, N, D), K.reshape(heads, R * M, D)
        S = torch.baddbmm(bias, Q, K.mT, alpha=parts.scale)  # (heads, N, R M)
        if hard:
            A = S.unflatten(-1, (R, M)).max(-2).values.softmax(-1)
        else:
            first, *others = S.softmax(-1).chunk(R, -1)
            A = sum(others, first)
            if mask.is_causal:  # the first query has one token: no later one may change a bit
                A.detach()[:, :1, :1] = 1
        H = torch.bmm(A, v.reshape(heads, M, v.shape[-1]).to(A.dtype))
        H = H.view(*q.shape[:-1], v.shape[-1])
    H = H if alive is None else H.masked_fill(~alive, 0)
    return H.to(q.dtype)


def _attend_joined_keys(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """Attend R M keys at once, k (..., R, M, E), with each value R times, under a mask."""
    R, Dv = k.shape[-3], v.shape[-1]
    if v.device.type == "cpu":  # whose kernel wants one width: before there are R of each value
        v = widen(v, k.shape[-1])
    V = v.unsqueeze(-3).expand(*k.shape[:-1], -1).flatten(-3, -2)  # (..., R M, Dv)
    is_causal = mask.is_causal and 0 not in (q.shape[-2], v.shape[-2])
    if is_causal:
        mask = Mask(causal_mask(q.shape[-2], v.shape[-2], q.device))
    if mask.given is not None and mask.given.shape[-1] > 1:
        mask = Mask(torch.cat([mask.given] * R, -1))
    H = sdpa(q, k.flatten(-3, -2), V, mask, scale)[..., :Dv]
    # The first causal query has one token, whose weight 1 is not rounded: it is v_1 to the bit.
    return torch.cat([v[..., :1, :Dv], H[..., 1:, :]], -2) if is_causal else H


class _Most(NamedTuple):
    """Weights exp(s_ij), where s_ij = max_r q_i·k_jr: the hard E-step."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return all s (..., N, M), of q (..., N, E) and k (..., R, M, E)."""
        return (q.unsqueeze(-3) @ k.mT).max(-3).values

    def weights(
        self, ours: Tensors, mask: BlockMask, block: Block, keep: bool
    ) -> tuple[Tensor, Any]:
        """Take q (b, N, E), k (b, R, M, E); return rows of A (b, C, m), and shares if `keep`."""
        q, k = ours[0][:, block.rows], ours[1][:, :, : block.m]
        total, shares = combine((q @ key.mT for key in k.unbind(1)), True, keep)
        return mask.softmax(total, *block), shares

    def spread(
        self, A: Tensor, beyond: Tensor, shares: Any, ours: Tensors, grads: Tensors, block: Block
    ) -> None:
        """Add the gradients of q and k through those rows of scores to `grads`."""
        (q, k), (dq, dk) = ours, grads
        for r, dS in split_shares(beyond.mul_(A), shares):
            spread_product(dS, [q, k[:, r]], [dq, dk[:, r]], block)


# --- the linear kernel ---------------------------------------------------------------------------


def _relative(priors: Tensor | None, k: Tensor) -> Tensor:
    """Return π as (R, 1, 1) or (H, R, 1, 1), the largest 1; a common factor divides out."""
    pi = per_component("priors", priors, k).to(torch.promote_types(k.dtype, torch.float32))
    return pi / pi.detach().amax(-3, keepdim=True)  # not by overflow


@mechanism(components=True, per_key=True)
def linear_mixture_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    priors: Any = None,
    feature_map: Any = elu_feature_map,
    fused: Any = None,
) -> Tensor:
    """Mixture of linear keys: `linear_attention` with the key features Σ_r π_r φ(k_jr).

    Parameters
    ----------
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean:
        True where a key may be attended. Floating: finite, or -inf; -8192 and below count as -inf.
        Its exponential multiplies the kernel Σ_r π_r φ(q_i)ᵀφ(k_jr).
    scale : float, optional
        Finite and positive; multiplies q before φ. If it is left out, nothing is multiplied.
    priors : Tensor, optional
        As in `mixture_attention`.
    feature_map, fused
        As in `linear_attention`.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> keys = torch.stack([k, -k], -3)  # (B, H, R, N, D)
    >>> linear_mixture_attention(q, keys, v, is_causal=True).shape
    torch.Size([2, 4, 10, 8])
    """
    if fused is not None:
        fused = check_fused(fused, mask, None)
    pi = _relative(priors, k)
    elu = feature_map is elu_feature_map  # then the kernel mixes them as it loads the keys

    def problem() -> dict[str, Any] | None:
        fields = causal_problem("mlk", mask, elu, q, v)
        return fields and fields | {"R": k.shape[-3]}

    kernel = (fused is not None or mask.is_causal) and should_run_kernel(
        fused, q, k, v, pi, problem=problem
    )
    if kernel and elu:
        return fused_sums(q, k, v, pi[..., 0, 0], scale=scale, elu=True, normalize=True)
    phi_q = apply_feature_map(feature_map, q if scale is None else scale * q)  # (..., N, F)
    phi_k = apply_feature_map(feature_map, k)  # (..., R, M, F)
    with full_precision(q.device):
        mixed = (pi * phi_k).sum(-3)
    if kernel:
        return fused_sums(phi_q, mixed, v, normalize=True, dtype=q.dtype)
    return weighted_means(phi_q, mixed, v, mask).to(q.dtype)


# --- expectation and maximisation ----------------------------------------------------------------


def responsibilities(q: Tensor, k: Tensor, *, scale: float | None = None, **mixture: Any) -> Tensor:
    """γ_ijr = exp(s_ijr) / Σ_r' exp(s_ijr'): how probable component r is, if token j explains i.

    Eq. 8 of [Nguyen2022], with the index j that γ lacks there, and j for j' in its denominator.
    The arguments `q`, `k`, `scale`, `priors`, `variances`, `distance` and `normalized`, and the
    errors, are those of `mixture_attention`. The result is ``(..., H, R, N, M)``, float32 at least,
    and sums to 1 over R. Queries do not depend on each other: for a long sequence, call it on
    parts of them.
    """
    _, scale = prepare(q, k, None, None, False, scale, components=True)
    parts = components_of(q, k, scale, False, **mixture)
    with full_precision(q.device):
        q, k = features(q, k, parts, Mask(), parts.precisions.dtype)
        return (parts.scale * (q.unsqueeze(-3) @ k.mT)).softmax(-3)


@torch.no_grad()
def em_priors(
    q: Tensor,
    k: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    query_mask: Tensor | None = None,
    **mixture: Any,
) -> Tensor:
    """Compute a step of EM for the priors of each head: π_r ← Σ_ij a_ij γ_ijr / Σ_ij a_ij.

    The queries are the data. The likelihood of query i, given the M tokens that it may attend, is
    Σ_j Σ_r exp(s_ijr) / M: a mixture of R M components, and a_ij γ_ijr is the responsibility of one
    of them. π_r is shared by all tokens, so the shares of component r are summed over i and j. If
    the priors sum to 1, the sum of log Σ_jr exp(s_ijr) over the queries never falls, whatever the
    kernel is.

    The update printed in [Nguyen2022], π_jr = Σ_i γ_ijr / N, has no a_ij. It is the step for one
    token j that had to explain all queries, those that attend elsewhere too. It can lower the
    likelihood above, and is not computed here.

    Parameters
    ----------
    q, k, attn_mask, is_causal, scale, mixture
        As in `mixture_attention`, without `hard`.
    query_mask : Tensor, optional
        Boolean ``(..., H, N)``: False where a query is padding and does not count.

    Returns
    -------
    Tensor
        π, ``(H, R)``, or ``(R,)`` where `q` is ``(N, D)``, float32 at least, without gradient. It
        sums to 1 over R, and is uniform where no query counts.
    """
    mask, scale = prepare(q, k, None, attn_mask, is_causal, scale, components=True)
    parts = components_of(q, k, scale, False, **mixture)
    check_query_mask(query_mask, q)
    if query_mask is not None:
        check_shape("query_mask", query_mask, tuple(q.shape[:-1]), "one for each query")
    counts = parts.precisions.new_zeros(*q.shape[-3:-2], k.shape[-3])
    with full_precision(q.device):
        q, k = features(q, k, parts, mask, parts.precisions.dtype)
        for rows, m in chunks(q, k, is_causal) if k.shape[-2] else []:
            shares = _shares(q[..., rows, :], k[..., :m, :], parts, mask.part(rows, m, q.device))
            if query_mask is not None:
                shares = shares.masked_fill(~query_mask[..., None, rows], 0)
            counts += shares.sum(-1).sum_to_size(counts.shape)
    total = counts.sum(-1, keepdim=True)
    return torch.where(total == 0, 1 / k.shape[-3], counts / total)


def _shares(q: Tensor, k: Tensor, parts: Components, mask: Tensor | None) -> Tensor:
    """Return Σ_j a_ij γ_ijr (..., H, R, C) of some queries."""
    scores = parts.scale * (q.unsqueeze(-3) @ k.mT)  # (..., H, R, C, m)
    A = masked_softmax(scores.logsumexp(-3), mask)
    return (A.unsqueeze(-3) * scores.softmax(-3)).sum(-1)


# --- the formulas, with the same arguments ---


@reference(mixture_attention, formulas.mgk, components=True)
def mixture_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, priors: Any = None,
    variances: Any = None, distance: Any = True, normalized: Any = None, hard: Any = False,
) -> dict[str, Any]:  # fmt: skip
    """Check priors and variances, and put them together."""
    parts = components_of(q, k, scale, hard, priors, variances, distance, normalized)
    return {"components": parts, "hard": hard}


@reference(hard_mixture_attention, formulas.mgk, components=True)
def hard_mixture_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, priors: Any = None,
    variances: Any = None, distance: Any = True, normalized: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Do what `mixture_attention_reference` does with ``hard=True``."""
    parts = components_of(q, k, scale, True, priors, variances, distance, normalized)
    return {"components": parts, "hard": True}


@reference(linear_mixture_attention, formulas.mlk, components=True)
def linear_mixture_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, priors: Any = None,
    feature_map: Any = elu_feature_map,
) -> dict[str, Any]:  # fmt: skip
    """Check the priors, and the feature map's results."""
    return {
        "priors": per_component("priors", priors, k),
        "feature_map": functools.partial(apply_feature_map, feature_map),
    }
