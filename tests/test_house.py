"""The layout of the package: which module may import which, and how large a function may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src"
LIBRARY, BOOK = "derived_attention", "derived_book"
LISTS = ("registry", "references", "testing", "plugs")  # modules that may import every mechanism
LONGEST, MOST = 45, 8  # lines of a function, and its parameters besides those of PyTorch
SDPA = "q k v attn_mask dropout_p is_causal scale enable_gqa mask"  # `mask`: of forms
LAYER = (
    "embed_dim num_heads dropout bias add_bias_kv add_zero_attn kdim vdim batch_first device dtype "
    "query key value key_padding_mask need_weights attn_mask average_attn_weights is_causal"
)
THEIRS = {*SDPA.split(), *LAYER.split(), "self", "cls"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of every module below `src`, by its dotted name."""
    result = {}
    for file in sorted(ROOT.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        result[name] = ast.parse(file.read_text(encoding="utf-8"))
    return result


def imports(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield the module, the imported name (or "") and the alias of every import at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, "", alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "found a relative import; expected an absolute one"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                name = alias.asname or alias.name
                yield (inner, "", name) if inner in modules() else (node.module, alias.name, name)


@cache
def arrows() -> dict[str, set[str]]:
    """Return, for each module of `src`, those that it imports."""
    return {
        name: {target for target, _, _ in imports(tree) if target in modules() and target != name}
        for name, tree in modules().items()
    }


def circles() -> Iterator[list[str]]:
    """Yield each group of modules that import each other, even indirectly."""
    reach = {name: reachable(name) for name in modules()}
    seen: set[str] = set()
    for name in modules():
        group = [other for other in reach[name] if name in reach[other]]
        if group and name not in seen:
            seen.update(group)
            yield sorted(group)


def reachable(name: str) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = arrows()[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def forbidden(source: str, target: str) -> bool:
    """Return whether the rules forbid module `source` to import module `target`."""
    (package, *below), (other, *to) = source.split("."), target.split(".")
    if package != other:
        return package == LIBRARY
    if not below or not to:
        return False
    if package == BOOK:
        floors = {"training": 0, "tasks": 1}
        return to[0] != "runtime" and floors.get(below[0], 2) < floors.get(to[0], 2)
    if below[0] == "common":
        return to[0] not in ("common", "layer") and below[1:] != ["kernel_cases"]
    if below[0] in ("formulas", "layer"):
        return to[0] not in ("common", "softmax")
    if below[-1] == "triton" and to == [below[0], "core"]:
        return True
    return below[0] not in LISTS and to[0] in LISTS


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Yield the functions and methods of a module, except nested ones, with dotted names."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{x.name}", x) for x in node.body if isinstance(x, Function))


def length(function: Function) -> int:
    """Return the number of lines from ``def`` on, without the docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    text = function.body[0]
    assert text.end_lineno is not None
    return lines - (text.end_lineno - text.lineno + 1)


def parameters(function: Function) -> list[str]:
    """Return the parameters besides those of PyTorch's functions."""
    args = function.args
    return [x.arg for x in args.posonlyargs + args.args + args.kwonlyargs if x.arg not in THEIRS]


def is_kernel(function: Function) -> bool:
    return any("triton.jit" in ast.unparse(x) for x in function.decorator_list)


def is_public(name: str) -> bool:
    return all(not x.startswith("_") or x == "__init__" for x in name.split("."))


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of other modules of the package that a module uses."""
    aliases = {}
    for module, name, alias in imports(tree):
        if module in modules():
            if name.startswith("_") and not name.startswith("__"):
                yield f"{module}.{name}"
            if not name:
                aliases[alias] = module
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr[1] != "_":
            module = aliases.get(ast.unparse(node.value))
            if module is not None:
                yield f"{module}.{node.attr}"


def test_no_module_imports_itself_by_way_of_others():
    assert not list(circles())


def test_imports_go_down():
    wrong = [f"{a} → {b}" for a, targets in arrows().items() for b in targets if forbidden(a, b)]
    assert not wrong


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (f"{LIBRARY}.mixture.core", f"{BOOK}.training.fit", True),
        (f"{BOOK}.training.fit", f"{BOOK}.tasks.recall.loss", True),
        (f"{BOOK}.training.fit", f"{BOOK}.runtime", False),
        (f"{BOOK}.tasks.run", f"{BOOK}.plot", True),
        (f"{BOOK}.plot", f"{BOOK}.tasks.run", False),
        (f"{BOOK}.plot", f"{LIBRARY}.registry", False),
        (f"{LIBRARY}.common.blocks", f"{LIBRARY}.linear.core", True),
        (f"{LIBRARY}.layer", f"{LIBRARY}.linear.core", True),
        (f"{LIBRARY}.layer", f"{LIBRARY}.softmax.core", False),
        (f"{LIBRARY}.linear.core", f"{LIBRARY}.registry", True),
        (f"{LIBRARY}.linear.triton", f"{LIBRARY}.linear.core", True),
        (f"{LIBRARY}.linear.core", f"{LIBRARY}.linear.triton", False),
        (f"{LIBRARY}.linear.triton", f"{LIBRARY}.common.triton", False),
    ],
)
def test_the_rule_of_imports(source, target, expected):
    assert forbidden(source, target) is expected


def test_functions_are_short():
    wrong = {
        f"{module}.{name}": length(function)
        for module, tree in modules().items()
        if module.rpartition(".")[2] not in ("triton", "formulas")
        for name, function in functions(tree)
        if length(function) > LONGEST and name != "mechanism"  # it contains another function
    }
    assert not wrong


def test_public_functions_have_few_parameters():
    wrong = {
        f"{module}.{name}": len(parameters(function))
        for module, tree in modules().items()
        for name, function in functions(tree)
        if is_public(name) and not is_kernel(function) and len(parameters(function)) > MOST
        # Exceptions: keywords describe a refuted claim, a training run, a mechanism.
        if (module, name)
        not in {
            (f"{BOOK}.claims", "refuted"),
            (f"{BOOK}.training.fit", "fit"),
            (f"{LIBRARY}.common.convention", "mechanism"),
        }
    }
    assert not wrong


def test_private_names_stay_in_their_module():
    wrong = {m: names for m, tree in modules().items() if (names := sorted(private_names(tree)))}
    assert not wrong
