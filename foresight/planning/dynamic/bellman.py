"""Dynamic programming with a known model: Bellman operators, sweeps, greedy policies and exact values.

Notation: v `[S]` values, q `[S, A]` action values, L the optimality operator, L_π the operator of a policy.
Sutton & Barto (2018), chapter 4; Puterman (1994), chapter 6.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foresight.envs.tabular.mdp import MDP
from foresight.errors import UserError

DIRECT = 5_000  # states up to which a sparse factorization fills in at most a few hundred MB


def action_values(mdp: MDP, gamma: float, values: Tensor, part: slice = slice(None)) -> Tensor:
    """q(s, a) = r(s, a) + γ Σ_s' p(s' | s, a) v(s') `[S, A]`, with value 0 after the end of an episode (S&B eq. 4.6).

    `part` selects states, for MDPs whose tables `[S, A, K]` are too large to copy at once.
    """
    weight = mdp.prob[part] if mdp.discount is None else mdp.prob[part] * mdp.discount[part]
    return mdp.reward[part] + gamma * (weight * values[mdp.next_state[part].long()]).sum(-1)


def optimal_actions(mdp: MDP, gamma: float, values: Tensor, tolerance: float = 1e-9) -> Tensor:
    """The optimal actions, bool `[S, A]`: those within `tolerance` (in units of value) of the best one."""
    q = torch.cat([action_values(mdp, gamma, values, part) for part in _blocks(mdp)])
    return q >= q.amax(1, keepdim=True) - tolerance


def greedy(
    mdp: MDP, gamma: float, values: Tensor, keep: Tensor | None = None, slack: float | None = None
) -> tuple[Tensor, Tensor]:
    """max_a q(s, a) and argmax_a q(s, a) `[S]`, the first action of equals (S&B eq. 4.9).

    The actions `keep` `[S]` are kept unless another is better by more than `slack` (default: a bound on rounding
    errors). Without it policy iteration may switch forever between equally good actions (S&B exercise 4.4).
    """
    if slack is None:
        slack = rounding(values)
    bests, choices = [], []
    for part in _blocks(mdp):
        q = action_values(mdp, gamma, values, part)
        best, choice = q.max(1)
        if keep is not None:
            kept = keep[part]
            choice = torch.where(q.gather(1, kept[:, None]).squeeze(1) >= best - slack, kept, choice)
        bests.append(best)
        choices.append(choice)
    return torch.cat(bests), torch.cat(choices)


def rounding(values: Tensor) -> float:
    """A bound on the rounding errors of action values."""
    return 1e-9 * (1.0 + float(values.abs().max()))


def ending(mdp: MDP, values: Tensor, policy: Tensor, slack: float) -> Tensor:
    """The greedy `policy` `[S]` for optimal `values` without discount, with actions that lead to the end of an episode.

    Without discount an action that puts off a reward is as good as one that collects it, and a policy of such actions
    may never collect it. Of the actions within `slack` of the best one, in each state, from the end backward, one is
    taken that may end the episode or lead to a state where this was done: the policy is proper (Bertsekas & Tsitsiklis
    1991, doi:10.1287/moor.16.3.580), and its values are `values`. States from which no such action leads to the end are
    left as they were.
    """
    best = optimal_actions(mdp, 1.0, values, slack)
    weight = mdp.weight
    leads, policy = best & (weight.sum(-1) < 1.0 - 1e-12), policy.clone()
    reached = torch.zeros_like(policy, dtype=torch.bool)
    while (new := leads.any(1) & ~reached).any():
        kept = leads.gather(1, policy[:, None]).squeeze(1)
        policy = torch.where(new & ~kept, leads.int().argmax(1), policy)
        reached |= new
        leads |= best & ((weight * reached[mdp.next_state.long()]).sum(-1) > 0)
    return policy


def residual(mdp: MDP, gamma: float, values: Tensor) -> float:
    """The Bellman residual ‖Lv - v‖∞, which bounds the error: ‖v - v*‖∞ ≤ residual / (1 - γ)."""
    return float((greedy(mdp, gamma, values)[0] - values).abs().max())


def policy_model(mdp: MDP, policy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The Markov chain of a policy `[S]` (actions) or `[S, A]` (probabilities): (next_state, weight `[S, J]`, reward).

    J is K, or A·K for probabilities.
    """
    if policy.ndim == 1:
        chosen = torch.arange(mdp.states, device=policy.device), policy
        weight = mdp.prob[chosen]
        if mdp.discount is not None:
            weight = weight * mdp.discount[chosen]
        return mdp.next_state[chosen], weight, mdp.reward[chosen]
    taken = policy.to(torch.float64)
    reward = torch.where(taken > 0, taken * mdp.reward, 0.0).sum(1)  # the reward of an invalid action is -inf
    weight = (mdp.weight * taken[:, :, None]).flatten(1)
    return mdp.next_state.flatten(1), weight, reward


def policy_value(mdp: MDP, policy: Tensor, gamma: float) -> Tensor:
    """v_π `[S]`, exactly: the solution of (I - γ P_π) v = r_π (S&B eq. 4.4, Puterman 6.1.2).

    Solved by sparse factorization up to `DIRECT` states, and by BiCGSTAB beyond, with sweeps down to rounding errors if
    it does not converge. Raises UserError if gamma is 1 and the policy may never end an episode: its value is then not
    defined.
    """
    from scipy import sparse
    from scipy.sparse import linalg

    next_state, weight, reward = (x.cpu().numpy() for x in policy_model(mdp, policy))
    states, width = next_state.shape
    if gamma == 1.0:
        _require_ending(next_state, weight)
    indptr = np.arange(states + 1) * width
    # A copy, because sum_duplicates sorts in place, and the arrays of a stochastic policy are the MDP's own tables.
    chain = sparse.csr_matrix((weight.ravel(), next_state.ravel(), indptr), shape=(states, states), copy=True)
    chain.sum_duplicates()
    system = sparse.identity(states, format="csr") - gamma * chain
    if states <= DIRECT:
        values = linalg.splu(system.tocsc()).solve(reward)
    else:
        values, _ = linalg.bicgstab(system, reward, rtol=1e-14, maxiter=2_000)
        while np.abs(step := reward - system @ values).max() > 1e-13 * (1.0 + np.abs(values).max()):
            values = values + step  # one evaluation sweep: v + (r + γPv - v)
    return torch.from_numpy(np.asarray(values)).to(mdp.reward.device)


def start_value(mdp: MDP, values: Tensor) -> float:
    """The expected value of the initial state of an episode."""
    return float(mdp.start @ values)


def expected_return(mdp: MDP, policy: Tensor, gamma: float = 1.0, horizon: int | None = None) -> float:
    """The expected return of an episode of `policy` (`[S]` or `[S, A]`), discounted by gamma; exact, without sampling.

    With `horizon`, the return of the first `horizon` actions: for FrozenLake without discount, the success rate.
    """
    if horizon is None:
        return start_value(mdp, policy_value(mdp, policy, gamma))
    next_state, weight, reward = policy_model(mdp, policy)
    index, values = next_state.long(), torch.zeros_like(reward)
    for _ in range(horizon):
        values = reward + gamma * (weight * values[index]).sum(-1)
    return start_value(mdp, values)


def optimal_return(mdp: MDP, gamma: float = 1.0, horizon: int = 100) -> float:
    """The largest expected return of `horizon` actions over all policies, also time-dependent ones.

    By backward induction (Puterman 4.5).
    """
    sweeps = Sweeps(mdp, gamma)
    values, policy = torch.zeros_like(mdp.start), torch.zeros_like(mdp.start, dtype=torch.int64)
    for _ in range(horizon):
        values, policy, _ = sweeps.improve(values, policy)
    return start_value(mdp, values)


def evaluate(mdp: MDP, policy: Tensor, gamma: float) -> dict[str, float]:
    """Exact metrics of a policy: `value`, discounted by gamma, and `return`, undiscounted within the time limit.

    `return` is missing without a time limit.
    """
    metrics = {"value": expected_return(mdp, policy, gamma)}
    if mdp.time_limit is not None:
        metrics["return"] = expected_return(mdp, policy, 1.0, mdp.time_limit)
    return metrics


class Change(NamedTuple):
    """The change of the values in a sweep: Δ = v' - v lies in [low, high], which includes 0 if episodes can end."""

    low: float
    high: float
    switched: int  # states whose action changed
    sweeps: int = 1  # sweeps that the call made, of which this is the last

    @property
    def norm(self) -> float:
        """‖Δ‖∞, the Bellman residual of v. ‖v' - v*‖∞ ≤ γ / (1 - γ) times it (Puterman 6.3.1)."""
        return max(abs(self.low), abs(self.high))

    @property
    def half_span(self) -> float:
        """Half of max Δ - min Δ: the residual that remains after `extrapolate` has removed the middle of Δ."""
        return (self.high - self.low) / 2


def extrapolate(mdp: MDP, gamma: float, values: Tensor, change: Change) -> Tensor:
    """`values` = Lv, moved to the middle of the bounds on v* that follow from the last change Δ = Lv - v.

    γ/(1-γ) min Δ ≤ v* - Lv ≤ γ/(1-γ) max Δ (MacQueen 1966; Porteus 1971; Puterman 6.6.3). If episodes end, the end
    counts as one more state, with Δ = 0. Then ‖v - v*‖∞ ≤ γ/(1-γ) `change.half_span`. Needs γ < 1.
    """
    moved = values + gamma / (1.0 - gamma) * (change.low + change.high) / 2
    return torch.where(mdp.absorbing(), values, moved) if mdp.discount is not None else moved


class Sweeps:
    """Synchronous sweeps over all states: compiled on the CPU, with tensor operations on other devices.

    The compiled sweep computes the same values with less work, by temporary action elimination (Hastings & van Nunen
    1977; Puterman 6.7). If the values change by Δ in [low, high], every q(s, a) changes by a number in γ [low, high],
    so the gap between the best and the second best action shrinks by at most γ (high - low). The clock is the sum of
    these bounds, and `_deadline[s]` the clock at which the gap of the last full comparison may be closed. Before that,
    only the best action is computed. The table rows of the chosen actions are kept together in memory, also for policy
    evaluation.

    A compiled call makes up to `sweeps` sweeps, which saves the time between them. It ends earlier with a sweep that
    changes no value by `tolerance` or more, and after `kernels.OUTCOMES`, so that it can be interrupted.

    Arguments are not modified, but the next `improve` updates the `policy` returned by the last one in place.
    """

    def __init__(self, mdp: MDP, gamma: float, compiled: bool | None = None) -> None:
        if not 0.0 <= gamma <= 1.0:
            raise UserError(f"gamma must be between 0 and 1, not {gamma}.")
        self.mdp, self.gamma = mdp, gamma
        self.ends = mdp.discount is not None
        self.compiled = mdp.next_state.device.type == "cpu" if compiled is None else compiled
        if self.compiled:
            # Unsigned, because numba's wraparound of negative indices takes time.
            self._next = mdp.next_state.numpy().view(np.uint32)
            self._weight, self._reward = mdp.weight.numpy(), mdp.reward.numpy()
            self._deadline = np.full(mdp.states, -np.inf)
            self._make_rows()
        self._values: Tensor | None = None  # the last output: the clock is valid only for sweeps that start from it
        self._policy: Tensor | None = None  # the actions whose table rows are gathered
        self._totals = np.zeros(5)  # clock and scale of all sweeps; low, high and switched of the last

    def improve(
        self, values: Tensor, policy: Tensor, sweeps: int = 1, tolerance: float = 0.0
    ) -> tuple[Tensor, Tensor, Change]:
        """v' = Lv, v'(s) = max_a q(s, a), and the greedy policy for v, both `[S]`, with the change (S&B eq. 4.10).

        Of equally good actions the first is chosen.
        """
        if not self.compiled:
            new, chosen = greedy(self.mdp, self.gamma, values)
            return new, chosen, self._tensor_change(new - values, int((chosen != policy).sum()))
        if values is not self._values:
            self._forget(values)
        if policy is not self._policy:
            if self._row_next.shape[1] != self._next.shape[2]:
                self._make_rows()
            self._policy = policy.clone()
            self._deadline.fill(-np.inf)
        self._values = None  # if the call is interrupted, gaps and clock are those of other values
        from foresight.planning.dynamic import kernels

        found, count = kernels.improve(
            torch.get_num_threads(), sweeps, tolerance, self.ends, self._next, self._weight, self._reward, self.gamma,
            values.numpy(), self._policy.numpy(), self._row_next, self._row_weight, self._row_reward, self._deadline,
            self._totals,
        )  # fmt: skip
        self._values = new = torch.from_numpy(found)
        return new, self._policy, self._change(count)

    def evaluate(
        self, values: Tensor, policy: Tensor, sweeps: int = 1, tolerance: float = 0.0
    ) -> tuple[Tensor, Change]:
        """v' = L_π v, v'(s) = r(s, π(s)) + γ Σ_s' p(s' | s, π(s)) v(s') `[S]`, with the change (S&B eq. 4.5).

        `policy` is actions `[S]` or probabilities `[S, A]`.
        """
        if not self.compiled:
            next_state, weight, reward = policy_model(self.mdp, policy)
            new = reward + self.gamma * (weight * values[next_state.long()]).sum(-1)
            return new, self._tensor_change(new - values, 0)
        if values is not self._values:
            self._forget(values)
        if policy is not self._policy:
            self._gather(policy)
        self._values = None  # if the call is interrupted, gaps and clock are those of other values
        from foresight.planning.dynamic import kernels

        found, count = kernels.evaluate(
            torch.get_num_threads(), sweeps, tolerance, self.ends, self._row_next, self._row_weight, self._row_reward,
            self.gamma, values.numpy(), self._totals,
        )  # fmt: skip
        self._values = new = torch.from_numpy(found)
        return new, self._change(count)

    def undecided(self, values: Tensor) -> int:
        """The number of states in which the next `improve` compares all actions."""
        restart = not self.compiled or values is not self._values
        return self.mdp.states if restart else int((self._totals[0] >= self._deadline).sum())

    def _change(self, sweeps: int) -> Change:
        _, _, low, high, switched = self._totals.tolist()
        return Change(low, high, int(switched), sweeps)

    def _tensor_change(self, delta: Tensor, switched: int) -> Change:
        low, high = delta.min().item(), delta.max().item()
        return Change(min(low, 0.0), max(high, 0.0), switched) if self.ends else Change(low, high, switched)

    def _forget(self, values: Tensor) -> None:
        """Restart from values that are not the output of the last sweep: no gap is known."""
        self._deadline.fill(-np.inf)
        self._totals[:2] = 0.0, 1.0 + float(values.abs().max())

    def _make_rows(self) -> None:
        states, _, outcomes = self._next.shape
        self._row_next = np.empty((states, outcomes), np.uint32)
        self._row_weight = np.empty((states, outcomes))
        self._row_reward = np.empty(states)

    def _gather(self, policy: Tensor) -> None:
        self._policy = policy.clone()
        next_state, weight, reward = policy_model(self.mdp, policy)
        self._row_next = next_state.contiguous().numpy().view(np.uint32)
        self._row_weight, self._row_reward = weight.numpy(), reward.numpy()
        self._deadline.fill(-np.inf)


def unbounded(mdp: MDP, policy: Tensor, change: Tensor, tolerance: float) -> bool:
    """Whether values without discount have no bound: `policy` `[S]` never leaves states that all rise in a sweep.

    `change` `[S]` is that of `Sweeps.improve`, whose policy this is. Where it is above `tolerance` in a set of states
    that is never left, so is the mean reward of a step there (Puterman 8.5.5).
    """
    next_state, weight, _ = policy_model(mdp, policy)
    index, rising = next_state.long(), change > tolerance
    while rising.any():
        kept = rising & ((weight * rising[index]).sum(-1) > 1.0 - 1e-12)
        if torch.equal(kept, rising):
            return True
        rising = kept
    return False


def require_bounded(mdp: MDP, values: Tensor) -> None:
    """Raise UserError if `values` `[S]` without discount grow forever: see `unbounded`, of one sweep more."""
    best, policy = greedy(mdp, 1.0, values)
    if unbounded(mdp, policy, best - values, rounding(values)):
        raise no_bound(mdp)


def no_bound(mdp: MDP) -> UserError:
    """The error where no policy is optimal without discount."""
    return UserError(
        f"gamma = 1 on {mdp.name}: a policy that never ends an episode is best, and its return has no bound. Use "
        "gamma < 1."
    )


def _blocks(mdp: MDP, outcomes: int = 8_000_000) -> Iterator[slice]:
    """The states as slices with at most about `outcomes` outcomes each."""
    block = max(1, outcomes // (mdp.actions * mdp.next_state.shape[2]))
    return (slice(s, s + block) for s in range(0, mdp.states, block))


def require_ending(mdp: MDP, gamma: float) -> None:
    """Raise UserError if gamma is outside [0, 1], or is 1 and the end of an episode cannot be reached from some state.

    Without discount the value of such a state is an infinite sum.
    """
    if not 0.0 <= gamma <= 1.0:
        raise UserError(f"gamma must be between 0 and 1, not {gamma}.")
    if gamma == 1.0:
        lost = 0 if mdp.discount is None else _endless(*(x.cpu().numpy() for x in policy_model(mdp, mdp.uniform())[:2]))
        if mdp.discount is None or lost:
            which = (
                "it never ends"
                if mdp.discount is None
                else f"no end is reachable from {lost} of its {mdp.states} states"
            )
            raise UserError(f"gamma = 1 on {mdp.name}: {which}, so values are infinite sums. Use gamma < 1.")


def _require_ending(next_state: np.ndarray, weight: np.ndarray) -> None:
    """Raise UserError unless every state of a chain can reach an end (a row with a sum of weights below 1)."""
    lost = _endless(next_state, weight)
    if lost:
        raise UserError(
            f"With gamma = 1 the value of this policy is not defined: from {lost} of {len(next_state)} states "
            "it never ends the episode. Use gamma < 1, or value_iteration."
        )


def _endless(next_state: np.ndarray, weight: np.ndarray) -> int:
    """The number of states of a chain that cannot reach an end (a row with a sum of weights below 1)."""
    from scipy import sparse

    states = len(next_state)
    ends = weight.sum(1) < 1.0 - 1e-12
    rows = np.repeat(np.arange(states), next_state.shape[1])
    live = weight.ravel() > 0
    backward = sparse.csr_matrix((np.ones(live.sum()), (next_state.ravel()[live], rows[live])), shape=(states, states))
    reached, frontier = ends.copy(), ends
    while frontier.any():
        frontier = (backward.T @ frontier.astype(np.float64) > 0) & ~reached
        reached |= frontier
    return int((~reached).sum())
