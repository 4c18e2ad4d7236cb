"""Read the source of a call, to see what its values cannot show: where they come from.

`derived_attention.claims` asks whether two sides of a check are one expression, whether a check is
made of literals alone, and whether a wrong version is a right one with a typed factor. All of that
is in the text of the call. Where there is no text, as under ``exec``, the answer to all is no.
"""

from __future__ import annotations

import ast
import builtins
import linecache
from collections.abc import Callable
from inspect import signature
from itertools import islice
from types import FrameType, ModuleType
from typing import Any

ARITHMETIC = (ast.Mult, ast.Div, ast.Add, ast.Sub)


class CallSite:
    """The arguments of a call, as expressions: what was passed to `function` from `frame`."""

    def __init__(self, function: Callable, frame: FrameType | None) -> None:
        self.arguments: dict[str, ast.expr] = {}
        self.names: dict[str, Any] = {}
        self._assigned: dict[str, ast.expr] = {}
        tree = _parse(frame)
        call = None if frame is None or tree is None else _find_call(tree, frame, function.__name__)
        if frame is None or tree is None or call is None:
            return
        self.names = {**vars(builtins), **frame.f_globals, **frame.f_locals}
        positional = zip(signature(function).parameters, call.args, strict=False)
        keywords = {k.arg: k.value for k in call.keywords if k.arg is not None}
        self.arguments = {**dict(positional), **keywords}
        self._assigned = _assignments(tree, call.lineno)

    def same(self, one: str, other: str) -> bool:
        """Say whether two arguments are one expression.

        A name stands for what its cell sets it to: after ``a = f(x)`` and ``b = f(x)``, the two
        names are the same call.
        """
        if one not in self.arguments or other not in self.arguments:
            return False
        a, b = (self._expanded(self.arguments[name]) for name in (one, other))
        return ast.dump(a) == ast.dump(b)

    def literal(self, name: str) -> bool:
        """Say whether an argument depends on nothing but numbers typed into the call."""
        if name not in self.arguments:
            return False
        used = {n.id for n in ast.walk(self.arguments[name]) if isinstance(n, ast.Name)}
        given = {n: self.names.get(n) for n in used}
        return all(
            isinstance(x, ModuleType) or x is getattr(builtins, n, self) for n, x in given.items()
        )

    def nudged(self, wrong: str, right: str) -> bool:
        """Say whether `wrong` is `right` times, over, plus or minus a typed number.

        A whole number is let pass: to lose a 2, or to be one off, is a mistake that people make,
        and 0.99 is none.
        """
        if wrong not in self.arguments or right not in self.arguments:
            return False
        node, target = self.arguments[wrong], ast.dump(self.arguments[right])
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC)):
            return False
        for number, rest in [(node.left, node.right), (node.right, node.left)]:
            value = _number(number)
            bare = rest.value if isinstance(rest, ast.Subscript) else rest  # x[[3]] is x as well
            if value is not None and target in (ast.dump(rest), ast.dump(bare)):
                return not value.is_integer()
        return False

    def _expanded(self, node: ast.expr, inside: tuple[str, ...] = ()) -> ast.AST:
        assigned, expand = self._assigned, self._expanded

        class Expand(ast.NodeTransformer):
            def visit_Name(self, name: ast.Name) -> ast.AST:
                if name.id not in assigned or name.id in inside:
                    return name
                # A typed value, such as the empty list that a loop fills, is no computation.
                if not any(isinstance(n, ast.Name) for n in ast.walk(assigned[name.id])):
                    return name
                return expand(assigned[name.id], (*inside, name.id))

        return Expand().visit(ast.parse(ast.unparse(node), mode="eval").body)


def _number(node: ast.expr) -> float | None:
    """Return the value of a typed number, perhaps with a sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _number(node.operand)
        return None if value is None else -value
    typed = isinstance(node, ast.Constant) and isinstance(node.value, (int, float))
    return float(node.value) if typed else None  # type: ignore[attr-defined]


def _parse(frame: FrameType | None) -> ast.Module | None:
    """Parse the file or the notebook cell that a frame runs."""
    if frame is None:
        return None
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        return ast.parse("".join(lines)) if lines else None
    except SyntaxError:  # the file is not what is running any more
        return None


def _find_call(tree: ast.Module, frame: FrameType, name: str) -> ast.Call | None:
    """Find the call of a function called `name` that the frame is in."""
    here = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    for node in ast.walk(tree):
        if here is None or not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if called == name and (node.end_lineno, node.end_col_offset) == (here[1], here[3]):
            return node
    return None


def _assignments(tree: ast.Module, before: int) -> dict[str, ast.expr]:
    """Return what plain assignments before a line, of its function or cell, set names to."""
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    around = [f for f in functions if f.lineno < before <= (f.end_lineno or 0)]
    found: dict[str, ast.expr] = {}
    for statement in (around[-1] if around else tree).body:  # the last one is the innermost
        if statement.lineno >= before:
            break
        for name in _bound(statement):
            found.pop(name, None)
        if not isinstance(statement, ast.Assign):
            continue
        for target in statement.targets:
            if isinstance(target, ast.Name):
                found[target.id] = statement.value
            elif isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                pairs = zip(target.elts, statement.value.elts, strict=False)
                if len(target.elts) == len(statement.value.elts):
                    found |= {t.id: value for t, value in pairs if isinstance(t, ast.Name)}
    return found


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement sets anywhere inside, as a loop or a function does."""
    stores = {
        n.id for n in ast.walk(statement)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }  # fmt: skip
    return stores | ({statement.name} if hasattr(statement, "name") else set())
