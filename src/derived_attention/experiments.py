"""Grids of runs: each result is a file as soon as it is there, and a finished run is never repeated.

A result is found again by a key: what the function is (its source, and the source and values of
what it reads from its own page), what it was given, the source of this package, the version of
PyTorch, and the profile. Change any of them, and the run is made again.
"""

from __future__ import annotations

import datetime
import dis
import functools
import inspect
import json
import math
import os
import platform
import time
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import derived_attention
from derived_attention.runtime import (
    cache_dir,
    device_name,
    digest,
    profile,
    progress,
    write_atomically,
)

if TYPE_CHECKING:
    import pandas

Result = dict[str, Any]


def run_grid(
    function: Callable[..., Mapping[str, Any]],
    grid: Iterable[Mapping[str, Any]],
    store: str | os.PathLike[str] | None = None,
    *,
    show_progress: bool = True,
) -> list[Result]:
    """Call ``function(**config)`` for each config of the grid, or read its stored result.

    Parameters
    ----------
    function : callable
        Returns a dict of metrics: numbers (also infinite ones and NaN), text, None, and lists or
        dicts of them. Its seed should be one of its arguments.
    grid : iterable of dict
        Keyword arguments of each run: values that JSON can hold.
    store : path, optional
        The folder of the results; default, ``cache_dir("runs")``.
    show_progress : bool
        False for no progress bar; see `derived_attention.runtime.progress_wanted`.

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

    Warns
    -----
    UserWarning
        If a stored file is damaged. That run is made again and its file replaced.

    Examples
    --------
    >>> grid = [{"heads": h, "seed": s} for h in (1, 8) for s in range(3)]
    >>> results = run_grid(train_once, grid)  # doctest: +SKIP
    >>> summarise(results, by="heads", metric="accuracy")  # doctest: +SKIP
    """
    configs = [dict(config) for config in grid]
    for config in configs:
        try:
            inspect.signature(function).bind(**config)
        except TypeError as error:
            raise TypeError(f"grid holds {config}, which {_name(function)} does not take") from error
        _check_json("config", config)
    identity = _identity(function)
    folder = Path(cache_dir("runs") if store is None else store) / function.__name__
    results = []
    for config in progress(configs, function.__name__, show_progress):
        key = digest(identity, _encode(config))
        path = folder / f"{key}.json"
        record = _read(path, key)
        if record is None:
            record = _run(function, config, key)
            text = json.dumps(_encode(record), indent=1, allow_nan=False)
            write_atomically(path, text.encode())
        times = {name: record[name] for name in ("seconds", "cpu_seconds")}
        results.append(times | config | record["result"])
    return results


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
        ``n``; the index is the group, in the order of appearance.

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
    table = pandas.DataFrame([{name: r[name] for name in [*groups, metric]} for r in results])
    values = table.groupby(by if isinstance(by, str) else groups, sort=False, dropna=False)[metric]
    summary = values.agg(["mean", "std", "min", "max", "size"])
    return summary.rename(columns={"std": "sd", "size": "n"})


def _run(function: Callable[..., Mapping[str, Any]], config: dict[str, Any], key: str) -> Result:
    wall, cpu = time.perf_counter(), time.process_time()
    result = function(**config)
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    if not isinstance(result, Mapping):
        raise TypeError(
            f"{function.__name__} returned {type(result).__name__}; expected a dict of metrics"
        )
    _check_json("result", result)
    both = sorted(set(config) & set(result))
    if both:
        raise ValueError(f"result has {', '.join(both)}, which names an argument; rename it")
    cuda = torch.cuda.is_available()
    return {
        "key": key,
        "function": _name(function),
        "config": config,
        "result": dict(result),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(torch.device("cuda" if cuda else "cpu")),
        "profile": profile(),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "derived_attention": derived_attention.__version__,
        },
    }


def _read(path: Path, key: str) -> Result | None:
    """Return the record at `path`; None, with a warning where it is damaged, to make it again."""
    try:
        record = _decode(json.loads(path.read_bytes()))
        if record["key"] != key:
            raise ValueError("its key is another one")
        times = [float(record[name]) for name in ("seconds", "cpu_seconds")]
        return record | {"result": dict(record["result"])} if all(t >= 0 for t in times) else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        message = f"stored run {path.name} is damaged ({error}); it is made again"
        warnings.warn(message, UserWarning, stacklevel=3)
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


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}
    if isinstance(value, Mapping):
        return {key: _encode(value[key]) for key in sorted(value)}
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
    return [
        digest(_trace(function, function.__module__, set(), function.__name__)),
        package_digest(),
        torch.__version__,
        profile(),
    ]


@functools.cache
def package_digest() -> str:
    """Return the SHA-256 of the source of `derived_attention`, as it is installed."""
    folder = Path(derived_attention.__file__).parent
    files = sorted(folder.rglob("*.py"))
    return digest({str(path.relative_to(folder)): path.read_bytes() for path in files})


def _trace(value: Any, page: str, seen: set[int], name: str) -> Any:
    """Return `value` as something `digest` takes, with the source of functions of this page.

    A function or class of another module counts by its name: the package's own source is part of
    the key anyway, and PyTorch's version too.
    """
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if isinstance(value, functools.partial):
        parts = [value.func, list(value.args), value.keywords]
        return ["partial", *(_trace(part, page, seen, name) for part in parts)]
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        full_name = f"{value.__module__}.{value.__qualname__}"
        if value.__module__ != page or id(value) in seen:
            return ["named", full_name]
        seen.add(id(value))
        parts = _class_parts(value) if isinstance(value, type) else _function_parts(value)
        return [full_name, {key: _trace(parts[key], page, seen, key) for key in parts}]
    if isinstance(value, dict):
        return {key: _trace(item, page, seen, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_trace(item, page, seen, name) for item in value]
    try:
        return digest(value)
    except TypeError as error:
        raise TypeError(
            f"the function reads {name}, a {type(value).__qualname__}, which cannot be compared "
            "between sessions; make it inside the function, or pass what it is made from"
        ) from error


def _function_parts(function: types.FunctionType) -> dict[str, Any]:
    """Return source, defaults and closure of a function, and the globals that it reads."""
    try:
        source = inspect.getsource(function)
    except OSError as error:
        raise TypeError(
            f"the source of {_name(function)} is not known; define it in a file or a notebook cell"
        ) from error
    names = _globals_read(function.__code__)
    parts = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        parts[name] = cell.cell_contents
    defaults = {"source": source, "defaults": function.__defaults__ or ()}
    return parts | {f"<{k}>": v for k, v in defaults.items()} | (function.__kwdefaults__ or {})


def _globals_read(code: types.CodeType) -> list[str]:
    reads = ("LOAD_GLOBAL", "LOAD_NAME")
    names = {i.argval for i in dis.get_instructions(code) if i.opname in reads}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_globals_read(constant))
    return sorted(names)


def _class_parts(cls: type) -> dict[str, Any]:
    """Return bases and members: `inspect.getsource` does not find a class of a notebook."""
    parts: dict[str, Any] = {"<bases>": cls.__bases__}
    for name, member in vars(cls).items():
        member = getattr(member, "fget", None) or getattr(member, "__func__", member)
        generated = isinstance(member, types.FunctionType) and (
            member.__code__.co_filename == "<string>"
        )
        if not generated and not name.startswith("__") or name in ("__init__", "__call__"):
            parts[name] = member
    return parts
