"""Old names: how run directories, presets, checkpoints and command lines of earlier versions are read.

Only this module knows them. Everything that is written uses the present names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MUZERO = ("muzero", "gumbel_muzero", "efficientzero", "sampled_muzero", "stochastic_muzero")
ON_POLICY = ("a2c", "impala", "off_policy_ac", "ppg", "ppo", "qac", "reinforce", "trpo")
OFF_POLICY = ("dqn", "rainbow", "sac", "sac_discrete")
LANGUAGE = (
    "cispo", "dapo", "distill", "dpo", "dr_grpo", "grpo", "gspo", "kto", "mtp_critic", "orpo", "pretrain",
    "reward_model", "rlhf_ppo", "rloo", "sft",
)  # fmt: skip
TABULAR = (
    "double_q_learning", "expected_sarsa", "mc_basic", "mc_epsilon_greedy", "mc_exploring_starts",
    "monte_carlo_prediction", "n_step_sarsa", "policy_iteration", "q_learning", "sarsa", "soft_value_iteration",
    "td_lambda", "td_prediction", "truncated_policy_iteration", "value_iteration",
)  # fmt: skip

# Config fields: the old and the present name, for the algorithms that had the field.
_FIELDS: Sequence[tuple[tuple[str, ...], Mapping[str, str]]] = (
    (ON_POLICY + OFF_POLICY, {"unroll_steps": "rollout_steps", "anneal": "anneal_lr"}),
    (("off_policy_ac", "qac", "reinforce", "trpo"), {"value_rate": "value_learning_rate"}),
    (("a2c", "impala"), {"epsilon": "optimizer_epsilon"}),
    (("impala",), {"unrolls": "rollouts_per_update"}),
    (("off_policy_ac",), {"replays": "replay_ratio"}),
    (("reinforce",), {"normalize": "normalize_advantage", "longest": "max_episode_steps"}),
    (("dqn", "sac", "sac_discrete"), {"updates": "gradient_steps"}),
    (
        ("sac", "sac_discrete"),
        {"alpha": "entropy_temperature", "learn_alpha": "learn_temperature", "sequence": "sequence_length"},
    ),
    (
        MUZERO,
        {"batch": "batch_size", "replay": "replay_size", "warmup": "learning_starts", "update_every": "train_every"},
    ),
    (("gumbel_muzero",), {"normalize": "value_normalization"}),
    (("efficientzero",), {"horizon": "lstm_horizon", "lstm": "lstm_size"}),
    (("alphazero",), {"batch": "batch_size", "buffer": "replay_size", "learn_from": "learning_starts"}),
    (("alphago",), {"batch": "batch_size"}),
    (LANGUAGE, {"warmup": "lr_warmup", "anneal": "anneal_lr", "batch": "batch_size"}),
    (("mtp_critic",), {"polyak": "tau", "value_clip": "clip_value", "heads": "predict_tokens"}),
    (("rlhf_ppo",), {"critic_learning_rate": "value_learning_rate"}),
    (("reward_model",), {"centring": "centering"}),
    (("dpo",), {"length_normalised": "length_normalized"}),
    (("pretrain",), {"hidden": "mlp_size", "foresee": "predict_tokens", "foresee_coef": "predict_coef"}),
    (TABULAR, {"every": "yield_every"}),
    (("n_step_sarsa", "td_prediction"), {"n": "n_steps"}),
    (("td_lambda",), {"lam": "trace_lambda"}),
    (("mc_epsilon_greedy", "mc_exploring_starts"), {"batch": "improve_every"}),
    (
        ("mc_basic", "mc_epsilon_greedy", "mc_exploring_starts", "monte_carlo_prediction"),
        {"horizon": "max_episode_steps"},
    ),
    (("mc_basic",), {"episodes": "episodes_per_pair"}),
    (("soft_value_iteration",), {"temperature": "entropy_temperature"}),
)


def field_names(algorithm: str) -> dict[str, str]:
    """The present name of every renamed Config field of `algorithm`, by its old name."""
    return {old: new for names, renamed in _FIELDS if algorithm in names for old, new in renamed.items()}


def fields(algorithm: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` of Config fields under their present names. A field given under both names keeps the present one."""
    renamed = field_names(algorithm)
    return {renamed.get(name, name): value for name, value in values.items() if renamed.get(name) not in values}


_TD = (
    "double_q_learning", "expected_sarsa", "n_step_sarsa", "q_learning", "sarsa", "td_lambda", "td_prediction",
)  # fmt: skip

# Fields of a State: the old and the present name.
_STATES: Mapping[str, Mapping[str, str]] = {
    "rlhf_ppo": {"judge": "reward_model"},
    "alphago": {"plays": "game_id"},
    "alphazero": {"plays": "game_id", "owed": "samples_due"},
    "muzero_targets": {"plays": "game_id"},  # MuZero and its variants
    **{name: {"walk": "actor"} for name in _TD},
}


def state_fields(kind: type[Any], nodes: Mapping[str, Any]) -> dict[str, Any]:
    """The saved fields of a State of class `kind` under their present names."""
    algorithm = kind.__module__.rpartition(".")[2] if kind.__name__ == "State" else ""
    found = {_STATES.get(algorithm, {}).get(name, name): value for name, value in nodes.items()}
    if algorithm in ("dreamer", "storm"):  # they had one generator for acting and for updates
        found.setdefault("inner", found.get("generator"))
    if algorithm == "sac":  # the policy was updated at every gradient step, so that it needed no count
        found.setdefault("gradient_steps", 0)
        found.setdefault("noise", None)
        found.setdefault("noise_age", 0)
    if algorithm == "dqn":  # its target followed the updates, so that it needed no count
        found.setdefault("gradient_steps", 0)
    if algorithm == "reward_model":
        found.setdefault("of_steps", None)
        found.setdefault("delimiter", "\n")
    if algorithm == "dpo":
        found.setdefault("reference_logprob", None)
        found.setdefault("reference_rows", None)  # of unknown rows: computed again
    if algorithm in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"):
        found.setdefault("counts", None)
    return found


def sections(seconds: Mapping[str, float]) -> dict[str, float]:
    """The seconds of a run's profile, by the present name of each section."""
    return {"loop" if name == "walking" else name: value for name, value in seconds.items()}


# Modules that were moved: a checkpoint names its classes by module and name.
_MODULES = {
    "envs.apart": "envs.text.worker",
    "envs.atari": "envs.control.atari",
    "envs.boards": "envs.games.boards",
    "envs.book": "envs.tabular.sutton_barto",
    "envs.classic": "envs.control.classic",
    "envs.control": "envs.control.build",
    "envs.engines": "envs.control.engines",
    "envs.games": "envs.games.game",
    "envs.grid": "envs.tabular.grid",
    "envs.gridview": "envs.tabular.render",
    "envs.mdp": "envs.tabular.mdp",
    "envs.recall": "envs.control.memory_tasks",
    "envs.records": "envs.games.records",
    "envs.rewards": "envs.text.rewards",
    "envs.selfplay": "envs.games.selfplay",
    "envs.several": "envs.control.multi_task",
    "envs.text": "envs.text.task",
    "envs.troubles": "envs.control.faults",
    "envs.vector": "envs.control.vector",
    "envs.wrappers": "envs.control.wrappers",
    "nets.architecture": "nets.language.architecture",
    "nets.board": "nets.models.alphazero",
    "nets.chance": "nets.models.stochastic_muzero",
    "nets.decoder": "nets.language.decoder",
    "nets.gtrxl": "nets.sequence.gtrxl",
    "nets.language": "nets.language.model",
    "nets.latent": "nets.models.muzero",
    "nets.lean": "nets.language.checkpointing",
    "nets.learner": "training.language",
    "nets.lora": "nets.language.lora",
    "nets.memory": "nets.sequence.memory",
    "nets.microbatch": "training.microbatch",
    "nets.moe": "nets.language.moe",
    "nets.mtp": "nets.language.mtp",
    "nets.optim": "training.optim",
    "nets.packed": "nets.language.packed",
    "nets.prefix": "nets.models.efficientzero",
    "nets.pretrained": "nets.language.pretrained",
    "nets.recurrent": "nets.sequence.recurrent",
    "nets.scorer": "nets.language.scorer",
    "nets.sharded": "distributed",
    "nets.tokentree": "nets.language.tokentree",
    "nets.towers": "nets.stacked_mlp",
    "nets.transformer": "nets.sequence.transformer",
    "nets.window": "nets.sequence.window",
    "planning.alone": "planning.generation.static_batching",
    "planning.connect_four": "planning.games.connect_four",
    "planning.constrain": "planning.generation.constraints",
    "planning.corpus": "training.corpus",
    "planning.decode": "planning.generation.decoding",
    "planning.draw": "planning.search.drawing",
    "planning.dynamic": "planning.dynamic.bellman",
    "planning.graded": "training.graded",
    "planning.kernels": "planning.dynamic.kernels",
    "planning.minimax": "planning.games.minimax",
    "planning.opponents": "planning.games.opponents",
    "planning.proof": "planning.games.exhaustive",
    "planning.rollout": "planning.generation.rollout",
    "planning.rollouts": "planning.search.playouts",
    "planning.room": "planning.search.memory",
    "planning.rules": "planning.search.rules",
    "planning.sampled": "planning.search.sampled",
    "planning.search": "planning.search.mcts",
    "planning.search_kernels": "planning.search.kernels",
    "planning.select": "planning.search.selection",
    "planning.server": "planning.generation.server",
    "planning.speculate": "planning.generation.speculative",
    "planning.together": "planning.generation.all_gather",
    "planning.tree": "planning.search.tree",
    "planning.unroll": "training.muzero_targets",
    "planning.walk_kernels": "training.tabular_kernels",
    "planning.walks": "training.tabular",
    "runtime.actors": "runtime.distributed.actors",
    "runtime.book": "runtime.results.sutton_barto",
    "runtime.checkpoint": "runtime.checkpoints.checkpoint",
    "runtime.cluster": "runtime.distributed.ray_cluster",
    "runtime.config_fields": "runtime.config.config_fields",
    "runtime.depths": "runtime.evaluation.model_error",
    "runtime.evaluate": "runtime.evaluation.evaluate",
    "runtime.finite": "runtime.monitoring.finite",
    "runtime.health": "runtime.monitoring.health",
    "runtime.log": "runtime.monitoring.log",
    "runtime.match": "runtime.evaluation.match",
    "runtime.paths": "runtime.config.paths",
    "runtime.places": "runtime.config.paths",
    "runtime.players": "runtime.evaluation.players",
    "runtime.plot": "runtime.results.plot",
    "runtime.profile": "runtime.monitoring.profile",
    "runtime.progress": "runtime.monitoring.progress",
    "runtime.record": "runtime.evaluation.record",
    "runtime.reproduce": "runtime.results.reproduce",
    "runtime.resolve": "runtime.config.resolve",
    "runtime.results": "runtime.results.results",
    "runtime.settings": "runtime.config.settings",
    "runtime.shards": "runtime.checkpoints.shards",
    "runtime.suites": "runtime.results.suites",
    "runtime.torchrun": "runtime.distributed.torchrun",
    "runtime.tree": "runtime.checkpoints.tree",
    "runtime.when": "runtime.triggers",
    "runtime.worlds": "runtime.environments",
}

# Classes that were renamed, in their present modules.
_CLASSES = {"foresight.training.tabular:Walk": "foresight.training.tabular:ActorState"}

# Modules and parameters of networks that were renamed: the names of weights have them between dots.
_SUBMODULES = {"tower": "trunk", "towers": "mlp", "reach": "scale", "worth": "value_weight"}


def weight(name: str) -> str:
    """The present name of a weight in a `state_dict`."""
    return ".".join(_SUBMODULES.get(part, part) for part in name.split("."))


# Buffers that networks did not have: the running statistics of Stochastic MuZero's codes, which were not standardized.
_ADDED = ("code_mean", "code_var")


def added(name: str) -> bool:
    """Whether a `state_dict` may lack this weight, which is then left as it was built."""
    return name.rpartition(".")[2] in _ADDED


def address(text: str) -> str:
    """The present `module:Class` of a class named in a checkpoint."""
    module, _, name = text.partition(":")
    short = module.removeprefix("foresight.")
    found = f"foresight.{_MODULES[short]}:{name}" if short in _MODULES else text
    return _CLASSES.get(found, found)


def document(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.yaml` or a preset, with the present names of everything but the Config fields."""
    found = dict(config)
    if "world" in found:
        found.setdefault("kind", found.pop("world"))
    if "places" in found:
        found.setdefault("paths", found.pop("places"))
    if found.get("kind") == "mdp":
        found["kind"] = "tabular"
    if found.get("preset"):
        found["preset"], _ = preset(str(found.get("algorithm")), found["preset"])
    if found.get("env_options"):
        found["env_options"], _ = env_options(str(found.get("env") or found.get("task")), found["env_options"])
    return found


# Presets: the old and the present name, by algorithm.
_PRESETS: Mapping[str, Mapping[str, str]] = {"pretrain": {"stories-foresee": "stories-multi-token"}}


def preset(algorithm: str, name: str) -> tuple[str, str]:
    """The present name of a preset of `algorithm`, and a note if it was renamed (else "")."""
    now = _PRESETS.get(algorithm, {}).get(name, name)
    return now, f"preset '{name}' is called '{now}' now" if now != name else ""


# Options of environments and tasks: the old and the present name, by environment.
_ENV_OPTIONS: Mapping[str, Mapping[str, str]] = {"addition": {"reach": "train_high"}}


def env_options(env: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The `options` of the environment or task `env` by their present names, and a note on those that were renamed."""
    renamed = {name: now for name, now in _ENV_OPTIONS.get(env, {}).items() if name in options}
    note = "; ".join(f"option '{name}' of {env} is called '{now}' now" for name, now in renamed.items())
    return {renamed.get(name, name): value for name, value in options.items()}, note


def evaluation(document: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation in a `summary.json`, with the present names of its entries."""
    return {"extra_metrics" if name == "also" else name: value for name, value in document.items()}


def arguments(algorithm: str, args: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line with the present option names, and a note for each renamed option."""
    renamed, out, notes = field_names(algorithm), [], []
    for token in args:
        option, equals, value = token.partition("=")
        negated = "no-" if option.startswith("--no-") else ""
        name = option.removeprefix("--").removeprefix(negated).replace("-", "_")
        if option.startswith("--") and name in renamed:
            now = f"--{negated}{renamed[name].replace('_', '-')}"
            notes.append(f"{option} is called {now} now")
            token = now + equals + value
        out.append(token)
    return out, notes
