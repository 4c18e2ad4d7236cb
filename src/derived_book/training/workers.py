"""Who executes the runs of a grid: this process, local processes, or any executor.

`run_grid` alone decides which runs are made and stored, so results, keys and files do not depend on
who executes them.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from derived_attention.common.checks import check_count
from derived_book.runtime import current_profile, digest
from derived_book.training.run_key import PACKAGE

_ALONE = threading.Lock()  # of a run: the threads of a process share its random generators


class Crew:
    """The calling process, which finishes a run before `submit` returns.

    Attributes
    ----------
    slots : int
        The number of runs that are executed at the same time.
    """

    slots = 1

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Execute ``call(*arguments)``; KeyboardInterrupt is not caught."""
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def stop(self) -> None:
        """Cancel the runs that have not finished: here there are none."""


class _Given(Crew):
    """An executor that the caller has made, and shuts down."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.slots = getattr(executor, "_max_workers", None) or os.cpu_count() or 1

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Start ``call(*arguments)`` where the executor has a free worker."""
        return self.executor.submit(run_in_worker, os.getpid(), _environment(), call, *arguments)


class _Processes(Crew):
    """Local processes of loky, each with one thread of PyTorch; an idle one ends after 10 s.

    loky sends a function by value if it cannot be imported: one that is defined in a notebook, or
    in a script without ``if __name__ == "__main__"``.
    """

    def __init__(self, slots: int) -> None:
        self.slots, self._started = slots, False

    def _executor(self) -> Any:
        from joblib.externals.loky import get_reusable_executor  # replaces a broken executor

        reuse = "auto" if self._started else False  # older processes may have older modules
        self._started = True
        return get_reusable_executor(
            max_workers=self.slots,
            reuse=reuse,
            kill_workers=not reuse,
            env={"OMP_NUM_THREADS": "1"},
            initializer=_exit_with,
            initargs=(os.getpid(),),
        )

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Start ``call(*arguments)`` in an idle process."""
        return self._executor().submit(run_in_worker, os.getpid(), _environment(), call, *arguments)

    def stop(self) -> None:
        """End the processes."""
        self._executor().shutdown(kill_workers=True)


def crew_of(workers: int | Executor) -> Crew:
    """Return the crew: this process for 1, local processes for a larger number, or an executor.

    Raises
    ------
    TypeError, ValueError
        If `workers` is neither an integer >= 1 nor a `concurrent.futures.Executor`.
    """
    if isinstance(workers, Executor):
        return _Given(workers)
    check_count("workers", workers, 1)
    return Crew() if workers == 1 else _Processes(workers)


def _exit_with(driver: int) -> None:
    """End this process when the driver has ended, even if it was killed."""

    def watch() -> None:
        while os.getppid() == driver:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _environment() -> dict[str, str]:
    """Return what must be equal in the driver and in a worker."""
    return {
        "profile": current_profile(),
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        # without the build, which differs between machines with and without a GPU
        "release of PyTorch": torch.__version__.partition("+")[0],
        "package's code": digest(sorted(PACKAGE.texts.items())),
    }


def run_in_worker(
    pid: int, driver: dict[str, str], call: Callable[..., Any], *arguments: Any
) -> Any:
    """Execute ``call(*arguments)`` in a worker, with the driver's profile and one thread.

    A thread of the driver, whose process has the number `pid`, executes it as it is. The threads of
    one process take turns.

    Raises
    ------
    RuntimeError
        If this process has another release of PyTorch, or other code, than the environment
        `driver`: its results would be stored under the wrong key.
    """
    if os.getpid() == pid:
        with _ALONE:
            return call(*arguments)
    os.environ["DERIVED_ATTENTION_PROFILE"] = driver["profile"]
    os.environ["DERIVED_ATTENTION_PROGRESS"] = "0"  # the output of a worker is not shown
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, driver["default dtype"]))
    worker = _environment()
    for name, expected in driver.items():
        if worker[name] != expected:
            raise RuntimeError(
                f"the worker's {name} is {worker[name]}; expected {expected}, as in the driver"
            )
    try:
        with _ALONE:
            return call(*arguments)
    except Exception as error:
        from joblib.externals.loky.backend.reduction import dump  # loky's own serialisation

        try:
            buffer = io.BytesIO()
            dump(error, buffer)
            ForkingPickler.loads(buffer.getvalue())
        except Exception:  # an error that cannot be unpickled would end all workers
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        raise
