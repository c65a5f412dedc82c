"""What agents that learn in imagination share: rollouts and their returns, the actor's loss, the optimizer.

Source: DreamerV3, Hafner et al. 2023 (arXiv:2301.04104), "Critic learning" and "Actor learning".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from gymnasium import spaces as gs
from torch import Tensor, nn
from torch.nn import functional

from foresight.data.trajectory import Trajectory, Tree
from foresight.errors import UserError
from foresight.nets.models.latent_actor import LatentActor
from foresight.nets.models.world_model import Policy, WorldModel
from foresight.nets.outputs import Output
from foresight.ops import returns, transforms
from foresight.planning.search.mcts import PUCT, search


@torch.no_grad()
def rollout(
    model: WorldModel, starts: dict[str, Tensor], policy: Policy, horizon: int, gamma: float, generator: torch.Generator
) -> tuple[Trajectory, Tensor]:
    """`WorldModel.imagine` with γ in the discount, of models whose predicted continuation includes it and others."""
    steps, features = model.imagine(starts, policy, horizon, generator)
    return steps if model.discounted else steps.replace(discount=gamma * steps.discount), features


class Inside:
    """A world model with its actor and critic as a model to search in, `planning.search.mcts.Model`.

    The actions are discrete, the roots posterior states of `model`. Latents are drawn from `generator`.
    """

    def __init__(
        self, model: WorldModel, actor: LatentActor, critic: nn.Module, gamma: float, generator: torch.Generator
    ) -> None:
        self.model, self.actor, self.critic, self.generator = model, actor, critic, generator
        self.gamma = 1.0 if model.discounted else gamma

    def root(self, obs: Tree) -> tuple[Tensor, Tensor, Tree]:
        """See `Model`: of posterior states `[B, ...]`."""
        state = self.model.begin(obs)
        return *self._predicted(state), state

    def step(self, state: Tree, action: Tensor) -> tuple[Tree, Tensor, Tensor, Tensor, Tensor]:
        """See `Model`."""
        state, reward, discount = self.model.advance(state, self.actor.action_features(action), self.generator)
        return state, reward, self.gamma * discount, *self._predicted(state)

    def _predicted(self, state: Tree) -> tuple[Tensor, Tensor]:
        features = self.model.features(state)
        return self.actor(features).logps, self.critic(features).mean()


def searched(inside: Inside, state: Tree, simulations: int, explore: bool) -> Tensor:
    """MuZero's action `[B]` from posterior states `[B, ...]`: its rule and visits; drawn in proportion if `explore`."""
    rule = PUCT(normalize="tree", first_play="parent")
    return search(
        inside, state, simulations, rule, temperature=float(explore), generator=inside.generator if explore else None
    ).action


def require_searchable(simulations: int, space: gs.Space[Any]) -> None:
    """Raises UserError if there are `simulations` to be made over actions that are not discrete."""
    if simulations and not isinstance(space, gs.Discrete):
        raise UserError(
            f"search_simulations is {simulations}, but only Discrete actions are searched, not {space}. Set it to 0."
        )


def imagined_return(steps: Trajectory, value: Tensor, lam: float) -> Tensor:
    """The λ-return of every imagined step, `[N, H]`, from the values `[N, H + 1]` of all states.

    Becomes the predicted one-step target when λ = 0.
    """
    return returns.lambda_return(steps.reward, steps.discount, steps.cut, value[:, 1:], lam)


def replayed_return(batch: Trajectory, imagined: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """The λ-returns `[B, T]` of replayed rewards, which bootstrap from the `imagined` ones `[B, T]`; which are known.

    The last row has no successor, and a final observation no action: 0 there. Source: DreamerV3, "Critic learning".
    """
    known = functional.pad(1 - batch.cut[:, :-1], (0, 1))
    next_value = functional.pad(imagined[:, 1:], (0, 1))
    return returns.lambda_return(batch.reward, batch.discount, batch.cut, next_value, lam, known), known


def reach_weights(first: Tensor, discount: Tensor) -> Tensor:
    """The probability `[N, H]` that each imagined step is reached: of the root `first` `[N]`, then of continuing.

    The continuation of a step itself is not in its own weight.
    """
    return torch.cat([first.unsqueeze(1), discount[:, :-1]], 1).cumprod(1)


class Spread(nn.Module):
    """The running range of returns between their 5th and 95th percentile, at least 1; saved with the agent."""

    estimate: Tensor

    def __init__(self, rate: float = 0.01) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("estimate", torch.zeros(()))

    def update(self, returns: Tensor) -> Tensor:
        """The range after `returns` (any shape) of one batch were counted."""
        self.estimate.copy_(transforms.percentile_scale(returns, self.estimate, self.rate))
        return self.estimate.clamp(min=1.0)


def saturated(bins: Tensor, *targets: Tensor) -> Tensor:
    """The share of two-hot `targets` (any shapes) beyond the `bins` `[K]`, which are learned as the outermost bin."""
    outside = torch.stack([((x < bins[0]) | (x > bins[-1])).float().mean() for x in targets])
    return outside.mean()


def actor_loss(output: Output, action: Tensor, advantage: Tensor, weight: Tensor, entropy_coef: float) -> Tensor:
    """Reinforce with an entropy bonus, `[...]`: -w (sg(A) log π(a) + η H). Source: eq. 7."""
    return -weight * (advantage.detach() * output.logp(action) + entropy_coef * output.entropy())


class LaProp(torch.optim.Optimizer):
    """LaProp with adaptive gradient clipping, the optimizer of DreamerV3.

        g ← g · min(1, agc · max(‖w‖, 1e-3) / ‖g‖)         of every tensor
        n ← β₂ n + (1 - β₂) g²,  m ← β₁ m + (1 - β₁) g / (√n̂ + ε)
        w ← w - lr · m̂

    Source: Ziyin et al. 2020 (arXiv:2002.04839), algorithm 1; Brock et al. 2021 (arXiv:2102.06171), eq. 3, with norms
    of whole tensors. The learning rate rises linearly over the first `warmup` steps.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-20,
        agc: float = 0.3,
        warmup: int = 1000,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "agc": agc, "warmup": warmup})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of any optimizer; the counts of steps also move to the device of their weights."""
        super().load_state_dict(state_dict)  # which leaves counts where they were saved: a graph would hold a constant
        for p, state in self.state.items():
            if p.is_cuda:
                state["step"] = state["step"].to(p.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step with the gradients that are there."""
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in weights]
            if not weights:
                continue
            for p in weights:
                if not self.state[p]:
                    self.state[p] = {
                        "step": torch.zeros((), device=p.device if p.is_cuda else None),
                        "square": torch.zeros_like(p),
                        "moment": torch.zeros_like(p),
                    }
            states = [self.state[p] for p in weights]
            squares, moments = [s["square"] for s in states], [s["moment"] for s in states]
            steps = [s["step"] for s in states]
            torch._foreach_add_(steps, 1)
            count = int(steps[0]) if steps[0].is_cpu else steps[0].double()  # on a GPU nothing waits for a number
            (b1, b2), lr = group["betas"], group["lr"] * _at_most_1(count / max(1, group["warmup"]))
            bounds = torch._foreach_clamp_min(torch._foreach_norm(weights), 1e-3)
            torch._foreach_mul_(bounds, group["agc"])
            torch._foreach_div_(bounds, torch._foreach_clamp_min(torch._foreach_norm(grads), 1e-6))
            grads = list(torch._foreach_mul(grads, torch._foreach_clamp_max(bounds, 1.0)))
            torch._foreach_mul_(squares, b2)
            torch._foreach_addcmul_(squares, grads, grads, 1 - b2)
            root = torch._foreach_sqrt(torch._foreach_div(squares, _number(1 - b2**count)))
            torch._foreach_add_(root, group["eps"])
            torch._foreach_div_(grads, root)
            torch._foreach_lerp_(moments, grads, 1 - b1)
            scale = _number(-lr / (1 - b1**count))
            if isinstance(scale, Tensor):
                torch._foreach_add_(weights, torch._foreach_mul(moments, scale))
            else:
                torch._foreach_add_(weights, moments, alpha=scale)


def _number(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) else x


def _at_most_1(x: Any) -> Any:
    return x.clamp(max=1.0) if isinstance(x, Tensor) else min(1.0, x)
