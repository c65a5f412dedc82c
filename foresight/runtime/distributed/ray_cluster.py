"""Actors on Ray: on a new Ray instance on this machine, or on an existing cluster."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from foresight.envs.base import Env
from foresight.errors import LostError, UserError
from foresight.runtime.distributed.actors import Collector, LostMessage, Message, Weights

STORE = 256 * 2**20  # bytes of shared memory for messages by default; Ray's minimum is 75 MiB
INLINE = 2**16  # bytes: smaller weights are sent with each request, larger ones once through the object store
DEATHS = 3  # of one actor in a row, without a message in between, before the run fails
POLL, MISSES = 1.0, 5  # seconds between checks of the head, and how many in a row must fail
GRACE = 10.0  # seconds for Ray to shut down
REPORT_AFTER, TIMEOUT = 3.0, 60.0  # seconds of waiting for free CPUs before it is reported, and before an error


class FleetError(LostError):
    """No rollout will arrive any more: the head of the cluster is gone, envs fail, or actors keep dying."""


class Fleet:
    """An `actors.Fleet` of `count` actors, spread over the nodes of the cluster.

    Without an `address` a new Ray instance starts here (no dashboard, loopback address) and ends with `close`. With
    one, or if Ray already runs in this process, that cluster is used and left running.

    Every actor takes one CPU. If others hold them, `report` is called, and the fleet waits up to a minute.

    Raises UserError if Ray is missing, nothing runs at the address, or the cluster has too few CPUs, and FleetError
    if too few become free.
    """

    def __init__(
        self,
        algorithm: str,
        config: dict[str, Any],
        make: Callable[[], Env],
        count: int,
        address: str | None = None,
        store: int = STORE,
        report: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.size, self.restarts = count, 0
        self._arguments = (algorithm, config, make)
        self._ray, self._owned = connect(count, address, store)
        self._errors = self._ray.exceptions
        self._wait_for_cpus(report)
        self._class = self._ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(Collector)
        self._generations, self._deaths = [0] * count, [0] * count
        self._answers: queue.SimpleQueue[tuple[int, int, int, Any]] = queue.SimpleQueue()
        self._shared: tuple[int, Any] = (-1, None)  # version, and the weights in the object store
        self._gone, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()
        self._actors = [self._start(i) for i in range(count)]

    def request(self, actor: int, order: int, weights: Weights) -> None:
        """See `actors.Fleet`."""
        generation = self._generations[actor]
        reference = self._actors[actor].collect.remote(order, self._sendable(weights))
        reference.future().add_done_callback(lambda done: self._answers.put((actor, generation, order, done)))

    def receive(self) -> Message | LostMessage:
        """See `actors.Fleet`. Raises FleetError."""
        while True:
            if self._gone.is_set():
                raise FleetError(f"The head of the Ray cluster at {self._address()} does not respond any more.")
            try:
                actor, generation, order, done = self._answers.get(timeout=0.5)
                break
            except queue.Empty:
                continue
        try:
            message: Message = done.result()
        except self._errors.RayTaskError as error:
            raise FleetError(f"Actor {actor} failed: {cause(error)}") from error
        except self._errors.RayError as error:
            if generation == self._generations[actor]:
                self._replace(actor, error)
            return LostMessage(actor, order)
        self._deaths[actor] = 0
        return message

    def pids(self) -> list[int]:
        """The process of each actor, on its own machine."""
        futures = [actor.__ray_call__.remote(lambda _: os.getpid()) for actor in self._actors]
        return list(self._ray.get(futures))

    def close(self) -> None:
        """See `actors.Fleet`. A cluster that existed before keeps running."""
        if self._closed.is_set():
            return
        self._closed.set()

        def end() -> None:
            with contextlib.suppress(Exception):  # an error of Ray must not hide why the run ends
                for actor in self._actors:
                    self._ray.kill(actor)
            if self._owned:
                self._ray.shutdown()

        ending = threading.Thread(target=end, daemon=True)  # without a head it may never return
        ending.start()
        ending.join(POLL if self._gone.is_set() else GRACE)

    def _start(self, actor: int) -> Any:
        algorithm, config, make = self._arguments
        return self._class.remote(algorithm, config, make, actor, self._generations[actor])

    def _replace(self, actor: int, error: Exception) -> None:
        self._generations[actor] += 1
        self._deaths[actor] += 1
        if self._deaths[actor] > DEATHS:
            raise FleetError(
                f"Actor {actor} died {DEATHS + 1} times without sending a rollout. Is there enough memory? "
                f"Ray reports: {' '.join(str(error).split())[:600]}"
            )
        with contextlib.suppress(self._errors.RayError):  # it may only be unreachable
            self._ray.kill(self._actors[actor])
        self.restarts += 1
        self._actors[actor] = self._start(actor)

    def _sendable(self, weights: Weights) -> Any:
        """The weights if they are small, else a reference to them, so that each node fetches them once."""
        if sum(array.nbytes for part in weights.parts.values() for array in part.values()) <= INLINE:
            return weights
        if self._shared[0] != weights.version:
            self._shared = weights.version, self._ray.put(weights)
        return self._shared[1]

    def _wait_for_cpus(self, report: Callable[[str], object]) -> None:
        """Wait until there is a free CPU for each actor: Ray itself would wait forever, silently."""
        cpus = int(self._ray.cluster_resources().get("CPU", 0))
        if cpus < self.size:
            self._finish()
            raise UserError(f"The Ray cluster has {cpus} CPUs, too few for {self.size} actors. Give fewer --actors.")
        began, reported = time.monotonic(), False
        while (free := int(self._ray.available_resources().get("CPU", 0))) < self.size:
            waited = time.monotonic() - began
            missing = f"{self.size} actors need as many free CPUs, but the Ray cluster has {free} of {cpus}"
            if waited >= TIMEOUT:
                self._finish()
                raise FleetError(
                    f"{missing}, and no more became free in {TIMEOUT:g} seconds. "
                    "Stop other programs there, or give fewer --actors."
                )
            if waited >= REPORT_AFTER and not reported:
                report(f"{missing}: waiting {TIMEOUT - waited:.0f} seconds more")
                reported = True
            time.sleep(POLL / 2)

    def _finish(self) -> None:
        if self._owned:
            self._ray.shutdown()

    def _address(self) -> str:
        return str(self._ray.get_runtime_context().gcs_address)

    def _watch(self) -> None:
        """Check whether the head still responds. Ray itself notices after a minute, and then exits the process."""
        host, _, port = self._address().rpartition(":")
        misses = 0
        while misses < MISSES and not self._closed.wait(POLL):
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=POLL).close()
                misses = 0
            except OSError:
                misses += 1
        if misses:
            self._gone.set()


def connect(count: int, address: str | None, store: int = STORE) -> tuple[Any, bool]:
    """Ray, and whether this process must shut it down; without an address it starts here, with `count` CPUs.

    Raises UserError if Ray is missing or nothing runs at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError("Actors need Ray. Install it with: pip install 'foresight[ray]'") from error
    if ray.is_initialized():
        return ray, False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    before = signal.getsignal(signal.SIGTERM)
    try:
        if address is None:
            # "local", or it would connect to a Ray that another program started on this machine.
            ray.init(
                address="local", num_cpus=count, include_dashboard=False, object_store_memory=store,
                _node_ip_address="127.0.0.1", **quiet,
            )  # fmt: skip
        else:
            _check_address(address)
            ray.init(address=address, **quiet)
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        what = "Ray cannot start here" if address is None else f"There is no Ray cluster at '{address}'"
        raise UserError(f"{what}: {' '.join(str(error).split())[:300]}") from error
    finally:
        if threading.current_thread() is threading.main_thread() and callable(before):
            signal.signal(signal.SIGTERM, before)  # Ray replaces it
    return ray, True


def _check_address(address: str) -> None:
    """Raise OSError if nothing listens at the address: Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "//" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10 * POLL).close()


def cause(error: Any) -> str:
    """Why a task or an actor failed, in one line."""
    found = getattr(error, "cause", None)
    return str(found) if isinstance(found, UserError) else " ".join(str(found or error).split())[:600]
