"""Wrong answers to the exercises: each must fail, with a message that names what is wrong.

`wrong_answers/<page>.py` has, for each exercise with a check, answers that a student has given or
would give, each with a word of the message that it must get: ``WRONG = {"ex-01-entropy": [(code,
message), ...]}``. Of a page only the statements run that the exercise's cell needs.
"""

from functools import cache

import pytest

from derived_book.exercises import ExerciseError
from exercises import BOOK, WRONG, read_exercises, read_wrong_answers


@cache
def exercises(page):
    """Return, by label, the exercises of a page that have a check."""
    found = read_exercises(BOOK / f"{page}.md")
    return {exercise.label: exercise for exercise in found if exercise.name}


PAGES = sorted(path.stem for path in WRONG.glob("*.py"))
CASES = [
    pytest.param(page, label, i, id=f"{label}-{i}")
    for page in PAGES
    for label, exercise in exercises(page).items()
    for i in range(len(exercise.mistakes))
]


@pytest.mark.parametrize("page", PAGES)
def test_each_check_has_three_wrong_answers(page):
    counts = {label: len(exercise.mistakes) for label, exercise in exercises(page).items()}
    assert min(counts.values()) >= 3, counts


def test_no_wrong_answer_is_for_an_exercise_that_is_not_there():
    for page in PAGES:
        assert read_wrong_answers(page).keys() == exercises(page).keys()


@pytest.mark.parametrize(("page", "label", "i"), CASES)
def test_a_wrong_answer_is_told_what_is_wrong(page, label, i, capsys):
    exercise = exercises(page)[label]
    mistake, world = exercise.mistakes[i], {}
    exec("\n".join([*exercise.needed, exercise.before]), world)
    with pytest.raises(ExerciseError, match=mistake.message):
        exec(f"{mistake.code}\n{exercise.test}", world)
