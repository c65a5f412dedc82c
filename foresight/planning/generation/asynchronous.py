"""Asynchronous rollouts of conversations: MiniMax's Forge (2026), with its windowed FIFO.

Groups of conversations are begun in order, in rounds of as many as an update takes. A round is held in a thread of its
own, with a copy of the weights of that moment: every conversation is written by one version. The trainer takes the
first groups that are finished within a window at the head of the queue, and the window moves only when the head is
taken. So a group that lasts ten times as long delays neither the others nor the update, until it is the head: then it
is waited for, and short episodes cannot crowd out long ones.

With P groups an update and a bound s on the staleness,

    groups begun and not taken  ≤ P (1 + ⌈s/2⌉)        window  = P ⌊s/2⌋ + 1 groups from the head on

Groups are begun only before an update, with its weights. A group that is begun at version v is then taken at version
v + s at the latest: at most P⌊s/2⌋ groups behind it are taken before it, and P⌈s/2⌉ in front of it. With s = 0 each
update takes the P groups that were begun for it: synchronous training. Left out: changing the weights within a
conversation.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from time import monotonic
from typing import Any

import torch

from foresight import distributed
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation import dialogue, multi_turn, rollout
from foresight.planning.generation.rollout import TextRollout

MOST = 16  # of the staleness


class Window:
    """The windowed FIFO: which groups, numbered as they are begun, an update takes. No tensors, no threads."""

    def __init__(self, prompts: int, staleness: int) -> None:
        self.prompts = prompts
        self.ahead = prompts * (1 + -(-staleness // 2))
        self.size = prompts * (staleness // 2) + 1
        self.begun = self.taken = self.head = 0
        self.finished: set[int] = set()  # and not taken
        self._gone: set[int] = set()  # taken, beyond the head

    @property
    def open(self) -> int:
        """Groups begun and not taken."""
        return self.begun - self.taken

    def begin(self) -> int | None:
        """Begin a round of groups; returns the number of its first one, or None while enough are open."""
        if self.open + self.prompts > self.ahead:
            return None
        self.begun += self.prompts
        return self.begun - self.prompts

    def take(self) -> list[int] | None:
        """The groups of an update, in the order they were begun; None while too few are finished in the window."""
        head, gone, chosen = self.head, set(self._gone), list[int]()
        while len(chosen) < self.prompts:
            number = min((n for n in self.finished if n not in gone and head <= n < head + self.size), default=None)
            if number is None:
                return None
            chosen.append(number)
            gone.add(number)
            while head in gone:
                gone.remove(head)
                head += 1
        self.head, self._gone, self.taken = head, gone, self.taken + self.prompts
        self.finished -= set(chosen)
        return sorted(chosen)


@dataclasses.dataclass(frozen=True)
class Group:
    """A finished group: its rollout, the version that wrote it, and how long it took in seconds."""

    rollout: TextRollout
    version: int
    seconds: float


class Collector:
    """Gathers the groups of each update of `policy`, of which there are `updates`, with a bounded `staleness`.

    It is called as `rollout.sample_groups` is, but for the policy. The rollouts have the metrics `staleness` (updates
    since the weights that wrote a group, of which the worst is `max_staleness`), `waiting` (seconds that the update
    waited for groups), `in_flight` (groups begun and not taken, after taking) and `duration` (seconds of a group).
    """

    def __init__(self, policy: LanguageModel, staleness: int, updates: int) -> None:
        self.policy, self.staleness, self.updates = policy, staleness, updates
        self.version, self.window = -1, Window(1, staleness)
        self._progress: float | None = None
        self._groups: dict[int, Group] = {}
        self._rows: dict[int, list[dialogue.Dialogue]] = {}  # of the rounds that are held
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._closed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copies of the policy sample for themselves."""

    def __call__(
        self,
        task: TextTask,
        prompts: int,
        group: int,
        max_new_tokens: int,
        temperature: float,
        generator: torch.Generator,
        progress: float,
    ) -> TextRollout:
        """The groups of an update. Raises what an environment or the model raised in a round."""
        if progress != self._progress:  # another update
            self.version += 1
            self._progress = progress
        if self.window.prompts != prompts:
            self.window = Window(prompts, self.staleness)
        left = round(self.updates * (1 - progress)) * prompts  # groups that the run still needs
        while self.window.open < left and (first := self.window.begin()) is not None:
            self._begin(first, task, rollout.draw(task, prompts, generator, progress), group, max_new_tokens,
                        temperature, generator)  # fmt: skip
        began = monotonic()
        with self._changed:
            while (chosen := self.window.take()) is None:
                if self._error is not None:
                    raise self._error
                self._changed.wait(1.0)  # not for ever: Ctrl-C is seen in between
            found = [self._groups.pop(number) for number in chosen]
        stale = [self.version - one.version for one in found]
        whole = rollout.concat([one.rollout for one in found])
        counts = {
            "staleness": sum(stale) / len(stale), "max_staleness": float(max(stale)), "waiting": monotonic() - began,
            "in_flight": float(self.window.open), "duration": sum(one.seconds for one in found) / len(found),
        }  # fmt: skip
        batch = dataclasses.replace(whole.batch, staleness=torch.tensor(stale))
        return dataclasses.replace(whole, batch=batch, counts=counts)

    def close(self) -> None:
        """End all conversations after their present token."""
        self._closed = True
        with self._changed:
            for row in (row for rows in list(self._rows.values()) for row in rows):
                row.cut = True

    def _begin(
        self,
        first: int,
        task: TextTask,
        examples: list[Example],
        group: int,
        max_new_tokens: int,
        temperature: float,
        generator: torch.Generator,
    ) -> None:
        """Begin a round, whose random numbers are drawn at once: they do not depend on when it ends."""
        policy = copy.deepcopy(self.policy).requires_grad_(False)
        rows = dialogue.begin(policy, task, examples, group)
        uniform = multi_turn.draws(task, rows, group, max_new_tokens, generator)
        self._rows[first] = rows
        version, began, left = self.version, monotonic(), [group] * len(examples)

        def ended(row: int) -> None:
            place = row // group
            left[place] -= 1
            if left[place] or self._closed:
                return
            found = dialogue.gather(rows[place * group : (place + 1) * group], group)
            one = Group(rollout.of_dialogues(task, [examples[place]], found), version, monotonic() - began)
            with self._changed:
                self._groups[first + place] = one
                self.window.finished.add(first + place)
                self._changed.notify_all()

        def hold() -> None:
            try:
                multi_turn.hold(policy, task, rows, group, max_new_tokens, temperature, uniform, ended)
            except Exception as error:  # raised again where the trainer waits
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
            finally:
                self._rows.pop(first)

        threading.Thread(target=hold, daemon=True, name=f"rollouts {first}").start()


def attach(state: Any, task: TextTask, staleness: int) -> Collector:
    """Let a `Collector` gather what a State is trained on. Raises UserError where this cannot be.

    The algorithm's ratio must be that to the policy that sampled (`STALE` of its module, which the caller checks).
    """
    policy = state.policy
    if not 0 <= staleness <= MOST:
        raise UserError(f"--staleness must be from 0 to {MOST}, not {staleness}.")
    if task.episode is None:
        raise UserError(
            f"--staleness is for conversations with environments, and '{task.name}' has none: choose a task with "
            "tools, such as --task calculator, or leave it out."
        )
    if policy.completer is not None or not policy.capabilities.shared:
        raise UserError(
            "--staleness needs a model that samples in this process and can share prefixes: leave out --staleness, or "
            "--completer."
        )
    if distributed.processes() > 1:
        raise UserError("--staleness does not work under torchrun. Leave it out, or run without torchrun.")
    policy.collector = Collector(policy, staleness, state.config.steps)
    return policy.collector
