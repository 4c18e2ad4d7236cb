"""Offline control: episodes of scripted policies in four environments of gymnasium (chapter 12).

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

from derived_attention.attention.frame.checks import check_flag
from derived_attention.runtime import check_count, check_seed
from derived_attention.tasks.checks import check_name, check_type, needs

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


def swing_up(
    observed: np.ndarray, torque: float, gains: tuple[float, float, float], catch: float
) -> np.ndarray:
    """Pump energy into the pendulum until it is nearly upright; then hold it there.

    The energy is E = θ̇²/6 + 5 cos θ, which is 5 at rest upright: u = g_0 (5 - E) θ̇. Where
    cos θ > `catch`, u = -g_1 θ - g_2 θ̇. u is limited to ± `torque`.
    """
    cosine, sine, speed = map(float, observed)
    if cosine > catch:
        u = -gains[1] * math.atan2(sine, cosine) - gains[2] * speed
    else:
        u = gains[0] * (5 - speed**2 / 6 - 5 * cosine) * speed
    return np.array([min(max(u, -torque), torque)], dtype=np.float32)


def climb(observed: np.ndarray, force: float, patience: float) -> np.ndarray:
    """Push the mountain car the way it moves, but to the right wherever it is below -`patience`."""
    position, speed = observed
    right = speed >= 0 or position < -patience
    return np.array([force if right else -force], dtype=np.float32)


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
    "Pendulum-v1": Script(
        functools.partial(swing_up, torque=2.0, gains=(0.3, 8.0, 2.0), catch=0.7),
        functools.partial(swing_up, torque=1.0, gains=(0.2, 5.0, 0.5), catch=0.8),  # overshoots
        noise=0.1,
        still=(0, 1),
    ),
    "MountainCarContinuous-v0": Script(
        functools.partial(climb, force=0.3, patience=2.0),
        functools.partial(climb, force=1.0, patience=0.2),  # will not go back for a run-up
        noise=0.5,
        still=(0,),
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
        ``"CartPole-v1"``, ``"Pendulum-v1"``, ``"MountainCarContinuous-v0"`` or ``"Acrobot-v1"``.
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
    >>> data = load_control("Pendulum-v1", "replay", transitions=2000)
    >>> data.train.states.shape, data.train.actions.shape
    (torch.Size([2000, 3]), torch.Size([2000, 1]))
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


def load_minari(name: str, references: tuple[float, float] | None = None) -> ControlData:
    """Read a data set of Minari, such as those of D4RL; it is downloaded on first use.

    Every tenth episode is for the test. The `quality` of the result is ``"minari"``. To act in its
    environment may need more packages, which Minari names.

    Parameters
    ----------
    name : str
        Such as ``"mujoco/halfcheetah/medium-v0"``.
    references : (float, float), optional
        The mean returns of random actions and of an expert, if the data set does not state them.

    Raises
    ------
    TypeError, ValueError
        For an invalid argument; for data without references, with fewer than ten episodes, with
        states that are no vectors, or with actions without bounds.
    ModuleNotFoundError
        If minari is not installed.
    ConnectionError
        If the data set cannot be read or downloaded.
    """
    check_type("name", name, str, "the name of a data set")
    with needs("minari", 'pip install "minari[all]"; load_control works without it'):
        import minari
    try:
        stored = minari.load_dataset(name, download=True)
        episodes = list(stored.iterate_episodes())
    except Exception as error:  # of the network, a file, or one of the packages of minari
        raise ConnectionError(
            f"{name!r} could not be read from Minari: {error}. The first time, it needs a network. "
            "Without one, use load_control."
        ) from error
    if references is None:
        metadata = stored.storage.metadata
        references = metadata.get("ref_min_score"), metadata.get("ref_max_score")
    if None in references:
        raise ValueError(f"references is None, and {name!r} has none; expected (random, expert)")
    if len(episodes) < 10:
        raise ValueError(f"{name!r} has {len(episodes)} episodes; expected at least 10")
    plays = [_play(name, episode) for episode in episodes]
    train = [play for i, play in enumerate(plays) if i % 10 != 9]
    return _data(name, "minari", train, plays[9::10], references, stored.recover_environment)


def _play(name: str, episode: Any) -> Play:
    """Take an episode of Minari, which has one more observation, after the last action."""
    rewards, states = np.asarray(episode.rewards, np.float64), np.asarray(episode.observations)
    if states.ndim != 2:
        actual = f"{name!r} has observations of shape {states.shape}"
        raise ValueError(f"{actual}; expected (n, s), a vector at each step")
    return Play(states[: len(rewards)], np.asarray(episode.actions)[: len(rewards)], rewards)


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
            return _random_action(env, rng) if rng.random() < share else controller(observed)

        yield _episode(env, act, int(rng.integers(2**32)))


def _random_action(env: Any, rng: np.random.Generator) -> Any:
    space = env.action_space
    if hasattr(space, "n"):
        return int(rng.integers(space.n))
    return rng.uniform(space.low, space.high).astype(np.float32)


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
    space, discrete = env.action_space, hasattr(env.action_space, "n")
    states = np.concatenate([play.states for play in train]).astype(np.float64)
    mean, sd = states.mean(0), states.std(0)
    sd[sd == 0] = 1.0  # a constant
    bounds = None if discrete else _bounds(name, space)
    longest = max(len(play.rewards) for play in (*train, *test))
    limit = env.spec.max_episode_steps if env.spec else None
    return ControlData(
        name,
        quality,
        _part(train, mean, sd, bounds),
        _part(test, mean, sd, bounds),
        states=states.shape[1],
        actions=int(space.n) if discrete else space.shape[0],
        discrete=discrete,
        horizon=max(longest, limit or 0),
        mean=torch.from_numpy(mean).float(),
        sd=torch.from_numpy(sd).float(),
        bounds=bounds,
        random=float(references[0]),
        expert=float(references[1]),
        environment=environment,
    )


def _bounds(name: str, space: Any) -> Bounds:
    bounds = torch.as_tensor(space.low.copy()), torch.as_tensor(space.high.copy())
    if len(space.shape) != 1 or not torch.stack(bounds).isfinite().all():
        raise ValueError(f"{name!r} has actions in {space}; expected vectors with finite bounds")
    return bounds


def _part(plays: list[Play], mean: np.ndarray, sd: np.ndarray, bounds: Bounds | None) -> Episodes:
    to_go = [play.rewards[::-1].cumsum()[::-1] for play in plays]
    states = (np.concatenate([play.states for play in plays]) - mean) / sd
    actions = torch.from_numpy(np.concatenate([play.actions for play in plays]))
    if bounds is not None:
        actions = (2 * (actions - bounds[0]) / (bounds[1] - bounds[0]) - 1).float()
    return Episodes(
        torch.from_numpy(np.concatenate(to_go)).float(),
        torch.from_numpy(states).float(),
        actions.long() if bounds is None else actions,
        torch.cat([torch.arange(len(play.rewards)) for play in plays]),
    )
