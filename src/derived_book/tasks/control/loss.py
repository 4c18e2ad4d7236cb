"""Offline control: batches of episodes, the loss of actions, and episodes that a model plays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from derived_book.runtime import check_count, check_seed, evaluating
from derived_book.tasks.checks import check_length, check_number, check_output, check_type
from derived_book.tasks.control.data import ControlData, Episodes
from derived_book.tasks.control.model import DecisionTransformer
from derived_book.tasks.supervised import cross_entropy
from derived_book.training.fit import Endless, Mean, check_device, mean_of, mixed_seed

Steps = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # returns, states, actions, times, real


@dataclasses.dataclass(frozen=True)
class Trajectories(Endless):
    """Windows of episodes: `length` consecutive steps.

    A batch is ``(returns, states, actions, times, real)``: (B, T), (B, T, states), (B, T) int64 or
    (B, T, actions), (B, T) int64 and (B, T) bool. Where an episode ends within a window, steps that
    are not `real` fill its end, to which no real step attends. In training, windows start at random
    steps. In evaluation, each episode is cut into consecutive windows, so that every action is
    predicted once.

    Parameters
    ----------
    episodes : Episodes
        A part of a `derived_book.tasks.control.data.ControlData`.
    length : int
        T, at most that of the model.
    batch_size, steps : int
        Windows in a batch, and batches in an epoch of training.
    """

    episodes: Episodes
    length: int
    batch_size: int = 64
    steps: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type("episodes", self.episodes, Episodes, "Episodes, such as data.train")

    def draw(self) -> Steps:
        """Return windows from random places."""
        return self._windows(torch.randint(len(self.episodes), (self.batch_size,)))

    def __iter__(self) -> Iterator[Steps]:
        starts = (self.episodes.times % self.length == 0).nonzero().squeeze(1)
        yield from map(self._windows, starts.split(self.batch_size))

    def _windows(self, starts: Tensor) -> Steps:
        """Return the windows that begin at `starts` (B,), each up to the end of its episode."""
        e, offsets = self.episodes, torch.arange(self.length)
        places = (starts[:, None] + offsets).clamp(max=len(e) - 1)  # (B, T)
        times = e.times[starts, None] + offsets
        real = e.times[places] == times  # the next episode starts from 0
        return e.returns[places], e.states[places], e.actions[places], times * real, real

    def check(self, name: str, model: nn.Module) -> None:
        """Raise TypeError or ValueError unless `model` takes such steps, and as many at a time."""
        model, e = (
            check_type("model", model, DecisionTransformer, "a DecisionTransformer"),
            self.episodes,
        )
        check_length(name, f"windows of {self.length} steps", self.length, model)
        returns, states, actions, times = (
            x[:, None] for x in (e.returns, e.states, e.actions, e.times)
        )
        model.check_steps(returns, states, actions, times, of=f"{name}.")


def action_loss(model: nn.Module, batch: Steps) -> tuple[Tensor, dict[str, Mean]]:
    """Return the cross-entropy of the actions taken, or the squared error of vectors.

    It is a mean over the real steps (and the numbers of a vector), reported as ``"loss"``; for
    discrete actions with the ``"accuracy"``. A model other than a `DecisionTransformer` raises
    TypeError.
    """
    model = check_type("model", model, DecisionTransformer, "a DecisionTransformer")
    *steps, real = batch
    outputs, taken = model(*steps), steps[2]
    check_output(outputs, (*real.shape, model.actions))
    outputs, taken, n = outputs[real], taken[real], int(real.sum())
    if model.discrete:
        return cross_entropy(outputs, taken)
    loss = nn.functional.mse_loss(outputs, taken)
    return loss, {"loss": mean_of(loss, n)}


def rollout(
    model: nn.Module,
    data: ControlData,
    target: float | None = None,
    *,
    episodes: int = 20,
    seed: int = 0,
) -> list[float]:
    """Let `model` act in the environment of `data`; return the return of each episode.

    The return-to-go of a step is the target less the rewards so far. The model reads its last
    ``model.length`` steps, in evaluation mode, and takes the likeliest action. All episodes are
    played at the same time, with one call of the model for each step. An episode is cut after
    ``model.horizon`` steps.

    Parameters
    ----------
    model : DecisionTransformer
    data : ControlData
    target : float, optional
        The return asked for; default, that of the expert.
    episodes : int
    seed : int
        Of the starts of the episodes. The global random generators are left as they were.
    """
    model = check_player(model, data)
    check_count("episodes", episodes)
    check_seed(seed)
    target = data.expert if target is None else target
    check_number("target", target)
    games = _Games(data, target, model.horizon, [mixed_seed(seed, i) for i in range(episodes)])
    device = check_device(model, None)
    with evaluating(model):
        for t in range(model.horizon):
            if not games.playing:
                break
            steps = games.window(max(0, t + 1 - model.length), t + 1)
            games.step(t, model(*(x.to(device) for x in steps))[:, -1].cpu())
    return games.returns


class _Games:
    """Episodes that are played at the same time, with their states and actions so far."""

    def __init__(self, data: ControlData, target: float, horizon: int, seeds: list[int]) -> None:
        self.data, self.target, n = data, target, len(seeds)
        self.envs = [data.environment() for _ in seeds]
        self.returns, self.playing = [0.0] * n, list(range(n))
        self.to_go = torch.zeros(n, horizon)
        self.states = torch.zeros(n, horizon, data.states)
        self.actions = torch.zeros(n, horizon, data.actions)
        if data.discrete:
            self.actions = torch.zeros(n, horizon, dtype=torch.int64)
        for i, (env, seed) in enumerate(zip(self.envs, seeds, strict=True)):
            self.observe(i, 0, env.reset(seed=seed)[0])

    def observe(self, i: int, t: int, observed: Any) -> None:
        """Store the observation and the return-to-go of episode i before its action t."""
        self.to_go[i, t] = self.target - self.returns[i]
        observed = torch.as_tensor(observed, dtype=torch.float32)
        self.states[i, t] = (observed - self.data.mean) / self.data.sd

    def window(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the arguments of a model; the action of the last step is still unknown, and 0."""
        rows = self.playing
        times = torch.arange(start, stop).expand(len(rows), -1)
        steps = (x[rows, start:stop] for x in (self.to_go, self.states, self.actions))
        return *steps, times  # type: ignore[return-value]

    def step(self, t: int, outputs: Tensor) -> None:
        """Act in all episodes that are not over, by the outputs (n, actions) of a model."""
        for i, output in zip(list(self.playing), outputs, strict=True):
            action = output.argmax() if self.data.discrete else output
            self.actions[i, t] = action
            observed, reward, *over, _ = self.envs[i].step(self.data.action(action))
            self.returns[i] += float(reward)
            if any(over):
                self.playing.remove(i)
            elif t + 1 < self.to_go.shape[1]:
                self.observe(i, t + 1, observed)


def check_player(model: nn.Module, data: ControlData) -> DecisionTransformer:
    """Return `model`; raise TypeError or ValueError unless it fits the environment of `data`."""
    model = check_type("model", model, DecisionTransformer, "a DecisionTransformer")
    check_type("data", data, ControlData, "ControlData, as from load_control")
    for name in ("states", "actions", "discrete"):
        expected, actual = getattr(model, name), getattr(data, name)
        if actual != expected:
            raise ValueError(f"data.{name} is {actual}; expected {expected}, as the model has")
    return model
