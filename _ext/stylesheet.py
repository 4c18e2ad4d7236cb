"""Make one small style sheet for all pages, without the rules that no page uses.

Themes and extensions ship half a megabyte, mostly for icons, buttons and grids that this book does
not have. A rule is kept unless it needs a class that occurs on no page and in no script.
"""

from __future__ import annotations

import re
from pathlib import Path

import tinycss2

CONDITIONS = {"media", "supports", "layer", "container"}
NAME = re.compile(r"[\w-]+")
CLASSES = re.compile(r"""\bclass=["']([^"']*)["']""")
CLASS = re.compile(r"\.(-?[_a-zA-Z][\w-]*)")
GROUP = re.compile(r"\([^()]*\)")  # of :not(…), :is(…): classes in it need not occur
IMPORT = re.compile(r"""@import\s+["']([^"']+)["'];?""")
URL = re.compile(r"""url\((["']?)(?!data:|https?:|[#/])([^"')]+)\1\)""")
FALLBACK = re.compile(r",\s*url\([^)]*\.(woff|ttf)\) format\([^)]*\)")  # after a woff2 font
# Font Awesome's rules: no page loads its fonts, since `assets/icons.css` draws the icons in use.
ICON = re.compile(r"(^|[\s>+~,])\.fa[bcrs]?(-|\b)|^:(root|host).*:(root|host)")
SPACE = re.compile(r"\s+")
ASKED = re.compile(r"var\(\s*(--[\w-]+)")
DEFINED = re.compile(r"[{;](--[\w-]+):")
VARIABLE = re.compile(r"""(?<=[{;])(--[\w-]+):(?:"[^"]*"|'[^']*'|[^;{}"'])*(?:;|(?=\}))""")


def gather(files: list[Path], root: Path) -> str:
    """Join style sheets and those that they import; make addresses relative to `root`."""
    return "\n".join(_with_imports(file, root) for file in files)


def _with_imports(file: Path, root: Path) -> str:
    def inline(found: re.Match) -> str:
        return _with_imports((file.parent / found[1]).resolve(), root)

    def move(found: re.Match) -> str:
        return f"url({(file.parent / found[2]).resolve().relative_to(root.resolve())})"

    return IMPORT.sub(inline, URL.sub(move, file.read_text("utf8")))


def words_of(pages: list[str], scripts: list[str]) -> set[str]:
    """Return all words that may be a class: those of the pages' classes and of the scripts."""
    found = {
        word for page in pages for value in set(CLASSES.findall(page)) for word in value.split()
    }
    return found.union(*(NAME.findall(script) for script in scripts))


def prune(css: str, words: set[str]) -> str:
    """Return the rules that can apply, without comments and needless space."""
    kept = _rules(tinycss2.parse_stylesheet(css, skip_comments=True, skip_whitespace=True), words)
    return _unused_variables(kept)


def _rules(rules, words: set[str]) -> str:
    parts = []
    for rule in rules:
        if rule.type == "error":
            continue  # a browser skips it too
        head = SPACE.sub(" ", tinycss2.serialize(rule.prelude)).strip()
        if rule.type == "qualified-rule":
            if selectors := _selectors(head, words):
                parts.append(f"{selectors}{{{_body(rule.content)}}}")
        elif rule.lower_at_keyword in CONDITIONS and rule.content is not None:
            nested = tinycss2.parse_rule_list(
                rule.content, skip_comments=True, skip_whitespace=True
            )
            if inner := _rules(nested, words):
                parts.append(f"@{rule.at_keyword} {head}{{{inner}}}")
        elif rule.content is None:
            parts.append(f"@{rule.at_keyword} {head};")
        elif "Awesome" not in (body := _body(rule.content)):
            parts.append(f"@{rule.at_keyword} {head}{{{FALLBACK.sub('', body)}}}")
    return "".join(parts)


def _body(content) -> str:
    text = "".join(" " if n.type == "comment" else n.serialize() for n in content)
    return re.sub(r"\s*([;{}])\s*", r"\1", SPACE.sub(" ", text)).strip().rstrip(";")


def _selectors(head: str, words: set[str]) -> str:
    """Return the selectors of a rule that can match something."""
    return ",".join(part for part in _split(head) if _possible(part, words))


def _split(head: str) -> list[str]:
    parts, depth = [""], 0
    for character in head:
        depth += (character in "([") - (character in ")]")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _possible(selector: str, words: set[str]) -> bool:
    while GROUP.search(selector):
        selector = GROUP.sub("", selector)
    selector = re.sub(r"\[[^\]]*\]", "", selector).replace("\\", "")
    return not ICON.search(selector) and words.issuperset(CLASS.findall(selector))


def _unused_variables(css: str) -> str:
    """Leave out variables that no rule uses, and those that only such variables use."""
    while unused := set(DEFINED.findall(css)) - set(ASKED.findall(css)):
        css = _without(css, unused)
    return re.sub(r"[^{}]+\{\}", "", css)


def _without(css: str, names: set[str]) -> str:
    return VARIABLE.sub(lambda found: "" if found[1] in names else found[0], css)
