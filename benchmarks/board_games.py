"""Results of board game agents as JSON in results/: proofs, matches and mistakes. The same command resumes.

python benchmarks/board_games.py tic_tac_toe --seeds 0 1 2     # trains alphazero, then plays every possible opponent
python benchmarks/board_games.py tic_tac_toe muzero            # the same with a learned model; or gumbel_muzero
python benchmarks/board_games.py hex3 gumbel_muzero            # another game that is small enough
python benchmarks/board_games.py connect_four                  # trains alphazero; matches and mistakes by phase
python benchmarks/board_games.py connect_four RUN              # the same for a trained run
python benchmarks/board_games.py alphago hex5 --seeds 0 1 2    # trains alphago, then compares its parts
python benchmarks/board_games.py ladder go9 --seeds 0 1 2      # trains alphazero; its checkpoints play each other
python benchmarks/board_games.py bounds connect_four --steps 50000    # muzero's values by known bounds, by the tree's

`--minutes` ends training early. A measurement that exists is not repeated. Of proofs, AlphaGo's parts and
ladders, `--more` keeps the seeds that the result has, as `foresight reproduce --more` does.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "board_games"
LONG = 100  # simulations of a long search
OPENINGS = 2  # random moves before a game of Connect Four; otherwise minimax and the agent would repeat one game
LADDER_OPENINGS = 4  # of the games between checkpoints
PHASES = ((8, 15), (16, 23), (24, 31), (32, 41))  # moves of Connect Four before the mistake


def trained(
    name: str,
    preset: str,
    seed: int,
    minutes: float = math.inf,
    each: Callable[[int, float, Any], None] | None = None,
    label: str = "",
    **options: Any,
) -> Any:
    """The run of one seed, started, resumed or finished: trained to its end, or for `minutes` minutes.

    `each` is called repeatedly with the step, the seconds of training and the State.
    """
    from foresight.runtime import run

    out = RUNS / f"{name}-{label or preset}-{seed}"
    spent = seconds_of(run.Run(out)) if (out / "checkpoints").is_dir() else 0.0
    began, stopped = 0.0, False

    def watch(step: int, metrics: dict[str, Any], state: Any) -> None:
        nonlocal began, stopped
        began = began or time.monotonic()  # of training, without the evaluation before it
        seconds = spent + time.monotonic() - began
        if each is not None:
            each(step, seconds, state)
        if not stopped and seconds > 60 * minutes:
            stopped = True
            signal.raise_signal(signal.SIGINT)  # the run saves, and can be resumed

    try:
        if (out / "summary.json").is_file() or spent > 60 * minutes:
            return run.Run(out)
        if (out / "checkpoints").is_dir():
            return run.resume(out, show=False, callbacks=(watch,), **options)
        return run.train(name, preset=preset, seed=seed, out=out, show=False, callbacks=(watch,), **options)
    except KeyboardInterrupt:
        if not stopped:
            raise
        return run.Run(out)


def seconds_of(one: Any) -> float:
    """The training time of a run in seconds."""
    return max((row["seconds"] for row in one.metrics() if "seconds" in row), default=0.0)


def once(one: Any, step: int, what: str, measure: Callable[[], Any]) -> Any:
    """The result of `measure` at this step of a run. It is stored outside of the run and not measured again."""
    file = RUNS / "measured" / ("-".join(one.path.resolve().parts[1:]) + ".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    manifests = b"".join(path.read_bytes() for path in sorted(one.path.glob("checkpoints/step-*/manifest.json")))
    weights = hashlib.sha256(manifests).hexdigest()
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if known.get("weights") != weights:  # no file yet, or of another run in the same directory
        known = {"weights": weights}
    key = f"{step}: {what}"
    if key not in known:
        known[key] = measure()
        file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        print(key, json.dumps(known[key]), flush=True)
    return known[key]


def write(label: str, what: str, document: dict[str, Any], seconds: float) -> None:
    """`results/LABEL.json`."""
    from foresight.runtime import bench

    result = {
        "what": what,
        "command": command(sys.argv[1:], document["seeds"]),
        **document,
        "seconds": round(seconds, 1),
        "versions": bench.versions(),
        "machine": bench.machine(),
    }
    (ROOT / "results" / f"{label}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document), flush=True)


def command(arguments: list[str], seeds: list[int]) -> str:
    """What makes the whole file, which holds these `seeds`, without a file to begin with."""
    first = arguments.index("--seeds") if "--seeds" in arguments else len(arguments)
    last = first + 1
    while last < len(arguments) and not arguments[last].startswith("--"):
        last += 1
    named = ["--seeds", *map(str, seeds)] if first < len(arguments) else []
    kept = [part for part in arguments[:first] + named + arguments[last:] if part != "--more"]
    return shlex.join(["python", "benchmarks/board_games.py", *kept])


def ship(path: str, name: str) -> None:
    """Bundle a trained agent with the package: its weights, without replay and optimizer state."""
    import foresight
    from foresight.runtime import run

    folder = Path(foresight.__file__).parent / "trained" / name
    network_only(run.find(path), folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{size / 1e6:.2f} MB in {folder}")


def network_only(path: Path, folder: Path) -> None:
    """The run at `path` as a run directory with the network only."""
    import shutil

    from foresight.runtime import run

    shutil.rmtree(folder, ignore_errors=True)
    add_network(path, run.load(path).state, folder)


def add_network(path: Path, state: Any, folder: Path) -> None:
    """One more checkpoint for the run directory `folder`: the network of `state`, a State of the run at `path`."""
    import shutil

    from foresight.algorithms.search import alphazero
    from foresight.runtime.checkpoints import checkpoint

    small = alphazero.build(state.config, state.game)
    small.network.load_state_dict(state.network.state_dict())
    small.step = state.step
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(path / "config.yaml", folder / "config.yaml")
    extra = {"seconds": 0.0, "evaluation_seconds": 0.0, "baseline": {"metric": "", "mean": 0.0, "std": 0.0, "n": 0}}
    checkpoint.save(folder / "checkpoints", small, state.step, keep=1000, extra=extra)


def kept(label: str, more: bool) -> dict[int, dict[str, Any]]:
    """What `results/LABEL.json` says of each seed, with `more`."""
    file = ROOT / "results" / f"{label}.json"
    if not more or not file.is_file():
        return {}
    return {found["seed"]: found for found in json.loads(file.read_text(encoding="utf-8")).get("runs", [])}


def exhausted(name: str, preset: str, seeds: list[int], minutes: float, more: bool) -> None:
    """The agent of each seed against every possible opponent: with a long search, the search of training, and none.

    At Hex the first player wins with perfect play, so only games in which the agent moves first are counted.
    """
    runs: list[dict[str, Any]] = []
    known = kept(f"{name}-{preset}", more)
    sides = ("first",) if preset == "hex3" else ("first", "second")
    for seed in seeds:
        runs.append(known[seed] if seed in known else proven(name, preset, seed, minutes))
        lost = {
            label: sum(run[label][side]["lost"] for run in runs for side in sides)
            for label in ("search", "as_trained", "policy_alone")
        }
        document = {
            "seeds": seeds[: len(runs)],
            "simulations": runs[0]["search"]["simulations"],  # of `lost`
            "lost": lost["search"],
            "lost_as_trained": lost["as_trained"],
            "lost_without_search": lost["policy_alone"],
            "runs": runs,
        }
        seconds = sum(run["training_seconds"] for run in runs)
        title = {"alphazero": "AlphaZero", "muzero": "MuZero", "gumbel_muzero": "Gumbel MuZero"}[name]
        where = "Hex 3x3, moving first," if preset == "hex3" else "tic-tac-toe"
        write(f"{name}-{preset}", f"{title} at {where} against every possible opponent", document, seconds)


def proven(name: str, preset: str, seed: int, minutes: float) -> dict[str, Any]:
    """Training of one seed, and every possible game of its agent."""
    from foresight.planning.games import exhaustive, opponents
    from foresight.runtime.evaluation import match

    run = trained(name, preset, seed, minutes)
    agent = run.load()
    game, sides = agent.env, {"first": True, **({} if preset == "hex3" else {"second": False})}
    found: dict[str, Any] = {"seed": seed, "training_seconds": seconds_of(run), "steps": agent.step}
    counts = {"search": LONG, "as_trained": agent.config.simulations, "policy_alone": 0}
    for label, simulations in counts.items():
        player = match.chooser(agent.module, agent.state, simulations=simulations)
        proofs = {side: exhaustive.play_all_replies(game, player, first)._asdict() for side, first in sides.items()}
        found[label] = {"simulations": simulations, **proofs}
    for opponent in ("random", "minimax:9"):
        player = match.chooser(agent.module, agent.state, simulations=agent.config.simulations)
        other = opponents.make(opponent, game, seed)
        played = match.play(game, player, other, 200, seed=seed).document()
        found[f"as_trained_against_{opponent.replace(':', '_')}"] = played
    return found


def connect_four(path: str, games: int, matches_only: bool, seed: int, minutes: float, simulations: int | None) -> None:
    """Matches against random play, minimax 5 and 1,000 playouts; mistakes by phase, of the search and of the policy.

    A bundled agent has no log: its training time is read from its result.
    """
    from foresight.planning.games import opponents
    from foresight.runtime import run
    from foresight.runtime.evaluation import match

    one = run.Run(run.find(path)) if path else trained("alphazero", "connect_four", seed, minutes)
    agent = one.load()
    game = agent.env
    simulations = agent.config.play_simulations if simulations is None else simulations
    player = match.chooser(agent.module, agent.state, simulations=simulations)

    def meet(name: str) -> dict[str, Any]:
        return match.play(game, player, opponents.make(name, game, 7), games, OPENINGS, seed=7).document()

    what = f"{games} games of {simulations} simulations after {OPENINGS} random moves against"
    names = ("random", "minimax:5", "mcts:1000")
    matches = {name: once(one, agent.step, f"{what} {name}", functools.partial(meet, name)) for name in names}
    document = {
        "seeds": [agent.settings.seed], "steps": agent.step, "play_simulations": simulations,
        "openings": OPENINGS,
        "parameters": sum(p.numel() for p in agent.state.network.parameters()),
        **{f"score_against_{name.replace(':', '_')}": result["score"] for name, result in matches.items()},
        "matches": matches,
        **({} if matches_only else {"mistakes": mistakes(one, agent, simulations)}),
    }  # fmt: skip
    label, seconds = "alphazero-connect_four", seconds_of(one)
    if not seconds:
        before = json.loads((ROOT / "results" / f"{label}.json").read_text(encoding="utf-8"))
        if before["steps"] != agent.step:
            raise SystemExit(f"{path} has no log of its training, and results/{label}.json is about another agent.")
        seconds = before["seconds"]
    write(label, "AlphaZero at Connect Four", document, seconds)


def ladder(
    preset: str,
    seeds: list[int],
    steps: int | None,
    minutes: float,
    checkpoints: int,
    games: int,
    simulations: int,
    more: bool,
) -> None:
    """A round robin of each seed's checkpoints after equal parts of the training: does the Elo rise in each?"""
    label, runs = f"alphazero-{preset}-ladder", []
    known = kept(label, more)
    for seed in seeds:
        runs.append(
            known[seed] if seed in known else climbed(preset, seed, steps, minutes, checkpoints, games, simulations)
        )
        document = {
            "seeds": seeds[: len(runs)],
            "rises": all(run["rises"] for run in runs),
            "openings": LADDER_OPENINGS, "simulations": simulations, "games_per_pair": games,
            "runs": runs,
        }  # fmt: skip
        title = f"AlphaZero at {runs[0]['game']}: Elo of its checkpoints relative to the first"
        write(label, title, document, sum(run["training_seconds"] for run in runs))


def climbed(
    preset: str, seed: int, steps: int | None, minutes: float, checkpoints: int, games: int, simulations: int
) -> dict[str, Any]:
    """The training of one seed, and the games between its checkpoints."""
    from foresight.runtime import run
    from foresight.runtime.checkpoints import checkpoint
    from foresight.runtime.evaluation import match, players

    path, folder = RUNS / f"alphazero-{preset}-{seed}", RUNS / f"ladder-{preset}-{seed}"

    def keep(step: int, seconds: float, state: Any) -> None:
        done = max(step / state.config.steps, seconds / (60 * minutes))
        if done * checkpoints >= len(checkpoint.all_steps(folder / "checkpoints")) + 1:
            add_network(path, state, folder)

    options: dict[str, Any] = {} if steps is None else {"steps": steps}
    one = trained("alphazero", preset, seed, minutes, keep, **options)
    found, game = players.checkpoints(str(folder), checkpoints, simulations)
    reached, choosers = list(found), list(found.values())
    what = f"{games} games a pair between {reached}, {simulations} simulations"
    play = lambda: match.ladder(game, choosers, games, LADDER_OPENINGS, seed)  # noqa: E731
    measured = once(run.Run(folder), reached[-1], what, play)
    return {
        "seed": seed, "game": game.title, "training_seconds": seconds_of(one), "steps": reached,
        "rises": rises(measured["elo"]), **measured,
    }  # fmt: skip


def rises(elo: list[dict[str, float]]) -> bool:
    """Whether each checkpoint has a higher Elo than the one before, and the last is above the first by its interval."""
    points = [row["elo"] for row in elo]
    return all(after > before for before, after in itertools.pairwise(points)) and elo[-1]["elo_low"] > 0


def mistakes(one: Any, agent: Any, simulations: int, positions: int = 60) -> dict[str, Any]:
    """The share of moves that give away a win or a draw, in positions where that is possible, by phase."""
    import torch

    from foresight.planning.games import connect_four as solver
    from foresight.planning.games import opponents
    from foresight.runtime.evaluation import match

    game = agent.env
    opponent = opponents.make("mcts:100", game, 3)

    def phase(low: int, high: int) -> dict[str, Any]:
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
        for label, count in (("search", simulations), ("policy_alone", 0)):
            action = match.chooser(agent.module, agent.state, simulations=count)(chosen)
            share[label] = float(solver.mistakes(chosen, action)[0].float().mean())
        share["random"] = float(solver.mistakes(chosen, opponents.make("random", game, 5)(chosen))[0].float().mean())
        return {"positions": positions, **share}

    names = {f"moves {low} to {high}": (low, high) for low, high in PHASES}
    return {
        name: once(one, agent.step, f"mistakes of {simulations} simulations at {name}", functools.partial(phase, *ends))
        for name, ends in names.items()
    }


def bounds(preset: str, seeds: list[int], steps: int, games: int) -> None:
    """MuZero with values normalized by the game's bounds, and by those of the tree: games that each loses."""
    from foresight.algorithms.search import muzero
    from foresight.planning.games import exhaustive, opponents
    from foresight.runtime.evaluation import match

    rules, runs = {"known": muzero.BOARD, "tree": muzero.RULE}, []
    for seed in seeds:
        found: dict[str, Any] = {"seed": seed}
        players, seconds = {}, 0.0
        for label, rule in rules.items():
            muzero.BOARD = rule
            one = trained("muzero", "tic_tac_toe", seed, label=f"{preset}-{label}-{steps}", env=preset, steps=steps)
            agent = one.load()
            game = agent.env
            seconds += seconds_of(one)
            chooser = match.chooser(agent.module, agent.state, simulations=agent.config.simulations)
            players[label] = functools.partial(_by, muzero, rule, chooser)
            if preset == "tic_tac_toe":
                lost = [exhaustive.play_all_replies(game, players[label], first).lost for first in (True, False)]
                found[f"{label}_lost"] = lost
            else:
                other = opponents.make("minimax:3", game, seed)
                score = match.play(game, players[label], other, games, OPENINGS, seed).score
                found[f"{label}_score_against_minimax_3"] = score
        if preset != "tic_tac_toe":
            found["known_score_against_tree"] = match.play(game, *players.values(), games, OPENINGS, seed).score
        muzero.BOARD = rules["known"]
        runs.append({**found, "training_seconds": round(seconds, 1)})
        document = {"seeds": seeds[: len(runs)], "steps": steps, "games": games, "openings": OPENINGS, "runs": runs}
        title = f"MuZero at {game.title}: values normalized by known bounds and by the bounds of the tree"
        write(f"muzero-bounds-{preset}", title, document, sum(run["training_seconds"] for run in runs))


def _by(muzero: Any, rule: Any, chooser: Callable[[Any], Any], position: Any) -> Any:
    """The move of `chooser`, which searches games by `rule`."""
    muzero.BOARD = rule
    return chooser(position)


def alphago(preset: str, seeds: list[int], games: int, minutes: float, more: bool) -> None:
    """The parts of each seed's pipeline; matches are pooled, errors and accuracies are means over the seeds."""
    label, runs = f"alphago-{preset}-parts", []
    known = kept(label, more)
    for seed in seeds:
        runs.append(known[seed] if seed in known else parts(preset, seed, games, minutes))
        found = {
            "steps": runs[0]["steps"],
            "steps_of_all_stages": runs[0]["steps_of_all_stages"],
            **{key: pooled([run[key] for run in runs]) for key in runs[0] if key.endswith("_sl")},
            "accuracy": statistics.fmean(run["accuracy"] for run in runs),
            "value_error": {
                per: {which: statistics.fmean(run["value_error"][per][which] for run in runs) for which in errors}
                for per, errors in runs[0]["value_error"].items()
            },
        }
        seconds = sum(run["training_seconds"] for run in runs)
        document = {"seeds": seeds[: len(runs)], **found, "runs": runs}
        write(label, f"The stages of AlphaGo's pipeline, {preset}", document, seconds)


def pooled(matches: list[dict[str, Any]]) -> dict[str, Any]:
    """The games of several matches as one, with the score of each."""
    from foresight.runtime.evaluation import match

    won, drawn, lost = (sum(one[key] for one in matches) for key in ("won", "drawn", "lost"))
    together = match.Result((1.0,) * won + (0.5,) * drawn + (0.0,) * lost, ()).document()
    sides = {key: statistics.fmean(one[key] for one in matches) for key in ("score_first", "score_second")}
    return {**together, **sides, "scores": [one["score"] for one in matches]}


def parts(preset: str, seed: int, games: int, minutes: float) -> dict[str, Any]:
    """ρ vs. σ, the whole search vs. σ, and the value error after training on one or on all positions of a game."""
    import torch

    from foresight.runtime.evaluation import match

    run = trained("alphago", preset, seed, minutes)
    agent = run.load()
    module, state, game = agent.module, agent.state, agent.env

    def policy(network: Any) -> Any:
        return lambda position: module.sampled(state, network, position)

    def meet(what: str, one: Any, other: Any, openings: int = 0) -> dict[str, Any]:
        play = lambda: match.play(game, one, other, games, openings).document()  # noqa: E731
        return once(run, agent.step, f"{games} games, {what}", play)

    whole, greedy, sl = match.chooser(module, state), match.chooser(module, state, simulations=0), policy(state.sl)
    found = {
        "rl_against_sl": meet("rl_against_sl", policy(state.rl), sl),
        "search_against_sl": meet("search_against_sl", whole, sl),
        "search_against_greedy_sl": meet("search_against_greedy_sl", whole, greedy, openings=2),
        "accuracy": [None, *(row["accuracy"] for row in run.metrics() if "accuracy" in row)][-1],
    }
    for label, mix in (("value_alone", 0.0), ("rollouts_alone", 1.0)):
        state.config = dataclasses.replace(agent.config, mix=mix)
        found[f"{label}_against_sl"] = meet(f"{label}_against_sl", whole, sl)
    state.config = agent.config
    found["value_error"] = once(run, agent.step, "value_error", lambda: value_errors(module, state, torch))
    stages = {"steps": agent.step, "steps_of_all_stages": agent.config.steps}
    return {"seed": seed, "training_seconds": seconds_of(run), **stages, **found}


def value_errors(module: Any, state: Any, torch: Any, steps: int = 600, rows: int = 2000) -> dict[str, Any]:
    """Squared error on the same held-out games after training on equally many positions: of many games or of few."""
    from foresight.nets.models.alphazero import ValueNet

    config, game = state.config, state.game
    test = module.value_positions(state, rows, 1)
    errors = {}
    for label, per_game in (("one position of a game", 1), ("all positions of a game", 0)):
        planes, outcomes, owners = module.value_positions(state, rows, per_game)
        planes, outcomes = planes[:rows], outcomes[:rows]
        if per_game == 0:  # whole games with the same number of positions
            planes, outcomes, owners = module.value_positions(state, rows // 4, 0)
            order = owners.argsort(stable=True)[:rows]
            planes, outcomes = planes[order], outcomes[order]
        torch.manual_seed(0)
        network = ValueNet(game.shape, config.channels, config.blocks)
        optimizer = torch.optim.AdamW(network.parameters(), config.learning_rate, weight_decay=config.weight_decay)
        for _ in range(steps):
            batch = torch.randint(len(planes), (config.batch_size,), generator=state.generator)
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
    parser.add_argument("what", choices=("tic_tac_toe", "hex3", "connect_four", "alphago", "ladder", "bounds", "ship"))
    parser.add_argument("name", nargs="?", default="", help="an algorithm, a run or a preset, see above")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--games", type=int, default=100)
    parser.add_argument("--steps", type=int, help="training steps of a ladder or of bounds")
    parser.add_argument("--minutes", type=float, default=math.inf, help="maximum minutes of training")
    parser.add_argument("--checkpoints", type=int, default=4, help="number of checkpoints in a ladder")
    parser.add_argument("--simulations", type=int, help="per move (default: 16 in a ladder, else the preset's)")
    parser.add_argument("--more", action="store_true", help="keep the seeds that the result has")
    parser.add_argument("--matches-only", action="store_true", help="without the mistakes of connect_four")
    arguments = parser.parse_args()
    began = time.perf_counter()
    seed, games, minutes = arguments.seeds[0], arguments.games, arguments.minutes
    if arguments.what in ("tic_tac_toe", "hex3"):
        exhausted(arguments.name or "alphazero", arguments.what, arguments.seeds, minutes, arguments.more)
    elif arguments.what == "connect_four":
        connect_four(arguments.name, games, arguments.matches_only, seed, minutes, arguments.simulations)
    elif arguments.what == "ladder":
        count, simulations = arguments.checkpoints, arguments.simulations or 16
        ladder(
            arguments.name, arguments.seeds, arguments.steps, minutes, count, games, simulations, arguments.more
        )  # fmt: skip
    elif arguments.what == "bounds":
        bounds(arguments.name, arguments.seeds, arguments.steps or 100_000, games)
    elif arguments.what == "ship":
        ship(arguments.name, "connect_four")
    else:
        alphago(arguments.name, arguments.seeds, games, minutes, arguments.more)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
