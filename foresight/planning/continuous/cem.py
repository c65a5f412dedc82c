"""CEM and MPPI: planning by sampling action sequences, scoring them, and moving the sampling distribution.

Both are batched over B environments and N candidates, with actions scaled to [-1, 1]. `score` maps action sequences
`[B, N, H, A]` to returns `[B, N]`. `lookahead` scores them by any model with a `step`: learned dynamics with a value
after H steps, or the simulator itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from foresight.data.trajectory import Tree, tree_map
from foresight.errors import UserError

Score = Callable[[Tensor], Tensor]
Step = Callable[[Tree, Tensor], tuple[Tree, Tensor, Tensor]]


class Plan(NamedTuple):
    """A distribution over action sequences: independent normals with `mean` and `std` `[B, H, A]`."""

    mean: Tensor
    std: Tensor


def initial(batch: int, horizon: int, actions: int, std: float = 1.0, device: str | torch.device = "cpu") -> Plan:
    """Mean 0 and the same standard deviation everywhere."""
    mean = torch.zeros(batch, horizon, actions, device=device)
    return Plan(mean, torch.full_like(mean, std))


def shifted(plan: Plan, std: float) -> Plan:
    """The warm start of the next step: the plan without its first action, mean 0 for the new last one, and `std`."""
    mean = torch.cat([plan.mean[:, 1:], torch.zeros_like(plan.mean[:, :1])], 1)
    return Plan(mean, torch.full_like(mean, std))


def sample(plan: Plan, candidates: int, generator: torch.Generator) -> Tensor:
    """`candidates` action sequences `[B, N, H, A]`, clipped to [-1, 1]."""
    batch, *rest = plan.mean.shape
    noise = torch.randn(batch, candidates, *rest, generator=generator, device=plan.mean.device)
    return (plan.mean.unsqueeze(1) + plan.std.unsqueeze(1) * noise).clamp(-1, 1)


def best(sequences: Tensor, returns: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` sequences of highest return, `[B, count, H, A]`, and their returns `[B, count]`, the best first."""
    top = returns.topk(count, 1)
    index = top.indices.view(*top.indices.shape, 1, 1).expand(-1, -1, *sequences.shape[2:])
    return sequences.gather(1, index), top.values


def require_elites(candidates: int, elites: int) -> None:
    """Raise UserError if there are more elites than candidates."""
    if elites > candidates:
        raise UserError(f"elites is {elites}, but there are only {candidates} candidates. Set elites to at most that.")


def chosen(elites: Tensor, weight: Tensor, generator: torch.Generator) -> Tensor:
    """One of the `elites` `[B, E, H, A]` per environment, drawn in proportion to `weight` `[B, E]`: `[B, H, A]`."""
    index = torch.multinomial(weight, 1, generator=generator).squeeze(1)
    return elites[torch.arange(len(elites), device=elites.device), index]


def lookahead(
    step: Step, state: Tree, sequences: Tensor, gamma: float = 1.0, value: Callable[[Tree], Tensor] | None = None
) -> Tensor:
    """The returns `[B, N]` of action sequences `[B, N, H, A]` from states `[B, ...]`.

        Σ_t c_0 ⋯ c_{t-1} γᵗ r_t + c_0 ⋯ c_{H-1} γᴴ v(s_H)

    `step` maps states and actions, M = B·N rows of each, to `(state, reward [M], discount [M])`. That discount is c: 0
    at a termination, or the predicted continuation. Without a `value` what comes after H steps is worth 0.
    """
    batch, count = sequences.shape[:2]
    state = tree_map(lambda x: x.repeat_interleave(count, 0), state)
    total, weight = sequences.new_zeros(batch * count), sequences.new_ones(batch * count)
    for action in sequences.flatten(0, 1).unbind(1):
        state, reward, discount = step(state, action)
        total = total + weight * reward
        weight = gamma * weight * discount
    if value is not None:
        total = total + weight * value(state)
    return total.view(batch, count)


@torch.no_grad()
def cem(score: Score, plan: Plan, candidates: int, elites: int, iterations: int, generator: torch.Generator) -> Plan:
    """The cross-entropy method: refit mean and standard deviation to the `elites`, `iterations` times.

    Source: Rubinstein & Kroese 2004; PlaNet (Hafner et al. 2019, arXiv:1811.04551), algorithm 2, which acts by the
    first mean (1,000 candidates, 100 elites, 10 iterations, horizon 12). Becomes random shooting with one iteration
    and one elite.
    """
    for _ in range(iterations):
        sequences = sample(plan, candidates, generator)
        top, _ = best(sequences, score(sequences), elites)
        plan = Plan(top.mean(1), top.std(1, correction=0))
    return plan


@torch.no_grad()
def best_scored(
    score: Score, plan: Plan, candidates: int, elites: int, iterations: int, generator: torch.Generator
) -> Tensor:
    """The best `[B, H, A]` of all sequences that `cem` scores.

    By it acts iCEM (Pinneri et al. 2020, arXiv:2008.06389).
    """
    found: list[tuple[Tensor, Tensor]] = []

    def watched(sequences: Tensor) -> Tensor:
        returns = score(sequences)
        found.append(best(sequences, returns, 1))
        return returns

    cem(watched, plan, candidates, elites, iterations, generator)
    tops, returns = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    return best(tops, returns, 1)[0][:, 0]


@torch.no_grad()
def mppi(
    score: Score,
    plan: Plan,
    candidates: int,
    elites: int,
    iterations: int,
    generator: torch.Generator,
    temperature: float = 0.5,
    std_range: tuple[float, float] = (0.05, 2.0),
    proposals: Tensor | None = None,
) -> tuple[Plan, Tensor, Tensor]:
    """Model predictive path integral control: as `cem`, with elites weighted by exp(temperature · (return - best)).

    `proposals` `[B, K, H, A]` are scored beside the candidates in every iteration: TD-MPC2's are of its policy. Returns
    the plan, the elites of the last iteration `[B, E, H, A]` and their weights `[B, E]`.
    Source: Williams et al. 2017 (arXiv:1707.02342); TD-MPC2 (Hansen et al. 2024, arXiv:2310.16828), appendix.
    """
    for _ in range(iterations):
        sequences = sample(plan, candidates, generator)
        if proposals is not None:
            sequences = torch.cat([sequences, proposals], 1)
        top, returns = best(sequences, score(sequences), elites)
        weight = torch.softmax(temperature * (returns - returns[:, :1]), 1)
        share = weight.view(*weight.shape, 1, 1)
        mean = (share * top).sum(1)
        std = (share * (top - mean.unsqueeze(1)).square()).sum(1).sqrt().clamp(*std_range)
        plan = Plan(mean, std)
    return plan, top, weight
