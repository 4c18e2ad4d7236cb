"""Each check accepts what is true, rejects what is false, and is refused if it cannot fail."""

import dataclasses
import html
import json
import re
import sys
from functools import partial

import numpy as np
import pytest
import sympy
import torch
from IPython.core.interactiveshell import InteractiveShell

from derived_book import claims
from derived_book.claims import ClaimError
from derived_book.intervals import difference

x, y = sympy.symbols("x y")
one, two, three = (np.array(n) for n in (1.0, 2.0, 3.0))  # computed: checks of literals are refused
pair = np.cumsum([1.0, 1.0])
rng = np.random.default_rng(0)
error = partial(claims.refuted, "001.thm1", grade="error", correction="a factor is missing")


@pytest.fixture(autouse=True)
def nothing_checked(monkeypatch):
    monkeypatch.setattr(claims, "_checked", {})
    yield
    if InteractiveShell.initialized():
        InteractiveShell.clear_instance()


def test_identity_accepts_exact_zeros_and_records_the_mutant():
    claim = claims.identity("000.eq13", [(x + 1) ** 2 - x**2 - 2 * x - 1], mutant=x)
    assert (claim.verdict, claim.margin) == ("holds", 0.0)
    assert claim.mutant_margin > 0


def test_identity_handles_matrices_and_unevaluated_derivatives():
    derivative = sympy.Derivative(sympy.exp(x * y), x) - y * sympy.exp(x * y)
    claims.identity(None, sympy.Matrix([[derivative, 0]]), mutant=derivative + sympy.exp(x * y))


@pytest.mark.parametrize("residual", [x, sympy.Float(1e-20), sympy.sin(x) ** 2])
def test_identity_rejects_what_is_not_exactly_zero(residual):
    with pytest.raises(ClaimError, match="is not zero"):
        claims.identity(None, residual, mutant=x)


def test_identity_refuses_a_mutant_that_is_zero_too():
    zero = sympy.sin(x) ** 2 + sympy.cos(x) ** 2 - 1
    with pytest.raises(ClaimError, match="cannot fail"):
        claims.identity(None, sympy.expand(x * (x + 1)) - x**2 - x, mutant=zero)


def test_equal_takes_arrays_and_tensors_in_float64():
    claim = claims.equal("000.eq2", torch.tensor([1.0, 2.0]), pair, mutant=pair**2)
    assert claim.margin == 0 and claim.mutant_margin == pytest.approx(1 / 2)


@pytest.mark.parametrize("right", [[1.0, 2.1], [1.0, np.nan], [np.inf, 2.0]])
def test_equal_rejects_a_difference_or_a_non_number(right):
    with pytest.raises(ClaimError):
        claims.equal(None, pair, right, mutant=pair + pair)


@pytest.mark.parametrize("mutant", [[1.0, 2.0], [1.0, 2.0 + 1e-12], [1.0, np.nan]])
def test_equal_refuses_a_mutant_that_is_not_rejected(mutant):
    with pytest.raises(ClaimError, match="mutant"):
        claims.equal(None, pair, [1.0, 2.0], mutant=mutant)


def test_equal_names_a_wrong_shape_and_an_empty_array():
    with pytest.raises(ValueError, match="right has shape"):
        claims.equal(None, pair, [1.0], mutant=one)
    with pytest.raises(ValueError, match="left is True; expected the numbers"):
        claims.equal(None, (pair > 0).all(), 1.0, mutant=pair)
    with pytest.raises(ValueError, match="left is empty"):
        claims.equal(None, pair[:0], [], mutant=one)


def test_inequality_needs_the_bound_to_hold_and_the_sharper_one_to_break():
    sharp, low = np.cumsum([1.5, 0.4]), np.cumsum([1.0, 0.8])
    claim = claims.inequality(None, pair, [1.5, 2.0], mutant=sharp)
    assert claim.margin == 0 and claim.mutant_margin == pytest.approx(0.1)
    assert "tight, up to rounding" in str(claim)
    with pytest.raises(ClaimError, match="violated"):
        claims.inequality(None, pair, [1.5, 1.9], mutant=sharp)
    with pytest.raises(ClaimError, match="mutant not rejected"):
        claims.inequality(None, low, [1.5, 2.5], mutant=sharp)


@pytest.mark.parametrize("beside", [np.inf, 1e13])
def test_a_large_entry_hides_no_violation_beside_it(beside):
    with pytest.raises(ClaimError, match="the bound is violated by 4"):
        claims.inequality(None, pair + [4, 0], [1, beside], mutant=pair / 2)
    claims.inequality(None, -pair * [1, beside], pair, mutant=-pair * 2)  # log 0 is below all


def test_a_margin_that_is_infinite_is_refused():
    with pytest.raises(ClaimError, match="the margins are 0 and inf; expected finite numbers"):
        claims.equal(None, pair, [1.0, 2.0], mutant=pair * [1, 0], relative=True)


def test_certificate_checks_the_gap_the_residuals_and_the_mutant():
    claim = claims.certificate("000.eq10", primal=two, dual=2.0 + 1e-9, mutant=one)
    assert claim.margin < 1e-8 < claim.mutant_margin
    with pytest.raises(ClaimError, match="duality gap"):
        claims.certificate(None, primal=two, dual=1.9, mutant=one)
    with pytest.raises(ClaimError, match="complementary slackness"):
        kkt = {"complementary slackness": one / 1e3}
        claims.certificate(None, primal=two, dual=2.0, kkt=kkt, mutant=one)
    with pytest.raises(ClaimError, match="negative"):
        claims.certificate(None, primal=two, dual=2.0, kkt={"negative": -one}, mutant=one)
    with pytest.raises(ClaimError, match="mutant not rejected"):
        claims.certificate(None, primal=two, dual=2.0, mutant=two)
    with pytest.raises(ClaimError, match="duality gap"):
        claims.certificate(None, primal=two * np.nan, dual=2.0, mutant=one)


def test_refuted_needs_a_violation_and_a_correction_that_survives():
    claim = error(printed=1.8, actual=two, corrected=2.1, unit="nats")
    assert (claim.verdict, claim.grade) == ("wrong as printed", "error")
    assert claim.margin == pytest.approx(0.2)
    assert "violated by 0.2 nats · correction survives, 0.1 nats to spare" in str(claim)
    assert "wrong as printed (error):</strong>" in claim._repr_mimebundle_()["text/html"]
    equality = error(printed=1.8, actual=two, corrected=2.0, relation="==")
    assert "correction survives, 0 off" in str(equality)
    for check, message in (
        (lambda: error(printed=2.1, actual=two, corrected=2.2), "not refuted"),
        (lambda: error(printed=1.8, actual=two, corrected=1.9), "correction fails too"),
        (lambda: error(printed=1.0, actual=one, corrected=1.0, relation="=="), "not refuted"),
        # An error that a correction may have:
        (lambda: error(printed=1 - 5e-6, actual=one, corrected=1 + 5e-6, tol=1e-6), "not refuted"),
    ):
        with pytest.raises(ClaimError, match=message):
            check()
    for check, message in (
        (lambda: error(printed=1, actual=two, corrected=3, relation="<"), "relation"),
        (lambda: error(printed=1, actual=two, corrected=3, correction=" "), "correction"),
        (lambda: error(printed=1, actual=two, corrected=[], relation="=="), "corrected is empty"),
        (lambda: error(printed=1j, actual=two, corrected=3), "printed is complex; expected real"),
        (lambda: error(printed=1, actual=pair, corrected=A), "corrected has shape .3, 3.; expect"),
        (lambda: error(printed=A, actual=pair, corrected=3, relation="=="), "actual, .2,.$"),
    ):
        with pytest.raises(ValueError, match=message):
            check()


def test_what_is_refuted_has_an_item_and_a_grade_and_may_repeat_another():
    refute = partial(claims.refuted, printed=1.8, actual=two, corrected=2.1, correction="c")
    with pytest.raises(ValueError, match="grade is 'typo'; expected one of error, slip, copy"):
        refute("001.thm1", grade="typo")
    with pytest.raises(ValueError, match="item is None; expected an id"):
        refute(None, grade="slip")
    with pytest.raises(ValueError, match="'001.eq99' is not an id"):
        refute("001.appB", grade="slip", same_as="001.eq99")
    assert refute("001.appB", grade="slip", same_as="001.thm1").same_as == "001.thm1"


def test_a_correction_that_nearly_anything_survives_is_none():
    error(printed=1.9, actual=two, corrected=3, correction="ten times the margin")
    with pytest.raises(ClaimError, match=r"correction has slack 1.1, .* violated by 0.1"):
        error(printed=1.9, actual=two, corrected=3.1)
    many = [[2.0, 5.0], [1.9, 5.0], [1e6, 5.5]]  # the second instance shows that the bound is sharp
    error(printed=many[1], actual=pair * [2, 2.5], corrected=many[2])


def test_a_bound_that_nearly_anything_keeps_is_none():
    sharp, bound = (root(pair + n) for n in (-0.1, 1.4))
    claims.inequality(None, root(pair), bound, mutant=sharp)
    with pytest.raises(ClaimError, match=r"slack 2.24e\+04, and the mutant is violated by 0.05"):
        claims.inequality(None, root(pair), root(pair + 5e8), mutant=sharp)


def test_complex_numbers_are_compared_as_such():
    left, right, wrong = (np.exp(1j * n * pair) for n in (1, 1, -1))
    claims.equal(None, left, right, mutant=wrong)
    claims.equal(None, torch.tensor(left).conj(), torch.tensor(wrong), mutant=right)
    with pytest.raises(ClaimError, match="exceeds tol"):
        claims.equal(None, one + 2j * one, one + 9j * one, mutant=two)
    with pytest.raises(ValueError, match="smaller is complex; expected real numbers"):
        claims.inequality(None, left, pair, mutant=pair**0.5)


def test_entries_of_different_sizes_need_relative_errors():
    sizes = np.exp(np.arange(0, 60, 6) * pair.sum() / 3)
    wrong = sizes * np.where(sizes == 1, 1 + 1e-6, 1)
    with pytest.raises(ClaimError, match="error 1.000e-06 exceeds"):
        claims.equal(None, wrong, sizes, mutant=root(sizes), relative=True)
    for hidden in (sizes, 1e-150 * pair):  # one hides the others; all are tiny beside 1
        with pytest.raises(ClaimError, match="pass relative=True"):
            claims.equal("000.eq1", root(hidden) ** 2, hidden, mutant=root(hidden))
        claims.equal("000.eq1", root(hidden) ** 2, hidden, mutant=root(hidden), relative=True)
    zeros = np.where(pair > 1, 0.0, pair)
    claims.equal("000.eq1", zeros, [1.0, 0.0], mutant=pair, relative=True)
    with pytest.raises(ClaimError, match="error inf"):
        claims.equal(None, pair, zeros, mutant=zeros + pair**2, relative=True)
    claims.equal("000.eq1", np.log(one), 0.0, mutant=two)  # zeros alone hide nothing


def test_an_item_s_tolerance_is_small():
    for check in (
        lambda: claims.equal("000.eq2", two, 2.001, tol=1e-3, mutant=one),
        lambda: claims.certificate("000.eq2", primal=two, dual=2.001, tol=1e-3, mutant=one),
        lambda: error(printed=1.8, actual=two, corrected=2.0, tol=1e-3),
        lambda: claims.equal("000.eq2", two, 2.0, tol=float("nan"), mutant=one),
    ):
        with pytest.raises(ClaimError, match="expected at most 1e-05"):
            check()
    claims.equal(None, two, 2.001, tol=1e-3, mutant=one)  # allowed without an item: a simulation


def test_a_mutant_within_ten_times_the_tolerance_is_not_rejected():
    close, away = (two * (1 + n * 1e-6) for n in (5, 11))
    with pytest.raises(ClaimError, match="mutant not rejected"):
        claims.equal(None, two, 2.0, tol=1e-6, mutant=close)
    with pytest.raises(ClaimError, match="mutant not rejected"):
        claims.certificate(None, primal=two, dual=2.0, tol=1e-6, mutant=close)
    claims.equal(None, two, 2.0, tol=1e-6, mutant=away)
    claims.certificate(None, primal=two, dual=2 + 1e-9, tol=1e-6, mutant=two + 22e-6 * two)


# --- Checks that show nothing ---------------------------------------------------------------------


def root(z):
    return np.sqrt(z)


A = rng.normal(size=(3, 3))


def test_one_expression_on_both_sides_or_one_array_is_refused():
    a = root(pair)
    for check in (
        lambda: claims.equal(None, root(pair), root(pair), mutant=pair),
        lambda: claims.certificate(None, primal=pair[1], dual=pair[1], mutant=one),
        lambda: error(printed=pair, actual=root(pair), corrected=root(pair), relation="=="),
    ):
        with pytest.raises(ClaimError, match="are the same expression"):
            check()
    with pytest.raises(ClaimError, match="smaller and larger are the same array"):
        claims.inequality(None, a, a[:], mutant=a - pair)
    with pytest.raises(ClaimError, match="left and right are the same array"):
        claims.equal(None, torch.from_numpy(a)[:2], a, mutant=pair)
    claims.equal(None, pair**0.5, root(pair), mutant=pair)  # computed in another way


def compare(left, right):
    claims.equal(None, left, right, mutant=left + two)


def test_a_check_of_typed_numbers_is_refused():
    a = 6.0
    b = np.array([6.0])
    table = {"printed": [31.9, 47.3]}
    checks = [
        lambda: claims.equal(None, 2 * 3.0, 6.0, mutant=two),
        lambda: claims.inequality(None, [31.9, 47.3], 50, mutant=two),
        lambda: error(printed=0, actual=1, corrected=(2 - 1) ** 1),
        lambda: claims.identity(None, sympy.Integer(0), mutant=x),
        lambda: claims.certificate(None, primal=2.0, dual=np.array(2.0), mutant=one),
    ]
    for check in checks:
        with pytest.raises(ClaimError, match="are literals"):
            check()
    with pytest.raises(ClaimError, match="are literals"):
        claims.equal(None, b, a, mutant=two)
    for typed in (
        lambda: claims.equal(None, two, 2.0, mutant=1.0),
        lambda: claims.identity(None, (x + 1) ** 2 - x**2 - 2 * x - 1, mutant=sympy.Integer(1)),
    ):
        with pytest.raises(ClaimError, match="the mutant is a literal"):
            typed()
    compare(three, 3)  # arguments of a function do not count as literals
    claims.equal(None, np.mean(table["printed"]), 39.6, mutant=two)  # arithmetic on printed numbers
    claims.equal(None, 2 * a, three * 4, mutant=a**2)  # and with a named number


def test_one_check_under_two_names_is_refused_but_for_another_source():
    W = root(pair)
    for item in ("000.eq10", "000.eq10", "001.eq1", None):  # a cell may run twice
        claims.equal(item, two, 2.0, mutant=one)
        claims.identity(item, sympy.expand((x + y) ** 2) - x**2 - y**2 - 2 * x * y, mutant=x)
    claims.definition("000.def1", "f", W=(W, (2,)))
    with pytest.raises(ClaimError, match=r"000.eq11: this is the check of 000.eq10"):
        claims.equal("000.eq11", two, 2.0, mutant=three)
    with pytest.raises(ClaimError, match="this is the check"):
        claims.identity("000.eq11", sympy.expand((x + y) ** 2) - x**2 - y**2 - 2 * x * y, mutant=x)
    with pytest.raises(ClaimError, match="this is the check"):
        claims.definition("000.def2", "g", W=(W, (2,)))
    claims.equal("000.eq11", three, 3.0, mutant=two)


def test_one_check_with_other_last_digits_is_refused_under_a_second_name():
    first = claims.equal("000.eq10", root(A**2), abs(A), mutant=A)
    with pytest.raises(ClaimError, match="000.eq11: this is the check of 000.eq10"):
        claims.equal("000.eq11", root(A**2) + 1e-15, abs(A), mutant=A)
    way = np.exp(np.log(abs(A)))
    other = claims.equal("000.eq11", way, abs(A) + way - way, mutant=A**2)  # another mutant
    zeros = [np.log(one) + n * 1e-17 for n in range(2)]
    claims.equal("000.eq12", zeros[0], 0.0, mutant=two)
    with pytest.raises(ClaimError, match="this is the check of 000.eq12"):
        claims.equal("000.eq13", zeros[1], 0.0, mutant=two)
    small = 1e-150 * pair
    for item, z in (("000.eq14", small), ("000.eq15", 2 * small)):
        claims.equal(item, root(z) ** 2, z, mutant=root(z), relative=True)
    rows = [("one", dataclasses.asdict(first)), ("two", dataclasses.asdict(other))]
    claims.ledger(rows)
    rows[1][1]["digest"] = "other " + first.digest.split()[1]
    with pytest.raises(ValueError, match="one check for two items"):
        claims.ledger(rows)


def test_a_refused_check_is_free_for_another_item():
    for problem, item, condition in (
        ("holds_if is", "000.eq10", "always"),
        ("not an id", "000.eq999", None),
    ):
        with pytest.raises(ValueError, match=problem):
            claims.equal(item, two, 2.0, mutant=one, holds_if=condition)
        assert not claims._checked
    claims.equal("000.eq11", two, 2.0, mutant=one)
    with pytest.raises(ClaimError, match="this is the check"):
        claims.equal("000.eq10", two, 2.0, mutant=three)
    claims.equal("000.eq12", two, 2.0 + 1e-13, mutant=three)  # the refused check was not recorded


def test_a_definition_is_what_the_inventory_calls_one():
    with pytest.raises(ClaimError, match="004.thm1 states more than shapes"):
        claims.definition("004.thm1", "a theorem", W=(root(pair), (2,)))


@pytest.mark.parametrize(
    "condition", ["", " ", "always", "true.", "-", "as-printed", "a = a", "h > 0 and A≤ a", "0 < 1"]
)
def test_a_condition_is_stated(condition):
    with pytest.raises(ValueError, match="holds_if is .*; expected a condition"):
        claims.equal("000.eq2", two, 2.0, mutant=one, holds_if=condition)
    for condition in ("h>0", "0 < p, q < 1", "a = a + b", "i = j if i = 0", "N = 2 N'"):
        claims.equal("000.eq2", two, 2.0, mutant=one, holds_if=condition)


def test_items_come_from_a_cell_of_the_page_itself(tmp_path, monkeypatch, capsys):
    hidden = "def check(a, b, item): claims.equal(item, a, b, mutant=a + b)\n"
    (tmp_path / "hidden.py").write_text(f"from derived_book import claims\n{hidden}")
    monkeypatch.syspath_prepend(tmp_path)
    shell = InteractiveShell.instance()
    shell.run_cell("import numpy as np, hidden; from derived_book import claims")
    shell.run_cell("two = np.sqrt(4); way = np.exp(np.log(two)); how = {'mutant': two + 1}")
    cells = {
        "claims.equal('000.eq2', two, way, mutant=two + 1)": "",
        "def check(): claims.equal('000.eq2', two, way, mutant=two + 1)\ncheck()": "",
        "hidden.check(two, way, None)": "",
        "hidden.check(two, way, '000.eq2')": "must be called in a cell of the page",
        "claims.equal('000.eq2', *(two, two), mutant=two + 1)": "with its arguments written out",
        "claims.equal('000.eq2', two, way, **how)": "with its arguments written out",
        "list(map(lambda x: claims.equal('000.eq2', two, x, mutant=x + 1), [way]))": "",
        "list(map(claims.equal, ['000.eq2'], [two], [two]))": "missing 1 required",
        "from functools import partial": "",
        "list(map(partial(claims.equal, mutant=3), ['000.eq2'], [two], [two]))": "by its name",
        "equal = claims.equal\nequal('000.eq2', 2.0, 2, mutant=two + 1)": "are literals",
    }
    for cell, problem in cells.items():
        result = shell.run_cell(cell, store_history=True)
        assert problem in str(result.error_in_exec) and (problem or result.success), cell
    del sys.modules["hidden"]  # keys of stored runs contain the user's modules


def test_without_a_source_values_alone_are_checked():
    code = "claims.equal(None, f(2), f(2), mutant=3)"
    exec(code, {"claims": claims, "f": lambda z: z})
    with pytest.raises(ClaimError, match="mutant not rejected"):
        exec(code.replace("3", "2"), {"claims": claims, "f": lambda z: z})


def test_definition_checks_shapes():
    W = np.outer(pair, [1, 2, 3])
    claim = claims.definition("000.eq4", "regression function", W=(W, (2, 3)))
    assert claim.verdict == "definition" and claim.mutant_margin is None
    with pytest.raises(ClaimError, match="W has shape"):
        claims.definition(None, "f", W=(W, (3, 2)))
    with pytest.raises(ValueError, match="at least one"):
        claims.definition(None, "f")


@pytest.mark.parametrize("item", ["000.eq999", "", "eq1"])
def test_an_unknown_id_is_an_error(item):
    with pytest.raises(ValueError, match="inventory"):
        claims.equal(item, one, 1.0, mutant=two)


def test_a_claim_prints_one_line_and_carries_its_data(capsys):
    claim = claims.equal("000.eq2", one, 1.0, mutant=two, holds_if="scores are finite")
    assert capsys.readouterr().out.count("\n") == 1
    shown = claim._repr_mimebundle_()
    assert "holds if" in shown["text/plain"] and f'id="{claim.anchor}"' in shown["text/html"]
    data = re.search(f'{claims.DATA}="([^"]*)"', shown["text/html"])[1]
    assert json.loads(html.unescape(data)) == dataclasses.asdict(claim)


def row(item, verdict, mutant_margin=1.0, statement="", page="page", **more):
    return page, {
        "item": item, "kind": "equal", "verdict": verdict, "statement": statement,
        "margin": 0.0, "mutant_margin": mutant_margin, "anchor": "a", **more,
    }  # fmt: skip


def test_the_ledger_keeps_the_gravest_verdict_and_its_statement():
    merged = claims.ledger(
        [
            row("000.eq2", "holds", statement="easy"),
            row("000.eq2", "wrong as printed", statement="the root is missing", grade="slip"),
            row("000.eq1", "holds if", statement="keys differ"),
            row("000.eq4", "definition", None),
            row(None, "holds"),
        ]
    )
    assert list(merged) == ["000.eq1", "000.eq2", "000.eq4"]
    assert merged["000.eq2"]["verdict"] == "wrong as printed"
    assert merged["000.eq2"]["statement"] == "the root is missing"
    assert len(merged["000.eq2"]["checks"]) == 2
    fields = {"kind", "margin", "mutant_margin", "unit", "page"}
    assert set(merged["000.eq1"]["checks"][0]) == fields
    assert json.loads(claims.to_json(merged)) == merged


def wrong(item, grade, same_as=None):
    return row(item, "wrong as printed", grade=grade, same_as=same_as, statement="a factor")


def test_the_ledger_refuses_one_check_for_two_items_on_two_pages():
    first = row("000.eq1", "holds", page="book/one", digest="d")
    rows = [first, row("000.eq1", "holds", page="book/two", digest="d")]
    rows += [row("001.eq1", "holds", digest="d"), row(None, "holds", digest="d")]
    claims.ledger(rows)
    problem = "one check for two items: 000.eq1 on book/one, 000.eq2 on book/two"
    with pytest.raises(ValueError, match=problem):
        claims.ledger([first, row("000.eq2", "holds", page="book/two", digest="d")])


@pytest.fixture
def five(tmp_path):
    """An inventory with two numbered items, a definition and two without numbers."""
    before = claims._inventory_path
    path = tmp_path / "mine.csv"
    kinds = {"eq1": "equation", "thm1": "theorem", "def1": "definition", "text.a": "text",
             "table.b": "table"}  # fmt: skip
    lines = [f"p.{k},{v},topic,{'definition' * (k == 'def1')}" for k, v in kinds.items()]
    path.write_text("\n".join(["id,kind,topic,role", *lines]))
    claims.use_inventory(path)
    yield path
    claims.use_inventory(before)


def test_an_inventory_of_one_s_own(five):
    assert list(claims.inventory())[:2] == ["p.eq1", "p.thm1"]
    assert claims.inventory()["p.def1"] == dict(kind="definition", topic="topic", role="definition")
    assert claims.is_numbered("p.eq1") and not claims.is_numbered("p.text.a")
    claims.definition("p.def1", "f", W=(root(pair), (2,)))
    with pytest.raises(ValueError, match="see use_inventory"):
        claims.equal("000.eq1", two, 2.0, mutant=one)
    repeated, unnamed = "id,kind,topic\na.b,text,x\na.b,text,y\n", "id,kind,topic\n,,\n"
    for text in ("id,topic\n", "id,topic\na.b,x\n", repeated, unnamed):
        (bad := five.with_name("bad.csv")).write_text(text)
        with pytest.raises(ValueError, match="must have columns"):
            claims.use_inventory(bad)
    five.write_text("id,kind,topic\np.new,text,x\n", "utf-8-sig")  # as a spreadsheet saves it
    claims.use_inventory(five)
    assert list(claims.inventory()) == ["p.new"]


def test_a_mistake_counts_once_however_many_items_repeat_it(five):
    repeated = [wrong("p.eq1", "slip", "p.text.a"), wrong("p.text.a", "error")]
    other = [wrong("p.table.b", "copy"), row("p.def1", "definition", None)]
    rows = claims.ledger([*repeated, *other, row("p.thm1", "holds")])
    assert rows["p.eq1"]["same_as"] == "p.text.a" and rows["p.eq1"]["grade"] == "slip"
    expected = {
        "all": 5, "numbered": 3, "unnumbered": 2, "testable": 2, "wrong as printed": 3,
        "holds if": 0, "holds": 1, "definition": 1, "errors": 1, "slips": 0, "copies": 0,
        "unnumbered errors": 0, "unnumbered slips": 0, "unnumbered copies": 1,
    }  # fmt: skip
    assert claims.count(rows) == expected


def test_the_ledger_refuses_impossible_rows(five):
    for problem, rows in {
        "not an id": [row("p.eq0", "holds")],
        "unknown verdict": [row("p.eq1", "probably")],
        "without an executed check": [row("p.eq1", "holds", None)],
        "without a grade": [wrong("p.eq1", None)],
        "no page gives a verdict": [wrong("p.eq1", "slip", "p.thm1")],
        "not wrong as printed": [wrong("p.eq1", "slip", "p.thm1"), row("p.thm1", "holds")],
        "same_as is circular": [wrong("p.eq1", "slip", "p.thm1"), wrong("p.thm1", "slip", "p.eq1")],
    }.items():
        with pytest.raises(ValueError, match=problem):
            claims.ledger(rows)


def test_a_ledger_with_a_margin_that_is_no_number_is_not_written():
    with pytest.raises(ValueError):
        claims.to_json({"000.eq1": {"checks": [{"margin": float("nan")}]}})


# --- Measurements ---------------------------------------------------------------------------------


@pytest.mark.parametrize("paired", [True, False])
def test_what_is_measured_has_an_interval_and_says_who_won(paired):
    runs = np.array([1.0, 2.0, 4.0, 3.0])
    lead = np.array([5.0, 5.5, 5.0, 5.5])
    say = partial(claims.measured, "a leads", runs + lead, runs, unit="points", paired=paired)
    ahead = say(predicted=">")
    mean, half = difference(runs + lead, runs, paired=paired)
    assert ahead.interval == (mean - half, mean + half) and (half < 0.5) == paired
    assert ahead.verdict == "as predicted" and ahead.margin == pytest.approx(5.25)
    assert ahead.item is None and ahead.seeds == 4
    assert "+5.25 points, 95 % interval" in str(ahead) and "4 seeds" in str(ahead)
    for predicted, outcome in {"<": "against the prediction", ">": "as predicted"}.items():
        assert say(predicted=predicted, outcome=outcome).verdict == outcome
        with pytest.raises(ClaimError, match=f"the page says 'open', the runs '{outcome}'"):
            say(predicted=predicted, outcome="open")


def test_an_interval_around_zero_is_open():
    say = partial(claims.measured, "a leads", [1.0, 2.0], [2.0, 1.5], predicted=">", unit="points")
    assert say().verdict == "open"
    with pytest.raises(ClaimError, match="the page says 'as predicted', the runs 'open'"):
        say(outcome="as predicted")
    equal = claims.measured("a", [1.0, 1.0], [1.0, 1.0], predicted=">", unit="points", paired=True)
    assert equal.verdict == "open" and equal.interval == (0.0, 0.0)
    sure = claims.measured("a", [2.0, 2.0], [1.0, 1.0], predicted=">", unit="points", paired=True)
    assert sure.verdict == "as predicted" and sure.interval == (1.0, 1.0)


def test_what_is_measured_never_looks_like_what_holds():
    for lead in (5, 0, -5):
        claim = claims.measured("a", [1.0 + lead, 2 + lead], [2.0, 1], predicted=">", unit="points")
        page = claim._repr_mimebundle_()["text/html"]
        assert 'class="da-claim da-measured' in page and "da-holds" not in page
        assert ("da-open" in page) == (claim.verdict == "open")
        assert claim.verdict not in claims.VERDICTS


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"predicted": ">="}, "predicted is"),
        ({"unit": " "}, "unit is empty"),
        ({"outcome": "holds"}, "outcome is"),
        ({"arm": [1.0]}, "two finite values"),
        ({"arm": [1.0, np.nan]}, "two finite values"),
        ({"arm": [1.0, 2.0, 3.0], "paired": True}, "expected pairs"),
    ],
)
def test_a_measurement_that_makes_no_sense_is_refused(change, problem):
    given = {"arm": [1.0, 2.0], "beside": [1.0, 3.0], "predicted": ">", "unit": "points"}
    with pytest.raises(ValueError, match=problem):
        claims.measured("a leads", **{**given, **change})
