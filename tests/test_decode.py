"""States: a sequence in pieces gives the results of the whole, and all tokens cost the same."""

import functools
import itertools

import pytest
import torch
from helpers import assert_all_close, output_and_gradients

from derived_attention import (
    MECHANISMS,
    MultiheadAttention,
    RidgeAttention,
    linear_attention,
    linear_state,
    ridge_attention,
    ridge_state,
)
from derived_attention.common.convention import state_of
from derived_attention.testing.cases import Largest
from derived_book.training.measure import count_flops

WITH_STATES = ("linear", "ridge", "delta")
B, H, N, D = 2, 2, 80, 4  # longer than a chunk of 64
CUTS = {"tokens": [1] * N, "uneven": [0, 1, 3, 0, 66, 1, 8, 1], "long": [20, 280]}
with_states = pytest.mark.parametrize("name", WITH_STATES)


def draw(name, n=N, dtype=torch.float64, **more):
    """A mechanism with its sample options, and queries, keys, values that ask for gradients."""
    torch.manual_seed(0)
    entry = MECHANISMS[name]
    q, k, v = (torch.randn(B, H, n, D, dtype=dtype) for _ in range(3))
    options = {key: x.to(dtype) if isinstance(x, torch.Tensor) else x for key, x in
               (entry.options(n, H, D) | more).items()}  # fmt: skip
    form = functools.partial(entry.fast, **options)
    return form, [x.requires_grad_() for x in (q, entry.keys(k).detach(), v)]


def in_pieces(form, q, k, v, sizes, state=None):
    """Return the output of a sequence in pieces, with the state handed on, and the last state."""
    parts = []
    for q_t, k_t, v_t in zip(*(x.split(sizes, -2) for x in (q, k, v)), strict=True):
        parts.append(form(q_t, k_t, v_t, is_causal=True, state=state))
        state = state_of(form, k_t, v_t, state=state)
    return torch.cat(parts, -2), state


def flat(state):
    return [state] if isinstance(state, torch.Tensor) else [*state]


# --- functions ------------------------------------------------------------------------------------


@with_states
@pytest.mark.parametrize("cut", CUTS)
def test_pieces_have_the_values_and_gradients_of_the_whole(name, cut):
    """Among them one longer than 256, the positions that are taken at once on a CPU."""
    form, inputs = draw(name, sum(CUTS[cut]))
    whole = output_and_gradients(functools.partial(form, is_causal=True), inputs)
    pieces = output_and_gradients(lambda *x: in_pieces(form, *x, CUTS[cut])[0], inputs)
    assert_all_close(pieces, whole, 1e-10, f"{name}, {cut}")
    _, *kv = inputs
    ends = [flat(state_of(form, *kv)), flat(in_pieces(form, *inputs, CUTS[cut])[1])]
    assert_all_close(*ends, 1e-10, f"the state of {name}, {cut}")


@with_states
def test_a_state_of_inference_mode_is_continued_with_gradients(name):
    form, inputs = draw(name, 12)
    with torch.inference_mode():
        early = state_of(form, *(x[..., :6, :] for x in inputs[1:]))
    normal = state_of(form, *(x[..., :6, :].detach() for x in inputs[1:]))

    def rest(state):
        return output_and_gradients(
            lambda *x: in_pieces(form, *(y[..., 6:, :] for y in x), [1, 5], state)[0], inputs
        )

    assert_all_close(rest(early), rest(normal), 1e-12, name)


@with_states
def test_a_state_and_dropout_exclude_each_other(name):
    """With D values and as many keys, a state would be taken for weights."""
    form, (q, k, v) = draw(name, D)
    how = dict(is_causal=True, dropout_p=0.5)
    with pytest.raises(ValueError, match="state is given, and dropout_p is above 0; expected"):
        form(q, k, v, **how, state=state_of(form, k, v))
    assert form(q, k, v, **how, state=None).shape == q.shape


@pytest.mark.parametrize("options", [dict(prefix=3), dict(exclude_self=True)])
def test_ridge_has_a_state_beside_its_other_options(options):
    _, (q, k, v) = draw("ridge")
    P = options.get("prefix", 0)
    k, v = (torch.cat([x[..., :P, :].flip(-2), x], -2) for x in (k, v))
    whole = ridge_attention(q, k, v, is_causal=True, **options)
    cut = slice(30, None)
    state = ridge_state(k[..., : 30 + P, :], v[..., : 30 + P, :])
    if P:  # the state contains the prefix
        options = {}
    rest = (q[..., cut, :], k[..., 30 + P :, :], v[..., 30 + P :, :])
    found = ridge_attention(*rest, is_causal=True, state=state, **options)
    assert_all_close([found], [whole[..., cut, :]], 1e-10, "ridge")


def test_more_keys_may_come_between_a_state_and_the_first_query():
    _, (q, k, v) = draw("ridge", 20)
    whole = ridge_attention(q, k, v, is_causal=True)[..., 9:, :]
    state = ridge_state(k[..., :4, :], v[..., :4, :])
    rest = (q[..., 9:, :], k[..., 4:, :], v[..., 4:, :])
    found = ridge_attention(*rest, is_causal=True, prefix=5, state=state)
    assert_all_close([found], [whole], 1e-10, "prefix")


@pytest.mark.parametrize("name, more", [
    ("linear", dict(scale=0.3, feature_map=torch.exp)),
    ("ridge", dict(lam=torch.tensor([0.1, 3.0]), scale=0.3)),
    ("delta", dict(beta=torch.tensor([[0.1], [0.3]]), erase=False)),
])  # fmt: skip
def test_options_hold_for_states(name, more):
    form, inputs = draw(name, **more)
    whole = form(*inputs, is_causal=True)
    assert_all_close([in_pieces(form, *inputs, CUTS["uneven"])[0]], [whole], 1e-10, name)


@with_states
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_are_wide(name, dtype):
    form, inputs = draw(name, 70, dtype)
    out, state = in_pieces(form, *inputs, [1, 64, 5])
    assert out.dtype == dtype and all(x.dtype.itemsize >= 4 for x in flat(state))
    whole = form(*inputs, is_causal=True)
    torch.testing.assert_close(out, whole, rtol=2e-2, atol=2e-2)


# --- layers ---------------------------------------------------------------------------------------


def layers(name, n=N, **options):
    torch.manual_seed(0)
    layer = MECHANISMS[name].make_layer(H * D, H, n, **options).double().eval()
    return layer, torch.randn(B, n, H * D, dtype=torch.float64, requires_grad=True)


def steps(layer, x, sizes):
    parts, state = [], None
    for part in x.split(sizes, -2):
        out, state = layer.step(part, state)
        parts.append(out)
    return torch.cat(parts, -2)


@pytest.mark.parametrize("name", MECHANISMS)
def test_layers_step_or_say_why_not(name):
    layer, x = layers(name)
    assert layer.has_state == (name in WITH_STATES)
    if not layer.has_state:
        with pytest.raises(ValueError, match="has no state; expected a causal mechanism"):
            layer.step(x)
        return
    run = functools.partial(layer, is_causal=True, need_weights=False)
    whole = output_and_gradients(lambda x: run(x, x, x)[0], [x])
    found = output_and_gradients(lambda x: steps(layer, x, CUTS["uneven"]), [x])
    assert_all_close(found, whole, 1e-10, name)
    assert_all_close([steps(layer, x[1], CUTS["uneven"])], [whole[0][1]], 1e-10, "one sequence")


@pytest.mark.parametrize("name, options", [
    ("linear", dict(kv_heads=1)),
    ("ridge", dict(dictionary="value", lam=0.3)),
    ("ridge", dict(projected=False)),
    ("delta", dict(gated=True, beta="double")),
])  # fmt: skip
def test_options_of_layers_hold_for_steps(name, options):
    layer, x = layers(name, **options)
    for parameter in layer.parameters():  # so that λ and others differ between heads
        parameter.data += 0.1 * torch.randn_like(parameter)
    whole = layer(x, x, x, is_causal=True, need_weights=False)[0]
    assert_all_close([steps(layer, x, CUTS["uneven"])], [whole], 1e-9, name)


def test_no_kernel_runs_in_a_step():
    layer, x = layers("linear")
    layer.attention = functools.partial(linear_attention, fused=True)
    plain, _ = layers("linear")
    assert_all_close([steps(layer, x, [79, 1])], [steps(plain, x, [79, 1])], 1e-12, "linear")


def test_layers_that_mix_or_prepend_tokens_have_no_state():
    class Shifted(MultiheadAttention):
        def mix(self, query, key, value, mask):
            return super().mix(query, key.roll(1, -2), value, mask)

    assert MultiheadAttention(8, 2, attention=linear_attention).has_state
    assert not Shifted(8, 2, attention=linear_attention).has_state
    assert not MultiheadAttention(8, 2, attention=linear_attention, cross=True).has_state
    assert not RidgeAttention(8, 2, random_tokens=3).has_state
    mrs = MECHANISMS["mrs"].make_layer(16, 4, 8, attention=linear_attention)
    assert not mrs.has_state


@with_states
def test_a_token_costs_the_same_after_any_number_of_others(name):
    layer, x = layers(name, 400)
    flops, sizes, x = [], [], x.detach()
    with torch.no_grad():
        for n in (1, 16, 399):
            state, token = layer.step(x[:, :n])[1], x[:, n : n + 1]
            flops.append(count_flops(lambda s=state, token=token: layer.step(token, s)))
            with Largest() as largest:
                layer.step(token, state)
            sizes.append(largest.numel)
        whole = count_flops(lambda: layer(x, x, x, is_causal=True, need_weights=False))
    assert flops[0] == flops[1] == flops[2] > 0 and len({*sizes}) == 1
    assert whole > 50 * flops[2]


# --- errors ---------------------------------------------------------------------------------------

NO_CAUSE = "state is given, and is_causal is False; expected is_causal=True"


@pytest.mark.parametrize("name", ["linear", "ridge"])
def test_wrong_states_are_named(name):
    form, (q, k, v) = draw(name, 6)
    state = state_of(form, k, v)
    with pytest.raises(ValueError, match=NO_CAUSE):
        form(q, k, v, state=state)
    attend = functools.partial(form, q, k, v, is_causal=True)
    calls = attend, functools.partial(state_of, form, k, v)
    wrong = [q[..., 0].detach(), "S", *[flat(state)] * (name == "ridge")]
    for call, bad in itertools.product(calls, wrong):
        with pytest.raises((TypeError, ValueError), match="^state (is|has) "):
            call(state=bad)
    changes = (lambda x: x[:1], ValueError), (lambda x: x.long(), TypeError)
    for call, (change, error) in itertools.product(calls, changes):
        bad = [change(x) if x.dim() else x for x in flat(state)]
        bad = type(state)(*bad) if isinstance(state, tuple) else bad[0]
        with pytest.raises(error, match=r"^state(\.\w+)? (has shape|is of dtype).*expected"):
            call(state=bad)


def test_what_has_no_state_is_refused():
    form, (q, k, v) = draw("linear", 6)
    S = linear_state(k, v)
    with pytest.raises(ValueError, match="fused is True, and state is given; expected fused False"):
        linear_attention(q, k, v, is_causal=True, state=S, fused=True)


@pytest.mark.parametrize("function", [linear_state, ridge_state])
def test_states_check_keys_and_values(function):
    k = torch.ones(2, 5, D)
    with pytest.raises(ValueError, match=r"v has shape \(2, 4, 4\); expected \(2, 5, 4\)"):
        function(k, k[:, :4])
    with pytest.raises(ValueError, match=r"k has shape \(4,\); expected \(..., M, D\)"):
        function(k[0, 0], k)
    with pytest.raises(TypeError, match="v has dtype torch.float64; expected torch.float32"):
        function(k, k.double())
