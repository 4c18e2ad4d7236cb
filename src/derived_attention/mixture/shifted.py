"""Mixtures of shifted keys: R keys for each token from one projection (chapter 10).

Option B of [Nguyen2022] makes component r of token j from its one key, k_jr = k_j + b_r. If all
have one variance σ² = 1/scale, the score of eq. 7, up to a term of i alone, is ::

    s_ijr = scale · q_i·k_j + u_ir + w_jr
    u_ir = scale · q_i·b_r,    w_jr = log π_r − scale · (k_j·b_r + ‖k_j‖²/2 + ‖b_r‖²/2)

so that log Σ_r exp(s_ijr) needs one product Q Kᵀ of width D, where R free keys need R. What is
left is of width R: Σ_r exp(u_ir) exp(w_jr) is a product of an (N, R) and an (R, M) matrix, and it
multiplies the weights exp(scale · q_i·k_j). The formula, the checks and the form for variances that
differ are those of `derived_attention.mixture.core`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from derived_attention import formulas
from derived_attention.common.blocks import (
    Block,
    Tensors,
    attend,
    combine,
    split_shares,
    spread_product,
)
from derived_attention.common.checks import (
    check_floating,
    check_numbers,
    check_shape,
    has_concrete_values,
)
from derived_attention.common.convention import full_precision, is_short, mechanism, reference
from derived_attention.common.masks import BlockMask, Mask
from derived_attention.mixture.components import (
    Components,
    centre,
    components_of,
)
from derived_attention.mixture.core import DENSE, attend_densely, mixture_attention
from derived_attention.softmax.core import sdpa


def shifted_keys(k: Tensor, shifts: Tensor) -> Tensor:
    """Make k_jr = k_j + b_r, option B of [Nguyen2022]: R components from one projection.

    Keys `k` are ``(..., H, M, D)``, `shifts` b are ``(R, D)`` or ``(H, R, D)``, and the result is
    ``(..., H, R, M, D)``. Other shapes are a ValueError, and dtypes that differ a TypeError.
    """
    check_shifts(k, shifts)
    return k.unsqueeze(-3) + shifts.unsqueeze(-2)


def check_shifts(k: Tensor, shifts: Tensor) -> None:
    """Check b against the keys."""
    check_floating({"k": k, "shifts": shifts})
    if k.dim() < 2:
        raise ValueError(f"k has shape {tuple(k.shape)}; expected (..., M, D)")
    R = shifts.shape[-2] if shifts.dim() > 1 and shifts.shape[-2] else "R"
    heads = k.shape[-3:-2] if shifts.dim() > 2 else ()
    check_shape("shifts", shifts, (*heads, R, k.shape[-1]), "(R, D) or (H, R, D), with R ≥ 1")
    check_numbers("shifts", shifts)


@mechanism
def shifted_mixture_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    shifts: Any,
    priors: Any = None,
    variances: Any = None,
    distance: bool = True,
    normalized: Any = None,
    hard: bool = False,
) -> Tensor:
    """Attention with the keys k_jr = k_j + b_r, by one product Q Kᵀ and without an (N, M) matrix.

    It computes the scores of some queries at a time, in float32 at least, and again in the backward
    pass. The weights are exp(scale · q_i·k_j + m_j) Σ_r exp(u_ir − n_i) exp(w_jr − m_j), where n_i
    is max_r u_ir and m_j is max_r w_jr, so that no exponential overflows. The sum is at least
    exp(−g_i), with the gap g_i = n_i − min_r u_ir. For queries where that could cost precision (a
    gap of more than 43 in float32, 354 in float64), and where values cannot be read
    (``torch.compile``, capture of a CUDA graph), log Σ_r exp(u_ir + w_jr) is added to the scores
    instead; and so is max_r, in the hard form. On a GPU, the soft form is `mixture_attention` of
    `shifted_keys`, which runs flash attention.

    Parameters
    ----------
    shifts : Tensor
        As in `shifted_keys`, ``(R, D)`` or ``(H, R, D)``; keys are ``(..., H, M, D)``.
    priors, normalized, hard
        As in `mixture_attention`.
    variances : float or Tensor, optional
        As in `mixture_attention`. If it is a tensor and R > 1, the variances may differ. Then
        q·k_j/σ_r² is no common term, and the result is `mixture_attention` of `shifted_keys`.
    distance : bool
        As in `mixture_attention`. Where it is False and the variances are equal, the score is
        scale · q_i·k_j and a term of i alone: shifts and priors cancel, get no gradient, and what
        remains is softmax attention.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> b = torch.randn(2, 8)  # (R, D)
    >>> shifted_mixture_attention(q, k, v, shifts=b).shape
    torch.Size([2, 4, 10, 8])
    """
    check_shifts(k, shifts)
    like = k.unsqueeze(-3).expand(*k.shape[:-2], shifts.shape[-2], -1, -1)  # a view: (..., R, M, D)
    parts = components_of(q, like, scale, hard, priors, variances, distance, normalized)
    flash = q.device.type == "cuda" and not hard  # by flash attention on all R M keys
    if shifts.shape[-2] == 1 or not parts.equal or flash:
        mixture: dict[str, Any] = {"priors": priors, "variances": variances, "distance": distance}
        mixture |= {"normalized": normalized, "hard": hard, "scale": scale}
        return mixture_attention(q, shifted_keys(k, shifts), v, **mixture, **mask.keywords)
    if distance and is_short(q, k, DENSE):
        like = like.to(parts.precisions) + shifts.unsqueeze(-2)
        return attend_densely(q, like, v, mask, parts, hard)
    with full_precision(q.device):
        if not distance:
            Q, K, V = (x.to(parts.dtype) for x in (q, k, v))
            return sdpa(Q, K, V, mask, parts.scale).to(q.dtype)
        Q, K = centre(q, k.unsqueeze(-3), parts, mask)
        tensors = separate(Q, K.squeeze(-3), shifts, parts)
        return attend(_Shifted(hard), v, mask, *tensors).to(q.dtype)


def separate(
    q: Tensor, k: Tensor, shifts: Tensor, parts: Components
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make the tensors of `_Shifted`: scale · q, k, u and w."""
    b = shifts.to(parts.precisions.dtype)
    squares = k.square().sum(-1).unsqueeze(-2) + b.square().sum(-1, keepdim=True)
    w = parts.log_weights[..., 0] - parts.scale * (b @ k.mT + squares / 2)  # (..., R, M)
    w = w.clamp(min=torch.finfo(b.dtype).min / 4)  # −∞ − −∞ would be NaN
    q = parts.scale * q
    return q, k, q @ b.mT, w


class _Shifted(NamedTuple):
    """Weights exp(s_ij), where s_ij = q_i·k_j + log Σ_r exp(u_ir + w_jr), or max_r if hard.

    The factored form multiplies exp(q_i·k_j + m_j) by Σ_r exp(u_ir − n_i) exp(w_jr − m_j), where
    the sum is far from underflow for all j: the r of the largest w_jr has a term of at least
    exp(min_r u_ir − n_i). Half the range of exponents for it leaves the other half to the weights:
    those that vanish are nothing beside the row's largest. Other queries add the logarithm. This is
    decided query by query, so that, if causal, no later token changes a bit of a result.
    """

    hard: bool
    factored: Tensor | None = None  # (b, N): which queries multiply; None: values were not read
    all: bool = False  # whether all do

    def adapt(self, ours: Tensors) -> _Shifted:
        """Choose the factored queries by u (b, N, R)."""
        u = ours[2]
        if self.hard or not has_concrete_values(u) or not u.numel():
            return self
        factored = u.amax(-1) - u.amin(-1) <= -math.log(torch.finfo(u.dtype).tiny) / 2
        return self._replace(factored=factored, all=bool(factored.all()))

    def scores(self, q: Tensor, k: Tensor, u: Tensor, w: Tensor) -> Tensor:
        """Return all s (..., N, M), of tensors as `weights` takes them, with any leading ones."""
        shifts = u.mT.unsqueeze(-1) + w.unsqueeze(-2)  # (..., R, N, M)
        return q @ k.mT + (shifts.max(-3).values if self.hard else shifts.logsumexp(-3))

    def weights(
        self, ours: Tensors, mask: BlockMask, block: Block, keep: bool
    ) -> tuple[Tensor, Any]:
        """Take q (b, N, D), k (b, M, D), u (b, N, R), w (b, R, M); see `_Most` of mixtures."""
        if self.factored is None:
            A, shares = self._add(ours, mask, block, keep)
            return A, (None, None, shares)
        A, sums = self._multiply(ours, mask, block)
        rows = None if self.all else self.factored[block.heads, block.rows, None]  # (b, C, 1)
        if rows is None or bool(rows.all()):
            return A, (None, sums, None)
        other, shares = self._add(ours, mask, block, keep)
        return torch.where(rows, A, other), (rows, sums.masked_fill_(~rows, 1), shares)

    def _add(self, ours: Tensors, mask: BlockMask, block: Block, keep: bool) -> tuple:
        """Return rows of A (b, C, m), and if `keep` the shares of components."""
        q, k, u, w = _cut_tensors(ours, block)
        scores = (u[..., r : r + 1] + w[:, r : r + 1] for r in range(w.shape[1]))
        total, shares = combine(scores, self.hard, keep)
        return mask.softmax(total.baddbmm_(q, k.mT), *block), shares

    def _multiply(self, ours: Tensors, mask: BlockMask, block: Block) -> tuple[Tensor, Tensor]:
        """Return rows of A (b, C, m), and those of Σ_r x_ir y_jr."""
        q, k, u, w = _cut_tensors(ours, block)
        x, y, most = _factors(u, w)
        A = mask.softmax((q @ k.mT).add_(most), *block)
        sums = x[..., :1] * y[:, :1]
        for r in range(1, y.shape[1]):  # faster than their product, which is so narrow
            sums.addcmul_(x[..., r : r + 1], y[:, r : r + 1])
        A.mul_(sums)
        return A.div_(A.sum(-1, keepdim=True)), sums

    def spread(
        self, A: Tensor, beyond: Tensor, kept: Any, ours: Tensors, grads: Tensors, block: Block
    ) -> None:
        """Add to `grads` what those rows of scores, with the gradient dS, give to our tensors."""
        dS = beyond.mul_(A)
        spread_product(dS, ours[:2], grads[:2], block)
        (factored, sums, shares), (du, dw), (_, rows, m) = kept, grads[2:], block
        if shares is not None:
            added = dS if factored is None else dS.masked_fill(factored, 0)
            for r, part in split_shares(added, shares):
                du[:, rows, r] += part.sum(-1)
                dw[:, r, :m] += part.sum(-2)
        if sums is not None:
            dS = dS if factored is None else dS.masked_fill_(~factored, 0)
            x, y, _ = _factors(*_cut_tensors(ours, block)[2:])
            dS.div_(sums)
            du[:, rows] += x * (dS @ y.mT)
            dw[..., :m] += y * (x.mT @ dS)


def _factors(u: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(u_ir − n_i), exp(w_jr − m_j) and m_j, with n_i = max_r u_ir, m_j = max_r w_jr."""
    most = w.amax(-2, keepdim=True)
    return (u - u.amax(-1, keepdim=True)).exp_(), (w - most).exp_(), most


def _cut_tensors(ours: Tensors, block: Block) -> Tensors:
    """View rows of q and u, and columns of k and w."""
    _, rows, m = block
    q, k, u, *ws = ours
    return [q[:, rows], k[:, :m], u[:, rows], *(w[..., :m] for w in ws)]


# --- the formulas, with the same arguments ---


@reference(shifted_mixture_attention, formulas.smgk)
def shifted_mixture_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, shifts: Any,
    priors: Any = None, variances: Any = None, distance: Any = True, normalized: Any = None,
    hard: Any = False,
) -> dict[str, Any]:  # fmt: skip
    """Check the shifts, priors and variances."""
    check_shifts(k, shifts)
    like = k.unsqueeze(-3).expand(*k.shape[:-2], shifts.shape[-2], -1, -1)  # (..., R, M, D)
    parts = components_of(q, like, scale, hard, priors, variances, distance, normalized)
    return {"shifts": shifts, "components": parts, "hard": hard}
