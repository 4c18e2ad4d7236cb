"""What newcomers read first: issue forms, commands, the citation, and the changes."""

import re

import pytest
import yaml
from places import PROJECT, ROOT

from derived_attention import __version__

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text("utf8")
CFF = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf8"))
# GitHub's schema for issue forms: the keys of a form; required and optional attributes of fields.
TOP = {"name", "description", "body", "title", "labels", "assignees", "projects", "type"}
FIELDS = {
    "markdown": ({"value"}, set()),
    "input": ({"label"}, {"description", "placeholder", "value"}),
    "textarea": ({"label"}, {"description", "placeholder", "value", "render"}),
    "dropdown": ({"label", "options"}, {"description", "multiple", "default"}),
    "checkboxes": ({"label", "options"}, {"description"}),
}


def faults(form):
    """Return what GitHub would refuse in a form."""
    found = [f"top level: {x}" for x in {"name", "description", "body"} - form.keys()]
    found += [f"top level: {x}" for x in form.keys() - TOP]
    ids, labels = [], []
    for i, field in enumerate(form.get("body") or []):
        needed, allowed = FIELDS.get(field.get("type"), (set(), None))
        if allowed is None:
            found.append(f"field {i}: type {field.get('type')}")
            continue
        given = field.get("attributes", {})
        found += [f"field {i}: {x}" for x in needed - given.keys()]
        found += [f"field {i}: {x}" for x in given.keys() - needed - allowed]
        found += [f"field {i}: {x}" for x in field.keys() - {"type", "id", "attributes"}
                  - ({"validations"} if field["type"] != "markdown" else set())]  # fmt: skip
        options = given.get("options", [])
        if len(set(map(str, options))) != len(options) or not all(options):
            found.append(f"field {i}: options")
        if field.get("validations", {}).keys() - {"required"}:
            found.append(f"field {i}: validations")
        ids += [field["id"]] if "id" in field else []
        labels += [given["label"]] if "label" in given else []
    found += [f"id {x}" for x in ids if not re.fullmatch(r"[\w-]+", x) or ids.count(x) > 1]
    found += [f"label {x}" for x in labels if labels.count(x) > 1]
    return found if labels else [*found, "no field to fill in"]


def test_there_is_a_form_for_mathematics_code_and_text():
    assert {x.stem for x in FORMS} == {"mathematics", "code", "text", "config"}
    config = yaml.safe_load((FORMS[0].parent / "config.yml").read_text("utf8"))
    assert config.keys() <= {"blank_issues_enabled", "contact_links"}
    assert isinstance(config["blank_issues_enabled"], bool)


@pytest.mark.parametrize("path", [x for x in FORMS if x.stem != "config"], ids=lambda x: x.stem)
def test_a_form_is_one_that_github_accepts(path):
    form = yaml.safe_load(path.read_text("utf8"))
    assert faults(form) == []
    asked = [x for x in form["body"] if x.get("validations", {}).get("required")]
    assert asked, "an empty form could be sent"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda form: form.pop("description"), "description"),
        (lambda form: form.update(milestone="1"), "milestone"),
        (lambda form: form["body"][0]["attributes"].pop("label"), "label"),
        (lambda form: form["body"][0].update(id="a b"), "id"),
        (lambda form: form["body"][0].update(type="text"), "type"),
        (lambda form: form["body"].append(form["body"][0]), "id"),
        (lambda form: form["body"][2]["attributes"].update(options=["a", "a"]), "options"),
    ],
)
def test_a_broken_form_is_noticed(change, fault):
    form = yaml.safe_load((FORMS[0].parent / "text.yml").read_text("utf8"))
    change(form)
    assert fault in " ".join(faults(form))


# --- the commands that pages give -----------------------------------------------------------------


def commands(name):
    """Return the lines of the indented and of the fenced blocks of a page."""
    text = (ROOT / name).read_text("utf8")
    fenced = re.findall(r"^```sh\n(.*?)^```", text, flags=re.M | re.DOTALL)
    indented = re.findall(r"^    (\S.*)$", text, flags=re.M)
    return [*indented, *(line for block in fenced for line in block.splitlines())]


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "README.md", "book/teaching_machines.md"])
def test_what_one_is_told_to_make_exists(name):
    text = (ROOT / name).read_text("utf8")
    told = set(re.findall(r"(?:`|^    |^)make ([a-z]+)", text, flags=re.M))
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, flags=re.M))
    assert told and told <= targets, told - targets


def test_what_one_is_told_to_run_exists():
    lines = commands("CONTRIBUTING.md")
    assert len(lines) > 8
    for line in lines:
        for path in re.findall(r"\b(?:tests|book|src)/[\w./]+\.(?:py|md)\b", line):
            assert (ROOT / path).exists(), path
    named = re.findall(r"`((?:book|src|\.github)/[\w./-]+|[A-Z][\w.-]+\.?\w*)`",
                       (ROOT / "CONTRIBUTING.md").read_text("utf8"))  # fmt: skip
    files = [x for x in named if "/" in x or "." in x or x.startswith("LICENSE")]
    assert "CITATION.cff" in files and not [x for x in files if not (ROOT / x).exists()]


# --- the citation and the changes -----------------------------------------------------------------


def test_the_citation_is_one_of_this_version():
    assert {"cff-version", "message", "title", "authors"} <= CFF.keys()
    assert CFF["cff-version"] == "1.2.0" and CFF["version"] == __version__
    assert all(person.keys() & {"name", "family-names"} for person in CFF["authors"])
    assert CFF["license"] == PROJECT["license"]
    dates = re.findall(rf"^## {re.escape(__version__)} \((.+)\)$",
                       (ROOT / "CHANGELOG.md").read_text("utf8"), flags=re.M)  # fmt: skip
    assert dates == [str(CFF["date-released"])]


def test_readers_are_told_how_to_cite():
    for name, place in (("README.md", "CITATION.cff"), ("book/index.md", "how-to-cite")):
        assert place in (ROOT / name).read_text("utf8"), name
    assert "CONTRIBUTING.md" in (ROOT / "README.md").read_text("utf8")


def test_changes_are_listed_newest_first_by_semantic_version():
    text = (ROOT / "CHANGELOG.md").read_text("utf8")
    heads = re.findall(r"^## (.+)$", text, flags=re.M)
    released = [x for x in heads if x != "To come"]
    assert heads in (released, ["To come", *released]) and released
    found = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) \(\d{4}-\d\d-\d\d\)", x) for x in released]
    assert all(found), heads
    assert released[0].startswith(f"{__version__} ")
    versions = [tuple(map(int, x.groups())) for x in found]
    assert versions == sorted(versions, reverse=True) and len(set(versions)) == len(versions)
    for block in re.split(r"^## .+$", text, flags=re.M)[1:]:
        assert re.search(r"^- \S", block, flags=re.M), "a version must list a change"


def test_the_page_of_references_cites_the_book_as_the_citation_file_does():
    page = " ".join((ROOT / "book" / "references.md").read_text("utf8").split())
    year = str(CFF["date-released"])[:4]
    for shown in (CFF["title"], CFF["authors"][0]["name"], year, f"version {CFF['version']}"):
        assert shown in page, shown
