"""The commands for a machine with a GPU, rehearsed without one at tiny sizes."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import nbformat
import pytest
import torch

from benchmarks import report
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import besides, busy, chapters, table
from benchmarks.gpu.besides import DOUBLE, FLA, FLEX, SDPA
from benchmarks.gpu.table import OURS, REHEARSAL
from derived_attention.registry import MECHANISMS

if torch.cuda.is_available():
    pytest.skip("these tests rehearse without a GPU", allow_module_level=True)
FORWARD, BOTH = report.MODES
ROWS = {(case.name, case.is_causal): case for case in table.cases()}


@pytest.fixture
def three_cases(monkeypatch):
    chosen = [ROWS["mgk", False], ROWS["delta", True], ROWS["window", False]]
    monkeypatch.setattr(table, "cases", lambda: chosen)
    monkeypatch.setattr(table, "prepare_all", lambda *_: None)
    return chosen


def measured(tmp_path, *arguments):
    status = table.main(["--rehearse", "--output", str(tmp_path), *arguments])
    return status, json.loads((tmp_path / "gpu-rehearsal.json").read_text("utf8"))


def test_every_mechanism_has_a_row_and_every_goal_a_mechanism():
    names = {name for name, _ in ROWS}
    assert names == {*MECHANISMS, "gated_delta"} and len(ROWS) == 50
    assert {name for name, kind, *_ in table.GOALS} | table.CHEAPER <= names
    assert all(ROWS[name, kind == "causal"] for name, kind, *_ in table.GOALS)


def test_tokens_times_heads_are_the_same_at_all_lengths():
    sizes = table.Sizes()
    shapes = {N: sizes.shape(N, 64) for N in sizes.lengths}
    assert shapes[4096] == (4, 16, 4096, 64) and shapes[65536] == (1, 4, 65536, 64)
    assert {B * H * N for B, H, N, _ in shapes.values()} == {2**18}


def test_the_most_important_cells_come_first_and_fla_after_ours():
    jobs = table.jobs(table.Sizes())
    assert len(jobs) == len(set(map(table.name_of, jobs))) == 8 * (len(ROWS) + 3)
    first = jobs[: 2 * (len(ROWS) + 3)]
    assert {(job.N, job.D) for job in first} == {(4096, 64), (16384, 64)}
    assert [job.fla for job in first] == [False] * 2 * len(ROWS) + [True] * 6


@pytest.mark.parametrize("key", [k for k in ROWS if k[0] in (*table.PATTERNS, *besides.FLA_FORMS)])
def test_what_is_beside_computes_what_ours_does(key):
    sizes, case = replace(REHEARSAL, heads=2), ROWS[key]
    fla = case.is_causal and case.name in besides.FLA_FORMS
    calls = table.calls_of(case, 128, 8, sizes, fla)
    if case.name != "smgk":  # the others have free keys: another mixture, of equal cost
        for name in {FLEX, table.UNFUSED} & calls.keys():
            torch.testing.assert_close(calls[name][FORWARD](), calls[OURS][FORWARD]())
    if fla:
        found, expected = calls[FLA], calls[OURS]
        pairs = [(found[FORWARD](), expected[FORWARD]())]
        pairs += zip(found[BOTH](), expected[BOTH](), strict=True)
        for i, (x, y) in enumerate(pairs):
            x = x.mT if i == 4 and x.dim() == 2 else x.transpose(1, 2)
            torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-3 * float(y.abs().max()))


def test_a_rehearsal_measures_all_and_goes_on_where_it_stopped(three_cases, tmp_path, capsys):
    status, data = measured(tmp_path, "--minutes", "0")
    assert status == 3 and "Run this command again" in capsys.readouterr().out
    status, data = measured(tmp_path)
    assert status == 0 and len(data["cells"]) == 9
    mixture = data["cells"]["mgk, N = 64, D = 8"]
    assert mixture["beside"] == DOUBLE and {OURS, SDPA, DOUBLE, FLEX} == set(mixture["times"])
    for mode in report.MODES:
        assert mixture["times"][OURS][mode]["ms"] > 0
    assert FLA in data["cells"]["delta, causal, N = 64, D = 8"]["times"]
    said = capsys.readouterr().out
    assert "| delta, causal | 64 | fla-core | 1.1 |" in said and "| MGK |" in said
    before = data["cells"]
    assert measured(tmp_path)[1]["cells"] == before, "cells are measured again"
    assert measured(tmp_path, "--again")[1]["cells"] != before
    header, rows = report.gpu_table(data)
    assert len(header) == 6 and {len(row) for row in rows} == {6}


def test_a_mechanism_that_fails_or_hangs_stops_no_other(three_cases, monkeypatch, tmp_path):
    def fails(q, k, v, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def hangs(q, k, v, **options):
        time.sleep(60)

    monkeypatch.setattr(table, "LONGEST_CELL", 0.5)
    three_cases[0] = replace(three_cases[0], entry=replace(MECHANISMS["mgk"], function=fails))
    three_cases[1] = replace(three_cases[1], entry=replace(MECHANISMS["delta"], function=hangs))
    status, data = measured(tmp_path)
    times = {key: cell["times"] for key, cell in data["cells"].items()}
    assert status == 0
    assert times["mgk, N = 64, D = 8"][OURS][FORWARD] == {"skipped": "out of memory"}
    longer = times["mgk, N = 128, D = 8"][OURS][BOTH]["skipped"]
    assert longer == "out of memory at N = 64, D = 8", "it is tried at longer sequences"
    assert times["delta, causal, N = 64, D = 8"][OURS][FORWARD] == {"skipped": "out of time"}
    assert times["window, N = 64, D = 8"][OURS][BOTH]["ms"] > 0
    verdicts = {x["verdict"] for x in data["goals"] if x["mechanism"] in ("mgk", "delta")}
    assert verdicts == {"not measured"}


def test_a_cell_in_which_the_process_ended_is_left_out(three_cases, monkeypatch, tmp_path):
    class CrashError(BaseException):
        pass

    def crash(*_):
        raise CrashError

    times = table.Table.times
    monkeypatch.setattr(table.Table, "times", crash)
    with pytest.raises(CrashError):
        measured(tmp_path)
    monkeypatch.setattr(table.Table, "times", times)
    status, data = measured(tmp_path)
    found = data["cells"]["mgk, N = 64, D = 8"]["times"][OURS][FORWARD]
    assert status == 0 and found == {"skipped": "the process ended here"}


def test_goals_are_met_by_both_times_or_missed_by_the_worse(tmp_path):
    def cell(name, causal, forward, both, beside):
        ours, other = ({FORWARD: {"ms": x}, BOTH: {"ms": y}} for x, y in ((forward, both), (1, 1)))
        times = {"times": {OURS: ours, beside: other}}
        return times | {"mechanism": name, "causal": causal, "N": 16384, "D": 64}

    cells = [cell("delta", True, 1.0, 1.1, FLA), cell("ridge", True, 2.0, 4.5, SDPA)]
    data = {"cells": dict(enumerate(cells)), "lengths": [1024, 4096, 16384, 65536], "dims": [64]}
    found = {(x["mechanism"], x["kind"], x["beside"], x["N"]): x for x in table.verdicts(data)}
    assert found["delta", "causal", FLA, 16384]["verdict"] == "met"
    assert found["ridge", "causal", SDPA, 16384]["verdict"] == "missed by 50 %"
    assert found["lasso", "full", SDPA, 16384]["verdict"] == "not measured"


# --- notebooks ------------------------------------------------------------------------------------


def notebook(path, *sources):
    cells = list(map(nbformat.v4.new_code_cell, sources))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


def test_notebooks_run_side_by_side_and_each_has_a_limit(monkeypatch, tmp_path, capsys):
    start = "import os\nassert os.environ['DERIVED_ATTENTION_PROFILE'] == 'medium'"
    notebook(tmp_path / "01_good.ipynb", start)
    notebook(tmp_path / "A_bad.ipynb", "1 / 0")
    monkeypatch.setattr(chapters, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(chapters.os, "cpu_count", lambda: 4)
    command = ["--output", str(tmp_path)]
    assert chapters.main(command) == 1 and "ZeroDivisionError" in capsys.readouterr().out
    (tmp_path / "A_bad.ipynb").unlink()
    notebook(tmp_path / "audit_slow.ipynb", "import time; time.sleep(300)")
    assert chapters.main([*command, "--limit", "1"]) == chapters.UNFINISHED
    (file,) = tmp_path.glob("gpu-chapters-*.json")
    found = json.loads(file.read_text("utf8"))["chapters"]
    states = {name: x["cpu"]["state"] for name, x in found.items()}
    assert states == {"01_good": "done", "A_bad": "failed", "audit_slow": "stopped"}
    (tmp_path / "audit_slow.ipynb").unlink()
    monkeypatch.setattr(chapters, "Running", None)  # nothing is run again
    assert chapters.main(command) == 0


def test_a_gpu_with_work_in_half_of_the_samples_is_busy_half_the_time(monkeypatch, tmp_path):
    class EndError(Exception):
        pass

    class Stream:
        turns = iter(range(2000))

        def query(self):
            if (turn := next(self.turns)) == 1999:
                raise EndError
            return bool(turn % 2)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", Stream)
    monkeypatch.setattr(busy.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(busy, "EVERY", 1e-3)
    with pytest.raises(EndError):
        busy._sample(tmp_path / "busy")
    assert float((tmp_path / "busy").read_text()) == 0.5


# --- make gpu -------------------------------------------------------------------------------------


def test_a_step_gets_what_earlier_ones_left_and_is_tried_again(monkeypatch, tmp_path, capsys):
    given, asked = {"table": "done", "verify": "failed", "chapters": "done"}, {}

    def call(step, seconds):
        asked[step.name] = seconds
        return {"state": given[step.name], "seconds": 0.0, "said": ["a line"]}

    monkeypatch.setattr(gpu, "call", call)
    command = ["--rehearse", "--output", str(tmp_path), "--minutes", "9"]
    assert gpu.main(command) == 1 and "Not done: verify." in capsys.readouterr().out
    assert list(asked) == ["table", "verify", "chapters"]
    assert sum(step.share for step in gpu.steps(tmp_path)) == pytest.approx(1)
    assert asked["table"] == pytest.approx(330, abs=2)
    assert asked["chapters"] == pytest.approx(540, abs=2), "expected the time that the others left"
    asked.clear()
    given["verify"] = "done"
    assert gpu.main(command) == 0 and list(asked) == ["verify"]


def test_a_step_that_takes_too_long_is_stopped():
    slow = gpu.Step("slow", ("-c", "import time; time.sleep(60)"), 1)
    assert gpu.call(slow, 0.5)["state"] == "unfinished"
    bad = gpu.call(gpu.Step("bad", ("-c", "1 / 0"), 1), 30)
    assert bad["state"] == "failed" and "ZeroDivisionError" in bad["said"][-1]
    assert gpu.call(gpu.Step("good", ("-c", "print('fine')"), 1), 30)["said"] == ["fine"]


def test_steps_that_do_not_exist_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--rehearse", "--output", str(tmp_path), "--only", "xyz"])
    assert "--only is ['xyz']; expected first letters of table" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_measured(capsys):
    assert gpu.main([]) == table.main([]) == 2
    assert capsys.readouterr().out.count("--rehearse") == 2
