"""MrsHA: down- and upsampling, the function, and the layer."""

import functools
import math
import pickle
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import pywt
import torch
from helpers import (
    H,
    assert_agree,
    assert_all_close,
    assert_learns,
    assert_named,
    boolean,
    disturbed,
    qkv,
)

from derived_attention import (
    Conv1DAttention,
    Conv2DAttention,
    CvTAttention,
    MixtureAttention,
    MultiheadAttention,
    MultiresolutionAttention,
    ScaledHeadsAttention,
    conv1d_attention,
    downsample,
    multiresolution_attention,
    multiresolution_attention_reference,
    multiresolution_layer,
    normalized_attention,
    scaled_heads_attention,
    softmax_attention,
    upsample,
    window_attention,
)
from derived_attention.common.convention import weights_of
from derived_book.training.measure import count_flops

FORMS = multiresolution_attention, multiresolution_attention_reference
SCALES, OTHERS = [1, 2, 4], [3, 1, 2]
DB2 = pywt.Wavelet("db2")
WAVELETS = ["haar", "db2", "sym4", "bior2.2", "bior3.1"]
N = 21


def sequence(n=N, seed=0):
    return torch.randn(2, n, 12, generator=torch.Generator().manual_seed(seed)).double()


def layer(kind=MultiresolutionAttention, heads=3, seed=0, **own):
    torch.manual_seed(seed)
    made = kind(12, heads, dtype=torch.float64, **{"scales": SCALES, **own})
    return disturbed(made).eval()


# --- one sequence at a scale ----------------------------------------------------------------------


def test_pooling_is_the_projection_on_boxcars():
    """In fractions: Σ_t <φ_t, x> φ_t / s, eqs. 6 to 9 of the paper."""
    numbers = [Fraction(k * k - 7 * k, 3) for k in range(12)]
    for s in (1, 2, 3, 4, 12):
        boxcars = [[int(t * s <= i < t * s + s) for i in range(12)] for t in range(12 // s)]
        projected = [Fraction(0)] * 12
        for phi in boxcars:
            share = sum(a * b for a, b in zip(phi, numbers, strict=True)) / s
            projected = [p + share * a for p, a in zip(projected, phi, strict=True)]
        x = torch.tensor([[float(a)] for a in numbers], dtype=torch.float64)
        ours = upsample(downsample(x, s), s, 12)[:, 0]
        torch.testing.assert_close(ours, torch.tensor([float(a) for a in projected]).double())


def test_a_last_window_is_shorter():
    x = torch.arange(7.0)[:, None]
    assert downsample(x, 3).flatten().tolist() == [1, 4, 6]
    assert upsample(downsample(x, 3), 3, 7).flatten().tolist() == [1, 1, 1, 4, 4, 4, 6]
    assert downsample(x, 10**9).tolist() == [[3]] and len(upsample(x[:1], 10**9, 7)) == 7


@pytest.mark.parametrize("name", WAVELETS)
def test_wavelets_are_those_of_pywavelets_and_their_dual_undoes_them(name):
    x = np.random.default_rng(0).standard_normal((32, 3))
    own = pywt.Wavelet(name)
    for level, s in ((1, 2), (2, 4), (3, 8)):
        theirs = pywt.downcoef("a", x[:, 0], name, mode="periodization", level=level)
        y = downsample(torch.tensor(x), s, own)
        assert np.allclose(y[:, 0], theirs / 2 ** (level / 2))
        z = upsample(y, s, 32, own)
        back = y[:, 0].numpy()
        for _ in range(level):
            back = pywt.idwt(back * 2**0.5, None, name, mode="periodization")
        assert np.allclose(z[:, 0], back)
        torch.testing.assert_close(downsample(z, s, own), y)  # so up(down(·)) is a projection
        ones = torch.ones(29, 1).double()
        torch.testing.assert_close(upsample(downsample(ones, s, own), s, 29, own), ones)
    if name == "haar":
        torch.testing.assert_close(
            downsample(torch.tensor(x), 8, own), downsample(torch.tensor(x), 8)
        )


# --- the function ---------------------------------------------------------------------------------


def test_scales_of_queries_and_keys_differ():
    for options in ({}, {"is_causal": True}, {"attn_mask": boolean(2, 1, 1, 23)}):
        for other in (OTHERS, [1, 1, 1], [2, 4, 8], [30, 1, 30]):
            own = {"scales": SCALES, "key_scales": other, **options}
            assert_agree(FORMS, qkv(n=N, m=23), f"{other}, {list(options)}", **own)


def test_scales_of_keys_alone_are_attention_sh():
    inputs = qkv(n=N, m=23)
    run = functools.partial(multiresolution_attention, scales=[1, 1, 1], key_scales=SCALES)
    sh = functools.partial(scaled_heads_attention, scales=SCALES)
    assert_agree([run, sh], inputs, tol=1e-12, attn_mask=boolean(23))


def test_scales_of_queries_alone_pool_before_the_softmax():
    q, k, v = qkv(n=20)
    out = multiresolution_attention(q, k, v, scales=[4] * H, key_scales=[1] * H)
    alone = softmax_attention(downsample(q, 4), k, v)
    assert_all_close([out], [alone.repeat_interleave(4, -2)], 1e-12)


def test_class_token_stays_as_it_is():
    inputs, own = qkv(n=N, m=N), {"scales": SCALES, "class_token": True}
    assert_agree(FORMS, inputs, **own)
    with pytest.raises(ValueError, match="is_causal is True with class_token=True"):
        multiresolution_attention(*inputs, is_causal=True, **own)


def test_a_causal_head_reads_windows_that_have_ended():
    q, k, _ = qkv((1, 1), n=10, m=10)
    A = weights_of(multiresolution_attention, q, k, scales=[4], is_causal=True)[0, 0]
    last = torch.tensor([0] * 4 + [4] * 4 + [8] * 2)  # the last key that each query attends to
    assert torch.equal(A > 0, torch.arange(10) <= last[:, None])


def test_causal_windows_of_two_scales_attend_what_has_ended():
    """Each window of queries attends to the windows of keys that have ended, late ones to all."""
    for n, m in ((N, N), (33, 9), (9, 33), (0, 5), (5, 0)):
        q, k, v = (x.detach() for x in qkv((2, 1), n=n, m=m))
        for s, t in ((2, 3), (3, 2), (1, 4), (4, 1), (3, 40), (40, 3)):
            own = {"scales": [s], "key_scales": [t], "is_causal": True}
            out = multiresolution_attention(q, k, v, **own)
            alone = [softmax_attention(*x) for x in ended_windows(q, k, v, s, t)]
            expected = torch.cat([v[..., :0, :], *alone], -2)
            expected = expected[..., torch.arange(n) // s, :]
            assert_all_close([out], [expected], 1e-10, f"{(n, m)}, {(s, t)}")


def ended_windows(q, k, v, s, t):
    """Yield each causal window of s queries, with the windows of t keys that have ended."""

    def pooled(x, r):
        whole = x[..., 1 : 1 + (x.shape[-2] - 1) // r * r, :]
        return torch.cat([x[..., :1, :], downsample(whole, r)], -2) if x.shape[-2] else x

    Q, K, V = pooled(q, s), pooled(k, t), pooled(v, t)
    for i in range(Q.shape[-2]):
        yield Q[..., i : i + 1, :], *(x[..., : i * s // t + 1, :] for x in (K, V))


@pytest.mark.parametrize("name", WAVELETS)
def test_wavelets_pool_the_heads(name):
    q, k, v = qkv(n=16, m=24)
    wavelet, hidden = pywt.Wavelet(name), boolean(24)
    run = functools.partial(multiresolution_attention, q, scales=SCALES, filters=wavelet)
    out = run(k, v)
    for h, s in enumerate(SCALES):
        q_h, k_h, v_h = (downsample(x[:, h], s, wavelet) for x in (q, k, v))
        expected = upsample(softmax_attention(q_h, k_h, v_h), s, 16, wavelet)
        assert_all_close([out[:, h]], [expected], 1e-12)
    moved = [x + 5 * ~hidden[:, None] for x in (k, v)]
    assert_all_close([run(*moved, attn_mask=hidden)], [run(k, v, attn_mask=hidden)], 1e-10)


# --- the layer ------------------------------------------------------------------------------------


def test_layer_pools_before_it_projects():
    for own in ({}, {"key_scales": OTHERS}, {"filters": DB2}):
        made, x = layer(**own), sequence()
        heads = [made.project(part, x, slice(None)) for part in range(3)]
        out = multiresolution_attention(*heads, scales=SCALES, **own)
        expected = made.out_proj(out.transpose(1, 2).flatten(2))
        assert_all_close([made(x, x, x, need_weights=False)[0]], [expected], 1e-10, str(own))
        with_weights, A = made(x, x, x, average_attn_weights=False)
        assert_all_close([with_weights, A.sum(-1)], [expected, torch.ones(2, 3, N).double()], 1e-10)


def test_layer_leaves_padded_queries_out_of_the_windows():
    x, short = sequence(), 18  # two steps of the last window of scale 4 are present
    gone, made = torch.arange(N).expand(2, N) >= short, layer(key_scales=OTHERS)
    for causal in (False, True):
        out = made(x, x, x, gone, is_causal=causal)[0]
        alone = made(*[x[:, :short]] * 3, is_causal=causal)[0]
        assert_all_close([out[:, :short]], [alone], 1e-10)


def test_layer_costs_less_than_its_heads_would():
    x = torch.zeros(1, 64, 32)
    counts = {}
    for scales in ([1] * 8, [4] * 8, [1, 1, 2, 2, 4, 4, 8, 8]):
        made = MultiresolutionAttention(32, 8, scales=scales)
        counts[scales[-1]] = count_flops(functools.partial(made, x, x, x, need_weights=False))
    projections, products = 4 * 2 * 64 * 32 * 32, 4 * 64 * 64 * 32
    share = sum(2 / s for s in (1, 2, 4, 8)) / 8
    square = sum(2 / s**2 for s in (1, 2, 4, 8)) / 8
    assert counts[1] == projections + products
    assert counts[4] == projections / 4 + products / 16
    assert counts[8] == projections * (3 * share + 1) / 4 + products * square


def test_composed_layers():
    mixed = multiresolution_layer(MixtureAttention)
    assert mixed is multiresolution_layer(MixtureAttention)
    assert mixed.__name__ == "MrsMixtureAttention"
    assert multiresolution_layer(MultiheadAttention) is MultiresolutionAttention
    made, x = layer(mixed), sequence()
    gone = torch.arange(N).expand(2, N) >= 18
    out = made(x, x, x, gone)[0][:, :18]
    alone = made(x[:, :18], x[:, :18], x[:, :18])[0]
    assert_all_close([out], [alone], 1e-10)
    plain = MixtureAttention(12, 3, dtype=torch.float64)
    same = mixed(12, 3, scales=[1, 1, 1], dtype=torch.float64)
    same.load_state_dict(plain.state_dict())
    assert_all_close([same(x, x, x)[0]], [plain(x, x, x)[0]], 1e-10)
    assert_learns(layer(mixed).train(), x, "MrsMixtureAttention")
    for kind in (ScaledHeadsAttention, Conv1DAttention, Conv2DAttention, CvTAttention):
        with pytest.raises(ValueError, match=f"{kind.__name__}, which mixes along the length its"):
            multiresolution_layer(kind)
    with pytest.raises(TypeError, match="layer is 'softmax'; expected a class of Multihead"):
        multiresolution_layer("softmax")


class Named(multiresolution_layer(MixtureAttention)):
    """A subclass of a generated class, which pickle finds by its name."""


@pytest.mark.parametrize("kind", [multiresolution_layer(MixtureAttention), Named])
def test_composed_layers_are_pickled(kind):
    made, x = layer(kind), sequence()
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is kind and pickle.loads(pickle.dumps(kind)) is kind
    assert torch.equal(again(x, x, x)[0], made(x, x, x)[0])


def test_autocast_gives_the_dtype_that_the_plain_layer_gives():
    x = sequence().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for made in (layer(), layer(bias=False), layer(filters=DB2), layer(scales=[1, 1, 1])):
            assert made.float()(x, x, x)[0].dtype == torch.bfloat16, made


# --- errors ---------------------------------------------------------------------------------------


def test_what_is_wrong_is_named():
    q, k, v = (x.detach() for x in qkv(n=N, m=N))
    three_taps = SimpleNamespace(dec_lo=[0.35, 0.7, 0.35], rec_lo=[0.7, 0.7])
    bad = [
        (ValueError, "scales is .1, 2.; expected one number per head", {"scales": [1, 2]}),
        (ValueError, "key_scales is .1.; expected one number per head", {"key_scales": [1]}),
        (TypeError, r"key_scales\[1\] is of type float", {"key_scales": [1, 2.0, 1]}),
        (TypeError, "filters is 'nothing'; expected \"boxcar\"", {"filters": "nothing"}),
        (ValueError, "filters has a dec_lo of 3 numbers and a rec_lo of", {"filters": three_taps}),
        (ValueError, "a scale is 3; expected a power of", {"filters": DB2, "scales": [1, 2, 3]}),
        (ValueError, "is_causal is True with a wavelet", {"filters": DB2, "is_causal": True}),
        (TypeError, "attention is 'softmax'", {"attention": "softmax"}),
        (ValueError, "attn_mask has numbers other than 0", {"attn_mask": torch.full((N,), 0.5)}),
    ]
    mixing = functools.partial(conv1d_attention, weight=torch.ones(3).double())
    inside = functools.partial(normalized_attention, attention=window_attention)
    for base, name in ((mixing, "conv1d_attention"), (inside, "window_attention")):
        two = {"attention": base, "key_scales": OTHERS, "is_causal": True}
        bad.append((ValueError, f"key_scales differ from scales .* runs {name}; expected", two))
    assert_named(bad, multiresolution_attention, q=q, k=k, v=v, scales=SCALES)
    with pytest.raises(ValueError, match='filters is of type Wavelet; expected "boxcar"'):
        multiresolution_attention_reference(q, k, v, scales=SCALES, filters=DB2)
    with pytest.raises(ValueError, match=r"q has shape \(21, 8\); expected \(..., H, N, D\)"):
        multiresolution_attention(q[0, 0], k[0, 0], v[0, 0], scales=SCALES)
    x = sequence()
    bias = torch.zeros(2, N, dtype=x.dtype)
    bias[:, 3], bias[:, 4] = -math.inf, -2.0
    for causal in (False, True):
        with pytest.raises(ValueError, match="key_padding_mask has numbers other than 0"):
            layer()(x, x, x, bias, is_causal=causal)
    for own, words in (({"filters": DB2}, "a wavelet"), ({"class_token": True}, "class_token")):
        with pytest.raises(ValueError, match=f"is_causal is True with {words}"):
            layer(**own)(x, x, x, is_causal=True)


@pytest.mark.parametrize(("form", "error", "words"), [
    (lambda x: downsample(x[0], 2), ValueError, r"x has shape \(4,\); expected \(..., N, D\)"),
    (lambda x: downsample(x.long(), 2), TypeError, "x has dtype torch.int64"),
    (lambda x: upsample([x], 2, 6), TypeError, "x is of type list; expected a Tensor"),
    (lambda x: upsample(x, 2, 7), ValueError, r"x has shape .*; expected \(4, 4\): 7 steps"),
    (lambda x: upsample(x, 2, 6.0), TypeError, "N is of type float; expected a whole number"),
])  # fmt: skip
def test_wrong_sequences_are_named(form, error, words):
    with pytest.raises(error, match=words):
        form(torch.zeros(3, 4))
