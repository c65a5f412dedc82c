"""`foresight studio`: the page over runs, grids, searches and learned models."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import tyro

from foresight.cli import screen
from foresight.errors import UserError

DEFAULT = "runs"


def studio(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    port: int = 8765,
    host: str = "127.0.0.1",
    control: bool = False,
    model: str = "smollm2",
    browser: bool = True,
    export: str | None = None,
) -> int:
    """Open a page in the browser: runs as they train, grids solved step by step, searches, learned models.

    Args:
        runs: run directories, or folders that hold some; default: runs, if there is one.
        port: the port; if it is taken, the next free one.
        host: the address to listen on. Anything but this machine needs the token that is printed.
        control: allow the page to stop and resume runs; without it nothing is changed.
        model: the language model whose attention is shown on a typed text: smollm2, a Hugging Face folder or a hub id.
        browser: open the browser; with --no-browser, only the address is printed.
        export: write the runs as a static page into this new folder instead, to send around.
    """
    from foresight.studio import app, serve
    from foresight.studio import export as exports

    folders = runs or ((DEFAULT,) if Path(DEFAULT).is_dir() else ())
    if export is not None:
        if not folders:
            raise UserError("There are no runs to export. Name run directories: foresight studio RUN --export DIR")
        screen.stdout().print("Computing what the page shows without a server ...", markup=False)
        count = exports.write(folders, export, model)
        screen.stdout().print(
            f"{count} {'run' if count == 1 else 'runs'} in {Path(export) / 'index.html'}", markup=False
        )
        return 0
    if not 0 < port < 65_536:
        raise UserError(f"--port must be between 1 and 65535, not {port}.")
    token = None if host in serve.HERE else secrets.token_urlsafe(24)
    hosts = app.LOCAL if token is None else None
    taken = serve.listen(host, port)
    address = serve.address(host, taken.getsockname()[1], token)
    page = app.create(folders, hosts=hosts, token=token, control=control, model=model)
    screen.stdout().print(f"The studio is at {address}\nStop it with Ctrl-C.", markup=False, soft_wrap=True)
    serve.run(page, taken, address if browser else None)
    return 0
