"""Begin an attention of your own: ``make new NAME=huber``, or ``python _ext/new.py huber``.

Writes a page, a folder of the package with the formula, the fast form and an entry for the
registry, and tests. All of them say "not written yet" until you have filled them in; chapter 18
goes through the steps. No file that exists is changed.
"""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path

from derived_attention.registry import MECHANISMS, PUBLIC

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/derived_attention/{name}"
FILES = {
    f"{PACKAGE}/__init__.py": '"""{label} attention."""\n',
    f"{PACKAGE}/formula.py": '''"""{label} attention: the formula, slow and right."""

from __future__ import annotations

from torch import Tensor

from derived_attention.common.convention import in_full, mechanism
from derived_attention.common.masks import Mask


@mechanism
@in_full
def {name}_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
) -> Tensor:
    """H (..., N, Dv) of q (..., N, D), k (..., M, D), v (..., M, Dv), in three to eight lines."""
    raise NotImplementedError("not written yet: the formula, in {name}/formula.py")
''',
    f"{PACKAGE}/core.py": '''"""{label} attention without the (N, M) matrix."""

from __future__ import annotations

from torch import Tensor

from derived_attention.common.convention import mechanism
from derived_attention.common.masks import Mask


@mechanism
def {name}_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
) -> Tensor:
    """{label} attention: what equation it implements, and what it costs."""
    raise NotImplementedError("not written yet: the fast form, in {name}/core.py")
''',
    f"{PACKAGE}/entry.py": '''"""{label} attention in the registry.

`register` enters it until Python ends. To keep it, give `MECHANISMS` in `registry.py` an entry, and
`references.py` the formula.
"""

from __future__ import annotations

from derived_attention.common.checks import Mechanism
from derived_attention.{name}.core import {name}_attention
from derived_attention.{name}.formula import {name}_attention_reference
from derived_attention.registry import MECHANISMS, Entry


class Own(Entry):
    """An entry that has its functions, and does not look for them."""

    @property
    def fast(self) -> Mechanism:
        """The fast form."""
        return {name}_attention

    @property
    def reference(self) -> Mechanism:
        """The formula."""
        return {name}_attention_reference


# What else is true of it: any_mask, causal, averages, linear, ... `Entry` says what they mean.
ENTRY = Own("{label}", "#b4641e", 18, "")


def register() -> None:
    """Enter the mechanism into the registry."""
    MECHANISMS["{name}"] = ENTRY
''',
    "tests/test_{name}.py": '''"""{label} attention: its promises, and a theorem."""

import pytest

from derived_attention import check_mechanism
from derived_attention.testing.contract import PROMISES
from derived_attention.{name}.entry import ENTRY


@pytest.mark.parametrize("promise", PROMISES)
def test_it_keeps_its_promises(promise):
    report = check_mechanism(ENTRY, promises=[promise], verbose=False)
    assert report.passed, str(report)


def test_what_is_special_about_it():
    pytest.fail("not written yet: a test of your theorem, in tests/test_{name}.py")
''',
    "book/{name}.md": """---
file_format: mystnb
kernelspec:
  name: python3
  display_name: Python 3
---

# {label} attention

*Not written yet: one sentence that promises something.*

## The question

*Not written yet: what a mechanism that you know does badly.*

## Choose

*Not written yet: the primal, and the one thing that you changed.*

## Derive

*Not written yet: the weights, with the conditions that make them optimal.*

```{{code-cell}} ipython3
from derived_attention import check_mechanism
from derived_book import claims
from derived_attention.{name}.entry import ENTRY, register
```

## Prove

*Not written yet: a theorem with its hypotheses, its price, and a claim with a mutant.*

## From formula to GPU

*Not written yet: the step that removes the matrix, and the operations that it takes.*

## Check

The cell prints a line for each promise, and fails until all are kept.

```{{code-cell}} ipython3
assert check_mechanism(ENTRY).passed
register()
```

## Predict, then run

*Not written yet: the prediction and what would refute it, committed before the run.*

## Report

*Not written yet: what is decided, what is open, what went against you.*
""",
}


def begin(name: str, root: Path = ROOT) -> list[Path]:
    """Write the files of a mechanism under `root`; return their paths.

    Raises
    ------
    ValueError
        If the name is no name of a module, a keyword of Python, or taken.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,14}", name) or keyword.iskeyword(name):
        raise ValueError(
            f"NAME is {name!r}; expected lower-case letters, digits and _, a letter first, "
            "15 at most, and no keyword of Python"
        )
    package = root / PACKAGE.format(name=name)
    paths = {root / path.format(name=name): text for path, text in FILES.items()}
    names = {*MECHANISMS, *(x.removesuffix("_attention") for x in PUBLIC)}
    if name in names or any(x.exists() for x in (package, package.with_suffix(".py"), *paths)):
        raise ValueError(f"NAME is {name!r}, which is taken; expected the name of something new")
    label = name.replace("_", " ").capitalize()
    for path, text in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(in_order(text.format(name=name, label=label)), "utf8")
    return list(paths)


def in_order(text: str) -> str:
    """Sort the imports of the package, whose order depends on the name."""
    lines = text.splitlines(keepends=True)
    at = [i for i, line in enumerate(lines) if line.startswith("from derived_attention")]
    ordered = sorted((lines[i] for i in at), key=lambda line: line.split()[1])
    for i, line in zip(at, ordered, strict=True):
        lines[i] = line
    return "".join(lines)


def main(arguments: list[str]) -> int:
    """Begin the mechanism that the command line names, and say what comes next."""
    if len(arguments) != 1:
        print("Which name? make new NAME=huber", file=sys.stderr)
        return 2
    try:
        paths = begin(arguments[0])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print("Fill these in, in the order of chapter 18:")
    print("\n".join(f"  {path.relative_to(ROOT)}" for path in paths))
    print(f"Then: python -m pytest tests/test_{arguments[0]}.py, until it says nothing but dots.")
    print(f"To have the page in the book, add book/{arguments[0]} to _toc.yml.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
