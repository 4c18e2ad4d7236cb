"""Ridge and lasso attention: optima, atoms and codes, and the paper's variants."""

from __future__ import annotations

import functools
import itertools
import math

import cvxpy as cp
import numpy as np
import pytest
import torch
from helpers import (
    Largest,
    assert_all_close,
    output_and_gradients,
    qkv,
    relative_errors,
    tensors,
    with_gradients,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from derived_attention import (
    LassoAttention,
    MultiheadAttention,
    PrimalAttention,
    RidgeAttention,
    lasso_attention,
    lasso_attention_reference,
    ridge_attention,
    ridge_state,
    signed_power,
    soft_threshold,
)
from derived_attention.common.convention import weights_of
from derived_attention.registry import MECHANISMS
from derived_attention.sparse_coding import core, solver
from derived_attention.sparse_coding.admm import admm, printed_admm
from derived_attention.testing.cases import Held

EXACT = dict(solver="CLARABEL", tol_gap_abs=1e-14, tol_gap_rel=1e-14, tol_feas=1e-14)


def codes(Q, K, **options):
    """Return the codes (N, M) of queries in keys."""
    return weights_of(lasso_attention, Q, K, **options)


def converged_codes(Q, K, lam, **own):
    """Return converged codes; if keys are nearly parallel, this takes many steps."""
    steps, left = 1000, 1.0
    while left > 1e-9:
        residuals: list = []
        X = codes(Q, K, lam=lam, rho=1.0, iterations=steps, residuals=residuals, **own)
        primal, dual = residuals[0]
        assert primal.shape == dual.shape == (len(Q), steps) and steps < 10**6
        left, steps = float(torch.stack([primal, dual])[..., -1].max()), 8 * steps
    return X


def nth(iterates, n):
    return next(itertools.islice(iterates, n - 1, None))


def optimum(q, K, lam, without=None):
    """Return the least lasso objective by cvxpy, with code `without` fixed at 0."""
    x = cp.Variable(len(K))
    fit = cp.sum_squares(q.numpy() - K.T.numpy() @ x) / 2
    closed = [] if without is None else [x[without] == 0]
    return cp.Problem(cp.Minimize(fit + lam * cp.norm1(x)), closed).solve(**EXACT)


def objective(q, K, x, lam):
    return float((q - x @ K).square().sum() / 2 + lam * x.abs().sum())


# --- optima ---------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 8), st.integers(1, 6), st.floats(0.05, 2), st.integers(0, 99))
@example(8, 2, 1.0, 64)
def test_converged_codes_are_optimal(M, D, lam, seed):
    """Compare with cvxpy and the optimality conditions, also without a query's own key."""
    Q, K = (x.detach() for x in tensors((M, D), (M, D), seed=seed))
    for own, queries in ((False, Q), (True, K)):
        X = converged_codes(queries, K, lam, exclude_self=own)
        for i, (q, x) in enumerate(zip(K if own else Q, X, strict=True)):
            best = optimum(q, K, lam, i if own else None)
            ours = objective(q, K, x, lam)  # the solver may stop above the optimum, not below it
            assert best - 1e-5 < ours < best + 1e-8 * max(1, best)
            slope = K @ (q - x @ K)
            if own:
                assert x[i] == 0
                slope[i] = 0
            assert float(slope.abs().max()) < lam * (1 + 1e-6)
            used = x != 0
            torch.testing.assert_close(slope[used], lam * x[used].sign(), rtol=1e-6, atol=1e-6)


FEW = [(4, 3), (6, 6), (5, 1), (1, 5), (0, 3), (3, 0)]


@pytest.mark.parametrize("power", [None, 5])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_few_keys_give_the_codes_of_the_formula(leading, power, monkeypatch):
    """Few keys use an inverse with a row for each key, not the form for many keys."""
    monkeypatch.setattr(core, "_Coding", None)
    lam = torch.linspace(0.1, 0.4, 3, dtype=torch.float64).requires_grad_()
    rho = torch.linspace(0.5, 2.0, 3, dtype=torch.float64).requires_grad_()
    each = {"lam": lam, "rho": rho} if leading else {}
    for n, m in FEW:
        inputs = qkv(leading, n=n, m=m, d=6, dv=2)
        for mask in (None, torch.arange(m) % 3 != 1, torch.zeros(m, dtype=torch.bool)):
            own = {"power": power, "attn_mask": mask, **each}
            results = (
                with_gradients(form, inputs, **own)
                for form in (lasso_attention, lasso_attention_reference)
            )
            assert_all_close(*results, 1e-10, f"{n} queries, {m} keys, {mask}")


@pytest.mark.parametrize("std", [1, 30, 1000])
def test_few_keys_are_as_exact_as_many_in_single_precision(std):
    q, k, v = (x.detach() for x in qkv((4,), n=16, m=16, d=16, dv=16))
    k = std * torch.cat([k[:, 3:], k[:, 3:6]], -2)  # three keys occur twice
    exact = lasso_attention_reference(q, k, v)
    found = lasso_attention(q.float(), k.float(), v.float())
    assert float((found - exact).norm() / exact.norm()) < 1e-5


def test_few_keys_have_further_derivatives():
    inputs = [x.detach().requires_grad_() for x in qkv((2,), n=3, m=2, d=3, dv=2)]
    assert torch.autograd.gradgradcheck(lasso_attention, inputs)


def test_ridge_is_a_regression_of_values_on_keys():
    q, k, v = (x.detach() for x in qkv((), n=5, m=9, d=4, dv=3))
    rows = np.vstack([k, math.sqrt(0.3) * np.eye(4)])
    W = np.linalg.lstsq(rows, np.vstack([v, np.zeros((4, 3))]), rcond=None)[0]
    out = ridge_attention(q, k, v, lam=0.3)
    torch.testing.assert_close(out, q @ torch.from_numpy(W))
    causal = ridge_attention(q, k, v, lam=0.3, is_causal=True)
    for i in range(5):
        seen = ridge_attention(q[i : i + 1], k[: i + 1], v[: i + 1], lam=0.3)
        torch.testing.assert_close(causal[i : i + 1], seen)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("own", [{}, {"exclude_self": True}, {"prefix": 4}])
@pytest.mark.parametrize("name", ["ridge", "lasso"])
def test_float32_is_exact_however_long_keys_are(name, own, causal):
    """A query has parts orthogonal to all keys, and no sum relies on their cancellation."""
    how, entry = dict(is_causal=causal, **own), MECHANISMS[name]
    for n in (20, 150):  # fewer keys than features, and more than a chunk
        for length in (1, 10, 100, 1000)[: 3 if name == "lasso" else 4]:
            q, k, v = qkv((2,), n=n, m=n + own.get("prefix", 0), d=32, dtype=torch.float32)
            q = (length * q if name == "lasso" else q).detach().requires_grad_()  # else codes are 0
            given = [q, (length * k).detach().requires_grad_(), v]
            wide = [x.detach().double().requires_grad_() for x in given]
            exact = output_and_gradients(entry.reference, wide, **how)
            errors = relative_errors(output_and_gradients(entry.fast, given, **how), exact)
            assert max(errors) < (1e-5 if length == 1000 else 1e-6), (n, length, errors)


@pytest.mark.parametrize("own", [{}, {"prefix": 4}, {"exclude_self": True}, {"state": True}])
def test_ridge_is_the_same_by_some_heads_at_a_time(own, monkeypatch):
    q, k, v = qkv((2, 3), n=70, m=70 + own.get("prefix", 0), d=8)
    lam = torch.tensor([0.1, 1.0, 3.0])
    if "state" in own:
        own = {"state": ridge_state(k.detach().flip(-2), v.detach())}

    def run(q, k, v):
        return ridge_attention(q, k, v, is_causal=True, lam=lam, **own)

    whole = output_and_gradients(run, [q, k, v])
    monkeypatch.setattr(core, "STATES", 2 * 70 * 8)
    assert_all_close(output_and_gradients(run, [q, k, v]), whole, 1e-12, "two heads at a time")
    with torch.inference_mode():
        assert_all_close([run(*(x.detach() for x in (q, k, v)))], whole[:1], 1e-12, "inference")


def test_memory_of_ridge_is_that_of_some_heads(monkeypatch):
    peaks = []
    for heads in (4, 8):
        monkeypatch.setattr(core, "STATES", 2 * 256 * 16)
        given = qkv((heads,), n=256, m=256, d=16, dv=16, dtype=torch.bfloat16)
        with Held() as held:
            output_and_gradients(functools.partial(ridge_attention, is_causal=True), given)
        peaks.append(held.peak)
    assert peaks[1] < 1.4 * peaks[0]


# --- atoms ----------------------------------------------------------------------------------------


OWN = [
    {"exclude_self": True},
    {"prefix": 4},
    {"prefix": 4, "exclude_self": True},
    {"lam": torch.tensor([0.1, 1.0, 3.0]), "rho": torch.tensor([0.5, 1.0, 30.0])},
    {"power": 1},
    {"power": 5},
    {"iterations": 1, "power": 3},
    {"iterations": 40},
]


@pytest.mark.parametrize("own", OWN, ids=lambda own: "-".join(own))
@pytest.mark.parametrize("is_causal", [False, True])
def test_fast_equals_reference_with_every_option(own, is_causal):
    numbers = {key: x.double() for key, x in own.items() if torch.is_tensor(x)}
    own = own | {key: x.requires_grad_() for key, x in numbers.items()}
    for N in (1, 7, 150):
        inputs = qkv((2, 3), n=N, m=N + own.get("prefix", 0), d=5, dv=4)
        for name in ("lasso", *["ridge"] * ({*own} <= {"exclude_self", "prefix"})):
            forms = MECHANISMS[name].fast, MECHANISMS[name].reference
            results = [with_gradients(f, inputs, is_causal=is_causal, **own) for f in forms]
            assert_all_close(*results, 1e-9, f"{name}, {N}")


def test_some_chunks_are_factored_at_a_time(monkeypatch):
    inputs, found = qkv((2,), n=300, m=300), []
    for chunks in (16, 2):
        monkeypatch.setattr(solver, "FACTORED", chunks)
        found.append(output_and_gradients(lasso_attention, inputs, is_causal=True))
    assert_all_close(*found, 1e-12)


def test_residuals_are_those_of_the_formula():
    q, k, v = qkv((2, 3), n=140, m=20)
    for options in ({}, {"is_causal": True}, {"iterations": 1}):
        found: list = []
        for form in (lasso_attention, lasso_attention_reference):
            form(q, k, v, lam=0.7, residuals=found, **options)
        assert_all_close(found[0], found[1], 1e-10)
        assert not found[0][0].requires_grad


def test_of_equal_keys_a_code_needs_one():
    """The output does not change if every key occurs three times with its value."""
    q, k, v = (x.detach() for x in qkv((), n=6, m=5, d=8, dv=3))
    how = dict(lam=0.5, rho=2.0, iterations=400)
    once, twice = (
        lasso_attention(q, *x, **how) for x in ((k, v), (k.repeat(3, 1), v.repeat(3, 1)))
    )
    torch.testing.assert_close(twice, once)


def test_numbers_that_kernels_meet():
    q, k, v = (x.detach().float() for x in qkv((2,), n=40, m=40, d=6))
    for size in (1e-12, 1e4, 1e6):
        for own in ({}, {"is_causal": True}, {"exclude_self": True}, {"power": 5}):
            out = lasso_attention(size * q, size * k, v, **own)
            assert bool(out.isfinite().all()), f"{size}, {own}"
    zeros = torch.zeros_like(q).requires_grad_()
    for power in (None, 1, 5):
        out = lasso_attention(zeros, k, v, power=power)
        assert not out.any()
        assert not torch.autograd.grad(out.sum(), zeros)[0].isnan().any()


def test_a_key_that_is_not_finite_spoils_its_own_head_alone():
    for form in (lasso_attention, ridge_attention):
        for own in ({}, {"is_causal": True}, {"exclude_self": True}):
            q, k, v = (x.detach().float() for x in qkv((3,), n=6, m=6))
            k[0, 2, 1], k[1, 2, 1] = math.nan, math.inf
            q.requires_grad_()
            out = form(q, k, v, **own)
            grad = torch.autograd.grad(out.sum(), q)[0]
            assert out[:2].isnan().any(-1).any(-1).all() and out[2].isfinite().all(), own
            assert grad[:2].isnan().any(-1).any(-1).all() and grad[2].isfinite().all(), own


def test_a_power_is_normalised_by_its_own_sum():
    z = torch.tensor([[3.0, -1.0, 0.0], [0.0, 0.0, 0.0], [1e-12, -2e-12, 1e-12]])
    a = signed_power(z, 5)
    torch.testing.assert_close(a[0], torch.tensor([243.0, -1.0, 0.0]) / 244)
    assert not a[1].any() and abs(float(a[2].abs().sum()) - 1) < 1e-6
    assert torch.equal(signed_power(z, None), z)
    assert torch.equal(soft_threshold(z[:1], 2.0), torch.tensor([[1.0, 0.0, 0.0]]))


def test_without_the_own_key_training_stores_no_matrix_of_queries_and_keys():
    with Largest() as largest:
        q, k, v = qkv((1, 2), n=1024, m=1024, d=4, dv=4)
        output_and_gradients(lasso_attention, [q, k, v], exclude_self=True)
    assert largest.numel <= 2 * 128 * 1024


# --- the layers -----------------------------------------------------------------------------------

E, H, N = 12, 3, 9
X = torch.randn(2, N, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
BARE = dict(projected=False, dtype=torch.float64)


def test_without_projections_a_layer_has_no_parameters():
    for layer in (MultiheadAttention(E, H, **BARE), LassoAttention(E, H, **BARE)):
        assert not list(layer.parameters()) and "projected=False" in repr(layer)
    heads = X.unflatten(-1, (H, -1)).transpose(1, 2)
    softmax = MultiheadAttention(E, H, **BARE)(X, X, X, need_weights=False)[0]
    wanted = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
    torch.testing.assert_close(softmax, wanted.transpose(1, 2).flatten(2))
    lasso = LassoAttention(E, H, lam=0.3, rho=2.0, iterations=7, power=5, **BARE)
    out, A = lasso(X, X, X, average_attn_weights=False)
    how = dict(lam=0.3, rho=2.0, iterations=7, power=5, exclude_self=True)
    wanted = lasso_attention(heads, heads, heads, **how)
    torch.testing.assert_close(out, wanted.transpose(1, 2).flatten(2))
    assert not A.diagonal(dim1=-2, dim2=-1).any()
    other = X.flip(1) + 1
    k = other.unflatten(-1, (H, -1)).transpose(1, 2)
    cross = lasso_attention(heads, k, k, **how | {"exclude_self": False})
    how = {key: x for key, x in how.items() if key != "exclude_self"}
    declared = LassoAttention(E, H, **how, **BARE, cross=True)
    torch.testing.assert_close(declared(X, other, other)[0], cross.transpose(1, 2).flatten(2))
    with pytest.raises(ValueError, match="expected as many keys as queries, as this is self-att"):
        lasso(X, other[:, 1:], other[:, 1:])
    for own in ({"kdim": 4}, {"head_dim": 2}, {"kv_heads": 1}):
        with pytest.raises(ValueError, match="projected is False; expected kdim, vdim, head_dim"):
            LassoAttention(E, H, **own, **BARE)


def test_other_layers_need_their_projections():
    with pytest.raises(ValueError, match="projected is False; expected True for PrimalAttention"):
        PrimalAttention(E, H, projected=False)


def test_values_can_be_the_dictionary():
    for projected in (True, False):
        torch.manual_seed(0)
        layer = LassoAttention(E, H, dictionary="value", projected=projected, dtype=X.dtype)
        query, key, value = X, X + 1, X.flip(1)
        out = layer(query, key, value)[0]
        assert torch.equal(out, layer(query, 3 * key, value)[0])
        assert torch.equal(layer(X, X + 1, X)[0], layer(X, X, X)[0])  # self-attention both times
        layer.dictionary = "key"
        if not projected:
            assert torch.equal(out, layer(query, value, value)[0])


def test_random_tokens_are_coded_with_and_mixed():
    layer = LassoAttention(E, H, random_tokens=4, lam=0.3, **BARE).eval()
    out, A = layer(X, X, X, average_attn_weights=False)
    assert A.shape == (2, H, N, N) and torch.equal(out, layer(X, X, X)[0])
    both = torch.cat([layer.tokens.expand(2, -1, -1), X], 1)
    q, k = (x.unflatten(-1, (H, -1)).transpose(1, 2) for x in (X, both))
    wanted = lasso_attention(q, k, k, lam=0.3, exclude_self=True, prefix=4)
    torch.testing.assert_close(out, wanted.transpose(1, 2).flatten(2))
    gone = torch.arange(N) >= torch.tensor([N - 3, N])[:, None]
    padded = layer(X, X, X, gone)[0]
    torch.testing.assert_close(padded[:1, : N - 3], layer(*[X[:1, : N - 3]] * 3)[0])
    causal = layer(X, X, X, need_weights=False, is_causal=True)[0]
    torch.testing.assert_close(causal[:, :4], layer(*[X[:, :4]] * 3, is_causal=True)[0])
    assert not torch.equal(*(layer.train()(X, X, X)[0] for _ in range(2)))
    torch.manual_seed(0)
    x = X.clone().requires_grad_()
    plain = torch.autograd.grad(layer(x, x, x)[0].square().sum(), x)
    torch.manual_seed(0)
    again = checkpoint(lambda x: layer(x, x, x)[0], x, use_reentrant=False)
    assert_all_close(torch.autograd.grad(again.square().sum(), x), plain, 1e-10)


@pytest.mark.parametrize(
    "own, error, match",
    [
        ({"lam": 0.0}, ValueError, "lam is 0.0; expected a finite positive"),
        ({"lam": torch.ones(2)}, ValueError, r"lam has shape \(2,\); expected one of"),
        ({"rho": "1"}, TypeError, "rho is of type str"),
        ({"iterations": 0}, ValueError, "iterations is 0; expected a whole number, at least 1"),
        ({"power": 2}, ValueError, "power is 2; expected an odd number, or None"),
        ({"exclude_self": True}, ValueError, r"k has shape \(..., 7, D\); expected 5 keys"),
        ({"prefix": 8}, ValueError, "prefix is 8; expected at most 7"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_bad_options_are_named(own, error, match):
    for form in (lasso_attention, lasso_attention_reference):
        with pytest.raises(error, match=match):
            form(*qkv(), **own)


def test_bad_layers_are_named():
    with pytest.raises(ValueError, match="dictionary is 'both'; expected 'key' or 'value'"):
        RidgeAttention(E, H, dictionary="both")
    with pytest.raises(TypeError, match="residuals is of type tuple; expected a list or None"):
        lasso_attention(*torch.zeros(3, 2, 4), residuals=())
    with pytest.raises(ValueError, match="power is 4; expected an odd number"):
        LassoAttention(E, H, power=4)
    with pytest.raises(ValueError, match="random_tokens is -1; expected a whole number"):
        LassoAttention(E, H, random_tokens=-1)


# --- the paper's variants -------------------------------------------------------------------------


def test_the_method_with_the_large_inverse_is_the_fast_one():
    Q, K = (x.detach() for x in tensors((6, 4), (6, 4)))
    for own in (False, True):
        for n in (1, 5, 30):
            Z = codes(Q, K, lam=0.5, rho=3.0, iterations=n, exclude_self=own)
            torch.testing.assert_close(nth(admm(Q, K, 0.5, 3.0, own), n)[1], Z)


def test_only_all_repairs_of_what_is_printed_reach_the_optimum():
    Q, K = (x.detach() for x in tensors((4, 5), (12, 5)))
    best = codes(Q, K, lam=0.5, rho=3.0, iterations=3000)
    for changed in itertools.product((False, True), repeat=3):
        x, z, _ = nth(printed_admm(Q, K, 0.5, 3.0, changed), 3000)
        assert (float((z - best).abs().max()) < 1e-9) == all(changed), changed
