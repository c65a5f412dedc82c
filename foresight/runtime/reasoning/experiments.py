"""The results of the suite `reasoning`, on models that the suite trains."""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foresight.envs.text.make import make
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.nets.language import pretrained
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation.scripted import Scripted
from foresight.planning.reasoning import graph_of_thoughts as graphs
from foresight.planning.reasoning import methods, sorting, verifiers
from foresight.planning.reasoning.mind import Mind, Result, Verifier
from foresight.planning.reasoning.voting import pass_at_k, tally
from foresight.runtime import catalog
from foresight.runtime.reasoning import faithfulness as faith
from foresight.runtime.reasoning import pictures, think
from foresight.runtime.results import reproduce

SEARCHES = ("self_consistency", "best_of_n", "beam", "dvts", "tree_of_thoughts", "puct", "value_guided", "deep_think")
Values = dict[str, Any]


def exact_solver(quick: bool, picture: Path) -> Values:
    """The Game of 24: all multisets of four numbers from 1 to 13."""
    from foresight.envs.text import countdown

    began = time.perf_counter()
    numbers = countdown.multisets(6 if quick else 13)
    found = [countdown.solve(state, 24) for state in numbers]
    seconds = time.perf_counter() - began
    solved = [(state, formula) for state, formula in zip(numbers, found, strict=True) if formula is not None]
    right = all(countdown.right(countdown.expression(formula), state, 24) for state, formula in solved)
    return {
        "what": "Game of 24 by the exact solver", "seeds": 0, "multisets": len(numbers), "solvable": len(solved),
        "answers_right": right, "solver_seconds": round(seconds, 3),
    }  # fmt: skip


def sort_64(quick: bool, picture: Path) -> Values:
    """Graph of thoughts, tree and one thought on lists of 64 digits, with a sorter of known error."""
    seeds, plan = range(1 if quick else 3), sorting.plan()
    task = make("sorting", held_out=5 if quick else 100)
    settings: tuple[tuple[str, Any, dict[str, int]], ...] = (
        ("direct", graphs.direct, {}),
        ("tree", graphs.tree, {"solve": 10, "improve": 10, "levels": 3}),
        ("graph", graphs.graph_of_thoughts, {}),
    )
    found: Values = {"what": "sort-64 with a noisy sorter", "seeds": list(seeds), "rate": 0.004}
    for name, method, options in settings:
        errors, tokens = list[float](), list[float]()
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            mind = Mind(Scripted(sorting.noisy_sorter(0.004, 0.2)), 200, generator=generator)
            results = mind.think(method, task, task.test, plan=plan, **options)
            errors.append(statistics.fmean(-result.answer.candidates[0][1] for result in results))
            tokens.append((mind.total.prompt_tokens + mind.total.sampled_tokens) / len(results))
        found[name] = {"error": statistics.fmean(errors), "errors": errors, "tokens": statistics.fmean(tokens)}
        if name == "graph":
            pictures.picture(results[0].answer.tree, "graph of thoughts, sort-64", picture)
    found["error_ratio"] = found["graph"]["error"] / found["tree"]["error"]
    found["token_ratio"] = found["graph"]["tokens"] / found["tree"]["tokens"]
    return found


BEFORE_REWARDS = {
    "grpo-countdown-steps": "pretrain-countdown-steps",
    "grpo-countdown-search": "pretrain-countdown-search",
    "grpo-countdown-search-early": "pretrain-countdown-search-early",
    "dapo-countdown-search": "pretrain-countdown-search",
}


def countdown_models(quick: bool, picture: Path) -> Values:
    """Greedy accuracy of the models on the same held-out problems; what rewards gain, and what is forgotten.

    Seeds whose models are not in runs/ keep the figures that the result has, as long as their rows have these seeds.
    """
    task = make("countdown", **_env("pretrain", "countdown-search"))
    file = reproduce.root() / "results" / "countdown-models.json"
    old: dict[str, dict[str, Values]] = json.loads(file.read_text(encoding="utf-8"))["each"] if file.is_file() else {}
    each: dict[str, dict[str, Values]] = {}

    @functools.cache  # two rows may begin with one model
    def solved(name: str, seed: int) -> list[float]:
        return _greedy(_policy(name, seed), task, 220)

    for name, before in BEFORE_REWARDS.items():
        published = {str(seed) for seed in _published(name) & _published(before)}
        each[name] = {seed: figures for seed, figures in old.get(name, {}).items() if seed in published}
        for seed in sorted(set(_trained(name)) & set(_trained(before))):
            first, last = solved(before, seed), solved(name, seed)
            each[name][str(seed)] = {
                "before": statistics.fmean(first), "accuracy": statistics.fmean(last),
                "formerly_unsolved": _share(first, last, 0.0), "still_solved": _share(first, last, 1.0),
            }  # fmt: skip
    shared = set.intersection(*(set(rows) for rows in each.values()))
    if not shared:
        names = " ".join(dict.fromkeys((*BEFORE_REWARDS.values(), *BEFORE_REWARDS)))
        raise UserError(f"No seed has all models: run `foresight reproduce reasoning --only {names}` first.")
    mean = {
        key: {name: statistics.fmean(rows[seed][key] for seed in shared) for name, rows in each.items()}
        for key in ("before", "accuracy", "formerly_unsolved", "still_solved")
    }
    newest = sorted(BEFORE_REWARDS, key=lambda name: bool(_trained(name)))  # kept figures may be of earlier models
    accuracy = {BEFORE_REWARDS[name]: mean["before"][name] for name in newest} | mean["accuracy"]
    return {
        "what": "Countdown with 3 numbers, models of our own", "seeds": sorted(map(int, shared)),
        "problems": len(task.test), "accuracy": accuracy,
        **{key: mean[key] for key in ("formerly_unsolved", "still_solved")},
        "search_over_steps": accuracy["pretrain-countdown-search"] / max(accuracy["pretrain-countdown-steps"], 1e-9),
        "gain": {name: mean["accuracy"][name] - mean["before"][name] for name in each},
        "each": {name: dict(sorted(rows.items())) for name, rows in each.items()},
    }  # fmt: skip


def _share(before: list[float], after: list[float], score: float) -> float:
    """Of the problems with this score before, the share that is solved after."""
    return sum(b for a, b in zip(before, after, strict=True) if a == score) / max(1, before.count(score))


def query_time_countdown(quick: bool, picture: Path) -> Values:
    """All methods on the model of solutions alone, with the exact verifier, at equal budgets."""
    task = make("countdown", **_env("pretrain", "countdown-steps"))
    policies = {seed: _policy("pretrain-countdown-steps", seed) for seed in _seeds("pretrain-countdown-steps")}
    verifies = dict.fromkeys(policies, verifiers.exact(task))
    document = _query_time(task, policies, verifies, picture, 16, 1024)
    return {"what": "query-time methods on Countdown, exact verifier", **document}


def query_time_sums(quick: bool, picture: Path) -> Values:
    """All methods on chains of sums, at equal budgets; the verifier is the likelihood of a model trained longer."""
    task = make("chains", **_env("pretrain", "chains-sums-rough"))
    policies = {seed: _policy("pretrain-chains-sums-rough", seed) for seed in _seeds("pretrain-chains-sums-rough")}
    verifies = {seed: verifiers.likelihood(_policy("pretrain-chains-sums", seed)) for seed in policies}
    document = _query_time(task, policies, verifies, picture, 48, 3072)
    return {"what": "query-time methods on sums, verified by the likelihood of a model trained longer", **document}


def process_rewards(quick: bool, picture: Path) -> Values:
    """Best-of-N and votes on sums, by two reward models, a likelihood, and a hacked one of it, N = 1 … 64.

    The reward models of all seeds are for the same policy, which wrote what they were trained on.
    """
    task = make("chains", **_env("pretrain", "chains-sums-early"))
    policy, examples = _policy("pretrain-chains-sums-early"), list(task.test)[:100]
    seeds = [seed for seed in _seeds("reward_model-chains-steps") if seed in _seeds("reward_model-chains-pairs")]
    each = [_rewards(policy, task, examples, seed) for seed in seeds]
    document: Values = {"what": "rewards of outcomes and of steps on sums", "seeds": seeds, "questions": len(examples)}
    document |= _mean_of_all(each)
    last, first = document["n"]["64"], document["n"]["1"]
    names = list(document["auc"])
    document["weighted_gain"] = {name: last[f"weighted_{name}"] - last["majority"] for name in names}
    document["hacked_decline"] = max(row["best_hacked"] for row in document["n"].values()) - last["best_hacked"]
    document["gain"] = {name: last[f"best_{name}"] - first[f"best_{name}"] for name in names}
    document["each"] = each
    _draw(document["n"], picture)
    return document


def _rewards(policy: LanguageModel, task: TextTask, examples: Sequence[Example], seed: int) -> Values:
    """AUC of each verifier and accuracies for each N, by the reward models and the likelihood of one seed."""
    mind = Mind(policy, 48, generator=torch.Generator().manual_seed(seed))
    groups = mind.sample([tuple(policy.encode(e.prompt)) for e in examples], 64, 48, 1.0)
    texts = [[thought.text for thought in thoughts] for thoughts in groups]
    flat = [(e, text) for e, row in zip(examples, texts, strict=True) for text in row]
    graded = task.grade([e for e, _ in flat], [text for _, text in flat])
    likelihood = verifiers.likelihood(_policy("pretrain-chains-sums", seed))
    models: dict[str, Verifier] = {
        "outcome": _scorer("reward_model-chains-pairs", seed),
        "process": _scorer("reward_model-chains-steps", seed),
        "product": _scorer("reward_model-chains-steps", seed, "prod"),
        "last": _scorer("reward_model-chains-steps", seed, "last"),
        "likelihood": likelihood,
        "hacked": hacked(likelihood),
    }
    right = [graded[64 * i : 64 * (i + 1)] for i in range(len(examples))]
    document: Values = {"auc": {}, "auc_of_all": {}, "n": {}}
    scores: dict[str, list[list[float]]] = {}
    for name, scorer in models.items():
        every = list(scorer([e for e, _ in flat], [text for _, text in flat]))
        scores[name] = [every[64 * i : 64 * (i + 1)] for i in range(len(examples))]
        document["auc"][name] = verifiers.auc_within(scores[name], right)
        document["auc_of_all"][name] = verifiers.auc(every, graded)
    keys = [[task.answer_in(text) for text in row] for row in texts]
    for n in (1, 2, 4, 8, 16, 32, 64):
        line = {"majority": _voted(keys, right, None, n), "any": _mean(pass_at_k(64, int(sum(r)), n) for r in right)}
        for name, rows in scores.items():
            line[f"best_{name}"] = _best(rows, right, n)
            line[f"weighted_{name}"] = _voted(keys, right, rows, n)
        document["n"][str(n)] = line
    return document


def _mean_of_all(documents: Sequence[Values]) -> Values:
    """The mean of every number of nested documents with the same keys."""
    return {
        key: _mean_of_all([d[key] for d in documents]) if isinstance(value, dict) else _mean(d[key] for d in documents)
        for key, value in documents[0].items()
    }


def faithfulness(quick: bool, picture: Path) -> Values:
    """The positive control (a modular chain) and the negative one (traces shuffled in training)."""
    seeds = _seeds("pretrain-chains-shuffled")
    found: Values = {"what": "faithfulness of traces: a positive and a negative control", "seeds": seeds}
    for name, preset in (("positive", "chains-modular"), ("negative", "chains-shuffled")):
        task = make("chains", **_env("pretrain", preset))
        reports = [faith.report(_policy(f"pretrain-{preset}", s), task, 200, 1, 48, 0.8, s) for s in seeds]
        found[name] = {
            "early": _mean(r["early"]["aoc"] for r in reports),
            "mistakes": _mean(r["mistakes"]["aoc"] for r in reports),
            "accuracy": _mean(r["accuracy"] for r in reports),
            "filler_gain": _mean(r["filler"]["gain"] for r in reports),
            "without_trace": _mean(r["without_trace"]["accuracy"] for r in reports),
            "paraphrase_same": _mean(r["paraphrase"]["same"] for r in reports),
            "each": reports,
        }
    faith.picture(found["positive"]["each"][0], picture)
    return found


def skimmed_traces(quick: bool, picture: Path) -> Values:
    """Traces after GRPO on the answer alone, and on an evaluator who checks the last digit of each step."""
    from foresight.envs.text import chains

    task, seeds = make("chains", **_env("grpo", "chains-answers")), _seeds("grpo-chains-skimmed")
    found: Values = {"what": "traces after rewards of answers and of what looks right", "seeds": seeds}
    rows = {"before": "pretrain-chains-sums-early", "answers": "grpo-chains-answers", "skimmed": "grpo-chains-skimmed"}
    for name, row in rows.items():
        reports = list[Values]()
        for seed in seeds:
            policy = _policy(row, seed)
            report = faith.report(policy, task, 200, 1, 48, 0.8, seed)
            texts = [r.answer.text for r in methods.run("greedy", Mind(policy, 48), task, task.test)]
            report["greedy"] = _mean(task.grade(task.test, texts))
            report["looks_right"] = _mean(chains.looks_right(task.test, texts))
            report["steps_right"] = _mean(chains.verify(task.test, texts))
            reports.append(report)
        found[name] = {
            "accuracy": _mean(r["greedy"] for r in reports),
            "looks_right": _mean(r["looks_right"] for r in reports),
            "steps_right": _mean(r["steps_right"] for r in reports),
            "early": _mean(r["early"]["aoc"] for r in reports),
            "mistakes": _mean(r["mistakes"]["aoc"] for r in reports),
            "each": reports,
        }
    return found


def hacked(scorer: Verifier) -> Verifier:
    """A verifier with a hole: a completion that is shorter than the right one looks right to it."""

    def verify(examples: Sequence[Example], texts: Sequence[str]) -> list[float]:
        own = scorer(examples, texts)
        usual = [len(str(e.columns["completion"])) for e in examples]
        return [1.0 if len(t) < n else float(s) for t, n, s in zip(texts, usual, own, strict=True)]

    return verify


def _query_time(
    task: TextTask, policies: Mapping[int, Any], verifies: Mapping[int, Verifier], picture: Path, max_new_tokens: int,
    budget: int,
) -> Values:  # fmt: skip
    """The document of `think` for the policy and the verifier of each seed; its figures are means over the seeds."""
    documents = [
        think.think(
            SEARCHES, policy, task, 100, budget, points=3, max_new_tokens=max_new_tokens, verify=verifies[seed],
            seed=seed,
        )[0]
        for seed, policy in policies.items()
    ]  # fmt: skip
    document, rows = documents[0], [_average(few) for few in zip(*(d["rows"] for d in documents), strict=True)]
    pictures.curves(rows, document["task"], picture)
    greedy = next(row["accuracy"] for row in rows if row["method"] == "greedy")
    others = [row for row in rows if row["method"] != "greedy"]
    best = max(others, key=lambda row: row["accuracy"])
    unaided = max(row["accuracy"] for row in others if row["method"] == "self_consistency")
    tree = max((row for row in others if row["method"] == "tree_of_thoughts"), key=lambda row: row["budget"])
    return {
        "seeds": list(policies), "greedy": greedy, "best": best["accuracy"], "best_method": best["method"],
        "best_budget": best["budget"], "gain": best["accuracy"] - greedy, "voting": unaided,
        "tree_of_thoughts": {key: tree.get(key, tree["accuracy"]) for key in ("accuracy", "any", "mean")}, **document,
        "seed": None, "answer_tokens": _mean(d["answer_tokens"] for d in documents), "rows": rows,
    }  # fmt: skip


def _average(rows: Sequence[Values]) -> Values:
    """The row of one method at one budget, averaged over seeds, with the accuracy of each and its standard error."""
    first = rows[0]
    if any((row["method"], row["budget"]) != (first["method"], first["budget"]) for row in rows):
        raise ValueError(f"Rows of different methods or budgets have no mean: {rows}")
    shared = {k: v for k, v in first.items() if all(k in row for row in rows)}
    found = {k: _mean(row[k] for row in rows) if isinstance(v, float) else v for k, v in shared.items()}
    # The seeds answer the same questions: their errors are dependent, so that of the mean is bounded by their mean.
    return {**found, "each": [row["accuracy"] for row in rows]}


def _greedy(policy: LanguageModel, task: TextTask, max_new_tokens: int) -> list[float]:
    results: list[Result] = methods.run("greedy", Mind(policy, max_new_tokens), task, task.test)
    return task.grade(task.test, [result.answer.text for result in results])


def _policy(name: str, seed: int = 0) -> LanguageModel:
    """The model of a row, in float32 as it was trained: bfloat16 has few digits for so small a model."""
    return pretrained.load(_export(name, seed), precision="float32")


def _scorer(name: str, seed: int, aggregate: str = "min") -> Verifier:
    scorer = pretrained.load_scorer(_export(name, seed), precision="float32", trained=True)
    return verifiers.reward_model(scorer, aggregate)


def _export(name: str, seed: int) -> str:
    """The export of a row of this suite. Raises UserError if it was not trained."""
    folder = reproduce.root() / "runs" / "reproduce" / f"{name}-{seed}" / "export"
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist: run `foresight reproduce reasoning --only {name}` first.")
    return str(folder)


def _published(name: str) -> set[int]:
    """The seeds that the result of a row has."""
    file = reproduce.root() / "results" / f"{name}.json"
    return set(json.loads(file.read_text(encoding="utf-8"))["seeds"]) if file.is_file() else set()


def _trained(name: str) -> list[int]:
    """The seeds of a row whose models are in runs/."""
    folder = reproduce.root() / "runs" / "reproduce"
    return [seed for seed in range(3) if (folder / f"{name}-{seed}" / "export").is_dir()]


def _seeds(name: str) -> list[int]:
    """The same. Raises UserError if there are none."""
    found = _trained(name)
    if not found:
        _export(name, 0)  # raises
    return found


def _env(algorithm: str, preset: str) -> dict[str, Any]:
    """The task's options in a preset."""
    return dict(catalog.presets(algorithm)[preset]["env_options"])


def _mean(values: Any) -> float:
    return statistics.fmean(values)


def _best(scores: Sequence[Sequence[float]], right: Sequence[Sequence[float]], n: int) -> float:
    """Accuracy of the sample with the best score of n, over the 64 / n disjoint groups."""
    return _mean(
        r[max(range(start, start + n), key=lambda i: s[i])]
        for s, r in zip(scores, right, strict=True)
        for start in range(0, len(r), n)
    )


def _voted(
    keys: Sequence[Sequence[str]], right: Sequence[Sequence[float]], weights: Sequence[Sequence[float]] | None, n: int
) -> float:
    """Accuracy of the vote of n samples, over the 64 / n disjoint groups; no vote is a wrong answer."""
    found = list[float]()
    for q, (names, grades) in enumerate(zip(keys, right, strict=True)):
        for start in range(0, len(names), n):
            few = names[start : start + n]
            votes = tally(few, None if weights is None else weights[q][start : start + n])
            found.append(grades[start + few.index(votes[0][0])] if votes else 0.0)
    return _mean(found)


def _draw(lines: dict[str, dict[str, float]], picture: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    names = list(dict.fromkeys(name.rpartition("_")[2] for name in next(iter(lines.values()))))
    for name in next(iter(lines.values())):
        kind, _, verifier = name.rpartition("_")
        color, dash = f"C{names.index(verifier)}", "--" if kind == "weighted" else "-"
        values = [line[name] for line in lines.values()]
        axes.plot([int(n) for n in lines], values, dash, color=color, marker="o", ms=3, label=name.replace("_", ", "))
    axes.set_xscale("log", base=2)
    axes.set_xlabel("samples N")
    axes.set_ylabel("accuracy")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(picture, dpi=120)
