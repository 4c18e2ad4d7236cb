"""The built pages: the ledger is complete, links are right, nothing is fetched from outside."""

import csv
import html
import inspect
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from docutils import nodes
from places import CONFIG, HTML, PAGES, ROOT
from scipy.stats import norm

import book
import derived_attention
from derived_attention import registry
from derived_book import claims
from derived_book import ledger as ledger_page
from derived_book.ledger import plain_maths


@pytest.fixture(scope="module")
def ledger():
    path = HTML / "book" / "ledger.json"
    assert path.exists(), "the book is not built: run make book"
    return json.loads(path.read_text("utf8"))


@pytest.fixture(scope="module")
def five(ledger):
    """The rows of the five papers, which alone are counted."""
    return {item: row for item, row in ledger.items() if is_of_the_five(item)}


def is_of_the_five(item):
    return item[:3].isdecimal()


def built(page):
    return (HTML / f"{page}.html").read_text("utf8")


def test_the_inventory_has_the_shared_one_and_what_has_no_number():
    shared = ROOT.parent / "shared" / "inventory.csv"
    ours = claims.inventory()
    if shared.exists():  # only this project's own machines have the file
        for row in csv.DictReader(shared.read_text("utf8").splitlines()):
            assert all(ours[row["id"]][key] == row[key] for key in ("kind", "topic")), row
    for item, row in ours.items():
        kind = item.split(".")[1] if is_of_the_five(item) else row["kind"]
        assert (kind in claims.UNNUMBERED) == (row["kind"] in claims.UNNUMBERED), item
        assert row["role"] in ("", "definition") and len(row["topic"]) <= 60, item
    assert sum(map(claims.is_numbered, filter(is_of_the_five, ours))) == 147


def test_the_ledger_covers_the_inventory_in_the_promised_form(ledger):
    assert set(ledger) == set(claims.inventory())
    for item, row in ledger.items():
        assert set(row) == {"verdict", "grade", "same_as", "statement", "checks"}, item
        assert row["verdict"] in claims.VERDICTS and row["statement"].strip(), item
        assert (row["grade"] in claims.GRADES) == (row["verdict"] == "wrong as printed"), item
        assert "\n" not in row["statement"] and row["checks"], item
        for check in row["checks"]:
            assert set(check) == {"kind", "margin", "mutant_margin", "unit", "page"}, item
            assert (HTML / f"{check['page']}.html").exists(), item
        is_definition = bool(claims.inventory()[item]["role"])
        assert (row["verdict"] == "definition") == is_definition, item
        rejected = [c for c in row["checks"] if c["mutant_margin"] is not None]
        assert is_definition or rejected, f"{item} has no check with a rejected mutant"
        assert row["grade"] != "copy" or "conversion" in row["statement"], item


def test_the_ledger_page_shows_every_item_and_links_to_its_checks(five):
    page = built("book/ledger")
    for item in claims.inventory():
        shown = page.count(f'id="{item}"'), f">{item}</span>" in page
        assert shown == (is_of_the_five(item),) * 2, item
    links = re.findall(r'href="((?:\d\d|[A-Z]|audit)_\w+\.html)#(claim-[\w.-]+)"', page)
    assert {re.fullmatch(r"claim-(.+)-\d+", anchor)[1] for _, anchor in links} == set(five)
    for target, anchor in links:
        assert f'id="{anchor}"' in (HTML / "book" / target).read_text("utf8")
    contents = page.partition('class="bd-sidebar-secondary')[2]
    bibliography = (ROOT / "book" / "references.bib").read_text("utf8")
    named = re.findall(r"^ *title = \{(.*)\},?$", bibliography, flags=re.M)
    papers = CONFIG["claims_papers"].values()
    assert {p["title"] for p in papers} <= {re.sub("[{}]", "", title) for title in named}
    titles = [paper["title"] for paper in papers if "group" not in paper]
    assert len(titles) == 5 and all(title in contents for title in titles)


def test_the_second_ledger_has_the_other_papers_and_is_not_counted(ledger, five):
    page = built("book/ledger_today")
    others = set(ledger) - set(five)
    assert len(others) == 8
    for item in claims.inventory():
        assert page.count(f'id="{item}"') == (item in others), item
    links = re.findall(r'href="(1[56]_\w+\.html)#claim-([\w.]+)-\d+"', page)
    assert {item for _, item in links} == others and 'class="da-filter"' not in page
    errata = built("book/errata")
    assert not [item for item in others if f'id="{item}"' in errata]


def test_a_row_says_its_grade_and_whose_mistake_it_repeats(five):
    graded = {item: row for item, row in five.items() if row["grade"]}
    for page in (built("book/ledger"), built("book/errata")):
        rows = {item: page.partition(f'id="{item}"')[2].partition("</tr>")[0] for item in graded}
        text = {item: re.sub("<[^>]+>", "", row) for item, row in rows.items()}
        for item, row in graded.items():
            assert row["grade"] in text[item], item
            assert row["grade"] != "copy" or "perhaps not in print" in text[item], item
            assert not row["same_as"] or f'href="#{row["same_as"]}"' in rows[item], item


def test_a_check_says_in_words_what_its_numbers_are():
    def says(kind, margin, mutant, unit=""):
        check = {"kind": kind, "margin": margin, "mutant_margin": mutant, "unit": unit}
        return ledger_page.check_text(check)

    bound = "Inequality: slack 0.035; the mutant is violated by 0.14."
    assert says("inequality", 0.0349, 0.1398) == bound
    assert says("inequality", -3e-14, 2.5).startswith("Inequality: tight, up to rounding;")
    assert says("equal", 2.2e-16, 0.39) == "Equality: error 2·10⁻¹⁶; the mutant’s 0.39."
    assert says("refuted", 24.0, 0.0).endswith("the print fails by 24; the correction is exact.")
    assert says("refuted", 0.463, -0.4245).endswith("the correction has 0.42 to spare.")
    refuted = "Counterexample: the print fails by 23 nats; the correction has 0.5 nats to spare."
    assert says("refuted", 23.0, -0.5, "nats") == refuted
    assert says("refuted", 0.7, 2e-16).endswith("the correction has error 2·10⁻¹⁶.")
    assert "the mutant leaves 0.0028" in says("identity", 0.0, 0.0028)
    assert says("certificate", 0.0, 99.8) == "Certificate: gap 0; the mutant’s 100."


def test_no_check_of_the_ledger_reads_as_a_failure(ledger):
    for item, row in ledger.items():
        for check in row["checks"]:
            text = ledger_page.check_text(check)
            assert not re.search(r"[-−]\d|nan|inf\b", text), f"{item}: {text}"


@pytest.mark.parametrize(
    ("plain", "tex"),
    {
        "σ_jr^{-D} exp(−(‖q‖²+‖k_jr‖²)/2σ_jr²) stays": [
            r"σ_{jr}^{-D} \exp(-(‖q‖^{2}+‖k_{jr}‖^{2})/2σ_{jr}^{2})"
        ],
        "π_jr = Σ_i a_ij γ_ir / Σ_i a_ij; the rule": [
            r"π_{jr} = \sum_{i} a_{ij} γ_{ir} / \sum_{i} a_{ij}"
        ],
        "for s | N: C ≥ max |v_j(d)| (of all)": [r"s \mid N", r"C ≥ \max |v_{j}(d)|"],
        "a point on the left-hand side, App. D, the 'same' W^proj": [r"W^{\mathrm{proj}}"],
        "(logarithms of K, σ from 1 to 10^{-8})": ["K", "σ", "10^{-8}"],
        "there are C(D+t-1, t) of degree t, for W Phi/h": ["C(D+t-1, t)", "t", "W Φ/h"],
    }.items(),
)
def test_formulas_in_plain_text_are_found(plain, tex):
    found = plain_maths.pieces(plain)
    assert [plain_maths.to_tex(piece) for piece, is_formula in found if is_formula] == tex
    assert "".join(piece for piece, _ in found) == plain


def test_no_formula_of_the_ledger_stays_plain_text(ledger):
    lines = [row["topic"] for row in claims.inventory().values()]
    for line in [*lines, *(row["statement"] for row in ledger.values())]:
        assert "".join(piece for piece, _ in plain_maths.pieces(line)) == line
        assert not plain_maths.find_maths(line), line


def test_the_errata_page_lists_just_what_is_wrong_as_printed(five):
    page = built("book/errata")
    wrong = {k for k, row in five.items() if row["verdict"] == "wrong as printed"}
    assert {i for i in claims.inventory() if f">{i}</span>" in page} == wrong
    assert all(f'id="{item}"' in page for item in wrong)


def test_the_landing_page_counts_this_build_and_is_no_chapter(five):
    page = built("book/index")
    hook = re.sub("<[^>]+>", "", page.partition('class="da-tally"')[2].partition("</p>")[0])
    counts = claims.count(five)
    assert f"{counts['testable']} numbered statements" in hook
    assert f"{counts['errors']} distinct errors" in hook
    assert page.count('class="da-picture"') == 5 and page.count('class="recall"') == 1
    assert page.count('class="da-figure da-slider"') == 1 and "cell_input" not in page
    assert not (HTML / "notebooks" / "index.ipynb").exists()


def test_the_readme_counts_as_the_ledger_does(five):
    counts, text = claims.count(five), " ".join((ROOT / "README.md").read_text("utf8").split())
    said = [f"{counts['testable']} numbered statements", f"{counts['errors']} distinct errors"]
    said.append(f"{counts['unnumbered errors']} more in sentences and tables without a number")
    assert all(words in text for words in said), f"README.md must contain {said}"


@pytest.fixture(scope="module")
def api():
    return {page.stem: page.read_text("utf8") for page in (HTML / "book").glob("api*.html")}


def test_the_api_has_every_function_and_class_that_can_be_imported_from_the_package(api):
    entries = "".join(api.values())
    here = {"places": "derived_attention"}
    for name, module in (here | derived_attention.places()).items():
        if inspect.isroutine(thing := getattr(derived_attention, name)) or inspect.isclass(thing):
            assert f'id="{module}.{name}"' in entries, name


def test_the_api_has_every_mechanism_and_module_with_public_signatures(api):
    entries = "".join(api.values())
    home = Path(registry.__file__).parent
    files = [p.relative_to(home).with_suffix("").parts for p in home.rglob("[!_]*.py")]
    modules = [".".join(parts) for parts in files if parts[-1] != "triton"]
    assert len(modules) > 45
    for module in modules:
        assert f'id="{registry.PACKAGE}.{module}.' in entries, module
    for name, entry in registry.MECHANISMS.items():
        assert f"&quot;{name}&quot;</span>" in api["api"], name
        anchor = f"{registry.PACKAGE}.{entry.function}"
        assert f'href="api_attention.html#{anchor}"' in api["api"], name
        signature = api["api_attention"].partition(f'id="{anchor}"')[2]
        assert "enable_gqa" in signature.partition("</dt>")[0], name


def test_the_api_needs_only_what_the_book_installs():
    text = "".join(page.read_text("utf8") for page in ROOT.glob("book/api*.md"))
    names = re.findall(r"automodule:: (\S+)", text)
    modules = " ".join(re.findall(r"{modules} (.*)", text)).split()
    names += [f"{registry.PACKAGE}.{module}" for module in modules]
    # PyTorch's builds for CUDA and the tests' tools include Triton; `make book` does not.
    code = "import importlib, sys; sys.modules['triton'] = None\n"
    code += "for name in sys.argv[1:]: importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", code, *names], check=True)


@pytest.mark.parametrize("page", [p for p in PAGES if re.match(r"book/\d\d_", p)])
def test_a_chapter_follows_the_template(page):
    source = (ROOT / f"{page}.md").read_text("utf8")
    for kind in ("read", "cpu"):
        assert f"{{measured}}`{kind}`" in source
    for heading in ("Takeaways", "## Exercises", "## Further reading"):
        assert heading in source, heading
    solutions = re.findall(r":::\{solution(?!-end\})", source)
    assert len(solutions) == source.count(":::{exercise}") >= 6
    assert "slider(" in source and "{prf:" in source
    text = built(page)
    assert text.count("<figure") == text.count("<figcaption") >= 2
    assert re.search(r"\d+ s on the CPU that built", text) and re.search(r"\d+ min", text)


@pytest.mark.parametrize("page", [p for p in PAGES if p.startswith("book/audit_")])
def test_an_audit_settles_a_whole_paper(page, ledger):
    source = (ROOT / f"{page}.md").read_text("utf8")
    for part in ("{measured}`read`", "{measured}`cpu`", "Takeaways", "## Exercises"):
        assert part in source, part
    checked = {item for item, row in ledger.items() for c in row["checks"] if c["page"] == page}
    (paper,) = {item.partition(".")[0] for item in checked}
    assert checked == {i for i in claims.inventory() if i.startswith(f"{paper}.")}
    for shown in (r"Theorem [IVX]+\.\d", r"\d+ s on the CPU that built"):
        assert re.search(shown, built(page)), shown


def test_a_page_names_its_part():
    assert book.parts()["book/audit_wavelets"] == "Part III: Wavelets"
    for page in PAGES:
        found = re.findall(r'<p class="da-part">(.*)</p>', built(page))
        assert found == ([book.parts()[page]] if page in book.parts() else []), page


def test_the_sidebar_opens_the_group_of_the_page():
    names = ["Chapters", "Audits", "Appendices", "For lecturers", "Reference"]
    pages = {"index": 0, "02_duality": 0, "audit_wavelets": 1, "D_efficient": 2, "glossary": 4}
    for page, group in pages.items():
        text = built(f"book/{page}")
        found = re.findall(r'<details class="da-group"( open)?><summary>(.*?)</summary>', text)
        assert found == [(" open" * (i == group), name) for i, name in enumerate(names)], page
        assert len(re.findall(r'<li class="toctree-l1', text)) == len(PAGES), page


def test_a_page_between_chapters_has_a_letter_and_shifts_no_chapter():
    numbers = {"book/positions": "P", "book/audit_wavelets": "III", "book/02_duality": 2}
    assert {page: book.number(page) for page in numbers} == numbers
    assert book.number("book/A_plugs") == "A" and book.number("book/glossary") is None
    names = ("book/positions", "book/audit_wavelets", "book/02_duality", "book/A_plugs")
    assert [book.short_name(page) for page in names] == ["ch. P", "audit III", "ch. 2", "app. A"]
    assert not set(book.LETTERS.values()) & set("ABCDE"), "A to E are the letters of appendices"


def test_launch_buttons_appear_just_when_there_is_a_repository():
    page = built("book/01_attention")
    assert ("colab.research" in page) == bool(book.repository()[0])
    assert "executablebooks/jupyter-book" not in page, "a link to Jupyter Book's repository"


def test_a_page_takes_a_report_of_its_mistakes_if_there_is_a_repository(monkeypatch):
    env = SimpleNamespace(titles={"book/api": nodes.title("", "A & B")}, found_docs=())

    def end(url):
        monkeypatch.setenv("BOOK_REPOSITORY_URL", url)
        context = {"body": "<p>Text.</p>", "pathto": lambda *_: ""}
        book._furnish(SimpleNamespace(env=env), "book/api", "page.html", context, None)
        return context["body"]

    assert end("") == "<p>Text.</p>"
    url = "https://github.com/owner/repo"
    link = f"{url}/issues/new?title=Mistake%20on%20the%20page%3A%20A%20%26%20B"
    assert f'<a href="{link}">Report a mistake on this page</a>' in end(url)


def test_launch_links_open_the_notebook_of_the_chapter(monkeypatch):
    monkeypatch.setenv("BOOK_JUPYTERHUB_URL", "https://hub.example.org/")
    links = book.launch_links("https://github.com/owner/repo", "main", "01_attention")
    assert links["Colab"].endswith("/github/owner/repo/blob/main/notebooks/01_attention.ipynb")
    assert links["Binder"].endswith("urlpath=lab%2Ftree%2Fnotebooks%2F01_attention.ipynb")
    assert "git-pull?repo=https%3A%2F%2Fgithub.com%2Fowner%2Frepo&" in links["JupyterHub"]
    monkeypatch.delenv("BOOK_JUPYTERHUB_URL")
    assert not book.launch_links("https://git.example.org/owner/repo", "main", "01_attention")


def test_the_environment_s_repository_counts_unless_the_committed_one_is_asked_for(monkeypatch):
    monkeypatch.setenv("BOOK_REPOSITORY_URL", "https://github.com/owner/repo.git")
    assert book.repository() == ("https://github.com/owner/repo", "main")
    assert book.repository(committed=True)[0] != "https://github.com/owner/repo"


def test_the_archive_holds_the_whole_site():
    # Other tests read the pages meanwhile, so an outdated book must not be rebuilt here.
    old = f"--old-file={HTML.relative_to(ROOT)}/.complete"
    command = ["make", "zip", f"VENV={os.path.relpath(sys.prefix, ROOT)}", old]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(ROOT / "_build" / "derived-attention.zip") as archive:
        names = set(archive.namelist())
    assert {f"html/{page}.html" for page in PAGES} <= names
    assert {"html/_static/katex/katex.min.css", "html/book/ledger.json"} <= names


def test_a_broken_formula_is_a_warning_of_the_build(tmp_path):
    (tmp_path / "index.md").write_text("# Title\n\nA formula: $\\undefinedcommand{x}$.\n")
    config = (
        f"import sys; sys.path.insert(0, {str(ROOT / '_ext')!r})\n"
        "extensions = ['myst_parser', 'katex_prerender']\n"
        "myst_enable_extensions = ['dollarmath']\n"
        "html_math_renderer = 'katex_prerender'\n"
    )
    (tmp_path / "conf.py").write_text(config)
    command = [sys.executable, "-m", "sphinx", "-W", "-q", str(tmp_path), str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode != 0
    assert "index.md:3:KaTeX" in run.stderr.replace(" ", "").replace("WARNING:", "")
    assert r"Undefined control sequence: \undefinedcommand" in run.stderr


def test_audit_of_mixtures_shows_no_bound_that_an_explicit_mixture_beats():
    page = html.unescape(built("book/audit_mixtures"))
    for file in re.findall(r'data-src="\.\./([^"]+)"', page):  # the steps of its slider
        page += (HTML / file).read_text("utf8")
    shown = re.findall(r"σ = ([\d.]+): every mixture misses by ([\d.]+) or more", page)
    assert len(shown) > 15
    x, apart = np.linspace(-2, 2, 2001), np.linspace(0, 1.2, 241)[:, None]
    density = np.where(np.abs(x) < 1, np.sin(np.pi * x) ** 2, 0)
    near = 0
    for width, least in np.array(shown, float):
        two = norm.pdf([x - apart, x + apart], scale=width).mean(0)  # components at ± apart
        best = np.abs(density - two).max(1).min()
        assert least <= best, f"σ = {width}: the page shows {least}; a mixture has error {best:.4f}"
        near += best - least < 0.002
    assert near > 10, "too few bounds are close enough to show which way they were rounded"


def test_all_attentions_are_on_one_page_and_fit_it():
    path = ROOT / "src" / "derived_attention" / "formulas.py"
    lines = path.read_text("utf8").splitlines()
    assert len(lines) <= 600 and max(map(len, lines)) <= 84
    shown = re.sub("<[^>]+>", "", built("book/formulas"))
    for name in re.findall(r"^def (\w+)", "\n".join(lines), flags=re.M):
        assert f"def {name}(" in shown, name


@pytest.mark.parametrize(
    ("page", "title", "text"),
    [
        ("02_duality", "The delta rule: a memory that corrects itself", "[Cc]hapter 15"),
        ("03_softmax_expansion", "Audit: support vectors", "[Aa]udit II"),
        ("01_attention", "Positions: vectors, slopes and rotations", "[Cc]hapter P"),
        ("teaching_machines", "The book’s attentions in your own models", "Appendix A"),
        ("teaching_syllabi", "Side by side: which attention, and when", r"17\. {title}|chapter 17"),
    ],
)
def test_a_link_to_a_chapter_has_its_number_and_the_title_as_tooltip(page, title, text):
    link = rf'<a class="reference internal"[^>]* title="{title}">([^<]*)</a>'
    links = re.findall(link, built(f"book/{page}"))
    assert links and all(re.fullmatch(text.format(title=title), x) for x in links), links
