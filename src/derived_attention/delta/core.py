"""The delta rule: a state that is corrected by each key and value, in turn (chapter 15).

The equation of this module [Schlag2021, Yang2025], for a state S (Dv, D) that starts at 0, is ::

    S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ,    h_i = S_i q_i

β_t is the writing strength, α_t = e^decay_t forgets. Without the erasing factor it is gated linear
attention, Mamba-2's form. Keys and values of a chunk enter the state at once: with l_t the sum of
the decays of a chunk up to t, and R_tj = e^(l_t − l_j) for j ≤ t, the corrections u_t of a chunk
solve a triangular system, (I + tril(B (K Kᵀ ∘ R), −1)) u = B V − B e^l K Sᵀ, and
S ← e^(l_C) S + uᵀ (e^(l_C − l) K). The exponents l_t − l_j are sums of the decays from j + 1 to t:
a difference of the sums l would lose a weak decay that follows a strong one.

The system is solved for all chunks at once. On a GPU, where many small systems are slow to solve
and an operation takes longer to start than to compute, their matrices are inverted by products, and
the state takes one product a chunk, S ← F S + G.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from derived_attention import formulas
from derived_attention.common.checks import (
    accumulation_dtype,
    broadcasts,
    check_flags,
    check_keys,
    check_no_bias,
    check_numbers,
    check_parameter,
)
from derived_attention.common.convention import (
    full_precision,
    mechanism,
    prepare,
    reference,
)
from derived_attention.common.masks import Mask
from derived_attention.delta import fla
from derived_attention.linear.core import in_chunks

FEW = {"cpu": math.inf, "cuda": 8}  # chunks up to which a step for each is the fastest
SMALL = 16  # rows of a block that is inverted without being cut in two
UNWEIGHTED = "a key is written or not, and has no score to which a number could be added"


class Writes(NamedTuple):
    """What is written, in float32 at least: strengths and decays are 0 where a key is masked."""

    k: Tensor  # (..., M, D); keys and values that fla-core gets have their own dtype
    v: Tensor  # (..., M, Dv)
    beta: Tensor  # (..., M)
    decay: Tensor | None  # (..., M), None where nothing is forgotten
    erase: bool
    state: Tensor  # (..., Dv, D), before the first of them


def delta_state(
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    *,
    beta: Tensor | None = None,
    decay: Tensor | None = None,
    erase: bool = True,
    state: Tensor | None = None,
) -> Tensor:
    """Return the state after keys (..., H, M, D) and values (..., H, M, Dv), at least in float32.

    Arguments and errors are those of `delta_attention`. With it a sequence is decoded one token at
    a time, and the results are those of one call ::

        h = delta_attention(q_t, k_t, v_t, is_causal=True, state=S)
        S = delta_state(k_t, v_t, state=S)
    """
    check_keys(k, v)
    mask, _ = prepare(k[..., :1, :], k, v, attn_mask, False, None)  # a mask over keys, as for q
    fused = fla.runs(None, k, k, v, False, erase, decay, beta, state)
    writes = prepare_writes(k, v, mask, beta, decay, erase, state, fused)
    with full_precision(k.device):
        return fla.attend(writes) if fused else chunk_by_chunk(writes)


@mechanism(per_key=True, state=delta_state)
def delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    beta: Tensor | None = None,
    decay: Tensor | None = None,
    erase: bool = True,
    state: Tensor | None = None,
    fused: Any = None,
) -> Tensor:
    """h_i = S_i q_i with S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ, chunk by chunk.

    Keys are written in their order. A causal query reads the state after its own key; without
    `is_causal` all keys are written before any query reads, and the order still matters. Time and
    memory are linear in N and M: about 2 [3 D Dv + C (2 D + Dv + (D + Dv) / 2)] operations a token
    with chunks of C = 64.

    Parameters
    ----------
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean,
        or floating with no numbers but 0 and -inf. A masked key is not written, and its decay
        is not applied.
    scale : float, optional
        Finite and positive; multiplies q. Left out, nothing is multiplied, so that S_t k_t = v_t at
        β_t = 1/‖k_t‖².
    beta : Tensor, optional
        β, broadcastable to ``(..., H, M)`` and finite. Left out: 1/‖k‖², so that a key that has
        been written returns exactly its value, and 0 if ‖k‖² is not a normal number, as for a key
        of zeros; 1 with ``erase=False``. Stable for 0 ≤ β‖k‖² ≤ 2; above it errors grow with
        every key that is written again.
    decay : Tensor, optional
        log α, broadcastable to ``(..., H, M)``, finite and at most 0. Left out: nothing is
        forgotten.
    erase : bool
        Whether to erase the value that the state returns for a key before writing its new value.
    state : Tensor, optional
        S before the first key, ``(..., H, Dv, D)``; zeros if left out. `delta_state` returns it.
    fused : bool, optional
        True: run the kernels of fla-core, or raise a ValueError where they cannot run: without a
        GPU, in float32, for more than 256 features, or under ``torch.compile``. False: chunks in
        PyTorch. Left out: fla-core on a GPU where it is installed, and a trial has agreed;
        it has first derivatives only.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> delta_attention(q, k, v, is_causal=True).shape
    torch.Size([2, 4, 10, 8])
    """
    fused = fla.runs(fused, q, k, v, mask.is_causal, erase, decay, beta, state)
    writes = prepare_writes(k, v, mask, beta, decay, erase, state, fused)
    with full_precision(q.device):
        if fused and mask.is_causal:
            return fla.attend(writes, q, scale)
        queries = q.to(writes.state.dtype) if scale is None else scale * q.to(writes.state.dtype)
        if not mask.is_causal:
            S = fla.attend(writes) if fused else chunk_by_chunk(writes)
            return (queries @ S.mT).to(q.dtype)
        return chunk_by_chunk(writes, queries).to(q.dtype)


def prepare_writes(
    k: Tensor,
    v: Tensor,
    mask: Mask,
    beta: Tensor | None,
    decay: Tensor | None,
    erase: bool,
    state: Tensor | None,
    keep_dtype: bool = False,
) -> Writes:
    """Check the options, fill in what is left out, and leave out what is masked.

    With `keep_dtype` keys and values keep their dtype.
    """
    check_flags(erase=erase)
    if mask.given is not None:
        check_no_bias("attn_mask", mask.given, UNWEIGHTED)
    dtype = accumulation_dtype(k)
    if not keep_dtype:
        k, v = k.to(dtype), v.to(dtype)
    present = None if mask.given is None and mask.keys is None else mask.presence(k)
    if beta is not None:
        beta = _per_key("beta", beta, k, present, "finite")
    elif erase:
        size = k.to(dtype).square().sum(-1)
        known = size >= torch.finfo(size.dtype).tiny
        known = known if present is None else known & present
        beta = torch.where(known, 1 / size.where(known, 1), 0)
    else:
        beta = k.new_ones(k.shape[:-1], dtype=dtype) if present is None else present.to(dtype)
    if decay is not None:
        decay = _per_key("decay", decay, k, present, "finite and at most 0")
    shape = (*k.shape[:-2], v.shape[-1], k.shape[-1])
    if state is None:
        state = k.new_zeros(shape, dtype=dtype)
    else:
        check_parameter("state", state, k, (shape,), "a matrix Dv × D for each head")
        state = state.to(dtype, copy=True)  # autograd stores no tensor made in inference mode
    return Writes(k, v, beta, decay, erase, state)


def _per_key(name: str, x: Tensor, k: Tensor, present: Tensor | None, kind: str) -> Tensor:
    """Return a number for each key of k (..., M, D), checked, and 0 where a key is masked."""
    check_parameter(name, x, k)
    sizes, shape = tuple(x.shape), tuple(k.shape[:-1])
    if not broadcasts(sizes, shape):
        raise ValueError(
            f"{name} has shape {sizes}; expected one that broadcasts to {shape}, one number per key"
        )
    x = x.to(accumulation_dtype(k)).expand(shape)
    x = x if present is None else x.masked_fill(~present, 0)
    check_numbers(name, x, kind)
    return x


def chunk_by_chunk(writes: Writes, q: Tensor | None = None) -> Tensor:
    """Return what each query (..., N, D) reads after its own key.

    Without queries all keys are written, and the last state (..., Dv, D) is returned. Only the
    state is carried from chunk to chunk; everything else is computed for all chunks at once.
    """
    *leading, N, _ = writes.k.shape if q is None else q.shape
    heads = math.prod(leading)

    def cut(x: Tensor) -> Tensor:  # (heads, N / C, C, ·)
        x = x[..., :N, :]
        return in_chunks(x.reshape(heads, *x.shape[-2:]), N)

    k, v, b = cut(writes.k), cut(writes.v), cut(writes.beta[..., None])
    U, W, K, R, since, fade = b * v, -b * k, k, None, None, None  # W with the other sign
    if writes.decay is not None:
        decay = cut(writes.decay[..., None])
        sums = decay.mT.expand(*k.shape[:-1], k.shape[-2]).triu(1).cumsum(-1)  # l_t − l_j at (j, t)
        R, since = sums.exp().triu().mT, decay.cumsum(-2).exp()
        W, K, fade = since * W, R[..., -1:, :].mT * k, since[..., -1:, :]

    def past(scores: Tensor) -> Tensor:  # decayed, and 0 in the future
        return scores.tril() if R is None else scores * R

    frugal = k.shape[1] <= FEW.get(k.device.type, FEW["cuda"])
    if writes.erase:
        A, both = past(b * (k @ k.mT)).tril(-1), torch.cat([U, W], -1)
        U, W = solve_unit_lower(A, both, frugal).split([v.shape[-1], k.shape[-1]], -1)
    S, n = [writes.state.mT.reshape(heads, k.shape[-1], v.shape[-1])], k.shape[1] - (q is not None)
    u: list[Tensor] = []
    if frugal and writes.erase:  # u = U + W S, S ← f S + Kᵀ u
        f = itertools.repeat(None) if fade is None else fade.unbind(1)
        parts = zip(U.unbind(1), W.unbind(1), K.mT.unbind(1), f, strict=False)
        for c, (U_c, W_c, K_c, f_c) in enumerate(parts):
            u.append(torch.baddbmm(U_c, W_c, S[c]))
            if c < n:  # else nobody reads it
                S.append(torch.baddbmm(S[c] if f_c is None else f_c * S[c], K_c, u[c]))
    else:  # S ← F S + G
        F, G = k.new_ones(1, 1) if fade is None else fade, K.mT @ U
        if writes.erase:
            F = F * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) + K.mT @ W
        F, step = F.expand(*G.shape[:2], -1, -1), torch.baddbmm if writes.erase else torch.addcmul
        for F_c, G_c in zip(F.unbind(1)[:n], G.unbind(1), strict=False):
            S.append(step(G_c, F_c, S[-1]))
    if q is None:
        return S[-1].mT.reshape(writes.state.shape)
    before, q = torch.stack(S, 1), cut(q)  # (heads, N / C, D, Dv)
    U = torch.stack(u, 1) if u else U + W @ before if writes.erase else U
    H = (q if since is None else since * q) @ before + past(q @ k.mT) @ U
    return H.flatten(-3, -2)[..., :N, :].reshape(*leading, N, v.shape[-1])


def solve_unit_lower(A: Tensor, B: Tensor, frugal: bool) -> Tensor:
    """Return X of (I + A) X = B, for A that is 0 on and above its diagonal."""
    if frugal:
        return torch.linalg.solve_triangular(A, B, upper=False, unitriangular=True)
    return invert_unit_lower(A) @ B


def invert_unit_lower(A: Tensor) -> Tensor:
    """Return (I + A)⁻¹ for A (..., C, C) that is 0 on and above its diagonal, by products alone.

    Blocks of twice the size have the inverse [[P, 0], [−Q A₂₁ P, Q]] if P and Q are those of their
    halves: substitution by blocks, and as exact. A sum of powers of A would cancel.
    """
    C = A.shape[-1]
    if C > SMALL and C % 2 == 0:
        h = C // 2
        P, Q = invert_unit_lower(torch.stack([A[..., :h, :h], A[..., h:, h:]])).unbind()
        low = -Q @ A[..., h:, :h] @ P
        return torch.cat([torch.cat([P, torch.zeros_like(P)], -1), torch.cat([low, Q], -1)], -2)
    i, size = torch.arange(C, device=A.device), 1
    T = torch.eye(C, dtype=A.dtype, device=A.device).expand_as(A)
    while size < C:
        T = T - T @ A.where((i ^ i[:, None]) // size == 1, 0) @ T  # the A₂₁ of all blocks
        size *= 2
    return T


# --- the formulas, with the same arguments ---


@reference(delta_attention, formulas.delta, per_key=True)
def delta_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, beta: Any = None,
    decay: Any = None, erase: Any = True, state: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Check strengths, decays and the state, and fill in what is left out."""
    writes = prepare_writes(k, v, mask, beta, decay, erase, state)
    decay = torch.zeros_like(writes.beta) if writes.decay is None else writes.decay
    return {"beta": writes.beta, "decay": decay, "erase": erase, "state": writes.state}
