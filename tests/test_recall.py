"""Associative recall: what is drawn, what can be known about it, and who knows it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from derived_attention import softmax_attention, uniform_attention
from derived_book.runtime import seed_everything
from derived_book.tasks.model import Config
from derived_book.tasks.recall.data import draw_recall
from derived_book.tasks.recall.loss import Questions, answer_loss
from derived_book.tasks.recall.model import Recaller
from derived_book.training.fit import evaluate, fit

SIZES = dict(pairs=4, symbols=6)


def small(attention=softmax_attention, symbols=6):
    seed_everything(0)
    return Recaller(symbols, Config(16, 2, 1, 16, dropout=0.0, attention=attention))


# --- What is drawn --------------------------------------------------------------------------------


def test_every_question_has_one_answer():
    drawn = draw_recall(200, 5, symbols=7)
    assert all(x.shape == (200, 5) and x.dtype == torch.int64 for x in drawn)
    for keys, values, asked, answers, order in zip(*(x.tolist() for x in drawn), strict=True):
        assert (
            sorted(asked) == sorted(keys) and len(set(keys)) == 5 and sorted(order) == [*range(5)]
        )
        assert [dict(zip(keys, values, strict=True))[key] for key in asked] == answers
    for x in (drawn.keys, drawn.values):
        counts = x.flatten().bincount(minlength=7) / 1000
        assert len(counts) == 7 and ((counts - 1 / 7).abs() < 0.05).all()
    assert drawn.order[:, 0].unique().tolist() == [*range(5)]


def test_steps_differ_and_the_test_does_not():
    def steps(seed, number):
        return [b[0].tolist() for b in Questions(4, 6, 2, 3).epoch(seed, number)]

    first = steps(0, 0)
    assert first == steps(0, 0) and len(first) == 3
    assert first[0] != first[1] and first != steps(1, 0) and first != steps(0, 1)
    whole = [b[0].tolist() for b in Questions(4, 6, 2, 6).epoch(0, 0)]
    assert whole == first + steps(0, 1), "6 steps are two epochs of 3"
    test = Questions(4, 6, 2, 3)
    before = torch.get_rng_state()
    once, again = ([[x.tolist() for x in b] for b in test] for _ in range(2))
    assert once == again and len(once) == 3 and once[0] != once[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_wrong_sizes_are_named():
    for wrong, error, message in [
        (dict(pairs=7), ValueError, "pairs is 7; expected at most 6, the number of symbols"),
        (dict(symbols=0), ValueError, "symbols is 0; expected at least 1"),
        (dict(pairs=1.5), TypeError, "pairs is 1.5; expected an integer"),
    ]:
        for draw in (lambda **how: draw_recall(2, **how), Questions):
            with pytest.raises(error, match=message):
                draw(**SIZES | wrong)
    with pytest.raises(ValueError, match="steps is 0"):
        Questions(**SIZES, steps=0)


# --- Who knows it ---------------------------------------------------------------------------------


def test_softmax_recalls_and_uniform_weights_know_what_values_there_are():
    scores = []
    for attention in (softmax_attention, uniform_attention):
        model = small(attention)
        fit(model, Questions(**SIZES, batch_size=32, steps=150), answer_loss, epochs=1, lr=2e-2)
        test = Questions(**SIZES, batch_size=256, steps=1)
        scores.append(evaluate(model, test, answer_loss)["accuracy"])
    ((_, values, _, answers),) = test
    most = nn.functional.one_hot(values, 6).sum(1).argmax(1)  # a most frequent value, (B,)
    right = (answers == most[:, None]).double().mean().item()
    assert scores[0] > 0.95 and 1 / 6 + 0.05 < scores[1] < right + 0.03


def test_the_model_reads_pairs_as_a_set_and_questions_by_their_key():
    model = small().eval()
    keys, values, asked, answers, order = draw_recall(3, 4, symbols=6)
    logits = model(keys, values, asked)
    assert logits.shape == (3, 4, 6)
    shuffled = torch.randperm(4)
    assert torch.allclose(model(keys[:, shuffled], values[:, shuffled], asked), logits, atol=1e-5)
    assert torch.allclose(model(keys, values, asked[:, shuffled]), logits[:, shuffled], atol=1e-5)
    assert not torch.allclose(model(keys, values.roll(1, 1), asked), logits, atol=1e-3)
    assert not torch.allclose(model(keys.roll(1, 1), values, asked), logits, atol=1e-3)
    assert "symbols=6" in repr(model) and model(keys, values, asked[:, :1]).shape == (3, 1, 6)


def test_what_a_model_cannot_take_is_named():
    model, good = small(), torch.zeros(2, 3, dtype=torch.int64)
    for given, error, message in [
        ((good + 6, good, good), ValueError, "keys holds 6 to 6; expected symbols 0 <= x < 6"),
        ((good, good.float(), good), ValueError, "values is torch.float32 of shape"),
        ((good, good, [[1]]), TypeError, "asked is list; expected a tensor"),
        ((good, good[:, :2], good), ValueError, "expected a value for each key, and equal B"),
        ((good, good, good[:1]), ValueError, "expected a value for each key, and equal B"),
    ]:
        with pytest.raises(error, match=message):
            model(*given)
    with pytest.raises(ValueError, match="train has 6 symbols; expected 9, as the model"):
        fit(small(symbols=9), Questions(**SIZES), answer_loss, epochs=1)
    with pytest.raises(TypeError, match="model.symbols is None; expected a model such as Recaller"):
        evaluate(nn.Linear(2, 2), Questions(**SIZES), answer_loss)
    with pytest.raises(
        ValueError, match=r"model returns shape \(2, 3\); expected \(2, 3, symbols\)"
    ):
        answer_loss(lambda keys, values, asked: keys.float(), (good, good, good, good))
