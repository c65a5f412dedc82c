"""`foresight live`: a server of a language model that is trained on what follows its turns."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
import threading
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from foresight.cli import screen
from foresight.errors import UserError

HERE = ("127.0.0.1", "localhost", "::1")


def live(
    model: Annotated[str, tyro.conf.Positional],
    *,
    out: str = "runs/live",
    score: str = "",
    mode: Literal["both", "evaluative", "directive"] | None = None,
    batch: int | None = None,
    staleness: int | None = None,
    learning_rate: float | None = None,
    lora: int | None = None,
    hint_top_k: int | None = None,
    hint_guidance: float | None = None,
    kl_coef: float | None = None,
    kl_bound: float | None = None,
    rehearsal: float | None = None,
    temperature: float | None = None,
    check: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "auto",
    ray: str = "",
    rollback: int | None = None,
    unpause: bool = False,
    status: bool = False,
    json: bool = False,
) -> int:
    """Serve a language model and train it on what follows its turns, until Ctrl-C. A live run as MODEL continues it.

    Args:
        model: "smollm2", a run with an export, a Hugging Face folder, a hub id, or the folder of a live run, whose own
            settings then hold, but for host, port, device and ray; give a --score whose URL has a password again.
        out: the folder of the run.
        score: what scores a turn from the next message: file.py:name, the URL of an OpenAI-compatible server, or the
            folder of a reward model. Without one, turns are kept and not trained on.
        mode: train on scores (evaluative), on hints (directive), or both (default).
        batch: turns per update; default: 8.
        staleness: updates that may lie between the weights that wrote a turn and those that are trained; default: 4.
        learning_rate: of AdamW; default: 1e-4.
        lora: rank of the adapters; 0 trains all weights; default: 16.
        hint_top_k: next tokens over which a hint's divergence is taken, such as 50; default: 0, the sampled ones alone.
        hint_guidance: with --hint-top-k, above 1 exaggerates what a hint changes; default: 1.
        kl_coef: penalty on the KL to the first version; default: 0.02.
        kl_bound: KL per token to the first version, in nats, beyond which an update is undone; default: 1.
        rehearsal: penalty on the KL from the first version on its own answers to training questions of --check;
            default: 0.
        temperature: of requests that name none; default: 1.
        check: a text task, such as addition: where its held-out accuracy falls by 0.1, training stops and rolls back.
        host: the address to listen on. Anything but this machine needs the token that is printed.
        port: the port.
        device: auto, cpu, cuda, cuda:1 or mps.
        ray: address of a Ray cluster that this machine is part of, whose machines score and train (HOST:6379, or auto).
        rollback: serve and train from this version of a live run, and exit. A server that runs changes to it.
        unpause: let a paused live run train again, and exit.
        status: print the turns and versions of a live run, and exit.
        json: with --status, print JSON.
    """
    import dataclasses

    from foresight.agents.live import settings as live_settings
    from foresight.agents.live.store import Store
    from foresight.training.options import Tuning

    known = (Path(model) / live_settings.SETTINGS).is_file()
    given: dict[str, Any] = dict(
        mode=mode, batch=batch, staleness=staleness, learning_rate=learning_rate, lora=lora, hint_top_k=hint_top_k,
        hint_guidance=hint_guidance, kl_coef=kl_coef, kl_bound=kl_bound, rehearsal=rehearsal, temperature=temperature,
        check=check,
    )  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    if rollback is not None or unpause or status:
        live_settings.read(Path(model))  # raises: it is no live run
        store = Store(model)
        if rollback is not None:
            store.activate(rollback)
        if unpause:
            store.set("paused", False)
        if status:
            _status(store, json)
        return 0
    if not 0 < port < 65_536:
        raise UserError(f"--port must be between 1 and 65535, not {port}.")
    _free(host, port)
    import uvicorn  # noqa: F401  # raises before anything is started: it is in an extra, as FastAPI is

    from foresight.agents.live import loops, serve, train  # noqa: F401
    from foresight.nets.language import pretrained
    from foresight.planning.generation.server import without_user
    from foresight.runtime import lock, machine
    from foresight.runtime.distributed import ray_cluster
    from foresight.runtime.reasoning.think import exported

    place = _absolute(score)
    where = str(machine.pick_device(device))
    folder = Path(model if known else out)
    if known:
        settings, config = live_settings.read(folder)
        if place:
            _require_same(folder, "score", without_user(place), settings.score)
        fields = {**dataclasses.asdict(config), "lora": config.tuning.lora}
        fields |= {"temperature": settings.temperature, "check": settings.check}
        for name, value in given.items():
            _require_same(folder, name, value, fields[name])
        settings = dataclasses.replace(settings, host=host, port=port, device=where, ray=ray)
    else:
        if (folder / live_settings.SETTINGS).is_file():
            command = f"foresight live {shlex.quote(str(folder))}"
            raise UserError(f"{folder} is a live run: give another --out, or continue it with: {command}")
        if rehearsal and not check:
            raise UserError(
                "--rehearsal is given without --check: name the text task to rehearse, as in --check addition."
            )
        if hint_guidance not in (None, 1) and not hint_top_k:
            raise UserError(
                "--hint-guidance is given without --hint-top-k: name the next tokens to compare, as in --hint-top-k 50."
            )
        served = {name: given.pop(name) for name in ("temperature", "check") if name in given}
        if "lora" in given:
            given["tuning"] = Tuning(lora=given.pop("lora"))
        config = live_settings.Config(model=pretrained.absolute(exported(model)), **given)
        settings = live_settings.Settings(host, port, place, where, ray=ray, **served)
    public = without_user(settings.score)
    place = place or settings.score
    settings = dataclasses.replace(settings, score=public)
    if ray:
        ray_cluster.connect(0, ray)[0].shutdown()  # raises: nothing runs there
    if settings.score:
        loops.scorer(dataclasses.replace(settings, score=place))  # raises a sentence before anything is started
    if settings.check:
        loops.checker(settings)
    folder.mkdir(parents=True, exist_ok=True)
    with lock.held(folder):  # two would delete each other's versions
        live_settings.write(folder, settings, config)
        store = Store(folder)
        train.begin(store, config.model)
        store.close()
        os.environ.pop(loops.TOKEN, None)
        os.environ.pop(loops.SCORER, None)
        if place != public:
            os.environ[loops.SCORER] = place  # the user and password of a URL stand in no file, as the token
        token = None if host in HERE else secrets.token_urlsafe(24)
        if token is not None:
            os.environ[loops.TOKEN] = token
        name = f"[{host}]" if ":" in host else host
        screen.note(
            f"Serving {config.model} at http://{name}:{port}/v1 (model: live), from {folder}. Stop it with Ctrl-C."
        )
        screen.note("Give X-Session-Id with each request: only turns of a session are kept.")
        if token is not None:
            screen.note(f"Token: {token}")
        if not settings.score:
            screen.note("There is no --score: turns are kept and not trained on.")
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        signal.signal(signal.SIGINT, lambda *_: stop.set())
        loops.supervise(folder, screen.note, stop)
    return 0


def _require_same(folder: Path, name: str, given: object, known: object) -> None:
    """Raise UserError for an option that differs from that of the live run in `folder`."""
    if given != known:
        option, value = name.replace("_", "-"), "not set" if known == "" else known
        raise UserError(
            f"--{option} of {folder} is {value} and does not change: leave it out, or start another run with --out."
        )


def _free(host: str, port: int) -> None:
    """Raise UserError if the port is taken or the host unknown."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, port))
        except OSError as error:
            raise UserError(
                f"Cannot listen on {host}:{port}: {error.strerror or error}. Choose another --port."
            ) from error


def _absolute(score: str) -> str:
    """The place of a function or folder, from anywhere."""
    file, colon, name = score.rpartition(":")
    if colon and file.endswith(".py"):
        return f"{Path(file).resolve()}:{name}"
    return str(Path(score).resolve()) if score and Path(score).is_dir() else score


def _status(store: object, json: bool) -> None:
    from foresight.agents.live.store import Store

    assert isinstance(store, Store)
    versions, counts = store.versions(), store.counts()
    if json:
        events = [{"kind": kind, "text": text} for kind, text in store.events()]
        document = {"active": store.active(), "turns": counts, "versions": versions, "events": events}
        screen.emit({**document, "paused": store.get("paused", False)})
        return
    out = screen.stdout()
    screen.table(out, ("turns", "number"), [(state, f"{n:,}") for state, n in counts.items() if n])
    keys = ("turns", "score", "hints", "kl", "staleness")
    cells = [(str(v["number"]), *(f"{v['metrics'].get(k, 0):.3g}" for k in keys)) for v in versions]
    screen.table(out, ("version", *keys), cells)
    out.print(f"active: version {store.active()}" + (", training paused" if store.get("paused", False) else ""))
    for kind, text in store.events():
        out.print(f"{kind}: {text}", markup=False, soft_wrap=True)
