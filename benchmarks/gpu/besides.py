"""Calls that a user of a GPU could use instead of ours: SDPA, FlexAttention and fla-core."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import MODES

SDPA, DOUBLE = "SDPA", "SDPA, twice the heads"
FLEX, FLA, UNFUSED = "FlexAttention", "fla-core", "PyTorch's form"
Calls = dict[str, Callable[[], Any]]  # forward, and forward + backward


def call(
    form: Callable[..., Tensor], tensors: Sequence[Tensor], options: Mapping[str, Any]
) -> Calls:
    """Return the calls to time; tensors among the options are parameters, and get a gradient."""
    q, k, v, gradient = tensors
    own = {
        name: x.to(q).requires_grad_() if isinstance(x, Tensor) else x
        for name, x in options.items()
    }
    leaves = [q, k, v, *(x for x in own.values() if isinstance(x, Tensor))]

    def both() -> Any:
        return torch.autograd.grad(form(q, k, v, **own), leaves, gradient)

    return {MODES[0]: torch.no_grad()(lambda: form(q, k, v, **own)), MODES[1]: both}


def sdpa(tensors: Sequence[Tensor], is_causal: bool, heads: int = 1) -> Calls:
    """Return calls of SDPA with `heads` times the heads."""
    many = [leaf(torch.cat([x] * heads, 1)) for x in tensors]
    return call(F.scaled_dot_product_attention, many, {"is_causal": is_causal})


def leaf(x: Tensor) -> Tensor:
    """Return the numbers of x as a tensor without history, which requires a gradient if x does."""
    return x.detach().requires_grad_(x.requires_grad)


# --- FlexAttention --------------------------------------------------------------------------------


def _call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, blocks: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    def add(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + bias[b, h, j]  # type: ignore[index]

    score = None if bias is None else add
    return flex_attention(q, k, v, score_mod=score, block_mask=blocks)  # type: ignore[return-value]


@functools.cache
def _kernel(*kind: Any) -> Callable[..., Tensor]:
    """Return a function that PyTorch compiles for one kind of call.

    It has its own code object, because PyTorch compiles one code object at most eight times.
    """
    own = types.FunctionType(_call.__code__.replace(co_name="flex"), globals())
    return torch.compile(own, fullgraph=True, dynamic=False)


@functools.cache
def _blocks(pattern: str, is_causal: bool, N: int, M: int, window: int, device: str) -> Any:
    """Return a pattern's blocks, or None; key j of M = R·N keys belongs to token j mod N."""
    from torch.nn.attention.flex_attention import create_block_mask

    def attends(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        at = j % N
        near = (i - at).abs() <= window if pattern == "window" else i >= 0
        return near & (at <= i) if is_causal else near

    if pattern != "window" and not is_causal:
        return None
    return create_block_mask(attends, None, None, N, M, device=device)


def flex(
    pattern: str, tensors: Sequence[Tensor], is_causal: bool, options: Mapping[str, Any]
) -> Calls:
    """Return calls of FlexAttention: ``"plain"``, ``"window"``, or a ``"bias"`` for each key."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = None
        if pattern == "bias":  # softmax of q·k/√D − ‖k‖²/2√D over all keys of all components
            R, D = k.shape[-3], k.shape[-1]
            bias = -k.square().sum(-1).flatten(-2) / (2 * D**0.5)
            k, v = k.flatten(-3, -2), v.unsqueeze(-3).expand(*[-1] * 2, R, -1, -1).flatten(-3, -2)
        N, M, window = q.shape[-2], k.shape[-2], options.get("window", 0)
        blocks = _blocks(pattern, is_causal, N, M, window, str(q.device))
        if not q.is_cuda:  # where FlexAttention has no gradients
            q, k, v = (x.detach() for x in (q, k, v))
            bias = None if bias is None else bias.detach()
        kind = (pattern, is_causal, q.shape, q.requires_grad and torch.is_grad_enabled())
        return (_kernel(*kind) if q.is_cuda else _call)(q, k, v, bias, blocks)

    return call(attend, tensors, {})


# --- fla-core -------------------------------------------------------------------------------------


def fla(kind: str, tensors: Sequence[Tensor], options: Mapping[str, Any]) -> Calls:
    """Return calls of fla-core: ``"linear"``, ``"delta"`` or ``"gated_delta"``, all causal.

    Tokens come before heads in memory, as fla-core requires. On a CPU its formulas run instead.
    """
    first = [leaf(x.transpose(1, 2).contiguous()) for x in tensors]
    decay = {name: x.mT.contiguous() for name, x in options.items() if name == "decay"}
    return call(FLA_FORMS[kind], first, decay)


def _fla_linear(q: Tensor, k: Tensor, v: Tensor) -> Any:
    from fla.ops.linear_attn import chunk_linear_attn
    from fla.ops.linear_attn.naive import naive_chunk_linear_attn

    q, k = F.elu(q) + 1, F.elu(k) + 1
    if not q.is_cuda:
        return naive_chunk_linear_attn(q, k, v, normalize=True)
    return chunk_linear_attn(q, k, v, normalize=True)[0]


def _fla_delta(q: Tensor, k: Tensor, v: Tensor) -> Any:
    from fla.ops.delta_rule import chunk_delta_rule

    if not q.is_cuda:
        return _fla_gated_delta(q, k, v, torch.zeros(q.shape[:-1]))
    beta = (1 / k.float().square().sum(-1)).to(q.dtype)
    return chunk_delta_rule(q, k, v, beta, scale=1.0)[0]


def _fla_gated_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Any:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule

    beta = (1 / k.float().square().sum(-1)).to(q.dtype)
    form = chunk_gated_delta_rule if q.is_cuda else naive_chunk_gated_delta_rule
    decay = decay.float().expand(q.shape[:-1]).contiguous()
    return form(q, k, v, g=decay, beta=beta, scale=1.0)[0].to(q.dtype)


FLA_FORMS: dict[str, Callable[..., Tensor]] = {
    "linear": _fla_linear,
    "delta": _fla_delta,
    "gated_delta": _fla_gated_delta,
}
