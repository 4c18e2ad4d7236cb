"""Tests of the protocol of recorded experiments: rates, collapses, longer runs, records."""

import importlib
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import test_recorded_experiments
import torch
from joblib.externals.loky.backend import reduction

from derived_book import Examples, curves, experiment_tables, load_experiment, tuning_table
from derived_book.tasks.series.data import SeriesSplit
from derived_book.training import recorded
from derived_book.training.fit import fit
from experiments import chapter07, protocol, small
from experiments.divergence import has_collapsed, watch_losses
from experiments.protocol import GRID, choose_rate, experiment, kept_rows, load_series_for, run

ROOT = Path(__file__).parents[1]
SCORE = [("right", "right, %", 100, 1)]


@pytest.fixture(autouse=True)
def store(monkeypatch, tmp_path):
    monkeypatch.setattr(small, "FOLDER", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def main(monkeypatch, plan, *options):
    monkeypatch.setattr(small, "EXPERIMENTS", {"tiny": plan})
    return small.main(["tiny", *options])


def read_from(monkeypatch, store):
    for module in (recorded, experiment_tables):
        monkeypatch.setattr(module, "load_experiment", partial(load_experiment, folder=store))


# --- the rate -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [
        ((0.5, 0.9, 0.6), (GRID[3], None)),  # inside
        ((0.5, 0.6, 0.9), (GRID[4], GRID[5])),  # at the upper edge
        ((0.9, 0.6, 0.5), (GRID[2], GRID[1])),  # at the lower edge
        ((0.5, 0.896, 0.9), (GRID[3], None)),  # a tie within 0.005
        ((0.9, 0.896, 0.5), (GRID[3], None)),
        ((0.5, 0.894, 0.9), (GRID[4], GRID[5])),  # no tie
        ((-5.0, -0.06, -0.02), (GRID[3], None)),  # a tie within 1 % of the range
        ((0.25, 0.25, 0.25), (GRID[3], None)),
        ((0.5, 0.9, -math.inf), (GRID[3], None)),
        ((0.5, -math.inf, -math.inf), (GRID[2], GRID[1])),
        ((-math.inf,) * 3, (GRID[2], GRID[1])),
    ],
)
def test_rate_is_inside_the_grid_or_ties_there_or_another_is_tried(scores, chosen):
    assert choose_rate({r: [x] for r, x in zip(GRID[2:5], scores, strict=True)}) == chosen


def test_the_mean_chooses_between_rates_whose_worst_seeds_tie():
    tied = {GRID[3]: [0.33, 0.35], GRID[4]: [0.33, 0.9]}
    assert choose_rate({GRID[2]: [0.33, 0.33], **tied}) == (GRID[4], GRID[5])
    assert choose_rate({**tied, GRID[5]: [0.1, 1.0]}) == (GRID[4], None)
    edge = {GRID[2]: [-2.0], GRID[3]: [-2.015], GRID[4]: [-4.0]}  # 1 % of the range is 0.02
    assert choose_rate(edge) == (GRID[3], None) and choose_rate(edge, 0.002) == (GRID[2], GRID[1])


@pytest.mark.parametrize("best", [min, max])
def test_a_grid_ends_at_its_bounds(best):
    rising = {rate: [float(i)] for i, rate in enumerate(GRID)}
    falling = {rate: [-x] for rate, (x,) in rising.items()}
    scores = rising if best is max else falling
    assert choose_rate(scores) == (best(GRID), None)


def peaked(arm, seed, steps, lr):
    """Return a score that is best at the rate in the arm's name; one tuning seed scores less."""
    off = abs(math.log10(lr) - math.log10(float(arm)))
    return {"right": 1 - 0.1 * off - 0.01 * (seed == 1001) + steps / 1e6, "cost": 1.0}


def test_rates_are_chosen_at_the_end_by_the_worst_of_three_other_seeds(monkeypatch, store, capsys):
    arms = [f"{GRID[i]:g}" for i in (0, 2, 3, 6)]
    plan = experiment("A text", peaked, arms, SCORE, steps=(1, 2, 4), seeds=2)
    assert main(monkeypatch, plan) == 0
    (data,) = load_experiment("small_tiny", store)
    assert data["rates"] == {arm: float(arm) for arm in arms}
    assert {(r["seed"], r["steps"]) for r in data["tuning"]} == {(s, 4) for s in (1000, 1001, 1002)}
    tried = {arm: sorted({r["lr"] for r in data["tuning"] if r["arm"] == arm}) for arm in arms}
    assert [len(tried[arm]) for arm in arms] == [5, 4, 3, 6]
    assert data["at_bound"] == ["0.0001"] and data["collapses"] == data["eightfold"] == []
    assert "after 4 steps by the worst of the seeds" in data["rule"] and data["best"] == "max"
    assert {(r["arm"], r["seed"], r["steps"]) for r in data["rows"]} == {
        (arm, seed, n) for arm in arms for seed in (0, 1) for n in (1, 2, 4)
    }
    assert all(row["collapsed"] == 0 for row in data["rows"])
    header, _ = experiment_tables.experiment_table(data)
    assert header[3:] == ["right, %", "right, %, 4 steps", "time of a run"]
    assert "| 0.003 | 0.003 | ≤ 95.2 | 99.0 | ≤ 94.8 | none |" in capsys.readouterr().out


def unsteady(arm, seed, steps, lr):
    """Return a score that is best at the middle rate, except for one tuning seed."""
    failed = lr == GRID[3] and seed == 1002
    return {"right": 0.1 if failed else 0.9 - 10 * abs(lr - GRID[3])}


def test_one_bad_seed_makes_a_rate_bad():
    data = run(experiment("A text", unsteady, ["a"], SCORE, steps=(1, 2), seeds=1))
    assert data["rates"] == {"a": GRID[2]}


def test_a_rate_that_one_seed_rules_out_is_not_tried_with_the_others():
    flat = lambda **_: {"right": 0.5}  # noqa: E731
    seeds = {peaked: {GRID[2]: 1, GRID[3]: 3, GRID[4]: 1}, flat: dict.fromkeys(GRID[2:5], 3)}
    for function, tried in seeds.items():
        data = run(experiment("A text", function, ["0.003"], SCORE, steps=(1, 2), seeds=1))
        assert Counter(row["lr"] for row in data["tuning"]) == tried


def test_an_arm_that_learns_at_a_high_rate_only_is_tried_there():
    def function(arm, seed, steps, lr):
        return {"right": 1.0 if arm == "late" and lr == 0.1 else 0.5 + (seed == 1001) * lr}

    plan = experiment("A text", function, ["late", "uniform"], SCORE, steps=(1, 2), seeds=1)
    data = run(plan)
    tried = {a: {r["lr"] for r in data["tuning"] if r["arm"] == a} for a in plan["names"]}
    assert data["rates"]["late"] == 0.1
    assert max(tried["late"]) == 0.3 and 0.1 not in tried["uniform"]


def test_a_fixed_rate_is_not_chosen(monkeypatch, store):
    plan = experiment("A text", peaked, ["0.01"], SCORE, steps=(1, 2), seeds=1, rate=0.05)
    assert main(monkeypatch, plan) == 0
    (data,) = load_experiment("small_tiny", store)
    assert data["rates"] == {"0.01": 0.05} and data["tuning"] == data["at_bound"] == []
    assert data["rule"] == "All arms have the learning rate 0.05, and none is chosen"


@pytest.mark.parametrize("steps", [(4,), (4, 4), (8, 4), (1, 4)])
def test_the_last_number_of_steps_is_twice_the_budget(steps):
    with pytest.raises(ValueError, match="expected rising numbers, the last twice the budget"):
        experiment("A text", peaked, ["a"], SCORE, steps=steps)


def test_series_of_the_test_choose_no_rate():
    data = load_series_for(0, "BasicMotions")
    tests = []
    for seed in protocol.TUNING_SEEDS:
        held = load_series_for(seed, "BasicMotions")
        assert (len(held.train), len(held.test)) == (30, 10) and held.length == data.length
        assert set(held.test.y.tolist()) == set(range(4))
        tests.append(held.test.x)
        rows = torch.cat([held.train.x, held.test.x]).flatten(1)
        assert sorted(rows.tolist()) == sorted(data.train.x.flatten(1).tolist())
    assert not torch.equal(tests[0], tests[1])
    assert len(data.train) == len(data.test) == 40


def test_movements_are_trained_for_the_same_steps_on_fewer_series(monkeypatch):
    given = []

    def stop(layer, series, seed, epochs, lr):
        given.append((len(series.train), epochs))
        raise KeyboardInterrupt

    monkeypatch.setattr(chapter07.page, "train_classifier", stop)
    for seed in (0, 1000):
        with pytest.raises(KeyboardInterrupt):
            chapter07.classify("all 1", seed, 90, 1e-3)
    assert given == [(40, 30), (30, 45)]  # three and two batches


# --- collapses ------------------------------------------------------------------------------------


def curve(steps, *levels, noise=0.0, seed=0):
    """Return losses that go from level to level in equal parts of the steps, with noise."""
    at = np.linspace(0, len(levels) - 1, steps)
    rng = np.random.default_rng(seed)
    return np.interp(at, range(len(levels)), levels) + noise * rng.normal(size=steps)


@pytest.mark.parametrize("steps", [40, 100, 600, 4000])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
def test_a_loss_that_comes_back_is_a_collapse(steps, noise):
    collapsed = partial(curve, steps, noise=noise)
    assert has_collapsed(collapsed(2.7, 0.3, 0.3, 0.3, 2.7))
    assert has_collapsed(collapsed(2.7, 0.3, 0.3, 2.0, 2.0))
    assert has_collapsed(collapsed(0.3, 0.3, 0.3, 2.7, 2.7))  # learns within the first part
    assert not has_collapsed(collapsed(2.7, 0.3, 0.3, 0.3, 0.3))
    assert not has_collapsed(collapsed(2.7, 2.7, 2.7, 2.0, 0.1))
    assert not has_collapsed(collapsed(2.7, 0.3, 0.3, 0.9, 0.9))  # loses less than half
    assert not has_collapsed(collapsed(2.7, 0.3, 2.7, 0.3, 0.3))  # learns again


@pytest.mark.parametrize("steps", [20, 45, 100, 800])
def test_noise_is_no_collapse(steps):
    kinds = ((0.0, 0.0), (0.7, 0.7), (20.0, 20.0), (3.0, 1.0, 1.0))
    noisy = (curve(steps, *x, noise=0.5, seed=i) for x in kinds for i in range(250))
    assert sum(map(has_collapsed, noisy)) <= 1


def test_spikes_are_no_collapse_and_a_loss_that_is_not_finite_is():
    losses = curve(400, 2, 1, 1)
    losses[::50] = 1e6
    losses[-1] = 1e6
    assert not has_collapsed(losses)
    assert has_collapsed([1.0, math.nan]) and has_collapsed([*losses, math.inf])
    assert not has_collapsed([]) and not has_collapsed([1.0, 2.0, 9.0])


def train(steps, rate, parts=1):
    """Train one weight by hand, in micro-batches, and return it."""
    weight = torch.tensor(0.0, requires_grad=True)
    for step in range(steps):
        weight.grad = None
        for _ in range(parts):
            loss = (weight - 1).square() / parts
            loss.backward()
        with torch.no_grad():
            weight -= rate(step) * weight.grad
    return weight.item()


def test_losses_of_any_loop_are_noted_and_nothing_else_changes():
    original = torch.Tensor.backward
    plain = train(60, lambda step: 0.1)
    with watch_losses() as losses:
        assert train(60, lambda step: 0.1) == plain
        torch.ones(3, requires_grad=True).mul(2).backward(torch.ones(3))  # not a loss
    assert len(losses) == 60 and losses[0] == 1 and not has_collapsed(losses)
    with watch_losses() as losses:
        train(60, lambda step: 0.1, parts=4)
    assert len(losses) == 240 and not has_collapsed(losses)
    with pytest.raises(RuntimeError, match="stop"), watch_losses():
        raise RuntimeError("stop")
    assert torch.Tensor.backward is original


def test_an_inner_block_keeps_its_losses():
    original = torch.Tensor.backward
    with watch_losses() as outer:
        train(2, lambda step: 0.1)
        with watch_losses() as inner:
            train(3, lambda step: 0.1)
        train(4, lambda step: 0.1)
    assert (len(outer), len(inner)) == (6, 3) and torch.Tensor.backward is original


@pytest.mark.parametrize("parts", [1, 3])
def test_a_run_at_an_absurd_rate_collapses(parts):
    for steps, late in ((200, 1.2), (600, 40.0)):  # its loss rises, or is infinite
        rates = [0.1] * (steps // 2) + [late] * (steps // 2)
        with watch_losses() as losses:
            train(steps, rates.__getitem__, parts)
        assert losses[len(losses) // 2] < 0.01 and has_collapsed(losses)


def fragile(arm, seed, steps, lr):
    """Train a weight: runs of arm b collapse above 0.003, and with seed 1 also at 0.003."""
    above = lr > GRID[3] or (lr == GRID[3] and seed == 1)
    fallen = arm == "b" and above
    rates = [0.1] * 20 + [1.2] * 60 if fallen else [0.1] * 80
    weight = train(80, rates.__getitem__)
    return {"right": 0.9 - 10 * abs(lr - GRID[3]), "weight": min(weight, 9.0)}


def test_an_arm_that_collapses_runs_again_at_a_lower_rate(monkeypatch, store, capsys):
    plan = experiment("A text", fragile, ["a", "b"], SCORE, steps=(1, 2), seeds=3)
    assert main(monkeypatch, plan, "--workers", "1") == 0
    (data,) = load_experiment("small_tiny", store)
    assert data["rates"] == {"a": GRID[3], "b": GRID[2]}
    assert not any(row["collapsed"] for row in data["rows"])
    assert all(row["lr"] == data["rates"][row["arm"]] for row in data["rows"])
    tuned = [{"arm": "b", "seed": 1000, "steps": 2, "lr": GRID[4]}]
    final = [{"arm": "b", "seed": 1, "steps": n, "lr": GRID[3]} for n in (1, 2)]
    assert data["collapses"] == tuned + final
    table = capsys.readouterr().out
    assert "| b | 0.001 | – | ≤ 88.0 | 90.0 | 2 at 0.003, 1 at 0.01 |" in table


def stops(arm, seed, steps, lr):
    """Train with `fit` on a loss that is not finite, except at the smallest rate."""
    examples = Examples(SeriesSplit(torch.ones(2, 1, 1), None, torch.zeros(2, dtype=torch.int64)))
    factor = 1.0 if lr == GRID[0] else math.nan
    loss = lambda model, batch: (factor * model(batch[0]).square().mean(), {})  # noqa: E731
    fit(torch.nn.Linear(1, 1), examples, loss, epochs=2)
    return {"right": 0.5}


def test_runs_that_stop_are_collapses_until_the_grid_ends():
    plan = experiment("A text", stops, ["a"], SCORE, steps=(1, 2), seeds=1)
    data = run(plan)
    assert data["rates"] == {"a": GRID[0]} and data["at_bound"] == ["a"]
    assert len(data["collapses"]) == 4 and all(r["right"] == 0.5 for r in data["rows"])
    never = experiment("A text", stops, ["a"], SCORE, steps=(1, 2), seeds=1, rate=0.1)
    assert [row["collapsed"] for row in run(never)["rows"]] == [1, 1]


def test_watched_runs_can_be_made_by_other_processes():
    """Run a pickled copy of the function; `test_workers` tests processes."""
    function = reduction.loads(reduction.dumps(protocol.watched(fragile, ["right"])))
    found = [function(arm="b", seed=seed, steps=1, lr=GRID[3]) for seed in (0, 1)]
    assert [row["collapsed"] for row in found] == [0, 1]


def test_a_module_that_runs_as_main_trains_with_its_functions_by_name(monkeypatch, store):
    """Other processes would get copies of functions of ``__main__``, with their own caches."""

    def fragile_copy(arm, seed, steps, lr):
        raise AssertionError("the copy of __main__ was called")

    fragile_copy.__module__, fragile_copy.__name__ = "__main__", "fragile"
    monkeypatch.setattr(small, "fragile", fragile, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", small.__spec__)
    plan = experiment("A text", fragile_copy, ["a"], SCORE, steps=(1, 2), seeds=1, rate=GRID[3])
    main(monkeypatch, plan)
    assert len(load_experiment("small_tiny", store)[0]["rows"]) == 2


# --- longer runs ----------------------------------------------------------------------------------


def slow(arm, seed, steps, lr):
    """Return a score: arm late overtakes high after many steps, low never does."""
    gain = {"high": 0.9, "late": 0.5 if steps < 10 else 0.95, "low": 0.4}[arm]
    return {"right": gain + 0.001 * (seed % 5) * (1 + (arm == "low")) - 10 * abs(lr - GRID[3])}


def test_an_order_that_longer_runs_support_is_written(monkeypatch, store, capsys):
    below = {"low": "high", "late": 1.0}
    how = {"steps": (1, 2), "below": below, "longer": ["high"]}
    plan = experiment("A text", slow, ["high", "late", "low"], SCORE, **how)
    assert main(monkeypatch, plan) == 0
    (data,) = load_experiment("small_tiny", store)
    assert [(r["arm"], r["seed"], r["steps"]) for r in data["eightfold"]] == [
        (arm, seed, 16) for seed in (0, 1, 2) for arm in ("high", "late", "low")
    ]
    assert "| low | 0.003 | ≤ 38.0 | 40.0 | ≤ 33.0 | none | 40.2 ± 0.2 |" in capsys.readouterr().out


@pytest.mark.parametrize(("below", "word"), [("high", "ahead"), (0.951, "open"), (0.9, "ahead")])
def test_an_order_that_changes_is_not_written(monkeypatch, store, capsys, below, word):
    plan = experiment("A text", slow, ["high", "late"], SCORE, steps=(1, 2), below={"late": below})
    assert main(monkeypatch, plan) == 1
    assert not list(store.glob("*.json"))
    text = capsys.readouterr().out
    assert "small_tiny_cpu.json is not written: `below` places late below" in text
    assert f"after 16 steps it is {word} (right 0.951 against " in text
    rates = "| late | 0.003 | ≤ 48.0 | 50.0 | ≤ 43.0 | none | 95.1 ± 0.1 |"
    assert "| attention | parameters" in text and rates in text


@pytest.mark.parametrize(("left", "changes"), [(0.3, False), (0.1, True), (-0.1, True)])
def test_an_open_order_is_supported_if_half_of_the_difference_is_left(left, changes):
    """The arms differ by 0.4 after two steps, but the interval is wider at every length."""
    noise = {0: -0.3, 1: 0.0, 2: 0.3}

    def loose(arm, seed, steps, lr):
        gap = left if steps == 16 else 0.4
        return {"right": 0.5 - (arm == "low") * (gap + noise.get(seed, 0)) - abs(lr - GRID[3])}

    below = {"low": "high"}
    plan = experiment("A", loose, ["high", "low"], SCORE, steps=(1, 2), seeds=3, below=below)
    assert bool(protocol.changed_orders(run(plan), plan)) == changes


def test_below_means_worse_where_the_smallest_value_is_the_best():
    errors = lambda arm, seed, steps, lr: {"error": 1 - slow(arm, seed, steps, lr)["right"]}  # noqa: E731
    how = {"steps": (1, 2), "best": min, "below": {"low": "high"}, "longer": ["high"]}
    plan = experiment("A", errors, ["high", "low"], [("error", "error", 1, 2)], **how)
    assert not protocol.changed_orders(run(plan), plan)
    plan["below"] = {"high": "low"}
    assert "it is ahead" in protocol.changed_orders(run(plan), plan)[0]


def test_a_longer_run_that_collapses_has_a_lower_rate():
    def later(arm, seed, steps, lr):
        if steps == 16 and lr == GRID[3]:
            raise FloatingPointError("the loss is nan")
        return slow(arm, seed, steps, lr)

    plan = experiment("A", later, ["high", "low"], SCORE, steps=(1, 2), below={"low": "high"})
    data = run(plan)
    assert data["rates"]["low"] == GRID[3] and {r["lr"] for r in data["eightfold"]} == {GRID[2]}
    assert [(x["steps"], x["lr"]) for x in data["collapses"]] == [(16, GRID[3])] * 3


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"below": {"c": "a"}}, r"below or longer has \['c'\]; expected arms of \['a', 'b'\]"),
        ({"below": {"a": "c"}}, r"below or longer has \['c'\]"),
        ({"longer": ["c"]}, r"below or longer has \['c'\]"),
        ({"below": {"a": "b"}, "seeds": 2}, "seeds is 2; expected at least 3 for longer runs"),
    ],
)
def test_what_is_below_is_an_arm(change, problem):
    with pytest.raises(ValueError, match=problem):
        experiment("A text", slow, ["a", "b"], SCORE, steps=(1, 2), **change)


def test_an_arm_may_have_seeds_of_its_own(monkeypatch, store):
    seeds = {"high": 5, "low": 1}
    plan = experiment("A", slow, ["high", "late", "low"], SCORE, steps=(1, 2), seeds=seeds)
    assert main(monkeypatch, plan) == 0
    (data,) = load_experiment("small_tiny", store)
    made = Counter((r["arm"], r["steps"]) for r in data["rows"])
    expected = {"high": 5, "late": 8, "low": 1}
    assert made == {(a, n): k for a, k in expected.items() for n in (1, 2)}
    assert len({r["seed"] for r in data["tuning"] if r["arm"] == "low"}) == 3
    read_from(monkeypatch, store)
    predicted = dict.fromkeys(expected, "a number")
    text = experiment_tables.results_table("small_tiny", "right", predicted=predicted).data
    assert "means over 1 to 8 seeds with 95 % intervals" in text
    assert "| low | a number | 40.0% | 40.0% |" in text  # one run has no interval
    with pytest.raises(ValueError, match=r"seeds has \['c'\]; expected arms of"):
        experiment("A", slow, ["high"], SCORE, steps=(1, 2), seeds={"c": 1})
    with pytest.raises(ValueError, match="seeds is 1; expected at least 3 for longer runs"):
        experiment("A", slow, ["high", "low"], SCORE, steps=(1, 2), seeds=seeds, below={"low": 0.9})


# --- what is written and read ---------------------------------------------------------------------


def test_runs_that_are_kept_are_not_repeated(monkeypatch, store):
    plans = {
        n: experiment("A", slow, ["high", "low"], SCORE, steps=(1, 2), seeds=n, below={"low": 0.9})
        for n in (3, 4)
    }
    path = store / "small_tiny_cpu.json"
    assert main(monkeypatch, plans[3], "--keep") == 0  # there is no record yet
    data = json.loads(path.read_text())
    data["machine"]["processor"] = "another"
    for kind, right in (("rows", 0.7), ("eightfold", 0.1)):
        data[kind] = [row | {"right": right} for row in data[kind]]
    for row in data["tuning"]:
        row["right"] += 0.01
    path.write_text(json.dumps(data))
    monkeypatch.setenv("XDG_CACHE_HOME", str(store / "other"))  # an empty cache
    assert main(monkeypatch, plans[4], "--keep") == 0
    again = json.loads(path.read_text())
    assert again["tuning"] == data["tuning"]
    assert all((row["right"] == 0.7) == (row["seed"] < 3) for row in again["rows"])
    assert all(("seconds" in row) == (row["seed"] == 3) for row in again["rows"])
    assert [row["right"] for row in again["eightfold"]] == [0.1] * 3
    data["settings"] = {"task": "another"}
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"small_tiny_cpu.json has settings .*'another'"):
        main(monkeypatch, plans[4], "--keep")


def test_runs_that_nobody_watched_are_repeated(monkeypatch, store):
    plan = experiment("A", slow, ["high"], SCORE, steps=(1, 2), seeds=1)
    old = {"settings": {}, "machine": {}, "budget": 1, "steps": [1, 2], "tuning": []}
    row = {"arm": "high", "seed": 0, "steps": 1, "lr": GRID[3], "right": 0.0}
    (store / "old.json").write_text(json.dumps(old | {"rows": [row]}))
    assert run(plan, kept=kept_rows(store / "old.json", plan))["rows"][0]["right"] > 0.5


def test_a_new_record_is_whole(monkeypatch, store):
    plan = experiment("A", fragile, ["a", "b"], SCORE, steps=(1, 2), seeds=3, below={"b": 1.0})
    assert main(monkeypatch, plan) == 0
    read = partial(load_experiment, folder=store)
    monkeypatch.setattr(test_recorded_experiments, "load_experiment", read)
    test_recorded_experiments.test_committed_experiments_are_whole("small_tiny", plan)


def test_new_records_are_read_as_old_ones(monkeypatch, store):
    below = {"low": "high"}
    plan = experiment("A", slow, ["high", "low"], SCORE, steps=(1, 2), seeds=3, below=below)
    assert main(monkeypatch, plan) == 0
    read_from(monkeypatch, store)
    assert list(curves("small_tiny", "right")["low"]) == [1, 2]
    text = experiment_tables.results_table("small_tiny", "right", predicted={"low": "less"}).data
    assert "chosen after 2 steps, by the worst of other seeds" in text
    text = tuning_table("small_tiny").data
    summary = "<details><summary>How the learning rates were chosen: A</summary>"
    assert text.startswith(f"{summary}\n\n| arm")
    assert "by the worst of the seeds 1000" in text and text.endswith("\n\n</details>")


def test_a_tuning_table_needs_rates_that_were_chosen():
    with pytest.raises(ValueError, match="expected an experiment that has chosen learning rates"):
        tuning_table("chapter03_compress")


def test_the_program_of_the_page_on_experiments_runs(monkeypatch, store):
    page = (ROOT / "book" / "E_experiments.md").read_text("utf8")
    (name, text) = re.search(r"^:caption: `(\S+)\.py`\n(.*?)^```$", page, re.S | re.M).groups()
    steps, claim = "steps=(100, 200, 400),", 'below={"linear": "hidden layer"},'
    assert steps in text and claim in text
    program = store / f"{name}.py"
    program.write_text(text.replace(steps, "steps=(1, 2),").replace(claim, ""), "utf8")
    monkeypatch.setenv("DERIVED_ATTENTION_RUNS", str(store / "runs"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))
    subprocess.run([sys.executable, program], cwd=store, check=True, capture_output=True)
    assert len(load_experiment("my_signs", store / "records")[0]["rows"]) == 2 * 2 * 8
    monkeypatch.syspath_prepend(store)
    module = importlib.import_module(name)
    right = [module.train_once("hidden layer", seed, 400, 0.1)["right"] for seed in range(2)]
    assert min(right) > 0.9
