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
under a mask for short sequences, and for long ones by blocks, without an (N, M) matrix. All three
can also run PyTorch's FlexAttention on a GPU: see `derived_attention.sparse.flex`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from derived_attention import formulas
from derived_attention.common.checks import check_count, check_flag, may_look_at
from derived_attention.common.convention import (
    depends_on_position,
    extend,
    full_precision,
    mechanism,
    reference,
    scaled,
)
from derived_attention.common.masks import Mask, flat_heads, narrowed, within
from derived_attention.softmax.core import sdpa
from derived_attention.sparse import flex

DENSE = 256  # keys up to which a mask is cheaper than blocks
BLOCK = 32  # fewest queries in a block of a window: smaller blocks are slower
SCORES = 2**19  # of some heads, in memory at a time on a CPU: they fit in its cache
Device = torch.device | str | None

# --- the patterns as matrices -------------------------------------------------------------------


def window_mask(
    N: int, M: int, window: int, *, is_causal: bool = False, device: Device = None
) -> Tensor:
    """Boolean (N, M) mask of a local window: query i attends the keys with ``|i − j| ≤ window``.

    With `is_causal` only keys j ≤ i. TypeError for numbers that are not whole, ValueError for
    N, M or `window` below 0.
    """
    check_count("window", window, 0)
    i, j = _pairs(N, M, device)
    return _past(i, j, flex.in_window(i, j, window), is_causal)


def strided_mask(
    N: int, M: int, stride: int, *, is_causal: bool = False, device: Device = None
) -> Tensor:
    """Boolean (N, M) mask: query i attends its neighbours, and every `stride`-th key from itself.

    ``|i − j| < stride``, or i − j a multiple of `stride`: Child et al.'s strided pattern, for
    data with a period, such as the rows of an image. With `is_causal` any key reaches any later
    query in two layers. With a `stride` of 1 every key is attended. Otherwise as `window_mask`.
    """
    check_count("stride", stride, 1)
    i, j = _pairs(N, M, device)
    return _past(i, j, flex.in_strided(i, j, stride), is_causal)


def fixed_mask(
    N: int, M: int, stride: int, summary: int = 1, *, is_causal: bool = False, device: Device = None
) -> Tensor:
    """Boolean (N, M) mask: query i attends its block, and the last `summary` keys of every block.

    Child et al.'s fixed pattern, for data without a period, such as text. Blocks of `stride`
    positions start at 0, stride, 2 stride, ...; a shorter last block has fewer summaries or none.
    `summary` is from 1 to `stride`. Otherwise as `window_mask`.
    """
    check_fixed(stride, summary)
    i, j = _pairs(N, M, device)
    return _past(i, j, flex.in_fixed(i, j, stride, summary), is_causal)


def _past(i: Tensor, j: Tensor, keep: Tensor, is_causal: bool) -> Tensor:
    check_flag("is_causal", is_causal)
    return keep & (j <= i) if is_causal else keep


def _pairs(N: int, M: int, device: Device) -> tuple[Tensor, Tensor]:
    check_count("N", N, 0)
    check_count("M", M, 0)
    return torch.arange(N, device=device)[:, None], torch.arange(M, device=device)  # (N, 1), (M,)


def _pattern(
    name: str, N: int, M: int, numbers: tuple[int, ...], is_causal: bool, device: torch.device
) -> Tensor:
    """Return the mask of a pattern, which is outside of inference mode, so that it can be kept."""
    with torch.inference_mode(False):
        i, j = torch.arange(N, device=device)[:, None], torch.arange(M, device=device)
        keep = flex.PATTERNS[name](i, j, *numbers)
        return keep & (j <= i) if is_causal else keep


_kept_pattern = functools.lru_cache(maxsize=32)(_pattern)  # at most 256 KiB each


def _under_mask(
    name: str, numbers: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, mask: Mask,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """Attend by softmax attention under the mask of a pattern."""
    N, M = q.shape[-2], k.shape[-2]
    pattern = _kept_pattern if M <= DENSE >= N and may_look_at(q) else _pattern
    keep = pattern(name, N, M, numbers, mask.is_causal, q.device)
    under = Mask(keep if mask.given is None else within(keep, mask.given))
    under.complete = mask.given is None and N <= M  # each query attends its own key
    return sdpa(q, k, v, under, scale)


def _is_short(q: Tensor, k: Tensor, mask: Mask) -> bool:
    """Return whether a mask is cheaper than blocks, or is there already."""
    return q.shape[-2] <= DENSE >= k.shape[-2] or mask.by_query or not q.numel()


# --- attention by blocks ------------------------------------------------------------------------


@mechanism(per_key=True)
@depends_on_position
def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    window: int,
    fused: Any = None,
) -> Tensor:
    """Softmax attention of query i to the keys ``|i − j| ≤ window``, in O(N window) time.

    Memory is O(N window), too. Queries are cut into blocks; each block attends the stretch of keys
    that its windows cover. All blocks are one fused call, under a banded mask. Up to `DENSE` tokens
    it is softmax attention under `window_mask`, which is faster.

    Parameters
    ----------
    window : int
        Keys on each side, at least 0.
    fused : bool, optional
        True: run FlexAttention, or raise a ValueError where it cannot run, as for a mask of numbers
        or more than 256 features. False: the form above. Left out: FlexAttention on a GPU where it
        can run, has been tried and agrees; it has one derivative.
    """
    check_count("window", window, 0)
    if flex.runs(fused, "window", q, k, v, mask, by_default=True):
        return flex.attend("window", (window,), q, k, v, mask, scale)
    if _is_short(q, k, mask):
        return _under_mask("window", (window,), q, k, v, mask, scale)
    N, M, is_causal = q.shape[-2], k.shape[-2], mask.is_causal
    window = min(window, max(N, M) - 1)
    C = min(max(window, BLOCK), N)  # queries in a block
    W = window + C + (0 if is_causal else window)  # keys in its stretch
    rows = -(-N // C)

    def stretches(x: Tensor) -> Tensor:  # (..., rows, W, D): every C-th from -window, 0 outside x
        after = (rows - 1) * C + W - window - x.shape[-2]
        return extend(x, after, before=window).unfold(-2, W, C).mT  # a view: overlaps stored once

    start = torch.arange(rows, device=q.device)[:, None, None] * C - window
    i, j = torch.arange(C, device=q.device)[:, None], start + torch.arange(W, device=q.device)
    band = flex.in_window(i, j[:1], window) & ((j[:1] <= i) | (not is_causal))  # (1, C, W)
    keep = band & (0 <= j) & (j < M)  # (rows, C, W)
    blocks = extend(q, rows * C - N) if rows * C > N else q
    blocks = blocks.unflatten(-2, (rows, C))  # (..., H, rows, C, D)
    column = None if mask.given is None else stretches(_key_column(mask, k, M)).mT
    near = Mask(within(keep, column))
    H = sdpa(blocks, stretches(k), stretches(v), near, scale)  # keys (..., H, rows, W, D)
    return H.flatten(-3, -2)[..., :N, :]


@mechanism(per_key=True)
@depends_on_position
def strided_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    stride: int,
    fused: Any = None,
) -> Tensor:
    """Softmax attention under `strided_mask`, in O(N (3 stride + M/stride)) time and memory.

    In a table with `stride` columns, filled row by row, a query attends two groups of keys: its
    neighbours, by blocks, and its column. A stride near √M is the cheapest. One softmax runs over
    both groups, and a key in both is left out of the second. These sums are in float32 at least,
    under autocast too. Up to `DENSE` tokens it is softmax attention under the mask, which is
    faster.

    Parameters
    ----------
    stride : int
        At least 1.
    fused : bool, optional
        True: run FlexAttention, or raise a ValueError where it cannot run, as for a mask of numbers
        or more than 256 features; it has one derivative. False, or left out: the form above.
        FlexAttention computes whole blocks of 128 queries and keys: N M scores for a stride up to
        128, and at a stride of √M ≥ 256 some 64 times as many as the form above.
    """
    check_count("stride", stride, 1)
    if fused is not None and flex.runs(fused, "strided", q, k, v, mask, by_default=False):
        return flex.attend("strided", (stride,), q, k, v, mask, scale)
    if _is_short(q, k, mask):
        return _under_mask("strided", (stride,), q, k, v, mask, scale)
    return _two_groups(q, k, v, mask, scale, stride, 0)


@mechanism(per_key=True)
@depends_on_position
def fixed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    stride: int,
    summary: int = 1,
    fused: Any = None,
) -> Tensor:
    """Softmax attention under `fixed_mask`, in O(N (stride + summary M/stride)) time and memory.

    A query attends two groups of keys: its own block, and the summaries of all blocks, which are
    the same keys for all queries. One softmax runs over both, and the summaries of a query's own
    block are left out of the second. Otherwise as `strided_attention`.

    Parameters
    ----------
    stride : int
        Length of a block, at least 1.
    summary : int
        Keys at the end of each block that every query attends, from 1 to `stride`.
    fused : bool, optional
        As in `strided_attention`.
    """
    check_fixed(stride, summary)
    if fused is not None and flex.runs(fused, "fixed", q, k, v, mask, by_default=False):
        return flex.attend("fixed", (stride, summary), q, k, v, mask, scale)
    if _is_short(q, k, mask):
        return _under_mask("fixed", (stride, summary), q, k, v, mask, scale)
    return _two_groups(q, k, v, mask, scale, stride, summary)


def _two_groups(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, stride: int, summary: int
) -> Tensor:
    """Attend near keys and far ones: the summaries of blocks, or a column if `summary` is 0.

    Queries and keys fill tables (rows, stride), row by row. A query's near keys are in its own row
    and, without summaries, in the rows before and after it.
    """
    N, M, heads = q.shape[-2], k.shape[-2], q.shape[:-2]
    stride = min(stride, max(N, M))
    summary = min(summary, stride)
    rows = max(-(-N // stride), -(-M // stride))
    with full_precision(q.device):
        Q = extend(scaled(q, scale), rows * stride - N)
        K, V = (extend(x.to(Q.dtype), rows * stride - M) for x in (k, v))
        added = extend(_key_column(mask, K, M), rows * stride - M, value=-torch.inf)
        added = added.expand(*heads, -1, 1)
        tables = [flat_heads(x.unflatten(-2, (rows, stride)), len(heads)) for x in (Q, K, V, added)]
        keep = _near_and_far(rows, stride, summary, mask.is_causal, q.device)
        lacking = mask.given is not None or N > M  # whether a query may lack keys
        step = len(tables[0])
        if q.device.type == "cpu":
            step = max(1, SCORES // keep.numel())
        parts = zip(*(x.split(step) for x in tables), strict=True)
        attend = functools.partial(_attend, keep=keep, summary=summary, lacking=lacking)
        H = torch.cat([attend(*part) for part in parts])
    return H.flatten(1, 2)[:, :N].reshape(*heads, N, v.shape[-1]).to(q.dtype)


def _near(x: Tensor, width: int, fill: float = 0.0) -> Tensor:
    """Return the near keys (b, rows, width · stride, ·) of each row of a table of keys."""
    if width == 1:
        return x
    rows = x.shape[1]
    x = extend(x, width - 2, 1, fill, before=1)
    return torch.cat([x[:, r : r + rows] for r in range(width)], 2)


def _attend(
    Q: Tensor, K: Tensor, V: Tensor, added: Tensor, *, keep: Tensor, summary: int, lacking: bool
) -> Tensor:
    """Attend from tables of queries (b, rows, stride, D) to near and far keys."""
    rows, stride = Q.shape[1:3]
    far = rows * (summary or 1)
    width = (keep.shape[-1] - far) // stride

    def across(x: Tensor) -> Tensor:  # the tables in the batches that meet one set of far keys
        return x.flatten(1, 2).unsqueeze(1) if summary else x.transpose(1, 2)

    def along(x: Tensor) -> Tensor:  # and back
        return x.squeeze(1).unflatten(1, (rows, stride)) if summary else x.transpose(1, 2)

    def keys(x: Tensor) -> Tensor:  # (b, 1 or stride, far, ·)
        return across(x[:, :, stride - summary :] if summary else x)

    near = Q @ _near(K, width).mT + _near(added, width, -torch.inf).mT
    S = torch.cat([near, along(across(Q) @ keys(K).mT + keys(added).mT)], -1)
    S = S.masked_fill(~keep, -torch.inf)  # (b, rows, stride, width · stride + far)
    if lacking:
        dead = S.amax(-1, keepdim=True) == -torch.inf
        A = S.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
    else:
        A = S.softmax(-1)
    A_near, A_far = A.split([width * stride, far], -1)
    return A_near @ _near(V, width) + along(across(A_far) @ keys(V))


def _near_and_far(
    rows: int, stride: int, summary: int, is_causal: bool, device: torch.device
) -> Tensor:
    """Return which near and which far keys (rows, stride, ·) a query attends, each key once."""
    place = torch.arange(rows * stride, device=device).view(rows, stride)
    i, row = place[..., None], torch.arange(rows, device=device)[:, None, None]
    if summary:
        near, far = place[:, None], place[:, stride - summary :].flatten()
        keep = [torch.ones_like(i + near, dtype=torch.bool), far // stride != row]
    else:
        width = 2 if is_causal else 3
        near = (row - 1) * stride + torch.arange(width * stride, device=device)
        far = place.mT[None]  # (1, stride, rows)
        keep = [flex.in_window(i, near, stride - 1), far != i]
    keep = [(x & (j <= i) if is_causal else x).expand(rows, stride, -1)
            for x, j in zip(keep, (near, far), strict=True)]  # fmt: skip
    return torch.cat(keep, -1)


def _key_column(mask: Mask, k: Tensor, M: int) -> Tensor:
    """Return what a mask adds to the scores of M keys, as a column (..., M, 1) like keys."""
    row = mask.per_key()
    if row is None:
        return k.new_zeros(M, 1)
    if row.dtype == torch.bool:
        row = k.new_zeros(row.shape).masked_fill(~row, -torch.inf)
    return narrowed(row, k.dtype).expand(*row.shape[:-1], M).mT


def check_fixed(stride: int, summary: int) -> None:
    """Check the sizes of the fixed pattern."""
    check_count("stride", stride, 1)
    check_count("summary", summary, 1)
    if summary > stride:
        raise ValueError(f"summary is {summary}; expected at most the stride, {stride}")


# --- the formulas, with the same arguments ------------------------------------------------------


@reference(window_attention, formulas.window)
def window_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, window: int
) -> dict[str, Any]:
    """Check the pattern."""
    return {"window": check_count("window", window, 0)}


@reference(strided_attention, formulas.strided)
def strided_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, stride: int
) -> dict[str, Any]:
    """Check the pattern."""
    return {"stride": check_count("stride", stride, 1)}


@reference(fixed_attention, formulas.fixed)
def fixed_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, stride: int,
    summary: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Check the pattern."""
    check_fixed(stride, summary)
    return {"stride": stride, "summary": summary}
