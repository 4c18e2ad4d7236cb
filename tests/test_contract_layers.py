"""The layer of every mechanism is a drop-in replacement for ``nn.MultiheadAttention``."""

from __future__ import annotations

import copy
import inspect
import math

import torch
from helpers import (
    B,
    H,
    additive,
    assert_all_close,
    assert_named,
    disturbed,
    every_causal_mechanism,
    every_mechanism,
    every_mechanism_with_weights,
    relative_errors,
    takes_no_bias,
    written_as_numbers,
)
from torch import nn

from derived_attention.layer import ALL, KEY, VALUE
from derived_attention.registry import MECHANISMS

N, E = 21, 12
GONE = torch.arange(N) >= torch.tensor([N - 5, N])[:, None]  # True after the end of a sequence


def make_layer(name, dtype=torch.float64, heads=H, **own):
    """Its layer, with parameters that are not those it starts with."""
    torch.manual_seed(0)
    return disturbed(MECHANISMS[name].make_layer(E, heads, N, dtype=dtype, **own)).eval()


def causal_layer(name):
    own = "causal" in inspect.signature(type(make_layer(name))).parameters
    return make_layer(name, **{"causal": True} if own else {})


def sequences(dtype=torch.float64):
    return torch.randn(B, N, E, generator=torch.Generator().manual_seed(0)).to(dtype)


def output(layer, x, *args, **options):
    return layer(x, x, x, *args, need_weights=False, **options)[0]


def shape_of(A):
    return None if A is None else tuple(A.shape)


def shape_if_any(name, *shape):
    """The shape of its weights; a layer that has none returns None for them."""
    return shape if MECHANISMS[name].weights else None


def assert_weights_give(out, A, layer, x):
    """Whether weights times values, put through the output projection, are the output."""
    heads = A @ layer.project(VALUE, x, ALL)  # (B, H, N, D)
    assert_all_close([layer.out_proj(heads.transpose(1, 2).flatten(2))], [out], 1e-10)


@every_mechanism
def test_layer_has_the_interface_of_pytorchs(name):
    layer, theirs = make_layer(name), nn.MultiheadAttention(E, H, batch_first=True)
    ours, wanted = (list(inspect.signature(x.forward).parameters) for x in (layer, theirs))
    assert ours == [*wanted, "query_padding_mask"]
    arguments = list(inspect.signature(type(layer)).parameters.values())
    assert [p.name for p in arguments[:4]] == ["embed_dim", "num_heads", "dropout", "bias"]
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in arguments[4:])
    assert "num_heads=3" in repr(layer)
    found = dict(layer.named_parameters())
    assert all(found[key].shape == weight.shape for key, weight in theirs.named_parameters())
    layer = make_layer(name, bias=False, kdim=4, vdim=7)
    out, A = layer(sequences(), sequences()[..., :4], sequences()[..., :7])
    assert out.shape == (B, N, E) and shape_of(A) == shape_if_any(name, B, N, N)


@every_mechanism
def test_layer_is_saved_copied_and_moved(name):
    layer, other = make_layer(name), MECHANISMS[name].make_layer(E, H, N, dtype=torch.float64)
    x = sequences()
    exact = output(layer, x)
    assert str(other.load_state_dict(layer.state_dict())) == "<All keys matched successfully>"
    for same in (other.eval(), copy.deepcopy(layer)):
        assert torch.equal(output(same, x), exact)
    for dtype in (torch.float32, torch.bfloat16):
        out = output(copy.deepcopy(layer).to(dtype), x.to(dtype))
        error = relative_errors([out], [exact])[0]
        assert out.dtype == dtype and error < 8 * torch.finfo(dtype).eps, f"{dtype}: {error}"
    most = 0.1 if name == "selected" else 3e-2  # a rounded query may choose another block
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_errors([output(layer.float(), x.float())], [exact])[0] < most
    slopes = torch.autograd.grad(output(layer, x.float()).square().sum(), list(layer.parameters()))
    assert all(bool(x.isfinite().all()) and bool(x.any()) for x in slopes)


@every_mechanism
def test_layer_takes_padding_as_absence(name):
    layer, x = make_layer(name), sequences()
    out = output(layer, x, GONE)
    for added in written_as_numbers(~GONE):
        assert_all_close([output(layer, x, added)], [out], 1e-10, f"{added.dtype}, {added.min()}")
    y = x + 5 * GONE[..., None]
    for need_weights in (False, True):
        assert_all_close([layer(y, y, y, GONE, need_weights)[0][~GONE]], [out[~GONE]], 1e-10)
    if not MECHANISMS[name].square:
        assert_all_close([output(layer, x[:1, : N - 5])], [out[:1, : N - 5]], 1e-10, "shorter")
    for one, gone, expected in zip(x, GONE, out, strict=True):
        single, A = layer(one, one, one, gone)
        assert_all_close([single[~gone]], [expected[~gone]], 1e-10, "without a batch")
        assert shape_of(A) == shape_if_any(name, N, N)
    nothing = output(layer, x, torch.ones(B, N).bool())
    assert torch.equal(nothing, layer.out_proj.bias.expand_as(nothing))


@every_mechanism
def test_layer_keeps_nan_and_infinity_at_padding(name):
    """With PyTorch's layer they reach every token: here neither outputs nor gradients of others."""
    for causal in (False, True)[: 1 + MECHANISMS[name].causal]:
        layer, x = causal_layer(name) if causal else make_layer(name), sequences()

        def run(x, gone, need_weights, layer=layer, causal=causal):
            x = x.requires_grad_()
            out = layer(x, x, x, gone, need_weights, is_causal=causal)[0][~GONE]
            leaves = [x, *layer.parameters()]
            return [out, *torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)]

        for need_weights in (False, True):
            expected = run(x.masked_fill(GONE[..., None], 0), GONE, need_weights)
            for bad, gone in ((math.nan, GONE), (math.inf, additive(~GONE)), (-math.inf, GONE)):
                found = run(x.masked_fill(GONE[..., None], bad), gone, need_weights)
                assert_all_close(found, expected, 1e-10, f"{name}, {causal}, {bad}")


@every_mechanism_with_weights
def test_layer_gives_weights_that_reproduce_its_output(name):
    layer, x = make_layer(name), sequences()
    shared = make_layer(name, head_dim=5, kv_heads=1)
    assert shared.out_proj.weight.shape == (E, 5 * H)
    assert shared.in_proj_weight.shape == (5 * H + 2 * 5, E)
    for part in (KEY, VALUE):
        heads = shared.project(part, x, ALL)
        assert heads.shape[1] == H and torch.equal(heads, heads[:, :1].expand_as(heads))
    for one, gone in ((layer, None), (layer, GONE), (shared, GONE)):
        out, A = one(x, x, x, gone, average_attn_weights=False)
        assert_all_close([output(one, x, gone)], [out], 1e-10)
        if MECHANISMS[name].averages:
            assert_all_close([A.sum(-1)], [torch.ones(B, H, N, dtype=A.dtype)], 1e-10)
        assert_all_close([one(x, x, x, gone)[1]], [A.mean(1)], 1e-10)
        assert_weights_give(out, A, one, x)
    assert A.shape == (B, H, N, N) and not A[0, ..., GONE[0]].any()


class Doubled(nn.Module):
    """A module in the place of a Linear, as LoRA makes it."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.weight, self.bias = inner, inner.weight, inner.bias

    def forward(self, x):
        return 2 * self.inner(x)


CALLING = {  # options for layers with more modules than the sample options make
    "delta": {"gated": True},
    "fmm": {"feature_maps": [nn.Sequential(nn.Linear(4, 4), nn.Softplus())]},
    "mrs": {"scales": [2] * H},
    "sh": {"pooling": "convolution"},
    "bn_sh": {"pooling": "convolution"},
}


@every_mechanism
def test_layer_calls_its_modules(name):
    """A hook of a module has an effect, and so has what replaces the output projection."""
    x = sequences()
    for layer in (make_layer(name), make_layer(name, **CALLING.get(name, {}))):
        out, lists = output(layer.double(), x), (nn.ParameterDict, nn.ModuleList)
        for path, module in layer.named_modules():
            if module is layer or isinstance(module, lists) or not [*module.parameters()]:
                continue
            called = []
            module.register_forward_hook(lambda *call, called=called: called.append(call[-1]))
            output(layer, x)
            assert called, f"{name}: {path}"
        layer.out_proj = Doubled(layer.out_proj)
        assert_all_close([output(layer, x)], [2 * out], 1e-12, name)


@every_mechanism_with_weights
def test_layer_drops_weights_in_training_only(name):
    layer, x = make_layer(name, dropout=0.5), sequences()
    plain, kept = make_layer(name)(x, x, x, average_attn_weights=False)
    assert_all_close([output(layer, x)], [plain], 1e-10)
    torch.manual_seed(3)
    out, A = layer.train()(x, x, x, average_attn_weights=False)
    torch.manual_seed(3)
    assert torch.equal(output(layer, x), out) and not torch.allclose(out, plain)
    assert_weights_give(out, A, layer, x)
    assert takes_no_bias(name) or 0.4 < float((A[kept > 0] == 0).double().mean()) < 0.6


@every_causal_mechanism
def test_causal_layer_sees_no_future(name):
    layer, x = causal_layer(name), sequences()
    for need_weights in (False, True):
        out = layer(x, x, x, None, need_weights, is_causal=True)[0]
        for t in (0, 4, N - 2):
            y = x + 5 * (torch.arange(N) > t)[:, None]
            other = layer(y, y, y, None, need_weights, is_causal=True)[0]
            assert_all_close([other[:, : t + 1]], [out[:, : t + 1]], 1e-13)
            assert not torch.allclose(other[:, t + 1 :], out[:, t + 1 :])


@every_mechanism
def test_layer_in_pytorchs_encoder(name):
    """nn.TransformerEncoderLayer would replace the layer by fused softmax in evaluation."""
    torch.manual_seed(0)
    heads = 4  # PyTorch replaces only layers with an even number of heads
    encoder = nn.TransformerEncoderLayer(E, heads, 16, dropout=0.0, batch_first=True).eval()
    layer, x = make_layer(name, torch.float32, heads), sequences(torch.float32)
    with torch.no_grad():
        softmax = encoder(x, src_key_padding_mask=GONE)
    encoder.self_attn = layer
    slow = encoder.train()(x, src_key_padding_mask=GONE)
    with torch.no_grad():
        fast = encoder.eval()(x, src_key_padding_mask=GONE)
        changed = encoder(x + 5 * GONE[..., None], src_key_padding_mask=GONE)
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(changed[~GONE], fast[~GONE], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(fast[~GONE], softmax[~GONE], atol=1e-2)
    slow[~GONE].sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())


X = torch.zeros(B, N, E)
BAD_CALLS = [
    (TypeError, "query is of type list", {"query": [0.0]}),
    (TypeError, "query has dtype torch.float64; expected torch.float32", {"query": X.double()}),
    (ValueError, r"query has shape \(1, 2, 21, 12\); expected", {"query": X[None]}),
    (ValueError, r"query has shape \(12,\); expected", {"query": X[0, 0]}),
    (ValueError, r"query has shape .*; expected \(2, 21, 12\)", {"query": X[..., :7]}),
    (TypeError, "key has dtype torch.float16; expected torch.float32", {"key": X.half()}),
    (ValueError, r"key has shape .*; expected \(2, 21, 12\)", {"key": X[..., :7]}),
    (ValueError, r"key has shape \(21, 12\); expected \(2, 21, 12\)", {"key": X[0]}),
    (TypeError, "value has dtype torch.int64", {"value": X.long()}),
    (ValueError, "value is on device meta; expected cpu", {"value": X.to("meta")}),
    (ValueError, r"value has shape .*; expected \(2, 21, 12\)", {"value": X[:, :6]}),
    (TypeError, "key_padding_mask has dtype torch.uint8", {"key_padding_mask": GONE.byte()}),
    (ValueError, r"key_padding_mask has shape \(2, 4\)", {"key_padding_mask": GONE[:, :4]}),
    (ValueError, "key_padding_mask contains NaN", {"key_padding_mask": X[..., 0] / 0}),
]
BAD_LAYERS = [
    (ValueError, "embed_dim is 13 and num_heads 3; expected", {"embed_dim": 13}),
    (ValueError, "batch_first is False; expected True", {"batch_first": False}),
    (ValueError, "dropout is 1.5; expected a probability", {"dropout": 1.5}),
    (ValueError, "kv_heads is 2; expected a divisor of num_heads 3", {"kv_heads": 2}),
    (ValueError, "head_dim is 0; expected a whole number", {"head_dim": 0}),
    (TypeError, "add_bias_kv", {"add_bias_kv": True}),
]


@every_mechanism
def test_layer_names_what_is_wrong(name):
    make = MECHANISMS[name].make_layer
    assert_named(BAD_CALLS, make(E, H, N), query=X, key=X, value=X)
    assert_named(BAD_LAYERS, make, embed_dim=E, num_heads=H, N=N)
