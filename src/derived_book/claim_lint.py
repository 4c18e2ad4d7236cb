"""Read the source of a call, to see whether its arguments are computed.

`claims` refuses a check of one expression against itself, and of typed numbers. Where there is no
source, as under ``exec``, every answer is no.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from functools import partial
from inspect import signature
from types import FrameType, ModuleType
from typing import Any

from executing import Source

# What makes an array of typed numbers, or another type of one.
CONVERSIONS = {"array", "asarray", "tensor", "as_tensor", "float64", "Integer", "Float", "Rational"}


class CallSite:
    """The arguments that `frame` passes to `function`, as expressions."""

    def __init__(self, function: Callable, frame: FrameType) -> None:
        call = Source.executing(frame).node
        self.arguments: dict[str, ast.expr] = {}
        self.is_plain = False  # True if the source shows each argument, as *args does not
        if not isinstance(call, ast.Call):
            return
        self._names = {**vars(builtins), **frame.f_globals, **frame.f_locals}
        name = ast.unparse(call.func).rpartition(".")[2]
        called = self._names.get(name)
        bound = len(called.args) if isinstance(called, partial) else 0
        called = called.func if isinstance(called, partial) else called
        if called is not function and name != function.__name__:
            return
        self._assigned = _assigned(call)
        starred = any(isinstance(x, ast.Starred) for x in call.args)
        self.is_plain = not starred and all(x.arg for x in call.keywords)
        if not starred:
            names = [*signature(function).parameters][bound:]
            self.arguments = dict(zip(names, call.args, strict=False))
        self.arguments |= {x.arg: x.value for x in call.keywords if x.arg is not None}

    def same(self, one: str, other: str) -> bool:
        """Return whether two arguments are the same expression."""
        if one not in self.arguments or other not in self.arguments:
            return False
        return ast.dump(self.arguments[one]) == ast.dump(self.arguments[other])

    def literal(self, name: str) -> bool:
        """Return whether an argument consists of typed numbers, which may have a name here."""
        return name in self.arguments and self._literal(self.arguments[name])

    def _literal(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.List | ast.Tuple):
            return all(map(self._literal, node.elts))
        if isinstance(node, ast.Dict):
            return all(map(self._literal, node.values))
        if isinstance(node, ast.UnaryOp):
            return self._literal(node.operand)
        if isinstance(node, ast.BinOp):  # arithmetic with a named number is a computation
            return not any(isinstance(x, ast.Name) for x in ast.walk(node))
        if isinstance(node, ast.Name):
            values = self._assigned.get(node.id, [])
            return bool(values) and all(x is not None and self._literal(x) for x in values)
        if not isinstance(node, ast.Call):
            return False
        function = node.func
        if isinstance(function, ast.Attribute):
            owner = self._names.get(ast.unparse(function.value))
            known = isinstance(owner, ModuleType) and function.attr in CONVERSIONS
        else:
            known = self._names.get(ast.unparse(function)) in (float, int, complex, list, tuple)
        return known and all(map(self._literal, node.args))


def _assigned(node: Any) -> dict[str, list[ast.expr | None]]:
    """Return the expressions assigned to each name in the function, cell or file of a node.

    An expression is None where the name gets a part of a value, as in a loop.
    """
    while not isinstance(node, ast.FunctionDef | ast.Module):
        node = node.parent
    arguments = ast.walk(node.args) if isinstance(node, ast.FunctionDef) else []
    found: dict[str, list[ast.expr | None]] = {
        x.arg: [None] for x in arguments if isinstance(x, ast.arg)
    }
    whole: set[ast.AST] = set()
    for statement in ast.walk(node):
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(statement.value)
                    whole.add(target)
    for name in ast.walk(node):
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store) and name not in whole:
            found.setdefault(name.id, []).append(None)
    return found
