"""Attention as sparse coding: few keys that explain a query, found by ADMM (chapter 13).

The equations of this module, for a query q_i in ℝᴰ and the keys, or atoms, K (M, D), are ::

    x_i = argmin ½‖q_i − Kᵀx‖² + λ‖x‖₁   (lasso)     or     ½‖q_i − Kᵀx‖² + ½λ‖x‖²   (ridge)
    o_i = Vᵀ ν(α(x_i)),    α(x) = x⁵ and ν(a) = a / ‖a‖₁, or neither

Ridge has a formula. The lasso is approached by the alternating direction method of multipliers
(ADMM), scaled, from z = u = 0 on, with κ = λ / ρ and S_κ(w) = sign(w) max(abs(w) − κ, 0) ::

    x = (K Kᵀ + ρ I)⁻¹ (K q + ρ (z − u)),    z = S_κ(x + u),    u = u + x − z

and z is what attends. With w = x + u alone, z = S_κ(w) and u = clip(w, ±κ); and the (M, M) inverse
is one of G = KᵀK + ρ I, which is (D, D). That is how `lasso_attention` takes each step ::

    w ← S_κ(w) + K t,    t = G⁻¹ (q − Kᵀ(S_κ(w) − clip(w, ±κ)))
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from derived_attention.attention import formulas
from derived_attention.attention.engine.blocks import Block, stands_for_many
from derived_attention.attention.engine.kernels import chosen
from derived_attention.attention.formulas import signed_power
from derived_attention.attention.frame.checks import (
    check_count,
    check_flag,
    check_no_bias,
    check_parameter,
    check_positive,
    is_symbolic,
)
from derived_attention.attention.frame.convention import extend, full_precision, in_full, mechanism
from derived_attention.attention.frame.layer import (
    ALL,
)
from derived_attention.attention.frame.masks import Mask, flat_heads
from derived_attention.attention.linear.fast import wide

CHUNK = 128  # queries whose codes are in memory at a time
RIDGE = 64  # queries of causal ridge that look back to the same keys
NOISE = 4 * CHUNK * torch.finfo(torch.float64).eps  # what Cholesky's rounding errors stay below
LONGEST = 16  # steps that kernels are for: each makes all before it again
WIDEST = 128  # features of a query or a value that they have blocks for
CODES = 2**17  # about as many of them at a time on a CPU: each step goes through all of its cache
Penalty = float | Tensor
Solve = Callable[[Tensor], Tensor]


# --- what both mechanisms share -------------------------------------------------------------------


class How(NamedTuple):
    """Which keys the queries have for atoms, and what is made of codes."""

    is_causal: bool
    exclude_self: bool
    prefix: int
    iterations: int = 0
    power: int | None = None

    def hide(self, x: Tensor, start: int) -> Tensor:
        """Set to 0, in place, what queries from `start` on have no atoms for: x (..., C, m)."""
        own = start + self.prefix
        if self.is_causal:
            return x.tril_(own - self.exclude_self)
        if self.exclude_self and own < x.shape[-1]:
            x.diagonal(own, -2, -1).zero_()
        return x

    def seen(self, end: int, M: int) -> int:
        """Return how many of M keys the queries before `end` may have for atoms."""
        return min(M, end + self.prefix) if self.is_causal else M

    def atoms(self, N: int, present: Tensor) -> Tensor:
        """Return 1 where a query has a key for an atom, else 0: (..., N, M)."""
        return self.hide(present.unsqueeze(-2).repeat_interleave(N, -2), 0)


def prepare_codes(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, how: How
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Check; return q, k, v in float32 at least, and 1 where a key is there, else 0: (..., M)."""
    check_flag("exclude_self", how.exclude_self)
    check_count("prefix", how.prefix, 0)
    N, M = q.shape[-2], k.shape[-2]
    if how.prefix > M:
        raise ValueError(f"prefix is {how.prefix}; expected at most {M}, the number of keys")
    if how.exclude_self and N != M - how.prefix:
        found = f"k has shape (..., {M}, D)"
        raise ValueError(f"{found}; expected {N + how.prefix} keys with exclude_self=True")
    if mask.given is not None:
        check_no_bias("attn_mask", mask.given, "there are no scores of keys to add to")
    there, dtype = mask.present(M), wide(q)
    q, k, v = (x.to(dtype) for x in (q if scale is None else scale * q, k, v))
    present = k.new_ones(k.shape[:-1]) if there is None else there.to(dtype).expand(k.shape[:-1])
    return q, k, v, present


def number(name: str, value: Penalty, q: Tensor) -> Tensor:
    """Return a positive number, or one for each head, as a tensor of the leading shape of q."""
    if not isinstance(value, Tensor):
        return q.new_full(q.shape[:-2], check_positive(name, value))
    shapes = ((), *([q.shape[-3:-2]] if q.dim() > 2 else []))
    value = check_parameter(name, value, q, shapes, "one, or one for each head")
    return value.to(q.dtype).expand(q.shape[:-2])


def _diagonal(rho: Tensor, D: int) -> Tensor:
    return rho[..., None, None] * torch.eye(D, dtype=rho.dtype, device=rho.device)


class Past(NamedTuple):
    """The keys of causal queries in chunks of C, and what comes before each, in double precision.

    Let L Lᵀ = Σ_j k_j k_jᵀ + ρ I over the keys before a chunk, M = L⁻¹, and K̃ = K_c Mᵀ its own
    keys, whitened. Then G_i = L (I + Σ_{j ≤ i} k̃_j k̃_jᵀ) Lᵀ. Let F Fᵀ = I + K̃ K̃ᵀ and E = F⁻¹ K̃: the
    leading part of F belongs to the leading keys, so that G_i⁻¹ = Mᵀ (I − E_{≤i}ᵀ E_{≤i}) M.
    """

    keys: Tensor  # (..., n, C, D), with rows of zeros where they end
    M: Tensor  # (..., n, D, D)
    lost: Tensor  # (..., n, 1, 1): where ρ is lost beside the keys before, or they are not finite

    def factor(self) -> tuple[Tensor, Tensor]:
        """Return K̃, and F, both of all chunks."""
        white = self.keys @ self.M.mT
        return white, _factor(white)


def _past(k: Tensor, rho: Tensor, N: int, how: How, size: int) -> Past:
    """Cut keys (..., M, D), and look back from each chunk of that size."""
    first, rest = k[..., : how.prefix, :], k[..., how.prefix :, :]
    keys = _chunked(rest[..., :N, :], N, size).double()
    G = _sums_before(_gram(keys), _gram(first) + _diagonal(rho.double(), k.shape[-1]))
    return Past(keys, *_whitening(G))


def _sums_before(sums: Tensor, first: Tensor) -> Tensor:
    """Add up the sums (..., n, ·, ·) of chunks before each chunk, and what is before the first."""
    return extend(sums[..., :-1, :, :], 0, -3, before=1).cumsum(-3) + first.unsqueeze(-3)


def _factor(white: Tensor) -> Tensor:
    """F with F Fᵀ = I + K̃ K̃ᵀ, for whitened keys (..., C, D).

    A key so long that 1 is lost beside k̃·k̃, in double precision, gets as much in its place as
    keeps F: a relative change of 10⁻¹³, of that key alone. So the rows before it are what they are.
    """
    S = white @ white.mT
    floor = (NOISE * S.detach().diagonal(0, -2, -1)).clamp(min=1)
    S.diagonal(0, -2, -1).add_(floor)
    return torch.linalg.cholesky_ex(S).L


def _whitening(G: Tensor) -> tuple[Tensor, Tensor]:
    """Return L⁻¹ where L Lᵀ = G, and where there is none (..., 1, 1), with finite numbers there.

    There the caller says NaN, and raises no error: so one sequence does not end a batch, and on a
    GPU nobody waits to hear of it. Gradients of the others stay what they are.
    """
    eye = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
    lost = torch.linalg.cholesky_ex(G.detach()).info.ne(0)[..., None, None]
    L = torch.linalg.cholesky_ex(torch.where(lost, eye, G)).L
    return torch.linalg.solve_triangular(L, eye, upper=False), lost


class Solver:
    """t_i = G_i⁻¹ r_i, G_i = Σ_j k_j k_jᵀ + ρ I over the atoms of query i: G_i⁻¹ is symmetric.

    Where all queries have all keys there is one G, inverted by its Cholesky factor. `exclude_self`
    takes k_i k_iᵀ from it, and by Sherman and Morrison G_i⁻¹ = G⁻¹ + g_i g_iᵀ / (1 − k_i·g_i) with
    g_i = G⁻¹ k_i. Causal, it is that of `Past`, chunk by chunk.
    """

    def __init__(self, k: Tensor, rho: Tensor, N: int, how: How) -> None:
        self.how = how
        if how.is_causal:
            self.past = _past(k, rho, N, how, CHUNK)
            return
        # In double precision, else ρ would be lost beside keys of length 10³.
        M, lost = _whitening(_gram(k) + _diagonal(rho.double(), k.shape[-1]))
        self.P = (M.mT @ M).masked_fill(lost, math.nan)  # (..., D, D)
        if how.exclude_self:
            self.own = k[..., how.prefix :, :].double()
            g = self.own @ self.P  # (..., N, D)
            self.g = g / (1 - (self.own * g).sum(-1, keepdim=True))

    def part(self, heads: Any, rows: slice, dtype: torch.dtype) -> Solve:
        """Return what solves for some queries of some heads; causal: for one chunk."""
        if self.how.is_causal:
            return self._chunk(heads, rows.start // CHUNK, dtype)
        P = self.P[heads].to(dtype)
        if not self.how.exclude_self:
            return lambda R: R @ P
        own, g = (x[heads][..., rows, :].to(dtype) for x in (self.own, self.g))

        def solve(R: Tensor) -> Tensor:
            T = R @ P
            return T + g * (own * T).sum(-1, keepdim=True)

        return solve

    def _chunk(self, heads: Any, c: int, dtype: torch.dtype) -> Solve:
        past = Past(*(x[..., c, :, :][heads] for x in self.past))
        white, factor = past.factor()
        EM = torch.linalg.solve_triangular(factor, white, upper=False) @ past.M
        P, EM = (x.to(dtype) for x in (past.M.mT @ past.M, EM))

        def solve(R: Tensor) -> Tensor:
            E = EM[..., : R.shape[-2], :]
            T = R @ P - (R @ E.mT).tril(-int(self.how.exclude_self)) @ E
            return T.masked_fill(past.lost, math.nan)

        return solve


def _gram(k: Tensor) -> Tensor:
    k = k.double()
    return k.mT @ k


def _chunked(x: Tensor, N: int, size: int) -> Tensor:
    """Cut (..., n, D), n ≤ N, into (..., ⌈N / C⌉, C, D), with zeros where it ends."""
    C = min(size, max(N, 1))
    length = max(N, 1) + -N % C
    return extend(x, length - x.shape[-2]).unflatten(-2, (length // C, C))


# --- ridge ----------------------------------------------------------------------------------------


@mechanism(per_key=True)
def ridge_attention(q, k, v, mask, scale, *, lam=0.1, exclude_self=False, prefix=0) -> Tensor:
    """O = Q (KᵀK + λ I)⁻¹ KᵀV: code each query in the keys by ridge regression, and mix values.

    It is the ridge regression of values on keys, W = (KᵀK + λ I)⁻¹ KᵀV, evaluated at the queries:
    a linear attention without a normaliser, in O((N + M) D (D + Dv) + D³) operations. Causal: the
    regression of each query is that on the keys before and at it. W is found in double precision,
    and causal or without the own key so is everything. A query gets NaN where λ is lost beside its
    keys all the same, about 10⁷ √λ long.

    Parameters
    ----------
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean:
        True where a key is there. Floating: 0 or -inf, as which -8192 and below count.
    scale : float, optional
        Finite and positive; multiplies q. Nothing is multiplied where it is left out.
    lam : float or Tensor
        λ > 0 of ½‖q − Kᵀx‖² + ½λ‖x‖², one or ``(H,)``. A tensor's values are not looked at.
    exclude_self : bool
        Query i has every key but the i-th; there are as many of them.
    prefix : int
        Number of keys that come before the first query's own: all queries have them, if causal too.
    """
    how, dtype = How(mask.is_causal, exclude_self, prefix), q.dtype
    q, k, v, present = prepare_codes(q, k, v, mask, scale, how)
    lam = number("lam", lam, q)
    if mask.is_causal and is_symbolic(q.shape[-2], k.shape[-2]):
        own = {"lam": lam[..., None, None], "atoms": how.atoms(q.shape[-2], present)}
        return in_full(formulas.ridge)(q, k, v, mask, None, **own).to(dtype)
    k = k * present.unsqueeze(-1)
    with full_precision(q.device):
        if mask.is_causal:
            return _causal_ridge(how, q, k, v, lam).to(dtype)
        return _ridge(how, q, k, v, lam).to(dtype)


def _ridge(how: How, q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """o_i = Wᵀq_i, W = G⁻¹ KᵀV; with `exclude_self` less what the i-th key has in it.

    That is (q_i·g_i) (v_i − Wᵀk_i) / (1 − k_i·g_i), g_i = G⁻¹ k_i, by the formula of Sherman and
    Morrison: what a regression without a point misses there is what it misses with it, over
    1 − k_i·g_i. W is in double precision, and so is what is left of terms that nearly cancel.
    """
    K, V = k.double(), v.double()
    M, lost = _whitening(_gram(K) + _diagonal(lam.double(), k.shape[-1]))
    W = (M.mT @ (M @ (K.mT @ V))).masked_fill(lost, math.nan)  # (..., D, Dv)
    if not how.exclude_self:
        return q @ W.to(q.dtype)
    q, own, values = q.double(), K[..., how.prefix :, :], V[..., how.prefix :, :]
    white = own @ M.mT
    share = ((q @ M.mT) * white).sum(-1, keepdim=True) / (1 - white.square().sum(-1, keepdim=True))
    return q @ W - share * (values - own @ W)


def _causal_ridge(how: How, q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """Predict from all chunks before, and correct by what the keys of the chunk tell: see `Past`.

    With W = Mᵀ M Σ_j k_j v_jᵀ over the keys before, it is o_i = Wᵀq_i + Σ_{j ≤ i} (q̃_i·e_j) r_j
    where q̃_i = M q_i and R = F⁻¹ (V_c − K_c W). Nothing cancels there, as it would in a sum of
    (t_i·k_j) v_j: directions of q_i in which no key lies make t_i large, and have no part in it.
    """
    N, P = q.shape[-2], how.prefix
    q, k, v = q.double(), k.double(), v.double()  # once: gradients of k may nearly cancel, too
    past = _past(k, lam, N, how, RIDGE)
    queries, values = (_chunked(x, N, RIDGE) for x in (q, v[..., P:, :][..., :N, :]))
    first = k[..., :P, :].mT @ v[..., :P, :]
    W = past.M.mT @ (past.M @ _sums_before(past.keys.mT @ values, first))  # (..., n, D, Dv)
    white, factor = past.factor()
    news = torch.cat([white, values - past.keys @ W], -1)
    E, R = torch.linalg.solve_triangular(factor, news, upper=False).split(
        [white.shape[-1], v.shape[-1]], -1
    )
    A = (queries @ past.M.mT @ E.mT).tril(-int(how.exclude_self))  # (..., n, C, C)
    out = (queries @ W + A @ R).masked_fill(past.lost, math.nan)
    return out.flatten(-3, -2)[..., :N, :]


# --- lasso ----------------------------------------------------------------------------------------


@mechanism(per_key=True)
def lasso_attention(
    q, k, v, mask, scale, *, lam=0.1, rho=10.0, iterations=5, exclude_self=False, power=None,
    prefix=0, residuals=None, fused=None,
) -> Tensor:  # fmt: skip
    """O = ν(α(Z)) V: code each query in few keys, by some steps of ADMM for the lasso.

    The weights are signed, many of them are exactly 0, and they depend on all keys: of two equal
    keys one is enough. A step is two products of (N, M) by (M, D), and the only inverse is (D, D),
    or one for each chunk if causal. No (N, M) matrix is stored: codes of C = 128 queries are, for
    gradients those of all their steps. In float32 at least.

    Parameters
    ----------
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean:
        True where a key is there; else it takes no part. Floating: 0 or -inf, as which
        -8192 and below count.
    scale : float, optional
        Finite and positive; multiplies q. Nothing is multiplied where it is left out.
    lam : float or Tensor
        λ > 0 of ½‖q − Kᵀx‖² + λ‖x‖₁, one or ``(H,)``; half of that of the form without the ½. A
        tensor's values are not looked at.
    rho : float or Tensor
        ρ > 0, the penalty of ADMM, one or ``(H,)``: how fast it converges, not where to.
    iterations : int
        Steps, at least 1.
    exclude_self : bool
        Query i has every key but the i-th, so that z_ii = 0; there are as many keys.
    power : int, optional
        The odd p of α(z) = zᵖ, 5 in the paper, divided by ‖zᵖ‖₁. Left out: the code z itself.
    prefix : int
        Number of keys that come before the first query's own: all queries have them, if causal too.
    residuals : list, optional
        The norms ‖x − z‖ and ρ‖z − z_before‖ of each query after each step, primal and dual, are
        appended to it: a pair of ``(..., N, iterations)``. It costs another run.
    fused : bool, optional
        True: run the Triton kernels of `engine.kernels`, an error where they cannot run,
        as for more than 16 iterations, or 128 features of q or of v. False, or left out: PyTorch's
        form. Kernels store no codes at all, but make them again for each step: with 5 of them that
        is twice as many products. In bfloat16 they multiply in bfloat16, and add in float32.
    """
    fused = _runs_kernels(fused, q, k, v, lam, rho, iterations)
    how, dtype = How(mask.is_causal, exclude_self, prefix, iterations, power), q.dtype
    q, k, v, present, lam, rho = check_lasso(q, k, v, mask, scale, how, lam, rho)
    if is_symbolic(q.shape[-2], k.shape[-2]):
        numbers = {"lam": lam[..., None, None], "rho": rho[..., None, None], "power": power}
        atoms = how.atoms(q.shape[-2], present)
        own = {"atoms": atoms, "iterations": iterations, "residuals": residuals, **numbers}
        return in_full(formulas.lasso)(q, k, v, mask, None, **own).to(dtype)
    k, kappa = k * present.unsqueeze(-1), (lam / rho)[..., None, None]
    with full_precision(q.device):
        q = q / kappa  # codes of q / κ with κ = 1 are those of q, divided by κ
        if residuals is not None:
            primal, dual = _residuals(how, q, k, rho)
            residuals.append((kappa * primal, kappa * dual))
        if fused:
            from derived_attention.attention.splitting.triton import coding

            out = coding(how, q, k, v, rho, dtype)
        else:
            out = _Coding.apply(how, q, k, v, rho)
        return (out if power else kappa * out).to(dtype)


def _runs_kernels(
    fused: bool | None, q: Tensor, k: Tensor, v: Tensor, lam: Penalty, rho: Penalty, iterations: int
) -> bool:
    """Say whether the kernels of `derived_attention.attention.splitting.triton` are to run."""
    if not chosen(fused, q, k, v, *(x for x in (lam, rho) if isinstance(x, Tensor))):
        return False
    obstacle = ""
    if iterations > LONGEST:
        obstacle = f"iterations is {iterations}; expected at most {LONGEST}"
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] > WIDEST:
            obstacle = f"{name} has {x.shape[-1]} features; expected at most {WIDEST}"
    if obstacle:
        raise ValueError(f"fused is True, and {obstacle}")
    return 0 not in (q.numel(), k.numel(), v.numel())


def check_lasso(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, how: How, *numbers: Penalty
) -> tuple[Tensor, ...]:
    """Check as `prepare_codes` does, and λ and ρ; return all of it."""
    check_count("iterations", how.iterations, 1)
    _check_power(how.power)
    q, *rest = prepare_codes(q, k, v, mask, scale, how)
    return q, *rest, *(number(*x, q) for x in zip(("lam", "rho"), numbers, strict=True))


def _check_power(power: int | None) -> int | None:
    if power is not None and check_count("power", power, 1) % 2 == 0:
        raise ValueError(f"power is {power}; expected an odd number, or None")
    return power


def _blocks(how: How, q: Tensor, k: Tensor) -> Iterator[Block]:
    """Cut heads (b, ·, ·) and queries: on a CPU so that the codes of a block stay in its cache."""
    b, N, M = len(q), q.shape[-2], k.shape[-2]
    some = max(1, b if q.device.type != "cpu" else CODES // (CHUNK * max(M, 1)))
    for h in range(0, b, some):
        for a in range(0, N, CHUNK):
            end = min(a + CHUNK, N)
            yield Block(slice(h, h + some), slice(a, end), how.seen(end, M))


def _precision(how: How, rows: slice, k: Tensor) -> torch.dtype:
    """Return double precision where a query may have a part in which no key lies.

    As it has where there are fewer keys than features. There t is as large as that part over ρ, and
    K t, without it, is what is left of large numbers.
    """
    before = how.prefix + rows.start if how.is_causal else k.shape[-2]
    return torch.float64 if before < 2 * k.shape[-1] else k.dtype


def _steps(
    how: How, q: Tensor, k: Tensor, solve: Solve, block: Block, free: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield w (b, C, m) and t (b, C, D) after each step, κ being 1; `free` to overwrite w."""
    heads, rows, m = block
    Q, K, start = q[heads, rows], k[heads, :m], rows.start
    t = solve(Q)
    w = how.hide(t @ K.mT, start)
    yield w, t
    for _ in range(how.iterations - 1):
        z = F.softshrink(w, 1.0)
        back = torch.sub(w, z, alpha=2, out=w if free else None)  # u − z
        t = solve(torch.baddbmm(Q, back, K))
        w = z.baddbmm_(t, K.mT) if free else torch.baddbmm(z, t, K.mT)
        yield how.hide(w, start), t


def _last(steps: Iterator) -> Any:
    for step in steps:
        last = step
    return last


class _Coding(torch.autograd.Function):
    """Codes block by block, κ being 1, and what they mix. The backward pass makes them again.

    There dw, the gradient of w, goes back through a step as follows. The same solver gives dr, as
    G⁻¹ is symmetric, and x = w − u_before is what the first line of ADMM computes ::

        dt = Kᵀ dw,   dr = G⁻¹ dt,   db = −K dr,   dq += dr,   dK += (dw + db) tᵀ − x drᵀ
        dρ −= t·dr,   dw_before = dw + db where abs(w_before) > 1, and −db elsewhere
    """

    @staticmethod
    def forward(how: How, q: Tensor, k: Tensor, v: Tensor, rho: Tensor) -> Tensor:
        """Take q / κ, keys with rows of zeros for those not there, values, and ρ."""
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        leading = q.dim() - 2
        flat, *ours = (flat_heads(x, leading) for x in (out, q, k, v))
        q, k, v = ours
        free = not torch.compiler.is_compiling()  # a traced graph may want gradients
        solver = Solver(k, flat_heads(rho, leading), q.shape[-2], how)
        kinds = {k.dtype: [q, k, v]}
        for block in _blocks(how, q, k):
            heads, rows, m = block
            dtype = _precision(how, rows, k)
            if dtype not in kinds:
                kinds[dtype] = [x.to(dtype) for x in (q, k, v)]
            Q, K, V = kinds[dtype]
            w, _ = _last(_steps(how, Q, K, solver.part(heads, rows, dtype), block, free))
            z = F.softshrink(w, 1.0)
            flat[heads, rows] = (signed_power(z, how.power) @ V[heads, :m]).to(q.dtype)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradients need."""
        ctx.how, *given = inputs
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and ρ."""
        (grad,), how, given = grads, ctx.how, ctx.saved_tensors
        again = torch.is_grad_enabled() and any(x.requires_grad for x in (grad, *given))
        if again or any(map(stands_for_many, (grad, *given))):
            with full_precision(grad.device):
                pull: Any = torch.func.vjp(functools.partial(_whole, how), *given)[1]
                return None, *pull(grad)
        found = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in given]
        leading = grad.dim() - 2
        q, k, v, rho = (flat_heads(x, leading) for x in given)
        flat = [flat_heads(x, leading) for x in found]
        dout = flat_heads(grad, leading)
        with full_precision(grad.device):  # autocast may be on again
            solver = Solver(k, rho, q.shape[-2], how)
            kinds = {k.dtype: ([q, k, v], flat)}
            for block in _blocks(how, q, k):
                dtype = _precision(how, block.rows, k)
                if dtype not in kinds:
                    sums = [torch.zeros_like(x, dtype=dtype) for x in flat]
                    kinds[dtype] = [x.to(dtype) for x in (q, k, v)], sums
                (Q, K, V), sums = kinds[dtype]
                solve = solver.part(block.heads, block.rows, dtype)
                g = dout[block.heads, block.rows].to(dtype)
                _spread(how, Q, K, V, solve, block, g, *sums)
            for _, sums in list(kinds.values())[1:]:
                for x, y in zip(flat, sums, strict=True):
                    x += y
        return None, *found

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], how: How, *given: Tensor) -> Any:
        """Let the mapped dimension be one more leading dimension."""
        pairs = zip(given, in_dims[1:], strict=True)
        moved = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in pairs
        ]
        return _Coding.apply(how, *moved), 0


def _spread(
    how: How, q: Tensor, k: Tensor, v: Tensor, solve: Solve, block: Block, g: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, drho: Tensor,
) -> None:  # fmt: skip
    """Add what one block, whose output has the gradient g, gives to the gradients."""
    heads, rows, m = block
    K = k[heads, :m]
    steps = list(_steps(how, q, k, solve, block))
    z = F.softshrink(steps[-1][0], 1.0)
    A = signed_power(z, how.power)
    dv[heads, :m].baddbmm_(A.mT, g)
    dz = g @ v[heads, :m].mT  # (b, C, m)
    if how.power is not None:
        mean = (dz * A).sum(-1, keepdim=True)
        slope = how.power * A / z.masked_fill(z == 0, math.inf)  # p z^(p−1) / Σ_j |z_j|ᵖ
        dz = slope * (dz - mean * z.sign())
    dw = dz.mul_(_used(z))
    for n in range(how.iterations - 1, -1, -1):
        (w, t), before = steps[n], steps[n - 1][0] if n else None
        dr = solve(dw @ K)
        both = how.hide(torch.baddbmm(dw, dr, K.mT, alpha=-1), rows.start)  # dw + db
        x = w if before is None else w - before.clamp(-1, 1)
        dk[heads, :m].baddbmm_(both.mT, t).baddbmm_(x.mT, dr, alpha=-1)
        dq[heads, rows] += dr
        drho[heads] -= (t * dr).sum((-2, -1))
        if before is not None:
            dw = torch.lerp(dw.sub_(both), both, _used(F.softshrink(before, 1.0)))


def _used(z: Tensor) -> Tensor:
    """Return 1 where a code is not 0, else 0: to multiply by it is faster than `torch.where`."""
    return (z != 0).to(z.dtype)


def _whole(how: How, q: Tensor, k: Tensor, v: Tensor, rho: Tensor) -> Tensor:
    """Return what `_Coding` does, with all steps in memory: it can be differentiated at will."""
    leading, parts = q.dim() - 2, []
    Q, K, V = (flat_heads(x, leading) for x in (q, k, v))
    solver = Solver(K, flat_heads(rho, leading), q.shape[-2], how)
    for a in range(0, q.shape[-2], CHUNK):
        end = min(a + CHUNK, q.shape[-2])
        block = Block(ALL, slice(a, end), how.seen(end, k.shape[-2]))
        dtype = _precision(how, block.rows, K)
        solve = solver.part(ALL, block.rows, dtype)
        w, _ = _last(_steps(how, Q.to(dtype), K.to(dtype), solve, block))
        mixed = signed_power(F.softshrink(w, 1.0), how.power) @ V[:, : block.m].to(dtype)
        parts.append(mixed.to(q.dtype))
    out = torch.cat(parts, -2) if parts else Q @ K.mT @ V
    return out.reshape(*q.shape[:-1], v.shape[-1])


@torch.no_grad()
def _residuals(how: How, q: Tensor, k: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """Primal and dual residuals of every step, (..., N, iterations), with κ = 1."""
    leading, N = q.dim() - 2, q.shape[-2]
    Q, K = (flat_heads(x, leading) for x in (q, k))
    flat = flat_heads(rho, leading)
    solver = Solver(K, flat, N, how)
    found = q.new_zeros(2, len(Q), N, how.iterations)
    for block in _blocks(how, Q, K):
        u = z = Q.new_zeros(())
        solve = solver.part(block.heads, block.rows, Q.dtype)
        for n, (w, _) in enumerate(_steps(how, Q, K, solve, block)):
            u, z, old_u, old_z = w.clamp(-1, 1), F.softshrink(w, 1.0), u, z
            dual = flat[block.heads, None] * (z - old_z).norm(dim=-1)
            pair = torch.stack([(u - old_u).norm(dim=-1), dual])  # x − z = u − u_before
            found[:, block.heads, block.rows, n] = pair
    primal, dual = found.unflatten(1, q.shape[:-2]) if leading else found.squeeze(1)
    return primal, dual


# --- layers ---------------------------------------------------------------------------------------


def _factory(options: dict[str, Any]) -> dict[str, Any]:
    return {key: options.get(key) for key in ("device", "dtype")}


def _before(tokens: Tensor, x: Tensor) -> Tensor:
    """Put tokens before a sequence x (B, M, ·), as wide as it is."""
    tokens = tokens[:, : x.shape[-1]].to(x.dtype)
    return torch.cat([tokens.expand(*x.shape[:-2], *tokens.shape), x], -2)


def _after(mask: Mask, R: int) -> Mask:
    """Return a mask over keys with R more before the first, which are there for everyone."""
    if mask.given is None:
        return mask
    tokens = mask.given.new_full((*mask.given.shape[:-1], R), mask.given.dtype == torch.bool)
    return Mask(torch.cat([tokens, mask.given], -1))
