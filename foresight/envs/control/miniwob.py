"""Pages of MiniWoB++ for small policies: every action is described by features of its element and of the task.

`MiniWoB/click-button`, or several pages at once, `MiniWoB/click-tab+click-link`, or a set, `MiniWoB/ten` (see
`envs.tools.web`). The pages and the browser are those of `envs.tools.browser`. Actions are the elements of the page
(click), and each text field with each quoted text of the task
(type). A reward is the raw reward of the page, in [-1, 1], at its end.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from numpy.typing import NDArray
from torch import Tensor

from foresight import errors
from foresight.data.trajectory import Tree
from foresight.envs.base import Feedback, Frame, Spaces, grouped
from foresight.envs.tools import browser, web
from foresight.envs.tools.browser import Element, View
from foresight.envs.tools.web import Action
from foresight.errors import UserError

PREFIX = "MiniWoB/"
ACTIONS = 60  # of which the first are listed; the mask leaves out what a page does not have
LIMIT = 8  # actions of an episode
QUOTES = 3  # quoted texts of a task that can be typed
KINDS = ("button", "link", "text", "password", "textarea", "checkbox", "radio", "option")
WORDS = 16  # places of the bag of words of a task
FEATURES = 2 + len(KINDS) + 1 + 5 + 2 + 5 + 7 + (QUOTES + 3) + WORDS + 2
Floats = NDArray[np.float32]


class Pages:
    """An `Env` of `num_envs` pages, of each name in turn: `info["episode_task"]` names those of ended episodes.

    With `shuffled` the words of the task are those of another episode, which is a control. Raises UserError for fewer
    environments than pages.
    """

    def __init__(self, name: str, num_envs: int, time_limit: int | None = None, shuffled: bool = False) -> None:
        self.pages = web.pages(name.removeprefix(PREFIX))
        browser.require(self.pages)
        if num_envs < len(self.pages):
            raise UserError(f"num_envs is {num_envs}, but there are {len(self.pages)} pages: raise num_envs.")
        self.name, self.num_envs, self.shuffled = name, num_envs, shuffled
        obs = {
            "action_features": gs.Box(-10, 10, (ACTIONS, FEATURES), np.float32),
            "action_mask": gs.MultiBinary(ACTIONS),
        }
        self.spaces = Spaces(gs.Dict(obs), gs.Discrete(ACTIONS))
        self._limit, self._group = time_limit or LIMIT, 1
        self._seed: int | None = None
        self._handles: list[tuple[str, Any] | None] = [None] * num_envs  # a page and its name
        self._views = [View("", ())] * num_envs
        self._words = [""] * num_envs
        self._episode, self._time = np.zeros((2, num_envs), np.int64)
        self._returns = np.zeros(num_envs)

    def reset(self, seed: int) -> Tree:
        """Reset all environments; equal seeds give equal episodes. Returns obs `[B, ...]`."""
        self.close()
        self._seed = seed
        self._episode[:] = 0
        self._begin(range(self.num_envs))
        return self._show()

    def step(self, action: Tensor) -> Feedback:
        """Take `action` `[B]` in every environment. An action that the mask leaves out does nothing."""
        if action.shape != (self.num_envs,):
            raise ValueError(f"'{self.name}' takes actions of shape {(self.num_envs,)}, not {tuple(action.shape)}.")
        if self._seed is None:
            raise RuntimeError(f"Environment '{self.name}': call reset(seed) before step.")
        shown, chosen = browser.shared(), action.tolist()
        acting = [
            (i, actions[number])
            for i, number in enumerate(chosen)
            if number < len(actions := offered(self._views[i], self._words[i]))
        ]
        tried = shown.together([shown.act(self._page(i), self._views[i], *what) for i, what in acting])
        for (i, _), found in zip(acting, shown.run(tried, browser.SECONDS * (1 + len(acting))), strict=True):
            if isinstance(found, View):
                self._views[i] = found
            elif not isinstance(found, ValueError):  # the page went elsewhere or crashed; else the element is gone
                shown.drop(self._page(i))
                self._handles[i], self._views[i] = None, View(self._views[i].utterance, (), 0.0, True)
        self._time += 1
        reward = np.array([view.reward if view.done else 0.0 for view in self._views])
        over = np.array([view.done for view in self._views])
        cut = over | (self._time >= self._limit)
        self._returns += reward
        final = obs = self._show()
        info: dict[str, Any] = {}
        if cut.any():
            rows = np.flatnonzero(cut).tolist()
            info = {"episode_return": self._returns[rows].tolist(), "episode_length": self._time[rows].tolist()}
            info["episode_task"] = [self.page(i) for i in rows]
            self._begin(rows)
            obs = self._show()
        gained, discount, ended = (torch.from_numpy(x.astype(np.float32)) for x in (reward, 1.0 - over, cut))
        return Feedback(obs, gained, discount, ended, torch.ones(self.num_envs), final, info)

    def same_starts(self, group: int) -> None:
        """Give each `group` environments in a row the same episodes, from the next reset on.

        Raises UserError if their number is no multiple of it.
        """
        self._group = grouped(self.num_envs, group)

    def expert(self) -> Tensor:
        """What the page's oracle does next in every environment, `[B]`."""
        found = [web.oracle(self.page(i), view) for i, view in enumerate(self._views)]
        return torch.tensor([offered(v, w).index(a) for v, w, a in zip(self._views, self._words, found, strict=True)])

    def render(self) -> Frame | None:
        """A picture of page 0."""
        import imageio.v3 as imageio

        if self._handles[0] is None:
            return None
        clip = {"x": 0, "y": 0, "width": 160, "height": 210}
        frame: Frame = imageio.imread(browser.shared().run(self._page(0).screenshot(clip=clip)))[..., :3]
        return frame

    def close(self) -> None:
        """Give the pages back."""
        for handle in self._handles:
            if handle is not None:
                browser.shared().free(*handle)
        self._handles = [None] * self.num_envs

    def page(self, i: int) -> str:
        """The name of the page of environment `i`: a group of equal episodes is on one."""
        return self.pages[i // self._group % len(self.pages)]

    def _page(self, i: int) -> Any:
        held = self._handles[i]
        assert held is not None
        return held[1]

    def _begin(self, rows: Sequence[int]) -> None:
        """The next episodes of the environments `rows`, all at once."""
        shown = browser.shared()
        begun = shown.run(shown.together([self._open(i) for i in rows]), browser.LOADING * (1 + len(rows)))
        for i, found in zip(rows, begun, strict=True):
            if isinstance(found, BaseException):
                raise found
            page, self._words[i], self._views[i] = found
            self._handles[i] = self.page(i), page
            self._episode[i] += 1
            self._time[i], self._returns[i] = 0, 0.0

    async def _open(self, i: int) -> tuple[Any, str, View]:
        shown = browser.shared()
        page = await shown.take(self.page(i)) if self._handles[i] is None else self._page(i)
        assert self._seed is not None
        key = (self._seed, i // self._group, int(self._episode[i]))
        seed, other = np.random.SeedSequence(key).generate_state(2).tolist()
        words = (await shown.begin(page, other)).utterance if self.shuffled else None
        view = await shown.begin(page, seed)
        return page, view.utterance if words is None else words, view

    def _show(self) -> dict[str, Tensor]:
        features = np.zeros((self.num_envs, ACTIONS, FEATURES), np.float32)
        mask = np.zeros((self.num_envs, ACTIONS), np.int8)
        for i, (view, words) in enumerate(zip(self._views, self._words, strict=True)):
            rows = described(view, words, int(self._time[i]))
            features[i, : len(rows)] = rows
            mask[i, : max(len(rows), 1)] = 1  # a page without elements has one action, which does nothing
        return {"action_features": torch.from_numpy(features), "action_mask": torch.from_numpy(mask)}


def offered(view: View, words: str) -> list[Action]:
    """The actions on a page whose task is `words`: click each element, type each quoted text into each field."""
    clicks = [Action("click", number) for number in range(1, len(view.elements) + 1)]
    fields = [number for number, one in enumerate(view.elements, 1) if one.typeable]
    texts = web.QUOTED.findall(words)[:QUOTES]
    return [*clicks, *(Action("type", number, text) for number in fields for text in texts)][:ACTIONS]


def described(view: View, words: str, time: int) -> Floats:
    """Features `[A, F]` of the offered actions: of the element, of how it fits the task, and of the task.

    They are 0 where a page has no elements.
    """
    actions = offered(view, words)
    if not actions:
        return np.zeros((0, FEATURES), np.float32)
    kinds = [one.kind for one in view.elements]
    task = _task(words)
    about = (*task.bag, time / LIMIT, float(any(one.chosen for one in view.elements)))
    elements = [
        _element(one, kinds[:place].count(one.kind), kinds.count(one.kind), place / len(kinds), task)
        for place, one in enumerate(view.elements)
    ]
    rows = []
    for action in actions:
        one = view.elements[action.number - 1]
        typed = action.verb == "type"
        rows.append((float(not typed), float(typed), *elements[action.number - 1], *_text(action, one, task), *about))
    return np.array(rows, np.float32)


class _Task:
    """What features read of the words of a task."""

    def __init__(self, words: str) -> None:
        self.lower = words.lower()
        self.quotes = web.QUOTED.findall(words)
        plain = _words(web.QUOTED.sub(" ", words))
        self.words = set(_words(words))
        self.bag = [0.0] * WORDS
        for word in plain:
            self.bag[hashlib.md5(word.encode()).digest()[0] % WORDS] = 1.0
        nth = web.NTH.search(words)
        self.nth = int(nth[1] or nth[2]) if nth else 0
        # The words before each quoted text, back to the one before.
        self.before = [set(_words(part)) for part in words.split('"')[0::2]][: len(self.quotes)]


_task = functools.lru_cache(maxsize=1024)(_Task)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _element(one: Element, place: int, alike: int, share: float, task: _Task) -> tuple[float, ...]:
    kind = [float(one.kind == kind) for kind in KINDS]
    own = _words(one.name)
    named = bool(own) and re.search(rf"(?<!\w){re.escape(one.name.lower())}(?!\w)", task.lower) is not None
    fits = (
        float(one.name in task.quotes),
        float(named),
        sum(word in task.words for word in own) / max(len(own), 1),
        float(one.kind in task.words),
        float(one.kind in task.quotes),
    )
    order = (float(task.nth == place + 1), float(task.nth > 0))
    state = (
        float(one.chosen), float(one.focused), float(bool(one.value)), float(one.value in task.quotes),
        float(one.chosen and named),
    )  # fmt: skip
    shape = (
        float(not one.name), min(len(one.name), 20) / 20, share, min(place, 5) / 5, min(alike, 5) / 5,
        one.x / browser.WIDTH, one.y / browser.HEIGHT,
    )  # fmt: skip
    return (*kind, float(not any(kind)), *fits, *order, *state, *shape)


def _text(action: Action, one: Element, task: _Task) -> tuple[float, ...]:
    if action.verb != "type":
        return (0.0,) * (QUOTES + 3)
    place = task.quotes.index(action.text)
    which = [float(place == i) for i in range(QUOTES)]
    asked = any(word in task.before[place] for word in _words(one.name))
    return (*which, float(asked), float(one.value == action.text), float(one.kind in task.before[place]))


def make(name: str, num_envs: int, time_limit: int | None = None, **options: Any) -> Pages:
    """A batch of the page `name`, with the option `shuffled`. Raises UserError for an unknown option or page."""
    for key in options:
        if key != "shuffled":
            raise errors.unknown(f"option of '{name}'", key, ["shuffled"])
    return Pages(name, num_envs, time_limit, **options)
