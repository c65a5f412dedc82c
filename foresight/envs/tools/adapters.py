"""Environments of other libraries as tasks of conversations: TRL's `environment_factory`, and Gymnasium's with text.

# mine.py, for `foresight train grpo --task mine.py:Task`
Task = adapters.trl(TheirEnv, [{"prompt": "Double 4.", "x": 4}, ...])
Task = adapters.gymnasium(lambda seed: gym.make("MyText-v0"), seeds=200)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

from foresight.envs.tools import tool
from foresight.envs.tools.episode import Reply, close
from foresight.errors import UserError


def trl(
    factory: Callable[[], Any],
    rows: Sequence[dict[str, Any]],
    reward: Callable[[Any, str], float] | None = None,
    slow: bool = False,
) -> type[Any]:
    """A task of a class written for TRL's `environment_factory`: `reset(**columns)`, tools, perhaps `get_reward()`.

    `rows` are its dataset: the column `prompt` (a text or a conversation, of which the last message is used) is the
    question, to which the text that `reset` returns is added. `reward(env, answer)` replaces `get_reward`. One that is
    `slow`, by this argument or an attribute of its own, answers in a thread. `close()` is no tool: it is called after
    the episode. Raises UserError if there is no reward.
    """
    if reward is None and not callable(getattr(factory, "get_reward", None)):
        raise UserError("The environment has no get_reward(): add it, or give reward=f with f(env, answer).")

    class Trl:
        @staticmethod
        def questions() -> list[dict[str, Any]]:
            return [dict(row) for row in rows]

        def reset(self, row: dict[str, Any]) -> str:
            self._env = factory()
            self.slow = getattr(self._env, "slow", slow)
            methods = inspect.getmembers(self._env, inspect.ismethod)
            own = ("reset", "get_reward", "close")
            named = [method for name, method in methods if name not in own and name[0] != "_"]
            self.tools = [tool.of(method) for method in named]
            text = self._env.reset(**row)
            prompt = row.get("prompt", "")
            question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            return "\n".join(part for part in (question, text) if part)

        def reward(self, answer: str) -> float:
            return float(self._env.get_reward() if reward is None else reward(self._env, answer))

        def close(self) -> None:
            close(self._env)

    Trl.__name__ = getattr(factory, "__name__", "Trl")
    return Trl


def gymnasium(
    make: Callable[[int], Any],
    seeds: int = 1_000,
    instruction: str = "",
    most: int = 32,
    script: Callable[[Any], str] | None = None,
    slow: bool = False,
) -> type[Any]:
    """A task of Gymnasium environments whose observations and actions are texts: each turn of the model is an action.

    `make(seed)` builds one, `seeds` is their number, and `most` is that of the turns. The outcome is the sum of the
    rewards. `script(env)` writes the next action of a demonstration. An action that the environment rejects by raising
    is answered with the error. `slow` and `close()` are as in `trl`.
    """

    class Game:
        turns = most

        @staticmethod
        def questions(size: int = seeds, seed: int = 0) -> list[dict[str, Any]]:
            return [{"seed": 1_000_000 * seed + number} for number in range(size)]

        def reset(self, row: dict[str, Any]) -> str:
            self._env, self._total, self.failed = make(row["seed"]), 0.0, 0
            self.slow = getattr(self._env, "slow", slow)
            self._first = tool.shown(self._env.reset(seed=row["seed"])[0])
            return self._first

        def messages(self) -> list[dict[str, str]]:
            system = [{"role": "system", "content": instruction}] if instruction else []
            return [*system, {"role": "user", "content": self._first}]

        def turn(self, text: str) -> Reply:
            try:
                obs, reward, terminated, truncated, _ = self._env.step(text.strip())
            except Exception as error:
                self.failed += 1
                return Reply({"role": "user", "content": f"error: {tool.shown(error)}"})
            self._total += float(reward)
            over = terminated or truncated
            return Reply(None if over else {"role": "user", "content": tool.shown(obs)})

        def parts(self) -> dict[str, float]:
            return {"outcome": self._total, "failed_actions": float(self.failed)}

        def close(self) -> None:
            close(self._env)

    if script is not None:
        cast(Any, Game).script = lambda self, messages: script(self._env)
    return Game
