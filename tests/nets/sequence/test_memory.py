"""Memories: what was read step by step is what is read at once, and nothing passes from one episode to the next."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.errors import UserError
from foresight.nets import heads
from foresight.nets.sequence import gtrxl, memory
from tests.sabotage import change, drop, flip_sign, off_by_one, sabotaged_by

B, T, D, SIZE, WINDOW = 3, 23, 5, 8, 6
SETTINGS = [(kind, layers) for kind in memory.KINDS for layers in (1, 2)]


def _make(kind: str, layers: int = 1, window: int = WINDOW):
    torch.manual_seed(0)
    net = memory.make(memory.Shape(kind, SIZE, layers, heads=2, window=window), D)
    with torch.no_grad():  # away from a start at which a layer hardly does anything
        for parameter in net.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return net


def _sequences() -> tuple[Tensor, Tensor]:
    """Inputs `[B, T, D]` and the starts of episodes `[B, T]`: none, some, and one right at the beginning."""
    generator = torch.Generator().manual_seed(1)
    start = torch.zeros(B, T)
    start[1, [4, 5, 19]] = 1
    start[2, [0, 11]] = 1
    return torch.randn(B, T, D, generator=generator), start


def _one_by_one(net, x: Tensor, start: Tensor, carry) -> tuple[Tensor, dict[str, Tensor]]:
    """How a policy acts: one row at a time, the memory emptied in between."""
    rows = []
    for t in range(x.shape[1]):
        y, carry = net(x[:, t : t + 1], memory.reset_carry(carry, start[:, t]))
        rows.append(y)
    return torch.cat(rows, 1), carry


def _begun(net):
    """A carry that has read something, longer than the window in one row, shorter in the others."""
    x = torch.randn(B, 9, D, generator=torch.Generator().manual_seed(2))
    start = torch.zeros(B, 9)
    start[1, 4] = start[2, 8] = 1
    return _one_by_one(net, x, start, net.initial(B))[1]


@sabotaged_by("foresight.nets.sequence.memory.reset_carry", lambda f: lambda carry, cut: carry)
@sabotaged_by("foresight.nets.sequence.window.visible", drop("start"), lambda f: lambda *a: f(*a).tril())
@sabotaged_by("foresight.nets.sequence.window.still_filled", drop("start"))
@sabotaged_by("foresight.nets.sequence.window._positions", drop("start"))
@sabotaged_by(
    "foresight.nets.sequence.recurrent._segments", change("start", torch.zeros_like), change("start", torch.ones_like)
)
def test_read_at_once_is_read_one_by_one_across_episodes():
    x, start = _sequences()
    for kind, layers in SETTINGS:
        net = _make(kind, layers)
        for carry in (net.initial(B), _begun(net)):
            expected, after = _one_by_one(net, x, start, carry)
            found, carried = net(x, carry, start)
            torch.testing.assert_close(found, expected, msg=lambda m, k=kind: f"{k}: {m}")
            for name in carried.keys() & {"filled", "count"}:
                assert torch.equal(carried[name], after[name])
            # The carries are as good as each other, whatever stands in slots that are not filled.
            more, again = x.flip(1), torch.zeros(B, T)
            torch.testing.assert_close(net(more, carried, again)[0], net(more, after, again)[0])


@sabotaged_by("foresight.nets.sequence.window.slide", lambda f: lambda past, new: f(past, new).roll(1, 1))
def test_read_in_two_parts_is_read_in_one():
    x, start = _sequences()
    for kind, layers in SETTINGS:
        net = _make(kind, layers)
        whole, _ = net(x, net.initial(B), start)
        for split in (1, 4, 5, 17):
            first, carry = net(x[:, :split], net.initial(B), start[:, :split])
            second, _ = net(x[:, split:], carry, start[:, split:])
            torch.testing.assert_close(torch.cat([first, second], 1), whole, msg=lambda m, k=kind: f"{k}: {m}")


@sabotaged_by("foresight.nets.sequence.window.visible", drop("start"))
@pytest.mark.parametrize("kind", ["gtrxl", "transformer"])
def test_attention_reaches_its_own_episode_and_the_past_only(kind: str):
    _reaches_its_own_episode(kind)


@sabotaged_by("foresight.nets.sequence.recurrent._segments", change("start", torch.zeros_like))
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrence_reaches_its_own_episode_and_the_past_only(kind: str):
    _reaches_its_own_episode(kind)


def _reaches_its_own_episode(kind: str) -> None:
    net = _make(kind, layers=2, window=T)
    x, start = _sequences()
    x.requires_grad_()
    y, _ = net(x, net.initial(B), start)
    episode = start.cumsum(1)
    for b in range(B):
        for t in (0, 4, 5, 12, T - 1):
            (gradient,) = torch.autograd.grad(y[b, t].sum(), x, retain_graph=True)
            reached = gradient.abs().sum(-1) > 0
            expected = torch.zeros(B, T, dtype=torch.bool)
            expected[b, : t + 1] = episode[b, : t + 1] == episode[b, t]
            assert torch.equal(reached, expected)


@sabotaged_by(
    "foresight.nets.sequence.window.visible", lambda f: lambda filled, start, steps: f(filled[:, 1:], start, steps)
)
@pytest.mark.parametrize("kind", ["gtrxl", "transformer"])
def test_a_layer_of_attention_sees_as_many_rows_as_its_window(kind: str):
    net = _make(kind)
    x = torch.randn(1, T, D, requires_grad=True)
    try:
        y, _ = net(x, net.initial(1), torch.zeros(1, T))
    except RuntimeError as error:  # the sabotaged one: a mask of another width
        raise AssertionError from error
    for t in (0, 3, WINDOW, T - 1):
        (gradient,) = torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)
        seen = (gradient.abs().sum(-1) > 0)[0].nonzero().squeeze(-1).tolist()
        assert seen == list(range(max(0, t - WINDOW), t + 1))


@sabotaged_by("foresight.nets.sequence.gtrxl._skew", off_by_one, flip_sign)
@sabotaged_by("foresight.nets.sequence.gtrxl._sinusoids", lambda f: lambda *a: f(*a).flip(0))
def test_relative_attention_is_its_definition():
    """Σ_s softmax_s[((q + u)·k_s + (q + v)·W_r R_{t-s}) / √width] v_s, head by head, over the slots that are seen."""
    torch.manual_seed(0)
    attention = gtrxl.RelativeAttention(SIZE, 2, WINDOW)
    with torch.no_grad():
        attention.content_bias.normal_()
        attention.distance_bias.normal_()
    filled = torch.tensor([[False, False, True, True, True, True], [False] * 6])
    start = torch.tensor([[0, 0, 0, 1, 0], [1, 0, 0, 0, 1]])
    seen = torch.randn(2, WINDOW + 5, SIZE)
    found = attention(seen[:, WINDOW:], seen, gtrxl.visible(filled, start, 5))
    width, expected = SIZE // 2, torch.zeros(2, 5, SIZE)
    episode = start.cumsum(1)
    for b in range(2):
        for t in range(5):
            q = (attention.query.weight @ seen[b, WINDOW + t]).view(2, width)
            slots = [j for j in range(WINDOW) if filled[b, j] and j >= t and episode[b, t] == 0]
            slots += [WINDOW + s for s in range(t + 1) if episode[b, s] == episode[b, t]]
            mixed = []
            for head in range(2):
                scores, values = [], []
                for j in slots:
                    k, v = (attention.key_value.weight @ seen[b, j]).view(2, 2, width)[:, head]
                    distance, features = WINDOW + t - j, []
                    for wave in (math.sin, math.cos):
                        features += [wave(distance / 10_000 ** (2 * i / SIZE)) for i in range(SIZE // 2)]
                    r = (attention.distance_key.weight @ torch.tensor(features)).view(2, width)[head]
                    score = (q[head] + attention.content_bias[head]) @ k + (q[head] + attention.distance_bias[head]) @ r
                    scores.append(score / math.sqrt(width))
                    values.append(v)
                mixed.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            expected[b, t] = attention.out.weight @ torch.cat(mixed)
    torch.testing.assert_close(found, expected)


@sabotaged_by("foresight.nets.sequence.gtrxl.Gate.forward", flip_sign, lambda f: lambda self, x, y: f(self, y, x))
def test_the_gate_is_the_papers():
    torch.manual_seed(0)
    gate = gtrxl.Gate(4)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    w_r, w_z, w_g = gate.branch.weight.split(4)
    u_r, u_z = gate.stream.weight.split(4)
    r = torch.sigmoid(y @ w_r.T + x @ u_r.T)
    z = torch.sigmoid(y @ w_z.T + x @ u_z.T - 2)
    h = torch.tanh(y @ w_g.T + (r * x) @ gate.reset.weight.T)
    torch.testing.assert_close(gate(x, y), (1 - z) * x + z * h)
    with torch.no_grad():
        gate.bias.fill_(50.0)
    torch.testing.assert_close(gate(x, y), x)  # closed, it is the identity


def test_gtrxl_starts_near_a_policy_without_memory():
    """Gate bias 2 (§3.2): at the start the past moves the output little, with bias -2 much."""

    def moved(bias: float) -> float:
        torch.manual_seed(0)
        net = gtrxl.GTrXL(D, SIZE, heads=2, window=WINDOW)
        for name, parameter in net.named_parameters():
            if name.endswith("gate.bias"):
                torch.nn.init.constant_(parameter, bias)
        x, y = torch.randn(2, 1, 5, D)
        y[:, -1] = x[:, -1]
        start = torch.zeros(1, 5)
        return (net(x, net.initial(1), start)[0] - net(y, net.initial(1), start)[0])[:, -1].abs().mean().item()

    assert gtrxl.Gate(SIZE).bias.eq(2).all()
    assert 0 < 3 * moved(2.0) < moved(-2.0)


@pytest.mark.parametrize(("kind", "layers"), SETTINGS)
def test_a_reset_memory_is_a_new_memory(kind: str, layers: int):
    net = _make(kind, layers)
    carry, fresh = _begun(net), net.initial(B)
    assert all(not torch.equal(carry[name], fresh[name]) for name in carry)
    forgotten = memory.reset_carry(carry, torch.tensor([1.0, 0.0, 1.0]))
    for name in carry:
        assert torch.equal(forgotten[name][[0, 2]], fresh[name][[0, 2]])
        assert torch.equal(forgotten[name][1], carry[name][1])
    assert memory.reset_carry(None, torch.ones(3)) is None


@pytest.mark.parametrize("kind", ["gtrxl", "transformer"])
def test_no_gradient_flows_into_the_carry(kind: str):
    net = _make(kind)
    _, carry = net(torch.randn(2, 4, D), net.initial(2), torch.zeros(2, 4))
    assert not any(x.requires_grad for x in carry.values())


# ---------------------------------------------------------------- actor and critic

BOX, CHOICE = gs.Box(-1, 1, (D,), np.float32), heads.CategoricalHead(3)


def _network(backbone: str, kind: str = "gru", space: gs.Space = BOX) -> memory.MemoryActorCritic:
    torch.manual_seed(0)
    shape = memory.Shape(kind, SIZE, heads=2, window=WINDOW)
    return memory.actor_critic(space, CHOICE, heads.ScalarHead(), shape, backbone, hidden=(16,), gains=(1.0, 1.0))


@pytest.mark.parametrize("kind", memory.KINDS)
@pytest.mark.parametrize(("backbone", "policy", "value"), [
    ("shared", True, True), ("separate", True, True), ("actor", True, False), ("critic", False, True),
])  # fmt: skip
def test_what_has_the_memory_depends_on_the_past(backbone: str, policy: bool, value: bool, kind: str):
    network = _network(backbone, kind)
    x, _ = _sequences()
    y = x.clone()
    y[:, 0] += 1
    start = torch.zeros(B, T)
    (a, v, _), (b, w, _) = (network(obs[:, :4], None, start[:, :4]) for obs in (x, y))
    assert torch.equal(a.logits[:, -1], b.logits[:, -1]) != policy
    assert torch.equal(v.value[:, -1], w.value[:, -1]) != value
    shared = len(network.trunks) == 1
    assert shared == (backbone == "shared")


@sabotaged_by("foresight.nets.sequence.memory.reset_carry", lambda f: lambda carry, cut: carry)
@pytest.mark.parametrize("backbone", memory.BACKBONES)
def test_acting_and_learning_give_the_same_outputs(backbone: str):
    network = _network(backbone)
    x, start = _sequences()
    whole, values, after = network(x, None, start)
    carry, alone = None, None
    for t in range(T):
        carry, alone = memory.reset_carry(carry, start[:, t]), memory.reset_carry(alone, start[:, t])
        step, value, carry = network(x[:, t], carry)
        policy, alone = network.step(x[:, t], alone)
        torch.testing.assert_close(step.logits, whole.logits[:, t])
        torch.testing.assert_close(value.value, values.value[:, t])
        assert torch.equal(policy.logits, step.logits)
    for name in after:
        for part in after[name] or {}:
            torch.testing.assert_close(after[name][part], carry[name][part])


def test_dict_observations_and_masks_have_memories_too():
    space = gs.Dict({"x": BOX, "seen": gs.Discrete(4), "action_mask": gs.MultiBinary(3)})
    network = _network("shared", "gtrxl", space)
    mask = torch.tensor([0, 1, 0], dtype=torch.int8).expand(B, T, 3)
    obs = {"x": _sequences()[0], "seen": torch.zeros(B, T, dtype=torch.int64), "action_mask": mask}
    output, _, carry = network(obs, None, torch.zeros(B, T))
    assert output.entropy().abs().max() == 0 and (output.mode() == 1).all()
    assert network.step({key: part[:, 0] for key, part in obs.items()}, carry)[0].mode().shape == (B,)


MISTAKES = [
    ({"kind": "gtxl"}, {}, "Did you mean 'gtrxl'"),
    ({"kind": "gru", "size": 0}, {}, "size must be at least 1"),
    ({"kind": "gtrxl", "window": 0}, {}, "window must be at least 1"),
    ({"kind": "gtrxl", "size": 9, "heads": 2}, {}, "multiple of its 2 heads"),
    ({"kind": "transformer", "size": 9, "heads": 2}, {}, "an even multiple of 2 heads, not 9"),
    ({"kind": "gru"}, {"backbone": "share"}, "Did you mean 'shared'"),
    (None, {"backbone": "share"}, "Did you mean 'shared'"),
    (None, {"backbone": "separate"}, "no effect without a memory"),
]


@pytest.mark.parametrize(("shape", "options", "message"), MISTAKES)
def test_mistakes_are_named(shape, options, message):
    with pytest.raises(UserError, match=message):
        memory.actor_critic(BOX, CHOICE, heads.ScalarHead(), shape and memory.Shape(**shape), **options)
