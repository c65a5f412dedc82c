"""A trained policy that runs without this library: as one file, TorchScript or ONNX, or as a Hugging Face folder.

A language model is written as a folder that `transformers` loads, merged or (of a run with LoRA) as an adapter, with
its model card.

Of a policy over tensors the greedy `act` is written, whatever the algorithm is: inputs are the observation's parts and,
of a policy with a memory, the leaves of its carry; outputs are the action and the leaves of the next carry. All have
the batch dim first, of any length. Zeros for the carry are a memory that has read nothing; whoever runs the file sets
the rows of worlds whose episode ended back to zeros. Normalization is part of the file.
"""

from __future__ import annotations

import dataclasses
import io
import json
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foresight import errors
from foresight.errors import UserError
from foresight.nets.stacked_mlp import StackedMLP
from foresight.runtime import card, kinds, run

FORMATS = ("torchscript", "onnx", "merged", "adapter")
FOLDERS = ("merged", "adapter")  # of a language model
SUFFIXES = {"torchscript": ".pt", "onnx": ".onnx"}


class Exported(nn.Module):
    """The greedy policy as a function of tensors alone: `(*obs, *carry) -> (action, *carry)`."""

    def __init__(self, module: Any, state: Any, obs: Any, carry: Any) -> None:
        super().__init__()
        self._act, self._state = getattr(module.act, "__wrapped__", module.act), state
        for field in dataclasses.fields(state):
            if isinstance(getattr(state, field.name), nn.Module):
                self.add_module(field.name, getattr(state, field.name))
        self._forms = (form(obs), form(carry))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """One step of every world."""
        obs, carry = self._forms
        left = list(tensors)
        action, _, after = self._act(self._state, fill(obs, left), fill(carry, left), False)
        return (action, *leaves(after))


def export(
    path: str | Path, kind: str = "torchscript", out: str | Path | None = None, checkpoint: str | int = "latest"
) -> Path:
    """Write the policy of the run at `path` to `out`; returns where.

    By default that is `policy.pt` or `policy.onnx` in the run, or the folder `merged` or `adapter`. A TorchScript file
    holds a description of its inputs and outputs, `policy.json`; an ONNX file has them by name. Raises UserError for an
    unknown format or one that the run does not have, and where packages are missing.
    """
    if kind not in FORMATS:
        raise errors.unknown("format", kind, FORMATS)
    if kind in FOLDERS:
        return _folder(Path(path), kind, Path(path) / kind if out is None else Path(out), checkpoint)
    agent = run.load(path, checkpoint, device="cpu")
    try:
        if kind not in kinds.get(agent.settings.kind).exports:
            raise UserError(
                f"Only policies that act in environments can be exported, not one for '{agent.settings.env}'."
            )
        file = Path(out) if out is not None else Path(path) / f"policy{SUFFIXES[kind]}"
        policy, inputs, names = prepare(agent)
        write(policy, inputs, names, file, kind)
    finally:
        agent.close()
    return file


def _folder(path: Path, kind: str, out: Path, checkpoint: str | int) -> Path:
    found = run.Run(path)
    if kind not in kinds.get(found.settings.kind).exports:
        raise UserError(f"'{kind}' is for language models, and {path} is a run on '{found.settings.env}'.")
    if kind == "adapter" and not found.settings.config.get("lora"):
        raise UserError(f"{path} has no adapter: train with --lora, or export it as merged.")
    if kind == "adapter" and (Path(found.settings.config["model"]) / "adapter_config.json").is_file():
        raise UserError(f"{path} began from an adapter, so its own tells only what came after: export it as merged.")
    if not found.summary:
        raise UserError(f"{path} has not ended, so its card would have no numbers: run `foresight resume {path}`.")
    from foresight.nets.language import pretrained  # late: it brings transformers

    pretrained.check_folder(out)
    agent = run.load(path, checkpoint, device="cpu")
    try:
        written: Path = agent.module.export(agent.state, out, kind == "merged")
        summary = found.summary
        if agent.step != summary["steps"]:  # the card speaks of what is in the folder
            summary = {**summary, "steps": agent.step, "evaluation": agent.evaluate().document()}
    finally:
        agent.close()
    card.write(written, found.settings, summary)
    return written


def prepare(agent: Any) -> tuple[Exported, tuple[Tensor, ...], dict[str, list[str]]]:
    """The policy of an `Agent`, inputs to try it on (two worlds), and the names of its inputs and outputs."""
    space = agent.spaces.obs
    obs, _ = agent.batch(_example(space))
    with torch.no_grad():
        _, _, carry = agent.module.act(agent.state, obs, None, explore=False)
    policy = Exported(agent.module, agent.state, obs, carry).eval()
    names = {"inputs": [*paths(obs, "obs"), *paths(carry, "carry")]}
    names["outputs"] = ["action", *(f"next_{name}" for name in paths(carry, "carry"))]
    return policy, (*leaves(obs), *leaves(carry)), names


def write(policy: Exported, inputs: tuple[Tensor, ...], names: dict[str, list[str]], file: Path, kind: str) -> None:
    """Trace `policy` and write it. Raises UserError where the disk or a missing package does not let it."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # a trace fixes what does not depend on the batch: as it should
        stack.enter_context(_plain(policy))
        try:
            if kind == "torchscript":
                described = {"policy.json": json.dumps({**names, "shapes": [list(x.shape[1:]) for x in inputs]})}
                held = io.BytesIO()
                torch.jit.save(torch.jit.trace(policy, inputs, check_trace=False), held, _extra_files=described)
                file.write_bytes(held.getvalue())
            else:
                _onnx(policy, inputs, names, file)
        except OSError as error:
            raise UserError(f"Cannot write {file}: {error.strerror or error}.") from error


def _onnx(policy: Exported, inputs: tuple[Tensor, ...], names: dict[str, list[str]], file: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError("Writing ONNX needs two packages. Install them with: pip install 'foresight[onnx]'") from error
    batch = torch.export.Dim("batch")
    torch.onnx.export(
        policy, inputs, file, input_names=names["inputs"], output_names=names["outputs"],
        dynamic_shapes=(tuple({0: batch} for _ in inputs),), dynamo=True, external_data=False, verbose=False,
    )  # fmt: skip


class _plain:
    """StackedMLP in torch alone: a trace does not see what numpy computes."""

    def __init__(self, policy: nn.Module) -> None:
        self._mlps = [module for module in policy.modules() if isinstance(module, StackedMLP)]

    def __enter__(self) -> None:
        self._before = [mlp._compiled for mlp in self._mlps]
        for mlp in self._mlps:
            mlp._compiled = False

    def __exit__(self, *_: Any) -> None:
        for mlp, before in zip(self._mlps, self._before, strict=True):
            mlp._compiled = before


def form(tree: Any) -> Any:
    """A tree of tensors without its tensors: what `fill` puts them back into."""
    if isinstance(tree, dict):
        return {key: form(tree[key]) for key in sorted(tree)}
    return tree is not None


def fill(shape: Any, left: list[Tensor]) -> Any:
    """The tree of this form, with tensors from the front of `left`, which it takes out."""
    if isinstance(shape, dict):
        return {key: fill(part, left) for key, part in shape.items()}
    return left.pop(0) if shape else None


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in the order of the sorted keys."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    return [] if tree is None else [tree]


def paths(tree: Any, name: str) -> list[str]:
    """The names of the leaves: `obs`, or `obs.image`, `carry.shared.hidden`, ..."""
    if isinstance(tree, dict):
        return [path for key in sorted(tree) for path in paths(tree[key], f"{name}.{key}")]
    return [] if tree is None else [name]


def _example(space: Any) -> Any:
    """Two observations of the space."""
    from gymnasium.vector.utils import batch_space

    batched = batch_space(space, 2)
    batched.seed(0)
    return batched.sample()
