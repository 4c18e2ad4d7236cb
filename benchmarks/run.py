"""Measure every case: time in rounds with its baseline, and extra memory as N doubles."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases import CASES, GOAL_LENGTH, HEADS, Attention
from benchmarks.table import (
    MODES,
    NOTE,
    RESULTS,
    SCHEMA,
    caption,
    markdown,
    memory_table,
    time_table,
)
from derived_attention.measure import count_flops, machine, peak_bytes
from derived_attention.runtime import write_atomically

BATCH, DIM = 1, 64
MEMORY_LENGTH = 2048  # memory is measured here, or at half the longest N, and at twice that
LENGTHS = {"cpu": [1024, 4096], "cuda": [1024, 4096, 16384]}
ROUNDS = {"cpu": 9, "cuda": 50}
DTYPES = {"cpu": [torch.float32], "cuda": [torch.float32, torch.bfloat16]}

Call = Callable[[], Any]


def inputs(length: int, dtype: torch.dtype, device: str, training: bool) -> list[Tensor]:
    """Return q, k, v and the gradient of the output: standard normal, the same at every call."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (BATCH, HEADS, length, DIM)
    made = [torch.randn(shape, generator=generator, device=device) for _ in range(4)]
    q, k, v, gradient = (x.to(dtype) for x in made)
    return [*(x.requires_grad_(training) for x in (q, k, v)), gradient]


def call(form: Attention, tensors: Sequence[Tensor], options: Mapping[str, Any]) -> Call:
    """Return what is timed: the forward pass, and the backward one where q asks for gradients."""
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


def seconds(fn: Call, device: str) -> float:
    """Time one call: the processor's time of this process, or the GPU's between two events."""
    if device == "cpu":
        start = time.process_time()  # other processes' time on a busy machine does not count
        fn()
        return time.process_time() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def time_rounds(calls: Mapping[str, Call], rounds: int, device: str) -> dict[str, np.ndarray]:
    """Time all calls once a round, each round in another order; a first round does not count."""
    taken = {name: np.empty(rounds) for name in calls}
    order = np.random.default_rng(0)
    for turn in range(-1, rounds):
        for name in order.permutation(list(calls)):
            elapsed = seconds(calls[name], device)
            if turn >= 0:
                taken[name][turn] = elapsed
    return taken


def quartiles(values: np.ndarray) -> dict[str, float]:
    """Median and quartiles, as JSON has them."""
    return dict(zip(("q1", "median", "q3"), np.quantile(values, [0.25, 0.5, 0.75]), strict=True))


def time_cases(
    names: Sequence[str], length: int, dtype: torch.dtype, mode: str, rounds: int, device: str
) -> list[dict[str, Any]]:
    """Time cases of one length, dtype and mode, each with its baseline: a row of results for each.

    A ratio is taken within each round, so that a slow minute of the machine cancels.
    """
    tensors = inputs(length, dtype, device, training=mode != MODES[0])
    rows = []
    for baseline in dict.fromkeys(CASES[name].baseline for name in names):
        group = [name for name in names if CASES[name].baseline == baseline]
        calls = {n: call(CASES[n].fast, tensors, CASES[n].options(length)) for n in group}
        taken = time_rounds(calls, rounds, device)
        operations = {name: count_flops(fn) for name, fn in calls.items()}
        for name in group:
            row = {"case": name, "length": length, "dtype": dtype_name(dtype), "mode": mode}
            row["seconds"] = quartiles(taken[name])
            row["ratio"] = quartiles(taken[name] / taken[baseline])
            row["operations"] = operations[name] / operations[baseline]
            rows.append(row | {"met": goal_met(row, device)})
    return rows


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without its library's."""
    return str(dtype).removeprefix("torch.")


def goal_met(row: Mapping[str, Any], device: str) -> bool | None:
    """Say whether a row reaches its case's goal; None where it has none."""
    goal = CASES[row["case"]].goal
    meant = {"length": GOAL_LENGTH, "dtype": "float32", "mode": MODES[0]}
    if goal is None or device != "cpu" or not meant.items() <= row.items():
        return None
    return bool(row["ratio"]["median"] <= goal)


# --- memory --------------------------------------------------------------------------------------


def weigh(name: str, form: str, mode: str, longest: int, device: str) -> dict[str, Any]:
    """Measure the extra memory of one form of a case at two lengths.

    Allocations are counted, not the resident memory of the process: the numbers are exact, and the
    same every time.
    """
    case, length = CASES[name], max(1, min(longest // 2, MEMORY_LENGTH))
    if form == "reference":
        length = min(length, case.reference_length)
    lengths, sizes = [length, 2 * length], []
    for n in lengths:
        tensors = inputs(n, torch.float32, device, training=mode != MODES[0])
        fn = call(getattr(case, form), tensors, case.options(n))
        sizes.append(peak_bytes(fn, device=device))
    return {"case": name, "form": form, "mode": mode, "lengths": lengths, "bytes": sizes}


# --- the command ---------------------------------------------------------------------------------


def run(names: Sequence[str], lengths: Sequence[int], rounds: int, device: str) -> dict[str, Any]:
    """Measure `names` at `lengths`, and return what the results file holds."""
    if device == "cpu":
        torch.set_num_threads(1)
    times, memory = [], []
    for length in lengths:
        for dtype in DTYPES[device]:
            for mode in MODES:
                progress(f"time: N = {length}, {dtype_name(dtype)}, {mode}")
                times += time_cases(names, length, dtype, mode, rounds, device)
    for name in names:
        progress(f"memory: {name}")
        for form in ("fast", "reference"):
            memory += [weigh(name, form, mode, max(lengths), device) for mode in MODES]
    settings = {"B": BATCH, "H": HEADS, "D": DIM, "lengths": list(lengths), "rounds": rounds}
    settings["dtypes"] = [dtype_name(dtype) for dtype in DTYPES[device]]
    kept = ("label", "baseline", "goal")
    return {
        "schema": SCHEMA,
        "device": device,
        "machine": machine(),
        "commit": commit(),
        "settings": settings,
        "cases": {name: {key: getattr(CASES[name], key) for key in kept} for name in names},
        "times": times,
        "memory": memory,
    }


def commit() -> str | None:
    """Name the commit that is checked out, with a mark where files differ from it."""
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "describe", "--always", "--dirty", "--exclude=*"]
    folder = Path(__file__).parent
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def progress(message: str) -> None:
    """Say on standard error what is being measured."""
    print(message, file=sys.stderr, flush=True)


def whole(text: str) -> int:
    """Read a whole number above 0 from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def parse(arguments: Sequence[str] | None, device: str) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time and weigh every mechanism beside PyTorch's attention, on CUDA where "
        "there is one (hide it with CUDA_VISIBLE_DEVICES=), else on one thread of the CPU.",
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        metavar="NAME",
        help=f"of {', '.join(CASES)}; default all. What they are beside comes with them",
    )
    parser.add_argument(
        "--lengths", nargs="+", type=whole, metavar="N", help=f"default {LENGTHS[device]}"
    )
    parser.add_argument("--rounds", type=whole, default=ROUNDS[device], help="default %(default)s")
    parser.add_argument(
        "--output",
        type=Path,
        help="where to write the results as JSON; default for all cases and lengths is the file "
        "of benchmarks/results that the book shows, and for a part of them none",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results, and print their tables."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = parse(arguments, device)
    output = options.output
    if output is None and options.cases is None and options.lengths is None:
        output = RESULTS / f"attention_{device}.json"
    chosen = set(options.cases or CASES)
    chosen |= {CASES[name].baseline for name in chosen}
    names = [name for name in CASES if name in chosen]
    lengths = sorted(set(options.lengths or LENGTHS[device]))
    data = run(names, lengths, options.rounds, device)
    if output is not None:
        write_atomically(output, (json.dumps(data, indent=1) + "\n").encode())
    print(f"{caption(data)}.\n{NOTE}\n")
    for length in lengths:
        print(markdown(time_table([data], length=length)) + "\n")
    print("Extra memory at its peak, and its growth from half that length:\n")
    print(markdown(memory_table(data)))
    return 0
