"""The layer with the parameters of `normalized_attention` (chapter 5)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.batch_norm.core import normalized_attention
from derived_attention.common.checks import (
    LARGEST,
    Mechanism,
    check_flag,
    check_number,
    check_positive,
)
from derived_attention.common.masks import Mask
from derived_attention.layer import Heads, MultiheadAttention


class NormalizedAttention(MultiheadAttention):
    """Attention-BN in H heads, with the interface of `MultiheadAttention`.

    It adds ``beta`` (H,), a parameter, where β is learned.

    Parameters
    ----------
    beta : float or sequence of float
        β, one for all heads or one for each.
    learn_beta : bool
        Whether β is a parameter that starts at `beta`. Otherwise it is no part of the state.
    eps, center_keys
        As in `normalized_attention`.
    """

    shown = ("betas", "eps", "center_keys")

    def __init__(
        self,
        *args: Any,
        beta: float | Sequence[float] = 1.0,
        learn_beta: bool = False,
        eps: float | None = None,
        center_keys: bool | None = None,
        **options: Any,
    ) -> None:
        check_flag("learn_beta", learn_beta)
        if center_keys is not None:
            check_flag("center_keys", center_keys)
        super().__init__(*args, **options)
        betas = list(beta) if isinstance(beta, Sequence) else [beta] * self.num_heads
        if len(betas) != self.num_heads:
            raise ValueError(f"beta is {betas}; expected one number, or one for each head")
        expected = "one finite number, or a sequence of one for each head"
        self.fixed_betas = [check_number("beta", b, expected, -LARGEST, LARGEST) for b in betas]
        if eps is not None:
            check_positive("eps", eps)
        start = self.out_proj.weight.new_tensor(self.fixed_betas)
        self.beta = nn.Parameter(start) if learn_beta else None
        self.betas = "learned" if learn_beta else betas
        self.eps, self.center_keys = eps, center_keys

    def mechanism(self, base: Mechanism, heads: Heads) -> Mechanism:
        """Normalise before `base`, with the β of these heads."""
        options = {"eps": self.eps, "attention": base, "center_keys": self.center_keys}
        return functools.partial(normalized_attention, beta=self._beta(heads), **options)

    def with_query_mask(self, run: Mechanism, mask: Mask) -> Mechanism:
        """Give the mask to the mechanism that attends with the normalised queries."""
        base = run.keywords["attention"]  # type: ignore[attr-defined]
        return functools.partial(run, attention=super().with_query_mask(base, mask))

    def _beta(self, heads: Heads) -> float | Tensor:
        """Return β of these heads; fixed ones stay Python numbers, on any device."""
        if self.beta is not None:
            return self.beta[heads]
        fixed = self.fixed_betas
        if len(set(fixed)) == 1:
            return fixed[0]
        weight = self.out_proj.weight
        return torch.cat([weight.new_full((1,), b) for b in fixed])[heads]
