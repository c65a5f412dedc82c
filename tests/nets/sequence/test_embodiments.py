"""A VLA of several embodiments: padding changes nothing else, has no loss, and statistics are each one's own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gymnasium import spaces as gs

from foresight.data import embodiments
from foresight.data.embodiments import Embodiment
from foresight.errors import UserError
from foresight.nets.sequence import vla
from foresight.nets.sequence.vla import VLA, Shape
from foresight.nets.sequence.vla_actor_critic import require_one_path
from tests.data.test_embodiments import ACTION, ARM, BOT, OBS
from tests.nets.sequence.test_vla import SIZES
from tests.sabotage import change, sabotaged_by

PARTS = ARM, Embodiment("Bot", gs.Dict({k: x for k, x in BOT.obs.items() if k != "camera_mask"}), BOT.action)
SHAPE = Shape(**SIZES)


def observed(number: int, count: int = 40) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Observations and actions of an embodiment in its own spaces; those of the second have another scale."""
    generator, part = torch.Generator().manual_seed(number), PARTS[number]
    obs = {}
    for name, space in part.obs.items():  # type: ignore[attr-defined]
        shape = count, *space.shape
        if len(space.shape) == 3:
            obs[name] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        elif name != "mission":
            obs[name] = 5 * number + torch.rand(shape, generator=generator)
    words = b"reach" if number == 0 else b"go away"
    size = part.obs["mission"].shape[0]  # type: ignore[index]
    obs["mission"] = torch.tensor([list(words.ljust(size, b"\0"))] * count, dtype=torch.uint8)
    if number:
        return obs, torch.randint(1, 6, (count,), generator=generator)
    return obs, torch.rand(count, 2, 2, generator=generator) * 0.5


def padded(number: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The same in the shared spaces."""
    obs, action = observed(number)
    part = PARTS[number]
    return embodiments.pad_obs(obs, number, part.obs, OBS), embodiments.pad_action(action, part.action, ACTION)


def network() -> VLA:
    """A network with random weights that knows the data of both."""
    torch.manual_seed(0)
    net = VLA(OBS, ACTION, SHAPE, PARTS).eval()
    for weight in net.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    (one, did), (other, done) = padded(0), padded(1)
    net.fit({name: torch.cat([one[name], other[name]]) for name in one}, torch.cat([did, done]))
    return net


def _everything(original):
    return lambda seen, places: torch.ones_like(original(seen, places))


def _reads_padding(original):
    def scaled(self, name, values, which):
        found, there = original(self, name, values, which)
        return found + values.sum(-1, keepdim=True), there

    return scaled


@sabotaged_by("foresight.nets.sequence.vla.attention_mask", _everything)
@sabotaged_by("foresight.nets.sequence.vla.VLA._scaled", _reads_padding)
def test_what_is_in_the_padding_changes_nothing() -> None:
    for number in (0, 1):
        _padding_changes_nothing(number)


def _padding_changes_nothing(number: int) -> None:
    net, (obs, action) = network(), padded(number)
    own, noise = PARTS[number].obs.spaces, dict(obs)  # type: ignore[attr-defined]
    for name, x in obs.items():
        if name not in own and name not in ("camera_mask", "embodiment"):
            noise[name] = torch.randint_like(x, 1, 9) if x.dtype == torch.uint8 else x + 3
    noise["state"] = noise["state"] + torch.tensor([0, 0, 4.0 * number])  # the second has two numbers
    before, after = net(obs), net(noise)
    torch.testing.assert_close(after.tokens.logps, before.tokens.logps)
    assert (number == 0) == torch.equal(noise["state"], obs["state"])
    length = net.actions.lengths[number]
    other = torch.cat([action[:, :length], action[:, length:] + 9], 1)
    torch.testing.assert_close(before.loss(other), before.loss(action))


@sabotaged_by("foresight.nets.sequence.action_tokens.SharedTokens.of", change("which", lambda which: 1 - which))
@sabotaged_by("foresight.nets.sequence.vla.VLA._scale", change("which", lambda which: 1 - which))
def test_each_acts_as_a_network_of_its_own() -> None:
    """With the weights of the shared network, one that has never seen padding computes the same."""
    for number in (0, 1):
        _acts_as_alone(number)


def _acts_as_alone(number: int) -> None:
    net, part, (obs, action) = network(), PARTS[number], padded(number)
    alone = VLA(part.obs, part.action, SHAPE).eval()
    weights = {name: x.clone() for name, x in net.state_dict().items()}
    size, mine = alone.state["state"].in_features, net.cameras.index(alone.cameras[0])
    for name in list(weights):
        if name.startswith("scales.") and name.split(".")[1].endswith(":1") == bool(number):
            weights[name.replace(":1", "")] = weights[name]
    weights |= {
        "begin": weights["begin"][number : number + 1], "camera": weights["camera"][mine : mine + 1],
        "places": weights["places"][: alone.actions.count],
        "state.state.weight": weights["state.state.weight"][:, :size],
        "logits.weight": weights["logits.weight"][: alone.actions.vocabulary],
        "logits.bias": weights["logits.bias"][: alone.actions.vocabulary],
    }  # fmt: skip
    alone.load_state_dict(
        {name: weights[name] for name in alone.state_dict() if not name.startswith("actions.")}, False
    )
    raw, did = observed(number)
    alone.actions.fit(did)
    k, v = alone.actions.count, alone.actions.vocabulary
    torch.testing.assert_close(net(obs).tokens.logits[:, :k, :v], alone(raw).tokens.logits)
    torch.testing.assert_close(embodiments.own_action(net(obs).mode(), part.action), alone(raw).mode() + number)
    if not number:
        torch.testing.assert_close(net(obs).loss(action), alone(raw).loss(did))


def _all_tokens(original):
    return lambda self, which: original(self, which)._replace(
        allowed=torch.ones(*which.shape, self.count, self.vocabulary, dtype=torch.bool)
    )


@sabotaged_by("foresight.nets.sequence.action_tokens.SharedTokens.of", _all_tokens)
def test_padding_has_no_loss_and_no_gradient() -> None:
    net, (obs, action) = network(), padded(1)
    output = net(obs)
    assert output.token_logp(action)[:, 0].max() < 0 and not output.token_logp(action)[:, 1:].any()
    assert torch.equal(output.loss(action), -output.token_logp(action)[:, 0])
    torch.testing.assert_close(output.entropy(), output.tokens.entropy()[:, 0])
    (output.loss(action).mean() + output.smoothed_loss(action, 0.5).mean()).backward()
    assert net.places.grad[0].any() and not net.places.grad[1:].any()
    assert net.begin.grad[1].any() and not net.begin.grad[0].any()
    names, seen = net.tokens({name: x[:1] for name, x in obs.items()})
    shown = [name for name, real in zip(names, seen.tolist(), strict=True) if real]
    assert shown == ["front 0", "front 1", "front 2", "state", "go", "away", "begin", "action 0"]


@sabotaged_by("foresight.nets.sequence.action_tokens.SharedTokens.fit", change("which", lambda which: 0))
@sabotaged_by("foresight.nets.imitation.MeanStd.fit", change("values", lambda values: values * 0 + 1))
def test_statistics_are_each_ones_own() -> None:
    net = network()
    (arm, did), (bot, _) = padded(0), padded(1)
    torch.testing.assert_close(net.actions.low[0], did.quantile(0.01, 0))
    torch.testing.assert_close(net.actions.high[0], did.quantile(0.99, 0))
    assert (net.actions.low[1] == -1).all() and (net.actions.high[1] == 1).all()  # choices are all there are
    torch.testing.assert_close(net.scales["state"].mean, arm["state"].mean(0))
    torch.testing.assert_close(net.scales["state:1"].mean, bot["state"].mean(0)[:2])
    assert "speed:1" not in net.scales and net.scales["state"].mean.max() < 1 < 5 < net.scales["state:1"].mean.min()


def test_acting_is_training_and_mistakes_are_named(tmp_path) -> None:
    net, (obs, _) = network(), padded(0)
    require_one_path(net, obs)
    vla.save(net, tmp_path / "export")
    again = vla.load(tmp_path, OBS, ACTION, PARTS).eval()
    torch.testing.assert_close(again(obs).tokens.logits, net(obs).tokens.logits)
    with pytest.raises(UserError, match="was trained on other observations or actions"):
        vla.load(tmp_path, ARM.obs, ARM.action)
    with pytest.raises(UserError, match=r"has no 'embodiment'\. It is a number: 0 for Arm, 1 for Bot"):
        net({name: x for name, x in obs.items() if name != "embodiment"})
    for head in ("flow", "point"):
        with pytest.raises(UserError, match=f"head '{head}' is for one embodiment. Use --head bins"):
            VLA(OBS, ACTION, dataclasses.replace(SHAPE, head=head), PARTS)
