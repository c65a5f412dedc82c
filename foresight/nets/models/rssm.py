"""The recurrent state-space model of DreamerV3: a world model whose latents are categoricals.

    h_t = f(h_{t-1}, z_{t-1}, a_{t-1})                 deterministic state, a GRU in blocks
    z_t ~ q(z | h_t, x_t)                              posterior, with the observation
    ẑ_t ~ p(z | h_t)                                   prior, without it: what imagination uses
    x̂_t, r̂_{t-1}, ĉ_{t-1} ~ p( · | h_t, z_t)           observation; reward and continuation of the step that led here

Source: Hafner et al. 2023 (arXiv:2301.04104), eq. 1 to 5, and its code for what the text leaves out (blocks, gates).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import binary_cross_entropy_with_logits

from foresight.data.sequences import Arrival
from foresight.data.trajectory import Trajectory, Tree
from foresight.nets.models import rssm_scan
from foresight.nets.models.world_model import (
    EPS,
    Dense,
    Logits,
    ObsModel,
    Policy,
    RMSNorm,
    TwoHotMLP,
    compiled_step,
    imagined,
    linear,
    mlp,
    reconstruction,
    truncated,
)
from foresight.nets.outputs import OneHots, one_hots
from foresight.nets.precision import compiled
from foresight.ops import latent

State = dict[str, Tensor]  # "deter" `[..., D]`, "stoch" `[..., G C]`: one-hot categoricals, flattened


class BlockLinear(nn.Module):
    """A linear layer whose weight matrix is block-diagonal: `[..., blocks, inputs]` to `[..., blocks, outputs]`."""

    def __init__(self, blocks: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(blocks, 1, outputs))
        truncated(self.weight, inputs)

    def forward(self, x: Tensor) -> Tensor:
        """x `[N, blocks, inputs]`."""
        return torch.baddbmm(self.bias, x.transpose(0, 1), self.weight).transpose(0, 1)


class RSSM(nn.Module):
    """The model of one kind of observation `obs` and of actions with `action_width` features.

    `deter` units of h in `blocks` blocks, `groups` categoricals of `classes` classes, `hidden` units between. `unimix`
    is the share of uniform probability in every categorical. KL divergences below `free_nats` have no gradient. The
    heads of reward and continuation have `layers` layers of `units`. Per update, `decoded` rows of every sequence are
    reconstructed; 0: all. Without a `decoder` the features must agree with the encoding of the observation instead.
    """

    kept: Sequence[str] = ("deter", "stoch", "action")
    discounted = True
    backend: str | None = None  # of torch.compile, see `world_model.compile_steps`

    def __init__(
        self,
        obs: ObsModel,
        action_width: int,
        deter: int = 512,
        hidden: int = 64,
        groups: int = 32,
        classes: int = 4,
        blocks: int = 8,
        unimix: float = 0.01,
        free_nats: float = 1.0,
        units: int = 64,
        layers: int = 1,
        decoded: int = 0,
        decoder: bool = True,
    ) -> None:
        super().__init__()
        self.decoded = decoded
        self.obs, self.action_width = obs, action_width
        self.deter, self.groups, self.classes, self.blocks = deter, groups, classes, blocks
        self.unimix, self.free_nats = unimix, free_nats
        stoch = groups * classes
        self.size = deter + stoch  # of the features
        self.from_deter, self.from_stoch = Dense(deter, hidden), Dense(stoch, hidden)
        self.from_action = Dense(action_width, hidden)
        self.mix = BlockLinear(blocks, deter // blocks + 3 * hidden, deter // blocks)
        self.mix_norm = RMSNorm(deter, eps=EPS)
        self.gates = BlockLinear(blocks, deter // blocks, 3 * deter // blocks)
        self.prior_layers = nn.Sequential(Dense(deter, hidden), Dense(hidden, hidden))
        self.prior_logits = linear(hidden, stoch, kind=Logits)
        self.post_deter, self.post_obs = linear(deter, hidden), linear(obs.size, hidden)
        self.post_norm = RMSNorm(hidden, eps=EPS)
        self.post_logits = linear(hidden, stoch, kind=Logits)
        self.decoder = obs.decoder(self.size) if decoder else None
        self.projection = None if decoder else nn.Linear(self.size, obs.size, bias=False)
        self.reward = TwoHotMLP(self.size, units, layers)
        self.continues = mlp(self.size, units, layers, 1)

    def initial(self, batch: int) -> State:
        """The carry before the first step: state and last action, all zero."""
        like = self.gates.bias
        sizes = {"deter": self.deter, "stoch": self.groups * self.classes, "action": self.action_width}
        return {name: like.new_zeros(batch, size) for name, size in sizes.items()}

    def carry(self, state: State, action: Tensor) -> State:
        """See `WorldModel`: the state and the action."""
        return {"deter": state["deter"], "stoch": state["stoch"], "action": action}

    def features(self, state: State) -> Tensor:
        """h and z, `[..., size]`."""
        return torch.cat([state["deter"], state["stoch"]], -1)

    def observe(self, carry: State, obs: Tree, action: Tensor, cut: Tensor, generator: torch.Generator | None) -> State:
        """See `WorldModel`; the states also hold the logits of the posterior, `[B, T, G, C]`."""
        return self._observe(carry, self.obs(obs), action, cut, generator)

    def _observe(
        self, carry: State, encoded: Tensor, action: Tensor, cut: Tensor, generator: torch.Generator | None
    ) -> State:
        tokens = self.post_obs(encoded)  # of all steps at once: the loop only does what depends on the last state
        before = torch.cat([carry["action"].unsqueeze(1), action[:, :-1]], 1)
        keep = torch.cat([torch.ones_like(cut[:, :1]), 1 - cut[:, :-1]], 1).unsqueeze(-1)
        inputs = self.from_action(before * keep)
        draws = None  # for the mode
        if generator is not None:
            draws = torch.rand(*cut.shape, self.groups, generator=generator, device=tokens.device)
        deter, stoch = carry["deter"], carry["stoch"]
        if compiled(tokens, deter, cut):
            deters, stochs, probs = rssm_scan.scan(self, deter, stoch, inputs, tokens, keep.squeeze(-1), draws)
            return {"deter": deters, "stoch": stochs, "posterior": probs.log()}
        steps: list[tuple[Tensor, Tensor, Tensor]] = []
        for t in range(tokens.shape[1]):
            deter = self._advance(deter * keep[:, t], stoch * keep[:, t], inputs[:, t])
            hidden = functional.silu(self.post_norm(self.post_deter(deter) + tokens[:, t]))
            post = self._categoricals(self.post_logits(hidden))
            stoch = post.straight_through(None if draws is None else draws[:, t])
            steps.append((deter, stoch, post.logps))
        deters, stochs, logits = (torch.stack(parts, 1) for parts in zip(*steps, strict=True))
        return {"deter": deters, "stoch": stochs, "posterior": logits}

    def latest(self, obs: Tree, action: Tensor, cut: Tensor, generator: torch.Generator | None) -> State:
        """See `WorldModel`."""
        found = self.observe(self.initial(len(cut)), obs, action, cut, generator)
        return {name: found[name][:, -1] for name in ("deter", "stoch")}

    def prior(self, deter: Tensor) -> OneHots:
        """p(z | h), of `[..., D]`."""
        return self._categoricals(self.prior_logits(self.prior_layers(deter)))

    def imagine(
        self, state: State, policy: Policy, horizon: int, generator: torch.Generator
    ) -> tuple[Trajectory, Tensor]:
        """See `WorldModel`. The latents are sampled from the prior."""
        deter, stoch = state["deter"], state["stoch"]
        draws = torch.rand(len(deter), horizon, self.groups, generator=generator, device=deter.device)
        if compiled(deter) and not torch.is_grad_enabled():
            rolled, actions = rssm_scan.rollout(self, deter, stoch, policy, draws, generator)
            return self._imagined(rolled, actions)
        features, actions = [self.features(state)], []
        ahead = compiled_step(RSSM._ahead, self.backend)
        for t in range(horizon):
            output = policy(features[-1])
            action = output.sample(generator)
            deter, stoch = ahead(self, deter, stoch, policy.action_features(action), draws[:, t])
            features.append(torch.cat([deter, stoch], -1))
            actions.append(action)
        return self._imagined(torch.stack(features, 1), actions)

    def _ahead(self, deter: Tensor, stoch: Tensor, action: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """The next h and ẑ, drawn at `draws` `[N, G]`."""
        deter = self._advance(deter, stoch, self.from_action(action))
        return deter, self.prior(deter).straight_through(draws)

    def begin(self, state: State) -> State:
        """See `WorldModel`."""
        return {"deter": state["deter"], "stoch": state["stoch"]}

    def advance(self, state: State, action: Tensor, generator: torch.Generator) -> tuple[State, Tensor, Tensor]:
        """See `WorldModel`. The latents are sampled from the prior."""
        deter = self._advance(state["deter"], state["stoch"], self.from_action(action))
        logits = self.prior_logits(self.prior_layers(deter))
        state = {"deter": deter, "stoch": one_hots(logits, self.groups, self.unimix, generator)}
        features = self.features(state)
        return state, self.reward(features).mean(), self.continues(features).squeeze(-1).sigmoid()

    def decode(self, state: State) -> Tensor:
        """See `WorldModel`."""
        assert self.decoder is not None
        return self.obs.picture(self.decoder(self.features(state)))

    def loss(
        self, carry: State, batch: Trajectory, arrival: Arrival, generator: torch.Generator
    ) -> tuple[dict[str, Tensor], State]:
        """The terms of eq. 5, `[B, T]` each, and the posterior states.

        - `reconstruction`: -log p(x_t | h_t, z_t); without a decoder, `redundancy`: R2-Dreamer's loss of Barlow Twins
          between a projection of (h_t, z_t) and the encoding of x_t, which has no gradient there (ICLR 2026);
        - `reward`, `continuation`: of the step that led to t, `arrival`; 0 where it is not known;
        - `dynamics`: max(free_nats, KL[sg(q) ‖ p]), `representation`: max(free_nats, KL[q ‖ sg(p)]).

        Shapes: `batch` `[B, T]` with action features `[B, T, A]`; the discount is the target of the continuation.
        """
        encoded = self.obs(batch.obs)
        state = self._observe(carry, encoded, batch.action, batch.cut, generator)
        features = self.features(state)
        posterior, prior = OneHots(state["posterior"]), self.prior(state["deter"])
        dynamics, representation = latent.balanced_kl(posterior, prior, self.free_nats)
        logit = self.continues(features).squeeze(-1)
        if self.decoder is not None:
            seen = reconstruction(self.obs, self.decoder, features, batch.obs, self.decoded, generator)
        else:
            assert self.projection is not None
            with torch.autocast(features.device.type, enabled=False):  # a correlation over the batch needs float32
                seen = latent.redundancy(self.projection(features), encoded.detach().float()).expand_as(arrival.known)
        terms = {
            "redundancy" if self.decoder is None else "reconstruction": seen,
            "reward": arrival.known * self.reward(features).loss(arrival.reward),
            "continuation": arrival.known * binary_cross_entropy_with_logits(logit, arrival.discount, reduction="none"),
            "dynamics": dynamics,
            "representation": representation,
        }
        return terms, state

    def _advance(self, deter: Tensor, stoch: Tensor, action: Tensor) -> Tensor:
        """h after the step: a GRU in blocks, each of which sees its part of h, and z and the action whole."""
        shared = torch.cat([self.from_deter(deter), self.from_stoch(stoch), action], -1).unsqueeze(1)
        parts = torch.cat([deter.unflatten(1, (self.blocks, -1)), shared.expand(-1, self.blocks, -1)], -1)
        mixed = functional.silu(self.mix_norm(self.mix(parts).flatten(1)))
        gates = self.gates(mixed.unflatten(1, (self.blocks, -1))).float()  # so h is, whatever multiplies
        reset, candidate, update = (gate.flatten(1) for gate in gates.chunk(3, -1))
        update = torch.sigmoid(update - 1)  # biased towards keeping the state
        return torch.lerp(deter, torch.tanh(torch.sigmoid(reset) * candidate), update)

    def _imagined(self, features: Tensor, actions: list[Tensor]) -> tuple[Trajectory, Tensor]:
        """The result of `imagine`: what led to all states but the first. The heads read all, as that copies nothing."""
        reward, logit = self.reward(features).mean()[:, 1:], self.continues(features).squeeze(-1)[:, 1:]
        return imagined(features, actions, reward, logit.sigmoid())

    def _categoricals(self, logits: Tensor) -> OneHots:
        return OneHots.mixed(logits.unflatten(-1, (self.groups, self.classes)), self.unimix)
