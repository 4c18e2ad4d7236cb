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

from derived_attention.attention.checks import check_attention, check_count, check_key_mask
from derived_attention.attention.linear import full_precision
from derived_attention.attention.softmax import _open_dead_rows, sdpa, softmax_attention_reference

BLOCK = 32  # fewest queries in a block of a window: smaller ones cost more calls than they save

# --- who may attend whom, for positions i and j that broadcast ----------------------------------


def _is_near(i: Tensor, j: Tensor, window: int) -> Tensor:
    return (i - j).abs() <= window


def _same_column(i: Tensor, j: Tensor, stride: int) -> Tensor:
    return (i - j) % stride == 0


def _same_block(i: Tensor, j: Tensor, stride: int) -> Tensor:
    return i // stride == j // stride


def _is_summary(j: Tensor, stride: int, summary: int) -> Tensor:
    return j % stride >= stride - summary


def _pairs(N: int, M: int, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
    check_count("N", N, 0)
    check_count("M", M, 0)
    return torch.arange(N, device=device)[:, None], torch.arange(M, device=device)  # (N, 1), (M,)


def _past(i: Tensor, j: Tensor, keep: Tensor, is_causal: bool) -> Tensor:
    return keep & (j <= i) if is_causal else keep


# --- the patterns as matrices -------------------------------------------------------------------


def window_mask(
    N: int,
    M: int,
    window: int,
    *,
    is_causal: bool = False,
    device: torch.device | str | None = None,
) -> Tensor:
    """Boolean (N, M) mask of a local window: query i attends the keys with ``|i − j| ≤ window``.

    Parameters
    ----------
    N, M : int
        Numbers of queries and of keys, at least 0.
    window : int
        Keys on each side, at least 0. At 0 there is only the key j = i.
    is_causal : bool
        Drop the keys j > i.
    device : torch.device or str, optional
        Where the mask is made.

    Raises
    ------
    TypeError, ValueError
        For a number that is not whole, or too small.
    """
    check_count("window", window, 0)
    i, j = _pairs(N, M, device)
    return _past(i, j, _is_near(i, j, window), is_causal)


def strided_mask(
    N: int,
    M: int,
    stride: int,
    *,
    is_causal: bool = False,
    device: torch.device | str | None = None,
) -> Tensor:
    """Boolean (N, M) mask: query i attends its neighbourhood, and every `stride`-th key from there.

    ``|i − j| < stride``, or i − j a multiple of `stride`: Child et al.'s strided pattern, for
    data with a period, such as the rows of an image. With `is_causal` any key reaches any later
    query in two layers.

    Parameters
    ----------
    stride : int
        At least 1, where every key is attended.
    N, M, is_causal, device
        As in `window_mask`.

    Raises
    ------
    TypeError, ValueError
        For a number that is not whole, or too small.
    """
    check_count("stride", stride, 1)
    i, j = _pairs(N, M, device)
    keep = _is_near(i, j, stride - 1) | _same_column(i, j, stride)
    return _past(i, j, keep, is_causal)


def fixed_mask(
    N: int,
    M: int,
    stride: int,
    summary: int = 1,
    *,
    is_causal: bool = False,
    device: torch.device | str | None = None,
) -> Tensor:
    """Boolean (N, M) mask: query i attends its block, and the last `summary` keys of every block.

    Child et al.'s fixed pattern, for data without a period, such as text. Blocks have `stride`
    positions, and start at 0, stride, 2 stride, ...; the last may be shorter, and then has fewer
    summaries or none.

    Parameters
    ----------
    stride : int
        Length of a block, at least 1.
    summary : int
        From 1 to `stride`, where every key is attended.
    N, M, is_causal, device
        As in `window_mask`.

    Raises
    ------
    TypeError, ValueError
        For a number that is not whole, or out of its range.
    """
    _check_fixed(stride, summary)
    i, j = _pairs(N, M, device)
    keep = _same_block(i, j, stride) | _is_summary(j, stride, summary)
    return _past(i, j, keep, is_causal)


# --- the formula: softmax under a mask ----------------------------------------------------------


def window_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: int,
) -> Tensor:
    """Softmax attention under `window_mask`, with the whole matrix in memory.

    Arguments, result and errors are those of `window_attention`, but for the mask, which may be
    any that broadcasts to ``(..., H, N, M)``.
    """
    check_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    N, M = q.shape[-2], k.shape[-2]
    keep = window_mask(N, M, window, is_causal=is_causal, device=q.device)
    return softmax_attention_reference(q, k, v, attn_mask=_within(keep, attn_mask), scale=scale)


def strided_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    stride: int,
) -> Tensor:
    """Softmax attention under `strided_mask`, with the whole matrix in memory.

    Arguments, result and errors are those of `strided_attention`, but for the mask, which may be
    any that broadcasts to ``(..., H, N, M)``.
    """
    check_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    N, M = q.shape[-2], k.shape[-2]
    keep = strided_mask(N, M, stride, is_causal=is_causal, device=q.device)
    return softmax_attention_reference(q, k, v, attn_mask=_within(keep, attn_mask), scale=scale)


def fixed_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    stride: int,
    summary: int = 1,
) -> Tensor:
    """Softmax attention under `fixed_mask`, with the whole matrix in memory.

    Arguments, result and errors are those of `fixed_attention`, but for the mask, which may be
    any that broadcasts to ``(..., H, N, M)``.
    """
    check_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    N, M = q.shape[-2], k.shape[-2]
    keep = fixed_mask(N, M, stride, summary, is_causal=is_causal, device=q.device)
    return softmax_attention_reference(q, k, v, attn_mask=_within(keep, attn_mask), scale=scale)


# --- the same by blocks -------------------------------------------------------------------------


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: int,
) -> Tensor:
    """Softmax attention of query i to the keys ``|i − j| ≤ window``, in O(N window) time.

    Memory is O(N window), too.

    Queries in blocks, and for each block the stretch of keys that its windows cover: all blocks
    are one fused call, under a mask that is a band.

    Parameters
    ----------
    q, k, v : Tensor
        Queries ``(..., H, N, D)``, keys ``(..., H, M, D)`` and values ``(..., H, M, Dv)``, as in
        `softmax_attention`.
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean:
        True where a key may be attended. Floating: added to the scores, finite or -inf.
    is_causal : bool
        Query i attends keys j ≤ i only, counted from the top left. Excludes `attn_mask`.
    scale : float, optional
        Finite and positive; replaces 1/√D.
    window : int
        Keys on each side, at least 0.

    Returns
    -------
    Tensor
        ``(..., H, N, Dv)``, in the dtype of `q`; zeros for a query with no key to attend.

    Raises
    ------
    TypeError, ValueError
        As in `softmax_attention`; for a mask with more than one row; for a `window` that is not a
        whole number, or negative.
    """
    scale = check_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    check_count("window", window, 0)
    mask = None if attn_mask is None else _key_column(attn_mask, k.shape[-2])
    if q.numel() == 0 or k.numel() == 0:
        return sdpa(q, k, v, scale=scale)
    N, M = q.shape[-2], k.shape[-2]
    window = min(window, max(N, M) - 1)
    C = min(max(window, BLOCK), N)  # queries in a block
    W = window + C + (0 if is_causal else window)  # keys in its stretch
    rows = -(-N // C)
    stretches = functools.partial(_stretches, size=C, before=window, width=W, rows=rows)
    i, j = _positions(1, C, q.device), _stretch_positions(rows, C, window, W, q.device)
    band = _past(i, j[:1], _is_near(i, j[:1], window), is_causal)  # (1, C, W): all blocks' alike
    keep = band & (0 <= j) & (j < M)  # (rows, C, W)
    H = sdpa(
        _blocks(q, C, rows),  # (..., H, rows, C, D)
        stretches(k),  # (..., H, rows, W, D)
        stretches(v),
        attn_mask=_within(keep, None if mask is None else stretches(mask).mT),
        scale=scale,
    )
    return H.flatten(-3, -2)[..., :N, :]


def strided_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    stride: int,
) -> Tensor:
    """Softmax attention under `strided_mask`, in O(N (3 stride + M/stride)) time and memory.

    Written as a table with `stride` columns, row after row, a query meets two groups of keys: its
    neighbours, by blocks, and its column. A stride near √M is the cheapest. One softmax runs over
    both groups, and a key in both is left out of the second.
    Sums are in float32 at least, under autocast too. Where the stride nears M, the pattern is
    nearly everything, and `softmax_attention` is the cheaper way to it.

    Parameters
    ----------
    q, k, v, attn_mask, is_causal, scale
        As in `window_attention`.
    stride : int
        At least 1.

    Returns
    -------
    Tensor
        ``(..., H, N, Dv)``, in the dtype of `q`; zeros for a query with no key to attend.

    Raises
    ------
    TypeError, ValueError
        As in `softmax_attention`; for a mask with more than one row; for a `stride` that is not a
        whole number, or not positive.
    """
    scale = check_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    check_count("stride", stride, 1)
    mask = None if attn_mask is None else _key_column(attn_mask, k.shape[-2])
    if q.numel() == 0 or k.numel() == 0:
        return sdpa(q, k, v, scale=scale)
    stride = min(stride, max(q.shape[-2], k.shape[-2]))
    return _strided(q, k, v, mask, is_causal, scale, stride).to(q.dtype)


def _strided(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    stride: int,
) -> Tensor:
    """Attend by neighbourhoods and columns; `mask` is a column (..., M, 1)."""
    N, M, before = q.shape[-2], k.shape[-2], stride - 1
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
    if mask is not None:
        near = _within(near, stretches(mask).mT)
        far = _within(far, columns(mask)[..., None, :, :, 0])
    dtype = torch.promote_types(q.dtype, torch.float32)
    with full_precision(q.device):
        q, k, v = _blocks(scale * q.to(dtype), stride, rows), k.to(dtype), v.to(dtype)
        far_scores = (q.transpose(-3, -2) @ columns(k).mT).transpose(-3, -2)
        A, A_far = _weights(q @ stretches(k).mT, far_scores, near, far)
        H = A @ stretches(v) + (A_far.transpose(-3, -2) @ columns(v)).transpose(-3, -2)
    return H.flatten(-3, -2)[..., :N, :]


def fixed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    stride: int,
    summary: int = 1,
) -> Tensor:
    """Softmax attention under `fixed_mask`, in O(N (stride + summary M/stride)) time and memory.

    A query meets two groups of keys: its own block, and the summaries of all blocks, which are the
    same keys for all queries. One softmax runs over both, and the summaries of a query's own block
    are left out of the second. Sums are in float32 at least, under autocast too.

    Parameters
    ----------
    q, k, v, attn_mask, is_causal, scale
        As in `window_attention`.
    stride : int
        Length of a block, at least 1.
    summary : int
        Keys at the end of each block that every query attends, from 1 to `stride`.

    Returns
    -------
    Tensor
        ``(..., H, N, Dv)``, in the dtype of `q`; zeros for a query with no key to attend.

    Raises
    ------
    TypeError, ValueError
        As in `softmax_attention`; for a mask with more than one row; for a `stride` or a `summary`
        that is not a whole number, or out of its range.
    """
    scale = check_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    _check_fixed(stride, summary)
    mask = None if attn_mask is None else _key_column(attn_mask, k.shape[-2])
    if q.numel() == 0 or k.numel() == 0:
        return sdpa(q, k, v, scale=scale)
    stride = min(stride, max(q.shape[-2], k.shape[-2]))
    summary = min(summary, stride)
    return _fixed(q, k, v, mask, is_causal, scale, stride, summary).to(q.dtype)


def _fixed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    stride: int,
    summary: int,
) -> Tensor:
    """Attend by blocks and summaries; `mask` is a column (..., M, 1)."""
    N, M = q.shape[-2], k.shape[-2]
    rows, key_rows = -(-N // stride), -(-M // stride)

    def summaries(x: Tensor) -> Tensor:  # (..., M, D) to (..., S, D)
        return _blocks(x, stride, key_rows)[..., stride - summary :, :].flatten(-3, -2)

    i = _positions(rows, stride, q.device)  # (rows, C, 1), with C = stride
    near = _past(i, i.mT, (i.mT < M).expand(-1, stride, -1), is_causal)  # (rows, C, C)
    j = summaries(_positions(1, key_rows * stride, q.device)[0])[:, 0]  # (S,)
    far = _past(i, j, ~_same_block(i, j, stride) & (j < M), is_causal)  # (rows, C, S)
    if mask is not None:
        near = _within(near, _blocks(mask, stride, rows).mT)
        far = _within(far, summaries(mask).mT[..., None, :, :])
    dtype = torch.promote_types(q.dtype, torch.float32)
    with full_precision(q.device):
        q, k, v = _blocks(scale * q.to(dtype), stride, rows), k.to(dtype), v.to(dtype)
        far_scores = (q.flatten(-3, -2) @ summaries(k).mT).unflatten(-2, (rows, stride))
        A, A_far = _weights(q @ _blocks(k, stride, rows).mT, far_scores, near, far)
        H = A @ _blocks(v, stride, rows)  # (..., rows, C, Dv)
        H = H.flatten(-3, -2) + A_far.flatten(-3, -2) @ summaries(v)
    return H[..., :N, :]


def _weights(near: Tensor, far: Tensor, near_mask: Tensor, far_mask: Tensor) -> tuple[Tensor, ...]:
    """One softmax over the scores of two groups of keys, and its weights as two parts again."""
    scores = torch.cat([near, far], -1)  # (..., rows, C, W + S)
    attn_mask, alive = _open_dead_rows(torch.cat([near_mask, far_mask], -1), scores.dtype)
    if attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    else:
        scores = scores + attn_mask
    A = scores.softmax(-1).masked_fill(~alive, 0)
    return A.split([near.shape[-1], far.shape[-1]], -1)


def _within(keep: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Restrict a mask, boolean or floating, to the keys of a pattern."""
    if attn_mask is None:
        return keep
    if attn_mask.dtype == torch.bool:
        return keep & attn_mask
    return torch.where(keep, attn_mask, -math.inf)


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


def _key_column(attn_mask: Tensor, M: int) -> Tensor:
    """Mask over keys as a column (..., M, 1), to be cut as keys are."""
    mask = check_key_mask(attn_mask)
    return mask.expand(*mask.shape[:-1], M).mT


def _check_fixed(stride: int, summary: int) -> None:
    check_count("stride", stride, 1)
    check_count("summary", summary, 1)
    if summary > stride:
        raise ValueError(f"summary is {summary}; expected at most the stride, {stride}")
