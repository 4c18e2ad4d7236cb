"""Two controls for experiments: uniform attention, and none (chapter 1)."""

from __future__ import annotations

from torch import Tensor

from derived_attention.attention.frame.convention import mechanism
from derived_attention.attention.frame.masks import Mask
from derived_attention.attention.softmax.fast import sdpa


@mechanism
def uniform_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
    """Attend all allowed keys with equal weights; otherwise as `softmax_attention`."""
    return sdpa(0 * q, k, v, mask, scale)


@mechanism
def identity_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
    """Attend only the key of the query, whatever the mask: H = V, for M = N."""
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(f"k has {k.shape[-2]} rows; expected {q.shape[-2]}, as many as q")
    return v
