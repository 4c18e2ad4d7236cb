"""Lasso attention with no (N, M) matrix in memory: what `fused=True` runs on a GPU.

A step of `derived_attention.sparse_coding.core`, with κ = 1 and c(w) = clip(w, ±1), is ::

    w_0 = 0,   z_n = w_n − c(w_n),   t_n = G⁻¹ (q + Kᵀ(2 c(w_n) − w_n)),   w_{n+1} = z_n + K t_n

So w_n follows from t_0, …, t_{n−1} alone, which are (N, D) each. A tile, some queries by some keys,
makes its part of w_n again from them whenever it is asked for: a step is one pass over all tiles,
with n products to make w_n again and one for Kᵀ(2 c(w_n) − w_n), and a small one for G⁻¹, which is
left to PyTorch. With k steps these are k(k + 3) / 2 products of (N, D) by (D, M), instead of 2k
and memory for codes.

Backward, dw_n is the gradient of w_n, and a set U_n is where abs(w_n) > 1 ::

    dr_n = G⁻¹ Kᵀ dw_{n+1},   y_n = K dr_n,   dw_n = dw_{n+1} − y_n in U_n, and y_n elsewhere
    dq = Σ_n dr_n,   dρ = −Σ_n t_n·dr_n
    dK = Σ_n (dw_{n+1} − y_n) t_nᵀ − (w_{n+1} − c(w_n)) dr_nᵀ

and dw_k follows from w_k, the values, and the gradient of the output. So dw_n is made again from
t_0, …, t_{k−1} and dr_n, …, dr_{k−1}: one pass for each step, and two for dK and dV.
Memory is O((N + M) D k), forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from derived_attention.common.convention import full_precision
from derived_attention.common.kernels import NAMES, Launch
from derived_attention.common.masks import flat_heads
from derived_attention.common.operators import needed, operator
from derived_attention.common.triton import (
    dot,
    hide,
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
from derived_attention.sparse_coding.solver import CHUNK, Options, Solver

# --- what the kernels share -----------------------------------------------------------------------


@triton.jit
def _clip(w):
    return tl.minimum(tl.maximum(w, -1.0), 1.0)


@triton.jit
def _power(x, P: tl.constexpr):
    y = x
    for _ in tl.static_range(P - 1):
        y = y * x
    return y


@triton.jit
def _seen(first, M, prefix, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many keys the queries of a block, from `first` on, may have for atoms."""
    if CAUSAL:
        M = tl.minimum(M, first + BLOCK_N + prefix)
    return M


@triton.jit
def _since(first, prefix, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the blocks of queries begin that may have keys from `first` on for atoms."""
    start = 0
    if CAUSAL:
        start = tl.maximum(first - prefix, 0) // BLOCK_N * BLOCK_N
    return start


@triton.jit
def _step(w, x, t, i, j, CAUSAL: tl.constexpr, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr):
    """Return S(w) + x_i·t_j, of what query i has for atoms; i and j are broadcast as w is."""
    return hide(scores(x, t, w - _clip(w), PRECISION), i, j, CAUSAL, EXCLUDE)


@triton.jit
def _codes(
    T, k, head, heads, first, j, N, prefix, steps, D: tl.constexpr, CAUSAL: tl.constexpr,
    EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return w after so many steps in a tile, and a bit for each of the sets U_n on the way."""
    i = first + prefix + tl.arange(0, BLOCK_N)
    w = tl.zeros([BLOCK_N, BLOCK_M], ACC)
    used = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    for n in range(steps):
        t = load_rows(T + (n * heads + head) * N * D, first, N, D, D, BLOCK_N, BLOCK_D)
        used |= (tl.abs(w) > 1.0).to(tl.int32) << n
        w = _step(w, t, k, i[:, None], j[None, :], CAUSAL, EXCLUDE, PRECISION)
    return w, used


@triton.jit
def _through_power(dz, w, small, total, mean, POWER: tl.constexpr):
    """dw, where ν(zᵖ) has the gradient dz: slopes p zᵖ⁻¹ / ‖zᵖ‖₁, less the mean of all dz."""
    if POWER > 0:
        z = w - _clip(w)
        dz = (dz - tl.where(z > 0, mean, -mean)) * (POWER * small * total)
        if POWER > 1:
            dz = dz * _power(z * small, POWER - 1)
    return tl.where(tl.abs(w) > 1.0, dz, 0.0)


# --- forward --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["steps"])
def residual_kernel(
    Q, K, T, R, heads, N, M, prefix, steps, D: tl.constexpr,
    CAUSAL: tl.constexpr, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """R = Q + (2 c(w) − w) K after so many steps: a program has a block of queries."""
    head, first = place(N, BLOCK_N)
    acc = load_rows(Q + head * N * D, first, N, D, D, BLOCK_N, BLOCK_D)
    for start in range(0, _seen(first, M, prefix, CAUSAL, BLOCK_N), BLOCK_M):
        j = start + tl.arange(0, BLOCK_M)
        k = load_rows(K + head * M * D, start, M, D, D, BLOCK_M, BLOCK_D)
        w, _ = _codes(
            T, k, head, heads, first, j, N, prefix, steps, D,
            CAUSAL, EXCLUDE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D, acc.dtype,
        )  # fmt: skip
        acc = dot((2 * _clip(w) - w).to(k.dtype), k, acc, PRECISION)
    store_rows(R + head * N * D, acc, first, N, D, BLOCK_N, BLOCK_D)


@triton.jit(do_not_specialize=["steps"])
def mix_kernel(
    K, V, T, OUT, SCALES, heads, N, M, prefix, steps,
    D: tl.constexpr, DV: tl.constexpr, POWER: tl.constexpr,
    CAUSAL: tl.constexpr, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """OUT = ν(zᵖ) V with z = S(w), or z V where p is 0.

    As in an online softmax, the sums shrink whenever a code is larger than all before it: the
    largest is 1 where powers are taken. SCALES has 1 / max abs(z), and 1 / Σ_j abs(z_j)ᵖ for z of
    that scale.
    """
    head, first = place(N, BLOCK_N)
    ACC: tl.constexpr = OUT.dtype.element_ty
    acc = tl.zeros([BLOCK_N, BLOCK_V], ACC)
    top, total = tl.zeros([BLOCK_N], ACC), tl.zeros([BLOCK_N], ACC)
    small = top + 1
    for start in range(0, _seen(first, M, prefix, CAUSAL, BLOCK_N), BLOCK_M):
        j = start + tl.arange(0, BLOCK_M)
        k = load_rows(K + head * M * D, start, M, D, D, BLOCK_M, BLOCK_D)
        w, _ = _codes(
            T, k, head, heads, first, j, N, prefix, steps, D,
            CAUSAL, EXCLUDE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D, ACC,
        )  # fmt: skip
        a = w - _clip(w)
        if POWER > 0:
            above = tl.maximum(top, tl.max(tl.abs(a), 1))
            small = 1 / tl.where(above == 0, 1.0, above)
            shrink = _power(top * small, POWER)
            top = above
            a = _power(a * small[:, None], POWER)
            total = total * shrink + tl.sum(tl.abs(a), 1)
            acc = acc * shrink[:, None]
        v = load_rows(V + head * M * DV, start, M, DV, DV, BLOCK_M, BLOCK_V)
        acc = dot(a.to(v.dtype), v, acc, PRECISION)
    if POWER > 0:
        total = 1 / tl.where(total == 0, 1.0, total)
        acc = acc * total[:, None]
        store_numbers(SCALES + head * N, small, first, N, BLOCK_N)
        store_numbers(SCALES + (heads + head) * N, total, first, N, BLOCK_N)
    store_rows(OUT + head * N * DV, acc, first, N, DV, BLOCK_N, BLOCK_V)


# --- backward -------------------------------------------------------------------------------------


@triton.jit
def _scales(SCALES, MEAN, head, heads, first, N, POWER: tl.constexpr, BLOCK_N: tl.constexpr):
    """1 / max abs(z), 1 / Σ_j abs(z_j)ᵖ and Σ_j a_j dz_j of a block of queries."""
    mean = load_numbers(MEAN + head * N, first, N, 0.0, BLOCK_N)
    small, total = mean, mean  # not read
    if POWER > 0:
        small = load_numbers(SCALES + head * N, first, N, 0.0, BLOCK_N)
        total = load_numbers(SCALES + (heads + head) * N, first, N, 0.0, BLOCK_N)
    return small, total, mean


@triton.jit(do_not_specialize=["steps", "last"])
def query_kernel(
    K, V, T, DR, G, SCALES, MEAN, DT, heads, N, M, prefix, steps, last,
    D: tl.constexpr, DV: tl.constexpr, POWER: tl.constexpr,
    CAUSAL: tl.constexpr, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """DT = dw K, dw being the gradient of w after the step `last`: a block of queries.

    G is the gradient of the output; DR has rows for the steps after `last`.
    """
    head, first = place(N, BLOCK_N)
    i = first + prefix + tl.arange(0, BLOCK_N)
    ACC: tl.constexpr = DT.dtype.element_ty
    acc = tl.zeros([BLOCK_N, BLOCK_D], ACC)
    small, total, mean = _scales(SCALES, MEAN, head, heads, first, N, POWER, BLOCK_N)
    g = load_rows(G + head * N * DV, first, N, DV, DV, BLOCK_N, BLOCK_V)
    for start in range(0, _seen(first, M, prefix, CAUSAL, BLOCK_N), BLOCK_M):
        j = start + tl.arange(0, BLOCK_M)
        k = load_rows(K + head * M * D, start, M, D, D, BLOCK_M, BLOCK_D)
        w, used = _codes(
            T, k, head, heads, first, j, N, prefix, steps, D,
            CAUSAL, EXCLUDE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D, ACC,
        )  # fmt: skip
        v = load_rows(V + head * M * DV, start, M, DV, DV, BLOCK_M, BLOCK_V)
        dw = scores(g, v, None, PRECISION)
        dw = _through_power(dw, w, small[:, None], total[:, None], mean[:, None], POWER)
        for back in range(1, steps - last):
            n = steps - back
            dr = load_rows(DR + (n * heads + head) * N * D, first, N, D, D, BLOCK_N, BLOCK_D)
            y = scores(dr, k, None, PRECISION)
            y = hide(y, i[:, None], j[None, :], CAUSAL, EXCLUDE)
            dw = tl.where((used >> n) & 1 != 0, dw - y, y)
        acc = dot(dw.to(k.dtype), k, acc, PRECISION)
    store_rows(DT + head * N * D, acc, first, N, D, BLOCK_N, BLOCK_D)


@triton.jit(do_not_specialize=["steps"])
def key_kernel(
    K, V, T, DR, G, SCALES, MEAN, DK, heads, N, M, prefix, steps,
    D: tl.constexpr, DV: tl.constexpr, POWER: tl.constexpr,
    CAUSAL: tl.constexpr, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """DK for a block of keys, over all queries. Tiles are (keys, queries).

    On the way to w it sums the part of DK with dr, which is known, and on the way back that of dw.
    """
    head, first = place(M, BLOCK_M)
    j = (first + tl.arange(0, BLOCK_M))[:, None]
    ACC: tl.constexpr = DK.dtype.element_ty
    k = load_rows(K + head * M * D, first, M, D, D, BLOCK_M, BLOCK_D)
    v = load_rows(V + head * M * DV, first, M, DV, DV, BLOCK_M, BLOCK_V)
    dk = tl.zeros([BLOCK_M, BLOCK_D], ACC)
    for start in range(_since(first, prefix, CAUSAL, BLOCK_N), N, BLOCK_N):
        i = (start + prefix + tl.arange(0, BLOCK_N))[None, :]
        w = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        used = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for n in range(steps):
            t = load_rows(T + (n * heads + head) * N * D, start, N, D, D, BLOCK_N, BLOCK_D)
            dr = load_rows(DR + (n * heads + head) * N * D, start, N, D, D, BLOCK_N, BLOCK_D)
            used |= (tl.abs(w) > 1.0).to(tl.int32) << n
            u = _clip(w)
            w = _step(w, k, t, i, j, CAUSAL, EXCLUDE, PRECISION)
            dk = dot((u - w).to(k.dtype), dr, dk, PRECISION)
        small, total, mean = _scales(SCALES, MEAN, head, heads, start, N, POWER, BLOCK_N)
        g = load_rows(G + head * N * DV, start, N, DV, DV, BLOCK_N, BLOCK_V)
        dw = scores(v, g, None, PRECISION)
        dw = _through_power(dw, w, small[None, :], total[None, :], mean[None, :], POWER)
        for back in range(1, steps + 1):
            n = steps - back
            t = load_rows(T + (n * heads + head) * N * D, start, N, D, D, BLOCK_N, BLOCK_D)
            dr = load_rows(DR + (n * heads + head) * N * D, start, N, D, D, BLOCK_N, BLOCK_D)
            y = hide(scores(k, dr, None, PRECISION), i, j, CAUSAL, EXCLUDE)
            both = dw - y
            dk = dot(both.to(k.dtype), t, dk, PRECISION)
            dw = tl.where((used >> n) & 1 != 0, both, y)
    store_rows(DK + head * M * D, dk, first, M, D, BLOCK_M, BLOCK_D)


@triton.jit(do_not_specialize=["steps"])
def value_kernel(
    K, T, G, SCALES, MEAN, DVALUES, heads, N, M, prefix, steps,
    D: tl.constexpr, DV: tl.constexpr, POWER: tl.constexpr,
    CAUSAL: tl.constexpr, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """DVALUES = ν(zᵖ)ᵀ G for a block of keys, over all queries.

    With DK in one kernel, both sums would not fit into the registers of a multiprocessor.
    """
    head, first = place(M, BLOCK_M)
    j = first + tl.arange(0, BLOCK_M)
    ACC: tl.constexpr = DVALUES.dtype.element_ty
    k = load_rows(K + head * M * D, first, M, D, D, BLOCK_M, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_V], ACC)
    for start in range(_since(first, prefix, CAUSAL, BLOCK_N), N, BLOCK_N):
        w, _ = _codes(
            T, k, head, heads, start, j, N, prefix, steps, D,
            CAUSAL, EXCLUDE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D, ACC,
        )  # fmt: skip
        a = w - _clip(w)
        small, total, _ = _scales(SCALES, MEAN, head, heads, start, N, POWER, BLOCK_N)
        if POWER > 0:
            a = _power(a * small[:, None], POWER) * total[:, None]
        g = load_rows(G + head * N * DV, start, N, DV, DV, BLOCK_N, BLOCK_V)
        acc = dot(tl.trans(a.to(g.dtype)), g, acc, PRECISION)
    store_rows(DVALUES + head * M * DV, acc, first, M, DV, BLOCK_M, BLOCK_V)


# --- how they are launched ------------------------------------------------------------------------


def blocks(kernel: Any, dtype: torch.dtype, dim: int, hopper: bool) -> dict[str, int]:
    """Return the sizes of tiles, warps and stages for a dtype, with up to that many features.

    At most a few numbers spill, by `benchmarks.gpu.resources`: in bfloat16 a warp has
    16 rows of the sums and of one operand in its registers, and all of the other operand. Those of
    the H100 in bfloat16 are the fastest of many there.
    """
    wide = dim > 64
    if dtype == torch.bfloat16 and hopper:
        N, M, warps, stages = {
            residual_kernel: (64, 128, 4, 2),
            mix_kernel: (64, 128, 4, 2) if wide else (64, 64, 4, 3),
            query_kernel: (64, 64, 4, 2),
            value_kernel: (64, 64, 4, 2),
            key_kernel: (16 if wide else 32, 64, 4, 2),
        }[kernel]
    elif dtype == torch.bfloat16:
        N, M, warps, stages = {
            residual_kernel: (64, 32 if wide else 64, 4, 2),
            mix_kernel: (64, 32 if wide else 64, 4, 2),
            query_kernel: (128, 16, 8, 2) if wide else (64, 32, 4, 2),
            value_kernel: (64, 64, 4, 2),
            key_kernel: (16 if wide else 32, 64, 4, 2),
        }[kernel]
    elif kernel is key_kernel:
        N, M, warps, stages = (16, 16, 8, 1) if wide else (32, 32, 8, 1)
    else:
        N, M, warps, stages = 32, 32, 8 if wide or kernel is residual_kernel else 4, 1
    return {"BLOCK_N": N, "BLOCK_M": M, "num_warps": warps, "num_stages": stages}


class _Run:
    """The kernels for some heads (b, ·, ·): which atoms they have, and in which dtype tiles are.

    Those of float16 are in float32, as products in TF32: it has the same digits, and codes of
    queries that are divided by a small κ, or gradients, exceed the range of float16.
    """

    def __init__(self, options: Options, k: Tensor, v: Tensor, N: int, dtype: torch.dtype) -> None:
        self.N = N
        (self.heads, self.M, self.D), self.DV = k.shape, v.shape[-1]
        self.wide = k.dtype
        self.tile = torch.bfloat16 if dtype == torch.bfloat16 else k.dtype
        self.k, self.v = (x.to(self.tile).contiguous() for x in (k, v))
        least = narrowest(self.tile, k.device)
        self.arguments = {
            "K": self.k, "V": self.v, "heads": self.heads, "N": N, "M": self.M, "D": self.D,
            "DV": self.DV, "BLOCK_D": padded(self.D, least), "BLOCK_V": padded(self.DV, least),
            "prefix": options.prefix, "POWER": options.power or 0, "CAUSAL": options.is_causal,
            "EXCLUDE": options.exclude_self, "PRECISION": precision(dtype),
        }  # fmt: skip

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.k.new_empty(shape, dtype=dtype or self.wide)

    def __call__(self, kernel: Any, **tensors: Any) -> None:
        """Launch one: a program for each block of queries, or of keys."""
        width = self.D if kernel is residual_kernel else max(self.D, self.DV)
        sizes = blocks(kernel, self.tile, width, is_hopper(self.k.device))
        if self.tile in NAMES:
            label = f"lasso.{kernel.__name__} {NAMES[self.tile]} {self.D} {self.DV}"
            sizes = tuned(self.k.device, label, sizes)
        arguments = tensors | sizes | self.arguments
        by_key = kernel in (key_kernel, value_kernel)
        length, block = (self.M, "BLOCK_M") if by_key else (self.N, "BLOCK_N")
        grid = (self.heads * triton.cdiv(length, arguments[block]),)
        launch(kernel, grid, self.k, arguments)


def _solver(options: Options, k: Tensor, rho: Tensor, N: int) -> Callable[[Tensor], Tensor]:
    """Return what solves for all queries; causal: with the factors of each chunk made once."""
    solver, every = Solver(k, rho, N, options), slice(None)
    if not options.is_causal:
        return solver.part(every, every, k.dtype)
    parts = [solver.part(every, slice(a, a + CHUNK), k.dtype) for a in range(0, N, CHUNK)]

    def solve(R: Tensor) -> Tensor:
        pairs = zip(parts, R.split(CHUNK, -2), strict=True)
        return torch.cat([part(rows) for part, rows in pairs], -2)

    return solve


def coding(
    options: Options, q: Tensor, k: Tensor, v: Tensor, rho: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return ν(zᵖ) V, or z V, for the codes z of q in k with κ = 1.

    Parameters
    ----------
    options : Options
        Which atoms, how many steps, and p.
    q, k, v, rho : Tensor
        Queries divided by κ, keys with rows of zeros for absent ones, values, and ρ ``(...,)``, in
        float32; under the interpreter, in float64 too.
    dtype : torch.dtype
        That of the arguments of the mechanism: tiles of bfloat16 are multiplied in bfloat16.

    Raises
    ------
    RuntimeError
        For a second derivative.
    """
    flat = (flat_heads(x, q.dim() - 2).contiguous() for x in (q, k, v, rho))
    numbers = (*options[:-1], options.power or 0, dtype)
    return _coding(*flat, *numbers).view(*q.shape[:-1], v.shape[-1])


def _forward(
    q: Tensor, k: Tensor, v: Tensor, rho: Tensor,
    is_causal: bool, exclude_self: bool, prefix: int, iterations: int, power: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what codes mix, κ being 1, all t_n, and the scales of `mix_kernel`.

    Of q / κ, keys, values, and ρ (b,), of heads that are one dimension (b, ·, ·).
    """
    options = Options(is_causal, exclude_self, prefix, iterations, power)
    run, solve = _Run(options, k, v, q.shape[-2], dtype), _solver(options, k, rho, q.shape[-2])
    T = run.new(iterations, *q.shape, dtype=run.tile)
    T[0] = solve(q)
    for n in range(1, iterations):
        R = run.new(*q.shape)
        run(residual_kernel, Q=q, T=T, R=R, steps=n)
        T[n] = solve(R)
    out, scales = run.new(*q.shape[:-1], run.DV), run.new(2 if power else 0, *q.shape[:-1])
    run(mix_kernel, T=T, OUT=out, SCALES=scales, steps=iterations)
    return out, T, scales


def _fake(
    q: Tensor, k: Tensor, v: Tensor, rho: Tensor,
    is_causal: bool, exclude_self: bool, prefix: int, iterations: int, power: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tile = torch.bfloat16 if dtype == torch.bfloat16 else k.dtype
    T = q.new_empty(iterations, *q.shape, dtype=tile)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), T, q.new_empty(2 if power else 0, *q.shape[:-1])


def _backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, rho: Tensor, out: Tensor, T: Tensor, scales: Tensor,
    is_causal: bool, exclude_self: bool, prefix: int, iterations: int, power: int,
    dtype: torch.dtype, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and ρ."""
    options, steps = Options(is_causal, exclude_self, prefix, iterations, power), iterations
    with full_precision(g.device):  # autocast may be on again
        run = _Run(options, k, v, g.shape[-2], dtype)
        solve = _solver(options, k, rho, run.N)
        DR, dq = torch.empty_like(T), torch.zeros_like(T[0], dtype=run.wide)
        tensors = {"T": T, "G": g.to(run.tile).contiguous(), "steps": steps}
        tensors |= {"SCALES": scales, "MEAN": (g * out).sum(-1)}
        dk, dv, drho = torch.empty_like(k), torch.empty_like(v), torch.zeros_like(rho)
        run(value_kernel, **tensors, DVALUES=dv)
        tensors["DR"] = DR
        for n in range(steps - 1, -1, -1):
            DT = run.new(*T.shape[1:])
            run(query_kernel, **tensors, DT=DT, last=n)
            dr = solve(DT)
            DR[n] = dr
            dq += dr
            drho -= (T[n] * dr).sum((-2, -1))
        run(key_kernel, **tensors, DK=dk)
    return needed((dq, dk, dv, drho), needs)


_coding = operator("lasso", _forward, _backward, _fake)


def launches(head_dim: int, dtype: torch.dtype, hopper: bool) -> Iterator[Launch]:
    """Yield the kernels as they are launched for heads of that many features, with p = 5."""
    types = dict.fromkeys(("K", "V", "T", "DR", "G"), f"*{NAMES[dtype]}")
    types |= dict.fromkeys(("heads", "N", "M", "prefix", "steps", "last"), "i32")
    fixed = {"PRECISION": precision(dtype), "POWER": 5, "CAUSAL": False, "EXCLUDE": True}
    fixed |= dict.fromkeys(("D", "DV", "BLOCK_D", "BLOCK_V"), head_dim)
    for kernel in (residual_kernel, mix_kernel, query_kernel, value_kernel, key_kernel):
        constants = fixed | blocks(kernel, dtype, head_dim, hopper)
        name = f"lasso {kernel.__name__.removesuffix('_kernel')}"
        yield Launch.of(name, kernel, types, "*fp32", constants)
