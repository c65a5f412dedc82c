"""`miniwob`: web pages that a language model uses by words, `click 3` or `type 2 "Bob"`. See `browser`.

A turn is one action. The page answers with its elements, numbered. What a page shows is data: brackets of marks in it
are replaced. `ORACLES` play some pages as they should be, by rules that read no more than the list that a model reads.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from foresight import errors
from foresight.envs.tools import browser, tool
from foresight.envs.tools.browser import Element, View
from foresight.envs.tools.episode import Reply
from foresight.errors import UserError

ONE_CLICK = ("click-button", "click-dialog-2", "click-link", "click-tab", "click-widget", "focus-text-2")
FEW_STEPS = ("click-option", "choose-list", "enter-text", "login-user")
HELD_OUT = ("click-test-2", "enter-password", "click-checkboxes", "click-button-sequence")
SETS = {"one-click": ONE_CLICK, "few-steps": FEW_STEPS, "ten": (*ONE_CLICK, *FEW_STEPS), "held-out": HELD_OUT}
QUOTED = re.compile(r'"([^"]*)"')
NTH = re.compile(r"(?:#(\d)|\b(\d)(?:st|nd|rd|th)\b)")
_CLICK = re.compile(r"click (\d{1,3})")
_TYPE = re.compile(r'type (\d{1,3}) "(.*)"', re.DOTALL)
_PRESS = re.compile(r"press (\w+)")


class Action(NamedTuple):
    """What to do with the element `number`: `click`, or `type` the `text`; or `press` the key `text`."""

    verb: str
    number: int = 0
    text: str = ""

    def __str__(self) -> str:
        """As a model writes it."""
        if self.verb == "press":
            return f"press {self.text}"
        return f"{self.verb} {self.number}" + (f' "{self.text}"' if self.verb == "type" else "")


def read(text: str) -> Action:
    """The action that a turn writes. Raises ValueError for anything else."""
    line = text.strip()
    if found := _CLICK.fullmatch(line):
        return Action("click", int(found[1]))
    if found := _TYPE.fullmatch(line):
        return Action("type", int(found[1]), found[2])
    if (found := _PRESS.fullmatch(line)) and found[1] in browser.KEYS:
        return Action("press", text=found[1])
    raise ValueError(f'{line[:40]!r} is no action. Write click NUMBER, type NUMBER "TEXT" or press KEY')


def check(view: View, action: Action) -> None:
    """Raise ValueError for an action that the view does not offer."""
    if action.verb == "press":
        return
    if not 1 <= action.number <= len(view.elements):
        raise ValueError(f"there is no element {action.number}: there are {len(view.elements)}")
    one = view.elements[action.number - 1]
    if action.verb == "type" and not one.typeable:
        raise ValueError(f"element {action.number} is a {one.kind}, into which nothing can be typed")


def listing(view: View) -> str:
    """The elements as a model reads them, one a line, the number last: `text "Name" = "Bob" [2]`.

    What follows a name is easier to copy than what precedes it: transformers have heads for that (induction heads).
    """
    return tool.escaped("\n".join(_line(number, one) for number, one in enumerate(view.elements, 1)) or "(nothing)")


def _line(number: int, one: Element) -> str:
    name = f' "{one.name}"' if one.name else ""
    value = f' = "{one.value}"' if one.value else ""
    state = f"{' (chosen)' if one.chosen else ''}{' (focus)' if one.focused else ''}"
    return f"{one.kind}{name}{value}{state} [{number}]"


def pages(names: str) -> tuple[str, ...]:
    """The pages that `names` lists, joined by `+`: of pages and of `SETS`. Raises UserError for an unknown name."""
    if not isinstance(names, str):
        raise UserError(f"pages must be names joined by +, such as click-tab+click-link, not {names!r}.")
    found: list[str] = []
    for name in names.split("+"):
        if name not in SETS and name not in browser.tasks():
            browser.require()
            raise errors.unknown("page of MiniWoB++", name, [*SETS, *browser.tasks()])
        found += SETS.get(name, (name,))
    return tuple(dict.fromkeys(found))


class Web:
    """An `Episode` on one page, which is opened by the first question about it. `view` is what it shows."""

    instruction = (
        'You use a web page. Write one action a turn: click NUMBER, type NUMBER "TEXT", or press KEY '
        f"({', '.join(browser.KEYS)})."
    )
    turns = 8
    slow = True
    after_colon = "pages"  # `--task miniwob:click-button`

    def __init__(self) -> None:
        self._row: dict[str, Any] = {}
        self._page: Any = None
        self._utterance: str | None = None  # of another episode, in the control
        self.view = View("", ())
        self.failed, self._ended = 0, False

    @staticmethod
    def questions(pages: str = "ten", size: int = 1_200, seed: int = 0, shuffled: bool = False) -> list[dict[str, Any]]:
        """`size` episodes, in turn on the pages (names of pages and of `SETS`, joined by `+`).

        With `shuffled` each shows the task of another episode, which is a control.
        """
        names = _pages(pages)
        browser.require(names)
        draw = random.Random(f"pages {seed}")
        seeds = draw.sample(range(10**9), size + 1)
        rows = [{"page": names[i % len(names)], "seed": seeds[i]} for i in range(size)]
        return [{**row, "other": other} for row, other in zip(rows, seeds[1:], strict=True)] if shuffled else rows

    def reset(self, row: dict[str, Any]) -> str:
        """Name the episode. The page is opened later, as a task has hundreds of them."""
        self._row = row
        return f"{row['page']} {row['seed']}"

    def messages(self) -> list[dict[str, str]]:
        """What a model reads first: how to act, the task of the page, and its elements."""
        self._begin()
        question = f"{tool.escaped(self.utterance)}\n{listing(self.view)}"
        return [{"role": "system", "content": self.instruction}, {"role": "user", "content": question}]

    @property
    def utterance(self) -> str:
        """The task of the page, or that of another episode."""
        return self.view.utterance if self._utterance is None else self._utterance

    def turn(self, text: str) -> Reply:
        """Act as `text` states; returns the elements then, or an error."""
        self._begin()
        try:
            action = read(text)
            check(self.view, action)
            self.view = self._do(action)
        except ValueError as error:
            self.failed += 1
            return Reply({"role": "user", "content": f"error: {tool.shown(error)}"})
        if self.view.done:
            self.close()
            return Reply(None)
        return Reply({"role": "user", "content": listing(self.view)})

    def parts(self) -> dict[str, float]:
        """`outcome`: the raw reward of the page, at least 0; the same as `outcome/PAGE`."""
        outcome = max(self.view.reward, 0.0)
        return {"outcome": outcome, f"outcome/{self._row['page']}": outcome, "failed_actions": float(self.failed)}

    def script(self, messages: list[dict[str, str]]) -> str:
        """A demonstration: what the page's oracle does next. Raises UserError for a page without one."""
        return str(oracle(self._row["page"], self.view))

    def close(self) -> None:
        """Give the page back."""
        page, self._page, self._ended = self._page, None, True
        if page is not None:
            browser.shared().free(self._row["page"], page)

    def _begin(self) -> None:
        if self._page is not None or self._ended:
            return
        shown = browser.shared()
        self._page = shown.run(shown.take(self._row["page"]), browser.LOADING)
        if "other" in self._row:
            self._utterance = shown.run(shown.begin(self._page, self._row["other"]), browser.LOADING).utterance
        self.view = shown.run(shown.begin(self._page, self._row["seed"]), browser.LOADING)

    def _do(self, action: Action) -> View:
        """The view after an action. A page that fails is closed, and the episode is over."""
        if self._page is None:
            return self.view
        shown = browser.shared()
        try:
            return shown.run(shown.act(self._page, self.view, *action))
        except ValueError:
            raise
        except Exception:  # it went elsewhere, crashed, or did not answer in time
            shown.drop(self._page)
            self._page, self._ended = None, True
            return View(self.view.utterance, (), 0.0, True)


_pages = pages  # the option of `questions` has this name too


def oracle(page: str, view: View) -> Action:
    """What to do next on a page. Raises UserError for one without rules, or that they do not fit."""
    if page not in ORACLES:
        raise UserError(f"There is no script for the page '{page}'. There are for: {', '.join(ORACLES)}.")
    try:
        return ORACLES[page](view)
    except (IndexError, TypeError, StopIteration) as error:
        raise UserError(f"The script of the page '{page}' does not fit what it shows: {view.utterance!r}.") from error


def _click(view: View, fits: Callable[[Element], bool]) -> Action:
    return Action("click", next(number for number, one in enumerate(view.elements, 1) if fits(one)))


def _named(view: View, name: str, *kinds: str) -> Action:
    return _click(view, lambda one: one.name == name and (not kinds or one.kind in kinds))


def _nth(view: View, kind: str) -> Action:
    found = NTH.search(view.utterance)
    assert found is not None
    numbers = [number for number, one in enumerate(view.elements, 1) if one.kind == kind]
    return Action("click", numbers[int(found[1] or found[2]) - 1])


def _quoted(view: View, *kinds: str) -> Action:
    name = QUOTED.findall(view.utterance)[0]
    return _named(view, {"x": "Close"}.get(name, name), *kinds)


def _typed(view: View, fields: Iterable[tuple[str, str]]) -> Action:
    """Type each text into the next of the fields of its kind, then press the button."""
    used: set[int] = set()
    for kind, text in fields:
        number = next(n for n, one in enumerate(view.elements, 1) if one.kind == kind and n not in used)
        used.add(number)
        if view.elements[number - 1].value != text:
            return Action("type", number, text)
    return _click(view, lambda one: one.kind == "button")


def _chosen(view: View, names: Iterable[str], kind: str) -> Action:
    """Choose what is named, then submit."""
    wanted = set(names)
    rest = [n for n, one in enumerate(view.elements, 1) if one.kind == kind and one.name in wanted and not one.chosen]
    return Action("click", rest[0]) if rest else _named(view, "Submit", "button")


def _between(view: View, begin: str, end: str) -> str:
    return view.utterance.removeprefix(begin).removesuffix(end)


def _sequence(view: View) -> Action:
    clicked = any(one.focused and one.name == "ONE" for one in view.elements)
    return _named(view, "TWO" if clicked else "ONE", "button")


def _login(view: View) -> Action:
    return _typed(view, zip(("text", "password"), QUOTED.findall(view.utterance), strict=True))


ORACLES: dict[str, Callable[[View], Action]] = {
    "click-button": lambda v: _quoted(v, "button"),
    "click-dialog-2": lambda v: _quoted(v, "button"),
    "click-link": lambda v: _quoted(v, "link"),
    "click-tab": lambda v: _nth(v, "link"),
    "click-widget": lambda v: _click(v, lambda one: one.kind == QUOTED.findall(v.utterance)[0]),
    "focus-text-2": lambda v: _nth(v, "text"),
    "click-option": lambda v: _chosen(v, [_between(v, "Select ", " and click Submit.")], "radio"),
    "choose-list": lambda v: _chosen(v, [_between(v, "Select ", " from the list and click Submit.")], "option"),
    "enter-text": lambda v: _typed(v, [("text", QUOTED.findall(v.utterance)[0])]),
    "login-user": _login,
    "click-test-2": lambda v: _named(v, "ONE", "button"),
    "enter-password": lambda v: _typed(v, [("password", QUOTED.findall(v.utterance)[0])] * 2),
    "click-checkboxes": lambda v: _chosen(v, _between(v, "Select ", " and click Submit.").split(", "), "checkbox"),
    "click-button-sequence": _sequence,
}
