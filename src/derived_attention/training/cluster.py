"""Where the runs of a grid are made: in this process, in several, or on the machines of a cluster.

`run_grid` takes a number of local processes, or one of these objects:
whatever has ``slots``, ``submit`` and ``stop``. Which runs there are, what is stored and what is
left to do is its business alone, so results, keys and files are the same wherever a run was made.
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

from derived_attention.runtime import check_count, current_profile, digest
from derived_attention.training.identity import PACKAGE


class Workers(Protocol):
    """Who makes runs.

    Attributes
    ----------
    slots : int
        How many runs are made at the same time.
    """

    @property
    def slots(self) -> int: ...  # noqa: D102

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Begin ``call(*arguments)``."""

    def stop(self) -> None:
        """Give up what has begun and has not ended."""


class Here:
    """The process that asks: a run has ended when `submit` returns."""

    slots = 1

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Do ``call(*arguments)``. What is no error, such as the stop button, is not caught."""
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def stop(self) -> None:
        """Do nothing: nothing goes on."""


class Processes:
    """Processes of this machine, each with one thread of PyTorch; they wait for more for 10 s.

    They are loky's, which carry a function over by value where no module has it: one that is
    defined in a notebook, or in a script without ``if __name__ == "__main__"``.

    Parameters
    ----------
    slots : int
        How many.
    """

    def __init__(self, slots: int) -> None:
        check_count("workers", slots)
        self.slots, self._begun = slots, False

    def _executor(self) -> Any:
        from joblib.externals.loky import get_reusable_executor  # a new one where the last broke

        reuse = "auto" if self._begun else False  # a process of before may have older modules
        self._begun = True
        return get_reusable_executor(
            max_workers=self.slots,
            reuse=reuse,
            kill_workers=not reuse,
            env={"OMP_NUM_THREADS": "1"},
            initializer=_end_with,
            initargs=(os.getpid(),),
        )

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Begin ``call(*arguments)`` in a process that has nothing to do."""
        return self._executor().submit(there, _here(), call, *arguments)

    def stop(self) -> None:
        """End the processes."""
        self._executor().shutdown(kill_workers=True)


class Ray:
    """The machines of a Ray cluster; needs the extra ``cluster``.

    Each run is a task of its own. Ray finds a machine that has room for it. Where a worker dies, by
    a signal, for want of memory, or with its machine, the task is tried again; where the function
    raises, it is not. The driver writes the results, so the machines need no common disk; they need
    this package, the modules that the function lies in, and the same release of PyTorch.

    Parameters
    ----------
    address : str, optional
        As `ray.init` takes it: ``"auto"`` for the cluster that this machine belongs to. By default
        this machine alone, or what ``RAY_ADDRESS`` says. A connection that there is, is used.
    num_cpus, num_gpus : float
        What a run takes. A fraction shares: with 0.25 four runs are made on a GPU.
    retries : int
        How often a run is tried again whose worker died.

    Raises
    ------
    ModuleNotFoundError
        If Ray is not installed.
    ValueError
        If the cluster has not what one run takes.

    Examples
    --------
    >>> workers = Ray("auto", num_gpus=1)  # doctest: +SKIP
    >>> run_grid(train_once, grid, workers=workers)  # doctest: +SKIP
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        retries: int = 2,
    ) -> None:
        import ray

        if not ray.is_initialized():
            ray.init(address=address, include_dashboard=False if address is None else None)
        self._ray = ray
        self._needs = {"CPU": num_cpus, "GPU": num_gpus}
        self._running: dict[Future[Any], Any] = {}
        self._do = ray.remote(there).options(
            num_cpus=num_cpus, num_gpus=num_gpus, max_retries=retries
        )
        if not self.slots:
            have = {name: ray.cluster_resources().get(name, 0) for name in self._needs}
            raise ValueError(f"a run takes {self._needs}, and the cluster has {have}")

    @property
    def slots(self) -> int:
        """How many runs the machines have room for that the cluster has now."""
        have = self._ray.cluster_resources()
        return min(int(have.get(name, 0) / need) for name, need in self._needs.items() if need)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Give Ray ``call(*arguments)`` to do."""
        task = self._do.remote(_here(), call, *arguments)
        future = task.future()
        self._running[future] = task
        future.add_done_callback(self._running.pop)
        return future

    def stop(self) -> None:
        """Cancel what has begun."""
        for task in list(self._running.values()):
            self._ray.cancel(task, force=True)


def workers(asked: int | Workers) -> Workers:
    """Return who makes the runs: this process for 1, as many processes for a larger number.

    Raises
    ------
    TypeError, ValueError
        For what is neither an integer from 1 nor has ``slots``, ``submit`` and ``stop``.
    """
    if all(hasattr(asked, name) for name in ("slots", "submit", "stop")):
        return asked  # type: ignore[return-value]
    check_count("workers", asked)  # type: ignore[arg-type]
    return Here() if asked == 1 else Processes(asked)  # type: ignore[arg-type]


def _end_with(driver: int) -> None:
    """Let this process end when the driver has: killed, it tells nobody."""

    def watch() -> None:
        while os.getppid() == driver:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _here() -> dict[str, str]:
    """Return what must be the same where a run is made."""
    release = torch.__version__.partition("+")[0]  # a GPU's machine has another build of it
    code = digest(sorted(PACKAGE.texts.items()))
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    return {
        "profile": current_profile(),
        "default dtype": dtype,
        "release of PyTorch": release,
        "package's code": code,
    }


def there(wanted: dict[str, str], call: Callable[..., Any], *arguments: Any) -> Any:
    """Do ``call(*arguments)`` in another process as the first would: same profile, one thread.

    Raises
    ------
    RuntimeError
        If this process has another release of PyTorch, or other code: its results would be stored
        under a key that they do not belong to.
    """
    os.environ["DERIVED_ATTENTION_PROFILE"] = wanted["profile"]
    os.environ["DERIVED_ATTENTION_PROGRESS"] = "0"  # nobody sees this process's bars
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, wanted["default dtype"]))
    found = _here()
    for name in wanted:
        if found[name] != wanted[name]:
            raise RuntimeError(
                f"the worker's {name} is {found[name]}; expected {wanted[name]}, as the driver's"
            )
    try:
        return call(*arguments)
    except Exception as error:
        from joblib.externals.loky.backend.reduction import dump  # as loky sends it

        try:
            sent = io.BytesIO()
            dump(error, sent)
            ForkingPickler.loads(sent.getvalue())
        except Exception:  # it could be sent and not be read, and would end all workers
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        raise
