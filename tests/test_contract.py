"""Every mechanism of the registry keeps the contract, in its fast form and in its formula.

The promises are functions of `derived_attention.testing.contract`, which readers can try on
mechanisms of their own; `test_check_mechanism` shows that they find mistakes. The special
properties of a family are tested in its own file, and layers in `test_contract_layers`.
"""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
from cases import Case, N, added, causality_of, keys_of
from helpers import (
    DTYPES,
    TOLERANCE,
    B,
    H,
    Largest,
    assert_all_close,
    boolean,
    cuda,
    every_mechanism,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import derived_attention
from derived_attention.registry import MECHANISMS, PUBLIC
from derived_attention.testing.cases import Subject
from derived_attention.testing.contract import FLAGS, PROMISES, try_promise

OF_FORMULAS = """calling convention, dtypes, large scores, autocast, masks over keys, dead rows,
    large negative numbers, empty inputs, one key, shared heads, dropout, bad arguments"""
OF_FORMULAS = [name.strip() for name in OF_FORMULAS.split(",")]
OF_LONG_FORMS = """values, gradients, scale, dtypes, masks over keys, dead rows, causality, spread,
    large scores, further derivatives, vmap, empty inputs, one key"""
OF_LONG_FORMS = [name.strip() for name in OF_LONG_FORMS.split(",")]
WITH_SHORT_FORMS = "linear conv1d conv2d mra mgk hard_mgk smgk ridge sink selected".split()
# Weights of sums do not add up to 1, and the output of Primal-Attention is not A V.
SUMS = ("ridge", "lasso", "primal", "delta", "sink")
UNTRIED = {("one key", name) for name in SUMS} | {("dropout", "primal")}


def expected(name, promise):
    """What has to come out: a mechanism refuses only what its entry says."""
    entry = MECHANISMS[name]
    refused = {"causality": not entry.causal, "masks per query": not entry.any_mask}
    refused |= {"memory of shared heads": name != "softmax"}
    if (promise, name) in UNTRIED:
        return "untried"
    return "refused" if refused.get(promise) else "kept"


@every_mechanism
@pytest.mark.parametrize("promise", PROMISES)
def test_the_fast_form_keeps_its_promise(promise, name):
    result = try_promise(promise, Subject.of(name))
    assert result.verdict == expected(name, promise), result


@pytest.mark.parametrize("promise", OF_LONG_FORMS)
@pytest.mark.parametrize("name", WITH_SHORT_FORMS)
def test_the_form_of_long_sequences_keeps_its_promise(promise, name, no_short_forms):
    result = try_promise(promise, Subject.of(name))
    assert result.verdict == expected(name, promise), result


@pytest.mark.parametrize("promise", OF_FORMULAS)
@every_mechanism
def test_the_formula_keeps_its_promise(promise, name):
    result = try_promise(promise, Subject.of(name, "reference"))
    assert result.verdict == expected(name, promise), result


@pytest.mark.parametrize("name", [name for name in MECHANISMS if not MECHANISMS[name].causal])
def test_the_formula_refuses_to_be_causal_too(name):
    result = try_promise("causality", Subject.of(name, "reference"))
    assert result.verdict == "refused", result


@every_mechanism
def test_what_it_takes_is_found_by_trying(name):
    entry = MECHANISMS[name]
    found = Subject.of_function(entry.fast, entry.reference, entry.keys, entry.options)
    for flag in FLAGS:
        assert getattr(found, flag) == getattr(entry, flag), flag


@pytest.mark.parametrize("name", [name for name in MECHANISMS if name != "delta"])  # a recurrence
def test_the_recorder_sees_the_matrix_of_the_formula(name):
    with Largest() as largest, torch.no_grad():
        Case(name, n=256, m=256, d=2, dv=3).run("reference")
    assert largest.numel >= 256 * 256


@every_mechanism
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=2).map(lambda sizes: (*sizes, H)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 6), st.integers(0, 5)),
    st.sampled_from(["none", "causal", "boolean", "float"]),
    st.integers(0, 99),
)
def test_fast_equals_reference_for_any_shape(name, leading, lengths, widths, kind, seed):
    entry, (n, m), (d, dv) = MECHANISMS[name], lengths, widths
    m = n if entry.square else m
    d = max(d, 2) if name == "delta" else d  # one feature may be so near 0 that 1/k² is inexact
    full = (*leading, n if entry.any_mask else 1, m)
    generator = torch.Generator().manual_seed(seed)
    shape = [x if torch.rand((), generator=generator) < 0.7 else 1 for x in full]
    keep = torch.rand(shape, generator=generator) > 0.5
    masks = {"boolean": keep, "float": added(name, keep).detach()}
    options = {"attn_mask": masks[kind]} if kind in masks else {}
    if kind == "causal":
        options = {"is_causal": entry.causal}
    case = Case(name, n=n, m=m, leading=leading, d=d, dv=dv, seed=seed, **options)
    fast = case.results()
    assert fast[0].shape == (*leading, n, case.tensors["v"].shape[-1])
    assert all(bool(x.isfinite().all()) for x in fast)
    assert_all_close(fast, case.results("reference"), 1e-9, name)


def test_values_are_not_looked_at_where_there_are_none():
    for name in MECHANISMS:
        case = Case(name, n=N, m=N, dtype=torch.float32, device="meta")
        out = case.run(attn_mask=torch.ones(N, device="meta"))
        assert out.shape == case.tensors["v"].shape and out.is_meta, name


# --- on a GPU, and the public names --------------------------------------------------------------


@cuda
def test_cuda_equals_float64_on_the_cpu():
    for name in MECHANISMS:
        keep = boolean(B, 1, 1, keys_of(name))
        keep[1] = False
        for dtype in DTYPES:
            for options in causality_of(name, {}, {"attn_mask": keep}):
                case = Case(name, dtype=dtype, **options)
                exact = case.with_tensors(lambda key, x: x.double()).results()
                there = {key: x.cuda() if key == "attn_mask" else x for key, x in options.items()}
                ours = Case(name, dtype=dtype, device="cuda", **there).results()
                ours, what = [x.cpu().double() for x in ours], f"{name}, {dtype}, {list(options)}"
                assert_all_close(ours, exact, 4 * TOLERANCE[dtype], what)


def test_the_package_imports_nothing_until_it_is_asked():
    code = "import sys, derived_attention; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_can_be_imported():
    assert derived_attention.MECHANISMS is MECHANISMS
    for name, module in ((x, where) for x, where in PUBLIC.items() if x != "MECHANISMS"):
        thing = getattr(derived_attention, name)
        assert thing.__name__ == name and thing.__module__ == module, name
        assert inspect.getdoc(thing), name
    listed = dir(derived_attention)
    assert {*PUBLIC, "__version__"} <= {*listed}
    for name in ("no_such_attention", "_private", "Attention"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(derived_attention, name)


def test_mechanisms_are_known_by_name():
    assert derived_attention.list_attentions() == list(MECHANISMS)
    for name, entry in MECHANISMS.items():
        assert derived_attention.get_attention(name) is entry.fast
        assert entry.reference.__name__ == f"{entry.fast.__name__}_reference"
        assert inspect.getdoc(entry.fast) and inspect.getdoc(entry.reference), name
        assert {entry.fast.__name__, entry.reference.__name__} <= {*PUBLIC}, name
        assert type(entry.make_layer(4 * H, H, N)).__name__ in PUBLIC, name
    with pytest.raises(ValueError, match="name is 'sofmax'; expected .*: did you mean 'softmax'?"):
        derived_attention.get_attention("sofmax")
