"""The model card of an exported Hugging Face folder: base model, data, objective, results and license."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from foresight.nets.language.pretrained import GENERATION
from foresight.runtime import catalog
from foresight.runtime.checkpoints import checkpoint
from foresight.runtime.config.settings import Settings

PACKAGED = {"base_model": "HuggingFaceTB/SmolLM2-135M-Instruct", "license": "apache-2.0"}  # of the model "smollm2"
# The text that a reward model reads (`nets.language.completion.encode`), as code that needs only transformers.
_PLAIN = """
def written(question, answer):
    return question + answer + tokenizer.eos_token
"""
_TURNS = """
def written(question, answer):
    asked = [{"role": "user", "content": question}]
    opened = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": answer}], tokenize=False)
    reply = whole[len(opened) :]
    ends = [reply.index(end) + len(end) for end in ENDS if end in reply]
    return opened + (reply[: min(ends)] if ends else reply + tokenizer.eos_token)
"""
_ASK = """
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

folder = "."  # the folder of this card
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()


WRITTEN


pairs = [("What is 1+1?", "2"), ("What is 1+1?", "It is three.")]
batch = tokenizer([written(*pair) for pair in pairs], padding=True, return_tensors="pt"SPECIAL)
with torch.no_grad():
    scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].tolist()
print(scores)
"""
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


def write(folder: Path, settings: Settings, summary: dict[str, Any]) -> Path:
    """Write the `README.md` of an exported folder (model or adapter) from the summary of its run; returns its path.

    The front matter is that of the Hugging Face hub (https://huggingface.co/docs/hub/model-cards).
    """
    library = "peft"
    if not (folder / "adapter_config.json").is_file():
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type", "")
        library = "foresight" if kind.startswith("foresight") else "transformers"  # the library that loads it
    use = scoring(folder) if catalog.entry(settings.algorithm).name == "reward_model" else ""
    checkpoint.write_atomic(folder / "README.md", text(settings, summary, library) + use)
    return folder / "README.md"


@dataclass(frozen=True)
class File:
    """A GGUF file: its name, its bytes, and the evaluation of the model in it (None: it could not be measured)."""

    name: str
    size: int
    evaluation: dict[str, Any] | None


def write_files(folder: Path, settings: Settings, summary: dict[str, Any], files: Sequence[File]) -> Path:
    """Write the `README.md` of a folder of GGUF files: the card, and each file's size and results."""
    metric = summary["evaluation"]["metric"]
    rows = [(file, file.evaluation) for file in files]
    shown = "\n".join(
        f"| `{file.name}` | {file.size / 1e6:,.1f} MB | {'not measured | |' if found is None else _row('', found)[5:]}"
        for file, found in rows
    )
    use = f"""
## Files

| file | size | {metric} | standard deviation | rows |
|---|---|---|---|---|
{shown}

Each was read back and evaluated as the run was. llama.cpp runs them (`llama-cli -m {files[0].name}`), and so does
foresight: `--model {files[0].name}`.
"""
    checkpoint.write_atomic(folder / "README.md", text(settings, summary, "gguf") + use)
    return folder / "README.md"


def policy(settings: Settings, step: int, evaluation: dict[str, Any], address: str) -> str:
    """The card of a run without an export: what it was trained on, how well it does, and its `address`."""
    entry, env = catalog.entry(settings.algorithm), Path(settings.env).name
    name = f"{entry.name} on {env}"
    kind, of = ("text-generation", "texts") if entry.kind == "text" else ("reinforcement-learning", "episodes")
    what = f"{evaluation['metric']}, {evaluation['n']} {of if evaluation['n'] != 1 else of[:-1]}, seed {settings.seed}"
    result = {
        "task": {"type": kind},
        "dataset": {"type": env, "name": env},
        "metrics": [{"type": evaluation["metric"], "value": evaluation["mean"], "name": what}],
    }
    front = {
        "library_name": "foresight",
        "pipeline_tag": kind,
        "tags": ["foresight", entry.name, env, *(f"arxiv:{number}" for number in ARXIV.findall(entry.doc))],
        "model-index": [{"name": name, "results": [result]}],
    }
    changed = "\n".join(f"{key}: {json.dumps(value)}" for key, value in settings.typed().config.items())
    return f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True).rstrip()}
---

# {name}

{entry.title}

| | {evaluation["metric"]} | standard deviation | {of} |
|---|---|---|---|
{_row(f"after {step:,} {entry.unit}, seed {settings.seed}", evaluation)}

```python
import foresight

agent = foresight.load("{address}")
agent.evaluate()
```

```yaml
{changed}
```
"""


def text(settings: Settings, summary: dict[str, Any], library: str = "transformers") -> str:
    """The card as Markdown with front matter; `library` is the one that loads the folder."""
    entry, model = catalog.entry(settings.algorithm), str(settings.config.get("model", ""))  # "": random weights
    adapter = library == "peft"
    name = f"{_short(model)}-{entry.name}" if model else entry.name
    known = base(model) if model else {}
    scorer = entry.name == "reward_model"
    after, before = summary["evaluation"], summary["baseline"]
    data = str(settings.config.get("data") or settings.env)
    data = Path(data).name if Path(data).exists() else data  # a local path means nothing to others
    task = Path(settings.env).name
    held_out = f"{after['metric']} on {after['n']} held-out rows, seed {settings.seed}"
    result = {
        "task": {"type": "text-classification" if scorer else "text-generation"},
        "dataset": {"type": data, "name": data},
        "metrics": [{"type": after["metric"], "value": after["mean"], "name": held_out}],
    }
    front = {
        **({"license": known["license"]} if "license" in known else {}),
        **({"base_model": known["base_model"]} if "base_model" in known else {}),
        **({"base_model_relation": "adapter" if adapter else "finetune"} if "base_model" in known else {}),
        "library_name": library,
        "pipeline_tag": result["task"]["type"],  # type: ignore[index]
        "tags": ["foresight", entry.name, *(f"arxiv:{number}" for number in ARXIV.findall(entry.doc))],
        "model-index": [{"name": name, "results": [result]}],
    }
    full = _short(model) if model else "A language model trained from scratch"
    what = f"An adapter (LoRA) of {_short(model)}" if adapter else full
    by = f"`{entry.name}` of the library foresight" if entry.ours else f"`{entry.path.name}` in the library foresight"
    changed = "\n".join(f"{key}: {json.dumps(value)}" for key, value in settings.typed().config.items())
    return f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True).rstrip()}
---

# {name}

{what}, trained by {by}.

## Objective

{entry.title}

```text
{objective(entry.doc)}
```

## Data

`{data}`; {after["n"]} held-out rows of `{task}` were never trained on.

## Results

| | {before["metric"]} | standard deviation | rows |
|---|---|---|---|
{_row("before", before)}
{_row(f"after {summary['steps']:,} {summary['unit']}, seed {settings.seed}", after)}

One run of one seed; {summary["seconds"]:.0f} s of training, {summary["peak_gib"]:.2f} GiB of peak memory.

    {summary["command"].replace(str(entry.path), entry.path.name)}

```yaml
{changed}
```

Versions: {", ".join(f"{package} {version}" for package, version in summary["versions"].items())}.

## Base model and license

{_origin(model, known)}
"""


def scoring(folder: Path) -> str:
    """How to use the reward model in a folder: the exact text that it reads, and code that scores answers."""
    from transformers import AutoTokenizer  # late: it is slow

    from foresight.nets.language import decoder  # noqa: F401  registers our decoder with transformers

    tokenizer = AutoTokenizer.from_pretrained(folder)
    written = _PLAIN if tokenizer.chat_template is None else _TURNS
    written = written.replace("ENDS", json.dumps(_ends(folder, tokenizer)))
    code = _ASK.replace("WRITTEN", written.strip())
    code = code.replace("SPECIAL", "" if tokenizer.chat_template is None else ", add_special_tokens=False")
    if json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"].startswith("foresight"):
        code = "import foresight.nets.language.decoder  # registers the decoder with transformers\n" + code
    names: dict[str, Any] = {"tokenizer": tokenizer}
    exec(written, names)
    shown = names["written"]("What is 1+1?", "2")
    return f"""
## How to score

The score is the model's output at the last token of this text, here for the question "What is 1+1?" and the answer "2":

```python
{shown!r}
```

Higher is better; only the differences between answers to one question mean something.

```python
{code.strip()}
```
"""


def _ends(folder: Path, tokenizer: Any) -> list[str]:
    """The texts that end an answer: those of the model's generation config and the tokenizer's own."""
    file = folder / GENERATION
    found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    ids = {*(found if isinstance(found, list) else [found]), tokenizer.eos_token_id} - {None}
    return [tokenizer.decode([token]) for token in sorted(ids)]


def base(model: str) -> dict[str, str]:
    """The hub id and license of the base model of a run, as far as its own card gives them."""
    if model == "smollm2":
        return PACKAGED
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return {"base_model": model}
    front = _front(folder / "README.md")
    return {key: value for key in PACKAGED if isinstance(value := front.get(key), str)}


def objective(doc: str) -> str:
    """The first indented block of an algorithm's docstring: the formula."""
    found = re.search(r"(?m)(?:^ {4}.*\n(?:\s*\n(?= {4}))?)+", doc + "\n")
    return "\n".join(line.removeprefix("    ") for line in found[0].rstrip().splitlines()) if found else ""


def _row(label: str, found: dict[str, Any]) -> str:
    mean, std = (f"{found[name]:.4g}" if found["n"] else "unknown" for name in ("mean", "std"))
    return f"| {label} | {mean} | {std} | {found['n']} |"


def _front(file: Path) -> dict[str, Any]:
    """The front matter of a card; empty if it has none, or an invalid one."""
    try:
        parts = file.read_text(encoding="utf-8").split("---\n", 2)
        found = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _origin(model: str, known: dict[str, str]) -> str:
    if not model:
        return "The weights were initialized at random: there is no base model."
    name = known.get("base_model", _short(model))
    if "license" in known:
        return f"The weights derive from {name} and are under its license, {known['license']}."
    return f"The weights derive from {name} and are under its license: look it up before you share them."


def _short(model: str) -> str:
    """The name of a model: the last part of its hub id or folder (of its run, if the folder is called export)."""
    if model == "smollm2":
        return PACKAGED["base_model"].rsplit("/", 1)[-1]
    path = Path(model)
    return path.parent.name if path.name == "export" and path.parent.name else path.name
