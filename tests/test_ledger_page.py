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


def write_book(folder):
    """Write the files that the page shows, and those that every Jupyter Book has."""
    for _, language, name, text in BLOCK.findall(PAGE):
        text = f"{HEAD}```{{code-cell}}\n{text}```\n" if language == "python" else text
        (folder / name).write_text(text, "utf8")
    toc = "format: jb-book\nroot: results\nchapters: [{file: sums}, {file: primes}]\n"
    (folder / "_toc.yml").write_text(toc)


def build(folder):
    command = [str(Path(sys.executable).with_name("jupyter-book")), "build", "-W", str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_example_is_short():
    pages = [text for _, language, _, text in BLOCK.findall(PAGE) if language == "python"]
    assert [len(text.splitlines()) for text in pages] == [10, 9]


def test_the_book_of_the_example_gets_its_ledger(tmp_path):
    write_book(tmp_path)
    for forget in ("", ".doctrees"):  # a build that runs no page, but reads all, says the same
        shutil.rmtree(tmp_path / "_build" / (forget or "nothing"), ignore_errors=True)
        done = build(tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "ledger: 3 of 3 items have a verdict" in done.stdout
    html = tmp_path / "_build" / "html"
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

    # A ledger that is not whole is not made.
    sums = (tmp_path / "sums.md").read_text("utf8")
    for page, problem in {
        "# No claim\n": "no page gives a verdict on euler.thm1",
        sums.replace("eq1", "thm1"): "one check for two items: euler.thm1 on primes, euler.eq1 on",
    }.items():
        (tmp_path / "primes.md").write_text(page, "utf8")
        done = build(tmp_path)
        assert done.returncode and problem in " ".join((done.stdout + done.stderr).split())
