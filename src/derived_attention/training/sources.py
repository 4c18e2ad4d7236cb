"""Which modules of this package some code depends on, and what they say, comments aside.

The keys of stored results (`derived_attention.training.grids`) and the book's execution cache are
made from it. So a change makes anew what it can change, and nothing else.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path

ROOT = "derived_attention"
PLOT = f"{ROOT}.page.plot"
REGISTRY = f"{ROOT}.attention.registry"


class Sources:
    """The modules of the package, as their files were when this object was made.

    Parameters
    ----------
    folder : Path
        The folder of the package.
    public : mapping of str to str, optional
        The names that the package itself offers, each with the module that is loaded for it.
    looks : mapping of str to (str, str), optional
        Label and colour of each mechanism. Both are the registry's where they are not given.
    """

    def __init__(
        self,
        folder: Path,
        public: Mapping[str, str] | None = None,
        looks: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        self.texts = {
            _module(path, folder): path.read_text("utf8") for path in folder.rglob("*.py")
        }
        self._public, self._looks = public, looks

    @cached_property
    def public(self) -> Mapping[str, str]:
        """The module of each public name."""
        if self._public is None and REGISTRY in self.texts:
            return import_module(ROOT).places()
        return self._public or {}

    @cached_property
    def looks(self) -> Mapping[str, tuple[str, str]]:
        """Label and colour of each mechanism."""
        if self._looks is None and REGISTRY in self.texts:
            plot = import_module(PLOT)
            return {name: (plot.LABELS[name], plot.COLORS[name]) for name in plot.COLORS}
        return self._looks or {}

    def modules(self, name: str) -> set[str]:
        """Return the modules that a dotted name needs, such as ``"derived_attention.page.claims"``.

        Those are the module that it is, or is found in, and the packages around it. Without a
        module, ``"derived_attention.softmax_attention"``, a public name needs its own. The package
        as such may need them all.
        """
        first, *rest = parts = name.split(".")
        if first != ROOT:
            return set()
        found = {".".join(parts[: i + 1]) for i in range(len(parts))} & self.texts.keys()
        if found == {ROOT} and not (rest and rest[0].startswith("__")):
            public = self.public
            wanted = (
                [public[rest[0]]] if rest and rest[0] in public else [REGISTRY, *public.values()]
            )
            found = found.union(*map(self.modules, wanted))
        return found & self.texts.keys()

    def imported(self, source: str) -> set[str]:
        """Return the modules that `source` imports directly, anywhere in it."""
        names = (name for level, name in imports(source) if not level)
        return set().union(*map(self.modules, names))

    def dependencies(self, modules: Iterable[str]) -> set[str]:
        """Return `modules` and all that they import, directly or through others.

        Two imports are not followed. The package loads its public names when they are asked for;
        and figures read labels and colours from the registry: see `digest`.
        """
        found: set[str] = set()
        todo = set(modules)
        while todo:
            module = todo.pop()
            found.add(module)
            more = set() if module == ROOT else self.imported(self.texts[module])
            if module == PLOT:
                more.discard(REGISTRY)
            elif module == REGISTRY:  # from there every mechanism can be reached
                inside = (x for x in self.public.values() if x.startswith(f"{ROOT}.attention."))
                more = more.union(*map(self.modules, inside))
            todo |= more - found
        return found

    def digest(self, modules: Iterable[str], source: str = "") -> str:
        """Return the SHA-256 of the code of `modules` and of their dependencies.

        Docstrings and comments do not count. Of the registry, where only figures need it, label
        and colour count, of the mechanisms whose names are in `source` or in one of the modules.
        """
        found = sorted(self.dependencies(modules))
        state: list[object] = [(name, code(self.texts[name])) for name in found]
        if PLOT in found and REGISTRY not in found:
            words = set(re.findall(r"\w+", f"{source} {state}"))
            state.append(sorted(look for look in self.looks.items() if look[0] in words))
        return hashlib.sha256(repr(state).encode()).hexdigest()


@cache
def imports(source: str) -> tuple[tuple[int, str], ...]:
    """Return what `source` imports, anywhere in it: ``from .a import b`` is (1, "a.b")."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            first = f"{node.module}." if node.module else ""
            found += [(node.level, f"{first}{alias.name}") for alias in node.names]
    return tuple(found)


@cache
def code(source: str) -> str:
    """Return what Python makes of `source`, without docstrings, comments and layout."""
    return ast.dump(_NoDocstrings().visit(ast.parse(source)))


class _NoDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        value = node.value
        return None if isinstance(value, ast.Constant) and isinstance(value.value, str) else node


def _module(path: Path, folder: Path) -> str:
    """Return the dotted name of a file of the package in `folder`."""
    inside = path.relative_to(folder).with_suffix("").parts
    return ".".join([ROOT, *inside]).removesuffix(".__init__")
