"""Typeset the formulas in a line of plain text.

Statements of claims and topics of the inventory are plain text, ``σ_jr² ≤ C/|h(k_j)|``, because
they are also printed in terminals. This module recognises the words that are mathematics and
converts them to LaTeX; `tests/test_book.py` searches for those that it misses.
"""

from __future__ import annotations

import re

from docutils import nodes

OPERATOR = re.compile(r"[-+−=≠≤≥<>∝→≈/|·×]")
FUNCTIONS = ("max", "min", "log", "exp", "cos", "sin", "tanh")
NAMES = {"Phi": "Φ", "beta": "β", "mu": "μ", "epsilon": "ε", "sigma": "σ"}
MATHS = "α-ωΑ-Ω²³ᵀ√‖⌈⌉ℓ_^∝−≤≥≠×½¾∑"  # a word with one of these is mathematics
SYMBOL = re.compile(
    rf"[^\s]*[{MATHS}][^\s]*"  # σ_d², ⌈9e²
    r"|[b-zB-HJ-Z]'*"  # a letter: neither an article nor a pronoun
    r"|[A-Za-z]\([^\s]*"  # C(D+t-1,
    rf"|(?:{'|'.join(FUNCTIONS)})\([^\s]*"  # max(1,
    r"|\d+[A-Z]"  # 3D
)
NUMBER = re.compile(r"[-−]?\d[\d./]*")
HYPHENATED = re.compile(r"[(]?[\w'’]*[a-z]{2,}[-−][\w'’-]*")  # left-hand, M-step: not a minus
ENDS = re.compile(r"^([(\[]*)(.*?)([)\],;:.]*)$")


def typeset(text: str) -> list[nodes.Node]:
    """Return a line of plain text as text and formulas."""
    parts: list[nodes.Node] = []
    for piece, is_formula in pieces(text):
        parts.append(nodes.math("", to_tex(piece)) if is_formula else nodes.Text(piece))
    return parts


def pieces(text: str) -> list[tuple[str, bool]]:
    """Split a line into pairs of a piece and whether it is a formula."""
    split: list[tuple[str, bool]] = []
    words, start = text.split(" "), 0
    while start < len(words):
        before, formula, after, end = _formula(words, start)
        new = [(before, False), (formula, True), (after, False)] if formula else [(after, False)]
        space = " " if end < len(words) else ""
        for piece, is_formula in [*new, (space, False)]:
            if split and not is_formula and not split[-1][1]:
                split[-1] = (split[-1][0] + piece, False)
            elif piece:
                split.append((piece, is_formula))
        start = end
    return split


def _formula(words: list[str], start: int) -> tuple[str, str, str, int]:
    """Return the longest formula that starts at a word, as (prefix, formula, suffix, end)."""
    end = start
    kinds: list[str] = []
    while end < len(words):
        kind = _kind(words, end)
        if kind == "text" or (kinds and not _joins(kinds[-1], kind, words[end])):
            break
        kinds.append(kind)
        end += 1
        if _stops(" ".join(words[start:end])):
            break
    while kinds and kinds[-1] == "function":
        kinds.pop()
        end -= 1
    if "symbol" not in kinds:
        return "", "", words[start], start + 1
    return *_trim(" ".join(words[start:end])), end


def _kind(words: list[str], i: int) -> str:
    word = ENDS.sub(r"\2", words[i])
    previous = words[i - 1] if i else ""
    if previous == "App." or HYPHENATED.fullmatch(word):
        return "text"
    if OPERATOR.fullmatch(word):
        return "operator"
    if word in FUNCTIONS:
        return "function"
    if SYMBOL.fullmatch(word) or (OPERATOR.fullmatch(previous) and re.fullmatch("[A-Z]{2}", word)):
        return "symbol"
    if NUMBER.fullmatch(word):
        return "number"
    parts = word.split("/")  # Phi/h, 1/N
    short = all(re.fullmatch(rf"\w|{'|'.join(NAMES)}", part) for part in parts)
    return "symbol" if short and re.search("[A-Za-z]{2}|/", word) else "text"


def _joins(left: str, right: str, word: str) -> bool:
    """Return whether two words belong to one formula; two numbers need an operator between."""
    if "number" in (left, right):
        return "operator" in (left, right) and not re.match(r"[−-]\d", word)
    return True


def _stops(formula: str) -> bool:
    """Return whether punctuation outside brackets ends the formula."""
    return formula[-1] in ",;:." and _open(formula) <= 0 or _open(formula) < 0


def _open(text: str) -> int:
    return sum(text.count(c) for c in "([⌈{") - sum(text.count(c) for c in ")]⌉}")


def _trim(formula: str) -> tuple[str, str, str]:
    """Split punctuation and unbalanced brackets at the ends from a formula."""
    before = after = ""
    while formula[-1] in ",;:." or (formula[-1] == ")" and _open(formula) < 0):
        formula, after = formula[:-1], formula[-1] + after
    while formula[0] == "(" and _open(formula) > 0:
        before, formula = before + formula[0], formula[1:]
    return before, formula, after


def to_tex(formula: str) -> str:
    """Convert a plain-text formula to LaTeX; symbols that KaTeX accepts remain: σ, ≤, ‖."""
    tex = re.sub(r"[A-Za-z]{2,}", lambda m: NAMES.get(m[0], m[0]), formula)
    tex = re.sub(r"([_^])(\w+)", lambda m: f"{m[1]}{{{_script(m[2])}}}", _exponents(tex))
    tex = re.sub(r"√(\w)", r"\\sqrt{\1}", tex).replace("Σ_", r"\sum_").replace("∑", r"\sum")
    tex = re.sub(r"(?<![\\A-Za-z{])([A-Za-z]{3,})", lambda m: _word(m[1]), tex)
    tex = tex.replace(" | ", r" \mid ").replace("½", r"\tfrac12").replace("¾", r"\tfrac34")
    return tex.replace("−", "-")


def _exponents(text: str) -> str:
    for plain, tex in {"²": "^{2}", "³": "^{3}", "ᵀ": r"^{⊤}"}.items():
        text = text.replace(plain, tex)
    return text


def _script(text: str) -> str:
    return rf"\mathrm{{{text}}}" if re.fullmatch("[a-z]{3,}", text) else text


def _word(word: str) -> str:
    return rf"\{word}" if word in FUNCTIONS else rf"\text{{{word}}}"


def find_maths(text: str) -> list[str]:
    """Return the words outside formulas that look like mathematics, for the tests."""
    plain = " ".join(piece for piece, is_formula in pieces(text) if not is_formula)
    return [word for word in plain.split() if re.search(rf"[{MATHS}=]", word)]
