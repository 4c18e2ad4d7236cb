"""The modules of this package that code depends on, and digests of their code without comments.

The keys of stored results (`derived_book.training.grids`) and of the book's execution cache
are computed from them, so a change of the package repeats only what depends on it.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

LIBRARY, BOOK = ROOTS = "derived_attention", "derived_book"
PLOT = f"{BOOK}.plot"
REGISTRY = f"{LIBRARY}.registry"


class Sources:
    """The source of the package's modules, read when this object is created.

    Parameters
    ----------
    folder : Path
        The folder of both packages.
    public : mapping of str to str, optional
        The module of each name that can be imported from one of the packages themselves.
    looks : mapping of str to (str, str), optional
        Label and colour of each mechanism. By default both are the registry's.
    """

    def __init__(
        self,
        folder: Path,
        public: Mapping[str, str] | None = None,
        looks: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        self.texts = {
            _module(path, folder): path.read_text("utf8")
            for root in ROOTS
            for path in (folder / root).rglob("*.py")
        }
        self._public, self._looks = public, looks

    @cached_property
    def public(self) -> Mapping[str, str]:
        """The module of each public name."""
        if self._public is None and REGISTRY in self.texts:
            return {k: v for root in ROOTS for k, v in import_module(root).places().items()}
        return self._public or {}

    @cached_property
    def looks(self) -> Mapping[str, tuple[str, str]]:
        """Label and colour of each mechanism."""
        if self._looks is None and REGISTRY in self.texts:
            plot = import_module(PLOT)
            return {name: (plot.LABELS[name], plot.COLORS[name]) for name in plot.COLORS}
        return self._looks or {}

    def modules(self, name: str) -> set[str]:
        """Return the modules that a dotted name needs, such as ``"derived_book.claims"``.

        These are the module that it names or that contains it, and the packages that contain that
        module. A public name, ``"derived_attention.softmax_attention"``, needs the module that
        defines it; the package itself may need all of them.
        """
        first, *rest = parts = name.split(".")
        if first not in ROOTS:
            return set()
        modules = {".".join(parts[: i + 1]) for i in range(len(parts))} & self.texts.keys()
        if modules == {first} and not (rest and rest[0].startswith("__")):
            public = self.public
            known = [public[rest[0]]] if rest and rest[0] in public else None
            own = [x for x in public.values() if x.startswith(f"{first}.")]
            loaded = known or [*([REGISTRY] if first == LIBRARY else []), *own]
            modules = modules.union(*map(self.modules, loaded))
        return modules & self.texts.keys()

    def find_imports(self, source: str) -> set[str]:
        """Return the modules that `source` imports directly, anywhere in it."""
        names = (name for level, name in imports(source) if not level)
        return set().union(*map(self.modules, names))

    def dependencies(self, modules: Iterable[str]) -> set[str]:
        """Return `modules` and all that they import, directly or indirectly.

        Two imports are not followed: those of the package itself, which loads its public names
        lazily, and that of the registry by `plot`, which reads only labels and colours (`digest`).
        """
        closure: set[str] = set()
        pending = set(modules)
        while pending:
            module = pending.pop()
            closure.add(module)
            more = set() if module in ROOTS else self.find_imports(self.texts[module])
            if module == PLOT:
                more.discard(REGISTRY)
            elif module == REGISTRY:  # it loads the modules of all mechanisms
                mechanisms = (x for x in self.public.values() if x.startswith(f"{LIBRARY}."))
                more = more.union(*map(self.modules, mechanisms))
            pending |= more - closure
        return closure

    def digest(self, modules: Iterable[str], source: str = "") -> str:
        """Return the SHA-256 of the code of `modules` and of their dependencies.

        Docstrings and comments are left out. If only `plot` needs the registry, it is replaced by
        label and colour of the mechanisms whose names occur in `source` or in one of the modules.
        """
        names = sorted(self.dependencies(modules))
        state: list[object] = [(name, code(self.texts[name])) for name in names]
        if PLOT in names and REGISTRY not in names:
            words = set(re.findall(r"\w+", f"{source} {state}"))
            state.append(sorted(look for look in self.looks.items() if look[0] in words))
        return hashlib.sha256(repr(state).encode()).hexdigest()


@cache
def imports(source: str) -> tuple[tuple[int, str], ...]:
    """Return the level and the dotted name of every import: ``from .a import b`` is (1, "a.b")."""
    pairs: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            pairs += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = f"{node.module}." if node.module else ""
            pairs += [(node.level, f"{prefix}{alias.name}") for alias in node.names]
    return tuple(pairs)


@cache
def code(source: str) -> str:
    """Return the syntax tree of `source` as text, without docstrings, comments and layout."""
    tree = _NoDocstrings().visit(ast.parse(source))
    empty: dict[str, Any] = {"show_empty": True} if sys.version_info >= (3, 13) else {}
    # The same in every Python: from 3.12 on a function names the parameters of its types.
    return ast.dump(tree, **empty).replace(", type_params=[]", "")


class _NoDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        value = node.value
        return None if isinstance(value, ast.Constant) and isinstance(value.value, str) else node


def _module(path: Path, folder: Path) -> str:
    """Return the dotted name of a file of the package in `folder`."""
    inside = path.relative_to(folder).with_suffix("").parts
    return ".".join(inside).removesuffix(".__init__")
