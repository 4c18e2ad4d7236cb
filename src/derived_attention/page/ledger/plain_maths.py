"""Set the formulas in a line of plain text as formulas.

Statements of claims and topics of the inventory are plain text, because they are printed in
terminals too: ``σ_jr² ≤ C/|h(k_j)|``. Here the words that are mathematics are found and become
LaTeX; `tests/test_book.py` looks for those that were missed.
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
WORDY = re.compile(r"[(]?[\w'’]*[a-z]{2,}[-−][\w'’-]*")  # left-hand, M-step: a dash, no minus
ENDS = re.compile(r"^([(\[]*)(.*?)([)\],;:.]*)$")


def typeset(text: str) -> list[nodes.Node]:
    """Return a line of plain text as text and formulas."""
    parts: list[nodes.Node] = []
    for piece, is_formula in pieces(text):
        parts.append(nodes.math("", to_tex(piece)) if is_formula else nodes.Text(piece))
    return parts


def pieces(text: str) -> list[tuple[str, bool]]:
    """Split a line into stretches; say of each whether it is a formula."""
    found: list[tuple[str, bool]] = []
    words, start = text.split(" "), 0
    while start < len(words):
        before, stretch, after, end = _formula(words, start)
        new = [(before, False), (stretch, True), (after, False)] if stretch else [(after, False)]
        space = " " if end < len(words) else ""
        for piece, is_formula in [*new, (space, False)]:
            if found and not is_formula and not found[-1][1]:
                found[-1] = (found[-1][0] + piece, False)
            elif piece:
                found.append((piece, is_formula))
        start = end
    return found


def _formula(words: list[str], start: int) -> tuple[str, str, str, int]:
    """Return the longest formula from a word on: what opens it, itself, what closes it, its end."""
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
    before, stretch, after = _trim(" ".join(words[start:end]))
    return before, stretch, after, end


def _kind(words: list[str], i: int) -> str:
    word = ENDS.sub(r"\2", words[i])
    previous = words[i - 1] if i else ""
    if previous == "App." or WORDY.fullmatch(word):
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
    """Say whether two words belong to one formula: numbers need an operator between."""
    if "number" in (left, right):
        return "operator" in (left, right) and not re.match(r"[−-]\d", word)
    return True


def _stops(stretch: str) -> bool:
    """Say whether punctuation ends the formula: not within its brackets."""
    return stretch[-1] in ",;:." and _open(stretch) <= 0 or _open(stretch) < 0


def _open(text: str) -> int:
    return sum(text.count(c) for c in "([⌈{") - sum(text.count(c) for c in ")]⌉}")


def _trim(stretch: str) -> tuple[str, str, str]:
    """Move punctuation and lone brackets at the ends out of a formula."""
    before = after = ""
    while stretch[-1] in ",;:." or (stretch[-1] == ")" and _open(stretch) < 0):
        stretch, after = stretch[:-1], stretch[-1] + after
    while stretch[0] == "(" and _open(stretch) > 0:
        before, stretch = before + stretch[0], stretch[1:]
    return before, stretch, after


def to_tex(formula: str) -> str:
    """Return a formula of plain text as LaTeX; what KaTeX knows stays: σ, ≤, ‖."""
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


def missed(text: str) -> list[str]:
    """Return the words outside formulas that look like mathematics: for the tests."""
    plain = " ".join(piece for piece, is_formula in pieces(text) if not is_formula)
    return [word for word in plain.split() if re.search(rf"[{MATHS}=]", word)]
