"""MultiheadAttention: parity with nn.MultiheadAttention, and other mechanisms in its place."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from derived_attention.attention.softmax import (
    MultiheadAttention,
    attention_weights,
    causal_mask,
    softmax_attention,
)

B, N, M, E, H = 2, 5, 7, 12, 3
D = E // H
TOLERANCE = {
    torch.float32: 2e-5,
    torch.float64: 1e-12,
    torch.bfloat16: 6e-2,
    torch.float16: 1e-2,
}

cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NOT TESTED: this machine has no CUDA device"
)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def boolean(*shape, seed=1):
    """Random mask of forbidden keys that leaves the first one to every query."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    mask[..., 0] = False
    return mask


def pair(dtype=torch.float32, **options):
    """PyTorch's layer with biases that are not zero, and ours with its weights."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, batch_first=True, dtype=dtype, **options)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    ours = MultiheadAttention(E, H, dtype=dtype, **options)
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    return ours, theirs


def run(layer, inputs, **options):
    """Output, weights, and the gradients of inputs and parameters."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output, weights = layer(*leaves, **options)
    slope = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device)
    loss = (output * slope.view_as(output)).sum()
    if weights is not None:
        loss = loss + (weights**2).sum()
    names, parameters = zip(*sorted(layer.named_parameters()), strict=True)
    gradients = torch.autograd.grad(loss, [*leaves, *parameters])
    return {
        "output": output,
        "weights": weights,
        **dict(zip(["query", "key", "value", *names], gradients, strict=True)),
    }


def assert_same(ours, theirs, tol):
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        y = theirs[name]
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.shape == y.shape and x.dtype == y.dtype, name
            torch.testing.assert_close(x, y, rtol=tol, atol=tol, msg=lambda m, n=name: f"{n}: {m}")


CAUSAL = ~causal_mask(N, M)
MASKS = {
    "none": {},
    "boolean 2-D": {"attn_mask": boolean(N, M)},
    "boolean 3-D": {"attn_mask": boolean(B * H, N, M)},
    "float 2-D": {"attn_mask": random(N, M, seed=5)},
    "float 3-D": {"attn_mask": random(B * H, N, M, seed=5)},
    "float with -inf": {"attn_mask": torch.zeros(N, M).masked_fill(CAUSAL, -math.inf)},
    "padding": {"key_padding_mask": boolean(B, M)},
    "float padding": {"key_padding_mask": random(B, M, seed=6)},
    "boolean both": {"attn_mask": CAUSAL, "key_padding_mask": boolean(B, M)},
    "boolean both, 3-D": {
        "attn_mask": boolean(B * H, N, M),
        "key_padding_mask": boolean(B, M, seed=7),
    },
    "float both": {"attn_mask": random(N, M, seed=5), "key_padding_mask": random(B, M, seed=6)},
    "causal hint": {"attn_mask": CAUSAL, "is_causal": True},
    "causal hint and padding": {
        "attn_mask": CAUSAL,
        "is_causal": True,
        "key_padding_mask": boolean(B, M),
    },
}


def masks_in(name, dtype):
    return {
        key: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for key, x in MASKS[name].items()
    }


# --- parity ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kdim": 4, "vdim": 9}, {"vdim": 5}], ids=str
)
def test_same_seed_gives_the_same_initial_weights(options):
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(E, H, batch_first=True, **options)
    torch.manual_seed(3)
    ours = MultiheadAttention(E, H, **options)
    assert [name for name, _ in ours.named_parameters()] == [
        name for name, _ in theirs.named_parameters()
    ]
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name
    theirs.load_state_dict(ours.state_dict())  # and back


@pytest.mark.parametrize("weights", [None, "averaged", "per head"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_parity(dtype, name, weights):
    ours, theirs = pair(dtype)
    inputs = [random(B, n, E, dtype=dtype, seed=i) for i, n in enumerate([N, M, M])]
    options = {
        **masks_in(name, dtype),
        "need_weights": weights is not None,
        "average_attn_weights": weights == "averaged",
    }
    assert_same(run(ours, inputs, **options), run(theirs, inputs, **options), TOLERANCE[dtype])


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("options", [{"kdim": 4, "vdim": 9}, {"kdim": 5}, {"bias": False}], ids=str)
def test_parity_of_other_sizes(options, need_weights):
    ours, theirs = pair(torch.float64, **options)
    sizes = [(N, E), (M, ours.kdim), (M, ours.vdim)]
    inputs = [random(B, *size, dtype=torch.float64, seed=i) for i, size in enumerate(sizes)]
    masks = {"key_padding_mask": boolean(B, M), "need_weights": need_weights}
    assert_same(run(ours, inputs, **masks), run(theirs, inputs, **masks), 1e-12)


@pytest.mark.parametrize("name", ["none", "padding", "boolean 2-D", "boolean both"])
def test_parity_of_self_attention_in_evaluation(name):
    """PyTorch takes another path here: its fused inference kernel."""
    ours, theirs = (layer.eval() for layer in pair())
    x = random(B, N, E)
    masks = {k: mask[..., :N] for k, mask in MASKS[name].items()}
    with torch.no_grad():
        for need_weights in (False, True):
            left = ours(x, x, x, need_weights=need_weights, **masks)
            right = theirs(x, x, x, need_weights=need_weights, **masks)
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", ["none", "boolean 2-D", "float 2-D", "padding", "both", "3-D"])
def test_parity_without_a_batch(name, need_weights):
    ours, theirs = pair(torch.float64)
    inputs = [random(n, E, dtype=torch.float64, seed=i) for i, n in enumerate([N, M, M])]
    masks = {
        "padding": {"key_padding_mask": boolean(M)},
        "both": {"key_padding_mask": boolean(M), "attn_mask": CAUSAL},
        "3-D": {"attn_mask": boolean(H, N, M)},
    }
    options = masks[name] if name in masks else masks_in(name, torch.float64)
    options["need_weights"] = need_weights
    assert_same(run(ours, inputs, **options), run(theirs, inputs, **options), 1e-12)


def test_weights_are_returned_by_default_and_sum_to_one():
    ours, _ = pair()
    _, weights = ours(*[random(B, N, E)] * 3)
    assert weights.shape == (B, N, N)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, N))


def test_boolean_and_float_masks_may_be_mixed():
    ours, theirs = pair(torch.float64)
    inputs = [random(B, n, E, dtype=torch.float64, seed=i) for i, n in enumerate([N, M, M])]
    padding = boolean(B, M)
    added = torch.zeros(B, M, dtype=torch.float64).masked_fill(padding, -math.inf)
    bias = random(N, M, dtype=torch.float64)
    mixed = run(ours, inputs, attn_mask=bias, key_padding_mask=padding)
    assert_same(mixed, run(theirs, inputs, attn_mask=bias, key_padding_mask=added), 1e-12)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_is_causal_needs_no_mask(need_weights, padded):
    ours, theirs = pair(torch.float64)
    inputs = [random(B, n, E, dtype=torch.float64, seed=i) for i, n in enumerate([N, M, M])]
    options = {"need_weights": need_weights}
    if padded:
        options["key_padding_mask"] = boolean(B, M)
    expected = run(theirs, inputs, attn_mask=CAUSAL, **options)
    assert_same(run(ours, inputs, is_causal=True, **options), expected, 1e-12)


def test_is_causal_and_another_mask_both_hold():
    ours, theirs = pair(torch.float64)
    inputs = [random(B, n, E, dtype=torch.float64, seed=i) for i, n in enumerate([N, M, M])]
    other = boolean(N, M)
    both = run(ours, inputs, is_causal=True, attn_mask=other)
    assert_same(both, run(theirs, inputs, attn_mask=CAUSAL | other), 1e-12)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_fully_masked_row_gives_the_bias_where_pytorch_gives_nan(dtype, need_weights):
    ours, theirs = pair(dtype)
    inputs = [random(B, n, E, dtype=dtype, seed=i) for i, n in enumerate([N, M, M])]
    padding = torch.zeros(B, M, dtype=torch.bool)
    padding[1] = True
    options = {"key_padding_mask": padding, "need_weights": need_weights}
    result = run(ours, inputs, **options)
    torch.testing.assert_close(result["output"][1], ours.out_proj.bias.expand(N, E))
    if need_weights:
        assert bool((result["weights"][1] == 0).all())
        assert bool(theirs(*inputs, **options)[0][1].isnan().all())  # the difference we document
    assert all(bool(x.isfinite().all()) for x in result.values() if x is not None)
    assert bool((result["query"][1] == 0).all()) and bool((result["value"][1] == 0).all())


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_in_training_is_pytorchs(need_weights):
    ours, theirs = pair(dropout=0.4)
    inputs = [random(B, n, E, seed=i) for i, n in enumerate([N, M, M])]
    results = []
    for layer in (ours, theirs):
        torch.manual_seed(11)
        results.append(run(layer.train(), inputs, need_weights=need_weights))
    assert_same(*results, 1e-5)
    if need_weights:
        per_head = ours(*inputs, average_attn_weights=False)[1]
        assert 0.2 < float((per_head == 0).float().mean()) < 0.6
    evaluated = [run(layer.eval(), inputs, need_weights=need_weights) for layer in (ours, theirs)]
    assert_same(*evaluated, 1e-5)


# --- shapes, memory, compilers -----------------------------------------------------------------


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("shape", [(0, N, M), (B, 0, M), (B, N, 0), (0, 0, 0), (1, 1, 1)], ids=str)
def test_small_and_empty_inputs(shape, need_weights):
    b, n, m = shape
    ours, _ = pair()
    inputs = [random(b, length, E) for length in (n, m, m)]
    masks = {"key_padding_mask": torch.zeros(b, m, dtype=torch.bool)}
    for options in ({}, masks, {**masks, "is_causal": True}):
        result = run(ours, inputs, need_weights=need_weights, **options)
        assert result["output"].shape == (b, n, E)
        assert not need_weights or result["weights"].shape == (b, n, m)
        assert all(bool(x.isfinite().all()) for x in result.values() if x is not None)
        if m == 0:
            assert torch.equal(result["output"], ours.out_proj.bias.expand(b, n, E))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 3), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_parity_for_any_shape(b, n, m, heads, width, masked, padded, need_weights):
    size = heads * width
    theirs = nn.MultiheadAttention(size, heads, batch_first=True, dtype=torch.float64)
    ours = MultiheadAttention(size, heads, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    inputs = [
        random(b, length, size, dtype=torch.float64, seed=i) for i, length in enumerate([n, m, m])
    ]
    options = {"need_weights": need_weights}
    if masked:
        options["attn_mask"] = boolean(n, m)
    if padded:
        options["key_padding_mask"] = boolean(b, m)
    if b:  # without a batch PyTorch's layer fails where it views an empty tensor
        assert_same(run(ours, inputs, **options), run(theirs, inputs, **options), 1e-11)
    else:
        assert ours(*inputs, **options)[0].shape == (0, n, size)


def test_causal_layer_sees_no_future():
    ours, _ = pair(torch.float64)
    x = random(B, N, E, dtype=torch.float64).requires_grad_()
    for need_weights in (False, True):
        out, _ = ours(x, x, x, is_causal=True, need_weights=need_weights)
        for t in range(N - 1):
            (slope,) = torch.autograd.grad(out[:, : t + 1].sum(), x, retain_graph=True)
            assert bool((slope[:, t + 1 :] == 0).all()) and bool((slope[:, : t + 1] != 0).any())


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("padded", [False, True])
def test_no_matrix_is_stored(padded):
    length = 256
    ours, _ = pair()
    inputs = [random(B, length, E)] * 3
    options = {"key_padding_mask": boolean(B, length)} if padded else {"is_causal": True}
    sizes = []
    for need_weights in (False, True):
        with Largest() as largest:
            run(ours, inputs, need_weights=need_weights, **options)
        sizes.append(largest.numel)
    assert sizes[1] >= B * H * length**2, "the recorder must see the matrix of need_weights=True"
    assert sizes[0] < length**2 / 2
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises where no fused kernel will do
        run(ours, inputs, need_weights=False, **options)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", ["none", "boolean both", "float both", "causal hint"])
def test_compiles_without_a_break(name, need_weights):
    torch._dynamo.reset()
    ours, _ = pair()
    inputs = [random(B, n, E, seed=i) for i, n in enumerate([N, M, M])]
    options = {**MASKS[name], "need_weights": need_weights}
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs, **options), ours(*inputs, **options))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", ["none", "boolean both", "float both", "causal hint"])
def test_autocast(name, need_weights):
    ours, _ = pair()
    inputs = [random(B, n, E, seed=i) for i, n in enumerate([N, M, M])]
    options = {**MASKS[name], "need_weights": need_weights}
    exact, _ = ours(*inputs, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = ours(*inputs, **options)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), exact, rtol=5e-2, atol=5e-2)


# --- other mechanisms --------------------------------------------------------------------------


def kernel_attention(q, k, v, *, attn_mask=None, is_causal=False, scale=None):
    """Linear attention, a mechanism that is not softmax: φ(x) = elu(x) + 1."""
    weights = (nn.functional.elu(q) + 1) @ (nn.functional.elu(k) + 1).mT
    if is_causal:
        weights = weights.tril()
    if attn_mask is not None:
        weights = weights * attn_mask
    return weights / weights.sum(-1, keepdim=True) @ v


class Tempered(nn.Module):
    """Softmax attention with one learned temperature."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, q, k, v, **options):
        return softmax_attention(q / self.temperature, k, v, **options)


def test_weights_of_another_mechanism_are_exact():
    """The weights asked for with V = I reproduce the output, whatever the mechanism and mask."""
    for mechanism in (kernel_attention, lambda *qkv, **options: softmax_attention(*qkv, **options)):
        layer = MultiheadAttention(E, H, attention=mechanism, dtype=torch.float64)
        inputs = [random(B, n, E, dtype=torch.float64, seed=i) for i, n in enumerate([N, M, M])]
        for options in ({}, {"is_causal": True}, {"key_padding_mask": boolean(B, M)}):
            fast = run(layer, inputs, need_weights=False, **options)["output"]
            output, A = layer(*inputs, average_attn_weights=False, **options)
            assert A.shape == (B, H, N, M)
            torch.testing.assert_close(A.sum(-1), torch.ones(B, H, N, dtype=torch.float64))
            torch.testing.assert_close(output, fast, rtol=1e-12, atol=1e-12)


def test_weights_of_softmax_do_not_depend_on_how_they_are_asked_for():
    ours, _ = pair(torch.float64)
    wrapped = copy.deepcopy(ours)
    wrapped.attention = lambda *qkv, **options: softmax_attention(*qkv, **options)
    inputs = [random(B, n, E, dtype=torch.float64, seed=i) for i, n in enumerate([N, M, M])]
    options = {"key_padding_mask": boolean(B, M), "average_attn_weights": False}
    assert_same(run(ours, inputs, **options), run(wrapped, inputs, **options), 1e-12)
    q, k, _ = ours._heads(*inputs)
    A = attention_weights(q, k, attn_mask=~options["key_padding_mask"][:, None, None])
    torch.testing.assert_close(ours(*inputs, **options)[1], A, rtol=0, atol=0)


def test_a_mechanism_with_parameters_learns_and_saves_them():
    layer = MultiheadAttention(E, H, attention=Tempered())
    x = random(B, N, E)
    layer(x, x, x, need_weights=False)[0].square().sum().backward()
    assert float(layer.attention.temperature.grad) != 0
    assert "attention.temperature" in layer.state_dict()


def test_inside_pytorchs_encoder_the_mechanism_is_kept_in_evaluation():
    """nn.TransformerEncoderLayer would replace the layer by fused softmax in evaluation."""
    torch.manual_seed(0)
    heads = 4  # PyTorch replaces only layers with an even number of heads
    encoder = nn.TransformerEncoderLayer(E, heads, 16, batch_first=True).eval()
    x, padding = random(B, N, E), boolean(B, N)
    softmax = MultiheadAttention(E, heads).eval()
    softmax.load_state_dict(encoder.self_attn.state_dict())
    sharp = functools.partial(softmax_attention, scale=5.0)
    other = MultiheadAttention(E, heads, attention=sharp).eval()
    other.load_state_dict(encoder.self_attn.state_dict())
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        encoder.self_attn = softmax
        same = encoder(x, src_key_padding_mask=padding)
        encoder.self_attn = other
        different = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(same, expected, rtol=1e-5, atol=1e-5)
    with torch.enable_grad():
        slow = encoder(x, src_key_padding_mask=padding)
    assert torch.equal(different, slow) and not torch.allclose(different, expected, atol=1e-2)


# --- errors ------------------------------------------------------------------------------------

CONSTRUCTION = {
    "batch_first": (ValueError, "batch_first is False; expected True", {"batch_first": False}),
    "num_heads": (ValueError, "embed_dim is 12 and num_heads 5", {"num_heads": 5}),
    "no head": (ValueError, "embed_dim is 12 and num_heads 0", {"num_heads": 0}),
    "embed_dim": (ValueError, "embed_dim is 0", {"embed_dim": 0}),
    "dropout": (ValueError, "dropout is 1.5; expected a probability", {"dropout": 1.5}),
    "dropout NaN": (ValueError, "dropout is nan", {"dropout": math.nan}),
    "attention": (
        TypeError,
        "attention is 'softmax'; expected a function",
        {"attention": "softmax"},
    ),
    "add_bias_kv": (TypeError, "add_bias_kv", {"add_bias_kv": True}),
}


@pytest.mark.parametrize("bad", CONSTRUCTION.values(), ids=CONSTRUCTION)
def test_bad_construction_is_named(bad):
    error, match, changed = bad
    with pytest.raises(error, match=match):
        MultiheadAttention(**{"embed_dim": E, "num_heads": H, **changed})


X, Y = torch.zeros(B, N, E), torch.zeros(B, M, E)
NAN = torch.full((N, M), math.nan)
CALLS = {
    "query: list": (TypeError, "query is of type list", {"query": [0.0]}),
    "query: dtype": (TypeError, "query has dtype torch.float64; expected torch.float32, that "
                     "of the layer's weights", {"query": X.double()}),
    "key: dtype": (TypeError, "key has dtype torch.float16", {"key": Y.half()}),
    "value: integers": (TypeError, "value has dtype torch.int64", {"value": Y.long()}),
    "value: device": (ValueError, "value is on device meta", {"value": Y.to("meta")}),
    "query: 4-D": (ValueError, r"query has shape \(1, 2, 5, 12\); expected", {"query": X[None]}),
    "query: 1-D": (ValueError, r"query has shape \(12,\); expected", {"query": X[0, 0]}),
    "query: features": (ValueError, r"query has shape .* expected \(2, 5, 12\)",
                        {"query": X[..., :7]}),
    "key: features": (ValueError, r"key has shape .* expected \(2, 7, 12\)", {"key": Y[..., :7]}),
    "key: batch": (ValueError, r"key has shape .* expected \(2, 7, 12\)", {"key": Y[:1]}),
    "key: no batch": (ValueError, r"key has shape \(7, 12\); expected \(2, 7, 12\)", {"key": Y[0]}),
    "value: length": (ValueError, r"value has shape .* expected \(2, 7, 12\)", {"value": Y[:, :6]}),
    "attn_mask: list": (TypeError, "attn_mask is of type list", {"attn_mask": [[True]]}),
    "attn_mask: dtype": (TypeError, "attn_mask has dtype torch.int64", {"attn_mask": NAN.long()}),
    "attn_mask: NaN": (ValueError, "attn_mask contains NaN", {"attn_mask": NAN}),
    "attn_mask: shape": (ValueError, r"attn_mask has shape \(7, 5\); expected \(5, 7\)",
                         {"attn_mask": NAN.T}),
    "attn_mask: heads": (ValueError, r"attn_mask has shape \(2, 5, 7\); expected \(6, 5, 7\)",
                         {"attn_mask": boolean(B, N, M)}),
    "attn_mask: device": (ValueError, "attn_mask is on device meta", {"attn_mask": NAN.to("meta")}),
    "padding: shape": (ValueError, r"key_padding_mask has shape \(2, 5\); expected \(2, 7\)",
                       {"key_padding_mask": boolean(B, N)}),
    "padding: NaN": (ValueError, "key_padding_mask contains NaN", {"key_padding_mask": NAN[:B]}),
    "padding: inf": (ValueError, r"key_padding_mask contains \+inf",
                     {"key_padding_mask": torch.full((B, M), math.inf)}),
    "padding: dtype": (TypeError, "key_padding_mask has dtype torch.uint8",
                       {"key_padding_mask": boolean(B, M).byte()}),
}  # fmt: skip


@pytest.mark.parametrize("bad", CALLS.values(), ids=CALLS)
def test_bad_call_is_named(bad):
    error, match, changed = bad
    layer = MultiheadAttention(E, H)
    with pytest.raises(error, match=match):
        layer(**{"query": X, "key": Y, "value": Y, **changed})


def test_sizes_of_key_and_value_are_those_of_the_layer():
    layer = MultiheadAttention(E, H, kdim=4, vdim=9)
    with pytest.raises(ValueError, match=r"value has shape \(2, 7, 12\); expected \(2, 7, 9\)"):
        layer(X, Y[..., :4], Y)


# --- on a GPU ----------------------------------------------------------------------------------


@cuda
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_cuda_parity(name, need_weights):
    layers = [layer.cuda() for layer in pair()]
    inputs = [random(B, n, E, seed=i).cuda() for i, n in enumerate([N, M, M])]
    options = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in MASKS[name].items()}
    assert_same(*(run(x, inputs, need_weights=need_weights, **options) for x in layers), 1e-4)


# --- heads of another width, heads that share keys and values ------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mask", ["none", "boolean both", "causal hint"])
def test_shared_keys_are_repeated_keys(groups, mask):
    # A layer with all its heads, whose key and value weights are copies within each group.
    heads, width, dtype = 4, 3, torch.float64
    shared = MultiheadAttention(12, heads, kv_heads=groups, dtype=dtype)
    whole = MultiheadAttention(12, heads, dtype=dtype)
    torch.nn.init.normal_(shared.in_proj_bias)

    def repeat(x):
        return x.unflatten(0, (groups, width)).repeat_interleave(heads // groups, 0).flatten(0, 1)

    sizes = (heads * width, groups * width, groups * width)
    with torch.no_grad():
        for own, full in (
            (shared.in_proj_weight, whole.in_proj_weight),
            (shared.in_proj_bias, whole.in_proj_bias),
        ):
            q, k, v = own.split(sizes)
            full.copy_(torch.cat([q, repeat(k), repeat(v)]))
        whole.out_proj.load_state_dict(shared.out_proj.state_dict())
    inputs = random(B, N, 12, dtype=dtype), *(random(B, M, 12, dtype=dtype, seed=s) for s in (2, 3))
    for need_weights in (False, True):
        how = {"need_weights": need_weights, **masks_in(mask, dtype)}
        ours, theirs = (layer(*inputs, **how) for layer in (shared, whole))
        torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-12)
        if need_weights:
            torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=1e-12)
    grads = run(shared, inputs, need_weights=False)
    assert grads["in_proj_weight"].shape == (sum(sizes), 12)
    assert all(grads[name].abs().max() > 0 for name in ("query", "key", "value"))


@pytest.mark.parametrize("width", [1, 5, 8])
def test_the_width_of_a_head_is_free(width):
    layer = MultiheadAttention(E, 2, head_dim=width, dtype=torch.float64)
    assert layer.in_proj_weight.shape == (3 * 2 * width, E)
    assert layer.out_proj.weight.shape == (E, 2 * width)
    x = random(B, N, E, dtype=torch.float64)
    q, k, v = (x @ w.mT for w in layer.in_proj_weight.chunk(3))
    parts = [
        torch.softmax(q[..., cut] @ k[..., cut].mT / math.sqrt(width), -1) @ v[..., cut]
        for cut in (slice(0, width), slice(width, None))
    ]
    expected = torch.cat(parts, -1) @ layer.out_proj.weight.mT
    torch.testing.assert_close(layer(x, x, x)[0], expected, rtol=0, atol=1e-12)


def test_multi_query_layers_with_their_own_feature_sizes():
    layer = MultiheadAttention(E, H, kdim=5, vdim=6, kv_heads=1, head_dim=2)
    assert layer.k_proj_weight.shape == (2, 5) and layer.v_proj_weight.shape == (2, 6)
    out, weights = layer(random(B, N, E), random(B, M, 5), random(B, M, 6))
    assert out.shape == (B, N, E) and weights.shape == (B, N, M)


def test_a_layer_prints_its_heads():
    assert "num_heads=3" in repr(MultiheadAttention(E, H))
    assert "kv_heads=1" in repr(MultiheadAttention(E, H, kv_heads=1))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kv_heads": 2}, ValueError, "kv_heads is 2; expected a divisor of num_heads 3"),
        ({"kv_heads": 0}, ValueError, "kv_heads is 0"),
        ({"kv_heads": 1.5}, TypeError, "kv_heads"),
        ({"head_dim": 0}, ValueError, "head_dim is 0"),
        ({"head_dim": "4"}, TypeError, "head_dim"),
    ],
)
def test_wrong_heads_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        MultiheadAttention(E, H, **options)
