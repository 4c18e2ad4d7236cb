"""Derived Attention: attention mechanisms derived from five fields, made fast and tested.

Every mechanism and layer can be imported from here by its name, and its module is loaded when the
name is first used: ``from derived_attention import mixture_attention, MixtureAttention``.
`list_attentions` names the mechanisms, and `get_attention` returns one by its name. The tools of
the book are in `derived_book`.
"""

import importlib
from collections.abc import Mapping
from typing import Any

__version__ = "1.0.0"


def places() -> Mapping[str, str]:
    """Return the module of each public name. This imports PyTorch."""
    public: Mapping[str, str] = importlib.import_module(f"{__name__}.registry").PUBLIC
    return public


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(places())
    if name.startswith("_"):  # no public name, and the registry takes a second to import
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = places().get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *places()])
