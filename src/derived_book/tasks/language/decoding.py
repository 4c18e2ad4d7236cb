"""One step of decoding: by the state of a layer's attention, or by a cache of keys and values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from derived_attention.common.convention import unwrap
from derived_attention.common.masks import Mask
from derived_attention.layer import ALL, MultiheadAttention
from derived_attention.mixture.core import mixture_attention
from derived_attention.softmax.core import softmax_attention
from derived_attention.softmax.sink import sink_attention

CACHED = softmax_attention, sink_attention, mixture_attention  # that no position changes


class Cache(NamedTuple):
    """Keys and values of the tokens so far, at the front of tensors with room for more."""

    keys: Tensor  # (B, H, room, D), or (B, H, R, room, D) for mixtures
    values: Tensor  # (B, H, room, Dv)
    used: int


def step_attention(layer: MultiheadAttention, x: Tensor, past: Any = None) -> tuple[Tensor, Any]:
    """Attend causally from the next tokens, by the state of the attention if it has one.

    Otherwise keys and values are appended to a `Cache`, in place: go on from its last version only.

    Parameters
    ----------
    layer : MultiheadAttention
    x : Tensor
        The next n tokens, (B, n, embed_dim).
    past
        What the last call returned, and None for the first tokens.

    Returns
    -------
    output : Tensor
        (B, n, embed_dim).
    past
        The next state or `Cache`.

    Raises
    ------
    ValueError
        For an attention that has no state, and whose weights depend on the position of a query.
    """
    if layer.has_state:
        return layer.step(x, past)
    if (function := unwrap(layer.attention)[0]) not in CACHED or not layer.alone:
        name = getattr(function, "__name__", function)
        expected = ", ".join(f.__name__ for f in CACHED)
        raise ValueError(
            f"layer is {type(layer).__name__} with {name}; expected a state, or one of {expected}"
        )
    q, *new = (layer.project(part, x, ALL) for part in range(3))
    start = past.used if past else 0
    end = start + x.shape[1]
    room = past.keys.shape[-2] if past else 0
    parts = list(past[:2]) if past else [y[..., :0, :] for y in new]
    if end > room:
        parts = [_grow(y, max(end, 2 * room)) for y in parts]
    for y, added in zip(parts, new, strict=True):
        y[..., start:end, :] = added
    k, v = (y[..., :end, :] for y in parts)
    mask = None
    if x.shape[1] > 1:
        mask = torch.ones(x.shape[1], end, dtype=torch.bool, device=x.device).tril(start)
    H = layer.attend(layer.mechanism(layer.attention, ALL), q, k, v, Mask(mask))
    return layer.out_proj(H.transpose(-3, -2).flatten(-2)), Cache(*parts, end)


def _grow(x: Tensor, room: int) -> Tensor:
    """Return x (..., n, D) with `room` rows, of which the first n are those of x."""
    larger = x.new_empty(*x.shape[:-2], room, x.shape[-1])
    larger[..., : x.shape[-2], :] = x
    return larger
