"""Tables, curves and power of experiments that decide."""

import json

import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy import stats

from derived_book import curves, detectable, experiment_tables, plot_curves, results_table, scores
from derived_book.training import recorded


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    rows = [
        {
            "arm": arm,
            "seed": seed,
            "steps": n,
            "lr": 0.01,
            "accuracy": level + 0.01 * seed + n / 100,
        }
        for arm, level in (("softmax", 0.5), ("linear", 0.2))
        for seed in range(4)
        for n in (5, 10, 20)
    ]
    rates = {"softmax": 0.01, "linear": 0.003}
    data = {"schema": 1, "rows": rows, "budget": 10, "steps": [5, 10, 20], "rates": rates}
    (tmp_path / "tiny_cpu.json").write_text(json.dumps(data))
    for module in (recorded, experiment_tables):
        read = lambda name: recorded_load(name, tmp_path)  # noqa: E731
        monkeypatch.setattr(module, "load_experiment", read)
    return rows


recorded_load = recorded.load_experiment


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
    assert "4 seeds" in lines[-1] and "80 %: 3.1 points." in lines[-1]
    with pytest.raises(
        ValueError, match=r"predicted has \['mean'\]; expected arms of tiny: softmax"
    ):
        results_table("tiny", "accuracy", predicted={"mean": ""})


@pytest.mark.parametrize(
    ("tuning", "words"),
    [
        ([], "one learning rate for all"),
        ([{"arm": "a"}], "learning rate chosen on other seeds"),
        ([{"steps": 2000}], "learning rate chosen after 2,000 steps by the worst of other seeds"),
    ],
)
def test_a_table_says_how_the_rate_was_chosen(experiment, monkeypatch, tuning, words):
    data = experiment_tables.load_experiment("tiny")[0] | {"tuning": tuning}
    monkeypatch.setattr(experiment_tables, "load_experiment", lambda name: [data])
    text = results_table("tiny", "accuracy", predicted={"linear": "less"}).data
    assert f"; {words}; " in text


def test_curves_are_drawn_over_steps(experiment):
    _, ax = plt.subplots()
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
