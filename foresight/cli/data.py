"""`foresight data`: scored answers of a language model as a JSONL file, or episodes of a run as a Minari data set."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from foresight.cli import fields, screen
from foresight.errors import UserError
from foresight.runtime import legacy

if TYPE_CHECKING:  # this imports torch
    from foresight.data.episodes import Episodes
    from foresight.envs.base import Spaces
    from foresight.envs.text.task import TextTask
    from foresight.runtime.drafts import Progress

EXPERTS = 16  # environments stepped together for demonstrations
EXPERT, SCRIPTED = "episodes of an expert", "demonstrations of a task with tools"
_OF_ANSWERS = frozenset({
    "task", "env_options", "model", "prompts", "group", "most", "max_new_tokens", "temperature", "seed", "device",
    "completer", "stop",
})  # fmt: skip
# The options that each kind of data reads; of each, `out` too.
READ = {
    "preferences": _OF_ANSWERS,
    "demonstrations": _OF_ANSWERS | {"least"},
    "steps": _OF_ANSWERS,
    "planners": frozenset({"prompts", "env_options"}),
    "episodes": frozenset({"format", "fps", "episodes", "checkpoint", "explore", "random", "seed", "device"}),
    EXPERT: frozenset({"env", "env_options", "format", "fps", "episodes", "seed"}),
    SCRIPTED: frozenset({"task", "env_options", "prompts"}),
}


def data(
    kind: Annotated[Literal["preferences", "demonstrations", "steps", "planners", "episodes"], tyro.conf.Positional],
    runs: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    *,
    out: str,
    task: str | None = None,
    env: str | None = None,
    format: Literal["minari", "lerobot"] = "minari",
    fps: float = 10.0,
    model: tuple[str, ...] = ("smollm2",),
    prompts: int | None = None,
    group: int = 8,
    most: int = 4,
    least: float = 1.0,
    max_new_tokens: int = 16,
    stop: tuple[str, ...] = (),
    temperature: float = 1.0,
    seed: int = 0,
    device: str = "auto",
    completer: str | None = None,
    env_options: tuple[str, ...] = (),
    episodes: int = 100,
    checkpoint: str = "latest",
    explore: bool = False,
    random: int = 0,
) -> int:
    r"""Generate data: answers of a language model for sft, dpo, kto, orpo and reward_model, or episodes of a run.

    A model answers the training prompts of a task, and the grader of the task scores the answers.

    Args:
        kind: preferences (prompt, chosen, rejected), demonstrations (prompt, completion), steps (completions and
            labels, right or wrong by the task's exact verifier), planners (prompt, completion: programs for renamed
            PDDL domains, without a model), or episodes (of a run).
        runs: the run directories whose policies act (only of episodes); all episodes go into one folder.
        env: an environment whose own expert acts, instead of runs (BabyAI, MetaWorld/Reach-v3, PushT-v0).
        format: of episodes: Minari's, or a LeRobotDataset v3.0.
        fps: steps a second of the environment, for the format lerobot.
        task: the text task: addition, largest, reasoning_gym:NAME, or a .jsonl file with a reward function.
        out: the JSONL file to write; of episodes the folder, in Minari's format.
        model: "smollm2", a Hugging Face folder (such as the export/ of a run), or a hub id. With several, each
            answers all prompts, and both answers of a pair are from the same model.
        prompts: number of training prompts to answer; default: all of them.
        group: answers per model and prompt.
        most: maximum rows per model and prompt.
        least: minimum reward of a demonstration.
        max_new_tokens: maximum tokens per answer; truncated answers are left out.
        stop: texts that end an answer and are left out of it; "\n" is a line break.
        temperature: sampling temperature.
        seed: sampling seed.
        device: auto, cpu, cuda, cuda:1 or mps.
        completer: URL of a server that samples with its own weights; --model gives the tokenizer.
        env_options: options of the task, or with --env of the environment, as key=value (reward=rewards.py:score).
        episodes: number of episodes to record of each run.
        checkpoint: "latest", "best" or a step of the run.
        explore: sample actions instead of taking the likeliest.
        random: number of further episodes with uniformly random actions, in the environment of the first run.
    """
    named = _given(locals())
    fields.check_seed(seed)
    lerobot = format == "lerobot"
    if lerobot and not fps > 0:
        raise UserError(f"--fps must be above 0, not {fps:g}.")
    for option, given in (("random", random), ("explore", explore), ("checkpoint", checkpoint != "latest")):
        if kind == "episodes" and env is not None and not runs and given:
            raise UserError(f"--{option} is for runs, and with --env its own expert acts: name a run, or leave it out.")
    if kind == "episodes" and runs and env is not None:
        raise UserError("Runs are given and --env is too: name runs, whose policies act, or --env, whose expert acts.")
    _check(named, EXPERT if kind == "episodes" and env is not None else kind)
    if "fps" in named and not lerobot:
        raise UserError("--fps is for --format lerobot, and Minari's has none: leave it out.")
    if kind == "episodes":
        fields.check_folder(out)
    if kind == "episodes" and env is not None:
        return _demonstrations(env, fields.options(env_options), out, episodes, seed, fps if lerobot else None)
    if kind == "episodes":
        return _episodes(runs, out, episodes, checkpoint, explore, random, seed, device, fps if lerobot else None)
    if kind == "planners":
        return _planners(out, prompts, env_options)
    if runs or task is None:
        raise UserError(
            f"`foresight data {kind}` needs a task and no run: foresight data {kind} --task addition --out F"
        )
    import torch

    from foresight.envs.make import make
    from foresight.nets.language import pretrained
    from foresight.planning.generation import server
    from foresight.runtime import drafts, machine
    from foresight.training import graded

    path = Path(out)
    if path.exists():
        raise UserError(f"The file {path} already exists: choose another --out, or remove it.")
    draft = path.with_name(f"{path.stem}.partial{path.suffix}")  # what remains after a failure
    fields.check_file(path)
    for option, value in (("prompts", prompts), ("group", group), ("most", most), ("max-new-tokens", max_new_tokens)):
        if value is not None and value < 1:
            raise UserError(f"--{option} must be at least 1, not {value}.")
    if not temperature >= 0:
        raise UserError(f"--temperature must be at least 0, not {temperature:g}.")
    if completer is not None and len(model) > 1:
        raise UserError(f"A server has the weights of one model, but --model names {len(model)} models: name one.")
    ends = tuple(one.replace("\\n", "\n") for one in stop)
    if not all(ends):
        raise UserError("A text of --stop is empty: name the text that ends an answer, or leave --stop out.")
    options, renamed = legacy.env_options(task, fields.options(env_options))
    if renamed:
        screen.note(renamed)
    questions = make(task, "text", **options)
    if kind == "demonstrations" and questions.episode is not None:
        _check(named, SCRIPTED)
        return _scripted(questions, prompts, path)
    examples = list(questions.train)[:prompts]
    settings = {
        "kind of data": kind, "--task": task, "--env-options": options, "--model": model, "--completer": completer,
        "--group": group, "--most": most, "--least": least, "--max-new-tokens": max_new_tokens,
        "--stop": ends, "--temperature": temperature, "--seed": seed, "questions": drafts.fingerprint(examples),
        "files of the task or the model": drafts.files([task, *model, *options.values()]),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}. Choose another --out.") from error
    with drafts.held(draft):
        progress = drafts.resume(draft, settings, generator)
        machine.configure_malloc(machine.POOL)
        where = machine.pick_device(device)
        policies = [pretrained.load(name, where) for name in model]  # all at once, so that a missing one fails early
        if completer is not None:
            policies[0].completer = server.Server(completer, policies[0], report=screen.note)
        total, sampled, truncated = len(model) * len(examples), 0, 0
        if progress.prompts:
            screen.note(
                f"{draft}: {progress.prompts} of {total} prompts were answered before. To start again, remove it."
            )
        try:
            if not progress.prompts:
                drafts.begin(draft, settings, generator)
            errors = screen.stderr()
            with errors.status(f"{progress.prompts} of {total} prompts answered") as status:
                for i, policy in enumerate(policies):
                    first = min(max(progress.prompts - i * len(examples), 0), len(examples))
                    for found in graded.sample(
                        policy, questions, prompts, group, max_new_tokens, temperature, generator,
                        kind == "preferences", first, ends,
                    ):  # fmt: skip
                        sampled, truncated = sampled + found.stopped.numel(), truncated + int((~found.stopped).sum())
                        rows = graded.make(kind, found, questions, most, least)
                        progress = drafts.add(draft, rows, len(found.examples), progress, settings, generator)
                        line = f"{progress.prompts} of {total} prompts answered, {progress.rows} {kind}"
                        status.update(line)
                        if not errors.is_terminal:  # a log has no status line
                            screen.note(line)
            if progress.rows and path.exists():
                raise UserError(f"{path} was made by another command in the meantime.")
            if progress.rows:
                draft.rename(path)
            drafts.remove(draft)
        except (OSError, UserError, KeyboardInterrupt) as error:
            if not progress.prompts:
                drafts.remove(draft)
            if isinstance(error, OSError):
                advice = _kept(progress, kind, draft) or " Choose another --out."
                raise UserError(f"Cannot write {path}: {error.strerror}.{advice}") from error
            if not progress.prompts:
                raise
            reason = "Stopped." if isinstance(error, KeyboardInterrupt) else error
            raise type(error)(f"{reason}{_kept(progress, kind, draft)}") from error
    if 2 * truncated > sampled:
        screen.note(
            f"{truncated / sampled:.0%} of the answers were truncated by --max-new-tokens {max_new_tokens} and left "
            f'out: raise it, or end answers by --stop, as at the first line break by --stop "\\n".'
        )
    if not progress.rows:
        raise UserError(
            f"None of the {total} prompts gave {kind}: "
            + (
                "no prompt has two answers with different rewards. "
                if kind == "preferences"
                else "no answer ended. "
                if kind == "steps"
                else f"no answer has a reward of at least {least:g} (--least). "
            )
            + "Raise --group or --max-new-tokens, or choose an easier task."
        )
    made = f"{progress.rows} {kind}"
    if kind == "preferences":  # a reward model generalizes by many questions, not by many pairs of each
        with path.open(encoding="utf-8") as lines:
            made += f" on {len({json.dumps(json.loads(line)['prompt']) for line in lines})} different questions"
    screen.stdout().print(f"{made} from {total} prompts: {path}", markup=False, soft_wrap=True)
    return 0


def _kept(progress: Progress, kind: str, draft: Path) -> str:
    """What an error message adds if answers were made before: where they are, and that they can be continued."""
    if not progress.prompts:
        return ""
    return f" The {progress.rows} {kind} made so far are in {draft}: the same command continues."


def _given(values: Mapping[str, Any]) -> list[str]:
    """The options among the arguments of `data` that differ from their defaults."""
    options = {name: one for name, one in inspect.signature(data).parameters.items() if one.kind == one.KEYWORD_ONLY}
    return [name for name, one in options.items() if values[name] != one.default and name != "out"]


def _check(given: Sequence[str], kind: str) -> None:
    """Raise UserError for an option among `given` that has no effect on data of this kind."""
    for name in given:
        if name not in READ[kind]:
            others = ", ".join(one for one, names in READ.items() if name in names)
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} has no effect on {kind}: leave it out. It is for {others}.")


def _scripted(task: TextTask, prompts: int | None, path: Path) -> int:
    """Write scripted conversations of a task with tools."""
    from foresight.envs.tools import make
    from foresight.runtime.checkpoints import checkpoint

    rows = make.demonstrations(task, prompts or len(task.train))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}. Choose another --out.") from error
    screen.stdout().print(f"{len(rows)} demonstrations: {path}", markup=False, soft_wrap=True)
    return 0


def _planners(out: str, prompts: int | None, env_options: tuple[str, ...]) -> int:
    """Write hand-written planners in the names of the task's training prompts, as demonstrations."""
    from foresight.envs.make import make
    from foresight.envs.text import planners
    from foresight.runtime.checkpoints import checkpoint

    path = Path(out)
    if path.exists():
        raise UserError(f"The file {path} already exists: choose another --out, or remove it.")
    if prompts is not None and prompts < 1:
        raise UserError(f"--prompts must be at least 1, not {prompts}.")
    examples = make("planners", "text", **fields.options(env_options)).train[:prompts]
    rows = [{"prompt": one.prompt, "completion": planners.demonstration(one)} for one in examples]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}. Choose another --out.") from error
    screen.stdout().print(f"{len(rows)} planners: {path}", markup=False, soft_wrap=True)
    return 0


def _episodes(
    runs: tuple[str, ...], out: str, count: int, checkpoint: str, explore: bool, random: int, seed: int, device: str,
    fps: float | None,
) -> int:  # fmt: skip
    """Record episodes of runs and write them."""
    if not runs:
        raise UserError(
            f"No run given. Name one: foresight data episodes RUN --episodes {count} --out {out}, or give --env."
        )
    if min(count, random) < 0 or not count + random:
        raise UserError(f"--episodes must be at least 1, or 0 with --random above 0, not {count} and {random}.")
    if Path(out).exists():
        raise UserError(f"The folder {out} already exists: choose another --out, or remove it.")
    from foresight.data import episodes as data
    from foresight.runtime import episodes as recorder
    from foresight.runtime.run import load

    which, parts = int(checkpoint) if checkpoint.isdecimal() else checkpoint, []
    agents = [load(run, which, device) for run in runs]
    try:
        if len(environments := {agent.settings.env for agent in agents}) > 1:
            raise UserError(f"One folder holds episodes of one environment, not of {', '.join(sorted(environments))}.")
        first = agents[0].settings
        for run, agent in zip(runs, agents, strict=True):
            if agent.settings.env_options != first.env_options:
                raise UserError(
                    f"{run} has other env options than {runs[0]}: {agent.settings.env_options} instead of "
                    f"{first.env_options}. Write a folder for each: training takes several."
                )
        if random:
            parts.append(recorder.record(agents[0], random, seed, random=True))
        parts += [recorder.record(agent, count, seed, explore) for agent in agents if count]
        found = data.join(parts)
        path = _write(found, agents[0].spaces, first.env, first.env_options, first.algorithm, Path(out), fps)
    finally:
        for agent in agents:
            agent.close()
    return _report(found, path)


def _demonstrations(env: str, options: dict[str, Any], out: str, count: int, seed: int, fps: float | None) -> int:
    """Record episodes of an environment's own expert and write them."""
    if count < 1:
        raise UserError(f"--episodes must be at least 1, not {count}.")
    if Path(out).exists():
        raise UserError(f"The folder {out} already exists: choose another --out, or remove it.")
    if "num_envs" in options:
        raise UserError("num_envs is no option of this command, which chooses it itself: leave it out.")
    from foresight.envs.control import multi_task
    from foresight.envs.make import make
    from foresight.runtime import episodes as recorder

    made = make(env, num_envs=max(multi_task.least_envs(env), min(EXPERTS, count)), **options)
    try:
        found = recorder.demonstrate(made, count, seed)
        path = _write(found, made.spaces, env, options, "expert", Path(out), fps)
    finally:
        made.close()
    return _report(found, path)


def _write(
    found: Episodes, spaces: Spaces, env: str, options: Mapping[str, Any], author: str, out: Path, fps: float | None
) -> Path:
    """Write episodes in Minari's format, or, with `fps`, as a LeRobotDataset."""
    from foresight.runtime import episodes as recorder

    if fps is None:
        return recorder.write(found, spaces, env, options, author, out)
    return recorder.write_lerobot(found, spaces.obs, spaces.action, fps, env, out)


def _report(found: Episodes, path: Path) -> int:
    low, mean, high = (float(x) for x in (found.returns.min(), found.returns.mean(), found.returns.max()))
    screen.stdout().print(
        f"{len(found)} episodes, {int(found.length.sum()):,} steps, return {mean:.4g} ({low:.4g} to {high:.4g}): "
        f"{path}",
        markup=False,
        soft_wrap=True,
    )
    return 0
