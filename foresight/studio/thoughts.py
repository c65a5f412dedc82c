"""Thoughts on the page: what `foresight think` wrote. Accuracy against tokens, votes, costs, and trees of thought."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from foresight.errors import UserError
from foresight.studio.runs import Library, identity, read_json, stamp

REPORT, EXAMPLES = "think.json", "thoughts.json"
MOST = 600  # thoughts of a tree that are sent
FIELDS = ("task", "model", "verifier", "questions", "metric", "temperature", "max_new_tokens", "seed", "rows")


class Thoughts:
    """The reports of `foresight think` in the folders of a library."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._read: dict[Path, tuple[float, list[dict[str, Any]]]] = {}

    def names(self) -> list[dict[str, Any]]:
        """Id, name, task and methods of every report, the newest first."""
        found = []
        for folder in self._folders().values():
            report = read_json(folder / REPORT)
            rows = _rows(report)
            if rows:
                methods = list(dict.fromkeys(row["method"] for row in rows))
                row = {"name": folder.name, "task": report.get("task"), "model": report.get("model")}
                changed = stamp(folder / REPORT)
                found.append({"id": identity(folder), **row, "methods": methods, "changed": changed})
        return sorted(found, key=lambda one: -one["changed"])

    def report(self, name: str) -> dict[str, Any]:
        """The table of a report, and which method answered each of its first questions, and how, at which budget."""
        folder = self._folder(name)
        report = read_json(folder / REPORT)
        examples = [
            {
                "question": example.get("question"),
                "answer": example.get("answer"),
                "results": [
                    {key: result.get(key) for key in ("method", "budget", "reward")} for result in example["results"]
                ],
            }
            for example in self._examples(folder)
        ]
        return {**{key: report.get(key) for key in FIELDS}, "rows": _rows(report), "examples": examples}

    def result(self, name: str, question: int, method: str, budget: int) -> dict[str, Any]:
        """What a method thought about a question: its answer, votes, cost and tree."""
        examples = self._examples(self._folder(name))
        if not 0 <= question < len(examples):
            raise UserError(f"There is no question {question} here: {len(examples)} questions have their thoughts.")
        for result in examples[question]["results"]:
            if result.get("method") == method and result.get("budget") == budget:
                return _cut(result)
        raise UserError(f"{method[:40]} with {budget} tokens did not answer this question here.")

    def results(self, name: str) -> list[list[dict[str, Any]]]:
        """What every method thought, by question: all that `result` returns."""
        return [[_cut(one) for one in example["results"]] for example in self._examples(self._folder(name))]

    def _folders(self) -> dict[str, Path]:
        return {identity(folder): folder for folder in self._library.folders_with(REPORT)}

    def _folder(self, name: str) -> Path:
        folders = self._folders()
        if name not in folders:
            raise UserError(f"There is no report '{name[:40]}' in the folders of this studio.")
        return folders[name]

    def _examples(self, folder: Path) -> list[dict[str, Any]]:
        file = folder / EXAMPLES
        changed = stamp(file)
        with self._lock:
            if self._read.get(file, (None,))[0] != changed:
                try:
                    document = json.loads(file.read_text(encoding="utf-8"), parse_constant=lambda _: None)
                    examples = [
                        {**one, "results": [result for result in one["results"] if isinstance(result, dict)]}
                        for one in document["examples"]
                        if isinstance(one["results"], list)
                    ]
                except (OSError, ValueError, KeyError, TypeError, RecursionError):
                    examples = []  # written by an older version, or being written
                self._read = {**dict(list(self._read.items())[-3:]), file: (changed, examples)}
            return self._read[file][1]


def _cut(result: dict[str, Any]) -> dict[str, Any]:
    """A result with at most `MOST` thoughts of its tree; `hidden` is how many are left out."""
    tree = result.get("tree")
    tree = tree if isinstance(tree, dict) else {}
    nodes = tree.get("nodes")
    nodes = nodes if isinstance(nodes, list) else []
    return {**result, "tree": {**tree, "nodes": nodes[:MOST]}, "hidden": max(0, len(nodes) - MOST)}


def _rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    rows = report.get("rows")
    found = rows if isinstance(rows, list) else []
    return [row for row in found if isinstance(row, dict) and isinstance(row.get("method"), str)]
