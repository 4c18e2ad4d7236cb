"""Each check passes what is true, rejects what is not, and refuses to be unable to fail."""

import json

import numpy as np
import pytest
import sympy
import torch

from derived_attention import claims
from derived_attention.claims import ClaimError

x, y = sympy.symbols("x y")


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
    claim = claims.equal("000.eq2", torch.ones(3), np.ones(3), mutant=np.ones(3) * 1.5)
    assert claim.margin == 0 and claim.mutant_margin == pytest.approx(1 / 3)


@pytest.mark.parametrize("right", [[1.0, 2.1], [1.0, np.nan], [np.inf, 2.0]])
def test_equal_rejects_a_difference_or_a_non_number(right):
    with pytest.raises(ClaimError):
        claims.equal(None, [1.0, 2.0], right, mutant=[5.0, 5.0])


@pytest.mark.parametrize("mutant", [[1.0, 2.0], [1.0, 2.0 + 1e-12], [1.0, np.nan]])
def test_equal_refuses_a_mutant_that_is_not_rejected(mutant):
    with pytest.raises(ClaimError, match="mutant"):
        claims.equal(None, [1.0, 2.0], [1.0, 2.0], mutant=mutant)


def test_equal_names_a_wrong_shape_and_an_empty_array():
    with pytest.raises(ValueError, match="right has shape"):
        claims.equal(None, [1.0, 2.0], [1.0], mutant=[0.0, 0.0])
    with pytest.raises(ValueError, match="left must not be empty"):
        claims.equal(None, [], [], mutant=[])


def test_inequality_needs_the_bound_to_hold_and_the_sharper_one_to_break():
    claim = claims.inequality(None, [1.0, 2.0], [1.5, 2.0], mutant=[1.5, 1.9])
    assert claim.margin == 0 and claim.mutant_margin == pytest.approx(0.1)
    with pytest.raises(ClaimError, match="violated"):
        claims.inequality(None, [1.0, 2.1], [1.5, 2.0], mutant=[0.0, 0.0])
    with pytest.raises(ClaimError, match="mutant not rejected"):
        claims.inequality(None, [1.0, 2.0], [1.5, 2.5], mutant=[1.5, 2.4])


def test_certificate_checks_the_gap_the_residuals_and_the_mutant():
    claim = claims.certificate("000.eq10", primal=2.0, dual=2.0 + 1e-9, mutant=1.0)
    assert claim.margin < 1e-8 < claim.mutant_margin
    with pytest.raises(ClaimError, match="duality gap"):
        claims.certificate(None, primal=2.0, dual=1.9, mutant=1.0)
    with pytest.raises(ClaimError, match="complementary slackness"):
        claims.certificate(
            None, primal=2.0, dual=2.0, kkt={"complementary slackness": 1e-3}, mutant=1.0
        )
    with pytest.raises(ClaimError, match="negative"):
        claims.certificate(None, primal=2.0, dual=2.0, kkt={"negative": -1.0}, mutant=1.0)
    with pytest.raises(ClaimError, match="mutant not rejected"):
        claims.certificate(None, primal=2.0, dual=2.0, mutant=2.0)
    with pytest.raises(ClaimError, match="duality gap"):
        claims.certificate(None, primal=float("nan"), dual=2.0, mutant=1.0)


def test_refuted_needs_a_violation_and_a_correction_that_survives():
    claim = claims.refuted(
        "001.thm1", printed=0.450, actual=0.589, corrected=0.6, correction="a factor is missing"
    )
    assert claim.verdict == "wrong as printed" and claim.margin == pytest.approx(0.139)
    with pytest.raises(ClaimError, match="not refuted"):
        claims.refuted(None, printed=0.6, actual=0.5, corrected=0.7, correction="c")
    with pytest.raises(ClaimError, match="correction fails too"):
        claims.refuted(None, printed=0.4, actual=0.5, corrected=0.45, correction="c")
    with pytest.raises(ClaimError, match="not refuted"):
        claims.refuted(None, printed=1.0, actual=1.0, corrected=1.0, relation="==", correction="c")
    with pytest.raises(ValueError, match="relation"):
        claims.refuted(None, printed=1, actual=2, corrected=3, relation="<", correction="c")
    with pytest.raises(ValueError, match="correction"):
        claims.refuted(None, printed=1, actual=2, corrected=3, correction=" ")


def test_definition_checks_shapes():
    claim = claims.definition("000.eq4", "regression function", W=(np.ones((2, 3)), (2, 3)))
    assert claim.verdict == "definition" and claim.mutant_margin is None
    with pytest.raises(ClaimError, match="W has shape"):
        claims.definition(None, "f", W=(np.ones((2, 3)), (3, 2)))
    with pytest.raises(ValueError, match="at least one"):
        claims.definition(None, "f")


@pytest.mark.parametrize("item", ["000.eq999", "", "eq1"])
def test_an_unknown_id_is_an_error(item):
    with pytest.raises(ValueError, match="inventory"):
        claims.equal(item, 1.0, 1.0, mutant=2.0)


def test_a_claim_prints_one_line_and_carries_its_data(capsys):
    claim = claims.equal("000.eq2", 1.0, 1.0, mutant=2.0, holds_if="scores are finite")
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
