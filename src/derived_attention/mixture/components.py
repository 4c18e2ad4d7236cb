"""The scores of a mixture of keys: its components, checked, and features that make them products.

The equation of this module, for the parameters of component r, is ::

    s_ijr = log_weight_r − scale · precision_r · ‖q_i − k_jr‖² / 2

or with q_i·k_jr instead of −‖q_i − k_jr‖²/2. What depends on the key alone becomes one more feature
of the key, and what depends on the query and r, if variances differ, becomes another one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from derived_attention.common.checks import (
    POSITIVE,
    autocasts,
    check_flags,
    check_number,
    check_parameter,
    has_concrete_values,
)
from derived_attention.common.masks import Mask, nearer_zero, shared_offset

# The feature of a query in float16, in place of 1, so that −‖k‖²/2 over it is within the dtype: the
# largest number is 65504, and a key of length 362 has that for ‖k‖²/2.
UNIT = 2048


class Components(NamedTuple):
    """The parameters of components: s = log_weights + scale · precisions · (−‖q − k‖²/2).

    Tensors are (R, 1, 1) or (H, R, 1, 1), float32 at least. A variance that is a Python number is
    in `scale`, so that it does not round the keys.
    """

    log_weights: Tensor
    precisions: Tensor
    scale: float
    equal: bool  # all precisions are 1
    distance: bool
    dtype: torch.dtype  # in which SDPA computes


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
    """Check the keywords that mixtures have beside SDPA's, and return the components."""
    normalized = distance if normalized is None else normalized
    check_flags(hard=hard, distance=distance, normalized=normalized)
    if normalized and not distance:
        raise ValueError("normalized is True and distance False; expected normalized=False")
    if scale is not None and variances is not None:
        raise ValueError("scale and variances were both given; expected one of them: scale is 1/σ²")
    D, learned = q.shape[-1], isinstance(variances, Tensor)
    wide = torch.promote_types(q.dtype, torch.float32)
    if priors is None:
        log_weights = torch.zeros(k.shape[-3], 1, 1, dtype=wide, device=k.device)
    else:
        pi = per_component("priors", priors, k).to(wide)
        positive = pi > 0  # the logarithm of 0 is −∞, and its gradient would be NaN
        log_weights = pi.where(positive, 1).log().masked_fill(~positive, -math.inf)
    if isinstance(variances, Tensor):
        precisions, scale = (
            1 / per_component("variances", variances, k).to(wide),
            1.0,
        )
    else:
        variance, expected = math.sqrt(D), "a finite positive number or a floating Tensor"
        if variances is not None:
            variance = check_number("variances", variances, expected, *POSITIVE)
        precisions, scale = log_weights.new_ones(k.shape[-3], 1, 1), scale or 1 / variance
    if normalized and learned:
        log_weights = log_weights + D / 2 * precisions.log()
    autocast = q.dtype != torch.float64 and autocasts(q.device)
    dtype = torch.get_autocast_dtype(q.device.type) if autocast else q.dtype
    # Half precision would round k/σ², and float16 would end −‖k‖²/2σ² at a small number.
    if learned or (dtype == torch.float16 and scale < 1e-4):
        dtype = torch.promote_types(dtype, torch.float32)
    equal = k.shape[-3] == 1 or not learned
    return Components(log_weights, precisions, float(scale), equal, distance, dtype)


def per_component(name: str, value: Tensor | None, k: Tensor) -> Tensor:
    """Check for a number for each component; return (R, 1, 1) or (H, R, 1, 1), ones for None."""
    R, heads = k.shape[-3], k.shape[-4:-3]
    if value is None:
        return torch.ones(R, 1, 1, device=k.device)
    meaning = "one number for each component, or for each head and component"
    kind = "finite and positive" if name == "variances" else "finite and at least 0"
    check_parameter(name, value, k, ((R,), (*heads, R)), meaning, kind)
    if name == "priors" and value.device.type == "cpu" and has_concrete_values(value):
        if not bool((value > 0).any(-1).all()):
            raise ValueError("priors are all 0; expected a positive one for some component")
    return value[..., None, None]


def centre(q: Tensor, k: Tensor, parts: Components, mask: Mask) -> tuple[Tensor, Tensor]:
    """Subtract a common offset from all queries and keys (..., R, M, D), in float32 at least.

    It changes no distance, weight or gradient. But the three terms of ‖q − k‖² are computed apart,
    and the share of an offset in them would only cancel up to rounding errors. If causal, the
    offset depends on the first two tokens alone, so that no result depends on later ones.
    """
    q, k = q.to(parts.precisions), k.to(parts.precisions)
    if not parts.distance or 0 in (q.shape[-2], k.shape[-2]):
        return q, k
    queries, keys = q.detach(), (k[..., :2, :] if mask.is_causal else k).detach()
    whole = mask.given is None and not mask.is_causal  # one mean is faster than two
    offset = keys.mean((-3, -2)).unsqueeze(-2) if whole else shared_offset(keys.mean(-3), mask)
    if mask.is_causal:
        query = queries[..., :2, :][..., -1:, :]
    else:
        per_key = mask.given is None or mask.given.shape[-2] == 1
        query = queries.mean(-2, keepdim=True) if per_key else queries[..., :1, :]
    offset = nearer_zero(offset, query)
    return q - offset, k - offset.unsqueeze(-3)


def features(
    q: Tensor, k: Tensor, parts: Components, mask: Mask, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Append the features with which scale · q_i·k_jr is s_ijr, up to a term of i alone.

    They are computed in float32 at least, and then cast. Half precision would round what `centre`
    leaves.
    """
    full, wide = torch.finfo(dtype).bits >= 32, parts.precisions.dtype
    if full:
        q, k = centre(q, k, parts, mask)
    q, k = q.to(wide), k.to(wide)
    bias = parts.log_weights / parts.scale  # (..., R, 1, 1)
    if parts.distance:
        bias = bias - parts.precisions * k.square().sum(-1, keepdim=True) / 2
    unit = 1 if dtype != torch.float16 else UNIT
    # −∞ − −∞ would be NaN, and so would be what overflows when it is multiplied by the scale
    bias = bias.clamp(min=torch.finfo(dtype).min / 4 / max(1.0, parts.scale) * unit)
    keys = [parts.precisions * k, bias] if full else _in_half(parts.precisions * k, bias, dtype)
    ones = torch.full_like(q[..., :1], unit, dtype=dtype)
    queries = [q.to(dtype) if full else _fit(q, dtype)] + [ones] * (len(keys) - 1)
    if parts.distance and not parts.equal:  # ‖q‖² does not cancel: what is beyond the widest
        widest = parts.precisions.amin(-3, keepdim=True)
        keys.append((widest - parts.precisions) * q.shape[-1] / 2)
        queries.append(q.square().mean(-1, keepdim=True).to(dtype))  # in float32 at least
    sizes = (*k.shape[:-1], -1)
    return torch.cat(queries, -1), torch.cat([x.to(dtype).expand(sizes) for x in keys], -1)


def _fit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to a dtype, clamped to its range."""
    limit = torch.finfo(dtype).max
    return x if x.dtype == dtype else x.clamp(-limit, limit).to(dtype)


def _in_half(k: Tensor, bias: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return keys, and for the bias two numbers that add up to it: itself rounded, and the rest.

    Without the rest, the rounding of a large ‖k‖²/2σ² would be an error of the score. The gradient
    of the bias is that of the first number: that of the rest cancels.
    """
    bias = bias / (UNIT if dtype == torch.float16 else 1)
    rounded = _fit(bias, dtype)
    return [_fit(k, dtype), rounded, _fit(bias - rounded.to(bias.dtype), dtype)]
