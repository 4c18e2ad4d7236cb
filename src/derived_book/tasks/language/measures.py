"""How well a language model predicts documents: bits per byte, also of what a text repeats.

Bits are counted in windows that overlap by half, and only in the second half of each. So every
counted byte has at least half a window of context, and all models have the same. A byte is
*repeated* if the n-gram before it occurs earlier in its window. It is *recalled* if, moreover, this
n-gram is nowhere in the training text, so that no weights have stored what follows it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from derived_book.runtime import evaluating

N_GRAM = 8  # bytes: as long as a rare word, and one integer of 64 bits
KINDS = ("all", "repeated", "recalled")  # of bytes; neither depends on the byte itself


def cut_windows(text: Tensor, length: int) -> Tensor:
    """Return the windows (m, length + 1) of a text (n,), each half a length after the last one."""
    if len(text) <= length:
        return text.new_empty(0, length + 1)
    return text.unfold(0, length + 1, length // 2)


def n_grams(text: np.ndarray) -> np.ndarray:
    """Return the n-grams of bytes (..., T), n = 8, as uint64 (..., T - n + 1)."""
    last = text.shape[-1] - N_GRAM + 1
    shifted = [text[..., i : last + i].astype(np.uint64) << np.uint64(8 * i) for i in range(N_GRAM)]
    return np.bitwise_or.reduce(shifted)


def find_repeats(windows: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which bytes of windows (m, T) are repeated, and which are recalled: two (m, T) bool.

    Parameters
    ----------
    windows : ndarray
        (m, T) uint8.
    known : ndarray
        The n-grams of the training text, sorted, each once: ``np.unique(n_grams(text))``.
    """
    grams, n = n_grams(windows[:, :-1]), N_GRAM  # of what precedes a byte
    order = grams.argsort(1, kind="stable")
    ordered = np.take_along_axis(grams, order, 1)
    repeated = np.zeros(windows.shape, bool)
    np.put_along_axis(repeated[:, n:], order[:, 1:], ordered[:, 1:] == ordered[:, :-1], 1)
    place = np.searchsorted(known, grams).clip(max=len(known) - 1)
    recalled = repeated.copy()
    recalled[:, n:] &= known[place] != grams
    return repeated, recalled


def document_bits(
    model: nn.Module,
    documents: dict[str, Tensor],
    known: np.ndarray,
    length: int,
    batch_size: int = 32,
) -> np.ndarray:
    """Return the sum of bits of each document under a model, and its counted bytes: (n, 3, 2).

    The three rows of a document are for all bytes, repeated ones and recalled ones. The losses are
    added in float64.

    Parameters
    ----------
    model : nn.Module
        ``model(x)`` returns logits (B, T, 256) of the byte after each of x (B, T) int64.
    documents : dict of str to Tensor
        Each (n,) uint8; one that is no longer than `length` counts 0 bytes.
    known : ndarray
        As in `find_repeats`.
    length : int
        T, the bytes that the model reads in a window; the last T // 2 are counted.
    batch_size : int
    """
    windows = [cut_windows(text, length) for text in documents.values()]
    rows, half = torch.cat(windows), length // 2
    device, bits = next(model.parameters()).device, []
    with evaluating(model):
        for x in rows.split(batch_size):
            x = x.long().to(device)
            logits, y = model(x[:, :-1])[:, -half:].float(), x[:, -half:]
            nats = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
            bits.append(nats.view_as(y).double().cpu() / math.log(2))
    each = torch.cat(bits).numpy()
    found = find_repeats(rows.numpy(), known)
    kinds = np.stack([np.ones_like(found[0]), *found])[..., -half:]  # (3, windows, T // 2)
    sums = np.stack([(each * kinds).sum(-1), kinds.sum(-1)], -1).swapaxes(0, 1)  # (windows, 3, 2)
    ends = np.cumsum([len(x) for x in windows])[:-1]
    return np.stack([part.sum(0) for part in np.split(sums, ends)])
