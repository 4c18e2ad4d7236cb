"""ADMM for the lasso, as it is printed and as it should be: for pages, not for models.

Each function is an endless generator of the iterates ``(x, z, u)``, all (N, M), of a method that
codes queries Q (N, D) in keys K (M, D), starting from zeros. `admm` is the known method
[Boyd2011], with its (M, M) inverse; `printed_admm` has equations (4a) to (4c) of
[OptimizingAttention], in each of their readings. Models use `derived_attention.lasso_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from derived_attention.formulas import soft_threshold

Iterates = Iterator[tuple[Tensor, Tensor, Tensor]]


def admm(Q: Tensor, K: Tensor, lam: float, rho: float, exclude_self: bool = False) -> Iterates:
    """Scaled ADMM: x = (KKᵀ + ρI)⁻¹(Kq + ρ(z − u)), z = S_κ(x + u), u = u + x − z.

    `exclude_self` leaves key i out for query i, with an inverse for each query.
    """
    atoms = 1 - torch.eye(len(Q), len(K), dtype=K.dtype) if exclude_self else torch.ones(1, len(K))
    keys = K * atoms.to(K).unsqueeze(-1)  # (N or 1, M, D)
    eye = torch.eye(len(K), dtype=K.dtype, device=K.device)
    inverse = torch.linalg.inv(keys @ keys.mT + rho * eye)
    z = u = Q.new_zeros(len(Q), len(K))
    while True:
        right = (keys @ Q.unsqueeze(-1)).squeeze(-1) + rho * (z - u)  # (N, M)
        x = (inverse @ right.unsqueeze(-1)).squeeze(-1)
        z = soft_threshold(x + u, lam / rho)
        u = u + x - z
        yield x, z, u


def printed_admm(
    Q: Tensor, K: Tensor, lam: float, rho: float, changed: tuple[bool, bool, bool] = (False,) * 3
) -> Iterates:
    """Run equations (4a) to (4c) as printed, or with some of three repairs; with all it is `admm`.

    The repairs are z − u in the bracket of (4a), instead of x − z; in (4b) the new x, instead of
    that of the step before; and +u in (4b), instead of −u.
    """
    bracket, new_x, plus = changed
    eye = torch.eye(len(K), dtype=K.dtype, device=K.device)
    inverse = torch.linalg.inv(K @ K.mT + rho * eye)
    x = z = u = Q.new_zeros(len(Q), len(K))
    while True:
        x_next = (Q @ K.mT + rho * (z - u if bracket else x - z)) @ inverse
        z = soft_threshold((x_next if new_x else x) + (u if plus else -u), lam / rho)
        x, u = x_next, u + x_next - z
        yield x, z, u
