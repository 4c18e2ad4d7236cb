"""One sequence at a scale: averages and repetition, or a wavelet and its dual (chapter 7).

The equations of this module, for windows of s steps, are ::

    (↓_s x)_t = Σ_{i in window t} x_i / s,      (↑_s y)_i = y_t for all i in window t

and for a wavelet the low-pass filters of log2 s levels in their place. ↓↑ is the identity, so ↑↓ is
a projection: with averages on what is constant in every window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from derived_attention.common.checks import (
    accumulation_dtype,
    check_count,
    check_floating,
    check_shape,
)
from derived_attention.common.pooling import Pooling, average_pooling, blank, mean_of_present


class Filter(NamedTuple):
    """A map to fewer steps, and one back to all of them."""

    down: Pooling
    up: Callable[[Tensor, int, int], Tensor]  # (..., ⌈N/s⌉, D), s and N to (..., N, D)


def get_filter(filters: Any) -> Filter:
    """Return averages and repetition for "boxcar", or the `wavelet_filter` of a wavelet."""
    return BOXCAR if is_boxcar(filters) else wavelet_filter(filters)


def _repeat(x: Tensor, scale: int, N: int) -> Tensor:
    s = min(scale, N) or 1
    return x.unsqueeze(-2).expand(*x.shape[:-1], s, -1).flatten(-3, -2)[..., :N, :]


BOXCAR = Filter(average_pooling, _repeat)


def wavelet_filter(wavelet: Any) -> Filter:
    """Return the low-pass filter of a wavelet, and its dual: log2 s levels of the pyramid.

    Both are scaled so that they map a constant to itself. The sequence is continued periodically,
    after its last step is repeated up to a multiple of s. Absent steps become the mean of those
    that are present: their numbers have no influence, but how many they are has, near both ends, as
    they are part of the period. Haar's filters are averages and repetition.

    Parameters
    ----------
    wavelet : pywt.Wavelet
        Or anything with the filters ``dec_lo`` and ``rec_lo``, each a sequence of 2 n numbers.
    """
    try:
        low = [x / math.sqrt(2) for x in wavelet.dec_lo]
        dual = [x * math.sqrt(2) for x in wavelet.rec_lo]
    except AttributeError as error:
        raise TypeError(
            f'filters is {wavelet!r}; expected "boxcar", or a wavelet: pywt.Wavelet("db2"), ...'
        ) from error
    if not low or len(low) % 2 or len(dual) % 2:
        raise ValueError(
            f"filters has a dec_lo of {len(low)} numbers and a rec_lo of {len(dual)}; expected an "
            "even number of each, as in PyWavelets"
        )

    def down(x: Tensor, scale: int, present: Tensor | None) -> Any:
        levels, kept = check_levels(scale), None
        if present is not None:
            kept = average_pooling(x, scale, present)[1]

        def pool(y: Tensor) -> Tensor:
            z = y.to(accumulation_dtype(y))
            if present is not None:
                mean = mean_of_present(blank(z, present), present)
                z = torch.where(present[..., None], z, mean)
            missing = -z.shape[-2] % scale if z.shape[-2] else 0
            z = torch.cat([z, z[..., -1:, :].expand(*z.shape[:-2], missing, -1)], -2)
            for _ in range(levels if z.shape[-2] else 0):
                z = _analyse(z, low)
            z = z if kept is None else z.masked_fill(~kept[..., None], 0)
            return z.to(y.dtype)

        return pool, kept

    def up(y: Tensor, scale: int, N: int) -> Tensor:
        z = y.to(accumulation_dtype(y))
        for _ in range(check_levels(scale) if N else 0):
            z = _synthesise(z, dual)
        return z[..., :N, :].to(y.dtype)

    return Filter(down, up)


def _analyse(x: Tensor, low: Sequence[float]) -> Tensor:
    """Return one level: Σ_k h_k x_(2t + L/2 − k), from (..., 2n, D) to (..., n, D)."""
    n, half = x.shape[-2], len(low) // 2
    t = torch.arange(0, n, 2, device=x.device)
    return sum(h * x[..., (t + half - k) % n, :] for k, h in enumerate(low))  # type: ignore


def _synthesise(y: Tensor, dual: Sequence[float]) -> Tensor:
    """Add g_k y_t to step 2t + k + 1 − L/2: from (..., n, D) to (..., 2n, D)."""
    n, half = y.shape[-2], len(dual) // 2
    t, phases = torch.arange(n, device=y.device), []
    for p in (0, 1):
        taps = [(k, g) for k, g in enumerate(dual) if (p - k - 1 + half) % 2 == 0]
        phases.append(sum(g * y[..., (t + (p - k - 1 + half) // 2) % n, :] for k, g in taps))
    return torch.stack(phases, -2).flatten(-3, -2)  # type: ignore[arg-type]


def downsample(x: Tensor, scale: int, filters: Any = "boxcar") -> Tensor:
    """↓_s: average each window of s steps, (..., N, D) to (..., ⌈N/s⌉, D).

    A last window that is shorter is averaged over the steps it has. With a wavelet, a low-pass
    filter of that scale replaces averages: see `wavelet_filter`.
    """
    check_floating({"x": x})
    if x.dim() < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected (..., N, D)")
    return get_filter(filters).down(x, check_count("scale", scale, 1), None)[0](x)


def upsample(x: Tensor, scale: int, N: int, filters: Any = "boxcar") -> Tensor:
    """↑_s: repeat each step s times, (..., ⌈N/s⌉, D) to (..., N, D), or apply the dual filter."""
    check_floating({"x": x})
    windows = -(-check_count("N", N, 0) // check_count("scale", scale, 1))
    check_shape("x", x, (*x.shape[:-2], windows, *x.shape[-1:]), f"{N} steps in windows of {scale}")
    return get_filter(filters).up(x, scale, N)


def is_boxcar(filters: Any) -> bool:
    """Return whether filters are averages."""
    return isinstance(filters, str) and filters == "boxcar"


def check_levels(scale: int) -> int:
    """Return log2 of a scale."""
    if scale & (scale - 1):
        raise ValueError(f"a scale is {scale}; expected a power of 2 with wavelets")
    return scale.bit_length() - 1
