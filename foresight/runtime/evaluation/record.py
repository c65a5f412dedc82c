"""Videos and GIFs: an agent in a control environment, and dynamic programming sweeping over a grid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foresight.data import trees
from foresight.envs.base import Env
from foresight.envs.tabular.mdp import MDP
from foresight.errors import UserError
from foresight.runtime import machine
from foresight.runtime.catalog import Algorithm, State, Steps

Frame = NDArray[np.uint8]
SUFFIXES = (".mp4", ".gif")


def write(path: str | Path, frames: Iterable[Frame], fps: float = 30, exact: bool = False) -> int:
    """Write RGB frames `[height, width, 3]` uint8 to an .mp4 or .gif, one at a time; returns how many.

    `exact`: an .mp4 that is data, of any size, whose pixels differ by no more than the rounding of colors.

    Raises `UserError` for another suffix, for no frames, and if the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"Cannot record '{path}': the name must end in {' or '.join(SUFFIXES)}.")
    stream = iter(frames)
    first = next(stream, None)
    if first is None:
        raise UserError("There is nothing to record: the environment rendered no frame.")
    import imageio.v2 as imageio

    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".gif":
            writer: Any = imageio.get_writer(path, duration=1000 / fps, loop=0)
        elif exact:  # a key frame every two frames, as LeRobot has it, so that any one is found fast
            parameters = ["-crf", "0", "-g", "2"]
            writer = imageio.get_writer(
                path, fps=fps, macro_block_size=1, codec="libx264", pixelformat="yuv444p", output_params=parameters
            )
        else:  # yuv420p, which every browser plays, halves the color planes: the sides must be even
            writer = imageio.get_writer(path, fps=fps, macro_block_size=2, codec="libx264", quality=7)
        with writer:
            for frame in _chain(first, stream):
                writer.append_data(_even(frame) if path.suffix.lower() == ".mp4" and not exact else frame)
                count += 1
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror or error}.") from error
    return count


def episode(module: Algorithm, state: State, env: Env, seed: int = 0, limit: int = 2000) -> Iterator[Frame]:
    """The frames of one greedy episode of env 0, at most `limit`; `env` must have been made with `render=True`.

    Raises `UserError` if the environment cannot be rendered.
    """
    obs, carry, device = env.reset(seed), None, machine.device_of(state)
    for _ in range(limit):
        frame = env.render()
        if frame is None:
            raise UserError(f"'{env.name}' cannot be recorded: it renders no RGB frames.")
        yield np.asarray(frame, dtype=np.uint8)
        action, _, carry = module.act(state, trees.to(obs, device), carry)
        feedback = env.step(action.cpu())
        if hasattr(module, "rewarded"):
            carry = module.rewarded(carry, feedback.reward)
        if bool(feedback.cut[0]):
            return
        obs = feedback.obs


def _chain(first: Frame, rest: Iterator[Frame]) -> Iterator[Frame]:
    yield first
    yield from rest


def _even(frame: Frame) -> Frame:
    height, width = frame.shape[:2]
    return np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def sweeps(mdp: MDP, steps: Steps, dense: int = 12, growth: float = 1.2) -> Iterator[Frame]:
    """Dynamic programming on a grid, sweep by sweep: values as colors and text, the policy as arrows.

    `steps` is what the algorithm's `train` yields. The first `dense` sweeps are all drawn, then fewer and fewer
    (each at least `growth` times the one before), and always the last.

    Raises `UserError` for an environment without a layout.
    """
    from foresight.envs.tabular import render

    def draw(step: int, state: State) -> Frame:
        frame = render.image(mdp, state.values, state.policy, title=f"{mdp.name}, sweep {step}")
        if frame is None:
            raise UserError(f"'{mdp.name}' cannot be recorded: it is not a grid.")
        return frame

    drawn, last = 0, None
    for step, _, state in steps:
        last = (step, state)
        if step <= dense or step >= growth * drawn:
            drawn = step
            yield draw(step, state)
    if last is not None and drawn != last[0]:
        yield draw(*last)


def window(frames: Iterable[Frame], fps: float = 30, title: str = "foresight") -> int:
    """Show frames in a window until they end or it is closed; returns how many were shown."""
    try:
        import pygame
    except ImportError as error:
        raise UserError(
            "A window needs pygame. Install it with: pip install pygame-ce, or use --gif out.gif."
        ) from error
    pygame.init()
    clock, screen, count = pygame.time.Clock(), None, 0
    try:
        for frame in frames:
            if screen is None:
                screen = pygame.display.set_mode((frame.shape[1], frame.shape[0]))
                pygame.display.set_caption(title)
            if any(event.type == pygame.QUIT for event in pygame.event.get()):
                break
            screen.blit(pygame.surfarray.make_surface(frame.swapaxes(0, 1)), (0, 0))
            pygame.display.flip()
            clock.tick(fps)
            count += 1
    finally:
        pygame.quit()
    return count
