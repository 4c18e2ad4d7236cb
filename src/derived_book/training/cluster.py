"""Workers that execute the runs of a grid: this process, local processes, or a Ray cluster.

`run_grid` takes a number of local processes, or an object with the interface of `Workers`. It alone
decides which runs are made and stored, so results, keys and files do not depend on the workers.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch

from derived_book.runtime import check_count, current_profile, digest
from derived_book.training.run_key import PACKAGE


class Workers(Protocol):
    """What executes runs."""

    @property
    def slots(self) -> int:
        """The number of runs that are executed at the same time."""

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Start ``call(*arguments)``."""

    def stop(self) -> None:
        """Cancel the calls that have not finished."""


class ThisProcess:
    """The calling process: a run has finished when `submit` returns."""

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
        """Do nothing: every call has finished."""


class Processes:
    """Local processes of loky, each with one thread of PyTorch; an idle one ends after 10 s.

    loky sends a function by value if it cannot be imported: one that is defined in a notebook, or
    in a script without ``if __name__ == "__main__"``.

    Parameters
    ----------
    slots : int
        The number of processes.
    """

    def __init__(self, slots: int) -> None:
        check_count("workers", slots)
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
        return self._executor().submit(run_in_worker, _environment(), call, *arguments)

    def stop(self) -> None:
        """End the processes."""
        self._executor().shutdown(kill_workers=True)


class Ray:
    """The machines of a Ray cluster; needs the extra ``cluster``.

    Each run is a Ray task. If a worker dies, by a signal, for lack of memory, or with its machine,
    its task is retried; if the function raises, it is not. The driver writes the results, so the
    machines need no shared disk; they need this package, the module that defines the function, and
    the same release of PyTorch.

    Parameters
    ----------
    address : str, optional
        As in `ray.init`: ``"auto"`` for the cluster that this machine belongs to. By default
        this machine alone, or ``RAY_ADDRESS``. An existing connection is used.
    num_gpus : float
        The GPUs of one run, beside one CPU. Fractions share a GPU: with 0.25, four runs share one.
    retries : int
        The number of times that a run whose worker died is retried.

    Raises
    ------
    ModuleNotFoundError
        If Ray is not installed.
    ValueError
        If the cluster lacks the resources of one run.

    Examples
    --------
    >>> workers = Ray("auto", num_gpus=1)  # doctest: +SKIP
    >>> run_grid(train_once, grid, workers=workers)  # doctest: +SKIP
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        num_gpus: float = 0,
        retries: int = 2,
    ) -> None:
        import ray

        if not ray.is_initialized():
            ray.init(address=address, include_dashboard=False if address is None else None)
        self._ray = ray
        self._required = {"CPU": 1, "GPU": num_gpus}
        self._running: dict[Future[Any], Any] = {}
        self._remote = ray.remote(run_in_worker).options(
            num_cpus=1, num_gpus=num_gpus, max_retries=retries
        )
        if not self.slots:
            available = {name: ray.cluster_resources().get(name, 0) for name in self._required}
            raise ValueError(
                f"a run requires {self._required}; the cluster has only {available} in total"
            )

    @property
    def slots(self) -> int:
        """The number of runs that the machines now in the cluster can execute at once."""
        total = self._ray.cluster_resources()
        return min(int(total.get(name, 0) / n) for name, n in self._required.items() if n)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Start ``call(*arguments)`` as a Ray task."""
        task = self._remote.remote(_environment(), call, *arguments)
        future = task.future()
        self._running[future] = task
        future.add_done_callback(self._running.pop)
        return future

    def stop(self) -> None:
        """Cancel the tasks that have not finished."""
        for task in list(self._running.values()):
            self._ray.cancel(task, force=True)


def workers(request: int | Workers) -> Workers:
    """Return this process for 1, that many local processes for a larger number, else `request`.

    Raises
    ------
    TypeError, ValueError
        If `request` is neither an integer >= 1 nor an object like `Workers`.
    """
    if not isinstance(request, int) and all(
        hasattr(request, name) for name in ("slots", "submit", "stop")
    ):
        return request
    check_count("workers", request)  # type: ignore[arg-type]
    return ThisProcess() if request == 1 else Processes(request)  # type: ignore[arg-type]


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


def run_in_worker(driver: dict[str, str], call: Callable[..., Any], *arguments: Any) -> Any:
    """Execute ``call(*arguments)`` in a worker, with the driver's profile and one thread.

    Raises
    ------
    RuntimeError
        If this process has another release of PyTorch, or other code, than the environment
        `driver`: its results would be stored under the wrong key.
    """
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
