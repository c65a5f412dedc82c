"""The configuration of a run: Config fields, presets and command line, resolved into `Settings`."""

from __future__ import annotations
