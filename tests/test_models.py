"""The models: shapes, padding, maps, and the rule for `attention`."""

import copy
import dataclasses
import functools

import pytest
import torch
from torch import nn

from derived_attention.batch_norm.layer import NormalizedAttention
from derived_attention.convolutional.layer import CvTAttention
from derived_attention.layer import MultiheadAttention
from derived_attention.linear.core import linear_attention
from derived_attention.softmax.core import softmax_attention
from derived_attention.sparse.core import window_attention
from derived_book.tasks.images.model import VisionTransformer
from derived_book.tasks.language.model import ByteLM
from derived_book.tasks.model import Config, TokenClassifier, make_attention, sinusoids
from derived_book.tasks.series.model import SeriesClassifier

SMALL = dict(channels=3, classes=4, length=7)
SIZES = dict(dim=16, heads=4, hidden=32)


def build(kind, sizes, seed, changes):
    """Build a model; `changes` are sizes of its own, or of its configuration."""
    own = {name: changes.pop(name) for name in [*changes] if name in sizes}
    torch.manual_seed(seed)
    return kind(**sizes | own, config=Config(**SIZES | changes))


def small(seed=0, **changes):
    return build(SeriesClassifier, SMALL, seed, changes)


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
    config = Config(dim=128, heads=8, layers=2, hidden=256)
    model = SeriesClassifier(channels=12, classes=9, length=26, config=config)
    assert sum(p.numel() for p in model.parameters()) == 299_913


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


def weights_of(layer, h, padding):
    """What PyTorch's own layer says."""
    peer = nn.MultiheadAttention(16, 4, batch_first=True)
    peer.load_state_dict(layer.attention.state_dict())
    how = dict(key_padding_mask=padding, average_attn_weights=False)
    return peer.eval()(h, h, h, **how)[1].detach()


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
    torch.testing.assert_close(maps[0], weights_of(model.layers[0], h, padding))


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


def test_text_of_a_model_names_its_attention():
    texts = {
        repr(small()),
        repr(small(attention=mean_attention)),
        repr(small(attention=functools.partial(mean_attention, strength=2.0))),
        repr(small(attention=functools.partial(mean_attention, strength=3.0))),
        repr(small(attention=Learned)),
        repr(small(length=8)),
        repr(small(dropout=0.2)),
        repr(vision()),
        repr(vision(grid=(3, 2))),
        repr(vision(attention=mean_attention)),
        repr(reader()),
        repr(reader(attention=mean_attention)),
        repr(writer()),
        repr(writer(length=7)),
        repr(writer(attention=linear_attention)),
    }
    assert len(texts) == 15


def test_wrong_sizes():
    for make, names in (
        (small, SMALL),
        (vision, ("channels", "classes")),
        (reader, ("vocabulary", "classes", "length")),
        (writer, ("length",)),
        (lambda **sizes: Config(**sizes), ("dim", "heads", "layers", "hidden")),
    ):
        for name in names:
            with pytest.raises(ValueError, match=f"{name} is 0; expected at least 1"):
                make(**{name: 0})
            with pytest.raises(TypeError, match=f"{name} is 2.0; expected an integer"):
                make(**{name: 2.0})
    for grid in (6, "23", (2, 3, 4), None):
        with pytest.raises(TypeError, match=r"grid is .*; expected \(rows, columns\)"):
            vision(grid=grid)
    with pytest.raises(ValueError, match=r"grid\[1\] is 0"):
        vision(grid=(2, 0))


def test_wrong_configuration():
    with pytest.raises(ValueError, match="embed_dim is 16 and num_heads 3"):
        small(heads=3)
    for wrong, error in (
        (1.5, ValueError),
        (-0.1, ValueError),
        (True, TypeError),
        (None, TypeError),
    ):
        with pytest.raises(error, match=f"dropout is {wrong}; expected"):
            Config(dropout=wrong)
    for wrong in ("softmax", None, nn.Identity(), 3):
        for call in (lambda wrong: Config(attention=wrong), lambda a: make_attention(a, 16, 4)):
            with pytest.raises(TypeError, match="attention is .*; expected a function, or a class"):
                call(wrong)
    with pytest.raises(TypeError, match="config is 64; expected a Config, such as"):
        ByteLM(32, 64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().dim = 3


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


# --- Images and tokens ----------------------------------------------------------------------------

TEXT = dict(vocabulary=9, length=6)


def vision(seed=0, **changes):
    sizes = dict(grid=(2, 3), channels=5, classes=4, class_token=False)
    return build(VisionTransformer, sizes, seed, changes)


def reader(seed=0, **changes):
    return build(TokenClassifier, TEXT | dict(classes=4), seed, changes)


def images(n=5):
    return torch.randn(n, 6, 5, generator=torch.Generator().manual_seed(2))


def tokens():
    """Five sequences of 6, 4, 1, 5 and 6 tokens."""
    x = torch.randint(1, 9, (5, 6), generator=torch.Generator().manual_seed(3))
    padding = torch.arange(6) >= torch.tensor([6, 4, 1, 5, 6])[:, None]
    return x.masked_fill(padding, 0), padding


def through_layers(model, h, **masks):
    """Pre-norm layers and the last norm, from PyTorch's own encoder layers."""
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


def by_hand(model, h, padding):
    """Pre-norm layers and masked mean."""
    h = through_layers(model, h, src_key_padding_mask=padding)
    if padding is None:
        return model.head(h.mean(1))
    rows = [h[i, ~padding[i]].mean(0) for i in range(len(h))]
    return model.head(torch.stack(rows))


def randomised(model):
    """Norms with scales and shifts of their own, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.bias.uniform_(-0.5, 0.5, generator=generator)
    return model.eval()


def test_vision_transformer_is_what_its_docstring_says():
    model, x = randomised(vision()), images()
    expected = by_hand(model, model.embed(x) + model.positions, None)
    torch.testing.assert_close(model(x), expected)


def test_token_classifier_is_what_its_docstring_says():
    model, (x, padding) = randomised(reader()), tokens()
    expected = by_hand(model, model.embed.weight[x] + model.positions, padding)
    torch.testing.assert_close(model(x, padding), expected)


def test_padded_tokens_change_nothing():
    model, (x, padding) = reader().eval(), tokens()
    expected = model(x, padding)
    torch.testing.assert_close(model(x.masked_fill(padding, 7), padding), expected)
    longer = reader(length=9).eval()
    state = model.state_dict()
    state["positions"] = torch.cat([state["positions"], torch.randn(3, 16)])
    longer.load_state_dict(state)
    more = nn.functional.pad(x, (0, 3), value=5), nn.functional.pad(padding, (0, 3), value=True)
    torch.testing.assert_close(longer(*more), expected)
    assert not torch.allclose(model(x), expected)
    nothing = model(x, torch.ones_like(padding))
    torch.testing.assert_close(nothing, model.head.bias.expand(5, 4))


def test_where_a_patch_is_matters():
    model, x = vision().eval(), images()
    assert not torch.allclose(model(x[:, [1, 0, 2, 3, 4, 5]]), model(x))


def test_both_follow_the_rule_for_attention():
    for make, x in ((vision, (images(),)), (reader, tokens())):
        plain = make().eval()(*x)
        torch.testing.assert_close(make(attention=Learned).eval()(*x), plain)
        other = functools.partial(mean_attention, strength=3.0)
        assert not torch.allclose(make(attention=other).eval()(*x), plain)


def test_a_class_token_comes_first_and_gives_the_answer():
    model, x = randomised(vision(class_token=True)), images()
    h = torch.cat([model.class_token.expand(5, 1, 16), model.embed(x) + model.positions], 1)
    torch.testing.assert_close(model(x), model.head(through_layers(model, h)[:, 0]))
    assert [A.shape for A in model.attention_maps(x)] == [(5, 4, 7, 7)] * 2
    torch.testing.assert_close(vision().positions, vision(class_token=False).positions)
    with pytest.raises(TypeError, match="class_token is 1; expected True or False"):
        vision(class_token=1)


def test_wrong_inputs_of_both():
    for wrong in (images()[:, :5], images()[..., :4], images()[0], images().long()):
        with pytest.raises(ValueError, match=r"x is .*expected floats of shape \(n, 6, 5\)"):
            vision()(wrong)
    with pytest.raises(ValueError, match="padding is given; expected None, as an image"):
        vision()(images(), torch.zeros(5, 6, dtype=torch.bool))
    x, padding = tokens()
    for wrong in (x[:, :5], x[0], x.float(), x.int()):
        with pytest.raises(ValueError, match=r"x is .*expected int64 of shape \(n, 6\)"):
            reader()(wrong, padding)
    for wrong, found in ((x + 1, "1 to 9"), (x - 1, "-1 to 7")):
        with pytest.raises(ValueError, match=f"x holds {found}; expected tokens 0 <= x < 9"):
            reader()(wrong, padding)
    with pytest.raises(ValueError, match="padding is torch.float32"):
        reader()(x, padding.float())
    with pytest.raises(TypeError, match="x is list; expected a tensor"):
        reader()([[1]])


# --- Weights --------------------------------------------------------------------------------------

MECHANISMS = {
    "softmax": softmax_attention,
    "linear": linear_attention,
    "a partial": functools.partial(window_attention, window=2),
    "a class": Learned,
    "a partial of a class": functools.partial(NormalizedAttention, eps=1e-3, learn_beta=True),
}
every_mechanism = pytest.mark.parametrize("name", MECHANISMS)


@every_mechanism
def test_maps_of_every_model(name):
    attention = MECHANISMS[name]
    for make, x in (
        (small, batch()),
        (reader, tokens()),
        (vision, (images(),)),
        (writer, (text(),)),
    ):
        model = make(attention=attention)
        padding = x[1] if len(x) == 2 else torch.zeros(5, model.length, dtype=torch.bool)
        maps = model.attention_maps(*x)
        assert [A.shape for A in maps] == [(5, 4, model.length, model.length)] * 2
        for A in maps:
            rows = A.sum(-1).masked_select(~padding[:, None])  # of the queries that are there
            torch.testing.assert_close(rows, torch.ones_like(rows))
            assert (A >= 0).all()
            assert (A.masked_select(padding[:, None, None]) == 0).all()
            assert make is not writer or (A.triu(1) == 0).all()
        assert model.train()(*x).isfinite().all()


def test_maps_are_those_of_the_normalised_input():
    model, (x, padding) = randomised(reader()), tokens()
    layer, h = model.layers[0], (model.embed(x) + model.positions).detach()
    expected = weights_of(layer, layer.norm1(h), padding)
    torch.testing.assert_close(model.attention_maps(x, padding)[0], expected)


def test_fewer_keys_give_fewer_columns_and_cannot_be_causal():
    attention = functools.partial(CvTAttention, grid=(2, 3), kv_stride=2)
    assert vision(attention=attention).attention_maps(images())[1].shape == (5, 4, 6, 2)
    with pytest.raises(ValueError, match="is_causal is"):
        writer(attention=attention)(text())


# --- A language model -----------------------------------------------------------------------------


def writer(seed=0, **changes):
    return build(ByteLM, dict(length=6), seed, changes)


def text(n=5, length=6):
    return torch.randint(0, 256, (n, length), generator=torch.Generator().manual_seed(5))


def test_language_model_is_what_its_docstring_says():
    model, x = randomised(writer()), text()
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    h = through_layers(model, model.embed.weight[x] + model.positions, src_mask=mask)
    torch.testing.assert_close(model(x), model.head(h))
    assert model(x).shape == (5, 6, 256)
    assert sum(p.numel() for p in ByteLM(32, Config()).parameters()) == 102_144


def test_positions_start_as_sinusoids():
    model = writer()
    assert torch.equal(model.positions, sinusoids(6, 16)) and model.positions.requires_grad
    for dim in (16, 7):
        for t in range(9):
            for i in range(dim):
                wave = torch.sin if i % 2 == 0 else torch.cos
                expected = wave(torch.tensor(t / 10_000 ** ((i - i % 2) / dim)))
                assert sinusoids(9, dim)[t, i] == pytest.approx(float(expected), abs=1e-5)


@every_mechanism
def test_no_byte_has_an_influence_on_what_comes_before_it(name):
    model, x = writer(attention=MECHANISMS[name], dropout=0.0), text()
    for mode in (True, False):
        expected = model.train(mode)(x)
        for t in range(6):
            changed = x.clone()
            changed[:, t] = (changed[:, t] + 1) % 256
            actual = model(changed)
            torch.testing.assert_close(actual[:, :t], expected[:, :t], rtol=0, atol=1e-6)
            later = (actual - expected).abs().amax((0, 2))[t : t + 2]  # a window sees no further
            assert later.min() > 1e-4
    for length in (1, 2, 5):
        torch.testing.assert_close(model(x[:, :length]), expected[:, :length])


@pytest.mark.parametrize(
    "make, x", [(small, batch()), (vision, (images(),)), (reader, tokens()), (writer, (text(),))]
)
def test_gradients_reach_every_parameter(make, x):
    model = make()
    logits = model(*x)
    if make is writer:
        model, y = writer(), text(n=200)
        logits, y = model(y[:, :-1]).flatten(0, 1), y[:, 1:].flatten()
    else:
        assert logits.shape == (5, 4)
        y = torch.tensor([0, 1, 2, 3, 0])
    nn.functional.cross_entropy(logits, y).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_wrong_input_of_a_language_model():
    model, x = writer(), text()
    for wrong in (x[0], x.float(), x.to(torch.uint8)):
        with pytest.raises(ValueError, match=r"x is .*expected int64 of shape \(n, T\)"):
            model(wrong)
    with pytest.raises(ValueError, match="x holds .* to 256; expected tokens 0 <= x < 256"):
        model(x.clamp(min=256))
    with pytest.raises(ValueError, match="x has 7 bytes in a row; expected at most 6"):
        model(text(length=7))
    with pytest.raises(ValueError, match="padding is given; expected None, as a text"):
        model.attention_maps(x, torch.zeros(5, 6, dtype=torch.bool))
    with pytest.raises(TypeError, match="x is list; expected a tensor"):
        model([[1]])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU HERE: CUDA IS NOT TESTED")
@pytest.mark.parametrize(
    "make, inputs",
    [(small, batch()), (vision, (images(),)), (reader, tokens()), (writer, (text(),))],
)
def test_cuda_agrees_with_cpu(make, inputs):
    model = make().eval()
    expected, maps = model(*inputs), model.attention_maps(*inputs)
    model, inputs = model.cuda(), [tensor.cuda() for tensor in inputs]
    torch.testing.assert_close(model(*inputs).cpu(), expected, rtol=1e-4, atol=1e-4)
    actual = model.attention_maps(*inputs)
    torch.testing.assert_close([m.cpu() for m in actual], maps, rtol=1e-4, atol=1e-4)
