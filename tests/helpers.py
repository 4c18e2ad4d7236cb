"""Marks, inputs, gradients and comparisons that several test files of attention share."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from derived_attention.common import kernels
from derived_attention.registry import MECHANISMS
from derived_attention.testing.cases import DTYPES as DTYPES
from derived_attention.testing.cases import Largest as Largest
from derived_attention.testing.cases import boolean as boolean
from derived_attention.testing.cases import output_and_gradients as output_and_gradients
from derived_attention.testing.cases import relative_errors as relative_errors
from derived_attention.testing.cases import tensors as tensors
from derived_attention.testing.cases import written_as_numbers as written_as_numbers
from derived_attention.testing.contract import TOLERANCE as TOLERANCE

B, H, N, M, D, DV = 2, 3, 5, 7, 8, 6

cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NOT TESTED: this machine has no CUDA device"
)

# Inductor passes the path of PyTorch's headers to g++ without quotes.
needs_inductor = pytest.mark.skipif(
    " " in sys.prefix, reason="NOT TESTED: INDUCTOR CANNOT COMPILE IN A PATH WITH A SPACE"
)

NO_TRITON = "KERNELS ARE NOT TESTED: TRITON IS MISSING OR TOO OLD"
needs_triton = pytest.mark.skipif(not kernels.available(), reason=NO_TRITON)
# For tests that imitate a GPU in Triton's interpreter, which conftest.py sets only without a GPU.
needs_interpreter = pytest.mark.skipif(
    not kernels.uses_interpreter(), reason="NOT TESTED: KERNELS DO NOT RUN IN TRITON'S INTERPRETER"
)

every_mechanism = pytest.mark.parametrize("name", MECHANISMS)
every_mechanism_with_weights = pytest.mark.parametrize(
    "name", [name for name, entry in MECHANISMS.items() if entry.weights]
)
every_causal_mechanism = pytest.mark.parametrize(
    "name", [name for name, entry in MECHANISMS.items() if entry.causal]
)


def qkv(leading=(B, H), n=N, m=M, d=D, dv=DV, **options):
    """Return queries (..., n, d), keys (..., m, d) and values (..., m, dv)."""
    return tensors((*leading, n, d), (*leading, m, d), (*leading, m, dv), **options)


def assert_all_close(left, right, tol, what=""):
    """Assert that two lists of tensors agree in shapes, dtypes and values."""
    assert len(left) == len(right), what
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what} [{i}]"
        torch.testing.assert_close(
            a, b, rtol=tol, atol=tol, msg=lambda m, i=i: f"{what} [{i}]: {m}"
        )


def assert_named(bad, function, /, **given):
    """Assert that a function names what is wrong: `bad` lists error, words, changed arguments."""
    for error, match, changed in bad:
        with pytest.raises(error, match=match):
            function(**given | changed)


def takes_no_bias(name):
    """Return whether a mechanism adds no mask to scores: floating masks contain only 0 and -inf."""
    return not MECHANISMS[name].biased


def additive(mask, bias=0.0):
    """Return a boolean mask as a floating one, as nn.TransformerEncoderLayer converts it."""
    return torch.zeros(mask.shape, dtype=torch.float64).add(bias).masked_fill(~mask, -math.inf)


def disturbed(module, by=0.1):
    """Return a module whose parameters are no longer those that it starts with."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(by * torch.randn(p.shape))
    return module


def with_gradients(form, inputs, **options):
    """Return `output_and_gradients`, also for options that are tensors with `requires_grad`."""
    learned = {k: x for k, x in options.items() if isinstance(x, torch.Tensor) and x.requires_grad}

    def function(q, k, v, *values):
        zero = 0 * sum(x.sum() for x in values)  # an option that cancels gets a zero gradient
        return form(q, k, v, **{**options, **dict(zip(learned, values, strict=True))}) + zero

    return output_and_gradients(function, [*inputs, *learned.values()])


def assert_agree(forms, inputs, what="", tol=1e-10, **options):
    """Assert that the results of two forms are finite and agree; return the first's output."""
    results = [with_gradients(form, inputs, **options) for form in forms]
    assert all(bool(x.isfinite().all()) for x in results[0]), what
    assert_all_close(*results, tol, what)
    return results[0][0]


def assert_learns(layer, x, what, **options):
    """Assert that ten steps towards the identity reduce the loss and change every parameter."""
    x = x.detach()
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    before, losses = [p.detach().clone() for p in layer.parameters()], []
    for _ in range(10):
        loss = (layer(x, x, x, need_weights=False, **options)[0] - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0], what
    changed = (bool((p != b).any()) for p, b in zip(layer.parameters(), before, strict=True))
    assert all(changed), what
