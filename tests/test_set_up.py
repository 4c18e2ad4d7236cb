"""The set-up cell of the notebooks: each way to find the package in an environment without it.

The environment is new and contains all packages of the test environment but this one and tqdm.
A server of the test replaces the package index, and records the names that pip requests.
"""

import os
import shutil
import subprocess
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from indexes import serving, wheel
from places import HTML, ROOT

import notebooks
from derived_attention import __version__

FIND = "\nprint('found in', derived_attention.__file__)"
USE = """
import torch, tqdm
from derived_attention import MultiheadAttention, list_attentions, softmax_attention
q = torch.randn(2, 4, 8)
assert softmax_attention(q, q, q).shape == q.shape and "mgk" in list_attentions()
"""
NOBODY = "http://127.0.0.1:9/simple"  # no server listens here


@pytest.fixture
def index():
    """Yield an index with version 99.0 of tqdm, and of packages that the cell must not install."""
    names = ("tqdm", "derived_attention", "torch", "numpy")
    with serving(simple=[wheel(name, "99.0") for name in names]) as server:
        yield server
    assert "derived_attention" not in server.asked, "pip requests a name that anybody can register"


class Machine:
    """A new environment, and an empty folder for a notebook."""

    def __init__(self, path: Path):
        self.folder, self.links, self.home = (path / name for name in ("a folder", "links", "home"))
        for folder in (self.folder, self.links, self.home):
            folder.mkdir()
        venv.create(path / "venv", with_pip=False, symlinks=True)
        self.site = next((path / "venv").glob("lib/python*/site-packages"))
        self.python = path / "venv" / "bin" / "python"
        self.paths = [self.links]
        for entry in Path(torch.__file__).parents[1].iterdir():
            if "derived_attention" not in entry.name and not entry.name.startswith("tqdm"):
                (self.links / entry.name).symlink_to(entry)

    def run(self, url=NOBODY, folder=None, use=USE, cell=None):
        """Run the cell, then `use`, as a reader would; return the completed process."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
        pip = {"NO_BUILD_ISOLATION": "0", "INDEX_URL": url, "RETRIES": "0", "NO_COMPILE": "1"}
        pip |= {"CONFIG_FILE": os.devnull, "NO_CACHE_DIR": "0"}
        settings = {f"PIP_{name}": value for name, value in pip.items()}
        settings |= {"PYTHONPATH": os.pathsep.join(map(str, self.paths)), "HOME": str(self.home)}
        before = sorted(self.folder.rglob("*"))
        command = [self.python, "-c", (cell or notebooks.set_up()) + FIND + use]
        how = {"cwd": folder or self.folder, "env": kept | settings}
        done = subprocess.run(command, **how, capture_output=True, text=True)
        assert sorted(self.folder.rglob("*")) == before, "the cell leaves files behind"
        return done

    def add_tqdm(self):
        """Add tqdm, the only dependency that is missing."""
        (self.links / "tqdm.py").write_text("")

    def installed(self):
        """Return the packages that pip has installed."""
        return {name.partition("-")[0] for name in os.listdir(self.site) if "dist-info" in name}


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    notebooks.write_wheel(folder)
    return folder


def checkout(folder: Path) -> Path:
    """Copy what an installation needs of a checkout, and return `folder`."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "notebooks").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def found(done) -> Path:
    """Return the path of the imported package; the cell must have printed just one line."""
    assert done.returncode == 0, done.stderr
    said, last = done.stdout.splitlines()
    assert said.startswith("Installing ") and said.endswith("a minute or two.") and not done.stderr
    return Path(last.removeprefix("found in "))


def test_installed_already_nothing_happens(machine, wheels, index):
    machine.add_tqdm()
    machine.paths.append(ROOT / "src")
    shutil.copy(wheels / notebooks.WHEEL, machine.folder)
    done = machine.run(f"{index.url}/simple", use="")
    assert done.returncode == 0 and not machine.installed() and not index.asked
    assert done.stdout == f"found in {ROOT / 'src' / 'derived_attention' / '__init__.py'}\n"


def test_another_version_that_is_installed_is_said(machine):
    machine.add_tqdm()
    machine.paths.append(ROOT / "src")
    cell = notebooks.set_up().replace(__version__, "77.0")
    assert f"is for version 77.0, not {__version__}" in machine.run(cell=cell, use="").stdout


def test_beside_a_checkout_that_is_installed_before_a_wheel(machine, wheels, index, tmp_path):
    root = checkout(tmp_path / "the repository")
    shutil.copy(wheels / notebooks.WHEEL, root / "notebooks")
    module = found(machine.run(f"{index.url}/simple", folder=root / "notebooks", use=""))
    assert module == root / "src" / "derived_attention" / "__init__.py"
    assert machine.installed() == {"derived_attention", "tqdm"} and index.asked == {"tqdm"}


def test_the_newest_wheel_beside_the_notebook(machine, wheels, index):
    older = machine.folder / "derived_attention-99.0-py3-none-any.whl"
    older.write_bytes(b"")
    os.utime(older, (0, 0))
    shutil.copy(wheels / notebooks.WHEEL, machine.folder)
    module = found(machine.run(f"{index.url}/simple"))
    assert module == machine.site / "derived_attention" / "__init__.py"
    assert machine.installed() == {"derived_attention", "tqdm"} and index.asked == {"tqdm"}


def test_a_wheel_needs_no_network_where_the_rest_is_there(machine, wheels):
    machine.add_tqdm()
    (machine.links / "tqdm-99.0.dist-info").mkdir()
    (machine.links / "tqdm-99.0.dist-info" / "METADATA").write_text("Name: tqdm\nVersion: 99.0\n")
    shutil.copy(wheels / notebooks.WHEEL, machine.folder)
    found(machine.run(use=""))
    assert machine.installed() == {"derived_attention"}


def test_what_the_core_alone_lacks_is_installed(machine, wheels, index):
    with zipfile.ZipFile(wheels / notebooks.WHEEL) as wheel:
        wheel.extractall(machine.site)
    shutil.copy(wheels / notebooks.WHEEL, machine.folder)
    found(machine.run(f"{index.url}/simple", use=""))
    assert "tqdm" in machine.installed() and index.asked == {"tqdm"}


def test_the_repository_where_it_is_set(machine, index, tmp_path, monkeypatch):
    root = checkout(tmp_path / "repository")
    name = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], [*name, "commit", "-qm", "All"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    url = f"file://localhost{root}"  # an older pip requires a host
    monkeypatch.setattr(notebooks, "repository", lambda committed: (url, "main"))
    module = found(machine.run(f"{index.url}/simple", use=""))
    assert module == machine.site / "derived_attention" / "__init__.py"
    assert index.asked == {"tqdm"}


def test_nowhere_one_sentence_says_what_to_do(machine, index):
    done = machine.run(f"{index.url}/simple")
    *_, last = done.stderr.strip().splitlines()
    assert done.returncode == 1 and not done.stdout and not index.asked
    assert last.startswith("RuntimeError: derived_attention is missing: put ")
    for words in (notebooks.WHEEL, "beside this notebook", "download menu", "make lab"):
        assert words in last


def test_an_installation_that_fails_raises_with_what_pip_says(machine, wheels):
    shutil.copy(wheels / notebooks.WHEEL, machine.folder)
    done = machine.run()
    assert done.returncode == 1 and "Is there a network?" in done.stderr
    assert "No matching distribution found for tqdm" in done.stderr.splitlines()[-1]


def test_no_other_torch_is_installed_whatever_wants_one(machine, wheels, index):
    shutil.copy(wheels / notebooks.WHEEL, machine.folder)
    index.wheels["simple"] |= [wheel("tqdm", "99.0", "Requires-Dist: torch>=90")]
    done = machine.run(f"{index.url}/simple")
    assert done.returncode == 1 and "conflict" in done.stderr and not machine.installed()


def test_the_package_index_is_asked_only_when_the_name_is_ours(monkeypatch):
    assert "derived-attention[book]==" not in notebooks.set_up()
    monkeypatch.setattr(notebooks, "own_settings", lambda: {"on-package-index": True})
    assert f'source = ["derived-attention[book]=={__version__}"]' in notebooks.set_up()


# The wheel


def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(wheels):
    files = {p for p in (ROOT / "src").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    with zipfile.ZipFile(wheels / notebooks.WHEEL) as wheel:
        names = {name for name in wheel.namelist() if "dist-info" not in name}
        assert names == {p.relative_to(ROOT / "src").as_posix() for p in files}
        for name in names:
            assert wheel.read(name) == (ROOT / "src" / name).read_bytes(), name


def test_the_wheel_of_the_same_sources_is_the_same_and_replaces_older_ones(wheels, tmp_path):
    (tmp_path / "derived_attention-0.0.1-py3-none-any.whl").write_bytes(b"")
    notebooks.write_wheel(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [notebooks.WHEEL]
    wheel = tmp_path / notebooks.WHEEL
    assert wheel.read_bytes() == (wheels / notebooks.WHEEL).read_bytes()
    os.utime(wheel, (0, 0))
    notebooks.write_wheel(tmp_path)
    assert wheel.stat().st_mtime == 0, "written although nothing has changed"


def test_the_book_offers_the_wheel_beside_its_notebooks(wheels):
    built = HTML / "notebooks" / notebooks.WHEEL
    assert built.read_bytes() == (wheels / notebooks.WHEEL).read_bytes()
    page = (HTML / "book" / "02_duality.html").read_text("utf8")
    assert f'href="../notebooks/{notebooks.WHEEL}"' in page
