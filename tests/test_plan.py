"""What a profile would take, planned from samples; and a chapter run unattended."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import plan
from derived_book.runtime import counted
from derived_book.tasks.model import Config
from derived_book.tasks.series import data as series
from derived_book.tasks.series.data import load_series
from derived_book.tasks.series.model import SeriesClassifier
from derived_book.tasks.supervised import Examples, class_loss
from derived_book.training import fit as training
from derived_book.training import grids as experiments
from derived_book.training import measure

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def sampler(monkeypatch):
    for module, name in (
        (training, "train_epoch"),
        (training, "evaluate"),
        (experiments, "run_grid"),
        (series, "load_series"),
        (measure, "compare"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back at the end
    found = plan.Sampler()
    found.install()
    return found


def test_a_plan_counts_every_step_and_takes_few(sampler):
    data = load_series("JapaneseVowels")

    def train_once(heads, seed):
        model = SeriesClassifier(data.channels, data.classes, data.length, Config(heads=heads))
        train, test = Examples(data.train, 32), Examples(data.test, 100)
        curve = training.fit(model, train, class_loss, test=test, epochs=50, seed=seed)
        return {"last": curve["test_accuracy"][-1], "epochs": len(curve["accuracy"])}

    before = counted["steps"]
    grid = [{"heads": h, "seed": s} for h in (1, 2) for s in range(3)]
    results = experiments.run_grid(train_once, grid)
    assert [r["epochs"] for r in results] == [50] * 6
    assert sampler.plan["runs"] == 6
    assert sampler.plan["steps"] == 6 * 50 * 9  # 270 series, 32 at a time
    assert sampler.plan["batches"] == 6 * 50 * 4  # 370 test series, 100 at a time
    assert counted["steps"] - before < 2 * 10, "two configurations, a sample of each"
    assert 0 < sampler.plan["gpu"] and sampler.spent < sampler.plan["cpu"]


def test_a_set_that_only_a_network_has_is_noise_of_its_size(sampler):
    data = series.load_series("Heartbeat")
    assert data.train.x.shape == (204, 405, 61) and len(data.test) == 205 and data.classes == 2
    assert series.load_series("IEEEPPG").target is not None
    real, stated = load_series("JapaneseVowels"), series.load_series("JapaneseVowels")
    assert stated.name == real.name and len(stated.train) == len(real.train)
    assert set(series.TABLE_1 + series.TABLE_8 + series.TABLE_9) <= set(plan.SIZES) | {
        "JapaneseVowels",
        "BasicMotions",
    }


def test_medium_ends_within_five_minutes_on_a_gpu_as_far_as_it_can_be_computed():
    pages = {p.stem for p in (ROOT / "book").glob("[0-9]*.md")}
    planned = json.loads(plan.RESULT.read_text())
    for profile in ("medium", "full"):
        assert set(planned[profile]) == pages, "python _ext/plan.py plans what is missing"
    for name, found in planned["medium"].items():
        assert found["gpu_seconds"] <= 300, name


def test_the_status_page_states_the_rates_that_plans_were_made_with():
    text = (ROOT / "book" / "status.md").read_text("utf8")
    assert f"{1e6 * plan.SECONDS_PER_LAUNCH:.0f} µs an operation" in text
    assert f"{plan.FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s" in text


SCRIPT = """
import sys; from pathlib import Path
sys.path.insert(0, {ext!r}); import full
full.ROOT, full.TARGET = Path({root!r}), Path({root!r}) / "done"
sys.exit(full.main({arguments!r}))
"""


def run(root, *arguments):
    code = SCRIPT.format(ext=str(ROOT / "_ext"), root=str(root), arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_chapter_runs_unattended_and_says_how_far_it_is(tmp_path):
    (tmp_path / "notebooks").mkdir()
    cells = [
        "from derived_book.runtime import start\nrun = start()",
        "import sys\nprint('so far', file=sys.stderr)",
        "print(run.pick(quick='short', full='long'))",
    ]
    for name, more in (("05_good", []), ("06_bad", ["1 / 0"])):
        cells_ = map(nbformat.v4.new_code_cell, cells + more)
        notebook = nbformat.v4.new_notebook(cells=list(cells_))
        nbformat.write(notebook, tmp_path / "notebooks" / f"{name}.ipynb")
    good = run(tmp_path, "5")
    assert good.returncode == 0 and "profile full" in good.stdout and "long" in good.stdout
    assert "so far" in good.stderr and "05_good is done" in good.stdout
    done = nbformat.read(tmp_path / "done" / "05_good.ipynb", as_version=4)
    assert "long" in done.cells[2].outputs[0].text
    bad = run(tmp_path, "06")
    assert bad.returncode == 1 and "ZeroDivisionError" in bad.stderr
    assert (tmp_path / "done" / "06_bad.ipynb").exists(), "what was done is kept"
    for wrong in (["07"], [], ["05", "06"]):
        found = run(tmp_path, *wrong)
        assert found.returncode == 2 and "expected one of 05, 06" in found.stderr
