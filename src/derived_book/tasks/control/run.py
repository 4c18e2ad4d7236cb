"""Train a `DecisionTransformer` on the episodes of others."""

from __future__ import annotations

import functools

from derived_book.tasks.control.data import load_control
from derived_book.tasks.control.loss import Trajectories, action_loss, rollout
from derived_book.tasks.control.model import DecisionTransformer
from derived_book.tasks.model import Config
from derived_book.tasks.run import Numbers, Task, Trained, runner
from derived_book.training.fit import evaluate


@runner(steps=500, batch_size=64, lr=2e-3)
def train_control(
    config: Config,
    name: str,
    quality: str,
    *,
    transitions: int = 20_000,
    velocities: bool = True,
    length: int = 10,
    conditioned: bool = True,
    episodes: int = 20,
) -> Task:
    """Train a `DecisionTransformer`, then ask it for the expert's return; return scores and cost.

    ``"return"`` is the mean of the episodes that it plays, ``"score"`` the same in per cent, from a
    random policy to the expert. ``"loss"`` is that of test episodes. ``"data"`` and ``"best"`` are
    the mean and the highest score of the episodes that it has learned from.

    Parameters
    ----------
    config : Config
    name, quality, transitions, velocities
        As in `derived_book.load_control`.
    length : int
        As in `derived_book.Trajectories`.
    conditioned : bool
        As in `DecisionTransformer`: False is behaviour cloning.
    episodes : int
        How many to play.
    seed, steps, batch_size, lr, eta, device
        As in `derived_book.tasks.run.runner`; the seed also decides where the episodes that
        are played start.
    """
    data = load_control(name, quality, transitions, velocities=velocities)
    model = functools.partial(
        DecisionTransformer,
        data.states,
        data.actions,
        data.discrete,
        length,
        config,
        horizon=data.horizon,
        scale=data.scale,
        conditioned=conditioned,
    )

    def scores(trained: Trained) -> Numbers:
        returns = rollout(trained.model, data, episodes=episodes, seed=trained.seed)
        value, totals = sum(returns) / episodes, data.train.totals
        return {
            "return": value,
            "score": data.score(value),
            "loss": evaluate(trained.model, Trajectories(data.test, length), action_loss)["loss"],
            "data": data.score(float(totals.mean())),
            "best": data.score(float(totals.max())),
        }

    inputs = next(iter(Trajectories(data.train, length, 1)))[:4]
    batches = functools.partial(Trajectories, data.train, length)
    return Task(model, inputs, batches, action_loss, scores)
