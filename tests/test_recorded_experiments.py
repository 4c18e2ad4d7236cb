"""Experiments: they train the models that pages define, and their stored results are complete."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.machinery
import math
import pkgutil
from itertools import product

import pytest
import torch
from places import ROOT

import experiments
from derived_book import experiment_tables
from derived_book.training.recorded import load_experiment
from derived_book.training.run_key import run_key
from experiments import chapter10, chapter12, chapter14, chapter17, chapter18
from experiments.page_models import chapter, model_code, page_path
from experiments.protocol import changed_orders, experiment, rate_of, seeds_of

NAMES = [x.name for x in pkgutil.iter_modules(experiments.__path__)]
MODULES = [importlib.import_module(f"experiments.{name}") for name in NAMES]
RECORDED = [
    (f"{name}_{experiment}", plan)
    for name, module in zip(NAMES, MODULES, strict=True)
    for experiment, plan in getattr(module, "EXPERIMENTS", {}).items()
]
CHAPTERS = [name.removeprefix("chapter") for name in NAMES if name.startswith("chapter")]

# --- models are written once ----------------------------------------------------------------------


def defined(code):
    """Return the names of functions, classes and constants that a module defines."""
    names = set()
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            targets = (x for target in node.targets for x in ast.walk(target))
            names |= {x.id for x in targets if isinstance(x, ast.Name) and x.id.isupper()}
    return names


@pytest.mark.parametrize("number", CHAPTERS)
def test_an_experiment_defines_nothing_that_its_page_defines(number):
    code = model_code(page_path(number).read_text("utf8"))
    own = (ROOT / "experiments" / f"chapter{number}.py").read_text("utf8")
    assert code and f'chapter("{number}")' in own
    assert not defined(own) & defined(code)


def test_other_processes_find_the_models_of_a_page_by_name():
    """A grid sends functions to them by name, although a page's module is not installed."""
    page = chapter("10")
    found = importlib.machinery.PathFinder.find_spec(page.__name__)  # not in sys.modules
    assert found is not None and found.origin == page.__file__


@pytest.mark.parametrize("number", CHAPTERS)
def test_cells_tagged_model_define_and_do_nothing_else(number):
    page = page_path(number)
    kinds = ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign
    other = [x for x in ast.parse(model_code(page.read_text("utf8"))).body if type(x) not in kinds]
    assert not [ast.unparse(x) for x in other if not isinstance(x, ast.AugAssign)]


PAGE = """# Title

```{code-cell} ipython3
---
tags: [hide-input]
---
import math
import json, re
```

```{code-cell} ipython3
---
tags: [hide-input, model]
---
TURN = 2 * math.pi

def turned(seed):
    return TURN + seed
```

```{code-cell} ipython3
%time turned(1)
```

```{code-cell} ipython3
print(turned(1) / 0)
```
"""


def test_models_of_a_page_are_its_tagged_cells_on_the_lines_of_the_page(tmp_path):
    (tmp_path / "book").mkdir()
    path = tmp_path / "book" / "77_turn.md"
    path.write_text(PAGE)
    page = chapter("77", tmp_path)
    assert page.turned(1) == 2 * math.pi + 1
    assert page.turned.__code__.co_firstlineno == PAGE.splitlines().index("def turned(seed):") + 1
    assert not hasattr(page, "json")
    key = run_key(page.turned)
    path.write_text(PAGE.replace("2 * math", "30 * math"))
    chapter.cache_clear()
    assert run_key(chapter("77", tmp_path).turned) != key


def test_a_page_without_models_and_a_missing_page_are_errors(tmp_path):
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "77_turn.md").write_text(PAGE.replace(", model", ""))
    with pytest.raises(ValueError, match=r"77_turn.md has no code cell tagged model"):
        chapter("77", tmp_path)
    with pytest.raises(ValueError, match=r"number is '78'; expected two digits"):
        chapter("78", tmp_path)


# --- experiments ---------------------------------------------------------------------------------


def test_singular_vectors_are_known_where_they_are():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 3, 12, 5, dtype=torch.float64)
    unit = torch.nn.functional.normalize
    phi_q, phi_k = (unit(x, dim=-1) @ v.mT for x in (q, k))  # (1, H, N, N), of rank 5
    U, sigma, Vh = torch.linalg.svd(phi_q @ phi_k.mT)
    left, right, other = U[..., :2], Vh.mT[..., :2] * sigma[..., None, :2], U[..., 2:4]

    def found(e, r, Lambda=1.0):
        W = {"W_e": (torch.linalg.pinv(phi_q) @ e)[0], "W_r": (torch.linalg.pinv(phi_k) @ r)[0]}
        look = chapter12.singular(q, k, v, **W, Lambda=torch.full((3, 2), Lambda))
        return [look[key].item() for key in ("scores", "reach", "overlap", "aligned")]

    reach, size = sigma[..., 0].median().item() / 12, 12**-0.5
    near = functools.partial(pytest.approx, abs=1e-6)
    assert found(3 * left, right) == near([3 * size, reach, 1, 1])
    assert found(other, right, 0.5) == near([size, reach / 2, 0, 0])


def test_hand_set_head_fetches_both_values_and_names_the_louder_first():
    torch.manual_seed(0)
    page = chapter10.page
    model = page.by_hand(page.Lookup(page.ARMS["both"][page.HAND], 2))
    found = chapter10.fetched(model, *page.pose(100, "both"))
    assert found["weight of first"] == pytest.approx(1 / (1 + math.exp(-0.2)), abs=1e-3)
    assert found["weight of first"] + found["weight of second"] == pytest.approx(1, abs=1e-3)
    assert found["same answer"] == pytest.approx(0.5, abs=0.1)  # reader 2 prefers larger values
    assert found["louder named"] == pytest.approx(0.75, abs=0.05)
    assert found["two likeliest"] == 1 and found["loss"] > 3  # sure, but wrong in half of all pairs
    model = page.Lookup(page.ARMS["both"]["uniform"], 2)
    found = chapter10.fetched(model, *page.pose(100, "both"))
    assert found["weight of first"] == found["weight of second"] == pytest.approx(1 / 8)
    assert found["two likeliest"] < 0.1


def test_layers_without_matrices_have_none():
    page = chapter14.page
    for arm, layer in page.AT_CROSS.items():
        if layer and layer is not page.ByPlace:
            assert not list(layer(16, 2).parameters()), arm


def test_by_place_weighs_places_alike_in_all_pictures():
    layer = chapter14.page.ByPlace(16, 2, cross=True)
    torch.nn.init.normal_(layer.scores)
    memory = torch.randn(3, 36, 16)
    mixed, _ = layer(torch.randn(3, 6, 16), memory, memory, need_weights=False)
    W_V, b_V = layer.in_proj_weight[32:], layer.in_proj_bias[32:]
    heads = (memory @ W_V.mT + b_V).unflatten(-1, (2, 8)).transpose(1, 2)
    by_hand = (layer.scores.softmax(-1) @ heads).transpose(1, 2).flatten(2)
    torch.testing.assert_close(mixed, layer.out_proj(by_hand))


def test_what_is_left_out_adds_nothing():
    layer = chapter14.page.AT_CROSS["left out"](16, 2)
    query, memory = torch.randn(3, 5, 16), torch.randn(3, 7, 16)
    assert not layer(query, memory, memory, need_weights=False)[0].any()


def test_the_example_of_chapter_18_projects_on_the_simplex():
    torch.manual_seed(0)
    s = torch.randn(20, 30, dtype=torch.float64)
    a = chapter18.sparsemax(s)
    on = a > 0
    tau = (s - a).where(on, -math.inf).amax(-1, keepdim=True)
    assert (a >= 0).all() and torch.allclose(a.sum(-1), torch.ones(20).double())
    assert torch.allclose((s - a)[on], tau.expand_as(s)[on]) and (s <= tau)[~on].all()


def test_what_is_added_to_the_look_up_of_chapter_18_answers_no_question():
    torch.manual_seed(0)
    names, values, asking, answers = chapter18.among(3, 300)
    asked, records = names.gather(1, asking), values != chapter17.page.VALUES
    same = (asked[..., None] == names[:, None]) & records[:, None]
    assert names.shape == values.shape == (3, 300) and not same[..., 64:].any()
    assert (same.sum(-1) == 1).all() and not records.gather(1, asking).any()
    assert torch.equal(values.gather(1, same.double().argmax(-1)), answers)


@pytest.mark.parametrize("name, plan", RECORDED, ids=[name for name, _ in RECORDED])
def test_committed_experiments_are_whole(name, plan):
    assert max(len(seeds_of(plan, arm)) for arm in plan["names"]) >= 3
    for data in load_experiment(name):
        assert data["settings"] == plan["settings"]
        assert data["columns"] == [list(column) for column in plan["columns"]]
        found = [(row["arm"], row["seed"], row["steps"]) for row in data["rows"]]
        assert len(set(found)) == len(found) and data["steps"] == plan["steps"]
        seeds = {arm: seeds_of(plan, arm) for arm in plan["names"]}
        assert set(found) == {(a, s, n) for a in seeds for s in seeds[a] for n in plan["steps"]}
        assert all(row["lr"] == data["rates"][row["arm"]] for row in data["rows"])
        assert {row["arm"] for row in data["eightfold"]} == set(plan["longer"])
        assert not changed_orders(data, plan)
        for arm, rate in data["rates"].items() if data["tuning"] else []:
            chosen, next_one = rate_of(plan, data["tuning"], arm)
            lowered = any(row["arm"] == arm for row in data["collapses"]) and rate < chosen
            assert next_one is None and (rate == chosen or lowered)
        assert {"processor", "threads", "torch", "date", "gpu"} <= data["machine"].keys()
        for row in data["rows"]:
            assert all(math.isfinite(row[metric]) for metric, *_ in plan["columns"])
        header, rows = experiment_tables.experiment_table(data)
        assert rows and all(len(row) == len(header) for row in rows)


def test_what_a_step_takes_is_recorded_for_every_mechanism_at_the_lengths_of_the_jobs():
    rows = load_experiment("chapter17_cost")[0]["rows"]
    expected = set(product(chapter17.ARMS, chapter17.BATCHES))
    assert {(row["arm"], row["length"]) for row in rows} == expected
    assert all(row["seconds"] > 0 and row["bytes"] > 0 for row in rows)
    assert all(row["ratio"] == 1 for row in rows if row["arm"] == "softmax")


def test_an_experiment_is_run_once_and_written(monkeypatch, tmp_path, capsys):
    columns, how = [("bits", "bits", 2, 1)], {"steps": (1, 2), "seeds": 2, "rate": 0.1, "size": 3}
    plan = experiment("A text", tiny, ["a", "b"], columns, **how)
    monkeypatch.setattr(chapter10, "EXPERIMENTS", {"tiny": plan})
    monkeypatch.setattr(chapter10, "FOLDER", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        assert chapter10.main(["tiny"]) == 0
    (data,) = load_experiment("chapter10_tiny", tmp_path)
    found = {(row["arm"], row["seed"], row["steps"]) for row in data["rows"]}
    assert found == set(product("ab", (0, 1), (1, 2)))
    header, rows = experiment_tables.experiment_table(data)
    assert header[:5] == ["attention", "parameters", "MFLOP", "bits", "bits, 2 steps"]
    assert [row[:4] for row in rows] == [[x, "1,000", "2.00", "3.0 ± 1.4"] for x in "ab"]
    assert "A text (size = 3), mean ± standard deviation of 2 seeds" in capsys.readouterr().out


def tiny(arm, seed, steps, lr, size):
    return {"bits": 1.0 + seed, "parameters": 1000, "flops": 2_000_000}


def test_an_unknown_experiment_is_refused(capsys):
    with pytest.raises(SystemExit):
        chapter10.main(["nothing"])
    assert "names has nothing; expected some of both" in capsys.readouterr().err
