"""A transformer that acts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from derived_attention.common.checks import check_flag, check_floating, check_positive
from derived_book.runtime import evaluating
from derived_book.tasks.checks import check_range, check_tensor
from derived_book.tasks.model import WEIGHTS, CausalLayer, Config, Encoder, check_sizes, stack


class DecisionTransformer(Encoder):
    """The Decision Transformer of [Chen2021]: the next action from returns and states so far.

    A step t of an episode is three tokens: the return-to-go R_t, the state s_t, the action a_t.
    Each has its own linear map, to which the learned embedding of the time t in the episode is
    added. LayerNorm, causal pre-norm layers, LayerNorm, and one linear map of the token of the
    state follow; this token attends to R_1, s_1, a_1, ..., R_t, s_t, but not to a_t. (Embeddings of
    times start near 0 here, so that a time that training never reached has little influence.)

    Parameters
    ----------
    states, actions : int
        Size of a state; number of actions, or size of one.
    discrete : bool
        True if an action is one of `actions`, and the result is their logits. False if it is a
        vector in [-1, 1], and so is the result, by a tanh.
    length : int
        The most steps that the model reads at a time: 3 tokens each.
    config : Config
    horizon : int
        The most steps of an episode.
    scale : float
        Returns are divided by it: see `derived_book.tasks.control.data.ControlData`.
    conditioned : bool
        False replaces the returns by 0: the model clones the behaviour of the data.

    Examples
    --------
    >>> model = DecisionTransformer(4, 2, True, length=8, config=Config())
    >>> returns, states, actions = torch.ones(3, 5), torch.zeros(3, 5, 4), torch.arange(5) // 4
    >>> model(returns, states, actions.repeat(3, 1), torch.arange(5).repeat(3, 1)).shape
    torch.Size([3, 5, 2])
    """

    shown = ("length", "scale", "conditioned")

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
        """Return logits, or actions, (B, T, actions), each from what is known before it is taken.

        Parameters
        ----------
        returns, states, actions, times : Tensor
            (B, T), (B, T, states), (B, T) int64 or (B, T, actions), (B, T) int64, T ≤ length:
            consecutive steps. Those after the end of an episode may hold any valid values.
        """
        h = self._run(self._embed(returns, states, actions, times))  # (B, 3T, dim)
        z = self.head(self.norm(h[:, 1::3]))
        return z if self.discrete else z.tanh()

    def attention_maps(  # type: ignore[override]
        self, returns: Tensor, states: Tensor, actions: Tensor, times: Tensor
    ) -> list[Tensor]:
        """Return each layer's weights (B, H, 3T, 3T)."""
        with evaluating(self):
            return self._maps(self._embed(returns, states, actions, times), None)

    def _embed(  # type: ignore[override]
        self, returns: Tensor, states: Tensor, actions: Tensor, times: Tensor
    ) -> Tensor:
        self.check_steps(returns, states, actions, times)
        vectors = {} if self.discrete else {"actions": actions}
        check_floating({WEIGHTS: self.times, "returns": returns, "states": states, **vectors})
        wanted = returns / self.scale if self.conditioned else torch.zeros_like(returns)
        parts = (
            self.embed_return(wanted[..., None]),
            self.embed_state(states),
            self.embed_action(actions),
        )
        h = torch.stack(parts, dim=2) + self.times[times][:, :, None]  # (B, T, 3, dim)
        return self.dropout(self.first(h.flatten(1, 2)))

    def check_steps(
        self, returns: Tensor, states: Tensor, actions: Tensor, times: Tensor, of: str = ""
    ) -> None:
        """Raise TypeError or ValueError unless the steps fit the model; `of` precedes the names."""
        check_tensor(f"{of}times", times, "int64", ("B", "T"))
        if not 0 < times.shape[1] <= self.length:
            actual = f"{of}times has shape {tuple(times.shape)}"
            raise ValueError(f"{actual}; expected (B, T) with 0 < T <= {self.length}")
        check_range(f"{of}times", times, self.horizon)
        shape = tuple(times.shape)
        check_tensor(f"{of}returns", returns, "floats", shape)
        check_tensor(f"{of}states", states, "floats", (*shape, self.states))
        if self.discrete:
            check_tensor(f"{of}actions", actions, "int64", shape)
            check_range(f"{of}actions", actions, self.actions)
        else:
            check_tensor(f"{of}actions", actions, "floats", (*shape, self.actions))
