"""What several test files of attention share: marks, inputs, gradients, comparisons."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from derived_attention.attention.engine import kernels
from derived_attention.attention.registry import MECHANISMS

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Largest error allowed between two ways of computing the same thing in one dtype.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float64: 1e-12,
    torch.bfloat16: 5e-2,
    torch.float16: 5e-3,
}
B, H, N, M, D, DV = 2, 3, 5, 7, 8, 6

cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NOT TESTED: this machine has no CUDA device"
)

NO_TRITON = "NO TRITON HERE THAT KERNELS ARE TESTED ON: THEY ARE NOT TESTED"
needs_triton = pytest.mark.skipif(not kernels.available(), reason=NO_TRITON)

every_mechanism = pytest.mark.parametrize("name", MECHANISMS)
every_mechanism_with_weights = pytest.mark.parametrize(
    "name", [name for name, entry in MECHANISMS.items() if entry.weights]
)
every_causal_mechanism = pytest.mark.parametrize(
    "name", [name for name, entry in MECHANISMS.items() if entry.causal]
)


def tensors(*shapes, dtype=torch.float64, seed=0, device="cpu"):
    """Random leaves that ask for a gradient, the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    return [x.to(device, dtype).requires_grad_() for x in made]


def qkv(leading=(B, H), n=N, m=M, d=D, dv=DV, **options):
    """Queries (..., n, d), keys (..., m, d) and values (..., m, dv)."""
    return tensors((*leading, n, d), (*leading, m, d), (*leading, m, dv), **options)


def output_and_gradients(function, inputs, **options):
    """The output, and the gradients of a fixed linear functional of it."""
    leaves = [x for x in inputs if x.requires_grad]
    out = function(*inputs, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    return out, *torch.autograd.grad((out * weights.view_as(out)).sum(), leaves)


def assert_all_close(left, right, tol, what=""):
    """Compare two lists of tensors: shapes, dtypes and values."""
    assert len(left) == len(right), what
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what} [{i}]"
        torch.testing.assert_close(
            a, b, rtol=tol, atol=tol, msg=lambda m, i=i: f"{what} [{i}]: {m}"
        )


def relative_errors(results, exact):
    """The norms of the differences, as shares of the norms."""
    pairs = zip(results, exact, strict=True)
    return [float((x.double() - y).detach().norm() / y.detach().norm()) for x, y in pairs]


def boolean(*shape, seed=1):
    """A random boolean mask whose rows all keep at least one key."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    return mask | (torch.arange(shape[-1]) == 0)


def takes_no_bias(name):
    """Whether keys have no score each: then a floating mask only says who is there: 0 or -inf."""
    return not MECHANISMS[name].biased


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


def written_as_numbers(keep):
    """The masks, 0 where `keep` is True, that libraries write in each dtype to say it is False."""
    for dtype in DTYPES:
        least = torch.finfo(dtype).min
        for number in (-math.inf, least, -1e30, -1e9, -1e4):
            if number >= least or number == -math.inf:
                yield torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, number)


def additive(mask, bias=0.0):
    """The floating mask of a boolean one, as nn.TransformerEncoderLayer makes it."""
    return torch.zeros(mask.shape, dtype=torch.float64).add(bias).masked_fill(~mask, -math.inf)


def with_gradients(form, inputs, **options):
    """`output_and_gradients`, of those options too that are tensors and ask for a gradient."""
    learned = {k: x for k, x in options.items() if isinstance(x, torch.Tensor) and x.requires_grad}

    def function(q, k, v, *values):
        zero = 0 * sum(x.sum() for x in values)  # what cancels, gets a zero for a gradient
        return form(q, k, v, **{**options, **dict(zip(learned, values, strict=True))}) + zero

    return output_and_gradients(function, [*inputs, *learned.values()])


def assert_learns(layer, x, what, **options):
    """Some steps towards the identity make the loss fall, and change every parameter."""
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
