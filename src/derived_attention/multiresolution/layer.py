"""The layer of `multiresolution_attention`, alone or around another layer (chapter 7)."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from derived_attention.common.checks import check_flag, check_no_bias
from derived_attention.common.filters import Filter, is_boxcar
from derived_attention.common.masks import Mask
from derived_attention.common.pooling import Pool, head_groups, to_steps
from derived_attention.layer import Group, MultiheadAttention, refuse
from derived_attention.multiresolution.core import (
    check_ends,
    check_filters,
    check_pairs,
    find_ended_windows,
    pools,
)


class MultiresolutionAttention(MultiheadAttention):
    """MrsHA in H heads, with the interface and the parameters of `MultiheadAttention`.

    It pools `query`, `key` and `value` before it projects them (remark 4 of [MrsFormer]), once for
    each scale. It repeats the results of heads before it joins them; if all heads have one scale,
    it repeats the joined result. Padded
    keys and queries are left out of the windows. The attention weights it returns are those of the
    steps. If a scale is above 1 the forward pass takes no `attn_mask`; padding goes into
    `key_padding_mask`. With ``cross=True`` the scales of queries have to be 1.

    Parameters
    ----------
    scales, key_scales : sequence of int
        s and s' for each head, as in `multiresolution_attention`.
    filters, class_token
        As in `multiresolution_attention`.
    """

    shown = ("scales", "key_scales", "filter", "class_token")
    refused = ()
    because = "a window has several queries and keys; padding goes into key_padding_mask"

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

    def check(self, query: Tensor, key: Tensor, value: Tensor, **masks: Any) -> None:
        """Refuse masks that cannot be pooled as well."""
        super().check(query, key, value, **masks)
        if pools(self.pairs):
            refuse(masks, ("attn_mask",), self.because)
            check_ends(self.class_token, masks["is_causal"])
            check_filters(self.filters, self.pairs, self.class_token, masks["is_causal"])

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Iterator[Group]:
        """Pool queries, keys and values for the heads of each pair of scales."""
        if pools(self.pairs) and mask.given is not None:
            check_no_bias("key_padding_mask", mask.given)
        laid = check_filters(self.filters, self.pairs, self.class_token, mask.causal)
        padding = (None, None) if mask.causal else (mask.keys, mask.queries)  # causal: at the end
        present, present_queries = (None if x is None else x.squeeze(-2) for x in padding)
        for (s, t), heads in head_groups(self.pairs).items():
            if s == t == 1:
                yield Group(heads, key, value, mask, self.attention, query=query)
                continue
            pool, kept = laid.down(key, t, present)
            keys, values = pool(key), pool(value)
            queries, up, kept_queries = query, None, present_queries
            if s > 1:
                down, kept_queries = laid.down(query, s, present_queries)
                queries = down(query)  # (B, N', embed_dim)
                up = functools.partial(_up, laid, s, query.shape[-2])
            attn_mask = None if kept is None else kept[..., None, None, :]
            if mask.causal and s != t:
                attn_mask = find_ended_windows(self.attention, queries, keys, s, t)
            seen = Mask(attn_mask, mask.causal and attn_mask is None)
            seen.keys, seen.queries = (
                None if x is None else x.unsqueeze(-2) for x in (kept, kept_queries)
            )
            spread = functools.partial(_to_steps, pool, key, up)
            yield Group(heads, keys, values, seen, self.attention, spread, queries, up)


def _up(laid: Filter, s: int, N: int, y: Tensor) -> Tensor:
    return laid.up(y, s, N)


def _to_steps(pool: Pool, key: Tensor, up: Any, A: Tensor) -> Tensor:
    """Give each query the weights of its window, and each step its part of a window's weight."""
    A = to_steps(pool, key, A)
    return A if up is None else up(A)


class _Generated(type):
    """The type of generated classes, which are pickled by their base: no module contains them."""


def _reduce(kind: _Generated) -> Any:
    generated = "made_of" in vars(kind)  # a subclass of a generated class is pickled by its name
    return (multiresolution_layer, (vars(kind)["made_of"],)) if generated else kind.__qualname__


@functools.cache
def multiresolution_layer(layer: type[MultiheadAttention]) -> type[MultiheadAttention]:
    """Return a subclass of a layer, whose heads attend at several scales.

    For `PerformerAttention` it is ``MrsPerformerAttention``, and for `MultiheadAttention` it is
    `MultiresolutionAttention`.

    Parameters
    ----------
    layer : type
        A kind of `MultiheadAttention` that mixes nothing along the length, in `mix` or elsewhere.

    Returns
    -------
    type
        A layer with the arguments of both.

    Raises
    ------
    TypeError, ValueError
        If `layer` is no kind of `MultiheadAttention`, or mixes along the length itself.
    """
    if not (isinstance(layer, type) and issubclass(layer, MultiheadAttention)):
        raise TypeError(f"layer is {layer!r}; expected a class of MultiheadAttention")
    if layer.mixes or layer.mix is not MultiheadAttention.mix:
        raise ValueError(
            f"layer is {layer.__name__}, which mixes along the length itself; expected one that "
            "does not"
        )
    if layer is MultiheadAttention:
        return MultiresolutionAttention
    text = f"`{layer.__name__}` at several scales: with `MultiresolutionAttention`'s arguments."
    parents = (MultiresolutionAttention, layer)
    namespace = {"__doc__": text, "__module__": __name__, "made_of": layer}
    generated: Any = _Generated(f"Mrs{layer.__name__}", parents, namespace)
    return generated


copyreg.pickle(_Generated, _reduce)  # type: ignore[arg-type]
