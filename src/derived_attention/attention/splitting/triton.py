"""Lasso attention with no (N, M) matrix in memory: what `fused=True` runs on a GPU.

A step of `derived_attention.attention.splitting.fast`, with κ = 1 and c(w) = clip(w, ±1), is ::

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
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from derived_attention.attention.engine.kernels import NAMES, Launch, Work, interpreted
from derived_attention.attention.frame.convention import full_precision
from derived_attention.attention.frame.masks import flat_heads
from derived_attention.attention.splitting.fast import CHUNK, How, Solver

INTERPRETED = tl.constexpr(interpreted())

# --- what the kernels share -----------------------------------------------------------------------


@triton.jit
def _here(rows, length, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets of rows in one head's (length, D), and which of them are within it."""
    d = tl.arange(0, BLOCK_D)[None, :]
    here = rows[:, None] < length
    if D < BLOCK_D:
        here = here & (d < D)
    return rows[:, None] * D + d, here


@triton.jit
def _load(x, rows, length, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of one head's (length, D), with zeros where it ends."""
    at, here = _here(rows, length, D, BLOCK_D)
    return tl.load(x + at, mask=here, other=0.0)


@triton.jit
def _store(x, value, rows, length, D: tl.constexpr, BLOCK_D: tl.constexpr):
    at, here = _here(rows, length, D, BLOCK_D)
    tl.store(x + at, value, mask=here)


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr):
    """Return total + a b, in the dtype of the total."""
    if INTERPRETED and a.dtype == tl.bfloat16:  # whose bits it would multiply
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def _clip(w):
    return tl.minimum(tl.maximum(w, -1.0), 1.0)


@triton.jit
def _hide(w, own, j, CAUSAL: tl.constexpr, EXCLUDE: tl.constexpr):
    """0 where a query, whose own key is the `own`-th, does not have the j-th for an atom."""
    if CAUSAL:
        w = tl.where(j <= own - EXCLUDE, w, 0.0)
    elif EXCLUDE:
        w = tl.where(j != own, w, 0.0)
    return w


@triton.jit
def _power(x, P: tl.constexpr):
    y = x
    for _ in tl.static_range(P - 1):
        y = y * x
    return y


@triton.jit
def _place(N, BLOCK: tl.constexpr):
    """Which head a program is for, and which block of N rows; a head is 64 bits wide."""
    blocks = tl.cdiv(N, BLOCK)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    return head, tl.program_id(0) % blocks * BLOCK


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
def _codes(
    T, k, head, heads, rows, own, j, N, steps, ACC: tl.constexpr, D: tl.constexpr,
    CAUSAL: tl.constexpr, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """W after so many steps in a tile, and a bit for each of the sets U_n on the way there."""
    w = tl.zeros([BLOCK_N, BLOCK_M], ACC)
    used = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    for n in range(steps):
        t = _load(T + (n * heads + head) * N * D, rows, N, D, BLOCK_D)
        used |= (tl.abs(w) > 1.0).to(tl.int32) << n
        w = _dot(t, tl.trans(k), w - _clip(w), PRECISION)
        w = _hide(w, own[:, None], j[None, :], CAUSAL, EXCLUDE)
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
    """R = Q + (2 c(w) − w) K, w being that after so many steps: each program has some queries."""
    head, first = _place(N, BLOCK_N)
    rows = first + tl.arange(0, BLOCK_N)
    acc = _load(Q + head * N * D, rows, N, D, BLOCK_D)
    for start in range(0, _seen(first, M, prefix, CAUSAL, BLOCK_N), BLOCK_M):
        j = start + tl.arange(0, BLOCK_M)
        k = _load(K + head * M * D, j, M, D, BLOCK_D)
        w, _ = _codes(
            T, k, head, heads, rows, rows + prefix, j, N, steps, acc.dtype, D,
            CAUSAL, EXCLUDE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        back = (2 * _clip(w) - w).to(k.dtype)
        acc = _dot(back, k, acc, PRECISION)
    _store(R + head * N * D, acc, rows, N, D, BLOCK_D)


@triton.jit(do_not_specialize=["steps"])
def mix_kernel(
    K, V, T, OUT, SCALES, heads, N, M, prefix, steps,
    D: tl.constexpr, DV: tl.constexpr, POWER: tl.constexpr,
    CAUSAL: tl.constexpr, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """OUT = ν(zᵖ) V with z = S(w), or z V where p is 0.

    As in a softmax that is summed key by key, what is there is made smaller whenever a code is
    larger than all before it: the largest is 1 where powers are taken. SCALES has 1 / max abs(z),
    and 1 / Σ_j abs(z_j)ᵖ for z of that scale.
    """
    head, first = _place(N, BLOCK_N)
    rows = first + tl.arange(0, BLOCK_N)
    ACC: tl.constexpr = OUT.dtype.element_ty
    acc = tl.zeros([BLOCK_N, BLOCK_V], ACC)
    top, total = tl.zeros([BLOCK_N], ACC), tl.zeros([BLOCK_N], ACC)
    small = top + 1
    for start in range(0, _seen(first, M, prefix, CAUSAL, BLOCK_N), BLOCK_M):
        j = start + tl.arange(0, BLOCK_M)
        k = _load(K + head * M * D, j, M, D, BLOCK_D)
        w, _ = _codes(
            T, k, head, heads, rows, rows + prefix, j, N, steps, ACC, D,
            CAUSAL, EXCLUDE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D,
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
        v = _load(V + head * M * DV, j, M, DV, BLOCK_V)
        acc = _dot(a.to(v.dtype), v, acc, PRECISION)
    if POWER > 0:
        total = 1 / tl.where(total == 0, 1.0, total)
        acc = acc * total[:, None]
        tl.store(SCALES + head * N + rows, small, mask=rows < N)
        tl.store(SCALES + (heads + head) * N + rows, total, mask=rows < N)
    _store(OUT + head * N * DV, acc, rows, N, DV, BLOCK_V)


# --- backward -------------------------------------------------------------------------------------


@triton.jit
def _scales(SCALES, MEAN, head, heads, rows, N, POWER: tl.constexpr):
    """1 / max abs(z), 1 / Σ_j abs(z_j)ᵖ and Σ_j a_j dz_j of some queries."""
    mean = tl.load(MEAN + head * N + rows, mask=rows < N, other=0.0)
    small, total = mean, mean  # nobody asks for them
    if POWER > 0:
        small = tl.load(SCALES + head * N + rows, mask=rows < N, other=0.0)
        total = tl.load(SCALES + (heads + head) * N + rows, mask=rows < N, other=0.0)
    return small, total, mean


@triton.jit(do_not_specialize=["steps", "last"])
def query_kernel(
    K, V, T, DR, G, SCALES, MEAN, DT, heads, N, M, prefix, steps, last,
    D: tl.constexpr, DV: tl.constexpr, POWER: tl.constexpr,
    CAUSAL: tl.constexpr, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """DT = dw K, dw being the gradient of w after the step `last`: each program has some queries.

    G is the gradient of the output; DR has rows for the steps after `last`.
    """
    head, first = _place(N, BLOCK_N)
    rows = first + tl.arange(0, BLOCK_N)
    own = rows + prefix
    ACC: tl.constexpr = DT.dtype.element_ty
    acc = tl.zeros([BLOCK_N, BLOCK_D], ACC)
    small, total, mean = _scales(SCALES, MEAN, head, heads, rows, N, POWER)
    g = _load(G + head * N * DV, rows, N, DV, BLOCK_V)
    for start in range(0, _seen(first, M, prefix, CAUSAL, BLOCK_N), BLOCK_M):
        j = start + tl.arange(0, BLOCK_M)
        k = _load(K + head * M * D, j, M, D, BLOCK_D)
        w, used = _codes(
            T, k, head, heads, rows, own, j, N, steps, ACC, D,
            CAUSAL, EXCLUDE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        v = _load(V + head * M * DV, j, M, DV, BLOCK_V)
        zero = tl.zeros([BLOCK_N, BLOCK_M], ACC)
        dw = _dot(g, tl.trans(v), zero, PRECISION)
        dw = _through_power(dw, w, small[:, None], total[:, None], mean[:, None], POWER)
        for back in range(1, steps - last):
            n = steps - back
            dr = _load(DR + (n * heads + head) * N * D, rows, N, D, BLOCK_D)
            y = _dot(dr, tl.trans(k), zero, PRECISION)
            y = _hide(y, own[:, None], j[None, :], CAUSAL, EXCLUDE)
            dw = tl.where((used >> n) & 1 != 0, dw - y, y)
        acc = _dot(dw.to(k.dtype), k, acc, PRECISION)
    _store(DT + head * N * D, acc, rows, N, D, BLOCK_D)


@triton.jit(do_not_specialize=["steps"])
def key_kernel(
    K, V, T, DR, G, SCALES, MEAN, DK, heads, N, M, prefix, steps,
    D: tl.constexpr, DV: tl.constexpr, POWER: tl.constexpr,
    CAUSAL: tl.constexpr, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """DK: each program has some keys, and goes through the queries. Tiles are (keys, queries).

    On the way to w the part of DK with dr, which is known, and on the way back that with dw.
    """
    head, first = _place(M, BLOCK_M)
    j = first + tl.arange(0, BLOCK_M)
    ACC: tl.constexpr = DK.dtype.element_ty
    k = _load(K + head * M * D, j, M, D, BLOCK_D)
    v = _load(V + head * M * DV, j, M, DV, BLOCK_V)
    dk = tl.zeros([BLOCK_M, BLOCK_D], ACC)
    for at in range(_since(first, prefix, CAUSAL, BLOCK_N), N, BLOCK_N):
        rows = at + tl.arange(0, BLOCK_N)
        own = rows + prefix
        w = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        used = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for n in range(steps):
            t = _load(T + (n * heads + head) * N * D, rows, N, D, BLOCK_D)
            dr = _load(DR + (n * heads + head) * N * D, rows, N, D, BLOCK_D)
            used |= (tl.abs(w) > 1.0).to(tl.int32) << n
            u = _clip(w)
            w = _dot(k, tl.trans(t), w - u, PRECISION)
            w = _hide(w, own[None, :], j[:, None], CAUSAL, EXCLUDE)
            less = (u - w).to(k.dtype)
            dk = _dot(less, dr, dk, PRECISION)
        small, total, mean = _scales(SCALES, MEAN, head, heads, rows, N, POWER)
        g = _load(G + head * N * DV, rows, N, DV, BLOCK_V)
        zero = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        dw = _dot(v, tl.trans(g), zero, PRECISION)
        dw = _through_power(dw, w, small[None, :], total[None, :], mean[None, :], POWER)
        for back in range(1, steps + 1):
            n = steps - back
            t = _load(T + (n * heads + head) * N * D, rows, N, D, BLOCK_D)
            dr = _load(DR + (n * heads + head) * N * D, rows, N, D, BLOCK_D)
            y = _dot(k, tl.trans(dr), zero, PRECISION)
            y = _hide(y, own[None, :], j[:, None], CAUSAL, EXCLUDE)
            both = dw - y
            dk = _dot(both.to(k.dtype), t, dk, PRECISION)
            dw = tl.where((used >> n) & 1 != 0, both, y)
    _store(DK + head * M * D, dk, j, M, D, BLOCK_D)


@triton.jit(do_not_specialize=["steps"])
def value_kernel(
    K, T, G, SCALES, MEAN, DVALUES, heads, N, M, prefix, steps,
    D: tl.constexpr, DV: tl.constexpr, POWER: tl.constexpr,
    CAUSAL: tl.constexpr, EXCLUDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """DVALUES = ν(zᵖ)ᵀ G: each program has some keys, and goes through the queries.

    With DK in one kernel, both sums would not fit into a multiprocessor's registers.
    """
    head, first = _place(M, BLOCK_M)
    j = first + tl.arange(0, BLOCK_M)
    ACC: tl.constexpr = DVALUES.dtype.element_ty
    k = _load(K + head * M * D, j, M, D, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_V], ACC)
    for at in range(_since(first, prefix, CAUSAL, BLOCK_N), N, BLOCK_N):
        rows = at + tl.arange(0, BLOCK_N)
        w, _ = _codes(
            T, k, head, heads, rows, rows + prefix, j, N, steps, ACC, D,
            CAUSAL, EXCLUDE, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        a = w - _clip(w)
        small, total, _ = _scales(SCALES, MEAN, head, heads, rows, N, POWER)
        if POWER > 0:
            a = _power(a * small[:, None], POWER) * total[:, None]
        g = _load(G + head * N * DV, rows, N, DV, BLOCK_V)
        a = tl.trans(a.to(g.dtype))
        acc = _dot(a, g, acc, PRECISION)
    _store(DVALUES + head * M * DV, acc, j, M, DV, BLOCK_V)


# --- how they are launched ------------------------------------------------------------------------


class Blocks(NamedTuple):
    """How large a tile is, and who computes it."""

    BLOCK_N: int
    BLOCK_M: int
    num_warps: int
    num_stages: int


def blocks(kernel: Any, dtype: torch.dtype, dim: int) -> Blocks:
    """Return how a kernel is launched for tiles of a dtype, with up to that many features.

    They are such that at most a few numbers spill, by `derived_attention.attention.resources`: in
    bfloat16 a warp has 16 rows of the sums and of one operand in its registers, and all of the
    other operand.
    """
    wide = dim > 64
    if dtype == torch.bfloat16:
        return {
            residual_kernel: Blocks(64, 32 if wide else 64, 4, 2),
            mix_kernel: Blocks(64, 32 if wide else 64, 4, 2),
            query_kernel: Blocks(128, 16, 8, 2) if wide else Blocks(64, 32, 4, 2),
            value_kernel: Blocks(64, 64, 4, 2),
            key_kernel: Blocks(16 if wide else 32, 64, 4, 2),
        }[kernel]
    if kernel is key_kernel:
        return Blocks(16, 16, 8, 1) if wide else Blocks(32, 32, 8, 1)
    return Blocks(32, 32, 8 if wide or kernel is residual_kernel else 4, 1)


def padded(dim: int) -> int:
    """Return the power of two, at least 16, that many features are padded to."""
    return max(16, triton.next_power_of_2(dim))


class _Run:
    """The kernels for some heads (b, ·, ·): which atoms they have, and in which dtype tiles are.

    Those of float16 are in float32, as products in TF32: it has the same digits, and codes of
    queries that are divided by a small κ, or gradients, are beyond what float16 can hold.
    """

    def __init__(self, how: How, k: Tensor, v: Tensor, N: int, dtype: torch.dtype) -> None:
        self.how, self.N = how, N
        (self.heads, self.M, self.D), self.DV = k.shape, v.shape[-1]
        self.wide = k.dtype
        self.tile = torch.bfloat16 if dtype == torch.bfloat16 else k.dtype
        self.precision = precision(dtype)
        self.k, self.v = (x.to(self.tile).contiguous() for x in (k, v))

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.k.new_empty(shape, dtype=dtype or self.wide)

    def __call__(self, kernel: Any, **given: Any) -> None:
        """Launch one: a program for each block of queries, or of keys."""
        features = {"D": self.D} | ({"DV": self.DV} if "DV" in kernel.arg_names else {})
        size = blocks(kernel, self.tile, max(features.values()))._asdict()
        if "POWER" in kernel.arg_names:
            given["POWER"] = self.how.power or 0
        by_key = kernel in (key_kernel, value_kernel)
        length, block = (self.M, "BLOCK_M") if by_key else (self.N, "BLOCK_N")
        size |= {f"BLOCK_{x[-1]}": padded(n) for x, n in features.items()}
        given |= {"K": self.k, "heads": self.heads, "N": self.N, "M": self.M}
        given |= {"prefix": self.how.prefix, "PRECISION": self.precision}
        given |= {"CAUSAL": self.how.is_causal, "EXCLUDE": self.how.exclude_self}
        with torch.cuda.device_of(self.k):
            kernel[(self.heads * triton.cdiv(length, size[block]),)](**given, **features, **size)


def precision(dtype: torch.dtype) -> str:
    """Return how tiles of float32 are multiplied, for tensors that were given in `dtype`."""
    fast = dtype == torch.float16 or torch.backends.cuda.matmul.allow_tf32
    return "tf32" if fast else "ieee"


def _solver(how: How, k: Tensor, rho: Tensor, N: int) -> Callable[[Tensor], Tensor]:
    """Return what solves for all queries; causal: with the factors of each chunk made once."""
    solver = Solver(k, rho, N, how)
    if not how.is_causal:
        return solver.part(slice(None), slice(None), k.dtype)
    chunks = (slice(a, a + CHUNK) for a in range(0, N, CHUNK))
    parts = [solver.part(slice(None), chunk, k.dtype) for chunk in chunks]

    def solve(R: Tensor) -> Tensor:
        pairs = zip(parts, R.split(CHUNK, -2), strict=True)
        return torch.cat([part(rows) for part, rows in pairs], -2)

    return solve


def coding(how: How, q: Tensor, k: Tensor, v: Tensor, rho: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ν(zᵖ) V, or z V, for the codes z of q in k with κ = 1.

    Parameters
    ----------
    how : How
        Which atoms, how many steps, and p.
    q, k, v, rho : Tensor
        Queries divided by κ, keys with rows of zeros for those not there, values, and ρ ``(...,)``,
        in float32; under the interpreter, in float64 too.
    dtype : torch.dtype
        That of what was given: tiles of bfloat16 are multiplied in bfloat16.

    Raises
    ------
    RuntimeError
        For a second derivative.
    """
    leading = q.dim() - 2
    flat = (flat_heads(x, leading).contiguous() for x in (q, k, v, rho))
    return _Coding.apply(how, dtype, *flat).view(*q.shape[:-1], v.shape[-1])


class _Coding(torch.autograd.Function):
    """Codes, κ being 1, and what they mix, of heads that are one dimension (b, ·, ·)."""

    @staticmethod
    def forward(
        ctx: Any, how: How, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, rho: Tensor
    ) -> Tensor:
        """Take q / κ, keys, values, and ρ (b,)."""
        run, solve = _Run(how, k, v, q.shape[-2], dtype), _solver(how, k, rho, q.shape[-2])
        T = run.new(how.iterations, *q.shape, dtype=run.tile)
        T[0] = solve(q)
        for n in range(1, how.iterations):
            R = run.new(*q.shape)
            run(residual_kernel, Q=q, T=T, R=R, steps=n)
            T[n] = solve(R)
        out, scales = run.new(*q.shape[:-1], run.DV), run.new(2, *q.shape[:-1])
        run(mix_kernel, V=run.v, T=T, OUT=out, SCALES=scales, steps=how.iterations)
        ctx.save_for_backward(k, v, rho, T, out, scales)
        ctx.how, ctx.dtype = how, dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and ρ."""
        (k, v, rho, T, out, scales), how = ctx.saved_tensors, ctx.how
        with full_precision(g.device):  # autocast may be on again
            run, steps = _Run(how, k, v, g.shape[-2], ctx.dtype), how.iterations
            solve = _solver(how, k, rho, run.N)
            DR, dq = torch.empty_like(T), torch.zeros_like(T[0], dtype=run.wide)
            given = {"T": T, "G": g.to(run.tile).contiguous(), "steps": steps}
            given |= {"SCALES": scales, "MEAN": (g * out).sum(-1)}
            dk, dv, drho = torch.empty_like(k), torch.empty_like(v), torch.zeros_like(rho)
            run(value_kernel, **given, DVALUES=dv)
            given |= {"V": run.v, "DR": DR}
            for n in range(steps - 1, -1, -1):
                DT = run.new(*T.shape[1:])
                run(query_kernel, **given, DT=DT, last=n)
                dr = solve(DT)
                DR[n] = dr
                dq += dr
                drho -= (T[n] * dr).sum((-2, -1))
            run(key_kernel, **given, DK=dk)
        return None, None, dq, dk, dv, drho


def launches(head_dim: int, dtype: torch.dtype) -> Iterator[Launch]:
    """Yield the kernels as they are launched for heads of that many features, with p = 5."""
    tile = dict.fromkeys(("K", "V", "T", "DR", "G"), f"*{NAMES[dtype]}")
    sizes = dict.fromkeys(("heads", "N", "M", "prefix", "steps", "last"), "i32")
    fixed = {"PRECISION": precision(dtype), "POWER": 5, "CAUSAL": False, "EXCLUDE": True}
    fixed |= dict.fromkeys(("D", "DV", "BLOCK_D", "BLOCK_V"), head_dim)
    for kernel in (residual_kernel, mix_kernel, query_kernel, value_kernel, key_kernel):
        size = blocks(kernel, dtype, head_dim)
        known = fixed | size._asdict()
        constants = {name: known[name] for name in kernel.arg_names if name in known}
        kinds = tile | sizes | dict.fromkeys(constants, "constexpr")
        arguments = {name: kinds.get(name, "*fp32") for name in kernel.arg_names}
        name = f"lasso {kernel.__name__.removesuffix('_kernel')}"
        yield Launch(name, kernel, arguments, constants, size.num_warps, size.num_stages)


def work(
    kind: str, *, B: int, H: int, N: int, M: int, D: int, Dv: int | None = None,
    iterations: int = 5, is_causal: bool = False, dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Work]:  # fmt: skip
    """Count what "lasso" costs, "forward" and "forward + backward".

    Operations are 2 for each pair of query and key that see each other, and each feature that a
    product sums over. With k steps the forward pass has k(k + 3) / 2 − 1 of D features and one of
    Dv; the backward pass has k(3k + 1) / 2 and k of Dv for the gradients of queries, in k launches,
    and 4k and one of Dv for that of keys, k and one of Dv for that of values: with k = 5, 20 and 72
    in all. To these come those with G⁻¹, one for each step, and KᵀK. Bytes are what each launch has
    to read and write once.
    """
    if kind != "lasso":
        raise ValueError(f"kind is {kind!r}; expected 'lasso'")
    Dv, n, size = Dv or D, iterations, dtype.itemsize
    pairs = sum(min(i + 1, M) for i in range(N)) if is_causal else N * M
    small = 2 * D * D * (n * N + M)  # G⁻¹ and KᵀK
    first = 2 * pairs * ((n * (n + 3) // 2 - 1) * D + Dv) + small
    again = 2 * pairs * ((n * (3 * n + 1) // 2 + 5 * n) * D + (n + 2) * Dv) + small
    queries, keys, values = N * D, M * D, M * Dv
    solved = queries * (4 + size) * n  # each R is read, and t written
    steps = (n - 1) * (queries * 8 + keys * size) + n * (n - 1) // 2 * queries * size
    last = size * (n * queries + keys + values) + 4 * N * Dv
    there = solved + steps + last
    each = size * (n * queries + keys + values + N * Dv) + 12 * N
    back = n * (each + 4 * queries) + n * (n - 1) // 2 * queries * size + solved
    back += 2 * each + size * n * queries + 4 * (keys + values) + 4 * queries * n
    heads = B * H
    forward = Work(heads * first, heads * there)
    both = Work(heads * (first + again), heads * (there + back))
    return {"forward": forward, "forward + backward": both}
