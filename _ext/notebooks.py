"""Write each chapter as a plain notebook for JupyterLab, Colab and GitHub, in the same build.

Numbers of theorems, equations and figures, references and citations become text, because these
programs do not know Sphinx's syntax. Outputs and solutions are left out; a set-up cell is added.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path
from string import Template

from docutils import nodes
from sphinx.errors import ExtensionError

from book import ROOT, WHEEL, chapters, repository
from derived_attention import __version__
from labels import code_label

# A notebook's first code cell. It uses no syntax of IPython, and leaves no file behind.
SETUP = """\
# Set-up: installs the book's package if it is missing. Your torch and numpy stay as they are.
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

needed = \"\"\"derived_attention $modules\"\"\"
missing = [name for name in needed.split() if not importlib.util.find_spec(name)]
if missing:
    here = Path.cwd()
    marks = ("pyproject.toml", "src/derived_attention")
    checkouts = [p for p in (here, *here.parents) if all((p / m).exists() for m in marks)]
    wheels = sorted(here.glob("derived_attention-*-any.whl"), key=lambda p: p.stat().st_mtime)
    if checkouts:
        source = ["--editable", f"{checkouts[0]}[$extras]"]
    elif wheels:
        source = [f"derived-attention[$extras] @ {wheels[-1].as_uri()}"]
    else:
        $otherwise
    print(f"Installing {source[-1]}: a minute or two.", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    kept = [name for name in ("torch", "numpy") if importlib.util.find_spec(name)]
    kept = [f"{name}=={importlib.metadata.version(name)}" for name in kept]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run([*pip, *source, *kept], **both, text=True)
    if done.returncode:
        said = "\\n".join(done.stdout.strip().splitlines()[-12:])
        raise RuntimeError(f"pip could not install the package. Is there a network?\\n{said}")
    sys.path[:0] = [str(p / "src") for p in checkouts[:1]]  # Python looks for links when it starts
    importlib.invalidate_caches()

import derived_attention

if derived_attention.__version__ != "$version":
    print(f"This notebook is for version $version, not {derived_attention.__version__}: if a cell")
    print("fails, run %pip uninstall -y derived-attention, restart, and run this cell again.")"""
# The modules that the package's extra "book" installs, by the names under which they are imported.
MODULES = """IPython PIL aeon cvxpy cycler executing filelock joblib matplotlib pandas
    pycocotools pywt safetensors scipy sklearn sympy tqdm"""
# The modules of the extra "plugs"; only notebooks that contain PLUG need them.
PLUGS, PLUG = "safetensors timm torchvision transformers", "plugs.equip("
NOWHERE = """\
raise RuntimeError(
            f"{missing[0]} is missing: put $wheel "
            "beside this notebook (it is in the page's download menu, and in the folder notebooks/ "
            "of the book's zip) and run this cell again; or run make lab in a checkout."
        )"""
SKIPPED = ("target", "comment", "index", "substitution_definition", "meta", "topic", "label")
SKIPPED += ("solution_node", "solution_start_node", "solution_end_node", "system_message")
SKIPPED += ("image", "raw")  # for the HTML alone; cells draw the figures


def name_cells(cells: list[dict]) -> None:
    """Give each cell a hash of its content as its id, so that a new cell changes no other id.

    The second of two equal cells gets the suffix ``-2``, and so on.
    """
    seen: Counter[str] = Counter()
    for cell in cells:
        text = cell["cell_type"] + "".join(cell["source"])
        name = hashlib.sha256(text.encode()).hexdigest()[:12]
        seen[name] += 1
        cell["id"] = name if seen[name] == 1 else f"{name}-{seen[name]}"


class Writer:
    """Turn one resolved doctree into notebook cells."""

    def __init__(self, app, doc: str):
        self.app, self.doc, self.level = app, doc, 0
        self.cells: list[dict] = []
        self.text: list[str] = []

    # Cells.

    def notebook(self) -> dict:
        """Return the whole notebook."""
        self.blocks(self.app.env.get_and_resolve_doctree(self.doc, self.app.builder))
        self.flush()
        first = next(i for i, cell in enumerate(self.cells) if cell["cell_type"] == "code")
        code = [cell for cell in self.cells if cell["cell_type"] == "code"]
        source = "".join(line for cell in code for line in cell["source"])
        self.cells.insert(first, code_cell(set_up(plugs=PLUG in source), {}))
        name_cells(self.cells)
        return {
            "cells": self.cells,
            "metadata": {
                **({"accelerator": "GPU"} if "run.device" in source else {}),
                "colab": {"provenance": []},
                "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
                "language_info": {"name": "python"},
            },
            "nbformat": 4,
            "nbformat_minor": 5,
        }

    def flush(self) -> None:
        """End the current Markdown cell."""
        source = "\n\n".join(part for part in self.text if part.strip())
        self.text = []
        if source:
            self.cells.append({"cell_type": "markdown", "metadata": {}, "source": lines(source)})

    def blocks(self, node) -> None:
        """Write the children of a section or of the document."""
        for child in node.children:
            kind = type(child).__name__
            if kind == "section":
                self.flush()
                self.level += 1
                self.blocks(child)
                self.level -= 1
            elif isinstance(child, nodes.title):
                self.text.append(f"{'#' * self.level} {self.number(node)}{self.inline(child)}")
            elif isinstance(child, nodes.Element) and "cell" in child.get("classes", []):
                self.code(child)
            else:
                self.text.append(self.block(child))

    def code(self, cell) -> None:
        """Write a code cell; a figure's caption follows it as text.

        A hidden cell becomes a form: Colab shows its title instead of the code.
        """
        self.flush()
        source = next(n for n in cell.findall(nodes.literal_block)).astext()
        metadata: dict = {}
        if "hide-input" in cell.get("cell_metadata", {}).get("tags", []):
            label = code_label(self.app, self.doc, cell) or "code"
            source = f"#@title {label}\n{source}"
            metadata = {"cellView": "form", "jupyter": {"source_hidden": True}}
        self.cells.append(code_cell(source, metadata))
        for figure in cell.findall(nodes.figure):
            for caption in figure.findall(nodes.caption):
                self.text.append(
                    f"*{self.label(figure, 'figure', 'Fig.')}.* {self.inline(caption)}"
                )

    # Blocks.

    def block(self, node) -> str:
        """Return one block as Markdown."""
        kind = type(node).__name__
        if kind in SKIPPED or isinstance(node, nodes.Invisible):
            return ""
        method = getattr(self, f"block_{kind}", None)
        if method:
            return method(node)
        if isinstance(node, nodes.Inline) or isinstance(node, nodes.TextElement):
            return self.inline(node)
        if "realtype" in node.attributes or node.get("type") == "exercise":
            return self.theorem(node)
        if isinstance(node, nodes.Admonition):
            return quote(self.body(node))
        return self.body(node)

    def body(self, node) -> str:
        """Return all children, separated by blank lines."""
        parts = (self.block(child) for child in node.children)
        return "\n\n".join(part for part in parts if part.strip())

    def block_container(self, node) -> str:
        """Return a card or any other box."""
        if node.get("design_component") == "card-title":
            return f"**{self.inline(node)}**"
        return self.body(node)

    def block_paragraph(self, node) -> str:
        """Return a paragraph, without the dots that separate measured times on the page."""
        return re.sub(r"(^[\s·]+|[\s·]+$)", "", self.inline(node))

    def block_dropdown_main(self, node) -> str:
        """Return a box that opens on a click, as the HTML element ``details``."""
        title, *content = node.children
        inner = "\n\n".join(filter(None, (self.block(child) for child in content)))
        return f"<details><summary>{self.inline(title)}</summary>\n\n{inner}\n\n</details>"

    def block_title(self, node) -> str:
        """Return the title of a box, or an unnumbered heading."""
        return f"**{self.inline(node)}**"

    block_rubric = block_title

    def block_math_block(self, node) -> str:
        """Return a displayed formula with its number."""
        number = self.label(node, "displaymath", "").strip()
        tag = f" \\tag{{{number}}}" if number else ""
        return f"$$\n{node.astext().strip()}{tag}\n$$"

    def block_literal_block(self, node) -> str:
        """Return code that is not run."""
        return f"```{node.get('language', '')}\n{node.astext()}\n```"

    def block_bullet_list(self, node) -> str:
        """Return a bullet list."""
        return "\n".join(indent(self.body(item), "- ") for item in node.children)

    def block_enumerated_list(self, node) -> str:
        """Return a numbered list."""
        start = node.get("start", 1)
        items = enumerate(node.children, start)
        return "\n".join(indent(self.body(item), f"{number}. ") for number, item in items)

    def block_definition_list(self, node) -> str:
        """Return terms and their definitions."""
        parts = []
        for item in node.children:
            term, *definitions = item.children
            text = " ".join(self.body(d) for d in definitions if isinstance(d, nodes.definition))
            parts.append(f"- **{self.inline(term)}**: {text}")
        return "\n".join(parts)

    def block_block_quote(self, node) -> str:
        """Return a quotation."""
        return quote(self.body(node))

    def block_table(self, node) -> str:
        """Return a pipe table."""
        rows = [
            [" ".join(self.body(entry).split()).replace("|", "\\vert ") for entry in row.children]
            for row in node.findall(nodes.row)
        ]
        rows.insert(1, ["---"] * len(rows[0]))
        title = [f"**{self.inline(t)}**\n" for t in node.children if isinstance(t, nodes.title)]
        return "\n".join([*title, *(f"| {' | '.join(row)} |" for row in rows)])

    def block_proof_node(self, node) -> str:
        """Return a proof without the box around it."""
        return "\n\n".join(self.body(box) for box in node.children)

    def theorem(self, node) -> str:
        """Return a numbered box of sphinx-proof or sphinx-exercise."""
        kind = node.get("realtype", node.get("type"))
        title, *rest = node.children
        name = re.sub(rf"^{kind}", "", self.inline(title).strip(), flags=re.I).strip(" ()")
        head = self.label(node, kind, kind.capitalize()) + (f" ({name})" if name else "")
        body = "\n\n".join(filter(None, (self.block(child) for child in rest)))
        return quote(f"**{head}.**{' ' if body[:1].isalpha() else chr(10) * 2}{body}")

    # Inline text.

    def inline(self, node) -> str:
        """Return the children of a node as one line of Markdown."""
        return "".join(self.span(child) for child in node.children)

    def span(self, node) -> str:
        """Return one inline node as Markdown."""
        if isinstance(node, nodes.Text):
            return re.sub(r"([\\*`$<])", r"\\\1", node.astext())
        if isinstance(node, nodes.Invisible) or type(node).__name__ in SKIPPED:
            return ""
        if isinstance(node, nodes.math):
            return f"${node.astext().strip()}$"
        if isinstance(node, nodes.literal):
            return f"`{node.astext()}`"
        if isinstance(node, nodes.reference):
            return self.reference(node)
        if "da-measured" in node.get("classes", []):  # differs from build to build
            return ""
        text = self.inline(node)
        if isinstance(node, nodes.strong):
            return f"**{text}**"
        if isinstance(node, nodes.emphasis):
            return f"*{text}*"
        return text

    def reference(self, node) -> str:
        """Return a link to the web or to another notebook; other links become plain text."""
        text, uri = self.inline(node), node.get("refuri", "")
        if re.match(r"https?:", uri):
            return f"[{text}]({uri})"
        name = r"(?:\d\d|[A-Z]|audit)_\w+|positions|language_model"
        page = re.match(rf"(?:\.\./book/)?({name})\.html", uri)
        return f"[{text}]({page[1]}.ipynb)" if page else text

    # Numbers.

    def number(self, section) -> str:
        """Return a section's number and a space."""
        numbers = self.app.env.toc_secnumbers.get(self.doc, {})
        anchor = "" if self.level == 1 else f"#{section['ids'][0]}"
        number = numbers.get(anchor)
        return f"{'.'.join(map(str, number))}. " if number else ""

    def label(self, node, kind: str, name: str) -> str:
        """Return a name with its number, such as "Theorem 1.2", or without if there is none."""
        numbers = self.app.env.toc_fignumbers.get(self.doc, {}).get(kind, {})
        found = [numbers[i] for i in node["ids"] if i in numbers]
        return f"{name} {'.'.join(map(str, found[0]))}" if found else name


def set_up(plugs: bool = False) -> str:
    """Return the set-up cell, which without a checkout or wheel uses Git or PyPI, or fails."""
    url, _ = repository(committed=True)
    extras, modules = ("book,plugs", f"{MODULES} {PLUGS}") if plugs else ("book", MODULES)
    otherwise = Template(NOWHERE).substitute(wheel=WHEEL)
    if url:
        otherwise = f'source = ["derived-attention[{extras}] @ git+{url}"]'
    elif own_settings()["on-package-index"]:
        otherwise = f'source = ["derived-attention[{extras}]=={__version__}"]'
    values = {"modules": modules, "version": __version__, "otherwise": otherwise}
    return Template(SETUP).substitute(values, extras=extras)


def own_settings() -> dict:
    """Return the book's own settings in pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["tool"]["derived-attention"]


def code_cell(source: str, metadata: dict) -> dict:
    """Return a code cell without outputs."""
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": metadata,
        "outputs": [],
        "source": lines(source),
    }


def lines(text: str) -> list[str]:
    """Split text as notebooks store it."""
    return text.splitlines(keepends=True)


def quote(text: str) -> str:
    """Return text as a block quotation."""
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def indent(text: str, mark: str) -> str:
    """Return a list item: its first line after the mark, the others indented."""
    first, *others = text.splitlines() or [""]
    return "\n".join([mark + first, *(" " * len(mark) + line if line else "" for line in others)])


def write_notebooks(app, error) -> None:
    """Write a notebook for each chapter with code, beside the HTML, and copy all into the HTML."""
    if error is not None or app.builder.name != "html":
        return
    folder = Path(app.outdir).parent / "notebooks"
    folder.mkdir(exist_ok=True)
    names = set()
    for doc in chapters(app):
        if getattr(app.env, "nb_metadata", {}).get(doc, {}).get("exec_data") is None:
            continue
        path = folder / f"{doc.rpartition('/')[2]}.ipynb"
        names.add(path.name)
        text = json.dumps(Writer(app, doc).notebook(), indent=1, ensure_ascii=False) + "\n"
        if not path.exists() or path.read_text("utf8") != text:
            path.write_text(text, "utf8")
    for path in folder.glob("*.ipynb"):
        if path.name not in names:
            path.unlink()
    shutil.copytree(folder, Path(app.outdir) / "notebooks", dirs_exist_ok=True)  # for download
    write_wheel(Path(app.outdir) / "notebooks")


def write_wheel(folder: Path) -> None:
    """Build the package's wheel, which the notebooks' set-up cell installs, into `folder`.

    The build needs no network, and the same sources give the same bytes.
    """
    with tempfile.TemporaryDirectory() as name:
        build = f"from hatchling import build; build.build_wheel({name!r})"
        command = [sys.executable, "-c", build]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise ExtensionError(f"the package's wheel cannot be built:\n{done.stderr[-2000:]}")
        for old in folder.glob("*.whl"):
            if old.name != WHEEL:
                old.unlink()
        wheel = (Path(name) / WHEEL).read_bytes()
        if not (folder / WHEEL).exists() or (folder / WHEEL).read_bytes() != wheel:
            (folder / WHEEL).write_bytes(wheel)


def setup(app):
    """Write the notebooks at the end of each build."""
    app.connect("build-finished", write_notebooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
