"""ListOps: values, distribution, lengths, disjoint splits, and rules that read only a prefix."""

import itertools

import numpy as np
import pytest
import torch

from derived_book.tasks.listops import data as listops
from derived_book.tasks.listops.data import (
    TOKENS,
    evaluate_expression,
    make_listops,
    prefix_rule,
)
from derived_book.tasks.series.data import SeriesSplit

CLOSE = TOKENS.index("]")
SMALL = dict(train=300, validation=50, test=100, min_length=5, max_length=40)


def encode(text):
    return [TOKENS.index(word) for word in text.replace("]", " ]").split()]


def rows(split):
    for x, padding, y in zip(split.x, split.padding, split.y.tolist(), strict=True):
        yield x[~padding].tolist(), y


def everything(data):
    return [*rows(data.train), *rows(data.validation), *rows(data.test)]


# --- Values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, value",
    [
        ("[MIN 4 2 9]", 2),
        ("[MAX 4 2 9]", 9),
        ("[MED 4 2 9]", 4),
        ("[MED 2 9 4 7]", 5),  # 5.5, rounded down
        ("[SM 9 9 5]", 3),
        ("[MAX 4 [MIN 2 9] 0]", 4),
        ("[SM [MED 1 [SM 8 8] 0] [MAX 3 3]]", 4),
        ("7", 7),
    ],
)
def test_values(text, value):
    assert evaluate_expression(encode(text)) == value
    padded = torch.tensor(encode(text) + [0, 0])
    assert evaluate_expression(padded) == value


@pytest.mark.parametrize(
    "text", ["", "[MIN 4 2", "4 2", "[MIN]", "]", "[MIN 4] ]", "MAX 4 MIN 2 9 0 no"]
)
def test_no_expression(text):
    tokens = [TOKENS.index(w) if w in TOKENS else 99 for w in text.replace("]", " ]").split()]
    with pytest.raises(ValueError, match="tokens are .*; expected one expression"):
        evaluate_expression(tokens)


def test_generator_and_evaluation_agree():
    """The generator computes a value while the tree grows; the evaluation uses only the tokens."""
    examples = everything(make_listops(**SMALL | dict(train=2000, max_length=120)))
    assert all(evaluate_expression(tokens) == value for tokens, value in examples)
    assert {value for _, value in examples} == set(range(10))


# --- Distribution ---------------------------------------------------------------------------------


def test_shapes_and_padding():
    data = make_listops(**SMALL)
    assert (data.vocabulary, data.classes, data.length) == (16, 10, 40)
    for split, n in ((data.train, 300), (data.validation, 50), (data.test, 100)):
        assert split.x.shape == (n, 40) and split.x.dtype == torch.int64
        assert split.padding.shape == (n, 40) and split.padding.dtype == torch.bool
        assert split.y.shape == (n,) and split.y.dtype == torch.int64
        lengths = (~split.padding).sum(1)
        assert lengths.min() > 5 and lengths.max() < 40
        assert (split.padding == (torch.arange(40) >= lengths[:, None])).all()
        assert (split.x[split.padding] == 0).all() and (split.x[~split.padding] > 0).all()
    assert len(make_listops(**SMALL | dict(validation=0)).validation) == 0


def test_all_are_different():
    """There are so few expressions of these lengths that equal ones are often drawn."""
    data = make_listops(2000, 300, 700, min_length=3, max_length=6)
    keys = [bytes(tokens) for tokens, _ in everything(data)]
    assert len(set(keys)) == len(keys) == 3000
    assert {len(key) for key in keys} == {4, 5}


def draws(n, **settings):
    how = dict(min_length=0, max_length=10**6, max_depth=10, max_args=10, seed=3) | settings
    return list(itertools.islice(listops._expressions(**how), n))


def children(tokens):
    """Yield each operator's depth, its number of arguments, and which of them are operators."""
    stack = []
    for token in tokens:
        if token == CLOSE:
            arguments = stack.pop()
            yield len(stack) + 1, len(arguments), arguments
            continue
        if stack:
            stack[-1].append(token >= listops.FIRST_OPERATOR)
        if token >= listops.FIRST_OPERATOR:
            stack.append([])
    assert not stack


def test_distribution_is_the_published_one():
    """No length is rejected here. The bounds are about five standard errors."""
    trees = [tokens for tokens, _ in draws(300, max_depth=6, max_args=7)]
    operators = [node for tokens in trees for node in children(tokens)]
    assert max(depth for depth, _, _ in operators) == 5  # digits only at depth 6
    arities = np.array([n for _, n, _ in operators])
    for n in range(2, 8):
        assert np.mean(arities == n) == pytest.approx(1 / 6, abs=5 / 2.6 / len(arities) ** 0.5)
    assert arities.min() == 2 and arities.max() == 7
    inner = [is_operator for depth, _, kinds in operators if depth < 5 for is_operator in kinds]
    assert np.mean(inner) == pytest.approx(0.25, abs=5 * 0.44 / len(inner) ** 0.5)
    assert not any(any(kinds) for depth, _, kinds in operators if depth == 5)
    tokens = np.array([token for tokens in trees for token in tokens])
    for kind in (range(1, 11), range(11, 15)):
        counts = np.array([np.sum(tokens == token) for token in kind])
        expected = counts.sum() / len(kind)
        assert np.abs(counts - expected).max() < 5 * expected**0.5


def test_a_seed_decides_everything():
    first, again, other = (make_listops(**SMALL, seed=seed) for seed in (0, 0, 1))
    for split in ("train", "validation", "test"):
        assert torch.equal(vars(first)[split].x, vars(again)[split].x)
        assert torch.equal(vars(first)[split].y, vars(again)[split].y)
    assert not torch.equal(first.train.x, other.train.x)
    state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    make_listops(**SMALL)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1] == state[1]).all()  # noqa: NPY002


def test_settings_of_the_arena():
    """With the published settings, a rule that reads one token scores near published results."""
    data = make_listops(500, 0, 300, min_length=500, max_length=2000)
    lengths = (~data.train.padding).sum(1)
    assert lengths.min() > 500 and lengths.max() < 2000 and data.length == 2000
    assert 0.28 < prefix_rule(data.train, data.test, 1) < 0.45
    assert 0.10 < prefix_rule(data.train, data.test, 0) < 0.25


# --- Rules that read only a prefix ----------------------------------------------------------------


def test_prefix_rule_by_hand():
    def split(*pairs):
        x = torch.tensor([encode(text) for text, _ in pairs])
        return SeriesSplit(x, x == 0, torch.tensor([value for _, value in pairs]))

    train = split(("[MIN 1", 1), ("[MIN 1", 1), ("[MIN 2", 2), ("[MAX 1", 9), ("[MAX 2", 1))
    test = split(("[MIN 2", 2), ("[MAX 1", 9), ("[SM 1", 1), ("[MIN 1", 0))
    assert prefix_rule(train, test, 0) == 1 / 4  # always 1
    assert prefix_rule(train, test, 1) == 2 / 4  # MIN: 1, MAX: 9 (seen first), SM unseen: 1
    assert prefix_rule(train, test, 2) == 3 / 4
    assert prefix_rule(train, train, 9) == 1


# --- Wrong input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(train=0), ValueError, "train is 0; expected a whole number, at least 1"),
        (dict(test="1"), TypeError, "test is of type str"),
        (dict(max_length=6), ValueError, "max_length is 6; expected a whole number, at least 7"),
        (dict(max_args=1), ValueError, "max_args is 1; expected a whole number, at least 2"),
    ],
)
def test_wrong_arguments(change, error, message):
    with pytest.raises(error, match=message):
        make_listops(**SMALL | change)


def test_not_enough_expressions():
    with pytest.raises(ValueError, match=r"train .* is 1000; found only (39\d|400) dif"):
        make_listops(900, 50, 50, min_length=3, max_length=5)  # 4 operators, two digits: 400
    with pytest.raises(ValueError, match="found only 0 different"):
        make_listops(1, 0, 0, min_length=1, max_length=3)
