"""Attention-SH and BN+SH: heads that regress on pooled keys and values (chapter 5).

The equation of this module, for head h with the scale s_h and N_h = ⌈M / s_h⌉, is ::

    K_h, V_h = pool(K, s_h), pool(V, s_h)     (N_h, D), (N_h, Dv)
    H_h = softmax(Q_h K_hᵀ / √D) V_h          (N, Dv)

with all queries, and fewer keys and values: eq. 25 of [Nguyen2023]. In Attention-BN+SH the softmax
attention of a head is Attention-BN with the mean and the variances of its pooled keys: eqs. 49 to
51. A pooling turns each window of s_h steps into one, by their average, their maximum, or a
convolution with stride s_h; or it clusters the steps by k-means.

The functions pool keys and values. The layers pool X before they project it (remark 5
there): the same for averages, which commute with an affine projection, and less work.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from derived_attention import formulas
from derived_attention.batch_norm.core import check_normalization, normalized_attention
from derived_attention.common.checks import check_callable, check_flag, check_no_bias
from derived_attention.common.convention import call, mechanism, plain, reference
from derived_attention.common.masks import Mask
from derived_attention.common.pooling import (
    POOLINGS,
    Pooling,
    average_pooling,
    check_scale_list,
    head_groups,
    keep_first,
    pooled_heads,
)
from derived_attention.layer import in_order
from derived_attention.softmax.core import softmax_attention, softmax_attention_reference

HOLDS_LATER = "a pooled key holds later steps, and is the same for every query"


@mechanism
def scaled_heads_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    scales: Any,
    pooling: Any = "average",
    class_token: bool = False,
    attention: Any = softmax_attention,
) -> Tensor:
    """Attention-SH, eq. 25 of [Nguyen2023]: the heads of one scale are one call of `attention`.

    Parameters
    ----------
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean:
        True where a key may be attended. Floating: 0, or -inf; -8192 and below count as -inf. A
        masked key is left out of its pooled key, and a pooled key with none left is masked. If all
        scales are 1, any mask is allowed.
    is_causal : bool
        True only if all scales are 1: a pooled key depends on later steps, and is the same for
        every query.
    scales : sequence of int
        s_h for each head, at least 1. Keys and values of head h become ⌈M / s_h⌉.
    pooling : str or callable
        ``"average"``, ``"max"``, ``"k-means"``, or a function such as `average_pooling`, or a
        `ConvolutionPooling`. Values follow the keys: with k-means, in the clusters of the keys.
    class_token : bool
        Whether the first key and value stay as they are, and the windows start after them.
    attention : callable
        `softmax_attention` or another mechanism with its calling convention.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> scaled_heads_attention(q, k, v, scales=[1, 2, 2, 4]).shape
    torch.Size([2, 4, 10, 8])
    """
    return _by_scale(q, k, v, mask, scale, scales, pooling, class_token, attention)


@mechanism
def normalized_scaled_heads_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    scales: Any,
    beta: float = 1.0,
    eps: Any = None,
    center_keys: Any = None,
    pooling: Any = "average",
    class_token: bool = False,
    attention: Any = softmax_attention,
) -> Tensor:
    """Attention-BN+SH, eqs. 49 and 51 of [Nguyen2023]: Attention-BN on pooled keys and values.

    Parameters
    ----------
    attn_mask : Tensor, optional
        As in `scaled_heads_attention`.
    is_causal : bool
        As in `scaled_heads_attention`: True only if all scales are 1.
    scales, pooling, class_token, attention
        As in `scaled_heads_attention`.
    beta, eps, center_keys
        As in `normalized_attention`; the statistics are those of the pooled keys of each head.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> normalized_scaled_heads_attention(q, k, v, scales=[1, 2, 2, 4]).shape
    torch.Size([2, 4, 10, 8])
    """
    check_normalization(beta, eps, q)
    options = {"beta": beta, "eps": eps, "center_keys": center_keys}
    return _by_scale(q, k, v, mask, scale, scales, pooling, class_token, attention, options)


def _by_scale(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    scales: Any,
    pooling: Any,
    class_token: bool,
    attention: Any,
    statistics: dict[str, Any] | None = None,
) -> Tensor:
    """Run the heads of each scale on pooled keys and values, with the `statistics` of BN or not."""
    check_scales(scales, q, mask)
    pool_by: Pooling = average_pooling
    if pooling != "average" or class_token is not False:
        pool_by = check_pooling(pooling, class_token)
    if attention is not softmax_attention:
        check_callable("attention", attention)
    outputs, groups = [], head_groups(scales)
    for s, heads in groups.items():
        at = slice(heads[0], heads[-1] + 1) if heads[-1] - heads[0] < len(heads) else heads
        q_h, (k_h, v_h, attn_mask) = q[..., at, :, :], pooled_heads(pool_by, k, v, mask, at, s)
        mask_h = mask if attn_mask is mask.given else Mask(attn_mask, mask.is_causal)
        if statistics is None:
            outputs.append(call(attention, q_h, k_h, v_h, mask_h, scale))
        else:
            own = statistics | {"attention": attention}
            if isinstance(own["beta"], Tensor):
                own["beta"] = of_heads(own["beta"], heads)
            outputs.append(call(normalized_attention, q_h, k_h, v_h, mask_h, scale, **own))
    return in_order(outputs, [h for heads in groups.values() for h in heads])


def of_heads(beta: float | Tensor, heads: list[int]) -> float | Tensor:
    """Return the β of these heads."""
    return beta[heads] if isinstance(beta, Tensor) and beta.numel() > 1 else beta


# --- checks --------------------------------------------------------------------------------------


def check_scales(scales: Sequence[int], q: Tensor, mask: Mask) -> None:
    """Check `scales` against the heads of `q`, and that the mask can be pooled."""
    if q.dim() < 3:
        raise ValueError(f"q has shape {tuple(q.shape)}; expected (..., H, N, D), with its heads")
    check_scale_list(scales, q.shape[-3])
    if max(scales) > 1:
        if mask.is_causal:
            raise ValueError(
                f"is_causal is True with scales {list(scales)}; expected False, or scales of 1: "
                f"{HOLDS_LATER}"
            )
        if mask.given is not None:
            mask.per_key()
            check_no_bias("attn_mask", mask.given)


def check_pooling(pooling: str | Pooling, class_token: bool) -> Pooling:
    """Return a pooling, by its name in `POOLINGS` or as given, that keeps a class token."""
    if isinstance(pooling, str) and pooling not in POOLINGS:
        raise ValueError(f"pooling is {pooling!r}; expected one of {list(POOLINGS)}, or a function")
    function = POOLINGS[pooling] if isinstance(pooling, str) else pooling
    if not callable(function):
        check_callable("pooling", function, "a name or a function")
    check_flag("class_token", class_token)
    return functools.partial(keep_first, function) if class_token else function


# --- the formulas, with the same arguments ---


@reference(scaled_heads_attention, formulas.sh)
def scaled_heads_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    scales: Any,
    class_token: Any = False,
    attention: Any = softmax_attention_reference,
) -> dict[str, Any]:
    """Check the scales."""
    check_scales(scales, q, mask)
    check_flag("class_token", class_token)
    return {"scales": scales, "class_token": class_token, "attention": plain(attention)}


@reference(normalized_scaled_heads_attention, formulas.bn_sh)
def normalized_scaled_heads_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, scales: Any, class_token:
    Any = False, beta: Any = 1.0, eps: Any = None, attention: Any = softmax_attention_reference,
) -> dict[str, Any]:  # fmt: skip
    """Check the scales, ε, and the β of each head."""
    check_scales(scales, q, mask)
    check_flag("class_token", class_token)
    _, eps = check_normalization(beta, eps, q)
    each = [check_normalization(of_heads(beta, [h]), eps, q[..., 0, :, :])[0]
            for h in range(q.shape[-3])]  # fmt: skip
    pooled = {"scales": scales, "class_token": class_token, "attention": plain(attention)}
    return pooled | {"beta": each, "eps": eps}
