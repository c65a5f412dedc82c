"""`foresight play`: watch an agent, step through sweeps, prompt a model, play a game."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from foresight.cli import dream, fields, games, screen
from foresight.errors import UserError
from foresight.runtime import kinds

if TYPE_CHECKING:  # these import torch
    from foresight.runtime.agent import Agent
    from foresight.runtime.catalog import State

FPS = 30.0


def play(
    run: Annotated[str, tyro.conf.Positional],
    gif: str | None = None,
    prompt: str | None = None,
    seed: int = 0,
    checkpoint: str = "latest",
    tokens: int | None = None,
    imagine: bool = False,
    side: Literal["first", "second"] = "first",
    simulations: int | None = None,
    device: str = "auto",
    completer: str | None = None,
) -> int:
    """Use a trained run: watch the agent, step through its sweeps, prompt the model, or play against it.

    Args:
        run: a run directory, the name of a bundled agent (connect_four, ppo/LunarLander-v3), or hub:OWNER/NAME.
        gif: a .gif or .mp4 file to write; default without a display: RUN/media/play.gif, or play.gif if RUN is a name.
        prompt: one prompt for a language model, instead of a conversation.
        seed: seed of the episode.
        checkpoint: latest, best, or a step.
        tokens: maximum tokens per answer; default: as in training.
        imagine: act inside the run's world model, from the keyboard; without a terminal or with --gif, a video of the
            agent that acts there.
        side: your side of a game.
        simulations: simulations per move of the agent in a game; default: as in its evaluation (play_simulations of
            its Config); 0: no search, the raw policy.
        device: auto, cpu, cuda or mps.
        completer: URL of a server that samples with its own weights (language runs).
    """
    fields.check_seed(seed)
    if tokens is not None and tokens < 1:
        raise UserError(f"--tokens must be at least 1, not {tokens}.")
    from foresight.runtime import run as runner

    agent = runner.load(run, checkpoint, device, completer)
    kind = agent.settings.kind
    trained = f"{agent.settings.algorithm} was trained on '{agent.settings.env}'"
    options = {
        "prompt": prompt, "tokens": tokens, "gif": gif, "seed": seed, "side": side, "simulations": simulations,
    }  # fmt: skip
    try:
        if not imagine and not kinds.get(kind).played:
            raise UserError(f"{trained}, which cannot be played. Evaluate it with: foresight eval {shlex.quote(run)}")
        for name, value in options.items():
            if name not in (IMAGINED if imagine else USED[kind]):
                other = "--imagine acts inside a world model" if imagine else trained
                fields.leave_out(play, {name: value}, f"is for {OF[name]}, and {other}")
        if imagine:
            dream.play(agent, Path(run), gif, seed, read_key)
        elif kind in DRAWN:
            DRAWN[kind](agent, Path(run), gif, seed)
        elif kind in PROMPTED:
            PROMPTED[kind](agent, prompt, tokens)
        else:
            games.against(agent, side == "first", simulations, _lines(keep_empty=True))
    except KeyboardInterrupt:
        screen.stdout().print()  # so that the next output starts on a new line
        raise
    finally:
        agent.close()
    return 0


def _watch(agent: Agent, run: Path, gif: str | None, seed: int) -> None:
    from foresight.runtime import environments
    from foresight.runtime.doctor import has_display
    from foresight.runtime.evaluation import record

    env = environments.single(agent.settings, render=True)
    frames = record.episode(agent.module, agent.state, env, seed)
    try:
        if gif is None and has_display():
            record.window(frames, FPS, f"{Path(agent.settings.algorithm).stem} on {agent.settings.env}")
            return
        path = Path(gif) if gif else (run / "media" if run.is_dir() else Path()) / "play.gif"
        count = record.write(path, frames, FPS)
        screen.stdout().print(f"{count} frames in {path}", markup=False, soft_wrap=True)
    finally:
        env.close()


def _sweeps(agent: Agent, run: Path, gif: str | None, seed: int) -> None:
    """Run the algorithm again from the start, and show the table after every sweep."""
    steps = agent.module.train(agent.config, agent.env)
    if gif is not None:
        from foresight.runtime.evaluation import record

        count = record.write(gif, record.sweeps(agent.env, steps), fps=4)
        screen.stdout().print(f"{count} frames in {gif}", markup=False, soft_wrap=True)
        return
    if not hasattr(agent.module, "picture"):
        raise UserError(f"{agent.settings.algorithm} has no picture for the terminal: use --gif out.gif.")
    console = screen.stdout()
    interactive = sys.stdin.isatty() and console.is_terminal
    if interactive:
        console.print("n or space: next sweep; g: go to the end; q: quit", style="dim")
    else:
        screen.note("sweeps 1, 2, 4, 8, ... and the last are shown; in a terminal, one by one")
    skipping, last = not interactive, None
    for step, metrics, state in steps:
        last = (step, metrics, state)
        if skipping:
            if not interactive and step & (step - 1) == 0:  # 1, 2, 4, ...: every sweep would be too long
                _show(console, agent, *last)
            continue
        _show(console, agent, *last)
        key = read_key()
        if key in ("q", "\x03", "\x04", "\x1b"):
            return
        skipping = key == "g"
    if last is not None and skipping and (interactive or last[0] & (last[0] - 1)):
        _show(console, agent, *last)


def _show(console: Console, agent: Agent, step: int, metrics: dict[str, Any], state: State) -> None:
    from foresight.runtime.monitoring.progress import number

    words = ", ".join(f"{name} {number(metrics[name])}" for name in agent.module.METRICS if name in metrics)
    console.print(f"\nsweep {step}  {words}", style="bold", markup=False)
    console.print(agent.module.picture(state, agent.env), markup=False, soft_wrap=True)


def _talk(agent: Agent, prompt: str | None, tokens: int | None) -> None:
    if tokens is not None:
        if not hasattr(getattr(agent.state, "config", None), "max_new_tokens"):
            raise UserError(f"--tokens is given, and {agent.settings.algorithm} has no max_new_tokens: leave it out.")
        agent.state.config = dataclasses.replace(agent.state.config, max_new_tokens=tokens)
    if prompt is not None:
        _answer(agent, prompt)
        return
    console = screen.stdout()
    if sys.stdin.isatty():
        task = agent.settings.env
        console.print(f"Trained on '{task}'. Each line is a separate prompt; an empty line ends.", style="dim")
    for line in _lines():
        _answer(agent, line)


def _answer(agent: Agent, prompt: str) -> None:
    """Print the completion and, of a question that the task can grade, a note of its reward."""
    text, task = agent.act(prompt), agent.env
    print(text, flush=True)
    example = next((e for e in (*task.test, *task.train) if prompt in (e.prompt, e.question)), None)
    if example is not None and task.grader is not None:
        screen.note(f"reward {task.grade([example], [text])[0]:g}: this is a question of '{agent.settings.env}'")


# How a run of each kind of environment is played; games are played against the agent.
DRAWN = {"control": _watch, "tabular": _sweeps}
PROMPTED = {"text": _talk}
# The options that each reads, and what each option is for.
USED = {
    "control": ("gif", "seed"), "tabular": ("gif",), "text": ("prompt", "tokens"), "game": ("side", "simulations"),
}  # fmt: skip
IMAGINED = ("gif", "seed")
OF = {
    "prompt": "language runs", "tokens": "language runs", "gif": "environments and grids", "seed": "environments",
    "side": "games", "simulations": "games",
}  # fmt: skip


def _lines(keep_empty: bool = False) -> Iterator[str]:
    """Lines of stdin, until the end or, unless `keep_empty`, an empty line."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):  # Windows has none
            importlib.import_module("readline")  # gives `input` line editing and history
    while True:
        try:
            line = input("> ") if terminal else input()
        except EOFError:
            if terminal:
                print()
            return
        if not line.strip() and not keep_empty:
            return
        yield line


def read_key() -> str:
    """One key, without Enter where the system supports it."""
    try:
        import termios
        import tty
    except ImportError:  # Windows
        return (input() or "n")[0]
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        return sys.stdin.read(1)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
