"""The experiments of Sutton & Barto (2018), and exact dynamic programming.

Each is a function of `(quick, picture)`: it draws into the file `picture` and returns its values together with the
published or exact ones. `quick` runs a small part, to test that everything works.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foresight.envs.tabular import grid, sutton_barto
from foresight.envs.tabular.mdp import MDP
from foresight.planning.dynamic import bellman
from foresight.runtime import catalog
from foresight.runtime.results import plot
from foresight.training import tabular

Array = NDArray[np.float64]


def learn(algorithm: str, env: MDP, metric: str, **fields: Any) -> Array:
    """One run that yields at the end of each episode: `metric` by episode `[N]`."""
    module = catalog.module(algorithm)
    config = module.Config(yield_every=1 if algorithm.startswith("m") else 0, **fields)
    return np.array([metrics[metric] for _, metrics, _ in module.train(config, env)])


def random_walk_5(quick: bool, picture: Path) -> dict[str, Any]:
    """Example 6.2, right: the error of TD(0) and of constant-α Monte Carlo on the 5-state walk, over episodes."""
    env, runs = grid.make("RandomWalk5"), 5 if quick else 100
    common = {"gamma": 1.0, "initial": 0.5}
    errors: dict[str, Array] = {}
    for alpha in (0.05, 0.1, 0.15):
        fields = {**common, "alpha": alpha, "episodes": 100, "steps": 10**9}
        errors[f"td_{alpha:g}"] = mean(learn("td_prediction", env, "rms_error", seed=i, **fields) for i in range(runs))
    for alpha in (0.01, 0.02, 0.03, 0.04):
        fields = {**common, "alpha": alpha, "alpha_power": 0.0, "first_visit": False, "steps": 100}
        errors[f"mc_{alpha:g}"] = mean(
            learn("monte_carlo_prediction", env, "rms_error", seed=i, **fields) for i in range(runs)
        )
    figure, axes = plot._axes(picture)
    for name, curve in errors.items():
        kind, _, alpha_text = name.partition("_")
        rank = [other for other in errors if other.startswith(kind)].index(name)
        color, shade = "tab:blue" if kind == "td" else "tab:red", 0.35 + 0.2 * rank
        axes.plot(np.arange(1, 101), curve, label=f"{kind.upper()} α = {alpha_text}", color=color, alpha=shade)
    axes.set(
        xlabel="episodes", ylabel="RMS error over states", title=f"5-state random walk, {runs} runs", ylim=(0, None)
    )
    axes.legend(frameon=False, fontsize=8, ncols=2)
    plot.save(figure, picture)
    return {
        "what": "5-state random walk (S&B example 6.2): RMS error after 100 episodes, TD(0) and Monte Carlo",
        "seeds": runs,
        "rms_after_100": {name: float(curve[-1]) for name, curve in errors.items()},
        "lowest_td": min(float(c.min()) for name, c in errors.items() if name.startswith("td")),
        "lowest_mc": min(float(c.min()) for name, c in errors.items() if name.startswith("mc")),
        "published": {"td_0.15": 0.068, "td_0.1": 0.049, "td_0.05": 0.037, "mc_0.01": 0.100, "mc_0.02": 0.085},
    }


def random_walk_19(quick: bool, picture: Path) -> dict[str, Any]:
    """Figure 7.2: n-step TD on the 19-state walk, the error of the first 10 episodes over α, for each n."""
    env, runs = grid.make("RandomWalk19"), 5 if quick else 100
    powers = range(0, 10, 4) if quick else range(10)
    alphas = [0.2, 0.6, 1.0] if quick else [0.0, 0.02, 0.04, 0.06, 0.08, *(i / 10 for i in range(1, 11))]
    surface: dict[int, list[float]] = {}
    for n in (2**p for p in powers):
        surface[n] = []
        for alpha in alphas:
            fields = {"gamma": 1.0, "n_steps": n, "alpha": alpha, "episodes": 10, "steps": 10**9}
            error = mean(learn("td_prediction", env, "rms_error", seed=i, **fields) for i in range(runs))
            surface[n].append(float(error.mean()))
    best = {n: min(zip(errors, alphas, strict=True)) for n, errors in surface.items()}
    figure, axes = plot._axes(picture)
    for n, errors in surface.items():
        axes.plot(alphas, errors, label=f"n = {n}", linewidth=1.5)
    axes.set(xlabel="α", ylabel="RMS error, first 10 episodes", ylim=(0.24, 0.56))
    axes.set_title(f"n-step TD on the 19-state random walk, {runs} runs")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    plot.save(figure, picture)
    order = [best[n][0] for n in best]
    lowest = order.index(min(order))
    falls = all(a > b for a, b in itertools.pairwise(order[: lowest + 1]))
    u_shape = falls and all(a < b for a, b in itertools.pairwise(order[lowest:]))
    return {
        "what": "19-state random walk (S&B figure 7.2): n-step TD, RMS error over the first 10 episodes at the best α",
        "seeds": runs,
        "best_n": list(best)[lowest],
        "best_rms": order[lowest],
        "u_shape": u_shape,
        "best": {str(n): {"rms": rms, "alpha": alpha} for n, (rms, alpha) in best.items()},
        "alphas": alphas,
        "surface": {str(n): errors for n, errors in surface.items()},
        "published": {"1": 0.347, "2": 0.283, "4": 0.268, "8": 0.282, "16": 0.313},
        "target": "n = 4: 0.263 ± 0.015, and a U over n",
    }


def windy_grid_world(quick: bool, picture: Path) -> dict[str, Any]:
    """Example 6.5: Sarsa in the windy grid world, episodes over steps, also with king's moves."""
    runs, curves, lengths = (5 if quick else 100), {}, {}
    for name, options in (("four moves", {}), ("king's moves", {"king": True})):
        env = grid.make("WindyGridWorld", **options)
        fields = {"gamma": 1.0, "alpha": 0.5, "epsilon": 0.1, "episodes": 170, "steps": 10**9}
        found = np.array([learn("sarsa", env, "length", seed=i, **fields) for i in range(runs)])
        curves[name], lengths[name] = np.cumsum(found, 1), found
    figure, axes = plot._axes(picture)
    for name, steps in curves.items():
        axes.plot(steps.mean(0), np.arange(1, 171), label=f"Sarsa, {name}", linewidth=1.8)
    axes.set(xlabel="env steps", ylabel="episodes", title=f"Windy grid world, α = 0.5, ε = 0.1, {runs} runs")
    axes.legend(frameon=False)
    plot.save(figure, picture)
    four = curves["four moves"][:, -1]
    return {
        "what": "Windy grid world (S&B example 6.5): steps of Sarsa for 170 episodes",
        "seeds": runs,
        "steps_for_170_episodes": float(four.mean()),
        "steps_std": float(four.std()),
        "last_50_mean_length": float(lengths["four moves"][:, -50:].mean()),
        "kings_steps_for_170_episodes": float(curves["king's moves"][:, -1].mean()),
        "exact_shortest": -optimum("WindyGridWorld"),
        "kings_exact_shortest": -optimum("WindyGridWorld", king=True),
        "published": {"steps_for_170_episodes": 8240, "tolerance": 900, "shortest": 15},
    }


def cliff_walking(quick: bool, picture: Path) -> dict[str, Any]:
    """Example 6.6: the sum of rewards during episodes of Sarsa, Expected Sarsa and Q-learning at the cliff."""
    env, runs = grid.make("CliffWalking-v1"), 5 if quick else 100
    fields = {"gamma": 1.0, "alpha": 0.5, "epsilon": 0.1, "episodes": 500, "steps": 10**9}
    names = {"sarsa": "Sarsa", "expected_sarsa": "Expected Sarsa", "q_learning": "Q-learning"}
    returns = {n: np.array([learn(n, env, "return", seed=i, **fields) for i in range(runs)]) for n in names}
    figure, axes = plot._axes(picture)
    for name, title in names.items():
        smooth = np.convolve(returns[name].mean(0), np.ones(10) / 10, "valid")
        axes.plot(np.arange(10, 501), smooth, label=title, linewidth=1.5)
    axes.set(xlabel="episodes", ylabel="sum of rewards during episode", ylim=(-100, -10))
    axes.set_title(f"Cliff walking, α = 0.5, ε = 0.1, {runs} runs, means of 10 episodes")
    axes.legend(frameon=False)
    plot.save(figure, picture)
    last = {name: found[:, -100:].mean(1) for name, found in returns.items()}
    return {
        "what": "Cliff walking (S&B example 6.6): mean return of the last 100 of 500 episodes",
        "seeds": runs,
        **{name: float(found.mean()) for name, found in last.items()},
        **{f"{name}_std_of_runs": float(found.std()) for name, found in last.items()},
        **{f"{name}_first_100": float(found[:, :100].mean()) for name, found in returns.items()},
        "exact_optimum": optimum("CliffWalking-v1"),
        "target": {"sarsa": "-25 ± 3", "q_learning": "-51 ± 4", "expected_sarsa": "-21 ± 2"},
    }


def blackjack(quick: bool, picture: Path) -> dict[str, Any]:
    """Examples 5.1 and 5.3: the values of a policy that sticks on 20, and the optimal policy by exploring starts."""
    env = grid.make("Blackjack-v1")
    stick_on_20 = torch.zeros(env.states, 2, dtype=torch.float64)
    stick_on_20[:, sutton_barto.HIT] = 1.0
    for dealer in range(1, 11):
        finished = [sutton_barto.blackjack_state(total, dealer, ace) for total in (20, 21) for ace in (0, 1)]
        stick_on_20[[*finished, sutton_barto.blackjack_state(21, dealer, 1, True)]] = torch.tensor([1.0, 0.0]).double()
    stick_on_20[-1] = torch.tensor([1.0, 0.0]).double()
    exact = bellman.policy_value(env, stick_on_20, 1.0)
    shown = torch.tensor(
        [sutton_barto.blackjack_state(t, d, a) for a in (0, 1) for t in range(12, 22) for d in range(1, 11)]
    )
    prediction: Any = catalog.module("monte_carlo_prediction")  # its `train` also takes a policy
    control = catalog.module("mc_exploring_starts")
    steps, batch, seeds = (20_000, 1_000, 1) if quick else (5_000_000, 1_000, 3)
    best, optimal = best_actions(env, 1.0), optimum("Blackjack-v1")
    errors: dict[int, list[float]] = {episodes: [] for episodes in ((1_000, 10_000) if quick else (10_000, 500_000))}
    values, agreements, policies = [], [], {"exact": best.double().argmax(1)}
    for seed in range(seeds):
        for episodes, found in errors.items():
            config = prediction.Config(gamma=1.0, steps=episodes, yield_every=10_000, seed=seed)
            *_, (_, _, state) = prediction.train(config, env, policy=stick_on_20)
            found.append(float((state.v - exact)[shown].square().mean().sqrt()))
        config = control.Config(gamma=1.0, steps=steps, improve_every=batch, seed=seed)
        *_, (_, _, learned) = control.train(config, env)
        agreements.append(float(best[shown].gather(1, learned.policy[shown][:, None]).double().mean()))
        values.append(bellman.expected_return(env, learned.policy))
        policies.setdefault(f"{steps:,} episodes", learned.policy)
    _draw_blackjack(picture, policies)
    return {
        "what": "Blackjack (S&B examples 5.1, 5.3): Monte Carlo prediction and exploring starts vs. exact values",
        "seeds": seeds,
        "prediction_rms": {f"{episodes}": float(np.mean(found)) for episodes, found in errors.items()},
        "example_5_4_exact": float(exact[sutton_barto.blackjack_state(13, 2, 1)]),
        "episodes": steps,
        "exploring_starts_return": float(np.mean(values)),
        "exact_optimum": optimal,
        "worst_policy_agreement": min(agreements),
        "each": {
            "prediction_rms": {f"{episodes}": found for episodes, found in errors.items()},
            "exploring_starts_return": values,
            "policy_agreement": agreements,
        },
        "published": {"example_5_4": -0.27726, "optimum": -0.043113},
    }


def short_corridor(quick: bool, picture: Path) -> dict[str, Any]:
    """Example 13.1: the value of a policy that cannot distinguish three cells, by its probability of going right."""
    env = grid.make("ShortCorridor")

    def value(right: float) -> float:
        policy = torch.tensor([[1 - right, right]] * 4, dtype=torch.float64)
        return float(bellman.policy_value(env, policy, 1.0)[0])

    grid_of_p = np.linspace(0.02, 0.98, 25 if quick else 193)
    values = np.array([value(float(p)) for p in grid_of_p])
    best = golden_section(value, 0.3, 0.9)
    figure, axes = plot._axes(picture)
    axes.plot(grid_of_p, values, linewidth=1.8)
    marks = (("ε-greedy left", 0.05), ("ε-greedy right", 0.95), (f"best: {best:.4f}", best))
    for text, p in marks:
        axes.plot(p, value(p), "o", color="tab:red")
        axes.annotate(
            f"{text}\n{value(p):.2f}", (p, value(p)), (0, -24), textcoords="offset points", ha="center", fontsize=8
        )
    axes.set(xlabel="probability of right", ylabel="value of the start", ylim=(-100, 0), title="Short corridor, exact")
    plot.save(figure, picture)
    return {
        "what": "Short corridor (S&B example 13.1): exact optimal probability of going right and its value",
        "seeds": 0,
        "best_probability": best,
        "best_value": value(best),
        "epsilon_greedy_left": value(0.05),
        "epsilon_greedy_right": value(0.95),
        "table_optimum": optimum("ShortCorridor"),
        "published": {"best_probability": 2 - math.sqrt(2), "best_value": -11.6569, "left": -82, "right": -44},
    }


# Environment, options, gamma, horizon (None: infinite) -> the exact value of the optimal policy from the start.
EXACT: tuple[tuple[str, dict[str, Any], float, int | None, float], ...] = (
    ("FrozenLake-v1", {}, 1.0, None, 14 / 17),
    ("FrozenLake-v1", {}, 0.99, None, 0.542026),
    ("FrozenLake-v1", {}, 1.0, 100, 0.744190),
    ("FrozenLake-v1", {"is_slippery": False}, 0.99, None, 0.99**5),
    ("FrozenLake8x8-v1", {}, 1.0, None, 1.0),
    ("FrozenLake8x8-v1", {}, 0.99, None, 0.414640),
    ("FrozenLake8x8-v1", {}, 1.0, 200, 0.913220),
    ("CliffWalking-v1", {}, 1.0, None, -13.0),
    ("CliffWalking-v1", {}, 0.99, None, -12.247898),
    ("CliffWalkingSlippery-v1", {}, 1.0, None, -64.709176),
    ("CliffWalkingSlippery-v1", {}, 0.99, None, -46.352672),
    ("Taxi-v4", {}, 1.0, None, 7.93),
    ("Taxi-v4", {}, 0.99, None, 6.327464),
    ("Taxi-v4", {"is_rainy": True}, 1.0, None, 3.954575),
    ("Taxi-v4", {"is_rainy": True}, 0.99, None, 2.247629),
    ("Blackjack-v1", {}, 1.0, None, -0.043113),
    ("Blackjack-v1", {"sab": False}, 1.0, None, -0.046556),
)
PLANNERS: dict[str, dict[str, Any]] = {
    "value_iteration": {"tolerance": 1e-11, "yield_every": 10**9},
    "policy_iteration": {"yield_every": 10**9},
    "truncated_policy_iteration": {"tolerance": 1e-11, "yield_every": 10**9},
}


def exact_dynamic_programming(quick: bool, picture: Path) -> dict[str, Any]:
    """Toy text and blackjack by three kinds of dynamic programming, compared with values from other sources."""
    rows, worst = [], 0.0
    for name, options, gamma, horizon, known in EXACT[:: 4 if quick else 1]:
        env = grid.make(name, **options)
        found = {}
        if horizon is not None:
            found["backward_induction"] = bellman.optimal_return(env, gamma, horizon)
        else:
            for planner, fields in PLANNERS.items():
                module = catalog.module(planner)
                *_, (_, _, state) = module.train(module.Config(gamma=gamma, **fields), env)
                found[planner] = bellman.start_value(env, state.values)
        error = max(abs(value - known) for value in found.values())
        worst = max(worst, error)
        rows.append({"env": name, "options": options, "gamma": gamma, "horizon": horizon, "known": known, **found})
    return {
        "what": "Exact dynamic programming on toy text and blackjack: largest difference from known values",
        "seeds": 0,
        "largest_error": worst,
        "met": worst < 1e-6,
        "environments": len(rows),
        "target": "every value to 1e-6",
        "rows": rows,
    }


def mean(curves: Any) -> Array:
    """The mean over runs of equally long curves."""
    return np.asarray(np.mean(list(curves), axis=0))


def optimum(name: str, gamma: float = 1.0, **options: Any) -> float:
    """The exact value of the optimal policy from the start of an environment that always ends."""
    env = grid.make(name, **options)
    best = tabular.policy_table(env, "optimal", gamma)
    return bellman.expected_return(env, best.argmax(1), gamma)


def best_actions(env: MDP, gamma: float) -> Tensor:
    """`[S, A]` bool: every optimal action."""
    return tabular.policy_table(env, "optimal", gamma) > 0


def golden_section(function: Any, low: float, high: float) -> float:
    """The maximum of a unimodal function on [low, high], to 1e-9 of its argument or to rounding."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(60):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (a, high) if function(a) < function(b) else (low, b)
    return (low + high) / 2


def _draw_blackjack(picture: Path, policies: dict[str, Tensor]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(policies))
    for column, (title, policy) in enumerate(policies.items()):
        for row, ace in enumerate((1, 0)):
            axes = panels[row][column]
            states = [[sutton_barto.blackjack_state(t, d, ace) for d in range(1, 11)] for t in range(12, 22)]
            axes.imshow(policy.numpy()[np.array(states)], origin="lower", cmap="coolwarm", vmin=-0.4, vmax=1.4)
            axes.set_xticks(range(10), ["A", *map(str, range(2, 11))])
            axes.set_yticks(range(10), [str(t) for t in range(12, 22)])
            axes.set_title(f"{title}, {'usable' if ace else 'no usable'} ace", fontsize=9)
            axes.set(xlabel="dealer shows", ylabel="player's sum")
    figure.suptitle("Blackjack: stick (blue) and hit (red)", fontsize=11)
    plot.save(figure, picture)
