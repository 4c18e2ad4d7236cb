"""Controls for experiments: uniform attention, none, and attention by position only (chapter 1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.common.checks import Mechanism, check_count
from derived_attention.common.convention import mechanism
from derived_attention.common.masks import Mask
from derived_attention.layer import MultiheadAttention
from derived_attention.softmax.core import sdpa


@mechanism(shared=True)
def uniform_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
    """Attend all allowed keys with equal weights; otherwise as `softmax_attention`.

    All scores are 0; the numbers of a floating mask are still added to them.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> mean = v.mean(-2, keepdim=True).expand_as(v)
    >>> torch.allclose(uniform_attention(q, k, v), mean, atol=1e-5)
    True
    """
    return sdpa(0 * q, k, v, mask, scale)


@mechanism
def identity_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
    """Return V: each query attends its own key only, so M = N.

    No mask has an effect, so no query gets zeros. Raises ValueError unless k has as many rows as q.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> torch.equal(identity_attention(q, k, v), v)
    True
    """
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(f"k has {k.shape[-2]} rows; expected {q.shape[-2]}, as many as q")
    return v


class PositionOnlyAttention(MultiheadAttention):
    """Softmax attention whose scores are a learned bias for each head and offset, and nothing else.

    ``a_ij = softmax_j(b[j - i])``: if this layer solves a task, success at it is no evidence of
    attention to content. The layer has the interface and the parameters of `MultiheadAttention`;
    the projections of queries and keys have no effect (their gradient is 0). It adds ``bias``
    (H, 2·length - 1), whose entry ``j - i + length - 1`` is b[j - i]. It starts at 0: uniform.

    Parameters
    ----------
    length : int
        The most queries and keys.
    """

    shown = ("length",)
    paired, any_mask = True, False  # offsets are those of the sequence without its padding

    def __init__(self, *args: Any, length: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.length = check_count("length", length, 1)
        self.bias = nn.Parameter(self.out_proj.weight.new_zeros(self.num_heads, 2 * length - 1))

    def attend(self, run: Mechanism, q: Tensor, k: Tensor, v: Tensor | None, mask: Mask) -> Tensor:
        """Put the bias of their offset in the place of all scores."""
        N, M = q.shape[-2], k.shape[-2]
        if max(N, M) > self.length:
            expected = f"at least {max(N, M)}, the tokens given"
            raise ValueError(f"length is {self.length}; expected {expected}")
        offset = torch.arange(M, device=q.device) - torch.arange(N, device=q.device)[:, None]
        scores = self.bias[:, offset + self.length - 1].to(q.dtype).expand(*q.shape[:-1], M)
        if v is None:
            return mask.softmax(scores)
        dense = mask.for_scores(scores)
        if dense is not None and dense.dtype == torch.bool:
            scores = scores.masked_fill(~dense, -torch.inf)
        elif dense is not None:
            scores = scores + dense
        return sdpa(torch.zeros_like(q), torch.zeros_like(k), v, Mask(scores))
