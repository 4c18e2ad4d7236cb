"""Offline control: the data, what a model trains on, and what it then does."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kinds import actor, episodes, weights, writer
from torch import nn

from derived_attention import PrimalAttention, linear_attention
from derived_book.runtime import digest, seed_everything
from derived_book.tasks.control import data as control
from derived_book.tasks.control.data import QUALITIES, SCRIPTS, ControlData, Episodes, load_control
from derived_book.tasks.control.loss import Trajectories, action_loss, rollout
from derived_book.tasks.control.model import DecisionTransformer
from derived_book.tasks.model import Config
from derived_book.training.fit import evaluate, fit

# --- Data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_episodes_of_every_environment(name):
    data = load_control(name, "replay", 1200)
    for part, least in ((data.train, 1200), (data.test, 120)):
        n = len(part)
        assert n >= least and part.states.shape == (n, data.states)
        assert part.returns.dtype == part.states.dtype == torch.float32
        starts = (part.times == 0).nonzero()[:, 0].tolist()
        assert len(starts) == len(part.totals)
        for start, stop in zip(starts, [*starts[1:], n], strict=True):
            assert torch.equal(part.times[start:stop], torch.arange(stop - start))
            assert stop - start <= data.horizon
        assert part.actions.shape == (n,)
        assert part.actions.unique().tolist() == [*range(data.actions)]
    states = data.train.states
    torch.testing.assert_close(states.mean(0), torch.zeros(data.states), atol=1e-4, rtol=0)
    torch.testing.assert_close(states.std(0, correction=0), torch.ones(data.states))
    assert data.discrete and data.bounds is None
    assert [data.score(x) for x in (data.random, data.expert)] == pytest.approx([0, 100])
    assert data.random < data.train.totals.mean() < data.expert
    assert data.scale == data.train.returns.abs().max()


def test_returns_to_go_are_sums_of_what_is_left():
    part = load_control("CartPole-v1", "medium", 1200).train  # each step brings 1
    assert torch.equal(part.returns + part.times, part.totals.repeat_interleave(part.totals.long()))


def followed(data, controller, steps):
    """The share of these steps in which the action is the controller's."""
    seen = (data.mean + data.sd * data.train.states[steps]).numpy()
    done = map(data.action, data.train.actions[steps])
    return np.mean(
        [np.allclose(controller(x), a, atol=1e-3) for x, a in zip(seen, done, strict=True)]
    )


def test_actions_are_those_of_the_policies_and_some_are_random():
    data, script = load_control("Acrobot-v1", "expert-mixture", 3000), SCRIPTS["Acrobot-v1"]
    starts = (data.train.times == 0).nonzero()[:, 0]
    half = int(starts[starts >= 1500][0])  # the episode that the expert starts with
    medium, expert = slice(0, half), slice(half, None)
    assert followed(data, script.expert, expert) > 0.99 > followed(data, script.expert, medium)
    expected = 1 - script.noise * (1 - 1 / data.actions)
    assert followed(data, script.medium, medium) == pytest.approx(expected, abs=0.03)


def test_a_seed_decides_the_data():
    first = load_control("Acrobot-v1", "medium", 400)
    again = control._load.__wrapped__("Acrobot-v1", "medium", 400, 0, True)
    assert digest(first.train, first.test) == digest(again.train, again.test)
    assert (first.random, first.expert) == (again.random, again.expert)
    other = load_control("Acrobot-v1", "medium", 400, seed=1)
    assert digest(first.train) != digest(other.train)
    assert not torch.isin(first.test.states[:, 0], first.train.states[:, 0]).all()


@pytest.mark.parametrize("name", SCRIPTS)
def test_velocities_can_be_hidden(name):
    whole, data = (load_control(name, "medium", 400, velocities=v) for v in (True, False))
    kept = list(SCRIPTS[name].still)
    assert torch.equal(data.train.states, whole.train.states[:, kept])
    assert torch.equal(data.train.actions, whole.train.actions)
    seen = [each.environment().reset(seed=3)[0] for each in (whole, data)]
    assert np.array_equal(seen[1], seen[0][kept]) and data.states == len(kept) < whole.states
    assert (data.expert, data.horizon) == (whole.expert, whole.horizon)


def test_qualities_are_in_order():
    means = {}
    for quality in QUALITIES:
        data = load_control("CartPole-v1", quality, 4000)
        means[quality] = data.score(data.train.totals.mean().item())
    assert 5 < means["replay"] < means["medium"] - 5
    assert means["medium"] + 5 < means["expert-mixture"] < 95


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(name=3), TypeError, "name is 3; expected a string"),
        (dict(name="Go"), ValueError, "name is 'Go'; expected one of 'CartPole-v1', 'Acrobo"),
        (dict(quality="good"), ValueError, "quality is 'good'; expected one of 'medium', 'rep"),
        (dict(transitions=0), ValueError, "transitions is 0; expected at least 1"),
        (dict(seed=-1), ValueError, "seed is -1"),
        (dict(velocities=0), TypeError, "velocities is 0; expected True or False"),
    ],
)
def test_wrong_data(arguments, error, message):
    with pytest.raises(error, match=message):
        load_control(**dict(name="CartPole-v1", quality="medium") | arguments)


def test_without_gymnasium(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install \"derived-attention\[data\]\""):
        load_control("CartPole-v1", "medium", 77)


# --- An environment with vectors for actions ------------------------------------------------------


class Bets:
    """An environment of `horizon` steps in which the action is what it pays."""

    def __init__(self, horizon=5, n=None, high=4.0):
        self.horizon = horizon
        self.spec = SimpleNamespace(max_episode_steps=horizon)
        low, high = np.array([-2.0], np.float32), np.array([high], np.float32)
        self.action_space = SimpleNamespace(n=n) if n else SimpleNamespace(low=low, high=high)
        self.action_space.shape = (1,)

    def reset(self, seed):
        self.t = 0
        return np.array([0.0, seed % 7], np.float32), {}

    def step(self, action):
        self.t += 1
        observed = np.array([self.t, 0.0], np.float32)
        return observed, float(np.sum(action)), False, self.t == self.horizon, {}


# --- Windows --------------------------------------------------------------------------------------


def numbered(lengths=(3, 8, 1, 5)):
    """Episodes in which each step tells its place."""
    n = sum(lengths)
    return Episodes(
        torch.arange(n).float(),
        torch.arange(n).float()[:, None].expand(n, 3),
        torch.arange(n) % 2,
        torch.cat([torch.arange(length) for length in lengths]),
    )


@pytest.mark.parametrize("size", [1, 3, 64])
def test_every_step_is_evaluated_once_with_those_before_it(size):
    seen = []
    for returns, states, actions, times, real in Trajectories(numbered(), 4, size):
        assert real.shape[1] == 4 and len(real) <= size and real[:, 0].all()
        assert torch.equal(returns[..., None].expand(states.shape), states)
        assert not (real[:, 1:] & ~real[:, :-1]).any()  # padding is at the end
        assert torch.equal(actions[real], returns[real].long() % 2) and (times[~real] == 0).all()
        for window, t, kept in zip(returns, times, real, strict=True):
            assert (window[kept].diff() == 1).all() and (t[kept].diff() == 1).all()
            assert t[0] % 4 == 0
            seen += window[kept].tolist()
    assert seen == [float(i) for i in range(17)]


def test_training_windows_come_from_everywhere_and_stay_in_their_episode():
    found, left = [], torch.cat([torch.arange(n, 0, -1) for n in (3, 8, 1, 5)])
    for seed, steps in ((0, 40), (0, 8), (1, 40)):
        batches = Trajectories(numbered(), 4, batch_size=8, steps=steps)
        some = [b for e in range(40 // steps) for b in batches.epoch(seed, e)]
        assert len(batches) == steps and len(some) == 40
        for returns, _, _, times, real in some:
            step = numbered().times[returns[real].long()]
            assert torch.equal(step, times[real])
            assert torch.equal(real.sum(1), left[returns[:, 0].long()].clamp(max=4))
        found.append([tuple(b[0][:, 0].tolist()) for b in some])
    assert set(sum(found[0], ())) == set(range(17))
    assert found[0] == found[1] != found[2]  # how long an epoch is decides nothing


def test_wrong_windows():
    for arguments, error, message in (
        (dict(episodes=3), TypeError, "episodes is int; expected Episodes, such as data.train"),
        (dict(length=0), ValueError, "length is 0; expected at least 1"),
        (dict(batch_size=2.0), TypeError, "batch_size is 2.0; expected an integer"),
        (dict(steps=0), ValueError, "steps is 0"),
    ):
        with pytest.raises(error, match=message):
            Trajectories(**dict(episodes=episodes(), length=4) | arguments)
    for model, given, error, message in (
        (writer(), episodes(), TypeError, "model is ByteLM; expected a DecisionTransformer"),
        (actor(length=3), episodes(), ValueError, "train has windows of 4 .* expected at most 3"),
        (actor(discrete=False), episodes(), ValueError, r"train.actions is .*shape \(\d+, 1\)"),
        (actor(), episodes(discrete=False), ValueError, "train.actions is .* expected int64"),
        (actor(), numbered((9,)), ValueError, "train.times holds .* integers 0 <= x < 8"),
    ):
        with pytest.raises(error, match=message):
            fit(model, Trajectories(given, 4), action_loss, epochs=1)


# --- The model ------------------------------------------------------------------------------------


def steps(n=2, length=4, discrete=True):
    """Steps of `kinds.actor`."""
    generator = torch.Generator().manual_seed(5)
    actions = torch.randint(2, (n, length), generator=generator)
    if not discrete:
        actions = torch.rand(n, length, 2, generator=generator)
    returns, states = (torch.randn(n, length, *more, generator=generator) for more in ((), (3,)))
    return returns, states, actions, torch.arange(3, 3 + length).expand(n, length)


def data_dependent(dim, heads):
    return PrimalAttention(dim, heads, directions=2, landmarks=3)


def listing_1(dim, heads):
    return PrimalAttention(dim, heads, directions=2, data_dependent=False)


class Blind(nn.Module):
    """No attention: what the layer adds is 0."""

    def __init__(self, dim, heads):
        super().__init__()

    def forward(self, q, k, v, **masks):
        return torch.zeros_like(q), None


def layers(make):
    """Give `Config` a class, as it asks for, that `make` builds."""
    return type(make.__name__, (nn.Module,), {"__new__": lambda cls, *sizes: make(*sizes)})


@pytest.mark.parametrize(
    "attention", [None, linear_attention, layers(listing_1), layers(data_dependent)]
)
def test_a_step_depends_on_all_before_it_and_nothing_after(attention):
    """On its own return and state, but not on its own action."""
    model = actor(discrete=False, layers=2, last=attention).double().eval()
    returns, states, actions, times = steps(discrete=False)
    given = [x.double().requires_grad_() for x in (returns, states, actions)]
    found = model(*given, times)
    assert found.shape == (2, 4, 2) and found.abs().max() < 1
    for t in range(4):
        slopes = torch.autograd.grad(found[:, t].sum(), given, retain_graph=True)
        R, s, a = (g.abs().flatten(2).sum(2) if g.ndim > 2 else g.abs() for g in slopes)
        for slope, last in ((R, t), (s, t), (a, t - 1)):
            assert (slope[:, last + 1 :] == 0).all() and (slope[:, : last + 1] > 0).all()


def test_the_model_is_what_its_docstring_says():
    model = actor(layers=1, attention=Blind).eval()
    returns, states, actions, times = steps()
    hoped, table = returns[..., None] / 8, model.times[times]
    tokens = [model.embed_return(hoped), model.embed_state(states), model.embed_action(actions)]
    h = model.first(torch.stack([x + table for x in tokens], 2)).flatten(1, 2)  # R_1 s_1 a_1 R_2
    torch.testing.assert_close(model._embed(*steps()), h)
    layer = model.layers[0]
    h = h + layer.feedforward(layer.norm2(h))
    torch.testing.assert_close(model(*steps()), model.head(model.norm(h))[:, [1, 4, 7, 10]])
    vectors = actor(discrete=False, attention=Blind).eval()
    vectors.head.bias.data.fill_(50.0)
    assert (vectors(*steps(discrete=False)) == 1).all()


def test_returns_that_are_withheld_change_nothing():
    returns, *others = steps()
    for conditioned in (True, False):
        model = actor(conditioned=conditioned).eval()
        same = torch.equal(model(returns, *others), model(returns + 3, *others))
        assert same != conditioned


def test_maps_and_gradients():
    model = actor()
    maps = model.attention_maps(*steps())
    assert [A.shape for A in maps] == [(2, 2, 12, 12)]
    assert (maps[0].triu(1) == 0).all()
    model(*steps()).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_wrong_models_and_steps():
    for arguments, error, message in (
        (dict(states=0), ValueError, "states is 0; expected at least 1"),
        (dict(horizon=2.5), TypeError, "horizon is 2.5; expected an integer"),
        (dict(discrete=1), TypeError, "discrete is 1; expected True or False"),
        (dict(conditioned=None), TypeError, "conditioned is None; expected True or False"),
        (dict(scale=0.0), ValueError, "scale is 0.0; expected a finite positive number"),
    ):
        sizes = dict(states=3, actions=2, discrete=True, length=4, config=Config())
        with pytest.raises(error, match=message):
            DecisionTransformer(**sizes | arguments)
    model, (returns, states, actions, times) = actor(), steps()
    for wrong, error, message in (
        ((None, states, actions, times), TypeError, "returns is NoneType; expected a tensor"),
        (
            (returns[:, :3], states, actions, times),
            ValueError,
            r"returns is .*\(2, 3\); expected floats of",
        ),
        (
            (returns, states[..., :2], actions, times),
            ValueError,
            r"expected floats of shape \(2, 4, 3\)",
        ),
        (
            (returns, states, actions + 1, times),
            ValueError,
            "actions holds .* to 2; expected integers 0 <= x < 2",
        ),
        ((returns, states, actions, times + 2), ValueError, "times holds .* integers 0 <= x < 8"),
        (
            steps(length=5),
            ValueError,
            r"times has shape \(2, 5\); expected \(B, T\) with 0 < T <= 4",
        ),
    ):
        with pytest.raises(error, match=message):
            model(*wrong)


# --- The loss -------------------------------------------------------------------------------------


def test_the_loss_is_a_mean_over_the_real_steps():
    for discrete in (True, False):
        model, given = actor(discrete=discrete).eval(), steps(discrete=discrete)
        real = torch.tensor([[True, True, False, False], [True] * 4])
        loss, numbers = action_loss(model, (*given, real))
        terms = []
        for b, t in real.nonzero().tolist():
            found, taken = model(*given)[b, t], given[2][b, t]
            if discrete:
                terms.append(-found.log_softmax(0)[taken])
            else:
                terms.append((found - taken).square().mean())
        torch.testing.assert_close(loss, torch.stack(terms).mean())
        assert numbers["loss"].value == pytest.approx(loss.item()) and numbers["loss"].count == 6
        assert ("accuracy" in numbers) == discrete
        garbage = [x.clone() for x in given]
        for x, value in zip(garbage, (1e3, -1e3, 1, 0), strict=True):
            x[~real] = value
        torch.testing.assert_close(action_loss(model, (*garbage, real))[0], loss)
    with pytest.raises(TypeError, match="model is Linear; expected a DecisionTransformer"):
        action_loss(nn.Linear(2, 2), (*given, real))
    model.register_forward_hook(lambda _, __, found: found[:, -1])
    with pytest.raises(ValueError, match=r"returns shape \(2, 2\); expected \(2, 4, 2\)"):
        action_loss(model, (*given, real))


# --- Playing --------------------------------------------------------------------------------------


class Scripted(DecisionTransformer):
    """Acts as the expert of CartPole does, and notes what it is shown."""

    def forward(self, returns, states, actions, times):
        self.seen.append((returns, states, actions, times))
        observed = (self.data.mean + self.data.sd * states[:, -1]).numpy()
        best = torch.tensor([SCRIPTS["CartPole-v1"].expert(x) for x in observed])
        return nn.functional.one_hot(best, 2)[:, None].expand(-1, states.shape[1], -1)


def test_an_expert_s_actions_bring_an_expert_s_return():
    data = load_control("CartPole-v1", "medium", 1200)
    model = Scripted(4, 2, True, 3, Config(dim=8, heads=2), horizon=500)
    model.data, model.seen = data, []
    assert rollout(model, data, 321.0, episodes=2) == [500.0, 500.0]
    assert [len(times[0]) for *_, times in model.seen] == [1, 2] + [3] * 498
    for t, (returns, _, actions, times) in enumerate(model.seen):
        assert torch.equal(times, torch.arange(max(0, t - 2), t + 1).expand(2, -1))
        assert torch.equal(returns, 321.0 - times) and (actions[:, -1] == 0).all()
    assert not torch.equal(*model.seen[0][1])  # each episode has a start of its own
    before, after = model.seen[100:102]
    assert torch.equal(before[1][:, 1:], after[1][:, :-1])
    taken = [
        SCRIPTS["CartPole-v1"].expert(x) for x in (data.mean + data.sd * before[1][:, -1]).numpy()
    ]
    assert after[2][:, -2].tolist() == taken


def bets(n=None, seed=0):
    """Episodes of random bets; the returns tell which."""
    rng = np.random.default_rng(seed)
    rewards = rng.integers(2, size=(200, 5)) if n else rng.uniform(-2, 4, (200, 5))
    returns = torch.tensor(rewards[:, ::-1].cumsum(1)[:, ::-1].copy()).float().flatten()
    times = torch.arange(5).repeat(200)
    actions = torch.tensor(rewards).flatten()
    actions = actions.long() if n else (actions.float()[:, None] + 2) / 3 - 1
    part = Episodes(returns, torch.stack([times.float(), 0 * times], 1), actions, times)
    low, high = torch.tensor([-2.0]), torch.tensor([4.0])
    return ControlData(
        "bets", "replay", part, part, 2, n or 1, bool(n), 5, torch.zeros(2), torch.ones(2),
        None if n else (low, high), 2.5, 5.0, lambda: Bets(n=n),
    )  # fmt: skip


@pytest.mark.parametrize("n", [2, None])
def test_what_is_asked_for_is_what_one_gets(n):
    """In the data all returns are there; the return asked for decides which is repeated."""
    data, got = bets(n), {}
    for conditioned in (True, False):
        seed_everything(0)
        config = Config(dim=16, heads=2, layers=1, hidden=32, dropout=0.0)
        model = DecisionTransformer(
            2, n or 1, bool(n), 5, config, horizon=5, scale=5.0, conditioned=conditioned
        )
        fit(model, Trajectories(data.train, 5, 32, 100), action_loss, epochs=1, lr=2e-2)
        for target in (0.0, 5.0):
            got[conditioned, target] = np.mean(rollout(model, data, target, episodes=3))
    assert got[True, 0.0] < 0.75 and got[True, 5.0] > 4.25
    assert got[False, 0.0] == got[False, 5.0]


def test_playing_is_decided_by_its_seed_and_leaves_mode_and_generator_alone():
    data, model = load_control("CartPole-v1", "medium", 1200), None
    model = DecisionTransformer(4, 2, True, 3, Config(dim=8, heads=2), horizon=500).train()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = rollout(model, data, episodes=4)
    assert torch.equal(torch.rand(3), expected) and model.training
    assert first == rollout(model, data, data.expert, episodes=4)
    assert first[:2] == rollout(model, data, episodes=2)  # how many there are decides nothing
    assert first != rollout(model, data, episodes=4, seed=1)
    short = DecisionTransformer(4, 2, True, 3, Config(dim=8, heads=2), horizon=4)
    assert rollout(short, data, episodes=2) == [4.0, 4.0]


def test_wrong_playing_before_any_work():
    data = bets(2)
    model = DecisionTransformer(2, 2, True, 3, Config(dim=8, heads=2), horizon=5)
    model.register_forward_pre_hook(lambda *_: pytest.fail("work was done"))
    for arguments, error, message in (
        (dict(model=writer()), TypeError, "model is ByteLM; expected a DecisionTransformer"),
        (dict(data=data.train), TypeError, "data is Episodes; expected ControlData, as from load"),
        (dict(data=bets()), ValueError, "data.actions is 1; expected 2, as the model has"),
        (dict(target="much"), TypeError, "target is 'much'; expected a number"),
        (dict(target=float("nan")), ValueError, "target is nan; expected a finite number"),
        (dict(episodes=0), ValueError, "episodes is 0; expected at least 1"),
        (dict(seed=-1), ValueError, "seed is -1"),
    ):
        with pytest.raises(error, match=message):
            rollout(**dict(model=model, data=data) | arguments)


def test_training_and_evaluation_agree_with_the_loss():
    model, part = actor(dropout=0.0), episodes()
    fit(model, Trajectories(part, 4, 16, 60), action_loss, epochs=1, lr=1e-2)
    found = evaluate(model, Trajectories(part, 4), action_loss)
    assert found["accuracy"] > 0.9 and weights(model) != weights(actor())
