"""Offline control: episodes of scripted policies in two environments of gymnasium (chapter 12).

The policies are a few lines each, so that the data are made in a second, from a seed. The returns
of the expert and of random actions are measured when the data are made.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from derived_attention.common.checks import check_flag
from derived_book.runtime import check_count, check_seed
from derived_book.tasks.checks import check_name, needs

Controller = Callable[[np.ndarray], Any]  # from an observation to an action
Noise = tuple[float, float]  # limits between which the share of random actions is drawn
Bounds = tuple[Tensor, Tensor]
QUALITIES = ("medium", "replay", "expert-mixture")
REFERENCE_EPISODES = 30  # that measure the returns of random actions and of the expert
STREAMS = ("train", "test", "random", "expert")  # each has its own random generator


@dataclasses.dataclass(frozen=True)
class Episodes:
    """Episodes, one after another: n steps in all.

    Attributes
    ----------
    returns : Tensor
        (n,) float32, the return-to-go: the sum of the rewards from this step to the episode's end.
    states : Tensor
        (n, s) float32, the observation before the action, standardised by the training part.
    actions : Tensor
        (n,) int64, or (n, a) float32 in [-1, 1], where -1 and 1 are the environment's bounds.
    times : Tensor
        (n,) int64, the step in its episode, from 0.
    """

    returns: Tensor
    states: Tensor
    actions: Tensor
    times: Tensor

    def __len__(self) -> int:
        return len(self.times)

    @property
    def totals(self) -> Tensor:
        """The return of each whole episode."""
        return self.returns[self.times == 0]


@dataclasses.dataclass(frozen=True)
class ControlData:
    """Episodes to learn from, and the environment to act in.

    Attributes
    ----------
    name, quality : str
    train, test : Episodes
        Those of the test are of the same policies, from other seeds.
    states, actions : int
        Size of a state; number of actions, or size of one.
    discrete : bool
        Whether an action is one of `actions`, or a vector.
    horizon : int
        The most steps of an episode.
    mean, sd : Tensor
        (s,): an observation is ``mean + sd · state``.
    bounds : (Tensor, Tensor) or None
        (a,) each, of an action that is a vector.
    random, expert : float
        The mean returns of random actions, and of the expert.
    environment : callable
        Makes a new environment.

    `load_control` makes those with discrete actions; your own may have vectors.
    """

    name: str
    quality: str
    train: Episodes
    test: Episodes
    states: int
    actions: int
    discrete: bool
    horizon: int
    mean: Tensor
    sd: Tensor
    bounds: Bounds | None
    random: float
    expert: float
    environment: Callable[[], Any]

    @property
    def scale(self) -> float:
        """The largest absolute return-to-go of the training part."""
        return float(self.train.returns.abs().max())

    def action(self, action: Tensor) -> Any:
        """Return an action of `Episodes` as the environment takes it: an int, or an array."""
        if self.bounds is None:
            return int(action)
        low, high = self.bounds
        return (low + (action.clamp(-1, 1) + 1) / 2 * (high - low)).numpy()

    def score(self, value: float) -> float:
        """Return ``100 (value - random) / (expert - random)``: a return in per cent."""
        return 100 * (value - self.random) / (self.expert - self.random)


class Play(NamedTuple):
    """One episode as it was played."""

    states: np.ndarray  # (n, s)
    actions: np.ndarray  # (n,) or (n, a)
    rewards: np.ndarray  # (n,)


# --- Policies -------------------------------------------------------------------------------------


def balance(observed: np.ndarray, gains: Sequence[float]) -> int:
    """Push the cart of CartPole by the sign of the weighted sum of the observation."""
    return int(np.dot(gains, observed) > 0)


def pump(observed: np.ndarray, weight: float) -> int:
    """Turn the joint of Acrobot the way it turns, less `weight` times the speed of its arm."""
    return 2 if observed[5] > weight * observed[4] else 0


class Script(NamedTuple):
    """The two policies of an environment."""

    expert: Controller
    medium: Controller
    noise: float  # the share of random actions of "medium"
    still: tuple[int, ...]  # the observations that are no velocities


SCRIPTS = {
    "CartPole-v1": Script(
        functools.partial(balance, gains=(0.1, 0.5, 5.0, 1.0)),
        functools.partial(balance, gains=(-0.1, -0.1, 1.0, 0.2)),  # lets the cart drift away
        noise=0.1,
        still=(0, 2),
    ),
    "Acrobot-v1": Script(
        functools.partial(pump, weight=1.0),
        functools.partial(pump, weight=-4.0),  # brakes about as often as it drives
        noise=0.1,
        still=(0, 1, 2, 3),
    ),
}


# --- Loading --------------------------------------------------------------------------------------


def load_control(
    name: str,
    quality: str,
    transitions: int = 20_000,
    seed: int = 0,
    *,
    velocities: bool = True,
) -> ControlData:
    """Play episodes with scripted policies, the same ones from the same seed.

    Qualities are named after those of D4RL:

    - ``"medium"``: a policy with a systematic mistake, and a share of random actions;
    - ``"replay"``: this policy, with a share of random actions for each episode between that of
      ``"medium"`` and 1, like the record of a policy that is being learned;
    - ``"expert-mixture"``: half of the steps from ``"medium"``, half from an expert.

    Parameters
    ----------
    name : str
        ``"CartPole-v1"`` or ``"Acrobot-v1"``.
    quality : str
    transitions : int
        The least number of steps to train on; episodes are whole. The test has a tenth as many.
    seed : int
    velocities : bool
        False leaves them out of the states, in the episodes and in the environment, so that the
        best action depends on earlier steps too. The scripted policies see them in any case.

    Raises
    ------
    TypeError, ValueError
        For an invalid argument.
    ModuleNotFoundError
        If gymnasium is not installed.

    Examples
    --------
    >>> data = load_control("Acrobot-v1", "replay", transitions=2000, velocities=False)
    >>> data.states, data.actions
    (4, 3)
    """
    check_name("name", name, SCRIPTS)
    check_name("quality", quality, QUALITIES)
    check_count("transitions", transitions)
    check_seed(seed)
    check_flag("velocities", velocities)
    return _load(name, quality, transitions, int(seed), velocities)


@functools.lru_cache(maxsize=4)
def _load(name: str, quality: str, transitions: int, seed: int, velocities: bool) -> ControlData:
    medium, expert, noise, still = (
        getattr(SCRIPTS[name], field) for field in ("medium", "expert", "noise", "still")
    )
    policies: list[tuple[Controller, Noise]] = {
        "medium": [(medium, (noise, noise))],
        "replay": [(medium, (noise, 1.0))],
        "expert-mixture": [(medium, (noise, noise)), (expert, (0.0, 0.0))],
    }[quality]
    kept = None if velocities else list(still)

    def part(stream: str, least: int) -> list[Play]:
        share = math.ceil(least / len(policies))
        plays: list[Play] = []
        for i, policy in enumerate(policies):
            plays += _until(share, _episodes(_make(name), *policy, [seed, i], stream))
        return plays if kept is None else [p._replace(states=p.states[:, kept]) for p in plays]

    def reference(stream: str, share: float) -> float:
        episodes = _episodes(_make(name), expert, (share, share), [seed], stream)
        plays = (next(episodes) for _ in range(REFERENCE_EPISODES))
        return float(np.mean([play.rewards.sum() for play in plays]))

    train, test = part("train", transitions), part("test", max(1, transitions // 10))
    references = reference("random", 1.0), reference("expert", 0.0)
    return _data(name, quality, train, test, references, functools.partial(_make, name, kept))


def _make(name: str, kept: list[int] | None = None) -> Any:
    """Make the environment, in which only the observations `kept` are seen."""
    with needs("gymnasium"):
        import gymnasium
    env = gymnasium.make(name, disable_env_checker=True)
    if kept is None:
        return env
    return gymnasium.wrappers.TransformObservation(env, lambda observed: observed[kept], None)


def _episodes(
    env: Any, controller: Controller, noise: Noise, seed: Sequence[int], stream: str
) -> Iterator[Play]:
    """Play episodes without end, by a random generator of `seed` and `stream`."""
    rng = np.random.default_rng([*seed, STREAMS.index(stream)])
    while True:
        share = rng.uniform(*noise)

        def act(observed: np.ndarray, share: float = share) -> Any:
            random = rng.random() < share
            return int(rng.integers(env.action_space.n)) if random else controller(observed)

        yield _episode(env, act, int(rng.integers(2**32)))


def _episode(env: Any, act: Controller, seed: int) -> Play:
    observed, _ = env.reset(seed=seed)
    steps: list[tuple[np.ndarray, Any, float]] = []
    over = False
    while not over:
        action = act(observed)
        after, reward, terminated, truncated, _ = env.step(action)
        steps.append((observed, action, reward))
        observed, over = after, terminated or truncated
    return Play(*(np.array(column) for column in zip(*steps, strict=True)))


def _until(least: int, episodes: Iterable[Play]) -> list[Play]:
    """Take episodes until they have `least` steps or more."""
    plays: list[Play] = []
    steps = 0
    for play in episodes:
        plays.append(play)
        steps += len(play.rewards)
        if steps >= least:
            break
    return plays


def _data(
    name: str,
    quality: str,
    train: list[Play],
    test: list[Play],
    references: Sequence[float],
    environment: Callable[[], Any],
) -> ControlData:
    env = environment()
    states = np.concatenate([play.states for play in train]).astype(np.float64)
    mean, sd = states.mean(0), states.std(0)
    sd[sd == 0] = 1.0  # a constant
    longest = max(len(play.rewards) for play in (*train, *test))
    limit = env.spec.max_episode_steps if env.spec else None
    return ControlData(
        name,
        quality,
        _part(train, mean, sd),
        _part(test, mean, sd),
        states=states.shape[1],
        actions=int(env.action_space.n),
        discrete=True,
        horizon=max(longest, limit or 0),
        mean=torch.from_numpy(mean).float(),
        sd=torch.from_numpy(sd).float(),
        bounds=None,
        random=float(references[0]),
        expert=float(references[1]),
        environment=environment,
    )


def _part(plays: list[Play], mean: np.ndarray, sd: np.ndarray) -> Episodes:
    to_go = [play.rewards[::-1].cumsum()[::-1] for play in plays]
    states = (np.concatenate([play.states for play in plays]) - mean) / sd
    actions = torch.from_numpy(np.concatenate([play.actions for play in plays]))
    return Episodes(
        torch.from_numpy(np.concatenate(to_go)).float(),
        torch.from_numpy(states).float(),
        actions.long(),
        torch.cat([torch.arange(len(play.rewards)) for play in plays]),
    )
