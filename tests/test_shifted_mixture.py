"""Mixtures of shifted keys: one product Q Kᵀ, in each of its forms, is the formula."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from derived_attention.attention import blocks
from derived_attention.attention import shifted_mixture as module
from derived_attention.attention.linear import linear_attention
from derived_attention.attention.mixture import (
    linear_mixture_attention,
    linear_mixture_attention_reference,
    mixture_attention,
)
from derived_attention.attention.shifted_mixture import (
    shifted_keys,
    shifted_mixture_attention,
    shifted_mixture_attention_reference,
)
from derived_attention.attention.softmax import causal_mask, softmax_attention

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
B, H, R, N, M, D, DV = 2, 3, 3, 6, 9, 4, 3
FORMS = (shifted_mixture_attention, shifted_mixture_attention_reference)
OWN = ["plain", "priors", "variances", "normalised", "dot product", "one variance", "shared"]

cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NOT TESTED: this machine has no CUDA device"
)


def tensors(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    return [x.to(dtype).requires_grad_() for x in made]


def positive(*shape, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator).double() + 0.5).requires_grad_()


def qkvb(leading=(B, H), n=N, m=M, d=D, dv=DV, r=R, shared=False, **options):
    """Queries, keys, values and shifts."""
    heads = () if shared else leading[-1:]
    return tensors((*leading, n, d), (*leading, m, d), (*leading, m, dv), (*heads, r, d), **options)


def own(name, heads=(H,), r=R):
    """Keywords that mixtures have of their own, by a name of OWN."""
    priors, variances = positive(*heads, r), positive(*heads, r, seed=4)
    return {
        "plain": {},
        "priors": {"priors": priors},
        "variances": {"priors": priors, "variances": variances},
        "normalised": {"priors": priors, "variances": 0.7, "normalised": True},
        "dot product": {"priors": priors, "variances": 0.7, "distance": False},
        "one variance": {"priors": priors, "variances": 0.7},
        "shared": {"priors": positive(r), "variances": 1.3},
    }[name]


def keep(*shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4


def masks(n=N, m=M, heads=H, batch=B):
    full = keep(batch, heads, n, m)
    full[0, 0, 0] = False
    additive = torch.linspace(-1, 1, m).double().expand(full.shape).masked_fill(~full, -math.inf)
    return {
        "none": {},
        "causal": {"is_causal": True},
        "full": {"attn_mask": full},
        "additive": {"attn_mask": additive},
        "padding": {"attn_mask": keep(batch, 1, 1, m)},
        "heads": {"attn_mask": keep(heads, n, 1)},
        "rows": {"attn_mask": keep(n, 1)},
        "keys": {"attn_mask": keep(m)},
        "one": {"attn_mask": torch.tensor(False)},
        "scale": {"scale": 0.7},
    }


def output_and_gradients(function, inputs, **options):
    """The output, and the gradients of a fixed linear functional of it, for options too."""
    leaves = [x for x in (*inputs, *options.values())
              if isinstance(x, torch.Tensor) and x.requires_grad]  # fmt: skip
    *qkv, shifts = inputs
    out = function(*qkv, shifts=shifts, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    loss = (out * weights.view_as(out)).sum()
    return out, *torch.autograd.grad(loss, leaves, materialize_grads=True)


def assert_all_close(left, right, tol):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and bool(a.isfinite().all())
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.fixture(params=["products", "logarithms"])
def route(request, monkeypatch):
    """Each way to combine the components, cut into several blocks, and one not whole."""
    monkeypatch.setattr(blocks, "CHUNK", 4)
    monkeypatch.setattr(blocks, "SCORES", 4 * M * 2)  # two heads at a time
    if request.param == "logarithms":
        monkeypatch.setattr(module, "_may_multiply", lambda u, w: False)
    return request.param


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


# --- the formula -------------------------------------------------------------------------------


def test_shifted_keys():
    k, shared, each = tensors((B, H, M, D), (R, D), (H, R, D))
    for b in (shared, each):
        out = shifted_keys(k, b)
        assert out.shape == (B, H, R, M, D)
        b = b.expand(H, R, D)
        torch.testing.assert_close(out[1, 2, 1, 5], k[1, 2, 5] + b[2, 1])
    assert shifted_keys(k[0, 0], shared).shape == (R, M, D)


def test_the_formula_number_by_number(route):
    """Eq. 7 with k_jr = k_j + b_r for one head, in plain Python."""
    q, k, v, b = (x.detach() for x in qkvb((), shared=True))
    pi = positive(R).detach()

    def term(i, j, r):
        squared = sum(float(q[i, d] - k[j, d] - b[r, d]) ** 2 for d in range(D))
        return float(pi[r]) * math.exp(-squared / (2 * 1.3))

    for combine, hard in ((sum, False), (max, True)):
        out = shifted_mixture_attention(q, k, v, shifts=b, priors=pi, variances=1.3, hard=hard)
        for i in range(N):
            a = [combine([term(i, j, r) for r in range(R)]) for j in range(M)]
            torch.testing.assert_close(out[i], sum(a[j] / sum(a) * v[j] for j in range(M)))


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("name", masks())
def test_fast_equals_reference(name, kind, hard, route):
    options = {**own(kind), **masks()[name], "hard": hard}
    if {"scale", "variances"} <= options.keys():
        del options["variances"]
    results = [output_and_gradients(f, qkvb(), **options) for f in FORMS]
    assert_all_close(*results, 1e-10)


@pytest.mark.parametrize("hard", [False, True])
def test_the_mask_gets_its_gradient(hard, route):
    for shape in ((N, M), (M,), (B, 1, N, 1), (H, 1, M), ()):
        options = {**own("one variance"), "attn_mask": tensors(shape, seed=9)[0], "hard": hard}
        results = [output_and_gradients(f, qkvb(), **options) for f in FORMS]
        assert_all_close(*results, 1e-10)


@settings(max_examples=100, deadline=None)
@given(
    st.booleans(), st.integers(0, 2), st.integers(0, 3), st.integers(1, 4), st.integers(0, 7),
    st.integers(0, 7), st.integers(1, 5), st.integers(1, 5),
    st.sampled_from(["none", "causal", "keys"]), st.sampled_from(OWN), st.integers(0, 99),
)  # fmt: skip
def test_fast_equals_reference_for_any_shape(hard, b, h, r, n, m, d, dv, name, kind, seed):
    options = {**own(kind, (h,), r), "is_causal": name == "causal", "hard": hard}
    options |= {"attn_mask": keep(b, 1, 1, m, seed=seed)} if name == "keys" else {}
    inputs = qkvb((b, h), n=n, m=m, d=d, dv=dv, r=r, seed=seed)
    results = [output_and_gradients(f, inputs, **options) for f in FORMS]
    assert_all_close(*results, 1e-9)


@pytest.mark.parametrize("leading", [(), (H,), (B, H), (2, B, H)], ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("hard", [False, True])
def test_any_number_of_leading_dimensions(hard, shared, leading, route):
    for options in ({}, {"is_causal": True}, {"attn_mask": keep(M)}):
        priors = positive(*(() if shared else leading[-1:]), R)
        inputs = qkvb(leading, shared=shared)
        results = [output_and_gradients(f, inputs, priors=priors, hard=hard, **options)
                   for f in FORMS]  # fmt: skip
        assert_all_close(*results, 1e-11)


@pytest.mark.parametrize("hard", [False, True])
def test_gradcheck(hard, route):
    inputs = [*qkvb((1, 2), n=5, m=4, d=2, dv=2, r=2), positive(2, 2)]
    for options in ({}, {"is_causal": True}, {"attn_mask": torch.tensor([1, 0, 1, 1]).bool()}):

        def function(q, k, v, shifts, priors, options=options):
            return shifted_mixture_attention(
                q, k, v, shifts=shifts, priors=priors, hard=hard, **options
            )

        assert torch.autograd.gradcheck(function, inputs)


# --- what it contains --------------------------------------------------------------------------


@pytest.mark.parametrize("hard", [False, True])
def test_it_is_the_mixture_of_the_keys_that_shifts_make(hard, route):
    q, k, v, b = qkvb()
    for name in ("none", "causal", "padding"):
        options = {**masks()[name], "priors": positive(H, R), "hard": hard}
        out = shifted_mixture_attention(q, k, v, shifts=b, **options)
        torch.testing.assert_close(out, mixture_attention(q, shifted_keys(k, b), v, **options))


@pytest.mark.parametrize("hard", [False, True])
def test_equal_shifts_are_one_component(hard, route):
    q, k, v, b = (x.detach() for x in qkvb(r=1))
    priors = positive(H, 3).detach()
    for options in ({}, {"is_causal": True}):
        one, three = (
            shifted_mixture_attention(q, k, v, shifts=shifts, hard=hard, **more, **options)
            for shifts, more in ((b, {}), (b.expand(H, 3, D), {"priors": priors}))
        )
        torch.testing.assert_close(three, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hard", [False, True])
def test_products_of_keys_leave_softmax_attention(hard):
    """Without distances, u_ir + w_jr does not depend on j, and cancels."""
    q, k, v, b = (x.detach() for x in qkvb())
    for options in ({}, {"is_causal": True}, {"attn_mask": keep(M)}):
        expected = softmax_attention(q, k, v, scale=0.7, **options)
        for form in FORMS:
            out = form(q, k, v, shifts=b, scale=0.7, distance=False, hard=hard, **options)
            torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("hard", [False, True])
def test_a_component_with_prior_0_is_not_there(hard, route):
    q, k, v, b = qkvb()
    far = torch.cat([b[:, :2] + 9, b[:, 2:]], 1)  # the third is far nearer
    for options in ({}, {"is_causal": True}):
        priors = torch.tensor([1.0, 2.0, 0.0]).double().requires_grad_()
        out, *grads = output_and_gradients(
            FORMS[0], (q, k, v, far), priors=priors, hard=hard, **options
        )
        two = FORMS[1](q, k, v, shifts=far[:, :2], priors=priors[:2].detach(), hard=hard, **options)
        torch.testing.assert_close(out, two, rtol=1e-9, atol=1e-9)
        assert all(bool(g.isfinite().all()) for g in grads)
        assert bool((grads[3][:, 2] == 0).all()) and bool((grads[3][:, 0] != 0).any())


def test_multi_query_shares_keys_and_values_between_heads(route):
    q, k, v, b = (x.detach() for x in qkvb())
    k, v = k[:, :1].expand_as(k), v[:, :1].expand_as(v)
    torch.testing.assert_close(*(f(q, k, v, shifts=b) for f in FORMS))


def test_linear_mixture_of_shifted_keys():
    q, k, v, b = qkvb()
    keys = shifted_keys(k, b)
    for causal in (False, True):
        options = {"is_causal": causal, "feature_map": lambda x: x.exp()}
        out = linear_mixture_attention(q, keys, v, **options)
        torch.testing.assert_close(out, linear_mixture_attention_reference(q, keys, v, **options))
        one = linear_attention(q, keys.exp().sum(-3).log(), v, **options)
        torch.testing.assert_close(out, one)


# --- which form runs ---------------------------------------------------------------------------


def gaps(*sizes):
    """One-dimensional q and k for which u and w have these gaps between two components."""
    u_gap, w_gap = sizes
    q, k = torch.zeros(4, 2), torch.zeros(5, 2)
    q[2, 0], k[3, 0] = u_gap, w_gap
    return q, k, torch.randn(5, 2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("sizes", "multiplied"),
    [((3, 3), True), ((300, 3), True), ((3, -300), True), ((60, 60), False), ((300, -300), False)],
)
def test_components_are_multiplied_only_where_that_is_exact(sizes, multiplied, monkeypatch):
    q, k, v = gaps(*sizes)
    b = torch.tensor([[0.5, 0.0], [-0.5, 0.0]])  # of equal length: u and w differ by q and k alone
    found = []
    may = module._may_multiply
    monkeypatch.setattr(module, "_may_multiply", lambda u, w: found.append(may(u, w)) or found[-1])
    out = shifted_mixture_attention(q, k, v, shifts=b, scale=1.0)
    assert found == [multiplied]
    wide = (x.double() for x in (q, k, v))
    exact = shifted_mixture_attention_reference(*wide, shifts=b.double(), scale=1.0)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)


def test_what_is_multiplied_would_underflow():
    """The case that the guard is for: exp(u − n) exp(w − m) is 0 in float32 for all components."""
    q, k, v = gaps(300, 300)
    q, k = q[2:3], k[3:4]  # one query, one key, which prefer opposite components
    b = torch.tensor([[0.5, 0.0], [-0.5, 0.0]])
    u, w = q @ b.T, -(k + b[:, None]).square().sum(-1) / 2  # (1, R), (R, 1)
    x, y = (u - u.amax(-1, keepdim=True)).exp(), (w - w.amax(0)).exp()
    assert float(x @ y) == 0
    out = shifted_mixture_attention(q, k, v[3:4], shifts=b, scale=1.0)
    torch.testing.assert_close(out, v[3:4])


@pytest.mark.parametrize("name", ["none", "causal", "keys"])
@pytest.mark.parametrize("kind", ["one", "dot product"])
def test_one_component_and_products_of_keys_take_one_fused_call(kind, name):
    """No block is computed."""
    options = {**masks()[name], "priors": positive(H, 1 if kind == "one" else R)}
    options |= {"distance": False} if kind == "dot product" else {}
    for hard in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "_blocks", None)
            out, *_ = output_and_gradients(
                FORMS[0], qkvb(r=options["priors"].shape[-1]), hard=hard, **options
            )
        assert out.shape == (B, H, N, DV)


# --- causality, masks, emptiness ---------------------------------------------------------------


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("lengths", [(N, N), (N, M), (M, N)], ids=str)
def test_causal_sees_nothing_of_the_future(hard, lengths, route):
    n, m = lengths
    q, k, v, b = (x.detach() for x in qkvb(n=n, m=m))
    options = {"shifts": b, "is_causal": True, "hard": hard}
    out = shifted_mixture_attention(q, k, v, **options)
    for t in range(min(n, m) - 1):
        k2, v2 = k.clone(), v.clone()
        k2[..., t + 1 :, :] *= -9
        v2[..., t + 1 :, :] *= -9
        other = shifted_mixture_attention(q, k2, v2, **options)
        torch.testing.assert_close(out[..., : t + 1, :], other[..., : t + 1, :], rtol=0, atol=1e-14)
        assert not torch.allclose(out[..., t + 1 :, :], other[..., t + 1 :, :], atol=1e-3)


@pytest.mark.parametrize("hard", [False, True])
def test_causal_is_the_causal_mask(hard, route):
    for n, m in ((N, M), (M, N), (N, N)):
        *inputs, b = qkvb(n=n, m=m)
        left, right = (
            shifted_mixture_attention(*inputs, shifts=b, hard=hard, **options)
            for options in ({"is_causal": True}, {"attn_mask": causal_mask(n, m)})
        )
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("hard", [False, True])
def test_no_key_gives_zeros(hard, route):
    rows = keep(B, H, N, M)
    rows[:, :, 2] = False
    for mask in (rows, torch.zeros(rows.shape).double().masked_fill(~rows, -math.inf)):
        out, *grads = output_and_gradients(FORMS[0], qkvb(), attn_mask=mask, hard=hard)
        assert bool((out[:, :, 2] == 0).all()) and bool((out[:, :, 1] != 0).any())
        assert all(bool(g.isfinite().all()) for g in grads)
        assert bool((grads[0][:, :, 2] == 0).all())


EMPTY = {"no batch": ((0, H), N, M), "no head": ((B, 0), N, M)}
EMPTY |= {"no query": ((B, H), 0, M), "no key": ((B, H), N, 0), "nothing": ((0, 0), 0, 0)}


@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("kind", ["none", "causal", "padding"])
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("distance", [False, True])
def test_empty_inputs(distance, hard, kind, shape):
    leading, n, m = shape
    options = {"is_causal": kind == "causal", "hard": hard, "distance": distance}
    options |= {"attn_mask": torch.ones(1, m).bool()} if kind == "padding" else {}
    for form in FORMS:
        results = output_and_gradients(form, qkvb(leading, n=n, m=m), priors=positive(R), **options)
        assert results[0].shape == (*leading, n, DV)
        assert all(bool((x == 0).all()) for x in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hard", [False, True])
def test_one_token(hard, dtype):
    for causal in (False, True):
        q, k, v, b = qkvb(n=1, m=1, dtype=dtype)
        out = shifted_mixture_attention(q, k, v, shifts=b, is_causal=causal, hard=hard)
        assert out.dtype == dtype
        torch.testing.assert_close(out, v, rtol=3 * torch.finfo(dtype).eps, atol=0)


# --- precision, memory, compilers --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["none", "causal", "keys"])
@pytest.mark.parametrize("hard", [False, True])
def test_half_precision_error_is_a_few_roundings(hard, name, dtype, route):
    n = 40
    options = {"causal": {"is_causal": True}, "keys": {"attn_mask": keep(n)}}.get(name, {})
    inputs = qkvb(n=n, m=n, d=32, dv=32, dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    ours = output_and_gradients(FORMS[0], inputs, hard=hard, **options)
    exact = output_and_gradients(FORMS[1], wide, hard=hard, **options)
    for x, y in zip(ours, exact, strict=True):
        assert x.dtype == dtype
        assert (x.double() - y).norm() < 3 * torch.finfo(dtype).eps * y.norm()


@pytest.mark.parametrize("dtype", DTYPES[:1] + DTYPES[2:], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": keep(64)}], ids=str)
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("size", [1, 12])
def test_large_queries_and_keys_are_as_exact(size, hard, options, dtype):
    """With std 12, exp(−‖q − k‖²/2σ²) is 0 for all keys; with shifts as large, the sum is too."""
    sizes = (12, 12, 1, size)
    inputs = [(s * x).detach().requires_grad_() for s, x in
              zip(sizes, qkvb(n=64, m=64, d=64, dv=64, dtype=dtype), strict=True)]  # fmt: skip
    wide = [x.detach().double().requires_grad_() for x in inputs]
    ours = output_and_gradients(FORMS[0], inputs, hard=hard, **options)
    exact = output_and_gradients(FORMS[1], wide, hard=hard, **options)
    eps = max(torch.finfo(dtype).eps, 1e-4)  # of scores around 1000 in float32
    for x, y in zip(ours, exact, strict=True):
        assert bool(x.isfinite().all())
        assert (x.double() - y).norm() < 3 * eps * y.norm()


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": keep(M)}], ids=str)
@pytest.mark.parametrize("distance", [False, True])
def test_autocast(distance, options, hard):
    inputs = qkvb(dtype=torch.float32)
    more = {"hard": hard, "distance": distance, **options}
    q, k, v, b = (x.double() for x in inputs)
    exact = FORMS[1](q, k, v, shifts=b, **more)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, *grads = output_and_gradients(FORMS[0], inputs, **more)
    assert out.dtype == torch.float32 and all(g.dtype == torch.float32 for g in grads)
    assert (out - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("kind", ["none", "causal", "padding"])
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_no_matrix_and_no_shifted_key_is_stored(transposed, hard, kind, route, monkeypatch):
    monkeypatch.setattr(blocks, "CHUNK", 16)
    n, d, r = 320, 8, 5
    inputs = qkvb((1, H), n=n, m=n, d=d, dv=d, r=r)
    if transposed:  # as in the layer
        inputs[:3] = [x.detach().transpose(-3, -2).contiguous().transpose(-3, -2).requires_grad_()
                      for x in inputs[:3]]  # fmt: skip
    options = {"causal": {"is_causal": True}, "padding": {"attn_mask": keep(n)}}.get(kind, {})
    sizes = []
    for form in FORMS:
        with Largest() as largest:
            output_and_gradients(form, inputs, priors=positive(H, r), hard=hard, **options)
        sizes.append(largest.numel)
    assert sizes[0] <= H * n * 16 < H * n * r * d < H * n * n <= sizes[1]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("hard", [False, True])
def test_compiles(hard, is_causal):
    torch.compiler.reset()
    compiled = torch.compile(FORMS[0], backend="aot_eager")
    options = {"is_causal": is_causal, "priors": positive(H, R), "hard": hard}
    results = [output_and_gradients(f, qkvb(), **options) for f in (compiled, FORMS[1])]
    assert_all_close(*results, 1e-10)


@pytest.mark.parametrize("hard", [False, True])
def test_arguments_are_left_as_they_were(hard, route):
    q, k, v, b = (x.detach() for x in qkvb(d=64, dv=64))
    mask = keep(M)
    before = [x.clone() for x in (q, k, v, b, mask)]
    shifted_mixture_attention(q, k, v, shifts=b, attn_mask=mask, hard=hard)
    assert all(map(torch.equal, (q, k, v, b, mask), before))


# --- wrong arguments ---------------------------------------------------------------------------

BAD = {
    "no tensor": (TypeError, "q is of type int", {"q": 3}),
    "dtype": (TypeError, "v has dtype torch.float32", {"v": torch.zeros(B, H, M, DV)}),
    "components": (ValueError, "k has shape", {"k": torch.zeros(B, H, R, M, D).double()}),
    "one dimension": (ValueError, "k has shape", {"k": torch.zeros(D).double()}),
    "values": (ValueError, "v has shape", {"v": torch.zeros(B, H, M + 1, DV).double()}),
    "shifts": (ValueError, "shifts has shape", {"shifts": torch.ones(R, D + 1).double()}),
    "shifts, heads": (ValueError, "shifts has shape", {"shifts": torch.ones(H + 1, R, D).double()}),
    "shifts, none": (ValueError, "shifts has shape", {"shifts": torch.ones(0, D).double()}),
    "shifts, a list": (TypeError, "shifts is of type list", {"shifts": [1.0]}),
    "shifts, dtype": (TypeError, "shifts has dtype torch.float32", {"shifts": torch.ones(R, D)}),
    "mask": (ValueError, "attn_mask has shape", {"attn_mask": torch.ones(N + 1, M).bool()}),
    "mask, NaN": (ValueError, "attn_mask contains NaN",
                  {"attn_mask": torch.full((M,), math.nan).double()}),
    "mask and causal": (ValueError, "attn_mask and is_causal",
                        {"attn_mask": keep(M), "is_causal": True}),
    "scale": (ValueError, "scale is -1", {"scale": -1}),
    "priors": (ValueError, "priors has shape", {"priors": torch.ones(R + 1)}),
    "variances": (ValueError, "variances is 0", {"variances": 0.0}),
    "scale and variances": (ValueError, "scale and variances", {"scale": 1.0, "variances": 2.0}),
    "hard": (TypeError, "hard is 1", {"hard": 1}),
    "nothing to normalise": (ValueError, "normalised is True and distance False",
                             {"normalised": True, "distance": False}),
    "unknown": (TypeError, "prior", {"prior": 1}),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("form", FORMS)
def test_bad_argument_is_named(form, bad):
    error, match, changed = bad
    arguments = dict(zip(("q", "k", "v", "shifts"), qkvb(), strict=True))
    with pytest.raises(error, match=match):
        form(**{**arguments, **changed})


# --- on a GPU ----------------------------------------------------------------------------------


@cuda
@pytest.mark.parametrize("name", ["none", "padding", "causal"])
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_equals_float64_on_cpu(dtype, hard, name, route):
    inputs = qkvb(dtype=dtype, n=40, m=40, d=32, dv=32)
    options = {**masks(40, 40)[name], "hard": hard}
    exact = output_and_gradients(FORMS[1], [x.detach().double().requires_grad_() for x in inputs],
                                 **options)  # fmt: skip
    on_gpu = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    found = output_and_gradients(FORMS[0], [x.detach().cuda().requires_grad_() for x in inputs],
                                 **on_gpu)  # fmt: skip
    for x, y in zip(found, exact, strict=True):
        assert (x.cpu().double() - y).norm() < 50 * torch.finfo(dtype).eps * y.norm()
