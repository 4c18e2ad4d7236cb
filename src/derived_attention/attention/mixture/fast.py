"""Mixtures of keys: each token has R keys, and attention is a posterior (chapters 9 and 10).

The equation of this module, for keys k_jr with r = 1..R at token j, is ::

    h_i = Σ_j a_ij v_j,    a_ij = Σ_r exp(s_ijr) / Σ_j' Σ_r exp(s_ij'r)
    s_ijr = log π_r − D log σ_r − ‖q_i − k_jr‖² / 2σ_r²

a_ij is the probability that token j explains query i, if all tokens are as probable beforehand: the
posterior of eq. 5 of [Nguyen2022]. Eq. 7 has no D log σ_r, which only matters where the σ_r differ:
``normalized=False``. The hard form has max_r where this has Σ_r. The linear form replaces
exp(s_ijr) by π_r φ(q_i)ᵀφ(k_jr).

Write −‖q − k‖²/2σ² as q·k/σ² − ‖k‖²/2σ² − ‖q‖²/2σ². Only the middle term is new to softmax
attention: it is one more feature of the key, and 1 is that of the query. The last one cancels where
all σ are equal, and else is one feature more. So the mixture is softmax attention on R M keys, with
each value R times. Where tokens may only see their past, and in the hard form, some rows of scores
are made at a time (`blocks`); on a CPU, the soft form makes tiles of them (`tiles`). Keys that are
shifts of one key have a form of their own, in `shifted_mixture`; `mixture_layer` has the layer.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from derived_attention.attention.engine.blocks import (
    Block,
    Tensors,
    attend,
    chunks,
    combine,
    split_shares,
    spread_product,
)
from derived_attention.attention.engine.kernels import chosen
from derived_attention.attention.engine.tiles import attend_by_tiles
from derived_attention.attention.frame.checks import (
    autocasts,
    check_flag,
    check_mask_kind,
    check_parameter,
    check_positive,
    check_shape,
    may_look_at,
)
from derived_attention.attention.frame.convention import full_precision, mechanism, prepare
from derived_attention.attention.frame.masks import (
    BlockMask,
    Mask,
    allowed,
    masked_softmax,
    nearer_zero,
    shared_offset,
)
from derived_attention.attention.linear.fast import (
    check_fused_is_causal,
    elu_feature_map,
    features,
    fused_sums,
    linear_attention,
    wide,
)
from derived_attention.attention.softmax.fast import sdpa, widen

WIDEST = 256  # features of a query or a value that the kernels have blocks for


class Components(NamedTuple):
    """What components have of their own: s = log_weights + scale · precisions · (−‖q − k‖²/2).

    Tensors are (R, 1, 1) or (H, R, 1, 1), float32 at least. A variance that is a Python number is
    in `scale`, by which kernels multiply without rounding the keys.
    """

    log_weights: Tensor
    precisions: Tensor
    scale: float
    equal: bool
    distance: bool
    dtype: torch.dtype  # what SDPA is to compute in


# --- the formula ---------------------------------------------------------------------------------


# --- the fast forms ------------------------------------------------------------------------------


@mechanism(components=True)
def mixture_attention(
    q, k, v, mask, scale, *, priors=None, variances=None, distance=True, normalized=None,
    hard=False, fused=None
) -> Tensor:  # fmt: skip
    """Attention with a mixture of R Gaussian keys at each token, without an (N, M) matrix.

    One product of weights and values for all components: on a CPU tile by tile (`tiles`), and in
    the kernels of `triton`. Elsewhere one softmax attention on R M keys;
    but the causal form, since a triangle fits no repeated keys, and the hard form compute some rows
    of scores at a time, and again in the backward pass.

    Parameters
    ----------
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
    normalized : bool, optional
        True: eq. 5, of densities π_r 𝒩(q | k_r, σ_r² I), with their factor σ_r⁻ᴰ. False: eq. 7 as
        printed, a sum of π_r exp(−‖q − k_r‖²/2σ_r²). The two differ where variances do, and each
        is the other with π_r σ_rᴰ in place of π_r, or π_r σ_r⁻ᴰ. True where left out, but with dot
        products, ``distance=False``, which have nothing to normalise.
    hard : bool
        True: max_r in place of Σ_r, the hard E-step of [Nguyen2022] with the priors left in; where
        they are equal they drop out. Where two components tie, the first one gets the gradient.
    fused : bool, optional
        True: run the Triton kernel of `engine.kernels`, an error where it cannot run,
        as where `attn_mask` requires a gradient, or q or v has more than 256 features. False, or
        left out: PyTorch's form.
    """
    parts = components_of(q, k, scale, hard, priors, variances, distance, normalized)
    if runs_kernel(fused, q, k, v, parts, mask):
        from derived_attention.attention.mixture import triton as mixture

        return mixture.mixture(q, k, v, parts, mask, hard)
    with full_precision(q.device):
        if k.shape[-3] > 1 and (mask.is_causal or hard or _in_parts(q)):
            return _chunked(q, k, v, parts, mask, hard).to(q.dtype)
        return _joined(q, k, v, parts, mask).to(q.dtype)


@mechanism(components=True)
def hard_mixture_attention(q, k, v, mask, scale, **own) -> Tensor:
    """`mixture_attention` with ``hard=True``, and the other arguments of that."""
    return mixture_attention(q, k, v, scale=scale, hard=True, **mask.keywords, **own)


def _in_parts(q: Tensor) -> bool:
    """Say whether to save R − 1 of R value products is worth more than one fused call.

    It is on a CPU, but for compilers, which would have every part in their graph.
    """
    return q.device.type == "cpu" and not torch.compiler.is_compiling()


def _by_tiles(*tensors: Tensor) -> bool:
    """Say whether tiles, which look at rows, may be those parts."""
    return all(_in_parts(x) and may_look_at(x) and x.numel() for x in tensors)


def _joined(q: Tensor, k: Tensor, v: Tensor, parts: Components, mask: Mask) -> Tensor:
    """Attend to R M keys at once."""
    R, M, Dv = k.shape[-3], k.shape[-2], v.shape[-1]
    if torch.finfo(parts.dtype).bits >= 32:  # half precision would round what is left once more
        q, k = centred(q, k, parts, mask)
    q, k, v = _augment(q, k, v, parts, parts.dtype)
    v = v.unsqueeze(-3).expand(*k.shape[:-1], -1)  # (..., H, R, M, ·)
    if mask.given is not None:
        sizes = (*mask.given.shape[:-1], R, M)
        mask = Mask(mask.given.unsqueeze(-2).expand(sizes).flatten(-2))  # (..., N, R M)
    keys, values = k.flatten(-3, -2), v.flatten(-3, -2)
    return sdpa(q, keys, values, mask, parts.scale)[..., :Dv]


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, parts: Components, mask: Mask, hard: bool = False
) -> Tensor:
    """Compute some of the scores at a time, in float32 at least."""
    q, k = centred(q, k, parts, mask)
    q, k, _ = _augment(q, k, v[..., :0], parts, parts.precisions.dtype)
    if hard or not _by_tiles(q, k, v):
        return attend(_Most() if hard else _Sum(), v, mask, parts.scale * q, k)
    return attend_by_tiles(_Sum(), v, mask, parts.scale * q, k)


def centred(q: Tensor, k: Tensor, parts: Components, mask: Mask) -> tuple[Tensor, Tensor]:
    """Take an offset that they share from all queries and keys (..., R, M, D), float32 at least.

    Distances stay, and so do weights and gradients. But ‖q − k‖² is taken apart, and what an offset
    of all tokens adds to the parts would not cancel without rounding errors. If causal, no query
    that its own future could change has a part in it.
    """
    q, k = q.to(parts.precisions), k.to(parts.precisions)
    if not parts.distance or 0 in (q.shape[-2], k.shape[-2]):
        return q, k
    keys = k[..., :2, :] if mask.is_causal else k
    offset = shared_offset(keys.detach().mean(-3), mask)  # (..., H, 1, D)
    alike = mask.given is None or mask.given.shape[-2] == 1
    one = q[..., :2, :][..., -1:, :] if mask.is_causal else q[..., :1, :]
    queries = q.mean(-2, keepdim=True) if alike and not mask.is_causal else one
    offset = nearer_zero(offset, queries.detach())
    return q - offset, k - offset.unsqueeze(-3)


def _augment(
    q: Tensor, k: Tensor, v: Tensor, parts: Components, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Append the features with which scale · q_i·k_jr is s_ijr, up to a term of i alone.

    They are computed in float32 at least, and cast to `dtype` together with v. On a CPU, whose
    kernel wants one width, zeros make all three as wide as the widest.
    """
    q, k = q.to(parts.precisions), k.to(parts.precisions)
    bias = parts.log_weights / parts.scale  # (..., R, 1, 1)
    if parts.distance:
        bias = bias - parts.precisions * k.square().sum(-1, keepdim=True) / 2
    unit = _unit(dtype)
    # −∞ − −∞ would be NaN, and so would be what overflows when it is multiplied by the scale
    bias = bias.clamp(min=torch.finfo(dtype).min / 4 / max(1.0, parts.scale) * unit)
    pairs = [(torch.full_like(q[..., :1], unit), x) for x in _split(bias / unit, dtype)]
    if parts.distance and not parts.equal:  # ‖q‖² does not cancel: what is beyond the widest
        widest = parts.precisions.amin(-3, keepdim=True)
        beyond = (widest - parts.precisions) * q.shape[-1] / 2
        pairs.append((q.square().mean(-1, keepdim=True), beyond))  # in float32 at least
    ours, theirs = zip(*pairs, strict=True)
    sizes = (*k.shape[:-1], 1)
    q = torch.cat([_fit(q, dtype), *(x.to(dtype) for x in ours)], -1)
    k = torch.cat([_fit(parts.precisions * k, dtype), *(x.expand(sizes) for x in theirs)], -1)
    v = v.to(dtype)
    if q.device.type != "cpu":
        return q, k, v
    width = max(q.shape[-1], v.shape[-1])
    return widen(q, width), widen(k, width), widen(v, width)


def _unit(dtype: torch.dtype) -> int:
    """Return what stands for 1 in a query, so that −‖k‖²/2 over it is a number of that dtype.

    The largest number of float16 is 65504, and a key of length 362 has that for ‖k‖²/2.
    """
    return 2048 if dtype == torch.float16 else 1


def _fit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to a dtype, and to its largest number what is larger."""
    limit = torch.finfo(dtype).max
    return x if x.dtype == dtype else x.clamp(-limit, limit).to(dtype)


def _split(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return x, or in half precision two numbers that add up to it: x rounded, and the rest.

    Without the rest, the rounding of a large ‖k‖²/2σ² would be an error of the score. The gradient
    of x is that of the first: the rest takes as much from it as it gives.
    """
    if torch.finfo(dtype).bits >= 32:
        return [x.to(dtype)]
    rounded = _fit(x, dtype)
    return [rounded, _fit(x - rounded.to(x.dtype), dtype)]


class _Sum(NamedTuple):
    """Weights Σ_r p_ijr, where p_ijr = exp(q_i·k_jr) / Σ_j'r' exp(q_i·k_j'r').

    The softmax runs over all R m scores of a query, so that no row of logarithms is needed: the
    gradient of the score s_ijr is p_ijr times what that of log Σ_r exp(s_ijr) is a_ij times.
    """

    def settled(self, ours: Tensors) -> _Sum:
        """Return itself: nothing depends on the data."""
        return self

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return all s_ij = log Σ_r exp(s_ijr) (..., N, M), of q (..., N, E), k (..., R, M, E)."""
        return (q.unsqueeze(-3) @ k.mT).logsumexp(-3)

    def weights(
        self, ours: Tensors, mask: BlockMask, block: Block, keep: bool
    ) -> tuple[Tensor, Any]:
        """Take q (b, N, E), k (b, R, M, E); return rows of A (b, C, m), and all p if `keep`."""
        q, k = ours[0][:, block.rows], ours[1][:, :, : block.m]
        s = q.new_empty(*q.shape[:2], *k.shape[1:3])  # (b, C, R, m)
        for r in range(k.shape[1]):
            mask.close(s[:, :, r].baddbmm_(q, k[:, r].mT, beta=0), *block)
        # In place, but for a traced graph, which may want gradients.
        free = not (torch.compiler.is_compiling() or torch.is_grad_enabled())
        p = torch.softmax(s.flatten(2), -1, out=s.flatten(2) if free else None).view_as(s)
        A = p.sum(2)
        if mask.is_causal and block.rows.start == 0 and block.m:  # one key: nothing to round
            A[:, 0, 0] = 1
        return A, p

    def spread(
        self, A: Tensor, beyond: Tensor, p: Tensor, ours: Tensors, grads: Tensors, block: Block
    ) -> None:
        """Add to `grads` what those rows of scores, with the gradients dS, give to our tensors."""
        (q, k), (dq, dk) = ours, grads
        for r in range(p.shape[2]):
            spread_product(p[:, :, r].mul_(beyond), [q, k[:, r]], [dq, dk[:, r]], block)


class _Most(NamedTuple):
    """Weights exp(s_ij), where s_ij = max_r q_i·k_jr: the hard E-step."""

    def settled(self, ours: Tensors) -> _Most:
        """Return itself: nothing depends on the data."""
        return self

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
        """Add to `grads` what those rows of scores, with the gradient dS, give to our tensors."""
        (q, k), (dq, dk) = ours, grads
        for r, own in split_shares(beyond.mul_(A), shares):
            spread_product(own, [q, k[:, r]], [dq, dk[:, r]], block)


# --- the linear kernel ---------------------------------------------------------------------------


@mechanism(components=True, per_key=True)
def linear_mixture_attention(
    q, k, v, mask, scale, *, priors=None, feature_map=elu_feature_map, fused=None
) -> Tensor:
    """Mixture of linear keys: `linear_attention` with the key features Σ_r π_r φ(k_jr).

    Parameters
    ----------
    priors : Tensor, optional
        As in `mixture_attention`.
    feature_map, fused
        As in `linear_attention`.
    """
    check_fused_is_causal(fused, mask)
    pi = per_component("priors", priors, q, k).to(wide(q))
    pi = pi / pi.detach().amax(-3, keepdim=True)  # a common factor divides out: not by overflow
    if chosen(fused, q, k, v) and feature_map is elu_feature_map:  # mixes them as it loads the keys
        return fused_sums(q, k, v, pi[..., 0, 0], scale=scale, elu=True, normalize=True)
    phi_q, phi_k = features(feature_map, q, k, scale)  # (..., N, F), (..., R, M, F)
    with full_precision(q.device):
        mixed = (pi * phi_k).sum(-3)
        own = {"feature_map": lambda x: x, "fused": fused, **mask.keywords}
        return linear_attention(phi_q, mixed, v.to(phi_q.dtype), **own).to(q.dtype)


# --- expectation and maximisation ----------------------------------------------------------------


def responsibilities(q: Tensor, k: Tensor, *, scale: float | None = None, **mixture: Any) -> Tensor:
    """γ_ijr = exp(s_ijr) / Σ_r' exp(s_ijr'): how probable component r is, if token j explains i.

    Eq. 8 of [Nguyen2022], with the index j that γ lacks there, and j for j' in its denominator.
    Arguments and errors are those of `mixture_attention`, but for `hard`. The result is
    ``(..., H, R, N, M)``, float32 at least, and sums to 1 over R. Queries do not depend on each
    other: for a long sequence, call it on some of them at a time.
    """
    _, scale = prepare(q, k, None, None, False, scale, components=True)
    parts = components_of(q, k, scale, False, **mixture)
    with full_precision(q.device):
        return _component_scores(*centred(q, k, parts, Mask()), parts).softmax(-3)


def _component_scores(q: Tensor, k: Tensor, parts: Components) -> Tensor:
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
    of them. π_r is shared by all tokens, so the shares of component r are summed over i and j. The
    sum of log Σ_jr exp(s_ijr) over the queries never falls, whatever the kernel is.

    The update printed in [Nguyen2022], π_jr = Σ_i γ_ijr / N, has no a_ij. It is the step for one
    token j that had to explain all queries, those too that attend elsewhere. By it the likelihood
    above can fall.

    Parameters
    ----------
    q, k, attn_mask, is_causal, scale, mixture
        As in `mixture_attention`, but for `hard`.
    weighted : bool
        False: the printed update, averaged over the tokens j that each query may attend.
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
    if query_mask is not None:
        check_mask_kind("query_mask", query_mask, q.device)
        check_shape("query_mask", query_mask, tuple(q.shape[:-1]), "one for each query")
    counts = parts.precisions.new_zeros(*q.shape[-3:-2], k.shape[-3])
    q, k = centred(q, k, parts, mask)
    for rows, m in chunks(q, k, is_causal) if k.shape[-2] else []:
        here = mask.part(rows, m, q.device)
        with full_precision(q.device):
            scores = _component_scores(q[..., rows, :], k[..., :m, :], parts)
            if weighted:
                A = masked_softmax(scores.logsumexp(-3), here)
            else:
                even = torch.zeros_like(scores[..., 0, :, :])
                A = masked_softmax(even, None if here is None else allowed(here))
            found = (A.unsqueeze(-3) * scores.softmax(-3)).sum(-1)  # (..., H, R, C)
        if query_mask is not None:
            found = found.masked_fill(~query_mask[..., None, rows], 0)
        counts += found.sum(-1).sum_to_size(counts.shape)
    total = counts.sum(-1, keepdim=True)
    return torch.where(total == 0, 1 / k.shape[-3], counts / total)


# --- checks --------------------------------------------------------------------------------------


def components_of(
    q: Tensor,
    k: Tensor,
    scale: float | None,
    hard: bool,
    priors: Tensor | None = None,
    variances: float | Tensor | None = None,
    distance: bool = True,
    normalized: bool | None = None,
) -> Components:
    """Check what mixtures have of their own, and put it together."""
    normalized = distance if normalized is None else normalized
    for name, flag in {"hard": hard, "distance": distance, "normalized": normalized}.items():
        check_flag(name, flag)
    if normalized and not distance:
        raise ValueError("normalized is True and distance False; expected a Gaussian to normalise")
    if scale is not None and variances is not None:
        raise ValueError("scale and variances were both given; expected one of them: scale is 1/σ²")
    D = q.shape[-1]
    pi = per_component("priors", priors, q, k).to(wide(q))
    there = pi > 0  # the logarithm of the others is −∞, and its gradient would be NaN
    log_weights = pi.where(there, 1).log().masked_fill(~there, -math.inf)
    if isinstance(variances, Tensor):
        precisions, scale = 1 / per_component("variances", variances, q, k).to(wide(q)), 1.0
    else:
        variance = math.sqrt(D) if variances is None else check_positive("variances", variances)
        precisions, scale = pi.new_ones(k.shape[-3], 1, 1), scale or 1 / variance
    if normalized:
        log_weights = log_weights + D / 2 * precisions.log()
    equal = k.shape[-3] == 1 or not isinstance(variances, Tensor)
    dtype = autocast_dtype(q)
    # Half precision would round k/σ², and float16 would end −‖k‖²/2σ² at a small number.
    if isinstance(variances, Tensor) or (dtype == torch.float16 and scale < 1e-4):
        dtype = torch.promote_types(dtype, torch.float32)
    return Components(log_weights, precisions, float(scale), equal, distance, dtype)


def autocast_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of q, or the one that autocast would have in its place."""
    if q.dtype == torch.float64 or not autocasts(q.device):
        return q.dtype
    return torch.get_autocast_dtype(q.device.type)


def runs_kernel(
    fused: bool | None, q: Tensor, k: Tensor, v: Tensor, parts: Components, mask: Mask
) -> bool:
    """Say whether the kernels of `derived_attention.attention.mixture.triton` are to run."""
    tensors = (q, k, v, parts.log_weights, parts.precisions, mask.given)
    if not chosen(fused, *(x for x in tensors if x is not None)):
        return False
    wide, obstacle = max(q.shape[-1], v.shape[-1]), ""
    if wide > WIDEST:
        obstacle = f"q or v has {wide} features; expected at most {WIDEST}"
    if mask.given is not None and mask.given.requires_grad:
        obstacle = "attn_mask requires a gradient; expected one that does not"
    if obstacle:
        raise ValueError(f"fused is True, and {obstacle}")
    return True


def per_component(name: str, value: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """Check for a number for each component; return (R, 1, 1) or (H, R, 1, 1), ones for None."""
    R, heads = k.shape[-3], q.shape[-3:-2]
    if value is None:
        return torch.ones(R, 1, 1, device=q.device)
    check_parameter(name, value, q, ((R,), (*heads, R)), "one number a component, or for each head")
    return value[..., None, None]
