"""PlaNet's recurrent state-space model: a world model whose latents are Gaussian.

    h_t = f(h_{t-1}, s_{t-1}, a_{t-1})                 deterministic state, a GRU
    s_t ~ q(s | h_t, x_t) = N(μ, σ²)                   posterior, with the observation
    ŝ_t ~ p(s | h_t) = N(μ, σ²)                        prior, without it: what planning uses
    x̂_t, r̂_{t-1}                                       from h_t and s_t: observation; reward of the step that led here

Source: Hafner et al. 2019 (arXiv:1811.04551), eq. 4 and 5, and its code for what the text leaves out (σ = softplus +
`min_std`, the layer before the GRU). There is no model of the continuation: it predicts 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from foresight.data.sequences import Arrival
from foresight.data.trajectory import Trajectory, Tree
from foresight.nets.models.world_model import ObsModel, Policy, imagined, reconstruction
from foresight.nets.outputs import Normal

State = dict[str, Tensor]  # "deter" `[..., D]`, "stoch" `[..., S]`


class GaussianRSSM(nn.Module):
    """The model of one kind of observation `obs` and of actions with `action_width` features.

    `deter` units of h, `stoch` Gaussian latents of a standard deviation of at least `min_std`, `hidden` units between.
    A KL divergence below `free_nats` has no gradient. The reward has `layers` layers of `units`. `decoded`: rows that
    are reconstructed, see `world_model.reconstruction`.
    """

    kept: Sequence[str] = ("deter", "stoch", "action")
    discounted = False

    def __init__(
        self,
        obs: ObsModel,
        action_width: int,
        deter: int = 200,
        stoch: int = 30,
        hidden: int = 200,
        units: int = 300,
        layers: int = 3,
        min_std: float = 0.1,
        free_nats: float = 3.0,
        decoded: int = 0,
    ) -> None:
        super().__init__()
        self.obs, self.action_width, self.deter, self.stoch = obs, action_width, deter, stoch
        self.min_std, self.free_nats, self.decoded = min_std, free_nats, decoded
        self.size = deter + stoch  # of the features
        self.inputs = nn.Sequential(nn.Linear(stoch + action_width, hidden), nn.ReLU())
        self.cell = nn.GRUCell(hidden, deter)
        self.prior_layers = nn.Sequential(nn.Linear(deter, hidden), nn.ReLU(), nn.Linear(hidden, 2 * stoch))
        self.post_deter, self.post_obs = nn.Linear(deter, hidden), nn.Linear(obs.size, hidden, bias=False)
        self.post_out = nn.Linear(hidden, 2 * stoch)
        self.decoder = obs.decoder(self.size)
        sizes = [self.size] + [units] * layers
        inner = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.reward = nn.Sequential(*inner, nn.Linear(sizes[-1], 1), nn.Flatten(-2))

    def initial(self, batch: int) -> State:
        """The carry before the first step: state and last action, all zero."""
        like = self.post_out.bias
        sizes = {"deter": self.deter, "stoch": self.stoch, "action": self.action_width}
        return {name: like.new_zeros(batch, size) for name, size in sizes.items()}

    def carry(self, state: State, action: Tensor) -> State:
        """See `WorldModel`: the state and the action."""
        return {"deter": state["deter"], "stoch": state["stoch"], "action": action}

    def features(self, state: State) -> Tensor:
        """h and s, `[..., size]`."""
        return torch.cat([state["deter"], state["stoch"]], -1)

    def observe(self, carry: State, obs: Tree, action: Tensor, cut: Tensor, generator: torch.Generator | None) -> State:
        """See `WorldModel`; the states also hold `mean` and `std` of the posterior, `[B, T, S]`."""
        tokens = self.post_obs(self.obs(obs))  # of all steps at once: the loop only does what depends on the last state
        before = torch.cat([carry["action"].unsqueeze(1), action[:, :-1]], 1)
        keep = torch.cat([torch.ones_like(cut[:, :1]), 1 - cut[:, :-1]], 1).unsqueeze(-1)
        before = before * keep
        noise = _noise(*tokens.shape[:2], self.stoch, like=tokens, generator=generator)
        deter, stoch = carry["deter"], carry["stoch"]
        steps: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for t in range(tokens.shape[1]):
            deter = self._advance(deter * keep[:, t], stoch * keep[:, t], before[:, t])
            post = self._normal(self.post_out(torch.relu(self.post_deter(deter) + tokens[:, t])))
            stoch = post.location + post.std * noise[:, t]
            steps.append((deter, stoch, post.location, post.std))
        names = ("deter", "stoch", "mean", "std")
        return {name: torch.stack(parts, 1) for name, parts in zip(names, zip(*steps, strict=True), strict=True)}

    def latest(self, obs: Tree, action: Tensor, cut: Tensor, generator: torch.Generator | None) -> State:
        """See `WorldModel`."""
        found = self.observe(self.initial(len(cut)), obs, action, cut, generator)
        return {name: found[name][:, -1] for name in ("deter", "stoch")}

    def prior(self, deter: Tensor) -> Normal:
        """p(s | h), of `[..., D]`."""
        return self._normal(self.prior_layers(deter))

    def imagine(
        self, state: State, policy: Policy, horizon: int, generator: torch.Generator
    ) -> tuple[Trajectory, Tensor]:
        """See `WorldModel`. The latents are sampled from the prior; the continuation is 1."""
        deter, stoch = state["deter"], state["stoch"]
        features, actions = [self.features(state)], []
        for _ in range(horizon):
            action = policy(features[-1]).sample(generator)
            deter = self._advance(deter, stoch, policy.action_features(action))
            stoch = self.prior(deter).sample(generator)
            features.append(torch.cat([deter, stoch], -1))
            actions.append(action)
        states = torch.stack(features, 1)
        reward = self.reward(states[:, 1:])
        return imagined(states, actions, reward, torch.ones_like(reward))

    def begin(self, state: State) -> State:
        """See `WorldModel`."""
        return {"deter": state["deter"], "stoch": state["stoch"]}

    def advance(self, state: State, action: Tensor, generator: torch.Generator) -> tuple[State, Tensor, Tensor]:
        """See `WorldModel`. The latents are sampled from the prior; the continuation is 1."""
        deter = self._advance(state["deter"], state["stoch"], action)
        state = {"deter": deter, "stoch": self.prior(deter).sample(generator)}
        reward = self.reward(self.features(state))
        return state, reward, torch.ones_like(reward)

    def decode(self, state: State) -> Tensor:
        """See `WorldModel`."""
        return self.obs.picture(self.decoder(self.features(state)))

    def rewards(self, state: State, actions: Tensor) -> Tensor:
        """The predicted rewards `[N, H]` of actions `[N, H, A]` from states `[N, ...]`, by the means of the latents."""
        deter, stoch = state["deter"], state["stoch"]
        features = []
        for t in range(actions.shape[1]):
            deter = self._advance(deter, stoch, actions[:, t])
            stoch = self.prior_layers(deter)[:, : self.stoch]
            features.append(torch.cat([deter, stoch], -1))
        return self.reward(torch.stack(features, 1))

    def loss(
        self, carry: State, batch: Trajectory, arrival: Arrival, generator: torch.Generator
    ) -> tuple[dict[str, Tensor], State]:
        """The terms of eq. 4, `[B, T]` each, and the posterior states.

        - `reconstruction`: -log p(x_t | h_t, s_t), a normal of variance 1, up to a constant;
        - `reward`: the same of the reward of the step that led to t, `arrival`; 0 where it is not known;
        - `divergence`: max(free_nats, KL[q ‖ p]).

        Shapes: `batch` `[B, T]` with action features `[B, T, A]`.
        """
        state = self.observe(carry, batch.obs, batch.action, batch.cut, generator)
        features, posterior = self.features(state), Normal(state["mean"], state["std"])
        terms = {
            "reconstruction": 0.5
            * reconstruction(self.obs, self.decoder, features, batch.obs, self.decoded, generator),
            "reward": 0.5 * arrival.known * (self.reward(features) - arrival.reward).square(),
            "divergence": posterior.kl(self.prior(state["deter"])).clamp(min=self.free_nats),
        }
        return terms, state

    def _advance(self, deter: Tensor, stoch: Tensor, action: Tensor) -> Tensor:
        return self.cell(self.inputs(torch.cat([stoch, action], -1)), deter)

    def _normal(self, x: Tensor) -> Normal:
        mean, std = x.chunk(2, -1)
        return Normal(mean, functional.softplus(std) + self.min_std)


def _noise(*shape: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal; 0 without a generator."""
    if generator is None:
        return like.new_zeros(shape)
    return torch.randn(shape, device=like.device, generator=generator)
