"""Asynchronous against synchronous GRPO, on environments with episodes of 10:1 in length: results/async-rollouts.json.

python benchmarks/async_rollouts.py

A random Llama of two layers talks with an environment for two turns, and is rewarded for vowels. A turn is answered
after 0.06 s, or in 15% of the conversations after 0.6 s: the environment waits, as a browser or a build does. Both runs
make the same number of updates of the same size; the asynchronous one has `--staleness 4`, which bounds it.

`speedup` is the ratio of episodes a minute; `synchronous` and `asynchronous` hold, per seed, episodes a minute, the
mean reward of the first and of the last 20 updates, the mean and the largest staleness in updates, and the share of the
time in which the trainer waited.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests import tiny_conversations  # noqa: E402

FILE = ROOT / "results" / "async-rollouts.json"
FAST, SLOW, SHARE, TURNS = 0.06, 0.6, 0.15, 2
PROMPTS, GROUP, TOKENS, LAST = 4, 4, 12, 20
CHARACTERS = ["<eos>", *"0123456789+=? abcdefghijklmnopqrstuvwxyzW"]


class Waits:
    """An episode that answers each turn after a while."""

    slow = True

    def __init__(self, episode: tiny_conversations.Echo, seconds: float) -> None:
        self.episode, self.seconds = episode, seconds
        self.messages, self.parts = episode.messages, episode.parts

    def turn(self, text: str) -> Any:
        """Wait, then answer."""
        time.sleep(self.seconds)
        return self.episode.turn(text)


def tiny(folder: Path, seed: int) -> str:
    """A random character-level Llama as a Hugging Face folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=0, pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    table = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="?"))
    table.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    table.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=table, eos_token="<eos>", pad_token="<eos>")
    tokenizer.save_pretrained(folder)
    return str(folder)


def trained(model: str, seed: int, staleness: int | None, updates: int, learning_rate: float) -> dict[str, float]:
    """One run: its pace, its reward and its staleness."""
    from foresight.algorithms.language import grpo
    from foresight.envs.text.task import Example, TextTask
    from foresight.planning.generation import asynchronous
    from foresight.training.options import build_config

    draw = random.Random(seed)
    questions = [Example(f"{i}") for i in range(100)]

    def begin(example: Example) -> Waits:
        return Waits(tiny_conversations.Echo(str(example.prompt), TURNS), SLOW if draw.random() < SHARE else FAST)

    task = TextTask("waits", questions, questions, None, metric="outcome", episode=begin, turns=TURNS)
    config = build_config(
        grpo.Config, model=model, seed=seed, steps=updates, prompts=PROMPTS, group=GROUP, max_new_tokens=TOKENS,
        learning_rate=learning_rate, precision="float32",
    )  # fmt: skip
    state = grpo.build(config)
    tiny_conversations.conversational(state.policy)
    if staleness is not None:
        asynchronous.attach(state, task, staleness)
    began, rows = time.monotonic(), [metrics for _, metrics, _ in grpo.train(config, task, state)]
    seconds = time.monotonic() - began

    def mean(name: str, some: list[dict[str, Any]]) -> float:
        return sum(row.get(name, 0.0) for row in some) / len(some)

    return {
        "episodes_per_minute": 60 * updates * PROMPTS * GROUP / seconds, "seconds": seconds,
        "first_reward": mean("reward", rows[:LAST]), "reward": mean("reward", rows[-LAST:]),
        "staleness": mean("staleness", rows), "max_staleness": max(row.get("max_staleness", 0.0) for row in rows),
        "waiting": sum(row.get("waiting", 0.0) for row in rows) / seconds, "turns": mean("turns", rows),
    }  # fmt: skip


def main() -> None:
    """Run both, seed by seed, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    given = parser.parse_args()

    import torch

    from foresight.runtime import bench

    torch.set_num_threads(1)
    began = time.monotonic()
    found: dict[str, dict[str, dict[str, float]]] = {"synchronous": {}, "asynchronous": {}}
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as folder:
            model = tiny(Path(folder), seed)
            for name, staleness in (("synchronous", None), ("asynchronous", given.staleness)):
                found[name][str(seed)] = trained(model, seed, staleness, given.updates, given.learning_rate)
                print(name, seed, {key: round(value, 3) for key, value in found[name][str(seed)].items()}, flush=True)

    def over(name: str, key: str) -> float:
        return sum(run[key] for run in found[name].values()) / len(given.seeds)

    document = {
        "what": "Asynchronous against synchronous GRPO on environments whose episodes differ 10:1 in length",
        "command": " ".join(["python", "benchmarks/async_rollouts.py", *sys.argv[1:]]),
        "seeds": given.seeds,
        "bound": given.staleness,
        "updates": given.updates,
        "learning_rate": given.learning_rate,
        "speedup": over("asynchronous", "episodes_per_minute") / over("synchronous", "episodes_per_minute"),
        "reward_difference": over("asynchronous", "reward") - over("synchronous", "reward"),
        "staleness": over("asynchronous", "staleness"),
        **found,
    }
    bench.record(FILE, document, began)


if __name__ == "__main__":
    main()
