"""Begin an attention of your own: ``make new NAME=huber``, or ``python _ext/new.py huber``.

Write the files of a mechanism: a page, a folder of the library with the fast form, and tests. Add a
formula to `formulas.py`, an entry to `registry.py` and types to `__init__.pyi`. The text "not
written yet" marks what you still have to fill in; chapter 18 explains the steps.
"""

from __future__ import annotations

import builtins
import keyword
import re
import sys
from pathlib import Path

from derived_attention import formulas
from derived_attention.registry import MECHANISMS, PUBLIC

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/derived_attention/{name}"
FILES = {
    f"{PACKAGE}/__init__.py": '"""{label} attention."""\n',
    f"{PACKAGE}/core.py": '''"""{label} attention without the (N, M) matrix."""

from __future__ import annotations

from torch import Tensor

from derived_attention import formulas
from derived_attention.common.convention import mechanism, reference_of
from derived_attention.common.masks import Mask


@mechanism(formula=formulas.{name})
def {name}_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
    """Return {label} attention; state here which equation it implements, and its cost."""
    raise NotImplementedError("not written yet: the fast form, in {name}/core.py")


{name}_attention_reference = reference_of({name}_attention)
''',
    "tests/test_{name}.py": '''"""Tests of {label} attention: its promises and a theorem."""

import pytest

from derived_attention import check_mechanism
from derived_attention.testing.contract import PROMISES


@pytest.mark.parametrize("promise", PROMISES)
def test_it_keeps_its_promises(promise):
    report = check_mechanism("{name}", promises=[promise], verbose=False)
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

*Not written yet: one sentence that states what the reader gains.*

## The question

*Not written yet: what a mechanism that you know does badly.*

## Choose

*Not written yet: the primal, and the one thing that you changed.*

## Derive

*Not written yet: the weights, with the conditions that make them optimal.*

```{{code-cell}} ipython3
from derived_attention import check_mechanism
from derived_book import claims
```

## Prove

*Not written yet: a theorem with its hypotheses, its price, and a claim with a mutant.*

## From formula to GPU

*Not written yet: the step that removes the matrix, and the operations that it takes.*

## Check

The cell prints a line for each promise, and fails until all are kept.

```{{code-cell}} ipython3
assert check_mechanism("{name}").passed
```

## Predict, then run

*Not written yet: the prediction and what would refute it, committed before the run.*

## Report

*Not written yet: what is decided, what is open, and which predictions failed.*
""",
}
TYPES = "{name}_attention: _Attention\n{name}_attention_reference: _Attention\n"
# Text to add to existing files, before the given line, or at the end if that is empty.
ADDED = {
    "src/derived_attention/__init__.pyi": ("", TYPES),
    "src/derived_attention/formulas.py": (
        "",
        '''

# --- {label} -------------------------------------------------------------


def {name}(q, k, v, mask, scale):
    """Return H (..., N, Dv), in three to eight lines."""
    raise NotImplementedError("not written yet: the formula, in formulas.py")
''',
    ),
    # `Entry` explains the other properties (any_mask, causal, averages, linear, ...).
    "src/derived_attention/registry.py": (
        "}\n# fmt: on\n",
        """    "{name}": Entry("{label}", "#b4641e", 18, "{name}.core.{name}_attention"),
""",
    ),
}


def begin(name: str, root: Path = ROOT) -> list[Path]:
    """Write the files of a mechanism under `root`; return their paths.

    Raises
    ------
    ValueError
        If `name` has another form, is a keyword of Python, or is taken.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,14}", name) or keyword.iskeyword(name):
        raise ValueError(
            f"NAME is {name!r}; expected lower-case letters, digits and _, beginning with a "
            "letter, 15 characters at most, and no keyword of Python"
        )
    package = root / PACKAGE.format(name=name)
    paths = {root / path.format(name=name): text for path, text in FILES.items()}
    names = {*MECHANISMS, *(x.removesuffix("_attention") for x in PUBLIC)}
    names |= {*vars(formulas), *vars(builtins)}  # a formula would hide what others use
    if name in names or any(x.exists() for x in (package, package.with_suffix(".py"), *paths)):
        raise ValueError(f"NAME is {name!r}, which is taken; expected a new name")
    words = {"name": name, "label": name.replace("_", " ").capitalize()}
    written = {path: text.format(**words) for path, text in paths.items()}
    for path, (before, text) in ADDED.items():
        old = (root / path).read_text("utf8")
        at = old.index(before) if before else len(old)
        written[root / path] = old[:at] + text.format(**words) + old[at:]
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf8")
    return list(written)


def main(arguments: list[str]) -> int:
    """Begin the mechanism named on the command line; print the next steps; return 2 on error."""
    if len(arguments) != 1:
        print("NAME is missing; expected a name, as in: make new NAME=huber", file=sys.stderr)
        return 2
    try:
        names = [f"  {path.relative_to(ROOT)}" for path in begin(arguments[0])]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print("Fill these in, in the order of chapter 18:", *names, sep="\n")
    print(f"Then run python -m pytest tests/test_{arguments[0]}.py until all tests pass.")
    print(f"To include the page in the book, add book/{arguments[0]} to _toc.yml.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
