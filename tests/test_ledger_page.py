"""The example of the page on claims: a book by other authors gets a ledger and errata."""

import json
import re
import subprocess
import sys

from places import ROOT

PAGE = (ROOT / "book" / "C_claims.md").read_text("utf8")
BLOCK = re.compile(r"^(`{3,})\{code-block\} (\w+)\n:caption: `(\S+)`\n(.*?)^\1$", re.S | re.M)
HEAD = "---\nfile_format: mystnb\nkernelspec: {name: python3}\n---\n\n# A page\n\n"
END = "this build has ended\n"
BUILDS = f"""
import pathlib, shutil, sys
from jupyter_book.cli.main import main
folder = pathlib.Path(sys.argv[1])
for text in [None, None, "# No claim"]:
    if text:
        (folder / "primes.md").write_text(text, "utf8")
    try:
        main(["build", "-W", str(folder)], standalone_mode=False)
        assert not text
        shutil.copytree(folder / "_build/html", folder / "built", dirs_exist_ok=True)
        shutil.rmtree(folder / "_build/.doctrees")
    except RuntimeError as error:
        assert text and "error in building your book" in str(error)
    print({END.strip()!r})
"""


def write_book(folder):
    """Write the files that the page shows, and the table of contents of the book."""
    for _, language, name, text in BLOCK.findall(PAGE):
        text = f"{HEAD}```{{code-cell}}\n{text}```\n" if language == "python" else text
        (folder / name).write_text(text, "utf8")
    toc = "format: jb-book\nroot: results\nchapters: [{file: sums}, {file: primes}]\n"
    (folder / "_toc.yml").write_text(toc)


def build(folder):
    """Build the book, rebuild it from stored results, and build it without claims on primes.

    Return the output of each build. One process makes all builds, because importing Sphinx takes
    most of a build's time.
    """
    command = [sys.executable, "-u", "-c", BUILDS, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout.split(END)[:-1]


def test_the_book_of_the_example_gets_its_ledger(tmp_path):
    write_book(tmp_path)
    *whole, third = build(tmp_path)
    for said in whole:  # also in the build that reads all pages but runs no cell
        assert "ledger: 3 of 3 items have a verdict" in said
    assert "no page gives a verdict on euler.thm1" in " ".join(third.split())
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
