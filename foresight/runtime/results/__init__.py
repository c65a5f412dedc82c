"""Results, suites, figures and plots."""

from __future__ import annotations
