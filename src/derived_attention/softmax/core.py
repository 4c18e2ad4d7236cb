"""Softmax attention: the formula, and its fused form (chapter 1).

The equation of this module, for queries Q (N, D), keys K (M, D) and values V (M, Dv), is ::

    A = softmax(Q Kᵀ / √D)      (N, M), softmax over each row
    H = A V                     (N, Dv)

`softmax_attention` gives the same H as `softmax_attention_reference` without ever storing A.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from derived_attention.common.convention import (
    extend,
    has_fewer_heads,
    mechanism,
    prepare,
    takes_fewer_heads,
)
from derived_attention.common.masks import Mask


def attention_weights(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Tensor:
    """Return A = softmax(Q Kᵀ / √D), with a row of zeros for a query that may attend nothing.

    Arguments and errors are those of `softmax_attention`; the result is ``(..., H, N, M)``.
    """
    mask, scale = prepare(q, k, None, attn_mask, is_causal, scale)
    return mask.softmax((scale or 1 / math.sqrt(q.shape[-1])) * q @ k.mT)


@mechanism(weights=attention_weights, softmax=True)
@takes_fewer_heads
def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
    """H = softmax(Q Kᵀ / √D) V without the (N, M) matrix in memory.

    The calling convention, which every mechanism of the package shares, is that of
    ``torch.nn.functional.scaled_dot_product_attention``. These are the differences:

    - a query that may attend nothing gets zeros, and zero gradients, on every device;
    - a floating `attn_mask` may have another floating dtype than `q`; NaN and +inf are refused;
    - q, k and v have the same leading dimensions, any number of them, except with `enable_gqa`;
      they are not broadcast;
    - `scale` and `enable_gqa` are keywords; `scale` is positive.
    """
    return sdpa(q, k, v, mask, scale)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
    """Call PyTorch's fused attention so that it does not store the (N, M) matrix.

    PyTorch silently uses a path that stores the matrix if the last stride is not 1, if Dv ≠ D, or
    if inputs are not four-dimensional. So this function copies, pads with zero columns (which
    change no score) and reshapes first. Keys and values may have fewer heads than queries: those
    that share one are then the heads of PyTorch's function, which reads it again for each.
    """
    if has_fewer_heads(k, q):
        return _of_groups(q, k, v, mask, scale)
    if q.numel() == 0 or k.numel() == 0:  # without heads PyTorch 2.9 crashes
        return mask.softmax(q @ k.mT) @ v
    Dv = v.shape[-1]
    width, value_width = _fused_widths(q.shape[-1], Dv, q.device.type)
    attn_mask, alive = mask.opened(q.dtype)
    if attn_mask is not None and q.dim() > 4 and attn_mask.dim() > 3:
        # its leading dimensions are flattened with q's
        attn_mask = attn_mask.expand(*q.shape[:-3], *attn_mask.shape[-3:])
    H = F.scaled_dot_product_attention(
        _four_dims(widen(q, width)),
        _four_dims(widen(k, width)),
        _four_dims(widen(v, value_width)),
        attn_mask=None if attn_mask is None else _four_dims(attn_mask),
        is_causal=mask.is_causal,
        scale=scale or 1 / math.sqrt(q.shape[-1]),
    )
    H = H[..., :Dv].reshape(*q.shape[:-1], Dv)
    return H if alive is None else H.masked_fill(~alive, 0)


def _of_groups(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
    """Call `sdpa` with the heads of a group as its heads, and the groups as sequences.

    All heads of a group have the same memory for keys. PyTorch's ``enable_gqa`` would do, but on a
    GPU with a mask or in float32, where it stores the (N, M) matrix.
    """
    G, r = k.shape[-3], q.shape[-3] // k.shape[-3]
    groups = q.unflatten(-3, (G, r)).flatten(0, -4)  # (B G, r, N, D)
    k, v = (x.flatten(0, -3).unsqueeze(1).expand(-1, r, -1, -1) for x in (k, v))
    if mask.given is not None and mask.given.dim() > 2:
        given = mask.given.unsqueeze(-4)  # (..., 1, H or 1, N, M)
        if given.shape[-3] > 1:
            given = mask.given.unflatten(-3, (G, r))
        if given.dim() > 4:
            given = given.expand(*q.shape[:-3], G, *given.shape[-3:]).flatten(0, -4)
        mask = Mask(given)
    return sdpa(groups, k, v, mask, scale).reshape(*q.shape[:-1], v.shape[-1])


def _fused_widths(D: int, Dv: int, device_type: str) -> tuple[int, int]:
    """Return the last dimensions of (q, k) and of v that a fused kernel takes."""
    if device_type == "cpu":
        return max(D, Dv), max(D, Dv)  # the CPU kernel takes one width for all
    return D + -D % 8, Dv + -Dv % 8  # the CUDA kernels take multiples of 8


def widen(x: Tensor, width: int) -> Tensor:
    """Append zero columns up to `width` and make the last stride 1."""
    if x.shape[-1] < width:
        x = extend(x, width - x.shape[-1], -1)
    # clone, because contiguous() leaves the odd stride of a dimension of size 1 as it is
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _four_dims(x: Tensor) -> Tensor:
    """View as (B, H, ·, ·), the dimensions that the fused kernels take."""
    return x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]
