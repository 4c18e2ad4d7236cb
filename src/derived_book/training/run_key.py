"""The key of a stored run: what determines the results of a function.

It consists of the function's source, the values that it reads, the code of this package that it
reaches, and that of all loaded modules of the user's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import enum
import functools
import importlib
import inspect
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from derived_book.runtime import current_profile, digest
from derived_book.training.code_digest import ROOTS, Sources, imports

# The package's source when this module was imported, which is closest to the code that runs.
PACKAGE = Sources(Path(__file__).parents[2])
LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages, on any system
# Modules of the descriptors that Python adds to a class.
WRITTEN = {"builtins", "collections", "_collections", "enum"}


def full_name(function: Callable[..., Any]) -> str:
    """Return module and name of a function."""
    return f"{function.__module__}.{function.__qualname__}"


def run_key(function: Callable[..., Any]) -> list[Any]:
    """Return everything except the config that determines what ``function(**config)`` returns."""
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"function is {function!r}; expected a function defined by def")
    trace = _Trace(function.__module__)
    source = trace.of(function, function.__name__)
    own = {module.__name__: module for module in own_modules()}
    for module in own.values():
        try:
            trace.reached |= PACKAGE.find_imports(inspect.getsource(module))
        except OSError:  # an empty file
            pass
        except SyntaxError as error:  # a file that is being edited
            error.filename = module.__file__
            raise
    modules = digest({name: _state(module) for name, module in own.items()})
    dtype = str(torch.get_default_dtype())
    code_of_package = PACKAGE.digest(trace.reached)
    return [source, code_of_package, modules, torch.__version__, current_profile(), dtype]


def own_modules() -> list[types.ModuleType]:
    """Return each loaded module of the user's: neither installed nor of this package.

    They are beside a page, in a checkout, or installed with ``pip install --editable``.
    """
    own = []
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        ours = name.partition(".")[0] in (*ROOTS, "__main__", "__mp_main__")
        if path.endswith(".py") and not ours and not _is_installed(path, LIBRARIES):
            if Path(path).is_file():
                own.append(module)
    return own


@functools.cache  # there are thousands of modules, and each call of `run_grid` looks at all
def _is_installed(file: str, libraries: tuple[Path, ...]) -> bool:
    """Return whether a file lies in a folder of installed packages."""
    path = Path(file)
    return bool(INSTALLED & set(path.parts)) or any(map(path.is_relative_to, libraries))


def _state(module: types.ModuleType) -> dict[str, Any]:
    """Return the code of what a module defines, as it is in memory, and the digests of its values.

    Names in upper case are constants. Of the others numbers and texts count, but containers do not,
    because they may be caches. What a function assigns does not count. The file may have been
    edited since it was imported.
    """
    own = {name: inspect.unwrap(x) if callable(x) else x for name, x in vars(module).items()}
    classes = {name: _members(x) for name, x in own.items() if _is_class_of(module, x)}
    functions = [*own.values(), *(x for members in classes.values() for x in members.values())]
    assigned = {name for x in functions for name in _assigned(x)}
    state: dict[str, Any] = {}
    for name, value in own.items():
        constant = name.isupper() or (_is_plain(value) and not name.startswith("__"))
        if name in classes:
            state[name] = {key: _content(x) for key, x in classes[name].items()}
        elif isinstance(value, types.FunctionType) or (constant and name not in assigned):
            state[name] = _content(value)
    return state


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, None, or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | complex | str | bytes)


def _is_class_of(module: types.ModuleType, value: Any) -> bool:
    return isinstance(value, type) and value.__module__ == module.__name__


def _assigned(function: Any) -> set[str]:
    """Return the globals that a function assigns; none for anything else."""
    codes = [function.__code__] if isinstance(function, types.FunctionType) else []
    codes += [inner for code in codes for inner in _nested(code)]
    codes = [code for code in codes if dis.opmap["STORE_GLOBAL"] in code.co_code[::2]]
    return {i.argval for c in codes for i in dis.get_instructions(c) if i.opname == "STORE_GLOBAL"}


def _members(cls: type) -> dict[str, Any]:
    """Return methods of a class, and those of its attributes that are numbers or texts."""
    members = {key: getattr(x, "__func__", x) for key, x in vars(cls).items()}
    properties = {key: x for key, x in members.items() if isinstance(x, property)}
    members |= {f"{key}.setter": x.fset for key, x in properties.items() if x.fset}
    members |= {key: x.fget for key, x in properties.items()}
    return {
        key: x
        for key, x in members.items()
        if isinstance(x, types.FunctionType) or (_is_plain(x) and not key.startswith("__"))
    }


def _content(value: Any) -> Any:
    """Return code and defaults of a function, or the digest of a value, None if it has none."""
    if isinstance(value, types.FunctionType):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
        return [_code(value.__code__), [_content(x) for x in defaults if _is_plain(x)]]
    try:
        return digest(value)
    except TypeError:
        return None


def _code(code: types.CodeType) -> Any:
    """Return what a function computes, which does not depend on its position in a file."""
    constants = [_constant(x) for x in code.co_consts]
    return [code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars]


def _constant(value: Any) -> Any:
    """Represent a constant of a function in the same way in every process."""
    if isinstance(value, types.CodeType):
        return _code(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


class _Trace:
    """Converts a function to values that `digest` accepts: its source and what it reads.

    A function or class that the page does not define is represented by its name. If it belongs to
    this package, its module is added to `reached`, whose code is part of the key; if it belongs to
    PyTorch, the version covers it.
    """

    def __init__(self, page: str) -> None:
        self.page = page
        self.seen: set[int] = set()
        self.reached: set[str] = set()

    def of(self, value: Any, name: str) -> Any:
        """Return a representation of `value`, which the function reads as `name`."""
        value = inspect.unwrap(value, stop=self._is_own) if callable(value) else value
        if isinstance(value, types.ModuleType):
            self.reached |= PACKAGE.modules(value.__name__)
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
        if isinstance(value, enum.Enum):
            return [self._definition(type(value)), value.name]
        try:
            return digest(value)
        except TypeError as error:
            raise TypeError(
                f"the function reads {name}, a {type(value).__qualname__}, which cannot be "
                "compared between sessions; create it inside the function, or pass the arguments "
                "that create it"
            ) from error

    def _is_own(self, value: Any) -> bool:
        """Return whether a function is of this page, also one that a decorator of it returns."""
        return isinstance(value, types.FunctionType) and value.__globals__["__name__"] == self.page

    def _definition(self, value: Any) -> Any:
        """Represent a function or class of this page by its parts, any other by its name."""
        full_name = f"{value.__module__}.{value.__qualname__}"
        if value.__module__ != self.page or id(value) in self.seen:
            self.reached |= PACKAGE.modules(full_name)
            return ["named", full_name]
        self.seen.add(id(value))
        if isinstance(value, type):
            parts = _class_parts(value)
        else:
            parts = _function_parts(value)
            self._follow(value, parts)
        return [full_name, {part: self.of(parts[part], part) for part in parts}]

    def _follow(self, function: Any, parts: dict[str, Any]) -> None:
        """Record the modules that a function imports in its body, and load those of the user's."""
        with contextlib.suppress(SyntaxError):  # a lambda in a statement, which imports nothing
            source = textwrap.dedent(parts["<source>"])
            self.reached |= PACKAGE.find_imports(source)
            for _, name in imports(source):
                with contextlib.suppress(ImportError):
                    importlib.import_module(name.rpartition(".")[0] or name)


def _function_parts(function: Any) -> dict[str, Any]:
    """Return source, defaults and closure of a function, and the globals that it reads."""
    code, module = function.__code__, function.__globals__
    try:
        source = inspect.getsource(code)  # not of what the function wraps
    except OSError as error:
        raise TypeError(
            f"the source of function {full_name(function)} cannot be read; "
            "define it in a file or a notebook cell"
        ) from error
    closure = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return {
        "<source>": source,
        # The source of a lambda is that of its whole line, which may have others.
        "<code>": _code(code) if code.co_name == "<lambda>" else None,
        "<defaults>": [function.__defaults__, function.__kwdefaults__],
        **{name: module[name] for name in _globals_read(code) if name in module},
        **{name: cell.cell_contents for name, cell in closure},
    }


def _globals_read(code: types.CodeType) -> list[str]:
    reads = ("LOAD_GLOBAL", "LOAD_NAME")
    parts = [code, *_nested(code)]
    return sorted({i.argval for c in parts for i in dis.get_instructions(c) if i.opname in reads})


def _nested(outer: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code objects that are nested in another, at any depth."""
    for constant in outer.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _nested(constant)


def _class_parts(cls: type) -> dict[str, Any]:
    """Return bases and members, as `inspect.getsource` does not find a class of a notebook."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    given = ([f.name, f.default, f.default_factory] for f in fields)
    missing = dataclasses.MISSING
    parts: dict[str, Any] = {"<bases>": cls.__bases__}
    parts["<fields>"] = [[x for x in field if x is not missing] for field in given]
    for name, member in vars(cls).items():
        member = getattr(member, "__func__", member)
        if isinstance(member, property):
            member = [member.fget, member.fset, member.fdel]
        elif isinstance(member, functools.cached_property):
            member = member.func
        if isinstance(member, types.FunctionType):
            # where dataclasses and named tuples write their methods
            if inspect.unwrap(member).__code__.co_filename != "<string>":
                parts[name] = member
        elif not (name.startswith("__") or name == "_abc_impl" or _is_written(member)):
            parts[name] = member
    return parts


def _is_written(member: Any) -> bool:
    """Return whether Python has added a member to a class: for a slot, or a field of a tuple."""
    return inspect.isdatadescriptor(member) and type(member).__module__ in WRITTEN
