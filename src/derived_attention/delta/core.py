"""The delta rule: a state that is corrected by each key and value, in turn (chapter 15).

The equation of this module, for a state S (Dv, D) that starts at 0, is ::

    S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ,    h_i = S_i q_i

β_t is the writing strength, α_t = e^decay_t forgets. Without the erasing factor it is gated linear
attention, Mamba-2's form. Keys and values of a chunk enter the state at once: with l_t the sum of
the decays of a chunk up to t, and R_tj = e^(l_t − l_j) for j ≤ t, the corrections u_t of a chunk
solve a triangular system, (I + tril(B (K Kᵀ ∘ R), −1)) u = B V − B e^l K Sᵀ, and
S ← e^(l_C) S + uᵀ (e^(l_C − l) K). The exponents l_t − l_j are sums of the decays from j + 1 to t:
a difference of the sums l would lose a weak decay that follows a strong one.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from derived_attention import formulas
from derived_attention.common.checks import (
    FLOATING,
    broadcasts,
    check_flags,
    check_keys,
    check_no_bias,
    check_numbers,
    check_parameter,
    wide,
)
from derived_attention.common.convention import (
    extend,
    full_precision,
    mechanism,
    prepare,
    reference,
)
from derived_attention.common.masks import Mask
from derived_attention.linear.core import in_chunks, segment_length, segments

CHUNK = 64  # keys that enter the state at once
UNWEIGHTED = "a key is written or not, and has no score to which a number could be added"


class Writes(NamedTuple):
    """What is written, in float32 at least: strengths and decays are 0 where a key is masked."""

    k: Tensor  # (..., M, D)
    v: Tensor  # (..., M, Dv)
    beta: Tensor  # (..., M)
    decay: Tensor | None  # (..., M), None where nothing is forgotten
    erase: bool
    state: Tensor  # (..., Dv, D), before the first of them


def delta_state(
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    *,
    beta: Tensor | None = None,
    decay: Tensor | None = None,
    erase: bool = True,
    state: Tensor | None = None,
) -> Tensor:
    """State S after keys (..., H, M, D) and values (..., H, M, Dv), in float32 at least.

    Arguments and errors are those of `delta_attention`. With it a sequence is decoded one token at
    a time, and the results are those of one call ::

        h = delta_attention(q_t, k_t, v_t, is_causal=True, state=S)
        S = delta_state(k_t, v_t, state=S)
    """
    check_keys(k, v)
    mask, _ = prepare(k[..., :1, :], k, v, attn_mask, False, None)  # a mask over keys, as for q
    with full_precision(k.device):
        return _last(prepare_writes(k, v, mask, beta, decay, erase, state))


@mechanism(per_key=True, state=delta_state)
def delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    beta: Tensor | None = None,
    decay: Tensor | None = None,
    erase: bool = True,
    state: Tensor | None = None,
) -> Tensor:
    """h_i = S_i q_i with S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ, chunk by chunk.

    Keys are written in their order. A causal query reads the state after its own key; without
    `is_causal` all keys are written before any query reads, and the order still matters. Time and
    memory are linear in N and M: about 2 [3 D Dv + C (2 D + Dv + (D + Dv) / 2)] operations a token
    with chunks of C = 64.

    Parameters
    ----------
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean,
        or floating with no numbers but 0 and -inf. A masked key is not written, and makes nothing
        else be forgotten.
    scale : float, optional
        Finite and positive; multiplies q. Left out, nothing is multiplied, so that S_t k_t = v_t at
        β_t = 1/‖k_t‖².
    beta : Tensor, optional
        β, broadcastable to ``(..., H, M)`` and finite. Left out: 1/‖k‖², so that each key is known
        exactly once it is written, and 0 for a key whose ‖k‖² is no normal number, such as a key
        of zeros; 1 where nothing is erased. Stable for 0 ≤ β‖k‖² ≤ 2; above it errors grow with
        every key that is written again.
    decay : Tensor, optional
        log α, broadcastable to ``(..., H, M)``, finite and at most 0. Left out: nothing is
        forgotten.
    erase : bool
        Whether what the state has under a key is erased before its value is written.
    state : Tensor, optional
        S before the first key, ``(..., H, Dv, D)``; zeros if left out. `delta_state` returns it.
    """
    writes = prepare_writes(k, v, mask, beta, decay, erase, state)
    with full_precision(q.device):
        queries = q.to(writes.k.dtype) if scale is None else scale * q.to(writes.k.dtype)
        if not mask.is_causal:
            return (queries @ _last(writes).mT).to(q.dtype)
        return _read(queries, writes).to(q.dtype)


def prepare_writes(
    k: Tensor,
    v: Tensor,
    mask: Mask,
    beta: Tensor | None,
    decay: Tensor | None,
    erase: bool,
    state: Tensor | None,
) -> Writes:
    """Check the options, fill in what is left out, and leave out what is masked."""
    check_flags(erase=erase)
    if mask.given is not None:
        check_no_bias("attn_mask", mask.given, UNWEIGHTED)
    dtype = wide(k)
    k, v = k.to(dtype), v.to(dtype)
    present = None if mask.given is None and mask.keys is None else mask.presence(k)
    if beta is not None:
        beta = _per_key("beta", beta, k, present, "finite")
    elif erase:
        size = k.square().sum(-1)
        known = size >= torch.finfo(size.dtype).tiny
        known = known if present is None else known & present
        beta = torch.where(known, 1 / size.where(known, 1), 0)
    else:
        beta = torch.ones_like(k[..., 0]) if present is None else present.to(k.dtype)
    if decay is not None:
        decay = _per_key("decay", decay, k, present, "finite and at most 0")
    shape = (*k.shape[:-2], v.shape[-1], k.shape[-1])
    if state is None:
        state = k.new_zeros(shape)
    else:
        check_parameter("state", state, k, (shape,), "a matrix Dv × D for each head")
        state = state.to(k.dtype, copy=True)  # autograd stores no tensor made in inference mode
    return Writes(k, v, beta, decay, erase, state)


def _per_key(name: str, x: Tensor, k: Tensor, present: Tensor | None, kind: str) -> Tensor:
    """Return a number for each key of k (..., M, D), checked, and 0 where a key is masked."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATING:
        kind = f"dtype {x.dtype}" if isinstance(x, Tensor) else f"type {type(x).__name__}"
        raise TypeError(f"{name} has {kind}; expected a floating Tensor")
    sizes, shape = tuple(x.shape), tuple(k.shape[:-1])
    if not broadcasts(sizes, shape):
        raise ValueError(
            f"{name} has shape {sizes}; expected one that broadcasts to {shape}, a number a key"
        )
    if x.device != k.device:
        raise ValueError(f"{name} is on device {x.device}; expected {k.device}, that of the keys")
    x = x.to(k.dtype).expand(shape)
    x = x if present is None else x.masked_fill(~present, 0)
    check_numbers(name, x, kind)
    return x


class Chunk(NamedTuple):
    """Matrices of one chunk of C keys; the corrections are u = U − W S, with S as (D, Dv)."""

    U: Tensor  # (..., C, Dv)
    W: Tensor | None  # (..., C, D); None where nothing is erased
    keys: Tensor  # (..., D, C), decayed to the end of the chunk
    fade: Tensor | None  # (..., 1, 1), what a chunk leaves of the state

    def corrections(self, S: Tensor) -> Tensor:
        """Return u (..., C, Dv) for the state S (..., D, Dv) before the chunk."""
        return self.U if self.W is None else self.U - self.W @ S

    def after(self, S: Tensor, u: Tensor) -> Tensor:
        """Return the state after the chunk."""
        return (S if self.fade is None else self.fade * S) + self.keys @ u


def _chunks(writes: Writes, n: int) -> tuple[list[Chunk], Tensor | None, Tensor | None]:
    """Return the chunks of n positions, and of their decays R (..., n / C, C, C) and e^l."""
    k, v, b = (
        in_chunks(writes.k, n, CHUNK),
        in_chunks(writes.v, n, CHUNK),
        in_chunks(writes.beta.unsqueeze(-1), n, CHUNK),
    )
    late, fade, R, since = k, None, None, None
    written = b * v, b * k
    if writes.decay is not None:
        decay = in_chunks(writes.decay.unsqueeze(-1), n, CHUNK)  # (..., n / C, C, 1)
        C = decay.shape[-2]
        sums = decay.mT.expand(*decay.shape[:-2], C, C).triu(1).cumsum(-1)  # l_t − l_j, at (j, t)
        R, since = sums.exp().triu().mT, decay.cumsum(-2).exp()
        late, fade = R[..., -1:, :].mT * k, since[..., -1:, :]
        written = b * v, b * since * k
    U, W = written[0], None
    if writes.erase:
        A = b * (k @ k.mT) if R is None else b * (k @ k.mT) * R
        both = torch.linalg.solve_triangular(
            A.tril(-1), torch.cat(written, -1), upper=False, unitriangular=True
        )
        U, W = both.split([v.shape[-1], k.shape[-1]], -1)
    parts = [U.unbind(-3), None if W is None else W.unbind(-3), late.mT.unbind(-3)]
    parts.append(None if fade is None else fade.unbind(-3))
    count = k.shape[-3]
    return (
        [
            Chunk(*(None if x is None else x[c] for x in parts))  # type: ignore[arg-type]
            for c in range(count)
        ],
        R,
        since,
    )


def _segments(writes: Writes, n: int) -> list[Writes]:
    """Cut n keys into segments whose temporaries stay in a CPU's cache; the state is the first's.

    Keys are cut to n, or filled up with keys that are not written.
    """
    k, v, b, g = writes.k, writes.v, writes.beta, writes.decay
    more = n - k.shape[-2]
    if more:
        k, v = extend(k, more), extend(v, more)
        b, g = extend(b, more, -1), None if g is None else extend(g, more, -1)
    size = segment_length(k)
    parts = zip(
        k.split(size, -2), v.split(size, -2), b.split(size, -1),
        itertools.repeat(None) if g is None else g.split(size, -1), strict=False,
    )  # fmt: skip
    return [Writes(*part, writes.erase, writes.state) for part in parts]


def _last(writes: Writes) -> Tensor:
    """Return the state (..., Dv, D) after all keys."""
    S = writes.state.mT
    for part in _segments(writes, writes.k.shape[-2]):
        for chunk in _chunks(part, part.k.shape[-2])[0]:
            S = chunk.after(S, chunk.corrections(S))
    return S.mT


def _read(q: Tensor, writes: Writes) -> Tensor:
    """Return what each query (..., N, D) reads of the state after its own key."""
    parts, S, outputs = _segments(writes, q.shape[-2]), writes.state.mT, []
    for q_s, part in zip(segments(q), parts, strict=True):
        n = q_s.shape[-2]
        chunks, R, since = _chunks(part, n)
        k, queries = in_chunks(part.k, n, CHUNK), in_chunks(q_s, n, CHUNK)
        inside = (queries @ k.mT).tril() if R is None else (queries @ k.mT) * R
        if since is not None:
            queries = since * queries
        read = []
        for q_c, P_c, chunk in zip(queries.unbind(-3), inside.unbind(-3), chunks, strict=True):
            u = chunk.corrections(S)
            read.append(q_c @ S + P_c @ u)
            S = chunk.after(S, u)
        outputs.append(torch.stack(read, -3).flatten(-3, -2)[..., :n, :])
    return torch.cat(outputs, -2)


# --- the formulas, with the same arguments ---


@reference(delta_attention, formulas.delta, per_key=True)
def delta_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, beta: Any = None,
    decay: Any = None, erase: Any = True, state: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Check strengths, decays and the state, and fill in what is left out."""
    writes = prepare_writes(k, v, mask, beta, decay, erase, state)
    decay = torch.zeros_like(writes.beta) if writes.decay is None else writes.decay
    return {"beta": writes.beta, "decay": decay, "erase": erase, "state": writes.state}
