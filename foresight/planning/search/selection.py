"""Selection rules of the search: PUCT, UCT and Gumbel, and their parts.

A rule is a frozen dataclass of parameters. Its math is written twice: here over tensors, for the tensor backend and for
the reader; and in `kernels`, of which `compiled` names the function. A test compares the two.

A rule compares action values after two explicit steps, on which the literature differs:

- `first_play`: the value of an untried action. "lowest": the lowest of the node's own value and its tried actions
  (mctx); "zero" (AlphaZero's draw, in values of [-1, 1]); "loss": -1; "parent": the node's mean value; "reduced": that
  minus `reduction` · √(prior mass of the tried actions) (KataGo);
- `normalize`: "siblings": to [0, 1] by the node's own value and its actions (mctx; Gumbel: by its completed actions
  alone); "tree": by the lowest and the highest action value of the whole search so far (MuZero, arXiv:1911.08265,
  eq. 5); "none": unchanged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from foresight import errors
from foresight.errors import UserError

FIRST_PLAY = ("lowest", "zero", "loss", "parent", "reduced")
NORMALIZE = ("siblings", "tree", "none")
EPSILON = 1e-8  # the smallest range that values are divided by (mctx)
TINY = float(np.finfo(np.float32).tiny)


class Node(NamedTuple):
    """One node per row, as the input of a rule. float64, so that both backends choose the same action.

    - `logits`, `prior`, `q` `[B, A]`: policy and action values (0 where untried);
    - `visits` `[B, A]`: of the actions; `legal` `[B, A]` bool;
    - `value`, `raw`, `total` `[B]`: mean value, the model's own value, and visits of the node itself;
    - `low`, `high` `[B]`: the range of action values in the whole search so far (inf and -inf before the first).
    """

    logits: Tensor
    prior: Tensor
    q: Tensor
    visits: Tensor
    legal: Tensor
    value: Tensor
    raw: Tensor
    total: Tensor
    low: Tensor
    high: Tensor


class Rule(Protocol):
    """A selection rule: the action of a simulation at a node, and the action and policy target of the search."""

    reuses: ClassVar[bool]
    """Whether a search can continue in the tree of an earlier one."""

    def noise(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """The noise `[B, A]` of a search from roots with these logits; 0 without a generator."""

    def schedule(self, logits: Tensor, simulations: int) -> Tensor | None:
        """The visits that the root action of each simulation must have, int64 `[B, S]`; None: scores decide."""

    def score(self, node: Node) -> Tensor:
        """Scores `[B, A]` inside the tree: the legal action with the highest score is selected (ties: the first)."""

    def noisy_score(self, node: Node, noise: Tensor, planned: Tensor | None) -> Tensor:
        """`score` with the noise of the search.

        At the root of a search with a schedule, only actions with `planned` `[B]` visits are allowed; None elsewhere.
        """

    def action_and_weights(
        self, root: Node, noise: Tensor, temperature: float, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """`(action [B], weights [B, A])` of the finished search: the action to play, and the policy target."""

    def compiled(self) -> tuple[Callable[..., None], np.ndarray]:
        """The compiled descent with this rule (see `kernels`), and its parameters."""


# --- parts of the rules


def first_play(node: Node, how: str = "lowest", reduction: float = 0.0) -> Tensor:
    """Action values `[B, A]` with values for untried actions filled in; see the module docstring for `how`."""
    tried, own = node.visits > 0, node.value.unsqueeze(-1)
    if how == "lowest":
        missing = torch.minimum(own, torch.where(tried, node.q, own).amin(-1, keepdim=True))
    elif how == "zero":
        missing = torch.zeros_like(own)
    elif how == "loss":
        missing = torch.full_like(own, -1.0)
    elif how == "parent":
        missing = own
    elif how == "reduced":
        missing = own - reduction * (node.prior * tried).sum(-1, keepdim=True).sqrt()
    else:
        raise errors.unknown("first-play rule", how, FIRST_PLAY)
    return torch.where(tried, node.q, missing)


def normalize(node: Node, q: Tensor, how: str = "siblings") -> Tensor:
    """`q` `[B, A]` scaled; see the module docstring for `how`. If the range is empty, values are unchanged with "tree"
    (MuZero's pseudocode) and 0 with "siblings" (mctx).
    """
    if how == "siblings":
        own, tried = node.value.unsqueeze(-1), node.visits > 0
        values = torch.where(tried, node.q, own)
        low = torch.minimum(own, values.amin(-1, keepdim=True))
        high = torch.maximum(own, values.amax(-1, keepdim=True))
        return (q - low) / (high - low).clamp(min=EPSILON)
    if how == "tree":
        low, high = node.low.unsqueeze(-1), node.high.unsqueeze(-1)
        return torch.where(high > low, (q - low) / (high - low), q)
    if how == "none":
        return q
    raise errors.unknown("normalization", how, NORMALIZE)


def mixed_value(node: Node) -> Tensor:
    """v_mix `[B]`: the model's value mixed with the values of tried actions, weighted by their priors.

        v_mix = (v + ΣN · Σ_tried π q / Σ_tried π) / (1 + ΣN)

    Source: Danihelka et al. 2022 (Gumbel MuZero), appendix D.
    """
    tried, count = node.visits > 0, node.visits.sum(-1)
    weight = node.prior.clamp(min=TINY) * tried
    mass = weight.sum(-1)
    mean = (weight * node.q).sum(-1) / torch.where(mass > 0, mass, 1.0)
    return (node.raw + count * mean) / (1 + count)


def completed_values(
    node: Node, value_scale: float = 0.1, max_visit_init: float = 50.0, how: str = "siblings"
) -> Tensor:
    """σ(completedQ) `[B, A]`: v_mix for untried actions, then scaled (`how`, see the module docstring), then

        σ(q) = (max_visit_init + max_a N(a)) · value_scale · q

    Source: Danihelka et al. 2022, eq. 8 and 10. "siblings" is mctx's: of two actions the better one always gets 1 and
    the worse one 0, however close they are. Illegal actions are included with v_mix, as in mctx.
    """
    q = torch.where(node.visits > 0, node.q, mixed_value(node).unsqueeze(-1))
    if how == "siblings":
        low, high = q.amin(-1, keepdim=True), q.amax(-1, keepdim=True)
        q = (q - low) / (high - low).clamp(min=EPSILON)
    else:
        q = normalize(node, q, how)
    return (max_visit_init + node.visits.amax(-1, keepdim=True)) * value_scale * q


def improved_logits(node: Node, rule: Gumbel) -> Tensor:
    """Logits `[B, A]` of π' = softmax(logits + σ(completedQ)): Gumbel MuZero's policy target (eq. 11)."""
    return node.logits + completed_values(node, rule.value_scale, rule.max_visit_init, rule.normalize)


def considered_visits(considered: int, simulations: int) -> list[int]:
    """Sequential Halving as a schedule: the visits of the action to be tried next, for each simulation.

    All `considered` actions get equal visits, then the better half, and so on. Source: Karnin et al. 2013; Danihelka et
    al. 2022, algorithm 2.
    """
    if considered <= 1:
        return list(range(simulations))
    rounds = math.ceil(math.log2(considered))
    sequence: list[int] = []
    visits, left = [0] * considered, considered
    while len(sequence) < simulations:
        for _ in range(max(1, simulations // (rounds * left))):
            sequence += visits[:left]
            visits[:left] = [n + 1 for n in visits[:left]]
        left = max(2, left // 2)
    return sequence[:simulations]


def halving_score(node: Node, gumbel: Tensor, planned: Tensor, rule: Gumbel) -> Tensor:
    """Scores `[B, A]` at the root: gumbel + logits + σ(completedQ), -inf where visits are not `planned` `[B]`."""
    q = completed_values(node, rule.value_scale, rule.max_visit_init, rule.normalize)
    score = (gumbel + (node.logits - node.logits.amax(-1, keepdim=True)) + q).clamp(min=-1e9)
    return score.masked_fill(node.visits != planned.unsqueeze(-1), -torch.inf)


def dirichlet(logits: Tensor, alpha: float, fraction: float, generator: torch.Generator | None = None) -> Tensor:
    """Logits `[B, A]` of (1 - fraction) · prior + fraction · Dirichlet(alpha), over legal actions only.

    Raises UserError unless `alpha` is above 0 and `fraction` in [0, 1].

    Source: Silver et al. 2017 (AlphaGo Zero); alpha ≈ 10 / legal moves in AlphaZero (0.3 chess, 0.15 shogi, 0.03 Go).
    """
    check_noise(alpha, fraction)
    legal = logits > -1e30
    home = generator.device if generator is not None else logits.device
    shape = torch.full(logits.shape, alpha, dtype=torch.float64, device=home)
    draw = torch._standard_gamma(shape, generator=generator).to(logits.device).clamp(min=TINY) * legal
    noise = draw / draw.sum(-1, keepdim=True)
    prior = torch.softmax(logits.double().masked_fill(~legal, -torch.inf), -1)
    mixed = (1 - fraction) * prior + fraction * noise
    return mixed.clamp(min=TINY).log().float().masked_fill(~legal, -torch.inf)


def check_noise(alpha: float, fraction: float) -> None:
    """Raise UserError unless `alpha` is above 0 and `fraction` in [0, 1]."""
    if not 0 < alpha < math.inf:
        raise UserError(f"dirichlet_alpha must be a number above 0, not {alpha}.")
    if not 0 <= fraction <= 1:
        raise UserError(f"dirichlet_fraction must be between 0 and 1, not {fraction}.")


def gumbel_noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard Gumbel noise shaped like `like`, drawn on the generator's device: equal on all devices."""
    draw = torch.empty(like.shape, device=generator.device).exponential_(generator=generator)
    return -draw.clamp_(min=TINY).log_().to(like.device)


def tie_noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Noise in [0, 1e-7) that breaks ties. One draw per search and action."""
    return 1e-7 * torch.rand(like.shape, generator=generator, device=generator.device).to(like.device)


def by_visits(root: Node, temperature: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """`(action [B], weights [B, A])`: the weights are the shares of the visits (the prior, if there are no visits).

    The action is sampled in proportion to visits^(1/temperature), never an unvisited one, or at temperature 0 the most
    visited one (ties: the first).
    """
    count = root.visits.sum(-1, keepdim=True)
    weights = torch.where(count > 0, root.visits / count.clamp(min=1), root.prior)
    if temperature == 0:
        return weights.masked_fill(~root.legal, -1.0).argmax(-1), weights
    sharp = torch.softmax(weights.log() / temperature, -1) * root.legal
    home = generator.device if generator is not None else sharp.device
    return torch.multinomial(sharp.to(home), 1, generator=generator).squeeze(-1).to(sharp.device), weights


# --- the rules


@dataclasses.dataclass(frozen=True)
class PUCT:
    """Value plus an exploration bonus in proportion to the prior:

        q(a) + prior(a) · √N / (1 + N(a)) · (c_init + ln((1 + N + c_base) / c_base))

    with N the visits of the node. Source: AlphaZero (Silver et al. 2018), MuZero (arXiv:1911.08265), eq. 2. `c_base`
    inf leaves only c_init (AlphaGo's c_puct). AlphaZero's boards: `normalize="none", first_play="zero"`.

    The last `chance` actions are chance outcomes, whose prior is their probability. A node where they are legal is a
    chance node, at which the search tries

        argmax_a prior(a) / (1 + N(a))

    so that visits are proportional to the probabilities and the node's value tends to the expectation (like every node,
    it includes its own first value in the mean). Source: Stochastic MuZero (Antonoglou et al. 2022), appendix.
    """

    c_init: float = 1.25
    c_base: float = 19652.0
    normalize: str = "siblings"
    first_play: str = "lowest"
    reduction: float = 0.2
    chance: int = 0
    reuses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.normalize, self.first_play)

    def noise(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """See `tie_noise`."""
        return torch.zeros_like(logits) if generator is None else tie_noise(logits, generator)

    def schedule(self, logits: Tensor, simulations: int) -> Tensor | None:
        """None: scores decide."""
        return None

    def score(self, node: Node) -> Tensor:
        """See the class."""
        q = normalize(node, first_play(node, self.first_play, self.reduction), self.normalize)
        growth = self.c_init + torch.log1p((node.total + 1) / self.c_base)
        score = q + (node.total.sqrt() * growth).unsqueeze(-1) * node.prior / (1 + node.visits)
        if not self.chance:
            return score
        outcomes = node.legal[:, -self.chance :].any(-1, keepdim=True)
        return torch.where(outcomes, node.prior / (1 + node.visits), score)

    def noisy_score(self, node: Node, noise: Tensor, planned: Tensor | None) -> Tensor:
        """See `Rule`."""
        return self.score(node) + noise

    def action_and_weights(
        self, root: Node, noise: Tensor, temperature: float, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """See `by_visits`."""
        return by_visits(root, temperature, generator)

    def compiled(self) -> tuple[Callable[..., None], np.ndarray]:
        """See `Rule`."""
        from foresight.planning.search import kernels  # late: it imports numba

        how = [NORMALIZE.index(self.normalize), FIRST_PLAY.index(self.first_play)]
        return kernels.puct, np.array([self.c_init, self.c_base, *how, self.reduction, self.chance])


@dataclasses.dataclass(frozen=True)
class UCT:
    """Value plus c · √(ln N / N(a)); untried actions come first, in order of their prior.

    Source: Kocsis & Szepesvári 2006; c = √2 in values of [-1, 1]. With random playouts as the model's value and a
    uniform prior it is plain Monte Carlo tree search.
    """

    c: float = math.sqrt(2.0)
    normalize: str = "none"
    reuses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.normalize, "zero")

    def noise(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """See `tie_noise`."""
        return torch.zeros_like(logits) if generator is None else tie_noise(logits, generator)

    def schedule(self, logits: Tensor, simulations: int) -> Tensor | None:
        """None: scores decide."""
        return None

    def score(self, node: Node) -> Tensor:
        """See the class."""
        q = normalize(node, node.q, self.normalize)
        bonus = self.c * (node.total.log().unsqueeze(-1) / node.visits.clamp(min=1)).sqrt()
        return torch.where(node.visits > 0, q + bonus, 1e6 + node.prior)

    def noisy_score(self, node: Node, noise: Tensor, planned: Tensor | None) -> Tensor:
        """See `Rule`."""
        return self.score(node) + noise

    def action_and_weights(
        self, root: Node, noise: Tensor, temperature: float, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """See `by_visits`."""
        return by_visits(root, temperature, generator)

    def compiled(self) -> tuple[Callable[..., None], np.ndarray]:
        """See `Rule`."""
        from foresight.planning.search import kernels  # late: it imports numba

        return kernels.uct, np.array([self.c, NORMALIZE.index(self.normalize)])


@dataclasses.dataclass(frozen=True)
class Gumbel:
    """Sequential Halving over `considered` root actions, sampled without replacement by Gumbel noise; inside the tree,
    without noise,

        argmax_a π'(a) - N(a) / (1 + ΣN),   π' = softmax(logits + σ(completedQ)).

    Source: Danihelka et al. 2022, *Policy improvement by planning with Gumbel*. `scale` 0 removes the noise (for
    play in games of perfect information). mctx's value_scale is 0.1; the paper has 1.0 for Go and chess.
    """

    considered: int = 16
    value_scale: float = 0.1
    max_visit_init: float = 50.0
    normalize: str = "siblings"
    scale: float = 1.0
    reuses: ClassVar[bool] = False  # all visits are planned in advance

    def __post_init__(self) -> None:
        _check(self.normalize, "zero")
        if self.considered < 1:
            raise UserError(f"Gumbel's considered must be at least 1 action, not {self.considered}.")
        if not 0 <= self.value_scale < math.inf:
            raise UserError(f"Gumbel's value_scale must be a number of at least 0, not {self.value_scale}.")
        if not 0 <= self.max_visit_init < math.inf:
            raise UserError(f"Gumbel's max_visit_init must be a number of at least 0, not {self.max_visit_init}.")

    def noise(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """Gumbel noise times `scale`, by which root actions are sampled without replacement."""
        if generator is None or not self.scale:
            return torch.zeros_like(logits)
        return self.scale * gumbel_noise(logits, generator)

    def schedule(self, logits: Tensor, simulations: int) -> Tensor | None:
        """Sequential Halving over the legal actions, at most `considered`; see `considered_visits`."""
        considered = (logits != -torch.inf).sum(-1).clamp(max=self.considered)
        table = torch.zeros(int(considered.max()) + 1, max(simulations, 1), dtype=torch.int64)
        for m in set(considered.tolist()):  # other rows stay empty
            table[m] = torch.tensor(considered_visits(m, table.shape[1]))
        return table.to(logits.device)[considered]

    def score(self, node: Node) -> Tensor:
        """See the class."""
        prior = torch.softmax(improved_logits(node, self), -1)
        return prior - node.visits / (1 + node.visits.sum(-1, keepdim=True))

    def noisy_score(self, node: Node, noise: Tensor, planned: Tensor | None) -> Tensor:
        """`halving_score` at the root; no noise below it."""
        return self.score(node) if planned is None else halving_score(node, noise, planned, self)

    def action_and_weights(
        self, root: Node, noise: Tensor, temperature: float, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """The action with the highest score of the most visited ones, and π'."""
        weights = torch.softmax(improved_logits(root, self), -1) if root.visits.any() else root.prior
        score = halving_score(root, noise, root.visits.amax(-1), self)
        return score.masked_fill(~root.legal, -torch.inf).argmax(-1), weights

    def compiled(self) -> tuple[Callable[..., None], np.ndarray]:
        """See `Rule`."""
        from foresight.planning.search import kernels  # late: it imports numba

        return kernels.gumbel, np.array([self.value_scale, self.max_visit_init, NORMALIZE.index(self.normalize)])


def _check(normalize: str, first_play: str) -> None:
    if normalize not in NORMALIZE:
        raise errors.unknown("normalization", normalize, NORMALIZE)
    if first_play not in FIRST_PLAY:
        raise errors.unknown("first-play rule", first_play, FIRST_PLAY)
