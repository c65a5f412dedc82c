from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from foresight.studio import live
from foresight.studio.runs import Library
from tests.studio.test_runs import make, rows

READY = "event: ready\ndata: {}\n\n"


def test_clients_that_connect_at_once_share_one_look_at_the_logs(tmp_path: Path) -> None:
    async def connect() -> tuple[list[str], int]:
        changes = live.Live(Library([tmp_path]))
        clients = [changes.follow() for _ in range(5)]
        first = await asyncio.gather(*(anext(client) for client in clients))
        watching = [task for task in asyncio.all_tasks() if "_watch" in getattr(task.get_coro(), "__qualname__", "")]
        for client in clients:
            await client.aclose()
        return first, len(watching)

    assert asyncio.run(connect()) == ([READY] * 5, 1)


def test_a_client_that_does_not_read_is_closed_and_the_others_get_every_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "POLL", 0.001)
    monkeypatch.setattr(live, "WAITING", 2)
    log = make(tmp_path / "run", rows(1)) / "metrics.jsonl"

    async def follow() -> tuple[list[int], list[int]]:
        changes = live.Live(Library([tmp_path]))
        slow, quick = changes.follow(), changes.follow()
        assert [await anext(slow), await anext(quick)] == [READY] * 2
        seen = []
        for step in range(2, 7):
            with log.open("a") as file:
                file.write(json.dumps({"step": step, "seconds": step}) + "\n")
            seen.append(_step(await anext(quick)))
        late = [_step(text) async for text in slow]  # it ends, and the browser connects again
        await quick.aclose()
        return seen, late

    seen, late = asyncio.run(asyncio.wait_for(follow(), 20))
    assert seen == [2, 3, 4, 5, 6] and late == [2, 3]


def _step(event: str) -> int:
    (row,) = json.loads(event.split("data: ")[1])["rows"]
    return int(row["step"])
