"""Grids of runs: each result is stored as soon as it is there, and a finished run is not repeated.

A result is found again by a key: what the function is (its source, and the source and values of
what it reads from its own page), what it was given, the code that it reaches of this package and of
modules of your own, the version of PyTorch, and the profile. Change any of them, and the run is
made again. A comment in the package, or a module that the function has nothing to do with, changes
nothing. Other installed packages do not count, nor files that are read, nor modules that are
imported by a name made at run time.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import dis
import functools
import inspect
import json
import math
import os
import platform
import sys
import textwrap
import time
import types
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np
import torch

from derived_attention import __version__, runtime
from derived_attention.runtime import (
    cache_dir,
    current_profile,
    device_name,
    digest,
    write_atomically,
)
from derived_attention.training import cluster, own_modules
from derived_attention.training.sources import Sources

if TYPE_CHECKING:
    import pandas

Result = dict[str, Any]
PATIENCE = 0.2  # seconds between two looks at what other processes make
GLANCE = 0.5  # seconds for which a table that is watched stays as it is

# The package's source as it was when this module was imported: as near as can be to what runs.
PACKAGE = Sources(Path(__file__).parents[1])


def run_grid(
    function: Callable[..., Mapping[str, Any]],
    grid: Iterable[Mapping[str, Any]],
    store: str | os.PathLike[str] | None = None,
    *,
    workers: int | cluster.Workers = 1,
    watch: Callable[[list[Result]], Any] | None = None,
    progress: bool = True,
) -> list[Result]:
    """Call ``function(**config)`` for each config of the grid, or read its stored result.

    A stored result is one of the same function: see the head of this module for what counts. A
    module of your own, beside the page or in a checkout, counts with its code and all that it
    imports, once it is imported again; a constant in it also when you set it from outside.

    In the profile ``full`` it says before it starts how many runs there are to make, and after the
    first one how long that took and what the others will. Stop it when you like, or kill it: what
    is done is stored, and the next call goes on from there.

    Processes may share a store. Each run is claimed by a lock of the file system, which ends with
    the process that holds it; what another has claimed is left to it, and its result is waited for.

    Parameters
    ----------
    function : callable
        Returns a dict of metrics: numbers (also infinite ones and NaN), text, None, and lists or
        dicts of them. Its seed should be one of its arguments.
    grid : iterable of dict
        Keyword arguments of each run: values that JSON can hold.
    store : path, optional
        The folder of the results; default, ``cache_dir("runs")``.
    workers : int or derived_attention.training.cluster.Workers
        Who makes the runs: this process (1), as many processes of this machine, or a cluster:
        `Ray`. Keys, files, profile and seeds are those of one process.
    watch : callable, optional
        Given the results so far, what a notebook shows of them while others are made: such as
        ``partial(summarise, by="heads", metric="accuracy")``. It vanishes at the end.
    progress : bool
        False for no progress bar and nothing to watch; True shows them where
        `derived_attention.runtime.progress_wanted` says so.

    Returns
    -------
    list of dict
        In the order of the grid: ``{"seconds", "cpu_seconds", **config, **metrics}``, where the
        first two are what the run took when it was made (wall and processor time).

    Raises
    ------
    TypeError
        If a config does not fit the function, if a config or a metric is nothing JSON can hold,
        or if the function reads something that cannot be compared between sessions.
    ValueError
        If a metric has the name of an argument.
    Exception
        What the function raises, with a note which run it was. No run is begun after it, and those
        that other workers have begun are stored first, but a local worker that dies takes the
        others' runs with it.

    Warns
    -----
    UserWarning
        If a stored file is damaged. That run is made again and its file replaced.

    Examples
    --------
    >>> grid = [{"heads": h, "seed": s} for h in (1, 8) for s in range(3)]
    >>> results = run_grid(train_once, grid, workers=2)  # doctest: +SKIP
    >>> summarise(results, by="heads", metric="accuracy")  # doctest: +SKIP
    """
    configs = [dict(config) for config in grid]
    for config in configs:
        try:
            inspect.signature(function).bind(**config)
        except TypeError as error:
            raise TypeError(
                f"grid holds {config}, which {_name(function)} does not take"
            ) from error
        _check_json("config", config)
    makers, identity = cluster.workers(workers), _identity(function)
    folder = Path(cache_dir("runs") if store is None else store) / function.__name__
    keys = [digest(identity, _to_json(config, sort_keys=True)) for config in configs]
    paths = [folder / f"{key}.json" for key in keys]
    left = sum(not path.exists() for path in paths)
    announced = current_profile() != "full" or not left
    if not announced:
        print(_before(function.__name__, len(paths), left), flush=True)
    results: dict[int, Result] = {}
    found = _Grid(function, configs, paths, makers).records()
    with (
        contextlib.closing(found),
        _watched(watch, progress) as show,
        runtime.progress(range(len(paths)), function.__name__, progress) as bar,
    ):
        for _ in bar:
            index, record, new = next(found)
            left -= new
            if new and not announced:
                steps = record.get("steps", 0)
                text = _after(record["seconds"], steps, left, min(left, makers.slots) or 1)
                getattr(bar, "write", print)(text)
                announced = True
            times = {name: record[name] for name in ("seconds", "cpu_seconds")}
            results[index] = times | configs[index] | record["result"]
            show(results)
    return [results[index] for index in range(len(paths))]


class _Grid:
    """The runs of a grid: which there are, which others make, and which are left to make here.

    A run is begun under its claim, a lock that the file system takes back when this process ends,
    however it does. Its file is written under it too; so one without a claim is nobody's.
    """

    def __init__(
        self,
        function: Callable[..., Mapping[str, Any]],
        configs: Sequence[dict[str, Any]],
        paths: Sequence[Path],
        workers: cluster.Workers,
    ) -> None:
        self.function, self.configs, self.paths, self.workers = function, configs, paths, workers
        self.left = deque(range(len(paths)))
        self.elsewhere: list[int] = []  # what another process has claimed
        self.busy: dict[Future[Any], int] = {}
        self.claims: dict[int, filelock.BaseFileLock] = {}
        self.failed: BaseException | None = None

    def records(self) -> Generator[tuple[int, Result, bool], None, None]:
        """Yield each run's index and record, and whether it is new, in the order of their ends."""
        for folder in {path.parent for path in self.paths}:
            _sweep(folder)
        try:
            while self.left or self.elsewhere or self.busy:
                while self.left and len(self.busy) < self.workers.slots and not self.failed:
                    index = self.left.popleft()
                    if (record := self.begin(index)) is not None:
                        yield index, record, False
                for index, record in self.ended():
                    yield index, record, True
                if self.failed and not self.busy:
                    raise self.failed
                self.left.extend(self.elsewhere)
                self.elsewhere.clear()
        finally:
            if self.busy:
                self.workers.stop()
            for index in list(self.claims):
                self.release(index)

    def begin(self, index: int) -> Result | None:
        """Return the record that there is; without one, begin the run, or leave it to another."""
        path = self.paths[index]
        if (record := _read(path)) is not None:
            return record
        if (claim := _claim(path)) is None:
            self.elsewhere.append(index)
            return None
        self.claims[index] = claim
        if (record := _read(path, warn=False)) is not None:  # made before the claim was ours
            self.release(index)
            return record
        try:
            future = self.workers.submit(_run, self.function, self.configs[index], path.stem)
        except BrokenExecutor:  # a worker has just died: the runs that it breaks will say so
            self.release(index)
            self.elsewhere.append(index)
        else:
            self.busy[future] = index
        return None

    def ended(self) -> Iterator[tuple[int, Result]]:
        """Wait for a run to end, no longer than others' may take; store and yield what has."""
        patience = PATIENCE if self.elsewhere else None
        if not self.busy:  # others make the rest, or there is no slot now
            time.sleep(PATIENCE)
        done = wait(self.busy, patience, FIRST_COMPLETED).done
        for future in sorted(done, key=self.busy.__getitem__):  # a set has no order of its own
            index = self.busy.pop(future)
            try:
                record = _write(self.paths[index], future.result())
            except Exception as error:
                error.add_note(f"The run was {self.function.__name__}(**{self.configs[index]}).")
                self.failed = self.failed or error
            else:
                yield index, record
            finally:
                self.release(index)

    def release(self, index: int) -> None:
        """Let go of a claim."""
        _release(self.paths[index], self.claims.pop(index))


def _claim(path: Path) -> filelock.BaseFileLock | None:
    """Return the lock of the run that is stored at `path`; None while another holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        return None
    return lock


def _release(path: Path, claim: filelock.BaseFileLock) -> None:
    path.with_suffix(".lock").unlink(missing_ok=True)
    claim.release()


def _sweep(folder: Path) -> None:
    """Delete what killed processes have left: locks that nobody holds, and half a file."""
    for left in [*folder.glob("*.lock"), *folder.glob(".*.json.*.tmp")]:
        path = folder / f"{left.name.strip('.').partition('.')[0]}.json"
        if (claim := _claim(path)) is not None:
            left.unlink(missing_ok=True)
            _release(path, claim)


@contextlib.contextmanager
def _watched(
    watch: Callable[[list[Result]], Any] | None, wanted: bool
) -> Iterator[Callable[[dict[int, Result]], None]]:
    """Give a function that shows in a notebook what `watch` makes of results; remove it at last."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if watch is None or not (wanted and runtime.progress_wanted() and hasattr(shell, "kernel")):
        yield lambda results: None
        return
    display = sys.modules["IPython"].display
    handle = display.display(display.HTML(""), display_id=True)
    shown = 0.0

    def show(results: dict[int, Result]) -> None:
        nonlocal shown
        if time.monotonic() - shown >= GLANCE:  # stored ones come by the hundred
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
        What the groups have in common, for example the argument ``"attention"``.
    metric : str

    Returns
    -------
    pandas.DataFrame
        Columns ``mean``, ``sd`` (n - 1 in the denominator, NaN for n = 1), ``min``, ``max``,
        ``n``; the index is the group, in the order of appearance. One run that is NaN makes the
        numbers of its group NaN: nothing is left out.

    Raises
    ------
    ValueError
        If there is no result, or one has no entry `by` or `metric`; names those it has.
    """
    import pandas

    groups = [by] if isinstance(by, str) else list(by)
    if not results:
        raise ValueError("results is empty; expected at least one result")
    for name in [*groups, metric]:
        for result in results:
            if name not in result:
                raise ValueError(f"no {name!r} in a result; it has {', '.join(result)}")
    rows = [[*(_hashable(result[g]) for g in groups), float(result[metric])] for result in results]
    *columns, value = range(len(groups) + 1)
    found = pandas.DataFrame(rows).groupby(columns, sort=False, dropna=False)[value]
    with np.errstate(invalid="ignore"):  # a diverged run makes its group's numbers inf or NaN
        table = found.agg(
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
    """Say what is going to happen, before the first run."""
    stored = f", {runs - left} of them stored" if left < runs else ""
    return f"{name}: {runs} run{'s' * (runs > 1)}{stored}. An estimate follows the first."


def _after(seconds: float, steps: int, left: int, slots: int) -> str:
    """Say what the first run took, and what the others will."""
    took = f"The first took {duration(seconds)}" + (f" for {steps:,} steps" if steps else "")
    if not left:
        return f"{took}."
    return (
        f"{took}: {left} more, about {duration(left * seconds / slots)} if they are alike. What is "
        "done is stored: stop when you like, and run the cell again to go on."
    )


def duration(seconds: float) -> str:
    """Return a time as a reader says it: ``"4 s"``, ``"12 min"``, ``"14 h"``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s" if seconds >= 1 else "less than a second"
    return f"{seconds / 60:.0f} min" if seconds < 99.5 * 60 else f"{seconds / 3600:.0f} h"


def _run(function: Callable[..., Mapping[str, Any]], config: dict[str, Any], key: str) -> Result:
    before, wall, cpu = runtime.counted["steps"], time.perf_counter(), time.process_time()
    result = function(**copy.deepcopy(config))  # which it may change: the record has what was asked
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    if not isinstance(result, Mapping):
        raise TypeError(
            f"{function.__name__} returned {type(result).__name__}; expected a dict of metrics"
        )
    _check_json("result", result)
    both = sorted({*config, "seconds", "cpu_seconds"} & set(result))
    if both:
        raise ValueError(
            f"result has {', '.join(both)}, which names an argument or the run's time; rename it"
        )
    cuda = torch.cuda.is_available()
    return {
        "key": key,
        "function": _name(function),
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
    """Store a record; return it as it is read from now on."""
    if path.is_dir():  # nothing that a run has made: it is kept, out of the way
        path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex}.damaged"))
    write_atomically(path, _to_json(record).encode())
    return _read(path) or record


def _read(path: Path, *, warn: bool = True) -> Result | None:
    """Return the record at `path`; None, with a warning where it is damaged, to make it again."""
    try:
        record = _decode(json.loads(path.read_bytes()))
        if record["key"] != path.stem:
            problem = "it is the record of something else"
        elif not isinstance(record["result"], dict):
            problem = "its result is no dict"
        elif not all(isinstance(record[name], float) for name in ("seconds", "cpu_seconds")):
            problem = "its times are no numbers"
        else:
            return record
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
    if warn:
        message = f"the stored run {path} is damaged ({problem}); it is made again"
        warnings.warn(message, UserWarning, stacklevel=5)
    return None


# --- JSON: it has neither infinity nor NaN, and a diverging run has both -------------------------


def _check_json(name: str, value: Any) -> None:
    """Raise TypeError, naming the entry, for anything that JSON does not hold."""
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
            f"{name} is {type(value).__module__}.{type(value).__qualname__}; expected what JSON "
            "holds: a number (float(...) makes one), text, None, or a list or dict of them"
        )


def _to_json(value: Any, **how: Any) -> str:
    return json.dumps(_encode(value), indent=1, allow_nan=False, **how)


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


# --- What decides a result ------------------------------------------------------------------------


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _identity(function: Callable[..., Any]) -> list[Any]:
    """Return everything but the config that decides what ``function(**config)`` returns."""
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"function is {function!r}; expected a function defined by def")
    trace = _Trace(function.__module__)
    source = trace.of(function, function.__name__)
    dtype = torch.get_default_dtype()
    other: list[Any] = [] if dtype == torch.float32 else [str(dtype)]
    own = own_modules.closure(trace.named)
    for name, file in sorted(own.items()):
        trace.reached |= PACKAGE.imported(file.text)
        other.append([name, file.digest, _shown(own_modules.changed(name, file))])
    return [source, PACKAGE.digest(trace.reached), torch.__version__, current_profile(), *other]


def _shown(found: dict[str, Any]) -> dict[str, Any]:
    """Return values as something `digest` takes: of those that it does not, the type."""
    shown = {}
    for name, value in found.items():
        try:
            shown[name] = digest(value)
        except TypeError:
            shown[name] = type(value).__qualname__
    return shown


class _Trace:
    """Turns a function into what `digest` takes: sources and values of what it reads from its page.

    A function or class of another module counts by its name. For one of this package, `reached`
    gets its module, whose code is part of the key; for PyTorch's, the version is. Among `named`,
    which are all modules that were met, are those of the reader's own.
    """

    def __init__(self, page: str) -> None:
        self.page = page
        self.seen: set[int] = set()
        self.reached: set[str] = set()
        self.named: set[str] = set()

    def of(self, value: Any, name: str) -> Any:
        """Return `value`, which the function knows as `name`, as something `digest` takes."""
        value = inspect.unwrap(value) if callable(value) else value
        if isinstance(value, types.ModuleType):
            self.reached |= PACKAGE.modules(value.__name__)
            self.named.add(value.__name__)
            return ["module", value.__name__]
        if isinstance(value, functools.partial):
            return ["partial", self.of([value.func, value.args, value.keywords], name)]
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            return self._definition(value)
        if isinstance(value, dict):
            return {key: self.of(item, name) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(item, name) for item in value]
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return [self._definition(type(value)), self.of(fields, name)]
        try:
            return digest(value)
        except TypeError as error:
            raise TypeError(
                f"the function reads {name}, a {type(value).__qualname__}, which cannot be "
                "compared between sessions; make it inside the function, or pass what it is made "
                "from"
            ) from error

    def _definition(self, value: Any) -> Any:
        """Return a function or class: the source of those of this page, of others the name."""
        full_name = f"{value.__module__}.{value.__qualname__}"
        if value.__module__ != self.page or id(value) in self.seen:
            self.reached |= PACKAGE.modules(full_name)
            return ["named", full_name, *self._elsewhere(value, full_name)]
        self.seen.add(id(value))
        if isinstance(value, type):
            parts = _class_parts(value)
        else:
            parts = _function_parts(value)
            self._follow(value, parts)
        return [full_name, {part: self.of(parts[part], part) for part in parts}]

    def _elsewhere(self, value: Any, full_name: str) -> list[Any]:
        """Note what is defined in another module; return its code if its file says other code."""
        if value.__module__ == self.page:
            return []
        self.named.add(full_name)
        found = own_modules.changed_code(value) if own_modules.is_own(value.__module__) else {}
        return [found] if found else []

    def _follow(self, function: Any, parts: dict[str, Any]) -> None:
        """Note the modules that a function of this page imports in its body, or names by a dot."""
        with contextlib.suppress(SyntaxError):  # a lambda in a statement, which imports nothing
            source = textwrap.dedent(parts["<source>"])
            self.reached |= PACKAGE.imported(source)
            self.named |= own_modules.imported(source, function.__globals__.get("__package__"))
        for part in parts.values():
            if isinstance(part, types.ModuleType):
                self.named.update(own_modules.submodules(part, _names(function.__code__)))


def _function_parts(function: Any) -> dict[str, Any]:
    """Return source, defaults and closure of a function, and the globals that it reads."""
    try:
        source = inspect.getsource(function)
    except OSError as error:
        raise TypeError(
            f"the source of {_name(function)} is not known; define it in a file or a notebook cell"
        ) from error
    code, known = function.__code__, function.__globals__
    closure = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return {
        "<source>": source,
        "<defaults>": [function.__defaults__, function.__kwdefaults__],
        **({"<code>": changed} if (changed := own_modules.changed_code(function)) else {}),
        **{name: known[name] for name in _globals_read(code) if name in known},
        **{name: cell.cell_contents for name, cell in closure},
    }


def _globals_read(code: types.CodeType) -> list[str]:
    reads = ("LOAD_GLOBAL", "LOAD_NAME")
    parts = [code, *own_modules.codes(code)]
    return sorted({i.argval for c in parts for i in dis.get_instructions(c) if i.opname in reads})


def _names(code: types.CodeType) -> set[str]:
    """Return all names in code, also those behind a dot."""
    return {name for part in [code, *own_modules.codes(code)] for name in part.co_names}


def _class_parts(cls: type) -> dict[str, Any]:
    """Return bases and members: `inspect.getsource` does not find a class of a notebook."""
    parts: dict[str, Any] = {"<bases>": cls.__bases__}
    for name, member in vars(cls).items():
        member = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if isinstance(member, types.FunctionType):
            if member.__code__.co_filename != "<string>":  # where a dataclass writes its methods
                parts[name] = member
        elif not name.startswith("__"):
            parts[name] = member
    return parts
