"""Poolings: a window of s steps becomes one step, for heads of several scales (chapters 5 and 7).

Average, maximum, k-means, and a convolution with stride s. Each leaves padding out, and pools a
last window that is shorter than the others over the steps that it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from derived_attention.common.checks import accumulation_dtype, check_count
from derived_attention.common.convention import extend, full_precision
from derived_attention.common.masks import Mask, cast_mask
from derived_attention.layer import Heads

# A pooling takes keys (..., M, D), a scale, and which keys are present (..., M), or None for all.
# It returns the map (..., M, ·) -> (..., N_h, ·), for keys, values and weights alike, and which of
# the N_h windows have a step that is present, or None for all.
Pool = Callable[[Tensor], Tensor]
Pooling = Callable[[Tensor, int, Tensor | None], tuple[Pool, Tensor | None]]
Scale = TypeVar("Scale", int, tuple[int, int])
KMEANS_STEPS = 10


def average_pooling(x: Tensor, scale: int, present: Tensor | None) -> tuple[Pool, Tensor | None]:
    """Pool to the mean of each window, over the steps of it that are present.

    For keys x ``(..., M, D)``, a scale s, and ``present``, boolean and broadcastable to
    ``(..., M)``, or None. Returns a map from ``(..., M, ·)`` to ``(..., ⌈M/s⌉, ·)``, with 0 for a
    window without steps, and which windows have steps ``(..., ⌈M/s⌉)``, or None.
    """
    M = x.shape[-2]
    if present is None and M % scale == 0:
        return lambda y: windows(y, scale).mean(-2), None
    keep = torch.ones(M, dtype=torch.bool, device=x.device) if present is None else present
    count = windows(keep[..., None], scale).sum(-2)  # (..., M/s, 1)

    def pool(y: Tensor) -> Tensor:
        total = windows(blank(y, present), scale).sum(-2, dtype=accumulation_dtype(y))
        return (total / count.clamp(min=1)).to(y.dtype)

    return pool, None if present is None else (count > 0).squeeze(-1)


def max_pooling(x: Tensor, scale: int, present: Tensor | None) -> tuple[Pool, Tensor | None]:
    """Pool to the largest entry of each feature in a window; otherwise as `average_pooling`.

    It is not linear: the maximum of projected steps is not the projection of the maximum.
    """
    kept = None if present is None else windows(present[..., None], scale).any(-2)

    def pool(y: Tensor) -> Tensor:
        largest = windows(blank(y, present, -math.inf), scale, -math.inf).amax(-2)
        return largest if kept is None else largest.masked_fill(~kept, 0)

    return pool, None if kept is None else kept.squeeze(-1)


def kmeans_pooling(x: Tensor, scale: int, present: Tensor | None) -> tuple[Pool, Tensor | None]:
    """Pool to the means of ⌈M/s⌉ clusters of steps, found by Lloyd's algorithm on `x`.

    It starts from the averages of the windows and takes `KMEANS_STEPS` steps. The clusters are
    constants to the gradient, their means are not. A cluster that has lost all its steps has no
    key.
    """
    labels = _clusters(x, scale, present)  # (..., M)
    K = -(-x.shape[-2] // scale)
    _, count = _cluster_means(x, labels, K, present)
    return lambda y: _cluster_means(y, labels, K, present)[0].to(y.dtype), count > 0


class ConvolutionPooling(nn.Module):
    """Pool by a convolution with stride s, and one kernel of size s for all channels.

    A window (x_1, ..., x_s) becomes Σ_t w_t x_t, with zeros for absent steps. Initially w_t = 1/s,
    the average. It commutes with a linear projection, and with an affine one if the w_t sum to 1.

    Parameters
    ----------
    scales : sequence of int
        Every scale above 1 gets a kernel w, a parameter of shape ``(s,)``.
    """

    def __init__(
        self,
        scales: Iterable[int],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.kernels = nn.ParameterDict(
            {
                str(s): nn.Parameter(torch.full((s,), 1 / s, device=device, dtype=dtype))
                for s in sorted(set(scales) - {1})
            }
        )

    def forward(self, x: Tensor, scale: int, present: Tensor | None) -> tuple[Pool, Tensor | None]:
        """Return what `average_pooling` returns."""
        if str(scale) not in self.kernels:
            raise ValueError(f"scale is {scale}; expected one of {list(self.kernels)}")
        w = self.kernels[str(scale)][:, None]  # (s, 1)
        kept = None if present is None else windows(present[..., None], scale).any(-2).squeeze(-1)

        def pool(y: Tensor) -> Tensor:
            cut = windows(blank(y, present), scale)  # (..., M/s, s or M, ·)
            return (cut * w[: cut.shape[-2]]).sum(-2).to(y.dtype)

        return pool, kept


POOLINGS: dict[str, Pooling] = {
    "average": average_pooling,
    "max": max_pooling,
    "k-means": kmeans_pooling,
}


def windows(x: Tensor, scale: int, fill: float = 0.0) -> Tensor:
    """Cut (..., M, D) into (..., ⌈M/s⌉, s, D), with `fill` after the last step.

    A scale above M counts as M, which gives one window without `fill`.
    """
    M = x.shape[-2]
    scale = min(scale, M or scale)
    missing = -M % scale
    if missing:
        x = extend(x, missing, value=fill)
    return x.unflatten(-2, (x.shape[-2] // scale, scale))


def block_logs(row: Tensor | None, x: Tensor, block: int) -> Tensor | None:
    """Return logarithms (..., L/b, b) of how often steps of x (..., L, D) count, by a mask.

    They are None without a mask if blocks divide L, as all steps count once.
    """
    L = x.shape[-2]
    if row is None:
        if L % block == 0:
            return None
        row = torch.ones(1, L, dtype=torch.bool, device=x.device)
    if row.dtype == torch.bool:
        row = torch.where(row, 0.0, -math.inf)
    column = cast_mask(row, accumulation_dtype(x)).expand(*row.shape[:-1], L).mT
    return windows(column, block, -math.inf).squeeze(-1)


def blank(x: Tensor, present: Tensor | None, fill: float = 0.0) -> Tensor:
    """Set absent tokens of x (..., M, ·) to a number."""
    return x if present is None else x.masked_fill(~present[..., None], fill)


@torch.no_grad()
def _clusters(x: Tensor, scale: int, present: Tensor | None) -> Tensor:
    """Label each step with its nearest centre, after `KMEANS_STEPS` steps of Lloyd's algorithm."""
    x = blank(x.detach().to(accumulation_dtype(x)), present)
    # Subtract the mean, which would not cancel exactly in x·c − |c|²/2; also from absent steps.
    x = x - x.mean(-2, keepdim=True) if present is None else x - mean_of_present(x, present)
    pool, kept = average_pooling(x, scale, present)
    with full_precision(x.device):
        centres = pool(x)  # (..., K, D)
        labels = _nearest(x, centres, kept)
        for _ in range(KMEANS_STEPS):
            means, count = _cluster_means(x, labels, centres.shape[-2], present)
            centres = torch.where(count[..., None] > 0, means, centres)
            labels = _nearest(x, centres, kept)
    return labels


def mean_of_present(x: Tensor, present: Tensor) -> Tensor:
    """Return the mean (..., 1, D) of the steps that are present; the others are 0."""
    count = present.expand(*present.shape[:-1], x.shape[-2]).sum(-1)[..., None, None]
    return x.sum(-2, keepdim=True) / count.clamp(min=1)


def _nearest(x: Tensor, centres: Tensor, kept: Tensor | None) -> Tensor:
    """Return the nearest centre (..., M), in pieces, so that no (M, K) matrix is stored."""
    if x.shape[-2] == 0:
        return torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
    offset = -centres.square().sum(-1) / 2  # x·c − |c|²/2 is largest where |x − c| is smallest
    offset = offset if kept is None else offset.masked_fill(~kept, -math.inf)
    pieces = x.split(1024, dim=-2)
    return torch.cat([(p @ centres.mT + offset[..., None, :]).argmax(-1) for p in pieces], -1)


def _cluster_means(
    x: Tensor, labels: Tensor, K: int, present: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return means (..., K, D) of the steps with each label, and counts (..., K), in float32."""
    dtype = accumulation_dtype(x)
    weight = torch.ones_like(labels, dtype=dtype)
    weight = weight if present is None else weight * present
    count = weight.new_zeros(*labels.shape[:-1], K).scatter_add(-1, labels, weight)
    steps = blank(x, present).to(dtype)
    total = steps.new_zeros(*labels.shape[:-1], K, x.shape[-1])
    total = total.scatter_add(-2, labels[..., None].expand_as(steps), steps)
    return total / count.clamp(min=1)[..., None], count


def keep_first(
    pooling: Pooling, x: Tensor, scale: int, present: Tensor | None
) -> tuple[Pool, Tensor | None]:
    """Apply a pooling to all steps but the first, the class token, which stays as it is."""
    rest, kept = pooling(x[..., 1:, :], scale, None if present is None else present[..., 1:])
    if kept is not None:
        first = kept.new_ones(*kept.shape[:-1], 1) if present is None else present[..., :1]
        kept = torch.cat([first.expand(*kept.shape[:-1], -1), kept], -1)
    return lambda y: torch.cat([y[..., :1, :], rest(y[..., 1:, :])], -2), kept


# --- heads of several scales ----------------------------------------------------------------------


def check_scale_list(scales: Sequence[int], heads: int, name: str = "scales") -> None:
    """Check for one whole number, at least 1, per head."""
    if isinstance(scales, str) or not isinstance(scales, Sequence):
        raise TypeError(f"{name} is {scales!r}; expected a sequence of whole numbers")
    if len(scales) != heads or heads == 0:
        raise ValueError(f"{name} is {list(scales)}; expected one number per head, {heads} in all")
    for h, s in enumerate(scales):
        if s.__class__ is not int or s < 1:
            check_count(f"{name}[{h}]", s, 1)


def head_groups(scales: Sequence[Scale]) -> dict[Scale, list[int]]:
    """Return the heads of each scale, or pair of them: ``[1, 1, 2]`` to ``{1: [0, 1], 2: [2]}``."""
    groups: dict[Scale, list[int]] = {}
    for h, s in enumerate(scales):
        groups.setdefault(s, []).append(h)
    return groups


def pooled_heads(
    pooling: Pooling, k: Tensor, v: Tensor, mask: Mask, heads: Heads, scale: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return keys, values and attn_mask of some heads, with windows of `scale` steps pooled."""
    attn_mask, k, v = mask.given, k[..., heads, :, :], v[..., heads, :, :]
    if attn_mask is not None and attn_mask.dim() > 2 and attn_mask.shape[-3] > 1:
        attn_mask = attn_mask[..., heads, :, :]
    if scale == 1:
        return k, v, attn_mask
    pool, kept = pooling(k, scale, Mask(attn_mask).present(k.shape[-2]))
    return pool(k), pool(v), None if kept is None else kept.unsqueeze(-2)


def to_steps(pool: Pool, key: Tensor, A: Tensor) -> Tensor:
    """Distribute weights (B, H', N, N_h) of pooled keys over their steps: (B, H', N, M)."""
    identity = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device)
    return A @ pool(identity.expand(*key.shape[:-1], -1)).unsqueeze(-3)
