"""Grids of runs: each is stored at once, then skipped, and never outdated or incomplete."""

import functools
import importlib.util
import json
import linecache
import math
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from derived_book.tasks.series.data import SeriesSplit
from derived_book.training import grids as experiments
from derived_book.training.grids import run_grid, summarise
from derived_book.training.run_key import PACKAGE

PAGE = """
import dataclasses, functools, math
import numpy as np
import torch
from derived_attention.softmax.core import softmax_attention
from derived_book.runtime import Run, seed_everything

EPOCHS = 3
calls = []
run = Run(torch.device("cpu"), "quick", 0)
data = torch.zeros(3)
note = calls.append

def helper(x, factor=2):
    return factor * x

MECHANISMS = {"softmax": softmax_attention}

class Model:
    width = 4

    def __init__(self, size):
        self.size = size

    @property
    def area(self):
        return self.width * self.size

    @staticmethod
    def name():
        return "model"

def train_once(seed, attention="softmax"):
    seed_everything(seed)
    attention in MECHANISMS and run.pick(quick=1, full=2)
    score = sum(helper(i) for i in range(EPOCHS)) + Model(seed).area + data.sum().item()
    with open(LOG, "a") as log:
        log.write("run\\n")
    return {"accuracy": score + seed / 10, "epochs": [1, 2.5], "note": None}
"""
CONFIGS = [{"seed": seed} for seed in range(3)]


def module_of(path, text):
    """Write a module, and return it as a kernel would read it again."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    linecache.checkcache()
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


class Page:
    """A page of the book: a module that can be edited and read again, as a kernel would."""

    def __init__(self, folder):
        self.path, self.log, self.store = folder / "page.py", folder / "log", folder / "store"
        self.log.write_text("")

    def load(self, *edits):
        text = PAGE.replace("LOG", repr(str(self.log)))
        for old, new in edits:
            assert old in text
            text = text.replace(old, new)
        return module_of(self.path, text)

    def run(self, *edits, grid=CONFIGS):
        """Return the results, and how many runs were made for them."""
        before = len(self.log.read_text().split())
        results = run_grid(self.load(*edits).train_once, grid, self.store)
        return results, len(self.log.read_text().split()) - before

    def files(self):
        return sorted(self.store.rglob("*"))


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setenv("DERIVED_ATTENTION_PROFILE", "quick")
    monkeypatch.setenv("DERIVED_ATTENTION_RUNS", str(tmp_path / "default"))
    return Page(tmp_path)


def test_results_and_skipping(page):
    first, made = page.run()
    assert made == 3
    assert [r["seed"] for r in first] == [0, 1, 2]
    assert first[1]["accuracy"] == 6 + 4 + 0.1 and first[1]["epochs"] == [1, 2.5]
    assert first[1]["note"] is None and first[0]["seconds"] >= 0 and first[0]["cpu_seconds"] >= 0
    assert page.run() == (first, 0)
    more, made = page.run(grid=[{"seed": 7}, *reversed(CONFIGS), {"seed": 7}])
    assert made == 1 and more[1:4] == first[::-1] and more[0] == more[4]


def test_record_says_how_it_was_made_and_where_runs_are_stored(page, tmp_path):
    run_grid(page.load().train_once, [{"seed": 1}])
    (path,) = (tmp_path / "default" / "train_once").glob("*.json")
    record = json.loads(path.read_text())
    assert record["key"] == path.stem
    assert record["config"] == {"seed": 1} and record["result"]["accuracy"] == 10.1
    assert record["profile"] == "quick" and record["function"].endswith("train_once")
    assert record["versions"]["torch"] == torch.__version__
    assert record["device"] and record["date"].endswith("+00:00")


def test_order_of_arguments_and_numpy_numbers_do_not_matter(page):
    page.run(grid=[{"seed": 1, "attention": "softmax"}])
    assert page.run(grid=[{"attention": "softmax", "seed": 1}])[1] == 0
    assert page.run(grid=[{"attention": "linear", "seed": 1}])[1] == 1


CHANGES = {
    "the function": ('"note": None', '"note": 1'),
    "a constant": ("EPOCHS = 3", "EPOCHS = 4"),
    "a helper": ("return factor * x", "return x * factor"),
    "a helper's default": ("factor=2", "factor=3"),
    "a mechanism": ('{"softmax": softmax_attention}', '{"softmax": helper}'),
    "a keyword": ('"softmax": soft', '"softmax": functools.partial(helper, x=1), "b": soft'),
    "a tensor": ("torch.zeros(3)", "torch.zeros(4)"),
    "a dataclass": ('"quick", 0)', '"quick", 1)'),
    "a method": ("self.size = size", "self.size = 2 * size"),
    "a property": ("self.width * self.size", "self.size * self.width"),
    "a static method": ('return "model"', 'return "other"'),
    "a class attribute": ("width = 4", "width = 5"),
    "a base class": ("class Model:", "class Model(Run):"),
}


def test_changes_are_noticed_and_what_does_not_matter_is_not(page):
    page.run()
    for what, change in CHANGES.items():
        assert page.run(change, grid=[{"seed": 0}])[1] == 1, what
    edit = ("note = calls", "note = calls  # a comment\nunused = 3\nother = calls")
    assert page.run(edit)[1] == 0
    assert page.run()[1] == 0, "the first results must still be stored"


OTHERS = """
import dataclasses, enum, functools
from typing import NamedTuple
import torch
from derived_book.training.fit import Endless

class Pair(NamedTuple):
    a: int = 1

@dataclasses.dataclass
class Sizes:
    a: int = 10
    b: list = dataclasses.field(default_factory=lambda: [100])

@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    a: int = 1_000

class Draws(Endless):
    steps = 10_000
    draw = check = __iter__ = None

class Kind(enum.Enum):
    ONE = 100_000

class Lazy:
    @functools.cached_property
    def a(self):
        return 1_000_000

    @property
    def b(self):
        return self.c

    @b.setter
    def b(self, x):
        self.c = 10_000_000

def add(f):
    @functools.wraps(f)
    def g(seed):
        return f(seed) + 100_000_000
    return g

@add
def helper(seed):
    lazy = Lazy()
    lazy.b = 0
    parts = Pair().a, Sizes().a, Sizes().b[0], Slots().a, Draws.steps, Kind.ONE.value
    return sum(parts) + lazy.a + lazy.b + seed

def train_once(seed):
    return {"value": helper(seed)}
"""


def test_classes_and_decorators_of_every_kind_are_compared(page):
    def run(text):
        train_once = module_of(page.path, text).train_once
        return run_grid(train_once, [{"seed": 0}], page.store)[0]["value"]

    assert run(OTHERS) == 111_111_111
    for i in range(9):
        changed = re.sub(rf"\b{10**i:_}\b", f"{2 * 10**i}", OTHERS)
        assert run(changed) == 111_111_111 + 10**i
    assert run(OTHERS) == 111_111_111 and len(list(page.store.rglob("*.json"))) == 10


def test_two_lambdas_of_one_line_are_two_functions(tmp_path):
    first, second = lambda seed: {"value": seed + 1}, lambda seed: {"value": seed + 2}
    values = [run_grid(f, [{"seed": 0}], tmp_path)[0]["value"] for f in (first, second)]
    assert values == [1, 2]


def test_torch_and_profile_are_part_of_the_key(page, monkeypatch):
    page.run()
    for change in (
        lambda patch: patch.setattr(torch, "__version__", "9.9.9"),
        lambda patch: patch.setenv("DERIVED_ATTENTION_PROFILE", "full"),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert page.run()[1] == 3
        assert page.run()[1] == 0


LOCAL = ("seed_everything(seed)", "from derived_book import claims")


@pytest.mark.parametrize(
    ("module", "line", "edits", "runs"),
    [
        ("derived_attention.softmax.core", "X = 1", [], 1),  # in a dict that the function reads
        ("derived_attention.softmax", "X = 1", [], 1),  # the package that contains the module
        ("derived_book.runtime", "X = 1", [], 1),
        ("derived_book.runtime", "X = 1", [LOCAL], 1),  # the class of a value that is read
        ("derived_book.runtime", "# a comment", [], 0),
        ("derived_book.claims", "X = 1", [], 0),  # not reached
        ("derived_book.claims", "X = 1", [LOCAL], 1),  # imported in the function
    ],
)
def test_the_package_counts_as_far_as_a_run_reaches(page, monkeypatch, module, line, edits, runs):
    page.run(*edits, grid=[{"seed": 0}])
    monkeypatch.setitem(PACKAGE.texts, module, f"{PACKAGE.texts[module]}\n{line}\n")
    assert page.run(*edits, grid=[{"seed": 0}])[1] == runs


def test_closures_decorators_and_recursion(tmp_path):
    def make(scale):
        @functools.cache
        def again(n):
            return scale if n == 0 else again(n - 1)

        def function(n):
            return {"value": again(n) if n else function.__name__ == "function"}

        return function

    grid = [{"n": 3}]
    assert run_grid(make(2), grid, tmp_path)[0]["value"] == 2
    assert run_grid(make(5), grid, tmp_path)[0]["value"] == 5
    assert run_grid(make(2), grid, tmp_path)[0]["value"] == 2
    assert len(list(tmp_path.rglob("*.json"))) == 2


def test_what_cannot_be_compared_is_refused(page):
    model = torch.nn.Linear(2, 2)

    def reads_a_model(seed):
        return {"norm": model.weight.norm().item() + seed}

    with pytest.raises(TypeError, match="reads model, a Linear, which cannot be compared"):
        run_grid(reads_a_model, CONFIGS, page.store)
    namespace = {}
    exec("def typed_in(seed):\n    return {'a': seed}", namespace)
    with pytest.raises(TypeError, match="source of function .*typed_in cannot be read"):
        run_grid(namespace["typed_in"], CONFIGS, page.store)
    for wrong in (functools.partial(reads_a_model, 1), "typed_in"):
        with pytest.raises(TypeError, match="function is .*; expected a function defined by def"):
            run_grid(wrong, CONFIGS, page.store)
    assert page.files() == []


def metrics(kind):
    return {
        "fine": {"a": 1, "b": np.float64(0.5), "c": [True, None, "x"], "d": {"e": (1, 2)}},
        "odd": {"a": math.inf, "b": [-math.inf, math.nan]},
        "array": {"a": {"maps": [1, np.zeros(2)]}},
        "float32": {"a": np.float32(1)},
        "number as key": {"a": {1: 2}},
        "no dict": 0.5,
        "argument": {"kind": "again", "a": 1},
        "time": {"seconds": 1.0},
    }[kind]


def test_metrics_survive_the_file(tmp_path):
    fine, odd = first = run_grid(metrics, [{"kind": "fine"}, {"kind": "odd"}], tmp_path)
    assert (fine["a"], fine["b"], fine["c"]) == (1, 0.5, [True, None, "x"])
    assert fine["d"] == {"e": [1, 2]}
    assert odd["a"] == math.inf and odd["b"][0] == -math.inf and math.isnan(odd["b"][1])
    for path in tmp_path.rglob("*.json"):
        text = path.read_text()  # strict JSON, which any other program can read
        json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert str(run_grid(metrics, [{"kind": "fine"}, {"kind": "odd"}], tmp_path)) == str(first)


@pytest.mark.parametrize(
    "kind, error, message",
    [
        ("array", TypeError, r"result\['a'\]\['maps'\]\[1\] is numpy.ndarray; expected a JSON"),
        ("float32", TypeError, r"result\['a'\] is numpy.float32; .*convert with float"),
        ("number as key", TypeError, r"result\['a'\] has the key 1"),
        ("no dict", TypeError, "metrics returned float; expected a dict"),
        ("argument", ValueError, "result has kind; expected no name of an argument"),
        ("time", ValueError, "result has seconds; expected no .*'seconds'"),
    ],
)
def test_wrong_metrics(tmp_path, kind, error, message):
    with pytest.raises(error, match=message):
        run_grid(metrics, [{"kind": kind}], tmp_path)
    assert not list(tmp_path.rglob("*.json"))


def test_wrong_grid_before_any_run(page):
    train_once = page.load().train_once
    for config, message in (
        ({"sead": 1}, r"grid contains .*; expected arguments of .*train_once: missing"),
        ({}, "train_once: missing a required argument"),
        ({"seed": torch.tensor(1)}, r"config\['seed'\] is torch.Tensor"),
    ):
        with pytest.raises(TypeError, match=message):
            run_grid(train_once, [{"seed": 0}, config], page.store)
    with pytest.raises(TypeError, match="grid is {'seed': 0}; expected a list of such dicts"):
        run_grid(train_once, {"seed": 0}, page.store)
    assert page.log.read_text() == "" and page.files() == []
    assert run_grid(train_once, [], page.store) == []


def test_a_worker_that_dies_between_two_runs_is_laid_to_the_run_it_had(page):
    class Dying(Executor):
        """The worker of the first run dies before the second can be given to another."""

        _max_workers, calls = 2, 0

        def submit(self, call, *arguments):
            self.calls += 1
            if self.calls == 2:
                raise BrokenProcessPool("a worker has died")
            future = Future()
            future.set_exception(BrokenProcessPool("a worker has died"))
            return future

    with pytest.raises(BrokenProcessPool) as caught:
        run_grid(page.load().train_once, CONFIGS, page.store, workers=Dying())
    assert caught.value.__notes__ == ["The run was train_once(**{'seed': 0})."]
    assert len(page.run()[0]) == 3, "all claims must be free again"


def test_no_run_is_started_after_an_error(page):
    class Two(Executor):
        """Workers whose first run fails while the second goes on."""

        _max_workers, calls = 2, 0

        def submit(self, call, *arguments):
            self.calls += 1
            future = Future()
            if self.calls == 1:
                future.set_exception(ArithmeticError("the first"))
            else:
                threading.Timer(0.1, future.set_result, [call(*arguments)]).start()
            return future

    workers = Two()
    with pytest.raises(ArithmeticError, match="the first"):
        run_grid(page.load().train_once, CONFIGS, page.store, workers=workers)
    assert workers.calls == 2
    assert len(list(page.store.rglob("*.json"))) == 1, "the second run must be stored"


def test_a_run_may_change_its_arguments(tmp_path):
    def empties(sizes):
        return {"sum": sum(sizes.pop() for _ in range(len(sizes)))}

    for _ in range(2):
        (result,) = run_grid(empties, [{"sizes": [1, 2]}], tmp_path)
        assert result["sizes"] == [1, 2] and result["sum"] == 3
    (path,) = tmp_path.rglob("*.json")
    assert json.loads(path.read_bytes())["config"] == {"sizes": [1, 2]}


def test_a_run_that_another_process_stores_before_the_claim_is_not_made_again(page, monkeypatch):
    first, _ = page.run(grid=[{"seed": 0}])
    (path,) = page.store.rglob("*.json")
    content, lock = path.read_bytes(), experiments._lock
    path.unlink()

    def late(claimed):
        path.write_bytes(content)  # by the process that held the lock until now
        return lock(claimed)

    monkeypatch.setattr(experiments, "_lock", late)
    assert page.run(grid=[{"seed": 0}]) == (first, 0)


def test_a_failing_run_loses_nothing(page):
    grid = [{"seed": 0}, {"seed": 1}, {"seed": 2}]
    edit = ("seed_everything(seed)", "seed_everything(seed if seed < 2 else -1)")
    with pytest.raises(ValueError, match="seed is -1") as caught:
        page.run(edit, grid=grid)
    assert caught.value.__notes__ == ["The run was train_once(**{'seed': 2})."]
    assert len(list(page.store.rglob("*.json"))) == 2
    before = len(page.log.read_text().split())
    with pytest.raises(ValueError, match="seed is -1"):
        page.run(edit, grid=grid)
    assert len(page.log.read_text().split()) == before


DAMAGE = {
    "cut": b"{",
    "list": b"[1, 2]",
    "not UTF-8": b"\xff\xfe",
    "no key": b"{}",
    "other key": b'{"key": "x", "result": {}, "seconds": 1.0, "cpu_seconds": 1.0}',
    "no result": b'{"key": "KEY", "result": 5, "seconds": 1.0, "cpu_seconds": 1.0}',
    "no times": b'{"key": "KEY", "result": {}, "seconds": "1", "cpu_seconds": 1.0}',
    "deep": b"[" * 100_000,
    "folder": None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_record_is_said_and_made_again(page, damage):
    first, _ = page.run()
    path = sorted(page.store.rglob("*.json"))[1]
    content = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
        (path / "of somebody").write_text("else")
    else:
        path.write_bytes(DAMAGE[damage].replace(b"KEY", path.stem.encode()))
    with pytest.warns(UserWarning, match=f"stored run .*{path.name} is damaged"):
        again, made = page.run()
    assert made == 1
    assert [r["accuracy"] for r in again] == [r["accuracy"] for r in first]
    assert json.loads(path.read_bytes())["result"] == json.loads(content)["result"]
    assert page.run()[1] == 0
    kept = [f.parent.suffix for f in page.files() if f.is_file() and f.suffix != ".json"]
    assert kept == [".damaged"] * (damage == "folder"), "only files that are not runs may be left"


# --- processes that die, and processes that share -------------------------------------------------

FORK = multiprocessing.get_context("fork")  # a real process, without two seconds of imports
TRIALS = [{"seed": seed} for seed in range(24)]


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A store, and a grid whose runs say in a log when they begin."""
    monkeypatch.setenv("DERIVED_ATTENTION_PROFILE", "quick")
    log, stuck, store = tmp_path / "log", tmp_path / "stuck", tmp_path / "store"
    log.touch()
    names = [str(log), str(stuck)]

    def slow(seed):
        with open(names[0], "a") as file:
            file.write(f"{seed}\n")
        time.sleep(0.03)
        while seed == 3 and os.path.exists(names[1]):
            time.sleep(0.01)
        return {"value": [seed] * 2000}

    def run():
        return [r["value"] for r in run_grid(slow, TRIALS, store)]

    def begun():
        return [int(line) for line in log.read_text().split()]

    def until(condition, process):
        while not condition():
            assert process.is_alive()
            time.sleep(0.005)

    return SimpleNamespace(run=run, begun=begun, until=until, store=store, stuck=stuck)


def started(target, *arguments):
    process = FORK.Process(target=target, args=arguments)
    process.start()
    return process


def values():  # a function, because a constant of this module would be part of every key
    return [[seed] * 2000 for seed in range(len(TRIALS))]


def test_kill_9_at_any_moment_loses_no_more_than_the_run_that_was_made(shared):
    draw = random.Random(0)
    for kills in range(1, 6):
        there, before = len(list(shared.store.rglob("*.json"))), len(shared.begun())
        process = started(shared.run)
        shared.until(lambda before=before: len(shared.begun()) > before, process)
        time.sleep(draw.uniform(0, 0.08))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        stored = len(list(shared.store.rglob("*.json")))
        assert there <= stored < len(TRIALS)
        assert len(shared.begun()) <= stored + kills
    assert shared.run() == values()
    assert len(TRIALS) <= len(shared.begun()) <= len(TRIALS) + kills
    assert len([p for p in shared.store.rglob("*") if p.is_file()]) == len(TRIALS)


@pytest.mark.parametrize("when", ["replace", "fsync", "unlink"])
def test_kill_9_in_the_middle_of_a_write(shared, monkeypatch, when):
    do, parent, calls = getattr(os, when), os.getpid(), []

    def dies(*arguments, **options):
        calls.append(arguments)
        if os.getpid() != parent and len(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return do(*arguments, **options)

    monkeypatch.setattr(os, when, dies)
    process = started(shared.run)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert shared.run() == values()
    assert len(shared.begun()) <= len(TRIALS) + 1
    assert {p.suffix for p in shared.store.rglob("*") if p.is_file()} == {".json"}


def test_two_processes_share_a_store_and_make_no_run_twice(shared, tmp_path):
    def save(name):
        (tmp_path / name).write_text(json.dumps(shared.run()))

    processes = [started(save, name) for name in ("one", "two")]
    for process in processes:
        process.join()
    assert sorted(shared.begun()) == list(range(len(TRIALS)))
    assert all(json.loads((tmp_path / name).read_text()) == values() for name in ("one", "two"))
    assert {p.suffix for p in shared.store.rglob("*") if p.is_file()} == {".json"}


def test_a_process_that_dies_lets_go_of_its_claim(shared):
    shared.stuck.touch()
    first = started(shared.run)
    shared.until(lambda: 3 in shared.begun(), first)
    second = started(shared.run)
    shared.until(lambda: len(shared.begun()) == len(TRIALS), second)
    time.sleep(3 * experiments.POLL_INTERVAL)
    assert second.is_alive() and shared.begun().count(3) == 1, "the second must wait for run 3"
    first.kill()
    first.join()
    shared.until(lambda: shared.begun().count(3) == 2, second)
    shared.stuck.unlink()
    second.join(10)
    assert second.exitcode == 0 and len(shared.begun()) == len(TRIALS) + 1
    assert shared.run() == values()


# --- tables and progress --------------------------------------------------------------------------


def test_a_notebook_sees_the_table_fill_and_keeps_nothing_of_it(page, monkeypatch):
    shown = []
    handle = SimpleNamespace(update=shown.append)
    display = SimpleNamespace(HTML=lambda text: ("html", text), display=lambda *_, **__: handle)
    shell = SimpleNamespace(kernel=None)
    fake = SimpleNamespace(get_ipython=lambda: shell, display=display)
    monkeypatch.setitem(sys.modules, "IPython", fake)
    monkeypatch.setattr(experiments, "REDRAW_INTERVAL", 0)
    train_once, table = page.load().train_once, lambda results: [r["seed"] for r in results]
    run_grid(train_once, CONFIGS[::-1], page.store, watch=table)
    assert shown == [[2], [2, 1], [2, 1, 0], ("html", "")]
    shown.clear()
    monkeypatch.setenv("DERIVED_ATTENTION_PROGRESS", "0")  # as when a page is built
    run_grid(train_once, CONFIGS, page.store, watch=table)
    assert shown == []


def test_progress(page, monkeypatch, capfd):
    monkeypatch.delenv("DERIVED_ATTENTION_PROGRESS", raising=False)
    page.run()
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("DERIVED_ATTENTION_PROGRESS", "1")
    page.run()
    shown = capfd.readouterr()
    assert "train_once" in shown.err and shown.out == ""


def test_full_says_what_is_to_come_and_the_others_do_not(page, monkeypatch, capsys):
    count = "__import__('derived_book').runtime.counted['steps'] += 1200"
    counting = ("seed_everything(seed)", count)
    page.run(counting)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("DERIVED_ATTENTION_PROFILE", "full")
    page.run(counting, grid=CONFIGS[:1])
    first, second = capsys.readouterr().out.splitlines()
    assert first == "train_once: 1 run. An estimate follows the first."
    assert second == "The first took less than a second for 1,200 steps."
    page.run(counting)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "train_once: 3 runs, 1 of them stored. An estimate follows the first."
    assert "for 1,200 steps: 1 more, about less than a second if they are alike" in second
    page.run(counting)
    assert capsys.readouterr().out == "", "everything is stored, so nothing is announced"


def test_duration():
    times = [experiments.duration(s) for s in (0.2, 41, 100, 3600, 14 * 3600)]
    assert times == ["less than a second", "41 s", "2 min", "60 min", "14 h"]


@pytest.mark.parametrize("place", ["file/store", "file", "/proc/store"])
def test_a_store_that_cannot_be_written_is_named_before_any_run(tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DERIVED_ATTENTION_RUNS", str(tmp_path / place))
    for store in (None, tmp_path / place):
        with pytest.raises(OSError, match=f"{place}/.* cannot be written .* as store, or set DERI"):
            run_grid(lambda seed: pytest.fail("a run was started"), [{"seed": 0}], store)


def test_stored_runs_are_read_where_nothing_can_be_written(tmp_path, monkeypatch):
    def run(seed):
        return {"loss": 1.0}

    stored = run_grid(run, [{"seed": 0}], tmp_path)
    monkeypatch.setattr(experiments, "make_folder", lambda *_: pytest.fail("a folder was made"))
    assert run_grid(run, [{"seed": 0}], tmp_path) == stored


RESULTS = [
    {"attention": "softmax", "seed": 0, "accuracy": 0.9},
    {"attention": "softmax", "seed": 1, "accuracy": 0.8},
    {"attention": "bn", "seed": 0, "accuracy": 1.0},
    {"attention": "softmax", "seed": 2, "accuracy": 0.4},
]


def test_summarise():
    table = summarise(RESULTS, by="attention", metric="accuracy")
    assert list(table.columns) == ["mean", "sd", "min", "max", "n"]
    assert list(table.index) == ["softmax", "bn"] and table.index.name == "attention"
    row = table.loc["softmax"]
    assert row["mean"] == pytest.approx(0.7) and row["n"] == 3
    assert row["sd"] == pytest.approx(math.sqrt((0.04 + 0.01 + 0.09) / 2))
    assert (row["min"], row["max"]) == (0.4, 0.9)
    assert math.isnan(table.loc["bn", "sd"]) and table.loc["bn", "n"] == 1
    both = summarise(RESULTS, by=["attention", "seed"], metric="accuracy")
    assert both.loc[("softmax", 1), "mean"] == 0.8 and len(both) == 4


@pytest.mark.parametrize("group", [None, [1, 2], 8, "a"])
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_summarise_does_not_hide_a_diverged_run(group, odd):
    results = [{"g": group, "m": 1.0}, {"g": group, "m": odd}, {"g": "other", "m": 2.0}]
    table = summarise(results, by="g", metric="m")
    assert list(table["n"]) == [2, 1] and list(table["mean"])[1] == 2.0
    assert str(table["mean"].iloc[0]) == str(odd) and math.isnan(table["sd"].iloc[0])


def test_summarise_names_what_is_missing():
    with pytest.raises(ValueError, match="no 'loss'; expected one of attention, seed, accuracy"):
        summarise(RESULTS, by="attention", metric="loss")
    with pytest.raises(ValueError, match="a result has no 'heads'"):
        summarise(RESULTS, by=["attention", "heads"], metric="accuracy")
    with pytest.raises(ValueError, match="results is empty"):
        summarise([], by="attention", metric="accuracy")


def test_a_data_set_is_compared_by_its_values(tmp_path):
    def make(value):
        data = SeriesSplit(torch.full((1, 2, 3), value), torch.zeros(1, 2) > 0, torch.zeros(1))

        def function(seed):
            return {"mean": data.x.mean().item() + seed}

        return function

    values = [run_grid(make(v), [{"seed": 0}], tmp_path)[0]["mean"] for v in (1.0, 2.0, 1.0)]
    assert values == [1, 2, 1] and len(list(tmp_path.rglob("*.json"))) == 2


# --- The reader's own modules beside the page ----------------------------------------------------

HELPER = "import json\nFACTOR = 2\n\ndef scale(x):\n    return FACTOR * x\n"
WAYS = {  # how a page uses beside_helper.py: its imports, and the function's result
    "a module": ("import beside_helper", "beside_helper.scale(seed)"),
    "a function": ("from beside_helper import scale", "scale(seed)"),
    "a class": ("import beside_other\nclass Model(beside_other.Base): pass", "Model().value(seed)"),
    "in the function": ("", "__import__('math').floor(seed) + own(seed)"),
    "a relative import": ("from beside_package import outer", "outer.scale(seed)"),
    "a namespace": ("from beside_space.inner import part", "part.scale(seed)"),
    "a namespace in the function": ("", "own(seed)"),
}
OTHER = "import beside_helper\n\nclass Base:\n    def value(self, x):\n"
OTHER += "        return beside_helper.scale(x)\n"
BESIDE = {
    "beside_helper.py": HELPER,
    "beside_other.py": OTHER,
    "beside_package/__init__.py": "",
    "beside_package/inner.py": "from beside_helper import scale\n",
    "beside_package/outer.py": "from .inner import scale\n",
    "beside_space/inner/part.py": "from beside_helper import *\n",
}


class Beside:
    """A page, and modules beside it that can be edited, as a reader would with a new kernel."""

    def __init__(self, folder):
        self.folder, self.store = folder, folder / "store"
        for name, text in BESIDE.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    def edit(self, old, new):
        path = self.folder / "beside_helper.py"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def forget(self):
        """Begin as a new kernel does."""
        for name in [name for name in sys.modules if name.startswith("beside_")]:
            del sys.modules[name]
        importlib.invalidate_caches()

    def load(self, way="a module"):
        head, body = WAYS[way]
        place = "beside_space.inner.part" if "namespace" in way else "beside_helper"
        local = f"    from {place} import scale as own\n" if "own(" in body else ""
        text = f"{head}\n\ndef train_once(seed):\n{local}    return {{'value': {body}}}\n"
        return module_of(self.folder / "beside_page.py", text).train_once

    def run(self, function):
        """Return the value, and whether a run was made for it."""
        before = len(list(self.store.rglob("*.json")))
        (result,) = run_grid(function, [{"seed": 3}], self.store)
        return result["value"], len(list(self.store.rglob("*.json"))) > before

    def again(self, way="a module"):
        self.forget()
        return self.run(self.load(way))


@pytest.fixture
def beside(tmp_path, monkeypatch):
    monkeypatch.setenv("DERIVED_ATTENTION_PROFILE", "quick")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two edits may have one time stamp
    beside = Beside(tmp_path)
    yield beside
    beside.forget()


@pytest.mark.parametrize("way", WAYS)
def test_a_constant_of_a_module_beside_the_page_is_noticed(beside, way):
    first, made = beside.again(way)
    assert made and beside.again(way) == (first, False)
    beside.edit("FACTOR = 2", "FACTOR = 5  # more")
    changed, made = beside.again(way)
    assert made and changed != first
    beside.edit("FACTOR = 5  # more", '"""Say."""\nFACTOR = 2')  # comments do not count
    assert beside.again(way) == (first, False)


NET = "rate = 2\n\nclass NET:\n    size = 2\n    def of(self):\n        return self.size * 1\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [("rate = 2", "rate = 3"), ("lr=2", "lr=3"), ("size = 2", "size = 3"), ("* 1", "* 1.5")],
)
def test_other_values_of_a_module_beside_the_page_are_noticed(beside, old, new):
    """A variable, a default argument, an attribute of a class, and a method."""
    beside.edit("FACTOR = 2", NET)
    beside.edit("def scale(x)", "def scale(x, lr=2)")
    beside.edit("return FACTOR", "return rate * lr * NET().of()")
    assert beside.again() == (24, True) and beside.again() == (24, False)
    beside.edit(old, new)
    assert beside.again() == (36, True)


def test_a_module_that_is_being_edited_is_named(beside):
    function = beside.load()
    beside.edit("FACTOR = 2", "FACTOR = (2")
    with pytest.raises(SyntaxError, match=r"beside_helper.py, line"):
        beside.run(function)


def test_what_memory_has_counts_where_a_file_was_edited_after_its_import(beside):
    """Else a result of the old code would lie under the key of the new, and be found for ever."""
    function = beside.load()
    assert beside.run(function) == (6, True)
    beside.edit("FACTOR * x", "FACTOR * x + 1")
    assert beside.run(function)[0] == 6
    assert beside.again() == (7, True)
    importlib.reload(sys.modules["beside_helper"])
    assert beside.run(beside.load()) == (7, False)


def test_a_constant_that_is_set_from_outside_is_noticed(beside, monkeypatch):
    function = beside.load()
    assert beside.run(function) == (6, True)
    monkeypatch.setattr(sys.modules["beside_helper"], "FACTOR", 4)
    assert beside.run(function) == (12, True)
    monkeypatch.undo()
    assert beside.run(function) == (6, False)


def test_what_a_module_counts_for_itself_changes_no_key(beside):
    beside.edit("FACTOR = 2", "FACTOR = 2\ncalls = COUNT = 0\nseen = []")
    beside.edit("def scale(x)", "def scale(x, memo={})")
    beside.edit(
        "    return",
        "    global calls, COUNT\n    calls = COUNT = calls + 1\n    seen.append(x)\n"
        "    memo[calls] = x\n    return",
    )
    function = beside.load()
    assert beside.run(function) == (6, True)
    assert beside.run(function) == (6, False)


def test_the_package_counts_where_a_module_beside_the_page_reaches_it(beside, monkeypatch):
    beside.edit("import json", "from derived_book import claims")
    beside.again()
    name = "derived_book.claims"
    monkeypatch.setitem(PACKAGE.texts, name, f"{PACKAGE.texts[name]}\nX = 1\n")
    assert beside.again()[1]


def test_a_module_with_a_very_long_expression_counts(beside):
    beside.edit("import json", f"import json\nLONG = lambda: {' + '.join(['FACTOR'] * 700)}")
    beside.again()
    beside.edit("FACTOR = 2", "FACTOR = 3")
    assert beside.again() == (9, True)
