"""Attention of texts, runs and images: what is read, and that knocking out what a picture shows changes the output."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foresight.algorithms.imitation import diffusion_policy, vla
from foresight.algorithms.policy import ppo
from foresight.algorithms.sequence import classifier, decision_transformer, trajectory_transformer
from foresight.algorithms.world import storm
from foresight.envs.base import Spaces
from foresight.envs.make import make
from foresight.errors import UserError
from foresight.nets.sequence.attention import KnockOut
from foresight.nets.sequence.swin import Swin
from foresight.nets.sequence.vit import ViT
from foresight.runtime.attention import draw, sources
from foresight.runtime.attention.maps import Maps
from tests import tiny_language
from tests.algorithms.imitation.scenes import FIELDS, Pointing, Touching
from tests.nets.sequence import test_vla as networks
from tests.sabotage import change, sabotaged_by


def agent(module: Any, env_name: str, config: Any, env: Any = None, **options: Any) -> Any:
    """What `of_run` reads of an `Agent`, without a run directory."""
    env = make(env_name, num_envs=1, **options) if env is None else env
    state = module.build(config, env.spaces)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for field in vars(state).values():
            if isinstance(field, torch.nn.Module):
                for parameter in field.parameters():
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    settings = SimpleNamespace(algorithm=module.__name__, env=env_name)
    return SimpleNamespace(path="runs/x", settings=settings, module=module, state=state, env=env)


STORM = {
    "context": 4, "width": 16, "sequence_layers": 2, "heads": 2, "groups": 4, "classes": 4, "units": 16, "layers": 1,
    "depth": 1,
}  # fmt: skip
DT = decision_transformer.Config(dim=16, context=4, layers=2, heads=2, target_return=9.0)
VLA = vla.Config(**{**FIELDS, "layers": 2})
DIFFUSION = diffusion_policy.Config(
    denoiser="transformer", dim=16, layers=2, heads=2, horizon=8, action_steps=4, diffusion_steps=4, denoising_steps=2
)
TT = trajectory_transformer.Config(
    window=4, context=2, horizon=2, dim=16, layers=1, heads=2, beam_width=2, branches=1, bins=8
)
RUNS: dict[str, tuple[Callable[[], Any], int, int]] = {  # agent, tokens, layers
    "gtrxl": (lambda: agent(ppo, "RepeatFirst-v0", ppo.Config(memory="gtrxl", memory_layers=2)), 6, 2),
    "transformer": (lambda: agent(ppo, "RepeatFirst-v0", ppo.Config(memory="transformer", memory_window=8)), 6, 1),
    "decision_transformer": (lambda: agent(decision_transformer, "CartPole-v1", DT), 12, 2),
    "vla": (lambda: agent(vla, "Pointing", VLA, Pointing(1)), 8, 2),
    "vla_vit": (lambda: agent(vla, "Pointing", dataclasses.replace(VLA, images="vit"), Pointing(1)), 8, 2),
    "vla_flow": (lambda: agent(vla, "Touching", dataclasses.replace(VLA, head="flow"), Touching(1)), 7, 2),
    "diffusion_policy": (lambda: agent(diffusion_policy, "Pendulum-v1", DIFFUSION), 11, 2),
    "trajectory_transformer": (lambda: agent(trajectory_transformer, "Pendulum-v1", TT), 13, 1),
    "storm": (lambda: agent(storm, "CartPole-v1", storm.Config(**STORM)), 4, 2),
}


@pytest.mark.parametrize("name", RUNS)
@sabotaged_by("foresight.nets.sequence.attention.recorded", change("knock_outs", lambda x: ()))
def test_a_run_shows_its_window_and_depends_on_what_it_shows(name: str) -> None:
    made, tokens, layers = RUNS[name]
    maps = sources.of_run(made(), steps=6)
    assert len(maps.tokens) == tokens and len(maps.weights) == layers
    for layer in maps.weights:
        assert layer.shape[-1] == tokens
        torch.testing.assert_close(layer.sum(-1), torch.ones(layer.shape[:-1]), msg=lambda text: f"{name}: {text}")
        if name.startswith("vla"):  # actions see everything else and themselves, and nothing sees them
            actions = [i for i, token in enumerate(maps.tokens) if token.startswith("action")]
            assert not (layer * (1 - torch.eye(tokens)))[..., actions].any()
        else:
            assert not layer.triu(1).any()
    query = layers and maps.weights[-1].shape[-2] - 1
    if name == "decision_transformer":
        query = tokens - 2  # actions are predicted at observations
        assert maps.tokens[-3:] == ("return 5", "obs 5", "action 5")
    if name.startswith("vla"):
        assert maps.tokens[:4] == ("image 0", "image 1", "image 2", "image 3") and "point" in maps.tokens
        assert maps.tokens[-2:] == (("away", "begin") if name == "vla_flow" else ("begin", "action 0"))
    if name == "diffusion_policy":
        assert maps.tokens[:4] == ("level", "obs t-1", "obs t", "action 0")
    if name == "trajectory_transformer":  # its context of two steps, and the observation of now
        step = ("obs0", "obs1", "obs2", "action", "reward")
        every = [f"{x} {t}" for t in ("t-2", "t-1", "t") for x in step]
        assert maps.tokens == tuple(every[:13])
    strongest = int(maps.view("mean")[-1][query].argmax())
    effect = maps.effect([KnockOut(layers - 1, None, query, strongest)])
    assert effect["change"] > 1e-5
    assert maps.effect([])["change"] < 1e-6
    if name == "decision_transformer":
        assert {what for what, _ in effect["before"]} == {"action 0", "action 1"}
        # What follows the last observation is invisible to it.
        assert maps.effect([KnockOut(layers - 1, None, tokens - 1, 0)])["change"] < 1e-6


@sabotaged_by("foresight.runtime.attention.sources._only", lambda f: lambda found, keys, names: found)
def test_a_vla_shows_the_tokens_that_it_sees() -> None:
    net, obs = networks.network(find=True), {**networks.seen(1), "camera_mask": torch.tensor([[1, 0]])}
    maps = sources.of_vla(net, obs)
    assert maps.tokens == (
        "front 0", "front 1", "front 2", "found", "go", "to", "the", "red", "ball", "begin", "action 0", "action 1",
        "action 2",
    )  # fmt: skip
    logits = net(obs).tokens.logits[0].detach()
    torch.testing.assert_close(maps.output[-3:], logits)
    best = maps.likeliest(maps.output[-2], 1)[0]
    assert best == (f"bin {int(logits[1].argmax())}", pytest.approx(float(logits[1].softmax(-1).max())))
    for layer in maps.weights:
        torch.testing.assert_close(layer.sum(-1), torch.ones(layer.shape[:-1]))
    # Knock-outs count the tokens that are shown: 7 is "red", and 9 is "begin", whose last layer no action reads.
    assert maps.effect([KnockOut(1, None, 12, 7)])["change"] > 1e-5 > maps.effect([KnockOut(1, None, 9, 7)])["change"]


def test_ppo_shows_the_vla_that_it_fine_tunes(tmp_path: Path) -> None:
    state = vla.build(VLA, Pointing.spaces)
    vla.export(state, tmp_path)
    made = agent(ppo, "Pointing", ppo.Config(policy=str(tmp_path)), Pointing(1))
    maps = sources.of_run(made)
    assert len(maps.tokens) == 8 and maps.tokens[-1] == "action 0"
    obs = made.env.reset(0)
    torch.testing.assert_close(maps.output[-1:], made.state.network.vla(obs).tokens.logits[0])


@sabotaged_by("foresight.runtime.attention.sources._attentive", lambda f: lambda *args: f(*args)[:1])
def test_the_network_that_acts_is_shown() -> None:
    """Of a diffusion policy, the average of the weights."""
    made = RUNS["diffusion_policy"][0]()
    for parameter in made.state.policy.parameters():
        torch.nn.init.zeros_(parameter)
    try:
        maps = sources.of_run(made, steps=1)
    except UserError as error:
        raise AssertionError(error) from error
    assert maps.weights[0][:, -1].std() > 1e-3  # zeros attend evenly


def test_the_image_is_shown_instead_of_time() -> None:
    """PPO with --images vit and a memory has both."""
    env, spaces = Pointing(1), Spaces(Pointing.spaces.obs["image"], Pointing.spaces.action)
    seen = env.reset(0)["image"]
    feedback = SimpleNamespace(obs=seen, reward=torch.zeros(1), cut=torch.ones(1))
    plain = SimpleNamespace(spaces=spaces, reset=lambda seed: seen, step=lambda action: feedback)
    made = agent(ppo, "Pointing", ppo.Config(images="vit:16", memory="gtrxl", memory_layers=1), plain)
    assert sources.of_run(made).tokens == ("t=0",)
    maps = sources.of_run(made, images=True)
    assert maps.tokens == ("class", "0,0", "0,1", "1,0", "1,1") and len(maps.weights) == 4
    assert torch.equal(maps.image, seen[0].permute(2, 0, 1))
    alone = sources.of_run(agent(ppo, "Pointing", ppo.Config(images="vit:16"), plain), images=True)
    of_vla = sources.of_run(RUNS["vla_vit"][0](), images=True)
    assert of_vla.tokens == maps.tokens and len(of_vla.weights) == 2
    assert alone.tokens == maps.tokens and alone.effect([KnockOut(3, None, 0, 1)])["change"] > 1e-6


def test_a_run_without_attention_is_refused() -> None:
    with pytest.raises(UserError, match="no attention"):
        sources.of_run(agent(ppo, "CartPole-v1", ppo.Config()))
    with pytest.raises(UserError, match="at least 1, not 0"):
        sources.of_run(RUNS["gtrxl"][0](), steps=0)


def test_a_classifier_shows_a_held_out_image() -> None:
    pytest.importorskip("sklearn")
    env = make("digits", "images")
    settings = SimpleNamespace(algorithm="classifier", env="digits")
    for config in (classifier.Config(dim=16, layers=2), classifier.Config(images="swin", dim=8)):
        state = classifier.build(config, env.spaces)
        torch.nn.init.normal_(state.network.head.weight)
        agent = SimpleNamespace(path="runs/x", settings=settings, module=classifier, state=state, env=env)
        maps = sources.of_run(agent, seed=3)
        assert torch.equal(maps.image, env.test[3]) and f"image 3: {env.test_label[3]}" in maps.title
        before = maps.effect([KnockOut(1)])["before"]
        logits = classifier.act(state, env.test[3:4])[1]["logits"][0]
        assert before[0][0] == str(int(logits.argmax()))
        with pytest.raises(UserError, match="no held-out image 359"):
            sources.of_run(agent, seed=359)


def text(words: str = "what is 2+3? what is") -> Maps:
    return sources.of_text(tiny_language.model(), words)


def test_a_text_is_read_and_each_head_is_measured() -> None:
    maps = text()
    assert "".join(maps.tokens) == "what is 2+3? what is" and maps.probabilities
    assert [tuple(layer.shape) for layer in maps.weights] == [(4, 20, 20)] * 2
    each = maps.each_head()
    assert len(each) == 2 and all(len(row) == 4 and min(row) > 0 for row in each)
    one = maps.effect([maps.knock_out("1.2")])
    assert one["change"] == pytest.approx(each[1][2]) and one["loss_before"] != one["loss_after"]
    ids = [maps.names(i) for i in range(44)]
    expected = [-maps.output[t].log_softmax(-1)[ids.index(c)] for t, c in enumerate(maps.tokens[1:])]
    assert one["loss_before"] == pytest.approx(float(sum(expected) / len(expected)), rel=1e-5)
    for words in ("", "a" * 65):
        with pytest.raises(UserError, match="1 to 64"):
            text(words)


def test_views_reduce_heads_and_knock_outs_are_read() -> None:
    maps = text()
    torch.testing.assert_close(maps.view("mean")[1], maps.weights[1].mean(0))
    torch.testing.assert_close(maps.view("2")[0], maps.weights[0][2])
    assert (maps.view("max")[0] >= maps.view("mean")[0]).all()
    torch.testing.assert_close(maps.view("rollout")[1].sum(-1), torch.ones(20))
    assert maps.view("received")[0].shape == (1, 20)
    assert not maps.view("mean", without_first=True)[0][:, 0].any()
    assert maps.knock_out("1") == KnockOut(1)
    assert maps.knock_out("1.3:-1,4") == KnockOut(1, 3, 19, 4)
    assert maps.knock_out("0.0:,2") == KnockOut(0, 0, None, 2)
    for wrong, why in (("x", "Cannot read"), ("2", "no layer 2"), ("0.4", "no head 4"), ("0:20", "no query 20")):
        with pytest.raises(UserError, match=why):
            maps.knock_out(wrong)
    with pytest.raises(UserError, match="Unknown view 'min'"):
        maps.view("min")
    with pytest.raises(UserError, match="no head 4"):
        maps.view(4)


@pytest.mark.parametrize("net", [ViT((3, 8, 16), patch=2, dim=16, layers=2), Swin((3, 8, 16), patch=1, dim=8)])
def test_an_image_is_covered_by_its_patches(net: Any, tmp_path: Path) -> None:
    maps = sources.of_image(net.eval(), torch.randint(0, 256, (3, 8, 16), dtype=torch.uint8))
    heats = draw.over_image(maps)
    assert [tuple(heat.shape) for heat in heats] == list(maps.grids)
    for layer in maps.weights:
        torch.testing.assert_close(layer.sum(-1), torch.ones(layer.shape[:-1]))
    effect = maps.effect([KnockOut(0, 1)])
    assert effect["change"] > 1e-6 and maps.effect([KnockOut(0, 1)], query=5) == effect  # one output for all patches
    with pytest.raises(UserError, match=f"no query {len(maps.tokens)}"):
        maps.each_head(len(maps.tokens))
    draw.save(maps, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_a_window_of_swin_sees_only_itself() -> None:
    """Patches 0 and 4 of 8 columns are in different windows of 4, until windows are shifted."""
    maps = sources.of_image(Swin((1, 8, 8), patch=1, dim=8).eval(), torch.rand(1, 8, 8))
    first, shifted = maps.view("mean")[:2]
    assert first[0, 3] > 0 and first[0, 4] == 0
    assert shifted[3, 4] > 0 and shifted[1, 2] == 0


def test_pages_and_pictures_hold_what_was_read(tmp_path: Path) -> None:
    maps = text("2+3</script>".replace("<", "?").replace("/", "?").replace(">", "?"))
    effects = [("1.2", maps.effect([KnockOut(1, 2)]))]
    for name in ("a.svg", "a.html", "a.json"):
        draw.save(maps, tmp_path / name, query=3, effects=effects, heads=maps.each_head())
    page = (tmp_path / "a.html").read_text()
    assert "http://" not in page and "https://" not in page and "src=" not in page
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["tokens"] == list(maps.tokens) and data["query"] == 3
    assert data["weights"][1][2] == (maps.weights[1][2] * 1000).round().int().flatten().tolist()
    size = len(maps.tokens)  # a key is seen by its own query and those after it, however small the weight
    assert data["seen"] == [list(range(size, 0, -1))] * 2
    assert data["knock_outs"][0]["links"] == "1.2" and len(data["each_head"]) == 2
    written = json.loads((tmp_path / "a.json").read_text())
    torch.testing.assert_close(torch.tensor(written["heads"][0]), maps.weights[0], rtol=0, atol=1e-5)
    assert (tmp_path / "a.svg").read_text().count("<path") > 20
    with pytest.raises(UserError, match="must end in"):
        draw.save(maps, tmp_path / "a.gif")
