"""Actors on a real Ray: two nodes on this machine, one of whose actors is killed; then the head dies.

Everything that needs Ray is here, on one cluster: starting it takes seconds. Nothing is timed; the limits are only
there so that a hang ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ray = pytest.importorskip("ray")

from foresight.agents.live import on_ray  # noqa: E402
from foresight.agents.live.settings import Settings  # noqa: E402
from foresight.algorithms.policy import impala, ppo  # noqa: E402
from foresight.algorithms.search import alphazero  # noqa: E402
from foresight.algorithms.value import dqn  # noqa: E402
from foresight.envs.games import make as games  # noqa: E402
from foresight.envs.make import make  # noqa: E402
from foresight.errors import UserError  # noqa: E402
from foresight.runtime import run  # noqa: E402
from foresight.runtime.config import resolve  # noqa: E402
from foresight.runtime.distributed import actors, learner, ray_cluster  # noqa: E402
from tests import forks, tiny_language  # noqa: E402
from tests.agents.live.test_train import begun, feed  # noqa: E402

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[3]
# Without what only prints logs and adds machines. Workers with the priority of the tests, which wait for them.
NODE = {
    "num_cpus": 2, "object_store_memory": 80 * 2**20, "include_log_monitor": False, "setup_worker_path": forks.__file__,
}  # fmt: skip
HEAD = {**NODE, "include_dashboard": False, "no_monitor": True}
CONDITIONS = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
FIELDS: dict[str, Any] = {
    "hidden": (16,), "num_envs": 4, "rollout_steps": 8, "rollouts_per_update": 1, "optimizer": "adam", "learning_rate":
    3e-3,
}  # fmt: skip


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of two nodes, whose workers import this checkout."""
    from ray.cluster_utils import Cluster

    before = {key: os.environ.get(key) for key in ("PYTHONPATH", *CONDITIONS)}
    path = os.pathsep.join(filter(None, [str(ROOT), before["PYTHONPATH"]]))
    os.environ.update(PYTHONPATH=path, **CONDITIONS)
    forks.address()
    nodes = Cluster(initialize_head=True, head_node_args=HEAD)
    session = nodes.head_node.get_session_dir_path()
    try:
        nodes.add_node(**NODE)
        yield nodes
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
        nodes.shutdown()
        shutil.rmtree(session, ignore_errors=True)
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)


def _plan(name: str, count: int, **given: Any) -> tuple[str, dict[str, Any], Callable[[], Any]]:
    resolved = resolve.resolve(name, env="CartPole-v1", given=given, actors=count)
    return name, *actors.plan(dataclasses.replace(resolved, preset=None), count)


def _fleet(nodes: Any, name: str, count: int, **given: Any) -> ray_cluster.Fleet:
    return ray_cluster.Fleet(*_plan(name, count, **given), count, nodes.address)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_actors_of_several_nodes_die_and_the_learner_continues(nodes: Any) -> None:
    config = impala.Config(steps=20_000, **FIELDS)
    fleet = _fleet(nodes, "impala", 2, **dataclasses.asdict(config))  # all fields: none is of a preset
    pids = fleet.pids()
    homes = set(ray.get([actor.__ray_call__.remote(_node) for actor in fleet._actors]))
    assert len(homes) == 2  # one actor on each node
    state = impala.build(config, make("CartPole-v1", num_envs=1).spaces)
    seen, killed = [], False
    for step, metrics, _ in learner.train(impala, config, state, fleet):
        seen.append((step, metrics))
        if step > 2000 and not killed:
            os.kill(pids[0], signal.SIGKILL)
            killed = True
        if killed and metrics["actor_restarts"] == 1 and fleet._deaths == [0, 0]:
            break  # the learner continued, and the successor has sent its first unroll
        if killed:
            time.sleep(0.02)  # leave the processor to the successor
        state.step = min(state.step, config.steps - 32)  # however long that takes
    last = seen[-1][1]
    assert last["actor_restarts"] == 1
    assert 1 <= last["dropped_unrolls"] <= learner.PENDING  # whole: every step that counts is a whole unroll's
    assert max(metrics["lag"] for _, metrics in seen) > 0
    fleet.close()
    _gone(pids)


def _node(_: Any) -> str:
    return str(ray.get_runtime_context().get_node_id())


def _gone(pids: list[int]) -> None:
    for _ in range(600):
        if not any(_alive(pid) for pid in pids):
            return
        time.sleep(0.1)
    pytest.fail("actors were left behind")


def test_on_ray_too_it_is_the_synchronous_run(nodes: Any) -> None:
    given = {"hidden": (16,), "num_envs": 4, "rollout_steps": 8, "minibatches": 2, "steps": 160}
    config = ppo.Config(**given)
    *_, (_, _, together) = ppo.train(config, make("CartPole-v1", num_envs=4))
    state = ppo.build(config, make("CartPole-v1", num_envs=1).spaces)
    *_, (_, metrics, apart) = learner.train(ppo, config, state, _fleet(nodes, "ppo", 1, **given))
    assert metrics["lag"] == 0
    for one, other in zip(apart.network.parameters(), together.network.parameters(), strict=True):
        assert torch.equal(one, other)


def test_rows_for_a_replay_come_over_ray_in_their_order(nodes: Any) -> None:
    """Two actors a round ahead: the run is that of actors in this process, whichever of them is quick."""
    given = {
        "hidden": (16,), "num_envs": 4, "rollout_steps": 10, "steps": 800, "learning_starts": 80, "replay_size": 1000,
        "train_every": 4,
    }  # fmt: skip
    config = dqn.Config(**given)
    ends = []
    here = actors.Inline([actors.Collector(*_plan("dqn", 2, **given), i, 0) for i in range(2)])
    for fleet in (here, _fleet(nodes, "dqn", 2, **given)):
        state = dqn.build(config, make("CartPole-v1", num_envs=1).spaces)
        *_, (step, metrics, state) = learner.train(dqn, config, state, fleet)
        assert (step, metrics["lag"], len(state.replay)) == (800, 1, 800)
        ends.append(torch.cat([p.detach().flatten() for p in state.network.parameters()]))
    assert torch.equal(*ends)


def test_games_are_played_over_ray_and_a_death_tears_none(nodes: Any) -> None:
    """Two actors share the games of AlphaZero; one is killed, and what reaches the replay are whole games still."""
    given = {"num_games": 32, "simulations": 4, "channels": 4, "blocks": 1, "learning_starts": 10**6, "steps": 10**6}
    resolved = resolve.resolve("alphazero", env="tic_tac_toe", given=given, actors=2)
    fields, tables = actors.plan(resolved, 2)
    fleet = ray_cluster.Fleet("alphazero", fields, tables, 2, nodes.address)
    pids, killed, last = fleet.pids(), False, {}
    state = alphazero.build(alphazero.Config(**given), games.make("tic_tac_toe"))
    for _, last, _ in learner.train(alphazero, alphazero.Config(**given), state, fleet):
        if not killed:
            os.kill(pids[0], signal.SIGKILL)
            killed = True
        if last["actor_restarts"] == 1 and fleet._deaths == [0, 0]:
            break
        time.sleep(0.02)  # leave the processor to the successor
    assert last["dropped_unrolls"] >= 1 and 0 < last["lag"] <= 1
    assert state.replay.storage is not None
    held = len(state.replay)
    stones, ends = state.replay.storage.obs[0, :held, :2].sum((1, 2, 3)), state.replay.storage.cut[0, :held]
    assert state.finished == ends.sum() > 64
    assert torch.equal(stones[1:], torch.where(ends[:-1] > 0, 0.0, stones[:-1] + 1)) and ends[-1] == 1
    fleet.close()
    _gone(pids)


def test_a_run_of_games_with_actors_stops_and_resumes(nodes: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = {
        "num_envs": 8,
        "simulations": 4,
        "collect_steps": 8,
        "learning_starts": 128,
        "latent_size": 8,
        "hidden": (16,),
    }
    run.train("muzero", preset="tic_tac_toe", out=out, actors=2, ray=nodes.address, steps=256, show=False,
              evaluation_episodes=2, env_options={"opponent": "random"}, **small)  # fmt: skip
    assert len(run.load(out).state.replay) == 256
    longer = run.resume(out, 384, show=False, ray=nodes.address)
    last = next(row for row in reversed(longer.metrics()) if "lag" in row)
    assert last["step"] == 384 and last["actor_restarts"] == 0 and last["length"] >= 5
    state = run.load(out).state
    assert state.updates == (384 - 128) // 8 and len(state.replay) == 384
    masked, stopped = state.replay.storage.mask[:, :48] == 0, 256 // 8 - 1
    assert state.replay.storage.cut[
        :, stopped
    ].all()  # the newest row of each game when it was stopped: it ended there,
    assert masked[:, stopped].any() and masked.sum() == masked[:, stopped].sum()  # or what followed is not known


def test_envs_that_fail_end_the_run_with_their_own_message(nodes: Any) -> None:
    config, fields = impala.Config(**FIELDS), dataclasses.asdict(impala.Config(**FIELDS))
    fleet = ray_cluster.Fleet("impala", fields, lambda: _Broken(make("CartPole-v1", num_envs=4)), 1, nodes.address)
    state = impala.build(config, make("CartPole-v1", num_envs=1).spaces)
    with pytest.raises(UserError, match="Actor 0 failed: environment 3 broke at step 20"):
        list(learner.train(impala, config, state, fleet))
    with pytest.raises(UserError, match="4 CPUs, too few for 5 actors"):
        ray_cluster.Fleet("impala", fields, lambda: None, 5, nodes.address)


def test_cpus_in_use_are_waited_for(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of the four are taken: two actors would wait for ever, so it is reported, and given up or ended."""
    from ray.util import placement_group, remove_placement_group

    if not ray.is_initialized():
        ray.init(address=nodes.address, log_to_driver=False)
    held = placement_group([{"CPU": 1}] * 3)
    assert held.wait(60)
    reported: list[str] = []
    started: list[int] = []
    monkeypatch.setattr(ray_cluster.Fleet, "_start", lambda self, actor: started.append(actor))
    monkeypatch.setattr(ray_cluster, "REPORT_AFTER", 0.0)
    monkeypatch.setattr(ray_cluster, "TIMEOUT", 3.0)
    missing = "2 actors need as many free CPUs, but the Ray cluster has 1 of 4"
    with pytest.raises(ray_cluster.FleetError) as caught:
        ray_cluster.Fleet("impala", {}, lambda: None, 2, nodes.address, report=reported.append)
    assert str(caught.value) == (
        f"{missing}, and no more became free in 3 seconds. Stop other programs there, or give fewer --actors."
    )
    assert len(reported) == 1 and reported[0].startswith(f"{missing}: waiting ") and not started
    monkeypatch.setattr(ray_cluster, "TIMEOUT", 300.0)
    fleet = ray_cluster.Fleet(
        "impala", {}, lambda: None, 2, nodes.address, report=lambda _: remove_placement_group(held)
    )
    assert started == [0, 1]
    fleet.close()


def test_a_live_trainer_is_killed_on_its_machine_and_continues(nodes: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_language.folder(), tmp_path / "model")
    store, config = begun(tmp_path, str(folder))
    for version in (1, 2):
        feed(store, SimpleNamespace(version=version - 1))  # type: ignore[arg-type]
        with ThreadPoolExecutor(1) as pool:
            loop = pool.submit(on_ray.run, "train", store, Settings(ray=nodes.address), config)
            while store.active() < version and not loop.done():
                time.sleep(0.1)
            places = [text for kind, text in store.events() if kind == "ray"]
            os.kill(int(places[-1].rpartition("process ")[2]), signal.SIGKILL)
        with pytest.raises(SystemExit, match="train ended on Ray"):
            loop.result()
    assert store.versions()[-1]["parent"] == 1 and store.counts()["trained"] == 6


class _Broken:
    def __init__(self, env: Any) -> None:
        self.env, self.steps = env, 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 20:
            raise RuntimeError("environment 3 broke at step 20")
        return self.env.step(action)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["env"], name)


def test_an_address_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UserError, match=r"no Ray cluster at '127.0.0.1:1'"):
        ray_cluster.Fleet("impala", {}, lambda: None, 1, "127.0.0.1:1")


LEARNER = """
import sys
from foresight.errors import UserError
from foresight.runtime import run
from foresight.runtime.distributed import ray_cluster

ray_cluster.POLL = 0.2  # for it trains until it notices

def tell(step, metrics, state):
    print(step, flush=True)

try:
    run.train("impala", env="CartPole-v1", out=sys.argv[1], actors=1, ray=sys.argv[2], steps=10**9, show=False,
              evaluation_episodes=1, callbacks=[tell], checkpoint_every=1e9)
except UserError as error:
    print(error, flush=True)
"""


@pytest.mark.slow
def test_when_the_head_is_gone_the_checkpoint_is_saved(nodes: Any, tmp_path: Path) -> None:
    """Last, for it ends the cluster: a learner of its own process, which Ray would otherwise end after a minute."""
    if ray.is_initialized():
        ray.shutdown()
    out = tmp_path / "run"
    learner = forks.start(["-c", LEARNER, str(out), nodes.address], stdout=subprocess.PIPE)
    try:
        line = learner.stdout.readline()
        assert line.strip().isdigit(), line
        os.kill(nodes.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)
        *_, step, reported = learner.stdout.read().splitlines()
        assert "does not respond" in reported and f"foresight resume {out}" in reported
        assert learner.wait(120) == 0
    finally:
        learner.kill()
    saved = sorted((out / "checkpoints").glob("step-*"))
    assert len(saved) == 1 and int(saved[0].name.split("-")[1]) == int(step)
    assert run.load(out).step == int(step)
