"""Softmax with a sink: one more key, of score b and value 0 (chapter 16).

The equation of this module is ::

    h_i = Σ_j exp(s_ij) v_j / (exp(b) + Σ_j exp(s_ij)) = σ(log Σ_j exp(s_ij) − b) softmax(s_i) V

with s_ij = q_i·k_j/√D and the logistic function σ: the weights of a query sum to less than 1, and
to nearly 0 if all s_ij are far below b. For b → −∞ it is softmax attention; b = 0 is called "off by
one". `sink_attention` multiplies what PyTorch's fused softmax returns by that σ. Under a mask
the sink is one more key; its score must not depend on the query, so queries and keys get one more
feature.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from derived_attention import formulas
from derived_attention.common.checks import (
    Mechanism,
    accumulation_dtype,
    autocasts,
    check_finite,
    check_parameter,
)
from derived_attention.common.convention import (
    extend,
    in_full,
    is_short,
    mechanism,
    prepare,
    reference_of,
)
from derived_attention.common.masks import Mask
from derived_attention.layer import Heads, MultiheadAttention
from derived_attention.softmax.core import sdpa
from derived_attention.softmax.joint import backend_of, joint_softmax

SHORT = 32  # causal queries and keys up to which the formula is faster; others up to twice as many


def sink_attention_weights(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    bias: float | Tensor,
) -> Tensor:
    """Return A (..., H, N, M) of `sink_attention`, whose rows sum to 1 less the sink's weight.

    Arguments and errors are those of `sink_attention`.
    """
    mask, scale = prepare(q, k, None, attn_mask, is_causal, scale)
    b = check_sink(bias, q).to(accumulation_dtype(q))
    scores = ((scale or 1 / math.sqrt(q.shape[-1])) * q @ k.mT).to(accumulation_dtype(q))
    scores = torch.cat([scores, b.expand(*scores.shape[:-1], 1)], -1)
    A = with_open_key(mask, q.shape[-2], k.shape[-2], q.device).softmax(scores)
    return A[..., :-1].to(q.dtype)


def _checked_bias(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, bias: Any
) -> dict[str, Any]:
    return {"bias": check_sink(bias, q)}


@mechanism(formula=formulas.sink, checks=_checked_bias, weights=sink_attention_weights)
def sink_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, bias: Any
) -> Tensor:
    """Softmax attention with one more key of score b and value 0, by PyTorch's fused softmax.

    So a query may attend nothing: with weights ``exp(s_ij) / (exp(b) + Σ_l exp(s_il))`` the result
    is that of `softmax_attention` times ``σ(log Σ_l exp(s_il) − b)``. No mask closes the sink.

    Parameters
    ----------
    bias : float or Tensor
        b, a finite number, or a tensor () or (H,), with one for each head. It is not scaled.
        With an `attn_mask`, it is rounded to about the precision of `q`.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> sink_attention(q, k, v, bias=0.0).shape
    torch.Size([2, 4, 10, 8])
    """
    if is_short(q, k, SHORT if mask.is_causal else 2 * SHORT):
        return in_full(formulas.sink)(q, k, v, mask, scale, bias=bias)
    D, Dv, scale = q.shape[-1], v.shape[-1], scale or 1 / math.sqrt(q.shape[-1])
    if autocasts(q.device):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if mask.given is None and (backend := backend_of(q, k, v, mask.is_causal)):
        b = bias if bias.dim() == 0 else bias.squeeze(-1)
        return joint_softmax(backend, q, k.unsqueeze(-3), v, b, mask.is_causal, scale)
    # A power of two, which rounds nothing, so that neither feature is large if `scale` is small.
    one = 2.0 ** round(-math.log2(scale) / 2)
    # Infinity times the 0 of the other keys would be NaN, so it is a large number instead.
    most = min(torch.finfo(q.dtype).max, torch.finfo(torch.float32).max / one) / 2
    feature = (bias.to(accumulation_dtype(q)) / (scale * one)).clamp(-most, most).to(q.dtype)
    Q = torch.cat([q, feature.expand(*q.shape[:-1], 1)], -1)
    K, V = F.pad(k, (0, 1, 0, 1)), F.pad(v, (0, max(0, D + 1 - Dv), 0, 1))  # in one width
    K[..., -1, D] = one
    return sdpa(Q, K, V, with_open_key(mask, q.shape[-2], k.shape[-2], q.device), scale)[..., :Dv]


sink_attention_reference = reference_of(sink_attention)


def with_open_key(mask: Mask, N: int, M: int, device: torch.device) -> Mask:
    """Return a mask of M + 1 keys: one more, the last, that every query may attend."""
    dense = mask.dense(N, M, device)
    if dense is None:
        return Mask()
    dense = dense.expand(*dense.shape[:-1], M)
    return Mask(extend(dense, 1, -1, float(dense.dtype == torch.bool)))  # True, or 0 to add


def check_sink(bias: float | Tensor, q: Tensor) -> Tensor:
    """Check b for queries (..., H, N, D), and return it as a tensor () or (H, 1, 1)."""
    if isinstance(bias, Tensor):
        shapes = ((), (q.shape[-3],)) if q.dim() > 2 else ((),)
        b = check_parameter("bias", bias, q, shapes, "one number, or one for each head", "finite")
        return b[:, None, None] if b.dim() else b
    return torch.full((), check_finite("bias", bias), dtype=accumulation_dtype(q), device=q.device)


class SinkAttention(MultiheadAttention):
    """`sink_attention` in H heads, with the interface of `MultiheadAttention`.

    It adds ``sinks`` (H,), the score b of each head's sink, a parameter that starts at 0. (`bias`
    says, as in `MultiheadAttention`, whether the projections have biases.)
    """

    def __init__(self, *args: Any, attention: Mechanism = sink_attention, **options: Any) -> None:
        super().__init__(*args, attention=attention, **options)
        self.sinks = nn.Parameter(self.out_proj.weight.new_zeros(self.num_heads))

    def mechanism(self, base: Mechanism, heads: Heads) -> Mechanism:
        """Add the scores of these heads' sinks."""
        return functools.partial(base, bias=self.sinks[heads])
