"""Wrong answers to the exercises: each must fail, with a message that names what is wrong.

`wrong_answers/<page>.py` contains, for each exercise with a check, answers that a student has given
or might give, each with a pattern of the expected message: ``WRONG = {"ex-01-entropy": [(code,
message), ...]}``. A test runs only the statements of a page that the exercise's cell needs.
"""

from functools import cache

import pytest

from derived_book.exercises import ExerciseError
from exercises import BOOK, read_exercises, read_wrong_answers


@cache
def exercises(page):
    """Return, by label, the exercises of a page that have a check."""
    found = read_exercises(BOOK / f"{page}.md")
    return {exercise.label: exercise for exercise in found if exercise.name}


TEXTS = {path.stem: path.read_text("utf8") for path in sorted(BOOK.glob("*.md"))}
PAGES = [page for page, text in TEXTS.items() if "{exercise}" in text and exercises(page)]
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
