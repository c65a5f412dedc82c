"""What a world model predicts without seeing: open-loop predictions, their error by horizon, pictures and videos.

The model observes some steps of an episode that the agent acts in, the context. Then it gets only the actions, and
predicts observations, rewards and continuations, which are compared with what happened. Of a model that predicts no
observations, latent states are compared with those that the true observations have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foresight.data.trajectory import Trajectory, Tree, tree_map
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Frame
from foresight.errors import UserError
from foresight.nets.models import latent_actor
from foresight.nets.models.world_model import Images, decodes
from foresight.runtime import environments, imagined, machine
from foresight.runtime.agent import Agent
from foresight.runtime.catalog import Algorithm, State
from foresight.runtime.evaluation.evaluate import EVALUATION_SEED, preserve_generators
from foresight.runtime.kinds import control
from foresight.runtime.results import plot

FPS = 8.0  # of a video of predictions
HORIZON = 45  # imagined steps of a video
CONTEXT = 5  # observed steps, as in the figures of the papers
SEEN, IMAGINED = (40, 160, 80), (230, 120, 30)  # border of context and of imagined frames: green, orange
BORDER, SCALE = 4, 3  # pixels of the border; pixels of a frame per pixel of an image
SHOWN = 4  # sequences of a video, and numbers of a vector that are drawn
ROWS = ("truth", "prediction", "error")  # of a video, from the top


@dataclasses.dataclass(frozen=True)
class OpenLoop:
    """Predictions `[B, T]`; the first `context` steps were observed, the others imagined.

    - `truth`, `prediction`: observations, images `[B, T, C, H, W]` in bytes or vectors `[B, T, D]`; a model without a
      decoder has neither. Of the context it is the reconstruction;
    - `reward`, `discount` and what was `predicted_reward`, `predicted_discount`: of the step that led to each
      observation; 0 in the context, without γ; None if they are not predicted;
    - `value`: the critic's, None if there is none;
    - `valid`: 1 where the observation is of the same episode as the context;
    - `reached`: 1 where reward and continuation are, so also those of the step that ended the episode;
    - `latent`, `still`: squared distances of the predicted latent state, and of the last observed one, from that of the
      true observation; None with a decoder.
    """

    context: int
    truth: Tensor | None
    prediction: Tensor | None
    reward: Tensor
    predicted_reward: Tensor | None
    discount: Tensor
    predicted_discount: Tensor | None
    value: Tensor | None
    valid: Tensor
    reached: Tensor
    latent: Tensor | None = None
    still: Tensor | None = None

    @property
    def images(self) -> bool:
        """Whether observations are images."""
        return self.truth is not None and self.truth.dim() == 5

    def errors(self) -> dict[str, list[float]]:
        """Mean errors by imagined step, from step 0 (the last observed one) on; NaN where no episode is that long.

        `observation`: squared, mean over pixels in [0, 1] or over the vector; `reward` and `continuation`: absolute;
        `latent`: squared, as a share of that of the prediction that nothing changes, of which step 0 has none.
        """
        found = {}
        if self.prediction is not None and self.truth is not None:
            scale = 255.0 if self.images else 1.0
            found["observation"] = ((self.prediction.float() - self.truth.float()) / scale).square().flatten(2).mean(-1)
        if self.predicted_reward is not None and self.predicted_discount is not None:
            found["reward"] = (self.predicted_reward - self.reward).abs()
            found["continuation"] = (self.predicted_discount - self.discount).abs()
        late = slice(self.context - 1, None)
        masks = {name: (self.valid if name == "observation" else self.reached)[:, late] for name in found}
        errors = {
            name: ((error[:, late] * masks[name]).sum(0) / masks[name].sum(0)).tolist()  # 0 / 0 is NaN
            for name, error in found.items()
        }
        if self.latent is not None and self.still is not None:
            latent, still = ((x * self.valid)[:, late].sum(0) for x in (self.latent, self.still))
            errors["latent"] = torch.where(still > 0, latent / still, torch.nan).tolist()
        return errors


def measure(agent: Agent, horizon: int, count: int = 64) -> OpenLoop:
    """At least `count` open-loop predictions over `horizon` steps, in environments that the agent was not trained on.

    The agent acts as in evaluation. A step of a model of blocks of actions is a block; as each is planned, there is one
    prediction in each environment. Raises UserError for a run without a world model, and for a horizon below 1.
    """
    if horizon < 1:
        raise UserError(f"The number of model steps must be at least 1, not {horizon}.")
    imagined.require_model(agent)
    if getattr(agent.state.model, "block", None) is not None:
        count = control.EVALUATION_ENVS
    settings = dataclasses.replace(agent.settings, episodes=control.EVALUATION_ENVS)
    env = environments.evaluation(settings, agent.env)
    try:
        return observe_and_predict(agent.module, agent.state, env, settings.seed, horizon, count)
    finally:
        if env is not agent.env:
            environments.close(env)


def observe_and_predict(
    module: Algorithm,
    state: State,
    env: Env,
    seed: int,
    horizon: int = HORIZON,
    count: int = control.EVALUATION_ENVS,
) -> OpenLoop:
    """Open-loop predictions in `env`, in which the agent acts as in evaluation; see `measure`."""
    device, block = machine.device_of(state), getattr(state.model, "block", None)
    context = CONTEXT if block is None else 1  # models of blocks of actions begin from one observation
    length = (context + horizon) * (block or 1)
    steps = length * math.ceil(count / env.num_envs)

    def act(obs: Tree, carry: Tree) -> tuple[Tensor, dict[str, Tensor], Tree]:
        action, _, carry = module.act(state, obs, carry, explore=False)
        return action, {}, carry

    with preserve_generators(state):
        seen = collect.segment(env, env.reset(EVALUATION_SEED + seed), act, steps, device, Episodes())
        rows = seen.trajectory.map(lambda x: x.unflatten(1, (-1, length)).flatten(0, 1))
        generator = torch.Generator(device).manual_seed(seed)
        return predict(state, env.spaces.action, rows, context, generator)


@torch.no_grad()
def predict(state: State, space: Any, rows: Trajectory, context: int, generator: torch.Generator) -> OpenLoop:
    """Open-loop predictions of the sequences `rows` `[B, T]` with actions in `space`, after `context` of them.

    Of a model of blocks of actions, T is a multiple of their length, and context and predictions are counted in blocks.
    """
    model = state.model
    action = latent_actor.features_of(space, rows.action.flatten(0, 1)).unflatten(0, rows.shape)
    if (block := getattr(model, "block", None)) is not None:
        rows, action = _blocks(rows, block), action.unflatten(1, (-1, block)).flatten(2)
    batch, length = rows.shape
    start = tree_map(lambda x: x[:, :context], rows.obs)
    observed = model.observe(model.initial(batch), start, action[:, :context], rows.cut[:, :context], generator)
    states = [{name: x[:, t] for name, x in observed.items()} for t in range(context)]
    zeros = torch.zeros(batch, device=action.device)
    rewards, continuations = [zeros] * context, [zeros] * context
    gamma, now = imagined.gamma_of(state), model.begin(states[-1])
    for t in range(context - 1, length - 1):
        now, reward, continuation = model.advance(now, action[:, t], generator)
        states.append(now)
        if reward is not None:
            rewards.append(reward)
            continuations.append((continuation / gamma).clamp(0, 1))
    predicts = len(rewards) == length
    latent = still = None
    if not decodes(model):
        target = model.features(model.observe(model.initial(batch), rows.obs, action, rows.cut, None))
        latent = (torch.stack([model.features(one) for one in states], 1) - target).square().sum(-1).cpu()
        still = (target[:, context - 1 : context] - target).square().sum(-1).cpu()
    decoded = [model.decode(one) for one in states] if decodes(model) else None
    critic = getattr(state, "critic", None)
    values = [critic(model.features(one)).mean() for one in states] if critic is not None else None
    before = slice(context - 1, length - 1)  # the step that led to each imagined observation
    going = torch.cat([torch.ones_like(rows.cut[:, :context]), (1 - rows.cut[:, before]).cumprod(1)], 1)
    reached = torch.cat([going[:, :1], going[:, :-1]], 1)

    def arrived(x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x[:, :context]), x[:, before]], 1).cpu()

    return OpenLoop(
        context,
        None if decoded is None else truth(model, rows.obs).cpu(),
        None if decoded is None else torch.stack(decoded, 1).cpu(),
        arrived(rows.reward),
        torch.stack(rewards, 1).cpu() if predicts else None,
        arrived(rows.discount),
        torch.stack(continuations, 1).cpu() if predicts else None,
        None if values is None else torch.stack(values, 1).cpu(),
        going.cpu(),
        reached.cpu(),
        latent,
        still,
    )


def _blocks(rows: Trajectory, block: int) -> Trajectory:
    """The rows `[B, T]` of which a block of actions begins, `[B, T / block]`, with what came of it."""
    reward, discount, cut = (x.unflatten(1, (-1, block)) for x in (rows.reward, rows.discount, rows.cut))
    first = rows.map(lambda x: x[:, ::block])
    return first.replace(reward=reward.sum(-1), discount=discount.prod(-1), cut=cut.amax(-1))


def require_images(agent: Agent) -> None:
    """Raises UserError unless the agent has a world model that predicts images."""
    imagined.require_model(agent)
    model = agent.state.model
    if not (decodes(model) and isinstance(getattr(model, "obs", None), Images)):
        raise UserError(
            "Only predicted images make a video. Draw predicted numbers with: foresight plot RUN --model 50 --out x.png"
        )


def truth(model: Any, obs: Tree) -> Tensor:
    """Observations `[B, T, ...]` as the model decodes them: images `[B, T, C, H, W]` or vectors `[B, T, D]`."""
    if isinstance(getattr(model, "obs", None), Images):
        shape = obs.shape[: obs.dim() - len(model.obs.order)]
        found: Tensor = model.obs.picture(model.obs.planes(obs))
        return found.unflatten(0, shape)
    flat: Tensor = model.obs.flat(obs)
    return flat


def frames(found: OpenLoop) -> Iterator[Frame]:
    """A video of the first sequences side by side: rows truth, prediction and error, one frame a step.

    Frames of the context have a green border, imagined ones an orange one. The model must predict images.
    """
    assert found.images and found.prediction is not None and found.truth is not None
    order = found.valid.sum(1).argsort(descending=True, stable=True)[:SHOWN]  # the longest
    true, predicted = (_rgb(x[order]) for x in (found.truth, found.prediction))
    error = (predicted.int() - true.int()).abs().to(torch.uint8)
    for t in range(true.shape[1]):
        color = SEEN if t < found.context else IMAGINED
        columns = [torch.cat([_framed(x[i, t], color) for x in (true, predicted, error)], 0) for i in range(len(order))]
        yield torch.cat(columns, 1).numpy()


def _rgb(images: Tensor) -> Tensor:
    """`[..., H, W, 3]` of images `[..., C, H, W]`: the newest of a stack of them."""
    color = images[..., -3:, :, :] if images.shape[-3] % 3 == 0 else images[..., -1:, :, :].expand(
        *images.shape[:-3], 3, -1, -1
    )  # fmt: skip
    return color.movedim(-3, -1)


def _framed(image: Tensor, color: tuple[int, int, int]) -> Tensor:
    """An image `[H, W, 3]` enlarged, with a border."""
    large = image.repeat_interleave(SCALE, 0).repeat_interleave(SCALE, 1)
    height, width, _ = large.shape
    framed = torch.tensor(color, dtype=torch.uint8).repeat(height + 2 * BORDER, width + 2 * BORDER, 1)
    framed[BORDER:-BORDER, BORDER:-BORDER] = large
    return framed


def draw(found: dict[str, OpenLoop], out: str | Path) -> None:
    """Draw into `out` (.png, .svg or .pdf): the errors by horizon, one line per run; then one rollout of the first run.

    Of the rollout: reward, continuation and value, and up to 4 numbers of a vector, with what happened in black.
    """
    first = next(iter(found.values()))
    rollout = _rollout(first)
    errors = {run: one.errors() for run, one in found.items()}
    names = list(next(iter(errors.values())))
    figure, panels = plot.panels(out, len(names) + len(rollout))
    for axes, name in zip(panels, names, strict=False):
        for run, values in errors.items():
            if name in values:
                axes.plot(values[name], marker="o", markersize=3, label=run)
        axes.set(xlabel="imagined steps", title=f"{name}, mean error")
    panels[0].legend(frameon=False, fontsize=8)
    for axes, (name, (predicted, true)) in zip(panels[len(names) :], rollout.items(), strict=True):
        if true is not None:
            axes.plot(true, color="black", linewidth=1, label="truth")
        axes.plot(predicted, linewidth=1.2, label="prediction")
        axes.axvspan(0, first.context - 1, color=[x / 255 for x in SEEN], alpha=0.15)
        axes.set(xlabel="steps; shaded: observed", title=name)
    if rollout:
        panels[len(names)].legend(frameon=False, fontsize=8)
    plot.save(figure, out)


def _rollout(found: OpenLoop) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
    """The longest sequence: `(prediction, truth)` by name, from the first step to its end."""
    i = int(found.valid.sum(1).argmax())
    length = int(found.reached[i].sum())
    unseen = [math.nan] * found.context

    def row(x: Tensor, known: bool = True) -> np.ndarray:
        values = x[i, :length].float().tolist()
        return np.array(values if known else unseen + values[found.context :])

    drawn: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
    if found.predicted_reward is not None and found.predicted_discount is not None:
        drawn["reward"] = row(found.predicted_reward, False), row(found.reward, False)
        drawn["continuation"] = row(found.predicted_discount, False), row(found.discount, False)
    if found.value is not None:
        drawn["value"] = (row(found.value), None)
    if found.prediction is not None and found.truth is not None and not found.images:
        for d in range(min(SHOWN, found.truth.shape[-1])):
            drawn[f"observation {d}"] = (row(found.prediction[..., d]), row(found.truth[..., d]))
    return drawn
