"""The list of references: every entry has an identifier, and the label that pages cite."""

import html
import re
import subprocess
import sys
from collections import Counter

import pytest
from places import CONFIG, ROOT
from pybtex.database import parse_file

import references

ENTRIES = parse_file(ROOT / "book" / "references.bib", "bibtex").entries
WITHOUT = {  # entries without an identifier, and why
    "Lanczos1958": "no public source gives an identifier with the title",
    "Popoviciu1935": "a journal of 1935, which has no identifiers",
    "Suykens2016": "no public source gives an identifier with the title",
}
FORMS = {
    "doi": r"10\.\d{4,9}/\S+",  # the identifier alone, not its address
    "eprint": r"\d\d(0[1-9]|1[0-2])\.\d{4,5}",
    "url": r"https://[\w.-]+/\S*",
}
PAGE = """
.. toctree::

   list

{citations}
"""
SETTINGS = f"""
import sys
sys.path.insert(0, {str(ROOT / "_ext")!r})
extensions = ["sphinxcontrib.bibtex", "references"]
bibtex_bibfiles = ["references.bib"]
"""


def identifiers(entry):
    """Return the identifiers of an entry by their kind."""
    return {kind: entry.fields[kind] for kind in FORMS if kind in entry.fields}


def test_every_entry_says_where_it_is():
    assert {key for key, entry in ENTRIES.items() if not identifiers(entry)} == set(WITHOUT)


def test_identifiers_are_well_formed():
    for key, entry in ENTRIES.items():
        for kind, identifier in identifiers(entry).items():
            assert re.fullmatch(FORMS[kind], identifier), key
        assert entry.fields.get("archiveprefix") == ("arXiv" if "eprint" in entry.fields else None)
        assert "arxiv" not in entry.fields.get("journal", "").lower(), f"{key} is an eprint"
        assert not re.search(r"doi\.org|arxiv\.org", entry.fields.get("url", "")), key


def test_no_two_entries_share_an_identifier_or_a_label():
    found = [i.casefold() for entry in ENTRIES.values() for i in identifiers(entry).values()]
    labels = [references.label(entry) for entry in ENTRIES.values()]
    for names in (found, labels):
        assert [name for name, times in Counter(names).items() if times > 1] == []
    assert references.label(ENTRIES["MrsFormer"]) == "Anonymous, 2023"
    assert references.label(ENTRIES["OptimizingAttention"]) == "Anonymous, 2025"
    assert not [label for label in labels if "others" in label or "n.d." in label]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """Return, as HTML, a page that cites every entry, and the list, in the styles of the book."""
    folder = tmp_path_factory.mktemp("references")
    citations = "\n\n".join(f"{key} :cite:p:`{key}` end" for key in ENTRIES)
    (folder / "index.rst").write_text(PAGE.format(citations=citations))
    (folder / "list.rst").write_text("List\n====\n\n.. bibliography::\n")
    (folder / "references.bib").write_bytes((ROOT / "book" / "references.bib").read_bytes())
    styles = [f"{k} = {v!r}" for k, v in CONFIG.items() if re.fullmatch(r"bibtex_\w+_style", k)]
    (folder / "conf.py").write_text(SETTINGS + "\n".join(styles) + "\n")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", folder, folder / "html"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [(folder / "html" / f"{name}.html").read_text("utf8") for name in ("index", "list")]


def test_the_list_calls_an_entry_what_pages_call_it(rendered):
    def plain(markup):
        return html.unescape(re.sub("<[^>]+>", "", markup)).replace("\xa0", " ")

    page, listed = rendered
    cited = re.findall(r"^\w+ (\[.*\]) end$", plain(page), re.M)
    labels = [plain(m) for m in re.findall(r'<span class="label">.*?</span></span>', listed)]
    assert len(cited) == len(ENTRIES) and sorted(cited) == sorted(labels)
    firsts = [re.sub(r"\W", "", label)[:1].lower() for label in labels]
    assert firsts == sorted(firsts), "the labels are not in alphabetical order"


def test_identifiers_are_links_in_the_list(rendered):
    links = set(map(html.unescape, re.findall(r'href="([^"]+)"', rendered[1])))
    places = {"doi": "https://doi.org/", "eprint": "https://arxiv.org/abs/", "url": ""}
    for key, entry in ENTRIES.items():
        for kind, identifier in identifiers(entry).items():
            assert places[kind] + identifier in links, key
