"""`foresight play RUN --imagine`: act inside a learned world model, from the keyboard or as a video."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.color import Color
from rich.style import Style
from rich.text import Text

from foresight.cli import screen
from foresight.errors import UserError
from foresight.runtime import imagined

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from foresight.runtime.agent import Agent
    from foresight.training.imagined_env import ImaginedEnv

FPS = 8.0
FRAMES = 200  # of a video
QUIT = ("q", "\x03", "\x04", "\x1b")
LEVELS = 9  # actions of a keyboard along the first dim of a Box


def play(agent: Agent, run: Path, gif: str | None, seed: int, read_key: Callable[[], str]) -> None:
    """Act inside the agent's world model: from the keyboard on a terminal, otherwise as a video of the agent.

    Raises UserError for a run without a world model, and for a video of observations that are not images.
    """
    imagined.require_model(agent)
    env = imagined.inside(agent, 1, None, first=True)
    if gif is None and sys.stdin.isatty() and screen.stdout().is_terminal:
        _keyboard(agent, env, seed, read_key)
        return
    from foresight.runtime.evaluation import record

    path = Path(gif) if gif else (run / "media" if run.is_dir() else Path()) / "imagined.gif"
    count = record.write(path, _frames(agent, env, seed), FPS)
    screen.stdout().print(f"{count} frames in {path}", markup=False, soft_wrap=True)


def _keyboard(agent: Agent, env: ImaginedEnv, seed: int, read_key: Callable[[], str]) -> None:
    import torch

    console, choices = screen.stdout(), actions(env)
    keys = f"{next(iter(choices))} to {list(choices)[-1]}: the actions"
    console.print(f"{keys}; space: the agent's action; r: a new episode; q: quit", style="dim")
    generator = torch.Generator(env.device).manual_seed(seed)
    obs, total, step = env.reset(seed), 0.0, 0
    _show(env, obs, f"step 0{_value(agent, env)}")
    while (key := read_key()) not in QUIT:
        if key == "r":
            seed += 1
            obs, total, step = env.reset(seed), 0.0, 0
            _show(env, obs, f"step 0{_value(agent, env)}")
            continue
        if key not in choices and key != " ":
            continue
        feedback = env.step(choices[key] if key != " " else imagined.own_action(agent, env, generator))
        reward, step = float(feedback.reward[0]), step + 1
        total += reward
        line = f"step {step}  reward {reward:.3f}  return {total:.3f}"
        if feedback.cut[0]:
            why = "the model ended it" if feedback.discount[0] == 0 else f"after {env.limit} steps"
            _show(env, feedback.final_obs, f"{line}  episode over: {why}")
            total, step = 0.0, 0
            _show(env, feedback.obs, f"step 0{_value(agent, env)}")
            continue
        _show(env, feedback.obs, line + _value(agent, env))


def actions(env: ImaginedEnv) -> dict[str, Tensor]:
    """The action `[1, ...]` of each key: digits for discrete ones, 1 to 9 along the first dim of others."""
    import torch
    from gymnasium import spaces as gs

    space = env.spaces.action
    if isinstance(space, gs.Discrete):
        names = "0123456789abcdefghijklmnop"
        return {names[a]: torch.tensor([a]) for a in range(min(int(space.n), len(names)))}
    if not isinstance(space, gs.Box):
        raise UserError(f"Actions of {space} cannot be typed. Make a video instead, with --gif out.gif.")
    center = torch.as_tensor((space.low + space.high) / 2, dtype=torch.float32)
    found = {}
    for i in range(LEVELS):
        action = center.clone()
        action[0] = float(space.low[0] + (space.high[0] - space.low[0]) * i / (LEVELS - 1))
        found[str(i + 1)] = action.unsqueeze(0)
    return found


def _frames(agent: Agent, env: ImaginedEnv, seed: int) -> Iterator[np.ndarray]:
    """One imagined episode of the agent. Raises UserError unless the model predicts images."""
    import torch

    from foresight.training.imagined_env import frame

    generator = torch.Generator(env.device).manual_seed(seed)
    env.reset(seed)
    shown = env.render()
    if shown is None:
        raise UserError(
            f"The world model of {agent.path} predicts numbers, not images. Act in it on a terminal, or draw what it "
            f"predicts with: foresight plot {shlex.quote(str(agent.path))} --model 50 --out predictions.png"
        )
    yield shown
    for _ in range(FRAMES):
        feedback = env.step(imagined.own_action(agent, env, generator))
        if feedback.cut[0]:
            yield frame(env.model.obs.picture(env.model.obs.planes(feedback.final_obs))[0])
            return
        with torch.no_grad():
            image = env.model.decode(env.state)[0]
        yield frame(image)


def _value(agent: Agent, env: ImaginedEnv) -> str:
    """The critic's value of the present state, if there is a critic."""
    found = imagined.value(agent, env)
    return "" if found is None else f"  value {found:.3f}"


def _show(env: ImaginedEnv, obs: Tensor, line: str) -> None:
    console = screen.stdout()
    from foresight.nets.models.world_model import Images

    if isinstance(env.model.obs, Images):
        console.print(blocks(env.model.obs.picture(env.model.obs.planes(obs))[0]))
    else:
        console.print(" ".join(f"{x:.3f}" for x in obs[0].flatten().tolist()), markup=False)
    console.print(line, style="bold", markup=False)


def blocks(image: Tensor) -> Text:
    """An image `[C, H, W]` as colored half blocks, two rows of pixels in a line of text."""
    color = image[-3:] if len(image) % 3 == 0 else image[-1:].expand(3, -1, -1)
    pixels = color.permute(1, 2, 0).tolist()
    drawn = Text()
    for top, bottom in zip(pixels[::2], pixels[1::2], strict=False):
        for upper, lower in zip(top, bottom, strict=True):
            drawn.append("▀", Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower)))
        drawn.append("\n")
    return drawn
