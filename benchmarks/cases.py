"""The cases to time: PyTorch's own attention, and each mechanism of the package.

Each entry of the registry, `derived_attention.registry`, gives one case, or two if it can be
causal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from derived_attention import softmax_attention_reference
from derived_attention.common.checks import Mechanism
from derived_attention.common.masks import causal_mask
from derived_attention.formulas import soft_threshold
from derived_attention.mixture.shifted import shifted_keys
from derived_attention.registry import MECHANISMS, Entry

HEADS, DIM = 8, 64


@dataclass(frozen=True)
class Case:
    """A mechanism or a baseline to time.

    Attributes
    ----------
    label : str
        Its name in tables.
    fast, reference : callable
        Its two forms, functions of q, k, v and `options`.
    options : callable
        Returns the options for a sequence length N and a head width D, by default 64. Tensors are
        parameters: they are converted to the inputs' dtype and device, and get a gradient.
    baseline : str
        The name, in `BASELINES`, of the case with which it is compared.
    goal : pair of floats, optional
        Largest shares of the baseline's time, forward and forward + backward: see `Entry.goals`.
    reference_length : int
        Longest N for which to measure the reference's memory at N and 2N.
    """

    label: str
    fast: Mechanism
    reference: Mechanism
    options: Callable[..., dict[str, Any]]
    baseline: str
    goal: tuple[float, float] | None = None
    reference_length: int = 1024


def dense_mixture(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, hard: bool = False
) -> Tensor:
    """Return MGK attention (eq. 7 of [Nguyen2022]) with an (N, M) matrix for each component."""
    logarithms = []
    for key in k.unbind(-3):
        lengths = q.square().sum(-1, keepdim=True) + key.square().sum(-1).unsqueeze(-2)
        s = (q @ key.mT - lengths / 2) / math.sqrt(q.shape[-1])  # −‖q − k‖²/2σ²
        if is_causal:
            s = s.masked_fill(~causal_mask(*s.shape[-2:], s.device), -math.inf)
        logarithms.append(s)
    most = functools.reduce(torch.maximum, logarithms).amax(-1, keepdim=True)
    terms = [(s - most).exp() for s in logarithms]
    total = functools.reduce(torch.maximum if hard else torch.add, terms)
    return total / total.sum(-1, keepdim=True) @ v


def dense_shifted_mixture(
    q: Tensor, k: Tensor, v: Tensor, *, shifts: Tensor, **options: Any
) -> Tensor:
    """Return MGK attention on R shifted copies of each key."""
    return dense_mixture(q, shifted_keys(k, shifts), v, **options)


def lasso_by_large_inverse(
    q: Tensor, k: Tensor, v: Tensor, *, lam: float = 0.1, rho: float = 10.0, iterations: int = 5
) -> Tensor:
    """Return lasso attention by the paper's ADMM, corrected, with an inverse of shape (M, M)."""
    inverse = torch.linalg.inv(k @ k.mT + rho * torch.eye(k.shape[-2]).to(k))
    b = q @ k.mT
    z = u = torch.zeros_like(b)
    for _ in range(iterations):
        x = (b + rho * (z - u)) @ inverse
        z = soft_threshold(x + u, lam / rho)
        u = u + x - z
    return z @ v


# They are measured instead of references, because those of mixtures need O(N²D) memory.
DENSE: dict[str, Mechanism] = {
    "mgk": dense_mixture,
    "hard_mgk": functools.partial(dense_mixture, hard=True),
    "smgk": dense_shifted_mixture,
}
DENSE |= {f"{name}_causal": form for name, form in DENSE.items()}
DENSE["lasso"] = lasso_by_large_inverse


def two_heads(form: Mechanism) -> Mechanism:
    """Return a form with two heads for each head, one per key, whose outputs are added."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        keys = torch.cat([k, -k.flip(-2)], -3)
        both = form(torch.cat([q, q], -3), keys, torch.cat([v, v], -3), **options)
        first, second = both.chunk(2, -3)
        return first + second

    return attend


def _causal(options: dict[str, Any], is_causal: bool) -> dict[str, Any]:
    return options | {"is_causal": True} if is_causal else options


def _baseline(heads: int, is_causal: bool) -> str:
    return "sdpa" + "_double" * (heads == 2) + "_causal" * is_causal


def _baselines() -> dict[str, Case]:
    found = {}
    forms = (F.scaled_dot_product_attention, softmax_attention_reference)
    for heads, label in ((1, "SDPA"), (2, "SDPA, twice the heads")):
        for causal in (False, True):
            name = _baseline(heads, causal)
            found[name] = Case(
                label + ", causal" * causal,
                *(forms if heads == 1 else map(two_heads, forms)),
                lambda N, D=DIM, causal=causal: _causal({}, causal),
                name,
            )
    return found


def _case(name: str, entry: Entry, is_causal: bool) -> Case:
    def with_keys(form: Mechanism) -> Mechanism:
        attend = lambda q, k, v, **options: form(q, entry.keys(k), v, **options)  # noqa: E731
        return functools.wraps(form)(attend)

    case = name + "_causal" * is_causal
    return Case(
        ", ".join(filter(None, [entry.label, entry.sample, "causal" * is_causal])),
        with_keys(entry.fast),
        with_keys(DENSE.get(case, entry.reference)),
        lambda N, D=DIM: _causal(entry.options(N, HEADS, D), is_causal),
        _baseline(entry.heads, is_causal),
        entry.goals.get("causal" if is_causal else "full"),
        entry.reference_length,
    )


BASELINES = _baselines()
CASES = {
    name + "_causal" * is_causal: _case(name, entry, is_causal)
    for name, entry in MECHANISMS.items()
    for is_causal in ((False, True) if entry.causal else (False,))
}
