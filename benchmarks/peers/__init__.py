"""What people would use instead: a file for each library, and in it `PEERS`.

Each peer stands beside one of our cases and is timed with it and with SDPA in the same rounds.
Where it computes the same, a test holds both equal; where not, `differs` says why. A library that
is not installed is left out.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from benchmarks.cases import DIM, Case
from derived_attention.common.checks import Mechanism

LIBRARIES = sorted(found.name for found in pkgutil.iter_modules(__path__))
INSTALL = "pip install 'derived-attention[peers]'"


@dataclass(frozen=True)
class Peer:
    """What a library computes where a case of ours would be used."""

    package: str  # as the package index has it
    label: str  # what tables call it
    form: Mechanism  # of q, k, v (B, H, N, D) and the options of ours
    ours: Case  # beside what it stands: ours, and that case's baseline
    differs: str = ""  # in what it is not ours; nothing, where it is
    options: Callable[..., dict[str, Any]] | None = None  # where they are not those of ours
    tokens_first: bool = False  # it keeps (B, N, H, D) in memory, so it gets that
    longest: int | None = None  # N at which it still fits into memory, on a CPU

    def options_at(self, length: int, dim: int = DIM) -> dict[str, Any]:
        """Return what `form` takes beside q, k and v."""
        return (self.options or self.ours.options)(length, dim)


class Given(nn.Module):
    """Stands for a projection of a layer: it gives what it was made of, whatever comes in."""

    def __init__(self, *parts: Tensor) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Any:
        """Return the only part, or what can be cut into all."""
        return self.parts[0] if len(self.parts) == 1 else self

    def chunk(self, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        """Return the parts, as if they had been cut from one tensor."""
        return self.parts


def join_heads(x: Tensor) -> Tensor:
    """(B, H, N, D) to (B, N, H D), as layers have it; no copy where tokens come first."""
    return x.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, N, H D) to (B, H, N, D)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def load(libraries: Iterable[str] = LIBRARIES) -> tuple[dict[str, Peer], list[str]]:
    """Return the peers of libraries that are installed, and a line on each that is not."""
    peers: dict[str, Peer] = {}
    missing = []
    for name in libraries:
        try:
            peers |= importlib.import_module(f"{__name__}.{name}").PEERS
        except ImportError as error:
            missing.append(f"{name} is left out ({error}): {INSTALL}")
    return peers, missing
