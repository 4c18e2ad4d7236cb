"""Tests of the Triton kernels of causal linear attention: values, gradients, refused inputs."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    NO_TRITON,
    assert_all_close,
    output_and_gradients,
    relative_errors,
    tensors,
    with_gradients,
)

from derived_attention import (
    linear_attention_reference,
    linear_mixture_attention_reference,
)
from derived_attention.common import kernels
from derived_attention.linear import core as module
from derived_attention.linear.core import linear_attention
from derived_attention.mixture import core as mixture
from derived_attention.mixture.core import linear_mixture_attention
from derived_attention.mixture.layer import MixtureAttention

if not kernels.available():
    pytest.skip(NO_TRITON, allow_module_level=True)
from derived_attention.linear import triton as linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Only the interpreter runs kernels in float64.
DTYPE, TOL = (torch.float32, 1e-4) if DEVICE == "cuda" else (torch.float64, 1e-10)
FUSED = {"is_causal": True, "fused": True}


def qkv(n, m, d, dv, leading=(1, 1), dtype=DTYPE, seed=0):
    shapes = [(*leading, n, d), (*leading, m, d), (*leading, m, dv)]
    return tensors(*shapes, dtype=dtype, seed=seed, device=DEVICE)


def both(inputs, form, reference, **options):
    ours = with_gradients(form, inputs, **FUSED, **options)
    return ours, with_gradients(reference, inputs, is_causal=True, **options)


def both_and_exact(inputs):
    """Return the kernel's results and those of the formula in float64."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    ours = output_and_gradients(linear_attention, inputs, **FUSED)
    return ours, output_and_gradients(linear_attention_reference, exact, is_causal=True)


# --- the formula ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "m", "d", "dv", "leading", "options"),
    [
        (140, 140, 20, 12, (1, 1), {"scale": 0.7}),  # three segments of two blocks
        (70, 37, 20, 9, (1,), {}),
        (37, 53, 20, 24, (2, 1, 1), {}),
        (1, 1, 1, 1, (), {}),
        (40, 40, 70, 18, (1, 1), {}),  # features in slices, values in two parts
        (70, 70, 6, 5, (1, 1), {"feature_map": torch.square}),
    ],
    ids=["segments", "fewer keys", "more keys", "one", "parts", "feature map"],
)
def test_kernels_compute_the_formula_and_its_gradients(n, m, d, dv, leading, options):
    inputs = qkv(n, m, d, dv, leading)
    assert_all_close(*both(inputs, linear_attention, linear_attention_reference, **options), TOL)


def test_heads_that_are_slices_of_a_layer_s_features_are_read_where_they_are():
    made = [x.detach().transpose(-2, -3).requires_grad_() for x in qkv(3, 3, 8, 8, (1, 40))]
    assert made[0].shape == (1, 3, 40, 8) and not made[0].is_contiguous()
    assert_all_close(*both(made, linear_attention, linear_attention_reference), TOL)


@pytest.mark.parametrize("priors", [None, (3,), (2, 3)], ids=["equal", "shared", "each head"])
def test_mixed_keys_have_gradients_and_so_have_priors(priors):
    q, _, v = qkv(40, 40, 12, 5, (2,))
    k = tensors((2, 3, 40, 12), dtype=DTYPE, seed=1, device=DEVICE)[0]
    own = {}
    if priors is not None:
        numbers = torch.linspace(0.1, 2, math.prod(priors), dtype=DTYPE, device=DEVICE)
        own = {"priors": numbers.view(priors).requires_grad_()}
    forms = linear_mixture_attention, linear_mixture_attention_reference
    assert_all_close(*both([q, k, v], *forms, **own), TOL)


def test_sums_without_division_have_gradients_and_broadcast():
    q, k, v = qkv(150, 150, 7, 5)
    v = v.detach()[0].requires_grad_()
    ours = output_and_gradients(linear.causal_sums, [q, k, v])
    theirs = output_and_gradients(lambda q, k, v: (q @ k.mT).tril() @ v, [q, k, v])
    assert_all_close(ours, theirs, TOL)


def test_rows_without_weight_are_zeros_and_have_no_gradient():
    q, k, v = qkv(70, 70, 4, 3)
    k = k.detach().clone()
    k[..., :3, :] = -1
    forms, inputs = (linear_attention, linear_attention_reference), [q, k.requires_grad_(), v]
    ours, theirs = both(inputs, *forms, feature_map=torch.relu)
    assert (ours[0][..., :3, :] == 0).all() and (ours[1][..., :3, :] == 0).all()
    assert_all_close(ours, theirs, TOL)


@pytest.mark.parametrize("sizes", [(0, 3, 1), (3, 0, 1), (3, 3, 0)], ids=["N", "M", "B"])
def test_nothing_to_sum_is_zeros(sizes):
    n, m, b = sizes
    inputs = qkv(n, m, 4, 3, (b, 2))
    for ours, x in zip(
        output_and_gradients(linear_attention, inputs, **FUSED)[1:], inputs, strict=True
    ):
        assert ours.shape == x.shape and not ours.any()


# --- causality and precision ---------------------------------------------------------------------


def test_no_bit_depends_on_the_future():
    q, k, v = qkv(100, 100, 4, 3)
    out = linear_attention(q, k, v, **FUSED)
    for t in (30, 64):
        late = 5.0 * (torch.arange(100, device=DEVICE) > t)[:, None]
        changed = linear_attention(q + late, k + late, v - 3 * late, **FUSED)
        assert torch.equal(out[..., : t + 1, :], changed[..., : t + 1, :])
        slopes = torch.autograd.grad(out[..., : t + 1, :].sum(), [k, v], retain_graph=True)
        assert all(bool((x[..., t + 1 :, :] == 0).all()) for x in slopes)


# Relative norms of errors. With an offset in the values, terms N times as large as dq cancel.
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.bfloat16, 1.5e-2), (torch.float16, 8e-3), (torch.float32, 2e-5)],
    ids=["bf16", "fp16", "fp32"],
)
def test_gradients_keep_their_digits_where_values_have_an_offset(dtype, tolerance):
    q, k, v = qkv(100, 100, 16, 16, dtype=dtype)
    v = (v.detach() + 3).requires_grad_()
    assert max(relative_errors(*both_and_exact([q, k, v]))) < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_that_float16_cannot_hold_are_no_infinity(dtype):
    q, k, v = (50 * x.detach() for x in qkv(40, 40, 100, 16, dtype=dtype))
    assert ((q.relu() + 1).double() @ (k.relu() + 1).double().mT).max() > 65504
    results, exact = both_and_exact([x.requires_grad_() for x in (q, k, v)])
    assert all(bool(x.isfinite().all()) for x in results)
    assert relative_errors(results[:1], exact[:1])[0] < 2e-2


# --- who runs them -------------------------------------------------------------------------------


def test_who_does_not_insist_has_pytorch_s(monkeypatch):
    inputs = qkv(5, 5, 4, 3)
    monkeypatch.setattr(module, "fused_sums", None)  # calling it would raise
    for fused in (None, False) if DEVICE == "cpu" else (False,):
        linear_attention(*inputs, is_causal=True, fused=fused)
        linear_mixture_attention(
            inputs[0], inputs[1].unsqueeze(-3), inputs[2], is_causal=True, fused=fused
        )


def test_the_layer_hands_it_on(monkeypatch):
    seen, run = [], mixture.fused_sums
    monkeypatch.setattr(mixture, "fused_sums", lambda *a, **o: (seen.append(a), run(*a, **o))[1])
    x, found = torch.linspace(-1, 1, 40, device=DEVICE).view(1, 5, 8), []
    for fused in (True, None):
        torch.manual_seed(0)
        layer = MixtureAttention(8, 2, linear=True, mixture={"fused": fused}, batch_first=True)
        found.append(layer.to(DEVICE)(x, x, x, is_causal=True, need_weights=False)[0])
    torch.testing.assert_close(*found)
    assert len(seen) == 1


def test_who_insists_hears_what_kernels_cannot_do():
    q, k, v = qkv(5, 5, 4, 3)
    with pytest.raises(ValueError, match="fused is True, and is_causal False"):
        linear_attention(q, k, v, fused=True)
    with pytest.raises(ValueError, match="fused is True, and is_causal False"):
        linear_mixture_attention(q, k.unsqueeze(-3), v, fused=True)
    with pytest.raises(ValueError, match="fused is True, and dropout_p"):
        linear_attention(q, k, v, dropout_p=0.5, **FUSED)
    with pytest.raises(ValueError, match="q has 300 features a head"):
        linear_attention(*qkv(5, 5, 300, 3), **FUSED)
    with pytest.raises(TypeError, match="fused is of type int"):
        linear_attention(q, k, v, is_causal=True, fused=1)


def test_dropout_stores_the_weights_whoever_does_not_insist():
    q, k, v = qkv(5, 5, 4, 3)
    options = {"is_causal": True, "dropout_p": 1 - 1e-12, "fused": False}
    assert not linear_attention(q, k, v, **options).any()


def test_there_is_no_second_derivative():
    q, k, v = qkv(5, 5, 4, 3)
    out = linear_attention(q, k, v, **FUSED)
    slope = torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


# --- what they take ------------------------------------------------------------------------------


def test_a_program_takes_as_much_of_the_sequence_as_leaves_every_one_busy(monkeypatch):
    device = torch.device("cpu")  # counted as one multiprocessor
    assert linear.segment_length(1000, 1, device) == 256
    assert linear.segment_length(1000, 4, device) == 1024
    monkeypatch.setattr(linear, "PROGRAMS", 1000)
    assert linear.segment_length(1000, 4, device) == linear.SEGMENT
