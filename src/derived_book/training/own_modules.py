"""The user's modules: those that are neither installed nor part of this package.

They are beside a page, in a checkout, or installed with ``pip install --editable``. Keys of stored
results (`derived_book.training.grids`) include the code of those that a function reaches
through imports, and any difference between the files and the modules loaded in this process.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import inspect
import pkgutil
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from derived_book.training.code_digest import ROOTS, code, imports

LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages, on any system


@dataclass(frozen=True)
class File:
    """The content of a Python file; of a compiled module only its digest."""

    path: str
    digest: str
    text: str = ""
    constants: dict[str, Any] = field(default_factory=dict)  # assigned once, outside functions
    functions: dict[str, set[str]] = field(default_factory=dict)  # digests of their code, by name


def closure(names: Iterable[str]) -> dict[str, File]:
    """Return the user's modules among dotted names, and all that those import in turn.

    A name may point into a module, as ``"helper.scale"``; the packages that contain a module count.
    Nothing is imported.
    """
    files: dict[str, File] = {}
    pending, seen = set(names), set[str]()
    while pending:
        parts = (name := pending.pop()).split(".")
        seen.add(name)
        for module in (".".join(parts[: i + 1]) for i in range(len(parts))):
            if (location := _locate(module)) is None:
                break
            path, is_package = location
            if path is None or module in files:  # a namespace has no file
                continue
            files[module] = file = read(path)
            package = module if is_package else module.rpartition(".")[0]
            pending |= {_absolute(package, *x) for x in imports(file.text)} - seen
    return files


def submodules(module: types.ModuleType, names: Iterable[str]) -> Iterator[str]:
    """Yield the submodules of `module`, at any depth, that are attributes with these names."""
    for name in names:
        inner = vars(module).get(name)
        if isinstance(inner, types.ModuleType) and inner.__name__ == f"{module.__name__}.{name}":
            yield inner.__name__
            yield from submodules(inner, names)


def imported(source: str, package: str | None = None) -> set[str]:
    """Return the dotted names that `source` imports, anywhere in it."""
    return {_absolute(package or "", *x) for x in imports(source)}


def is_own(name: str | None) -> bool:
    """Return whether a module is the user's."""
    location = _locate(name or "")
    return location is not None and location[0] is not None


def changed(name: str, file: File) -> dict[str, Any]:
    """Return the values and code of a loaded module that differ from its file, by name.

    They differ if a constant was set from outside, or if the file was edited after the import.
    """
    module = sys.modules.get(name)
    if module is None:
        return {}
    loaded = vars(module)
    changes = {
        key: loaded[key]
        for key, value in file.constants.items()
        if key in loaded and not _same(loaded[key], value)
    }
    for value in loaded.values():
        changes |= changed_code(value, name)
    return changes


def changed_code(value: Any, module: str | None = None) -> dict[str, str]:
    """Return the digests of a function, or of a class's methods, that differ from their file.

    With `module`, only what that module defines is compared.
    """
    if module is not None and getattr(value, "__module__", None) != module:
        return {}
    if isinstance(value, type):
        changes: dict[str, str] = {}
        for x in vars(value).values():
            member = getattr(x, "fget", None) or getattr(x, "__func__", x)
            changes |= changed_code(member, value.__module__)
        return changes
    value = inspect.unwrap(value) if callable(value) else value
    loaded = getattr(value, "__code__", None)
    path = Path(getattr(loaded, "co_filename", ""))
    if not isinstance(loaded, types.CodeType) or path.suffix != ".py" or not path.is_file():
        return {}
    digest, in_file = _code_digest(loaded), read(path).functions
    return {} if digest in in_file.get(loaded.co_qualname, ()) else {loaded.co_qualname: digest}


def read(path: Path) -> File:
    """Return the current content of a file."""
    stat = path.stat()
    return _read(str(path), stat.st_mtime_ns, stat.st_size)


@functools.cache
def _read(path: str, mtime: int, size: int) -> File:
    data = Path(path).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    try:
        if not path.endswith(".py"):
            return File(path, digest)
        text = importlib.util.decode_source(data)
        tree = ast.parse(text)
        module = compile(text, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # it cannot have been imported
        return File(path, digest)
    with contextlib.suppress(RecursionError):  # an expression that is too deep: comments count too
        digest = hashlib.sha256(code(text).encode()).hexdigest()
    functions: dict[str, set[str]] = {}
    for inner in codes(module):
        functions.setdefault(inner.co_qualname, set()).add(_code_digest(inner))
    return File(path, digest, text, _constants(tree), functions)


def _locate(name: str) -> tuple[Path | None, bool] | None:
    """Return the file of a user's module, and whether it is a package; None for other modules.

    A namespace is a package without a file.
    """
    if name.partition(".")[0] in (*ROOTS, "__main__", ""):
        return None
    module, spec = sys.modules.get(name), _spec(name)
    origin = spec.origin if spec is not None else getattr(module, "__file__", None)
    inside = spec.submodule_search_locations if spec is not None else None
    if origin is None or (spec is not None and not spec.has_location):
        return (None, True) if inside is not None else None
    path = Path(origin)
    installed = INSTALLED & set(path.parts) or any(path.is_relative_to(x) for x in LIBRARIES)
    return None if installed or not path.is_file() else (path, inside is not None)


def _spec(name: str) -> Any:
    """Find a module as an import would, without importing it or the packages that contain it."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    parent, _, last = name.rpartition(".")
    if not parent:
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        return next((x for find in finders if find and (x := find(name, None)) is not None), None)
    if parent in sys.modules and last in vars(sys.modules[parent]):
        return None  # an attribute that is not a module
    spaces = []  # locations of a namespace; its path finder would require the imported package
    for folder in getattr(_spec(parent), "submodule_search_locations", None) or ():
        finder = pkgutil.get_importer(folder)
        spec = None if finder is None else finder.find_spec(name, None)
        if spec is not None and spec.loader is not None:
            return spec
        spaces += [] if spec is None else spec.submodule_search_locations or []
    if not spaces:
        return None
    space = importlib.machinery.ModuleSpec(name, None, is_package=True)
    space.submodule_search_locations = spaces
    return space


def _absolute(package: str, level: int, name: str) -> str:
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], name]) if level else name


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the hashable literals that are assigned to a name exactly once."""
    nodes = list(ast.walk(tree))
    stores = [x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
    global_names = {name for x in nodes if isinstance(x, ast.Global) for name in x.names}
    literals = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and value is not None:
            try:
                literals[targets[0].id] = ast.literal_eval(value)
                hash(literals[targets[0].id])
            except (ValueError, TypeError):
                literals.pop(targets[0].id, None)
    return {k: x for k, x in literals.items() if stores.count(k) == 1 and k not in global_names}


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and repr(a) == repr(b)


def codes(outer: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code objects that are nested in another, at any depth."""
    for constant in outer.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from codes(constant)


def _code_digest(function: types.CodeType) -> str:
    """Return a digest of code that does not depend on its position in a file."""

    def text(constant: Any) -> str:
        if isinstance(constant, types.CodeType):
            return _code_digest(constant)
        return repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)

    names = (function.co_names, function.co_varnames, function.co_freevars, function.co_cellvars)
    state = (function.co_code.hex(), names, [text(x) for x in function.co_consts])
    return hashlib.sha256(repr(state).encode()).hexdigest()
