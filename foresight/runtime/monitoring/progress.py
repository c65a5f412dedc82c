"""The live display of a run: a repainted view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
LINE_EVERY = 10.0  # seconds between lines without a terminal
HISTORY = 4096  # stored values of the first metric; when full, every other one is dropped


class Progress:
    """A progress bar with time left, speed and a few metrics; for text runs also a table of sampled completions.

    `total` is in `unit`; `metrics` are the names to show, in order, and the first one is also drawn as a curve.
    On a terminal it repaints in place twice a second; elsewhere it writes a plain line every `line_every` seconds,
    without control codes. It writes to stderr and leaves stdout to the program. `quiet` shows nothing.

    >>> with Progress("ppo on CartPole-v1", 100_000, "env steps", ("return",)) as progress:
    ...     progress.update(1024, {"return": 23.1})
    """

    def __init__(
        self,
        title: str,
        total: int,
        unit: str,
        metrics: Sequence[str] = (),
        quiet: bool = False,
        console: Console | None = None,
        line_every: float = LINE_EVERY,
    ) -> None:
        self.title, self.total, self.unit, self.metrics = title, total, unit, tuple(metrics)
        self.console = console or Console(stderr=True)
        self._quiet, self._line_every = quiet, line_every
        self._live: Live | None = None
        self._step = self._first = 0
        self._latest: dict[str, float] = {}
        self._history: list[float] = []
        self._every, self._seen = 1, 0
        self._samples: list[Mapping[str, Any]] = []
        self._notes: deque[str] = deque(maxlen=3)
        self._clock: deque[tuple[float, int]] = deque(maxlen=64)
        self._newest = (0.0, 0)  # `_clock` has an entry each quarter of a second, and a run may end between two
        self._began = self._last_line = self._paused_at = 0.0
        self._paused = ""

    def header(self, text: str) -> None:
        """Write `text`, if there is any, as a line above everything that is repainted."""
        if text and not self._quiet:
            self._write(text)

    def start(self, step: int = 0) -> None:
        """Start the display; a resumed run starts at `step`."""
        self._step = self._first = step
        self._began = time.perf_counter()
        self._newest = (self._began, step)
        self._clock.append(self._newest)
        if self._quiet:
            return
        if self.console.is_terminal and not self.console.is_dumb_terminal and not self.console.is_jupyter:
            self._live = Live(get_renderable=self._paint, console=self.console, refresh_per_second=2)
            self._live.start()
        else:
            self._write(f"{self.title}: {self.total:,} {self.unit}" + (f", from {step:,}" if step else ""))

    def update(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Record a step and its metrics. This is cheap: on a terminal nothing is drawn here."""
        now = time.perf_counter()
        self._step = step
        self._newest = (now, step)
        if not self._clock or now - self._clock[-1][0] > 0.25:
            self._clock.append(self._newest)
        for key, value in (metrics or {}).items():
            if key == "samples":
                self._samples = list(value) or self._samples
            elif isinstance(value, int | float):
                self._latest[key] = float(value)
        if self.metrics and metrics and self.metrics[0] in metrics:
            self._add_to_curve(float(metrics[self.metrics[0]]))
        if self._live is None and not self._quiet and now - self._last_line >= self._line_every:
            self._write(self.line())
            for sample in self._samples[:2]:
                question, answer = _short(sample.get("prompt"), 60), _short(sample.get("completion"), 60)
                self._write(f"  {question} → {answer}  (reward {number(sample.get('reward'))})")

    def note(self, text: str) -> None:
        """Show a message, such as a health warning; the last three stay visible."""
        if text in self._notes:
            return
        self._notes.append(text)
        if not self._quiet and self._live is None:
            self._write(f"note: {text}")

    def status(self, text: str) -> None:
        """Show what runs instead of training ("evaluating", "saving"); "" when training continues."""
        if text and text != self._paused and not self._quiet and self._live is None:
            self._write(text)
        if text and not self._paused:
            self._paused_at = time.perf_counter()
        elif self._paused and not text:  # the pause does not count as slow training
            pause = time.perf_counter() - self._paused_at
            self._clock = deque(((then + pause, step) for then, step in self._clock), maxlen=self._clock.maxlen)
            self._newest = (self._newest[0] + pause, self._newest[1])
        self._paused = text

    def close(self) -> None:
        """Stop the display and keep its last state; closing twice is allowed."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._began and not self._quiet:
            self._write(self.line(ended=True))
        self._quiet = True

    def __enter__(self) -> Progress:
        if not self._began:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def speed(self) -> float:
        """`unit` per second over about the last 15 seconds; 0 before there are two measurements."""
        first, last = self._clock[0] if self._clock else self._newest, self._newest
        return (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else 0.0

    def line(self, ended: bool = False) -> str:
        """The display as one plain line. A run that ended shows no time left, whether or not it reached `total`."""
        share = self._step / self.total if self.total else 1.0
        count = f"{self._step:,} {self.unit}" if ended else f"{self._step:,}/{self.total:,} {self.unit} ({share:.0%})"
        parts = [count, *self._pace(ended)]
        return "  ".join(parts + [f"{name} {number(self._latest[name])}" for name in self._shown()])

    def _pace(self, ended: bool = False) -> list[str]:
        parts = []
        if self.speed > 0:
            slow = f"{number(1 / self.speed)} s per {self.unit.removesuffix('s')}"
            parts.append(slow if self.speed < 0.5 else f"{number(self.speed)} {self.unit}/s")
            if self._step < self.total and not ended:
                parts.append(f"{_clock((self.total - self._step) / self.speed)} left")
        parts.append(f"{_clock(time.perf_counter() - self._began)} so far")
        return parts

    def _shown(self) -> list[str]:
        return [name for name in self.metrics if name in self._latest]

    def _paint(self) -> RenderableType:
        head = Table.grid(padding=(0, 2), expand=False)
        share = f"{self._step / self.total:.0%}" if self.total else ""
        head.add_row(
            Text(self.title, "bold"),
            ProgressBar(total=max(self.total, 1), completed=min(self._step, self.total), width=24),
            Text(share),
        )
        count = f"{self._step:,} of {self.total:,} {self.unit}"
        parts: list[RenderableType] = [head, Text("  ".join([count, *self._pace()]), "dim")]
        if self._paused:
            parts.append(Text(self._paused, "dim italic"))
        if self._shown():
            grid = Table.grid(padding=(0, 3))
            shown = [(name, number(self._latest[name])) for name in self._shown()]
            grid.add_row(*(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in shown))
            parts.append(grid)
        if len(self._history) > 1:
            low, high = min(self._history), max(self._history)
            name, blocks, ends = self.metrics[0], sparkline(self._history, 48), f"{number(low)} to {number(high)}"
            parts.append(Text.assemble((f"{name} ", "dim"), (blocks, "green"), (f"  {ends}", "dim")))
        if self._samples:
            parts.append(samples_table(self._samples, self.console.width))
        parts.extend(Text(f"• {note}", "yellow") for note in self._notes)
        return Group(*parts)

    def _write(self, text: str) -> None:
        self._last_line = time.perf_counter()
        self.console.file.write(text + "\n")
        self.console.file.flush()

    def _add_to_curve(self, value: float) -> None:
        """Add a value to a curve of bounded size: when full, halve it and the rate of later values."""
        if value != value or abs(value) == float("inf"):
            return
        if self._seen % self._every == 0:
            self._history.append(value)
            if len(self._history) >= HISTORY:
                self._history = self._history[::2]
                self._every *= 2
        self._seen += 1


def samples_table(samples: Sequence[Mapping[str, Any]], width: int = 100, rows: int = 4) -> Table:
    """Sampled completions with their rewards."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    room = max(16, (width - 14) // 2)
    for column in ("prompt", "completion"):
        table.add_column(column, overflow="ellipsis", no_wrap=True, max_width=room)
    table.add_column("reward", justify="right")
    for sample in samples[:rows]:
        reward = sample.get("reward")
        color = "dim" if reward is None or reward != reward else ("green" if reward > 0 else "red")
        table.add_row(
            Text(_short(sample.get("prompt"), room)),
            Text(_short(sample.get("completion"), room)),
            Text(number(reward), color),
        )
    return table


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """A line of blocks, low to high. More than `width` values are averaged in equal bins."""
    finite = [float(v) for v in values if v == v and abs(v) != float("inf")]
    if not finite:
        return ""
    if len(finite) > width:
        edges = [round(i * len(finite) / width) for i in range(width + 1)]
        parts = [finite[a:b] for a, b in itertools.pairwise(edges)]
        finite = [sum(part) / len(part) for part in parts]
    low, high = min(finite), max(finite)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in finite)


def curve(
    values: Sequence[float],
    steps: Sequence[float] | None = None,
    title: str = "",
    width: int = 72,
    height: int = 14,
) -> str:
    """A learning curve as text for the terminal; "" if there are fewer than two finite values."""
    pairs = [(x, y) for x, y in zip(steps or range(len(values)), values, strict=True) if y == y and abs(y) < 1e300]
    if len(pairs) < 2:
        return ""
    import plotext

    figure: Any = plotext.figure
    figure.clear()
    figure.theme("default")
    figure.plot_size(width, height)
    points = figure.signal([float(x) for x, _ in pairs], [float(y) for _, y in pairs], marker="braille")
    points.lines()
    figure.draw(points)
    if title:
        figure.title(title)
    for axis, coordinates in zip("xy", zip(*pairs, strict=True), strict=True):
        low, high = min(coordinates), max(coordinates)
        if high > low:  # plotext's own labels are 1.0e5 instead of 100k
            ticks = [low + (high - low) * i / 4 for i in range(5)]
            figure.ruler(axis).ticks(ticks, [short(tick) for tick in ticks])
    lines = str(figure.build().string(colorless=True)).splitlines()
    return "\n".join(line.rstrip() for line in lines)


def number(value: float | None) -> str:
    """A number with three or four significant digits; "–" for None and NaN."""
    if value is None or value != value:
        return "–"  # not measured, unscorable
    size = abs(value)
    if size == float("inf"):
        return "inf" if value > 0 else "-inf"
    if size >= 1000 or value == round(value):
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.1f}"
    if size and size < 0.001:
        return f"{value:.1e}"
    return f"{value:.3g}" if size < 1 else f"{value:.2f}"


def short(value: float) -> str:
    """A count as an axis shows it: 950, 12.5k, 3M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _clock(seconds: float) -> str:
    rounded = round(seconds)
    hours, minutes = divmod(rounded // 60, 60)
    return f"{hours}:{minutes:02d}:{rounded % 60:02d}" if hours else f"{minutes}:{rounded % 60:02d}"


def _short(text: Any, width: int) -> str:
    """One line of at most `width` characters; a chat prompt is shown by its last message."""
    if isinstance(text, list) and text and isinstance(text[-1], Mapping):
        text = text[-1].get("content", "")
    flat = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"
