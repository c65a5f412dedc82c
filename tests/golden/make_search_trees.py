"""Golden search trees, made by mctx (with JAX) on tables that stand in the fixture: no JAX is needed to test by them.

python tests/golden/make_search_trees.py     writes tests/golden/search_trees.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("search_trees.json")
STATES, ROWS = 24, 3


def tables(seed: int, actions: int, discounts: list[float]) -> dict[str, Any]:
    """A random MDP of `STATES` states as lists, in decimals that are written exactly."""
    import numpy as np

    rng = np.random.default_rng(seed)
    pick = rng.choice(len(discounts), (STATES, actions))
    return {
        "next": rng.integers(0, STATES, (STATES, actions)).tolist(),
        "reward": rng.uniform(-1, 1, (STATES, actions)).round(2).tolist(),
        "discount": np.array(discounts)[pick].tolist(),
        "logits": rng.normal(0, 1.5, (STATES, actions)).round(2).tolist(),
        "value": rng.uniform(-1, 1, STATES).round(2).tolist(),
    }


def nodes(tree: Any, row: int) -> dict[str, list[float]]:
    """`{path: [visits, value]}`, without what mctx searches below terminal nodes."""
    found, queue = {}, [("", 0)]
    while queue:
        path, node = queue.pop(0)
        found[path] = [int(tree.node_visits[row, node]), float(tree.node_values[row, node])]
        for action, child in enumerate(tree.children_index[row, node].tolist()):
            if child < 0:
                continue
            below = f"{path}-{action}" if path else str(action)
            if tree.children_discounts[row, node, action] == 0:
                found[below] = [int(tree.children_visits[row, node, action]), None]
            else:
                queue.append((below, child))
    return found


def case(
    kind: str, seed: int, actions: int, simulations: int, discounts: list[float], **options: Any
) -> dict[str, Any]:
    """One search of mctx on `ROWS` roots, with all that repeats it."""
    import functools

    import jax
    import jax.numpy as jnp
    import mctx

    env = tables(seed, actions, discounts)
    arrays = {key: jnp.array(value) for key, value in env.items()}
    roots = list(range(ROWS))
    legal = options.pop("legal", None)

    def step(params: Any, key: Any, action: Any, state: Any) -> Any:
        after = arrays["next"][state, action]
        return mctx.RecurrentFnOutput(
            reward=arrays["reward"][state, action],
            discount=arrays["discount"][state, action],
            prior_logits=arrays["logits"][after],
            value=arrays["value"][after],
        ), after

    state = jnp.array(roots)
    root = mctx.RootFnOutput(prior_logits=arrays["logits"][state], value=arrays["value"][state], embedding=state)
    invalid = None if legal is None else 1 - jnp.array(legal)
    arguments: dict[str, Any] = {"invalid_actions": invalid, "num_simulations": simulations}
    if kind == "gumbel":
        transform = {key: options[key] for key in ("value_scale", "maxvisit_init", "rescale_values")}
        found = mctx.gumbel_muzero_policy(
            (), jax.random.PRNGKey(seed), root, step, **arguments,
            qtransform=functools.partial(mctx.qtransform_completed_by_mix_value, **transform),
            max_num_considered_actions=options["considered"], gumbel_scale=options["scale"],
        )  # fmt: skip
        noise = found.search_tree.extra_data.root_gumbel.tolist()
    else:
        noise = None
        found = mctx.muzero_policy(
            (), jax.random.PRNGKey(seed), root, step, **arguments, dirichlet_fraction=0.0, temperature=0.0,
            pb_c_init=options["c_init"], pb_c_base=options["c_base"],
        )  # fmt: skip
    tree = jax.device_get(found.search_tree)
    return {
        "kind": kind, "world": env, "roots": roots, "legal": legal, "simulations": simulations, "noise": noise,
        "options": options, "action": found.action.tolist(), "weights": found.action_weights.tolist(),
        "value": tree.node_values[:, 0].tolist(), "nodes": [nodes(tree, row) for row in range(ROWS)],
    }  # fmt: skip


def main() -> None:
    plain, games = [0.97], [-1.0, -1.0, -1.0, 0.0]
    gumbel = {"value_scale": 0.1, "maxvisit_init": 50.0, "rescale_values": True, "considered": 16, "scale": 1.0}
    puct = {"c_init": 1.25, "c_base": 19652.0}
    mask = [[1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 0]]
    cases = [
        case("puct", 0, 4, 40, plain, **puct),
        case("puct", 1, 5, 48, games, **puct),
        case("puct", 2, 5, 32, plain, **puct, legal=mask),
        case("puct", 3, 3, 64, [0.9, 1.0, -1.0, 0.0], c_init=2.5, c_base=20.0),
        case("gumbel", 4, 4, 40, plain, **gumbel),
        case("gumbel", 5, 6, 32, games, **gumbel | {"considered": 3}),
        case("gumbel", 6, 5, 24, plain, **gumbel, legal=mask),
        case("gumbel", 7, 5, 17, plain, **gumbel | {"value_scale": 1.0, "rescale_values": False, "scale": 0.0}),
    ]
    text = ",\n".join(json.dumps(one, separators=(",", ":")) for one in cases)
    FILE.write_text(f"[\n{text}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
