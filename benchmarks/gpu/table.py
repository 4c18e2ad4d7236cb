"""Measure every mechanism on this machine's GPU, and what a user could use instead of it.

``python -m benchmarks.gpu.table --minutes 6`` writes one file, which the page *Speed* shows.

- Sizes: B·H·N = 2¹⁸, with 16 heads up to N = 16,384 and 4 at 65,536; bfloat16.
- A cell is a mechanism, causal or not, at one N and D. Its calls take turns, so that both times of
  a ratio come from the same second. Before each call 128 MiB are written, which empties the L2
  cache, as the rest of a model does. A time is the median over the turns: at least two, at most 20,
  and none that starts after 0.2 s, except the second.
- Before the turns, a first run of each call compiles and tunes, and a second counts the memory.
- Before all measurements, parallel processes compile what the cells need, so that the measuring
  process finds it on the disk.
- The most important cells come first, and fla-core, which tunes itself for minutes, after our form.
  Every cell is stored when it is done, so the same command resumes; a cell in which the process
  ended is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import run
from benchmarks.gpu import besides
from benchmarks.gpu.besides import DOUBLE, FLA, FLEX, SDPA, UNFUSED, Calls
from benchmarks.report import MODES, RESULTS, gpu_table, slug
from derived_attention.common.kernel_selftest import usable
from derived_attention.registry import MECHANISMS, Entry
from derived_book.experiment_tables import markdown
from derived_book.training import code_digest
from derived_book.training.measure import machine
from derived_book.training.run_key import PACKAGE

OURS = "ours"
UNFINISHED = 3  # exit status if the command has to be repeated
LONGEST_CALL = 400.0  # ms; a slower mechanism is not measured at larger N or D
LONGEST_CELL = 90.0  # s, including the compilation and tuning of its first calls
PATTERNS = {"softmax": "plain", "window": "window", "mgk": "bias", "smgk": "bias"}
TUNED = ("ridge", "delta", "gated_delta")  # may run fla-core's kernels, so they come last

Cells = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure, and the number of turns."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    total: int = 2**18  # B·H·N
    heads: int = 16
    lengths: tuple[int, ...] = (4096, 16384, 1024, 65536)  # in order of importance
    first: int = 2  # the number of lengths that come first, at the first of `dims`
    dims: tuple[int, ...] = (64, 128)
    turns: int = 20
    seconds: float = 0.2

    def shape(self, N: int, D: int) -> tuple[int, int, int, int]:
        """Return the shape of q, k and v."""
        H = max(1, min(self.heads, self.total // N))
        return max(1, self.total // (N * H)), H, N, D

    def tiers(self) -> list[tuple[int, int]]:
        """Return N and D of all cells, the most important first."""
        return [(N, D) for D in self.dims for N in self.lengths]

    def important(self, N: int, D: int) -> bool:
        """Return whether cells of this size come first."""
        return (N, D) in self.tiers()[: self.first]


REHEARSAL = Sizes("cpu", torch.float32, 256, 4, (64, 128, 32), 1, (8,), 2, 0.0)


@dataclass(frozen=True, eq=False)
class Case:
    """A mechanism, causal or not."""

    name: str
    entry: Entry
    is_causal: bool

    def key(self, N: int, D: int) -> str:
        """Return the name of a cell."""
        return f"{self.name}{', causal' * self.is_causal}, N = {N}, D = {D}"


def gates(N: int, H: int, D: int) -> dict[str, Any]:
    """Return log α of each head and token, from -0.1 to 0."""
    return {"decay": -0.1 * torch.rand(H, N, generator=torch.Generator().manual_seed(0))}


def cases() -> list[Case]:
    """Return all mechanisms, without a mask and causal, and the gated delta rule."""
    delta = MECHANISMS["delta"]
    gated = replace(delta, label="Gated delta rule", options=gates, goals={})
    return [
        Case(name, entry, is_causal)
        for name, entry in (MECHANISMS | {"gated_delta": gated}).items()
        for is_causal in ((False, True) if entry.causal else (False,))
    ]


def calls_of(case: Case, N: int, D: int, sizes: Sizes, fla: bool) -> dict[str, Calls]:
    """Return the calls of a cell by name; ours comes first."""
    H = sizes.shape(N, D)[1]
    draw = torch.Generator(sizes.device).manual_seed(0)
    made = [
        torch.randn(sizes.shape(N, D), generator=draw, device=sizes.device).to(sizes.dtype)
        for _ in range(4)
    ]
    plain = [x.requires_grad_(i < 3) for i, x in enumerate(made)]
    q, k, v, gradient = plain

    def with_keys(entry: Entry) -> list[Tensor]:
        return [q, besides.leaf(entry.keys(k)), v, gradient]

    fast, ours = case.entry.fast, with_keys(case.entry)
    options = case.entry.options(N, H, D) | ({"is_causal": True} if case.is_causal else {})
    calls = {OURS: besides.call(fast, ours, options), SDPA: besides.sdpa(plain, case.is_causal)}
    if case.entry.heads == 2:
        calls[DOUBLE] = besides.sdpa(plain, case.is_causal, 2)
    if "fused" in inspect.signature(fast).parameters and sizes.important(N, D):
        calls[UNFUSED] = besides.call(fast, ours, options | {"fused": False})
    if (pattern := PATTERNS.get(case.name)) and sizes.important(N, D):
        given = with_keys(MECHANISMS["mgk"]) if pattern == "bias" else plain
        calls[FLEX] = besides.flex(pattern, given, case.is_causal, options)
    if fla:
        calls[FLA] = besides.fla(case.name, plain, options)
    return calls


# --- one cell -------------------------------------------------------------------------------------


class OutOfTimeError(BaseException):  # which no `except Exception` catches
    """A cell takes too long."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in a block after some seconds, as soon as it returns to Python."""

    def stop(*_: Any) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def reason(error: BaseException) -> str:
    """Return one line on why something was not measured."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, OutOfTimeError):
        return "out of time"
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


def free(sizes: Sizes) -> None:
    """Release the GPU memory that PyTorch caches."""
    if sizes.device == "cuda":
        torch.cuda.empty_cache()


def weigh(call: Callable[[], Any], device: str) -> float | None:
    """Return the peak of a call's extra memory in MiB, after a first call; None on a CPU."""
    call()
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def take_turns(calls: Mapping[str, Callable[[], Any]], sizes: Sizes) -> dict[str, list[float]]:
    """Return the milliseconds of every call in each turn, on a GPU between two events."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    cuda, names = sizes.device == "cuda", list(calls)
    other = torch.empty(2**27, dtype=torch.uint8, device=sizes.device) if cuda else None
    end = time.monotonic() + sizes.seconds
    for turn in range(sizes.turns):
        marks = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if other is None:
                start = time.perf_counter()
                calls[name]()
                taken[name].append(1000 * (time.perf_counter() - start))
            else:
                other.zero_()
                marks[name] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                marks[name][0].record()
                calls[name]()
                marks[name][1].record()
        if other is not None:
            torch.cuda.synchronize()
        for name, (begin, stop) in marks.items():
            taken[name].append(begin.elapsed_time(stop))
        if turn and time.monotonic() > end:
            break
    return taken


def measure(calls: dict[str, Calls], mode: str, sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Measure calls in turns; return the time and memory of each, or why it was skipped."""
    found: dict[str, dict[str, Any]] = {}
    ready = {}
    for name, modes in calls.items():
        why = ""
        try:
            found[name] = {"MiB": weigh(modes[mode], sizes.device)}
            ready[name] = modes[mode]
        except Exception as error:
            why = reason(error)
        if why:  # only here, where no frame of the error holds tensors
            found[name] = {"skipped": why}
            free(sizes)
        if why and name == OURS:
            return found
    for name, times in take_turns(ready, sizes).items():
        found[name] |= {"ms": statistics.median(times), "turns": len(times)}
    return found


ENGINES = {  # patterns that the names of their kernels contain
    "SDPA": "flash_|fmha|cudnn.*sdpa",
    "FlexAttention": "flex|triton_tem",
    "fla-core": "chunk_|recompute_w_u|solve_tril",
}


def engine(call: Callable[[], Any]) -> dict[str, Any]:
    """Return engine, name and time share of a call's longest kernel, and the number of launches."""
    from torch.profiler import ProfilerActivity, profile

    with torch.no_grad(), profile(activities=[ProfilerActivity.CUDA]) as log:
        call()
        torch.cuda.synchronize()
    kernels = [x for x in log.key_averages() if x.self_device_time_total]
    if not kernels:
        return {}
    longest = max(kernels, key=lambda x: x.self_device_time_total)
    own = (name for name, words in ENGINES.items() if re.search(words, longest.key))
    return {
        "engine": next(own, "PyTorch or our own"),
        "kernel": longest.key[:80],
        "share": longest.self_device_time_total / sum(x.self_device_time_total for x in kernels),
        "launches": sum(x.count for x in kernels),
    }


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A cell to measure; with fla-core, ours and SDPA are measured again."""

    case: Case
    N: int
    D: int
    fla: bool = False


def jobs(sizes: Sizes) -> list[Job]:
    """Return all cells in the order of their importance."""
    ordered = sorted(cases(), key=lambda case: case.name in TUNED)
    tuned = [case for case in ordered if case.is_causal and case.name in besides.FLA_FORMS]
    tiers, found = sizes.tiers(), []
    for part in (tiers[: sizes.first], tiers[sizes.first :]):
        for last in (False, True):
            found += [Job(c, N, D) for N, D in part for c in ordered if (c.name in TUNED) == last]
        found += [Job(c, N, D, fla=True) for N, D in part for c in tuned]
    return found


def code() -> str:
    """Return a digest of the library's code, without comments and docstrings."""
    texts = [
        (name, code_digest.code(text))
        for name, text in sorted(PACKAGE.texts.items())
        if name.startswith("derived_attention")
    ]
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


class Table:
    """The measurements so far, in a file that is complete at any time."""

    def __init__(self, file: Path, sizes: Sizes, again: bool = False) -> None:
        here = machine()
        own: dict[str, Any] = {
            "machine": {name: x for name, x in here.items() if name != "date"},
            "versions": {name: run.version_of(name) for name in ("torch", "triton", "fla-core")}
            | {"CUDA": torch.version.cuda},
            "code": code(),
            "rule": f"B·H·N = {sizes.total}, at most {sizes.heads} heads",
            "dtype": str(sizes.dtype).removeprefix("torch."),
        }
        self.file, self.sizes = file, sizes
        self.data: dict[str, Any] = own | {
            "commit": run.commit(),
            "date": here["date"],
            "lengths": sorted(sizes.lengths),
            "dims": list(sizes.dims),
            "seconds": {},
            "done": [],
            "cells": {},
        }
        if file.exists() and not again:
            known = json.loads(file.read_text("utf8"))
            if own.items() <= known.items():
                self.data = known

    def save(self) -> None:
        """Write the measurements and verdicts in one atomic step."""
        self.data["goals"] = verdicts(self.data)
        run.save(self.file, self.data)

    def spend(self, what: str, seconds: float) -> None:
        """Add to the recorded seconds of an activity."""
        self.data["seconds"][what] = round(self.data["seconds"].get(what, 0) + seconds, 1)

    def left(self) -> list[Job]:
        """Return the jobs that are not done; a job in which a process ended counts as done."""
        done = set(self.data["done"])
        return [job for job in jobs(self.sizes) if name_of(job) not in done]

    def too_long(self, job: Job, mode: str) -> str:
        """Return why a cell is left out, as a smaller one took too much time or memory, or ""."""
        for cell in self.data["cells"].values():
            smaller = (cell["N"], cell["D"]) != (job.N, job.D) and (
                cell["N"] <= job.N and cell["D"] <= job.D
            )
            mine = (cell["mechanism"], cell["causal"]) == (job.case.name, job.case.is_causal)
            found = cell["times"].get(OURS, {}).get(mode, {}) if mine and smaller else {}
            at = f"at N = {cell['N']}, D = {cell['D']}"
            if found.get("ms", 0) > LONGEST_CALL:
                return f"{found['ms']:.0f} ms {at}"
            if found.get("skipped") in ("out of memory", "out of time"):
                return f"{found['skipped']} {at}"
        return ""

    def add(self, job: Job, seconds: float) -> None:
        """Mark a cell as begun, save, and measure it; the next save stores what was measured."""
        case, key = job.case, job.case.key(job.N, job.D)
        B, H, *_ = self.sizes.shape(job.N, job.D)
        cell = {
            "mechanism": case.name,
            "label": ", ".join(filter(None, [case.entry.label, "causal" * case.is_causal])),
            "causal": case.is_causal,
            **{"N": job.N, "D": job.D, "B": B, "H": H},
            "beside": DOUBLE if case.entry.heads == 2 else SDPA,
            "times": {},
        }
        before = self.data["cells"].get(key)
        self.data["done"].append(name_of(job))
        if before is None:
            left_out = {mode: {"skipped": "the process ended here"} for mode in MODES}
            self.data["cells"][key] = cell | {"times": {OURS: left_out}}
        self.save()
        times = self.times(job, cell, seconds)
        if seconds < LONGEST_CELL and "'out of time'" in repr(times):  # a later call has more
            self.data["done"].pop()
            if before is None:
                del self.data["cells"][key]
        elif before and not all("ms" in times[OURS].get(mode, {}) for mode in MODES):
            before["times"][FLA] = times.get(FLA, {})
        else:
            self.data["cells"][key] = (before or {}) | cell | {"times": times}

    def times(self, job: Job, cell: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return times and memory of a cell by call and mode; add the engine to `cell`."""
        times: dict[str, Any] = {OURS: {}}
        for mode in MODES:
            if why := self.too_long(job, mode):
                times[OURS][mode] = {"skipped": why}
        try:
            with time_limit(seconds):
                calls = calls_of(job.case, job.N, job.D, self.sizes, job.fla)
                for mode in (mode for mode in MODES if mode not in times[OURS]):
                    for name, found in measure(calls, mode, self.sizes).items():
                        times.setdefault(name, {})[mode] = found
                if self.sizes.device == "cuda" and (job.N, job.D) == self.sizes.tiers()[0]:
                    cell |= engine(calls[OURS][MODES[0]])
        except (Exception, OutOfTimeError) as error:
            for name, mode in itertools.product((OURS, FLA)[: 1 + job.fla], MODES):
                times.setdefault(name, {}).setdefault(mode, {"skipped": reason(error)})
        return times


def name_of(job: Job) -> str:
    """Return the name of a job."""
    return job.case.key(job.N, job.D) + ", with fla-core" * job.fla


# --- goals ----------------------------------------------------------------------------------------

CHEAPER = {"sh", "mrs", "mra", "window", "strided", "fixed", "selected", "linformer", "performer"}
CHEAPER |= {"fmm", "luna", "primal", *(name for name, x in MECHANISMS.items() if x.linear)}
GOALS: list[tuple[str, str, str, float]] = [  # mechanism, kind, alternative, largest ratio
    ("delta", "causal", FLA, 1.1),
    ("gated_delta", "causal", FLA, 1.1),
    ("ridge", "causal", SDPA, 3),
    ("selected", "causal", SDPA, 0.5),
    *((name, kind, SDPA, 0.6) for name in ("strided", "fixed") for kind in ("full", "causal")),
    *(("window", kind, FLEX, 1.1) for kind in ("full", "causal")),
    *((name, "causal", SDPA, 1.3) for name in ("bn", "bn_full")),
    *(("sink", kind, SDPA, 1.1) for kind in ("full", "causal")),
    *((name, kind, DOUBLE, 1.15) for name in ("mgk", "smgk") for kind in ("full", "causal")),
    ("lasso", "full", SDPA, 12),
    ("lasso", "causal", SDPA, 30),
]


def all_goals(lengths: Sequence[int], dim: int) -> Iterator[tuple[str, str, int, int, str, float]]:
    """Yield mechanism, kind, N, D, alternative and largest ratio of every goal."""
    middle = lengths[-2]
    for name, kind, beside, most in GOALS:
        yield name, kind, middle, dim, beside, most
    known = {(name, kind) for name, kind, beside, _ in GOALS if beside == SDPA}
    for case in cases():
        kind = "causal" if case.is_causal else "full"
        for N in lengths[-2:]:
            if case.name in CHEAPER and not (N == middle and (case.name, kind) in known):
                yield case.name, kind, N, dim, SDPA, 1.0


def verdicts(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each goal the ratios in both modes, and whether both of them meet it."""
    by_size = {
        (x["mechanism"], "causal" if x["causal"] else "full", x["N"], x["D"]): x["times"]
        for x in data["cells"].values()
    }
    found = []
    for name, kind, N, D, beside, most in all_goals(data["lengths"], min(data["dims"])):
        times = by_size.get((name, kind, N, D), {})
        pairs = [
            [times.get(x, {}).get(mode, {}).get("ms") for x in (OURS, beside)] for mode in MODES
        ]
        ratios = [ours / other if ours and other else None for ours, other in pairs]
        worst = max((x for x in ratios if x), default=math.nan)
        verdict = "met" if worst <= most else f"missed by {100 * (worst / most - 1):.0f} %"
        found.append(
            {"mechanism": name, "kind": kind, "N": N, "D": D, "beside": beside, "goal": most}
            | dict(zip(MODES, ratios, strict=True))
            | {"verdict": "not measured" if None in ratios else verdict}
        )
    return found


def goals_table(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return a table of the goals and their verdicts."""
    head = ["mechanism", "N", "compared with", "goal", *MODES, "verdict"]
    rows = [
        [f"{x['mechanism']}, {x['kind']}", str(x["N"]), x["beside"], f"{x['goal']:g}"]
        + [f"{x[mode]:.2f}" if x[mode] else "–" for mode in MODES]
        + [x["verdict"]]
        for x in data["goals"]
    ]
    return head, rows


# --- the command ----------------------------------------------------------------------------------


def prepare(part: str, sizes: Sizes) -> None:
    """Run the cells of one part, such as ``"2/8"``, so that their compiled code is on the disk.

    A mechanism that compiles nothing at one N is skipped at all further N with the same D.
    """
    from torch._dynamo.utils import counters

    index, count = map(int, part.split("/"))
    own = cases()[index::count]
    compiles: dict[tuple[Case, int], bool] = {}
    for (N, D), case in itertools.product(sizes.tiers(), own):
        before = counters["stats"]["unique_graphs"]
        if compiles.get((case, D)) is False:
            continue
        try:
            calls = calls_of(case, N, D, sizes, False)
            for name, mode in itertools.product((OURS, FLEX), MODES):
                if name in calls:
                    calls[name][mode]()
        except Exception as error:  # the measurement names it again
            print(f"{case.key(N, D)}: {reason(error)}", file=sys.stderr, flush=True)
        compiles[case, D] = counters["stats"]["unique_graphs"] > before


def prepare_all(processes: int, seconds: float, rehearse: bool) -> None:
    """Run `prepare` in parallel processes, and end them after some seconds."""
    command = [sys.executable, "-m", "benchmarks.gpu.table", *["--rehearse"] * rehearse]
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen([*command, "--prepare", f"{i}/{processes}"], env=environment)
        for i in range(processes)
    ]
    end = time.monotonic() + seconds
    for child in children:
        try:
            child.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def fill(table: Table, end: float) -> int:
    """Measure the remaining cells until the time ends; return 0, or 3 if some may be left."""
    for job in table.left():
        start = time.monotonic()
        if start > end:
            return UNFINISHED
        print(name_of(job), file=sys.stderr, end="", flush=True)
        table.add(job, min(LONGEST_CELL, end - start + 10))
        taken = time.monotonic() - start
        print(f": {taken:.1f} s", file=sys.stderr, flush=True)
        table.spend(f"{FLA}, {job.case.name}" if job.fla else "cells", taken)
        free(table.sizes)
        if table.sizes.device == "cuda" and not usable(torch.device("cuda")):
            return UNFINISHED
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the remaining cells; return 3 if the command must be repeated, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.table", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=6.0, help="default %(default)s")
    parser.add_argument("--again", action="store_true", help="measure everything again")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, without a GPU")
    parser.add_argument("--prepare", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not (torch.cuda.is_available() or options.rehearse):
        print("No GPU was found. --rehearse measures tiny sizes on the CPU.")
        return 2
    sizes = REHEARSAL if options.rehearse else Sizes()
    start = time.monotonic()
    if options.prepare:
        prepare(options.prepare, sizes)
        return 0
    name = "gpu-rehearsal" if options.rehearse else f"gpu-table-{slug(machine())}"
    table = Table(options.output / f"{name}.json", sizes, options.again)
    if "prepare" not in table.data["seconds"] and table.left():
        processes = 1 if options.rehearse else max(1, (os.cpu_count() or 2) // 2)
        prepare_all(processes, 60 * options.minutes / 4, options.rehearse)
        table.spend("prepare", time.monotonic() - start)
    status = fill(table, start + 60 * options.minutes)
    table.save()
    head, rows = gpu_table(table.data)
    print(markdown((head, rows)) + "\n")
    print(markdown(goals_table(table.data)) + "\n")
    left = len(table.left())
    print(f"{left} cells are left. Run this command again." if left else "All cells are done.")
    print(table.file)
    return status


if __name__ == "__main__":
    sys.exit(main())
