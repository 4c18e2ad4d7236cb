"""Kernels of mixtures of keys: soft and hard, with keys that are free and keys that are shifted.

In the notation of `derived_attention.mixture.core`, all of them have scores ::

    s_ijr = a_r q_i·k_jr + u_ir + w_jr

and weights exp(s_ij) over their sum, with s_ij = log Σ_r exp(s_ijr), or max_r s_ijr in the hard
form. Free keys have w_jr = log π_r − a_r ‖k_jr‖²/2 and, where the precisions a_r differ, u_ir =
−a_r ‖q_i‖²/2; shifted ones have one key for all r, and u and w from
`derived_attention.mixture.shifted`. PyTorch makes a, u and w, of O(R (N + M)) numbers,
and takes their gradients on. In half precision q·k is rounded nowhere, and neither are u and w:
they are added to it in float32.

A block of queries meets the keys a block at a time, as in [Dao2022]: R products of scores, one of
values, and no score in memory. The backward pass makes the scores again, with dS_ijr = P_ijr (dO_i·
v_j − dO_i·O_i). Over blocks of queries it sums dq and du, and over blocks of keys dk, dv and dw:
each sum has one owner and one order, so that results repeat to the last bit.
"""

# mypy: disable-error-code="assignment, has-type, misc"
# In kernels a tuple grows, one tensor a component.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from derived_attention.common.kernels import NAMES, Launch
from derived_attention.common.masks import Mask, narrowed
from derived_attention.common.operators import needed, operator
from derived_attention.common.triton import (
    dot,
    is_hopper,
    launch,
    load_numbers,
    load_rows,
    narrowest,
    padded,
    place,
    precision,
    scores,
    store_numbers,
    store_rows,
)
from derived_attention.common.tuning import tuned

LOG2E = tl.constexpr(math.log2(math.e))  # GPUs compute exp2
LARGE = tl.constexpr(1.5e38)  # a finite mask stays finite in base 2
INF = tl.constexpr(math.inf)


# --- the kernels ---------------------------------------------------------------------------------


@triton.jit
def _bias(
    MASK, i, j, stride_n, stride_m, N, M,
    DIAGONAL: tl.constexpr, HAS_MASK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return what a mask adds to the scores, in base 2, of queries i and keys j.

    They are (C, 1) and (1, C'), or (1, C) and (C', 1).
    """
    bias = 0.0
    if DIAGONAL:
        bias = tl.where(i >= j, 0.0, -INF)
    elif HAS_MASK:
        at = MASK + i.to(tl.int64) * stride_n + j.to(tl.int64) * stride_m
        mask = tl.load(at, (i < N) & (j < M), other=0)
        if MASK.dtype.element_ty == tl.uint8:
            bias = tl.where(mask != 0, 0.0, -INF)
        else:
            mask = mask.to(ACC)
            inside = tl.minimum(tl.maximum(mask * LOG2E, -LARGE), LARGE)
            bias = tl.where(mask == -INF, -INF, inside)
    return bias


@triton.jit
def _score(dots, a, w, u, bias, HAS_U: tl.constexpr, BIASED: tl.constexpr):
    """Return s_ijr in base 2 from q_i·k_jr; w, u and the bias of a mask broadcast to it."""
    score = dots * (a * LOG2E) + w * LOG2E
    if HAS_U:
        score += u * LOG2E
    if BIASED:
        score += bias
    return score


@triton.jit
def _shares(s, most, HARD: tl.constexpr):
    """Return Z_i P_ijr = exp(s_ijr − m_i) for all r, or the first best one and zeros."""
    result = ()
    if HARD:
        best = s[0]
        for r in tl.static_range(1, len(s)):
            best = tl.maximum(best, s[r])
        left = tl.exp2(best - most)
        for r in tl.static_range(len(s) - 1):
            share = tl.where(s[r] == best, left, 0.0)
            left -= share
            result = result + (share,)
        result = result + (left,)
    else:
        for r in tl.static_range(len(s)):
            result = result + (tl.exp2(s[r] - most),)
    return result


@triton.jit
def _sum(parts):
    total = parts[0]
    for r in tl.static_range(1, len(parts)):
        total += parts[r]
    return total


@triton.jit
def forward(
    Q, K, V, A, U, W, MASK, OUT, TOP, SUM,
    q_b, q_h, q_n, k_b, k_h, k_r, k_m, v_b, v_h, v_m, mask_b, mask_h, mask_n, mask_m, H, N, M,
    R: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SHARED: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, HAS_U: tl.constexpr,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O_i = Σ_j exp(s_ij − m_i) v_j / Z_i for a block of queries, with m_i = max_jr s_ijr.

    Each component of a block of keys is one step of the online softmax: it raises m_i, and what was
    summed shrinks by the same factor. For the backward pass it stores m_i and Z_i = Σ_j exp(s_ij −
    m_i); m_i + log Z_i would lose Z_i where all keys of a query have a mask such as −1e38. A query
    without keys leaves m_i = ∞ there, so that exp(s_ij − ∞) = 0, and Z_i = 1.
    """
    ACC: tl.constexpr = W.dtype.element_ty
    z, start_n = place(N, BLOCK_N)
    b, h = z // H, z % H
    MASK += b * mask_b + h * mask_h
    i, block = (start_n + tl.arange(0, BLOCK_N))[:, None], tl.arange(0, BLOCK_M)[None, :]
    q = load_rows(Q + b * q_b + h * q_h, start_n, N, q_n, D, BLOCK_N, BLOCK_D)
    m = tl.full((BLOCK_N,), -INF, ACC)
    Z = tl.zeros((BLOCK_N,), ACC)
    out = tl.zeros((BLOCK_N, BLOCK_DV), ACC)
    edge = tl.minimum(start_n // BLOCK_M * BLOCK_M, M) if CAUSAL else M
    for diagonal in tl.static_range(1 + CAUSAL):  # blocks that every query sees, and the others
        first = start_n // BLOCK_M * BLOCK_M if diagonal else 0
        last = tl.minimum(start_n + BLOCK_N, M) if diagonal else edge
        for start_m in range(first, last, BLOCK_M):
            bias = _bias(MASK, i, start_m + block, mask_n, mask_m, N, M, diagonal, HAS_MASK, ACC)
            shrunk = tl.full((BLOCK_N,), 1.0, ACC)
            for r in tl.static_range(R):
                if r == 0 or not SHARED:
                    keys = K + b * k_b + h * k_h + r * k_r
                    k = load_rows(keys, start_m, M, k_m, D, BLOCK_M, BLOCK_D)
                    dots = scores(q, k, None, PRECISION)
                w = load_numbers(W + (z * R + r) * M, start_m, M, -INF, BLOCK_M)  # no key beyond M
                u = m
                if HAS_U:
                    u = load_numbers(U + (z * R + r) * N, start_n, N, 0.0, BLOCK_N)
                a = tl.load(A + h * R + r)
                s = _score(dots, a, w[None, :], u[:, None], bias, HAS_U, HAS_MASK or diagonal)
                score = tl.maximum(score, s) if HARD and r > 0 else s  # noqa: F821
                if not HARD or r == R - 1:
                    highest = tl.maximum(m, tl.max(score, 1))
                    finite = tl.where(highest == -INF, 0.0, highest)  # −∞ − −∞ would be NaN
                    shrink = tl.exp2(m - finite)
                    new = tl.exp2(score - finite[:, None])
                    p = new if HARD or r == 0 else p * shrink[:, None] + new  # noqa: F821
                    shrunk *= shrink
                    m = highest
            v = load_rows(V + b * v_b + h * v_h, start_m, M, v_m, DV, BLOCK_M, BLOCK_DV)
            Z = Z * shrunk + tl.sum(p, 1)
            out = dot(p.to(v.dtype), v, out * shrunk[:, None], PRECISION)
    dead = m == -INF
    Z = tl.where(dead, 1.0, Z)
    store_rows(OUT + z * N * DV, out / Z[:, None], start_n, N, DV, BLOCK_N, BLOCK_DV)
    store_numbers(TOP + z * N, tl.where(dead, INF, m), start_n, N, BLOCK_N)
    store_numbers(SUM + z * N, Z, start_n, N, BLOCK_N)


@triton.jit
def backward_queries(
    Q, K, V, A, U, W, MASK, OUT, TOP, SUM, GRAD, DELTA, DQ, DU,
    q_b, q_h, q_n, k_b, k_h, k_r, k_m, v_b, v_h, v_m, mask_b, mask_h, mask_n, mask_m, H, N, M,
    R: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SHARED: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, HAS_U: tl.constexpr,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq_i = Σ_jr a_r dS_ijr k_jr and du_ir = Σ_j dS_ijr for a block of queries.

    dS_ijr = P_ijr (dO_i·v_j − δ_i), with δ_i = dO_i·O_i, which `backward_keys` needs as well.
    """
    ACC: tl.constexpr = W.dtype.element_ty
    z, start_n = place(N, BLOCK_N)
    b, h = z // H, z % H
    MASK += b * mask_b + h * mask_h
    i, block = (start_n + tl.arange(0, BLOCK_N))[:, None], tl.arange(0, BLOCK_M)[None, :]
    q = load_rows(Q + b * q_b + h * q_h, start_n, N, q_n, D, BLOCK_N, BLOCK_D)
    g = load_rows(GRAD + z * N * DV, start_n, N, DV, DV, BLOCK_N, BLOCK_DV)
    o = load_rows(OUT + z * N * DV, start_n, N, DV, DV, BLOCK_N, BLOCK_DV)
    delta = tl.sum(g.to(ACC) * o.to(ACC), 1)
    store_numbers(DELTA + z * N, delta, start_n, N, BLOCK_N)
    top = load_numbers(TOP + z * N, start_n, N, INF, BLOCK_N)
    Z = load_numbers(SUM + z * N, start_n, N, 1.0, BLOCK_N)  # divides the sums over keys
    a, u, du = (), (), ()
    for r in tl.static_range(R):
        a = a + (tl.load(A + h * R + r),)
        row = top
        if HAS_U:
            row = load_numbers(U + (z * R + r) * N, start_n, N, 0.0, BLOCK_N)
            du = du + (tl.zeros((BLOCK_N,), ACC),)
        u = u + (row,)
    most = a[0]  # what is left of the a_r in dS is at most 1: no overflow in float16
    for r in tl.static_range(1, R):
        most = tl.maximum(most, a[r])
    dq = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    edge = tl.minimum(start_n // BLOCK_M * BLOCK_M, M) if CAUSAL else M
    for diagonal in tl.static_range(1 + CAUSAL):
        first = start_n // BLOCK_M * BLOCK_M if diagonal else 0
        last = tl.minimum(start_n + BLOCK_N, M) if diagonal else edge
        for start_m in range(first, last, BLOCK_M):
            bias = _bias(MASK, i, start_m + block, mask_n, mask_m, N, M, diagonal, HAS_MASK, ACC)
            keys, s = (), ()
            for r in tl.static_range(R):
                if r == 0 or not SHARED:
                    k = K + b * k_b + h * k_h + r * k_r
                    keys = keys + (load_rows(k, start_m, M, k_m, D, BLOCK_M, BLOCK_D),)
                    dots = scores(q, keys[r], None, PRECISION)
                w = load_numbers(W + (z * R + r) * M, start_m, M, -INF, BLOCK_M)
                biased = HAS_MASK or diagonal
                s = s + (_score(dots, a[r], w[None, :], u[r][:, None], bias, HAS_U, biased),)
            v = load_rows(V + b * v_b + h * v_h, start_m, M, v_m, DV, BLOCK_M, BLOCK_DV)
            dp = scores(g, v, None, PRECISION) - delta[:, None]
            p = _shares(s, top[:, None], HARD)
            if SHARED:
                dq = dot((_sum(p) * dp).to(q.dtype), keys[0], dq, PRECISION)
            else:
                for r in tl.static_range(R):
                    dq = dot((p[r] * dp * (a[r] / most)).to(q.dtype), keys[r], dq, PRECISION)
            if HAS_U:
                sums = ()
                for r in tl.static_range(R):
                    sums = sums + (du[r] + tl.sum(p[r] * dp, 1),)
                du = sums
    store_rows(DQ + z * N * D, dq * (most / Z)[:, None], start_n, N, D, BLOCK_N, BLOCK_D)
    if HAS_U:
        for r in tl.static_range(R):
            store_numbers(DU + (z * R + r) * N, du[r] / Z, start_n, N, BLOCK_N)


@triton.jit
def backward_keys(
    Q, K, V, A, U, W, MASK, TOP, SUM, GRAD, DELTA, DK, DV_, DW, DA,
    q_b, q_h, q_n, k_b, k_h, k_r, k_m, v_b, v_h, v_m, mask_b, mask_h, mask_n, mask_m, H, N, M,
    R: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SHARED: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, HAS_U: tl.constexpr,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum over queries: dv_j = Σ_i P_ij dO_i, dk_jr = a_r Σ_i dS_ijr q_i and dw_jr = Σ_i dS_ijr.

    Scores are (keys, queries) here, as the products that follow want them. The gradient of a_r is
    Σ_ij dS_ijr q_i·k_jr, so the share of token j in it is k_jr·dk_jr / a_r.
    """
    ACC: tl.constexpr = W.dtype.element_ty
    C: tl.constexpr = 1 if SHARED else R  # keys of a token
    z, start_m = place(M, BLOCK_M)
    b, h = z // H, z % H
    MASK += b * mask_b + h * mask_h
    j, block = (start_m + tl.arange(0, BLOCK_M))[:, None], tl.arange(0, BLOCK_N)[None, :]
    v = load_rows(V + b * v_b + h * v_h, start_m, M, v_m, DV, BLOCK_M, BLOCK_DV)
    dv = tl.zeros((BLOCK_M, BLOCK_DV), ACC)
    k, dk = (), ()
    for r in tl.static_range(C):
        keys = K + b * k_b + h * k_h + r * k_r
        k = k + (load_rows(keys, start_m, M, k_m, D, BLOCK_M, BLOCK_D),)
        dk = dk + (tl.zeros((BLOCK_M, BLOCK_D), ACC),)
    a, w, dw = (), (), ()
    for r in tl.static_range(R):
        a = a + (tl.load(A + h * R + r),)
        w = w + (load_numbers(W + (z * R + r) * M, start_m, M, -INF, BLOCK_M),)
        dw = dw + (tl.zeros((BLOCK_M,), ACC),)
    edge = tl.cdiv(start_m + BLOCK_M, BLOCK_N) * BLOCK_N if CAUSAL else 0
    for diagonal in tl.static_range(1 + CAUSAL):
        first = start_m // BLOCK_N * BLOCK_N if diagonal else edge
        last = tl.minimum(edge, N) if diagonal else N
        for start_n in range(first, last, BLOCK_N):
            bias = _bias(MASK, start_n + block, j, mask_n, mask_m, N, M, diagonal, HAS_MASK, ACC)
            q = load_rows(Q + b * q_b + h * q_h, start_n, N, q_n, D, BLOCK_N, BLOCK_D)
            top = load_numbers(TOP + z * N, start_n, N, INF, BLOCK_N)  # no query beyond N
            s = ()
            for r in tl.static_range(R):
                if r == 0 or not SHARED:
                    dots = scores(k[r], q, None, PRECISION)
                u = top
                if HAS_U:
                    u = load_numbers(U + (z * R + r) * N, start_n, N, 0.0, BLOCK_N)
                biased = HAS_MASK or diagonal
                s = s + (_score(dots, a[r], w[r][:, None], u[None, :], bias, HAS_U, biased),)
            share = (1 / load_numbers(SUM + z * N, start_n, N, 1.0, BLOCK_N))[None, :]
            p = _shares(s, top[None, :], HARD)
            g = load_rows(GRAD + z * N * DV, start_n, N, DV, DV, BLOCK_N, BLOCK_DV)
            P = _sum(p)
            dv = dot((P * share).to(g.dtype), g, dv, PRECISION)
            delta = load_numbers(DELTA + z * N, start_n, N, 0.0, BLOCK_N)
            dp = (scores(v, g, None, PRECISION) - delta[None, :]) * share
            sums = ()
            for r in tl.static_range(C):
                ds = ((P if SHARED else p[r]) * dp).to(q.dtype)
                sums = sums + (dot(ds, q, dk[r], PRECISION),)
            dk = sums
            sums = ()
            for r in tl.static_range(R):
                sums = sums + (dw[r] + tl.sum(p[r] * dp, 1),)
            dw = sums
    store_rows(DV_ + z * M * DV, dv, start_m, M, DV, BLOCK_M, BLOCK_DV)
    for r in tl.static_range(C):
        store_rows(DK + (z * C + r) * M * D, dk[r] * a[r], start_m, M, D, BLOCK_M, BLOCK_D)
        store_numbers(DA + (z * C + r) * M, tl.sum(dk[r] * k[r].to(ACC), 1), start_m, M, BLOCK_M)
    for r in tl.static_range(R):
        store_numbers(DW + (z * R + r) * M, dw[r], start_m, M, BLOCK_M)


# --- how they are launched -----------------------------------------------------------------------


# Queries and keys in a block, warps, stages of loads: for heads of up to 64, 128, and more
# features, in half precision and in float32, whose exact products keep their numbers in registers.
BLOCKS = {
    ("forward", 2): ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
    ("backward_queries", 2): ((128, 32, 8, 2), (64, 32, 4, 2), (64, 16, 8, 1)),
    ("backward_keys", 2): ((32, 128, 8, 2), (32, 32, 4, 1), (16, 32, 8, 1)),
    ("forward", 4): ((32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("backward_queries", 4): ((32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("backward_keys", 4): ((32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}
# The fastest of many on an H100, causal, with 16,384 tokens: by time, whatever spills.
HOPPER = BLOCKS | {
    ("forward", 2): ((64, 128, 4, 2), (128, 64, 8, 3), (64, 32, 8, 1)),
    ("backward_queries", 2): ((128, 64, 8, 2), (128, 64, 8, 2), (64, 16, 8, 1)),
    ("backward_keys", 2): ((32, 128, 8, 2), (16, 128, 8, 2), (16, 32, 8, 1)),
}


def blocks(
    kernel: Any, head_dim: int, dtype: torch.dtype, keys: int, hard: bool, hopper: bool
) -> dict[str, int]:
    """Return the sizes of blocks, warps and stages for tokens with that many keys each.

    The tables are for two keys. More are like wider heads, as each has its sums. To know the best
    component, the hard form holds one more block of scores.
    """
    width = head_dim * max(1, (keys + 1) / 3)
    sizes = (HOPPER if hopper else BLOCKS)[kernel.__name__, min(dtype.itemsize, 4)]
    N, M, warps, stages = sizes[(width > 64) + (width > 128)]
    N = 16 if hard and kernel is backward_keys and not hopper else N
    return {"BLOCK_N": N, "BLOCK_M": M, "num_warps": warps, "num_stages": stages}


STRIDES = "q_b q_h q_n k_b k_h k_r k_m v_b v_h v_m mask_b mask_h mask_n mask_m".split()


def attend(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, u: Tensor | None, w: Tensor, mask: Mask, hard: bool
) -> Tensor:
    """Return attention with s_ijr = a_r q_i·k_jr + u_ir + w_jr.

    Parameters
    ----------
    q, k, v : Tensor
        ``(..., H, N, D)``, ``(..., H, R or 1, M, D)`` and ``(..., H, M, Dv)``, in one dtype.
    a, u, w : Tensor
        ``(R, 1, 1)`` or ``(H, R, 1, 1)``, ``(..., H, R, N)`` or None, and ``(..., H, R, M)``, in
        float32 at least.
    mask : Mask
        Without a gradient.
    hard : bool
        Whether s_ij is max_r s_ijr.
    """
    a = a.flatten(-3).expand(*(q.shape[-3:-2] or (1,)), -1).contiguous()  # (H, R)
    bias = mask.given
    if bias is not None:
        bias = narrowed(bias, w.dtype) if bias.dtype == torch.float64 else bias
        bias = bias.view(torch.uint8) if bias.dtype == torch.bool else bias
        bias = _heads(bias.expand(*q.shape[:-1], k.shape[-2]), 2)
    Q, K, V = _heads(q, 2), _heads(k, 3), _heads(v, 2)
    Q, K, V = (x if x.stride(-1) == 1 else x.contiguous() for x in (Q, K, V))
    u = None if u is None else _heads(u, 2).contiguous()
    w = _heads(w, 2).contiguous()
    out = _attend(Q, K, V, a, u, w, bias, mask.is_causal, hard)
    return out.view(*q.shape[:-1], v.shape[-1])


def _heads(x: Tensor, last: int) -> Tensor:
    """View what comes before that many last dimensions as (B, H)."""
    leading = x.dim() - last
    return x.flatten(0, leading - 2) if leading > 2 else x[(None,) * (2 - leading)]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, u: Tensor | None, w: Tensor, mask: Tensor | None,
    is_causal: bool, hard: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return O (B, H, N, Dv), and m_i and Z_i (B, H, N), by the kernels.

    Of q (B, H, N, D), k (B, H, R or 1, M, D) and v (B, H, M, Dv), with a (H, R), u (B, H, R, N) or
    None and w (B, H, R, M) in the dtype of sums, and a mask (B, H, N, M) or None, of any strides.
    """
    out = _memory(q, v)(*q.shape[:-1], v.shape[-1])
    rows = {"TOP": w.new_empty(q.shape[:-1]), "SUM": w.new_empty(q.shape[:-1])}
    inputs = (q, k, v, a, u, w, mask)
    _launch(forward, (is_causal, hard), inputs, {"OUT": out, **rows})
    return out, rows["TOP"], rows["SUM"]


def _memory(q: Tensor, v: Tensor) -> Callable[..., Tensor]:
    """Return what makes memory for kernels to write, or zeros where nothing is to be launched."""
    return q.new_empty if q.numel() and v.numel() else q.new_zeros


def _fake(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, u: Tensor | None, w: Tensor, mask: Tensor | None,
    is_causal: bool, hard: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out = v.new_empty(*q.shape[:-1], v.shape[-1])
    return out, w.new_empty(q.shape[:-1]), w.new_empty(q.shape[:-1])


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, u: Tensor | None, w: Tensor,
    mask: Tensor | None, out: Tensor, top: Tensor, Z: Tensor,
    is_causal: bool, hard: bool, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of what needs one; the mask does not."""
    inputs, how = (q, k, v, a, u, w, mask), (is_causal, hard)
    new = _memory(q, v)
    dq, dk, dv, du, dw = (x if x is None else new(x.shape, dtype=x.dtype) for x in (q, k, v, u, w))
    da = new(k.shape[:-1], dtype=w.dtype)  # of each key
    grads = {"TOP": top, "SUM": Z, "GRAD": grad.contiguous(), "DELTA": torch.empty_like(Z)}
    _launch(backward_queries, how, inputs, {"OUT": out, **grads, "DQ": dq, "DU": du})
    _launch(backward_keys, how, inputs, {**grads, "DK": dk, "DV_": dv, "DW": dw, "DA": da})
    da = da.sum((0, -1)) if needs[3] else None
    return needed((dq, dk, dv, da, du, dw), needs)


_attend = operator("mixture", _forward, _backward, _fake)


def _launch(
    kernel: Any, how: tuple[bool, bool], inputs: Sequence[Tensor | None],
    others: Mapping[str, Tensor | None],
) -> None:  # fmt: skip
    """Run a kernel, with a program for each block of queries, or keys, of each head."""
    (q, k, v, a, u, w, mask), (is_causal, hard) = inputs, how
    assert q is not None and k is not None and v is not None and w is not None
    (B, H, N, D), (R, M), Dv = q.shape, w.shape[2:], v.shape[-1]
    if 0 in (B, H, N, M, Dv):
        return
    sizes = blocks(kernel, max(D, Dv), q.dtype, k.shape[2], hard, is_hopper(q.device))
    kind = "hard" if hard else "shifted" if k.shape[2] < R else "soft"
    if q.dtype in NAMES:
        label = f"mixture.{kernel.__name__} {kind} {NAMES[q.dtype]} R={R} {D} {Dv}"
        sizes = tuned(q.device, label, sizes)
    by_key = kernel is backward_keys
    count = triton.cdiv(M, sizes["BLOCK_M"]) if by_key else triton.cdiv(N, sizes["BLOCK_N"])
    tensors = {"Q": q, "K": k, "V": v, "A": a, "U": u, "W": w, "MASK": mask, **others}
    strides = (*q.stride()[:3], *k.stride()[:4], *v.stride()[:3])
    strides += (0, 0, 0, 0) if mask is None else mask.stride()
    arguments: dict[str, Any] = {x: w if y is None else y for x, y in tensors.items()}  # not read
    arguments |= dict(zip(STRIDES, strides, strict=True)) | sizes
    arguments |= {"H": H, "N": N, "M": M} | _constants(
        D, Dv, R, k.shape[2] < R, hard, narrowest(q.dtype, q.device)
    )
    arguments |= {"CAUSAL": int(is_causal), "HAS_U": u is not None}
    launch(kernel, (count * B * H,), q, arguments | {"HAS_MASK": mask is not None})


def _constants(
    D: int, Dv: int, R: int, shared: bool, hard: bool, least: int = 16
) -> dict[str, Any]:
    sizes = {"R": R, "D": D, "DV": Dv}
    sizes |= {"BLOCK_D": padded(D, least), "BLOCK_DV": padded(Dv, least)}
    return sizes | {"SHARED": shared, "HARD": hard, "PRECISION": precision()}


# --- what a GPU is to do -------------------------------------------------------------------------


def launches(head_dim: int, dtype: torch.dtype, hopper: bool) -> list[Launch]:
    """Return every kernel as it is launched for R = 2, without a mask, from 4096 tokens."""
    kinds = [(False, False), (False, True)]  # hard, shared
    if dtype.itemsize == 2:  # else it takes what the soft form does
        kinds.append((True, False))
    kernels = (forward, backward_queries, backward_keys)
    return [_planned(x, head_dim, dtype, *kind, hopper) for kind in kinds for x in kernels]


def _planned(
    kernel: Any, D: int, dtype: torch.dtype, hard: bool, shared: bool, hopper: bool
) -> Launch:
    R, H, N = 2, 8, 4096
    rows, keys = (H * N * D, N * D, D), (H * R * N * D, R * N * D, N * D, D)
    # Strides are numbers here: Triton looks at which of them are multiples of 16.
    constants = dict(zip(STRIDES, (*rows, *keys, *rows, 0, 0, 0, 0), strict=True))
    constants |= _constants(D, D, R, shared, hard) | {"CAUSAL": 0}
    constants |= {"HAS_U": shared, "HAS_MASK": False}
    constants |= blocks(kernel, D, dtype, 1 if shared else R, hard, hopper)
    types = {"H": "i32", "N": "i32", "M": "i32"}
    sums = ("A", "U", "W", "MASK", "TOP", "SUM", "DELTA", "DU", "DW", "DA")
    types |= dict.fromkeys(sums, "*fp32")
    kind = "hard" if hard else "shifted" if shared else "soft"
    name = f"mixture.{kernel.__name__}, {kind}"
    return Launch.of(name, kernel, types, f"*{NAMES[dtype]}", constants)
