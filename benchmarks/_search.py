"""Shared by the benchmarks of tree search: one small latent model, in torch and in JAX, and the timing loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

ROWS, SIMULATIONS, ACTIONS, LATENT, HIDDEN, DISCOUNT = 64, 50, 9, 64, 128, 0.99
THREADS = 1  # of torch: more do not make such small products faster; JAX chooses its own number
SECONDS = 4.0


def weights() -> dict[str, np.ndarray]:
    """Two layers of 128 from latent and action, then latent, logits, value and reward side by side."""
    rng = np.random.default_rng(0)

    def layer(inputs: int, outputs: int) -> np.ndarray:
        return (rng.standard_normal((inputs, outputs)) / np.sqrt(inputs)).astype(np.float32)

    return {
        "state": layer(LATENT, HIDDEN), "action": layer(ACTIONS, HIDDEN), "second": layer(HIDDEN, HIDDEN),
        "last": layer(HIDDEN, LATENT + ACTIONS + 2), "obs": rng.standard_normal((ROWS, LATENT)).astype(np.float32),
    }  # fmt: skip


class TorchModel:
    """The model as a `planning.search.mcts.Model`."""

    def __init__(self) -> None:
        import torch

        self.weights = {name: torch.from_numpy(array) for name, array in weights().items()}
        self.discount = torch.full((ROWS,), DISCOUNT)

    def root(self, obs: Any) -> tuple[Any, Any, Any]:
        return obs[:, :ACTIONS], obs[:, -1].tanh(), obs

    def step(self, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        import torch

        w = self.weights
        h = torch.addmm(w["action"].index_select(0, action), state, w["state"]).relu_()
        y = torch.mm(torch.mm(h, w["second"]).relu_(), w["last"]).tanh_()
        return y[:, :LATENT], y[:, -1], self.discount, y[:, LATENT:-2], y[:, -2]


class StillModel(TorchModel):
    """The same shapes without computation: only the tree and the data transfer between tree and model are timed."""

    def step(self, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        if not hasattr(self, "output"):
            self.output = super().step(state, action)
        return self.output


def rate(run: Callable[[], object]) -> float:
    """Simulations per second over all rows, after two calls to warm up."""
    run()
    run()
    begun, searches = time.perf_counter(), 0
    while time.perf_counter() - begun < SECONDS:
        run()
        searches += 1
    return searches * ROWS * SIMULATIONS / (time.perf_counter() - begun)


def ours(rule: Any, **options: Any) -> dict[str, Any]:
    """Our search with `rule`, in one thread, and with a tree in two."""
    import torch

    from foresight.planning.search.mcts import search

    torch.set_num_threads(THREADS)

    def timed(model: TorchModel, threads: int) -> float:
        generator, obs = torch.Generator().manual_seed(0), model.weights["obs"]
        return rate(lambda: search(model, obs, SIMULATIONS, rule, generator=generator, threads=threads, **options))

    return {
        "rate": timed(TorchModel(), 1),
        "without_network": timed(StillModel(), 1),
        "two_threads": timed(TorchModel(), 2),
        "two_threads_without_network": timed(StillModel(), 2),
        "threads": THREADS,
    }


def mctx(policy: str, **options: Any) -> dict[str, Any]:
    """mctx's `policy`, compiled by JAX for the CPU."""
    import jax
    import jax.numpy as jnp
    import mctx

    w = {name: jnp.array(array) for name, array in weights().items()}

    def step(params: Any, key: Any, action: Any, state: Any) -> Any:
        h = jax.nn.relu(state @ params["state"] + params["action"][action])
        y = jnp.tanh(jax.nn.relu(h @ params["second"]) @ params["last"])
        output = mctx.RecurrentFnOutput(
            reward=y[:, -1], discount=jnp.full(ROWS, DISCOUNT), prior_logits=y[:, LATENT:-2], value=y[:, -2]
        )
        return output, y[:, :LATENT]

    @jax.jit
    def search(params: Any, key: Any) -> Any:
        obs = params["obs"]
        root = mctx.RootFnOutput(prior_logits=obs[:, :ACTIONS], value=jnp.tanh(obs[:, -1]), embedding=obs)
        found = getattr(mctx, policy)(params, key, root, step, num_simulations=SIMULATIONS, **options)
        return found.action, found.action_weights

    keys = iter(jax.random.split(jax.random.PRNGKey(0), 100_000))
    return {"rate": rate(lambda: jax.block_until_ready(search(w, next(keys))))}


def lightzero() -> dict[str, Any]:
    """LightZero's C++ tree in the loop of its `MuZeroMCTSCtree`, on torch."""
    import torch

    torch.set_num_threads(THREADS)
    tree, noise = _lightzero_tree(), np.random.default_rng(0)
    legal, no_player = [list(range(ACTIONS))] * ROWS, [-1] * ROWS

    @torch.no_grad()
    def search(model: TorchModel) -> list[list[float]]:
        obs = model.weights["obs"]
        logits, _, state = model.root(obs)
        roots = tree.Roots(ROWS, legal)
        roots.prepare(0.25, noise.dirichlet([0.3] * ACTIONS, ROWS).tolist(), [0.0] * ROWS, logits.tolist(), no_player)
        bounds = tree.MinMaxStatsList(ROWS)
        bounds.set_delta(0.01)
        states = [state.numpy()]
        for simulation in range(SIMULATIONS):
            results = tree.ResultsWrapper(num=ROWS)
            at, row, action, players = tree.batch_traverse(
                roots, 19652, 1.25, DISCOUNT, bounds, results, list(no_player)
            )  # fmt: skip
            leaves = torch.from_numpy(np.asarray([states[x][y] for x, y in zip(at, row, strict=True)]))
            found, reward, _, logits, value = model.step(leaves, torch.from_numpy(np.asarray(action)).long())
            states.append(found.numpy())
            tree.batch_backpropagate(
                simulation + 1, DISCOUNT, reward.tolist(), value.tolist(), logits.tolist(), bounds, results, players
            )
        return roots.get_distributions()

    def timed(model: TorchModel) -> float:
        assert sum(search(model)[0]) == SIMULATIONS
        return rate(lambda: search(model))

    return {"rate": timed(TorchModel()), "without_network": timed(StillModel()), "threads": THREADS}


def _lightzero_tree() -> Any:
    """The extension module alone: its package would import LightZero's training dependencies."""
    import importlib.util
    from pathlib import Path

    package = importlib.util.find_spec("lzero")
    assert package is not None and package.submodule_search_locations, "lightzero is not installed"
    folder = Path(package.submodule_search_locations[0]) / "mcts" / "ctree" / "ctree_muzero"
    spec = importlib.util.spec_from_file_location("mz_tree", next(folder.glob("mz_tree*.so")))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
