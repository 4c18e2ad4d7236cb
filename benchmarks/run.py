"""Measure cases on a CPU: their time in rounds with their baseline, their memory at N and 2N."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases import BASELINES, CASES, DIM, HEADS, Case
from benchmarks.report import MODES, SCHEMA
from derived_attention.common.checks import Mechanism
from derived_attention.common.files import write_atomically
from derived_book.training import code_digest
from derived_book.training.measure import count_flops, machine, peak_bytes
from derived_book.training.run_key import PACKAGE

BATCH = 1
MEMORY_LENGTH = 2048  # memory is measured at this N, or at half the longest if shorter, and at 2N
LENGTHS = [1024, 4096]
DIMS = [DIM]
ROUNDS = 9
DTYPES = [torch.float32]

Call = Callable[[], Any]


def inputs(length: int, dtype: torch.dtype, training: bool, dim: int = DIM) -> list[Tensor]:
    """Return q, k, v and the output's gradient (B, H, N, D): standard normal, always the same."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, HEADS, length, dim)
    q, k, v, gradient = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    return [*(x.requires_grad_(training) for x in (q, k, v)), gradient]


def call(form: Mechanism, tensors: Sequence[Tensor], options: Mapping[str, Any]) -> Call:
    """Return the call to time: the forward pass, and the backward pass if q needs a gradient."""
    q, k, v, gradient = tensors
    options = {
        name: x.to(q).requires_grad_(q.requires_grad) if isinstance(x, Tensor) else x
        for name, x in options.items()
    }
    if not q.requires_grad:
        return lambda: form(q, k, v, **options)
    leaves = [q, k, v, *(x for x in options.values() if isinstance(x, Tensor))]
    return lambda: torch.autograd.grad(form(q, k, v, **options), leaves, gradient)


# --- time ----------------------------------------------------------------------------------------


def seconds(fn: Call) -> float:
    """Return the CPU seconds that one call takes in this process; other processes do not count."""
    start = time.process_time()
    fn()
    return time.process_time() - start


def time_rounds(calls: Mapping[str, Call], rounds: int) -> dict[str, np.ndarray]:
    """Return the seconds of every call in each round, in random order, after an untimed round."""
    taken = {name: np.empty(rounds) for name in calls}
    order = np.random.default_rng(0)
    for turn in range(-1, rounds):
        for name in order.permutation(list(calls)):
            elapsed = seconds(calls[name])
            if turn >= 0:
                taken[name][turn] = elapsed
    return taken


def quartiles(values: np.ndarray) -> dict[str, float]:
    """Return median and quartiles by name, for JSON."""
    return dict(zip(("q1", "median", "q3"), np.quantile(values, [0.25, 0.5, 0.75]), strict=True))


def time_cases(
    baseline: str,
    names: Sequence[str],
    length: int,
    dtype: torch.dtype,
    mode: str,
    rounds: int,
    dim: int = DIM,
) -> dict[str, dict[str, Any]]:
    """Time cases and their baseline at one N, D, dtype and mode; return a row for each case.

    Each ratio is taken within a round, so that slow periods of the machine cancel.
    """
    tensors = inputs(length, dtype, mode != MODES[0], dim)
    cases = {baseline: BASELINES[baseline], **{name: CASES[name] for name in names}}
    calls = {
        name: call(case.fast, tensors, case.options(length, dim)) for name, case in cases.items()
    }
    taken = time_rounds(calls, rounds)
    operations = {name: count_flops(fn) for name, fn in calls.items()}
    return {
        name: {
            "length": length,
            "dim": dim,
            "dtype": dtype_name(dtype),
            "mode": mode,
            "seconds": quartiles(taken[name]),
            "baseline_seconds": quartiles(taken[baseline]),
            "ratio": quartiles(taken[name] / taken[baseline]),
            "operations": operations[name] / operations[baseline],
        }
        for name in names
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


# --- memory --------------------------------------------------------------------------------------


def weigh(case: Case, form: str, mode: str, longest: int) -> dict[str, Any]:
    """Return the extra memory of one form of a case at two lengths, in bytes.

    Allocations are counted instead of the resident memory of the process, so the numbers are exact
    and do not vary.
    """
    length = max(1, min(longest // 2, MEMORY_LENGTH))
    if form == "reference":
        length = min(length, case.reference_length)
    lengths, sizes = [length, 2 * length], []
    for n in lengths:
        tensors = inputs(n, DTYPES[0], training=mode != MODES[0])
        fn = call(getattr(case, form), tensors, case.options(n, DIM))
        sizes.append(peak_bytes(fn, device="cpu"))
    return {"form": form, "mode": mode, "lengths": lengths, "bytes": sizes}


def weigh_forms(name: str, case: Case, longest: int) -> list[dict[str, Any]]:
    """Measure the memory of both forms of a case in both modes."""
    progress(f"memory: {name}")
    return [weigh(case, f, mode, longest) for f in ("fast", "reference") for mode in MODES]


# --- the command ---------------------------------------------------------------------------------


def run(
    baseline: str,
    names: Sequence[str],
    lengths: Sequence[int],
    dims: Sequence[int],
    rounds: int,
) -> dict[str, dict[str, Any]]:
    """Measure cases of one baseline; return the contents of the results file of each."""
    times: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for dim, length, dtype, mode in points(dims, lengths):
        where = f"N = {length}, D = {dim}, {dtype_name(dtype)}, {mode}"
        progress(f"time: {', '.join(names)}; {where}")
        rows = time_cases(baseline, names, length, dtype, mode, rounds, dim)
        for name, row in rows.items():
            times[name].append(row)
    beside = weigh_forms(baseline, BASELINES[baseline], max(lengths))
    return {
        name: {
            "schema": SCHEMA,
            **title(CASES[name]),
            "device": "cpu",
            "machine": processor(),
            "commit": commit(),
            "code": code(CASES[name]),
            "settings": settings(CASES[name], lengths, dims),
            "rounds": rounds,
            "times": times[name],
            "memory": weigh_forms(name, CASES[name], max(lengths)),
            "baseline_memory": beside,
        }
        for name in names
    }


def points(
    dims: Sequence[int], lengths: Sequence[int]
) -> Iterator[tuple[int, int, torch.dtype, str]]:
    """Return D, N, dtype and mode of every row of times."""
    return itertools.product(dims, lengths, DTYPES, MODES)


def processor() -> dict[str, Any]:
    """Describe this machine without its GPU."""
    return machine() | {"gpu": None, "driver": None, "triton": version_of("triton")}


def version_of(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def title(case: Case) -> dict[str, Any]:
    """Return the entries of a results file that can change without a new measurement."""
    beside = {"name": case.baseline, "label": BASELINES[case.baseline].label}
    return {"label": case.label, "goal": list(case.goal) if case.goal else None, "baseline": beside}


def settings(case: Case, lengths: Sequence[int], dims: Sequence[int]) -> dict[str, Any]:
    """Return the settings that determine the numbers of a case, for JSON."""
    return {
        "B": BATCH,
        "H": HEADS,
        "D": dims[0] if len(dims) == 1 else list(dims),
        "lengths": list(lengths),
        "dtypes": [dtype_name(dtype) for dtype in DTYPES],
        "options": {name: plain(x) for name, x in case.options(max(lengths), DIM).items()},
    }


def plain(x: Any) -> Any:
    """Return an option for JSON: the shape of a tensor, the name of a function."""
    if isinstance(x, Tensor):
        return list(x.shape)
    if isinstance(x, (list, tuple)):
        return [plain(y) for y in x]
    return x.__name__ if callable(x) else x


def code(case: Case) -> str:
    """Return a SHA-256 of the code of a case's fast form, without docstrings, comments and layout.

    It covers the module of the form and all modules of the package that this one imports, directly
    or indirectly. It excludes the registry, which names every mechanism and whose options are
    settings, PyTorch, the benchmark, and the formula, whose module imports every mechanism.
    """
    pending, seen = PACKAGE.modules(inspect.unwrap(case.fast).__module__), set[str]()
    while pending:
        module = pending.pop()
        seen.add(module)
        more = (
            PACKAGE.find_imports(PACKAGE.texts[module])
            if module not in code_digest.ROOTS
            else set()
        )
        pending |= more - seen - {code_digest.REGISTRY}
    texts = [(module, code_digest.code(PACKAGE.texts[module])) for module in sorted(seen)]
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def why_outdated(path: Path, wanted: Mapping[str, Any], code: str | None = None) -> str:
    """Return why a case has to be measured, or "" if its results are up to date.

    Results are outdated if their schema is old, if their settings are not `wanted`, or if `code` is
    given and the file names another code or none.
    """
    if not path.exists():
        return "there are no results yet"
    data = json.loads(path.read_text("utf8"))
    if data.get("schema") != SCHEMA:
        return f"the results have schema {data.get('schema')} instead of {SCHEMA}"
    if data["settings"] != wanted:
        return "the results are for other settings"
    if code is None or data.get("code") == code:
        return ""
    return "the code has changed" if data.get("code") else "the file does not name the code"


def must_measure(path: Path, wanted: Mapping[str, Any], code: str) -> bool:
    """Return whether a case has to be measured; print the reason on standard error."""
    if reason := why_outdated(path, wanted, code):
        progress(f"to measure: {path.parent.name}/{path.stem}, because {reason}")
    return bool(reason)


def rename(folder: Path) -> None:
    """Update labels, goals and baselines in the results of all machines from the registry."""
    for path in folder.glob("*/*.json"):
        data = json.loads(path.read_text("utf8"))
        if path.stem in CASES and data != (new := data | title(CASES[path.stem])):
            save(path, new)


def save(path: Path, data: Mapping[str, Any]) -> None:
    """Write results as JSON, in one atomic step."""
    write_atomically(path, (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode())


@functools.cache
def commit() -> str | None:
    """Return the commit that is checked out, marked if files differ from it; None without git.

    It is looked up only once, because the run itself writes files.
    """
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "describe", "--always", "--dirty", "--exclude=*"]
    folder = Path(__file__).parent
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def progress(message: str) -> None:
    """Print a message on standard error."""
    print(message, file=sys.stderr, flush=True)
