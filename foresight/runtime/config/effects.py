"""Config fields that another field turns off: typed without that one they would be accepted and ignored. No torch here.

A row holds for each algorithm that has all of its fields, whatever else these names mean elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from foresight.errors import UserError
from foresight.runtime.config import config_fields

Row = tuple[str, Callable[[Any], bool], str, tuple[str, ...]]


def _one_of(*values: object) -> Callable[[Any], bool]:
    return values.__contains__


# A field, which of its values turn the last ones on, how a user gives one of these, and those fields.
ROWS: tuple[Row, ...] = (
    ("memory", bool, "with a --memory", ("memory_size", "memory_layers")),
    ("memory", bool, "with a --memory", ("sequence_length", "burn_in")),
    (
        "memory",
        _one_of("gtrxl", "transformer"),
        "with --memory gtrxl or transformer",
        ("memory_heads", "memory_window"),
    ),
    ("values", _one_of("atoms", "quantiles"), "with --values atoms or quantiles", ("atoms",)),
    ("values", _one_of("atoms"), "with --values atoms", ("value_range",)),
    ("priority_exponent", bool, "with a --priority-exponent above 0", ("priority_correction",)),
    ("priority_exponent", bool, "with a --priority-exponent above 0", ("priority",)),
    ("sigma", _one_of(None), "with --sigma None", ("epsilon",)),
    ("form", _one_of("baseline"), "with --form baseline", ("value_learning_rate", "value_steps")),
    ("learn_temperature", bool, "with --learn-temperature", ("target_entropy",)),
    ("rule", _one_of("gumbel"), "with --rule gumbel", ("considered", "value_scale")),
    ("rule", _one_of("puct"), "with --rule puct", ("c_init", "dirichlet_alpha", "dirichlet_fraction")),
    ("rule", _one_of("puct"), "with --rule puct", ("temperature_moves",)),
    ("full_share", lambda share: share < 1, "with a --full-share below 1", ("cheap_simulations",)),
    ("playout_steps", bool, "with --playout-steps", ("playout_simulations",)),
    ("games", operator.not_, "without --games", ("expert_games", "expert_simulations", "random_moves")),
    ("dirichlet_fraction", bool, "with a --dirichlet-fraction above 0", ("dirichlet_alpha",)),
    ("evaluation", _one_of("sweeps"), "with --evaluation sweeps", ("tolerance",)),
    ("decoder", bool, "with --decoder", ("decoded",)),
    ("decoder", operator.not_, "with --no-decoder", ("redundancy_coef",)),
    ("imagined_last", operator.not_, "with --imagined-last 0", ("imagined_batch",)),
    ("contrastive_coef", bool, "with a --contrastive-coef above 0", ("contrastive_steps",)),
    ("sequence_model", _one_of("transformer"), "with --sequence-model transformer", ("heads", "dropout")),
    ("iterations", bool, "with --iterations above 0", ("candidates", "proposals", "elites", "temperature")),
    ("iterations", bool, "with --iterations above 0", ("proposals", "min_std", "max_std")),
    ("episodic", bool, "with --episodic", ("termination_coef",)),
    ("ensemble", _one_of(None), "with --ensemble None", ("action_steps",)),
    ("denoiser", _one_of("unet"), "with --denoiser unet", ("widths", "kernel", "groups", "embedding")),
    ("denoiser", _one_of("transformer", "mlp"), "with --denoiser transformer or mlp", ("dim", "layers", "dropout")),
    ("denoiser", _one_of("transformer"), "with --denoiser transformer", ("heads",)),
    ("head", _one_of("point"), "with --head point", ("points",)),
    ("head", _one_of("bins", "point"), "with --head bins or point", ("edges",)),
    ("images", _one_of("vit"), "with --images vit", ("positions", "layers", "heads", "dropout")),
    ("images", _one_of("swin"), "with --images swin", ("depths", "stage_heads", "window")),
    ("data", operator.not_, "without --data", ("warmup_episodes",)),
    ("policy", operator.not_, "without --policy", ("hidden", "activation", "images", "log_std", "precision")),
    ("experts", bool, "with --experts", ("experts_per_token", "balance_coef")),
    ("predict_tokens", lambda heads: heads > 1, "with --predict-tokens above 1", ("predict_coef",)),
    ("predict_tokens", lambda heads: heads > 1, "with --predict-tokens above 1", ("token_coef",)),
    ("kl_coef", bool, "with a --kl-coef above 0", ("kl_estimator",)),
    ("overlong_penalty", bool, "with an --overlong-penalty above 0", ("overlong_buffer",)),
    ("importance_correction", lambda kind: kind != "none", "with an --importance-correction", ("importance_cap",)),
    ("actors", bool, "with --actors", ("max_lag",)),
)


def turned_off(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Fields without effect in `config`, which also has `actors`: each with the field that turns it off, and a way."""
    for other, turns_on, way, names in ROWS:
        if other in config and all(name in config for name in names) and not turns_on(config[other]):
            yield from ((name, other, way) for name in names)


def used(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What of `given` has an effect, in a run of one process with the other fields as in `config`."""
    unused = {name for name, *_ in turned_off({**config, **given, "actors": 0})}
    return {name: value for name, value in given.items() if name not in unused}


def check(algorithm: str, config: Mapping[str, Any], given: Mapping[str, Any], actors: int) -> None:
    """Raise UserError for a field in `given` without effect in `config`, if it is not the algorithm's default.

    A preset may hold such fields: they have an effect once the user changes another one.
    """
    everything, defaults = {**config, "actors": actors}, config_fields.fields(algorithm, {})
    for name, other, way in turned_off(everything):
        if name in given and given[name] != defaults[name]:
            raise UserError(
                f"{name} has no effect with {other} {config_fields.plain(everything[other]) or 'empty'}, only {way}: "
                f"change that too, or leave --{name.replace('_', '-')} out."
            )
