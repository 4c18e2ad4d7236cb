"""What decides the result of a function: its source, what it reads, and the code it reaches."""

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

from derived_attention.runtime import current_profile, digest
from derived_attention.training import own_modules
from derived_attention.training.sources import Sources

# The package's source as it was when this module was imported: as near as can be to what runs.
PACKAGE = Sources(Path(__file__).parents[1])


def full_name(function: Callable[..., Any]) -> str:
    """Return module and name of a function."""
    return f"{function.__module__}.{function.__qualname__}"


def identity(function: Callable[..., Any]) -> list[Any]:
    """Return everything but the config that decides what ``function(**config)`` returns."""
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"function is {function!r}; expected a function defined by def")
    trace = _Trace(function.__module__)
    source = trace.of(function, function.__name__)
    dtype = torch.get_default_dtype()
    other: list[Any] = [] if dtype == torch.float32 else [str(dtype)]
    own = own_modules.closure(trace.named)
    for name, file in sorted(own.items()):
        trace.reached |= PACKAGE.imported(file.text)
        other.append([name, file.digest, _shown(own_modules.changed(name, file))])
    return [source, PACKAGE.digest(trace.reached), torch.__version__, current_profile(), *other]


def _shown(found: dict[str, Any]) -> dict[str, Any]:
    """Return values as something `digest` takes: of those that it does not, the type."""
    shown = {}
    for name, value in found.items():
        try:
            shown[name] = digest(value)
        except TypeError:
            shown[name] = type(value).__qualname__
    return shown


class _Trace:
    """Turns a function into what `digest` takes: sources and values of what it reads from its page.

    A function or class of another module counts by its name. For one of this package, `reached`
    gets its module, whose code is part of the key; for PyTorch's, the version is. Among `named`,
    which are all modules that were met, are those of the reader's own.
    """

    def __init__(self, page: str) -> None:
        self.page = page
        self.seen: set[int] = set()
        self.reached: set[str] = set()
        self.named: set[str] = set()

    def of(self, value: Any, name: str) -> Any:
        """Return `value`, which the function knows as `name`, as something `digest` takes."""
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
                "compared between sessions; make it inside the function, or pass what it is made "
                "from"
            ) from error

    def _definition(self, value: Any) -> Any:
        """Return a function or class: the source of those of this page, of others the name."""
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
        """Note what is defined in another module; return its code if its file says other code."""
        if value.__module__ == self.page:
            return []
        self.named.add(full_name)
        found = own_modules.changed_code(value) if own_modules.is_own(value.__module__) else {}
        return [found] if found else []

    def _follow(self, function: Any, parts: dict[str, Any]) -> None:
        """Note the modules that a function of this page imports in its body, or names by a dot."""
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
            f"function {full_name(function)} has no source that can be read; "
            "define it in a file or a notebook cell"
        ) from error
    code, known = function.__code__, function.__globals__
    closure = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return {
        "<source>": source,
        "<defaults>": [function.__defaults__, function.__kwdefaults__],
        **({"<code>": changed} if (changed := own_modules.changed_code(function)) else {}),
        **{name: known[name] for name in _globals_read(code) if name in known},
        **{name: cell.cell_contents for name, cell in closure},
    }


def _globals_read(code: types.CodeType) -> list[str]:
    reads = ("LOAD_GLOBAL", "LOAD_NAME")
    parts = [code, *own_modules.codes(code)]
    return sorted({i.argval for c in parts for i in dis.get_instructions(c) if i.opname in reads})


def _names(code: types.CodeType) -> set[str]:
    """Return all names in code, also those behind a dot."""
    return {name for part in [code, *own_modules.codes(code)] for name in part.co_names}


def _class_parts(cls: type) -> dict[str, Any]:
    """Return bases and members: `inspect.getsource` does not find a class of a notebook."""
    parts: dict[str, Any] = {"<bases>": cls.__bases__}
    for name, member in vars(cls).items():
        member = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if isinstance(member, types.FunctionType):
            if member.__code__.co_filename != "<string>":  # where a dataclass writes its methods
                parts[name] = member
        elif not name.startswith("__"):
            parts[name] = member
    return parts
