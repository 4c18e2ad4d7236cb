"""Tests of the models: shapes, padding, maps, and the rule for `attention`."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

from derived_attention.batch_norm.layer import NormalizedAttention
from derived_attention.convolutional.layer import CvTAttention
from derived_attention.layer import MultiheadAttention
from derived_attention.linear.core import linear_attention
from derived_attention.softmax.controls import identity_attention
from derived_attention.softmax.core import softmax_attention
from derived_attention.sparse.core import window_attention
from derived_book.runtime import digest
from derived_book.tasks.images.model import VisionTransformer
from derived_book.tasks.language.model import ByteLM, LanguageModel
from derived_book.tasks.model import Config, make_attention, sinusoids
from derived_book.tasks.series.model import SeriesClassifier

SIZES = dict(dim=16, heads=4, hidden=32)


def maker(kind, **sizes):
    """Return a function that builds a model with changed sizes or a changed configuration."""

    def make(**changes):
        own = {name: changes.pop(name) for name in [*changes] if name in sizes}
        torch.manual_seed(0)
        return kind(**sizes | own, config=Config(**SIZES | changes))

    return make


small = maker(SeriesClassifier, channels=3, classes=4, length=7)
vision = maker(VisionTransformer, grid=(2, 3), channels=5, classes=4)
writer = maker(ByteLM, length=6)
with_taps = maker(LanguageModel, length=6)


def batch():
    """Return series of 7, 4, 1, 6 and 7 steps, and their padding."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 7, 3, generator=generator)
    padding = torch.arange(7) >= torch.tensor([7, 4, 1, 6, 7])[:, None]
    return x.masked_fill(padding[..., None], 0), padding


def images():
    return torch.randn(5, 6, 5, generator=torch.Generator().manual_seed(2))


def text(n=5):
    return torch.randint(0, 256, (n, 6), generator=torch.Generator().manual_seed(5))


MODELS = {small: batch(), vision: (images(),), writer: (text(),), with_taps: (text(),)}
WRITERS = writer, with_taps


def test_number_of_parameters_is_the_reference_s():
    config = Config(dim=128, heads=8, layers=2, hidden=256)
    model = SeriesClassifier(channels=12, classes=9, length=26, config=config)
    assert sum(p.numel() for p in model.parameters()) == 299_913


def test_forward_is_what_the_docstring_says():
    """Compare with PyTorch's own layers, put together by hand."""
    model, (x, padding) = small(layers=1), batch()
    for _ in range(3):  # with its initial statistics, BatchNorm would be the identity
        model(x, padding)
    layer = model.eval().layers[0]
    peer = nn.MultiheadAttention(16, 4, batch_first=True)
    peer.load_state_dict(layer.attention.state_dict())
    h = model.embed(x) * 16**0.5 + model.positions
    h = h + peer(h, h, h, key_padding_mask=padding, need_weights=False)[0]
    h = layer.norm1(h.transpose(1, 2)).transpose(1, 2)
    h = h + layer.feedforward(h)
    h = nn.functional.gelu(layer.norm2(h.transpose(1, 2)).transpose(1, 2))
    expected = model.head((h * ~padding[..., None]).flatten(1))
    torch.testing.assert_close(model(x, padding), expected)


def test_a_sequence_that_is_all_padding_leaves_the_bias():
    model, (x, padding) = small().eval(), batch()
    nothing = model(x, torch.ones_like(padding))
    torch.testing.assert_close(nothing, model.head.bias.expand(5, 4))


def weights_of(layer, h, padding):
    """Return the weights of PyTorch's own layer."""
    peer = nn.MultiheadAttention(16, 4, batch_first=True)
    peer.load_state_dict(layer.attention.state_dict())
    how = dict(key_padding_mask=padding, average_attn_weights=False)
    return peer.eval()(h, h, h, **how)[1].detach()


def test_maps_are_those_of_the_layer_s_input_and_leave_the_model_as_it_was():
    series = small(), batch(), lambda model, x: model.embed(x) * 4 + model.positions
    first_input = lambda model, x: model.layers[0].norm1(model.embed(x) + model.positions)  # noqa: E731
    patches = randomised(vision()).train(), (images(), None), first_input
    for model, (x, padding), embed in (series, patches):
        layer, before = model.layers[0], digest(model.state_dict())
        maps = model.attention_maps(x, padding)
        assert model.training and digest(model.state_dict()) == before and not maps[0].requires_grad
        assert torch.equal(maps[1], model.attention_maps(x, padding)[1])  # no dropout
        torch.testing.assert_close(maps[0], weights_of(layer, embed(model, x), padding))


def mean_attention(q, k, v, *, strength=1.0, **options):
    return softmax_attention(strength * q, k, v, **options)


class Learned(nn.Module):
    """A layer of another class, with a parameter and a keyword of its own."""

    def __init__(self, dim, heads, factor=1.0):
        super().__init__()
        self.inner = MultiheadAttention(dim, heads)
        self.gate = nn.Parameter(torch.tensor(factor))

    def forward(self, query, key, value, **how):
        out, weights = self.inner(query, key, value, **how)
        return self.gate * out, weights


def test_a_function_replaces_the_scaled_dot_product_and_a_class_the_layer():
    for make, x in MODELS.items():
        plain = make().eval()(*x)
        for same in (mean_attention, Learned):
            torch.testing.assert_close(make(attention=same).eval()(*x), plain)
        for kind, change in ((mean_attention, dict(strength=3.0)), (Learned, dict(factor=0.5))):
            model = make(attention=functools.partial(kind, **change)).eval()
            assert not torch.allclose(model(*x), plain)
    layers = small(attention=Learned).layers
    assert layers[0].attention.gate is not layers[1].attention.gate


def test_text_of_a_model_names_its_attention():
    own = {small: dict(length=8), vision: dict(grid=(3, 2)), writer: dict(length=7)}
    texts = set()
    for make, sizes in own.items():
        attentions = [functools.partial(mean_attention, strength=s) for s in (2.0, 3.0)]
        texts |= {repr(make(attention=f)) for f in (mean_attention, Learned, *attentions)}
        texts |= {repr(make()), repr(make(**sizes)), repr(make(dropout=0.2))}
    assert len(texts) == 3 * 7


def test_wrong_sizes():
    for make, names in (
        (small, ("channels", "classes", "length")),
        (vision, ("channels", "classes")),
        (writer, ("length",)),
        (with_taps, ("length",)),
        (Config, ("dim", "heads", "layers", "hidden")),
    ):
        for name in names:
            with pytest.raises(ValueError, match=f"{name} is 0; expected a whole number"):
                make(**{name: 0})
    for grid in (6, "23", (2, 3, 4)):
        with pytest.raises(TypeError, match=r"grid is .*; expected \(rows, columns\)"):
            vision(grid=grid)
    with pytest.raises(ValueError, match=r"grid\[1\] is 0"):
        vision(grid=(2, 0))


def test_wrong_configuration():
    with pytest.raises(ValueError, match="embed_dim is 16 and num_heads 3"):
        small(heads=3)
    for wrong, error in ((1.5, ValueError), (-0.1, ValueError), (True, TypeError)):
        with pytest.raises(error, match=f"dropout is {wrong}; expected"):
            Config(dropout=wrong)
    for wrong in ("softmax", None, nn.Identity(), 3):
        for call in (lambda wrong: Config(attention=wrong), lambda a: make_attention(a, 16, 4)):
            with pytest.raises(TypeError, match="attention is .*; expected a function, or a class"):
                call(wrong)
    with pytest.raises(TypeError, match="config is 64; expected a Config, such as"):
        ByteLM(32, 64)
    with pytest.raises(ValueError, match="attentions has 1; expected 2, one for each layer"):
        LanguageModel(32, Config(), [identity_attention])
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().dim = 3


# --- Images ---------------------------------------------------------------------------------------


def through_layers(model, h, **masks):
    """Return the output of PyTorch's encoder layers and the last norm."""
    for layer in model.layers:
        peer = nn.TransformerEncoderLayer(
            16, 4, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        ).eval()
        state = {f"self_attn.{k}": v for k, v in layer.attention.state_dict().items()}
        for name in ("norm1", "norm2"):
            state |= {f"{name}.{k}": v for k, v in layer.get_submodule(name).state_dict().items()}
        for i, name in ((0, "linear1"), (3, "linear2")):
            state |= {f"{name}.{k}": v for k, v in layer.feedforward[i].state_dict().items()}
        peer.load_state_dict(state)
        h = peer(h, **masks)
    return nn.functional.layer_norm(h, (16,), model.norm.weight, model.norm.bias)


def randomised(model):
    """Return the model with random scales and shifts in its norms, so that each one matters."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.bias.uniform_(-0.5, 0.5, generator=generator)
    return model.eval()


def test_vision_transformer_is_what_its_docstring_says():
    model, x = randomised(vision()), images()
    h = through_layers(model, model.embed(x) + model.positions)
    torch.testing.assert_close(model(x), model.head(h.mean(1)))


WRONG = [
    (small, lambda x, p: (x[:, :5], p), r"x is .*expected floats of shape \(n, 7, 3\)"),
    (small, lambda x, p: (x[..., :2], p), r"x is .*expected floats of shape \(n, 7, 3\)"),
    (small, lambda x, p: (x.long(), p), "x is torch.int64"),
    (small, lambda x, p: ([[1.0]], p), "x is list; expected a tensor"),
    (small, lambda x, p: (x, p[:, :5]), r"padding is .*expected bool of shape \(5, 7\)"),
    (vision, lambda x: (x[:, :5],), r"x is .*expected floats of shape \(n, 6, 5\)"),
    (vision, lambda x: (x, x[..., 0] > 0), "padding is given; expected None, as an image"),
    (writer, lambda x: (x[0],), r"x is .*expected int64 of shape \(n, T\)"),
    (writer, lambda x: (x + 256,), "x holds .*; expected tokens 0 <= x < 256"),
    (writer, lambda x: (x.repeat(1, 2),), "x has 12 bytes in a row; expected at most 6"),
]


@pytest.mark.parametrize("make, change, message", WRONG)
def test_wrong_inputs(make, change, message):
    with pytest.raises(TypeError if "list" in message else ValueError, match=message):
        make()(*change(*MODELS[make]))
    if make is writer:
        with pytest.raises(ValueError, match="padding is given; expected None, as a text"):
            writer().attention_maps(text(), torch.zeros(5, 6, dtype=torch.bool))


# --- Weights --------------------------------------------------------------------------------------

MECHANISMS = {
    "softmax": softmax_attention,
    "linear": linear_attention,
    "a partial": functools.partial(window_attention, window=2),
    "a class": Learned,
    "a partial of a class": functools.partial(NormalizedAttention, eps=1e-3, learn_beta=True),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_maps_of_every_model(name):
    for make, x in MODELS.items():
        model = make(attention=MECHANISMS[name])
        padding = x[1] if len(x) == 2 else torch.zeros(5, model.length, dtype=torch.bool)
        maps = model.attention_maps(*x)
        assert [A.shape for A in maps] == [(5, 4, model.length, model.length)] * 2
        for A in maps:
            rows = A.sum(-1).masked_select(~padding[:, None])  # of queries without padding
            torch.testing.assert_close(rows, torch.ones_like(rows))
            assert (A >= 0).all() and not A.masked_select(padding[:, None, None]).any()
            assert make not in WRITERS or (A.triu(1) == 0).all()
        assert model.train()(*x).isfinite().all()


def test_fewer_keys_give_fewer_columns():
    attention = functools.partial(CvTAttention, grid=(2, 3), kv_stride=2)
    assert vision(attention=attention).attention_maps(images())[1].shape == (5, 4, 6, 2)


# --- A language model -----------------------------------------------------------------------------


def test_language_model_is_what_its_docstring_says():
    model, x = randomised(writer()), text()
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    h = through_layers(model, model.embed.weight[x] + model.positions, src_mask=mask)
    torch.testing.assert_close(model(x), model.head(h))
    assert model(x).shape == (5, 6, 256)
    assert sum(p.numel() for p in ByteLM(32, Config()).parameters()) == 102_144


def test_a_model_with_taps_mixes_bytes_ahead_of_every_attention():
    torch.manual_seed(1)
    model, h, taps = randomised(with_taps()), torch.randn(2, 6, 16), torch.randn(4, 16)
    for layer in model.layers:
        norm = layer.norm1[0](h)
        torch.testing.assert_close(layer.norm1(h), norm)  # untrained taps mix nothing
        layer.norm1[1].weight.data = taps
        mixed = nn.functional.conv1d(norm.mT, taps.mT[:, None], padding=3, groups=16).mT[:, :6]
        torch.testing.assert_close(layer.norm1(h), mixed)
    model = LanguageModel(6, Config(layers=2), [identity_attention, linear_attention])
    kinds = [layer.attention.attention for layer in model.layers]
    assert kinds == [identity_attention, linear_attention]


def test_positions_start_as_sinusoids():
    model = writer()
    assert torch.equal(model.positions, sinusoids(6, 16)) and model.positions.requires_grad
    for dim in (16, 7):
        t, i = torch.arange(9)[:, None], torch.arange(dim)
        angles = t / 10_000 ** ((i - i % 2) / dim)
        expected = torch.where(i % 2 == 0, angles.sin(), angles.cos())
        torch.testing.assert_close(sinusoids(9, dim), expected)


@pytest.mark.parametrize("make", MODELS)
def test_gradients_reach_every_parameter(make):
    model, y = make(), torch.arange(5) % 4
    if make in WRITERS:
        y = text(n=200)
        logits, y = model(y[:, :-1]).flatten(0, 1), y[:, 1:].flatten()
    else:
        logits = model(*MODELS[make])
    nn.functional.cross_entropy(logits, y).backward()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all() and parameter.grad.any(), name
