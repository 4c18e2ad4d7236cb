"""Associative recall: the drawn questions, and the accuracy of answers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from derived_book.tasks.recall.loss import Questions, answer_loss
from derived_book.training.fit import evaluate, fit

SIZES = dict(pairs=4, symbols=6)


# --- Questions ------------------------------------------------------------------------------------


def test_every_question_has_one_answer():
    drawn, first = Questions(5, 7, 200).draw(), set()
    assert all(x.shape == (200, 5) and x.dtype == torch.int64 for x in drawn)
    for keys, values, asked, answers in zip(*(x.tolist() for x in drawn), strict=True):
        assert sorted(asked) == sorted(keys) and len(set(keys)) == 5
        assert [dict(zip(keys, values, strict=True))[key] for key in asked] == answers
        first.add(keys.index(asked[0]))
    for x in drawn[:2]:
        counts = x.flatten().bincount(minlength=7) / 1000
        assert len(counts) == 7 and ((counts - 1 / 7).abs() < 0.05).all()
    assert first == {*range(5)}


def test_steps_differ_and_the_test_does_not():
    def steps(seed, number):
        return [b[0].tolist() for b in Questions(4, 6, 2, 3).epoch(seed, number)]

    first = steps(0, 0)
    assert first == steps(0, 0) and len(first) == 3
    assert first[0] != first[1] and first != steps(1, 0) and first != steps(0, 1)
    whole = [b[0].tolist() for b in Questions(4, 6, 2, 6).epoch(0, 0)]
    assert whole == first + steps(0, 1), "6 steps differ from two epochs of 3"
    test = Questions(4, 6, 2, 3)
    before = torch.get_rng_state()
    once, again = ([[x.tolist() for x in b] for b in test] for _ in range(2))
    assert once == again and len(once) == 3 and once[0] != once[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_wrong_sizes_are_named():
    for wrong, error, message in [
        (dict(pairs=7), ValueError, "pairs is 7; expected at most 6, the number of symbols"),
        (dict(symbols=0), ValueError, "symbols is 0; expected a whole number, at least 1"),
        (dict(pairs=1.5), TypeError, "pairs is of type float; expected a whole number"),
        (dict(steps=0), ValueError, "steps is 0"),
    ]:
        with pytest.raises(error, match=message):
            Questions(**SIZES | wrong)


# --- Answers --------------------------------------------------------------------------------------


class Lookup(nn.Module):
    """A model that gives probability one to the value paired with the key."""

    symbols = 6

    def forward(self, keys, values, asked):
        found = (asked[:, :, None] == keys[:, None]).double() @ nn.functional.one_hot(
            values, self.symbols
        ).double()
        return 100 * found


def test_the_loss_knows_right_answers_from_wrong_ones():
    model, test = Lookup(), Questions(**SIZES, batch_size=256, steps=1)
    assert evaluate(model, test, answer_loss) == {"loss": pytest.approx(0, abs=1e-9), "accuracy": 1}
    ((keys, values, asked, answers),) = test
    other = (values + 1) % 6
    assert answer_loss(model, (keys, other, asked, answers))[1]["accuracy"].total == 0


def test_what_does_not_fit_is_named():
    model, good = Lookup(), torch.zeros(2, 3, dtype=torch.int64)
    model.symbols = 9
    with pytest.raises(ValueError, match="train has 6 symbols; expected 9, as the model"):
        fit(model, Questions(**SIZES), answer_loss, epochs=1)
    with pytest.raises(TypeError, match="model.symbols is None; expected its number of symbols"):
        evaluate(nn.Linear(2, 2), Questions(**SIZES), answer_loss)
    with pytest.raises(
        ValueError, match=r"model returns shape \(2, 3\); expected \(2, 3, symbols\)"
    ):
        answer_loss(lambda keys, values, asked: keys.float(), (good, good, good, good))
