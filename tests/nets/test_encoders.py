"""Which network a space gets, and what the image encoders promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.errors import UserError
from foresight.nets import conv, encoders
from foresight.nets.actor_critic import ActorCritic, SharedTrunk, VectorizedMLP
from foresight.nets.conv import Impala, Nature, Nips
from foresight.nets.heads import ScalarHead
from foresight.nets.stacked_mlp import StackedMLP
from tests.sabotage import change, sabotaged_by, scaled

PIXELS = gs.Box(0, 255, (3, 40, 44), np.uint8)


@pytest.mark.parametrize("network", [Nature, Nips, Impala])
def test_image_encoders(network):
    module = network((3, 40, 44), size=7)
    images = torch.randint(0, 256, (5, 2, 3, 40, 44), dtype=torch.uint8)
    features = module(images)
    assert features.shape == (5, 2, 7) and module.size == 7
    torch.testing.assert_close(features, module(images.float() / 255))  # bytes are scaled to [0, 1]
    torch.testing.assert_close(features[3, 1], module(images[3, 1]), rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert (module(images).float() - features).abs().max() < 0.05 * features.abs().max()


@sabotaged_by("foresight.ops.fused.images.pixels", scaled(1.01))
def test_bytes_become_what_torch_makes_of_them():
    images = torch.randint(0, 256, (5, 4, 40, 44), dtype=torch.uint8)
    for given in (images, images.transpose(2, 3), images[::2]):
        expected = given.to(torch.float32, memory_format=torch.channels_last).div(255)
        found = conv._pixels(given)
        assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_nature_has_the_size_of_the_paper():
    assert sum(p.numel() for p in Nature((4, 84, 84)).parameters()) == 1_684_128  # 8224 + 32832 + 36928 + 1606144
    assert sum(p.numel() for p in Nips((4, 84, 84)).parameters()) == 676_144  # 4112 + 8224 + 663808


def test_images_that_are_too_small_are_refused():
    with pytest.raises(UserError, match="at least 36x36"):
        Nature((3, 20, 20))
    with pytest.raises(UserError, match="image encoder 'resnet'"):
        encoders.encoder(PIXELS, (8,), images="resnet")


@sabotaged_by("foresight.nets.conv.Planes.forward", change("obs", lambda x: x.roll(1, -2)))
@pytest.mark.parametrize("network", ["nature", "nips", "impala", "vit", "swin"])
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((40, 40, 3), "hwc"),
        ((2, 40, 40, 3), "khwc"),
        ((2, 3, 40, 40), "kchw"),
        ((40, 40), "hw"),
        ((2, 40, 40, 1), "khwc"),
    ],
)
def test_pictures_in_any_order_are_read_alike(network, shape, order):
    """The same network over what was brought to [C, H, W] by hand."""
    space = gs.Box(0, 255, shape, np.uint8)
    module = encoders.encoder(space, (8,), images=network)
    images = torch.randint(0, 256, (2, 5, *shape), dtype=torch.uint8)
    by_hand = {"hwc": "bthwc->btchw", "khwc": "btkhwc->btkchw", "kchw": "btkchw->btkchw", "hw": "bthw->bthw"}[order]
    planes = torch.einsum(by_hand, images.float()).reshape(2, 5, -1, 40, 40)
    assert encoders.is_image(space) and module.encoder(planes[0]).shape == (5, module.size)
    torch.testing.assert_close(module(images), module.encoder(planes / 255))
    torch.testing.assert_close(module(images[1, 2]), module(images)[1, 2], rtol=1e-4, atol=1e-5)


def test_what_is_no_picture_stays_none():
    for shape in [(7, 7, 3), (25, 25, 3), (2, 7, 7, 3), (8, 8), (4,), (2, 3, 8, 8), (2, 2, 40, 40, 3)]:
        assert not encoders.is_image(gs.Box(0, 255, shape, np.uint8)), shape
    for shape in [(3, 84, 84), (4, 84, 84), (7, 9, 9), (12, 84, 84)]:  # these are in order already
        assert conv.order(shape) == (0, 1, 2)
    assert conv.order((96, 96, 3)) == (2, 0, 1) and conv.order((10, 10, 4)) == (2, 0, 1)


CASES = [
    (gs.Box(-1, 1, (5,), np.float32), torch.zeros(2, 5), 5),
    (gs.Box(-1, 1, (), np.float32), torch.zeros(2), 1),
    (gs.Box(-1, 1, (2, 3), np.float32), torch.zeros(2, 2, 3), 6),
    (gs.Box(0, 255, (4,), np.uint8), torch.full((2, 4), 255, dtype=torch.uint8), 4),
    (gs.Discrete(6), torch.tensor([0, 5]), 6),
    (gs.MultiDiscrete([2, 3]), torch.tensor([[1, 2], [0, 0]]), 5),
    (gs.MultiBinary(4), torch.ones(2, 4, dtype=torch.int8), 4),
]


@pytest.mark.parametrize(("space", "obs", "size"), CASES)
def test_vectors_of_every_space(space, obs, size):
    vector = encoders.vectorizer(space)
    assert vector.size == size and vector(obs).shape == (2, size) and vector(obs).dtype == torch.float32
    assert vector(obs).abs().max() <= 1
    assert encoders.encoder(space, (8,))(obs).shape == (2, 8)


@sabotaged_by("foresight.nets.encoders.Symbols.forward", change("x", lambda x: x.flip(-1)))
def test_a_grid_of_symbols_becomes_one_hot():
    """MiniGrid's (object, color, state): a gray wall (2, 5, 0) in one corner, the unseen (0, 0, 0) elsewhere."""
    space = gs.Box(0, 255, (7, 7, 3), np.uint8)
    grid = torch.zeros(2, 5, 7, 7, 3, dtype=torch.uint8)
    grid[..., 0, 0, :] = torch.tensor([2, 5, 0], dtype=torch.uint8)
    network = encoders.vectorizer(gs.Dict({"image": space, "direction": gs.Discrete(4)}))
    vector = network({"image": grid, "direction": torch.ones(2, 5, dtype=torch.int64)})
    assert vector.shape == (2, 5, 4 + 49 * 21) and network.size == 4 + 49 * 21
    assert vector.sum(-1).eq(1 + 3 * 49).all()
    assert vector[0, 0, 4:25].nonzero().squeeze(-1).tolist() == [2, 11 + 5, 11 + 6 + 0]
    assert vector[0, 0, 25:46].nonzero().squeeze(-1).tolist() == [0, 11, 17]
    assert encoders.is_symbolic(space) and not encoders.is_image(space)
    assert encoders.is_image(gs.Box(0, 255, (3, 84, 84), np.uint8))
    assert not encoders.is_symbolic(gs.Box(0, 255, (64, 64, 3), np.uint8))


def test_a_small_picture_is_not_read_as_symbols():
    """Colors are far above MiniGrid's codes; some codes more, of objects of one's own, are zeros."""
    space = gs.Box(0, 255, (20, 20, 3), np.uint8)
    network, colors = encoders.encoder(space, (8,)), torch.full((2, 20, 20, 3), 200, dtype=torch.uint8)
    network(torch.zeros_like(colors))  # a black one tells nothing
    with pytest.raises(UserError, match=r"20 x 20 x 3 bytes .* MiniGrid's symbols, .* 200, .*image_size=40"):
        network(colors)
    with pytest.raises(UserError, match="symbols"):
        network(colors)
    own = encoders.encoder(space, (8,))
    assert own(torch.full((1, 20, 20, 3), 12, dtype=torch.uint8)).shape == (1, 8)
    assert own(colors).shape == (2, 8)  # only the first is looked at


def test_integers_become_one_hot():
    assert encoders.vectorizer(gs.Discrete(3))(torch.tensor([2])).tolist() == [[0, 0, 1]]
    assert encoders.vectorizer(gs.MultiDiscrete([2, 3]))(torch.tensor([[1, 0]])).tolist() == [[0, 1, 1, 0, 0]]
    grid = encoders.vectorizer(gs.MultiDiscrete([[2, 2], [3, 3]]))
    seen = torch.tensor([[[0, 1], [2, 0]], [[1, 0], [1, 2]], [[0, 0], [0, 0]], [[1, 1], [2, 2]]])
    assert grid(seen).shape == (4, 10) and grid(seen.unsqueeze(1)).shape == (4, 1, 10)
    assert grid(seen)[0].tolist() == [1, 0, 0, 1, 0, 0, 1, 1, 0, 0]


def test_integers_that_do_not_start_at_0_become_one_hot():
    assert encoders.vectorizer(gs.Discrete(3, start=-1))(torch.tensor([-1, 1])).tolist() == [[1, 0, 0], [0, 0, 1]]
    space = gs.MultiDiscrete([2, 3], start=[1, -2])
    assert encoders.vectorizer(space)(torch.tensor([[2, -2]])).tolist() == [[0, 1, 1, 0, 0]]


def test_a_dict_becomes_one_vector_without_its_mask():
    space = gs.Dict({"b": gs.Discrete(2), "a": gs.Box(0, 1, (2,)), "action_mask": gs.MultiBinary(3)})
    obs = {"a": torch.tensor([[0.5, 0.25]]), "b": torch.tensor([1]), "action_mask": torch.ones(1, 3)}
    assert encoders.vectorizer(space)(obs).tolist() == [[0.5, 0.25, 0, 1]]
    assert encoders.mask_key(space) == "action_mask" and encoders.mask_key(gs.Discrete(2)) is None


def _policy_and_value_are_the_same_alone_and_together(space, kind):
    head = encoders.policy_head(gs.Discrete(2))
    body = encoders.actor_critic_body(space, (head.width, 1), (1.0, 1.0), (8,))
    assert isinstance(body, kind)
    network = ActorCritic(body, head, ScalarHead())
    obs = torch.from_numpy(np.stack([space.sample() for _ in range(70)]))
    policy, value = network(obs)
    torch.testing.assert_close(network.policy(obs).logits, policy.logits)
    torch.testing.assert_close(network.value(obs).value, value.value)
    assert value.value.shape == (70,) and policy.logits.abs().sum() > 0


@sabotaged_by("foresight.nets.stacked_mlp.StackedMLP.single", scaled(2.0))
@pytest.mark.parametrize(("space", "kind"), [(gs.Discrete(3), VectorizedMLP), (CASES[0][0], StackedMLP)])
def test_two_trunks(space, kind):
    _policy_and_value_are_the_same_alone_and_together(space, kind)


@sabotaged_by("foresight.nets.actor_critic.SharedTrunk.single", scaled(2.0))
def test_a_shared_trunk():
    _policy_and_value_are_the_same_alone_and_together(PIXELS, SharedTrunk)


def test_spaces_without_a_policy_or_a_normalizer_are_named():
    with pytest.raises(UserError, match="Unsupported action space Text"):
        encoders.policy_head(gs.Text(3))
    with pytest.raises(UserError, match="normalize_obs"):
        encoders.normalizer(gs.Discrete(3))
    assert [encoders.policy_head(s).width for s in (gs.MultiDiscrete([2, 3]), gs.MultiBinary(3), CASES[0][0])] == [
        5,
        6,
        5,
    ]


def test_a_number_after_vit_and_swin_is_the_side_of_a_patch():
    assert encoders.image_encoder(PIXELS, "vit:20").position.shape[1] == 1 + 2 * 3
    assert encoders.image_encoder(PIXELS, "swin:10").grid == (4, 5)
    assert encoders.image_encoder(PIXELS, "vit").position.shape[1] == 1 + 7 * 8
    for wrong in ("nature:8", "vit:", "vit:x"):
        with pytest.raises(UserError, match="as in vit:16"):
            encoders.image_encoder(PIXELS, wrong)
