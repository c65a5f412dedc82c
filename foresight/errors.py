"""The one exception for a user's mistake: its text is a sentence that says what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user can mend. The command line prints it without a traceback and exits with 2."""


class LostError(UserError):
    """What a run depends on is gone (a cluster, a server): what was learned is saved before the run ends."""


class NotFinite(UserError):
    """A network gave, or a loss became, a number that is not finite: the run ends before it reaches a weight."""


def unknown(kind: str, name: str, valid: Iterable[str]) -> UserError:
    """The error for a name that does not exist: the nearest name, then all valid ones."""
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return UserError(f"Unknown {kind} '{name}'.{hint} Valid: {', '.join(names) or 'none'}.")


def at_least(least: float, config: object, *names: str) -> None:
    """Raise UserError unless each of these fields of `config` is at least `least`."""
    for name in names:
        if not getattr(config, name) >= least:  # and not "<": NaN is less than nothing
            raise UserError(f"{name} must be at least {least}, not {getattr(config, name)}.")


def between(least: float, most: float, config: object, *names: str) -> None:
    """Raise UserError unless each of these fields of `config` lies between `least` and `most`, both included."""
    for name in names:
        if not least <= getattr(config, name) <= most:
            raise UserError(f"{name} must be between {least} and {most}, not {getattr(config, name)}.")
