"""The formulas with the arguments of PyTorch's attention, which the fast forms have to equal.

A ``<name>_reference`` takes the arguments of ``<name>``, except those that only choose how it is
computed. Each function here checks the options of a mechanism and returns the arguments of its
formula in `formulas`; `reference` adds the calling convention. Formulas compute in float32 at
least.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from derived_attention import formulas
from derived_attention.common.checks import (
    Mechanism,
    check_count,
    wide,
)
from derived_attention.common.convention import reference
from derived_attention.delta.core import delta_attention, prepare_writes
from derived_attention.linear.core import (
    apply_feature_map,
    elu_feature_map,
    linear_attention,
    linear_attention_weights,
)
from derived_attention.linear_time.core import (
    check_maps,
    check_packed,
    check_projection,
    check_projections,
    check_weight,
    fmm_attention,
    linformer_attention,
    luna_attention,
    performer_attention,
)
from derived_attention.mixture.components import components_of, per_component
from derived_attention.mixture.core import (
    hard_mixture_attention,
    linear_mixture_attention,
    mixture_attention,
)
from derived_attention.mixture.shifted import check_shifts, shifted_mixture_attention
from derived_attention.primal.core import (
    check_output,
    check_scores,
    cosine_feature_map,
    landmarks,
    primal_attention,
)
from derived_attention.sparse_coding.core import lasso_attention, ridge_attention
from derived_attention.sparse_coding.solver import Options, check_lasso, penalty, prepare_codes

Arguments = dict[str, Any]


def checked(feature_map: Mechanism) -> Mechanism:
    """Return φ with a check of its results."""
    return functools.partial(apply_feature_map, feature_map)


@reference(linear_attention, formulas.linear, weights=linear_attention_weights)
def linear_attention_reference(q, k, v, mask, scale, *, feature_map=elu_feature_map) -> Arguments:
    """Check the feature map's results."""
    return {"feature_map": checked(feature_map)}


@reference(linformer_attention, formulas.linformer)
def linformer_attention_reference(
    q, k, v, mask, scale, *, key_projection, value_projection=None
) -> Arguments:
    """Check E and F; F is E where it is left out."""
    E, G = check_projections(q, k, mask, key_projection, value_projection)
    return {"key_projection": E, "value_projection": G}


@reference(performer_attention, formulas.performer)
def performer_attention_reference(q, k, v, mask, scale, *, projection) -> Arguments:
    """Check W."""
    return {"projection": check_projection(q, projection)}


@reference(fmm_attention, formulas.fmm)
def fmm_attention_reference(
    q, k, v, mask, scale, *, window, near, far, feature_maps=(elu_feature_map,)
) -> Arguments:
    """Check both fields."""
    maps = [checked(phi) for phi in check_maps(feature_maps)]
    near, far = check_weight("near", near, q), check_weight("far", far, q)
    window = check_count("window", window, 0)
    return {"near": near, "far": far, "window": window, "feature_maps": maps}


@reference(luna_attention, formulas.luna)
def luna_attention_reference(q, k, v, mask, scale, *, packed) -> Arguments:
    """Check P."""
    return {"packed": check_packed(q, mask, packed)}


@reference(mixture_attention, formulas.mgk, components=True)
def mixture_attention_reference(
    q, k, v, mask, scale, *, priors=None, variances=None, distance=True, normalized=None,
    hard=False
) -> Arguments:  # fmt: skip
    """Check priors and variances, and put them together."""
    parts = components_of(q, k, scale, hard, priors, variances, distance, normalized)
    return {"components": parts, "hard": hard}


@reference(hard_mixture_attention, formulas.mgk, components=True)
def hard_mixture_attention_reference(
    q, k, v, mask, scale, *, priors=None, variances=None, distance=True, normalized=None
) -> Arguments:
    """Do what `mixture_attention_reference` does with ``hard=True``."""
    parts = components_of(q, k, scale, True, priors, variances, distance, normalized)
    return {"components": parts, "hard": True}


@reference(shifted_mixture_attention, formulas.smgk)
def shifted_mixture_attention_reference(
    q, k, v, mask, scale, *, shifts, priors=None, variances=None, distance=True, normalized=None,
    hard=False
) -> Arguments:  # fmt: skip
    """Check the shifts, priors and variances."""
    check_shifts(k, shifts)
    like = k.unsqueeze(-3).expand(*k.shape[:-2], shifts.shape[-2], -1, -1)  # (..., R, M, D)
    parts = components_of(q, like, scale, hard, priors, variances, distance, normalized)
    return {"shifts": shifts, "components": parts, "hard": hard}


@reference(linear_mixture_attention, formulas.mlk, components=True)
def linear_mixture_attention_reference(
    q, k, v, mask, scale, *, priors=None, feature_map=elu_feature_map
) -> Arguments:
    """Check the priors, and the feature map's results."""
    return {"priors": per_component("priors", priors, k), "feature_map": checked(feature_map)}


@reference(primal_attention, formulas.primal, per_key=True, drops=True)
def primal_attention_reference(
    q, k, v, mask, scale, *, W_e, W_r, W_o, data_dependent=True, feature_map=cosine_feature_map,
    sampling="even", cross=False, dropout_p=0.0
) -> Arguments:  # fmt: skip
    """Check the weights, and return the map from the sequence to the rows of f."""
    check_scores(q, k.shape[-2], mask, W_e, W_r, data_dependent, sampling)
    check_output(q, k.shape[-2], W_o, cross, W_e.shape[-1])
    (N, M), n = (x.shape[-2] for x in (q, k)), W_e.shape[-2]
    phi, dtype = checked(feature_map), wide(q)
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


@reference(ridge_attention, formulas.ridge, per_key=True)
def ridge_attention_reference(
    q, k, v, mask, scale, *, lam=0.1, exclude_self=False, prefix=0
) -> Arguments:
    """Check λ, and return which keys are atoms of which query."""
    options = Options(mask.is_causal, exclude_self, prefix)
    q, *_, present = prepare_codes(q, k, v, mask, None, options)
    lam = penalty("lam", lam, q)[..., None, None]
    return {"lam": lam, "atoms": options.atoms(q.shape[-2], present)}


@reference(lasso_attention, formulas.lasso, per_key=True)
def lasso_attention_reference(
    q, k, v, mask, scale, *, lam=0.1, rho=10.0, iterations=5, exclude_self=False, power=None,
    prefix=0, residuals=None
) -> Arguments:  # fmt: skip
    """Check λ, ρ and the steps, and return which keys are atoms of which query."""
    options = Options(mask.is_causal, exclude_self, prefix, iterations, power)
    q, *_, present, lam, rho = check_lasso(q, k, v, mask, None, options, lam, rho)
    numbers = {"lam": lam[..., None, None], "rho": rho[..., None, None]}
    numbers |= {"iterations": iterations, "power": power, "residuals": residuals}
    return numbers | {"atoms": options.atoms(q.shape[-2], present)}


@reference(delta_attention, formulas.delta, per_key=True)
def delta_attention_reference(
    q, k, v, mask, scale, *, beta=None, decay=None, erase=True, state=None
) -> Arguments:
    """Check strengths, decays and the state, and fill in what is left out."""
    writes = prepare_writes(k, v, mask, beta, decay, erase, state)
    decay = torch.zeros_like(writes.beta) if writes.decay is None else writes.decay
    return {"beta": writes.beta, "decay": decay, "erase": erase, "state": writes.state}
