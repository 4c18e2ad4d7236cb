"""Sparse attention: softmax over a few keys, in patterns that blocks can cover (chapter 4).

The equation of this module, with a set S(i) of keys for each query i, is ::

    h_i = Σ_{j ∈ S(i)} a_ij v_j,    a_ij = exp(q_i·k_j/√D) / Σ_{l ∈ S(i)} exp(q_i·k_l/√D)

and its patterns are ::

    window    S(i) = {j : |i − j| ≤ window}
    strided   S(i) = {j : |i − j| < stride, or i − j is a multiple of stride}
    fixed     S(i) = {j : ⌊j/stride⌋ = ⌊i/stride⌋, or j mod stride ≥ stride − summary}

without the j > i if `is_causal`. The last two are those of Child et al. (2019), both of their sets
in one head. A ``<pattern>_mask`` is S as a matrix, a ``<pattern>_attention_reference`` is softmax
attention under it, and a ``<pattern>_attention`` gives the same H: by PyTorch's softmax attention
under a mask for short sequences, and for long ones by blocks, without an (N, M) matrix. On a GPU
PyTorch's FlexAttention runs instead, by pairs of positions that may be attended; see
`derived_attention.common.flex`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from derived_attention import formulas
from derived_attention.common import flex
from derived_attention.common.blocks import by_heads
from derived_attention.common.checks import (
    accumulation_dtype,
    check_count,
    check_flag,
    has_concrete_values,
)
from derived_attention.common.convention import (
    extend,
    full_precision,
    mechanism,
    reference,
    scaled,
)
from derived_attention.common.masks import Mask, cast_mask, masked_softmax, within
from derived_attention.softmax.core import sdpa

DENSE = 256  # keys up to which a mask is cheaper than blocks
BLOCK = 32  # fewest queries in a block: smaller blocks are slower
Device = torch.device | str | None
Options = dict[str, Any]

# --- the options --------------------------------------------------------------------------------


def check_stride(*_: Any, stride: int) -> Options:
    """Check the stride of the strided pattern."""
    return {"stride": check_count("stride", stride, 1)}


def check_fixed(*_: Any, stride: int, summary: int = 1) -> Options:
    """Check the sizes of the fixed pattern."""
    check_count("stride", stride, 1)
    if check_count("summary", summary, 1) > stride:
        raise ValueError(f"summary is {summary}; expected at most the stride, {stride}")
    return {"stride": stride, "summary": summary}


# --- the patterns of FlexAttention, whose keys may be a permutation or hold copies ---------------


def in_band(i: Tensor, j: Tensor, before: Any, after: Any) -> Tensor:
    """Return whether key j is at most `before` places before query i or `after` places after it."""
    return (i - j <= before) & (j - i <= after)


def in_same_column(i: Tensor, j: Tensor, rows: Any, stride: Any, M: Any, after: Any) -> Tensor:
    """Return whether key j is another one of the column of query i, in a table by columns.

    The table has `rows` rows and `stride` columns; token r stride + c is in row r and column c,
    and at the place c rows + r. There are M keys. `after` is the largest distance of a later key.
    """
    same = (i // rows == j // rows) & (i != j) & (j - i <= after)
    return same & (j % rows * stride + j // rows < M)


def in_block_or_summaries(i: Tensor, j: Tensor, *numbers: Any) -> Tensor:
    """Return whether key j is in the block of query i, or is a copy in a summary of another block.

    The numbers are the length of a block, the keys of a summary, the number M of keys, which
    precede the copies, and the largest distance of a later key.
    """
    stride, summary, M, after = numbers
    copy, own = j - M, j < M
    place = torch.where(own, j, copy // summary * stride + stride - summary + copy % summary)
    return ((i // stride == place // stride) == own) & (place - i <= after) & (place < M)


# --- the patterns as matrices -------------------------------------------------------------------


def in_window(i: Tensor, j: Tensor, window: Any) -> Tensor:
    """Return whether key j is in the window of query i, for positions that broadcast."""
    return (i - j).abs() <= window


def is_in_strided_pattern(i: Tensor, j: Tensor, stride: int) -> Tensor:
    """Return whether key j is in the strided pattern of query i: its neighbourhood and column."""
    return ((i - j).abs() < stride) | ((i - j) % stride == 0)


def is_in_fixed_pattern(i: Tensor, j: Tensor, stride: int, summary: int) -> Tensor:
    """Return whether key j is in the fixed pattern of query i: its block, and all summaries."""
    return (i // stride == j // stride) | (j % stride >= stride - summary)


def window_mask(
    N: int, M: int, window: int, *, is_causal: bool = False, device: Device = None
) -> Tensor:
    """Return the (N, M) mask of a window: query i attends the keys with ``|i − j| ≤ window``.

    With `is_causal` only keys j ≤ i. TypeError for numbers that are not whole, ValueError for
    N, M or `window` below 0.
    """
    check_count("window", window, 0)
    i, j = _pairs(N, M, device)
    return _past(i, j, in_window(i, j, window), is_causal)


def strided_mask(
    N: int, M: int, stride: int, *, is_causal: bool = False, device: Device = None
) -> Tensor:
    """Return the (N, M) mask by which a query attends its neighbours and every `stride`-th key.

    ``|i − j| < stride``, or i − j a multiple of `stride`: Child et al.'s strided pattern, for
    data with a period, such as the rows of an image. With `is_causal` any key reaches any later
    query in two layers. With a `stride` of 1 every key is attended. Otherwise as `window_mask`.
    """
    check_stride(stride=stride)
    i, j = _pairs(N, M, device)
    return _past(i, j, is_in_strided_pattern(i, j, stride), is_causal)


def fixed_mask(
    N: int, M: int, stride: int, summary: int = 1, *, is_causal: bool = False, device: Device = None
) -> Tensor:
    """Return the (N, M) mask by which a query attends its block and `summary` keys of each block.

    Child et al.'s fixed pattern, for data without a period, such as text. Blocks of `stride`
    positions start at 0, stride, 2 stride, ...; a shorter last block has fewer summaries or none.
    `summary` is from 1 to `stride`. Otherwise as `window_mask`.
    """
    check_fixed(stride=stride, summary=summary)
    i, j = _pairs(N, M, device)
    return _past(i, j, is_in_fixed_pattern(i, j, stride, summary), is_causal)


def _past(i: Tensor, j: Tensor, keep: Tensor, is_causal: bool) -> Tensor:
    check_flag("is_causal", is_causal)
    return keep & (j <= i) if is_causal else keep


def _pairs(N: int, M: int, device: Device) -> tuple[Tensor, Tensor]:
    check_count("N", N, 0)
    check_count("M", M, 0)
    return torch.arange(N, device=device)[:, None], torch.arange(M, device=device)  # (N, 1), (M,)


def _pattern(
    keep: Callable[..., Tensor],
    N: int,
    M: int,
    is_causal: bool,
    device: torch.device,
    **options: int,
) -> Mask:
    """Return the mask of a pattern, which is outside of inference mode, so that it can be kept."""
    with torch.inference_mode(False):
        i, j = torch.arange(N, device=device)[:, None], torch.arange(M, device=device)
        mask = Mask(_past(i, j, keep(i, j, **options), is_causal))
    mask.complete = N <= M  # each query attends its own key
    return mask


_kept_pattern = functools.lru_cache(maxsize=32)(_pattern)  # at most 64 KiB each


# --- attention under a mask ---------------------------------------------------------------------


def _is_short(q: Tensor, k: Tensor) -> bool:
    """Return whether a mask is cheaper than blocks."""
    return q.shape[-2] <= DENSE >= k.shape[-2] or not q.numel()


def _under_mask(
    pattern: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Mask,
    scale: float | None, **options: int,
) -> Tensor:  # fmt: skip
    """Attend by softmax attention under the mask of a pattern."""
    N, M = q.shape[-2], k.shape[-2]
    make = _kept_pattern if M <= DENSE >= N and has_concrete_values(q) else _pattern
    under = make(pattern, N, M, mask.is_causal, q.device, **options)
    if mask.given is not None and under.given is not None:
        under = Mask(within(under.given, mask.given))
    return sdpa(q, k, v, under, scale)


# --- attention by blocks ------------------------------------------------------------------------


def _by_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, C: int,
    keys: Callable[[Tensor], Tensor], attends: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """Attend from blocks of C queries to some keys for each block, in one fused call.

    `keys` maps (..., M, D) to the keys (..., R, L, D) of each of R blocks, with zeros for none.
    ``attends(i, j)`` returns which keys at j (R, 1, L) the queries at i (R, C, 1) attend.
    """
    N, M = q.shape[-2], k.shape[-2]
    rows = -(-N // C)
    i = torch.arange(rows * C, device=q.device).view(rows, C, 1)
    j = keys(torch.arange(1, M + 1, device=q.device)[:, None]).mT - 1  # -1 for no key
    keep = (j >= 0) & attends(i, j)
    if mask.given is not None:
        keep = within(keep, keys(_key_column(mask, k, M)).mT)
    blocks = extend(q, rows * C - N) if rows * C > N else q
    H = sdpa(blocks.unflatten(-2, (rows, C)), keys(k), keys(v), Mask(keep), scale)
    return H.flatten(-3, -2)[..., :N, :]


@mechanism(per_key=True)
def window_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, window: int,
    fused: Any = None,
) -> Tensor:  # fmt: skip
    """Softmax attention of query i to the keys ``|i − j| ≤ window``, in O(N window) time.

    Memory is O(N window), too. Queries are cut into blocks; each block attends the stretch of keys
    that its windows cover. All blocks are one fused call, under a banded mask. Up to 256 queries
    and keys it is softmax attention under `window_mask`, which is faster.

    Parameters
    ----------
    window : int
        Keys on each side, at least 0.
    fused : bool, optional
        True: run FlexAttention, or raise a ValueError where it cannot run, as for a mask of numbers
        or more than 256 features. False: the form above. Left out: FlexAttention on a GPU where it
        can run and where a trial agreed with the form above; it has first derivatives only.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> window_attention(q, k, v, window=2, is_causal=True).shape
    torch.Size([2, 4, 10, 8])
    """
    check_count("window", window, 0)
    if flex.runs("window", fused, q, k, v, mask):
        after = 0 if mask.is_causal else window
        return flex.attend(in_band, (window, after), q, k, v, mask.given, scale)
    if _is_short(q, k):
        return _under_mask(in_window, q, k, v, mask, scale, window=window)
    N = q.shape[-2]
    window = min(window, max(N, k.shape[-2]) - 1)
    C = min(max(window, BLOCK), N)  # queries in a block
    L = window + C + (0 if mask.is_causal else window)  # keys in its stretch

    def stretches(x: Tensor) -> Tensor:  # every C-th from -window: a view, overlaps stored once
        after = -(-N // C) * C - C + L - window - x.shape[-2]
        return extend(x, after, before=window).unfold(-2, L, C).mT

    c, place = torch.arange(C, device=q.device)[:, None], torch.arange(L, device=q.device) - window
    band = _past(c, place, in_window(c, place, window), mask.is_causal)  # the same for all blocks
    return _by_blocks(q, k, v, mask, scale, C, stretches, lambda i, j: band)


@mechanism(per_key=True)
def fixed_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, stride: int,
    summary: int = 1, fused: Any = None,
) -> Tensor:  # fmt: skip
    """Softmax attention under `fixed_mask`, in O(N (stride + summary M/stride)) time and memory.

    A block of queries attends the keys at its own positions, and the summaries of all other blocks.
    The summaries are the same keys for every block of queries. Otherwise it is like
    `window_attention`.

    Parameters
    ----------
    stride : int
        Length of a block, at least 1.
    summary : int
        Keys at the end of each block that every query attends, from 1 to `stride`.
    fused : bool, optional
        As in `window_attention`.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> fixed_attention(q, k, v, stride=4, summary=1).shape
    torch.Size([2, 4, 10, 8])
    """
    check_fixed(stride=stride, summary=summary)
    if flex.runs("fixed", fused, q, k, v, mask):
        return _fixed_by_flex(q, k, v, mask, scale, stride, summary)
    if _is_short(q, k):
        return _under_mask(
            is_in_fixed_pattern, q, k, v, mask, scale, stride=stride, summary=summary
        )
    N, M = q.shape[-2], k.shape[-2]
    stride = min(stride, max(N, M))
    summary = min(summary, stride)
    C = stride * -(-BLOCK // stride)  # queries in a block

    def own_and_summaries(x: Tensor) -> Tensor:
        x = extend(x, max(-(-N // C), -(-M // C)) * C - M)
        far = x.unflatten(-2, (-1, stride))[..., stride - summary :, :].flatten(-3, -2)
        own = x.unflatten(-2, (-1, C))[..., : -(-N // C), :, :]
        return torch.cat([own, far.unsqueeze(-3).expand(*own.shape[:-2], -1, -1)], -2)

    def attends(i: Tensor, j: Tensor) -> Tensor:
        own, far = is_in_fixed_pattern(i, j[..., :C], stride, summary), j[..., C:] // C != i // C
        return _past(i, j, torch.cat([own, far], -1), mask.is_causal)

    return _by_blocks(q, k, v, mask, scale, C, own_and_summaries, attends)


def _fixed_by_flex(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, stride: int, summary: int
) -> Tensor:
    """Attend the keys and, as further keys, copies of the summaries, which are few blocks."""
    M, stride = k.shape[-2], min(stride, max(q.shape[-2], k.shape[-2]))
    summary = min(summary, stride)

    def with_summaries(x: Tensor) -> Tensor:
        far = extend(x, -M % stride).unflatten(-2, (-1, stride))[..., stride - summary :, :]
        return torch.cat([x, far.flatten(-3, -2)], -2)

    numbers = stride, summary, M, 0 if mask.is_causal else flex.UNLIMITED
    keys = None if mask.given is None else with_summaries(mask.presence(k)[..., None]).mT
    K, V = with_summaries(k), with_summaries(v)
    return flex.attend(in_block_or_summaries, numbers, q, K, V, keys, scale)


@mechanism(per_key=True)
def strided_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, stride: int,
    fused: Any = None,
) -> Tensor:  # fmt: skip
    """Softmax attention under `strided_mask`, in O(N (3 stride + M/stride)) time and memory.

    In a table with `stride` columns, filled row by row, a query attends two groups of keys: its
    neighbours, in the rows before, of and after it, and its column. The cost is least near
    √(M/3). One softmax runs over both groups, and a key in both is left out of the second; on a
    CPU for so many heads at a time that their scores fit in its cache. These sums are in float32
    at least, under autocast too. Up to 256 queries and keys it is softmax attention under the
    mask, which is faster.

    Parameters
    ----------
    stride : int
        At least 1.
    fused : bool, optional
        As in `window_attention`.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> strided_attention(q, k, v, stride=3).shape
    torch.Size([2, 4, 10, 8])
    """
    check_stride(stride=stride)
    if flex.runs("strided", fused, q, k, v, mask):
        return _strided_by_flex(q, k, v, mask, scale, stride)
    if _is_short(q, k):
        return _under_mask(is_in_strided_pattern, q, k, v, mask, scale, stride=stride)
    N, M = q.shape[-2], k.shape[-2]
    stride = min(stride, max(N, M))
    rows = max(-(-N // stride), -(-M // stride))
    columns = functools.partial(torch.transpose, dim0=-3, dim1=-2)  # (..., stride, rows, ·), back

    def table(x: Tensor) -> Tensor:  # (..., rows, stride, ·)
        return extend(x, rows * stride - x.shape[-2]).unflatten(-2, (rows, stride))

    def near(x: Tensor) -> Tensor:  # (..., rows, W, ·), of the rows before, of and after each
        x = extend(x, int(not mask.is_causal), -3, before=1)
        return torch.cat([x.narrow(-3, r, rows) for r in range(3 - mask.is_causal)], -2)

    def pairs(x: Tensor, y: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        far = columns(product(columns(x), columns(y).mT))
        return torch.cat([product(x, near(y).mT), far], -1)  # (..., rows, stride, W + rows)

    W, has_own_key = stride * (3 - mask.is_causal), mask.given is None and N <= M
    i, j = (torch.arange(n, dtype=torch.int32, device=q.device) for n in (rows * stride, W))
    i = i.view(rows, stride, 1)
    band, column = i[:, :1] - stride + j, i[:, 0].mT + i[0]  # (rows, 1, W), (stride, rows)
    groups = (band, (i - band).abs() < stride), (column, column != i)
    keep = torch.cat([_past(i, j, x & (0 <= j) & (j < M), mask.is_causal) for j, x in groups], -1)

    def attend(Q: Tensor, K: Tensor, V: Tensor, m: Tensor | None = None) -> Tensor:
        S = pairs(Q, K, torch.matmul)
        own = keep if m is None else within(keep, pairs(torch.ones_like(m), m, torch.mul))
        A = S.masked_fill_(~own, -torch.inf).softmax(-1) if has_own_key else masked_softmax(S, own)
        A_near, A_far = A.split([W, rows], -1)
        return A_near @ near(V) + columns(columns(A_far) @ columns(V))

    with full_precision(q.device):
        parts = [table(x.to(accumulation_dtype(q))) for x in (scaled(q, scale), k, v)]
        if mask.given is not None:
            parts.append(table(_key_column(mask, parts[1], M).expand(*k.shape[:-1], 1)))
        H = by_heads(attend, q, W + rows, parts)
    return H.flatten(-3, -2)[..., :N, :].reshape(*q.shape[:-1], v.shape[-1]).to(q.dtype)


def _strided_by_flex(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, stride: int
) -> Tensor:
    """Attend the neighbours, and, with all tokens in the order of columns, the rest of the column.

    In the order of tokens each block of 128 keys has some of the column of a query. A column is a
    stretch of few blocks in the other order, which takes a copy of q, k, v and the result, less
    than the scores of the columns would be.
    """
    N, M = q.shape[-2], k.shape[-2]
    stride = min(stride, max(N, M))
    rows = max(-(-N // stride), -(-M // stride))
    near = (stride - 1, 0 if mask.is_causal else stride - 1)

    def by_columns(x: Tensor) -> Tensor:
        x = extend(x, rows * stride - x.shape[-2])
        return x.unflatten(-2, (rows, stride)).transpose(-3, -2).flatten(-3, -2)

    keys = None if mask.given is None else by_columns(mask.presence(k)[..., None]).mT
    column = rows, stride, M, 0 if mask.is_causal else flex.UNLIMITED
    Q, K, V = map(by_columns, (q, k, v))
    far, logs = flex.attend(in_same_column, column, Q, K, V, keys, scale, lse=True)
    far, logs = (
        x.unflatten(-2, (stride, rows)).transpose(-3, -2).flatten(-3, -2)[..., :N, :]
        for x in (far, logs.unsqueeze(-1))
    )
    neighbours = flex.attend(in_band, near, q, k, v, mask.given, scale, lse=True)
    return flex.merge(neighbours, (far, logs.squeeze(-1)))


def _key_column(mask: Mask, k: Tensor, M: int) -> Tensor:
    """Return what a mask adds to the scores of M keys, as a column (..., M, 1) like keys."""
    row = mask.per_key()
    assert row is not None
    if row.dtype == torch.bool:
        row = k.new_zeros(row.shape).masked_fill(~row, -torch.inf)
    return cast_mask(row, k.dtype).expand(*row.shape[:-1], M).mT


# --- the formulas, with the same arguments ------------------------------------------------------


@reference(window_attention, formulas.window)
def window_attention_reference(*_: Any, window: int) -> Options:
    """Check the pattern."""
    return {"window": check_count("window", window, 0)}


strided_attention_reference = reference(strided_attention, formulas.strided)(check_stride)
fixed_attention_reference = reference(fixed_attention, formulas.fixed)(check_fixed)
