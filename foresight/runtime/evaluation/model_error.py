"""How wrong a learned model is, by the number of its own steps: what it imagines beside what then happened."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor

from foresight.envs import collect
from foresight.envs.base import Episodes
from foresight.envs.games import selfplay
from foresight.errors import UserError
from foresight.nets.outputs import Categorical
from foresight.runtime import environments, machine, run
from foresight.runtime.evaluation.evaluate import EVALUATION_SEED, undisturbed
from foresight.runtime.kinds import control
from foresight.runtime.results import plot
from foresight.training import muzero_targets


def measure(
    path: str | Path, depth: int = 10, steps: int = 200, checkpoint: str = "latest", device: str = "auto"
) -> dict[str, list[float]]:
    """Errors of the model of a run by depth, see `unroll.model_errors`: `value`, `policy` and `reward`, 0 to `depth`.

    Over `steps` steps of up to 16 worlds that it did not train on, in which it acts as in evaluation (in a game, where
    nothing else is random, as in training). Raises UserError for a run without a learned model, and for a depth that
    cannot be reached.
    """
    if not 1 <= depth < steps:
        raise UserError(f"The depth must be between 1 and {steps - 1}, not {depth}.")
    agent = run.load(path, checkpoint, device)
    state, module = agent.state, agent.module
    try:
        if not hasattr(module, "reanalyze"):
            raise UserError(f"{agent.settings.algorithm} learns no model to search in: muzero and its variants do.")
        world = environments.evaluation(
            dataclasses.replace(agent.settings, episodes=control.EVALUATION_ENVS), agent.env
        )
        env = selfplay.env(world, control.EVALUATION_ENVS)
        place = machine.device_of(state)

        def act(obs: Any, carry: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
            action, extras, _ = module.act(state, obs, explore=env is not world)
            return action, {"taken": extras.get("taken", action)}, carry  # as the model knows it

        with undisturbed(state):
            obs = env.reset(EVALUATION_SEED + agent.settings.seed)
            seen = collect.segment(env, obs, act, steps, place, Episodes())
            found = muzero_targets.model_errors(
                state.network,
                seen.rows,
                seen.rows.extras["taken"],
                collect.successor_obs(seen),
                depth,
                _policy(state),
            )
        environments.close(world)
    finally:
        agent.close()
    return {name: [float(x) for x in values] for name, values in found.items()}


def _policy(state: Any) -> Any:
    """What makes an Output of the numbers of the policy: the State's own head, or a choice among its actions."""
    if hasattr(state, "head"):
        return state.head
    actions = getattr(state.network, "actions", None)  # beside them there may be outcomes of chance
    return lambda numbers: Categorical(numbers[..., :actions])


def draw(found: dict[str, dict[str, list[float]]], out: str | Path) -> None:
    """One panel for each error, one line for each run, into `out` (.png, .svg or .pdf)."""
    figure, panels = plot.panels(out, 3)
    words = {"value": "value, mean error", "policy": "policy, KL in nats", "reward": "reward, mean error"}
    for axes, (name, label) in zip(panels, words.items(), strict=True):
        for run_name, errors in found.items():
            axes.plot(range(len(errors[name])), errors[name], marker="o", markersize=3, label=run_name)
        axes.set(xlabel="steps of the model", title=label)
    panels[0].legend(frameon=False, fontsize=8)
    plot.save(figure, out)
