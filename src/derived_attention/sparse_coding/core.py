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

Causal ridge is in double precision on a GPU, too. fla-core's MesaNet kernel has the same equation,
but it approximates the solution by 30 steps of conjugate gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from derived_attention import formulas
from derived_attention.common.blocks import Block, needs_whole, to_front
from derived_attention.common.checks import (
    check_causal_state,
    check_keys,
    check_parts,
    has_concrete_values,
)
from derived_attention.common.convention import full_precision, is_short, mechanism, reference
from derived_attention.common.masks import Mask, all_flat
from derived_attention.formulas import signed_power
from derived_attention.linear.core import in_chunks
from derived_attention.sparse_coding.solver import (
    CHUNK,
    NOISE,
    Options,
    Past,
    Solve,
    Solver,
    check_lasso,
    penalty,
    prepare_codes,
    products_before,
    whitening_factor,
)

RIDGE = 64  # queries of causal ridge that look back to the same keys
STATES = 2**22  # numbers of a tensor of the chunks of some heads: 32 MiB, of which ridge has 20
CODES = 2**17  # about as many of them at a time on a CPU: each step goes through all of its cache
ALL = slice(None)


# --- ridge ----------------------------------------------------------------------------------------


class RidgeState(NamedTuple):
    """The state of `ridge_attention`, in double precision: Σ_j k_j k_jᵀ and Σ_j k_j v_jᵀ."""

    keys: Tensor  #: (..., D, D)
    values: Tensor  #: (..., D, Dv)


def ridge_state(k: Tensor, v: Tensor, *, state: RidgeState | None = None) -> RidgeState:
    """Return KᵀK and KᵀV in double precision: all that `ridge_attention` needs of keys, for any λ.

    With it a sequence can be decoded one or several tokens at a time. The results are those of one
    call for all tokens, and the cost does not depend on the number of earlier tokens ::

        o = ridge_attention(q_t, k_t, v_t, is_causal=True, state=S)
        S = ridge_state(k_t, v_t, state=S)

    Keys ``(..., H, M, D)`` and values ``(..., H, M, Dv)`` are added to `state`, or to zeros if it
    is left out. Errors are those of the attention.
    """
    check_keys(k, v)
    first = _earlier(state, k, v)
    with full_precision(k.device):
        K = k.double()
        return RidgeState(first.keys + K.mT @ K, first.values + K.mT @ v.double())


def _earlier(state: Any, k: Tensor, v: Tensor) -> RidgeState:
    """Check a state and return it in double precision; zeros for None."""
    leading, D, Dv = tuple(k.shape[:-2]), k.shape[-1], v.shape[-1]
    shapes = (*leading, D, D), (*leading, D, Dv)
    if state is None:
        return RidgeState(*(k.new_zeros(shape, dtype=torch.float64) for shape in shapes))
    check_parts(state, RidgeState, k, *shapes)
    return RidgeState(*(x.double() for x in state))


@mechanism(per_key=True, state=ridge_state)
def ridge_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    lam: Any = 0.1,
    exclude_self: bool = False,
    prefix: int = 0,
    state: RidgeState | None = None,
) -> Tensor:
    """O = Q (KᵀK + λ I)⁻¹ KᵀV: code each query in the keys by ridge regression, and mix values.

    It is the ridge regression of values on keys, W = (KᵀK + λ I)⁻¹ KᵀV, evaluated at the queries:
    a linear attention without a normaliser, in O((N + M) D (D + Dv) + D³) operations. If causal,
    the regression of each query uses the keys up to its own. W is computed in double precision,
    and so is everything if causal or with `exclude_self`. A query may get NaN if its keys are
    longer than about 10⁷ √λ, because double precision then loses λ.

    Parameters
    ----------
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean:
        True for a key that takes part. Floating: 0 or -inf; -8192 and below count as -inf.
    scale : float, optional
        Finite and positive; multiplies q. If it is left out, q is not multiplied.
    lam : float or Tensor
        λ > 0 of ½‖q − Kᵀx‖² + ½λ‖x‖², one or ``(H,)``. A tensor is checked on a CPU only.
    exclude_self : bool
        Whether query i leaves out key i; then as many keys as queries are needed.
    prefix : int
        Number of keys that come before the first query's own: all queries have them, if causal too.
    state : RidgeState, optional
        Sums over more keys that come before. `ridge_state` returns it. With `is_causal` only.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> ridge_attention(q, k, v, lam=0.1, is_causal=True).shape
    torch.Size([2, 4, 10, 8])
    """
    check_causal_state(state, mask.is_causal)
    options, dtype = Options(mask.is_causal, exclude_self, prefix), q.dtype
    q, k, v, present = prepare_codes(q, k, v, mask, scale, options)
    lam = penalty("lam", lam, k)  # heads that share keys share λ
    k = k if mask.given is None else k * present.unsqueeze(-1)
    with full_precision(q.device):
        if mask.is_causal and state is None and is_short(q, k, RIDGE):
            return _ridge_in_few_keys(options, q, k, v, lam).to(dtype)
        if mask.is_causal:
            return _by_heads(options, q, k, v, lam, _earlier(state, k, v)).to(dtype)
        return _ridge(options, q, k, v, lam).to(dtype)


def _ridge(options: Options, q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """o_i = Wᵀq_i, W = G⁻¹ KᵀV; with `exclude_self` less the part of the i-th key.

    That part is (q_i·g_i) (v_i − Wᵀk_i) / (1 − k_i·g_i), g_i = G⁻¹ k_i, by the formula of Sherman
    and Morrison: the residual of a regression without a point is that with it, over 1 − k_i·g_i. W
    is in double precision, and so is what is left of terms that nearly cancel.
    """
    K, V = k.double(), v.double()
    M, lost = whitening_factor(K, lam)
    W = (M.mT @ (M @ (K.mT @ V))).masked_fill(lost, math.nan)  # (..., D, Dv)
    if not options.exclude_self:
        return q @ W.to(q.dtype)
    q, keys, values = q.double(), K[..., options.prefix :, :], V[..., options.prefix :, :]
    white = keys @ M.mT
    share = ((q @ M.mT) * white).sum(-1, keepdim=True) / (1 - white.square().sum(-1, keepdim=True))
    return q @ W - share * (values - keys @ W)


def _ridge_in_few_keys(options: Options, q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """o_i = Σ_{j ≤ i} (q_i·e_j) r_j, with L Lᵀ = K Kᵀ + λ I, E = L⁻¹ K and R = L⁻¹ V.

    The leading part of L belongs to the leading keys. Long keys are treated as in `Past.factor`.
    """
    q, k, v = q.double(), k.double(), v.double()
    S = k @ k.mT
    floor = torch.maximum(lam[..., None].double(), NOISE * S.detach().diagonal(0, -2, -1))
    L = torch.linalg.cholesky_ex(S + floor.diag_embed()).L
    solved = torch.linalg.solve_triangular(L, torch.cat([k, v], -1), upper=False)
    E, R = solved.split([k.shape[-1], v.shape[-1]], -1)
    return options.hide(q @ E.mT, 0) @ R


def _by_heads(
    options: Options, q: Tensor, k: Tensor, v: Tensor, lam: Tensor, earlier: RidgeState
) -> Tensor:
    """Run `_causal_ridge` on so many heads at a time that their chunks have `STATES` numbers.

    The backward pass computes those of some heads again, and needs no more memory than for these.
    """

    def run(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, *sums: Tensor) -> Tensor:
        return _causal_ridge(options, q, k, v, lam, RidgeState(*sums)).to(q.dtype)

    size = max(1, STATES // max(1, q.shape[-2] * max(q.shape[-1], v.shape[-1])))
    if math.prod(q.shape[:-2]) <= size or not has_concrete_values(q):  # or a compiler, a transform
        return run(q, k, v, lam, *earlier)
    flat = all_flat(q.dim() - 2, q, k, v, lam, *earlier)
    groups = zip(*(x.split(size) for x in flat), strict=True)
    parts = [checkpoint(run, *x, use_reentrant=False, preserve_rng_state=False) for x in groups]
    return torch.cat(parts).reshape(*q.shape[:-1], v.shape[-1])


def _causal_ridge(
    options: Options, q: Tensor, k: Tensor, v: Tensor, lam: Tensor, earlier: RidgeState
) -> Tensor:
    """Predict from all chunks before, and correct by the keys of the chunk: see `Past`.

    With W = Mᵀ M Σ_j k_j v_jᵀ over the keys before, it is o_i = Wᵀq_i + Σ_{j ≤ i} (q̃_i·e_j) r_j
    where q̃_i = M q_i and R = F⁻¹ (V_c − K_c W). Nothing cancels there, as it would in a sum of
    (t_i·k_j) v_j: directions of q_i in which no key lies make t_i large, and have no part in it.
    """
    N, P = q.shape[-2], options.prefix
    q, k, v = q.double(), k.double(), v.double()  # once: gradients of k may nearly cancel, too
    past = Past.before_chunks(k, lam, N, options, RIDGE, earlier.keys)
    queries, values = (in_chunks(x, N, RIDGE) for x in (q, v[..., P:, :][..., :N, :]))
    first = earlier.values + k[..., :P, :].mT @ v[..., :P, :]
    W = past.M.mT @ (past.M @ products_before(past.keys, values, first))  # (..., n, D, Dv)
    white, factor = past.factor()
    E, R = torch.linalg.solve_triangular(
        factor, torch.cat([white, values - past.keys @ W], -1), upper=False
    ).split([white.shape[-1], v.shape[-1]], -1)
    A = (queries @ past.M.mT @ E.mT).tril(-int(options.exclude_self))  # (..., n, C, C)
    out = (queries @ W + A @ R).masked_fill(past.lost, math.nan)
    return out.flatten(-3, -2)[..., :N, :]


# --- lasso ----------------------------------------------------------------------------------------


@mechanism(per_key=True)
def lasso_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    lam: Any = 0.1,
    rho: Any = 10.0,
    iterations: int = 5,
    exclude_self: bool = False,
    power: Any = None,
    prefix: int = 0,
    residuals: Any = None,
) -> Tensor:
    """O = ν(α(Z)) V: code each query in few keys, by some steps of ADMM for the lasso.

    The weights are signed, many of them are exactly 0, and they depend on all keys: of two equal
    keys one is enough. A step is two products of (N, M) by (M, D), and the only inverse is (D, D),
    or one for each chunk if causal. No (N, M) matrix is stored, only the codes of C = 128 queries
    at a time; for gradients, those of all their steps. Sums are in float32 at least.

    Parameters
    ----------
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean:
        True for a key that takes part. Floating: 0 or -inf; -8192 and below count as -inf.
    scale : float, optional
        Finite and positive; multiplies q. If it is left out, q is not multiplied.
    lam : float or Tensor
        λ > 0 of ½‖q − Kᵀx‖² + λ‖x‖₁, one or ``(H,)``: half the λ of the form without the ½.
        A tensor is checked on a CPU only.
    rho : float or Tensor
        ρ > 0, the penalty of ADMM, one or ``(H,)``. It changes the speed, not the limit.
    iterations : int
        Steps, at least 1.
    exclude_self : bool
        Whether query i leaves out key i, so that z_ii = 0; then as many keys as queries are needed.
    power : int, optional
        The odd p of α(z) = zᵖ, 5 in [OptimizingAttention], divided by ‖zᵖ‖₁. Left out: the code z.
    prefix : int
        Number of keys that come before the first query's own: all queries have them, if causal too.
    residuals : list, optional
        The norms ‖x − z‖ and ρ‖z − z_before‖ of each query after each step, primal and dual, are
        appended to it: a pair of ``(..., N, iterations)``. It costs another run.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> lasso_attention(q, k, v, lam=0.1, power=5).shape
    torch.Size([2, 4, 10, 8])
    """
    if residuals is not None and not isinstance(residuals, list):
        raise TypeError(f"residuals is of type {type(residuals).__name__}; expected a list or None")
    options = Options(mask.is_causal, exclude_self, prefix, iterations, power)
    dtype = q.dtype
    q, k, v, present, lam, rho = check_lasso(q, k, v, mask, scale, options, lam, rho)
    k, kappa = k * present.unsqueeze(-1), (lam / rho)[..., None, None]
    with full_precision(q.device):
        q = q / kappa  # codes of q / κ with κ = 1 are those of q, divided by κ
        if residuals is not None:
            primal, dual = _residuals(options, q, k, rho)
            residuals.append((kappa * primal, kappa * dual))
        few = not (options.is_causal or exclude_self) and is_short(q, k, k.shape[-1])
        out = (_code_in_few_keys if few else _Coding.apply)(options, q, k, v, rho)
        return (out if power else kappa * out).to(dtype)


def _code_in_few_keys(options: Options, q: Tensor, k: Tensor, v: Tensor, rho: Tensor) -> Tensor:
    """Take the steps with the inverse of K Kᵀ + ρ I, (M, M), which is cheaper where M ≤ D.

    With J = I − ρ (K Kᵀ + ρ I)⁻¹ and κ = 1, a step is w ← J (w − 2 z) + z + (K Kᵀ + ρ I)⁻¹ K q.
    The inverse is in double precision; J, whose eigenvalues are from 0 to 1, enlarges no error.
    """
    Q, K, R = all_flat(q.dim() - 2, q.double(), k.double(), rho.double()[..., None, None])
    eye = torch.eye(K.shape[-2], dtype=K.dtype, device=K.device)
    G = K @ K.mT + R * eye
    lost = torch.linalg.cholesky_ex(G.detach()).info.ne(0)[:, None, None]
    inverse = torch.linalg.inv_ex(G).inverse.masked_fill(lost, math.nan)
    J = (eye - R * inverse).to(v.dtype)
    w = first = (Q @ (K.mT @ inverse)).to(v.dtype)
    for _ in range(options.iterations - 1):
        z = F.softshrink(w, 1.0)
        w = torch.baddbmm(first + z, torch.sub(w, z, alpha=2), J)
    A = signed_power(F.softshrink(w, 1.0), options.power)
    return A.view(*q.shape[:-1], k.shape[-2]) @ v


def _blocks(options: Options, q: Tensor, k: Tensor) -> Iterator[Block]:
    """Cut heads (b, ·, ·) and queries; on a CPU the codes of a block stay in its cache."""
    b, N, M = len(q), q.shape[-2], k.shape[-2]
    size = max(1, b if q.device.type != "cpu" else CODES // (CHUNK * max(M, 1)))
    for h in range(0, b, size):
        for rows in _chunks(N):
            yield Block(slice(h, h + size), rows, options.seen(rows.stop, M))


def _chunks(N: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, N)) for start in range(0, N, CHUNK)]


def _precision(options: Options, rows: slice, k: Tensor) -> torch.dtype:
    """Return double precision where a query may have a part in which no key lies.

    As it has where there are fewer keys than features. There t is as large as that part over ρ, and
    K t, without it, is what is left of large numbers.
    """
    before = options.prefix + rows.start if options.is_causal else k.shape[-2]
    return torch.float64 if before < 2 * k.shape[-1] else k.dtype


def _steps(
    options: Options, tensors: list[Tensor], solve: Solve, block: Block, in_place: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield w (b, C, m) and t (b, C, D) after each step, κ being 1; `in_place` writes w over z.

    r = q + Kᵀw − 2 Kᵀz needs no pass over w, as w = z_before + K t, and KᵀK t = r_before − ρ t:
    `known` is q + Kᵀw, and Kᵀz_before half of the difference of `known` and r before.
    """
    (q, k, _, rho), (heads, rows, m) = tensors, block
    Q, K, rho, start = q[heads, rows], k[heads, :m], rho[heads, None, None], rows.start
    known = r = Q
    t = solve(r)
    w = options.hide(t @ K.mT, start)
    yield w, t
    for _ in range(options.iterations - 1):
        z = F.softshrink(w, 1.0)
        known = torch.addcmul(Q + torch.lerp(known, r, 0.5), rho, t, value=-1)
        r = torch.baddbmm(known, z, K, alpha=-2)
        t = solve(r)
        w = z.baddbmm_(t, K.mT) if in_place else torch.baddbmm(z, t, K.mT)
        yield options.hide(w, start), t


def _mix_values(
    options: Options, tensors: list[Tensor], solver: Solver, block: Block, in_place: bool = False
) -> Tensor:
    """Return what the codes of one block mix, for q, k, v and ρ in the dtype that it wants."""
    q, _, v, _ = tensors
    solve = solver.part(block.heads, block.rows, q.dtype)
    for step in _steps(options, tensors, solve, block, in_place):
        w = step[0]
    return signed_power(F.softshrink(w, 1.0), options.power) @ v[block.heads, : block.m]


class _Coding(torch.autograd.Function):
    """Codes block by block, κ being 1, and what they mix. The backward pass makes them again.

    There dw, the gradient of w, goes back through a step as follows. The same solver gives dr, as
    G⁻¹ is symmetric, and x = w − u_before is what the first line of ADMM computes ::

        dt = Kᵀ dw,   dr = G⁻¹ dt,   db = −K dr,   dq += dr,   dK += (dw + db) tᵀ − x drᵀ
        dρ −= t·dr,   dw_before = dw + db where abs(w_before) > 1, and −db elsewhere
    """

    @staticmethod
    def forward(options: Options, q: Tensor, k: Tensor, v: Tensor, rho: Tensor) -> Tensor:
        """Take q / κ, keys with rows of zeros for absent ones, values, and ρ."""
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        flat, q, k, v, rho = all_flat(q.dim() - 2, out, q, k, v, rho)
        in_place = not torch.compiler.is_compiling()  # a traced graph may want gradients
        solver = Solver(k, rho, q.shape[-2], options)
        cast = {k.dtype: [q, k, v, rho]}
        for block in _blocks(options, q, k):
            dtype = _precision(options, block.rows, k)
            if dtype not in cast:
                cast[dtype] = [x.to(dtype) for x in (q, k, v, rho)]
            mixed = _mix_values(options, cast[dtype], solver, block, in_place)
            flat[block.heads, block.rows] = mixed.to(q.dtype)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradients need."""
        ctx.options, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and ρ."""
        (grad,), options, tensors = grads, ctx.options, ctx.saved_tensors
        with full_precision(grad.device):  # autocast may be on again
            if needs_whole(grad, *tensors):
                pull: Any = torch.func.vjp(functools.partial(_whole, options), *tensors)[1]
                return None, *pull(grad)
            return None, *_gradients(options, grad, *tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], options: Options, *tensors: Tensor) -> Any:
        """Let the mapped dimension be one more leading dimension."""
        moved = [to_front(info, x, dim) for x, dim in zip(tensors, in_dims[1:], strict=True)]
        return _Coding.apply(options, *moved), 0


def _gradients(options: Options, grad: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return the gradients of q, k, v and ρ block by block."""
    result = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tensors]
    grad, *flat = all_flat(grad.dim() - 2, grad, *tensors, *result)
    narrow, sums = flat[:4], flat[4:]
    q, k, _, rho = narrow
    solver = Solver(k, rho, q.shape[-2], options)
    cast = {k.dtype: (narrow, sums)}
    for block in _blocks(options, q, k):
        dtype = _precision(options, block.rows, k)
        if dtype not in cast:
            zeros = [torch.zeros_like(x, dtype=dtype) for x in sums]
            cast[dtype] = [x.to(dtype) for x in narrow], zeros
        solve = solver.part(block.heads, block.rows, dtype)
        g = grad[block.heads, block.rows].to(dtype)
        _spread(options, cast[dtype][0], solve, block, g, cast[dtype][1])
    for _, wider in list(cast.values())[1:]:
        for total, x in zip(sums, wider, strict=True):
            total += x
    return result


def _spread(
    options: Options, tensors: list[Tensor], solve: Solve, block: Block, g: Tensor,
    sums: list[Tensor],
) -> None:  # fmt: skip
    """Add what one block, whose output has the gradient g, gives to dq, dk, dv and dρ."""
    (heads, rows, m), (_, k, v, _), (dq, dk, dv, drho) = block, tensors, sums
    K = k[heads, :m]
    steps = list(_steps(options, tensors, solve, block))
    z = F.softshrink(steps[-1][0], 1.0)
    A = signed_power(z, options.power)
    dv[heads, :m].baddbmm_(A.mT, g)
    dz = g @ v[heads, :m].mT  # (b, C, m)
    if options.power is not None:
        mean = (dz * A).sum(-1, keepdim=True)
        slope = options.power * A / z.masked_fill(z == 0, math.inf)  # p z^(p−1) / Σ_j |z_j|ᵖ
        dz = slope * (dz - mean * z.sign())
    dw = dz.mul_((z != 0).to(z.dtype))  # a product is faster than `torch.where`
    for n in range(options.iterations - 1, -1, -1):
        (x, t), before = steps[n], steps[n - 1][0] if n else None
        dr = solve(dw @ K)
        back = options.hide(dr @ K.mT, rows.start)  # −db
        dk[heads, :m].baddbmm_(dw.sub_(back).mT, t)
        if before is not None:
            u = before.clamp(-1, 1)
            dw = back.lerp_(dw, (u != before).to(u.dtype))
            x = torch.sub(x, u, out=u)
        dk[heads, :m].baddbmm_(x.mT, dr, alpha=-1)
        dq[heads, rows] += dr
        drho[heads] -= (t * dr).sum((-2, -1))


def _whole(options: Options, q: Tensor, k: Tensor, v: Tensor, rho: Tensor) -> Tensor:
    """Return what `_Coding` does, with all steps in memory: it can be differentiated at will."""
    Q, K, V, flat_rho = all_flat(q.dim() - 2, q, k, v, rho)
    solver, parts = Solver(K, flat_rho, q.shape[-2], options), []
    for rows in _chunks(q.shape[-2]):
        block = Block(ALL, rows, options.seen(rows.stop, k.shape[-2]))
        cast = [x.to(_precision(options, rows, K)) for x in (Q, K, V, flat_rho)]
        parts.append(_mix_values(options, cast, solver, block).to(q.dtype))
    out = torch.cat(parts, -2) if parts else Q @ K.mT @ V
    return out.reshape(*q.shape[:-1], v.shape[-1])


@torch.no_grad()
def _residuals(options: Options, q: Tensor, k: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """Primal and dual residuals of every step, (..., N, iterations), with κ = 1."""
    Q, K, flat_rho = all_flat(q.dim() - 2, q, k, rho)
    solver = Solver(K, flat_rho, q.shape[-2], options)
    result = q.new_zeros(2, *Q.shape[:-1], options.iterations)
    for block in _blocks(options, Q, K):
        u = z = Q.new_zeros(())
        solve = solver.part(block.heads, block.rows, Q.dtype)
        for n, (w, _) in enumerate(_steps(options, [Q, K, K, flat_rho], solve, block)):
            u, z, old_u, old_z = w.clamp(-1, 1), F.softshrink(w, 1.0), u, z
            dual = flat_rho[block.heads, None] * (z - old_z).norm(dim=-1)
            pair = torch.stack([(u - old_u).norm(dim=-1), dual])  # x − z = u − u_before
            result[:, block.heads, block.rows, n] = pair
    primal, dual = result.view(2, *q.shape[:-1], options.iterations)
    return primal, dual


# --- the formulas, with the same arguments ---


@reference(ridge_attention, formulas.ridge, per_key=True)
def ridge_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, lam: Any = 0.1,
    exclude_self: Any = False, prefix: Any = 0,
) -> dict[str, Any]:  # fmt: skip
    """Check λ, and return which keys are atoms of which query."""
    options = Options(mask.is_causal, exclude_self, prefix)
    q, *_, present = prepare_codes(q, k, v, mask, None, options)
    lam = penalty("lam", lam, q)[..., None, None]
    return {"lam": lam, "atoms": options.atoms(q.shape[-2], present)}


@reference(lasso_attention, formulas.lasso, per_key=True)
def lasso_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, lam: Any = 0.1,
    rho: Any = 10.0, iterations: Any = 5, exclude_self: Any = False, power: Any = None,
    prefix: Any = 0, residuals: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Check λ, ρ and the steps, and return which keys are atoms of which query."""
    options = Options(mask.is_causal, exclude_self, prefix, iterations, power)
    q, *_, present, lam, rho = check_lasso(q, k, v, mask, None, options, lam, rho)
    numbers = {"lam": lam[..., None, None], "rho": rho[..., None, None]}
    numbers |= {"iterations": iterations, "power": power, "residuals": residuals}
    return numbers | {"atoms": options.atoms(q.shape[-2], present)}
