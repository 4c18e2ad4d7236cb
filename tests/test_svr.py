"""Support vector regression: certificates of solutions, and agreement with scikit-learn."""

import numpy as np
import pytest
from sklearn.svm import SVR

from derived_book.svr import fit_svr, gram_features


def problem(N=12, F=4, Dv=1, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(N, F)), rng.normal(size=(N, Dv))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("eps", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("Dv", [1, 3])
def test_values_meet_and_conditions_hold(Dv, eps, bias):
    G, y = problem(Dv=Dv)
    fit = fit_svr(G, y, 2.0, eps, bias)
    assert fit.value == pytest.approx(fit.dual, abs=1e-8)
    assert max(fit.kkt.values()) < 1e-7
    assert ((fit.c >= -2 - 1e-9) & (fit.c <= 2 + 1e-9)).all()
    gap = np.abs(y - fit.predict(G)) - eps
    cost = np.sum(fit.W**2) / 2 + 2.0 * np.maximum(gap, 0).sum()
    assert cost == pytest.approx(fit.value, abs=1e-8)
    if eps:
        assert fit.support[gap > 1e-6].all() and not fit.support[gap < -1e-6].any()
    assert (fit.b == 0).all() or bias


def test_what_is_no_solution_fails_its_certificate():
    G, y = problem()
    fit = fit_svr(G, y, 2.0, 0.1)
    wrong = type(fit)(**vars(fit) | {"alpha": fit.alpha * 0.9})
    assert abs(wrong.dual - fit.value) > 1e-3 and wrong.kkt["stationarity in W"] > 1e-3
    assert type(fit)(**vars(fit) | {"b": fit.b + 1}).kkt["slackness of the tube"] > 1e-3


def test_each_output_is_a_regression_of_its_own_and_scikit_learn_agrees():
    G, y = problem(Dv=2)
    both = fit_svr(G, y, 1.0, 0.2)
    new = problem(seed=1)[0]
    for d in range(2):
        theirs = SVR(kernel="precomputed", C=1.0, epsilon=0.2, tol=1e-9).fit(G @ G.T, y[:, d])
        np.testing.assert_array_equal(np.flatnonzero(both.support[:, d]), theirs.support_)
        np.testing.assert_allclose(both.c[theirs.support_, d], theirs.dual_coef_[0], atol=1e-5)
        np.testing.assert_allclose(both.b[0, d], theirs.intercept_, atol=1e-5)
        np.testing.assert_allclose(both.predict(new)[:, d], theirs.predict(new @ G.T), atol=1e-5)


def test_features_of_a_kernel_predict_what_the_expansion_does():
    rng = np.random.default_rng(0)
    K, Q, y = (rng.normal(size=(n, 2)) for n in (6, 4, 6))
    kernel = lambda x, z: np.exp(x @ z.T)  # noqa: E731
    both = np.vstack([K, Q])
    Phi = gram_features(kernel(both, both))
    np.testing.assert_allclose(Phi @ Phi.T, kernel(both, both), rtol=1e-10)
    fit = fit_svr(Phi[:6], y, 3.0, 0.1)
    np.testing.assert_allclose(fit.predict(Phi[6:]), kernel(Q, K) @ fit.c + fit.b, atol=1e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"G": np.zeros(3)}, r"G has shape \(3,\); expected a non-empty matrix"),
        ({"y": np.full((12, 1), np.nan)}, r"y has shape \(12, 1\); expected .* finite numbers"),
        ({"y": np.zeros((3, 1))}, "y has 3 rows; expected 12"),
        ({"C": 0}, "C is 0; expected a number above 0"),
        ({"eps": -1}, "eps is -1; expected a number, at least 0"),
    ],
)
def test_a_bad_argument_is_named(change, message):
    G, y = problem()
    with pytest.raises(ValueError, match=message):
        fit_svr(**{"G": G, "y": y, "C": 1.0, "eps": 0.1} | change)


@pytest.mark.parametrize(
    ("gram", "message"),
    [
        ([[1.0, 2.0]], r"gram of shape \(1, 2\) is not symmetric"),
        ([[1.0, 2.0], [0.0, 1.0]], "is not symmetric"),
        ([[1.0, 2.0], [2.0, 1.0]], "gram has the eigenvalue -1; expected none below 0"),
    ],
)
def test_what_is_no_gram_matrix_is_refused(gram, message):
    with pytest.raises(ValueError, match=message):
        gram_features(gram)
