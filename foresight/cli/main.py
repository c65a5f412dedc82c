"""The command `foresight`. It starts in a quarter of a second: a command is imported alone, torch if it needs it."""

from __future__ import annotations

import builtins
import errno
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foresight.errors import UserError, unknown

ABOUT = """Planning and reinforcement learning, from the Bellman equation to language models that reason.

Start with `foresight train value_iteration --env GridWorld8x8` (a second), `foresight train ppo --env CartPole-v1`
(seconds) or `foresight train grpo --preset smollm2-addition` (minutes).
"""
PACKAGE = Path(__file__).parents[1]  # the files of `foresight`
MISUSE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
# What the system may refuse wherever a file is opened, and what to do.
ROOM, PLACE = "Free space, or write to another disk.", "Choose a place where you may write, or change its permissions."
ADVICE = {
    errno.ENOSPC: ROOM, errno.EDQUOT: ROOM, errno.EACCES: PLACE, errno.EPERM: PLACE, errno.EROFS: PLACE,
    errno.ENAMETOOLONG: "Choose a shorter name.",
}  # fmt: skip
# How torch reports it, on a CPU and on a GPU: as a RuntimeError, which is also raised for bugs.
OUT_OF_MEMORY = (  # in what torch and numpy raise; the last two for sizes that no machine has
    "can't allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed",
    "array is too big",
)  # fmt: skip
# The extra that installs each module; a module that is not listed is installed under its own name.
EXTRA_OF = {
    "ale_py": "atari", "cv2": "atari", "Box2D": "box2d", "mujoco": "mujoco", "minigrid": "minigrid",
    "reasoning_gym": "reasoning", "trl": "peers", "stable_baselines3": "peers", "quantecon": "peers",
    "wandb": "wandb", "trackio": "trackio", "pyspiel": "games", "sklearn": "images", "ray": "ray", "optuna": "tune",
    "fastapi": "studio", "uvicorn": "studio", "mcp": "agents",
}  # fmt: skip
# Every command, and the module of `foresight.cli` that has its function, which is called `eval_` where `eval` is taken.
COMMANDS = {
    "list": "library", "show": "library", "train": "train", "resume": "train", "eval": "runs", "play": "play",
    "match": "games", "plan": "planners", "genplan": "planners", "plot": "runs", "studio": "studio",
    "attention": "attention", "data": "data", "export": "runs", "agent": "agent", "team": "team", "stack": "stack",
    "live": "live", "think": "think", "faithfulness": "think", "bench": "tools", "reproduce": "tools", "tune": "tune",
    "doctor": "tools",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default the process's own); returns the exit code."""
    plain = warnings.formatwarning
    warnings.formatwarning = functools.partial(_format, plain)
    try:
        return _run(argv)
    finally:
        warnings.formatwarning = plain


def _run(argv: Sequence[str] | None) -> int:
    if "" not in sys.path:  # as with `python -m`: modules in the working directory have names, `--env mine:Env-v0`
        sys.path.append("")
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except UserError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if not module or module == "foresight":
            raise
        extra = EXTRA_OF.get(module)
        target = f"'foresight[{extra}]'" if extra else module.replace("_", "-")
        return _fail(f"The package '{module}' is missing: pip install {target}")
    except BrokenPipeError:
        # The reader closed the pipe (| head): print nothing, and keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in ADVICE:
            raise
        return _fail(f"{error.strerror}: {error.filename or 'the disk'}. {ADVICE[error.errno]}")
    except (MemoryError, RuntimeError, ValueError) as error:
        if not (isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)):
            raise
        return _fail(
            f"There is not enough memory ({_first_line(error)}). Lower what needs most of it, such as --replay-size, "
            "--batch-size, --num-envs or --micro-tokens; a run that has a checkpoint continues with foresight resume."
        )
    except KeyboardInterrupt as stop:
        if str(stop):  # a stopped run prints how to resume it
            from foresight.runtime.distributed import torchrun

            if torchrun.first():
                _print(str(stop))
        return int(getattr(stop, "exit_code", INTERRUPTED))
    except SystemExit as stop:  # tyro has printed its message
        return stop.code if isinstance(stop.code, int) else int(bool(stop.code))


def _dispatch(argv: list[str]) -> int:
    import tyro

    if argv[:1] == ["--version"]:
        from foresight import __version__

        print(f"foresight {__version__}")
        return 0
    from foresight.cli import fields

    argv = fields.expanded(argv)
    name = argv[0] if argv else "--help"
    if not name.startswith("-") and name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    if name == "train" and len(argv) > 1 and not argv[1].startswith("-"):
        from foresight.cli.train import train_command

        return train_command(argv[1:])
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    if name in COMMANDS:  # the others are not imported
        fields.check_once(argv[1:])
        return int(tyro.cli(command(name), prog=f"foresight {name}", args=argv[1:], config=config) or 0)
    everything = {name: command(name) for name in COMMANDS}
    code = tyro.extras.subcommand_cli_from_dict(
        everything, prog="foresight", description=ABOUT, args=argv or ["--help"], config=config
    )
    return int(code or 0)


def command(name: str) -> Callable[..., Any]:
    """The function of the command called `name`."""
    module = importlib.import_module(f"foresight.cli.{COMMANDS[name]}")
    return getattr(module, f"{name}_" if hasattr(builtins, name) else name)


def _format(plain: Callable[..., str], message: Warning | str, category: type[Warning], file: str, *rest: Any) -> str:
    """A warning of this package as one line, like the notes of training; one of another as `plain` has it."""
    if category is UserWarning and Path(file).is_relative_to(PACKAGE):
        return f"note: {message}\n"
    return plain(message, category, file, *rest)


def _first_line(error: Exception) -> str:
    text = str(error).partition("\n")[0].rstrip(".")
    return text.rpartition("CPUAllocator: ")[2] or type(error).__name__


def _fail(message: str) -> int:
    _print(message, "error: ")
    return MISUSE


def _print(message: str, head: str = "") -> None:
    from rich.text import Text

    from foresight.cli.screen import stderr

    stderr().print(Text(head, "bold red") + Text(message, "not bold default"), soft_wrap=True)
