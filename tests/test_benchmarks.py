"""The benchmark: what it times is what the pages derive, and what it writes is whole."""

from __future__ import annotations

import copy
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import mixtures, run, table  # noqa: E402
from benchmarks.cases import CASES, GOAL_LENGTH, grid, near_root  # noqa: E402

FORMS = ("fast", "reference")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [run.dtype_name(dtype) for dtype in run.DTYPES[DEVICE]]


@pytest.fixture(scope="module")
def committed():
    results = table.load()
    assert results and results[0]["device"] == "cpu", "no results: run python -m benchmarks"
    return results


def check_whole(data, lengths):
    """Every case has its rows, with numbers above 0, and nothing else has."""
    settings = data["settings"]
    assert settings["lengths"] == lengths and settings["rounds"] >= 1
    times = {(x["case"], x["length"], x["dtype"], x["mode"]): x for x in data["times"]}
    names, modes = data["cases"], table.MODES
    assert len(times) == len(data["times"])
    assert set(times) == {
        (n, length, d, m) for n in names for length in lengths for d in settings["dtypes"]
        for m in modes
    }  # fmt: skip
    for row in times.values():
        for numbers in (row["seconds"], row["ratio"]):
            assert 0 < numbers["q1"] <= numbers["median"] <= numbers["q3"], row
        assert row["operations"] > 0
        goal, ratio = names[row["case"]]["goal"], row["ratio"]["median"]
        assert row["met"] in (None, goal is not None and ratio <= goal)
    memory = [(x["case"], x["form"], x["mode"]) for x in data["memory"]]
    assert sorted(memory) == sorted((n, f, m) for n in names for f in FORMS for m in modes)
    for row in data["memory"]:
        assert row["lengths"][1] == 2 * row["lengths"][0] and 0 < row["bytes"][0] < row["bytes"][1]
    for case in names.values():
        assert case["baseline"] in names


# --- the command ---------------------------------------------------------------------------------


def test_the_command_writes_whole_results_and_prints_their_tables(tmp_path):
    output = tmp_path / "new" / "results.json"
    command = [sys.executable, "-m", "benchmarks", "--lengths", "16", "--rounds", "2"]
    done = subprocess.run(
        [*command, "--output", output], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [f.name for f in output.parent.iterdir()] == ["results.json"]
    data = json.loads(output.read_text("utf8"))
    assert data["schema"] == table.SCHEMA and data["device"] == DEVICE
    assert set(data["cases"]) == set(CASES)
    check_whole(data, [16])
    assert all(row["met"] is None for row in data["times"]), "goals are for another length"
    if DEVICE == "cpu":
        assert data["machine"]["threads"] == 1
    lines = done.stdout.splitlines()
    for label in (case.label for case in CASES.values()):
        assert len([line for line in lines if line.startswith(f"| {label} |")]) == 2
    assert "memory: linear" in done.stderr and "memory: linear" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "linear", "quadratic"], "invalid choice: 'quadratic'"),
        (["--lengths", "0"], "'0' is no whole number above 0"),
        (["--lengths", "1024.5"], "'1024.5' is no whole number above 0"),
        (["--rounds", "few"], "'few' is no whole number above 0"),
    ],
)
def test_a_wrong_argument_is_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        run.main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_only_a_full_run_replaces_the_results_of_the_book(committed, tmp_path, monkeypatch, capsys):
    asked = []

    def fake(names, lengths, rounds, device):
        asked.append((names, lengths))
        return committed[0]

    monkeypatch.setattr(run, "run", fake)
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setitem(run.LENGTHS, DEVICE, [1024, 4096])
    run.main(["--cases", "window", "linear_causal"])
    run.main(["--lengths", "4096", "1024", "1024"])
    assert not list(tmp_path.iterdir())
    assert asked[0][0] == ["sdpa", "sdpa_causal", "linear_causal", "window"]
    assert asked[1] == (list(CASES), [1024, 4096])
    run.main([])
    assert [f.name for f in tmp_path.iterdir()] == [f"attention_{DEVICE}.json"]
    assert json.loads(next(tmp_path.iterdir()).read_text("utf8")) == committed[0]


# --- the cases -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_what_is_timed_is_the_formula_with_its_gradients(name):
    case, length = CASES[name], 132  # more than two windows; not a power of two
    for training in (False, True):
        tensors = run.inputs(length, torch.float64, "cpu", training)
        fast, reference = (
            run.call(getattr(case, form), tensors, case.options(length))() for form in FORMS
        )
        assert isinstance(fast, tuple) == training
        assert not training or len(fast) == 3 + name.startswith("conv")
        pairs = zip(fast, reference, strict=True) if training else [(fast, reference)]
        for ours, theirs in pairs:
            assert (ours - theirs).abs().max() <= 1e-11 * theirs.abs().max()


def test_cases_are_different_mechanisms():
    tensors = run.inputs(132, torch.float64, "cpu", training=False)
    outputs = [run.call(c.fast, tensors, c.options(132))() for c in CASES.values()]
    same = [
        (a, b)
        for i, a in enumerate(CASES)
        for j, b in enumerate(CASES)
        if i < j and torch.allclose(outputs[i], outputs[j])
    ]
    assert not same


@pytest.mark.parametrize("name", CASES)
def test_no_case_stores_a_matrix_and_every_formula_does(name):
    def growth(form, mode):
        before, after = run.weigh(name, form, mode, 1024, "cpu")["bytes"]
        return after / before

    for mode in table.MODES:
        assert growth("fast", mode) < 2.6
    assert growth("reference", table.MODES[0]) > 3.5


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_beside_one_that_masks_alike(name):
    case = CASES[name]
    baseline = CASES[case.baseline]
    assert baseline.baseline == case.baseline and baseline.goal is None
    causal = case.options(64).get("is_causal", False)
    assert causal == baseline.options(64).get("is_causal", False) == name.endswith("causal")


def test_sizes_that_depend_on_the_length():
    assert [grid(n) for n in (4096, 2048, 12, 7, 1)] == [(64, 64), (32, 64), (3, 4), (1, 7), (1, 1)]
    assert [near_root(n) for n in (4096, 4095, 2048, 16, 1)] == [64, 32, 32, 4, 1]


# --- rounds --------------------------------------------------------------------------------------


def test_every_round_calls_everything_once_in_changing_order():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    taken = run.time_rounds(calls, 6, "cpu")
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(rounds) == 7, "one round more, that does not count"
    assert {"".join(sorted(r)) for r in rounds} == {"abc"} and len(set(rounds)) > 1
    assert {name: len(seconds) for name, seconds in taken.items()} == dict.fromkeys("abc", 6)


def test_a_goal_is_for_one_length_dtype_pass_and_device():
    row = {"case": "linear_causal", "length": GOAL_LENGTH, "dtype": "float32"}
    row |= {"mode": "forward", "ratio": {"median": 0.15}}
    assert run.goal_met(row, "cpu") is True
    assert run.goal_met(row | {"ratio": {"median": 0.151}}, "cpu") is False
    others = [{"length": 1024}, {"dtype": "bfloat16"}, {"mode": table.MODES[1]}, {"case": "linear"}]
    assert all(run.goal_met(row | other, "cpu") is None for other in others)
    assert run.goal_met(row, "cuda") is None


# --- the committed results -----------------------------------------------------------------------


def test_the_committed_results_are_those_of_the_cases(committed):
    for data in committed:
        kind = data["device"]
        assert data["cases"] == {
            name: {"label": c.label, "baseline": c.baseline, "goal": c.goal}
            for name, c in CASES.items()
        }
        assert data["settings"]["rounds"] >= 7
        check_whole(data, run.LENGTHS[kind])
        assert any(row["met"] is not None for row in data["times"]) == (kind == "cpu")
        assert (data["machine"]["gpu"] is not None) == (kind == "cuda")
        text = (table.RESULTS / f"attention_{kind}.json").read_text("utf8")
        assert not re.search(r"(?<!\w)/\w+/", text), "no path of the machine belongs there"


# --- tables --------------------------------------------------------------------------------------


def check_shape(made):
    header, rows = made
    assert rows and {len(row) for row in rows} == {len(header)}
    assert all(isinstance(cell, str) and "|" not in cell for row in [header, *rows] for cell in row)
    lines = table.markdown(made).splitlines()
    assert len(lines) == len(rows) + 2
    assert {line.count("|") for line in lines} == {len(header) + 1}


def test_tables_show_the_cases_after_what_they_are_beside(committed):
    header, rows = table.time_table(committed[:1], ["window", "linear_causal"])
    assert header[0] == "time, N = 4096" and header[-2:] == list(table.MODES)
    labels = [CASES[name].label for name in ("sdpa", "sdpa_causal", "window", "linear_causal")]
    assert [row[0] for row in rows] == labels
    assert [row[1] for row in rows] == ["", "", "SDPA", "SDPA, causal"]
    assert re.fullmatch(r"1 = [\d.]+ m?s", rows[0][4])
    assert re.fullmatch(r"≤ 0\.10: (met|missed)", rows[2][3])
    assert re.fullmatch(r"0\.\d\d \[0\.\d\d, 0\.\d\d\]", rows[2][4])
    memory = table.memory_table(committed[0], ["window"])
    assert [row[0] for row in memory[1]] == ["SDPA", "window of 64"]
    assert re.fullmatch(r"[\d.]+ MiB, ×\d\.\d", memory[1][1][2])
    mixtures_of = table.memory_table(committed[0], ["mixture", "mixture_hard", "mixture_shifted"])
    factors = {row[0]: row[-1] for row in mixtures_of[1]}
    assert factors.pop("SDPA, twice the heads") == "", "of other lengths"
    assert min(map(float, factors.values())) >= 40, "what O(N) saves at N = 4096"
    assert all(re.fullmatch(r"[\d.]+ GiB, ×[34]\.\d", row[5]) for row in mixtures_of[1][1:])
    for made in (table.time_table(committed), table.memory_table(committed[0]), (header, rows)):
        check_shape(made)


def test_devices_and_dtypes_stand_side_by_side(committed):
    cuda = copy.deepcopy(committed[0])
    cuda |= {"device": "cuda"}
    cuda["machine"]["gpu"] = "A GPU"
    cuda["settings"]["dtypes"] = ["float32", "bfloat16"]
    cuda["times"] = [row | {"met": None} for row in cuda["times"]]
    cuda["times"] += [row | {"dtype": "bfloat16"} for row in cuda["times"]]
    made = table.time_table([committed[0], cuda], ["linear_causal"])
    check_shape(made)
    header, rows = made
    kinds = ["CPU, float32", "CUDA, float32", "CUDA, bfloat16"]
    assert header[4:] == [f"{mode} ({kind})" for kind in kinds for mode in table.MODES]
    assert rows[1][3].startswith("≤ 0.15: ")
    assert table.time_table([cuda], ["linear_causal"])[1][1][3] == "", "no goal for a GPU"
    assert table.caption(cuda).startswith("A GPU; B = 1, H = 8, D = 64;")
    assert "threads: 1" in table.caption(committed[0])


def test_what_is_not_there_is_named(committed, tmp_path):
    with pytest.raises(ValueError, match="no results for quadratic; there are sdpa, "):
        table.time_table(committed, ["linear", "quadratic"])
    with pytest.raises(ValueError, match="no result for .*8192"):
        table.time_table(committed, ["linear"], length=8192)
    assert table.load(tmp_path) == []
    with pytest.raises(ValueError, match="results is empty"):
        table.time_table([])
    (tmp_path / "attention_cuda.json").write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="attention_cuda.json has schema 0; expected 1"):
        table.load(tmp_path)


def test_tables_need_no_torch():
    code = "import sys; import benchmarks.table; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- experiments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mixtures.EXPERIMENTS)
def test_committed_experiments_are_whole(name):
    plan = mixtures.EXPERIMENTS[name]
    assert plan["seeds"] >= 3
    for data in table.load_experiment(f"mixtures_{name}"):
        assert data["settings"] == plan["settings"]
        assert data["columns"] == [list(column) for column in plan["columns"]]
        found = [(row["arm"], row["seed"]) for row in data["rows"]]
        assert len(set(found)) == len(found)
        assert set(found) == {(a, s) for a in plan["names"] for s in range(plan["seeds"])}
        assert {"processor", "threads", "torch", "date", "gpu"} <= data["machine"].keys()
        for row in data["rows"]:
            assert all(math.isfinite(row[metric]) for metric, *_ in plan["columns"])
        check_shape(table.experiment_table(data))


def recorded(name, metric, factor=1):
    """Scores (arms, seeds) of an experiment, by arm."""
    (data, *_) = table.load_experiment(f"mixtures_{name}")
    arms = dict.fromkeys(row["arm"] for row in data["rows"])
    return {
        arm: torch.tensor([factor * row[metric] for row in data["rows"] if row["arm"] == arm])
        for arm in arms
    }


def apart(x, y):
    """How far the mean of x is above that of y, in sums of their standard deviations."""
    return float((x.mean() - y.mean()) / (x.std() + y.std()))


def test_what_chapter_10_reads_in_the_recorded_language_models():
    bits, size = recorded("language", "bits"), recorded("language", "parameters", 1.0)
    controls = {arm: bits.pop(arm) for arm in list(bits) if arm.startswith("control")}
    worst = max(float(x.mean()) for x in bits.values())
    assert all(x.mean() > worst + 0.5 for x in controls.values()), "the task needs attention"
    four, two, wider = (
        bits[f"softmax, {which}"] for which in ("4 heads", "2 heads", "2 heads, a quarter wider")
    )
    assert apart(two, four) > 1, "half the heads lose"
    for arm in ("MGK, 2 heads", "sMGK, 2 heads"):
        assert all(abs(apart(bits[arm], rival)) < 1 for rival in (two, wider)), "no better"
    shared = "multi-query softmax, 4 heads"
    assert abs(size[shared][0] / size["MGK, 2 heads"][0] - 1) < 0.01
    assert bits[shared].mean() < bits["MGK, 2 heads"].mean()
    longer = recorded("language_longer", "bits")
    best = longer.pop("softmax, 4 heads")
    assert all(apart(x, best) > 1 for x in longer.values())
    wider = longer["softmax, 2 heads, a quarter wider"]
    assert abs(apart(longer["MGK, 2 heads"], wider)) < 1


def test_what_chapter_10_reads_in_the_other_recorded_experiments():
    control = ("control: uniform weights", "control: no mixing")
    vowels = recorded("japanese_vowels", "accuracy", 100)
    assert all(abs(apart(vowels["softmax, 8 heads"], vowels[arm])) < 1.2 for arm in control)
    motions = recorded("basic_motions", "accuracy", 100)
    dots = [motions["softmax, 4 heads"], motions["MGK, 4 heads, dot products"]]
    distances = [motions["one Gaussian, 4 heads"], motions["MGK, 4 heads"]]
    assert all(apart(x, y) > 1 for x in dots for y in distances)
    assert all(abs(apart(y, motions[control[0]])) < 1 for y in distances)
    lists = recorded("listops", "accuracy", 100)
    floor = max(float(lists.pop(arm).mean()) for arm in control)
    assert all(x.mean() > floor for x in lists.values())
    half = [lists[arm] for arm in ("softmax, 2 heads", "MGK, 2 heads", "sMGK, 2 heads")]
    assert all(abs(apart(x, half[0])) < 1 for x in half)
    assert all(x.mean() < lists["softmax, 4 heads"].mean() for x in half)
    bleu, chrf = (recorded("translation", metric) for metric in ("bleu", "chrf"))
    lost = bleu.pop(control[0])
    assert all(apart(x, lost) > 2 for x in bleu.values())
    assert all(abs(apart(x, y)) < 1 for x in bleu.values() for y in bleu.values())
    four, two, mixed = (
        chrf[arm] for arm in ("softmax, 4 heads", "softmax, 2 heads", "MGK, 2 heads")
    )
    assert apart(four, two) > 1 and two.mean() < mixed.mean() < four.mean()
    assert max(abs(apart(mixed, four)), abs(apart(mixed, two))) < 1.2


def test_an_experiment_is_run_once_and_written(monkeypatch, tmp_path, capsys):
    plan = mixtures.experiment("A text", tiny, ["a", "b"], [("bits", "bits", 2, 1)], 2, steps=1)
    monkeypatch.setattr(mixtures, "EXPERIMENTS", {"tiny": plan})
    monkeypatch.setattr(mixtures, "RESULTS", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        assert mixtures.main(["tiny"]) == 0
    (data,) = table.load_experiment("mixtures_tiny", tmp_path)
    assert [(row["arm"], row["seed"]) for row in data["rows"]] == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("b", 1),
    ]
    header, rows = table.experiment_table(data)
    assert header == ["attention", "parameters", "MFLOP", "bits", "time of a run"]
    assert [row[:4] for row in rows] == [
        ["a", "1,000", "2.00", "3.0 ± 1.4"],
        ["b", "1,000", "2.00", "3.0 ± 1.4"],
    ]
    assert "A text (steps = 1), mean ± standard deviation of 2 seeds" in capsys.readouterr().out


def tiny(arm, seed, steps, device):
    return {"bits": 1.0 + seed, "parameters": 1000, "flops": 2_000_000}


def test_an_unknown_experiment_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit):
        mixtures.main(["nothing"])
    assert "no experiment nothing; there are language" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no results of an experiment 'nothing'"):
        table.load_experiment("nothing", tmp_path)
    (tmp_path / "old_cpu.json").write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="results of old have another schema; expected 1"):
        table.load_experiment("old", tmp_path)
