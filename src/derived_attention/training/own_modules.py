"""What modules of a reader's own say: those that are neither installed nor of this package.

They lie beside a page, in a checkout, or where ``pip install --editable`` left them. Keys of stored
results (`derived_attention.training.grids`) hold what of them a function reaches: the code of their
files, through their imports, and where this process has something else than the files say.
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

from derived_attention.training.sources import ROOT, code, imports

LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
INSTALLED = {"site-packages", "dist-packages"}  # folders of what is installed, in any system


@dataclass(frozen=True)
class File:
    """What a file of Python says; of a compiled one, that it is this one."""

    path: str
    digest: str
    text: str = ""
    constants: dict[str, Any] = field(default_factory=dict)  # assigned once, outside functions
    functions: dict[str, set[str]] = field(default_factory=dict)  # marks of their code, by name


def closure(names: Iterable[str]) -> dict[str, File]:
    """Return the reader's own modules among dotted names, and among all that those import.

    A name may go on in a module, as ``"helper.scale"`` does; the packages around a module count.
    Nothing is imported for it.
    """
    found: dict[str, File] = {}
    todo, seen = set(names), set[str]()
    while todo:
        name = todo.pop()
        seen.add(name)
        for module in _around(name):
            where = _where(module)
            if where is None:
                break
            path, is_package = where
            if path is None or module in found:  # a namespace has no file
                continue
            found[module] = file = read(path)
            package = module if is_package else module.rpartition(".")[0]
            todo |= {_absolute(package, *x) for x in imports(file.text)} - seen
    return found


def submodules(module: types.ModuleType, names: Iterable[str]) -> Iterator[str]:
    """Yield the modules that `module` leads to by attributes of these names."""
    for name in names:
        inner = vars(module).get(name)
        if isinstance(inner, types.ModuleType) and inner.__name__ == f"{module.__name__}.{name}":
            yield inner.__name__
            yield from submodules(inner, names)


def imported(source: str, package: str | None = None) -> set[str]:
    """Return what `source` imports, anywhere in it, as dotted names."""
    return {_absolute(package or "", *x) for x in imports(source)}


def is_own(name: str | None) -> bool:
    """Say whether a module is the reader's own."""
    where = _where(name or "")
    return where is not None and where[0] is not None


def changed(name: str, file: File) -> dict[str, Any]:
    """Return what a module has in this process and not in its file, by name.

    A constant that was set from outside, or code that was read before the file was edited.
    """
    module = sys.modules.get(name)
    if module is None:
        return {}
    held = vars(module)
    pairs = ((key, held[key], x) for key, x in file.constants.items() if key in held)
    found = {key: now for key, now, x in pairs if not _same(now, x)}
    for value in held.values():
        found |= changed_code(value, name)
    return found


def changed_code(value: Any, module: str | None = None) -> dict[str, str]:
    """Return the marks of a function, or of a class's methods, whose file says something else.

    With `module`, nothing of what is defined elsewhere.
    """
    if module is not None and getattr(value, "__module__", None) != module:
        return {}
    if isinstance(value, type):
        found: dict[str, str] = {}
        for x in vars(value).values():
            member = getattr(x, "fget", None) or getattr(x, "__func__", x)
            found |= changed_code(member, value.__module__)
        return found
    value = inspect.unwrap(value) if callable(value) else value
    own = getattr(value, "__code__", None)
    path = Path(getattr(own, "co_filename", ""))
    if not isinstance(own, types.CodeType) or path.suffix != ".py" or not path.is_file():
        return {}
    mark, known = _mark(own), read(path).functions
    return {} if mark in known.get(own.co_qualname, ()) else {own.co_qualname: mark}


def read(path: Path) -> File:
    """Return what a file says, as it is now."""
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
        whole = compile(text, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # nobody can have imported it
        return File(path, digest)
    with contextlib.suppress(RecursionError):  # an expression that is too deep for it: all counts
        digest = hashlib.sha256(code(text).encode()).hexdigest()
    marks: dict[str, set[str]] = {}
    for inner in codes(whole):
        marks.setdefault(inner.co_qualname, set()).add(_mark(inner))
    return File(path, digest, text, _constants(tree), marks)


def _around(name: str) -> list[str]:
    """Return ``["a", "a.b", "a.b.c"]`` for ``"a.b.c"``."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _where(name: str) -> tuple[Path | None, bool] | None:
    """Return the file of a module, and whether it is a package; None where it is not our reader's.

    A namespace is a package without a file.
    """
    if name in (ROOT, "__main__", "") or name.startswith(f"{ROOT}."):
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
    """Find a module as an import would, and import nothing, not even the packages around it."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    parent, _, last = name.rpartition(".")
    if not parent:
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        return next((x for find in finders if find and (x := find(name, None)) is not None), None)
    if parent in sys.modules and last in vars(sys.modules[parent]):
        return None  # a name in it that is no module
    spaces = []  # the path finder among those would look up the package, and it is not imported
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
    """Return what is written out, cannot change in itself, and is assigned nowhere else."""
    nodes = list(ast.walk(tree))
    stores = [x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
    elsewhere = {name for x in nodes if isinstance(x, ast.Global) for name in x.names}
    found = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and value is not None:
            try:
                found[targets[0].id] = ast.literal_eval(value)
                hash(found[targets[0].id])
            except (ValueError, TypeError):
                found.pop(targets[0].id, None)
    return {k: x for k, x in found.items() if stores.count(k) == 1 and k not in elsewhere}


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and repr(a) == repr(b)


def codes(whole: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of what is defined in other code, at any depth."""
    for constant in whole.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from codes(constant)


def _mark(own: types.CodeType) -> str:
    """Return what tells code apart, wherever in a file it stands."""

    def text(constant: Any) -> str:
        if isinstance(constant, types.CodeType):
            return _mark(constant)
        return repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)

    names = (own.co_names, own.co_varnames, own.co_freevars, own.co_cellvars)
    state = (own.co_code.hex(), names, [text(x) for x in own.co_consts])
    return hashlib.sha256(repr(state).encode()).hexdigest()
