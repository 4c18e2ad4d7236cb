"""Linear attention: a feature map instead of the exponential (chapter 4).

The equation of this module, with φ: ℝᴰ → ℝᶠ, φ ≥ 0, is [Katharopoulos2020] ::

    h_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / (φ(q_i)ᵀ Σ_j φ(k_j)),    H = diag(φ(Q) φ(K)ᵀ 1)⁻¹ φ(Q) φ(K)ᵀ V

`linear_attention_weights` and the formula multiply φ(Q) φ(K)ᵀ, an (N, M) matrix, first.
`linear_attention` multiplies φ(K)ᵀ V, an (F, Dv) matrix, first: matrices are associative, and that
alone makes the time linear in N. The causal sum over j ≤ i is taken chunk by chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from derived_attention import formulas
from derived_attention.common.checks import (
    FLOATING,
    accumulation_dtype,
    check_callable,
    check_causal_state,
    check_keys,
    check_parameter,
    check_shape,
)
from derived_attention.common.convention import (
    extend,
    full_precision,
    is_short,
    mechanism,
    prepare,
    reference,
)
from derived_attention.common.kernels import should_run_kernel
from derived_attention.common.masks import Mask, divide
from derived_attention.common.running import sums_before

CHUNK = 64  # a causal chunk's scores, (64, 64), are as large as its keys where D = 64
SHORT = 32  # queries and keys up to which the product of an (N, M) matrix with V is cheaper
WIDEST = 128  # features that the kernel takes

FeatureMap = Callable[[Tensor], Tensor]
FEATURE_MAP = "a function from (..., D)"


def elu_feature_map(x: Tensor) -> Tensor:
    """φ(x) = elu(x) + 1, entry by entry: eˣ where x ≤ 0, and x + 1 where x > 0.

    Written as max(x, 0) + exp(min(x, 0)), because (eˣ − 1) + 1 loses the digits of a small eˣ:
    in float32 all of them below x = −17.
    """
    positive = x.relu()  # min(x, 0) = x − max(x, 0): a clamp's gradient is slow on a CPU, and so
    wider = torch.promote_types(x.dtype, torch.float32)
    power = (x - positive).to(wider) * math.log2(math.e)  # is exp: 2ˣ takes a third of its time
    return power.exp2().to(x.dtype) + positive


def linear_attention_weights(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    feature_map: FeatureMap = elu_feature_map,
) -> Tensor:
    """Attention matrix a_ij = φ(q_i)ᵀφ(k_j) / Σ_l φ(q_i)ᵀφ(k_l), the weights of linear attention.

    Arguments and errors are those of `linear_attention`, except that the mask may have any shape
    that broadcasts to ``(..., H, N, M)``, the shape of the result. A row is zeros if its kernel is
    all zeros, or too small for normal numbers of its dtype.
    """
    mask, scale = prepare(q, k, None, attn_mask, is_causal, scale)
    phi_q, phi_k = features(feature_map, q, k, scale)  # (..., H, N, F), (..., H, M, F)
    with full_precision(q.device):
        return mask.normalize(phi_q @ phi_k.mT).to(q.dtype)


def linear_state(
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMap = elu_feature_map,
    state: Tensor | None = None,
) -> Tensor:
    """Return S = Σ_j φ(k_j) [v_j, 1]ᵀ, ``(..., H, F, Dv + 1)``, the state of `linear_attention`.

    With S a sequence can be decoded one or several tokens at a time. The results are those of one
    call for all tokens, and the cost does not depend on the number of earlier tokens ::

        h = linear_attention(q_t, k_t, v_t, is_causal=True, state=S)
        S = linear_state(k_t, v_t, state=S)

    Keys ``(..., H, M, D)`` and values ``(..., H, M, Dv)`` are added to `state`, or to zeros if it
    is left out. In float32 at least. Errors are those of `linear_attention`.
    """
    check_keys(k, v)
    phi = apply_feature_map(feature_map, k)
    with full_precision(k.device):
        values = with_ones(v, phi.dtype)
        S = phi.mT @ values
        return S if state is None else check_sums(state, phi, values) + S


def check_sums(state: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
    """Check sums Σ φ(k_j) v_jᵀ over earlier keys, and return them in the dtype of features."""
    shape = (*phi_k.shape[:-2], phi_k.shape[-1], v.shape[-1])
    meaning = "a row for each feature of a key, and a column for each of [v, 1]"
    return check_parameter("state", state, phi_k, (shape,), meaning).to(phi_k.dtype)


@mechanism(weights=linear_attention_weights, per_key=True, state=linear_state)
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    feature_map: Any = elu_feature_map,
    fused: Any = None,
    state: Tensor | None = None,
) -> Tensor:
    """H = φ(Q) (φ(K)ᵀ V) / (φ(Q) φ(K)ᵀ 1) in time and memory linear in N and M.

    O((N + M) F Dv) operations; causal O(N (F Dv + C (F + Dv))) with chunks of C = 64. Sums are in
    float32 at least, whatever the dtype of the arguments, and under autocast too.

    Parameters
    ----------
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean:
        True where a key may be attended. Floating: finite or -inf; -8192 and below count as
        -inf. Its exponential multiplies the kernel φ(q_i)ᵀφ(k_j), just as a number added to a
        score multiplies softmax's exp(q_i·k_j/√D), so 0 acts like True and -inf like False. If
        padding comes last, ``is_causal`` is enough, because no earlier token attends it.
    scale : float, optional
        Finite and positive; multiplies q before φ, so that the kernel is that of (scale·q, k), as
        in softmax. If it is left out, q is not multiplied: a feature map has no factor 1/√D.
    feature_map : callable
        φ, from ``(..., D)`` to ``(..., F)`` with F ≥ 1, applied to each token alone. The weights
        are those of an average if the kernel φ(q)ᵀφ(k) is non-negative. A module with parameters
        is accepted too. Default: elu + 1.
    fused : bool, optional
        True: run the Triton kernel, or raise a ValueError where it cannot run, for example
        without `is_causal`, where two PyTorch products suffice. False: run PyTorch's form. Left
        out: run the kernel on a GPU where a trial has agreed, for elu + 1 and up to 128 features;
        the kernel has first derivatives only.
    state : Tensor, optional
        Σ φ(k_j) [v_j, 1]ᵀ over keys before the first, ``(..., H, F, Dv + 1)``: every query attends
        them too. `linear_state` returns it. With `is_causal` only, and without the kernel.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> linear_attention(q, k, v, is_causal=True).shape
    torch.Size([2, 4, 10, 8])
    """
    if fused is not None or state is not None:
        fused = check_fused(fused, mask, state)
    elu = feature_map is elu_feature_map
    if (fused is not None or mask.is_causal) and should_run_kernel(
        fused, q, k, v, problem=lambda: causal_problem("linear", mask, elu, q, v)
    ):
        if elu:
            return fused_sums(q, k, v, scale=scale, elu=True, normalize=True)
        phi_q, phi_k = features(feature_map, q, k, scale)
        return fused_sums(phi_q, phi_k, v, normalize=True, dtype=q.dtype)
    phi_q, phi_k = features(feature_map, q, k, scale)
    return weighted_means(phi_q, phi_k, v, mask, state).to(q.dtype)


def weighted_means(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, mask: Mask, state: Tensor | None = None
) -> Tensor:
    """H = φ(Q) (φ(K)ᵀ V) / (φ(Q) φ(K)ᵀ 1), of features (..., N, F) and (..., M, F) of tokens."""
    if mask.given is not None and (factor := mask.factor(accumulation_dtype(phi_q))) is not None:
        phi_k = phi_k * factor.mT  # (..., H, M, F): a masked key has no features
    with full_precision(v.device):
        if state is None and is_short(phi_q, phi_k, SHORT):
            A = phi_q @ phi_k.mT
            A = A.tril_() if mask.is_causal else A
            return divide(A @ v.to(A.dtype), A.sum(-1, keepdim=True))
        values = with_ones(v, phi_k.dtype)
        if mask.is_causal:
            state = None if state is None else check_sums(state, phi_k, values)
            return ratio(causal_sums(phi_q, phi_k, values, state))
        return ratio(phi_q @ (phi_k.mT @ values))  # (..., H, F, Dv + 1) first


def check_fused(fused: bool | None, mask: Mask, state: Tensor | None) -> bool | None:
    """Raise if the kernel of causal sums or a state cannot be; return whether to run the kernel."""
    check_causal_state(state, mask.is_causal)
    if fused is True and state is not None:
        raise ValueError(
            "fused is True, and state is given; expected fused False or None: the kernel begins "
            "without keys"
        )
    if fused is True and not mask.is_causal:
        raise ValueError(
            "fused is True, and is_causal False; expected is_causal=True: without causality two "
            "matrix products of PyTorch suffice"
        )
    return fused if state is None else False


def causal_problem(
    kernel: str, mask: Mask, elu: bool, q: Tensor, v: Tensor
) -> dict[str, Any] | None:
    """Return what the kernel of causal sums is tried on before it runs by default, if it can."""
    if not (mask.is_causal and elu and q.shape[-1] <= WIDEST):
        return None
    return {"kernel": kernel, "D": q.shape[-1], "DV": v.shape[-1], "mask": "causal"}


def fused_sums(*tensors: Tensor, **options: Any) -> Tensor:
    """Run `derived_attention.linear.triton.causal_sums`."""
    from derived_attention.linear import triton as linear

    return linear.causal_sums(*tensors, **options)


def causal_sums(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None) -> Tensor:
    """Return the sums of `sums_and_state` alone, which need no state if there is one chunk."""
    N = q.shape[-2]
    if N > CHUNK or state is not None:
        return sums_and_state(q, k, v, state)[0]
    return (q @ k[..., :N, :].mT).tril_() @ v[..., :N, :]


def sums_and_state(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Σ_{j ≤ i} (q_i·k_j) v_j: inside a chunk by its scores, before it by the state S = Σ k_j v_jᵀ.

    `q` and `k` are features ``(..., N, F)`` and ``(..., M, F)``, `v` is ``(..., M, Dv)``, and
    `state` ``(..., F, Dv)`` the sum over keys before the first. The second result is the sum up to
    key N.
    """
    N = q.shape[-2]
    q, k, v = in_chunks(q, N), in_chunks(k[..., :N, :], N), in_chunks(v[..., :N, :], N)
    sums = k.mT @ v  # (..., n, F, Dv)
    S, last = sums_before(sums, torch.zeros_like(sums[..., 0, :, :]) if state is None else state)
    H = ((q @ k.mT).tril_() @ v).add_(q @ S)  # in place: no backward pass needs what they were
    return H.flatten(-3, -2)[..., :N, :], last


def in_chunks(x: Tensor, n: int, size: int = CHUNK) -> Tensor:
    """Cut (..., m, D), m ≤ n, into (..., ⌈n / C⌉, C, D) with C ≤ `size`, padded with zeros."""
    C = max(1, min(size, n))
    length = max(n + -n % C, C)  # one chunk at least
    if x.shape[-2] < length:
        x = extend(x, length - x.shape[-2])
    return x.unflatten(-2, (length // C, C))


def with_ones(v: Tensor, dtype: torch.dtype) -> Tensor:
    """[V, 1]: the column of ones sums the kernel, so that one product gives both sums."""
    return torch.cat([v, v.new_ones((), dtype=dtype).expand(*v.shape[:-1], 1)], -1)


def ratio(sums: Tensor) -> Tensor:
    """Divide the first Dv columns, Σ_j (φ(q)ᵀφ(k_j)) v_j, by the last, Σ_j φ(q)ᵀφ(k_j)."""
    return divide(*sums.split([sums.shape[-1] - 1, 1], -1))  # a slice has a slow gradient


def features(
    feature_map: FeatureMap, q: Tensor, k: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """φ(scale · q) and φ(k) in float32 at least, checked."""
    scaled = q if scale is None else scale * q
    return apply_feature_map(feature_map, scaled), apply_feature_map(feature_map, k)


def apply_feature_map(feature_map: FeatureMap, x: Tensor) -> Tensor:
    """φ(x) in float32 at least, checked."""
    if feature_map is elu_feature_map:  # with nothing to check
        return feature_map(x).to(torch.promote_types(x.dtype, torch.float32))
    check_callable("feature_map", feature_map, FEATURE_MAP)
    phi = feature_map(x)
    if not isinstance(phi, Tensor) or phi.dtype not in FLOATING:
        kind = f"dtype {phi.dtype}" if isinstance(phi, Tensor) else f"type {type(phi).__name__}"
        raise TypeError(f"feature_map returned {kind}; expected a floating Tensor")
    columns = phi.shape[-1] if phi.dim() and phi.shape[-1] else "F"
    expected = (*x.shape[:-1], columns)
    check_shape("the result of feature_map", phi, expected, "the tokens of its argument, F ≥ 1")
    return phi.to(torch.promote_types(x.dtype, torch.float32))


# --- the formulas, with the same arguments ---


@reference(linear_attention, formulas.linear, weights=linear_attention_weights)
def linear_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *,
    feature_map: Any = elu_feature_map,
) -> dict[str, Any]:  # fmt: skip
    """Check the feature map's results."""
    return {"feature_map": functools.partial(apply_feature_map, feature_map)}
