"""What every page starts with: one seed, one device, one profile; and safe files for long runs.

Environment variables that a reader may set:

- ``DERIVED_ATTENTION_PROFILE``: ``quick`` or ``full``;
- ``DERIVED_ATTENTION_PROGRESS``: ``0`` for no progress bars, ``1`` for bars everywhere;
- ``DERIVED_ATTENTION_RUNS``, ``DERIVED_ATTENTION_SERIES``, ``DERIVED_ATTENTION_IMAGES``,
  ``DERIVED_ATTENTION_TEXT``: where runs and downloads are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import random
import sys
import uuid
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Run:
    """Where and how a page runs: what `start` found out.

    Attributes
    ----------
    device : torch.device
        CUDA where there is a GPU, otherwise the CPU.
    profile : str
        ``"quick"`` (a chapter in about a minute on a CPU) or ``"full"``.
    seed : int
        The seed that `start` was given.
    """

    device: torch.device
    profile: str
    seed: int

    def pick(self, *, quick: T, full: T) -> T:
        """Return the value that belongs to this run's profile."""
        return full if self.profile == "full" else quick


def start(seed: int = 0) -> Run:
    """Seed every generator, choose device and profile, and print both in one line.

    Parameters
    ----------
    seed : int
        Passed to `seed_everything`.

    Returns
    -------
    Run

    Raises
    ------
    TypeError, ValueError
        For a seed that is not an integer in [0, 2³²), or a ``DERIVED_ATTENTION_PROFILE`` that
        is neither ``quick`` nor ``full``.

    Examples
    --------
    >>> run = start(seed=0)  # doctest: +SKIP
    cpu · 2 threads · profile quick · torch 2.13.0
    >>> epochs = run.pick(quick=30, full=400)  # doctest: +SKIP
    """
    run = Run(torch.device("cuda" if torch.cuda.is_available() else "cpu"), profile(), seed)
    seed_everything(seed)
    threads = torch.get_num_threads()
    where = "cpu" if run.device.type == "cpu" else f"cuda ({device_name(run.device)})"
    version = torch.__version__.partition("+")[0]
    plural = "" if threads == 1 else "s"
    print(f"{where} · {threads} thread{plural} · profile {run.profile} · torch {version}")
    return run


def profile() -> str:
    """Return ``quick`` or ``full``: ``DERIVED_ATTENTION_PROFILE``, or ``full`` only with CUDA.

    Raises
    ------
    ValueError
        If ``DERIVED_ATTENTION_PROFILE`` is set to anything else.
    """
    chosen = os.environ.get("DERIVED_ATTENTION_PROFILE", "")
    if not chosen:
        return "full" if torch.cuda.is_available() else "quick"
    if chosen not in ("quick", "full"):
        raise ValueError(f"DERIVED_ATTENTION_PROFILE is {chosen!r}; expected 'quick' or 'full'")
    return chosen


def device_name(device: torch.device) -> str:
    """Return ``"cpu"``, or the name of the graphics card."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type)


def check_count(name: str, count: int) -> None:
    """Raise TypeError or ValueError, naming the argument, unless `count` is an integer >= 1."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name} is {count!r}; expected an integer")
    if count < 1:
        raise ValueError(f"{name} is {count}; expected at least 1")


def check_seed(seed: int) -> None:
    """Raise TypeError or ValueError unless `seed` is an integer in [0, 2³²)."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise TypeError(f"seed is {seed!r}; expected an integer")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; expected 0 <= seed < 2**32")


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch (every device).

    Call it just before you build a model: the initial weights are drawn from PyTorch's generator.

    Raises
    ------
    TypeError, ValueError
        For a seed that is not an integer in [0, 2³²).
    """
    check_seed(seed)
    random.seed(int(seed))
    np.random.seed(int(seed))  # noqa: NPY002  (libraries on the pages draw from the global one)
    torch.manual_seed(int(seed))


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Put a model in evaluation mode, without gradients, as long as the block runs.

    At the end, also when an error ends it, each of its modules is in the mode that it was in.

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


def progress_wanted() -> bool:
    """Say whether anybody can see a progress bar.

    ``DERIVED_ATTENTION_PROGRESS`` decides where it is set. Otherwise a bar is wanted in a terminal
    and in a notebook. A page that is being built looks like a notebook, so the build sets the
    variable to ``0``: a bar would stay behind in the page.

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


_bar_shown = False


@contextlib.contextmanager
def progress(steps: Iterable[T], label: str, show: bool = True) -> Iterator[Iterable[T]]:
    """Give `steps` a progress bar that vanishes at the end, also when an error ends it.

    A bar inside another one is not shown: a notebook without ipywidgets would keep its lines.

    Parameters
    ----------
    steps : iterable
    label : str
        The words in front of the bar.
    show : bool
        False for no bar. True shows one only where `progress_wanted` says so.

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
    global _bar_shown
    if not (show and progress_wanted()) or _bar_shown:
        yield steps
        return
    with warnings.catch_warnings():
        # Without ipywidgets tqdm falls back to a text bar, which serves; its warning would stay.
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
    _bar_shown = True
    try:
        with tqdm(steps, desc=label, leave=False) as bar:
            yield bar
    finally:
        _bar_shown = False


def cache_dir(kind: str) -> Path:
    """Return the folder that keeps `kind` (``runs``, ``series``) between sessions.

    ``DERIVED_ATTENTION_<KIND>`` where it is set, otherwise ``derived-attention/<kind>`` in the
    user's cache folder (``XDG_CACHE_HOME`` where it is set). The folder is not created here.
    """
    chosen = os.environ.get(f"DERIVED_ATTENTION_{kind.upper()}", "")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification ignores relative paths
        base = os.environ.get("LOCALAPPDATA", "") if os.name == "nt" else ""
        home_cache = "Library/Caches" if sys.platform == "darwin" else ".cache"
        base = base or str(Path.home() / home_cache)
    return Path(base) / "derived-attention" / kind


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader, or a crash, sees the old file or the new one.

    The bytes go to a temporary file in the same folder (created when absent), are flushed to the
    disk, and take the place of `path` in one step.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def digest(*values: Any) -> str:
    """Return the SHA-256 of tensors, arrays, numbers, text, and containers or dataclasses of them.

    Equal values give equal digests in every process and on every device.

    Raises
    ------
    TypeError
        For a value of any other type.
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
