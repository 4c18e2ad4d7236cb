"""FlexAttention, PyTorch's own: a kernel compiled for a function of two positions.

On a GPU it has gradients. On a CPU its compiled kernel runs forward only, and raises an error where
an input requires a gradient; a peer is timed forward and with the backward pass, so that no row of
a CPU has it. The functions below run there all the same, and a test holds them against ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.cases import CASES
from benchmarks.peers import Peer

CUDA = torch.cuda.is_available()
attention = torch.compile(flex_attention)

Pair = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of sequence, head, query and key


@functools.cache
def blocks(pattern: str, sizes: tuple[int, ...], is_causal: bool, N: int, device: str) -> BlockMask:
    """Return the blocks of a pattern; who trains makes them once, and times do not count it."""

    def attends(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if pattern == "window":
            keep = (i - j).abs() <= sizes[0]
        elif pattern == "strided":
            keep = ((i - j).abs() < sizes[0]) | ((i - j) % sizes[0] == 0)
        else:
            stride, summary = sizes
            keep = (i // stride == j // stride) | (j % stride >= stride - summary)
        return keep & (j <= i) if is_causal else keep

    return create_block_mask(attends, None, None, N, N, device=device)


def attend(
    pattern: str, q: Tensor, k: Tensor, v: Tensor, *sizes: int, is_causal: bool = False
) -> Tensor:
    """Attend the keys of a pattern, as many as queries."""
    table = blocks(pattern, sizes, is_causal, q.shape[-2], str(q.device))
    return attention(q, k, v, block_mask=table)  # type: ignore[return-value]


def window(q: Tensor, k: Tensor, v: Tensor, *, window: int, is_causal: bool = False) -> Tensor:
    """Attend the keys at a distance of `window` at most."""
    return attend("window", q, k, v, window, is_causal=is_causal)


def strided(q: Tensor, k: Tensor, v: Tensor, *, stride: int, is_causal: bool = False) -> Tensor:
    """Attend the neighbours, and every `stride`-th key."""
    return attend("strided", q, k, v, stride, is_causal=is_causal)


def fixed(
    q: Tensor, k: Tensor, v: Tensor, *, stride: int, summary: int = 1, is_causal: bool = False
) -> Tensor:
    """Attend the query's block, and the last keys of every block."""
    return attend("fixed", q, k, v, stride, summary, is_causal=is_causal)


FORMS = {"window": window, "strided": strided, "fixed": fixed}
EVERYWHERE = {
    f"flex_attention_{name}{end}": Peer(
        "torch", f"FlexAttention, {name}{', causal' if end else ''}", form, CASES[name + end]
    )
    for name, form in FORMS.items()
    for end in ("", "_causal")
}
PEERS = EVERYWHERE if CUDA else {}
