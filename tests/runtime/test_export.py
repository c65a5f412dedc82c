"""An exported policy gives the outputs of the policy: for vectors, dicts, pixels of symbols and memories."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces as gs
from gymnasium.vector.utils import batch_space

from foresight.algorithms.imitation import act as chunks
from foresight.algorithms.policy import ppo
from foresight.algorithms.world import dreamer
from foresight.envs.base import Spaces
from foresight.errors import UserError
from foresight.runtime import export as exporting
from foresight.runtime import run
from foresight.runtime.config import resolve
from tests.sabotage import sabotaged_by

KINDS = {
    "towers": {"env": "CartPole-v1", "normalize_obs": True},
    "continuous": {"env": "Pendulum-v1"},
    "gru": {"env": "TMazePassive-v0", "memory": "gru"},
    "lstm": {"env": "CartPole-v1", "memory": "lstm", "backbone": "separate"},
    "gtrxl": {"env": "RepeatFirst-v0", "memory": "gtrxl", "memory_window": 5},
    "transformer": {"env": "TMazePassive-v0", "memory": "transformer", "memory_window": 5, "memory_layers": 2},
}
SMALL = {
    "steps": 64,
    "num_envs": 4,
    "rollout_steps": 8,
    "minibatches": 2,
    "hidden": (8,),
    "memory_size": 8,
    "memory_heads": 2,
}


def _trained(path: Path, env: str, **fields) -> Path:
    run.train("ppo", env=env, out=path, show=False, evaluation_episodes=1, config=ppo.Config(**{**SMALL, **fields}))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A run of that kind, which is trained once: tests export it to folders of their own."""

    @functools.cache
    def train(kind: str, **fields: Any) -> Path:
        return _trained(tmp_path_factory.mktemp(kind) / "run", **KINDS[kind], **fields)

    return train


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return x * 0 if x.is_floating_point() else x


def _agrees(path: Path, call) -> None:
    """Eleven steps of five environments, compared with the agent, with a memory that some environments reset."""
    agent = run.load(path, device="cpu")
    _, inputs, names = exporting.prepare(agent)
    seen = len(exporting.leaves(agent.batch(exporting._example(agent.spaces.obs))[0]))
    carry = [torch.zeros(5, *x.shape[1:], dtype=x.dtype) for x in inputs[seen:]]
    held = None
    for step in range(11):
        batched = batch_space(agent.spaces.obs, 5)
        batched.seed(step)
        obs, _ = agent.batch(batched.sample())
        expected, _, held = agent.module.act(agent.state, obs, held)
        action, *carry = call([*exporting.leaves(obs), *carry])
        torch.testing.assert_close(action, expected, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(carry, exporting.leaves(held), strict=True):
            torch.testing.assert_close(mine, theirs.clone(), rtol=1e-4, atol=1e-5)
        over = torch.tensor([step == 4, False, step == 7, False, True])
        carry = [x.masked_fill(over.view(-1, *[1] * (x.dim() - 1)), 0) for x in carry]
        if held is not None:
            held = agent.module.reset_carry(held, over.float())
    assert names["inputs"][0].startswith("obs") and names["outputs"][0] == "action"
    agent.close()


@sabotaged_by("foresight.runtime.export.Exported.forward", lambda f: lambda self, *t: f(self, *map(_zeros, t)))
@pytest.mark.parametrize("kind", KINDS)
def test_torchscript_gives_the_same_outputs(kind: str, trained: Callable[..., Path], tmp_path: Path):
    path = trained(kind)
    file = exporting.export(path, out=tmp_path / "policy.pt")
    extra = {"policy.json": ""}
    loaded = torch.jit.load(file, _extra_files=extra)
    assert json.loads(extra["policy.json"])["outputs"][0] == "action"
    _agrees(path, lambda tensors: loaded(*tensors))


@sabotaged_by("foresight.runtime.export.Exported.requires_grad_", lambda f: lambda self, on: self)
def test_a_file_only_acts(trained: Callable[..., Path], tmp_path: Path):
    """With gradients a memory would hold the graph of its whole episode, and a Box's actions would be no arrays."""
    agent = run.load(trained("gru"), device="cpu")
    _, inputs, _ = exporting.prepare(agent)
    agent.close()
    loaded = torch.jit.load(exporting.export(trained("gru"), out=tmp_path / "policy.pt"))
    outputs = loaded(*(x.clone() for x in inputs))
    assert len(outputs) == 2 and not any(x.requires_grad for x in (*outputs, *loaded.parameters()))


def test_zeros_of_the_described_kinds_are_an_empty_memory(trained: Callable[..., Path], tmp_path: Path):
    extra = {"policy.json": ""}
    file = exporting.export(trained("transformer"), out=tmp_path / "policy.pt")
    loaded, about = torch.jit.load(file, _extra_files=extra), json.loads(extra["policy.json"])
    assert {"float32", "bool", "int64"} == set(about["dtypes"])
    pairs = zip(about["shapes"], about["dtypes"], strict=True)
    action, *carry = loaded(*(torch.zeros(1, *shape, dtype=getattr(torch, dtype)) for shape, dtype in pairs))
    assert len(carry) == len(about["dtypes"]) - 1 and action.shape == (1,)


def test_a_bundled_agent_is_exported_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert exporting.export("ppo/LunarLander-v3") == Path("policy.pt") and (tmp_path / "policy.pt").is_file()
    with pytest.raises(UserError, match="pretrain/chains-sums comes with the package, without the results"):
        exporting.export("pretrain/chains-sums", "merged")


def test_a_memory_is_of_as_many_episodes_as_it_began_with(trained: Callable[..., Path]):
    agent = run.load(trained("gru"), device="cpu")
    agent.module = SimpleNamespace(  # type: ignore[assignment]
        act=lambda state, obs, carry, explore: (torch.zeros(len(obs), dtype=torch.int64), {}, obs),
        rewarded=lambda carry, reward: carry,
    )
    one = np.zeros(agent.spaces.obs.shape, np.float32)
    agent.act(one)
    with pytest.raises(UserError, match=r"3 given, and the memory of ppo is of 1: call reset\(\)"):
        agent.act(np.stack([one] * 3))
    agent.act(one)
    agent.reset()
    assert len(agent.act(np.stack([one] * 3))) == 3
    with pytest.raises(UserError, match="5 given, and the memory of ppo is of 3"):
        agent.reward(torch.ones(5))
    agent.reward(1.0)
    agent.close()


@pytest.mark.parametrize("kind", ["towers", "gru", "gtrxl"])
def test_onnx_gives_the_same_outputs(kind: str, trained: Callable[..., Path], tmp_path: Path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    path = trained(kind)
    session = runtime.InferenceSession(str(exporting.export(path, "onnx", tmp_path / "policy.onnx")))
    names = [x.name for x in session.get_inputs()]

    def call(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        fed = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(x) for x in session.run(None, fed)]

    _agrees(path, call)


@pytest.mark.parametrize(
    "space", [gs.Discrete(2, start=5), gs.MultiDiscrete([2, 3], start=[1, 4]), gs.Box(0.5, 1, (2,))]
)
def test_actions_are_those_of_the_environment(space: gs.Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Shifted(gymnasium.Env):
        observation_space, action_space = gs.Box(0, 9, (1,)), space

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            return np.zeros(1, np.float32), 0.0, False, False, {}

    name = "ForesightShifted-v0"
    spec = gymnasium.envs.registration.EnvSpec(name, entry_point=Shifted, max_episode_steps=4)
    monkeypatch.setitem(gymnasium.registry, name, spec)
    path = _trained(tmp_path / "run", name)
    agent, obs = run.load(path, device="cpu"), np.zeros((3, 1), np.float32)
    acted = agent.act(obs)
    assert all(space.contains(action) for action in (*acted, agent.act(obs[0])))
    loaded = torch.jit.load(exporting.export(path))
    assert torch.equal(loaded(torch.from_numpy(obs))[0], torch.from_numpy(acted))
    agent.close()


def test_a_world_model_acts_from_a_file(tmp_path: Path):
    spaces = Spaces(gs.Box(-1, 1, (3,)), gs.Discrete(2))
    state = dreamer.build(dreamer.Config(deter=16, hidden=8, blocks=2, units=8, replay_size=100), spaces)
    obs, generator = torch.randn(5, 3), torch.Generator().manual_seed(0)
    _, _, held = dreamer.act(state, obs[:2])
    policy = exporting.Exported(dreamer, state, obs[:2], held).eval()
    assert exporting.write(policy, (obs[:2], *exporting.leaves(held)), {}, tmp_path / "policy.pt", "torchscript")
    loaded, held = torch.jit.load(tmp_path / "policy.pt"), state.model.initial(5)
    for _ in range(4):
        action, *after = loaded(obs, *exporting.leaves(held))
        expected, _, held = dreamer.act(state, obs, held)
        assert torch.equal(action, expected)
        for mine, theirs in zip(after, exporting.leaves(held), strict=True):
            torch.testing.assert_close(mine, theirs)
        obs = torch.randn(5, 3, generator=generator)


def test_what_a_file_cannot_hold_is_refused(
    trained: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = trained("towers")
    for act in (lambda obs: torch.rand(obs.shape[0]), lambda obs: torch.zeros(len(obs))):  # random; always two
        monkeypatch.setattr(ppo, "act", lambda state, obs, carry=None, explore=False, act=act: (act(obs), {}, None))
        with pytest.raises(UserError, match="a file cannot hold its policy"):
            exporting.export(path)
    assert not (path / "policy.pt").exists()
    with pytest.raises(UserError, match="a file cannot hold its policy"):
        exporting.export("muzero/CartPole-v1", out=tmp_path / "plans.pt")  # its search is a compiled loop


@pytest.mark.parametrize("kind", ["torchscript", "onnx"])
def test_chunks_that_are_predicted_at_some_steps_alone_are_refused(kind: str, tmp_path: Path):
    config = chunks.Config(
        data=("d",), chunk=4, action_steps=4, ensemble=None, dim=8, heads=2, hidden=16, posterior_layers=1,
        encoder_layers=1, latent=2,
    )  # fmt: skip
    state, obs = chunks.build(config, Spaces(gs.Box(-1, 1, (3,)), gs.Box(-1, 1, (2,)))), torch.randn(2, 3)
    _, _, held = chunks.act(state, obs)
    policy = exporting.Exported(chunks, state, obs, held).eval()
    assert not exporting.write(policy, (obs, *exporting.leaves(held)), {}, tmp_path / "policy", kind)
    assert not (tmp_path / "policy").exists()


def test_what_acts_on_rewards_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"decision_transformer, which acts on the rewards .* with agent\.reward"):
        exporting.export("decision_transformer/CartPole-v1", out=tmp_path / "policy.pt")
    assert not (tmp_path / "policy.pt").exists()


def test_mistakes_are_named(tmp_path: Path):
    path = _trained(tmp_path / "run", "CartPole-v1")
    with pytest.raises(UserError, match="Did you mean 'onnx'"):
        exporting.export(path, "onx")
    with pytest.raises(UserError, match="Cannot write"):
        exporting.export(path, out=tmp_path / "nowhere" / "policy.pt")
    for kind, name, fix in ("torchscript", "p.onnx", "--format onnx"), ("onnx", "p.PT", "--format torchscript"):
        with pytest.raises(UserError, match=f"would hold {kind}, and .* add {fix}, or choose an --out that ends in"):
            exporting.export(path, kind, tmp_path / name)
        assert not (tmp_path / name).exists()
    run.train("value_iteration", env="GridWorld4x4", out=tmp_path / "table", show=False)
    with pytest.raises(UserError, match=r"cannot be exported as torchscript. No format holds it\."):
        exporting.export(tmp_path / "table")


def test_a_format_is_named_before_a_language_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = resolve.resolve("grpo", task="addition")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings.document()))
    monkeypatch.setattr(run, "load", lambda *_, **__: pytest.fail("it is loaded"))
    with pytest.raises(UserError, match=r"as torchscript: add --format merged \(or adapter, gguf\)\."):
        exporting.export(tmp_path)
