"""The series classifier: shapes, padding, maps, and the rule for `attention`."""

import copy
import functools

import pytest
import torch
from torch import nn

from derived_attention.attention.softmax import (
    MultiheadAttention,
    attention_weights,
    softmax_attention,
)
from derived_attention.models import SeriesClassifier, make_attention

SMALL = dict(channels=3, classes=4, length=7, dim=16, heads=4, hidden=32)


def small(seed=0, **changes):
    torch.manual_seed(seed)
    return SeriesClassifier(**SMALL | changes)


def batch(n=5):
    """Five series of 7, 4, 1, 6 and 7 real steps."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 7, 3, generator=generator)
    padding = torch.arange(7) >= torch.tensor([7, 4, 1, 6, 7])[:n, None]
    return x.masked_fill(padding[..., None], 0), padding


def trained_statistics(model):
    """BatchNorm with statistics of its own, so that evaluation mode is no identity."""
    model.train()
    for _ in range(3):
        model(*batch())
    return model.eval()


def test_number_of_parameters_is_the_reference_s():
    model = SeriesClassifier(channels=12, classes=9, length=26)
    assert sum(p.numel() for p in model.parameters()) == 299_913


def test_logits_and_gradients_reach_every_parameter():
    model = small()
    logits = model(*batch())
    assert logits.shape == (5, 4)
    nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3, 0])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_forward_is_what_the_docstring_says():
    """The same numbers from PyTorch's own layers, put together by hand."""
    model = trained_statistics(small(layers=1))
    x, padding = batch()
    layer = model.layers[0]
    peer = nn.MultiheadAttention(16, 4, batch_first=True)
    peer.load_state_dict(layer.attention.state_dict())
    h = model.embed(x) * 16**0.5 + model.positions
    h = h + peer(h, h, h, key_padding_mask=padding, need_weights=False)[0]
    h = layer.norm1(h.transpose(1, 2)).transpose(1, 2)
    h = h + layer.feedforward(h)
    h = nn.functional.gelu(layer.norm2(h.transpose(1, 2)).transpose(1, 2))
    expected = model.head((h * ~padding[..., None]).flatten(1))
    torch.testing.assert_close(model(x, padding), expected)


def test_values_at_padded_steps_change_nothing():
    model = trained_statistics(small())
    x, padding = batch()
    for garbage in (1.0, -1e4):
        changed = x.masked_fill(padding[..., None], garbage)
        torch.testing.assert_close(model(changed, padding), model(x, padding), rtol=0, atol=0)
    assert not torch.allclose(model(x.masked_fill(padding[..., None], 1.0)), model(x))


def test_more_padding_changes_nothing():
    """A longer model with the same weights, on series with three more padded steps."""
    model, longer = trained_statistics(small()), small(length=10)
    state = copy.deepcopy(model.state_dict())
    positions, head = state.pop("positions"), state.pop("head.weight")
    longer.load_state_dict(state, strict=False)
    with torch.no_grad():
        longer.positions[:7] = positions
        longer.head.weight.view(4, 10, 16)[:, :7] = head.view(4, 7, 16)
    x, padding = batch()
    x10 = nn.functional.pad(x, (0, 0, 0, 3), value=5.0)
    padding10 = nn.functional.pad(padding, (0, 3), value=True)
    torch.testing.assert_close(longer.eval()(x10, padding10), model(x, padding))


def test_series_do_not_mix_in_evaluation():
    model = trained_statistics(small())
    x, padding = batch()
    alone = torch.cat([model(x[i : i + 1], padding[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(model(x, padding), alone)
    assert model(x[:0], padding[:0]).shape == (0, 4)


def test_no_padding_is_the_same_as_a_mask_of_false():
    model = trained_statistics(small())
    x, padding = batch()
    torch.testing.assert_close(model(x), model(x, torch.zeros_like(padding)))
    everything = model(x, torch.ones_like(padding))  # nothing is left but the bias
    torch.testing.assert_close(everything, model.head.bias.expand(5, 4))


@pytest.mark.parametrize("mode", [True, False])
def test_attention_maps(mode):
    model = small().train(mode)
    x, padding = batch()
    state = copy.deepcopy(model.state_dict())
    maps = model.attention_maps(x, padding)
    assert [m.shape for m in maps] == [(5, 4, 7, 7)] * 2
    assert model.training is mode and not maps[0].requires_grad
    for key, value in state.items():
        assert torch.equal(value, model.state_dict()[key]), key
    for weights in maps:
        torch.testing.assert_close(weights.sum(-1), torch.ones(5, 4, 7))
        assert (weights.masked_select(padding[:, None, None, :]) == 0).all()
    assert torch.equal(maps[1], model.attention_maps(x, padding)[1])  # no dropout
    h = (model.embed(x) * 4 + model.positions).detach()
    q, k, _ = model.layers[0].attention._heads(h, h, h)
    expected = attention_weights(q, k, attn_mask=~padding[:, None, None, :])
    torch.testing.assert_close(maps[0], expected)


def mean_attention(q, k, v, *, attn_mask=None, is_causal=False, scale=None, strength=1.0):
    return softmax_attention(strength * q, k, v, attn_mask=attn_mask, scale=scale)


class Learned(nn.Module):
    """A layer of another kind, with something to learn and a keyword of its own."""

    def __init__(self, dim, heads, factor=1.0):
        super().__init__()
        self.inner = MultiheadAttention(dim, heads)
        self.gate = nn.Parameter(torch.tensor(factor))

    def forward(self, query, key, value, **how):
        out, weights = self.inner(query, key, value, **how)
        return self.gate * out, weights


def test_a_function_replaces_the_scaled_dot_product():
    x, padding = batch()
    plain = small().eval()(x, padding)
    same = small(attention=mean_attention).eval()(x, padding)
    other = small(attention=functools.partial(mean_attention, strength=3.0)).eval()(x, padding)
    torch.testing.assert_close(plain, same)
    assert not torch.allclose(plain, other)


def test_a_class_replaces_the_layer():
    x, padding = batch()
    plain = small().eval()(x, padding)
    model = small(attention=Learned).eval()
    torch.testing.assert_close(model(x, padding), plain)
    assert len({id(layer.attention.gate) for layer in model.layers}) == 2  # one for each layer
    model = small(attention=functools.partial(Learned, factor=0.5)).eval()
    assert not torch.allclose(model(x, padding), plain)
    assert [m.shape for m in model.attention_maps(x, padding)] == [(5, 4, 7, 7)] * 2
    model(x, padding).sum().backward()
    assert model.layers[0].attention.gate.grad != 0


@pytest.mark.parametrize("wrong", ["softmax", None, nn.Identity(), 3])
def test_wrong_attention(wrong):
    with pytest.raises(TypeError, match="attention is .*; expected a function, or a class"):
        make_attention(wrong, 16, 4)


def test_text_of_a_model_names_its_attention():
    texts = {
        repr(small()),
        repr(small(attention=mean_attention)),
        repr(small(attention=functools.partial(mean_attention, strength=2.0))),
        repr(small(attention=functools.partial(mean_attention, strength=3.0))),
        repr(small(attention=Learned)),
        repr(small(length=8)),
    }
    assert len(texts) == 6


@pytest.mark.parametrize("name", ["channels", "classes", "length", "dim", "heads", "layers"])
def test_wrong_sizes(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        SeriesClassifier(**SMALL | {name: 0})
    with pytest.raises(TypeError, match=f"{name} is 2.0"):
        SeriesClassifier(**SMALL | {name: 2.0})


def test_wrong_settings():
    with pytest.raises(ValueError, match="embed_dim is 16 and num_heads 3"):
        small(heads=3)
    with pytest.raises(ValueError, match="dropout"):
        small(dropout=1.5)


def test_wrong_inputs():
    model = small()
    x, padding = batch()
    for wrong in (x[:, :5], x[..., :2], x[0]):
        with pytest.raises(ValueError, match=r"x is .*expected floats of shape \(n, 7, 3\)"):
            model(wrong, padding)
    with pytest.raises(ValueError, match="x is torch.int64"):
        model(x.long(), padding)
    with pytest.raises(TypeError, match="x is list"):
        model([[1.0]], padding)
    for wrong in (padding[:, :5], padding.float()):
        with pytest.raises(ValueError, match="padding is"):
            model(x, wrong)


def test_state_travels_through_a_file(tmp_path):
    model, other = trained_statistics(small()), small(seed=1).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    torch.testing.assert_close(other(*batch()), model(*batch()), rtol=0, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU HERE: CUDA IS NOT TESTED")
def test_cuda_agrees_with_cpu():
    model = trained_statistics(small())
    x, padding = batch()
    expected, maps = model(x, padding), model.attention_maps(x, padding)
    model, x, padding = model.cuda(), x.cuda(), padding.cuda()
    torch.testing.assert_close(model(x, padding).cpu(), expected, rtol=1e-4, atol=1e-4)
    actual = model.attention_maps(x, padding)
    torch.testing.assert_close([m.cpu() for m in actual], maps, rtol=1e-4, atol=1e-4)
