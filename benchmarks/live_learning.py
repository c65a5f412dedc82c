"""Learning live from a scripted user with a hidden preference: results/live-learning.json.

python benchmarks/live_learning.py                              # scores and hints, seed 0
python benchmarks/live_learning.py --modes evaluative directive both --seeds 0 1 2
python benchmarks/live_learning.py --modes both --seeds 1 --more    # one more seed of a mode

The user asks general questions and wants answers of one sentence of at most 20 words, which no prompt states. It
replies "Thanks." or "Please answer in one short sentence." An exact rule reads that message: a score of 1 or -1 and, if
there is one, the hint. Everything runs as in `foresight live`, but one loop after the other: the engine writes the
turns, the store collects them, the rule scores them, the trainer publishes versions.

`before` and `after` are the shares of 40 held-out questions whose sampled answers satisfy the user; `addition_before`
and `addition_after` are the accuracy on 100 held-out sums, a skill that should not be lost; `largest_before` and
`largest_after` the same of the task `largest`, which is never rehearsed. `--rehearsal` is the coefficient of the KL
from the first version on its own answers to other sums.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "live-learning.json"
MOST_WORDS, MAX_TOKENS, INTERACTIONS, CLIENTS = 20, 64, 60, 4
MODES = ("evaluative", "directive", "both")
DEFAULTS: dict[str, float] = {  # of the command
    "learning_rate": 1e-3, "kl_coef": 0.02, "rehearsal": 0.0, "hint_top_k": 0, "kl_bound": 1.0, "batch": CLIENTS,
    "hint_guidance": 1.0,
}  # fmt: skip
WISH = "Please answer in one short sentence."
THINGS = (
    "a glacier", "a volcano", "photosynthesis", "gravity", "a haiku", "inflation", "the moon", "an atom", "a virus",
    "a battery", "a rainbow", "coffee", "a comet", "democracy", "a compass", "honey", "an opera", "a desert", "steel",
    "the heart", "a tide", "paper", "a fossil", "chess", "a galaxy", "salt", "an echo", "a lever", "glass", "a whale",
)  # fmt: skip
FORMS = ("What is {}?", "Explain {} to me.", "Tell me about {}.", "Describe {}.")


def satisfied(reply: str, stopped: bool) -> bool:
    """Whether the user likes a reply: finished, one sentence, at most 20 words, not empty."""
    words, ends = reply.split(), sum(reply.rstrip().count(mark) for mark in ".!?")
    return stopped and 2 < len(words) <= MOST_WORDS and ends <= 1 and "\n" not in reply.strip()


def rate(messages: list[dict[str, str]], reply: str, next: dict[str, str]) -> tuple[float, str]:
    """The exact rule: it reads the user's next message, not the reply."""
    return (1.0, "") if next["content"] == "Thanks." else (-1.0, next["content"])


def questions(seed: int) -> tuple[list[str], list[str]]:
    """Questions to train on and 40 held-out ones, about other things."""
    import random

    things = random.Random(seed).sample(THINGS, len(THINGS))
    seen, held_out = ([form.format(thing) for thing in few for form in FORMS] for few in (things[10:], things[:10]))
    return random.Random(seed).sample(seen, INTERACTIONS), held_out


def ask(engine: Any, texts: list[str], seed: int) -> list[Any]:
    """The engine's replies to questions of as many clients at once."""
    from foresight.agents.live.engine import Request

    found, left = [], threading.Semaphore(0)
    for number, text in enumerate(texts):
        prompt = engine.model.encode([{"role": "user", "content": text}])
        request = Request(prompt, MAX_TOKENS, seed=1000 * seed + number)
        request.progress = lambda one: left.release() if one.over else None
        engine.submit(request)
        found.append(request)
    for request in found:
        left.acquire()
        if request.error:
            raise RuntimeError(request.error)
    return found


def share(engine: Any, texts: list[str], seed: int) -> float:
    """The share of questions whose replies satisfy the user."""
    replies = ask(engine, texts, seed)
    return sum(satisfied(engine.model.decode(one.tokens), one.stopped) for one in replies) / len(replies)


def learned(mode: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """One user of 60 interactions."""
    from foresight.agents.live import loops, score, train
    from foresight.agents.live.engine import Engine
    from foresight.agents.live.settings import Config, Settings
    from foresight.agents.live.store import Store, Turn
    from foresight.envs.make import make
    from foresight.nets.language import pretrained
    from foresight.training.options import Tuning

    began, (seen, held_out) = time.monotonic(), questions(seed)
    checks = {name: loops.checker(Settings(check=name, check_size=100)) for name in ("addition", "largest")}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        config = Config(mode=mode, seed=seed, tuning=Tuning(lora=16), **settings)
        train.begin(store, config.model)
        known = list(make("addition", "text").train[: loops.REHEARSED])
        trainer = train.Trainer(store, config, questions=known)
        engine = Engine(pretrained.load(config.model), 0, slots=8)
        found: dict[str, Any] = {"before": share(engine, held_out, seed)}
        found |= {f"{name}_before": check(trainer.policy) for name, check in checks.items()}
        curve = []
        for start in range(0, INTERACTIONS, CLIENTS):
            few = seen[start : start + CLIENTS]
            likes = []
            for text, one in zip(few, ask(engine, few, 7 + start + seed), strict=True):
                messages, session = [{"role": "user", "content": text}], f"{start} {text}"
                reply = engine.model.decode(one.tokens)
                likes.append(satisfied(reply, one.stopped))
                store.add(Turn(session, one.version, messages, reply, one.prompt, one.tokens, one.logprob))
                following = {"role": "user", "content": "Thanks." if likes[-1] else WISH}
                store.request(session, [*messages, {"role": "assistant", "content": reply}, following])
            store.collect(1e9)
            score.step(store, lambda turn: rate(turn.messages, turn.reply, turn.next or {}))
            metrics: dict[str, float] = {}
            while found_more := trainer.step():
                metrics = found_more
            if store.active() != engine.version:
                active = store.active()
                engine.exchange(pretrained.load(store.folder_of(active)), active)
            curve.append(sum(likes) / len(likes))
            shown = {name: round(value, 3) for name, value in metrics.items()}
            print(mode, seed, start + len(few), f"satisfied {curve[-1]:.2f}", shown, flush=True)
        found |= {"after": share(engine, held_out, seed), "curve": curve}
        found |= {f"{name}_after": check(trainer.policy) for name, check in checks.items()}
        found |= {"versions": store.active(), "counts": store.counts()}
        found["replies"] = [[text, engine.model.decode(one.tokens)] for text, one in
                            zip(held_out[:4], ask(engine, held_out[:4], seed), strict=True)]  # fmt: skip
        engine.close()
    found |= {f"{name}_lost": found[f"{name}_before"] - found[f"{name}_after"] for name in checks}
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def command(document: Mapping[str, Any]) -> str:
    """What makes the whole file: a command for the modes that have the same seeds and settings, joined by `&&`."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for mode in (mode for mode in MODES if mode in document):
        found = document[mode]
        given = {name: found.get(name, default) for name, default in DEFAULTS.items()}
        changed = [
            (f"--{name.replace('_', '-')}", f"{given[name]:g}") for name in DEFAULTS if given[name] != DEFAULTS[name]
        ]
        seeds = sorted(found["runs"], key=int)
        alike.setdefault(("--seeds", *seeds, *itertools.chain(*changed)), []).append(mode)
    script = ["python", "benchmarks/live_learning.py"]
    return " && ".join(shlex.join([*script, "--modes", *modes, *options]) for options, modes in alike.items())


def main() -> None:
    """Run the users, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["both"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--kl-coef", type=float)
    parser.add_argument("--rehearsal", type=float)
    parser.add_argument("--hint-top-k", type=int)
    parser.add_argument("--hint-guidance", type=float)
    parser.add_argument("--batch", type=int, help="turns per update; clients ask 4 questions at once")
    parser.add_argument("--kl-bound", type=float)
    parser.set_defaults(**DEFAULTS)
    parser.add_argument("--more", action="store_true", help="keep the seeds that the result has at these settings")
    given = parser.parse_args()

    import torch

    from foresight.runtime import bench
    from foresight.runtime.checkpoints import checkpoint

    torch.set_num_threads(1)
    document: dict[str, Any] = json.loads(FILE.read_text()) if FILE.is_file() else {"seconds": 0.0}
    settings = {name: getattr(given, name) for name in DEFAULTS}
    for mode in given.modes:
        old = document.get(mode, {})
        alike = bool(old) and all(old.get(name, 0) == value for name, value in settings.items())
        kept = old["runs"] if given.more and alike else {}
        runs = kept | {str(seed): learned(mode, seed, settings) for seed in given.seeds}
        keys = ("before", "after", "addition_lost", "largest_lost")
        means = {key: sum(run[key] for run in runs.values()) / len(runs) for key in keys}
        document[mode] = {**means, **settings, "runs": runs}
        document["seconds"] += sum(runs[str(seed)]["seconds"] for seed in given.seeds)
    document = {
        "what": "Learning live from a scripted user who wants one sentence of at most 20 words (SmolLM2-135M)",
        "command": command(document),
        "seeds": sorted({int(seed) for mode in MODES if mode in document for seed in document[mode]["runs"]}),
        **{name: value for name, value in document.items() if name not in ("what", "command", "seeds")},
        "versions": bench.versions(),
        "machine": bench.machine(),
    }
    checkpoint.write_atomic(FILE, json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
