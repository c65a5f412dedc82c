"""What agents of board games reached, as JSON in results/: proofs, matches, mistakes. Stopped, it goes on.

python benchmarks/board_games.py tic_tac_toe --seeds 0 1 2     # trains alphazero, then tries every opponent
python benchmarks/board_games.py connect_four RUN              # matches and mistakes of a trained run
python benchmarks/board_games.py alphago hex5                  # trains alphago, then compares its parts
python benchmarks/board_games.py ladder go9 --steps 60000      # trains alphazero; each third against the one before
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "board_games"
PHASES = ((8, 15), (16, 23), (24, 31), (32, 41))  # moves of Connect Four before the mistake


def trained(name: str, preset: str, seed: int) -> Any:
    """The run of one seed, begun, continued or as it is."""
    from foresight.runtime import run

    out = RUNS / f"{name}-{preset}-{seed}"
    if (out / "summary.json").is_file():
        return run.Run(out)
    if (out / "checkpoints").is_dir():
        return run.resume(out, show=False)
    return run.train(name, preset=preset, seed=seed, out=out, show=False)


def write(label: str, what: str, document: dict[str, Any], seconds: float) -> None:
    """`results/LABEL.json`."""
    from foresight.runtime import bench

    result = {
        "what": what,
        "command": "python benchmarks/board_games.py " + shlex.join(sys.argv[1:]),
        **document,
        "seconds": round(seconds, 1),
        "versions": bench.versions(),
        "machine": bench.machine(),
    }
    (ROOT / "results" / f"{label}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document), flush=True)


def ship(path: str, name: str) -> None:
    """Put a trained agent beside the package's code: its weights, without the replay and the optimiser's memory."""
    import foresight
    from foresight.runtime import run

    folder = Path(foresight.__file__).parent / "trained" / name
    lean(run.find(path), folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{size / 1e6:.2f} MB in {folder}")


def lean(path: Path, folder: Path) -> None:
    """The run at `path` as a run directory that holds its network and no more."""
    import shutil

    from foresight.runtime import checkpoint, run

    agent = run.load(path)
    small = agent.module.build(agent.config, agent.world)
    small.network.load_state_dict(agent.state.network.state_dict())
    small.step = agent.step
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(path / "config.yaml", folder / "config.yaml")
    extra = {"seconds": 0.0, "evaluation_seconds": 0.0, "baseline": {"metric": "", "mean": 0.0, "std": 0.0, "n": 0}}
    checkpoint.save(folder / "checkpoints", small, agent.step, extra=extra)


def tic_tac_toe(seeds: list[int]) -> None:
    """The agent of each seed, with its search and without, against every opponent there could be."""
    from foresight.planning import proof
    from foresight.runtime import match

    runs: list[dict[str, Any]] = []
    for seed in seeds:
        run = trained("alphazero", "tic_tac_toe", seed)
        agent = run.load()
        found: dict[str, Any] = {"seed": seed, "training_seconds": run.summary["seconds"], "steps": agent.step}
        for label, simulations in (("search", agent.config.play_simulations), ("policy_alone", 0)):
            player = match.chooser(agent.module, agent.state, simulations=simulations)
            sides = {"first": True, "second": False}
            proofs = {side: proof.exhaust(agent.world, player, first)._asdict() for side, first in sides.items()}
            found[label] = {"simulations": simulations, **proofs}
        runs.append(found)
        lost = sum(run["search"][side]["lost"] for run in runs for side in ("first", "second"))
        bare = sum(run["policy_alone"][side]["lost"] for run in runs for side in ("first", "second"))
        document = {"seeds": seeds[: len(runs)], "lost": lost, "lost_without_search": bare, "runs": runs}
        spent = sum(run["training_seconds"] for run in runs)
        write("alphazero-tic_tac_toe", "AlphaZero at tic-tac-toe against every possible opponent", document, spent)


def connect_four(path: str, games: int, matches_only: bool) -> None:
    """Matches against random play, minimax 5 and 1,000 playouts; mistakes by phase, searched and of the policy."""
    from foresight.envs import games as rules
    from foresight.planning import opponents
    from foresight.runtime import match, run

    agent = run.load(path)
    game = agent.world
    player = match.chooser(agent.module, agent.state)
    matches = {}
    for name in ("random", "minimax:5", "mcts:1000"):
        result = match.play(game, player, opponents.make(name, game, 7), games, seed=7)
        matches[name] = result.document()
        print(name, json.dumps(matches[name]), flush=True)
    document = {
        "seeds": [agent.settings.seed], "steps": agent.step, "play_simulations": agent.config.play_simulations,
        "parameters": sum(p.numel() for p in agent.state.network.parameters()), "matches": matches,
        **({} if matches_only else {"mistakes": mistakes(agent, game, rules)}),
    }  # fmt: skip
    seconds = [row["seconds"] for row in run.Run(run.find(path)).metrics() if "seconds" in row]
    write("alphazero-connect_four", "AlphaZero at Connect Four", document, max(seconds, default=0.0))


def mistakes(agent: Any, game: Any, rules: Any, positions: int = 60) -> dict[str, Any]:
    """The share of moves that give away a win or a draw, in positions where that can be done, by phase."""
    import torch

    from foresight.planning import connect_four as solver
    from foresight.planning import opponents
    from foresight.runtime import match

    opponent = opponents.make("mcts:100", game, 3)
    found: dict[str, Any] = {}
    for low, high in PHASES:
        kept: list[Any] = []
        while len(kept) < positions:
            position = game.start(64)
            for t in range(low + len(kept) % (high - low + 1)):
                move = (
                    opponents.make("random", game, 1000 * low + len(kept) + t)(position)
                    if t < 4
                    else opponent(position)
                )
                position = game.step(position, move).position
                position = torch.where(game.over(position)[:, None], game.start(64), position)
            position = position[game.moves(position) >= low]
            values = solver.solver().moves(position)
            can = (values.amax(-1) > values.masked_fill(values == -2, 2).amin(-1)).nonzero().flatten().tolist()
            kept += [position[i] for i in can[: max(4, positions // 8)]]
        chosen = torch.stack(kept[:positions])
        share = {}
        for label, simulations in (("search", agent.config.play_simulations), ("policy_alone", 0)):
            action = match.chooser(agent.module, agent.state, simulations=simulations)(chosen)
            share[label] = float(solver.mistakes(chosen, action)[0].float().mean())
        share["random"] = float(solver.mistakes(chosen, opponents.make("random", game, 5)(chosen))[0].float().mean())
        found[f"moves {low} to {high}"] = {"positions": positions, **share}
        print(low, json.dumps(share), flush=True)
    return found


def alphago(preset: str, seed: int, games: int) -> None:
    """ρ against σ, the whole search against σ, and the value's error with one and with all positions of a game."""
    import torch

    from foresight.runtime import match

    run = trained("alphago", preset, seed)
    agent = run.load()
    module, state, game = agent.module, agent.state, agent.world

    def policy(network: Any) -> Any:
        return lambda position: module.drawn(state, network, position)

    greedy = match.chooser(module, state, simulations=0)
    found = {
        "rl_against_sl": match.play(game, policy(state.rl), policy(state.sl), games).document(),
        "search_against_sl": match.play(game, match.chooser(module, state), policy(state.sl), games).document(),
        "search_against_greedy_sl": match.play(
            game, match.chooser(module, state), greedy, games, openings=2
        ).document(),
        "accuracy": [row["accuracy"] for row in run.metrics() if "accuracy" in row][-1],
    }
    for label, mix in (("value_alone", 0.0), ("rollouts_alone", 1.0)):
        state.config = dataclasses.replace(agent.config, mix=mix)
        found[f"{label}_against_sl"] = match.play(
            game, match.chooser(module, state), policy(state.sl), games
        ).document()
    state.config = agent.config
    found["value_error"] = value_errors(module, state, torch)
    document = {"seeds": [seed], "training_seconds": run.summary["seconds"], **found}
    write(f"alphago-{preset}-parts", f"The parts of the AlphaGo pipeline, {preset}", document, run.summary["seconds"])


def ladder(preset: str, seed: int, steps: int, games: int, rungs: int = 3) -> None:
    """AlphaZero after a third, two thirds and all of `steps`, each against the one before: does its Elo rise?"""
    from foresight.runtime import match, run

    path = RUNS / f"ladder-{preset}-{seed}"
    folders = [path / str(steps * rung // rungs) for rung in range(1, rungs + 1)]
    began = time.perf_counter()
    for folder in folders:
        if (folder / "config.yaml").is_file():
            continue
        if (path / "run" / "config.yaml").is_file():
            run.resume(path / "run", steps=int(folder.name), show=False)
        else:
            run.train("alphazero", preset=preset, seed=seed, out=path / "run", steps=int(folder.name), show=False)
        lean(path / "run", folder)
    training = time.perf_counter() - began
    agents = [run.load(folder) for folder in folders]
    players = [match.chooser(agent.module, agent.state) for agent in agents]
    found = {
        f"{after.step} against {before.step}": match.play(after.world, new, old, games, openings=2).document()
        for before, after, old, new in zip(agents, agents[1:], players, players[1:], strict=True)
    }
    rises = all(one["score"] > 0.5 for one in found.values())
    document = {"seeds": [seed], "steps": steps, "rises": rises, "matches": found}
    write(f"alphazero-{preset}-ladder", f"AlphaZero at {preset}, against earlier checkpoints", document, training)


def value_errors(module: Any, state: Any, torch: Any, steps: int = 600, rows: int = 2000) -> dict[str, Any]:
    """Squared error on the same held-out games after training on as many positions: of one game each, or of few."""
    from foresight.nets.board import ValueNet

    config, game = state.config, state.game
    test = module.value_positions(state, rows, 1)
    errors = {}
    for label, per_game in (("one position of a game", 1), ("all positions of a game", 0)):
        planes, outcomes, owners = module.value_positions(state, rows, per_game)
        planes, outcomes = planes[:rows], outcomes[:rows]
        if per_game == 0:  # whole games, as many as give the same number of positions
            planes, outcomes, owners = module.value_positions(state, rows // 4, 0)
            order = owners.argsort(stable=True)[:rows]
            planes, outcomes = planes[order], outcomes[order]
        torch.manual_seed(0)
        network = ValueNet(game.shape, config.channels, config.blocks)
        optimizer = torch.optim.AdamW(network.parameters(), config.learning_rate, weight_decay=config.weight_decay)
        for _ in range(steps):
            batch = torch.randint(len(planes), (config.batch,), generator=state.generator)
            loss = (network(planes[batch]) - outcomes[batch]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.inference_mode():
            errors[label] = {
                "positions": len(planes),
                "train": float((network(planes) - outcomes).square().mean()),
                "test": float((network(test[0]) - test[1]).square().mean()),
            }
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("tic_tac_toe", "connect_four", "alphago", "ladder", "ship"))
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--games", type=int, default=100)
    parser.add_argument("--steps", type=int, default=60_000, help="positions of self-play that a ladder is trained on")
    parser.add_argument("--matches-only", action="store_true", help="leave the mistakes of connect_four out")
    arguments = parser.parse_args()
    began = time.perf_counter()
    if arguments.what == "tic_tac_toe":
        tic_tac_toe(arguments.seeds)
    elif arguments.what == "connect_four":
        connect_four(arguments.name, arguments.games, arguments.matches_only)
    elif arguments.what == "ladder":
        ladder(arguments.name, arguments.seeds[0], arguments.steps, arguments.games)
    elif arguments.what == "ship":
        ship(arguments.name, "connect_four")
    else:
        alphago(arguments.name, arguments.seeds[0], arguments.games)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
