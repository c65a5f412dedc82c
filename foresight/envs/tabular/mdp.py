"""`MDP`: transition and reward tables (P, R); `TableEnv`: an `Env` that samples from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foresight.envs.base import Feedback, Spaces
from foresight.envs.tabular import render
from foresight.envs.tabular.render import Layout
from foresight.errors import UserError

Outcomes = Sequence[tuple[float, int, float, bool]]  # Gymnasium's: (probability, next state, reward, terminated)
ARROWS = {"left": "←", "right": "→", "up": "↑", "down": "↓", "north": "↑", "south": "↓", "east": "→", "west": "←"}


@dataclasses.dataclass(frozen=True)
class MDP:
    """A Markov decision process with S states, A actions and at most K outcomes of each action.

    - `next_state` `[S, A, K]` int32 and `prob` `[S, A, K]` float64: the outcomes (short lists are padded with
      outcomes of probability 0);
    - `reward` `[S, A]` float64: expected; -inf where the action is not allowed;
    - `discount` `[S, A, K]` float64 or None for all ones: the environment's continuation, 0 where the outcome ends
      the episode. So termination is data: values are backed up through `weight = prob * discount`, and the
      algorithm's gamma multiplies in;
    - `outcome_reward` `[S, A, K]` float64, or None where the reward does not depend on the outcome;
    - `start` `[S]` float64: the initial state distribution;
    - `time_limit`: actions after which a sampled episode is truncated, or None.

    Raises UserError for wrong shapes, dtypes or probabilities, and for a time limit below 1.
    """

    name: str
    next_state: Tensor
    prob: Tensor
    reward: Tensor
    start: Tensor
    discount: Tensor | None = None
    outcome_reward: Tensor | None = None
    time_limit: int | None = None
    action_names: tuple[str, ...] = ()
    layout: Layout | None = None

    def __post_init__(self) -> None:
        shape = self.next_state.shape
        if len(shape) != 3 or 0 in shape:
            raise UserError(f"next_state must have the shape [states, actions, outcomes], not {list(shape)}.")
        parts = {
            "prob": (self.prob, shape),
            "reward": (self.reward, shape[:2]),
            "start": (self.start, shape[:1]),
            "discount": (self.discount, shape),
            "outcome_reward": (self.outcome_reward, shape),
        }
        for field, (tensor, expected) in parts.items():
            if tensor is not None and (tensor.shape != expected or tensor.dtype != torch.float64):
                raise UserError(f"{field} must be float64 {list(expected)}, not {tensor.dtype} {list(tensor.shape)}.")
        if self.next_state.dtype != torch.int32 or self.next_state.min() < 0 or self.next_state.max() >= shape[0]:
            raise UserError(f"next_state must be int32 between 0 and {shape[0] - 1}.")
        total = self.prob.sum(-1).sub_(1.0).abs_()
        if self.prob.min() < 0 or not total.max() < 1e-8:
            where = divmod(int(total.argmax()), shape[1])
            raise UserError(f"The probabilities of state {where[0]}, action {where[1]} do not sum to 1.")
        if self.start.min() < 0 or not abs(float(self.start.sum()) - 1) < 1e-8:
            raise UserError(f"The start probabilities must be at least 0 and sum to 1, not {float(self.start.sum())}.")
        if not self.reward.amax(1).isfinite().all():
            raise UserError("Every state needs at least one action with a finite reward, and none may be NaN or +inf.")
        _require_limit(self.time_limit)

    @property
    def states(self) -> int:
        """S."""
        return self.next_state.shape[0]

    @property
    def actions(self) -> int:
        """A."""
        return self.next_state.shape[1]

    @property
    def weight(self) -> Tensor:
        """`prob * discount` `[S, A, K]`: the probability of each outcome with the episode continuing."""
        return self.prob if self.discount is None else self.prob * self.discount

    @property
    def spaces(self) -> Spaces:
        """Discrete(S) and Discrete(A)."""
        return Spaces(gymnasium.spaces.Discrete(self.states), gymnasium.spaces.Discrete(self.actions))

    @property
    def arrows(self) -> tuple[str, ...]:
        """One glyph per action: an arrow for a move, else the first letter of its name, else its number."""
        names = self.action_names or tuple(str(a) for a in range(self.actions))
        return tuple(ARROWS.get(name, name if name.isdigit() else name[:1]) for name in names)

    def absorbing(self) -> Tensor:
        """`[S]` bool: absorbing states (every action stays, terminates and earns 0)."""
        stays = self.next_state == torch.arange(self.states, device=self.next_state.device)[:, None, None]
        return ((stays & (self.weight == 0)) | (self.prob == 0)).all(-1).all(-1) & (self.reward == 0).all(-1)

    def uniform(self) -> Tensor:
        """`[S, A]`: the uniform policy over the allowed actions, the baseline of every run."""
        allowed = self.reward.isfinite().double()
        return allowed / allowed.sum(1, keepdim=True)

    def to(self, device: str | torch.device) -> MDP:
        """The same MDP with its tables on `device`."""
        if self.next_state.device == torch.device(device):
            return self
        tables = {
            f.name: x.to(device) for f in dataclasses.fields(self) if isinstance(x := getattr(self, f.name), Tensor)
        }
        return dataclasses.replace(self, **tables)  # type: ignore[arg-type]

    def sample(self, num_envs: int = 1, time_limit: int | None = None) -> TableEnv:
        """A batched `Env` that samples from this MDP; `time_limit` None means the MDP's own."""
        return TableEnv(self, num_envs, self.time_limit if time_limit is None else time_limit)


class TableEnv:
    """An `Env` (see `envs.base`) that samples outcomes from the tables of an `MDP`. obs and action are `[B]` int64.

    `state_dict` holds everything, so a run on it resumes bit for bit. Raises UserError for a time limit below 1.
    """

    def __init__(self, mdp: MDP, num_envs: int = 1, time_limit: int | None = None) -> None:
        _require_limit(time_limit)
        self.mdp = mdp
        self.name = mdp.name
        self.num_envs = num_envs
        self.spaces = mdp.spaces
        self.time_limit = time_limit
        self._next = mdp.next_state.cpu().numpy()
        self._prob = mdp.prob.cpu().numpy()
        reward = mdp.outcome_reward if mdp.outcome_reward is not None else mdp.reward[:, :, None].expand_as(mdp.prob)
        self._reward = reward.cpu().numpy()
        self._discount = None if mdp.discount is None else mdp.discount.cpu().numpy()
        self._start = np.cumsum(mdp.start.cpu().numpy())
        self.reset(0)

    def reset(self, seed: int) -> Tensor:
        """Reset all environments; equal seeds give equal episodes."""
        self._rng = np.random.default_rng(seed)
        self._state = self._begin(self.num_envs)
        self._return = np.zeros(self.num_envs)
        self._length = np.zeros(self.num_envs, np.int64)
        return torch.from_numpy(self._state.copy())

    def step(self, action: Tensor) -> Feedback:
        """Take `action` `[B]` in every environment. Raises UserError for an action out of range."""
        chosen = np.asarray(action.cpu(), dtype=np.int64)
        if chosen.shape != (self.num_envs,) or chosen.min() < 0 or chosen.max() >= self.mdp.actions:
            raise UserError(f"{self.name} takes {self.num_envs} actions between 0 and {self.mdp.actions - 1}.")
        here = self._state, chosen
        cumulative = np.cumsum(self._prob[here], axis=1)
        # Scaled by the total, so rounding cannot pick a padded outcome of probability 0.
        draw = self._rng.random(self.num_envs) * cumulative[:, -1]
        outcome = (cumulative <= draw[:, None]).sum(1)
        reward = self._reward[here][np.arange(self.num_envs), outcome]
        after = self._next[here][np.arange(self.num_envs), outcome].astype(np.int64)
        discount = np.ones(self.num_envs)
        if self._discount is not None:
            discount = self._discount[here][np.arange(self.num_envs), outcome]
        self._return += reward
        self._length += 1
        cut = discount == 0
        if self.time_limit is not None:
            cut |= self._length >= self.time_limit
        ended = np.flatnonzero(cut)
        info = {
            "episode_return": [float(x) for x in self._return[ended]],
            "episode_length": [int(x) for x in self._length[ended]],
        }
        final_obs = torch.from_numpy(after)
        obs = final_obs
        if len(ended):
            self._return[ended] = 0
            self._length[ended] = 0
            after = after.copy()
            after[ended] = self._begin(len(ended))
            obs = torch.from_numpy(after)
        self._state = after.copy()  # the returned tensors belong to the caller
        mask = torch.ones(self.num_envs)
        return Feedback(obs, _float(reward), _float(discount), _float(cut), mask, final_obs, info)

    def render(self) -> np.ndarray | None:
        """Environment 0 as an RGB image, or None without a grid layout."""
        return render.image(self.mdp, here=int(self._state[0]))

    def close(self) -> None:
        """Nothing to close."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps depend on."""
        parts = {"state": self._state, "return": self._return, "length": self._length}
        return {**{k: v.copy() for k, v in parts.items()}, "rng": self._rng.bit_generator.state}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._state, self._return, self._length = (np.array(saved[k]) for k in ("state", "return", "length"))
        self._rng.bit_generator.state = saved["rng"]

    def _begin(self, count: int) -> np.ndarray:
        draw = self._rng.random(count) * self._start[-1]
        return np.searchsorted(self._start, draw, side="right").astype(np.int64)


def _require_limit(time_limit: int | None) -> None:
    if time_limit is not None and (not isinstance(time_limit, int) or time_limit < 1):
        raise UserError(f"time_limit must be a whole number of at least 1, not {time_limit!r}.")


def _float(x: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.asarray(x, np.float32))


def from_table(
    name: str,
    table: Mapping[int, Mapping[int, Outcomes]],
    start: np.ndarray,
    **fields: Any,
) -> MDP:
    """Read a table `P[state][action] = [(probability, next state, reward, terminated), ...]`.

    Equal outcomes are merged. A state that is only entered by terminating, and never started from, becomes absorbing:
    its value is 0 whatever the table has for it. `fields` go to `MDP`.
    """
    states, actions = len(table), len(table[0])
    merged: list[dict[tuple[int, float, bool], float]] = []
    for s in range(states):
        for a in range(actions):
            outcomes: dict[tuple[int, float, bool], float] = {}
            for p, s2, r, terminated in table[s][a]:
                key = (int(s2), float(r), bool(terminated))
                outcomes[key] = outcomes.get(key, 0.0) + float(p)
            merged.append({key: p for key, p in outcomes.items() if p > 0})
    count = max(len(outcomes) for outcomes in merged)
    shape = (states, actions, count)
    next_state = np.broadcast_to(np.arange(states, dtype=np.int32)[:, None, None], shape).copy()
    prob, reward, discount = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for row, outcomes in enumerate(merged):
        for k, ((s2, r, terminated), p) in enumerate(outcomes.items()):
            at = (*divmod(row, actions), k)
            next_state[at], prob[at], reward[at], discount[at] = s2, p, r, 1.0 - terminated
    finish(next_state, prob, reward, discount, start)
    return assemble(name, next_state, prob, reward, discount, start, **fields)


def finish(
    next_state: np.ndarray, prob: np.ndarray, reward: np.ndarray, discount: np.ndarray, start: np.ndarray
) -> None:
    """Make terminal states absorbing, in place: those that are only entered by terminating."""
    states = len(start)
    elsewhere = next_state != np.arange(states)[:, None, None]
    ending = np.zeros(states, bool)
    ending[next_state[(discount == 0) & (prob > 0)]] = True
    ending[next_state[(discount > 0) & (prob > 0) & elsewhere]] = False
    ending &= start == 0
    own = np.flatnonzero(ending)
    next_state[own] = own[:, None, None]
    prob[own] = 0.0
    prob[own, :, 0] = 1.0
    reward[own] = 0.0
    discount[own] = 0.0


def assemble(
    name: str,
    next_state: np.ndarray,
    prob: np.ndarray,
    reward: np.ndarray,
    discount: np.ndarray,
    start: np.ndarray,
    **fields: Any,
) -> MDP:
    """An `MDP` from arrays `[S, A, K]` with a reward per outcome; tables that are all default are left out."""
    expected = (prob * reward).sum(-1)
    by_outcome = bool(((reward != expected[:, :, None]) & (prob > 0)).any())
    ends = bool(((discount != 1) & (prob > 0)).any())
    return MDP(
        name=name,
        next_state=torch.from_numpy(np.ascontiguousarray(next_state, dtype=np.int32)),
        prob=torch.from_numpy(np.ascontiguousarray(prob)),
        reward=torch.from_numpy(expected),
        start=torch.from_numpy(np.ascontiguousarray(start, dtype=np.float64)),
        discount=torch.from_numpy(np.ascontiguousarray(discount)) if ends else None,
        outcome_reward=torch.from_numpy(np.ascontiguousarray(reward)) if by_outcome else None,
        **fields,
    )


def random_mdp(states: int = 100, actions: int = 4, successors: int = 5, seed: int = 0) -> MDP:
    """A random sparse MDP that never ends: uniform successors, Dirichlet(1) probabilities, rewards U[0, 1).

    The usual benchmark of dynamic programming (Garnet without its branching noise: Archibald et al. 1995). Filled
    in blocks, so peak memory is that of the result: 12 bytes per outcome and 8 per action.
    """
    if min(states, actions, successors) < 1:
        raise UserError("A random MDP needs at least 1 state, 1 action and 1 successor.")
    rng = np.random.default_rng(seed)
    next_state = np.empty((states, actions, successors), np.int32)
    prob = np.empty((states, actions, successors))
    block = 65_536
    for s in range(0, states, block):
        part = slice(s, min(s + block, states))
        next_state[part] = rng.integers(0, states, next_state[part].shape, dtype=np.int32)
        rng.standard_exponential(out=prob[part])
        prob[part] /= prob[part].sum(-1, keepdims=True)
    start = np.full(states, 1.0 / states)
    return MDP(
        name="RandomMDP",
        next_state=torch.from_numpy(next_state),
        prob=torch.from_numpy(prob),
        reward=torch.from_numpy(rng.random((states, actions))),
        start=torch.from_numpy(start),
    )
