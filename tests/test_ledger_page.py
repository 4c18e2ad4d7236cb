"""A book by others has a ledger and errata: the example of the page on claims, built."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "book" / "C_claims.md").read_text("utf8")
BLOCK = re.compile(r"^(`{3,})\{code-block\} (\w+)\n:caption: `(\S+)`\n(.*?)^\1$", re.S | re.M)
HEAD = "---\nfile_format: mystnb\nkernelspec: {name: python3}\n---\n\n# A page\n\n"
END = "this build has ended\n"
BUILDS = f"""
import pathlib, shutil, sys
from jupyter_book.cli.main import main
folder, *pages = sys.argv[1:]
for text in [None, *pages]:
    if text:
        pathlib.Path(folder, "primes.md").write_text(text, "utf8")
    try:
        main(["build", "-W", folder], standalone_mode=False)
        assert not text
        shutil.copytree(folder + "/_build/html", folder + "/built", dirs_exist_ok=True)
    except RuntimeError as error:
        assert text and "error in building your book" in str(error)
    print({END.strip()!r})
"""


def write_book(folder):
    """Write the files that the page shows, and those that every Jupyter Book has."""
    for _, language, name, text in BLOCK.findall(PAGE):
        text = f"{HEAD}```{{code-cell}}\n{text}```\n" if language == "python" else text
        (folder / name).write_text(text, "utf8")
    toc = "format: jb-book\nroot: results\nchapters: [{file: sums}, {file: primes}]\n"
    (folder / "_toc.yml").write_text(toc)


def build(folder, *pages):
    """Build the book, once more for each text of its page on primes; return what is said of each.

    One process makes all builds, as most of a build's time is spent on importing Sphinx.
    """
    command = [sys.executable, "-u", "-c", BUILDS, str(folder), *pages]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout.split(END)[:-1]


def test_the_example_is_short():
    pages = [text for _, language, _, text in BLOCK.findall(PAGE) if language == "python"]
    assert [len(text.splitlines()) for text in pages] == [10, 9]


def test_the_book_of_the_example_gets_its_ledger(tmp_path):
    write_book(tmp_path)
    (first,) = build(tmp_path)
    shutil.rmtree(tmp_path / "_build" / ".doctrees")
    sums = (tmp_path / "sums.md").read_text("utf8")
    problems = {  # a ledger that is not whole is not made
        "# No claim\n": "no page gives a verdict on euler.thm1",
        sums.replace("eq1", "thm1"): "one check for two items: euler.thm1 on primes, euler.eq1 on",
    }
    second, *others = build(tmp_path, *problems)
    for said in (first, second):  # also the build that reads all pages and runs none
        assert "ledger: 3 of 3 items have a verdict" in said
    for said, problem in zip(others, problems.values(), strict=True):
        assert problem in " ".join(said.split())
    html = tmp_path / "built"
    ledger = json.loads((html / "ledger.json").read_text("utf8"))
    verdicts = {item: (row["verdict"], row["grade"]) for item, row in ledger.items()}
    assert verdicts == {
        "euler.eq1": ("holds", None),
        "euler.thm1": ("wrong as printed", "error"),
        "euler.def1": ("definition", None),
    }
    page = (html / "results.html").read_text("utf8")
    text = " ".join(re.sub("<[^>]+>", "", page).split())
    assert "So far: 1 of 2 statements are false." in text
    assert "Two letters, read in translation. Its items: euler.…" in text
    assert "wrong as printed (error): prime for" in text
    assert "the print fails by 1 divisors; the correction is exact." in text
    assert 'href="primes.html#claim-euler.thm1-1"' in page
    assert "data-claim" not in (html / "sums.html").read_text("utf8")
    assert "ledger.js" in page and "ledger.js" not in (html / "sums.html").read_text("utf8")
    assert (html / "_static" / "claims.css").exists()
