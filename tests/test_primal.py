"""Primal-Attention: its rows, causal forms and objective, and properties of its layer."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from cases import assert_forms_agree
from helpers import B, H, assert_all_close, assert_learns, assert_named, boolean
from kinds import KINDS, classifier
from torch import nn
from torch.utils.checkpoint import checkpoint

from derived_attention import primal_attention_reference
from derived_attention.common.masks import Mask
from derived_attention.layer import ALL, KEY, QUERY, VALUE, MultiheadAttention
from derived_attention.linear.core import elu_feature_map
from derived_attention.primal.core import (
    cosine_feature_map,
    ksvd_objective,
    ksvd_objectives,
    landmarks,
    primal_attention,
    primal_scores,
)
from derived_attention.primal.layer import PrimalAttention, orthogonal_directions
from derived_book.tasks.supervised import class_loss
from derived_book.training.fit import Regularised, evaluate, fit

D, S, E = 6, 4, 12  # features, directions, width of a layer
x_of = functools.partial(torch.randn, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def inputs(n=10, m=None):
    return x_of(B, H, n, D), x_of(B, H, m or n, D), x_of(B, H, m or n, D)


def weights(n, heads=True, p=D):
    """Return W_e, W_r and W_o for n rows."""
    lead = (H,) if heads else ()
    return {"W_e": x_of(*lead, n, S), "W_r": x_of(*lead, n, S), "W_o": x_of(*lead, p, 2 * S)}


def scores_of(own):
    return {key: own[key] for key in ("W_e", "W_r")}


def layer_of(**own):
    torch.manual_seed(1)
    return PrimalAttention(E, H, directions=2, dtype=torch.float64, **own)


def output(layer, x, *args, **options):
    return layer(x, x, x, *args, need_weights=False, **options)[0]


# --- Algorithm 1, token by token ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "rows"), [(4, [0, 3, 6, 9]), (1, [0]), (10, range(10)), (99, range(10))]
)
def test_scores_are_those_of_algorithm_1(n, rows):
    (q, k, v), own = inputs(), weights(n)
    e, r = primal_scores(q, k, v, **scores_of(own))
    out = primal_attention(q, k, v, **own)
    for b in range(B):
        for h in range(H):
            f = torch.stack([v[b, h, j] for j in rows])
            W_e, W_r = (f.T @ own[key][h, : len(f)] for key in ("W_e", "W_r"))
            for i in range(10):
                e_i = W_e.T @ (q[b, h, i] / q[b, h, i].norm())
                r_i = W_r.T @ (k[b, h, i] / k[b, h, i].norm())
                o_i = own["W_o"][h] @ torch.cat([e_i, r_i])
                found = [e[b, h, i], r[b, h, i], out[b, h, i]]
                assert_all_close(found, [e_i, r_i, o_i], 1e-12, f"{n}, {b}, {h}, {i}")


def test_data_independent_weights_mix_no_tokens_and_rows_of_f_are_all_that_others_see():
    (q, k, v), own = inputs(), weights(D)
    q, k, v = (x[0, 0] for x in (q, k, v))
    own = {key: W[0] for key, W in own.items()}

    def sources(x, **options):
        """Return the tokens on which each output depends; x enters queries, keys and values."""
        run = lambda x: primal_attention(x, k + x, v + x, **own, **options)  # noqa: E731
        slopes = torch.autograd.functional.jacobian(run, x).abs().sum((1, 3))
        return [set(row.nonzero().flatten().tolist()) for row in slopes]

    assert sources(q, data_dependent=False) == [{i} for i in range(10)]
    own |= weights(3, heads=False)
    assert sources(q) == [{0, 4, 9, i} for i in range(10)]
    past = [set(range(i + 1)) for i in range(10)]
    assert sources(q, is_causal=True) == past
    own |= weights(D, heads=False)
    assert sources(q, is_causal=True, data_dependent=False) == past


def test_other_feature_maps():
    (q, k, v), own = inputs(), weights(5)
    e, r = primal_scores(q, k, v, **scores_of(own), feature_map=elu_feature_map, scale=0.5)
    W = v[..., [0, 2, 4, 6, 9], :].mT @ own["W_e"]
    assert_all_close([e], [(F.elu(0.5 * q) + 1) @ W], 1e-12)
    doubled = lambda x: torch.cat([x, -x], -1)  # noqa: E731
    wide = weights(2 * D)
    e, _ = primal_scores(q, k, v, **scores_of(wide), feature_map=doubled, data_dependent=False)
    assert_all_close([e], [torch.cat([q, -q], -1) @ wide["W_e"]], 1e-12)
    with pytest.raises(ValueError, match="makes 12 features; expected 6, as many as v has"):
        primal_attention(q, k, v, **own, feature_map=doubled)
    for name, options in {
        "elu": {"feature_map": elu_feature_map},
        "sketch": {"sampling": x_of(10, 23)},
        "short": weights(99, heads=False),
    }.items():
        for more in ({}, {"is_causal": True}, {"attn_mask": boolean(B, 1, 1, 21)}):
            assert_forms_agree("primal", name, **options, **more)


# --- rows of f ------------------------------------------------------------------------------------


def test_rows_are_taken_of_those_tokens_that_are_there():
    x = torch.arange(12.0)[:, None].expand(2, 12, 1)
    there = torch.ones(2, 12).bool()
    there[0, [0, 3, 4, 11]] = False
    there[1, 2:] = False
    rows, used = landmarks(x, 3, Mask(there[:, None]))
    assert rows.squeeze(-1).tolist() == [[1, 6, 10], [0, 1, 0]]
    assert used.tolist() == [[True] * 3, [True, True, False]]
    rows, used = landmarks(x, 99, Mask(there[:, None]))
    assert rows[0, :8, 0].tolist() == [1, 2, 5, 6, 7, 8, 9, 10] and not rows[0, 8:].any()
    assert used.sum(-1).tolist() == [8, 2]


def test_random_rows_are_drawn_without_replacement_and_in_order():
    x = torch.arange(1.0, 31)[:, None].expand(2, 30, 1)
    there = torch.arange(30) < torch.tensor([25, 3])[:, None]
    counts = torch.zeros(31)
    for _ in range(400):
        (plain, _), (masked, used) = (
            landmarks(x, 6, mask, "random") for mask in (Mask(), Mask(there[:, None]))
        )
        assert (plain.diff(dim=-2) > 0).all() and (masked[0].diff(dim=-2) > 0).all()
        assert masked[0].max() <= 25 and masked[1].flatten().tolist() == [1, 2, 3, 0, 0, 0]
        assert used.sum(-1).tolist() == [6, 3]
        counts[plain[0].long()] += 1
    share = counts[1:] / 400  # each of 30 tokens is among the 6 with probability 1/5
    assert (share - 0.2).abs().max() < 4 * math.sqrt(0.2 * 0.8 / 400)


def test_a_gaussian_sketch_keeps_inner_products_in_the_mean_and_all_of_a_heavy_row():
    x = torch.zeros(100, D, dtype=torch.float64)
    x[37] = 1  # evenly spaced rows miss it
    gram, even = x.T @ x, landmarks(x, 20, Mask())[0]
    sketches = [landmarks(x, 20, Mask(), x_of(20, 130) / 20**0.5)[0] for _ in range(300)]
    mean = torch.stack([f.T @ f for f in sketches]).mean(0)
    assert not even.any() and float((mean - gram).abs().max()) < 4 * math.sqrt(2 / 20 / 300)


# --- causal forms ---------------------------------------------------------------------------------


def test_running_means_are_those_of_listing_1():
    (q, k, v), own = inputs(), weights(D)
    seen = torch.arange(1, 11, dtype=torch.float64)[:, None]
    e = F.normalize(q.cumsum(-2) / seen, dim=-1) @ own["W_e"]
    r = F.normalize(k.cumsum(-2) / seen, dim=-1) @ own["W_r"]
    expected = torch.cat([e, r], -1) @ own["W_o"].mT
    out = primal_attention(q, k, v, is_causal=True, data_dependent=False, **own)
    assert_all_close([out], [expected], 1e-12)


@pytest.mark.parametrize("n", [3, 10, 16])
def test_causal_rows_hold_the_past_folded(n):
    (q, k, v), own = inputs(), weights(n)
    out = primal_attention(q, k, v, is_causal=True, **own)
    for i in range(10):
        f = torch.zeros(B, H, n, D, dtype=torch.float64)
        for j in range(i + 1):
            f[..., j % n, :] += v[..., j, :] / (i // n + 1)
        e = cosine_feature_map(q[..., i : i + 1, :]) @ f.mT @ own["W_e"]
        r = cosine_feature_map(k[..., i : i + 1, :]) @ f.mT @ own["W_r"]
        assert_all_close([out[..., i : i + 1, :]], [torch.cat([e, r], -1) @ own["W_o"].mT], 1e-12)
    if n >= 10:  # if each token has a row of its own, the mask does not affect the last output
        assert_all_close([out[..., -1, :]], [primal_attention(q, k, v, **own)[..., -1, :]], 1e-12)


def test_a_longer_sequence_changes_no_past():
    sketched = {"landmarks": 5, "sampling": "gaussian", "length": 40}
    for own in ({"landmarks": 5}, {"data_dependent": False}, sketched):
        layer, x = layer_of(**own).eval(), x_of(B, 40, E)
        short = output(layer, x[:, :17], is_causal=True)
        assert_all_close([output(layer, x, is_causal=True)[:, :17]], [short], 1e-12, str(own))


# --- queries of another sequence ------------------------------------------------------------------


def test_cross_attention_brings_the_mean_of_r_to_the_queries():
    (q, k, v), own = inputs(7, 10), weights(4)
    keep = boolean(B, 1, 1, 10)
    for mask in (None, keep):
        e, r = primal_scores(q, k, v, mask, **scores_of(own))
        count = 10 if mask is None else keep.sum(-1, keepdim=True)
        mean = (r.sum(-2, keepdim=True) / count).expand_as(e)
        expected = torch.cat([e, mean], -1) @ own["W_o"].mT
        assert_all_close([primal_attention(q, k, v, mask, **own, cross=True)], [expected], 1e-12)
    for form in (primal_attention, primal_attention_reference):
        nothing = form(q, k[..., :0, :], v[..., :0, :], is_causal=True, cross=True, **own)
        assert not nothing.any()
    for n, m in [(7, 10), (10, 7)]:
        q, k, v = inputs(n, m)
        out = primal_attention(q, k, v, is_causal=True, cross=True, **own)
        e, r = primal_scores(q, k, v, is_causal=True, **scores_of(own))
        means = torch.stack([r[..., : i + 1, :].mean(-2) for i in range(n)], -2)
        assert_all_close([out], [torch.cat([e, means], -1) @ own["W_o"].mT], 1e-12, f"{n}, {m}")


def test_layer_knows_whether_queries_and_keys_are_one_sequence():
    layer, own = layer_of(cross=True), layer_of()
    own.load_state_dict(layer.state_dict())
    x, y = x_of(B, 9, E), x_of(B, 5, E)
    heads = [layer.project(part, z, ALL) for part, z in ((QUERY, x), (KEY, y), (VALUE, y))]
    weights = {key: getattr(layer, key) for key in ("W_e", "W_r", "W_o")}
    out = primal_attention(*heads, **weights, cross=True)
    expected = layer.out_proj(out.transpose(1, 2).flatten(2))
    assert_all_close([layer(x, y, y)[0]], [expected], 1e-12)
    assert not torch.allclose(layer(x, x, x)[0], own(x, x, x)[0])
    assert layer(x, x, x)[1] is None
    with pytest.raises(ValueError, match="5, 12.*9 queries; expected as many keys .* cross=True"):
        own(x, y, y)
    run = functools.partial(primal_attention, **{k: w.detach() for k, w in weights.items()})
    plain = MultiheadAttention(E, H, attention=run, cross=True, dtype=torch.float64)
    assert plain(x, y, y, need_weights=False)[0].shape == x.shape
    with pytest.raises(ValueError, match="9 queries; expected as many keys"):
        MultiheadAttention(E, H, attention=run, dtype=torch.float64)(x, y, y)


# --- the layer ------------------------------------------------------------------------------------


def test_directions_are_orthonormal_in_each_head():
    W = orthogonal_directions(3, 20, 4, torch.empty(0, dtype=torch.float64))
    assert_all_close([W.mT @ W], [torch.eye(4).double().expand(3, 4, 4)], 1e-12)
    W = orthogonal_directions(3, 2, 4, torch.empty(0, dtype=torch.float64))
    assert_all_close([W @ W.mT], [torch.eye(2).double().expand(3, 2, 2)], 1e-12)
    assert orthogonal_directions(3, 20, 4, torch.empty(0).bfloat16()).dtype == torch.bfloat16
    layer = PrimalAttention(E, H)
    assert layer.W_e.shape == (H, 20, 2) and layer.W_o.shape == (H, 4, 4)
    assert PrimalAttention(E, H, data_dependent=False).W_r.shape == (H, 4, 2)


KINDS_OF_LAYER = [
    {"data_dependent": False},
    {"sampling": "random"},
    {"sampling": "gaussian", "length": 21},
    {"feature_map": elu_feature_map},
    {"kv_heads": 1, "head_dim": 5},
]


@pytest.mark.parametrize("own", KINDS_OF_LAYER, ids="-".join)
def test_every_kind_of_layer_learns_and_is_copied(own):
    own = {"landmarks": 4} | own if own.get("data_dependent", True) else own
    layer, x = layer_of(**own), x_of(B, 21, E)
    assert_learns(layer, x, str(own))
    layer.eval()
    out = output(layer, x)
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(output(same, x), out)
    other = PrimalAttention(E, H, directions=2, dtype=torch.float64, **own).eval()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(output(other, x), out)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert_all_close([output(compiled, x)], [out], 1e-12)


def test_rows_and_dropout_are_random_in_training_only():
    x = x_of(B, 21, E)
    for own in ({"sampling": "random"}, {"dropout": 0.4}):
        layer = layer_of(landmarks=4, **own)
        assert not torch.equal(output(layer, x), output(layer, x))
        layer.eval()
        assert torch.equal(output(layer, x), output(layer_of(landmarks=4).eval(), x))


def test_a_feature_map_may_have_parameters_where_the_layer_has_them():
    for where in ({"dtype": torch.float64}, {"device": "meta"}):
        layer = PrimalAttention(E, H, feature_map=nn.Linear(4, 4, **where), **where)
        x = torch.ones(B, 9, E, **where)
        assert output(layer, x).shape == x.shape
        assert "feature_map.weight" in dict(layer.named_parameters())


def test_sums_stay_in_float32_under_autocast():
    (q, k, v), own = (tuple(x.float() for x in inputs())), weights(4)
    own = {key: W.float() for key, W in own.items()}
    for more in ({}, {"sampling": x_of(4, 10).float()}):
        for causal in (False, True):
            run = functools.partial(primal_attention, q, k, v, is_causal=causal, **own, **more)
            with torch.autocast("cpu", torch.bfloat16):
                low = run()
            assert_all_close([low], [run()], 1e-6, f"{list(more)}, {causal}")


def test_the_formula_keeps_the_dtype_of_its_queries():
    q, k, v = (x.half() for x in inputs())
    how = {"is_causal": True, "data_dependent": False, **weights(D)}
    for form in (primal_attention, primal_attention_reference):
        assert form(q, k, v, **how).dtype == torch.float16


def test_dropout_drops_scores():
    (q, k, v), own = inputs(), weights(4)
    e, r = primal_scores(q, k, v, **scores_of(own))
    torch.manual_seed(5)
    expected = F.dropout(torch.cat([e, r], -1), 0.3) @ own["W_o"].mT
    torch.manual_seed(5)
    assert_all_close([primal_attention(q, k, v, dropout_p=0.3, **own)], [expected], 1e-12)


def test_the_cosine_map_takes_vectors_of_any_length():
    x, nothing = x_of(9, D).clamp(-3, 3), torch.zeros(9, D, requires_grad=True)
    wide = dict.fromkeys([torch.bfloat16, torch.float32], (1e-35, 1e35))
    for dtype, both in {torch.float16: (1e-6, 2e4), **wide}.items():
        for size in both:
            y = (x * size).to(dtype)
            expected = F.normalize(y.double() / size, dim=-1)
            assert_all_close([cosine_feature_map(y).double()], [expected], 1e-6, f"{dtype}, {size}")
    found = cosine_feature_map(nothing)
    first = torch.autograd.grad(found.sum() + found.square().sum(), nothing, create_graph=True)[0]
    second = torch.autograd.grad(first.sum() + first.square().sum(), nothing)[0]
    assert not any(y.any() for y in (found, first, second))  # and no NaN
    x.requires_grad_()
    assert torch.autograd.gradcheck(cosine_feature_map, x)
    assert torch.autograd.gradgradcheck(cosine_feature_map, x)


# --- the objective --------------------------------------------------------------------------------


def test_objective_is_a_sum_over_tokens_and_zero_at_singular_vectors():
    phi_q, phi_k = x_of(9, D), x_of(7, D)
    W_e, W_r, Lambda = x_of(D, S), x_of(D, S), torch.rand(S, dtype=torch.float64)
    e, r = phi_q @ W_e, phi_k @ W_r
    expected = 0.5 * sum(x @ Lambda.diag() @ x for x in e) - (W_e.T @ W_r).trace()
    expected = expected + 0.5 * sum(x @ Lambda.diag() @ x for x in r)
    assert_all_close([ksvd_objective(e, r, W_e, W_r, Lambda)], [expected], 1e-12)

    left, sigma, right = torch.linalg.svd(phi_q @ phi_k.T)
    h_e, h_r = left[:, :S], right[:S].T
    W_e, W_r = (W.detach().requires_grad_() for W in (phi_k.T @ h_r, phi_q.T @ h_e))
    J = ksvd_objective(phi_q @ W_e, phi_k @ W_r, W_e, W_r, 1 / sigma[:S])
    slopes = torch.autograd.grad(J, [W_e, W_r])
    assert abs(float(J.detach())) < 1e-12 and all(float(x.abs().max()) < 1e-12 for x in slopes)


@pytest.mark.parametrize("landmarks", [4, 99])
def test_layers_hand_out_the_objective_of_what_is_there(landmarks):
    layer, x = layer_of(landmarks=landmarks, regularised=True), x_of(B, 9, E)
    gone = torch.arange(9) >= torch.tensor([6, 9])[:, None]
    with ksvd_objectives() as found:
        output(layer, x, gone)
        output(layer, x[:1, :6])
        output(layer, x[1:])
        output(layer, x, is_causal=True)
        output(layer_of(), x)  # not regularised
        other = threading.Thread(target=output, args=(layer, x))
        other.start()
        other.join()
    assert [J.shape for J in found] == [(B, H), (1, H), (1, H), (B, H)]
    assert_all_close([found[0]], [torch.cat(found[1:3])], 1e-12)
    q, k, v = (layer.project(part, x[1:], ALL) for part in (QUERY, KEY, VALUE))
    e, r = primal_scores(q, k, v, W_e=layer.W_e, W_r=layer.W_r)
    n = min(landmarks, 9)
    Lambda = layer.Lambda[:, None]  # (H, 1, s)
    assert 0 <= Lambda.min() < Lambda.max() <= 1
    J = 0.5 * ((Lambda * e).square().sum(-1) + (Lambda * r).square().sum(-1)).mean(-1)
    J = J - (layer.W_e[:, :n] * layer.W_r[:, :n]).sum((-1, -2))
    assert_all_close([found[2]], [J], 1e-12)
    assert torch.autograd.grad(found[0].sum(), layer.Lambda)[0].any()


def test_the_objective_is_compiled_and_checkpointed():
    layer, x = layer_of(landmarks=4, regularised=True), x_of(B, 9, E).requires_grad_()

    def objective(run):
        with ksvd_objectives() as found:
            total = run(layer, x).square().sum()
        (J,) = found
        return J, *torch.autograd.grad(total + J.square().sum(), [x, *layer.parameters()])

    expected = objective(output)
    torch.compiler.reset()
    compiled = torch.compile(output, backend="eager", fullgraph=True)
    assert_all_close(objective(compiled), expected, 1e-12)
    again = functools.partial(checkpoint, output, use_reentrant=False)
    assert_all_close(objective(again), expected, 1e-12)
    loss = lambda layer, x: (checkpoint(output, layer, x, use_reentrant=True).sum(), {})  # noqa: E731
    with pytest.raises(ValueError, match="ran without gradients.*expected .*use_reentrant=False"):
        Regularised(loss, 0.1)(layer, x)
    with torch.no_grad():
        assert Regularised(loss, 0.1)(layer, x)[1]["ksvd"].value > 0


def test_a_loss_that_adds_the_objective():
    primal = functools.partial(PrimalAttention, regularised=True)
    make, batches, _, _ = KINDS["series"]
    model, batch = classifier(attention=primal, layers=2), next(iter(batches(8)))
    model.eval()
    plain, _ = class_loss(model, batch)
    with ksvd_objectives() as found:
        model(batch[0], batch[1])
    value, numbers = Regularised(class_loss, 0.7)(model, batch)
    each = torch.stack(found).mean(-1)  # by layer and sequence: the mean over heads
    squares = each.square().mean()
    assert each.shape == (2, len(batch[0])) and found[0].std(-1).min() > 0
    torch.testing.assert_close(value, plain + 0.7 * squares)
    assert numbers["ksvd"].value == pytest.approx(float(squares.detach()))
    before = evaluate(model, batches(8), Regularised(class_loss, 0.0))["ksvd"]
    fit(model, batches(8), Regularised(class_loss, 10.0), epochs=20, lr=1e-2)
    after = evaluate(model, batches(8), Regularised(class_loss, 0.0))["ksvd"]
    assert after < before / 10, f"{before} to {after}"
    with pytest.raises(ValueError, match="has no layer PrimalAttention"):
        Regularised(class_loss, 0.1)(make(), batch)
    for eta, error in ((-1, ValueError), (math.nan, ValueError), ("1", TypeError)):
        with pytest.raises(error, match="eta is"):
            Regularised(class_loss, eta)
    with pytest.raises(TypeError, match="loss is 3"):
        Regularised(3, 0.1)


def test_a_model_names_the_attention_that_has_no_weights():
    with pytest.raises(ValueError, match="PrimalAttention has no attention weights"):
        classifier(attention=PrimalAttention).attention_maps(*next(iter(KINDS["series"][1](8)))[:2])


# --- errors ---------------------------------------------------------------------------------------

BAD = [
    (TypeError, "W_e is of type list; expected a floating Tensor", {"W_e": [0.0]}),
    (ValueError, r"W_e has shape \(4,\); expected \(rows, s\)", {"W_e": torch.ones(4, 4)[0]}),
    (ValueError, r"W_e has shape \(2, 4, 4\); expected .*\(3, rows", {"W_e": torch.ones(2, 4, 4)}),
    (ValueError, r"W_e has shape \(0, 4\)", {"W_e": torch.ones(0, 4)}),
    (ValueError, r"W_r has shape \(5, 4\); expected the rows and dir", {"W_r": torch.ones(5, 4)}),
    (TypeError, "W_r is of dtype torch.int64", {"W_r": torch.ones(4, 4).long()}),
    (ValueError, r"W_o has shape \(6, 4\); expected \(rows, 8\)", {"W_o": torch.ones(6, 4)}),
    (ValueError, "W_o is on device meta", {"W_o": torch.ones(6, 8, device="meta")}),
    (ValueError, "makes 6 features; expected 4, as many as W_e has", {"data_dependent": False}),
    (TypeError, "feature_map is 3; expected a function", {"feature_map": 3}),
    (TypeError, "feature_map is 3; expected a func", {"feature_map": 3, "is_causal": True}),
    (ValueError, "sampling is 'even '; expected one of even, random", {"sampling": "even "}),
    (ValueError, r"sampling has shape \(5, 9\); expected 4 rows", {"sampling": torch.ones(5, 9)}),
    (ValueError, r"\(4, 9\); expected .* columns for 10 tokens", {"sampling": torch.ones(4, 9)}),
    (ValueError, "other than 0 and -inf; .* there are no weights", {"attn_mask": torch.ones(10)}),
]
BAD_LAYERS = [
    (ValueError, "directions is 0; expected a whole number, at least 1", {"directions": 0}),
    (TypeError, "landmarks is of type float", {"landmarks": 1.5}),
    (ValueError, "sampling is 'none'; expected one of even, random, gaus", {"sampling": "none"}),
    (ValueError, "length is None with gaussian sampling; expected the", {"sampling": "gaussian"}),
    (ValueError, "length is 9 with even sampling; expected None", {"length": 9}),
    (ValueError, "landmarks is 4, .*; expected none", {"data_dependent": False, "landmarks": 4}),
    (ValueError, "sampling is random; expected", {"data_dependent": False, "sampling": "random"}),
    (ValueError, "makes 1 features; expected 4", {"feature_map": lambda x: x[..., :1]}),
    (TypeError, "feature_map is 3; expected a function", {"feature_map": 3}),
]


def test_what_is_wrong_is_named():
    q, k, v = (x.float() for x in inputs())
    own = {"W_e": torch.ones(4, 4), "W_r": torch.ones(4, 4), "W_o": torch.ones(6, 8)}
    assert_named(BAD, primal_attention, q=q, k=k, v=v, **own)
    with pytest.raises(ValueError, match=r"W_e has shape \(1, 4, 4\); expected \(rows, s\)$"):
        primal_attention(q[0, 0], k[0, 0], v[0, 0], **own | {"W_e": torch.ones(1, 4, 4)})
    with pytest.raises(ValueError, match="scale is -1; expected a finite positive number"):
        primal_scores(q, k, v, **scores_of(own), scale=-1)
    with pytest.raises(TypeError, match="v is of type NoneType; expected a floating Tensor"):
        primal_scores(q, k, None, **scores_of(own))
    assert_named(BAD_LAYERS, PrimalAttention, embed_dim=E, num_heads=H)
