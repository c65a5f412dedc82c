"""Runs on the Hugging Face hub: `foresight export RUN --push OWNER/NAME`, and `foresight.load("hub:OWNER/NAME")`.

A repository holds what acting needs: `config.yaml` and one checkpoint (safetensors and JSON, never pickle), without
replay and moments of optimizers, and a card. A language model is a Hugging Face folder instead, whose hub id is given
as `--model`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from foresight.data.priorities import Prioritized
from foresight.data.replay import Replay
from foresight.data.sequences import Sequences
from foresight.errors import UserError
from foresight.runtime import card, catalog, imagined, legacy, run
from foresight.runtime.catalog import State
from foresight.runtime.checkpoints import checkpoint

PREFIX = "hub:"
NAME = re.compile(r"[\w.-]+/[\w.-]+")
# What an earlier push may have left, such as a checkpoint of more steps, which would be loaded instead.
WRITTEN = (
    "checkpoints/*", "config.yaml", "policy.pt", "policy.onnx", "config.json", "generation_config.json", "tokenizer*",
    "chat_template.jinja", "adapter_config.json", "*.safetensors", "*.safetensors.index.json", "*.gguf",
)  # fmt: skip
LEFT_OUT = (torch.optim.Optimizer, Replay, Prioritized, Sequences)  # fields of a State that acting does not need


def push(folder: Path, name: str) -> str:
    """Upload `folder` as the repository `name` ("OWNER/NAME"), which is made if it is missing; returns its address.

    In a repository that is there already, it takes the place of an earlier export; other files stay.

    Raises UserError for a wrong name, without a login or the right to write, and where the hub cannot be reached.
    """
    import huggingface_hub

    _check(name)
    with _explained(name):
        api = huggingface_hub.HfApi()
        address = api.create_repo(name, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=folder, commit_message="An export of foresight", delete_patterns=list(WRITTEN)
        )
    return str(address)


def pull(name: str) -> Path:
    """The run directory of the repository `name` ("OWNER/NAME"), downloaded into the hub's cache.

    Raises UserError as `push` does, and for a repository that holds no run of a built-in algorithm, one that reads
    files or holds conversations (these would run code that came with it), or one inside the world model of another run.
    """
    import huggingface_hub

    _check(name)
    with _explained(name):
        folder = Path(huggingface_hub.snapshot_download(name))
    if not (folder / "config.yaml").is_file():
        raise UserError(
            f"{name} holds no run of foresight. A language model of the hub is given by its id: --model {name}"
        )
    document = legacy.document(catalog.read_mapping(folder / "config.yaml"))  # old names are names too
    algorithm = str(document.get("algorithm"))
    if algorithm not in catalog.algorithms():
        raise UserError(
            f"{name} is a run of {algorithm}, which is not part of foresight: only its own algorithms are run."
        )
    if imagined.run_of(str(document.get("env"))) is not None:
        raise UserError(
            f"{name} was trained inside the world model of another run, which a repository does not hold: it is not "
            "loaded."
        )
    if document.get("paths") or "text" in (document.get("kind"), catalog.entry(algorithm).kind):
        raise UserError(
            f"{name} is a run that reads files or tasks of texts, which may hold code: it is not loaded. A language "
            f"model of the hub is given by its id: --model {name}"
        )
    return folder


def slim(path: Path, folder: Path, name: str, which: str | int = "latest") -> Path:
    """Write into `folder` what acting with the run at `path` needs, and its card; returns `folder`.

    `name` is how it is loaded: "hub:OWNER/NAME". Recorded episodes stay behind: only training reads them. A field of a
    State with the metadata `{"share": False}` is left as it is built, and one with `{"share": function}` is what the
    function returns of the State. Raises UserError for a run that others cannot load: of an algorithm of one's own,
    inside a world model, or one that reads other files of this machine.
    """
    agent = run.load(path, which, device="cpu")
    settings = agent.settings.typed()
    try:
        if settings.algorithm not in catalog.algorithms():
            raise UserError(
                f"{path} is a run of {settings.algorithm}, which is not part of foresight: hub: would not load it, so "
                "that it cannot be shared."
            )
        if imagined.run_of(settings.env) is not None:
            raise UserError(
                f"{path} was trained inside the world model of another run, which others do not have: it cannot be "
                "shared."
            )
        recorded = settings.config.get("data", ()) if hasattr(agent.module, "read_files") else ()
        needed = settings.paths.keys() - set(recorded)
        if needed:
            raise UserError(f"{path} reads {', '.join(sorted(needed))}, which others do not have: it cannot be shared.")
        fresh: State = agent.module.build(agent.config, agent.spaces, "cpu")
        acting = [getattr(agent.state, name) for name in getattr(agent.module, "ACTING", ())]
        kept = {
            field.name: _shared(field, agent.state, acting, getattr(fresh, field.name))
            for field in dataclasses.fields(agent.state)
        }
        checkpoint.save(folder / "checkpoints", type(agent.state)(**kept), agent.step)
        evaluation = agent.evaluate().document()
    finally:
        agent.close()
    # no machines and files of the training
    alone = dataclasses.replace(settings, actors=0, ray=None, completer=None, paths={})
    (folder / "config.yaml").write_text(yaml.safe_dump(alone.document(), sort_keys=False), encoding="utf-8")
    (folder / "README.md").write_text(card.policy(alone, agent.step, evaluation, name), encoding="utf-8")
    return folder


def _shared(field: dataclasses.Field[Any], state: State, acting: list[Any], fresh: Any) -> Any:
    """What is kept of a field: nothing of a replay or an optimizer, of a target network the network that it follows.

    The metadata of the field come first, see `slim`. Tensors that occur twice are stored once. `fresh` is the field as
    it is built.
    """
    value, share = getattr(state, field.name), field.metadata.get("share", True)
    if callable(share):
        return share(state)
    if not share or isinstance(fresh, LEFT_OUT):
        return fresh
    if not isinstance(value, nn.Module):
        return value
    alike = (one for one in acting if type(one) is type(value) and _shapes(one) == _shapes(value))
    return next(alike, value)


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in module.state_dict().items()}


def _check(name: str) -> None:
    if not NAME.fullmatch(name):
        raise UserError(f"'{name}' is no name of a repository: it must be OWNER/NAME, as in ada/ppo-lunar-lander.")


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn the hub's exceptions into sentences."""
    from huggingface_hub import errors

    unreachable: tuple[Any, ...] = (
        OSError,
        *errors.HfHubHTTPError.__bases__,
    )  # also offline mode, and what is not cached
    try:
        yield
    except errors.HFValidationError as error:
        raise UserError(f"'{name}' is no name of a repository: {error}") from error
    except errors.LocalTokenNotFoundError as error:
        raise UserError("You are not logged in to the hub. Log in with: hf auth login") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"There is no repository {name}, or it is private. If it is yours, log in with: hf auth login"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            raise UserError("You are not logged in to the hub. Log in with: hf auth login") from error
        if status == 403:
            raise UserError(
                f"Your token may not write to {name}: log in with one that may, or name your own."
            ) from error
        raise UserError(f"The hub refused {name} ({error}). Try again later.") from error
    except unreachable as error:
        raise UserError(
            f"The hub cannot be reached for {name} ({error}). Connect to the network, or give the path of a run."
        ) from error
