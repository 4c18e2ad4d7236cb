"""Tests on the device of `standin`; `test_standin` runs them in a separate process."""

from __future__ import annotations

import standin  # first, because it changes PyTorch  # isort: skip

import copy

import pytest
import torch
from helpers import assert_all_close, boolean, every_mechanism
from kinds import KINDS, SMALL
from test_contract_layers import GONE, make_layer, sequences
from test_contract_models import PLACES, belongs, make

import derived_attention as da
from derived_attention.common.running import running_sums
from derived_attention.registry import MECHANISMS
from derived_attention.testing.cases import Case, added, variants
from derived_book.training import measure
from derived_book.training.fit import evaluate, fit

DEVICE = torch.device(standin.NAME)


def moved(x):
    """Return a copy on the device, with the `requires_grad` of the original."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach().to(DEVICE).requires_grad_(x.requires_grad)


def back(tensors):
    return [x if x is None else x.cpu() for x in tensors]


def test_the_device_refuses_to_mix_and_counts_what_waits():
    x, y = torch.ones(3, device=DEVICE), torch.ones(3)
    assert x.device == torch.device(f"{standin.NAME}:0") and isinstance(x + 1, standin.StandIn)
    with pytest.raises(RuntimeError, match="expected one device"):
        x + y
    with pytest.raises(RuntimeError, match="expected one device"):
        torch.where(x > 0, x, y)
    with pytest.raises(TypeError, match="can't convert"):
        x.numpy()
    waiting = {
        "a number": lambda: x[0].item(),
        "a truth value": lambda: bool((x > 0).all()),
        "a copy to the CPU": lambda: x.cpu(),
        "a copy from the CPU": lambda: y.to(DEVICE),
        "a list of numbers": lambda: torch.tensor([1.0, 2.0], device=DEVICE),
        "a list as an index": lambda: x[[0, 2]],
        "a boolean index": lambda: x[x > 0],
        "the indices of nonzero entries": lambda: x.nonzero(),
    }
    for what, ask in waiting.items():
        with standin.counting() as counts:
            ask()
        assert counts["synchronisations"] >= 1, what
    with standin.counting() as counts:
        y.to(DEVICE, non_blocking=True) + x[1:].sum() + torch.zeros(3, device=DEVICE)
        x.masked_fill(x > 0, 1.0)[torch.arange(2, device=DEVICE)]
    assert counts["synchronisations"] == 0 and counts["operations"] >= 7


def test_the_device_refuses_to_measure_what_runs_on_the_cpu():
    peak = standin.computing_there(measure.peak_bytes)
    x = torch.ones(8)
    assert (
        peak(lambda: x.to(DEVICE) + 1, device=DEVICE) > 0 and peak(lambda: x + 1, device="cpu") > 0
    )
    with pytest.raises(RuntimeError, match="runs nothing on standin"):
        peak(lambda: x + 1, device=DEVICE)


# At most this often, by name and causality, mechanisms that branch on values synchronise.
ASK_FOR_NUMBERS = {("performer", True): 1, ("smgk", True): 2, ("smgk", False): 2}

# --- every mechanism, layer, model and plug -------------------------------------------------------


@every_mechanism
def test_mechanism(name):
    """Compare outputs and the gradients of q, k, v, parameters and masks with those on the CPU."""
    keep = boolean(23)
    masks = [{"attn_mask": keep}, {"attn_mask": added(Case(name).entry, keep)}]
    if MECHANISMS[name].any_mask:
        masks.append({"attn_mask": boolean(21, 23)})
    for options in variants(Case(name).entry, {}, *masks, {"dropout_p": 1.0}):
        kinds = ((torch.float64, 1e-8), (torch.float32, 1e-2))  # masks are tested in float64 only
        for dtype, tol in kinds[: 1 + ("attn_mask" not in options)]:
            case = Case(name, leading=(2, 4), dtype=dtype, **options)
            if case.entry.square and "attn_mask" in options:
                continue
            there = copy.copy(case)
            there.tensors = {key: moved(x) for key, x in case.tensors.items()}
            there.options = {key: moved(x) for key, x in case.options.items()}
            with standin.counting() as counts:
                results = there.results()
            mask = options.get("attn_mask")
            if mask is None or mask.dtype == torch.bool:
                waits = ASK_FOR_NUMBERS.get((name, "is_causal" in options), 0)
                assert counts["synchronisations"] <= waits, standin.places.most_common()
            found = back(results)
            assert_all_close(found, case.results(), tol, f"{name}, {[*options]}, {dtype}")
    formula = there.run("reference").cpu()
    assert_all_close([formula], [case.run("reference")], tol, f"the formula of {name}")


def test_functions_beside_the_mechanisms():
    x, keep = sequences(torch.float64)[:, None, :16, :8], boolean(16)
    calls = {
        "mixing_matrix_1d": (lambda w: da.mixing_matrix_1d(w[0, 0, 0, :5], 16),),
        "delta_state": (lambda k: da.delta_state(k, k, decay=-k[..., 0].abs()),),
        "downsample": (lambda q: da.downsample(q, 4),),
        "upsample": (lambda q: da.upsample(q, 4, 64),),
        "linear_attention_weights": (lambda q: da.linear_attention_weights(q, q),),
        "attention_weights": (lambda q, m: da.attention_weights(q, q, m), keep),
        "em_priors": (lambda q: da.em_priors(q, torch.stack([q, -q], -3)),),
        "responsibilities": (lambda q: da.responsibilities(q, torch.stack([q, -q], -3)),),
        "mra_attention_weights": (lambda q: da.mra_attention_weights(q, q, block=4, kept=4),),
        "sink_attention_weights": (lambda q: da.sink_attention_weights(q, q, bias=q[0, 0, 0, :1]),),
        "window_mask": (lambda q: da.window_mask(5, 6, 2, device=q.device),),
    }
    for name, (call, *rest) in calls.items():
        found = call(moved(x), *map(moved, rest))
        found, expected = (y if isinstance(y, tuple) else (y,) for y in (found, call(x, *rest)))
        assert all(y.device == torch.device(standin.NAME, 0) for y in found), name
        assert_all_close(back(found), expected, 1e-10, name)


def test_functions_that_cut_sequences_there():
    """Test running sums in chunks of 64 tokens, and Performer's segments of growing length."""
    for n in (0, 1, 64, 150):
        x = torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True)
        results = []
        for y in (x, moved(x)):
            sums = running_sums(y)
            results.append(back([sums, *torch.autograd.grad(sums.square().sum(), y)]))
        assert_all_close(*results, 1e-12, f"{n} tokens")
    x = torch.randn(150, 3)
    ends = torch.cat([x[:70], x.new_full((80, 3), torch.inf)])
    sums = [running_sums(moved(y)).cpu()[:70] for y in (x, ends)]
    assert torch.equal(*sums) and running_sums(x.bfloat16()).dtype == torch.float32
    case = Case("performer", leading=(2,), n=600, m=530, is_causal=True)
    for growth in (1, 50):
        case = case.with_tensors(lambda key, x: growth * x if key == "k" else x)  # noqa: B023
        there = copy.copy(case)
        there.tensors = {key: moved(x) for key, x in case.tensors.items()}
        expected = case.results("reference")
        assert_all_close(back(there.results()), expected, 1e-7, f"keys {growth} times as large")


@every_mechanism
def test_layer(name):
    entry, layer, x = MECHANISMS[name], make_layer(name), sequences()
    there = copy.deepcopy(layer).to(DEVICE)
    calls = [{}, {"key_padding_mask": GONE}, {"need_weights": True}]
    calls += [{"is_causal": True}, {"is_causal": True, "key_padding_mask": GONE}] * entry.causal
    for given in calls:
        if name == "conv1d" and "is_causal" in given:
            continue  # its layer takes `causal` in its constructor
        given = {"need_weights": False} | given
        results = []
        on_device = {key: moved(value) for key, value in given.items()}
        for here, y, options in ((layer, x, given), (there, moved(x), on_device)):
            out, A = here(y, y, y, **options)
            slopes = torch.autograd.grad(out.square().sum(), list(here.parameters()))
            results.append(back([out, *([] if A is None else [A]), *slopes]))
        assert_all_close(*results, 1e-8, f"{name}, {[*given]}")


@every_mechanism
def test_models(name):
    for place in ("series", "bytes", "object queries and memory"):
        if not belongs(place, name):
            continue
        model, given = make(place, name), PLACES[place][2]
        there = copy.deepcopy(model).to(DEVICE)
        results = []
        for here, inputs in ((model, given), (there, tuple(map(moved, given)))):
            out = here(*inputs)
            outs = out if isinstance(out, tuple) else (out,)
            loss = sum(y.square().sum() for y in outs)
            slopes = torch.autograd.grad(loss, list(here.parameters()), allow_unused=True)
            results.append(back([*outs, *(y for y in slopes if y is not None)]))
        assert_all_close(*results, 1e-7, f"{name}, {place}")


def test_plugs():
    """Run every mechanism in one model of Transformers or timm, and softmax in all three."""
    import test_plugs as theirs

    from derived_attention import plugs

    there = theirs.PADDING["left"]
    for name, entry in MECHANISMS.items():
        own = "Llama" if entry.causal and entry.alone else "Bert" if entry.alone else "timm"
        for family in ("Llama", "Bert", "timm") if name == "softmax" else (own,):
            if family == "timm":
                model, x, keep = plugs.equip_timm(theirs.vision(), name), theirs.IMAGES, ...
            else:
                model, x, keep = theirs.equipped(family, name), theirs.IDS, there
            found = []
            for here, move in ((copy.deepcopy(model).to(DEVICE), moved), (model, lambda x: x)):
                padding = {} if family == "timm" else {"attention_mask": move(there.long())}
                with torch.no_grad():
                    out = here(move(x), **padding)
                found.append((out if family == "timm" else out[0]).cpu()[keep])
            assert_all_close(found[:1], found[1:], 1e-7, f"{name}, {family}")


# --- training -------------------------------------------------------------------------------------

# How often a step waits for the device: a detector's boxes are matched on the CPU.
PER_STEP = {"scenes": 8}
PER_EPOCH = 2  # to test for finite losses, and to read numbers; a detector's are on the CPU


@pytest.mark.parametrize("kind", KINDS)
def test_fit(kind):
    """Check that training gives the CPU's numbers and waits as often as `PER_STEP` states."""
    make_model, data, loss, _ = KINDS[kind]
    histories = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = make_model().to(device)
        with standin.counting() as counts:
            histories.append(fit(model, data(SMALL), loss, epochs=2))
    found = counts["synchronisations"]
    expected = 2 * (3 * PER_STEP.get(kind, 0) + PER_EPOCH - (kind == "scenes"))
    assert found == expected, standin.places.most_common()
    for name, values in histories[0].items():
        assert histories[1][name] == pytest.approx(values, rel=1e-2, abs=1e-4), name
    with standin.counting() as counts:
        evaluate(model, data(SMALL), loss)
    assert kind in PER_STEP or counts["synchronisations"] == 1


def test_fit_in_float16_waits_for_no_step():
    make_model, data, loss, _ = KINDS["images"]
    model = make_model().to(DEVICE)
    with standin.counting() as counts:
        fit(model, data(SMALL), loss, epochs=2, precision="float16")
    assert counts["synchronisations"] == 2 * (PER_EPOCH + 1), standin.places.most_common()


def test_fit_says_in_which_step_the_loss_was_not_finite():
    make_model, data, loss, _ = KINDS["series"]
    model, calls = make_model().to(DEVICE), iter(range(100))
    spoil = lambda _, __, y: y * torch.nan if next(calls) == 4 else y  # noqa: E731
    model.register_forward_hook(spoil)
    with pytest.raises(FloatingPointError, match="loss is nan .* epoch 2, step 2; a smal"):
        fit(model, data(SMALL), loss, epochs=3)
    assert next(calls) == 6  # it stops at the end of the second epoch
