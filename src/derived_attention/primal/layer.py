"""The layer with the parameters of `primal_attention` (chapter 12)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.common.checks import Mechanism, check_count, check_flag
from derived_attention.common.convention import prepare, unwrap
from derived_attention.common.masks import Mask
from derived_attention.layer import ALL, Group, Heads, MultiheadAttention, pick
from derived_attention.linear.core import FeatureMap, accumulation_dtype, apply_feature_map
from derived_attention.primal.core import (
    ROWS,
    SAMPLINGS,
    Projection,
    Scores,
    check_width,
    collectors,
    cosine_feature_map,
    join,
    ksvd_objective,
    primal_attention,
    scores_of,
)


class PrimalAttention(MultiheadAttention):
    """Primal-Attention in H heads, with the interface and the parameters of `MultiheadAttention`.

    f is applied to the values, ``X W_Vᵀ``: with the identity for W_V they are the sequence itself,
    as in the paper. It adds the parameters ``W_e`` and ``W_r`` (H, n, s), which start with
    orthonormal directions in each head, and ``W_o`` (H, D, 2 s).

    If it is not data-dependent, ``W_e`` and ``W_r`` are (H, p, s), for the p features of g.
    It has no attention weights: with `need_weights` they are None. `dropout` drops scores. With
    ``cross=True`` it is cross-attention, as in `primal_attention`.

    Parameters
    ----------
    directions : int, optional
        s; if left out, half of D, rounded up. No more than min(n, D) are independent.
    landmarks : int, optional
        n, rows of f(X); 10 s if left out. Only if data-dependent, as `sampling` and `length`.
    sampling : str
        ``"even"``; ``"random"``, drawn again in each training step, in evaluation as "even"; or
        ``"gaussian"``, a random sketch that is drawn when the layer is made, and part of its state.
    length : int, optional
        The longest sequence for a Gaussian sketch; required with it, and only with it.
    data_dependent, feature_map
        As in `primal_attention`; a module's parameters become the layer's.
    regularised : bool
        Whether it has the parameter ``Lambda`` (H, s) as well, and gives its objective J to
        `ksvd_objectives`, so that `derived_book.training.fit.Regularised` can add it to a loss. As
        in the authors' code, entries of ``Lambda`` start between 0 and 1, and their squares are
        the Λ of J.
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
            expected = "the length of the longest sequence" if length is None else "None"
            raise ValueError(f"length is {length} with {sampling} sampling; expected {expected}")
        if not data_dependent and (landmarks, length, sampling) != (None, None, "even"):
            raise ValueError(
                f"landmarks is {landmarks}, length is {length}, sampling is {sampling}; expected "
                "none of them with data_dependent=False: there is no f"
            )
        self.directions, self.sampling = s, sampling
        self.landmarks = n if data_dependent else None
        self.data_dependent, self.feature_map = data_dependent, feature_map
        phi = apply_feature_map(feature_map, like.new_ones(1, D))
        if data_dependent:
            check_width(phi, D, True)
        rows = n if data_dependent else phi.shape[-1]
        self.W_e, self.W_r = (nn.Parameter(orthogonal_directions(H, rows, s, like)) for _ in "er")
        self.W_o = nn.Parameter(like.new_empty(H, D, 2 * s))
        for W in self.W_o:
            nn.init.xavier_uniform_(W)
        check_flag("regularised", regularised)
        self.Lambda = nn.Parameter(torch.rand_like(self.W_e[:, 0])) if regularised else None
        S = None if length is None else like.new_empty(n, check_count("length", length, 1))
        self.register_buffer("sketch", S if S is None else S.normal_(std=n**-0.5))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Iterator[Group]:
        """Yield all heads, which run self- or cross-attention."""
        base = functools.partial(self.attention, cross=mask.cross)
        yield Group(ALL, key, value, mask, base)

    def mechanism(self, base: Mechanism, heads: Heads) -> Mechanism:
        """Add the weights of these heads."""
        weights = {name: pick(getattr(self, name), heads, at=0) for name in ("W_e", "W_r", "W_o")}
        options: dict[str, Any] = {"data_dependent": self.data_dependent}
        if self.data_dependent:
            random = self.training and self.sampling == "random"
            options["sampling"] = "random" if random else "even"
            if self.sketch is not None:
                options["sampling"] = self.sketch
        return functools.partial(base, **weights, **options, feature_map=self.feature_map)

    def _attend(
        self, run: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool
    ) -> tuple[Tensor, None]:
        """Return H, and append J to the list of `ksvd_objectives`, if the layer is regularised."""
        drop = self.dropout if self.training else 0.0
        if self.Lambda is None:
            return run(q, k, v, **mask.keywords, dropout_p=drop), None
        run, options = unwrap(run)
        if run is not primal_attention:
            raise ValueError(
                f"attention is {run!r} with regularised=True; expected primal_attention, as the "
                "objective is a function of its scores"
            )
        W_o, cross = options.pop("W_o"), options.pop("cross", False)
        seen, scale = prepare(q, k, v, mask.given, mask.is_causal, options.pop("scale", None))
        seen.per_key()
        scores = scores_of(q, k, v, seen, scale, Projection(**options))
        H = join(scores, seen, W_o, cross, drop).to(q.dtype)
        J = self._objective(scores, mask, self.Lambda.square())  # also if it is not collected:
        if collectors.lists:  # checkpointing expects the same operations in the backward pass
            collectors.lists[-1].append(J)
        return H, None

    def _objective(self, scores: Scores, mask: Mask, Lambda: Tensor) -> Tensor:
        """Return J (B, H), as in `ksvd_objectives`."""
        e, r, used = scores
        W_e: Tensor = self.W_e
        W_r: Tensor = self.W_r
        if used is not None and mask.keys is not None:  # causal scores are computed without masks
            used = torch.arange(used.shape[-1], device=e.device) < mask.keys.sum(-1, keepdim=True)
        if used is not None:
            W_e, W_r = (W * used.unsqueeze(-1) for W in (W_e, W_r))
        return ksvd_objective(
            _scale_scores(e, mask.queries), _scale_scores(r, mask.keys), W_e, W_r, Lambda
        )


def _scale_scores(scores: Tensor, present: Tensor | None) -> Tensor:
    """Scale scores (B, H, N, s) so that a sum of squares becomes a mean over present tokens."""
    one = scores.new_ones(scores.shape[-2]) if present is None else present.to(scores.dtype)
    return scores * (one / one.sum(-1, keepdim=True).clamp(min=1)).sqrt().unsqueeze(-1)


def orthogonal_directions(H: int, n: int, s: int, like: Tensor) -> Tensor:
    """Return (H, n, s) with orthonormal columns in each head, or rows if n < s.

    ``nn.init.orthogonal_`` of all heads at once, as in Listing 1, would make heads orthogonal to
    each other.
    """
    W = like.new_empty(
        H, n, s, dtype=accumulation_dtype(like)
    )  # half precision has no QR decomposition
    for head in W:
        nn.init.orthogonal_(head)
    return W.to(like.dtype)
