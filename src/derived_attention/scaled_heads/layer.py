"""Layers with the parameters of `scaled_heads_attention` and of Attention-BN+SH (chapter 5)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from derived_attention.batch_norm.layer import NormalizedAttention
from derived_attention.common.checks import check_no_bias
from derived_attention.common.masks import Mask
from derived_attention.common.pooling import (
    ConvolutionPooling,
    Pooling,
    check_scale_list,
    head_groups,
    max_pooling,
    to_steps,
)
from derived_attention.layer import Group, MultiheadAttention, refuse
from derived_attention.scaled_heads.core import HOLDS_LATER, check_pooling


class ScaledHeadsAttention(MultiheadAttention):
    """Attention-SH in H heads, with the interface and the parameters of `MultiheadAttention`.

    It pools `key` and `value` before it projects them, once for each scale. The attention weights
    it returns are those of the steps: the weight of a pooled key is distributed over its steps as
    the pooling weighs them; with ``"max"`` there are none. If a scale is above 1 the forward pass
    takes neither `attn_mask` nor `is_causal`; padding goes into `key_padding_mask`.

    Parameters
    ----------
    scales : sequence of int
        s_h for each head.
    pooling : str or callable
        As in `scaled_heads_attention`, or ``"convolution"`` for the layer's `ConvolutionPooling`.
    class_token
        As in `scaled_heads_attention`.
    """

    shown = ("scales", "how", "class_token")  # a checkpoint compares this text

    def __init__(
        self,
        *args: Any,
        scales: Sequence[int],
        pooling: str | Pooling = "average",
        class_token: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        check_scale_list(scales, self.num_heads)
        if pooling == "convolution":
            like = self.out_proj.weight
            pooling = ConvolutionPooling(scales, device=like.device, dtype=like.dtype)
        check_pooling(pooling, class_token)
        self.scales, self.pooling = tuple(scales), pooling
        self.how = pooling if isinstance(pooling, str) else "of its own"
        self.class_token = class_token

    def check(self, query: Tensor, key: Tensor, value: Tensor, **masks: Any) -> None:
        """Refuse masks that cannot be pooled as well."""
        super().check(query, key, value, **masks)
        if max(self.scales) == 1:
            return
        refuse(masks, ("attn_mask", "is_causal"), f"{HOLDS_LATER}, with scales {self.scales}")
        if self.pooling in ("max", max_pooling):
            because = "with max pooling steps have no weights, as a maximum is no weighted sum"
            refuse(masks, ("need_weights",), because)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Iterator[Group]:
        """Pool keys and values for the heads of each scale."""
        if max(self.scales) > 1 and mask.given is not None:
            check_no_bias("key_padding_mask", mask.given)
        for s, heads in head_groups(self.scales).items():
            if s == 1:
                yield Group(heads, key, value, mask, self.attention)
                continue
            present = None if mask.keys is None else mask.keys.squeeze(-2)
            pool, kept = check_pooling(self.pooling, self.class_token)(key, s, present)
            attn_mask = None if kept is None else kept[..., None, None, :]
            spread = functools.partial(to_steps, pool, key)
            yield Group(heads, pool(key), pool(value), Mask(attn_mask), self.attention, spread)


class NormalizedScaledHeadsAttention(NormalizedAttention, ScaledHeadsAttention):
    """Attention-BN+SH in H heads: a `NormalizedAttention` that is a `ScaledHeadsAttention`.

    It has the arguments of both. Statistics are those of the pooled keys of each head.
    """
