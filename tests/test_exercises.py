"""Self-checks: they wait for an answer, accept the right one and explain the wrong one."""

import numpy as np
import pytest

from derived_attention.page.exercises import ExerciseError, check


def test_a_placeholder_is_not_an_error(capsys):
    check(..., 1.0)
    assert "Not attempted yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(0.5, 1 / 2), (np.eye(2), np.eye(2)), (True, True), ("row", "row"), ((1, [2.0]), (1, [2.0]))],
)
def test_right_answers_pass(answer, expected, capsys):
    check(answer, expected)
    assert capsys.readouterr().out == "Correct.\n"


def test_functions_are_compared_on_all_cases(capsys):
    check(lambda a: a + a, lambda a: 2 * a, on=[(1.0,), (np.arange(3),)])
    assert "Correct" in capsys.readouterr().out
    with pytest.raises(ExerciseError, match="case 2 of 2"):
        check(lambda a: a**2, lambda a: 2 * a, on=[(2.0,), (3.0,)])


@pytest.mark.parametrize(
    ("answer", "expected", "message"),
    [
        (0.6, 0.5, "has error"),
        (float("nan"), 0.5, "has error"),
        ([1.0, 2.0], 1.0, "has shape"),
        (False, True, "is not right"),
        ("column", "row", "is not right"),
        (1.0, (1.0, 2.0), "expected a tuple of 2"),
        ((1.0, 3.0), (1.0, 2.0), "part 2"),
        ("text", 1.0, "expected a number"),
    ],
)
def test_wrong_answers_are_explained(answer, expected, message):
    with pytest.raises(ExerciseError, match=message):
        check(answer, expected)


def test_a_value_where_a_function_is_expected_is_explained():
    with pytest.raises(ExerciseError, match="expected a function"):
        check(3.0, lambda a: a, on=[(1.0,)])
