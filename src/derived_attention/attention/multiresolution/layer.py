"""Layers: what is learned of the mechanisms in `multiresolution.fast`."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from derived_attention.attention.engine.filters import is_boxcar
from derived_attention.attention.engine.pooling import pool_pairs
from derived_attention.attention.frame.checks import check_flag, check_no_bias
from derived_attention.attention.frame.layer import Group, MultiheadAttention, refuse
from derived_attention.attention.frame.masks import Mask
from derived_attention.attention.multiresolution.fast import (
    _ended_keys,
    _pools,
    _spread,
    _up,
    check_ends,
    check_filters,
    check_pairs,
)
from derived_attention.attention.scaled.fast import head_groups


class MultiresolutionAttention(MultiheadAttention):
    """MrsHA in H heads, with the interface and the parameters of `MultiheadAttention`.

    It pools `query`, `key` and `value` before it projects them (remark 4), once for each scale, and
    joins the heads before it repeats their results. Padded keys and queries are left out of the
    windows. The attention weights it returns are those of the steps. Where a scale is above 1 the
    forward pass takes no `attn_mask`; padding goes into `key_padding_mask`. With ``cross=True`` the
    scales of queries are 1, and those of keys anything.

    Parameters
    ----------
    scales, key_scales : sequence of int
        s and s' for each head, as in `multiresolution_attention`.
    filters, class_token
        As in `multiresolution_attention`.
    """

    shown = ("scales", "key_scales", "filter", "class_token")
    refused = ()
    because = "a window has several queries and keys; key_padding_mask says which are not there"

    def __init__(
        self,
        *args: Any,
        scales: Sequence[int],
        key_scales: Sequence[int] | None = None,
        filters: Any = "boxcar",
        class_token: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.pairs = check_pairs(scales, key_scales, self.num_heads)
        self.scales = tuple(s for s, _ in self.pairs)
        self.key_scales = tuple(t for _, t in self.pairs)
        check_flag("class_token", class_token)
        check_filters(filters, self.pairs, class_token, False)
        if max(self.scales) > 1:
            self.mix_queries()
        self.any_mask = self.any_mask and max(self.key_scales) == 1
        self.filters, self.class_token = filters, class_token
        self.filter = filters if is_boxcar(filters) else getattr(filters, "name", "of its own")

    def check(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> None:
        """Check, too, for masks that cannot be pooled."""
        super().check(query, key, value, **given)
        if _pools(self.pairs):
            refuse(given, ("attn_mask",), self.because)
            check_ends(self.class_token, given["is_causal"])
            check_filters(self.filters, self.pairs, self.class_token, given["is_causal"])

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Iterator[Group]:
        """Pool queries, keys and values for the heads of each pair of scales."""
        if _pools(self.pairs) and mask.given is not None:
            check_no_bias("key_padding_mask", mask.given)
        lay = check_filters(self.filters, self.pairs, self.class_token, mask.causal)
        known = (None, None) if mask.causal else (mask.keys, mask.queries)  # padding comes last
        there, queries = (None if x is None else x.squeeze(-2) for x in known)
        for (s, t), heads in head_groups(self.pairs).items():
            if s == t == 1:
                yield Group(heads, key, value, mask, self.attention, query=query)
                continue
            keys, values, here, pool = pool_pairs(lay.down, key, value, t, there)
            pooled, up, asked = query, None, queries
            if s > 1:
                down, asked = lay.down(query, s, queries)
                pooled = down(query)  # (B, N', embed_dim)
                up = functools.partial(_up, lay, s, query.shape[-2])
            spread = functools.partial(_spread, pool, key, up)
            base, given = self.attention, None if here is None else here[..., None, None, :]
            if mask.causal and s != t:
                length = pooled.shape[-2], keys.shape[-2]
                base, given = _ended_keys(base, *length, s, t, keys.device)
            seen = Mask(given, mask.causal and given is None)
            seen.keys, seen.queries = (
                None if x is None else x.unsqueeze(-2) for x in (here, asked)
            )
            yield Group(heads, keys, values, seen, base, spread, pooled, up)


class _Made(type):
    """What `multiresolution_layer` makes: no module has its name, so a pickle has its base."""


def _recipe(kind: _Made) -> Any:
    made = "made_of" in vars(kind)  # a subclass of what was made has a name
    return (multiresolution_layer, (vars(kind)["made_of"],)) if made else kind.__qualname__


@functools.cache
def multiresolution_layer(layer: type[MultiheadAttention]) -> type[MultiheadAttention]:
    """Make "Mrs" + a layer, whose heads attend at scales: MrsPerformer of `PerformerAttention`.

    Parameters
    ----------
    layer : type
        A kind of `MultiheadAttention` that mixes nothing along the length, in `mix` or elsewhere.

    Returns
    -------
    type
        A layer with the arguments of both.
    """
    if not (isinstance(layer, type) and issubclass(layer, MultiheadAttention)):
        raise TypeError(f"layer is {layer!r}; expected a class of MultiheadAttention")
    if layer.mixes or layer.mix is not MultiheadAttention.mix:
        raise ValueError(f"layer is {layer.__name__}, which mixes along the length itself")
    if layer is MultiheadAttention:
        return MultiresolutionAttention
    text = f"`{layer.__name__}` at several scales: with `MultiresolutionAttention`'s arguments."
    parents = (MultiresolutionAttention, layer)
    own = {"__doc__": text, "__module__": __name__, "made_of": layer}
    made: Any = _Made(f"Mrs{layer.__name__}", parents, own)
    return made


copyreg.pickle(_Made, _recipe)  # type: ignore[arg-type]
