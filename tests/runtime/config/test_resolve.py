"""Whole numbers of 0 (and below) with which nothing can be learned: a sentence, never a traceback or a silent run."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from foresight.envs.make import make
from foresight.errors import UserError
from foresight.runtime import catalog, environments
from foresight.runtime.config import effects, resolve
from foresight.runtime.config.settings import Settings
from foresight.training import options
from foresight.training.options import build_config, field_types
from tests.sabotage import sabotaged_by

PLANNERS = ("value_iteration", "policy_iteration", "truncated_policy_iteration", "soft_value_iteration")
SEARCHERS = ("muzero", "gumbel_muzero", "efficientzero", "stochastic_muzero", "sampled_muzero")
DROPPING = (
    "decision_transformer", "online_decision_transformer", "trajectory_transformer", "classifier", "act",
    "diffusion_policy", "storm", "tdmpc2",
)  # fmt: skip
MONTE_CARLO = ("mc_epsilon_greedy", "mc_exploring_starts", "mc_basic", "monte_carlo_prediction")
NEVER = [
    *((name, "yield_every") for name in (*PLANNERS, "monte_carlo_prediction")),
    *((name, "max_episode_steps") for name in MONTE_CARLO), *((name, "improve_every") for name in MONTE_CARLO[:2]),
    ("mc_basic", "episodes_per_pair"),
    *((name, field) for name in SEARCHERS for field in ("simulations", "replay_size", "latent_size", "support")),
    ("gumbel_muzero", "considered"), ("efficientzero", "lstm_size"), ("efficientzero", "lstm_horizon"),
    ("dqn", "atoms"),
    *((name, "rollout_steps") for name in ("ppo", "a2c", "qac", "trpo", "ppg", "impala", "off_policy_ac", "sac")),
    ("dqn", "rollout_steps"),
    *((name, "num_envs") for name in ("ppo", "a2c", "qac", "trpo", "ppg", "impala", "reinforce", "rainbow")),
    ("reinforce", "max_episode_steps"), ("ppo", "epochs"), ("ppo", "minibatches"), ("impala", "rollouts_per_update"),
    ("sac", "sequence_length"),
    *((name, "heads") for name in (*DROPPING, "vla", "pretrain") if name != "tdmpc2"), ("pretrain", "kv_heads"),
    ("diffusion_policy", "groups"),
]  # fmt: skip


@functools.cache
def _spaces(name: str) -> Any:
    kind = catalog.module(name).KIND
    if kind == "tabular":
        return environments.spaces(make("CliffWalking-v1", kind))
    return make("Pendulum-v1" if name in ("sac", "sampled_muzero") else "CartPole-v1", num_envs=1).spaces


def _reported(name: str, **fields: Any) -> str:
    """What the build of an algorithm with these fields reports."""
    try:
        catalog.module(name).build(build_config(catalog.config_class(name), **fields), _spaces(name))
    except UserError as error:
        return str(error)
    except (RuntimeError, ZeroDivisionError, ValueError) as error:
        return f"a traceback: {error}"
    return ""


@sabotaged_by("foresight.errors.at_least", lambda f: lambda least, config, *names: None)
@pytest.mark.parametrize("value", [0, -1])
def test_counts_of_zero_are_refused(value: int) -> None:
    for name, field in NEVER:
        reported = _reported(name, **{field: value})
        assert reported == f"{field} must be at least 1, not {value}.", (name, reported)


@sabotaged_by("foresight.errors.share", lambda f: lambda config, *names: None)
@pytest.mark.parametrize("value", [1.0, -0.1])
def test_a_dropout_of_all_or_less_than_none_is_refused(value: float) -> None:
    named = [name for name in catalog.algorithms() if hasattr(catalog.config_class(name), "dropout")]
    assert sorted(named) == sorted(DROPPING)
    for name in DROPPING:
        reported = _reported(name, dropout=value)
        assert reported == f"dropout is a share from 0 to below 1, not {value}.", (name, reported)


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"given": {"steps": -5}}, "steps must be at least 0, not -5."),
        ({"given": {"seed": -1}}, "seed must be at least 0, not -1."),
        ({"given": {"seed": 2**63}}, "seed must be less than 2**63, not 9223372036854775808."),
        ({"given": {"hidden": (64, 2**63)}}, "hidden must be less than 2**63, not 64 9223372036854775808."),
        ({"given": {"threads": -1}}, "threads must be at least 0, not -1."),
        ({"given": {"learning_starts": -1}}, "learning_starts must be at least 0, not -1."),
        ({"given": {"hidden": (64, 0)}}, "hidden must have widths of at least 1, not 64 0."),
        ({"given": {"max_grad_norm": -1.0}}, "max_grad_norm must be more than 0, not -1.0; inf clips no gradient."),
        ({"given": {"adam_epsilon": 0.0}}, "adam_epsilon must be more than 0, not 0.0."),
        ({"given": {"tau": 0.0}}, "tau must be more than 0 and at most 1, not 0.0."),
        (
            {"given": {"learning_starts": 300, "steps": 200}},
            "learning_starts is 300 env steps, but the run ends after 200: no update would be made. "
            "Lower --learning-starts or raise --steps.",
        ),
        ({"episodes": 0}, "--evaluation-episodes must be at least 1, not 0."),
        ({"evaluate_every": -1}, "--evaluate-every must be at least 0, not -1."),
    ],
)
def test_settings_that_no_run_can_have_are_refused(options: dict[str, Any], reported: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve.resolve("dqn", env="CartPole-v1", **options)
    assert str(caught.value) == reported


@pytest.mark.parametrize(
    ("algorithm", "env", "given", "reported"),
    [
        ("storm", "CartPole-v1", {"agent_max_grad_norm": -1.0}, "agent_max_grad_norm must be more than 0, not -1.0"),
        ("behavior_cloning", "CartPole-v1", {"weight_decay": -1.0}, "weight_decay must be at least 0, not -1.0"),
        ("dqn", "CartPole-v1", {"adam_epsilon": float("inf")}, "adam_epsilon must be finite, not inf"),
        ("ppo", "CartPole-v1", {"value_coef": -0.5}, "value_coef must be at least 0, not -0.5: below, the loss"),
        ("dreamer", "CartPole-v1", {"dynamics_coef": -1.0}, "dynamics_coef must be at least 0, not -1.0: below"),
        ("planet", "Pendulum-v1", {"adam_eps": 0.0}, "adam_eps must be more than 0, not 0.0"),
        ("planet", "Pendulum-v1", {"layers": 10**9}, "layers must be at most 1,000, not 1,000,000,000"),
        ("tdmpc2", "Pendulum-v1", {"critics": 10**9}, "critics must be at most 1,000, not 1,000,000,000"),
    ],
)
def test_settings_of_optimizers_are_checked(algorithm: str, env: str, given: dict[str, float], reported: str) -> None:
    with pytest.raises(UserError, match=reported):
        resolve.resolve(algorithm, env=env, given=given)


@pytest.mark.parametrize(
    ("algorithm", "given", "reported"),
    [
        ("grpo", {"kl_coef": -0.1}, "kl_coef must be at least 0, not -0.1"),
        ("rlhf_ppo", {"clip_reward": -1.0}, "clip_reward must be more than 0, not -1.0"),
        ("grpo", {"clip_ratio": -0.5}, "clip_ratio must be at least 0, not -0.5"),
        ("dapo", {"overlong_penalty": -1.0}, "overlong_penalty must be at least 0, not -1.0"),
        ("reward_model", {"centering": -1.0}, "centering must be at least 0, not -1.0"),
        ("pretrain", {"init_std": -1.0}, "init_std must be at least 0, not -1.0"),
    ],
)
def test_coefficients_of_rewards_are_checked(algorithm: str, given: dict[str, float], reported: str) -> None:
    with pytest.raises(UserError, match=reported):
        resolve.resolve(algorithm, task="addition", given=given)


@pytest.mark.parametrize("rate", [0.0, 1.5])
def test_a_rate_of_moments_is_a_share(rate: float) -> None:
    for name in ("ppo", "impala"):
        with pytest.raises(UserError, match=f"popart_rate must be more than 0 and at most 1, not {rate}"):
            resolve.resolve(name, env="CartPole-v1", given={"popart_rate": rate})


UNREAD = [
    ("dqn", "CartPole-v1", {"value_range": (0.0, 1.0)}, "value_range has no effect with values points, only with"),
    ("dqn", "CartPole-v1", {"max_lag": 3}, "max_lag has no effect with actors 0, only with --actors: change that too"),
    ("sac", "Pendulum-v1", {"memory_size": 8}, "memory_size has no effect with memory None, only with a --memory"),
    ("sac", "Pendulum-v1", {"memory": "gru", "memory_heads": 8}, "memory_heads has no effect with memory gru"),
    (
        "act",
        "Pendulum-v1",
        {"action_steps": 4},
        "action_steps has no effect with ensemble 0.01, only with --ensemble None",
    ),
    ("alphago", "tic_tac_toe", {"games": "a.sgf", "random_moves": 1}, "random_moves has no effect with games a.sgf"),
    ("alphazero", "tic_tac_toe", {"c_init": 2.0}, "c_init has no effect with rule gumbel, only with --rule puct"),
]


@pytest.mark.parametrize(("algorithm", "env", "given", "reported"), UNREAD)
def test_a_field_that_others_turn_off_is_refused(
    algorithm: str, env: str, given: dict[str, Any], reported: str
) -> None:
    with pytest.raises(UserError, match=reported):
        resolve.resolve(algorithm, env=env, given=given)


def test_a_field_is_taken_where_it_has_an_effect_or_was_not_given() -> None:
    assert resolve.resolve("sac", env="Pendulum-v1", given={"memory": "gtrxl", "memory_heads": 8}).config["memory"]
    assert resolve.resolve("dqn", env="CartPole-v1", given={"max_lag": 3}, actors=2).config["max_lag"] == 3
    assert resolve.resolve("dqn", env="CartPole-v1", given={"value_range": (-10.0, 10.0)})  # the default
    preset = resolve.resolve("diffusion_policy", preset="PushT-v0", given={"denoiser": "mlp"})
    assert preset.config["widths"] == (32, 64)  # of the preset, for its U-Net
    with pytest.raises(UserError, match="--keep-optimizer is for text algorithms: dqn is a 'control' algorithm"):
        resolve.resolve("dqn", env="CartPole-v1", keep_optimizer=True)


def test_every_row_of_effects_turns_fields_of_an_algorithm_on_and_off() -> None:
    """By values that the field can have: of its type, or named in the algorithm's file. A misspelt one does neither."""
    numbers = {bool: (False, True), int: (0, 1, 2), float: (0.0, 1.0), type(None): (None,)}
    shared, checked = set(re.findall(r'"(\w+)"', inspect.getsource(options))), set()
    for name in catalog.algorithms():
        kind = catalog.config_class(name)
        names = {""} | shared | set(re.findall(r'"(\w+)"', inspect.getsource(inspect.getmodule(kind) or options)))
        types = {"actors": int, **field_types(kind)}
        for row in (row for row in effects.ROWS if {row[0], *row[3]} <= set(types)):
            parts = (types[row[0]], *get_args(types[row[0]]))
            values = [value for part in parts for value in (names if part is str else numbers.get(part, ()))]
            assert {bool(row[1](value)) for value in values} == {True, False}, (name, row[0], row[2])
            checked.add(row)
    assert checked == set(effects.ROWS)


def test_alphazero_starts_at_the_latest_when_its_replay_is_full() -> None:
    """So a larger `learning_starts` than the run has steps is no mistake there."""
    given = {"learning_starts": 5000, "replay_size": 200, "steps": 300}
    assert resolve.resolve("alphazero", env="tic_tac_toe", given=given).config["learning_starts"] == 5000


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (lambda text: text + b"keep: three\n", "invalid literal for int"),
        (lambda text: text + b"preset: caf\xe9\n", "'utf-8' codec"),
        (lambda text: b"- algorithm: dqn\n", "it holds a list, not names and values"),
        (lambda text: b"algorithm: {dqn\n", "expected ',' or '}'"),
        (lambda text: text[: text.index(b"config:")] + b"config: text\n", "'str' object"),
        (lambda text: text.replace(b"env_options: {}", b"env_options: [3]"), "object"),
        (lambda text: text + b"actors: .inf\n", "cannot convert float infinity"),
        (lambda text: b"", "'algorithm'"),
        (lambda text: text.replace(b"kind: control", b"kind: [control]"), "kind is ['control']"),
        (lambda text: text.replace(b"env: CartPole-v1", b"env:"), "env is None"),
        (lambda text: text + b"preset: 5\n", "preset is 5"),
        (lambda text: text + b"device: 5\n", "device is 5"),
        (lambda text: text + b"checkpoint_every: soon\n", "checkpoint_every is 'soon'"),
        (lambda text: text + b"staleness: 0.5\n", "staleness is 0.5"),
        (lambda text: text.replace(b"every: null", b"every: often"), "evaluation.every is 'often'"),
        (lambda text: b"? " * 30_000 + b"x", "maximum recursion depth exceeded"),  # libyaml would end the process
    ],
)
def test_an_edited_config_that_cannot_be_read_is_a_sentence(tmp_path: Path, change: Any, reported: str) -> None:
    text = yaml.safe_dump(resolve.resolve("dqn", env="CartPole-v1").document(), sort_keys=False)
    file = tmp_path / "config.yaml"
    file.write_bytes(change(text.encode()))
    with pytest.raises(UserError) as caught:
        Settings.read(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{file} cannot be read: ") and message.endswith(". It was edited or is incomplete.")
    assert reported in message
