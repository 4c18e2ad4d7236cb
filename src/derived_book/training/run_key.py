"""The identity of a function, for the keys of stored results.

It consists of the function's source, the values that it reads, and the code that it reaches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import inspect
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from derived_book.runtime import current_profile, digest
from derived_book.training import own_modules
from derived_book.training.code_digest import Sources

# The package's source when this module was imported, which is closest to the code that runs.
PACKAGE = Sources(Path(__file__).parents[2])


def full_name(function: Callable[..., Any]) -> str:
    """Return module and name of a function."""
    return f"{function.__module__}.{function.__qualname__}"


def identity(function: Callable[..., Any]) -> list[Any]:
    """Return everything except the config that determines what ``function(**config)`` returns."""
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"function is {function!r}; expected a function defined by def")
    trace = _Trace(function.__module__)
    source = trace.of(function, function.__name__)
    dtype = torch.get_default_dtype()
    other: list[Any] = [] if dtype == torch.float32 else [str(dtype)]
    for name, file in sorted(own_modules.closure(trace.named).items()):
        trace.reached |= PACKAGE.imported(file.text)
        other.append([name, file.digest, _digests(own_modules.changed(name, file))])
    return [source, PACKAGE.digest(trace.reached), torch.__version__, current_profile(), *other]


def _digests(values: dict[str, Any]) -> dict[str, str]:
    """Return the digest of each value, or the name of its type if `digest` does not accept it."""
    digests = {}
    for name, value in values.items():
        try:
            digests[name] = digest(value)
        except TypeError:
            digests[name] = type(value).__qualname__
    return digests


class _Trace:
    """Converts a function to values that `digest` accepts: its source and what it reads.

    A function or class that the page does not define is represented by its name. If it belongs to
    this package, its module is added to `reached`, whose code is part of the key; if it belongs to
    PyTorch, the version covers it. `named` collects all names of modules, also of the user's.
    """

    def __init__(self, page: str) -> None:
        self.page = page
        self.seen: set[int] = set()
        self.reached: set[str] = set()
        self.named: set[str] = set()

    def of(self, value: Any, name: str) -> Any:
        """Return a representation of `value`, which the function reads as `name`."""
        value = inspect.unwrap(value) if callable(value) else value
        if isinstance(value, types.ModuleType):
            self.reached |= PACKAGE.modules(value.__name__)
            self.named.add(value.__name__)
            return ["module", value.__name__]
        if isinstance(value, functools.partial):
            return ["partial", self.of([value.func, value.args, value.keywords], name)]
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            return self._definition(value)
        if isinstance(value, dict):
            return {key: self.of(item, name) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(item, name) for item in value]
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return [self._definition(type(value)), self.of(fields, name)]
        try:
            return digest(value)
        except TypeError as error:
            raise TypeError(
                f"the function reads {name}, a {type(value).__qualname__}, which cannot be "
                "compared between sessions; create it inside the function, or pass the arguments "
                "that create it"
            ) from error

    def _definition(self, value: Any) -> Any:
        """Represent a function or class of this page by its parts, any other by its name."""
        full_name = f"{value.__module__}.{value.__qualname__}"
        if value.__module__ != self.page or id(value) in self.seen:
            self.reached |= PACKAGE.modules(full_name)
            return ["named", full_name, *self._elsewhere(value, full_name)]
        self.seen.add(id(value))
        if isinstance(value, type):
            parts = _class_parts(value)
        else:
            parts = _function_parts(value)
            self._follow(value, parts)
        return [full_name, {part: self.of(parts[part], part) for part in parts}]

    def _elsewhere(self, value: Any, full_name: str) -> list[Any]:
        """Record the name of another module's object; return its code if the file differs."""
        if value.__module__ == self.page:
            return []
        self.named.add(full_name)
        changes = own_modules.changed_code(value) if own_modules.is_own(value.__module__) else {}
        return [changes] if changes else []

    def _follow(self, function: Any, parts: dict[str, Any]) -> None:
        """Record the modules that a function imports in its body, or reaches as attributes."""
        with contextlib.suppress(SyntaxError):  # a lambda in a statement, which imports nothing
            source = textwrap.dedent(parts["<source>"])
            self.reached |= PACKAGE.imported(source)
            self.named |= own_modules.imported(source, function.__globals__.get("__package__"))
        for part in parts.values():
            if isinstance(part, types.ModuleType):
                self.named.update(own_modules.submodules(part, _names(function.__code__)))


def _function_parts(function: Any) -> dict[str, Any]:
    """Return source, defaults and closure of a function, and the globals that it reads."""
    try:
        source = inspect.getsource(function)
    except OSError as error:
        raise TypeError(
            f"the source of function {full_name(function)} cannot be read; "
            "define it in a file or a notebook cell"
        ) from error
    code, module = function.__code__, function.__globals__
    closure = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return {
        "<source>": source,
        "<defaults>": [function.__defaults__, function.__kwdefaults__],
        **({"<code>": changed} if (changed := own_modules.changed_code(function)) else {}),
        **{name: module[name] for name in _globals_read(code) if name in module},
        **{name: cell.cell_contents for name, cell in closure},
    }


def _globals_read(code: types.CodeType) -> list[str]:
    reads = ("LOAD_GLOBAL", "LOAD_NAME")
    parts = [code, *own_modules.codes(code)]
    return sorted({i.argval for c in parts for i in dis.get_instructions(c) if i.opname in reads})


def _names(code: types.CodeType) -> set[str]:
    """Return all names in code, including attributes."""
    return {name for part in [code, *own_modules.codes(code)] for name in part.co_names}


def _class_parts(cls: type) -> dict[str, Any]:
    """Return bases and members, as `inspect.getsource` does not find a class of a notebook."""
    parts: dict[str, Any] = {"<bases>": cls.__bases__}
    for name, member in vars(cls).items():
        member = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if isinstance(member, types.FunctionType):
            if member.__code__.co_filename != "<string>":  # where a dataclass writes its methods
                parts[name] = member
        elif not name.startswith("__"):
            parts[name] = member
    return parts
