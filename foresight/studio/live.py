"""What changes while the page is open: one look at the logs, however many clients follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from foresight.studio.encode import encode
from foresight.studio.runs import Library

POLL = 0.25  # seconds between looks at the logs
SILENT = 10.0  # seconds after which a comment keeps a connection open
WAITING = 100  # events that a client may leave unread; then its connection ends, and a browser opens another


class Live:
    """Server-sent events of the runs that changed, with their rows of the table, and of those that are gone."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._followers: set[asyncio.Queue[str]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def follow(self) -> AsyncIterator[str]:
        """The events of one client. It ends when the client closes the connection, or reads too slowly."""
        queue: asyncio.Queue[str] = asyncio.Queue(WAITING)
        async with self._starting:  # clients that connect at once start one task
            if self._watching is None or self._watching.done():
                known = await asyncio.to_thread(self._library.stamps)
                self._watching = asyncio.create_task(self._watch(known))
        self._followers.add(queue)
        try:
            yield "event: ready\ndata: {}\n\n"
            while queue in self._followers or not queue.empty():
                try:
                    yield await asyncio.wait_for(queue.get(), SILENT)
                except TimeoutError:
                    yield ": open\n\n"
        finally:
            self._followers.discard(queue)

    async def _watch(self, known: dict[str, float]) -> None:
        """Look until nobody follows any more."""
        while True:
            await asyncio.sleep(POLL)
            if not self._followers:
                return
            known, event = await asyncio.to_thread(self._look, known)
            if event is not None:
                for queue in list(self._followers):
                    try:
                        queue.put_nowait(event)
                    except asyncio.QueueFull:
                        self._followers.discard(queue)

    def _look(self, known: dict[str, float]) -> tuple[dict[str, float], str | None]:
        now = self._library.stamps()
        changed = [run for run, stamp in now.items() if known.get(run) != stamp]
        gone = [run for run in known if run not in now]
        if not changed and not gone:
            return now, None
        rows = [row for run in changed if (row := self._library.row(run)) is not None]
        document: dict[str, Any] = {"changed": changed, "gone": gone, "rows": rows}
        return now, f"event: changed\ndata: {encode(document).decode()}\n\n"
