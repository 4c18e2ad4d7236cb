"""Softmax attention: the formula, and its agreement with and differences from PyTorch's own.

The properties of every mechanism are tested in `test_contract`.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DTYPES,
    DV,
    TOLERANCE,
    B,
    D,
    H,
    M,
    N,
    assert_all_close,
    boolean,
    cuda,
    needs_inductor,
    output_and_gradients,
    qkv,
    tensors,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from derived_attention import softmax_attention_reference
from derived_attention.common.convention import extend
from derived_attention.softmax.controls import (
    PositionOnlyAttention,
    identity_attention,
    uniform_attention,
)
from derived_attention.softmax.core import (
    attention_weights,
    kernel_widths,
    softmax_attention,
)

FORMS = [softmax_attention, softmax_attention_reference]
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


def test_weights_check_their_arguments_too():
    q, k, _ = qkv()
    with pytest.raises(ValueError, match="k has shape"):
        attention_weights(q, k[0])
    with pytest.raises(ValueError, match="attn_mask contains NaN"):
        attention_weights(q, k, attn_mask=torch.full((N, M), math.nan))


# --- agreement with PyTorch, and differences -----------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
def test_parity_with_pytorch(name):
    for dtype in DTYPES:
        options = {
            key: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x
            for key, x in MASKS[name].items()
        }
        theirs = output_and_gradients(torch_sdpa, qkv(dtype=dtype), **options)
        for form in FORMS:
            ours = output_and_gradients(form, qkv(dtype=dtype), **options)
            assert_all_close(ours, theirs, TOLERANCE[dtype], f"{form.__name__}, {dtype}")


@pytest.mark.parametrize("form", FORMS)
def test_dropout_is_pytorchs(form):
    q, k, v = qkv()
    for options in ({}, {"is_causal": True}, {"attn_mask": boolean(N, M)}, {"scale": 0.3}):
        results = []
        for function in (form, F.scaled_dot_product_attention):
            torch.manual_seed(7)
            results.append(output_and_gradients(function, [q, k, v], dropout_p=0.4, **options))
        assert_all_close(*results, 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_shared_heads_are_pytorchs(form):
    q, _, _ = qkv((B, 4))
    for groups in (1, 2, 4):
        _, k, v = qkv((B, groups), seed=1)
        for options in ({}, {"is_causal": True}, {"attn_mask": boolean(N, M)}):
            results = [
                output_and_gradients(function, [q, k, v], enable_gqa=True, **options)
                for function in (form, F.scaled_dot_product_attention)
            ]
            assert_all_close(*results, 1e-12, f"{groups}, {options}")


def test_wrong_shared_heads_are_named_as_they_were_given():
    q, k, v = (torch.zeros(B, heads, 4, D) for heads in (4, 2, 2))
    for given, mask, match in (
        ((q, k[..., :3], v), None, r"k has shape \(2, 2, 4, 3\); expected \(2, 2, 4, 8\)"),
        ((q, k, v[:, :, :3]), None, r"v has shape \(2, 2, 3, 8\); expected \(2, 2, 4, 8\)"),
        ((q, k, v), boolean(B, 3, 4, 4), r"attn_mask has shape \(2, 3, 4, 4\)"),
    ):
        with pytest.raises(ValueError, match=match):
            softmax_attention(*given, mask, enable_gqa=True)
    with pytest.raises(TypeError, match=r"softmax_attention\(\) .* 'mask'; use attn_mask"):
        softmax_attention(q, q, q, mask=boolean(4, 4))


@pytest.mark.parametrize("form", FORMS)
def test_differences_from_pytorch_are_those_of_the_docstring(form):
    """PyTorch takes what the contract shows to be refused here, but not another dtype."""
    q, k, v = qkv(dtype=torch.float32)
    double = torch.randn(N, M).double()
    with pytest.raises(RuntimeError, match="dtype"):
        F.scaled_dot_product_attention(q, k, v, attn_mask=double)
    assert torch.equal(form(q, k, v, attn_mask=double), form(q, k, v, attn_mask=double.float()))
    for bad in (math.nan, math.inf):
        F.scaled_dot_product_attention(q, k, v, attn_mask=torch.full((N, M), bad))
    F.scaled_dot_product_attention(q, k, v, scale=-1.0)
    F.scaled_dot_product_attention(q, k[:1], v[:1])
    with pytest.raises(ValueError, match="k has shape"):
        form(q, k[:1], v[:1])


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], ids=str)
def test_rows_beside_a_fully_masked_one_are_pytorchs(backend):
    keep, others = boolean(N, M), [0, 1, 3, 4]
    keep[2] = False
    for dtype in DTYPES:
        q, k, v = qkv(dtype=dtype)
        bias = torch.zeros(N, M, dtype=dtype).masked_fill(~keep, -math.inf)
        for mask in (keep, bias):
            with sdpa_kernel(backend):
                out = softmax_attention(q, k, v, attn_mask=mask)
            expected = torch_sdpa(q[:, :, others], k, v, attn_mask=mask[others])
            assert bool((out[:, :, 2] == 0).all())
            assert_all_close([out[:, :, others]], [expected], TOLERANCE[dtype], f"{dtype}")


# --- always by a fused kernel --------------------------------------------------------------------


def test_masks_broadcast_over_many_leading_dimensions():
    for shape in [(3, 1, N, M), (2, 1, 1, N, M), (1, 3, H, 1, M), (2, 3, 1, N, 1)]:
        for mask in (boolean(*shape), torch.randn(shape, dtype=torch.float64)):
            inputs = qkv((2, 3, H))
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                fast = output_and_gradients(softmax_attention, inputs, attn_mask=mask)
            slow = output_and_gradients(softmax_attention_reference, inputs, attn_mask=mask)
            assert_all_close(fast, slow, 1e-12, f"{shape}, {mask.dtype}")


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


def test_fused_kernel_is_kept():
    for name, given_views in views().items():
        inputs = [x.detach().requires_grad_() for x in given_views]
        n, m = (x.shape[-2] for x in inputs[:2])
        options = [{}, {"is_causal": True}, {"attn_mask": boolean(m)}, {"attn_mask": boolean(n, m)}]
        options.append({"attn_mask": torch.randn(n, m)})
        for option in options:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises without a fused kernel
                fast = output_and_gradients(softmax_attention, inputs, **option)
            reference = output_and_gradients(softmax_attention_reference, inputs, **option)
            assert_all_close(fast, reference, 1e-11, f"{name}, {option}")


def test_learned_mask_keeps_the_fused_kernel_where_no_gradient_is_asked_for():
    mask = torch.nn.Parameter(torch.randn(N, M, dtype=torch.float64))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with torch.no_grad():
            softmax_attention(*qkv(), attn_mask=mask)
        # PyTorch has no fused CPU kernel with a gradient for the mask.
        with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="kernel"):
            softmax_attention(*qkv(), attn_mask=mask)


def test_widths_for_kernels():
    assert kernel_widths(64, 40, "cpu") == (64, 64) == kernel_widths(40, 64, "cpu")
    assert kernel_widths(64, 64, "cuda") == (64, 64)
    assert kernel_widths(33, 4, "cuda") == (40, 8)


@pytest.mark.parametrize(
    ("leading", "n", "m"), [((0, H), N, M), ((B, 0), N, M), ((B, H), 0, M), ((B, H), N, 0)]
)
@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "float"])
def test_pytorch_s_kernel_never_sees_an_empty_tensor(leading, n, m, kind, monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)  # PyTorch 2.9 would crash
    mask = torch.arange(n)[:, None] > torch.arange(m)
    given = {"none": {}, "causal": {"is_causal": True}, "boolean": {"attn_mask": mask}}
    given["float"] = {"attn_mask": torch.zeros(n, m).masked_fill(mask, -math.inf)}
    out, *_ = output_and_gradients(softmax_attention, qkv(leading, n, m), **given[kind])
    assert out.shape == (*leading, n, DV) and not out.any()


@pytest.mark.parametrize(
    ("dim", "after", "before", "value"), [(-1, 1, 0, 1.0), (-2, 3, 2, 0.0), (-2, -2, 1, 0.5)]
)
def test_extended_tensors_are_padded_ones(dim, after, before, value):
    x = tensors((2, 3, 4))[0]
    padded = F.pad(x, (0, 0) * (-dim - 1) + (before, after), value=value)
    assert torch.equal(extend(x, after, dim, value, before), padded)


def test_no_width_may_be_extended():
    x = torch.zeros(2, 5, 0, requires_grad=True)
    for how in ({"dim": -1}, {}, {"dim": -3, "before": 1}):
        (slope,) = torch.autograd.grad(extend(x, 1, **how).sum(), x)
        assert slope.shape == x.shape


def test_meta_tensors_have_no_autocast():
    q, k, v = (x.to("meta") for x in qkv())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert softmax_attention(q, k, v).device.type == "meta"
        with pytest.raises(TypeError, match="k has dtype torch.float16"):
            softmax_attention(q, k.half(), v)


# --- compilers ---------------------------------------------------------------------------------


def test_compiles_for_lengths_and_scales_that_change():
    torch._dynamo.reset()
    compiled = torch.compile(softmax_attention, fullgraph=True, dynamic=True, backend="eager")
    for n, scale in [(4, None), (5, 0.3), (6, 0.4), (7, 0.5)]:
        expected = softmax_attention(*qkv(n=n), scale=scale)
        torch.testing.assert_close(compiled(*qkv(n=n), scale=scale), expected)


@needs_inductor
def test_compiled_by_inductor():
    torch._dynamo.reset()
    options = {"attn_mask": boolean(N, M)}
    compiled = torch.compile(softmax_attention, fullgraph=True)
    inputs = qkv(dtype=torch.float32)
    ours = output_and_gradients(compiled, inputs, **options)
    assert_all_close(ours, output_and_gradients(softmax_attention, inputs, **options), 1e-5)


def test_values_of_a_mask_are_not_looked_at_under_a_compiler():
    torch._dynamo.reset()
    compiled = torch.compile(softmax_attention, fullgraph=True, backend="eager")
    out = compiled(*qkv(), attn_mask=torch.full((N, M), math.nan))
    assert bool(out.isnan().any())


# --- controls of experiments: attention without content, and no attention ------------------------


def test_uniform_attention_is_the_mean_of_what_may_be_attended():
    q, k, v = qkv()
    assert_all_close([uniform_attention(q, k, v)], [v.mean(-2, True).expand(B, H, N, DV)], 1e-12)
    keep = boolean(N, M)
    mean = keep.double() / keep.sum(-1, keepdim=True) @ v
    assert_all_close([uniform_attention(q, k, v, keep)], [mean], 1e-12)
    out = uniform_attention(q, k, v, is_causal=True)
    running = v.cumsum(-2) / torch.arange(1, M + 1)[:, None]
    assert_all_close([out], [running[..., :N, :]], 1e-12)


def test_identity_attention_is_the_values():
    q, k, v = qkv(m=N)
    assert torch.equal(identity_attention(q, k, v), v)
    assert torch.equal(identity_attention(q, k, v, boolean(N, N)), v)
    with pytest.raises(ValueError, match="k has 7 rows; expected 5, as many as q"):
        identity_attention(*qkv())


def test_position_only_attention_reads_offsets_and_nothing_else():
    layer = PositionOnlyAttention(8, 2, length=6).double()
    torch.nn.init.normal_(layer.bias)
    x, other = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    H, A = layer(x, x, x, average_attn_weights=False)
    i, j = torch.arange(5)[:, None], torch.arange(5)
    assert_all_close([A], [layer.bias[:, j - i + 5].softmax(-1).expand_as(A)], 1e-12)
    assert torch.equal(layer(other, other, x)[0], layer(x, x, x)[0])
    assert_all_close([layer(x, x, x, need_weights=False)[0]], [H], 1e-12)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [True] * 5])
    for options in ({"is_causal": True}, {"key_padding_mask": padding}):
        H, A = layer(x, x, x, **options, average_attn_weights=False)
        fused = layer(x, x, x, **options, need_weights=False)[0]
        assert_all_close([fused], [H], 1e-12)
    assert not A[2].any() and not A[1, ..., 3:].any()
    bias = torch.randn(5, 5, dtype=torch.float64)
    A = layer(x, x, x, attn_mask=bias, average_attn_weights=False)[1]
    assert_all_close([A[0]], [(layer.bias[:, j - i + 5] + bias).softmax(-1)], 1e-12)


def test_position_only_attention_starts_as_uniform_attention_and_has_a_longest_sequence():
    layer = PositionOnlyAttention(8, 2, length=6)
    x = torch.randn(1, 6, 8)
    assert_all_close([layer(x, x, x)[1]], [torch.full((1, 6, 6), 1 / 6)], 1e-6)
    with pytest.raises(ValueError, match="length is 6; expected at least 7, the tokens given"):
        layer(*[torch.randn(1, 7, 8)] * 3)
    cross = PositionOnlyAttention(8, 2, length=6, cross=True)
    assert_all_close([cross(x[:, :2], x, x)[1]], [torch.full((1, 2, 6), 1 / 6)], 1e-6)
    with pytest.raises(ValueError, match="length is 0"):
        PositionOnlyAttention(8, 2, length=0)


# --- on a GPU ----------------------------------------------------------------------------------

FUSED = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]


@cuda
def test_cuda_fused_kernel_is_kept():
    mask = boolean(N, M)
    mask[2] = False
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for d, dv in [(64, 64), (33, 33), (64, 40), (40, 64), (1, 1)]:
            for options in ({}, {"is_causal": True}, {"attn_mask": mask.cuda()}):
                inputs = qkv(d=d, dv=dv, dtype=dtype, device="cuda")
                with sdpa_kernel(FUSED):
                    out = output_and_gradients(softmax_attention, inputs, **options)
                assert all(bool(x.isfinite().all()) for x in out), (dtype, d, dv)
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
