"""Sizes of tiles: those that are shipped, or those that were fastest on this GPU.

``python -m benchmarks.gpu.verify`` tries others beside the shipped ones, and leaves
the fastest in a file of the user's cache folder, for this GPU, these compilers and these kernels.
A kernel asks for its sizes by a label, which says what its compiler knows.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator

import torch

Sizes = dict[str, int]
LIMITS = {"num_warps": (2, 16), "num_stages": (1, 4), "C": (16, 64)}  # of blocks: 16 and 128
_forced: dict[str, Sizes] = {}
_seen: dict[str, Sizes] = {}


def tuned(device: torch.device, label: str, sizes: Sizes) -> Sizes:
    """Return the sizes that a label is to have on a device; `sizes` are the shipped ones."""
    _seen[label] = sizes
    if label in _forced:
        return _forced[label]
    return found(device).get(label, sizes) if device.type == "cuda" else sizes


@functools.cache
def found(device: torch.device) -> dict[str, Sizes]:
    """Return the fastest sizes of each label, as `verify` left them."""
    from derived_attention.common.kernel_selftest import file_of

    file = file_of("verified", device)
    try:
        tiles = json.loads(file.read_text("utf8"))["tiles"] if file else {}
        return {label: x["best"] for label, x in tiles.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


@contextlib.contextmanager
def forced(tiles: dict[str, Sizes]) -> Iterator[None]:
    """Give labels these sizes, and all others the shipped ones."""
    before = dict(_forced)
    _forced.clear()
    _forced.update(tiles)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


@contextlib.contextmanager
def labels() -> Iterator[dict[str, Sizes]]:
    """Collect the labels of what is launched, and their shipped sizes."""
    _seen.clear()
    collected: dict[str, Sizes] = {}
    try:
        yield collected
    finally:
        collected.update(_seen)


def candidates(sizes: Sizes) -> Iterator[Sizes]:
    """Yield the shipped sizes, and those in which one of them is doubled, halved, or one off.

    What does not fit into a GPU's shared memory is refused when it is launched, or compiled.
    """
    yield sizes
    for name, x in sizes.items():
        least, most = LIMITS.get(name, (16, 128))
        others = (x - 1, x + 1) if name == "num_stages" else (x // 2, 2 * x)
        yield from (sizes | {name: y} for y in others if least <= y <= most)
