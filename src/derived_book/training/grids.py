"""Grids of runs: each result is stored at once, and a finished run is not repeated.

A result is stored under a key, the digest of the function (its source, and the source and values
of what it reads from its page), its arguments, the code of this package that it reaches and of the
user's modules that are loaded, the version of PyTorch, and the profile. If any of them changes, the
run is repeated. Comments and docstrings of this package do not matter; those of the function do,
as do docstrings in the user's modules. Other installed packages, data files, and values that are
assigned at run time to names in modules of this package do not matter, either.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import inspect
import json
import math
import os
import platform
import sys
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np
import torch

from derived_attention import __version__
from derived_attention.common.files import cache_dir, write_atomically
from derived_book import runtime
from derived_book.runtime import current_profile, device_name, digest, make_folder
from derived_book.training import workers as processes
from derived_book.training.run_key import full_name, run_key

if TYPE_CHECKING:
    import pandas

Result = dict[str, Any]
POLL_INTERVAL = 0.2  # seconds between two checks for the results of other processes
REDRAW_INTERVAL = 0.5  # seconds, at least, between two updates of the table of `watch`


def run_grid(
    function: Callable[..., Mapping[str, Any]],
    grid: Iterable[Mapping[str, Any]],
    store: str | os.PathLike[str] | None = None,
    *,
    workers: int | Executor = 1,
    watch: Callable[[list[Result]], Any] | None = None,
) -> list[Result]:
    """Call ``function(**config)`` for each config of the grid, or read its stored result.

    What identifies a stored result is described at the top of this module.

    In the profile ``full`` the number of runs is printed before the first, and an estimate of the
    remaining time after it. The call may be interrupted or killed at any time: finished runs are
    stored, and the next call continues from there.

    Processes may share a store. A process claims a run by a file lock, which the system releases
    when the process ends; other processes wait for its result.

    Parameters
    ----------
    function : callable
        Returns a dict of metrics: numbers (also infinite ones and NaN), text, None, and lists or
        dicts of them. Its seed should be one of its arguments.
    grid : iterable of dict
        Keyword arguments of each run: values that JSON can hold.
    store : path, optional
        The folder of the results; default, ``cache_dir("runs")``.
    workers : int or concurrent.futures.Executor
        What executes the runs: this process (1), that many local processes, or an executor, such
        as that of a Dask cluster. Keys, files, profile and seeds do not depend on it.
    watch : callable, optional
        Maps the list of results so far to an object that a notebook displays until the grid is
        finished, such as ``partial(summarise, by="heads", metric="accuracy")``.

    Returns
    -------
    list of dict
        In the order of the grid: ``{"seconds", "cpu_seconds", **config, **metrics}``; the first
        two are the wall time and the processor time of the run.

    Raises
    ------
    TypeError
        If a config does not fit the function, if JSON cannot represent a config or a metric, or if
        the function reads an object that cannot be compared between sessions.
    ValueError
        If a metric has the name of an argument, or is called "seconds" or "cpu_seconds".
    OSError
        If a run has to be stored and the folder of the results cannot be written.
    Exception
        What the function raises, with a note that names the run. No further run is started, and
        the runs of other workers are finished and stored first; but if a local worker process
        dies, the runs of the other processes are lost too.

    Warns
    -----
    UserWarning
        If a stored file is damaged. That run is repeated and its file replaced.

    Examples
    --------
    >>> grid = [{"heads": h, "seed": s} for h in (1, 8) for s in range(3)]
    >>> results = run_grid(train_once, grid, workers=2)  # doctest: +SKIP
    >>> summarise(results, by="heads", metric="accuracy")  # doctest: +SKIP
    """
    crew, of_function = processes.crew_of(workers), run_key(function)
    if isinstance(grid, Mapping):
        raise TypeError(f"grid is {grid!r}; expected a list of such dicts, one for each run")
    configs = [dict(config) for config in grid]
    for config in configs:
        _check_config(function, config)
    folder = Path(cache_dir("runs") if store is None else store) / function.__name__
    keys = [digest(of_function, _to_json(config, sort_keys=True)) for config in configs]
    paths = [folder / f"{key}.json" for key in keys]
    left = sum(not path.exists() for path in paths)
    if left:
        make_folder(folder, "pass another one as store, or set DERIVED_ATTENTION_RUNS")
    announced = current_profile() != "full" or not left
    if not announced:
        print(_before(function.__name__, len(paths), left), flush=True)
    results: dict[int, Result] = {}
    records = _Grid(function, configs, paths, crew).records()
    with (
        contextlib.closing(records),
        _show_results(watch) as show,
        runtime.progress(range(len(paths)), function.__name__) as bar,
    ):
        for _ in bar:
            index, record, new = next(records)
            left -= new
            if new and not announced:
                steps = record.get("steps", 0)
                text = _after(record["seconds"], steps, left, min(left, crew.slots) or 1)
                getattr(bar, "write", print)(text)
                announced = True
            times = {name: record[name] for name in ("seconds", "cpu_seconds")}
            results[index] = times | configs[index] | record["result"]
            show(results)
    return [results[index] for index in range(len(paths))]


def _check_config(function: Callable[..., Any], config: dict[str, Any]) -> None:
    """Raise TypeError unless a function takes a config, and JSON can hold it."""
    try:
        inspect.signature(function).bind(**config)
    except TypeError as error:
        raise TypeError(
            f"grid contains {config}; expected arguments of {full_name(function)}: {error}"
        ) from error
    _check_json("config", config)


class _Grid:
    """The runs of a grid that are waiting, running here, or claimed by another process.

    A run is executed, and its file written, while this process holds the run's lock, which the
    file system releases when the process ends. A lock that can be acquired therefore belongs to no
    running process.
    """

    def __init__(
        self,
        function: Callable[..., Mapping[str, Any]],
        configs: Sequence[dict[str, Any]],
        paths: Sequence[Path],
        workers: processes.Crew,
    ) -> None:
        self.function, self.configs, self.paths, self.workers = function, configs, paths, workers
        self.waiting = deque(range(len(paths)))
        self.elsewhere: list[int] = []  # claimed by another process
        self.running: dict[Future[Any], int] = {}
        self.locks: dict[int, filelock.BaseFileLock] = {}
        self.error: BaseException | None = None

    def records(self) -> Generator[tuple[int, Result, bool], None, None]:
        """Yield each run's index, its record, and whether it is new, as they are completed."""
        for folder in {path.parent for path in self.paths}:
            _clean(folder)
        try:
            while self.waiting or self.elsewhere or self.running:
                while self.waiting and len(self.running) < self.workers.slots and not self.error:
                    index = self.waiting.popleft()
                    if (record := self.start(index)) is not None:
                        yield index, record, False
                for index, record in self.wait_for_runs():
                    yield index, record, True
                if self.error and not self.running:
                    raise self.error
                self.waiting.extend(self.elsewhere)
                self.elsewhere.clear()
        finally:
            if self.running:
                self.workers.stop()
            for index in list(self.locks):
                self.release(index)

    def start(self, index: int) -> Result | None:
        """Return the stored record; if there is none, start the run unless it is claimed."""
        path = self.paths[index]
        if (record := _read(path)) is not None:
            return record
        if (lock := _lock(path)) is None:
            self.elsewhere.append(index)
            return None
        self.locks[index] = lock
        if (record := _read(path, warn=False)) is not None:  # written before we held the lock
            self.release(index)
            return record
        try:
            future = self.workers.submit(_run, self.function, self.configs[index], path.stem)
        except BrokenExecutor:  # a worker has just died: the runs that it breaks will raise
            self.release(index)
            self.elsewhere.append(index)
        else:
            self.running[future] = index
        return None

    def wait_for_runs(self) -> Iterator[tuple[int, Result]]:
        """Wait for a run to finish; store and yield the records of all that have finished."""
        timeout = POLL_INTERVAL if self.elsewhere else None
        if not self.running:  # other processes make the rest, or no slot is free
            time.sleep(POLL_INTERVAL)
        done = wait(self.running, timeout, FIRST_COMPLETED).done
        for future in sorted(done, key=self.running.__getitem__):  # the grid's order, not a set's
            index = self.running.pop(future)
            try:
                record = _write(self.paths[index], future.result())
            except Exception as error:
                error.add_note(f"The run was {self.function.__name__}(**{self.configs[index]}).")
                self.error = self.error or error
            else:
                yield index, record
            finally:
                self.release(index)

    def release(self, index: int) -> None:
        """Release the lock of a run."""
        _release(self.paths[index], self.locks.pop(index))


def _lock(path: Path) -> filelock.BaseFileLock | None:
    """Lock the run that is stored at `path`; return None if another process holds the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        return None
    return lock


def _release(path: Path, lock: filelock.BaseFileLock) -> None:
    path.with_suffix(".lock").unlink(missing_ok=True)
    lock.release()


def _clean(folder: Path) -> None:
    """Delete the locks and the temporary files of killed processes."""
    for leftover in [*folder.glob("*.lock"), *folder.glob(".*.json.*.tmp")]:
        path = folder / f"{leftover.name.strip('.').partition('.')[0]}.json"
        if (lock := _lock(path)) is not None:
            leftover.unlink(missing_ok=True)
            _release(path, lock)


@contextlib.contextmanager
def _show_results(
    watch: Callable[[list[Result]], Any] | None,
) -> Iterator[Callable[[dict[int, Result]], None]]:
    """Yield a function that displays ``watch(results)`` in a notebook until the block ends."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if watch is None or not (runtime.shows_progress() and hasattr(shell, "kernel")):
        yield lambda results: None
        return
    display = sys.modules["IPython"].display
    handle = display.display(display.HTML(""), display_id=True)
    shown = 0.0

    def show(results: dict[int, Result]) -> None:
        nonlocal shown
        if time.monotonic() - shown >= REDRAW_INTERVAL:  # hundreds of stored results come at once
            handle.update(watch([results[index] for index in sorted(results)]))
            shown = time.monotonic()

    try:
        yield show
    finally:
        handle.update(display.HTML(""))


def summarise(
    results: Sequence[Mapping[str, Any]], by: str | Sequence[str], metric: str
) -> pandas.DataFrame:
    """Return mean, sample standard deviation, extremes and number of a metric per group.

    Parameters
    ----------
    results : sequence of dict
        As `run_grid` returns them.
    by : str or sequence of str
        The entries that define the groups, for example the argument ``"attention"``.
    metric : str

    Returns
    -------
    pandas.DataFrame
        Columns ``mean``, ``sd`` (n - 1 in the denominator, NaN for n = 1), ``min``, ``max``,
        ``n``; the index is the group, in the order of appearance. NaN is not skipped: one run
        that is NaN makes the statistics of its group NaN.

    Raises
    ------
    ValueError
        If there is no result, or one has no entry `by` or `metric`.
    """
    import pandas

    groups = [by] if isinstance(by, str) else list(by)
    if not results:
        raise ValueError("results is empty; expected at least one result")
    for name in [*groups, metric]:
        for result in results:
            if name not in result:
                raise ValueError(f"a result has no {name!r}; expected one of {', '.join(result)}")
    rows = [[*(_hashable(result[g]) for g in groups), float(result[metric])] for result in results]
    *columns, value = range(len(groups) + 1)
    grouped = pandas.DataFrame(rows).groupby(columns, sort=False, dropna=False)[value]
    with np.errstate(invalid="ignore"):  # a diverged run makes its group's numbers inf or NaN
        table = grouped.agg(
            mean=lambda x: x.mean(skipna=False),
            sd=lambda x: x.std(skipna=False),
            min=lambda x: x.min(skipna=False),
            max=lambda x: x.max(skipna=False),
            n="size",
        )
    table.index.names = groups
    return table


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _before(name: str, runs: int, left: int) -> str:
    """Return what is printed before the first run."""
    stored = f", {runs - left} of them stored" if left < runs else ""
    return f"{name}: {runs} run{'s' * (runs > 1)}{stored}. An estimate follows the first."


def _after(seconds: float, steps: int, left: int, slots: int) -> str:
    """Return what is printed after the first run: its time, and an estimate for the others."""
    took = f"The first took {duration(seconds)}" + (f" for {steps:,} steps" if steps else "")
    if not left:
        return f"{took}."
    return (
        f"{took}: {left} more, about {duration(left * seconds / slots)} if they are alike. "
        "Finished runs are stored: stop at any time, and run the cell again to continue."
    )


def duration(seconds: float) -> str:
    """Return a rounded time in its natural unit: ``"4 s"``, ``"12 min"``, ``"14 h"``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s" if seconds >= 1 else "less than a second"
    return f"{seconds / 60:.0f} min" if seconds < 99.5 * 60 else f"{seconds / 3600:.0f} h"


def _run(function: Callable[..., Mapping[str, Any]], config: dict[str, Any], key: str) -> Result:
    before, wall, cpu = runtime.counted["steps"], time.perf_counter(), time.process_time()
    result = function(**copy.deepcopy(config))  # it may modify its arguments; the record must not
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    if not isinstance(result, Mapping):
        raise TypeError(
            f"{function.__name__} returned {type(result).__name__}; expected a dict of metrics"
        )
    _check_json("result", result)
    reserved = sorted({*config, "seconds", "cpu_seconds"} & set(result))
    if reserved:
        raise ValueError(
            f"result has {', '.join(reserved)}; expected no name of an argument, 'seconds' or "
            "'cpu_seconds'"
        )
    cuda = torch.cuda.is_available()
    return {
        "key": key,
        "function": full_name(function),
        "config": config,
        "result": dict(result),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "steps": runtime.counted["steps"] - before,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(torch.device("cuda" if cuda else "cpu")),
        "profile": current_profile(),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "derived_attention": __version__,
        },
    }


def _write(path: Path, record: Result) -> Result:
    """Store a record; return it as later calls read it."""
    if path.is_dir():  # not made by a run: keep it under another name
        path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex}.damaged"))
    write_atomically(path, _to_json(record).encode())
    return _read(path) or record


def _read(path: Path, *, warn: bool = True) -> Result | None:
    """Return the record at `path`; None if there is none, or, with a warning, if it is damaged."""
    try:
        record = _decode(json.loads(path.read_bytes()))
        if record["key"] != path.stem:
            problem = f"key is {record['key']!r}; expected the name of the file"
        elif not isinstance(record["result"], dict):
            problem = f"result is {type(record['result']).__name__}; expected a dict"
        elif not all(isinstance(record[name], float) for name in ("seconds", "cpu_seconds")):
            problem = "seconds and cpu_seconds are not both floats"
        else:
            return record
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
    if warn:
        message = f"the stored run {path} is damaged ({problem}); the run is repeated"
        warnings.warn(message, UserWarning, stacklevel=5)
    return None


# --- JSON, with an encoding of infinity and NaN, which diverging runs report ---------------------


def _check_json(name: str, value: Any) -> None:
    """Raise TypeError, naming the entry, for a value that JSON cannot represent."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{name} has the key {key!r}; expected a string")
            _check_json(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_json(f"{name}[{i}]", item)
    elif not (value is None or isinstance(value, str | bool | int | float)):
        raise TypeError(
            f"{name} is {type(value).__module__}.{type(value).__qualname__}; expected a JSON "
            "value: a number (convert with float), a string, None, or a list or dict of them"
        )


def _to_json(value: Any, sort_keys: bool = False) -> str:
    return json.dumps(_encode(value), indent=1, allow_nan=False, sort_keys=sort_keys)


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if list(value) == ["float"] and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        return {key: _decode(item) for key, item in value.items()}
    return [_decode(item) for item in value] if isinstance(value, list) else value
