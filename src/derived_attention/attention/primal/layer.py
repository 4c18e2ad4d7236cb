"""Layers: what is learned of the mechanisms in `derived_attention.attention.primal.fast`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.attention.frame.checks import Mechanism, check_count, check_flag
from derived_attention.attention.frame.layer import Group, Heads, MultiheadAttention, pick
from derived_attention.attention.frame.masks import Mask
from derived_attention.attention.linear.fast import FeatureMap, apply_feature_map, wide
from derived_attention.attention.primal.fast import (
    ROWS,
    SAMPLINGS,
    _check_width,
    _collectors,
    _shared,
    cosine_feature_map,
    ksvd_objective,
    primal_attention,
)


class PrimalAttention(MultiheadAttention):
    """Primal-Attention in H heads, with the interface and the parameters of `MultiheadAttention`.

    What f reads are the values, ``X W_Vᵀ``: with the identity for W_V they are the sequence itself,
    as in the paper. It adds the parameters ``W_e`` and ``W_r`` (H, n, s), which start with
    orthonormal directions in each head, and ``W_o`` (H, D, 2 s).

    It has no attention weights: what `need_weights` asks for is None. `dropout` drops scores. With
    ``cross=True`` it is cross-attention, as in `primal_attention`.

    Parameters
    ----------
    directions : int, optional
        s; half of D, rounded up, where left out. No more than min(n, D) are independent.
    landmarks : int, optional
        n, rows of f(X); 10 s where left out. Like the next two only where data-dependent.
    sampling : str
        ``"even"``; ``"random"``, drawn anew in training, and even in evaluation; or ``"gaussian"``,
        a random sketch that is drawn when the layer is made, and saved with it.
    length : int, optional
        The longest sequence that a Gaussian sketch takes; needed with it, and only with it.
    data_dependent, feature_map
        As in `primal_attention`; a module's parameters become the layer's.
    regularised : bool
        Whether it has the parameter ``log_Lambda`` (H, s) as well, and hands its objective J to
        `ksvd_objectives`, so that `Regularised` can add it to a loss.
    """

    shown = ("directions", "landmarks", "data_dependent", "sampling", "feature_map")
    weighs = False
    sketch: Tensor | None

    def __init__(
        self,
        *args: Any,
        directions: int | None = None,
        landmarks: int | None = None,
        data_dependent: bool = True,
        feature_map: FeatureMap = cosine_feature_map,
        sampling: str = "even",
        length: int | None = None,
        regularised: bool = False,
        attention: Mechanism = primal_attention,
        **options: Any,
    ) -> None:
        super().__init__(*args, attention=attention, **options)
        H, D, like = self.num_heads, self.head_dim, self.out_proj.weight
        s = -(-D // 2) if directions is None else check_count("directions", directions, 1)
        n = ROWS * s if landmarks is None else check_count("landmarks", landmarks, 1)
        check_flag("data_dependent", data_dependent)
        if sampling not in (*SAMPLINGS, "gaussian"):
            expected = ", ".join((*SAMPLINGS, "gaussian"))
            raise ValueError(f"sampling is {sampling!r}; expected one of {expected}")
        if (length is None) == (sampling == "gaussian"):
            expected = "the longest sequence's" if length is None else "None"
            raise ValueError(f"length is {length} with {sampling} sampling; expected {expected}")
        given = {"landmarks": landmarks, "length": length, "sampling": sampling}
        if not data_dependent and given != {"landmarks": None, "length": None, "sampling": "even"}:
            told = ", ".join(f"{key} is {x}" for key, x in given.items())
            raise ValueError(f"{told}; expected none with data_dependent=False: there is no f")
        self.directions, self.sampling = s, sampling
        self.landmarks = n if data_dependent else None
        self.data_dependent, self.feature_map = data_dependent, feature_map
        phi = apply_feature_map(feature_map, like.new_ones(1, D))
        if data_dependent:
            _check_width(phi, D, True)
        rows = n if data_dependent else phi.shape[-1]
        self.W_e, self.W_r = (nn.Parameter(orthogonal_directions(H, rows, s, like)) for _ in "er")
        self.W_o = nn.Parameter(like.new_empty(H, D, 2 * s))
        for W in self.W_o:
            nn.init.xavier_uniform_(W)
        check_flag("regularised", regularised)
        self.log_Lambda = nn.Parameter(like.new_zeros(H, s)) if regularised else None
        S = None if length is None else like.new_empty(n, check_count("length", length, 1))
        self.register_buffer("sketch", S if S is None else S.normal_(std=n**-0.5))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Iterator[Group]:
        """Say whether r belongs to the queries, or to another sequence."""
        base = functools.partial(self.attention, cross=mask.cross)
        yield Group(slice(None), key, value, mask, base)

    def mechanism(self, base: Mechanism, heads: Heads) -> Mechanism:
        """Hand on the weights of these heads."""
        W_e, W_r, W_o = (pick(W, heads, at=0) for W in (self.W_e, self.W_r, self.W_o))
        own: dict[str, Any] = {"W_e": W_e, "W_r": W_r, "W_o": W_o}
        if self.data_dependent:
            random = self.training and self.sampling == "random"
            own.update(sampling="random" if random else "even", sketch=self.sketch)
        how = {"data_dependent": self.data_dependent, "feature_map": self.feature_map}
        return functools.partial(base, **own, **how)

    def _attend(
        self, run: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool
    ) -> tuple[Tensor, None]:
        """Return H; hand J to who collects it."""
        Lambda = self.log_Lambda
        drop: dict[str, Any] = {"dropout_p": self.dropout} if self.training else {}
        if Lambda is None:
            return run(q, k, v, **mask.keywords, **drop), None
        kept: list[tuple] = []
        H = run(q, k, v, **mask.keywords, **drop, kept=kept)
        J = self._objective(kept[0], mask, Lambda.exp())  # even if nobody collects it, because
        if _collectors.lists:  # checkpointing has to do in the backward pass what was done here
            _collectors.lists[-1].append(J)
        return H, None

    def _objective(self, kept: tuple, mask: Mask, Lambda: Tensor) -> Tensor:
        """J (B, H), as `ksvd_objectives` says."""
        e, r, used = kept
        W_e: Tensor = self.W_e
        W_r: Tensor = self.W_r
        if used is not None and mask.keys is not None:  # causal forms do not know of padding
            used = torch.arange(used.shape[-1], device=e.device) < mask.keys.sum(-1, keepdim=True)
        if used is not None:
            W_e, W_r = (W * used.unsqueeze(-1) for W in (W_e, W_r))
        return ksvd_objective(_shared(e, mask.queries), _shared(r, mask.keys), W_e, W_r, Lambda)


def orthogonal_directions(H: int, n: int, s: int, like: Tensor) -> Tensor:
    """Return (H, n, s) with orthonormal columns in each head, or rows where n < s.

    ``nn.init.orthogonal_`` of all heads at once, as in Listing 1, would make heads orthogonal.
    """
    W = like.new_empty(H, n, s, dtype=wide(like))  # there is no decomposition of half precision
    for head in W:
        nn.init.orthogonal_(head)
    return W.to(like.dtype)
