"""The delta rule by the chunk kernels of fla-core, which a GPU runs where they agree with ours.

fla-core is optional: ``pip install "derived-attention[gpu]"``. Its kernels take float16 and
bfloat16, sum in float32, and store tokens first. Here all leading dimensions are one batch of
sequences with one head, so that no tensor is transposed, and what the kernels tune themselves for
does not depend on the number of heads. `chunk_delta_rule` forgets nothing,
`chunk_gated_delta_rule` has decays, and `chunk_simple_gla` erases nothing.

``torch.compile`` cannot look into these functions, so that a compiled call runs our own chunks.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from derived_attention.common.convention import extend
from derived_attention.common.kernels import should_run_kernel

WIDEST = 256  # features of a key or a value
TRIED = {"N": 1000, "M": 1000, "H": 32}  # kernels tune themselves on it: it has to fill a GPU
FORGOTTEN = -104.0  # e to this power is 0 in float32, and sums of such decays keep weak ones


def runs(
    fused: bool | None, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, erase: bool,
    decay: Tensor | None, *others: Tensor | None,
) -> bool:  # fmt: skip
    """Return whether fla-core runs: if `fused` is True, or None where a trial agreed.

    `others` are the strengths and the state, if there are any.

    Raises
    ------
    TypeError, ValueError
        As `common.kernels.should_run_kernel`; and if `fused` is True where fla-core cannot run.
    """
    if fused is None and (not q.is_cuda or torch.compiler.is_compiling()):
        return False
    obstacle = _obstacle(q, k, v)
    if fused is True and obstacle:
        raise ValueError(f"fused is True, and {obstacle}; expected False or None: PyTorch's form")

    kind: dict[str, Any] = {"kernel": "delta", **TRIED, "D": q.shape[-1], "DV": v.shape[-1]}
    kind |= {"mask": "causal" if is_causal else "", "gated": decay is not None, "erase": erase}
    given = [q, k, v, *(x for x in (decay, *others) if isinstance(x, Tensor))]
    problem = None if obstacle else lambda: kind
    return should_run_kernel(fused, *given, problem=problem) and 0 not in map(Tensor.numel, given)


def _obstacle(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return what keeps fla-core from running, or nothing."""
    if torch.compiler.is_compiling():
        return "a compiler traces, which cannot look into fla-core"
    if not is_installed():
        return "fla-core is not installed"
    if not q.is_cuda:
        return f"q is on {q.device}; expected a CUDA device"
    if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        return f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; expected one of 16 bits"
    if (width := max(q.shape[-1], v.shape[-1])) > WIDEST:
        return f"q or v has {width} features; expected at most {WIDEST}"
    return ""


@functools.cache
def is_installed() -> bool:
    """Return whether fla-core can be imported."""
    return importlib.util.find_spec("fla") is not None


def attend(writes: Any, q: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Return what `chunk_by_chunk` does: a result (..., N, Dv) in the dtype of q, or the state.

    `writes` are those of `delta.core`: keys and values have the dtype of q; strengths, decays and
    the state are in float32.
    """
    *leading, N, D = writes.k.shape if q is None else q.shape

    def tokens(x: Tensor) -> Tensor:  # (sequences, N, 1, ·), with nothing written after M tokens
        x = x[..., :N, :]
        x = extend(x, N - x.shape[-2]) if x.shape[-2] < N else x
        return x.reshape(-1, N, 1, x.shape[-1])

    k, v, beta = tokens(writes.k), tokens(writes.v), tokens(writes.beta[..., None])
    given: dict[str, Any] = {"k": k, "v": v, "beta": beta.squeeze(-1), "scale": scale or 1.0}
    given |= {"q": k if q is None else tokens(q), "output_final_state": q is None}
    given["initial_state"] = writes.state.mT.reshape(-1, 1, D, v.shape[-1]).contiguous()
    if writes.decay is not None:
        given["g"] = tokens(writes.decay[..., None]).squeeze(-1).clamp(min=FORGOTTEN)
    name = "delta_rule" if writes.decay is None else "gated_delta_rule"
    if not writes.erase:
        name, given["v"] = "simple_gla", (given.pop("beta")[..., None] * v).to(v.dtype)
    kernel = getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}")
    out, state = kernel(**given)
    result = state.mT.reshape(writes.state.shape) if q is None else out.reshape(*leading, N, -1)
    if result.requires_grad:
        result.register_hook(_refuse_second_derivative)
    return result


def _refuse_second_derivative(grad: Tensor) -> None:
    """Raise where gradients are to be differentiated: fla-core's would miss terms."""
    if torch.is_grad_enabled():
        expected = "expected fused=False with create_graph=True"
        raise RuntimeError(f"fla-core has first derivatives only; {expected}")
