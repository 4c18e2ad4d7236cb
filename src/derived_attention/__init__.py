"""Derived Attention: attention mechanisms derived from five fields, made fast and tested.

Every mechanism and layer can be imported from here by its name, and is loaded when it is asked for:
``from derived_attention import mixture_attention, MixtureAttention``. `list_attentions` names the
mechanisms, and `get_attention` returns one by its name.
"""

import importlib
from typing import Any

__version__ = "0.1.0"
_REGISTRY = "derived_attention.attention.mechanisms"


def __getattr__(name: str) -> Any:
    if name.startswith("_"):  # not a name of ours, and the registry takes a second to import
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    registry = importlib.import_module(_REGISTRY)
    if name in ("list_attentions", "get_attention"):
        return getattr(registry, name)
    if name not in registry.PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(registry.PUBLIC[name]), name)


def __dir__() -> list[str]:
    names = importlib.import_module(_REGISTRY).PUBLIC
    return sorted([*globals(), *names, "get_attention", "list_attentions"])
