"""The kernels of lasso attention: on a GPU, and elsewhere in Triton's interpreter."""

from __future__ import annotations

import sys

import pytest
import torch
from helpers import (
    NO_TRITON,
    Largest,
    assert_all_close,
    output_and_gradients,
    relative_errors,
    tensors,
)

from derived_attention import LassoAttention, lasso_attention, lasso_attention_reference
from derived_attention.common import kernels

if not kernels.available():
    pytest.skip(NO_TRITON, allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# On a GPU kernels have no float64, and a code may be 0 or not by a rounding: so its norm counts.
DTYPE, TOL = (torch.float32, 1e-3) if DEVICE == "cuda" else (torch.float64, 1e-10)
H = 2


def inputs(N=37, M=53, D=20, Dv=24, leading=(H,), size=1.5, dtype=DTYPE, **own):
    """Queries, keys, values, and λ and ρ of each head."""
    shapes = (*leading, N, D), (*leading, M, D), (*leading, M, Dv)
    q, k, v = tensors(*shapes, dtype=dtype, device=DEVICE, **own)
    numbers = torch.linspace(0.3, 0.6, H), torch.linspace(2, 4, H)
    lam, rho = (x.to(DEVICE, dtype).requires_grad_() for x in numbers)
    return [(size * q).detach().requires_grad_(), k, v, lam, rho]


def run(form, **options):
    return lambda q, k, v, lam, rho: form(q, k, v, lam=lam, rho=rho, **options)


def compare(given, tol=TOL, sums=True, **options):
    """The output and all gradients of the kernels, beside those of the reference in float64.

    Without `sums` those of λ and ρ do not count: sums over everything, of both signs.
    """
    ours = output_and_gradients(run(lasso_attention, fused=True, **options), given)
    exact = [x.detach().double().requires_grad_() for x in given]
    theirs = output_and_gradients(run(lasso_attention_reference, **options), exact)
    assert [x.dtype for x in ours] == [x.dtype for x in (given[0], *given)]
    assert all(x.detach().isfinite().all() for x in ours)
    errors = relative_errors(ours, theirs)
    assert max(errors if sums else errors[:4]) < tol, errors


def sizes(rows):
    return {"BLOCK_N": rows, "BLOCK_M": rows, "num_warps": 4, "num_stages": 1}


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks of queries and of keys from few of them; no two lengths are equal."""
    from derived_attention.sparse_coding import triton as splitting

    if DEVICE == "cpu":
        monkeypatch.setattr(splitting, "blocks", lambda *_: sizes(32))


@pytest.mark.parametrize(
    "options",
    [
        dict(iterations=1),
        dict(iterations=3),
        dict(iterations=2, power=1),
        dict(iterations=4, power=5),
        dict(iterations=2, is_causal=True),
        dict(iterations=2, is_causal=True, power=5, prefix=7),
        dict(iterations=2, scale=0.3),
    ],
    ids=str,
)
def test_output_and_gradients_are_those_of_the_reference(small_blocks, options):
    compare(inputs(), **options)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("prefix", [0, 5])
def test_a_query_s_own_key_is_left_out(small_blocks, is_causal, prefix):
    how = dict(is_causal=is_causal, prefix=prefix, exclude_self=True, iterations=2, power=5)
    compare(inputs(N=37, M=37 + prefix), **how)


def test_masked_keys_take_no_part_and_a_row_without_keys_is_zero(small_blocks):
    given = inputs(leading=(3, H), N=19, M=21)
    keep = torch.rand(3, 1, 1, 21, generator=torch.Generator().manual_seed(1)) < 0.6
    keep[1] = False
    boolean = keep.to(DEVICE)
    floating = torch.zeros_like(boolean, dtype=DTYPE).masked_fill(~boolean, -torch.inf)
    for mask in (boolean, floating):
        compare(given, attn_mask=mask, iterations=2, power=5)
    out, *grads = output_and_gradients(
        run(lasso_attention, fused=True, attn_mask=boolean, iterations=1), given
    )
    for x in (out, *grads[:3]):
        assert not x[1].any()
        assert x[0].any() and x[2].any()


@pytest.mark.parametrize("N, M", [(1, 1), (1, 40), (40, 1), (17, 16), (64, 33)])
def test_odd_lengths(small_blocks, N, M):
    compare(inputs(N, M, D=3, Dv=2), iterations=2)


def test_features_of_several_sizes_are_padded(small_blocks):
    compare(inputs(20, 20, D=64, Dv=8), iterations=2)
    compare(inputs(20, 20, D=5, Dv=40), iterations=2)


def test_tensors_with_strides_and_shared_heads(small_blocks):
    q, k, v, lam, rho = inputs(20, 20)
    how = dict(iterations=2, power=5)
    strided = [x.mT.contiguous().mT for x in (q, k, v)]
    assert not any(x.is_contiguous() for x in strided)
    wanted = run(lasso_attention, fused=True, **how)(q, k, v, lam, rho)
    torch.testing.assert_close(run(lasso_attention, fused=True, **how)(*strided, lam, rho), wanted)
    shared = lasso_attention(q, k[:1], v[:1], enable_gqa=True, fused=True, **how)
    beside = lasso_attention(q, k[:1], v[:1], enable_gqa=True, fused=False, **how)
    assert max(relative_errors([shared], [beside])) < TOL


@pytest.mark.parametrize("empty", [dict(N=0), dict(M=0), dict(leading=(0, H)), dict(Dv=0)], ids=str)
def test_nothing_is_launched_where_there_is_nothing(empty):
    given = inputs(**empty)
    ours = output_and_gradients(run(lasso_attention, fused=True), given)
    assert_all_close(ours, output_and_gradients(run(lasso_attention, fused=False), given), 0.0)


@pytest.mark.parametrize("power", [None, 5])
@pytest.mark.parametrize(
    "dtype, tol", [(torch.float32, 1e-4), (torch.float16, 2e-2), (torch.bfloat16, 6e-2)]
)
def test_other_dtypes(small_blocks, dtype, tol, power):
    """Against the reference in float64, from the same rounded numbers.

    To round them to bfloat16 changes gradients of q and k by 4 to 9 %, before any sum. Those of λ
    and ρ in float16 are sums over all pairs of factors that are rounded to TF32.
    """
    if DEVICE == "cuda" and dtype == torch.float32:
        tol = TOL
    how = dict(iterations=5, power=power, exclude_self=True)
    given = [x.detach().to(dtype).requires_grad_() for x in inputs(24, 24, D=16, Dv=16)]
    compare(given, tol, sums=dtype != torch.bfloat16, **how)


def test_large_and_small_codes(small_blocks):
    """The fifth power of a code is beyond float32, either way."""
    for size in (1e-5, 1e6):
        q, k, v, lam, rho = (x.detach().float() for x in inputs(20, 20, size=30 * size))
        given = [x.requires_grad_() for x in (q, k, v, lam * size, rho)]
        out, *grads = output_and_gradients(run(lasso_attention, fused=True, power=5), given)
        beside, *theirs = output_and_gradients(run(lasso_attention, fused=False, power=5), given)
        assert all(x.isfinite().all() for x in (out, *grads))
        assert out.any()
        assert max(relative_errors((out, *grads), (beside, *theirs))) < 1e-3


def test_keys_that_are_not_finite_show(small_blocks):
    q, k, v, lam, rho = (x.detach() for x in inputs(20, 20))
    k[1, 3, 0] = torch.nan
    out = lasso_attention(q, k, v, lam=lam, rho=rho, fused=True)
    assert out[0].isfinite().all() and out[1].isnan().all()


def test_memory_does_not_grow_with_n_times_m(monkeypatch):
    """Not even in bytes: so the interpreter counts what it copies."""
    from derived_attention.sparse_coding import triton as splitting

    if DEVICE == "cpu":
        monkeypatch.setattr(splitting, "blocks", lambda *_: sizes(128))
    N, D, steps = 256, 4, 2
    given = inputs(N, N, D, D)
    with Largest() as largest:
        output_and_gradients(run(lasso_attention, fused=True, iterations=steps), given)
    assert 0 < largest.numel <= 8 * steps * H * N * D < N * N


def test_a_second_derivative_is_refused():
    q, *rest = inputs(5, 5)
    out = run(lasso_attention, fused=True, iterations=2)(q, *rest)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(iterations=17), "iterations is 17; expected at most 16"),
        (dict(D=129), "q has 129 features; expected at most 128"),
        (dict(Dv=129), "v has 129 features; expected at most 128"),
    ],
    ids=str,
)
def test_what_the_kernels_are_not_for(change, message):
    iterations = change.pop("iterations", 2)
    q, k, v, *_ = inputs(4, 4, **change)
    with pytest.raises(ValueError, match=f"fused is True, and {message}"):
        lasso_attention(q, k, v, iterations=iterations, fused=True)


def test_only_who_insists_gets_kernels(monkeypatch):
    q, k, v, *_ = (x.detach() for x in inputs(4, 4))
    monkeypatch.setitem(sys.modules, "derived_attention.sparse_coding.triton", None)
    for fused in (None, False):
        assert lasso_attention(q, k, v, fused=fused).isfinite().all()
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    q, k, v = q.cpu(), k.cpu(), v.cpu()
    with pytest.raises(ValueError, match="fused is True, and q is on cpu"):
        lasso_attention(q, k, v, fused=True)


def test_a_layer_hands_it_on():
    made = dict(device=DEVICE, dtype=DTYPE, power=5, iterations=3, learned=True)
    x = tensors((2, 9, 8), dtype=DTYPE, device=DEVICE)[0]
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        layer = LassoAttention(8, H, batch_first=True, projected=False, fused=fused, **made)
        out = layer(x, x, x, need_weights=False)[0]
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    assert max(relative_errors(*found)) < TOL
