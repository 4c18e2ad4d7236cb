"""Series and images that each have a class: batches, loss, wrong data."""

import dataclasses

import pytest
import torch
from kinds import classifier, images, series, vision
from torch import nn

from derived_book.tasks.series.data import SeriesSplit
from derived_book.tasks.supervised import Examples, class_loss
from derived_book.training.fit import evaluate, fit


def test_every_example_is_seen_once_per_epoch_in_a_new_order():
    """An evaluation keeps the order of the examples."""
    x = torch.arange(10.0).view(10, 1, 1).expand(10, 2, 3)
    split = SeriesSplit(x, torch.rand(10, 2) > 0.5, torch.arange(10))
    batches, orders = Examples(split, 4), []
    for seed, number in ((0, 0), (0, 0), (1, 0), (0, 1)):
        torch.manual_seed(10 * seed + number)
        found = list(batches.epoch(seed, number))
        assert [len(y) for *_, y in found] == [4, 4, 2] and len(batches) == 3
        for rows, padding, y in found:
            assert torch.equal(rows, x[y]) and torch.equal(padding, split.padding[y])
        orders.append(torch.cat([y for *_, y in found]).tolist())
        assert sorted(orders[-1]) == list(range(10))
    assert orders[0] == orders[1] and len(set(map(tuple, orders))) == 3
    assert torch.cat([y for *_, y in batches]).tolist() == list(range(10))
    assert [(len(y), padding) for _, padding, y in Examples(images())] == [(24, None)]


def test_loss_and_accuracy_are_means_over_examples():
    """In one batch, at a tiny rate without dropout, they are those of the initial weights."""
    data = series(10)
    first = classifier(dropout=0.0)(data.x, data.padding)
    history = fit(classifier(dropout=0.0), Examples(data, 10), class_loss, epochs=1, lr=1e-12)
    assert history["loss"][0] == pytest.approx(nn.functional.cross_entropy(first, data.y).item())
    assert history["accuracy"][0] == (first.argmax(1) == data.y).double().mean()
    first = classifier().eval()(data.x, data.padding)
    for size in (1, 4, 10):
        found = evaluate(classifier(), Examples(data, size), class_loss)
        assert found["accuracy"] == (first.argmax(1) == data.y).double().mean()
        assert found["loss"] == pytest.approx(nn.functional.cross_entropy(first, data.y).item())


def test_what_does_not_fit_the_model_before_any_work():
    for make, split, message in (
        (classifier, dataclasses.replace(series(), y=series().y + 1), "train.y holds 1 to 2; .* 2"),
        (vision, series(), "train.x is .*; expected floats of shape .n, 6, 4."),
    ):
        model = make()
        model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran first"))
        with pytest.raises(ValueError, match=message):
            fit(model, Examples(split), class_loss, epochs=1)


def test_losses_see_what_the_model_returns():
    wide = nn.Sequential()
    wide.forward = lambda x, padding: x
    with pytest.raises(ValueError, match=r"model returns shape \(24, 6, 3\)"):
        evaluate(wide, Examples(series()), class_loss)


def spoilt(field, change):
    good = series()
    return dataclasses.replace(good, **{field: change(getattr(good, field))})


def set_value(tensor, value):
    tensor = tensor.clone()
    tensor.view(len(tensor), -1)[3, 0] = value
    return tensor


WRONG = [
    (None, TypeError, "split is NoneType; expected a SeriesSplit"),
    (spoilt("x", lambda x: set_value(x, torch.nan)), ValueError, "split.x holds NaN or infinity"),
    (spoilt("x", lambda x: x[:, :, 0]), ValueError, "split.x is torch.float32 of shape"),
    (spoilt("x", lambda x: x.tolist()), TypeError, "split.x is list"),
    (spoilt("x", lambda x: x[:-1]), ValueError, "split.padding is"),
    (spoilt("padding", lambda p: p.tolist()), TypeError, "split.padding is list"),
    (spoilt("y", lambda y: y.int()), ValueError, "split.y is torch.int32"),
    (spoilt("y", lambda y: y.tolist()), TypeError, "split.y is list"),
    (spoilt("y", lambda y: y - 1), ValueError, "split.y holds -1 to 0; expected classes 0 <= x"),
    (spoilt("y", lambda y: y[:, None]), ValueError, r"split.y is .* shape \(24,\)"),
    (spoilt("y", lambda y: y.float()), ValueError, "split.y is torch.float32 .*; expected int64"),
    (SeriesSplit(torch.zeros(0, 6, 3), None, torch.zeros(0)), ValueError, "split is empty"),
]


@pytest.mark.parametrize("split, error, message", WRONG, ids=[w[2] for w in WRONG])
def test_splits_that_nothing_can_be_learned_from(split, error, message):
    with pytest.raises(error, match=message):
        Examples(split)


def test_wrong_batch_size():
    """`test_workers` and `test_images` test what else is not a whole number."""
    with pytest.raises(ValueError, match="batch_size is 0; expected a whole number"):
        Examples(series(), 0)
