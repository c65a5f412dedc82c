"""The error of a learned model by depth: what it predicts in its own rollouts, compared with what happened.

Of MuZero and its variants: values, policies and rewards. Of world models: see `open_loop`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from foresight.data.trajectory import Tree
from foresight.envs import collect
from foresight.envs.base import Episodes
from foresight.envs.games import selfplay
from foresight.errors import UserError
from foresight.nets.outputs import Categorical, Output
from foresight.runtime import catalog, environments, machine, run
from foresight.runtime.catalog import State
from foresight.runtime.evaluation import open_loop, record
from foresight.runtime.evaluation.evaluate import EVALUATION_SEED, preserve_generators
from foresight.runtime.kinds import control
from foresight.runtime.results import plot
from foresight.training import muzero_targets


def measure(
    path: str | Path, depth: int = 10, steps: int = 200, checkpoint: str = "latest", device: str = "auto"
) -> dict[str, list[float]]:
    """Errors of a run's model by depth 0 to `depth`: `value`, `policy`, `reward` (`muzero_targets.model_errors`).

    They are means over `steps` steps in each of up to 16 envs that it was not trained on, in which it acts as in
    evaluation (in a game, where nothing else is random, as in training). Raises UserError for a run without a learned
    model, and for a depth that cannot be reached.
    """
    if not 1 <= depth < steps:
        raise UserError(f"The depth must be between 1 and {steps - 1}, not {depth}.")
    agent = run.load(path, checkpoint, device)
    state, module = agent.state, agent.module
    try:
        if not hasattr(module, "reanalyze"):
            raise UserError(
                f"{agent.settings.algorithm} learns no model to search in. "
                "Give a run of muzero or one of its variants, or of dreamer, storm, planet, tdmpc2 or lewm."
            )
        base_env = environments.evaluation(
            dataclasses.replace(agent.settings, episodes=control.EVALUATION_ENVS), agent.env
        )
        env = selfplay.env(base_env, control.EVALUATION_ENVS)
        state_device = machine.device_of(state)

        def act(obs: Tree, carry: Tree) -> tuple[Tensor, dict[str, Tensor], Tree]:
            action, extras, _ = module.act(state, obs, explore=env is not base_env)
            return action, {"taken": extras.get("taken", action)}, carry  # the action as the model sees it

        with preserve_generators(state):
            obs = env.reset(EVALUATION_SEED + agent.settings.seed)
            seen = collect.segment(env, obs, act, steps, state_device, Episodes())
            found = muzero_targets.model_errors(
                state.network,
                seen.trajectory,
                seen.trajectory.extras["taken"],
                collect.successor_obs(seen),
                depth,
                _policy(state),
            )
        environments.close(base_env)
    finally:
        agent.close()
    return {name: [float(x) for x in values] for name, values in found.items()}


def draw_runs(runs: Sequence[str], depth: int, out: str | Path) -> dict[str, dict[str, list[float]]]:
    """Draw the errors of runs by depth into `out` (.png, .svg or .pdf), and return them.

    Raises UserError for a run without a learned model, and for runs whose errors are not of the same kind.
    """
    decoding = [_has_model_to_observe(name) for name in runs]
    if any(decoding) and not all(decoding):
        raise UserError("Draw runs of world models and runs of muzero and its variants in two figures.")
    if not any(decoding):
        found = {name: measure(name, depth) for name in runs}
        draw(found, out)
        return found
    loops = {name: _open_loop(name, depth) for name in runs}
    open_loop.draw(loops, out)
    return {name: one.errors() for name, one in loops.items()}


def film(runs: Sequence[str], depth: int, out: str | Path) -> dict[str, dict[str, list[float]]]:
    """Write a video of what the world model of one run predicts, and return its errors by depth.

    Raises UserError for several runs, and for a run without predicted images.
    """
    if len(runs) != 1:
        raise UserError(f"A video shows the predictions of one run, not of {len(runs)}. Name one, or use --out x.png.")
    found = _open_loop(runs[0], depth, filmed=True)
    record.write(out, open_loop.frames(found), open_loop.FPS)
    return {runs[0]: found.errors()}


def _open_loop(path: str, horizon: int, filmed: bool = False) -> open_loop.OpenLoop:
    agent = run.load(path)
    try:
        if filmed:
            open_loop.require_images(agent)
        return open_loop.measure(agent, horizon)
    finally:
        agent.close()


def _has_model_to_observe(path: str) -> bool:
    """Whether the State of the run's algorithm holds a world model (`nets.models.world_model`)."""
    module = catalog.module(run.Run(run.find(path)).settings.algorithm)
    return module.KIND == "control" and "model" in {field.name for field in dataclasses.fields(module.State)}


def _policy(state: State) -> Callable[[Tensor], Output]:
    """A function from the policy's parameters to its Output: the State's head, or a categorical over the actions."""
    if hasattr(state, "head"):
        head: Callable[[Tensor], Output] = state.head
        return head
    actions = getattr(state.network, "actions", None)  # chance outcomes may follow them
    return lambda logits: Categorical(logits[..., :actions])


def draw(found: dict[str, dict[str, list[float]]], out: str | Path) -> None:
    """Draw one panel per error with one line per run into `out` (.png, .svg or .pdf)."""
    figure, panels = plot.panels(out, 3)
    titles = {"value": "value, mean error", "policy": "policy, KL in nats", "reward": "reward, mean error"}
    for axes, (name, label) in zip(panels, titles.items(), strict=True):
        for run_name, errors in found.items():
            axes.plot(range(len(errors[name])), errors[name], marker="o", markersize=3, label=run_name)
        axes.set(xlabel="steps of the model", title=label)
    panels[0].legend(frameon=False, fontsize=8)
    plot.save(figure, out)
