"""VLA networks: who attends to whom, missing cameras, words, action tokens, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.errors import UserError
from foresight.nets.sequence import action_tokens, grounding, vla
from foresight.nets.sequence.action_tokens import ActionTokens, Flow, FlowField, Tokens
from foresight.nets.sequence.vit import NO_CACHE
from foresight.nets.sequence.vla import VLA, Shape
from foresight.nets.sequence.vla_actor_critic import VLAActorCritic, require_one_path
from tests.sabotage import change, drop, sabotaged_by

SIZES: dict[str, Any] = {
    "dim": 16, "layers": 2, "heads": 2, "channels": 8, "patch": 8, "film_layers": 1, "image_tokens": 3, "words": 5,
    "edges": 9, "head": "bins",
}  # fmt: skip
CAMERA, TEXT = gs.Box(0, 255, (32, 32, 3), np.uint8), gs.Box(0, 255, (24,), np.uint8)
OBS = gs.Dict({"front": CAMERA, "wrist": CAMERA, vla.MISSION: TEXT})
ARM = gs.Box(-1, 1, (3,), np.float32)
PLACE = gs.Box(np.array([0, 0, -1], np.float32), np.ones(3, np.float32))  # a point and a gripper


def text(*missions: str) -> torch.Tensor:
    """Missions as padded bytes."""
    return torch.tensor([list(m.encode().ljust(24, b"\0")) for m in missions], dtype=torch.uint8)


def network(obs: gs.Space = OBS, action: gs.Space = ARM, **sizes: Any) -> VLA:
    """A network whose weights are all random, FiLM's too."""
    torch.manual_seed(0)
    net = VLA(obs, action, Shape(**{**SIZES, **sizes})).eval()
    for weight in net.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    net.words.fit(text("go to the red ball", "take it"))
    return net


def seen(count: int = 2) -> dict[str, torch.Tensor]:
    """Observations."""
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(0, 256, (2, count, 32, 32, 3), generator=generator, dtype=torch.uint8)
    return {"front": image[0], "wrist": image[1], vla.MISSION: text("go to the red ball", "take it")[:count]}


def _everything(original):
    return lambda seen, places: torch.ones_like(original(seen, places))


@sabotaged_by("foresight.nets.sequence.vla.attention_mask", _everything)
def test_no_action_token_attends_to_an_action_token() -> None:
    net = network()
    before, at, *_ = net.features(seen())
    with torch.no_grad():
        net.places[1] += torch.arange(16.0)
    before_after, at_after, *_ = net.features(seen())
    torch.testing.assert_close(before_after, before)  # what comes before them does not see them either
    torch.testing.assert_close(at_after[:, [0, 2]], at[:, [0, 2]])
    assert (at_after[:, 1] - at[:, 1]).abs().max() > 1e-3


@sabotaged_by("foresight.nets.sequence.vla.attention_mask", _everything)
def test_a_missing_camera_changes_nothing_else() -> None:
    net, obs = network(), seen()
    masked = {**obs, vla.CAMERA_MASK: torch.tensor([[1, 0], [1, 1]])}
    y = net(masked).tokens.logits
    other = {**masked, "wrist": torch.where(torch.tensor([True, False])[:, None, None, None], 7, obs["wrist"])}
    torch.testing.assert_close(net(other).tokens.logits, y)  # its pixels
    torch.testing.assert_close(net(obs).tokens.logits[1], y[1])  # the other row
    assert (net(obs).tokens.logits[0] - y[0]).abs().max() > 1e-3
    alone = VLA(gs.Dict({"front": CAMERA, vla.MISSION: TEXT}), ARM, net.config).eval()  # that never had it
    alone.load_state_dict(
        {name: x[:1] if name == "camera" else x for name, x in net.state_dict().items() if "eyes.wrist" not in name}
    )
    torch.testing.assert_close(alone({k: x for k, x in obs.items() if k != "wrist"}).tokens.logits[0], y[0])


@sabotaged_by("foresight.nets.sequence.vla.attention_mask", _everything)
@pytest.mark.parametrize("space", [gs.MultiBinary(2), gs.Box(0, 1, (2,), np.float32), gs.Box(0, 1, (2,), np.uint8)])
def test_the_mask_of_cameras_is_no_state(space: gs.Space) -> None:
    """Whatever its space, it hides cameras and changes no other token."""
    net, plain, obs = network(gs.Dict({**OBS.spaces, vla.CAMERA_MASK: space})), network(), seen()
    masked = {**obs, vla.CAMERA_MASK: torch.tensor([[1, 0], [1, 1]]).to(torch.from_numpy(space.sample()).dtype)}
    assert net.vectors == [] and len(list(net.parameters())) == len(list(plain.parameters()))
    torch.testing.assert_close(net(masked).tokens.logits, plain(masked).tokens.logits)
    other = {**masked, "wrist": torch.where(torch.tensor([True, False])[:, None, None, None], 7, obs["wrist"])}
    torch.testing.assert_close(net(other).tokens.logits, net(masked).tokens.logits)


@sabotaged_by("foresight.nets.sequence.vit.ViT.forward", change("obs", lambda x: x.flip(-1)))
def test_a_vision_transformer_reads_the_patches() -> None:
    """Its tokens are the cells, row by row; a margin smaller than a patch is left out, as by a convolution."""
    spaces = gs.Dict({"front": gs.Box(0, 255, (35, 24, 3), np.uint8), vla.MISSION: TEXT})
    net = network(spaces, PLACE, images="vit", film_layers=0, head="point", edges=4)
    image = torch.randint(0, 256, (1, 35, 24, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    obs, read = {"front": image, vla.MISSION: text("take it")}, net.eyes["front"].vit
    cells = net.features(obs).cells
    assert net(obs).tokens.logits.shape == (1, 2, 12)
    patches = (image[:, :32] / 255).view(1, 4, 8, 3, 8, 3).permute(0, 1, 3, 5, 2, 4).reshape(1, 12, -1)  # row by row
    x = torch.cat([read.class_token, read.embed(patches)], 1) + read.position
    for block in read.blocks:
        x, *_ = block(x, None, torch.ones(13, 13, dtype=torch.bool), NO_CACHE, 0)
    torch.testing.assert_close(cells, read.norm(x)[:, 1:])
    require_one_path(VLAActorCritic(net), obs)


def test_padding_of_the_instruction_changes_nothing() -> None:
    net, obs = network(find=True), seen(1)
    wide = {**obs, vla.MISSION: torch.nn.functional.pad(obs[vla.MISSION], (0, 9))}
    torch.testing.assert_close(net(wide).tokens.logits, net(obs).tokens.logits)
    spaced = {**obs, vla.MISSION: text("go  to the red ball ")}
    torch.testing.assert_close(net(spaced).tokens.logits, net(obs).tokens.logits)


def test_words_are_known_by_the_data() -> None:
    net, obs = network(), seen(1)
    y = {said: net({**obs, vla.MISSION: text(said)}).tokens.logits for said in ("go to", "go red", "go up", "go over")}
    assert (y["go to"] - y["go red"]).abs().max() > 1e-3
    torch.testing.assert_close(y["go up"], y["go over"])  # neither is known
    assert (y["go to"] - y["go up"]).abs().max() > 1e-3


@sabotaged_by("foresight.nets.sequence.vla.attention_mask", _everything)
@pytest.mark.parametrize(("blind", "hidden"), [("language", (vla.MISSION,)), ("image", ("front", "wrist"))])
def test_a_blind_policy_does_not_see(blind: str, hidden: tuple[str, ...]) -> None:
    obs = seen(1)
    other = {**obs, **{name: text("take it") if name == vla.MISSION else 255 - obs[name] for name in hidden}}
    net = network(blind=blind, find=True)
    torch.testing.assert_close(net(other).tokens.logits, net(obs).tokens.logits)
    net = network()
    assert (net(other).tokens.logits - net(obs).tokens.logits).abs().max() > 1e-3


@sabotaged_by("foresight.nets.sequence.action_tokens.ActionTokens.encode", lambda f: lambda self, x: f(self, x) * 0)
def test_actions_and_tokens_are_inverse() -> None:
    for space in (gs.Discrete(4), gs.MultiDiscrete([2, 5]), ARM):
        code = ActionTokens(space, 9)
        sizes = code.allowed.sum(1).tolist()
        for token in range(max(sizes)):
            tokens = torch.tensor([min(token, size - 1) for size in sizes])
            assert torch.equal(code.encode(code.decode(tokens)), tokens), space


@sabotaged_by("foresight.nets.outputs.Categorical.__init__", drop("mask"))
def test_only_tokens_of_the_action_have_probability() -> None:
    code = ActionTokens(gs.MultiDiscrete([2, 5]))
    output = Tokens(torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0)), code)
    assert (output.mean()[:, 0, 2:] == 0).all()
    torch.testing.assert_close(output.mean().sum(-1), torch.ones(3, 2))
    every = torch.cartesian_prod(torch.arange(2), torch.arange(5))
    total = torch.stack([output.logp(one.expand(3, -1)) for one in every]).exp().sum(0)
    torch.testing.assert_close(total, torch.ones(3))  # of whole actions
    torch.testing.assert_close(output.token_logp(every[:3]).sum(-1), output.logp(every[:3]))


@sabotaged_by("foresight.nets.sequence.action_tokens.Tokens.smoothed_loss", change("share", lambda x: x / 2))
def test_smoothed_targets_are_even_over_allowed_tokens() -> None:
    """torch's cross-entropy with label smoothing, of each place over its own tokens."""
    code, share = ActionTokens(gs.MultiDiscrete([2, 5])), 0.3
    logits = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([[0, 4], [1, 0], [1, 2]])
    found = Tokens(logits, code).smoothed_loss(target, share)
    expected = [
        torch.nn.functional.cross_entropy(logits[:, k, :n], target[:, k], reduction="none", label_smoothing=share)
        for k, n in enumerate((2, 5))
    ]
    torch.testing.assert_close(found, expected[0] + expected[1])


def test_ranges_are_those_of_the_data() -> None:
    code = ActionTokens(ARM)
    action = torch.linspace(-0.5, 0.5, 1_001)[:, None].repeat(1, 3)
    action[:, 2] = 0.25  # constant: it keeps the space's
    code.fit(action)
    torch.testing.assert_close(code.low, torch.tensor([-0.49, -0.49, -1.0]))
    assert (ARM.low == -1).all()  # the space of the environment stays as it is
    outside = code.decode(code.encode(torch.tensor([9.0, -9.0, 9.0])))
    assert outside[0] == pytest.approx(0.49, abs=0.01) and outside[1] == pytest.approx(-0.49, abs=0.01)


@sabotaged_by("foresight.nets.sequence.action_tokens.spread", lambda f: lambda rows: rows[:1_000])
def test_ranges_are_those_of_all_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first half in which nothing moves: more steps than quantiles are taken of."""
    monkeypatch.setattr(action_tokens, "ROWS", 1_000)
    action = torch.cat([torch.zeros(1_000, 3), torch.linspace(-0.5, 0.5, 1_000)[:, None].expand(-1, 3)])
    code, shared = ActionTokens(ARM), action_tokens.SharedTokens([ARM], 256)
    code.fit(action)
    shared.fit(action, 0)
    assert len(action_tokens.spread(action)) == 1_000
    for low, high in ((code.low, code.high), (shared.low[0], shared.high[0])):
        torch.testing.assert_close(low, torch.full((3,), -0.48), atol=0.01, rtol=0)
        torch.testing.assert_close(high, torch.full((3,), 0.48), atol=0.01, rtol=0)


def test_ranges_of_data_on_another_device_are_taken_there() -> None:
    code = ActionTokens(ARM).to("meta")
    code.fit(torch.zeros(5, 3, device="meta"))
    assert code.low.device.type == "meta"


def _backward(original):
    """The flow runs from the action to the noise."""
    return lambda self, x: original(self, x) * 0


@sabotaged_by("foresight.nets.sequence.action_tokens.Flow._moved", _backward)
def test_a_flow_reaches_both_of_two_actions() -> None:
    """Squared error would give their mean, 0."""
    torch.manual_seed(0)
    code, field = ActionTokens(gs.Box(-1, 1, (1,), np.float32)), FlowField(1, 2, 32)
    hidden, target = torch.zeros(256, 2), torch.tensor([-0.8, 0.8]).repeat(128)[:, None]
    optimizer = torch.optim.Adam(field.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        Flow(field, hidden, code).loss(target).mean().backward()
        optimizer.step()
    with torch.no_grad():
        drawn = Flow(field, hidden, code).sample(torch.Generator().manual_seed(0))
    assert ((drawn.abs() - 0.8).abs() < 0.25).float().mean() > 0.8
    assert 0.3 < (drawn > 0).float().mean() < 0.7


def test_mistakes_are_named(tmp_path) -> None:
    net, obs = network(), seen(1)
    for given, message in (
        ({**obs, vla.MISSION: text("go to the red ball now")}, "has 6 words, but the context of the policy is 5"),
        ({k: x for k, x in obs.items() if k != "wrist"}, "has no 'wrist'"),
        ({k: x for k, x in obs.items() if k != vla.MISSION}, "has no 'mission', which this policy was trained on"),
    ):
        with pytest.raises(UserError, match=message):
            net(given)
    for changed, message in (
        ({"obs": gs.Dict({"front": CAMERA})}, "needs dict observations with 'mission'"),
        ({"action": gs.Discrete(3), "head": "flow"}, "head 'flow' is for actions of a Box"),
        ({"action": gs.Box(0, 0, (2,), np.float32), "head": "flow"}, "a dim with equal bounds"),
        ({"head": "bin"}, "Did you mean 'bins'"),
        ({"blind": "speech"}, "Unknown blind 'speech'"),
        ({"images": "cnn"}, "Unknown images 'cnn'"),
        ({"action": ARM, "head": "point"}, "begin with x and y from 0 to 1"),
        ({"obs": gs.Dict({"arm": ARM, vla.MISSION: TEXT}), "head": "point"}, "head 'point' needs an image"),
        ({"obs": gs.Dict({"arm": ARM, vla.MISSION: TEXT}), "find": True}, "find needs an image .* Use --no-find"),
        ({"patch": 99}, "patch must be at most 32"),
        ({"action": gs.Box(-np.inf, np.inf, (1,))}, "a bounded Box"),
    ):
        with pytest.raises(UserError, match=message):
            network(**changed)
    with pytest.raises(UserError, match="log-probabilities"):
        VLAActorCritic(network(head="flow"))
    with pytest.raises(UserError, match=r"There is no trained VLA .* --out RUN, and give it with --policy RUN"):
        vla.load(tmp_path, OBS, ARM)
    vla.save(net, tmp_path / "export")
    with pytest.raises(UserError, match="was trained on other observations"):
        vla.load(tmp_path, gs.Dict({"front": CAMERA, vla.MISSION: TEXT}), ARM)
    again = vla.load(tmp_path, OBS, ARM).eval()
    torch.testing.assert_close(again(obs).tokens.logits, net(obs).tokens.logits)
    for file, cut in ((vla.FILES[0], lambda data: data[:-9]), (vla.FILES[0], lambda data: b'{"new": 1}'),
                      (vla.FILES[1], lambda data: data[: len(data) // 2])):  # fmt: skip
        path = vla.save(net, tmp_path / "export") / file
        path.write_bytes(cut(path.read_bytes()))
        with pytest.raises(UserError, match="is not complete: copy or export it again"):
            vla.load(tmp_path, OBS, ARM)


@sabotaged_by(
    "foresight.nets.sequence.vla_actor_critic.VLAActorCritic.step", lambda f: lambda self, obs: f(self.train(), obs)
)
def test_acting_and_training_have_the_same_log_probabilities() -> None:
    net = VLAActorCritic(network())
    torch.manual_seed(0)
    try:
        require_one_path(net, seen(), net.policy(seen()).mode())
        require_one_path(net.vla, seen())
    except UserError as error:
        raise AssertionError(error) from error
    with pytest.raises(UserError, match="of the actions of evaluation differ"):
        require_one_path(net, seen(), -net.policy(seen()).mode())


def _down_first(original):
    """y before x."""
    return lambda self, cell: original(self, cell).flip(-1)


@sabotaged_by("foresight.nets.sequence.action_tokens.ActionTokens._center", _down_first)
def test_a_point_is_a_cell_of_the_picture_row_by_row() -> None:
    code = ActionTokens(PLACE, 4, (2, 5))
    two = ActionTokens(gs.Box(np.array([0, 0, 0, 0, -1], np.float32), np.ones(5, np.float32)), 4, (2, 5), 2)
    action = torch.tensor([[0.3, 0.9, 0.1, 0.2, 1.0]])
    assert two.encode(action).tolist() == [[6, 0, 2]]
    torch.testing.assert_close(two.decode(two.encode(action))[:, :4], torch.tensor([[0.3, 0.75, 0.1, 0.25]]))
    assert code.count == 2 and code.allowed.sum(1).tolist() == [10, 3]
    action = torch.tensor([[0.3, 0.9, 1.0], [1.0, 0.0, -0.4], [0.0, 1.0, 0.1]])
    assert code.encode(action).tolist() == [[6, 2], [4, 0], [5, 1]]
    found = code.decode(code.encode(action))
    torch.testing.assert_close(found[:, :2], torch.tensor([[0.3, 0.75], [0.9, 0.25], [0.1, 0.75]]))
    assert found[:, 2].round().tolist() == [1, -1, 0]


@sabotaged_by(
    "foresight.nets.sequence.grounding.Pointer.forward", lambda f: lambda self, q, cells: f(self, q, 0 * cells)
)
def test_a_pointer_chooses_among_cells_and_tells_what_is_seen_there() -> None:
    pointer, generator = grounding.Pointer(6, 8, 16), torch.Generator().manual_seed(0)
    cells, query = torch.randn(3, 6, 8, generator=generator), torch.randn(3, 16, generator=generator)
    order = torch.randperm(6, generator=generator)
    torch.nn.init.zeros_(pointer.position)
    logits, there = pointer(query, cells)
    moved, same = pointer(query, cells[:, order])
    torch.testing.assert_close(moved, logits[:, order])  # the choice is a cell, wherever it is
    torch.testing.assert_close(same, there)
    assert (logits[:, order] - logits).abs().max() > 1e-2
    torch.nn.init.constant_(pointer.position[2], 99.0)
    with torch.no_grad():
        pointer.queries[0].weight.zero_()
        pointer.queries[0].bias.fill_(1.0)
    logits, there = pointer(query, cells)
    assert (logits.argmax(-1) == 2).all()
    torch.testing.assert_close(there, pointer.read(cells[:, 2]) + pointer.position[2])  # what is seen, and where


def test_a_policy_points_at_the_picture_that_it_sees() -> None:
    spaces = {"front": CAMERA, vla.MISSION: TEXT}
    net = network(gs.Dict(spaces), PLACE, head="point", edges=4)
    obs = {name: seen()[name] for name in spaces}
    output = net(obs)
    assert output.tokens.logits.shape == (2, 2, 16) and output.sample(torch.Generator().manual_seed(0)).shape == (2, 3)
    other = net({**obs, "front": obs["front"].flip(1)})
    assert (other.mean()[:, 0] - output.mean()[:, 0]).abs().max() > 1e-3
    hidden = {**obs, vla.CAMERA_MASK: torch.zeros(2, 1)}
    again = net({**hidden, "front": obs["front"].flip(1)})
    torch.testing.assert_close(again.mean(), net(hidden).mean())  # a missing camera: nothing of its pixels
    require_one_path(VLAActorCritic(net), obs)


def _sees_nothing(original):
    """Points, but nothing is seen there."""
    return lambda *args: (original(*args)[0], 0 * original(*args)[1])


@sabotaged_by("foresight.nets.sequence.grounding.Pointer.forward", _sees_nothing)
def test_the_words_point_first_and_the_action_depends_on_what_they_find() -> None:
    """Its tokens are in the order of the action's numbers."""
    spaces = {"front": CAMERA, vla.MISSION: TEXT}
    both = gs.Box(np.array([0, 0, 0, 0, -1], np.float32), np.ones(5, np.float32))
    net = network(gs.Dict(spaces), both, head="point", edges=4, points=2)
    obs = {name: seen()[name] for name in spaces}
    before = net(obs)
    assert before.sample(torch.Generator().manual_seed(0)).shape == (2, 5)
    assert before.tokens.logits.shape == (2, 3, 16) and net.features(obs).actions.shape == (2, 2, 16)
    torch.testing.assert_close(before.tokens.logits[:, 0], net.pointer(*_asked(net, obs), 0)[0])
    with torch.no_grad():  # look elsewhere
        net.pointer.queries[0].bias.mul_(-1).add_(1)
    after = net(obs)
    for token in range(3):
        assert (after.mean()[:, token] - before.mean()[:, token]).abs().max() > 1e-6


def _asked(net: VLA, obs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean word and the cells of the picture."""
    vectors, real = net.words(obs[vla.MISSION])
    vectors = net.words.placed(vectors, real)
    return vectors.sum(1) / real.sum(1, keepdim=True), net.features(obs).cells


@sabotaged_by("torch.nn.functional.logsigmoid", lambda f: lambda x: x)
@sabotaged_by(
    "foresight.nets.sequence.grounding.Finder.forward", lambda f: lambda self, i, w, s: f(self, i, w, s | True)
)
def test_what_is_found_fits_every_word() -> None:
    """Four patches: very red, a red ball, very much a ball, neither; the third word is padding."""
    finder, red, ball = grounding.Finder((2, 4, 4), 2, 2), torch.tensor([4.0, 0.0]), torch.tensor([0.0, 4.0])
    patches = torch.tensor([[9.0, -1.0], [1.0, 1.0], [-1.0, 9.0], [-1.0, -1.0]])
    finder.norms = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    with torch.no_grad():
        finder.key.weight.copy_(torch.eye(2)[..., None, None].expand(-1, -1, 2, 2))  # four pixels: times 4
        finder.query.weight.copy_(torch.eye(2))
        for zero in (finder.key.bias, finder.query.bias, finder.fits):
            zero.zero_()
        finder.position.copy_(torch.arange(10.0).view(5, 2))
    image = patches.T.view(1, 2, 2, 2).repeat_interleave(2, 2).repeat_interleave(2, 3)
    words, spoken = torch.stack([red, ball, -9 * red])[None], torch.tensor([[True, True, False]])
    logits, where = finder(image, words, spoken)
    scaled = [[float(word @ patch) for word in (red, ball)] for patch in patches]
    expected = [-sum(float(np.log1p(np.exp(-x))) for x in fits) for fits in scaled]
    torch.testing.assert_close(logits[0], torch.tensor([*expected, -4.0]))
    torch.testing.assert_close(where, finder.position[1:2], atol=0.2, rtol=0)
    _, where = finder(-abs(image), words, spoken)  # nothing fits
    torch.testing.assert_close(where, finder.position[4:], atol=0.2, rtol=0)
    with torch.no_grad():  # of two that fit, the nearer one
        finder.near[3] += 9
    logits, where = finder(torch.ones_like(image), words, spoken)
    torch.testing.assert_close(where, finder.position[3:4], atol=0.2, rtol=0)


@sabotaged_by("torch.Tensor.bincount", lambda f: lambda x, minlength: f(x, minlength=minlength).clamp(max=1))
def test_words_learn_what_they_name_from_whose_picture_it_is() -> None:
    """Cross-entropy over distinct instructions, the second of two pictures; actions teach nothing of it."""
    torch.manual_seed(0)
    finder, words = grounding.Finder((3, 4, 4), 2, 8), torch.randn(2, 3, 8)
    image, which = torch.rand(3, 3, 4, 4), torch.tensor([0, 1, 1])
    spoken = torch.tensor([[True, True, False], [True, True, True]])
    loss, every = finder.loss(image, words, spoken, which), torch.ones(3, dtype=torch.int64)
    scores = [finder(image, words[i * every], spoken[i * every])[0].logsumexp(-1) for i in range(2)]
    scores = torch.stack([scores[0], scores[1] + np.log(2)], 1)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(scores, which))
    finder(image, words[which], spoken[which])[1].sum().backward()
    assert finder.query.weight.grad is None and finder.key.weight.grad is None
    loss.backward()
    assert all(weight.grad.abs().max() > 0 for weight in (finder.query.weight, finder.key.weight))


def test_only_pictures_that_are_seen_teach_words() -> None:
    net, obs = network(find=True), seen()
    assert net.finder_loss(obs) > 0
    for other in (network(), network(find=True, blind="image"), network(find=True, blind="language")):
        assert other.finder_loss(obs) == 0
    masked = {name: torch.cat([x, x.flip(0)]) for name, x in obs.items()}
    masked[vla.CAMERA_MASK] = torch.tensor([[1, 1], [1, 1], [1, 1], [0, 1]])
    loss, masked["front"] = net.finder_loss(masked), masked["front"].index_fill(0, torch.tensor([3]), 7)
    torch.testing.assert_close(net.finder_loss(masked), loss)
    assert net.finder_loss({**obs, vla.CAMERA_MASK: torch.zeros(2, 2)}) == 0


def test_a_policy_acts_on_what_its_words_find() -> None:
    net, obs = network(action=gs.Discrete(7), find=True), seen()
    before = net(obs).mean()
    require_one_path(VLAActorCritic(net), obs)
    with torch.no_grad():
        net.finder.near[3] += 99  # it lies elsewhere
    assert (net(obs).mean() - before).abs().max() > 1e-3
    masked = {**obs, vla.CAMERA_MASK: torch.tensor([[0, 1], [0, 1]])}
    torch.testing.assert_close(net({**masked, "front": 255 - obs["front"]}).mean(), net(masked).mean())


def _rows(original):
    """The numbers of a chunk in another order."""
    return lambda self, action: original(self, action.flip(-2))


@sabotaged_by("foresight.nets.sequence.action_tokens.ActionTokens.flat", _rows)
def test_a_chunk_is_its_actions_and_their_numbers() -> None:
    """Its log-probability is the sum of its actions', each of which is the sum of its tokens'."""
    chunks = ActionTokens(gs.Box(-1, 1, (2, 3), np.float32), 9)
    assert chunks.count == 6
    action = torch.rand(4, 2, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
    tokens = chunks.encode(action)
    assert (chunks.decode(tokens) - action).abs().max() <= 1 / 8 + 1e-6
    output = Tokens(torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)), chunks)
    torch.testing.assert_close(output.action_logp(action)[:, 1], output.token_logp(action)[:, 3:].sum(-1))
    torch.testing.assert_close(output.action_logp(action).sum(-1), output.logp(action))
    assert output.sample(torch.Generator().manual_seed(0)).shape == (4, 2, 3)
    alone = Tokens(output.tokens.logits[:, :3], ActionTokens(ARM, 9))
    torch.testing.assert_close(alone.action_logp(action[:, 0]), alone.logp(action[:, 0]))


@sabotaged_by("foresight.nets.imitation.MeanStd.encode", lambda f: lambda self, values: values)
def test_vectors_are_normalized_over_the_data() -> None:
    """Of any unit: numbers and data a thousand times as large give the same features."""
    net = network(gs.Dict({"arm": gs.Box(-9, 9, (2,), np.float32), vla.MISSION: TEXT}))
    data = torch.rand(20, 2, generator=torch.Generator().manual_seed(0))
    said, action = text("take it").expand(20, -1), torch.rand(20, 3)
    found = []
    for unit in (1.0, 1_000.0):
        net.fit({"arm": unit * data, vla.MISSION: said}, action)
        found.append(net.features({"arm": unit * data, vla.MISSION: said})[0])
    torch.testing.assert_close(*found)
