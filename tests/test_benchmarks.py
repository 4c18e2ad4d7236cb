"""The benchmark: it times the forms that the pages derive, and its results are complete."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from places import ROOT

from benchmarks import __main__ as command
from benchmarks import beside, report, run, small_sizes
from benchmarks.cases import BASELINES, CASES
from benchmarks.peers import LIBRARIES, load
from derived_attention.linear.core import linear_attention
from derived_attention.registry import grid_of, near_root
from derived_book import experiment_tables
from derived_book.training.run_key import PACKAGE

FORMS = ("fast", "reference")
HERE = report.slug(run.processor())
MACHINES = sorted(path for path in report.RESULTS.iterdir() if path.is_dir())


def check_whole(data, lengths):
    """A file has all its rows and no others, with numbers above 0."""
    assert data["settings"]["lengths"] == lengths and data["rounds"] >= 1
    times = [(x.get("dim", run.DIM), x["length"], x["dtype"], x["mode"]) for x in data["times"]]
    D, dtypes = data["settings"]["D"], data["settings"]["dtypes"]
    dims = D if isinstance(D, list) else [D]
    assert times == list(itertools.product(dims, lengths, dtypes, report.MODES))
    for row in data["times"]:
        for numbers in (row["seconds"], row["baseline_seconds"], row["ratio"]):
            assert 0 < numbers["q1"] <= numbers["median"] <= numbers["q3"], row
        assert row["operations"] > 0
    for rows in (data["memory"], data["baseline_memory"]):
        found = [(x["form"], x["mode"]) for x in rows]
        assert found == list(itertools.product(FORMS, report.MODES))
        for row in rows:
            assert row["lengths"][1] == 2 * row["lengths"][0]
            assert 0 < row["bytes"][0] < row["bytes"][1]


# --- the command ---------------------------------------------------------------------------------


def test_the_command_writes_a_file_for_each_case_and_prints_tables(tmp_path, capsys):
    names, threads = ["conv1d", "mgk_causal"], torch.get_num_threads()
    given = ["--lengths", "16", "--rounds", "2", "--output", str(tmp_path / "new")]
    torch.set_num_threads(2)
    try:
        assert command.main([*given, "--cases", *names]) == 0
    finally:
        torch.set_num_threads(threads)
    done = capsys.readouterr()
    results = report.load(folder=tmp_path / "new")
    assert list(results) == [HERE] and set(results[HERE]) == set(names)
    assert len(list((tmp_path / "new" / HERE).iterdir())) == 2
    for name, data in results[HERE].items():
        check_whole(data, [16])
        assert (data["device"], data["rounds"]) == ("cpu", 2)
        assert data["machine"]["threads"] == 1
        lines = [line for line in done.out.splitlines() if line.startswith("| ")]
        for label in (CASES[name].label, BASELINES[CASES[name].baseline].label):
            assert len([line for line in lines if line.startswith(f"| {label} |")]) == 2
    assert "memory: conv1d" in done.err and "memory: conv1d" not in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "linear", "quadratic"], "invalid choice: 'quadratic'"),
        (["--lengths", "0"], "'0' is not a whole number above 0"),
        (["--rounds", "1.5"], "'1.5' is not a whole number above 0"),
        (["--dims", "-8"], "'-8' is not a whole number above 0"),
        (["--peers", "nobody"], "invalid choice: 'nobody'"),
    ],
)
def test_a_wrong_argument_is_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_only_what_has_no_results_for_its_settings_is_measured(tmp_path, monkeypatch, capsys):
    (example,) = report.load(["window"]).get("amd-epyc").values()
    asked, libraries = [], []

    def fake(baseline, names, lengths, dims, rounds):
        asked.extend(names)
        return {
            name: copy.deepcopy(example)
            | run.title(CASES[name])
            | {"settings": run.settings(CASES[name], lengths, dims)}
            | {"code": run.code(CASES[name])}
            for name in names
        }

    def fake_peers(names, lengths, dims, rounds, folder, again):
        libraries.append((list(names), folder, again))
        return {}

    def measured(*arguments):
        asked.clear()
        libraries.clear()
        assert command.main(arguments) == 0
        return set(asked)

    monkeypatch.setattr(command, "run", fake)
    monkeypatch.setattr(beside, "main", fake_peers)
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    assert measured("--lengths", "1024", "1024") == set(CASES)
    assert measured("--dims", "64") == set(CASES) and libraries == [(LIBRARIES, None, True)]
    assert not list(tmp_path.iterdir()), "a trial run must write nothing"
    assert measured("--cases", "window", "bn") == {"window", "bn"} and not libraries
    assert measured() == set(CASES) - {"window", "bn"}
    assert libraries == [(LIBRARIES, tmp_path / HERE, False)]
    assert measured("--peers") == set() and libraries == [(LIBRARIES, tmp_path / HERE, True)]
    assert measured("--peers", "fla") == set() and libraries[0][0] == ["fla"]
    assert measured() == set() and "--all measures them again" in capsys.readouterr().out
    assert measured("--cases", "bn") == {"bn"} and measured("--all") == set(CASES)
    (tmp_path / HERE / "mgk.json").unlink()
    monkeypatch.setitem(CASES, "bn", replace(CASES["bn"], options=lambda N, D=64: {"eps": 0.1}))
    monkeypatch.setitem(CASES, "sh", replace(CASES["sh"], label="another", goal=(0.1, 0.1)))
    before = {path: path.read_bytes() for path in tmp_path.glob("*/*.json")}
    assert measured() == {"mgk", "bn"}
    changed = {path.stem for path in before if path.read_bytes() != before[path]}
    assert changed == {"bn", "sh"}, "new names and goals need no new measurement"
    assert json.loads((tmp_path / HERE / "sh.json").read_text("utf8"))["label"] == "another"
    file = tmp_path / HERE / "conv1d.json"
    data = json.loads(file.read_text("utf8"))
    file.write_text(json.dumps({key: x for key, x in data.items() if key != "code"}))
    text = PACKAGE.texts["derived_attention.sparse.core"] + "\nFASTER = True\n"
    monkeypatch.setitem(PACKAGE.texts, "derived_attention.sparse.core", text)
    capsys.readouterr()
    assert measured() >= {"conv1d", "window", "window_causal", "strided"} and "bn" not in asked
    lines = capsys.readouterr().err.splitlines()
    assert f"to measure: {HERE}/window, because the code has changed" in lines
    assert f"to measure: {HERE}/conv1d, because the file does not name the code" in lines
    assert measured() == set()


def test_code_is_that_of_a_form_without_comments(monkeypatch):
    name = "derived_attention.linear.triton"  # also used by mixtures of linear kernels
    before = {case: run.code(CASES[case]) for case in ("linear", "mlk", "window")}
    changes = {
        "\n# a comment\n": set(),
        '\n"""A text."""\n': set(),
        "\nSEGMENT = 128\n": {"linear", "mlk"},
    }
    source = PACKAGE.texts[name]
    for text, changed in changes.items():
        monkeypatch.setitem(PACKAGE.texts, name, source + text)
        assert {case for case in before if run.code(CASES[case]) != before[case]} == changed
    monkeypatch.setitem(PACKAGE.texts, name, source)
    registry = "derived_attention.registry"
    monkeypatch.setitem(PACKAGE.texts, registry, PACKAGE.texts[registry] + "\nX = 1\n")
    assert {case: run.code(CASES[case]) for case in before} == before


# --- the cases -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*BASELINES, "lasso", *(n for n in CASES if "mgk" in n)])
def test_what_is_compared_and_is_not_the_registry_s_is_one_formula(name):
    case, length = (BASELINES | CASES)[name], 132
    for training in (False, True):
        tensors = run.inputs(length, torch.float64, training)
        fast, reference = (
            run.call(getattr(case, form), tensors, case.options(length))() for form in FORMS
        )
        assert isinstance(fast, tuple) == training
        assert not training or len(fast) == 3 + ("shifts" in case.options(length))
        pairs = zip(fast, reference, strict=True) if training else [(fast, reference)]
        for ours, theirs in pairs:
            assert (ours - theirs).abs().max() <= 1e-11 * theirs.abs().max()


def test_an_unknown_mechanism_is_not_measured():
    with pytest.raises(SystemExit, match="'--help' is not a mechanism; expected some of softmax"):
        small_sizes.main(["--help"])


@pytest.mark.parametrize("name", small_sizes.SHORT)
def test_what_is_short_at_small_sizes_computes_the_same(name, monkeypatch):
    monkeypatch.setattr(small_sizes, "BATCH", 2)
    for is_causal in (False, True):
        row = small_sizes.compare(name, is_causal, 64, rounds=1)  # raises if outputs differ
        assert row["beside"] in ("formula", "SDPA") and row["ratio"]["median"] > 0


def test_cases_are_different_mechanisms_beside_what_masks_alike():
    tensors = run.inputs(132, torch.float64, training=False)
    seen = {}
    for name, case in CASES.items():
        out = run.call(case.fast, tensors, case.options(132))()
        assert not [other for other, x in seen.items() if torch.allclose(x, out)], name
        seen[name] = out
        beside = BASELINES[case.baseline].options(64)
        causal = case.options(64).get("is_causal", False)
        assert causal == beside.get("is_causal", False) == name.endswith("causal")


def test_memory_of_what_stores_a_matrix_and_of_what_does_not():
    growth = {}
    for form in FORMS:
        before, after = run.weigh(BASELINES["sdpa"], form, report.MODES[0], 512)["bytes"]
        growth[form] = after / before
    assert growth["fast"] < 2.2 and growth["reference"] > 3.5


def test_a_row_is_of_its_head_dimension():
    how = (64, torch.float32, report.MODES[0], 2, 32)
    row = run.time_cases("sdpa", ["performer"], *how)["performer"]
    assert row["dim"] == 32 and row["operations"] > 0
    assert CASES["performer"].options(64, 32)["projection"].shape == (4 * 32, 32)


def test_sizes_that_depend_on_the_length():
    sizes = [(64, 64), (32, 64), (3, 4), (1, 7), (1, 1)]
    assert [grid_of(n) for n in (4096, 2048, 12, 7, 1)] == sizes
    assert [near_root(n) for n in (4096, 4095, 2048, 16, 1)] == [64, 32, 32, 4, 1]


def test_every_round_calls_everything_once_in_changing_order():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    taken = run.time_rounds(calls, 6)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(rounds) == 7, "one more round, which does not count"
    assert {"".join(sorted(r)) for r in rounds} == {"abc"} and len(set(rounds)) > 1
    assert {name: len(seconds) for name, seconds in taken.items()} == dict.fromkeys("abc", 6)


# --- other libraries -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peers():
    found, missing = load()
    assert not missing
    return found


def test_every_library_is_here(peers):
    wanted = {"fla_core" if name == "fla" else name for name in LIBRARIES}
    assert {peer.package.replace("-", "_") for peer in peers.values()} == wanted


def test_a_peer_computes_what_ours_does(peers):
    same = {name: peer for name, peer in peers.items() if not peer.differs}
    assert len(same) == 7
    for training in (False, True):
        tensors = run.inputs(128, torch.float64, training)
        calls = beside.calls_of("sdpa", same, 128, 64, tensors)
        for name, peer in same.items():
            theirs, ours = calls[name](), calls[beside.ours(peer)]()
            for x, y in zip(theirs, ours, strict=True) if training else [(theirs, ours)]:
                assert (x - y).abs().max() <= 1e-9 * y.abs().max(), name


def test_a_peer_that_differs_does_as_it_says(peers):
    q, k, v, _ = run.inputs(128, torch.float64, False)
    form = functools.partial(peers["linear_attention_transformer_causal"].form, is_causal=True)
    ours = linear_attention(q, k, v, is_causal=True, feature_map=torch.exp)
    assert (form(q, k, v, bucket=1) - ours).abs().max() <= 1e-10
    another = torch.cat([v[..., :64, :], -v[..., 64:, :]], -2)
    assert torch.equal(form(q, k, v), form(q, k, another)), "no query attends to the last 64 keys"
    assert not torch.equal(form(q, k, v, bucket=1), form(q, k, another, bucket=1))
    # Each key occurs four times in a row, so the landmarks are the keys, and the result is exact.
    k = torch.randn(1, 8, 128, 64, dtype=torch.float64).repeat_interleave(4, -2)
    v = torch.randn_like(k)
    exact = torch.nn.functional.scaled_dot_product_attention(3 * k, k, v)
    assert (peers["nystrom_attention"].form(3 * k, k, v) - exact).abs().max() < 1e-4


def test_a_library_that_is_not_there_is_left_out_with_a_line(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "benchmarks.peers.linformer", raising=False)
    monkeypatch.setitem(sys.modules, "linformer.linformer", None)
    found, missing = load(["linformer", "local_attention"])
    assert set(found) == {"local_attention", "local_attention_causal"}
    (line,) = missing
    assert line.startswith("linformer is left out (") and "'derived-attention[peers]'" in line
    assert beside.main(["linformer"], [64], [64], 2, None, False) == {}
    assert line in capsys.readouterr().err


def test_peers_are_measured_once_and_written(tmp_path, capsys):
    how = (["linformer"], [64], [32], 2, tmp_path)
    done = beside.main(*how, False)
    written = json.loads((tmp_path / "peers" / "linformer.json").read_text("utf8"))
    assert done == {"linformer": written}
    check_peer(done["linformer"], [64], 32)
    assert "| linformer (0." in capsys.readouterr().out
    assert beside.main(*how, False) == {} and set(beside.main(*how, True)) == {"linformer"}
    tensors = run.inputs(64, torch.float32, True)
    for x, y in zip(tensors, beside.tokens_first(tensors), strict=True):
        assert torch.equal(x, y) and x.requires_grad == y.requires_grad
        assert y.transpose(1, 2).is_contiguous() and not x.transpose(1, 2).is_contiguous()


def check_peer(data, lengths, dim):
    times = [(x["length"], x["dim"], x["mode"]) for x in data["times"]]
    assert times == [(n, dim, mode) for n in lengths for mode in report.MODES]
    for row in data["times"]:
        for key in ("seconds", "ours_seconds", "baseline_seconds", "ratio", "ours_ratio"):
            assert 0 < row[key]["q1"] <= row[key]["median"] <= row[key]["q3"], (key, row)
        assert min(row[key] for key in ("bytes", "ours_bytes", "baseline_bytes")) > 0
    check_shape(report.peer_table({"one": data}, max(lengths), dim))


# --- the committed results -----------------------------------------------------------------------


@pytest.mark.parametrize("folder", MACHINES, ids=lambda folder: folder.name)
def test_committed_results_are_whole_and_of_the_cases_as_they_are(folder):
    for path in folder.glob("*.json"):
        text = path.read_text("utf8")
        data, case = json.loads(text), CASES[path.stem]
        check_whole(data, run.LENGTHS)
        same = data == data | run.title(case)
        old = run.why_outdated(path, run.settings(case, run.LENGTHS, run.DIMS))
        assert same and not old, f"{path.name}: run python -m benchmarks"
        assert data["rounds"] >= 7 and data["device"] == "cpu" and data["machine"]["gpu"] is None
        assert folder.name == report.slug(data["machine"])
        assert not re.search(r"(?<!\w)/\w+/", text), "results must contain no path of the machine"
        growth = {(x["form"], x["mode"]): x["bytes"][1] / x["bytes"][0] for x in data["memory"]}
        assert max(growth["fast", mode] for mode in report.MODES) < 2.5, "memory must grow like N"
        # The growth is 4, less for other memory: Luna's 128 packed keys count at N = 2048. If each
        # query has its own (D, D) matrix, these are larger than the (N, N) matrix; the delta rule's
        # formula stores no other.
        own = path.stem in ("ridge", "ridge_causal", "lasso_causal", "delta", "delta_causal")
        assert growth["reference", report.MODES[0]] > (1.9 if own else 3.3), "no matrix is stored"


@pytest.mark.parametrize("folder", MACHINES, ids=lambda folder: folder.name)
def test_committed_peers_are_whole_and_as_they_are(folder, peers):
    found = sorted((folder / "peers").glob("*.json"))
    assert {path.stem for path in found} == set(peers)
    for path in found:
        data, peer = json.loads(path.read_text("utf8")), peers[path.stem]
        wanted = beside.settings(peer, beside.LENGTHS, run.DIMS)
        assert data == data | beside.title(peer) and not run.why_outdated(path, wanted), path.name
        assert data["rounds"] >= 7 and data["version"]
        check_peer(data, wanted["lengths"], run.DIM)


def test_kernels_compile_ahead_of_time_and_spill_nothing():
    """A block has at least 99 KiB of shared memory on the GPUs that run kernels."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.resources"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["sm"] for row in rows} == {80, 90}
    assert not [row for row in rows if row["spills"] or row["shared"] > 99 * 1024]


# --- tables --------------------------------------------------------------------------------------


@pytest.fixture
def measured():
    return {"amd-epyc": report.load()["amd-epyc"]}


def check_shape(made):
    header, rows = made
    assert rows and {len(row) for row in rows} == {len(header)}
    assert all(isinstance(cell, str) and "|" not in cell for row in [header, *rows] for cell in row)
    lines = experiment_tables.markdown(made).splitlines()
    assert len(lines) == len(rows) + 2
    assert {line.count("|") for line in lines} == {len(header) + 1}


def test_tables_show_the_cases_after_what_they_are_beside(measured):
    header, rows = report.time_table(measured, ["window", "linear_causal"])
    assert header[0] == "time, N = 4096" and header[-2:] == list(report.MODES)
    labels = [CASES[name].label for name in ("window", "linear_causal")]
    assert [row[0] for row in rows] == ["SDPA", "SDPA, causal", *labels]
    assert [row[1] for row in rows] == ["", "", "SDPA", "SDPA, causal"]
    assert re.fullmatch(r"1 = [\d.]+ m?s", rows[0][4])
    assert re.fullmatch(r"≤ 0\.\d\d / 0\.\d\d: (met|missed on AMD EPYC)", rows[2][3])
    assert re.fullmatch(r"0\.\d\d \[0\.\d\d, 0\.\d\d\]", rows[2][4])
    files = {name: measured["amd-epyc"][name] for name in ("mgk", "hard_mgk", "smgk")}
    memory = report.memory_table(files)
    assert memory[0][0] == "extra memory, AMD EPYC"
    assert [row[0] for row in memory[1][:2]] == ["SDPA, twice the heads", CASES["mgk"].label]
    assert re.fullmatch(r"[\d.]+ MiB, ×\d\.\d", memory[1][1][2])
    beside, *factors = (row[-1] for row in memory[1])
    assert beside == "", "the baseline has no factor: its two lengths differ"
    assert min(map(float, factors)) >= 40, "O(N) memory must save a factor of 40 at N = 4096"
    assert all(re.fullmatch(r"[\d.]+ GiB, ×[34]\.\d", row[5]) for row in memory[1][1:])
    for made in (report.time_table(measured), memory, (header, rows)):
        check_shape(made)


def test_machines_and_dtypes_stand_side_by_side(measured):
    chosen = ("linear_causal", "bn_causal")
    amd = {name: copy.deepcopy(measured["amd-epyc"][name]) for name in chosen}
    for data in amd.values():  # so that measured ratios do not matter
        for row, ratio in zip(data["times"][2:4], (0.119, 0.149), strict=True):
            row["ratio"]["median"] = ratio
    del amd["bn_causal"]["code"]  # as in files of an earlier schema
    intel, cuda = (copy.deepcopy(amd) for _ in range(2))
    for data in intel.values():
        data["machine"]["processor"] = "Intel(R) Xeon(R) CPU @ 2.70GHz"
        data["machine"]["date"], data["rounds"] = "2026-12-01", data["rounds"] + 2
    slow = intel["linear_causal"]["times"][3]
    assert report.GOAL.items() <= slow.items()
    slow["ratio"]["median"] = 0.151
    intel["linear_causal"]["times"][2]["baseline_seconds"]["median"] = 1.5
    del cuda["bn_causal"]
    cuda["linear_causal"]["device"], cuda["linear_causal"]["machine"]["gpu"] = "cuda", "NVIDIA H200"
    cuda["linear_causal"]["settings"]["dtypes"] = ["float32", "bfloat16"]
    times = cuda["linear_causal"]["times"]
    times += [row | {"dtype": "bfloat16"} for row in times]
    results = {"amd-epyc": amd, "intel-xeon-2-70ghz": intel, "nvidia-h200": cuda}
    for files, name in zip(results.values(), results, strict=True):
        assert {report.slug(data["machine"]) for data in files.values()} == {name}

    made = report.time_table(results, ["linear_causal", "bn_causal"])
    check_shape(made)
    header, (baseline, linear, bn) = made
    kinds = ["AMD EPYC, float32", "Intel Xeon @ 2.70GHz, float32"]
    kinds += ["NVIDIA H200, float32", "NVIDIA H200, bfloat16"]
    assert header[4:] == [f"{mode} ({kind})" for kind in kinds for mode in report.MODES]
    assert linear[3] == "≤ 0.12 / 0.15: missed on Intel Xeon @ 2.70GHz"
    assert bn[3] == "≤ 1.10 / 1.10: met"
    assert all(linear[4:]) and all(bn[4:8]) and bn[8:] == [""] * 4
    assert re.fullmatch(r"1 = \d+ ms to 1.50 s", baseline[6])
    gpu = report.time_table({"nvidia-h200": cuda}, ["linear_causal"])
    assert gpu[1][1][3] == "", "goals are for CPUs only"
    rounds = amd["bn_causal"]["rounds"]
    assert f"threads: 1; B = 1, H = 8, D = 64; medians of {rounds} rounds" in report.caption(amd)
    assert report.caption(cuda).startswith("NVIDIA H200; B = 1, H = 8, D = 64;")
    unknown = "the code, which may have changed since"
    for data in cuda.values():
        data["code"] = "0"
    assert unknown not in report.caption(cuda)
    mixed = report.caption({**cuda, "b": amd["bn_causal"]})
    assert mixed.endswith(f"; 1 of 2 files do not name {unknown}")
    without = {key: x for key, x in amd["bn_causal"].items() if key != "code"}
    named = report.caption({"b": without | {"code": "0"}})
    assert named in report.caption({"b": without})
    both = report.caption({"a": amd["bn_causal"], "b": intel["bn_causal"]})
    assert f"medians of {rounds} and {rounds + 2} rounds" in both and "and 2026-12-01" in both


def test_what_is_not_there_is_named(measured, tmp_path):
    with pytest.raises(ValueError, match="no results for quadratic; there are "):
        report.time_table(measured, ["linear", "quadratic"])
    with pytest.raises(ValueError, match="no results for linear at N = 8192"):
        report.time_table(measured, ["linear"], length=8192)
    assert report.load(folder=tmp_path) == {}
    with pytest.raises(ValueError, match="no results for any case"):
        report.time_table({})
    (tmp_path / "amd").mkdir()
    (tmp_path / "amd" / "linear.json").write_text('{"schema": 1}')
    assert report.load(["window"], tmp_path) == {}
    with pytest.raises(ValueError, match="amd/linear.json has schema 1; expected 2"):
        report.load(folder=tmp_path)
