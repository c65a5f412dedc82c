"""Learned world models on the page: what they predict without seeing, and episodes inside them.

Open-loop predictions are measured once for a checkpoint and kept in memory. An episode inside is stateless: a seed and
the keys so far, replayed from the start.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foresight.errors import UserError
from foresight.runtime import imagined, run
from foresight.runtime.agent import Agent
from foresight.runtime.evaluation import open_loop
from foresight.studio.encode import whole
from foresight.studio.runs import Library

LONGEST = 60  # imagined steps of an open loop
SEQUENCES = 4  # that are shown
LONGEST_DREAM = 400  # keys of an episode inside
SCALE = 3  # pixels of a frame per pixel of an image
LEVELS = 9  # actions along the first dim of a Box
AGENT = "agent"  # the key of the agent's own action


class Models:
    """The runs of a library that learned a world model."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._agents: dict[tuple[str, str], Agent] = {}  # by name and checkpoint
        self._loops: dict[tuple[str, int, int], dict[str, Any]] = {}
        self._lock = threading.Lock()

    def names(self) -> list[dict[str, Any]]:
        """Id, name, algorithm and environment of every run with a world model and a checkpoint."""
        found = []
        for row in self._library.table():
            path = self._library.settings(row["id"]).get("algorithm") if row["kind"] == "control" else None
            if isinstance(path, str) and imagined.learns_model(path):
                found.append({key: row[key] for key in ("id", "name", "algorithm", "env", "state")})
        return found

    def _agent(self, name: str) -> Agent:
        path, key = self._library.path(name), (name, self._library.saved(name))
        if key not in self._agents:
            for old in self._agents.values():
                old.close()
            agent = run.load(path)
            imagined.require_model(agent)
            self._agents = {key: agent}  # a model and its replay may be large: one at a time
        return self._agents[key]

    def open_loop(self, name: str, horizon: int) -> dict[str, Any]:
        """Predictions over `horizon` steps: frames of truth, prediction and error, and the errors by step."""
        if not 1 <= horizon <= LONGEST:
            raise UserError(f"horizon must be between 1 and {LONGEST}, not {horizon}.")
        with self._lock:
            agent = self._agent(name)
            key = (name, agent.step, horizon)
            if key not in self._loops:
                self._loops = {
                    **dict(list(self._loops.items())[-3:]),
                    key: _document(open_loop.measure(agent, horizon)),
                }
            return {"run": name, "step": agent.step, **self._loops[key]}

    def dream(self, document: dict[str, Any]) -> dict[str, Any]:
        """An episode inside the model of `run`: after `seed` and `keys`, the frame, rewards, value and continuation.

        A key is an action by its number, or "agent" for the agent's own action.
        """
        name, seed, keys = document.get("run"), whole(document, "seed", 0, 0), document.get("keys", [])
        if not isinstance(name, str) or not isinstance(keys, list):
            raise UserError("Give run (an id) and keys (a list).")
        if len(keys) > LONGEST_DREAM:
            raise UserError(f"An episode inside a model has at most {LONGEST_DREAM} steps here: start a new one.")
        with self._lock:
            agent = self._agent(name)
            env = imagined.inside(agent, 1, None, first=True)
            choices = actions(env.spaces.action)
            generator = torch.Generator(env.device).manual_seed(seed)
            obs, rewards, over = env.reset(seed), [], None
            for key in keys:
                if key != AGENT and (type(key) is not int or not 0 <= key < len(choices)):
                    raise UserError(f"A key is a number from 0 to {len(choices) - 1}, or '{AGENT}'.")
                action = imagined.own_action(agent, env, generator) if key == AGENT else choices[key][1]
                feedback = env.step(action)
                rewards.append(float(feedback.reward[0]))
                obs = feedback.obs
                if feedback.cut[0]:
                    obs = feedback.final_obs
                    over = "the model ended it" if feedback.discount[0] == 0 else f"after {env.limit} steps"
                    break
            return {
                "run": name,
                "actions": [label for label, _ in choices],
                "image": png(env.model.obs.picture(env.model.obs.planes(obs))[0]) if env.render() is not None else None,
                "vector": obs[0].flatten().tolist() if env.render() is None else None,
                "rewards": rewards,
                "value": imagined.value(agent, env) if over is None else None,
                "over": over,
                "length": len(rewards),
            }


def actions(space: Any) -> list[tuple[str, Tensor]]:
    """The actions that a person can choose: label and `[1, ...]`; of a Box, levels along its first dim."""
    from gymnasium import spaces as gs

    if isinstance(space, gs.Discrete):
        return [(str(a), torch.tensor([a])) for a in range(int(space.n))]
    if not isinstance(space, gs.Box):
        raise UserError(f"Actions of {space} cannot be chosen here. Watch the agent instead.")
    center = torch.as_tensor((space.low + space.high) / 2, dtype=torch.float32)
    found = []
    for level in np.linspace(space.low[0], space.high[0], LEVELS):
        action = center.clone()
        action[0] = float(level)
        found.append((f"{level:+.2f}", action.unsqueeze(0)))
    return found


def _document(found: open_loop.OpenLoop) -> dict[str, Any]:
    errors = {name: [None if math.isnan(x) else x for x in row] for name, row in found.errors().items()}
    series = {}
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        if isinstance(value, Tensor) and field.name not in ("truth", "prediction"):
            series[field.name] = value[:SEQUENCES].float().tolist()
    document: dict[str, Any] = {"context": found.context, "images": found.images, "errors": errors, "series": series}
    if found.truth is None or found.prediction is None:
        return document
    truth, prediction = found.truth[:SEQUENCES], found.prediction[:SEQUENCES]
    if not found.images:
        document["truth"], document["prediction"] = truth.float().tolist(), prediction.float().tolist()
        return document
    error = (truth.float() - prediction.float()).abs().clamp(0, 255)
    for name, images in (("truth", truth), ("prediction", prediction), ("error", error)):
        document[name] = [[png(image) for image in sequence] for sequence in images]
    return document


def png(image: Any) -> str:
    """An image `[C, H, W]` or `[H, W, C]` in bytes as a data URL, enlarged."""
    from PIL import Image

    array = np.asarray(image.cpu() if isinstance(image, Tensor) else image)
    if array.ndim == 3 and array.shape[0] in (1, 3):
        array = np.moveaxis(array, 0, -1)
    array = array.clip(0, 255).astype(np.uint8)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    picture = Image.fromarray(array)
    picture = picture.resize((picture.width * SCALE, picture.height * SCALE), Image.Resampling.NEAREST)
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return url(stream.getvalue())


def url(picture: bytes) -> str:
    """A PNG as a data URL."""
    return "data:image/png;base64," + base64.b64encode(picture).decode()
