"""The report of `foresight faithfulness`, and its picture."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from foresight.envs.text.task import TextTask
from foresight.errors import UserError
from foresight.planning.reasoning import faithfulness as faith
from foresight.planning.reasoning.mind import Mind
from foresight.runtime.results.results import figure as shown


def report(
    policy: Any,
    task: TextTask,
    questions: int = 100,
    samples: int = 1,
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    seed: int = 0,
) -> dict[str, Any]:
    """All four interventions on traces of the first held-out questions: areas with intervals, and accuracies.

    None stands for the accuracy of answers of which the grader can score none, and for what mistakes do in traces of
    which no step has a number.
    """
    if questions < 1 or samples < 1:
        raise UserError(f"questions is {questions} and samples {samples}: both must be at least 1.")
    mind = Mind(policy, max_new_tokens, temperature, generator=torch.Generator().manual_seed(seed))
    traces = faith.sample(mind, task, list(task.test)[:questions], samples)
    own = task.grade([t.example for t in traces], [t.text for t in traces])
    early = faith.early_answering(mind, task, traces)
    wrong = faith.mistakes(mind, task, traces, faith.wrong_number, seed)
    none = faith.replaced(mind, task, traces, lambda trace: "")
    dots = faith.replaced(mind, task, traces, faith.filler)
    other = faith.replaced(mind, task, traces, lambda trace: "".join(map(faith.commuted, trace.steps)))
    common = Counter(str(t.example.answer) for t in traces).most_common(1)[0][1] / len(traces)
    return {
        "task": task.name,
        "traces": len(traces),
        "steps": statistics.fmean(len(t.steps) for t in traces),
        "accuracy": _known(faith.mean_grade(own)),
        "chance": common,  # accuracy of the most frequent answer
        "early": _measured(early),
        "mistakes": _measured(wrong),
        "without_trace": {"same": none[0], "accuracy": _known(none[1])},
        "filler": {
            "same": dots[0],
            "accuracy": _known(dots[1]),
            "gain": _known(dots[1] - max(none[1], common)),
        },
        "paraphrase": {"same": other[0], "accuracy": _known(other[1])},
        "curves": {"early": _curve(early), "mistakes": _curve(wrong)},
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _measured(curve: faith.Curve) -> dict[str, Any]:
    """The area, its interval and the accuracy; None without an intervention."""
    if not curve.area:
        return {"aoc": None, "interval_95": None, "accuracy": None}
    return {
        "aoc": statistics.fmean(curve.area),
        "interval_95": faith.interval(curve.area),
        "accuracy": _known(curve.right),
    }


def _curve(curve: faith.Curve) -> list[tuple[float, float, int]]:
    """Share of the trace, share of equal answers, and count, over traces of all lengths."""
    found: dict[float, list[bool]] = {}
    for shares, row in zip(curve.share, curve.same, strict=True):
        for share, value in zip(shares, row, strict=True):
            found.setdefault(round(share, 3), []).append(value)
    return [(x, statistics.fmean(values), len(values)) for x, values in sorted(found.items())]


def cells(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The rows of the table."""
    rows = [("accuracy with the trace", shown(document["accuracy"]), "")]
    for key, name in (("early", "early answering, area over the curve"), ("mistakes", "mistakes, area over the curve")):
        interval = document[key]["interval_95"]
        rows.append((name, shown(document[key]["aoc"]), " to ".join(map(shown, interval or ()))))
    rows.append(("accuracy without the trace", shown(document["without_trace"]["accuracy"]), ""))
    rows.append(("accuracy of the most frequent answer", shown(document["chance"]), ""))
    rows.append(("accuracy with filler", shown(document["filler"]["accuracy"]), ""))
    rows.append(("same answer after a paraphrase", shown(document["paraphrase"]["same"]), ""))
    return rows


def picture(document: dict[str, Any], path: Path) -> Path:
    """Draw the share of equal answers against the share of the trace that was kept, or before the mistake."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, label in (("early", "early answering"), ("mistakes", "a mistake inserted")):
        points = document["curves"][name]
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o", label=label)
    axes.set_xlabel("share of the trace that is the model's own")
    axes.set_ylabel("same answer as with the whole trace")
    axes.set_ylim(-0.02, 1.02)
    axes.set_title(f"{document['task']}, {document['traces']} traces", fontsize=10)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path
