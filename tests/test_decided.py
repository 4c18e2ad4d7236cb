"""Tables, curves, confidence intervals and power of experiments."""

import json
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy import stats

from derived_book import (
    curves,
    decided,
    detectable,
    experiment_tables,
    plot_curves,
    results_table,
    scores,
)
from derived_book.intervals import difference
from derived_book.training import recorded


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    rows = [
        dict(arm=arm, seed=seed, steps=n, lr=0.01, accuracy=level + 0.01 * seed + n / 100)
        for arm, level in (("softmax", 0.5), ("linear", 0.2))
        for seed in range(4)
        for n in (5, 10, 20)
    ]
    rates = {"softmax": 0.01, "linear": 0.003}
    data = {"schema": 1, "rows": rows, "budget": 10, "steps": [5, 10, 20], "rates": rates}
    data["tuning"] = []
    (tmp_path / "tiny_cpu.json").write_text(json.dumps(data))
    read = partial(recorded.load_experiment, folder=tmp_path)
    for module in (recorded, experiment_tables):
        monkeypatch.setattr(module, "load_experiment", read)
    return rows


def test_scores_are_those_at_the_budget_and_curves_have_all(experiment):
    assert scores("tiny", "accuracy")["linear"] == pytest.approx([0.3, 0.31, 0.32, 0.33])
    found = curves("tiny", "accuracy")
    assert list(found) == ["softmax", "linear"] and list(found["linear"]) == [5, 10, 20]
    assert found["softmax"][20] == pytest.approx([0.7, 0.71, 0.72, 0.73])


def test_a_table_shows_prediction_budget_and_its_double(experiment):
    text = results_table("tiny", "accuracy", predicted={"linear": "less", "softmax": "more"}).data
    lines = text.splitlines()
    assert lines[0] == "| arm | predicted | 10 steps | 20 steps | learning rate |"
    assert lines[2] == "| linear | less | 31.5 ± 2.1% | 41.5% | 0.003 |"
    assert lines[3].startswith("| softmax | more | 61.5 ± 2.1% | 71.5% | 0.01")
    assert "over 4 seeds" in lines[-1] and "difference of 3.1 points between" in lines[-1]
    with pytest.raises(ValueError, match=r"predicted has \['mean'\]; expected arms of tiny"):
        results_table("tiny", "accuracy", predicted={"mean": ""})
    with pytest.raises(ValueError, match="predicted is empty; expected at least one arm"):
        results_table("tiny", "accuracy", predicted={})


@pytest.mark.parametrize(
    ("tuning", "words"),
    [
        ([], "All arms have the same learning rate."),
        ([{"steps": 2000}], "rates were chosen after 2,000 steps, by the worst of other seeds."),
    ],
)
def test_a_table_says_how_the_rate_was_chosen(experiment, monkeypatch, tuning, words):
    data = experiment_tables.load_experiment("tiny")[0] | {"tuning": tuning}
    monkeypatch.setattr(experiment_tables, "load_experiment", lambda name: [data])
    text = results_table("tiny", "accuracy", predicted={"linear": "less"}).data
    assert f"{words} With " in text


def test_curves_are_drawn_over_steps(experiment):
    _, ax = plt.subplots()
    with pytest.raises(ValueError, match=r"styles has \['mean'\]; expected arms of tiny: softmax"):
        plot_curves(ax, "tiny", "accuracy", mean="bn")
    plot_curves(ax, "tiny", "accuracy", linear="C3")
    (line,) = ax.containers
    assert line.get_label() == "Linear"
    assert list(line.lines[0].get_xdata()) == [5, 10, 20]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["5", "10", "20"]
    plt.close("all")


@pytest.mark.parametrize("seeds", [2, 8, 30])
def test_the_detectable_difference_is_found_in_four_of_five(seeds):
    draws = np.random.default_rng(0).normal(size=(2, 20_000, seeds))
    draws[0] += detectable(1.0, seeds)
    found = stats.ttest_ind(*draws, axis=-1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.01)


def test_power_needs_two_seeds():
    with pytest.raises(ValueError, match="seeds 1; expected"):
        detectable(1.0, 1)


RUNS = [0.90, 0.91, 0.92, 0.93]


@pytest.mark.parametrize(
    ("shift", "options", "word"),
    [
        (-0.1, {}, "ahead"),
        (0.1, {}, "behind"),
        (0.005, {}, "open"),
        (0.005, {"paired": True}, "behind"),
        (0.005, {"within": 0.05}, "within δ"),
        (0.005, {"within": 0.01}, "open"),
        (0.03, {"within": 0.06}, "within δ"),
        (0.03, {}, "behind"),
        (0.03, {"comparisons": 40}, "open"),
        (0.1, {"within": 0.05}, "behind"),
    ],
)
def test_the_interval_decides_the_word(shift, options, word):
    assert decided(RUNS, np.add(RUNS, shift), **options) == word


@pytest.mark.parametrize("paired", [True, False])
def test_interval_of_a_difference_is_corrected_for_comparisons(paired):
    a, b = np.random.default_rng(0).normal(size=(2, 7))
    test = stats.ttest_rel if paired else partial(stats.ttest_ind, equal_var=False)
    for count in (1, 5):
        mean, half = difference(a, b, comparisons=count, paired=paired)
        low, high = test(a, b).confidence_interval(1 - 0.05 / count)
        assert (mean - half, mean + half) == pytest.approx((low, high))


@pytest.mark.parametrize("paired", [True, False])
def test_arms_without_variance_are_compared(paired):
    say = partial(decided, paired=paired)
    assert say([1.0, 1.0], [1.0, 1.0]) == "open"
    assert say([1.0, 1.0], [1.0, 1.0], within=0.01) == "within δ"
    assert say([1.0, 1.0], [0.9, 0.9]) == "ahead"
    assert say([0.9, 0.9], [1.0, 1.0], within=0.01) == "behind"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"a": [1.0]}, r"a is \[1.\]; expected two finite values or more"),
        ({"b": [1.0, np.nan]}, r"b is \[ 1. nan\]; expected two finite values or more"),
        ({"a": [1.0, 2.0, 3.0], "paired": True}, "a has 3 runs and b 2; expected pairs"),
        ({"within": 0}, "within is 0; expected a positive number, or None"),
        ({"comparisons": 0}, "comparisons is 0; expected at least 1"),
        ({"comparisons": np.nan}, "comparisons is nan; expected at least 1"),
    ],
)
def test_what_cannot_be_decided_is_refused(change, problem):
    with pytest.raises(ValueError, match=problem):
        decided(**({"a": [1.0, 2.0], "b": [1.0, 3.0]} | change))
