"""Kernels of mixtures of keys: soft and hard, with keys that are free and keys that are shifted.

In the notation of `derived_attention.attention.mixture.fast`, all of them have scores ::

    s_ijr = a_r q_i·k_jr + u_ir + w_jr

and weights exp(s_ij) over their sum, with s_ij = log Σ_r exp(s_ijr), or max_r s_ijr in the hard
form. Free keys have w_jr = log π_r − a_r ‖k_jr‖²/2 and, where the precisions a_r differ, u_ir =
−a_r ‖q_i‖²/2; shifted ones have one key for all r, and u and w from
`derived_attention.attention.mixture.shifted`. PyTorch makes a, u and w, of O(R (N + M)) numbers,
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
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from derived_attention.attention.engine.kernels import NAMES, Launch, Work, interpreted
from derived_attention.attention.frame.convention import full_precision
from derived_attention.attention.frame.masks import Mask, narrowed
from derived_attention.attention.mixture.fast import Components, autocast_dtype, centred
from derived_attention.attention.mixture.shifted import separate

LOG2E = tl.constexpr(math.log2(math.e))  # exp2 is what a GPU has
LARGE = tl.constexpr(1.5e38)  # a finite mask stays finite in base 2
INF = tl.constexpr(math.inf)
INTERPRETED = tl.constexpr(interpreted())


# --- the kernels ---------------------------------------------------------------------------------


@triton.jit
def _rows(x, start, count, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return where SIZE rows of a matrix (count, WIDTH) are from a first one on, and which are."""
    rows, columns = tl.arange(0, SIZE), tl.arange(0, BLOCK)
    there = (rows < count - start)[:, None]
    if BLOCK > WIDTH:
        there = there & (columns < WIDTH)[None, :]
    first = x + tl.cast(start, tl.int64) * stride  # what is left is the same for all blocks
    return first + rows[:, None] * stride + columns[None, :], there


@triton.jit
def _load(x, start, count, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of a matrix, with zeros beyond its rows and its width."""
    at, there = _rows(x, start, count, stride, SIZE, WIDTH, BLOCK)
    return tl.load(at, there, other=0.0)


@triton.jit
def _store(x, value, start, count, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store rows of a contiguous matrix."""
    at, there = _rows(x, start, count, WIDTH, SIZE, WIDTH, BLOCK)
    tl.store(at, value.to(x.dtype.element_ty), there)


@triton.jit
def _numbers(x, start, count, other, SIZE: tl.constexpr):
    """Load SIZE numbers of a vector (count,), from a first one on, with `other` beyond them."""
    each = tl.arange(0, SIZE)
    return tl.load(x + start + each, each < count - start, other=other)


@triton.jit
def _put(x, value, start, count, SIZE: tl.constexpr):
    """Store numbers of a vector."""
    each = tl.arange(0, SIZE)
    tl.store(x + start + each, value, each < count - start)


@triton.jit
def _dot(a, b, total, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """Return a b, added to a total if there is one."""
    if INTERPRETED and a.dtype == tl.bfloat16:  # of which the interpreter multiplies the bits
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, out_dtype=ACC)
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def _bias(MASK, i, j, stride_n, stride_m, N, M, DIAGONAL: tl.constexpr, ACC: tl.constexpr):
    """Return what a mask adds to the scores, in base 2, of queries i and keys j.

    They are (C, 1) and (1, C'), or (1, C) and (C', 1).
    """
    if DIAGONAL:
        return tl.where(i >= j, 0.0, -INF)
    at = MASK + i.to(tl.int64) * stride_n + j.to(tl.int64) * stride_m
    given = tl.load(at, (i < N) & (j < M), other=0)
    if MASK.dtype.element_ty == tl.uint8:
        return tl.where(given != 0, 0.0, -INF)
    given = given.to(ACC)
    inside = tl.minimum(tl.maximum(given * LOG2E, -LARGE), LARGE)
    return tl.where(given == -INF, -INF, inside)


@triton.jit
def _shares(scores, most, HARD: tl.constexpr):
    """Return Z_i P_ijr = exp(s_ijr − m_i) for all r, or the first best one and zeros."""
    result = ()
    if HARD:
        best = scores[0]
        for r in tl.static_range(1, len(scores)):
            best = tl.maximum(best, scores[r])
        left = tl.exp2(best - most)
        for r in tl.static_range(len(scores) - 1):
            own = tl.where(scores[r] == best, left, 0.0)
            left -= own
            result = result + (own,)
        result = result + (left,)
    else:
        for r in tl.static_range(len(scores)):
            result = result + (tl.exp2(scores[r] - most),)
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
    blocks = tl.cdiv(N, BLOCK_N)
    start_n = tl.program_id(0) % blocks * BLOCK_N
    z = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = z // H, z % H
    i, among = start_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    q = _load(Q + b * q_b + h * q_h, start_n, N, q_n, BLOCK_N, D, BLOCK_D)
    m = tl.full((BLOCK_N,), -INF, ACC)
    Z = tl.zeros((BLOCK_N,), ACC)
    out = tl.zeros((BLOCK_N, BLOCK_DV), ACC)
    edge = tl.minimum(start_n // BLOCK_M * BLOCK_M, M) if CAUSAL else M
    for diagonal in tl.static_range(1 + CAUSAL):  # blocks that every query sees, and the others
        first = start_n // BLOCK_M * BLOCK_M if diagonal else 0
        last = tl.minimum(start_n + BLOCK_N, M) if diagonal else edge
        for start_m in range(first, last, BLOCK_M):
            j = start_m + among
            if HAS_MASK or diagonal:
                at = MASK + b * mask_b + h * mask_h
                bias = _bias(at, i[:, None], j[None, :], mask_n, mask_m, N, M, diagonal, ACC)
            shrunk = tl.full((BLOCK_N,), 1.0, ACC)
            for r in tl.static_range(R):
                if r == 0 or not SHARED:
                    k = _load(K + b * k_b + h * k_h + r * k_r, start_m, M, k_m, BLOCK_M, D, BLOCK_D)
                    dots = _dot(q, tl.trans(k), None, ACC, PRECISION)
                w = _numbers(W + (z * R + r) * M, start_m, M, -INF, BLOCK_M)  # no key beyond M
                own = dots * (tl.load(A + h * R + r) * LOG2E) + (w * LOG2E)[None, :]
                if HAS_U:
                    u = _numbers(U + (z * R + r) * N, start_n, N, 0.0, BLOCK_N)
                    own += (u * LOG2E)[:, None]
                if HAS_MASK or diagonal:
                    own += bias
                if HARD:
                    score = own if r == 0 else tl.maximum(score, own)  # noqa: F821
                else:
                    score = own
                if not HARD or r == R - 1:
                    highest = tl.maximum(m, tl.max(score, 1))
                    finite = tl.where(highest == -INF, 0.0, highest)  # −∞ − −∞ would be NaN
                    shrink = tl.exp2(m - finite)
                    new = tl.exp2(score - finite[:, None])
                    p = new if HARD or r == 0 else p * shrink[:, None] + new  # noqa: F821
                    shrunk *= shrink
                    m = highest
            v = _load(V + b * v_b + h * v_h, start_m, M, v_m, BLOCK_M, DV, BLOCK_DV)
            Z = Z * shrunk + tl.sum(p, 1)
            out = out * shrunk[:, None]
            out = _dot(p.to(v.dtype), v, out, ACC, PRECISION)
    dead = m == -INF
    Z = tl.where(dead, 1.0, Z)
    _store(OUT + z * N * DV, out / Z[:, None], start_n, N, BLOCK_N, DV, BLOCK_DV)
    _put(TOP + z * N, tl.where(dead, INF, m), start_n, N, BLOCK_N)
    _put(SUM + z * N, Z, start_n, N, BLOCK_N)


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
    blocks = tl.cdiv(N, BLOCK_N)
    start_n = tl.program_id(0) % blocks * BLOCK_N
    z = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = z // H, z % H
    i, among = start_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    q = _load(Q + b * q_b + h * q_h, start_n, N, q_n, BLOCK_N, D, BLOCK_D)
    g = _load(GRAD + z * N * DV, start_n, N, DV, BLOCK_N, DV, BLOCK_DV)
    o = _load(OUT + z * N * DV, start_n, N, DV, BLOCK_N, DV, BLOCK_DV)
    delta = tl.sum(g.to(ACC) * o.to(ACC), 1)
    _put(DELTA + z * N, delta, start_n, N, BLOCK_N)
    top = _numbers(TOP + z * N, start_n, N, INF, BLOCK_N)
    Z = _numbers(SUM + z * N, start_n, N, 1.0, BLOCK_N)  # divides the sums over keys
    a = ()
    u = ()
    du = ()
    for r in tl.static_range(R):
        a = a + (tl.load(A + h * R + r),)
        if HAS_U:
            u = u + (_numbers(U + (z * R + r) * N, start_n, N, 0.0, BLOCK_N) * LOG2E,)
            du = du + (tl.zeros((BLOCK_N,), ACC),)
    most = a[0]  # what is left of the a_r in dS is at most 1: no overflow in float16
    for r in tl.static_range(1, R):
        most = tl.maximum(most, a[r])
    dq = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    edge = tl.minimum(start_n // BLOCK_M * BLOCK_M, M) if CAUSAL else M
    for diagonal in tl.static_range(1 + CAUSAL):
        first = start_n // BLOCK_M * BLOCK_M if diagonal else 0
        last = tl.minimum(start_n + BLOCK_N, M) if diagonal else edge
        for start_m in range(first, last, BLOCK_M):
            j = start_m + among
            if HAS_MASK or diagonal:
                at = MASK + b * mask_b + h * mask_h
                bias = _bias(at, i[:, None], j[None, :], mask_n, mask_m, N, M, diagonal, ACC)
            keys = ()
            scores = ()
            for r in tl.static_range(R):
                if r == 0 or not SHARED:
                    k = _load(K + b * k_b + h * k_h + r * k_r, start_m, M, k_m, BLOCK_M, D, BLOCK_D)
                    dots = _dot(q, tl.trans(k), None, ACC, PRECISION)
                    keys = keys + (k,)
                w = _numbers(W + (z * R + r) * M, start_m, M, -INF, BLOCK_M)
                own = dots * (a[r] * LOG2E) + (w * LOG2E)[None, :]
                if HAS_U:
                    own += u[r][:, None]
                if HAS_MASK or diagonal:
                    own += bias
                scores = scores + (own,)
            v = _load(V + b * v_b + h * v_h, start_m, M, v_m, BLOCK_M, DV, BLOCK_DV)
            dp = _dot(g, tl.trans(v), None, ACC, PRECISION) - delta[:, None]
            p = _shares(scores, top[:, None], HARD)
            if SHARED:
                ds = (_sum(p) * dp).to(q.dtype)
                dq = _dot(ds, keys[0], dq, ACC, PRECISION)
            else:
                for r in tl.static_range(R):
                    ds = (p[r] * dp * (a[r] / most)).to(q.dtype)
                    dq = _dot(ds, keys[r], dq, ACC, PRECISION)
            if HAS_U:
                new = ()
                for r in tl.static_range(R):
                    new = new + (du[r] + tl.sum(p[r] * dp, 1),)
                du = new
    _store(DQ + z * N * D, dq * (most / Z)[:, None], start_n, N, BLOCK_N, D, BLOCK_D)
    if HAS_U:
        for r in tl.static_range(R):
            _put(DU + (z * R + r) * N, du[r] / Z, start_n, N, BLOCK_N)


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
    C: tl.constexpr = 1 if SHARED else R  # keys a token has
    blocks = tl.cdiv(M, BLOCK_M)
    start_m = tl.program_id(0) % blocks * BLOCK_M
    z = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = z // H, z % H
    j, among = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    v = _load(V + b * v_b + h * v_h, start_m, M, v_m, BLOCK_M, DV, BLOCK_DV)
    dv = tl.zeros((BLOCK_M, BLOCK_DV), ACC)
    k = ()
    dk = ()
    for r in tl.static_range(C):
        k = k + (_load(K + b * k_b + h * k_h + r * k_r, start_m, M, k_m, BLOCK_M, D, BLOCK_D),)
        dk = dk + (tl.zeros((BLOCK_M, BLOCK_D), ACC),)
    a = ()
    w = ()
    dw = ()
    for r in tl.static_range(R):
        a = a + (tl.load(A + h * R + r),)
        w = w + (_numbers(W + (z * R + r) * M, start_m, M, -INF, BLOCK_M) * LOG2E,)
        dw = dw + (tl.zeros((BLOCK_M,), ACC),)
    edge = tl.cdiv(start_m + BLOCK_M, BLOCK_N) * BLOCK_N if CAUSAL else 0
    for diagonal in tl.static_range(1 + CAUSAL):
        first = start_m // BLOCK_N * BLOCK_N if diagonal else edge
        last = tl.minimum(edge, N) if diagonal else N
        for start_n in range(first, last, BLOCK_N):
            i = start_n + among
            if HAS_MASK or diagonal:
                at = MASK + b * mask_b + h * mask_h
                bias = _bias(at, i[None, :], j[:, None], mask_n, mask_m, N, M, diagonal, ACC)
            q = _load(Q + b * q_b + h * q_h, start_n, N, q_n, BLOCK_N, D, BLOCK_D)
            scores = ()
            for r in tl.static_range(R):
                if r == 0 or not SHARED:
                    dots = _dot(k[r], tl.trans(q), None, ACC, PRECISION)
                own = dots * (a[r] * LOG2E) + w[r][:, None]
                if HAS_U:
                    u = _numbers(U + (z * R + r) * N, start_n, N, 0.0, BLOCK_N)
                    own += (u * LOG2E)[None, :]
                if HAS_MASK or diagonal:
                    own += bias
                scores = scores + (own,)
            top = _numbers(TOP + z * N, start_n, N, INF, BLOCK_N)  # no query beyond N
            share = (1 / _numbers(SUM + z * N, start_n, N, 1.0, BLOCK_N))[None, :]
            p = _shares(scores, top[None, :], HARD)
            g = _load(GRAD + z * N * DV, start_n, N, DV, BLOCK_N, DV, BLOCK_DV)
            P = _sum(p)
            dv = _dot((P * share).to(g.dtype), g, dv, ACC, PRECISION)
            delta = _numbers(DELTA + z * N, start_n, N, 0.0, BLOCK_N)
            dp = (_dot(v, tl.trans(g), None, ACC, PRECISION) - delta[None, :]) * share
            sums = ()
            for r in tl.static_range(C):
                ds = ((P if SHARED else p[r]) * dp).to(q.dtype)
                own = _dot(ds, q, dk[r], ACC, PRECISION)
                sums = sums + (own,)
            dk = sums
            sums = ()
            for r in tl.static_range(R):
                sums = sums + (dw[r] + tl.sum(p[r] * dp, 1),)
            dw = sums
    _store(DV_ + z * M * DV, dv, start_m, M, BLOCK_M, DV, BLOCK_DV)
    for r in tl.static_range(C):
        _store(DK + (z * C + r) * M * D, dk[r] * a[r], start_m, M, BLOCK_M, D, BLOCK_D)
        _put(DA + (z * C + r) * M, tl.sum(dk[r] * k[r].to(ACC), 1), start_m, M, BLOCK_M)
    for r in tl.static_range(R):
        _put(DW + (z * R + r) * M, dw[r], start_m, M, BLOCK_M)


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


def blocks(kernel: Any, head_dim: int, dtype: torch.dtype, keys: int, hard: bool) -> dict[str, int]:
    """Return what to cut queries and keys into, for tokens with some keys each.

    The table is for two of them. More are like wider heads, as each has sums of its own. To know
    the best component, the hard form holds one more block of scores.
    """
    width = head_dim * max(1, (keys + 1) / 3)
    row = BLOCKS[kernel.__name__, min(dtype.itemsize, 4)]
    N, M, warps, stages = row[(width > 64) + (width > 128)]
    N = 16 if hard and kernel is backward_keys else N
    return {"BLOCK_N": N, "BLOCK_M": M, "num_warps": warps, "num_stages": stages}


STRIDES = "q_b q_h q_n k_b k_h k_r k_m v_b v_h v_m mask_b mask_h mask_n mask_m".split()


def _padded(D: int, Dv: int) -> dict[str, int]:
    """Return the widths of blocks: powers of two, and 16 is the least that a product takes."""
    return {
        f"BLOCK_{name}": max(16, triton.next_power_of_2(x))
        for name, x in zip(("D", "DV"), (D, Dv), strict=True)
    }


class _Attend(torch.autograd.Function):
    """Attention of q (B, H, N, D), k (B, H, R or 1, M, D) and v (B, H, M, Dv), by the kernels.

    With a (H, R), u (B, H, R, N) or None, w (B, H, R, M) in the dtype of sums, and a mask (B, H,
    N, M) or None, of any strides.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, a: Tensor, u: Tensor | None, w: Tensor,
        mask: Tensor | None, is_causal: bool, hard: bool
    ) -> Tensor:  # fmt: skip
        """Return O (B, H, N, Dv)."""
        ctx.is_causal, ctx.hard = is_causal, hard
        out = v.new_zeros(*q.shape[:-1], v.shape[-1])
        rows = {"TOP": w.new_empty(q.shape[:-1]), "SUM": w.new_empty(q.shape[:-1])}
        _launch(forward, ctx, (q, k, v, a, u, w, mask), {"OUT": out, **rows})
        ctx.save_for_backward(q, k, v, a, u, w, mask, out, *rows.values())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all but the mask."""
        *given, out, top, Z = ctx.saved_tensors
        q, k, v, a, u, w, _ = given
        dq, dk, dv, du, dw = (None if x is None else x.new_zeros(x.shape) for x in (q, k, v, u, w))
        da = w.new_zeros(k.shape[:-1])  # of each key
        grads = {"TOP": top, "SUM": Z, "GRAD": grad.contiguous(), "DELTA": torch.empty_like(Z)}
        _launch(backward_queries, ctx, given, {"OUT": out, **grads, "DQ": dq, "DU": du})
        _launch(backward_keys, ctx, given, {**grads, "DK": dk, "DV_": dv, "DW": dw, "DA": da})
        da = da.sum((0, -1)) if ctx.needs_input_grad[3] else None
        return dq, dk, dv, da, du, dw, None, None, None


def _launch(
    kernel: Any, ctx: Any, given: Sequence[Tensor | None], own: Mapping[str, Tensor | None]
) -> None:
    """Run a kernel, with a program for each block of queries, or keys, of each head."""
    q, k, v, a, u, w, mask = given
    assert q is not None and k is not None and v is not None and w is not None
    (B, H, N, D), (R, M), Dv = q.shape, w.shape[2:], v.shape[-1]
    if 0 in (B, H, N, M, Dv):
        return
    how = blocks(kernel, max(D, Dv), q.dtype, k.shape[2], ctx.hard)
    count = triton.cdiv(M, how["BLOCK_M"])
    if kernel is not backward_keys:
        count = triton.cdiv(N, how["BLOCK_N"])
    tensors = {"Q": q, "K": k, "V": v, "A": a, "U": u, "W": w, "MASK": mask, **own}
    strides = (*q.stride()[:3], *k.stride()[:4], *v.stride()[:3])
    strides += (0, 0, 0, 0) if mask is None else mask.stride()
    with torch.cuda.device_of(q):
        kernel[(count * B * H,)](
            **{name: w if x is None else x for name, x in tensors.items()},  # w: never read there
            **dict(zip(STRIDES, strides, strict=True)),
            **{"H": H, "N": N, "M": M, "R": R, "D": D, "DV": Dv, **_padded(D, Dv)},
            **{"SHARED": k.shape[2] < R, "HARD": ctx.hard, "CAUSAL": int(ctx.is_causal)},
            **{"HAS_U": u is not None, "HAS_MASK": mask is not None, "PRECISION": _precision()},
            **how,
        )


def _precision() -> str:
    """Return how products of float32 are taken: as PyTorch takes its own."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


# --- what functions of `derived_attention.attention` call ----------------------------------------


def mixture(q: Tensor, k: Tensor, v: Tensor, parts: Components, mask: Mask, hard: bool) -> Tensor:
    """Return what `derived_attention.attention.mixture.fast.mixture_attention` does."""
    ours = _cast(q, k, v, parts, mask)
    with full_precision(q.device):
        Q, K, V = ours
        a, w, u = parts.scale * parts.precisions, parts.log_weights, None
        if parts.distance:
            w = w - a * _squares(K, a) / 2
        if parts.distance and not parts.equal:  # ‖q‖² does not cancel: what is beyond the widest
            u = (a.amin(-3, keepdim=True) - a) * _squares(Q, a).unsqueeze(-3) / 2
            u = u.squeeze(-1)
        w = w.clamp(min=torch.finfo(w.dtype).min / 4).squeeze(-1).expand(K.shape[:-1])
        return _attend(Q, K, V, a, u, w, mask, hard).to(q.dtype)


def shifted_mixture(
    q: Tensor, k: Tensor, v: Tensor, shifts: Tensor, parts: Components, mask: Mask, hard: bool
) -> Tensor:
    """Return what `shifted_mixture_attention` does where variances are equal, for k (..., M, D)."""
    ours = _cast(q, k.unsqueeze(-3), v, parts, mask)
    with full_precision(q.device):
        Q, K, V = ours
        wide_q, wide_k = Q.to(parts.precisions), K.squeeze(-3).to(parts.precisions)
        _, _, u, w = separate(wide_q, wide_k, shifts, parts)
        a = parts.scale * parts.precisions
        return _attend(Q, K, V, a, u.mT, w, mask, hard).to(q.dtype)


def _cast(
    q: Tensor, k: Tensor, v: Tensor, parts: Components, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast to what the kernel computes in; half precision would round what `centred` leaves."""
    dtype = autocast_dtype(q)
    if torch.finfo(dtype).bits < 32:
        return q.to(dtype), k.to(dtype), v.to(dtype)
    with full_precision(q.device):
        return *centred(q, k, parts, mask), v.to(dtype)


def _squares(x: Tensor, like: Tensor) -> Tensor:
    """Return ‖x‖² (..., 1) in a wider dtype, without a copy of x in it."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=like.dtype).square()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, u: Tensor | None, w: Tensor, mask: Mask, hard: bool
) -> Tensor:
    """Run the kernels on tensors of any leading dimensions."""
    a = a.flatten(-3).expand(*(q.shape[-3:-2] or (1,)), -1).contiguous()  # (H, R)
    given = mask.given
    if given is not None:
        if given.dtype == torch.float64:
            given = narrowed(given, w.dtype)
        if given.dtype == torch.bool:
            given = given.view(torch.uint8)
        given = _heads(given.expand(*q.shape[:-1], k.shape[-2]), 2)
    Q, K, V = (_adjacent(_heads(x, n)) for x, n in ((q, 2), (k, 3), (v, 2)))
    u = None if u is None else _heads(u, 2).contiguous()
    w = _heads(w, 2).contiguous()
    out = _Attend.apply(Q, K, V, a, u, w, given, mask.is_causal, hard)
    return out.view(*q.shape[:-1], v.shape[-1])


def _heads(x: Tensor, own: int) -> Tensor:
    """View what comes before the last dimensions, `own` of them, as (B, H)."""
    leading = x.dim() - own
    return x.flatten(0, leading - 2) if leading > 2 else x[(None,) * (2 - leading)]


def _adjacent(x: Tensor) -> Tensor:
    """Copy what has no rows of adjacent numbers."""
    return x if x.stride(-1) == 1 else x.contiguous()


# --- what a GPU is to do -------------------------------------------------------------------------


def launches(head_dim: int, dtype: torch.dtype) -> list[Launch]:
    """Return every kernel as it is launched for R = 2, without a mask, from 4096 tokens."""
    kinds = [(False, False), (False, True)]  # hard, shared
    if dtype.itemsize == 2:  # else it takes what the soft form does
        kinds.append((True, False))
    kernels = (forward, backward_queries, backward_keys)
    return [_planned(x, head_dim, dtype, *kind) for kind in kinds for x in kernels]


def _planned(kernel: Any, D: int, dtype: torch.dtype, hard: bool, shared: bool) -> Launch:
    R, H, N = 2, 8, 4096
    how = blocks(kernel, D, dtype, 1 if shared else R, hard)
    warps, stages = how.pop("num_warps"), how.pop("num_stages")
    strides = (H * N * D, N * D, D, H * R * N * D, R * N * D, N * D, D, H * N * D, N * D, D)
    # Strides are numbers here: Triton looks at which of them are multiples of 16.
    constants: dict[str, Any] = dict(zip(STRIDES, (*strides, 0, 0, 0, 0), strict=True))
    constants |= {"R": R, "D": D, "DV": D, **_padded(D, D), **how}
    constants |= {"SHARED": shared, "HARD": hard, "CAUSAL": 0, "HAS_U": shared, "HAS_MASK": False}
    constants |= {"PRECISION": _precision()}
    names = kernel.arg_names
    of_sums = {"A", "U", "W", "MASK", "TOP", "SUM", "DELTA", "DU", "DW", "DA"}
    types = {x: "*fp32" if x in of_sums else f"*{NAMES[dtype]}" for x in names if x.isupper()}
    types |= {"H": "i32", "N": "i32", "M": "i32"} | dict.fromkeys(constants, "constexpr")
    kind = "hard" if hard else "shifted" if shared else "soft"
    return Launch(
        f"mixture.{kernel.__name__}, {kind}", kernel, {x: types[x] for x in names}, constants,
        warps, stages,
    )  # fmt: skip


def work(
    kind: str, *, B: int, H: int, N: int, M: int, D: int, Dv: int | None = None, R: int = 2,
    is_causal: bool = False, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Work]:  # fmt: skip
    """Count what "mgk", "hard_mgk" or "smgk" costs, "forward" and "forward + backward".

    A pair of query and key that see each other costs, forward, 2D operations for each product of
    scores (R, or one of shifted keys) and 2Dv for the values. Backward, both kernels make the
    scores and dO·v again, and each score has its part in dq and in dk: 4 times the first and 3
    times the second. Bytes are those of each tensor once: forward q, k, v, O, and w, u, log Z in
    float32; backward these, dO, the gradients, and δ written and read.
    """
    expected = ("mgk", "hard_mgk", "smgk")
    if kind not in expected:
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(expected)}")
    Dv, C, size = Dv or D, 1 if kind == "smgk" else R, dtype.itemsize
    pairs = B * H * (sum(min(i + 1, M) for i in range(N)) if is_causal else N * M)
    q, k, v, out = (B * H * n * size for n in (N * D, C * M * D, M * Dv, N * Dv))
    w, u, row = (B * H * n * 4 for n in (R * M, R * N * (kind == "smgk"), N))
    first = Work(2 * pairs * (C * D + Dv), q + k + v + out + w + u + row)
    again = Work(2 * pairs * (4 * C * D + 3 * Dv), 2 * (q + k + v + out + w + u) + 3 * row)
    both = Work(first.operations + again.operations, first.bytes + again.bytes)
    return {"forward": first, "forward + backward": both}
