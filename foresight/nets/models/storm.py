"""STORM's world model: categorical latents of single observations, and a causal transformer over them.

    z_t ~ q(z | o_t)                                   posterior, of the observation alone
    e_t = m(z_t, a_t)                                  one token a step: the mixer
    h_t = f(e_{≤t})                                    a sequence model over the tokens of the episode
    ẑ_{t+1}, r̂_t, ĉ_t ~ p( · | h_t)                    prior of the next latent; reward and continuation of the step
    ô_t = d(z_t)                                       reconstruction

Source: Zhang et al. 2023 (arXiv:2310.09615). As elsewhere, a state belongs to an observation: that of row t
is z_t and h_{t-1}, which is 0 at the first row of an episode.

The sequence model is a module of its own (`SequenceModel`): the transformer of `nets.sequence.transformer`, or an LSTM.
Its cache lives only inside one roll-out: outside, the memory is the latents and actions of the last steps, which are
read again, all at once, with the weights of the moment. So no cache outlives an update.

Departures from the published network: normalization comes before attention and MLP, not after; positions are rotary,
not learned, so that they have no limit; the encoder has no batch statistics, so that acting, imagining and training see
the same latents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, pad

from foresight.data.sequences import Arrival
from foresight.data.trajectory import Trajectory, Tree
from foresight.nets.models.contrastive import Contrastive
from foresight.nets.models.world_model import (
    Logits,
    ObsModel,
    Policy,
    TwoHotMLP,
    compiled_step,
    imagined,
    linear,
    mlp,
    reconstruction,
)
from foresight.nets.outputs import OneHots, one_hots
from foresight.nets.precision import recording
from foresight.nets.sequence.recurrent import Recurrent
from foresight.nets.sequence.transformer import Cache, Transformer, TransformerConfig
from foresight.ops import latent
from foresight.ops.seeding import seed_global

State = dict[str, Any]
# "deter" `[..., D]`: h of the step before; "stoch" `[..., G C]`: one-hot categoricals, flattened; "context"
# `[..., K, G C + A]`: latents and actions of the K steps before, of which "filled" `[..., K]` are of this episode.
# In steps without an observation (`advance`), the memory of the sequence model instead of the context: "memory".


class SequenceModel(Protocol):
    """A causal model of sequences of tokens, of `size` features in and out. `dropout` is a probability."""

    size: int
    dropout: float

    def train(self, mode: bool = True) -> Any:
        """With dropout, as in `nn.Module`."""

    def eval(self) -> Any:
        """Without dropout."""

    def read(self, x: Tensor, start: Tensor) -> Tensor:
        """All outputs `[B, T, size]` of tokens `[B, T, size]`. `start` `[B, T]` is true where an episode starts."""

    def prefill(self, x: Tensor, filled: Tensor, horizon: int) -> tuple[Tensor, Any]:
        """The output `[N, size]` after the tokens `[N, K, size]`, and a memory with room for `horizon` more.

        Only those that are `filled` `[N, K]` are read: none, or some at the end. If none is, the output is undefined.
        """

    def step(self, x: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """The output `[N, size]` after one more token `[N, size]`, and the memory."""

    def window(self, memory: Any, slots: int) -> dict[str, Tensor]:
        """The memory of the last `slots` tokens as tensors `[N, ...]`, whose shapes depend on `slots` only."""

    def slide(self, x: Tensor, window: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """As `step`, of a `window`, in which the new token takes the place of the oldest."""


class CausalTransformer(nn.Module):
    """A transformer as a `SequenceModel`. Its memory is the static cache of keys and values (`transformer.Cache`)."""

    def __init__(self, size: int, layers: int, heads: int, dropout: float = 0.0) -> None:
        """Published: size 512, 2 layers, 8 heads, dropout 0.1, and MLPs of twice the width."""
        super().__init__()
        self.size, self.dropout = size, dropout
        self.net = Transformer(
            TransformerConfig(
                layers=layers, dim=size, heads=heads, hidden=2 * size, norm="layer", activation="gelu", dropout=dropout
            )
        )
        self.eval()

    def read(self, x: Tensor, start: Tensor) -> Tensor:
        """See `SequenceModel`."""
        return self.net(x, start=start)[0]

    def prefill(self, x: Tensor, filled: Tensor, horizon: int) -> tuple[Tensor, Any]:
        """See `SequenceModel`. All tokens are read at once."""
        cache = self.net.empty_cache(len(x), None if torch.is_grad_enabled() else x.shape[1] + horizon)
        h, cache = self.net(x, cache, mask=filled)
        return h[:, -1], cache

    def step(self, x: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """See `SequenceModel`."""
        h, memory = self.net(x.unsqueeze(1), memory)
        return h.squeeze(1), memory

    def window(self, memory: Any, slots: int) -> dict[str, Tensor]:
        """See `SequenceModel`: keys and values `[N, layers, heads, slots, D]`, which are real, the next position."""
        room = slots - memory.length  # below 0, the oldest are dropped
        keys, values = (pad(torch.stack(x, 1), (0, 0, room, 0)) for x in (memory.keys, memory.values))
        return {"keys": keys, "values": values, "real": pad(memory.mask, (room, 0)), "position": memory.lengths}

    def slide(self, x: Tensor, window: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """See `SequenceModel`."""
        position, slots = window["position"], window["real"].shape[1]
        cache = Cache(window["keys"].unbind(1), window["values"].unbind(1), window["real"], slots, static=False)
        h, cache = self.net(x.unsqueeze(1), cache, positions=position.unsqueeze(1))
        return h.squeeze(1), {**self.window(cache, slots), "position": position + 1}


class RecurrentSequence(nn.Module):
    """An LSTM as a `SequenceModel`, with as many weights as a `CausalTransformer` of equal size: 8 size² a layer."""

    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        self.size, self.dropout = size, 0.0
        self.net = Recurrent("lstm", size, size, layers)

    def read(self, x: Tensor, start: Tensor) -> Tensor:
        """See `SequenceModel`."""
        return self.net(x, self.net.initial(len(x)), start)[0]

    def prefill(self, x: Tensor, filled: Tensor, horizon: int) -> tuple[Tensor, Any]:
        """See `SequenceModel`."""
        y, memory = self.net(x, self.net.initial(len(x)), first_filled(filled))
        keep = filled[:, -1, None, None]
        return y[:, -1], {name: value * keep for name, value in memory.items()}

    def step(self, x: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """See `SequenceModel`."""
        y, memory = self.net(x.unsqueeze(1), memory)
        return y.squeeze(1), memory

    def window(self, memory: Any, slots: int) -> dict[str, Tensor]:
        """See `SequenceModel`: the state, which remembers all tokens."""
        return dict(memory)

    def slide(self, x: Tensor, window: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """See `SequenceModel`."""
        return self.step(x, window)


def first_filled(filled: Tensor) -> Tensor:
    """True at the first of the filled slots, `[N, K]` bool of bool."""
    return filled & ~pad(filled[:, :-1], (1, 0))


class STORM(nn.Module):
    """The model of one kind of observation `obs` and of actions with `action_width` features.

    `sequence` is the model over tokens. A latent has `groups` categoricals of `classes` classes, with a share `unimix`
    of uniform probability each. Acting and imagination see the last `context` steps; steps without an observation, the
    last `window`. KL divergences whose mean is below `free_nats` have no gradient. The heads of reward and continuation
    have `layers` layers of `units`. `contrastive` adds TWISTER's loss. Per update, `decoded` rows of every sequence are
    reconstructed; 0: all.
    """

    kept: Sequence[str] = ()
    discounted = True
    backend: str | None = None  # of torch.compile, see `world_model.compile_steps`

    def __init__(
        self,
        obs: ObsModel,
        action_width: int,
        sequence: SequenceModel,
        groups: int = 32,
        classes: int = 32,
        context: int = 8,
        unimix: float = 0.01,
        free_nats: float = 1.0,
        units: int = 512,
        layers: int = 2,
        contrastive: Contrastive | None = None,
        window: int = 64,
        decoded: int = 0,
    ) -> None:
        super().__init__()
        self.obs, self.sequence, self.action_width = obs, sequence, action_width
        self.context, self.window, self.decoded = context, window, decoded
        self.groups, self.classes, self.unimix, self.free_nats = groups, classes, unimix, free_nats
        width, stoch = sequence.size, groups * classes
        self.size = stoch + width  # of the features
        self.post_logits = linear(obs.size, stoch, kind=Logits)
        self.decoder = obs.decoder(stoch)
        self.mixer = nn.Sequential(
            nn.Linear(stoch + action_width, width, bias=False), nn.LayerNorm(width), nn.ReLU(),
            nn.Linear(width, width, bias=False), nn.LayerNorm(width),
        )  # fmt: skip
        self.prior_logits = linear(width, stoch, kind=Logits)
        self.reward = TwoHotMLP(width, units, layers)
        self.continues = mlp(width, units, layers, 1)
        self.contrastive = contrastive

    def initial(self, batch: int) -> State:
        """The carry before the first step: no step is remembered."""
        like = self.prior_logits.bias
        context = like.new_zeros(batch, self.context, self.groups * self.classes + self.action_width)
        return {"context": context, "filled": torch.zeros_like(context[..., 0], dtype=torch.bool)}

    def carry(self, state: State, action: Tensor) -> State:
        """See `WorldModel`: the last steps, this one included."""
        token = torch.cat([state["stoch"], action], -1).unsqueeze(-2)
        filled = torch.cat([state["filled"][..., 1:], torch.ones_like(state["filled"][..., :1])], -1)
        return {"context": torch.cat([state["context"][..., 1:, :], token], -2), "filled": filled}

    def features(self, state: State) -> Tensor:
        """z of the observation and h before it, `[..., size]`."""
        return torch.cat([state["stoch"], state["deter"]], -1)

    def observe(self, carry: State, obs: Tree, action: Tensor, cut: Tensor, generator: torch.Generator | None) -> State:
        """See `WorldModel`; the states also hold the logits of the posterior, `[B, T, G, C]`.

        All rows are read at once. A row sees the rows before it that are of its episode, in the sequence and the carry.
        """
        state, tokens, start = self._contexts(carry, obs, action, cut, generator)
        h = self.sequence.read(self.mixer(tokens[:, :-1]), start[:, :-1])
        keep = ~start[:, self.context :, None]
        return {**state, "deter": h[:, self.context - 1 :].float() * keep}

    def latest(self, obs: Tree, action: Tensor, cut: Tensor, generator: torch.Generator | None) -> State:
        """See `WorldModel`: without h, which `imagine` computes."""
        state, _, _ = self._contexts(self.initial(len(cut)), obs, action, cut, generator)
        return {name: state[name][:, -1] for name in ("stoch", "context", "filled")}

    def prior(self, deter: Tensor) -> OneHots:
        """p(z | h), of `[..., D]`."""
        return self._categoricals(self.prior_logits(deter))

    def decode(self, state: State) -> Tensor:
        """See `WorldModel`: the reconstruction from z."""
        return self.obs.picture(self.decoder(state["stoch"]))

    def begin(self, state: State) -> State:
        """See `WorldModel`: the context is read."""
        _, memory = self.sequence.prefill(self.mixer(state["context"]), state["filled"], 0)
        memory = self.sequence.window(memory, self.window)
        return {"deter": state["deter"], "stoch": state["stoch"], "memory": memory}

    def advance(self, state: State, action: Tensor, generator: torch.Generator) -> tuple[State, Tensor, Tensor]:
        """See `WorldModel`. One more token is read; the memory is of the last `window` tokens, the context included."""
        token = torch.cat([state["stoch"], action], -1)
        deter, memory = self.sequence.slide(self.mixer(token), state["memory"])
        after = {"deter": deter, "stoch": self._sampled(self.prior_logits(deter), generator), "memory": memory}
        return after, self.reward(deter).mean(), self.continues(deter).squeeze(-1).sigmoid()

    def imagine(
        self, state: State, policy: Policy, horizon: int, generator: torch.Generator
    ) -> tuple[Trajectory, Tensor]:
        """See `WorldModel`. The context is read at once; then every step adds one token to the memory of the model."""
        stoch, filled = state["stoch"], state["filled"]
        last, memory = self.sequence.prefill(self.mixer(state["context"]), filled, horizon)
        deter = last * filled[:, -1:]
        features, actions, deters = [torch.cat([stoch, deter], -1)], [], []
        ahead = compiled_step(STORM._ahead, self.backend)
        for _ in range(horizon):
            action = policy(features[-1]).sample(generator)
            deter, logits, memory = ahead(self, stoch, policy.action_features(action), memory)
            stoch = self._sampled(logits, generator)
            features.append(torch.cat([stoch, deter], -1))
            actions.append(action)
            deters.append(deter)
        later = torch.stack(deters, 1)
        states, discount = torch.stack(features, 1), self.continues(later).squeeze(-1).sigmoid()
        return imagined(states, actions, self.reward(later).mean(), discount)

    def _ahead(self, stoch: Tensor, action: Tensor, memory: Any) -> tuple[Tensor, Tensor, Any]:
        """h after one more token, the logits of the next latent, and the memory."""
        deter, memory = self.sequence.step(self.mixer(torch.cat([stoch, action], -1)), memory)
        return deter, self.prior_logits(deter), memory

    def loss(
        self, carry: State, batch: Trajectory, arrival: Arrival, generator: torch.Generator
    ) -> tuple[dict[str, Tensor], State]:
        """The terms of the loss, `[B, T]` each, and the states.

        - `reconstruction`: -log p(o_t | z_t);
        - `reward`, `continuation`: of the step that led to t, `arrival`, from h_{t-1}; 0 where it is not known;
        - `dynamics`: max(free_nats, mean KL[sg(q) ‖ p]), `representation`: max(free_nats, mean KL[q ‖ sg(p)]); 0 where
          the step before is not known. The mean is that of the batch, as in the paper's code;
        - `contrastive`, with that module: see there.

        Shapes: `batch` `[B, T]` with action features `[B, T, A]`; the discount is the target of the continuation.
        """
        with _dropout(self.sequence, generator):
            state = self.observe(carry, batch.obs, batch.action, batch.cut, generator)
        posterior, prior = OneHots(state["posterior"]), self.prior(state["deter"])
        dynamics, representation = latent.balanced_kl(posterior, prior, 0.0)
        logit = self.continues(state["deter"]).squeeze(-1)
        terms = {
            "reconstruction": reconstruction(
                self.obs, self.decoder, state["stoch"], batch.obs, self.decoded, generator
            ),
            "reward": arrival.known * self.reward(state["deter"]).loss(arrival.reward),
            "continuation": arrival.known * binary_cross_entropy_with_logits(logit, arrival.discount, reduction="none"),
            "dynamics": _mean_free(dynamics, arrival.known, self.free_nats),
            "representation": _mean_free(representation, arrival.known, self.free_nats),
        }
        if self.contrastive is not None:
            crops = self.obs(self.obs.augmented(batch.obs, generator))
            keys = self._categoricals(self.post_logits(crops)).sample(generator)
            terms["contrastive"] = self.contrastive(state["deter"], batch.action, keys, batch.cut, arrival.known)
        return terms, state

    def _contexts(
        self, carry: State, obs: Tree, action: Tensor, cut: Tensor, generator: torch.Generator | None
    ) -> tuple[State, Tensor, Tensor]:
        """The states without h; the inputs of all tokens `[B, K + T, ...]`, K of the carry; where episodes start."""
        posterior = self._categoricals(self.post_logits(self.obs(obs)))
        stoch = posterior.mode() if generator is None else posterior.sample(generator)
        filled = carry["filled"]
        tokens = torch.cat([carry["context"], torch.cat([stoch, action], -1)], 1)
        start = torch.cat([first_filled(filled), ~filled[:, -1:], cut[:, :-1] > 0], 1)
        episode = start.long().cumsum(1)  # 0 in empty slots, which are an episode of their own
        before = episode.unfold(1, self.context, 1)[:, :-1] == episode[:, self.context :, None]
        context = tokens.unfold(1, self.context, 1)[:, :-1].transpose(-1, -2)
        return {"stoch": stoch, "posterior": posterior.logps, "context": context, "filled": before}, tokens, start

    def _categoricals(self, logits: Tensor) -> OneHots:
        return OneHots.mixed(logits.unflatten(-1, (self.groups, self.classes)), self.unimix)

    def _sampled(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Samples `[N, G C]` of `_categoricals`."""
        return one_hots(logits, self.groups, self.unimix, generator)


def _mean_free(kl: Tensor, known: Tensor, free_nats: float) -> Tensor:
    """`kl` where it is known, 0 elsewhere; without gradient, and on average `free_nats`, if its mean is below that."""
    mean = (kl * known).sum() / known.sum().clamp(min=1)
    return known * torch.where(mean > free_nats, kl, free_nats)


@contextlib.contextmanager
def _dropout(net: SequenceModel, generator: torch.Generator) -> Iterator[None]:
    """Dropout in `net`, drawn from `generator`: torch's own draws from the global one, which is left alone.

    While a CUDA graph is recorded the global generator is drawn from: no value can be read to seed it.
    """
    if not net.dropout:
        yield
        return
    device = generator.device
    if recording(device):
        net.train()
        yield
        net.eval()
        return
    seed = int(torch.randint(2**31, (1,), generator=generator, device=device))
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        seed_global(seed, device)
        net.train()
        try:
            yield
        finally:
            net.eval()
