"""Layers: what is learned of the mechanisms in `derived_attention.attention.splitting.fast`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.attention.frame.checks import (
    Mechanism,
    check_count,
    check_flag,
    check_positive,
)
from derived_attention.attention.frame.layer import (
    ALL,
    KEY,
    VALUE,
    Group,
    Heads,
    MultiheadAttention,
)
from derived_attention.attention.frame.masks import Mask
from derived_attention.attention.splitting.fast import (
    _after,
    _before,
    _check_power,
    _factory,
    lasso_attention,
    ridge_attention,
)


class RidgeAttention(MultiheadAttention):
    """Ridge attention in H heads, with the interface and the parameters of `MultiheadAttention`.

    With ``projected=False`` it has no W_Q, W_K, W_V and W_O, as in the paper: heads are slices of
    the features. Then a query of self-attention would explain itself, and its own key is left out;
    with ``cross=True`` it is not.

    Parameters
    ----------
    lam : float
        λ, as in `ridge_attention`.
    dictionary : str
        ``"key"``, or ``"value"``: which of the two the queries are coded in. The latter is what is
        printed, and then keys, and their projection, have no influence.
    random_tokens : int
        As many tokens with independent normal features come first in `key` and `value`, and are
        coded with and mixed like all others. Drawn anew in training; in evaluation they are those
        of a buffer. They are not in the weights that the layer returns.
    learned : bool
        Whether λ is a parameter, ``log_lam`` (H,), that starts at `lam`.
    """

    shown = ("lam", "dictionary", "random_tokens")
    bare = True
    tokens: Tensor | None

    def __init__(
        self,
        *args: Any,
        lam: float = 0.1,
        dictionary: str = "key",
        random_tokens: int = 0,
        learned: bool = False,
        attention: Mechanism = ridge_attention,
        **options: Any,
    ) -> None:
        super().__init__(*args, attention=attention, **options)
        self.paired = not self.projected  # that is, its own key is left out
        if dictionary not in ("key", "value"):
            raise ValueError(f"dictionary is {dictionary!r}; expected 'key' or 'value'")
        self.lam, self.dictionary = check_positive("lam", lam), dictionary
        self.random_tokens = check_count("random_tokens", random_tokens, 0)
        check_flag("learned", learned)
        self.learned = learned
        self.log_lam = self._learn(self.lam, options)
        shape, made = (random_tokens, max(self.kdim, self.vdim)), _factory(options)
        self.register_buffer("tokens", torch.randn(shape, **made) if random_tokens else None)

    def _learn(self, start: float, options: dict[str, Any]) -> nn.Parameter | None:
        if not self.learned:
            return None
        return nn.Parameter(torch.full((self.num_heads,), math.log(start), **_factory(options)))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Iterator[Group]:
        """Put random tokens first, and say which key is a query's own."""
        R, key = self.random_tokens, value if self.dictionary == "value" else key
        if self.tokens is not None:
            tokens = torch.randn_like(self.tokens) if self.training else self.tokens
            key, value, mask = _before(tokens, key), _before(tokens, value), _after(mask, R)
        own = {"exclude_self": self.paired and not mask.cross, "prefix": R}
        base = functools.partial(self.attention, **own)
        yield Group(ALL, key, value, mask, base, lambda A: A[..., R:])

    def project(self, part: int, x: Tensor, heads: Heads) -> Tensor:
        """Project values in the place of keys, too, where they are the dictionary."""
        coded = part == KEY and self.dictionary == "value"
        return super().project(VALUE if coded else part, x, heads)

    def mechanism(self, base: Mechanism, heads: Heads) -> Mechanism:
        """Hand on λ."""
        lam = self.lam if self.log_lam is None else self.log_lam[heads].exp()
        return functools.partial(base, lam=lam)


class LassoAttention(RidgeAttention):
    """Lasso attention in H heads; the rest is as in `RidgeAttention`.

    Parameters
    ----------
    lam, rho, iterations, power
        As in `lasso_attention`.
    dictionary, random_tokens
        As in `RidgeAttention`.
    learned : bool
        Whether λ and ρ are parameters, ``log_lam`` and ``log_rho`` (H,), that start there.
    fused : bool, optional
        As in `lasso_attention`; left out, nothing is handed on.
    """

    shown = ("rho", "iterations", "power")
    bare = True

    def __init__(
        self,
        *args: Any,
        rho: float = 10.0,
        iterations: int = 5,
        power: int | None = None,
        fused: bool | None = None,
        attention: Mechanism = lasso_attention,
        **options: Any,
    ) -> None:
        super().__init__(*args, attention=attention, **options)
        self.rho = check_positive("rho", rho)
        self.iterations = check_count("iterations", iterations, 1)
        self.power, self.fused = _check_power(power), fused
        self.log_rho = self._learn(self.rho, options)

    def mechanism(self, base: Mechanism, heads: Heads) -> Mechanism:
        """Hand on λ, ρ, and how to run."""
        rho = self.rho if self.log_rho is None else self.log_rho[heads].exp()
        own = {"rho": rho, "iterations": self.iterations, "power": self.power}
        if self.fused is not None:
            own["fused"] = self.fused
        return functools.partial(super().mechanism(base, heads), **own)
