"""Attention-SH and BN+SH: heads that regress on pooled keys and values (chapter 5).

The equation of this module, for head h with the scale s_h and N_h = ⌈M / s_h⌉, is ::

    K_h, V_h = pool(K, s_h), pool(V, s_h)     (N_h, D), (N_h, Dv)
    H_h = softmax(Q_h K_hᵀ / √D) V_h          (N, Dv)

with all queries, and fewer keys and values: eq. 25. In Attention-BN+SH the softmax attention of a
head is Attention-BN with the mean and the variances of its pooled keys: eqs. 49 to 51. A pooling
turns each window of s_h steps into one, by their average, their maximum, or a convolution with
stride s_h; or it clusters the steps by k-means.

The functions pool keys and values. The layers pool X before they project it (remark 5): the same
for averages, which commute with an affine projection, and less work.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from derived_attention.attention.engine.pooling import (
    POOLINGS,
    Pool,
    Pooling,
    keep_first,
    kmeans_pooling,
    pool_pairs,
    windows,
)
from derived_attention.attention.frame.checks import (
    Mechanism,
    check_callable,
    check_count,
    check_flag,
    check_no_bias,
)
from derived_attention.attention.frame.convention import mechanism
from derived_attention.attention.frame.layer import in_order, pick
from derived_attention.attention.frame.masks import Mask
from derived_attention.attention.normalized.fast import check_normalization, normalized_attention
from derived_attention.attention.softmax.fast import softmax_attention

Scale = TypeVar("Scale", int, tuple[int, int])

# --- the formula: head by head, window by window -------------------------------------------------


# --- the same, one call for all heads of a scale -------------------------------------------------


@mechanism
def scaled_heads_attention(
    q, k, v, mask, scale, *, scales, pooling="average", class_token=False,
    attention=softmax_attention, positional=False
) -> Tensor:  # fmt: skip
    """Attention-SH, eq. 25 of [Nguyen2023]: the heads of one scale are one call of `attention`.

    Parameters
    ----------
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean:
        True where a key may be attended. Floating: 0 or -inf, as which -8192 and below count. A
        key that may not be attended is left out of its pooled key, and a pooled key with none left
        is masked. Any mask where all scales are 1.
    is_causal : bool
        True only where all scales are 1: a pooled key holds the future of all its steps but one.
    scales : sequence of int
        s_h for each head, at least 1. Keys and values of head h become ⌈M / s_h⌉.
    pooling : str or callable
        ``"average"``, ``"max"``, ``"k-means"``, or a function such as `average_pooling`, or a
        `ConvolutionPooling`. Values follow the keys: with k-means, in the clusters of the keys.
    class_token : bool
        Whether the first key and value stay as they are, and the windows start after them.
    attention : callable
        `softmax_attention` or another mechanism with its calling convention.
    positional : bool
        Whether `attention` depends on the positions of queries and keys, as sparse patterns do. It
        then runs on the pooled sequence, where query i stands at ⌊i / s_h⌋. Needs N = M and
        windows of steps: no `class_token`, no k-means.
    """
    own = dict(pooling=pooling, class_token=class_token, attention=attention, positional=positional)
    return _by_scale(q, k, v, mask, scale, lambda base, heads: base, scales=scales, **own)


@mechanism
def normalized_scaled_heads_attention(
    q, k, v, mask, scale, *, scales, beta=1.0, eps=None, center_keys=None, **pooled
) -> Tensor:
    """Attention-BN+SH, eqs. 49 and 51 of [Nguyen2023]: Attention-BN on pooled keys and values.

    Parameters
    ----------
    scales, pooled
        As in `scaled_heads_attention`: `pooling`, `class_token`, `attention`, `positional`.
    beta, eps, center_keys
        As in `normalized_attention`; the statistics are those of the pooled keys of each head.
    """
    check_normalization(beta, eps, q)

    def bind(base: Mechanism, heads: list[int]) -> Mechanism:
        own = {"beta": of_heads(beta, heads), "eps": eps, "center_keys": center_keys}
        return functools.partial(normalized_attention, attention=base, **own)

    return _by_scale(q, k, v, mask, scale, bind, scales=scales, **pooled)


def _by_scale(
    q, k, v, mask, scale, bind, *, scales, pooling="average", class_token=False,
    attention=softmax_attention, positional=False
) -> Tensor:  # fmt: skip
    """Check, and give the heads of each scale to their mechanism, with pooled keys and values."""
    check_scales(scales, q, mask)
    pool_by = check_pooling(pooling, class_token)
    check_positions(attention, positional, q, k, pooling, class_token)
    outputs, groups = [], head_groups(scales)
    for s, heads in groups.items():
        run = bind(_aligned(attention, s, positional), heads)
        k_s, v_s, given = pick(k, heads), pick(v, heads), mask.given
        if given is not None and given.dim() > 2 and given.shape[-3] > 1:
            given = pick(given, heads)
        if s > 1:
            there = Mask(given).present(k.shape[-2])
            k_s, v_s, present, _ = pool_pairs(pool_by, k_s, v_s, s, there)
            given = None if present is None else present.unsqueeze(-2)
        own = {"attn_mask": given, "is_causal": mask.is_causal, "scale": scale}
        outputs.append(run(pick(q, heads), k_s, v_s, **own))
    return in_order(outputs, [h for heads in groups.values() for h in heads])


def head_groups(scales: Sequence[Scale]) -> dict[Scale, list[int]]:
    """Return the heads of each scale, or pair of them: ``[1, 1, 2]`` to ``{1: [0, 1], 2: [2]}``."""
    groups: dict[Scale, list[int]] = {}
    for h, s in enumerate(scales):
        groups.setdefault(s, []).append(h)
    return groups


def of_heads(beta: float | Tensor, heads: list[int]) -> float | Tensor:
    """Return the β of some heads."""
    return beta[heads] if isinstance(beta, Tensor) and beta.numel() > 1 else beta


def _aligned(base: Mechanism, s: int, positional: bool) -> Mechanism:
    return functools.partial(_attend_aligned, base, s) if positional and s > 1 else base


def _attend_aligned(
    base: Mechanism, s: int, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Any, **options: Any
) -> Tensor:
    """Attend with query i at position ⌊i / s⌋ among the pooled keys.

    The queries are dealt out to s sequences, the t-th of which has step t of every window. Each is
    as long as the pooled keys, and in it query and key of a window stand at the same place.
    """
    N = q.shape[-2]
    s = min(s, N or s)
    q = windows(q, s).transpose(-3, -2)  # (..., H, s, N_h, D)
    k, v = (x.unsqueeze(-3).expand(*x.shape[:-2], s, -1, -1) for x in (k, v))
    mask = None if attn_mask is None else attn_mask.unsqueeze(-3)
    H = base(q, k, v, attn_mask=mask, **options)  # (..., H, s, N_h, Dv)
    return H.transpose(-3, -2).flatten(-3, -2)[..., :N, :]


# --- checks --------------------------------------------------------------------------------------

HOLDS_LATER = "a pooled key holds later steps, and is the same for every query"


def check_scales(scales: Sequence[int], q: Tensor, mask: Mask) -> None:
    """Check `scales` against the heads of `q`, and that the masks can be pooled by them."""
    if q.dim() < 3:
        raise ValueError(f"q has shape {tuple(q.shape)}; expected (..., H, N, D), with its heads")
    check_scale_list(scales, q.shape[-3])
    if max(scales) > 1:
        if mask.is_causal:
            raise ValueError(
                f"is_causal is True with scales {list(scales)}; expected False, or scales of 1: "
                f"{HOLDS_LATER}"
            )
        mask.per_key()
        if mask.given is not None:
            check_no_bias("attn_mask", mask.given)


def check_scale_list(scales: Sequence[int], heads: int, name: str = "scales") -> None:
    """Check for one whole number, at least 1, per head."""
    if isinstance(scales, str) or not isinstance(scales, Sequence):
        raise TypeError(f"{name} is {scales!r}; expected a sequence of whole numbers")
    if len(scales) != heads or heads == 0:
        raise ValueError(
            f"{name} is {list(scales)}; expected one number per head, of which there are {heads}"
        )
    for h, s in enumerate(scales):
        check_count(f"{name}[{h}]", s, 1)


def check_pooling(pooling: str | Pooling, class_token: bool) -> Pooling:
    """Return the function of a name in `POOLINGS`, made to leave a class token alone."""
    if isinstance(pooling, str) and pooling not in POOLINGS:
        raise ValueError(f"pooling is {pooling!r}; expected one of {list(POOLINGS)}, or a function")
    function = POOLINGS[pooling] if isinstance(pooling, str) else pooling
    check_callable("pooling", function, "a name or a function")
    check_flag("class_token", class_token)
    return functools.partial(keep_first, function) if class_token else function


def check_positions(
    attention: Mechanism, positional: bool, q: Tensor, k: Tensor, pooling: Any, class_token: bool
) -> None:
    """Check `attention`, and that pooled keys have positions where it needs them."""
    check_callable("attention", attention)
    check_flag("positional", positional)
    if positional and (class_token or pooling in ("k-means", kmeans_pooling)):
        what = "class_token=True" if class_token else "k-means"
        raise ValueError(
            f"positional is True with {what}; expected False: not all keys are windows"
        )
    if positional and q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"k has shape {tuple(k.shape)}; expected as many keys as queries where positional is "
            f"True: {q.shape[-2]}"
        )


# --- layers --------------------------------------------------------------------------------------


def deal_out(pool: Pool, key: Tensor, A: Tensor) -> Tensor:
    """Deal weights (B, H', N, N_h) of pooled keys out to their steps: (B, H', N, M)."""
    identity = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device)
    return A @ pool(identity.expand(*key.shape[:-1], -1)).unsqueeze(-3)
