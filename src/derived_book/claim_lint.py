"""Analyse the source of a call, to find out how its arguments are computed.

`claims` uses it to reject vacuous checks: two sides that are the same expression, arguments that
are only literals (numbers that were typed in), and mutants made by a literal factor or at random.
Where there is no source, as under ``exec``, every answer is no.
"""

from __future__ import annotations

import ast
import builtins
import copy
import linecache
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from inspect import signature
from itertools import islice, takewhile
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch

ARITHMETIC = (ast.Mult, ast.Div, ast.Add, ast.Sub)
WHOLE = {*range(-16, 0), *range(1, 17)}  # plausible mistakes in a factor or term: not 0.99 or 1000
GENERATORS = (np.random.Generator, np.random.RandomState, torch.Generator, random.Random)
PRINTING = ("print", "display")  # calls that do not change their arguments
# Functions and methods that return the value of their argument.
COPIES = {"clone", "copy", "deepcopy", "detach", "contiguous", "cpu", "numpy", "double", "float",
          "to", "astype", "tolist", "item", "array", "asarray", "as_tensor", "tensor", "from_numpy",
          "list", "tuple", "complex", "float64", "int", "Integer", "Float", "Rational", "S",
          "sympify"}  # fmt: skip
METHODS = {"to", "astype"}  # those of COPIES that are methods with arguments
NEUTRAL = {ast.Add: 0, ast.Sub: 0, ast.Mult: 1, ast.Div: 1, ast.Pow: 1}
# Pairs of these that are applied one after the other return their argument.
INVOLUTIONS = {"T": "transpose", "mT": "transpose", "t": "transpose", "swapaxes": "transpose",
               **{name: name for name in ("transpose", "inv", "inverse", "pinv", "reciprocal",
                                          "negative", "neg", "conj", "flip", "fliplr", "flipud")},
               "invert": "inv", "Inverse": "inv"}  # fmt: skip
FILLS = {"zeros", "ones", "full", "zeros_like", "ones_like", "full_like"}
LOADS = {"load", "loads", "loadtxt", "genfromtxt", "fromfile", "frombuffer", "memmap"}
HIGHER = {"abs", "absolute", "maximum", "max", "amax", "fmax", "ceil"}
LOWER = {"minimum", "min", "amin", "fmin", "floor"}
BETWEEN = {"mean", "median", "average"}  # between the smallest and the largest entry
OPERATORS = {"multiply": ast.Mult, "mul": ast.Mult, "divide": ast.Div, "div": ast.Div,
             "add": ast.Add, "subtract": ast.Sub, "sub": ast.Sub}  # fmt: skip
ITERATORS = {"zip", "enumerate", "range", "reversed", "items", "values", "keys"}


class CallSite:
    """The arguments that `frame` passes to `function`, as expressions."""

    def __init__(self, function: Callable, frame: FrameType | None) -> None:
        self.arguments: dict[str, ast.expr] = {}
        self.names: dict[str, Any] = {}
        self.is_plain = True  # False if the source of the call hides arguments, as *args does
        self._frame = frame
        source = _source(frame)
        tree = _parse(source)
        if frame is None or tree is None:
            return
        self.names = {**vars(builtins), **frame.f_globals, **frame.f_locals}
        self._scope = Scope(self.names)
        call = _find_call(tree, frame, function, self.names)
        starred = call is None or any(isinstance(a, ast.Starred) for a in call.args)
        self.is_plain = not starred and all(k.arg for k in call.keywords)  # type: ignore[union-attr]
        if call is None:
            return
        definitions = [n for n in _path(tree, call) if isinstance(n, ast.FunctionDef)]
        self._function = definitions[-1] if definitions else None
        self._scope.read((self._function or tree).body, call)
        cells = [c for c in self.names.get("In", [])[::-1] if isinstance(c, str) and c != source]
        self._outside = [source, *cells] if definitions else cells
        called = self.names.get(ast.unparse(call.func))
        free = [p for p in signature(function).parameters][len(getattr(called, "args", ())) :]
        positional = takewhile(lambda a: not isinstance(a, ast.Starred), call.args)
        self._written = dict(zip(free, positional, strict=False))
        self._written |= {k.arg: k.value for k in call.keywords if k.arg is not None}
        self.arguments = {name: self._scope.expand(node) for name, node in self._written.items()}

    def same(self, one: str, other: str) -> bool:
        """Return whether two arguments are the same expression, or copies of it.

        Names are replaced by the expressions assigned to them in the cell: after ``a = f(x)`` and
        ``b = f(x)`` the two names are the same, unless `x` changed or a random generator was used.
        """
        if one not in self.arguments or other not in self.arguments:
            return False
        return _dump(self.arguments[one]) == _dump(self.arguments[other])

    def copied(self, one: str, other: str) -> bool:
        """Return whether one of two arguments with equal values is a copy of the other.

        It is if the file that was just written is loaded, or if both are the same expression once
        copies are taken out of it everywhere.
        """
        if one not in self.arguments or other not in self.arguments:
            return False
        nodes = [self._definition(self.arguments[name]) for name in (one, other)]
        if any(_called(node) in LOADS for node in nodes):
            return True
        return len({ast.dump(Plain().visit(copy.deepcopy(node))) for node in nodes}) == 1

    def derived(self, one: str, other: str) -> bool:
        """Return whether one of two arguments consists of operations that the other has, too."""
        if one not in self.arguments or other not in self.arguments:
            return False
        first, second = (_operations(self._definition(self.arguments[x])) for x in (one, other))
        return first <= second or second <= first

    def constant(self, name: str) -> bool:
        """Return whether an argument is the same for all inputs: a number, 0 x, clip(x, 1, 1)."""
        return name in self.arguments and (
            self.literal(name) or _constant(self._definition(self.arguments[name]))
        )

    def fills(self, name: str) -> bool:
        """Return whether an argument repeats one number openly, as np.ones(3) or [1.0] * 3 does."""
        if name not in self.arguments:
            return True
        node = self._definition(self.arguments[name])
        repeated = isinstance(node, ast.BinOp) and isinstance(node.left, ast.List)
        return _called(node) in FILLS or repeated or self.constant(name)

    def _definition(self, node: ast.expr) -> ast.expr:
        """Return an expression without copies; for a name from elsewhere, what it stands for."""
        node = _peel(node)
        frame = self._frame
        if frame is None or not isinstance(node, ast.Name):
            return node
        if frame.f_locals is not frame.f_globals and node.id in frame.f_locals:
            return node
        return _peel(self._outer(node.id) or node)

    def cancels(self, name: str) -> bool:
        """Return whether an argument, or an entry of it, is an expression minus or over itself."""
        return name in self.arguments and _cancels(self.arguments[name])

    def exceeds(self, larger: str, smaller: str) -> bool:
        """Return whether `larger` >= `smaller` by construction, as max(x) >= mean(x) is."""
        if larger not in self.arguments or smaller not in self.arguments:
            return False
        high, low = (_peel(self.arguments[name]) for name in (larger, smaller))
        above, below = {*_operands(high, HIGHER)}, {*_operands(low, LOWER)}
        return bool(
            above & {_dump(low), *below, *_operands(low, BETWEEN)}
            or below & {_dump(high), *_operands(high, BETWEEN)}
        )

    def literal(self, name: str) -> bool:
        """Return whether an argument consists of literals only.

        They may pass through a name, a loop, or a function that returns its arguments. Arithmetic
        with named numbers is a computation.
        """
        if name not in self.arguments:
            return False
        used = {n.id for n in ast.walk(self._written[name]) if isinstance(n, ast.Name)}
        return all(self._library(n) for n in used) or self._literal(self.arguments[name])

    def literal_entries(self, name: str) -> bool:
        """Return whether a value of a dictionary that is written in the call is a literal."""
        node = self._written.get(name) if self.arguments else None
        entries = node.values if isinstance(node, ast.Dict) else []
        return any(self._literal(self._scope.expand(entry)) for entry in entries)

    def nudged(self, wrong: str, right: str, whole: bool = True) -> bool:
        """Return whether `wrong` is `right` times, over, plus or minus literals.

        With `whole`, small whole numbers are allowed: a lost factor 2 or an offset by one is a
        plausible mistake, a factor 0.99 is not. Otherwise only zero is allowed.
        """
        if wrong not in self.arguments or right not in self.arguments:
            return False
        target = _dump(self.arguments[right])
        numbers: list[float | None] = []
        node = _peel(self.arguments[wrong])
        while isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC):
            left, other = _number(node.left), _number(node.right)
            if (left is None) == (other is None):
                return False
            numbers.append(left if left is not None else other)
            node = _peel(node.right if other is None else node.left)
            bare = node.value if isinstance(node, ast.Subscript) else node  # x[[3]] is x as well
            if target in (_dump(node), _dump(bare)):
                return not all(x in WHOLE for x in numbers) if whole else 0 not in numbers
        return False

    def by_chance(self, wrong: str, *sides: str) -> bool:
        """Return whether `wrong`, or a term of it, is a random number that no side contains."""
        known = {
            n.id for side in sides if side in self.arguments
            for n in ast.walk(self.arguments[side]) if isinstance(n, ast.Name)
        }  # fmt: skip

        def drawn(node: ast.expr) -> bool:
            node = _peel(node)
            if isinstance(node, ast.BinOp):
                return drawn(node.left) or drawn(node.right)
            if isinstance(node, ast.UnaryOp):
                return drawn(node.operand)
            if isinstance(node, ast.Name):
                return node.id.startswith("random@") and node.id not in known
            return isinstance(node, ast.Call) and ".random." in ast.unparse(node.func)

        return wrong in self.arguments and drawn(self.arguments[wrong])

    def _library(self, name: str) -> bool:
        value = self.names.get(name)
        return isinstance(value, ModuleType) or (
            value is not None and value is getattr(builtins, name, None)
        )

    def _literal(self, node: ast.AST | None, parameters: tuple[str, ...] = ()) -> bool:
        """Return whether a node consists of literals; those in `parameters` stand for literals."""
        literal = self._literal
        node = _peel(node) if isinstance(node, ast.expr) else node
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return all(literal(entry, parameters) for entry in node.elts)
        if isinstance(node, ast.Dict):
            return all(literal(entry, parameters) for entry in node.values)
        if isinstance(node, (ast.Subscript, ast.Attribute)):
            return literal(node.value, parameters)
        if isinstance(node, ast.UnaryOp):
            return literal(node.operand, parameters)
        if isinstance(node, ast.BinOp):
            return _number(node) is not None
        if isinstance(node, ast.Name):
            return node.id in parameters or self._library(node.id) or self._literal_name(node.id)
        return isinstance(node, ast.Call) and self._literal_call(node, parameters)

    def _literal_call(self, node: ast.Call, parameters: tuple[str, ...]) -> bool:
        arguments = [*node.args, *(k.value for k in node.keywords)]
        all_literal = all(self._literal(x, parameters) for x in arguments)
        function = node.func
        if isinstance(function, ast.Attribute):  # np.array(2.0), TABLE.items()
            known = function.attr in COPIES | ITERATORS
            return known and self._literal(function.value) and all_literal
        if isinstance(function, ast.Name):
            if function.id in COPIES | ITERATORS and self._library(function.id):
                return all_literal
            function = self._outer(function.id) or function
        if not isinstance(function, ast.Lambda):
            return False
        names = tuple(a.arg for a in function.args.args) if all_literal else ()
        return self._literal(function.body, names)

    def _literal_name(self, name: str) -> bool:
        if "@" in name:
            return self._literal(self._scope.values.get(name))
        if self._function is not None and name in (a.arg for a in self._function.args.args):
            caller = CallSite(_Named(self._function), self._frame.f_back if self._frame else None)
            return caller.literal(name)
        return self._literal(self._outer(name))

    def _outer(self, name: str) -> ast.expr | None:
        """Return the expression of a name outside its function, or in an earlier cell."""
        if "@" in name:
            return self._scope.values.get(name)
        for bound, scope in map(_scope, self._outside):
            if name in bound:
                return scope.values.get(f"{name}@{scope.versions[name]}")
        return None


class _Named:
    """A placeholder for a function, with the name and signature of a definition."""

    def __init__(self, definition: ast.FunctionDef) -> None:
        self.__name__ = definition.name
        parameters = ", ".join(a.arg for a in definition.args.args)
        self.__signature__ = signature(eval(f"lambda {parameters}: None"))

    def __call__(self) -> None: ...


def _cancels(node: ast.expr) -> bool:
    node = _peel(node)
    if isinstance(node, (ast.List, ast.Tuple)):
        return any(_cancels(entry) for entry in node.elts)
    if isinstance(node, ast.Call) and len(node.args) == 1:  # simplify(a - a)
        return _cancels(node.args[0])
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.Sub, ast.Div)):
        return False
    return _dump(node.left) == _dump(node.right)


def _called(node: ast.expr) -> str:
    """Return the name of the function or method whose result, or part of it, a node is."""
    while isinstance(node, ast.Subscript):
        node = _peel(node.value)
    function = node.func if isinstance(node, ast.Call) else None
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _operations(node: ast.expr) -> Counter[str]:
    """Count the operators, functions, attributes and indices of an expression without copies."""
    found: Counter[str] = Counter()
    for part in ast.walk(Plain().visit(copy.deepcopy(node))):
        if isinstance(part, ast.operator | ast.unaryop | ast.cmpop):
            found[type(part).__name__] += 1
        elif isinstance(part, ast.Call | ast.Attribute):
            found[getattr(part, "attr", "") or _called(part)] += 1
        elif isinstance(part, ast.Subscript):
            found[ast.unparse(part.slice)] += 1
    return found


def _constant(node: ast.expr) -> bool:
    node = _peel(node)
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left), _number(node.right)
        if isinstance(node.op, ast.Mult) and 0 in (left, right):
            return True
        if isinstance(node.op, ast.Pow) and right == 0:
            return True
        return all(_number(x) is not None or _constant(x) for x in (node.left, node.right))
    if not isinstance(node, ast.Call):
        return False
    name, arguments = _called(node), [*node.args, *(k.value for k in node.keywords)]
    if name in ("clip", "clamp"):
        return len(arguments) > 1 and _dump(arguments[-1]) == _dump(arguments[-2])
    if name in ("full", "full_like"):
        return len(arguments) > 1 and _number(arguments[1]) is not None
    return name in FILLS


def _operands(node: ast.expr, functions: set[str]) -> list[str]:
    """Return the arguments, and the object, of a call of one of these functions or methods."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute) and function.attr in functions:
        return [_dump(x) for x in (function.value, *node.args)]  # type: ignore[attr-defined]
    if isinstance(function, ast.Name) and function.id in functions:
        return [_dump(x) for x in node.args]  # type: ignore[attr-defined]
    return []


class Scope(ast.NodeTransformer):
    """The expressions assigned to names at a place in a cell or a function, with versions."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self.versions: Counter[str] = Counter()
        self.values: dict[str, ast.expr] = {}  # name@version -> the expression assigned to it

    def read(self, body: list[ast.stmt], call: ast.Call | None = None) -> None:
        """Follow the statements up to the one that contains the call, and into it."""
        for statement in body:
            path = _path(statement, call)
            if not path:
                self._follow(statement)
                continue
            blocks = ("body", "orelse", "finalbody", "handlers")
            bodies = [getattr(statement, block, []) for block in blocks]
            inner = [b for b in bodies if isinstance(b, list) and any(_path(s, call) for s in b)]
            if isinstance(statement, ast.For):
                self._bind_all(statement)  # in an earlier iteration
                self._loop(statement.target, statement.iter)
            for node in path:  # a comprehension that contains the call
                for generator in getattr(node, "generators", []):
                    self._loop(generator.target, generator.iter)
            for block in inner:
                self.read(block, call)
            return

    def _follow(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign):
            pairs = [p for target in statement.targets for p in _pairs(target, statement.value)]
            new = [(name, self.expand(node)) for name, node in pairs]
            self._bind_all(statement)
            for name, node in new:
                self.values[f"{name}@{self.versions[name]}"] = node
            return
        self._bind_all(statement)
        if isinstance(statement, ast.FunctionDef) and isinstance(statement.body[-1], ast.Return):
            result = statement.body[-1].value
            if len(statement.body) == 1 and result is not None:
                value = ast.Lambda(args=statement.args, body=result)
                self.values[f"{statement.name}@{self.versions[statement.name]}"] = value

    def _bind_all(self, statement: ast.stmt) -> None:
        for name in _bound(statement) | _touched(statement):
            self.versions[name] += 1

    def _loop(self, target: ast.expr, iterable: ast.expr) -> None:
        value = self.expand(iterable)
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self.versions[node.id] += 1
                each = ast.Subscript(value=value, slice=ast.Name(id=f"turn@{node.id}"))
                self.values[f"{node.id}@{self.versions[node.id]}"] = each

    def expand(self, node: ast.expr) -> ast.expr:
        """Return an expression with each name replaced by the expression assigned to it."""
        return self.visit(copy.deepcopy(node))

    def visit_Name(self, node: ast.Name) -> ast.expr:  # noqa: D102, N802
        if not self.versions[node.id]:
            return node
        name = f"{node.id}@{self.versions[node.id]}"
        value = self.values.get(name)
        # A literal, such as the empty list that a loop fills, is not a computation.
        if value is None or not any(isinstance(n, ast.Name) for n in ast.walk(value)):
            return ast.Name(id=name)
        return value

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:  # noqa: D102, N802
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:  # noqa: D102, N802
        if self._draws(node):
            return ast.Name(id=f"random@{node.lineno}:{node.col_offset}")
        self.generic_visit(node)
        function, operands = node.func, node.args
        if isinstance(function, ast.Attribute) and function.attr in OPERATORS:
            if len(operands) == 1:  # x.mul(2)
                operands = [function.value, *operands]
            if len(operands) == 2:
                left, right = operands
                return ast.BinOp(left=left, op=OPERATORS[function.attr](), right=right)
        return node

    def _draws(self, node: ast.Call) -> bool:
        """Return whether a call uses a random generator, so that its values differ."""
        arguments = [*node.args, *(k.value for k in node.keywords)]
        if any(isinstance(self._value(x), GENERATORS) for x in arguments):
            return True
        if not isinstance(node.func, ast.Attribute):
            return False
        owner = self._value(node.func.value)
        if owner in (np, torch):
            return node.func.attr.startswith("rand")
        seed = node.func.attr in ("default_rng", "RandomState", "seed", "Generator", "SeedSequence")
        return isinstance(owner, GENERATORS) or (owner in (np.random, random) and not seed)

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
        value = self.names.get(node.id) if isinstance(node, ast.Name) else None
        return value if isinstance(value, (ModuleType, *GENERATORS)) else None


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names of an assignment, each with its part of the value."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, (ast.Tuple, ast.List)):
        matches = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
        for i, part in enumerate(target.elts):
            each = ast.Subscript(value=value, slice=ast.Constant(i))
            yield from _pairs(part, value.elts[i] if matches else each)  # type: ignore[attr-defined]


def _undoes_itself(node: Any) -> tuple[str, ast.expr | None]:
    """Return the name and the operand of a function that undoes itself, such as a transpose."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return "negative", node.operand
    if isinstance(node, ast.Attribute):
        return INVOLUTIONS.get(node.attr, ""), node.value
    if not isinstance(node, ast.Call) or _called(node) not in INVOLUTIONS:
        return "", None
    parts = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
    operand = next((x for x in parts if any(isinstance(n, ast.Name) for n in ast.walk(x))), None)
    axes = [ast.unparse(x) for x in (*node.args, *node.keywords) if x is not operand]
    return " ".join([INVOLUTIONS[_called(node)], *axes]), operand


class Plain(ast.NodeTransformer):
    """Takes copies out of an expression, at any depth."""

    def visit(self, node: ast.AST) -> Any:  # noqa: D102
        return self.generic_visit(_peel(node) if isinstance(node, ast.expr) else node)


def _peel(node: Any) -> Any:
    """Remove operations that return their operand's value: copies, + 0, [:], inv(inv(x))."""
    while True:
        name, operand = _undoes_itself(node)
        if name and operand is not None:
            again, inner = _undoes_itself(_peel(operand))
            if again != name or inner is None:
                return node
            node = inner
            continue
        function = node.func if isinstance(node, ast.Call) else None
        if isinstance(function, ast.Attribute):
            if function.attr not in COPIES:
                return node
            if function.attr in METHODS or not node.args:
                node = function.value  # x.clone()
            else:
                node = node.args[0]  # np.array(x)
        elif isinstance(function, ast.Lambda):  # a function of the cell that returns its argument
            names, result = [a.arg for a in function.args.args], _peel(function.body)
            if getattr(result, "id", None) not in names[: len(node.args)]:
                return node
            node = node.args[names.index(result.id)]
        elif isinstance(function, ast.Name):
            if function.id not in COPIES or len(node.args) != 1:
                return node
            node = node.args[0]
        elif isinstance(node, ast.BinOp) and type(node.op) in NEUTRAL:
            neutral = NEUTRAL[type(node.op)]
            if _number(node.right) == neutral:
                node = node.left
            elif _number(node.left) == neutral and isinstance(node.op, (ast.Add, ast.Mult)):
                node = node.right
            else:
                return node
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
            node = node.operand
        elif isinstance(node, ast.Subscript) and ast.unparse(node.slice) in (":", "..."):
            node = node.value
        else:
            return node


def _dump(node: Any) -> str:
    return ast.dump(_peel(node))


def _number(node: ast.expr) -> float | None:
    """Return the value of a literal, a signed literal, or arithmetic with literals; else None."""
    kinds = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    if not all(isinstance(n, kinds) for n in ast.walk(node)):
        return None
    try:
        value = eval(compile(ast.unparse(node), "", "eval"), {"__builtins__": {}})
    except (ArithmeticError, TypeError):
        return None
    return float(value) if isinstance(value, (int, float)) else None


def _source(frame: FrameType | None) -> str:
    """Return the source of the file or the notebook cell that a frame runs."""
    if frame is None:
        return ""
    return "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))


@lru_cache(maxsize=256)
def _parse(source: str) -> ast.Module | None:
    try:
        return ast.parse(source) if source else None
    except SyntaxError:  # the file has changed since it was loaded
        return None


@lru_cache(maxsize=256)
def _scope(source: str) -> tuple[set[str], Scope]:
    """Return the names that a file or a cell assigns, and their expressions at its end."""
    scope, tree = Scope({}), _parse(source) or ast.Module(body=[], type_ignores=[])
    scope.read(tree.body)
    return set().union(*map(_bound, tree.body)), scope


def _find_call(
    tree: ast.Module, frame: FrameType, function: Callable, names: dict[str, Any]
) -> ast.Call | None:
    """Find the call of a function, perhaps by another name, that the frame executes."""
    position = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    for node in ast.walk(tree):
        if position is None or not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        value = names.get(called)
        value = value.func if isinstance(value, partial) else value
        matches = called == function.__name__ or value is function
        if matches and (node.end_lineno, node.end_col_offset) == (position[1], position[3]):
            return node
    return None


def _path(tree: ast.AST, node: ast.AST | None) -> list[ast.AST]:
    """Return the nodes from a tree down to one of its nodes; empty if it is not in the tree."""
    if tree is node:
        return [tree]
    for child in ast.iter_child_nodes(tree):
        if found := _path(child, node):
            return [tree, *found]
    return []


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement assigns, at any depth."""
    stores = {
        n.id for n in ast.walk(statement)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }  # fmt: skip
    return stores | ({statement.name} if hasattr(statement, "name") else set())


def _touched(statement: ast.stmt) -> set[str]:
    """Return the names whose values a statement may change: x[0] = 1, train(x), x.sort()."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return set()
    names: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func)
            if called not in PRINTING and not called.startswith("claims."):
                names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return names
