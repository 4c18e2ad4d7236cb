"""Offline control: what a `DecisionTransformer` trains on, and what it then does (chapter 12).

`Trajectories` and `action_loss` are what `derived_attention.training.fit.fit` takes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.runtime import check_count, check_seed, evaluating
from derived_attention.tasks.control.data import ControlData, Episodes
from derived_attention.tasks.control.model import DecisionTransformer
from derived_attention.training.fit import Endless, Mean, check_device, mixed_seed

Steps = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # returns, states, actions, times, real


@dataclasses.dataclass(frozen=True)
class Trajectories(Endless):
    """Windows of episodes: `length` steps that follow each other.

    A batch is ``(returns, states, actions, times, real)``: (B, T), (B, T, states), (B, T) int64 or
    (B, T, actions), (B, T) int64 and (B, T) bool. Where an episode ends in a window, steps that are
    not `real` fill it up, at the end, where no real step sees them.

    To train on, windows start at steps drawn at random. What is random in a step of the training
    follows from the seed and its number: 7 epochs of 50 are one epoch of 350. To evaluate, each
    episode is cut into windows that follow each other, so that every action is predicted once.

    Parameters
    ----------
    episodes : Episodes
        A part of a `derived_attention.tasks.control.data.ControlData`.
    length : int
        T, at most that of the model.
    batch_size : int
    steps : int
        How many batches an epoch of training has.

    Raises
    ------
    TypeError, ValueError
        For an argument that cannot work.

    Examples
    --------
    >>> batches = Trajectories(data.train, length=10, batch_size=64)  # doctest: +SKIP
    """

    episodes: Episodes
    length: int
    batch_size: int = 64
    steps: int = 100

    def __post_init__(self) -> None:
        for name in ("length", "batch_size", "steps"):
            check_count(name, getattr(self, name))
        if not isinstance(self.episodes, Episodes):
            found = type(self.episodes).__name__
            raise TypeError(f"episodes is {found}; expected Episodes, such as data.train")

    def draw(self) -> Steps:
        """Return windows from random places."""
        return self._windows(torch.randint(len(self.episodes), (self.batch_size,)))

    def __iter__(self) -> Iterator[Steps]:
        starts = (self.episodes.times % self.length == 0).nonzero().squeeze(1)
        for some in starts.split(self.batch_size):
            yield self._windows(some)

    def _windows(self, starts: Tensor) -> Steps:
        """Return the windows from these places on, each up to the end of its episode."""
        of, offsets = self.episodes, torch.arange(self.length)
        places = (starts[:, None] + offsets).clamp(max=len(of) - 1)  # (B, T)
        times = of.times[starts, None] + offsets
        real = of.times[places] == times  # the next episode starts from 0
        return of.returns[places], of.states[places], of.actions[places], times * real, real

    def check(self, name: str, model: nn.Module) -> None:
        """Raise TypeError or ValueError unless `model` takes such steps, and as many at a time."""
        model, of = check_model(model), self.episodes
        if self.length > model.length:
            found = f"{name} has windows of {self.length} steps"
            raise ValueError(f"{found}; expected at most {model.length}, the length of the model")
        returns, states, actions, times = (
            x[:, None] for x in (of.returns, of.states, of.actions, of.times)
        )
        model.check_steps(returns, states, actions, times, of=f"{name}.")


def action_loss(model: nn.Module, batch: Steps) -> tuple[Tensor, dict[str, Mean]]:
    """Return the cross-entropy of the actions taken, or the squared error of vectors.

    It is a mean over the real steps (and the numbers of a vector), reported as ``"loss"``; for
    discrete actions with the ``"accuracy"``.

    Raises
    ------
    TypeError, ValueError
        For a model that does not act; for a result of another shape.
    """
    model = check_model(model)
    *steps, real = batch
    found, taken = model(*steps), steps[2]
    expected = (*real.shape, model.actions)
    if found.shape != expected:
        raise ValueError(f"model returns shape {tuple(found.shape)}; expected {expected}")
    found, taken, n = found[real], taken[real], int(real.sum())
    if not model.discrete:
        loss = nn.functional.mse_loss(found, taken)
        return loss, {"loss": Mean(loss.item() * n, n)}
    loss = nn.functional.cross_entropy(found, taken)
    correct = int((found.argmax(1) == taken).sum())
    return loss, {"loss": Mean(loss.item() * n, n), "accuracy": Mean(correct, n)}


def rollout(
    model: nn.Module,
    data: ControlData,
    target: float | None = None,
    *,
    episodes: int = 20,
    seed: int = 0,
) -> list[float]:
    """Let `model` act in the environment of `data`; return what each episode brought.

    Each step is told the return that is still to come, the target less the rewards so far. The
    model sees its last ``model.length`` steps, in evaluation mode, and takes the likeliest action.
    All episodes go on together, one call of the model for each step.

    Parameters
    ----------
    model : DecisionTransformer
    data : ControlData
    target : float, optional
        The return that is asked for; default, the expert's.
    episodes : int
    seed : int
        Decides where episodes start. The caller's own random generators are left as they were.

    Returns
    -------
    list of float
        The return of each episode. One is cut after as many steps as the model knows of.

    Raises
    ------
    TypeError, ValueError
        For an argument that cannot work, before any work.

    Examples
    --------
    >>> returns = rollout(model, data, episodes=10)  # doctest: +SKIP
    >>> data.score(sum(returns) / 10)  # doctest: +SKIP
    """
    model = check_player(model, data)
    check_count("episodes", episodes)
    check_seed(seed)
    target = data.expert if target is None else target
    if isinstance(target, bool) or not isinstance(target, int | float):
        raise TypeError(f"target is {target!r}; expected a number")
    if not math.isfinite(target):
        raise ValueError(f"target is {target}; expected a finite number")
    games = _Games(data, target, model.horizon, [mixed_seed(seed, i) for i in range(episodes)])
    device = check_device(model, None)
    with evaluating(model):
        for t in range(model.horizon):
            if not games.playing:
                break
            seen = games.window(max(0, t + 1 - model.length), t + 1)
            games.step(t, model(*(x.to(device) for x in seen))[:, -1].cpu())
    return games.returns


class _Games:
    """Episodes that are played at the same time, and what has been seen and done in each."""

    def __init__(self, data: ControlData, target: float, horizon: int, seeds: list[int]) -> None:
        self.data, self.target, n = data, target, len(seeds)
        self.envs = [data.environment() for _ in seeds]
        self.returns, self.playing = [0.0] * n, list(range(n))
        self.hoped = torch.zeros(n, horizon)
        self.states = torch.zeros(n, horizon, data.states)
        self.actions = torch.zeros(n, horizon, dtype=torch.int64)
        if not data.discrete:
            self.actions = torch.zeros(n, horizon, data.actions)
        for i, (env, seed) in enumerate(zip(self.envs, seeds, strict=True)):
            self.see(i, 0, env.reset(seed=seed)[0])

    def see(self, i: int, t: int, observed: Any) -> None:
        """Note what is seen in episode i before its action t, and what is still hoped for."""
        self.hoped[i, t] = self.target - self.returns[i]
        observed = torch.as_tensor(observed, dtype=torch.float32)
        self.states[i, t] = (observed - self.data.mean) / self.data.sd

    def window(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what a model is called with; the action of the last step is not known, and 0."""
        rows = self.playing
        times = torch.arange(start, stop).expand(len(rows), -1)
        kept = (x[rows, start:stop] for x in (self.hoped, self.states, self.actions))
        return *kept, times  # type: ignore[return-value]

    def step(self, t: int, answers: Tensor) -> None:
        """Act in all episodes that are not over, by the answers (n, actions) of a model."""
        rows = list(self.playing)
        for i, answer in zip(rows, answers, strict=True):
            done = answer.argmax() if self.data.discrete else answer
            self.actions[i, t] = done
            observed, reward, *over, _ = self.envs[i].step(self.data.action(done))
            self.returns[i] += float(reward)
            if any(over):
                self.playing.remove(i)
            elif t + 1 < self.hoped.shape[1]:
                self.see(i, t + 1, observed)


def check_model(model: nn.Module) -> DecisionTransformer:
    """Return a model that acts; raise TypeError if it is another."""
    if not isinstance(model, DecisionTransformer):
        raise TypeError(f"model is {type(model).__name__}; expected a DecisionTransformer")
    return model


def check_player(model: nn.Module, data: ControlData) -> DecisionTransformer:
    """Return a model that can act in the environment of `data`; raise if it cannot."""
    model = check_model(model)
    if not isinstance(data, ControlData):
        raise TypeError(f"data is {type(data).__name__}; expected ControlData, as of load_control")
    for name in ("states", "actions", "discrete"):
        expected, found = getattr(model, name), getattr(data, name)
        if found != expected:
            raise ValueError(f"data.{name} is {found}; expected {expected}, as the model's")
    return model
