"""A mechanism of the registry on random tensors, for the contract tests."""

from __future__ import annotations

import copy
import math

import torch
from helpers import B, H, assert_all_close, output_and_gradients, qkv, takes_no_bias, tensors

from derived_attention.attention.registry import MECHANISMS

N, M, D, DV = 21, 23, 6, 5


class Case:
    """A mechanism with its sample options, on random tensors; `common` are arguments of all."""

    def __init__(
        self, name, *, n=N, m=M, leading=(B, H), d=D, dv=DV, dtype=torch.float64, device="cpu",
        seed=0, **common,
    ):  # fmt: skip
        self.entry = MECHANISMS[name]
        m = n if self.entry.square else m
        dv = dv if self.entry.weights else d
        q, k, v = qkv(leading, n, m, d, dv, dtype=dtype, device=device, seed=seed)
        own = self.entry.options(max(n, m, 1), leading[-1] if leading else 1, d)
        if "grid" in own and n == 0:
            own["grid"] = (0, 4)
        own |= common
        self.tensors = {"q": q, "k": self.entry.keys(k.detach()).requires_grad_(), "v": v}
        for key, x in own.items():
            if isinstance(x, torch.Tensor):
                mine = key == "attn_mask"
                self.tensors[key] = x if mine else x.to(device, dtype).requires_grad_()
        self.options = {key: x for key, x in own.items() if key not in self.tensors}

    def run(self, form="fast", **changed):
        form = getattr(self.entry, form) if isinstance(form, str) else form
        return form(**{**self.tensors, **self.options, **changed})

    def results(self, form="fast"):
        """The output, and the gradients of q, k, v, of parameters, and of a floating mask."""
        return output_and_gradients(
            lambda *values: self.run(form, **dict(zip(self.tensors, values, strict=True))),
            list(self.tensors.values()),
        )

    def copied(self, change):
        """The same with other values in the tensors: `change(name, tensor)`."""
        other = copy.copy(self)
        other.tensors = {
            key: x
            if x.dtype == torch.bool
            else change(key, x.detach()).requires_grad_(x.requires_grad)
            for key, x in self.tensors.items()
        }
        return other


def assert_forms_agree(name, what, tol=1e-10, **changed):
    case = Case(name, **changed)
    assert_all_close(case.results("fast"), case.results("reference"), tol, f"{name}, {what}")


def keys_of(name):
    """As many keys as usual."""
    return N if MECHANISMS[name].square else M


def causality_of(name, *others):
    """Other options, each in a dictionary, and causality where there is one."""
    return [*others, *[{"is_causal": True}] * MECHANISMS[name].causal]


def added(name, keep, dtype=torch.float64):
    """A floating mask that is -inf where `keep` is False, with a gradient where it may have one."""
    bias = tensors(keep.shape, seed=4)[0].detach().to(dtype)
    bias = torch.zeros_like(bias) if takes_no_bias(name) else bias
    return bias.masked_fill(~keep, -math.inf).requires_grad_(not takes_no_bias(name))


def disturbed(case, t, size=5):
    """The same with other queries, keys and values after position t."""

    def change(key, x):
        if key not in ("q", "k", "v"):
            return x
        late = (torch.arange(x.shape[-2]) > t)[:, None]
        return x + late * torch.linspace(-size, size, x.shape[-1]).to(x.dtype)

    return case.copied(change)
