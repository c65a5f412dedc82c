"""Laws of tree search: by hand, against exact solutions, and against itself on the other backend."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from foresight.errors import UserError
from foresight.planning.search import selection
from foresight.planning.search.mcts import PUCT, UCT, Dirichlet, Gumbel, search
from foresight.planning.search.tree import advance
from tests.planning.search.table_model import TableModel, action_values, random_tables
from tests.sabotage import change, drop, flip_sign, returns, sabotaged_by, swap

BACKENDS = ["compiled", "tensor"]
RULES = [  # one of each kind first: a mutant of any is found at once
    PUCT(),
    UCT(),
    Gumbel(),
    PUCT(normalize="tree", first_play="parent"),
    PUCT(normalize="none", first_play="reduced"),
    PUCT(normalize="none", first_play="zero", c_init=5.0, c_base=float("inf")),
    PUCT(normalize="tree", first_play="loss"),
    PUCT(chance=1),
    UCT(normalize="tree"),
    Gumbel(considered=3, value_scale=1.0, normalize="none"),
    Gumbel(normalize="tree"),
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mixed_world(seed: int) -> dict[str, Tensor]:
    """A random game with changing players, ends and illegal actions."""
    env, g = random_tables(seed, states=30, actions=5), seeded(seed)
    kinds = torch.tensor([0.9, -1.0, -1.0, 0.0, 1.0])
    env["discount"] = kinds[torch.randint(5, (30, 5), generator=g)]
    illegal = torch.rand(30, 5, generator=g) < 0.3
    illegal[:, 0] = False
    env["logits"][illegal] = -torch.inf
    env["logits"][7] = -torch.inf  # a state in which nothing is allowed: the search ends there
    return env


def _negated(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `expand`, with rewards of the other sign."""
    return tuple(-x if i == 6 else x for i, x in enumerate(arguments))


def _louder(original: Any) -> Any:
    return lambda self: (original(self)[0], original(self)[1] * 1.5)


@sabotaged_by("foresight.planning.search.kernels.expand", lambda f: lambda *rest: f(*_negated(rest)))
@sabotaged_by("foresight.planning.search.selection.PUCT.compiled", _louder)
@sabotaged_by("foresight.planning.search.selection.UCT.compiled", _louder)
@sabotaged_by("foresight.planning.search.selection.Gumbel.compiled", _louder)
def test_both_backends_grow_the_same_tree() -> None:
    for seed, rule in enumerate(RULES):  # random tables of its own for each
        _same_tree(rule, seed)


def _same_tree(rule: Any, seed: int) -> None:
    noise = None if isinstance(rule, Gumbel) else Dirichlet(0.5, 0.25)
    model, obs = TableModel(mixed_world(seed)), torch.tensor([0, 1, 2, 3])
    one, two = (
        search(model, obs, 40, rule, noise=noise, temperature=1.0, generator=seeded(seed), backend=backend)
        for backend in BACKENDS
    )
    for name in ("children", "visits"):
        assert torch.equal(getattr(one.tree, name), getattr(two.tree, name)), (rule, name)
    there = one.tree.visits > 0
    for name in ("parent", "action", "value", "raw", "reward", "discount", "prior"):
        assert torch.equal(getattr(one.tree, name)[there], getattr(two.tree, name)[there]), (rule, name)
    assert torch.equal(one.tree.bounds, two.tree.bounds)
    assert torch.equal(one.weights, two.weights) and torch.equal(one.action, two.action)


@sabotaged_by(
    "foresight.planning.search.kernels.expand_threads", lambda f: lambda parts, rows, *x: f(parts, rows - 1, *x)
)
def test_threads_grow_the_same_trees() -> None:
    model, obs = TableModel(mixed_world(3)), torch.tensor([0, 1, 2, 3, 4])
    one, two = (search(model, obs, 40, PUCT(), generator=seeded(0), threads=n).tree for n in (1, 2))
    assert torch.equal(one.children, two.children) and torch.equal(one.visits, two.visits)
    assert torch.equal(one.value, two.value)
    model.value[4] = torch.nan
    with pytest.raises(UserError, match="not finite for row"):
        search(model, obs, 40, PUCT(), threads=2)
    with pytest.raises(UserError, match="threads must be at least 1"):
        search(model, obs, 40, PUCT(), threads=0)


def ladder() -> dict[str, Any]:
    """One way: my move, yours, and my winning one. Values on the way are 0, 0.5 (yours) and 0.25 (mine)."""
    only = [0.0, -torch.inf]
    return {
        "next": [[1, 0], [2, 0], [3, 0], [3, 3]],
        "reward": [[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [9.0, 9.0]],
        "discount": [[-1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [1.0, 1.0]],
        "logits": [only, only, only, [0.0, 0.0]],
        "value": [0.0, 0.5, 0.25, 7.0],
    }


@pytest.mark.parametrize("backend", BACKENDS)
@sabotaged_by("tests.planning.search.table_model.TableModel.step", lambda f: lambda *x: _edit(f(*x), 1, lambda r: -r))
@sabotaged_by("tests.planning.search.table_model.TableModel.step", lambda f: lambda *x: _edit(f(*x), 2, torch.abs))
@sabotaged_by(
    "tests.planning.search.table_model.TableModel.step", lambda f: lambda *x: _edit(f(*x), 2, lambda d: d - 0.5)
)
def test_two_players_by_hand(backend: str) -> None:
    """The mover's reward counts for the mover, every ply turns the sign, and the end absorbs.

    After 1 simulation the root saw 0 and -0.5; after 2 also 0.25; after 3 and more the win, 1, each time.
    """
    expected = {1: -0.25, 2: -0.25 / 3, 3: 0.75 / 4, 4: 1.75 / 5, 9: 6.75 / 10}
    for simulations, value in expected.items():
        result = search(TableModel(ladder()), torch.tensor([0]), simulations, PUCT(), backend=backend)
        assert result.value.item() == pytest.approx(value, abs=1e-6)
        assert result.visits.tolist() == [[simulations, 0]]
    tree = result.tree
    assert tree.value[0, 1].item() == pytest.approx((0.5 - 0.25 - 7) / 9, abs=1e-6)
    assert tree.value[0, 2].item() == pytest.approx((0.25 + 7) / 8, abs=1e-6)
    assert tree.visits[0, 3].item() == 7 and (tree.visits[0] > 0).sum() == 4  # nothing grows below the end


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", [PUCT(), UCT(), Gumbel()], ids=lambda rule: type(rule).__name__)
def test_rows_are_independent(rule: Any, backend: str) -> None:
    model, obs = TableModel(mixed_world(5)), torch.tensor([0, 1, 2, 3, 4])
    together = search(model, obs, 24, rule, backend=backend)
    for row in range(5):
        alone = search(model, obs[row : row + 1], 24, rule, backend=backend)
        assert torch.equal(alone.tree.visits[0], together.tree.visits[row])
        torch.testing.assert_close(alone.weights[0], together.weights[row])


@sabotaged_by("tests.planning.search.table_model.TableModel.step", lambda f: lambda *x: _edit(f(*x), 1, lambda r: -r))
@sabotaged_by("foresight.planning.search.mcts.search", change("simulations", lambda _: 3))
def test_search_finds_the_best_action_of_random_mdps() -> None:
    right = total = 0
    for seed in range(3):
        env = random_tables(seed, gamma=0.7)
        best = action_values(env)
        env["logits"], env["value"] = env["logits"] * 0, env["value"] * 0
        order = best.sort(1, descending=True).values
        clear = order[:, 0] - order[:, 1] > 0.1
        for rule in (PUCT(normalize="tree", first_play="parent"), UCT(normalize="tree")):
            result = search(TableModel(env), torch.arange(12), 800, rule)
            right += int((result.action == best.argmax(1))[clear].sum())
            total += int(clear.sum())
    assert total > 50
    assert right == total


@sabotaged_by("foresight.planning.search.selection.completed_values", flip_sign)
@sabotaged_by("tests.planning.search.table_model.TableModel.step", lambda f: lambda *x: _edit(f(*x), 1, lambda r: -r))
@pytest.mark.parametrize("simulations", [2, 4, 50])
def test_gumbel_never_lowers_the_value_of_the_policy(simulations: int) -> None:
    """Danihelka et al. 2022, §4: with exact action values of the policy, π' is at least as good as it."""
    tables = [random_tables(seed) for seed in range(6)]
    policies = [torch.softmax(env["logits"].double(), 1) for env in tables]
    before = [(policy * action_values(env, policy)).sum(1) for env, policy in zip(tables, policies, strict=True)]
    together = {name: torch.cat([env[name] for env in tables]) for name in tables[0]}  # 12 states each
    together["next"] = together["next"] + 12 * (torch.arange(72) // 12).unsqueeze(1)
    together["value"] = torch.cat(before).float()
    obs = torch.arange(72)
    result = search(TableModel(together), obs, simulations, Gumbel(), generator=seeded(), backend="tensor")
    gain = 0.0
    for env, old, better in zip(tables, before, result.weights.double().split(12), strict=True):
        after = (better * action_values(env, better)).sum(1)
        assert (after >= old - 1e-5).all()
        gain += float((after - old).mean())
    assert gain > 0.5


LINES = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]])


class TicTacToe:
    """The rules, and nothing learned: `[B, 9]` of 1 (the mover's), -1 and 0."""

    def root(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros(obs.shape).masked_fill(obs != 0, -torch.inf), torch.zeros(len(obs)), obs

    def step(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        board = state.scatter(1, action.unsqueeze(1), 1.0)
        won = (board[:, LINES].sum(-1) == 3).any(-1)
        over = won | (board != 0).all(1)
        logits, value, _ = self.root(board)
        return -board, won.float(), torch.where(over, 0.0, -1.0), logits, value


def minimax(board: tuple[int, ...], memory: dict[tuple[int, ...], int]) -> int:
    """The game's value for the mover, by trying everything."""
    if board not in memory:
        if any(all(board[i] == -1 for i in line) for line in LINES.tolist()):
            memory[board] = -1
        else:
            free = [i for i, x in enumerate(board) if x == 0]
            after = [tuple(-(1 if i == a else x) for i, x in enumerate(board)) for a in free]
            memory[board] = max((-minimax(b, memory) for b in after), default=0)
    return memory[board]


@sabotaged_by("foresight.planning.search.kernels.expand", lambda f: lambda *rest: f(*_negated(rest)))
@sabotaged_by("tests.planning.search.test_mcts.TicTacToe.step", lambda f: lambda *x: _edit(f(*x), 2, torch.abs))
@sabotaged_by("tests.planning.search.test_mcts.TicTacToe.step", lambda f: lambda *x: _edit(f(*x), 1, lambda r: -r))
def test_search_knows_the_value_of_tic_tac_toe() -> None:
    memory: dict[tuple[int, ...], int] = {}
    assert minimax((0,) * 9, memory) == 0
    boards = [board for board in sorted(memory) if 0 in board and not _over(board)][::61]
    obs = torch.tensor([[0] * 9, *boards], dtype=torch.float32)
    result = search(TicTacToe(), obs, 1600, PUCT(normalize="none", first_play="zero", c_init=1.5))
    truth = [minimax(tuple(map(int, board)), memory) for board in obs.tolist()]
    assert {-1, 0, 1} == set(truth)
    for board, action, value in zip(obs, result.action.tolist(), truth, strict=True):
        after = -board.clone().index_fill(0, torch.tensor(action), 1.0)
        assert -minimax(tuple(map(int, after.tolist())), memory) == value
    assert abs(result.value[0].item()) < 0.1
    torch.testing.assert_close(result.value, torch.tensor(truth, dtype=torch.float32), atol=0.25, rtol=0)


def _over(board: tuple[int, ...]) -> bool:
    return any(abs(sum(board[i] for i in line)) == 3 for line in LINES.tolist())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", [PUCT(), UCT(), Gumbel()], ids=lambda rule: type(rule).__name__)
def test_no_simulations_are_the_raw_policy(rule: Any, backend: str) -> None:
    env = mixed_world(1)
    result = search(TableModel(env), torch.arange(6), 0, rule, backend=backend)
    torch.testing.assert_close(result.weights, torch.softmax(env["logits"][:6], 1))
    assert torch.equal(result.value, env["value"][:6])
    assert torch.equal(result.action, env["logits"][:6].argmax(1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("bad", "number"),
    [("value", torch.nan), ("reward", torch.nan), ("logits", torch.nan), ("logits", torch.inf), ("value", torch.inf)],
)
def test_a_number_that_is_not_finite_stops_the_search(bad: str, number: float, backend: str) -> None:
    env = random_tables(0, states=4, actions=2)
    env["next"] = torch.tensor([[1, 1], [2, 2], [3, 3], [3, 3]])
    env[bad][2] = number
    with pytest.raises(UserError, match=r"not finite for row 1.*The search stops"):
        search(TableModel(env), torch.tensor([3, 0]), 20, PUCT(), backend=backend)
    with pytest.raises(UserError, match="not finite for row 0"):
        env["value"][0] = torch.inf
        search(TableModel(env), torch.tensor([0, 1]), 4, PUCT(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@sabotaged_by("foresight.planning.search.mcts.search", drop("reuse"))
def test_a_reused_tree_keeps_what_was_found_below(backend: str) -> None:
    model, obs = TableModel(mixed_world(3)), torch.tensor([0, 1, 2, 3])
    first = search(model, obs, 50, PUCT(), backend=backend)
    keep = torch.tensor([True, True, True, False])
    below = advance(first.tree, first.action, keep)
    after = model.next[obs, first.action]
    alive = model.discount[obs, first.action] != 0
    old = first.visits.gather(1, first.action.unsqueeze(1)).squeeze(1) * keep
    assert torch.equal(below.visits[:, 0].long(), old) and alive.any() and old[:3].min() > 0
    again = search(model, after, 30, PUCT(), reuse=below, backend=backend)
    assert torch.equal(again.tree.visits[:, 0].long(), torch.where(keep, old, 1) + 30)
    spread = again.visits.sum(1)
    assert torch.equal(spread[~keep], torch.tensor([30])) and (spread[alive & keep] > 30).all()
    # The children's counts, values and states moved with them.
    chosen = first.tree.children[torch.arange(4), 0, first.action].long()
    for row in range(3):
        if alive[row]:
            grand = first.tree.child_visits(chosen)[row]
            assert torch.equal(below.child_visits()[row], grand)
            torch.testing.assert_close(below.child_values()[row], first.tree.child_values(chosen)[row])
            for action in range(5):
                child = int(below.children[row, 0, action])
                if child >= 0:
                    assert below.state[child, row] == model.next[after[row], action]
    with pytest.raises(UserError, match="cannot reuse a tree"):
        search(model, after, 8, Gumbel(), reuse=below)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_turns_out_to_be_illegal_at_a_reused_root_is_let_go(backend: str) -> None:
    """A learned model has no mask below its root; the next real position does."""
    model, obs = TableModel(random_tables(2, states=6, actions=3)), torch.tensor([0, 1])
    first = search(model, obs, 30, PUCT(), backend=backend)
    below = advance(first.tree, first.action)
    best = int(below.child_visits()[0].argmax())
    assert below.child_visits()[0, best] > 0
    legal = torch.ones(2, 3, dtype=torch.bool)
    legal[0, best] = False
    again = search(model, model.next[obs, first.action], 15, PUCT(), reuse=below, legal=legal, backend=backend)
    assert again.visits[0, best] == 0 and again.weights[0, best] == 0 and again.action[0] != best


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_depth_limit_holds(backend: str) -> None:
    result = search(TableModel(random_tables(0)), torch.arange(3), 100, PUCT(), max_depth=2, backend=backend)
    tree, depth = result.tree, torch.zeros(3, 101, dtype=torch.int64)
    for node in range(1, tree.size):
        depth[:, node] = depth.gather(1, tree.parent[:, node : node + 1].clamp(min=0).long()).squeeze(1) + 1
    assert depth[tree.visits > 0].max() == 2
    assert (result.visits.sum(1) == 100).all()


@sabotaged_by("foresight.planning.search.selection.dirichlet", swap("alpha", "fraction"))
@sabotaged_by("torch._standard_gamma", returns(torch.ones_like))
def test_dirichlet_noise_is_over_legal_actions() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]]).repeat(4000, 1)
    noisy = torch.softmax(selection.dirichlet(logits, 0.5, 0.25, seeded()), 1)
    assert (noisy[:, 2] == 0).all()
    torch.testing.assert_close(noisy.sum(1), torch.ones(4000))
    expected = 0.75 * torch.softmax(logits[0], 0) + 0.25 * torch.tensor([1, 1, 0, 1]) / 3
    torch.testing.assert_close(noisy.mean(0), expected, atol=0.01, rtol=0)
    # Variance of a share under Dirichlet(½, ½, ½): (1/3)(2/3) / 2.5, times the fraction squared.
    torch.testing.assert_close(noisy[:, 0].var(), torch.tensor(0.25**2 * 2 / 9 / 2.5), atol=5e-4, rtol=0)


def test_temperature_draws_in_proportion_to_visits() -> None:
    model, obs = TableModel(random_tables(2)), torch.zeros(3000, dtype=torch.int64)
    result = search(model, obs, 12, PUCT(), temperature=1.0, generator=None)
    drawn = torch.bincount(result.action, minlength=4) / 3000
    torch.testing.assert_close(drawn, result.weights[0], atol=0.04, rtol=0)
    assert (search(model, obs[:8], 12, PUCT()).action == result.weights[0].argmax()).all()


def test_an_action_without_visits_is_not_played_at_any_temperature() -> None:
    obs = torch.zeros(300, dtype=torch.int64)
    result = search(TableModel(random_tables(1)), obs, 8, PUCT(), temperature=50.0, generator=seeded())
    assert result.action.unique().tolist() == [1, 2] and (result.weights == 0).any()
    assert (result.weights.gather(1, result.action.unsqueeze(1)) > 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@sabotaged_by("foresight.planning.search.selection.tie_noise", returns(torch.zeros_like))
def test_uct_tries_equal_actions_in_random_order(backend: str) -> None:
    env = {**random_tables(2), "logits": torch.zeros(12, 4)}
    obs = torch.zeros(3000, dtype=torch.int64)
    first = search(TableModel(env), obs, 1, UCT(), generator=seeded(), backend=backend).visits.float()
    torch.testing.assert_close(first.mean(0), torch.full((4,), 0.25), atol=0.04, rtol=0)


def test_sequential_halving_by_hand() -> None:
    assert selection.considered_visits(1, 4) == [0, 1, 2, 3]
    assert selection.considered_visits(4, 8) == [0, 0, 0, 0, 1, 1, 2, 2]
    assert selection.considered_visits(4, 16) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    result = search(TableModel(random_tables(4)), torch.arange(5), 16, Gumbel(), generator=seeded())
    assert sorted(result.visits[0].tolist()) == [2, 2, 6, 6]


class Chance:
    """A `TableModel` whose actions lead to outcomes by chance: `next` `[S, A, C]`, `prob` `[S, A, C]`, no lookahead.

    Nodes are states (their number) and afterstates (S + their number, of state and action).
    """

    def __init__(self, seed: int, states: int = 6, actions: int = 3, outcomes: int = 4) -> None:
        self.shape, g = (states, actions, outcomes), seeded(seed)
        self.next = torch.randint(states, self.shape, generator=g)
        splits = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.25, 0.0], [0.75, 0.0, 0.0, 0.25]])
        self.prob = splits[torch.randint(3, self.shape[:2], generator=g)]
        self.reward = torch.rand(self.shape, generator=g) * 2 - 1
        self.value = torch.randn(states, generator=g)
        self.gamma = 0.9

    def means(self) -> Tensor:
        """Σ_c prob · (reward + γ · value of where it leads), `[S, A]`."""
        return (self.prob * (self.reward + self.gamma * self.value[self.next])).sum(-1)

    def root(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._legal(obs), self.value[obs], obs

    def step(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        states, actions, _ = self.shape
        chance = state >= states
        s, a = (state - states).clamp(min=0) // actions, (state - states).clamp(min=0) % actions
        c = (action - actions).clamp(min=0)
        after = torch.where(chance, self.next[s, a, c], states + state * actions + action)
        reward = torch.where(chance, self.reward[s, a, c], 0.0)
        discount = torch.where(chance, self.gamma, 1.0)
        both = torch.cat([self.value, self.means().flatten()])
        return after, reward, discount, self._legal(after), both[after]

    def _legal(self, node: Tensor) -> Tensor:
        """Uniform over the actions of a state; the logarithms of the probabilities at an afterstate."""
        states, actions, outcomes = self.shape
        logits = torch.full((states + states * actions, actions + outcomes), -torch.inf)
        logits[:states, :actions] = 0.0
        logits[states:, actions:] = self.prob.flatten(0, 1).log()
        return logits[node]


@sabotaged_by(
    "foresight.planning.search.selection.PUCT.compiled",
    lambda f: lambda self: (f(self)[0], f(self)[1] * [1, 1, 1, 1, 1, 0]),
)
@sabotaged_by("foresight.planning.search.selection.PUCT.score", lambda f: lambda self, node: f(PUCT(), node))
def test_chance_nodes_are_exact_expectations() -> None:
    """One legal action, outcomes with probabilities in quarters: after 4 n of them each was tried as often as is right.

    The means of what they found, the search's value of the chance node, is the exact expectation.
    """
    model = Chance(0)
    for wanted, backend in itertools.product(range(3), BACKENDS):
        legal = torch.zeros(6, 7, dtype=torch.bool)
        legal[:, wanted] = True
        rule = PUCT(chance=4)
        result = search(model, torch.arange(6), 1 + 8, rule, legal=legal, max_depth=2, backend=backend)
        afterward = result.tree.children[torch.arange(6), 0, wanted].long()
        share = result.tree.child_visits(afterward)[:, 3:] / 8
        assert torch.equal(share, model.prob[:, wanted])
        torch.testing.assert_close(result.tree.child_values()[:, wanted], model.means()[:, wanted])


@sabotaged_by("foresight.planning.search.kernels.expand", lambda f: lambda *rest: f(*_negated(rest)))
def test_a_search_through_chance_finds_the_best_actions() -> None:
    """In a random stochastic MDP, solved by sweeps: the search's action is as good as the best one, within 0.05."""
    for seed in range(3):
        model = Chance(seed)
        best = torch.zeros(6)
        for _ in range(300):
            q = (model.prob * (model.reward + model.gamma * best[model.next])).sum(-1)
            best = q.amax(1)
        model.value = best + 0.2 * torch.randn(6, generator=seeded(seed))  # a guess, to be improved on
        rule = PUCT(normalize="tree", first_play="parent", chance=4)
        result = search(model, torch.arange(6), 1500, rule)
        regret = best - q.gather(1, result.action.unsqueeze(1)).squeeze(1)
        assert regret.max() < 0.05


def test_mistakes_are_reported() -> None:
    model, obs = TableModel(mixed_world(0)), torch.tensor([0])
    for arguments, message in [
        ({"simulations": -1}, "0 .the raw policy. or more"),
        *(
            ({"simulations": 1, "temperature": value}, f"temperature must be 0 .* or more, and finite, not {value}")
            for value in (-1.0, math.nan, math.inf)
        ),
        ({"simulations": 1, "backend": "gpu"}, "Unknown search backend"),
        ({"simulations": 1, "legal": torch.zeros(1, 5, dtype=torch.bool)}, "no legal action"),
    ]:
        with pytest.raises(UserError, match=message):
            search(model, obs, **arguments)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no legal action"):
        search(model, torch.tensor([7]), 3)
    for wrong in ({"normalize": "sibling"}, {"first_play": "parents"}):
        with pytest.raises(UserError, match="Did you mean"):
            PUCT(**wrong)  # type: ignore[arg-type]


def test_one_legal_action_is_played_and_searched() -> None:
    legal = torch.tensor([[False, False, True, False]])
    for rule in (PUCT(), UCT(), Gumbel()):
        result = search(TableModel(random_tables(0)), torch.tensor([0]), 10, rule, legal=legal)
        assert result.action.item() == 2 and result.visits.tolist() == [[0, 0, 10, 0]]


def _edit(answers: tuple[Any, ...], index: int, how: Any) -> tuple[Any, ...]:
    return tuple(how(x) if i == index else x for i, x in enumerate(answers))
