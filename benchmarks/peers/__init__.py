"""Forms of other libraries that could be used instead of ours: one module per library.

Each peer in ``PEERS`` is compared with one of our cases, and timed in the same rounds as this case
and SDPA. If both compute the same function, a test checks that they agree; otherwise `differs`
states the difference. A library that is not installed is left out.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from benchmarks.cases import Case
from derived_attention.common.checks import Mechanism

LIBRARIES = sorted(found.name for found in pkgutil.iter_modules(__path__))
INSTALL = "pip install 'derived-attention[peers]'"


@dataclass(frozen=True)
class Peer:
    """A form of another library that could be used instead of one of our cases."""

    package: str  # its name in the package index
    label: str  # its name in tables
    form: Mechanism  # a function of q, k, v (B, H, N, D) and the options
    ours: Case  # the case with which it is compared; its baseline is timed as well
    differs: str = ""  # how its function differs from ours; empty if it does not
    options: Callable[..., dict[str, Any]] | None = None  # if they are not ours
    tokens_first: bool = False  # whether it gets tensors that are (B, N, H, D) in memory
    longest: int | None = None  # largest N at which it fits into the memory of a CPU


class Given(nn.Module):
    """A replacement for a layer's projection that returns its own parts, whatever its input is."""

    def __init__(self, *parts: Tensor) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Any:
        """Return the only part, or an object that `chunk` splits into all parts."""
        return self.parts[0] if len(self.parts) == 1 else self

    def chunk(self, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        """Return the parts, as if they had been cut from one tensor."""
        return self.parts


def join_heads(x: Tensor) -> Tensor:
    """Return x (B, H, N, D) as (B, N, H·D), without a copy if its tokens come first in memory."""
    return x.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return x (B, N, H·D) as (B, H, N, D)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def load(libraries: Iterable[str] = LIBRARIES) -> tuple[dict[str, Peer], list[str]]:
    """Return the peers of the installed libraries, and a line on each missing library."""
    peers: dict[str, Peer] = {}
    missing = []
    for name in libraries:
        try:
            peers |= importlib.import_module(f"{__name__}.{name}").PEERS
        except ImportError as error:
            missing.append(f"{name} is left out ({error}); install it with: {INSTALL}")
    return peers, missing
