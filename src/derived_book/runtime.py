"""The set-up of a page (seed, device, profile), progress bars, digests, and checks of arguments.

Environment variables that a reader may set:

- ``DERIVED_ATTENTION_PROFILE``: ``quick``, ``medium`` or ``full``;
- ``DERIVED_ATTENTION_PROGRESS``: ``0`` for no progress bars, ``1`` for bars everywhere;
- ``OMP_NUM_THREADS``: the number of CPU threads of PyTorch;
- ``DERIVED_ATTENTION_RUNS``, ``DERIVED_ATTENTION_SERIES``, ``DERIVED_ATTENTION_TEXT``: the folders
  of stored runs and of downloads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
PROFILES = ("quick", "medium", "full")
_requested_profile: str | None = None  # by the last call of `start`
_OFFERED = torch.get_num_threads()  # PyTorch's default, before `start` changes it
counted = Counter(steps=0)  # training steps of this process, which `run_grid` records


@dataclasses.dataclass(frozen=True)
class Run:
    """The device, profile and seed of a page, as `start` returns them.

    Attributes
    ----------
    device : torch.device
        CUDA if there is a GPU, otherwise the CPU.
    profile : str
        ``"quick"`` (a chapter in about a minute on a CPU), ``"medium"`` (more seeds and longer
        training: minutes on a GPU) or ``"full"`` (the papers' settings: hours).
    seed : int
    """

    device: torch.device
    profile: str
    seed: int

    def pick(self, *, quick: T, full: T, medium: T | None = None) -> T:
        """Return the value for this run's profile; `medium` defaults to `quick`."""
        values = {"quick": quick, "medium": quick if medium is None else medium, "full": full}
        return values[self.profile]


def start(seed: int = 0, profile: str | None = None) -> Run:
    """Seed every generator, choose device, profile and threads, and print them in one line.

    PyTorch gets one thread unless ``OMP_NUM_THREADS`` is set: the models of this book are small,
    and two threads that wait for each other on busy cores are many times slower than one.

    Parameters
    ----------
    seed : int
        Passed to `seed_everything`.
    profile : str, optional
        ``"quick"``, ``"medium"`` or ``"full"``; overrides ``DERIVED_ATTENTION_PROFILE``. By
        default ``"quick"`` on a CPU and ``"medium"`` on a GPU: both finish within minutes.

    Returns
    -------
    Run

    Raises
    ------
    TypeError, ValueError
        If `seed` is not an integer in [0, 2³²), or `profile` is unknown.

    Examples
    --------
    >>> run = start(seed=0)  # doctest: +SKIP
    cpu · 1 thread · profile quick · torch 2.13.0
    >>> epochs = run.pick(quick=30, medium=60, full=400)  # doctest: +SKIP
    """
    global _requested_profile
    if profile is not None:
        _check_profile("profile", profile)
    _requested_profile = profile
    run = Run(torch.device("cuda" if torch.cuda.is_available() else "cpu"), current_profile(), seed)
    seed_everything(seed)
    version = torch.__version__.partition("+")[0]
    device = "cpu" if run.device.type == "cpu" else f"cuda ({device_name(run.device)})"
    print(f"{device} · {_set_threads()} · profile {run.profile} · torch {version}")
    return run


def _set_threads() -> str:
    """Set PyTorch to one thread unless ``OMP_NUM_THREADS`` is set; describe the number."""
    if "OMP_NUM_THREADS" in os.environ:
        threads, note = torch.get_num_threads(), ""
    else:
        torch.set_num_threads(threads := 1)
        note = f" of {_OFFERED} (OMP_NUM_THREADS={_OFFERED} takes all)" if _OFFERED > 1 else ""
    return f"{threads} thread{'' if threads == 1 else 's'}{note}"


def current_profile() -> str:
    """Return the profile of `start` or of ``DERIVED_ATTENTION_PROFILE``, or the default.

    Raises
    ------
    ValueError
        If ``DERIVED_ATTENTION_PROFILE`` is not ``quick``, ``medium`` or ``full``.
    """
    if _requested_profile is not None:
        return _requested_profile
    name = "DERIVED_ATTENTION_PROFILE"
    if chosen := os.environ.get(name, ""):
        _check_profile(name, chosen)
        return chosen
    return "medium" if torch.cuda.is_available() else "quick"


def _check_profile(name: str, chosen: str) -> None:
    if chosen not in PROFILES:
        raise ValueError(f"{name} is {chosen!r}; expected 'quick', 'medium' or 'full'")


def device_name(device: torch.device) -> str:
    """Return ``"cpu"``, or the name of the graphics card."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type)


def check_seed(seed: int) -> None:
    """Raise TypeError or ValueError unless `seed` is an integer in [0, 2³²)."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise TypeError(f"seed is {seed!r}; expected an integer")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; expected 0 <= seed < 2**32")


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch (every device).

    Call it just before you build a model: the initial weights are drawn from PyTorch's generator.
    Errors are those of `check_seed`.
    """
    check_seed(seed)
    random.seed(int(seed))
    np.random.seed(int(seed))  # noqa: NPY002  (libraries on the pages draw from the global one)
    torch.manual_seed(int(seed))


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Put a model in evaluation mode, without gradients, for the duration of the block.

    Afterwards, even if the block raises, each of its modules is back in its previous mode.

    Examples
    --------
    >>> with evaluating(model):  # doctest: +SKIP
    ...     logits = model(x)
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            yield model.eval()
    finally:
        for module, mode in modes:
            module.training = mode


class _Checked(threading.local):  # torch.compile can trace it, unlike a ContextVar
    values = False


_checked = _Checked()


@contextlib.contextmanager
def skip_range_checks() -> Iterator[None]:
    """Skip the checks of ranges on a GPU in a with block, because each waits for the device.

    Other threads are not affected.
    """
    before, _checked.values = _checked.values, True
    try:
        yield
    finally:
        _checked.values = before


def may_ask(x: torch.Tensor) -> bool:
    """Return whether the range of x is to be checked: on a GPU not in `skip_range_checks`."""
    return x.device.type == "cpu" or not _checked.values


def shows_progress() -> bool:
    """Return whether progress bars are shown: in a terminal and in a notebook.

    ``DERIVED_ATTENTION_PROGRESS`` overrides this. The build of the book sets it to ``0``, because
    a page that is being executed looks like a notebook, and a bar would remain in its output.

    Raises
    ------
    ValueError
        If ``DERIVED_ATTENTION_PROGRESS`` is neither ``0`` nor ``1``.
    """
    chosen = os.environ.get("DERIVED_ATTENTION_PROGRESS", "")
    if chosen not in ("", "0", "1"):
        raise ValueError(f"DERIVED_ATTENTION_PROGRESS is {chosen!r}; expected '0' or '1'")
    if chosen:
        return chosen == "1"
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel") or (sys.stderr is not None and sys.stderr.isatty())


_bar: Any = None  # the bar on the screen


@contextlib.contextmanager
def progress(steps: Iterable[T], label: str, show: bool = True) -> Iterator[Iterable[T]]:
    """Show a progress bar over `steps`, which is removed at the end, even after an error.

    Inside another bar there is no second one, whose lines a notebook without ipywidgets would
    keep; the outer bar reports the progress of the inner steps.

    Parameters
    ----------
    steps : iterable
    label : str
        The text in front of the bar.
    show : bool
        False for no bar; True for a bar if `shows_progress` returns True.

    Yields
    ------
    iterable
        The same steps.

    Examples
    --------
    >>> with progress(range(3), "epochs") as epochs:
    ...     for epoch in epochs:
    ...         pass
    """
    global _bar
    if not (show and shows_progress()):
        yield steps
        return
    if _bar is not None:
        yield _report_steps(steps, label, _bar)
        return
    with warnings.catch_warnings():
        # Without ipywidgets tqdm falls back to a text bar; its warning would stay in the page.
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
    try:
        with tqdm(steps, desc=label, leave=False) as _bar:
            yield _bar
    finally:
        _bar = None


def _report_steps(steps: Iterable[T], label: str, bar: Any) -> Iterator[T]:
    """Yield the steps; show their number behind `bar`, at most five times a second."""
    total = f"/{len(steps)}" if isinstance(steps, Sized) else ""
    updated = 0.0
    for done, step in enumerate(steps):
        if time.monotonic() - updated > 0.2:
            bar.set_postfix_str(f"{label} {done}{total}")
            updated = time.monotonic()
        yield step
    bar.set_postfix_str("", refresh=False)


def digest(*values: Any) -> str:
    """Return the SHA-256 of tensors, arrays, numbers, text, and containers or dataclasses of them.

    It is the same in every process and on every device. It depends on types (1 and 1.0 differ) and
    on the order of a dict. A value of any other type raises TypeError.
    """
    sha = hashlib.sha256()
    for value in values:
        _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        sha.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        sha.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        sha.update(f"array {value.dtype} {value.shape};".encode() + value.tobytes())
    elif isinstance(value, dict):
        sha.update(f"dict {len(value)};".encode())
        for key, item in value.items():
            _feed(sha, key)
            _feed(sha, item)
    elif isinstance(value, list | tuple):
        sha.update(f"list {len(value)};".encode())
        for item in value:
            _feed(sha, item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        _feed(sha, [type(value).__qualname__, fields])
    elif value is None or isinstance(
        value, str | bytes | bool | int | float | complex | np.generic | torch.device | torch.dtype
    ):
        text = repr(value).encode()
        sha.update(f"{type(value).__name__} {len(text)};".encode() + text)
    else:
        raise TypeError(f"cannot take the digest of {type(value).__qualname__}")


def make_folder(folder: Path, instead: str) -> None:
    """Create a folder; raise OSError, with the advice `instead`, if no file can be written to it.

    This is tested by writing a file, because permissions are not reliable on every file system.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(
            f"{folder} cannot be written ({error.strerror}); expected a folder for new files: "
            f"{instead}"
        ) from error
