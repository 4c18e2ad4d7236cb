"""Sparse attention: softmax over a few keys, in patterns that blocks can follow (chapter 4).

The equation of this module, with a set S(i) of keys for each query i, is ::

    h_i = Σ_{j ∈ S(i)} a_ij v_j,    a_ij = exp(q_i·k_j/√D) / Σ_{l ∈ S(i)} exp(q_i·k_l/√D)

and its patterns are ::

    window    S(i) = {j : |i − j| ≤ window}
    strided   S(i) = {j : |i − j| < stride, or i − j is a multiple of stride}
    fixed     S(i) = {j : ⌊j/stride⌋ = ⌊i/stride⌋, or j mod stride ≥ stride − summary}

less the j > i where `is_causal`. The last two are those of Child et al. (2019), both of their sets
in one head. A ``<pattern>_mask`` is S as a matrix, a ``<pattern>_attention_reference`` is softmax
attention under it, and a ``<pattern>_attention`` gives the same H and forms no (N, M) matrix.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from derived_attention.attention.checks import check_count
from derived_attention.attention.convention import full_precision, mechanism
from derived_attention.attention.linear import wide
from derived_attention.attention.masks import Mask, masked_softmax, within
from derived_attention.attention.softmax import sdpa

BLOCK = 32  # fewest queries in a block of a window: smaller ones cost more calls than they save
Device = torch.device | str | None

# --- the patterns as matrices -------------------------------------------------------------------


def window_mask(
    N: int, M: int, window: int, *, is_causal: bool = False, device: Device = None
) -> Tensor:
    """Boolean (N, M) mask of a local window: query i attends the keys with ``|i − j| ≤ window``.

    With `is_causal` without the keys j > i. Numbers that are not whole are a TypeError, and N, M or
    `window` below 0 a ValueError.
    """
    check_count("window", window, 0)
    i, j = _pairs(N, M, device)
    return _past(i, j, _is_near(i, j, window), is_causal)


def strided_mask(
    N: int, M: int, stride: int, *, is_causal: bool = False, device: Device = None
) -> Tensor:
    """Boolean (N, M) mask: query i attends its neighbourhood, and every `stride`-th key from there.

    ``|i − j| < stride``, or i − j a multiple of `stride`: Child et al.'s strided pattern, for
    data with a period, such as the rows of an image. With `is_causal` any key reaches any later
    query in two layers. With a `stride` of 1 every key is attended. Otherwise as `window_mask`.
    """
    check_count("stride", stride, 1)
    i, j = _pairs(N, M, device)
    keep = _is_near(i, j, stride - 1) | ((i - j) % stride == 0)
    return _past(i, j, keep, is_causal)


def fixed_mask(
    N: int, M: int, stride: int, summary: int = 1, *, is_causal: bool = False, device: Device = None
) -> Tensor:
    """Boolean (N, M) mask: query i attends its block, and the last `summary` keys of every block.

    Child et al.'s fixed pattern, for data without a period, such as text. Blocks have `stride`
    positions, and start at 0, stride, 2 stride, ...; the last may be shorter, and then has fewer
    summaries or none. `summary` is from 1 to `stride`. Otherwise as `window_mask`.
    """
    _check_fixed(stride, summary)
    i, j = _pairs(N, M, device)
    keep = (i // stride == j // stride) | (j % stride >= stride - summary)
    return _past(i, j, keep, is_causal)


def _is_near(i: Tensor, j: Tensor, window: int) -> Tensor:
    return (i - j).abs() <= window


def _past(i: Tensor, j: Tensor, keep: Tensor, is_causal: bool) -> Tensor:
    return keep & (j <= i) if is_causal else keep


def _pairs(N: int, M: int, device: Device) -> tuple[Tensor, Tensor]:
    check_count("N", N, 0)
    check_count("M", M, 0)
    return torch.arange(N, device=device)[:, None], torch.arange(M, device=device)  # (N, 1), (M,)


# --- the formula: softmax under a mask ----------------------------------------------------------


@mechanism
def window_attention_reference(q, k, v, mask, scale, *, window) -> Tensor:
    """Softmax attention under `window_mask`, with the whole matrix in memory; any mask will do."""
    return _under(window_mask, q, k, v, mask, scale, window)


@mechanism
def strided_attention_reference(q, k, v, mask, scale, *, stride) -> Tensor:
    """Softmax attention under `strided_mask`, with the whole matrix in memory; any mask will do."""
    return _under(strided_mask, q, k, v, mask, scale, stride)


@mechanism
def fixed_attention_reference(q, k, v, mask, scale, *, stride, summary=1) -> Tensor:
    """Softmax attention under `fixed_mask`, with the whole matrix in memory; any mask will do."""
    return _under(fixed_mask, q, k, v, mask, scale, stride, summary)


def _under(pattern, q, k, v, mask, scale, *own) -> Tensor:
    """Softmax attention to the keys of a pattern that the mask allows."""
    scores = (scale or 1 / math.sqrt(q.shape[-1])) * q @ k.mT  # (..., H, N, M)
    keep = pattern(*scores.shape[-2:], *own, device=q.device)
    return masked_softmax(scores, within(keep, mask.on(scores))) @ v


# --- the same by blocks -------------------------------------------------------------------------


@mechanism(per_key=True)
def window_attention(q, k, v, mask, scale, *, window) -> Tensor:
    """Softmax attention of query i to the keys ``|i − j| ≤ window``, in O(N window) time.

    Memory is O(N window), too. Queries in blocks, and for each block the stretch of keys that its
    windows cover: all blocks are one fused call, under a mask that is a band.

    Parameters
    ----------
    window : int
        Keys on each side, at least 0.
    """
    check_count("window", window, 0)
    column = _key_column(mask, k.shape[-2])
    if q.numel() == 0 or k.numel() == 0:
        return sdpa(q, k, v, Mask(), scale)
    N, M, is_causal = q.shape[-2], k.shape[-2], mask.is_causal
    window = min(window, max(N, M) - 1)
    C = min(max(window, BLOCK), N)  # queries in a block
    W = window + C + (0 if is_causal else window)  # keys in its stretch
    rows = -(-N // C)
    stretches = functools.partial(_stretches, size=C, before=window, width=W, rows=rows)
    i, j = _positions(1, C, q.device), _stretch_positions(rows, C, window, W, q.device)
    band = _past(i, j[:1], _is_near(i, j[:1], window), is_causal)  # (1, C, W): all blocks' alike
    keep = band & (0 <= j) & (j < M)  # (rows, C, W)
    blocks = _blocks(q, C, rows)  # (..., H, rows, C, D)
    near = Mask(within(keep, None if column is None else stretches(column).mT))
    H = sdpa(blocks, stretches(k), stretches(v), near, scale)  # keys (..., H, rows, W, D)
    return H.flatten(-3, -2)[..., :N, :]


@mechanism(per_key=True)
def strided_attention(q, k, v, mask, scale, *, stride) -> Tensor:
    """Softmax attention under `strided_mask`, in O(N (3 stride + M/stride)) time and memory.

    Written as a table with `stride` columns, row after row, a query meets two groups of keys: its
    neighbours, by blocks, and its column. A stride near √M is the cheapest. One softmax runs over
    both groups, and a key in both is left out of the second.
    Sums are in float32 at least, under autocast too. Where the stride nears M, the pattern is
    nearly everything, and `softmax_attention` is the cheaper way to it.

    Parameters
    ----------
    stride : int
        At least 1.
    """
    check_count("stride", stride, 1)
    column = _key_column(mask, k.shape[-2])
    if q.numel() == 0 or k.numel() == 0:
        return sdpa(q, k, v, Mask(), scale)
    N, M, is_causal = q.shape[-2], k.shape[-2], mask.is_causal
    stride = min(stride, max(N, M))
    before = stride - 1
    W = before + stride + (0 if is_causal else before)  # keys in the stretch of a block
    rows, key_rows = -(-N // stride), -(-M // stride)
    stretches = functools.partial(_stretches, size=stride, before=before, width=W, rows=rows)

    def columns(x: Tensor) -> Tensor:  # (..., M, D) to (..., C, key rows, D), with C = stride
        return _blocks(x, stride, key_rows).transpose(-3, -2)

    i, j = _positions(rows, stride, q.device), _stretch_positions(rows, stride, before, W, q.device)
    band = _past(i[:1], j[:1], _is_near(i[:1], j[:1], before), is_causal)  # all blocks' alike
    near = band & (0 <= j) & (j < M)  # (rows, C, W)
    j = _positions(key_rows, stride, q.device).transpose(0, 2)[0]  # (C, key rows): i's column
    far = _past(i, j, ~_is_near(i, j, before) & (j < M), is_causal)  # (rows, C, key rows)
    if column is not None:
        near = within(near, stretches(column).mT)
        far = within(far, columns(column)[..., None, :, :, 0])
    with full_precision(q.device):
        Q, K, V = _scaled(q, scale), k.to(wide(q)), v.to(wide(q))
        Q = _blocks(Q, stride, rows)
        far_scores = (Q.transpose(-3, -2) @ columns(K).mT).transpose(-3, -2)
        A, A_far = _weights(Q @ stretches(K).mT, far_scores, near, far)
        H = A @ stretches(V) + (A_far.transpose(-3, -2) @ columns(V)).transpose(-3, -2)
    return H.flatten(-3, -2)[..., :N, :].to(q.dtype)


@mechanism(per_key=True)
def fixed_attention(q, k, v, mask, scale, *, stride, summary=1) -> Tensor:
    """Softmax attention under `fixed_mask`, in O(N (stride + summary M/stride)) time and memory.

    A query meets two groups of keys: its own block, and the summaries of all blocks, which are the
    same keys for all queries. One softmax runs over both, and the summaries of a query's own block
    are left out of the second. Sums are in float32 at least, under autocast too.

    Parameters
    ----------
    stride : int
        Length of a block, at least 1.
    summary : int
        Keys at the end of each block that every query attends, from 1 to `stride`.
    """
    _check_fixed(stride, summary)
    column = _key_column(mask, k.shape[-2])
    if q.numel() == 0 or k.numel() == 0:
        return sdpa(q, k, v, Mask(), scale)
    N, M, is_causal = q.shape[-2], k.shape[-2], mask.is_causal
    stride = min(stride, max(N, M))
    summary = min(summary, stride)
    rows, key_rows = -(-N // stride), -(-M // stride)

    def summaries(x: Tensor) -> Tensor:  # (..., M, D) to (..., S, D)
        return _blocks(x, stride, key_rows)[..., stride - summary :, :].flatten(-3, -2)

    i = _positions(rows, stride, q.device)  # (rows, C, 1), with C = stride
    near = _past(i, i.mT, (i.mT < M).expand(-1, stride, -1), is_causal)  # (rows, C, C)
    j = summaries(_positions(1, key_rows * stride, q.device)[0])[:, 0]  # (S,)
    far = _past(i, j, (i // stride != j // stride) & (j < M), is_causal)  # (rows, C, S)
    if column is not None:
        near = within(near, _blocks(column, stride, rows).mT)
        far = within(far, summaries(column).mT[..., None, :, :])
    with full_precision(q.device):
        Q, K, V = _scaled(q, scale), k.to(wide(q)), v.to(wide(q))
        Q = _blocks(Q, stride, rows)
        far_scores = (Q.flatten(-3, -2) @ summaries(K).mT).unflatten(-2, (rows, stride))
        A, A_far = _weights(Q @ _blocks(K, stride, rows).mT, far_scores, near, far)
        H = A @ _blocks(V, stride, rows)  # (..., rows, C, Dv)
        H = H.flatten(-3, -2) + A_far.flatten(-3, -2) @ summaries(V)
    return H[..., :N, :].to(q.dtype)


def _scaled(q: Tensor, scale: float | None) -> Tensor:
    return (scale or 1 / math.sqrt(q.shape[-1])) * q.to(wide(q))


def _weights(near: Tensor, far: Tensor, near_mask: Tensor, far_mask: Tensor) -> tuple[Tensor, ...]:
    """One softmax over the scores of two groups of keys, and its weights as two parts again."""
    scores, mask = torch.cat([near, far], -1), torch.cat([near_mask, far_mask], -1)
    return masked_softmax(scores, mask).split([near.shape[-1], far.shape[-1]], -1)


def _blocks(x: Tensor, size: int, rows: int) -> Tensor:
    """Cut (..., L, D) into (..., rows, size, D), after dropping rows or appending rows of zeros."""
    missing = rows * size - x.shape[-2]
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    return x.unflatten(-2, (rows, size))


def _stretches(x: Tensor, *, size: int, before: int, width: int, rows: int) -> Tensor:
    """Overlapping stretches (..., rows, width, D) of (..., L, D): every `size`-th from -`before`.

    Zeros stand where x ends. A view of one padded copy: the overlaps are stored once.
    """
    after = (rows - 1) * size + width - before - x.shape[-2]
    return F.pad(x, (0, 0, before, after)).unfold(-2, width, size).mT


def _positions(rows: int, size: int, device: torch.device) -> Tensor:
    """Positions (rows, size, 1) of what `_blocks` cuts."""
    return torch.arange(rows * size, device=device).view(rows, size, 1)


def _stretch_positions(
    rows: int, size: int, before: int, width: int, device: torch.device
) -> Tensor:
    """Positions (rows, 1, width) of what `_stretches` cuts; out of range where it has zeros."""
    start = torch.arange(rows, device=device)[:, None, None] * size - before
    return start + torch.arange(width, device=device)


def _key_column(mask: Mask, M: int) -> Tensor | None:
    """Mask over keys as a column (..., M, 1), to be cut as keys are."""
    rows = mask.per_key()
    return None if rows is None else rows.expand(*rows.shape[:-1], M).mT


def _check_fixed(stride: int, summary: int) -> None:
    check_count("stride", stride, 1)
    check_count("summary", summary, 1)
    if summary > stride:
        raise ValueError(f"summary is {summary}; expected at most the stride, {stride}")
