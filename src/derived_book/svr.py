r"""Support vector regression with several outputs, in its printed form (chapters 2 and 3).

Chapter 2 derives primal and dual. Later chapters need a solution with its multipliers, which become
the values of attention, and a certificate of optimality.
"""

from __future__ import annotations

from dataclasses import dataclass

import cvxpy as cp
import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Fit:
    r"""A solution of the primal, as `fit_svr` returns it, with the problem that it solves.

    Attributes
    ----------
    G, y
        Features (N, F) of the training points, and their targets (N, Dv).
    C, eps, bias
        Price of the slack, half the width of the tube, and whether there is an intercept.
    W, b
        Coefficients (Dv, F), and intercept (1, Dv), zero without `bias`.
    xi, xi_
        Slack above and below the tube, (N, Dv).
    alpha, alpha_
        Multipliers of both constraints, (N, Dv), in [0, C].
    value
        Value of the primal.
    """

    G: np.ndarray
    y: np.ndarray
    C: float
    eps: float
    bias: bool
    W: np.ndarray
    b: np.ndarray
    xi: np.ndarray
    xi_: np.ndarray
    alpha: np.ndarray
    alpha_: np.ndarray
    value: float

    @property
    def c(self) -> np.ndarray:
        r"""Weight of each point, :math:`\alpha-\tilde\alpha`, (N, Dv), in [−C, C]."""
        return self.alpha - self.alpha_

    @property
    def support(self) -> np.ndarray:
        r"""Whether each point is a support vector, with \|c\| above 1e-6 C, (N, Dv)."""
        return np.abs(self.c) > 1e-6 * self.C

    def predict(self, G: ArrayLike) -> np.ndarray:
        """Return :math:`f = GW^T + b`, (n, Dv), at points with features `G` (n, F)."""
        return np.asarray(G) @ self.W.T + self.b

    @property
    def dual(self) -> float:
        r"""Value of the dual at the multipliers, equal to `value` at a solution.

        .. math::

            \sum y\,(\alpha-\tilde\alpha) - \varepsilon\sum(\alpha+\tilde\alpha)
            - \tfrac12\lVert G^T(\alpha-\tilde\alpha)\rVert_F^2
        """
        paid = self.eps * np.sum(self.alpha + self.alpha_)
        return float(np.sum(self.y * self.c) - paid - np.sum((self.G.T @ self.c) ** 2) / 2)

    @property
    def kkt(self) -> dict[str, float]:
        """Largest violation of each of the Karush–Kuhn–Tucker conditions."""
        r = self.y - self.predict(self.G)
        parts: dict[str, list[np.ndarray]] = {
            "stationarity in W": [self.W - self.c.T @ self.G],
            "stationarity in b": [self.c.sum(0) if self.bias else np.zeros(1)],
            "slackness of the tube": [
                self.alpha * (self.eps + self.xi - r),
                self.alpha_ * (self.eps + self.xi_ + r),
            ],
            "slackness of the slacks": [
                (self.C - self.alpha) * self.xi,
                (self.C - self.alpha_) * self.xi_,
            ],
        }
        return {name: float(max(np.abs(z).max() for z in zs)) for name, zs in parts.items()}


def fit_svr(G: ArrayLike, y: ArrayLike, C: float, eps: float, bias: bool = True) -> Fit:
    r"""Solve the primal of support vector regression, with a separate tube for each output.

    .. math::

        \min_{W,b,\xi,\tilde\xi}\ \tfrac12\lVert W\rVert_F^2 + C\sum(\xi+\tilde\xi)
        \quad\text{where}\quad
        y - GW^T - b \le \varepsilon + \xi,\quad GW^T + b - y \le \varepsilon + \tilde\xi,\quad
        \xi,\tilde\xi \ge 0

    Parameters
    ----------
    G : array_like, shape (N, F)
        Features of the training points, :math:`\Phi(k_j)/h(k_j)` for an attention.
    y : array_like, shape (N, Dv)
        Targets.
    C : float
        Price of the slack, above 0.
    eps : float
        Half the width of the tube, at least 0.
    bias : bool
        Whether there is an intercept b.

    Returns
    -------
    Fit

    Raises
    ------
    ValueError
        If `G` or `y` is not a finite matrix, their numbers of rows differ, or `C` or `eps` is out
        of range.
    """
    G, y = _matrix("G", G), _matrix("y", y)
    if len(G) != len(y):
        raise ValueError(f"y has {len(y)} rows; expected {len(G)}, one for each row of G")
    if not 0 < C < np.inf:
        raise ValueError(f"C is {C}; expected a number above 0")
    if not 0 <= eps < np.inf:
        raise ValueError(f"eps is {eps}; expected a number, at least 0")
    W, b = cp.Variable((y.shape[1], G.shape[1])), cp.Variable((1, y.shape[1]))
    xi, xi_ = (cp.Variable(y.shape, nonneg=True) for _ in range(2))
    f = G @ W.T + (np.ones((len(y), 1)) @ b if bias else 0)
    tube = [y - f <= eps + xi, f - y <= eps + xi_]
    cost = cp.sum_squares(W) / 2 + C * cp.sum(xi + xi_)
    problem = cp.Problem(cp.Minimize(cost), tube)
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    return Fit(
        G=G,
        y=y,
        C=C,
        eps=eps,
        bias=bias,
        W=np.asarray(W.value),
        b=np.asarray(b.value) if bias else np.zeros((1, y.shape[1])),
        xi=np.asarray(xi.value),
        xi_=np.asarray(xi_.value),
        alpha=np.asarray(tube[0].dual_value),
        alpha_=np.asarray(tube[1].dual_value),
        value=float(problem.value),
    )


def gram_features(gram: ArrayLike) -> np.ndarray:
    r"""Return features with the inner products `gram`: rows :math:`\Phi` with ΦΦᵀ = gram.

    For the kernel matrix of training *and* test points, this is an exact, finite feature map, with
    one feature per point, from the eigendecomposition of the matrix.

    Parameters
    ----------
    gram : array_like, shape (N, N)
        Symmetric and positive semidefinite, up to rounding.

    Returns
    -------
    ndarray, shape (N, N)

    Raises
    ------
    ValueError
        If `gram` is not square, symmetric and finite, or has an eigenvalue below −1e-8 times the
        largest.
    """
    gram = _matrix("gram", gram)
    if gram.shape[0] != gram.shape[1] or not np.allclose(gram, gram.T):
        raise ValueError(f"gram of shape {gram.shape} is not symmetric; expected a Gram matrix")
    eigenvalues, U = np.linalg.eigh(gram)
    if eigenvalues.min() < -1e-8 * eigenvalues.max():
        raise ValueError(f"gram has the eigenvalue {eigenvalues.min():.3g}; expected none below 0")
    return U * np.sqrt(eigenvalues.clip(0))


def _matrix(name: str, value: ArrayLike) -> np.ndarray:
    array = np.asarray(value, dtype=float)
    if array.ndim != 2 or not np.isfinite(array).all() or array.size == 0:
        raise ValueError(
            f"{name} has shape {array.shape}; expected a non-empty matrix of finite numbers"
        )
    return array
