"""GGUF files of a trained language model, read by llama.cpp and by this library. results/gguf-files.json.

python benchmarks/gguf_files.py RUN/export [RUN/export ...]   # one run a seed

Needs llama-cpp-python (0.3.16), which is compiled on the machine. For each quantization, of the held-out questions of
addition, answered greedily in up to 16 tokens, the mean over the runs (`by_seed` has each):

- `tokenized`: share of the prompts that llama.cpp's tokenizer splits into the same tokens;
- `llama_cpp`, `foresight`: accuracy of the file in llama.cpp and in this library, which computes with the rounded
  weights; `same`: share of equal answers. llama.cpp also rounds what a layer reads, to 8 bits in `q8_0` and `q4_0`.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "gguf-files.json"
KINDS = ("bf16", "f16", "q8_0", "q4_0")
QUESTIONS, TOKENS, ROOM = 100, 16, 256


def main(exports: Sequence[str]) -> None:
    """Measure, and write the JSON."""
    from foresight.runtime import bench

    began = time.monotonic()
    found = [measured(export) for export in exports]
    rows = {}
    for kind in KINDS:
        of_kind = [rows_of_run[kind] for rows_of_run in found]
        by_seed = {key: [row[key] for row in of_kind] for key in of_kind[0]}
        rows[kind] = {key: round(statistics.fmean(values), 4) for key, values in by_seed.items()} | {"by_seed": by_seed}
    document: dict[str, Any] = {
        "what": "GGUF files of a language model that was trained on addition, in llama.cpp and in this library",
        "command": shlex.join(["python", "benchmarks/gguf_files.py", *exports]),
        "seeds": [json.loads((Path(export).parent / "summary.json").read_text())["seed"] for export in exports],
        "questions": QUESTIONS,
        **rows,
    }
    bench.record(FILE, document, began)


def measured(export: str) -> dict[str, dict[str, float]]:
    """What one model's file of each quantization gives."""
    import torch

    from foresight.envs.make import make
    from foresight.nets.language import gguf, pretrained
    from foresight.planning.generation.rollout import complete, texts

    task = make("addition", "text")
    questions = list(task.test)[:QUESTIONS]
    policy = pretrained.load(export)
    prompts = [policy.encode(example.prompt) for example in questions]
    written = [policy.tokenizer.decode(tokens) for tokens in prompts]
    rows = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            file = gguf.write(export, Path(folder) / f"model-{kind}.gguf", kind)
            theirs, same_tokens = _llama_cpp(file, written, prompts, set(policy.stop_ids))
            read = pretrained.load(str(file))
            with torch.no_grad():
                ours = texts(read, complete(read, questions, 1, TOKENS, 0.0))
            answers = [policy.decode(tokens) for tokens in theirs]
            rows[kind] = {
                "megabytes": round(file.stat().st_size / 1e6, 1),
                "tokenized": same_tokens,
                "llama_cpp": sum(task.grade(questions, answers)) / len(questions),
                "foresight": sum(task.grade(questions, ours)) / len(questions),
                "same": sum(a.strip() == b.strip() for a, b in zip(answers, ours, strict=True)) / len(questions),
            }
            print(export, kind, rows[kind], flush=True)
    return rows


def _llama_cpp(
    file: Path, written: list[str], prompts: list[list[int]], ends: set[int]
) -> tuple[list[list[int]], float]:
    """The tokens of greedy answers, and the share of the prompts, `written` as text, that get the tokens `prompts`."""
    import llama_cpp
    import torch

    threads = torch.get_num_threads()
    model = llama_cpp.Llama(str(file), n_ctx=ROOM, n_threads=threads, n_threads_batch=threads, verbose=False)
    found, same = list[list[int]](), 0
    for text, tokens in zip(written, prompts, strict=True):
        same += model.tokenize(text.encode(), add_bos=False, special=True) == list(tokens)
        model.reset()
        answer = list[int]()
        for token in model.generate(tokens, temp=0.0, top_k=1, repeat_penalty=1.0):
            if token in ends or len(answer) == TOKENS:
                break
            answer.append(token)
        found.append(answer)
    return found, same / len(prompts)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("Name the exports of runs, one a seed: python benchmarks/gguf_files.py RUN/export [RUN/export ...]")
    main(sys.argv[1:])
