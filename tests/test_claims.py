"""Each check passes what is true, rejects what is not, and refuses to be unable to fail."""

import json

import numpy as np
import pytest
import sympy
import torch

from derived_attention import claims
from derived_attention.claims import ClaimError

x, y = sympy.symbols("x y")
one, two, three = (np.array(n) for n in (1.0, 2.0, 3.0))  # checks of typed numbers are refused
pair = np.array([1.0, 2.0])


@pytest.fixture(autouse=True)
def nothing_checked(monkeypatch):
    monkeypatch.setattr(claims, "_checked", {})


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
    with pytest.raises(ClaimError, match="cannot fail"):
        claims.identity(None, x - x, mutant=sympy.sin(x) ** 2 + sympy.cos(x) ** 2 - 1)


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
    with pytest.raises(ValueError, match="left must not be empty"):
        claims.equal(None, pair[:0], [], mutant=one)


def test_inequality_needs_the_bound_to_hold_and_the_sharper_one_to_break():
    sharp, low = np.array([1.5, 1.9]), np.array([1.0, 1.8])
    claim = claims.inequality(None, pair, [1.5, 2.0], mutant=sharp)
    assert claim.margin == 0 and claim.mutant_margin == pytest.approx(0.1)
    assert "tight, up to rounding" in str(claim)
    with pytest.raises(ClaimError, match="violated"):
        claims.inequality(None, pair, [1.5, 1.9], mutant=sharp)
    with pytest.raises(ClaimError, match="mutant not rejected"):
        claims.inequality(None, low, [1.5, 2.5], mutant=sharp)


def test_certificate_checks_the_gap_the_residuals_and_the_mutant():
    claim = claims.certificate("000.eq10", primal=two, dual=2.0 + 1e-9, mutant=one)
    assert claim.margin < 1e-8 < claim.mutant_margin
    with pytest.raises(ClaimError, match="duality gap"):
        claims.certificate(None, primal=two, dual=1.9, mutant=one)
    with pytest.raises(ClaimError, match="complementary slackness"):
        kkt = {"complementary slackness": 1e-3}
        claims.certificate(None, primal=two, dual=2.0, kkt=kkt, mutant=one)
    with pytest.raises(ClaimError, match="negative"):
        claims.certificate(None, primal=two, dual=2.0, kkt={"negative": -1.0}, mutant=one)
    with pytest.raises(ClaimError, match="mutant not rejected"):
        claims.certificate(None, primal=two, dual=2.0, mutant=two)
    with pytest.raises(ClaimError, match="duality gap"):
        claims.certificate(None, primal=two * np.nan, dual=2.0, mutant=one)


def test_refuted_needs_a_violation_and_a_correction_that_survives():
    claim = claims.refuted(
        "001.thm1", printed=1.8, actual=two, corrected=2.1, correction="a factor is missing"
    )
    assert claim.verdict == "wrong as printed" and claim.margin == pytest.approx(0.2)
    assert "violated by 0.2 · correction survives, 0.1 to spare" in str(claim)
    value = {"printed": 1.8, "actual": two, "corrected": 2.0, "correction": "c", "relation": "=="}
    assert "correction survives, 0 off" in str(claims.refuted(None, **value))
    with pytest.raises(ClaimError, match="not refuted"):
        claims.refuted(None, printed=2.1, actual=two, corrected=2.2, correction="c")
    with pytest.raises(ClaimError, match="correction fails too"):
        claims.refuted(None, printed=1.8, actual=two, corrected=1.9, correction="c")
    with pytest.raises(ClaimError, match="not refuted"):
        claims.refuted(None, printed=1.0, actual=one, corrected=1.0, relation="==", correction="c")
    with pytest.raises(ClaimError, match="not refuted"):  # as inexact as the correction may be
        claims.refuted(None, printed=1.5, actual=one, corrected=1.1, tol=0.1, correction="c")
    with pytest.raises(ValueError, match="relation"):
        claims.refuted(None, printed=1, actual=two, corrected=3, relation="<", correction="c")
    with pytest.raises(ValueError, match="correction"):
        claims.refuted(None, printed=1, actual=two, corrected=3, correction=" ")


def test_a_correction_that_nearly_anything_survives_is_none():
    claims.refuted(None, printed=1.9, actual=two, corrected=3, correction="ten times the margin")
    with pytest.raises(ClaimError, match=r"correction has 1.1 to spare .* lacks 0.1"):
        claims.refuted(None, printed=1.9, actual=two, corrected=3.1, correction="c")
    many = [[2.0, 5.0], [1.9, 5.0], [1e6, 5.5]]  # the second instance shows that it is sharp
    claims.refuted(None, printed=many[1], actual=pair * [2, 2.5], corrected=many[2], correction="c")


# --- Checks that show nothing ---------------------------------------------------------------------


def root(z):
    return np.sqrt(z)


def test_one_computation_on_both_sides_is_refused():
    with pytest.raises(ClaimError, match="left and right are one expression"):
        claims.equal(None, root(pair), root(pair), mutant=pair)
    a = root(pair)
    b = root(pair)
    with pytest.raises(ClaimError, match="left and right are one expression"):
        claims.equal(None, a, b, mutant=pair)
    c, d = root(pair), a[:]
    with pytest.raises(ClaimError, match="actual and corrected are one expression"):
        claims.refuted(None, printed=pair, actual=c, corrected=a, correction="c", relation="==")
    with pytest.raises(ClaimError, match="smaller and larger are one array"):
        claims.inequality(None, a, d, mutant=d - pair)
    with pytest.raises(ClaimError, match="left and right are one array"):
        tensor = torch.from_numpy(a)
        claims.equal(None, tensor[:2], a, mutant=pair)
    e, f = [], []  # lists that a loop fills are no expression
    for z in pair:
        e.append(float(z))
        f.append(float(z * one))
    claims.equal(None, e, f, mutant=a)
    a = pair**0.5  # another way to it
    claims.equal(None, a, root(pair), mutant=pair)


def test_a_check_of_typed_numbers_is_refused():
    for check in (
        lambda: claims.equal(None, 2 * 3.0, 6.0, mutant=two),
        lambda: claims.inequality(None, [31.9, 47.3], 50, mutant=two),
        lambda: claims.refuted(None, printed=0, actual=1, corrected=(2 - 1) ** 1, correction="c"),
        lambda: claims.identity(None, sympy.Integer(0), mutant=sympy.Integer(1)),
        lambda: claims.certificate(None, primal=2.0, dual=np.array(2.0), mutant=one),
        lambda: claims.definition(None, "f", W=(np.ones((2, 3)), (2, 3))),
    ):
        with pytest.raises(ClaimError, match="typed numbers"):
            check()


def test_a_mutant_is_a_mistake_that_someone_would_make():
    with pytest.raises(ClaimError, match="the mutant is a typed number"):
        claims.equal(None, two, 2.0, mutant=1.0)
    for nudge in (
        lambda: claims.inequality(None, pair, pair + one - 1, mutant=0.99 * (pair + one - 1)),
        lambda: claims.inequality(None, pair, two * pair / 2, mutant=two * pair / 2 - 0.1),
        lambda: claims.inequality(None, one, three / 3, mutant=(three / 3) / 1.5),
        lambda: claims.equal(None, pair[0], one, mutant=-0.1 + one),
        lambda: claims.equal(None, pair, root(pair**2), mutant=root(pair**2)[[1]] * 1.01),
    ):
        with pytest.raises(ClaimError, match="a little changed"):
            nudge()
    claims.equal(None, pair, root(pair**2), mutant=2 * root(pair**2))  # a lost ½
    claims.equal(None, pair[1], two, mutant=two - 1)  # one off
    claims.equal(None, pair[1], two, mutant=two**2)


def test_one_check_under_two_names_is_refused_but_for_another_paper():
    for item in ("000.eq10", "000.eq10", "001.eq1", None):  # a cell may run twice
        claims.equal(item, two, 2.0, mutant=one)
        claims.identity(item, x - x, mutant=x)
        claims.definition(item, "f", W=(pair, (2,)))
    with pytest.raises(ClaimError, match=r"000.eq11: this is the check that 000.eq10 has"):
        claims.equal("000.eq11", two, 2.0, mutant=one)
    with pytest.raises(ClaimError, match="this is the check"):
        claims.identity("000.eq11", x - x, mutant=x)
    with pytest.raises(ClaimError, match="this is the check"):
        claims.definition("000.eq11", "g", W=(pair, (2,)))
    claims.equal("000.eq11", two, 2.0, mutant=three)


def test_without_a_source_values_alone_are_checked():
    code = "claims.equal(None, f(2), f(2), mutant=3)"
    exec(code, {"claims": claims, "f": lambda z: z})
    with pytest.raises(ClaimError, match="mutant not rejected"):
        exec(code.replace("3", "2"), {"claims": claims, "f": lambda z: z})


def test_definition_checks_shapes():
    W = np.ones((2, 3))
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
    data, metadata = claim._repr_mimebundle_()
    assert "holds if" in data["text/plain"] and f'id="{claim.anchor}"' in data["text/html"]
    assert metadata[claims.OUTPUT_KEY]["item"] == "000.eq2"
    json.dumps(metadata, allow_nan=False)


def row(item, verdict, mutant_margin=1.0, statement=""):
    return "page", {
        "item": item, "kind": "equal", "verdict": verdict, "statement": statement,
        "margin": 0.0, "mutant_margin": mutant_margin, "anchor": "a",
    }  # fmt: skip


def test_the_ledger_keeps_the_gravest_verdict_and_its_statement():
    merged = claims.ledger(
        [
            row("000.eq2", "holds", statement="easy"),
            row("000.eq2", "wrong as printed", statement="the root is missing"),
            row("000.eq1", "holds if", statement="keys differ"),
            row("000.eq4", "definition", None),
            row(None, "holds"),
        ]
    )
    assert list(merged) == ["000.eq1", "000.eq2", "000.eq4"]
    assert merged["000.eq2"]["verdict"] == "wrong as printed"
    assert merged["000.eq2"]["statement"] == "the root is missing"
    assert len(merged["000.eq2"]["checks"]) == 2
    assert set(merged["000.eq1"]["checks"][0]) == {"kind", "margin", "mutant_margin", "page"}
    assert json.loads(claims.to_json(merged)) == merged


def test_the_ledger_refuses_unknown_ids_verdicts_and_unchecked_verdicts():
    with pytest.raises(ValueError, match="not an id"):
        claims.ledger([row("000.eq0", "holds")])
    with pytest.raises(ValueError, match="unknown verdict"):
        claims.ledger([row("000.eq1", "probably")])
    with pytest.raises(ValueError, match="without an executed check"):
        claims.ledger([row("000.eq1", "holds", None)])


def test_a_ledger_with_a_margin_that_is_no_number_is_not_written():
    bad = {"000.eq1": {"checks": [{"margin": float("nan")}]}}
    with pytest.raises(ValueError):
        claims.to_json(bad)
