"""Systems over the keys that a query has for atoms: what ridge and the lasso solve (chapter 13).

The equation of this module, for a query i with the atoms A_i, is ::

    t_i = G_i⁻¹ r_i,    G_i = Σ_{j ∈ A_i} k_j k_jᵀ + ρ I

with G_i of shape (D, D). One G serves all queries that have all keys. Causal queries have one each,
in chunks: `Past` has what comes before a chunk, and the factor of the chunk itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from derived_attention.common.checks import (
    check_count,
    check_flags,
    check_no_bias,
    check_parameter,
    check_positive,
)
from derived_attention.common.convention import extend
from derived_attention.common.masks import Mask
from derived_attention.linear.core import in_chunks

CHUNK = 128  # queries whose codes are in memory at a time
FACTORED = 16  # chunks of queries whose (C, C) factors are in memory at a time
NOISE = 4 * CHUNK * torch.finfo(torch.float64).eps  # an upper bound of Cholesky's rounding errors
Penalty = float | Tensor
Solve = Callable[[Tensor], Tensor]


class Options(NamedTuple):
    """Which keys the queries have for atoms, and how codes are found and used."""

    is_causal: bool
    exclude_self: bool
    prefix: int
    iterations: int = 0
    power: int | None = None

    def hide(self, x: Tensor, start: int) -> Tensor:
        """Set to 0, in place, what queries from `start` on have no atoms for: x (..., C, m)."""
        diagonal = start + self.prefix
        if self.is_causal:
            return x.tril_(diagonal - self.exclude_self)
        if self.exclude_self and diagonal < x.shape[-1]:
            x.diagonal(diagonal, -2, -1).zero_()
        return x

    def seen(self, end: int, M: int) -> int:
        """Return how many of M keys the queries before `end` may have for atoms."""
        return min(M, end + self.prefix) if self.is_causal else M

    def atoms(self, N: int, present: Tensor) -> Tensor:
        """Return 1 where a query has a key for an atom, else 0: (..., N, M)."""
        return self.hide(present.unsqueeze(-2).repeat_interleave(N, -2), 0)


def prepare_codes(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Check; return q, k, v in float32 at least, and 1 for a key that is present, else 0: (..., M).

    q is multiplied by the scale.
    """
    check_flags(exclude_self=options.exclude_self)
    if options.prefix.__class__ is not int or options.prefix < 0:
        check_count("prefix", options.prefix, 0)
    N, M = q.shape[-2], k.shape[-2]
    if options.prefix > M:
        raise ValueError(f"prefix is {options.prefix}; expected at most {M}, the number of keys")
    if options.exclude_self and N != M - options.prefix:
        expected = f"{N + options.prefix} keys with exclude_self=True"
        raise ValueError(f"k has shape (..., {M}, D); expected {expected}")
    if mask.given is not None:
        check_no_bias("attn_mask", mask.given, "there are no scores of keys to add to")
    keys = None if mask.given is None else mask.present(M)
    dtype = torch.promote_types(q.dtype, torch.float32)
    q = (q if scale is None else scale * q).to(dtype)
    k, v = k.to(dtype), v.to(dtype)
    present = k.new_ones(k.shape[:-1]) if keys is None else keys.to(dtype).expand(k.shape[:-1])
    return q, k, v, present


def check_lasso(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, options: Options,
    *penalties: Penalty,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Check as `prepare_codes` does, and λ and ρ; return all of it."""
    check_count("iterations", options.iterations, 1)
    check_power(options.power)
    q, *rest = prepare_codes(q, k, v, mask, scale, options)
    lam, rho = penalties
    return q, *rest, penalty("lam", lam, q), penalty("rho", rho, q)


def check_power(power: int | None) -> int | None:
    """Check the odd p of α(z) = zᵖ, and return it."""
    if power is not None and check_count("power", power, 1) % 2 == 0:
        raise ValueError(f"power is {power}; expected an odd number, or None")
    return power


def penalty(name: str, value: Penalty, q: Tensor) -> Tensor:
    """Return a positive number, or one for each head, in the leading shape of queries or keys."""
    if not isinstance(value, Tensor):
        return q.new_full(q.shape[:-2], check_positive(name, value))
    shapes = ((), *([q.shape[-3:-2]] if q.dim() > 2 else []))
    kind = "finite and positive"
    value = check_parameter(name, value, q, shapes, "one, or one for each head", kind)
    return value.to(q.dtype).expand(q.shape[:-2])


class Solver:
    """t_i = G_i⁻¹ r_i for the atoms of each query i; G_i⁻¹ is symmetric.

    Where all queries have all keys there is one G, inverted by its Cholesky factor. `exclude_self`
    takes k_i k_iᵀ from it, and by Sherman and Morrison G_i⁻¹ = G⁻¹ + g_i g_iᵀ / (1 − k_i·g_i) with
    g_i = G⁻¹ k_i. Causal, it is that of `Past`; some chunks are factored at a time.
    """

    def __init__(self, k: Tensor, rho: Tensor, N: int, options: Options) -> None:
        self.options = options
        if options.is_causal:
            past = Past.before_chunks(k, rho, N, options, CHUNK)
            parts = zip(*(x.split(FACTORED, -3) for x in past), strict=True)
            inverses = zip(*(Past(*part).inverse() for part in parts), strict=True)
            self.P, self.E = (torch.cat(x, -3) for x in inverses)  # (..., n, D, D), (..., n, C, D)
            return
        # In double precision: in float32 ρ would be lost beside keys of length 10³.
        M, lost = whitening_factor(k.double(), rho)
        self.P = (M.mT @ M).masked_fill(lost, math.nan)  # (..., D, D)
        if options.exclude_self:
            self.excluded = k[..., options.prefix :, :].double()
            g = self.excluded @ self.P  # (..., N, D)
            self.g = g / (1 - (self.excluded * g).sum(-1, keepdim=True))

    def part(self, heads: Any, rows: slice, dtype: torch.dtype) -> Solve:
        """Return what solves for some queries of some heads; causal: for one chunk."""
        own = int(self.options.exclude_self)
        if self.options.is_causal:
            P, E = (x[heads, rows.start // CHUNK].to(dtype) for x in (self.P, self.E))
            E = E[..., : rows.stop - rows.start, :]
            return lambda R: R @ P - (R @ E.mT).tril(-own) @ E
        P = self.P[heads].to(dtype)
        if not own:
            return lambda R: R @ P
        excluded, g = (x[heads, rows].to(dtype) for x in (self.excluded, self.g))

        def solve(R: Tensor) -> Tensor:
            T = R @ P
            return T + g * (excluded * T).sum(-1, keepdim=True)

        return solve


class Past(NamedTuple):
    """The keys of causal queries in chunks of C, and what comes before each, in double precision.

    Let L Lᵀ = Σ_j k_j k_jᵀ + ρ I over the keys before a chunk, M = L⁻¹, and K̃ = K_c Mᵀ its own
    keys, whitened. Then G_i = L (I + Σ_{j ≤ i} k̃_j k̃_jᵀ) Lᵀ. Let F Fᵀ = I + K̃ K̃ᵀ and E = F⁻¹ K̃: the
    leading part of F belongs to the leading keys, so that G_i⁻¹ = Mᵀ (I − E_{≤i}ᵀ E_{≤i}) M.
    """

    keys: Tensor  # (..., n, C, D), padded with rows of zeros
    M: Tensor  # (..., n, D, D)
    lost: Tensor  # (..., n, 1, 1): where ρ is lost beside the keys before, or they are not finite

    @classmethod
    def before_chunks(
        cls, k: Tensor, rho: Tensor, N: int, options: Options, size: int,
        earlier: Tensor | float = 0.0,
    ) -> Past:  # fmt: skip
        """Cut keys (..., M, D), and look back from each chunk of that size.

        `earlier` (..., D, D) is Σ_j k_j k_jᵀ over keys before all of them.
        """
        first, rest = k[..., : options.prefix, :].double(), k[..., options.prefix :, :]
        keys = in_chunks(rest[..., :N, :], N, size).double()
        before = earlier + first.mT @ first + _diagonal(rho, k.shape[-1])
        return cls(keys, *_inverse_factor(products_before(keys, keys, before)))

    def factor(self) -> tuple[Tensor, Tensor]:
        """Return K̃, and F, both of all chunks.

        A key so long that 1 is lost beside k̃·k̃, in double precision, gets as much in its place as
        keeps F: a relative change of 10⁻¹³, of that key alone, with the rows before it unchanged.
        """
        white = self.keys @ self.M.mT
        S = white @ white.mT
        floor = (NOISE * S.detach().diagonal(0, -2, -1)).clamp(min=1)
        S.diagonal(0, -2, -1).add_(floor)
        return white, torch.linalg.cholesky_ex(S).L

    def inverse(self) -> tuple[Tensor, Tensor]:
        """Return MᵀM and E M, so that G_i⁻¹ is the one less a product of the leading rows."""
        white, factor = self.factor()
        E = torch.linalg.solve_triangular(factor, white, upper=False)
        return (self.M.mT @ self.M).masked_fill(self.lost, math.nan), E @ self.M


def whitening_factor(k: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """Return L⁻¹ where L Lᵀ = KᵀK + ρ I, for keys in double precision, and where there is none."""
    return _inverse_factor(k.mT @ k + _diagonal(rho, k.shape[-1]))


def _diagonal(rho: Tensor, D: int) -> Tensor:
    return rho.double()[..., None, None] * torch.eye(D, dtype=torch.float64, device=rho.device)


def _inverse_factor(G: Tensor) -> tuple[Tensor, Tensor]:
    """Return L⁻¹ where L Lᵀ = G, and where there is none (..., 1, 1), with finite numbers there.

    The caller puts NaN there and raises no error: so one sequence does not stop a batch, and
    the CPU does not wait for a GPU. Gradients of the others stay as they are.
    """
    eye = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
    lost = torch.linalg.cholesky_ex(G.detach()).info.ne(0)[..., None, None]
    L = torch.linalg.cholesky_ex(torch.where(lost, eye, G)).L
    return torch.linalg.solve_triangular(L, eye, upper=False), lost


def products_before(k: Tensor, v: Tensor, first: Tensor) -> Tensor:
    """Add up KᵀV over the chunks (..., n, C, ·) before each chunk, and what is before the first."""
    sums = k[..., :-1, :, :].mT @ v[..., :-1, :, :]
    return extend(sums, 0, -3, before=1).cumsum(-3) + first.unsqueeze(-3)
