"""Layers with the parameters of Linformer, Performer, FMM and Luna (appendix D)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from derived_attention.common.checks import Mechanism, check_count, check_flag
from derived_attention.layer import QUERY, Heads, MultiheadAttention, pick
from derived_attention.linear.core import FeatureMap, elu_feature_map
from derived_attention.linear_time.core import (
    check_maps,
    fmm_attention,
    linformer_attention,
    luna_attention,
    orthogonal_features,
    performer_attention,
)


class LinformerAttention(MultiheadAttention):
    """Linformer in H heads, with the interface of `MultiheadAttention`.

    It adds the parameters ``key_projection`` and ``value_projection`` (kept, length), which all
    heads share. They weight a token by its position. The forward pass takes neither `attn_mask` nor
    `is_causal`; padding goes into `key_padding_mask`.

    Parameters
    ----------
    length : int
        The largest number of keys.
    kept : int
        Number of projected keys and values.
    shared : bool
        Whether ``key_projection`` projects values as well.
    """

    shown = ("length", "kept", "shared")

    def __init__(
        self,
        *args: Any,
        length: int,
        kept: int,
        shared: bool = False,
        attention: Mechanism = linformer_attention,
        **options: Any,
    ) -> None:
        shape = check_count("kept", kept, 1), check_count("length", length, 1)
        check_flag("shared", shared)
        super().__init__(*args, attention=attention, **options)
        self.kept, self.length, self.shared = kept, length, shared

        def draw() -> nn.Parameter:
            return nn.Parameter(nn.init.xavier_uniform_(self.out_proj.weight.new_empty(shape)))

        self.key_projection = draw()
        self.value_projection = None if shared else draw()

    def mechanism(self, base: Mechanism, heads: Heads) -> Mechanism:
        """Add the projections along the length, the same for all heads."""
        E, G = self.key_projection, self.value_projection
        return functools.partial(base, key_projection=E, value_projection=G)


class PerformerAttention(MultiheadAttention):
    """Performer in H heads, with the interface of `MultiheadAttention`.

    Its random features are the buffer ``projection`` (features, D), part of the state, drawn when
    the layer is made, from PyTorch's generator. All heads share them.

    Parameters
    ----------
    features : int, optional
        R; D log D, rounded, if left out.
    """

    shown = ("features",)
    projection: Tensor

    def __init__(
        self,
        *args: Any,
        features: int | None = None,
        attention: Mechanism = performer_attention,
        **options: Any,
    ) -> None:
        if features is not None:
            check_count("features", features, 1)
        super().__init__(*args, attention=attention, **options)
        D = self.head_dim
        self.features = max(1, round(D * math.log(D))) if features is None else features
        like = {"device": self.out_proj.weight.device, "dtype": self.out_proj.weight.dtype}
        self.register_buffer("projection", orthogonal_features(D, self.features, **like))

    def mechanism(self, base: Mechanism, heads: Heads) -> Mechanism:
        """Add the random features, the same for all heads."""
        return functools.partial(base, projection=self.projection)


class FMMAttention(MultiheadAttention):
    """FMMformer's attention in H heads, with the interface of `MultiheadAttention`.

    It adds the parameters ``near`` and ``far`` (H,), whose sigmoids are the weights of the two
    fields. They start at 0: weights of one half.

    Parameters
    ----------
    window, feature_maps
        As in `fmm_attention`; a module's parameters become the layer's.
    """

    shown = ("window", "feature_maps")

    def __init__(
        self,
        *args: Any,
        window: int,
        feature_maps: Sequence[FeatureMap] = (elu_feature_map,),
        attention: Mechanism = fmm_attention,
        **options: Any,
    ) -> None:
        check_count("window", window, 0)
        maps = check_maps(feature_maps)
        super().__init__(*args, attention=attention, **options)
        self.window, self.feature_maps = window, maps
        self.learned_maps = nn.ModuleList(m for m in self.feature_maps if isinstance(m, nn.Module))
        self.near, self.far = (
            nn.Parameter(self.out_proj.weight.new_zeros(self.num_heads)) for _ in range(2)
        )

    def mechanism(self, base: Mechanism, heads: Heads) -> Mechanism:
        """Add the weights of these heads, and the feature maps."""
        near, far = (pick(x.sigmoid(), heads, at=0) for x in (self.near, self.far))
        learned = iter(self.learned_maps)  # those of a replica differ from self.feature_maps
        maps = [next(learned) if isinstance(m, nn.Module) else m for m in self.feature_maps]
        return functools.partial(base, near=near, far=far, window=self.window, feature_maps=maps)


class LunaAttention(MultiheadAttention):
    """Luna in H heads, with the interface of `MultiheadAttention`.

    It adds the parameter ``packed`` (length, embed_dim), which starts as standard normal numbers
    and is projected like queries.

    Parameters
    ----------
    length : int
        l, the rows of P: the number of packed keys.
    """

    shown = ("length",)

    def __init__(
        self, *args: Any, length: int, attention: Mechanism = luna_attention, **options: Any
    ) -> None:
        check_count("length", length, 1)
        super().__init__(*args, attention=attention, **options)
        self.length = length
        weight = self.out_proj.weight
        self.packed = nn.Parameter(nn.init.normal_(weight.new_empty(length, self.embed_dim)))

    def mechanism(self, base: Mechanism, heads: Heads) -> Mechanism:
        """Add P, projected to the queries of these heads."""
        return functools.partial(base, packed=self.project(QUERY, self.packed, heads))
