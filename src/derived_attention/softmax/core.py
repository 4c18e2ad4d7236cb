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

from derived_attention import formulas
from derived_attention.common.convention import extend, mechanism, prepare, reference_of
from derived_attention.common.masks import Mask, open_dead_rows


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


@mechanism(formula=formulas.softmax, weights=attention_weights, shared=True)
def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
    """H = softmax(Q Kᵀ / √D) V without the (N, M) matrix in memory.

    The calling convention, which every mechanism of the package shares, is that of
    ``torch.nn.functional.scaled_dot_product_attention``. These are the differences:

    - a query that may attend nothing gets zeros, and zero gradients, on every device;
    - a floating `attn_mask` may have another floating dtype than `q`; NaN and +inf are refused;
    - q, k and v have the same leading dimensions, any number of them, except with `enable_gqa`;
      they are not broadcast;
    - `scale` and `enable_gqa` are keywords; `scale` is positive.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> softmax_attention(q, k, v, is_causal=True).shape
    torch.Size([2, 4, 10, 8])
    """
    return sdpa(q, k, v, mask, scale)


softmax_attention_reference = reference_of(softmax_attention)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
    """Call PyTorch's fused attention so that it does not store the (N, M) matrix.

    PyTorch silently uses a path that stores the matrix if the last stride is not 1, if Dv ≠ D, or
    if inputs are not four-dimensional. So this function copies, pads with zero columns (which
    change no score) and reshapes first, where that is necessary.
    """
    if q.numel() == 0 or k.numel() == 0:  # without heads PyTorch 2.9 crashes
        return mask.softmax(q @ k.mT) @ v
    D, Dv = q.shape[-1], v.shape[-1]
    scale = scale or 1 / math.sqrt(D)
    fits = D == Dv and (q.device.type == "cpu" or D % 8 == 0)
    if fits and q.dim() == 4 and 1 == q.stride(-1) == k.stride(-1) == v.stride(-1):
        Q, K, V = q, k, v
    else:
        width, value_width = kernel_widths(D, Dv, q.device.type)
        pairs = ((q, width), (k, width), (v, value_width))
        Q, K, V = (widen(x, to, four_dims=True) for x, to in pairs)
    attn_mask = alive = None
    if mask.given is not None:
        attn_mask = mask.given
        if not mask.complete:
            attn_mask, alive = open_dead_rows(attn_mask, q.dtype)
        if q.dim() > 4 and attn_mask.dim() > 3:  # its leading dimensions are flattened with q's
            attn_mask = attn_mask.expand(*q.shape[:-3], *attn_mask.shape[-3:])
        dims = attn_mask.dim()
        attn_mask = attn_mask.flatten(0, -4) if dims > 4 else attn_mask[(None,) * (4 - dims)]
    H = F.scaled_dot_product_attention(
        Q, K, V, attn_mask=attn_mask, is_causal=mask.is_causal, scale=scale
    )
    if H.shape[-1] != Dv or q.dim() != 4:
        H = H[..., :Dv].reshape(*q.shape[:-1], Dv)
    return H if alive is None else H.masked_fill(~alive, 0)


def kernel_widths(D: int, Dv: int, device_type: str) -> tuple[int, int]:
    """Return the last dimensions of (q, k) and of v that a fused kernel takes."""
    if device_type == "cpu":  # whose kernel takes one width for all, and odd ones are slower
        width = max(D, Dv) + (D != Dv) * (max(D, Dv) % 2)
        return width, width
    return D + -D % 8, Dv + -Dv % 8  # the CUDA kernels take multiples of 8


def widen(x: Tensor, width: int, *, four_dims: bool = False) -> Tensor:
    """Append zero columns up to `width`, and make the last stride 1.

    With `four_dims` return (B, H, ·, ·), the dimensions that the fused kernels take.
    """
    if x.shape[-1] < width:
        x = extend(x, width - x.shape[-1], -1)
    # clone, because contiguous() leaves the odd stride of a dimension of size 1 as it is
    x = x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
    if not four_dims or x.dim() == 4:
        return x
    return x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]
