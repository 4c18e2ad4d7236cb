"""Tests of what code depends on in the package: imported modules, and their code."""

from pathlib import Path

import pytest

from derived_book.training import code_digest
from derived_book.training.code_digest import Sources

FILES = {
    "derived_attention/__init__.py": "from derived_attention.registry import PUBLIC\n",
    "derived_attention/softmax.py": "from derived_attention import helper\n\ndef softmax(): ...\n",
    "derived_attention/mixture.py": "def mixture_attention(): ...\n",
    "derived_attention/registry.py": "PUBLIC = ...\n",
    "derived_attention/helper.py": "VALUE = 1\n",
    "derived_attention/alone.py": "import math\n",
    "derived_book/__init__.py": "",
    "derived_book/plot.py": "from derived_attention.registry import LOOKS\nMAIN = ('softmax',)\n",
    "derived_book/sliders.py": "from derived_book.plot import COLORS\n",
}
PUBLIC = {
    "softmax_attention": "derived_attention.softmax",
    "mixture_attention": "derived_attention.mixture",
}
LOOKS = {"softmax": ("Softmax", "blue"), "mgk": ("MGK", "red")}
EVERYTHING = {"", ".registry", ".softmax", ".mixture", ".helper"}


def package(folder, looks=LOOKS, **changes):
    """Return the `Sources` of a new package; `changes` replace texts of modules."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(changes.get(path.stem, text))
    return Sources(folder, PUBLIC, looks)


def short(module):
    """Return "book.plot" for a module of the book, ".softmax" for one of the library."""
    return module.removeprefix("derived_attention").removeprefix("derived_")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import numpy, math", set()),
        ("import derived_attention.alone", {"", ".alone"}),
        ("from derived_attention import alone", {"", ".alone"}),
        ("from derived_attention.alone import *", {"", ".alone"}),
        ("def f():\n    from derived_attention.alone import x", {"", ".alone"}),
        ("from derived_attention import __version__", {""}),
        ("from derived_attention.softmax import softmax_attention", {"", ".softmax", ".helper"}),
        ("from derived_attention import softmax_attention", {"", ".softmax", ".helper"}),
        ("from derived_attention import mixture_attention as f", {"", ".mixture"}),
        ("from derived_book import sliders", {"", "book", "book.sliders", "book.plot"}),
        ("from derived_attention import get_attention", EVERYTHING),
        ("from derived_attention import *", EVERYTHING),
        ("import derived_attention as da", EVERYTHING),
        ("from derived_attention.registry import LOOKS", EVERYTHING),
        (
            "from derived_book import plot\nimport derived_attention as d",
            EVERYTHING | {"book", "book.plot"},
        ),
    ],
)
def test_imports_are_followed_through_the_package(tmp_path, code, expected):
    found = package(tmp_path)
    reached = found.dependencies(found.find_imports(code))
    assert {short(name) for name in reached} == expected


def test_only_code_counts(tmp_path):
    def digest(helper):
        found = package(tmp_path, helper=helper)
        return found.digest(found.modules("derived_attention.helper"))

    plain = digest("def f(x):\n    return 'text', x\n")
    assert plain == digest('"""Help."""\n\ndef f(x):  # this\n    """Say."""\n    return "text", x')
    assert plain != digest("def f(x):\n    return 'other', x\n")
    assert digest('"""Help."""') == digest("")


def test_a_figure_depends_on_the_looks_of_the_mechanisms_it_names(tmp_path):
    def digest(page, looks=LOOKS, **changes):
        found = package(tmp_path, looks, **changes)
        return found.digest(found.find_imports(page), page)

    page = "from derived_book import sliders\nCOLORS['mgk']"
    before = digest(page)
    assert before == digest(page, LOOKS | {"new": ("New", "green")}, registry="PUBLIC = 2\n")
    assert before != digest(page, LOOKS | {"mgk": ("MGK", "green")})
    assert before != digest(page, LOOKS | {"softmax": ("Softmax", "green")}), "plot.py uses softmax"
    other = page.replace("mgk", "linear")
    assert digest(other) == digest(other, LOOKS | {"mgk": ("MGK", "green")})
    whole = page + "\nfrom derived_attention import list_attentions"
    assert digest(whole) != digest(whole, registry="PUBLIC = 2\n")


def test_of_this_package_every_module_is_known():
    folder = Path(code_digest.__file__).parents[2]
    found = Sources(folder)
    assert len(found.texts) == len(list(folder.rglob("*.py")))
    assert set(code_digest.ROOTS) <= set(found.texts)
    for name in found.texts:
        assert name in found.dependencies(found.modules(name))
