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
# The public names that belong to no mechanism. `registry` lists those that do.
_PLACES = {
    "MECHANISMS": "registry",
    "admm": "sparse_coding.admm",
    "check_mechanism": "testing.contract",
    "get_attention": "registry",
    "list_attentions": "registry",
    "printed_admm": "sparse_coding.admm",
}


def places() -> Mapping[str, str]:
    """Return the module of each public name. This imports PyTorch."""
    registry = importlib.import_module(f"{__name__}.registry")
    return {name: f"{__name__}.{module}" for name, module in _PLACES.items()} | registry.PUBLIC


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(places())
    if name.startswith("_"):  # no public name, and the registry takes a second to import
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.{_PLACES[name]}" if name in _PLACES else places().get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *places()])
