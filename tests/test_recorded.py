"""Tests of recorded scores: reading by name, without torch, and errors."""

import json
import subprocess
import sys

import pytest

from derived_book.training.recorded import FOLDER, curves, load_experiment, scores


def test_every_file_is_read_and_every_arm_has_its_seeds():
    names = {path.stem.rpartition("_")[0] for path in FOLDER.glob("*.json")}
    assert len(names) >= 6
    for name in names:
        data = load_experiment(name)[0]
        metric = data["columns"][0][0]
        found = scores(name, metric)
        assert list(found) == list(dict.fromkeys(row["arm"] for row in data["rows"]))
        rows = [row for row in data["rows"] if data.get("budget") in (None, row.get("steps"))]
        assert sum(map(len, found.values())) == len(rows)


def test_the_first_device_counts(tmp_path):
    for kind, value in (("cuda", 2.0), ("cpu", 1.0)):
        data = {"schema": 1, "rows": [{"arm": "a", "bits": value}]}
        (tmp_path / f"x_{kind}.json").write_text(json.dumps(data))
    assert [d["rows"][0]["bits"] for d in load_experiment("x", tmp_path)] == [1.0, 2.0]


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="'nothing'; expected one of the results in .*: chapter"):
        load_experiment("nothing")
    with pytest.raises(ValueError, match="one of the results in .*: $"):
        load_experiment("nothing", tmp_path)
    (tmp_path / "old_cpu.json").write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="schema of old is 0; expected 1"):
        load_experiment("old", tmp_path)
    with pytest.raises(ValueError, match="metric is 'rouge'; expected one of seconds"):
        scores("chapter10_both", "rouge")


def test_reading_needs_no_torch():
    code = "import sys; import derived_book.training.recorded; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def fallen(runs):
    """Return the arms with a seed that scores 20 points less than after half of the steps."""
    last = {arm: list(z.values())[-2:] for arm, z in runs.items()}
    return {a for a, z in last.items() if any(x - y > 0.2 for x, y in zip(*z, strict=True))}


@pytest.mark.parametrize("task", ["look_up", "newest", "count", "places"])
def test_no_run_of_the_six_jobs_falls_back_after_it_has_learned(task):
    example = {"falls": {1: [0.9, 0.8], 2: [0.9, 0.5]}, "climbs": {1: [0.9, 0.2], 2: [0.8, 0.9]}}
    assert fallen(example) == {"falls"}
    name = f"chapter17_{task}"
    metrics = [metric for metric, _, _, digits in load_experiment(name)[0]["columns"] if digits]
    assert not any(fallen(curves(name, metric)) for metric in metrics)
