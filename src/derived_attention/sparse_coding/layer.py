"""Layers of ridge and lasso attention, the mechanisms of `sparse_coding.core` (chapter 13)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from derived_attention.common.checks import Mechanism, check_count, check_positive
from derived_attention.common.masks import Mask
from derived_attention.layer import ALL, KEY, VALUE, Group, Heads, MultiheadAttention
from derived_attention.sparse_coding.core import lasso_attention, ridge_attention
from derived_attention.sparse_coding.solver import check_power


class RidgeAttention(MultiheadAttention):
    """Ridge attention in H heads, with the interface and the parameters of `MultiheadAttention`.

    With ``projected=False`` it has no W_Q, W_K, W_V and W_O, as in [OptimizingAttention]: heads are
    slices of the features. A query of self-attention would then explain itself, so its own key is
    left out; with ``cross=True`` it is not.

    Parameters
    ----------
    lam : float
        λ, as in `ridge_attention`.
    dictionary : {"key", "value"}
        What the queries are coded in. ``"value"`` is the dictionary in [OptimizingAttention]; then
        keys and their projection have no influence.
    random_tokens : int
        Number of tokens with independent normal features that come first in `key` and `value`, and
        are coded with and mixed like all others. Drawn anew in training; those of a buffer in
        evaluation. The weights that the layer returns do not include them.
    """

    shown = ("lam", "dictionary", "random_tokens")
    bare = True
    decodes = True
    tokens: Tensor | None

    def __init__(
        self,
        *args: Any,
        lam: float = 0.1,
        dictionary: str = "key",
        random_tokens: int = 0,
        attention: Mechanism = ridge_attention,
        **options: Any,
    ) -> None:
        super().__init__(*args, attention=attention, **options)
        self.paired = not self.projected  # its own key is left out
        if dictionary not in ("key", "value"):
            raise ValueError(f"dictionary is {dictionary!r}; expected 'key' or 'value'")
        self.lam, self.dictionary = check_positive("lam", lam), dictionary
        self.random_tokens = check_count("random_tokens", random_tokens, 0)
        self.decodes = self.decodes and not random_tokens
        factory = {name: options.get(name) for name in ("device", "dtype")}
        shape = (random_tokens, max(self.kdim, self.vdim))
        self.register_buffer("tokens", torch.randn(shape, **factory) if random_tokens else None)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Iterator[Group]:
        """Put random tokens first, and say which key is a query's own."""
        R, key = self.random_tokens, value if self.dictionary == "value" else key
        if self.tokens is not None:
            tokens = torch.randn_like(self.tokens) if self.training else self.tokens
            key, value, mask = _before(tokens, key), _before(tokens, value), _after(mask, R)
        attend = functools.partial(
            self.attention, exclude_self=self.paired and not mask.cross, prefix=R
        )
        yield Group(ALL, key, value, mask, attend, lambda A: A[..., R:])

    def project(self, part: int, x: Tensor, heads: Heads) -> Tensor:
        """Project values in the place of keys, too, where they are the dictionary."""
        coded = part == KEY and self.dictionary == "value"
        return super().project(VALUE if coded else part, x, heads)

    def mechanism(self, base: Mechanism, heads: Heads) -> Mechanism:
        """Pass λ to the mechanism."""
        return functools.partial(base, lam=self.lam)


class LassoAttention(RidgeAttention):
    """Lasso attention in H heads; the rest is as in `RidgeAttention`.

    Parameters
    ----------
    lam, rho, iterations, power
        As in `lasso_attention`.
    dictionary, random_tokens
        As in `RidgeAttention`.
    """

    shown = ("rho", "iterations", "power")
    bare = True

    def __init__(
        self,
        *args: Any,
        rho: float = 10.0,
        iterations: int = 5,
        power: int | None = None,
        attention: Mechanism = lasso_attention,
        **options: Any,
    ) -> None:
        super().__init__(*args, attention=attention, **options)
        self.rho = check_positive("rho", rho)
        self.iterations = check_count("iterations", iterations, 1)
        self.power = check_power(power)

    def mechanism(self, base: Mechanism, heads: Heads) -> Mechanism:
        """Pass λ, ρ and the other options to the mechanism."""
        options = {"rho": self.rho, "iterations": self.iterations, "power": self.power}
        return functools.partial(super().mechanism(base, heads), **options)


def _before(tokens: Tensor, x: Tensor) -> Tensor:
    """Put tokens before a sequence x (B, M, ·), as wide as it is."""
    tokens = tokens[:, : x.shape[-1]].to(x.dtype)
    return torch.cat([tokens.expand(*x.shape[:-2], *tokens.shape), x], -2)


def _after(mask: Mask, R: int) -> Mask:
    """Return a mask over keys with R more before the first, which every query may attend."""
    if mask.given is None:
        return mask
    tokens = mask.given.new_full((*mask.given.shape[:-1], R), mask.given.dtype == torch.bool)
    return Mask(torch.cat([tokens, mask.given], -1))
