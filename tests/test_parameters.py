"""Tensor parameters: their range, NaN, and a parameter for each head if heads share keys.

Flags, which must be True or False: every other value is refused.
"""

from __future__ import annotations

import functools
import inspect
import math

import pytest
import torch
from helpers import assert_all_close, every_mechanism

import derived_attention
from derived_attention.registry import MECHANISMS
from derived_attention.testing.cases import B, Case, D, H, M, N

NOT_FINITE = (math.nan, math.inf, -math.inf)
# By mechanism and parameter: a shape with numbers for each head, and the values to be refused.
BIASES = [("bn", "beta"), ("bn_sh", "beta"), ("fmm", "near"), ("fmm", "far"), ("sink", "bias")]
PENALTIES = [("ridge", "lam"), ("lasso", "lam"), ("lasso", "rho")]
MIXTURES = "mgk", "hard_mgk", "smgk"
NUMBERS = {
    **dict.fromkeys(BIASES, ((H,), ())),
    ("smgk", "shifts"): ((H, 2, D), ()),
    ("delta", "beta"): ((H, M), ()),
    ("delta", "decay"): ((H, M), (1.0,)),
    **dict.fromkeys(PENALTIES, ((H,), (0.0, -1.0))),
    **{(name, "priors"): ((H, 2), (-1.0,)) for name in ("mlk", *MIXTURES)},
    **{(name, "variances"): ((H, 2), (0.0, -1.0)) for name in MIXTURES},
}
# Matrices and filters: a NaN in them makes the result NaN, as one in q does.
MATRICES = {
    **{("conv1d", key): (H, 3) for key in ("weight", "key_weight")},
    **{("conv2d", key): (H, 3, 3) for key in ("weight", "key_weight")},
    # None: the shape of the sample options
    **{("linformer", key): None for key in ("key_projection", "value_projection")},
    ("performer", "projection"): (4, D),
    ("luna", "packed"): (H, 3, D),
    **{("primal", key): None for key in ("W_e", "W_r", "W_o")},
}
number = pytest.mark.parametrize(("name", "parameter"), NUMBERS)


def draw(name, parameter, shape):
    """Return a case, and numbers for a parameter: below 0 for a decay, else from 0.1 to 1.1."""
    case = Case(name, n=H + 1, m=M)
    shape = shape or case.tensors.get(parameter, case.tensors.get("key_projection")).shape
    x = 0.1 + torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return case, -x if parameter == "decay" else x


def spoilt(x, value):
    x = x.clone()
    x.view(-1)[-1] = value
    return x


@number
def test_numbers_out_of_their_range_are_named(name, parameter):
    shape, wrong = NUMBERS[name, parameter]
    case, x = draw(name, parameter, shape)
    for form in ("fast", "reference"):
        case.run(form, **{parameter: x})
        for value in (*NOT_FINITE, *wrong):
            says = rf"{parameter} contains {value:.3g}; expected numbers that are finite"
            with pytest.raises(ValueError, match=says):
                case.run(form, **{parameter: spoilt(x, value)})


@pytest.mark.parametrize(("name", "parameter"), MATRICES)
def test_nan_in_a_matrix_makes_the_result_nan(name, parameter):
    case, x = draw(name, parameter, MATRICES[name, parameter])
    for form in ("fast", "reference"):
        assert bool(case.run(form, **{parameter: spoilt(x, math.nan)}).isnan().any()), form


def test_every_tensor_of_the_registry_is_tried_with_nan():
    tensors = {(n, key) for n in MECHANISMS for key, x in Case(n).further.items()
               if isinstance(x, torch.Tensor) and x.is_floating_point()}  # fmt: skip
    assert tensors <= {*NUMBERS, *MATRICES}


@number
def test_numbers_are_not_looked_at_in_a_transform(name, parameter):
    """In a transform one tensor may represent several, of which only some are invalid."""
    case, x = draw(name, parameter, NUMBERS[name, parameter][0])
    both = torch.stack([x, spoilt(x, math.nan)])
    right, _ = torch.func.vmap(lambda y: case.run(**{parameter: y}))(both)
    assert_all_close([right], [case.run(**{parameter: x})], 1e-10, f"{name}: {parameter}")


@pytest.mark.parametrize(
    ("name", "parameter", "shape"),
    [
        *((*key, shape) for key, (shape, _) in NUMBERS.items()),
        *((*key, shape) for key, shape in MATRICES.items()),
        ("mra", "query_mask", (H, H + 1)),
    ],
)
def test_heads_that_share_keys_have_parameters_of_their_own(name, parameter, shape):
    case, x = draw(name, parameter, shape)
    x = x > 0.5 if parameter == "query_mask" else x
    heads = -4 if name in ("mgk", "hard_mgk", "mlk") else -3
    one = {key: case.tensors[key].narrow(at, 0, 1) for key, at in (("k", heads), ("v", -3))}
    copies = {key: t.expand(case.tensors[key].shape) for key, t in one.items()}
    found = case.run(**one, enable_gqa=True, **{parameter: x})
    assert_all_close([found], [case.run(**copies, **{parameter: x})], 1e-10, name)


# --- flags ----------------------------------------------------------------------------------------


def flags_of(function):
    """Return the names of the arguments that are True or False."""
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name for p in parameters if isinstance(p.default, bool) or "bool" in str(p.annotation)
    ]


def assert_flags_are_checked(call, flags):
    for flag in flags:
        for value in ("a", 1):
            with pytest.raises(TypeError, match=rf"^{flag} is (of type|'a'|1).*expected True"):
                call(**{flag: value})


@every_mechanism
def test_flags_are_true_or_false(name):
    entry, x = MECHANISMS[name], torch.zeros(B, 16, 4 * D)
    layer = entry.make_layer(4 * D, 4, 16)
    assert_flags_are_checked(
        functools.partial(entry.make_layer, 4 * D, 4, 16), flags_of(type(layer))
    )
    assert_flags_are_checked(functools.partial(layer, x, x, x), flags_of(type(layer).forward))
    for form in ("fast", "reference"):
        case = Case(name)
        assert_flags_are_checked(functools.partial(case.run, form), flags_of(getattr(entry, form)))


@every_mechanism
def test_an_unknown_option_is_reported_by_a_public_function(name):
    with pytest.raises(TypeError, match=r"\(\) got an unexpected .* 'other'") as raised:
        Case(name).run(other=1)
    assert hasattr(derived_attention, str(raised.value).partition("()")[0])


def test_flags_of_other_functions_are_true_or_false():
    q, k = torch.zeros(H, N, D), torch.zeros(H, 2, N, D)
    for mask in ("window_mask", "strided_mask", "fixed_mask"):
        call = functools.partial(getattr(derived_attention, mask), 4, 4, 2)
        assert_flags_are_checked(call, ["is_causal"])
    for name, inputs, more in (
        ("em_priors", (q, k), {}),
        ("delta_state", (q, q), {}),
        ("sink_attention_weights", (q, q), {"bias": 0.0}),
        ("attention_weights", (q, q), {}),
        ("linear_attention_weights", (q, q), {}),
        ("mra_attention_weights", (q, q), {}),
    ):
        function = getattr(derived_attention, name)
        assert_flags_are_checked(functools.partial(function, *inputs, **more), flags_of(function))
