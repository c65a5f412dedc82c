"""The one exception for a user's mistake: its message is a sentence that states what to do."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Mapping


class UserError(ValueError):
    """A mistake that the user can fix. The command line prints the message without a traceback and exits with 2."""


class LostError(UserError):
    """A run lost something that it depends on (a cluster, a server). It saves a checkpoint before it ends."""


class BusyError(UserError):
    """A run directory is trained by another process, which must not be disturbed."""


class NotFinite(UserError):
    """A network output or a loss is not finite. The run ends before a weight is updated with it."""


def unknown(kind: str, name: str, valid: Iterable[str]) -> UserError:
    """The error for a name that does not exist, with the nearest valid name and the list of all."""
    names = sorted(valid)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return UserError(f"Unknown {kind} '{name}'.{hint} Valid: {', '.join(names) or 'none'}.")


def resume_command(path: object) -> str:
    """The command that continues the run in `path`, for messages: a path with spaces is quoted."""
    return f"foresight resume {shlex.quote(str(path))}"


def options(name: str, given: Mapping[str, object], error: Exception) -> UserError:
    """The error for an environment that cannot be made with the options `given`."""
    written = ", ".join(f"{key}={value}" for key, value in given.items())
    return UserError(f"Environment '{name}' does not take these options: {written} ({type(error).__name__}: {error}).")


def at_least(least: float, config: object, *names: str) -> None:
    """Raise UserError unless each of these fields of `config` is at least `least`. NaN is not."""
    for name in names:
        if not getattr(config, name) >= least:  # not "<", which is false for NaN
            raise UserError(f"{name} must be at least {least}, not {getattr(config, name)}.")


def between(least: float, most: float, config: object, *names: str) -> None:
    """Raise UserError unless each of these fields of `config` is in [`least`, `most`]."""
    for name in names:
        if not least <= getattr(config, name) <= most:
            raise UserError(f"{name} must be between {least} and {most}, not {getattr(config, name)}.")


def share(config: object, *names: str) -> None:
    """Raise UserError unless each of these fields of `config` is a share below all, in [0, 1). NaN is not."""
    for name in names:
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"{name} is a share from 0 to below 1, not {getattr(config, name)}.")
