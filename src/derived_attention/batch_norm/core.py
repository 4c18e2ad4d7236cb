"""Attention-BN: attention from a primal layer that batch-normalises its input (chapter 5).

The equation of this module, for the mean μ and the variances σ² of the keys, is ::

    h_i = Σ_j softmax_j( ((q_i − β μ) ⊙ s⁻¹)ᵀ ((k_j − β μ) ⊙ s⁻¹) / √D ) v_j

with s⁻¹ = 1/√(σ² + ε) for each feature and β = 1 in the full form (eq. 22), with s = 1 and any β
in the recentred form (eq. 26). The keys that query i may attend are its training set, so μ and σ²
are taken over them: padding does not count, and a causal query sees the mean of its past.

Softmax does not change when a number is added to all scores of a query. So centring the keys
changes nothing, s⁻¹ can be applied twice to the query, and Attention-BN is one call of softmax
attention with another query, ``(q_i − β μ) / (σ² + ε)``. `normalized_attention_reference` computes
the formula as printed, `normalized_attention` makes that call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch import float32 as F32

from derived_attention import formulas
from derived_attention.common.checks import (
    Mechanism,
    accumulation_dtype,
    check_callable,
    check_finite,
    check_flag,
    check_parameter,
    check_positive,
)
from derived_attention.common.convention import (
    call,
    full_precision,
    mechanism,
    plain,
    reference,
    unwrap,
)
from derived_attention.common.masks import Mask, anchor, attended_keys, shared_offset
from derived_attention.common.running import running_sums
from derived_attention.softmax.core import softmax_attention, softmax_attention_reference

FIRST = 64  # queries with the statistics of so few keys that half precision may not hold them
HALF = (torch.float16, torch.bfloat16)


@mechanism
def normalized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    beta: Any = 1.0,
    eps: Any = None,
    attention: Any = softmax_attention,
    center_keys: Any = None,
) -> Tensor:
    """Attention-BN, eqs. 22 and 26 of [Nguyen2023], at the cost of the mechanism it is given.

    μ and σ² are taken over the keys that a query may attend by its mask; a floating mask excludes a
    key where it is -inf. A mask that is the same for all queries (padding) costs nothing; any
    other costs two products with it. The causal form uses running sums: with the printed μ, over
    all keys, a query would depend on its future. For half precision, statistics are computed in
    float32. With `eps` and statistics that differ between queries, all steps are in float32,
    because the variance of two or three keys may be too small for half precision and autocast. In
    the causal form of a softmax of q·k this holds for the first 64 queries only. In float16,
    gradients overflow if keys are so similar that 1/(σ² + ε) nears 10⁵: take an `eps` of at least
    10⁻³.

    Parameters
    ----------
    beta : float or Tensor
        Weight β of the mean, finite. A tensor, of one element or of shape ``(H,)`` for one β per
        head, gets a gradient. β = 0 without `eps` is the mechanism itself.
    eps : float, optional
        Positive. With it, features are divided by √(σ² + ε): with β = 1 this is eq. 22. A query
        with fewer than two keys then becomes 0, as softmax gives its key the weight 1 with any
        query; in mechanisms whose weights do not sum to 1 that is not the formula. If left out,
        features are only centred: eq. 26.
    attention : callable
        The mechanism for the normalised queries and keys: `softmax_attention` or another one with
        its calling convention. A sparse pattern does not change the statistics.
    center_keys : bool, optional
        False: normalise the query alone. Exact for every mechanism that is a softmax of q·k, such
        as a sparse one. True: normalise the keys too, as linear attention needs; in the causal form
        key j then gets the statistics of the keys up to j, since separate statistics for each query
        would take N copies of the keys. None: False for `softmax_attention`, else True, but the
        causal form requires an explicit value, because the two differ there.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> normalized_attention(q, k, v, eps=0.1).shape
    torch.Size([2, 4, 10, 8])
    """
    beta, eps = check_normalization(beta, eps, q)
    center_keys = _check_center_keys(attention, center_keys, mask)
    if k.shape[-2] == 0:  # no statistics, and nothing to attend
        return call(attention, q, k, v, mask, scale)
    options = mask, scale, beta, eps, attention, center_keys
    per_query = mask.is_causal or (mask.given is not None and mask.given.shape[-2] > 1)
    if eps is None or not per_query:
        return _attend(q, k, v, *options)
    some = mask.is_causal and not center_keys and k.shape[-2] > FIRST and q.dtype in HALF
    first = slice(FIRST if some else None)  # a later query has the statistics of many keys
    with full_precision(q.device):
        wide = accumulation_dtype(q)
        Q, K, V = q[..., first, :].to(wide), k[..., first, :].to(wide), v[..., first, :].to(wide)
        H = _attend(Q, K, V, *options).to(q.dtype)
    if H.shape[-2] == q.shape[-2]:
        return H
    return torch.cat([H, _attend(q, k, v, *options)[..., H.shape[-2] :, :]], -2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    beta: Any,
    eps: Any,
    attention: Any,
    center_keys: Any,
) -> Tensor:
    """Hand normalised queries, and keys where they are to be centred, to a mechanism."""
    mean, variance, count = key_statistics(k, mask, variance=eps is not None)
    if center_keys:
        k = _normalize(k, mean, variance, None, beta, eps)
    elif eps is not None and torch.finfo(k.dtype).bits >= 32:
        # Softmax does not change. 1/(σ² + ε) may be large, and an offset of all keys would cancel
        # only up to rounding errors; but in half precision the subtraction itself rounds.
        k = k - shared_offset(k, mask)
    if mask.is_causal and q.shape[-2] != k.shape[-2]:
        mean, count = (_at_queries(x, q.shape[-2]) for x in (mean, count))
        variance = None if variance is None else _at_queries(variance, q.shape[-2])
    q = _normalize(q, mean, variance, count > 1, beta, eps, twice=not center_keys)
    return call(attention, q, k, v, mask, scale)


def key_statistics(
    k: Tensor, mask: Mask, *, variance: bool = True
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return mean, variance and number of the keys that each query may attend.

    For keys ``(..., M, D)``, M at least 1, they are ``(..., R, D)``, in float32 at least. R is 1 if
    all queries have the same keys, N under another mask, where queries without a key get zeros,
    and M if causal: the running statistics of keys 1 to j. The variance divides by the number of
    keys; without `variance` it is None. The number is broadcastable to ``(..., R, 1)``.
    """
    k = k.to(torch.promote_types(k.dtype, F32))
    if mask.is_causal:
        return _running_statistics(k, variance)
    if mask.given is not None:
        with full_precision(k.device):
            return _masked_statistics(k, attended_keys(mask.given), variance)
    mean = k.mean(-2, keepdim=True)
    spread = (k - mean).square().mean(-2, keepdim=True) if variance else None
    return mean, spread, k.new_full((1, 1), k.shape[-2])


def _at_queries(running: Tensor, N: int) -> Tensor:
    """Return row i for query i, or the last one if there are fewer keys."""
    M = running.shape[-2]
    if N <= M:
        return running[..., :N, :]
    last = running[..., -1:, :].expand(*running.shape[:-2], N - M, -1)
    return torch.cat([running, last], -2)


def _running_statistics(k: Tensor, variance: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the statistics of keys 1..j for each j, by Welford's recurrence as a running sum.

    Its terms, (k_j − μ_j)² j/(j−1), are not negative, so nothing cancels, however large μ is.
    """
    count = torch.arange(1, k.shape[-2] + 1, dtype=k.dtype, device=k.device)[:, None]  # (M, 1)
    mean = running_sums(k).div_(count)  # in place, as no backward pass needs the sums
    if not variance:
        return mean, None, count
    terms = (k - mean).square().mul_(count / (count - 1).clamp(min=1))  # the first one is 0
    return mean, running_sums(terms).div_(count), count


def _masked_statistics(
    k: Tensor, keep: Tensor, variance: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the statistics over the keys where `keep` (..., R, M) is True, R = 1 or N."""
    keep = keep.expand(*keep.shape[:-1], k.shape[-2])
    count = keep.sum(-1, keepdim=True)  # (..., R, 1)
    share = keep.to(k.dtype) / count.clamp(min=1)  # (..., R, M)
    mean = _weighted_sum(share, k)  # (..., H, R, D)
    if not variance:
        return mean, None, count
    # The variance is E(k−c)² − (μ−c)² for any c, and cancels least for a c near μ. With padding
    # the anchor's mean is μ. With a window it may be far from μ, hence float64.
    chosen = anchor(keep).unsqueeze(-2)  # (..., 1, M)
    c = _weighted_sum(chosen.to(k.dtype) / chosen.sum(-1, keepdim=True).clamp(min=1), k.detach())
    exact = k.dtype if k.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    k, share = (k - c).to(exact), keep.to(exact) / count.clamp(min=1)
    spread = _weighted_sum(share, k.square()) - _weighted_sum(share, k).square()
    return mean, spread.clamp(min=0).to(mean.dtype), count


def _weighted_sum(weights: Tensor, x: Tensor) -> Tensor:
    """Return Σ_j weights_rj x_j: (..., R, M) and (..., H, M, D) to (..., H, R, D).

    If all heads share the weights, one product covers them, without a copy for each.
    """
    shared = weights.dim() < 3 or weights.shape[-3] == 1
    if x.dim() < 3 or weights.shape[-2] == 1 or not shared:
        return weights @ x
    weights = weights.squeeze(-3) if weights.dim() > 2 else weights
    columns = x.transpose(-3, -2).flatten(-2)  # (..., M, H·D)
    return (weights @ columns).unflatten(-1, (x.shape[-3], x.shape[-1])).transpose(-3, -2)


def _normalize(
    x: Any, mean: Any, variance: Any, several: Any, beta: Any, eps: Any, twice: bool = False
) -> Tensor:
    """Centre and scale queries or keys; `twice` scales for the other side of q·k too.

    A query that may not attend `several` keys becomes 0: its weight is 1 with any score, and the
    score would be as large as 1/ε. For keys `several` is None, as later queries attend more.
    """
    if isinstance(beta, Tensor):
        out = x - beta * mean  # (..., H, N, D)
    else:
        out = torch.sub(x, mean, alpha=beta)  # the same in one pass
    if eps is not None and variance is not None:
        floor = variance.new_full((), eps)
        spread = variance + (floor if several is None else torch.where(several, floor, math.inf))
        out = out / (spread if twice else spread.sqrt())
    if x.dtype != out.dtype:  # 1/ε may be more than float16 holds
        limit = torch.finfo(x.dtype).max
        out = out.clamp(-limit, limit).to(x.dtype)
    return out


def check_normalization(
    beta: float | Tensor, eps: float | None, q: Tensor
) -> tuple[float | Tensor, float | None]:
    """Check β against the heads of `q`, and ε; return β as a float, or as () or (H, 1, 1)."""
    eps = None if eps is None else check_positive("eps", eps)
    if isinstance(beta, Tensor):
        heads = (q.shape[-3],) if q.dim() > 2 else (1,)
        meaning = "one number, or one per head of q"
        check_parameter("beta", beta, q, ((), (1,), heads), meaning, "finite")
        return beta.to(accumulation_dtype(q)).reshape(() if beta.numel() == 1 else (-1, 1, 1)), eps
    if beta.__class__ is not float or not math.isfinite(beta):
        beta = check_finite("beta", beta)
    return beta, eps


def _check_center_keys(attention: Mechanism, center_keys: bool | None, mask: Mask) -> bool:
    """Check `attention`, and return whether its keys are centred."""
    if attention is softmax_attention and center_keys is None:
        return False
    check_callable("attention", attention)
    if center_keys is None:
        center_keys = unwrap(attention)[0] is not softmax_attention
        if center_keys and mask.is_causal:
            raise ValueError(
                "center_keys is None with is_causal=True and an attention that is not "
                "softmax_attention; expected False for a softmax of q·k, True for any other"
            )
    check_flag("center_keys", center_keys)
    if center_keys and mask.given is not None and mask.given.shape[-2] > 1:
        raise ValueError(
            f"attn_mask has shape {tuple(mask.given.shape)}, one row per query, and center_keys is "
            "True; expected one row for all queries, or center_keys=False with a softmax of q·k"
        )
    return center_keys


# --- the formulas, with the same arguments ---


@reference(normalized_attention, formulas.bn)
def normalized_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    beta: Any = 1.0,
    eps: Any = None,
    attention: Any = softmax_attention_reference,
) -> dict[str, Any]:
    """Check β and ε."""
    beta, eps = check_normalization(beta, eps, q)
    beta = beta[..., None] if isinstance(beta, Tensor) else beta  # (H, 1, 1, 1)
    return {"beta": beta, "eps": eps, "attention": plain(attention)}
