"""In every place of a model, a layer does what was declared and does not depend on the future.

Self- or cross-attention is declared when a layer is made, so it makes no difference which objects
are passed, and by which function. In a decoder the layer is right, or it is refused. A padded
causal batch gives the results of its sequences one by one.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from helpers import B, H, additive, assert_all_close, every_causal_mechanism, every_mechanism
from kinds import detector
from test_contract_layers import GONE, E, N, make_layer, output, sequences
from torch import nn

from derived_attention.batch_norm.layer import NormalizedAttention
from derived_attention.layer import MultiheadAttention
from derived_attention.mixture.layer import MixtureAttention
from derived_attention.multiresolution.core import multiresolution_attention
from derived_attention.multiresolution.layer import MultiresolutionAttention, multiresolution_layer
from derived_attention.primal.core import ksvd_objectives
from derived_attention.primal.layer import PrimalAttention
from derived_attention.registry import MECHANISMS
from derived_book.tasks.model import make_attention

MIXING = [name for name, entry in MECHANISMS.items() if not entry.alone]
BARE = [name for name in MECHANISMS if name in ("softmax", "ridge", "lasso")]
causal_of = {"conv1d": {"causal": True}}  # options that a layer takes when it is made

# --- self- or cross-attention is declared --------------------------------------------------------


class Called(nn.Module):
    """A layer as a model of three inputs, which may be views, copies or one tensor."""

    def __init__(self, layer, **how):
        super().__init__()
        self.layer, self.how = layer, {"need_weights": False} | how

    def forward(self, q, k, v):
        return self.layer(q, k, v, **self.how)[0]


class OnViews(Called):
    """The same, of one input."""

    def __init__(self, layer, change, **how):
        super().__init__(layer, **how)
        self.change = change

    def forward(self, x):
        return super().forward(x, self.change(x), self.change(x))


CHANGES = {
    "one tensor": lambda x: x,
    "copies": lambda x: x.clone(),
    "views": lambda x: x.view(x.shape[0], -1, x.shape[-1]),
    "the result of an operation": lambda x: 1 * x,
}


PADDINGS = [{}, {"key_padding_mask": GONE}, {"key_padding_mask": additive(~GONE)}]


def declared(name):
    """Its layer, self-attention; cross-attention, where there is one; without projections."""
    yield make_layer(name)
    if name not in MIXING:
        yield make_layer(name, cross=True)
    if name in BARE:
        for cross in (False, True):
            yield make_layer(name, projected=False, cross=cross)


@every_mechanism
def test_meaning_depends_on_no_object(name):
    x = sequences()
    for layer in declared(name):
        for how in PADDINGS:
            expected = output(layer, x, **how)
            there = ~GONE if how else torch.ones(B, N).bool()
            for key, change in CHANGES.items():
                found = OnViews(layer, change, **how)(x)
                what = f"{name}, {layer.cross=}, {list(how)}, {key}"
                assert_all_close([found[there]], [expected[there]], 1e-10, what)
            one = lambda q, k, v, *gone: layer(q, k, v, *gone, need_weights=False)[0]  # noqa: B023, E731
            found = torch.func.vmap(one)(x, x.clone(), x.view(B, N, E), *how.values())
            assert_all_close([found[there]], [expected[there]], 1e-10, f"{name}, vmap")


@every_mechanism
@pytest.mark.filterwarnings("ignore")
def test_meaning_depends_on_no_compiler_and_no_transform(name):
    """Of a padded batch, causal where the mechanism is.

    `test_contract` has the gradients of compiled functions, `test_contract_transforms` those of
    exported layers.
    """
    x, gone, causal = sequences(), PADDED["anywhere"], MECHANISMS[name].causal
    layers = [make_layer(name, **causal_of.get(name, {}))]
    if layers[0].paired and name not in MIXING:
        layers.append(make_layer(name, cross=True))
    for layer in layers:
        how = {"is_causal": causal and not layer.cross}
        expected = output(layer, x, gone, **how)[~gone]
        torch.compiler.reset()
        views = OnViews(layer, CHANGES["views"], key_padding_mask=gone, **how)
        compiled = torch.compile(views, fullgraph=True, backend="eager")
        assert_all_close([compiled(x)[~gone]], [expected], 1e-10, f"{name}, {layer.cross=}")
        one = lambda x, gone: output(layer, x, gone, **how)  # noqa: B023, E731
        assert_all_close([torch.func.vmap(one)(x, gone)[~gone]], [expected], 1e-10, name)


@every_mechanism
def test_a_layer_that_is_not_declared_says_so_where_it_matters(name):
    """Fewer queries than keys are the same with and without a declaration, or an error."""
    layer, x = make_layer(name), sequences()
    if name in MIXING:
        with pytest.raises(ValueError, match="cross is True; expected False: .* mixes queries"):
            make_layer(name, cross=True)
    if name in MIXING or layer.paired:
        with pytest.raises(ValueError, match="expected as many keys as queries, as this is self-"):
            layer.check(x[:, :4], x, x, is_causal=False)
    else:
        other = make_layer(name, cross=True)
        assert "cross" in repr(other) and "cross" not in repr(layer)
        for how in PADDINGS:
            found = [y(x[:, :4], x, x, need_weights=False, **how)[0] for y in (layer, other)]
            assert torch.equal(*found)


# --- no place of a model depends on the future ---------------------------------------------------


def disturbed(x, t, size=5.0):
    """The same with other numbers from position t on."""
    return x + size * (torch.arange(x.shape[1]) >= t)[:, None]


def assert_past_stays(run, target, what):
    out = run(target)
    for t in (1, 3, target.shape[1] - 1):
        changed = run(disturbed(target, t))
        assert_all_close([changed[:, :t]], [out[:, :t]], 1e-12, f"{what}, {t}")
        assert not torch.allclose(changed[:, t:], out[:, t:]), what


@every_mechanism
def test_pytorchs_decoder_layer_sees_no_future_or_is_refused(name):
    entry, memory, target = MECHANISMS[name], sequences()[:, :13], sequences()
    layer = nn.TransformerDecoderLayer(E, H, 16, dropout=0.0, batch_first=True).double().eval()
    layer.self_attn = make_layer(name, **causal_of.get(name, {}))
    mask = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
    with torch.no_grad():
        for how in ({"tgt_is_causal": True}, {"tgt_mask": mask, "tgt_is_causal": True}):
            run = lambda x, how=how: layer(x, memory, **how)  # noqa: E731
            if entry.causal and (entry.any_mask or "tgt_mask" not in how):
                assert_past_stays(run, target, name)
            else:
                with pytest.raises(ValueError, match="(is|has shape) .*; expected"):
                    run(target)
        layer.self_attn = nn.MultiheadAttention(E, H, batch_first=True).double()
        if entry.alone:
            layer.multihead_attn = make_layer(name, cross=True)
            assert_past_stays(lambda x: layer(x, target, tgt_mask=mask), target, name)
        else:
            layer.multihead_attn = make_layer(name)
            with pytest.raises(ValueError, match="expected as many keys as queries|for the grid"):
                layer(target, memory, tgt_mask=mask)


def test_keys_may_be_pooled_where_queries_are_not():
    kind = functools.partial(MultiresolutionAttention, scales=[1] * 4)
    pooled = functools.partial(kind, key_scales=[1, 2, 2, 4])
    own, across = (make_attention(pooled, 8, 4, cross=cross).double() for cross in (False, True))
    memory, gone = torch.randn(2, 9, 8).double(), torch.arange(9) > torch.tensor([[5], [8]])

    def run(x, memory=memory, gone=gone):
        x = x + own(x, x, x, is_causal=True)[0]
        return x + across(x, memory, memory, key_padding_mask=gone)[0]

    target = torch.randn(2, 7, 8).double()
    assert_past_stays(run, target, "key scales")
    short = run(target[:1], memory[:1, :6], None)
    assert_all_close([short], [run(target)[:1]], 1e-12)


def test_a_function_that_mixes_queries_is_refused_as_its_layer_is():
    mixing = functools.partial(multiresolution_attention, scales=[2] * 4)
    for attention in (mixing, functools.partial(MultiresolutionAttention, scales=[2] * 4)):
        with pytest.raises(ValueError, match="cross is True; expected False: .* mixes queries"):
            detector(attention=attention, heads=4)
        assert make_attention(attention, 8, 4)(*torch.zeros(3, 1, 5, 8))[0].shape == (1, 5, 8)

    class Own(nn.Module):
        """A layer that knows nothing of `cross`."""

        def __init__(self, dim, heads):
            super().__init__()

    assert isinstance(make_attention(Own, 8, 4, cross=True), Own)


@pytest.mark.parametrize("name", MIXING)
def test_a_function_is_told_which_queries_are_padding(name):
    """Not only its layer: what mixes queries has a mask for them, and the frame hands it on."""
    entry = MECHANISMS[name]
    own = entry.options(N, H, E // H)
    own = {key: x.double() if isinstance(x, torch.Tensor) else x for key, x in own.items()}
    run = functools.partial(entry.fast, **own)
    gone = torch.arange(N) >= torch.tensor([N - 4, N])[:, None]  # ends inside a window
    x = sequences()
    y = x + 5 * gone[..., None]
    for kind in (MultiheadAttention, NormalizedAttention):
        center = {} if kind is MultiheadAttention else {"center_keys": True}
        layer = kind(E, H, attention=run, dtype=torch.float64, **center)
        for need_weights in (False, True):
            out, other = (layer(z, z, z, gone, need_weights)[0][~gone] for z in (x, y))
            assert_all_close([out], [other], 1e-12, f"{name}, {kind.__name__}")
        known = layer(x, x, x, gone, need_weights=False, query_padding_mask=~gone)[0]
        assert not torch.allclose(known[~gone], out)
    q, k, v = torch.randn(3, B, H, N, E // H, generator=torch.Generator().manual_seed(0)).double()
    for mask in (~gone[:, None], torch.rand(B, H, N) < 0.6):
        fast, formula = (form(q, k, v, query_mask=mask, **own) for form in (run, entry.reference))
        there = mask.expand(B, H, N)
        assert_all_close([fast[there]], [formula[there]], 1e-12, name)
    with pytest.raises(TypeError, match="query_mask has dtype torch.float32; expected"):
        run(q, k, v, query_mask=torch.zeros(N))
    with pytest.raises(ValueError, match=r"query_mask has shape \(5,\); expected one that"):
        run(q, k, v, query_mask=torch.ones(5).bool())


# --- padded and causal ---------------------------------------------------------------------------

PADDED = {
    "right": GONE,
    "left": GONE.flip(1),
    "anywhere": torch.rand(B, N, generator=torch.Generator().manual_seed(0)) < 0.4,
}


def alone(layer, x, gone, **how):
    """The outputs of sequences one by one, without what is padding, one after the other."""
    rows = [row[~out][None] for row, out in zip(x, gone, strict=True)]
    return torch.cat([output(layer, row, is_causal=True, **how)[0] for row in rows])


def slopes(out, leaves):
    return torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)


def assert_padding_is_absence(layer, x, what, tol=1e-9):
    x = x.detach().requires_grad_()
    leaves = [x, *layer.parameters()]
    for side, gone in PADDED.items():
        wanted = alone(layer, x, gone)
        expected = [wanted, *slopes(wanted, leaves)]
        for mask in (gone, additive(~gone)):
            out = output(layer, x, mask, is_causal=True)[~gone]
            assert_all_close([out, *slopes(out, leaves)], expected, tol, f"{what}, {side}")
        if side == "right":
            for hidden in (5 * x, torch.full_like(x, math.nan)):
                y = torch.where(gone[..., None], hidden, x).detach()
                assert_all_close([output(layer, y, gone, is_causal=True)[~gone]], [wanted], tol)
        out, A = layer(x, x, x, gone, is_causal=True, average_attn_weights=False)
        assert_all_close([out[~gone]], [wanted], tol, f"{what}, {side}, weights")
        if A is not None:
            assert A.shape == (B, layer.num_heads, N, N)
            assert not A.masked_fill(~gone[:, None, None], 0).any(), f"{what}, {side}"
            assert not A.triu(1).any()


@every_causal_mechanism
def test_a_padded_causal_batch_is_its_sequences_one_by_one(name):
    layer = make_layer(name, **causal_of.get(name, {}))
    assert_padding_is_absence(layer, sequences(), name)
    one = sequences()[0]
    single = layer(one, one, one, GONE[0], is_causal=True, need_weights=False)[0]
    both = output(layer, sequences(), GONE, is_causal=True)
    assert_all_close([single[~GONE[0]]], [both[0][~GONE[0]]], 1e-10, "without a batch")


@pytest.mark.parametrize("base", ["softmax", "mgk", "linear"])
def test_causal_heads_of_two_scales_need_a_base_with_a_mask_for_each_query(base):
    kind = multiresolution_layer(MixtureAttention if base == "mgk" else MultiheadAttention)
    options = {} if base == "mgk" else {"attention": MECHANISMS[base].fast}
    torch.manual_seed(0)
    own = {"scales": (2, 1, 4), "key_scales": (2, 3, 1), "dtype": torch.float64}
    layer = kind(E, H, **own, **options).eval()
    if base == "linear":
        with pytest.raises(ValueError, match="key_scales differ from scales .* linear_attention"):
            output(layer, sequences(), is_causal=True)
        return
    assert_past_stays(lambda x: output(layer, x, is_causal=True), sequences(), base)
    assert_padding_is_absence(layer, sequences(), base)


def test_a_regularised_causal_batch_has_the_objectives_of_its_sequences():
    layer = PrimalAttention(E, H, directions=2, landmarks=40, regularised=True, dtype=torch.float64)
    x = sequences()
    for gone in PADDED.values():
        with ksvd_objectives() as found:
            output(layer, x, gone, is_causal=True)
        for J, row, out in zip(found[0], x, gone, strict=True):
            with ksvd_objectives() as single:
                output(layer, row[~out][None], is_causal=True)
            assert_all_close([J], [single[0][0]], 1e-12)


def test_what_cannot_be_left_out_of_the_past_is_refused():
    x = sequences()
    layer = make_layer("linear", cross=True)
    with pytest.raises(
        ValueError, match="is_causal=True for 4 queries and 21 keys, and cross=True"
    ):
        layer(x[:, :4], x, x, GONE, is_causal=True)
    layer, bias = make_layer("linear"), torch.randn(B, N).double()
    with pytest.raises(ValueError, match="key_padding_mask has numbers other than 0 and -inf"):
        output(layer, x, bias, is_causal=True)
