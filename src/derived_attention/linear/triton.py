"""Causal linear attention, chunk by chunk: `linear_attention`, MLK, and whatever has features.

The sums are, with a_ij = φ(q_i)ᵀ Σ_r π_r φ(k_jr) for j ≤ i, or without the division ::

    h_i = Σ_j a_ij v_j / z_i,    z_i = Σ_j a_ij

A program has a segment of the sequence, and goes through its blocks. What comes before a block is
in the state S = Σ_j φ(k_j) [v_j, 1]ᵀ, which stays in registers; within the block there are scores.
The states before all segments are computed first: `_key_states` sums each segment, `_accumulate`
adds up the segments. There are only as many of them as fill the GPU, so that states are a small
share of the memory traffic, however long the sequence is.

Backward, with dz_i = −dh_i·h_i, there are two passes ::

    dφ(q_i) = Σ_{j≤i} (dh_i·v_j + dz_i) φ(k_j) / z_i
    dφ(k_j) = Σ_{i≥j} (dh_i·v_j + dz_i) φ(q_i) / z_i,    dv_j = Σ_{i≥j} a_ij dh_i / z_i

The second one starts at the end, with the state R = Σ_i φ(q_i)/z_i [dh_i, dz_i]ᵀ of what is after.

Without causality, linear attention is two matrix products, which PyTorch has.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from derived_attention.common.operators import operator, select_needed
from derived_attention.common.triton import (
    dot,
    hide,
    launch,
    load_numbers,
    load_rows,
    narrowest,
    precision,
    scores,
    store_numbers,
    store_rows,
    tile_width,
)

WIDEST = 128  # features: a longer row spills registers
SEGMENT = 64  # positions: every segment is a multiple of it, and every block a divisor
PROGRAMS = 4  # segments for each multiprocessor, of all heads together
TILE = {"ROWS": 16, "E": 128}  # states, and entries of each, that `_accumulate` reads at a time

TL = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}


class Options(NamedTuple):
    """What is to be computed: scale of the queries, φ = elu + 1 or none, division, and dtype."""

    scale: float
    elu: bool
    normalize: bool
    dtype: torch.dtype

    @property
    def product(self) -> torch.dtype:
        """The dtype of factors of products; sums exceed the range of float16."""
        return torch.float32 if self.dtype == torch.float16 else self.dtype

    @property
    def precision(self) -> str:
        """How Triton takes products of float32."""
        return precision(self.dtype) if self.product == torch.float32 else "ieee"


def blocks(F: int, V: int, options: Options, backward: bool = False) -> dict[str, int]:
    """Return positions, warps and stages of a block, such that registers hold F features, V values.

    F and V are powers of two.
    """
    if options.product == torch.bfloat16:
        small = F * V <= 64 * 64
        C = (64 if small else 32) // (2 if backward else 1)
        return {"C": C, "num_warps": 4 if small and not backward else 8, "num_stages": 2}
    C = 32 if options.product == torch.float64 else 16  # float64 is for the interpreter alone
    return {"C": C, "num_warps": 8, "num_stages": 1}


def values_at_once(F: int, options: Options, least: int = 16) -> int:
    """Return for how many values the state fits in registers; 0 if for none.

    The sums of a value depend on no other, so that the wrapper can go on with the next ones.
    """
    if F > WIDEST:
        return 0
    if options.product != torch.bfloat16 and options.precision == "ieee":
        return 16  # without tensor cores products take more registers
    return (128 * 64 if options.product == torch.bfloat16 else 128 * 16) // tile_width(F, least)


# --- what kernels share --------------------------------------------------------------------------


@triton.jit
def _precise(a, b, total, FIRST: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Add A B to total, with one factor, the first or the second, rounded to two numbers."""
    wide = a if FIRST else b
    high = wide.to(DOT)
    precise: tl.constexpr = PRECISION if PRECISION == "ieee" else "tf32x3"
    total = dot(high, b, total, precise) if FIRST else dot(a, high, total, precise)
    if DOT == tl.bfloat16:
        low = (wide - high.to(wide.dtype)).to(DOT)
        total = dot(low, b, total, precise) if FIRST else dot(a, low, total, precise)
    return total


@triton.jit
def _phi(x, scale, start, length, D, ELU: tl.constexpr):
    """φ(scale·x) = elu + 1 of a tile: eˣ where x ≤ 0, x + 1 where x > 0; or x, if it has φ already.

    Padding has no features, though φ(0) is 1.
    """
    if ELU:
        x = x * scale
        x = tl.exp(tl.minimum(x, 0.0)) + tl.maximum(x, 0.0)
        rows, columns = tl.arange(0, x.shape[0]), tl.arange(0, x.shape[1])
        x = tl.where((start + rows < length)[:, None] & (columns < D)[None, :], x, 0.0)
    return x


@triton.jit
def _slope(x, scale, ELU: tl.constexpr):
    """dφ(scale·x)/dx: scale · min(eˣ, 1), or 1 for features themselves."""
    return scale * tl.exp(tl.minimum(x * scale, 0.0)) if ELU else tl.full(x.shape, 1.0, x.dtype)


@triton.jit
def _query_features(
    q, start, N, stride, scale, D,
    C: tl.constexpr, F: tl.constexpr, ELU: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """φ(scale·q_i), (C, F)."""
    return _phi(load_rows(q, start, N, stride, D, C, F).to(ACC), scale, start, N, D, ELU)


@triton.jit
def _key_features(
    k, priors, start, M, stride_r, stride, D,
    R: tl.constexpr, C: tl.constexpr, F: tl.constexpr, ELU: tl.constexpr,
    MIXED: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Σ_r π_r φ(k_jr), (C, F), in the dtype of products: no memory holds mixed features."""
    phi = tl.zeros((C, F), ACC)
    for r in tl.static_range(R):
        x = load_rows(k + r * stride_r, start, M, stride, D, C, F).to(ACC)
        x = _phi(x, 1.0, start, M, D, ELU)
        phi += tl.load(priors + r) * x if MIXED else x
    return phi.to(DOT)


@triton.jit
def _reciprocal(z, TINY: tl.constexpr):
    """1/z, and 0 where z is 0 or has lost its digits."""
    lost = tl.abs(z) < TINY
    return tl.where(lost, 0.0, 1.0 / tl.where(lost, 1.0, z))


@triton.jit
def _load_state(states, slot, F: tl.constexpr, V: tl.constexpr):
    """Load S (F, V) and its last column (F,) from a slot."""
    f, v = tl.arange(0, F), tl.arange(0, V)
    states += tl.cast(slot, tl.int64) * (F * (V + 1))
    return tl.load(states + f[:, None] * V + v[None, :]), tl.load(states + F * V + f)


@triton.jit
def _store_state(states, slot, S, z, F: tl.constexpr, V: tl.constexpr):
    f, v = tl.arange(0, F), tl.arange(0, V)
    states += tl.cast(slot, tl.int64) * (F * (V + 1))
    tl.store(states + f[:, None] * V + v[None, :], S)
    tl.store(states + F * V + f, z)


# --- states --------------------------------------------------------------------------------------


@triton.jit
def _key_states(
    k, v, priors, states, M, H, segment,
    k_b, k_h, k_r, k_n, v_b, v_h, v_n, priors_h,
    D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, ELU: tl.constexpr, MIXED: tl.constexpr,
    C: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S = Σ_j φ(k_j) [v_j, 1]ᵀ over the keys of one segment."""
    ACC: tl.constexpr = states.dtype.element_ty
    head, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k += head // H * k_b + head % H * k_h
    v += head // H * v_b + head % H * v_h
    priors += head % H * priors_h
    S, z = tl.zeros((F, V), ACC), tl.zeros((F,), ACC)
    for start in range(c * segment, tl.minimum((c + 1) * segment, M), C):
        phi = _key_features(k, priors, start, M, k_r, k_n, D, R, C, F, ELU, MIXED, DOT, ACC)
        values = load_rows(v, start, M, v_n, DV, C, V).to(DOT)
        S = dot(tl.trans(phi), values, S, PRECISION)
        z += tl.sum(phi.to(ACC), 0)
    _store_state(states, head * tl.num_programs(1) + c, S, z, F, V)


@triton.jit
def _query_states(
    q, dout, scales, slopes, states, scale, N, H, segment,
    q_b, q_h, q_n, d_b, d_h, d_n,
    D: tl.constexpr, DV: tl.constexpr, ELU: tl.constexpr, NORMALIZE: tl.constexpr,
    C: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R = Σ_i φ(q_i)/z_i [dh_i, dz_i]ᵀ over the queries of one segment, but the first."""
    ACC: tl.constexpr = states.dtype.element_ty
    head, c = tl.program_id(0).to(tl.int64), tl.program_id(1) + 1
    q += head // H * q_b + head % H * q_h
    dout += head // H * d_b + head % H * d_h
    scales, slopes = scales + head * N, slopes + head * N
    S, z = tl.zeros((F, V), ACC), tl.zeros((F,), ACC)
    for start in range(c * segment, tl.minimum((c + 1) * segment, N), C):
        phi = _query_features(q, start, N, q_n, scale, D, C, F, ELU, ACC)
        if NORMALIZE:
            phi *= load_numbers(scales, start, N, 0.0, C)[:, None]
        phi = phi.to(DOT)
        if NORMALIZE:
            z += tl.sum(phi.to(ACC) * load_numbers(slopes, start, N, 0.0, C)[:, None], 0)
        S = dot(tl.trans(phi), load_rows(dout, start, N, d_n, DV, C, V).to(DOT), S, PRECISION)
    _store_state(states, head * tl.num_programs(1) + c - 1, S, z, F, V)


@triton.jit
def _accumulate(states, count, size, REVERSE: tl.constexpr, ROWS: tl.constexpr, E: tl.constexpr):
    """Add up the states of segments in place, each with those before it, or after it.

    Several segments are read at a time: one by one, each would wait for the memory.
    """
    entries = tl.program_id(1) * E + tl.arange(0, E)
    states += tl.program_id(0).to(tl.int64) * count * size
    total = tl.zeros((E,), states.dtype.element_ty)
    for begin in range(0, count, ROWS):
        rows = begin + tl.arange(0, ROWS)
        rows = count - 1 - rows if REVERSE else rows
        within = ((rows >= 0) & (rows < count))[:, None] & (entries < size)[None, :]
        pointers = states + rows[:, None] * size + entries[None, :]
        tile = tl.load(pointers, mask=within, other=0.0)
        tl.store(pointers, tl.cumsum(tile, 0) + total[None, :], mask=within)
        total += tl.sum(tile, 0)


# --- passes --------------------------------------------------------------------------------------


@triton.jit
def _outputs(
    q, k, v, priors, states, out, scales, scale, N, M, H, segment,
    q_b, q_h, q_n, k_b, k_h, k_r, k_n, v_b, v_h, v_n, priors_h,
    D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, ELU: tl.constexpr, MIXED: tl.constexpr,
    NORMALIZE: tl.constexpr, TINY: tl.constexpr, C: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """h_i = (Σ_{j≤i in the block} a_ij v_j + Sᵀφ(q_i)) / z_i, and 1/z_i."""
    ACC: tl.constexpr = states.dtype.element_ty
    head, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q += head // H * q_b + head % H * q_h
    k += head // H * k_b + head % H * k_h
    v += head // H * v_b + head % H * v_h
    priors += head % H * priors_h
    out, scales = out + head * N * DV, scales + head * N
    S, z = tl.zeros((F, V), ACC), tl.zeros((F,), ACC)
    if c > 0:  # the sum up to the segment before: to subtract this one's would leave a trace of it
        S, z = _load_state(states, head * (tl.num_programs(1) - 1) + c - 1, F, V)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    for start in range(c * segment, tl.minimum((c + 1) * segment, N), C):
        phi_q = _query_features(q, start, N, q_n, scale, D, C, F, ELU, ACC).to(DOT)
        phi_k = _key_features(k, priors, start, M, k_r, k_n, D, R, C, F, ELU, MIXED, DOT, ACC)
        total = tl.sum(phi_q.to(ACC) * z[None, :], 1)
        z += tl.sum(phi_k.to(ACC), 0)
        values = load_rows(v, start, M, v_n, DV, C, V).to(DOT)
        A = hide(scores(phi_q, phi_k, None, PRECISION), i, j, True, 0)
        sums = dot(phi_q, S.to(DOT), None, PRECISION)
        sums = dot(A.to(DOT), values, sums, PRECISION)
        if NORMALIZE:
            one_over = _reciprocal(total + tl.sum(A, 1), TINY)
            sums *= one_over[:, None]
            store_numbers(scales, one_over, start, N, C)
        store_rows(out, sums, start, N, DV, C, V)
        tl.debug_barrier()  # one after the other: registers have no room for both
        S = dot(tl.trans(phi_k), values, S, PRECISION)


@triton.jit
def _query_gradients(
    q, k, v, priors, states, dout, scales, slopes, dq, scale, N, M, H, segment,
    q_b, q_h, q_n, k_b, k_h, k_r, k_n, v_b, v_h, v_n, d_b, d_h, d_n, priors_h,
    D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, ELU: tl.constexpr, MIXED: tl.constexpr,
    NORMALIZE: tl.constexpr, C: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dφ(q_i) = (w_i + dz_i Σ_{j≤i} φ(k_j)) / z_i with w_i = Σ_{j≤i} (dh_i·v_j) φ(k_j).

    h_i does not depend on the length of φ(q_i), so that φ(q_i)·dφ(q_i) = 0: dz_i = −φ(q_i)·w_i/z_i
    is exact to the digits of w, and the output need not be read. As the two terms all but cancel in
    a long sequence, products that make w have twice the digits of others.
    """
    ACC: tl.constexpr = states.dtype.element_ty
    head, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q += head // H * q_b + head % H * q_h
    k += head // H * k_b + head % H * k_h
    v += head // H * v_b + head % H * v_h
    dout += head // H * d_b + head % H * d_h
    priors += head % H * priors_h
    dq, scales, slopes = dq + head * N * D, scales + head * N, slopes + head * N
    S, z = tl.zeros((V, F), ACC), tl.zeros((F,), ACC)  # Sᵀ
    if c > 0:
        S, z = _load_state(states, head * (tl.num_programs(1) - 1) + c - 1, F, V)
        S = tl.trans(S)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    for start in range(c * segment, tl.minimum((c + 1) * segment, N), C):
        phi_k = _key_features(k, priors, start, M, k_r, k_n, D, R, C, F, ELU, MIXED, DOT, ACC)
        values = load_rows(v, start, M, v_n, DV, C, V).to(DOT)
        dh = load_rows(dout, start, N, d_n, DV, C, V).to(DOT)
        w = _precise(dh, S, tl.zeros((C, F), ACC), False, DOT, PRECISION)
        tl.debug_barrier()  # one after the other: registers have no room for both
        dA = hide(scores(dh, values, None, PRECISION), i, j, True, 0)
        w = _precise(dA, phi_k, w, True, DOT, PRECISION)
        tl.debug_barrier()
        x = load_rows(q, start, N, q_n, D, C, F).to(ACC)
        if NORMALIZE:
            ones = tl.where(j <= i, 1.0, 0.0).to(DOT)
            keys = dot(ones, phi_k, None, PRECISION) + z[None, :]
            phi_q = _phi(x, scale, start, N, D, ELU).to(DOT).to(ACC)  # as in z_i
            one_over = load_numbers(scales, start, N, 0.0, C)
            dz = -one_over * tl.sum(phi_q * w, 1)
            w = (w + dz[:, None] * keys) * one_over[:, None]
            store_numbers(slopes, dz, start, N, C)
        store_rows(dq, w * _slope(x, scale, ELU), start, N, D, C, F)
        S = dot(tl.trans(values), phi_k, S, PRECISION)
        z += tl.sum(phi_k.to(ACC), 0)


@triton.jit
def _key_gradients(
    q, k, v, priors, states, dout, scales, slopes, dk, dv, dpriors, scale, N, M, H, segment,
    q_b, q_h, q_n, k_b, k_h, k_r, k_n, v_b, v_h, v_n, d_b, d_h, d_n, priors_h,
    D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, ELU: tl.constexpr, MIXED: tl.constexpr,
    NORMALIZE: tl.constexpr, C: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    RP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dφ(k_j) = Σ_{i≥j in the block} (dh_i·v_j + dz_i) φ(q_i) / z_i + R [v_j, 1], and dv_j.

    dv_j = Σ_{i≥j in the block} a_ij dh_i / z_i + Rᵀφ(k_j): from the last block to the first. Each
    component has dk_jr = π_r φ'(k_jr) dφ(k_j), and dπ_r = Σ_j φ(k_jr)·dφ(k_j).
    """
    ACC: tl.constexpr = states.dtype.element_ty
    head, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q += head // H * q_b + head % H * q_h
    k += head // H * k_b + head % H * k_h
    v += head // H * v_b + head % H * v_h
    dout += head // H * d_b + head % H * d_h
    priors += head % H * priors_h
    scales, slopes = scales + head * N, slopes + head * N
    dk, dv = dk + head * R * M * D, dv + head * M * DV
    S, z = tl.zeros((V, F), ACC), tl.zeros((F,), ACC)  # Rᵀ
    if c < tl.num_programs(1) - 1:
        S, z = _load_state(states, head * (tl.num_programs(1) - 1) + c, F, V)
        S = tl.trans(S)
    i, j = tl.arange(0, C)[None, :], tl.arange(0, C)[:, None]
    components = tl.arange(0, RP)
    dpi = tl.zeros((RP,), ACC)
    end = tl.minimum((c + 1) * segment, N)
    steps = tl.cdiv(end - c * segment, C)
    for step in range(0, steps):
        start = c * segment + (steps - 1 - step) * C
        phi_q = _query_features(q, start, N, q_n, scale, D, C, F, ELU, ACC)
        if NORMALIZE:
            phi_q *= load_numbers(scales, start, N, 0.0, C)[:, None]
        phi_q = phi_q.to(DOT)
        phi_k = _key_features(k, priors, start, M, k_r, k_n, D, R, C, F, ELU, MIXED, DOT, ACC)
        values = load_rows(v, start, M, v_n, DV, C, V).to(DOT)
        dh = load_rows(dout, start, N, d_n, DV, C, V).to(DOT)

        A = hide(scores(phi_k, phi_q, None, PRECISION), i, j, True, 0).to(DOT)
        tl.debug_barrier()  # one after the other: registers have no room for all
        dvalues = scores(phi_k, S.to(DOT), None, PRECISION)
        store_rows(dv, dot(A, dh, dvalues, PRECISION), start, M, DV, C, V)
        tl.debug_barrier()

        dA = scores(values, dh, None, PRECISION)
        if NORMALIZE:
            dz = load_numbers(slopes, start, N, 0.0, C)
            dA += dz[None, :]
        dA = hide(dA, i, j, True, 0).to(DOT)
        dphi = _precise(values, S, tl.zeros((C, F), ACC), False, DOT, PRECISION)
        dphi = dot(dA, phi_q, dphi, PRECISION)
        if NORMALIZE:
            dphi += z[None, :]
            z += tl.sum(phi_q.to(ACC) * dz[:, None], 0)
        S = dot(tl.trans(dh), phi_q, S, PRECISION)

        tl.debug_barrier()
        for r in tl.static_range(R):
            x = load_rows(k + r * k_r, start, M, k_n, D, C, F).to(ACC)
            dx = dphi * _slope(x, 1.0, ELU)
            if MIXED:
                phi = _phi(x, 1.0, start, M, D, ELU)
                dpi += tl.where(components == r, tl.sum(phi * dphi), 0.0)
                dx *= tl.load(priors + r)
            store_rows(dk + r * M * D, dx, start, M, D, C, F)
    if MIXED:
        dpriors += (head * tl.num_programs(1) + c) * RP
        tl.store(dpriors + components, dpi)


# --- launching -----------------------------------------------------------------------------------


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, priors: Tensor | None = None, *, scale: float | None = None,
    elu: bool = False, normalize: bool = False, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Compute h_i = Σ_{j≤i} (φ(q_i)ᵀ Σ_r π_r φ(k_jr)) v_j, over the sum of the weights or not.

    Parameters
    ----------
    q, k, v : Tensor
        ``(..., H, N, F)``, ``(..., H, M, F)`` and ``(..., H, M, Dv)``; with `priors`, keys are
        ``(..., H, R, M, F)``. Leading dimensions are broadcast.
    priors : Tensor, optional
        π, ``(R,)`` or ``(H, R)``, float32 at least.
    scale : float, optional
        Multiplies q before φ. Only with `elu`.
    elu : bool
        Whether φ = elu + 1. Otherwise q and k are features.
    normalize : bool
        Whether to divide by Σ_j φ(q_i)ᵀφ(k_j); 0 where that is 0 or has lost its digits.
    dtype : torch.dtype, optional
        That of the result, and of products; but float16 is multiplied in TF32, as its range is too
        small for the sums. That of q where left out.

    Returns
    -------
    Tensor
        ``(..., H, N, Dv)``.
    """
    options = Options(scale or 1.0, elu, normalize, q.dtype if dtype is None else dtype)
    width = values_at_once(q.shape[-1], options, narrowest(options.product, q.device))
    if not width:
        raise ValueError(f"q has {q.shape[-1]} features a head; expected at most {WIDEST}")
    m = min(q.shape[-2], k.shape[-2])
    k, v = k[..., :m, :], v[..., :m, :]
    if priors is None:
        k = k.unsqueeze(-3)
    leading = torch.broadcast_shapes(q.shape[:-2], k.shape[:-3], v.shape[:-2])
    q, v = (_five(x.unsqueeze(-3), leading).squeeze(2) for x in (q, v))
    k = _five(k, leading)
    if priors is not None:
        priors = priors.expand(q.shape[1], -1).contiguous()
    outputs = [_causal(q, k, part, priors, *options) for part in v.split(width, -1)]
    return torch.cat(outputs, -1).reshape(*leading, q.shape[-2], v.shape[-1])


def _five(x: Tensor, leading: torch.Size) -> Tensor:
    """View x (..., R, n, D), with those leading dimensions, as (B, H, R, n, D)."""
    x = x.expand(*leading, *x.shape[-3:])
    return x.reshape(math.prod(leading[:-1]), *(leading[-1:] or (1,)), *x.shape[-3:])


def _forward(
    q: Tensor, k: Tensor, v: Tensor, priors: Tensor | None,
    scale: float, elu: bool, normalize: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the sums of q (B, H, N, F), k (B, H, R, M, F), M ≤ N, and v (B, H, M, Dv).

    And 1/z_i (B, H, N), where they are divided, and the states of segments.
    """
    call = _Call(q, k, v, priors, Options(scale, elu, normalize, dtype))
    out = call.new(*q.shape[:-1], v.shape[-1], dtype=dtype)
    scales, states = call.new(*q.shape[:-1] if normalize else (0,)), call.states()
    call.run(_key_states, call.count - 1, states=states)
    call.accumulate(states, False)
    call.run(_outputs, call.count, states=states, out=out, scales=scales)
    return out, scales, states


def _fake(
    q: Tensor, k: Tensor, v: Tensor, priors: Tensor | None,
    scale: float, elu: bool, normalize: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = _Call(q, k, v, priors, Options(scale, elu, normalize, dtype))
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=dtype)
    scales = q.new_empty(q.shape[:-1] if normalize else (0,), dtype=call.dtype)
    return out, scales, call.states()


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, priors: Tensor | None,
    out: Tensor, scales: Tensor, states: Tensor,
    scale: float, elu: bool, normalize: bool, dtype: torch.dtype, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    call = _Call(q, k, v, priors, Options(scale, elu, normalize, dtype), dout)
    dq, dk, dv = (call.new(*x.shape, dtype=x.dtype) for x in (q, k, v))
    dpriors = call.new(*q.shape[:2], max(call.count, 1), triton.next_power_of_2(k.shape[2]))
    sums = {"scales": scales, "slopes": call.new(*scales.shape)}
    call.run(_query_gradients, call.count, states=states, dq=dq, **sums)
    states = call.states()
    call.run(_query_states, call.count - 1, states=states, **sums)
    call.accumulate(states, True)
    sums |= {"dk": dk, "dv": dv, "dpriors": dpriors}
    call.run(_key_gradients, call.count, states=states, **sums)
    if priors is None or not needs[3]:
        return select_needed((dq, dk, dv), needs)
    return select_needed((dq, dk, dv, dpriors[..., : k.shape[2]].sum((0, 2)).to(priors)), needs)


_causal = operator("causal_sums", _forward, _backward, _fake)


class _Call:
    """The arguments that kernels take by their names, for some tensors."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, priors: Tensor | None, options: Options,
        dout: Tensor | None = None,
    ) -> None:  # fmt: skip
        tensors = {"q": q, "k": k, "v": v} | ({} if dout is None else {"dout": dout})
        tensors = {name: x if x.stride(-1) == 1 else x.contiguous() for name, x in tensors.items()}
        (B, H, N, D), (R, M), DV = q.shape, k.shape[2:4], v.shape[-1]
        self.like, self.heads = q, B * H
        self.empty = not (q.numel() and k.numel() and v.numel())
        self.dtype = torch.promote_types(q.dtype, torch.promote_types(options.dtype, torch.float32))
        segment = segment_length(N, self.heads, q.device)
        self.count = triton.cdiv(N, segment)
        least = narrowest(options.product, q.device)
        self.sizes = tile_width(D, least), tile_width(DV, least), options
        self.pool: dict[str, Any] = {"N": N, "M": M, "H": H, "segment": segment}
        self.pool |= {"scale": options.scale, "priors": q, "priors_h": 0}
        self.size = self.sizes[0] * (self.sizes[1] + 1)  # of a state
        self.pool |= tensors | _constants(D, DV, R, options, priors is not None, least)
        for name, x in tensors.items():
            dimensions = zip("bhrn" if name == "k" else "bhn", x.stride(), strict=False)
            self.pool |= {f"{name[0]}_{letter}": stride for letter, stride in dimensions}
        if priors is not None:
            self.pool |= {"priors": priors, "priors_h": priors.stride(0)}

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for a kernel to write, or zeros where nothing is to be launched."""
        make = self.like.new_zeros if self.empty else self.like.new_empty
        return make(shape, dtype=dtype or self.dtype)

    def states(self) -> Tensor:
        """Return memory for the states of all segments but one, without dimensions.

        To a compiler that has a symbol for N, a dimension of no or one segment would be another.
        """
        return self.new(self.heads * max(self.count - 1, 0) * self.size)

    def accumulate(self, states: Tensor, reverse: bool) -> None:
        """Add up the states of segments."""
        count = self.count - 1
        if count > 1:
            sizes = {"states": states, "count": count, "size": self.size, "REVERSE": reverse}
            self.run(_accumulate, triton.cdiv(self.size, TILE["E"]), **sizes)

    def run(self, kernel: Any, programs: int, **arguments: Any) -> None:
        """Launch that many programs for each head."""
        if self.empty or programs <= 0:
            return
        arguments = self.pool | arguments | blocks(*self.sizes, kernel in BACKWARD)
        launch(kernel, (self.heads, programs), self.like, arguments)


def segment_length(N: int, heads: int, device: torch.device) -> int:
    """Return how many positions a program has, for programs to fill the GPU."""
    cuda = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1
    count = max(1, PROGRAMS * processors // max(heads, 1))
    # Asked in this order, 1 is never more, unless N is 0: for compilers one case.
    return SEGMENT * max(triton.cdiv(triton.cdiv(N, SEGMENT), count), 1)


def _constants(
    D: int, DV: int, R: int, options: Options, mixed: bool, least: int = 16
) -> dict[str, Any]:
    """Return the constants of kernels, without the positions of a block."""
    acc = torch.promote_types(options.product, torch.float32)
    return {
        "D": D, "DV": DV, "R": R, "ELU": options.elu, "MIXED": mixed,
        "NORMALIZE": options.normalize, "TINY": torch.finfo(acc).tiny,
        "F": tile_width(D, least), "V": tile_width(DV, least), "RP": triton.next_power_of_2(R),
        "DOT": TL[options.product], "PRECISION": options.precision, **TILE,
    }  # fmt: skip


BACKWARD = (_query_gradients, _key_gradients)  # with blocks of their own
