"""Sums over all tokens up to each one, or over all chunks before each one."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from derived_attention.common.convention import extend

CHUNK = 64  # tokens that one thread of a GPU adds up


def running_sums(x: Tensor) -> Tensor:
    """Return Σ_{j ≤ i} x_j for each token i of x (..., N, D), in float32 at least.

    A GPU scans a column of a matrix in one thread, token by token. So there the columns of all
    chunks are scanned at once, and the totals of the chunks before are added. No sum depends on a
    later token, not even on ∞ or NaN, as a product with a triangle of ones and zeros would.
    """
    x, N = x.to(torch.promote_types(x.dtype, torch.float32)), x.shape[-2]
    if x.device.type == "cpu" or N <= CHUNK:
        return x.cumsum(-2)
    sums = extend(x, -N % CHUNK).unflatten(-2, (-1, CHUNK)).cumsum(-2)  # (..., n, C, D)
    totals = sums[..., -1:, :]
    before, _ = sums_before(totals, torch.zeros_like(totals[..., 0, :, :]))
    return (sums + before).flatten(-3, -2)[..., :N, :]


def sums_before(sums: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Return `first` (..., ·, ·) plus the sums (..., n, ·, ·) of chunks before each, and of all.

    Subtracting the chunk from a longer sum would leave rounding errors, and with them a trace of
    the future.
    """
    if sums.device.type == "cpu":  # where additions are faster than a scan
        *before, last = itertools.accumulate(sums.unbind(-3), initial=first)
        return torch.stack(before, -3), last
    S = torch.cat([first.unsqueeze(-3), sums[..., :-1, :, :]], -3).cumsum(-3)
    return S, S[..., -1, :, :] + sums[..., -1, :, :]
