"""Softmax attention: the formula, its fused form, and the checks of the arguments."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from derived_attention.attention.checks import check_attention, check_positive
from derived_attention.attention.softmax import (
    _fused_widths,
    _open_dead_rows,
    attention_weights,
    causal_mask,
    sdpa,
    softmax_attention,
    softmax_attention_reference,
)

FORMS = [softmax_attention, softmax_attention_reference]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Largest error allowed between two ways of computing the same thing in one dtype.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float64: 1e-12,
    torch.bfloat16: 5e-2,
    torch.float16: 5e-3,
}
B, H, N, M, D, DV = 2, 3, 5, 7, 8, 6

cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NOT TESTED: this machine has no CUDA device"
)


def tensors(*shapes, dtype=torch.float64, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    return [x.to(device, dtype).requires_grad_() for x in made]


def qkv(leading=(B, H), n=N, m=M, d=D, dv=DV, **options):
    return tensors((*leading, n, d), (*leading, m, d), (*leading, m, dv), **options)


def output_and_gradients(function, inputs, **options):
    """The output, and the gradients of a fixed linear functional of it."""
    leaves = [x for x in inputs if x.requires_grad]
    out = function(*inputs, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    return out, *torch.autograd.grad((out * weights.view_as(out)).sum(), leaves)


def assert_all_close(left, right, tol):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def boolean(*shape, seed=1):
    """A random boolean mask whose rows all keep at least one key."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    return mask | (torch.arange(shape[-1]) == 0)


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "boolean (N, M)": {"attn_mask": boolean(N, M)},
    "boolean padding": {"attn_mask": boolean(B, 1, 1, M)},
    "boolean full": {"attn_mask": boolean(B, H, N, M)},
    "boolean per head": {"attn_mask": boolean(H, 1, M)},
    "boolean transposed": {"attn_mask": boolean(M, N).mT | (torch.arange(M) == 0)},
    "float (N, M)": {"attn_mask": torch.randn(N, M)},
    "float with -inf": {"attn_mask": torch.randn(N, M).masked_fill(~boolean(N, M), -math.inf)},
    "float full": {"attn_mask": torch.randn(B, H, N, M)},
    "float per query": {"attn_mask": torch.randn(N, 1)},
    "scale": {"scale": 0.7},
}


def options_for(name, dtype):
    options = dict(MASKS[name])
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask.to(dtype)
    return options


def torch_sdpa(q, k, v, attn_mask=None, **options):
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*q.shape[:-1], k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)


# --- the formula -------------------------------------------------------------------------------


def test_weights_are_the_formula_row_by_row():
    q, k, _ = qkv(leading=())
    A = attention_weights(q, k)
    for i in range(N):
        e = [math.exp((q[i] @ k[j]).item() / math.sqrt(D)) for j in range(M)]
        for j in range(M):
            assert A[i, j].item() == pytest.approx(e[j] / sum(e), rel=1e-12)


@pytest.mark.parametrize("name", MASKS)
def test_weights_are_a_distribution_on_the_allowed_keys(name):
    q, k, _ = qkv()
    A = attention_weights(q, k, **options_for(name, torch.float64))
    torch.testing.assert_close(A.sum(-1), torch.ones(B, H, N, dtype=A.dtype))
    mask = MASKS[name].get("attn_mask", causal_mask(N, M) if name == "causal" else None)
    if mask is not None:
        forbidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
        assert bool((A[forbidden.expand_as(A)] == 0).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_parity_with_pytorch(form, name, dtype):
    options = options_for(name, dtype)
    ours = output_and_gradients(form, qkv(dtype=dtype), **options)
    theirs = output_and_gradients(torch_sdpa, qkv(dtype=dtype), **options)
    assert_all_close(ours, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize("leading", [(), (H,), (B, H), (2, B, H), (2, 1, B, H)], ids=str)
@pytest.mark.parametrize("name", ["none", "causal", "boolean (N, M)", "float (N, M)"])
@pytest.mark.parametrize("dv", [DV, D, D + 3])
def test_fast_equals_reference(leading, name, dv):
    options = options_for(name, torch.float64)
    fast, reference = (output_and_gradients(f, qkv(leading, dv=dv), **options) for f in FORMS)
    assert_all_close(fast, reference, 1e-12)


@pytest.mark.parametrize("shape", [(3, 1, N, M), (2, 1, 1, N, M), (1, 3, H, 1, M), (2, 3, 1, N, 1)])
def test_masks_broadcast_over_many_leading_dimensions(shape):
    for mask in (boolean(*shape), torch.randn(shape, dtype=torch.float64)):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            fast = output_and_gradients(softmax_attention, qkv((2, 3, H)), attn_mask=mask)
        reference = output_and_gradients(
            softmax_attention_reference, qkv((2, 3, H)), attn_mask=mask
        )
        assert_all_close(fast, reference, 1e-12)


@pytest.mark.parametrize("shape", [(N, M), (M,), (N, 1), (B, 1, N, M), (H, 1, M), (B, H, N, M)])
def test_gradient_of_a_float_mask(shape):
    def with_mask(form):
        return lambda q, k, v, mask: form(q, k, v, attn_mask=mask)

    inputs = [*qkv(), *tensors(shape, seed=3)]
    results = [output_and_gradients(with_mask(form), inputs) for form in FORMS]
    assert results[0][-1].shape == shape and bool((results[0][-1] != 0).any())
    assert_all_close(*results, 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form):
    mask = boolean(3, 4)
    mask[1] = False  # a query that may attend nothing
    inputs = qkv((1, 2), n=3, m=4, d=3, dv=2)
    assert torch.autograd.gradcheck(lambda q, k, v: form(q, k, v, attn_mask=mask), inputs)
    assert torch.autograd.gradcheck(lambda q, k, v: form(q, k, v, is_causal=True), inputs)
    bias = tensors((3, 4), seed=2)[0]
    assert torch.autograd.gradcheck(
        lambda q, k, v, b: form(q, k, v, attn_mask=b), [*inputs, bias], nondet_tol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_half_precision_error_is_one_rounding_or_so(form, dtype):
    inputs = qkv(n=64, m=64, d=32, dv=32, dtype=dtype)
    exact = softmax_attention_reference(*(x.detach().double() for x in inputs))
    error = (form(*inputs).double() - exact).norm() / exact.norm()
    assert error < torch.finfo(dtype).eps


def test_large_scores_do_not_overflow():
    q, k, v = qkv(dtype=torch.float32)
    for form in FORMS:
        results = output_and_gradients(form, [q * 300, k * 300, v])
        assert all(bool(x.isfinite().all()) for x in results)


def test_mask_is_left_as_it_was():
    mask = boolean(N, M)
    mask[0] = False
    bias = torch.zeros(N, M, dtype=torch.float64).masked_fill(~mask, -math.inf)
    for form in FORMS:
        for given_mask in (mask, bias):
            before = given_mask.clone()
            form(*qkv(), attn_mask=given_mask)
            assert torch.equal(given_mask, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_float32_mask_serves_every_dtype(dtype):
    mask = torch.randn(N, M)
    for form in FORMS:
        out = form(*qkv(dtype=dtype), attn_mask=mask)
        expected = form(*qkv(dtype=dtype), attn_mask=mask.to(dtype))
        assert out.dtype == dtype and torch.equal(out, expected)


# --- rows with nothing to attend, and other small shapes ---------------------------------------


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], ids=str)
@pytest.mark.parametrize("kind", ["boolean", "float"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_fully_masked_row_gives_zeros(form, dtype, kind, backend):
    keep = boolean(N, M)
    keep[2] = False
    mask = (
        keep if kind == "boolean" else torch.zeros(N, M, dtype=dtype).masked_fill(~keep, -math.inf)
    )
    q, k, v = qkv(dtype=dtype)
    with sdpa_kernel(backend):
        out, dq, dk, dv = output_and_gradients(form, [q, k, v], attn_mask=mask)
    assert bool((out[:, :, 2] == 0).all()) and bool((dq[:, :, 2] == 0).all())
    assert all(bool(x.isfinite().all()) for x in (out, dq, dk, dv))
    others = [0, 1, 3, 4]
    expected = torch_sdpa(q[:, :, others], k, v, attn_mask=mask[others])
    torch.testing.assert_close(
        out[:, :, others], expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def test_no_kernel_meets_a_row_of_nothing():
    """Kernels on other devices give NaN there, so the mask that they get must not have one."""
    keep = boolean(N, M)
    keep[2] = False
    opened, alive = _open_dead_rows(keep, torch.float32)
    assert bool(opened.any(-1).all()) and torch.equal(opened & alive, keep)
    bias = torch.randn(N, M).masked_fill(~keep, -math.inf)
    opened, alive = _open_dead_rows(bias, torch.float32)
    assert bool(opened.isfinite().any(-1).all()) and torch.equal(
        opened[alive[:, 0]], bias[alive[:, 0]]
    )
    assert alive[:, 0].tolist() == [True, True, False, True, True]


@pytest.mark.parametrize("form", FORMS)
def test_nothing_may_be_attended_at_all(form):
    for mask in (torch.tensor(False), torch.full((M,), -math.inf), torch.zeros(N, M).bool()):
        for x in output_and_gradients(form, qkv(), attn_mask=mask):
            assert bool((x == 0).all())


@pytest.mark.parametrize("form", FORMS)
def test_gradient_of_a_float_mask_is_finite_at_a_fully_masked_row(form):
    mask = torch.zeros(N, M, dtype=torch.float64)
    mask[2], mask[0, 1] = -math.inf, -math.inf
    mask.requires_grad_()
    *_, gradient = output_and_gradients(
        lambda q, k, v, b: form(q, k, v, attn_mask=b), [*qkv(), mask]
    )
    assert bool(gradient.isfinite().all()) and bool((gradient[2] == 0).all())
    assert float(gradient[0, 1]) == 0


EMPTY = {"no batch": ((0, H), N, M), "no head": ((B, 0), N, M)}
EMPTY |= {"no query": ((B, H), 0, M), "no key": ((B, H), N, 0), "nothing": ((0, 0), 0, 0)}


@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "float"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_empty_inputs(form, dtype, kind, shape):
    leading, n, m = shape
    options = {"boolean": torch.ones(n, m).bool(), "float": torch.zeros(n, m, dtype=dtype)}
    options = {"attn_mask": options[kind]} if kind in options else {"is_causal": kind == "causal"}
    results = output_and_gradients(form, qkv(leading, n=n, m=m, dtype=dtype), **options)
    assert results[0].shape == (*leading, n, DV)
    assert all(bool((x == 0).all()) for x in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_one_key_gives_its_value(form, dtype):
    for n in (1, N):
        q, k, v = qkv(n=n, m=1, dtype=dtype)
        for options in ({}, {"is_causal": True}, {"attn_mask": torch.ones(1, 1).bool()}):
            out, dq, dk, _ = output_and_gradients(form, [q, k, v], **options)
            tol = TOLERANCE[dtype]
            torch.testing.assert_close(out, v.expand_as(out), rtol=tol, atol=tol)
            assert float(dq.abs().max()) <= tol and float(dk.abs().max()) <= 10 * tol


# --- causality ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [(6, 6), (4, 9), (9, 4), (70, 70)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_causal_attention_sees_no_future(form, lengths, dtype):
    n, m = lengths
    q, k, v = qkv(n=n, m=m, dtype=dtype)
    out = form(q, k, v, is_causal=True)
    for t in range(min(n, m) - 1):
        noise = torch.zeros(m, 1, dtype=dtype)
        noise[t + 1 :] = 5
        changed = form(q, k + noise, v - 3 * noise, is_causal=True)
        assert torch.equal(out[..., : t + 1, :], changed[..., : t + 1, :])
        assert not torch.equal(out[..., t + 1 :, :], changed[..., t + 1 :, :])
        dk, dv = torch.autograd.grad(out[..., : t + 1, :].sum(), [k, v], retain_graph=True)
        assert bool((dk[..., t + 1 :, :] == 0).all()) and bool((dv[..., t + 1 :, :] == 0).all())


@pytest.mark.parametrize("form", FORMS)
def test_causal_is_the_top_left_triangle(form):
    for n, m in [(N, M), (M, N), (N, N)]:
        causal = form(*qkv(n=n, m=m), is_causal=True)
        masked = form(*qkv(n=n, m=m), attn_mask=causal_mask(n, m))
        torch.testing.assert_close(causal, masked, rtol=1e-12, atol=1e-12)


# --- no matrix in memory -----------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tensors_in(out)]
        self.numel = max([self.numel, *sizes])
        return out


def tensors_in(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def views():
    q, k, v = qkv((2, 2), n=160, m=160, d=8, dv=8)
    by_length = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    by_column = [x.detach().mT.contiguous().mT for x in (q, k, v)]
    expanded = [q.detach(), *(x.detach()[:1].expand(2, -1, -1, -1) for x in (k, v))]
    column = [x.detach()[..., :1].mT.contiguous().mT for x in (q, k, v)]
    one_row = [torch.randn(2, 1, 8, 160).mT[..., :1, :].double() for _ in range(3)]
    return {
        "contiguous": (q, k, v),
        "(B, N, H, D) transposed": by_length,
        "last stride not 1": by_column,
        "expanded over the batch": expanded,
        "one column, last stride not 1": column,
        "one row": one_row,
        "values narrower": (q, k, v[..., :5]),
        "values wider": (q, k, torch.cat([v, v], -1)),
        "two dimensions": (q[0, 0], k[0, 0], v[0, 0]),
        "three dimensions": (q[0], k[0], v[0]),
        "five dimensions": (q[None], k[None], v[None]),
    }


@pytest.mark.parametrize("name", views())
def test_fused_kernel_is_kept(name):
    q, k, v = (x.detach().requires_grad_() for x in views()[name])
    n, m = q.shape[-2], k.shape[-2]
    options = [{}, {"is_causal": True}, {"attn_mask": boolean(m)}, {"attn_mask": boolean(n, m)}]
    options.append({"attn_mask": torch.randn(n, m)})
    for option in options:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises where no fused kernel will do
            fast = output_and_gradients(softmax_attention, [q, k, v], **option)
        reference = output_and_gradients(softmax_attention_reference, [q, k, v], **option)
        assert_all_close(fast, reference, 1e-11)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_kernel_is_kept_in_every_dtype(dtype):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output_and_gradients(softmax_attention, qkv(dtype=dtype), attn_mask=boolean(N, M))


def test_learned_mask_keeps_the_fused_kernel_where_no_gradient_is_asked_for():
    mask = torch.nn.Parameter(torch.randn(N, M, dtype=torch.float64))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with torch.no_grad():
            softmax_attention(*qkv(), attn_mask=mask)
        # With a gradient PyTorch has no fused kernel: its limit, which the docstring states.
        with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="kernel"):
            softmax_attention(*qkv(), attn_mask=mask)


@pytest.mark.parametrize("name", views())
@pytest.mark.parametrize("masked", ["none", "causal", "padding"])
def test_no_matrix_is_stored(name, masked):
    inputs = [x.detach().requires_grad_() for x in views()[name]]
    n, m = inputs[0].shape[-2], inputs[1].shape[-2]
    matrix = inputs[0].shape[:-1].numel() * m
    options = (
        {"attn_mask": boolean(m)} if masked == "padding" else {"is_causal": masked == "causal"}
    )
    sizes = []
    for form in FORMS:
        with Largest() as largest:
            output_and_gradients(form, inputs, **options)
        sizes.append(largest.numel)
    assert sizes[1] >= matrix, "the recorder must see the reference's matrix"
    if n > 1:
        assert sizes[0] < matrix / 2


def test_widths_for_kernels():
    assert _fused_widths(64, 40, "cpu") == (64, 64) == _fused_widths(40, 64, "cpu")
    assert _fused_widths(64, 64, "cuda") == (64, 64)
    assert _fused_widths(33, 4, "cuda") == (40, 8)


def test_sdpa_default_scale_ignores_the_padding():
    q, k, v = qkv(dv=3 * D)
    torch.testing.assert_close(sdpa(q, k, v), softmax_attention_reference(q, k, v))


# --- compilers, autocast -----------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
def test_compiles_without_a_break(name):
    torch._dynamo.reset()
    options = options_for(name, torch.float64)
    compiled = torch.compile(softmax_attention, fullgraph=True, backend="aot_eager")
    ours = output_and_gradients(compiled, qkv(), **options)
    assert_all_close(ours, output_and_gradients(softmax_attention, qkv(), **options), 1e-12)


def test_compiles_for_lengths_and_scales_that_change():
    torch._dynamo.reset()
    compiled = torch.compile(softmax_attention, fullgraph=True, dynamic=True, backend="eager")
    for n, scale in [(4, None), (5, 0.3), (6, 0.4), (7, 0.5)]:
        expected = softmax_attention(*qkv(n=n), scale=scale)
        torch.testing.assert_close(compiled(*qkv(n=n), scale=scale), expected)


def test_compiled_by_inductor():
    torch._dynamo.reset()
    options = {"attn_mask": boolean(N, M)}
    compiled = torch.compile(softmax_attention, fullgraph=True)
    inputs = qkv(dtype=torch.float32)
    ours = output_and_gradients(compiled, inputs, **options)
    assert_all_close(ours, output_and_gradients(softmax_attention, inputs, **options), 1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MASKS)
def test_autocast(form, name):
    inputs = qkv(dtype=torch.float32)
    exact = form(*(x.double() for x in inputs), **options_for(name, torch.float64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = form(*inputs, **options_for(name, torch.float32))
        mixed = form(inputs[0].bfloat16(), *inputs[1:], **options_for(name, torch.float32))
    assert out.dtype == mixed.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(mixed.double(), exact, rtol=3e-2, atol=3e-2)


def test_vmap_over_a_mask():
    q, k, v = (x.detach() for x in qkv((H,)))
    masks = boolean(4, N, M)
    mapped = torch.vmap(lambda mask: softmax_attention(q, k, v, attn_mask=mask))(masks)
    looped = torch.stack([softmax_attention(q, k, v, attn_mask=mask) for mask in masks])
    torch.testing.assert_close(mapped, looped)


# --- properties over many shapes ---------------------------------------------------------------


@st.composite
def problems(draw):
    leading = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    n, m, dv = (draw(st.integers(0, 5)) for _ in range(3))
    d = draw(st.integers(1, 6))
    seed = draw(st.integers(0, 99))
    q, k, v = qkv(leading, n=n, m=m, d=d, dv=dv, seed=seed)
    kind = draw(st.sampled_from(["none", "causal", "boolean", "float"]))
    if kind in ("none", "causal"):
        return q, k, v, {"is_causal": kind == "causal"}
    full = (*leading, n, m)
    shape = [size if draw(st.booleans()) else 1 for size in full][draw(st.integers(0, len(full))) :]
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(shape, generator=generator) > draw(st.sampled_from([0.0, 0.5, 0.9]))
    if kind == "boolean":
        return q, k, v, {"attn_mask": keep}
    bias = torch.randn(shape, generator=generator, dtype=torch.float64)
    return q, k, v, {"attn_mask": bias.masked_fill(~keep, -math.inf)}


@settings(max_examples=150, deadline=None)
@given(problems())
def test_fast_equals_reference_for_any_shape(problem):
    q, k, v, options = problem
    fast, reference = (output_and_gradients(form, [q, k, v], **options) for form in FORMS)
    assert fast[0].shape == (*q.shape[:-1], v.shape[-1])
    assert all(bool(x.isfinite().all()) for x in fast)
    assert_all_close(fast, reference, 1e-10)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.floats(-50, 50), st.integers(0, 99))
def test_order_of_keys_and_a_constant_in_the_scores_change_nothing(n, m, constant, seed):
    q, k, v = qkv(n=n, m=m, seed=seed)
    out = softmax_attention(q, k, v)
    order = torch.randperm(m, generator=torch.Generator().manual_seed(seed))
    shifted = torch.full((n, m), constant, dtype=torch.float64)
    torch.testing.assert_close(softmax_attention(q, k[..., order, :], v[..., order, :]), out)
    torch.testing.assert_close(softmax_attention(q, k, v, attn_mask=shifted), out)


# --- errors ------------------------------------------------------------------------------------


def with_value(shape, value):
    mask = torch.zeros(shape)
    mask.view(-1)[3] = value
    return mask


X = torch.zeros(B, H, N, D)
BAD = {
    "q: not a tensor": (TypeError, "q is of type list", {"q": [1.0]}),
    "q: integers": (TypeError, "q has dtype torch.int64", {"q": X.long()}),
    "k: complex": (TypeError, "k has dtype torch.complex64", {"k": X.cfloat()}),
    "v: boolean": (TypeError, "v has dtype torch.bool", {"v": X.bool()}),
    "k: dtype": (
        TypeError,
        r"k has dtype torch.float64; expected torch.float32",
        {"k": X.double()},
    ),
    "v: dtype": (TypeError, r"v has dtype torch.float16; expected torch.float32", {"v": X.half()}),
    "k: device": (ValueError, "k is on device meta; expected cpu", {"k": X.to("meta")}),
    "v: device": (ValueError, "v is on device meta; expected cpu", {"v": X.to("meta")}),
    "q: 1-D": (ValueError, r"q has shape \(8,\); expected \(\.\.\., N, D\)", {"q": X[0, 0, 0]}),
    "q: D = 0": (ValueError, r"q has shape \(2, 3, 5, 0\).* at least 1", {"q": X[..., :0]}),
    "k: D": (ValueError, r"k has shape .*7\); expected \(2, 3, 5, 8\)", {"k": X[..., :7]}),
    "k: heads": (ValueError, r"k has shape \(2, 1, 5, 8\); expected", {"k": X[:, :1]}),
    "k: dimensions": (ValueError, r"k has shape \(3, 5, 8\); expected", {"k": X[0]}),
    "k: 1-D": (ValueError, r"k has shape \(8,\); expected \(2, 3, M, 8\)", {"k": X[0, 0, 0]}),
    "v: length": (ValueError, r"v has shape .* expected \(2, 3, 5, 8\)", {"v": X[:, :, :4]}),
    "v: heads": (ValueError, r"v has shape .* expected \(2, 3, 5, 8\)", {"v": X[:, :2]}),
    "v: 0-D": (ValueError, r"v has shape \(\); expected \(2, 3, 5, Dv\)", {"v": torch.zeros(())}),
    "mask: not a tensor": (TypeError, "attn_mask is of type list", {"attn_mask": [[True]]}),
    "mask: integers": (TypeError, "attn_mask has dtype", {"attn_mask": torch.ones(N, N).long()}),
    "mask: device": (ValueError, "attn_mask is on", {"attn_mask": torch.ones(N, N, device="meta")}),
    "mask: shape": (ValueError, r"attn_mask has shape \(5, 4\)", {"attn_mask": torch.ones(N, 4)}),
    "mask: batch": (ValueError, "attn_mask has shape", {"attn_mask": torch.ones(4, 1, N, N)}),
    "mask: too many": (ValueError, "attn_mask has", {"attn_mask": torch.ones(1, B, H, N, N)}),
    "mask: NaN": (
        ValueError,
        "attn_mask contains NaN",
        {"attn_mask": with_value((N, N), math.nan)},
    ),
    "mask: inf": (ValueError, r"attn_mask contains \+inf", {"attn_mask": with_value(N, math.inf)}),
    "both": (
        ValueError,
        "attn_mask and is_causal",
        {"attn_mask": X[0, 0, :, :5], "is_causal": True},
    ),
    "is_causal": (TypeError, "is_causal is 1; expected True or False", {"is_causal": 1}),
    "scale: NaN": (ValueError, "scale is nan", {"scale": math.nan}),
    "scale: inf": (ValueError, "scale is inf", {"scale": math.inf}),
    "scale: zero": (ValueError, "scale is 0; expected a finite positive number", {"scale": 0}),
    "scale: negative": (ValueError, "scale is -1.0", {"scale": -1.0}),
    "scale: text": (TypeError, "scale is of type str", {"scale": "1"}),
    "scale: boolean": (TypeError, "scale is of type bool", {"scale": True}),
    "scale: tensor": (TypeError, "scale is of type Tensor", {"scale": torch.tensor(1.0)}),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("form", FORMS)
def test_bad_argument_is_named(form, bad):
    error, match, changed = bad
    with pytest.raises(error, match=match):
        form(**{"q": X, "k": X, "v": X, **changed})


def test_weights_check_their_arguments_too():
    with pytest.raises(ValueError, match="k has shape"):
        attention_weights(X, X[0])
    with pytest.raises(ValueError, match="attn_mask contains NaN"):
        attention_weights(X, X, attn_mask=torch.full((N, N), math.nan))


def test_checks_give_the_scale():
    assert check_attention(X, X) == 1 / math.sqrt(D)
    assert check_attention(X, X, X, scale=2) == 2.0
    assert check_positive("beta", 3) == 3.0
    with pytest.raises(ValueError, match="beta is 0"):
        check_positive("beta", 0)


def test_shapes_are_checked_but_values_are_not_where_there_are_none():
    mask = torch.ones(N, N, device="meta")
    out = softmax_attention(*(X.to("meta") for _ in range(3)), attn_mask=mask)
    assert out.shape == X.shape


def test_values_of_a_mask_are_not_looked_at_under_a_compiler():
    torch._dynamo.reset()
    compiled = torch.compile(softmax_attention, fullgraph=True, backend="eager")
    out = compiled(X, X, X, attn_mask=torch.full((N, N), math.nan))
    assert bool(out.isnan().any())


# --- on a GPU ----------------------------------------------------------------------------------

FUSED = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]


@cuda
@pytest.mark.parametrize("name", ["none", "causal", "boolean (N, M)", "float with -inf"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_equals_float64_on_cpu(dtype, name):
    options = options_for(name, dtype)
    exact = output_and_gradients(
        softmax_attention_reference,
        [x.detach().double().requires_grad_() for x in qkv(dtype=dtype)],
        **options_for(name, torch.float64),
    )
    on_gpu = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    ours = output_and_gradients(softmax_attention, qkv(dtype=dtype, device="cuda"), **on_gpu)
    tol = max(TOLERANCE[dtype], 1e-5 if dtype == torch.float32 else 0)
    assert_all_close([x.cpu().double() for x in ours], exact, 2 * tol)


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("widths", [(64, 64), (33, 33), (64, 40), (40, 64), (1, 1)], ids=str)
def test_cuda_fused_kernel_is_kept(widths, dtype):
    d, dv = widths
    mask = boolean(N, M)
    mask[2] = False
    for options in ({}, {"is_causal": True}, {"attn_mask": mask.cuda()}):
        with sdpa_kernel(FUSED):
            out = output_and_gradients(
                softmax_attention, qkv(d=d, dv=dv, dtype=dtype, device="cuda"), **options
            )
        assert all(bool(x.isfinite().all()) for x in out)
        assert "attn_mask" not in options or bool((out[0][:, :, 2] == 0).all())


@cuda
def test_cuda_no_synchronisation_without_a_float_mask():
    inputs = qkv(dtype=torch.float32, device="cuda")
    mask = boolean(N, M).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        softmax_attention(*inputs)
        softmax_attention(*inputs, is_causal=True)
        softmax_attention(*inputs, attn_mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@cuda
def test_cuda_nan_mask_is_refused():
    with pytest.raises(ValueError, match="attn_mask contains NaN"):
        softmax_attention(
            *qkv(device="cuda"), attn_mask=torch.full((N, M), math.nan, device="cuda")
        )
