"""Mixtures of shifted keys: each form with one product Q Kᵀ agrees with the formula.

The properties of every mechanism are tested in `test_contract`.
"""

from __future__ import annotations

import pytest
import torch
from helpers import (
    B,
    H,
    Largest,
    N,
    assert_agree,
    assert_named,
    tensors,
    with_gradients,
)
from test_mixture import DV, OWN, D, M, R, keep, masks, own, positive

from derived_attention import (
    shifted_mixture_attention_reference,
)
from derived_attention.common import blocks
from derived_attention.mixture import shifted as module
from derived_attention.mixture.shifted import shifted_keys, shifted_mixture_attention
from derived_attention.softmax.core import softmax_attention

FORMS = (shifted_mixture_attention, shifted_mixture_attention_reference)


def qkvb(leading=(B, H), n=N, m=M, d=D, dv=DV, r=R, shared=False, **options):
    """Return queries, keys, values and shifts."""
    heads = () if shared else leading[-1:]
    return tensors((*leading, n, d), (*leading, m, d), (*leading, m, dv), (*heads, r, d), **options)


def results_of(form, inputs, **options):
    *heads, shifts = inputs
    return with_gradients(form, heads, shifts=shifts, **options)


def assert_forms_agree(what, inputs=None, **options):
    *heads, shifts = inputs or qkvb()
    assert_agree(FORMS, heads, what, shifts=shifts, **options)


@pytest.fixture(params=["products", "logarithms", "maxima"])
def route(request, monkeypatch, small_blocks):
    """Return options for each way to combine components, with several blocks, one partial."""
    if request.param == "logarithms":
        monkeypatch.setattr(module, "has_concrete_values", lambda u: False)
    return {"hard": request.param == "maxima"}


# --- the formula -------------------------------------------------------------------------------


def test_shifted_keys():
    k, shared, each = tensors((B, H, M, D), (R, D), (H, R, D))
    for b in (shared, each):
        out = shifted_keys(k, b)
        assert out.shape == (B, H, R, M, D)
        b = b.expand(H, R, D)
        torch.testing.assert_close(out[1, 2, 1, 5], k[1, 2, 5] + b[2, 1])
    assert shifted_keys(k[0, 0], shared).shape == (R, M, D)


def test_fast_equals_reference_for_all_priors_and_variances(route):
    for name, mask in masks().items():
        for kind in OWN if name in ("none", "causal", "full") else ["one variance"]:
            assert_forms_agree(f"{kind}, {name}", **own(kind), **mask, **route)
        for r in (1, 2, 4) if name in ("none", "causal") else ():
            assert_forms_agree(f"R = {r}", qkvb(r=r), **own("priors", r=r), **mask, **route)
    assert_forms_agree("no heads", qkvb((), shared=True), **own("shared"), **route)
    for shape in ((N, M), (M,), (B, 1, N, 1), (H, 1, M), ()):  # its gradient is computed in blocks
        mask = tensors(shape, seed=9)[0]
        assert_forms_agree(f"{shape}", **own("one variance"), attn_mask=mask, **route)


# --- what it contains --------------------------------------------------------------------------


def test_products_of_keys_leave_softmax_attention():
    """Without distances, u_ir + w_jr does not depend on j, and cancels."""
    q, k, v, b = (x.detach() for x in qkvb())
    for options in ({}, {"is_causal": True}, {"attn_mask": keep(M)}):
        expected = softmax_attention(q, k, v, scale=0.7, **options)
        for form in FORMS:
            for hard in (False, True):
                out = form(q, k, v, shifts=b, scale=0.7, distance=False, hard=hard, **options)
                torch.testing.assert_close(out, expected)


def test_a_component_with_prior_0_is_not_there(route):
    q, k, v, b = qkvb()
    far = torch.cat([b[:, :2] + 9, b[:, 2:]], 1).detach().requires_grad_()  # the third is nearest
    for options in ({}, {"is_causal": True}):
        priors = torch.tensor([1.0, 2.0, 0.0]).double().requires_grad_()
        options |= route
        out, *grads = results_of(FORMS[0], (q, k, v, far), priors=priors, **options)
        two = FORMS[1](q, k, v, shifts=far[:, :2], priors=priors[:2].detach(), **options)
        torch.testing.assert_close(out, two, rtol=1e-9, atol=1e-9)
        assert all(bool(g.isfinite().all()) for g in grads)
        assert bool((grads[3][:, 2] == 0).all()) and bool((grads[3][:, 0] != 0).any())


# --- which form runs ---------------------------------------------------------------------------


def gaps(u_gap, w_gap):
    """Return q, k and v, where the third query and fourth key prefer one shift by these gaps."""
    q, k = torch.zeros(6, 2), torch.zeros(7, 2)
    q[2, 0], k[3, 0] = u_gap, w_gap
    return q, k, torch.randn(7, 2, generator=torch.Generator().manual_seed(0))


SHIFTS = torch.tensor([[0.5, 0.0], [-0.5, 0.0]])  # of equal length: only q and k cause gaps


def test_a_query_multiplies_components_only_where_that_is_exact(monkeypatch, no_short_forms):
    """The form is chosen per query: one that adds logarithms changes no bit of the others."""
    monkeypatch.setattr(blocks, "CHUNK", 4)
    found, choose = [], module._Shifted.adapt

    def record(self, ours):
        found.append(choose(self, ours))
        return found[-1]

    monkeypatch.setattr(module._Shifted, "adapt", record)
    for sizes in ((3, 3), (300, 3), (3, -30), (60, 60), (300, -30)):
        q, k, v = (x.requires_grad_() for x in gaps(*sizes))
        mask = {"is_causal": True} if sizes[0] == 60 else {}
        results = with_gradients(FORMS[0], [q, k, v], shifts=SHIFTS, scale=1.0, **mask)
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        exact = with_gradients(FORMS[1], wide, shifts=SHIFTS.double(), scale=1.0, **mask)
        for ours, theirs in zip(results, exact, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
        others, far = torch.arange(6) != 2, sizes[0] > 44
        assert found[-1].all != far
        assert torch.equal(found[-1].factored[0], others if far else torch.ones(6).bool())
        if mask:  # else all queries affect the offset that is subtracted
            same = FORMS[0](q * others[:, None], k, v, shifts=SHIFTS, scale=1.0, **mask)
            assert torch.equal(same[others], results[0][others])


def test_what_is_multiplied_would_underflow(no_short_forms):
    """For the second query and key, exp(u − n) exp(w − m) is 0 in float32 for all components."""
    q = torch.tensor([[0.0, 0.0], [300.0, 0.0]])  # keys are equal to queries
    v = torch.randn(2, 2, generator=torch.Generator().manual_seed(0))
    centred = q - q.mean(0)
    u, w = centred @ SHIFTS.T, -(centred + SHIFTS[:, None]).square().sum(-1) / 2  # (2, R), (R, 2)
    x, y, _ = module._factors(u, w)
    assert float((x @ y)[1, 1]) == 0
    torch.testing.assert_close(shifted_mixture_attention(q, q, v, shifts=SHIFTS, scale=1.0), v)


@pytest.mark.usefixtures("any_length")
def test_an_offset_of_queries_and_keys_changes_nothing():
    """An offset changes ‖q‖², q·k and ‖k‖², but no distance."""
    for name, mask in masks().items():
        q, k, v, b = (x.detach() for x in qkvb(dtype=torch.float32))
        q, k = q + 1000, k + 1000
        exact = FORMS[1](q.double(), k.double(), v.double(), shifts=b.double(), **mask)
        out = FORMS[0](q, k, v, shifts=b, **mask)
        torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.usefixtures("any_length")
def test_one_huge_key_is_no_nan():
    """‖k‖² may overflow, whether the key is masked, in the future, or neither."""
    q, k, v, b = (x.detach() for x in qkvb((H,), m=N, dtype=torch.float32))
    k[..., -1, :] = 1e19
    for mask in ({}, {"is_causal": True}, {"attn_mask": torch.arange(N) < N - 1}):
        results = results_of(FORMS[0], [x.requires_grad_() for x in (q, k, v, b)], **mask)
        assert all(bool(x.isfinite().all()) for x in results)
        rest = {"is_causal": "is_causal" in mask}
        short = FORMS[1](q, k[..., :-1, :], v[..., :-1, :], shifts=b, **rest)
        torch.testing.assert_close(results[0][..., :-1, :], short[..., :-1, :])


@pytest.mark.usefixtures("any_length")
def test_priors_of_0_and_small_variances():
    for priors in ([1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [1e30, 1.0, 1e-30]):
        for mask in masks().values():
            inputs = qkvb(dtype=torch.float32)
            own = {"priors": torch.tensor(priors), "variances": 0.01, **mask}
            results = results_of(FORMS[0], inputs, **own)
            exact = results_of(FORMS[1], [x.detach().double().requires_grad_() for x in inputs],
                               **own | {"priors": torch.tensor(priors).double()})  # fmt: skip
            assert all(bool(x.isfinite().all()) for x in results)
            torch.testing.assert_close(results[0].double(), exact[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_products_of_keys_and_one_component_take_one_fused_call(hard, monkeypatch):
    """These cases compute no block."""
    monkeypatch.setattr(blocks, "_blocks", None)
    for name in ("none", "causal", "keys"):
        for r, options in ((1, {}), (R, {"distance": False})):
            options = {**masks()[name], "priors": positive(H, r), "hard": hard, **options}
            out, *_ = results_of(FORMS[0], qkvb(r=r), **options)
            assert out.shape == (B, H, N, DV)


# --- precision, memory -------------------------------------------------------------------------


@pytest.mark.usefixtures("any_length")
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_large_queries_keys_and_shifts_are_as_exact(hard):
    """With std 12, exp(−‖q − k‖²/2σ²) is 0 for all keys; with large shifts, so is the sum."""
    causal, keys = {"is_causal": True}, {"attn_mask": keep(64)}
    for dtype, size, options in (
        *((torch.float32, size, options) for size in (1, 12) for options in ({}, causal, keys)),
        (torch.bfloat16, 12, {}),
        (torch.float16, 12, causal),
    ):
        made = zip((12, 12, 1, size), qkvb((H,), n=64, m=64, d=64, dv=64, dtype=dtype), strict=True)
        inputs = [(s * x).detach().requires_grad_() for s, x in made]
        wide = [x.detach().double().requires_grad_() for x in inputs]
        eps = max(torch.finfo(dtype).eps, 1e-4)  # the rounding of scores near 1000
        ours = results_of(FORMS[0], inputs, hard=hard, **options)
        exact = results_of(FORMS[1], wide, hard=hard, **options)
        for x, y in zip(ours, exact, strict=True):
            assert (x.double() - y).norm() < 3 * eps * y.norm(), f"{dtype}, {size}, {options}"


def test_products_of_keys_under_autocast():
    inputs = qkvb(dtype=torch.float32)
    exact = results_of(FORMS[1], [x.detach().double().requires_grad_() for x in inputs],
                           distance=False)  # fmt: skip
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, *grads = results_of(FORMS[0], inputs, distance=False)
    assert out.dtype == torch.float32 and all(g.dtype == torch.float32 for g in grads)
    assert (out - exact[0]).norm() < 0.02 * exact[0].norm()


def test_no_matrix_and_no_shifted_key_is_stored(route, monkeypatch):
    monkeypatch.setattr(blocks, "CHUNK", 16)
    n, d, r = 320, 8, 5
    inputs = qkvb((1, H), n=n, m=n, d=d, dv=d, r=r)
    for options in ({}, {"is_causal": True}, {"attn_mask": keep(n)}):
        with Largest() as largest:
            results_of(FORMS[0], inputs, priors=positive(H, r), **route, **options)
        assert largest.numel <= H * n * 16 < H * n * r * d < H * n * n


# --- errors ------------------------------------------------------------------------------------


def test_bad_argument_is_named():
    arguments = dict(zip(("q", "k", "v", "shifts"), qkvb(), strict=True))
    bad = [
        (ValueError, "k has shape", {"k": torch.zeros(B, H, R, M, D).double()}),
        (ValueError, "shifts has shape", {"shifts": torch.ones(R, D + 1).double()}),
        (ValueError, "shifts has shape", {"shifts": torch.ones(H + 1, R, D).double()}),
        (ValueError, "shifts has shape", {"shifts": torch.ones(0, D).double()}),
        (TypeError, "shifts is of type list", {"shifts": [1.0]}),
        (TypeError, "shifts has dtype torch.float32", {"shifts": torch.ones(R, D)}),
        (ValueError, "priors has shape", {"priors": torch.ones(R + 1)}),
        (ValueError, "variances is 0", {"variances": 0.0}),
    ]
    assert_named(bad, shifted_mixture_attention, **arguments)
    with pytest.raises(ValueError, match=r"k has shape \(4,\); expected \(..., M, D\)"):
        shifted_keys(torch.zeros(D), torch.zeros(R, D))
