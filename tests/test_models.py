"""The models: shapes, padding, maps, and the rule for `attention`."""

import copy
import functools

import pytest
import torch
from torch import nn

from derived_attention.attention.convolutional import Conv1DAttention, Conv2DAttention, CvTAttention
from derived_attention.attention.linear import linear_attention
from derived_attention.attention.normalized import NormalizedAttention, normalized_attention
from derived_attention.attention.scaled import (
    ScaledAttention,
    ScaledNormalizedAttention,
    scaled_attention,
    scaled_normalized_attention,
)
from derived_attention.attention.softmax import (
    MultiheadAttention,
    attention_weights,
    softmax_attention,
)
from derived_attention.attention.sparse import fixed_attention, strided_attention, window_attention
from derived_attention.models import (
    ByteLM,
    SeriesClassifier,
    SeriesRegressor,
    TokenClassifier,
    VisionTransformer,
    make_attention,
    sinusoids,
)

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


# --- Numbers for series ---------------------------------------------------------------------------

NUMBER = dict(channels=3, length=7, target=(5.0, 2.0), dim=16, heads=4, hidden=32)


def test_regressor_is_the_classifier_with_one_output_in_units():
    torch.manual_seed(0)
    model = trained_statistics(SeriesRegressor(**NUMBER))
    twin = small(classes=1).eval()
    state = {k: v for k, v in model.state_dict().items() if k not in ("mean", "sd")}
    twin.load_state_dict(state)
    x, padding = batch()
    numbers = model(x, padding)
    assert numbers.shape == (5,)
    torch.testing.assert_close(numbers, 5 + 2 * twin(x, padding)[:, 0])
    assert model.classes == 0 and float(model.state_dict()["sd"]) == 2.0


@pytest.mark.parametrize(
    "target, error",
    [
        (None, TypeError),
        (1.0, TypeError),
        ((1.0,), TypeError),
        ((0.0, 0.0), ValueError),
        ((0.0, -1.0), ValueError),
        ((float("nan"), 1.0), ValueError),
        ((0.0, float("inf")), ValueError),
    ],
)
def test_wrong_target(target, error):
    with pytest.raises(error, match="target is"):
        SeriesRegressor(**NUMBER | {"target": target})


# --- Images and tokens ----------------------------------------------------------------------------

SIZES = dict(dim=16, heads=4, hidden=32)


def vision(seed=0, **changes):
    torch.manual_seed(seed)
    return VisionTransformer(**dict(grid=(2, 3), channels=5, classes=4) | SIZES | changes)


def reader(seed=0, **changes):
    torch.manual_seed(seed)
    return TokenClassifier(**dict(vocabulary=9, classes=4, length=6) | SIZES | changes)


def images(n=5):
    return torch.randn(n, 6, 5, generator=torch.Generator().manual_seed(2))


def tokens():
    """Five sequences of 6, 4, 1, 5 and 6 tokens."""
    x = torch.randint(1, 9, (5, 6), generator=torch.Generator().manual_seed(3))
    padding = torch.arange(6) >= torch.tensor([6, 4, 1, 5, 6])[:, None]
    return x.masked_fill(padding, 0), padding


def by_hand(model, h, padding):
    """Pre-norm layers and masked mean, from PyTorch's own encoder layers."""
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
        h = peer(h, src_key_padding_mask=padding)
    h = nn.functional.layer_norm(h, (16,), model.norm.weight, model.norm.bias)
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


@pytest.mark.parametrize("make, x", [(vision, (images(),)), (reader, tokens())])
def test_gradients_reach_every_parameter_of_both(make, x):
    model = make()
    logits = model(*x)
    assert logits.shape == (5, 4)
    nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3, 0])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_both_follow_the_rule_for_attention():
    for make, x in ((vision, (images(),)), (reader, tokens())):
        plain = make().eval()(*x)
        torch.testing.assert_close(make(attention=Learned).eval()(*x), plain)
        other = functools.partial(mean_attention, strength=3.0)
        assert not torch.allclose(make(attention=other).eval()(*x), plain)
        assert repr(make(attention=other)) != repr(make())
    assert repr(vision(grid=(3, 2))) != repr(vision())


def test_wrong_sizes_of_both():
    for name in ("channels", "classes", "dim", "heads", "layers", "hidden"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            vision(**{name: 0})
    for name in ("vocabulary", "length"):
        with pytest.raises(TypeError, match=f"{name} is 2.0"):
            reader(**{name: 2.0})
    for grid in (6, "23", (2, 3, 4), None):
        with pytest.raises(TypeError, match=r"grid is .*; expected \(rows, columns\)"):
            vision(grid=grid)
    with pytest.raises(ValueError, match=r"grid\[1\] is 0"):
        vision(grid=(2, 0))
    with pytest.raises(TypeError, match="attention is 'softmax'"):
        vision(attention="softmax")


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


# --- Weights of every mechanism -------------------------------------------------------------------

SCALES = dict(scales=[1, 1, 2, 4])
MECHANISMS = {
    "softmax": softmax_attention,
    "linear": linear_attention,
    "window": functools.partial(window_attention, window=2),
    "strided": functools.partial(strided_attention, stride=2),
    "fixed": functools.partial(fixed_attention, stride=3),
    "normalized": functools.partial(normalized_attention, beta=0.6),
    "NormalizedAttention": functools.partial(NormalizedAttention, eps=1e-3, learn_beta=True),
    "scaled": functools.partial(scaled_attention, **SCALES),
    "ScaledAttention": functools.partial(ScaledAttention, **SCALES, pooling="k-means"),
    "scaled, normalized": functools.partial(scaled_normalized_attention, **SCALES, beta=0.5),
    "ScaledNormalizedAttention": functools.partial(ScaledNormalizedAttention, **SCALES),
    "scaled, linear": functools.partial(ScaledAttention, **SCALES, kernel=linear_attention),
    "Conv1DAttention": Conv1DAttention,
    "a class": Learned,
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_maps_of_every_mechanism(name):
    attention = MECHANISMS[name]
    for make, (x, padding) in ((small, batch()), (reader, tokens())):
        model = make(attention=attention)
        T = model.length
        maps = model.attention_maps(x, padding)
        assert [A.shape for A in maps] == [(5, 4, T, T)] * 2
        for A in maps:
            rows = A.sum(-1).masked_select(~padding[:, None])  # of the queries that are there
            torch.testing.assert_close(rows, torch.ones_like(rows))
            assert (A >= 0).all()
            assert (A.masked_select(padding[:, None, None]) == 0).all()
        assert model.train()(x, padding).isfinite().all()


GRID_MECHANISMS = MECHANISMS | {
    "Conv2DAttention": functools.partial(Conv2DAttention, grid=(2, 3)),
    "CvTAttention": functools.partial(CvTAttention, grid=(2, 3)),
}


@pytest.mark.parametrize("name", GRID_MECHANISMS)
def test_maps_of_images(name):
    model = vision(attention=GRID_MECHANISMS[name])
    for A in model.attention_maps(images()):
        torch.testing.assert_close(A.sum(-1), torch.ones(5, 4, 6))


def test_maps_are_those_of_the_normalised_input():
    model, (x, padding) = randomised(reader()), tokens()
    layer, h = model.layers[0], (model.embed(x) + model.positions).detach()
    h = layer.norm1(h)
    q, k, _ = layer.attention._heads(h, h, h)
    expected = attention_weights(q, k, attn_mask=~padding[:, None, None, :])
    torch.testing.assert_close(model.attention_maps(x, padding)[0], expected.detach())


def test_fewer_keys_give_fewer_columns():
    attention = functools.partial(CvTAttention, grid=(2, 3), kv_stride=2)
    assert vision(attention=attention).attention_maps(images())[1].shape == (5, 4, 6, 2)


# --- A language model -----------------------------------------------------------------------------


def writer(seed=0, **changes):
    torch.manual_seed(seed)
    return ByteLM(**dict(length=6) | SIZES | changes)


def text(n=5, length=6):
    return torch.randint(0, 256, (n, length), generator=torch.Generator().manual_seed(5))


def test_language_model_is_what_its_docstring_says():
    model, x = randomised(writer()), text()
    h = model.embed.weight[x] + model.positions
    mask = nn.Transformer.generate_square_subsequent_mask(6)
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
        h = peer(h, src_mask=mask)
    h = nn.functional.layer_norm(h, (16,), model.norm.weight, model.norm.bias)
    torch.testing.assert_close(model(x), model.head(h))
    assert model(x).shape == (5, 6, 256)
    assert sum(p.numel() for p in ByteLM(32).parameters()) == 102_144


def test_positions_start_as_sinusoids():
    model = writer()
    assert torch.equal(model.positions, sinusoids(6, 16)) and model.positions.requires_grad
    for dim in (16, 7):
        for t in range(9):
            for i in range(dim):
                wave = torch.sin if i % 2 == 0 else torch.cos
                expected = wave(torch.tensor(t / 10_000 ** ((i - i % 2) / dim)))
                assert sinusoids(9, dim)[t, i] == pytest.approx(float(expected), abs=1e-5)


CAUSAL = ("softmax", "linear", "window", "strided", "fixed", "normalized", "NormalizedAttention")
CAUSAL_MECHANISMS = {name: MECHANISMS[name] for name in (*CAUSAL, "a class")} | {
    "Conv1DAttention, causal": functools.partial(Conv1DAttention, causal=True)
}


@pytest.mark.parametrize("name", CAUSAL_MECHANISMS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_no_byte_has_an_influence_on_what_comes_before_it(name, mode):
    model, x = writer(attention=CAUSAL_MECHANISMS[name], dropout=0.0), text()
    getattr(model, mode)()
    expected = model(x)
    for t in range(6):
        changed = x.clone()
        changed[:, t] = (changed[:, t] + 1) % 256
        actual = model(changed)
        torch.testing.assert_close(actual[:, :t], expected[:, :t], rtol=0, atol=1e-6)
        later = (actual - expected).abs().amax((0, 2))[t : t + 2]  # a window sees no further
        assert later.min() > 1e-4


@pytest.mark.parametrize("name", CAUSAL_MECHANISMS)
def test_a_shorter_text_gives_the_first_rows(name):
    model, x = writer(attention=CAUSAL_MECHANISMS[name]).eval(), text()
    for length in (1, 2, 5):
        torch.testing.assert_close(model(x[:, :length]), model(x)[:, :length])


@pytest.mark.parametrize("name", CAUSAL_MECHANISMS)
def test_maps_of_a_language_model_are_lower_triangles(name):
    for A in writer(attention=CAUSAL_MECHANISMS[name]).attention_maps(text()):
        assert A.shape == (5, 4, 6, 6) and (A.triu(1) == 0).all()
        torch.testing.assert_close(A.sum(-1), torch.ones(5, 4, 6))


@pytest.mark.parametrize("name", sorted(set(GRID_MECHANISMS) - set(CAUSAL_MECHANISMS)))
def test_mechanisms_that_cannot_be_causal_say_so(name):
    model = writer(attention=GRID_MECHANISMS[name])
    with pytest.raises(ValueError, match="is_causal is True"):
        model(text())


def test_gradients_reach_every_parameter_of_a_language_model():
    model, x = writer(), text(n=200)
    nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_text_of_a_language_model_names_what_it_is():
    texts = {repr(writer()), repr(writer(length=7)), repr(writer(attention=linear_attention))}
    assert len(texts) == 3 and all("CausalLayer" in text for text in texts)


def test_wrong_input_of_a_language_model():
    for name in ("length", "dim", "heads", "layers", "hidden"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            writer(**{name: 0})
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
