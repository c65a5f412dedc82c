"""Transitions from `Replay` and `Prioritized` against the whole history, read literally."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foresight.data.priorities import Prioritized, SumTree
from foresight.data.replay import Replay, Transitions
from foresight.data.trajectory import Trajectory
from foresight.errors import UserError
from tests.sabotage import change, drop, sabotaged_by

GAMMA = 0.9
TERMINAL, LIMIT, LOST = "terminal", "limit", "lost"  # how an episode may end


class History:
    """Environments whose observations hold their episode and time, and a list of all that happened."""

    def __init__(self, streams: int, seed: int, ends: tuple[str, ...] = (TERMINAL, LIMIT)) -> None:
        self.streams, self.ends = streams, ends
        self.generator = torch.Generator().manual_seed(seed)
        self.rows: list[list[dict[str, Any]]] = [[] for _ in range(streams)]
        self.at = [(100.0 * i, 0.0) for i in range(streams)]  # (episode, time)
        self.resetting = [False] * streams

    def step(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """One step per environment, and the true successors."""
        finals = []
        for i in range(self.streams):
            episode, time = self.at[i]
            row = {"obs": (episode, time), "reward": episode + time / 8, "discount": 1.0, "cut": 0.0, "mask": 1.0}
            final = (episode, time + 1)
            self.at[i] = final
            if self.resetting[i]:  # the engine only resets: what stands here must never be trained on
                row.update(reward=1e6, discount=0.0, cut=1.0, mask=0.0)
                self.at[i] = final = (episode + 1, 0.0)
                self.resetting[i] = False
            elif torch.rand((), generator=self.generator) < 0.3:
                end = self.ends[int(torch.randint(len(self.ends), (), generator=self.generator))]
                row.update(cut=1.0, discount=0.0 if end == TERMINAL else 1.0)
                self.resetting[i] = end == LOST
                self.at[i] = final if end == LOST else (episode + 1, 0.0)
            self.rows[i].append({**row, "next": final})
            finals.append(final)
        fields = {
            k: torch.tensor([rows[-1][k] for rows in self.rows]) for k in ("obs", "reward", "discount", "cut", "mask")
        }
        return {**fields, "action": fields["reward"].long()}, torch.tensor(finals)

    def transition(self, i: int, start: int, n: int) -> tuple[float, float, tuple[float, float]]:
        """What n-step Q-learning should see from step `start` of environment i on."""
        reward, discount, following = 0.0, 1.0, (-1.0, -1.0)
        for row in self.rows[i][start : start + n]:
            if row["mask"] == 0:
                break
            reward += discount * row["reward"]
            discount *= GAMMA * row["discount"]
            following = row["next"]
            if row["cut"]:
                break
        return reward, discount, following

    def check(self, batch: Transitions, n: int, capacity: int) -> None:
        """Every transition is one that happened, whole, and within one episode."""
        steps = len(self.rows[0])
        for k, key in enumerate(batch.key.tolist()):
            i, column = divmod(key, capacity)
            start = max(t for t in range(steps) if t % capacity == column)
            row = self.rows[i][start]
            reward, discount, following = self.transition(i, start, n)
            assert row["mask"] == 1, "only rows that are experience"
            assert tuple(batch.obs[k].tolist()) == row["obs"]
            assert batch.reward[k].item() == pytest.approx(reward, rel=1e-5)
            assert batch.discount[k].item() == pytest.approx(discount, rel=1e-5)
            if discount > 0:  # what follows a terminal state is never looked at
                assert tuple(batch.next_obs[k].tolist()) == following
                assert batch.next_obs[k, 0] == batch.obs[k, 0], "no transition crosses a cut"


def writes_nothing(put: Any) -> Any:
    return lambda tree, rows, values: None


@sabotaged_by("foresight.ops.returns.n_step_transition", change("cut", torch.zeros_like))
@sabotaged_by("foresight.data.replay._put", writes_nothing, change("rows", lambda rows: rows.flip(0)))
@sabotaged_by("foresight.data.replay.Replay._ahead", change("steps", lambda s: s + 1))
@given(
    seed=st.integers(0, 10_000),
    streams=st.integers(1, 3),
    capacity=st.integers(8, 20),
    n=st.integers(1, 4),
    steps=st.integers(8, 60),
)
def test_no_transition_crosses_a_cut(seed: int, streams: int, capacity: int, n: int, steps: int) -> None:
    history, replay = History(streams, seed, (TERMINAL, LIMIT, LOST)), Replay(capacity)
    for _ in range(steps):
        replay.add(*history.step())
    history.check(replay.transitions(64, GAMMA, n, torch.Generator().manual_seed(seed)), n, capacity)


@sabotaged_by("foresight.data.replay._put", writes_nothing, change("rows", lambda rows: rows - 1))
def test_successors_at_time_limits_may_be_dicts_of_any_dtype() -> None:
    replay = Replay(6)
    for t in range(5):
        cut, number = torch.tensor([float(t == 1), float(t == 3)]), torch.tensor([[t], [10 + t]])
        obs, final = ({"x": n.float(), "seen": n.to(torch.uint8)} for n in (number, 100 + number))
        replay.add({"obs": obs, "action": cut, "reward": cut, "discount": torch.ones(2), "cut": cut}, final)
    batch = replay.gather(torch.tensor([0, 1, 3, 6 + 1, 6 + 3]), GAMMA)
    assert batch.next_obs["x"].flatten().tolist() == [1, 101, 4, 12, 113]
    assert batch.next_obs["seen"].dtype == torch.uint8
    assert batch.next_obs["seen"].flatten().tolist() == [1, 101, 4, 12, 113]


@sabotaged_by("foresight.ops.returns.n_step_weights", change("cut", torch.zeros_like))
@given(seed=st.integers(0, 10_000), n=st.integers(1, 4))
def test_a_transition_holds_what_it_passed(seed: int, n: int) -> None:
    """The states between, each with its discount, as many as belong to the episode; none where there is one row."""
    history, replay = History(2, seed, (TERMINAL, LIMIT, LOST)), Replay(20)
    for _ in range(30):
        replay.add(*history.step())
    batch = replay.transitions(64, GAMMA, n, torch.Generator().manual_seed(seed), passed=True)
    plain = replay.transitions(64, GAMMA, n, torch.Generator().manual_seed(seed))
    assert torch.equal(batch.reward, plain.reward) and plain.passed is plain.passed_weight is None
    if n == 1:
        assert batch.passed is batch.passed_weight is None
        return
    for k, key in enumerate(batch.key.tolist()):
        i, column = divmod(key, 20)
        row = max(t for t in range(30) if t % 20 == column)
        discount, expected = 1.0, []
        for t in range(row, row + n - 1):
            here, after = history.rows[i][t], history.rows[i][t + 1]
            discount *= GAMMA * here["discount"]
            if here["cut"] or after["mask"] == 0:
                break
            expected.append(discount)
            assert tuple(batch.passed[k, len(expected) - 1].tolist()) == after["obs"]
        assert batch.passed_weight[k].tolist() == pytest.approx(expected + [0.0] * (n - 1 - len(expected)), rel=1e-5)


@sabotaged_by("foresight.data.replay.Replay._draw", change("choices", lambda c: c - 1, "too_few"))
def test_every_row_whose_successor_is_known_is_equally_likely() -> None:
    history, replay = History(2, 0), Replay(8)
    for _ in range(11):
        replay.add(*history.step())
    counts = torch.bincount(replay.transitions(28_000, GAMMA, 1, torch.Generator().manual_seed(0)).key, minlength=16)
    assert counts[2] == counts[10] == 0  # the newest, at 10 mod 8
    others = counts[[k for k in range(16) if k not in (2, 10)]]
    assert (others - 2000).abs().max() < 5 * 2000**0.5


@sabotaged_by("foresight.ops.returns.n_step_transition", drop("mask"))
@sabotaged_by("foresight.data.replay.Replay.interrupt", lambda f: lambda self: None)
def test_after_an_interruption_nothing_leads_into_the_new_episodes() -> None:
    history, replay = History(2, 1), Replay(120)
    for _ in range(6):
        for _ in range(15):
            replay.add(*history.step())
        replay.interrupt()
        for i in range(2):  # of an episode that continues, what happened after the newest observation is not known
            newest = history.rows[i][-1]
            newest["mask"] *= newest["cut"]
            history.at[i] = (history.at[i][0] + 50, 0.0)
    for _ in range(15):
        replay.add(*history.step())
    for n in (1, 3):
        history.check(replay.transitions(600, GAMMA, n, torch.Generator().manual_seed(0)), n, 120)


@pytest.mark.parametrize("discount", [0.0, 1.0], ids=["terminal", "limit"])
def test_an_interruption_keeps_the_transitions_that_ended_an_episode(discount: float) -> None:
    replay, one = Replay(8), torch.ones(2)
    for t in range(3):  # the newest step of the first environment ends its episode
        cut = torch.tensor([float(t == 2), 0.0])
        ends = {"cut": cut, "discount": torch.where(cut > 0, discount, 1.0)}
        replay.add({"obs": t * one, "action": one, "reward": t * one, "mask": one, **ends}, (t + 0.5) * one)
    replay.interrupt()
    replay.add({"obs": 9 * one, "action": one, "reward": one, "discount": one, "cut": 0 * one, "mask": one}, 10 * one)
    batch = replay.transitions(300, GAMMA, 1, torch.Generator().manual_seed(0))
    assert sorted(set(batch.key.tolist())) == [0, 1, 2, 8, 9]
    newest = batch.key == 2
    assert (batch.reward[newest] == 2).all() and torch.allclose(batch.discount[newest], torch.tensor(GAMMA * discount))
    assert discount == 0 or (batch.next_obs[newest] == 2.5).all()


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_restored_replay_gives_the_same_transitions(prioritized: bool) -> None:
    history = History(2, 5, (TERMINAL, LIMIT, LOST))
    made: list[Any] = [Prioritized(Replay(20), 0.6, 2) if prioritized else Replay(20) for _ in range(2)]
    saved, restored = made
    for _ in range(30):
        saved.add(*history.step())
    if prioritized:
        saved.update(torch.arange(5), torch.rand(5))
    restored.load_state_dict(copy.deepcopy(saved.state_dict()))
    for _ in range(2):
        arguments = (GAMMA, 0.4) if prioritized else (GAMMA, 2)
        a, b = (replay.transitions(50, *arguments, torch.Generator().manual_seed(1)) for replay in made)
        for part in ("obs", "action", "reward", "discount", "next_obs", "key", "weight"):
            x, y = getattr(a, part), getattr(b, part)
            assert (x is None and y is None) or torch.equal(x, y)
        row = history.step()
        for replay in made:
            replay.add(*row)


# --- priorities


@sabotaged_by("foresight.data.priorities._find", lambda f: lambda nodes, base, sums: f(nodes, base, sums * 0.9))
@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.integers(0, 2**31))
def test_the_tree_finds_what_a_running_sum_finds(values: list[float], seed: int) -> None:
    values[seed % len(values)] = 3.0  # not all are 0
    tree, numbers = SumTree(len(values)), torch.tensor(values, dtype=torch.float64)
    tree[torch.arange(len(values))] = torch.ones(len(values))
    tree[torch.arange(len(values))] = numbers
    assert tree.total == pytest.approx(sum(values))
    assert torch.equal(tree[torch.arange(len(values))], numbers)
    sums = torch.linspace(0, 0.999, 100, dtype=torch.float64) * tree.total
    found, running = tree.find(sums), numbers.cumsum(0)
    assert (numbers[found] > 0).all(), "what has no priority is never drawn"
    assert (running[found] >= sums - 1e-9).all() and (running[found] - numbers[found] <= sums + 1e-9).all()


@sabotaged_by("foresight.data.priorities.Prioritized.update", change("priority", lambda p: p * 0 + 1))
@sabotaged_by("foresight.data.priorities.Prioritized.__init__", change("alpha", lambda a: 2 * a))
@sabotaged_by("foresight.data.priorities.Prioritized.transitions", change("beta", lambda b: b / 2))
def test_rows_are_drawn_in_proportion_to_their_priorities() -> None:
    """P = p^α / Σ p^α and weight = (P_min / P)^β, read literally."""
    alpha, beta, history = 0.6, 0.5, History(2, 3)
    replay = Prioritized(Replay(16), alpha)
    for _ in range(20):
        replay.add(*history.step())
    keys = torch.tensor([k for k in range(32) if k not in (3, 19)])  # all but the newest
    priority = torch.linspace(0.1, 4, 30)
    replay.update(keys, priority)
    batch = replay.transitions(20_000, GAMMA, beta, torch.Generator().manual_seed(0))
    expected = priority**alpha / (priority**alpha).sum()
    counts = torch.bincount(batch.key, minlength=32)[keys]
    assert counts.sum() == 20_000
    assert ((counts / 20_000 - expected).abs() < 5 * (expected / 20_000).sqrt()).all()
    weights = torch.zeros(32).scatter(0, batch.key, batch.weight)[keys]  # type: ignore[arg-type]
    torch.testing.assert_close(weights, (expected.min() / expected) ** beta, rtol=1e-3, atol=1e-4)


@sabotaged_by("foresight.data.priorities.SumTree.find", lambda f: lambda tree, sums: f(tree, sums.sort().values))
def test_every_stream_and_column_comes_first_as_often_as_any() -> None:
    """Equal priorities: among the first half of the rows every key is equally likely. They are not sorted."""
    history, replay, generator = History(4, 0), Prioritized(Replay(16), 1.0), torch.Generator().manual_seed(0)
    for _ in range(16):
        replay.add(*history.step())
    batches = [replay.transitions(8, GAMMA, 0.5, generator).key for _ in range(1500)]
    counts = torch.bincount(torch.stack(batches)[:, :4].flatten(), minlength=64).view(4, 16)
    assert (counts[:, 15] == 0).all()  # the newest
    assert (counts[:, :15] - 100).abs().max() < 5 * 100**0.5


@sabotaged_by("foresight.ops.returns.n_step_transition", change("cut", torch.zeros_like))
@sabotaged_by("foresight.data.priorities.SumTree.__setitem__", change("values", lambda v: v + 1))
@given(seed=st.integers(0, 10_000), streams=st.integers(1, 3), n=st.integers(1, 4), steps=st.integers(16, 50))
def test_prioritized_transitions_cross_no_cut_either(seed: int, streams: int, n: int, steps: int) -> None:
    history, replay = History(streams, seed, (TERMINAL, LIMIT, LOST)), Prioritized(Replay(16), 0.5, n)
    generator = torch.Generator().manual_seed(seed)
    drawn: set[int] = set()
    for t in range(steps):
        replay.add(*history.step())
        if t > 8:
            batch = replay.transitions(16, GAMMA, 0.4, generator)
            replay.update(batch.key, torch.rand(16, generator=generator))
            history.check(batch, n, 16)
            drawn |= set(batch.key.tolist())
    assert len(drawn) > 3


def test_a_new_row_has_the_greatest_priority() -> None:
    history, replay = History(1, 0), Prioritized(Replay(16), 1.0)
    for _ in range(6):
        replay.add(*history.step())
    replay.update(torch.arange(5), torch.tensor([0.1, 0.2, 7.0, 0.3, 0.1]))
    replay.add(*history.step())
    assert replay.tree is not None
    assert replay.tree[torch.tensor([5, 6])].tolist() == pytest.approx([7.0, 0.0], abs=1e-5)


def refuse(action: Any) -> str:
    with pytest.raises(UserError) as caught:
        action()
    return str(caught.value)


def test_mistakes_are_explained() -> None:
    history, replay = History(1, 0), Replay(16)
    assert "0 per environment are stored" in refuse(lambda: replay.transitions(4, GAMMA))
    replay.add(*history.step())
    assert "1 per environment are stored" in refuse(lambda: replay.transitions(4, GAMMA))
    assert "at least 0" in refuse(lambda: Prioritized(Replay(4), -1.0))
    assert "stored so far" in refuse(lambda: Prioritized(Replay(4), 1.0).transitions(4, GAMMA, 0.5))
    assert "a sum tree needs at least 1" in refuse(lambda: SumTree(0))
    assert "5 priorities" in refuse(lambda: SumTree(4).load_state_dict({"leaves": torch.zeros(5)}))
    with pytest.raises(ValueError, match="mask"):
        bare = Replay(4)
        bare.add(
            {
                "obs": torch.zeros(1, 2),
                "action": torch.zeros(1),
                "reward": torch.zeros(1),
                "discount": torch.ones(1),
                "cut": torch.zeros(1),
            }
        )
        bare.interrupt()


@sabotaged_by("foresight.data.replay.Replay._ahead", change("steps", lambda s: s + 1))
@given(seed=st.integers(0, 10_000), streams=st.integers(1, 3), length=st.integers(1, 4), chunk=st.integers(1, 6))
def test_sequences_by_priority_are_consecutive_steps(seed: int, streams: int, length: int, chunk: int) -> None:
    """From wherever `length` real-time steps are stored, also if steps are added by the chunk; never with mask 0."""
    history, capacity = History(streams, seed, (TERMINAL, LIMIT, LOST)), 12
    replay, plain = Prioritized(Replay(capacity), 1.0, length - 1), Prioritized(Replay(capacity), 1.0, length - 1)
    for _ in range(5):
        rows = [history.step()[0] for _ in range(chunk)]
        replay.add(Trajectory(**{name: torch.stack([row[name] for row in rows], 1) for name in rows[0]}))
        for row in rows:
            plain.add(row)
    assert replay.tree is not None and plain.tree is not None
    keys = torch.arange(streams * capacity)
    assert torch.equal(replay.tree[keys], plain.tree[keys])
    steps, real = 5 * chunk, [[row["mask"] > 0 for row in rows] for rows in history.rows]
    starts = range(max(0, steps - capacity), steps - length + 1)
    expected = {i * capacity + t % capacity for i in range(streams) for t in starts if real[i][t]}
    assert set((replay.tree[keys] > 0).nonzero().flatten().tolist()) == expected
    if not expected:
        return
    batch = replay.sequences(20, 1.0, torch.Generator().manual_seed(seed))
    assert (batch.extras["weight"] == 1).all()
    for row, key in enumerate(batch.extras["key"][:, 0].tolist()):
        i, column = divmod(key, capacity)
        start = max((t for t in starts if t % capacity == column), default=-1)
        assert start >= 0
        seen = [history.rows[i][t]["obs"] for t in range(start, start + length)]
        assert [tuple(x) for x in batch.obs[row].tolist()] == seen


@pytest.mark.parametrize("alpha", [-0.1, 1e30, float("inf"), float("nan")])
def test_an_exponent_whose_powers_are_no_numbers_is_refused(alpha: float) -> None:
    with pytest.raises(UserError, match="priority_exponent must be at least 0 and at most 10"):
        Prioritized(Replay(4), alpha)
