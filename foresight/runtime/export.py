"""Exports a trained policy that runs without this library: a TorchScript or ONNX file, or a Hugging Face folder.

A language model is exported as a folder that `transformers` loads, with its model card: merged or, for a run with LoRA,
as an adapter. Or as a folder of GGUF files, which llama.cpp runs: the card has the accuracy of each quantization.

Any other policy is exported as its greedy `act`: inputs are the parts of the observation and, for a policy with memory,
the leaves of its carry; outputs are the action, as `Agent.act` returns it, and the leaves of the next carry. All have a
leading batch dim of any length. A carry of zeros is an empty memory: the caller must reset the rows of envs whose
episode ended to zeros. Normalization is part of the file.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gymnasium
import numba
import torch
from torch import Tensor, nn

from foresight import errors
from foresight.data.trajectory import Tree
from foresight.errors import UserError, resume_command
from foresight.nets.stacked_mlp import StackedMLP
from foresight.runtime import card, catalog, kinds, run
from foresight.runtime.agent import Agent
from foresight.runtime.catalog import Algorithm, State

FORMATS = ("torchscript", "onnx", "merged", "adapter", "gguf")
FOLDERS = ("merged", "adapter")  # of a language model
SUFFIXES = {"torchscript": ".pt", "onnx": ".onnx"}


Form = bool | dict[str, "Form"]  # of a tree: where it has tensors


class Exported(nn.Module):
    """The greedy policy as a function of tensors alone: `(*obs, *carry) -> (action, *carry)`."""

    def __init__(
        self, module: Algorithm, state: State, obs: Tree, carry: Tree, convert: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self._act, self._state = getattr(module.act, "__wrapped__", module.act), state
        self._convert = convert
        for field in dataclasses.fields(state):
            if isinstance(getattr(state, field.name), nn.Module):
                self.add_module(field.name, getattr(state, field.name))
        self._forms = (form(obs), form(carry))
        self.requires_grad_(False)  # a file only acts: a memory would hold the graph of its whole episode

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """One step of every env."""
        obs, carry = self._forms
        left = list(tensors)
        action, _, after = self._act(self._state, fill(obs, left), fill(carry, left), False)
        return (action if self._convert is None else self._convert(action), *leaves(after))


def export(
    path: str | Path,
    kind: str = "torchscript",
    out: str | Path | None = None,
    checkpoint: str | int = "latest",
    quantize: Sequence[str] = ("f16",),
) -> Path:
    """Write the policy of the run at `path` to `out`; returns that path.

    The default is `policy.pt` or `policy.onnx` in the run (of a bundled agent: in the working directory), or the folder
    `merged`, `adapter` or `gguf`, with a file for each of `quantize`: "f16", "bf16", "q8_0" or "q4_0"; those of an
    earlier export are removed. A TorchScript file contains a description of its inputs and outputs, `policy.json`; an
    ONNX file names them. Raises UserError for an unknown format or one that the run does not support, such as a policy
    that plans with random candidates or acts on the rewards of its episode, and if packages are missing.
    """
    if kind not in FORMATS:
        raise errors.unknown("format", kind, FORMATS)
    home = run.find(path)
    inside = home if home == Path(path).expanduser() else Path()  # a bundled agent is no place to write to
    if kind == "gguf":
        return _gguf(home, quantize, inside / kind if out is None else Path(out), checkpoint)
    if kind in FOLDERS:
        return _folder(home, kind, inside / kind if out is None else Path(out), checkpoint)
    if out is not None:
        check_suffix(kind, out)
    found = run.Run(home)
    formats = kinds.get(found.settings.kind).exports
    if kind not in formats:  # before a whole language model is loaded
        fix = f": add --format {formats[0]} (or {', '.join(formats[1:])})." if formats else ". No format holds it."
        raise UserError(f"{path} is a run on '{found.settings.env}', whose policy cannot be exported as {kind}{fix}")
    agent = run.load(found.path, checkpoint, device="cpu")
    try:
        if hasattr(agent.module, "rewarded") and not agent.settings.config.get("constant_return"):
            raise UserError(
                f"{path} is a run of {agent.settings.algorithm}, which acts on the rewards of its episode, and a file "
                "gets none. Act with it in Python, with agent.reward(...) after each step: "
                f"agent = foresight.load({str(path)!r})"
            )
        file = Path(out) if out is not None else inside / f"policy{SUFFIXES[kind]}"
        policy, inputs, names = prepare(agent)
        if not write(policy, inputs, names, file, kind):
            raise UserError(
                f"{path} is a run of {agent.settings.algorithm}, whose actions need more than tensors, such as a plan "
                "or a cache of attention: a file cannot hold its policy. Act with it in Python: "
                f"foresight.load({str(path)!r})"
            )
    finally:
        agent.close()
    return file


def check_suffix(kind: str, out: str | Path) -> None:
    """Raise UserError for a file `out` with the suffix of another format than `kind`."""
    suffix = Path(out).suffix.lower()
    for other, usual in SUFFIXES.items():
        if kind in SUFFIXES and kind != other and suffix == usual:
            raise UserError(
                f"{out} would hold {kind}, and {usual} is the suffix of {other}: add --format {other}, or choose an "
                f"--out that ends in {SUFFIXES[kind]}."
            )


def is_text(path: str | Path) -> bool:
    """Whether this is a run of a language model, of which the hub holds the exported folder alone."""
    return run.Run(run.find(path)).settings.kind == "text"


def share(path: str | Path, name: str, written: Path | None, checkpoint: str | int = "latest") -> str:
    """Upload a run to the hub as `name` ("OWNER/NAME"), with its exported file if there is one; returns the address.

    A language model is uploaded as the folder `written`; another run as what `foresight.load("hub:OWNER/NAME")` needs.
    Raises UserError as `hub.push` does.
    """
    from foresight.runtime import hub

    if written is not None and written.is_dir():
        return hub.push(written, name)
    with tempfile.TemporaryDirectory() as folder:
        hub.slim(run.find(path), Path(folder), hub.PREFIX + name, checkpoint)
        if written is not None:
            shutil.copyfile(written, Path(folder) / written.name)
        return hub.push(Path(folder), name)


def _ended(path: Path, kind: str) -> run.Run:
    """The run of a language model at `path`. Raises UserError if it is another one, or has not ended."""
    found = run.Run(path)
    if kind not in kinds.get(found.settings.kind).exports:
        raise UserError(f"'{kind}' is for language models, but {path} is a run on '{found.settings.env}'.")
    if not found.summary and path.is_relative_to(catalog.BUNDLED):
        raise UserError(
            f"{path.relative_to(catalog.BUNDLED)} comes with the package, without the results that a card reports: "
            f"train it with foresight train {found.settings.algorithm}, and export that run."
        )
    if not found.summary:
        raise UserError(
            f"{path} has not ended, so there are no results for its card. Finish it with: " + resume_command(path)
        )
    return found


def _results(agent: Agent, summary: dict[str, Any]) -> dict[str, Any]:
    """The summary of the run for a card, which must report the exported checkpoint."""
    if agent.step == summary["steps"]:
        return summary
    return {**summary, "steps": agent.step, "evaluation": agent.evaluate().document()}


def _gguf(path: Path, quantize: Sequence[str], out: Path, checkpoint: str | int) -> Path:
    """A GGUF file for each of `quantize`, read back and evaluated, and their card."""
    found = _ended(path, "gguf")
    from foresight.nets.language import gguf, pretrained  # late: they bring transformers

    for name in quantize:
        if name not in gguf.QUANTIZATIONS:
            raise errors.unknown("quantization", name, gguf.QUANTIZATIONS)
    if out.exists() and (not out.is_dir() or any(x.suffix not in (".gguf", ".md") for x in out.iterdir())):
        raise UserError(f"{out} exists and is not an export as GGUF: choose another --out.")
    agent = run.load(path, checkpoint, device="cpu")
    try:
        if not hasattr(agent.state, "policy"):
            raise UserError(
                f"{path} is a run of {found.settings.algorithm}, which writes no text: export it as merged."
            )
        summary, files = _results(agent, found.summary), list[card.File]()
        with tempfile.TemporaryDirectory() as folder:
            merged = agent.module.export(agent.state, Path(folder) / "merged", True)
            for name in quantize:
                file = gguf.write(merged, out / f"model-{name}.gguf", name)
                agent.state.policy = pretrained.load(str(file), "cpu", found.settings.config.get("precision", "auto"))
                try:
                    measured = agent.evaluate().document()
                except UserError:  # its task or data is not here
                    measured = None
                files.append(card.File(file.name, file.stat().st_size, measured))
    finally:
        agent.close()
    for name in set(gguf.QUANTIZATIONS) - set(quantize):  # of an earlier export, perhaps of other weights
        (out / f"model-{name}.gguf").unlink(missing_ok=True)
    card.write_files(out, found.settings, summary, files)
    return out


def _folder(path: Path, kind: str, out: Path, checkpoint: str | int) -> Path:
    found = _ended(path, kind)
    if kind == "adapter" and not found.settings.config.get("lora"):
        raise UserError(f"{path} has no adapter. Train with --lora, or export it as merged.")
    if kind == "adapter" and (Path(found.settings.config["model"]) / "adapter_config.json").is_file():
        raise UserError(f"{path} started from an adapter, so its own holds only later changes. Export it as merged.")
    from foresight.nets.language import pretrained  # late: it brings transformers

    pretrained.check_folder(out)
    agent = run.load(path, checkpoint, device="cpu")
    try:
        written: Path = agent.module.export(agent.state, out, kind == "merged")
        summary = _results(agent, found.summary)
    finally:
        agent.close()
    card.write(written, found.settings, summary)
    return written


def prepare(agent: Agent) -> tuple[Exported, tuple[Tensor, ...], dict[str, list[str]]]:
    """The policy of an `Agent`, example inputs (two envs), and the names of its inputs and outputs."""
    space = agent.spaces.obs
    obs, _ = agent.batch(_example(space))
    with torch.no_grad():
        _, _, carry = agent.module.act(agent.state, obs, None, explore=False)
    policy = Exported(agent.module, agent.state, obs, carry, agent.convert).eval()
    names = {"inputs": [*paths(obs, "obs"), *paths(carry, "carry")]}
    names["outputs"] = ["action", *(f"next_{name}" for name in paths(carry, "carry"))]
    return policy, (*leaves(obs), *leaves(carry)), names


def write(policy: Exported, inputs: tuple[Tensor, ...], names: dict[str, list[str]], file: Path, kind: str) -> bool:
    """Trace `policy` and write it, and return True; False where its trace is not the policy, and nothing is written.

    Raises UserError if the file cannot be written or a package is missing.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # tracing warns of constants, which are intended
        stack.enter_context(_plain(policy))
        traced = _traced(policy, inputs)
        if traced is None:
            return False
        try:
            if kind == "torchscript":
                shapes = [list(x.shape[1:]) for x in inputs]
                dtypes = [str(x.dtype).removeprefix("torch.") for x in inputs]
                described = {"policy.json": json.dumps({**names, "shapes": shapes, "dtypes": dtypes})}
                buffer = io.BytesIO()
                torch.jit.save(traced, buffer, _extra_files=described)
                file.write_bytes(buffer.getvalue())
            else:
                _onnx(policy, inputs, names, file)
        except OSError as error:
            raise UserError(f"Cannot write {file}: {error.strerror or error}. Choose another --out.") from error
    return True


def _traced(policy: Exported, inputs: tuple[Tensor, ...]) -> Any:
    """The trace of `policy`, or None where it does not act as the policy in three envs instead of two, and later.

    It must do so from an empty memory too: a chunk of actions may be predicted there alone.
    """
    try:
        traced = torch.jit.trace(policy, inputs, check_trace=False)
        now = tuple(torch.cat([x, x[:1]]) for x in inputs)
        seen = len(now) - len(traced(*now)) + 1  # leaves of the observation
        obs, carry = now[:seen], now[seen:]
        for held in (carry, tuple(map(torch.zeros_like, carry))):
            for _ in range(2):
                expected, found = policy(*obs, *held), traced(*obs, *held)
                if not all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(expected, found, strict=True)):
                    return None
                held = expected[1:]
    except (RuntimeError, IndexError, numba.core.errors.NumbaError):  # the last: a compiled loop is given no numbers
        return None
    return traced


def _onnx(policy: Exported, inputs: tuple[Tensor, ...], names: dict[str, list[str]], file: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError("ONNX needs two packages. Install them with: pip install 'foresight[onnx]'") from error
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

    def __exit__(self, *_: object) -> None:
        for mlp, before in zip(self._mlps, self._before, strict=True):
            mlp._compiled = before


def form(tree: Tree) -> Form:
    """The structure of a tree of tensors, for `fill`."""
    if isinstance(tree, dict):
        return {key: form(tree[key]) for key in sorted(tree)}
    return tree is not None


def fill(shape: Form, left: list[Tensor]) -> Tree:
    """The tree of this structure, filled with tensors popped from the front of `left`."""
    if isinstance(shape, dict):
        return {key: fill(part, left) for key, part in shape.items()}
    return left.pop(0) if shape else None


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in the order of the sorted keys."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    return [] if tree is None else [tree]


def paths(tree: Tree, name: str) -> list[str]:
    """The names of the leaves: `obs`, or `obs.image`, `carry.shared.hidden`, ..."""
    if isinstance(tree, dict):
        return [path for key in sorted(tree) for path in paths(tree[key], f"{name}.{key}")]
    return [] if tree is None else [name]


def _example(space: gymnasium.Space[Any]) -> Any:
    """Two observations of the space."""
    from gymnasium.vector.utils import batch_space

    batched = batch_space(space, 2)
    batched.seed(0)
    return batched.sample()
