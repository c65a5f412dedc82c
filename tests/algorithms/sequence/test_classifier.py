"""The classifier: what it learns on digits, compared with guessing and with itself without positions; its images."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from foresight.algorithms.sequence import classifier
from foresight.envs.images.make import Images, make
from foresight.errors import UserError
from foresight.runtime.evaluation import evaluate
from tests.sabotage import begins_anew, change, sabotaged_by

HERE = "foresight.algorithms.sequence.classifier"
SMALL = {"dim": 16, "layers": 1, "heads": 2, "batch_size": 32, "lr_warmup": 5, "dropout": 0.0}


def halves(count: int = 64) -> Images:
    """Images whose class is which half is bright: only positions tell."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(0, 2, (2 * count,), generator=generator)
    images = torch.randint(0, 60, (2 * count, 1, 8, 8), generator=generator, dtype=torch.uint8)
    for image, right in zip(images, label.tolist(), strict=True):
        image[..., 4 * right : 4 * right + 4] += 150
    return Images("halves", images[:count], label[:count], images[count:], label[count:], ("left", "right"))


def stripes(count: int = 64) -> Images:
    """Images whose class is the direction of stripes: only the places of pixels relative to each other tell."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(0, 2, (2 * count,), generator=generator)
    images = torch.randint(0, 60, (2 * count, 1, 8, 8), generator=generator, dtype=torch.uint8)
    images[..., ::2] += 150
    images = torch.where(label.view(-1, 1, 1, 1) > 0, images, images.mT)
    return Images("stripes", images[:count], label[:count], images[count:], label[count:], ("across", "up"))


def trained(config: classifier.Config, env: Images, state: classifier.State | None = None) -> classifier.State:
    state = classifier.build(config, env.spaces) if state is None else state
    *_, (_, _, last) = classifier.train(config, env, state)
    return last


def accuracy(config: classifier.Config, env: Images) -> float:
    return evaluate.evaluate(classifier, trained(config, env), env).mean


@pytest.mark.learning
@pytest.mark.parametrize("images", classifier.NETWORKS)
@sabotaged_by(f"{HERE}.update", change("labels", lambda y: 1 - y))
def test_it_learns_what_only_positions_tell(images: str) -> None:
    env = halves() if images == "vit" else stripes()
    guess = evaluate.baseline(classifier, classifier.build(classifier.Config(**SMALL), env.spaces), env).mean
    config = classifier.Config(
        steps=40, images=images, patch=2 if images == "vit" else 1, depths=(1, 1), stage_heads=(2, 2), shift=0,
        learning_rate=5e-3, **SMALL,
    )  # fmt: skip
    assert guess < 0.7 and accuracy(config, env) > 0.95


@pytest.mark.learning
def test_without_positions_the_order_of_patches_is_unknown() -> None:
    """With both halves equally bright in sum, an orderless ViT can only guess."""
    env = halves()
    config = classifier.Config(steps=40, positions=False, shift=0, learning_rate=5e-3, **SMALL)
    assert accuracy(config, env) < 0.8


@sabotaged_by(f"{HERE}.train", begins_anew)
def test_a_stopped_run_resumes_exactly() -> None:
    env = halves()
    config = classifier.Config(**{**SMALL, "steps": 60, "dropout": 0.1})
    whole, stopped = trained(config, env), None
    for step, _, now in classifier.train(config, env):
        if step == 20:
            stopped = copy.deepcopy(now)
            break
    resumed = trained(config, env, stopped)
    assert resumed.step == 60
    for ours, theirs in zip(resumed.network.parameters(), whole.network.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def unmoved(original):
    return lambda images, most, generator: images


def torn(original):
    """Rows and columns are exchanged."""
    return lambda images, most, generator: original(images, most, generator).mT


@sabotaged_by(f"{HERE}.shifted", unmoved, torn)
def test_images_move_and_zeros_fill_the_gap() -> None:
    image = torch.arange(1, 13, dtype=torch.uint8).view(1, 1, 3, 4)
    found = classifier.shifted(image.expand(400, -1, -1, -1), 1, torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(image, (1, 1, 1, 1))
    expected = {tuple(padded[0, 0, y : y + 3, x : x + 4].flatten().tolist()) for y in range(3) for x in range(3)}
    assert {tuple(one.flatten().tolist()) for one in found} == expected
    assert torch.equal(classifier.shifted(image, 0, torch.Generator()), image)


def digits() -> Images:
    return make("digits")


def test_digits_are_split_once_and_for_all() -> None:
    pytest.importorskip("sklearn")
    env = digits()
    assert env.train.shape == (1438, 1, 8, 8) and env.test.shape == (359, 1, 8, 8) and env.train.max() == 255
    assert torch.equal(env.test, digits().test) and not torch.equal(env.test, make("digits", split=1).test)
    rows: Tensor = torch.cat([env.train, env.test]).flatten(1)
    assert len(rows) == 1797 and env.spaces.action.n == 10
    assert torch.cat([env.train_label, env.test_label]).bincount().tolist() == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]
    for wrong in (0.0, 1.0):
        with pytest.raises(UserError, match="held_out must be a share"):
            make("digits", held_out=wrong)
    with pytest.raises(UserError, match="Unknown set of images"):
        make("letters")


def test_mistakes_are_named() -> None:
    env = halves()
    with pytest.raises(UserError, match="Unknown image network 'nature'"):
        classifier.build(classifier.Config(images="nature"), env.spaces)
    for depths in ((), (-1, 2)):
        with pytest.raises(UserError, match="depths must be at least 1 each"):
            classifier.build(classifier.Config(images="swin", depths=depths), env.spaces)
    with pytest.raises(UserError, match="window must be at least 1"):
        classifier.build(classifier.Config(images="swin", window=0), env.spaces)
    with pytest.raises(UserError, match="patch must be from 1 to 8"):
        classifier.build(classifier.Config(patch=9), env.spaces)
