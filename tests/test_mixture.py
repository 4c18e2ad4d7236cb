"""Mixtures of keys: the formula, priors and variances, limits, the linear kernel, EM.

`test_contract` tests what all mechanisms have in common.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    B,
    H,
    Largest,
    N,
    additive,
    assert_agree,
    assert_all_close,
    assert_named,
    tensors,
    with_gradients,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from derived_attention import (
    hard_mixture_attention_reference,
    linear_mixture_attention_reference,
    mixture_attention_reference,
)
from derived_attention.common import blocks
from derived_attention.common.masks import causal_mask
from derived_attention.linear.core import linear_attention
from derived_attention.mixture.core import (
    em_priors,
    hard_mixture_attention,
    linear_mixture_attention,
    mixture_attention,
    responsibilities,
)
from derived_attention.softmax.core import softmax_attention

R, M, D, DV = 3, 9, 4, 3
SOFT = (mixture_attention, mixture_attention_reference)
HARD = (hard_mixture_attention, hard_mixture_attention_reference)
LINEAR = (linear_mixture_attention, linear_mixture_attention_reference)
GAUSSIAN = {"soft": SOFT, "hard": HARD}
ALL = {**GAUSSIAN, "linear": LINEAR}
OWN = ["plain", "priors", "variances", "as printed", "dot product", "shared", "one variance"]


def qkv(leading=(B, H), n=N, m=M, d=D, dv=DV, r=R, **options):
    """Return queries, keys and values; keys have the shape (..., r, m, d)."""
    return tensors((*leading, n, d), (*leading, r, m, d), (*leading, m, dv), **options)


def positive(*shape, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator).double() + 0.5).requires_grad_()


def own(name, heads=(H,), r=R):
    """Return keyword arguments that only mixtures have, for a name in OWN."""
    priors, variances = positive(*heads, r), positive(*heads, r, seed=4)
    return {
        "plain": {},
        "priors": {"priors": priors},
        "variances": {"priors": priors, "variances": variances},
        "as printed": {"priors": priors, "variances": variances, "normalized": False},
        "dot product": {"priors": priors, "variances": variances, "distance": False},
        "shared": {"priors": positive(r), "variances": positive(r, seed=4)},
        "one variance": {"priors": priors, "variances": 0.7},
    }[name]


def keep(*shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4


def masks(n=N, m=M, heads=H, batch=B):
    full = keep(batch, heads, n, m)
    full[0, 0, 0] = False
    return {
        "none": {},
        "causal": {"is_causal": True},
        "full": {"attn_mask": full},
        "additive": {"attn_mask": additive(full, torch.linspace(-1, 1, m))},
        "padding": {"attn_mask": keep(batch, 1, 1, m)},
        "rows": {"attn_mask": keep(heads, n, 1)},
        "keys": {"attn_mask": keep(m)},
        "one": {"attn_mask": torch.tensor(False)},
    }


# --- the formula -------------------------------------------------------------------------------


@pytest.mark.parametrize("normalized", [False, True])
def test_reference_is_the_formula_number_by_number(normalized):
    """Eqs. 7 and 5 for one head, in plain Python."""
    q, k, v = (x.detach() for x in qkv(()))
    pi, var = positive(R).detach(), positive(R, seed=4).detach()
    options = {"priors": pi, "variances": var, "normalized": normalized}
    soft, hard = (form(q, k, v, **options) for form in (SOFT[1], HARD[1]))

    def term(i, j, r):
        squared = sum(float(q[i, d] - k[r, j, d]) ** 2 for d in range(D))
        constant = (2 * math.pi * float(var[r])) ** (-D / 2) if normalized else 1
        return float(pi[r]) * constant * math.exp(-squared / (2 * float(var[r])))

    for i in range(N):
        for combine, out in ((sum, soft), (max, hard)):
            a = [combine([term(i, j, r) for r in range(R)]) for j in range(M)]
            expected = sum(a[j] / sum(a) * v[j] for j in range(M))
            torch.testing.assert_close(out[i], expected)


@pytest.mark.parametrize("forms", GAUSSIAN.values(), ids=GAUSSIAN)
def test_fast_equals_reference_for_all_priors_and_variances(forms, small_blocks):
    for name, mask in masks().items():
        for kind in OWN if name in ("none", "causal", "full") else ["variances"]:
            assert_agree(forms, qkv(), f"{kind}, {name}", **own(kind), **mask)
        for r in (1, 2, 4) if name in ("none", "causal") else ():
            assert_agree(forms, qkv(r=r), f"R = {r}", **own("variances", r=r), **mask)


@pytest.mark.parametrize("forms", ALL.values(), ids=ALL)
def test_priors_for_any_number_of_leading_dimensions(forms, small_blocks):
    for leading, heads in (((), ()), ((H,), (H,)), ((B, H), ()), ((2, B, H), (H,))):
        for options in ({}, {"is_causal": True}, {"attn_mask": keep(M)}):
            options |= {"priors": positive(*heads, R)}
            assert_agree(forms, qkv(leading), f"{leading}", **options)


@pytest.mark.parametrize("hard", [False, True])
def test_gradcheck_with_priors_and_variances(hard):
    """A comparison with the formula would miss faults in `components_of`, which both forms call."""
    inputs = [*qkv((1, 2), n=5, m=4, d=2, dv=2, r=2), positive(2, 2), positive(2, 2, seed=4)]

    def function(q, k, v, priors, variances):
        return mixture_attention(q, k, v, hard=hard, priors=priors, variances=variances)

    assert torch.autograd.gradcheck(function, inputs)


# --- special cases -----------------------------------------------------------------------------


def test_one_component_is_distance_attention():
    q, k, v = (x.detach() for x in qkv(r=1))
    expected = (-torch.cdist(q, k[..., 0, :, :]).square() / 2.6).softmax(-1) @ v
    for form in (*SOFT, *HARD):
        assert_all_close([form(q, k, v, variances=1.3)], [expected], 1e-12)


def test_unit_keys_and_one_component_are_softmax_attention():
    """Eq. 4: for keys of equal length, distances and products give the same weights."""
    q, k, v = (x.detach() for x in qkv(r=1))
    out = mixture_attention(q, k, v, distance=False, scale=1 / 6)
    torch.testing.assert_close(out, softmax_attention(q, k[..., 0, :, :], v, scale=1 / 6))
    k = k / k.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(mixture_attention(q, k, v), softmax_attention(q, k[..., 0, :, :], v))


@pytest.mark.parametrize("name", ALL)
def test_a_component_with_prior_0_is_not_there(name, small_blocks):
    q, k, v = qkv()
    far = torch.cat([k[..., :2, :, :] + 30, k[..., 2:, :, :]], -3)  # the third is much nearer
    for form in ALL[name]:
        for options in ({}, {"is_causal": True}):
            priors = torch.tensor([1.0, 2.0, 0.0]).double().requires_grad_()
            leaves = [x.detach().requires_grad_() for x in (q, far, v)]
            out, *grads = with_gradients(form, leaves, priors=priors, **options)
            two = form(q, far[..., :2, :, :], v, priors=priors[:2].detach(), **options)
            torch.testing.assert_close(out, two, rtol=1e-9, atol=1e-9)
            assert all(bool(g.isfinite().all()) for g in grads)


def test_hard_is_soft_in_the_limit_of_small_variances():
    q, k, v = (x.detach() for x in qkv(n=6))
    gaps = [
        (mixture_attention(q, k, v, variances=s) - hard_mixture_attention(q, k, v, variances=s))
        .abs().max() for s in (1.0, 0.1, 1e-3)
    ]  # fmt: skip
    assert gaps[0] > 2 * gaps[1] and gaps[1] > 1e-3 and gaps[2] < 1e-6


def test_one_fused_call_attends_to_all_components():
    inputs = qkv((1, H), n=32, m=32, d=8, dv=5)
    for options in ({}, {"attn_mask": keep(32)}, {"is_causal": True}):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises if no fused kernel applies
            assert_agree(SOFT, inputs, list(options), **own("variances"), **options)


# --- the linear kernel -------------------------------------------------------------------------


def test_linear_mixes_features_and_not_keys():
    q, k, v = (x.detach() for x in qkv(()))
    pi = positive(R).detach()
    phi = torch.nn.functional.elu
    kernel = sum(pi[r] * (phi(q) + 1) @ (phi(k[r]) + 1).T for r in range(R))
    expected = kernel / kernel.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(linear_mixture_attention(q, k, v, priors=pi), expected)
    mixed = (pi[:, None, None] * k).sum(0)
    assert not torch.allclose(linear_attention(q, mixed, v), expected, atol=1e-2)


def test_a_huge_or_tiny_common_factor_of_the_priors_divides_out_of_linear_kernels():
    q, k, v = (x.detach() for x in qkv(dtype=torch.float32))
    even = linear_mixture_attention(q, k, v, priors=torch.ones(R))
    for factor in (1e37, 1e-44):
        out = linear_mixture_attention(q, k, v, priors=torch.full((R,), factor))
        torch.testing.assert_close(out, even)


def test_linear_takes_other_feature_maps():
    for causal in (False, True):
        assert_agree(LINEAR, qkv(), f"{causal}", is_causal=causal, feature_map=torch.exp)


# --- precision, memory -------------------------------------------------------------------------


@pytest.mark.usefixtures("any_length")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("forms", GAUSSIAN.values(), ids=GAUSSIAN)
def test_variances_in_half_precision(forms, dtype):
    inputs = qkv(n=40, m=40, d=32, dv=32, dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    for kind in ("variances", "one variance"):
        for options in ({}, {"is_causal": True}, {"attn_mask": keep(40)}):
            options |= {
                name: x.detach() if isinstance(x, torch.Tensor) else x
                for name, x in own(kind).items()
            }
            options["variances"] = 8 * options["variances"]
            ours = with_gradients(forms[0], inputs, **options)
            exact = with_gradients(forms[1], wide, **options)
            for x, y in zip(ours, exact, strict=True):
                assert x.dtype == dtype
                assert (x.double() - y).norm() < 12 * torch.finfo(dtype).eps * y.norm()


@pytest.mark.usefixtures("any_length")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_long_keys_cost_no_precision(dtype):
    """‖k‖²/2σ² is large: rounded to half precision on its own, it would cause the largest error."""
    q, k, v = (x.detach() for x in qkv(n=48, m=48, d=64, dv=64, dtype=dtype))
    q, k = 4 * q, 4 * k
    wide = [x.double() for x in (q, k, v)]
    for variances in (None, torch.tensor([8.0, 16.0, 4.0])):
        exact = mixture_attention_reference(*wide, variances=variances)
        out = mixture_attention(q, k, v, variances=variances)
        assert (out.double() - exact).norm() < 0.5 * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.usefixtures("any_length")
@pytest.mark.parametrize("length, how", [(400, "offset"), (400, "spread"), (3000, "spread")])
def test_keys_too_long_for_float16(length, how):
    """‖k‖²/2 exceeds the largest number of float16, 65504."""
    q, k, v = (x.detach() for x in qkv(n=24, m=24, d=16, dv=16, r=2, dtype=torch.float16))
    by = length / 4  # as ‖(1, ..., 1)‖ = 4
    q, k = (x + by if how == "offset" else x * by for x in (q, k))
    assert float(k.float().square().sum(-1).max()) / 2 > 65504
    wide, unit = [x.double() for x in (q, k, v)], 1 if how == "offset" else by**2
    for variances in (40.0 * unit, torch.tensor([30.0, 60.0]) * unit):
        for mask in ({}, {"is_causal": True}, {"attn_mask": keep(24)}):
            options = {"variances": variances, **mask}
            exact = mixture_attention_reference(*wide, **options)
            out = mixture_attention(q, k, v, **options)
            error = (out.double() - exact).norm() / exact.norm() / torch.finfo(torch.float16).eps
            assert error < 4, f"{variances}, {mask}: {error} roundings"


def test_half_precision_rounds_no_key_over_its_variance():
    """The queries are near keys, so rounding k/σ² would change their scores."""
    for dtype in (torch.bfloat16, torch.float16):
        _, k, v = (x.detach() for x in qkv((), m=64, d=16, r=2, dtype=dtype))
        q = k[0] + 0.3 * torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
        for variances in (torch.tensor([0.1, 1.0]), torch.tensor([1.0, 1e-3])):
            exact = mixture_attention_reference(
                q.double(), k.double(), v.double(), variances=variances.double()
            )
            error = mixture_attention(q, k, v, variances=variances).double() - exact
            assert float(error.abs().max()) < 4 * torch.finfo(dtype).eps, f"{dtype}, {variances}"


@pytest.mark.usefixtures("any_length")
@pytest.mark.parametrize("forms", GAUSSIAN.values(), ids=GAUSSIAN)
def test_a_key_far_from_all_others_costs_them_no_precision(forms):
    """The first token of a text may be such a key, so it must not become the common offset."""
    everyone = masks(32, 32) | {"triangle": {"attn_mask": causal_mask(32, 32)}}
    for r in (1, 2):
        for name, mask in everyone.items():
            q, k, v = (x.detach() for x in qkv(n=32, m=32, d=16, r=r, dtype=torch.float32))
            k[..., 0, 0] = 1000
            exact = forms[1](q.double(), k.double(), v.double(), **mask)
            out, what = forms[0](q, k, v, **mask).double(), f"{name}, {r}"
            torch.testing.assert_close(out, exact, rtol=2e-5, atol=2e-5, msg=what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_key_a_token_sees_no_future_bit_for_bit(dtype):
    """R = 1 is a single fused call; the contract tests R = 2."""
    q, k, v = (x.detach() for x in qkv(n=9, m=9, r=1, dtype=dtype))
    for offset in (0, 10, 300):
        for form in (mixture_attention, hard_mixture_attention):
            out = form(q + offset, k + offset, v, is_causal=True)
            for far in (1, 300, 3000):
                late = far * (torch.arange(9) > 4)[:, None].to(dtype)
                moved = form(q + offset + late, k + offset - late, v + late, is_causal=True)
                assert torch.equal(moved[..., :5, :], out[..., :5, :])


def test_gradients_do_not_depend_on_which_component_is_the_narrow_one():
    q, k, v = qkv(n=16, m=16, d=8, r=2, dtype=torch.float32)
    for variances in ([1e-2, 1.0], [1e-4, 1.0], [1e-6, 1.0], [1.0, 1e-4]):
        narrow = torch.tensor(variances).requires_grad_()
        results = with_gradients(mixture_attention, [q, k, v], variances=narrow)
        wide = [x.detach().double().requires_grad_() for x in (q, k, v, narrow)]
        exact = with_gradients(mixture_attention_reference, wide[:3], variances=wide[3])
        for ours, theirs in zip(results, exact, strict=True):
            error = (ours.double() - theirs).norm() / theirs.norm()
            assert error < 1e-4, f"{variances}: {error}"


@pytest.mark.usefixtures("any_length")
@pytest.mark.parametrize("forms", GAUSSIAN.values(), ids=GAUSSIAN)
def test_an_offset_of_queries_and_keys_changes_nothing(forms):
    """Distances do not change, but the terms into which ‖q − k‖² is expanded do."""
    band = (torch.arange(40)[:, None] - torch.arange(40)).abs() <= 3
    for name, mask in {**masks(40, 40), "band": {"attn_mask": band}}.items():
        for own in ({}, {"variances": positive(R).detach().float()}):
            q, k, v = (x.detach() for x in qkv(n=40, m=40, dtype=torch.float32))
            q, k = q + 1000, k + 1000
            wide = {key: x.double() for key, x in own.items()} | mask
            exact = forms[1](q.double(), k.double(), v.double(), **wide)
            out = forms[0](q, k, v, **own, **mask)
            torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4, msg=name)


# Values that priors and variances may reach in training: one step of EM can set a prior to 0, and
# a learned variance has no lower bound.
EXTREMES = [
    {"priors": torch.tensor([1.0, 0.0]), "variances": 0.1},
    {"priors": torch.tensor([0.0, 1.0]), "variances": 0.1},
    {"priors": torch.tensor([1.0, 0.0]), "variances": torch.tensor([0.1, 1e-3])},
    {"priors": torch.tensor([110.0, 0.0]).softmax(-1), "variances": 1e-4},
    {"priors": torch.tensor([1e30, 1e-30]), "variances": 1e4},
    {"variances": torch.tensor([1e-6, 1e6])},
    {"variances": torch.tensor([1e-6, 1e6]), "normalized": False},
    {"priors": torch.tensor([1.0, 0.0]), "variances": 1e8},
]


@pytest.mark.usefixtures("any_length")
@pytest.mark.parametrize("forms", GAUSSIAN.values(), ids=GAUSSIAN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_extreme_priors_and_variances(forms, dtype):
    for own in EXTREMES:
        for mask in ({}, {"is_causal": True}, {"attn_mask": causal_mask(N, M)}):
            inputs = qkv(r=2, dtype=dtype)
            results = with_gradients(forms[0], inputs, **own, **mask)
            assert all(bool(x.isfinite().all()) for x in results), f"{own}, {mask}"
            same = {key: x.double() if torch.is_tensor(x) else x for key, x in own.items()}
            wide = [x.detach().double() for x in inputs]
            exact = forms[1](*wide, **same, **mask)
            # near a tie, a rounding error of a score selects another key as σ → 0
            sharp = min(1e-2, *torch.as_tensor(own["variances"]).reshape(-1).tolist()) < 1e-2
            if dtype == torch.float32 or not sharp:
                tol = 1e-3 if dtype == torch.float32 else 0.1
                torch.testing.assert_close(results[0].double(), exact, rtol=tol, atol=tol)


# --- expectation and maximisation --------------------------------------------------------------


def log_likelihood(q, k, priors, mask=None, **options):
    """Return Σ_i log Σ_jr exp(s_ijr) of each head, computed without the package's functions."""
    var = options["variances"]
    squared = (q[..., None, :, None, :] - k[..., None, :, :]).square().sum(-1)
    scores = priors.log()[..., None, None] - squared / (2 * var[..., None, None])
    if options.get("normalized"):
        scores = scores - D / 2 * var.log()[..., None, None]
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    total = scores.movedim(-3, -2).flatten(-2).logsumexp(-1)  # (B, H, N)
    return total.masked_fill(total == -math.inf, 0).sum((0, 2))


def test_responsibilities():
    """γ sums to 1, and a_ij γ_ijr is the weight of component r of key j."""
    for kind in OWN:
        q, k, v = (x.detach() for x in qkv())
        options = own(kind)
        gamma = responsibilities(q, k, **options)
        assert gamma.shape == (B, H, R, N, M)
        torch.testing.assert_close(gamma.sum(-3), torch.ones(B, H, N, M).double())
        eye = torch.eye(M).double().expand(B, H, M, M)
        A = mixture_attention(q, k, eye, **options)
        pi = options.get("priors", torch.ones(R).double())
        variance = torch.as_tensor(options.get("variances", math.sqrt(D))).expand(H, R)
        products = q.unsqueeze(-3) @ k.mT
        if options.get("distance", True):
            products = -torch.cdist(q.unsqueeze(-3), k).square() / 2
        terms = pi[..., None, None] * (products / variance[..., None, None]).exp()
        if options.get("normalized", options.get("distance", True)):
            terms = terms * variance[..., None, None] ** (-D / 2)
        joint = terms / terms.sum((-3, -1), keepdim=True)
        torch.testing.assert_close(A.unsqueeze(-3) * gamma, joint, msg=kind)
        chunk = responsibilities(q[..., 2:4, :], k, **options)
        torch.testing.assert_close(chunk, gamma[..., 2:4, :], msg=kind)


@pytest.mark.parametrize("name", ["none", "causal", "full", "normalized"])
def test_em_never_lowers_the_likelihood_and_stops_at_its_maximum(name):
    q, k, _ = (x.detach() for x in qkv(n=30, m=12))
    options = masks(30, 12).get(name, {})
    mask = causal_mask(30, 12) if name == "causal" else options.get("attn_mask")
    mask = mask if mask is None or mask.dim() == 2 else mask.unsqueeze(-3)
    var = positive(H, R, seed=4).detach()
    fixed = {"variances": var, "normalized": name == "normalized"}
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
    assert gradient.abs().max() < 0.05  # summed over 60 queries


def test_em_priors_are_their_formula(small_blocks):
    q, k, _ = (x.detach() for x in qkv())
    priors, some = positive(H, R).detach(), keep(B, H, N, seed=8)
    eye = torch.eye(M).double().expand(B, H, M, M)
    for name, options in {**masks(), "scale": {"scale": 0.7}}.items():
        gamma = responsibilities(q, k, priors=priors, scale=options.get("scale"))
        A = mixture_attention_reference(q, k, eye, priors=priors, **options)
        for chosen in (None, some):
            weights = A if chosen is None else A * chosen[..., None]
            counts = (weights.unsqueeze(-3) * gamma).sum((0, 3, 4))
            expected = counts / weights.sum((0, 2, 3))[:, None] if name != "one" else counts + 1 / R
            out = em_priors(q, k, priors=priors, query_mask=chosen, **options)
            torch.testing.assert_close(out, expected, msg=lambda m, name=name: f"{name}: {m}")
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
    for empty in (em_priors(q[..., :0, :], k), em_priors(q, k[..., :0, :])):
        assert empty.tolist() == [[0.5, 0.5]] * H


# --- errors ------------------------------------------------------------------------------------

K = torch.zeros(B, H, R, M, D).double()
BAD = [
    (ValueError, r"k has shape .*R ≥ 1 keys for each of M tokens", {"k": K[..., 0, :, :]}),
    (ValueError, "k has shape", {"k": K[:, :, :0]}),
    (ValueError, "v has shape", {"v": K}),
    (ValueError, r"priors has shape \(2,\)", {"priors": torch.ones(2)}),
    (TypeError, "priors is of type list", {"priors": [1, 2, 3]}),
    (ValueError, "priors are all 0; expected a positive one", {"priors": torch.zeros(R)}),
    (TypeError, "priors is of dtype torch.int64", {"priors": torch.arange(3)}),
]
GAUSSIAN_BAD = [
    (ValueError, "variances has shape", {"variances": torch.ones(R, H + 1)}),
    (ValueError, "variances is 0", {"variances": 0.0}),
    (TypeError, "variances is of type list", {"variances": [1.0]}),
    (ValueError, "scale and variances", {"scale": 1.0, "variances": 2.0}),
    (TypeError, "normalized is 1", {"normalized": 1}),
    (ValueError, "normalized is True and distance False", {"normalized": True, "distance": False}),
]


@pytest.mark.parametrize("name", ALL)
def test_bad_argument_is_named(name):
    twice = (TypeError, "multiple values for keyword argument 'hard'", {"hard": False})
    linear = [(TypeError, "feature_map is 3", {"feature_map": 3})]
    more = {"soft": GAUSSIAN_BAD, "hard": [*GAUSSIAN_BAD, twice], "linear": linear}
    assert_named(BAD + more[name], ALL[name][0], **dict(zip("qkv", qkv(), strict=True)))


def test_bad_argument_of_em_is_named():
    q, k, _ = qkv()
    bad = [
        (ValueError, "query_mask has shape", {"query_mask": keep(N)}),
        (TypeError, "query_mask", {"query_mask": [True]}),
        (TypeError, "priors is of type list", {"priors": [1.0]}),
    ]
    assert_named(bad, em_priors, q=q, k=k)
    bad = [
        (ValueError, "scale is -1", {"scale": -1.0}),
        (ValueError, "k has shape", {"k": k[..., 0, :, :]}),
    ]
    assert_named(bad, responsibilities, q=q, k=k)
