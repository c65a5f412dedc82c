"""Two-hop questions with one search: what can be answered from what it finds. results/one-search.json.

python benchmarks/one_search.py

The baseline of the task `search`: the question itself is the only query, and the answer is read from what it returns,
the snippets of three documents, or of ten. On the 40 held-out questions:

- `ceiling`: the city is somewhere in what was returned, so that the best reader could name it; `ceiling_10` the same
  with ten documents instead of three;
- `smollm2`: SmolLM2-135M reads what was returned and the question, and names the city (any mention of it counts);
- `two_searches`: the script of the task, which searches for the firm and then for its founder;
- `trained`: SmolLM2 after SFT, which may search as often as it wants (results/sft-smollm2-search.json), and `times`,
  how many times the ceiling that is.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "one-search.json"
TOKENS = 24  # of an answer


def main() -> None:
    """Measure, and write the JSON."""
    import torch

    from foresight.envs.text.task import Example
    from foresight.envs.tools import make
    from foresight.envs.tools.episode import close, scripted
    from foresight.envs.tools.search import Search
    from foresight.nets.language import pretrained
    from foresight.planning.generation.rollout import complete, texts
    from foresight.runtime import bench

    torch.set_num_threads(1)
    began = time.monotonic()
    task = make.make("search", Search)
    found: dict[str, list[bool]] = {"ceiling": [], "ceiling_10": [], "smollm2": [], "two_searches": []}
    prompts, cities = list[Example](), list[str]()
    for example in task.test:
        env, city = Search(), str(example.columns["row"]["city"])
        question = env.reset(example.columns["row"])
        assert env._index is not None
        result = env.search(question)
        more = "\n".join(text for _, text in env._index.search(question, 10))
        found["ceiling"].append(city in result.split("]", 1)[-1])
        found["ceiling_10"].append(city in more)
        prompts.append(Example(f"{result}\n\n{question} Answer with the city."))
        cities.append(city)
        assert task.episode is not None
        episode = task.episode(example)
        scripted(episode, task.turns)  # raises if it does not earn everything
        found["two_searches"].append(episode.parts()["outcome"] == 1)
        close(episode)
    model = pretrained.load("smollm2")
    answers = texts(model, complete(model, prompts, 1, TOKENS, 0.0))
    found["smollm2"] = [city in answer for city, answer in zip(cities, answers, strict=True)]
    shares = {name: sum(values) / len(values) for name, values in found.items()}
    trained = json.loads((ROOT / "results" / "sft-smollm2-search.json").read_text())["iqm"]
    document: dict[str, Any] = {
        "what": "Two-hop questions over 500 documents, answered from one search with the question itself",
        "command": shlex.join(["python", "benchmarks/one_search.py", *sys.argv[1:]]),
        "seeds": [0],
        "questions": len(cities),
        **shares,
        "trained": trained,
        "times": trained / shares["ceiling"],
        "answers": [
            [str(p.prompt), answer, city] for p, answer, city in zip(prompts[:4], answers, cities, strict=False)
        ],
    }
    bench.record(FILE, document, began)


if __name__ == "__main__":
    main()
