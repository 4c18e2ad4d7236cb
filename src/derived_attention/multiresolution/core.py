"""Multiresolution heads: each sees the sequence at a scale of its own (chapter 7).

The equation of this module, for head h with the scales s of its queries and s' of its keys, is ::

    H_h = ↑_s softmax((↓_s Q)(↓_s' K)ᵀ / √D) (↓_s' V)

where ↓_s averages windows of s steps, and ↑_s repeats each result s times: eq. 16 of
[MrsFormer]. With s = 1 a head is Attention-SH; with s' = 1 only its output is coarse. Averages can
be replaced by the low-pass filter of a wavelet, and repetition by its dual: ↓↑ is the identity, so
↑↓ is a projection. Softmax can be replaced by any mechanism.

A causal head may use a pooled window only after it has ended. So window t ends at step t s, the
queries t s, ..., t s + s − 1 share its result, and the first window is one step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from derived_attention import formulas
from derived_attention.common.checks import (
    Mechanism,
    check_callable,
    check_flag,
    check_no_bias,
    check_query_mask,
)
from derived_attention.common.convention import (
    call,
    is_per_key,
    mechanism,
    parts_of,
    plain,
    reference,
)
from derived_attention.common.filters import BOXCAR, Filter, check_levels, is_boxcar, wavelet_filter
from derived_attention.common.masks import Mask
from derived_attention.common.pooling import (
    Pooling,
    check_scale_list,
    head_groups,
    keep_first,
    pooled_heads,
)
from derived_attention.layer import in_order
from derived_attention.softmax.core import softmax_attention, softmax_attention_reference


@mechanism(alone=False)
def multiresolution_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    scales: Any,
    key_scales: Any = None,
    filters: Any = "boxcar",
    class_token: bool = False,
    query_mask: Any = None,
    attention: Any = softmax_attention,
) -> Tensor:
    """MrsHA, eq. 16 of [MrsFormer]: heads of the same scales are one call of `attention`.

    It takes O(N M / (s s')) operations for a head with softmax. The last window of queries, and the
    last one of keys, may be shorter.

    Parameters
    ----------
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean:
        True where a key may be attended. Floating: 0, or -inf; -8192 and below count as -inf. A
        masked key is left out of its pooled key, and a pooled key with none left is masked. If all
        scales are 1, any mask is allowed.
    is_causal : bool
        Window t of a scale s holds the steps t s − s + 1, ..., t s, and the queries t s, ...,
        t s + s − 1 use it. So a coarse head lags by up to s − 1 steps, and uses no later step.
        If s ≠ s', a mask of (N / s) (M / s') entries is stored, and `attention` has to take masks
        that differ between queries. `is_causal` excludes wavelets, whose filters reach into the
        future, and a class token.
    scales, key_scales : sequence of int
        s and s' for each head, at least 1; s' = s if `key_scales` is left out. Powers of 2 with
        wavelets.
    filters : str or pywt.Wavelet
        ``"boxcar"``, averages and repetition, or a discrete wavelet of PyWavelets, as
        ``pywt.Wavelet("db2")``: see `wavelet_filter`.
    class_token : bool
        Whether the first query, key and value stay as they are, and the windows start after them.
    query_mask : Tensor, optional
        Boolean, broadcastable to ``(..., H, N)``: False where a query is padding, which then is
        left out of its pooled query.
    attention : callable
        `softmax_attention` or another mechanism with its calling convention, which attends windows.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> multiresolution_attention(q, k, v, scales=[1, 2, 2, 4]).shape
    torch.Size([2, 4, 10, 8])
    """
    pairs = check_scales(scales, key_scales, q, mask, class_token)
    laid = check_filters(filters, pairs, class_token, mask.is_causal)
    check_callable("attention", attention)
    if query_mask is not None:
        check_query_mask(query_mask, q)
        query_mask = query_mask.expand(q.shape[:-1])  # (..., H, N)
    outputs, groups, N = [], head_groups(pairs), q.shape[-2]
    for (s, t), heads in groups.items():
        at = slice(heads[0], heads[-1] + 1) if heads[-1] - heads[0] < len(heads) else heads
        q_h = q[..., at, :, :]
        k_h, v_h, attn_mask = pooled_heads(laid.down, k, v, mask, at, t)
        if s > 1:
            present = None if query_mask is None else query_mask[..., at, :]
            q_h = laid.down(q_h, s, present)[0](q_h)  # (..., H', N', D)
        if s != t and mask.is_causal:
            attn_mask = find_ended_windows(attention, q_h, k_h, s, t)
        mask_h = Mask(attn_mask, mask.is_causal and attn_mask is None)
        H = call(attention, q_h, k_h, v_h, mask_h, scale)
        outputs.append(H if s == 1 else laid.up(H, s, N))
    return in_order(outputs, [h for heads in groups.values() for h in heads])


# --- windows after a class token, or causal ------------------------------------------------------


def _laid(filters: Filter, class_token: bool, causal: bool) -> Filter:
    """Return a filter whose windows begin after a class token, or end as causality asks."""
    if causal:
        return Filter(functools.partial(_pool_before_groups, filters.down), filters.up)
    if not class_token:
        return filters
    down = functools.partial(keep_first, filters.down)

    def up(y: Tensor, scale: int, N: int) -> Tensor:
        return torch.cat([y[..., :1, :], filters.up(y[..., 1:, :], scale, max(N - 1, 0))], -2)

    return Filter(down, up)


def _pool_before_groups(down: Pooling, x: Tensor, scale: int, present: Tensor | None) -> Any:
    """Pool the first step alone, and then windows that end where a group of queries begins."""
    windows = -(-x.shape[-2] // scale)
    used = 1 + (windows - 1) * scale if windows else 0
    cut = present if present is None or present.shape[-1] == 1 else present[..., :used]
    pool, kept = keep_first(down, x[..., :used, :], scale, cut)
    return lambda y: pool(y[..., :used, :]), kept


def find_ended_windows(base: Mechanism, query: Tensor, key: Tensor, s: int, t: int) -> Tensor:
    """Return which windows of t keys have ended where a window of s queries begins, (N', M')."""
    if is_per_key(base):
        name = next(part.__name__ for part in parts_of(base) if getattr(part, "per_key", False))
        raise ValueError(
            f"key_scales differ from scales with is_causal=True, and the attention runs {name}; "
            "expected the same scales, or an attention whose masks may differ between queries"
        )
    i, j = (torch.arange(x.shape[-2], device=key.device) for x in (query, key))
    return j * t <= (i * s)[:, None]


# --- checks --------------------------------------------------------------------------------------


def check_scales(
    scales: Sequence[int],
    key_scales: Sequence[int] | None,
    q: Tensor,
    mask: Mask,
    class_token: bool,
) -> list[tuple[int, int]]:
    """Check the scales, and that the mask can be pooled; return (s, s') of each head."""
    if q.dim() < 3:
        raise ValueError(f"q has shape {tuple(q.shape)}; expected (..., H, N, D), with its heads")
    pairs = check_pairs(scales, key_scales, q.shape[-3])
    check_flag("class_token", class_token)
    if pools(pairs):
        if mask.given is not None:
            mask.per_key()
            check_no_bias("attn_mask", mask.given)
        check_ends(class_token, mask.is_causal)
    return pairs


def pools(pairs: Sequence[tuple[int, int]]) -> bool:
    """Return whether any head has windows of more than one step."""
    return max(map(max, pairs)) > 1


def check_pairs(
    scales: Sequence[int], key_scales: Sequence[int] | None, heads: int
) -> list[tuple[int, int]]:
    """Check for two whole numbers, at least 1, per head."""
    check_scale_list(scales, heads)
    if key_scales is not None:
        check_scale_list(key_scales, heads, "key_scales")
    return list(zip(scales, scales if key_scales is None else key_scales, strict=True))


def check_ends(class_token: bool, is_causal: bool) -> None:
    """Refuse a class token in causal attention."""
    if class_token and is_causal:
        raise ValueError(
            "is_causal is True with class_token=True; expected one of them: a class token comes "
            "first, and would attend only itself"
        )


def check_filters(
    filters: Any, pairs: Sequence[tuple[int, int]], class_token: bool, is_causal: bool
) -> Filter:
    """Return the filter of a name or a wavelet, with its windows laid on the sequence."""
    if is_boxcar(filters):
        return _laid(BOXCAR, class_token, is_causal)
    wavelet = wavelet_filter(filters)
    for s in {s for pair in pairs for s in pair}:
        check_levels(s)
    if is_causal:
        raise ValueError(
            'is_causal is True with a wavelet; expected filters="boxcar": a wavelet reaches beyond '
            "its window, into the future"
        )
    return _laid(wavelet, class_token, False)


# --- the formulas, with the same arguments ---


@reference(multiresolution_attention, formulas.mrs, alone=False)
def multiresolution_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, scales: Any, key_scales:
    Any = None, filters: Any = "boxcar", class_token: Any = False, query_mask: Any = None,
    attention: Any = softmax_attention_reference,
) -> dict[str, Any]:  # fmt: skip
    """Check the scales, and return them in pairs."""
    check_query_mask(query_mask, q)
    if not is_boxcar(filters):
        kind = type(filters).__name__
        raise ValueError(f'filters is of type {kind}; expected "boxcar": wavelets have no formula')
    pairs = check_scales(scales, key_scales, q, mask, class_token)
    arguments = {"scales": pairs, "class_token": class_token, "query_mask": query_mask}
    return arguments | {"attention": plain(attention)}
