"""The layer of Transformer-MGK: H heads in which each token has R keys (chapter 10).

`MixtureAttention` makes the keys and runs a function of `derived_attention.attention.mixture`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.attention.checks import check_count, check_positive
from derived_attention.attention.mixture import (
    em_priors,
    linear_mixture_attention,
    mixture_attention,
)
from derived_attention.attention.shifted_mixture import shifted_keys, shifted_mixture_attention
from derived_attention.attention.softmax import MultiheadAttention, _masks, _merge_masks


class MixtureAttention(MultiheadAttention):
    """Transformer-MGK's attention in H heads, with the interface of ``nn.MultiheadAttention``.

    The parameters are those of `MultiheadAttention`, whose projection makes the keys of the first
    component; ``key_weight`` (R − 1, G D, kdim) and ``key_bias`` (R − 1, G D) make the others, for
    G = `kv_heads` heads of keys. None depends on a length. Half the heads at the same width of a
    head are ``MixtureAttention(embed_dim, H // 2, head_dim=embed_dim // H)``; with ``kv_heads=1``
    all heads share one mixture of keys for each token, and one value.

    Parameters
    ----------
    embed_dim, num_heads, args
        As in `MultiheadAttention`.
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
        on its queries. Padded ones do not count where `query` and `key` are one tensor. All start
        at 1/R.
    variances : float or sequence of float, optional
        σ², one for all components or one for each; √D where left out.
    learn_variances : bool
        Whether log σ² is a parameter, ``log_variances`` (H, R), that starts there.
    mixture : dict, optional
        Other keywords of the function: `distance`, `normalised`, `feature_map`.
    options
        The other arguments of `MultiheadAttention`, but for `attention`.

    Raises
    ------
    TypeError, ValueError
        As in `MultiheadAttention`; for a size, a variance or a name that is not as above; for
        `hard`, variances or "em" with `linear`, which has no Gaussians.

    Examples
    --------
    >>> layer = MixtureAttention(16, 2, components=3, priors="learned")
    >>> x = torch.zeros(2, 5, 16)
    >>> layer(x, x, x, need_weights=False)[0].shape
    torch.Size([2, 5, 16])
    """

    priors: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *args: Any,
        components: int = 2,
        shifted: bool = False,
        hard: bool = False,
        linear: bool = False,
        priors: str = "fixed",
        variances: float | Sequence[float] | None = None,
        learn_variances: bool = False,
        mixture: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        R = check_count("components", components, 1)
        if priors not in ("fixed", "learned", "em"):
            raise ValueError(f"priors is {priors!r}; expected 'fixed', 'learned' or 'em'")
        if linear and (hard or variances is not None or learn_variances or priors == "em"):
            raise ValueError(
                f"linear is True with hard={hard}, variances={variances}, priors={priors!r}; "
                "expected neither hard, nor variances, nor 'em': a linear kernel has no Gaussians"
            )
        super().__init__(embed_dim, num_heads, *args, attention=self._mix, **options)
        D, like = self.head_dim, self.out_proj.weight
        sigma2 = _variances(math.sqrt(D) if variances is None else variances, R)
        self.components, self.hard, self.linear = R, hard, linear
        self.mixture = {} if mixture is None else dict(mixture)
        self.fixed_variances = sigma2
        start = like.new_ones(num_heads, R) * like.new_tensor(sigma2)
        self.log_variances = nn.Parameter(start.log()) if learn_variances else None
        even = like.new_full((num_heads, R), 1 / R)
        self.prior_logits = nn.Parameter(torch.zeros_like(even)) if priors == "learned" else None
        self.register_buffer("priors", even if priors == "em" else None)
        kind: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        shifts = torch.randn(self.kv_heads, R, D, **kind) if shifted else None
        self.shifts = None if shifts is None else nn.Parameter(shifts)
        self.key_weight: nn.Parameter | None = None
        self.key_bias: nn.Parameter | None = None
        if R > 1 and not shifted:
            width = self.kv_heads * D
            weights = [like.new_empty(width, self.kdim) for _ in range(R - 1)]
            self.key_weight = nn.Parameter(torch.stack(list(map(nn.init.xavier_uniform_, weights))))
            bias = self.in_proj_bias is not None
            self.key_bias = nn.Parameter(like.new_zeros(R - 1, width)) if bias else None

    def keywords(self) -> dict[str, Any]:
        """Return what the function gets beside q, k, v and masks: priors, variances, `mixture`."""
        own = dict(self.mixture)
        if self.prior_logits is not None:
            own["priors"] = self.prior_logits.softmax(-1)
        elif self.priors is not None:
            own["priors"] = self.priors
        if self.log_variances is not None:
            own["variances"] = self.log_variances.exp()
        elif not self.linear:
            same = len(set(self.fixed_variances)) == 1  # a number spares a feature, see _augment
            many = self.out_proj.weight.new_tensor(self.fixed_variances)
            own["variances"] = self.fixed_variances[0] if same else many
        return own

    def heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, H, N, D), k (B, H, R, M, D) and v (B, H, M, D), as `responsibilities` wants.

        Parameters
        ----------
        query, key, value : Tensor
            As in `forward`.

        Raises
        ------
        TypeError, ValueError
            As in `forward`.
        """
        self._check(query, key, value, None, None)
        q, k, v = self._heads(query, key, value)
        return q, self._components(k), v

    def _components(self, k: Tensor) -> Tensor:
        """Give keys that wait to be shifted their dimension of components: (B, H, R, M, D)."""
        return k if self.shifts is None else shifted_keys(k, self._shifts(k))

    def _shifts(self, k: Tensor) -> Tensor:
        """Return b (H, R, D) in the dtype of the keys."""
        assert self.shifts is not None
        return self.shifts.to(k.dtype).repeat_interleave(self.num_heads // self.kv_heads, 0)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, **masks: Any) -> Tensor:
        own = self.keywords()
        if self.linear:
            return linear_mixture_attention(q, self._components(k), v, **masks, **own)
        if self.shifts is None:
            return mixture_attention(q, k, v, hard=self.hard, **masks, **own)
        shifts = self._shifts(k)
        return shifted_mixture_attention(q, k, v, shifts=shifts, hard=self.hard, **masks, **own)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `MultiheadAttention.forward` does, and let EM take a step in training mode."""
        options = (need_weights, attn_mask, average_attn_weights, is_causal)
        results = super().forward(query, key, value, key_padding_mask, *options)
        if self.training and self.priors is not None:
            self._update_priors(query, key, value, key_padding_mask, attn_mask, is_causal)
        return results

    @torch.no_grad()
    def _update_priors(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> None:
        """Take a step of EM on the queries that are not padding."""
        assert self.priors is not None
        q, k, _ = self.heads(query, key, value)
        masks = _masks(attn_mask, key_padding_mask, is_causal, q, key.shape[-2])
        if query is key and key_padding_mask is not None:
            here = _merge_masks(None, key_padding_mask, False, q, key.shape[-2])  # (B, 1, 1, M)
            here = here if here.dtype == torch.bool else here != -math.inf
            masks["query_mask"] = here[..., 0, :].expand(q.shape[:-1])
        self.priors.copy_(em_priors(q, k, **masks, **self.keywords()))

    def _heads(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Project; keys are (B, H, R, M, D), or (B, H, M, D) where they are to be shifted."""
        q, k, v = super()._heads(*inputs)
        if self.shifts is not None:
            return q, k, v
        keys = [k]
        if self.key_weight is not None:
            biases = [None] * len(self.key_weight) if self.key_bias is None else self.key_bias
            pairs = zip(self.key_weight, biases, strict=True)
            keys += [self._head(inputs[1], weight, bias) for weight, bias in pairs]
        return q, torch.stack(keys, -3), v

    def _weights(self, q: Tensor, k: Tensor, **masks: Any) -> Tensor:
        identity = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)  # (M, M)
        return self._mix(q, k, identity.expand(*q.shape[:-2], -1, -1), **masks)

    def extra_repr(self) -> str:
        """Show what the parameters do not."""
        kind = "linear" if self.linear else "hard" if self.hard else "soft"
        return f"{super().extra_repr()}, {kind}, components={self.components}"


def _variances(variances: float | Sequence[float], components: int) -> list[float]:
    """Check the variances of a layer, and return one for each component."""
    many = list(variances) if isinstance(variances, Sequence) else [variances] * components
    if len(many) != components:
        raise ValueError(f"variances is {variances}; expected one number, or {components} of them")
    return [check_positive("variances", x) for x in many]
