"""A grid in several processes and in an executor: results and keys, and workers that die."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from test_execute import wait_until

from derived_book import runtime
from derived_book.training import workers
from derived_book.training.grids import run_grid
from experiments import protocol as recorded

# Like a notebook, this program has no `if __name__ == "__main__"`; no module has its functions.
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from derived_book import runtime
from derived_book.training.grids import run_grid
from derived_book.training.workers import crew_of

FOLDER, engine = sys.argv[1], sys.argv[2]
RATE = torch.tensor(0.5)
runtime.start(profile="medium")

def train_once(seed):
    runtime.seed_everything(seed)
    first = Path(FOLDER, "died")
    if DIES and seed == 1 and not first.exists():
        first.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    value = (torch.randn(300, 300).tanh().sum() * RATE).item()
    seen = torch.get_num_threads(), runtime.current_profile()
    return dict(value=value, pid=os.getpid(), seen=seen)

def fails(seed):
    if seed == 1:
        raise ArithmeticError("one is too many")
    time.sleep(0.5)
    return dict(value=seed)

def make():
    if engine != "executor":
        return int(engine)
    from joblib.externals.loky import get_reusable_executor
    return get_reusable_executor(max_workers=2)

workers, said = make(), {}
grid = [dict(seed=seed) for seed in range(4)]
store = FOLDER + "/store"
DIES = False
said["results"] = run_grid(train_once, grid, store, workers=workers)
said["again"] = run_grid(train_once, grid, store)
said["driver"], said["slots"] = os.getpid(), crew_of(workers).slots
try:
    run_grid(fails, grid, store, workers=workers)
except ArithmeticError as error:
    said["error"], said["notes"] = str(error), error.__notes__
DIES = True
Path(FOLDER, "died").unlink(missing_ok=True)
try:
    run_grid(train_once, grid, FOLDER + "/other", workers=workers)
except Exception as error:
    said["dead"], said["notes of dead"] = type(error).__name__, error.__notes__
others = make() if engine == "2" else 1  # only its maker can replace a dead executor
said["revived"] = run_grid(train_once, grid, FOLDER + "/other", workers=others)
Path(FOLDER, "said").write_text(json.dumps(said))
"""


@pytest.fixture(scope="module", params=["2", "executor"])
def program(request, tmp_path_factory):
    """Return the program's results, its folder, and its kind of workers."""
    folder = tmp_path_factory.mktemp(f"workers_{request.param}")
    path = folder / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, str(path), str(folder), request.param]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (folder / "said").exists(), done.stderr
    return json.loads((folder / "said").read_text()), folder, request.param


def test_results_and_their_order_are_those_of_one_process(program):
    said, _, _ = program
    assert [r["seed"] for r in said["results"]] == [0, 1, 2, 3]
    for result in said["results"]:
        runtime.seed_everything(result["seed"])
        assert result["value"] == (torch.randn(300, 300).tanh().sum() * 0.5).item()


def test_runs_are_made_by_others_with_one_thread_and_the_profile_of_the_first(program):
    said, _, _ = program
    assert said["slots"] == 2
    assert said["driver"] not in {r["pid"] for r in said["results"]}
    assert all(r["seen"] == [1, "medium"] for r in said["results"])


def test_the_store_is_that_of_one_process(program):
    said, _, _ = program
    assert said["again"] == said["results"], "the store returned other results or process numbers"


def test_an_error_of_a_run_is_raised_when_the_others_are_stored(program):
    said, folder, _ = program
    assert "one is too many" in said["error"]
    assert said["notes"] == ["The run was fails(**{'seed': 1})."]
    stored = [json.loads(path.read_text()) for path in (folder / "store" / "fails").glob("*.json")]
    assert 0 in [record["config"]["seed"] for record in stored]
    assert 1 not in [record["config"]["seed"] for record in stored]


def test_a_worker_that_dies(program):
    """The call raises an error instead of hanging, and the next call completes the grid."""
    said, folder, _ = program
    assert (folder / "died").exists()
    assert said["dead"] == "TerminatedWorkerError"
    assert said["notes of dead"][0].startswith("The run was train_once(**{'seed': ")
    values = [[r["value"] for r in said[name]] for name in ("results", "revived")]
    assert values[0] == values[1]


def test_the_same_code_and_release_or_none(monkeypatch):
    monkeypatch.setenv("DERIVED_ATTENTION_PROFILE", "quick")
    monkeypatch.setenv("DERIVED_ATTENTION_PROGRESS", "0")
    driver = workers._environment()
    assert workers.run_in_worker(0, driver, divmod, 7, 2) == (3, 1)
    for name in ("release of PyTorch", "package's code"):
        with pytest.raises(RuntimeError, match=f"worker's {name} is .*; expected another"):
            workers.run_in_worker(0, driver | {name: "another"}, divmod, 7, 2)


def test_threads_of_a_process_take_turns(tmp_path):
    """They share the global random generators, as do the threads of a worker of Dask."""

    def draws(seed):
        runtime.seed_everything(seed)
        return {"value": sum(torch.rand(1).item() for _ in range(5000))}

    def values(workers, name):
        results = run_grid(draws, [{"seed": s} for s in range(4)], tmp_path / name, workers=workers)
        return [r["value"] for r in results]

    with ThreadPoolExecutor(2) as threads:
        assert values(threads, "threads") == values(1, "one")


def test_wrong_workers(tmp_path):
    def function(seed):
        return {"value": seed}

    for wrong, error, message in (
        (0, ValueError, "workers is 0; expected a whole number, at least 1"),
        (True, TypeError, "workers is of type bool; expected a whole number"),
        ("ray", TypeError, "workers is of type str; expected a whole number"),
    ):
        with pytest.raises(error, match=message):
            run_grid(function, [{"seed": 0}], tmp_path, workers=wrong)
    assert not list(tmp_path.iterdir())


def test_the_command_of_experiments_hands_over_who_makes_them(monkeypatch, tmp_path, capsys):
    given = []

    def note(function, grid, *, workers):
        given.append((workers, grid))
        raise KeyboardInterrupt

    monkeypatch.setattr(recorded, "run_grid", note)
    plans = {"tiny": recorded.experiment("A", divmod, ["a"], [("x", "x", 1, 1)], steps=(1, 2))}
    for words, count in (("", 1), ("--workers 3", 3)):
        with pytest.raises(KeyboardInterrupt):
            recorded.command("tiny", plans, tmp_path, None, words.split())
        workers, grid = given.pop()
        assert workers == count and {row["arm"] for row in grid} == {"a"}
    with pytest.raises(SystemExit):
        recorded.command("tiny", plans, tmp_path, None, ["--workers", "many"])
    assert "argument --workers: invalid int value: 'many'" in capsys.readouterr().err


ENDLESS = """
import os, sys, time
from pathlib import Path
from derived_book.training.grids import run_grid

def waits(seed):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(600)
    return {}

run_grid(waits, [dict(seed=seed) for seed in range(2)], sys.argv[1] + "/store", workers=2)
"""


def test_workers_end_with_a_driver_that_is_killed(tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    driver = subprocess.Popen([sys.executable, tmp_path / "endless.py", tmp_path])
    begun = lambda: [int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()]  # noqa: E731
    wait_until(lambda: len(begun()) == 2, 60)
    driver.kill()
    driver.wait()
    wait_until(lambda: not any(Path("/proc", str(pid)).exists() for pid in begun()), 20)
