"""Primal-Attention: projection scores instead of attention weights (chapters 11 and 12).

The equations of this module are those of [Chen2023], for queries q_i, keys k_j, a feature map g and
F = f(X), n rows of the sequence X (or its sketch), with W_e, W_r (n, s) and W_o (Dv, 2s) ::

    e(x_i) = (Fᵀ W_e)ᵀ g(q_i),    r(x_j) = (Fᵀ W_r)ᵀ g(k_j),    o_i = W_o [e(x_i); r(x_i)]
    J = ½ Σ_i e_iᵀ Λ e_i + ½ Σ_j r_jᵀ Λ r_j − tr(W_eᵀ W_r)

No matrix of queries and keys is formed: (Fᵀ W_e) is (D, s). Equivalently, e(x_i) is
Σ_m (x_m · g(q_i)) w_m, linear attention over the n rows of F, whose values w_m are parameters.
The formula is written in that form as a reference, and the causal scores are computed so.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from derived_attention import formulas
from derived_attention.common.checks import (
    FLOATING,
    accumulation_dtype,
    check_flag,
    check_no_bias,
    check_parameter,
)
from derived_attention.common.convention import full_precision, mechanism, prepare, reference
from derived_attention.common.masks import Mask
from derived_attention.common.running import running_sums
from derived_attention.linear.core import FeatureMap, apply_feature_map, causal_sums

ROWS = 10  # rows of f(X) for each direction, as in Appendix B.1
SAMPLINGS = ("even", "random")


def cosine_feature_map(x: Tensor) -> Tensor:
    """g(x) = x / ‖x‖, whose kernel is the cosine of the angle; 0, without a gradient, at x = 0.

    In float32 at least. It divides by Σ|x_i| first: then ‖x‖² is from 1/D to 1, or x = 0.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    total = x.detach().abs().sum(-1, keepdim=True)
    x = x / total.masked_fill(total == 0, math.inf)
    return x * x.square().sum(-1, keepdim=True).clamp(min=0.5 / x.shape[-1]).rsqrt()


# --- the mechanism --------------------------------------------------------------------------------


@mechanism(per_key=True, drops=True)
def primal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    W_e: Any,
    W_r: Any,
    W_o: Any,
    data_dependent: bool = True,
    feature_map: Any = cosine_feature_map,
    sampling: Any = "even",
    cross: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """Primal-Attention, Algorithm 1 of [Chen2023]: o_i = W_o [e(x_i); r(x_i)].

    O((N + M) p s + n p s) operations, and no matrix of queries and keys. There are no attention
    weights: v is not averaged; the projection weights depend on it.

    Parameters
    ----------
    q, k, v : Tensor
        Queries ``(..., H, N, D)``, keys ``(..., H, M, D)`` and the sequence X of f(X),
        ``(..., H, M, p)``, with p the number of features. M = N unless `cross`.
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean:
        True where a key is present. Floating: 0, or -inf; -8192 and below count as -inf. An absent
        key is in no row of f(V), and its score r is 0.
    dropout_p : float
        Probability of dropping a score; there are no weights to drop.
    is_causal : bool
        Position i depends on positions j ≤ i only. If `data_dependent`, row m of f for position i
        is the sum of the tokens j ≤ i with j mod n = m, divided by i // n + 1, for ``"even"`` and
        ``"random"`` alike; while i < n a row has at most one token. For a sketch S, row m is
        Σ_{j ≤ i} S_mj x_j. If not `data_dependent`, q and k become running means before g, as in
        Listing 1.
    scale : float, optional
        Finite and positive; multiplies q before g. No influence if g is the cosine map.
    W_e, W_r : Tensor
        ``(n, s)`` or ``(H, n, s)``: n rows for each of s directions; ``(p, s)`` or ``(H, p, s)`` if
        not `data_dependent`. For a sequence shorter than n only the first M rows are used.
    W_o : Tensor
        ``(Dv, 2 s)`` or ``(H, Dv, 2 s)``: the map from scores to the output.
    data_dependent : bool
        Whether the projection weights are f(V)ᵀ W_e and f(V)ᵀ W_r, or W_e and W_r.
    feature_map : callable
        g, from ``(..., D)`` to ``(..., p)``, for each token alone.
    sampling : str or Tensor
        The rows of f(V), if there are more than n tokens: ``"even"``, evenly spaced ones;
        ``"random"``, drawn without replacement in each call, in their order; or a sketch S
        ``(n, L)``, or ``(H, n, L)``, with L ≥ M, such as a Gaussian one: f(V) = S V.
    cross : bool
        Whether queries and keys belong to different sequences. Then r, which belongs to keys, is
        added to every query as its mean over the keys that are present; if causal, over j ≤ i.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> W_e, W_r, W_o = torch.randn(5, 3), torch.randn(5, 3), torch.randn(8, 6)
    >>> primal_attention(q, k, v, W_e=W_e, W_r=W_r, W_o=W_o).shape
    torch.Size([2, 4, 10, 8])
    """
    projection = Projection(W_e, W_r, data_dependent, feature_map, sampling)
    scores = scores_of(q, k, v, mask, scale, projection)
    return join(scores, mask, W_o, cross, dropout_p).to(q.dtype)


def primal_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    W_e: Tensor,
    W_r: Tensor,
    scale: float | None = None,
    data_dependent: bool = True,
    feature_map: FeatureMap = cosine_feature_map,
    sampling: str | Tensor = "even",
) -> tuple[Tensor, Tensor]:
    """Return the scores e (..., N, s) of queries and r (..., M, s) of keys, eq. 5 of [Chen2023].

    Arguments and errors are those of `primal_attention`. r is zero where a key may not be attended.
    Scores are in float32 at least.
    """
    mask, scale = prepare(q, k, v, attn_mask, is_causal, scale)
    check_parameter("v", v, q)  # `prepare` takes None
    projection = Projection(W_e, W_r, data_dependent, feature_map, sampling)
    return scores_of(q, k, v, mask, scale, projection)[:2]


class Projection(NamedTuple):
    """The options of `primal_attention` that define its scores."""

    W_e: Tensor
    W_r: Tensor
    data_dependent: bool = True
    feature_map: FeatureMap = cosine_feature_map
    sampling: str | Tensor = "even"


class Scores(NamedTuple):
    """Scores of queries (..., N, s) and of keys (..., M, s), and which rows of W were used."""

    e: Tensor
    r: Tensor
    used: Tensor | None  # (..., n); None for all


def scores_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, by: Projection
) -> Scores:
    """Return the scores e and r, zero for absent keys, and for queries without any key."""
    check_scores(q, k.shape[-2], mask, by.W_e, by.W_r, by.data_dependent, by.sampling)
    dtype, used = torch.promote_types(q.dtype, torch.float32), None
    W_e, W_r = by.W_e.to(dtype), by.W_r.to(dtype)
    if by.data_dependent and mask.is_causal:
        e = _causal_scores(by, v, q, W_e, scale)  # (..., N, s)
        r = _causal_scores(by, v, k, W_r, None)  # (..., M, s)
        if not isinstance(by.sampling, Tensor):
            used = torch.arange(W_e.shape[-2], device=q.device) < k.shape[-2]
    else:
        if mask.is_causal:
            q, k = running_mean(q), running_mean(k)
        if by.data_dependent:
            with full_precision(q.device):
                rows, used = landmarks(v.to(W_e.dtype), W_e.shape[-2], mask, by.sampling)
                n = rows.shape[-2]
                W_e, W_r = (rows.mT @ W[..., :n, :] for W in (W_e, W_r))  # (..., p, s)
        e, r = _project(by, q, W_e, scale), _project(by, k, W_r, None)  # (..., N, s), (..., M, s)
    present = mask.present(r.shape[-2])
    if present is not None:
        return Scores(e * present.any(-1)[..., None, None], r * present.unsqueeze(-1), used)
    return Scores(e if r.shape[-2] else 0 * e, r, used)


def _project(by: Projection, x: Tensor, W: Tensor, scale: float | None) -> Tensor:
    """Return Wᵀ g(scale · x_i) for each i."""
    phi = apply_feature_map(by.feature_map, x if scale is None else scale * x)
    check_width(phi, W.shape[-2], by.data_dependent)
    with full_precision(x.device):
        return phi @ W


def _causal_scores(by: Projection, x: Tensor, q: Tensor, W: Tensor, scale: float | None) -> Tensor:
    """Return Σ_{j ≤ i} (x_j · g(q_i)) u_j, where the value u_j of token j is row j mod n of W.

    A row has i // n + 1 tokens, or one less, and the sum is divided by that.
    """
    n, M, sketch = W.shape[-2], x.shape[-2], by.sampling
    phi = apply_feature_map(by.feature_map, q if scale is None else scale * q)
    check_width(phi, x.shape[-1], True)
    with full_precision(q.device):
        if isinstance(sketch, Tensor):
            keys = sketch[..., :M].to(W.dtype).mT @ W
            return causal_sums(phi, x.to(phi.dtype), keys)
        u = W[..., torch.arange(M, device=W.device) % n, :]
        sums = causal_sums(phi, x.to(phi.dtype), u)
    # In cross-attention there may be more queries than tokens.
    last = torch.arange(q.shape[-2], device=q.device).clamp(max=max(M - 1, 0))
    return sums / (last // n + 1).unsqueeze(-1)


def running_mean(x: Tensor) -> Tensor:
    """Return the mean of the tokens j ≤ i of x (..., N, D) for each i, as in Listing 1."""
    counts = torch.arange(1, x.shape[-2] + 1, dtype=accumulation_dtype(x), device=x.device)
    return running_sums(x) / counts.unsqueeze(-1)


def landmarks(
    x: Tensor, n: int, mask: Mask, sampling: str | Tensor = "even"
) -> tuple[Tensor, Tensor | None]:
    """Return f(x), at most n rows of x (..., M, p), and which of n rows are used: (..., n).

    Of the c tokens that are present min(n, c) are taken, in their order, so that row m of the
    weights belongs to the m-th of them; other rows are zeros. A sketch S gives S x, and None, as it
    uses all rows.
    """
    M, present = x.shape[-2], mask.present(x.shape[-2])
    if isinstance(sampling, Tensor):
        x = x if present is None else x * present.unsqueeze(-1)
        return sampling[..., :M].to(x.dtype) @ x, None
    place = torch.arange(n, device=x.device)
    if present is None:
        if M <= n:
            return x, place < M
        if sampling == "even":  # the same as below, without a sort
            return x[..., place * (M - 1) // max(n - 1, 1), :], place < M
        present = torch.ones(M, dtype=torch.bool, device=x.device)
    count = present.sum(-1, keepdim=True)  # (..., 1)
    used, n = place < count, min(n, M)  # (..., n)
    if sampling == "random":
        noise = torch.rand(present.shape, device=x.device).masked_fill(~present, -1)
        drawn = noise.topk(n).indices
        keys = drawn + M * present.logical_not().gather(-1, drawn)  # sorts absent tokens last
        chosen = keys.sort(-1).values % max(M, 1)
    else:
        order = present.logical_not().to(torch.uint8).sort(stable=True, dim=-1).indices
        last = (count - 1).clamp(min=0)
        gaps = (count.clamp(max=n) - 1).clamp(min=1)
        chosen = order.gather(-1, (place[:n] * last // gaps).minimum(last))
    chosen = chosen.unsqueeze(-1).expand(*x.shape[:-2], n, x.shape[-1])
    return x.gather(-2, chosen) * used[..., :n].unsqueeze(-1), used


def join(scores: Scores, mask: Mask, W_o: Tensor, cross: bool, dropout_p: float) -> Tensor:
    """Return W_o [e; r], with the scores r of keys brought to the queries."""
    e, r, _ = scores
    check_output(e, r.shape[-2], W_o, cross, e.shape[-1])
    N, M, s = e.shape[-2], r.shape[-2], e.shape[-1]
    if cross and mask.is_causal and M:
        r = running_mean(r)[..., torch.arange(N, device=r.device).clamp(max=M - 1), :]
    elif cross:
        present = mask.present(M)
        count = max(M, 1) if present is None else present.sum(-1)[..., None, None].clamp(min=1)
        r = (r.sum(-2, keepdim=True) / count).expand(*e.shape[:-1], s)
    with full_precision(e.device):
        return F.dropout(torch.cat([e, r], -1), dropout_p) @ W_o.to(e.dtype).mT


# --- checks ---------------------------------------------------------------------------------------


def check_output(q: Tensor, M: int, W_o: Tensor, cross: bool, s: int) -> None:
    """Check W_o for s directions, and that each query has a key of its own unless `cross`."""
    check_flag("cross", cross)
    _check_weights("W_o", W_o, q, 2 * s)
    if not cross and q.shape[-2] != M:
        raise ValueError(
            f"k has shape (..., {M}, D); expected as many keys as queries, {q.shape[-2]}, unless "
            "cross=True"
        )


def check_scores(
    q: Tensor, M: int, mask: Mask, W_e: Tensor, W_r: Tensor, data_dependent: bool,
    sampling: str | Tensor,
) -> None:  # fmt: skip
    """Check the weights of the scores, and the sampling or sketch."""
    check_flag("data_dependent", data_dependent)
    _check_weights("W_e", W_e, q)
    _check_weights("W_r", W_r, q)
    if W_r.shape[-2:] != W_e.shape[-2:]:
        raise ValueError(
            f"W_r has shape {tuple(W_r.shape)}; expected the rows and directions of W_e, "
            f"{tuple(W_e.shape)}"
        )
    if mask.given is not None:
        check_no_bias("attn_mask", mask.given, "there are no weights of keys to change")
    if isinstance(sampling, Tensor):
        _check_weights("sampling", sampling, q)
        n = W_e.shape[-2]
        if sampling.shape[-2] != n or sampling.shape[-1] < M:
            raise ValueError(
                f"sampling has shape {tuple(sampling.shape)}; expected {n} rows, as W_e, and "
                f"columns for {M} tokens"
            )
    elif sampling not in SAMPLINGS:
        expected = ", ".join(SAMPLINGS)
        raise ValueError(f"sampling is {sampling!r}; expected one of {expected}, or a sketch")


def _check_weights(name: str, W: Tensor, q: Tensor, columns: int | None = None) -> None:
    """Check for a floating (rows, columns) or (H, rows, columns), not empty, on the device of q."""
    if not isinstance(W, Tensor) or W.dtype not in FLOATING or W.device != q.device:
        check_parameter(name, W, q)  # raises
    fits = W.dim() == 2 or (W.dim() == 3 and q.shape[-3:-2] == W.shape[:1])
    if not fits or 0 in W.shape[-2:] or W.shape[-1] != (columns or W.shape[-1]):
        size = columns or "s"
        heads = f", or ({q.shape[-3]}, rows, {size}) for each head" if q.dim() > 2 else ""
        raise ValueError(f"{name} has shape {tuple(W.shape)}; expected (rows, {size}){heads}")


def check_width(phi: Tensor, p: int, data_dependent: bool) -> None:
    """Check that a feature map makes as many features as the weights have rows."""
    if phi.shape[-1] != p:
        source = "v has features" if data_dependent else "W_e has rows"
        raise ValueError(
            f"feature_map makes {phi.shape[-1]} features; expected {p}, as many as {source}"
        )


# --- what the loss of the paper measures ----------------------------------------------------------


def ksvd_objective(e: Tensor, r: Tensor, W_e: Tensor, W_r: Tensor, Lambda: Tensor) -> Tensor:
    """J = ½ Σ_i e_iᵀ Λ e_i + ½ Σ_j r_jᵀ Λ r_j − tr(W_eᵀ W_r), eq. 1 of [Chen2023].

    It is a quadratic form in (W_e, W_r), so it is 0 wherever its gradient is; being 0 implies
    little else (chapter 11).

    Parameters
    ----------
    e, r : Tensor
        Scores ``(..., N, s)`` and ``(..., M, s)``, as from `primal_scores`.
    W_e, W_r : Tensor
        ``(..., n, s)``.
    Lambda : Tensor
        The diagonal of Λ, ``(..., s)``; positive in the paper.

    Returns
    -------
    Tensor
        ``(...,)``.
    """
    energy = (e.square().sum(-2) + r.square().sum(-2)) * Lambda / 2  # (..., s)
    return (energy - (W_e * W_r).sum(-2)).sum(-1)


class Collectors(threading.local):  # torch.compile can trace it, unlike a ContextVar
    """The lists that `ksvd_objectives` fills in this thread, the innermost last."""

    def __init__(self) -> None:
        self.lists: list[list[Tensor]] = []


collectors = Collectors()


@contextlib.contextmanager
def ksvd_objectives() -> Iterator[list[Tensor]]:
    """Collect J ``(B, H)`` of every regularised `PrimalAttention` that runs in a with block.

    It collects from this thread only. Run the backward pass outside the block, because
    checkpointing runs layers again during the backward pass.

    J is `ksvd_objective` with means over the present tokens instead of sums, so that Λ does not
    depend on the length, with the squares of ``Lambda`` for Λ, and with the rows of the weights
    that were used.

    Examples
    --------
    >>> model, x = PrimalAttention(16, 4, regularised=True), torch.randn(2, 10, 16)
    >>> with ksvd_objectives() as objectives:
    ...     output = model(x, x, x)[0]
    >>> squares = [J.mean(-1).square().mean() for J in objectives]  # one for each layer
    >>> loss = output.square().mean() + 0.1 * sum(squares) / len(squares)
    """
    collectors.lists.append([])
    try:
        yield collectors.lists[-1]
    finally:
        collectors.lists.pop()


# --- the formulas, with the same arguments ---


@reference(primal_attention, formulas.primal, per_key=True, drops=True)
def primal_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, W_e: Any, W_r: Any,
    W_o: Any, data_dependent: Any = True, feature_map: Any = cosine_feature_map,
    sampling: Any = "even", cross: Any = False, dropout_p: Any = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Check the weights, and return the map from the sequence to the rows of f."""
    check_scores(q, k.shape[-2], mask, W_e, W_r, data_dependent, sampling)
    check_output(q, k.shape[-2], W_o, cross, W_e.shape[-1])
    (N, M), n = (x.shape[-2] for x in (q, k)), W_e.shape[-2]
    phi, dtype = functools.partial(apply_feature_map, feature_map), accumulation_dtype(q)
    arguments = {"W_e": W_e, "W_r": W_r, "W_o": W_o, "cross": cross, "dropout_p": dropout_p}
    if not data_dependent:
        running = mask.is_causal
        g = (lambda x: phi(formulas.running_mean(x))) if running else phi
        return arguments | {"feature_map": g}
    if not mask.is_causal:
        identity = torch.eye(M, dtype=dtype, device=q.device).expand(*v.shape[:-1], M)
        rows = landmarks(identity, n, mask, sampling)[0]  # (..., n', M)
        W_e, W_r = (W[..., : rows.shape[-2], :] for W in (W_e, W_r))
        return arguments | {"W_e": W_e, "W_r": W_r, "feature_map": phi, "rows": rows}
    past = [torch.ones(L, M, dtype=dtype, device=q.device).tril() for L in (N, M)]
    if isinstance(sampling, Tensor):
        rows = sampling
    else:
        rows = F.one_hot(torch.arange(M, device=q.device) % n, n).mT
        steps = (torch.arange(len(x), device=q.device).clamp(max=max(M - 1, 0)) for x in past)
        # a row is the mean of i // n + 1 tokens
        past = [x / (i // n + 1)[:, None] for x, i in zip(past, steps, strict=True)]
    return arguments | {"feature_map": phi, "rows": rows[..., :M].to(dtype), "past": past}
