"""The layer of the delta rule (chapter 15): the learned parameters of `delta_attention`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from derived_attention.common.checks import Mechanism, accumulation_dtype, check_flag
from derived_attention.common.masks import Mask
from derived_attention.delta.core import delta_attention
from derived_attention.layer import ALL, VALUE, Group, Heads, MultiheadAttention

STRENGTHS = {  # β of a token, for keys of norm 1
    "sigmoid": lambda x: x.sigmoid(),  # in (0, 1): writes
    "double": lambda x: 2 * x.sigmoid(),  # in (0, 2): may turn a direction round, not quite
    "clamped": lambda x: (1 + 1.5 * x.tanh()).clamp(0, 2),  # in [0, 2]: reflects exactly
}
START = math.log(math.expm1(0.01))  # softplus of it is .01: a half-life of 69 tokens


class DeltaAttention(MultiheadAttention):
    """The delta rule in H heads, with the interface of `MultiheadAttention`.

    Queries and keys have norm 1. The writing strength β of each token and head is a function of
    the token in `key`, ``strength`` a Linear layer, and so is its decay, −softplus of
    ``forgetting``, where there is one.

    Parameters
    ----------
    beta : {"sigmoid", "double", "clamped"}
        The range of β: (0, 1), (0, 2), or [0, 2] with both ends reached.
    gated : bool
        Whether the state decays, by a factor that depends on the token.
    erase : bool
        As in `delta_attention`.
    """

    shown = ("beta", "gated", "erase")
    decodes = True

    def __init__(
        self,
        *args: Any,
        beta: str = "sigmoid",
        gated: bool = False,
        erase: bool = True,
        attention: Mechanism = delta_attention,
        **options: Any,
    ) -> None:
        if beta not in STRENGTHS:
            raise ValueError(f"beta is {beta!r}; expected one of {', '.join(STRENGTHS)}")
        check_flag("gated", gated)
        check_flag("erase", erase)
        super().__init__(*args, attention=attention, **options)
        self.beta, self.gated, self.erase = beta, gated, erase
        factory: dict[str, Any] = {name: options.get(name) for name in ("device", "dtype")}
        self.strength = nn.Linear(self.kdim, self.num_heads, **factory)
        self.forgetting = nn.Linear(self.kdim, self.num_heads, **factory) if gated else None
        if self.forgetting is not None:
            nn.init.constant_(self.forgetting.bias, START)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Iterator[Group]:
        """Give the function the strength and the decay of each key."""
        given: dict[str, Any] = {
            "beta": STRENGTHS[self.beta](self.strength(key)).mT,
            "erase": self.erase,
        }
        if self.forgetting is not None:
            given["decay"] = -F.softplus(self.forgetting(key)).mT
        yield Group(ALL, key, value, mask, functools.partial(self.attention, **given))

    def project(self, part: int, x: Tensor, heads: Heads) -> Tensor:
        """Project, and give queries and keys norm 1."""
        x = super().project(part, x, heads)
        if part == VALUE:
            return x
        # In float16 the least norm of 1e-12 would be 0, and a key of zeros NaN.
        return F.normalize(x.to(accumulation_dtype(x)), dim=-1).to(x.dtype)
