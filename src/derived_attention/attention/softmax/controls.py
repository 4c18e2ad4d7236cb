"""Two controls for experiments: attention that cannot choose, and none (chapter 1)."""

from __future__ import annotations

from torch import Tensor

from derived_attention.attention.frame.convention import mechanism
from derived_attention.attention.softmax.fast import sdpa


@mechanism
def uniform_attention(q, k, v, mask, scale) -> Tensor:
    """Attend to all that may be attended alike: the mean of the values, as `softmax_attention`."""
    return sdpa(0 * q, k, v, mask, scale)


@mechanism
def identity_attention(q, k, v, mask, scale) -> Tensor:
    """Attend to oneself only, whatever the mask: H = V, for as many queries as keys."""
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(f"k has {k.shape[-2]} rows; expected {q.shape[-2]}, as many as q")
    return v
