"""Kernels of mixtures: values and gradients are those of the formulas, whatever the arguments.

Without a GPU they run in Triton's interpreter, and in float64.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    NO_TRITON,
    Largest,
    additive,
    assert_all_close,
    output_and_gradients,
    relative_errors,
    tensors,
    with_gradients,
)

from derived_attention import (
    mixture_attention_reference,
    shifted_mixture_attention_reference,
)
from derived_attention.common import kernels
from derived_attention.mixture.core import mixture_attention
from derived_attention.mixture.layer import MixtureAttention
from derived_attention.mixture.shifted import shifted_mixture_attention

if not kernels.available():
    pytest.skip(NO_TRITON, allow_module_level=True)
from derived_attention.mixture import triton as module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE, TOL = (torch.float32, 1e-4) if torch.cuda.is_available() else (torch.float64, 1e-10)
HALF = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}
H, N, M, D, DV, R = 2, 17, 21, 20, 24, 2
FREE = (mixture_attention, mixture_attention_reference)
SHIFTED = (shifted_mixture_attention, shifted_mixture_attention_reference)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of queries and of keys, not all of them whole."""
    sizes = {"BLOCK_N": 16, "BLOCK_M": 16, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(module, "blocks", lambda *arguments: dict(sizes))


def qkv(leading=(1, H), n=N, m=M, d=D, dv=DV, r=R, dtype=DTYPE):
    """Keys are (..., r, m, d)."""
    shapes = ((*leading, n, d), (*leading, r, m, d), (*leading, m, dv))
    return tensors(*shapes, dtype=dtype, device=DEVICE)


def qkvb(leading=(1, H), n=N, m=M, d=D, dv=DV, r=3, dtype=DTYPE):
    """Queries, keys, values and shifts."""
    shapes = ((*leading, n, d), (*leading, m, d), (*leading, m, dv), (*leading[-1:], r, d))
    return tensors(*shapes, dtype=dtype, device=DEVICE)


def positive(*shape, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator).to(DEVICE, DTYPE) + 0.5).requires_grad_()


def keep(*shape):
    """A boolean mask (..., n, m); one of its queries may attend nothing."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[..., shape[-2] // 2, :] = False
    return mask


MASKS = {
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": keep(1, H, N, M)},
    "floating": {"attn_mask": additive(keep(1, 1, N, M), torch.linspace(-1, 1, M))},
    "keys": {"attn_mask": keep(4, M)[:1]},
    "rows": {"attn_mask": keep(N, 1)},
}
OWN = {
    "plain": {},
    "hard": {"hard": True},
    "priors": {"priors": "HR"},
    "one variance": {"priors": "R", "variances": 0.7},
    "variances": {"priors": "HR", "variances": "R"},
    "hard variances": {"priors": "R", "variances": "HR", "hard": True},
    "as printed": {"variances": "HR", "normalized": False},
    "dot product": {"priors": "R", "variances": "R", "distance": False},
}


def own(name, components=R):
    """Keywords that mixtures have of their own: names of sizes become tensors to be learned."""
    made = dict(OWN[name])
    for i, (key, value) in enumerate(OWN[name].items()):
        if isinstance(value, str):
            made[key] = positive(*(H for _ in value[1:]), components, seed=i)
    return made


def assert_forms_agree(forms, inputs, what, tol=TOL, **options):
    fast, reference = forms
    mask = options.get("attn_mask")
    moved = options if mask is None else options | {"attn_mask": mask.to(DEVICE)}
    ours = with_gradients(lambda *x, **o: fast(*x, fused=True, **o), inputs, **moved)
    assert all(bool(x.isfinite().all()) for x in ours), what
    assert_all_close(ours, with_gradients(reference, inputs, **moved), tol, what)


# --- the formulas ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
def test_free_keys_are_the_formula(name):
    assert_forms_agree(FREE, qkv(), name, **own(name))


@pytest.mark.parametrize("name", ["plain", "hard", "priors"])
def test_shifted_keys_are_the_formula(name):
    q, k, v, b = qkvb()
    assert_forms_agree(SHIFTED, [q, k, v], name, shifts=b, **own(name, 3))


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_free_keys(name, hard):
    """Queries without a key get zeros."""
    assert_forms_agree(FREE, qkv(), name, hard=hard, **MASKS[name])


@pytest.mark.parametrize("name", ["causal", "boolean", "floating"])
def test_masks_of_shifted_keys(name):
    q, k, v, b = qkvb()
    assert_forms_agree(SHIFTED, [q, k, v], name, shifts=b, **MASKS[name])


@pytest.mark.parametrize("components", [1, 3])
@pytest.mark.parametrize("name", ["variances", "hard variances"])
def test_any_number_of_components(name, components):
    inputs = qkv(n=17, m=20, d=5, dv=3, r=components)
    assert_forms_agree(FREE, inputs, name, **own(name, components))


@pytest.mark.parametrize(("n", "m"), [(40, 17), (16, 32), (1, 1)])
def test_causality_counts_from_the_top_left(n, m):
    assert_forms_agree(FREE, qkv(n=n, m=m, d=4, dv=4), (n, m), is_causal=True)


@pytest.mark.parametrize("leading", [(), (3,), (2, 1, 2)])
def test_any_leading_dimensions(leading):
    mask = keep(*leading[:-1], *(1 for _ in leading[-1:]), 5, 7)
    assert_forms_agree(FREE, qkv(leading, 5, 7, 3, 4), leading, attn_mask=mask)


def test_any_strides():
    """Heads that a projection left beside each other, and what has no rows of adjacent numbers."""
    q, k, v = (x.detach() for x in qkv((2, H), 5, 7, 3, 4))
    views = [q.transpose(1, 2).contiguous().transpose(1, 2), k.mT.contiguous().mT, v]
    inputs = [x.requires_grad_() for x in (views[0], views[1], views[2][:, :1].expand(v.shape))]
    assert_forms_agree(FREE, inputs, "views", is_causal=True)


@pytest.mark.parametrize("empty", ["n", "m", "leading"])
def test_nothing_to_do(empty):
    sizes = {"leading": (2, H), "n": 5, "m": 7} | {empty: (0, H) if empty == "leading" else 0}
    assert_forms_agree(FREE, qkv(d=3, dv=4, **sizes), empty)
    out = mixture_attention(*qkv(d=3, dv=4, **sizes), fused=True)
    assert not out.any()


# --- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_keeps_what_norms_add(dtype):
    """All tokens far from 0: ‖k‖²/2 is 800, and in bfloat16 numbers there are 4 apart."""
    q, k, v = (x.detach() for x in qkv(m=N))
    inputs = [x.to(dtype).requires_grad_() for x in (q + 9, k + 9, v)]
    options = {"variances": positive(R).detach().to(DEVICE) * 3}
    ours = output_and_gradients(mixture_attention, inputs, fused=True, **options)
    exact = [x.detach().to(torch.float64).requires_grad_() for x in inputs]
    truth = output_and_gradients(mixture_attention_reference, exact, **options)
    assert all(x.dtype == dtype for x in ours)
    errors = relative_errors(ours, truth)
    assert errors[0] < HALF[dtype] and errors[3] < HALF[dtype], errors  # output, and that of v


@pytest.mark.parametrize("hard", [False, True])
def test_large_scores(hard):
    q, k, v = (x.detach() for x in qkv())
    inputs = [x.requires_grad_() for x in (30 * q, 30 * k, v)]
    assert_forms_agree(FREE, inputs, "large", tol=100 * TOL, hard=hard)


@pytest.mark.parametrize("hard", [False, True])
def test_masks_that_are_finite_stay_so(hard):
    """All keys of a query may have the lowest number there is, which leaves no bit to scores."""
    low = torch.full((N, 1), torch.finfo(torch.float32).min, device=DEVICE)
    low[:3] = 0
    ours, truth = (
        output_and_gradients(form, qkv(), attn_mask=low, hard=hard, **options)
        for form, options in zip(FREE, ({"fused": True}, {}), strict=True)
    )
    assert all(bool(x.isfinite().all()) for x in ours)
    assert_all_close((ours[0], ours[3]), (truth[0], truth[3]), TOL, "output, and that of v")


def test_the_first_of_two_equal_components_gets_the_gradient():
    q, k, v = qkv(n=5, m=7)
    k = k.detach()[:, :, :1].expand(k.shape).contiguous().requires_grad_()
    _, _, dk, _ = output_and_gradients(mixture_attention, [q, k, v], hard=True, fused=True)
    assert dk[:, :, 0].any() and not dk[:, :, 1].any()


def test_a_component_without_a_prior_is_not_there():
    inputs = qkv(n=5, m=7)
    priors = torch.tensor([0, 1], dtype=DTYPE, device=DEVICE)
    both = with_gradients(mixture_attention, inputs, fused=True, priors=priors)
    one = mixture_attention(inputs[0], inputs[1][:, :, 1:], inputs[2])
    torch.testing.assert_close(both[0], one, rtol=TOL, atol=TOL)
    assert not both[2][:, :, 0].any()


def test_autocast_computes_in_half_precision():
    inputs = qkv(n=5, m=7, dtype=torch.float32)
    plain = mixture_attention(*inputs, fused=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = mixture_attention(*inputs, fused=True)
    assert out.dtype == torch.float32 and not torch.equal(out, plain)
    torch.testing.assert_close(out, plain, rtol=2e-2, atol=2e-2)


def test_no_matrix_is_stored():
    inputs = qkv((1, 1), 64, 64, 1, 1)
    with Largest() as largest:
        output_and_gradients(mixture_attention, inputs, fused=True, is_causal=True)
    assert largest.numel < 64 * 64, "the interpreter counts bytes"


# --- who runs a kernel -------------------------------------------------------------------------


def test_who_insists_hears_what_the_kernel_does_not_know(monkeypatch):
    q, k, v = qkv(n=3, m=3, d=4, dv=4)
    bias = torch.zeros(3, 3, dtype=DTYPE, device=DEVICE).requires_grad_()
    with pytest.raises(ValueError, match="attn_mask requires a gradient"):
        mixture_attention(q, k, v, bias, fused=True)
    with pytest.raises(ValueError, match="q or v has 257 features"):
        mixture_attention(q, k, v.new_zeros(1, H, 3, 257), fused=True)
    q, k, v, b = qkvb(n=3, m=3, d=4, dv=4)
    with pytest.raises(ValueError, match="distance False"):
        shifted_mixture_attention(q, k, v, shifts=b, distance=False, fused=True)
    monkeypatch.setattr(kernels, "available", lambda: False)
    with pytest.raises(ValueError, match="Triton .* is not installed"):
        shifted_mixture_attention(q, k, v, shifts=b, fused=True)


def test_who_refuses_or_says_nothing_gets_no_kernel(monkeypatch):
    monkeypatch.delattr(module, "attend")
    q, k, v, b = qkvb(n=3, m=3, d=4, dv=4)
    for refused in ({"fused": False}, {}):
        shifted_mixture_attention(q, k, v, shifts=b, **refused)
        mixture_attention(*qkv(n=3, m=3), **refused)
    with pytest.raises(AttributeError, match="attend"):
        mixture_attention(*qkv(n=3, m=3), fused=True)


def test_a_second_derivative_is_refused():
    q, k, v = qkv(n=3, m=3, d=4, dv=4)
    out = mixture_attention(q, k, v, fused=True)
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("options", [{}, {"hard": True}, {"shifted": True}])
def test_the_layer_hands_it_on(options, monkeypatch):
    torch.manual_seed(0)
    layer = MixtureAttention(8, 2, batch_first=True, fused=True, priors="em", **options)
    layer, x = layer.eval().to(DEVICE), torch.randn(1, 5, 8, device=DEVICE)
    seen = []
    launch = module._launch
    monkeypatch.setattr(module, "_launch", lambda *a: (seen.append(a[0].__name__), launch(*a))[1])
    out, A = layer(x, x, x, need_weights=False)[0], layer(x, x, x)[1]
    assert seen == ["forward"] and A.shape == (1, 5, 5), "calls that want weights have another way"
    layer.fused = False
    torch.testing.assert_close(out, layer(x, x, x)[0], rtol=1e-4, atol=1e-4)


# --- what a GPU is to do -----------------------------------------------------------------------


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_launches_name_every_argument(dtype, hopper):
    for launch in module.launches(64, dtype, hopper):
        names = launch.kernel.arg_names
        assert list(launch.arguments) == names
        assert set(launch.constants) == {k for k, t in launch.arguments.items() if t == "constexpr"}
        assert launch.constants["BLOCK_D"] == 64 and math.log2(launch.constants["BLOCK_N"]) % 1 == 0
