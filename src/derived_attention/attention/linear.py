"""Linear attention: a feature map in the place of the exponential (chapter 4).

The equation of this module, with φ: ℝᴰ → ℝᶠ, φ ≥ 0, is (Katharopoulos et al. 2020) ::

    h_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / (φ(q_i)ᵀ Σ_j φ(k_j)),    H = diag(φ(Q) φ(K)ᵀ 1)⁻¹ φ(Q) φ(K)ᵀ V

`linear_attention_weights` and `linear_attention_reference` multiply φ(Q) φ(K)ᵀ, an (N, M) matrix,
first. `linear_attention` multiplies φ(K)ᵀ V, an (F, Dv) matrix, first: matrices are associative,
and that alone makes the time linear in N. The causal sum over j ≤ i is taken chunk by chunk.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from derived_attention.attention.checks import (
    FLOATING,
    check_attention,
    check_key_mask,
    check_shape,
)
from derived_attention.attention.softmax import causal_mask

CHUNK = 64  # a causal chunk's scores, (64, 64), are as large as its keys where D = 64
SEGMENT = 8 * CHUNK  # on the CPU, positions whose temporaries stay in the cache

FeatureMap = Callable[[Tensor], Tensor]


def elu_feature_map(x: Tensor) -> Tensor:
    """φ(x) = elu(x) + 1, entry by entry: eˣ where x ≤ 0, and x + 1 where x > 0.

    Written as max(x, 0) + exp(min(x, 0)), because (eˣ − 1) + 1 loses the digits of a small eˣ:
    in float32 all of them below x = −17.
    """
    return x.clamp(max=0).exp() + x.relu()


def full_precision(device: torch.device) -> contextlib.AbstractContextManager:
    """Switch autocast off for a while, so that float32 sums stay in float32."""
    if device.type == "meta":  # has no autocast, not even one to switch off
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def linear_attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    feature_map: FeatureMap = elu_feature_map,
) -> Tensor:
    """Attention matrix a_ij = φ(q_i)ᵀφ(k_j) / Σ_l φ(q_i)ᵀφ(k_l), the weights of linear attention.

    Parameters
    ----------
    q, k : Tensor
        Queries ``(..., H, N, D)`` and keys ``(..., H, M, D)``; ``(N, D)`` and ``(M, D)`` do too.
    attn_mask : Tensor, optional
        As in `linear_attention`, but any mask that broadcasts to ``(..., H, N, M)``.
    is_causal, scale, feature_map
        As in `linear_attention`.

    Returns
    -------
    Tensor
        ``(..., H, N, M)``, in the dtype of `q`. A row whose kernel is all zeros is zeros.

    Raises
    ------
    TypeError, ValueError
        As in `linear_attention`.
    """
    check_attention(q, k, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    _check_callable(feature_map)
    dtype = torch.promote_types(q.dtype, torch.float32)
    phi_q = _features(feature_map, q if scale is None else scale * q, dtype)  # (..., H, N, F)
    phi_k = _features(feature_map, k, dtype)  # (..., H, M, F)
    if is_causal:
        attn_mask = causal_mask(q.shape[-2], k.shape[-2], q.device)
    with full_precision(q.device):
        kernel = phi_q @ phi_k.mT  # (..., H, N, M)
        if attn_mask is not None:
            kernel = kernel * _mask_factor(torch.atleast_2d(attn_mask), dtype)
        return _divide(kernel, kernel.sum(-1, keepdim=True)).to(q.dtype)


def linear_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    feature_map: FeatureMap = elu_feature_map,
) -> Tensor:
    """H = A V with the whole matrix A of `linear_attention_weights` in memory.

    Arguments, result and errors are those of `linear_attention`, but for the mask, which may be
    any that broadcasts to ``(..., H, N, M)``.
    """
    check_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    A = linear_attention_weights(
        q, k, attn_mask=attn_mask, is_causal=is_causal, scale=scale, feature_map=feature_map
    )
    with full_precision(q.device):
        return A @ v.to(A.dtype)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    feature_map: FeatureMap = elu_feature_map,
) -> Tensor:
    """H = φ(Q) (φ(K)ᵀ V) / (φ(Q) φ(K)ᵀ 1) in time and memory linear in N and M.

    O((N + M) F Dv) operations; causal O(N (F Dv + C (F + Dv))) with chunks of C = 64. Sums are in
    float32 at least, whatever the dtype of the arguments, and under autocast too.

    Parameters
    ----------
    q, k, v : Tensor
        Queries ``(..., H, N, D)``, keys ``(..., H, M, D)`` and values ``(..., H, M, Dv)``, as in
        `softmax_attention`.
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean:
        True where a key may be attended. Floating, finite or -inf: e to its power multiplies the
        kernel φ(q_i)ᵀφ(k_j), as adding it to the scores multiplies softmax's exp(q_i·k_j/√D); so
        0 and -inf mean what True and False do.
    is_causal : bool
        Query i attends keys j ≤ i, counted from the top left also where N ≠ M. Excludes
        `attn_mask`; where padding comes last, ``is_causal`` alone keeps it from all that is not.
    scale : float, optional
        Finite and positive; multiplies q before φ, so that the kernel is that of (scale·q, k), as
        softmax's is. Nothing is multiplied where it is left out: a feature map has no 1/√D.
    feature_map : callable
        φ, from ``(..., D)`` to ``(..., F)`` with F ≥ 1, each token on its own: it is called on
        parts of the sequence. Weights are those of an average where the kernel φ(q)ᵀφ(k) is
        non-negative. A module with parameters does too. Default elu + 1.

    Returns
    -------
    Tensor
        ``(..., H, N, Dv)``, in the dtype of `q`. Zeros, with zero gradients, for a query whose
        kernel is 0 with every key: all masked, or all of its features 0.

    Raises
    ------
    TypeError
        As in `softmax_attention`, and for a `feature_map` that cannot be called, or does not
        return a floating tensor.
    ValueError
        As in `softmax_attention`, and for a mask with more than one row, or features of a shape
        that does not fit.
    """
    check_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    _check_callable(feature_map)
    dtype = torch.promote_types(q.dtype, torch.float32)
    scaled = q if scale is None else scale * q
    if is_causal:
        return _causal(scaled, k, v, feature_map, dtype).to(q.dtype)
    mask = None if attn_mask is None else _mask_factor(check_key_mask(attn_mask), dtype)
    phi_q, phi_k = (_features(feature_map, x, dtype) for x in (scaled, k))
    with full_precision(q.device):
        if mask is not None:
            phi_k = phi_k * mask.mT  # (..., H, M, F): a masked key has no features
        S = phi_k.mT @ _with_ones(v, dtype)  # (..., H, F, Dv + 1)
        return _ratio(phi_q @ S).to(q.dtype)


def _causal(q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMap, dtype: torch.dtype) -> Tensor:
    """Walk over the positions in segments, and carry Σ φ(k_j) [v_j, 1]ᵀ from one to the next."""
    N = q.shape[-2]
    # The large steps are bound by memory on a CPU; elsewhere they are few, and one is best.
    length = SEGMENT if q.device.type == "cpu" else max(N, 1)
    state: Tensor | None = None
    outputs = []
    for start in range(0, max(N, 1), length):
        q_s, k_s, v_s = (x[..., start : min(start + length, N), :] for x in (q, k, v))
        phi_q, phi_k = (_features(feature_map, x, dtype) for x in (q_s, k_s))
        with full_precision(q.device):
            sums, state = _causal_segment(phi_q, phi_k, _with_ones(v_s, dtype), state)
            outputs.append(_ratio(sums))
    return torch.cat(outputs, -2)


def _causal_segment(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Σ_{j ≤ i} (q_i·k_j) v_j: inside a chunk by its scores, before it by the state S = Σ k_j v_jᵀ.

    `q` and `k` are features ``(..., n, F)`` and ``(..., m, F)`` with m ≤ n, `v` is
    ``(..., m, Dv + 1)``; `state` ``(..., 1, F, Dv + 1)`` is that of all positions before.
    """
    n = q.shape[-2]
    size = max(1, min(CHUNK, n))
    q, k, v = (_chunks(x, n, size) for x in (q, k, v))  # (..., n / C, C, ·)
    S = F.pad(k.mT @ v, (0, 0, 0, 0, 1, 0)).cumsum(-3)  # (..., n / C + 1, F, Dv + 1)
    S = S if state is None else S + state
    # S[c] ends before chunk c. To subtract chunk c from a sum that has it would leave its rounding
    # errors there, and with them a trace of the future.
    sums = (q @ k.mT).tril_() @ v  # in place: no backward pass needs what is overwritten
    sums += q @ S[..., :-1, :, :]
    return sums.flatten(-3, -2)[..., :n, :], S[..., -1:, :, :]


def _chunks(x: Tensor, n: int, size: int) -> Tensor:
    """Append rows of zeros to (..., m, ·), up to a multiple of `size` ≥ n, and cut it in chunks."""
    length = n + -n % size
    if x.shape[-2] < length:
        x = F.pad(x, (0, 0, 0, length - x.shape[-2]))
    return x.unflatten(-2, (length // size, size))


def _with_ones(v: Tensor, dtype: torch.dtype) -> Tensor:
    """[V, 1]: the column of ones sums the kernel, so that one product gives both sums."""
    return F.pad(v.to(dtype), (0, 1), value=1.0)


def _ratio(sums: Tensor) -> Tensor:
    """Divide the first Dv columns, Σ_j (φ(q)ᵀφ(k_j)) v_j, by the last, Σ_j φ(q)ᵀφ(k_j)."""
    return _divide(sums[..., :-1], sums[..., -1:])


def _divide(x: Tensor, total: Tensor) -> Tensor:
    """Quotient x / total, and 0 with gradient 0 where the total is 0."""
    return x / total.masked_fill(total == 0, math.inf)


def _mask_factor(attn_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a mask multiplies the kernel by, up to a factor per row, which divides out."""
    if attn_mask.dtype == torch.bool:
        return attn_mask.to(dtype)
    attn_mask = attn_mask.to(dtype)
    if attn_mask.numel() == 0:
        return attn_mask
    top = attn_mask.detach().amax(-1, keepdim=True)  # so that e to its power does not overflow
    return (attn_mask - top.masked_fill(top == -math.inf, 0)).exp()


def _features(feature_map: FeatureMap, x: Tensor, dtype: torch.dtype) -> Tensor:
    """φ(x) in `dtype`, checked: a floating tensor, with the tokens of x."""
    phi = feature_map(x)
    if not isinstance(phi, Tensor) or phi.dtype not in FLOATING:
        kind = f"dtype {phi.dtype}" if isinstance(phi, Tensor) else f"type {type(phi).__name__}"
        raise TypeError(f"feature_map returned {kind}; expected a floating Tensor")
    columns = phi.shape[-1] if phi.dim() and phi.shape[-1] else "F"
    expected = (*x.shape[:-1], columns)
    check_shape("the result of feature_map", phi, expected, "the tokens of its argument, F ≥ 1")
    return phi.to(dtype)


def _check_callable(feature_map: FeatureMap) -> None:
    if not callable(feature_map):
        raise TypeError(f"feature_map is {feature_map!r}; expected a function from (..., D)")
