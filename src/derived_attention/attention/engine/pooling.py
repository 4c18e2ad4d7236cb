"""Poolings for scaled heads: a window of s steps becomes one step (chapter 5, remark 5).

Average, maximum, k-means, and a convolution with stride s; each leaves padding out, and a last
window that is shorter than the others is pooled over what it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from derived_attention.attention.frame.checks import cut_any_length, is_symbolic
from derived_attention.attention.frame.convention import extend, full_precision

# A pooling looks at the keys, at their scale, and at which of them are there (None: all), and
# returns the map (..., M, ·) -> (..., N_h, ·) for keys, values and weights, and the same mask for
# what it returns.
Pool = Callable[[Tensor], Tensor]
Pooling = Callable[[Tensor, int, Tensor | None], tuple[Pool, Tensor | None]]
KMEANS_STEPS = 10


def average_pooling(x: Tensor, scale: int, present: Tensor | None) -> tuple[Pool, Tensor | None]:
    """Pool to the mean of each window, over the steps of it that are there.

    Of keys x ``(..., M, D)``, a scale s, and ``present``, boolean and broadcastable to
    ``(..., M)``, where not all steps are there. Returns a map from ``(..., M, ·)`` to
    ``(..., ⌈M/s⌉, ·)``, with 0 for a window without steps, and which windows have some
    ``(..., ⌈M/s⌉)``, or None. The last window may be shorter than the others.
    """
    M = x.shape[-2]
    if present is None and not is_symbolic(M) and M % scale == 0:
        return lambda y: windows(y, scale).mean(-2), None
    there = torch.ones(M, dtype=torch.bool, device=x.device) if present is None else present
    count = windows(there[..., None], scale).sum(-2)  # (..., M/s, 1)

    def pool(y: Tensor) -> Tensor:
        wide = torch.promote_types(y.dtype, torch.float32)
        total = windows(_blank(y, present), scale).sum(-2, dtype=wide)
        return (total / count.clamp(min=1)).to(y.dtype)

    return pool, None if present is None else (count > 0).squeeze(-1)


def max_pooling(x: Tensor, scale: int, present: Tensor | None) -> tuple[Pool, Tensor | None]:
    """Pool to the largest entry of each feature in a window; otherwise as `average_pooling`.

    It is not linear: the maximum of projected steps is not the projection of the maximum.
    """
    there = None if present is None else windows(present[..., None], scale).any(-2)

    def pool(y: Tensor) -> Tensor:
        largest = windows(_blank(y, present, -math.inf), scale, -math.inf).amax(-2)
        return largest if there is None else largest.masked_fill(~there, 0)

    return pool, None if there is None else there.squeeze(-1)


def kmeans_pooling(x: Tensor, scale: int, present: Tensor | None) -> tuple[Pool, Tensor | None]:
    """Pool to the means of ⌈M/s⌉ clusters of steps, found by Lloyd's algorithm on `x`.

    It starts from the averages of the windows and takes `KMEANS_STEPS` steps. The clusters are
    constants to the gradient, their means are not. Where a cluster has lost all its steps, its key
    is not there.
    """
    labels = _clusters(x, scale, present)  # (..., M)
    K = -(-x.shape[-2] // scale)
    _, count = _cluster_means(x, labels, K, present)
    return lambda y: _cluster_means(y, labels, K, present)[0].to(y.dtype), count > 0


class ConvolutionPooling(nn.Module):
    """Pool by a convolution with stride s, and one kernel of size s for all channels.

    A window (x_1, ..., x_s) becomes Σ_t w_t x_t, with zeros for steps that are not there. At first
    w_t = 1/s, the average. It commutes with a linear projection, and with an affine one where the
    w_t sum to 1.

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
        here = None if present is None else windows(present[..., None], scale).any(-2).squeeze(-1)

        def pool(y: Tensor) -> Tensor:
            cut = windows(_blank(y, present), scale)  # (..., M/s, s or M, ·)
            return (cut * w[: cut.shape[-2]]).sum(-2).to(y.dtype)

        return pool, here


POOLINGS: dict[str, Pooling] = {
    "average": average_pooling,
    "max": max_pooling,
    "k-means": kmeans_pooling,
}


def windows(x: Tensor, scale: int, fill: float = 0.0) -> Tensor:
    """Cut (..., M, D) into (..., ⌈M/s⌉, s, D), with `fill` after the last step.

    A scale above M is M: one window, and nothing to fill.
    """
    M = x.shape[-2]
    if is_symbolic(M):
        return cut_any_length(x, scale, (M - 1) // scale + 1, fill)
    scale = min(scale, M or scale)
    missing = -M % scale
    if missing:
        x = extend(x, missing, value=fill)
    return x.unflatten(-2, (x.shape[-2] // scale, scale))


def _blank(x: Tensor, present: Tensor | None, fill: float = 0.0) -> Tensor:
    return x if present is None else x.masked_fill(~present[..., None], fill)


@torch.no_grad()
def _clusters(x: Tensor, scale: int, present: Tensor | None) -> Tensor:
    """Label each step with its nearest centre, after `KMEANS_STEPS` steps of Lloyd's algorithm."""
    x = _blank(x.detach().to(torch.promote_types(x.dtype, torch.float32)), present)
    # What all steps share would not cancel in x·c − |c|²/2. Steps that are not there share it too.
    x = x - x.mean(-2, keepdim=True) if present is None else x - _mean(x, present)
    pool, here = average_pooling(x, scale, present)
    with full_precision(x.device):
        centres = pool(x)  # (..., K, D)
        labels = _nearest(x, centres, here)
        for _ in range(KMEANS_STEPS):
            means, count = _cluster_means(x, labels, centres.shape[-2], present)
            centres = torch.where(count[..., None] > 0, means, centres)
            labels = _nearest(x, centres, here)
    return labels


def _mean(x: Tensor, present: Tensor) -> Tensor:
    """Mean (..., 1, D) of the steps that are there, the others being 0."""
    count = present.expand(*present.shape[:-1], x.shape[-2]).sum(-1)[..., None, None]
    return x.sum(-2, keepdim=True) / count.clamp(min=1)


def _nearest(x: Tensor, centres: Tensor, here: Tensor | None) -> Tensor:
    """Index (..., M) of the nearest centre, in pieces, so that no (M, K) matrix is stored."""
    if x.shape[-2] == 0:
        return torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
    offset = -centres.square().sum(-1) / 2  # x·c − |c|²/2 is largest where |x − c| is smallest
    offset = offset if here is None else offset.masked_fill(~here, -math.inf)
    pieces = x.split(1024, dim=-2)
    return torch.cat([(p @ centres.mT + offset[..., None, :]).argmax(-1) for p in pieces], -1)


def _cluster_means(
    x: Tensor, labels: Tensor, K: int, present: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Means (..., K, D) of the steps with each label, at least float32, and counts (..., K)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = torch.ones_like(labels, dtype=wide)
    weight = weight if present is None else weight * present
    count = weight.new_zeros(*labels.shape[:-1], K).scatter_add(-1, labels, weight)
    steps = _blank(x, present).to(wide)
    total = steps.new_zeros(*labels.shape[:-1], K, x.shape[-1])
    total = total.scatter_add(-2, labels[..., None].expand_as(steps), steps)
    return total / count.clamp(min=1)[..., None], count


def pool_pairs(
    pooling: Pooling, key: Tensor, value: Tensor, scale: int, present: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Pool]:
    """Mix keys and values along their length alike.

    Returns both, (..., N_h, ·), which of the windows have a step that is there, and the map.
    """
    pool, present = pooling(key, scale, present)
    return pool(key), pool(value), present, pool


def keep_first(
    pooling: Pooling, x: Tensor, scale: int, present: Tensor | None
) -> tuple[Pool, Tensor | None]:
    """Apply a pooling to all steps but the first, the class token, which stays as it is."""
    rest, here = pooling(x[..., 1:, :], scale, None if present is None else present[..., 1:])
    if here is not None:
        first = here.new_ones(*here.shape[:-1], 1) if present is None else present[..., :1]
        here = torch.cat([first.expand(*here.shape[:-1], -1), here], -1)
    return lambda y: torch.cat([y[..., :1, :], rest(y[..., 1:, :])], -2), here
