"""The formulas with the arguments of PyTorch's attention, which the fast forms have to equal.

A ``<name>_reference`` takes the arguments of ``<name>``, except those that only choose how it is
computed. Each function here checks the options of a mechanism and returns the arguments of its
formula in `formulas`; `reference` adds the calling convention. Formulas compute in float32 at
least.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from derived_attention import formulas
from derived_attention.batch_norm.core import check_normalization
from derived_attention.common.checks import (
    Mechanism,
    check_callable,
    check_count,
    check_flag,
    check_query_mask,
    wide,
)
from derived_attention.common.convention import in_full, mechanism
from derived_attention.common.filters import is_boxcar
from derived_attention.common.masks import Mask
from derived_attention.convolutional.core import check_filters, check_places
from derived_attention.delta.core import prepare_writes
from derived_attention.linear.core import (
    apply_feature_map,
    elu_feature_map,
    linear_attention_weights,
)
from derived_attention.linear_time.core import (
    check_maps,
    check_packed,
    check_projection,
    check_projections,
    check_weight,
)
from derived_attention.mixture.components import components_of, per_component
from derived_attention.mixture.shifted import check_shifts
from derived_attention.mra.core import check_blocks, mra_attention_weights
from derived_attention.multiresolution.core import check_scales as check_pairs
from derived_attention.primal.core import check_output, check_scores, cosine_feature_map, landmarks
from derived_attention.scaled_heads.core import check_scales, of_heads
from derived_attention.softmax.core import attention_weights
from derived_attention.softmax.sink import check_sink, sink_attention_weights
from derived_attention.sparse.core import check_fixed
from derived_attention.sparse_coding.solver import Options, check_lasso, penalty, prepare_codes

Arguments = dict[str, Any]


def reference(formula: Mechanism, **properties: Any) -> Callable[[Mechanism], Mechanism]:
    """Give a formula the calling convention, with the options of the decorated function."""

    def decorate(check: Mechanism) -> Mechanism:
        @functools.wraps(check)
        def run(
            q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, **options: Any
        ) -> Any:
            arguments = check(q, k, v, mask, scale, **options)
            return in_full(formula)(q, k, v, mask, scale, **arguments)

        run.__doc__ = formula.__doc__
        return mechanism(run, **properties)

    return decorate


def plain(attention: Mechanism) -> Mechanism:
    """Give a mechanism the arguments of a formula."""
    check_callable("attention", attention)
    return lambda q, k, v, mask, scale: attention(q, k, v, scale=scale, **mask.keywords)


def checked(feature_map: Mechanism) -> Mechanism:
    """Return φ with a check of its results."""
    return functools.partial(apply_feature_map, feature_map)


@reference(formulas.softmax, weights=attention_weights)
def softmax_attention_reference(q, k, v, mask, scale) -> Arguments:
    """Return no arguments: softmax attention has no options."""
    return {}


@reference(formulas.linear, weights=linear_attention_weights)
def linear_attention_reference(q, k, v, mask, scale, *, feature_map=elu_feature_map) -> Arguments:
    """Check the feature map's results."""
    return {"feature_map": checked(feature_map)}


@reference(formulas.window)
def window_attention_reference(q, k, v, mask, scale, *, window) -> Arguments:
    """Check the pattern."""
    return {"window": check_count("window", window, 0)}


@reference(formulas.strided)
def strided_attention_reference(q, k, v, mask, scale, *, stride) -> Arguments:
    """Check the pattern."""
    return {"stride": check_count("stride", stride, 1)}


@reference(formulas.fixed)
def fixed_attention_reference(q, k, v, mask, scale, *, stride, summary=1) -> Arguments:
    """Check the pattern."""
    check_fixed(stride, summary)
    return {"stride": stride, "summary": summary}


@reference(formulas.bn)
def normalized_attention_reference(
    q, k, v, mask, scale, *, beta=1.0, eps=None, attention=softmax_attention_reference
) -> Arguments:
    """Check β and ε."""
    beta, eps = check_normalization(beta, eps, q)
    beta = beta[..., None] if isinstance(beta, Tensor) else beta  # (H, 1, 1, 1)
    return {"beta": beta, "eps": eps, "attention": plain(attention)}


@reference(formulas.sh)
def scaled_heads_attention_reference(
    q, k, v, mask, scale, *, scales, class_token=False, attention=softmax_attention_reference
) -> Arguments:
    """Check the scales."""
    check_scales(scales, q, mask)
    check_flag("class_token", class_token)
    return {"scales": scales, "class_token": class_token, "attention": plain(attention)}


@reference(formulas.bn_sh)
def normalized_scaled_heads_attention_reference(
    q, k, v, mask, scale, *, scales, class_token=False, beta=1.0, eps=None,
    attention=softmax_attention_reference
) -> Arguments:  # fmt: skip
    """Check the scales, ε, and the β of each head."""
    check_scales(scales, q, mask)
    check_flag("class_token", class_token)
    _, eps = check_normalization(beta, eps, q)
    each = [check_normalization(of_heads(beta, [h]), eps, q[..., 0, :, :])[0]
            for h in range(q.shape[-3])]  # fmt: skip
    pooled = {"scales": scales, "class_token": class_token, "attention": plain(attention)}
    return pooled | {"beta": each, "eps": eps}


@reference(formulas.conv1d, alone=False)
def conv1d_attention_reference(
    q, k, v, mask, scale, *, weight, key_weight=None, query_mask=None,
    attention=softmax_attention_reference
) -> Arguments:  # fmt: skip
    """Check the filters."""
    check_query_mask(query_mask, q)
    weight, key_weight = check_filters(q, 1, weight, key_weight)
    filters = {"weight": weight, "key_weight": key_weight, "query_mask": query_mask}
    return filters | {"attention": plain(attention)}


@reference(formulas.conv2d, alone=False)
def conv2d_attention_reference(
    q, k, v, mask, scale, *, weight, key_weight=None, query_mask=None, grid, class_token=False,
    attention=softmax_attention_reference
) -> Arguments:  # fmt: skip
    """Check the filters, and that tokens have places."""
    check_places({"q": q, "k": k}, grid, class_token, mask.is_causal)
    check_query_mask(query_mask, q)
    weight, key_weight = check_filters(q, 2, weight, key_weight)
    filters = {"weight": weight, "key_weight": key_weight, "query_mask": query_mask}
    return filters | {"grid": grid, "class_token": class_token, "attention": plain(attention)}


@reference(formulas.mrs, alone=False)
def multiresolution_attention_reference(
    q, k, v, mask, scale, *, scales, key_scales=None, filters="boxcar", class_token=False,
    query_mask=None, attention=softmax_attention_reference
) -> Arguments:  # fmt: skip
    """Check the scales, and return them in pairs."""
    check_query_mask(query_mask, q)
    if not is_boxcar(filters):
        kind = type(filters).__name__
        raise ValueError(f'filters is of type {kind}; expected "boxcar": wavelets have no formula')
    pairs = check_pairs(scales, key_scales, q, mask, class_token)
    arguments = {"scales": pairs, "class_token": class_token, "query_mask": query_mask}
    return arguments | {"attention": plain(attention)}


@reference(formulas.linformer)
def linformer_attention_reference(
    q, k, v, mask, scale, *, key_projection, value_projection=None
) -> Arguments:
    """Check E and F; F is E where it is left out."""
    E, G = check_projections(q, k, mask, key_projection, value_projection)
    return {"key_projection": E, "value_projection": G}


@reference(formulas.performer)
def performer_attention_reference(q, k, v, mask, scale, *, projection) -> Arguments:
    """Check W."""
    return {"projection": check_projection(q, projection)}


@reference(formulas.fmm)
def fmm_attention_reference(
    q, k, v, mask, scale, *, window, near, far, feature_maps=(elu_feature_map,)
) -> Arguments:
    """Check both fields."""
    maps = [checked(phi) for phi in check_maps(feature_maps)]
    near, far = check_weight("near", near, q), check_weight("far", far, q)
    window = check_count("window", window, 0)
    return {"near": near, "far": far, "window": window, "feature_maps": maps}


@reference(formulas.luna)
def luna_attention_reference(q, k, v, mask, scale, *, packed) -> Arguments:
    """Check P."""
    return {"packed": check_packed(q, mask, packed)}


@reference(formulas.mra, weights=mra_attention_weights, alone=False)
def mra_attention_reference(
    q, k, v, mask, scale, *, block=32, kept=4, over="rows", sparse=False, query_mask=None
) -> Arguments:
    """Check the blocks."""
    check_blocks(mask, q, block, kept, over, sparse, query_mask)
    sizes = {"block": block, "kept": kept, "over": over, "sparse": sparse}
    return sizes | {"query_mask": query_mask}


@reference(formulas.mgk, components=True)
def mixture_attention_reference(
    q, k, v, mask, scale, *, priors=None, variances=None, distance=True, normalized=None,
    hard=False
) -> Arguments:  # fmt: skip
    """Check priors and variances, and put them together."""
    parts = components_of(q, k, scale, hard, priors, variances, distance, normalized)
    return {"components": parts, "hard": hard}


@reference(formulas.mgk, components=True)
def hard_mixture_attention_reference(
    q, k, v, mask, scale, *, priors=None, variances=None, distance=True, normalized=None
) -> Arguments:
    """Do what `mixture_attention_reference` does with ``hard=True``."""
    parts = components_of(q, k, scale, True, priors, variances, distance, normalized)
    return {"components": parts, "hard": True}


@reference(formulas.smgk)
def shifted_mixture_attention_reference(
    q, k, v, mask, scale, *, shifts, priors=None, variances=None, distance=True, normalized=None,
    hard=False
) -> Arguments:  # fmt: skip
    """Check the shifts, priors and variances."""
    check_shifts(k, shifts)
    like = k.unsqueeze(-3).expand(*k.shape[:-2], shifts.shape[-2], -1, -1)  # (..., R, M, D)
    parts = components_of(q, like, scale, hard, priors, variances, distance, normalized)
    return {"shifts": shifts, "components": parts, "hard": hard}


@reference(formulas.mlk, components=True)
def linear_mixture_attention_reference(
    q, k, v, mask, scale, *, priors=None, feature_map=elu_feature_map
) -> Arguments:
    """Check the priors, and the feature map's results."""
    return {"priors": per_component("priors", priors, k), "feature_map": checked(feature_map)}


@reference(formulas.primal, per_key=True, drops=True)
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


@reference(formulas.ridge, per_key=True)
def ridge_attention_reference(
    q, k, v, mask, scale, *, lam=0.1, exclude_self=False, prefix=0
) -> Arguments:
    """Check λ, and return which keys are atoms of which query."""
    options = Options(mask.is_causal, exclude_self, prefix)
    q, *_, present = prepare_codes(q, k, v, mask, None, options)
    lam = penalty("lam", lam, q)[..., None, None]
    return {"lam": lam, "atoms": options.atoms(q.shape[-2], present)}


@reference(formulas.lasso, per_key=True)
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


@reference(formulas.delta, per_key=True)
def delta_attention_reference(
    q, k, v, mask, scale, *, beta=None, decay=None, erase=True, state=None
) -> Arguments:
    """Check strengths, decays and the state, and fill in what is left out."""
    writes = prepare_writes(k, v, mask, beta, decay, erase, state)
    decay = torch.zeros_like(writes.beta) if writes.decay is None else writes.decay
    return {"beta": writes.beta, "decay": decay, "erase": erase, "state": writes.state}


@reference(formulas.sink, weights=sink_attention_weights)
def sink_attention_reference(q, k, v, mask, scale, *, bias) -> Arguments:
    """Check b."""
    return {"bias": check_sink(bias, q)}


@reference(formulas.selected)
def selected_attention_reference(q, k, v, mask, scale, *, block, kept) -> Arguments:
    """Check the blocks."""
    return {"block": check_count("block", block, 1), "kept": check_count("kept", kept, 1)}
