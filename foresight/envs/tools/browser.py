"""A browser: the 130 pages of MiniWoB++ in the system's Chromium, which Playwright drives.

Shi et al. 2017 (ICML) and Liu et al. 2018 (arXiv:1802.08802); the pages are those of the package `miniwob`.
One browser serves all episodes of a process, each on a page of its own. It has no network. The raw reward of a page
counts, without the decay over wall clock, and its clock of 10 seconds is set to a day.

An action is what a person can do: the mouse is moved and pressed, and keys are typed. Only options of a list are chosen
by script, because a list opens outside the page.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import os
import shutil
import threading
from collections.abc import Coroutine, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from foresight import errors
from foresight.errors import UserError

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-extensions", "--disable-background-timer-throttling",
    "--disable-renderer-backgrounding", "--disable-backgrounding-occluded-windows",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--process-per-site",  # or every page would be a process of its own
)  # fmt: skip
WIDTH, HEIGHT = 500, 400  # of a page, in pixels
SECONDS = 30.0  # that an action may take
LOADING = 120.0  # seconds that a page may take to load, on a busy machine
OPENED = 4  # pages that are loaded at once: more would wait for one another until the time is over
KEPT = 160  # pages that wait for their next episode
MOST = 40  # elements that are listed
LONGEST = 60  # characters of an element's name
KEYS = ("Enter", "Tab", "Escape", "Backspace", "ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight")
Found = TypeVar("Found")

# What a page adds to itself: `look` lists its elements in the order of the document, `at` finds where one can be hit.
SCRIPT = """
(() => {
  const OURS = new Set(['reward-display', 'sync-task-cover', 'click-canvas', 'query']);
  const NATIVE = 'button,input,textarea,option,a,summary';
  const CONTROL = NATIVE + ',[role=button],[role=tab],[role=menuitem],[onclick]';
  const SHAPE = 'rect,circle,ellipse,polygon,path,line,image,text,img';
  const list = [];
  const clean = (text) => (text || '').replace(/\\s+/g, ' ').trim();
  const pointer = (e) => getComputedStyle(e).cursor === 'pointer';
  function seen(e) {
    const box = (e.tagName === 'OPTION' ? e.parentElement : e).getBoundingClientRect();
    return box.width > 0 && box.height > 0 && getComputedStyle(e).visibility !== 'hidden';
  }
  function listed(e) {
    if (e.matches('label') && (e.control || e.querySelector('input'))) return false;
    if (e.matches(CONTROL)) return e.matches(NATIVE) || !e.querySelector(NATIVE);
    if (e.matches('select,script,style,br,hr,canvas')) return false;
    if (e.matches(SHAPE)) return true;
    if (pointer(e) && !pointer(e.parentElement) && !e.querySelector(CONTROL)) return true;
    return !e.children.length && clean(e.textContent) !== '' && !e.closest('button,a,option,textarea');
  }
  function kind(e) {
    const tag = e.tagName.toLowerCase();
    if (tag === 'input') return {submit: 'button', input: 'text'}[e.type] || e.type;
    if (e.ownerSVGElement && tag === 'text') return 'caption';
    if (tag === 'a' || (pointer(e) && tag === 'span')) return 'link';
    return tag;
  }
  function name(e) {
    const input = e.matches('input,textarea,select');
    if (!input) return clean(e.textContent) || e.title || e.getAttribute('aria-label') || '';
    const label = e.labels && e.labels.length ? e.labels[0].textContent : '';
    const near = e.previousElementSibling;
    const beside = near && near.matches('label,span,p,b') ? near.textContent : '';
    const own = e.matches('[type=button],[type=submit]') ? e.value : '';
    return clean(own || e.getAttribute('aria-label') || label || e.placeholder || beside);
  }
  function at(e) {
    const box = e.getBoundingClientRect();
    const shares = [0.5, 0.3, 0.7, 0.1, 0.9];
    for (const down of shares) for (const right of shares) {
      const x = box.left + right * box.width, y = box.top + down * box.height;
      const hit = document.elementFromPoint(x, y);
      if (hit && (hit === e || e.contains(hit))) return [x, y];
    }
    return null;
  }
  function walk(e, found) {
    if (OURS.has(e.id)) return;
    if (seen(e) && listed(e)) found.push(e);
    for (const child of e.children) walk(child, found);
  }
  function look(most, longest) {
    list.length = 0;
    const all = [];
    walk(document.body, all);
    list.push(...all.slice(0, most));
    const elements = list.map((e) => {
      const option = e.tagName === 'OPTION';
      const box = (option ? e.parentElement : e).getBoundingClientRect();
      const place = option ? null : at(e);
      const other = '[type=checkbox],[type=radio],[type=button],[type=submit]';
      const typed = e.matches('textarea,input') && !e.matches(other);
      const chosen = Boolean(option ? e.selected : e.checked);
      return [kind(e), name(e).slice(0, longest), typed ? e.value.slice(0, longest) : '', chosen,
              document.activeElement === e, ...(place || [box.left + box.width / 2, box.top + box.height / 2]),
              place !== null];
    });
    return [core.getUtterance(), elements, WOB_RAW_REWARD_GLOBAL, WOB_DONE_GLOBAL];
  }
  window.foresight = {
    look,
    begin(seed, most, longest) {
      core.EPISODE_MAX_TIME = 86400000;
      Math.seedrandom(seed);
      if (core.cover_div === null) core.startEpisode();
      core.startEpisodeReal();
      clearInterval(core.CD_TIMER);  // it is only drawn, and every page draws it each second
      if (document.activeElement) document.activeElement.blur();
      return look(most, longest);
    },
    select(number) {
      list[number - 1].select();
    },
    reach(number) {  // where to press, [] for an option that is now chosen, null for what is gone
      const e = list[number - 1];
      if (!e || !e.isConnected) return null;
      if (e.tagName === 'OPTION' && e.parentElement.tagName === 'SELECT') {
        e.selected = true;
        for (const name of ['input', 'change']) e.parentElement.dispatchEvent(new Event(name, {bubbles: true}));
        return [];
      }
      if (!at(e)) e.scrollIntoView({block: 'nearest', inline: 'nearest'});
      const box = e.getBoundingClientRect();
      return at(e) || [box.left + box.width / 2, box.top + box.height / 2];
    },
  };
})();
"""


@dataclasses.dataclass(frozen=True)
class Element:
    """Something on a page. Its texts are data.

    `kind` is the tag, of an input its type; `name` the text or label; `value` what is typed in it; `chosen` whether a
    box, button or option is checked; `focused` whether it takes the keys; `x`, `y` where to press it, in pixels;
    `free` whether nothing covers it there.
    """

    kind: str
    name: str
    value: str = ""
    chosen: bool = False
    focused: bool = False
    x: float = 0.0
    y: float = 0.0
    free: bool = True

    @property
    def typeable(self) -> bool:
        """Whether text can be typed into it."""
        return self.kind in ("text", "password", "textarea", "email", "number", "search", "tel", "url", "date")


@dataclasses.dataclass(frozen=True)
class View:
    """What a page shows: its task, its elements (the first has the number 1), the raw reward in [-1, 1], its end."""

    utterance: str
    elements: tuple[Element, ...]
    reward: float = 0.0
    done: bool = False


@functools.cache
def chromium() -> str | None:
    """Where the system's Chromium is; None without one. The variable FORESIGHT_CHROMIUM names another."""
    given = os.environ.get("FORESIGHT_CHROMIUM")
    return given or next((path for name in NAMES if (path := shutil.which(name))), None)


@functools.cache
def pages() -> Path | None:
    """The folder of the pages, in the package `miniwob`; None without it. The package is not imported."""
    try:
        folder = Path(str(metadata.distribution("miniwob").locate_file("miniwob/html/miniwob")))
    except metadata.PackageNotFoundError:
        return None
    return folder if folder.is_dir() else None


def missing() -> list[str]:
    """What a browser needs and this machine lacks, each with what to do about it."""
    lacks = []
    if importlib.util.find_spec("playwright") is None:
        lacks.append("the package playwright: pip install 'foresight[web]'")
    if pages() is None:
        lacks.append("the pages of MiniWoB++: pip install --no-deps miniwob")
    if chromium() is None:
        lacks.append("Chromium: install it with the system's packages, or set FORESIGHT_CHROMIUM to its program")
    return lacks


@functools.cache
def tasks() -> tuple[str, ...]:
    """The names of all pages."""
    folder = pages()
    return tuple(sorted(file.stem for file in folder.glob("*.html"))) if folder else ()


def require(names: Sequence[str] = ()) -> None:
    """Raise UserError for what is missing, and for a page that does not exist."""
    if lacks := missing():
        raise UserError("A browser needs " + "; ".join(lacks) + ".")
    for name in names:
        if name not in tasks():
            raise errors.unknown("page of MiniWoB++", name, tasks())


class Browser:
    """Chromium, driven from a thread of its own, so that any thread may use it."""

    def __init__(self) -> None:
        require()
        self._loop = asyncio.new_event_loop()
        self._free: dict[str, list[Any]] = {}
        self._opening = asyncio.Semaphore(OPENED)
        threading.Thread(target=self._loop.run_forever, daemon=True, name="browser").start()
        self._driver, self._chromium, self._context = self.run(self._launch())
        atexit.register(self.close)

    def run(self, coroutine: Coroutine[Any, Any, Found], seconds: float = SECONDS) -> Found:
        """The result of a coroutine of this class. Raises TimeoutError."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise

    async def _launch(self) -> tuple[Any, Any, Any]:
        from playwright.async_api import async_playwright

        driver = await async_playwright().start()
        # Chromium's own sandbox does not start as root.
        flags = [*FLAGS, *(["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else [])]
        running = await driver.chromium.launch(executable_path=chromium(), args=flags)
        context = await running.new_context(
            viewport={"width": WIDTH, "height": HEIGHT}, offline=True, accept_downloads=False, service_workers="block"
        )
        await context.add_init_script(SCRIPT)
        context.set_default_timeout(1_000 * SECONDS)
        return driver, running, context

    async def take(self, task: str) -> Any:
        """A page of `task` that no other episode uses. Give it back with `free`."""
        if waiting := self._free.get(task):
            return waiting.pop()
        folder = pages()
        assert folder is not None
        others = [name for name, waiting in self._free.items() if waiting]
        if sum(len(self._free[name]) for name in others) >= KEPT:
            page = self._free[others[0]].pop()
        else:
            async with self._opening:
                page = await self._context.new_page()
            page.on("dialog", lambda dialog: dialog.dismiss())
            page.on("popup", lambda popup: popup.close())
        async with self._opening:
            await page.goto((folder / f"{task}.html").as_uri(), timeout=1_000 * LOADING)
        return page

    def free(self, task: str, page: Any) -> None:
        """Keep a page for the next episode of its task. From any thread."""
        self._loop.call_soon_threadsafe(self._free.setdefault(task, []).append, page)

    def drop(self, page: Any) -> None:
        """Close a page that is of no use any more. From any thread."""
        with contextlib.suppress(RuntimeError):
            asyncio.run_coroutine_threadsafe(page.close(), self._loop)

    async def begin(self, page: Any, seed: int) -> View:
        """Start an episode: equal seeds give equal episodes."""
        return _view(await page.evaluate("a => foresight.begin(...a)", [str(seed), MOST, LONGEST]))

    async def act(self, page: Any, view: View, verb: str, number: int, text: str) -> View:
        """`click` the element `number` of the last view, `type` a text in place of what is in it, or `press` a key.

        Raises ValueError if the element is gone.
        """
        if verb == "press":
            await page.keyboard.press(text)
        else:
            one = view.elements[number - 1]
            place = [one.x, one.y] if one.free else await page.evaluate("n => foresight.reach(n)", number)
            if place is None:
                raise ValueError(f"there is no element {number} any more")
            if place:
                await page.mouse.click(*place)
            if verb == "type":
                if one.value:
                    await page.evaluate("n => foresight.select(n)", number)
                await page.keyboard.type(text)
        return _view(await page.evaluate("a => foresight.look(...a)", [MOST, LONGEST]))

    async def together(self, coroutines: Sequence[Coroutine[Any, Any, Found]]) -> list[Found | BaseException]:
        """The results, or errors, of what several pages do at once."""
        return await asyncio.gather(*coroutines, return_exceptions=True)

    def close(self) -> None:
        """End Chromium."""
        atexit.unregister(self.close)

        async def end() -> None:
            with contextlib.suppress(Exception):
                await self._chromium.close()
                await self._driver.stop()

        with contextlib.suppress(Exception):
            self.run(end(), 5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)


_lock = threading.Lock()
_browsers: dict[int, Browser] = {}  # by process: a forked process starts its own


def shared() -> Browser:
    """The browser of this process, started at the first call. Raises UserError for what is missing."""
    with _lock:
        if os.getpid() not in _browsers:
            _browsers[os.getpid()] = Browser()
        return _browsers[os.getpid()]


def _view(found: Any) -> View:
    utterance, elements, reward, done = found
    return View(str(utterance), tuple(Element(*one) for one in elements), float(reward), bool(done))
