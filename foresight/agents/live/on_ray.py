"""Loops of a live run on other machines: Ray runs score and train, the database stays with the server.

Such a loop is an actor on any machine of the cluster. It uses the store through a second actor on this machine, the
keeper, which also copies versions in both directions, so the machines need no common disk. When one of the two dies,
the process of the loop ends here, and the supervisor starts it again, as without Ray. The folder of a model and the
file of a scorer must be in the same place on every machine.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from foresight.agents.live.settings import Config, Settings
from foresight.agents.live.store import VERSIONS, Store

PATIENCE = 30.0  # seconds until a loop without a free CPU is reported


class Keeper:
    """The store of a live run, for loops on other machines."""

    def __init__(self, folder: str) -> None:
        self.store = Store(folder)

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """A method of the store."""
        return getattr(self.store, name)(*arguments)

    def files(self, number: int) -> dict[str, bytes]:
        """The files of a version."""
        return packed(Path(self.store.folder_of(number)))

    def publish(
        self, number: int, files: dict[str, bytes], metrics: dict[str, Any], turns: Sequence[int], parent: int | None
    ) -> bool:
        """`Store.publish` of files from another machine: the folder is whole before the database names it."""
        folder = self.store.folder / VERSIONS / str(number)
        shutil.rmtree(folder, ignore_errors=True)  # a keeper was killed before it could publish it
        unpacked(files, folder)
        return self.store.publish(number, str(folder), metrics, turns, parent)


class Remote:
    """The methods of `Store`, called through a keeper; `folder` holds copies of the versions."""

    def __init__(self, ask: Callable[..., Any], folder: Path) -> None:
        """`ask(method, *arguments)` calls a method of the keeper and returns its result."""
        self._ask, self.folder = ask, folder

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._ask("call", name, arguments)

    def folder_of(self, number: int) -> str:
        """The folder of a version here; version 0 is the model itself."""
        copy = self.folder / VERSIONS / str(number)
        if number == 0:
            return str(self._ask("call", "folder_of", (0,)))
        if not copy.is_dir():
            unpacked(self._ask("files", number), copy)
        return str(copy)

    def publish(
        self, number: int, folder: str, metrics: dict[str, Any], turns: Sequence[int], parent: int | None = None
    ) -> bool:
        """`Store.publish`, with the files of the folder."""
        return bool(self._ask("publish", number, packed(Path(folder)), metrics, list(turns), parent))


class Loop:
    """A loop on another machine."""

    def place(self) -> str:
        """The address of the machine, and the process."""
        import ray

        util: Any = ray.util  # untyped
        return f"{util.get_node_ip_address()}, process {os.getpid()}"

    def run(self, loop: str, settings: Settings, config: Config, keeper: Any) -> None:
        """Run it until it is killed."""
        import ray

        from foresight.agents.live import loops

        with tempfile.TemporaryDirectory() as folder:
            store = Remote(lambda method, *arguments: ray.get(getattr(keeper, method).remote(*arguments)), Path(folder))
            loops.run(loop, cast(Store, store), settings, config)


def packed(folder: Path) -> dict[str, bytes]:
    """The files of a folder by relative name."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def unpacked(files: dict[str, bytes], folder: Path) -> None:
    """Write files into a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def run(loop: str, store: Store, settings: Settings, config: Config) -> None:
    """Run a loop on the cluster, and exit with a sentence when it ends. An event names its machine.

    Raises UserError if Ray is missing or nothing runs at the address.
    """
    from foresight.runtime.distributed import ray_cluster  # late: a keeper needs no torch

    ray, _ = ray_cluster.connect(0, settings.ray)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    keeper = ray.remote(num_cpus=0, scheduling_strategy=here)(Keeper).remote(str(store.folder.resolve()))
    gpus = int(settings.device.startswith("cuda"))
    if gpus:  # Ray shows the actor its own GPU alone, which is the first there
        settings = dataclasses.replace(settings, device="cuda")
    actor = ray.remote(num_cpus=1, num_gpus=gpus, scheduling_strategy="SPREAD")(Loop).remote()
    try:
        place = actor.place.remote()
        if not ray.wait([place], timeout=PATIENCE)[0]:
            store.event("ray", f"{loop} waits for a free CPU{' and GPU' * gpus} of the Ray cluster")
        store.event("ray", f"{loop} runs on {ray.get(place)}")
        ray.get(actor.run.remote(loop, settings, config, keeper))
    except ray.exceptions.RayError as error:
        sys.exit(f"{loop} ended on Ray: {ray_cluster.cause(error)}")
