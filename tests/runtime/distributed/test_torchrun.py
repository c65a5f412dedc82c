"""One model over two processes learns what one process learns."""

from __future__ import annotations

import contextlib
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foresight import distributed
from foresight.algorithms.policy import a2c
from foresight.cli.main import main
from foresight.envs import make
from foresight.errors import UserError
from foresight.nets.language import gguf
from foresight.runtime import run
from foresight.runtime.checkpoints import checkpoint
from foresight.runtime.distributed import torchrun
from foresight.runtime.session import Interrupted
from foresight.training import language
from tests import architectures, forks, tiny_language

TRAINED = [("sft", 0), ("dpo", 0), ("reward_model", 0), ("dpo", 2)]  # algorithm, rank of the adapters
SAMPLED = {
    "grpo": {"epochs": 2, "minibatches": 2, "kl_coef": 0.1, "lora": 2},
    "dapo": {"max_batches": 2},
    "rlhf_ppo": {"minibatches": 2},
    "distill": {"teacher": tiny_language.folder(1)},
}
CONTROL = ["ppo", "dqn", "sac_discrete"]
PAIR = {"chosen": "3", "rejected": "aa"}
ROWS = {"sft": {"completion": "3"}, "dpo": PAIR, "reward_model": PAIR}
OPTIONS = {"reward_model": {"lm_coef": 1.0}}
TINY = {"model": tiny_language.folder(), "precision": "float32", "seed": 3, "steps": 2, "learning_rate": 1e-2}


def _trained(name: str, rank: int, folder: Path) -> dict[str, Any]:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1?", **ROWS[name]}) + "\n" for i in range(12)))
    # Parts of one row: of three, one process has nothing to do once.
    fields = {"task": str(data), **TINY, **OPTIONS.get(name, {}), "batch_size": 3, "micro_tokens": 1}
    return {**fields, **({"lora": rank} if rank else {})}


def _sampled(name: str, folder: Path) -> dict[str, Any]:
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1?"}) + "\n" for i in range(12)))
    options = {"task": str(data), **TINY, "prompts": 3, "max_new_tokens": 6, "micro_tokens": 1, **SAMPLED[name]}
    options["learning_rate"] = 1e-3  # at ten times this rate updates of four steps amplify the rounding of sums
    return options if name == "rlhf_ppo" else {**options, "group": 3}


def _reward(folder: Path) -> str:
    (folder / "grades.py").write_text(
        "def score(prompts, completions):\n    return [sum(map(ord, x)) % 3 for x in completions]\n"
    )
    return f"{folder / 'grades.py'}:score"


def _control(name: str) -> dict[str, Any]:
    options = {"env": "CartPole-v1", "steps": 128, "num_envs": 2, "seed": 3, "evaluation_episodes": 1}
    return {**options, **({"rollout_steps": 32} if name == "ppo" else {"learning_starts": 50})}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict[str, Any]]]]:
    """All runs of this file by two processes: their folder, and what each process printed, by name."""
    folder = tmp_path_factory.mktemp("together")
    options = {f"{name}-{rank}": _trained(name, rank, folder) for name, rank in TRAINED}
    options |= {name: _sampled(name, folder) for name in SAMPLED} | {name: _control(name) for name in CONTROL}
    before = {f"{name}-alone": {**options[name], "steps": 1} for name in ("dpo-2", "ppo")}
    commands = {
        name: ["train", name.partition("-")[0], *_words(given), "--out", str(folder / name), "--json"]
        for name, given in {**before, **options}.items()
    }
    model = str(gguf.write(tiny_language.byte_level(folder / "model"), folder / "model.gguf"))
    unpacked = {**_trained("sft", 0, folder), "model": model, "steps": 1}
    commands["unpacked"] = ["train", "sft", *_words(unpacked), "--out", str(folder / "unpacked"), "--json"]
    for name in SAMPLED:
        commands[name] += ["--env-options", f"reward={_reward(folder)}"]
    words = ["--task", "addition", "--model", tiny_language.folder(), "--out", str(folder / "mtp_critic")]
    commands["mtp_critic"] = ["train", "mtp_critic", *words]
    file = folder / "commands.json"
    file.write_text(json.dumps(commands))
    assert forks.start(["-m", "tests.runtime.distributed.two_processes", str(file), *before]).wait(300) == 0
    return folder, [json.loads(Path(f"{file}.{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def together(
    printed: tuple[Path, list[dict[str, dict[str, Any]]]],
) -> Callable[[str], tuple[run.Run, dict[str, Any]]]:
    """The run of that name by two processes, and its summary."""
    folder, (first, second) = printed

    def found(name: str) -> tuple[run.Run, dict[str, Any]]:
        assert first[name]["code"] == second[name]["code"] == 0, first[name]["stderr"] + second[name]["stderr"]
        assert not second[name]["stdout"]  # only one process prints
        return run.Run(folder / name), json.loads(first[name]["stdout"])

    return found


def _words(options: dict[str, Any]) -> list[str]:
    return [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rank"), TRAINED)
def test_two_processes_learn_what_one_does(name, rank, together, tmp_path):
    alone = run.train(name, out=tmp_path / "alone", show=False, **_trained(name, rank, tmp_path))
    together, summary = together(f"{name}-{rank}")
    assert summary["steps"] == 2
    for one, other in zip(alone.metrics(), together.metrics(), strict=True):
        for key in {"loss", "grad_norm", "accuracy", "entropy"} & set(one):
            if (name, key, one["step"]) == ("dpo", "accuracy", 1):
                continue  # the policy still is its reference: margins are 0 but for rounding, and so are their signs
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), key
    assert together.evaluation.mean == pytest.approx(alone.evaluation.mean, rel=1e-4)
    begun, here, there = (_weights(folder) for folder in (
        Path(tiny_language.folder()), alone.path / "export", together.path / "export"
    ))  # fmt: skip
    assert here.keys() == there.keys()
    for key, value in here.items():
        adapted = not rank or key.endswith("_proj.weight")
        assert key not in begun or ((value - begun[key]).abs().max() > 1e-3) == adapted, key
        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            torch.testing.assert_close(value, there[key], atol=2e-5, rtol=1e-4)
        else:  # sums are rounded otherwise, and Adam makes a step out of a gradient that should be 0, of few weights
            apart = (value - there[key]).abs() > 2e-5 + 1e-4 * there[key].abs()
            assert apart.float().mean() < 2e-3 and (value - there[key]).abs().max() < 2e-4, key
    # The checkpoint is whole: one process can take it up.
    assert checkpoint.verify(checkpoint.find(together.path))["step"] == 2
    assert run.resume(together.path, 3, show=False).summary["steps"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_two_processes_sample_and_learn_what_one_does(name, together, tmp_path):
    options = _sampled(name, tmp_path)
    alone = run.train(name, out=tmp_path / "alone", show=False, env_options={"reward": _reward(tmp_path)}, **options)
    together, _ = together(name)
    for one, other in zip(alone.metrics(), together.metrics(), strict=True):
        for key in {"reward", "length", "loss", "grad_norm", "entropy", "kl", "teacher_kl"} & set(one):
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), key
    here, there = (_weights(folder) for folder in (alone.path / "export", together.path / "export"))
    for key, value in here.items():
        torch.testing.assert_close(value, there[key], atol=5e-5, rtol=1e-4)
    assert together.evaluation == alone.evaluation


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROL)
def test_two_processes_learn_one_policy_in_envs_of_their_own(name, together, tmp_path):
    """Weights that differ in the end would be an error of the run."""
    together, summary = together(name)
    assert summary["processes"] == 2 and summary["seed"] == 3
    alone = run.train(name, out=tmp_path / "alone", show=False, **_control(name))
    one, two = (_floats(path) for path in (alone.path, together.path))
    assert len(one) == len(two) > 0 and not torch.equal(one, two)


def _floats(path: Path) -> torch.Tensor:
    """All floating point numbers of the newest checkpoint."""
    tensors = [
        value for file in sorted(checkpoint.find(path).glob("*.safetensors")) for value in load_file(file).values()
    ]
    return torch.cat([value.flatten().double() for value in tensors if value.is_floating_point()])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dqn", {**_control("dqn"), "steps": 128}),
        ("sft", {"model": tiny_language.folder(), "steps": 2, "precision": "float32"}),
    ],
)
def test_only_the_first_process_writes_checkpoints_and_exports(name, options, tmp_path, monkeypatch):
    gathered = []
    full = distributed.full

    def gather(value):
        gathered.extend([value.shape] if value.is_floating_point() else [])  # random streams are in no State of sft
        return full(value)

    monkeypatch.setattr(distributed, "full", gather)
    if name == "sft":
        options = {**options, "task": _trained("sft", 0, tmp_path)["task"]}
    options = {**options, "checkpoint_every": 0, "evaluate_every": 1, "show": False}
    run.train(name, out=tmp_path / "first", **options)
    seen, gathered[:] = list(gathered), []
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    second = run.train(name, out=tmp_path / "second", **options)
    assert seen and gathered == (seen if name == "sft" else [])  # replicas have nothing to gather
    assert second.summary["steps"] == run.Run(tmp_path / "first").summary["steps"]
    assert not (second.path / "checkpoints").exists() and not (second.path / "export").exists()


def test_weights_of_another_process_that_are_not_finite_stop_this_one_too(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "all_gather", lambda bad: [bad, "policy.lm_head.weight"])
    options = {**_trained("sft", 0, tmp_path), "steps": 1, "evaluation_episodes": 1, "show": False}
    with pytest.raises(UserError, match=r"the weights of 'policy.lm_head.weight' became NaN or infinite"):
        run.train("sft", out=tmp_path / "run", **options)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_every_process_unpacks_a_gguf_file(together):
    """Into a folder of its own: they may be on machines without a common disk."""
    assert together("unpacked")[1]["steps"] == 1


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_layer_is_a_unit(name, monkeypatch):
    units = []
    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", lambda *_: None)
    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", lambda part, **_: units.append(part))
    monkeypatch.setattr("torch.distributed.fsdp.register_fsdp_forward_method", lambda *_: None)
    module = architectures.model(name)
    language.shard(SimpleNamespace(module=module))
    assert len(units) == 1 + module.config.num_hidden_layers and units[-1] is module
    with pytest.raises(UserError, match="Linear has no layers that can be sharded"):
        language.shard(SimpleNamespace(module=torch.nn.Linear(1, 1)))


@pytest.mark.parametrize("first", [True, False])
def test_only_the_first_process_reports_how_to_resume(first, tmp_path, monkeypatch, capsys):
    def stopped(*_, **__):
        raise Interrupted(tmp_path / "a", 3, "updates", signal.SIGTERM)

    monkeypatch.setattr(run, "train", stopped)
    monkeypatch.setattr(torchrun, "first", lambda: first)
    words = ["train", "a2c", "--preset", "CartPole-v1", "--out", str(tmp_path / "a")]
    assert main(words) == 128 + signal.SIGTERM
    assert ("foresight resume" in capsys.readouterr().err) == first


@pytest.mark.parametrize("off", [0.0, 1e-9, float("nan")])
def test_processes_whose_weights_differ_are_reported(off, monkeypatch):
    state = a2c.build(a2c.Config(num_envs=1, hidden=(4,)), make.make("CartPole-v1", num_envs=1).spaces)
    if math.isnan(off):  # equal in all processes: saving names them
        torch.nn.init.constant_(next(state.network.parameters()), off)

    def gather(gathered, sums):
        raise RuntimeError("No backend type associated with device type cpu")  # as NCCL, for tensors on the CPU

    def gather_objects(gathered, sums):
        gathered[:] = sums, [x + off * (i == 0) for i, x in enumerate(sums)]  # new numbers, as from another process

    monkeypatch.setattr(torchrun.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torchrun.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torchrun.distributed, "all_gather", gather)
    monkeypatch.setattr(torchrun.distributed, "all_gather_object", gather_objects)
    with pytest.raises(RuntimeError, match="not averaged") if off > 0 else contextlib.nullcontext():
        torchrun.check_equal(state)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("reinforce", {"env": "CartPole-v1"}, "reinforce does not run under torchrun"),
        ("ppo", {"env": "CartPole-v1", "normalize_obs": True}, "--normalize-obs does not work under torchrun"),
        ("ppo", {"env": "CartPole-v1", "popart_rate": 1e-3}, "--popart-rate does not work under torchrun"),
        ("ppo", {"env": "CartPole-v1", "target_kl": 0.0}, "--target-kl does not work under torchrun"),
        ("grpo", {"task": "addition", "completer": "http://localhost:1"}, "--completer does not work under torchrun"),
        ("grpo", {"task": "addition", "optimizer": "adamw8bit"}, "--optimizer must be adamw under torchrun"),
    ],
)
def test_what_cannot_be_joined_is_named(name, options, sentence, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=sentence):
        run.train(name, out=tmp_path / "run", show=False, **options)


def test_what_cannot_be_split_is_named(printed):
    folder, processes = printed
    first, second = (process["mtp_critic"] for process in processes)
    assert first["code"] and second["code"] and "mtp_critic has parts that cannot be sharded" in first["stderr"]
    assert not (folder / "mtp_critic").exists()
