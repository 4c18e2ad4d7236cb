"""The layer of Transformer-MGK: H heads in which each token has R keys (chapter 10).

`MixtureAttention` makes the keys and runs a function of `derived_attention.mixture.core`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.common.checks import Mechanism, check_count, check_flags, check_positive
from derived_attention.common.convention import weights_of
from derived_attention.common.masks import Mask
from derived_attention.layer import ALL, KEY, Heads, MultiheadAttention
from derived_attention.mixture.core import em_priors, linear_mixture_attention, mixture_attention
from derived_attention.mixture.shifted import shifted_keys, shifted_mixture_attention

KEYWORDS = ("distance", "normalized")  # of mixtures of Gaussians that the layer passes on


class MixtureAttention(MultiheadAttention):
    """Transformer-MGK's attention in H heads, with the interface of `MultiheadAttention`.

    The projection of `MultiheadAttention` makes the keys of the first component; ``key_weight``
    (R − 1, G D, kdim) and ``key_bias`` (R − 1, G D) make the others, for G = `kv_heads` heads of
    keys. Half the heads at the same width of a head are ``MixtureAttention(embed_dim, H // 2,
    head_dim=embed_dim // H)``; with ``kv_heads=1`` all heads share one mixture of keys for each
    token, and one value. `shifted`, `hard` and `linear` choose the function, so `attention` cannot
    be given.

    Parameters
    ----------
    components : int
        R, at least 1.
    shifted : bool
        False: R projections, option A of [Nguyen2022]. True: one projection, and a shift for each
        component, the parameter ``shifts`` (G, R, D), which starts as standard normal numbers.
    hard, linear : bool
        Whether to attend by `hard_mixture_attention` or `linear_mixture_attention`.
    priors : {"fixed", "learned", "em"}
        π is 1/R; or the softmax of the parameter ``prior_logits`` (H, R); or the buffer
        ``priors`` (H, R), and each forward pass in training mode ends with a step of `em_priors`
        on its queries, without padded ones. All start at 1/R. Activation checkpointing, which runs
        a forward pass twice, excludes "em".
    variances : float or sequence of float, optional
        σ², one for all components or one for each; √D where left out.
    mixture : dict, optional
        Other keywords of the function: `distance`, `normalized`, `feature_map`, `fused`.

    Raises
    ------
    TypeError, ValueError
        For a size, a variance or a name that is not as above; for `hard`, variances or "em" with
        `linear`, which has no Gaussians.
    RuntimeError
        For a forward pass with "em" under activation checkpointing.
    """

    shown = ("kind", "components", "fixed_variances", "mixture")
    priors: Tensor | None

    def __init__(
        self,
        *args: Any,
        components: int = 2,
        shifted: bool = False,
        hard: bool = False,
        linear: bool = False,
        priors: str = "fixed",
        variances: float | Sequence[float] | None = None,
        mixture: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        R = check_count("components", components, 1)
        check_flags(shifted=shifted, hard=hard, linear=linear)
        if priors not in ("fixed", "learned", "em"):
            raise ValueError(f"priors is {priors!r}; expected 'fixed', 'learned' or 'em'")
        if linear and (hard or variances is not None or priors == "em"):
            raise ValueError(
                f"linear is True with hard={hard}, variances={variances}, priors={priors!r}; "
                "expected neither hard, nor variances, nor 'em': a linear kernel has no Gaussians"
            )
        function = mixture_attention if not shifted else shifted_mixture_attention
        function = linear_mixture_attention if linear else function
        mixture, known = mixture or {}, ("feature_map", "fused") if linear else KEYWORDS
        if not set(mixture) <= set(known):
            raise ValueError(f"mixture is {mixture!r}; expected no keys but {', '.join(known)}")
        super().__init__(*args, attention=function, **options)
        self.paired |= priors == "em"
        self.components, self.hard, self.linear = R, hard, linear
        self.kind = "linear" if linear else "hard" if hard else "soft"
        self.mixture = dict(mixture)
        width = math.sqrt(self.head_dim) if variances is None else variances
        self.fixed_variances = _variances(width, R)
        even = self.out_proj.weight.new_ones(self.num_heads, R)
        learned = priors == "learned"
        self.prior_logits = nn.Parameter(torch.zeros_like(even)) if learned else None
        self.register_buffer("priors", torch.full_like(even, 1 / R) if priors == "em" else None)
        self._make_keys(shifted)

    def _make_keys(self, shifted: bool) -> None:
        """Make the parameters of the keys beyond those of one projection."""
        like, (G, R, D) = self.out_proj.weight, (self.kv_heads, self.components, self.head_dim)
        self.shifts: nn.Parameter | None = None
        self.key_weight: nn.Parameter | None = None
        self.key_bias: nn.Parameter | None = None
        if shifted:
            shifts = torch.randn(G, R, D, device=like.device, dtype=like.dtype)
            self.shifts = nn.Parameter(shifts)
        elif R > 1:
            weights = [like.new_empty(G * D, self.kdim) for _ in range(R - 1)]
            self.key_weight = nn.Parameter(torch.stack(list(map(nn.init.xavier_uniform_, weights))))
            if self.in_proj_bias is not None:
                self.key_bias = nn.Parameter(like.new_zeros(R - 1, G * D))

    def keywords(self) -> dict[str, Any]:
        """Return what the function gets beside q, k, v and masks: priors, variances, `mixture`."""
        keywords = dict(self.mixture)
        if self.prior_logits is not None:
            keywords["priors"] = self.prior_logits.softmax(-1)
        elif self.priors is not None:
            keywords["priors"] = self.priors
        if not self.linear:
            first, *others = self.fixed_variances
            same = all(x == first for x in others)  # a number spares a feature, see `features`
            like = self.out_proj.weight
            keywords["variances"] = first if same else like.new_tensor(self.fixed_variances)
        return keywords

    def heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, H, N, D), k (B, H, R, M, D) and v (B, H, M, D), for `responsibilities`.

        Arguments and errors are those of `forward`.
        """
        self.check(query, key, value)
        q, k, v = (self.project(part, x, ALL) for part, x in enumerate((query, key, value)))
        return q, self._components(k), v

    def _components(self, k: Tensor) -> Tensor:
        """Give keys that are still to be shifted their dimension of components: (B, H, R, M, D)."""
        return k if self.shifts is None else shifted_keys(k, self._shifts(k))

    def _shifts(self, k: Tensor) -> Tensor:
        """Return b (H, R, D) in the dtype of the keys."""
        assert self.shifts is not None
        return self.shifts.to(k.dtype).repeat_interleave(self.num_heads // self.kv_heads, 0)

    def attend(self, run: Mechanism, q: Tensor, k: Tensor, v: Tensor | None, mask: Mask) -> Tensor:
        """Attend to mixtures, and in training mode let EM take a step."""
        keywords = {**mask.keywords, **self.keywords()}
        if self.linear:
            k = self._components(k)
        else:
            keywords["hard"] = self.hard
            if self.shifts is not None:
                keywords["shifts"] = self._shifts(k)
        result = weights_of(run, q, k, **keywords) if v is None else run(q, k, v, **keywords)
        if self.training and self.priors is not None:
            refuse_recomputation()
            queries = mask.queries
            present = None if queries is None else queries.expand(q.shape[:-1])
            keywords = {"query_mask": present, **mask.keywords, **self.keywords()}
            self.priors.copy_(em_priors(q, self._components(k), **keywords))
        return result

    def project(self, part: int, x: Tensor, heads: Heads) -> Tensor:
        """Project; keys become (B, H, R, M, D), or (B, H, M, D) where they are to be shifted."""
        first = super().project(part, x, heads)
        if part != KEY or self.shifts is not None:
            return first
        keys = [first]
        if self.key_weight is not None:
            biases = [None] * len(self.key_weight) if self.key_bias is None else self.key_bias
            pairs = zip(self.key_weight, biases, strict=True)
            keys += [self.to_heads(x, weight, bias, heads) for weight, bias in pairs]
        return torch.stack(keys, -3)


def refuse_recomputation() -> None:
    """Raise where a backward pass runs `forward` again, as activation checkpointing does."""
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0:
        raise RuntimeError(
            "priors is 'em' under activation checkpointing; expected 'fixed' or 'learned', or no "
            "checkpointing of this layer: a forward pass changes the priors, so a second one would "
            "not compute what the first one did"
        )


def _variances(variances: float | Sequence[float], components: int) -> list[float]:
    """Check the variances of a layer, and return one for each component."""
    many = list(variances) if isinstance(variances, Sequence) else [variances] * components
    if len(many) != components:
        raise ValueError(f"variances is {variances}; expected one number, or {components} of them")
    return [check_positive("variances", x) for x in many]
