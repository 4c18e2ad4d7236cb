"""Say what each chapter would take in a profile, without running it: ``python _ext/plan.py full``.

Every page is executed with a sample of its training: a few steps of each configuration are taken
and timed (processor time), the others counted. So the answer is this machine's, for a thread, from
its own steps. For a GPU it is computed: what PyTorch launches and computes, at two rates.
Sets of series that only a network has are replaced by noise of the same size. The results lie in
benchmarks/results/plan.json; the status page shows them, beside what was really measured.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import nbformat
import torch
from nbclient import NotebookClient
from torch.utils._python_dispatch import TorchDispatchMode

from derived_attention.common.files import write_atomically
from derived_book.runtime import PROFILES, evaluating
from derived_book.tasks.series import data as series
from derived_book.training import fit as training
from derived_book.training import grids as experiments
from derived_book.training import measure
from execute import read_page

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "plan.json"
SECONDS_PER_LAUNCH = 10e-6  # what PyTorch needs to start one operation on a GPU, in eager mode
FLOPS_PER_SECOND = 4e12  # float32, half of what a T4 can do: the GPU that runtimes lend for nothing
SAMPLE, PATIENCE = 3, 0.5  # steps, or batches of an evaluation, that are timed; seconds at most
TOKENS = 8192  # of a batch, that a sample has at most; time and work grow with the rows

# Training series, test series, length, channels, classes (0: a number), as the archives state them.
SIZES = {
    "AppliancesEnergy": (96, 42, 144, 24, 0),
    "ArticularyWordRecognition": (275, 300, 144, 9, 25),
    "AtrialFibrillation": (15, 15, 640, 2, 3),
    "BeijingPM10Quality": (12432, 5100, 24, 9, 0),
    "BeijingPM25Quality": (12432, 5100, 24, 9, 0),
    "BenzeneConcentration": (3433, 5445, 240, 8, 0),
    "Cricket": (108, 72, 1197, 6, 12),
    "DuckDuckGeese": (50, 50, 270, 1345, 5),
    "ERing": (30, 270, 65, 4, 6),
    "Epilepsy": (137, 138, 207, 3, 4),
    "EthanolConcentration": (261, 263, 1751, 3, 4),
    "FaceDetection": (5890, 3524, 62, 144, 2),
    "FingerMovements": (316, 100, 50, 28, 2),
    "HandMovementDirection": (160, 74, 400, 10, 4),
    "Handwriting": (150, 850, 152, 3, 26),
    "Heartbeat": (204, 205, 405, 61, 2),
    "IEEEPPG": (1768, 1328, 1000, 5, 0),
    "LSST": (2459, 2466, 36, 6, 14),
    "Libras": (180, 180, 45, 2, 15),
    "LiveFuelMoistureContent": (3493, 1510, 365, 7, 0),
    "MotorImagery": (278, 100, 3000, 64, 2),
    "NATOPS": (180, 180, 51, 24, 6),
    "PEMS-SF": (267, 173, 144, 963, 7),
    "RacketSports": (151, 152, 30, 6, 4),
    "SelfRegulationSCP1": (268, 293, 896, 6, 2),
    "SelfRegulationSCP2": (200, 180, 1152, 7, 2),
    "SpokenArabicDigits": (6599, 2199, 93, 13, 10),
    "StandWalkJump": (12, 15, 2500, 4, 3),
    "UWaveGestureLibrary": (120, 320, 315, 3, 8),
}


# --- in the page's kernel ------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Counts the operations that a GPU would be given: all but views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        """Count, and go on."""
        self.count += not (function.is_view or "detach" in function.name())
        return function(*arguments, **(keywords or {}))


def thin(batch: tuple) -> tuple[tuple, float]:
    """Return the first rows of a batch of long sequences, and how many times more it had."""
    size, length = batch[0].shape[:2]
    rows = min(size, max(1, TOKENS // length))
    return tuple(None if part is None else part[:rows] for part in batch), size / rows


class Sampler:
    """Takes the place of training in a page; `plan` is what the whole would take."""

    def __init__(self):
        self.plan, self.spent, self.start = Counter(), 0.0, time.process_time()
        self.known: dict = {}
        self.epoch, self.judge = training.train_epoch, training.evaluate
        self.load, self.time = series.load_series, measure.compare

    def install(self) -> None:
        """Replace what pages and `fit` call."""
        training.train_epoch, training.evaluate = self.train_epoch, self.evaluate
        experiments.run_grid, series.load_series = self.run_grid, self.load_series
        measure.compare = self.compare

    def sampled(self, key, counter: str, steps, do, items) -> dict:
        """Return what `do` says of a few items; plan as if it were done with all `steps`."""
        begin = time.process_time()
        if key not in self.known:
            (first, scale), *others = map(thin, itertools.islice(items, 1 + SAMPLE))
            kept: list[dict] = []
            with Launches() as launches:
                flops = measure.count_flops(lambda: kept.append(do([first])))
            each = time.process_time() - begin  # too much, for the counting; a sample replaces it
            if each < PATIENCE:
                before = time.process_time()
                for done, (item, _) in enumerate(others or [(first, scale)], start=1):
                    do([item])
                    each = (time.process_time() - before) / done
                    if each * done > PATIENCE:
                        break
            gpu = SECONDS_PER_LAUNCH * launches.count + scale * flops / FLOPS_PER_SECOND
            self.known[key] = kept[0], scale * each, gpu, steps()
        numbers, each, gpu, n = self.known[key]
        self.plan.update({counter: n, "cpu": n * each, "gpu": n * gpu})
        self.spent += time.process_time() - begin
        return dict(numbers)

    def train_epoch(self, trainer, batches, rates, where):
        """Stand for `derived_book.training.fit.train_epoch`."""
        rates = list(rates)

        def do(some):
            return self.epoch(trainer, some, rates[: len(some)], where)

        return self.sampled((id(trainer.model), "train"), "steps", lambda: len(rates), do, batches)

    def evaluate(self, model, batches, loss):
        """Stand for `derived_book.training.fit.evaluate`."""
        device = next(model.parameters()).device

        def do(some):
            with evaluating(model):
                found = [loss(model, batch)[1] for batch in training.on(device, some)]
            return {name: mean.value for name, mean in found[0].items()}

        key = (id(model), id(batches), "test")
        return self.sampled(key, "batches", lambda: sum(1 for _ in batches), do, iter(batches))

    def run_grid(self, function, grid, store=None, *, workers=1, watch=None):
        """Stand for `run_grid`: one run of each configuration, whatever its seed."""
        results, seen = [], {}
        for config in map(dict, grid):
            key = json.dumps({k: v for k, v in config.items() if k not in ("seed", "draw")})
            if key not in seen:
                before, spent, begin = Counter(self.plan), self.spent, time.process_time()
                result = function(**config)
                own = time.process_time() - begin - (self.spent - spent)  # not in any epoch
                self.spent += own
                self.plan.update({"cpu": own, "gpu": own})
                self.plan.subtract(before)
                seen[key] = result, Counter(self.plan)
                self.plan.update(before)
                self.known.clear()  # ids may come again
            else:
                self.plan.update(seen[key][1])
            self.plan["runs"] += 1
            results.append({"seconds": 1.0, "cpu_seconds": 1.0} | config | dict(seen[key][0]))
        return results

    def load_series(self, name):
        """Stand for `load_series`: noise of the right size where there is no network."""
        if name not in SIZES:
            return self.load(name)
        train, test, length, channels, classes = SIZES[name]

        def split(n):
            y = torch.arange(n) % classes if classes else torch.randn(n)
            padding = torch.zeros(n, length, dtype=torch.bool)
            return series.SeriesSplit(torch.randn(n, length, channels), padding, y)

        return series.SeriesData(
            name, split(train), split(test), channels, classes, length,
            tuple(map(str, range(classes))), 0, None if classes else (0.0, 1.0),
        )  # fmt: skip

    def compare(self, forms, *, repeats=20, warmup=3, device=None):
        """Stand for `compare`: one round, where a GPU takes no time."""
        begin = time.process_time()
        times = self.time(forms, repeats=1, warmup=0, device=device)
        own = time.process_time() - begin
        self.spent += own
        self.plan.update({"cpu": own * (repeats + warmup)})
        return times

    def save(self, path: str) -> None:
        """Write the plan, with what the page does outside of training."""
        own = time.process_time() - self.start - self.spent
        self.plan.update({"cpu": own, "gpu": own})
        Path(path).write_text(json.dumps(self.plan))


# --- in front of the kernels -------------------------------------------------------------------


def plan(page: Path, profile: str) -> dict:
    """Execute a page with samples of its training; return runs, steps and seconds."""
    notebook = read_page(page)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.json")
        first = (
            f"import sys; sys.path.insert(0, {str(ROOT / '_ext')!r})\n"
            "from plan import Sampler\nsampler = Sampler()\nsampler.install()"
        )
        cells = [first, *(c.source for c in notebook.cells if c.cell_type == "code")]
        cells.append(f"sampler.save({path!r})")
        sample = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
        os.environ.update(
            DERIVED_ATTENTION_PROFILE=profile, DERIVED_ATTENTION_PROGRESS="0", OMP_NUM_THREADS="1"
        )
        # A claim about trained models may fail on models that are not: the next cell goes on.
        NotebookClient(sample, timeout=None, allow_errors=True, kernel_name="python3",
                       resources={"metadata": {"path": folder}}).execute()  # fmt: skip
        found = json.loads(Path(path).read_text())
    errors = [
        o.evalue for c in sample.cells for o in c.get("outputs", []) if o.output_type == "error"
    ]
    for error in errors:
        print(f"  a cell of {page.stem} stopped: {error.splitlines()[0] if error else ''}")
    counts = {name: round(found.get(name, 0)) for name in ("runs", "steps", "batches")}
    return counts | {"cpu_seconds": round(found["cpu"]), "gpu_seconds": round(found["gpu"])}


def main(arguments: list[str]) -> None:
    """Plan chapters in profiles, by default all in `medium` and `full`; store each at once.

    Raises
    ------
    SystemExit
        For an argument that is neither a profile nor the number of a chapter.
    """
    pages = {page.name[:2]: page for page in sorted((ROOT / "book").glob("[0-9]*.md"))}
    if wrong := set(arguments) - set(PROFILES) - set(pages):
        sys.exit(f"{wrong} are neither of {', '.join(PROFILES)} nor chapters {', '.join(pages)}")
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for profile in [p for p in PROFILES if p in arguments] or ["medium", "full"]:
        for number in [n for n in pages if n in arguments] or pages:
            found = plan(pages[number], profile)
            print(f"{profile} {number}: {found}", flush=True)
            date = datetime.date.today().isoformat()
            result |= {"machine": measure.machine(), "date": date}
            result.setdefault(profile, {})[pages[number].stem] = found
            write_atomically(RESULT, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1:])
