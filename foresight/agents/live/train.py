"""The trainer of a live run: takes the window of scored turns, updates, and publishes a version; or rolls back.

A version is a folder that is whole before the database names it. A trainer that is killed in between leaves a folder
without a name, which the next one deletes; its turns are trained on then, from the same weights, and never twice.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from foresight.agents.live import learn
from foresight.agents.live.settings import Config
from foresight.agents.live.store import VERSIONS, Store, Turn
from foresight.errors import LostError, UserError
from foresight.nets.language import lora, pretrained
from foresight.nets.language.model import LanguageModel
from foresight.training import language

TRAINED = "trained.safetensors"  # the trained weights alone, to continue from
Check = Callable[[LanguageModel], float]


class Trainer:
    """The weights and the optimizer of a live run.

    `check(policy)` is a held-out measure, taken once of every `check_every`-th version, by the next trainer if one is
    killed before. Where it is more than `tolerance` below its first value, the last version that passed becomes active
    again and training pauses. `questions` are examples of a text task whose answers by the first version are rehearsed,
    `batch` of them in each update (`Config.rehearsal`).
    """

    def __init__(
        self,
        store: Store,
        config: Config,
        device: str = "cpu",
        check: Check | None = None,
        check_every: int = 4,
        tolerance: float = 0.1,
        questions: Sequence[Any] = (),
    ) -> None:
        self.store, self.config, self.device = store, config, device
        self.check, self.check_every, self.tolerance = check, check_every, tolerance
        (store.folder / VERSIONS).mkdir(exist_ok=True)
        named = {str(version["number"]) for version in store.versions()}
        for folder in (store.folder / VERSIONS).iterdir():
            if folder.name not in named:  # a trainer was killed before it could publish it
                shutil.rmtree(folder)
        self._load()
        self.rehearsed = learn.answers(self.reference, questions) if questions and config.rehearsal else []
        if check is not None and store.get("check") is None:
            store.set("check", {"first": check(self.policy), "passed": self.version, "checked": self.version})

    def _load(self) -> None:
        """The active version. The moments of the optimizer begin again.

        Raises UserError where its trained weights are missing.
        """
        self.version = self.store.active()
        file = Path(self.store.folder_of(self.version)) / TRAINED
        if self.version > 0 and not file.is_file():
            raise UserError(
                f"The weights of version {self.version} are missing: there is no {file}. Put the folder back, or give "
                "--rollback with another version."
            )
        self.policy, self.optimizer, _ = language.build(self.config, self.device)
        self.reference = language.frozen(self.policy)
        if self.version > 0:
            weights = load_file(file, device=self.device)
            with torch.no_grad():
                for name, weight in self._weights().items():
                    weight.copy_(weights[name])

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: weight for name, weight in self.policy.named_parameters() if weight.requires_grad}

    def step(self) -> dict[str, float] | None:
        """One update, if enough turns wait; returns its metrics, or None.

        Raises LostError where the version cannot be written, as on a full disk, or since a turn of it was forgotten:
        nothing was trained on then.
        """
        if self.store.get("paused", False):
            return None
        if self.store.active() != self.version:
            self._load()  # rolled back
        if not self._gate():  # of a version whose trainer was killed before it was checked
            return None
        turns = self.store.window(self.config.batch, self.config.staleness)
        if len(turns) < self.config.batch:
            return None
        metrics = learn.update(self.policy, self.reference, self.optimizer, turns, self.config, self._few())
        metrics["staleness"] = sum(self.store.apart(turn.version, self.version) for turn in turns) / len(turns)
        suspects = self.store.one_sided()
        ids = [turn.id for turn in turns]
        if not metrics["turns"]:
            self.store.reject(ids, f"{len(ids)} turns have no signal in the mode {self.config.mode}")
            return metrics
        if metrics["rejected"]:
            shares = {session: sum(turn.session == session for turn in turns) for session in {t.session for t in turns}}
            names = ", ".join(f"{name} ({count})" for name, count in sorted(shares.items(), key=lambda x: -x[1]))
            why = f"KL {metrics['kl']:.3f} is beyond the bound {self.config.kl_bound}; sessions (turns): {names}"
            self.store.reject(ids, why + (f"; always of one score: {', '.join(suspects)}" if suspects else ""))
            return metrics
        for name in suspects:
            known = self.store.get("one_sided", [])
            if name not in known:
                self.store.set("one_sided", [*known, name])
                self.store.event("one-sided", f"session {name} always gives the same score")
        if self._publish(metrics, ids):
            self._gate()
        return metrics

    def _few(self) -> list[Turn]:
        """The answers to rehearse in this update: all are, in turn."""
        start, count = self.version * self.config.batch, min(self.config.batch, len(self.rehearsed))
        return [self.rehearsed[(start + i) % len(self.rehearsed)] for i in range(count)]

    def _publish(self, metrics: dict[str, float], turns: list[int]) -> bool:
        """Store the weights as a version; returns whether it is active, else loads the one that is."""
        number = 1 + max(version["number"] for version in self.store.versions())
        folder = self.store.folder / VERSIONS / str(number)
        adapters = lora.has(self.policy.module)
        weights = {name: weight.detach().cpu().contiguous() for name, weight in self._weights().items()}
        try:
            pretrained.save_folder(
                self.policy.module, self.policy.tokenizer, folder, merged=not adapters, base=self.config.model
            )
            save_file(weights, folder / TRAINED)
            active = self.store.publish(number, str(folder), metrics, turns, self.version)
        except Exception as error:  # each library has its own for a full disk; or a turn was forgotten meanwhile
            shutil.rmtree(folder, ignore_errors=True)
            self._load()
            raise LostError(f"version {number} cannot be written: {type(error).__name__}: {error}") from error
        if active:
            self.version = number
        else:
            self._load()  # rolled back in the meantime
        return active

    def _gate(self) -> bool:
        """Check the present version if that is due and was not done; returns whether training may continue."""
        if self.check is None or self.version % self.check_every:
            return True
        state: dict[str, Any] = self.store.get("check")
        if self.version <= state.get("checked", state["passed"]):  # numbers only grow; or the owner went back to it
            return True
        value = self.check(self.policy)
        state = {**state, "checked": self.version}
        if value >= state["first"] - self.tolerance:
            self.store.set("check", {**state, "passed": self.version, "last": value})
            return True
        why = (
            f"the held-out check fell from {state['first']:.3f} to {value:.3f} at version {self.version}: "
            f"back to version {state['passed']}, and training is paused"
        )
        self.store.withdraw(self.version, state["passed"], state, why)
        return False


def begin(store: Store, model: str) -> None:
    """Make the model itself version 0, once."""
    if store.active() < 0:
        store.publish(0, model, {}, [])
