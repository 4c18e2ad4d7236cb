"""Model control."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from derived_attention.attention.frame.checks import (
    check_flag,
    check_floating,
    check_positive,
)
from derived_attention.runtime import evaluating
from derived_attention.tasks.model import WEIGHTS, CausalLayer, Config, Encoder, check_sizes, stack


class DecisionTransformer(Encoder):
    """The Decision Transformer of [Chen2021]: from what is hoped and seen so far, what to do next.

    A step t of an episode is three tokens: the return-to-go R_t, the state s_t, the action a_t.
    Each has a linear map of its own, and the learned embedding of the time t in the episode is
    added. LayerNorm, causal pre-norm layers, LayerNorm, and one linear map of the token of the
    state, which sees R_1, s_1, a_1, ..., R_t, s_t, but not a_t. (Embeddings of times start near 0
    here, so that a time that training never reached says little.)

    Parameters
    ----------
    states, actions : int
        How many numbers a state has; how many actions there are, or numbers in one.
    discrete : bool
        Whether an action is one of `actions`: the result is their logits. If it is a vector, it is
        in [-1, 1], and so is the result, by a tanh.
    length : int
        The most steps that the model reads at a time: 3 tokens each.
    config : Config
    horizon : int
        The most steps of an episode.
    scale : float
        Returns are divided by it: see `derived_attention.tasks.control.data.ControlData`.
    conditioned : bool
        False withholds the returns, which count as 0: the model clones the data's behaviour.

    Raises
    ------
    TypeError, ValueError
        For a wrong size; in the forward pass, for a wrong shape or type, an action that there is
        not, or a time past the horizon.

    Examples
    --------
    >>> model = DecisionTransformer(4, 2, True, length=8, config=Config())
    >>> returns, states, actions = torch.ones(3, 5), torch.zeros(3, 5, 4), torch.arange(5) // 4
    >>> model(returns, states, actions.repeat(3, 1), torch.arange(5).repeat(3, 1)).shape
    torch.Size([3, 5, 2])
    """

    def __init__(
        self,
        states: int,
        actions: int,
        discrete: bool,
        length: int,
        config: Config,
        *,
        horizon: int = 1000,
        scale: float = 1.0,
        conditioned: bool = True,
    ) -> None:
        super().__init__()
        check_sizes(config, states=states, actions=actions, length=length, horizon=horizon)
        check_flag("discrete", discrete)
        check_flag("conditioned", conditioned)
        self.states, self.actions, self.discrete = states, actions, discrete
        self.length, self.horizon, self.config = length, horizon, config
        self.scale, self.conditioned, dim = check_positive("scale", scale), conditioned, config.dim
        self.embed_return, self.embed_state = nn.Linear(1, dim), nn.Linear(states, dim)
        self.embed_action = nn.Embedding(actions, dim) if discrete else nn.Linear(actions, dim)
        self.times = nn.Parameter(torch.empty(horizon, dim).normal_(std=0.02))
        self.first = nn.LayerNorm(dim)
        self.layers = stack(CausalLayer, config)
        self.dropout, self.norm = nn.Dropout(config.dropout), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, actions)

    def forward(self, returns: Tensor, states: Tensor, actions: Tensor, times: Tensor) -> Tensor:
        """Return logits, or actions, (B, T, actions), each from what is known when it is taken.

        Parameters
        ----------
        returns, states, actions, times : Tensor
            (B, T), (B, T, states), (B, T) int64 or (B, T, actions), (B, T) int64, T ≤ length: steps
            that follow each other. Those after an episode's end may hold anything that is allowed.
        """
        h = self._embed(returns, states, actions, times)  # type: ignore[call-arg]
        for layer in self.layers:
            h = layer(h, None)  # (B, 3T, dim)
        z = self.head(self.norm(h[:, 1::3]))
        return z if self.discrete else z.tanh()

    def attention_maps(  # type: ignore[override]
        self, returns: Tensor, states: Tensor, actions: Tensor, times: Tensor
    ) -> list[Tensor]:
        """Return each layer's weights (B, H, 3T, 3T)."""
        with evaluating(self):
            return self._maps(self._embed(returns, states, actions, times), None)

    def extra_repr(self) -> str:
        """Show what the layers do not; a checkpoint tells two models apart by this text."""
        return f"{super().extra_repr()}, scale={self.scale}, conditioned={self.conditioned}"

    def _embed(  # type: ignore[override]
        self, returns: Tensor, states: Tensor, actions: Tensor, times: Tensor
    ) -> Tensor:
        self.check_steps(returns, states, actions, times)
        given = {"returns": returns, "states": states} | (
            {} if self.discrete else {"actions": actions}
        )
        check_floating({WEIGHTS: self.times, **given})
        hoped = returns / self.scale if self.conditioned else torch.zeros_like(returns)
        parts = (
            self.embed_return(hoped[..., None]),
            self.embed_state(states),
            self.embed_action(actions),
        )
        h = torch.stack(parts, dim=2) + self.times[times][:, :, None]  # (B, T, 3, dim)
        return self.dropout(self.first(h.flatten(1, 2)))

    def check_steps(
        self, returns: Tensor, states: Tensor, actions: Tensor, times: Tensor, of: str = ""
    ) -> None:
        """Raise TypeError or ValueError, naming the argument, for steps that there cannot be."""
        given = {"returns": returns, "states": states, "actions": actions, "times": times}
        for name, value in given.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"{of}{name} is {type(value).__name__}; expected a tensor")
        if times.ndim != 2 or not 0 < times.shape[1] <= self.length:
            found = f"{of}times has shape {tuple(times.shape)}"
            raise ValueError(f"{found}; expected (B, T), 0 < T <= {self.length}")
        own = () if self.discrete else (self.actions,)
        for name, more in (("returns", ()), ("states", (self.states,)), ("actions", own)):
            if given[name].shape != (*times.shape, *more):
                found = f"{of}{name} has shape {tuple(given[name].shape)}"
                raise ValueError(f"{found}; expected {(*times.shape, *more)}")
        for name, most in (("times", self.horizon), ("actions", self.actions)):
            if name == "actions" and not self.discrete:
                continue
            value = given[name]
            if value.dtype != torch.int64 or (value < 0).any() or (value >= most).any():
                found = f"{of}{name} is {value.dtype}, or holds what there is not"
                raise ValueError(f"{found}; expected int64 numbers 0 <= x < {most}")
