"""Mixtures of keys: soft, causal, hard and linear attention, EM."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from derived_attention.attention import blocks
from derived_attention.attention import mixture as module
from derived_attention.attention.linear import linear_attention
from derived_attention.attention.mixture import (
    em_priors,
    hard_mixture_attention,
    hard_mixture_attention_reference,
    linear_mixture_attention,
    linear_mixture_attention_reference,
    mixture_attention,
    mixture_attention_reference,
    responsibilities,
)
from derived_attention.attention.softmax import (
    causal_mask,
    softmax_attention,
    softmax_attention_reference,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
B, H, R, N, M, D, DV = 2, 3, 3, 6, 9, 4, 3
SOFT = (mixture_attention, mixture_attention_reference)
HARD = (hard_mixture_attention, hard_mixture_attention_reference)
LINEAR = (linear_mixture_attention, linear_mixture_attention_reference)
GAUSSIAN = {"soft": SOFT, "hard": HARD}
OWN = ["plain", "priors", "variances", "normalised", "dot product", "shared", "one variance"]

cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NOT TESTED: this machine has no CUDA device"
)


def tensors(*shapes, dtype=torch.float64, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    return [x.to(device, dtype).requires_grad_() for x in made]


def qkv(leading=(B, H), n=N, m=M, d=D, dv=DV, r=R, **options):
    return tensors((*leading, n, d), (*leading, r, m, d), (*leading, m, dv), **options)


def positive(*shape, seed=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator).to(dtype) + 0.5).requires_grad_()


def own(name, heads=(H,), r=R):
    """Keywords that mixtures have of their own, by a name of OWN."""
    priors, variances = positive(*heads, r), positive(*heads, r, seed=4)
    return {
        "plain": {},
        "priors": {"priors": priors},
        "variances": {"priors": priors, "variances": variances},
        "normalised": {"priors": priors, "variances": variances, "normalised": True},
        "dot product": {"priors": priors, "variances": variances, "distance": False},
        "shared": {"priors": positive(r), "variances": positive(r, seed=4)},
        "one variance": {"priors": priors, "variances": 0.7},
    }[name]


def keep(*shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4


def additive(mask, bias=0.0):
    return torch.zeros(mask.shape, dtype=torch.float64).add(bias).masked_fill(~mask, -math.inf)


def masks(n=N, m=M, heads=H, batch=B):
    full = keep(batch, heads, n, m)
    full[0, 0, 0] = False
    return {
        "none": {},
        "causal": {"is_causal": True},
        "full": {"attn_mask": full},
        "additive": {"attn_mask": additive(full, torch.linspace(-1, 1, m))},
        "padding": {"attn_mask": keep(batch, 1, 1, m)},
        "rows": {"attn_mask": keep(n, 1)},
        "keys": {"attn_mask": keep(m)},
        "one": {"attn_mask": torch.tensor(False)},
        "scale": {"scale": 0.7},
    }


def output_and_gradients(function, inputs, **options):
    """The output, and the gradients of a fixed linear functional of it, for options too."""
    leaves = [x for x in (*inputs, *options.values())
              if isinstance(x, torch.Tensor) and x.requires_grad]  # fmt: skip
    out = function(*inputs, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    loss = (out * weights.view_as(out)).sum()
    return out, *torch.autograd.grad(loss, leaves, materialize_grads=True)


def assert_all_close(left, right, tol):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and bool(a.isfinite().all())
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.fixture(params=["cpu", "elsewhere"])
def route(request, monkeypatch):
    """The causal form of a CPU, and that of other devices."""
    if request.param == "elsewhere":
        chunked = functools.partial(module._chunked, is_causal=True)
        monkeypatch.setattr(module, "_merged", chunked)
    monkeypatch.setattr(blocks, "CHUNK", 4)  # so that there are several, and one not whole
    monkeypatch.setattr(blocks, "SCORES", 4 * M * 2)  # two heads at a time


# --- the formula -------------------------------------------------------------------------------


@pytest.mark.parametrize("normalised", [False, True])
def test_reference_is_the_formula_number_by_number(normalised):
    """Eqs. 7 and 5 for one head, in plain Python."""
    q, k, v = (x.detach() for x in qkv(()))
    pi, var = positive(R).detach(), positive(R, seed=4).detach()
    options = {"priors": pi, "variances": var, "normalised": normalised}
    soft, hard = (form(q, k, v, **options) for form in (SOFT[1], HARD[1]))

    def term(i, j, r):
        squared = sum(float(q[i, d] - k[r, j, d]) ** 2 for d in range(D))
        constant = (2 * math.pi * float(var[r])) ** (-D / 2) if normalised else 1
        return float(pi[r]) * constant * math.exp(-squared / (2 * float(var[r])))

    for i in range(N):
        for combine, out in ((sum, soft), (max, hard)):
            a = [combine([term(i, j, r) for r in range(R)]) for j in range(M)]
            expected = sum(a[j] / sum(a) * v[j] for j in range(M))
            torch.testing.assert_close(out[i], expected)


def test_dot_product_form_is_eq_6():
    q, k, v = (x.detach() for x in qkv(()))
    pi, var = positive(R).detach(), positive(R, seed=4).detach()
    terms = pi[:, None, None] * (q @ k.mT / var[:, None, None]).exp()
    A = terms.sum(0) / terms.sum(0).sum(-1, keepdim=True)
    out = mixture_attention(q, k, v, priors=pi, variances=var, distance=False)
    torch.testing.assert_close(out, A @ v)


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("forms", GAUSSIAN.values(), ids=GAUSSIAN)
def test_fast_equals_reference(forms, name, kind, route):
    options = {**own(kind), **masks()[name]}
    if {"scale", "variances"} <= options.keys():
        del options["variances"]
    results = [output_and_gradients(f, qkv(), **options) for f in forms]
    assert_all_close(*results, 1e-10)


@pytest.mark.parametrize("forms", GAUSSIAN.values(), ids=GAUSSIAN)
def test_the_mask_gets_its_gradient(forms, route):
    for shape in ((N, M), (M,), (B, 1, N, 1), (H, 1, M)):
        options = {**own("variances"), "attn_mask": tensors(shape, seed=9)[0]}
        results = [output_and_gradients(f, qkv(), **options) for f in forms]
        assert_all_close(*results, 1e-10)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(GAUSSIAN)), st.integers(0, 2), st.integers(0, 3), st.integers(1, 4),
    st.integers(0, 7), st.integers(0, 7), st.integers(1, 5), st.integers(1, 5),
    st.sampled_from(["none", "causal", "keys"]), st.sampled_from(OWN), st.integers(0, 99),
)  # fmt: skip
def test_fast_equals_reference_for_any_shape(form, b, h, r, n, m, d, dv, name, kind, seed):
    options = {**own(kind, (h,), r), "is_causal": name == "causal"}
    options |= {"attn_mask": keep(b, 1, 1, m, seed=seed)} if name == "keys" else {}
    inputs = qkv((b, h), n=n, m=m, d=d, dv=dv, r=r, seed=seed)
    results = [output_and_gradients(f, inputs, **options) for f in GAUSSIAN[form]]
    assert_all_close(*results, 1e-9)


@pytest.mark.parametrize("leading", [(), (H,), (B, H), (2, B, H)], ids=str)
@pytest.mark.parametrize("forms", [SOFT, HARD, LINEAR], ids=["soft", "hard", "linear"])
def test_any_number_of_leading_dimensions(forms, leading, route):
    for options in ({}, {"is_causal": True}, {"attn_mask": keep(M)}):
        priors = positive(*leading[-1:], R)
        results = [output_and_gradients(f, qkv(leading), priors=priors, **options) for f in forms]
        assert_all_close(*results, 1e-11)


@pytest.mark.parametrize("hard", [False, True])
def test_gradcheck(hard, route):
    inputs = [*qkv((1, 2), n=5, m=4, d=2, dv=2, r=2), positive(2, 2), positive(2, 2, seed=4)]
    for options in ({}, {"is_causal": True}, {"attn_mask": torch.tensor([1, 0, 1, 1]).bool()}):

        def function(q, k, v, priors, variances, options=options):
            own = {"priors": priors, "variances": variances, "normalised": True}
            return mixture_attention(q, k, v, hard=hard, **own, **options)

        assert torch.autograd.gradcheck(function, inputs)


# --- what it contains --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": keep(M)}], ids=str)
@pytest.mark.parametrize("form", [*SOFT, *HARD])
def test_one_component_is_distance_attention(form, options):
    q, k, v = (x.detach() for x in qkv(r=1))
    bias = -torch.cdist(q, k[..., 0, :, :]).square() / (2 * 1.3)  # (B, H, N, M)
    keys = torch.zeros_like(q), torch.zeros_like(k[..., 0, :, :])
    allowed = causal_mask(N, M) if "is_causal" in options else options.get("attn_mask")
    bias = bias if allowed is None else bias.masked_fill(~allowed, -math.inf)
    expected = softmax_attention_reference(*keys, v, attn_mask=bias)
    for variances in (1.3, torch.full((H, 1), 1.3, dtype=torch.float64)):
        out = form(q, k, v, variances=variances, **options)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_unit_keys_and_one_component_are_softmax_attention():
    """Eq. 4: with keys of equal length, distances and products order the keys alike."""
    q, k, v = (x.detach() for x in qkv(r=1))
    k = k / k.norm(dim=-1, keepdim=True)
    expected = softmax_attention(q, k[..., 0, :, :], v)
    torch.testing.assert_close(mixture_attention(q, k, v), expected)
    torch.testing.assert_close(
        mixture_attention(q, 3 * k, v, distance=False, scale=1 / 6), expected
    )


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": keep(M)}], ids=str)
@pytest.mark.parametrize("form", [*SOFT, *HARD, *LINEAR])
def test_equal_components_are_one(form, options, route):
    q, k, v = (x.detach() for x in qkv(r=1))
    one = form(q, k, v, **options)
    three = form(q, k.expand(B, H, 3, M, D), v, priors=positive(H, 3).detach(), **options)
    torch.testing.assert_close(three, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", [*SOFT, *HARD, *LINEAR])
def test_a_component_with_prior_0_is_not_there(form, route):
    q, k, v = qkv()
    far = torch.cat([k[..., :2, :, :] + 30, k[..., 2:, :, :]], -3)  # the third is far nearer
    for options in ({}, {"is_causal": True}):
        priors = torch.tensor([1.0, 2.0, 0.0]).double().requires_grad_()
        out, *grads = output_and_gradients(form, (q, far, v), priors=priors, **options)
        two = form(q, far[..., :2, :, :], v, priors=priors[:2].detach(), **options)
        torch.testing.assert_close(out, two, rtol=1e-9, atol=1e-9)
        assert all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("form", [*SOFT, *HARD, *LINEAR])
def test_a_common_factor_of_the_priors_divides_out(form):
    inputs, priors = qkv(), positive(H, R)
    torch.testing.assert_close(form(*inputs, priors=priors), form(*inputs, priors=7 * priors))


@pytest.mark.parametrize("forms", GAUSSIAN.values(), ids=GAUSSIAN)
def test_normalising_is_a_change_of_priors(forms):
    inputs, pi, var = qkv(), positive(H, R), positive(H, R, seed=4)
    absorbed = pi * var ** (-D / 2)
    for form in forms:
        left = form(*inputs, priors=pi, variances=var, normalised=True)
        torch.testing.assert_close(left, form(*inputs, priors=absorbed, variances=var))
        assert not torch.allclose(left, form(*inputs, priors=pi, variances=var), atol=1e-3)


def test_hard_is_soft_in_the_limit_of_small_variances():
    q, k, v = (x.detach() for x in qkv())
    gaps = [
        (mixture_attention(q, k, v, variances=s) - hard_mixture_attention(q, k, v, variances=s))
        .abs().max() for s in (1.0, 0.1, 1e-3)
    ]  # fmt: skip
    assert gaps[0] > 2 * gaps[1] and gaps[1] > 1e-3 and gaps[2] < 1e-6


def test_multi_query_shares_keys_and_values_between_heads():
    q, k, v = (x.detach() for x in qkv())
    k, v = k[:, :1].expand_as(k), v[:, :1].expand_as(v)
    for options in ({}, {"is_causal": True}):
        results = [f(q, k, v, priors=positive(H, R).detach(), **options) for f in SOFT]
        torch.testing.assert_close(*results)


# --- the linear kernel -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "causal", "padding", "keys", "scale", "one"])
@pytest.mark.parametrize("priors", [None, (R,), (H, R)], ids=str)
def test_linear_is_the_formula(name, priors):
    options = masks()[name]
    options |= {} if priors is None else {"priors": positive(*priors)}
    results = [output_and_gradients(f, qkv(), **options) for f in LINEAR]
    assert_all_close(*results, 1e-11)


def test_linear_mixes_features_and_not_keys():
    q, k, v = (x.detach() for x in qkv(()))
    pi = positive(R).detach()
    phi = torch.nn.functional.elu
    kernel = sum(pi[r] * (phi(q) + 1) @ (phi(k[r]) + 1).T for r in range(R))
    expected = kernel / kernel.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(linear_mixture_attention(q, k, v, priors=pi), expected)
    mixed = (pi[:, None, None] * k).sum(0)
    assert not torch.allclose(linear_attention(q, mixed, v), expected, atol=1e-2)


def test_linear_takes_other_feature_maps():
    for causal in (False, True):
        options = {"is_causal": causal, "feature_map": lambda x: x.exp()}
        torch.testing.assert_close(*(f(*qkv(), **options) for f in LINEAR))


# --- causality, masks, emptiness ---------------------------------------------------------------


@pytest.mark.parametrize("form", [*SOFT, *HARD, *LINEAR])
@pytest.mark.parametrize("lengths", [(N, N), (N, M), (M, N)], ids=str)
def test_causal_sees_nothing_of_the_future(form, lengths, route):
    n, m = lengths
    q, k, v = (x.detach() for x in qkv(n=n, m=m))
    priors = positive(H, R).detach()
    out = form(q, k, v, priors=priors, is_causal=True)
    for t in range(min(n, m) - 1):
        k2, v2 = k.clone(), v.clone()
        k2[..., t + 1 :, :] *= -9
        v2[..., t + 1 :, :] *= -9
        other = form(q, k2, v2, priors=priors, is_causal=True)
        assert torch.equal(out[..., : t + 1, :], other[..., : t + 1, :])
        assert not torch.allclose(out[..., t + 1 :, :], other[..., t + 1 :, :], atol=1e-3)


@pytest.mark.parametrize("form", [*SOFT, *HARD])
def test_causal_is_the_causal_mask(form, route):
    for n, m in ((N, M), (M, N), (N, N)):
        inputs = qkv(n=n, m=m)
        out = form(*inputs, is_causal=True)
        torch.testing.assert_close(out, form(*inputs, attn_mask=causal_mask(n, m)))


@pytest.mark.parametrize("form", [*SOFT, *HARD])
def test_no_key_gives_zeros(form):
    rows = keep(B, H, N, M)
    rows[:, :, 2] = False
    for mask in (rows, additive(rows)):
        out, *grads = output_and_gradients(form, qkv(), attn_mask=mask, priors=positive(H, R))
        assert bool((out[:, :, 2] == 0).all()) and bool((out[:, :, 1] != 0).any())
        assert all(bool(g.isfinite().all()) for g in grads)
        assert bool((grads[0][:, :, 2] == 0).all())


EMPTY = {"no batch": ((0, H), N, M), "no head": ((B, 0), N, M)}
EMPTY |= {"no query": ((B, H), 0, M), "no key": ((B, H), N, 0), "nothing": ((0, 0), 0, 0)}


@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("kind", ["none", "causal", "padding"])
@pytest.mark.parametrize("form", [*SOFT, *HARD, *LINEAR])
def test_empty_inputs(form, kind, shape):
    leading, n, m = shape
    options = {"is_causal": kind == "causal"}
    options |= {"attn_mask": torch.ones(1, m).bool()} if kind == "padding" else {}
    results = output_and_gradients(form, qkv(leading, n=n, m=m), priors=positive(R), **options)
    assert results[0].shape == (*leading, n, DV)
    assert all(bool((x == 0).all()) for x in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [*SOFT, *HARD, *LINEAR])
def test_one_token(form, dtype):
    for causal in (False, True):
        q, k, v = qkv(n=1, m=1, dtype=dtype)
        out = form(q, k, v, is_causal=causal)
        assert out.dtype == dtype
        torch.testing.assert_close(out, v, rtol=3 * torch.finfo(dtype).eps, atol=0)


# --- precision, memory, compilers --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["none", "causal", "keys"])
@pytest.mark.parametrize("kind", ["plain", "variances", "one variance"])
@pytest.mark.parametrize("forms", GAUSSIAN.values(), ids=GAUSSIAN)
def test_half_precision_error_is_a_few_roundings(forms, kind, name, dtype):
    n = 40
    options = {"causal": {"is_causal": True}, "keys": {"attn_mask": keep(n)}}.get(name, {})
    inputs = qkv(n=n, m=n, d=32, dv=32, dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    options |= {name: x.detach() if isinstance(x, torch.Tensor) else x
                for name, x in own(kind).items()}  # fmt: skip
    if "variances" in options:
        options["variances"] = 8 * options["variances"]
    ours = output_and_gradients(forms[0], inputs, **options)
    exact = output_and_gradients(forms[1], wide, **options)
    for x, y in zip(ours, exact, strict=True):
        assert x.dtype == dtype
        assert (x.double() - y).norm() < 12 * torch.finfo(dtype).eps * y.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("unequal", [False, True])
def test_long_keys_cost_no_precision(dtype, unequal):
    """‖k‖²/2σ² is large: rounded to half precision on its own, it would be the largest error."""
    q, k, v = (x.detach() for x in qkv(n=48, m=48, d=64, dv=64, dtype=dtype))
    q, k = 4 * q, 4 * k
    variances = torch.tensor([8.0, 16.0, 4.0]) if unequal else None
    exact = mixture_attention_reference(q.double(), k.double(), v.double(), variances=variances)
    out = mixture_attention(q, k, v, variances=variances)
    assert (out.double() - exact).norm() < 0.5 * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": keep(64)}], ids=str)
@pytest.mark.parametrize("forms", [SOFT, HARD, LINEAR], ids=["soft", "hard", "linear"])
def test_large_queries_and_keys_give_no_nan(forms, options, dtype, route):
    """With std 12, exp(−‖q − k‖²/2σ²) is 0 for all keys: code without a maximum has 0/0."""
    inputs = [(s * x).detach().requires_grad_() for s, x in
              zip((12, 12, 1), qkv(n=64, m=64, d=64, dv=64, dtype=dtype), strict=True)]  # fmt: skip
    q, k = (x.detach().float() for x in inputs[:2])
    squared = (q[0, 0, :4, None, :] - k[0, 0, 0, None, :, :]).square().sum(-1)
    assert bool(((-squared / 16).exp() == 0).all(-1).any())
    extra = {} if forms is LINEAR else {"variances": positive(H, R, dtype=dtype)}
    for form in forms:
        results = output_and_gradients(form, inputs, priors=positive(H, R, dtype=dtype),
                                       **extra, **options)  # fmt: skip
        assert all(bool(x.isfinite().all()) for x in results)


@pytest.mark.parametrize("forms", [SOFT, HARD, LINEAR], ids=["soft", "hard", "linear"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": keep(M)}], ids=str)
def test_autocast(forms, options):
    inputs = qkv(dtype=torch.float32)
    exact = forms[1](*(x.double() for x in inputs), **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, *grads = output_and_gradients(forms[0], inputs, **options)
    assert out.dtype == torch.float32 and all(g.dtype == torch.float32 for g in grads)
    assert (out - exact).norm() < 0.02 * exact.norm()


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("kind", ["none", "causal", "padding"])
@pytest.mark.parametrize("forms", [SOFT, HARD, LINEAR], ids=["soft", "hard", "linear"])
@pytest.mark.parametrize("transposed", [False, True])
def test_no_matrix_is_stored(forms, kind, transposed, monkeypatch):
    """Nor when queries and values come, as in the layer, from a transposed projection."""
    monkeypatch.setattr(blocks, "CHUNK", 16)
    n, d, r = 320, 8, 2
    inputs = qkv((1, H), n=n, m=n, d=d, dv=d, r=r)
    if transposed:
        inputs = [x.detach().transpose(-3, -2).contiguous().transpose(-3, -2).requires_grad_()
                  for x in inputs]  # fmt: skip
    options = {"causal": {"is_causal": True}, "padding": {"attn_mask": keep(n)}}.get(kind, {})
    sizes = []
    for form in forms:
        with Largest() as largest:
            output_and_gradients(form, inputs, priors=positive(H, r), **options)
        sizes.append(largest.numel)
    chunk = 65 if forms is LINEAR else 2 * 16  # scores of as many queries, or two of them
    assert sizes[0] <= H * n * chunk < H * n * n <= sizes[1]


@pytest.mark.parametrize("name", ["none", "padding", "causal"])
def test_soft_form_has_a_fused_kernel(name):
    inputs = qkv((1, H), n=32, m=32, d=8, dv=5)
    options = {"causal": {"is_causal": True}, "padding": {"attn_mask": keep(32)}}.get(name, {})
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output_and_gradients(mixture_attention, inputs, **own("variances"), **options)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["soft", "hard", "linear"])
def test_compiles(name, is_causal):
    torch.compiler.reset()
    forms = {**GAUSSIAN, "linear": LINEAR}[name]
    compiled = torch.compile(forms[0], backend="aot_eager")
    options = {"is_causal": is_causal, "priors": positive(H, R)}
    results = [output_and_gradients(f, qkv(), **options) for f in (compiled, forms[1])]
    assert_all_close(*results, 1e-10)


@pytest.mark.parametrize("form", [mixture_attention, hard_mixture_attention])
@pytest.mark.parametrize("causal", [False, True])
def test_arguments_are_left_as_they_were(form, causal):
    inputs = [x.detach() for x in qkv(d=64, dv=64)]
    before = [x.clone() for x in inputs]
    form(*inputs, is_causal=causal)
    assert all(map(torch.equal, inputs, before))


# --- expectation and maximisation --------------------------------------------------------------


def log_likelihood(q, k, priors, mask=None, **options):
    """Σ_i log Σ_jr exp(s_ijr) of each head, through responsibilities of none of our forms."""
    var = options["variances"]
    squared = (q[..., None, :, None, :] - k[..., None, :, :]).square().sum(-1)
    scores = priors.log()[..., None, None] - squared / (2 * var[..., None, None])
    if options.get("normalised"):
        scores = scores - D / 2 * var.log()[..., None, None]
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    total = scores.movedim(-3, -2).flatten(-2).logsumexp(-1)  # (B, H, N)
    return total.masked_fill(total == -math.inf, 0).sum((0, 2))


@pytest.mark.parametrize("kind", OWN)
def test_responsibilities(kind):
    """γ sums to 1, and Σ_j a_ij γ_ijr v_j is what component r gives."""
    q, k, v = (x.detach() for x in qkv())
    options = own(kind)
    gamma = responsibilities(q, k, **options)
    assert gamma.shape == (B, H, R, N, M)
    torch.testing.assert_close(gamma.sum(-3), torch.ones(B, H, N, M).double())
    eye = torch.eye(M).double().expand(B, H, M, M)
    A = mixture_attention(q, k, eye, **options)
    pi = options.get("priors", torch.ones(R).double())
    variance = options.get("variances", math.sqrt(D))
    variance = torch.as_tensor(variance).expand(H, R)
    products = q.unsqueeze(-3) @ k.mT
    if options.get("distance", True):
        products = -torch.cdist(q.unsqueeze(-3), k).square() / 2
    terms = pi[..., None, None] * (products / variance[..., None, None]).exp()
    if options.get("normalised"):
        terms = terms * variance[..., None, None] ** (-D / 2)
    joint = terms / terms.sum((-3, -1), keepdim=True)
    torch.testing.assert_close(A.unsqueeze(-3) * gamma, joint)
    chunk = responsibilities(q[..., 2:4, :], k, **options)
    torch.testing.assert_close(chunk, gamma[..., 2:4, :])


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("name", ["none", "causal", "full"])
def test_em_never_lowers_the_likelihood_and_stops_at_its_maximum(name, normalised):
    q, k, _ = (x.detach() for x in qkv(n=30, m=12))
    options = masks(30, 12)[name]
    mask = causal_mask(30, 12) if name == "causal" else options.get("attn_mask")
    mask = mask if mask is None or mask.dim() == 2 else mask.unsqueeze(-3)
    var = positive(H, R, seed=4).detach()
    fixed = {"variances": var, "normalised": normalised}
    priors = torch.full((H, R), 1 / R).double()
    last = log_likelihood(q, k, priors, mask, **fixed)
    first = last
    for _ in range(300):
        priors = em_priors(q, k, priors=priors, **fixed, **options)
        now = log_likelihood(q, k, priors, mask, **fixed)
        assert bool((now >= last - 1e-9).all())
        last = now
    assert bool((last > first + 1e-3).all())
    torch.testing.assert_close(priors.sum(-1), torch.ones(H).double())
    logits = priors.log().clone().requires_grad_()
    gradient = torch.autograd.grad(
        log_likelihood(q, k, logits.softmax(-1), mask, **fixed).sum(), logits
    )[0]
    assert gradient.abs().max() < 0.05  # of the 60 queries


def test_the_printed_update_can_lower_the_likelihood():
    """One query at a key of component 1, and many keys that would rather be of component 2."""
    q = torch.zeros(1, 1, D).double()
    near, far = torch.zeros(1, 1, D).double(), torch.full((1, 20, D), 9.0).double()
    k = torch.stack([torch.cat([near, far], 1), torch.cat([near + 3, far - 1], 1)], 1)  # (1,2,21,D)
    fixed = {"variances": torch.ones(1, 2).double()}
    priors = torch.full((1, 2), 0.5).double()
    before = log_likelihood(q[None], k[None], priors, **fixed)
    good, printed = (em_priors(q, k, priors=priors, weighted=w, **fixed) for w in (True, False))
    assert log_likelihood(q[None], k[None], good, **fixed) > before + 0.5
    assert log_likelihood(q[None], k[None], printed, **fixed) < before - 0.5


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("weighted", [True, False])
def test_em_priors_are_their_formula(name, weighted, monkeypatch):
    monkeypatch.setattr(blocks, "CHUNK", 4)
    q, k, _ = (x.detach() for x in qkv())
    options = masks()[name]
    priors = positive(H, R).detach()
    gamma = responsibilities(q, k, priors=priors, scale=options.get("scale"))
    eye = torch.eye(M).double().expand(B, H, M, M)
    A = mixture_attention_reference(q, k, eye, priors=priors, **options)
    if not weighted:
        A = (A != 0) / (A != 0).sum(-1, keepdim=True).clamp(min=1)
    here = keep(B, H, N, seed=8)
    for chosen in (None, here):
        weights = A if chosen is None else A * chosen[..., None]
        counts = (weights.unsqueeze(-3) * gamma).sum((0, 3, 4))
        expected = counts / weights.sum((0, 2, 3))[:, None] if name != "one" else counts + 1 / R
        out = em_priors(q, k, priors=priors, weighted=weighted, query_mask=chosen, **options)
        torch.testing.assert_close(out, expected)
        assert not out.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_em_is_safe_and_stores_no_matrix(dtype):
    q, k, _ = (12 * x.detach() for x in qkv((1, H), n=320, m=320, d=8, r=2, dtype=dtype))
    for options in ({}, {"is_causal": True}):
        with Largest() as largest:
            out = em_priors(q, k, **options)
        assert largest.numel <= 2 * H * 320 * blocks.CHUNK < H * 320 * 320
        assert out.dtype == torch.float32 and bool(out.isfinite().all())
    assert em_priors(q[0, 0], k[0, 0]).shape == (2,)
    assert em_priors(q[..., :0, :], k).tolist() == [[0.5, 0.5]] * H


# --- errors ------------------------------------------------------------------------------------

BAD = {
    "k without components": (ValueError, r"k has shape .*R ≥ 1 keys for each of M tokens",
                             {"k": torch.zeros(B, H, M, D).double()}),
    "k, no component": (ValueError, "k has shape", {"k": torch.zeros(B, H, 0, M, D).double()}),
    "k, other width": (ValueError, "k has shape", {"k": torch.zeros(B, H, R, M, 5).double()}),
    "k, a list": (TypeError, "k is of type list", {"k": [1.0]}),
    "q": (ValueError, "q has shape", {"q": torch.zeros(3).double()}),
    "v": (ValueError, "v has shape", {"v": torch.zeros(B, H, R, M, D).double()}),
    "dtype": (TypeError, "v has dtype", {"v": torch.zeros(B, H, M, DV)}),
    "mask": (ValueError, "attn_mask has shape", {"attn_mask": torch.ones(R, N, M).bool()[:2]}),
    "both masks": (ValueError, "attn_mask and is_causal",
                   {"attn_mask": torch.ones(M).bool(), "is_causal": True}),
    "scale": (ValueError, "scale is -1", {"scale": -1.0}),
    "priors": (ValueError, r"priors has shape \(2,\)", {"priors": torch.ones(2)}),
    "priors, a list": (TypeError, "priors is of list", {"priors": [1, 2, 3]}),
    "priors, whole": (TypeError, "priors is of dtype torch.int64", {"priors": torch.arange(3)}),
}  # fmt: skip
BAD_GAUSSIAN = {
    "variances": (ValueError, "variances has shape", {"variances": torch.ones(R, H + 1)}),
    "variances, zero": (ValueError, "variances is 0", {"variances": 0.0}),
    "variances, a list": (TypeError, "variances is of type list", {"variances": [1.0]}),
    "scale and variances": (ValueError, "scale and variances", {"scale": 1.0, "variances": 2.0}),
    "normalised": (TypeError, "normalised is 1", {"normalised": 1}),
    "distance": (TypeError, "distance is None", {"distance": None}),
    "nothing to normalise": (ValueError, "normalised is True and distance False",
                             {"normalised": True, "distance": False}),
    "unknown": (TypeError, "prior", {"prior": 1}),
}  # fmt: skip


@pytest.mark.parametrize("bad", [*BAD.values(), *BAD_GAUSSIAN.values()], ids=[*BAD, *BAD_GAUSSIAN])
@pytest.mark.parametrize("form", [*SOFT, *HARD])
def test_bad_argument_is_named(form, bad):
    error, match, changed = bad
    with pytest.raises(error, match=match):
        form(**{**dict(zip("qkv", qkv(), strict=True)), **changed})


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("form", LINEAR)
def test_bad_argument_of_the_linear_form_is_named(form, bad):
    error, match, changed = bad
    with pytest.raises(error, match=match):
        form(**{**dict(zip("qkv", qkv(), strict=True)), **changed})


def test_other_bad_arguments_are_named():
    q, k, v = qkv()
    with pytest.raises(TypeError, match="hard is 1"):
        mixture_attention(q, k, v, hard=1)
    with pytest.raises(TypeError, match="feature_map is 3"):
        linear_mixture_attention(q, k, v, feature_map=3)
    with pytest.raises(ValueError, match="attn_mask has shape"):
        linear_mixture_attention(q, k, v, attn_mask=torch.ones(N, M).bool())
    with pytest.raises(ValueError, match="query_mask has shape"):
        em_priors(q, k, query_mask=torch.ones(N).bool())
    with pytest.raises(TypeError, match="query_mask"):
        em_priors(q, k, query_mask=[True])
    with pytest.raises(ValueError, match="k has shape"):
        responsibilities(q, k[..., 0, :, :])


# --- on a GPU ----------------------------------------------------------------------------------


@cuda
@pytest.mark.parametrize("name", ["none", "padding", "causal"])
@pytest.mark.parametrize("kind", ["plain", "variances"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("forms", GAUSSIAN.values(), ids=GAUSSIAN)
def test_cuda_equals_float64_on_cpu(forms, dtype, kind, name):
    inputs = qkv(dtype=dtype, n=40, m=40, d=32, dv=32)
    options = {**own(kind), **masks(40, 40)[name]}
    exact = output_and_gradients(forms[1], [x.detach().double().requires_grad_() for x in inputs],
                                 **options)  # fmt: skip
    on_gpu = {n: x.detach().cuda().requires_grad_(x.requires_grad)
              if isinstance(x, torch.Tensor) else x for n, x in options.items()}  # fmt: skip
    found = output_and_gradients(forms[0], [x.detach().cuda().requires_grad_() for x in inputs],
                                 **on_gpu)  # fmt: skip
    for x, y in zip(found, exact, strict=True):
        assert (x.cpu().double() - y).norm() < 50 * torch.finfo(dtype).eps * y.norm()
